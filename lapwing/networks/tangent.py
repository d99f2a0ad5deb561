"""The network linearised at one batch: its Jacobian block by block, and a comparison of it with autograd's.

Parameters that no rule covers take a fallback, which is slower and gives the same numbers: first ``torch.func`` (a
backward pass for each seed, for all samples and parameters at once); where an operation refuses that (recurrent
kernels), plain backward passes, one sample and one seed at a time.

Rules read the Jacobian from the graph, and a rule may be wrong for a network that nobody thought of. So ``compare``
tests the first batch of every graph: for random u and random weights c of the samples, Σ_b c_b J_bᵀ u_b is compared,
for each parameter, with the gradient of Σ_b c_b u_b · f_b. The weights show rows that were given to another sample.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial, reduce
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lapwing.data.inputs import Inputs, map_leaves, take
from lapwing.errors import ModelError
from lapwing.networks.examine import EXAMINED_SAMPLES, relative_gap
from lapwing.networks.forward import (
    copy_modules,
    output_without_graph,
    raw_output,
    recording,
    select_kernels,
    with_output_dim,
)
from lapwing.networks.graph import Graph, Patterns, kept_value_message, unreadable_blocks
from lapwing.networks.jacobians import (
    Block,
    BlockJacobian,
    DenseJacobian,
    Entries,
    PickedJacobian,
    are_few,
    flatten_blocks,
    temporary_bytes,
)
from lapwing.networks.linear_jacobian import HeadGGN, LinearJacobian
from lapwing.networks.pull import by_autograd, gradients
from lapwing.networks.rules import Node, Regular, output_shape
from lapwing.networks.selection import Selection, find_head, is_local
from lapwing.runtime.memory import chunks, concat_chunks
from lapwing.runtime.threads import math_attention, quiet
from lapwing.values.gaussian import ChosenOutputs

if TYPE_CHECKING:
    from lapwing.networks.network import Network


Jacobians = dict[str, Tensor]  # parameter -> (B, K, p)


def sample_jacobians(
    model: nn.Module, inputs: Inputs, per_sample: Sequence[bool], f: Tensor, names: tuple[str, ...], seeds: Tensor
) -> Jacobians:
    """Return the Jacobian (B, K, p) of seeds · f for every named parameter, with seeds (K, B, M).

    ``per_sample`` says which tensors have a row for each sample. Samples are run one by one, and must have the same
    outputs as in the whole batch, f (B, M).
    """
    seeds = seeds.to(f.dtype)
    try:
        jacobians, alone = _by_vmap(model, inputs, per_sample, names, seeds)
    except (RuntimeError, NotImplementedError, ValueError):  # no batching rule on the way: loop instead
        jacobians, alone = _by_loop(model, inputs, per_sample, names, seeds)
    gap, allowed = relative_gap(model, alone, f, f)
    if len(per_sample) > 1 and not bool(gap < allowed):
        raise ModelError(
            f"the output for a sample changes by {gap.item():.2g} (relative) where it is alone, with what all samples "
            "share; expected independent samples, and inputs of one kind: a tensor that all samples share in one batch "
            "is shared in all."
        )
    return jacobians


def _by_vmap(
    model: nn.Module, inputs: Inputs, per_sample: Sequence[bool], names: tuple[str, ...], seeds: Tensor
) -> tuple[Jacobians, Tensor]:
    tensors = dict(model.named_parameters())
    chosen = {name: tensors[name].detach() for name in names}
    flags = iter(per_sample)
    dims = map_leaves(inputs, lambda _: 0 if next(flags) else None)

    def single(sample: Inputs, rows: Tensor) -> tuple[Jacobians, Tensor]:
        flags = iter(per_sample)  # the batch dimension that ``vmap`` took away comes back
        one = map_leaves(sample, lambda t: t.unsqueeze(0) if next(flags) else t)
        run = lambda values: raw_output(model, one, values).reshape(-1)
        f, back = torch.func.vjp(run, chosen)  # type: ignore[misc]
        # Seeds in a loop: batching a gradient twice is wrong for PReLU where there are as many seeds as samples.
        each = [back(row)[0] for row in rows]
        return {name: torch.stack([grads[name].reshape(-1) for grads in each]) for name in names}, f

    with quiet, math_attention:
        jacobians, f = torch.func.vmap(single, in_dims=(dims, 1))(inputs, seeds)
    return {name: jacobian.detach() for name, jacobian in jacobians.items()}, f.detach()


def _by_loop(
    model: nn.Module, inputs: Inputs, per_sample: Sequence[bool], names: tuple[str, ...], seeds: Tensor
) -> tuple[Jacobians, Tensor]:
    tensors = dict(model.named_parameters())
    chosen = [tensors[name] for name in names]
    count, batch, _ = seeds.shape
    jacobians = {name: seeds.new_zeros(batch, count, tensors[name].numel()) for name in names}
    outputs = []
    for b in range(batch):
        f = raw_output(model, take(inputs, per_sample, slice(b, b + 1))).reshape(-1)
        outputs.append(f.detach())
        for name, grad in zip(names, by_autograd(f, chosen, seeds[:, b], True), strict=True):
            if grad is not None:
                jacobians[name][b] = grad.reshape(count, -1)
    return jacobians, torch.stack(outputs)


Stream = Callable[[Collection[int]], Iterator[tuple[int, BlockJacobian]]]  # wanted blocks -> their Jacobians


@dataclass(frozen=True, eq=False)
class LayerJacobians:
    """The Jacobian of a batch, block by block, for K = ``outputs`` seeds; a sample has ``tokens`` data."""

    parts: tuple[Callable[[], BlockJacobian], ...]
    layout: tuple[Block, ...]
    selection: Selection
    batch: int
    outputs: int
    dtype: torch.dtype
    tokens: int = 1
    stream: Stream | None = None  # a pass that holds few gradients at once
    entries: tuple[Entries, ...] | None = None  # the chosen entries of each block; None if all are chosen

    def numbered_blocks(self, wanted: Collection[int] | None = None) -> Iterator[tuple[int, BlockJacobian]]:
        """Yield the number and the Jacobian of all or some blocks, in any order, for sums over blocks.

        Where the network streams, this is a backward pass of its own, which drops each gradient after its use.
        """
        wanted = range(len(self.parts)) if wanted is None else wanted
        return ((i, self.parts[i]()) for i in wanted) if self.stream is None else self.stream(wanted)

    def __iter__(self) -> Iterator[tuple[Block, BlockJacobian]]:
        """Yield block by block. Each is formed when it is reached and dropped afterwards, so only one is in memory.

        Blocks without a rule are formed together and stay in memory.
        """
        for block, part in zip(self.layout, self.parts, strict=True):
            yield block, part()

    def whole(self) -> Tensor:
        """Return the Jacobian itself, (B, K, P), in which only the chosen columns are formed. For few weights."""
        lead = (self.batch, self.outputs)
        if self.entries is not None:
            return self._columns(self.entries)
        parts = [part.whole().reshape(*lead, *block.form) for block, part in self]
        return flatten_blocks(parts, self.layout, self.selection)

    def _columns(self, entries: tuple[Entries, ...]) -> Tensor:
        device = entries[0].at.device
        whole = torch.empty(self.batch, self.outputs, self.selection.size, dtype=self.dtype, device=device)
        for chosen, (_, part) in zip(entries, self, strict=True):
            whole[..., chosen.places] = part.columns(chosen).to(self.dtype)
            del part  # before the next one is formed
        return whole

    def samples(self, rows: slice) -> LayerJacobians:
        """Return that of some samples; a block is formed for all of them and then cut."""
        if rows == slice(0, self.batch):
            return self
        parts = self._change(lambda part: part.samples(rows))
        return replace(self, parts=parts, stream=None, batch=rows.stop - rows.start)

    def double(self) -> LayerJacobians:
        """Return it in float64, for differences in which digits cancel."""
        parts = self._change(lambda part: part.to(torch.float64))
        stream = None if self.stream is None else partial(_double_stream, self.stream)
        return replace(self, parts=parts, stream=stream, dtype=torch.float64)

    def jvp(self, v: Tensor) -> Tensor:
        """Return J v for every row of v (n, P): (n, B, K), from the stored factors."""
        v = v.to(self.dtype)
        if self.entries is not None:  # the weights of one block at a time are filled up with those not chosen
            pairs = zip(self.entries, self, strict=True)
            return reduce(torch.add, (part.jvp(chosen.expand(v[:, chosen.places])) for chosen, (_, part) in pairs))
        values = self.selection.split(v)
        return reduce(torch.add, (part.jvp(block.arrange(values)) for block, part in self))

    def vjp(self, u: Tensor) -> Tensor:
        """Return Jᵀ u for every u (n, B, K), summed over samples: (n, P)."""
        u = u.to(self.dtype)
        if self.entries is not None:
            total = u.new_empty(len(u), self.selection.size)
            for chosen, (_, part) in zip(self.entries, self, strict=True):
                total[:, chosen.places] = part.vjp(u).reshape(len(u), -1)[:, chosen.at]
            return total
        parts = [part.vjp(u).reshape(len(u), *block.form) for block, part in self]
        return flatten_blocks(parts, self.layout, self.selection)

    def gram(self, v: Tensor) -> Tensor:
        """Return Jᵀ J v for every row of v (n, P); a block is formed once for both products, if memory allows it."""
        parts: list[Callable[[], BlockJacobian]] = []
        left = temporary_bytes(v.device)
        for part in self.parts:
            block = part().materialise(len(v))
            left -= block.nbytes
            parts.append(partial(_constant, block) if left >= 0 else part)
            del block
        ready, each = replace(self, parts=tuple(parts), stream=None), 4 * v.element_size() * self.batch * self.outputs
        return concat_chunks((ready.vjp(ready.jvp(v[some])) for some in chunks(len(v), each, v.device)), len(v))

    def materialise(self) -> LayerJacobians:
        """Return it with every block formed now, in the form in which repeated products are cheapest."""
        formed = (part().materialise() for part in self.parts)
        return replace(self, parts=tuple(partial(_constant, part) for part in formed), stream=None)

    def _change(self, change: Callable[[BlockJacobian], BlockJacobian]) -> tuple[Callable[[], BlockJacobian], ...]:
        """Return the blocks, each changed when it is formed."""
        return tuple(lambda part=part: change(part()) for part in self.parts)

    def materialised_bytes(self) -> int:
        """Return the bytes that ``materialise`` would take; the blocks are formed one after another."""
        return sum(part.materialised_size() for _, part in self) * torch.finfo(self.dtype).bits // 8

    @property
    def nbytes(self) -> int:
        """The bytes that the blocks take once they are formed."""
        return sum(part.nbytes for _, part in self)


def _constant(part: BlockJacobian) -> BlockJacobian:
    return part


def _double_stream(stream: Stream, wanted: Collection[int]) -> Iterator[tuple[int, BlockJacobian]]:
    return ((number, part.to(torch.float64)) for number, part in stream(wanted))


Gradients = Mapping[Node, Tensor]


@dataclass(frozen=True, eq=False)
class Tangent:
    """The network linearised at one batch: its outputs and, for any seeds, the layer-wise Jacobians."""

    network: Network
    inputs: Inputs
    raw: Tensor  # the outputs as the model returned them, with their graph
    graph: Graph
    differentiable: bool = False  # whether the Jacobians carry a graph back to the inputs
    chosen: ChosenOutputs | None = None  # the outputs that are wanted; None means all

    @property
    def network_output(self) -> Tensor:
        """The output of the network itself, (B, [T,] C)."""
        return with_output_dim(self.raw if self.differentiable else self.raw.detach())

    @cached_property
    def f(self) -> Tensor:
        """The wanted outputs of the tangent model, (B, [T,] C): J (theta - w̃) is added where theta is not w̃."""
        f, shift = self.network_output, self.network.shift
        f = f if shift is None else f + self.network.jvp(self.inputs, shift[None])[0].to(self.raw)
        return f if self.chosen is None else self.chosen.of(f)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the wanted outputs of one sample: (C,), or (T, C)."""
        shape = tuple(self.network_output.shape[1:])
        return shape if self.chosen is None else self.chosen.shape(shape)

    @property
    def tokens(self) -> int:
        """The number of data of a sample: T for outputs (B, T, C), else 1."""
        return self.shape[0] if len(self.shape) == 2 else 1

    def seeds(self, run: slice) -> Tensor:
        """Return unit vectors (K, B, [T,] C) for a run of the wanted outputs, numbered through all tokens."""
        f = self.network_output
        if self.chosen is not None:
            return self.chosen.seeds(f)[run]
        count = run.stop - run.start
        units = f.new_zeros(count, f[0].numel())
        units.diagonal(run.start).fill_(1)
        return units.view(count, 1, *f.shape[1:]).expand(count, *f.shape)

    def output_runs(self, centred: bool = False, whole_tokens: bool = False) -> Iterator[LayerJacobians]:
        """Yield the Jacobians of all wanted outputs in runs of them that fit the byte budget, often a single run.

        ``centred`` takes the mean over the outputs of a datum off first. ``whole_tokens`` keeps the outputs of a datum
        together, however large they are.
        """
        network, size = self.network, torch.Size(self.shape).numel()
        unit = self.shape[-1] if whole_tokens else 1
        for run in network.footprint.seed_runs(size, len(self.raw), network.dtype, network.device, unit):
            seeds, count = self.seeds(run), run.stop - run.start
            if centred:
                seeds = (seeds[:, :1] - seeds[:, :1].mean(-1, keepdim=True)).expand(seeds.shape)
            yield self.jacobians(seeds, count // self.shape[-1] if whole_tokens or count == size else 1)

    def jacobians(self, seeds: Tensor | None = None, tokens: int = 1) -> LayerJacobians:
        """Return the Jacobian of seeds · f. Seeds (K, B, [T,] C) of all outputs; None means every wanted output.

        One backward pass for all seeds to the recorded products; no weight gradient is formed. Parameters without a
        rule take one more pass together, when the first of them is needed. ``tokens`` is the number of data of a sample
        that the seeds belong to, as many seeds to each.
        """
        self.network.refuse_wrong(self)
        if seeds is None:
            seeds, tokens = self.seeds(slice(0, torch.Size(self.shape).numel())), self.tokens
        return self.jacobians_unchecked(seeds, tokens)

    def jacobians_unchecked(self, seeds: Tensor, tokens: int = 1, every: bool = False) -> LayerJacobians:
        """Return the Jacobian of seeds · f without the comparison that the first batch of a graph needs.

        ``every`` has all weights of each block, also where few of them are selected.
        """
        network, f = self.network, self.network_output
        seeds = seeds.to(self.raw.dtype)
        reader = self._whole_block if every else self._block
        read = partial(reader, seeds, cache(partial(self._fallback, seeds)))
        collected = cache(lambda: dict(self._node_gradients(seeds)))
        if not network.footprint.streams:
            collected()
        parts = tuple(lambda number=number: read(number, collected()) for number in range(len(network.layout)))
        stream = partial(self._stream, seeds, read) if network.footprint.streams else None
        sizes = len(f), len(seeds), network.dtype, tokens
        return LayerJacobians(parts, network.layout, network.selection, *sizes, stream, network.entries)

    def head_ggn(self, diagonal: Tensor, outer: Tensor | None) -> tuple[int, HeadGGN] | None:
        """Return the curvature of the last linear layer, and the number of its block, from H in the outputs.

        H (B, [T,] C) has ``diagonal`` on its diagonal and -outer outerᵀ off it. No backward pass. None if the network
        does not end in a linear map, or if its reshape takes outputs apart that H couples.
        """
        network = self.network
        network.refuse_wrong(self)
        head = find_head(self.graph, network.layout)
        if head is None:
            return None
        pattern = self.patterns[head.use.node]
        if not isinstance(pattern, Regular) or head.number in self.fallback_blocks:
            return None
        values = [diagonal] if outer is None else [diagonal, outer, _token_numbers(outer)]
        with torch.no_grad():
            at_map = head.carry_back(torch.stack(values).reshape(len(values), *self.raw.shape))
            part = head.use.jacobian(at_map, pattern, network.layout[head.number].bias is not None)
        assert isinstance(part, LinearJacobian)
        if outer is not None and not is_local(part.g[:, 2, 0].transpose(0, 1).flatten(1), outer.shape[-1]):
            return None
        a, g = part.a.to(network.dtype), part.g.flatten(2, 3)  # (G, values, B T, d_out)
        return head.number, HeadGGN(a, g[:, 0], None if outer is None else _split_by_token(g[:, 1], g[:, 2]))

    def _stream(
        self, seeds: Tensor, read: Callable[[int, Gradients], BlockJacobian], wanted: Collection[int]
    ) -> Iterator[tuple[int, BlockJacobian]]:
        """Yield the number and the Jacobian of each wanted block as soon as a pass has reached all its uses."""
        layout = self.network.layout
        uses_of = self.graph.uses_of
        ruled = (i for i in sorted(wanted) if i not in self.fallback_blocks)
        uses = dict.fromkeys((use.node, i) for i in ruled for use in uses_of.get(layout[i].weight, ()))
        missing, waiting = Counter(number for _, number in uses), Counter(node for node, _ in uses)
        by_node: dict[Node, list[int]] = {node: [] for node in waiting}
        for node, number in uses:
            by_node[node].append(number)
        grads: dict[Node, Tensor] = {}
        for node, grad in self._node_gradients(seeds):
            if node in by_node:
                grads[node] = grad
            del grad
            for number in by_node.get(node, ()):
                missing[number] -= 1
                if missing[number]:
                    continue
                yield number, read(number, grads)
                for used in [each for each in grads if number in by_node[each]]:
                    waiting[used] -= 1
                    if not waiting[used]:
                        del grads[used]
        rest = set(wanted) - set(missing)  # without a rule, or not used by this batch
        yield from ((number, read(number, {})) for number in sorted(rest))

    def _node_gradients(self, seeds: Tensor) -> Iterator[tuple[Node, Tensor]]:
        """Yield the nodes that use a parameter, and the gradients there, as a backward pass reaches them."""
        graph = self.graph
        nodes = list(dict.fromkeys(use.node for use in graph.uses))
        raw_seeds = seeds.reshape(len(seeds), *self.raw.shape)
        last = graph.nodes[0]
        while graph.operations[last].reshapes and len(last.next_functions) == 1:
            last = last.next_functions[0][0]
        if last in nodes and graph.consumers[last] <= 1:  # the layer before the output needs no backward pass
            nodes.remove(last)
            yield last, raw_seeds.reshape(len(seeds), *output_shape(last))
        if nodes:
            walk = gradients(self.raw, graph, nodes, raw_seeds, self.network.recurrent, self.differentiable)
            while True:
                with select_kernels(self.network.plain_kernels):  # not while the caller works
                    step = next(walk, None)
                if step is None:
                    return
                yield step
                del step

    def _block(
        self, seeds: Tensor, opaque: Callable[[], Mapping[str, Tensor]], number: int, grads: Gradients
    ) -> BlockJacobian:
        """Return the Jacobian of a block; where few of its weights are chosen, that of these alone."""
        part = self._whole_block(seeds, opaque, number, grads)
        if self.network.entries is None or part.is_lookup:  # gradients of the rows in use are few
            return part
        chosen = self.network.entries[number]
        few = are_few(len(chosen.at), chosen.size, len(seeds), part.positions)
        return PickedJacobian.of(part, chosen) if few else part

    def _whole_block(
        self, seeds: Tensor, opaque: Callable[[], Mapping[str, Tensor]], number: int, grads: Gradients
    ) -> BlockJacobian:
        """Return the sum of the Jacobians of all uses of the block's weight; zero where this batch does not use it."""
        if number in self.fallback_blocks:
            return self._whole_by_fallback(number, opaque)
        block = self.network.layout[number]
        total: BlockJacobian | None = None
        dtype = self.network.dtype
        for use in self.graph.uses_of.get(block.weight, ()):
            pattern = self.patterns[use.node]
            assert pattern is not None, "such a block takes the fallback"
            with torch.set_grad_enabled(self.differentiable):
                part = use.jacobian(grads[use.node].to(dtype), pattern, block.bias is not None).to(dtype)
                if not block.linear:  # it is kept whole, such as a tied embedding and head
                    ((_, flat),) = replace(block, kind=use.kind, groups=use.groups).split(part.whole())
                    part = DenseJacobian(flat)
                total = part if total is None else total.add(part)
        return _zero(block, seeds.to(dtype)) if total is None else total

    @cached_property
    def fallback_blocks(self) -> Mapping[int, str]:
        """The numbers of the blocks that take the fallback at this batch, each with the reason."""
        return unreadable_blocks(self.graph, self.patterns, self.network.layout)

    @cached_property
    def patterns(self) -> Patterns:
        """The order in which the rows at each node that uses a parameter run over the samples."""
        with select_kernels(self.network.plain_kernels):
            return self.network.patterns(self)

    def _whole_by_fallback(self, number: int, opaque: Callable[[], Mapping[str, Tensor]]) -> DenseJacobian:
        """Return the Jacobian of a block without a rule in this graph."""
        block = self.network.layout[number]
        if self.differentiable:
            raise ModelError(
                f"the Jacobian of {block.weight!r} has no rule ({self.fallback_blocks[number]}) and cannot be "
                "differentiated in the inputs. Leave it out with named(), or keep the inputs where they are: "
                "x.detach() for predictions, VaLLA(optimiser='none') with alpha=0."
            )
        jacobians = opaque()
        if not block.linear:
            return DenseJacobian(jacobians[block.weight])
        lead = jacobians[block.weight].shape[:2]
        shapes = dict(zip(self.network.selection.names, self.network.selection.shapes, strict=True))
        matrix = block.arrange({name: jacobians[name].reshape(*lead, *shapes[name]) for name in block.names})
        return DenseJacobian(matrix.flatten(2), block.form, block.weight)

    def _fallback(self, seeds: Tensor) -> dict[str, Tensor]:
        """Return the Jacobians (B, K, p) of all parameters without a rule, by name."""
        network, f = self.network, self.network_output
        names = tuple(name for number in self.fallback_blocks for name in network.layout[number].names)
        per_sample = network.per_sample(self.inputs)
        with recording(network.parameters, network.selection.names, network.plain_kernels):
            jacobians = sample_jacobians(
                network.replica, self.inputs, per_sample, f.flatten(1), names, seeds.flatten(2)
            )
        return {name: jacobian.to(network.dtype) for name, jacobian in jacobians.items()}


def _token_numbers(values: Tensor) -> Tensor:
    """Return the number of the token of every output, in the shape of values (B, [T,] C); zero without tokens."""
    if values.ndim == 2:
        return torch.zeros_like(values)
    return torch.arange(values.shape[1], device=values.device).to(values)[:, None].expand(values.shape)


def _split_by_token(outer: Tensor, tokens: Tensor) -> Tensor:
    """Return the parts of outer (G, N, d_out) that belong to each of the M tokens of a position, (G, M, N, d_out)."""
    place = tokens - tokens.amin((0, 2), keepdim=True)
    count = int(place.max()) + 1
    if count == 1:
        return outer.unsqueeze(1)
    return torch.stack([torch.where(place == number, outer, 0.0) for number in range(count)], 1)


def _zero(block: Block, seeds: Tensor) -> BlockJacobian:
    """Return the Jacobian of a block that this batch does not use."""
    outputs, batch = seeds.shape[:2]
    if not block.linear:
        return DenseJacobian(seeds.new_zeros(batch, outputs, block.size))
    groups, d_out, d_in = block.form
    a, g = seeds.new_zeros(groups, batch, 1, d_in), seeds.new_zeros(groups, outputs, batch, 1, d_out)
    return LinearJacobian(a, g, torch.zeros(batch, dtype=torch.long, device=seeds.device))


# The comparison with autograd.


# Both ways round differently: by up to 25 eps of a parameter's gradient in the networks of the tests, in all dtypes,
# and where its terms cancel by 2 eps of the largest gradient, entry by entry. A Jacobian of zero is off by one.
OWN, POWER, MOST_OWN = 32.0, 0.75, 0.25  # 2e-4 of its own gradient in float32, 6e-11 in float64, a quarter in 16 bits


TOP, MOST_TOP = 64.0, 0.1  # units of the largest gradient


MODULE_DICTS = {"_parameters", "_buffers", "_modules"}


ABSENT = object()


@dataclass(frozen=True, eq=False)
class LastLayerTangent(Tangent):
    """The tangent of a network whose selected weights are those of the ``nn.Linear`` that makes its outputs (B, C).

    It has no graph: the Jacobian is the outer product of the seeds and the features, the inputs of this layer.
    """

    graph: Graph = field(init=False)
    features: Tensor = field(kw_only=True)  # (B, D), without the one of a bias

    def jacobians(self, seeds: Tensor | None = None, tokens: int = 1) -> LayerJacobians:
        network, a = self.network, self.features
        seeds = self.seeds(slice(0, self.shape[-1])) if seeds is None else seeds
        if network.layout[0].bias is not None:
            a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        part = LinearJacobian(a[None, :, None], seeds[None, :, :, None])
        sizes = len(a), len(seeds), network.dtype, tokens
        return LayerJacobians((partial(_constant, part),), network.layout, network.selection, *sizes)


def compare(tangent: Tangent, first: bool) -> None:
    """Raise ``ModelError`` unless the Jacobian of the batch agrees with autograd for each parameter.

    ``first`` says that the model has not been compared before. Cost: two backward passes with one seed, one by the
    rules and one by autograd; at first also those of ``_refuse_kept_values``. A few samples are enough if their graph
    has the form of the whole batch's.
    """
    if len(tangent.raw) > 2 * EXAMINED_SAMPLES:  # fewer cost less than another run
        network = tangent.network
        few = network.linearise(network.take(tangent.inputs, slice(0, EXAMINED_SAMPLES)), tangent.differentiable)
        tangent = few if few.graph.form == tangent.graph.form else tangent
    u, c = _directions(tangent)
    with torch.no_grad():
        expected = _by_autograd(tangent, u, c)
    if first:
        _refuse_kept_values(tangent, u[0] * c, expected)
    with torch.no_grad():
        off = _find_difference(_by_rules(tangent, u, c), expected, tangent)
    if off is not None:
        name, gap, allowed = off
        raise ModelError(
            f"the Jacobian of {name!r} that Lapwing reads from the graph of this batch differs from autograd's by "
            f"{gap:.2g} of its size; expected rounding, at most {allowed:.1g}. An operation of the model is not "
            "handled right: leave the parameter out with named(), and please report the model."
        )


def _refuse_kept_values(tangent: Tangent, seed: Tensor, expected: Mapping[str, Tensor]) -> None:
    """Raise ``ModelError`` if the outputs follow a parameter by a value that the model keeps from an earlier run.

    Then the gradient in the parameter, or the output where the gradient is zero, is another one where other values are
    put in its place, or where the modules start without the tensors that they keep beside their parameters. Cost: a
    forward and two backward passes; three forward passes more where a parameter has no gradient; and as much for each
    tensor that is kept.
    """
    network, names = tangent.network, tangent.network.selection.names

    def find_difference(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> str:
        """Return a parameter whose gradient is another one in a run of this model, or ""."""
        with recording(network.parameters, names if values is None else ()):
            raw = raw_output(model, tangent.inputs, values)
        tensors = dict(model.named_parameters())
        leaves = {name: tensors[name] for name in names} if values is None else values
        off = _find_difference(_gradients(raw, leaves, seed), expected, tangent)
        return off[0] if off is not None and _same(model, raw, tangent.raw) else ""

    values = {name: network.parameters[name].detach().requires_grad_() for name in names}
    if name := find_difference(network.replica, values):
        raise ModelError(kept_value_message(name, " (in a closure, or in an object that is not a module)"))
    if not network.private:
        return
    silent = {name: _perturb(network.parameters[name]) for name in names if name not in expected}

    def follows(model: nn.Module) -> bool:
        """Return whether the outputs change with the parameters that have no gradient."""
        with torch.no_grad():
            return not _same(model, raw_output(model, tangent.inputs, silent), tangent.raw)

    if silent and follows(copy_modules(network.replica)):
        used = copy_modules(network.replica)
        output_without_graph(used, tangent.inputs)
        if not follows(used):
            raise ModelError(kept_value_message(next(iter(silent)), ", without a gradient"))
    for where, empty_copy in _copies_without_kept(network.replica):
        with contextlib.suppress(Exception):  # a model that needs the tensor may raise anything
            name = find_difference(empty_copy())
            name = name or (next(iter(silent)) if silent and follows(empty_copy()) else "")
        if name:
            raise ModelError(kept_value_message(name, f" ({where})"))


def _same(model: nn.Module, raw: Tensor, before: Tensor) -> bool:
    """Return whether two runs gave the same outputs, up to rounding."""
    if raw.shape != before.shape:
        return False
    gap, allowed = relative_gap(model, raw.detach(), before.detach(), before.detach())
    return bool(gap < allowed)


def _perturb(parameter: Tensor) -> Tensor:
    """Return other values for a parameter, of the same size and always the same."""
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(parameter)
    return parameter.detach() + noise * (parameter.detach().abs().amax() + 0.1)


def _copies_without_kept(replica: nn.Module) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield the place of each tensor that a module keeps beside its parameters, and a maker of copies without it.

    A place that is empty at first may hold None, or not be there.
    """

    def empty_copy(name: str, key: str, fill: Any) -> nn.Module:
        model = copy_modules(replica)
        part = model.get_submodule(name)
        content = vars(part) if key in vars(part) else part._buffers
        content[key] = fill
        if fill is ABSENT:
            del content[key]
        return model

    for name, module in replica.named_modules():
        inside = type(module).__module__.startswith("torch.nn.")
        own = {key: value for key, value in vars(module).items() if key not in MODULE_DICTS and "_hooks" not in key}
        for key, value in (*own.items(), *({} if inside else module._buffers).items()):
            if any(t.is_floating_point() for t in _held(value)):
                where = f"the attribute {key!r} of {f'the module {name!r}' if name else 'the model'}"
                for fill in (None, ABSENT) if isinstance(value, Tensor) else (type(value)(),):
                    yield where, partial(empty_copy, name, key, fill)


def _held(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors in an attribute, which is one or a collection of some."""
    parts = value.values() if isinstance(value, dict) else value if type(value) in (list, set) else (value,)
    return tuple(part for part in parts if isinstance(part, Tensor))


def _gradients(raw: Tensor, leaves: Mapping[str, Tensor], seed: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the gradient of seed · raw for each leaf, with its name."""
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if raw.requires_grad:
        grads = torch.autograd.grad(raw, list(leaves.values()), seed.reshape(raw.shape).to(raw), allow_unused=True)
    return zip(leaves, (g.to_dense() if g is not None and g.is_sparse else g for g in grads), strict=True)


def _directions(tangent: Tangent) -> tuple[Tensor, Tensor]:
    """Return u (1, B, [T,] C) and c (B, [1,] 1), always the same for a shape."""
    f, generator = tangent.network_output.detach(), torch.Generator().manual_seed(0)
    u = torch.randn((1, *f.shape), generator=generator)
    c = 0.5 + torch.rand((len(f), *(1,) * (f.ndim - 1)), generator=generator)
    return u.to(f), c.to(f)


def _by_rules(tangent: Tangent, u: Tensor, c: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield Σ_b c_b J_bᵀ u_b for each parameter with its name, one block after another."""
    layout = tangent.network.layout
    jacobians = tangent.jacobians_unchecked(u, every=True)
    weights = c.reshape(1, -1, 1).to(jacobians.dtype)
    for number, (block, part) in enumerate(zip(layout, jacobians.parts, strict=True)):
        if tangent.differentiable and number in tangent.fallback_blocks:
            continue  # refused where it is needed
        flat = part().vjp(weights).reshape(1, *block.form).detach()
        yield from ((name, values[0]) for name, values in block.split(flat))


def _by_autograd(tangent: Tangent, u: Tensor, c: Tensor) -> dict[str, Tensor]:
    """Return the gradient of Σ_b c_b u_b · f_b, by parameter; none for those that are not in the graph."""
    nodes: list[Node] = list(tangent.graph.leaves)
    seed = (u[0] * c).reshape(tangent.raw.shape).to(tangent.raw)
    edges = [GradientEdge(node, 0) for node in nodes]
    grads = torch.autograd.grad(tangent.raw, edges, seed, retain_graph=True, allow_unused=True)
    pairs = zip((tangent.graph.leaves[node] for node in nodes), grads, strict=True)
    return {name: grad.to_dense() if grad.is_sparse else grad for name, grad in pairs if grad is not None}


def _find_difference(
    found: Iterable[tuple[str, Tensor | None]], expected: Mapping[str, Tensor], tangent: Tangent
) -> tuple[str, float, float] | None:
    """Return a parameter whose gradients differ beyond rounding, the relative gap and the one allowed; None if none."""
    zero, figures = torch.zeros((), dtype=torch.float64, device=tangent.raw.device), {}
    for name, values in found:
        pair = (values, expected.get(name))
        ours, autograd = (zero if each is None else each.reshape(-1).double() for each in pair)
        size = max(ours.numel(), autograd.numel()) ** 0.5
        figures[name] = torch.stack([(ours - autograd).norm(), ours.norm(), autograd.norm()]) / size
    eps = _rounding_unit(tangent)
    numbers = torch.stack(list(figures.values())).tolist() if figures else []
    rows = {name: row for name, row in zip(figures, numbers, strict=True) if isfinite(row[2])}
    top = max((row[2] for row in rows.values()), default=0.0)
    own, floor = min(MOST_OWN, OWN * eps**POWER), min(MOST_TOP, TOP * eps) * top
    for name, (gap, ours, autograd) in rows.items():  # gradients that overflow say nothing
        scale = max(ours, autograd)
        if not gap <= own * scale + floor:
            return name, gap / scale, own
    return None


def _rounding_unit(tangent: Tangent) -> float:
    """Return the rounding unit of the coarsest arithmetic by which the outputs were computed."""
    dtypes = {tangent.network.arithmetic, tangent.raw.dtype}
    for node in tangent.graph.operations:
        dtypes |= {part.dtype for part in node._input_metadata if part.dtype.is_floating_point}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if torch.float64 in dtypes and len(dtypes) == 1:
        return eps
    if torch.get_float32_matmul_precision() == "medium":
        return max(eps, torch.finfo(torch.bfloat16).eps)
    return eps if tangent.raw.is_cpu else max(eps, 2**-10)  # GPUs may multiply float32 with ten digits
