"""Rows of the data, drawn without regard to batches."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
import lapwing.data.streams
from lapwing.data.batches import Data
from lapwing.data.inputs import Batch
from lapwing.data.streams import Pool, concat_inputs, draw_numbers, shuffle_batches
from tests import problems

CPU = torch.device("cpu")
N = 20
X, Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N)


def drawn(most: int, sizes: tuple[int, ...] = (N,), seed: int = 0, inputs: Any = X) -> Pool:
    return Pool.draw(Data(problems.split(inputs, Y, sizes), CPU), most, torch.Generator().manual_seed(seed))


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


def test_pieces_do_not_matter_and_memory_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw_numbers(1000, 20, torch.Generator().manual_seed(5))
    sizes: list[int] = []
    plain = torch.cat
    monkeypatch.setattr(lapwing.data.streams, "PIECE", 64)
    monkeypatch.setattr(torch, "cat", lambda parts: (sizes.append(sum(map(len, parts))), plain(parts))[1])
    assert torch.equal(draw_numbers(1000, 20, torch.Generator().manual_seed(5)), whole)
    assert max(sizes) <= 20 + 64


@pytest.mark.parametrize("parts", [[X, torch.randn(2, 4)], [(X, Y), (X, torch.zeros(2, 3))]])
def test_inputs_of_different_shapes_are_refused(parts: list[Any]) -> None:
    with pytest.raises(
        lw.errors.DataError, match=r"different shapes .* cannot be put into one batch .* Pad all batches alike"
    ):
        concat_inputs(parts)


# What all samples share.


SHARED = {"zero-dimensional": torch.tensor(1.5), "one number": torch.tensor([1.5]), "rows": torch.randn(8, 3)}


@pytest.mark.parametrize("sizes", [(N,), (8, 1, 11), (8, 12)])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("most", [1, 8, N])
def test_a_tensor_that_all_samples_share_is_kept_once(name: str, sizes: tuple[int, ...], most: int) -> None:
    """Also where it has as many rows as one of the batches, or as the pool, by chance."""
    context = SHARED[name]
    data = [((x, context), y) for x, y in problems.split(X, Y, sizes)]
    pool = Pool.draw(Data(data, CPU), most, torch.Generator().manual_seed(0))
    assert torch.equal(pool.inputs[0], X[pool.targets])
    assert torch.equal(pool.inputs[1], context)
    again = pool.rows(torch.zeros(3, dtype=torch.long))
    assert torch.equal(again[0], pool.inputs[0][[0, 0, 0]])
    assert torch.equal(again[1], context)


@pytest.mark.parametrize("name", SHARED)
def test_one_that_differs_between_batches_is_refused(name: str) -> None:
    data = [((x, SHARED[name] + i), y) for i, (x, y) in enumerate(problems.split(X, Y, (9, 11)))]
    with pytest.raises(lw.errors.DataError, match=r"has no row for each sample, and is not the same in all batches"):
        Pool.draw(Data(data, CPU), N)


def test_batches_of_other_tensors_are_refused() -> None:
    with pytest.raises(lw.errors.DataError, match="batches of 1 and of 2 input tensors; expected as many"):
        Pool.draw(Data([(X[:9], Y[:9]), ((X[9:], X[9:]), Y[9:])], CPU), 5)


def test_keys_in_another_order_are_refused() -> None:
    """Columns are joined by their place."""
    data = [({"a": X[:9], "b": X[:9] + 1}, Y[:9]), ({"b": X[9:] + 1, "a": X[9:]}, Y[9:])]
    with pytest.raises(lw.errors.DataError, match="different keys or nestings; expected the same in all"):
        Pool.draw(Data(data, CPU), N)


# Batches without end.


class Loader:
    """Batches that are not in memory before they are asked for; counts how often."""

    def __init__(self, sizes: tuple[int, ...], context: Tensor | None = None) -> None:
        self.sizes, self.context, self.passes = sizes, context, 0

    def __iter__(self) -> Any:
        self.passes += 1
        for x, y in problems.split(X, Y, self.sizes):
            yield (x, y) if self.context is None else ({"x": x, "context": self.context}, y)


def batches(source: Any, size: int, count: int, seed: int = 0, **options: Any) -> list[Batch]:
    return list(islice(shuffle_batches(Data(source, CPU), size, torch.Generator().manual_seed(seed), **options), count))


@pytest.mark.parametrize("sizes", [(1,) * N, (8, 1, 11), (19, 1)])
@pytest.mark.parametrize("listed", [True, False])
def test_rows_are_drawn_from_all_data_however_they_are_cut(sizes: tuple[int, ...], listed: bool) -> None:
    """In the same order; a step on sorted data, one by one, is a step on a random part of them."""
    source = problems.split(X, Y, sizes) if listed else Loader(sizes)
    drawn_batches, whole = batches(source, 5, 12), batches([(X, Y)], 5, 12)
    for one, other in zip(drawn_batches, whole, strict=True):
        assert one.targets.tolist() == other.targets.tolist()
        assert torch.equal(one.inputs, X[one.targets])
        assert len(one.targets) == 5
    for start in (0, 4, 8):
        assert sorted(torch.cat([b.targets for b in drawn_batches[start : start + 4]]).tolist()) == Y.tolist()
    assert drawn_batches[0].targets.tolist() != drawn_batches[4].targets.tolist()
    assert [b.targets.tolist() for b in batches(source, 5, 12, seed=1)] != [b.targets.tolist() for b in drawn_batches]


@pytest.mark.parametrize(("size", "expected"), [(3, [3] * 6 + [2]), (6, [6, 6, 6]), (7, [7, 7, 6]), (50, [N])])
def test_few_rows_that_are_left_do_not_stand_for_all(size: int, expected: list[int]) -> None:
    """Two left of six wait for the next pass."""
    assert [len(b.targets) for b in batches([(X, Y)], size, 2 * len(expected))] == 2 * expected


def test_data_that_are_kept_are_read_once() -> None:
    loader = Loader((8, 1, 11))
    batches(loader, 5, 40)
    assert loader.passes == 1


def test_of_more_data_than_are_kept_neighbours_are_joined() -> None:
    """Four batches of two rows take what eight rows do; no more are kept, and every pass reads them again."""
    loader, row = Loader((2,) * 10), X[0].numel() * 4 + 8
    drawn_batches = batches(loader, 4, 10, kept=8 * row)
    assert [len(b.targets) for b in drawn_batches] == [4] * 10
    ends = [(0, 8), (8, 16), (16, 20)]
    for pair, (low, high) in zip((drawn_batches[:2], drawn_batches[2:4], drawn_batches[4:5]), ends, strict=True):
        assert sorted(torch.cat([b.targets for b in pair]).tolist()) == list(range(low, high))
    assert loader.passes == 2
    listed = batches(problems.split(X, Y, (2,) * 10), 4, 5, kept=8 * row)  # in memory as it is
    assert max(listed[0].targets.tolist()) >= 8


def test_batches_of_several_tensors() -> None:
    context = torch.randn(8, 3)
    for batch in batches(Loader((8, 1, 11), context), 8, 6):
        assert torch.equal(batch.inputs["x"], X[batch.targets])
        assert torch.equal(batch.inputs["context"], context)


def test_a_loader_is_read_again_where_its_batches_are_to_be_fresh() -> None:
    """What it draws anew, as augmentation does, stays new; a list is the same at every pass."""
    loader = Loader((8, 1, 11))
    drawn_batches = batches(loader, 5, 40, fresh=True)
    assert loader.passes == 10
    assert sorted(torch.cat([b.targets for b in drawn_batches[4:8]]).tolist()) == Y.tolist()
    assert drawn_batches[0].targets.tolist() != drawn_batches[4].targets.tolist()


@pytest.mark.parametrize("listed", [True, False])
def test_rows_that_do_not_fit_together_stay_in_their_batches(listed: bool) -> None:
    """Text that is padded to several lengths, and contexts that are not the same: cut, never joined."""
    data = [
        ((X[:6], torch.zeros(2)), Y[:6]), ((X[6:8], torch.ones(2) * 0), Y[6:8]), ((X[8:14], torch.ones(2)), Y[8:14]),
        ((X[14:, :2], torch.ones(2)), Y[14:]),
    ]  # fmt: skip
    drawn_batches = batches(data if listed else deque(data), 4, 5)
    assert [len(b.targets) for b in drawn_batches] == [4, 4, 4, 2, 4]
    for part, expected in zip((drawn_batches[:2], drawn_batches[2:4]), (range(8), range(8, 14)), strict=True):
        assert sorted(torch.cat([b.targets for b in part]).tolist()) == list(expected)
    for batch in drawn_batches:
        late = min(batch.targets.tolist()) >= 8
        assert torch.equal(batch.inputs[1], torch.full((2,), float(late)))
        assert torch.equal(batch.inputs[0], X[batch.targets][:, : 2 if min(batch.targets.tolist()) >= 14 else 3])


def test_the_default_dtype_does_not_change_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [batch.targets.tolist() for batch in batches([(X, Y)], 2, 12)]
    monkeypatch.setattr(torch, "rand", partial(_wide, torch.rand))
    assert [batch.targets.tolist() for batch in batches([(X, Y)], 2, 12)] == before


def _wide(rand: Any, *shape: int, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
    """As under ``set_default_dtype(float64)``, without changing it for other tests."""
    numbers: Tensor = rand(*shape, dtype=dtype, **options)
    return numbers


def test_targets_of_two_shapes_are_refused() -> None:
    x = torch.randn(4, 2)
    with pytest.raises(lw.errors.DataError, match=r"targets of shapes \(1,\) and \(3,\) in two batches"):
        Pool.draw(Data([(x, torch.randn(4, 1)), (x, torch.randn(4, 3))], CPU), 8)
