"""Scalar functions of the weights or of the outputs: their gradient in the weights, and what is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Inputs, check_finite, take
from lapwing.core.errors import ModelError
from lapwing.networks.forward import batch_size
from lapwing.networks.network import Network

Functional = Callable[[Any], Tensor]  # of the weights by name, or of the outputs f (B, [T,] C)


def weight_slope(network: Network, function: Functional, x: Inputs | None = None) -> Tensor:
    """∇g in the weights, (P,): of a function of them, or of one of the outputs at x, Jᵀ ∂g/∂f."""
    if x is None:
        return network.slope(function)
    seed, batch = output_slope(function, network(x).to(network.dtype)).unsqueeze(0), batch_size(x)
    total = torch.zeros_like(network.theta())
    for rows in network.footprint.chunks(batch, 1, network.dtype, network.device):
        total = total + network.vjp(take(x, batch, rows), seed[:, rows])[0]
    return total


def output_slope(function: Functional, f: Tensor) -> Tensor:
    """∂g/∂f, in the shape of f; refused where g is no finite number, or where f does not decide it."""
    check_finite(f, "outputs of the network")
    with torch.inference_mode(False), torch.enable_grad():
        leaf = f.detach().clone().requires_grad_()
        given = single(function(leaf))
        slope = torch.autograd.grad(given, leaf, allow_unused=True)[0] if given.requires_grad else None
    if slope is None:
        raise ModelError(
            "the function of the outputs does not depend on them; expected one that can be differentiated in f, "
            "without detach(), item(), argmax() or a comparison."
        )
    value, steepest = float(given.detach()), float(slope.abs().max())
    if not math.isfinite(value) or not math.isfinite(steepest):
        raise ModelError(
            f"the function of the outputs gives {value:.3g} with slopes up to {steepest:.3g}; expected finite numbers. "
            "Give one that is smooth at these outputs: log_softmax for the log of a softmax."
        )
    return slope


def single(value: Any) -> Tensor:
    """What a function of the outputs gave, (); refused where it is more than a number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
        raise ModelError(
            f"the function of the outputs gives {shape}; expected a tensor of one number. Take one entry, a sum or a "
            "mean."
        )
    return value.sum()
