"""Hessian-free Laplace: its quadratic, its solvers and the response to small changes of the targets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.inputs import Batch
from lapwing.methods.hfl import LinearisedResponse
from lapwing.methods.hfl_response import Hessian, Objective, Responder, Response, newton, push_minima
from tests import problems
from tests.cases import BY_NAME, cast
from tests.minima import copied, data, fitted, gapped, held_out, new, off, pretrained, shifted, small
from tests.references.minimum import Energy
from tests.tolerances import SOLVED, assert_close

# Settings of HFL, and what all its modes have in common.

D = torch.float64


MODES = ("nonlinear", "linearised", "pretrained")


def test_the_noise_is_that_of_the_residuals() -> None:
    """Linear networks: the Hessian is the same wherever the weights are."""
    x, y = torch.randn(30, 3, dtype=D), torch.randn(30, 2, dtype=D)
    model = nn.Linear(3, 2).double()
    phi = (model(x) - y).square().mean().detach()
    design = torch.cat([x, torch.ones(30, 1, dtype=D)], 1)
    exact = (design @ torch.linalg.inv(design.T @ design / phi + 0.5 * torch.eye(4, dtype=D)) * design).sum(1)
    for mode in MODES:
        method = lw.HFL(mode=mode, drift=math.inf)
        posterior = lw.fit(model, [(x[:11], y[:11]), (x[11:], y[11:])], lw.Gaussian(), method=method, prior=0.5)
        assert_close(posterior.likelihood.dispersion, phi)
        if mode != "pretrained":
            assert_close(posterior.functions(x).variance[:, 1], exact, SOLVED)


def test_a_prior_is_learned_by_the_evidence_of_kron() -> None:
    case = BY_NAME["mlp"]
    data = problems.batches(case)
    learned = lw.fit(case.build(), data, "classification", method=lw.Kron()).prior.values
    posterior = lw.fit(case.build(), data, "classification", method=lw.HFL(mode="linearised"))
    assert torch.equal(posterior.prior.values, learned)
    full = lw.fit(case.build(), data, "classification", method=lw.Full(), prior=float(learned))
    inputs = case.batch(3, seed=1)
    assert_close(posterior.base(inputs).cov, full.functions(inputs).cov, SOLVED)


def test_a_prior_is_learned_for_the_other_modes() -> None:
    """A linear network: any prior leaves it a minimum, though it moves; with the noise that Kron left."""
    x, y = torch.randn(30, 3, dtype=D), torch.randn(30, 1, dtype=D)
    model = nn.Linear(3, 1).double()
    learned = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.Kron()).prior.values
    for mode in ("nonlinear", "pretrained"):
        method = lw.HFL(mode=mode, drift=math.inf)
        posterior = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=method)
        assert torch.equal(posterior.prior.values, learned)
    assert float((learned - 1).abs()) > 1e-3


def test_the_prior_of_single_weights_is_learned_by_the_evidence_of_diagonal() -> None:
    """Kron takes layers, and cannot."""
    energy, weights = small("categorical", 3), lw.subnetwork(torch.tensor([1, 5, 13, 20, 24]))
    options = {"weights": weights, "prior": None}
    learned = fitted(energy, lw.Diagonal(), **options).prior.values
    posterior = fitted(energy, lw.HFL(mode="linearised"), **options)
    assert torch.equal(posterior.prior.values, learned)
    assert float((learned - 1).abs()) > 1e-3
    x = new(energy)
    full = fitted(energy, lw.Full(), weights=weights, prior=float(learned))
    assert_close(posterior.base(x).cov, full.functions(x).cov, SOLVED)


@pytest.mark.parametrize("tolerance", [1.0, math.inf])
def test_a_tolerance_that_takes_anything_still_works(tolerance: float) -> None:
    """As far as it would for the usual one."""
    energy = small()
    x = new(energy)
    assert off(fitted(energy, lw.HFL(tolerance=tolerance)).functions(x).cov, energy.each(x)) < 1e-6
    lam = 0.01 / float(energy.each(x).max()) ** 0.5
    assert off(fitted(energy, lw.HFL(tolerance=tolerance, lam=lam)).functions(x).cov, energy.each(x)) < 1e-3


def test_float32_within() -> None:
    """Asked to work in single precision, it has the tolerance of that."""
    energy = small("gaussian", 2)
    x = new(energy)
    posterior = fitted(energy, lw.HFL(dtype=torch.float32))
    assert posterior.posterior.responder.objective.dtype == torch.float32
    assert posterior.posterior.responder.tolerance == 1e-2
    error = off(posterior.functions(x).cov, energy.each(x))
    assert 1e-9 < error < 1e-2


def test_a_g_prior_is_refused() -> None:
    given = lw.priors.g_prior(1.0)
    with pytest.raises(lw.errors.UnsupportedError, match=r"a g-prior follows the curvature, which HFL\(\)"):
        fitted(small(), lw.HFL(), prior=given)
    found = fitted(small(), lw.HFL(mode="linearised"))
    with pytest.raises(lw.errors.UnsupportedError, match=r"keeps no curvature, and g_prior\(\) needs one; use Full\("):
        found.with_prior(given)


@pytest.mark.parametrize("mode", ["nonlinear", "linearised"])
def test_what_needs_its_data_is_not_saved(mode: str, tmp_path: Path) -> None:
    message = (
        r"re-optimises on its data at every prediction, and a file does not hold those; .*HFL\(mode='pretrained'\)"
    )
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        fitted(small(), lw.HFL(mode=mode)).save(tmp_path / "it")
    assert not (tmp_path / "it").exists()


# The factor on the scores of "pretrained", fitted on held-out data.


@pytest.mark.parametrize("variant", ["mean", "absolute", "random"])
def test_calibration_maximises_the_held_out_likelihood(variant: str) -> None:
    """Over the factor on the variances: no point of a fine grid is better."""
    energy = small()
    held = held_out(energy)
    plain = pretrained(energy, variant=variant, pushes=8)
    scaled = pretrained(energy, variant=variant, pushes=8, calibration=held)
    x, y = torch.cat([a for a, _ in held]), torch.cat([b for _, b in held])
    belief = plain.functions(x)

    def likelihood(scale: float) -> float:
        spread = (scale * belief.variance + energy.phi).sqrt()
        return float(torch.distributions.Normal(belief.mean, spread).log_prob(y).sum())

    best = scaled.posterior.scale
    grid = torch.logspace(-2, 3, 501, dtype=D).tolist()
    near = (best * torch.linspace(0.9, 1.1, 21, dtype=D)).tolist()
    assert all(likelihood(best) >= likelihood(scale) - 1e-9 for scale in (*grid, *near))
    assert abs(best - 1) > 0.05
    assert_close(scaled.functions(x).variance, best * belief.variance)


def test_calibration_that_reaches_zero_variance_is_reported(tmp_path: Path) -> None:
    """Targets that are the outputs: any variance at all makes them less likely."""
    energy = small()
    held = held_out(energy, noise=0.0)
    posterior = pretrained(energy, calibration=held)
    (finding,) = posterior.posterior.findings
    edge = f"calibration reached the edge of the scale search at {posterior.posterior.scale:.2g}; the data ask for "
    assert finding.startswith(edge + "variances of zero: the network is calibrated, or too uncertain")
    assert posterior.posterior.scale == pytest.approx(math.exp(-12), rel=0.7)
    posterior.save(tmp_path / "it")
    assert lw.load(tmp_path / "it", energy.model).posterior.findings == (finding,)
    assert pretrained(energy, calibration=held_out(energy)).posterior.findings == ()


def test_calibration_that_reaches_the_largest_scale_is_reported() -> None:
    """Targets further away than the largest scale reaches."""
    energy = small()
    (x, _), _ = held_out(energy)
    posterior = pretrained(energy, variant="absolute", calibration=[(x, energy.model(x).detach() + 1e9)])
    (finding,) = posterior.posterior.findings
    assert finding.startswith(
        "calibration reached the edge of the scale search at 8e+08; the data ask for variances be"
    )


@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_calibration_of_a_network_that_gives_its_noise(dtype: torch.dtype) -> None:
    """Larger scales than the data want overflow."""
    energy = small("gaussian", 2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)).to(dtype)
    x, y = energy.x.to(dtype), energy.y.to(dtype)
    method = lw.HFL(mode="pretrained", variant="random", pushes=8, calibration=[(x, y)], drift=math.inf)
    found = lw.fit(model, [(x, y)], lw.HeteroscedasticGaussian(), method=method, prior=100.0)
    posterior = found.posterior
    score = lambda scale: float(
        lw.Fitted(replace(posterior, scale=scale), found.fingerprint).predict(x).log_prob(y).sum()
    )
    assert 1e-4 < posterior.scale < 1e3
    assert all(score(posterior.scale) >= score(posterior.scale * factor) - 1e-3 for factor in (0.5, 0.9, 1.1, 2.0))


def test_calibration_data_without_scores_are_refused() -> None:
    """Where all are below zero: no scale is better than another."""
    energy = small("gaussian", 3)
    evaluation, x = new(energy, 9, seed=8), new(energy, 200)
    scores = pretrained(energy, evaluation=evaluation).posterior.scores(x)[1][0]
    below = (scores < 0).all(1)
    assert bool(below.any())
    held = [(x[below], energy.model(x[below]).detach())]
    with pytest.raises(lw.errors.DataError, match=r"the scores are zero at all calibration inputs.*variant='absolute'"):
        pretrained(energy, evaluation=evaluation, calibration=held)


# Solving with the Hessian, and the minimum that weights belong to.


def responder(energy: Any, **settings: Any) -> Responder:
    found: Responder = fitted(energy, lw.HFL(**settings)).posterior.responder
    return found


@pytest.mark.parametrize(("kind", "outputs"), [("gaussian", 2), ("categorical", 3)])
def test_solving_with_the_hessian(kind: str, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    energy = small(kind, outputs)
    objective = responder(energy).objective
    rows = torch.randn(4, objective.size, dtype=D, generator=torch.Generator().manual_seed(1))
    exact = torch.linalg.solve(energy.hessian(), rows.T).T
    assert_close(Hessian(objective).solve(rows), exact, SOLVED)
    monkeypatch.setattr("lapwing.methods.hfl_response.DENSE", objective.size - 1)
    by_products = Hessian(objective)
    assert not by_products.is_formed
    assert off(by_products.solve(rows), exact) < 1e-3


def test_the_hessian_is_formed_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = responder(small()).objective
    for limit, formed in ((25, True), (24, False)):
        monkeypatch.setattr("lapwing.methods.hfl_response.DENSE", limit)
        assert Hessian(objective).is_formed is formed
        assert (Hessian(objective).root is not None) is formed


def test_weights_near_a_minimum_are_moved_there_with_a_finding() -> None:
    energy = small("bernoulli", 1)
    x = new(energy)
    moved = shifted(energy, 0.05)
    posterior = fitted(moved, lw.HFL())
    (finding,) = posterior.posterior.findings
    said = re.match(r"the weights are (\S+) posterior standard deviations from the minimum", finding)
    assert said is not None
    assert float(said.group(1)) == pytest.approx(0.05, rel=0.1)
    assert off(posterior.functions(x).cov, energy.each(x)) < 1e-6  # at the minimum
    assert torch.equal(posterior.functions(x).mean, moved.model(x).detach())  # of the network as it is
    assert fitted(energy, lw.HFL()).posterior.findings == ()


def test_weights_far_from_a_minimum_are_refused() -> None:
    energy = small("bernoulli", 1)
    far = shifted(energy, 0.3)
    message = (
        r"0\.\d+ posterior standard deviations from the minimum .*; expected at most 0.1.* prior as weight decay, "
        r"allow it with HFL\(drift=\.\.\.\), or use HFL\(mode='linearised'\)"
    )
    for mode in ("nonlinear", "pretrained"):
        with pytest.raises(lw.errors.NumericalError, match=message):
            fitted(far, lw.HFL(mode=mode, drift=0.1))
    x = new(energy)
    assert off(fitted(far, lw.HFL(drift=1.0)).functions(x).cov, energy.each(x)) < 1e-6
    linear = fitted(far, lw.HFL(mode="linearised", drift=0.1)).functions(x).cov
    assert off(linear, far.each(x, far.ggn())) < 1e-8


@pytest.mark.parametrize("limit", [2048, 0])
def test_an_indefinite_hessian(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.methods.hfl_response.DENSE", limit)
    energy = copied(small())
    energy.place(torch.randn(25, dtype=D, generator=torch.Generator().manual_seed(2)))
    assert float(torch.linalg.eigvalsh(energy.hessian())[0]) < -1
    message = (
        r"not positive definite: its smallest eigenvalue is -.*train it further with this prior.*mode='linearised'"
        if limit
        else r"met a direction with curvature -.*Raise the prior precision.*train it further.*mode='linearised'"
    )
    with pytest.raises(lw.errors.NumericalError, match=message) as error:
        fitted(energy, lw.HFL())
    said = re.match(r"HFL: .* has the length (\S+) at .* lowers the loss by (\S+), from (\S+);", str(error.value))
    assert said is not None
    length, fall, value = map(float, said.groups())
    assert length == pytest.approx(float(energy.gradient(energy.theta).norm()), rel=1e-2)
    assert 1 < fall < value


@pytest.mark.parametrize("limit", [2048, 0])
def test_a_search_for_the_minimum_that_overflows(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of e^-20 where five were counted: a full Newton step goes to e^1000 and further."""
    monkeypatch.setattr("lapwing.methods.hfl_response.DENSE", limit)
    model = nn.Linear(1, 1).double()
    model.weight.data.zero_()
    model.bias.data.fill_(-20.0)
    x, y = torch.ones(5, 1, dtype=D), torch.full((5, 1), 5.0, dtype=D)
    with pytest.raises(
        lw.errors.NumericalError, match=r"at no minimum .* Newton's steps find none.*raise the prior precision"
    ):
        lw.fit(model, [(x, y)], "poisson", method=lw.HFL(), prior=1e-6)


