"""Sums of products without both halves."""

from __future__ import annotations

import pytest
import torch

from lapwing.linalg.dense import STRIP, Gram, symmetrise
from tests.tolerances import assert_close

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [3, 255, 256, 301, 517])  # below, at and above the sizes that are split
def test_sum_over_calls_equals_one_product(size: int) -> None:
    rows = torch.randn(40, size, dtype=torch.float64)
    total = Gram(size, torch.float64, CPU)
    for part in rows.split((7, 1, 32)):
        total.add(part)
    assert_close(total.value(), rows.T @ rows)


def test_groups_stay_apart() -> None:
    rows = torch.randn(3, 20, 5, dtype=torch.float64)
    total = Gram(5, torch.float64, CPU, groups=3)
    total.add(rows[:, :4])
    total.add(rows[:, 4:])
    assert_close(total.value(), torch.stack([group.T @ group for group in rows]))


def test_one_group_needs_no_dimension() -> None:
    rows = torch.randn(20, 5, dtype=torch.float64)
    flat, grouped = Gram(5, torch.float64, CPU), Gram(5, torch.float64, CPU)
    flat.add(rows)
    grouped.add(rows[None])
    assert torch.equal(flat.value(), grouped.value())


def test_narrow_rows_are_summed_in_the_wide_dtype() -> None:
    rows = torch.ones(4096, 2, dtype=torch.bfloat16)
    total = Gram(2, torch.float32, CPU)
    total.add(rows)
    assert total.value().tolist() == [[4096.0, 4096.0], [4096.0, 4096.0]]


@pytest.mark.parametrize("size", [3, STRIP, 2 * STRIP + 7])
def test_mirrored_in_place(size: int) -> None:
    x = torch.randn(20, size, dtype=torch.float64)
    total = Gram(size, torch.float64, torch.device("cpu"))
    for _ in range(2):  # what is added after the sum was asked for is added to it
        total.add(x)
        value = total.value()
        assert torch.equal(value, value.mT)
    assert_close(value, 2 * x.mT @ x)
    matrix = torch.randn(2, size, size, dtype=torch.float64)
    expected = 0.5 * (matrix + matrix.mT)
    symmetrise(matrix)
    assert torch.equal(matrix, expected)
