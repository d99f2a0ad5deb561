"""The exact route: class matrices, evidence and covariance against dense matrices."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.inverse.priors import class_covariance
from lapwing.linalg.operators import OperatorDesign
from lapwing.networks.selection import Selection
from tests.references import inverse as dense
from tests.tolerances import SOLVED, assert_close, assert_within
from tests.unit.inverse.problems import BLOCKS, DX, DY, NAMES, NOISE, SHAPE, VALUES, D, case, fitted, seed


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
    assert repr(posterior).startswith("InversePosterior(image (2, 4, 5), 17 measurements")
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
    expected = dense.slope(lambda t: one.evidence(t[:-1].exp(), float(t[-1].exp())), x)
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
    assert_close(gradient, dense.slope(lambda t: one.evidence(t.exp()), x), SOLVED, dtype=torch.float32)


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


def test_blocks_of_the_case_are_those_of_the_reference() -> None:
    sizes = [tuple(dict(case().model.named_parameters())[name].shape) for name in NAMES]
    prior = class_covariance(lw.priors.filter_gp(blocks=BLOCKS), Selection(NAMES, tuple(sizes)), torch.empty(0))
    assert prior.names == (
        "first.variance", "first.length_scale", "middle.variance", "middle.length_scale", "points.variance",
    )  # fmt: skip
