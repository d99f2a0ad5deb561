"""The network as the rest of the package sees it: outputs, layer-wise Jacobians, and products with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.data import Inputs, batch_size, check_finite, map_tensors, picked
from lapwing.errors import DataError, ModelError
from lapwing.networks import graph as graphs
from lapwing.networks import products, rules
from lapwing.networks.backward import differentiable_gradients, gradients, loops
from lapwing.networks.blocks import Block, BlockJacobian, DenseJacobian, LinearJacobian
from lapwing.networks.budget import Footprint
from lapwing.networks.fallback import sample_jacobians, swapped
from lapwing.networks.forms import Convolution, Pattern
from lapwing.networks.forward import (
    is_recurrent,
    needs_plain_kernels,
    plain_kernels,
    raw_output,
    recording,
    refuse_random,
    refuse_training_mode,
    refusing_changes,
    shaped,
    twice_differentiable,
    unwrapped,
    working_dtype,
)
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.layout import arranged
from lapwing.networks.ownership import find_patterns
from lapwing.networks.samples import counted, height, learned, owned, placed
from lapwing.networks.selection import Selection, Weights, all_weights


@dataclass(frozen=True, eq=False)
class Tangent:
    """The network linearised at one batch: f (B, [T,] C) and, for any seeds, the layer-wise Jacobians."""

    network: Network
    inputs: Inputs
    raw: Tensor
    graph: graphs.Graph
    uses: rules.Uses
    differentiable: bool = False  # whether the Jacobians carry a graph back to the inputs

    @property
    def own(self) -> Tensor:
        """What the model gave."""
        return shaped(self.raw.detach())

    @cached_property
    def f(self) -> Tensor:
        """The same, plus J (theta - w̃) where the network is evaluated elsewhere than at w̃."""
        shift = self.network.shift
        return self.own if shift is None else self.own + self.network.jvp(self.inputs, shift[None])[0].to(self.raw)

    def jacobians(self, seeds: Tensor | None = None) -> LayerJacobians:
        """The Jacobian of seeds · f. Seeds (K, B, [T,] C); None means every output of every token.

        One backward pass for all seeds to the recorded products; no weight gradient is formed. Parameters without a
        rule take one more pass together, when the first of them is asked for.
        """
        f = self.own
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
        opaque = cache(partial(self._fallback, seeds))
        parts = tuple(partial(self._block, block, seeds, grads, patterns, opaque) for block in self.network.layout)
        selection = self.network.selection
        size, dtype = f.shape[0], self.network.dtype
        return LayerJacobians(parts, self.network.layout, selection, size, seeds.shape[0], dtype, tokens)

    def _pulled_back(self, seeds: Tensor) -> tuple[dict[Any, Tensor], Mapping[Any, Pattern | None]]:
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
        if rest and self.differentiable:
            grads.update(zip(rest, differentiable_gradients(self.raw, rest, raw_seeds), strict=True))
        elif rest:
            found = gradients(self.raw, self.graph, rest, raw_seeds, self.network.recurrent)
            grads.update(zip(rest, found, strict=True))
        return grads, patterns

    def _block(
        self,
        block: Block,
        seeds: Tensor,
        grads: Mapping[Any, Tensor],
        patterns: Mapping[Any, Pattern | None],
        opaque: Callable[[], Mapping[str, Tensor]],
    ) -> BlockJacobian:
        if block.kind == "opaque":
            if self.differentiable:
                raise ModelError(
                    f"the Jacobian of {block.weight!r} has no rule ({block.why}) and cannot be differentiated in the "
                    "inputs. Leave it out with named(), or keep the inputs where they are: VaLLA(optimiser='none'), "
                    "with alpha=0 and without validation data."
                )
            return DenseJacobian(opaque()[block.weight])
        with torch.set_grad_enabled(self.differentiable):
            return self._read_off(block, seeds.to(self.network.dtype), grads, patterns)

    def _read_off(
        self, block: Block, seeds: Tensor, grads: Mapping[Any, Tensor], patterns: Mapping[Any, Pattern | None]
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
            grad = grads[use.node].to(seeds.dtype)
            part = use.form.jacobian(use.node, grad, pattern, block.bias is not None).to(seeds.dtype)
            if not block.linear and not isinstance(part, DenseJacobian):
                part = self._flat(use, block, part)
            total = part if total is None else total.joined(part)  # type: ignore[arg-type]
        return total if total is not None else self._unused(block, seeds)

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

    def _fallback(self, seeds: Tensor) -> dict[str, Tensor]:
        """The Jacobians (B, K, p) of all parameters without a rule, by name."""
        model, own = self.network.model, self.network.own(self.inputs)
        names = tuple(block.weight for block in self.network.layout if block.kind == "opaque")
        forward = lambda m, x: shaped(raw_output(m, x)).flatten(1)
        with recording(dict(model.named_parameters()), self.network.selection.names, self.network.plain):
            found = sample_jacobians(model, forward, self.inputs, own, self.own.flatten(1), names, seeds.flatten(2))
        return {name: jacobian.to(self.network.dtype) for name, jacobian in found.items()}


@dataclass(frozen=True, eq=False)
class Network:
    """A trained network, the weights that are uncertain, and how they fall into blocks."""

    model: nn.Module
    selection: Selection
    layout: tuple[Block, ...]
    output_shape: tuple[int, ...]  # of one sample: (C,) or (T, C)
    footprint: Footprint
    forward_mode: bool  # whether forward-mode products are defined for every operation
    recurrent: bool  # whether fused recurrent kernels must be switched off to see the products
    shift: Tensor | None = None  # theta - w̃ (P,), where the tangent model is evaluated elsewhere than at w̃
    known: dict[str, bool] = field(default_factory=dict, repr=False)  # which tensors have a row for each sample
    _seen: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, model: nn.Module, inputs: Inputs, weights: Weights | None = None) -> Network:
        """Look at the model once, with one batch, and refuse what cannot be handled.

        Cost: six forward passes, two over the whole batch, one over each half and two over a few samples; some more
        where there are several inputs with as many rows, and a few backward ones where row owners must be probed. The
        model is not changed.
        """
        model = unwrapped(model)
        refuse_training_mode(model)
        weights = all_weights if weights is None else weights
        tensors, recurrent = dict(model.named_parameters()), is_recurrent(model)
        plain = needs_plain_kernels(model)
        alone = batch_size(inputs) == 1
        known = {key: False for key, t in placed(inputs) if height(t) != 1} if alone else {}
        if alone:  # with one sample nothing tells its own rows from shared ones
            inputs = map_tensors(inputs, lambda t: torch.cat([t, t]) if t.ndim and t.shape[0] == 1 else t)
        with recording(tensors, weights.needs(model), plain), refusing_changes(model):
            raw = raw_output(model, inputs)
        f = shaped(raw.detach())
        check_finite(f, "outputs of the network")
        refuse_random(model, inputs)  # first: what is random looks mixed as well
        found = learned(model, inputs, raw.detach(), known, copied=alone)
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
        footprint = measured(layout, uses, shapes, raw.shape[0], f[0].numel())
        forward_mode = not recurrent and not _padded(graph)
        return cls(model, selection, layout, tuple(f.shape[1:]), footprint, forward_mode, recurrent, known=found)

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

    def slope(self, function: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """The gradient in the selected parameters, (P,), of a scalar function of all of them by name."""
        with torch.inference_mode(False), torch.enable_grad():
            fixed = {name: tensor.detach().to(self.dtype) for name, tensor in self.model.named_parameters()}
            leaves = {name: fixed[name].requires_grad_() for name in self.selection.names}
            value = scalar(function(fixed))
            if not value.requires_grad:
                raise ModelError(
                    "the function of the weights does not depend on them; expected one of the selected weights, "
                    f"{', '.join(self.selection.names):.200}, without detach() or item()."
                )
            grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        found = self.selection.picked(torch.cat([grad.reshape(-1) for grad in grads]))
        refuse_steep(value, found)
        return found

    def __call__(self, inputs: Inputs) -> Tensor:
        """The output f (B, [T,] C), no graph; of the tangent model where it is shifted."""
        with torch.no_grad(), plain_kernels(self.plain):
            f = self._expected(shaped(raw_output(self.model, inputs)))
        return f if self.shift is None else f + self.jvp(inputs, self.shift[None])[0].to(f)

    def _expected(self, f: Tensor) -> Tensor:
        """Outputs, refused where they are of another form than those that the network was built with."""
        if f.ndim != len(self.output_shape) + 1 or f.shape[-1] != self.output_shape[-1]:
            shape = ", ".join(map(str, self.output_shape))
            raise DataError(
                f"these inputs give outputs of shape {tuple(f.shape)}; expected (B, {shape}), as those before. Has x a "
                "batch dimension? For one input, give x[None]."
            )
        return f

    def weights(self, d: Tensor) -> dict[str, Tensor]:
        """The selected parameters by name with d (P,) added to them."""
        tensors, parts = dict(self.model.named_parameters()), self.selection.split(d)
        return {name: tensors[name].detach() + part.to(tensors[name]) for name, part in parts.items()}

    def under(self, weights: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """The network's own output f (B, [T,] C) with other weights, differentiable in them."""
        with plain_kernels(self.plain):
            return swapped(self.model, dict(weights), lambda: self._expected(shaped(raw_output(self.model, inputs))))

    def shifted(self, shift: Tensor | None) -> Network:
        """The tangent model at theta = w̃ + shift: its outputs move, its Jacobian stays where it is."""
        return replace(self, shift=None if shift is None else shift.to(self.device, self.dtype))

    def linearise(self, inputs: Inputs, differentiable: bool = False) -> Tangent:
        """One forward pass with a graph. ``differentiable`` keeps the way from the inputs to the Jacobians."""
        tensors = dict(self.model.named_parameters())
        with recording(tensors, self.selection.names, self.plain), twice_differentiable(differentiable):
            raw = raw_output(self.model, inputs)
            self._expected(shaped(raw))
        with torch.no_grad():
            graph = graphs.read(raw, raw.shape[0])
            uses = rules.find(graph, {id(tensors[name]): name for name in self.selection.names}, tensors)
        return Tangent(self, inputs, raw, graph, uses, differentiable)

    def tangents(
        self, inputs: Inputs, seeds: int | None = None, most: int | None = None
    ) -> Iterator[tuple[slice, Tangent]]:
        """The batch linearised in chunks of samples under the byte budget, with at most so many in each."""
        batch = self.count(inputs)
        seeds = torch.Size(self.output_shape).numel() if seeds is None else seeds
        for chunk in self.footprint.chunks(batch, seeds, self.dtype, self.device):
            for part in _split(chunk, most):
                whole = part == slice(0, batch)
                yield part, self.linearise(inputs if whole else self.take(inputs, part))

    def count(self, inputs: Inputs) -> int:
        """How many samples a batch has; the model runs only where its tensors leave that open."""
        found = counted(inputs, self.known)
        return self._learn(inputs) if found is None else found

    def own(self, inputs: Inputs) -> tuple[bool, ...]:
        """For each tensor of a batch, whether it has a row for each sample; all samples share the others."""
        if isinstance(inputs, Tensor):
            return (True,)
        batch = self.count(inputs)
        found = owned(inputs, self.known, batch)
        if found is None:
            self._learn(inputs)
            found = owned(inputs, self.known, batch)
        assert found is not None
        return found

    def take(self, inputs: Inputs, rows: slice | Tensor) -> Inputs:
        """Some samples of a batch."""
        return picked(inputs, self.own(inputs), rows)

    def _learn(self, inputs: Inputs) -> int:
        """Run the model to see which tensors go with the samples, and how many of those there are."""
        with torch.no_grad(), plain_kernels(self.plain):
            raw = raw_output(self.model, inputs)
        self.known.update(learned(self.model, inputs, raw, self.known))
        return raw.shape[0]

    def jvp(self, inputs: Inputs, v: Tensor) -> Tensor:
        """J v for every row of v (K, P): (K, B, [T,] C), in one vectorised forward-mode pass."""
        try:
            return products.jvp(self.model, self.selection, inputs, v, self.forward_mode, self.plain).to(self.dtype)
        except NotImplementedError:  # an operation with neither a forward rule nor a second derivative
            tangent = self.linearise(inputs)
            return tangent.jacobians().jvp(v.to(self.dtype)).reshape(len(v), *tangent.own.shape)

    def vjp(self, inputs: Inputs, u: Tensor) -> Tensor:
        """Jᵀ u, summed over the batch, for every u (K, B, [T,] C): (K, P)."""
        tangent = self.linearise(inputs)
        with plain_kernels(self.plain):
            back = products.vjp(
                self.model, self.selection, tangent.raw, u, loops(tangent.graph, tangent.raw, self.recurrent)
            )
        return back.to(self.dtype)

    def _patterns(self, tangent: Tangent) -> Mapping[Any, Pattern | None]:
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


