"""Runs of the model: modes of PyTorch, the private copy, models of frameworks, and the output that is used.

Models and data of training frameworks (a skorch net, a Lightning module, Trainer or data module) are recognised by the
attributes that they document, here and nowhere else, so that no framework is imported.

The model itself never runs: a private copy runs in its place. The copy has modules of its own and shares the memory of
the tensors, so nothing is stored twice. Weights are exchanged, gradients recorded and attributes written in the copy
alone. A call takes a copy that no other call uses: threads do not meet, and a copy that an error or Ctrl-C leaves half
changed is dropped. What a run writes is taken back after it, so that a value which a model computes from its weights
once and keeps is computed anew in every run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from lapwing.data.inputs import (
    Batch,
    Inputs,
    SampleSet,
    accepts_arguments,
    call_model,
    has_argument,
    map_tensors,
    tensors_in,
)
from lapwing.errors import DataError, InputError, ModelError
from lapwing.networks.selection import Selection
from lapwing.runtime.settings import Rule, describe, is_integer, nearest, refuse_other_arguments
from lapwing.runtime.threads import LOCK, defer_interrupts, own_kernels, poll, unfused_attention, without_checkpoints
from lapwing.values.gaussian import DIMS, pixels

Path = tuple[str | int, ...]  # keys and positions, from the outside in

_is_key = lambda v: is_integer(v) or (isinstance(v, str) and bool(v))
OUTPUT = Rule(
    'the key of an output such as "logits", its position, or a tuple of these for outputs inside outputs, or None',
    lambda v: v is None or _is_key(v) or (isinstance(v, tuple) and len(v) > 0 and all(map(_is_key, v))),
)


def path_of(output: str | int | Path | None) -> Path:
    """Return the path that a user gave: a key, a position, a tuple of them, or None for the output as it is.

    >>> path_of("logits"), path_of(("heads", 1)), path_of(None)
    (('logits',), ('heads', 1), ())
    """
    OUTPUT.check("output", output)
    if output is None:
        return ()
    return output if isinstance(output, tuple) else (output,)


def pick_output(out: Any, path: Path) -> Any:
    """Return what lies at this path in the output of a model; raise ``ModelError`` with what there is, if nothing does.

    Without a path, return the output, or its ``logits`` if it is an object that has some.
    """
    for depth, key in enumerate(path):
        out = _part(out, key, path[:depth])
    if isinstance(out, Tensor) or path:
        return out
    return out["logits"] if isinstance(out, Mapping) and "logits" in out else getattr(out, "logits", out)


def without_unused(selection: Selection, raw: Tensor, tensors: Mapping[str, Tensor]) -> Selection:
    """Return the selection without the parameters that the output does not depend on, such as those of other heads."""
    chosen = [tensors[name] for name in selection.names]
    recorded = [p for p in chosen if p.requires_grad]
    slopes = torch.autograd.grad(raw.sum(), recorded, retain_graph=True, allow_unused=True)
    used = {id(p) for p, slope in zip(recorded, slopes, strict=True) if slope is not None}
    kept = [i for i, p in enumerate(chosen) if id(p) in used]
    if not kept:
        raise ModelError("the chosen output does not depend on any selected parameter; choose other weights.")
    return Selection(tuple(selection.names[i] for i in kept), tuple(selection.shapes[i] for i in kept))


def _part(out: object, key: str | int, before: Path) -> Any:
    where = f"output{''.join(f'[{k!r}]' for k in before)}"
    if isinstance(out, Mapping) and key in out:
        return out[key]
    if isinstance(out, tuple | list) and isinstance(key, int) and -len(out) <= key < len(out):
        return out[key]
    if isinstance(key, str) and key in keys_of(out):
        return getattr(out, key)
    known = keys_of(out)
    expected = f"one of {', '.join(map(repr, known))}" if known else "no output=, which is for a dictionary or a tuple"
    raise ModelError(
        f"output has {key!r}, and the model returns a {type(out).__name__} as its {where}; expected {expected}."
        f"{nearest(key, [name for name in known if isinstance(name, str)])}"
    )


def keys_of(out: object) -> list[str | int]:
    """Return the keys, positions or fields of an output with several parts; none of a tensor."""
    if isinstance(out, Mapping):
        return list(out)
    if isinstance(out, tuple | list):
        return [*range(len(out)), *getattr(out, "_fields", ())]
    if isinstance(out, Tensor):
        return []
    return [name for name, value in getattr(out, "__dict__", {}).items() if isinstance(value, Tensor | tuple | list)]


def extract_network(model: Any) -> Any:
    """Return the network inside a model of a framework. Return other models unchanged.

    A skorch net becomes its module in evaluation mode: skorch sets the mode at every step. A Lightning module, or that
    of a Trainer, becomes a copy in evaluation mode without its Trainer: the module itself keeps its mode, which
    Lightning does not restore when training goes on.

    Raises:
        ModelError: If a skorch net or a Trainer has no network yet.
    """
    if _is_skorch_net(model):
        return _skorch_module(model)
    if _is_trainer(model):
        if model.lightning_module is None:
            raise ModelError("the Trainer has no module yet; expected one that was trained: trainer.fit(module) first.")
        model = model.lightning_module
    return _detach_trainer(model) if _is_lightning_module(model) else model


def extract_data(model: Any, data: Any) -> Any:
    """Return the data as ``fit`` reads them, for a model as the user gave it.

    A pair of arrays for a skorch net becomes the loader that the net would use. A Lightning data module
    becomes its training data. None stands for the training data of a Trainer.

    Raises:
        DataError: If there are no data.
    """
    if data is None and _is_trainer(model):
        data = model.train_dataloader
        if data is None:
            raise DataError("the Trainer has no training data; expected trainer.fit(module, loader) first, or data.")
    if data is None:
        raise DataError(
            "data is None; expected the training data, such as a DataLoader. Only a Lightning Trainer knows its own."
        )
    if callable(getattr(data, "train_dataloader", None)):
        return data.train_dataloader()
    if _is_skorch_net(model) and _is_pair_of_arrays(data):
        return model.get_iterator(model.get_dataset(*data), training=False)
    return data


def _has(value: object, *names: str) -> bool:
    """Return whether the class of the value has all these members."""
    return all(hasattr(type(value), name) for name in names)


def _is_skorch_net(model: object) -> bool:
    return _has(model, "get_iterator", "get_dataset", "initialize_module", "train_step_single")


def _is_trainer(model: object) -> bool:
    return _has(model, "lightning_module", "train_dataloader", "val_dataloaders")


def _is_lightning_module(model: object) -> bool:
    return isinstance(model, nn.Module) and _has(model, "training_step", "configure_optimizers", "log_dict", "trainer")


def _skorch_module(net: Any) -> nn.Module:
    module: nn.Module | None = getattr(net, "module_", None)
    if module is None:
        raise ModelError("the skorch net has no module_ yet; expected one that was trained: net.fit(X, y) first.")
    return module.eval()


def _detach_trainer(module: Any) -> nn.Module:
    """Return a copy of a Lightning module in evaluation mode, without its Trainer; its logging does nothing."""
    trainer = _trainer_of(module)
    try:
        detached = copy.deepcopy(module, {} if trainer is None else {id(trainer): _NO_TRAINER})
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"the Lightning module {type(module).__name__} cannot be copied: {error}; expected one that copy.deepcopy "
            "takes. Give the network inside it, in evaluation mode: lw.fit(module.network.eval(), ...)."
        ) from error
    for part in detached.modules():
        if _is_lightning_module(part):
            part.trainer = None
            part.log = part.log_dict = _ignore
    return detached.eval()


_NO_TRAINER = object()  # in the place of the Trainer while a module is copied, whose data it holds


def _trainer_of(module: Any) -> object:
    try:
        return module.trainer
    except RuntimeError:  # it has none
        return None


def _ignore(*args: object, **kwargs: object) -> None:
    """Take the place of ``log`` outside a training loop, where Lightning refuses it."""


def _is_pair_of_arrays(data: Any) -> bool:
    """Return whether the data are (inputs, targets) with arrays that are not tensors, or inputs of several arrays."""
    is_pair = isinstance(data, tuple | list) and len(data) == 2
    return is_pair and hasattr(data[1], "shape") and not isinstance(data[1], Tensor)


# Errors with which PyTorch and Python answer a wrong shape, dtype, device or number of arguments.
CALL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError)


@contextmanager
def recording(tensors: Mapping[str, Tensor], names: Collection[str], plain_kernels: bool = False) -> Iterator[None]:
    """Record gradients for the named parameters and no others while the model runs.

    The parameters of a private copy have the right flags already. Those of a model that runs itself are changed and
    restored, by one thread at a time. ``plain_kernels`` switches vendors' kernels off (see ``needs_plain_kernels``).
    """
    changed = {p: p.requires_grad for name, p in tensors.items() if p.requires_grad != (name in names)}
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        select_kernels(plain_kernels),
        LOCK if changed else nullcontext(),
    ):
        try:
            for parameter, flag in changed.items():
                parameter.requires_grad_(not flag)
            yield
        finally:
            for parameter, flag in changed.items():
                parameter.requires_grad_(flag)


def is_recurrent(model: nn.Module) -> bool:
    """Return whether any layer is recurrent: those have fused kernels, and autograd cannot batch their gradients."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def needs_plain_kernels(model: nn.Module, recurrent: bool) -> bool:
    """Return whether vendors' kernels must be off: fused recurrent ones hide products, 16-bit oneDNN ones may crash."""
    return recurrent or any(p.is_cpu and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())


