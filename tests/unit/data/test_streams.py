"""Streams of inputs, numbers of samples, and rows drawn without regard to batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lapwing as lw
import lapwing.data.streams
from lapwing.data.batches import Data
from lapwing.data.inputs import Batch, SampleRows, is_loader, per_sample_in_both, take
from lapwing.data.streams import DrawnRows, InputStream, concat_inputs, draw_numbers, shuffle_batches
from lapwing.errors import DataError
from tests import problems

# What is a loader and what are inputs, and the inputs of every item of a loader.

CPU = torch.device("cpu")
X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10)
ONE: frozenset[str] = frozenset()
TWO = frozenset({"inputs[0]", "inputs[1]"})
NAMED = frozenset({"inputs['x']", "inputs['y']"})


class Sharded(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X.split(4), Y.split(4), strict=True)


INPUTS: list[tuple[Any, frozenset[str]]] = [
    (X, ONE), ((X, X), TWO), ((X,), ONE), ({"x": X}, ONE), ({"x": X, "y": X}, NAMED), ([X, X], TWO),
    (pack_sequence([X[:3], X[:2]]), ONE), (lw.samples.OneSample((X,)), ONE), (np.zeros((3, 2)), ONE), (3.0, ONE),
    ("text", ONE), (None, ONE), (nn.Linear(1, 1), ONE),
]  # fmt: skip
LOADERS: list[tuple[Any, frozenset[str]]] = [
    (DataLoader(TensorDataset(X, Y), 4), ONE), (TensorDataset(X, Y), ONE), (Sharded(), ONE), (iter([X]), ONE),
    ((part for part in X.split(4)), ONE), ([(X, Y), (X, Y)], ONE), ([X, X], ONE), ([{"x": X, "y": X}], NAMED),
    ([(X, X), (X, X)], TWO), ([((X, X), Y)], TWO), (lw.samples.unpacked([X], lambda x: (x, Y)), ONE),
]  # fmt: skip


@pytest.mark.parametrize(("given", "places"), INPUTS)
def test_inputs_in_place_of_a_loader_are_refused(given: Any, places: frozenset[str]) -> None:
    assert not is_loader(given, places)


@pytest.mark.parametrize(("given", "places"), LOADERS)
def test_a_loader(given: Any, places: frozenset[str]) -> None:
    assert is_loader(given, places)


def read(source: Any, places: frozenset[str] = ONE, **settings: Any) -> list[Any]:
    return list(InputStream(source, CPU, places, **settings))


@pytest.mark.parametrize(
    "item", [X, (X,), [X], (X, Y), [X, Y], (X, "a name"), {"x": X}, {"x": X, "labels": Y}, {"x": X, "y": Y}]
)
def test_one_tensor_with_or_without_targets(item: Any) -> None:
    (inputs,) = read([item])
    assert torch.equal(inputs["x"] if isinstance(inputs, dict) else inputs, X)
    assert not isinstance(inputs, dict) or list(inputs) == ["x"]


@pytest.mark.parametrize("item", [(X, -X), [X, -X], ((X, -X), Y), [[X, -X], Y], ((X, -X),)])
def test_two_tensors_with_or_without_targets(item: Any) -> None:
    ((one, two),) = read([item], TWO)
    assert torch.equal(one, X)
    assert torch.equal(two, -X)


def test_a_key_of_the_inputs_is_not_the_target() -> None:
    """Though "y" is the name of a target elsewhere; "labels" is one here, and so is the key that is given."""
    (inputs,) = read([{"x": X, "y": -X}], NAMED)
    assert list(inputs) == ["x", "y"]
    (inputs,) = read([{"x": X, "y": -X, "labels": Y}], NAMED)
    assert list(inputs) == ["x", "y"]
    (inputs,) = read([{"x": X, "answer": Y}], target_key="answer")
    assert list(inputs) == ["x"]
    (inputs,) = read([{"y": X}])  # the only tensor is no target
    assert list(inputs) == ["y"]


@pytest.mark.parametrize(
    ("item", "places", "message"),
    [
        ((X, X, X), ONE, "batch 0 is a tuple of 3; expected inputs, or .inputs, targets.*lw.samples.unpacked"),
        ((X, Y), frozenset({"inputs['a']", "inputs['b']"}), r"with the tensors inputs\['a'\], inputs\['b'\]"),
        ("text", ONE, "batch 0 is a str; expected inputs"),
        (3.0, ONE, "batch 0 is a float; expected inputs"),
    ],
)
def test_other_items_are_refused_with_the_remedy(item: Any, places: frozenset[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read([item], places)


def test_batches_without_rows_are_left_out_and_nothing_at_all_is_refused() -> None:
    assert torch.equal(torch.cat(read([X[:4], X[:0], (X[4:], Y[4:])])), X)
    for empty in ([], [X[:0]], iter([])):
        with pytest.raises(DataError, match="the loader is empty: no batch was yielded"):
            read(empty)


def test_numbers_that_are_not_finite_name_their_batch() -> None:
    with pytest.raises(DataError, match="inputs of batch 1: 1 of 2 entries are NaN or infinite"):
        read([X, torch.tensor([[torch.nan, 1.0]])])


def test_small_batches_of_plain_tensors_are_joined() -> None:
    parts = read(X.split(1), rows=4)
    assert [len(part) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat(parts), X)
    other = read([X[:1], X[:1].double(), X[:1, :1], {"x": X}, X[:1]], rows=4)
    assert len(other) == 5  # never those of another dtype or shape
    assert read([X, X[:1]], rows=4)[0] is X  # nor one that is large enough, which is not copied


def test_a_dataset_of_single_samples() -> None:
    assert torch.equal(torch.cat(read(TensorDataset(X, Y))), X)
    assert torch.equal(torch.cat(read(Sharded())), X)
    assert torch.equal(torch.cat(read(DataLoader(Sharded(), None))), X)


# How many samples a batch has, and which tensors have a row for each.

INPUTS_X, CONTEXT = torch.randn(5, 3), torch.randn(4, 4)


def test_only_tensors_with_a_row_for_each_sample_are_cut() -> None:
    part = take((INPUTS_X, CONTEXT, INPUTS_X[:, 0]), (True, False, True), slice(1, 3))
    assert torch.equal(part[0], INPUTS_X[1:3])
    assert part[1] is CONTEXT
    assert torch.equal(part[2], INPUTS_X[1:3, 0])
    assert torch.equal(take(INPUTS_X, (True,), torch.tensor([4, 0])), INPUTS_X[[4, 0]])


def test_a_batch_tells_by_its_numbers_of_rows_and_later_ones_remember() -> None:
    rows = SampleRows()
    assert rows.count(INPUTS_X) == rows.count((INPUTS_X, INPUTS_X[:, 0])) == 5
    assert rows.count((INPUTS_X, CONTEXT)) is None  # either may be the samples
    assert rows.per_sample((INPUTS_X, CONTEXT), 5) == (True, False)
    rows = rows.with_batch((INPUTS_X, CONTEXT), 5)
    assert rows.count((INPUTS_X[:4], CONTEXT)) == 4
    assert rows.per_sample((INPUTS_X[:4], CONTEXT), 4) == (True, False)
    assert not rows.is_undecided((INPUTS_X[:4], CONTEXT), 4)


def test_as_many_rows_by_chance_are_open_until_a_batch_tells() -> None:
    assert SampleRows().is_undecided((INPUTS_X[:4], CONTEXT), 4)
    assert not SampleRows().is_undecided((INPUTS_X[:1], CONTEXT[:1]), 1)  # one sample shows nothing
    assert not SampleRows().is_undecided(INPUTS_X, 5)
    seen = SampleRows().with_batch((INPUTS_X[:4], CONTEXT), 4)
    with pytest.raises(DataError, match=r"inputs\[1\] has 4 rows for 5 samples and had one for each sample"):
        seen.refuse_change((INPUTS_X, CONTEXT), 5)
    seen.refuse_change((INPUTS_X, CONTEXT[:1]), 5)  # one row is spread over all samples


def test_what_is_shared_in_one_batch_is_shared_in_both() -> None:
    assert per_sample_in_both((), (True, False)) == (True, False)
    assert per_sample_in_both((True, True), (True, False)) == (True, False)
    with pytest.raises(DataError, match="batches of 1 and of 2 input tensors; expected as many"):
        per_sample_in_both((True,), (True, False))


@pytest.mark.parametrize("inputs", [torch.tensor(1.0), {"a": torch.tensor(1.0)}, "text", ()])
def test_inputs_without_rows_are_refused(inputs: object) -> None:
    with pytest.raises(DataError, match=r"hold no tensor with a batch dimension; expected \(B, ...\)"):
        SampleRows().count(inputs)


# Rows of the data, drawn without regard to batches.

CPU = torch.device("cpu")
N = 20
ROWS, NUMBERS = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N)


def drawn(most: int, sizes: tuple[int, ...] = (N,), seed: int = 0, inputs: Any = ROWS) -> DrawnRows:
    return DrawnRows.draw(Data(problems.split(inputs, NUMBERS, sizes), CPU), most, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("most", [1, 7, N])
def test_rows_of_the_data_in_their_order_and_each_once(most: int) -> None:
    pool = drawn(most, (8, 1, 11))
    assert len(pool) == most
    assert pool.total == N
    numbers = pool.targets.tolist()
    assert numbers == sorted(set(numbers))
    assert torch.equal(pool.inputs, ROWS[pool.targets])


def test_all_of_them_where_there_are_no_more() -> None:
    pool = drawn(1000, (8, 1, 11))
    assert torch.equal(pool.inputs, ROWS)
    assert torch.equal(pool.targets, NUMBERS)


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
    monkeypatch.setattr(lapwing.data.streams, "KEYS_AT_ONCE", 64)
    monkeypatch.setattr(torch, "cat", lambda parts: (sizes.append(sum(map(len, parts))), plain(parts))[1])
    assert torch.equal(draw_numbers(1000, 20, torch.Generator().manual_seed(5)), whole)
    assert max(sizes) <= 20 + 64


@pytest.mark.parametrize("parts", [[ROWS, torch.randn(2, 4)], [(ROWS, NUMBERS), (ROWS, torch.zeros(2, 3))]])
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
    data = [((x, context), y) for x, y in problems.split(ROWS, NUMBERS, sizes)]
    pool = DrawnRows.draw(Data(data, CPU), most, torch.Generator().manual_seed(0))
    assert torch.equal(pool.inputs[0], ROWS[pool.targets])
    assert torch.equal(pool.inputs[1], context)
    again = pool.rows(torch.zeros(3, dtype=torch.long))
    assert torch.equal(again[0], pool.inputs[0][[0, 0, 0]])
    assert torch.equal(again[1], context)


@pytest.mark.parametrize("name", SHARED)
def test_one_that_differs_between_batches_is_refused(name: str) -> None:
    data = [((x, SHARED[name] + i), y) for i, (x, y) in enumerate(problems.split(ROWS, NUMBERS, (9, 11)))]
    with pytest.raises(lw.errors.DataError, match=r"has no row for each sample, and is not the same in all batches"):
        DrawnRows.draw(Data(data, CPU), N)


def test_batches_of_other_tensors_are_refused() -> None:
    with pytest.raises(lw.errors.DataError, match="batches of 1 and of 2 input tensors; expected as many"):
        DrawnRows.draw(Data([(ROWS[:9], NUMBERS[:9]), ((ROWS[9:], ROWS[9:]), NUMBERS[9:])], CPU), 5)


def test_keys_in_another_order_are_refused() -> None:
    """Columns are joined by their place."""
    data = [
        ({"a": ROWS[:9], "b": ROWS[:9] + 1}, NUMBERS[:9]),
        ({"b": ROWS[9:] + 1, "a": ROWS[9:]}, NUMBERS[9:]),
    ]
    with pytest.raises(lw.errors.DataError, match="different keys or nestings; expected the same in all"):
        DrawnRows.draw(Data(data, CPU), N)


# Batches without end.


class Loader:
    """Batches that are not in memory before they are asked for; counts how often."""

    def __init__(self, sizes: tuple[int, ...], context: Tensor | None = None) -> None:
        self.sizes, self.context, self.passes = sizes, context, 0

    def __iter__(self) -> Any:
        self.passes += 1
        for x, y in problems.split(ROWS, NUMBERS, self.sizes):
            yield (x, y) if self.context is None else ({"x": x, "context": self.context}, y)


def batches(source: Any, size: int, count: int, seed: int = 0, **options: Any) -> list[Batch]:
    return list(islice(shuffle_batches(Data(source, CPU), size, torch.Generator().manual_seed(seed), **options), count))


@pytest.mark.parametrize("sizes", [(1,) * N, (8, 1, 11), (19, 1)])
@pytest.mark.parametrize("listed", [True, False])
def test_rows_are_drawn_from_all_data_however_they_are_cut(sizes: tuple[int, ...], listed: bool) -> None:
    """In the same order; a step on sorted data, one by one, is a step on a random part of them."""
    source = problems.split(ROWS, NUMBERS, sizes) if listed else Loader(sizes)
    drawn_batches, whole = batches(source, 5, 12), batches([(ROWS, NUMBERS)], 5, 12)
    for one, other in zip(drawn_batches, whole, strict=True):
        assert one.targets.tolist() == other.targets.tolist()
        assert torch.equal(one.inputs, ROWS[one.targets])
        assert len(one.targets) == 5
    for start in (0, 4, 8):
        assert sorted(torch.cat([b.targets for b in drawn_batches[start : start + 4]]).tolist()) == NUMBERS.tolist()
    assert drawn_batches[0].targets.tolist() != drawn_batches[4].targets.tolist()
    assert [b.targets.tolist() for b in batches(source, 5, 12, seed=1)] != [b.targets.tolist() for b in drawn_batches]


@pytest.mark.parametrize(("size", "expected"), [(3, [3] * 6 + [2]), (6, [6, 6, 6]), (7, [7, 7, 6]), (50, [N])])
def test_few_rows_that_are_left_do_not_stand_for_all(size: int, expected: list[int]) -> None:
    """Two left of six wait for the next pass."""
    assert [len(b.targets) for b in batches([(ROWS, NUMBERS)], size, 2 * len(expected))] == 2 * expected


def test_data_that_are_kept_are_read_once() -> None:
    loader = Loader((8, 1, 11))
    batches(loader, 5, 40)
    assert loader.passes == 1


def test_of_more_data_than_are_kept_neighbours_are_joined() -> None:
    """Four batches of two rows take what eight rows do; no more are kept, and every pass reads them again."""
    loader, row = Loader((2,) * 10), ROWS[0].numel() * 4 + 8
    drawn_batches = batches(loader, 4, 10, kept=8 * row)
    assert [len(b.targets) for b in drawn_batches] == [4] * 10
    ends = [(0, 8), (8, 16), (16, 20)]
    for pair, (low, high) in zip((drawn_batches[:2], drawn_batches[2:4], drawn_batches[4:5]), ends, strict=True):
        assert sorted(torch.cat([b.targets for b in pair]).tolist()) == list(range(low, high))
    assert loader.passes == 2
    listed = batches(problems.split(ROWS, NUMBERS, (2,) * 10), 4, 5, kept=8 * row)  # in memory as it is
    assert max(listed[0].targets.tolist()) >= 8


def test_batches_of_several_tensors() -> None:
    context = torch.randn(8, 3)
    for batch in batches(Loader((8, 1, 11), context), 8, 6):
        assert torch.equal(batch.inputs["x"], ROWS[batch.targets])
        assert torch.equal(batch.inputs["context"], context)


def test_a_loader_is_read_again_where_its_batches_are_to_be_fresh() -> None:
    """What it draws anew, as augmentation does, stays new; a list is the same at every pass."""
    loader = Loader((8, 1, 11))
    drawn_batches = batches(loader, 5, 40, fresh=True)
    assert loader.passes == 10
    assert sorted(torch.cat([b.targets for b in drawn_batches[4:8]]).tolist()) == NUMBERS.tolist()
    assert drawn_batches[0].targets.tolist() != drawn_batches[4].targets.tolist()


@pytest.mark.parametrize("listed", [True, False])
def test_rows_that_do_not_fit_together_stay_in_their_batches(listed: bool) -> None:
    """Text that is padded to several lengths, and contexts that are not the same: cut, never joined."""
    data = [
        ((ROWS[:6], torch.zeros(2)), NUMBERS[:6]), ((ROWS[6:8], torch.ones(2) * 0), NUMBERS[6:8]),
        ((ROWS[8:14], torch.ones(2)), NUMBERS[8:14]),
        ((ROWS[14:, :2], torch.ones(2)), NUMBERS[14:]),
    ]  # fmt: skip
    drawn_batches = batches(data if listed else deque(data), 4, 5)
    assert [len(b.targets) for b in drawn_batches] == [4, 4, 4, 2, 4]
    for part, expected in zip((drawn_batches[:2], drawn_batches[2:4]), (range(8), range(8, 14)), strict=True):
        assert sorted(torch.cat([b.targets for b in part]).tolist()) == list(expected)
    for batch in drawn_batches:
        late = min(batch.targets.tolist()) >= 8
        assert torch.equal(batch.inputs[1], torch.full((2,), float(late)))
        assert torch.equal(batch.inputs[0], ROWS[batch.targets][:, : 2 if min(batch.targets.tolist()) >= 14 else 3])


def test_the_default_dtype_does_not_change_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [batch.targets.tolist() for batch in batches([(ROWS, NUMBERS)], 2, 12)]
    monkeypatch.setattr(torch, "rand", partial(_wide, torch.rand))
    assert [batch.targets.tolist() for batch in batches([(ROWS, NUMBERS)], 2, 12)] == before


def _wide(rand: Any, *shape: int, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
    """As under ``set_default_dtype(float64)``, without changing it for other tests."""
    numbers: Tensor = rand(*shape, dtype=dtype, **options)
    return numbers


def test_targets_of_two_shapes_are_refused() -> None:
    x = torch.randn(4, 2)
    with pytest.raises(lw.errors.DataError, match=r"targets of shapes \(1,\) and \(3,\) in two batches"):
        DrawnRows.draw(Data([(x, torch.randn(4, 1)), (x, torch.randn(4, 3))], CPU), 8)
