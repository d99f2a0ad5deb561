"""The examination of a model by one batch: its weights and blocks, and whether each output depends on one sample alone.

A model must be a function of its input alone, and of one sample at a time; others are refused.

``data/inputs.py`` has the rule for which tensors of a batch have a row for each sample. A tensor may have as many rows
as there are samples by chance, so ``learn`` tests such a tensor when it first occurs: no output may depend on a row of
another sample. A batch that fails is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lapwing.data.inputs import (
    Batch,
    Inputs,
    Leaf,
    SampleRows,
    check_finite,
    has_sets,
    map_leaves,
    map_tensors,
    named_leaves,
    place_name,
    take,
)
from lapwing.errors import DataError, FileError, InputError, ModelError
from lapwing.networks.forward import (
    Bypass,
    Path,
    Replica,
    as_positions,
    can_be_copied,
    is_recurrent,
    model_output,
    needs_plain_kernels,
    output_without_graph,
    raw_output,
    recording,
    select_kernels,
    with_output_dim,
    without_unused,
)
from lapwing.networks.graph import (
    Graph,
    Layout,
    arrange_blocks,
    find_patterns,
    forward_differs,
    read_graph,
    refuse_wrong_gradients,
)
from lapwing.networks.jacobians import Footprint, are_few
from lapwing.networks.ops import operation
from lapwing.networks.pull import numbers_at_once
from lapwing.networks.rules import Node, Use, output_numbers
from lapwing.networks.selection import Selection, Weights, find_head
from lapwing.runtime.memory import LargestResult
from lapwing.values.gaussian import ImageForm

if TYPE_CHECKING:
    from lapwing.networks.network import Network


ADVICE = "Has x a batch dimension? For one input, give x[None]."


def shapes_of_sample(inputs: Inputs, per_sample: Sequence[bool]) -> tuple[torch.Size, ...] | None:
    """Return the shapes of the tensors that one sample is made of; None if there are sets of samples among them."""
    leaves = [leaf for _, leaf in named_leaves(inputs)]
    if has_sets(inputs):
        return None
    return tuple(leaf.shape[1:] if each else leaf.shape for each, leaf in zip(per_sample, leaves, strict=True))


def measure_sizes(network: Network, inputs: Inputs) -> tuple[int, ...]:
    """Return (H, W) or (D, H, W) of the images that these inputs give, or (T,) of tokens.

    By a forward pass of one sample.
    """
    one = map_tensors(network.take(inputs, slice(0, 1)), lambda t: t.to(network.device))
    try:
        with torch.no_grad(), select_kernels(network.plain_kernels):
            out = model_output(network.replica, one)
    except InputError as error:
        raise InputError(f"{error} This was the first sample alone. {ADVICE}") from error
    dims, channels = len(network.image) or 1, network.output_shape[-1]
    if out.ndim != dims + 2 or out.shape[1 if network.image else 2] != channels:
        form = f"{channels}, {', '.join('DHW'[-dims:])}), images" if network.image else f"T, {channels}), tokens"
        raise DataError(
            f"the first of these inputs gives outputs of shape {tuple(out.shape)}; expected (1, {form} as before. "
            f"{ADVICE}"
        )
    return tuple(out.shape[2:] if network.image else out.shape[1:2])


def pixel_targets(batch: Batch, form: ImageForm, channels: int) -> Batch:
    """Return the batch with the targets of images as those of their pixels; raise if their sizes are others."""
    y, advice = batch.targets, ""
    if tuple(y.shape[1:]) == (channels, *form.sizes[:-1]) and not y.is_floating_point():
        advice = (
            " The targets fit outputs with the channels last: wrap the model in a module whose forward returns "
            "model(x).movedim(-1, 1)."
        )
    try:
        return replace(batch, targets=form.targets(y))
    except DataError as error:
        raise DataError(f"{error}{advice}") from error


COMPARED_SAMPLES = 32  # samples that show whether two forward passes agree
EXAMINED_SAMPLES = 13  # with which a model is examined; a prime, which few other dimensions are
RUN_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # by how much outputs may differ where kernels reorder sums


def first_samples(inputs: Inputs) -> Inputs:
    """Return the first samples of a batch that is one tensor, enough to examine a model. Leave other batches whole."""
    return inputs[:EXAMINED_SAMPLES] if isinstance(inputs, Tensor) and inputs.ndim else inputs


@contextlib.contextmanager
def refusing_changes(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model for a run. Restore weights and buffers that it changes, and raise; its own errors come first."""
    buffers = [(module, key, buffer) for module in model.modules() for key, buffer in module._buffers.items()]
    copies = [(t, t.detach().clone()) for t in (*model.parameters(), *(b for _, _, b in buffers if b is not None))]
    try:
        yield model
    finally:
        changed = any(module._buffers.get(key) is not buffer for module, key, buffer in buffers)
        for module, key, buffer in buffers:
            module._buffers[key] = buffer
        with torch.no_grad():
            for tensor, before in copies:
                if torch.equal(tensor, before):  # quick, and true unless something is NaN
                    continue
                if not torch.isclose(tensor, before, rtol=0, atol=0, equal_nan=True).all():
                    changed = True
                    tensor.copy_(before)
    if changed:
        raise ModelError(
            "running the model changes its own weights or buffers (running statistics, spectral norm, an embedding's "
            "max_norm, a counter); expected a function of the input alone. They were restored. Call model.eval(), or "
            "remove what changes them."
        )


