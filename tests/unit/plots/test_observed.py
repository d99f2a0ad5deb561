"""The numbers behind pictures, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from lapwing.errors import DataError
from lapwing.plots import AnswerProbabilities, answers, observed_coverage, reliability_points, risk_of, wilson
from lapwing.predictives.numbers import FunctionGaussian, NormalPredictive


def normal(n: int = 400, scale: float = 1.0) -> tuple[NormalPredictive, torch.Tensor]:
    """Return predictions N(0, 1) and targets N(0, scale²)."""
    belief = FunctionGaussian(torch.zeros(n, 1), torch.full((n, 1, 1), 0.5))
    return NormalPredictive(belief, torch.full((n, 1), 0.5)), scale * torch.randn(n, 1)


def test_classes_of_rows_tokens_and_images_are_the_same_answers() -> None:
    probs, y = torch.rand(6, 4, 5, 3).softmax(1), torch.randint(0, 4, (6, 5, 3))
    rows = answers(probs.movedim(1, -1).reshape(-1, 4), y.flatten())
    for found in (answers(probs, y), answers(probs.movedim(1, -1).reshape(6, 15, 4), y.reshape(6, 15))):
        assert torch.equal(found.probability, rows.probability)
        assert torch.equal(found.true, rows.true)


def test_ignored_labels_are_left_out() -> None:
    y = torch.tensor([0, -100, 1])
    assert len(answers(torch.rand(3, 2).softmax(1), y).true) == 2


@pytest.mark.parametrize("label", [255, 2, -1])
def test_labels_that_are_no_class_are_refused(label: int) -> None:
    y = torch.tensor([0, label, 1])
    with pytest.raises(DataError, match=r"labels run from .* expected 0\.\.1, or -100 .* y.masked_fill"):
        answers(torch.rand(3, 2).softmax(1), y)
    with pytest.raises(DataError, match=r"labels run from .* expected 0\.\.1"):
        answers(torch.rand(3, 1), y)


@pytest.mark.parametrize("shape", [(7,), (7, 1)])
def test_binary_labels_may_lack_their_dimension(shape: tuple[int, ...]) -> None:
    probs, y = torch.linspace(0.1, 0.9, 7), torch.tensor([0, 1, 0, 1, 0, 1, 1])
    found = answers(probs.unsqueeze(1), y.reshape(shape))
    assert found.probability.tolist() == pytest.approx(probs.tolist())
    wrong = [float((p > 0.5) != bool(label)) for p, label in zip(probs.tolist(), y.tolist(), strict=True)]
    assert found.wrong.tolist() == wrong


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="expected class numbers"):
        answers(torch.rand(5, 3).softmax(1), torch.zeros(4, dtype=torch.long))
    with pytest.raises(DataError, match="expected class numbers"):
        answers(torch.rand(5, 3).softmax(1), torch.zeros(5))


def test_points_of_a_reliability_diagram() -> None:
    probability = torch.tensor([0.15] * 10 + [0.85] * 20, dtype=torch.float64)
    true = torch.tensor([1.0] + [0.0] * 9 + [1.0] * 16 + [0.0] * 4, dtype=torch.float64)
    points = reliability_points(AnswerProbabilities(probability, true, of_classes=True), bins=5)
    assert points.probability == pytest.approx((0.15, 0.85))
    assert points.share == pytest.approx((0.1, 0.8))
    assert points.count == (10, 20)
    assert all(low < share < high for low, share, high in zip(points.low, points.share, points.high, strict=True))


def test_rare_bins_are_left_out() -> None:
    probability = torch.tensor([0.95] * 400 + [0.15], dtype=torch.float64)
    points = reliability_points(AnswerProbabilities(probability, torch.ones(401, dtype=torch.float64), of_classes=True))
    assert points.count == (400,)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_interval_of_a_share_solves_its_quadratic_equation(share: float) -> None:
    """Wilson's ends p have (share - p)² = z² p (1 - p) / n."""
    for end in wilson(share, 17):
        difference = (share - end) ** 2 - 1.959964**2 * end * (1 - end) / 17
        assert abs(difference) < 1e-6
        assert 0 <= end <= 1


def test_coverage_of_calibrated_predictions_is_the_level() -> None:
    levels = (0.25, 0.5, 0.9)
    for level, share in zip(levels, observed_coverage(*normal(4000), levels), strict=True):
        assert abs(share - level) < 4 * math.sqrt(level * (1 - level) / 4000)


def test_risk_of_numbers_is_the_rmse_of_the_most_certain() -> None:
    noise = torch.linspace(0.1, 2, 5).unsqueeze(1)
    predictive = NormalPredictive(FunctionGaussian(torch.zeros(5, 1), torch.zeros(5, 1, 1)), noise)
    y = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    expected = [(y[:k].square().mean()).sqrt().item() for k in range(1, 6)]
    assert risk_of(predictive, y).risk.tolist() == pytest.approx(expected)
    with pytest.raises(DataError, match="one number for each output"):
        risk_of(predictive, torch.zeros(5, 2))
