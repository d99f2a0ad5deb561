"""The network as the rest of the package sees it: outputs, layer-wise Jacobians, and products with them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.data.batches import Data
from lapwing.data.inputs import Batch, Inputs, SampleRows, place_name, take, wants_slopes
from lapwing.errors import DataError, FileError
from lapwing.networks import passes
from lapwing.networks.examine import (
    examine,
    learn_rows,
    measure_sizes,
    pixel_targets,
    refuse_other_parameters,
    shapes_of_sample,
)
from lapwing.networks.fingerprint import Probe
from lapwing.networks.forward import (
    Path,
    Replica,
    arithmetic_of,
    borrow_copy,
    is_recurrent,
    needs_plain_kernels,
    output_and_features,
    output_without_graph,
    raw_output,
    recording,
    refuse_distributed,
    refuse_scripted,
    refuse_training_mode,
    refuse_unusable_parameters,
    select_kernels,
    unwrap,
    with_output_dim,
)
from lapwing.networks.graph import Layout, Patterns, find_patterns, read_graph
from lapwing.networks.jacobians import KINDS, Block, Entries, Footprint
from lapwing.networks.passes import forward_products
from lapwing.networks.pull import seed_by_seed
from lapwing.networks.rules import Pattern
from lapwing.networks.selection import Selection, Weights, all_weights
from lapwing.networks.tangent import LastLayerTangent, Tangent, compare
from lapwing.runtime.memory import concat_chunks
from lapwing.runtime.states import (
    MOST,
    Array,
    Either,
    Flag,
    Later,
    ListOf,
    MapOf,
    Maybe,
    PartOf,
    Record,
    State,
    Text,
    Whole,
    distinct,
    saved,
)
from lapwing.runtime.threads import math_attention
from lapwing.values.gaussian import DIMS, ChosenOutputs, ImageForm


def trainable_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that a training step changes."""
    return tuple(name for name, p in model.named_parameters() if p.requires_grad)


@dataclass(frozen=True)
class PlainPasses:
    """The network as it runs without Lapwing, on one batch."""

    forward: Callable[[], object]  # a forward pass without a graph
    training: Callable[[], object]  # a forward and a backward pass, to the gradients of the parameters


@contextmanager
def plain_passes(network: Network, inputs: Inputs, names: tuple[str, ...]) -> Iterator[PlainPasses]:
    """Yield the passes to run inside the block; gradients are those of the named parameters."""
    tensors = network.parameters
    with recording(tensors, names, network.plain_kernels), borrow_copy(network.replica) as one:
        parameters = [p for name, p in one.named_parameters() if name in names]

        def forward() -> None:
            with torch.no_grad():
                raw_output(one, inputs)

        def training() -> None:
            torch.autograd.grad(raw_output(one, inputs).sum(), parameters, allow_unused=True)

        yield PlainPasses(forward, training)


MAX_FOOTPRINT = 2**40  # of the numbers of a footprint


def read_facts(state: State, model: nn.Module) -> tuple[dict[str, Any], Tensor | None]:
    """Return the fields of the network of this model, and its shift; raise ``FileError`` if they do not fit it."""
    sizes, most = ListOf(Whole()), Whole(0, MAX_FOOTPRINT)
    layout = Record(
        Block, kind=Text(KINDS), weight=Text(), shape=sizes, bias=Maybe(Text()), groups=Whole(1), why=Text()
    )
    later = Later(most)
    fields = state.read(
        names=ListOf(Text()), shapes=ListOf(sizes), layout=ListOf(layout), output_shape=ListOf(Whole(1)),
        footprint=Record(
            Footprint, width=Whole(1, MAX_FOOTPRINT), patches=most, whole=most, graph=later, live=later, widest=later
        ),
        forward_mode=Flag(), recurrent=Flag(), normalised=Flag(), private=Flag(), known=MapOf(Flag()),
        shift=Maybe(Array((None,))), image=Later(ListOf(Whole(1))),
        output=Later(ListOf(Either(Text(), Whole(-MOST)))), head=Later(Text()),
        index=Maybe(Array((None,), 0, whole=True, also=distinct)), probe=Later(PartOf(Probe)),
    )  # fmt: skip
    names, shapes, shift = fields.pop("names"), fields.pop("shapes"), fields.pop("shift")
    selection = Selection(names, shapes, fields.pop("index"))
    refuse_other_parameters(selection, fields["layout"], model)
    if fields["recurrent"] != is_recurrent(model) or len(fields["output_shape"]) not in (1, 2):
        raise FileError("the file has other facts about the network than the model: recurrent layers, output shape")
    head = fields.get("head", "")
    if head and head not in [block.weight for block in fields["layout"] if block.linear]:
        raise FileError(f"the file has {head!r} as the last linear map; expected the weight of one of its blocks")
    image = fields.get("image", ())
    if image and (len(image) not in DIMS or (math.prod(image),) != fields["output_shape"][:-1]):
        raise FileError(f"the file has images {image} and outputs {fields['output_shape']}; expected their pixels")
    if shift is not None and len(shift) != selection.size:
        raise FileError(f"the file shifts {len(shift)} weights; expected {selection.size}")
    return {"selection": selection, **fields}, shift


