"""Rows of the data, drawn without regard to batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.core.data import Data
from lapwing.curvature.pool import Pool, joined
from tests import problems

CPU = torch.device("cpu")
N = 20
X, Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N)


def drawn(most: int, sizes: tuple[int, ...] = (N,), seed: int = 0, inputs: Any = X) -> Pool:
    return Pool.drawn(Data(problems.split(inputs, Y, sizes), CPU), most, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("most", [1, 7, N])
def test_rows_of_the_data_in_their_order_and_each_once(most: int) -> None:
    pool = drawn(most, (8, 1, 11))
    assert len(pool) == most
    assert pool.total == N
    numbers = pool.targets.tolist()
    assert numbers == sorted(set(numbers))
    assert torch.equal(pool.inputs, X[pool.targets])


def test_all_of_them_where_there_are_no_more() -> None:
    pool = drawn(1000, (8, 1, 11))
    assert torch.equal(pool.inputs, X)
    assert torch.equal(pool.targets, Y)


@pytest.mark.parametrize("sizes", [(1,) * N, (8, 1, 11), (19, 1)])
def test_batches_do_not_matter(sizes: tuple[int, ...]) -> None:
    assert torch.equal(drawn(7, sizes).targets, drawn(7).targets)


def test_the_generator_decides_and_every_row_has_its_chance() -> None:
    assert torch.equal(drawn(7, seed=3).targets, drawn(7, seed=3).targets)
    counts = torch.zeros(N)
    for seed in range(300):
        counts[drawn(7, seed=seed).targets] += 1
    share = 7 / N
    assert float((counts / 300 - share).abs().max()) < 5 * (share * (1 - share) / 300) ** 0.5


def test_nested_inputs() -> None:
    pool = drawn(7, (8, 1, 11), inputs=(X, {"twice": 2 * X}))
    assert torch.equal(pool.inputs[0], X[pool.targets])
    assert torch.equal(pool.inputs[1]["twice"], 2 * X[pool.targets])
    again = pool.rows(torch.tensor([2, 0, 2]))
    assert torch.equal(again[0], X[pool.targets[[2, 0, 2]]])


@pytest.mark.parametrize("parts", [[X, torch.randn(2, 4)], [(X, Y), (X, torch.zeros(2, 3))]])
def test_inputs_of_different_shapes_are_refused(parts: list[Any]) -> None:
    with pytest.raises(
        lw.DataError, match=r"different shapes .* cannot be put into one batch .* Pad all batches alike"
    ):
        joined(parts)


def test_two_passes_over_the_data_and_no_more() -> None:
    passes = []

    class Counting:
        def __iter__(self) -> Any:
            passes.append(1)
            return iter(problems.split(X, Y, (8, 1, 11)))

    Pool.drawn(Data(Counting(), CPU), 7)
    assert len(passes) - 1 == 2  # one look at what kind of data it is


def test_rows_may_repeat() -> None:
    found: Tensor = drawn(5).rows(torch.tensor([1, 1, 4]))
    assert torch.equal(found, drawn(5).inputs[[1, 1, 4]])
