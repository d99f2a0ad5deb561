"""Pictures of what was learned, by what their axes hold."""

from __future__ import annotations

import pytest
import torch

import lapwing as lw
from lapwing.errors import DataError, LapwingError, UnsupportedError
from lapwing.plots import EvidenceCurve
from lapwing.posteriors.base import EffectiveParameters
from lapwing.runtime.trace import Step, Trace


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
