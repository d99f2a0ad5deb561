"""The network as the rest of the package sees it: outputs, layer-wise Jacobians, and products with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lapwing.core.data import Inputs, check_finite, map_tensors, take
from lapwing.core.errors import ModelError
from lapwing.networks import graph as graphs
from lapwing.networks import products, rules
from lapwing.networks.backward import NoRuleError, has_rules, leading_to, pull_back_folded
from lapwing.networks.blocks import Block, BlockJacobian, DenseJacobian, LinearJacobian
from lapwing.networks.fallback import sample_jacobians
from lapwing.networks.forward import (
    batch_size,
    is_recurrent,
    needs_plain_kernels,
    plain_kernels,
    quiet,
    raw_output,
    recording,
    refuse_mixed_samples,
    refuse_training_mode,
    refusing_changes,
    shaped,
    unwrapped,
    working_dtype,
)
from lapwing.networks.ownership import find_patterns
from lapwing.networks.selection import Selection, Weights, all_weights

JOINED = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}  # what the gradients of joined batches may take
CACHED = 32 * 2**20  # on a CPU, chunks whose gradients stay near its caches are a third faster
BYTES = {"cpu": 512 * 2**20, "cuda": 3072 * 2**20}  # what the gradients of one chunk may take


@dataclass(frozen=True, eq=False)
class LayerJacobians:
    """The Jacobian of a batch, block by block. Row k belongs to seed k; ``tokens`` counts data per sample."""

    parts: tuple[Callable[[], BlockJacobian], ...]
    layout: tuple[Block, ...]
    selection: Selection
    batch: int
    outputs: int
    tokens: int = 1

    def __iter__(self) -> Iterator[tuple[Block, BlockJacobian]]:
        """Block by block: each is formed when its turn comes and dropped after, so memory follows the largest."""
        for block, part in zip(self.layout, self.parts, strict=True):
            yield block, part()

    def whole(self) -> Tensor:
        """The Jacobian itself, (B, K, P). For small networks and for tests."""
        parts: dict[str, Tensor] = {}
        for block, jacobian in self:
            dense = jacobian.whole()
            parts.update(block.spread(dense))
        return self.selection.picked(torch.cat([parts[name] for name in self.selection.names], -1))

    def double(self) -> LayerJacobians:
        """The same in float64, for differences that cancel."""
        return replace(self, parts=tuple(partial(_doubled, part) for part in self.parts))

    def jvp(self, v: Tensor) -> Tensor:
        """J v for every row of v (n, P): (n, B, K), from the stored factors."""
        values = self.selection.split(v)
        return torch.stack([jac.jvp(block.arrange(values).to(_dtype(jac))) for block, jac in self]).sum(0)


def jacobian_dtype(jacobian: LayerJacobians) -> torch.dtype:
    """The dtype in which a Jacobian's blocks come."""
    return _dtype(next(iter(jacobian))[1])


def _dtype(jacobian: BlockJacobian) -> torch.dtype:
    return jacobian.j.dtype if isinstance(jacobian, DenseJacobian) else jacobian.g.dtype


