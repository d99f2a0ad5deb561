"""Bases against dense matrices: what each is in coordinates, and that the rest of a thin one is all that is left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.linalg.dense import Axes, Basis, FullBasis, ThinBasis
from tests.tolerances import assert_close

D = torch.float64
GROUPS, SIZE, RANK = 2, 7, 3


def orthonormal(groups: int) -> Tensor:
    return torch.linalg.qr(torch.randn(groups, SIZE, SIZE, dtype=D)).Q


def made(kind: str, groups: int, scaled: bool) -> tuple[Basis, Tensor, Tensor]:
    """A basis with one eigenvalue for each part, and the matrices (G, d, d) that they stand for."""
    vectors, scale = orthonormal(groups), torch.rand(groups, SIZE, dtype=D) + 0.5
    root = scale if scaled else torch.ones_like(scale)
    given = scale if scaled else None
    if kind == "full":
        values = torch.rand(groups, SIZE, dtype=D) + 0.1
        basis: Basis = FullBasis(root.unsqueeze(-1) * vectors)
        matrix = vectors @ torch.diag_embed(values) @ vectors.mT
    elif kind == "axes":
        values = torch.rand(groups, SIZE, dtype=D) + 0.1
        basis, matrix = Axes(given), torch.diag_embed(values)
    else:
        values = torch.rand(groups, RANK + 1, dtype=D) + 0.1
        basis = ThinBasis(vectors[..., :RANK], given)
        each = torch.cat([values[:, :RANK], values[:, RANK:].expand(groups, SIZE - RANK)], 1)
        matrix = vectors @ torch.diag_embed(each) @ vectors.mT
    return basis, values, root.unsqueeze(-1) * matrix * root.unsqueeze(-2)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("groups", [1, GROUPS])
@pytest.mark.parametrize("kind", ["full", "axes", "thin"])
def test_a_basis_is_the_matrix_in_coordinates(kind: str, groups: int, scaled: bool) -> None:
    basis, values, matrix = made(kind, groups, scaled)
    x, y = torch.randn(2, 5, groups, 4, SIZE, dtype=D)
    a, b = basis.coordinates(x), basis.coordinates(y)
    weights = basis.expand(values, a.shape[-1]).unsqueeze(-2)
    assert_close((a * weights * b).sum(-1), (x @ matrix * y).sum(-1))
    assert_close(basis.combine(a * weights), x @ matrix)
    assert_close(basis.diagonal(values.unsqueeze(-2)).squeeze(-2), matrix.diagonal(dim1=-2, dim2=-1))
    lengths = basis.lengths(x)
    assert_close((lengths.square() * basis.expand(values, lengths.shape[-1]).unsqueeze(-2)).sum(-1),
                 (x @ matrix * x).sum(-1))  # fmt: skip


@pytest.mark.parametrize("kind", ["full", "axes", "thin"])
def test_a_root_of_the_matrix_and_its_transpose(kind: str) -> None:
    basis, values, matrix = made(kind, GROUPS, scaled=True)
    x, eps = torch.randn(2, 3, GROUPS, 4, SIZE, dtype=D)
    root = lambda rows: basis.combine(basis.draw(rows) * weights.sqrt())
    adjoint = lambda rows: basis.draw_transposed(basis.coordinates(rows) * weights.sqrt())
    weights = basis.expand(values, basis.coordinates(x).shape[-1]).unsqueeze(-2)
    assert_close(root(adjoint(x)), x @ matrix)
    assert_close((adjoint(x) * eps).sum(-1), (x * root(eps)).sum(-1))


def test_the_rest_has_the_mean_of_its_directions() -> None:
    basis, _, _ = made("thin", GROUPS, scaled=False)
    assert isinstance(basis, ThinBasis)
    x = torch.randn(GROUPS, 9, SIZE, dtype=D)
    pooled = basis.pool(basis.coordinates(x).square().sum(1))
    assert_close(pooled @ basis.counts, x.square().sum((1, 2)))  # the trace
    assert_close(pooled[:, :RANK], (x @ basis.vectors).square().sum(1))
    assert basis.counts.tolist() == [1.0] * RANK + [SIZE - RANK]
