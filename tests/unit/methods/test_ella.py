"""ELLA, its subspace and the collapsed bound."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.methods import inducing_points as module
from lapwing.methods.inducing_points import Anchors, InducingPoints, SubspaceCurvature, curvature_within, leading_rows
from lapwing.methods.valla import collapsed_bound
from lapwing.networks.network import Network
from lapwing.problem import Problem
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense, inducing
from tests.tolerances import SOLVED, assert_close
from tests.unit.methods.sine import classes, curve, exact
from tests.unit.methods.sine import fitted as collapsed_fitted

# Subspaces of the tangent kernel: how they are found, and what becomes of bad ones.

D = torch.float64
CPU = torch.device("cpu")
MLP = BY_NAME["mlp"]
M = 7


@cache
def network() -> Network:
    return Network.build(MLP.build(), MLP.batch(M))


def prior(kind: str = "per_layer") -> Any:
    given = lw.per_layer(torch.tensor([0.3, 1.0, 4.0], dtype=D)) if kind == "per_layer" else lw.isotropic(0.7)
    return given.bound(network().selection, network().theta())


def anchors(index: list[int] | None = None) -> tuple[Anchors, Tensor]:
    """Some landmarks, with their rows (M, P)."""
    chosen = torch.arange(M) if index is None else torch.tensor(index)
    outputs = torch.arange(M) % 3
    jac = dense.jacobian(MLP.build(), MLP.batch(M), M)[torch.arange(M), outputs]
    return Anchors(network(), MLP.batch(M)[chosen], outputs[chosen]), jac[chosen]


def fitted(method: Any, case: str = "mlp", **options: Any) -> lw.Fitted:
    return problems.fit(BY_NAME[case], method, **{"prior": 0.8, **options})


# Directions.


@pytest.mark.parametrize("name", ["mlp", "token_level", "squeezed", "embedding"])
def test_the_curvature_within_is_the_ggns(name: str) -> None:
    case = BY_NAME[name]
    _, ggn = problems.dense_ggn(case, case.build())
    d = torch.randn(5, len(ggn), dtype=D)
    whole = Network.build(case.build(), case.batch(3))
    problem = Problem(whole, problems.likelihood(case), lw.isotropic(1.0).bound(whole.selection, whole.theta()))
    found, statistics = curvature_within(problem, Data(problems.batches(case), CPU), d)
    assert_close(found, d @ ggn @ d.T)
    exact = fitted(lw.Full(), name).posterior.statistics
    assert (statistics.data, statistics.outputs) == (exact.data, exact.outputs)
    assert statistics.loss == pytest.approx(exact.loss, rel=1e-12)


@pytest.mark.parametrize("seed", [0, 3])
def test_landmarks_are_independent_of_data_of_the_same_seed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that made the inputs would order them, and all landmarks would lie at one end."""
    seen: list[Tensor] = []

    def noted(points: Anchors, *rest: Any) -> Tensor:
        seen.append(points.inputs)
        return leading_rows(points, *rest)

    monkeypatch.setattr(module, "leading_rows", noted)
    x = torch.rand(500, 1, dtype=D, generator=torch.Generator().manual_seed(seed))
    given = None if seed == 0 else torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    lw.fit(model, [(x, x)], lw.Gaussian(noise_std=1.0), method=lw.ELLA(20, 3), prior=1.0, generator=given)
    assert float(seen[0].min()) < 0.3
    assert float(seen[0].max()) > 0.7


# What is left out.


