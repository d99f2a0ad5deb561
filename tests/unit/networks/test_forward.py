"""The private copy of a model: what it runs, what it refuses, and that the model stays as it is."""

from __future__ import annotations

import copy
import functools
import pickle
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import DataError, ModelError
from lapwing.networks.examine import EXAMINED_SAMPLES, refuse_random, refusing_changes
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.forward import Replica, borrow_copy, copy_modules, extract_data, extract_network, raw_output
from lapwing.networks.network import Network, plain_passes, trainable_names
from tests import problems
from tests.cases import BY_NAME, CASES, Output, Wrapped
from tests.operations import OperationCount
from tests.references import dense
from tests.tolerances import assert_close

# Running the model as it is: what it may return, what is refused, and that nothing about it changes.


def x(batch: int = 6, *shape: int) -> Tensor:
    return torch.randn(batch, *(shape or (4,)), dtype=torch.float64)


TRAINING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), (4,),
                   r"1 \(BatchNorm1d\)"),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3)), (4,), r"1 \(Dropout\)"),
    "attention dropout": (lambda: Wrapped(lambda m, x: m.head(m.attend(x, x, x)[0][:, 0]), head=nn.Linear(4, 3),
                                          attend=nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)), (5, 4),
                          r"attend \(MultiheadAttention\)"),
    "lstm dropout": (lambda: Wrapped(lambda m, x: m.head(m.cell(x)[0][:, -1]), head=nn.Linear(6, 3),
                                     cell=nn.LSTM(4, 6, 2, dropout=0.1, batch_first=True)), (5, 4),
                     r"cell \(LSTM\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", TRAINING)
def test_training_mode_is_refused(what: str) -> None:
    make, shape, named = TRAINING[what]
    model = make().double().train()
    inputs = x(6, *shape)

    def run() -> None:
        with pytest.raises(
            ModelError, match=named + r" is in training mode; expected evaluation mode.*model\.eval\(\)"
        ):
            Network.build(model, inputs)

    problems.unchanged(model, run)
    assert model.training


def test_training_mode_without_random_parts_is_fine() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0), nn.LayerNorm(6), nn.Linear(6, 3)).double().train()
    inputs = x()
    network = problems.unchanged(model, lambda: Network.build(model, inputs))
    assert_close(network.linearise(inputs).jacobians().whole(), dense.jacobian(model, inputs, 6))


class BatchStatistics(nn.Module):
    """Normalises with the batch's own mean, whatever the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0))


MIXING: dict[str, Callable[[], nn.Module]] = {
    "batch statistics in evaluation mode": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)
    ),
    "mean of the batch": BatchStatistics,
    "attention over the batch": lambda: Wrapped(
        lambda m, x: m.head(m.attend(x, x, x, need_weights=False)[0]),
        head=nn.Linear(4, 3), attend=nn.MultiheadAttention(4, 2),
    ),
    "earlier samples": lambda: Wrapped(lambda m, x: m.head(x.cumsum(0)), head=nn.Linear(4, 3)),
    "later samples": lambda: Wrapped(lambda m, x: m.head(x.flip(0).cumsum(0).flip(0)), head=nn.Linear(4, 3)),
}  # fmt: skip


@pytest.mark.parametrize("how", MIXING)
def test_mixed_samples_are_refused(how: str) -> None:
    model = MIXING[how]().double().eval()
    with pytest.raises(ModelError, match=r"changes by .* with the rest of its batch; expected independent samples"):
        Network.build(model, x())


def noisy(size: float) -> nn.Module:
    return Wrapped(lambda m, x: m.head((m.body(x) + size * torch.randn(len(x), 6).to(x)).tanh()),
                   body=nn.Linear(4, 6), head=nn.Linear(6, 3))  # fmt: skip


class Counting(nn.Module):
    """Moves with every call, by no chance."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(x * (1 + 0.01 * self.calls))


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "functional dropout": lambda: Wrapped(lambda m, x: m.head(F.dropout(x, 0.5, training=True)), head=nn.Linear(4, 3)),
    "noise": lambda: noisy(1e-2),
    "a little noise": lambda: noisy(1e-4),  # with other halves of the batch it would pass in float32
    "a state": Counting,
    "some of the samples": lambda: Wrapped(lambda m, x: m.head(x)[: 5 + m.head.calls % 2], head=Counting()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", RANDOM)
def test_random_forward_passes_are_refused_as_such(how: str, dtype: torch.dtype) -> None:
    model = RANDOM[how]().to(dtype).eval()
    with pytest.raises(
        ModelError, match=r"two forward passes .*the forward pass is random.*F\.dropout without training"
    ):
        Network.build(model, x().to(dtype))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-7), (torch.float64, 1e-15), (torch.bfloat16, 1e-3)])
