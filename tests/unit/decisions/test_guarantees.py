"""Guarantees of calibration data: definitions, rates over draws of data, and what is refused."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import lapwing as lw
from lapwing.decisions.guarantees import (
    SCORES,
    THRESHOLDS,
    binomial_bound,
    binomial_cdf,
    class_scores,
    conformal_quantile,
    conformal_rank,
    fewest_without_error,
    row_shares,
    threshold_tests,
)
from lapwing.demo.training import TrainingSettings, train_mlp
from lapwing.metrics import aurc
from tests.tolerances import assert_close, assert_within
from tests.unit.decisions.problems import D, classes, classifier, generator, numbers, regressor

DRAWS = 200
COUNT, LEVEL = 39, 0.9  # (39 + 1) 0.9 is a whole number, so that the coverage is exactly the level


@pytest.mark.parametrize("score", ["adaptive", "threshold"])
def test_sets_cover_labels_at_the_level(score: str) -> None:
    shares, draws = [], generator(1)
    for seed in range(DRAWS):
        sets = classifier().conformal([classes(COUNT, draws)], LEVEL, score=score, seed=seed)
        shares.append(sets.coverage([classes(60, draws)]).share)
    assert_within(torch.tensor(shares, dtype=D), torch.tensor(LEVEL, dtype=D), 4)


def test_intervals_cover_numbers_at_the_level() -> None:
    """Those of constant width are in the test of groups."""
    shares, draws = [], generator(2)
    for _ in range(DRAWS):
        intervals = regressor().conformal([numbers(COUNT, draws)], LEVEL)
        shares.append(intervals.coverage([numbers(60, draws)]).share)
    assert_within(torch.tensor(shares, dtype=D), torch.tensor(LEVEL, dtype=D), 4)


def noisy(x: Tensor) -> Tensor:
    return (x[:, 0].abs() > 0.8).long()


def test_every_group_is_covered_at_the_level() -> None:
    """With one width for all, the group with little noise is covered too often and the other too rarely."""
    draws, apart = generator(3), []
    for _ in range(DRAWS):
        calibration, test = numbers(180, draws), numbers(150, draws)
        grouped = regressor().conformal([calibration], LEVEL, score="constant", groups=noisy)
        shares = grouped.coverage([test]).by_group
        apart.append([shares[0], shares[1]])
    means, error = torch.tensor(apart, dtype=D).mean(0), torch.tensor(apart, dtype=D).std(0) / DRAWS**0.5
    # At least the level, and at most 1/(n + 1) more, for groups of random size: about 50 at least.
    assert bool((means >= LEVEL - 4 * error).all())
    assert bool((means <= LEVEL + 1 / 50 + 4 * error).all())
    calibration, (x, y) = numbers(2000, draws), numbers(2000, draws)
    low, high = regressor().conformal([calibration], LEVEL, score="constant").predict(x)
    inside = ((low <= y) & (y <= high)).double()[:, 0]
    assert float(inside[noisy(x) == 0].mean()) > 0.95
    assert float(inside[noisy(x) == 1].mean()) < 0.85


def test_the_quantile_is_the_rank_of_the_definition() -> None:
    scores = torch.randn(57, 3, dtype=D, generator=generator(6))
    for level in (0.5, 0.9, 0.95):
        rank = math.ceil(round(58 * level, 9))
        assert conformal_rank(57, level) == rank
        expected = torch.stack([torch.kthvalue(column, rank).values for column in scores.unbind(1)])
        assert_close(conformal_quantile(scores, level), expected)
    assert conformal_rank(19, 0.9) == 18  # 20 · 0.9 is 18.000000000000004 if the level is not read as a decimal


def test_adaptive_scores_by_hand() -> None:
    probs = torch.tensor([[0.2, 0.7, 0.1]], dtype=D)
    share = torch.rand(1, 1, dtype=D, generator=generator(7))
    expected = torch.tensor([[0.7, 0.0, 0.9]], dtype=D) + share * probs
    assert_close(class_scores("adaptive", probs, share), expected)
    assert_close(class_scores("threshold", probs, share), 1 - probs)


def test_shares_are_uniform_and_belong_to_the_row() -> None:
    probs = torch.randn(4000, 3, dtype=D, generator=generator(12)).mul(4).softmax(1)
    shares = row_shares(probs, 0)
    ranks = shares.flatten().sort().values - (torch.arange(4000, dtype=D) + 0.5) / 4000
    assert ranks.abs().max() < 1.95 / 4000**0.5  # Kolmogorov's statistic, at a probability of 0.001
    assert torch.equal(row_shares(probs[17:18], 0), shares[17:18])
    assert torch.corrcoef(torch.cat([shares, row_shares(probs, 1)], 1).T)[0, 1].abs() < 4 / 4000**0.5
    sure = torch.stack([torch.linspace(10, 30, 500, dtype=D), torch.zeros(500, dtype=D)], 1).softmax(1)
    assert len(row_shares(sure, 0).unique()) > 250  # probabilities that round to one still differ


def test_sets_do_not_depend_on_the_batch() -> None:
    x, _ = classes(40, generator(13))
    sets = classifier().conformal([classes(COUNT, generator(8))], LEVEL, seed=14)
    one_by_one = torch.cat([sets.predict(row[None]).members for row in x])
    assert (one_by_one == sets.predict(x).members).all(1).double().mean() > 0.9  # but for digits at an edge


def test_sets_and_intervals_by_hand() -> None:
    calibration, (x, _) = classes(COUNT, generator(8)), classes(7, generator(9))
    posterior = classifier()
    sets = posterior.conformal([calibration], LEVEL, score="threshold")
    own = 1 - posterior.predict(calibration[0]).probs.gather(1, calibration[1][:, None])
    limit = own.flatten().sort().values[35]
    assert torch.equal(sets.predict(x).members, 1 - posterior.predict(x).probs <= limit)
    assert sets.predict(x).labels == [row.nonzero().flatten().tolist() for row in sets.predict(x).members]
    assert sets.predict(x).numpy().shape == (7, 3)
    size = float(sets.predict(x).size.double().mean())
    assert repr(sets.predict(x)) == f"<PredictionSets: 7 inputs, {size:.3g} classes on average>"
    assert repr(sets) == f"<ConformalSets: level 0.9, threshold, {COUNT} calibration data>"
    data, (x, _) = numbers(COUNT, generator(10)), numbers(7, generator(11))
    low, high = regressor().conformal([data], LEVEL).predict(x)
    p, new = regressor().predict(data[0]), regressor().predict(x)
    half = (((data[1] - p.mean).abs() / p.std).flatten().sort().values[35]) * new.std
    assert_close(low, new.mean - half)
    assert_close(high, new.mean + half)


def labels(outputs: int) -> tuple[lw.Fitted, Tensor, Tensor]:
    """Return a posterior of binary labels, inputs, and labels that mostly follow it."""
    x = torch.randn(400, 2, dtype=D, generator=generator(70))
    model = nn.Linear(2, outputs).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[4.0, 1.0], [-1.0, 5.0]], dtype=D)[:outputs])
        model.bias.zero_()
        y = (torch.rand(400, outputs, dtype=D, generator=generator(71)) < model(x).sigmoid()).double()
    return lw.fit(model, [(x[:100], y[:100])], lw.Bernoulli(), method=lw.Full(), prior=5.0), x[100:], y[100:]


def test_sets_of_a_binary_label_hold_zero_and_one() -> None:
    posterior, x, y = labels(1)
    sets = posterior.conformal([(x, y)], LEVEL, score="threshold")
    scores = 1 - torch.cat([1 - posterior.predict(x).probs, posterior.predict(x).probs], 1)
    own = scores.gather(1, y.long())
    assert torch.equal(sets.predict(x).members, scores <= own.sort(0).values[math.ceil(301 * LEVEL) - 1])
    several, x, y = labels(2)
    with pytest.raises(lw.LapwingError, match="2 binary labels for each input; expected one label, or classes"):
        several.conformal([(x, y)], LEVEL)


@pytest.mark.parametrize("by", ["confidence", "entropy"])
def test_an_input_with_several_labels_is_right_if_all_are(by: str) -> None:
    posterior, x, y = labels(2)
    rule = posterior.abstain([(x, y)], 0.4, by=by)
    probs = posterior.predict(x).probs
    doubt = torch.minimum(probs, 1 - probs).amax(1) if by == "confidence" else posterior.predict(x).entropy
    answers, answered = rule.answers(x)
    assert torch.equal(answers, (probs > 0.5).long())
    assert torch.equal(answered, doubt < rule.threshold)
    assert rule.observed == pytest.approx(float((answers != y).any(1)[answered].double().mean()))
    assert repr(rule).startswith(f"<Abstention: answers {100 * rule.share:.3g} % by {by}, risk at most 0.4 ")
    curve = rule.plot().get_lines()[0].get_ydata()
    assert curve[-1] == pytest.approx(float((answers != y).any(1).double().mean()))


def test_several_outputs_are_each_covered() -> None:
    x = torch.randn(400, 2, dtype=D, generator=generator(13))
    y = torch.cat([x[:, :1], 20 * x[:, 1:]], 1) + torch.randn(400, 2, dtype=D, generator=generator(14))
    model = nn.Linear(2, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 18.0]], dtype=D))
        model.bias.zero_()
    posterior = lw.fit(model, [(x[:50], y[:50])], lw.Gaussian(1.0), method=lw.Full(), prior=1.0)
    low, high = posterior.conformal([(x[50:250], y[50:250])], LEVEL).predict(x[250:])
    share = ((low <= y[250:]) & (y[250:] <= high)).double().mean(0)
    # A beta distribution of the coverage given 200 calibration data, and a binomial one of 150 test data.
    assert bool(((share - LEVEL).abs() <= 4 * (0.09 / 200 + 0.09 / 150) ** 0.5).all())


@cache
def with_unknown() -> lw.Fitted:
    """The classifier with 255 as the mark of unknown labels."""
    likelihood = lw.Categorical(ignore_index=255)
    return lw.fit(classifier().network.model, [classes(40, generator(90))], likelihood, method=lw.Full(), prior=1.0)


def test_ignored_labels_are_left_out_of_calibration_groups_and_coverage() -> None:
    (x, y), (new, labels) = classes(60, generator(17)), classes(50, generator(18))
    y[::7], labels[3:40:5] = 255, 255
    kept, known = y != 255, labels != 255
    whole = with_unknown().conformal([(x, y)], 0.8, groups=noisy(x), score="threshold")
    part = with_unknown().conformal([(x[kept], y[kept])], 0.8, groups=noisy, score="threshold")
    assert whole.count == int(kept.sum())
    for group in (0, 1):
        assert_close(whole.quantiles[group], part.quantiles[group])
    batches = [(new[:20], labels[:20]), (new[20:], labels[20:])]
    inside = part.predict(new).members[known].gather(1, labels[known].unsqueeze(1)).double().flatten()
    expected = {group: float(inside[noisy(new)[known] == group].mean()) for group in (0, 1)}
    for found in (part.coverage(batches), whole.coverage(batches, groups=noisy(new))):
        assert found.by_group == pytest.approx(expected)
        assert (found.share, found.count) == (pytest.approx(float(inside.mean())), int(known.sum()))
    with pytest.raises(lw.LapwingError, match="groups is None; expected the group number of each input"):
        whole.coverage(batches)
    with pytest.raises(lw.LapwingError, match=r"groups have the shape \(49,\), and the data have more rows"):
        whole.coverage(batches, groups=noisy(new)[:-1])
    with pytest.raises(lw.LapwingError, match=r"groups have the shape \(51,\).*expected \(50,\) whole numbers"):
        whole.coverage(batches, groups=torch.cat([noisy(new), noisy(new[:1])]))


def test_group_functions_see_tensors_of_every_batch() -> None:
    """Of a loader that shuffles, inputs and groups are of the same pass."""
    (x, y), (new, _) = numbers(60, generator(19)), numbers(13, generator(20))
    intervals = regressor().conformal([(x, y)], 0.8, groups=noisy)
    expected = intervals.predict(new)
    in_batches = [(new[:5], new[:5, :1]), (new[5:], new[5:, :1])]
    for given in (in_batches, iter(in_batches), new.numpy()):
        for end, other in zip(intervals.predict(given), expected, strict=True):
            assert_close(end, other)
    sets = classifier().conformal([classes(60, generator(21))], 0.8, groups=noisy, score="threshold")
    assert torch.equal(sets.predict([new[:5], new[5:]]).members, sets.predict(new).members)


def test_refused_sets() -> None:
    data = [classes(8, generator(16))]
    with pytest.raises(lw.LapwingError, match=r"8 calibration data; expected at least 9 for the level 0\.9"):
        classifier().conformal(data, 0.9)
    with pytest.raises(lw.LapwingError, match=r"expected at least 19 for the level 0\.95"):
        classifier().conformal(data, 0.95)
    with pytest.raises(lw.LapwingError, match="score is 'scaled'; expected one of adaptive, threshold"):
        classifier().conformal(data, 0.8, score="scaled")
    with pytest.raises(lw.LapwingError, match=r"level is 1\.5; expected a probability"):
        classifier().conformal(data, 1.5)
    with pytest.raises(lw.LapwingError, match=r"in group 1; expected at least 4 for the level 0.8"):
        classifier().conformal(data, 0.8, groups=torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]))
    with pytest.raises(lw.LapwingError, match=r"groups have the shape \(3,\)"):
        classifier().conformal(data, 0.8, groups=torch.tensor([0, 0, 1]))
    with pytest.raises(lw.LapwingError, match="groups were given and the calibration had none"):
        classifier().conformal(data, 0.5).predict(data[0][0], groups=torch.zeros(8, dtype=torch.long))
    grouped = classifier().conformal(data, 0.5, groups=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    with pytest.raises(lw.LapwingError, match="groups is None; expected the group number of each input"):
        grouped.predict(data[0][0])
    with pytest.raises(lw.LapwingError, match="group 7, which no calibration datum has; expected one of 0, 1"):
        grouped.predict(data[0][0], groups=torch.full((8,), 7))
    assert grouped.predict(data[0][0], groups=torch.ones(8, dtype=torch.long)).members.shape == (8, 3)


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


RATE = 0.05  # 0.05 · 40 is whole, so that the rate of false alarms is exactly that


@pytest.mark.parametrize("by", ["entropy", "variance", "extended_information"])
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
    assert default.by == "extended_information"
    information = posterior.base.predict(far).mutual_information
    assert_close(posterior.ood(calibration, by="base_information").score(far), information)
    spread, usual = (posterior.base(inputs).variance.sum(-1).sqrt() for inputs in (far, calibration))
    assert_close(posterior.ood(calibration, by="scaled_information").score(far), information * spread)
    limit = float(usual.sort(descending=True).values[3])  # three of 300 are beyond
    extended = (spread / limit).clamp_min(1).log() + information
    assert_close(default.score(far), extended * spread)
    assert float(default.flags(far).double().mean()) > 0.95
    assert float(entropy.flags(far).double().mean()) < 0.4


def test_the_default_finds_far_inputs_of_a_network_that_is_certain_of_their_class() -> None:
    """Two inputs and two classes: the margins of a ReLU network grow as fast as its standard deviation."""
    draws = generator(31)

    def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(2, (count,), generator=draws)
        angle = torch.pi * torch.rand(count, dtype=D, generator=draws)
        moons = torch.stack([angle.cos() + y - 0.5, angle.sin() * (1 - 2 * y) + 0.5 * y - 0.25], 1)
        return moons + 0.25 * torch.randn(count, 2, dtype=D, generator=draws), y

    train, calibration, test = rows(400), rows(400)[0], rows(400)[0]
    model = train_mlp(*train, 2, TrainingSettings(hidden=(50,), activation="relu", epochs=60), 0)
    posterior = lw.fit(model, [train], "classification", progress=False)
    far = 10 * torch.randn(300, 2, dtype=D, generator=draws)
    default, scaled = (posterior.ood(calibration, by=by) for by in (None, "scaled_information"))
    assert float(default.flags(far).double().mean()) > 0.9
    assert float(scaled.flags(far).double().mean()) < 0.6
    alarms = float(default.flags(test).double().mean())
    assert alarms < 0.05 + 4 * (0.05 * 0.95 * 2 / 400) ** 0.5


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
