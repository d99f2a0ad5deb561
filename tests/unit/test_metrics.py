"""Scores of predictions, against loops."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    log_loss,
    mean_absolute_error,
    mean_squared_error,
    roc_auc_score,
    roc_curve,
)

import lapwing as lw
from lapwing import metrics
from lapwing.errors import DataError, LapwingError, UnsupportedError
from lapwing.metrics import aupr, auroc, fpr95

# Scores of probabilities against scikit-learn and by hand.


@pytest.fixture
def scored() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    probs = torch.randn(211, 5, generator=generator, dtype=torch.float64).mul(2).softmax(1)
    return probs, torch.randint(5, (211,), generator=generator)


def test_nll_and_accuracy_equal_scikit_learn(scored: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, y = scored
    assert metrics.categorical_nll(probs, y) == pytest.approx(log_loss(y.numpy(), probs.numpy()), rel=1e-12)
    assert metrics.accuracy(probs, y) == pytest.approx(accuracy_score(y.numpy(), probs.argmax(1).numpy()))


def test_brier_equals_the_sum_over_classes(scored: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, y = scored
    by_hand = sum((float(p) - float(k == label)) ** 2 for row, label in zip(probs, y, strict=True)
                  for k, p in enumerate(row)) / len(y)  # fmt: skip
    assert metrics.brier(probs, y) == pytest.approx(by_hand, rel=1e-12)


def test_ece_equals_a_loop_over_bins(scored: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, y = scored
    confidence, guess = probs.max(1)
    total = 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            gap = (guess == y)[inside].double().mean() - confidence[inside].mean()
            total += float(inside.double().mean() * gap.abs())
    assert metrics.ece(probs, y) == pytest.approx(total, rel=1e-12)


def test_calibration_bins_include_their_upper_end() -> None:
    diagram = metrics.calibration(torch.tensor([0.5, 0.5, 1.0]), torch.tensor([1, 0, 1]), bins=2)
    assert diagram.weight.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert diagram.accuracy.tolist() == [0.5, 1.0]
    empty = metrics.calibration(torch.tensor([0.9]), torch.tensor([1]), bins=2)
    assert math.isnan(empty.accuracy[0])


@pytest.mark.parametrize("y", [torch.zeros(4, 1), torch.zeros(3), torch.zeros(0)])
def test_labels_of_another_shape_are_refused(y: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected probabilities \(B, C\) and whole class numbers \(B,\)"):
        metrics.categorical_nll(torch.full((4, 2), 0.5), y)


# Bins of equally many predictions


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_adaptive_ece_equals_a_loop_over_sorted_parts(scored: tuple[torch.Tensor, torch.Tensor], bins: int) -> None:
    probs, y = scored
    ordered = sorted((max(row), float(row.index(max(row)) == label)) for row, label in zip(probs.tolist(), y.tolist()))
    total = 0.0
    for part in np.array_split(np.array(ordered), bins):
        total += len(part) / len(y) * abs(part[:, 1].mean() - part[:, 0].mean())
    assert metrics.adaptive_ece(probs, y, bins) == pytest.approx(total, rel=1e-12)


def test_adaptive_ece_does_not_depend_on_the_order_of_equal_confidences() -> None:
    probs = torch.tensor([[0.75, 0.25]], dtype=torch.float64).repeat(12, 1)
    y = torch.tensor([0] * 9 + [1] * 3)
    assert metrics.adaptive_ece(probs, y, bins=5) == pytest.approx(0, abs=1e-12)
    mixed, order = probs.clone(), torch.randperm(12, generator=torch.Generator().manual_seed(0))
    mixed[::2] = torch.tensor([0.4, 0.6], dtype=torch.float64)
    assert metrics.adaptive_ece(mixed, y, 5) == pytest.approx(metrics.adaptive_ece(mixed[order], y[order], 5))
    assert metrics.adaptive_ece(mixed, y, 5) > 0.01


# Every class by itself, and binary labels


def binned_error(stated: torch.Tensor, true: torch.Tensor) -> float:
    total = 0.0
    for i in range(15):
        inside = (stated > i / 15) & (stated <= (i + 1) / 15)
        if inside.any():
            total += float(inside.double().mean() * (true[inside].double().mean() - stated[inside].mean()).abs())
    return total


def test_classwise_ece_is_the_mean_of_a_loop_over_classes(scored: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, y = scored
    expected = sum(binned_error(probs[:, c], y == c) for c in range(5)) / 5
    assert metrics.classwise_ece(probs, y) == pytest.approx(expected, rel=1e-12)


def test_calibration_of_binary_labels_is_that_of_the_probability_of_one() -> None:
    """A rare label whose probability is too high and below one half: every guess has about its confidence."""
    generator = torch.Generator().manual_seed(5)
    stated = 0.45 + 0.02 * torch.rand(400, generator=generator, dtype=torch.float64)
    y = (torch.rand(400, generator=generator) < 0.05).double()
    expected = binned_error(stated, y)
    assert expected > 0.3
    for probs, labels in ((stated, y), (stated[:, None], y[:, None]), (stated[:, None], y), (stated, y.long())):
        assert metrics.ece(probs, labels) == pytest.approx(expected, rel=1e-12)
        assert metrics.classwise_ece(probs, labels) == pytest.approx(expected, rel=1e-12)
    gap = float(stated.mean() - y.mean())
    assert metrics.adaptive_ece(stated, y, 1) == pytest.approx(gap, rel=1e-12)
    assert metrics.ece(stated, torch.cat([y[:300], torch.full((100,), -100.0)])) == pytest.approx(
        binned_error(stated[:300], y[:300]), rel=1e-12
    )


def test_labels_of_several_columns_are_pooled_or_averaged() -> None:
    stated = torch.full((100, 2), 0.3, dtype=torch.float64)
    y = torch.zeros(100, 2)
    y[:60, 1] = 1  # one label too high by .3, the other too low by .3: pooled they cancel
    assert metrics.ece(stated, y) == pytest.approx(0, abs=1e-12)
    assert metrics.classwise_ece(stated, y) == pytest.approx(0.3, rel=1e-12)


def test_logits_of_binary_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected probabilities of one and labels of zero and one.*sigmoid"):
        metrics.ece(torch.tensor([-2.0, 3.0]), torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="expected probabilities of one and labels of zero and one"):
        metrics.ece(torch.tensor([0.2, 0.3]), torch.tensor([0, 2]))


# Labels that do not count, and images


SCORES = ["categorical_nll", "accuracy", "brier", "ece", "adaptive_ece", "classwise_ece"]


@pytest.mark.parametrize("score", SCORES)
def test_ignored_labels_do_not_count(scored: tuple[torch.Tensor, torch.Tensor], score: str) -> None:
    probs, y = scored
    score_of, some, kept = getattr(metrics, score), y.clone(), torch.arange(len(y)) % 3 > 0
    some[~kept] = -100
    assert score_of(probs, some) == pytest.approx(score_of(probs[kept], y[kept]), rel=1e-12)
    some[~kept] = 255
    assert score_of(probs, some, ignore_index=255) == pytest.approx(score_of(probs[kept], y[kept]), rel=1e-12)
    with pytest.raises(DataError, match="labels run from 0 to 255"):
        score_of(probs, some)
    with pytest.raises(DataError, match="every label is ignored"):
        score_of(probs, torch.full_like(y, -100))


@pytest.mark.parametrize("score", SCORES)
def test_pixels_of_images_are_data(scored: tuple[torch.Tensor, torch.Tensor], score: str) -> None:
    probs, y = (t[:210] for t in scored)
    images, masks = probs.reshape(3, 7, 10, 5).movedim(3, 1), y.reshape(3, 7, 10)
    assert getattr(metrics, score)(images, masks) == pytest.approx(getattr(metrics, score)(probs, y), rel=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_rows_that_do_not_sum_to_one_are_refused(scored: tuple[torch.Tensor, torch.Tensor], score: str) -> None:
    probs, y = scored
    for wrong in (0.9 * probs, probs.log(), probs - 0.2):
        with pytest.raises(DataError, match="do not sum to one"):
            getattr(metrics, score)(wrong, y)


def test_a_probability_below_zero_by_rounding_is_zero() -> None:
    assert metrics.categorical_nll(torch.tensor([[1.0, -1e-8]]), torch.tensor([1])) == math.inf


# Scores of normal predictions against SciPy, quadrature and by hand.


@pytest.fixture
def predicted() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    mean, y = torch.randn(2, 17, generator=generator, dtype=torch.float64).mul(2)
    return mean, torch.rand(17, generator=generator, dtype=torch.float64) + 0.3, y


def test_nll_rmse_and_mae_equal_scipy_and_scikit_learn(
    predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    mean, std, y = predicted
    expected = -norm(mean.numpy(), std.numpy()).logpdf(y.numpy()).mean()
    assert metrics.normal_nll(mean, std, y) == pytest.approx(expected, rel=1e-12)
    assert metrics.rmse(mean, y) == pytest.approx(mean_squared_error(y.numpy(), mean.numpy()) ** 0.5, rel=1e-12)
    assert metrics.mae(mean, y) == pytest.approx(mean_absolute_error(y.numpy(), mean.numpy()), rel=1e-12)


def test_crps_equals_its_integral(predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    integrals = []
    for m, s, v in zip(*(t.tolist() for t in predicted), strict=True):
        normal = norm(m, s)
        below = quad(lambda t, n: n.cdf(t) ** 2, -np.inf, v, args=(normal,))[0]
        above = quad(lambda t, n: n.sf(t) ** 2, v, np.inf, args=(normal,))[0]
        integrals.append(below + above)
    assert metrics.crps(*predicted) == pytest.approx(np.mean(integrals), rel=1e-7)


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 1\), \(3,\); expected the same"):
        metrics.rmse(torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(ValueError, match="at least one"):
        metrics.rmse(torch.zeros(0), torch.zeros(0))


# From draws


@pytest.fixture
def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(11, 5, 3, generator=generator).double(), torch.randn(5, 3, generator=generator).double()


def pairwise(samples: np.ndarray, y: float, fair: bool) -> float:
    """E|x - y| - ½ E|x - x'| as loops over draws."""
    count = len(samples)
    spread = sum(abs(a - b) for a in samples for b in samples) / (count * (count - 1 if fair else count))
    return float(sum(abs(a - y) for a in samples) / count - 0.5 * spread)