def test_rounding_is_not_taken_for_randomness(dtype: torch.dtype, size: float) -> None:
    """Kernels on a GPU, and threads, may add up in another order."""
    torch.manual_seed(0)
    inputs = x().to(dtype)
    assert Network.build(noisy(size).to(dtype), inputs)(inputs).shape == (6, 3)


def test_a_wide_head_on_a_narrow_body_may_round_like_the_body() -> None:
    torch.manual_seed(0)
    head, run = nn.Linear(4, 3).double(), lambda m, x: m.head(x + 1e-7 * torch.randn_like(x))
    model, narrow, inputs = Wrapped(run, head=head), Wrapped(run, head=head, body=nn.Linear(4, 4)), x()
    refuse_random(narrow, inputs, narrow(inputs).detach())
    with pytest.raises(ModelError, match="expected at most 1e-12"):
        refuse_random(model, inputs, model(inputs).detach())


def test_a_few_samples_are_enough_to_examine_a_model() -> None:
    seen: list[int] = []
    model = Wrapped(lambda m, x: (seen.append(len(x)), m.head(x))[1], head=nn.Linear(4, 3)).double()
    Network.build(model, x(500))
    half = EXAMINED_SAMPLES // 2
    assert sorted(seen) == [half, half + 1, EXAMINED_SAMPLES, EXAMINED_SAMPLES]


def test_several_inputs_are_not_cut_to_see_whether_a_forward_pass_is_random() -> None:
    """One of them may belong to all samples, and have as many rows by chance."""
    seen: list[int] = []
    model = Wrapped(lambda m, x, table: (seen.append(len(table)), m.head(x @ table.mean(0).diag()))[1],
                    head=nn.Linear(4, 3)).double()  # fmt: skip
    both = x(40), x(40)
    refuse_random(model, both, model(*both).detach())
    assert seen == [40, 40]


def stateful() -> nn.Module:
    """A buffer with a NaN of its own, and one without."""
    model = nn.Linear(4, 3)
    model.register_buffer("seen", torch.tensor([1.0, float("nan"), 3.0]))
    model.register_buffer("level", torch.ones(2))
    return model


def test_a_model_that_fails_in_mid_run_has_its_buffers_back() -> None:
    model = stateful()

    def fail() -> None:
        model.level += 1
        model.seen = torch.zeros(3)
        raise KeyError("mid-run")

    with pytest.raises(KeyError, match="mid-run"), refusing_changes(model):
        fail()
    assert model.level.tolist() == [1.0, 1.0]
    torch.testing.assert_close(model.seen, torch.tensor([1.0, float("nan"), 3.0]), equal_nan=True)


@pytest.mark.parametrize(("name", "entry"), [("level", 0), ("seen", 0), ("seen", 2)])
@pytest.mark.parametrize("value", [float("nan"), 7.0])
def test_buffers_that_become_nan_or_change_beside_one_are_put_back(name: str, entry: int, value: float) -> None:
    model = stateful()
    buffer = model.get_buffer(name)
    before = buffer.clone()
    with pytest.raises(ModelError, match="changes its own weights or buffers"), refusing_changes(model):
        buffer[entry] = value
    torch.testing.assert_close(buffer, before, equal_nan=True)


