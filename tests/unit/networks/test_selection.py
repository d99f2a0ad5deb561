"""Which weights are selected, and their blocks and patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import ModelError
from lapwing.networks.graph import _with_bits
from lapwing.networks.jacobians import DenseJacobian, LookupJacobian
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection, all_weights, last_layer, named, subnetwork
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.references import dense
from tests.tolerances import assert_close

# Which weights are uncertain: names, order, and the Jacobian of exactly those.

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
    "mean_over_tokens": (lambda: Wrapped(lambda m, x: m.head(m.body(x).tanh()).mean(1), head=nn.Linear(6, 3),
                                         body=nn.Linear(4, 6)), (7, 4), HEAD),
    "reshape": (lambda: Wrapped(lambda m, x: m.head(m.body(x).tanh()).reshape(-1, 2, 3), head=nn.Linear(5, 6),
                                body=nn.Linear(4, 5)), (4,), HEAD),
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


# The linear layer that ends a network, found in its graph.

D = torch.float64


def head_residual(m: Any, x: Tensor) -> Tensor:
    return m.last(x) + m.other(x)


def alpha(m: Any, x: Tensor) -> Tensor:
    return torch.add(m.bias, m.last(x), alpha=2)


ENDINGS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "linear": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,), "2.weight"),
    "flattened": (
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, 3, 2), nn.Flatten()),
        (1, 3, 3),
        "2.weight",
    ),
    "dropout": (nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), (3,), "0.weight"),
    "a constant is added": (Wrapped(lambda m, x: m.last(x) + 1.5, last=nn.Linear(3, 2)), (3,), "last.weight"),
    "an activation": (nn.Sequential(nn.Linear(3, 2), nn.Tanh()), (3,), ""),
    "pooled": (nn.Sequential(nn.Conv1d(2, 3, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten()), (2, 4), ""),
    "two branches": (Wrapped(head_residual, last=nn.Linear(3, 2), other=nn.Linear(3, 2)), (3,), ""),
    "a scaled sum": (Wrapped(alpha, last=nn.Linear(3, 2), bias=nn.Parameter(torch.zeros(2))), (3,), ""),
    "a norm": (nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), (3,), ""),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_what_ends_a_network(name: str) -> None:
    model, shape, weight = ENDINGS[name]
    network = Network.build(model.double().eval(), torch.randn(4, *shape, dtype=D))
    assert network.head == weight


def test_a_head_that_is_not_selected_is_none() -> None:
    model = ENDINGS["linear"][0].double().eval()
    x = torch.randn(4, 3, dtype=D)
    assert Network.build(model, x, lw.named("0.weight")).head == ""
    assert Network.build(model, x, lw.named("2.weight")).head == "2.weight"


# Which rows belong to which sample.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_terms_that_cancel_is_not_a_shared_row(dtype: torch.dtype) -> None:
    """A row whose gradient is the small sum of large terms carries their rounding, and still has one sample."""
    grads = torch.tensor([[[0.02, -0.01], [3.0, 1.0]]] * 2, dtype=dtype)
    grads[1, 0] *= 2  # the first row belongs to a sample with the bit
    grads[1] += 20 * torch.finfo(dtype).eps  # large terms were rounded
    owner = _with_bits(torch.zeros(2, dtype=torch.long), grads, grads[0].abs().amax(1), 0)
    assert owner is not None
    assert owner.tolist() == [1, 0]


def test_a_row_of_several_samples_is_seen() -> None:
    grads = torch.tensor([[[1.0, 2.0]], [[1.4, 2.9]]])
    assert _with_bits(torch.zeros(1, dtype=torch.long), grads, grads[0].abs().amax(1), 0) is None


# Products between the Jacobians of two batches: every way to form them gives the same.

SHAPES = {  # groups, outputs, samples, positions; those of the other batch; inputs and outputs of the layer
    "one position": ((1, 3, 4, 1), (2, 5, 1), (6, 7)),
    "groups": ((2, 3, 4, 1), (2, 5, 1), (3, 2)),
    "positions": ((1, 3, 4, 5), (2, 3, 5), (6, 7)),
    "groups of positions": ((3, 2, 4, 5), (1, 3, 5), (2, 4)),
    "other positions": ((1, 2, 3, 4), (1, 2, 6), (3, 5)),
}


def pair(name: str) -> tuple[LinearJacobian, LinearJacobian]:
    (groups, outputs, batch, positions), (columns, others, places), (d_in, d_out) = SHAPES[name]
    gen = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, dtype=D, generator=gen)
    return (
        LinearJacobian(draw(groups, batch, positions, d_in), draw(groups, outputs, batch, positions, d_out)),
        LinearJacobian(draw(groups, others, places, d_in), draw(groups, columns, others, places, d_out)),
    )


def weights(name: str) -> Tensor:
    (groups, *_), _, (d_in, d_out) = SHAPES[name]
    return torch.rand(groups, d_out, d_in, dtype=D, generator=torch.Generator().manual_seed(6)) + 0.1


def written_out(one: LinearJacobian, other: LinearJacobian, weights: Tensor | None) -> Tensor:
    """Σ over positions of g ⊗ a for every sample and output, then Σ over entries, (B K, B' K')."""
    left = torch.einsum("gkbto,gbti->bkgoi", one.g, one.a)
    right = torch.einsum("gkbto,gbti->bkgoi", other.g, other.a)
    left = left if weights is None else left * weights
    return torch.einsum("bkgoi,clgoi->bkcl", left, right).flatten(2).flatten(0, 1)


@pytest.mark.parametrize("name", SHAPES)
def test_linear_blocks_are_their_jacobians(name: str) -> None:
    one, other = pair(name)
    assert_close(one.between(other), written_out(one, other, None))
    assert_close(one.between(one), written_out(one, one, None))
    assert_close(one.between(other, weights(name)), written_out(one, other, weights(name)))
    assert_close(one.between(one, weights(name)), written_out(one, one, weights(name)))


@pytest.mark.parametrize("name", SHAPES)
def test_gram_matrices_and_jacobians_agree(name: str) -> None:
    one, other = pair(name)
    expected = written_out(one, other, None)
    assert_close(one._grams(other), expected)
    assert_close(one._outer(other, None), expected)
    assert_close(one._outer(other, torch.ones_like(weights(name))), expected)


@pytest.mark.parametrize("name", SHAPES)
def test_a_small_byte_budget_cuts_the_work_and_changes_nothing(name: str) -> None:
    one, other = pair(name)
    expected = [one._grams(other), one._outer(other, weights(name))]
    with lw.memory.limited(1):
        assert [piece.batch for piece in one.pieces(1)] == [1] * one.batch
        assert_close(one._grams(other), expected[0])
        assert_close(one._outer(other, weights(name)), expected[1])


def test_the_cheaper_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide layer has small Gram matrices, many positions of a narrow one have large ones."""
    wide = LinearJacobian(torch.randn(1, 2, 1, 40, dtype=D), torch.randn(1, 1, 2, 1, 50, dtype=D))
    narrow = LinearJacobian(torch.randn(1, 2, 90, 3, dtype=D), torch.randn(1, 1, 2, 90, 2, dtype=D))
    ways: list[str] = []
    for way in ("_grams", "_outer"):
        original = getattr(LinearJacobian, way)

        def noted(*args: Any, way: str = way, original: Any = original) -> Tensor:
            ways.append(way)
            return original(*args)

        monkeypatch.setattr(LinearJacobian, way, noted)
    wide.between(wide)
    narrow.between(narrow)
    wide.between(wide, torch.ones(1, 50, 40, dtype=D))
    assert ways == ["_grams", "_outer", "_outer"]


