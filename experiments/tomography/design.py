"""The choice of the next angles of a scan: those that a Gaussian belief about the image expects to learn most from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lapwing.errors import DataError, NumericalError
from lapwing.linalg.operators import SparseOperator
from lapwing.runtime.settings import POSITIVE, Rule, describe, integer, one_of
from lapwing.runtime.threads import normal

SQUARE = Rule(
    "a symmetric, finite float64 matrix (pixels, pixels)",
    lambda v: v.dtype == torch.float64 and v.ndim == 2 and v.isfinite().all() and _is_symmetric(v),
    DataError,
)
SAMPLES = Rule(
    "finite float32 or float64 samples (K, pixels), at least two",
    lambda v: v.is_floating_point() and v.ndim == 2 and len(v) > 1 and v.isfinite().all(),
    DataError,
)


class Belief(Protocol):
    """A Gaussian belief about an image. Its mean plays no role for the choice of angles."""

    @property
    def size(self) -> int:
        """The number of pixels."""
        ...

    def projected(self, operator: SparseOperator) -> Tensor:
        """Return the covariance A Σ Aᵀ (rows, rows) of measurements without noise."""
        ...

    def conditioned(
        self, operator: SparseOperator, noise_std: float, generator: torch.Generator | None = None
    ) -> Belief:
        """Return the belief after measurements y = A x + η, whose values need not be known."""
        ...


@dataclass(frozen=True, eq=False)
class DenseBelief:
    """A belief with a covariance Σ (pixels, pixels), float64.

    >>> operator = SparseOperator.from_entries(torch.tensor([0]), torch.tensor([1]), torch.ones(1).double(), (1, 2))
    >>> DenseBelief(torch.eye(2).double()).conditioned(operator, noise_std=1.0).covariance
    tensor([[1.0000, 0.0000],
            [0.0000, 0.5000]], dtype=torch.float64)
    """

    covariance: Tensor

    def __post_init__(self) -> None:
        SQUARE.check("covariance", self.covariance)

    @property
    def size(self) -> int:
        return len(self.covariance)

    def projected(self, operator: SparseOperator) -> Tensor:
        return _symmetric(operator.forward(operator.forward(self.covariance).mT))

    def conditioned(
        self, operator: SparseOperator, noise_std: float, generator: torch.Generator | None = None
    ) -> DenseBelief:
        cross = operator.forward(self.covariance).mT  # A Σ, (rows, pixels)
        factor = _factor(_symmetric(operator.forward(cross)), noise_std)
        half = torch.linalg.solve_triangular(factor, cross, upper=False)
        return DenseBelief(_symmetric(self.covariance - half.mT @ half))


@dataclass(frozen=True, eq=False)
class SampledBelief:
    """A belief given by samples (K, pixels), whose covariance is that of the belief.

    There should be many more samples than detector bins: scores of K samples have relative errors of about √(2/K), and
    the gain by which samples are updated has one of √(bins/K).
    """

    samples: Tensor

    def __post_init__(self) -> None:
        SAMPLES.check("samples", self.samples)

    @property
    def size(self) -> int:
        return self.samples.shape[1]

    @cached_property
    def _deviations(self) -> Tensor:
        """The samples around their mean, scaled so that their squares add up to the covariance."""
        return (self.samples - self.samples.mean(0)) / (len(self.samples) - 1) ** 0.5

    def projected(self, operator: SparseOperator) -> Tensor:
        measured = operator.forward(self._deviations)
        return measured.mT @ measured

    def conditioned(
        self, operator: SparseOperator, noise_std: float, generator: torch.Generator | None = None
    ) -> SampledBelief:
        """Return samples of the belief after a measurement, by Matheron's rule: x + G (0 - A x - η).

        The measured values are taken to be zero. Others would move all samples by the same image, which changes no
        covariance.
        """
        measured = operator.forward(self._deviations)
        factor = _factor(measured.mT @ measured, noise_std)
        predicted = operator.forward(self.samples)
        predicted = predicted + noise_std * normal(tuple(predicted.shape), generator, predicted)
        weights = torch.cholesky_solve(predicted.mT, factor).mT  # (K, rows)
        return SampledBelief(self.samples - weights @ (measured.mT @ self._deviations))


def information_gain(belief: Belief, operator: SparseOperator, noise_std: float) -> Tensor:
    r"""Return the expected information gain of measurements y = A x + η, in nats.

    $$ \tfrac12 \log\det(I + A \Sigma A^\top / \sigma^2) $$

    Args:
        belief: the belief about the image before the measurements.
        operator: the matrix A.
        noise_std: σ, the standard deviation of η.

    >>> operator = SparseOperator.from_entries(torch.tensor([0]), torch.tensor([1]), torch.ones(1).double(), (1, 2))
    >>> information_gain(DenseBelief(torch.eye(2).double()), operator, noise_std=1.0)
    tensor(0.3466, dtype=torch.float64)
    """
    POSITIVE.check("noise_std", noise_std)
    return _information(_projected(belief, operator), noise_std)


def squared_error(belief: Belief, operator: SparseOperator) -> Tensor:
    """Return the expected squared error tr(A Σ Aᵀ) of measurements A x without noise, as the belief predicts them.

    >>> operator = SparseOperator.from_entries(torch.tensor([0]), torch.tensor([1]), torch.ones(1).double(), (1, 2))
    >>> squared_error(DenseBelief(torch.eye(2).double()), operator)
    tensor(1., dtype=torch.float64)
    """
    return _projected(belief, operator).trace()


def _information(projected: Tensor, noise_std: float) -> Tensor:
    return _factor(projected / noise_std**2, 1.0).diagonal().log().sum()


# Scores of a covariance A Σ Aᵀ under noise of a standard deviation; the largest is the best.
CRITERIA: dict[str, Callable[[Tensor, float], Tensor]] = {
    "information": _information,
    "error": lambda projected, noise_std: projected.trace(),
}


@dataclass(frozen=True, eq=False)
class Choice:
    """Chosen candidates in order, with the score that each had when it was chosen, and the belief after all of them."""

    chosen: tuple[int, ...]
    scores: tuple[float, ...]
    belief: Belief


def choose_angles(
    belief: Belief,
    candidates: Sequence[SparseOperator],
    count: int,
    noise_std: float,
    criterion: str = "information",
    generator: torch.Generator | None = None,
) -> Choice:
    """Choose the next angles one after another, each by the belief that is conditioned on those before.

    Args:
        belief: the belief about the image, given all measurements so far.
        candidates: the ray transforms of the angles to choose from; see ``angle_operators``.
        count: how many to choose; no candidate is chosen twice.
        noise_std: the standard deviation of the noise of measurements.
        criterion: "information" for the expected information gain, or "error" for the expected squared error of
            predicted measurements.
        generator: the source of randomness, for a belief that is given by samples.

    Raises:
        DataError: if there are fewer candidates than angles to choose, or a candidate is for images of another size.
    """
    one_of(CRITERIA).check("criterion", criterion)
    POSITIVE.check("noise_std", noise_std)
    integer().check("count", count)
    if len(candidates) < count:
        raise DataError(f"count is {count}; expected at most {len(candidates)}, the number of candidates.")
    left = dict(enumerate(candidates))
    chosen, scores = [], []
    for _ in range(count):
        values = torch.stack([CRITERIA[criterion](_projected(belief, one), noise_std) for one in left.values()])
        best = list(left)[int(values.argmax())]
        chosen.append(best)
        scores.append(float(values.max()))
        belief = belief.conditioned(left.pop(best), noise_std, generator)
    return Choice(tuple(chosen), tuple(scores), belief)


def _factor(covariance: Tensor, noise_std: float) -> Tensor:
    """Return the Cholesky factor of the covariance of noisy measurements."""
    POSITIVE.check("noise_std", noise_std)
    noise = noise_std**2 * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    factor, info = torch.linalg.cholesky_ex(covariance + noise)
    if int(info):
        raise NumericalError(
            "the covariance of the measurements is not positive definite; expected a belief whose covariance has no "
            "negative eigenvalues. Compute it in float64, or remove its negative eigenvalues."
        )
    return factor


def _projected(belief: Belief, operator: SparseOperator) -> Tensor:
    """Return A Σ Aᵀ; raise if the operator is for images of another size."""
    if not isinstance(operator, SparseOperator):
        raise DataError(f"a candidate is {describe(operator)}; expected a SparseOperator.")
    if operator.size != belief.size:
        raise DataError(f"a candidate is for {operator.size} pixels; expected {belief.size}, as the belief.")
    return belief.projected(operator)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _is_symmetric(matrix: Tensor) -> bool:
    gap = (matrix - matrix.mT).abs().max()
    return bool(gap <= 1e-8 * matrix.abs().max())