@pytest.mark.parametrize("residual", [False, True])
def test_an_input_that_the_landmarks_do_not_see(residual: bool) -> None:
    """Orthogonal to the data: no variance, or with the residual the prior's."""
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.randn(6, 3, dtype=D)
    x[:, 2] = 0
    data = [(x, torch.randn(6, 1, dtype=D))]
    posterior = lw.fit(model, data, lw.Gaussian(noise_std=0.5), method=lw.ELLA(6, 6, residual), prior=4.0)
    new = torch.tensor([[0.0, 0.0, 3.0]], dtype=D)
    expected = torch.tensor([[9 / 4 if residual else 0.0]], dtype=D)
    assert float((posterior.functions(new).variance - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["mlp", "cnn", "token_level"])
def test_the_residual_only_adds(name: str) -> None:
    x = BY_NAME[name].batch(3, seed=1)
    thin, thick = (fitted(lw.ELLA(6, 3, residual), name).functions(x) for residual in (False, True))
    gap = torch.linalg.eigvalsh(thick.cov - thin.cov)
    assert float(gap.min()) >= -1e-12 * float(thick.variance.max())
    assert float(gap.max()) > 1e-3 * float(thick.variance.max())


@pytest.mark.parametrize("residual", [False, True])
def test_more_rank_tells_more(residual: bool) -> None:
    """Within the directions the variance grows towards the exact one; with the residual it starts at the prior's."""
    x = MLP.batch(6)
    exact = fitted(lw.Full()).functions(x).variance
    gaps = [
        float((fitted(lw.ELLA(100, rank, residual)).functions(x).variance - exact).abs().max()) for rank in (1, 5, 18)
    ]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-10


# The same as for every method.


def test_effective_parameters_are_those_of_the_subspace() -> None:
    """γ = Σ a_i (prior variance - posterior variance), both within the directions, layer by layer."""
    posterior = fitted(lw.ELLA(100, 4), prior=lw.per_layer(torch.tensor([0.3, 1.0, 4.0], dtype=D)))
    precision, d = posterior.prior.vector, posterior.posterior.curvature.directions
    _, ggn = problems.dense_ggn(MLP, MLP.build())
    before, after = (inducing.within(d, m) for m in (torch.diag(precision), ggn + torch.diag(precision)))
    each = precision * (before - after).diagonal()
    effective = posterior.effective_parameters()
    assert effective.total == pytest.approx(float(each.sum()), rel=1e-10)
    assert effective.total < 4
    assert list(effective.layers.values()) == pytest.approx(
        [float(p.sum()) for p in each.split([30, 35, 18])], rel=1e-9
    )
    assert_close(effective.by_precision, torch.stack([p.sum() for p in each.split([30, 35, 18])]))


# Refused.


def test_a_prior_that_needs_the_curvature_first() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"a g-prior follows the curvature, which ELLA\(\)"):
        fitted(lw.ELLA(), prior=lw.priors.g_prior())


def test_a_g_prior_afterwards() -> None:
    """From the diagonal within the directions."""
    posterior = fitted(lw.ELLA(100, 100), prior=1.0).with_prior(lw.priors.g_prior(0.5))
    assert_close(posterior.prior.vector, 0.5 * posterior.posterior.curvature.diagonal())
    assert bool(torch.isfinite(posterior.functions(MLP.batch(3)).cov).all())


def test_a_kernel_that_overflows() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x, y = torch.full((3, 2), 1e160, dtype=D), torch.zeros(3, 1, dtype=D)
    with pytest.raises(lw.errors.NumericalError, match="the kernel of the landmarks is not finite"):
        lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.ELLA(), prior=1.0)


def test_a_network_without_slopes() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    x, y = torch.zeros(3, 2, dtype=D), torch.zeros(3, 1, dtype=D)
    with pytest.raises(lw.errors.NumericalError, match="no output depends on the selected weights at any landmark"):
        lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.ELLA(), prior=1.0)


