"""Gradients of beliefs in the inputs: against finite differences, and against a dense reference by torch.func."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import lapwing as lw
from lapwing.runtime.memory import limited
from lapwing.values.gaussian import isolate
from tests import problems
from tests.tolerances import SOLVED, assert_close

D = torch.float64
ROWS, INPUTS, UNITS, OUTPUTS, NEW = 11, 4, 5, 2, 3
SMOOTH = {"tanh": nn.Tanh, "softplus": nn.Softplus}
NOISE, PRECISION = 0.3, 0.7


def generated(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


X, Y = generated(ROWS, INPUTS), generated(ROWS, OUTPUTS, seed=1)


@cache
def net(activation: str) -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Linear(INPUTS, UNITS), SMOOTH[activation](), nn.Linear(UNITS, UNITS + 1), SMOOTH[activation]()
    return nn.Sequential(*layers, nn.Linear(UNITS + 1, OUTPUTS)).double()


@cache
def fitted(activation: str, method: Any) -> lw.Fitted:
    generator = torch.Generator().manual_seed(4)
    likelihood = lw.Gaussian(noise_std=NOISE)
    return lw.fit(net(activation), [(X, Y)], likelihood, method=method, prior=PRECISION, generator=generator)


@cache
def mixed() -> lw.Fitted:
    """The default with held-out data: a mixture of Student predictives."""
    return lw.fit(net("tanh"), [(X, Y)], "regression", validation=(X + 0.1, Y))


def points(seed: int = 5) -> Tensor:
    return generated(NEW, INPUTS, seed=seed).requires_grad_()


METHODS = [lw.Full(), lw.Kron(), lw.EKron(), lw.Diagonal(), lw.LowRank(rank=6), lw.KernelSpace(), lw.Sampled()]


@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_slopes_are_finite_differences(activation: str, method: Any) -> None:
    posterior = fitted(activation, method)

    def moments(x: Tensor) -> tuple[Tensor, ...]:
        belief, predictive = posterior.functions(x), posterior.predict(x)
        joint = posterior.functions(x, joint=True)
        return belief.mean, belief.variance, belief.cov, joint.mean, joint.cov, predictive.mean, predictive.std

    assert torch.autograd.gradcheck(moments, (points(),), fast_mode=True)


@pytest.mark.parametrize("activation", SMOOTH)
def test_the_joint_covariance_and_its_slopes_are_those_of_a_dense_reference(activation: str) -> None:
    """J Λ⁻¹ Jᵀ with Λ = JᵀJ / noise + precision, by torch.func: nothing of it is from the package."""
    model = net(activation)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def jacobian(x: Tensor) -> Tensor:
        each = vmap(jacrev(lambda w, row: functional_call(model, w, row[None])[0]), (None, 0))(weights, x)
        return torch.cat([part.flatten(2) for part in each.values()], -1).flatten(0, 1)  # (B C, P)

    rows = jacobian(X)
    precision = rows.T @ rows / NOISE**2 + PRECISION * torch.eye(rows.shape[1], dtype=D)
    ours, theirs = points(), points()
    belief = fitted(activation, lw.Full()).functions(ours, joint=True)
    reference = jacobian(theirs)
    covariance = reference @ torch.linalg.solve(precision, reference.T)
    assert_close(belief.cov.flatten(2).flatten(0, 1), covariance, SOLVED)
    seeds = generated(*covariance.shape, seed=6)
    (expected,) = torch.autograd.grad((covariance * seeds).sum() + model(theirs).square().sum(), theirs)
    total = (belief.cov.flatten(2).flatten(0, 1) * seeds).sum() + belief.mean.square().sum()
    assert_close(torch.autograd.grad(total, ours)[0], expected, SOLVED)


def test_a_mixture_has_slopes() -> None:
    posterior, draws = mixed(), lambda: torch.Generator().manual_seed(3)
    assert len(posterior.posterior.cells) > 1

    def results(x: Tensor) -> tuple[Tensor, ...]:
        belief, p = posterior.functions(x, joint=True), posterior.predict(x)
        return belief.mean, belief.cov, posterior.functions(x).variance, p.mean, p.std, p.log_prob(Y[:NEW])

    assert torch.autograd.gradcheck(results, (points(),), fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: posterior.function_samples(x, 7, draws()), (points(),), fast_mode=True)


TARGETS = {
    "binary": (X[:, :1] > 0).to(D),
    "multilabel": (X[:, :OUTPUTS] > 0).to(D),
    "counts": torch.arange(ROWS)[:, None] % 3,
    "classification": torch.arange(ROWS) % 3,
}


@pytest.mark.parametrize("likelihood", TARGETS)
def test_default_fits_have_slopes(likelihood: str) -> None:
    """Their mixture holds the plain network, which has no spread: sqrt(0) must not give NaN."""
    torch.manual_seed(2)
    targets = TARGETS[likelihood]
    outputs = 3 if targets.ndim == 1 else targets.shape[1]
    model = nn.Sequential(nn.Linear(INPUTS, UNITS), nn.Tanh(), nn.Linear(UNITS, outputs)).double()
    posterior = lw.fit(model, [(X, targets)], likelihood)
    assert any(cell.scale == 0 for cell in posterior.posterior.cells)
    members = ("probs",) if likelihood != "counts" else ("mean", "std")

    def results(x: Tensor) -> tuple[Tensor, ...]:
        p = posterior.predict(x)
        entropies = p.entropy, p.mutual_information
        return *entropies, p.log_prob(targets[:NEW]), *(getattr(p, member) for member in members)

    assert torch.autograd.gradcheck(results, (points(),), fast_mode=True)


def test_pieces_within_the_byte_budget_keep_the_graph() -> None:
    posterior = fitted("tanh", lw.Kron())
    slopes = []
    for budget in ("8kB", "1GB"):
        x = generated(12, INPUTS, seed=8).requires_grad_()
        with limited(budget):
            pieces = len(list(posterior.network.tangents(x.detach())))
        assert (pieces > 1) == (budget == "8kB")
        with limited(budget):
            joint, each = posterior.functions(x, joint=True), posterior.functions(x)
        total = joint.cov.sin().sum() + each.variance.sin().sum() + joint.mean.sum()
        slopes.append(torch.autograd.grad(total, x)[0])
    assert_close(*slopes)


def convolutions() -> nn.Module:
    """Weights that are used at several positions."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Softplus(), nn.Flatten(), nn.Linear(4, 3)
    )


