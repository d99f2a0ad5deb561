"""Parameters without a rule: all in one pass for each chunk, and chunks under the byte budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.networks import tangent
from lapwing.networks import tangent as fallback
from lapwing.networks.dense_jacobian import DenseJacobian
from lapwing.networks.network import Network
from tests.cases import BY_NAME, Wrapped
from tests.references import dense
from tests.tolerances import assert_close

weight_norm = nn.utils.parametrizations.weight_norm


def normed() -> nn.Module:
    """Two opaque weights and their lengths: 30 x 20 + 30 + 5 x 30 + 5 numbers without a rule."""
    return nn.Sequential(weight_norm(nn.Linear(20, 30)), nn.Tanh(), weight_norm(nn.Linear(30, 5))).double()


def tied() -> nn.Module:
    """A table that is also the head: 50 x 6 numbers, used in both orientations."""
    return Wrapped(lambda m, t: torch.tanh(m.table(t)).mean(1) @ m.table.weight.T, table=nn.Embedding(50, 6)).double()


def spare() -> nn.Module:
    return Wrapped(lambda m, x: m.used(x), used=nn.Linear(20, 3), spare=nn.Linear(20, 30)).double()


BATCHES: dict[str, tuple[Any, Any, int]] = {
    "weight norm": (normed, lambda b: torch.randn(b, 20, dtype=torch.float64), 30 * 20 + 30 + 5 * 30 + 5),
    "tied": (tied, lambda b: torch.randint(0, 50, (b, 4)), 50 * 6),
    "unused": (spare, lambda b: torch.randn(b, 20, dtype=torch.float64), 30 * 20),
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


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet_batchnorm", "norms", "attention", "lstm", "frozen_weight"])
def test_ordinary_layers_have_nothing_whole(name: str) -> None:
    case = BY_NAME[name]
    assert Network.build(case.build(), case.batch(4)).footprint.whole == 0


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

    monkeypatch.setattr(fallback, "_vectorised", refused)
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