def test_with_the_residual_the_evidence_is_a_bound() -> None:
    """As in VaLLA; without the trace of what is left out a prior that lets it run free would look the best."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(30, 2, dtype=torch.float64)
    data = [(x, x.sum(1, keepdim=True).sin())]
    fit = lambda method: lw.fit(model, data, lw.Gaussian(noise_std=0.2), method=method, prior=0.5)
    full = float(fit(lw.Full()).log_evidence())
    found = [float(fit(lw.ELLA(30, rank, residual=True)).log_evidence()) for rank in (2, 5, 10, 25)]
    assert found == sorted(found)
    assert found[0] < full - 1
    assert found[-1] == pytest.approx(full, abs=1e-6)
    assert float(fit(lw.ELLA(30, 2)).log_evidence()) > found[0]  # the subspace alone has no such term


# Locations learned by L-BFGS on the collapsed bound.


@pytest.mark.parametrize(("count", "start"), [(3, "greedy"), (6, "kmeans"), (3, "random")])
def test_learning_raises_the_bound(count: int, start: str) -> None:
    """The search ends at the same bound from every start, below the evidence."""
    before, after = (
        float(collapsed_fitted(lw.VaLLA(count, start=start, optimiser=way)).log_evidence()) for way in ("none", "lbfgs")
    )
    best = float(collapsed_fitted(lw.VaLLA(count, optimiser="lbfgs")).log_evidence())
    assert before < after <= float(exact().log_evidence())
    assert after == pytest.approx(best, rel=1e-5)


def test_both_ways_of_learning_reach_the_same_bound() -> None:
    """L-BFGS on all data, and Adam on batches."""
    count = 3
    one = collapsed_fitted(lw.VaLLA(count, optimiser="lbfgs"))
    other = collapsed_fitted(lw.VaLLA(count, optimiser="adam", steps=80, learning_rate=0.05))
    assert float(other.log_evidence()) == pytest.approx(float(one.log_evidence()), rel=1e-3)
    few = collapsed_fitted(lw.VaLLA(count, optimiser="adam", steps=80, learning_rate=0.05, batch_size=10))
    start = float(collapsed_fitted(lw.VaLLA(count, optimiser="none")).log_evidence())
    assert float(few.log_evidence()) > 0.5 * (start + float(one.log_evidence()))


def test_enough_learned_points_are_as_good_as_all_data() -> None:
    posterior, x = collapsed_fitted(lw.VaLLA(15)), torch.linspace(-4, 4, 30, dtype=D)[:, None]
    assert float(posterior.log_evidence()) == pytest.approx(float(exact().log_evidence()), abs=1e-3)
    assert_close(posterior.functions(x).variance, exact().functions(x).variance, 0.2)


@pytest.mark.parametrize("likelihood", ["classification", "labels", "counts"])
def test_other_likelihoods(likelihood: str) -> None:
    """The bound is one of the Laplace evidence, with the curvature at the network's outputs."""
    x, y = classes()
    targets = {"classification": y, "labels": (x[:, :3] > 0).long(), "counts": (2 * x[:, :3].abs()).long()}[likelihood]
    chosen = {"classification": lw.Categorical(), "labels": lw.Bernoulli(), "counts": lw.Poisson()}[likelihood]
    fit = lambda m: lw.fit(MLP.build(), [(x, targets)], chosen, method=m, prior=0.5)
    bounds = [float(fit(lw.VaLLA(8, optimiser=way, steps=20)).log_evidence()) for way in ("none", "lbfgs", "adam")]
    assert bounds[0] < min(bounds[1:])
    assert max(bounds) < float(fit(lw.Full()).log_evidence())


def test_the_trace_is_the_bound_as_it_rises() -> None:
    """Without the terms that do not depend on the locations: the loss and the size of the weights."""
    posterior = collapsed_fitted(lw.VaLLA(5, optimiser="lbfgs"))
    assert posterior.trace is not None
    scores = [step.score for step in posterior.trace.steps]
    assert (posterior.trace.tuner, posterior.trace.score) == ("VaLLA", "bound")
    fixed = posterior.posterior.log_likelihood() - 0.5 * posterior.prior.penalty(posterior.posterior.theta)
    assert max(scores) == pytest.approx(float(posterior.log_evidence() - fixed), rel=1e-6)
    assert scores[-1] > scores[0]
    assert posterior.trace.findings == ()