# The mode "linearised": responses of the tangent model, which are the variances of Full.

KINDS = [("gaussian", 3), ("categorical", 3), ("bernoulli", 2), ("poisson", 1)]


def test_it_takes_fewer_iterations_than_there_are_weights() -> None:
    """In units of the prior only the directions that the data see need work."""
    energy = gapped()
    posterior = fitted(energy, lw.HFL(mode="linearised")).posterior
    found = posterior.solve(energy.jacobian(new(energy, 5)))
    assert found.iterations < 40 < len(energy.theta)


def test_rows_are_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    energy = small("gaussian", 2)
    x = new(energy, 5)
    found = fitted(energy, lw.HFL(mode="linearised"))
    whole, joint = found.functions(x).cov, found.functions(x, joint=True).cov
    monkeypatch.setattr("lapwing.methods.hfl.ROWS", 2)
    assert off(found.functions(x).cov, whole) < 1e-8
    assert off(found.functions(x, joint=True).cov, joint) < 1e-8


def test_a_loose_tolerance_costs_its_square() -> None:
    """Off by less than a hundredth at a tolerance of a tenth."""
    energy = small()
    x = new(energy, 1)
    exact = energy.each(x, energy.ggn())
    loose, tight = (
        off(fitted(energy, lw.HFL(mode="linearised", tolerance=t)).functions(x).cov, exact) for t in (0.1, 1e-10)
    )
    assert tight < 1e-9
    assert 1e-7 < loose < 1e-2


