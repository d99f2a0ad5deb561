"""Risk against coverage, by loops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch

from lapwing import metrics
from lapwing.errors import DataError

GENERATOR = torch.Generator().manual_seed(9)
UNCERTAINTY = torch.rand(31, generator=GENERATOR, dtype=torch.float64)
LOSS = torch.rand(31, generator=GENERATOR, dtype=torch.float64).square()


def risks(uncertainty: list[float], loss: list[float]) -> list[float]:
    """The mean loss of the k inputs of least uncertainty, for each k."""
    order = sorted(range(len(loss)), key=lambda i: uncertainty[i])
    return [sum(loss[i] for i in order[:k]) / k for k in range(1, len(loss) + 1)]


def test_risks_and_their_mean_equal_a_loop() -> None:
    expected = risks(UNCERTAINTY.tolist(), LOSS.tolist())
    curve = metrics.risk_coverage(UNCERTAINTY, LOSS)
    assert curve.risk.tolist() == pytest.approx(expected, rel=1e-12)
    assert curve.coverage.tolist() == pytest.approx([k / 31 for k in range(1, 32)])
    assert metrics.aurc(UNCERTAINTY, LOSS) == pytest.approx(sum(expected) / 31, rel=1e-12)


def test_equal_uncertainties_give_the_mean_over_their_orders() -> None:
    uncertainty, loss = [0.5, 0.2, 0.5, 0.5, 0.9], [1.0, 0.0, 4.0, 2.0, 3.0]
    every = []
    for first in permutations([0, 2, 3]):
        order = [1, *first, 4]
        every.append([sum(loss[i] for i in order[:k]) / k for k in range(1, 6)])
    expected = torch.tensor(every, dtype=torch.float64).mean(0)
    curve = metrics.risk_coverage(torch.tensor(uncertainty), torch.tensor(loss))
    assert torch.allclose(curve.risk, expected, rtol=1e-12)


def test_the_best_and_the_worst_order() -> None:
    wrong = torch.tensor([False, True, False, False])
    best, worst = metrics.aurc(wrong.double(), wrong), metrics.aurc(-wrong.double(), wrong)
    assert best == pytest.approx(0.25 / 4)
    assert worst == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert metrics.aurc(torch.zeros(4), wrong) == pytest.approx(0.25)


@pytest.mark.parametrize("score", [metrics.aurc, metrics.risk_coverage])
def test_uncertainties_of_another_shape_are_refused(score: Callable[..., object]) -> None:
    for wrong in (UNCERTAINTY[:5], UNCERTAINTY.unsqueeze(1), torch.tensor(0.5)):
        with pytest.raises(DataError, match="expected the same"):
            score(wrong, LOSS)
    with pytest.raises(DataError, match=r"expected \(B,\)"):
        score(LOSS.unsqueeze(1), LOSS.unsqueeze(1))
