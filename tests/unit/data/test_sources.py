"""What users give as data: every data argument takes the same pairs of tensors, arrays and data frames."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import BATCH, Data, cut_for_training
from lapwing.data.inputs import tensors_in
from lapwing.errors import DataError, InputError
from tests.tolerances import assert_near

ROWS, INPUTS, CLASSES = 40, 4, 3
CPU = torch.device("cpu")
X = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()


class Frame:
    """Like a data frame or one of its columns: NumPy makes an array of it, and it has no dtype of its own."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self.values

    def __iter__(self) -> Any:
        return iter("abcd")


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(dtype)


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensors": lambda x, y: (x, y),
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "other dtypes": lambda x, y: (x.double().numpy(), y.to(torch.uint8).numpy()),
    "targets alone": lambda x, y: (x, y.numpy()),
    "inputs alone": lambda x, y: (x.double().numpy(), y),
    "frames": lambda x, y: (Frame(x.double().numpy()), Frame(y.numpy())),
    "several inputs": lambda x, y: ((x.numpy(),), y.numpy()),
    "a list of arrays": lambda x, y: [(x[:7].numpy(), y[:7].numpy()), (x[7:].numpy(), y[7:].numpy())],
    "two batches in a tuple": lambda x, y: ((x[:7], y[:7]), (x[7:].numpy(), y[7:].numpy())),
    "mappings of arrays": lambda x, y: [{"input": x.numpy(), "labels": y.numpy()}],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_one_data_set(form: str) -> None:
    """Floating-point arrays of inputs get the dtype that the network has, and whole numbers stay whole."""
    batches = list(Data(FORMS[form](X, Y), CPU, dtype=torch.float32).batches(""))
    assert [len(batch.targets) for batch in batches] == ([7, ROWS - 7] if "list" in form or "tuple" in form else [ROWS])
    inputs = torch.cat([next(tensors_in(batch.inputs)) for batch in batches])
    assert_near(inputs, X, 0.0)
    assert inputs.dtype == torch.float32
    targets = torch.cat([batch.targets for batch in batches])
    assert torch.equal(targets, Y)
    assert targets.dtype == torch.int64


@cache
def posterior() -> lw.Fitted:
    return lw.fit(net(), [(X + 1, Y)], "classification", prior=1.0)


def probs(fitted: lw.Fitted) -> Tensor:
    return fitted.predict(X).probs


CALLS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda data: probs(lw.fit(net(), data, "classification", prior=1.0)),
    "validation": lambda data: probs(lw.fit(net(), [(X + 1, Y)], "classification", prior=1.0, validation=data)),
    "train": lambda data: probs(lw.train(net(), data, "classification", recipe=lw.recipes.online(2)).posterior),
    "updated": lambda data: probs(posterior().updated(data)),
    "tuner": lambda data: probs(posterior().tuned(lw.tuners.Grid(data, precisions=(0.5, 2.0)))),
    "evaluate": lambda data: posterior().evaluate(data, resamples=2)["nll"].posterior.value,
    "several": lambda data: lw.evaluate({"kron": posterior()}, data, resamples=2)["kron"].scores["nll"].value,
    "conformal": lambda data: posterior().conformal(data, 0.8, score="threshold").quantiles[None],
    "abstain": lambda data: posterior().abstain(data, 0.9).area,
    "ood": lambda data: posterior().ood(data).scores,
    "acquire": lambda data: posterior().acquire(data, 3),
    "jacobian": lambda data: posterior().jacobian(data) @ torch.ones(posterior().network.selection.size),
    "subnetwork": lambda data: lw.subnetworks.by_gradient(net(), data, "classification", n=5).index,
}
OF_ALL = ("arrays", "other dtypes", "frames", "two batches in a tuple")


