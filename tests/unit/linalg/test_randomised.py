"""Leading eigenpairs from random vectors, and the preconditioner that they give, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.linalg.krylov import randomised_eigenpairs
from tests.tolerances import SOLVED, assert_close

D = torch.float64
N = 30


def matrix(rank: int = N) -> Tensor:
    """Positive semi-definite with eigenvalues that fall by a factor of three, the first ``rank`` above zero."""
    turn = torch.linalg.qr(torch.randn(N, N, dtype=D, generator=torch.Generator().manual_seed(1)))[0]
    values = 3.0 ** -torch.arange(N, dtype=D)
    values[rank:] = 0.0
    return turn * values @ turn.mT


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_eigenpairs_of_a_matrix_of_low_rank_are_exact() -> None:
    a = matrix(6)
    pairs = randomised_eigenpairs(lambda v: v @ a, N, 12, seed())
    assert_close(pairs.values[:6], 3.0 ** -torch.arange(6, dtype=D))
    assert_close(pairs.vectors.mT * pairs.values @ pairs.vectors, a)
    assert_close(pairs.vectors @ pairs.vectors.mT, torch.eye(len(pairs.values), dtype=D))


def test_leading_eigenvalues_are_near() -> None:
    a = matrix()
    pairs = randomised_eigenpairs(lambda v: v @ a, N, 5, seed())
    assert len(pairs.values) == 5
    assert float((pairs.values - 3.0 ** -torch.arange(5, dtype=D)).abs().max()) < 1e-3 * 3.0**-4


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.5, 1.0])
def test_powers_of_the_preconditioner(exponent: float) -> None:
    a, shift = matrix(6), 0.02
    pairs = randomised_eigenpairs(lambda v: v @ a, N, 8, seed())
    values, turn = torch.linalg.eigh(a + shift * torch.eye(N, dtype=D))
    rows = torch.randn(3, N, dtype=D, generator=seed())
    assert_close(pairs.power(rows, shift, exponent), rows @ (turn * values**exponent @ turn.mT), SOLVED)
    assert pairs.logdet(shift) == pytest.approx(float(values.log().sum()), rel=1e-9)


def test_equal_seeds_give_equal_pairs() -> None:
    a = matrix()
    first, second = (randomised_eigenpairs(lambda v: v @ a, N, 4, seed()) for _ in range(2))
    assert torch.equal(first.vectors, second.vectors)
