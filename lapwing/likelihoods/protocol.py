"""What a likelihood must offer. log p(y | f) = -loss(f, y) / phi - c(phi)."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian
from lapwing.errors import DataError


@runtime_checkable
class Likelihood(Protocol):
    """How targets depend on outputs. All methods take f (B, [T,] C) and treat every token as a datum."""

    @property
    def dispersion(self) -> Tensor:
        """phi: the noise variance or the temperature, a scalar."""
        ...

    @property
    def learns_dispersion(self) -> bool:
        """Whether fitting may set the dispersion."""
        ...

    def with_dispersion(self, phi: Tensor) -> Likelihood: ...

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        """The targets in the shape and dtype the rest expects; raises where they do not fit."""
        ...

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """(B, [T]) at unit dispersion, zero for ignored data."""
        ...

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        """R (B, [T,] C, K) with R Rᵀ the Hessian of the loss in f, or the Fisher matrix where that is indefinite."""
        ...

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        """The gradient of the loss in f at a label drawn from the model, (B, [T,] C)."""
        ...

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        """How many data count (ignored ones do not); a tensor where the answer is on a device."""
        ...

    def log_normaliser(self, phi: Tensor, outputs: int) -> Tensor:
        """c(phi) of one datum."""
        ...

    def predict(self, belief: FunctionGaussian) -> Any:
        """The predictive over y, for each input by itself."""
        ...

    def settings(self) -> dict[str, Any]:
        """What a file needs to build the likelihood again."""
        ...


@runtime_checkable
class NeedsResiduals(Protocol):
    """A likelihood that must see the residuals before the curvature can be computed."""

    @property
    def needs_residuals(self) -> bool: ...

    def prepared(self, mean_squared_residual: Tensor) -> Likelihood:
        """Given the residual of each output (C,), fix what cannot be changed after the curvature is known."""
        ...


@runtime_checkable
class Logits(Protocol):
    """A likelihood whose outputs are logits: around zero and of order one, whatever the targets."""

    @property
    def ignores_common_shift(self) -> bool:
        """Whether adding one number to all logits of an input changes nothing, as with a softmax."""
        ...


@runtime_checkable
class AdditiveNoise(Protocol):
    """A likelihood whose targets are the outputs plus noise, in the same units."""

    @property
    def noise_variance(self) -> Tensor:
        """The variance of the noise, () or (C,)."""
        ...


@runtime_checkable
class ChecksOutputs(Protocol):
    """A likelihood that can tell from the outputs of a network that they are not what it takes."""

    def check_outputs(self, f: Tensor) -> None: ...


@runtime_checkable
class IgnoresTargets(Protocol):
    """A likelihood that ignores targets equal to ``ignore_index``; None means that it ignores none."""

    @property
    def ignore_index(self) -> int | None: ...


def positive(value: Any, zero: bool = False) -> bool:
    """Whether all numbers are finite and above zero, or at least zero."""
    numbers = torch.as_tensor(value).detach().double()
    return bool(torch.isfinite(numbers).all()) and bool(((numbers >= 0) if zero else (numbers > 0)).all())


def matched(f: Tensor, y: Tensor, name: str) -> Tensor:
    """Targets with one number per output, (B, [T,] C); a single output may come without its dimension."""
    if y.shape == f.shape:
        return y.to(f.dtype)
    if f.shape[-1] == 1 and y.shape == f.shape[:-1]:
        return y.unsqueeze(-1).to(f.dtype)
    raise DataError(
        f"{name}: targets have the shape {tuple(y.shape)} and outputs {tuple(f.shape)}; expected the same shape"
        + (f" or {tuple(f.shape[:-1])}" if f.shape[-1] == 1 else "")
        + ". Reshape the targets, or choose the likelihood that fits the output."
    )
