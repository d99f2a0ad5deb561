"""Networks trained side by side."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from experiments.stacked import Stack, StackedTraining, loss_slope, trained_stack
from lapwing.demo.training import TrainingSettings, mlp

SETTINGS = StackedTraining(hidden=(7, 5), steps=600, batch_size=16)


def rows(n: int = 60, inputs: int = 3) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, inputs, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x[:, :1].sin() + 0.5 * x[:, 1:2]


def error(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean squared error over the variance of the targets."""
    with torch.no_grad():
        return float((net(x) - y).square().mean() / y.var())


def networks(count: int, dropout: float = 0.0) -> list[nn.Sequential]:
    return [mlp(3, 1, TrainingSettings(hidden=(7, 5), dropout=dropout), seed) for seed in range(count)]


@pytest.mark.parametrize("masked", [False, True])
def test_the_slope_is_that_of_automatic_differentiation(masked: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    stack = Stack.of(networks(4))
    x, y = (torch.randn(4, 6, size, generator=generator) for size in (3, 1))
    masks = tuple(torch.rand(4, 6, h, generator=generator).round() * 2 if masked else None for h in (7, 5))
    slope = Stack.zeros((3, 7, 5, 1), 4)
    squares = loss_slope(stack, slope, x, y, masks)
    leaves = [part.clone().requires_grad_() for part in stack.parts]
    h = x
    for weight, bias, mask in zip(leaves[:-2:2], leaves[1:-2:2], masks, strict=True):
        h = (h @ weight + bias).tanh()
        h = h if mask is None else h * mask
    errors = (h @ leaves[-2] + leaves[-1] - y).square().mean(1)
    torch.testing.assert_close(squares[:, 0], errors, rtol=1e-5, atol=1e-6)
    loss = 0.5 * errors.sum()
    expected = torch.autograd.grad(loss, leaves)
    got = slope.parts
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_networks_are_written_as_they_were_read() -> None:
    given, empty = networks(3), networks(6)[3:]
    Stack.of(given).write(empty)
    for a, b in zip(given, empty, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_training_fits_and_is_repeatable() -> None:
    x, y = rows()
    first, second, dropping = trained_stack(x, y, SETTINGS, seed=3, plain=2, dropping=1)
    for net in (first, second):
        assert not net.training
        assert next(net.parameters()).dtype == torch.float64
        assert error(net, x, y) < 0.1
    assert not torch.allclose(first(x), second(x), atol=1e-3)
    assert any(isinstance(layer, nn.Dropout) for layer in dropping)
    assert error(dropping, x, y) < 0.3
    again = trained_stack(x, y, SETTINGS, seed=3, plain=2, dropping=1)[0]
    assert torch.equal(first(x), again(x))


def test_adam_is_that_of_torch_with_the_decay_of_a_prior() -> None:
    """With all rows in one batch the order of the rows does not matter. The noise is a running mean."""
    x, y = rows(12)
    settings = replace(SETTINGS, steps=20, batch_size=50, precision=3.0)
    net = mlp(3, 1, TrainingSettings(hidden=(7, 5)), 4000)
    optimiser = torch.optim.Adam(net.parameters(), lr=settings.learning_rate)
    noise: float | None = None
    for step in range(20):
        square = (net(x.float()) - y.float()).square().mean()
        noise = float(square.detach()) if noise is None else 0.99 * noise + 0.01 * float(square.detach())
        optimiser.param_groups[0]["lr"] = settings.learning_rate * 0.5 * (1 + math.cos(math.pi * step / 20))
        optimiser.param_groups[0]["weight_decay"] = 3.0 * noise / 12
        optimiser.zero_grad()
        (0.5 * square).backward()
        optimiser.step()
    stacked = trained_stack(x, y, settings, seed=4, plain=2)[0]
    torch.testing.assert_close(stacked(x), net.double()(x), rtol=1e-3, atol=1e-4)
