"""Outputs and their derivatives along directions: both ways against dense Jacobians, whole and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.networks import passes
from lapwing.networks import passes as directional
from lapwing.networks.network import Network
from lapwing.networks.passes import forward_products, outputs_along
from lapwing.networks.selection import subnetwork
from lapwing.networks.tangent import Tangent
from tests.cases import BY_NAME, Case, Wrapped
from tests.references import dense
from tests.tolerances import assert_close

D = torch.float64
NAMES = ["mlp", "resnet_batchnorm", "attention", "lstm", "token_level"]
COUNT, SIZE = 5, 4


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


def expected(model: nn.Module, inputs: Any, v: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.einsum("bcp,np->nbc", dense.jacobian(model, inputs, SIZE), v).reshape(len(v), SIZE, *shape)


@pytest.mark.parametrize("cheaper", [0.0, 1e9], ids=["jacobians", "forward mode"])
@pytest.mark.parametrize("together", [2, 16])
def test_both_ways_equal_the_dense_jacobian(
    case: Case, cheaper: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directional, "CHEAPER", cheaper)
    monkeypatch.setattr(directional, "TOGETHER", {"cpu": together, "cuda": together})
    model, inputs = case.build(), case.batch(SIZE)
    network = Network.build(model, inputs)
    v = torch.randn(COUNT, network.selection.size, dtype=D)
    f, products = outputs_along(network, inputs, v)
    assert_close(f, network(inputs))
    assert_close(products, expected(model, inputs, v, case.outputs))


def test_chunks_of_directions_and_samples_fit_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of two samples and two directions: at no time more than that goes through the network."""
    case = BY_NAME["resnet_batchnorm"]
    model, inputs = case.build(), case.batch(SIZE)
    network = Network.build(model, inputs)
    v = torch.randn(COUNT, network.selection.size, dtype=D)
    monkeypatch.setattr(directional, "TOGETHER", {"cpu": 2, "cuda": 2})
    seen: list[tuple[int, int]] = []
    plain = passes.push_forward

    def watched(model: nn.Module, inputs: Tensor, tangents: dict[str, Tensor], *facts: bool) -> Any:
        seen.append((len(inputs), len(next(iter(tangents.values())))))
        return plain(model, inputs, tangents, *facts)

    monkeypatch.setattr(passes, "pushed", watched)
    sizes = network.footprint
    with lw.memory.limited(2 * 2 * 8 * (2 * 2 * sizes.width + sizes.patches + sizes.graph)):
        _, products = forward_products(network, inputs, v)
    assert_close(products, expected(model, inputs, v, case.outputs))
    assert seen == [(2, 2)] * 4 + [(2, 1)] * 2


def test_few_directions_take_no_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 60)).double()
    x = torch.randn(SIZE, 3, dtype=D)
    network = Network.build(model, x)
    v = torch.randn(30, network.selection.size, dtype=D)
    by_jacobian = network.linearise(x).jacobians().jvp(v)
    monkeypatch.setattr(Tangent, "jacobians", lambda *_: pytest.fail("a Jacobian was computed"))
    assert_close(outputs_along(network, x, v)[1], by_jacobian)


def test_a_shifted_network_has_the_outputs_of_the_tangent_model(case: Case) -> None:
    model, inputs = case.build(), case.batch(SIZE)
    network = Network.build(model, inputs)
    v = torch.randn(1, network.selection.size, dtype=D)
    shifted = network.with_shift(0.3 * v[0])
    f, products = outputs_along(shifted, inputs, v)
    step = expected(model, inputs, v, case.outputs)
    assert_close(f, network(inputs) + 0.3 * step[0])
    assert_close(products, step)


def test_single_weights_and_no_direction_at_all() -> None:
    case = BY_NAME["mlp"]
    model, inputs = case.build(), case.batch(SIZE)
    index = torch.tensor([1, 5, 20, 33])
    network = Network.build(model, inputs, subnetwork(index))
    v = torch.randn(1, 4, dtype=D)
    full = torch.zeros(1, dense.jacobian(model, inputs, SIZE).shape[-1], dtype=D)
    full[:, index] = v
    assert_close(outputs_along(network, inputs, v)[1], expected(model, inputs, full, case.outputs))
    f, products = outputs_along(network, inputs, v[:0])
    assert_close(f, network(inputs))
    assert products.shape == (0, SIZE, *case.outputs)


class Once(torch.autograd.Function):
    """A square whose author wrote a gradient, but neither a forward rule nor a gradient of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad * ctx.saved_tensors[0]


def test_an_operation_without_a_forward_rule_takes_another_way() -> None:
    model = Wrapped(lambda m, x: m.head(Once.apply(m.lin(x))), lin=nn.Linear(3, 4), head=nn.Linear(4, 2)).double()
    x = torch.randn(SIZE, 3, dtype=D)
    network = Network.build(model, x)
    v = torch.randn(1, network.selection.size, dtype=D)
    f, products = outputs_along(network, x, v)
    assert_close(f, network(x))
    assert_close(products, expected(model, x, v, (2,)))


def test_memory_that_runs_out_is_not_taken_for_a_missing_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    case = BY_NAME["mlp"]
    network = Network.build(case.build(), case.batch(SIZE))
    monkeypatch.setattr(passes, "_forward_mode", full)
    with pytest.raises(torch.OutOfMemoryError):
        network.jvp(case.batch(SIZE), torch.zeros(1, network.selection.size, dtype=D))
