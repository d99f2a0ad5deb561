"""The posterior of a linear inverse problem: dense, matrix-free and tuned."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.inverse_evidence import EVIDENCES, ONE, Signal, former_minus_exact, signal_scores, tuned
from lapwing.inverse.priors import class_covariance
from lapwing.linalg.operators import OperatorDesign
from tests.references import inverse as dense
from tests.references.dense import slope
from tests.tolerances import SOLVED, assert_close, assert_within
from tests.unit.inverse.problems import BLOCKS, DX, DY, NAMES, NOISE, SHAPE, VALUES, D, case, fitted, seed

# The exact route: class matrices, evidence and covariance against dense matrices.


def small_memory() -> Any:
    """A budget in which rows of few weights fit at once: the Jacobian is computed in several groups and chunks."""
    return lw.memory.limited(15_000)


def test_shapes_and_sizes() -> None:
    posterior = fitted()
    assert posterior.solver == "exact"
    assert posterior.problem.network.selection.names == NAMES  # neither biases nor norms
    assert posterior.reconstruction.shape == posterior.std.shape == posterior.variance.shape == SHAPE
    assert posterior.covariance().shape == (DX, DX)
    assert posterior.samples(3, seed()).shape == (3, *SHAPE)
    assert_close(posterior.reconstruction, case().model(case().x)[0])
    assert repr(posterior).startswith("<InversePosterior: image (2, 4, 5), 17 measurements, ")
    assert "log evidence" in posterior.summary()


def operators() -> dict[str, Any]:
    a = case().a
    return {
        "matrix": a,
        "functions": OperatorDesign(DY, DX, lambda v: v @ a.mT, lambda u: u @ a, a[:0, 0]),
        "sparse": a.to_sparse(),
        "entries": lw.inverse.SparseOperator.from_entries(*a.nonzero().unbind(1), a[a != 0], (DY, DX)),
    }


@pytest.mark.parametrize("kind", ["matrix", "functions", "sparse", "entries"])
@pytest.mark.parametrize("image", [True, False])
def test_covariance_and_evidence_are_the_dense_ones(kind: str, image: bool) -> None:
    posterior, one = fitted(operator=operators()[kind]), case()
    assert posterior.classes is not None
    assert posterior.classes.image is not None
    if not image:
        posterior = replace(posterior, classes=replace(posterior.classes, image=None))
    assert_close(posterior.covariance(), one.covariance())
    assert_close(posterior.variance.reshape(-1), one.covariance().diagonal())
    assert posterior.variance_error == 0.0
    evidence, expected = posterior.log_evidence(), one.evidence()
    assert abs(float(evidence / expected - 1)) < 1e-10


def test_class_matrices_are_the_same_by_both_ways_and_in_pieces() -> None:
    one = case()
    whole = fitted().classes
    with small_memory():
        posterior = fitted(solver="exact")
        assert posterior.classes is not None
        assert posterior.classes.image is None  # they do not fit
        assert len(list(posterior.problem._groups(DY))) > 3
        rows = torch.cat([rows for _, rows in posterior.problem.rows(posterior.problem.observation, "")], 1)
    assert_close(rows, one.a @ one.jacobian)
    assert whole is not None
    assert_close(posterior.classes.observed, whole.observed)
    coefficients = posterior.prior.coefficients()
    expected = one.a @ one.jacobian @ one.sigma() @ one.jacobian.mT @ one.a.mT + NOISE * torch.eye(DY, dtype=D)
    assert_close(posterior.classes.covariance(coefficients, posterior.noise_variance), expected)
    assert len(coefficients) == 6 + 6 + 1


def test_the_identity_is_the_default_operator() -> None:
    """Regression of the outputs themselves."""
    one = case()
    y = torch.randn(DX, dtype=D, generator=seed(8))
    posterior = fitted(operator=None, y=y)
    eye = torch.eye(DX, dtype=D)
    assert_close(posterior.covariance(), dense.posterior_covariance(one.jacobian, one.sigma(), eye, NOISE))
    expected = dense.log_evidence(y, one.f, one.theta, one.jacobian, one.sigma(), eye, NOISE)
    assert abs(float(posterior.log_evidence() / expected - 1)) < 1e-10


def test_gradients_of_the_evidence_are_differences() -> None:
    posterior, one = fitted(), case()

    def at(x: Tensor) -> Tensor:
        changed = posterior.with_problem(posterior.problem.with_precisions(x[:-1].exp()))
        return changed.with_noise(x[-1].exp()).log_evidence()

    x = torch.tensor([*VALUES, NOISE], dtype=D).log().requires_grad_()
    (gradient,) = torch.autograd.grad(at(x), x)
    expected = slope(lambda t: one.evidence(t[:-1].exp(), float(t[-1].exp())), x)
    assert_close(gradient, expected, SOLVED)


@pytest.mark.parametrize("prior", [lw.isotropic(0.8), 0.8, lw.per_layer(torch.linspace(0.5, 2.0, 5)),
                                   lw.grouped({"inc.*": 3.0, "body.*|wide.*": 0.4, "skip.*|out.*": 1.0})])  # fmt: skip
def test_ordinary_priors_serve_too(prior: Any) -> None:
    one = case()
    posterior = fitted(prior=prior)
    sigma = torch.diag(1 / posterior.prior.vector)  # type: ignore[attr-defined]
    assert_close(posterior.covariance(), dense.posterior_covariance(one.jacobian, sigma, one.a, NOISE))
    expected = dense.log_evidence(one.y, one.f, one.theta, one.jacobian, sigma, one.a, NOISE)
    assert abs(float(posterior.log_evidence() / expected - 1)) < 1e-10


def test_at_the_optimum_of_a_linear_model_the_evidence_is_the_density_of_y() -> None:
    """With every constant, and with a prior mean that is not zero."""
    net = nn.Conv1d(2, 3, 3, padding=1, bias=False).double()
    x, a = torch.randn(1, 2, 5, dtype=D, generator=seed(4)), torch.randn(7, 15, dtype=D, generator=seed(5))
    j = a @ dense.jacobian(net, x, ("weight",))
    y, precision, noise, mean = torch.randn(7, dtype=D, generator=seed(6)), 1.7, 0.2, 0.3
    centre = torch.full((18,), mean, dtype=D)
    step = torch.linalg.solve(j.mT @ j / noise + precision * torch.eye(18, dtype=D), j.mT @ (y - j @ centre) / noise)
    net.weight.data = (centre + step).reshape(3, 2, 3)
    posterior = lw.inverse.fit(net, x, y, a, prior=lw.isotropic(precision, mean), noise_std=noise**0.5)
    kernel = j @ j.mT / precision + noise * torch.eye(7, dtype=D)
    expected = torch.distributions.MultivariateNormal(j @ centre, kernel).log_prob(y)
    assert abs(float(posterior.log_evidence() / expected - 1)) < 1e-10


@pytest.mark.parametrize("solver", ["exact", "cg"])
def test_the_evidence_away_from_the_optimum_and_with_a_prior_mean(solver: str) -> None:
    """The residual at the trained weights and their distance from the mean would give another number."""
    one, mean = case(), torch.linspace(-0.5, 0.4, len(case().theta), dtype=D)
    posterior = fitted(prior=lw.isotropic(0.8, mean), solver=solver)
    sigma = torch.eye(len(mean), dtype=D) / 0.8
    expected = dense.log_evidence(one.y, one.f, one.theta, one.jacobian, sigma, one.a, NOISE, mean)
    assert_close(posterior.log_evidence(), expected)
    former = dense.former_evidence(one.y, one.f, one.theta, one.jacobian, one.sigma(), one.a, NOISE)
    assert abs(float(one.evidence() - former)) > 1  # the trained weights of the case are not the optimum
    centred = posterior.with_prior(lw.isotropic(0.8))
    expected = dense.log_evidence(one.y, one.f, one.theta, one.jacobian, sigma, one.a, NOISE)
    assert_close(centred.log_evidence(), expected)


@pytest.mark.parametrize("solver", ["exact", "cg"])
def test_the_tangent_mean_is_the_optimum_of_the_tangent_model(solver: str) -> None:
    """Solved for in the weights; the reconstruction stays the output of the network."""
    one, mean = case(), 0.2
    posterior = fitted(prior=lw.isotropic(0.8, mean), solver=solver)
    aj = one.a @ one.jacobian
    precision = aj.mT @ aj / NOISE + 0.8 * torch.eye(len(one.theta), dtype=D)
    target = aj.mT @ (one.residual + aj @ one.theta) / NOISE + torch.full_like(one.theta, 0.8 * mean)
    image = one.f + one.jacobian @ (torch.linalg.solve(precision, target) - one.theta)
    assert_close(posterior.tangent_mean.reshape(-1), image, SOLVED if solver == "exact" else 0.4)
    assert_close(posterior.reconstruction.reshape(-1), one.f)


def test_class_variances_add_up_to_those_of_differences() -> None:
    one = case()
    pairs = torch.tensor([[0, 1], [3, 8], [20, 39], [5, 5]])
    j = one.jacobian[pairs[:, 0]] - one.jacobian[pairs[:, 1]]
    expected = (j @ one.sigma() * j).sum(1)
    posterior = fitted()
    assert posterior.classes is not None
    from_rows = replace(posterior, classes=replace(posterior.classes, image=None)).class_variances(pairs)
    assert_close(posterior.prior.coefficients() @ from_rows, expected)
    assert_close(posterior.class_variances(pairs), from_rows)


def test_samples_have_the_covariance() -> None:
    posterior, one = fitted(), case()
    for way in (posterior, replace(posterior, classes=replace(posterior.classes, image=None))):  # type: ignore[type-var]
        gaps = (way.samples(4000, seed(7)) - posterior.reconstruction).flatten(1)
        few = torch.arange(0, DX, 6)
        assert_within(gaps[:, few, None] * gaps[:, None, few], one.covariance()[few][:, few])
        assert_within(gaps.square(), one.covariance().diagonal())
    draws = (posterior.prior_samples(4000, seed(9)) - posterior.reconstruction).flatten(1)
    assert_within(draws.square(), (one.jacobian @ one.sigma() @ one.jacobian.mT).diagonal())


def test_samples_do_not_depend_on_the_memory() -> None:
    posterior = fitted()
    expected = posterior.samples(7, seed(1))
    with lw.memory.limited(30_000):
        assert_close(posterior.samples(7, seed(1)), expected)


def test_solves_state_their_residual() -> None:
    solution = fitted().solve(torch.randn(3, DY, dtype=D, generator=seed(4)))
    assert solution.x.shape == (3, DY)
    assert float(solution.residuals.max()) < 1e-12


def test_float32_networks_are_computed_in_float64() -> None:
    one = case()
    small = copy.deepcopy(one.model).float()
    posterior = fitted(model=small, x=one.x.float(), y=one.y.float())
    assert posterior.reconstruction.dtype == D
    assert_close(posterior.covariance(), one.covariance(), dtype=torch.float32)


def test_large_problems_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    one = case()
    monkeypatch.setattr("lapwing.inverse.posterior.DOUBLE", 1)
    posterior = fitted(model=copy.deepcopy(one.model).float(), x=one.x.float())
    assert posterior.reconstruction.dtype == torch.float32
    assert posterior.classes is not None
    assert posterior.classes.observed.dtype == D
    assert posterior.covariance().dtype == D
    assert_close(posterior.covariance(), one.covariance(), SOLVED, dtype=torch.float32)
    assert_close(posterior.log_evidence(), one.evidence(), SOLVED, dtype=torch.float32)

    def at(x: Tensor) -> Tensor:
        return posterior.with_problem(posterior.problem.with_precisions(x.exp())).log_evidence()

    x = torch.tensor(VALUES, dtype=D).log().requires_grad_()
    (gradient,) = torch.autograd.grad(at(x), x)
    assert_close(gradient, slope(lambda t: one.evidence(t.exp()), x), SOLVED, dtype=torch.float32)


@pytest.mark.parametrize("image", [True, False])
def test_rounding_of_a_float32_network_does_not_hide_the_noise(image: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More measurements than weights of rank, so that the smallest eigenvalues of the covariance are the noise."""
    monkeypatch.setattr("lapwing.inverse.posterior.DOUBLE", 1)
    monkeypatch.setattr("lapwing.inverse.posterior.PIXELS", 4 if image else 0)
    one, mix = case(), torch.randn(31, DY, dtype=D, generator=torch.Generator().manual_seed(1))
    small, matrix = copy.deepcopy(one.model).float(), (mix @ one.a).float()
    probe = fitted(model=small, x=one.x.float(), y=mix @ one.y, operator=matrix)
    assert probe.classes is not None
    scale = float(probe.classes.covariance(probe.prior.coefficients(), torch.zeros((), dtype=D)).diagonal().max())
    posterior = fitted(model=small, x=one.x.float(), y=mix @ one.y, operator=matrix, noise_std=1e-5 * scale**0.5)
    assert posterior.belief.has_image_matrices == image
    assert bool(torch.isfinite(posterior.log_evidence()))


