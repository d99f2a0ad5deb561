"""Scores of probabilities against scikit-learn and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

from lapwing import metrics
from lapwing.errors import DataError


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


def test_brier_runs_from_zero_to_two() -> None:
    probs = torch.eye(2)
    assert metrics.brier(probs, torch.tensor([0, 1])) == 0
    assert metrics.brier(probs, torch.tensor([1, 0])) == 2


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


def test_gaps_of_opposite_sign_cancel_only_within_a_bin() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]], dtype=torch.float64)
    wrong_then_right = torch.tensor([1, 0])
    assert metrics.ece(probs, wrong_then_right) == pytest.approx((0.9 + 0.4) / 2)
    assert metrics.ece(probs, wrong_then_right, bins=1) == pytest.approx(0.25)


def test_ece_is_zero_for_honest_probabilities() -> None:
    probs = torch.tensor([[0.75, 0.25]] * 4, dtype=torch.float64)
    assert metrics.ece(probs, torch.tensor([0, 0, 0, 1])) == pytest.approx(0, abs=1e-12)


def test_calibration_bins_include_their_upper_end() -> None:
    diagram = metrics.calibration(torch.tensor([0.5, 0.5, 1.0]), torch.tensor([1, 0, 1]), bins=2)
    assert diagram.weight.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert diagram.accuracy.tolist() == [0.5, 1.0]
    empty = metrics.calibration(torch.tensor([0.9]), torch.tensor([1]), bins=2)
    assert math.isnan(empty.accuracy[0])


def test_a_label_of_probability_zero_costs_infinity() -> None:
    assert metrics.categorical_nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == math.inf


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


def test_adaptive_ece_gives_each_prediction_a_bin_if_there_are_few(scored: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, y = (t[:7] for t in scored)
    confidence, guess = probs.max(1)
    expected = float((confidence - (guess == y).double()).abs().mean())
    assert metrics.adaptive_ece(probs, y) == pytest.approx(expected, rel=1e-12)


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
