"""The table of operations: each entry, graphs of other makes, and the way without rules."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import lapwing as lw
from benchmarks.peak import held
from lapwing import errors
from lapwing.networks import linear_jacobian as linear_columns
from lapwing.networks import pull, tangent
from lapwing.networks import tangent as fallback
from lapwing.networks.graph import read_graph
from lapwing.networks.jacobians import DenseJacobian, Entries, LookupJacobian, PickedJacobian, are_few
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network
from lapwing.networks.ops import Operation, Slope, entries, operation, register, row_wise
from lapwing.networks.pull import NoRuleError
from lapwing.networks.selection import subnetwork
from tests.cases import BY_NAME, CASES, Wrapped
from tests.references import dense
from tests.tolerances import SOLVED, assert_close

# The table of autograd operations: entries that users add, and what an unknown operation costs.

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
    original = pull.by_autograd

    def noted(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(pull, "by_autograd", noted)
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
    monkeypatch.setattr(pull, "by_autograd", lambda *_: pytest.fail("autograd ran"))
    for size in ("1GB", 1):
        with lw.memory.limited(size):
            ((_, grad),) = pull.gradients(output, graph, [target], seeds, recurrent=False)
        assert_close(grad, torch.stack(expected))


def test_attention_with_shared_heads_is_left_to_autograd() -> None:
    q, kv = torch.randn(2, 4, 3, 8, requires_grad=True), torch.randn(2, 2, 3, 8)
    output = nn.functional.scaled_dot_product_attention(q * 1.0, kv, kv, enable_gqa=True)
    graph = read_graph(output)
    target = next(node for node in graph.nodes if node.name() == "MulBackward0")
    ((_, grad),) = pull.gradients(output, graph, [target], torch.ones(1, *output.shape), recurrent=False)
    (expected,) = torch.autograd.grad(output, [GradientEdge(target, 0)], torch.ones_like(output))
    assert_close(grad[0], expected)


def test_gradients_come_one_by_one_and_no_grad_stays_outside() -> None:
    """A caller that drops each has few in memory, and computes with gradients where it likes."""
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Tanh())])
    x = torch.randn(3, 4)
    tangent = Network.build(model, x).linearise(x)
    nodes = list(dict.fromkeys(use.node for use in tangent.graph.uses))
    alive: list[weakref.ref[Tensor]] = []
    for _, grad in pull.gradients(tangent.raw, tangent.graph, nodes, torch.ones(2, 3, 4), recurrent=False):
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


# Operations one by one, in small networks of their own: each rule, each way past a rule, each fallback.

Make = Callable[[], nn.Module]
BATCH = 5


def free(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def permuted(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m.head(torch.tanh(m.lin(x[order]))[order.argsort()])


def routed(m: Any, x: Tensor) -> Tensor:
    chosen = x[:, 0] > 0
    h = m.all(x).clone()
    h[chosen] = h[chosen] + m.some(x[chosen])
    return m.head(torch.tanh(h))


def masked_attention(m: Any, x: Tensor) -> Tensor:
    hidden = m.embed(x)
    hide = x[..., 0] > 0.5
    hide = torch.cat([torch.zeros_like(hide[:, :1]), hide[:, 1:]], 1)
    y, _ = m.attend(hidden, hidden, hidden, key_padding_mask=hide, need_weights=False)
    return m.head(y[:, 0])


def class_token(m: Any, x: Tensor) -> Tensor:
    return m.head(m.layer(torch.cat([m.token.expand(x.shape[0], -1, -1), m.embed(x)], 1))[:, 0])


def broadcast_bias(m: Any, x: Tensor) -> Tensor:
    """A bias as long as the product is wide, but added along another dimension."""
    return m.head(torch.tanh(m.lin(x).unsqueeze(-1) + m.bias).mean(2))


def squeeze_and_excite(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    return m.head((h * m.gate(h.mean((2, 3))).sigmoid()[:, :, None, None]).sum((-1, -2)))


VECTOR = (4,)
SEQUENCE = (5, 4)  # as many positions as samples
IMAGE = (2, 5, 6)
NETWORKS: dict[str, tuple[Make, tuple[int, ...]]] = {
    # where rows are not what their number suggests
    "time_major": (lambda: Wrapped(lambda m, x: m.head(torch.tanh(m.lin(x.transpose(0, 1)))).mean(0),
                                   lin=nn.Linear(4, 6), head=nn.Linear(6, 3)), SEQUENCE),
    "position_embedding": (lambda: Wrapped(lambda m, x: m.head(torch.tanh(m.lin(x) + m.place(torch.arange(5)))).mean(1),
                                           lin=nn.Linear(4, 6), place=nn.Embedding(5, 6), head=nn.Linear(6, 3)),
                           SEQUENCE),
    "position_parameter": (lambda: Wrapped(lambda m, x: m.head(torch.tanh(m.lin(x) + m.place)).mean(1),
                                           lin=nn.Linear(4, 6), place=free(5, 6), head=nn.Linear(6, 3)), SEQUENCE),
    "position_column": (lambda: Wrapped(lambda m, x: m.head(torch.tanh(m.lin(x) + m.place[:, None]).mean(1)),
                                        lin=nn.Linear(4, 6), place=free(5), head=nn.Linear(6, 3)), SEQUENCE),
    "shared_context": (lambda: Wrapped(lambda m, x: m.head(torch.tanh(m.lin(x) + m.context(m.start))),
                                       lin=nn.Linear(4, 6), start=free(1, 2), context=nn.Linear(2, 6),
                                       head=nn.Linear(6, 3)), VECTOR),
    "class_token": (lambda: Wrapped(class_token, embed=nn.Linear(4, 8), token=free(1, 1, 8), head=nn.Linear(8, 3),
                                    layer=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)),
                    SEQUENCE),
    "permuted_rows": (lambda: Wrapped(permuted, lin=nn.Linear(4, 6), head=nn.Linear(6, 3)), VECTOR),
    "routed_rows": (lambda: Wrapped(routed, all=nn.Linear(4, 6), some=nn.Linear(4, 6), head=nn.Linear(6, 3)), VECTOR),
    "masked_attention": (lambda: Wrapped(masked_attention, embed=nn.Linear(4, 8), head=nn.Linear(8, 3),
                                         attend=nn.MultiheadAttention(8, 2, batch_first=True)), SEQUENCE),
    "repeated_samples": (lambda: Wrapped(lambda m, x: m.head(torch.tanh(m.lin(x.repeat(2, 1)))).view(2, -1, 3).mean(0),
                                         lin=nn.Linear(4, 6), head=nn.Linear(6, 3)), VECTOR),
    # sums and products with a parameter
    "broadcast_bias": (lambda: Wrapped(broadcast_bias, lin=nn.Linear(4, 5, bias=False), bias=free(5),
                                       head=nn.Linear(5, 3)), VECTOR),
    "bias_apart": (lambda: Wrapped(lambda m, x: m.head(torch.tanh(m.lin(x) + m.bias)), bias=free(6),
                                   lin=nn.Linear(4, 6, bias=False), head=nn.Linear(6, 3)), VECTOR),
    "in_place": (lambda: Wrapped(lambda m, x: m.head(m.lin(x).add_(m.shift).mul_(m.scale)), shift=free(6),
                                 scale=free(6), lin=nn.Linear(4, 6, bias=False), head=nn.Linear(6, 3)), VECTOR),
    "layer_scale": (lambda: Wrapped(lambda m, x: m.head((F.relu(m.conv(x)) * m.scale).mean((2, 3))),
                                    conv=nn.Conv2d(2, 4, 3), scale=free(4, 1, 1), head=nn.Linear(4, 3)), IMAGE),
    "scalars": (lambda: Wrapped(lambda m, x: m.lin(x) * m.scale + m.shift, lin=nn.Linear(4, 3), scale=free(),
                                shift=free(1)), VECTOR),
    "difference_and_ratio": (lambda: Wrapped(lambda m, x: m.lin(x - m.shift) / m.scale, lin=nn.Linear(4, 3),
                                             shift=free(4), scale=free(3)), VECTOR),
    "channel_bias": (lambda: Wrapped(lambda m, x: m.head(torch.tanh(m.lin(x).transpose(1, 2) + m.bias).mean(2)),
                                     lin=nn.Linear(4, 6, bias=False), bias=free(5), head=nn.Linear(6, 3)), SEQUENCE),
    # ways to multiply
    "columns": (lambda: Wrapped(lambda m, x: torch.tanh(x @ m.first) @ m.second, first=free(4, 6), second=free(6, 3)),
                VECTOR),
    "weight_on_the_left": (lambda: Wrapped(lambda m, x: m.head(torch.tanh((m.weight @ x.T).T)), weight=free(5, 4),
                                           head=nn.Linear(5, 3)), VECTOR),
    "rows_of_a_weight": (lambda: Wrapped(lambda m, x: F.linear(x, m.w[2:5], m.b[2:5]) + F.linear(x, m.w[:3]),
                                         w=free(6, 4), b=free(6)), VECTOR),
    "alpha_and_beta": (lambda: Wrapped(lambda m, x: torch.addmm(m.b, x, m.w, alpha=0.5, beta=2.0), w=free(4, 3),
                                       b=free(3)), VECTOR),
    "squared_weight": (lambda: Wrapped(lambda m, x: x @ (m.w @ m.w), w=free(4, 4)), VECTOR),
    "einsum": (lambda: Wrapped(lambda m, x: m.head(torch.einsum("bti,ijk->btjk", x, m.w).flatten(2).tanh()).mean(1),
                               w=free(4, 2, 3), head=nn.Linear(6, 3)), SEQUENCE),
    "bilinear": (lambda: Wrapped(lambda m, x: m.head(torch.tanh(m.pair(x, x[:, :3]))), pair=nn.Bilinear(4, 3, 5),
                                 head=nn.Linear(5, 2)), VECTOR),
    "checkpointed": (lambda: Wrapped(lambda m, x: m.head(checkpoint(m.lin, x, use_reentrant=False).tanh()),
                                     lin=nn.Linear(4, 6), head=nn.Linear(6, 3)), VECTOR),
    "detached": (lambda: Wrapped(lambda m, x: m.head(m.lin(x).detach()) + m.skip(x), lin=nn.Linear(4, 6),
                                 head=nn.Linear(6, 3), skip=nn.Linear(4, 3)), VECTOR),
    "unused": (lambda: Wrapped(lambda m, x: m.lin(x), lin=nn.Linear(4, 3), spare=nn.Linear(2, 5)), VECTOR),
    "vector_output": (lambda: Wrapped(lambda m, x: torch.tanh(x @ m.w), w=free(4)), VECTOR),
    "vector_output_fallback": (lambda: Wrapped(
        lambda m, x: m.net(x).squeeze(-1),
        net=nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 1))), VECTOR),
    # convolutions and norms
    "circular_padding": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.Tanh(),
                                               nn.Flatten(), nn.Linear(120, 3)), IMAGE),
    "strided_dilated": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=(1, 2), dilation=(1, 2)), nn.Tanh(),
                                              nn.Flatten(), nn.Linear(36, 3)), IMAGE),
    "conv_3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)), (2, 3, 4, 3)),
    "conv_transpose_1d": (lambda: nn.Sequential(nn.ConvTranspose1d(2, 4, 3, stride=2, dilation=2), nn.Tanh(),
                                                nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)), (2, 5)),
    "shared_convolution": (lambda: Wrapped(lambda m, x: m.head(m.conv(torch.tanh(m.conv(x))).mean((2, 3))),
                                           conv=nn.Conv2d(2, 2, 2, padding=1), head=nn.Linear(2, 3)), IMAGE),
    "instance_norm": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Tanh(),
                                            nn.Flatten(), nn.Linear(48, 3)), IMAGE),
    "layer_norm_2d": (lambda: nn.Sequential(nn.LayerNorm((5, 4)), nn.Flatten(), nn.Linear(20, 3)), SEQUENCE),
    "rms_norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.Tanh(), nn.Linear(6, 3)), VECTOR),
    "spectral_norm": (lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(),
                                            nn.Linear(6, 3)), VECTOR),
    # the backward pass, one operation after another
    "overlapping_max_pool": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.MaxPool2d(3, 1, 1), nn.Flatten(),
                                                   nn.Linear(80, 3)), IMAGE),
    "average_pool": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.AvgPool2d(3, 2, 1), nn.Tanh(), nn.Flatten(),
                                           nn.Linear(24, 3)), IMAGE),
    "average_pool_without_padding": (lambda: nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), nn.Tanh(), nn.Flatten(),
        nn.LazyLinear(3)), IMAGE),
    "adaptive_pool": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.AdaptiveAvgPool2d((3, 2)), nn.Tanh(), nn.Flatten(),
                                            nn.Linear(24, 3)), IMAGE),
    "activations": (lambda: nn.Sequential(
        nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 6), nn.LeakyReLU(0.2), nn.Linear(6, 6), nn.GELU("tanh"),
        nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.ELU(), nn.Linear(6, 6),
        nn.ReLU6(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 3)), VECTOR),
    "same_tensor_twice": (lambda: Wrapped(lambda m, x: (lambda h: m.head(h * h + h))(m.lin(x)), lin=nn.Linear(4, 6),
                                          head=nn.Linear(6, 3)), VECTOR),
    "squeeze_and_excite": (lambda: Wrapped(
        squeeze_and_excite,
        conv=nn.Conv2d(2, 4, 2), gate=nn.Linear(4, 4), head=nn.Linear(4, 3)), IMAGE),
    "sums_and_means": (lambda: Wrapped(
        lambda m, x: m.head(m.lin(x).tanh().sum(1, keepdim=True).squeeze(1) + m.lin(x).mean(-2)),
        lin=nn.Linear(4, 6), head=nn.Linear(6, 3)), SEQUENCE),
    # a gradient that two places hold must not be changed in place by one of them
    "one_position_and_bias": (lambda: Wrapped(lambda m, x: m.lin(x).tanh().sum(1) + m.bias, lin=nn.Linear(4, 3),
                                              bias=free(3)), (1, 4)),
    "transposed_and_bias": (lambda: Wrapped(lambda m, x: (m.lin(x).tanh().transpose(1, 2) + m.bias).flatten(1),
                                            lin=nn.Linear(4, 3), bias=free(5)), SEQUENCE),
    "two_branches_of_one_sum": (lambda: Wrapped(
        lambda m, x: m.one(x).tanh() + m.two(x).sigmoid() + m.bias, one=nn.Linear(4, 3), two=nn.Linear(4, 3),
        bias=free(3)), VECTOR),
    "weighted_sum": (lambda: Wrapped(lambda m, x: m.head(torch.add(m.one(x).tanh(), m.two(x), alpha=-2.5)),
                                     one=nn.Linear(4, 6), two=nn.Linear(4, 6), head=nn.Linear(6, 3)), VECTOR),
    "channels_last": (lambda: Wrapped(
        lambda m, x: m.head(m.conv(x).permute(0, 2, 3, 1).contiguous().mean((1, 2))), conv=nn.Conv2d(2, 4, 2),
        head=nn.Linear(4, 3)), IMAGE),
    "mixer": (lambda: Wrapped(lambda m, x: m.head(m.norm(x + m.mix(x.transpose(1, 2)).tanh().transpose(1, 2)).mean(1)),
                              mix=nn.Linear(5, 5), norm=nn.LayerNorm(4), head=nn.Linear(4, 3)), SEQUENCE),
    "plain_norms": (lambda: nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4, affine=False), nn.Tanh(), nn.Flatten(), nn.Linear(80, 6),
        nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3)), IMAGE),
    "strided_backward": (lambda: nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 4, 2, stride=(3, 2), padding=(0, 1), dilation=(1, 2)), nn.Tanh(),
        nn.ConvTranspose2d(4, 2, 2, stride=2, output_padding=1), nn.Flatten(), nn.LazyLinear(3)), IMAGE),
    # recurrent
    "gru_cell": (lambda: Wrapped(lambda m, x: m.head(m.cell(x[:, 1], m.cell(x[:, 0]))), cell=nn.GRUCell(4, 6),
                                 head=nn.Linear(6, 2)), SEQUENCE),
    "bidirectional_rnn": (lambda: Wrapped(lambda m, x: m.head(m.cell(x)[0][:, -1]), head=nn.Linear(12, 2),
                                          cell=nn.RNN(4, 6, batch_first=True, bidirectional=True)), SEQUENCE),
    "projected_lstm": (lambda: Wrapped(lambda m, x: m.head(m.cell(x)[0][:, -1]), head=nn.Linear(3, 2),
                                       cell=nn.LSTM(4, 6, batch_first=True, proj_size=3)), SEQUENCE),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = NETWORKS[name]
    torch.manual_seed(1)
    model, inputs = make().double().eval(), torch.randn(BATCH, *shape, dtype=torch.float64)
    with torch.no_grad():
        model(inputs)  # lets a lazy layer find its size
    return model, inputs


@pytest.mark.parametrize("name", NETWORKS)
def test_operation(name: str) -> None:
    model, inputs = build(name)
    jac = dense.jacobian(model, inputs, BATCH)
    network = Network.build(model, inputs)
    assert_close(network.linearise(inputs).jacobians().whole(), jac)
    v = torch.randn(2, jac.shape[-1], dtype=torch.float64)
    assert_close(network.jvp(inputs, v).flatten(2), torch.einsum("bcp,np->nbc", jac, v))
    u = torch.randn(2, BATCH, *network.output_shape, dtype=torch.float64)
    assert_close(network.vjp(inputs, u), torch.einsum("bcp,nbc->np", jac, u.flatten(2)))


def test_a_bias_added_apart_joins_its_weight() -> None:
    model, inputs = build("bias_apart")
    joined = {block.weight: block.bias for block in Network.build(model, inputs).layout}
    assert joined == {"lin.weight": "bias", "head.weight": "head.bias"}


def test_an_operation_without_a_rule_is_reported() -> None:
    model, inputs = build("difference_and_ratio")
    why = {block.weight: block.why for block in Network.build(model, inputs).layout if not block.linear}
    assert set(why) == {"shift", "scale"}
    assert "Sub" in why["shift"]
    assert "Div" in why["scale"]


def test_unused_parameter_is_named_as_such() -> None:
    model, inputs = build("unused")
    why = {block.weight: block.why for block in Network.build(model, inputs).layout}
    assert why["spare.weight"] == why["spare.bias"] == "not used by the network"
    assert why["lin.weight"] == ""


def test_a_linear_map_says_its_groups_and_its_bias() -> None:
    case = BY_NAME["conv_zoo"]
    handling = [block.handling for block in Network.build(case.build(), case.batch(3)).layout]
    assert handling[0] == "linear map in 2 groups, with its bias"
    assert handling[-1] == "linear map, with its bias"


# The columns of single weights against brute force, and the memory that they take.

ENTRIES_BATCH = 4


@pytest.fixture(params=["gathered", "banded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take one way for all layers, whatever it costs."""
    monkeypatch.setattr(linear_columns, "LAYER_SPEED", 0 if request.param == "gathered" else 10**9)
    return request.param