def test_an_operator_that_is_a_module_is_not_changed() -> None:
    class Blur(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("matrix", case().a.float())
            self.rows, self.size = self.matrix.shape

        @property
        def like(self) -> Tensor:
            return self.matrix[:0, 0]

        def forward(self, v: Tensor) -> Tensor:
            return v @ self.matrix.mT

        def back(self, u: Tensor) -> Tensor:
            return u @ self.matrix

    operator = Blur()
    posterior = fitted(operator=operator)
    assert operator.matrix.dtype == torch.float32
    assert_close(posterior.covariance(), case().covariance(), dtype=torch.float32)


def test_half_precision_becomes_float32_or_more() -> None:
    one = case()
    posterior = fitted(model=copy.deepcopy(one.model).bfloat16(), x=one.x.bfloat16())
    assert posterior.std.dtype == D
    assert bool(torch.isfinite(posterior.std).all())


def test_several_inputs_are_flattened_together() -> None:
    one = case()
    x = torch.randn(3, 1, 4, 5, dtype=D, generator=seed(4))
    a, y = torch.randn(6, 3 * DX, dtype=D, generator=seed(5)), torch.randn(6, dtype=D, generator=seed(6))
    posterior = fitted(x=x, y=y, operator=a)
    assert posterior.std.shape == (3, *SHAPE)
    j = dense.jacobian(one.model, x, NAMES)
    assert_close(posterior.covariance(), dense.posterior_covariance(j, one.sigma(), a, NOISE))


def test_vectors_and_other_outputs_work() -> None:
    """A perceptron with outputs (B, C), all weights, biases included."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x, a = torch.randn(2, 3, dtype=D, generator=seed(1)), torch.randn(6, 8, dtype=D, generator=seed(2))
    y = torch.randn(6, dtype=D, generator=seed(3))
    posterior = lw.inverse.fit(net, x, y, a, prior=lw.priors.filter_gp(variance=0.7), noise_std=0.5)
    names = tuple(name for name, _ in net.named_parameters())
    assert posterior.problem.network.selection.names == names
    assert posterior.prior.values.tolist() == [0.7] * 4
    sigma = 0.7 * torch.eye(44, dtype=D)
    expected = dense.posterior_covariance(dense.jacobian(net, x, names), sigma, a, 0.25)
    assert_close(posterior.covariance(), expected)


def test_chosen_weights() -> None:
    one = case()
    posterior = fitted(weights=lw.named(r"inc\.weight"), prior=1.0)
    assert posterior.problem.network.selection.names == ("inc.weight",)
    everything = fitted(weights=lw.all_weights, prior=1.0)
    assert everything.problem.network.selection.size == sum(p.numel() for p in one.model.parameters())


def test_the_model_is_not_changed_and_may_change_later() -> None:
    model = copy.deepcopy(case().model)
    before = copy.deepcopy(model.state_dict())
    posterior = fitted(model=model)
    std = posterior.std.clone()
    samples = posterior.samples(2, seed(1))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    nn.init.zeros_(model.inc.weight)  # type: ignore[union-attr, arg-type]
    again = posterior.with_noise(posterior.noise_variance)
    assert_close(again.std, std)
    assert torch.equal(again.samples(2, seed(1)), samples)


def test_inference_mode_and_no_grad_do_not_matter() -> None:
    expected = fitted().log_evidence()
    with torch.inference_mode():
        posterior = fitted()
        assert_close(posterior.log_evidence(), expected)
        assert posterior.std.shape == SHAPE
    with torch.no_grad():
        assert_close(fitted().log_evidence(), expected)


def test_another_bound_prior_needs_the_same_blocks() -> None:
    posterior = fitted()
    other = replace(posterior.prior, values=posterior.prior.values * 2)  # type: ignore[type-var]
    assert_close(posterior.with_prior(other).covariance(), case().covariance([2 * v for v in VALUES]))
    isotropic = class_covariance(lw.isotropic(), posterior.problem.network.selection, torch.empty(0))
    with pytest.raises(lw.errors.UnsupportedError, match="other blocks"):
        posterior.with_prior(isotropic)


# The matrix-free route: products, solves, samples and the evidence against the exact route and dense matrices.


def random_rows(n: int, size: int, number: int = 0) -> Tensor:
    return torch.randn(n, size, dtype=D, generator=seed(number))


def kernel() -> Tensor:
    one = case()
    return one.a @ one.jacobian @ one.sigma() @ one.jacobian.mT @ one.a.mT


def test_jacobian_products() -> None:
    """Of many vectors at once, in chunks too, and of none."""
    network, one = fitted(solver="cg").problem.network, case()
    v, u = random_rows(3, len(one.theta)), random_rows(5, DX)
    for memory in ("1GB", 5_000):
        with lw.memory.limited(memory):
            assert_close(network.forward(v), v @ one.jacobian.mT)
            assert_close(network.back(u), u @ one.jacobian)
    assert network.forward(v[:0]).shape == (0, DX)
    assert network.back(u[:0]).shape == (0, len(one.theta))
    assert_close(network.theta(), one.theta)


def test_products_with_the_covariance() -> None:
    posterior, u = fitted(solver="cg"), random_rows(4, DY)
    assert posterior.solver == "cg"
    assert_close(posterior.problem.kernel(u), u @ kernel())
    with lw.memory.limited(10_000):
        assert_close(posterior.problem.kernel(u), u @ kernel())
    assert_close(posterior.belief.matrix_free.product(u), u @ kernel() + NOISE * u)


@pytest.mark.parametrize("noise", [NOISE, 1e-4])
def test_solves_reach_their_tolerance(noise: float) -> None:
    posterior = fitted(solver="cg", noise_std=noise**0.5)
    u = random_rows(70, DY, 3)  # more than share one Krylov space
    solution = posterior.solve(u)
    assert float(solution.residuals.max()) <= solution.tolerance == 1e-8
    expected = torch.linalg.solve(kernel() + noise * torch.eye(DY, dtype=D), u.mT).mT
    assert_close(solution.x, expected, 0.4)


def test_a_poor_preconditioner_costs_iterations_and_no_accuracy() -> None:
    posterior = fitted(solver="cg")
    pairs = posterior.belief.matrix_free.pairs
    poor = replace(posterior, pairs=replace(pairs, values=pairs.values[:2] * 300, vectors=pairs.vectors[:2]))
    u = random_rows(3, DY, 3)
    assert poor.solve(u).iterations > posterior.solve(u).iterations
    assert_close(poor.solve(u).x, posterior.solve(u).x, 0.4)


def test_samples_have_the_covariance_of_the_exact_route() -> None:
    posterior = fitted(solver="cg")
    gaps = (posterior.samples(1000, seed(11)) - posterior.reconstruction).flatten(1)
    few = torch.arange(0, DX, 13)
    assert_within(gaps[:, few, None] * gaps[:, None, few], case().covariance()[few][:, few])
    exact = fitted().samples(3, seed(11))
    assert_close(posterior.samples(3, seed(11)), exact, 0.4)  # the same draws, another solver


def test_variances_are_estimates_with_a_stated_error() -> None:
    posterior = fitted(solver="cg")
    assert posterior.variance_error == pytest.approx((2 / 1024) ** 0.5)
    expected = case().covariance().diagonal()
    gap = (posterior.variance.reshape(-1) - expected) / expected
    assert float(gap.abs().max()) < 5 * posterior.variance_error
    assert_close(posterior.std, posterior.variance.sqrt())


def test_the_covariance_is_computed_where_it_fits() -> None:
    posterior = fitted(solver="cg")
    assert_close(posterior.covariance(), case().covariance())
    identity = fitted(solver="cg", operator=None, y=random_rows(1, DX)[0])
    assert_close(identity.covariance(), fitted(operator=None, y=random_rows(1, DX)[0]).covariance())
    with lw.memory.limited(10_000), pytest.raises(lw.errors.UnsupportedError, match=r"40 pixels.*Use samples\(n\)"):
        posterior.covariance()


def test_class_variances_without_matrices() -> None:
    pairs = torch.tensor([[0, 7], [12, 13], [39, 2]])
    with lw.memory.limited(50_000):
        assert_close(fitted(solver="cg").class_variances(pairs), fitted().class_variances(pairs))


def test_the_evidence_is_the_dense_one_with_a_full_preconditioner() -> None:
    """All eigenpairs are in the preconditioner, so that the estimate has no error."""
    posterior = fitted(solver="cg")
    assert_close(posterior.log_evidence(), case().evidence())
    assert posterior.evidence_error < 1e-8


def test_the_evidence_is_near_with_a_partial_preconditioner() -> None:
    posterior = fitted(solver="cg")
    pairs = posterior.belief.matrix_free.pairs
    partial = replace(posterior, pairs=replace(pairs, values=pairs.values[:4], vectors=pairs.vectors[:4]))
    gap = abs(float(partial.log_evidence() - case().evidence()))
    assert 1e-6 < gap < 5 * partial.evidence_error + 1e-6
    assert partial.evidence_error < 0.05 * abs(float(case().evidence()))


def gradient(posterior: Any) -> Tensor:
    x = torch.tensor([*VALUES, NOISE], dtype=D).log().requires_grad_()
    changed = posterior.with_problem(posterior.problem.with_precisions(x[:-1].exp()))
    return torch.autograd.grad(changed.with_noise(x[-1].exp()).log_evidence(), x)[0]


def test_value_and_gradient_of_the_evidence_with_a_basis_as_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.inverse.belief.PROBES", DY)
    posterior = fitted(solver="cg")
    pairs = posterior.belief.matrix_free.pairs
    partial = replace(posterior, pairs=replace(pairs, values=pairs.values[:4], vectors=pairs.vectors[:4]))
    assert partial.evidence_error == 0.0
    assert_close(partial.log_evidence(), case().evidence())
    assert_close(gradient(partial), gradient(fitted()), 0.4)


def test_gradients_from_random_probes_have_no_bias() -> None:
    posterior = fitted(solver="cg")
    posterior = replace(posterior, pairs=posterior.belief.matrix_free.pairs)
    draws = torch.stack([gradient(replace(posterior, seed=number)) for number in range(20)])
    assert_within(draws, gradient(fitted()))


def test_the_route_is_chosen_by_memory() -> None:
    assert fitted(solver="auto").solver == "exact"
    with lw.memory.limited(8 * 13 * DY**2 - 1):
        assert fitted(solver="auto").solver == "cg"
    with lw.memory.limited(8 * 13 * DY**2):
        posterior = fitted(solver="auto")
        assert posterior.solver == "exact"
        assert posterior.classes is not None
        assert posterior.classes.image is None


def test_few_measurements_do_not_ask_for_matrices_of_the_image() -> None:
    one = case()
    posterior = fitted(operator=one.a[:7], y=one.y[:7])
    assert posterior.classes is not None
    assert posterior.classes.image is None
    assert posterior.variance_error == 0.0
    assert_close(posterior.variance.reshape(-1), posterior.covariance().diagonal())


def test_too_many_class_matrices_are_refused_if_they_are_asked_for() -> None:
    one = case()
    y = torch.randn(2000, dtype=D, generator=seed(1))
    with lw.memory.limited(100_000), pytest.raises(lw.errors.UnsupportedError, match='solver="cg"'):
        lw.inverse.fit(one.model, one.x, y, torch.zeros(2000, DX, dtype=D), solver="exact", noise_std=1.0)


def test_float32_products() -> None:
    one = case()
    posterior = fitted(solver="cg", model=copy.deepcopy(one.model).float(), x=one.x.float())
    posterior = replace(
        posterior, problem=replace(posterior.problem, network=posterior.problem.network.to(torch.float32))
    )
    u = random_rows(3, DY, 3)
    solution = posterior.solve(u)
    assert float(solution.residuals.max()) <= solution.tolerance == 1e-4
    expected = torch.linalg.solve(kernel() + NOISE * torch.eye(DY, dtype=D), u.mT).mT
    assert_close(solution.x, expected, SOLVED, dtype=torch.float32)
    assert posterior.samples(2, seed()).dtype == torch.float32


def test_equal_seeds_give_equal_fits() -> None:
    posterior, again = (fitted(solver="cg", generator=seed(4)) for _ in range(2))
    assert torch.equal(posterior.log_evidence(), again.log_evidence())
    other = fitted(solver="cg", generator=seed(5))
    assert posterior.seed != other.seed
    assert not torch.equal(posterior.log_evidence(), other.log_evidence())


# Learning hyperparameters of inverse problems with the tuners of the library, with and without a hyperprior.


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


# The error bars of small signals are nearer to the errors with the evidence than with that of version 0.2.0.


def test_the_former_evidence_is_the_one_of_the_formula() -> None:
    one = case()
    posterior = fitted()
    former = dense.former_evidence(one.y, one.f, one.theta, one.jacobian, one.sigma(), one.a, NOISE)
    assert_close(posterior.log_evidence() + former_minus_exact(posterior), former, SOLVED)


@pytest.mark.parametrize("prior", [lw.isotropic(10.0), lw.priors.filter_gp(blocks=ONE)])
def test_errors_of_signals_are_nearer_to_their_standard_deviations(prior: Any) -> None:
    """The former makes them half as large; signals of a network of the same kind, with the noise known."""
    rows: dict[str, list[dict[str, float]]] = {evidence: [] for evidence in EVIDENCES}
    for number in range(3):
        start, truth = Signal(steps=150).fitted(number, prior, 0.1)
        for evidence in EVIDENCES:
            rows[evidence].append(signal_scores(tuned(start, evidence), truth))
    z = {evidence: torch.tensor([row["RMS z"] for row in each]).log() for evidence, each in rows.items()}
    assert float(z["exact"].mean().abs()) < 0.4  # a factor of 1.5
    assert float(z["former"].mean()) < -0.6
    assert all(row["NLL"] < old["NLL"] for row, old in zip(rows["exact"], rows["former"], strict=True))
