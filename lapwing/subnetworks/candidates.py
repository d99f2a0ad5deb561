"""The weights that a rule chooses from, the number that it takes, and the selection that follows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapwing.core.inputs import check_finite
from lapwing.core.settings import Rule, is_integer, is_real
from lapwing.errors import ModelError, UnsupportedError
from lapwing.networks.forward import device_of, unwrapped
from lapwing.networks.network import Network
from lapwing.networks.selection import NeedsNoGraph, Selection, Subnetwork, Weights, all_weights, selected
from lapwing.registry import named

NUMBER = Rule(
    "a number of weights of at least 1, or a share of them, above 0 and at most 1",
    lambda v: v >= 1 if is_integer(v) else is_real(v) and 0 < v <= 1,
)


def listed(model: nn.Module, within: Weights | str | None) -> Selection:
    """Return the candidates of a rule that needs no pass over inputs, by their names in the unwrapped model."""
    device_of(model)
    rule = named("weights", within)
    if not isinstance(rule, NeedsNoGraph):
        raise UnsupportedError(
            f"within is {rule!r:.80}, which is found by a pass over inputs; expected lw.named(pattern) or "
            "lw.subnetwork(index). Give the names of these parameters."
        )
    return rule.listed(unwrapped(model))


def positions_of(model: nn.Module, candidates: Selection) -> Tensor:
    """Return the positions of the candidates, (P,), in the flat vector of all weights that require a gradient."""
    model = unwrapped(model)
    whole = selected(model, all_weights.needs(model))
    frozen = [name for name in candidates.names if name not in whole.slices]
    if frozen:
        raise ModelError(
            f"the candidate {frozen[0]!r} does not require a gradient; single weights are chosen among those that do. "
            "Call requires_grad_(True) on it, or leave it out of within."
        )
    parts = [torch.arange(whole.slices[name].start, whole.slices[name].stop) for name in candidates.names]
    flat = torch.cat(parts)
    return flat if candidates.index is None else flat[candidates.index.to(flat.device)]


def largest_in(scores: Tensor, network: Network, n: float) -> Subnetwork:
    """Return the candidates of a network with the largest scores, (P,)."""
    return largest(scores, positions_of(network.model, network.selection), n)


def largest(scores: Tensor, positions: Tensor, n: float) -> Subnetwork:
    """Return the n positions (P,) with the largest scores (P,), in rising order."""
    check_finite(scores, "scores of the weights")
    order = scores.argsort(descending=True, stable=True)[: count_of(n, len(scores))]
    return Subnetwork(positions[order.to(positions.device)].sort().values)


def count_of(n: float, candidates: int) -> int:
    """Return how many weights to choose."""
    if is_integer(n) and n > candidates:
        raise UnsupportedError(f"n is {n}; expected at most {candidates}, the number of candidates.")
    return int(n) if is_integer(n) else max(1, round(n * candidates))
