"""Named small networks that every method must handle. All dimensions are distinct and greater than one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A network and a maker of inputs for a batch size. ``outputs``: shape of one sample's output."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    outputs: tuple[int, ...]

    def build(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(11)
        model = self.model().to(dtype).eval()
        for parameter in model.parameters():  # norm scales of one and biases of zero would hide mistakes
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
        for buffer_name, buffer in model.named_buffers():
            if "running" in buffer_name:
                buffer.data += torch.rand_like(buffer)
        return model

    def batch(self, size: int, dtype: torch.dtype = torch.float64, seed: int = 5) -> Any:
        torch.manual_seed(seed)
        return cast(self.inputs(size), dtype)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: cast(value, dtype) for key, value in tree.items()}
    return tuple(cast(value, dtype) for value in tree)


class Wrapped(nn.Module):
    """A forward given as a function of the module's parts."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.one, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.two, self.norm2 = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6)
        self.short = nn.Conv2d(4, 6, 1, stride=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.norm1(self.one(x)))
        x = F.relu(self.short(x) + self.norm2(self.two(x)))
        return self.head(x.mean((2, 3)))


def conv_zoo() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2, padding="same"), nn.Tanh(), nn.Conv2d(6, 6, (2, 3), groups=6, padding="same"),
        nn.GroupNorm(2, 6), nn.Tanh(), nn.Conv2d(6, 5, 2, dilation=2, stride=(1, 2)), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(20, 3), nn.Dropout(0.3),
    )  # fmt: skip


def conv_transpose() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.Tanh(), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=2), nn.GELU(), nn.Conv1d(4, 3, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    )


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    )


def attention() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        q = m.embed(x)
        y, _ = m.attend(q, q, q, need_weights=False)
        return m.head((q + y).mean(1))

    return Wrapped(
        run, embed=nn.Linear(5, 8), attend=nn.MultiheadAttention(8, 2, batch_first=True), head=nn.Linear(8, 3)
    )


def cross_attention() -> nn.Module:
    def run(m: Any, x: Tensor, memory: Tensor) -> Tensor:
        y, _ = m.attend(m.embed(x).transpose(0, 1), memory.transpose(0, 1), memory.transpose(0, 1))
        return m.head(y[-1])

    return Wrapped(run, embed=nn.Linear(5, 8), attend=nn.MultiheadAttention(8, 2), head=nn.Linear(8, 3))


def transformer() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.layer(m.embed(x) + m.place)[:, 0])

    return Wrapped(
        run, embed=nn.Linear(5, 8), place=nn.Parameter(torch.randn(4, 8)), head=nn.Linear(8, 3),
        layer=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0),
    )  # fmt: skip


def sdpa() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return m.head(y).mean(1)

    return Wrapped(run, qkv=nn.Linear(5, 24), head=nn.Linear(8, 3))


def embedding() -> nn.Module:
    def run(m: Any, tokens: Tensor) -> Tensor:
        return m.head(
            torch.tanh(m.table(tokens) + m.place(torch.arange(tokens.shape[1], device=tokens.device))).mean(1)
        )

    return Wrapped(run, table=nn.Embedding(7, 6, padding_idx=0), place=nn.Embedding(9, 6), head=nn.Linear(6, 3))


def tied() -> nn.Module:
    def run(m: Any, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(m.mix(m.table(tokens))), m.table.weight)

    return Wrapped(run, table=nn.Embedding(5, 4), mix=nn.Linear(4, 4))


def recurrent(kind: Any) -> Callable[[], nn.Module]:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.cell(x)[0][:, -1])

    return lambda: Wrapped(run, cell=kind(3, 5, num_layers=2, batch_first=True), head=nn.Linear(5, 2))


def called_twice() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.layer(torch.tanh(m.layer(m.first(x))))))

    return Wrapped(run, first=nn.Linear(3, 5), layer=nn.Linear(5, 5), head=nn.Linear(5, 2))


def shared_weight() -> nn.Module:
    one, two = nn.Linear(5, 5), nn.Linear(5, 5)
    two.weight = one.weight
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), one, nn.Tanh(), two, nn.Tanh(), nn.Linear(5, 2))


