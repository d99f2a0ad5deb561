"""Curvature in the span of the Jacobian at a few inputs, against dense matrices."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.methods.inducing.points import AnchoredCurvature, AnchoredRows, Anchors
from lapwing.networks.network import Network
from tests.cases import BY_NAME
from tests.references import dense, inducing
from tests.tolerances import SOLVED, assert_close

D = torch.float64
M, RANK, PHI = 5, 3, 1.7
NAMES = ["mlp", "resnet_batchnorm", "attention", "gru", "embedding", "token_level", "dict_input", "weight_norm"]
PRIORS = ["isotropic", "per_layer", "diagonal", "g"]


def outputs(network: Network) -> Tensor:
    return torch.arange(M) * 7 % torch.Size(network.output_shape).numel()


def setting(name: str, weights: Any = None) -> Anchors:
    case = BY_NAME[name]
    network = Network.build(case.build(), case.batch(M), weights)
    return Anchors(network, case.batch(M), outputs(network))


@cache
def rows(name: str) -> tuple[Tensor, Tensor]:
    """The anchors' rows (M, P) and all of three other inputs (3 C, P)."""
    case, model = BY_NAME[name], BY_NAME[name].build()
    jac = dense.jacobian(model, case.batch(M), M)
    return (
        jac[torch.arange(M), torch.arange(M) * 7 % jac.shape[1]],
        dense.jacobian(model, case.batch(3, seed=2), 3).flatten(0, 1),
    )


def bound(kind: str, network: Network) -> Any:
    size = network.selection.size
    layers = len(set(network.selection.layer_of()))
    given = {
        "isotropic": lw.isotropic(0.7), "per_layer": lw.per_layer(torch.linspace(0.3, 2.0, layers, dtype=D)),
        "diagonal": lw.priors.diagonal(torch.linspace(0.3, 2.0, size, dtype=D)), "g": lw.priors.g_prior(0.7),
    }[kind].bound(network.selection, network.theta())  # fmt: skip
    return given.scaled(torch.linspace(0.5, 3.0, size, dtype=D)) if kind == "g" else given


def mix() -> Tensor:
    return torch.randn(M, RANK, dtype=D, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", NAMES)
def test_anchors_are_rows_of_the_jacobian(name: str) -> None:
    anchors, (z, other) = setting(name), rows(name)
    prior = bound("per_layer", anchors.network)
    assert len(anchors) == M
    assert_close(anchors.kernel(prior), inducing.kernel(z, z, prior.vector))
    jacobians = anchors.network.linearise(BY_NAME[name].batch(3, seed=2)).jacobians()
    assert_close(anchors.against(jacobians, prior), inducing.kernel(other, z, prior.vector))
    v, c = torch.randn(4, z.shape[1], dtype=D), torch.randn(4, M, dtype=D)
    assert_close(anchors.times(v), v @ z.T)
    assert_close(anchors.combined(c), c @ z)


@pytest.mark.parametrize("name", ["mlp", "resnet_batchnorm", "embedding", "dict_input"])
def test_chunks_of_anchors(name: str) -> None:
    anchors, (z, _) = setting(name), rows(name)
    prior = bound("diagonal", anchors.network)
    c = torch.randn(4, M, dtype=D)
    with lw.memory.limited(1):
        assert [part.batch for part in anchors.parts] == [1] * M
        assert_close(anchors.kernel(prior), inducing.kernel(z, z, prior.vector))
        assert_close(anchors.combined(c), c @ z)
        assert_close(anchors.times(c @ z), c @ z @ z.T)


def test_anchors_elsewhere() -> None:
    anchors, case = setting("mlp"), BY_NAME["mlp"]
    moved = anchors.at(case.batch(M, seed=6))
    jac = dense.jacobian(case.build(), case.batch(M, seed=6), M)[torch.arange(M), outputs(anchors.network)]
    assert_close(moved.combined(torch.eye(M, dtype=D)), jac)
    assert moved.outputs is anchors.outputs


def test_anchors_of_float32_networks_are_wide() -> None:
    case = BY_NAME["mlp"]
    network = Network.build(case.build(torch.float32), case.batch(M, torch.float32))
    anchors = Anchors(network, case.batch(M, torch.float32), outputs(network))
    prior = bound("isotropic", network)
    assert anchors.kernel(prior).dtype == D
    z, _ = rows("mlp")
    assert_close(anchors.kernel(prior), inducing.kernel(z, z, prior.vector), dtype=torch.float32)
    own = anchors.combined(torch.eye(M, dtype=D))
    assert_close(anchors.kernel(prior), inducing.kernel(own, own, prior.vector))


@pytest.mark.parametrize("kind", PRIORS)
@pytest.mark.parametrize("name", NAMES)
def test_the_precision_is_that_of_the_matrix(name: str, kind: str) -> None:
    anchors, (z, other) = setting(name), rows(name)
    prior = bound(kind, anchors.network)
    curvature = AnchoredCurvature(anchors, mix())
    matrix = z.T @ mix() @ mix().T @ z
    precision = matrix / PHI + torch.diag(prior.vector)
    covariance = torch.linalg.inv(precision)
    found = curvature.precision(torch.tensor(PHI, dtype=D), prior)
    assert_close(found.logdet(), torch.linalg.slogdet(precision)[1])
    jacobians = anchors.network.linearise(BY_NAME[name].batch(3, seed=2)).jacobians()
    assert_close(found.cross(jacobians), other @ covariance @ other.T)
    data = other.reshape(-1, anchors.network.output_shape[-1], other.shape[1])
    blocks = dense.output_covariance(data, covariance)
    assert_close(found.quadratic(jacobians).reshape(blocks.shape), blocks)
    assert_close(found.quadratic(jacobians, full=False).flatten(), blocks.diagonal(dim1=1, dim2=2).flatten())
    draws = found.sample(torch.eye(len(matrix), dtype=D))
    assert_close(draws.T @ draws, covariance)
    v = torch.randn(2, len(matrix), dtype=D)
    assert_close(found.solve(v), v @ covariance)
    assert_close(found.variances(), covariance.diagonal())
    assert_close(curvature.anchored_diagonal, matrix.diagonal())
    assert_close(curvature.values, torch.linalg.eigvalsh(matrix)[-RANK:], SOLVED)


@pytest.mark.parametrize("kind", PRIORS)
def test_the_log_determinant_has_what_is_missing_added(kind: str) -> None:
    """tr A⁻¹ (H - H̃) / φ, whichever way it is computed."""
    anchors, (z, _) = setting("mlp"), rows("mlp")
    prior = bound(kind, anchors.network)
    matrix = z.T @ mix() @ mix().T @ z
    own = matrix.diagonal() + torch.linspace(0.1, 1.0, 83, dtype=D)
    logdet = AnchoredCurvature(anchors, mix(), own).logdet(torch.tensor(PHI, dtype=D), prior)
    inside = torch.linalg.slogdet(matrix / PHI + torch.diag(prior.vector))[1]
    assert_close(logdet, inside + (torch.linspace(0.1, 1.0, 83, dtype=D) / prior.vector).sum() / PHI)


def test_rounding_never_takes_anything_off() -> None:
    anchors, (z, _) = setting("mlp"), rows("mlp")
    prior = bound("isotropic", anchors.network)
    matrix = z.T @ mix() @ mix().T @ z
    logdet = AnchoredCurvature(anchors, mix(), matrix.diagonal() * (1 - 1e-9)).logdet(torch.tensor(PHI, dtype=D), prior)
    assert_close(logdet, torch.linalg.slogdet(matrix / PHI + torch.diag(prior.vector))[1])


@pytest.mark.parametrize("kind", PRIORS)
def test_slopes_of_the_log_determinant(kind: str) -> None:
    """In the precisions and the noise."""
    anchors = setting("mlp")
    prior = bound(kind, anchors.network)
    curvature = AnchoredCurvature(anchors, mix(), torch.full((83,), 40.0, dtype=D))

    def found(log_alpha: Tensor, log_phi: Tensor) -> Tensor:
        return curvature.logdet(log_phi.exp(), prior.with_precision(log_alpha.exp()))

    leaves = (prior.values.log().clone().requires_grad_(), torch.tensor(0.3, dtype=D, requires_grad=True))
    assert torch.autograd.gradcheck(found, leaves, fast_mode=True)


def test_what_was_learned_by_predicting_has_no_log_determinant() -> None:
    anchors = setting("mlp")
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"learned by predicting \(alpha above 0\) and has no evidence"
    ):
        AnchoredCurvature(anchors, mix()).logdet(torch.tensor(1.0), bound("isotropic", anchors.network))