EVERY_WAY = [(case.name, way, (way == "gathered") == (i % 2 == 0))
             for i, case in enumerate(CASES) for way in ("gathered", "banded")]  # fmt: skip


def some(size: int, share: float) -> Tensor:
    """Positions in no order: theta has the order in which they are given."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(3))[: max(2, int(share * size))]


@pytest.mark.parametrize(("name", "way", "picked"), EVERY_WAY, indirect=["way"])
def test_columns_equal_brute_force(name: str, way: str, picked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product with the Jacobian, whether the columns are picked first or the factors are kept."""
    monkeypatch.setattr(tangent, "are_few", lambda *_: picked)
    model, inputs = BY_NAME[name].build(), BY_NAME[name].batch(ENTRIES_BATCH)
    whole = dense.jacobian(model, inputs, ENTRIES_BATCH)
    index = some(whole.shape[-1], 0.1 if picked else 0.8)
    expected = whole[..., index]
    network = Network.build(model, inputs, subnetwork(index))
    jacobians = network.linearise(inputs).jacobians()
    assert all(isinstance(part, PickedJacobian) == picked or isinstance(part, LookupJacobian) for _, part in jacobians)
    assert_close(jacobians.whole(), expected)
    assert_close(jacobians.samples(slice(1, 3)).double().whole(), expected[1:3])
    v = torch.randn(3, len(index), dtype=D)
    assert_close(jacobians.jvp(v), torch.einsum("bcp,np->nbc", expected, v))
    u = torch.randn(3, ENTRIES_BATCH, expected.shape[1], dtype=D)
    assert_close(jacobians.vjp(u), torch.einsum("bcp,nbc->np", expected, u))
    assert_close(jacobians.materialise().gram(v), torch.einsum("bcp,bcq,nq->np", expected, expected, v))
    with lw.memory.limited(1):
        assert_close(jacobians.whole(), expected)


