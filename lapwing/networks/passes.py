"""Derivatives of the outputs along directions in weight space, and slopes of scalar functions.

Derivatives along directions are J v for many v at once. Forward mode pushes all directions through the layers in one
pass, at about two forward passes for each direction. Layer-wise Jacobians take one backward pass for each output,
whatever the number of directions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lapwing.data.inputs import Inputs, check_finite, wants_slopes
from lapwing.errors import ModelError
from lapwing.networks.forward import CALL_ERRORS, raw_output, recording, select_kernels, with_output_dim
from lapwing.networks.pull import by_autograd, or_zero
from lapwing.runtime.memory import chunks, concat_chunks
from lapwing.runtime.settings import describe
from lapwing.runtime.threads import FORWARD_MODE, math_attention, quiet
from lapwing.values.gaussian import ChosenOutputs

if TYPE_CHECKING:
    from lapwing.networks.network import Network
    from lapwing.networks.tangent import Tangent


def tangents_of(network: Network, v: Tensor) -> dict[str, Tensor]:
    """Return v (K, P) by parameter, (K, *shape), in the dtype of the parameter.

    Each is in memory of its own: forward mode would fill and copy a view of v at every pass.
    """
    tensors = network.parameters
    with torch.inference_mode(False), torch.no_grad():
        return {
            name: torch.empty(part.shape, dtype=tensors[name].dtype, device=part.device).copy_(part)
            for name, part in network.selection.split(v).items()
        }


def push_forward(network: Network, inputs: Inputs, tangents: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return f (B, [T,] C) and J v for all tangents v, (K, B, [T,] C), by one pass of vectorised forward mode.

    By two backward passes where an operation lacks it.
    """
    if network.forward_mode:
        try:
            return _forward_mode(network, inputs, tangents)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError):  # an operation without a forward rule, such as attention kernels
            pass
    return _double_backward(network, inputs, tangents)


def vjp(network: Network, raw: Tensor, u: Tensor, looped: bool) -> Tensor:
    """Return Jᵀ u (K, P) for the graph of ``raw``, by one batched backward pass, or one for each u if ``looped``."""
    chosen = [network.parameters[name] for name in network.selection.names]
    with select_kernels(network.plain_kernels):
        back = by_autograd(raw, chosen, u.to(raw.dtype).reshape(len(u), *raw.shape), looped)
    grads = [or_zero(grad, p, (len(u), *p.shape)) for grad, p in zip(back, chosen, strict=True)]
    dtype = reduce(torch.promote_types, [grad.dtype for grad in grads])
    return network.selection.pick(torch.cat([grad.reshape(len(u), -1).to(dtype) for grad in grads], 1))