def frozen(weight: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: Any = mlp()
        (model[2].weight if weight else model[2].bias).requires_grad_(False)
        return model

    return make


def free_parameter() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x)) * m.scale
        return m.head(h.pow(2) * torch.exp(m.power).sum()) + x @ m.direct

    return Wrapped(
        run, first=nn.Linear(4, 6), scale=nn.Parameter(torch.randn(6)), power=nn.Parameter(torch.randn(2, 3) * 0.3),
        direct=nn.Parameter(torch.randn(4, 3)), head=nn.Linear(6, 3, bias=False),
    )  # fmt: skip


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))


def squeezed() -> nn.Module:
    return Wrapped(lambda m, x: m.net(x).squeeze(-1), net=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))


def token_level() -> nn.Module:
    def run(m: Any, tokens: Tensor) -> Tensor:
        x = m.table(tokens)
        return m.head(x + m.attend(x, x, x, need_weights=False)[0])

    return Wrapped(
        run, table=nn.Embedding(7, 4), attend=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 3)
    )


@dataclass
class Output:
    logits: Tensor


def dict_input() -> nn.Module:
    def run(m: Any, ids: Tensor, mask: Tensor) -> Output:
        return Output(m.head((m.table(ids) * mask[..., None]).sum(1)))

    return Wrapped(run, table=nn.Embedding(7, 4), head=nn.Linear(4, 3))


def tuple_input() -> nn.Module:
    return Wrapped(
        lambda m, x, y: m.head(torch.tanh(m.left(x) + m.right(y))),
        left=nn.Linear(3, 5),
        right=nn.Linear(4, 5),
        head=nn.Linear(5, 2),
    )


CASES = [
    Case("mlp", mlp, lambda b: torch.randn(b, 4), (3,)),
    Case("cnn", cnn, lambda b: torch.randn(b, 2, 7, 8), (3,)),
    Case("resnet_batchnorm", ResNet, lambda b: torch.randn(b, 2, 6, 8), (3,)),
    Case("conv_zoo", conv_zoo, lambda b: torch.randn(b, 4, 6, 9), (3,)),
    Case("conv_transpose", conv_transpose, lambda b: torch.randn(b, 2, 5, 6), (3,)),
    Case("conv1d", conv1d, lambda b: torch.randn(b, 2, 7), (3,)),
    Case("norms", norms, lambda b: torch.randn(b, 4), (3,)),
    Case("attention", attention, lambda b: torch.randn(b, 4, 5), (3,)),
    Case("cross_attention", cross_attention, lambda b: (torch.randn(b, 4, 5), torch.randn(b, 6, 8)), (3,)),
    Case("transformer_layer", transformer, lambda b: torch.randn(b, 4, 5), (3,)),
    Case("sdpa", sdpa, lambda b: torch.randn(b, 3, 5), (3,)),
    Case("embedding", embedding, lambda b: torch.randint(0, 7, (b, 4)), (3,)),
    Case("tied", tied, lambda b: torch.randint(0, 5, (b,)), (5,)),
    Case("lstm", recurrent(nn.LSTM), lambda b: torch.randn(b, 4, 3), (2,)),
    Case("gru", recurrent(nn.GRU), lambda b: torch.randn(b, 4, 3), (2,)),
    Case("called_twice", called_twice, lambda b: torch.randn(b, 3), (2,)),
    Case("shared_weight", shared_weight, lambda b: torch.randn(b, 3), (2,)),
    Case("frozen_weight", frozen(True), lambda b: torch.randn(b, 4), (3,)),
    Case("frozen_bias", frozen(False), lambda b: torch.randn(b, 4), (3,)),
    Case("free_parameter", free_parameter, lambda b: torch.randn(b, 4), (3,)),
    Case("weight_norm", weight_norm, lambda b: torch.randn(b, 4), (3,)),
    Case("squeezed", squeezed, lambda b: torch.randn(b, 4), (1,)),
    Case("token_level", token_level, lambda b: torch.randint(0, 7, (b, 4)), (4, 3)),
    Case("dict_input", dict_input, lambda b: {"ids": torch.randint(0, 7, (b, 4)), "mask": torch.rand(b, 4)}, (3,)),
    Case("tuple_input", tuple_input, lambda b: (torch.randn(b, 3), torch.randn(b, 4)), (2,)),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