def test_iterations_that_run_out_are_an_error() -> None:
    posterior = fitted(gapped(), lw.HFL(mode="linearised")).posterior
    with pytest.raises(lw.errors.NumericalError, match=r"stopped after 2 iterations with a relative residual of"):
        replace(posterior, max_iterations=2)(new(gapped()))


def test_data_that_are_not_kept_are_passed_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["token_level"]
    data, inputs = problems.batches(case), case.batch(2, seed=1)
    full = lw.fit(case.build(), data, "classification", method=lw.Full(), prior=0.7).functions(inputs).cov
    monkeypatch.setattr("lapwing.tangent.CACHE_SHARE", 0)
    found = lw.fit(case.build(), data, "classification", method=lw.HFL(mode="linearised"), prior=0.7)
    assert found.posterior.design.streamed
    assert_close(found.functions(inputs).cov, full, 1 / 2)


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
def test_the_tangent_model_has_the_variance_of_the_ggn(kind: str, outputs: int) -> None:
    energy = small(kind, outputs)
    x = new(energy)
    found = fitted(energy, lw.HFL(mode="linearised"))
    assert off(found.functions(x).cov, energy.each(x, energy.ggn())) < 1e-8
    joint = found.functions(x, joint=True).cov.reshape(3 * outputs, 3 * outputs)
    assert off(joint, energy.covariance(x, energy.ggn())) < 1e-8


@cache
def exact_variance(prior: float, place: float) -> Tensor:
    variance: Tensor = much_data(prior, place, lw.Full()).functions(torch.tensor([[place]])).variance
    return variance


def much_data(prior: float, place: float, method: Any) -> lw.Fitted:
    """Single precision, and a hundred times the data."""
    energy = gapped()
    data = [(energy.x.float().repeat(100, 1), energy.y.float().repeat(100, 1))]
    model = copied(energy).model.float()
    return lw.fit(model, data, lw.Gaussian(noise_std=0.15), method=method, prior=prior)


@pytest.mark.parametrize("place", [-2.5, 0.0, 1.5])
def test_single_precision_and_much_data(place: float) -> None:
    """Variances of a millionth of the prior's: residuals must be small beside these, not only beside the push."""
    found = much_data(0.1, place, lw.HFL(mode="linearised")).functions(torch.tensor([[place]]))
    assert_close(found.variance, exact_variance(0.1, place), SOLVED)


@pytest.mark.parametrize(("prior", "place"), [(1e3, 1.5), (1.0, 1.5), (0.1, 0.0)])
def test_single_precision_throughout_converges_or_raises(prior: float, place: float) -> None:
    """Near the limit of float32 rounding decides: what converges is right, and the error says why the rest does not.

    A strong prior is far from that limit, and a weak one far beyond it.
    """
    found = much_data(prior, place, lw.HFL(mode="linearised", dtype=torch.float32))
    try:
        variance = found.functions(torch.tensor([[place]])).variance
    except lw.errors.NumericalError as error:
        assert prior < 1e3
        assert re.search(r"a relative residual of \S+; expected .*take float64", str(error))  # noqa: PT017
    else:
        assert prior > 0.1
        assert_close(variance, exact_variance(prior, place), 1 / 3)


def test_another_prior_for_the_tangent_model() -> None:
    """No data are touched besides those that it holds."""
    energy = small()
    x = new(energy)
    moved = fitted(energy, lw.HFL(mode="linearised")).with_prior(3.0)
    assert off(moved.functions(x).cov, energy.each(x, copied(energy, precision=3.0).ggn())) < 1e-8
    with pytest.raises(lw.errors.UnsupportedError, match="no prior over weights to change"):
        fitted(energy, lw.HFL()).with_prior(3.0)


