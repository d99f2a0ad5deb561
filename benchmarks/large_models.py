"""The large networks of benchmarks/scale.py, and the same in small for a CPU. Needs torch alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3 and 1x1 with normalisation, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """A ResNet-50, 25.6 M weights with 1,000 classes; ``width`` and ``depths`` make it smaller."""

    def __init__(self, classes: int, width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        ]  # fmt: skip
        inputs = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
                inputs = 4 * (width << stage)
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).mean((2, 3)))


class Attention(nn.Module):
    """Attention with several heads."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv: nn.Linear | Adapted = nn.Linear(width, 3 * width)
        self.out: nn.Linear | Adapted = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A transformer layer: attention and an MLP, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer; as given ViT-B/16, 85.8 M weights with 10 classes."""

    def __init__(self, classes: int, size: int = 224, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 1 + (size // 16) ** 2, width) * 0.02)
        self.layers = nn.Sequential(*[Layer(width, heads, causal=False) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1) + self.places
        return self.head(self.norm(self.layers(tokens))[:, 0])


class Adapted(nn.Module):
    """A linear layer that stays as it is, with a low-rank change that is learned (LoRA)."""

    def __init__(self, layer: Any, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class GPT(nn.Module):
    """A causal transformer; with the vocabulary 32,000 of GPT-2's size, 110 M weights.

    With ``classes`` it gives logits of classes from its last token, without it logits of the next token, by a head
    that is not tied to the embedding.
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int | None,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        length: int = 128,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*[Layer(width, heads, causal=True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes or vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.norm(self.layers(x))
        return self.head(x if self.classes is None else x[:, -1])

    def adapted(self, rank: int = 8) -> GPT:
        """Return the network with adapters at the attention's inputs and outputs; the rest needs no gradients."""
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        for attention in [module for module in self.modules() if isinstance(module, Attention)]:
            attention.qkv, attention.out = Adapted(attention.qkv, rank), Adapted(attention.out, rank)
        self.head.requires_grad_(True)
        return self


class UNet(nn.Module):
    """A small U-Net with a value for each pixel."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU())
        self.down1, self.down2, self.bottom = (
            block(1, channels),
            block(channels, 2 * channels),
            block(2 * channels, 2 * channels),
        )
        self.up, self.out = block(4 * channels, channels), nn.Conv2d(2 * channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.avg_pool2d(one, 2))
        low = F.interpolate(self.bottom(F.avg_pool2d(two, 2)), scale_factor=2.0)
        high = F.interpolate(self.up(torch.cat([two, low], 1)), scale_factor=2.0)
        return self.out(torch.cat([one, high], 1)).flatten(1)
