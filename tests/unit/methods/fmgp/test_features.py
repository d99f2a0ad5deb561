"""What the last layer of a network sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.fmgp import features, last_layer_network
from lapwing.networks.network import Network
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense
from tests.tolerances import assert_close

D = torch.float64
HEADS = {
    "mlp": "4", "cnn": "6", "resnet_batchnorm": "head", "conv_zoo": "8", "norms": "5", "attention": "head",
    "transformer_layer": "head", "embedding": "head", "lstm": "head", "gru": "head", "frozen_bias": "4",
    "weight_norm": "2", "squeezed": "net.2", "dict_input": "head", "tuple_input": "head",
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_features_are_what_goes_into_the_head(name: str) -> None:
    case = BY_NAME[name]
    model, seen = case.build(), []
    handle = model.get_submodule(HEADS[name]).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        expected = torch.cat([dense.output(model, dense.one(case.batch(3), b)) for b in range(3)])
    handle.remove()
    network = Network.build(model, case.batch(3))
    inputs, outputs = problems.unchanged(
        model, lambda: features(last_layer_network(network, case.batch(3)), case.batch(3))
    )
    assert_close(inputs, torch.cat(seen))
    assert_close(outputs, expected)
    assert not inputs.requires_grad


def test_a_head_without_a_bias() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()
    x = torch.randn(6, 4, dtype=D)
    inputs, _ = features(last_layer_network(Network.build(model, x), x), x)
    assert_close(inputs, model[:2](x))


def test_weights_that_are_chosen_do_not_matter() -> None:
    case = BY_NAME["mlp"]
    some = Network.build(case.build(), case.batch(3), lw.subnetwork(torch.arange(5)))
    every = Network.build(case.build(), case.batch(3))
    assert_close(*(features(last_layer_network(n, case.batch(3)), case.batch(3))[0] for n in (some, every)))


@pytest.mark.parametrize("name", ["tied", "free_parameter"])
def test_a_head_that_is_no_single_linear_map(name: str) -> None:
    case = BY_NAME[name]
    with pytest.raises(lw.errors.ModelError, match="no single linear map, so it has no features; use kernel='rbf'"):
        last_layer_network(Network.build(case.build(), case.batch(3)), case.batch(3))


def two_heads() -> nn.Module:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x.square())

    return Two().double()


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 1, groups=2), nn.Flatten()).double()


@pytest.mark.parametrize(("make", "shape"), [(two_heads, (4,)), (grouped, (4, 1, 1))])
def test_several_maps_at_the_end(make: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(5, *shape, dtype=D)
    with pytest.raises(lw.errors.ModelError, match="no single linear map"):
        last_layer_network(Network.build(make(), x), x)


@pytest.mark.parametrize("name", ["conv1d", "sdpa"])
def test_a_head_that_is_used_several_times(name: str) -> None:
    case = BY_NAME[name]
    network = last_layer_network(Network.build(case.build(), case.batch(3)), case.batch(3))
    with pytest.raises(lw.errors.ModelError, match="used several times for one input; use kernel='rbf'"):
        features(network, case.batch(3))
