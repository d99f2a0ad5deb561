"""The workload of a network: the sizes of its blocks, and the operations of its plain passes, counted on one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lapwing.core.counting import OperationCount
from lapwing.core.inputs import Inputs, tensors_in
from lapwing.methods.protocol import BlockWork, Work, Workload
from lapwing.networks.dense_jacobian import LookupJacobian
from lapwing.networks.forward import has_dropout
from lapwing.networks.jacobians import Block, BlockJacobian
from lapwing.networks.network import Network
from lapwing.networks.plain import plain_passes, trained_names


def workload_of(network: Network, inputs: Inputs, data: int | None = None) -> Workload:
    """Return the sizes of a network, read from one batch, for this many data; as many as in the batch if None.

    Cost: a few forward and backward passes.
    """
    tangent = network.linearise(inputs)
    parts = tangent.jacobians(torch.zeros_like(tangent.f).unsqueeze(0))
    blocks = tuple(_block_work(block, part, network.head) for block, part in parts)
    del tangent, parts
    count, model = network.count(inputs), network.replica
    chosen, trained = network.selection.names, trained_names(network.model)
    with plain_passes(network, inputs, chosen) as plain:
        forward, to_chosen = _counted(plain.forward) / count, _counted(plain.training) / count
    training = to_chosen
    if set(trained) != set(chosen) and trained:
        with plain_passes(network, inputs, trained) as plain:
            training = _counted(plain.training) / count
    products = max(forward.products, sum(block.product for block in blocks))  # fused layers hide their products
    biases = sum(work.ends[1] for work, block in zip(blocks, network.layout, strict=True) if block.bias is not None)
    gradients = sum(block.product for block in blocks) - biases  # of biases without a product
    return Workload(
        blocks,
        weights=network.selection.size,
        parameters=sum(p.numel() for p in model.parameters()),
        output_shape=network.output_shape,
        input_size=sum(t.numel() for t in tensors_in(inputs)) // count,
        data=count if data is None else data,
        forward=Work(products, numbers=forward.numbers),
        backward=Work(
            max(0.0, to_chosen.products - forward.products - gradients),
            numbers=max(0.0, to_chosen.numbers - forward.numbers),
        ),
        training=Work(max(training.products, products), numbers=max(1.0, training.numbers)),
        footprint=network.footprint,
        dtype=network.dtype,
        device=network.device,
        inputs=count,
        single=network.selection.index is not None,
        dropout=any(has_dropout(module) for module in network.model.modules()),
    )


def _block_work(block: Block, jacobian: BlockJacobian, head: str) -> BlockWork:
    """Return the sizes of a block with this Jacobian; ``head`` is the weight of the last layer."""
    if not block.linear:
        return BlockWork(block.size, opaque=not block.has_rule)
    form, lookup = (block.groups, block.d_out, block.d_in), isinstance(jacobian, LookupJacobian)
    return BlockWork(block.size, jacobian.positions, form, block.weight == head, lookup)


def _counted(call: Callable[[], Any]) -> Work:
    """Return the work of a call in the dtype of the network."""
    with OperationCount() as count:
        call()
    return Work(count.products, numbers=count.numbers)
