"""Layer-wise Jacobians, against those of each sample."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.peak import held
from lapwing.methods.inducing_points import Anchors
from lapwing.networks import jacobians as module
from lapwing.networks import linear_jacobian as near_cache
from lapwing.networks import passes
from lapwing.networks import passes as directional
from lapwing.networks.jacobians import coarse, halves, product, product_onto
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network
from lapwing.networks.passes import forward_products, outputs_along
from lapwing.networks.selection import named, subnetwork
from lapwing.networks.tangent import LayerJacobians, Tangent
from lapwing.priors import prior_kernel
from tests import problems
from tests.cases import BY_NAME, CASES, Case, Wrapped, attention, cast, mlp, norms, recurrent, sdpa, transformer
from tests.references import dense
from tests.tolerances import assert_close

# Layer-wise Jacobians and products against one backward pass per sample and output.

NAMES = [case.name for case in CASES]


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


def layerwise(network: Network, inputs: object) -> Tensor:
    return network.linearise(inputs).jacobians().whole()


@pytest.mark.parametrize("first", [1, 4, 7])
def test_outputs_and_jacobians_equal_brute_force(case: Case, first: int) -> None:
    """Of the first batch and of others; one of a single sample says nothing about the next.

    4 is also the number of tokens and time steps of the cases, so rows cannot be told apart by their number.
    """
    model = case.build()
    network = Network.build(model, case.batch(first, seed=2))
    assert network.output_shape == case.outputs
    for size, seed in ((first, 2), *(((4, 1), (2, 2), (5, 4)) if first == 4 else ((4, 3),))):
        inputs = case.batch(size, seed=seed)
        f = torch.cat([dense.output(model, dense.one(inputs, b)) for b in range(size)]).detach()
        assert_close(network(inputs), f)
        assert_close(network.linearise(inputs).f, f)
        assert_close(layerwise(network, inputs), dense.jacobian(model, inputs, size))


def test_a_stream_has_the_same_blocks_in_any_order(case: Case) -> None:
    inputs = case.batch(3)
    network = Network.build(case.build(), inputs)
    parts = [part() for part in network.linearise(inputs).jacobians().parts]
    stream = network.blockwise.linearise(inputs).jacobians()
    seen: list[int] = []
    for number, part in stream.numbered_blocks():
        seen.append(number)
        assert_close(part.whole(), parts[number].whole())
    assert sorted(seen) == list(range(len(parts)))
    assert [number for number, _ in stream.numbered_blocks([0])] == [0]  # a pass of its own
    assert_close(stream.whole(), network.linearise(inputs).jacobians().whole())  # other uses hold all gradients


def test_a_stream_drops_the_gradients_of_layers_that_were_read() -> None:
    """Its memory does not grow with the number of layers, beyond the activations that every pass keeps."""
    taken = {}
    for depth in (4, 24):
        model = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.ReLU())])
        x = torch.randn(16, 64)
        network = Network.build(model, x)
        assert network.footprint.width == 64 * depth
        assert network.footprint.live <= 3 * 64
        for streams in (True, False):
            tangent = (network.blockwise if streams else network).linearise(x)
            network.refuse_wrong(tangent)  # only for the first batch
            taken[streams, depth] = held(
                lambda tangent=tangent: sum(1 for _ in tangent.jacobians().numbered_blocks())
            ).taken
    each = 64 * 16 * 64 * 4  # bytes of the gradient at one layer, for 64 outputs
    assert taken[True, 24] - taken[True, 4] < 2 * each
    assert taken[False, 24] - taken[False, 4] > 15 * each


def test_float32_jacobian_equals_float64(case: Case) -> None:
    model, inputs = case.build(torch.float32), case.batch(4, torch.float32)
    network = Network.build(model, inputs)
    jacobian = layerwise(network, inputs)
    assert jacobian.dtype == torch.float32
    wide = case.build(torch.float32).double()
    assert_close(jacobian, dense.jacobian(wide, cast(inputs, torch.float64), 4))


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "lstm"])
def test_bfloat16_jacobian_is_near(name: str) -> None:
    case = BY_NAME[name]
    model, inputs = case.build(torch.bfloat16), case.batch(4, torch.bfloat16)
    network = Network.build(model, inputs)
    jacobian = layerwise(network, inputs)
    assert jacobian.dtype == torch.float32  # factors are never kept in bfloat16
    wide = case.build(torch.bfloat16).float()
    expected = dense.jacobian(wide, cast(inputs, torch.float32), 4)
    assert_close(jacobian, expected, dtype=torch.bfloat16)
    v = torch.randn(2, expected.shape[-1])
    assert_close(network.jvp(inputs, v), torch.einsum("bcp,np->nbc", expected, v), dtype=torch.bfloat16)
    u = torch.randn(2, 4, *case.outputs)
    assert_close(network.vjp(inputs, u), torch.einsum("bcp,nbc->np", expected, u), dtype=torch.bfloat16)


def test_bfloat16_convolutions_never_end_the_process() -> None:
    # Some processors lack an instruction that oneDNN's bfloat16 backward of a strided convolution uses.
    # The process dies without a message, so only a process of its own can tell.
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from tests.cases import BY_NAME\n"
        "from lapwing.networks.network import Network\n"
        "case = BY_NAME['resnet_batchnorm']\n"
        "model, x = case.build(torch.bfloat16), case.batch(3, torch.bfloat16)\n"
        "print(Network.build(model, x).linearise(x).jacobians().whole().isfinite().all().item())\n"
    )
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert run.returncode == 0, f"exit {run.returncode}: {run.stderr[-300:]}"
    assert run.stdout.strip() == "True"


@pytest.mark.parametrize("size", [1, 4])
def test_products_take_many_vectors(case: Case, size: int) -> None:
    model, inputs = case.build(), case.batch(size)
    network = Network.build(model, case.batch(4))
    jac = dense.jacobian(model, inputs, size)
    v = torch.randn(3, jac.shape[-1], dtype=torch.float64)
    expected = torch.einsum("bcp,np->nbc", jac, v)
    assert_close(network.jvp(inputs, v), expected.reshape(3, size, *case.outputs))
    u = torch.randn(2, size, *case.outputs, dtype=torch.float64)
    assert_close(network.vjp(inputs, u), torch.einsum("bcp,nbc->np", jac, u.flatten(2)))


@pytest.mark.parametrize("in_hand", [False, True])
def test_squares_and_weighted_sums_of_every_block(case: Case, in_hand: bool) -> None:
    """Σ J², Σ J w Jᵀ and its cross-sample form, block by block in any form, against the block's dense Jacobian."""
    model, inputs = case.build(), case.batch(4)
    jacobians = Network.build(model, inputs).linearise(inputs).jacobians()
    for block, part in jacobians.materialise() if in_hand else jacobians:
        flat = part.whole().reshape(4, jacobians.outputs, -1)
        weights = torch.rand(flat.shape[-1], dtype=torch.float64) + 0.1
        form = weights.reshape(block.form)
        tokens, rows = jacobians.tokens, flat.reshape(4, jacobians.tokens, -1, flat.shape[-1])
        full = torch.einsum("bscp,p,bsdp->bscd", rows, weights, rows)
        assert_close(part.squares().reshape(-1), flat.square().sum((0, 1)))
        assert_close(part.quadratic_form(form, tokens, True), full)
        assert_close(part.quadratic_form(form, tokens, False), full.diagonal(dim1=-2, dim2=-1))
        tall = flat.reshape(-1, flat.shape[-1])
        assert_close(part.between(part, form), (tall * weights) @ tall.T)