Call = TypeVar("Call", bound=Callable[..., Any])


def outside_autocast(call_model: Call) -> Call:
    """Decorate a public function: it runs without autocast, and Ctrl-C is raised where nothing is half done.

    Autocast is for training: sums and factors must keep their dtype. Arguments that the function does not take are
    refused as in ``refuse_other_arguments``.
    """

    @refuse_other_arguments
    @functools.wraps(call_model)
    def run(*args: Any, **kwargs: Any) -> Any:
        with defer_interrupts():
            kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
            if not kinds:
                return call_model(*args, **kwargs)
            with ExitStack() as stack:
                for kind in kinds:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                return call_model(*args, **kwargs)

    return run  # type: ignore[return-value]


def outside_inference(call_model: Call) -> Call:
    """Decorate a function to run outside inference mode, whose tensors cannot take part in later gradients."""

    @functools.wraps(call_model)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return call_model(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return call_model(*args, **kwargs)

    return run  # type: ignore[return-value]


def select_kernels(plain_kernels: bool) -> AbstractContextManager[None]:
    """Use PyTorch's own kernels instead of those of cuDNN and oneDNN, if ``plain_kernels``."""
    return own_kernels if plain_kernels else nullcontext()


def raw_output(
    model: nn.Module, inputs: Inputs, values: Mapping[str, Tensor] | None = None, output: Path | None = None
) -> Tensor:
    """Return what the model returns, (B,), (B, C) or (B, T, C); the pixels (B, H W, C) of images (B, C, H, W).

    ``values`` are other values for some of its parameters and buffers, which a copy gets for this run. ``output`` says
    which of several outputs; None is the one that the private copy of a model was made for.
    """
    return as_positions(model_output(model, inputs, values, output))


def as_positions(out: Tensor) -> Tensor:
    """Return images (B, C, H, W) as their pixels (B, H W, C), and outputs of any other form unchanged."""
    return pixels(out) if out.ndim > 3 else out


def model_output(
    model: nn.Module, inputs: Inputs, values: Mapping[str, Tensor] | None = None, output: Path | None = None
) -> Tensor:
    """Return the tensor that the model returns as it is, taken from ``.logits`` if the model returns an object.

    ``values`` and ``output`` as for ``raw_output``.
    """
    poll()
    tensors = (inputs,) if isinstance(inputs, Tensor) else tensors_in(inputs)
    if any(t.is_inference() for t in tensors):  # those cannot be saved for a gradient
        inputs = map_tensors(inputs, lambda t: t.clone() if t.is_inference() else t)
    try:
        with borrow_copy(model) as one, unfused_attention, without_checkpoints:
            if values is None:
                out = call_model(one, inputs)
            else:
                inner = {f"inner.{name}": value for name, value in values.items()}
                out = functional_call(BatchCall(one), inner, (inputs,))
    except CALL_ERRORS as error:
        if type(error) not in CALL_ERRORS:  # of the user's own, out of memory, or an operation that is not implemented
            raise
        raise InputError(
            f"the model raises {type(error).__name__}: {error}. {_describe_call(model, inputs, error)}"
        ) from error
    path = output_of(model) if output is None else output
    out = pick_output(out, path)
    if not isinstance(out, Tensor):
        names = ", ".join(map(repr, keys_of(out)))
        choose = f"Choose one of its parts by output=... ({names}), or wrap" if names else "Wrap"
        where = f" at {''.join(f'[{key!r}]' for key in path)}" if path else ""
        raise ModelError(
            f"the model returns a {type(out).__name__}{where}; expected a tensor or an object with .logits. {choose} "
            "the model in a module that returns the tensor."
        )
    if isinstance(inputs, SampleSet):
        out = inputs.outputs(out)
    if not out.is_floating_point():
        raise ModelError(f"the model returns {out.dtype}; expected real numbers: logits, means or log-rates.")
    if not 1 <= out.ndim <= 2 + max(DIMS) or 0 in (out.shape if out.ndim > 3 else (out.shape[0], out.shape[-1])):
        raise ModelError(
            f"the model returns the shape {tuple(out.shape)}; expected (B,), (B, C), or (B, T, C) with the classes or "
            "outputs last, or images (B, C, H, W) or (B, C, D, H, W) with the channels second. Wrap the model in a "
            "module that reshapes."
        )
    return out


def output_without_graph(model: nn.Module, inputs: Inputs, plain_kernels: bool = False) -> Tensor:
    """Return what ``raw_output`` returns, without a graph; ``plain_kernels`` switches vendors' kernels off."""
    with torch.no_grad(), select_kernels(plain_kernels):
        return raw_output(model, inputs)


def output_and_features(model: nn.Module, inputs: Inputs, layer: str) -> tuple[Tensor, Tensor] | None:
    """Return what ``raw_output`` returns, without a graph, and the input of the ``nn.Linear`` of this name.

    None if its output is not the output of the model as it is, or it runs more than once.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), borrow_copy(model) as one:
        last: Any = one.get_submodule(layer)

        def forward(features: Tensor) -> Tensor:
            out = F.linear(features, last.weight, last.bias)
            seen.append((features, out))
            return out

        vars(last)["forward"] = forward
        raw = raw_output(one, inputs)
        del vars(last)["forward"]
    return (raw, seen[0][0]) if len(seen) == 1 and raw is seen[0][1] else None


def loss_of_model(model: nn.Module, batch: Batch, plain_kernels: bool) -> Tensor | None:
    """Return the loss that a model with an argument ``labels`` returns for these targets; None if it returns none."""
    if not has_argument(model, "labels") or not batch.targets_are_labels:
        return None
    try:
        with (
            torch.no_grad(),
            select_kernels(plain_kernels),
            borrow_copy(model) as one,
            unfused_attention,
            without_checkpoints,
        ):
            out = call_model(one, batch.inputs, labels=batch.targets)
    except CALL_ERRORS as error:
        if type(error) not in CALL_ERRORS:  # of the user's own, or out of memory
            raise
        return None  # its labels are not targets of this kind, so there is nothing to compare with
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() else None


class BatchCall(nn.Module):
    """A module whose argument is a batch in any of its forms."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Inputs) -> object:
        return call_model(self.inner, inputs)


def _describe_call(model: nn.Module, inputs: Inputs, error: Exception) -> str:
    """Describe the inputs, for the error message: PyTorch's message may only mention a matrix inside the model."""
    kinds = lambda tensors: ", ".join(dict.fromkeys(f"{t.dtype} on {t.device}" for t in tensors)) or "none"
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors_in(inputs))
    return (
        f"Lapwing gave the network inputs of shape {shapes} ({kinds(tensors_in(inputs))}); its weights are "
        f"{kinds(model.parameters())}. {advice(model, inputs, error)}"
    )


