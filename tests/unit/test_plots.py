"""Pictures, and the numbers behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lapwing as lw
from lapwing.compare import Evaluated, Evaluations
from lapwing.errors import DataError, LapwingError, UnsupportedError
from lapwing.plots import (
    PLAIN,
    POSTERIOR,
    AnswerProbabilities,
    EvidenceCurve,
    answers,
    new_axis,
    reliability_points,
    risk_of,
    wilson,
)
from lapwing.posteriors.base import EffectiveParameters, Step, Trace
from lapwing.predictives.numbers import NormalPredictive
from lapwing.values.gaussian import FunctionGaussian

# The numbers behind pictures, against their definitions.


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


@pytest.mark.parametrize("label", [255, 2, -1])
def test_labels_that_are_not_classes_are_refused(label: int) -> None:
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


def test_risk_of_numbers_is_the_rmse_of_the_most_certain() -> None:
    noise = torch.linspace(0.1, 2, 5).unsqueeze(1)
    predictive = NormalPredictive(FunctionGaussian(torch.zeros(5, 1), torch.zeros(5, 1, 1)), noise)
    y = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    expected = [(y[:k].square().mean()).sqrt().item() for k in range(1, 6)]
    assert risk_of(predictive, y).risk.tolist() == pytest.approx(expected)
    with pytest.raises(DataError, match="one number for each output"):
        risk_of(predictive, torch.zeros(5, 2))


# Pictures of predictions beside targets, by what their axes hold.


def labels(n: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities of three classes, and labels drawn from them."""
    probs = (2 * torch.randn(n, 3)).softmax(1)
    return probs, torch.multinomial(probs, 1).squeeze(1)


def test_reliability_has_the_points_of_each_prediction_in_its_colour() -> None:
    probs, y = labels()
    ax = lw.plots.reliability({"plain network": probs.square().softmax(1), "Lapwing": probs}, y, bins=6)
    first, second = ax.containers
    assert (first.lines[0].get_color(), second.lines[0].get_color()) == (PLAIN, POSTERIOR)
    binned = lw.metrics.calibration(probs.max(1).values, probs.argmax(1) == y, 6)
    kept = binned.weight >= 0.005
    assert second.lines[0].get_ydata().tolist() == pytest.approx(binned.accuracy[kept].tolist())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["ideal", "plain network", "Lapwing"]
    assert ax.get_xlim() == (0, 1)


def test_reliability_takes_binary_labels_and_an_axis() -> None:
    ax = new_axis()
    probs = torch.linspace(0, 1, 100).unsqueeze(1)
    assert lw.plots.reliability(probs, (probs > 0.4).float(), ax=ax) is ax
    assert ax.get_xlabel() == "predicted probability"


def test_intervals_have_coverages_and_a_band_of_chance() -> None:
    predictive, y = normal(500, scale=2.0)
    ax = lw.plots.intervals({"plain network": predictive, "twice as wide": predictive}, y)
    line = next(each for each in ax.get_lines() if each.get_label() == "plain network")
    levels, shares = line.get_xdata().tolist(), line.get_ydata().tolist()
    low, high = predictive.interval(levels[4])
    assert shares[4] == pytest.approx(lw.metrics.coverage(low, high, y))
    assert all(share < level for level, share in zip(levels, shares, strict=True))  # targets spread twice as far
    (band,) = ax.collections
    edges = band.get_paths()[0].vertices
    middle = edges[abs(edges[:, 0] - 0.5) < 1e-9][:, 1]
    assert middle.max() - 0.5 == pytest.approx(1.96 * (0.25 / 500) ** 0.5, rel=1e-3)


def test_intervals_of_labels_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"lw\.plots\.reliability"):
        lw.plots.intervals(torch.rand(5, 3), torch.zeros(5))


def test_risk_coverage_of_predictions_and_of_a_curve() -> None:
    probs, y = labels()
    curve = lw.metrics.risk_coverage(1 - probs.max(1).values, probs.argmax(1) != y)
    for drawn in (lw.plots.risk_coverage(probs, y), lw.plots.risk_coverage(curve)):
        (line,) = drawn.get_lines()
        assert line.get_ydata()[-1] == pytest.approx(float((probs.argmax(1) != y).double().mean()))
        assert max(line.get_ydata()) < drawn.get_ylim()[1]
        assert len(line.get_ydata()) <= 201
    predictive, numbers = normal(50)
    assert lw.plots.risk_coverage(predictive, numbers).get_ylabel() == "RMSE of the answers"


def test_no_predictions_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="at least one name"):
        lw.plots.reliability({}, torch.zeros(3))
    with pytest.raises(DataError):
        lw.plots.reliability(torch.rand(3, 2), None)


def test_nothing_is_drawn_by_pyplot() -> None:
    from matplotlib import pyplot

    lw.plots.reliability(*labels())
    assert pyplot.get_fignums() == []


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'lapwing\[plots\]'"):
        lw.plots.reliability(*labels())


def test_names_with_dollar_signs_are_drawn_as_they_are() -> None:
    probs, y = labels(40)
    ax = lw.plots.reliability({"$cheap": probs}, y)
    assert ax.containers[0].get_label() == r"\$cheap"
    ax.figure.canvas.draw()


