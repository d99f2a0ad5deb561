"""Small transformers in plain torch: a classifier of sentences, a language model, adapters, and their training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.language_data import IGNORED, PAD, Batch, inputs_of


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1


@dataclass(frozen=True)
class Training:
    """Settings of Adam; the learning rate falls to zero by a cosine."""

    epochs: int
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2  # decoupled


class Attention(nn.Module):
    """Attention of every word to the words that the mask (B, 1, T or 1, T) allows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, h: Tensor, allowed: Tensor) -> Tensor:
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = split(self.query(h)), split(self.key(h)), split(self.value(h))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~allowed, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and two linear maps, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(shape.width), Attention(shape.width, shape.heads)
        self.inner = nn.Sequential(
            nn.LayerNorm(shape.width), nn.Linear(shape.width, 2 * shape.width), nn.GELU(),
            nn.Linear(2 * shape.width, shape.width),
        )  # fmt: skip
        self.drop, self.drop_inner = nn.Dropout(shape.dropout), nn.Dropout(shape.dropout)

    def forward(self, h: Tensor, allowed: Tensor) -> Tensor:
        h = h + self.drop(self.attention(self.norm(h), allowed))
        return h + self.drop_inner(self.inner(h))  # type: ignore[no-any-return]


class Body(nn.Module):
    """Words to vectors (B, T, width). Positions are fixed sines, so that no parameter is shared by all samples."""

    def __init__(self, words: int, shape: Shape, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(words, shape.width, padding_idx=PAD)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = self.drop(self.embed(tokens) + sines(tokens.shape[1], self.embed.weight))
        allowed = mask[:, None, None]
        if self.causal:
            allowed = allowed & torch.ones(2 * (tokens.shape[1],), dtype=torch.bool, device=tokens.device).tril()
        for block in self.blocks:
            h = block(h, allowed)
        return self.norm(h)  # type: ignore[no-any-return]


def sines(length: int, like: Tensor) -> Tensor:
    """Return sines and cosines of the positions, (T, width), a tenth as large as usual."""
    width = like.shape[1]
    rates = torch.exp(torch.arange(0, width, 2, device=like.device) * (-math.log(1e3) / width))
    angles = torch.arange(length, device=like.device)[:, None] * rates
    return 0.1 * torch.cat([angles.sin(), angles.cos()], 1).to(like.dtype)


class Classifier(nn.Module):
    """The mean over the words of a sentence, and a linear map to two classes."""

    def __init__(self, body: Body, classes: int = 2) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(body.embed.embedding_dim, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weight = attention_mask.to(self.head.weight.dtype)
        pooled = (self.body(input_ids, attention_mask) * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
        return self.head(pooled)  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Logits of the next word at every position, (B, T, V)."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(body.embed.embedding_dim, body.embed.num_embeddings)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.body(input_ids, attention_mask))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen linear map with a trained map of low rank beside it (LoRA; Hu et al. 2021)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.lora_a = nn.Linear(frozen.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)  # so that training starts at the frozen network

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + 2 * self.lora_b(self.lora_a(x))  # type: ignore[no-any-return]


def adapted(body: Body, rank: int, seed: int) -> Classifier:
    """Return a classifier on the body, which is frozen but for adapters at all its linear maps. Changes the body."""
    body.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parent in list(body.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child, rank))
        return Classifier(body)


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a new network. The global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def optimise(model: nn.Module, data: Sequence[Batch], training: Training, seed: int) -> None:
    """Train the parameters that require a gradient, on the batches in random order; leave evaluation mode on."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, training.learning_rate, weight_decay=training.weight_decay, fused=True)
    steps = training.epochs * len(data)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # of the dropout
        for _ in range(training.epochs):
            for i in torch.randperm(len(data), generator=generator).tolist():
                f, y = model(**inputs_of(data[i])), data[i]["labels"]
                optimiser.zero_grad()
                F.cross_entropy(f.flatten(0, -2), y.flatten(), ignore_index=IGNORED).backward()
                optimiser.step()
                falling.step()
    optimiser.zero_grad()
    model.eval()


def now(device: str) -> float:
    """Return the seconds that this process has computed, so that others on the machine do not count.

    On a GPU it is the time of the clock, after all that was asked of it is done.
    """
    if not device.startswith("cuda"):
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def passes(model: nn.Module, train: Sequence[Batch], test: Sequence[Batch], device: str) -> dict[str, float]:
    """Return the seconds of an epoch without the optimiser, and of a forward pass over the test data."""
    parameters, start = [p for p in model.parameters() if p.requires_grad], now(device)
    for batch in train:
        f = model(**inputs_of(batch)).flatten(0, -2)
        loss = F.cross_entropy(f, batch["labels"].flatten(), ignore_index=IGNORED)
        torch.autograd.grad(loss, parameters)
    epoch = now(device) - start
    start = now(device)
    with torch.no_grad():
        for batch in test:
            model(**inputs_of(batch))
    return {"epoch": epoch, "forward pass": now(device) - start}