def advice(model: nn.Module, inputs: Inputs, error: Exception) -> str:
    """Return what to do about inputs that the model refuses with this error."""
    trained = "Give it what it was trained on."
    if isinstance(inputs, tuple) and not accepts_arguments(model, inputs):
        return f"{trained} A tuple means several inputs of the model, and it takes one: give x alone, without targets."
    wanted, text = arithmetic_of(model), str(error)
    if "Guard failed" in text:  # a module of torch.export
        return "Lapwing runs parts of a batch: export the model with dynamic_shapes, for any batch size."
    others = {t.dtype for t in tensors_in(inputs) if not t.is_complex()} - {wanted, torch.bool}
    if others and "type" in text and "indices" not in text:  # an embedding asks for whole numbers
        return f"{trained} Convert the inputs: x.to({wanted}) for a tensor, x.astype(float) for an array."
    return trained


def with_output_dim(raw: Tensor) -> Tensor:
    """Return f (B, [T,] C): a single output without its dimension, (B,), becomes (B, 1)."""
    return raw.unsqueeze(-1) if raw.ndim == 1 else raw


def unwrap(model: nn.Module) -> nn.Module:
    """Return the plain module inside a compiled or data-parallel one, whose graph shows no operations."""
    wrappers = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
    inner = getattr(model, wrappers.get(type(model).__name__, ""), None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def refuse_distributed(model: nn.Module) -> None:
    """Raise if weights are spread over processes: each process would see a part of them."""
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh") or hasattr(p, "_shard_infos")]
    wrapped = [name for name, m in model.named_modules() if type(m).__name__ == "FullyShardedDataParallel"]
    if sharded or wrapped:
        raise ModelError(
            f"the weights are spread over processes ({(sharded or wrapped)[0] or 'the model'}: DTensor or FSDP); "
            "expected whole tensors on one device. Gather them with full_tensor() or a full state_dict, and load them "
            "into a plain copy of the model."
        )


def refuse_scripted(model: nn.Module) -> None:
    """Raise if a part of the model is scripted or traced: its graph changes after the first runs."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{name or 'the model'} is made by torch.jit.script, trace or load, and PyTorch hides its operations "
                "after the first runs; expected plain modules. Give the model that it was made from: build it, and "
                "fill it with load_state_dict(scripted.state_dict())."
            )


def refuse_unusable_parameters(model: nn.Module, names: Collection[str] = ()) -> None:
    """Raise if a parameter has no values yet, can have no gradient, or is among ``names`` and not finite."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"{name!r} of the model has no shape yet (a lazy module); expected values. Run the model on a batch "
                "first."
            )
        if tensor.is_inference():
            raise ModelError(
                f"{name!r} of the model was made in torch.inference_mode, so it can take part in no gradient; expected "
                "an ordinary tensor. Build or load the model outside of it, or give copy.deepcopy(model)."
            )
        if name in names and not bool(tensor.isfinite().all()):
            raise ModelError(
                f"{name!r} of the model has entries that are NaN or infinite; expected finite numbers. Set them, or "
                "leave the parameter out: requires_grad_(False) on it, or weights=lw.named(...)."
            )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model; raise if it is not a module, has no parameters or is on the meta device."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is {describe(model)}; expected a torch.nn.Module.")
    for parameter in model.parameters():
        if parameter.is_meta:
            raise ModelError("the model is on the meta device and has no numbers; load its weights first.")
        return parameter.device
    raise ModelError("the model has no parameters, so there is nothing to be uncertain about; expected at least one.")


