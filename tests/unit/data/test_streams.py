"""Streams of inputs, and numbers of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lapwing as lw
from lapwing.data.inputs import SampleRows, per_sample_in_both, take
from lapwing.data.streams import InputStream, is_loader
from lapwing.errors import DataError

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
        ("text", ONE, "batch 0 is a 'text'; expected inputs"),
        (3.0, ONE, "batch 0 is a 3.0; expected inputs"),
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
