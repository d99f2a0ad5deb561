"""A check that a model still has the weights that a posterior was fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from lapwing.errors import ModelError


@dataclass(frozen=True)
class Fingerprint:
    """The norm of every parameter and buffer of any dtype, and its product with a fixed pattern of all entries.

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
        tensors: dict[str, Tensor] = dict((*model.named_parameters(), *model.named_buffers()))
        with torch.no_grad():
            marks = [_mark(t, torch.float64) for t in tensors.values()]
            norms = [_norm(t) for t in tensors.values()]
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
        marks = [_mark(t, torch.float32).double() for t in (*model.parameters(), *model.buffers())]
        return tuple(torch.stack(marks).tolist())


def _norm(t: Tensor) -> Tensor:
    """Return the norm; zero for whole numbers and truth values, which must be the same to the last digit."""
    if not (t.is_floating_point() or t.is_complex()):
        return torch.zeros((), dtype=torch.float64, device=t.device)
    return torch.linalg.vector_norm(t.detach(), dtype=torch.complex128 if t.is_complex() else torch.float64).double()


def _mark(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return p · T q for a matrix T and fixed patterns p, q. Cost: one read of T, as in a forward pass.

    ``dtype`` is the least for real numbers: sums of 16-bit ones lose changes, and their kernels may fail. Whole numbers
    have an exact sum, to 53 bits.
    """
    t = torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
    if not t.is_floating_point():
        steps = (2 * torch.arange(t.numel(), device=t.device) + 1) * 0x1E3779B97F4A7C15
        return ((t.reshape(-1).long() * steps).sum() & (2**53 - 1)).double()
    t = t if t.dtype == torch.float64 else t.to(dtype)
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