def arithmetic_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that the model computes in: the coarsest of its weights."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def has_dropout(module: nn.Module) -> bool:
    """Return whether the module itself, not its parts, applies dropout in training mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and float(module.dropout) > 0


def refuse_training_mode(model: nn.Module) -> None:
    """Raise if dropout or BatchNorm is in training mode: outputs would be random, or samples would mix."""
    for name, module in model.named_modules():
        if module.training and (has_dropout(module) or isinstance(module, nn.modules.batchnorm._BatchNorm)):
            raise ModelError(
                f"{name or 'the model'} ({type(module).__name__}) is in training mode; expected evaluation mode. "
                "Call model.eval() first."
            )


IDLE_KEY = "_lapwing_idle"  # attribute of private copies: unused copies (of the first), or None (of the others)
OUTPUT_ATTRIBUTE = "_lapwing_output"  # attribute of private copies: the path of the output that is used, of several
WRITTEN_KEY = "_lapwing_written"  # attribute of private copies: what a run may write, and what was in it before
PLAIN_TYPES = {bool, int, float, str, type(None)}  # types whose values lead nowhere
DATA_LENGTH = 4096  # entries from which a container holds data, and neither layers nor weights
NOT_COPIED = {"OptimizedModule", "RecursiveScriptModule", "TopLevelTracedModule"}  # cannot be copied part by part


class Idle(list[nn.Module]):
    """Copies that nobody uses; a deep copy of a model starts without."""

    def __deepcopy__(self, memo: object) -> Idle:
        return Idle()


@dataclass(eq=False)
class Replica:
    """A model and its private copy, in which the parameters of these ``names`` record gradients.

    ``private`` is False for a model that reaches its weights by other ways than its modules (see ``Bypass``). It runs
    itself, one call at a time. ``output`` is the path of the output that is used, of several.
    """

    source: nn.Module
    names: tuple[str, ...]
    private: bool = True
    output: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        if self.output and not self.private:
            raise ModelError(
                f"output is {self.output!r}, and the model is compiled, or reaches its weights through an object that "
                "is not a module, so no copy of it can run; expected a model of plain modules. Wrap it in a module "
                "whose forward returns the tensor."
            )
        self._made: _PrivateCopy | None = None

    @property
    def model(self) -> nn.Module:
        """The copy; made again if the model was moved to another device or dtype."""
        return self._current().model if self.private else self.source

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the copy by name; a copy has the same ones as long as it lives."""
        return self._current().parameters if self.private else dict(self.source.named_parameters())

    def _current(self) -> _PrivateCopy:
        made = self._made
        if made is None or made.is_stale(self.source):
            with LOCK:
                made = self._made
                if made is None or made.is_stale(self.source):
                    made = self._made = _PrivateCopy(self.source, self.names, self.output)
        return made

    def record(self, names: tuple[str, ...]) -> None:
        """Record the gradients of the parameters with these names from now on; their copies share the parameters."""
        self.names = names
        for name, p in self._made.parameters.items() if self._made is not None else ():
            p.requires_grad_(name in names)

    def throwaway_copy(self) -> nn.Module:
        """Return a copy for a single run, which shows what the run changed; without a private copy the model."""
        return copy_modules(self.model) if self.private else self.source


