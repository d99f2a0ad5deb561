"""Passes through a network for many vectors at once, the rows of each sample, and derivatives along directions.

Passes. Autograd takes one gradient at a time; ``vmap`` over it loops inside convolutions and norms. Here the seeds are
folded into the batch, so that K seeds cost one large operation for each node. A graph with an operation whose entry in
the table has no gradient is left to autograd.

Rows. For each node of a graph: which rows belong to which sample? In most networks the walk over the graph already
knows: rows are batch-major. Attention works time-major inside, and recurrent networks stack time steps; there a probe
decides. The seeds of the samples whose number has bit j set are doubled, for each bit: the gradient of a row doubles if
its sample has that bit, in every dtype. A row whose gradient neither doubles nor stays belongs to several samples (it
lies before a broadcast over the batch).

Directions. Derivatives of the outputs along directions in weight space are J v for many v at once. Forward mode pushes
all directions through the layers in one pass, at about two forward passes for each direction. Layer-wise Jacobians take
one backward pass for each output, whatever the number of directions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from lapwing.data.inputs import Inputs, wants_slopes
from lapwing.networks.forward import raw_output, recording, with_output_dim
from lapwing.networks.graph import Graph
from lapwing.networks.ops import Operation
from lapwing.networks.pull import NoRuleError
from lapwing.networks.rules import Node, Pattern, Ragged, Regular, Shape, output_numbers, output_shape
from lapwing.networks.selection import Selection
from lapwing.runtime.memory import chunks, concat_chunks
from lapwing.runtime.threads import FORWARD_MODE, math_attention, quiet
from lapwing.values.outputs import ChosenOutputs

if TYPE_CHECKING:
    from lapwing.networks.network import Network
    from lapwing.networks.tangent import Tangent


def gradients(
    raw: Tensor, graph: Graph, nodes: list[Node], seeds: Tensor, recurrent: bool, differentiable: bool = False
) -> Iterator[tuple[Node, Tensor]]:
    """Yield the nodes, as the pass reaches them, with the gradient (K, ...) of seeds · raw at their outputs.

    It is zero where there is no path. Whoever drops each before the next needs the memory of a few layers, not of all;
    only a pass by autograd has all at once. ``differentiable`` gradients are part of a graph that leads back to the
    inputs, by autograd and seed by seed.
    """
    leading = None if recurrent or differentiable else _leading_to(graph, nodes, seeds.dtype)
    remaining = dict.fromkeys(nodes)
    if leading is not None:
        walk = _pull_back(graph, frozenset(nodes), leading, seeds)
        try:
            while True:
                with torch.no_grad():  # not while the caller works
                    node, grad = next(walk)
                del remaining[node]
                yield node, grad
                del grad
        except StopIteration:
            for node in remaining:
                yield node, seeds.new_zeros(len(seeds), *output_shape(node))
            return
        except NoRuleError:  # the rest by autograd
            del walk
    looped = differentiable or seed_by_seed(graph, seeds, recurrent)
    rest = list(remaining)
    grads = by_autograd(raw, [GradientEdge(node, 0) for node in rest], seeds, looped, differentiable)
    for node in rest:
        yield node, _or_zero(grads.pop(0), seeds, (len(seeds), *output_shape(node)))


def _or_zero(grad: Tensor | None, like: Tensor, shape: Shape) -> Tensor:
    return like.new_zeros(shape) if grad is None else grad


def seed_by_seed(graph: Graph, seeds: Tensor, recurrent: bool) -> bool:
    """Return whether autograd must take one seed at a time.

    It cannot batch recurrent, attention or sparse kernels, and batches convolutions on a CPU only slowly.
    """
    return recurrent or any(facts.seed_by_seed(node, seeds.is_cpu) for node, facts in graph.operations.items())


def by_autograd(
    raw: Tensor,
    targets: Sequence[GradientEdge] | Sequence[Tensor],
    seeds: Tensor,
    looped: bool,
    differentiable: bool = False,
) -> list[Tensor | None]:
    """Return the gradients (K, ...) of seeds · raw at the targets; None where there is no path."""
    options = {"retain_graph": True, "allow_unused": True, "create_graph": differentiable}
    if not looped and len(seeds) > 1:
        with quiet:
            return list(torch.autograd.grad(raw, targets, seeds, is_grads_batched=True, **options))
    each = zip(*(torch.autograd.grad(raw, targets, seed, **options) for seed in seeds), strict=True)
    return [
        None if grads[0] is None else torch.stack([g.to_dense() if g.is_sparse else g for g in grads]) for grads in each
    ]


def _pull_back(
    graph: Graph, targets: Collection[Node], leading: set[Node], seeds: Tensor
) -> Iterator[tuple[Node, Tensor]]:
    """Yield the targets that a path leads to, with the gradients (K, *output) for seeds (K, *output of the root).

    ``leading`` are the nodes that lead to the targets.
    """
    held = _Held(graph.nodes[0], seeds)
    left = len(targets)
    for node in graph.nodes:
        if node not in held:
            continue
        grads, owned = held.pop(node)
        if node in targets:
            if grads[0] is None or (len(grads) > 1 and any(grad is not None for grad in grads[1:])):
                raise NoRuleError(node.name())
            yield node, grads[0]
            left, owned = left - 1, False
        if not left:
            return
        operands = [i for i, (child, _) in enumerate(node.next_functions) if child is not None and child in leading]
        for operand, (part, new) in zip(operands, _pull_operands(graph.operations[node], node, grads, operands, owned)):
            held.add(node.next_functions[operand], part, new)
            del part
        del grads


class _Held:
    """The gradients of a pass that are in memory: those that were reached and not yet pulled further."""

    def __init__(self, root: Node, seeds: Tensor) -> None:
        self._grads: dict[Node, list[Tensor | None]] = {root: [seeds]}
        self._owned: set[Node] = set()  # nobody else holds their gradient, so that it may be changed in place

    def __contains__(self, node: Node) -> bool:
        return node in self._grads

    def pop(self, node: Node) -> tuple[list[Tensor | None], bool]:
        """Return the gradients of all outputs of a node, and whether nobody else holds them; forget them."""
        owned = node in self._owned
        self._owned.discard(node)
        return self._grads.pop(node), owned

    def add(self, edge: tuple[Node, int], part: Tensor, new: bool) -> None:
        """Add a part of the gradient of one output of a node."""
        node, number = edge
        if part.shape[1:] != output_shape(node, number):
            raise NoRuleError(node.name())
        outputs = len(node._input_metadata)
        grads = self._grads.setdefault(node, [None] * outputs)
        before = grads[number]
        grads[number] = part if before is None else before + part
        if outputs == 1 and (new or before is not None):  # a sum is new
            self._owned.add(node)


def _pull_operands(
    facts: Operation, node: Node, grads: list[Tensor | None], operands: list[int], owned: bool
) -> Iterator[tuple[Tensor, bool]]:
    """Yield the gradients of the operands, and whether nobody else holds them."""
    if not operands:
        return
    if facts.joint_gradient is not None:
        yield from ((part, True) for part in facts.joint_gradient(node, grads, operands))
        return
    if facts.gradient is None or len(grads) != 1 or grads[0] is None:
        raise NoRuleError(node.name())
    for operand in operands:
        yield facts.gradient.pull(node, grads[0], operand, owned)


def _leading_to(graph: Graph, targets: Collection[Node], dtype: torch.dtype) -> set[Node] | None:
    """Return the targets and every node from which one of them is reached.

    None if one on the way has no rule or another dtype; casts are left to autograd.
    """
    leading = set(targets)
    for node in reversed(graph.nodes):  # producers before consumers
        if any(child in leading for child, _ in node.next_functions):
            if not graph.operations[node].has_gradient or node._input_metadata[0].dtype != dtype:
                return None
            leading.add(node)
    return leading


def numbers_at_once(graph: Graph, targets: Collection[Node], dtype: torch.dtype) -> int | None:
    """Return how many numbers the gradients of a pass to the targets have that are in memory at once, for each seed.

    None if the pass is left to autograd, which holds those of all targets.
    """
    leading = _leading_to(graph, targets, dtype)
    if leading is None:
        return None
    held, most = {graph.nodes[0]: output_numbers(graph.nodes[0])}, 0
    for node in graph.nodes:
        if node not in held:
            continue
        own = held.pop(node)
        edges = {edge for edge in node.next_functions if edge[0] is not None and edge[0] in leading}
        new = sum(output_numbers(*edge) for edge in edges if edge[0] not in held)
        in_place = graph.operations[node].carries_parameter  # a view of the gradient of its output
        most = max(most, sum(held.values()) + max(own, new) + (0 if in_place else min(own, new)))
        for child, number in edges:
            held[child] = held.get(child, 0) + (0 if child in held else output_numbers(child, number))
    return most


def tangents_of(model: nn.Module, selection: Selection, v: Tensor) -> dict[str, Tensor]:
    """Return v (K, P) by parameter, (K, *shape), in the dtype of the parameter.

    Each is in memory of its own: forward mode would fill and copy a view of v at every pass.
    """
    tensors = dict(model.named_parameters())
    with torch.inference_mode(False), torch.no_grad():
        return {
            name: torch.empty(part.shape, dtype=tensors[name].dtype, device=part.device).copy_(part)
            for name, part in selection.split(v).items()
        }


def push_forward(
    model: nn.Module, inputs: Inputs, tangents: dict[str, Tensor], forward_mode: bool, plain_kernels: bool
) -> tuple[Tensor, Tensor]:
    """Return f (B, [T,] C) and J v for all tangents v, (K, B, [T,] C), by one pass of vectorised forward mode.

    By two backward passes where an operation lacks it.
    """
    if forward_mode:
        try:
            return _forward_mode(model, inputs, tangents)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError):  # an operation without a forward rule, such as attention kernels
            pass
    return _double_backward(model, inputs, tangents, plain_kernels)


def vjp(model: nn.Module, selection: Selection, raw: Tensor, u: Tensor, looped: bool) -> Tensor:
    """Return Jᵀ u (K, P) for the graph of ``raw``, by one batched backward pass, or one for each u if ``looped``."""
    tensors = dict(model.named_parameters())
    chosen = [tensors[name] for name in selection.names]
    back = by_autograd(raw, chosen, u.to(raw.dtype).reshape(len(u), *raw.shape), looped)
    grads = [_or_zero(grad, p, (len(u), *p.shape)) for grad, p in zip(back, chosen, strict=True)]
    dtype = reduce(torch.promote_types, [grad.dtype for grad in grads])
    return selection.pick(torch.cat([grad.reshape(len(u), -1).to(dtype) for grad in grads], 1))


def _forward_mode(model: nn.Module, inputs: Inputs, tangents: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    tensors = {name: p.detach() for name, p in model.named_parameters() if name in tangents}

    def f(values: dict[str, Tensor]) -> Tensor:
        return with_output_dim(raw_output(model, inputs, values))

    with FORWARD_MODE, torch.inference_mode(False), torch.no_grad(), quiet, math_attention:
        push_forward = torch.func.vmap(lambda t: torch.func.jvp(f, (tensors,), (t,)))(tangents)
    return push_forward[0][0], push_forward[1]


def _double_backward(
    model: nn.Module, inputs: Inputs, tangents: dict[str, Tensor], plain_kernels: bool
) -> tuple[Tensor, Tensor]:
    """Return f and J v: Jᵀ u is linear in u, so its derivative in u along v is J v.

    Raises:
        NotImplementedError: If an operation has no second derivative, or may have a wrong one.
    """
    tensors = dict(model.named_parameters())
    chosen, count = [tensors[name] for name in tangents], len(next(iter(tangents.values())))
    with math_attention, recording(tensors, tangents, plain_kernels):
        raw = raw_output(model, inputs)
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


Patterns = Mapping[Node, Pattern | None]  # how rows run over the samples; None if samples share rows


def find_patterns(raw: Tensor, graph: Graph, recurrent: bool) -> tuple[Patterns, bool]:
    """Return for each node that uses a parameter how its rows run over the samples; None if samples share rows.

    The flag says whether these patterns hold for every batch of the same shapes. They may not if several patterns fit
    this batch: a row that no gradient reaches may belong to any sample. They do not if the rows follow no order.
    """
    batch = raw.shape[0]
    patterns: dict[Node, Pattern | None] = {}
    probed: dict[Node, int] = {}
    for node, rows in {use.node: use.n_rows for use in graph.uses}.items():
        if graph.batch_major[node] and rows % batch == 0:
            patterns[node] = Regular(1, batch, rows // batch)
        else:
            probed[node] = rows
    if not probed:
        return patterns, True
    certain = True
    for node, owner in _owners(raw, graph, probed, recurrent).items():
        fits = [] if owner is None else _fitting(owner, batch)
        patterns[node] = fits[0] if fits else None if owner is None else Ragged.of(owner, batch)
        certain = certain and len(fits) == 1
    return patterns, certain


def _owners(raw: Tensor, graph: Graph, rows_of: Mapping[Node, int], recurrent: bool) -> dict[Node, Tensor | None]:
    """Return the sample of every row: -1 where no gradient arrives, None if samples share rows."""
    batch, nodes = len(raw), list(rows_of)
    bits = max(1, (batch - 1).bit_length())
    generator = torch.Generator().manual_seed(0)
    seed = (torch.randn(raw.shape, generator=generator).abs() + 0.5).to(raw)
    numbers = torch.arange(batch, device=raw.device)
    scales = torch.stack([1.0 + ((numbers >> bit) & 1) for bit in range(bits)]).to(seed)
    seeds = torch.cat([seed[None], seed * scales.view(bits, batch, *(1,) * (raw.ndim - 1))])
    owners: dict[Node, Tensor | None] = {}
    for node, first, grads in _probe_gradients(raw, graph, nodes, seeds, recurrent):
        grads = grads.reshape(len(grads), rows_of[node], grads[0].numel() // max(1, rows_of[node]))
        sizes = grads[0].abs().amax(1) if grads.numel() else seed.new_zeros(rows_of[node])
        before = owners[node] if node in owners else torch.where(sizes > 0, 0, -1)
        owners[node] = _with_bits(before, grads, sizes, first)
    return owners


def _probe_gradients(
    raw: Tensor, graph: Graph, nodes: list[Node], seeds: Tensor, recurrent: bool
) -> Iterator[tuple[Node, int, Tensor]]:
    """Yield nodes with the gradients there for the first seed and for those of some bits, and the first of these bits.

    All bits in one pass, which drops each gradient after its use; by autograd, which holds them, one after another.
    """
    if not recurrent and numbers_at_once(graph, nodes, raw.dtype) is not None:
        yield from ((node, 0, grads) for node, grads in gradients(raw, graph, nodes, seeds, recurrent))
        return
    without_doubling = dict(gradients(raw, graph, nodes, seeds[:1], recurrent))
    for bit, doubled in enumerate(seeds[1:]):
        for node, grad in gradients(raw, graph, nodes, doubled[None], recurrent):
            yield node, bit, torch.cat([without_doubling[node], grad])


def _with_bits(owner: Tensor | None, grads: Tensor, sizes: Tensor, first: int) -> Tensor | None:
    """Return the numbers of the samples with some more bits, from the gradients (1 + bits, rows, entries) of a node.

    The first are those of seeds that are not doubled, and ``sizes`` their largest entry in each row. Rounding is
    relative to the terms of a row, which may be far larger than their sum: behind a LayerNorm they cancel.
    """
    eps = torch.finfo(grads.dtype).eps
    limit = max(64 * eps, eps**0.5) * sizes
    for bit, after in enumerate(grads[1:] if grads.numel() else (), first):
        same = (after - grads[0]).abs().amax(1) <= limit
        twice = (after - 2 * grads[0]).abs().amax(1) <= limit
        if owner is None or bool(((owner >= 0) & ~same & ~twice).any()):
            return None
        owner = torch.where((owner >= 0) & twice, owner + (1 << bit), owner)
    return owner


def _fitting(owner: Tensor, batch: int) -> list[Regular]:
    """Return every regular pattern that fits: row r belongs to sample (r // inner) % batch."""
    if len(owner) % batch:
        return []
    share = len(owner) // batch
    rows = torch.arange(len(owner), device=owner.device)
    unreached = owner < 0
    return [
        Regular(share // inner, batch, inner)
        for inner in range(share, 0, -1)
        if share % inner == 0 and bool((((rows // inner) % batch == owner) | unreached).all())
    ]


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
        tangents = tangents_of(network.replica, network.selection, v[numbers])
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
        with contextlib.suppress(
            NotImplementedError
        ):  # an operation with neither a forward rule nor a second derivative
            return push_forward(network.replica, inputs, tangents, network.forward_mode, network.plain_kernels)
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
    return chunks(count, size, device, most=TOGETHER.get(device.type, TOGETHER["cuda"]))


def _sample_chunks(network: Network, inputs: Inputs, directions: int) -> Iterator[Inputs]:
    """Yield the samples in chunks for which so many directions fit the byte budget.

    A direction takes no more memory than a seed of a backward pass: it leaves nothing behind at the layers.
    """
    batch = network.count(inputs)
    footprint = replace(network.footprint, whole=0)  # no Jacobian is formed
    for part in footprint.chunks(batch, directions, network.dtype, network.device):
        yield inputs if part == slice(0, batch) else network.take(inputs, part)