def scalar(value: Any, of: str = "weights") -> Tensor:
    """What a function of the weights, or of something else, gave, (); refused where it is more than a number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
        raise ModelError(
            f"the function of the {of} gives {shape}; expected a tensor of one number. Take one entry, a sum or a mean."
        )
    return value.sum()


def refuse_steep(value: Tensor, slope: Tensor, of: str = "weights") -> None:
    """A function whose value or slope is no number has no variance."""
    steepest = float(slope.abs().max())
    if not math.isfinite(float(value.detach())) or not math.isfinite(steepest):
        raise ModelError(
            f"the function of the {of} gives {float(value.detach()):.3g} with slopes up to {steepest:.3g}; expected "
            "finite numbers. Give one that is smooth here: log_softmax for the log of a softmax, no root of nought."
        )


def _split(rows: slice, most: int | None) -> Iterator[slice]:
    """The rows in runs of at most ``most``, as even as they come."""
    count = rows.stop - rows.start
    runs = 1 if most is None else -(-count // most)
    for i in range(runs):
        yield slice(rows.start + i * count // runs, rows.start + (i + 1) * count // runs)


def measured(
    layout: tuple[Block, ...], uses: rules.Uses, shapes: Mapping[str, tuple[int, ...]], batch: int, outputs: int
) -> Footprint:
    """What one sample of these uses takes."""
    nodes = {use.node for use in uses.uses}
    width = sum(math.prod(graphs.output_shape(node)) for node in nodes) // batch
    patches = 0
    for use in uses.uses:
        if isinstance(use.form, Convolution):
            out, weight = graphs.output_shape(use.node), shapes[use.name]
            patches = max(patches, math.prod(out) // out[1] * math.prod(weight[1:]) * use.groups // batch)
    return Footprint(max(width, outputs), patches, _kept_whole(layout, uses, batch))


def _kept_whole(layout: tuple[Block, ...], uses: rules.Uses, batch: int) -> int:
    """Numbers for each sample and seed in Jacobians that are larger than the gradients they are read from.

    Those of opaque blocks live together, since one pass gives them all; of the others one at a time.
    """
    opaque, largest = 0, 0
    for block in layout:
        if block.kind == "opaque":
            opaque += block.size
        elif block.kind == "dense":
            nodes = {use.node for use in uses.uses if use.name == block.weight}
            read = sum(math.prod(graphs.output_shape(node)) for node in nodes) // batch
            largest = max(largest, block.size if block.size > read else 0)
    return opaque + largest


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
