"""Products whose factors the hardware rounds, emulated: the vectors go in two halves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing.networks import dense_jacobian as module
from lapwing.networks.dense_jacobian import coarse, halves, product, product_onto
from lapwing.networks.network import Network
from tests.cases import BY_NAME


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
def test_what_pytorch_was_told(settings: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(**settings))
    gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert coarse(gpu) is expected  # type: ignore[arg-type]
    assert not coarse(torch.ones(2))
    assert not coarse(SimpleNamespace(device=torch.device("cuda"), dtype=torch.float64))  # type: ignore[arg-type]
