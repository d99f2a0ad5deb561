"""Full and Diagonal on every named network: GGN, its diagonal and the variance of f against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME, CASES, Case, _cast
from tests.references import dense
from tests.references.layout import assembled
from tests.tolerances import assert_close

D = torch.float64
PRECISION = 0.75


@pytest.fixture(params=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


def shaped(case: Case, blocks: Tensor) -> Tensor:
    """(N, C, C) of every datum as (B, [T,] C, C)."""
    return blocks.reshape(-1, *case.outputs, case.outputs[-1])


def test_full(case: Case) -> None:
    model = case.build()
    _, expected = problems.dense_ggn(case, model)
    posterior = problems.unchanged(
        model,
        lambda: lw.fit(model, problems.batches(case), problems.likelihood(case), method=lw.Full(), prior=PRECISION),
    )
    assert_close(posterior.curvature.matrix, expected)
    inputs = case.batch(4, seed=1)
    jac = dense.by_datum(dense.jacobian(model, inputs, 4), case.outputs[-1])
    covariance = torch.linalg.inv(expected + PRECISION * torch.eye(len(expected), dtype=D))
    belief = problems.unchanged(model, lambda: posterior.functions(inputs))
    assert_close(belief.cov, shaped(case, dense.output_covariance(jac, covariance)))
    assert_close(belief.variance, belief.cov.diagonal(dim1=-2, dim2=-1))
    assert belief.mean.shape == (4, *case.outputs)
    joint = problems.unchanged(model, lambda: posterior.functions(inputs, joint=True))
    size = belief.mean.numel()
    assert joint.cov.shape == (*belief.mean.shape, *belief.mean.shape)
    assert_close(joint.cov.reshape(size, size), dense.joint_covariance(jac, covariance))


def test_diagonal(case: Case) -> None:
    model = case.build()
    _, expected = problems.dense_ggn(case, model)
    posterior = problems.unchanged(
        model,
        lambda: lw.fit(model, problems.batches(case), problems.likelihood(case), method=lw.Diagonal(), prior=PRECISION),
    )
    matrix = assembled(posterior.curvature)
    assert torch.equal(matrix, torch.diag(matrix.diagonal()))
    assert_close(matrix.diagonal(), expected.diagonal())
    inputs = case.batch(4, seed=1)
    jac = dense.by_datum(dense.jacobian(model, inputs, 4), case.outputs[-1])
    covariance = torch.diag(1 / (expected.diagonal() + PRECISION))
    belief = problems.unchanged(model, lambda: posterior.functions(inputs))
    assert_close(belief.cov, shaped(case, dense.output_covariance(jac, covariance)))
    joint = posterior.functions(inputs, joint=True)
    size = belief.mean.numel()
    assert_close(joint.cov.reshape(size, size), dense.joint_covariance(jac, covariance))


def test_low_rank_at_full_rank(case: Case) -> None:
    model = case.build()
    _, expected = problems.dense_ggn(case, model)
    method = lw.LowRank(rank=len(expected))
    posterior = lw.fit(model, problems.batches(case), problems.likelihood(case), method=method, prior=PRECISION)
    curvature = posterior.curvature
    assert_close(curvature.vectors.T @ torch.diag(curvature.values) @ curvature.vectors, expected)
    inputs = case.batch(4, seed=1)
    jac = dense.by_datum(dense.jacobian(model, inputs, 4), case.outputs[-1])
    covariance = torch.linalg.inv(expected + PRECISION * torch.eye(len(expected), dtype=D))
    assert_close(posterior.functions(inputs).cov, shaped(case, dense.output_covariance(jac, covariance)))


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "token_level"])
def test_low_rank_at_the_rank_of_the_ggn(name: str) -> None:
    """As documented: exact when the rank is at least the rank of the GGN, here data times (classes - 1)."""
    case = BY_NAME[name]
    model = case.build()
    _, expected = problems.dense_ggn(case, model)
    rank = int(torch.linalg.matrix_rank(expected))
    assert rank < len(expected)
    posterior = lw.fit(
        model, problems.batches(case), problems.likelihood(case), method=lw.LowRank(rank=rank), prior=1.0
    )
    curvature = posterior.curvature
    assert_close(curvature.vectors.T @ torch.diag(curvature.values) @ curvature.vectors, expected)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "attention", "squeezed"])
@pytest.mark.parametrize(
    "method",
    [lw.Full(), lw.Diagonal(), lw.Kron(), lw.EKron(), lw.LowRank(rank=12), lw.ELLA(400, 12, True), lw.VaLLA(400)],
    ids=lambda method: type(method).__name__,
)
def test_float32_agrees_with_float64(name: str, method: object) -> None:
    case = BY_NAME[name]
    model = case.build(torch.float32)
    wide = case.build(torch.float32).double()
    data = problems.batches(case, dtype=torch.float32)
    data64 = [(_cast(x, D), y) for x, y in data]
    # A precision well above the rounding of the curvature, so that the comparison is about the code.
    options = {"method": method, "prior": 4.0}
    narrow = lw.fit(model, data, problems.likelihood(case), **options)
    exact = lw.fit(wide, data64, problems.likelihood(case), **options)
    inputs = case.batch(4, torch.float32, seed=1)
    found, expected = narrow.functions(inputs), exact.functions(_cast(inputs, D))
    assert found.cov.dtype == torch.float32
    assert_close(found.cov, expected.cov, 0.5)
    assert_close(narrow.log_evidence(), exact.log_evidence(), 0.5, dtype=torch.float32)


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "lstm"])
@pytest.mark.parametrize(
    "method",
    [lw.Full(), lw.Diagonal(), lw.Kron(), lw.EKron(), lw.LowRank(rank=6), lw.baselines.MapOnly(), lw.ELLA(400, 6, True),
     lw.VaLLA(400)],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_bfloat16_runs_and_is_near(name: str, method: object) -> None:
    case = BY_NAME[name]
    model = case.build(torch.bfloat16)
    wide = case.build(torch.bfloat16).float()
    data = problems.batches(case, dtype=torch.bfloat16)
    data32 = [(_cast(x, torch.float32), y) for x, y in data]
    narrow = problems.unchanged(model, lambda: lw.fit(model, data, problems.likelihood(case), method=method, prior=4.0))
    exact = lw.fit(wide, data32, problems.likelihood(case), method=method, prior=4.0)
    inputs = case.batch(4, torch.bfloat16, seed=1)
    found = problems.unchanged(model, lambda: narrow.predict(inputs))
    expected = exact.predict(_cast(inputs, torch.float32))
    assert_close(found.probs, expected.probs, dtype=torch.bfloat16)
    spread, wanted = narrow.functions(inputs).std, exact.functions(_cast(inputs, torch.float32)).std
    if not isinstance(method, lw.baselines.MapOnly):
        assert_close(spread, wanted, dtype=torch.bfloat16)
    draws = narrow.function_samples(inputs, 3, torch.Generator().manual_seed(1))
    assert draws.shape == (3, 4, *case.outputs)
    assert bool(torch.isfinite(draws).all())


def test_many_outputs_build_the_covariance_only_when_asked() -> None:
    """Above 32 outputs variance and covariance have recipes of their own; they agree, and with brute force."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 37)).double()
    x, y = torch.randn(6, 3, dtype=D), torch.randint(0, 37, (6,))
    jac = dense.jacobian(model, x, 6)
    expected = dense.ggn(jac, dense.softmax_hessian(model(x).detach()))
    covariance = torch.linalg.inv(expected + PRECISION * torch.eye(len(expected), dtype=D))
    blocks = dense.output_covariance(jac, covariance)
    for weights, cov in ((lw.all_weights, blocks), (lw.last_layer, None)):
        for method in (lw.Full(), lw.Kron(), lw.EKron(), lw.Diagonal(), lw.LowRank(rank=10)):
            posterior = lw.fit(model, [(x, y)], "classification", method=method, weights=weights, prior=PRECISION)
            variance = posterior.functions(x).variance
            full = posterior.functions(x).cov
            assert_close(variance, full.diagonal(dim1=1, dim2=2))
            if cov is not None and isinstance(method, lw.Full):
                assert_close(full, cov)


