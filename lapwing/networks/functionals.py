"""Scalar functions of the weights or of the outputs, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, zeros_like

from lapwing.data.inputs import Inputs, check_finite
from lapwing.errors import ModelError
from lapwing.networks.forward import REFUSED
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


Functional = Callable[[Any], Tensor]  # of the weights by name, or of the outputs f (B, [T,] C)


def weight_slope(network: Network, function: Functional, x: Inputs | None = None) -> Tensor:
    """Return the gradient ∇g in the weights, (P,): of a function of them, or of one of the outputs at x, Jᵀ ∂g/∂f."""
    if x is None:
        return _slope_in_weights(network, function)
    seed, batch = output_slope(function, network(x).to(network.dtype)).unsqueeze(0), network.count(x)
    total = torch.zeros_like(network.theta())
    for rows in network.for_inputs(x).footprint.chunks(batch, 1, network.dtype, network.device):
        total = total + network.vjp(network.take(x, rows), seed[:, rows])[0]
    return total


def _slope_in_weights(network: Network, function: Functional) -> Tensor:
    """Return the gradient in the selected parameters, (P,), of a scalar function of all parameters by name."""
    with torch.inference_mode(False), torch.enable_grad():
        tensors = {name: tensor.detach().to(network.dtype) for name, tensor in network.parameters.items()}
        leaves = {name: tensors[name].requires_grad_() for name in network.selection.names}
        value = scalar(_called(function, tensors, "weights by name"))
        if not value.requires_grad:
            raise ModelError(
                "the function of the weights does not depend on them; expected one of the selected weights, "
                f"{', '.join(network.selection.names):.200}, without detach() or item()."
            )
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    slope = network.selection.pick(torch.cat([grad.reshape(-1) for grad in grads]))
    _refuse_infinite(value, slope)
    return slope


def output_slope(function: Functional, f: Tensor) -> Tensor:
    """Return ∂g/∂f, in the shape of f; raise if g is not finite or does not depend on f."""
    check_finite(f, "outputs of the network")
    with torch.inference_mode(False), torch.enable_grad():
        leaf = f.detach().clone().requires_grad_()
        value = scalar(_called(function, leaf, "outputs"), "outputs")
        slope = torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None
    if slope is None:
        raise ModelError(
            "the function of the outputs does not depend on them; expected one that can be differentiated in f, "
            "without detach(), item(), argmax() or a comparison."
        )
    _refuse_infinite(value, slope, "outputs")
    return slope


def _called(function: Functional, given: Any, what: str) -> Any:
    """Return the value of a function that a user gave; raise with what it got if it does not take that."""
    try:
        return function(given)
    except REFUSED as error:
        raise ModelError(
            f"the function raises {type(error).__name__}: {error}. It got the {what}; expected a function of these. "
            "Give x= for a function of the outputs, and none for one of the weights."
        ) from error


def scalar(value: Any, argument: str = "weights") -> Tensor:
    """Return the value of a function as a single number, (); raise if it is more than one."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
        raise ModelError(
            f"the function of the {argument} gives {shape}; expected a tensor of one number. Take one entry, a "
            "sum or a mean."
        )
    return value.sum()


def _refuse_infinite(value: Tensor, slope: Tensor, argument: str = "weights") -> None:
    """Raise if the value or the slope of a function is not finite: then it has no variance."""
    steepest = float(slope.abs().max())
    if not math.isfinite(float(value.detach())) or not math.isfinite(steepest):
        raise ModelError(
            f"the function of the {argument} gives {float(value.detach()):.3g} with slopes up to {steepest:.3g}; "
            "expected finite numbers. Give one that is smooth here: log_softmax for the log of a softmax, no square "
            "root of zero."
        )