@dataclass(frozen=True, eq=False)
class Tangent:
    """The network linearised at one batch: f (B, [T,] C) and, for any seeds, the layer-wise Jacobians."""

    network: Network
    inputs: Inputs
    raw: Tensor
    graph: graphs.Graph
    uses: rules.Uses

    @property
    def f(self) -> Tensor:
        return shaped(self.raw.detach())

    def jacobians(self, seeds: Tensor | None = None) -> LayerJacobians:
        """The Jacobian of seeds · f. Seeds (K, B, [T,] C); None means every output of every token.

        One backward pass for all seeds to the recorded products; no weight gradient is formed.
        """
        f = self.f
        tokens = f.shape[1] if f.ndim == 3 else 1
        if seeds is None:
            size = f[0].numel()
            eye = torch.eye(size, dtype=f.dtype, device=f.device)
            seeds = eye.view(size, 1, *f.shape[1:]).expand(size, *f.shape)
        else:
            tokens = 1
        seeds = seeds.to(self.raw.dtype)
        with plain_kernels(self.network.plain):
            grads, patterns = self._pulled_back(seeds)
        parts = tuple(partial(self._block, block, seeds, grads, patterns) for block in self.network.layout)
        selection = self.network.selection
        return LayerJacobians(parts, self.network.layout, selection, f.shape[0], seeds.shape[0], tokens)

    def _pulled_back(self, seeds: Tensor) -> tuple[dict[Any, Tensor], Mapping[Any, rules.Pattern | None]]:
        nodes = list(dict.fromkeys(use.node for use in self.uses.uses))
        patterns = self.network._patterns(self)
        raw_seeds = seeds.reshape(seeds.shape[0], *self.raw.shape)
        direct = self.graph.nodes[0]
        while direct.name() in graphs.RESHAPES and len(direct.next_functions) == 1:
            direct = direct.next_functions[0][0]
        grads: dict[Any, Tensor] = {}
        if direct in nodes and self.graph.consumers[direct] <= 1:
            grads[direct] = raw_seeds.reshape(seeds.shape[0], *graphs.output_shape(direct))
        rest = [node for node in nodes if node not in grads]
        if rest:
            found = self.network._gradients(self, rest, raw_seeds)
            grads.update(zip(rest, found, strict=True))
        return grads, patterns

    def _block(
        self, block: Block, seeds: Tensor, grads: Mapping[Any, Tensor], patterns: Mapping[Any, rules.Pattern | None]
    ) -> BlockJacobian:
        dtype = self.network.dtype
        if block.why.startswith("no rule"):
            return self._fallback(block, seeds.to(dtype))
        with torch.no_grad():
            return self._read_off(block, seeds, grads, patterns, dtype)

    def _read_off(
        self,
        block: Block,
        seeds: Tensor,
        grads: Mapping[Any, Tensor],
        patterns: Mapping[Any, rules.Pattern | None],
        dtype: torch.dtype,
    ) -> BlockJacobian:
        mine = [use for use in self.uses.uses if use.name == block.weight]
        total: BlockJacobian | None = None
        for use in mine:
            pattern = patterns[use.node]
            if pattern is None or (block.linear and use.form.kind != block.kind):
                raise ModelError(
                    f"the graph of this batch uses {block.weight!r} in another way than the first batch did; "
                    "expected one fixed computation. Fix the control flow, or leave the parameter out with named()."
                )
            part = use.form.jacobian(use.node, grads[use.node].to(dtype), pattern, block.bias is not None)
            if not block.linear and not isinstance(part, DenseJacobian):
                part = self._flat(use, block, part)
            part = _cast(part, dtype)
            total = part if total is None else total.joined(part)  # type: ignore[arg-type]
        return total if total is not None else self._unused(block, seeds.to(dtype))

    def _flat(self, use: rules.Use, block: Block, part: BlockJacobian) -> DenseJacobian:
        """A linear use of a parameter that is kept whole: tied embedding and head, for one."""
        own = Block(use.form.kind, block.weight, block.shape, groups=use.groups)
        ((_, flat),) = own.spread(part.whole())
        return DenseJacobian(flat)

    def _unused(self, block: Block, seeds: Tensor) -> BlockJacobian:
        if block.linear:
            groups, d_out, d_in = block.form
            batch, outputs = seeds.shape[1], seeds.shape[0]
            return LinearJacobian(
                seeds.new_zeros(groups, batch, 1, d_in), seeds.new_zeros(groups, outputs, batch, 1, d_out)
            )
        return DenseJacobian(seeds.new_zeros(seeds.shape[1], seeds.shape[0], block.size))

    def _fallback(self, block: Block, seeds: Tensor) -> BlockJacobian:
        model, batch = self.network.model, self.raw.shape[0]
        tensors = dict(model.named_parameters())
        with recording(tensors, self.network.selection.names, self.network.plain):
            found = sample_jacobians(
                model, lambda m, x: shaped(raw_output(m, x)).flatten(1), self.inputs, batch, (block.weight,)
            )
        return DenseJacobian(torch.einsum("kbm,bmp->bkp", seeds.flatten(2), found[block.weight].to(seeds.dtype)))


