"""A check that a model still has the weights that a posterior was fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from lapwing.errors import ModelError


@dataclass(frozen=True)
class Fingerprint:
    """The norm of every parameter and buffer, and its product with a fixed pattern, which depends on every entry.

    ``quick`` holds the products in the dtype of the parameters: while they are the same to the bit, one fast read of
    the weights is enough. Only if they are not (other weights, another number of threads) are the float64 figures
    compared.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    marks: tuple[float, ...]
    norms: tuple[float, ...]
    quick: tuple[float, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        """Return the fingerprint of a model as it is."""
        named = (*model.named_parameters(), *model.named_buffers())
        tensors: dict[str, Tensor] = {name: t for name, t in named if t.is_floating_point()}
        with torch.no_grad():
            marks = [_mark(t.double()) for t in tensors.values()]
            norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors.values()]
            numbers = torch.stack([*marks, *norms]).tolist()
        shapes = tuple(tuple(t.shape) for t in tensors.values())
        return cls(tuple(tensors), shapes, tuple(numbers[: len(marks)]), tuple(numbers[len(marks) :]), _quick(model))

    def refuse_other(self, model: nn.Module, tolerance: float = 1e-9) -> None:
        """Raise unless the model's parameters are those of the fingerprint."""
        if self.quick and _quick(model) == self.quick:
            return
        now = Fingerprint.of(model)
        if now.names != self.names or now.shapes != self.shapes:
            pairs = [set(zip(one.names, one.shapes, strict=True)) for one in (self, now)]
            different = sorted(pairs[0] ^ pairs[1])[:4]
            raise ModelError(
                f"the model has other parameters than the posterior was fitted to: {different}. Fit it again."
            )
        for i, name in enumerate(self.names):
            scale = max(self.norms[i], 1e-30)
            if (
                not abs(now.norms[i] - self.norms[i]) <= tolerance * scale
                or not abs(now.marks[i] - self.marks[i])
                <= tolerance * scale * max(1, torch.Size(self.shapes[i]).numel()) ** 0.5
            ):
                then, later = f"{self.norms[i]:.9g}", f"{now.norms[i]:.9g}"
                change = f"norm {then} then, {later} now" if then != later else "its entries, at the same norm"
                raise ModelError(
                    f"the parameter {name!r} has changed since the fit ({change}); the error bars would belong to "
                    "another network. Restore it or fit again."
                )


def _quick(model: nn.Module) -> tuple[float, ...]:
    with torch.no_grad():
        marks = [_mark(t) for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
        return tuple(torch.stack(marks).tolist()) if len({m.dtype for m in marks}) == 1 else tuple(map(float, marks))


def _mark(t: Tensor) -> Tensor:
    """Return p · T q for a matrix T and fixed patterns p, q. Cost: one read of T, as in a forward pass."""
    t = t.detach()
    if t.dtype not in (torch.float32, torch.float64):  # 16-bit sums lose changes, and 16-bit kernels may fail
        t = t.float()
    if t.ndim < 2:
        return torch.dot(t.reshape(-1), _pattern(t.numel(), 0.0, t.dtype, t.device))
    rows = t.flatten(1)
    across = rows @ _pattern(rows.shape[1], 1.0, t.dtype, t.device)
    return torch.dot(across, _pattern(len(rows), 0.0, t.dtype, t.device))


@lru_cache(maxsize=256)
def _pattern(size: int, phase: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fixed numbers around one, all different, and different for rows and columns.

    So the product changes if entries change, or are swapped, shifted or transposed.
    """
    steps = torch.arange(size, dtype=torch.float64, device=device)
    return (1.5 + (steps * 0.7548776662 + phase).sin_()).to(dtype)
