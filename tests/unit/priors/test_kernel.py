"""The kernel that a prior makes between outputs, against J A⁻¹ J'ᵀ by dense matrices."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.curvature.kronecker import prior_precision
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.priors.base import BoundPrior, prior_kernel
from tests import problems
from tests.cases import BY_NAME, CASES
from tests.references import dense, inducing
from tests.tolerances import assert_close

D = torch.float64
ONE, OTHER = 3, 2
KINDS = ["isotropic", "per_layer", "diagonal", "g", "g of single weights"]
SINGLE = ["mlp", "cnn", "conv_zoo", "norms", "attention", "gru", "embedding", "tied", "shared_weight"]


@cache
def rows(name: str) -> tuple[Tensor, Tensor]:
    """Of two batches, (B M, P) each, one backward pass for every row."""
    case, model = BY_NAME[name], BY_NAME[name].build()
    return (
        dense.jacobian(model, case.batch(ONE), ONE).flatten(0, 1),
        dense.jacobian(model, case.batch(OTHER, seed=8), OTHER).flatten(0, 1),
    )


def prior(kind: str, network: Network) -> BoundPrior:
    """With precisions that are all different, where the kind has several."""
    size, theta = network.selection.size, network.theta()
    spread = torch.linspace(0.3, 4.0, size, dtype=D)[torch.randperm(size, generator=torch.Generator().manual_seed(1))]
    if kind == "isotropic":
        return lw.isotropic(0.7).bound(network.selection, theta)
    if kind == "per_layer":
        layers = len(set(network.selection.layer_of()))
        return lw.per_layer(torch.linspace(0.2, 3.0, layers, dtype=D)).bound(network.selection, theta)
    if kind == "diagonal":
        return lw.priors.diagonal(spread).bound(network.selection, theta)
    scale = spread if kind == "g of single weights" else torch.full((size,), 2.5, dtype=D)
    return lw.priors.g_prior(0.6).bound(network.selection, theta).with_scale(scale)


def jacobians(network: Network, name: str) -> tuple[LayerJacobians, LayerJacobians]:
    case = BY_NAME[name]
    return tuple(network.linearise(case.batch(n, seed=s)).jacobians() for n, s in ((ONE, 5), (OTHER, 8)))  # type: ignore[return-value]


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_dense_matrices(name: str) -> None:
    """Between two batches and of one with itself; rows run over outputs within samples."""
    network = Network.build(BY_NAME[name].build(), BY_NAME[name].batch(ONE))
    jac, other_jac = jacobians(network, name)
    one, other = rows(name)
    for kind in KINDS:
        given = prior(kind, network)
        assert_close(prior_kernel(jac, given, other_jac), inducing.kernel(one, other, given.vector))
        assert_close(prior_kernel(jac, given), inducing.kernel(one, one, given.vector))
        assert_close(prior_kernel(jac.materialised(), given, other_jac), inducing.kernel(one, other, given.vector))
        assert_close(
            prior_kernel(jac.materialised(), given, other_jac.materialised()), inducing.kernel(one, other, given.vector)
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SINGLE)
def test_single_weights(name: str, kind: str) -> None:
    """Of those that are not selected nothing is left, whatever their precision would be."""
    case, (one, other) = BY_NAME[name], rows(name)
    index = torch.arange(1, one.shape[1], 3)
    network = Network.build(case.build(), case.batch(ONE), lw.subnetwork(index))
    jac, other_jac = jacobians(network, name)
    given = prior(kind, network)
    assert_close(prior_kernel(jac, given, other_jac), inducing.kernel(one[:, index], other[:, index], given.vector))


@pytest.mark.parametrize("weights", [lw.last_layer, lw.named("bias")], ids=["last", "bias"])
def test_some_parameters(weights: Any) -> None:
    case = BY_NAME["mlp"]
    network = Network.build(case.build(), case.batch(ONE), weights)
    jac, other_jac = jacobians(network, "mlp")
    names = list(network.selection.names)
    one, other = (dense.jacobian(case.build(), case.batch(n, seed=s), n, names).flatten(0, 1)
                  for n, s in ((ONE, 5), (OTHER, 8)))  # fmt: skip
    given = prior("per_layer", network)
    assert_close(prior_kernel(jac, given, other_jac), inducing.kernel(one, other, given.vector))


@pytest.mark.parametrize("name", ["mlp", "resnet_batchnorm", "conv_zoo", "attention", "lstm", "embedding"])
def test_a_small_byte_budget_changes_nothing(name: str) -> None:
    network = Network.build(BY_NAME[name].build(), BY_NAME[name].batch(ONE))
    one, other = rows(name)
    for kind in ("isotropic", "diagonal"):
        given = prior(kind, network)
        jac, other_jac = jacobians(network, name)
        with lw.memory.limited(1):
            kernel = prior_kernel(jac, given, other_jac)
        assert_close(kernel, inducing.kernel(one, other, given.vector))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "norms", "embedding"])
def test_slopes_in_the_precisions(name: str, kind: str) -> None:
    """Of a sum of entries, against -Σ weights J_i J'_i / a_i², group by group."""
    network = Network.build(BY_NAME[name].build(), BY_NAME[name].batch(ONE))
    jac, other_jac = jacobians(network, name)
    given = prior(kind, network)
    leaf = given.values.detach().clone().requires_grad_()
    kernel = prior_kernel(jac, given.with_precision(leaf), other_jac)
    mixed = torch.randn(kernel.shape, dtype=D)
    (slope,) = torch.autograd.grad((kernel * mixed).sum(), leaf)
    one, other = rows(name)
    scale = torch.ones(len(given.vector), dtype=D) if given.scale is None else given.scale
    each = -((mixed @ other) * one).sum(0) * scale / given.vector.square()
    assert_close(slope.reshape(-1), given.sum_groups(each))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "resnet_batchnorm", "token_level"])
