"""Every curvature on every named network, against dense matrices."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.methods import weight_space
from lapwing.posteriors.base import Posterior
from tests import problems
from tests.cases import BY_NAME, CASES, Case, Wrapped, cast
from tests.conformance.declared import LAWFUL, exact_entries, lawful_entries, power
from tests.references import dense, kfac
from tests.references.layout import assembled, order, places
from tests.tolerances import assert_close, assert_within

# Every method on every named network, against the dense GGN by brute force, and in lower precision.

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
    posterior = problems.unchanged(model, lambda: problems.fit(case, chosen, model=model, prior=PRECISION))
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


def test_the_matrices_of_full_low_rank_and_diagonal(case: Case) -> None:
    """As documented, LowRank is exact at the rank of the GGN. Beliefs under a diagonal are compared below."""
    model = case.build()
    expected, _ = reference(case.name)
    thin_method = lw.LowRank(rank=int(torch.linalg.matrix_rank(expected)))
    full, thin, diagonal = (
        problems.fit(case, method, model=model, prior=PRECISION).posterior.curvature
        for method in (lw.Full(), thin_method, lw.Diagonal())
    )
    assert_close(full.matrix, expected)
    assert_close(thin.vectors.T @ torch.diag(thin.values) @ thin.vectors, expected)
    assert_close(assembled(diagonal), torch.diag(expected.diagonal()))


ROWS = 400  # more than those of any named network with six data


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
    posterior = problems.fit(case, method, model=model, weights=lw.subnetwork(index), prior=PRECISION)
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


# Kron, EKron, LowRank and inducing points against the dense matrices they stand for, on every named network.

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
        rows = curvature.anchors.combine(curvature.mix.T)
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
    case: Case, method: str, fits: dict[str, lw.Fitted]
) -> None:
    before, (_, new_jacobian) = fitted(fits, case, method), reference(case.name)
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
    unseen = posterior.posterior.curvature.missing_trace(torch.tensor(PHI, dtype=D), posterior.prior)
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
def test_every_block_keeps_the_trace_of_the_ggn(case: Case, sharing: str, fits: dict[str, lw.Fitted]) -> None:
    """EKron's eigenvalues are exact in its basis, so its trace is; it is a GGN's diagonal in that basis."""
    ggn, _ = reference(case.name)
    posterior, kron = (fitted(fits, case, f"{method}_{sharing}") for method in ("ekron", "kron"))
    matrix = assembled(posterior.posterior.curvature)
    assert_close(matrix.trace(), ggn.trace())
    # The best diagonal in the Kronecker basis is no further from the GGN than the Kronecker product itself.
    near, far = (float((m - ggn).detach().norm()) for m in (matrix, assembled(kron.posterior.curvature)))
    assert near <= far * (1 + 1e-12)


@pytest.mark.parametrize("method", ["kron_expand", "ekron_expand"])
def test_parameters_outside_linear_maps_get_their_own_exact_block(
    case: Case, method: str, fits: dict[str, lw.Fitted]
) -> None:
    posterior, (ggn, _) = fitted(fits, case, method), reference(case.name)
    matrix = assembled(posterior.posterior.curvature)
    selection = posterior.network.selection
    offsets = dict(zip(selection.names, torch.arange(selection.size).split(selection.sizes), strict=True))
    structures = posterior.posterior.curvature.structures()
    assert len(structures) == len(posterior.network.layout)
    for structure, block in zip(structures, posterior.network.layout, strict=True):
        linear = {"kron_expand": "KroneckerBlock", "ekron_expand": "EigenBlock"}[method]
        assert structure == (linear if block.linear else "FullBlock")
        if not block.linear:
            part = offsets[block.weight]
            assert_close(matrix[part][:, part], ggn[part][:, part])


def test_large_blocks_that_are_not_linear_maps_are_diagonal() -> None:
    case = BY_NAME["transformer_layer"]
    model = case.build()
    _, ggn = problems.dense_ggn(case, model)
    posterior = problems.fit(case, lw.Kron(full_limit=8), model=model, prior=1.0)
    structures = dict(
        zip([b.weight for b in posterior.network.layout], posterior.posterior.curvature.structures(), strict=True)
    )
    assert structures["place"] == "DiagonalBlock"  # 32 entries
    assert structures["layer.norm1.weight"] == "FullBlock"  # 8 entries
    part = assembled(posterior.posterior.curvature)[:32, :32]
    assert posterior.network.selection.names[0] == "place"
    assert_close(part, torch.diag(ggn.diagonal()[:32]))


# Kronecker factors against the papers' definitions, and the regimes where they are exact.

SHARING = ["expand", "reduce"]


def softmax_root(f: Tensor) -> Tensor:
    """Columns of the symmetric root of diag(p) - p pᵀ, (C, C), as seeds."""
    p = f.softmax(-1)
    values, vectors = torch.linalg.eigh(torch.diag(p) - torch.outer(p, p))
    return (vectors * values.clamp_min(0).sqrt()).T


def identity_root(f: Tensor) -> Tensor:
    return torch.eye(len(f), dtype=D)


def token_roots(f: Tensor) -> list[Tensor]:
    """Every token a datum of its own: seeds that are zero elsewhere."""
    seeds = []
    for t, one in enumerate(f):
        for column in softmax_root(one):
            seed = torch.zeros_like(f)
            seed[t] = column
            seeds.append(seed)
    return seeds


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, (2, 3), groups=2, padding=1), nn.Tanh(), nn.Conv2d(6, 6, 2, groups=6, stride=(1, 2)), nn.Tanh(),
        nn.Conv2d(6, 5, 2, dilation=2, padding="same", bias=False), nn.Flatten(), nn.Linear(30, 3),
    )  # fmt: skip


def sequence() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)
    )


def per_token() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (BY_NAME["mlp"].model, (4,)),
    "cnn": (BY_NAME["cnn"].model, (2, 7, 8)),
    "conv1d": (BY_NAME["conv1d"].model, (2, 7)),
    "grouped": (grouped, (4, 3, 5)),
    "sequence": (sequence, (3, 4)),
}


def compare(model: nn.Module, data: list[Any], root: Any, sharing: str, likelihood: Any) -> None:
    posterior = lw.fit(model, data, likelihood, method=lw.Kron(sharing=sharing), prior=1.0)
    expected = kfac.factors(model, torch.cat([x for x, _ in data]), root, sharing)
    assert [block.weight for block in posterior.network.layout] == [name + ".weight" for name in expected]
    for block, structure, factors in zip(
        posterior.network.layout, posterior.posterior.curvature.blocks, expected.values(), strict=True
    ):
        assert structure.rows == factors.rows
        assert_close(structure.inp.dense(), factors.inp)
        assert_close(structure.out.dense(), factors.out)
        assert_close(structure.dense(), factors.dense())
        assert (block.bias is not None) == (factors.inp.shape[-1] == torch.Size(block.shape[1:]).numel() + 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sharing", SHARING)
def test_factors_are_the_papers(name: str, sharing: str) -> None:
    make, shape = MODELS[name]
    model = make().double()
    x, y = torch.randn(6, *shape, dtype=D), torch.randint(0, 3, (6,))
    compare(model, problems.split(x, y, (3, 1, 2)), softmax_root, sharing, lw.Categorical())
    compare(model, problems.split(x, torch.randn(6, 3, dtype=D), (3, 1, 2)), identity_root, sharing,
            lw.Gaussian(noise_std=0.5))  # fmt: skip


@pytest.mark.parametrize("sharing", SHARING)
def test_factors_of_token_level_outputs(sharing: str) -> None:
    model = per_token().double()
    x, y = torch.randn(6, 4, 4, dtype=D), torch.randint(0, 3, (6, 4))
    compare(model, problems.split(x, y, (3, 1, 2)), token_roots, sharing, lw.Categorical())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sharing", SHARING)
def test_eigenvalues_are_the_ggns_diagonal_in_the_kronecker_basis(name: str, sharing: str) -> None:
    make, shape = MODELS[name]
    model = make().double()
    x, y = torch.randn(6, *shape, dtype=D), torch.randint(0, 3, (6,))
    posterior = lw.fit(model, problems.split(x, y, (3, 1, 2)), "classification", method=lw.EKron(sharing=sharing),
                       prior=1.0)  # fmt: skip
    ggn = dense.ggn(dense.jacobian(model, x, 6), dense.softmax_hessian(model(x).detach()))
    factors = kfac.factors(model, x, softmax_root, sharing)
    where = places(posterior.network.selection.names, posterior.network.selection.shapes)
    for block, structure in zip(posterior.network.layout, posterior.posterior.curvature.blocks, strict=True):
        index = order(block, where)
        mine = ggn[index][:, index]
        each = factors[block.weight.removesuffix(".weight")]
        size = len(index) // len(structure.values)
        for group, values in enumerate(structure.values):
            out, inp = structure.out.vectors[group], structure.inp.vectors[group]
            for basis, factor in ((out, each.out[group]), (inp, each.inp[group])):
                assert_close(basis.T @ basis, torch.eye(len(basis), dtype=D))
                turned = basis.T @ factor @ basis
                off = turned - torch.diag(turned.diagonal())
                assert float(off.abs().max()) <= 1e-10 * float(factor.abs().max())
            basis = torch.kron(out, inp)
            part = slice(group * size, (group + 1) * size)
            assert_close(values.reshape(-1), (basis.T @ mine[part, part] @ basis).diagonal())


def block_by_block(ggn: Tensor, posterior: lw.Fitted) -> Tensor:
    """The GGN without the coupling between blocks and between groups."""
    where = places(posterior.network.selection.names, posterior.network.selection.shapes)
    total = torch.zeros_like(ggn)
    for block in posterior.network.layout:
        for index in order(block, where).reshape(block.groups, -1):
            total[index[:, None], index[None, :]] = ggn[index[:, None], index[None, :]]
    return total


# Networks whose weights are each used once per sample: T = 1 everywhere.
UNSHARED = ["mlp", "norms", "frozen_weight", "frozen_bias", "free_parameter", "weight_norm", "squeezed", "tuple_input"]


@pytest.mark.parametrize("name", UNSHARED)
@pytest.mark.parametrize("method", [lw.Kron(), lw.Kron(sharing="reduce"), lw.EKron(), lw.EKron(sharing="reduce")])
def test_one_datum_is_exact_within_each_block(name: str, method: Any) -> None:
    case = BY_NAME[name]
    model = case.build()
    _, ggn = problems.dense_ggn(case, model, 1)
    posterior = lw.fit(model, problems.batches(case, (1,)), problems.likelihood(case), method=method, prior=1.0)
    assert_close(assembled(posterior.posterior.curvature), block_by_block(ggn, posterior))


@pytest.mark.parametrize("method", [lw.Kron(), lw.Kron(sharing="reduce"), lw.EKron(), lw.EKron(sharing="reduce")])
def test_one_token_of_an_embedding_is_exact(method: Any) -> None:
    model = Wrapped(
        lambda m, tokens: m.head(torch.tanh(m.table(tokens))), table=nn.Embedding(7, 4), head=nn.Linear(4, 3)
    ).double()
    tokens = torch.tensor([5])
    posterior = lw.fit(model, [(tokens, torch.tensor([1]))], "classification", method=method, prior=1.0)
    assert posterior.network.layout[0].kind == "columns"
    ggn = dense.ggn(dense.jacobian(model, tokens, 1), dense.softmax_hessian(model(tokens).detach()))
    assert_close(assembled(posterior.posterior.curvature), block_by_block(ggn, posterior))


@pytest.mark.parametrize("method", [lw.Kron, lw.EKron])
def test_reduce_is_exact_for_a_mean_over_positions(method: Any) -> None:
    """f = mean over t of W a_t + b, Gaussian: one linear map of the mean input. The bias counts once, not T times."""
    model = Wrapped(lambda m, x: m.lin(x).mean(1), lin=nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 5, 4, dtype=D), torch.randn(6, 3, dtype=D)
    ggn = dense.ggn(dense.jacobian(model, x, 6), torch.eye(3, dtype=D).expand(6, 3, 3))
    data, likelihood = problems.split(x, y, (3, 1, 2)), lw.Gaussian(noise_std=1.0)
    reduced = lw.fit(model, data, likelihood, method=method(sharing="reduce"), prior=1.0)
    assert_close(assembled(reduced.posterior.curvature), ggn)
    expanded = lw.fit(model, data, likelihood, method=method(), prior=1.0)
    gap = (assembled(expanded.posterior.curvature) - ggn).abs().max() / ggn.abs().max()
    assert float(gap) > 0.01  # positions are no data of their own here


@pytest.mark.parametrize("method", [lw.Kron, lw.EKron])
def test_expand_is_exact_for_token_level_outputs(method: Any) -> None:
    """Every token a datum: as many rows as tokens, the bias with its own ones."""
    model = Wrapped(lambda m, x: m.lin(x), lin=nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 5, 4, dtype=D), torch.randn(6, 5, 3, dtype=D)
    jac = dense.by_datum(dense.jacobian(model, x, 6), 3)
    ggn = dense.ggn(jac, torch.eye(3, dtype=D).expand(30, 3, 3))
    data, likelihood = problems.split(x, y, (3, 1, 2)), lw.Gaussian(noise_std=1.0)
    posterior = lw.fit(model, data, likelihood, method=method(), prior=1.0)
    assert_close(assembled(posterior.posterior.curvature), ggn)
    assert posterior.posterior.statistics.data == 30


@pytest.mark.parametrize("sharing", SHARING)
def test_the_bias_of_a_shared_layer_adds_its_positions_before_squaring(sharing: str) -> None:
    """One image, one output: the bias's own GGN entry is (Σ_t g_t)² under reduce, Σ_t g_t² under expand."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 1)).double()
    x = torch.randn(1, 2, 4, 5, dtype=D)
    posterior = lw.fit(model, [(x, torch.zeros(1, 1, dtype=D))], lw.Gaussian(noise_std=1.0),
                       method=lw.Kron(sharing=sharing), prior=1.0)  # fmt: skip
    hidden = model[0](x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model[1:](hidden).sum(), hidden)
    g = g[0].reshape(3, -1)
    matrix = assembled(posterior.posterior.curvature)
    bias = slice(2 * 3 * 4, 2 * 3 * 4 + 3)
    assert posterior.network.selection.names[1] == "0.bias"
    if sharing == "reduce":
        expected = torch.outer(g.sum(1), g.sum(1))
        exact = dense.ggn(dense.jacobian(model, x, 1), torch.ones(1, 1, 1, dtype=D))[bias, bias]
        assert_close(expected, exact)
    else:
        expected = g @ g.T
    assert_close(matrix[bias, bias], expected)