@pytest.mark.parametrize("call", CALLS)
def test_every_data_argument_takes_the_same(call: str) -> None:
    """In float32, and after a few steps of training where there are any."""
    expected = torch.as_tensor(CALLS[call]([(X, Y)]))
    for form in OF_ALL[: 3 if call == "train" else None]:  # a step for each batch
        assert_near(torch.as_tensor(CALLS[call](FORMS[form](X, Y))), expected, 1e-5)


def test_targets_keep_their_digits_and_inputs_get_the_dtype_of_the_model() -> None:
    """A network in 16 bits does not round the targets that it is compared with."""
    x, y = X.double().numpy(), (1 + X[:, :1].double() / 1000).numpy()
    (batch,) = Data((x, y), CPU, dtype=torch.bfloat16).batches("")
    assert batch.inputs.dtype == torch.bfloat16
    assert_near(batch.targets, torch.from_numpy(y), 0.0)
    wide = lw.fit(nn.Linear(INPUTS, 1).double(), (X.numpy(), y), lw.Gaussian(0.1), prior=1.0)
    assert wide.predict(X.numpy()).mean.dtype == torch.float64


def test_weights_as_arrays() -> None:
    weights = torch.arange(ROWS) % 3
    whole = lw.fit(net(), [(X, lw.samples.Weighted(Y, weights))], "classification", prior=1.0)
    for form in ((X.numpy(), Y.numpy(), weights.numpy()), (X, Y, Frame(weights.double().numpy()))):
        fitted = lw.fit(net(), lw.samples.weighted(form), "classification", prior=1.0)
        assert fitted.base.statistics.data == int(weights.sum())
        assert_near(probs(fitted), probs(whole), 1e-6)


def test_check_takes_arrays() -> None:
    assert lw.check(net(), (X.double().numpy(), Y.numpy())).weights == lw.check(net(), X).weights


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([X, Y], r"a batch is a Tensor.*two tensors or arrays is a tuple: \(inputs, targets\)"),
        ([X.numpy(), Y.numpy()], r"a batch is a ndarray.*two tensors or arrays is a tuple"),
        ((X, Y.tolist()), r"data is a tuple whose second part, the targets, is a list of 40;.*np\.asarray\(targets\)"),
        ((X.tolist(), Y.tolist()), r"second part, the targets, is a list of 40; expected \(inputs, targets\) of two"),
        (((X, X), Y.tolist()), "second part, the targets, is a list of 40"),
        ((X, None), "second part, the targets, is None; .*without targets use predict"),
        ((X.numpy(), Y, X), r"a tuple of 3 whose first part is a ndarray; .*lw\.samples\.weighted\(\(inputs, targets"),
        ((X.tolist(), Y), r"the inputs are a list of 40 with numbers in it;.*np\.asarray\(inputs\)"),
        ([(X.tolist(), Y)], r"the inputs are a list of 40 with numbers in it;.*np\.asarray\(inputs\)"),
        ([(X, Y[1:])], "40 inputs with 39 targets; expected one target for each. Take the same rows"),
        (X, r"data is a tensor of shape \(40, 4\).*expected a DataLoader.*one pair \(inputs, targets\)"),
        (X.numpy(), "expected a DataLoader.*one pair"),
        (Frame(X.numpy()), "expected a DataLoader.*one pair"),
        ({"x": X, "labels": Y}, r"a mapping goes into a list: \[batch\]"),
        (5, "data is 5; expected a DataLoader"),
        ((X.numpy(), np.array(list("abc"))), "the targets are a ndarray with the dtype <U1; expected numbers"),
        ((np.array([["a"]]), Y), "the inputs are a ndarray with the dtype <U1; expected numbers"),
    ],
)
def test_other_data_are_refused(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        lw.fit(net(), source, "classification")


def test_pairs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="expected whole class numbers"):
        lw.fit(net(), (X.numpy(), Y.double().numpy()), "classification")
    with pytest.raises(InputError, match=CONVERT):  # as for predict: tensors are given as the model takes them
        lw.fit(net(), (X.double(), Y), "classification")