def first_run(replica: Replica, inputs: Inputs) -> tuple[Replica, nn.Module, Tensor, tuple[int, ...]]:
    """Return the replica, the module that ran, the output with its graph, and the sizes (H, W) if it is an image.

    The replica is one without a private copy if that is bypassed.
    """
    one = replica.throwaway_copy()
    tensors = dict(one.named_parameters())
    with Bypass(replica.source) as watch, refusing_changes(one), recording(tensors, replica.names):
        out = model_output(one, inputs)
        raw = as_positions(out)
    if not replica.private or not watch.is_bypassed:
        return replica, one, raw, tuple(out.shape[2:]) if out.ndim > 3 else ()
    return first_run(replace(replica, private=False), inputs)


def refuse_random(model: nn.Module, inputs: Inputs, first: Tensor) -> None:
    """Raise if another forward pass of the module that gave ``first`` differs from it.

    For a single input tensor a few samples are enough.
    """
    few = inputs
    if len(list(named_leaves(inputs))) == 1:  # of several, one may be shared by all samples
        few, first = take(inputs, (True,), slice(COMPARED_SAMPLES)), first[:COMPARED_SAMPLES]
    second = output_without_graph(model, few)
    allowed = max(RUN_TOLERANCE.get(dtype, 4 * torch.finfo(dtype).eps) for dtype in _dtypes(model, first))
    if first.shape == second.shape:
        gap, scale = (first.double() - second.double()).abs().max(), first.double().abs().max()
        if not bool(gap > allowed * scale):
            return
        difference = f"differ by {(gap / scale).item():.2g} of the largest output; expected at most {allowed:.2g}"
    else:
        difference = f"give the shapes {tuple(first.shape)} and {tuple(second.shape)}; expected the same"
    raise ModelError(
        f"two forward passes over the same inputs {difference}: the forward pass is random, or remembers earlier "
        "calls. Switch off what draws numbers in evaluation mode too (F.dropout without training=self.training, noise, "
        "sampling), or use deterministic kernels."
    )


def relative_gap(model: nn.Module, alone: Tensor, within: Tensor, whole: Tensor) -> tuple[Tensor, float]:
    """Return the relative gap between outputs of samples alone and in a batch, and the largest due to rounding."""
    gap = (alone.float() - within.float()).abs().max() / whole.float().abs().max().clamp_min(1e-6)
    return gap, 1e3 * max(torch.finfo(dtype).eps for dtype in _dtypes(model, whole)) ** 0.75


def _dtypes(model: nn.Module, output: Tensor) -> set[torch.dtype]:
    """Return the dtypes that a forward pass rounds in: a float64 head may sit on a float32 body."""
    return {output.dtype, *(p.dtype for p in model.parameters() if p.is_floating_point())}


def _refuse_mixed_samples(model: nn.Module, inputs: Inputs, raw: Tensor, per_sample: Sequence[bool]) -> None:
    """Raise if f(x)[b] depends on other samples; ``per_sample`` says which tensors have a row for each sample."""
    batch = raw.shape[0]
    if batch == 1:
        return
    half = (batch + 1) // 2
    gap = torch.zeros((), device=raw.device)
    for rows in (slice(0, half), slice(half, batch)):
        try:
            alone = output_without_graph(model, take(inputs, per_sample, rows))
        except (IndexError, RuntimeError) as error:
            if all(per_sample):
                raise
            raise ModelError(
                f"the model takes {batch} samples, but not some of them: {error}; expected that samples can be run "
                "apart. Where samples are not rows of tensors, as in graphs, say how they are split: "
                "lw.samples.SampleSet, or lw.samples.OneSample for one graph with a target for each node."
            ) from error
        count = rows.stop - rows.start
        if alone.shape[0] != count:
            raise ModelError(f"half a batch gives {alone.shape[0]} outputs; expected {count}: one for each sample.")
        if alone.shape[1:] != raw.shape[1:]:
            return  # dynamic padding: lengths follow the batch
        half_gap, allowed = relative_gap(model, alone, raw[rows], raw)
        gap = torch.maximum(gap, half_gap)
    if not bool(gap < allowed):
        hint = f" If all samples share an input that has {batch} rows by chance, use another batch size."
        raise ModelError(
            f"the output for a sample changes by {gap.item():.2g} (relative) with the rest of its batch; "
            "expected independent samples. Put normalisation in evaluation mode, or give the model one sample's "
            f"context inside its own input.{hint if sum(per_sample) > 1 else ''}"
        )


