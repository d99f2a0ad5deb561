"""Leading eigenpairs of symmetric operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.linalg.krylov import leading_eigenpairs
from tests.tolerances import SOLVED, assert_close

D = torch.float64


def operator(values: Tensor) -> Tensor:
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=D))
    return basis @ torch.diag(values) @ basis.T


def product(matrix: Tensor) -> object:
    return lambda rows: rows @ matrix


@pytest.mark.parametrize("block", [1, 4, 16, 100])
def test_at_full_rank_the_operator_itself(block: int, generator: torch.Generator) -> None:
    matrix = operator(torch.linspace(3, 0.1, 30, dtype=D))
    pairs = leading_eigenpairs(product(matrix), 30, 30, block=block, generator=generator)
    assert_close(pairs.vectors.T @ torch.diag(pairs.values) @ pairs.vectors, matrix)
    assert_close(pairs.vectors @ pairs.vectors.T, torch.eye(30, dtype=D))
    assert_close(pairs.values, torch.linalg.eigvalsh(matrix).flip(0))
    assert float(pairs.residuals.max()) <= 1e-10


@pytest.mark.parametrize("rank", [6, 9, 40])
def test_an_operator_of_lower_rank_ends_early_and_exactly(rank: int, generator: torch.Generator) -> None:
    values = torch.cat([torch.linspace(5, 1, 6, dtype=D), torch.zeros(74, dtype=D)])
    matrix = operator(values)
    pairs = leading_eigenpairs(product(matrix), 80, rank, block=4, generator=generator)
    assert_close(pairs.vectors.T @ torch.diag(pairs.values) @ pairs.vectors, matrix)
    assert pairs.products <= 5


def test_a_rank_that_just_suffices(generator: torch.Generator) -> None:
    """Rank 24 with eigenvalues over six orders: every one of them is there, the smallest to six digits."""
    values = torch.cat([torch.logspace(0, -6, 24, dtype=D), torch.zeros(76, dtype=D)])
    matrix = operator(values)
    pairs = leading_eigenpairs(product(matrix), 100, 24, tolerance=1e-14, generator=generator)
    assert_close(pairs.vectors.T @ torch.diag(pairs.values) @ pairs.vectors, matrix)
    assert float(pairs.values[23] / values[23]) == pytest.approx(1, rel=1e-6)


def test_leading_pairs_of_a_steep_spectrum(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.linalg.krylov.OVERSAMPLE", 72)
    matrix = operator(torch.logspace(0, -12, 200, dtype=D))
    pairs = leading_eigenpairs(product(matrix), 200, 8, block=4, tolerance=1e-9, generator=generator)
    exact, vectors = torch.linalg.eigh(matrix)
    assert_close(pairs.values, exact.flip(0)[:8], SOLVED)
    overlap = (pairs.vectors @ vectors.flip(1)[:, :8]).abs()
    assert_close(overlap, torch.eye(8, dtype=D), SOLVED)
    residual = (pairs.vectors @ matrix - pairs.values[:, None] * pairs.vectors).norm(dim=1) / exact.max()
    # Both are relative to the largest eigenvalue, and known to the rounding of a product of length 200.
    assert float((pairs.residuals - residual).abs().max()) < 200 * torch.finfo(D).eps


def test_residuals_say_how_far_off_the_pairs_are(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = operator(torch.linspace(2, 1, 300, dtype=D))  # hardly any gap: a small basis cannot do it
    pairs = leading_eigenpairs(product(matrix), 300, 5, block=5, tolerance=1e-8, generator=generator)
    residual = (pairs.vectors @ matrix - pairs.values[:, None] * pairs.vectors).norm(dim=1) / pairs.values[0]
    assert_close(pairs.residuals, residual)
    assert float(residual.max()) > 1e-3
    monkeypatch.setattr("lapwing.linalg.krylov.OVERSAMPLE", 295)
    assert float(leading_eigenpairs(product(matrix), 300, 5, block=5, generator=generator).residuals.max()) <= 1e-3


@pytest.mark.parametrize(("rank", "block"), [(5, 16), (7, 4), (1, 6)])
def test_the_last_block_is_whole_and_the_residuals_are_true(rank: int, block: int, generator: torch.Generator) -> None:
    """Where max(2 rank, rank + 20) is no multiple of the block; with as many products as that takes."""
    matrix, limit = operator(torch.linspace(2, 1, 300, dtype=D)), max(2 * rank, rank + 20)
    seen = []
    pairs = leading_eigenpairs(
        lambda rows: seen.append(len(rows)) or rows @ matrix, 300, rank, block=block, tolerance=1e-12,
        generator=generator,
    )  # fmt: skip
    assert seen[2:] == [block] * -(-limit // block)  # after the two that look at the operator
    assert pairs.products == len(seen) - 2
    residual = (pairs.vectors @ matrix - pairs.values[:, None] * pairs.vectors).norm(dim=1) / pairs.values[0]
    assert_close(pairs.residuals, residual)


def test_eigenvalues_repeated_more_often_than_the_block_is_wide(generator: torch.Generator) -> None:
    """A Krylov space from three vectors has three eigenvectors of each eigenvalue; the rest must be there too."""
    values = torch.cat([torch.full((7,), 2.0, dtype=D), torch.full((5,), 0.5, dtype=D), torch.zeros(28, dtype=D)])
    matrix = operator(values)
    pairs = leading_eigenpairs(product(matrix), 40, 12, block=3, tolerance=1e-10, generator=generator)
    assert_close(pairs.values, values[:12])


def test_nothing_comes_of_nothing(generator: torch.Generator) -> None:
    pairs = leading_eigenpairs(lambda rows: torch.zeros_like(rows), 12, 3, generator=generator)
    assert bool((pairs.values == 0).all())
    assert bool(torch.isfinite(pairs.vectors).all())


def test_equal_generators_give_equal_pairs() -> None:
    matrix = operator(torch.linspace(3, 0.1, 30, dtype=D))
    one, two = (leading_eigenpairs(product(matrix), 30, 4, block=4, generator=torch.Generator().manual_seed(1))
                for _ in range(2))  # fmt: skip
    assert torch.equal(one.vectors, two.vectors)