def test_tiny_byte_budget_changes_nothing(case: Case) -> None:
    model, inputs = case.build(), case.batch(4)
    network = Network.build(model, inputs)
    whole = network.linearise(inputs).jacobians()
    weights = [torch.rand(block.form, dtype=torch.float64) for block in network.layout]

    def summary(jacobians: LayerJacobians) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(part.squares(), part.quadratic_form(w, jacobians.tokens, True), part.between(part, w))
                for w, (_, part) in zip(weights, jacobians, strict=True)]  # fmt: skip

    before = summary(whole)
    with lw.memory.limited(1):
        parts = list(network.tangents(inputs))
        after = summary(whole)
        runs = [list(tangent.output_runs()) for _, tangent in parts]
    assert [(part.start, part.stop) for part, _ in parts] == [(b, b + 1) for b in range(4)]
    assert_close(torch.cat([tangent.jacobians().whole() for _, tangent in parts]), whole.whole())
    assert {part.outputs for each in runs for part in each} == {1}
    assert_close(torch.cat([torch.cat([part.whole() for part in each], 1) for each in runs]), whole.whole())
    for small, large in zip(after, before, strict=True):
        for answer, expected in zip(small, large, strict=True):
            assert_close(answer, expected)


def test_chunks_cover_the_batch_once() -> None:
    case = BY_NAME["mlp"]
    network = Network.build(case.build(), case.batch(3))
    each = 8 * (2 * 3 * network.footprint.width + network.footprint.passing)
    with lw.memory.limited(2 * 3 * each):  # half of it is for gradients and activations
        parts = list(network.footprint.chunks(8, 3, network.dtype, network.device))
    assert [(part.start, part.stop) for part in parts] == [(0, 3), (3, 6), (6, 8)]


