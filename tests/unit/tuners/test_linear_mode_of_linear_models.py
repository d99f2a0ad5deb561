"""The corrected evidence of linear models, which is exact from any weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import Wrapped
from tests.references.linear_regression import regress
from tests.tolerances import SOLVED, assert_close
from tests.unit.tuners.linear_mode_problems import MEANS, METHODS, D, features, linear, linear_data, relative


def golden(of: Callable[[float], float], low: float, high: float) -> float:
    """Return the maximiser of a function of one number, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = of(a), of(b)
    for _ in range(70):
        if fa > fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = of(a)
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = of(b)
    return (low + high) / 2


# A linear model with Gaussian noise: the evidence is that of a Gaussian process, whatever the weights.


@pytest.mark.parametrize(
    ("method", "weights"), [("full", "zero"), *((m, "wild") for m in ("full", "kron", "ekron", "low_rank"))]
)
def test_the_evidence_of_a_gaussian_process(method: str, weights: str) -> None:
    """The evidence is exact to ten digits, and the precision is its optimum."""
    phi, y = features()
    noise = torch.full((30,), 0.09, dtype=D)
    fitted = lw.fit(
        linear(weights), linear_data(), lw.Gaussian(noise_std=0.3), method=METHODS[method], prior=1.0,
        tuner=lw.tuners.LinearMode(tolerance=1e-9),
    )  # fmt: skip
    exact = lambda log: float(regress(phi, y, torch.full((5,), math.exp(log), dtype=D), noise).log_evidence)
    log_precision = float(fitted.prior.values.log())
    assert relative(fitted.log_evidence(), exact(log_precision)) <= 1e-10
    assert log_precision == pytest.approx(golden(exact, -8, 8), abs=1e-6)
    assert exact(log_precision) >= max(exact(log_precision + shift) for shift in (-3, -1, -0.1, -0.01, 0.01, 0.1, 1, 3))


def test_the_naive_evidence_is_another() -> None:
    """If the weights are not an optimum, the uncorrected evidence is lower and has another optimum."""
    naive = lw.fit(linear("small"), linear_data(), lw.Gaussian(noise_std=0.3), method=lw.Full(), prior=1.0)
    corrected = naive.tuned(lw.tuners.LinearMode(linear_data()))
    kept = naive.with_prior(float(corrected.prior.values))
    assert float(corrected.log_evidence()) > float(kept.log_evidence()) + 1
    assert relative(naive.tuned().prior.values, corrected.prior.values) > 0.5


@pytest.mark.parametrize("weights", ["zero", "wild"])
def test_a_precision_for_each_of_two_groups(weights: str) -> None:
    """The exact evidence has zero slope in both and is concave."""
    phi, y = features()
    model = Wrapped(lambda m, x: m.one(x[:, :2]) + m.two(x[:, 2:]),
                    one=nn.Linear(2, 1, bias=False), two=nn.Linear(3, 1, bias=False)).double()  # fmt: skip
    whole = linear(weights).weight.data
    model.one.weight.data, model.two.weight.data = whole[:, :2].clone(), whole[:, 2:].clone()
    fitted = lw.fit(model, linear_data(), lw.Gaussian(noise_std=0.3), method=lw.Full(), prior=lw.per_layer(),
                    tuner=lw.tuners.LinearMode(tolerance=1e-9))  # fmt: skip
    repeats = torch.tensor([2, 3])
    exact = lambda log: process(phi, y, log.exp().repeat_interleave(repeats), torch.tensor(0.09, dtype=D))
    at = fitted.prior.values.log()
    assert relative(fitted.log_evidence(), exact(at)) <= 1e-10
    slope = torch.autograd.functional.jacobian(exact, at)
    bend = torch.autograd.functional.hessian(exact, at)
    assert float(slope.abs().max()) <= 1e-7
    assert float(torch.linalg.eigvalsh(bend).max()) < 0


def process(phi: Tensor, y: Tensor, precision: Tensor, noise: Tensor, mean: float = 0.0) -> Tensor:
    """log N(y; Φ mean, Φ A⁻¹ Φᵀ + noise I), differentiable."""
    kernel = phi @ (phi / precision).T + noise * torch.eye(len(y), dtype=D)
    centre = phi.sum(1) * mean
    return torch.distributions.MultivariateNormal(centre, kernel).log_prob(y)


