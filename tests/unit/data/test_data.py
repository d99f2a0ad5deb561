"""The one data loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.inputs import call_model, map_tensors, tensors_in
from lapwing.errors import DataError

X, Y = torch.randn(5, 3), torch.arange(5)
CPU = torch.device("cpu")


def batches(source: Any, **options: Any) -> list[tuple[Any, Tensor]]:
    return [(batch.inputs, batch.targets) for batch in Data(source, CPU, **options).batches("test")]


def test_batches_pass_in_order() -> None:
    pairs = batches([(X[:2], Y[:2]), [X[2:], Y[2:]]])
    assert [len(y) for _, y in pairs] == [2, 3]
    assert torch.equal(torch.cat([x for x, _ in pairs]), X)


def test_a_pass_over_a_data_set_leaves_the_global_random_numbers() -> None:
    """PyTorch's loader draws a seed at every pass."""
    model, dataset = nn.Linear(3, 5), TensorDataset(X, Y)
    before = torch.get_rng_state()
    assert torch.equal(batches(dataset)[0][0], X)
    posterior = lw.fit(model, dataset, "classification", prior=2.0)
    posterior.predict(dataset)
    posterior.evaluate(dataset)
    copy.deepcopy(Data(dataset, CPU))
    assert torch.equal(torch.get_rng_state(), before)


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


def test_a_look_opens_a_loader_once() -> None:
    """The first batch, and the first with several samples among the first three."""
    opened: list[int] = []

    class Loader:
        def __init__(self, sizes: tuple[int, ...]) -> None:
            self.sizes = sizes

        def __iter__(self) -> Any:
            opened.append(1)
            return iter([(X[:n], Y[:n]) for n in self.sizes])

    for sizes, expected in (((3, 2), (3, 3)), ((1, 2, 3), (1, 2)), ((1, 1, 1, 4), (1, 1)), ((1,), (1, 1))):
        first, several = Data(Loader(sizes), CPU, progress=True).peek()
        assert (first.n_samples, several.n_samples) == expected
    assert len(opened) == 4


def test_keys_that_a_model_does_not_take_are_named() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(DataError, match=r"input keys \['text', 'x'\]; the model takes x\. Leave the others out"):
        call_model(Net(), {"x": torch.zeros(2, 1), "text": ["a", "b"]})
    whole = {"other": torch.zeros(2, 1)}
    assert call_model(Net(), whole) is whole  # a model may take a mapping
