"""Small training problems, and updates of prior and noise that do what a test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing.api import Trained
from tests.cases import BY_NAME

D = torch.float64
SIZE = 23
CUTS = (9, 10, 4)  # unequal batches
LAYERS = torch.tensor([0] * 30 + [1] * 35 + [2] * 18)  # of the MLP's 83 weights


def arrays(kind: str, seed: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs (23, 4) and targets that a small network can learn."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, 4, dtype=D, generator=gen)
    f = torch.stack([x[:, 0] - x[:, 1], (2 * x[:, 2]).sin(), x[:, 3]], 1)
    if kind == "gaussian":
        return x, f + 0.3 * torch.randn(SIZE, 3, dtype=D, generator=gen)
    return (x, f.argmax(1)) if kind == "categorical" else (x, (f > 0).to(D))


def mlp() -> nn.Module:
    return BY_NAME["mlp"].build()


def dropped() -> nn.Module:
    """Return a network with dropout, whose training depends on random numbers."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).to(D)


def shuffled(kind: str = "gaussian", size: int = 7) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*arrays(kind)), batch_size=size, shuffle=True)


def kept(posterior: Any) -> Any:
    """An update that leaves everything as it is."""
    return posterior


def set_to(precisions: Callable[[int], Tensor], noise: Callable[[int], float] | None = None) -> Callable[[Any], Any]:
    """Return an update that sets precisions and noise to these functions of the number of its call."""
    calls: list[int] = []

    def update(posterior: Any) -> Any:
        number = len(calls)
        calls.append(number)
        if noise is not None:
            posterior = posterior.with_noise(torch.tensor(noise(number), dtype=D))
        problem = posterior.problem
        return posterior.with_problem(problem.with_prior(problem.prior.with_precision(precisions(number))))

    return update


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same(one: Trained, other: Trained) -> None:
    """Assert that two runs are bit-identical: weights, buffers, precisions, noise, history and state."""
    for a, b in ((one.model.state_dict(), other.model.state_dict()), (one.state.weights, other.state.weights)):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert torch.equal(value, b[name]), name
    assert one.history == other.history
    assert torch.equal(one.posterior.prior.values, other.posterior.prior.values)
    assert torch.equal(one.posterior.likelihood.dispersion, other.posterior.likelihood.dispersion)
    assert torch.equal(one.posterior.log_evidence(), other.posterior.log_evidence())


class Fixup(nn.Module):
    """Residual blocks without normalisation: scalar biases around every convolution, a scale, a last one of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.one, self.two = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.bias1a, self.bias1b, self.bias2a, self.bias2b = (nn.Parameter(torch.zeros(1)) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(4, 3)
        nn.init.zeros_(self.two.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        h = torch.relu(self.one(x + self.bias1a) + self.bias1b)
        h = self.two(h + self.bias2a) * self.scale + self.bias2b
        return self.head(F.relu(x + h).mean((2, 3)))
