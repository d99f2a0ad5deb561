"""The table of autograd operations: entries that users add, and what an unknown operation costs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.attention import SDPBackend, sdpa_kernel

import lapwing as lw
from lapwing.networks import passes
from lapwing.networks.graph import read_graph
from lapwing.networks.network import Network
from lapwing.networks.ops import Operation, Slope, entries, operation, register, row_wise
from lapwing.networks.uses import NoRuleError
from tests.cases import Wrapped
from tests.tolerances import assert_close

D = torch.float64


class Cube(torch.autograd.Function):
    """An operation that no table can know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x.square() * grad


CUBE = "CubeBackward"


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    run = lambda m, x: m.head(Cube.apply(m.body(x)))
    return Wrapped(run, body=nn.Linear(3, 4), head=nn.Linear(4, 2)).double(), torch.randn(5, 3, dtype=D)


@pytest.fixture
def registered() -> Iterator[None]:
    register(Operation(CUBE, rows=row_wise, gradient=Slope(lambda node: 3 * node.saved_tensors[0].square())))
    yield
    register(Operation(CUBE))  # nothing is known of it


def calls_of_autograd(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = passes.by_autograd

    def noted(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(passes, "by_autograd", noted)
    return calls


def test_an_unknown_operation_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, (model, x) = calls_of_autograd(monkeypatch), network()
    jacobians = Network.build(model, x).linearise(x).jacobians()
    assert calls
    assert_close(jacobians.whole(), _reference(model, x))


def test_a_registered_operation_is_not(monkeypatch: pytest.MonkeyPatch, registered: None) -> None:
    calls, (model, x) = calls_of_autograd(monkeypatch), network()
    tangent = Network.build(model, x).linearise(x)
    assert all(tangent.graph.batch_major[use.node] for use in tangent.graph.uses)
    assert_close(tangent.jacobians().whole(), _reference(model, x))
    assert not calls


def _reference(model: nn.Module, x: Tensor) -> Tensor:
    rows = []
    for i in range(len(x)):
        f = model(x[i : i + 1])[0]
        each = [torch.autograd.grad(f[k], list(model.parameters()), retain_graph=True) for k in range(len(f))]
        rows.append(torch.stack([torch.cat([g.reshape(-1) for g in grads]) for grads in each]))
    return torch.stack(rows)


def test_one_entry_for_each_name() -> None:
    assert all(name == entry.name for name, entry in entries().items())
    x = torch.ones(2, 3, requires_grad=True)
    assert operation(x.tanh().grad_fn) is entries()["TanhBackward0"]
    unknown = operation(torch.special.i0(x).grad_fn)
    assert not any((unknown.carries_parameter, unknown.follows_shapes, unknown.gradient, unknown.uses))


FUNCTIONS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "silu": nn.functional.silu,
    "leaky_relu": lambda x: nn.functional.leaky_relu(x, 0.2),
    "add": lambda x: x + 2 * x.detach(),
    "mul": lambda x: x * x.detach(),
    "transpose": lambda x: x.transpose(-1, 1),
    "permute": lambda x: x.permute(2, 0, -2),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "view": lambda x: x.reshape(-1, 2),
    "sum": lambda x: x.sum((0, -1)),
    "mean": lambda x: x.mean(1, keepdim=True),
    "max_pool": lambda x: nn.functional.max_pool2d(x[None], 2, 1),
    "avg_pool": lambda x: nn.functional.avg_pool2d(x[None], 2),
    "scaled": lambda x: x * 0.3,
    "softmax": lambda x: x.softmax(-2),
    "masked_fill": lambda x: x.masked_fill(x.detach() > 0, 1.0),
    "select": lambda x: x.select(-1, -2),
    "slice": lambda x: x[:, 1:-1],
    "slice_with_steps": lambda x: x[..., 1::2],
    "slice_of_all": lambda x: x[:, :100],
    "cat": lambda x: torch.cat([x, torch.ones(3, 2, 6, dtype=D)], 1),
    "stack": lambda x: torch.stack([x, x.detach()], -1),
    "nearest": lambda x: nn.functional.interpolate(x[None], scale_factor=2.0),
    "adaptive_pool": lambda x: nn.functional.adaptive_avg_pool2d(x[None], (2, 3)),
}


def attention(x: Tensor, **options: Any) -> Tensor:
    """Attention of 4 queries to 6 keys with 2 heads."""
    q, k, v = x.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return nn.functional.scaled_dot_product_attention(q[:, :, :4], k, v, **options)


MASK = torch.ones(4, 6, dtype=torch.bool)
MASK[0, 2:] = MASK[1] = False  # the second query has no key
JOINT = {
    "attention": attention,
    "attention_causal": lambda x: attention(x, is_causal=True),
    "attention_scaled": lambda x: attention(x, scale=0.7),
    "attention_masked": lambda x: attention(x, attn_mask=MASK),
    "attention_biased": lambda x: attention(x, attn_mask=torch.linspace(-1, 1, 24, dtype=D).view(4, 6)),
    "bmm": lambda x: torch.bmm(x, (2 * x).mT),
    "unbind": lambda x: torch.stack(x.unbind(-1)[1:4:2]),
    "split": lambda x: torch.cat(x.split([1, 2, 3], -1)[::-1], -1),
    "chunk": lambda x: 2 * x.chunk(3, 1)[1],
    "several_uses": lambda x: torch.relu(x.unbind(0)[0] + x.unbind(0)[0].tanh()),
}


@pytest.mark.parametrize("name", JOINT)
def test_gradients_of_several_outputs_and_operands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole pass against autograd, seed by seed, with all seeds at once and with one at a time."""
    x = torch.randn(3, 6, 24 if "attention" in name else 6, dtype=D, generator=torch.Generator().manual_seed(0))
    output = JOINT[name](x * torch.ones_like(x[0], requires_grad=True))
    graph = read_graph(output)
    target = next(node for node in graph.nodes if node.name() == "MulBackward0" and node.next_functions[0][0] is None)
    seeds = torch.randn(5, *output.shape, dtype=D)
    expected = [torch.autograd.grad(output, [GradientEdge(target, 0)], seed, retain_graph=True)[0] for seed in seeds]
    monkeypatch.setattr(passes, "by_autograd", lambda *_: pytest.fail("autograd ran"))
    for size in ("1GB", 1):
        with lw.memory.limited(size):
            ((_, grad),) = passes.gradients(output, graph, [target], seeds, recurrent=False)
        assert_close(grad, torch.stack(expected))


def test_attention_with_shared_heads_is_left_to_autograd() -> None:
    q, kv = torch.randn(2, 4, 3, 8, requires_grad=True), torch.randn(2, 2, 3, 8)
    output = nn.functional.scaled_dot_product_attention(q * 1.0, kv, kv, enable_gqa=True)
    graph = read_graph(output)
    target = next(node for node in graph.nodes if node.name() == "MulBackward0")
    ((_, grad),) = passes.gradients(output, graph, [target], torch.ones(1, *output.shape), recurrent=False)
    (expected,) = torch.autograd.grad(output, [GradientEdge(target, 0)], torch.ones_like(output))
    assert_close(grad[0], expected)


def test_gradients_come_one_by_one_and_no_grad_stays_outside() -> None:
    """A caller that drops each has few in memory, and computes with gradients where it likes."""
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Tanh())])
    x = torch.randn(3, 4)
    tangent = Network.build(model, x).linearise(x)
    nodes = list(dict.fromkeys(use.node for use in tangent.graph.uses))
    alive: list[weakref.ref[Tensor]] = []
    for _, grad in passes.gradients(tangent.raw, tangent.graph, nodes, torch.ones(2, 3, 4), recurrent=False):
        assert torch.is_grad_enabled()
        alive = [other for other in alive if other() is not None]
        assert len(alive) <= 2
        alive.append(weakref.ref(grad))
        del grad


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("owned", [True, False])
def test_gradients_of_single_operations(name: str, owned: bool) -> None:
    """Against autograd, seed by seed. A gradient that is not owned stays as it is."""
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=D).requires_grad_()
    output = FUNCTIONS[name](x)
    node = output.grad_fn
    gradient = operation(node).gradient
    assert gradient is not None
    edge = GradientEdge(*node.next_functions[0])
    seeds = torch.randn(5, *output.shape, dtype=D)
    expected = torch.stack([torch.autograd.grad(output, [edge], seed, retain_graph=True)[0] for seed in seeds])
    given = seeds.clone()
    part, new = gradient.pull(node, given, 0, owned)
    assert_close(part, expected)
    if not owned:
        assert torch.equal(given, seeds)
    if new and not owned:
        assert part.data_ptr() != given.data_ptr()


def test_a_gradient_in_a_weight_has_no_rule() -> None:
    w = torch.randn(3, 2, requires_grad=True)
    node = (torch.randn(4, 3) @ w).grad_fn
    with pytest.raises(NoRuleError):
        operation(node).gradient.pull(node, torch.ones(1, 4, 2), 1, False)