def test_an_embedding_keeps_counts_and_no_input_matrix() -> None:
    case = BY_NAME["embedding"]
    posterior = problems.fit(case, lw.Kron(), prior=1.0)
    (block,) = [b for b, layout in zip(posterior.posterior.curvature.blocks, posterior.network.layout, strict=True)
                if layout.weight == "table.weight"]  # fmt: skip
    tokens = case.batch(6).reshape(-1)
    assert int((tokens == 0).sum()) > 0  # padding, which gets no gradient and does not count
    assert block.inp.values.tolist() == [[0.0, *(float((tokens == t).sum()) for t in range(1, 7))]]
    assert block.rows == int((tokens != 0).sum())


# Which curvature: the exact GGN, its sampled estimate, the Hessian of the loss.


def small() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    return model, torch.randn(5, 2, dtype=D), torch.randint(0, 4, (5,))


def exact_ggn(model: nn.Module, x: Tensor) -> Tensor:
    return dense.ggn(dense.jacobian(model, x, len(x)), dense.softmax_hessian(model(x).detach()))


@pytest.mark.parametrize("make", [lw.Full, lw.Diagonal, lw.Kron, lw.EKron])
def test_sampled_fisher_is_unbiased(make: Any) -> None:
    """The mean of independent estimates is the exact curvature, within its own standard error.

    For Kron that holds for the output factors, for EKron for the trace of every block.
    """
    model, x, y = small()
    n = 150
    exact = exact_ggn(model, x)
    draws = []
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    plain = lw.fit(model, batches, "classification", method=make(), prior=1.0)
    problem, data = plain.posterior.problem, Data(batches, torch.device("cpu"))
    for seed in range(n):  # without the checks of lw.fit, which would take most of the time
        posterior = make(curvature="fisher_mc").fit(problem, data, torch.Generator().manual_seed(seed))
        curvature = posterior.curvature
        if make is lw.Full:
            draws.append(curvature.matrix)
        elif make is lw.Diagonal:
            draws.append(assembled(curvature).diagonal())
        elif make is lw.Kron:
            draws.append(torch.cat([block.out.dense().reshape(-1) for block in curvature.blocks]))
        else:
            draws.append(torch.stack([block.dense().trace() for block in curvature.blocks]))
    expected = {
        lw.Full: lambda: exact,
        lw.Diagonal: lambda: exact.diagonal(),
        lw.Kron: lambda: torch.cat([block.out.dense().reshape(-1) for block in plain.posterior.curvature.blocks]),
        lw.EKron: lambda: torch.stack([exact[:9, :9].trace(), exact[9:, 9:].trace()]),
    }[make]()
    assert_within(torch.stack(draws), expected)