@pytest.mark.parametrize("name", ["mlp", "conv_zoo", "embedding", "token_level"])
def test_sums_over_picked_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights of zero for all that is not chosen, as a precision of single weights has them."""
    case = BY_NAME[name]
    model, inputs = case.build(), case.batch(ENTRIES_BATCH)
    index = some(sum(p.numel() for p in model.parameters()), 0.3)
    network = Network.build(model, inputs, subnetwork(index))
    d = network.selection.split(torch.rand(len(index), dtype=D))
    plain = network.linearise(inputs).jacobians()
    monkeypatch.setattr(tangent, "are_few", lambda *_: True)
    picked = network.linearise(inputs).jacobians()
    for (block, one), (_, two) in zip(plain, picked, strict=True):
        weights, mask = block.arrange(d), (block.arrange(d) != 0).double()
        assert_close(two.squares().reshape(block.form) * mask, one.squares().reshape(block.form) * mask)
        for full in (True, False):
            assert_close(
                two.quadratic_form(weights, plain.tokens, full), one.quadratic_form(weights, plain.tokens, full)
            )
        assert_close(two.between(two, weights), one.between(one, weights))
        assert_close(two.between(one, weights), one.between(one, weights))
        assert_close(one.between(two, weights), one.between(one, weights))
        if isinstance(two, PickedJacobian):
            assert_close(two.add(two).whole(), 2 * two.whole())
            assert two.materialised_size() == two.materialise().nbytes // 8


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("positions", [1, 6])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_columns_of_a_linear_map(groups: int, positions: int, count: int, way: str) -> None:
    a, g = torch.randn(groups, 4, positions, 7, dtype=D), torch.randn(groups, 2, 4, positions, 5, dtype=D)
    part, at = LinearJacobian(a, g), torch.randperm(groups * 35)[:count].sort().values
    if groups == 1:
        at = at[at < 35]
    entries = Entries((groups, 5, 7), at, torch.arange(len(at)))
    assert_close(part.columns(entries), part.whole().flatten(2)[..., at])


def test_runs_of_one_output_are_no_longer_than_twice_the_entries() -> None:
    """One output has nearly all of the entries."""
    at = torch.cat([torch.arange(90), torch.tensor([100, 205, 311, 498])])
    outputs, inputs, place = Entries((1, 5, 100), at, at).equal_runs
    assert inputs.numel() <= 2 * len(at) + inputs.shape[1] * 5
    assert torch.equal(inputs.reshape(-1)[place] + 100 * outputs.repeat_interleave(inputs.shape[1])[place], at)


@pytest.mark.parametrize(
    ("count", "size", "seeds", "positions", "expected"),
    [(10, 1000, 10, 1, True), (13, 1000, 10, 1, False), (200, 1000, 10, 16, True), (501, 1000, 10, 999, False)],
)
def test_few(count: int, size: int, seeds: int, positions: int, expected: bool) -> None:
    assert are_few(count, size, seeds, positions) is expected


def pixels(width: int) -> tuple[nn.Module, Tensor]:
    """A convolution with 81 times the square of ``width`` weights, on images of four pixels."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, width, 1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.Flatten(), nn.Linear(4 * width, 6)
    )
    return net.eval(), torch.randn(16, 3, 2, 2)


