"""Samples of the full posterior: dense solves of the same noise, Monte Carlo, evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.linalg.operators import back_product
from lapwing.linalg.ridge import Ridge
from tests import problems
from tests.cases import BY_NAME, CASES, Case
from tests.references import dense, ridge
from tests.tolerances import SOLVED, assert_close, assert_within
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("count", "width"), [(3, 16), (7, 4), (60, 16)])
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


@pytest.mark.parametrize("prior", [lw.isotropic(0.5), lw.per_layer(0.5)], ids=["isotropic", "per_layer"])
def test_samples_of_2935_weights(prior: Any) -> None:
    """By a basis, and by conjugate gradients."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 27), nn.Tanh(), nn.Linear(27, 1)).double()
    x, y = torch.randn(150, 20, dtype=D), torch.randn(150, 1, dtype=D)
    method = lw.Sampled(num_samples=1, tolerance=1e-12)
    start = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=0.3), method=method, prior=prior)
    jac = dense.jacobian(model, x, 150).flatten(0, 1)
    zeta, eps = noise(jac, 6)
    assert jac.shape == (150, 2935)
    expected = ridge.draws(jac, zeta, eps, torch.full((2935,), 0.5, dtype=D), 0.09)
    gap = with_noise(start, zeta, eps).posterior.samples - expected
    assert float(gap.abs().max()) <= 1e-8 * float(expected.abs().max())


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
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
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
def test_many_samples_have_the_covariance_of_full(prior: str) -> None:
    """Within and across inputs, and in the evidence's own γ."""
    p = problem("categorical")
    many, full = p.fit(lw.Sampled(num_samples=3000, tolerance=1e-6), prior), p.fit(lw.Full(), prior)
    inputs = p.case.batch(2, seed=1)
    joint = full.functions(inputs, joint=True)
    gap = (many.function_samples(inputs, 3000) - joint.mean).flatten(1)
    assert_within(gap[:, :, None] * gap[:, None, :], joint.cov.reshape(6, 6))
    centred = gap.mean(0).abs() / (gap.std(0) / 3000**0.5)
    assert float(centred.max()) <= 5
    weights = many.posterior.samples[:, ::20]
    exact = full.posterior.precision.solve(torch.eye(p.x.shape[1], dtype=D))[::20, ::20]
    assert_within(weights[:, :, None] * weights[:, None, :], exact)


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
    posterior = lw.fit(
        case.build(), problems.batches(case), problems.likelihood(case), method=lw.Sampled(num_samples=count), prior=1.5
    )
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


def test_seeds() -> None:
    p = problem("categorical")
    inputs = p.case.batch(2)
    method = lw.Sampled(num_samples=3, steps=2, probes=2)
    gens = (torch.Generator().manual_seed(s) for s in (5, 5, 6))
    one, same, other = (p.fit(method, generator=g) for g in gens)
    assert torch.equal(one.function_samples(inputs, 3), same.function_samples(inputs, 3))
    assert torch.equal(one.log_evidence(), same.log_evidence())
    assert not torch.equal(one.function_samples(inputs, 3), other.function_samples(inputs, 3))
    by_default, again = p.fit(method), p.fit(method)
    assert torch.equal(by_default.weight_samples(3), again.weight_samples(3))
    gen = torch.Generator().manual_seed(1)
    assert torch.equal(one.weight_samples(2, gen), one.weight_samples(3)[:2])  # stored: the generator has no say


def test_samples_that_are_not_there() -> None:
    p = problem()
    posterior = p.fit(lw.Sampled(num_samples=3))
    message = r"4 samples were asked for and 3 are stored; fit with Sampled\(num_samples=\.\.\.\)"
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        posterior.weight_samples(4)
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        posterior.function_samples(p.case.batch(2), 4)
    with pytest.raises(lw.errors.UnsupportedError, match="n is -1; expected at least 1"):
        posterior.weight_samples(-1)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("prior", ["isotropic", "per_layer"])
def test_a_tolerance_out_of_reach_is_an_error(solver: str, prior: str) -> None:
    """Products in float32 and a residual of 1e-14: the residual is told, and no samples are left behind."""
    case = BY_NAME["mlp"]
    data = problems.batches(case, dtype=torch.float32)
    given = lw.isotropic(1e-3) if prior == "isotropic" else lw.per_layer(1e-3)
    method = lw.Sampled(num_samples=3, solver=solver, tolerance=1e-14)
    posterior = lw.fit(case.build(torch.float32), data, "classification", method=method, prior=given)
    for ask in (
        lambda: posterior.functions(case.batch(2, torch.float32)),
        lambda: posterior.weight_samples(1),
        lambda: posterior.posterior.samples,
    ):
        with pytest.raises(lw.errors.NumericalError, match=r"relative residual of \d\S*; expected 1e-14"):
            ask()
    assert "solution" not in posterior.posterior.__dict__


