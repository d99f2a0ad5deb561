"""Abstaining: the exact bound, its thresholds by the definition, the risk over draws of data, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

import lapwing as lw
from lapwing.decisions import abstaining
from lapwing.decisions.abstaining import THRESHOLDS, at_most, binomial_bound, needed
from lapwing.metrics import aurc
from tests.unit.decisions.problems import D, classes, classifier, generator, numbers, regressor

DRAWS = 200


@pytest.mark.parametrize(("errors", "count"), [(0, 12), (3, 57), (40, 1000), (7, 7)])
def test_the_bound_is_that_of_clopper_and_pearson(errors: int, count: int) -> None:
    level = 0.0025
    expected = stats.beta.ppf(1 - level, errors + 1, count - errors) if errors < count else 1.0
    assert binomial_bound(errors, count, level) == pytest.approx(expected, rel=1e-9)
    assert at_most(errors, count, 0.3) == pytest.approx(stats.binom.cdf(errors, count, 0.3), rel=1e-9)


def test_the_risk_of_what_is_answered_is_bounded() -> None:
    """The true risk is that of a large pool. The bound may fail in 5 % of the draws."""
    risk, draws = 0.2, generator(1)
    x, y = classes(20000, generator(2))
    predictive = classifier().predict(x)
    doubt, wrong = 1 - predictive.probs.amax(1), (predictive.probs.argmax(1) != y).double()
    assert float(wrong.mean()) > 1.15 * risk  # answering everything would not do
    risks, shares = [], []
    for _ in range(DRAWS):
        rule = classifier().abstain([classes(400, draws)], risk)
        kept = doubt < rule.threshold
        risks.append(float(wrong[kept].mean()))
        shares.append(float(kept.double().mean()))
        assert rule.bound <= risk
    failures = sum(value > risk for value in risks) / DRAWS
    assert failures <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / DRAWS)
    assert sum(shares) / DRAWS > 0.15  # and yet some are answered


def test_bounds_hold_at_all_thresholds_together() -> None:
    """An uncertainty that says nothing has the same risk at every threshold: the worst case for a choice among them."""
    risk, draws, failures = 0.1, generator(3), 0
    for _ in range(300):
        doubt = torch.rand(200, dtype=D, generator=draws)
        wrong = (torch.rand(200, dtype=D, generator=draws) < 1.001 * risk).double()
        failures += any(test.bounds(risk) for test in abstaining.tested(doubt, wrong, 0.95))
    assert failures / 300 <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 300)


def test_thresholds_by_the_definition() -> None:
    doubt = torch.rand(50, dtype=D, generator=generator(4)).mul(20).round().div(20)  # with ties
    wrong = (torch.rand(50, dtype=D, generator=generator(5)) < doubt).double()
    tests = abstaining.tested(doubt, wrong, 0.9)
    assert len(tests) == THRESHOLDS
    assert tests[-1].threshold == math.inf
    for test in tests:
        below = doubt < test.threshold
        assert (test.below, test.errors) == (int(below.sum()), int(wrong[below].sum()))
        assert test.bounds(0.3) == (test.below > 0 and test.bound <= 0.3)


def test_answers_are_those_below_the_threshold() -> None:
    x, y = classes(600, generator(6))
    rule = classifier().abstain([(x, y)], 0.25, by="entropy")
    predictive = classifier().predict(x)
    labels, answered = rule.answers(x)
    assert torch.equal(labels, predictive.probs.argmax(1))
    assert torch.equal(answered, predictive.entropy < rule.threshold)
    assert rule.share == pytest.approx(float(answered.double().mean()))
    assert rule.observed == pytest.approx(float((labels != y)[answered].double().mean()))
    assert rule.area == pytest.approx(aurc(predictive.entropy, (labels != y).double()), rel=1e-6)
    assert repr(rule.answers(x[:7])).endswith("of 7 inputs answered>")
    assert [part.shape for part in rule.answers(x[:7]).numpy()] == [(7,), (7,)]


def test_numbers_are_wrong_beyond_the_tolerance() -> None:
    data = [numbers(400, generator(7))]
    rule = regressor().abstain(data, 0.2, tolerance=1.0)
    x, y = data[0]
    wrong = (regressor().predict(x).mean - y).abs()[:, 0] > 1.0
    answers = rule.answers(x)
    assert answers.labels.shape == (400, 1)
    assert float(wrong[answers.answered].double().mean()) <= 0.2 < rule.share
    with pytest.raises(lw.LapwingError, match="tolerance is None, and the targets are numbers"):
        regressor().abstain(data, 0.2)
    with pytest.raises(lw.LapwingError, match=r"tolerance is -1\.0; expected a positive"):
        regressor().abstain(data, 0.2, tolerance=-1.0)


def test_refusals() -> None:
    x, y = classes(100, generator(8))
    data = [(x, y)]
    with pytest.raises(
        lw.LapwingError, match=r"no threshold bounds the risk by 0.001 .* the smallest bound is 0\.\d"
    ) as e:
        classifier().abstain(data, 0.001)
    assert f"{needed(0.001, 0.95)} without an error would do" in str(e.value)
    assert binomial_bound(0, needed(0.001, 0.95), 0.05 / THRESHOLDS) <= 0.001
    assert binomial_bound(0, needed(0.001, 0.95) - 1, 0.05 / THRESHOLDS) > 0.001
    with pytest.raises(lw.LapwingError, match=r"none bounds it below one\. Give more data") as e:
        classifier().abstain([(x[:4], (classifier().predict(x[:4]).probs.argmax(1) + 1) % 3)], 0.1)
    assert "Ask for that risk" not in str(e.value)
    with pytest.raises(lw.LapwingError, match="by is 'variance'; expected one of confidence"):
        classifier().abstain(data, 0.5, by="variance")
    with pytest.raises(lw.LapwingError, match="expected none: an answer is right or wrong"):
        classifier().abstain(data, 0.5, tolerance=1.0)
    with pytest.raises(lw.LapwingError, match="risk is 0; expected a probability"):
        classifier().abstain(data, 0)
