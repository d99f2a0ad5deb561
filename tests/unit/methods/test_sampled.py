"""The sampled posterior: exactness, evidence, solvers and settings."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from benchmarks.scales import LIMIT, measured, methods
from lapwing.data.batches import Data
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.linalg.operators import back_product, forward_product
from lapwing.linalg.ridge import Ridge
from lapwing.methods.sampled import Sampled
from lapwing.networks.network import Network
from lapwing.tangent import NetworkDesign
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.references import dense, ridge
from tests.tolerances import SOLVED, assert_close, assert_near, assert_within, student
from tests.unit.methods.sampled_problems import (
    KINDS,
    PRIORS,
    D,
    Problem,
    larger,
    likelihood,
    noise,
    on_larger,
    problem,
    targets,
)

# Samples of the full posterior: dense solves of the same noise, Monte Carlo, evidence.

SOLVERS = ["krylov", "cg"]
SOME = ["mlp", "cnn", "attention", "lstm", "embedding", "token_level", "squeezed", "dict_input"]


def with_noise(fitted: lw.Fitted, zeta: Tensor, eps: Tensor) -> lw.Fitted:
    """The same posterior with samples from this noise."""
    mine = fitted.posterior.solver.ridge
    solver = replace(fitted.posterior.solver, ridge=replace(mine, prior=zeta, back=back_product(mine.design, eps)))
    return lw.Fitted(replace(fitted.posterior, solver=solver), fitted.fingerprint)


def moved(fitted: lw.Fitted, phi: float) -> lw.Fitted:
    """Under another dispersion."""
    changed = fitted.likelihood.with_dispersion(torch.tensor(phi, dtype=D))
    return lw.Fitted(
        fitted.posterior.with_problem(fitted.posterior.problem.with_likelihood(changed)), fitted.fingerprint
    )


@pytest.mark.parametrize(
    ("count", "width", "solver", "prior", "kind"),
    [(3, 16, "krylov", "isotropic", "gaussian"), (3, 16, "cg", "g", "categorical"),
     (3, 16, "krylov", "per_layer", "bernoulli"), (7, 4, "krylov", "g", "gaussian"),
     (7, 4, "cg", "per_layer", "categorical"), (7, 4, "krylov", "isotropic", "bernoulli"),
     (60, 16, "cg", "isotropic", "gaussian"), (60, 16, "krylov", "g", "bernoulli"),
     (60, 16, "krylov", "per_layer", "categorical")],
)  # fmt: skip
def test_samples_are_dense_solves_of_the_same_noise(count: int, width: int, solver: str, prior: str, kind: str) -> None:
    """Λ⁻¹ (A^½ ζ + Jᵀ R ε / √φ); fewer samples than the basis takes, and more."""
    p = problem(kind)
    zeta, eps = noise(p.x, count)
    method = lw.Sampled(num_samples=1, solver=solver, tolerance=1e-11, width=width)
    posterior = with_noise(p.fit(method, prior), zeta, eps)
    expected = ridge.draws(p.x, zeta, eps, p.precision(prior), p.phi)
    assert_close(posterior.posterior.samples, expected, SOLVED)
    assert posterior.posterior.solution.residuals.shape == (count,)
    assert float(posterior.posterior.solution.residuals.max()) <= 1e-11
    theta = p.exact.theta
    assert_close(posterior.weight_samples(count), theta + expected, SOLVED)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("prior", PRIORS)
def test_a_fit_draws_its_own_noise(prior: str, solver: str, generator: torch.Generator) -> None:
    p = problem()
    posterior = p.fit(lw.Sampled(num_samples=5, solver=solver, tolerance=1e-11), prior, generator=generator).posterior
    mine = posterior.solver.ridge
    total = p.exact.ggn / p.phi + torch.diag(p.precision(prior))
    rhs = p.precision(prior).sqrt() * mine.prior + mine.back / p.phi**0.5
    assert_close(posterior.samples, torch.linalg.solve(total, rhs.T).T, SOLVED)
    assert_close(mine.back @ torch.linalg.pinv(p.x) @ p.x, mine.back, SOLVED)  # Xᵀ of something


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("weights", [lw.last_layer, lw.subnetwork(torch.arange(0, 80, 7))], ids=["last", "some"])
def test_some_of_the_weights(name: str, weights: Any) -> None:
    p = Problem("categorical", BY_NAME[name], 1.0)
    posterior = p.fit(lw.Sampled(num_samples=4, tolerance=1e-11), weights=weights).posterior
    size = posterior.problem.network.selection.size
    last = torch.arange(p.x.shape[1] - size, p.x.shape[1])
    chosen = last if posterior.problem.network.selection.index is None else torch.arange(0, 80, 7)
    x, mine = p.x[:, chosen], posterior.solver.ridge
    total = x.T @ x + 0.7 * torch.eye(size, dtype=D)
    assert_close(posterior.samples, torch.linalg.solve(total, (0.7**0.5 * mine.prior + mine.back).T).T, SOLVED)


class Counting:
    """Data that count the passes over them."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.passes = data, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from self.data