@pytest.mark.parametrize("validated", [False, True])
def test_mixtures_vary_the_precision_as_those_of_the_exact_posterior(validated: bool) -> None:
    """With validation data, and within the budget: the same cells around Full predict the same."""
    energy = small("categorical", 3)
    validation = (new(energy, 40, seed=8), torch.arange(40) % 3) if validated else None
    mixture = fitted(energy, lw.HFL(mode="linearised"), prior=None, validation=validation)
    beliefs = mixture.posterior.beliefs
    assert len({float(belief.precisions) for belief in beliefs}) == len(beliefs) > 1
    full = fitted(energy, lw.Full(), prior=float(mixture.prior.values))
    same = replace(mixture, posterior=replace(mixture.posterior, bases=(full.posterior,)))
    inputs = new(energy)
    assert off(mixture.predict(inputs).probs, same.predict(inputs).probs) < 1e-8
    assert off(mixture.functions(inputs).cov, same.functions(inputs).cov) < 1e-8


def test_data_in_another_order_at_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tangent model needs its rows again; where they are not kept, a loader that shuffles is refused."""
    energy, gen = small(), torch.Generator().manual_seed(3)

    class Shuffled:
        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(25, generator=gen)
            yield energy.x[order], energy.y[order]

    x = new(energy)
    found = fitted(energy, lw.HFL(mode="linearised"), data=Shuffled())
    assert isinstance(found.posterior, LinearisedResponse)
    assert off(found.functions(x).cov, energy.each(x, energy.ggn())) < 1e-8
    assert off(fitted(energy, lw.HFL(), data=Shuffled()).functions(x).cov, energy.each(x)) < 1e-6
    monkeypatch.setattr("lapwing.tangent.CACHE_SHARE", 0)
    with pytest.raises(lw.errors.DataError, match="two passes over the data gave different rows"):
        fitted(energy, lw.HFL(mode="linearised"), data=Shuffled())


def test_float32_data_of_tokens() -> None:
    """Whole numbers stay whole where everything else is widened."""
    case = BY_NAME["embedding"]
    data = problems.batches(case, dtype=torch.float32)
    narrow = lw.fit(case.build(torch.float32), data, "classification", method=lw.HFL(mode="linearised"), prior=0.7)
    wide = lw.fit(case.build(torch.float32).double(), data, "classification", method=lw.Full(), prior=0.7)
    inputs = case.batch(3, torch.float32, seed=1)
    assert_close(narrow.functions(inputs).cov, wide.functions(cast(inputs, D)).cov, SOLVED)


# Minima that are pushed, and where minima lie: against what can be worked out by hand.


def spd(size: int, seed: int = 1) -> Tensor:
    root = torch.randn(size, size, dtype=D, generator=torch.Generator().manual_seed(seed))
    return root @ root.T + torch.eye(size, dtype=D)


def test_a_quadratic_is_done_in_one_step() -> None:
    """∇U = H d and constant forces: d = λ H⁻¹ g, whatever λ is."""
    h = spd(4)
    force = torch.randn(3, 4, dtype=D)
    lam = torch.tensor([1e-3, -1.0, 50.0], dtype=D)
    minima = push_minima(lambda d: d @ h, lambda d: force, lambda r: torch.linalg.solve(h, r.T).T, lam,
                   torch.zeros(3, 4, dtype=D), tolerance=1e-12)  # fmt: skip
    assert_close(minima.d, lam[:, None] * torch.linalg.solve(h, force.T).T)
    assert minima.steps == 1
    assert float(minima.residuals.max()) < 1e-12
    assert float(minima.missing.max()) < 1e-12


def cubic(d: Tensor) -> Tensor:
    """∇U of U = Σ d²/2 + d⁴/4."""
    return d + d**3


def pushed(*lam: float, push: Any = torch.ones_like, tolerance: float = 1e-12, **options: Any) -> Any:
    """Push that U from zero, with a row of one weight for each strength."""
    start = torch.zeros(len(lam), 1, dtype=D)
    return push_minima(cubic, push, lambda r: r, torch.tensor(lam, dtype=D), start, tolerance=tolerance, **options)


@pytest.mark.parametrize("lam", [1e-3, 0.1, -0.2])
def test_a_curved_loss_is_solved_to_the_tolerance(lam: float) -> None:
    minima = pushed(lam)
    d = float(minima.d)
    assert d + d**3 == pytest.approx(lam, rel=1e-11)
    assert float(minima.residuals) <= 1e-12


def test_the_error_falls_with_the_push_at_every_step() -> None:
    """A thousandth of the push takes fewer steps."""
    steps = [pushed(lam).steps for lam in (1e-4, 1e-2, 0.3)]
    assert steps == sorted(steps)
    assert steps[0] <= 2
    assert steps[2] > steps[1] > steps[0]


def test_what_is_missing_is_what_was_missing() -> None:
    """After an early stop, the share that one more step would add is about the relative error."""
    exact = float(pushed(0.3, tolerance=1e-14).d)
    for most in (1, 2, 3):
        minima = pushed(0.3, tolerance=1e-14, max_steps=most)
        assert minima.steps == most
        assert float(minima.missing) == pytest.approx(abs(float(minima.d) - exact) / exact, rel=0.4)
        assert float(minima.residuals) > 1e-14


def test_nothing_done_is_all_missing() -> None:
    minima = pushed(0.1, max_steps=0)
    assert (float(minima.missing), float(minima.residuals), minima.steps) == (1.0, 1.0, 0)


def test_pushes_that_turn_with_the_weights() -> None:
    """g = d₁²/2 + d₁: (1 - λ) d₁ = λ."""
    push = lambda d: torch.stack([d[:, 0] + 1, torch.zeros_like(d[:, 1])], 1)
    lam = torch.tensor([0.25, -0.25], dtype=D)
    minima = push_minima(lambda d: d, push, lambda r: r, lam, torch.zeros(2, 2, dtype=D), tolerance=1e-13)
    assert_close(minima.d, torch.stack([lam / (1 - lam), torch.zeros(2, dtype=D)], 1))


def test_a_row_that_gets_worse_is_left_where_it_was_best() -> None:
    """The steps of a strong perturbation diverge; the other row is solved nevertheless."""
    minima = pushed(1e-2, 3.0)
    assert float(minima.d[0] + minima.d[0] ** 3) == pytest.approx(1e-2, rel=1e-11)
    assert float(minima.d[1]) == 0.0
    assert minima.missing[1] == 1.0
    assert float(minima.residuals[1]) == 1.0


def test_a_row_that_overflows_leaves_the_others_alone() -> None:
    """The solve mixes rows, so rows that are not finite are not given to it."""
    gradient = lambda d: d.sinh() + 1e200 * d**5

    def solve(r: Tensor) -> Tensor:
        assert bool(torch.isfinite(r).all())
        return r

    minima = push_minima(gradient, torch.ones_like, solve, torch.tensor([1e-60, 1e30], dtype=D),
                          torch.zeros(2, 1, dtype=D), tolerance=1e-9)  # fmt: skip
    assert float(minima.d[0]) == pytest.approx(1e-60, rel=1e-9)
    assert float(minima.d[1]) == 0.0
    assert float(minima.missing[1]) == 1.0


def test_a_stiff_loss_does_not_end_the_search() -> None:
    """The plain norm of the residual rises in the stiff direction while the response converges.

    U = x²/2 + K (y - x²)²/2: the first step moves x along the tangent, off the valley.
    """
    stiff = 1e6

    def gradient(d: Tensor) -> Tensor:
        off = stiff * (d[:, 1] - d[:, 0] ** 2)
        return torch.stack([d[:, 0] - 2 * d[:, 0] * off, off], 1)

    scale = torch.tensor([1.0, stiff], dtype=D)
    push = lambda d: torch.tensor([[1.0, 0.0]], dtype=D).expand(len(d), 2)
    lam = torch.tensor([1e-5], dtype=D)
    minima = push_minima(gradient, push, lambda r: r / scale, lam, torch.zeros(1, 2, dtype=D), tolerance=1e-10)
    force = lam * push(lam[:, None])
    assert float((gradient(force) - force).norm()) > 9 * float(lam)  # after one step: nine times the push itself
    assert_close(minima.d[:, 0], lam, 1 / 2)
    assert_close(minima.d[:, 1], lam**2, 1 / 2)
    assert float(minima.missing) < 1e-9


def test_a_push_of_zero_moves_nothing() -> None:
    minima = pushed(1.0, push=torch.zeros_like)
    assert float(minima.d) == 0.0
    assert float(minima.missing) == 0.0


# Where the minimum is


@pytest.mark.parametrize("constant", [0.0, 1e6])  # rounding that a small fall drowns in
def test_the_minimum_of_a_quadratic_in_one_step(constant: float) -> None:
    h, centre = spd(4), torch.randn(4, dtype=D)
    gradient, value = lambda d: (d - centre) @ h, lambda d: float(0.5 * (d - centre) @ h @ (d - centre)) + constant
    minima, decrements = newton(gradient, lambda d, r: torch.linalg.solve(h, r.T).T, value, torch.zeros(4, dtype=D),
                               tolerance=1e-20)  # fmt: skip
    assert_close(minima, centre)
    assert len(decrements) == 2
    assert decrements[0] == pytest.approx(float(centre @ h @ centre), rel=1e-10)  # twice what U falls by
    assert decrements[1] < 1e-20


def test_the_minimum_of_a_curved_loss() -> None:
    """U = e^d - 2 d has its minimum at log 2; the decrement falls with its square."""
    minima, decrements = newton(lambda d: d.exp() - 2, lambda d, r: r / d.exp(), lambda d: float(d.exp() - 2 * d),
                               torch.tensor([1.0], dtype=D), tolerance=1e-24)  # fmt: skip
    assert float(minima) == pytest.approx(math.log(2), rel=1e-12)
    assert decrements == sorted(decrements, reverse=True)
    assert decrements[2] < decrements[1] ** 1.5


def test_steps_are_halved_where_they_lead_away() -> None:
    """Newton's steps for the minimum of √(1 + d²) grow if they start beyond one."""
    gradient = lambda d: d / (1 + d**2).sqrt()
    value = lambda d: float((1 + d**2).sqrt().sum())
    for start in (1.5, 15.0):
        minima, decrements = newton(gradient, lambda d, r: r * (1 + d**2) ** 1.5, value,
                                   torch.tensor([start], dtype=D), tolerance=1e-20, max_steps=60)  # fmt: skip
        assert abs(float(minima)) < 1e-9
        assert decrements[-1] <= 1e-20