@pytest.mark.parametrize("fair", [False, True])
def test_crps_of_draws_equals_a_loop_over_pairs(drawn: tuple[torch.Tensor, torch.Tensor], fair: bool) -> None:
    samples, y = (t.numpy() for t in drawn)
    expected = np.mean([pairwise(samples[:, i, j], y[i, j], fair) for i in range(5) for j in range(3)])
    assert metrics.crps_samples(*drawn, fair=fair) == pytest.approx(expected, rel=1e-10)


def test_fair_crps_of_few_draws_is_that_of_their_distribution() -> None:
    """The mean of 3 draws' fair scores agrees with the normal distribution's; the plain ones' mean is biased."""
    generator = torch.Generator().manual_seed(4)
    samples, y = torch.randn(3, 4000, generator=generator).double(), torch.randn(4000, generator=generator).double()
    each = torch.tensor([metrics.crps_samples(samples[:, i : i + 40], y[i : i + 40], fair=True)
                         for i in range(0, 4000, 40)])  # fmt: skip
    expected = metrics.crps(torch.zeros(4000), torch.ones(4000), y)
    error = float(each.std()) / 10
    assert abs(float(each.mean()) - expected) < 5 * error
    assert metrics.crps_samples(samples, y) - expected > 10 * error


def test_crps_of_draws_keeps_its_digits_far_from_zero(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    samples, y = drawn
    assert metrics.crps_samples(samples + 1e6, y + 1e6) == pytest.approx(metrics.crps_samples(samples, y), rel=1e-8)


def test_draws_that_do_not_fit_are_refused(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    samples, y = drawn
    for wrong in (samples[:, 0], samples.flatten(1), samples[0], samples[:0]):
        with pytest.raises(DataError, match=r"expected \(S, ...\) draws"):
            metrics.crps_samples(wrong, y)
    with pytest.raises(DataError, match="infinite"):
        metrics.crps_samples(samples / 0, y)
    with pytest.raises(DataError, match="at least two"):
        metrics.crps_samples(samples[:1], y, fair=True)
    with pytest.raises(UnsupportedError, match="True or False"):
        metrics.crps_samples(samples, y, fair=1)  # type: ignore[arg-type]


# Intervals and quantiles against SciPy and loops.

D = torch.float64


@pytest.fixture
def intervals_predicted() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    mean, y = torch.randn(2, 37, 3, generator=generator, dtype=D)
    return mean, torch.rand(37, 3, generator=generator, dtype=D) + 0.5, y


def test_coverage_counts_the_ends_and_width_is_a_mean() -> None:
    low, high = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 3.0])
    assert metrics.coverage(low, high, torch.tensor([0.0, 2.0, 3.1])) == pytest.approx(2 / 3)
    assert metrics.interval_width(low, high) == 2


