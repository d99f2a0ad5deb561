"""Rules that choose single weights from the model alone: by their magnitude, or at random."""

from __future__ import annotations

import torch
from torch import nn

from lapwing.core.random import independent_generator, uniform
from lapwing.core.settings import GENERATOR
from lapwing.networks.forward import unwrapped
from lapwing.networks.selection import Subnetwork, Weights
from lapwing.subnetworks.candidates import NUMBER, largest, listed, positions_of


def by_magnitude(model: nn.Module, n: float, *, within: Weights | str | None = None) -> Subnetwork:
    """Choose the weights with the largest absolute values.

    Args:
        model: The trained network.
        n: How many weights, or which share of the candidates.
        within: The candidates: ``lw.named(pattern)`` or ``lw.subnetwork(index)``; all by default.

    Returns:
        A selection for ``weights`` of ``fit``; equal magnitudes go to the first weights.

    Raises:
        UnsupportedError: If n is no number of weights, or above that of the candidates; if ``within`` is another rule.
        ModelError: If a candidate does not require a gradient.
        DataError: If a candidate is not finite.

    >>> net = nn.Linear(3, 1)
    >>> _ = net.weight.data.copy_(torch.tensor([[0.1, -4.0, 2.0]])), net.bias.data.fill_(3.0)
    >>> by_magnitude(net, 2).index.tolist()
    [1, 3]
    """
    NUMBER.check("n", n)
    candidates = listed(model, within)
    tensors = dict(unwrapped(model).named_parameters())
    flat = torch.cat([tensors[name].detach().reshape(-1).double() for name in candidates.names])
    return largest(candidates.picked(flat).abs(), positions_of(model, candidates), n)


def random(
    model: nn.Module, n: float, *, within: Weights | str | None = None, generator: torch.Generator | None = None
) -> Subnetwork:
    """Choose weights at random, each set of n with the same probability.

    Args:
        model: The network.
        n: How many weights, or which share of the candidates.
        within: The candidates: ``lw.named(pattern)`` or ``lw.subnetwork(index)``; all by default.
        generator: The source of randomness; a fixed seed if None.

    Returns:
        A selection for ``weights`` of ``fit``.

    Raises:
        UnsupportedError: If n is no number of weights, or above that of the candidates; if ``within`` is another rule.
        ModelError: If a candidate does not require a gradient.

    >>> len(random(nn.Linear(5, 3), 7).index)
    7
    """
    NUMBER.check("n", n)
    GENERATOR.check("generator", generator)
    positions = positions_of(model, listed(model, within))
    like = torch.empty(0, dtype=torch.float64)
    return largest(uniform((len(positions),), independent_generator(generator), like), positions, n)
