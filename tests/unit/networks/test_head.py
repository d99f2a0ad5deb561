"""The linear layer that ends a network, found in its graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.networks.network import Network
from tests.cases import Wrapped

D = torch.float64


def residual(m: Any, x: Tensor) -> Tensor:
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
    "two branches": (Wrapped(residual, last=nn.Linear(3, 2), other=nn.Linear(3, 2)), (3,), ""),
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
