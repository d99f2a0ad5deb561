"""The columns of single weights against brute force, and the memory that they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.peak import held
from lapwing.networks import linear_jacobian as linear_columns
from lapwing.networks import tangent
from lapwing.networks.dense_jacobian import Entries, LookupJacobian, PickedJacobian, are_few
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network
from lapwing.networks.selection import subnetwork
from tests.cases import BY_NAME, CASES, Case
from tests.references import dense
from tests.tolerances import assert_close

D = torch.float64
BATCH = 4


@pytest.fixture(params=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


@pytest.fixture(params=["gathered", "banded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take one way for all layers, whatever it costs."""
    monkeypatch.setattr(linear_columns, "FASTER", 0 if request.param == "gathered" else 10**9)
    return request.param


def some(size: int, share: float) -> Tensor:
    """Positions in no order: theta has the order in which they are given."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(3))[: max(2, int(share * size))]


@pytest.mark.parametrize(("picked", "share"), [(True, 0.1), (False, 0.8)], ids=["picked", "factored"])
def test_columns_equal_brute_force(
    case: Case, share: float, picked: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product with the Jacobian, whether the columns are picked first or the factors are kept."""
    monkeypatch.setattr(tangent, "are_few", lambda *_: picked)
    model, inputs = case.build(), case.batch(BATCH)
    whole = dense.jacobian(model, inputs, BATCH)
    index = some(whole.shape[-1], share)
    expected = whole[..., index]
    network = Network.build(model, inputs, subnetwork(index))
    jacobians = network.linearise(inputs).jacobians()
    assert all(isinstance(part, PickedJacobian) == picked or isinstance(part, LookupJacobian) for _, part in jacobians)
    assert_close(jacobians.whole(), expected)
    assert_close(jacobians.samples(slice(1, 3)).double().whole(), expected[1:3])
    v = torch.randn(3, len(index), dtype=D)
    assert_close(jacobians.jvp(v), torch.einsum("bcp,np->nbc", expected, v))
    u = torch.randn(3, BATCH, expected.shape[1], dtype=D)
    assert_close(jacobians.vjp(u), torch.einsum("bcp,nbc->np", expected, u))
    assert_close(jacobians.materialised().gram(v), torch.einsum("bcp,bcq,nq->np", expected, expected, v))
    with lw.memory.limited(1):
        assert_close(jacobians.whole(), expected)


@pytest.mark.parametrize("name", ["mlp", "conv_zoo", "embedding", "token_level"])
def test_sums_over_picked_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights of zero for all that is not chosen, as a precision of single weights has them."""
    case = BY_NAME[name]
    model, inputs = case.build(), case.batch(BATCH)
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
            assert two.materialised_size() == two.materialised().nbytes // 8


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