def test_sampled_fisher_of_tokens_draws_every_token_by_itself() -> None:
    """E[g gᵀ] has no terms between tokens only if their seeds are kept apart, draw by draw."""
    model = Wrapped(lambda m, x: m.lin(x), lin=nn.Linear(2, 3)).double()
    x, y = torch.randn(2, 4, 2, dtype=D), torch.randint(0, 3, (2, 4))
    exact = dense.ggn(
        dense.by_datum(dense.jacobian(model, x, 2), 3), dense.softmax_hessian(model(x).detach().reshape(-1, 3))
    )
    problem = lw.fit(model, [(x, y)], "classification", method=lw.Full(), prior=1.0).posterior.problem
    data = Data([(x, y)], torch.device("cpu"))
    draws = [
        lw.Full(curvature="fisher_mc").fit(problem, data, torch.Generator().manual_seed(seed)) for seed in range(150)
    ]
    assert_within(torch.stack([draw.curvature.matrix for draw in draws]), exact)


def loss_hessian(model: nn.Module, names: list[str], loss: Any) -> Tensor:
    """Of loss(outputs) in the named parameters, by autograd on the flat vector."""
    tensors = dict(model.named_parameters())
    shapes = [tensors[name].shape for name in names]

    def of(theta: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in shapes])
        values = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return loss(lambda x: functional_call(model, values, x))

    return torch.autograd.functional.hessian(of, torch.cat([tensors[name].detach().reshape(-1) for name in names]))


