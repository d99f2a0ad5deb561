"""Derivatives of the outputs along directions in weight space: J v for many v at once, and the outputs themselves.

There are two ways. Forward mode pushes all directions through the layers in one pass, at about two forward passes
for each direction. Layer-wise Jacobians take one backward pass for each output, whatever the number of directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.core.chosen import ChosenOutputs
from lapwing.core.inputs import Inputs
from lapwing.networks import passes
from lapwing.networks.budget import temporary

if TYPE_CHECKING:
    from lapwing.networks.network import Network

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
    wanted = chosen.of if chosen is not None else lambda values: values
    if not len(v):
        f = wanted(network(inputs).to(network.dtype))
        return f, f.new_zeros(0, *f.shape)
    n_outputs = torch.Size(network.output_shape if chosen is None else chosen.shape(network.output_shape)).numel()
    if len(v) > CHEAPER * n_outputs:
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
    columns: list[Tensor] = []
    for numbers in _runs(network, len(v)):
        tangents = passes.tangents_of(network.replica, network.selection, v[numbers])
        outputs, products = [], []
        for part in _chunks(network, inputs, numbers.stop - numbers.start):
            out, product = _pushed(network, part, tangents, v[numbers])
            outputs.append(out.to(network.dtype))
            products.append(product.to(network.dtype))
        f = f or outputs
        columns.append(_joined(products, 1))
    return _joined(f, 0), _joined(columns, 0)


def _pushed(network: Network, inputs: Inputs, tangents: dict[str, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    try:
        return passes.pushed(network.replica, inputs, tangents, network.forward_mode, network.plain)
    except NotImplementedError:  # an operation with neither a forward rule nor a second derivative
        tangent = network.linearise(inputs)
        f = tangent.network_output
        return f, tangent.jacobians().jvp(v).reshape(len(v), *f.shape)


def _by_jacobians(network: Network, inputs: Inputs, v: Tensor, chosen: ChosenOutputs | None) -> tuple[Tensor, Tensor]:
    outputs, products = [], []
    for _, tangent in network.tangents(inputs, chosen=chosen):
        f = tangent.f.to(network.dtype)
        outputs.append(f)
        products.append(tangent.jacobians().jvp(v).reshape(len(v), *f.shape))
    return _joined(outputs, 0), _joined(products, 1)


def _runs(network: Network, count: int) -> Iterator[slice]:
    """Yield runs of directions that are pushed together: as weights and at one sample they should fit the budget."""
    device, bits = network.device, torch.finfo(network.dtype).bits
    size = max(network.selection.total, network.footprint.width) * bits // 8
    together = TOGETHER.get(device.type, TOGETHER["cuda"])
    step = max(1, min(together, temporary(device) // max(1, size)))
    step = -(-count // -(-count // step))  # as many runs, but of even size
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def _chunks(network: Network, inputs: Inputs, directions: int) -> Iterator[Inputs]:
    """Yield the samples in chunks for which so many directions fit the byte budget.

    A direction takes no more memory than a seed of a backward pass: it leaves nothing behind at the layers.
    """
    batch = network.count(inputs)
    footprint = replace(network.footprint, whole=0)  # no Jacobian is formed
    for part in footprint.chunks(batch, directions, network.dtype, network.device):
        yield inputs if part == slice(0, batch) else network.take(inputs, part)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)  # without a copy of a single part