@dataclass(frozen=True, eq=False)
class Network:
    """A trained network, the weights that are uncertain, and how they fall into blocks."""

    model: nn.Module
    selection: Selection
    layout: tuple[Block, ...]
    output_shape: tuple[int, ...]  # of one sample: (C,) or (T, C)
    width: int  # gradient numbers per sample and seed
    patches: int  # numbers per sample of the largest unfolded input
    forward_mode: bool  # whether forward-mode products are defined for every operation
    recurrent: bool  # whether fused recurrent kernels must be switched off to see the products
    _seen: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, model: nn.Module, inputs: Inputs, weights: Weights | None = None) -> Network:
        """Look at the model once, with one batch, and refuse what cannot be handled.

        Cost: three forward passes, and a few backward ones where row owners must be probed. The model is not changed.
        """
        model = unwrapped(model)
        refuse_training_mode(model)
        weights = all_weights if weights is None else weights
        tensors, recurrent = dict(model.named_parameters()), is_recurrent(model)
        plain = needs_plain_kernels(model)
        if batch_size(inputs) == 1:  # with one sample nothing tells its own rows from shared ones
            inputs = map_tensors(inputs, lambda t: torch.cat([t, t]) if t.ndim and t.shape[0] == 1 else t)
        with recording(tensors, weights.needs(model), plain), refusing_changes(model):
            raw = raw_output(model, inputs)
        f = shaped(raw.detach())
        check_finite(f, "outputs of the network")
        refuse_mixed_samples(model, inputs, raw.detach())
        if raw.grad_fn is None:
            raise ModelError("the output does not depend on any selected parameter; choose other weights.")
        graph = graphs.read(raw, raw.shape[0])
        refuse_scaled_gradients(graph)
        uses = rules.find(graph, {id(tensors[name]): name for name in weights.needs(model)}, tensors)
        selection = weights.choose(model, graph, uses)
        with recording(tensors, selection.names, plain):
            raw = raw_output(model, inputs)
        graph = graphs.read(raw, raw.shape[0])
        uses = rules.find(graph, {id(tensors[name]): name for name in selection.names}, tensors)
        with plain_kernels(plain):
            patterns, _ = find_patterns(raw, graph, uses)
        shapes = dict(zip(selection.names, selection.shapes, strict=True))
        layout = arranged(graph, uses, patterns, shapes)
        nodes = {use.node for use in uses.uses}
        patches = max((_patch_numbers(use, shapes) for use in uses.uses), default=0) // raw.shape[0]
        width = sum(torch.Size(graphs.output_shape(node)).numel() for node in nodes) // raw.shape[0]
        forward_mode = not recurrent and not _padded(graph)
        outputs = tuple(f.shape[1:])
        return cls(model, selection, layout, outputs, max(width, f[0].numel()), patches, forward_mode, recurrent)

    @cached_property
    def plain(self) -> bool:
        """Whether vendors' kernels must be switched off while the model runs."""
        return needs_plain_kernels(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that factors and Jacobians have: the model's widest, or float32 where that is narrower."""
        found = [p.dtype for p in self.model.parameters() if p.is_floating_point()]
        return working_dtype(reduce(torch.promote_types, found))

    def theta(self) -> Tensor:
        """The weights as they are, (P,)."""
        tensors = dict(self.model.named_parameters())
        full = torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.selection.names])
        return self.selection.picked(full)

    def __call__(self, inputs: Inputs) -> Tensor:
        """The plain output f (B, [T,] C), no graph."""
        with torch.no_grad(), plain_kernels(self.plain):
            return shaped(raw_output(self.model, inputs))

    def linearise(self, inputs: Inputs) -> Tangent:
        """One forward pass with a graph."""
        tensors = dict(self.model.named_parameters())
        with recording(tensors, self.selection.names, self.plain):
            raw = raw_output(self.model, inputs)
        with torch.no_grad():
            graph = graphs.read(raw, raw.shape[0])
            uses = rules.find(graph, {id(tensors[name]): name for name in self.selection.names}, tensors)
        return Tangent(self, inputs, raw, graph, uses)

    def rows_at_once(self, seeds: int) -> int:
        """How many samples are worth joining into one pass: their gradients should stay small."""
        item = torch.finfo(self.dtype).bits // 8
        budget = JOINED.get(self.device.type, JOINED["cuda"])
        return min(1024, budget // (item * max(1, seeds) * self.width + item * self.patches))

    def chunks(self, inputs: Inputs, batch: int, seeds: int) -> Iterator[slice]:
        """Runs of samples whose gradients for so many seeds fit the byte budget."""
        item = torch.finfo(self.dtype).bits // 8
        budget = BYTES.get(self.device.type, BYTES["cuda"])
        if self.device.type == "cuda":  # few large chunks keep a GPU busy; a tenth of its memory is seldom missed
            budget = max(budget, torch.cuda.get_device_properties(self.device).total_memory // 10)
        # Autograd holds about as much again while it passes backwards.
        each = item * (2 * max(1, seeds) * self.width + self.patches)
        step = max(1, budget // each)
        if self.device.type == "cpu":
            step = min(step, max(16, CACHED // each))
        step = -(-batch // -(-batch // step))  # as many chunks, but of even size
        for start in range(0, batch, step):
            yield slice(start, min(batch, start + step))

    def tangents(self, inputs: Inputs, seeds: int | None = None) -> Iterator[tuple[slice, Tangent]]:
        """The batch linearised in chunks of samples under the byte budget."""
        batch = batch_size(inputs)
        seeds = torch.Size(self.output_shape).numel() if seeds is None else seeds
        for rows in self.chunks(inputs, batch, seeds):
            whole = rows == slice(0, batch)
            yield rows, self.linearise(inputs if whole else take(inputs, batch, rows))

    def jvp(self, inputs: Inputs, v: Tensor) -> Tensor:
        """J v for every row of v (K, P): (K, B, [T,] C), in one vectorised forward-mode pass."""
        try:
            return products.jvp(self.model, self.selection, inputs, v, self.forward_mode, self.plain).to(self.dtype)
        except NotImplementedError:  # an operation with neither a forward rule nor a second derivative
            tangent = self.linearise(inputs)
            return tangent.jacobians().jvp(v.to(self.dtype)).reshape(len(v), *tangent.f.shape)

    def vjp(self, inputs: Inputs, u: Tensor) -> Tensor:
        """Jᵀ u, summed over the batch, for every u (K, B, [T,] C): (K, P)."""
        tangent = self.linearise(inputs)
        with plain_kernels(self.plain):
            back = products.vjp(self.model, self.selection, tangent.raw, u, self._loops(tangent.graph))
        return back.to(self.dtype)

    def _loops(self, graph: graphs.Graph) -> bool:
        """Batched convolutions are slow on CPU; recurrent kernels know no batching at all."""
        if self.recurrent:
            return True
        names = {name for name, _ in graph.signature}
        if any(name.startswith("ScaledDotProduct") for name in names):
            return True
        if any(node.name() == "EmbeddingBackward0" and node._saved_sparse for node in graph.nodes):
            return True
        return "ConvolutionBackward0" in names and self.device.type == "cpu"

    def _gradients(self, tangent: Tangent, nodes: list[Any], seeds: Tensor) -> list[Tensor]:
        """Seeds folded into the batch where every operation has a rule, else autograd."""
        leading = leading_to(tangent.graph, nodes)
        if not self.recurrent and has_rules(tangent.graph, leading, seeds.dtype):
            try:
                with torch.no_grad():
                    found = pull_back_folded(tangent.graph, nodes, leading, seeds)
            except NoRuleError:
                pass
            else:
                return [
                    grad if grad is not None else seeds.new_zeros(seeds.shape[0], *graphs.output_shape(node))
                    for grad, node in zip(found, nodes, strict=True)
                ]
        return pull_back(tangent.raw, nodes, seeds, self._loops(tangent.graph))

    def _patterns(self, tangent: Tangent) -> Mapping[Any, rules.Pattern | None]:
        """Which rows belong to which sample, remembered where the shapes alone decide it."""
        uses, graph = tangent.uses, tangent.graph
        batch = tangent.raw.shape[0]
        if all(graph.batch_major[use.node] for use in uses.uses):
            return find_patterns(tangent.raw, graph, uses)[0]
        nodes = list(dict.fromkeys(use.node for use in uses.uses))
        key = (batch, graph.signature, tuple((use.name, use.form.kind) for use in uses.uses))
        if key not in self._seen:
            found, certain = find_patterns(tangent.raw, graph, uses)
            if not graph.static or not certain:
                return found
            self._seen[key] = [found[node] for node in nodes]
        return dict(zip(nodes, self._seen[key], strict=True))


def _patch_numbers(use: rules.Use, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many numbers the input patches of a convolution unfold to, for the whole batch."""
    if not isinstance(use.form, rules.Convolution):
        return 0
    out, weight = graphs.output_shape(use.node), shapes[use.name]
    return torch.Size(out).numel() // out[1] * torch.Size(weight[1:]).numel() * use.groups


def refuse_scaled_gradients(graph: graphs.Graph) -> None:
    """The gradient of an embedding with scale_grad_by_freq is not its derivative."""
    if any(node.name() == "EmbeddingBackward0" and node._saved_scale_grad_by_freq for node in graph.nodes):
        raise ModelError(
            "an embedding has scale_grad_by_freq=True, which divides its gradient by counts; expected the derivative. "
            "Set scale_grad_by_freq to False: the network stays the same."
        )


def _padded(graph: graphs.Graph) -> bool:
    """A padded embedding: there forward mode disagrees with the gradient, which skips the padding row."""
    return any(node.name() == "EmbeddingBackward0" and 0 <= node._saved_padding_idx < 2**63 for node in graph.nodes)


def pull_back(raw: Tensor, nodes: list[Any], seeds: Tensor, looped: bool) -> list[Tensor]:
    """Gradients (K, ...) of seeds · raw at the outputs of the nodes; zero where there is no path."""
    edges = [GradientEdge(node, 0) for node in nodes]
    if looped or seeds.shape[0] == 1:
        each = [
            torch.autograd.grad(raw, edges, seed, retain_graph=True, allow_unused=True, materialize_grads=False)
            for seed in seeds
        ]
        found = [None if each[0][i] is None else torch.stack([g[i] for g in each]) for i in range(len(nodes))]
    else:
        with quiet():
            found = list(
                torch.autograd.grad(raw, edges, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True)
            )
    return [
        grad if grad is not None else seeds.new_zeros(seeds.shape[0], *graphs.output_shape(node))
        for grad, node in zip(found, nodes, strict=True)
    ]


def arranged(
    graph: graphs.Graph,
    uses: rules.Uses,
    patterns: Mapping[Any, rules.Pattern | None],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Block, ...]:
    """Which parameters form a block together, and of which kind."""
    by_name: dict[str, list[rules.Use]] = {name: [] for name in shapes}
    for use in uses.uses:
        by_name[use.name].append(use)
    orphans = dict(uses.unclaimed)
    for use in uses.uses:
        if patterns[use.node] is None:
            orphans.setdefault(use.name, "rows shared by the whole batch")
    joined = joined_biases(graph, by_name, orphans, shapes)
    blocks = []
    for name, mine in by_name.items():
        if name in joined.values():
            continue
        kinds = {use.form.kind for use in mine}
        shape = shapes[name]
        if name in orphans:
            blocks.append(Block("dense", name, shape, why=f"no rule for {orphans[name]}"))
        elif not mine:
            blocks.append(Block("dense", name, shape, why="not used by the network"))
        elif len(kinds) > 1:
            blocks.append(Block("dense", name, shape, why="used in both orientations"))
        elif kinds == {"dense"}:
            blocks.append(Block("dense", name, shape, why="no linear map"))
        else:
            blocks.append(Block(kinds.pop(), name, shape, joined.get(name), mine[0].groups))
    return tuple(blocks)


def joined_biases(
    graph: graphs.Graph,
    by_name: Mapping[str, list[rules.Use]],
    orphans: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, str]:
    """Weight -> bias, where every use of either is a use of both on the same rows."""
    parents: dict[Any, list[Any]] = {}
    for node in graph.nodes:
        for child, _ in node.next_functions:
            parents.setdefault(child, []).append(node)
    dense = {use.node: use for uses in by_name.values() for use in uses if use.form.kind == "dense"}
    pairs = {}
    for name, mine in by_name.items():
        found = set()
        for use in mine:
            follower = None
            if isinstance(use.form, rules.Matmul) and use.bias is None and use.form.part is None:
                follower = rules.joined_bias(graph, use, dense, parents)
            found.add(follower.name if follower is not None else use.bias)
        bias = found.pop() if len(found) == 1 else None
        usable = bias in by_name and bias not in orphans and name not in orphans
        if bias is not None and usable and len(by_name[bias]) == len(mine):
            width = shapes[name][1] if mine[0].form.kind == "columns" else shapes[name][0]
            if shapes[bias] == (width,):
                pairs[name] = bias
    return pairs


def _doubled(part: Callable[[], BlockJacobian]) -> BlockJacobian:
    jacobian = part()
    if isinstance(jacobian, LinearJacobian):
        return LinearJacobian(jacobian.a.double(), jacobian.g.double())
    if isinstance(jacobian, DenseJacobian):
        return DenseJacobian(jacobian.j.double())
    return replace(jacobian, g=jacobian.g.double())


def _cast(jacobian: BlockJacobian, dtype: torch.dtype) -> BlockJacobian:
    if isinstance(jacobian, LinearJacobian) and jacobian.a.dtype != dtype:
        return LinearJacobian(jacobian.a.to(dtype), jacobian.g.to(dtype))
    return jacobian