def _forward_mode(network: Network, inputs: Inputs, tangents: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    tensors = {name: network.parameters[name].detach() for name in tangents}

    def f(values: dict[str, Tensor]) -> Tensor:
        return with_output_dim(raw_output(network.replica, inputs, values))

    with FORWARD_MODE, torch.inference_mode(False), torch.no_grad(), quiet, math_attention:
        push_forward = torch.func.vmap(lambda t: torch.func.jvp(f, (tensors,), (t,)))(tangents)
    return push_forward[0][0], push_forward[1]


def _double_backward(network: Network, inputs: Inputs, tangents: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return f and J v: Jᵀ u is linear in u, so its derivative in u along v is J v.

    Raises:
        NotImplementedError: If an operation has no second derivative, or may have a wrong one.
    """
    tensors = network.parameters
    chosen, count = [tensors[name] for name in tangents], len(next(iter(tangents.values())))
    with math_attention, recording(tensors, tangents, network.plain_kernels):
        raw = raw_output(network.replica, inputs)
        if _has_custom_function(raw):  # its gradient may be a constant to autograd, which says nothing of it
            raise NotImplementedError("a custom autograd.Function without a forward rule")
        u = torch.zeros_like(raw, requires_grad=True)
        back = torch.autograd.grad(raw, chosen, u, create_graph=True, allow_unused=True, materialize_grads=True)
        live = [(g, name) for g, name in zip(back, tangents, strict=True) if g.requires_grad]
        each = [
            torch.autograd.grad([g for g, _ in live], u, [tangents[name][k] for _, name in live], retain_graph=True)[0]
            for k in range(count)
        ]
    return with_output_dim(raw.detach()), torch.stack([with_output_dim(row.detach()) for row in each])


def _has_custom_function(raw: Tensor) -> bool:
    """Return whether a ``torch.autograd.Function`` of Python is in the graph, such as reentrant checkpointing."""
    seen, waiting = set(), [raw.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return True
        seen.add(node)
        waiting += [child for child, _ in node.next_functions]
    return False


# Directions for each output of a sample, up to which forward mode is taken. By ``python -m benchmarks.scale_outputs``
# both ways cost the same at 0.2 (an MLP, whose weights are read for every direction) to 2 (a transformer).
FORWARD_SHARE = 0.5
DIRECTIONS_AT_ONCE = {"cpu": 16, "cuda": 64}  # directions of one pass; more leave a CPU's caches and gain nothing


def outputs_along(
    network: Network, inputs: Inputs, v: Tensor, chosen: ChosenOutputs | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs f (B, [T,] C) of the tangent model, and J v for every row of v (K, P): (K, B, [T,] C).

    Of all outputs, or of the chosen ones. By the cheaper way. Cost: 1 + 2 K forward passes, or one forward pass and a
    backward pass for each output; in chunks that fit the byte budget.
    """
    network, wanted = network.for_inputs(inputs), chosen.of if chosen is not None else lambda values: values
    if not len(v):
        f = wanted(network(inputs).to(network.dtype))
        return f, f.new_zeros(0, *f.shape)
    n_outputs = torch.Size(network.output_shape if chosen is None else chosen.shape(network.output_shape)).numel()
    if len(v) > FORWARD_SHARE * n_outputs or wants_slopes(inputs):
        return _by_jacobians(network, inputs, v, chosen)
    shift = network.shift
    f, products = forward_products(network, inputs, v if shift is None else torch.cat([shift[None].to(v), v]))
    f, products = wanted(f), wanted(products)
    return (f, products) if shift is None else (f + products[0], products[1:])


def forward_products(network: Network, inputs: Inputs, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return f (B, [T,] C) of the network at w̃, and J v for every row of v (K, P), by forward mode.

    By two backward passes for each direction where an operation has no forward rule, and by layer-wise Jacobians where
    it has no second derivative either.
    """
    f: list[Tensor] = []
    network, count = network.for_inputs(inputs), network.count(inputs)

    def products(numbers: slice) -> Iterator[Tensor]:
        tangents = tangents_of(network, v[numbers])
        for part in _sample_chunks(network, inputs, numbers.stop - numbers.start):
            out, product = _push_chunk(network, part, tangents, v[numbers])
            if numbers.start == 0:
                f.append(out.to(network.dtype))
            yield product.to(network.dtype)

    columns = concat_chunks(
        (concat_chunks(products(numbers), count, 1) for numbers in _direction_chunks(network, len(v))), len(v)
    )
    return concat_chunks(f, count), columns


def _push_chunk(network: Network, inputs: Inputs, tangents: dict[str, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    if not wants_slopes(inputs):
        # Not where an operation has neither a forward rule nor a second derivative.
        with contextlib.suppress(NotImplementedError):
            return push_forward(network, inputs, tangents)
    tangent = network.linearise(inputs)
    return tangent.network_output, _jvp(tangent, v)


def _by_jacobians(network: Network, inputs: Inputs, v: Tensor, chosen: ChosenOutputs | None) -> tuple[Tensor, Tensor]:
    outputs: list[Tensor] = []

    def products() -> Iterator[Tensor]:
        for _, tangent in network.tangents(inputs, chosen=chosen):
            outputs.append(tangent.f.to(network.dtype))
            yield _jvp(tangent, v)

    columns = concat_chunks(products(), network.count(inputs), 1)
    return concat_chunks(outputs, columns.shape[1]), columns


def _jvp(tangent: Tangent, v: Tensor) -> Tensor:
    """Return J v of the wanted outputs, (K, B, [T,] C), in runs of outputs that fit the byte budget."""
    parts = (jacobian.jvp(v) for jacobian in tangent.output_runs())
    return concat_chunks(parts, torch.Size(tangent.shape).numel(), 2).unflatten(2, tangent.shape)


def _direction_chunks(network: Network, count: int) -> Iterator[slice]:
    """Yield runs of directions that are pushed together: as weights and at one sample they should fit the budget."""
    device, bits = network.device, torch.finfo(network.dtype).bits
    size = max(network.selection.total, network.footprint.width) * bits // 8
    return chunks(count, size, device, most=DIRECTIONS_AT_ONCE.get(device.type, DIRECTIONS_AT_ONCE["cuda"]))


def _sample_chunks(network: Network, inputs: Inputs, directions: int) -> Iterator[Inputs]:
    """Yield the samples in chunks for which so many directions fit the byte budget.

    A direction takes no more memory than a seed of a backward pass: it leaves nothing behind at the layers.
    """
    batch = network.count(inputs)
    footprint = replace(network.footprint, whole=0)  # no Jacobian is formed
    for part in footprint.chunks(batch, directions, network.dtype, network.device):
        yield inputs if part == slice(0, batch) else network.take(inputs, part)


# Scalar functions of the weights or of the outputs, and their gradients.


def is_single_map(network: Network) -> bool:
    """Return whether the selected weights are those of one linear map."""
    layout = network.layout
    return len(layout) == 1 and layout[0].linear and layout[0].groups == 1


def last_features(network: Network, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """Return the input (B, D) of the selected linear map, with a column of ones for a bias, and the outputs f (B, C).

    None if the map is used several times for one input, as for every token of a text.
    """
    tangent = network.linearise(inputs)
    ((_, part),) = tangent.jacobians(torch.zeros_like(tangent.network_output)[None])
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
        value = scalar(_call(function, tensors, "weights by name"))
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
        value = scalar(_call(function, leaf, "outputs"), "outputs")
        slope = torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None
    if slope is None:
        raise ModelError(
            "the function of the outputs does not depend on them; expected one that can be differentiated in f, "
            "without detach(), item(), argmax() or a comparison."
        )
    _refuse_infinite(value, slope, "outputs")
    return slope


def _call(function: Functional, given: object, what: str) -> object:
    """Return the value of a function that a user gave; raise with what it got if it does not take that."""
    try:
        return function(given)
    except CALL_ERRORS as error:
        raise ModelError(
            f"the function raises {type(error).__name__}: {error}. It got the {what}; expected a function of these. "
            "Give x= for a function of the outputs, and none for one of the weights."
        ) from error


def scalar(value: object, argument: str = "weights") -> Tensor:
    """Return the value of a function as a single number, (); raise if it is more than one."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ModelError(
            f"the function of the {argument} gives {describe(value)}; expected a tensor of one number. Take one "
            "entry, a sum or a mean."
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
