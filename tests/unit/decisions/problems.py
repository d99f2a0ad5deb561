"""Tiny posteriors with data from known distributions, from which any number of rows can be drawn."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

import lapwing as lw

D = torch.float64
Rows = tuple[Tensor, Tensor]


def classes(count: int, generator: torch.Generator) -> Rows:
    """Three classes whose logits are a noisy linear function of two inputs."""
    x = torch.randn(count, 2, dtype=D, generator=generator)
    logits = x @ torch.tensor([[2.0, -1.0, 0.0], [0.0, 1.5, -2.0]], dtype=D)
    return x, torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)


def numbers(count: int, generator: torch.Generator) -> Rows:
    """One number whose noise grows with the first of two inputs."""
    x = torch.randn(count, 2, dtype=D, generator=generator)
    noise = torch.randn(count, 1, dtype=D, generator=generator) * (0.1 + x[:, :1].abs())
    return x, x.sum(1, keepdim=True) + noise


@cache
def classifier() -> lw.Fitted:
    """A posterior that is wrong about the classes: its weights are half of the true ones."""
    model = nn.Linear(2, 3).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [-0.5, 0.7], [0.0, -1.0]], dtype=D))
        model.bias.copy_(torch.tensor([0.1, 0.0, -0.2], dtype=D))
    return lw.fit(model, [classes(40, generator(90))], "classification", method=lw.Full(), prior=1.0)


@cache
def regressor() -> lw.Fitted:
    """A posterior with a mean and a log-variance for every input, both roughly right."""
    model = Spread().double()
    return lw.fit(model, [numbers(50, generator(91))], lw.HeteroscedasticGaussian(), method=lw.Full(), prior=5.0)


class Spread(nn.Module):
    """A network whose log-variance follows the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(2, 1), nn.Linear(2, 1)
        with torch.no_grad():
            self.mean.weight.copy_(torch.tensor([[0.9, 1.1]]))
            self.mean.bias.fill_(0.05)
            self.spread.weight.copy_(torch.tensor([[1.2, 0.0]]))
            self.spread.bias.fill_(-3.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.mean(x), self.spread(x.abs())], 1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
