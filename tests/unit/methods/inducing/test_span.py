"""The span identity: with a dense output layer the network's output is its Jacobian times the weights of that layer.

VaLLA keeps the output of the network as its mean, which needs that output to be in the space of the tangent kernel. It
is, exactly, whatever function the network has learned: f = W h + b is linear in W and b.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.networks.network import Network
from lapwing.networks.selection import Weights
from tests.references import dense
from tests.tolerances import assert_close

D = torch.float64
IN, HIDDEN, OUT, ROWS = 2, 5, 3, 11
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


def net(activation: str, bias: bool = True, dtype: torch.dtype = D) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.Linear(IN, HIDDEN), ACTIVATIONS[activation](), nn.Linear(HIDDEN, HIDDEN), ACTIVATIONS[activation]()]
    return nn.Sequential(*middle, nn.Linear(HIDDEN, OUT, bias=bias)).to(dtype)


def inputs(dtype: torch.dtype = D) -> Tensor:
    return torch.randn(ROWS, IN, dtype=dtype, generator=torch.Generator().manual_seed(1))


def embedded(network: Network, names: tuple[str, ...]) -> Tensor:
    """Return theta with all parameters but the named ones set to zero, (P,)."""
    vector = torch.zeros_like(network.theta())
    for name in names:
        part = network.selection.slices[name]
        vector[part] = network.theta()[part]
    return vector


def product(model: nn.Module, names: tuple[str, ...], weights: Weights | None = None, dtype: torch.dtype = D) -> Tensor:
    """Return J(x) v for v the named parameters, (B, C)."""
    network = Network.build(model, inputs(dtype), weights)
    return network.jvp(inputs(dtype), embedded(network, names)[None])[0].detach()


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_output_is_the_jacobian_times_the_output_layer(activation: str, bias: bool, dtype: torch.dtype) -> None:
    model = net(activation, bias, dtype)
    names = ("4.weight", "4.bias") if bias else ("4.weight",)
    assert_close(product(model, names, dtype=dtype), model(inputs(dtype)))


def test_the_last_layer_alone_spans_the_output() -> None:
    model = net("relu")
    assert_close(product(model, ("4.weight", "4.bias"), lw.last_layer), model(inputs()))


def test_without_the_bias_the_bias_is_missing() -> None:
    """With the output weights alone the span has f - b, so a frozen bias belongs to the mean of the prior."""
    model = net("tanh")
    assert_close(product(model, ("4.weight",), lw.named("^4.weight")), model(inputs()) - model[4].bias)


def test_an_activation_after_the_output_layer_breaks_the_identity() -> None:
    model = nn.Sequential(*net("tanh"), nn.Softplus())
    gap = product(model, ("4.weight", "4.bias")) - model(inputs()).detach()
    assert float(gap.abs().max()) > 0.1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_output_is_in_the_range_of_the_kernel_and_a_jump_is_not(activation: str) -> None:
    """With more outputs of data than weights the range of K = J Jᵀ is a proper subspace."""
    model, x = net(activation), torch.randn(40, IN, dtype=D, generator=torch.Generator().manual_seed(3))
    jacobian = dense.jacobian(model, x, 40).flatten(0, 1)  # (B C, P)
    assert len(jacobian) > jacobian.shape[1]
    basis = torch.linalg.qr(jacobian).Q
    f = model(x).detach().reshape(-1)
    jump = (x[:, :1] > 0).to(f).expand(-1, OUT).reshape(-1)
    assert_close(basis @ (basis.mT @ f), f)
    assert float((basis @ (basis.mT @ jump) - jump).norm()) > 0.1 * float(jump.norm())
