"""The inputs of a network's last layer, by one forward pass."""

from __future__ import annotations

from torch import Tensor, zeros_like

from lapwing.core.inputs import Inputs
from lapwing.networks.network import Network


def is_single_map(network: Network) -> bool:
    """Return whether the selected weights are those of one linear map."""
    layout = network.layout
    return len(layout) == 1 and layout[0].linear and layout[0].groups == 1


def last_features(network: Network, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """Return the input (B, D) of the selected linear map, with a column of ones for a bias, and the outputs f (B, C).

    None if the map is used several times for one input, as for every token of a text.
    """
    tangent = network.linearise(inputs)
    ((_, part),) = tangent.jacobians(zeros_like(tangent.network_output)[None])
    single = part.single_map()
    return None if single is None else (single.a[0, :, 0], tangent.f)
