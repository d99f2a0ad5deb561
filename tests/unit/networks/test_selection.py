"""Which weights are uncertain: names, order, and the Jacobian of exactly those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.networks.last_layer import last_layer
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection, all_weights, named, subnetwork
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.references import dense
from tests.tolerances import assert_close

BATCH = 5


def residual(m: Any, x: Tensor) -> Tensor:
    z = m.mix(x)
    return z + m.head(torch.tanh(z))


def tied(m: Any, tokens: Tensor) -> Tensor:
    return F.linear(torch.tanh(m.mix(m.table(tokens))), m.table.weight)


HEAD = {"head.weight", "head.bias"}
# The head is always declared first: the order of modules must not matter.
ENDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "plain": (lambda: Wrapped(lambda m, x: m.head(m.body(x).tanh()), head=nn.Linear(6, 3), body=nn.Linear(4, 6)),
              (4,), HEAD),
    "dropout": (lambda: Wrapped(lambda m, x: m.drop(m.head(m.body(x).tanh())), head=nn.Linear(6, 3),
                                body=nn.Linear(4, 6), drop=nn.Dropout(0.4)), (4,), HEAD),
    "flatten": (lambda: Wrapped(lambda m, x: m.head(m.body(x).tanh()).flatten(1), head=nn.Conv1d(6, 3, 4),
                                body=nn.Conv1d(2, 6, 2)), (2, 5), HEAD),
    "average_pool": (lambda: Wrapped(lambda m, x: F.adaptive_avg_pool2d(m.head(m.body(x).tanh()), 1)[..., 0, 0],
                                     head=nn.Conv2d(4, 3, 2), body=nn.Conv2d(2, 4, 3)), (2, 5, 6), HEAD),
    "max_pool": (lambda: Wrapped(lambda m, x: F.adaptive_max_pool2d(m.head(m.body(x).tanh()), 1).flatten(1),
                                 head=nn.Conv2d(4, 3, 2), body=nn.Conv2d(2, 4, 3)), (2, 5, 6), HEAD),
    "mean_over_tokens": (lambda: Wrapped(lambda m, x: m.head(m.body(x).tanh()).mean(1), head=nn.Linear(6, 3),
                                         body=nn.Linear(4, 6)), (7, 4), HEAD),
    "reshape": (lambda: Wrapped(lambda m, x: m.head(m.body(x).tanh()).reshape(-1, 2, 3), head=nn.Linear(5, 6),
                                body=nn.Linear(4, 5)), (4,), HEAD),
    "squeeze": (lambda: Wrapped(lambda m, x: m.head(m.body(x).tanh()).squeeze(-1), head=nn.Linear(6, 1),
                                body=nn.Linear(4, 6)), (4,), HEAD),
    "two_heads": (lambda: Wrapped(lambda m, x: torch.cat([m.mean(m.body(x).tanh()), m.spread(m.body(x).tanh())], -1),
                                  mean=nn.Linear(6, 2), spread=nn.Linear(6, 2, bias=False), body=nn.Linear(4, 6)),
                  (4,), {"mean.weight", "mean.bias", "spread.weight"}),
    "residual": (lambda: Wrapped(residual, head=nn.Linear(3, 3), mix=nn.Linear(4, 3)), (4,), HEAD),
    "skip": (lambda: Wrapped(lambda m, x: m.head(m.body(x).tanh()) + m.skip(x), head=nn.Linear(6, 3),
                             skip=nn.Linear(4, 3), body=nn.Linear(4, 6)), (4,), HEAD | {"skip.weight", "skip.bias"}),
    "bias_apart": (lambda: Wrapped(lambda m, x: m.head(m.body(x).tanh()) + m.bias, bias=nn.Parameter(torch.randn(3)),
                                   head=nn.Linear(6, 3, bias=False), body=nn.Linear(4, 6)), (4,),
                   {"head.weight", "bias"}),
    "scaled": (lambda: Wrapped(lambda m, x: 2 * m.head(m.body(x).tanh()) - 1, head=nn.Linear(6, 3),
                               body=nn.Linear(4, 6)), (4,), HEAD),
    "attention_head": (lambda: Wrapped(lambda m, x: m.head(x, x, x, need_weights=False)[0][:, 0],
                                       head=nn.MultiheadAttention(4, 2, batch_first=True)), (5, 4),
                       {"head.out_proj.weight", "head.out_proj.bias"}),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_last_layer(end: str) -> None:
    make, shape, expected = ENDS[end]
    model = make().double().eval()
    inputs = torch.randn(BATCH, *shape, dtype=torch.float64)
    network = problems.unchanged(model, lambda: Network.build(model, inputs, last_layer))
    assert set(network.selection.names) == expected
    jac = dense.jacobian(model, inputs, BATCH, list(expected))
    assert_close(network.linearise(inputs).jacobians().whole(), jac)
    v = torch.randn(2, jac.shape[-1], dtype=torch.float64)
    assert_close(network.jvp(inputs, v).flatten(2), torch.einsum("bcp,np->nbc", jac, v))


def test_last_layer_of_tied_weights_is_the_table() -> None:
    model = Wrapped(tied, table=nn.Embedding(5, 4), mix=nn.Linear(4, 4)).double()
    tokens = torch.randint(0, 5, (BATCH,))
    network = Network.build(model, tokens, last_layer)
    assert network.selection.names == ("table.weight",)
    expected = dense.jacobian(model, tokens, BATCH, ["table.weight"])
    assert_close(network.linearise(tokens).jacobians().whole(), expected)


def test_last_layer_takes_frozen_heads() -> None:
    case = BY_NAME["mlp"]
    model = case.build().requires_grad_(False)
    network = problems.unchanged(model, lambda: Network.build(model, case.batch(3), last_layer))
    assert network.selection.names == ("4.weight", "4.bias")


def test_last_layer_without_a_linear_map_says_what_to_do() -> None:
    model = Wrapped(lambda m, x: x.tanh() * m.scale, scale=nn.Parameter(torch.randn(4))).double()
    with pytest.raises(ModelError, match=r"no linear map.*named\(pattern\)"):
        Network.build(model, torch.randn(BATCH, 4, dtype=torch.float64), last_layer)


def test_all_weights_are_those_that_require_a_gradient() -> None:
    case = BY_NAME["frozen_weight"]
    network = Network.build(case.build(), case.batch(3), all_weights)
    assert network.selection.names == ("0.weight", "0.bias", "2.bias", "4.weight", "4.bias")
    assert network.selection.size == network.theta().numel() == 53


def test_nothing_requires_a_gradient() -> None:
    case = BY_NAME["mlp"]
    with pytest.raises(ModelError, match="no parameter of the model requires a gradient"):
        Network.build(case.build().requires_grad_(False), case.batch(3))


def test_named_takes_frozen_parameters_and_restores_flags() -> None:
    case = BY_NAME["mlp"]
    model = case.build()
    model[2].requires_grad_(False)
    network = problems.unchanged(model, lambda: Network.build(model, case.batch(3), named(r"^2\.")))
    assert network.selection.names == ("2.weight", "2.bias")
    inputs = case.batch(3)
    expected = dense.jacobian(model, inputs, 3, ["2.weight", "2.bias"])
    jacobian = problems.unchanged(model, lambda: network.linearise(inputs).jacobians().whole())
    assert_close(jacobian, expected)


def test_named_without_a_match_lists_the_names() -> None:
    case = BY_NAME["mlp"]
    with pytest.raises(ModelError, match=r"'lora'.*0\.weight, 0\.bias, 2\.weight"):
        Network.build(case.build(), case.batch(3), named("lora"))


def test_named_only_unused_parameters() -> None:
    model = Wrapped(lambda m, x: m.lin(x), lin=nn.Linear(4, 3), spare=nn.Linear(2, 2)).double()
    with pytest.raises(ModelError, match="does not depend on any selected parameter"):
        Network.build(model, torch.randn(BATCH, 4, dtype=torch.float64), named("spare"))


def test_subnetwork_by_index_and_by_mask_agree() -> None:
    case = BY_NAME["frozen_bias"]
    model, inputs = case.build(), case.batch(4)
    whole = dense.jacobian(model, inputs, 4)
    index = torch.tensor([70, 3, 25, 24, 54])  # any order, which theta keeps; that of a mask rises
    mask = torch.zeros(whole.shape[-1], dtype=torch.bool)
    mask[index] = True
    rules = (subnetwork(index), index), (subnetwork(mask), mask), (subnetwork(index.tolist()), index)
    for rule, chosen in rules:
        network = Network.build(model, inputs, rule)
        assert network.selection.size == 5
        assert_close(network.linearise(inputs).jacobians().whole(), whole[..., chosen])
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
        assert_close(network.theta(), flat[chosen])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([3, 83]), r"0\.\.82"),
        (torch.tensor([-1, 2]), r"0\.\.82"),
        (torch.tensor([], dtype=torch.long), "at least one"),
        (torch.tensor([4, 4, 5]), "repeat"),
        (torch.ones(82, dtype=torch.bool), "82 entries; expected 83"),
        (torch.zeros(83, dtype=torch.bool), "at least one"),
    ],
)
def test_subnetwork_refuses(index: Tensor, message: str) -> None:
    case = BY_NAME["mlp"]
    with pytest.raises(ModelError, match=message):
        Network.build(case.build(), case.batch(3), subnetwork(index))


def test_selection_splits_and_fills() -> None:
    selection = Selection(("a", "b", "s"), ((2, 3), (4,), ()), torch.tensor([1, 5, 7, 10]))
    assert (selection.total, selection.size) == (11, 4)
    theta = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    parts = selection.split(theta)
    assert [tuple(parts[n].shape) for n in selection.names] == [(2, 2, 3), (2, 4), (2,)]
    assert parts["a"][0].tolist() == [[0, 1, 0], [0, 0, 2]]
    assert parts["b"][1].tolist() == [0, 7, 0, 0]
    assert parts["s"].tolist() == [4, 8]
    assert torch.equal(selection.pick(selection.fill(theta)), theta)


def test_weight_and_bias_share_a_layer() -> None:
    case = BY_NAME["attention"]
    network = Network.build(case.build(), case.batch(2))
    layers = dict(zip(network.selection.names, network.selection.layer_of(), strict=True))
    assert layers["head.weight"] == layers["head.bias"] == "head"
    assert layers["attend.in_proj_weight"] == "attend"
    assert layers["attend.out_proj.weight"] == "attend.out_proj"
