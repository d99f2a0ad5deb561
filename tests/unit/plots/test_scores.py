"""Pictures of predictions beside targets, by what their axes hold."""

from __future__ import annotations

import pytest
import torch

import lapwing as lw
from lapwing.decisions.several import Evaluated, Evaluations
from lapwing.errors import DataError, UnsupportedError
from lapwing.plots import PLAIN, POSTERIOR, new_axis
from tests.unit.plots.test_observed import normal


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


def test_reliability_of_small_probabilities_fills_its_frame() -> None:
    probs = torch.full((500, 50), 1 / 50)
    ax = lw.plots.reliability(probs, torch.arange(500) % 50)
    assert 0.02 < ax.get_xlim()[1] < 0.1


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


def test_a_ranking_has_a_point_for_each_posterior() -> None:
    x = torch.randn(40, 2)
    data, net = [(x, (x[:, 0] > 0).long())], torch.nn.Linear(2, 2)
    found = lw.evaluate({"weak": lw.fit(net, data, "classification", prior=0.1)}, data, resamples=20)
    ax = lw.plots.ranking(found)
    assert [label.get_text() for label in ax.get_yticklabels()] == [row.name for row in found.rows[::-1]]
    line = ax.containers[0].lines[0]
    assert line.get_xdata().tolist() == [row.scores["nll"].value for row in found.rows[::-1]]
