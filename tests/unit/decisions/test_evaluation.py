"""Evaluations: every score against lw.metrics, intervals against the bootstrap, tokens, ignored targets, refusals."""

from __future__ import annotations

import copy
import json
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing.compare import kind_of
from lapwing.decisions.collecting import training_residuals
from lapwing.decisions.evaluation import Compared, interval_text
from lapwing.errors import CalibrationWarning, DataError
from lapwing.metrics import ScoreInterval
from tests.unit.decisions.problems import D, classes, classifier, generator, numbers, regressor

RESAMPLES = 300


def test_scores_of_classes_are_those_of_the_metrics() -> None:
    x, y = classes(120, generator(1))
    evaluation = classifier().evaluate([(x[:50], y[:50]), (x[50:], y[50:])], resamples=RESAMPLES)
    plain = classifier().network.model(x).softmax(1)
    for part, probs in (("posterior", classifier().predict(x).probs), ("plain", plain)):
        wrong = (probs.argmax(1) != y).double()
        expected = {
            "nll": metrics.categorical_nll(probs, y), "accuracy": metrics.accuracy(probs, y),
            "brier": metrics.brier(probs, y), "ece": metrics.ece(probs, y),
            "classwise_ece": metrics.classwise_ece(probs, y), "adaptive_ece": metrics.adaptive_ece(probs, y),
            "aurc": metrics.aurc(1 - probs.amax(1), wrong),
        }  # fmt: skip
        found = {row.name: getattr(row, part).value for row in evaluation.rows}
        assert found == pytest.approx(expected, rel=1e-6)
    assert (evaluation.task, evaluation.inputs, evaluation.data) == ("classes", 120, 120)
    reliability = evaluation.reliability["plain network"]
    assert float(reliability.weight.sum()) == pytest.approx(1)
    assert float(evaluation.curve["posterior"].risk.mean()) == pytest.approx(
        evaluation["aurc"].posterior.value, rel=1e-6
    )


def test_scores_of_numbers_are_those_of_the_metrics() -> None:
    x, y = numbers(150, generator(2))
    evaluation = regressor().evaluate([(x, y)], level=0.8, resamples=RESAMPLES)
    p = regressor().predict(x)
    expected = {
        "nll": metrics.normal_nll(p.mean, p.std, y), "rmse": metrics.rmse(p.mean, y), "mae": metrics.mae(p.mean, y),
        "coverage": metrics.coverage(*p.interval(0.8), y), "width": metrics.interval_width(*p.interval(0.8)),
        "cqm": metrics.cqm(p.cdf(y), [k / 20 for k in range(1, 20)]),
        "aurc": metrics.aurc(p.std[:, 0], (p.mean - y)[:, 0].square()),
    }  # fmt: skip
    found = {row.name: row.posterior.value for row in evaluation.rows if row.name != "crps"}
    assert found == pytest.approx(expected, rel=1e-6)
    # The trapezoidal rule of the CRPS has an error below one hundredth of the standard deviation.
    exact = metrics.crps(p.mean, p.std, y)
    assert abs(evaluation["crps"].posterior.value - exact) < 0.01 * float(p.std.mean())
    mean, spread = regressor().network.model(x).chunk(2, 1)
    assert evaluation["nll"].plain.value == pytest.approx(metrics.normal_nll(mean, (0.5 * spread).exp(), y), rel=1e-6)
    assert evaluation["coverage"].target == 0.8
    reliability, curve = evaluation.reliability["posterior"], evaluation.curve["posterior"]
    covered = [metrics.coverage(*p.interval(level), y) for level in reliability.confidence.tolist()]
    assert reliability.accuracy.tolist() == pytest.approx(covered)
    assert float(curve.risk[-1]) == pytest.approx(metrics.rmse(p.mean, y) ** 2)


