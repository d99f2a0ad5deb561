"""What users give as data: pairs, lists, mappings and loaders, with weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.data.batches import BATCH_SIZE, Data, cut_for_training
from lapwing.data.inputs import call_model, merge_batches, tensors_in
from lapwing.errors import DataError, InputError, UnsupportedError
from tests.tolerances import assert_near

# The one data loop.

X, Y = torch.randn(5, 3), torch.arange(5)
CPU = torch.device("cpu")


def batches(source: Any, **options: Any) -> list[tuple[Any, Tensor]]:
    return [(batch.inputs, batch.targets) for batch in Data(source, CPU, **options).batches("test")]


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


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "data is empty: no batch was yielded; expected at least one"),
        ([{"x": X, "z": Y}], {}, r"keys \['x', 'z'\] has no target; pass target_key"),
        ([{"x": X, "y": Y}], {"target_key": "answer"}, r"keys \['x', 'y'\] has no target"),
        ([X], {}, r"a batch is a tensor of shape .*; expected \(inputs, targets\)"),
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


def test_batches_pass_in_order_and_a_progress_bar_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = batches([(X[:2], Y[:2]), [X[2:], Y[2:]]], progress=True)
    assert [len(y) for _, y in pairs] == [2, 3]
    assert torch.equal(torch.cat([x for x, _ in pairs]), X)
    assert "test" in capsys.readouterr().err


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


# Loaders that change between passes: refused where rows must match, a finding where passes are averaged.

GENERATOR = torch.Generator().manual_seed(0)
READING_X, READING_Y = torch.randn(30, 3, generator=GENERATOR), torch.randn(30, 2, generator=GENERATOR)
Change = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def rows(index: Tensor) -> tuple[Tensor, Tensor]:
    return READING_X[index], READING_Y[index]


def flipped(_: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.where(torch.rand(30, 1, generator=g) < 0.5, READING_X.flip(1), READING_X), READING_Y


CHANGES: dict[str, Change] = {
    "noise": lambda number, g: (READING_X + 1e-4 * torch.randn(READING_X.shape, generator=g), READING_Y),
    "flips": flipped,  # the same numbers in every row
    "other rows": lambda number, g: rows(torch.randint(0, 30, (30,), generator=g)),
    "fewer rows": lambda number, g: (READING_X[number:], READING_Y[number:]),
    "more rows": lambda number, g: (
        torch.cat([READING_X, READING_X[:number]]),
        torch.cat([READING_Y, READING_Y[:number]]),
    ),
    "other pairs": lambda number, g: (READING_X, READING_Y[torch.randperm(30, generator=g)]),
}


class Loader:
    def __init__(self, change: Change) -> None:
        self.change, self.passes, self.generator = change, 0, torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        x, y = self.change(self.passes, self.generator)
        return iter(list(zip(x.split(7), y.split(7), strict=True)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def read(data: Data) -> None:
    for _ in data.batches("pass"):
        pass


@pytest.mark.parametrize("name", CHANGES)
def test_a_pass_with_other_rows_is_noticed(name: str) -> None:
    data = Data(Loader(CHANGES[name]), CPU)
    read(data)
    assert not data.findings
    read(data)
    assert len(data.findings) == 1
    with pytest.raises(DataError, match="second reading of the data gave"):
        data.requiring_same_rows()
    strict = Data(Loader(CHANGES[name]), CPU).requiring_same_rows()
    read(strict)
    with pytest.raises(DataError, match="second reading of the data gave"):
        read(strict)


@pytest.mark.parametrize("batch", [1, 7, 30])
def test_order_and_batches_do_not_matter(batch: int) -> None:
    loader = DataLoader(
        TensorDataset(READING_X, READING_Y), batch, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    data = Data(loader, CPU).requiring_same_rows()
    for _ in range(5):
        read(data)
    assert data.is_repeatable()
    assert data.readings.passes == 5


def test_padded_rows_are_only_counted() -> None:
    """The padding of a text depends on the other texts of its batch."""

    def padded(number: int, g: torch.Generator) -> Any:
        return [(torch.ones(4, 3 + number), torch.zeros(4)), (torch.ones(4, 5), torch.zeros(4))][: 3 - number]

    class Texts(Loader):
        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            return iter(padded(min(self.passes, self.longest), self.generator))

        longest = 1

    data = Data(Texts(padded), CPU)
    assert data.is_repeatable()
    shorter = Texts(padded)
    shorter.longest = 2
    assert not Data(shorter, CPU).is_repeatable()


def test_sparse_inputs_complex_inputs_and_no_inputs_pass() -> None:
    for x in (READING_X.to_sparse(), torch.view_as_complex(torch.ones(30, 3, 2)), torch.zeros(30, 0)):
        assert Data(DataLoader([(x, READING_Y)], batch_size=None), CPU).is_repeatable()


REFUSED: dict[str, dict[str, Any]] = {
    "Sampled": {"method": lw.Sampled(num_samples=2), "prior": 1.0},
    "KernelSpace": {"method": lw.KernelSpace(), "prior": 1.0},
    "VaLLA": {"method": lw.VaLLA(num_inducing=3, optimiser="lbfgs", steps=2), "prior": 1.0},
    "LinearMode": {"tuner": lw.tuners.LinearMode()},
}


@pytest.mark.parametrize(("name", "call"), [(name, list(REFUSED)[i % 4]) for i, name in enumerate(CHANGES)])
def test_methods_that_compare_passes_refuse_other_rows(call: str, name: str) -> None:
    with pytest.raises(DataError, match="second reading of the data gave"):
        lw.fit(network(), Loader(CHANGES[name]), lw.Gaussian(), **REFUSED[call])


@pytest.mark.parametrize("name", ["noise", "fewer rows"])
def test_operators_and_lbfgs_refuse_other_rows(name: str) -> None:
    posterior = lw.fit(network(), [(READING_X, READING_Y)], lw.Gaussian(0.5), prior=1.0)
    for operator in (posterior.jacobian, posterior.ggn):
        with pytest.raises(DataError, match="second reading of the data gave"):
            operator(Loader(CHANGES[name]))
    with pytest.raises(DataError, match="second reading of the data gave"):
        lw.train(network(), Loader(CHANGES[name]), "regression", recipe=lw.recipes.classic(epochs=2))


AVERAGED: dict[str, tuple[lw.Gaussian, dict[str, Any]]] = {
    "EKron": (lw.Gaussian(0.5), {"method": lw.EKron(), "prior": 1.0}),
    "noise of each output": (lw.Gaussian(per_output=True), {"prior": 1.0}),
    "default": (lw.Gaussian(), {}),
}


@pytest.mark.parametrize(("name", "call"), [(name, list(AVERAGED)[i % 3]) for i, name in enumerate(CHANGES)])
def test_methods_that_average_passes_are_described_as_such(call: str, name: str) -> None:
    likelihood, settings = AVERAGED[call]
    posterior = lw.fit(network(), Loader(CHANGES[name]), likelihood, **settings)
    assert "Note: a later pass over the data gave" in posterior.summary()
    assert any("later pass" in finding for finding in posterior.trace.findings)
    assert "Nothing was tuned." in posterior.summary() or not settings


# What users give as data: every data argument takes the same pairs of tensors, arrays and data frames.

ROWS, INPUTS, CLASSES = 40, 4, 3
SOURCES_X = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(0))
SOURCES_Y = (SOURCES_X[:, 0] > 0).long() + (SOURCES_X[:, 1] > 0.5).long()


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
    batches = list(Data(FORMS[form](SOURCES_X, SOURCES_Y), CPU, dtype=torch.float32).batches(""))
    assert [len(batch.targets) for batch in batches] == ([7, ROWS - 7] if "list" in form or "tuple" in form else [ROWS])
    inputs = torch.cat([next(tensors_in(batch.inputs)) for batch in batches])
    assert_near(inputs, SOURCES_X, 0.0)
    assert inputs.dtype == torch.float32
    targets = torch.cat([batch.targets for batch in batches])
    assert torch.equal(targets, SOURCES_Y)
    assert targets.dtype == torch.int64


@cache
def posterior() -> lw.Fitted:
    return lw.fit(net(), [(SOURCES_X + 1, SOURCES_Y)], "classification", prior=1.0)


def probs(fitted: lw.Fitted) -> Tensor:
    return fitted.predict(SOURCES_X).probs


CALLS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda data: probs(lw.fit(net(), data, "classification", prior=1.0)),
    "validation": lambda data: probs(
        lw.fit(net(), [(SOURCES_X + 1, SOURCES_Y)], "classification", prior=1.0, validation=data)
    ),
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
    expected = torch.as_tensor(CALLS[call]([(SOURCES_X, SOURCES_Y)]))
    for form in OF_ALL[: 3 if call == "train" else None]:  # a step for each batch
        assert_near(torch.as_tensor(CALLS[call](FORMS[form](SOURCES_X, SOURCES_Y))), expected, 1e-5)


def test_targets_keep_their_digits_and_inputs_get_the_dtype_of_the_model() -> None:
    """A network in 16 bits does not round the targets that it is compared with."""
    x, y = SOURCES_X.double().numpy(), (1 + SOURCES_X[:, :1].double() / 1000).numpy()
    (batch,) = Data((x, y), CPU, dtype=torch.bfloat16).batches("")
    assert batch.inputs.dtype == torch.bfloat16
    assert_near(batch.targets, torch.from_numpy(y), 0.0)
    wide = lw.fit(nn.Linear(INPUTS, 1).double(), (SOURCES_X.numpy(), y), lw.Gaussian(0.1), prior=1.0)
    assert wide.predict(SOURCES_X.numpy()).mean.dtype == torch.float64


def test_weights_as_arrays() -> None:
    weights = torch.arange(ROWS) % 3
    whole = lw.fit(net(), [(SOURCES_X, lw.samples.Weighted(SOURCES_Y, weights))], "classification", prior=1.0)
    for form in (
        (SOURCES_X.numpy(), SOURCES_Y.numpy(), weights.numpy()),
        (SOURCES_X, SOURCES_Y, Frame(weights.double().numpy())),
    ):
        fitted = lw.fit(net(), lw.samples.weighted(form), "classification", prior=1.0)
        assert fitted.base.statistics.data == int(weights.sum())
        assert_near(probs(fitted), probs(whole), 1e-6)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([SOURCES_X, SOURCES_Y], r"a batch is a tensor.*two tensors or arrays is a tuple: \(inputs, targets\)"),
        ([SOURCES_X.numpy(), SOURCES_Y.numpy()], r"a batch is a ndarray.*two tensors or arrays is a tuple"),
        (
            (SOURCES_X, SOURCES_Y.tolist()),
            r"data is a tuple whose second part, the targets, is a list of 40;.*np\.asarray\(targets\)",
        ),
        (
            (SOURCES_X.tolist(), SOURCES_Y.tolist()),
            r"second part, the targets, is a list of 40; expected \(inputs, targets\) of two",
        ),
        (((SOURCES_X, SOURCES_X), SOURCES_Y.tolist()), "second part, the targets, is a list of 40"),
        ((SOURCES_X, None), "second part, the targets, is None; .*without targets use predict"),
        (
            (SOURCES_X.numpy(), SOURCES_Y, SOURCES_X),
            r"a tuple of 3 whose first part is a ndarray; .*lw\.samples\.weighted\(\(inputs, targets",
        ),
        ((SOURCES_X.tolist(), SOURCES_Y), r"the inputs are a list of 40 with numbers in it;.*np\.asarray\(inputs\)"),
        ([(SOURCES_X.tolist(), SOURCES_Y)], r"the inputs are a list of 40 with numbers in it;.*np\.asarray\(inputs\)"),
        ([(SOURCES_X, SOURCES_Y[1:])], "40 inputs with 39 targets; expected one target for each. Take the same rows"),
        (SOURCES_X, r"data is a tensor of shape \(40, 4\).*expected a DataLoader.*one pair \(inputs, targets\)"),
        (SOURCES_X.numpy(), "expected a DataLoader.*one pair"),
        (Frame(SOURCES_X.numpy()), "expected a DataLoader.*one pair"),
        ({"x": SOURCES_X, "labels": SOURCES_Y}, r"a mapping goes into a list: \[batch\]"),
        (5, "data is 5; expected a DataLoader"),
        ((SOURCES_X.numpy(), np.array(list("abc"))), "the targets are a ndarray with the dtype <U1; expected numbers"),
        ((np.array([["a"]]), SOURCES_Y), "the inputs are a ndarray with the dtype <U1; expected numbers"),
    ],
)
def test_other_data_are_refused(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        lw.fit(net(), source, "classification")


def test_pairs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="expected whole class numbers"):
        lw.fit(net(), (SOURCES_X.numpy(), SOURCES_Y.double().numpy()), "classification")
    with pytest.raises(InputError, match=CONVERT):  # as for predict: tensors are given as the model takes them
        lw.fit(net(), (SOURCES_X.double(), SOURCES_Y), "classification")


CONVERT = r"Give it what it was trained on\. Convert the inputs: x\.to\(torch\.float32\)"


@pytest.mark.parametrize("x", [SOURCES_X.double(), SOURCES_X.long(), SOURCES_X.long().numpy()])
def test_inputs_of_another_dtype_are_refused_with_the_one_to_use(x: Any) -> None:
    with pytest.raises(InputError, match=CONVERT):
        posterior().predict(x)


def test_other_refusals_say_nothing_about_dtypes() -> None:
    for x in (SOURCES_X[:, :2], SOURCES_X[:, :2].numpy()):
        with pytest.raises(InputError, match=r"cannot be multiplied.*Give it what it was trained on\.$"):
            posterior().predict(x)
    words = lw.fit(
        nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, CLASSES)),
        (SOURCES_Y[:, None].expand(-1, 2), SOURCES_Y),
        "classification", prior=1.0, weights="last_layer",
    )  # fmt: skip
    with pytest.raises(InputError, match=r"Give it what it was trained on\.$"):
        words.predict(SOURCES_X[:, :2].double())


def test_predict_refuses_pairs_and_lists_of_numbers() -> None:
    with pytest.raises(InputError, match=r"A tuple means several inputs of the model.*give x alone, without targets"):
        posterior().predict((SOURCES_X, SOURCES_Y))
    for rows in (SOURCES_X.tolist(), SOURCES_X[:, :2].tolist()):
        with pytest.raises(DataError, match=r"batch 0 is a list of \d with numbers in it;.*np\.asarray\(x\)"):
            posterior().predict(rows)


@pytest.mark.parametrize("call", CALLS)
def test_a_pair_of_unequal_lengths_is_refused_by_every_data_argument(call: str) -> None:
    x, y = SOURCES_X.double().numpy(), SOURCES_Y[1:]
    for pair in ((SOURCES_X, y), (x, y.numpy()), (Frame(x), Frame(y.numpy())), (SOURCES_X, lw.samples.Weighted(y, y))):
        with pytest.raises(DataError, match=r": 40 inputs with 39 targets, of the shapes \(40, 4\) and \(39,\)"):
            CALLS[call](pair)


def test_inputs_of_several_tensors_may_have_other_lengths() -> None:
    """A context for all samples has rows of its own, and the first tensor may be the context."""
    (batch,) = Data(((torch.zeros(5, 3), SOURCES_X), SOURCES_Y), CPU).batches("")
    assert batch.n_samples == ROWS


def test_training_takes_a_pair_in_steps_of_random_order() -> None:
    """Sorted labels would otherwise come one class at a time. The weights stay with their rows."""
    rows = 2 * BATCH_SIZE + 3
    x, context = torch.arange(rows * 2.0).reshape(rows, 2), torch.zeros(5, 3)
    pair = cut_for_training(((x.double().numpy(), context), lw.samples.Weighted(x[:, 0], x[:, 1])), torch.float32)
    first, second = ([batch.inputs[0] for batch in Data(pair, CPU).batches("", weighted=True)] for _ in range(2))
    assert [len(batch) for batch in first] == [BATCH_SIZE, BATCH_SIZE, 3]
    assert len(pair) == 3
    for order in (first, second):
        assert torch.equal(torch.cat(order).sort(0).values, x)
    assert not torch.equal(torch.cat(first), torch.cat(second))
    for (inputs, shared), targets in pair:
        assert torch.equal(inputs, torch.stack([targets.targets, targets.weights.float()], 1))
        assert shared is context


@pytest.mark.parametrize(
    "source",
    [
        (SOURCES_X, SOURCES_Y),
        [(SOURCES_X, SOURCES_Y)],
        [(SOURCES_X[:3], SOURCES_Y[:3]), (SOURCES_X[3:], SOURCES_Y[3:])],
    ],
)
def test_training_takes_a_small_pair_and_a_list_as_they_are(source: Any) -> None:
    assert cut_for_training(source, torch.float32) is source


def test_a_run_on_a_pair_can_be_repeated() -> None:
    rows = BATCH_SIZE + 9
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(2))
    pair, recipe = (x.numpy(), (x[:, 0] > 0).long().numpy()), lw.recipes.fixed(epochs=2, rate=0.1)
    model, before = net(), torch.get_rng_state()
    one, other = (lw.train(model, pair, "classification", recipe=recipe) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [epoch.loss for epoch in one.history] == [epoch.loss for epoch in other.history]


# Weights of samples: how they are given, carried and refused.

WEIGHTS_X, WEIGHTS_Y, W = (
    torch.arange(12.0).reshape(6, 2),
    torch.arange(6.0)[:, None],
    torch.tensor([1.0, 0, 2, 0.5, 1, 3]),
)


def weights_of(source, **options):
    return torch.cat([batch.weights for batch in Data(source, CPU, **options).batches("", weighted=True)])


@pytest.mark.parametrize(
    "source",
    [
        lw.samples.weighted((WEIGHTS_X, WEIGHTS_Y, W)),
        lw.samples.weighted([(WEIGHTS_X[:4], WEIGHTS_Y[:4], W[:4]), [WEIGHTS_X[4:], WEIGHTS_Y[4:], W[4:]]]),
        lw.samples.weighted(DataLoader(TensorDataset(WEIGHTS_X, WEIGHTS_Y, W), batch_size=4)),
        lw.samples.weighted([{"x": WEIGHTS_X, "y": WEIGHTS_Y, "weights": W}]),
        lw.samples.weighted([{"x": WEIGHTS_X, "answer": WEIGHTS_Y, "w": W}], key="w", target_key="answer"),
        (WEIGHTS_X, lw.samples.Weighted(WEIGHTS_Y, W)),
        [(WEIGHTS_X, lw.samples.Weighted(WEIGHTS_Y, W.tolist()))],
        lw.samples.unpacked([(W, WEIGHTS_Y, WEIGHTS_X)], lambda item: (item[2], lw.samples.Weighted(item[1], item[0]))),
    ],
)
def test_every_form_gives_the_same_weights(source):
    key = "answer" if "answer" in str(source) else None
    assert torch.equal(weights_of(source, target_key=key), W.double())


def test_joined_batches_keep_their_weights():
    data = Data(
        lw.samples.weighted([(WEIGHTS_X[:2], WEIGHTS_Y[:2], W[:2]), (WEIGHTS_X[2:], WEIGHTS_Y[2:], W[2:])]), CPU
    )
    (batch,) = merge_batches(data.batches("", weighted=True), 6)
    assert torch.equal(batch.weights, W.double())
    assert torch.equal(batch.weights_of(slice(1, 3)), W[1:3].double())


def test_a_pass_that_does_not_take_weights_refuses_them():
    with pytest.raises(UnsupportedError, match=r"the data have weights, which are not taken here \(products\)"):
        next(Data((WEIGHTS_X, lw.samples.Weighted(WEIGHTS_Y, W)), CPU).batches("products"))


def test_predictions_leave_weights_out():
    net = torch.nn.Linear(2, 1)
    loader = lw.samples.weighted(DataLoader(TensorDataset(WEIGHTS_X, WEIGHTS_Y, W), batch_size=4))
    posterior = lw.fit(net, loader, lw.Gaussian(1.0), prior=1.0)
    assert torch.equal(posterior.predict(loader).mean, posterior.predict(WEIGHTS_X).mean)


def test_weights_that_change_between_passes_are_noticed():
    class Changing:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([(WEIGHTS_X, lw.samples.Weighted(WEIGHTS_Y, W + self.passes))])

    data = Data(Changing(), CPU)
    assert not data.is_repeatable()
    assert data.has_weights


@pytest.mark.parametrize(
    ("weights", "seen"),
    [
        (W[:5], "for 6 samples"),
        (W[:, None], "for 6 samples"),
        (-W, "run from -3 to"),
        (W / 0, "expected finite numbers"),
        ("heavy", "expected a tensor"),
        (W.to(torch.complex64), "expected a real number"),
    ],
)
def test_other_weights_are_refused(weights, seen):
    with pytest.raises(DataError, match=seen):
        weights_of([(WEIGHTS_X, lw.samples.Weighted(WEIGHTS_Y, weights))])


def test_batches_without_weights_are_refused():
    with pytest.raises(DataError, match=r"expected .inputs, targets, weights."):
        weights_of(lw.samples.weighted([(WEIGHTS_X, WEIGHTS_Y)]))
    with pytest.raises(DataError, match="has no weights under 'weights'"):
        weights_of(lw.samples.weighted([{"x": WEIGHTS_X, "y": WEIGHTS_Y}]))
    with pytest.raises(DataError, match="one-shot iterator"):
        lw.samples.weighted(iter([(WEIGHTS_X, WEIGHTS_Y, W)]))
    with pytest.raises(DataError, match=r"Wrap it in a DataLoader"):
        lw.samples.weighted(TensorDataset(WEIGHTS_X, WEIGHTS_Y, W))
    with pytest.raises(DataError, match=r"lw.samples.weighted"):
        weights_of([(WEIGHTS_X, WEIGHTS_Y, W)])


def test_data_of_weight_zero_alone_are_refused():
    with pytest.raises(DataError, match="has the weight zero"):
        lw.fit(torch.nn.Linear(2, 1), lw.samples.weighted((WEIGHTS_X, WEIGHTS_Y, 0 * W)), lw.Gaussian(1.0), prior=1.0)