def test_evaluations_are_drawn_with_the_plain_network() -> None:
    x = torch.randn(60, 2)
    kinds = {"classification": (x[:, 0] > 0).long(), "regression": x[:, :1] + 0.1 * torch.randn(60, 1)}
    for kind, y in kinds.items():
        net = torch.nn.Linear(2, 2 if kind == "classification" else 1)
        posterior = lw.fit(net, [(x, y)], kind, prior=1.0)
        evaluation = posterior.evaluate([(x, y)], resamples=2)
        predictions = {"plain network": lw.fit(net, [(x, y)], kind, method=lw.baselines.MapOnly()).predict(x),
                       "posterior": posterior.predict(x)}  # fmt: skip
        for drawn in (lw.plots.risk_coverage, lw.plots.reliability if kind == "classification" else lw.plots.intervals):
            lines = [[line.get_ydata().tolist() for line in drawn(*given).get_lines() if line.get_label() != "ideal"]
                     for given in ((evaluation,), (predictions, y))]  # fmt: skip
            for one, other in zip(*lines, strict=True):
                assert one == pytest.approx(other, abs=1e-5)
        assert evaluation.plot().get_legend() is not None


def test_a_ranking_of_few_resamples_has_bars() -> None:
    """All resampled scores may be on one side of the score of the data."""
    scores = {"nll": lw.metrics.ScoreInterval(1.0, 1.1, 1.3, 0.1)}
    rows = (Evaluated("one", scores, scores["nll"], 0.1, 2, None),)
    ax = lw.plots.ranking(Evaluations(rows, "classes", 3, 3, 0.95, 0.95))
    assert ax.containers[0].lines[2][0].get_segments()[0][:, 0].tolist() == pytest.approx([1.0, 1.3])


def test_reliability_of_numbers_names_the_picture_of_these() -> None:
    x = torch.randn(30, 2)
    posterior = lw.fit(torch.nn.Linear(2, 1), [(x, x[:, :1])], lw.Gaussian(0.5), prior=1.0)
    for given in ((posterior.predict(x), x[:, :1]), (posterior.evaluate([(x, x[:, :1])], resamples=2),)):
        with pytest.raises(UnsupportedError, match=r"use lw\.plots\.intervals"):
            lw.plots.reliability(*given)


# Bands and maps, by what their axes hold.


def predicted(x: torch.Tensor) -> NormalPredictive:
    """Return predictions at x with mean x, and the second output -x, that are unsure far from zero."""
    mean = torch.cat([x, -x], 1)
    return NormalPredictive(FunctionGaussian(mean, torch.diag_embed(mean.square())), torch.full_like(mean, 0.25))


def reach(ax: Any, number: int) -> tuple[float, float]:
    """Return the lowest and the highest point of an area."""
    heights = ax.collections[number].get_paths()[0].vertices[:, 1]
    return float(heights.min()), float(heights.max())


@pytest.mark.parametrize("output", [0, 1])
def test_a_band_has_the_intervals_of_targets_and_of_the_function(output: int) -> None:
    x = torch.tensor([[3.0], [-1.0], [2.0]])
    prediction = predicted(x)
    ax = lw.plots.band(prediction, x, output=output, level=0.9, data=(x, torch.cat([x, x - 40], 1)))
    low, high = (end[:, output] for end in prediction.interval(0.9))
    assert reach(ax, 0) == pytest.approx((float(low.min()), float(high.max())))
    half = 1.644854 * x.abs().squeeze(1)
    mean = prediction.mean[:, output]
    assert reach(ax, 1) == pytest.approx((float((mean - half).min()), float((mean + half).max())), rel=1e-5)
    bottom, top = ax.get_ylim()
    assert bottom < min(float(low.min()), -41.0 if output else 0.0)
    assert top > float(high.max())
    assert ax.get_lines()[0].get_xdata().tolist() == [-1.0, 2.0, 3.0]


def test_bands_of_other_things_are_refused() -> None:
    x = torch.zeros(4, 1)
    with pytest.raises(DataError, match="one number for each input"):
        lw.plots.band(predicted(x), torch.zeros(4, 3))
    with pytest.raises(DataError, match="output is 2"):
        lw.plots.band(predicted(x), x, output=2)
    with pytest.raises(UnsupportedError, match="expected one of numbers"):
        lw.plots.band(torch.rand(4, 2), x)


def test_a_grid_surrounds_its_inputs() -> None:
    x = torch.tensor([[0.0, 1.0], [10.0, 3.0], [4.0, 2.0]])
    made = lw.plots.grid(x, points=4, margin=0.5)
    assert made.shape == (16, 2)
    assert made.amin(0).tolist() == pytest.approx([-5.0, 0.0])
    assert made.amax(0).tolist() == pytest.approx([15.0, 4.0])
    with pytest.raises(DataError, match="Make the inputs by hand"):
        lw.plots.grid(torch.zeros(5, 3))