def test_without_a_start_the_better_of_two_searches_is_kept() -> None:
    """The two searches end at different bounds here."""
    ends = {start: float(collapsed_fitted(lw.VaLLA(6, start=start, optimiser="lbfgs", steps=4)).log_evidence())
            for start in ("greedy", "trace", None)}  # fmt: skip
    assert ends["greedy"] != pytest.approx(ends["trace"], rel=1e-3)
    assert ends[None] == pytest.approx(max(ends["greedy"], ends["trace"]), rel=1e-9)


def test_a_search_that_has_not_converged_has_a_finding() -> None:
    posterior = collapsed_fitted(lw.VaLLA(5, optimiser="lbfgs", steps=2))
    assert posterior.trace is not None
    assert posterior.trace.findings == (
        "the search did not converge in 2 steps and the bound still rises; raise steps",
    )


@pytest.mark.parametrize(("activation", "noise", "prior"), [(nn.ReLU, 1e-4, 0.1), (nn.Softplus, 1e-4, 1e-4)])
def test_a_search_that_overflows_keeps_the_best_state(activation: Any, noise: float, prior: float) -> None:
    """A line search in float32 may try locations at which the kernel overflows."""
    torch.manual_seed(0)
    x, y = 3 * torch.randn(40, 2), torch.randn(40, 1)
    net = nn.Sequential(nn.Linear(2, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 1))
    fit = lambda method: lw.fit(net, [(x, y)], lw.Gaussian(noise_std=noise), method=method, prior=prior)
    initial, posterior = (fit(lw.VaLLA(6, steps=40, optimiser=optimiser)) for optimiser in ("none", "lbfgs"))
    assert float(posterior.log_evidence()) > float(initial.log_evidence())


def test_a_bound_that_computes_its_kernel_again_has_the_same_slopes() -> None:
    """Where neither the Jacobians of the data nor their kernel with the points fit the byte budget."""
    problem = replace(collapsed_fitted(lw.Full(), prior=0.5).posterior.problem, learn_prior=True)
    anchors = Anchors(problem.network, torch.linspace(-2, 2, 4, dtype=D)[:, None], torch.zeros(4).long())
    start = InducingPoints(problem, anchors, exact().posterior.statistics, 40, True)
    ends = []
    for size in ("1GiB", 1):
        points, moves = start.learnable(noise=False)
        assert moves is not None
        with lw.memory.limited(size):
            value, divergence = collapsed_bound(points, Data([curve()], torch.device("cpu")))(moves)
            slopes = torch.autograd.grad(value, [moves, points.log_scale])
        ends.append((value.detach(), torch.tensor(divergence, dtype=D), *slopes))
    for kept, again in zip(*ends, strict=True):
        assert_close(again, kept, SOLVED)


# A belief that allows a few directions and no others, against dense matrices.

K, P, PHI = 6, 83, 1.7
CASE = BY_NAME["mlp"]
PRIORS = ["isotropic", "per_layer", "diagonal", "g"]


@cache
def subspace_network() -> Network:
    return Network.build(CASE.build(), CASE.batch(4))


@cache
def data() -> tuple[Tensor, Tensor]:
    """Rows (12, P) at new inputs, and a GGN (P, P)."""
    jac = dense.jacobian(CASE.build(), CASE.batch(4, seed=2), 4)
    other = dense.jacobian(CASE.build(), CASE.batch(9), 9)
    return jac, dense.ggn(other, torch.eye(3, dtype=D).expand(9, 3, 3))


def directions() -> Tensor:
    """Neither orthogonal nor of one length."""
    found = torch.randn(K, P, dtype=D, generator=torch.Generator().manual_seed(2))
    return found * torch.linspace(0.1, 3.0, K, dtype=D)[:, None] + found[:1]


