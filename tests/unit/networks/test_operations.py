"""Operations one by one, in small networks of their own: each rule, each way past a rule, each fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lapwing.networks.network import Network
from tests.cases import Wrapped
from tests.references import dense
from tests.tolerances import assert_close

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
    "position_network": (lambda: Wrapped(
        lambda m, x: m.head(torch.tanh(m.lin(x) + m.place(torch.linspace(0, 1, 5).to(x)[:, None]))).mean(1),
        lin=nn.Linear(4, 6), place=nn.Linear(1, 6), head=nn.Linear(6, 3)), SEQUENCE),
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
    "interleaved_samples": (lambda: Wrapped(
        lambda m, x: m.head(torch.tanh(m.lin(x.repeat_interleave(2, 0)))).view(-1, 2, 3).mean(1),
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
    "picked_rows": (lambda: Wrapped(lambda m, x: F.linear(x, m.w[[2, 0, 1]], m.b[[2, 0, 1]]), w=free(6, 4), b=free(6)),
                    VECTOR),
    "scaled_weight": (lambda: Wrapped(lambda m, x: F.linear(x, 2 * m.w, m.b) * 1.5, w=free(3, 4), b=free(3)), VECTOR),
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
    "one_map_many_tokens": (lambda: Wrapped(lambda m, x: m.lin(x).unflatten(1, (2, 3)), lin=nn.Linear(4, 6)), VECTOR),
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
    "group_norm_vector": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)), VECTOR),
    "rms_norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.Tanh(), nn.Linear(6, 3)), VECTOR),
    "spectral_norm": (lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(),
                                            nn.Linear(6, 3)), VECTOR),
    # the backward pass, one operation after another
    "overlapping_max_pool": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.MaxPool2d(3, 1, 1), nn.Flatten(),
                                                   nn.Linear(80, 3)), IMAGE),
    "dilated_max_pool": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.MaxPool2d(2, 1, dilation=2), nn.Flatten(),
                                               nn.Linear(24, 3)), IMAGE),
    "max_pool_1d": (lambda: nn.Sequential(nn.Conv1d(5, 6, 2), nn.MaxPool1d(2, 1), nn.Flatten(), nn.Linear(12, 3)),
                    SEQUENCE),
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
    "gated": (lambda: Wrapped(lambda m, x: m.head(m.one(x) * m.two(x).sigmoid()), one=nn.Linear(4, 6),
                              two=nn.Linear(4, 6), head=nn.Linear(6, 3)), VECTOR),
    "squared": (lambda: Wrapped(lambda m, x: m.head(m.lin(x) * m.lin(x)), lin=nn.Linear(4, 6), head=nn.Linear(6, 3)),
                VECTOR),
    "same_tensor_twice": (lambda: Wrapped(lambda m, x: (lambda h: m.head(h * h + h))(m.lin(x)), lin=nn.Linear(4, 6),
                                          head=nn.Linear(6, 3)), VECTOR),
    "squeeze_and_excite": (lambda: Wrapped(
        squeeze_and_excite,
        conv=nn.Conv2d(2, 4, 2), gate=nn.Linear(4, 4), head=nn.Linear(4, 3)), IMAGE),
    "sums_and_means": (lambda: Wrapped(
        lambda m, x: m.head(m.lin(x).tanh().sum(1, keepdim=True).squeeze(1) + m.lin(x).mean(-2)),
        lin=nn.Linear(4, 6), head=nn.Linear(6, 3)), SEQUENCE),
    "activation_then_sum": (lambda: Wrapped(lambda m, x: m.head(m.lin(x).tanh().relu().sum(1)), lin=nn.Linear(4, 6),
                                            head=nn.Linear(6, 3)), SEQUENCE),
    "sum_pooled_convolution": (lambda: Wrapped(lambda m, x: m.head(m.conv(x).relu().sum((2, 3))),
                                               conv=nn.Conv2d(2, 4, 2), head=nn.Linear(4, 3)), IMAGE),
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
    "scaled_difference": (lambda: Wrapped(lambda m, x: m.head(3 * m.one(x) - m.two(x) / 2), one=nn.Linear(4, 6),
                                          two=nn.Linear(4, 6), head=nn.Linear(6, 3)), VECTOR),
    "permuted": (lambda: Wrapped(lambda m, x: m.head(m.lin(x).unflatten(2, (2, 3)).permute(0, 3, 1, 2).flatten(1)),
                                 lin=nn.Linear(4, 6), head=nn.Linear(30, 3)), SEQUENCE),
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
    "time_major_gru": (lambda: Wrapped(lambda m, x: m.head(m.cell(x.transpose(0, 1))[0][-1]), head=nn.Linear(6, 2),
                                       cell=nn.GRU(4, 6)), SEQUENCE),
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


def test_what_has_no_rule_says_so() -> None:
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
