"""Plain passes of a network: gradients of the named parameters alone, and a model that stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lapwing.networks.network import Network, plain_passes, trainable_names
from tests.operations import OperationCount


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).eval()


# By hand, for 3-4-2 and five inputs: forward 12 + 8; the gradient of the last layer 8; to the first, 8 more and 12.
@pytest.mark.parametrize(
    ("names", "products"), [(("0.weight", "2.weight"), 20 + 8 + 8 + 12), (("2.weight",), 20 + 8)], ids=["all", "last"]
)
def test_the_gradients_of_the_named_parameters(names: tuple[str, ...], products: int) -> None:
    x = torch.randn(5, 3)
    with plain_passes(Network.build(model(), x), x, names) as passes:
        with OperationCount() as forward:
            passes.forward()
        with OperationCount() as training:
            passes.training()
    assert (forward.products, training.products) == (5 * 20, 5 * products)


def test_the_model_is_not_changed() -> None:
    net, x = model(), torch.randn(5, 3)
    net[0].weight.requires_grad_(False)
    before = [(p.clone(), p.requires_grad) for p in net.parameters()]
    with plain_passes(Network.build(net, x), x, ("0.weight", "2.weight")) as passes:
        passes.training()
    after = [(p, p.requires_grad) for p in net.parameters()]
    assert all(torch.equal(a, b) and f == g for (a, f), (b, g) in zip(before, after, strict=True))
    assert all(p.grad is None for p in net.parameters())
    assert trainable_names(net) == ("2.weight",)