class _PrivateCopy:
    """A copy, and the tensors that it was made with."""

    def __init__(self, source: nn.Module, names: tuple[str, ...], output: tuple[str | int, ...]) -> None:
        leaves = {id(p): _leaf(p, name in names) for name, p in source.named_parameters() if _has_gradient(p)}
        self.source = source
        self.first = next(((p, leaves[id(p)]) for p in source.parameters() if id(p) in leaves), None)
        self.model = make_shareable(copy_modules(source, leaves))
        vars(self.model)[OUTPUT_ATTRIBUTE] = output
        self.parameters: Mapping[str, nn.Parameter] = dict(self.model.named_parameters())

    def is_stale(self, source: nn.Module) -> bool:
        """Return whether the copy belongs to another model, or the model was moved; the first parameter tells.

        A parameter that was given other memory with equal values gives the same numbers, with other values it is
        refused (``Fingerprint``).
        """
        if source is not self.source or self.first is None:
            return source is not self.source
        p, leaf = self.first
        return p.dtype != leaf.dtype or (p.layout is torch.strided and p.data_ptr() != leaf.data_ptr())


def _has_gradient(p: Tensor) -> bool:
    return p.is_floating_point() or p.is_complex()


def _leaf(p: Tensor, recorded: bool) -> nn.Parameter:
    """Return a parameter that shares the memory of this one, and has a flag of its own."""
    leaf = nn.Parameter(p.detach(), requires_grad=recorded)
    leaf.__dict__.update(vars(p))
    return leaf


