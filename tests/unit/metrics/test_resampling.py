"""The bootstrap against its definition, scikit-learn's scores and SciPy's intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from lapwing import metrics
from lapwing.errors import DataError, LapwingError

GENERATOR = torch.Generator().manual_seed(21)
X = torch.randn(60, generator=GENERATOR, dtype=torch.float64).exp()


def mean(x: torch.Tensor) -> float:
    return float(x.mean())


def test_the_interval_has_the_quantiles_of_the_scores_of_resampled_rows() -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def score(x: torch.Tensor, y: torch.Tensor) -> float:
        seen.append((x, y))
        return float((x * y).mean())

    rows = torch.arange(60)
    interval = metrics.bootstrap(score, X, rows, level=0.8, resamples=50)
    assert len(seen) == 51
    assert torch.equal(seen[0][1], rows)
    for x, drawn in seen[1:]:
        assert torch.equal(x, X[drawn])  # paired
        assert len(drawn) == 60
        assert len(drawn.unique()) < 60  # with replacement
    scores = [float((X[drawn] * drawn).mean()) for _, drawn in seen[1:]]
    assert interval.value == pytest.approx(float((X * rows).mean()))
    assert (interval.low, interval.high) == pytest.approx(tuple(np.percentile(scores, [10, 90])), rel=1e-10)
    assert interval.std == pytest.approx(np.std(scores, ddof=1), rel=1e-10)


def test_the_interval_of_a_mean_equals_scipy_within_its_noise() -> None:
    ours = metrics.bootstrap(mean, X, level=0.9, resamples=3000)
    theirs = stats.bootstrap((X.numpy(),), np.mean, confidence_level=0.9, n_resamples=3000, method="percentile",
                             random_state=0)  # fmt: skip
    # The standard error of a 5 % quantile of 3,000 normal numbers is 0.039 standard deviations; of two, 0.055.
    limit = 5 * 0.055 * ours.std
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=limit)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=limit)
    assert ours.std == pytest.approx(float(X.std()) / math.sqrt(60), rel=0.1)


def test_every_row_is_drawn_equally_often() -> None:
    counts = torch.zeros(7)

    def score(rows: torch.Tensor) -> float:
        counts.add_(torch.bincount(rows, minlength=7))
        return 0.0

    metrics.bootstrap(score, torch.arange(7), resamples=1000)
    assert stats.chisquare(counts.numpy() - 1).pvalue > 1e-4


def test_unpaired_data_may_have_different_lengths() -> None:
    inside, outside = X[:23], X[23:] + 0.4
    interval = metrics.bootstrap(metrics.auroc, inside, outside, paired=False, resamples=200)
    assert interval.value == metrics.auroc(inside, outside)
    assert interval.low < interval.value < interval.high
    with pytest.raises(DataError, match=r"23, 37 rows.*Use paired=False"):
        metrics.bootstrap(metrics.auroc, inside, outside)
    drawn: list[tuple[list[int], list[int]]] = []

    def score(a: torch.Tensor, b: torch.Tensor) -> float:
        drawn.append((a.tolist(), b.tolist()))
        return 0.0

    metrics.bootstrap(score, torch.arange(9), torch.arange(9), paired=False, resamples=3)
    assert drawn[1][0] != drawn[1][1]


def test_draws_of_a_posterior_are_resampled_by_row_numbers() -> None:
    draws = X.reshape(4, 15)
    y = X[:15]
    interval = metrics.bootstrap(lambda rows: metrics.crps_samples(draws[:, rows], y[rows]), torch.arange(15))
    assert interval.low < interval.value < interval.high


def test_equal_seeds_give_equal_intervals() -> None:
    seeded = lambda seed: metrics.bootstrap(mean, X, resamples=20, generator=torch.Generator().manual_seed(seed))
    assert seeded(1) == seeded(1)
    assert seeded(1) != seeded(2)
    assert metrics.bootstrap(mean, X, resamples=20) == metrics.bootstrap(mean, X, resamples=20)


def test_a_metric_may_return_a_tensor_of_one_number() -> None:
    assert metrics.bootstrap(torch.mean, X, resamples=5) == metrics.bootstrap(mean, X, resamples=5)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5", True, X[:3]])
def test_scores_that_are_no_finite_number_are_refused(value: Any) -> None:
    with pytest.raises(DataError, match="expected a finite number"):
        metrics.bootstrap(lambda x: value, X)


@pytest.mark.parametrize(
    "wrong",
    [{"level": 95}, {"level": None}, {"resamples": 1}, {"resamples": 10.0}, {"paired": None}, {"generator": 0}],
    ids=str,
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LapwingError, match="expected"):
        metrics.bootstrap(mean, X, **wrong)


def test_data_without_rows_and_metrics_that_are_no_functions_are_refused() -> None:
    for data in ((), (torch.tensor(1.0),), (X[:0],)):
        with pytest.raises(DataError, match="expected one or more tensors"):
            metrics.bootstrap(mean, *data)
    with pytest.raises(LapwingError, match="expected a function"):
        metrics.bootstrap("ece", X)  # type: ignore[arg-type]
