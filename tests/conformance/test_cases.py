"""Every method on every named network, against the dense GGN by brute force, and in lower precision."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.posteriors.base import Posterior
from tests import problems
from tests.cases import BY_NAME, CASES, Case, cast
from tests.conformance.declared import LAWFUL, exact_entries, lawful_entries, power
from tests.references import dense
from tests.references.layout import assembled
from tests.tolerances import assert_close

D = torch.float64
PRECISION = 0.75


@pytest.fixture(scope="module", params=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


EXACT_ANYWHERE = [name for name, entry in exact_entries().items() if entry.scope == "network"]


@lru_cache(maxsize=2)
def reference(name: str) -> tuple[Tensor, Tensor]:
    """The dense GGN (P, P), and the Jacobian of four new inputs with every token as a datum."""
    case = BY_NAME[name]
    _, ggn = problems.dense_ggn(case, case.build())
    return ggn, dense.by_datum(dense.jacobian(case.build(), case.batch(4, seed=1), 4), case.outputs[-1])


@pytest.mark.parametrize("method", EXACT_ANYWHERE)
def test_exact_methods_have_the_covariance_of_the_dense_ggn(case: Case, method: str) -> None:
    entry, model = exact_entries()[method], case.build()
    ggn, jac = reference(case.name)
    chosen = entry.settings(len(ggn), problems.TOTAL * math.prod(case.outputs))
    posterior = problems.unchanged(
        model, lambda: lw.fit(model, problems.batches(case), problems.likelihood(case), method=chosen, prior=PRECISION)
    )
    covariance = torch.linalg.inv(ggn + PRECISION * torch.eye(len(ggn), dtype=D))
    inputs = case.batch(4, seed=1)
    belief = problems.unchanged(model, lambda: posterior.functions(inputs))
    assert_close(belief.cov, shaped(case, dense.output_covariance(jac, covariance)), power(entry))
    assert_close(belief.variance, belief.cov.diagonal(dim1=-2, dim2=-1))
    assert belief.mean.shape == (4, *case.outputs)
    joint = problems.unchanged(model, lambda: posterior.functions(inputs, joint=True))
    size = belief.mean.numel()
    assert joint.cov.shape == (*belief.mean.shape, *belief.mean.shape)
    assert_close(joint.cov.reshape(size, size), dense.joint_covariance(jac, covariance), power(entry))
    if posterior.posterior.provides(Posterior.log_evidence):
        theta = posterior.network.theta()
        logdet = torch.logdet(ggn / PRECISION + torch.eye(len(ggn), dtype=D))
        expected = -posterior.posterior.statistics.loss - 0.5 * (PRECISION * theta @ theta + logdet)
        assert_close(posterior.log_evidence(), expected, power(entry))


def shaped(case: Case, blocks: Tensor) -> Tensor:
    """(N, C, C) of every datum as (B, [T,] C, C)."""
    return blocks.reshape(-1, *case.outputs, case.outputs[-1])


def test_the_matrices_of_full_and_low_rank(case: Case) -> None:
    model = case.build()
    expected, _ = reference(case.name)
    options = {"likelihood": problems.likelihood(case), "prior": PRECISION}
    full = lw.fit(model, problems.batches(case), method=lw.Full(), **options).posterior.curvature
    assert_close(full.matrix, expected)
    thin = lw.fit(model, problems.batches(case), method=lw.LowRank(rank=len(expected)), **options).posterior.curvature
    assert_close(thin.vectors.T @ torch.diag(thin.values) @ thin.vectors, expected)


def test_diagonal(case: Case) -> None:
    model = case.build()
    expected, jac = reference(case.name)
    posterior = problems.unchanged(
        model,
        lambda: lw.fit(model, problems.batches(case), problems.likelihood(case), method=lw.Diagonal(), prior=PRECISION),
    )
    matrix = assembled(posterior.posterior.curvature)
    assert torch.equal(matrix, torch.diag(matrix.diagonal()))
    assert_close(matrix.diagonal(), expected.diagonal())
    inputs = case.batch(4, seed=1)
    covariance = torch.diag(1 / (expected.diagonal() + PRECISION))
    belief = problems.unchanged(model, lambda: posterior.functions(inputs))
    assert_close(belief.cov, shaped(case, dense.output_covariance(jac, covariance)))
    joint = posterior.functions(inputs, joint=True)
    size = belief.mean.numel()
    assert_close(joint.cov.reshape(size, size), dense.joint_covariance(jac, covariance))


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
    curvature = posterior.posterior.curvature
    assert_close(curvature.vectors.T @ torch.diag(curvature.values) @ curvature.vectors, expected)


ROWS = 400  # more than those of any named network with six data


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "attention", "squeezed"])
@pytest.mark.parametrize("entry", LAWFUL)
def test_float32_agrees_with_float64(name: str, entry: str) -> None:
    """Twelve directions, for methods that choose some: so few are well above the rounding of float32."""
    case, method = BY_NAME[name], lawful_entries()[entry].settings(12, ROWS)
    model = case.build(torch.float32)
    wide = case.build(torch.float32).double()
    data = problems.batches(case, dtype=torch.float32)
    data64 = [(cast(x, D), y) for x, y in data]
    # A precision well above the rounding of the curvature, so that the comparison is about the code.
    options = {"method": method, "prior": 4.0}
    narrow = lw.fit(model, data, problems.likelihood(case), **options)
    exact = lw.fit(wide, data64, problems.likelihood(case), **options)
    inputs = case.batch(4, torch.float32, seed=1)
    belief, expected = narrow.functions(inputs), exact.functions(cast(inputs, D))
    assert belief.cov.dtype == torch.float32
    assert_close(belief.cov, expected.cov, 0.5)
    if narrow.posterior.provides(Posterior.log_evidence):
        assert_close(narrow.log_evidence(), exact.log_evidence(), 0.5, dtype=torch.float32)


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "lstm"])
@pytest.mark.parametrize("entry", ["map_only", *LAWFUL])
def test_bfloat16_runs_and_is_near(name: str, entry: str) -> None:
    case = BY_NAME[name]
    plain = entry == "map_only"
    method = lw.baselines.MapOnly() if plain else lawful_entries()[entry].settings(6, ROWS)
    model = case.build(torch.bfloat16)
    wide = case.build(torch.bfloat16).float()
    data = problems.batches(case, dtype=torch.bfloat16)
    data32 = [(cast(x, torch.float32), y) for x, y in data]
    narrow = problems.unchanged(model, lambda: lw.fit(model, data, problems.likelihood(case), method=method, prior=4.0))
    exact = lw.fit(wide, data32, problems.likelihood(case), method=method, prior=4.0)
    inputs = case.batch(4, torch.bfloat16, seed=1)
    predictive = problems.unchanged(model, lambda: narrow.predict(inputs))
    expected = exact.predict(cast(inputs, torch.float32))
    assert_close(predictive.probs, expected.probs, dtype=torch.bfloat16)
    spread, wanted = narrow.functions(inputs).std, exact.functions(cast(inputs, torch.float32)).std
    if not plain:
        assert_close(spread, wanted, dtype=torch.bfloat16)
    if narrow.posterior.provides(Posterior.function_samples):
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