@pytest.mark.parametrize("method", [lw.Kron(), lw.Diagonal(), lw.EKron()], ids=lambda method: type(method).__name__)
def test_slopes_of_class_probabilities_in_images(method: Any) -> None:
    torch.manual_seed(3)
    model, x = convolutions().double(), generated(6, 2, 3, 4)
    posterior = lw.fit(model, [(x, torch.arange(6) % 3)], "classification", method=method, prior=2.0)
    z = generated(2, 2, 3, 4, seed=9).requires_grad_()
    results = lambda z: (posterior.functions(z).cov, posterior.predict(z).probs, posterior.functions(z, True).cov)
    assert torch.autograd.gradcheck(results, (z,), fast_mode=True)


def test_some_of_many_outputs() -> None:
    """Above 32 outputs the covariance is computed when it is asked for, and so is its graph."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(INPUTS, 3), nn.Tanh(), nn.Linear(3, 34)).double()
    posterior = lw.fit(model, [(X, torch.arange(ROWS))], "classification", method=lw.Diagonal(), prior=2.0)
    x = points()
    belief = posterior.functions(x)
    chosen = posterior.functions(x, outputs=[33, 5])
    for ours, theirs in ((chosen.variance, belief.variance[:, [33, 5]]), (chosen.mean, belief.mean[:, [33, 5]])):
        assert_close(torch.autograd.grad(ours.sin().sum(), x)[0], torch.autograd.grad(theirs.sin().sum(), x)[0])
    assert torch.autograd.gradcheck(lambda x: posterior.functions(x).variance, (x,), fast_mode=True)


def test_a_shifted_mean_has_slopes() -> None:
    """The mean of the tangent model at its own optimum: f + J (theta - w̃)."""
    posterior = fitted("tanh", lw.Full()).tuned(lw.tuners.LinearMode([(X, Y)], mean="tangent"))
    assert posterior.network.shift is not None
    assert torch.autograd.gradcheck(lambda x: posterior.functions(x).mean, (points(),), fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: posterior.functions(x, joint=True).mean, (points(),), fast_mode=True)


def test_backward_reaches_the_inputs_alone() -> None:
    posterior, x = fitted("tanh", lw.Kron()), points()
    replica = posterior.network.replica
    run = lambda: (posterior.functions(x).std.sum() + posterior.predict(x).std.sum()).backward()
    problems.unchanged(net("tanh"), run)
    assert x.grad is not None
    assert float(x.grad.abs().max()) > 0
    assert all(p.grad is None for p in replica.parameters())


def test_inputs_behind_a_computation_and_a_second_backward() -> None:
    posterior, u = fitted("tanh", lw.Kron()), points()
    std = posterior.functions(u * u).std
    first = torch.autograd.grad(std.sum(), u, retain_graph=True)[0]
    assert_close(torch.autograd.grad(std.sum(), u)[0], first)
    assert torch.autograd.gradcheck(lambda u: posterior.functions(u * u).std, (u,), fast_mode=True)


def test_without_grad_mode_or_a_flag_there_is_no_graph() -> None:
    posterior, x = fitted("tanh", lw.Kron()), points()
    with torch.no_grad():
        assert not posterior.functions(x).variance.requires_grad
    with torch.inference_mode():
        assert not posterior.functions(x).variance.requires_grad
    assert not posterior.functions(x.detach()).variance.requires_grad
    assert not posterior.predict([x[:2], x[2:]]).mean.requires_grad  # the batches of a loader
    assert not posterior.network_samples(x, 2).requires_grad


def test_drawn_predictions_refuse_inputs_with_a_gradient() -> None:
    torch.manual_seed(3)
    posterior = lw.fit(nn.Linear(3, 4).double(), [(X[:, :3], torch.arange(ROWS) % 4)], "classification", prior=2.0)
    x = generated(2, 3, seed=7).requires_grad_()
    with pytest.raises(lw.errors.UnsupportedError, match=r"drawn from functions.*predict\(x, samples=0\)"):
        posterior.predict(x, samples=8)
    assert posterior.predict(x, samples=0).probs.requires_grad


def test_isolated_inputs_of_several_tensors() -> None:
    """Tensors that require no gradient, and results that do not depend on the inputs."""
    a, b = generated(NEW, 2).requires_grad_(), generated(NEW, 2, seed=1)
    compute: Callable[[Any], Any] = lambda t: [(t["a"] * t["b"]).sum(1), t["b"].sum(1)]
    product, constant = isolate(compute, {"a": a, "b": b})
    assert_close(torch.autograd.grad(product.sum(), a, retain_graph=True)[0], b)
    assert_close(torch.autograd.grad((product + constant).sum(), a)[0], b)
    (alone,) = isolate(lambda t: [t["b"]], {"a": a, "b": b})
    assert float(torch.autograd.grad(alone.sum(), a)[0].abs().max()) == 0
