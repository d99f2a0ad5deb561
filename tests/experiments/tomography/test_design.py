"""The choice of angles, against log-determinants of the whole scan that are computed from scratch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.tomography.design import DenseBelief, SampledBelief, choose_angles, information_gain, squared_error
from experiments.tomography.geometry import ParallelBeam
from experiments.tomography.rays import angle_operators
from lapwing.errors import DataError, LapwingError, NumericalError
from lapwing.runtime.threads import normal
from tests.tolerances import assert_close

D = torch.float64
SIZE, BINS, NOISE = 5, 7, 0.3
BEAM = ParallelBeam(SIZE, angles=(0.1, 0.7, 1.2, 1.6, 2.4, 2.9), bins=BINS)
CANDIDATES = angle_operators(BEAM)


def covariance() -> Tensor:
    """A belief that knows little about the upper left of the image, and nothing exactly."""
    generator = torch.Generator().manual_seed(5)
    root = torch.randn(SIZE**2, SIZE**2, generator=generator, dtype=D) / SIZE
    scale = torch.linspace(2, 0.1, SIZE**2, dtype=D)
    return scale[:, None] * (root @ root.T + 0.1 * torch.eye(SIZE**2, dtype=D)) * scale


def stacked(chosen: Sequence[int]) -> Tensor:
    return torch.cat([CANDIDATES[c].dense() for c in chosen])


def log_det(chosen: Sequence[int]) -> float:
    """Return log det(I + A Σ Aᵀ / σ²) of all angles together."""
    if not chosen:
        return 0.0
    matrix = stacked(chosen)
    return float(torch.logdet(torch.eye(len(matrix), dtype=D) + matrix @ covariance() @ matrix.T / NOISE**2))


def after(chosen: Sequence[int]) -> Tensor:
    """Return the covariance after these angles, from the sum of the precisions."""
    matrix = stacked(chosen)
    return torch.linalg.inv(torch.linalg.inv(covariance()) + matrix.T @ matrix / NOISE**2)


def by_hand(count: int, criterion: str) -> tuple[list[int], list[float]]:
    """Choose greedily, with everything computed again for each candidate."""
    chosen: list[int] = []
    scores: list[float] = []
    for _ in range(count):
        known = after(chosen) if chosen else covariance()
        rest = [c for c in range(len(CANDIDATES)) if c not in chosen]
        if criterion == "information":
            values = [0.5 * (log_det([*chosen, c]) - log_det(chosen)) for c in rest]
        else:
            values = [float(torch.trace(stacked([c]) @ known @ stacked([c]).T)) for c in rest]
        scores.append(max(values))
        chosen.append(rest[values.index(max(values))])
    return chosen, scores


def test_scores_of_one_angle() -> None:
    belief = DenseBelief(covariance())
    for number, operator in enumerate(CANDIDATES):
        gain, error = information_gain(belief, operator, NOISE), squared_error(belief, operator)
        assert float(gain) == pytest.approx(0.5 * log_det([number]), rel=1e-9)
        matrix = operator.dense()
        assert float(error) == pytest.approx(float((matrix @ covariance() * matrix).sum()), rel=1e-9)


@pytest.mark.parametrize("criterion", ["information", "error"])
def test_greedy_choices_are_those_of_brute_force(criterion: str) -> None:
    choice = choose_angles(DenseBelief(covariance()), CANDIDATES, 4, NOISE, criterion)
    chosen, scores = by_hand(4, criterion)
    assert list(choice.chosen) == chosen
    assert list(choice.scores) == pytest.approx(scores, rel=1e-7)
    assert isinstance(choice.belief, DenseBelief)
    assert_close(choice.belief.covariance, after(chosen), 1 / 2)


def test_the_two_criteria_differ() -> None:
    """Otherwise the test above would not tell them apart."""
    assert by_hand(4, "information")[0] != by_hand(4, "error")[0]


def test_all_candidates_gain_what_the_whole_scan_gains() -> None:
    """The chain rule of information; every candidate once."""
    choice = choose_angles(DenseBelief(covariance()), CANDIDATES, 6, NOISE)
    assert sorted(choice.chosen) == list(range(6))
    assert sum(choice.scores) == pytest.approx(0.5 * log_det(range(6)), rel=1e-8)


def samples(count: int, seed: int) -> Tensor:
    """Return samples around an image that is not zero."""
    root = torch.linalg.cholesky(covariance())
    draws = normal((count, SIZE**2), torch.Generator().manual_seed(seed), root)
    return 3.0 + draws @ root.T


def test_scores_of_samples() -> None:
    """The log-determinant of a covariance of K samples has variance 2 BINS / K at most, and a small bias BINS²/K."""
    count = 4000
    belief = SampledBelief(samples(count, 0))
    error_bar = 0.5 * (5 * (2 * BINS / count) ** 0.5 + BINS**2 / count)
    for number, operator in enumerate(CANDIDATES):
        assert abs(float(information_gain(belief, operator, NOISE)) - 0.5 * log_det([number])) < error_bar
        exact = stacked([number]) @ covariance() @ stacked([number]).T
        spread = (2 * float(exact.square().sum()) / count) ** 0.5  # of the trace
        assert abs(float(squared_error(belief, operator)) - float(exact.trace())) < 5 * spread


def test_samples_are_conditioned_as_the_covariance() -> None:
    """Covariances of K samples have entries with a standard error of at most √2 v / √K, for the largest variance v."""
    count = 8000
    generator = torch.Generator().manual_seed(1)
    belief = SampledBelief(samples(count, 2))
    for number in (2, 4):
        belief = belief.conditioned(CANDIDATES[number], NOISE, generator)
    known = after((2, 4))
    deviations = (belief.samples - belief.samples.mean(0)) / known.diagonal().sqrt()
    correlations = known / (known.diagonal()[:, None] * known.diagonal()).sqrt()
    gap = (deviations.T @ deviations / (count - 1) - correlations).abs().max()
    # five standard errors, and the bias of two gains that were estimated from the same samples
    assert float(gap) < 5 * (2 / count) ** 0.5 + 20 * BINS / count


@pytest.mark.parametrize(("criterion", "count"), [("information", 2), ("error", 1)])
def test_samples_choose_as_the_covariance(criterion: str, count: int) -> None:
    """The best candidate is ahead by 8 % and 5 %; the scores have Monte Carlo errors of 1 %."""
    generator = torch.Generator().manual_seed(3)
    choice = choose_angles(SampledBelief(samples(8000, 4)), CANDIDATES, count, NOISE, criterion, generator)
    exact = choose_angles(DenseBelief(covariance()), CANDIDATES, count, NOISE, criterion)
    assert choice.scores == pytest.approx(exact.scores, rel=0.05)
    assert choice.chosen == exact.chosen


def test_float32_samples() -> None:
    candidates = angle_operators(BEAM, dtype=torch.float32)
    many = samples(500, 6)
    choice = choose_angles(
        SampledBelief(many.float()), candidates, 2, NOISE, generator=torch.Generator().manual_seed(0)
    )
    wide = choose_angles(SampledBelief(many), CANDIDATES, 1, NOISE, generator=torch.Generator().manual_seed(0))
    assert choice.scores[0] == pytest.approx(wide.scores[0], rel=1e-4)
    assert isinstance(choice.belief, SampledBelief)
    assert choice.belief.samples.dtype == torch.float32


@pytest.mark.parametrize(
    "matrix",
    [
        torch.eye(4),
        torch.ones(3, 4, dtype=D),
        torch.full((3, 3), torch.nan, dtype=D),
        torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=D),
        [[1.0]],
        None,
    ],
)
def test_other_covariances_are_refused(matrix: Any) -> None:
    with pytest.raises(DataError, match=r"covariance is .*expected a symmetric, finite float64 matrix"):
        DenseBelief(matrix)


@pytest.mark.parametrize(
    "given",
    [torch.ones(1, 4), torch.ones(5), torch.full((3, 2), torch.nan), torch.ones(3, 4, dtype=torch.int64), None],
)
def test_other_samples_are_refused(given: Any) -> None:
    with pytest.raises(DataError, match=r"samples is .*expected finite float32 or float64 samples"):
        SampledBelief(given)


def test_a_covariance_with_negative_eigenvalues_is_refused() -> None:
    with pytest.raises(NumericalError, match="not positive definite"):
        information_gain(DenseBelief(-torch.eye(SIZE**2, dtype=D)), CANDIDATES[0], NOISE)


@pytest.mark.parametrize("noise_std", [0.0, -1.0, math.nan, math.inf, None])
def test_other_noise_is_refused(noise_std: Any) -> None:
    belief = DenseBelief(covariance())
    for call in (
        lambda: information_gain(belief, CANDIDATES[0], noise_std),
        lambda: choose_angles(belief, CANDIDATES, 2, noise_std),
        lambda: belief.conditioned(CANDIDATES[0], noise_std),
    ):
        with pytest.raises(LapwingError, match=r"noise_std is .*expected a positive, finite number"):
            call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 7}, "count is 7; expected at most 6, the number of candidates"),
        ({"count": 0}, "count is 0; expected an integer of at least 1"),
        ({"candidates": ()}, "count is 2; expected at most 0"),
        ({"candidates": angle_operators(ParallelBeam(4, angles=3))}, "a candidate is for 16 pixels; expected 25"),
        ({"candidates": [torch.eye(3)] * 3}, "a candidate is a tensor.*expected a SparseOperator"),
        ({"criterion": "entropy"}, "criterion is 'entropy'; expected one of information, error"),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    settings = {"candidates": CANDIDATES, "count": 2, "noise_std": NOISE, **changes}
    with pytest.raises(LapwingError, match=message):
        choose_angles(DenseBelief(covariance()), **settings)