@pytest.mark.parametrize("classes", [1, 3])
def test_a_map_shows_confidence_in_its_range(classes: int) -> None:
    points = lw.plots.grid(torch.randn(9, 2), points=5)
    probs = torch.rand(25, 1) if classes == 1 else torch.rand(25, 3).softmax(1)
    ax = lw.plots.confidence_map(probs, points, data=(torch.randn(8, 2), torch.arange(8) % 3))
    colours = ax.figure.axes[1]
    assert colours.get_ylabel() == "confidence"
    assert colours.get_ylim() == pytest.approx((0.5 if classes == 1 else 1 / 3, 1.0))
    assert len(ax.collections) == 1 + 3


def test_a_map_has_a_colour_where_a_network_is_sure() -> None:
    points = lw.plots.grid(torch.randn(9, 2), points=5)
    ax = lw.plots.confidence_map(torch.eye(2)[(points[:, 0] > 0).long()], points)
    *_, highest = ax.collections[0].get_paths()
    assert len(highest.vertices) > 0


def test_a_map_of_numbers_shows_their_spread() -> None:
    points = lw.plots.grid(torch.randn(9, 2), points=5)
    ax = lw.plots.confidence_map(predicted(points[:, :1]), points)
    assert ax.figure.axes[1].get_ylabel() == "standard deviation"
    with pytest.raises(DataError, match=r"lw\.plots\.grid"):
        lw.plots.confidence_map(predicted(points[:, :1]), points[:, :1])


# Pictures of what was learned, by what their axes hold.


@pytest.fixture(scope="module")
def fitted() -> lw.Fitted:
    x = torch.linspace(-1, 1, 30).unsqueeze(1)
    net = torch.nn.Sequential(torch.nn.Linear(1, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return lw.fit(net, [(x, x.sin())], lw.Gaussian(noise_std=0.1), tuner=lw.tuners.MaximiseEvidence())


def test_bars_are_the_shares_of_each_layer(fitted: lw.Fitted) -> None:
    found = fitted.effective_parameters()
    for given in (fitted, found):
        ax = lw.plots.effective_parameters(given)
        widths = [patch.get_width() for patch in ax.patches][::-1]
        assert widths == pytest.approx([found.layers[name] / found.sizes[name] for name in found.layers])
        assert [label.get_text() for label in ax.get_yticklabels()][::-1] == list(found.layers)


def test_of_many_layers_the_largest_are_drawn() -> None:
    layers = {f"layer{i}": float(i) for i in range(40)}
    found = EffectiveParameters(780.0, 4000, layers, dict.fromkeys(layers, 100), torch.zeros(1))
    ax = lw.plots.effective_parameters(found)
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"layer{i}" for i in range(39, 15, -1)]


def test_the_evidence_curve_is_that_of_other_priors(fitted: lw.Fitted) -> None:
    curve = EvidenceCurve.of(fitted, [5.0, 0.5])
    expected = [float(fitted.with_prior(precision).log_evidence()) for precision in (0.5, 5.0)]
    assert curve.precisions == (0.5, 5.0)
    assert curve.log_evidence == pytest.approx(expected)
    ax = lw.plots.evidence_curve(fitted)
    points, here = ax.get_lines()
    best = points.get_xdata()[points.get_ydata().argmax()]
    assert here.get_xdata()[0] == pytest.approx(best, rel=0.6)  # tuned: within a step of the grid
    assert ax.get_xscale() == "log"


def test_several_precisions_are_scaled_together(fitted: lw.Fitted) -> None:
    several = fitted.with_prior(lw.per_layer({"0": 2.0, "2": 3.0}))
    curve = EvidenceCurve.of(several, [1.0, 4.0])
    expected = float(fitted.with_prior(lw.per_layer({"0": 8.0, "2": 12.0})).log_evidence())
    assert curve.factors
    assert curve.log_evidence[1] == pytest.approx(expected)


def test_methods_without_evidence_are_refused(fitted: lw.Fitted) -> None:
    x = torch.linspace(-1, 1, 30).unsqueeze(1)
    plain = lw.fit(fitted.network.model, [(x, x.sin())], "regression", method=lw.baselines.MapOnly())
    for draw in (lw.plots.evidence_curve, lw.plots.effective_parameters):
        with pytest.raises(UnsupportedError, match="MapOnly has no evidence"):
            draw(plain)
    with pytest.raises(UnsupportedError, match="no steps"):
        lw.plots.trace(plain)
    with pytest.raises((DataError, LapwingError), match="positive"):
        lw.plots.evidence_curve(fitted, [-1.0])


def test_a_trace_has_the_score_of_every_step(fitted: lw.Fitted) -> None:
    ax = lw.plots.trace(fitted)
    assert fitted.trace is not None
    line, ring = ax.get_lines()
    assert line.get_ydata().tolist() == [step.score for step in fitted.trace.steps]
    assert ring.get_ydata()[0] == max(line.get_ydata())


def test_steps_without_a_score_are_left_out() -> None:
    steps = (Step(float("nan"), (1.0,)), Step(-3.0, (2.0,)), Step(-2.0, (3.0,)))
    line = lw.plots.trace(Trace("Grid", "held-out NLL", steps)).get_lines()[0]
    assert line.get_xdata().tolist() == [1, 2]