def can_be_copied(model: nn.Module) -> bool:
    """Return whether all modules are plain ones: compiled and scripted modules keep references of their own."""
    return not any(type(module).__name__ in NOT_COPIED for module in model.modules())


def copy_modules(model: nn.Module, tensors: Mapping[int, nn.Parameter] | None = None) -> nn.Module:
    """Return a copy of the modules; ``tensors`` maps ids of tensors to others that take their place."""
    copy = _CopyBuilder(dict(tensors or {}))
    new = copy.module(model)
    written = vars(new)[WRITTEN_KEY] = _Written()
    written.note(copy.containers)
    return new


class _Written:
    """The dictionaries, lists and sets that a run of a copy may write into, and what was in them before."""

    def note(self, containers: list[Any]) -> None:
        """Note what is in them now."""
        self._mappings = [each for each in containers if isinstance(each, dict)]
        self._others = [(each, list(each)) for each in containers if not isinstance(each, dict)]
        self._before = list(map(dict, self._mappings))
        self._lengths = list(map(len, self._mappings))
        self._values = list(chain.from_iterable(map(dict.values, self._mappings)))

    def undo(self) -> None:
        """Undo what was written since."""
        mappings = self._mappings  # all at once first: mostly nothing was written
        same = list(map(len, mappings)) == self._lengths
        if not same or not all(map(operator.is_, chain.from_iterable(map(dict.values, mappings)), self._values)):
            for mapping, held in zip(mappings, self._before, strict=True):
                if len(mapping) != len(held) or not all(map(operator.is_, mapping.values(), held.values())):
                    dict.clear(mapping)
                    dict.update(mapping, held)
        for container, before in self._others:
            if len(container) != len(before) or not all(map(operator.is_, container, before)):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(before)


