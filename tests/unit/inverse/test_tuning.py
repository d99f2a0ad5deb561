"""Learning hyperparameters of inverse problems with the tuners of the library, with and without a hyperprior."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.tolerances import assert_close
from tests.unit.inverse.problems import BLOCKS, D, case, fitted, seed


def slopes(posterior: Any, hyperprior: Any = None) -> Tensor:
    """The gradient of the log evidence plus log hyperprior in all log hyperparameters and the log noise."""
    values, noise = posterior.problem.prior.values.detach(), posterior.noise_variance.detach()
    x = torch.cat([values.reshape(-1), noise.reshape(-1)]).log().requires_grad_()
    changed = posterior.with_problem(posterior.problem.with_precisions(x[:-1].exp().reshape(values.shape)))
    changed = changed.with_noise(x[-1].exp())
    total = changed.log_evidence() + (0.0 if hyperprior is None else hyperprior(changed))
    return torch.autograd.grad(total, x)[0]


def gamma_density(posterior: Any) -> Tensor:
    """Gamma(3, 2) on every hyperparameter of the prior, without its constant."""
    values = posterior.problem.prior.values
    return (2.0 * values.log() - 2.0 * values).sum()


def test_the_default_learns_everything_by_the_evidence() -> None:
    one = case()
    posterior = lw.inverse.fit(one.model, one.x, one.y, one.a)
    start = posterior.trace.steps[0].score if posterior.trace else 0.0
    assert posterior.trace is not None
    assert posterior.trace.tuner == "MaximiseEvidence"
    assert float(posterior.log_evidence()) > start
    assert float(slopes(posterior).abs().max()) < 1e-3 * 17
    assert posterior.prior.names == ("weights.variance", "weights.length_scale")  # type: ignore[attr-defined]
    assert posterior.learns_noise
    assert float(posterior.noise_std) != pytest.approx(float(one.residual.square().mean().sqrt()))


def drawn(variances: tuple[float, float, float], noise: float, **settings: Any) -> lw.inverse.InversePosterior:
    """A posterior, one variance for each block of the case, of measurements drawn with these true variances."""
    one = case()
    spread = one.sigma((variances[0], 0.1, variances[1], 0.1, variances[2])).diagonal().sqrt()
    theta = spread * torch.randn(len(one.theta), dtype=D, generator=seed(5))
    y = one.a @ (one.f + one.jacobian @ (theta - one.theta))
    y = y + noise * torch.randn(len(y), dtype=D, generator=seed(6))
    return fitted(y=y, prior=lw.grouped(dict.fromkeys(BLOCKS, 1.0)), **settings)


def test_a_block_that_the_measurements_do_not_need_is_said() -> None:
    """Its variance has no optimum: the evidence is highest at zero, and so it should be small and not zero."""
    posterior = drawn((0.0, 1.0, 0.0), 0.05, noise_std=0.05).tuned()
    assert posterior.unused_blocks == ("inc.*", "skip.*|out.*")
    assert posterior.trace is not None
    assert "2 of 3 variances have no effect (inc.*, skip.*|out.*)" in posterior.trace.findings[0]
    assert "no effect" in posterior.summary()
    assert float(slopes(posterior)[:-1].abs().max()) < 1e-3 * 17
    assert bool(torch.isfinite(posterior.prior.values).all())
    assert float(posterior.std.min()) > 0


def test_error_bars_of_zero_are_refused() -> None:
    """Noise explains all that the prior mean does not."""
    with pytest.raises(
        lw.errors.DivergedError, match=r"without any uncertainty of the weights: noise of 0\.3 explains"
    ):
        drawn((0.0, 0.0, 0.0), 0.2, noise_std=0.3).tuned()


def test_a_noise_that_vanishes_and_a_network_far_from_its_measurements_are_said() -> None:
    posterior = drawn((0.0, 1.0, 0.0), 0.0, noise_std=None).tuned()
    assert posterior.trace is not None
    noise, network = posterior.trace.findings[-2:]
    assert "where it has no effect: the tangent model explains the measurements without noise" in noise
    assert "the network misses the measurements by" in network


def test_noise_is_learned_where_the_network_interpolates() -> None:
    """Its residuals are rounding, from which no search could start."""
    one = case()
    start = replace(fitted(prior=lw.isotropic(1.0), noise_std=None), noise_variance=torch.tensor(1e-14, dtype=D))
    learned = lw.inverse.fit(one.model, one.x, one.y, one.a, prior=1.0, tuner=lw.tuners.MaximiseEvidence(noise=True))
    assert_close(start.tuned().noise_std, learned.noise_std, 0.25)


def test_given_noise_is_kept() -> None:
    one = case()
    posterior = lw.inverse.fit(one.model, one.x, one.y, one.a, noise_std=0.37)
    assert float(posterior.noise_std) == pytest.approx(0.37)
    assert float(slopes(posterior)[:-1].abs().max()) < 1e-3 * 17


def test_a_given_prior_is_kept_and_a_tuner_changes_it() -> None:
    one = case()
    prior = lw.priors.filter_gp(0.6, 0.8, blocks=BLOCKS)
    posterior = lw.inverse.fit(one.model, one.x, one.y, one.a, prior=prior)
    assert posterior.prior.values.tolist() == [0.6, 0.8, 0.6, 0.8, 0.6]
    assert float(posterior.noise_variance) == pytest.approx(float(one.residual.square().mean()))
    tuner = lw.tuners.MaximiseEvidence(noise=True, max_steps=200, tolerance=1e-8)
    tuned = lw.inverse.fit(one.model, one.x, one.y, one.a, prior=prior, tuner=tuner)
    assert float(slopes(tuned).abs().max()) < 1e-4
    assert_close(posterior.tuned(tuner).prior.values, tuned.prior.values, 0.3)


@pytest.mark.parametrize("prior", [lw.priors.filter_gp(blocks=BLOCKS), lw.per_layer()])
def test_a_hyperprior_moves_the_optimum(prior: Any) -> None:
    """To where the gradient of the sum is zero, and that of the evidence is not."""
    tuner = lw.tuners.MaximiseEvidence(noise=True, tolerance=1e-8, max_steps=200, hyperprior=gamma_density)
    posterior = lw.inverse.fit(case().model, case().x, case().y, case().a, prior=prior, tuner=tuner)
    assert float(slopes(posterior, gamma_density).abs().max()) < 1e-4
    assert float(slopes(posterior).abs().max()) > 1e-2
    assert posterior.trace is not None
    assert posterior.trace.score == "log evidence plus log hyperprior"


def test_adam_takes_the_hyperprior_too() -> None:
    posterior = fitted(prior=lw.isotropic(), noise_std=None)
    tuned = posterior.tuned(lw.tuners.Ascend(steps=400, rate=0.05, hyperprior=gamma_density))
    assert float(slopes(tuned, gamma_density).abs().max()) < 0.02


def test_a_hyperprior_may_use_the_image() -> None:
    """As one on differences of pixels: it reads fixed numbers once, and coefficients at every step."""
    start = fitted(noise_std=None)
    variances = start.class_variances(torch.tensor([[0, 1], [1, 2], [7, 8]]))

    def smooth(posterior: Any) -> Tensor:
        return -2.0 * (posterior.prior.coefficients() @ variances).sqrt().sum()

    tuner = lw.tuners.MaximiseEvidence(noise=True, max_steps=200, hyperprior=smooth)
    rough, smoothed = start.tuned(), start.tuned(tuner)
    of = lambda posterior: float((posterior.prior.coefficients() @ variances).sum())
    assert of(smoothed) < 0.8 * of(rough)


def test_conjugate_gradients_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a basis as probes, so that the evidence has no error."""
    monkeypatch.setattr("lapwing.inverse.belief.PROBES", 17)
    one = case()
    prior = lw.priors.filter_gp(blocks=BLOCKS)
    tuner = lw.tuners.Ascend(steps=5, rate=0.2)
    settings: dict[str, Any] = {"prior": prior, "tuner": tuner}
    exact = lw.inverse.fit(one.model, one.x, one.y, one.a, **settings)
    free = lw.inverse.fit(one.model, one.x, one.y, one.a, solver="cg", **settings)
    assert free.pairs is None  # computed again for the learned hyperparameters
    assert_close(free.prior.values, exact.prior.values, 0.25)
    assert_close(free.noise_std, exact.noise_std, 0.25)


