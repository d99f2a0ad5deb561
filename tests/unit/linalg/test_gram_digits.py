"""Sums of products of float32 rows keep small directions, and switch to cheaper products only where that is safe."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.linalg.dense import Gram

CPU = torch.device("cpu")


def summed(chunks: list[Tensor]) -> tuple[Gram, Tensor]:
    total = Gram(chunks[0].shape[1], torch.float64, CPU)
    for chunk in chunks:
        total.add(chunk)
    return total, total.value()


def chunks_of(spread: Tensor, number: int = 30, rows: int = 50) -> list[Tensor]:
    """Return float32 rows whose directions have these lengths, in a basis that mixes all columns."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(len(spread), len(spread), dtype=torch.float64, generator=generator))[0]
    rows_of = lambda: torch.randn(rows, len(spread), dtype=torch.float64, generator=generator) * spread @ basis
    return [rows_of().float() for _ in range(number)]


def relative(value: Tensor, chunks: list[Tensor]) -> float:
    """Return the largest relative error of the sum in any direction."""
    exact = sum((chunk.double().mT @ chunk.double() for chunk in chunks), torch.zeros_like(value))
    factor = torch.linalg.cholesky(exact)
    half = torch.linalg.solve_triangular(factor, value - exact, upper=False)
    return float(torch.linalg.matrix_norm(torch.linalg.solve_triangular(factor, half.mT, upper=False), 2))


def test_small_directions_do_not_drown() -> None:
    chunks = chunks_of(torch.logspace(0, -5, 40, dtype=torch.float64))
    total, value = summed(chunks)
    assert total._narrow is None
    assert relative(value, chunks) < 1e-4


def test_without_small_directions_products_are_cheap_and_lose_little() -> None:
    chunks = chunks_of(torch.logspace(0, -0.8, 40, dtype=torch.float64))
    total, value = summed(chunks)
    assert total._narrow is not None
    assert relative(value, chunks) < 1e-3


def test_columns_of_different_scales_are_no_small_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -6, 20)
    chunks = [torch.randn(50, 20, generator=generator) * scales for _ in range(20)]
    total, value = summed(chunks)
    assert total._narrow is not None
    assert relative(value, chunks) < 1e-3


def test_a_column_of_zeros() -> None:
    chunks = [torch.cat([chunk, torch.zeros(len(chunk), 1)], 1) for chunk in chunks_of(torch.ones(10).double())]
    total, value = summed(chunks)
    assert total._narrow is not None
    assert not value[-1].any()
    assert relative(value[:-1, :-1], [chunk[:, :-1] for chunk in chunks]) < 1e-3


def test_it_goes_back_where_a_direction_becomes_small() -> None:
    """Later rows are a thousand times larger, and collinear."""
    first = chunks_of(torch.ones(10, dtype=torch.float64), number=4)
    later = [1e3 * chunk[:, :1] + chunk for chunk in chunks_of(torch.ones(10, dtype=torch.float64), number=40)]
    total, _ = summed(first + later)
    assert total._narrow is None


def test_runs() -> None:
    chunks = chunks_of(torch.logspace(0, -5, 16, dtype=torch.float64))
    total = Gram(16, torch.float64, CPU)
    for chunk in chunks:
        total.add_runs(chunk.reshape(1, 5, 10, 16))
    assert relative(total.value(), chunks) < 1e-4