def learn_rows(
    model: nn.Module, inputs: Inputs, raw: Tensor, rows: SampleRows, is_repeated: bool = False
) -> SampleRows:
    """Return which tensors have a row for each sample, as known after this batch; raise if samples mix.

    ``raw`` are the outputs. A batch that repeats one sample, ``is_repeated``, shows nothing new.
    """
    batch = raw.shape[0]
    per_sample = rows.per_sample(inputs, batch)
    if len(per_sample) == 1:  # one tensor alone is never shared by all samples
        _refuse_mixed_samples(model, inputs, raw, per_sample)
        return rows
    rows.refuse_change(inputs, batch)
    uncertain = rows.is_undecided(inputs, batch) and not is_repeated
    if uncertain:
        _refuse_dependent(model, inputs, per_sample, batch)
    _refuse_mixed_samples(model, inputs, raw, per_sample)
    if uncertain:
        _refuse_pooled(model, inputs, per_sample, batch)
    return rows if is_repeated or batch == 1 else rows.with_batch(inputs, batch)


def _refuse_dependent(model: nn.Module, inputs: Inputs, per_sample: tuple[bool, ...], batch: int) -> None:
    """Raise if the gradient of an output of one half of the batch is not zero in rows of the other half."""
    try:
        crossed = _depends_on_other_half(model, inputs, per_sample, batch)
    except (RuntimeError, NotImplementedError):
        return  # no gradient in the inputs: runs of parts must do
    names = _names(inputs, crossed)
    if names and sum(crossed) < sum(per_sample):  # all tensors: the model itself mixes samples, refused elsewhere
        raise DataError(
            f"{names} has as many rows as there are samples, {batch}, but every sample depends on all; expected "
            "a row for each sample, or another number of rows where all samples share the tensor. Use another batch "
            "size, or expand it to one for each sample."
        )


def _names(inputs: Inputs, flags: Sequence[bool]) -> str:
    return ", ".join(place_name(key) for (key, _), flag in zip(named_leaves(inputs), flags, strict=True) if flag)