def test_a_gamma_hyperprior_on_the_precision_of_a_plain_fit() -> None:
    x = torch.linspace(-1, 1, 30, dtype=D).unsqueeze(1)
    y = x.sin() + 0.1 * torch.randn(30, 1, dtype=D, generator=seed(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    plain = lw.fit(net, [(x, y)], lw.Gaussian(noise_std=0.3), method=lw.Full(), prior=1.0)
    tuner = lw.tuners.MaximiseEvidence(tolerance=1e-9, hyperprior=gamma_density)
    tuned = plain.tuned(tuner)

    def slope(density: Any) -> float:
        x = tuned.prior.values.detach().log().requires_grad_()
        posterior = tuned.base.with_problem(tuned.base.problem.with_precisions(x.exp()))
        return float(torch.autograd.grad(posterior.log_evidence() + density(posterior), x)[0])

    assert abs(slope(gamma_density)) < 1e-6
    assert abs(slope(lambda posterior: 0.0)) > 1e-2
    evidence_alone = plain.tuned(lw.tuners.MaximiseEvidence(tolerance=1e-9))
    assert float(tuned.prior.values) != pytest.approx(float(evidence_alone.prior.values), rel=1e-2)


@pytest.mark.parametrize("make", [lw.tuners.MaximiseEvidence, lw.tuners.Ascend])
def test_bad_hyperpriors_are_refused(make: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"hyperprior is 3\.0; expected a function of the posterior"):
        make(hyperprior=3.0)
    for wrong in (lambda posterior: 1.0, lambda posterior: posterior.prior.values):
        with pytest.raises(lw.errors.UnsupportedError, match="expected a log density, a tensor with one entry"):
            fitted().tuned(make(hyperprior=wrong))
    outer = fitted()  # an easy slip: the density of the posterior outside, which does not change
    for wrong in (lambda posterior: outer.prior.values.log().sum(), lambda posterior: torch.tensor(3.0)):
        with pytest.raises(lw.errors.UnsupportedError, match="does not depend on the hyperparameters"):
            outer.tuned(make(hyperprior=wrong))
