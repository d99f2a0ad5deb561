"""Kron, EKron, LowRank and inducing points against the dense matrices they stand for, on every named network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME, CASES, Case
from tests.references import dense
from tests.references.layout import assembled
from tests.tolerances import assert_close

D = torch.float64
METHODS: dict[str, Any] = {
    "diagonal": lw.Diagonal(),
    "kron_expand": lw.Kron(),
    "kron_reduce": lw.Kron(sharing="reduce"),
    "ekron_expand": lw.EKron(),
    "ekron_reduce": lw.EKron(sharing="reduce"),
    "kron_no_full_blocks": lw.Kron(full_limit=0),
    "low_rank": lw.LowRank(rank=5),
    "ella_residual": lw.ELLA(num_landmarks=400, rank=5, residual=True),
    "valla": lw.VaLLA(num_inducing=400),
}


@pytest.fixture(scope="module", params=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


@pytest.fixture(scope="module")
def new_jacobian(case: Case) -> Tensor:
    """The Jacobian of four new inputs, every token a datum."""
    return dense.by_datum(dense.jacobian(case.build(), case.batch(4, seed=1), 4), case.outputs[-1])


@pytest.fixture(scope="module")
def ggn(case: Case) -> Tensor:
    return problems.dense_ggn(case, case.build())[1]


PHI = 1.5  # the dispersion of all fits; curvatures are those of the dispersion one


@pytest.fixture(scope="module")
def fits(case: Case) -> dict[str, lw.Fitted]:
    """The fits of one network, by method: posteriors are values, so tests can share them."""
    return {}


def fitted(fits: dict[str, lw.Fitted], case: Case, method: str) -> lw.Fitted:
    if method not in fits:
        likelihood = problems.likelihood(case).with_dispersion(torch.tensor(PHI, dtype=D))
        fits[method] = lw.fit(case.build(), problems.batches(case), likelihood, method=METHODS[method], prior=1.0)
    return fits[method]


def curvature_matrix(posterior: lw.Fitted) -> Tensor:
    curvature = getattr(
        posterior.posterior.curvature, "part", posterior.posterior.curvature
    )  # of ELLA with its residual
    if hasattr(curvature, "anchors"):
        rows = curvature.anchors.combined(curvature.mix.T)
        return rows.T @ rows
    if hasattr(curvature, "vectors"):
        return curvature.vectors.T @ torch.diag(curvature.values) @ curvature.vectors
    return assembled(curvature)


def precisions(posterior: lw.Fitted) -> tuple[Tensor, Tensor]:
    """A different precision for every layer, and the same for every weight."""
    layers = list(dict.fromkeys(posterior.network.selection.layer_of()))
    each = 0.5 + 0.25 * torch.arange(len(layers), dtype=D)
    sizes = torch.tensor(posterior.network.selection.sizes)
    index = torch.tensor([layers.index(layer) for layer in posterior.network.selection.layer_of()])
    return each, each[index.repeat_interleave(sizes)]


@pytest.mark.parametrize("method", METHODS)
def test_quadratic_logdet_and_samples_are_those_of_the_matrix(
    case: Case, method: str, fits: dict[str, lw.Fitted], new_jacobian: Tensor
) -> None:
    before = fitted(fits, case, method)
    by_layer, by_weight = precisions(before)
    posterior = before.with_prior(lw.per_layer(by_layer))
    matrix = curvature_matrix(posterior)
    expected = matrix / PHI + torch.diag(by_weight)
    covariance = torch.linalg.inv(expected)
    inputs = case.batch(4, seed=1)
    belief = posterior.functions(inputs)
    blocks = dense.output_covariance(new_jacobian, covariance)
    assert_close(belief.cov, blocks.reshape(belief.cov.shape))
    size = belief.mean.numel()
    joint = posterior.functions(inputs, joint=True).cov.reshape(size, size)
    assert_close(joint, dense.joint_covariance(new_jacobian, covariance))
    precision = posterior.posterior.precision
    assert_close(precision.logdet(), torch.linalg.slogdet(expected)[1])
    # Where directions are left out, the evidence is charged the trace of what they hold.
    unseen = posterior.posterior.curvature.unseen(torch.tensor(PHI, dtype=D), posterior.prior)
    charged = torch.zeros((), dtype=D) if unseen is None else unseen.sum().clamp_min(0)
    assert_close(
        posterior.posterior.curvature.logdet(torch.tensor(PHI, dtype=D), posterior.prior), precision.logdet() + charged
    )
    rows = precision.sample(torch.eye(len(matrix), dtype=D))
    assert_close(rows.T @ rows, covariance)
    jacobians = posterior.network.linearise(inputs).jacobians()
    diagonal = precision.quadratic(jacobians, full=False)
    assert_close(diagonal.reshape(belief.variance.shape), belief.variance)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_every_block_keeps_the_trace_of_the_ggn(
    case: Case, sharing: str, fits: dict[str, lw.Fitted], ggn: Tensor
) -> None:
    """EKron's eigenvalues are exact in its basis, so its trace is; it is a GGN's diagonal in that basis."""
    posterior, kron = (fitted(fits, case, f"{method}_{sharing}") for method in ("ekron", "kron"))
    matrix = assembled(posterior.posterior.curvature)
    assert_close(matrix.trace(), ggn.trace())
    # The best diagonal in the Kronecker basis is no further from the GGN than the Kronecker product itself.
    near, far = (float((m - ggn).detach().norm()) for m in (matrix, assembled(kron.posterior.curvature)))
    assert near <= far * (1 + 1e-12)


@pytest.mark.parametrize("method", ["kron_expand", "ekron_expand"])
def test_parameters_that_are_no_linear_map_get_their_own_exact_block(
    case: Case, method: str, fits: dict[str, lw.Fitted], ggn: Tensor
) -> None:
    posterior = fitted(fits, case, method)
    matrix = assembled(posterior.posterior.curvature)
    start = 0
    offsets = {}
    for name, size in zip(posterior.network.selection.names, posterior.network.selection.sizes, strict=True):
        offsets[name] = slice(start, start + size)
        start += size
    structures = posterior.posterior.curvature.structures()
    assert len(structures) == len(posterior.network.layout)
    for structure, block in zip(structures, posterior.network.layout, strict=True):
        linear = {"kron_expand": "KroneckerBlock", "ekron_expand": "EigenBlock"}[method]
        assert structure == (linear if block.linear else "FullBlock")
        if not block.linear:
            part = offsets[block.weight]
            assert_close(matrix[part, part], ggn[part, part])


def test_large_blocks_that_are_no_linear_map_are_diagonal() -> None:
    case = BY_NAME["transformer_layer"]
    model = case.build()
    _, ggn = problems.dense_ggn(case, model)
    posterior = lw.fit(model, problems.batches(case), "classification", method=lw.Kron(full_limit=8), prior=1.0)
    structures = dict(
        zip([b.weight for b in posterior.network.layout], posterior.posterior.curvature.structures(), strict=True)
    )
    assert structures["place"] == "DiagonalBlock"  # 32 entries
    assert structures["layer.norm1.weight"] == "FullBlock"  # 8 entries
    part = assembled(posterior.posterior.curvature)[:32, :32]
    assert posterior.network.selection.names[0] == "place"
    assert_close(part, torch.diag(ggn.diagonal()[:32]))