@pytest.mark.parametrize("weights", ["zero", "wild"])
@pytest.mark.parametrize("method", ["full", "kron"])
def test_a_tangent_mean_learns_the_noise_too(method: str, weights: str) -> None:
    """Precision and noise are the joint optimum of the exact evidence, found by Newton on dense matrices."""
    phi, y = features()
    exact = lambda log: process(phi, y, log[0].exp().expand(5), log[1].exp())
    best = torch.tensor([0.0, -2.0], dtype=D)
    for _ in range(50):
        slope, bend = (getattr(torch.autograd.functional, name)(exact, best) for name in ("jacobian", "hessian"))
        best = best - torch.linalg.solve(bend, slope)
    assert float(torch.autograd.functional.jacobian(exact, best).abs().max()) <= 1e-10
    assert float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(exact, best)).max()) < 0
    fitted = lw.fit(linear(weights), linear_data(), lw.Gaussian(), method=METHODS[method], prior=1.0,
                    tuner=lw.tuners.LinearMode(mean="tangent", tolerance=1e-9))  # fmt: skip
    assert float(fitted.prior.values.log()) == pytest.approx(float(best[0]), abs=1e-6)
    assert float(fitted.likelihood.dispersion.log()) == pytest.approx(float(best[1]), abs=1e-6)
    assert relative(fitted.log_evidence(), exact(best)) <= 1e-10


@pytest.mark.parametrize("weights", ["zero", "wild"])
def test_a_tangent_mean_predicts_as_bayesian_linear_regression(weights: str) -> None:
    fitted = lw.fit(linear(weights), linear_data(), lw.Gaussian(), method=lw.Full(), prior=1.0,
                    tuner=lw.tuners.LinearMode(mean="tangent"))  # fmt: skip
    phi, y = features()
    noise = fitted.likelihood.dispersion.expand(30)
    exact = regress(phi, y, fitted.prior.values.expand(5), noise)
    new = torch.randn(4, 5, dtype=D)
    belief, predicted = fitted.functions(new), fitted.predict(new)
    variance = (new @ exact.covariance * new).sum(1, keepdim=True)
    assert_close(belief.mean, new @ exact.mean[:, None], SOLVED)
    assert_close(belief.variance, variance, SOLVED)
    assert_close(predicted.mean, new @ exact.mean[:, None], SOLVED)
    assert_close(predicted.std, (variance + noise[0]).sqrt(), SOLVED)
    assert_close(fitted.posterior.mode.theta, exact.mean, SOLVED)


def test_a_prior_mean() -> None:
    phi, y = features()
    fitted = lw.fit(linear("small"), linear_data(), lw.Gaussian(noise_std=0.3), method=lw.Full(),
                    prior=lw.isotropic(1.0, mean=0.7), tuner=lw.tuners.LinearMode(tolerance=1e-9))  # fmt: skip
    exact = lambda log: float(
        process(phi, y, torch.full((5,), math.exp(log), dtype=D), torch.tensor(0.09, dtype=D), 0.7)
    )
    assert relative(fitted.log_evidence(), exact(float(fitted.prior.values.log()))) <= 1e-10
    assert float(fitted.prior.values.log()) == pytest.approx(golden(exact, -8, 8), abs=1e-6)


@pytest.mark.parametrize("mean", MEANS)
def test_a_noise_for_each_output(mean: str) -> None:
    """The ratios stay as the residuals gave them; a tangent mean learns their common scale."""
    gen = torch.Generator().manual_seed(2)
    phi, truth = torch.randn(40, 3, dtype=D, generator=gen), torch.randn(3, 2, dtype=D, generator=gen)
    scale = torch.tensor([0.1, 1.0], dtype=D)
    y = phi @ truth + scale * torch.randn(40, 2, dtype=D, generator=gen)
    model = nn.Linear(3, 2, bias=False).double()
    model.weight.data = (truth + 0.1).T.clone()
    fitted = lw.fit(model, problems.split(phi, y, (17, 23)), lw.Gaussian(per_output=True), method=lw.Full(), prior=1.0,
                    tuner=lw.tuners.LinearMode(mean=mean, tolerance=1e-9))  # fmt: skip
    residual = (phi @ (truth + 0.1) - y).square().mean(0)
    noise = fitted.likelihood.noise_variance
    assert_close(noise / noise[0], residual / residual[0])

    def exact(log: Tensor) -> Tensor:
        return sum(process(phi, y[:, c], log[0].exp().expand(3), log[1].exp() * residual[c]) for c in range(2))

    at = torch.stack([fitted.prior.values.log(), (noise[0] / residual[0]).log()])
    assert relative(fitted.log_evidence(), exact(at)) <= 1e-10
    slope = torch.autograd.functional.jacobian(exact, at)
    assert abs(float(slope[0])) <= 1e-6
    assert (abs(float(slope[1])) <= 1e-6) == (mean == "tangent")
    assert (float(at[1]) == pytest.approx(0, abs=1e-12)) == (mean == "network")


# Groups that the tangent model does without.