@pytest.mark.parametrize("likelihood", ["classification", "regression", "poisson", "heteroscedastic"])
def test_hessian_is_autograds(likelihood: str) -> None:
    model, x, y = small()
    targets = {
        "classification": y, "regression": torch.randn(5, 4, dtype=D), "poisson": torch.randint(0, 4, (5, 4)),
        "heteroscedastic": torch.randn(5, 2, dtype=D),
    }[likelihood]  # fmt: skip
    losses = {
        "classification": lambda f: nn.functional.cross_entropy(f, targets, reduction="sum"),
        "regression": lambda f: 0.5 * (f - targets).square().sum(),
        "poisson": lambda f: (f.exp() - targets * f).sum(),
        "heteroscedastic": lambda f: -Normal(f[:, :2], (0.5 * f[:, 2:]).exp()).log_prob(targets).sum(),
    }  # fmt: skip
    names = [name for name, _ in model.named_parameters()]
    expected = loss_hessian(model, names, lambda run: losses[likelihood](run(x)))
    chosen = lw.Gaussian(noise_std=1.0) if likelihood == "regression" else likelihood
    posterior = problems.unchanged(
        model,
        lambda: lw.fit(model, [(x[:2], targets[:2]), (x[2:], targets[2:])], chosen, prior=1e3,
                       method=lw.Full(curvature="hessian")),
    )  # fmt: skip
    assert_close(posterior.posterior.curvature.matrix, expected)
    assert float(torch.linalg.eigvalsh(expected).min()) < 0  # the case that a GGN would hide
    covariance = torch.linalg.inv(expected + 1e3 * torch.eye(len(expected), dtype=D))
    assert_close(posterior.functions(x).cov, dense.output_covariance(dense.jacobian(model, x, 5), covariance))
    assert_close(posterior.posterior.curvature.logdet(torch.tensor(1.0, dtype=D), posterior.prior),
                 -torch.linalg.slogdet(covariance)[1])  # fmt: skip