CONVERT = r"Give it what it was trained on\. Convert the inputs: x\.to\(torch\.float32\)"


@pytest.mark.parametrize("x", [X.double(), X.long(), X.long().numpy()])
def test_inputs_of_another_dtype_are_refused_with_the_one_to_use(x: Any) -> None:
    with pytest.raises(InputError, match=CONVERT):
        posterior().predict(x)


def test_other_refusals_say_nothing_about_dtypes() -> None:
    for x in (X[:, :2], X[:, :2].numpy()):
        with pytest.raises(InputError, match=r"cannot be multiplied.*Give it what it was trained on\.$"):
            posterior().predict(x)
    words = lw.fit(
        nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, CLASSES)), (Y[:, None].expand(-1, 2), Y),
        "classification", prior=1.0, weights="last_layer",
    )  # fmt: skip
    with pytest.raises(InputError, match=r"Give it what it was trained on\.$"):
        words.predict(X[:, :2].double())


def test_pairs_and_lists_of_numbers_are_no_inputs_of_predict() -> None:
    with pytest.raises(InputError, match=r"A tuple means several inputs of the model.*give x alone, without targets"):
        posterior().predict((X, Y))
    for rows in (X.tolist(), X[:, :2].tolist()):
        with pytest.raises(DataError, match=r"batch 0 is a list of \d with numbers in it;.*np\.asarray\(x\)"):
            posterior().predict(rows)


@pytest.mark.parametrize("call", CALLS)
def test_a_pair_of_unequal_lengths_is_refused_by_every_data_argument(call: str) -> None:
    x, y = X.double().numpy(), Y[1:]
    for pair in ((X, y), (x, y.numpy()), (Frame(x), Frame(y.numpy())), (X, lw.samples.Weighted(y, y))):
        with pytest.raises(DataError, match=r": 40 inputs with 39 targets, of the shapes \(40, 4\) and \(39,\)"):
            CALLS[call](pair)


def test_inputs_of_several_tensors_may_have_other_lengths() -> None:
    """A context for all samples has rows of its own, and the first tensor may be the context."""
    (batch,) = Data(((torch.zeros(5, 3), X), Y), CPU).batches("")
    assert batch.n_samples == ROWS


def test_training_takes_a_pair_in_steps_of_random_order() -> None:
    """Sorted labels would otherwise come one class at a time. The weights stay with their rows."""
    rows = 2 * BATCH + 3
    x, context = torch.arange(rows * 2.0).reshape(rows, 2), torch.zeros(5, 3)
    pair = cut_for_training(((x.double().numpy(), context), lw.samples.Weighted(x[:, 0], x[:, 1])), torch.float32)
    first, second = ([batch.inputs[0] for batch in Data(pair, CPU).batches("", weighted=True)] for _ in range(2))
    assert [len(batch) for batch in first] == [BATCH, BATCH, 3]
    assert len(pair) == 3
    for order in (first, second):
        assert torch.equal(torch.cat(order).sort(0).values, x)
    assert not torch.equal(torch.cat(first), torch.cat(second))
    for (inputs, shared), targets in pair:
        assert torch.equal(inputs, torch.stack([targets.targets, targets.weights.float()], 1))
        assert shared is context


@pytest.mark.parametrize("source", [(X, Y), [(X, Y)], [(X[:3], Y[:3]), (X[3:], Y[3:])]])
def test_training_takes_a_small_pair_and_a_list_as_they_are(source: Any) -> None:
    assert cut_for_training(source, torch.float32) is source


def test_a_run_on_a_pair_can_be_repeated() -> None:
    rows = BATCH + 9
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(2))
    pair, recipe = (x.numpy(), (x[:, 0] > 0).long().numpy()), lw.recipes.fixed(epochs=2, rate=0.1)
    model, before = net(), torch.get_rng_state()
    one, other = (lw.train(model, pair, "classification", recipe=recipe) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [epoch.loss for epoch in one.history] == [epoch.loss for epoch in other.history]
