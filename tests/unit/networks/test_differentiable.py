"""Jacobians with a way back to the inputs: the kernel at inducing points and its slopes in their locations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.inducing_points import Anchors
from lapwing.networks.network import Network
from lapwing.priors.base import prior_kernel
from tests import problems
from tests.cases import BY_NAME, Case, attention, mlp, norms, recurrent, sdpa, transformer
from tests.tolerances import assert_close

D = torch.float64


def pooled() -> nn.Module:
    """Convolutions, BatchNorm and both kinds of pooling."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2),
        nn.AvgPool2d((1, 2)), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def group_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 6, 3))


def layer_norm() -> nn.Module:
    """Over one dimension and over two."""
    return nn.Sequential(
        nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Unflatten(1, (2, 2)), nn.LayerNorm((2, 2)), nn.Flatten(),
        nn.Linear(4, 2),
    )  # fmt: skip


def transposed() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(2, 3, 2, stride=2), nn.SiLU(), nn.Flatten(), nn.Linear(3 * 4 * 6, 2))


MADE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (mlp, (4,), 3), "pooled": (pooled, (2, 5, 6), 3), "group_norm": (group_norm, (2, 3, 4), 3),
    "layer_norm": (layer_norm, (3,), 2), "norms": (norms, (4,), 3), "attention": (attention, (4, 5), 3),
    "sdpa": (sdpa, (3, 5), 3), "transformer": (transformer, (4, 5), 3), "gru": (recurrent(nn.GRU), (4, 3), 2),
    "lstm": (recurrent(nn.LSTM), (4, 3), 2), "transposed": (transposed, (2, 2, 3), 2),
}  # fmt: skip


def setting(name: str) -> tuple[nn.Module, Anchors, Any, Tensor]:
    """The model, three anchors with different outputs, a prior, and inputs of another batch."""
    make, shape, outputs = MADE[name]
    case = Case(name, make, lambda b: torch.randn(b, *shape), (outputs,))
    model = case.build()
    network = Network.build(model, case.batch(3))
    layers = len(set(network.selection.layer_of()))
    prior = lw.per_layer(torch.linspace(0.5, 2.0, layers, dtype=D)).bound(network.selection, network.theta())
    return model, Anchors(network, case.batch(3), torch.arange(3) % outputs), prior, case.batch(2, seed=3)


@pytest.mark.parametrize("name", MADE)
def test_slopes_are_finite_differences(name: str) -> None:
    """Of the kernel of the points and of that with other inputs."""
    _, anchors, prior, other = setting(name)
    fixed = anchors.network.linearise(other).jacobians().materialised()

    def kernels(z: Tensor) -> tuple[Tensor, Tensor]:
        points = anchors.differentiable(z)
        return prior_kernel(points, prior), prior_kernel(fixed, prior, points)

    z = anchors.inputs.clone().requires_grad_()
    assert torch.autograd.gradcheck(kernels, (z,), fast_mode=name not in ("mlp", "layer_norm", "norms"))


@pytest.mark.parametrize("name", MADE)
def test_values_are_those_of_the_plain_way(name: str) -> None:
    _, anchors, prior, _ = setting(name)
    kernel = prior_kernel(anchors.differentiable(anchors.inputs.clone().requires_grad_()), prior)
    assert kernel.requires_grad
    assert_close(kernel, anchors.kernel(prior))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_the_model_and_its_flags_are_left_as_they_were(name: str, frozen: bool) -> None:
    """The graph leads to the weights too, but nothing is written there."""
    model, anchors, prior, _ = setting(name)
    if frozen:
        model.requires_grad_(False)
    z = anchors.inputs.clone().requires_grad_()

    def run() -> None:
        prior_kernel(anchors.differentiable(z), prior).sum().backward(inputs=[z])

    problems.unchanged(model, run)
    assert z.grad is not None
    assert float(z.grad.abs().max()) > 0


def test_slopes_do_not_depend_on_which_weights_require_gradients() -> None:
    model, anchors, prior, _ = setting("mlp")
    slopes = []
    for wanted in (True, False):
        model.requires_grad_(wanted)
        z = anchors.inputs.clone().requires_grad_()
        slopes.append(torch.autograd.grad(prior_kernel(anchors.differentiable(z), prior).sum(), z)[0])
    assert torch.equal(*slopes)


@pytest.mark.parametrize(("name", "parameter"), [("weight_norm", "0.parametrizations"), ("free_parameter", "power")])
def test_a_parameter_without_a_rule_is_refused(name: str, parameter: str) -> None:
    case = BY_NAME[name]
    model = case.build()
    network = Network.build(model, case.batch(3))
    anchors = Anchors(network, case.batch(3), torch.arange(3))

    def run() -> None:
        with pytest.raises(
            lw.errors.ModelError,
            match=rf"Jacobian of '{parameter}.*has no rule \(no rule for .*differentiated in the inputs",
        ):
            anchors.differentiable(case.batch(3))

    problems.unchanged(model, run)
    rest = Network.build(model, case.batch(3), lw.named(r"^2\.|head"))
    points = Anchors(rest, case.batch(3), torch.arange(3))
    z = case.batch(3).requires_grad_()
    prior = lw.isotropic(1.0).bound(rest.selection, rest.theta())
    assert_close(prior_kernel(points.differentiable(z), prior), points.kernel(prior))


def test_a_batch_that_requires_no_gradient_has_the_same_values() -> None:
    _, anchors, prior, _ = setting("attention")
    assert_close(prior_kernel(anchors.differentiable(anchors.inputs), prior), anchors.kernel(prior))


def test_under_no_grad_and_inference_mode() -> None:
    """Those who ask for slopes get them, whatever surrounds the call."""
    _, anchors, prior, _ = setting("mlp")
    z = anchors.inputs.clone().requires_grad_()
    with torch.no_grad():
        points = anchors.differentiable(z)
    (slope,) = torch.autograd.grad(prior_kernel(points, prior).sum(), z)
    assert float(slope.abs().max()) > 0