@pytest.mark.parametrize("weights", [lw.last_layer, lw.named("0"), lw.subnetwork(torch.tensor([0, 7, 11, 20]))])
def test_hessian_of_some_weights(weights: Any) -> None:
    model, x, y = small()
    posterior = lw.fit(
        model, [(x, y)], "classification", prior=1e3, weights=weights, method=lw.Full(curvature="hessian")
    )
    names = [name for name, _ in model.named_parameters()]
    whole = loss_hessian(model, names, lambda run: nn.functional.cross_entropy(run(x), y, reduction="sum"))
    index = {9: torch.arange(9), 16: torch.arange(9, 25), 4: torch.tensor([0, 7, 11, 20])}[
        posterior.network.selection.size
    ]
    assert_close(posterior.posterior.curvature.matrix, whole[index][:, index])


@pytest.mark.parametrize("name", ["lstm", "embedding", "attention", "token_level"])
def test_hessian_of_a_linear_head_is_its_ggn(name: str) -> None:
    """f is linear in the last layer, so the two agree: through any body, double backward included."""
    case = BY_NAME[name]
    model, data = case.build(), problems.batches(case)
    one, two = (lw.fit(model, data, "classification", method=lw.Full(curvature=c), weights="last_layer", prior=1.0)
                for c in ("hessian", "ggn"))  # fmt: skip
    assert_close(one.posterior.curvature.matrix, two.posterior.curvature.matrix)


def test_the_limit_follows_the_byte_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """25 weights: four matrices of 8 P² bytes in four times the budget. 30,000 weights are always accepted."""
    model, x, y = small()
    run = lambda: lw.fit(model, [(x, y)], "classification", method=lw.Full(), prior=1.0)
    with lw.memory.limited(4_000):
        run()
    monkeypatch.setattr(weight_space, "ALWAYS", 10)
    with lw.memory.limited(5_000):
        run()
    with lw.memory.limited(4_000):
        with pytest.raises(lw.errors.UnsupportedError, match=r"over 25 weights .* the limit is 22 weights"):
            run()
        assert lw.check(model, x).costs["Full"].note == "over 22 weights: choose fewer"


def test_more_weights_than_the_limit_are_refused() -> None:
    model, x, y = small()
    with pytest.raises(lw.errors.UnsupportedError, match=r"over 25 weights.*the limit is 10 weights.*Kron\(\)"):
        lw.fit(model, [(x, y)], "classification", method=lw.Full(limit=10))