@pytest.mark.parametrize("level", [0.03, 0.5, 0.95])
def test_coverage_and_width_of_intervals_of_scipy(
    intervals_predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor], level: float
) -> None:
    mean, std, y = (t.numpy() for t in intervals_predicted)
    low, high = stats.norm(mean, std).interval(level)
    assert metrics.coverage(low, high, y) == pytest.approx(np.mean((low <= y) & (y <= high)))
    assert metrics.interval_width(low, high) == pytest.approx((high - low).mean(), rel=1e-10)


def test_pit_equals_scipy(intervals_predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    mean, std, y = (t.numpy() for t in intervals_predicted)
    assert np.allclose(metrics.pit(*intervals_predicted).numpy(), stats.norm(mean, std).cdf(y), rtol=1e-10)


def test_pit_of_draws_is_a_rank() -> None:
    samples = torch.tensor([[0.0, 5.0], [1.0, 5.0], [2.0, 5.0], [3.0, 6.0]])
    values = metrics.pit_samples(samples, torch.tensor([2.5, 5.0]))
    assert values.tolist() == pytest.approx([(3 + 0.5) / 5, (1.5 + 0.5) / 5])


# The centred quantile metric


def test_cqm_equals_a_loop_over_levels(intervals_predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    levels = [0.1, 0.37, 0.8, 0.99]
    mean, std, y = intervals_predicted
    ends = [stats.norm(mean.numpy(), std.numpy()).interval(level) for level in levels]
    covered = [metrics.coverage(low, high, y.numpy()) for low, high in ends]
    expected = np.mean([abs(share - level) for share, level in zip(covered, levels, strict=True)])
    assert metrics.cqm(metrics.pit(*intervals_predicted), levels) == pytest.approx(expected, rel=1e-10)
    assert metrics.cqm(metrics.pit(*intervals_predicted), torch.tensor(levels, dtype=D)) == pytest.approx(
        expected, rel=1e-10
    )


def test_cqm_over_all_levels_is_a_distance_to_the_uniform_distribution(
    intervals_predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """It is the Wasserstein distance of |2u - 1| from the uniform distribution, here that of 200,000 points."""
    values = metrics.pit(*intervals_predicted)
    uniform = (np.arange(200_000) + 0.5) / 200_000
    expected = stats.wasserstein_distance((2 * values - 1).abs().flatten().numpy(), uniform)
    assert metrics.cqm(values) == pytest.approx(expected, abs=1e-5)


def test_the_ends_of_intervals_belong_to_them() -> None:
    values = torch.tensor([0.25, 0.5, 0.5, 0.0])  # levels ½, 0, 0 and 1 include them
    assert metrics.cqm(values, [0.5]) == pytest.approx(3 / 4 - 1 / 2)


@pytest.mark.parametrize("level", [0.0, 1.0, 95, -0.1, None, "0.9", True])
def test_levels_outside_0_and_1_are_refused(level: float) -> None:
    one = torch.ones(3)
    with pytest.raises(DataError, match="expected a list of probabilities"):
        metrics.cqm(0.5 * one, [0.5, level])


def test_wrong_pit_values_and_levels_are_refused() -> None:
    with pytest.raises(DataError, match="pit_values run from"):
        metrics.cqm(torch.tensor([0.5, 1.5]))
    for wrong in ([], 0.5, "abc"):
        with pytest.raises(DataError, match="expected a list of probabilities"):
            metrics.cqm(torch.tensor([0.5]), wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="expected positive numbers"):
        metrics.pit(*-torch.ones(3, 3))


# Joint log-likelihoods against products over inputs.

GENERATOR = torch.Generator().manual_seed(12)
PROBS = torch.randn(6, 4, 3, generator=GENERATOR, dtype=torch.float64).mul(2).softmax(2)
Y = torch.tensor([2, 0, 1, 2])


def joint(probs: list[list[list[float]]], inputs: list[int], y: list[int]) -> float:
    """log (1/S) Σ_s Π_b p_s(y_b), in plain numbers; an input may occur several times."""
    total = 0.0
    for draw in probs:
        likelihood = 1.0
        for i in inputs:
            likelihood *= draw[i][y[i]]
        total += likelihood
    return math.log(total / len(probs))


def test_joint_log_likelihood_equals_a_loop() -> None:
    expected = joint(PROBS.tolist(), [0, 1, 2, 3], Y.tolist())
    assert metrics.joint_log_likelihood(PROBS, Y) == pytest.approx(expected, rel=1e-12)


def test_many_inputs_do_not_underflow() -> None:
    probs, y = torch.full((3, 5000, 2), 0.5), torch.zeros(5000, dtype=torch.long)
    assert metrics.joint_log_likelihood(probs, y) == pytest.approx(5000 * math.log(0.5))


def test_a_label_that_no_draw_allows() -> None:
    probs = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    assert metrics.joint_log_likelihood(probs, torch.tensor([1, 0])) == -math.inf


def test_joint_log_likelihood_of_ignored_labels_and_images() -> None:
    score = metrics.joint_log_likelihood
    some = torch.tensor([2, -100, 1, 2])
    kept = score(PROBS[:, some != -100], some[some != -100])
    assert score(PROBS, some) == pytest.approx(kept, rel=1e-12)
    images, mask = PROBS.reshape(6, 1, 2, 2, 3).movedim(4, 2), some.reshape(1, 2, 2)
    assert score(images, mask) == pytest.approx(kept, rel=1e-12)


def test_draws_that_are_not_probabilities_are_refused() -> None:
    score = metrics.joint_log_likelihood
    for wrong in (PROBS[0], PROBS[:0], PROBS[:, :3], PROBS.transpose(0, 1)):
        with pytest.raises(DataError, match=r"expected \(S, B, C\)"):
            score(wrong, Y)
    with pytest.raises(DataError, match="do not sum to one"):
        score(2 * PROBS, Y)
    with pytest.raises(DataError, match=r"expected 0\.\.2"):
        score(PROBS, Y + 1)
    with pytest.raises(DataError, match="whole class numbers"):
        score(PROBS, Y.double())


# Detection of unusual inputs against scikit-learn.


@pytest.fixture(params=[None, 7], ids=["distinct", "many ties"])
def scores(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inside, outside = torch.randn(83, generator=generator), torch.randn(57, generator=generator) + 0.7
    if request.param is not None:
        inside, outside = (torch.round(t * request.param / 6) for t in (inside, outside))
    return inside, outside


def pooled(inside: torch.Tensor, outside: torch.Tensor) -> tuple[list[int], np.ndarray]:
    return [0] * len(inside) + [1] * len(outside), torch.cat([inside, outside]).numpy()


def test_auroc_and_aupr_equal_scikit_learn(scores: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert auroc(*scores) == pytest.approx(roc_auc_score(*pooled(*scores)), rel=1e-12)
    assert aupr(*scores) == pytest.approx(average_precision_score(*pooled(*scores)), rel=1e-12)


@pytest.mark.parametrize("count", [57, 40, 20, 3])
def test_fpr95_equals_scikit_learn(scores: tuple[torch.Tensor, torch.Tensor], count: int) -> None:
    """At 20 and 40 scores 95 % is a whole number of them, and one fewer would not be enough."""
    inside, outside = scores[0], scores[1][:count]
    false_rate, true_rate, _ = roc_curve(*pooled(inside, outside), drop_intermediate=False)
    assert fpr95(inside, outside) == pytest.approx(false_rate[np.argmax(true_rate >= 0.95)], rel=1e-12)


def test_scores_apart_and_equal_scores() -> None:
    low, high = torch.zeros(3), torch.ones(5)
    assert (auroc(low, high), aupr(low, high), fpr95(low, high)) == (1, 1, 0)
    assert (auroc(high, low), fpr95(high, low)) == (0, 1)
    assert (auroc(low, torch.zeros(5)), fpr95(low, torch.zeros(5))) == (0.5, 1)
    assert aupr(low, torch.zeros(5)) == pytest.approx(5 / 8)


def test_infinite_scores_have_an_order() -> None:
    inside, outside = torch.tensor([-float("inf"), 1.0]), torch.tensor([float("inf"), 2.0])
    assert (auroc(inside, outside), aupr(inside, outside), fpr95(inside, outside)) == (1, 1, 0)


@pytest.mark.parametrize("score", [auroc, aupr, fpr95])
def test_scores_without_an_order_are_refused(score: Callable[..., float]) -> None:
    with pytest.raises(ValueError, match="NaN"):
        score(torch.zeros(2), torch.tensor([float("nan")]))
    for wrong in (torch.zeros(0), torch.zeros(3, 2), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"expected \(B,\)"):
            score(torch.zeros(2), wrong)


# The bootstrap against its definition, scikit-learn's scores and SciPy's intervals.

RESAMPLING_GENERATOR = torch.Generator().manual_seed(21)
X = torch.randn(60, generator=RESAMPLING_GENERATOR, dtype=torch.float64).exp()


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


def test_equal_seeds_give_equal_intervals() -> None:
    seeded = lambda seed: metrics.bootstrap(mean, X, resamples=20, generator=torch.Generator().manual_seed(seed))
    assert seeded(1) == seeded(1)
    assert seeded(1) != seeded(2)
    assert metrics.bootstrap(mean, X, resamples=20) == metrics.bootstrap(mean, X, resamples=20)


def test_a_metric_may_return_a_tensor_of_one_number() -> None:
    assert metrics.bootstrap(torch.mean, X, resamples=5) == metrics.bootstrap(mean, X, resamples=5)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5", True, X[:3]])
def test_scores_that_are_not_finite_are_refused(value: Any) -> None:
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


def test_empty_data_and_metrics_that_are_not_functions_are_refused() -> None:
    for data in ((), (torch.tensor(1.0),), (X[:0],)):
        with pytest.raises(DataError, match="expected one or more tensors"):
            metrics.bootstrap(mean, *data)
    with pytest.raises(LapwingError, match="expected a function"):
        metrics.bootstrap("ece", X)  # type: ignore[arg-type]


# Risk against coverage, by loops.

SELECTION_GENERATOR = torch.Generator().manual_seed(9)
UNCERTAINTY = torch.rand(31, generator=SELECTION_GENERATOR, dtype=torch.float64)
LOSS = torch.rand(31, generator=SELECTION_GENERATOR, dtype=torch.float64).square()


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


@pytest.mark.parametrize("score", [metrics.aurc, metrics.risk_coverage])
def test_uncertainties_of_another_shape_are_refused(score: Callable[..., object]) -> None:
    for wrong in (UNCERTAINTY[:5], UNCERTAINTY.unsqueeze(1), torch.tensor(0.5)):
        with pytest.raises(DataError, match="expected the same"):
            score(wrong, LOSS)
    with pytest.raises(DataError, match=r"expected \(B,\)"):
        score(LOSS.unsqueeze(1), LOSS.unsqueeze(1))


# What scores take: NumPy arrays give the numbers of tensors, and what is no data is refused.

ARRAYS_GENERATOR = torch.Generator().manual_seed(2)
MEAN, ARRAYS_Y = torch.randn(2, 23, 3, generator=ARRAYS_GENERATOR, dtype=D)
STD = torch.rand(23, 3, generator=ARRAYS_GENERATOR, dtype=D) + 0.2
DRAWS = torch.randn(7, 23, 3, generator=ARRAYS_GENERATOR, dtype=D)
ARRAYS_PROBS = torch.randn(23, 4, generator=ARRAYS_GENERATOR, dtype=D).softmax(1)
SAMPLED = torch.randn(5, 23, 4, generator=ARRAYS_GENERATOR, dtype=D).softmax(2)
LABELS = torch.randint(4, (23,), generator=ARRAYS_GENERATOR)
ARRAYS_SCORES = torch.randn(17, generator=ARRAYS_GENERATOR, dtype=D)

CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "categorical_nll": (metrics.categorical_nll, (ARRAYS_PROBS, LABELS)),
    "accuracy": (metrics.accuracy, (ARRAYS_PROBS, LABELS)),
    "brier": (metrics.brier, (ARRAYS_PROBS, LABELS)),
    "ece": (metrics.ece, (ARRAYS_PROBS, LABELS)),
    "adaptive_ece": (metrics.adaptive_ece, (ARRAYS_PROBS, LABELS)),
    "classwise_ece": (metrics.classwise_ece, (ARRAYS_PROBS, LABELS)),
    "calibration": (lambda *data: metrics.calibration(*data, bins=1).accuracy, (ARRAYS_PROBS[:, 0], LABELS == 0)),
    "normal_nll": (metrics.normal_nll, (MEAN, STD, ARRAYS_Y)),
    "rmse": (metrics.rmse, (MEAN, ARRAYS_Y)),
    "mae": (metrics.mae, (MEAN, ARRAYS_Y)),
    "crps": (metrics.crps, (MEAN, STD, ARRAYS_Y)),
    "crps_samples": (metrics.crps_samples, (DRAWS, ARRAYS_Y)),
    "coverage": (metrics.coverage, (MEAN - STD, MEAN + STD, ARRAYS_Y)),
    "interval_width": (metrics.interval_width, (MEAN - STD, MEAN + STD)),
    "pit": (metrics.pit, (MEAN, STD, ARRAYS_Y)),
    "pit_samples": (metrics.pit_samples, (DRAWS, ARRAYS_Y)),
    "cqm": (metrics.cqm, (ARRAYS_PROBS,)),
    "auroc": (metrics.auroc, (ARRAYS_PROBS[:, 0], ARRAYS_SCORES)),
    "aupr": (metrics.aupr, (ARRAYS_PROBS[:, 0], ARRAYS_SCORES)),
    "fpr95": (metrics.fpr95, (ARRAYS_PROBS[:, 0], ARRAYS_SCORES)),
    "risk_coverage": (lambda *data: metrics.risk_coverage(*data).risk, (ARRAYS_SCORES, ARRAYS_SCORES > 0)),
    "aurc": (metrics.aurc, (ARRAYS_SCORES, ARRAYS_SCORES > 0)),
    "joint_log_likelihood": (metrics.joint_log_likelihood, (SAMPLED, LABELS)),
    "bootstrap": (lambda *data: metrics.bootstrap(metrics.brier, *data, resamples=9).high, (ARRAYS_PROBS, LABELS)),
}


def test_every_score_is_called_here() -> None:
    assert set(CALLS) == set(metrics.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_arrays_give_the_numbers_of_tensors(name: str) -> None:
    score, data = CALLS[name]
    expected = torch.as_tensor(score(*data))
    for given in ([t.numpy() for t in data], [data[0], *(t.numpy() for t in data[1:])]):
        assert torch.allclose(torch.as_tensor(score(*given)), expected, rtol=1e-12)


@pytest.mark.parametrize("name", CALLS)
def test_numbers_in_float32_give_nearly_the_same(name: str) -> None:
    score, data = CALLS[name]
    single = [t.float() if t.is_floating_point() else t for t in data]
    assert torch.allclose(torch.as_tensor(score(*single)).double(), torch.as_tensor(score(*data)).double(), atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("change", ["none", "list", "nan", "empty", "complex", "masked"])
def test_values_that_are_not_data_are_refused(name: str, change: str) -> None:
    score, data = CALLS[name]
    first: Any = {
        "none": None,
        "list": data[0].tolist(),
        "nan": torch.full_like(data[0], math.nan),
        "empty": data[0][:0],
        "complex": data[0].numpy() + 1j,
        "masked": np.ma.masked_array(data[0].numpy(), mask=False),
    }[change]
    with pytest.raises(lw.errors.DataError, match="expected"):
        score(first, *data[1:])


DETECTION = {"auroc", "aupr", "fpr95"}  # inside and outside may have different lengths


@pytest.mark.parametrize("name", [name for name, (_, data) in CALLS.items() if len(data) > 1 and name not in DETECTION])
def test_an_argument_of_another_length_is_refused(name: str) -> None:
    score, data = CALLS[name]
    with pytest.raises(lw.errors.DataError, match="expected"):
        score(*data[:-1], data[-1][:-2])


def test_arrays_that_pytorch_does_not_take_as_they_are() -> None:
    expected = metrics.rmse(MEAN, ARRAYS_Y)
    fixed = ARRAYS_Y.numpy().copy()
    fixed.flags.writeable = False
    assert metrics.rmse(MEAN, fixed) == expected
    backwards = np.ascontiguousarray(ARRAYS_Y.numpy()[::-1])[::-1]
    assert metrics.rmse(MEAN, backwards) == expected
    assert metrics.rmse(MEAN, ARRAYS_Y.numpy().astype(">f8")) == expected
    assert metrics.rmse(MEAN, ARRAYS_Y.numpy().astype(np.longdouble)) == expected
    assert metrics.accuracy(ARRAYS_PROBS, LABELS.numpy().astype(np.uint16)) == metrics.accuracy(ARRAYS_PROBS, LABELS)
    with pytest.raises(lw.errors.DataError, match="a tensor or a NumPy array of real numbers"):
        metrics.rmse(MEAN, ARRAYS_Y.numpy().astype(str))


def test_gradients_are_left_behind() -> None:
    assert isinstance(metrics.mae(MEAN.clone().requires_grad_(), ARRAYS_Y), float)
    assert not metrics.pit(MEAN.clone().requires_grad_(), STD, ARRAYS_Y).requires_grad


def test_scores_work_where_numpy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert metrics.rmse(torch.zeros(2), torch.tensor([3.0, 3.0])) == 3
    assert metrics.bootstrap(metrics.mae, torch.zeros(2), torch.ones(2), resamples=3).high == 1
    with pytest.raises(lw.errors.DataError, match="expected a tensor"):
        metrics.mae([0.0], [1.0])  # type: ignore[arg-type]


# The names of lw.metrics.

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_every_score_has_its_own_name() -> None:
    """Every function of the package is listed, and no two names differ only in case."""
    scores = {
        score for name, score in vars(metrics).items()
        if callable(score) and getattr(score, "__module__", "").startswith(metrics.__name__) and name[0].islower()
    }  # fmt: skip
    assert {getattr(metrics, name) for name in metrics.__all__} == scores
    assert len({name.lower() for name in metrics.__all__}) == len(metrics.__all__) == len(scores)
    assert {"categorical_nll", "normal_nll"} < set(metrics.__all__)


def test_every_score_is_in_the_table_of_its_page() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for name in metrics.__all__:
        assert sum(row.startswith(f"| `{name}(") for row in rows) == 1, name