def test_mixed_samples_are_refused_after_a_first_batch_of_one() -> None:
    inputs, y = x(), torch.randint(0, 3, (6,))
    with pytest.raises(ModelError, match="expected independent samples"):
        lw.fit(BatchStatistics().double(), [(inputs[:1], y[:1]), (inputs[1:], y[1:])], "classification")


RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "attribute": lambda f: Output(f),
    "mapping": lambda f: {"logits": f, "loss": None},
    "tensor": lambda f: f,
}


@pytest.mark.parametrize("how", RETURNS)
def test_what_a_model_may_return(how: str) -> None:
    model = Wrapped(lambda m, x: RETURNS[how](m.net(x)), net=nn.Linear(4, 3)).double()
    inputs = x()
    network = Network.build(model, inputs)
    assert_close(network(inputs), model.net(inputs))
    assert_close(network.linearise(inputs).jacobians().whole(), dense.jacobian(model.net, inputs, 6))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda f: (f, f), r"returns a tuple; expected a tensor or an object with \.logits"),
        (lambda f: {"scores": f}, "returns a dict; expected a tensor"),
        (
            lambda f: f[:, :, None, None, None, None],
            r"shape \(6, 3, 1, 1, 1, 1\); expected \(B,\), .*\(B, C, D, H, W\)",
        ),
        (lambda f: f[:, :, None, None].expand(6, 3, 2, 0), r"shape \(6, 3, 2, 0\)"),
        (lambda f: f.sum(), r"shape \(\); expected \(B,\)"),
        (lambda f: f[:, :0], r"shape \(6, 0\)"),
        (lambda f: f[:4], "half a batch gives 4 outputs; expected 2: one for each sample"),
    ],
)
def test_what_a_model_may_not_return(wrong: Callable[[Tensor], Any], message: str) -> None:
    model = Wrapped(lambda m, x: wrong(m.net(x)), net=nn.Linear(4, 3)).double()
    with pytest.raises(ModelError, match=message):
        Network.build(model, x())


def test_inputs_by_keyword_by_position_or_whole() -> None:
    a, b = x(5, 3), x(5, 4)
    lin = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(4, 2)}).double()
    forms = {
        "keywords": (lambda m, a, b: m.lin["a"](a) + m.lin["b"](b), {"b": b, "a": a}),
        "position": (lambda m, a, b: m.lin["a"](a) + m.lin["b"](b), (a, b)),
        "list": (lambda m, a, b: m.lin["a"](a) + m.lin["b"](b), [a, b]),
        "one mapping": (lambda m, batch: m.lin["a"](batch["a"]) + m.lin["b"](batch["b"]), {"a": a, "b": b}),
        "one tuple": (lambda m, batch: m.lin["a"](batch[0]) + m.lin["b"](batch[1]), (a, b)),
    }

    class Plain(nn.Module):
        def __init__(self, lin: nn.ModuleDict, whole: bool, run: Callable[..., Tensor]) -> None:
            super().__init__()
            self.lin, self.run = lin, run
            self.forward = self.whole if whole else self.parts  # type: ignore[method-assign]

        def parts(self, a: Tensor, b: Tensor) -> Tensor:
            return self.run(self, a, b)

        def whole(self, batch: Any) -> Tensor:
            return self.run(self, batch)

    expected = (lin["a"](a) + lin["b"](b)).detach()
    for name, (run, inputs) in forms.items():
        network = Network.build(Plain(lin, name.startswith("one"), run), inputs)
        assert_close(network(inputs), expected)
        jac = network.linearise(inputs).jacobians().whole()
        ones = torch.ones(5, 1, dtype=torch.float64)
        for k in range(2):  # d f_k / d (a.weight, a.bias, b.weight, b.bias)
            pick = torch.eye(2, dtype=torch.float64)[k]
            rows = [torch.einsum("i,bj->bij", pick, t).flatten(1) for t in (a, ones, b, ones)]
            assert_close(jac[:, k], torch.cat(rows, 1))


def test_outputs_that_are_not_finite() -> None:
    model = Wrapped(lambda m, x: m.head(x).exp().exp().exp(), head=nn.Linear(4, 3)).double()
    with pytest.raises(DataError, match=r"outputs of the network: \d+ of 18 entries are NaN or infinite"):
        Network.build(model, 10 * x())