def test_rows_that_follow_the_data() -> None:
    """All samples pass at first, later only some do."""

    def run(m: Wrapped, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        h = m.plain(x)
        extra = torch.zeros_like(h).masked_scatter(chosen[:, None].expand_as(h), m.routed(x[chosen]))
        return m.head(torch.tanh(h + extra))

    model = Wrapped(run, plain=nn.Linear(4, 6), routed=nn.Linear(4, 6), head=nn.Linear(6, 3)).double()
    inputs = torch.randn(5, 4, dtype=torch.float64)
    inputs[:, 0] = inputs[:, 0].abs()
    network = Network.build(model, inputs)
    assert_close(layerwise(network, inputs), dense.jacobian(model, inputs, 5))
    inputs[1:3, 0] *= -1
    assert_close(layerwise(network, inputs), dense.jacobian(model, inputs, 5))
    mixed = Network.build(model, inputs)
    assert_close(layerwise(mixed, inputs), dense.jacobian(model, inputs, 5))
    inputs[:, 0] = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    assert_close(layerwise(mixed, inputs), dense.jacobian(model, inputs, 5))


@pytest.mark.parametrize("count", [1, 40])
def test_a_product_there_and_back_forms_every_block_once(case: Case, count: int) -> None:
    """With few vectors by factors, with many in whole where that is cheaper: the same numbers."""
    model, inputs = case.build(), case.batch(4)
    network = Network.build(model, inputs)
    jacobians = network.linearise(inputs).jacobians()
    formed: list[int] = []

    def noted(number: int, part: Any) -> Any:
        formed.append(number)
        return part()

    watched = replace(jacobians, parts=tuple(partial(noted, i, part) for i, part in enumerate(jacobians.parts)))
    whole = jacobians.whole().flatten(0, 1)
    v = torch.randn(count, whole.shape[1], dtype=torch.float64)
    assert_close(watched.gram(v), v @ whole.T @ whole)
    assert formed == list(range(len(jacobians.parts)))


def test_convolutions_are_whole_for_many_vectors_alone() -> None:
    case = BY_NAME["cnn"]
    network = Network.build(case.build(), case.batch(4))
    jacobians = network.linearise(case.batch(4)).jacobians()
    forms = {n: [type(part.materialise(n)).__name__ for _, part in jacobians] for n in (1, 40)}
    assert "DenseJacobian" not in forms[1][:1]
    assert forms[40][0] == "DenseJacobian"


@pytest.mark.parametrize("weights", [lw.last_layer, named("head")])
def test_the_budget_counts_layers_before_the_selected_ones(weights: Any) -> None:
    """A wide layer that is not in the graph limits how many samples pass at once."""
    model = Wrapped(lambda m, x: m.head(torch.tanh(m.down(torch.relu(m.body(x))))), body=nn.Linear(3, 5000),
                    down=nn.Linear(5000, 4), head=nn.Linear(4, 2))  # fmt: skip
    network = Network.build(model, torch.randn(40, 3), weights)
    assert network.footprint.widest == 5000
    with lw.memory.limited("4MiB"):  # a quarter of it is for one kind of results, three of 20 kB for each sample
        assert network.footprint.batch_size_for(2, network.dtype, network.device) == 2**20 // (3 * 4 * 5000)
        chunks = list(network.footprint.chunks(100, 2, network.dtype, network.device))
    assert len(chunks) > 2


def test_reduced_rows_of_samples_of_unequal_length_are_means_over_their_own_positions() -> None:
    """Against a loop over samples; one has no position at all, and the sums beyond its end are zero."""
    torch.manual_seed(0)
    lengths = [5, 2, 0, 3]
    a, g, zero = (torch.zeros(*shape, dtype=torch.float64) for shape in ((1, 4, 5, 3), (1, 2, 4, 5, 6), (2, 6)))
    for b, t in enumerate(lengths):
        a[:, b, :t], g[:, :, b, :t] = (
            torch.randn(1, t, 3, dtype=torch.float64),
            torch.randn(1, 2, t, 6, dtype=torch.float64),
        )
    rows = LinearJacobian(a, g, torch.tensor(lengths)).kronecker_rows(reduce=True)
    assert rows.inputs is not None
    assert rows.outputs is not None
    for b, t in enumerate(lengths):
        mean = sum((a[0, b, i] for i in range(t)), torch.zeros(3, dtype=torch.float64)) / max(t, 1)
        assert_close(rows.inputs[0, b], mean)
        assert_close(rows.outputs.reshape(2, 4, 6)[:, b], sum((g[0, :, b, i] for i in range(t)), zero))
    assert rows.number == 3


# Jacobians in pieces for a processor's cache, against the whole Jacobian.

D = torch.float64
TOKENS, CLASSES, BATCH, POSITIONS, D_OUT, D_IN = 2, 3, 4, 5, 7, 6
OUTPUTS = TOKENS * CLASSES


def jacobian(channels_first: bool) -> LinearJacobian:
    """Factors as they lie in memory behind a product, or behind a convolution."""
    torch.manual_seed(0)
    if channels_first:
        a = torch.randn(1, BATCH, D_IN, POSITIONS, dtype=D).mT
        return LinearJacobian(a, torch.randn(1, OUTPUTS, BATCH, D_OUT, POSITIONS, dtype=D).mT)
    a = torch.randn(1, BATCH, POSITIONS, D_IN, dtype=D)
    return LinearJacobian(a, torch.randn(1, OUTPUTS, BATCH, POSITIONS, D_OUT, dtype=D))


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_pieces_are_the_whole(rows: int, channels_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of one, of some and of nearly all outputs of the layer, the last one narrower."""
    part, weights = jacobian(channels_first), torch.rand(2, 1, D_OUT, D_IN, dtype=D)
    whole = part.whole()[:, :, 0]  # (B, K, d_out, d_in)
    by_token = whole.reshape(BATCH, TOKENS, CLASSES, -1)
    monkeypatch.setattr(near_cache, "PIECE_BYTES", rows * 8 * OUTPUTS * D_IN)
    assert len(list(near_cache.pieces(part.a[0], part.g[0]))) == BATCH * -(-D_OUT // rows)
    expected = torch.stack([(by_token * w.reshape(-1)) @ by_token.mT for w in weights])
    assert_close(part.quadratic_forms(weights, TOKENS, True), expected)
    assert_close(part.quadratic_forms(weights, TOKENS, False), expected.diagonal(dim1=-2, dim2=-1))
    assert_close(part.squares()[0], whole.square().sum((0, 1)))


def test_only_large_jacobians_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Jacobian of 2 kB for each sample is below the limit; and a graph must not be broken by changes in place."""
    part = jacobian(False)
    assert not part._near_cache
    monkeypatch.setattr(near_cache, "PIECE_BYTES", 500)  # a row of 36 numbers fits, seven do not
    assert part._near_cache
    assert not LinearJacobian(part.a.requires_grad_(), part.g)._near_cache
    assert not LinearJacobian(part.a.expand(2, -1, -1, -1).detach(), part.g.expand(2, -1, -1, -1, -1))._near_cache


# Outputs and their derivatives along directions: both ways against dense Jacobians, whole and in chunks.

DIRECTIONAL_NAMES = ["mlp", "resnet_batchnorm", "attention", "lstm", "token_level"]
COUNT, SIZE = 5, 4


@pytest.fixture(params=DIRECTIONAL_NAMES)
def directional_case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


def expected(model: nn.Module, inputs: Any, v: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.einsum("bcp,np->nbc", dense.jacobian(model, inputs, SIZE), v).reshape(len(v), SIZE, *shape)


@pytest.mark.parametrize("cheaper", [0.0, 1e9], ids=["jacobians", "forward mode"])
@pytest.mark.parametrize("together", [2, 16])
def test_both_ways_equal_the_dense_jacobian(
    directional_case: Case, cheaper: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directional, "FORWARD_SHARE", cheaper)
    monkeypatch.setattr(directional, "DIRECTIONS_AT_ONCE", {"cpu": together, "cuda": together})
    model, inputs = directional_case.build(), directional_case.batch(SIZE)
    network = Network.build(model, inputs)
    v = torch.randn(COUNT, network.selection.size, dtype=D)
    f, products = outputs_along(network, inputs, v)
    assert_close(f, network(inputs))
    assert_close(products, expected(model, inputs, v, directional_case.outputs))


def test_chunks_of_directions_and_samples_fit_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of two samples and two directions: at no time more than that goes through the network."""
    case = BY_NAME["resnet_batchnorm"]
    model, inputs = case.build(), case.batch(SIZE)
    network = Network.build(model, inputs)
    v = torch.randn(COUNT, network.selection.size, dtype=D)
    monkeypatch.setattr(directional, "DIRECTIONS_AT_ONCE", {"cpu": 2, "cuda": 2})
    seen: list[tuple[int, int]] = []
    plain = passes.push_forward

    def watched(network: Network, inputs: Tensor, tangents: dict[str, Tensor]) -> Any:
        seen.append((len(inputs), len(next(iter(tangents.values())))))
        return plain(network, inputs, tangents)

    monkeypatch.setattr(passes, "push_forward", watched)
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


def test_a_shifted_network_has_the_outputs_of_the_tangent_model(directional_case: Case) -> None:
    model, inputs = directional_case.build(), directional_case.batch(SIZE)
    network = Network.build(model, inputs)
    v = torch.randn(1, network.selection.size, dtype=D)
    shifted = network.with_shift(0.3 * v[0])
    f, products = outputs_along(shifted, inputs, v)
    step = expected(model, inputs, v, directional_case.outputs)
    assert_close(f, network(inputs) + 0.3 * step[0])
    assert_close(shifted(inputs), f)
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


# Jacobians with a way back to the inputs: the kernel at inducing points and its slopes in their locations.


def pooled() -> nn.Module:
    """Convolutions, BatchNorm and both kinds of pooling."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2),
        nn.AvgPool2d((1, 2)), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def group_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 6, 3))


def layer_norm() -> nn.Module:
    """Over one dimension and over two."""
    return nn.Sequential(
        nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Unflatten(1, (2, 2)), nn.LayerNorm((2, 2)), nn.Flatten(),
        nn.Linear(4, 2),
    )  # fmt: skip


def transposed() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(2, 3, 2, stride=2), nn.SiLU(), nn.Flatten(), nn.Linear(3 * 4 * 6, 2))


