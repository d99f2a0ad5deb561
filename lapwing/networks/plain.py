"""Plain passes of a network, as it runs without Lapwing, to count and to time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lapwing.core.inputs import Inputs
from lapwing.networks.forward import raw_output, recording
from lapwing.networks.network import Network
from lapwing.networks.replica import lent


def trained_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that a training step changes."""
    return tuple(name for name, p in model.named_parameters() if p.requires_grad)


@dataclass(frozen=True)
class PlainPasses:
    """The network as it runs without Lapwing, on one batch."""

    forward: Callable[[], Any]  # a forward pass without a graph
    training: Callable[[], Any]  # a forward and a backward pass, to the gradients of the parameters


@contextmanager
def plain_passes(network: Network, inputs: Inputs, names: tuple[str, ...]) -> Iterator[PlainPasses]:
    """Yield the passes to run inside the block; gradients are those of the named parameters."""
    tensors = network.parameters
    with recording(tensors, names, network.plain), lent(network.replica) as one:
        parameters = [p for name, p in one.named_parameters() if name in names]

        def forward() -> None:
            with torch.no_grad():
                raw_output(one, inputs)

        def training() -> None:
            torch.autograd.grad(raw_output(one, inputs).sum(), parameters, allow_unused=True)

        yield PlainPasses(forward, training)
