"""The input of a network's last layer, as features of the network's input."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.errors import ModelError
from lapwing.networks.last_layer import last_layer
from lapwing.networks.network import Network


def last_layer_network(network: Network, inputs: Inputs) -> Network:
    """Return the network with only its last layer selected; raise if that is not a single linear map."""
    last = Network.build(network.model, inputs, last_layer)
    if len(last.layout) != 1 or not last.layout[0].linear or last.layout[0].groups != 1:
        raise ModelError("the last layer is no single linear map, so it has no features; use kernel='rbf'.")
    return last


def features(network: Network, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the last layer's input (B, D) and the outputs f (B, C), by one forward pass."""
    tangent = network.linearise(inputs)
    seeds = torch.zeros_like(tangent.network_output)[None]
    for block, part in tangent.jacobians(seeds):
        single = part.single_map()
        if single is None:
            raise ModelError("the last layer is used several times for one input; use kernel='rbf'.")
        a = single.a[0, :, 0]
        return (a[:, :-1] if block.bias is not None else a), tangent.f
    raise AssertionError("a last layer has one block")