def bound(kind: str) -> Any:
    given = {
        "isotropic": lw.isotropic(0.7), "per_layer": lw.per_layer(torch.tensor([0.3, 1.0, 4.0], dtype=D)),
        "diagonal": lw.priors.diagonal(torch.linspace(0.3, 2.0, P, dtype=D)), "g": lw.priors.g_prior(0.7),
    }[kind].bound(subspace_network().selection, subspace_network().theta())  # fmt: skip
    return given.with_scale(torch.linspace(0.5, 3.0, P, dtype=D)) if kind == "g" else given


def curvature() -> SubspaceCurvature:
    d, (_, ggn) = directions(), data()
    return SubspaceCurvature(subspace_network().selection, d, d @ ggn @ d.T)


@pytest.mark.parametrize("kind", PRIORS)
def test_the_covariance_is_the_inverse_within_the_span(kind: str) -> None:
    prior, (jac, ggn), d = bound(kind), data(), directions()
    covariance = inducing.within(d, ggn / PHI + torch.diag(prior.vector))
    found = curvature().precision(torch.tensor(PHI, dtype=D), prior)
    jacobians = subspace_network().linearise(CASE.batch(4, seed=2)).jacobians()
    blocks = dense.output_covariance(jac, covariance)
    assert_close(found.quadratic(jacobians).squeeze(1), blocks)
    assert_close(found.quadratic(jacobians, full=False).squeeze(1), blocks.diagonal(dim1=1, dim2=2))
    assert_close(found.cross(jacobians), dense.joint_covariance(jac, covariance))
    draws = found.sample(torch.eye(P, dtype=D))
    assert_close(draws.T @ draws, covariance)
    assert int(torch.linalg.matrix_rank(draws)) == K
    v = torch.randn(2, P, dtype=D)
    assert_close(found.solve(v), v @ covariance)
    assert_close(found.adjoint(torch.eye(P, dtype=D)), draws.T)
    assert_close(found.variances(), covariance.diagonal())
    before = inducing.within(d, torch.diag(prior.vector))
    assert_close(found.gammas(prior.vector), prior.vector * (before - covariance).diagonal())


@pytest.mark.parametrize("kind", PRIORS)
def test_the_log_determinant_has_no_curvature_outside(kind: str) -> None:
    """Of A + A Dᵀ M⁻¹ G M⁻¹ D A / φ with M = D A Dᵀ: G within the span, the prior alone across it."""
    prior, (_, ggn), d = bound(kind), data(), directions()
    a = torch.diag(prior.vector)
    dual = torch.linalg.solve(d @ a @ d.T, d @ a)
    whole = a + dual.T @ (d @ ggn @ d.T) @ dual / PHI
    expected = torch.linalg.slogdet(whole)[1]
    phi = torch.tensor(PHI, dtype=D)
    assert_close(curvature().logdet(phi, prior), expected)
    assert_close(curvature().precision(phi, prior).logdet(), expected)


@pytest.mark.parametrize("kind", PRIORS)
def test_slopes_of_the_log_determinant(kind: str) -> None:
    prior, held = bound(kind), curvature()

    def found(log_alpha: Tensor, log_phi: Tensor) -> Tensor:
        return held.logdet(log_phi.exp(), prior.with_precision(log_alpha.exp()))

    leaves = (prior.values.log().clone().requires_grad_(), torch.tensor(0.3, dtype=D, requires_grad=True))
    assert torch.autograd.gradcheck(found, leaves, fast_mode=True)


def test_the_diagonal_is_that_within_the_span() -> None:
    d, (_, ggn) = directions(), data()
    projector = d.T @ torch.linalg.inv(d @ d.T) @ d
    expected = (projector @ ggn @ projector).diagonal()
    assert_close(curvature().inner_diagonal, expected)
    diagonal = curvature().diagonal()
    assert bool((diagonal >= expected - 1e-12).all())
    assert float(diagonal.min()) > 0
