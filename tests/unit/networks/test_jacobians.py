"""Layer-wise Jacobians and products against one backward pass per sample and output."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.peak import held
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network
from lapwing.networks.selection import named, subnetwork
from tests import problems
from tests.cases import BY_NAME, CASES, Case, Wrapped, cast
from tests.references import dense
from tests.tolerances import assert_close

NAMES = [case.name for case in CASES]


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


def layerwise(network: Network, inputs: object) -> Tensor:
    return network.linearise(inputs).jacobians().whole()


@pytest.mark.parametrize("size", [1, 4, 7])
def test_jacobian_equals_brute_force(case: Case, size: int) -> None:
    # 4 is also the number of tokens and time steps of the cases, so rows cannot be told apart by their number.
    model, inputs = case.build(), case.batch(size)
    network = Network.build(model, inputs)
    assert network.output_shape == case.outputs
    assert_close(layerwise(network, inputs), dense.jacobian(model, inputs, size))


def test_jacobian_of_other_batches_than_the_first(case: Case) -> None:
    model = case.build()
    network = Network.build(model, case.batch(4))
    for size, seed in ((4, 1), (2, 2), (1, 3), (5, 4)):
        inputs = case.batch(size, seed=seed)
        assert_close(layerwise(network, inputs), dense.jacobian(model, inputs, size))


def test_first_batch_of_one_says_nothing_about_the_next(case: Case) -> None:
    model, inputs = case.build(), case.batch(4)
    network = Network.build(model, case.batch(1, seed=3))
    assert_close(layerwise(network, inputs), dense.jacobian(model, inputs, 4))


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


def test_output_is_the_models(case: Case) -> None:
    model, inputs = case.build(), case.batch(3)
    network = Network.build(model, inputs)
    expected = torch.cat([dense.output(model, dense.one(inputs, b)) for b in range(3)]).detach()
    assert_close(network.linearise(inputs).f, expected)
    assert_close(network(inputs), expected)


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
def test_jvp_takes_many_vectors(case: Case, size: int) -> None:
    model, inputs = case.build(), case.batch(size)
    network = Network.build(model, case.batch(4))
    jac = dense.jacobian(model, inputs, size)
    v = torch.randn(3, jac.shape[-1], dtype=torch.float64)
    expected = torch.stack([torch.stack([j @ one for j in jac]) for one in v])
    assert_close(network.jvp(inputs, v), expected.reshape(3, size, *case.outputs))
    assert_close(network.linearise(inputs).jacobians().jvp(v), expected)


@pytest.mark.parametrize("size", [1, 4])
def test_vjp_takes_many_vectors(case: Case, size: int) -> None:
    model, inputs = case.build(), case.batch(size)
    network = Network.build(model, case.batch(4))
    jac = dense.jacobian(model, inputs, size)
    u = torch.randn(2, size, *case.outputs, dtype=torch.float64)
    expected = torch.stack([sum(j.T @ seed.reshape(-1) for j, seed in zip(jac, one, strict=True)) for one in u])
    assert_close(network.vjp(inputs, u), expected)


def test_seeded_jacobian(case: Case) -> None:
    model, inputs = case.build(), case.batch(4)
    network = Network.build(model, inputs)
    jac = dense.jacobian(model, inputs, 4)
    seeds = torch.randn(2, 4, *case.outputs, dtype=torch.float64)
    expected = torch.stack([torch.stack([seeds[k, b].reshape(-1) @ jac[b] for k in range(2)]) for b in range(4)])
    assert_close(network.linearise(inputs).jacobians(seeds).whole(), expected)


def test_squares_and_weighted_sums_of_every_block(case: Case) -> None:
    """Σ J², Σ J w Jᵀ and its cross-sample form, block by block, against the dense Jacobian of the block."""
    model, inputs = case.build(), case.batch(4)
    jacobians = Network.build(model, inputs).linearise(inputs).jacobians()
    for block, part in jacobians:
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


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "lstm", "token_level"])
def test_named_and_subnetwork_jacobians(name: str) -> None:
    case = BY_NAME[name]
    model, inputs = case.build(), case.batch(4)
    whole = dense.jacobian(model, inputs, 4)
    biases = [n for n, _ in model.named_parameters() if n.endswith("bias") or "bias_" in n]
    network = Network.build(model, inputs, named("bias"))
    assert list(network.selection.names) == biases
    assert_close(layerwise(network, inputs), dense.jacobian(model, inputs, 4, biases))
    index = torch.randperm(whole.shape[-1])[:11].sort().values
    network = Network.build(model, inputs, subnetwork(index))
    assert_close(layerwise(network, inputs), whole[..., index])
    v = torch.randn(2, 11, dtype=torch.float64)
    assert_close(network.jvp(inputs, v).flatten(2), torch.einsum("bcp,np->nbc", whole[..., index], v))
    u = torch.randn(2, 4, *case.outputs, dtype=torch.float64)
    assert_close(network.vjp(inputs, u), torch.einsum("bcp,nbc->np", whole[..., index], u.flatten(2)))


def test_model_is_left_as_it_was(case: Case) -> None:
    model, inputs = case.build(), case.batch(4)
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def run() -> None:
        network = Network.build(model, inputs)
        network.linearise(inputs).jacobians().whole()
        network.jvp(inputs, torch.ones(1, size, dtype=torch.float64))
        network.vjp(inputs, torch.ones(1, 4, *case.outputs, dtype=torch.float64))

    problems.unchanged(model, run)


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
    forms = {n: [type(part.materialised(n)).__name__ for _, part in jacobians] for n in (1, 40)}
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