def test_a_search_ends_where_no_length_lowers_the_loss() -> None:
    """Next to the corner of |d| even a thousandth of the step goes beyond it."""
    solved = []

    def solve(d: Tensor, r: Tensor) -> Tensor:
        solved.append(float(d))
        return r

    start = torch.tensor([1e-5], dtype=D)
    minima, decrements = newton(torch.sign, solve, lambda d: float(d.abs().sum()), start, tolerance=1e-12)
    assert torch.equal(minima, start)
    assert decrements == [1.0]
    assert solved == [1e-5]


def test_a_search_that_overflows_is_refused() -> None:
    """Far left of its minimum e^d - d has little curvature: one step leads to an overflow of the gradient."""
    solved = []

    def solve(d: Tensor, r: Tensor) -> Tensor:
        solved.append(float(d))
        return r / d.exp()

    falls = lambda d: -float(d.sum())  # a loss that does not overflow, so that the step is taken
    _, decrements = newton(lambda d: d.exp() - 1, solve, falls, torch.tensor([-20.0], dtype=D), tolerance=1e-12)
    assert decrements[-1] == math.inf
    assert solved == [-20.0]


def test_steps_that_run_out() -> None:
    _, decrements = newton(lambda d: d.exp() - 2, lambda d, r: r / d.exp(), lambda d: float(d.exp() - 2 * d),
                           torch.tensor([5.0], dtype=D), tolerance=1e-24, max_steps=3)  # fmt: skip
    assert len(decrements) == 3
    assert decrements[-1] > 1e-24


# The regularised loss for many weights at once, against one set of weights at a time.

OBJECTIVE_KINDS = [("gaussian", 2), ("categorical", 3), ("bernoulli", 1), ("poisson", 1)]


def built(energy: Energy, dtype: torch.dtype = D, **options: Any) -> Objective:
    posterior = fitted(energy, lw.baselines.MapOnly(), **options)
    device = torch.device("cpu")
    return Objective.build(posterior.network, posterior.likelihood, posterior.prior, Data(data(energy), device), dtype)