def _depends_on_other_half(model: nn.Module, inputs: Inputs, per_sample: tuple[bool, ...], batch: int) -> list[bool]:
    """Return for each tensor whether outputs of one half of the batch have gradients in its rows of the other half."""
    leaves: dict[int, Tensor] = {}
    numbers = iter(range(len(per_sample)))

    def with_gradient(t: Leaf) -> Leaf:
        number = next(numbers)
        if not per_sample[number] or not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        leaves[number] = t.detach().clone().requires_grad_()
        return leaves[number].clone()  # a model may write into its inputs

    with torch.inference_mode(False), torch.enable_grad():
        raw = _perturbed_output(model, map_leaves(inputs, with_gradient))
        crossed = [False] * len(per_sample)
        first, second = slice(0, batch // 2), slice(batch // 2, batch)
        for half, others in ((first, second), (second, first)):
            if not leaves or not raw.requires_grad:
                break
            seed = torch.randn(raw[half].shape, generator=torch.Generator().manual_seed(0)).to(raw)
            grads = torch.autograd.grad(raw[half], list(leaves.values()), seed, retain_graph=True, allow_unused=True)
            for number, grad in zip(leaves, grads, strict=True):
                limit = 0.0 if grad is None else 64 * torch.finfo(grad.dtype).eps * float(grad.abs().max())
                crossed[number] |= grad is not None and float(grad[others].abs().max()) > limit
    return crossed


def _refuse_pooled(model: nn.Module, inputs: Inputs, per_sample: tuple[bool, ...], batch: int) -> None:
    """Raise if some samples, run alone and in another order, have different outputs than in the batch."""
    some = torch.randperm(batch, generator=torch.Generator().manual_seed(0))[: max(2, (batch + 2) // 3)]
    with torch.no_grad():
        whole, alone = _perturbed_output(model, inputs), _perturbed_output(model, take(inputs, per_sample, some))
    if alone.shape[1:] != whole.shape[1:]:
        return  # dynamic padding: lengths follow the batch
    gap, allowed = relative_gap(model, alone, whole[some.to(whole.device)], whole)
    if not bool(gap < allowed):
        raise DataError(
            f"of {_names(inputs, per_sample)}, each with as many rows as there are samples, {batch}, one is shared: "
            f"the output for a sample changes by {gap.item():.2g} (relative) where rows of the others are left out; "
            "expected a row for each sample. Use another batch size, or expand what all samples share to one for each."
        )


def _perturbed_output(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the output with zero weights perturbed, so that zero-initialised gates do not hide a dependence."""
    weights = {name: p.detach() for name, p in model.named_parameters() if bool((p == 0).any())}
    perturbed = {name: p.masked_fill(p == 0, 0.01) for name, p in weights.items()}
    output = raw_output(model, inputs, perturbed)
    return output if bool(output.isfinite().all()) else raw_output(model, inputs)


def refuse_other_parameters(selection: Selection, layout: Layout, model: nn.Module) -> None:
    """Raise ``FileError`` unless the selection and the blocks from a file are those of this model's parameters."""
    tensors = {name: tuple(p.shape) for name, p in model.named_parameters() if p.is_floating_point()}
    if not selection.names or selection.shapes != tuple(tensors.get(name) for name in selection.names):
        raise FileError(f"the file selects {selection.names!r:.80}, which are not parameters of these shapes")
    covered = [name for block in layout for name in block.names]
    if sorted(covered) != sorted(selection.names) or len(set(covered)) != len(covered):
        raise FileError("the blocks of the file do not have each selected parameter once")
    index = selection.index
    if index is not None and (not len(index) or int(index.max()) >= selection.total):
        raise FileError(f"the file selects single weights beyond the {selection.total} of its parameters, or none")
    for block in layout:
        wide = block.linear and len(block.shape) >= 2 and block.shape[0] % block.groups == 0
        single = not block.linear and block.groups == 1 and block.bias is None
        bias = None if block.bias is None else (block.groups * block.d_out,)
        if (
            block.shape != tensors[block.weight]
            or not (wide or single)
            or bias not in (None, tensors.get(block.bias or ""))
        ):
            raise FileError(f"the block of {block.weight!r} in the file does not fit the parameter")


def footprint(
    layout: Layout, graph: Graph, raw: Tensor, outputs: int, recurrent: bool, counts: Mapping[str, int] | None = None
) -> Footprint:
    """Return the memory of one sample, measured on the graph of a batch with this many outputs for each sample.

    ``counts`` has the number of chosen entries of each parameter, where they are chosen one by one.
    """
    batch = len(raw)
    width = _gradient_numbers(graph.uses) // batch
    patches = max((use.patch_size // batch for use in graph.uses), default=0)
    # Jacobians that are larger than the gradients they are read from. Those of opaque blocks exist together, since one
    # pass gives them all; of the others one at a time.
    opaque, largest = 0, 0
    for block in layout:
        if not block.has_rule:
            opaque += block.size
        elif not block.linear or counts is not None:
            read_graph = _gradient_numbers(use for use in graph.uses if use.name == block.weight) // batch
            formed = block.size
            if block.linear and counts is not None:  # its columns, where they are few
                count = sum(counts[name] for name in block.names)
                few = are_few(count, block.size, outputs, read_graph // (block.groups * block.d_out))
                formed = count if few else 0
            largest = max(largest, formed if formed > read_graph else 0)
    computed = sum(map(output_numbers, _result_nodes(graph)))
    at_once = None if recurrent else numbers_at_once(graph, {use.node for use in graph.uses}, raw.dtype)
    live = width if at_once is None else min(width, at_once // batch)
    return Footprint(max(width, outputs), patches, opaque + largest, computed // batch, max(live, outputs))


def _result_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes whose output is a result of its own: no parameter, and no view of another result."""
    return (
        node for node, facts in graph.operations.items() if not facts.carries_parameter and node not in graph.leaves
    )


def _gradient_numbers(uses: Iterable[Use]) -> int:
    """Return how many numbers the gradients at the nodes of these uses have, for each seed."""
    return sum(output_numbers(node) for node in {use.node for use in uses})


@dataclass(frozen=True, eq=False)
class Examined:
    """Facts about a model, and what the batch showed on the way."""

    facts: dict[str, Any]  # the fields of a ``Network``, by name
    rows: SampleRows
    replica: Replica
    sizes: dict[object, tuple[int, ...]]  # of the outputs, by the shapes of the inputs


def examine(model: nn.Module, inputs: Inputs, weights: Weights, output: Path) -> Examined:
    """Run the model with one batch, read the graph of its output, and return what they show; see ``Network.build``."""
    recurrent = is_recurrent(model)
    with select_kernels(needs_plain_kernels(model, recurrent)):
        return _examine(model, inputs, weights, output, recurrent)


def _examine(model: nn.Module, inputs: Inputs, weights: Weights, output: Path, recurrent: bool) -> Examined:
    needed = weights.needs(model)
    replica = Replica(model, needed, can_be_copied(model), output)
    inputs, rows, is_one_sample = _with_several_samples(first_samples(inputs), replica)
    replica, one, raw, image = first_run(replica, inputs)
    tensors = dict(replica.model.named_parameters())
    f = with_output_dim(raw.detach())
    check_finite(f, "outputs of the network")
    refuse_random(one, inputs, raw.detach())  # first: random outputs look like mixed samples
    rows = learn_rows(replica.model, inputs, raw.detach(), rows, is_repeated=is_one_sample)
    if raw.grad_fn is None:
        raise ModelError("the output does not depend on any selected parameter; choose other weights.")
    graph = read_graph(raw, tensors, needed)
    refuse_wrong_gradients(graph)
    selection = weights.choose(model, graph)
    if output and selection.index is None:
        selection = without_unused(selection, raw, tensors)
    per_sample = rows.per_sample(inputs, len(raw))
    widest = max(map(output_numbers, _result_nodes(graph)), default=0) // len(raw)  # of one sample
    if len(needed) < len(tensors):  # layers before them are not in the graph
        widest = max(widest, _widest_of_all(replica, take(inputs, per_sample, slice(0, 2))))
    if selection.names != needed:
        raw, graph = _rerun(replica, selection, inputs)
    patterns, _ = find_patterns(raw, graph, recurrent)
    layout = arrange_blocks(graph, patterns, dict(zip(selection.names, selection.shapes, strict=True)))
    sizes = replace(footprint(layout, graph, raw, f[0].numel(), recurrent, selection.counts), widest=widest)
    head = find_head(graph, layout)
    facts = {
        "selection": selection, "layout": layout, "output_shape": tuple(f.shape[1:]), "footprint": sizes,
        "forward_mode": not recurrent and not forward_differs(graph), "recurrent": recurrent,
        "normalised": _is_normalised(model, graph), "last_operation": graph.last,
        "head": "" if head is None else head.use.name, "image": image,
    }  # fmt: skip
    sample = shapes_of_sample(inputs, per_sample)
    return Examined(facts, rows, replica, {sample: image or (f.shape[1],)} if f.ndim == 3 else {})


def _with_several_samples(inputs: Inputs, replica: Replica) -> tuple[Inputs, SampleRows, bool]:
    """Return inputs of several samples, what is known about their rows, and whether there was a single sample.

    A single sample does not show which rows all samples share: it is taken twice.
    """
    rows = SampleRows()
    count = rows.count(inputs)
    if count is None:  # only the outputs tell how many samples there are
        one = replica.throwaway_copy()
        # With gradients: a value that the model keeps from its first run must lead back to the parameters.
        with refusing_changes(one), recording(dict(one.named_parameters()), replica.names):
            count = len(raw_output(one, inputs))
    if count != 1:
        return inputs, rows, False
    rows = rows.with_batch(inputs, 1)
    if not has_sets(inputs):  # a set says itself whose rows are whose
        inputs = take(inputs, rows.per_sample(inputs, 1), torch.zeros(2, dtype=torch.long))
    return inputs, rows, True


def _widest_of_all(replica: Replica, two: Inputs) -> int:
    """Return how many numbers the largest result of an operation has for each of two samples, in the graph or not."""
    with LargestResult() as largest:
        output_without_graph(replica.model, two)
    return largest.numbers // 2


def _rerun(replica: Replica, selection: Selection, inputs: Inputs) -> tuple[Tensor, Graph]:
    """Run the model again with the selected weights alone in the graph."""
    replica.record(selection.names)
    with recording(replica.parameters, selection.names):
        raw = raw_output(replica.model, inputs)
    return raw, read_graph(raw, replica.parameters, selection.names)


def _is_normalised(model: nn.Module, graph: Graph) -> bool:
    """Return whether a norm follows some of the weights."""
    follows = (operation(node).norm(node) and node.next_functions[0][0] for node in graph.nodes)
    return any(follows) or any(isinstance(module, nn.RMSNorm) for module in model.modules())
