"""What one batch shows about a model: the weights that are selected, the blocks they form, and what a sample takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.counting import LargestResult
from lapwing.core.inputs import Inputs, SampleRows, check_finite, placed, take
from lapwing.errors import ModelError
from lapwing.networks.budget import Footprint
from lapwing.networks.checks import examined, first_run, learn, refuse_random, refusing_changes
from lapwing.networks.forward import (
    is_recurrent,
    needs_plain_kernels,
    output_alone,
    plain_kernels,
    raw_output,
    recording,
    shaped,
)
from lapwing.networks.graph import Graph, forward_differs, read, refuse_wrong_gradients
from lapwing.networks.head import find_head
from lapwing.networks.images import shapes_of_sample
from lapwing.networks.layout import Layout, arranged, footprint, widest_result
from lapwing.networks.ops import operation
from lapwing.networks.patterns import find_patterns
from lapwing.networks.replica import Replica, can_be_copied
from lapwing.networks.selection import Selection, Weights
from lapwing.networks.several_outputs import Path, reached


@dataclass(frozen=True, eq=False)
class Examined:
    """Facts about a model, as ``Network`` has them, and what the batch showed on the way."""

    selection: Selection
    layout: Layout
    output_shape: tuple[int, ...]
    footprint: Footprint
    forward_mode: bool
    recurrent: bool
    normalised: bool
    last_operation: str
    head: str
    image: tuple[int, ...]
    rows: SampleRows
    replica: Replica
    sizes: dict[Any, tuple[int, ...]]  # of the outputs, by the shapes of the inputs


def examine(model: nn.Module, inputs: Inputs, weights: Weights, output: Path) -> Examined:
    """Run the model with one batch, read the graph of its output, and return what they show; see ``Network.build``."""
    recurrent, needed = is_recurrent(model), weights.needs(model)
    plain = needs_plain_kernels(model, recurrent)
    replica = Replica(model, needed, can_be_copied(model), output)
    inputs, rows, single = _several(examined(inputs), replica, plain)
    replica, raw, image = first_run(replica, inputs, plain)
    tensors = dict(replica.model.named_parameters())
    f = shaped(raw.detach())
    check_finite(f, "outputs of the network")
    refuse_random(replica.trial(), inputs, plain)  # first: random outputs look like mixed samples
    rows = learn(replica.model, inputs, raw.detach(), rows, plain, copied=single)
    if raw.grad_fn is None:
        raise ModelError("the output does not depend on any selected parameter; choose other weights.")
    graph = read(raw, tensors, needed)
    refuse_wrong_gradients(graph)
    selection = weights.choose(model, graph)
    if output and selection.index is None:
        with plain_kernels(plain):
            selection = reached(selection, raw, tensors)
    per_sample = rows.per_sample(inputs, len(raw))
    widest = widest_result(graph, len(raw))
    if len(needed) < len(tensors):  # layers before them are not in the graph
        widest = max(widest, _widest_of_all(replica, take(inputs, per_sample, slice(0, 2)), plain))
    if selection.names != needed:
        replica, raw, graph = _again(replica, selection, inputs, plain)
    with plain_kernels(plain):
        patterns, _ = find_patterns(raw, graph, recurrent)
    layout = arranged(graph, patterns, dict(zip(selection.names, selection.shapes, strict=True)))
    sizes = replace(footprint(layout, graph, raw, f[0].numel(), recurrent, selection.counts), widest=widest)
    head = find_head(graph, layout)
    return Examined(
        selection, layout, tuple(f.shape[1:]), sizes, not recurrent and not forward_differs(graph), recurrent,
        _is_normalised(model, graph), graph.last, "" if head is None else head.use.name, image, rows, replica,
        {shapes_of_sample(inputs, per_sample): image or (f.shape[1],)} if f.ndim == 3 else {},
    )  # fmt: skip


def _several(inputs: Inputs, replica: Replica, plain: bool) -> tuple[Inputs, SampleRows, bool]:
    """Return inputs of several samples, what is known about their rows, and whether there was a single sample.

    A single sample does not show which rows all samples share: it is taken twice.
    """
    rows = SampleRows()
    count = rows.count(inputs)
    if count is None:  # only the outputs tell how many samples there are
        one = replica.trial()
        # With gradients: a value that the model keeps from its first run must lead back to the parameters.
        with refusing_changes(one), recording(dict(one.named_parameters()), replica.names, plain):
            count = len(raw_output(one, inputs))
    if count != 1:
        return inputs, rows, False
    rows = rows.learned(inputs, 1)
    if all(isinstance(leaf, Tensor) for _, leaf in placed(inputs)):  # a set says itself whose rows are whose
        inputs = take(inputs, rows.per_sample(inputs, 1), torch.zeros(2, dtype=torch.long))
    return inputs, rows, True


def _widest_of_all(replica: Replica, two: Inputs, plain: bool) -> int:
    """Return how many numbers the largest result of an operation has for each of two samples, in the graph or not."""
    with LargestResult() as largest:
        output_alone(replica.model, two, plain)
    return largest.numbers // 2


def _again(replica: Replica, selection: Selection, inputs: Inputs, plain: bool) -> tuple[Replica, Tensor, Graph]:
    """Run the model again with the selected weights alone in the graph."""
    replica = replace(replica, names=selection.names)
    tensors: Mapping[str, Tensor] = dict(replica.model.named_parameters())
    with recording(tensors, selection.names, plain):
        raw = raw_output(replica.model, inputs)
    return replica, raw, read(raw, tensors, selection.names)


def _is_normalised(model: nn.Module, graph: Graph) -> bool:
    """Return whether a norm follows some of the weights."""
    follows = (operation(node).norm(node) and node.next_functions[0][0] for node in graph.nodes)
    return any(follows) or any(isinstance(module, nn.RMSNorm) for module in model.modules())