def steps(energy: Energy, count: int = 3) -> Tensor:
    return 0.3 * torch.randn(count, len(energy.theta), dtype=D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("kind", "outputs"), OBJECTIVE_KINDS)
def test_gradients_and_curvature(kind: str, outputs: int) -> None:
    energy = copied(small(kind, outputs), mean=0.1)
    objective, d = built(energy), steps(energy)
    expected = torch.stack([energy.gradient(energy.theta + row) for row in d])
    assert_close(objective.gradient(d), expected)
    assert_close(objective.hessian_product(d), d @ energy.hessian())
    moved = objective.move_centre(d[0])
    assert_close(moved.gradient(d), torch.stack([energy.gradient(energy.theta + d[0] + row) for row in d]))
    assert_close(moved.hessian_product(d), d @ energy.hessian(energy.theta + d[0]))
    values = torch.tensor([objective.value(row) - objective.value(0 * row) for row in d], dtype=D)
    constants = torch.stack([energy(energy.theta + row) - energy(energy.theta) for row in d]).detach()
    assert_close(values, constants)  # up to what does not depend on the weights
    assert objective.size == len(energy.theta)
    assert objective.data == 25


@pytest.mark.parametrize(("kind", "outputs"), OBJECTIVE_KINDS)
def test_outputs_and_their_slopes(kind: str, outputs: int) -> None:
    energy = small(kind, outputs)
    objective, d, x = built(energy), steps(energy), new(energy, 3)
    expected = torch.stack([energy.output(energy.theta + row, x) for row in d])
    assert_close(objective.outputs(d, x), expected)
    assert_close(objective.each_output(d, x), torch.stack([expected[k, k] for k in range(3)]))
    seeds = torch.randn(3, outputs, dtype=D)
    slopes = []
    for k in range(3):
        moved = copied(energy)
        moved.place(energy.theta + d[k])
        slopes.append(seeds[k] @ moved.jacobian(x[k : k + 1]))
    assert_close(objective.slopes(d, x, seeds), torch.stack(slopes))


def test_some_weights() -> None:
    index = torch.tensor([0, 7, 13, 24])
    energy = copied(small(), index=index)
    objective = built(energy, weights=lw.subnetwork(index))
    d = steps(energy)
    assert_close(objective.gradient(d), torch.stack([energy.gradient(energy.theta + row) for row in d]))
    assert_close(objective.hessian_product(d), d @ energy.hessian())
    named = objective.weights(d[0])
    expected = energy.named(energy.theta + d[0])
    assert set(named) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, value in named.items():
        assert_close(value, expected[name])


def test_some_batches_stand_for_all() -> None:
    """A batch of five of 25 counts five times; the prior counts once."""
    energy = small()
    objective, d = built(energy), steps(energy)
    batch = Batch(energy.x[:5], energy.y[:5])
    part = Energy("gaussian", energy.model, energy.x[:5], energy.y[:5], energy.precision, energy.phi / 5)
    expected = torch.stack([part.gradient(energy.theta + row) for row in d])
    assert_close(objective.gradient(d, (batch,)), expected)


def test_single_precision_networks_are_widened() -> None:
    """The copy is float64, starts at the float32 weights, and the model stays as it is."""
    energy = small()
    model = copied(energy).model.float()
    posterior = lw.fit(
        model, [(energy.x.float(), energy.y.float())], lw.Gaussian(noise_std=0.2), method=lw.baselines.MapOnly()
    )
    source = Data([(energy.x.float(), energy.y.float())], torch.device("cpu"))
    objective = problems.unchanged(
        model, lambda: Objective.build(posterior.network, posterior.likelihood, posterior.prior, source, D)
    )
    assert objective.dtype == D
    assert {p.dtype for p in objective.model.parameters()} == {D}
    assert objective.batches[0].inputs.dtype == objective.batches[0].targets.dtype == D
    assert torch.equal(objective.centre, nn.utils.parameters_to_vector(model.parameters()).detach().double())
    wide = Energy("gaussian", copied(energy).model.float().double(), energy.x.float().double(),
                  energy.y.float().double(), float(posterior.prior.values), 0.04)  # fmt: skip
    d = steps(energy)
    expected = torch.stack([wide.gradient(wide.theta + row) for row in d])
    assert_close(objective.gradient(d), expected)
    assert next(model.parameters()).dtype == torch.float32


# Pushes and their responses: choosing a strength, and when a response is not trusted.


@dataclass
class Spring:
    """U = d²/2 + skew · d³/3 + stiffening · d⁴/4, one weight: what pushes do can be worked out."""

    stiffening: float = 0.0
    curvature: float = 1.0
    skew: float = 0.0
    size: int = 1
    dtype: torch.dtype = D

    @property
    def centre(self) -> Tensor:
        return torch.zeros(1, dtype=self.dtype)

    def gradient(self, d: Tensor) -> Tensor:
        return self.curvature * d + self.skew * d**2 + self.stiffening * d**3

    def solve(self, rows: Tensor) -> Tensor:
        return rows / self.curvature

    def flat_variance(self, solved: Tensor) -> Tensor:
        return 1e-6 * solved.square().sum(1)


def sprung(spring: Spring, tolerance: float = 1e-6, **settings: Any) -> Responder:
    return Responder(spring, spring, tolerance, **settings)  # type: ignore[arg-type]


def test_a_quadratic_answers_the_same_to_every_strength() -> None:
    ends = [sprung(Spring(curvature=4.0)).respond(lambda d: 3 * torch.ones_like(d), lambda d: 3 * d, 1, lam)
            for lam in (1e-6, 1e-3, 0.5)]  # fmt: skip
    for found in ends:
        assert_close(found.cov, torch.tensor([[9 / 4]], dtype=D), SOLVED)
        assert float(found.change) == 0.0
    chosen = sprung(Spring(curvature=4.0)).respond(lambda d: 3 * torch.ones_like(d), lambda d: 3 * d, 1)
    assert_close(chosen.cov, torch.tensor([[9 / 4]], dtype=D), SOLVED)
    assert float(chosen.strength) == pytest.approx(0.005 / 1.5)  # a hundredth of the deviation, halved once to compare


