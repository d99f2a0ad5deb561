"""Training of the networks of the estimators: standardised numbers, Adam, early stopping on held-out rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.progress import EarlyStopping
from lapwing.core.settings import one_of
from lapwing.errors import ModelError, NumericalError

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}
Loss = Callable[[Tensor, Tensor], Tensor]


class Standardised(nn.Module):
    """Inputs (B, d) to zero mean and unit variance; a feature that is constant is only shifted."""

    mean: Tensor
    scale: Tensor

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        mean, scale = column_scales(x)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


class InUnitsOfTargets(nn.Module):
    """A network that was trained on standardised targets, with outputs in the units of the targets."""

    mean: Tensor
    scale: Tensor

    def __init__(self, module: nn.Module, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) * self.scale + self.mean


def column_scales(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each column; one in place of a deviation of zero."""
    mean, scale = values.mean(0), values.std(0, correction=0)
    rounding = values.abs().amax(0) * 10 * torch.finfo(values.dtype).eps
    return mean, torch.where(scale > rounding, scale, torch.ones_like(scale))


def small_network(x: Tensor, outputs: int, hidden: Sequence[int], activation: str) -> nn.Sequential:
    """Return an untrained multilayer perceptron in float64 that standardises its inputs first."""
    one_of(ACTIVATIONS).check("activation", activation)
    sizes = [x.shape[1], *hidden]
    layers: list[nn.Module] = [Standardised(x.double())]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs)).double()


def first_weight(module: nn.Module) -> Tensor:
    """Return the first parameter, whose dtype and device the inputs shall have; raise if there is none."""
    for parameter in module.parameters():
        return parameter.detach()
    raise ModelError("module() returned a network without parameters; expected at least one to train.")


@dataclass(frozen=True)
class Schedule:
    """How a network is trained: steps of Adam over shuffled batches, until the score has not improved for a while."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    max_epochs: int
    patience: int
    seed: int

    def train(self, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, held_out: tuple[Tensor, Tensor]) -> int:
        """Train the module in place, leave it in evaluation mode at its best epoch, and return the number of epochs.

        The best epoch has the lowest loss on the held-out rows.
        """
        generator = torch.Generator().manual_seed(self.seed)
        optimiser = torch.optim.Adam(module.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        stopping: EarlyStopping[Any] = EarlyStopping(lambda: _score(module, loss, held_out), 1, self.patience)
        epochs = 0
        while epochs < self.max_epochs:
            module.train()
            for rows in torch.randperm(len(x), generator=generator).split(self.batch_size):
                optimiser.zero_grad()
                loss(module(x[rows]), y[rows]).backward()
                optimiser.step()
            epochs += 1
            if stopping.should_stop(epochs - 1):
                break
        module.load_state_dict(stopping.best_state)
        module.eval()
        if not all(bool(p.isfinite().all()) for p in module.parameters()):
            raise NumericalError(
                "the training diverged: weights are not finite; lower learning_rate_init, or scale the inputs."
            )
        return epochs


def _score(module: nn.Module, loss: Loss, rows: tuple[Tensor, Tensor]) -> tuple[float, dict[str, Any]]:
    """Return minus the loss of the module on these rows, and a copy of its state."""
    module.eval()
    with torch.no_grad():
        value = float(loss(module(rows[0]), rows[1]))
    return -value, copy.deepcopy(module.state_dict())