class Failing(nn.Module):
    """Works for so many calls, then raises."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.body, self.head, self.calls = nn.Linear(4, 6), nn.Linear(6, 3), iter(range(calls))
        self.head.weight.requires_grad_(False)
        self.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        if next(self.calls, None) is None:
            raise RuntimeError("the lights went out")
        return self.head(hidden)


@pytest.mark.parametrize("calls", range(6))
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_an_exception_in_forward_leaves_the_model_as_it_was(calls: int, weights: str) -> None:
    model = Failing(calls).double()
    inputs, y = x(), torch.randint(0, 3, (6,))

    def run() -> None:
        with pytest.raises(RuntimeError, match="the lights went out"):
            lw.fit(model, [(inputs, y)] * 9, "classification", weights=weights, method="ekron").predict(inputs)

    problems.unchanged(model, run)


def test_compiled_and_parallel_models_are_unwrapped() -> None:
    case = BY_NAME["mlp"]
    model, data = case.build(), problems.batches(case)
    expected = lw.fit(model, data, "classification", method="full", prior=2.0).predict(case.batch(3)).probs
    with warnings.catch_warnings():  # importing the compiler warns of its own parts
        warnings.simplefilter("ignore")
        wrappers = (torch.compile(model), nn.DataParallel(model), torch.compile(nn.DataParallel(model)))
    for wrapped in wrappers:
        posterior = lw.fit(wrapped, data, "classification", method="full", prior=2.0)
        assert posterior.network.model is model
        assert_close(posterior.predict(case.batch(3)).probs, expected)


@pytest.mark.parametrize("inputs", [torch.randn(5, 2), torch.randn(5, 3, dtype=torch.float64)], ids=["width", "dtype"])
def test_inputs_that_the_network_refuses(inputs: Tensor) -> None:
    """The network's own error is the cause, and the message says what the network was given."""
    net = nn.Linear(3, 1)
    with pytest.raises(lw.errors.InputError) as caught:
        lw.fit(net, [(inputs, torch.randn(5, 1))], "regression", prior=1.0)
    assert type(caught.value.__cause__) is RuntimeError
    note = str(caught.value)
    assert (
        f"inputs of shape {tuple(inputs.shape)} ({inputs.dtype} on cpu); its weights are torch.float32 on cpu" in note
    )


# The private copy that runs in the place of a model: same numbers, shared memory, nothing changed.

D = torch.float64
X = torch.randn(5, 4, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1])
GLOBAL: dict[str, nn.Module] = {}