def test_float32_is_near_float64() -> None:
    """The same noise, drawn in float64 for both."""
    case = BY_NAME["cnn"]
    narrow = case.build(torch.float32)
    data = problems.batches(case, dtype=torch.float32)
    wide = [(x.double(), y) for x, y in data]
    method = lw.Sampled(num_samples=6, tolerance=1e-5)
    single, double = (
        lw.fit(model, part, "classification", method=method, prior=0.7)
        for model, part in ((narrow, data), (case.build(torch.float32).double(), wide))
    )
    inputs = case.batch(3, torch.float32, seed=1)
    belief = single.functions(inputs)
    assert belief.cov.dtype == single.posterior.samples.dtype == torch.float32
    assert_close(belief.cov, double.functions(inputs.double()).cov, SOLVED)
    assert_close(single.log_evidence(), double.log_evidence(), SOLVED, dtype=torch.float32)


@pytest.mark.parametrize("prior", PRIORS)
def test_files(prior: str, tmp_path: Path) -> None:
    p = problem("categorical")
    posterior = p.fit(lw.Sampled(num_samples=5, steps=3, probes=3), prior)
    posterior.save(tmp_path / "it")
    again = lw.load(tmp_path / "it", p.case.build())
    inputs = p.case.batch(3, seed=1)
    assert_close(again.functions(inputs).cov, posterior.functions(inputs).cov)
    assert_close(again.functions(inputs, joint=True).cov, posterior.functions(inputs, joint=True).cov)
    assert_close(again.function_samples(inputs, 5), posterior.function_samples(inputs, 5))
    assert torch.equal(again.weight_samples(5), posterior.weight_samples(5))
    assert_close(again.log_evidence(), posterior.log_evidence())
    assert again.evidence_error == posterior.evidence_error
    assert torch.equal(again.posterior.solution.residuals, posterior.posterior.solution.residuals)
    assert again.posterior.solution.iterations == posterior.posterior.solution.iterations


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
    again = solver_of.solved(problem_of, posterior.solution.x)
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
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    model, x, y = larger()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
    with pytest.raises(lw.errors.DataError, match=r"two passes over the data gave different rows.*shuffle=False"):
        lw.fit(model, loader, lw.Gaussian(noise_std=0.3), method=lw.Sampled(solver=solver), prior=1.0)


class Augmented:
    """Other inputs at every pass."""

    def __init__(self, case: Case) -> None:
        self.case, self.gen = case, torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[Any]:
        x = self.case.batch(6)
        yield x + 0.1 * torch.randn(x.shape, dtype=D, generator=self.gen), problems.targets(self.case, 6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_data_that_change_are_refused_before_the_first_iteration(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are held in memory or not; nothing is even drawn."""
    case = BY_NAME["mlp"]
    fit = lambda: lw.fit(
        case.build(), Augmented(case), "classification", method=lw.Sampled(num_samples=2, solver=solver), prior=1.0
    )
    monkeypatch.setattr(Ridge, "drawn", lambda *_, **__: pytest.fail("noise was drawn"))
    with pytest.raises(lw.errors.DataError, match="a second reading of the data gave other rows"):
        fit()
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    with pytest.raises(lw.errors.DataError, match="a second reading of the data gave other rows"):
        fit()


def test_order_does_not_matter_to_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed in another order at every pass: Xᵀ ε is other noise, just as good, and each solve is right."""
    p, gen = problem("categorical"), torch.Generator().manual_seed(3)

    class Shuffled:
        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(6, generator=gen)
            yield p.case.batch(6)[order], targets(p.case, p.kind)[order]

    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    posterior = lw.fit(
        p.case.build(), Shuffled(), "classification", method=lw.Sampled(num_samples=3, tolerance=1e-11), prior=0.7
    ).posterior
    mine, total = posterior.solver.ridge, p.exact.ggn + 0.7 * torch.eye(p.x.shape[1], dtype=D)
    assert_close(posterior.samples, torch.linalg.solve(total, (0.7**0.5 * mine.prior + mine.back).T).T, SOLVED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0; expected at least 1"),
        ({"solver": "lu"}, "solver is 'lu'; expected one of krylov, cg"),
        ({"probes": 1}, "probes is 1; expected at least 2"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        lw.Sampled(**settings)


def test_other_curvatures_are_refused() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="curvature is 'hessian'; expected one of ggn"):
        problem().fit(lw.Sampled(curvature="hessian"))


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_the_model_is_left_as_it_was(name: str) -> None:
    case = BY_NAME[name]
    model = case.build()
    data, inputs = problems.batches(case), case.batch(3, seed=1)
    random = torch.get_rng_state()

    def run() -> None:
        method = lw.Sampled(num_samples=2, steps=2)
        posterior = lw.fit(model, data, problems.likelihood(case), method=method, prior=1.0)
        posterior.functions(inputs, joint=True)
        posterior.function_samples(inputs, 2)
        posterior.network_samples(inputs, 2)
        posterior.log_evidence()

    problems.unchanged(model, run)
    assert torch.equal(torch.get_rng_state(), random)  # nor is the global generator touched


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
