"""Scalar functions of the weights or of the outputs: their gradient in the weights, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Inputs, check_finite
from lapwing.errors import ModelError
from lapwing.networks.network import Network, refuse_steep, scalar

Functional = Callable[[Any], Tensor]  # of the weights by name, or of the outputs f (B, [T,] C)


def weight_slope(network: Network, function: Functional, x: Inputs | None = None) -> Tensor:
    """∇g in the weights, (P,): of a function of them, or of one of the outputs at x, Jᵀ ∂g/∂f."""
    if x is None:
        return network.slope(function)
    seed, batch = output_slope(function, network(x).to(network.dtype)).unsqueeze(0), network.count(x)
    total = torch.zeros_like(network.theta())
    for rows in network.footprint.chunks(batch, 1, network.dtype, network.device):
        total = total + network.vjp(network.take(x, rows), seed[:, rows])[0]
    return total


def output_slope(function: Functional, f: Tensor) -> Tensor:
    """∂g/∂f, in the shape of f; refused where g is no finite number, or where f does not decide it."""
    check_finite(f, "outputs of the network")
    with torch.inference_mode(False), torch.enable_grad():
        leaf = f.detach().clone().requires_grad_()
        given = scalar(function(leaf), "outputs")
        slope = torch.autograd.grad(given, leaf, allow_unused=True)[0] if given.requires_grad else None
    if slope is None:
        raise ModelError(
            "the function of the outputs does not depend on them; expected one that can be differentiated in f, "
            "without detach(), item(), argmax() or a comparison."
        )
    refuse_steep(given, slope, "outputs")
    return slope