@pytest.mark.parametrize("prior", ["isotropic", "g"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_precision_and_noise_touch_no_data(kind: str, prior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One basis for all: not one pass more, though every product would be one."""
    monkeypatch.setattr("lapwing.tangent.CACHE_SHARE", 0)
    p = problem(kind)
    data = Counting(p.data)
    method = lw.Sampled(num_samples=1, tolerance=1e-11)
    start = lw.fit(p.case.build(), data, likelihood(kind, p.phi), method=method, prior=p.prior(prior))
    zeta, eps = noise(p.x, 4)
    start = with_noise(start, zeta, eps)
    _ = start.with_prior(
        lw.priors.g_prior(1e-3) if prior == "g" else 1e-3
    ).posterior.samples  # the basis as far as it goes
    before = data.passes
    make = lw.priors.g_prior if prior == "g" else lw.isotropic
    unit = p.precision(prior) / (0.3 if prior == "g" else 0.7)
    for alpha, phi in ((0.05, p.phi), (0.7, p.phi), (30.0, p.phi), (2.0, 4.0), (2.0, 0.1)):
        samples = moved(start.with_prior(make(alpha)), phi).posterior.samples
        assert_close(samples, ridge.draws(p.x, zeta, eps, alpha * unit, phi), SOLVED)
    assert data.passes == before


def test_held_factors_are_never_read_again() -> None:
    p = problem()
    data = Counting(p.data)
    start = lw.fit(p.case.build(), data, lw.Gaussian(), method=lw.Sampled(num_samples=4, tolerance=1e-8), prior=1e3)
    before = data.passes
    start.functions(p.case.batch(3))
    start.with_prior(1e-4).functions(p.case.batch(3))  # needs a larger basis
    start.with_prior(p.prior("per_layer")).functions(p.case.batch(3))
    start.log_evidence()
    start.tuned()
    assert data.passes == before


@pytest.mark.parametrize("solver", SOLVERS)
def test_other_kinds_of_priors_after_the_fit(solver: str) -> None:
    """By groups, by weights, from a g-prior back to one for all: solved anew with the same noise."""
    p = problem("categorical")
    zeta, eps = noise(p.x, 4)
    method = lw.Sampled(num_samples=1, solver=solver, tolerance=1e-11)
    for first in ("isotropic", "g"):
        start = with_noise(p.fit(method, first), zeta, eps)
        for prior in ("per_layer", "isotropic"):
            samples = start.with_prior(p.prior(prior)).posterior.samples
            assert_close(samples, ridge.draws(p.x, zeta, eps, p.precision(prior)), SOLVED)
        each = torch.logspace(-1, 1, p.x.shape[1], dtype=D)
        samples = start.with_prior(lw.priors.diagonal(each)).posterior.samples
        assert_close(samples, ridge.draws(p.x, zeta, eps, each), SOLVED)


def test_a_g_prior_needs_the_curvature_of_the_fit() -> None:
    p = problem()
    with pytest.raises(lw.errors.UnsupportedError, match=r"samples keep no curvature for a g-prior.*fit again"):
        p.fit(lw.Sampled(num_samples=2)).with_prior(lw.priors.g_prior(1.0))
    scaled = p.fit(lw.Sampled(num_samples=2), "g").with_prior(lw.priors.g_prior(0.9))
    assert_close(scaled.prior.vector, 3 * p.precision("g"))


@pytest.mark.parametrize("prior", PRIORS)
def test_complete_noise_makes_everything_exact(prior: str) -> None:
    """As many samples as there are weights and rows, orthogonal: covariances and γ by layer are those of Full."""
    p = problem()
    zeta, eps = ridge.complete(p.x, torch.Generator().manual_seed(2))
    posterior = with_noise(p.fit(lw.Sampled(num_samples=1, tolerance=1e-11), prior), zeta, eps)
    full, inputs = p.fit(lw.Full(), prior), p.case.batch(3, seed=1)
    assert_close(posterior.functions(inputs).cov, full.functions(inputs).cov, SOLVED)
    assert_close(posterior.functions(inputs).variance, full.functions(inputs).variance, SOLVED)
    assert_close(posterior.functions(inputs, joint=True).cov, full.functions(inputs, joint=True).cov, SOLVED)
    effective, theirs = posterior.effective_parameters(), full.effective_parameters()
    assert effective.total == pytest.approx(theirs.total, rel=1e-8)
    assert effective.layers == pytest.approx(theirs.layers, rel=1e-7)
    assert_close(effective.by_precision, theirs.by_precision, SOLVED)


@pytest.mark.parametrize("count", [2, 9], ids=["few", "many"])
@pytest.mark.parametrize("name", SOME)
def test_functions_are_the_tangent_of_the_samples(name: str, count: int) -> None:
    """f + J z exactly; means, variances and covariances are those of these functions."""
    case = BY_NAME[name]
    posterior = problems.fit(case, lw.Sampled(num_samples=count), prior=1.5)
    inputs = case.batch(3, seed=1)
    jac = dense.jacobian(case.build(), inputs, 3)
    f = torch.cat([dense.output(case.build(), dense.one(inputs, b)) for b in range(3)]).detach()
    z = posterior.posterior.samples
    tangent = torch.einsum("bcp,np->nbc", jac, z).reshape(count, 3, *case.outputs)
    assert_close(posterior.function_samples(inputs, count), f + tangent)
    assert_close(posterior.function_samples(inputs, 1), f + tangent[:1])
    belief = posterior.functions(inputs)
    assert_close(belief.mean, f)
    assert_close(belief.variance, tangent.square().mean(0))
    assert_close(belief.cov, torch.einsum("n...c,n...d->...cd", tangent, tangent) / count)
    flat = tangent.flatten(1)
    joint = posterior.functions(inputs, joint=True)
    assert joint.cov.shape == (*f.shape, *f.shape)
    assert_close(joint.cov.reshape(flat.shape[1], -1), flat.T @ flat / count)
    part = posterior.function_samples(problems.rows(inputs, slice(1, 3)), count)
    assert_close(part, (f + tangent)[:, 1:])


def test_samples_that_are_not_there() -> None:
    p = problem()
    posterior = p.fit(lw.Sampled(num_samples=3))
    message = r"4 samples were asked for and 3 are stored; fit with Sampled\(num_samples=\.\.\.\)"
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        posterior.weight_samples(4)
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        posterior.function_samples(p.case.batch(2), 4)
    with pytest.raises(lw.errors.UnsupportedError, match="n is -1; expected an integer of at least 1"):
        posterior.weight_samples(-1)
    gen = torch.Generator().manual_seed(1)
    assert torch.equal(posterior.weight_samples(2, gen), posterior.weight_samples(3)[:2])  # the generator has no say


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("prior", ["isotropic", "per_layer"])
def test_a_tolerance_out_of_reach_is_an_error(solver: str, prior: str) -> None:
    """Products in float32 and a residual of 1e-14: the residual is told, and no samples are left behind."""
    case = BY_NAME["mlp"]
    data = problems.batches(case, dtype=torch.float32)
    given = lw.isotropic(1e-3) if prior == "isotropic" else lw.per_layer(1e-3)
    method = lw.Sampled(num_samples=3, solver=solver, tolerance=1e-14)
    with pytest.raises(lw.errors.NumericalError, match=r"relative residual of \d\S*; expected 1e-14"):
        lw.fit(case.build(torch.float32), data, "classification", method=method, prior=given)
    method = replace(method, tolerance=1e-2)
    posterior = lw.fit(case.build(torch.float32), data, "classification", method=method, prior=given)
    assert "solution" in posterior.posterior.__dict__  # the first prediction solves nothing


@pytest.mark.parametrize("prior", PRIORS)
def test_samples_from_a_file_answer_for_no_other_prior_or_noise(prior: str, tmp_path: Path) -> None:
    p = problem()
    p.fit(lw.Sampled(num_samples=3), prior).save(tmp_path / "it")
    again = lw.load(tmp_path / "it", p.case.build())
    value = float(again.prior.values.reshape(-1)[0])
    others = [lw.isotropic(0.71), lw.per_layer(0.3), lw.priors.diagonal(0.5), moved]
    if prior == "g":
        others.append(lw.isotropic(value))  # the same number of another kind
    for other in others:
        changed = moved(again, 0.5) if other is moved else again.with_prior(other)
        for ask in (lambda c=changed: c.functions(p.case.batch(2)), lambda c=changed: c.log_evidence()):
            with pytest.raises(lw.errors.UnsupportedError, match="belong to the prior and noise they were saved with"):
                ask()
    with pytest.raises(lw.errors.UnsupportedError, match="no data to compute gamma with"):
        again.effective_parameters()
    same = again.with_prior(p.prior(prior))
    assert torch.equal(same.posterior.samples, again.posterior.samples)
    if prior == "isotropic":  # the same precision for every weight, said in another way
        assert torch.equal(again.with_prior(lw.priors.diagonal(0.7)).posterior.samples, again.posterior.samples)


@pytest.mark.parametrize("solver", ["krylov", "cg"])
def test_samples_of_groups_start_from_those_near_them(solver: str) -> None:
    """From their own solution there is nothing to do."""
    posterior = on_larger(lw.Sampled(num_samples=4, solver=solver), lw.per_layer(torch.tensor([0.5, 2.0]))).posterior
    solver_of, problem_of = posterior.solver, posterior.problem
    again = solver_of.solve(problem_of, posterior.solution.x)
    assert posterior.solution.iterations > 3
    assert again.iterations <= 1
    assert_close(again.x, posterior.solution.x, 1e-9)


def test_iterations_count_what_the_basis_did_not_have() -> None:
    few, many = (on_larger(lw.Sampled(num_samples=n, width=8)).posterior for n in (4, 20))
    assert few.solution.iterations == few.solver.ridge.basis.products
    assert many.solution.iterations > many.solver.ridge.basis.products


@pytest.mark.parametrize("solver", ["sgd", "sdd"])
def test_parts_in_another_order_are_refused_by_descent(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the data is not the same part at the next pass: no number of epochs would help."""
    monkeypatch.setattr("lapwing.tangent.CACHE_SHARE", 0)
    model, x, y = larger()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
    with pytest.raises(lw.errors.DataError, match=r"two passes over the data gave different rows.*shuffle=False"):
        lw.fit(model, loader, lw.Gaussian(noise_std=0.3), method=lw.Sampled(solver=solver), prior=1.0)


def test_order_does_not_matter_to_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed in another order at every pass: Xᵀ ε is other noise, just as good, and each solve is right."""
    p, gen = problem("categorical"), torch.Generator().manual_seed(3)

    class Shuffled:
        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(6, generator=gen)
            yield p.case.batch(6)[order], targets(p.case, p.kind)[order]

    monkeypatch.setattr("lapwing.tangent.CACHE_SHARE", 0)
    posterior = lw.fit(
        p.case.build(), Shuffled(), "classification", method=lw.Sampled(num_samples=3, tolerance=1e-11), prior=0.7
    ).posterior
    mine, total = posterior.solver.ridge, p.exact.ggn + 0.7 * torch.eye(p.x.shape[1], dtype=D)
    assert_close(posterior.samples, torch.linalg.solve(total, (0.7**0.5 * mine.prior + mine.back).T).T, SOLVED)


def test_another_order_of_the_data_is_another_draw_of_the_same_posterior() -> None:
    """The noise of a datum belongs to its place: batches do not matter, an order acts as a seed does."""
    torch.manual_seed(0)
    x, net = torch.randn(30, 3, dtype=D), torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()).double()
    y, at = torch.randn(30, 4, dtype=D), torch.randn(5, 3, dtype=D)

    def variances(order: Tensor, size: int, method: Any, seed: int = 0) -> Tensor:
        data = [(x[rows], y[rows]) for rows in order.split(size)]
        generator = torch.Generator().manual_seed(seed)
        return lw.fit(net, data, lw.Gaussian(0.5), method=method, prior=1.0, generator=generator).functions(at).variance

    method, given = lw.Sampled(num_samples=8, tolerance=1e-10), torch.arange(30)
    assert_close(variances(given, 7, method), variances(given, 30, method), SOLVED)
    exact = variances(given, 30, lw.Full())
    ratios = torch.stack([variances(torch.randperm(30), 30, method, seed) / exact for seed in range(40)])
    assert_within(ratios.mean((1, 2))[:, None], torch.ones(1, dtype=D))
    assert 0.5 * (2 / 8) ** 0.5 < float(ratios.std(0).mean()) < 1.5 * (2 / 8) ** 0.5


# What the samples of ``Sampled()`` are worth as it comes: their error, γ by layers, and the precision learned.


@lru_cache
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that 200 data decide in many directions, over ten decades of curvature."""
    torch.manual_seed(5)
    x = torch.randn(200, 3, dtype=D)
    y = x[:, :1].sin() + 0.05 * torch.randn(200, 1, dtype=D)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    problems.descend(model, lambda model: (model(x) - y).square().mean(), 500, 1e-2)
    return model, x, y


def fitted(method: Any, prior: Any, std: float | None = 0.05) -> lw.Fitted:
    model, x, y = trained()
    return lw.fit(model, [(x, y)], lw.Gaussian(noise_std=std), method=method, prior=prior)


@pytest.mark.parametrize(
    ("prior", "std"), [(1e-4, 0.05), (1.0, 1e-3), (lw.per_layer(1e-4), 0.05), (lw.per_layer(1e-2), 0.05)]
)
def test_samples_are_off_by_a_small_share_of_a_standard_deviation(prior: Any, std: float) -> None:
    """At the tolerance that it has, against a dense solve with the same noise, where the prior is far too weak."""
    posterior, full = fitted(lw.Sampled(), prior, std), fitted(lw.Full(), prior, std)
    ridge, vector = posterior.posterior.solver.ridge, full.prior.vector.detach()
    rhs = vector.sqrt() * ridge.prior + ridge.back / std
    precision = full.posterior.curvature.matrix / std**2 + torch.diag(vector)
    error = posterior.posterior.samples - torch.linalg.solve(precision, rhs.mT).mT
    assert float(((error @ precision) * error).sum(1).max()) <= (1e-2) ** 2 * ridge.prior.shape[1] * 1.5
    x = 2 * torch.randn(20, 3, dtype=D, generator=torch.Generator().manual_seed(1))
    moved = full.jacobian([(x, torch.zeros(20, 1, dtype=D))]) @ error.mT
    share = moved / full.functions(x).std.reshape(-1, 1)
    assert float(share.square().mean().sqrt()) < 0.05


def test_gamma_of_layers_has_a_small_spread() -> None:
    """None is below zero or above the number of weights, and all are near those of Full."""
    effective, full = (fitted(m, 1.0).effective_parameters() for m in (lw.Sampled(num_samples=64), lw.Full()))
    assert effective.total == pytest.approx(full.total, rel=0.05)
    for name, exact in full.layers.items():
        assert effective.layers[name] == pytest.approx(exact, abs=6.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_precision_that_is_learned_is_that_of_the_evidence(seed: int) -> None:
    model, x, y = trained()
    generator = torch.Generator().manual_seed(seed)
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(), method=lw.Sampled(), generator=generator)
    full = lw.fit(model, [(x, y)], lw.Gaussian(), method=lw.Full())
    assert float(posterior.prior.values) == pytest.approx(float(full.prior.values), rel=0.15)
    assert "gamma" in posterior.trace.findings[0]


def test_precisions_by_layers_come_near() -> None:
    """Of the evidence at the network's own weights, which FixedPoint finds for Full."""
    tuner = lw.tuners.SampleEM(mode="network", max_steps=200, tolerance=1e-3)
    posterior = fitted(lw.Sampled(num_samples=128), lw.per_layer(1.0)).tuned(tuner)
    full = fitted(lw.Full(), lw.per_layer(1.0)).tuned(lw.tuners.MaximiseEvidence())
    ratio = (posterior.prior.values / full.prior.values).log().abs()
    assert float(ratio.max()) < 0.3


# The evidence of ``Sampled``: its error, its gradient, its optimum.


@pytest.mark.parametrize(
    ("prior", "after"), [("isotropic", False), ("isotropic", True), ("g", False), ("per_layer", False)]
)
def test_the_stated_error_of_the_evidence_is_honest(prior: str, after: bool) -> None:
    """Student's interval of 95 % contains the evidence of Full for nine seeds of ten, up to three standard errors.

    Before there are samples and after, when the basis has grown. An estimate it is: with four probes no seed hits
    the truth. And the error is not overstated.
    """
    given: Any = {"isotropic": 0.5, "g": lw.priors.g_prior(0.01), "per_layer": lw.per_layer(torch.tensor([0.5, 2.0]))}[
        prior
    ]
    method = lw.Sampled(num_samples=2, width=2, probes=4, steps=10, tolerance=0.1)
    truth = float(on_larger(lw.Full(), given).log_evidence())
    start = on_larger(method, given).posterior
    design, scale = start.solver.ridge.design, start.solver.ridge.scale
    gaps, errors = [], []
    seeds = 16
    for seed in range(seeds):
        drawn = Ridge.draw(design, 2, torch.Generator().manual_seed(seed), scale, width=2)
        posterior = replace(start, solver=replace(start.solver, ridge=drawn))
        if after:
            _ = posterior.samples
        gaps.append(float(posterior.log_evidence()) - truth)
        errors.append(posterior.evidence_error)
    gap, error = torch.tensor(gaps), torch.tensor(errors)
    inside = int((gap.abs() <= student(0.95, 3) * error).sum())
    assert inside >= 0.9 * seeds - 3 * math.sqrt(seeds * 0.9 * 0.1)
    assert float(gap.abs().min()) > 0
    assert float(gap.std()) > 1e-3
    assert float(error.mean()) <= 3 * float(gap.square().mean().sqrt())


@pytest.mark.parametrize(("kind", "prior"), [*zip(KINDS, PRIORS, strict=True)])
def test_the_evidence_is_that_of_full_where_the_basis_has_seen_it_all(kind: str, prior: str) -> None:
    p = problem(kind)
    posterior = p.fit(lw.Sampled(num_samples=8, tolerance=1e-10, steps=40), prior)
    _ = posterior.posterior.samples
    exact = p.exact.evidence(p.precision(prior), p.phi)
    assert_close(posterior.log_evidence(), exact, 0.4)
    assert posterior.evidence_error <= 1e-6 * abs(float(exact))


def test_a_prior_mean_enters_the_evidence_alone() -> None:
    p = problem()
    options = {"method": lw.Sampled(num_samples=8, steps=40), "prior": lw.isotropic(0.7, mean=0.4)}
    posterior = lw.fit(p.case.build(), p.data, lw.Gaussian(noise_std=0.7), **options)
    assert_close(posterior.log_evidence(), p.exact.evidence(p.precision("isotropic"), p.phi, 0.4), 0.4)
    assert torch.equal(posterior.posterior.samples, p.fit(options["method"]).posterior.samples)


def slope(of: Callable[[float], float], step: float = 1e-4) -> float:
    return (of(-2 * step) - 8 * of(-step) + 8 * of(step) - of(2 * step)) / (12 * step)


@pytest.mark.parametrize("prior", ["isotropic", "g"])
def test_the_gradient_of_the_evidence_equals_finite_differences(prior: str) -> None:
    """Of the estimate itself, in the precision and in the noise."""
    make = lw.priors.g_prior if prior == "g" else lw.isotropic
    start = on_larger(lw.Sampled(num_samples=2, width=2, probes=3, steps=6), make(0.5), std=None).posterior

    def at(precision: Tensor, phi: Tensor) -> Tensor:
        changed = start.problem.with_prior(start.problem.prior.with_precision(precision.exp()))
        return start.with_problem(changed).with_noise(phi.exp()).log_evidence()

    a, b = torch.tensor(-0.7, dtype=D).requires_grad_(), torch.tensor(-1.5, dtype=D).requires_grad_()
    at(a, b).backward()
    with torch.no_grad():
        assert float(a.grad) == pytest.approx(slope(lambda t: float(at(a + t, b))), rel=1e-7)
        assert float(b.grad) == pytest.approx(slope(lambda t: float(at(a, b + t))), rel=1e-7)


def test_the_evidence_has_no_slope_in_groups() -> None:
    """Its value it has; a tuner that would need the slope is refused and not led astray."""
    posterior = on_larger(lw.Sampled(num_samples=2), lw.per_layer(1.0))
    assert float(posterior.log_evidence()) < 0
    with pytest.raises(lw.errors.UnsupportedError, match=r"no gradient in the precisions of PerLayer.*SampleEM\(\)"):
        posterior.tuned()
    given = lw.per_layer(torch.ones(2, dtype=D, requires_grad=True))
    with torch.no_grad():
        assert float(posterior.with_prior(given).log_evidence()) == pytest.approx(
            float(posterior.log_evidence()), rel=1e-12
        )


@pytest.mark.parametrize("noise", [False, True], ids=["noise kept", "noise learned"])
@pytest.mark.parametrize("prior", ["isotropic", "g"])
def test_maximise_evidence_lands_near_full(prior: str, noise: bool) -> None:
    """With a basis that does not see it all."""
    make = {"isotropic": lambda: None, "g": lambda: lw.priors.g_prior(0.1)}[prior]
    tuner = lw.tuners.MaximiseEvidence(noise=noise)
    posterior, full = (
        on_larger(method, make(), std=None, tuner=tuner) for method in (lw.Sampled(width=4, probes=32), lw.Full())
    )
    assert float(posterior.prior.values) == pytest.approx(float(full.prior.values), rel=0.1)
    assert float(posterior.likelihood.dispersion) == pytest.approx(float(full.likelihood.dispersion), rel=0.05)
    assert float(posterior.log_evidence()) == pytest.approx(
        float(full.log_evidence()), abs=3 * posterior.evidence_error
    )
    assert posterior.evidence_error > 1e-3
    assert posterior.trace.tuner == "MaximiseEvidence"
    assert posterior.posterior.samples.shape == (16, 56)


def test_the_evidence_of_groups_is_as_sharp_as_that_of_one_number() -> None:
    """The same prior in other words: the basis is grown for it too, and remembered."""
    method = lw.Sampled(num_samples=4, width=8)
    one, other = (on_larger(method, given) for given in (1.0, lw.per_layer(torch.ones(2))))
    assert float(other.log_evidence()) == pytest.approx(float(one.log_evidence()), abs=1e-6)
    assert other.evidence_error == pytest.approx(one.evidence_error, abs=1e-6)
    ridge = other.posterior.solver.ridge.rescale(other.prior.vector.detach())
    products = ridge.basis.products
    other.log_evidence()
    assert other.posterior.solver.ridge.rescale(other.prior.vector.detach()) is ridge
    assert ridge.basis.products == products


# Settings of Sampled that cannot be meant, refused before anything is computed.


def test_memory_that_holds_no_solve_is_refused() -> None:
    data = [(torch.randn(8, 30), torch.randn(8, 2))]
    needs = lw.Sampled().needs(62, 16)
    fit = lambda memory: lw.fit(nn.Linear(30, 2), data, "regression", method=lw.Sampled(memory=memory), prior=1.0)
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"16 samples of 62 weights needs \d+ MiB; memory is \d+ MiB. Raise it"
    ):
        fit(needs - 1)
    fit(needs)


# Sampled with each of its solvers: the same noise gives the same samples.

CPU = torch.device("cpu")
SAMPLED_SOLVERS_PRIORS = {"isotropic": lambda: lw.isotropic(9.0), "g": lambda: lw.priors.g_prior(2.0)}


def sampled_solvers_problem(seed: int = 0) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A network and eleven data in batches of five, five and one."""
    torch.manual_seed(seed)
    x = torch.randn(11, 3, dtype=D)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    return net, list(zip(x.split(5), y.split(5), strict=True))


def sampled_solvers_fitted(method: Any, prior: Any) -> Any:
    net, data = sampled_solvers_problem()
    return lw.fit(net, data, lw.Gaussian(noise_std=0.5), method=method, prior=prior, tuner=None, progress=False)


def samples(method: Any, prior: Any) -> torch.Tensor:
    return sampled_solvers_fitted(method, prior).posterior.samples


@pytest.mark.parametrize("kind", SAMPLED_SOLVERS_PRIORS)
@pytest.mark.parametrize(
    "settings",
    [
        {"solver": "cg", "tolerance": 1e-9},
        {"solver": "sdd", "batch": 6, "epochs": 400, "tolerance": 1e-9},
        {"solver": "sgd", "batch": 11, "epochs": 400, "tolerance": 1e-9},
        {"solver": "sgd", "batch": 11, "epochs": 400, "tolerance": 1e-9, "objective": "classic"},
    ],
    ids=lambda s: "-".join(str(v) for v in s.values()),
)
def test_every_solver_gives_the_same_samples(settings: dict[str, Any], kind: str) -> None:
    expected = samples(Sampled(num_samples=3, tolerance=1e-12), SAMPLED_SOLVERS_PRIORS[kind]())
    assert_close(samples(Sampled(num_samples=3, **settings), SAMPLED_SOLVERS_PRIORS[kind]()), expected, SOLVED)


@pytest.mark.parametrize("objective", ["reduced", "classic"])
def test_stochastic_gradients_come_near(objective: str) -> None:
    expected = samples(Sampled(num_samples=3, tolerance=1e-12), lw.isotropic(3.0))
    method = Sampled(num_samples=3, solver="sgd", objective=objective, batch=4, epochs=200, tolerance=5e-2)
    assert float((samples(method, lw.isotropic(3.0)) - expected).norm()) < 0.05 * float(expected.norm())


@pytest.mark.parametrize("solver", ["sgd", "sdd"])
def test_another_precision_moves_the_same_samples(solver: str) -> None:
    """Nearer and nearer to the first ones, as the precision comes near."""
    posterior = sampled_solvers_fitted(
        Sampled(num_samples=3, solver=solver, batch=6, epochs=100, tolerance=0.2), lw.isotropic(3.0)
    )
    first = posterior.posterior.samples
    gaps = []
    for precision in (3.3, 3.03, 3.0):
        prior = posterior.posterior.problem.prior.with_precision(torch.tensor(precision, dtype=D))
        other = posterior.posterior.with_problem(posterior.posterior.problem.with_prior(prior))
        gaps.append(float((other.samples - first).norm()) / float(first.norm()))
    assert gaps[0] < 0.1
    assert gaps[1] < 0.2 * gaps[0]
    assert gaps[2] == 0


@pytest.mark.parametrize("solver", ["sgd", "sdd"])
def test_a_residual_above_the_tolerance_is_an_error(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.linalg.ridge.LEADING_VECTORS", 1)
    method = Sampled(num_samples=3, solver=solver, epochs=2, tolerance=1e-9, batch=4)
    with pytest.raises(NumericalError, match=rf"Sampled\(solver='{solver}'\) stopped after 6 .* Raise epochs="):
        sampled_solvers_fitted(method, lw.isotropic(3.0))


@pytest.mark.parametrize("solver", ["sgd", "sdd"])
def test_priors_by_groups_are_refused(solver: str) -> None:
    method = Sampled(num_samples=3, solver=solver)
    with pytest.raises(UnsupportedError, match=f"'{solver}' with the prior PerLayer.*'krylov' or 'cg'"):
        sampled_solvers_fitted(method, lw.per_layer(2.0))
    posterior = sampled_solvers_fitted(method, lw.isotropic(3.0)).posterior
    grouped = sampled_solvers_fitted(Sampled(num_samples=3), lw.per_layer(2.0)).posterior.problem.prior
    with pytest.raises(UnsupportedError, match="'krylov' or 'cg'"):
        _ = posterior.with_problem(posterior.problem.with_prior(grouped)).samples


def test_data_noise_is_kept_only_where_it_is_needed() -> None:
    kept = [sampled_solvers_fitted(Sampled(num_samples=3, solver=solver), lw.isotropic(3.0)).posterior.solver.ridge.eps
            for solver in ("krylov", "cg", "sdd")]  # fmt: skip
    assert kept[0] is kept[1] is None
    assert kept[2].shape == (3, 22)


@pytest.mark.parametrize("cache", [None, 0], ids=["held", "streamed"])
@pytest.mark.parametrize("part", [1, 2, 3, 100])
def test_a_design_in_parts_is_the_same_design(part: int, cache: int | None) -> None:
    net, data = sampled_solvers_problem()
    network = Network.build(net, data[0][0])
    whole = NetworkDesign.build(network, lw.Gaussian(noise_std=0.5), Data(data, CPU))
    parts = NetworkDesign.build(network, lw.Gaussian(noise_std=0.5), Data(data, CPU), cache=cache, part=part)
    assert parts.streamed == (cache == 0)
    sizes = [each.rows for each in parts]
    assert sum(sizes) == parts.rows == whole.rows == 22
    assert max(sizes) <= 2 * part  # of two outputs
    assert len(sizes) == -(-11 // min(part, 11))
    assert sizes == [each.rows for each in parts]
    v = torch.randn(2, parts.size, dtype=D)
    assert_close(forward_product(parts, v), forward_product(whole, v))
    assert parts.statistics.data == whole.statistics.data
    assert parts.statistics.loss == pytest.approx(whole.statistics.loss)


@pytest.mark.parametrize("solver", ["sgd", "sdd"])
def test_parts_may_be_streamed(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = samples(Sampled(num_samples=3, tolerance=1e-12), lw.isotropic(3.0))
    monkeypatch.setattr("lapwing.tangent.CACHE_SHARE", 0)
    method = Sampled(num_samples=3, solver=solver, batch=6, epochs=60, tolerance=0.2)
    posterior = sampled_solvers_fitted(method, lw.isotropic(3.0)).posterior
    assert posterior.solver.ridge.design.streamed
    assert float((posterior.samples - expected).norm()) < 0.2 * float(expected.norm())


@pytest.fixture(scope="module", params=[torch.float32, D], ids=str)
def sampled_solvers_trained(request: Any) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A trained network of 31 weights and 60 rows, whose curvature is 1e5 times the prior precision and more."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 60, dtype=request.param)[:, None]
    y = (2 * x).sin() + 0.1 * torch.randn(60, 1, dtype=request.param)
    net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).to(request.param)
    optimiser = torch.optim.LBFGS(net.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = nn.functional.mse_loss(net(x), y) + 1e-4 * sum(p.square().sum() for p in net.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    return net.eval(), x, y


@pytest.mark.parametrize(("solver", "task"), [("sdd", "regression"), ("sgd", "classification")])
def test_default_settings_converge(
    solver: str, task: str, sampled_solvers_trained: tuple[nn.Module, torch.Tensor, torch.Tensor]
) -> None:
    """Learned and weak priors; the samples are those of a solve to full precision, within their stated error."""
    net, x, y = sampled_solvers_trained
    if task == "classification":
        net, y = nn.Sequential(net, nn.Linear(1, 3).to(x)).eval(), (3 * x[:, 0].sigmoid()).long()
    learned = lw.fit(net, [(x, y)], task, method=Sampled(solver=solver))
    assert bool(learned.functions(x).variance.isfinite().all())
    for precision in (1e-2, 1.0):
        one = lw.fit(net, [(x, y)], task, method=Sampled(solver=solver), prior=precision).posterior
        assert one.solution.converged
        if x.dtype != D:  # a reference to full precision needs float64
            continue
        other = lw.fit(net, [(x, y)], task, method=Sampled(tolerance=1e-4), prior=precision).posterior
        gap = one.samples - other.samples
        product = other.solver.ridge.product(gap) / float(one.problem.likelihood.dispersion) + precision * gap
        sizes = one.solver.ridge.prior.norm(dim=1)
        assert bool(((gap * product).sum(1).sqrt() < 0.011 * sizes).all())  # eᵀ Λ e ≤ (tolerance |ζ|)²


def test_variances_by_descent_are_those_of_the_exact_posterior(generator: torch.Generator) -> None:
    """Within the error of 256 draws, for a network with more weights than are solved for directly."""
    x = torch.randn(100, 3, dtype=D, generator=generator)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    net = nn.Sequential(nn.Linear(3, 60), nn.Tanh(), nn.Linear(60, 2)).double().eval()
    methods = lw.Full(), Sampled(num_samples=256, solver="sgd"), Sampled(num_samples=256, solver="sdd")
    likelihood, prior = lw.Gaussian(noise_std=0.1), lw.isotropic(0.1)
    exact, *others = (
        lw.fit(net, [(x, y)], likelihood, method=method, prior=prior).functions(x).variance for method in methods
    )
    for variance in others:
        assert float(((variance / exact - 1) / (2 / 256) ** 0.5).square().mean().sqrt()) < 1.5


# Variances of float32 networks are those of float64 over many scales, or the posterior says that they may not be.

SCALES_PRIORS, NOISES = (1e-4, 1.0, 1e6), (1e-4, 1e-2, 1e2)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("network", ["tanh", "relu", "norm, few"])
@pytest.mark.parametrize("method", methods())
def test_within_one_percent_of_float64(method: str, network: str, scale: float) -> None:
    row = measured(method, network, scale, SCALES_PRIORS, NOISES)
    assert row.worst < LIMIT
    assert row.remarked <= 2 or scale > 1
    assert method != "Diagonal" or row.remarked == 0


@pytest.mark.parametrize("method", [name for name in methods() if name != "Diagonal"])
def test_a_prior_beyond_the_digits_of_the_network_is_a_finding(method: str) -> None:
    row = measured(method, "relu", 1e3, (1e-4,), (1e-4,))
    assert row.remarked == 1


def linear(dtype: torch.dtype, **options: Any) -> lw.Fitted:
    x = torch.linspace(-1, 1, 20, dtype=dtype).unsqueeze(1)
    torch.manual_seed(0)
    return lw.fit(nn.Linear(1, 1).to(dtype), [(x, x)], lw.Gaussian(noise_std=1e-5), **options)


def test_the_finding_names_the_remedy_and_is_in_the_summary() -> None:
    fitted = linear(torch.float32, prior=1e-3)
    (finding,) = fitted.findings
    assert "model.double()" in finding
    assert "float32" in finding
    assert f"Note: {finding}" in fitted.summary()
    assert linear(torch.float64, prior=1e-3).findings == ()
    assert fitted.with_prior(1.0).findings == ()


def test_weights_on_their_own_lose_no_digits() -> None:
    assert linear(torch.float32, prior=1e-3, method=lw.Diagonal()).findings == ()


# Networks in bfloat16: Jacobians in its digits, sums in wider ones, and a finding where the digits are too few.

EPS = torch.finfo(torch.bfloat16).eps


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    run = lambda m, t: m.head(m.layer(m.table(t)).mean(1))
    return Wrapped(run, table=nn.Embedding(11, 8), layer=layer, head=nn.Linear(8, 3)).eval()


def pair(build: Any, x: Tensor, method: Any, **options: Any) -> tuple[lw.Fitted, lw.Fitted]:
    """The posterior of a network in bfloat16, and that of the same weights and inputs in float32."""
    torch.manual_seed(0)
    narrow = build().to(torch.bfloat16)
    wide, y = copy.deepcopy(narrow).float(), torch.arange(len(x)) % 3
    cast = lambda dtype: x.to(torch.bfloat16).to(dtype) if x.is_floating_point() else x
    fit = lambda model, dtype: lw.fit(model, [(cast(dtype), y)], "classification", method=method, **options)
    return fit(narrow, torch.bfloat16), fit(wide, torch.float32)


@pytest.mark.parametrize("method", [lw.Kron(), lw.EKron(), lw.Diagonal(), lw.Full()])
def test_variances_are_those_of_float32_up_to_the_digits(method: Any, tmp_path: Path) -> None:
    """A few products and sums in a row, each rounded: four units of rounding."""
    tokens = torch.randint(0, 11, (24, 5), generator=torch.Generator().manual_seed(1))
    narrow, wide = pair(transformer, tokens, method, prior=1.0)
    variance = wide.functions(tokens).variance
    assert narrow.functions(tokens).variance.dtype == torch.float32
    assert_near(narrow.functions(tokens).variance, variance, 4 * EPS * float(variance.max()))
    assert_near(narrow.predict(tokens).probs, wide.predict(tokens).probs, 4 * EPS)
    assert bool(torch.isfinite(narrow.function_samples(tokens, 3)).all())
    narrow.save(tmp_path / "net")
    again = lw.load(tmp_path / "net", narrow.network.model)
    assert_near(again.functions(tokens).variance, narrow.functions(tokens).variance, 1e-5 * float(variance.max()))


def test_a_posterior_beyond_the_digits_has_a_finding() -> None:
    """At 40 data the trace of H in units of the prior is between what bfloat16 and float32 carry."""
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    build = lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    narrow, wide = pair(build, x, lw.Kron(), prior=1e-3)
    assert 1e4 < wide.base.condition < 1e8
    assert wide.findings == ()
    assert "a network in bfloat16 carries 2e+02" in narrow.findings[0]
    assert "model.float()" in narrow.findings[0]
    assert pair(build, x, lw.Kron(), prior=100.0)[0].findings == ()