class Odd(nn.Module):
    """A network whose second layer is reached in some odd way."""

    def __init__(self, reached: Callable[[Odd], Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)
        self.layer = reached(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(x))
        layer = self.layer() if type(self.layer) is weakref.ref else self.layer
        layer = layer[0] if isinstance(layer, list | tuple) else layer
        result: Tensor = layer(hidden)
        return result


class Holder:
    """An object that is no module."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Any:
        return self.layer(x)


def by_closure(model: Odd) -> Any:
    two = model.two
    return lambda x: two(x)


def by_global(model: Odd) -> Any:
    GLOBAL["two"] = model.two
    return lambda x: GLOBAL["two"](x)


WAYS: dict[str, Callable[[Odd], Any]] = {
    "module": lambda m: m.two,
    "list": lambda m: [m.two],
    "tuple": lambda m: (m.two,),
    "method": lambda m: m.two.forward,
    "partial": lambda m: functools.partial(nn.Linear.forward, m.two),
    "weak reference": lambda m: weakref.ref(m.two),
    "closure": by_closure,
    "object": lambda m: Holder(m.two),
    "global": by_global,
}
BYPASSED = ("object", "global")  # the model itself runs


@pytest.mark.parametrize("way", WAYS)
def test_models_that_reach_a_layer_in_an_odd_way(way: str) -> None:
    torch.manual_seed(3)
    odd = Odd(WAYS[way]).double().eval()
    plain = nn.Sequential(odd.one, nn.Tanh(), odd.two)
    data = [(X, Y)]

    def results(model: nn.Module) -> list[Tensor]:
        posterior = lw.fit(model, data, "classification", method="full", prior=1.0)
        return [posterior.functions(X).cov, posterior.network.jvp(X, torch.ones(1, 43, dtype=D))]

    for one, other in zip(problems.unchanged(odd, lambda: results(odd)), results(plain), strict=True):
        assert_close(one, other)
    assert Network.build(odd, X).private == (way not in BYPASSED)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_copies_have_the_same_outputs_and_memory(case: Any) -> None:
    model, inputs = case.build(), case.batch(3)
    replica = Replica(model, ())
    with torch.no_grad():
        expected = raw_output(model, inputs)
        assert_close(raw_output(replica.model, inputs), expected)
        assert_close(raw_output(copy_modules(replica.model), inputs), expected)
    pairs = zip(model.named_parameters(), replica.model.named_parameters(), strict=True)
    for (name, p), (same_name, leaf) in pairs:
        assert name == same_name
        assert p is not leaf
        assert p.data_ptr() == leaf.data_ptr()
    assert all(a is b for a, b in zip(model.buffers(), replica.model.buffers(), strict=True))


def test_a_copy_is_used_by_one_call_at_a_time_and_dropped_after_an_error() -> None:
    model = Replica(nn.Sequential(nn.Linear(4, 3)).double(), ()).model
    with borrow_copy(model) as one, borrow_copy(model) as two:
        assert one is not two
    with borrow_copy(model) as again:
        assert again in (one, two)
    broken: list[nn.Module] = []

    def fail() -> None:
        with borrow_copy(model) as third:
            broken.append(third)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    for _ in range(4):
        with borrow_copy(model) as fourth, borrow_copy(model) as fifth:
            assert broken[0] not in (fourth, fifth)


def test_attributes_that_forward_writes_stay_in_the_copy() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last, self.calls = x, self.calls + 1  # type: ignore[has-type]
            return super().forward(x)

    model = Writes(4, 3).double()
    model.calls = 0
    problems.unchanged(model, lambda: lw.fit(model, [(X, Y)], "classification", prior=1.0).predict(X))
    assert model.calls == 0


def test_hooks_that_were_there_at_the_fit_may_go_and_others_come() -> None:
    """The copy has the hooks of the model as they are now, not as they were when it was made."""
    model, seen = nn.Sequential(nn.Linear(4, 3)).double(), list[str]()
    first = model[0].register_forward_hook(lambda *_: seen.append("first"))
    posterior = lw.fit(model, [(X, Y)], "classification", prior=1.0)
    first.remove()
    second = model[0].register_forward_hook(lambda *_: seen.append("second"))
    seen.clear()
    posterior.predict(X)
    assert set(seen) == {"second"}
    second.remove()
    seen.clear()
    posterior.predict(X)
    assert not seen


@pytest.mark.parametrize("renewed", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["copy", "pickle"])
def test_copies_of_a_network(renewed: Callable[[Any], Any]) -> None:
    network = Network.build(BY_NAME["mlp"].build(), BY_NAME["mlp"].batch(3))
    other, inputs = renewed(network), BY_NAME["mlp"].batch(2)
    assert_close(other(inputs), network(inputs))
    assert other.replica is not network.replica
    assert next(other.replica.parameters()).data_ptr() == next(other.model.parameters()).data_ptr()


def test_a_model_that_was_moved_to_another_dtype() -> None:
    model = BY_NAME["mlp"].build()
    network = Network.build(model, BY_NAME["mlp"].batch(3))
    model.float()
    assert network(BY_NAME["mlp"].batch(3, torch.float32)).dtype == torch.float32


def test_methods_of_the_copy_belong_to_the_copy() -> None:
    model = nn.Linear(4, 3)
    model.forward = types.MethodType(lambda self, x: x @ self.weight.mT, model)  # type: ignore[method-assign]
    other = copy_modules(model, {id(model.weight): nn.Parameter(torch.zeros(3, 4))})
    assert not other(torch.ones(2, 4)).any()


class Doubled(nn.Module):
    """A network that doubles the outputs of some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        f = self.head(self.body(x).tanh())
        return 2 * f if x[0, 0] < 0 else f


def test_features_are_taken_where_the_last_layer_makes_the_outputs_as_they_are() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 4, dtype=torch.float64).abs()
    posterior = lw.fit(Doubled().double().eval(), (x, x[:, :2]), lw.Gaussian(0.1), weights=lw.last_layer, prior=1.0)
    network, once = posterior.network, posterior.functions(x)
    assert network.features(x) is not None
    other = torch.cat([-x[:1], x[1:]])
    assert network.features(other) is None
    doubled = posterior.functions(other)
    assert_close(doubled.mean[1:], 2 * once.mean[1:])
    assert_close(doubled.cov[1:], 4 * once.cov[1:])
    assert not any("forward" in vars(module) for module in network.replica.modules())


