"""A network and its data in numbers, from which methods compute their cost."""

from __future__ import annotations

import torch

from lapwing.core.inputs import Inputs, tensors_in
from lapwing.methods.protocol import BlockWork, Workload
from lapwing.networks.forward import has_dropout
from lapwing.networks.network import Network


def workload_of(network: Network, inputs: Inputs, data: int | None = None) -> Workload:
    """Return the sizes of a network, read from one batch, for this many data; as many as in the batch if None.

    Cost: a forward pass, and a backward pass for one output.
    """
    tangent = network.linearise(inputs)
    blocks = [
        BlockWork(
            block.size,
            part.positions,
            (block.groups, block.d_out, block.d_in),
            lookup=bool(block.why),
            closed=block.weight == network.head,
        )
        if block.linear
        else BlockWork(block.size)
        for block, part in tangent.jacobians(torch.zeros_like(tangent.f).unsqueeze(0))
    ]
    count = network.count(inputs)
    return Workload(
        tuple(blocks),
        weights=network.selection.size,
        parameters=sum(p.numel() for p in network.model.parameters()),
        output_shape=network.output_shape,
        input_size=sum(t.numel() for t in tensors_in(inputs)) // count,
        data=count if data is None else data,
        itemsize=8 if network.dtype == torch.float64 else 4,
        width=network.footprint.width,
        single=network.selection.index is not None,
        dropout=any(has_dropout(module) for module in network.model.modules()),
    )
