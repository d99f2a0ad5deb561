"""Features and outputs as the process sees them: their units do not matter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.fmgp import FeatureTable, output_scale
from tests.tolerances import SOLVED, assert_close
from tests.unit.methods.fmgp.tasks import curve, fitted, model
from tests.unit.methods.sine import NOISE

D = torch.float64


class Columns(nn.Module):
    """The sine network on the first column, in given units; it ignores the other columns."""

    def __init__(self, size: float, place: float) -> None:
        super().__init__()
        self.inner, self.size, self.place = model(), size, place

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner((x[:, :1] - self.place) / self.size)
        return found


@pytest.mark.parametrize(("size", "place"), [(1e-4, 0.0), (1e4, 0.0), (1.0, 1e6)])
def test_the_units_of_an_input_do_not_matter(size: float, place: float) -> None:
    """Neither for this input nor for the other one."""
    x, y = curve()
    other = torch.randn(60, 1, dtype=D, generator=torch.Generator().manual_seed(3))
    found = []
    for unit, zero in ((1.0, 0.0), (size, place)):
        inputs = torch.cat([unit * x + zero, other], 1)
        method = lw.FMGP(10, steps=20)
        found.append(lw.fit(Columns(unit, zero), [(inputs, y)], "regression", method=method).functions(inputs).cov)
    assert float((found[1] - found[0]).abs().max()) < 1e-4 * float(found[0].abs().max())


class Scaled(nn.Module):
    """The sine network with outputs in other units."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.inner, self.unit = model(), unit

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.unit * self.inner(x)
        return found


@pytest.mark.parametrize("unit", [1e-8, 1e-4, 1e4])
def test_the_units_of_the_targets_do_not_matter(unit: float) -> None:
    (x, y), q = curve(), torch.linspace(-4, 4, 9, dtype=D)[:, None]
    fit = lambda u: lw.fit(Scaled(u), [(x, u * y)], "regression", method=lw.FMGP(10, steps=30))
    one, other = fit(1.0), fit(unit)
    assert_close(other.functions(q).cov / unit**2, one.functions(q).cov, 0.35)
    assert_close(other.likelihood.dispersion / unit**2, one.likelihood.dispersion, 0.35)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e3])
def test_an_output_that_is_constant_has_the_scale_of_its_targets(unit: float) -> None:
    y = unit * curve()[1]
    spread = float(y.std(correction=0))
    constant = torch.full((60, 1), 0.1 * unit, dtype=D)
    assert float(output_scale(lw.Gaussian(), FeatureTable(y, constant, y))) == pytest.approx(spread)
    assert float(output_scale(lw.Gaussian(), FeatureTable(y, 0.3 * y, y))) == pytest.approx(0.3 * spread)
    assert float(output_scale(lw.Gaussian(), FeatureTable(y, 0.3 * y, constant))) == pytest.approx(0.3 * spread)
    assert float(output_scale(lw.Gaussian(), FeatureTable(y, constant, constant))) == 1
    assert float(output_scale(lw.Poisson(), FeatureTable(y, 0.3 * y / unit, 1e6 * y))) == pytest.approx(
        0.3 * spread / unit
    )


@pytest.mark.parametrize("value", [0.3, math.pi, 1e5 + 0.1])
def test_an_input_that_is_constant_up_to_rounding_has_no_length(value: float) -> None:
    """The length-scales are those of an input of zeros, also if the mean of the constant is rounded."""
    x, y = curve()
    fit = lambda c: lw.fit(
        Columns(1.0, 0.0), [(torch.cat([x, c.expand_as(x)], 1), y)], "regression", method=lw.FMGP(10, steps=40)
    )
    rounded = torch.full((60, 1), value, dtype=D)
    rounded[::2] *= 1 + 1e-13
    kernels = [
        fit(c).posterior.kernel for c in (torch.zeros(60, 1, dtype=D), torch.full((1,), value, dtype=D), rounded)
    ]
    for kernel in kernels[1:]:
        assert_close(kernel.log_lengths, kernels[0].log_lengths, SOLVED)


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_a_constant_input_does_not_change_the_rest(value: float) -> None:
    """The points keep its value, and the variance is small near the data and large far from them."""
    x, y = curve()
    wide = lambda t: torch.cat([t, torch.full_like(t, value)], 1)
    posterior = lw.fit(Columns(1.0, 0.0), [(wide(x), y)], "regression", method=lw.FMGP(20, steps=120))
    assert torch.equal(posterior.posterior.points[:, 1], torch.full((20,), value, dtype=D))
    among, away = (posterior.functions(wide(torch.tensor([[t]], dtype=D))).variance for t in (0.0, 20.0))
    assert float(away) > 5 * float(among)


@pytest.mark.parametrize("likelihood", [lw.Gaussian(), lw.Gaussian(noise_std=NOISE)], ids=["learned", "given"])
def test_where_the_targets_lie_does_not_matter(likelihood: Any) -> None:
    """The second process starts from the mean of the outputs, whether or not the noise is given."""
    x = torch.linspace(-4, 4, 9, dtype=D)[:, None]
    one = fitted(lw.FMGP(10, steps=50), likelihood).functions(x)
    moved = fitted(lw.FMGP(10, steps=50), likelihood, model=model(100.0), data=[curve(place=100.0)]).functions(x)
    assert_close(moved.cov, one.cov, 0.35)


FLAT = {"features": (2, 8, 2.0), "one feature": (1, 1, 2.0), "large": (1, 1, 2000.0), "zeros": (1, 1, 0.0)}


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("count", [1, 20])
def test_features_without_spread_have_a_unit(kind: str, count: int) -> None:
    """One datum, or the same again and again: error bars of the targets' own size, and not hundreds of times that."""
    torch.manual_seed(0)
    inputs, width, value = FLAT[kind]
    last = nn.Linear(width, 1)
    network = (last if width == 1 else nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), last)).double()
    x, y = torch.full((count, inputs), value, dtype=D), torch.randn(count, 1, dtype=D)
    method, noise = lw.FMGP(20, kernel="features", steps=50), lw.Gaussian(noise_std=0.1)
    posterior = lw.fit(network, [(x, y)], noise, method=method)
    assert float(posterior.functions(x[:1]).std) < 3


def test_inputs_of_another_size_are_refused() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 1))
    small, large = (torch.randn(10, 1, n, n) for n in (6, 8))
    y = torch.randn(10, 1)
    with pytest.raises(lw.errors.DataError, match="inputs of 36 and of 64 numbers; expected as many in all"):
        lw.fit(network, [(small, y), (large, y)], "regression", method=lw.FMGP(5, steps=3))
    posterior = lw.fit(network, [(small, y)], "regression", method=lw.FMGP(5, steps=3))
    with pytest.raises(lw.errors.DataError, match="inputs of 64 numbers; the kernel was learned on 36"):
        posterior.functions(large)


def test_samples_without_a_batch_are_refused() -> None:
    x = torch.randn(30, 3)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    data = [(row, row[:1]) for row in x]
    with pytest.raises(lw.errors.DataError, match="3 inputs with 1 targets"):
        lw.fit(network, data, "regression", method=lw.FMGP(5, steps=3))
    with pytest.raises(lw.errors.DataError, match="3 inputs with 1 targets"):
        lw.fit(network, [(x, x[:, :1])], "regression", method=lw.FMGP(5, steps=3), validation=data)
