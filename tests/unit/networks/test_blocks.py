"""Products between the Jacobians of two batches: every way to form them gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.networks.dense_jacobian import DenseJacobian, LookupJacobian
from lapwing.networks.linear_jacobian import LinearJacobian
from tests.tolerances import assert_close

D = torch.float64
SHAPES = {  # groups, outputs, samples, positions; those of the other batch; inputs and outputs of the layer
    "one position": ((1, 3, 4, 1), (2, 5, 1), (6, 7)),
    "groups": ((2, 3, 4, 1), (2, 5, 1), (3, 2)),
    "positions": ((1, 3, 4, 5), (2, 3, 5), (6, 7)),
    "groups of positions": ((3, 2, 4, 5), (1, 3, 5), (2, 4)),
    "other positions": ((1, 2, 3, 4), (1, 2, 6), (3, 5)),
}


def pair(name: str) -> tuple[LinearJacobian, LinearJacobian]:
    (groups, outputs, batch, positions), (columns, others, places), (d_in, d_out) = SHAPES[name]
    gen = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, dtype=D, generator=gen)
    return (
        LinearJacobian(draw(groups, batch, positions, d_in), draw(groups, outputs, batch, positions, d_out)),
        LinearJacobian(draw(groups, others, places, d_in), draw(groups, columns, others, places, d_out)),
    )


def weights(name: str) -> Tensor:
    (groups, *_), _, (d_in, d_out) = SHAPES[name]
    return torch.rand(groups, d_out, d_in, dtype=D, generator=torch.Generator().manual_seed(6)) + 0.1


def written_out(one: LinearJacobian, other: LinearJacobian, weights: Tensor | None) -> Tensor:
    """Σ over positions of g ⊗ a for every sample and output, then Σ over entries, (B K, B' K')."""
    left = torch.einsum("gkbto,gbti->bkgoi", one.g, one.a)
    right = torch.einsum("gkbto,gbti->bkgoi", other.g, other.a)
    left = left if weights is None else left * weights
    return torch.einsum("bkgoi,clgoi->bkcl", left, right).flatten(2).flatten(0, 1)


@pytest.mark.parametrize("name", SHAPES)
def test_linear_blocks_are_their_jacobians(name: str) -> None:
    one, other = pair(name)
    assert_close(one.between(other), written_out(one, other, None))
    assert_close(one.between(one), written_out(one, one, None))
    assert_close(one.between(other, weights(name)), written_out(one, other, weights(name)))
    assert_close(one.between(one, weights(name)), written_out(one, one, weights(name)))


@pytest.mark.parametrize("name", SHAPES)
def test_gram_matrices_and_jacobians_agree(name: str) -> None:
    one, other = pair(name)
    expected = written_out(one, other, None)
    assert_close(one._grams(other), expected)
    assert_close(one._outer(other, None), expected)
    assert_close(one._outer(other, torch.ones_like(weights(name))), expected)


@pytest.mark.parametrize("name", SHAPES)
def test_a_small_byte_budget_cuts_the_work_and_changes_nothing(name: str) -> None:
    one, other = pair(name)
    expected = [one._grams(other), one._outer(other, weights(name))]
    with lw.memory.limited(1):
        assert [piece.batch for piece in one.pieces(1)] == [1] * one.batch
        assert_close(one._grams(other), expected[0])
        assert_close(one._outer(other, weights(name)), expected[1])


def test_the_cheaper_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide layer has small Gram matrices, many positions of a narrow one have large ones."""
    wide = LinearJacobian(torch.randn(1, 2, 1, 40, dtype=D), torch.randn(1, 1, 2, 1, 50, dtype=D))
    narrow = LinearJacobian(torch.randn(1, 2, 90, 3, dtype=D), torch.randn(1, 1, 2, 90, 2, dtype=D))
    ways: list[str] = []
    for way in ("_grams", "_outer"):
        original = getattr(LinearJacobian, way)

        def noted(*args: Any, way: str = way, original: Any = original) -> Tensor:
            ways.append(way)
            return original(*args)

        monkeypatch.setattr(LinearJacobian, way, noted)
    wide.between(wide)
    narrow.between(narrow)
    wide.between(wide, torch.ones(1, 50, 40, dtype=D))
    assert ways == ["_grams", "_outer", "_outer"]


@pytest.mark.parametrize("way", ["grams", "outer", "weighted"])
@pytest.mark.parametrize("name", ["groups", "groups of positions"])
def test_differentiable_in_the_factors(name: str, way: str) -> None:
    one, other = pair(name)

    def kernel(a: Tensor, g: Tensor) -> Tensor:
        varied = LinearJacobian(a, g)
        if way == "grams":
            return other._grams(varied)
        return other._outer(varied, weights(name) if way == "weighted" else None)

    assert torch.autograd.gradcheck(kernel, (one.a.requires_grad_(), one.g.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["groups", "positions"])
def test_forms_mix(name: str, weighted: bool) -> None:
    """One batch as factors and the other whole, as after ``compact``."""
    one, other = pair(name)
    given = weights(name) if weighted else None
    whole = DenseJacobian(other.whole().flatten(2))
    assert_close(one.between(whole, given), written_out(one, other, given))
    assert_close(whole.between(one, given), written_out(other, one, given))
    assert_close(whole.between(whole, given), written_out(other, other, given))


def lookup(tokens: list[list[int]], seed: int) -> LookupJacobian:
    index = torch.tensor(tokens)
    g = torch.randn(2, *index.shape, 3, dtype=D, generator=torch.Generator().manual_seed(seed))
    return LookupJacobian.build(index, g, index != 0, 7)


@pytest.mark.parametrize("weighted", [False, True])
def test_tables_meet_in_the_rows_that_both_have(weighted: bool) -> None:
    """Repeated tokens, padding (nought), and tokens that only one batch has."""
    one, other = lookup([[1, 4, 4], [0, 5, 1]], 1), lookup([[4, 2, 0], [5, 5, 5], [6, 6, 2]], 2)
    scale = torch.rand(1, 3, 7, dtype=D) + 0.1 if weighted else None
    rows = [jac.whole().flatten(2).flatten(0, 1) for jac in (one, other)]
    left = rows[0] if scale is None else rows[0] * scale.reshape(-1)
    assert_close(one.between(other, scale), left @ rows[1].T)
    assert_close(one.between(one, scale), left @ rows[0].T)
    assert_close(one.between(DenseJacobian(other.whole().flatten(2)), scale), left @ rows[1].T)
    far = lookup([[3, 3, 3]], 3)
    assert float(one.between(far, scale).abs().max()) == 0