MADE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (mlp, (4,), 3), "pooled": (pooled, (2, 5, 6), 3), "group_norm": (group_norm, (2, 3, 4), 3),
    "layer_norm": (layer_norm, (3,), 2), "norms": (norms, (4,), 3), "attention": (attention, (4, 5), 3),
    "sdpa": (sdpa, (3, 5), 3), "transformer": (transformer, (4, 5), 3), "gru": (recurrent(nn.GRU), (4, 3), 2),
    "lstm": (recurrent(nn.LSTM), (4, 3), 2), "transposed": (transposed, (2, 2, 3), 2),
}  # fmt: skip


def setting(name: str) -> tuple[nn.Module, Anchors, Any, Tensor]:
    """The model, three anchors with different outputs, a prior, and inputs of another batch."""
    make, shape, outputs = MADE[name]
    case = Case(name, make, lambda b: torch.randn(b, *shape), (outputs,))
    model = case.build()
    network = Network.build(model, case.batch(3))
    layers = len(set(network.selection.layer_of()))
    prior = lw.per_layer(torch.linspace(0.5, 2.0, layers, dtype=D)).bound(network.selection, network.theta())
    return model, Anchors(network, case.batch(3), torch.arange(3) % outputs), prior, case.batch(2, seed=3)


@pytest.mark.parametrize("name", MADE)
def test_slopes_are_finite_differences(name: str) -> None:
    """Of the kernel of the points and of that with other inputs."""
    _, anchors, prior, other = setting(name)
    fixed = anchors.network.linearise(other).jacobians().materialise()

    def kernels(z: Tensor) -> tuple[Tensor, Tensor]:
        points = anchors.differentiable(z)
        return prior_kernel(points, prior), prior_kernel(fixed, prior, points)

    z = anchors.inputs.clone().requires_grad_()
    assert torch.autograd.gradcheck(kernels, (z,), fast_mode=name not in ("mlp", "layer_norm", "norms"))