def make_shareable(model: nn.Module) -> nn.Module:
    """Return a private model as one that ``borrow_copy`` copies for each call."""
    vars(model)[IDLE_KEY] = Idle()
    return model


def output_of(model: nn.Module) -> tuple[str | int, ...]:
    """Return the path of the output that is used, of a private copy; other models have none."""
    path: tuple[str | int, ...] = vars(model).get(OUTPUT_ATTRIBUTE, ())
    return path


@contextlib.contextmanager
def borrow_copy(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of a private model for one call; another model itself, to one thread at a time."""
    if IDLE_KEY not in vars(model):
        with LOCK:
            yield model
        return
    idle: Idle | None = vars(model)[IDLE_KEY]
    if idle is None:
        yield model
        return
    try:
        one = idle.pop()
    except IndexError:
        one = copy_modules(model)
    yield one
    vars(one)[WRITTEN_KEY].undo()
    idle.append(one)  # not after an error


class Bypass(TorchFunctionMode):
    """A watch over a run of the copy: whether operations use weights of the model itself (``is_bypassed``).

    A model may reach them through a global variable or an object that is not a module. Then a copy does not help.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._ids, self.is_bypassed = {id(p) for p in model.parameters() if _has_gradient(p)}, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.is_bypassed = self.is_bypassed or any(map(self._uses, (*args, *kwargs.values())))
        return func(*args, **kwargs)

    def _uses(self, value: object) -> bool:
        return any(map(self._uses, value)) if isinstance(value, tuple | list) else id(value) in self._ids


class _CopyBuilder:
    """One copy in the making: modules, and what leads to modules and replaced tensors, once each."""

    def __init__(self, done: dict[int, Any]) -> None:
        self.done = done  # by the id of the original
        self.containers: list[Any] = []  # the new ones that a run may write into

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) not in self.done:
            # Without the class's own __new__: that of a traced GraphModule makes a class without a forward.
            new = self.done[id(module)] = nn.Module.__new__(type(module))
            vars(new).update({key: self._attribute(key, v) for key, v in vars(module).items() if key != WRITTEN_KEY})
            vars(new)[IDLE_KEY] = None
            self.containers.append(vars(new))
        result: nn.Module = self.done[id(module)]
        return result

    def _attribute(self, key: str, value: Any) -> Any:
        """Return the value of an attribute. Hooks are those of the original, also if they come or go later."""
        if key == IDLE_KEY or type(value) in PLAIN_TYPES:
            return None if key == IDLE_KEY else value
        hooks = "_hooks" in key and isinstance(value, dict)
        if hooks and not value:
            return value
        new = self.value(value)
        return value if hooks and all(new[name] is hook for name, hook in value.items()) else new

    def value(self, value: Any) -> Any:
        """Return the value with modules and tensors replaced in it; containers are copied, other objects shared."""
        if id(value) in self.done:
            return self.done[id(value)]
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, tuple | list | dict | set):
            if len(value) >= DATA_LENGTH:
                return value
            new = self._container(value)
            if not isinstance(value, tuple):
                self.containers.append(new)
            return new
        return self.reference(value)

    def _container(self, value: Any) -> Any:
        if type(value) is dict:
            return {key: self.value(part) for key, part in value.items()}
        if isinstance(value, dict):
            new = copy.copy(value)
            for key, part in value.items():
                dict.__setitem__(new, key, self.value(part))
            return new
        parts = [self.value(part) for part in value]
        if isinstance(value, list):
            same_kind = copy.copy(value)
            same_kind[:] = parts
            return same_kind
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)

    def reference(self, value: Any) -> Any:
        """Return a method, function or reference for the copies where it leads to an original."""
        if isinstance(value, types.MethodType):
            owner = self._part(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, partial):
            function, parts = self._part(value.func), tuple(map(self._part, value.args))
            if function is value.func and all(map(operator.is_, parts, value.args)):
                return value
            new = partial(function, *parts, **value.keywords)
            vars(new).update(vars(value))
            return new
        if type(value) is weakref.ref:
            target = value()
            part = self._part(target)
            return value if part is target else weakref.ref(part)
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._function(value)
        return value

    def _part(self, value: Any) -> Any:
        """Return the copy of a module or tensor, or of a reference to one; data of the user are not copied."""
        if id(value) in self.done:
            return self.done[id(value)]
        return self.module(value) if isinstance(value, nn.Module) else self.reference(value)

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        self.done[id(value)] = value  # a function may refer to itself
        cells = []
        for cell in value.__closure__ or ():
            try:
                part = self._part(cell.cell_contents)
            except ValueError:  # not yet assigned
                part = None
            same = part is None or part is cell.cell_contents
            cells.append(cell if same else types.CellType(part))
        if all(map(operator.is_, cells, value.__closure__ or ())):
            return value
        new = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
        new.__kwdefaults__ = value.__kwdefaults__
        vars(new).update(vars(value))
        self.done[id(value)] = new
        return new
