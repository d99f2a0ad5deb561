"""The network linearised at one batch.

Parameters that no rule covers take a fallback, which is slower and gives the same numbers: first ``torch.func`` (a
backward pass for each seed, for all samples and parameters at once); where an operation refuses that (recurrent
kernels), plain backward passes, one sample and one seed at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lapwing.data.inputs import Inputs, map_leaves, take
from lapwing.errors import ModelError
from lapwing.networks.dense_jacobian import DenseJacobian, PickedJacobian, are_few
from lapwing.networks.examine import relative_gap, unreadable_blocks
from lapwing.networks.forward import raw_output, recording, select_kernels, with_output_dim
from lapwing.networks.graph import Graph
from lapwing.networks.jacobians import Block, BlockJacobian, LayerJacobians
from lapwing.networks.linear_jacobian import HeadGGN, LinearJacobian
from lapwing.networks.passes import Patterns, by_autograd, gradients
from lapwing.networks.rules import Node, Regular, output_shape
from lapwing.networks.selection import find_head, is_local
from lapwing.runtime.threads import math_attention, quiet
from lapwing.values.outputs import ChosenOutputs

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
        return self.select_outputs(
            f if shift is None else f + self.network.jvp(self.inputs, shift[None])[0].to(self.raw)
        )

    def select_outputs(self, values: Tensor) -> Tensor:
        """Return the values (..., B, [T,] C) of the wanted outputs."""
        return values if self.chosen is None else self.chosen.of(values)

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
        gathered = cache(lambda: dict(self._node_gradients(seeds)))
        if not network.footprint.streams:
            gathered()
        parts = tuple(partial(_read_block, read, number, gathered) for number in range(len(network.layout)))
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
        return head.number, HeadGGN(a, g[:, 0], None if outer is None else _by_token(g[:, 1], g[:, 2]))

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
        self,
        seeds: Tensor,
        opaque: Callable[[], Mapping[str, Tensor]],
        number: int,
        grads: Gradients,
    ) -> BlockJacobian:
        """Return the Jacobian of a block; where few of its weights are chosen, that of these alone."""
        part = self._whole_block(seeds, opaque, number, grads)
        if self.network.entries is None or part.is_lookup:  # gradients of the rows in use are few
            return part
        chosen = self.network.entries[number]
        few = are_few(len(chosen.at), chosen.size, len(seeds), part.positions)
        return PickedJacobian.of(part, chosen) if few else part

    def _whole_block(
        self,
        seeds: Tensor,
        opaque: Callable[[], Mapping[str, Tensor]],
        number: int,
        grads: Gradients,
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
        """How the rows at each node that uses a parameter run over the samples."""
        with select_kernels(self.network.plain_kernels):
            return self.network.patterns(self)

    def _whole_by_fallback(self, number: int, opaque: Callable[[], Mapping[str, Tensor]]) -> DenseJacobian:
        """Return the Jacobian of a block without a rule in this graph."""
        block = self.network.layout[number]
        if self.differentiable:
            raise ModelError(
                f"the Jacobian of {block.weight!r} has no rule ({self.fallback_blocks[number]}) and cannot be "
                "differentiated in "
                "the inputs. Leave it out with named(), or keep the inputs where they are: x.detach() for predictions, "
                "VaLLA(optimiser='none') with alpha=0."
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


def _read_block(
    read: Callable[[int, Gradients], BlockJacobian], number: int, gathered: Callable[[], Gradients]
) -> BlockJacobian:
    return read(number, gathered())


def _token_numbers(values: Tensor) -> Tensor:
    """Return the number of the token of every output, in the shape of values (B, [T,] C); zero without tokens."""
    if values.ndim == 2:
        return torch.zeros_like(values)
    return torch.arange(values.shape[1], device=values.device).to(values)[:, None].expand(values.shape)


def _by_token(outer: Tensor, tokens: Tensor) -> Tensor:
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