@pytest.mark.parametrize("method", [lw.Full(), lw.Diagonal()])
def test_subnetwork_of_single_weights(method: object) -> None:
    case = BY_NAME["cnn"]
    model = case.build()
    jac, whole = problems.dense_ggn(case, model)
    index = torch.randperm(len(whole), generator=torch.Generator().manual_seed(2))[:9].sort().values
    posterior = lw.fit(model, problems.batches(case), "classification", method=method, weights=lw.subnetwork(index),
                       prior=PRECISION)  # fmt: skip
    ggn = whole[index][:, index]
    ggn = ggn if isinstance(method, lw.Full) else torch.diag(ggn.diagonal())
    precision = ggn + PRECISION * torch.eye(9, dtype=D)
    inputs = case.batch(4, seed=1)
    jac = dense.jacobian(model, inputs, 4)[..., index]
    covariance = torch.linalg.inv(precision)
    assert_close(posterior.functions(inputs).cov, dense.output_covariance(jac, covariance))
    rows = posterior.posterior.precision.sample(torch.eye(9, dtype=D))
    assert_close(rows.T @ rows, covariance)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])[index]
    loss = posterior.posterior.statistics.loss
    expected = -loss + 0.5 * (9 * math.log(PRECISION) - PRECISION * theta @ theta - torch.logdet(precision))
    assert_close(posterior.log_evidence(), expected)


@pytest.mark.parametrize("method", [lw.Kron(), lw.EKron()])
def test_subnetwork_has_no_kronecker_structure(method: object) -> None:
    case = BY_NAME["mlp"]
    with pytest.raises(lw.errors.UnsupportedError, match=r"no Kronecker structure; use Full\(\) or Diagonal\(\)"):
        lw.fit(case.build(), problems.batches(case), "classification", method=method,
               weights=lw.subnetwork(torch.arange(5)))  # fmt: skip
