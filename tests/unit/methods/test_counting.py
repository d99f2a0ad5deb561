"""Operations counted while a computation runs, against PyTorch's own counter and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.operations import OperationCount

NETWORKS = {
    "linear": (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (4, 5)),
    "convolution": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)), (4, 2, 6, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_products_are_those_of_the_other_counter(name: str) -> None:
    model, shape = NETWORKS[name]
    x, parameters = torch.randn(shape), list(model.parameters())
    with OperationCount() as count:
        torch.autograd.grad(model(x).sum(), parameters)
    with FlopCounterMode(display=False) as other:
        torch.autograd.grad(model(x).sum(), parameters)
    assert count.products == other.get_total_flops() // 2 > 0


def test_numbers_are_those_written() -> None:
    x = torch.ones(4, 3)
    with OperationCount() as count:
        (2 * x).t().reshape(-1)[:5].exp()  # the transpose is copied by the reshape, the slice is a view
    assert (count.products, count.numbers) == (0, 12 + 12 + 5)


def test_reserved_memory_is_not_written() -> None:
    with OperationCount() as count:
        torch.empty(1000)
        torch.zeros(3).new_empty(1000)
    assert count.numbers == 3


def test_nothing_is_counted_outside() -> None:
    with OperationCount() as count:
        pass
    torch.ones(3, 3) @ torch.ones(3, 3)
    assert (count.products, count.numbers) == (0, 0)


def test_decompositions_take_cubes() -> None:
    square, rows = torch.eye(3).expand(2, 3, 3), torch.ones(5, 4)
    with OperationCount() as count:
        torch.linalg.eigh(square)
        torch.linalg.svd(rows, full_matrices=False)
        torch.linalg.cholesky(square)
    assert (count.products, count.cubes) == (0, 2 * 27 + 5 * 4 * 4 + 2 * 27)
