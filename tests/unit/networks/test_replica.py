"""The private copy that runs in the place of a model: same numbers, shared memory, nothing changed."""

from __future__ import annotations

import copy
import functools
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.networks.forward import Replica, borrow_copy, copy_modules, raw_output
from lapwing.networks.network import Network
from tests import problems
from tests.cases import BY_NAME, CASES
from tests.tolerances import assert_close

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


def test_hooks_that_come_and_go_after_the_fit() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 3)).double(), list[int]()
    posterior = lw.fit(model, [(X, Y)], "classification", prior=1.0)
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    posterior.predict(X)
    assert seen
    handle.remove()
    seen.clear()
    posterior.predict(X)
    assert not seen


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
