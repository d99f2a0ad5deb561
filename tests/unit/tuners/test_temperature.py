"""Temperature: the same as trying every value by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from tests.tolerances import assert_close
from tests.unit.tuners.settings import (
    LIKELIHOODS,
    METHODS,
    MLP,
    VALUES,
    D,
    log_densities,
    setting,
    with_temperature,
)


@pytest.mark.parametrize("name", [name for name in LIKELIHOODS if name != "counts"])
def test_temperature_is_brute_force(name: str) -> None:
    fitted, held = setting(name, lw.Kron())
    tuned = fitted.tuned(lw.tuners.Temperature(held, VALUES))
    expected = torch.stack([-log_densities(with_temperature(fitted, t), held).mean() for t in VALUES])
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)
    best = VALUES[int(expected.argmin())]
    assert_close(tuned.likelihood.dispersion, fitted.likelihood.dispersion * best)
    assert tuned.trace.findings[0] == f"temperature {best:.3g}"
    assert torch.equal(tuned.prior.values, fitted.prior.values)
    if name == "noise for each output":
        assert_close(tuned.likelihood.noise_variance, fitted.likelihood.noise_variance * best)


@pytest.mark.parametrize("method", METHODS)
def test_temperature_of_every_method(method: str) -> None:
    fitted, held = setting("classification", METHODS[method])
    tuned = fitted.tuned(lw.tuners.Temperature(held, VALUES))
    expected = torch.stack([-log_densities(with_temperature(fitted, t), held).mean() for t in VALUES])
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)


def test_temperature_of_a_metric_of_ones_own() -> None:
    fitted, held = setting("classification")
    tuned = fitted.tuned(lw.tuners.Temperature(held, VALUES, lambda p, y: float((p.entropy - 0.9).abs().mean())))
    expected = []
    for value in VALUES:
        tried = with_temperature(fitted, value)
        gaps = torch.cat([(tried.predict(x).entropy - 0.9).abs() for x, _ in held])
        expected.append(float(gaps.mean()))
    assert [step.score for step in tuned.trace.steps] == pytest.approx(expected, rel=1e-10)
    assert float(tuned.likelihood.dispersion) == VALUES[expected.index(min(expected))]


def test_temperatures_are_multiples_of_the_present_one() -> None:
    fitted, held = setting("classification")
    once = fitted.tuned(lw.tuners.Temperature(held, (0.5,)))
    twice = once.tuned(lw.tuners.Temperature(held, (0.5,)))
    assert float(twice.likelihood.dispersion) == 0.25


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(lw.Poisson(), 3), (lw.HeteroscedasticGaussian(), 2)],
    ids=["Poisson", "Heteroscedastic"],
)
def test_no_temperature_to_choose(likelihood: Any, outputs: int) -> None:
    model, x = nn.Linear(4, outputs).double(), MLP.batch(6)
    y = torch.randint(0, 4, (6, outputs if outputs == 3 else 1)).double()
    fitted = lw.fit(model, [(x, y)], likelihood, prior=1.0)
    with pytest.raises(
        lw.errors.UnsupportedError, match=f"{type(likelihood).__name__} has no temperature to choose: .*no disp"
    ):
        fitted.tuned(lw.tuners.Temperature([(x, y)]))
    assert math.isfinite(fitted.tuned(lw.tuners.Grid([(x, y)])).trace.steps[0].score)