@saved
@dataclass(frozen=True, eq=False)
class Network:
    """A trained network, the weights that are uncertain, and the blocks that they form."""

    model: nn.Module
    selection: Selection
    layout: Layout
    output_shape: tuple[int, ...]  # of a sample of the first batch: (C,) or (T, C); (H W, C) for images
    footprint: Footprint
    forward_mode: bool  # whether forward-mode products are defined for every operation
    recurrent: bool  # whether fused recurrent kernels must be switched off to see the products
    normalised: bool  # whether a norm follows some of the weights, whose scale it may cancel
    shift: Tensor | None = None  # theta - w̃ (P,), where the tangent model is evaluated at another point than w̃
    private: bool = True  # whether a private copy runs, see Replica
    known: Mapping[str, bool] = field(default_factory=dict, repr=False)  # see SampleRows.known
    last_operation: str = ""  # the operation that made the output, such as "sigmoid"; not saved
    head: str = ""  # the weight of the linear map that makes the outputs, if one does and it is selected
    image: tuple[int, ...] = ()  # (H, W) or (D, H, W) of the first batch if outputs are images; others may differ
    output: Path = ()  # which of several outputs of the model, by its keys and positions; empty for the only one
    probe: Probe | None = field(default=None, repr=False)  # by which a file knows the function that the model is
    _memory: _Memory = field(init=False, repr=False)

    @classmethod
    def build(cls, model: nn.Module, inputs: Inputs, weights: Weights | None = None, output: Path = ()) -> Network:
        """Build the network from a model and one batch; raise if the model cannot be handled.

        Cost: four forward passes, one over the whole batch, one over each half and one over a few samples; one more
        over the whole batch if the rule that selects weights needs others in the graph; some more if there are several
        inputs, and a few backward passes if a probe must decide which rows belong to which sample. Of a batch that is
        one tensor 13 samples are enough. The model is not changed.
        """
        model = unwrap(model)
        refuse_training_mode(model)
        refuse_distributed(model)
        refuse_scripted(model)
        refuse_unusable_parameters(model)
        seen = examine(model, inputs, all_weights if weights is None else weights, output)
        refuse_unusable_parameters(model, seen.facts["selection"].names)
        network = cls(model, **seen.facts, private=seen.replica.private, known=seen.rows.known, output=output)
        network._memory.replica = seen.replica
        network._memory.sizes.update(seen.sizes)
        flags = network._memory.rows.per_sample(inputs, network.count(inputs))
        vars(network)["probe"] = Probe.draw(inputs, flags, network.arithmetic)
        return network

    def state(self) -> State:
        """Return what a file needs, besides the model, to build the network again."""
        settings = {
            "names": self.selection.names, "shapes": self.selection.shapes,
            "layout": [asdict(block) for block in self.layout], "footprint": self.footprint.numbers,
            "output_shape": self.output_shape, "forward_mode": self.forward_mode, "recurrent": self.recurrent,
            "normalised": self.normalised, "private": self.private, "known": dict(self.known),
            **{name: value for name in ("image", "output", "head") if (value := vars(self)[name])},
        }  # fmt: skip
        tensors = {"index": self.selection.index, "shift": self.shift}
        parts = {} if self.probe_with_outputs is None else {"probe": self.probe_with_outputs.state()}
        return State("Network", settings, {name: t for name, t in tensors.items() if t is not None}, parts)

    @classmethod
    def from_state(cls, state: State, model: nn.Module) -> Network:
        """Build the network of this model from its state; raise ``OtherFunctionError`` if it is another function."""
        refuse_scripted(model)
        refuse_unusable_parameters(model)
        facts, shift = read_facts(state, model)
        network = cls(model, **facts).with_shift(shift)
        if network.probe is not None:
            network.probe.refuse_other(network._model_outputs, network.arithmetic, network.device)
        return network

    @cached_property
    def is_as_probed(self) -> bool:
        """Whether the network returns what the probe of its file has, far closer than machines may differ."""
        probe = self.probe
        return probe is not None and probe.is_reached(self._model_outputs, self.arithmetic, self.device)

    @cached_property
    def probe_with_outputs(self) -> Probe | None:
        """The probe with the outputs at its inputs; None if the network takes none."""
        return None if self.probe is None else self.probe.with_outputs(self._model_outputs, self.device)

    def _model_outputs(self, inputs: Inputs) -> Tensor:
        """Return the outputs of the model itself, without a graph."""
        return with_output_dim(output_without_graph(self.replica, inputs, self.plain_kernels))

    @cached_property
    def plain_kernels(self) -> bool:
        """Whether vendors' kernels must be switched off while the model runs."""
        return needs_plain_kernels(self.replica, self.recurrent)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(iter(self.parameters.values())).device

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of factors and Jacobians: the widest of the model's, and float32 at least."""
        dtypes = [p.dtype for p in self.parameters.values() if p.is_floating_point()]
        return reduce(torch.promote_types, dtypes, torch.float32)

    @cached_property
    def arithmetic(self) -> torch.dtype:
        """The dtype that the network itself computes in: the coarsest of its weights."""
        return arithmetic_of(self.replica)

    @property
    def entries(self) -> tuple[Entries, ...] | None:
        """The chosen entries of each block, where weights are chosen one by one; otherwise None."""
        if self.selection.index is None:
            return None
        known = self._memory.entries
        if known is None or known[0].at.device != self.device:
            known = self._memory.entries = Entries.of(self.layout, self.selection, self.device)
        return known

    def __post_init__(self) -> None:
        replica = Replica(self.model, self.selection.names, self.private, self.output)
        vars(self)["_memory"] = _Memory(SampleRows(self.known), replica)

    @property
    def replica(self) -> nn.Module:
        """The private copy of the model, which runs in its place: the model itself is never changed."""
        return self._memory.replica.model

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the private copy, by name."""
        return self._memory.replica.parameters

    def theta(self) -> Tensor:
        """Return the trained values of the selected weights, (P,)."""
        tensors = self.parameters
        full = torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.selection.names])
        return self.selection.pick(full)

    def __call__(self, inputs: Inputs) -> Tensor:
        """Return the output f (B, [T,] C); for a shifted network that of the tangent model.

        Without a graph, unless the inputs want slopes.
        """
        return self.in_chunks(inputs, self._outputs)

    def _outputs(self, inputs: Inputs) -> Tensor:
        if wants_slopes(inputs):
            return self.linearise(inputs).f
        f = self._require_known_form(self._model_outputs(inputs))
        return f if self.shift is None else f + self.jvp(inputs, self.shift[None])[0].to(f)

    def in_chunks(self, inputs: Inputs, run: Callable[[Inputs], Tensor], dim: int = 0) -> Tensor:
        """Return what ``run`` returns for a batch, in runs of samples whose activations fit the byte budget.

        Samples are along a dimension of the result. Often there is one run.
        """
        count = self._memory.rows.count(inputs)
        if count is None:  # only the outputs tell how many samples there are
            return run(inputs)
        parts = list(self.for_inputs(inputs).footprint.forward_runs(count, self.dtype, self.device))
        if len(parts) == 1:
            return run(inputs)
        return concat_chunks((run(self.take(inputs, part)) for part in parts), count, dim)

    def at(self, d: Tensor, inputs: Inputs) -> Tensor:
        """Return the output f (B, [T,] C) with d (P,) added to the selected weights, without a graph."""
        weights = self.weights(d)
        with torch.no_grad():
            return self.in_chunks(inputs, lambda part: self.outputs_under(weights, part))

    def _require_known_form(self, f: Tensor) -> Tensor:
        """Return the outputs; raise if they have another form than those that the network was built with."""
        if f.ndim != len(self.output_shape) + 1 or f.shape[-1] != self.output_shape[-1]:
            shape = ", ".join(map(str, self.output_shape))
            raise DataError(
                f"these inputs give outputs of shape {tuple(f.shape)}; expected (B, {shape}), as those before. Has x a "
                "batch dimension? For one input, give x[None]."
            )
        return f

    def image_form(self, inputs: Inputs) -> ImageForm | None:
        """Return the height and width of the images that these inputs give; None if outputs are not images.

        The first inputs of a shape cost a forward pass of one sample.
        """
        return ImageForm(self._sizes(inputs)) if self.image else None

    def _sizes(self, inputs: Inputs) -> tuple[int, ...]:
        """Return the sizes (H, W) or (D, H, W) of the images, or the number (T,) of tokens, that these inputs give."""
        key, known = shapes_of_sample(inputs, self.per_sample(inputs)), self._memory.sizes
        if key is None:  # samples of a set may differ
            return measure_sizes(self, inputs) if self.image else self.output_shape[:-1]
        if key not in known:
            known[key] = measure_sizes(self, inputs)
        return known[key]

    def for_inputs(self, inputs: Inputs) -> Network:
        """Return the network with the output shape and the footprint of these inputs, which both are of one sample.

        They are those of the first batch, and others for images of another size or sequences of another length. The
        first inputs of a shape cost a forward pass of one sample.
        """
        if len(self.output_shape) == 1:
            return self
        return self._of_shape((math.prod(self._sizes(inputs)), self.output_shape[-1]))

    def batch_size_for(self, inputs: Inputs, seeds: Callable[[Network], int] | None = None) -> int:
        """Return how many samples like these are worth joining into one pass.

        ``seeds`` returns how many seeds a sample has, given the network for these inputs; by default one per output.
        """
        network = self.for_inputs(inputs)
        count = torch.Size(network.output_shape).numel() if seeds is None else seeds(network)
        return network.footprint.batch_size_for(count, network.dtype, network.device)

    def _of_shape(self, shape: tuple[int, ...]) -> Network:
        """Return the network for samples whose outputs have this shape, (C,) or (T, C)."""
        if shape == self.output_shape:
            return self
        return self._same_model(
            output_shape=shape, footprint=self.footprint.for_positions(shape[0], self.output_shape[0])
        )

    def read_data(self, source: Any, name: str = "data", **options: Any) -> Data:
        """Return what a user gives as data, as this network reads them: on its device, and arrays in its dtype.

        ``options`` are further fields of ``Data``. The targets of images are arranged, those of ``Data`` too.
        """
        if isinstance(source, Data):
            return self.arrange_data(source)
        return self.arrange_data(Data(source, self.device, name=name, dtype=self.arithmetic, **options))

    def arrange_data(self, data: Data) -> Data:
        """Return the data with the targets of every batch in the form of the outputs, see ``arrange_targets``."""
        return replace(data, arrange=self.arrange_targets) if self.image else data

    def arrange_targets(self, batch: Batch) -> Batch:
        """Return the batch with targets in the form of the outputs: those of images (B, [C,] H, W) as (B, H W, [C])."""
        form = self.image_form(batch.inputs)
        return batch if form is None else pixel_targets(batch, form, self.output_shape[-1])

    def weights(self, d: Tensor) -> dict[str, Tensor]:
        """Return the selected parameters by name, with d (P,) added to them."""
        tensors, parts = self.parameters, self.selection.split(d)
        return {name: tensors[name].detach() + part.to(tensors[name]) for name, part in parts.items()}

    def outputs_under(self, weights: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the network's output f (B, [T,] C) with other weights, differentiable in them."""
        with select_kernels(self.plain_kernels):
            return self._require_known_form(with_output_dim(raw_output(self.replica, inputs, weights)))

    def with_shift(self, shift: Tensor | None) -> Network:
        """Return the tangent model at theta = w̃ + shift: its outputs change, its Jacobian does not."""
        return self._same_model(shift=None if shift is None else shift.to(self.device, self.dtype))

    @cached_property
    def blockwise(self) -> Network:
        """This network for sums over blocks: chunks are larger, since few gradients are in memory at once.

        Its Jacobians are for one use, by ``each``: any other holds all gradients, and chunks are too large for that.
        """
        return self._same_model(footprint=replace(self.footprint, streams=True))

    @cached_property
    def keeping_gradients(self) -> Network:
        """This network for Jacobians that are used several times: the gradients of all layers are in memory."""
        return self._same_model(footprint=replace(self.footprint, streams=False))

    def _same_model(self, **changes: Any) -> Network:
        network = replace(self, **changes)
        vars(network)["_memory"] = self._memory  # facts about batches hold for both
        of_model = ("plain_kernels", "dtype", "arithmetic")
        vars(network).update({name: vars(self)[name] for name in of_model if name in vars(self)})
        return network

    def linearise(self, inputs: Inputs, differentiable: bool | None = None) -> Tangent:
        """Run the model once with a graph. ``differentiable`` keeps the path from the inputs to the Jacobians.

        None keeps it if the inputs want slopes.
        """
        differentiable = wants_slopes(inputs) if differentiable is None else differentiable
        tensors = self.parameters
        # The fused kernels of attention have no second derivative.
        kernels = math_attention if differentiable else contextlib.nullcontext()
        with recording(tensors, self.selection.names, self.plain_kernels), kernels:
            raw = raw_output(self.replica, inputs)
            f = self._require_known_form(with_output_dim(raw))
        with torch.no_grad():
            graph = read_graph(raw, tensors, self.selection.names)
        return Tangent(self._of_shape(tuple(f.shape[1:])), inputs, raw, graph, differentiable)

    def tangents(
        self, inputs: Inputs, seeds: int | None = None, most: int | None = None, chosen: ChosenOutputs | None = None,
        graph: bool = True,
    ) -> Iterator[tuple[slice, Tangent]]:  # fmt: skip
        """Yield the batch linearised in chunks that fit the byte budget, of at most ``most`` samples each.

        With ``chosen``, the tangents are those of some outputs. Without ``graph`` they need not have one.
        """
        network, batch = self.for_inputs(inputs), self.count(inputs)
        shape = network.output_shape if chosen is None else chosen.shape(network.output_shape)
        seeds = torch.Size(shape).numel() if seeds is None else seeds
        for part in network.footprint.chunks(batch, seeds, network.dtype, network.device, most):
            whole = part == slice(0, batch)
            rows = inputs if whole else network.take(inputs, part)
            tangent = network.linearise(rows) if graph else network.tangent_of_features(rows)
            yield part, tangent if chosen is None else replace(tangent, chosen=chosen.samples(part))

    @cached_property
    def last_linear(self) -> str | None:
        """The name of the ``nn.Linear`` that makes the outputs (B, C), if its weights are the selected ones.

        Its input and unit vectors are then the Jacobian, without a graph. A copy of the model must run.
        """
        block, name = self.layout[0], self.head.rpartition(".")[0]
        lone = len(self.layout) == 1 and block.weight == self.head and self.selection.index is None
        lone = lone and block.bias in (None, f"{name}.bias" if name else "bias")
        if not (lone and self.head and self.private and len(self.output_shape) == 1 and not self.plain_kernels):
            return None
        layer = self.replica.get_submodule(name)
        weight = getattr(layer, "weight", None)
        users = [n for n, p in self.replica.named_parameters(remove_duplicate=False) if p is weight]
        same = type(layer) is nn.Linear and "forward" not in vars(layer) and len(users) == 1
        return name if same and self.arithmetic == self.dtype and self.shift is None else None

    def features(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        """Return the outputs f (B, C) and the inputs (B, D) of the last layer, without a one for its bias.

        None unless ``last_linear`` is the only map that these outputs depend on with selected weights, or if they want
        slopes.
        """
        if self.last_linear is None or not self._memory.ends_linear or wants_slopes(inputs):
            return None
        both = output_and_features(self.replica, inputs, self.last_linear)
        if both is None or both[0].ndim != 2 or not both[0].dtype == both[1].dtype == self.dtype:
            self._memory.ends_linear = False  # do not run the model twice the next time
            return None
        return self._require_known_form(both[0]), both[1]

    def features_at_once(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        """Return ``features``, if there are any and all samples together fit the byte budget."""
        if self.last_linear is None or not isinstance(inputs, Tensor):
            return None
        runs = self.footprint.forward_runs(len(inputs), self.dtype, self.device)
        return self.features(inputs) if next(runs, slice(0)).stop == len(inputs) else None

    def tangent_of_features(self, inputs: Inputs) -> Tangent:
        """Return the batch linearised for predictions: without a graph where the features tell the Jacobian."""
        both = self.features(inputs)
        return self.linearise(inputs) if both is None else LastLayerTangent(self, inputs, both[0], features=both[1])

    def count(self, inputs: Inputs) -> int:
        """Return how many samples a batch has; the model runs only where the tensors do not tell."""
        count = self._memory.rows.count(inputs)
        return self._learn_rows(inputs) if count is None else count

    def per_sample(self, inputs: Inputs) -> tuple[bool, ...]:
        """Return for each tensor of a batch whether it has a row for each sample; all samples share the others."""
        batch = self.count(inputs)
        self._memory.rows.refuse_change(inputs, batch)
        if self._memory.rows.is_undecided(inputs, batch):
            self._learn_rows(inputs)
        return self._memory.rows.per_sample(inputs, batch)

    @property
    def input_places(self) -> frozenset[str]:
        """The names of the places of the input tensors, where there are several; empty for one tensor."""
        return frozenset(map(place_name, self._memory.rows.known))

    def take(self, inputs: Inputs, rows: slice | Tensor) -> Inputs:
        """Return some samples of a batch."""
        return take(inputs, self.per_sample(inputs), rows)

    def _learn_rows(self, inputs: Inputs) -> int:
        """Run the model to see which tensors have a row for each sample, and return how many samples there are."""
        with select_kernels(self.plain_kernels):
            raw = output_without_graph(self.replica, inputs)
            self._memory.rows = learn_rows(self.replica, inputs, raw, self._memory.rows)
        return raw.shape[0]

    def jvp(self, inputs: Inputs, v: Tensor) -> Tensor:
        """Return J v for every row of v (K, P): (K, B, [T,] C), by forward mode, in chunks that fit the byte budget."""
        return forward_products(self, inputs, v)[1]

    def vjp(self, inputs: Inputs, u: Tensor) -> Tensor:
        """Return Jᵀ u, summed over the batch, for every u (K, B, [T,] C): (K, P); in chunks that fit the budget."""
        total: Tensor | None = None
        for part, tangent in self.tangents(inputs, len(u)):
            looped = seed_by_seed(tangent.graph, tangent.raw, self.recurrent)
            product = passes.vjp(self, tangent.raw, u[:, part], looped).to(self.dtype)
            total = product if total is None else total.add_(product)
        assert total is not None
        return total

    def refuse_wrong(self, tangent: Tangent) -> None:
        """Compare the Jacobian of the first batch of every graph with autograd's; raise if they differ."""
        checked, graph = self._memory.checked, tangent.graph
        key = graph.signature, tangent.differentiable
        if key in checked:
            return
        form = graph.form, tangent.differentiable
        if form not in checked:
            with select_kernels(self.plain_kernels):
                compare(tangent, first=not checked)
        checked |= {key, form}

    def patterns(self, tangent: Tangent) -> Patterns:
        """Return which rows belong to which sample, remembered where the shapes alone decide it."""
        raw, graph = tangent.raw, tangent.graph
        nodes = list(dict.fromkeys(use.node for use in graph.uses))
        if all(graph.batch_major[node] for node in nodes):
            return find_patterns(raw, graph, self.recurrent)[0]
        key = (len(raw), graph.signature, tuple((use.name, use.kind) for use in graph.uses))
        remembered = self._memory.patterns
        if key not in remembered:
            patterns, certain = find_patterns(raw, graph, self.recurrent)
            if not graph.follows_shapes or not certain:
                return patterns
            remembered[key] = [patterns[node] for node in nodes]
        return dict(zip(nodes, remembered[key], strict=True))


@dataclass(eq=False)
class _Memory:
    """Facts that batches showed after the network was built; mutable, no part of its value, and not saved."""

    rows: SampleRows
    replica: Replica
    patterns: dict[object, list[Pattern | None]] = field(default_factory=dict)
    sizes: dict[object, tuple[int, ...]] = field(default_factory=dict)  # of outputs: see _sizes
    entries: tuple[Entries, ...] | None = None  # see Network.entries
    ends_linear: bool = True  # whether all outputs so far were those of the last layer as they are, see last_linear
    checked: set[object] = field(default_factory=set)  # the graphs whose Jacobians agree with autograd's
