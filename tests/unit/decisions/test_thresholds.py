"""Thresholds: the exact bound on the risk, false alarms over draws of data, definitions, and what is refused."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from scipy import stats

import lapwing as lw
from lapwing.decisions.thresholds import (
    SCORES,
    THRESHOLDS,
    binomial_bound,
    binomial_cdf,
    fewest_without_error,
    threshold_tests,
)
from lapwing.demo.training import TrainingSettings, train_mlp
from lapwing.metrics import aurc
from tests.tolerances import assert_close
from tests.unit.decisions.problems import D, classes, classifier, generator, numbers, regressor

DRAWS = 200


@pytest.mark.parametrize(("errors", "count"), [(0, 12), (3, 57), (40, 1000), (7, 7)])
def test_the_bound_is_that_of_clopper_and_pearson(errors: int, count: int) -> None:
    level = 0.0025
    expected = stats.beta.ppf(1 - level, errors + 1, count - errors) if errors < count else 1.0
    assert binomial_bound(errors, count, level) == pytest.approx(expected, rel=1e-9)
    assert binomial_cdf(errors, count, 0.3) == pytest.approx(stats.binom.cdf(errors, count, 0.3), rel=1e-9)


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
        failures += any(test.bounds(risk) for test in threshold_tests(doubt, wrong, 0.95))
    assert failures / 300 <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 300)


def test_thresholds_by_the_definition() -> None:
    doubt = torch.rand(50, dtype=D, generator=generator(4)).mul(20).round().div(20)  # with ties
    wrong = (torch.rand(50, dtype=D, generator=generator(5)) < doubt).double()
    tests = threshold_tests(doubt, wrong, 0.9)
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


def test_refused_rules() -> None:
    x, y = classes(100, generator(8))
    data = [(x, y)]
    with pytest.raises(
        lw.LapwingError, match=r"no threshold bounds the risk by 0.001 .* the smallest bound is 0\.\d"
    ) as e:
        classifier().abstain(data, 0.001)
    assert f"{fewest_without_error(0.001, 0.95)} without an error would do" in str(e.value)
    assert binomial_bound(0, fewest_without_error(0.001, 0.95), 0.05 / THRESHOLDS) <= 0.001
    assert binomial_bound(0, fewest_without_error(0.001, 0.95) - 1, 0.05 / THRESHOLDS) > 0.001
    with pytest.raises(lw.LapwingError, match=r"none bounds it below one\. Give more data") as e:
        classifier().abstain([(x[:4], (classifier().predict(x[:4]).probs.argmax(1) + 1) % 3)], 0.1)
    assert "Ask for that risk" not in str(e.value)
    with pytest.raises(lw.LapwingError, match="by is 'variance'; expected one of confidence"):
        classifier().abstain(data, 0.5, by="variance")
    with pytest.raises(lw.LapwingError, match="expected none: an answer is right or wrong"):
        classifier().abstain(data, 0.5, tolerance=1.0)
    with pytest.raises(lw.LapwingError, match="risk is 0; expected a probability"):
        classifier().abstain(data, 0)


COUNT, RATE = 39, 0.05  # 0.05 · 40 is whole, so that the rate of false alarms is exactly that


@pytest.mark.parametrize("by", ["entropy", "variance"])
def test_false_alarms_have_the_rate(by: str) -> None:
    draws, rates = generator(1), []
    for _ in range(DRAWS):
        detector = classifier().ood([classes(COUNT, draws)], by=by, rate=RATE)
        rates.append(float(detector.flags(classes(50, draws)[0]).double().mean()))
    share = torch.tensor(rates, dtype=D)
    assert abs(float(share.mean()) - RATE) <= 4 * float(share.std()) / DRAWS**0.5


def test_scores_p_values_and_flags_by_the_definition() -> None:
    x, _ = classes(COUNT, generator(2))
    new = torch.cat([classes(6, generator(3))[0], x[:1]])  # one of them ties with a calibration datum
    posterior = classifier()
    for by in SCORES:
        detector = posterior.ood([x], by=by, rate=0.1)
        score = lambda inputs, by=by: (
            posterior.functions(inputs).variance.sum(1) if by == "variance" else getattr(posterior.predict(inputs), by)
        )
        assert_close(detector.score(new), score(new))
        reached = (detector.score(x)[None] >= detector.score(new)[:, None]).sum(1)
        expected = (1 + reached).double() / (COUNT + 1)
        assert_close(detector.p_values(new), expected)
        assert torch.equal(detector.flags(new), expected <= 0.1)
        assert torch.equal(detector.flags(new), detector.score(new) > detector.threshold)


def test_far_inputs_are_found_by_the_variance() -> None:
    detector = regressor().ood([numbers(200, generator(4))])
    assert detector.by == "variance"
    assert bool(detector.flags(torch.full((3, 2), 40.0, dtype=D)).all())
    assert repr(detector).startswith("<Detector: variance above")


@cache
def trained_classifier(validation: bool) -> tuple[lw.Fitted, torch.Tensor]:
    """A ReLU network that is certain of its classes far from all data, under a mixture; and inputs like its own."""
    draws = generator(20)
    centres = torch.randn(5, 10, dtype=D, generator=draws)

    def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(5, (count,), generator=draws)
        return centres[y] + 0.8 * torch.randn(count, 10, dtype=D, generator=draws), y

    train, held_out = rows(300), rows(200)
    model = train_mlp(*train, 5, TrainingSettings(hidden=(50,), activation="relu", epochs=50, weight_decay=0.0), 0)
    posterior = lw.fit(model, [train], "classification", validation=held_out if validation else None, progress=False)
    return posterior, rows(300)[0]


@pytest.mark.parametrize("validation", [False, True])
def test_the_default_finds_far_inputs_that_the_entropy_does_not(validation: bool) -> None:
    posterior, calibration = trained_classifier(validation)
    far = 10 * torch.randn(200, 10, dtype=D, generator=generator(21))
    default, entropy = (posterior.ood(calibration, by=by) for by in (None, "entropy"))
    assert default.by == "scaled_information"
    information = posterior.base.predict(far).mutual_information
    assert_close(posterior.ood(calibration, by="base_information").score(far), information)
    assert_close(default.score(far), information * posterior.base(far).variance.sum(-1).sqrt())
    assert float(default.flags(far).double().mean()) > 0.95
    assert float(entropy.flags(far).double().mean()) < 0.4


def test_the_entropy_is_the_default_without_error_bars() -> None:
    x, y = classes(60, generator(22))
    model = classifier().network.model
    new = classes(60, generator(24))[0]
    for validation in (None, classes(60, generator(25))):
        plain = lw.fit(model, [(x, y)], "classification", method=lw.baselines.MapOnly(), validation=validation)
        detector = plain.ood(new)
        assert detector.by == "entropy"
        assert_close(detector.score(x), plain.predict(x).entropy)


def test_a_plain_network_for_numbers_with_one_noise_is_refused() -> None:
    """Every input has the same score, so that none could ever be flagged."""
    (x, y), (new, _) = numbers(60, generator(23)), numbers(60, generator(26))
    plain = lw.fit(torch.nn.Linear(2, 1).double(), [(x, y)], "regression", method=lw.baselines.MapOnly())
    for by in (None, "variance"):
        with pytest.raises(lw.LapwingError, match=r"no error bars from its weights.*Fit one by another method"):
            plain.ood(new, by=by)
    spread = lw.fit(regressor().network.model, [(x, y)], lw.HeteroscedasticGaussian(), method=lw.baselines.MapOnly())
    assert spread.ood(new).by == "entropy"


def test_targets_are_not_used_and_loaders_are_read() -> None:
    x, y = classes(60, generator(5))
    one, other = classifier().ood(x), classifier().ood([(x[:25], y[:25]), (x[25:], y[25:])])
    assert one.by == "scaled_information"
    assert_close(one.scores, other.scores)
    assert_close(one.p_values([x[:9], x[9:13]]), other.p_values(x[:13]))


@pytest.mark.parametrize(
    ("count", "rate", "fewest"),
    [(2, 1 / 3, 2), (5, 1 / 3, 2), (9, 0.1, 9), (6, 3 / 7, 2), (19, 0.05, 19), (28, 2 / 29, 14)],
)
def test_flags_are_p_values_of_at_most_the_rate(count: int, rate: float, fewest: int) -> None:
    """Also where (n + 1) rate is a whole number, and rounding of the rate could decide."""
    detector = regressor().ood(numbers(count, generator(7))[0], rate=rate)
    new = torch.cat([numbers(40, generator(8))[0], torch.full((1, 2), 40.0, dtype=D)])
    assert torch.equal(detector.flags(new), detector.p_values(new) <= rate)
    assert bool(detector.flags(new)[-1])
    with pytest.raises(lw.LapwingError, match=rf"expected at least {fewest} for false alarms"):
        regressor().ood(new[: fewest - 1], rate=rate)


def test_refused_detectors() -> None:
    x, _ = classes(18, generator(6))
    with pytest.raises(lw.LapwingError, match="18 calibration data; expected at least 19 for false alarms at a rate"):
        classifier().ood(x)
    assert classifier().ood(torch.cat([x, x[:1]])).threshold < math.inf
    with pytest.raises(lw.LapwingError, match="by is 'margin'; expected one of entropy"):
        classifier().ood(x, by="margin")
    with pytest.raises(lw.LapwingError, match="rate is 2; expected a probability"):
        classifier().ood(x, rate=2)
