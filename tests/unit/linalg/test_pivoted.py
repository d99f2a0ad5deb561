"""Greedy choice of rows of a kernel, against conditional variances by dense solves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.linalg.dense import greedy_pivots, trace_pivots

D = torch.float64


def kernel(size: int, rank: int, seed: int = 0) -> Tensor:
    rows = torch.randn(size, rank, dtype=D, generator=torch.Generator().manual_seed(seed))
    return rows @ rows.T


def left(matrix: Tensor, chosen: list[int]) -> Tensor:
    """The variances that some rows leave."""
    if not chosen:
        return matrix.diagonal()
    across = matrix[:, chosen]
    return (matrix - across @ torch.linalg.solve(matrix[chosen][:, chosen], across.T)).diagonal()


@pytest.mark.parametrize("seed", range(4))
def test_each_has_the_largest_variance_that_those_before_leave(seed: int) -> None:
    matrix = kernel(12, 15, seed)
    pivots = greedy_pivots(matrix, 7).tolist()
    assert len(set(pivots)) == 7
    for i, pivot in enumerate(pivots):
        variances = left(matrix, pivots[:i])
        assert int(variances.argmax()) == pivot


def test_fewer_are_the_first_of_more() -> None:
    matrix = kernel(12, 15)
    many = greedy_pivots(matrix, 9)
    for count in range(1, 9):
        assert torch.equal(greedy_pivots(matrix, count), many[:count])


@pytest.mark.parametrize("rank", [1, 4])
def test_it_ends_where_nothing_is_left(rank: int) -> None:
    matrix = kernel(9, rank)
    pivots = greedy_pivots(matrix, 9)
    assert len(pivots) == rank
    assert float(left(matrix, pivots.tolist()).abs().max()) <= 1e-10 * float(matrix.diagonal().max())


def test_equal_rows_are_taken_once() -> None:
    matrix = kernel(4, 6)[[0, 0, 1, 2, 2, 3]][:, [0, 0, 1, 2, 2, 3]]
    pivots = greedy_pivots(matrix, 6)
    assert len(pivots) == 4
    assert len(set(torch.tensor([0, 0, 1, 2, 2, 3])[pivots].tolist())) == 4


def test_more_than_there_are() -> None:
    assert sorted(greedy_pivots(kernel(5, 8), 50).tolist()) == [0, 1, 2, 3, 4]


def test_a_kernel_of_zeros_has_none() -> None:
    assert greedy_pivots(torch.zeros(3, 3), 2).tolist() == []


def test_single_precision_is_widened() -> None:
    """Conditional variances are differences: in float32 they would be rounding after a few steps."""
    matrix = (kernel(20, 3) + 1e-4 * kernel(20, 30, 1)).float()
    assert torch.equal(greedy_pivots(matrix, 15), greedy_pivots(matrix.double(), 15))


@pytest.mark.parametrize("seed", range(4))
def test_each_takes_the_most_off_the_sum_of_variances(seed: int) -> None:
    matrix = kernel(12, 15, seed)
    pivots = trace_pivots(matrix, 6).tolist()
    assert len(set(pivots)) == 6
    for i, pivot in enumerate(pivots):
        sums = [float(left(matrix, [*pivots[:i], other]).sum()) if other not in pivots[:i] else torch.inf
                for other in range(12)]  # fmt: skip
        assert min(range(12), key=lambda other: sums[other]) == pivot


def test_the_sum_ends_where_nothing_is_left() -> None:
    assert len(trace_pivots(kernel(9, 3), 9)) == 3