@pytest.mark.parametrize("name", MADE)
def test_values_are_those_of_the_plain_way(name: str) -> None:
    _, anchors, prior, _ = setting(name)
    kernel = prior_kernel(anchors.differentiable(anchors.inputs.clone().requires_grad_()), prior)
    assert kernel.requires_grad
    assert_close(kernel, anchors.kernel(prior))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_the_model_and_its_flags_are_left_as_they_were(name: str, frozen: bool) -> None:
    """The graph leads to the weights too, but nothing is written there."""
    model, anchors, prior, _ = setting(name)
    if frozen:
        model.requires_grad_(False)
    z = anchors.inputs.clone().requires_grad_()

    def run() -> None:
        prior_kernel(anchors.differentiable(z), prior).sum().backward(inputs=[z])

    problems.unchanged(model, run)
    assert z.grad is not None
    assert float(z.grad.abs().max()) > 0


def test_slopes_do_not_depend_on_which_weights_require_gradients() -> None:
    model, anchors, prior, _ = setting("mlp")
    slopes = []
    for wanted in (True, False):
        model.requires_grad_(wanted)
        z = anchors.inputs.clone().requires_grad_()
        slopes.append(torch.autograd.grad(prior_kernel(anchors.differentiable(z), prior).sum(), z)[0])
    assert torch.equal(*slopes)