def test_single_weights() -> None:
    index = torch.arange(0, 83, 4)
    anchors, (z, other) = setting("mlp", lw.subnetwork(index)), rows("mlp")
    prior = bound("diagonal", anchors.network)
    matrix = z[:, index].T @ mix() @ mix().T @ z[:, index]
    covariance = torch.linalg.inv(matrix / PHI + torch.diag(prior.vector))
    found = AnchoredCurvature(anchors, mix()).precision(torch.tensor(PHI, dtype=D), prior)
    jacobians = anchors.network.linearise(BY_NAME["mlp"].batch(3, seed=2)).jacobians()
    assert_close(found.cross(jacobians), other[:, index] @ covariance @ other[:, index].T)
    draws = found.sample(torch.eye(len(index), dtype=D))
    assert_close(draws.T @ draws, covariance)


def test_the_diagonal_is_the_whole_curvatures_where_it_is_known() -> None:
    anchors, (z, _) = setting("mlp"), rows("mlp")
    own = torch.linspace(1.0, 2.0, 83, dtype=D)
    assert_close(AnchoredCurvature(anchors, mix(), own).diagonal(), own)
    matrix = z.T @ mix() @ mix().T @ z
    diagonal = AnchoredCurvature(anchors, mix()).diagonal()
    large = matrix.diagonal() > 1e-2 * matrix.diagonal().max()
    assert_close(diagonal[large], matrix.diagonal()[large])
    assert float(diagonal.min()) > 0


def test_rows_follow_the_mix() -> None:
    anchors, (z, other) = setting("mlp"), rows("mlp")
    prior = bound("per_layer", anchors.network)
    w, mine = mix().T @ z, AnchoredRows(anchors, mix())
    assert_close(mine.gram(prior), inducing.kernel(w, w, prior.vector))
    jacobians = anchors.network.linearise(BY_NAME["mlp"].batch(3, seed=2)).jacobians()
    assert_close(mine.pulled(jacobians, prior), inducing.kernel(w, other, prior.vector))
    v, c = torch.randn(2, 83, dtype=D), torch.randn(2, RANK, dtype=D)
    assert_close(mine.times(v), v @ w.T)
    assert_close(mine.combined(c), c @ w)


def test_points_of_several_tensors_have_no_file_form() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="inducing points of several tensors have no file form"):
        AnchoredCurvature(setting("dict_input"), mix()).state()
    assert set(AnchoredCurvature(setting("mlp"), mix()).state().tensors) == {"inputs", "outputs", "mix"}