@pytest.mark.parametrize("way", ["grams", "outer", "weighted"])
@pytest.mark.parametrize("name", ["groups", "groups of positions"])
def test_differentiable_in_the_factors(name: str, way: str) -> None:
    one, other = pair(name)

    def kernel(a: Tensor, g: Tensor) -> Tensor:
        varied = LinearJacobian(a, g)
        if way == "grams":
            return other._grams(varied)
        return other._outer(varied, weights(name) if way == "weighted" else None)

    assert torch.autograd.gradcheck(kernel, (one.a.requires_grad_(), one.g.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["groups", "positions"])
def test_forms_mix(name: str, weighted: bool) -> None:
    """One batch as factors and the other whole, as after ``compact``."""
    one, other = pair(name)
    given = weights(name) if weighted else None
    whole = DenseJacobian(other.whole().flatten(2))
    assert_close(one.between(whole, given), written_out(one, other, given))
    assert_close(whole.between(one, given), written_out(other, one, given))
    assert_close(whole.between(whole, given), written_out(other, other, given))


def lookup(tokens: list[list[int]], seed: int) -> LookupJacobian:
    index = torch.tensor(tokens)
    g = torch.randn(2, *index.shape, 3, dtype=D, generator=torch.Generator().manual_seed(seed))
    return LookupJacobian.build(index, g, index != 0, 7)


@pytest.mark.parametrize("weighted", [False, True])
def test_tables_meet_in_the_rows_that_both_have(weighted: bool) -> None:
    """Repeated tokens, padding (nought), and tokens that only one batch has."""
    one, other = lookup([[1, 4, 4], [0, 5, 1]], 1), lookup([[4, 2, 0], [5, 5, 5], [6, 6, 2]], 2)
    scale = torch.rand(1, 3, 7, dtype=D) + 0.1 if weighted else None
    rows = [jac.whole().flatten(2).flatten(0, 1) for jac in (one, other)]
    left = rows[0] if scale is None else rows[0] * scale.reshape(-1)
    assert_close(one.between(other, scale), left @ rows[1].T)
    assert_close(one.between(one, scale), left @ rows[0].T)
    assert_close(one.between(DenseJacobian(other.whole().flatten(2)), scale), left @ rows[1].T)
    far = lookup([[3, 3, 3]], 3)
    assert float(one.between(far, scale).abs().max()) == 0