def two_groups() -> tuple[Any, list[Any], Tensor, Tensor]:
    """Return a model with one layer that generated the data and one whose inputs are unrelated to them."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, dtype=D, generator=gen)
    y = x[:, :2] @ torch.tensor([1.0, -2.0], dtype=D)
    noise = torch.randn(40, 1, dtype=D, generator=gen)
    noise = noise - x @ torch.linalg.lstsq(x, noise).solution  # nothing that x explains
    model = Wrapped(lambda m, t: m.used(t[:, :2]) + m.idle(t[:, 2:]),
                    used=nn.Linear(2, 1, bias=False), idle=nn.Linear(4, 1, bias=False)).double()  # fmt: skip
    targets = y[:, None] + 0.2 * noise
    return model, problems.split(x, targets, (11, 29)), x, targets[:, 0]


@pytest.mark.parametrize("tolerance", [1e-5, 1e-10])
@pytest.mark.parametrize("method", ["full", "kron", "diagonal"])
def test_a_group_without_use_is_pruned_and_no_error(method: str, tolerance: float) -> None:
    """Its precision ends large and finite, and the rest is what it would be without the group."""
    model, data, x, y = two_groups()
    fitted = lw.fit(model, data, lw.Gaussian(noise_std=0.2), method=METHODS[method], prior=lw.per_layer(),
                    tuner=lw.tuners.LinearMode(tolerance=tolerance, max_steps=100))  # fmt: skip
    used, idle = fitted.prior.values.tolist()
    curvature = float(x[:, 2:].square().sum() / 4 / 0.04)
    assert 1e3 * curvature < idle <= 1.001e5 * curvature
    assert float(fitted.posterior.mode.theta[2:].abs().max()) <= 1e-4
    assert len(fitted.trace.findings) == 1
    assert "1 of 2 precisions ran far above the curvature (idle)" in fitted.trace.findings[0]
    if method == "full":
        alone = lambda log: float(
            process(x[:, :2], y, torch.full((2,), math.exp(log), dtype=D), torch.tensor(0.04, dtype=D))
        )
        assert math.log(used) == pytest.approx(golden(alone, -8, 8), abs=1e-2 if tolerance > 1e-6 else 1e-5)
        assert float(fitted.log_evidence()) == pytest.approx(alone(math.log(used)), abs=1e-2)
        exact = regress(x[:, :2], y, torch.full((2,), used, dtype=D), torch.full((40,), 0.04, dtype=D))
        variance = (x[:5, :2] @ exact.covariance * x[:5, :2]).sum(1, keepdim=True)
        assert_close(fitted.functions(x[:5]).variance, variance, 0.2)


def test_all_weights_without_use() -> None:
    """Targets that the weights do not explain: the error bars of the weights vanish, and the answer is finite."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, dtype=D, generator=gen)
    y = torch.randn(40, 1, dtype=D, generator=gen)
    y = y - x @ torch.linalg.lstsq(x, y).solution
    fitted = lw.fit(linear("wild"), [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.Full(), prior=1.0,
                    tuner=lw.tuners.LinearMode())  # fmt: skip
    assert math.isfinite(float(fitted.prior.values))
    assert float(fitted.functions(x).std.max()) < 0.01
    assert "(all weights)" in fitted.trace.findings[0]
    white = torch.distributions.Normal(torch.zeros((), dtype=D), 1.0).log_prob(y).sum()
    assert float(fitted.log_evidence()) == pytest.approx(float(white), abs=1e-2)


def test_a_group_that_the_data_do_not_see() -> None:
    """The evidence does not depend on its precision; the other group is what it is without."""
    phi, y = features()
    model = Wrapped(lambda m, x: m.live(x) + m.dead(torch.zeros_like(x)),
                    live=nn.Linear(5, 1, bias=False), dead=nn.Linear(5, 1, bias=False)).double()  # fmt: skip
    fitted = lw.fit(model, linear_data(), lw.Gaussian(noise_std=0.3), method=lw.Full(), prior=lw.per_layer(),
                    tuner=lw.tuners.LinearMode(tolerance=1e-9))  # fmt: skip
    exact = lambda log: float(process(phi, y, torch.full((5,), math.exp(log), dtype=D), torch.tensor(0.09, dtype=D)))
    assert float(fitted.prior.values[0].log()) == pytest.approx(golden(exact, -8, 8), abs=1e-6)
    assert math.isfinite(float(fitted.prior.values[1]))
    assert relative(fitted.log_evidence(), exact(float(fitted.prior.values[0].log()))) <= 1e-10
    assert fitted.trace.findings == ()


def test_a_noise_far_below_the_residuals_is_refused() -> None:
    """More features than data, and a noise far below the residuals: the precision falls without end."""
    gen = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 12, dtype=D)[:, None]
    y = torch.randn(12, 1, dtype=D, generator=gen)
    model = nn.Sequential(nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 1)).double()
    # Rounding decides which check sees it first.
    with pytest.raises(lw.errors.NumericalError, match=r"prior|noise"):
        lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1e-6), method=lw.Full(), prior=1.0, tuner=lw.tuners.LinearMode())
