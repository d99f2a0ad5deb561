"""The one data loop."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing.core.data import Batch, Data, map_tensors, minibatches, take, tensors_in
from lapwing.core.errors import DataError

X, Y = torch.randn(5, 3), torch.arange(5)
CPU = torch.device("cpu")


def batches(source: Any, **options: Any) -> list[tuple[Any, Tensor]]:
    return [(batch.inputs, batch.targets) for batch in Data(source, CPU, **options).batches("test")]


def test_batches_pass_in_order() -> None:
    found = batches([(X[:2], Y[:2]), [X[2:], Y[2:]]])
    assert [len(y) for _, y in found] == [2, 3]
    assert torch.equal(torch.cat([x for x, _ in found]), X)


def test_one_pair_of_tensors_is_one_batch() -> None:
    assert [len(y) for _, y in batches((X, Y))] == [5]
    ((inputs, _),) = batches(((X, X), Y))
    assert isinstance(inputs, tuple)


def test_two_batches_in_a_tuple_are_two_batches() -> None:
    assert [len(y) for _, y in batches(((X[:2], Y[:2]), (X[2:], Y[2:])))] == [2, 3]


@pytest.mark.parametrize("key", ["labels", "label", "targets", "target", "y"])
def test_mappings_with_a_usual_target(key: str) -> None:
    ((inputs, targets),) = batches([{"x": X, key: Y}])
    assert list(inputs) == ["x"]
    assert torch.equal(targets, Y)


def test_mappings_with_a_named_target() -> None:
    ((inputs, targets),) = batches([{"x": X, "labels": X, "answer": Y}], target_key="answer")
    assert sorted(inputs) == ["labels", "x"]
    assert torch.equal(targets, Y)


def test_targets_that_are_no_tensors_yet() -> None:
    ((_, targets),) = batches([(X, Y.tolist())])
    assert torch.equal(targets, Y)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "data is empty: no batch was yielded; expected at least one"),
        ([{"x": X, "z": Y}], {}, r"keys \['x', 'z'\] has no target; pass target_key"),
        ([{"x": X, "y": Y}], {"target_key": "answer"}, r"keys \['x', 'y'\] has no target"),
        ([X], {}, r"a batch is a Tensor; expected \(inputs, targets\)"),
        ([(X, X, Y)], {}, r"a batch is a tuple of 3; expected \(inputs, targets\).*\(\(x1, x2\), y\)"),
        ([({"answer": X}, Y)], {"target_key": "answer"}, "'answer' names an input"),
        ([(X, Y), (X * float("inf"), Y)], {}, "inputs of batch 1: 15 of 15 entries are NaN or infinite"),
        ([({"a": X, "b": X / 0 * 0}, Y)], {}, "inputs of batch 0: 15 of 15 entries are NaN"),
        ([(X, torch.tensor([0.0, float("nan"), 1.0, 2.0, 3.0]))], {}, "targets of batch 0: 1 of 5 entries are NaN"),
    ],
)
def test_what_is_refused(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        batches(source, **options)


def test_one_shot_iterators_are_refused_before_they_are_used() -> None:
    left = iter([(X, Y)])
    with pytest.raises(DataError, match=r"one-shot iterator.*Give a DataLoader, a list of batches"):
        Data(left, CPU)
    assert next(left)[0] is X


def test_a_progress_bar_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert [len(y) for _, y in batches([(X, Y), (X[:2], Y[:2])], progress=True)] == [5, 2]
    assert "test" in capsys.readouterr().err


def test_trees_keep_their_form() -> None:
    tree = {"a": X, "b": (Y, [X, "word"]), "c": 3}
    doubled = map_tensors(tree, lambda t: 2 * t)
    assert torch.equal(doubled["a"], 2 * X)
    assert torch.equal(doubled["b"][0], 2 * Y)
    assert doubled["b"][1][1] == "word"
    assert doubled["c"] == 3
    assert [t.shape for t in tensors_in(tree)] == [X.shape, Y.shape, X.shape]


def test_only_what_has_the_batch_is_cut() -> None:
    shared = torch.randn(4, 4)
    cut = take((X, shared, Y), 5, slice(1, 3))
    assert torch.equal(cut[0], X[1:3])
    assert cut[1] is shared
    assert torch.equal(cut[2], Y[1:3])


# Mini-batches without end.


def drawn(source: Any, size: int, count: int, seed: int = 0) -> list[Batch]:
    return list(islice(minibatches(Data(source, CPU), size, torch.Generator().manual_seed(seed)), count))


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_a_pass_of_minibatches_has_every_row_once(size: int) -> None:
    per_pass = -(-5 // size)
    found = drawn([(X, Y)], size, 2 * per_pass)
    for half in (found[:per_pass], found[per_pass:]):
        assert sorted(torch.cat([batch.targets for batch in half]).tolist()) == [0, 1, 2, 3, 4]
    assert all(len(batch.targets) <= size for batch in found)
    for batch in found:
        assert torch.equal(batch.inputs, X[batch.targets])


def test_minibatches_stay_within_the_batches_of_the_data() -> None:
    """Those of a loader are cut, never joined: no more than one of them is held."""
    found = drawn([(X[:2], Y[:2]), (X[2:], Y[2:])], 2, 3)
    assert [len(batch.targets) for batch in found] == [2, 2, 1]
    assert sorted(found[0].targets.tolist()) == [0, 1]
    assert sorted(torch.cat([b.targets for b in found[1:]]).tolist()) == [2, 3, 4]


def test_minibatches_of_batches_that_were_joined() -> None:
    """Up to so many rows: of a list of small batches every pass makes new ones."""
    data = Data([(X[:2], Y[:2]), (X[2:4], Y[2:4]), (X[4:], Y[4:])], CPU)
    found = list(islice(minibatches(data, 3, torch.Generator().manual_seed(0), joined=5), 40))
    assert [len(batch.targets) for batch in found] == [3, 2] * 20
    pairs = {frozenset(batch.targets.tolist()) for batch in found[1::2]}
    assert len(pairs) > 5  # of the ten that there are
    first = list(islice(minibatches(data, 3, torch.Generator().manual_seed(0), joined=3), 2))
    assert sorted(torch.cat([batch.targets for batch in first]).tolist()) == [0, 1, 2, 3]


def test_minibatches_come_in_random_order() -> None:
    one, two, other = ([b.targets.tolist() for b in drawn([(X, Y)], 2, 12, seed)] for seed in (1, 1, 2))
    assert one == two
    assert one != other
    assert one[:3] != one[3:6] or one[3:6] != one[6:9]


def test_minibatches_of_several_tensors() -> None:
    for batch in drawn([((X, {"more": X + 1}), Y)], 2, 3):
        assert torch.equal(batch.inputs[0], X[batch.targets])
        assert torch.equal(batch.inputs[1]["more"], X[batch.targets] + 1)


def test_the_default_dtype_has_no_say_in_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [batch.targets.tolist() for batch in drawn([(X, Y)], 2, 12)]
    monkeypatch.setattr(torch, "rand", partial(_wide, torch.rand))
    assert [batch.targets.tolist() for batch in drawn([(X, Y)], 2, 12)] == before


def _wide(rand: Any, *shape: int, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
    """As under ``set_default_dtype(float64)``, without changing it for other tests."""
    found: Tensor = rand(*shape, dtype=dtype, **options)
    return found