def taken(width: int, count: int) -> int:
    """Return the bytes that the columns of so many weights of the convolution take."""
    net, x = pixels(width)
    start = sum(p.numel() for p in net[0].parameters())
    index = start + torch.arange(count) * (9 * width**2 // count)
    network = Network.build(net, x, subnetwork(index))
    tangent = network.linearise(x)
    network.refuse_wrong(tangent)  # only for the first batch
    return held(lambda: tangent.jacobians().whole()).most


def test_memory_does_not_grow_with_the_layers_that_are_touched() -> None:
    """The gradients and unfolded inputs of a layer grow with its width; all of its columns with the square."""
    few, wide = taken(32, 60), taken(128, 60)
    columns = 4 * 16 * 6 * 9 * 128**2  # bytes of all columns of the wider layer
    assert wide < 6 * few
    assert wide < columns / 10


def test_the_footprint_counts_the_columns() -> None:
    net, x = pixels(32)
    sizes = [Network.build(net, x, subnetwork(torch.arange(200, 200 + n))).footprint.whole for n in (50, 700)]
    assert sizes == [0, 700]  # 50 are fewer than the gradients of the layer


def test_a_full_posterior_of_some_weights_of_a_wide_layer() -> None:
    """A fit and a prediction together take less than the columns of one layer would."""
    net, x = pixels(128)
    index = torch.arange(60) * 2400
    y = torch.randint(0, 6, (16,))
    call = lambda: lw.fit(net, [(x, y)], "classification", method=lw.Full(), weights=subnetwork(index), prior=1.0)
    fit = held(call)
    assert fit.most < 4 * 16 * 6 * 9 * 128**2 / 2
    assert held(lambda: fit.result.functions(x).cov).most < 4 * 16 * 6 * 9 * 128**2 / 4


# Models whose graph changes from batch to batch, and models that keep what they computed from their weights.


def by_rows(model: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian (B, C, P) of the outputs of a whole batch, one backward pass for each number."""
    f = dense.output(model, x)
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    each = [torch.autograd.grad(value, list(model.parameters()), **options) for value in f.reshape(-1)]
    return torch.stack([torch.cat([g.reshape(-1) for g in grads]) for grads in each]).reshape(*f.shape, -1)


def convolution(s: Any, x: Tensor) -> Tensor:
    product = lambda: (s.c.weight.flatten(1) @ F.unfold(x, 3) + s.c.bias[:, None]).unflatten(2, (2, 2))
    return s.h(torch.tanh(s.c(x) if len(x) > 2 else product()).mean((2, 3)))


def norm(s: Any, x: Tensor) -> Tensor:
    h = s.l(x)
    if len(x) > 2:
        return s.h(torch.tanh(s.n(h)))
    h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + s.n.eps).sqrt()
    return s.h(torch.tanh(h * s.n.weight + s.n.bias))


def experts(s: Any, x: Tensor) -> Tensor:
    """Hard routing: an expert without a sample is not run."""
    chosen, out = (x[:, 0] > 0.3).long() + (x[:, 0] > 0.9).long(), x.new_zeros(len(x), 2)
    for number, expert in enumerate(s.e):
        rows = (chosen == number).nonzero()[:, 0]
        if len(rows):
            out = out.index_add(0, rows, expert(x[rows]))
    return out


def lora(s: Any, x: Tensor) -> Tensor:
    if len(x) > 2:
        return s.h(torch.tanh(s.l(x) + x @ s.a.T @ s.b.T))
    return s.h(torch.tanh(F.linear(x, s.l.weight + s.b @ s.a, s.l.bias)))  # merged


def lengths(s: Any, x: Tensor) -> Tensor:
    h = F.linear(x, s.w) if x.shape[1] < 4 else torch.einsum("btd,od->bto", x, s.w * 1.0)
    return torch.tanh(h).mean(1) @ s.h


OtherGraphsCase = tuple[Callable[[], nn.Module], Callable[[int], Tensor]]
OTHER_GRAPHS_CASES: dict[str, OtherGraphsCase] = {
    "one sample": (
        lambda: Wrapped(
            lambda s, x: (s.w @ x[0] + s.b)[None] if len(x) == 1 else F.linear(x, s.w, s.b),
            w=free(3, 4), b=free(3),
        ), lambda n: torch.randn(n, 4),
    ),
    "bias apart": (
        lambda: Wrapped(
            lambda s, x: F.linear(x, s.w, s.b) if len(x) > 2 else 2 * (x @ s.w.T) + 3 * s.b - x @ s.w.T,
            w=free(3, 4), b=free(3),
        ), lambda n: torch.randn(n, 4),
    ),
    "other orientation": (
        lambda: Wrapped(
            lambda s, x: x @ s.w if len(x) > 2 else F.linear(x, s.w.T.contiguous()), w=free(4, 3)
        ), lambda n: torch.randn(n, 4),
    ),
    "lookup": (
        lambda: Wrapped(
            lambda s, t: torch.tanh(F.one_hot(t, 7).to(s.h) @ s.e.weight if len(t) > 2 else s.e(t)).mean(1) @ s.h,
            e=nn.Embedding(7, 5), h=free(5, 2),
        ), lambda n: torch.randint(0, 7, (n, 3)),
    ),
    "convolution": (
        lambda: Wrapped(convolution, c=nn.Conv2d(2, 4, 3), h=nn.Linear(4, 3)), lambda n: torch.randn(n, 2, 4, 4),
    ),
    "norm": (
        lambda: Wrapped(norm, l=nn.Linear(4, 5), n=nn.LayerNorm(5), h=nn.Linear(5, 2)), lambda n: torch.randn(n, 4),
    ),
    "experts": (
        lambda: Wrapped(
            experts,
            e=nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(3)),
        ), lambda n: torch.randn(n, 4) - 2.0 * (n > 5),
    ),
    "merged": (
        lambda: Wrapped(lora, l=nn.Linear(4, 5), a=free(2, 4), b=free(5, 2), h=nn.Linear(5, 2)),
        lambda n: torch.randn(n, 4),
    ),
}  # fmt: skip
METHODS = [lw.Full(), lw.Diagonal(), lw.KernelSpace(), lw.Kron()]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("name", OTHER_GRAPHS_CASES)
def test_every_batch_gets_the_jacobian_of_its_own_graph(name: str, method: Any) -> None:
    torch.manual_seed(1)
    model, make = OTHER_GRAPHS_CASES[name][0]().to(D), OTHER_GRAPHS_CASES[name][1]
    cast = lambda x: x.to(D) if x.is_floating_point() else x
    inputs = [cast(make(n)) for n in (6, 1, 2, 5)]
    jac = by_rows(model, inputs[0])
    data = [(inputs[0], torch.randn(jac.shape[:2], dtype=D))]
    posterior = lw.fit(model, data, lw.Gaussian(0.5), method=method, prior=1.0)
    lam = torch.einsum("bcp,bcq->pq", jac, jac) / 0.25 + torch.eye(jac.shape[-1], dtype=D)
    for x in inputs:
        j = by_rows(model, x)
        if isinstance(method, lw.Kron):
            solved = posterior.posterior.precision.solve(j.flatten(0, 1)).reshape(j.shape)
        else:
            solved = torch.linalg.solve(lam.diag().diag() if isinstance(method, lw.Diagonal) else lam, j.mT).mT
        assert_close(posterior.functions(x).cov, j @ solved.mT, SOLVED)


def test_kronecker_factors_of_two_operations_are_refused_and_full_takes_both() -> None:
    torch.manual_seed(0)
    model = Wrapped(lengths, w=free(5, 4), h=free(5, 2)).to(D)
    data = [(torch.randn(6, t, 4, dtype=D), torch.randn(6, 2, dtype=D)) for t in (3, 7)]
    with pytest.raises(errors.ModelError, match=r"'w' in another way.*Full\(\)"):
        lw.fit(model, data, lw.Gaussian(0.5), prior=1.0)
    jac = torch.cat([by_rows(model, x) for x, _ in data])
    lam = torch.einsum("bcp,bcq->pq", jac, jac) / 0.25 + torch.eye(jac.shape[-1], dtype=D)
    posterior = lw.fit(model, data, lw.Gaussian(0.5), method=lw.Full(), prior=1.0)
    cov = torch.cat([posterior.functions(x).cov for x, _ in data])
    assert_close(cov, jac @ torch.linalg.solve(lam, jac.mT), SOLVED)


def test_a_wrong_rule_is_refused_and_names_the_parameter() -> None:
    """The comparison with autograd does not depend on the cause: here an entry of the table has half of the slope."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(D)
    x, right = torch.randn(5, 4, dtype=D), entries()["TanhBackward0"]
    wrong = Slope(lambda node: 0.5 * (1 - node._saved_result.square()))
    network = Network.build(model, x)
    register(Operation("TanhBackward0", rows=row_wise, gradient=wrong))
    try:
        with pytest.raises(errors.ModelError, match=r"Jacobian of '0\.weight'.*differs from autograd's by 0\.5 of"):
            network.linearise(x).jacobians()
    finally:
        register(right)
    network.linearise(x).jacobians()


@pytest.mark.parametrize(("rows", "times"), [(4, 1), (1, 2)])
def test_a_smaller_batch_is_compared_again_only_if_its_graph_differs(
    rows: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of eight rows is no other graph where four of them would be two for each sample."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(D)
    network, compared = Network.build(model, torch.randn(5, 8, dtype=D)), []
    compare = tangent.compare
    monkeypatch.setattr(
        "lapwing.networks.network.compare", lambda t, first: compared.append(first) or compare(t, first)
    )
    for count in (5, rows, 5, rows):
        network.linearise(torch.randn(count, 8, dtype=D)).jacobians()
    assert len(compared) == times


class Kept(nn.Module):
    """A network that computes a weight from another once and keeps it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.h = nn.Linear(3, 4), nn.Linear(4, 2)
        self.way, self.c, self.d, box = way, None, dict[str, Tensor](), dict[str, Tensor]()
        self.closure = lambda w: box.setdefault("w", 2 * w)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "closure":
            w = self.closure(self.l.weight)
        elif self.way == "dictionary":
            w = self.d.setdefault("w", 2 * self.l.weight)
        else:
            if self.c is None:
                self.c = 2 * (self.l.weight.detach() if self.way == "detached" else self.l.weight)
            w = self.c
        return self.h(torch.tanh(F.linear(x, w, self.l.bias)))


X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
DATA = [(X, torch.arange(20) % 2)]


@pytest.mark.parametrize("way", ["attribute", "dictionary"])
def test_a_weight_that_a_run_keeps_is_computed_in_every_run(way: str) -> None:
    model = Kept(way)
    always = Wrapped(lambda s, x: s.h(torch.tanh(F.linear(x, 2 * s.l.weight, s.l.bias))), l=model.l, h=model.h)
    fits = [lw.fit(each, DATA, "classification", method=lw.Full(), prior=1.0) for each in (model, always)]
    for _ in range(2):
        assert_close(fits[0].functions(X).cov, fits[1].functions(X).cov, SOLVED)
    v = torch.ones(1, fits[0].network.selection.size)
    assert_close(fits[0].network.jvp(X, v), fits[1].network.jvp(X, v))
    assert_close(fits[0].network.at(v[0], X), fits[1].network.at(v[0], X))
    assert model.c is None
    assert not model.d


@pytest.mark.parametrize(
    ("way", "before"),
    [
        ("attribute", torch.no_grad), ("attribute", torch.enable_grad), ("dictionary", torch.no_grad),
        ("closure", None), ("closure", torch.enable_grad), ("detached", None), ("detached", torch.no_grad),
    ],
)  # fmt: skip
def test_a_weight_that_was_kept_before_the_fit_is_refused(way: str, before: Any) -> None:
    model = Kept(way)
    if before is not None:
        with before():
            model(X)
    with pytest.raises(errors.ModelError, match=r"keeps a value that it computed from 'l\.weight'.*every forward"):
        lw.fit(model, DATA, "classification", method=lw.Full(), prior=1.0)


def test_constants_and_masks_beside_the_parameters_are_accepted() -> None:
    class Constant(nn.Linear):
        scale, last, mask = torch.ones(3), None, None  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x * self.scale)
            if self.mask is None:
                self.mask = torch.ones(2)
            return self.last * self.mask

    model, plain = Constant(3, 2), nn.Linear(3, 2)
    model.scale, model.first = torch.ones(3), torch.randn(5)
    plain.load_state_dict(model.state_dict())
    model(X)
    fits = [lw.fit(each, DATA, "classification", method=lw.Full(), prior=1.0) for each in (model, plain)]
    assert_close(fits[0].functions(X).cov, fits[1].functions(X).cov, SOLVED)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def exported(dynamic: bool) -> nn.Module:
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    return torch.export.export(mlp(), (X,), dynamic_shapes=shapes).module()


@pytest.mark.parametrize("made", [lambda: torch.fx.symbolic_trace(mlp()), lambda: exported(True)], ids=["fx", "export"])
def test_traced_graphs_give_the_numbers_of_the_model(made: Callable[[], nn.Module]) -> None:
    fits = [lw.fit(each, DATA, "classification", prior=1.0) for each in (made(), mlp())]
    assert_close(fits[0].functions(X[:3]).cov, fits[1].functions(X[:3]).cov)
    assert_close(fits[0].network.jvp(X, torch.ones(1, 26)), fits[1].network.jvp(X, torch.ones(1, 26)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[:, None])[0][:, -1])


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return mlp()


def spare(value: float) -> nn.Module:
    return Wrapped(lambda s, x: s.l(x), l=nn.Linear(3, 2), u=nn.Parameter(torch.full((3,), value)))


SCRIPTED = pytest.mark.filterwarnings("ignore:.*torch.jit")
UNUSABLE: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "scripted": (lambda: torch.jit.script(mlp()), errors.ModelError, "the model is made by torch.jit.*load_state_dict"),
    "scripted part": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)),
        errors.ModelError, r"^0 is made by torch.jit",
    ),
    "scripted LSTM": (lambda: torch.jit.script(Recurrent()), errors.ModelError, "made by torch.jit"),
    "traced": (lambda: torch.jit.trace(mlp(), X), errors.ModelError, "made by torch.jit"),
    "exported": (lambda: exported(False), errors.InputError, "dynamic_shapes"),
    "inference mode": (made_for_inference, errors.ModelError, r"'0\.weight'.*inference_mode.*deepcopy"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), errors.ModelError, r"'0\.weight'.*Run the model on a batch"),
    "unused NaN": (lambda: spare(torch.nan), errors.ModelError, "'u'.*NaN or infinite.*requires_grad_"),
}  # fmt: skip


@SCRIPTED
@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_modules_are_refused_with_the_remedy(name: str) -> None:
    make, error, message = UNUSABLE[name]
    with pytest.raises(error, match=message):
        lw.fit(make(), DATA, "classification", prior=1.0)


def test_the_remedies_work() -> None:
    frozen = spare(torch.nan)
    frozen.u.requires_grad_(False)
    for model in (copy.deepcopy(made_for_inference()), frozen):
        posterior = lw.fit(model, DATA, "classification", prior=1.0)
        assert bool(posterior.functions(X).variance.isfinite().all())


# Parameters without a rule: all in one pass for each chunk, and chunks under the byte budget.

weight_norm = nn.utils.parametrizations.weight_norm


def normed() -> nn.Module:
    """Two opaque weights and their lengths: 30 x 20 + 30 + 5 x 30 + 5 numbers without a rule."""
    return nn.Sequential(weight_norm(nn.Linear(20, 30)), nn.Tanh(), weight_norm(nn.Linear(30, 5))).double()


def tied() -> nn.Module:
    """A table that is also the head: 50 x 6 numbers, used in both orientations."""
    return Wrapped(lambda m, t: torch.tanh(m.table(t)).mean(1) @ m.table.weight.T, table=nn.Embedding(50, 6)).double()


def fallback_spare() -> nn.Module:
    return Wrapped(lambda m, x: m.used(x), used=nn.Linear(20, 3), spare=nn.Linear(20, 30)).double()


BATCHES: dict[str, tuple[Any, Any, int]] = {
    "weight norm": (normed, lambda b: torch.randn(b, 20, dtype=torch.float64), 30 * 20 + 30 + 5 * 30 + 5),
    "tied": (tied, lambda b: torch.randint(0, 50, (b, 4)), 50 * 6),
    "unused": (fallback_spare, lambda b: torch.randn(b, 20, dtype=torch.float64), 30 * 20),
}


@pytest.mark.parametrize("name", BATCHES)
def test_whole_jacobians_are_in_the_byte_budget(name: str) -> None:
    """Half of it is for gradients: one half of that for what lives, as much again for what a pass takes."""
    make, batch, numbers = BATCHES[name]
    model, inputs = make(), batch(40)
    network = Network.build(model, inputs)
    assert network.footprint.whole == numbers
    sizes = network.footprint
    budget = (
        6 * 8 * (2 * network.output_shape[0] * (numbers + sizes.width) + sizes.patches + sizes.passing)
    )  # six samples
    with lw.memory.limited(2 * budget):
        parts = [tangent.jacobians() for _, tangent in network.tangents(inputs)]
    assert max(part.batch for part in parts) == 6
    for part in parts:
        sizes = [(block.kind, j.j.nbytes) for block, j in part if isinstance(j, DenseJacobian)]
        together = sum(size for kind, size in sizes if kind == "opaque")
        alone = max((size for kind, size in sizes if kind == "dense"), default=0)
        assert together + alone <= budget // 2
    assert_close(torch.cat([part.whole() for part in parts]), dense.jacobian(model, inputs, 40))


def test_one_pass_for_all_parameters_and_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = normed(), torch.randn(6, 20, dtype=torch.float64)
    asked: list[tuple[str, ...]] = []
    sample_jacobians = tangent.sample_jacobians

    def noted(*args: Any) -> dict[str, Tensor]:
        asked.append(args[4])
        return sample_jacobians(*args)

    network = Network.build(model, inputs)
    network.refuse_wrong(network.linearise(inputs))  # only for the first batch
    monkeypatch.setattr(tangent, "sample_jacobians", noted)
    jacobians = network.linearise(inputs).jacobians()
    assert asked == []
    for _ in range(2):
        assert_close(jacobians.whole(), dense.jacobian(model, inputs, 6))
    assert len(asked) == 1
    assert len(asked[0]) == 4


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_loop_is_the_vectorised_pass(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer seeds than outputs, and more."""
    model, inputs = normed(), torch.randn(6, 20, dtype=torch.float64)
    names = tuple(name for name, _ in model.named_parameters() if "parametrizations" in name)
    seeds = torch.randn(count, 6, 5, dtype=torch.float64)
    f = model(inputs).detach()
    given: tuple[Any, ...] = (model, inputs, (True,), f, names, seeds)
    by_func = fallback.sample_jacobians(*given)

    def refused(*_: Any) -> Any:
        raise RuntimeError("no batching rule")

    monkeypatch.setattr(fallback, "_by_vmap", refused)
    looped = fallback.sample_jacobians(*given)
    whole = dense.jacobian(model, inputs, 6, list(names))
    expected = torch.einsum("kbm,bmp->bkp", seeds, whole)
    for jacobians in (by_func, looped):
        assert_close(torch.cat([jacobians[name] for name in names], -1), expected)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_as_many_seeds_as_samples(count: int) -> None:
    """There PyTorch's rule for PReLU, batched over both, mixes them up."""
    model = nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, count)).double()
    inputs = torch.randn(5, 4, dtype=torch.float64)
    network = Network.build(model, inputs)
    assert [block.kind for block in network.layout] == ["rows", "opaque", "rows"]
    assert_close(network.linearise(inputs).jacobians().whole(), dense.jacobian(model, inputs, 5))