def test_a_strength_is_halved_until_two_estimates_agree() -> None:
    """d + k d³ = λ: the response is 1 - k λ² + …, and what two strengths say of λ² is taken off."""
    response = sprung(Spring(stiffening=30.0)).respond(torch.ones_like, lambda d: d, 1)
    assert float(response.cov) == pytest.approx(1.0, rel=1e-6)
    assert float(response.strength) < 0.005
    assert float(response.change) <= 0.3e-6
    plain = sprung(Spring(stiffening=30.0)).respond(torch.ones_like, lambda d: d, 1, float(response.strength))
    assert abs(float(plain.cov) - 1) > 10 * abs(float(response.cov) - 1)
    assert float(plain.cov) == pytest.approx(1 - 30 * float(response.strength) ** 2, rel=1e-6)


def test_every_push_has_its_own_strength() -> None:
    energy = gapped()
    x = torch.tensor([[-1.5], [0.0], [2.5]], dtype=D)
    response = fitted(energy, lw.HFL()).posterior.respond(x)
    first = 0.01 / energy.each(x).flatten().sqrt()
    halvings = (first / response.strength).log2()
    assert_close(halvings, halvings.round())
    assert bool((halvings.round() >= 1).all())
    assert len(set(halvings.round().tolist())) > 1


def skewed(lam: float) -> tuple[float, float]:
    """Where d + d² = ±λ."""
    return (math.sqrt(1 + 4 * lam) - 1) / 2, (math.sqrt(1 - 4 * lam) - 1) / 2


@pytest.mark.parametrize("lam", [1e-4, 1e-2, 0.1, 0.2])
def test_the_bend_of_a_spring_that_is_softer_one_way(lam: float) -> None:
    up, down = skewed(lam)
    response = sprung(Spring(skew=1.0), 1e-9, max_steps=500).respond(torch.ones_like, lambda d: d, 1, lam)
    assert float(response.bend) == pytest.approx((-up - down) / (up - down), rel=1e-6)
    assert float(response.bend) == pytest.approx(lam, rel=0.2)  # falls with the strength
    assert float(response.drift) == 0.0
    straight = sprung(Spring(stiffening=1.0)).respond(torch.ones_like, lambda d: d, 1, lam)
    assert float(straight.bend) < 1e-9


def test_the_bend_is_that_of_what_was_pushed() -> None:
    """Of all that is read off; the weights themselves along its slope."""
    spring = sprung(Spring(), 1e-9)
    both = lambda d: torch.cat([d, d**2], 1)
    for own, bend in ((lambda seen: seen[:, 0], 0.0), (lambda seen: seen[:, 0] + seen[:, 1], 0.1)):
        response = spring.respond(torch.ones_like, both, 1, 0.1, own)
        assert float(response.bend) == pytest.approx(bend, abs=1e-9)  # (d² + d²) / 2 d at d = 0.1
    assert float(spring.respond(torch.ones_like, lambda d: d, 1, 0.1).bend) == pytest.approx(0.0, abs=1e-12)


def test_a_push_without_a_minimum_is_refused() -> None:
    """d + d² = -λ has no solution for λ above a quarter; up there is one."""
    response = sprung(Spring(skew=1.0), max_steps=500).respond(torch.ones_like, lambda d: d, 1, 0.5)
    assert response.steps < 500
    with pytest.raises(
        lw.errors.NumericalError, match=r"not converged.*do not reach the pushed minimum \(bend 0\.15.*smaller lam"
    ):
        response.require_convergence(1e-6)
    near = sprung(Spring(skew=1.0), 1e-3, max_steps=500).respond(torch.ones_like, lambda d: d, 1, 0.24)
    with pytest.raises(
        lw.errors.NumericalError, match=r"1 of 1 responses are not straight.*bend 0\.33; expected at most 0\.25"
    ):
        near.require_convergence(1e-3)


def test_a_falling_variance_is_refused() -> None:
    with pytest.raises(
        lw.errors.NumericalError, match=r"a variance came out as -0\.5; expected above zero.*train it further"
    ):
        sprung(Spring(curvature=-2.0)).respond(torch.ones_like, lambda d: d, 1)


@pytest.mark.parametrize("strength", [None, 0.3])
def test_what_nothing_moves_does_not_respond(strength: float | None) -> None:
    """Alone, and beside a push that has a response."""
    none = sprung(Spring()).respond(torch.zeros_like, lambda d: 0 * d + 7, 1, strength)
    assert none.require_convergence(1e-6).cov.tolist() == [[0.0]]
    slopes = torch.tensor([[0.0], [2.0]], dtype=D)
    both = sprung(Spring()).respond(lambda d: slopes, lambda d: slopes * d, 2, strength)
    assert_close(both.require_convergence(1e-6).cov, torch.tensor([[0.0], [4.0]], dtype=D), SOLVED)


def test_the_window_of_strengths() -> None:
    """From where a difference is rounding to where the prediction moves by its standard deviation, two here."""
    push = lambda d: 2 * torch.ones_like(d)
    spring = sprung(Spring())
    for lam in (0.4999, 1e-9):
        spring.respond(push, lambda d: 2 * d, 1, lam)
    for lam in (0.5001, 1e-11):
        with pytest.raises(
            lw.errors.NumericalError, match=rf"lam is {lam:.3g}; expected between 1\.1e-10 \(.*and 0\.5 \("
        ):
            spring.respond(push, lambda d: 2 * d, 1, lam)
    with pytest.raises(
        lw.errors.NumericalError, match=r"expected between 5\.6e-08"
    ):  # larger outputs leave fewer digits
        spring.respond(push, lambda d: 2 * d + 1000, 1, 1e-9)


def test_the_window_has_no_unit() -> None:
    """Outputs of a hundred-thousandth have a window of a hundred thousand times as much."""
    for unit in (1.0, 1e-5):
        low, high = (re.escape(f"{figure:.2g}") for figure in (2.2e-10 / unit, 1 / unit))
        with pytest.raises(lw.errors.NumericalError, match=rf"expected between {low} \(.*and {high} \("):
            sprung(Spring()).respond(lambda d: unit * torch.ones_like(d), lambda d: unit * d, 1, 1e-12)  # noqa: B023