def test_intervals_are_those_of_the_bootstrap() -> None:
    """Of the same resampled inputs; quantiles of 1000 draws have errors of some hundredths of the width."""
    x, y = classes(100, generator(3))
    evaluation = classifier().evaluate([(x, y)], resamples=1000)
    probs, plain = classifier().predict(x).probs, classifier().network.model(x).softmax(1).detach()
    own = metrics.bootstrap(metrics.brier, probs, y, resamples=1000)
    gap = metrics.bootstrap(lambda p, q, y: metrics.brier(p, y) - metrics.brier(q, y), probs, plain, y, resamples=1000)
    row = evaluation["brier"]
    for found, expected in ((row.posterior, own), (row.difference, gap)):
        width = expected.high - expected.low
        assert found.value == pytest.approx(expected.value, rel=1e-6)
        assert abs(found.low - expected.low) < 0.15 * width
        assert abs(found.high - expected.high) < 0.15 * width
        assert found.std == pytest.approx(expected.std, rel=0.1)


def test_the_paired_difference_is_tighter_than_the_scores() -> None:
    row = classifier().evaluate([classes(200, generator(4))], resamples=RESAMPLES)["nll"]
    assert row.difference.std < 0.5 * row.posterior.std
    assert row.difference.value == pytest.approx(row.posterior.value - row.plain.value)


def interval(low: float, high: float) -> ScoreInterval:
    return ScoreInterval(0.5 * (low + high), low, high, 0.1)


@pytest.mark.parametrize(
    ("low", "high", "better", "verdict"),
    [(-2.0, -1.0, "lower", "better"), (1.0, 2.0, "lower", "worse"), (-1.0, 1.0, "lower", "undecided"),
     (1.0, 2.0, "higher", "better"), (-2.0, -1.0, "higher", "worse"), (1.0, 2.0, "", "")],
)  # fmt: skip
def test_verdicts(low: float, high: float, better: str, verdict: str) -> None:
    one = interval(0.0, 1.0)
    assert Compared("x", one, one, interval(low, high), better).verdict == verdict


def test_a_coverage_is_judged_by_its_distance_to_the_level() -> None:
    one = interval(0.0, 1.0)
    assert Compared("coverage", one, one, interval(1, 2), "", 0.9, interval(-0.2, -0.1)).verdict == "better"


def test_a_tiny_difference_decides_nothing_however_certain_it_is() -> None:
    """By the scores, and for a log-density by one nat: its size moves with the unit of the targets."""
    at, apart = interval(0.3, 0.3), interval(-1.2e-8, -1.1e-8)
    assert Compared("brier", at, at, apart, "lower").verdict == "undecided"
    assert Compared("nll", interval(1e-9, 1e-9), at, interval(-1e-4, -9e-5), "lower", unit=1.0).verdict == "undecided"
    assert Compared("coverage", at, at, apart, "", 0.9, apart).verdict == "undecided"
    small = interval(0.002, 0.002)
    assert Compared("brier", small, small, interval(-1e-5, -9e-6), "lower").verdict == "better"


def test_the_same_posterior_up_to_rounding_is_no_worse_than_the_best() -> None:
    x, y = numbers(60, generator(20))
    posterior = regressor()
    near = posterior.with_prior(5.0 * (1 + 1e-9))
    table = lw.evaluate({"one": posterior, "other": near}, [(x, y)], resamples=50)
    rows = {row.name: row for row in table.rows}
    assert {rows["one"].verdict, rows["other"].verdict} == {"", "undecided"}
    assert rows["one"].behind.value != rows["other"].behind.value


# Probabilities of one, and mean probability beside frequency


class Biased(nn.Module):
    """Logits that are too high by ``shift`` for rare labels, as after a training with class weights."""

    def __init__(self, outputs: int, shift: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, outputs)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