# A posterior belongs to the weights it was fitted to, and to no others.


def swap_rows(model: nn.Module) -> None:
    model.two.weight.data = model.two.weight.data.flip(0)


def swap_entries(model: nn.Module) -> None:
    row = model.head.weight.data[0]
    row[[0, 1]] = row[[1, 0]]


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "in place": (lambda m: m.head.weight.data.mul_(1.001), r"head\.weight"),
    "replaced": (lambda m: setattr(m.head, "bias", nn.Parameter(torch.zeros_like(m.head.bias))), r"head\.bias"),
    "one entry": (lambda m: m.stem.weight.data[0, 0, 0].add_(1e-6), r"stem\.weight"),
    "a buffer": (lambda m: m.norm1.running_mean.add_(0.01), r"norm1\.running_mean"),
    "sign": (lambda m: m.two.weight.data.neg_(), r"two\.weight"),
    "not a number": (lambda m: m.head.bias.data.fill_(float("nan")), r"head\.bias"),
    "rows swapped": (swap_rows, r"two\.weight"),
    "entries swapped": (swap_entries, r"head\.weight"),
    "by NumPy": (lambda m: m.head.bias.detach().numpy().__iadd__(0.01), r"head\.bias"),
    "another view": (lambda m: setattr(m.two.weight, "data", m.two.weight.data.transpose(2, 3)), r"two\.weight"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_changed_weights_are_refused_by_name(change: str, dtype: torch.dtype) -> None:
    make, named = CHANGES[change]
    model = BY_NAME["resnet_batchnorm"].build(dtype)
    before = Fingerprint.of(model)
    before.refuse_other(model)
    make(model)
    with pytest.raises(ModelError, match=named + ".*has changed"):
        before.refuse_other(model)


def test_other_parameters_are_refused_with_their_names() -> None:
    before = Fingerprint.of(nn.Linear(4, 3))
    with pytest.raises(ModelError, match=r"other parameters.*weight.*\(3, 5\)"):
        before.refuse_other(nn.Linear(5, 3))
    with pytest.raises(ModelError, match=r"other parameters.*bias"):
        before.refuse_other(nn.Linear(4, 3, bias=False))


# Models and data of training frameworks, with stand-ins that have the members by which these are recognised.
#
# The real packages are tested in tests/integrations.


class Trainer:
    lightning_module: nn.Module | None = None
    train_dataloader: Any = None
    val_dataloaders: Any = None

    def __deepcopy__(self, memo: Any) -> Trainer:
        raise AssertionError("the Trainer must not be copied")


class Module(nn.Module):
    """Has the members of a Lightning module: the Trainer raises while there is none, and so does logging outside it."""

    def __init__(self, trainer: Trainer | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self._trainer = trainer

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("not attached")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer

    def training_step(self) -> None: ...
    def configure_optimizers(self) -> None: ...
    def log_dict(self) -> None: ...

    def log(self, name: str, value: Any) -> None:
        raise AssertionError("no logging outside of training")

    def forward(self, x: Tensor) -> Tensor:
        self.log("mean", x.mean())
        return self.layer(x)


class Net:
    """Has the members of a skorch net."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module_ = module

    def initialize_module(self) -> None: ...
    def train_step_single(self) -> None: ...

    def get_dataset(self, x: Any, y: Any) -> Any:
        return ("dataset", x, y)

    def get_iterator(self, dataset: Any, training: bool) -> Any:
        return ("loader", dataset, training)


@pytest.mark.parametrize("trainer", [None, Trainer()])
def test_module_of_lightning_is_copied_without_its_trainer(trainer: Trainer | None) -> None:
    module = Module(trainer)
    copied = extract_network(module)
    x = torch.ones(4, 2)
    torch.testing.assert_close(copied(x), module.layer(x))
    assert not copied.training
    assert module.training
    assert module._trainer is trainer
    with pytest.raises(RuntimeError, match="not attached"):
        _ = copied.trainer
    copy.deepcopy(copied)


def test_module_that_cannot_be_copied_is_refused() -> None:
    module = Module()
    module.open_file = open(__file__)  # noqa: SIM115
    with module.open_file, pytest.raises(ModelError, match="cannot be copied"):
        extract_network(module)


def test_trainer_gives_its_module_and_its_data() -> None:
    trainer = Trainer()
    with pytest.raises(ModelError, match=r"trainer\.fit"):
        extract_network(trainer)
    with pytest.raises(DataError, match="no training data"):
        extract_data(trainer, None)
    trainer.lightning_module, trainer.train_dataloader = Module(trainer), ["batches"]
    assert isinstance(extract_network(trainer), Module)
    assert extract_data(trainer, None) == ["batches"]
    assert extract_data(trainer, ["others"]) == ["others"]


def test_skorch_net_gives_its_module_in_evaluation_mode_and_loads_arrays() -> None:
    np = pytest.importorskip("numpy")
    module, arrays = nn.Linear(2, 3), (np.ones((4, 2)), np.ones(4))
    assert extract_network(Net(module)) is module
    assert not module.training
    assert extract_data(Net(module), arrays) == ("loader", ("dataset", *arrays), False)
    tensors = (torch.ones(4, 2), torch.ones(4))
    assert extract_data(Net(module), tensors) is tensors
    with pytest.raises(ModelError, match=r"net\.fit"):
        extract_network(Net(None))


def test_other_models_and_data_stay_as_they_are() -> None:
    module, data = nn.Linear(2, 3), [(torch.ones(4, 2), torch.ones(4))]
    assert extract_network(module) is module
    assert module.training
    assert extract_data(module, data) is data
    with pytest.raises(DataError, match="data is None"):
        extract_data(module, None)


# Plain passes of a network: gradients of the named parameters alone, and a model that stays as it was.


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).eval()


# By hand, for 3-4-2 and five inputs: forward 12 + 8; the gradient of the last layer 8; to the first, 8 more and 12.
@pytest.mark.parametrize(
    ("names", "products"), [(("0.weight", "2.weight"), 20 + 8 + 8 + 12), (("2.weight",), 20 + 8)], ids=["all", "last"]
)
def test_the_gradients_of_the_named_parameters(names: tuple[str, ...], products: int) -> None:
    x = torch.randn(5, 3)
    with plain_passes(Network.build(model(), x), x, names) as passes:
        with OperationCount() as forward:
            passes.forward()
        with OperationCount() as training:
            passes.training()
    assert (forward.products, training.products) == (5 * 20, 5 * products)


def test_the_model_is_not_changed() -> None:
    net, x = model(), torch.randn(5, 3)
    net[0].weight.requires_grad_(False)
    before = [(p.clone(), p.requires_grad) for p in net.parameters()]
    with plain_passes(Network.build(net, x), x, ("0.weight", "2.weight")) as passes:
        passes.training()
    after = [(p, p.requires_grad) for p in net.parameters()]
    assert all(torch.equal(a, b) and f == g for (a, f), (b, g) in zip(before, after, strict=True))
    assert all(p.grad is None for p in net.parameters())
    assert trainable_names(net) == ("2.weight",)