@pytest.mark.parametrize(("name", "parameter"), [("weight_norm", "0.parametrizations"), ("free_parameter", "power")])
def test_a_parameter_without_a_rule_is_refused(name: str, parameter: str) -> None:
    case = BY_NAME[name]
    model = case.build()
    network = Network.build(model, case.batch(3))
    anchors = Anchors(network, case.batch(3), torch.arange(3))

    def run() -> None:
        with pytest.raises(
            lw.errors.ModelError,
            match=rf"Jacobian of '{parameter}.*has no rule \(no rule for .*differentiated in the inputs",
        ):
            anchors.differentiable(case.batch(3))

    problems.unchanged(model, run)
    rest = Network.build(model, case.batch(3), lw.named(r"^2\.|head"))
    points = Anchors(rest, case.batch(3), torch.arange(3))
    z = case.batch(3).requires_grad_()
    prior = lw.isotropic(1.0).bound(rest.selection, rest.theta())
    assert_close(prior_kernel(points.differentiable(z), prior), points.kernel(prior))


def test_a_batch_that_requires_no_gradient_has_the_same_values() -> None:
    _, anchors, prior, _ = setting("attention")
    assert_close(prior_kernel(anchors.differentiable(anchors.inputs), prior), anchors.kernel(prior))


def test_under_no_grad_and_inference_mode() -> None:
    """Those who ask for slopes get them, whatever surrounds the call."""
    _, anchors, prior, _ = setting("mlp")
    z = anchors.inputs.clone().requires_grad_()
    with torch.no_grad():
        points = anchors.differentiable(z)
    (slope,) = torch.autograd.grad(prior_kernel(points, prior).sum(), z)
    assert float(slope.abs().max()) > 0