def test_a_strength_is_chosen_above_rounding() -> None:
    """In single precision a value of one has no difference of a hundred-thousandth to a hundredth."""
    push, read = (lambda d: 1e-3 * torch.ones_like(d)), (lambda d: 1 + 1e-3 * d)
    spring = sprung(Spring(dtype=torch.float32), 1e-2)
    found = spring.respond(push, read, 1).require_convergence(1e-2)
    assert float(found.cov) == pytest.approx(1e-6, rel=1e-2)
    assert float(found.strength) > 12 > 0.01 / 1e-3  # a hundredth of the deviation
    message = (
        r"no push is above rounding in torch.float32 .* deviation \(0\.001\), with a tolerance of 0\.01\. Give a larger"
    )
    with pytest.raises(lw.errors.NumericalError, match=message):
        spring.respond(push, lambda d: 1e3 + read(d), 1)
    anything = sprung(Spring(dtype=torch.float32), math.inf).respond(push, lambda d: 1e3 + read(d), 1)
    assert bool(torch.isfinite(anything.require_convergence(math.inf).cov).all())


def response(
    missing: float = 0.0, change: float = 0.0, residual: float = 0.1, bend: float = 0.0, drift: float = 0.0
) -> Response:
    one = lambda value: torch.tensor([0.0, value], dtype=D)
    return Response(torch.ones(2, 1, dtype=D), torch.tensor([0.1, 0.2], dtype=D), one(residual), one(missing),
                    one(change), one(bend), one(drift), 7)  # fmt: skip


@pytest.mark.parametrize(("missing", "change"), [(1e-3, 0.0), (0.0, 1e-3), (math.nan, 0.0), (0.0, math.inf)])
def test_unfinished_responses_do_not(missing: float, change: float) -> None:
    message = (
        r"1 of 2 responses have not converged; the worst \(push 1, strength 0\.2\) is off by about (0\.001|nan|inf)"
    )
    with pytest.raises(lw.errors.NumericalError, match=message) as error:
        response(missing, change).require_convergence(1e-6)
    assert "after 7 steps (relative residual 0.1); expected 1e-06" in str(error.value)


CAUSES: dict[str, tuple[dict[str, float], str]] = {
    "basin": (
        {"missing": 0.1, "bend": 0.26},
        r"leaves the basin of the minimum \(bend 0\.26; expected at most 0\.25\): give a smaller lam, or more steps "
        r"if lam is None, or use HFL\(mode='linearised'\)",
    ),
    "overflow": ({"missing": 0.1, "bend": math.nan}, r"leaves the basin of the minimum \(bend nan"),
    "steps": (
        {"missing": 0.1, "bend": 0.24, "residual": math.nan},
        r"Up and down move alike \(bend 0\.24\), so there were too few steps: give more steps, or use HFL\(mode=",
    ),
    "newton": (
        {"missing": 0.1, "bend": 0.24},
        r"Newton's steps do not reach the pushed minimum \(bend 0\.24 where they end\): give a smaller lam, or a "
        r"larger tolerance, or use",
    ),
    "rounding": (
        {"missing": 1e-9, "change": 0.1}, r"disagree down to the rounding error: give a larger tolerance, or use"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named(name: str) -> None:
    figures, message = CAUSES[name]
    with pytest.raises(lw.errors.NumericalError, match=r"1 of 2 responses have not converged.*" + message) as error:
        response(**figures).require_convergence(1e-6)
    causes = ("leaves the basin", "too few steps", "do not reach", "rounding error")
    said = [cause for cause in causes if cause in str(error.value)]
    assert len(said) == 1


@pytest.mark.parametrize("bend", [0.26, math.inf, math.nan])
def test_what_is_finished_and_bent_is_refused(bend: float) -> None:
    message = (
        r"1 of 2 responses are not straight; the worst is that to push 1, of strength 0\.2\. The push leaves the basin "
        rf"of the minimum \(bend {bend:.2g}; expected at most 0\.25\): give a smaller lam, leave lam out to have it"
    )
    with pytest.raises(lw.errors.NumericalError, match=message):
        response(bend=bend).require_convergence(1e-6)
    passed = response(bend=0.24)
    assert passed.require_convergence(1e-6) is passed


def test_what_drifted_is_refused() -> None:
    message = (
        r"the weights are 0\.3 posterior standard deviations from the minimum of their regularised loss, measured by "
        r"how far an unpushed twin moves what is pushed; expected at most 0\.2\. .*train this one further with this "
        r"prior as weight decay, allow it with HFL\(drift=\.\.\.\), or use HFL\(mode='linearised'\)"
    )
    with pytest.raises(lw.errors.NumericalError, match=message):
        response(drift=0.3).require_convergence(1e-6, 0.2)
    for limit in (0.3, math.inf):
        assert float(response(drift=0.3).require_convergence(1e-6, limit).drift[1]) == 0.3


def test_an_infinite_tolerance_takes_what_comes() -> None:
    found = response(missing=3.0, bend=2.0, drift=5.0)
    assert found.require_convergence(math.inf, 1.0) is found
    with pytest.raises(lw.errors.NumericalError, match="is off by about nan"):
        response(missing=math.nan).require_convergence(math.inf)


def test_a_residual_that_is_not_known_is_not_said() -> None:
    with pytest.raises(lw.errors.NumericalError, match="after 7 steps; expected 1e-06"):
        response(1e-3, residual=math.nan).require_convergence(1e-6)


def test_one_push_for_each_output_read_off_where_it_was_asked() -> None:
    energy = small("gaussian", 2)
    x = new(energy)
    posterior = fitted(energy, lw.HFL()).posterior
    response, everywhere = posterior.respond(x), posterior.respond(x, joint=True)
    assert response.cov.shape == (6, 2)
    assert everywhere.cov.shape == (6, 6)
    assert off(everywhere.cov, energy.covariance(x)) < 1e-6
    assert off(response.cov, torch.cat([energy.each(x)[b] for b in range(3)])) < 1e-6
    assert response.steps > 0
    assert float(response.missing.max()) < 1e-6


def test_what_is_missing_is_not_understated() -> None:
    """Fewer steps than it takes: the worse of two pushes, where the difference of both may be better."""
    energy = gapped()
    x = torch.tensor([[0.0]], dtype=D)
    lam = 0.05 / float(energy.each(x)) ** 0.5
    whole = fitted(energy, lw.HFL(lam=lam)).posterior
    exact = float(whole.respond(x).cov)
    for most in (1, 2):
        few = replace(whole, responder=replace(whole.responder, max_steps=most)).respond(x)
        assert few.steps == most
        assert float(few.missing) > 1e-7
        assert 1e-8 < abs(float(few.cov) / exact - 1) < float(few.missing)