def test_the_precision_without_data_has_the_kernels_blocks(name: str, kind: str) -> None:
    """Within each sample and token what the whole kernel has there."""
    network = Network.build(BY_NAME[name].build(), BY_NAME[name].batch(ONE))
    jac, _ = jacobians(network, name)
    given = prior(kind, network)
    precision = prior_precision(given, network.layout, network.selection)
    (one, _), classes = rows(name), network.output_shape[-1]
    data = one.reshape(-1, classes, one.shape[1])
    expected = dense.output_covariance(data, torch.diag(1 / given.vector))
    assert_close(precision.quadratic(jac).reshape(expected.shape), expected)
    assert_close(precision.quadratic(jac, full=False).reshape(-1), expected.diagonal(dim1=1, dim2=2).reshape(-1))
    assert_close(precision.cross(jac), inducing.kernel(one, one, given.vector))


def test_float32_networks_have_float32_kernels() -> None:
    case = BY_NAME["cnn"]
    network = Network.build(case.build(torch.float32), case.batch(ONE, torch.float32))
    jac, other_jac = (network.linearise(case.batch(n, torch.float32, s)).jacobians() for n, s in ((ONE, 5), (OTHER, 8)))
    given = prior("isotropic", network)
    kernel = prior_kernel(jac, given, other_jac)
    assert kernel.dtype == torch.float32
    one, other = rows("cnn")
    assert_close(kernel, inducing.kernel(one, other, given.vector))
    assert_close(prior_kernel(jac.double(), given, other_jac.double()), kernel.double(), dtype=torch.float32)


@pytest.mark.parametrize("name", ["mlp", "attention", "gru"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, case = BY_NAME[name].build(), BY_NAME[name]

    def run() -> Tensor:
        network = Network.build(model, case.batch(ONE))
        return prior_kernel(jacobians(network, name)[0], prior("per_layer", network))

    kernel = problems.unchanged(model, run)
    assert not kernel.requires_grad