# Products whose factors the hardware rounds, emulated: the vectors go in two halves.


def rounded(x: Tensor) -> Tensor:
    """To the ten bits of TF32."""
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


def test_the_halves_add_up_and_survive_rounding() -> None:
    x = torch.randn(4000) * torch.logspace(-8, 8, 4000)
    high, low = halves(x)
    assert torch.equal(high + low, x)
    assert torch.equal(rounded(high), high)
    assert not torch.equal(rounded(x), x)
    assert float(((rounded(low) - low).abs() / x.abs()).max()) < 2.0**-20
    assert torch.equal(halves(x.reshape(40, 100).mT)[0], high.reshape(40, 100).mT)


@pytest.mark.parametrize("order", [product, product_onto])
def test_only_the_fixed_factor_is_rounded(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 with the fixed factor rounded: six digits, where rounding both leaves three."""
    x, fixed = torch.randn(5, 300), torch.randn(300, 7)
    if order is product_onto:
        x, fixed = x.mT, fixed.mT
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(module, "coarse", lambda t: True)
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: multiply(rounded(a), rounded(b)))
    result = order(x, fixed) if order is product else order(fixed, x)
    plain = x @ fixed if order is product else fixed @ x
    monkeypatch.undo()
    pair = (x.double(), rounded(fixed).double())
    expected = pair[0] @ pair[1] if order is product else pair[1] @ pair[0]
    assert float((result - expected).norm() / expected.norm()) < 2e-6
    assert float((plain - expected).norm() / expected.norm()) > 1e-4


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "lstm", "token_level"])
def test_products_of_networks_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME[name]
    network = Network.build(case.build().float(), case.batch(4, torch.float32))
    v = torch.randn(6, network.selection.size)
    given = network.linearise(case.batch(4, torch.float32)).jacobians()
    plain = given.gram(v)
    monkeypatch.setattr(module, "coarse", lambda t: True)
    assert float((given.gram(v) - plain).norm() / plain.norm()) < 1e-5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fp32_precision": "tf32", "allow_tf32": False}, True),
        ({"fp32_precision": "ieee", "allow_tf32": True}, False),
        ({"allow_tf32": True}, True),
        ({"allow_tf32": False}, False),
    ],
)
def test_matmuls_round_coarsely_where_pytorch_allows_tf32(
    settings: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(**settings))
    gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert coarse(gpu) is expected  # type: ignore[arg-type]
    assert not coarse(torch.ones(2))
    assert not coarse(SimpleNamespace(device=torch.device("cuda"), dtype=torch.float64))  # type: ignore[arg-type]
