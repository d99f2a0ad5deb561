"""Derivatives of the outputs along directions in weight space: J v for many v at once, and the outputs themselves.

There are two ways. Forward mode pushes all directions through the layers in one pass, at about two forward passes
for each direction. Layer-wise Jacobians take one backward pass for each output, whatever the number of directions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.core.chosen import ChosenOutputs
from lapwing.core.inputs import Inputs, wants_slopes
from lapwing.core.memory import gathered, runs
from lapwing.networks import passes

if TYPE_CHECKING:
    from lapwing.networks.network import Network
    from lapwing.networks.tangent import Tangent

# Directions for each output of a sample, up to which forward mode is taken. By ``python -m benchmarks.scale_outputs``
# both ways cost the same at 0.2 (an MLP, whose weights are read for every direction) to 2 (a transformer).
CHEAPER = 0.5
TOGETHER = {"cpu": 16, "cuda": 64}  # directions of one pass; more leave a CPU's caches and gain nothing


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
    if len(v) > CHEAPER * n_outputs or wants_slopes(inputs):
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
        tangents = passes.tangents_of(network.replica, network.selection, v[numbers])
        for part in _chunks(network, inputs, numbers.stop - numbers.start):
            out, product = _pushed(network, part, tangents, v[numbers])
            if numbers.start == 0:
                f.append(out.to(network.dtype))
            yield product.to(network.dtype)

    columns = gathered((gathered(products(numbers), count, 1) for numbers in _runs(network, len(v))), len(v))
    return gathered(f, count), columns


def _pushed(network: Network, inputs: Inputs, tangents: dict[str, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    if not wants_slopes(inputs):
        with contextlib.suppress(
            NotImplementedError
        ):  # an operation with neither a forward rule nor a second derivative
            return passes.pushed(network.replica, inputs, tangents, network.forward_mode, network.plain)
    tangent = network.linearise(inputs)
    return tangent.network_output, _along(tangent, v)


def _by_jacobians(network: Network, inputs: Inputs, v: Tensor, chosen: ChosenOutputs | None) -> tuple[Tensor, Tensor]:
    outputs: list[Tensor] = []

    def products() -> Iterator[Tensor]:
        for _, tangent in network.tangents(inputs, chosen=chosen):
            outputs.append(tangent.f.to(network.dtype))
            yield _along(tangent, v)

    columns = gathered(products(), network.count(inputs), 1)
    return gathered(outputs, columns.shape[1]), columns


def _along(tangent: Tangent, v: Tensor) -> Tensor:
    """Return J v of the wanted outputs, (K, B, [T,] C), in runs of outputs that fit the byte budget."""
    parts = (jacobian.jvp(v) for jacobian in tangent.runs())
    return gathered(parts, torch.Size(tangent.shape).numel(), 2).unflatten(2, tangent.shape)


def _runs(network: Network, count: int) -> Iterator[slice]:
    """Yield runs of directions that are pushed together: as weights and at one sample they should fit the budget."""
    device, bits = network.device, torch.finfo(network.dtype).bits
    size = max(network.selection.total, network.footprint.width) * bits // 8
    return runs(count, size, device, most=TOGETHER.get(device.type, TOGETHER["cuda"]))


def _chunks(network: Network, inputs: Inputs, directions: int) -> Iterator[Inputs]:
    """Yield the samples in chunks for which so many directions fit the byte budget.

    A direction takes no more memory than a seed of a backward pass: it leaves nothing behind at the layers.
    """
    batch = network.count(inputs)
    footprint = replace(network.footprint, whole=0)  # no Jacobian is formed
    for part in footprint.chunks(batch, directions, network.dtype, network.device):
        yield inputs if part == slice(0, batch) else network.take(inputs, part)
