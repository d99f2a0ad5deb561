"""Whether a model still has the weights that a posterior was fitted to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.core.errors import ModelError


@dataclass(frozen=True)
class Fingerprint:
    """Sum and norm of every parameter and buffer.

    ``quick`` holds the sums in the parameters' own dtype: while they are the same to the bit, one fast read of the
    weights settles the question. Only if they are not (other weights, another number of threads) do the exact
    figures decide.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[float, ...]
    norms: tuple[float, ...]
    quick: tuple[float, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        tensors = _state(model)
        with torch.no_grad():
            sums = [t.sum(dtype=torch.float64) for t in tensors.values()]
            norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors.values()]
            numbers = torch.stack([*sums, *norms]).tolist()
        shapes = tuple(tuple(t.shape) for t in tensors.values())
        return cls(tuple(tensors), shapes, tuple(numbers[: len(sums)]), tuple(numbers[len(sums) :]), _quick(tensors))

    def refuse_other(self, model: nn.Module, tolerance: float = 1e-9) -> None:
        """Raise unless the model's parameters are those of the fingerprint."""
        if self.quick and _quick(_state(model)) == self.quick:
            return
        now = Fingerprint.of(model)
        if now.names != self.names or now.shapes != self.shapes:
            ours, theirs = (
                dict(zip(self.names, self.shapes, strict=True)),
                dict(zip(now.names, now.shapes, strict=True)),
            )
            odd = sorted(set(ours.items()) ^ set(theirs.items()))[:4]
            raise ModelError(f"the model has other parameters than the posterior was fitted to: {odd}. Fit it again.")
        for i, name in enumerate(self.names):
            scale = max(self.norms[i], 1e-30)
            # A sum of P terms rounds relative to its norm times the root of P.
            width = max(1, torch.Size(self.shapes[i]).numel()) ** 0.5
            if (
                not abs(now.norms[i] - self.norms[i]) <= tolerance * scale
                or not abs(now.sums[i] - self.sums[i]) <= tolerance * scale * width
            ):
                raise ModelError(
                    f"the parameter {name!r} has changed since the fit (norm {self.norms[i]:.9g} then, "
                    f"{now.norms[i]:.9g} now); the error bars would belong to another network. Restore it or fit again."
                )


def _quick(tensors: dict[str, Tensor]) -> tuple[float, ...]:
    with torch.no_grad():
        return tuple(torch.stack([t.sum().float() for t in tensors.values()]).tolist())


def _state(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(model.named_parameters())
    found.update({name: b for name, b in model.named_buffers() if b.is_floating_point()})
    return {name: t for name, t in found.items() if t.is_floating_point()}