def rare(count: int, outputs: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, labels with probabilities of about .05, and the weights that these follow."""
    x = torch.randn(count, 2, dtype=D, generator=generator(seed))
    weight = torch.tensor([[0.5, -0.3], [0.2, 0.4]], dtype=D)[:outputs]
    p = (x @ weight.T - 3).sigmoid()
    return x, (torch.rand(p.shape, dtype=D, generator=generator(seed + 1)) < p).double(), weight


@cache
def biased(outputs: int, shift: float) -> lw.Fitted:
    x, y, weight = rare(300, outputs, 30)
    model = Biased(outputs, shift).double()
    with torch.no_grad():
        model.layer.weight.copy_(weight)
        model.layer.bias.fill_(-3.0)
    return lw.fit(model, [(x, y)], lw.Bernoulli(), method=lw.baselines.MapOnly())


def test_a_biased_binary_network_is_scored_by_the_probability_of_one() -> None:
    """Its guesses are right as often as they say, so that the error of the confidence sees nothing."""
    x, y, _ = rare(800, 1, 40)
    posterior = biased(1, 2.0)
    evaluation = posterior.evaluate([(x[:500], y[:500]), (x[500:], y[500:])], resamples=RESAMPLES)
    probs = posterior.predict(x).probs
    gap = float(probs.mean() - y.mean())
    assert gap > 0.15
    assert evaluation["ece"].posterior.value == pytest.approx(metrics.ece(probs, y), rel=1e-6)
    assert evaluation["ece"].posterior.value >= gap - 1e-9
    assert evaluation["adaptive_ece"].posterior.value == pytest.approx(metrics.adaptive_ece(probs, y), rel=1e-6)
    assert evaluation["ece"].posterior.low > 0.1
    (row,) = evaluation.classes
    assert (row.frequency, row.probability) == pytest.approx((float(y.mean()), float(probs.mean())))
    assert row.plain == pytest.approx(row.probability)
    assert row.verdict == "too high"
    assert row.gap.value == pytest.approx(gap)
    standard_error = float((y - probs).std()) / 800**0.5
    assert row.gap.std >= 0.99 * standard_error
    assert any(line.startswith("one ") and line.endswith("too high") for line in str(evaluation).splitlines())
    reliability = evaluation.reliability["posterior"]
    assert float((reliability.weight * (reliability.accuracy - reliability.confidence)).nansum()) == pytest.approx(-gap)


def test_honest_probabilities_are_within_their_intervals() -> None:
    """Twenty data sets: more than four with an interval that leaves zero out have a probability of .003."""
    posterior, off = biased(1, 0.0), 0
    for seed in range(20):
        x, y, _ = rare(200, 1, 50 + 2 * seed)
        off += bool(posterior.evaluate([(x, y)], resamples=2).classes[0].verdict)
    assert off <= 4


def test_every_label_has_its_frequency_and_the_class_wise_error_is_their_mean() -> None:
    x, y, _ = rare(400, 2, 42)
    y[::7, 1] = -1
    likelihood = lw.Bernoulli(ignore_index=-1)
    model = Biased(2, 0.7).double()
    posterior = lw.fit(model, [(x, y)], likelihood, method=lw.baselines.MapOnly())
    evaluation = posterior.evaluate([(x, y)], resamples=20)
    probs, known = posterior.predict(x).probs, y >= 0
    assert evaluation["classwise_ece"].posterior.value == pytest.approx(
        metrics.classwise_ece(probs, y, ignore_index=-1), rel=1e-6
    )
    for row in evaluation.classes:
        counts = known[:, row.number]
        assert row.probability == pytest.approx(float(probs[counts, row.number].mean()))
        assert row.frequency == pytest.approx(float(y[counts, row.number].mean()))


def test_classes_that_are_predicted_too_often_are_named_the_worst_first_and_few() -> None:
    """Twelve classes of equal frequency, and logits that favour the third."""
    y = torch.arange(600) % 12
    x = torch.randn(600, 2, dtype=D, generator=generator(60))
    model = nn.Linear(2, 12).double()
    with torch.no_grad():
        model.weight.mul_(0.1)
        model.bias.zero_()[3] = 1.5
    posterior = lw.fit(model, [(x, y)], "classification", method=lw.baselines.MapOnly())
    evaluation = posterior.evaluate([(x, y)], resamples=20)
    probs = posterior.predict(x).probs
    assert evaluation["classwise_ece"].posterior.value == pytest.approx(metrics.classwise_ece(probs, y), rel=1e-6)
    assert (evaluation.class_count, len(evaluation.classes), len(evaluation.shown_classes)) == (12, 12, 5)
    assert (evaluation.shown_classes[0].number, evaluation.shown_classes[0].verdict) == (3, "too high")
    assert "the 5 farthest off of 12" in str(evaluation)
    assert sum(row.probability for row in evaluation.classes) == pytest.approx(1)


def test_frequencies_of_tokens_and_of_very_many_classes() -> None:
    """Ignored tokens do not count; with more than a hundred classes there is no class-wise error, but the means."""
    x = torch.randn(9, 5, 3, dtype=D, generator=generator(5))
    y = torch.randint(4, (9, 5), generator=generator(6))
    y[:, 3:] = -100
    posterior = lw.fit(Tokens().double(), [(x, y)], "classification", method=lw.baselines.MapOnly())
    evaluation = posterior.evaluate([(x[:4], y[:4]), (x[4:], y[4:])], resamples=5)
    probs, labels = posterior.predict(x).probs[:, :3].flatten(0, 1), y[:, :3].flatten()
    assert evaluation["classwise_ece"].posterior.value == pytest.approx(metrics.classwise_ece(probs, labels), rel=1e-6)
    for row in evaluation.classes:
        assert row.probability == pytest.approx(float(probs[:, row.number].mean()), rel=1e-6)
        assert row.frequency == pytest.approx(float((labels == row.number).double().mean()))
    wide = lw.fit(nn.Linear(3, 130).double(), [(x[:, 0], y[:, 0])], "classification", method=lw.baselines.MapOnly())
    evaluation = wide.evaluate([(x[:, 0], y[:, 0])], resamples=5)
    assert "classwise_ece" not in [row.name for row in evaluation.rows]
    assert (evaluation.class_count, len(evaluation.classes)) == (130, 100)
    probs = wide.predict(x[:, 0]).probs
    for row in evaluation.classes:
        assert row.probability == pytest.approx(float(probs[:, row.number].mean()), rel=1e-6)
        assert row.frequency == pytest.approx(float((y[:, 0] == row.number).double().mean()))


# Targets in other units


@cache
def standardised() -> lw.Fitted:
    """A network that fits standardised targets up to a noise of .1, as loaded from a file."""
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.7)
        model.bias.zero_()
    x, y = lines(60, 70)
    return lw.fit(model, [(x, y)], "regression", prior=1.0)


def lines(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 2, dtype=D, generator=generator(seed))
    return x, 0.7 * x.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, dtype=D, generator=generator(seed + 1))


@pytest.mark.parametrize(("scale", "offset"), [(1e5, 2e5), (1.8, 32.0)])
def test_targets_in_other_units_are_a_warning_with_both_figures(tmp_path: Path, scale: float, offset: float) -> None:
    model = standardised().network.model
    standardised().save(tmp_path / "posterior")
    loaded = lw.load(tmp_path / "posterior", model)
    x, y = lines(50, 72)
    other = scale * y + offset
    trained = float(standardised().base.statistics.loss) * 2 / 60
    residual = float((model(x) - other).square().mean().detach())
    figures = re.escape(f"residual is {residual:.3g}, and {trained:.3g} on the training data")
    with pytest.warns(CalibrationWarning, match=figures) as seen:
        evaluation = loaded.evaluate([(x, other)], resamples=5)
    assert seen[0].filename == __file__
    assert len(evaluation.findings) == 1
    assert str(evaluation).splitlines()[-1].startswith("Note: data: the mean squared residual is")
    with pytest.warns(CalibrationWarning, match="calibration: the mean squared residual is") as seen:
        loaded.conformal([(x, other)])
    assert seen[0].filename == __file__
    with pytest.warns(CalibrationWarning, match="data: the mean squared residual is"):
        assert len(lw.evaluate({"one": loaded}, [(x, other)], resamples=5).findings) == 1


def test_the_output_with_the_largest_ratio_is_named_whatever_its_unit() -> None:
    model, unit = nn.Linear(2, 2).double(), torch.tensor([1.0, 1e-3], dtype=D)
    with torch.no_grad():
        model.weight.copy_(0.7 * unit[:, None].expand(2, 2))
        model.bias.zero_()
    x, y = lines(60, 70)
    posterior = lw.fit(model, [(x, y * unit)], lw.Gaussian(per_output=True), prior=1.0)
    with pytest.warns(CalibrationWarning, match="the mean squared residual of output 1 is"):
        posterior.evaluate([(x, (y + 2) * unit * torch.tensor([1e2, 1e4]))], resamples=5)


def test_standardised_targets_for_a_network_that_predicts_large_numbers_are_noticed() -> None:
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.fill_(7e4)
        model.bias.fill_(2e5)
    x, y = lines(60, 74)
    posterior = lw.fit(model, [(x, 1e5 * y + 2e5)], "regression", prior=1e-10)
    assert posterior.evaluate([(x, 1e5 * y + 2e5)], resamples=5).findings == ()
    with pytest.warns(CalibrationWarning, match="in other units"):
        posterior.evaluate([(x, y)], resamples=5)


def test_a_network_that_interpolates_its_training_data_raises_no_alarm() -> None:
    """Residuals of other data are ten million times those of the training data, and as large as the targets vary."""
    features = torch.randn(2, 40, dtype=D, generator=generator(76))
    model = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    x, y = (torch.randn(30, k, dtype=D, generator=generator(77 + k)) for k in (2, 1))  # noise alone
    with torch.no_grad():
        model[0].weight.copy_(3 * features.T)
        model[2].bias.zero_()
        model[2].weight.copy_(torch.linalg.lstsq(model[1](model[0](x)), y).solution.T)
        y = y + 1e-4 * torch.randn(30, 1, dtype=D, generator=generator(80))
    posterior = lw.fit(model, [(x, y)], "regression", prior=1.0)
    new = torch.randn(40, 2, dtype=D, generator=generator(81)), torch.randn(40, 1, dtype=D, generator=generator(82))
    trained = 2 * posterior.base.statistics.loss / 30
    assert float((model(new[0]) - new[1]).square().mean().detach()) > 1e5 * trained
    assert posterior.evaluate([new], resamples=5).findings == ()


class Tokens(nn.Module):
    """An output (T, C) for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_tokens_count_by_input_and_ignored_ones_do_not_count() -> None:
    x = torch.randn(9, 5, 3, dtype=D, generator=generator(5))
    y = torch.randint(4, (9, 5), generator=generator(6))
    y[:, 3:] = -100
    posterior = lw.fit(Tokens().double(), [(x, y)], "classification", method=lw.Full(), prior=1.0)
    evaluation = posterior.evaluate([(x[:4], y[:4]), (x[4:], y[4:])], resamples=50)
    assert (evaluation.inputs, evaluation.data) == (9, 27)
    probs = posterior.predict(x).probs[:, :3].flatten(0, 1)
    assert evaluation["nll"].posterior.value == pytest.approx(metrics.categorical_nll(probs, y[:, :3].flatten()))
    with pytest.raises(lw.LapwingError, match="an output for each token or pixel"):
        posterior.conformal([(x, y)], 0.5)
    with pytest.raises(lw.LapwingError, match="an output for each token or pixel"):
        posterior.acquire(x, 2)


@pytest.mark.parametrize("ignored", [False, True])
def test_scores_of_many_labels(ignored: bool) -> None:
    x = torch.randn(30, 2, dtype=D, generator=generator(7))
    y = (torch.rand(30, 3, dtype=D, generator=generator(8)) < 0.4).double()
    likelihood = lw.Bernoulli(ignore_index=-1) if ignored else lw.Bernoulli()
    posterior = lw.fit(nn.Linear(2, 3).double(), [(x, y)], likelihood, method=lw.Full(), prior=1.0)
    y[0, 0] = -1 if ignored else y[0, 0]
    evaluation = posterior.evaluate([(x, y)], resamples=50)
    probs, known = posterior.predict(x).probs, y >= 0
    likely = torch.where(y == 1, probs, 1 - probs)[known]
    assert evaluation.data == int(known.sum())
    assert evaluation["accuracy"].posterior.value == pytest.approx(float((likely > 0.5).double().mean()))
    assert evaluation["brier"].posterior.value == pytest.approx(float(2 * (1 - likely).square().mean()))
    if not ignored:
        assert evaluation["nll"].posterior.value == pytest.approx(-float(posterior.predict(x).log_prob(y).mean()))


def test_the_nll_is_that_of_the_known_labels_of_an_input_together() -> None:
    """Every input with a known label counts once, inside each component of a mixture, whatever its batch is."""
    x = torch.randn(30, 2, dtype=D, generator=generator(16))
    y = (torch.rand(30, 3, dtype=D, generator=generator(17)) < 0.4).double()
    y[0, 0] = y[1, 1:] = y[2] = -1
    posterior = lw.fit(nn.Linear(2, 3).double(), [(x, y)], lw.Bernoulli(ignore_index=-1), method=lw.Diagonal())
    mixture = posterior.predict(x)
    parts = torch.stack([torch.where(y == 1, part.probs, 1 - part.probs) for part in mixture.components])
    joint = parts.masked_fill(y < 0, 1).prod(-1)  # (K, B)
    expected = -(mixture.weights.to(joint) @ joint).log()[(y >= 0).any(1)].mean()
    assert len(mixture.components) > 1
    logits = posterior.network.model(x).detach()
    plain = torch.where(y == 1, logits, -logits).sigmoid().log().masked_fill(y < 0, 0).sum(1)[(y >= 0).any(1)]
    for data in ([(x, y)], [(x[i : i + 7], y[i : i + 7]) for i in range(0, 30, 7)]):
        row = posterior.evaluate(data, resamples=20)["nll"]
        assert row.posterior.value == pytest.approx(float(expected), rel=1e-9)
        assert row.plain.value == pytest.approx(-float(plain.mean()), rel=1e-9)


def test_soft_targets_are_refused() -> None:
    x, y = classes(20, generator(18))
    soft = nn.functional.one_hot(y, 3).double() * 0.7 + 0.1
    for call in (classifier().evaluate, classifier().conformal, lambda data: classifier().abstain(data, 0.5)):
        with pytest.raises(DataError, match=r"probabilities of the classes.*expected class numbers.*y\.argmax\(1\)"):
            call([(x, soft)])
    assert classifier().ood([(x, soft)]).threshold > 0  # targets are not used


@pytest.mark.parametrize("prior", [1.0, None], ids=["one belief", "mixture"])
def test_counts_have_no_cqm(prior: float | None) -> None:
    x = torch.linspace(-1, 1, 40, dtype=D)[:, None]
    y = torch.poisson(x.exp(), generator=generator(9))
    posterior = lw.fit(nn.Linear(1, 1).double(), [(x, y)], lw.Poisson(), method=lw.Full(), prior=prior)
    assert [row.name for row in posterior.evaluate([(x, y)], resamples=50).rows] == [
        "nll", "rmse", "mae", "crps", "coverage", "width", "aurc",
    ]  # fmt: skip


def test_table_and_json(tmp_path: Path) -> None:
    evaluation = regressor().evaluate([numbers(40, generator(10))], resamples=50)
    lines = str(evaluation).splitlines()
    assert lines[0] == "Scores on 40 inputs (numbers), with 95 % intervals in brackets"
    assert lines[1].split() == ["score", "posterior", "plain", "network", "difference"]
    assert any(line.startswith("coverage (95 %)") for line in lines)
    explained = lines[lines.index("") + 2 :]
    assert [line.split()[0] for line in explained] == [row.name for row in evaluation.rows]
    assert all(len(line.split()) > 3 for line in explained)  # no score is left without words
    evaluation.json(tmp_path / "scores.json")
    stored = json.loads((tmp_path / "scores.json").read_text())
    assert stored == json.loads(json.dumps(evaluation.to_json()))
    assert stored["scores"]["nll"]["posterior"]["value"] == evaluation["nll"].posterior.value


@pytest.mark.parametrize(
    ("values", "size", "text"),
    [
        ((0.4323, 0.313, 0.569), 0.0, "0.43 [0.31, 0.57]"), ((0.21012, 0.2096, 0.2107), 0.0, "0.2101 [0.2096, 0.2107]"),
        ((-0.0003, -0.0146, 0.0048), 0.0, "0.000 [-0.015, 0.005]"), ((-2e-9, -1e-8, 6e-9), 0.2, "0 [0, 0]"),
        ((-2e-9, -1e-8, 6e-9), 1e-8, "-2e-09 [-1e-08, 6e-09]"), ((1234.5, 1100.0, 1300.0), 0.0, "1234 [1100, 1300]"),
        ((0.0009, 0.00003, 0.0027), 0.004, "0.00090 [0.00003, 0.00270]"),
        ((0.5, 0.5, 0.5), 0.0, "0.5000 [0.5000, 0.5000]"), ((0.0, 0.0, 0.0), 0.0, "0 [0, 0]"),
        ((math.inf, 1.0, math.inf), 0.0, "inf [1, inf]"),
    ],
)  # fmt: skip
def test_scores_have_as_many_digits_as_their_intervals_allow(
    values: tuple[float, float, float], size: float, text: str
) -> None:
    assert interval_text(ScoreInterval(*values, 0.0), size=size) == text


def test_several_posteriors_are_ranked_with_the_plain_network(tmp_path: Path) -> None:
    x, y = classes(80, generator(11))
    other = lw.fit(classifier().network.model, [(x, y)], "classification", method=lw.Diagonal(), prior=4.0)
    given = {"full": classifier(), "diagonal": other}
    table = lw.evaluate(given, [(x, y)], resamples=RESAMPLES)
    assert {row.name for row in table.rows} == {"full", "diagonal", "plain network"}
    values = [row.scores["nll"].value for row in table.rows]
    assert values == sorted(values)
    assert table[table.best].behind == ScoreInterval(0.0, 0.0, 0.0, 0.0)
    assert table["full"].weights == 9
    assert table["plain network"].weights == 0
    assert (table["diagonal"].stored or 0) > 0
    own = classifier().evaluate([(x, y)], resamples=RESAMPLES)
    assert table["full"].scores["nll"] == own["nll"].posterior
    assert table["plain network"].scores["nll"] == own["nll"].plain
    head, *lines = str(table).splitlines()[1:]
    shown = ("nll", "accuracy", "brier", "ece")
    assert [word for word in head.split() if word in table["full"].scores] == list(shown)
    assert [line.split()[0] for line in lines[-4:]] == list(shown)  # each is explained
    assert len(lines) == 3 + 1 + 1 + len(shown)
    table.json(tmp_path / "table.json")
    stored = json.loads((tmp_path / "table.json").read_text())
    assert [row["scores"]["nll"]["value"] for row in stored["rows"]] == values
    assert [label.get_text() for label in table.plot().get_yticklabels()] == [row.name for row in table.rows[::-1]]
    with pytest.raises(lw.LapwingError, match="there is no posterior 'kron'; expected one of "):
        table["kron"]


def test_a_given_plain_network_is_not_added_again() -> None:
    x, y = classes(40, generator(12))
    plain = lw.fit(classifier().network.model, [(x, y)], "classification", method=lw.baselines.MapOnly())
    table = lw.evaluate({"full": classifier(), "map": plain}, [(x, y)], resamples=50)
    assert {row.name for row in table.rows} == {"full", "map"}
    own = classifier().evaluate([(x, y)], resamples=50)
    assert table["map"].scores["nll"].value == pytest.approx(own["nll"].plain.value)


def test_plain_networks_of_several_models_and_one_with_a_temperature_have_different_names() -> None:
    x, y = classes(40, generator(14))
    model = classifier().network.model
    other = lw.fit(copy.deepcopy(model), [(x, y)], "classification", prior=1.0)
    given = {"full": classifier(), "again": classifier(), "other": other}
    table = lw.evaluate(given, [(x, y)], resamples=5)
    assert {row.name for row in table.rows} == {*given, "plain network of full", "plain network of other"}
    held_out = [classes(40, generator(15))]
    scaled = lw.fit(model, [(x, y)], "classification", method=lw.baselines.MapOnly(), validation=held_out)
    table = lw.evaluate({"scaled": scaled}, [(x, y)], resamples=5)
    assert {row.name: row.weights for row in table.rows} == {"scaled": 0, "plain network": 0}
    plain = lw.fit(model, [(x, y)], "classification", method=lw.baselines.MapOnly())
    kinds = [kind_of(each.posterior) for each in (scaled, plain, classifier())]
    assert kinds == ["plain network with a temperature", "plain network", ""]


def test_refusals() -> None:
    data = [classes(10, generator(13))]
    with pytest.raises(lw.LapwingError, match="there is no score 'rmse'; expected one of nll, accuracy"):
        classifier().evaluate(data, resamples=10)["rmse"]
    with pytest.raises(lw.LapwingError, match="resamples is 1; expected an integer of at least 2"):
        classifier().evaluate(data, resamples=1)
    with pytest.raises(lw.LapwingError, match="data is 3; expected a DataLoader"):
        classifier().evaluate(3)  # type: ignore[arg-type]
    with pytest.raises(lw.LapwingError, match="data is empty"):
        classifier().evaluate([])
    with pytest.raises(lw.LapwingError, match="expected a mapping from names"):
        lw.evaluate([classifier()], data)  # type: ignore[arg-type]
    with pytest.raises(lw.LapwingError, match="'a' is 3; expected a posterior"):
        lw.evaluate({"a": 3}, data)  # type: ignore[dict-item]
    with pytest.raises(lw.LapwingError):
        lw.evaluate({"a": classifier(), "b": regressor()}, data)


def test_one_input_decides_nothing() -> None:
    """Every draw has the same input, so that intervals have no width."""
    x, y = classes(1, generator(19))
    evaluation = classifier().evaluate([(x, y)], resamples=20)
    assert {row.verdict for row in evaluation.rows} == {"undecided"}
    assert evaluation["nll"].difference.low == evaluation["nll"].difference.high != 0


@pytest.mark.parametrize("per_output", [False, True])
def test_residuals_of_the_training_data_are_those_of_the_network(per_output: bool) -> None:
    x, y = numbers(40, generator(3))
    y = torch.cat([y, 3 * y], 1)
    torch.manual_seed(0)
    model = nn.Linear(x.shape[1], 2).double().eval()
    likelihood = lw.Gaussian(per_output=True) if per_output else lw.Gaussian(noise_std=0.5)
    posterior = lw.fit(model, [(x[:15], y[:15]), (x[15:], y[15:])], likelihood, prior=1.0)
    squares = (model(x) - y).detach().square().mean(0)
    residuals = training_residuals(posterior)
    assert residuals is not None
    assert residuals.tolist() == pytest.approx((squares if per_output else squares.mean().expand(2)).tolist())
