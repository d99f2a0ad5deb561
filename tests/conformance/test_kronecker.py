"""Kronecker factors against the papers' definitions, and the regimes where they are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.references import dense, kfac
from tests.references.layout import assembled, order, places
from tests.tolerances import assert_close

D = torch.float64
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
    posterior = lw.fit(case.build(), problems.batches(case), "classification", method=lw.Kron(), prior=1.0)
    (block,) = [b for b, layout in zip(posterior.posterior.curvature.blocks, posterior.network.layout, strict=True)
                if layout.weight == "table.weight"]  # fmt: skip
    tokens = case.batch(6).reshape(-1)
    assert int((tokens == 0).sum()) > 0  # padding, which gets no gradient and does not count
    assert block.inp.values.tolist() == [[0.0, *(float((tokens == t).sum()) for t in range(1, 7))]]
    assert block.rows == int((tokens != 0).sum())


def test_unknown_sharing_is_refused() -> None:
    for method in (lw.Kron, lw.EKron):
        with pytest.raises(lw.errors.UnsupportedError, match="sharing is 'sum'; expected one of expand, reduce"):
            method(sharing="sum")
