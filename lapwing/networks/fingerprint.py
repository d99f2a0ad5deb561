"""Checks that a model is the one that a posterior was fitted to: its weights, its modules, the function it computes.

A ``Fingerprint`` has figures of all weights. Equal weights are not an equal function: an activation may have another
slope. So a file also has a ``Probe``: a few inputs, drawn between the smallest and the largest values of the first
batch, so that no row of the training data is in a file, and what the network returned there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from math import isfinite, isnan
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.data.inputs import Inputs
from lapwing.data.processes import Processes
from lapwing.errors import FileError, ModelError
from lapwing.networks.forward import refuse_training_mode
from lapwing.runtime.states import LARGEST, Field, Known, State, Text, refusal, saved

PLAIN_TYPES_OUTSIDE = (float, str, bool, FunctionType, BuiltinFunctionType)
PLAIN_TYPES = (*PLAIN_TYPES_OUTSIDE, int, tuple)


WATCHED = 1e-9  # relative change of a parameter up to which it counts as unchanged


@dataclass(frozen=True)
class Fingerprint:
    """The norm of every parameter and buffer of any dtype, and its product with a fixed pattern of all entries.

    ``quick`` holds the products in the dtype of the parameters: while they are the same to the bit, one fast read of
    the weights is enough. Only if they are not (other weights, another number of threads) are the float64 figures
    compared.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    marks: tuple[float, ...]
    norms: tuple[float, ...]
    quick: tuple[float, ...] = ()
    structure: Mapping[tuple[str, str], Any] = field(default_factory=dict)  # see ``structure_of``

    @classmethod
    def of(cls, model: nn.Module, before: Mapping[tuple[str, str], object] | None = None) -> Fingerprint:
        """Return the fingerprint of a model as it is.

        ``before`` is the structure before the model was run: what runs change, such as a counter, is left out.
        """
        tensors: dict[str, Tensor] = dict((*model.named_parameters(), *model.named_buffers()))
        with torch.no_grad():
            marks = [_along(_across(t, torch.float64)) for t in tensors.values()]
            norms = [_norm(t) for t in tensors.values()]
            numbers = torch.stack([*marks, *norms]).tolist()
        shapes = tuple(tuple(t.shape) for t in tensors.values())
        structure = structure_of(model)
        if before is not None:
            structure = {key: fact for key, fact in structure.items() if not key[1] or before.get(key) == fact}
        size = len(marks)
        return cls(tuple(tensors), shapes, tuple(numbers[:size]), tuple(numbers[size:]), _quick(model), structure)

    def refuse_other(self, model: nn.Module, tolerance: float = WATCHED) -> None:
        """Raise unless the model has the modules and the parameters of the fingerprint, and is not in training mode.

        A model that was found unchanged is watched, so that the next call costs one read of its weights.
        """
        watch: _Watch | None = vars(self).get("_watch")
        if watch is not None and watch.model is model and watch.sees_no_change():
            return
        refuse_training_mode(model)
        if not self.quick or _quick(model) != self.quick:
            self._refuse_other_tensors(model, tolerance)
        self._refuse_other_structure(model)
        if tolerance <= WATCHED and _Watch.can_see(model):
            vars(self)["_watch"] = _Watch(model)

    def _refuse_other_tensors(self, model: nn.Module, tolerance: float) -> None:
        """Raise unless the parameters and buffers have the names, shapes and values of the fingerprint."""
        now = Fingerprint.of(model)
        if now.names != self.names or now.shapes != self.shapes:
            pairs = [set(zip(one.names, one.shapes, strict=True)) for one in (self, now)]
            different = sorted(pairs[0] ^ pairs[1])[:4]
            raise ModelError(
                f"the model has other parameters than the posterior was fitted to: {different}. Fit it again."
            )
        for i, name in enumerate(self.names):
            scale = max(self.norms[i], 1e-30) if isfinite(self.norms[i]) else 0.0
            size = torch.Size(self.shapes[i]).numel()
            if _differ(now.norms[i], self.norms[i], tolerance * scale) or _differ(
                now.marks[i], self.marks[i], tolerance * scale * max(1, size) ** 0.5
            ):
                then, later = f"{self.norms[i]:.9g}", f"{now.norms[i]:.9g}"
                change = f"norm {then} then, {later} now" if then != later else "its entries, at the same norm"
                raise ModelError(
                    f"the parameter {name!r} has changed since the fit ({change}); the error bars would belong to "
                    "another network. Restore it or fit again."
                )

    @property
    def modules(self) -> dict[str, str]:
        """The type of every module by its name, for a file."""
        return {name: fact for (name, setting), fact in self.structure.items() if not setting}

    @property
    def settings(self) -> dict[str, str]:
        """The settings of every module as text, for a file: by "name setting"."""
        return settings_in(self.structure)

    def _refuse_other_structure(self, model: nn.Module) -> None:
        """Raise if a module was replaced, or a setting of one changed."""
        if not self.structure:
            return
        now = structure_of(model)
        new = ((key, None) for key in now if not key[1] and key not in self.structure)
        for (name, setting), fact in (*self.structure.items(), *new):
            later = now.get((name, setting))
            if later != fact:
                what = f"{setting} of the module {name!r}" if setting else f"the module {name!r}"
                raise ModelError(
                    f"{what} has changed since the fit ({fact!r:.60} then, {later!r:.60} now); the error bars would "
                    "belong to another network. Restore it or fit again."
                )


class _Watch:
    """A model that was found unchanged: the attributes of its modules, where its tensors lie, and what they hold.

    Attributes are compared by identity, and tensors are read as for ``Fingerprint.quick``. So whatever a change is made
    by (also ``.data`` and NumPy, which no version counter sees), it is seen. A copy of a posterior has none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._held: list[dict[str, Any]] = [
            each for m in model.modules() for each in (vars(m), m._parameters, m._buffers, m._modules)
        ]
        self._lengths, self._keys = list(map(len, self._held)), list(chain.from_iterable(self._held))
        self._values = list(chain.from_iterable(map(dict.values, self._held)))
        self._tensors = [(t, t.detach()) for t in _tensors_of(model)]
        together: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor | None]]] = {}
        with torch.no_grad():
            for _, t in self._tensors:
                matrix = t.ndim >= 2 and t.is_floating_point()
                rows = t.flatten(1) if matrix else t.reshape(-1)
                pattern = _pattern(rows.shape[1], 1.0, rows.dtype, rows.device) if matrix else None
                together.setdefault((rows.dtype, rows.device), []).append((rows, pattern))
            self._parts = list(together.values())
            self._marks = self._read()

    @staticmethod
    def can_see(model: nn.Module) -> bool:
        """Return whether all tensors lie as they are read, so that they need no copy."""
        return all(
            t.layout == torch.strided and t.is_contiguous() and not t.is_quantized and not t.is_inference()
            and t.dtype in (torch.float32, torch.float64, torch.int64)
            for t in _tensors_of(model)
        )  # fmt: skip

    def sees_no_change(self) -> bool:
        """Return whether nothing has changed."""
        held = self._held
        if list(map(len, held)) != self._lengths or not all(map(is_, chain.from_iterable(held), self._keys)):
            return False
        if not all(map(is_, chain.from_iterable(map(dict.values, held)), self._values)):
            return False
        if not all(t.is_set_to(then) for t, then in self._tensors):
            return False
        with torch.no_grad():
            return self._read() == self._marks

    def _read(self) -> list[float]:
        each = ([r if pattern is None else torch.mv(r, pattern) for r, pattern in part] for part in self._parts)
        return [float(_along(torch.cat(rows) if len(rows) > 1 else rows[0])) for rows in each]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def refuse_other_models(model: nn.Module, processes: Processes) -> None:
    """Raise if a process has other weights than the first one."""
    if processes.group is None:
        return
    own = replace(Fingerprint.of(model), quick=(), structure={}) if processes.is_main_process else None
    first = processes.gather_values(own)[0]
    assert first is not None
    try:
        first.refuse_other(model)
    except ModelError as error:
        raise ModelError(
            f"process {processes.rank} has another model than process 0; expected the same weights and buffers in all. "
            "Load the same file in all of them, or send the weights of one: torch.distributed.broadcast."
        ) from error


def settings_in(structure: Mapping[tuple[str, str], object]) -> dict[str, str]:
    """Return the settings of modules as text, by "name setting"."""
    return {f"{name} {setting}": repr(fact) for (name, setting), fact in structure.items() if setting}


def structure_of(model: nn.Module) -> dict[tuple[str, str], object]:
    """Return the type of every module by its name, and its settings.

    Settings are the public attributes that are plain values. Of modules from outside PyTorch whole numbers are left
    out, since such modules count calls or remember lengths in them.
    """
    facts: dict[tuple[str, str], object] = {}
    for name, module in model.named_modules():
        kind = type(module)
        facts[name, ""] = kind.__name__
        kinds = PLAIN_TYPES if kind.__module__.startswith("torch.nn.") else PLAIN_TYPES_OUTSIDE
        for key, value in module.__dict__.items():
            if type(value) in kinds and key[0] != "_" and key != "training":
                facts[name, key] = getattr(value, "__qualname__", value)
    return facts


def _differ(now: float, then: float, limit: float) -> bool:
    """Return whether two figures differ by more than the limit; those of a parameter that is NaN are the same."""
    return now != then and not (isnan(now) and isnan(then)) and not abs(now - then) <= limit


def _quick(model: nn.Module) -> tuple[float, ...]:
    """Return one mark for all tensors of a dtype and device: few operations, however many tensors there are."""
    together: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    with torch.no_grad():
        for t in _tensors_of(model):
            rows = _across(t, torch.float32)
            together.setdefault((rows.dtype, rows.device), []).append(rows)
        return tuple(float(_along(torch.cat(rows))) for rows in together.values())


def _tensors_of(model: nn.Module) -> tuple[Tensor, ...]:
    return (*model.parameters(), *model.buffers())


def _norm(t: Tensor) -> Tensor:
    """Return the norm; zero for whole numbers and truth values, which must be the same to the last digit."""
    if not (t.is_floating_point() or t.is_complex()):
        return torch.zeros((), dtype=torch.float64, device=t.device)
    return torch.linalg.vector_norm(t.detach(), dtype=torch.complex128 if t.is_complex() else torch.float64).double()


# The mark of a matrix T is p · T q for fixed patterns p, q. Cost: one read of T, as in a forward pass.


def _across(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return T q, or a vector as it is; whole numbers and truth values as long integers.

    ``dtype`` is the least for real numbers: sums of 16-bit ones lose changes, and their kernels may fail.
    """
    t = torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
    if not t.is_floating_point():
        return t.reshape(-1).long()
    t = t if t.dtype == torch.float64 else t.to(dtype)
    if t.ndim < 2:
        return t.reshape(-1)
    rows = t.flatten(1)
    return rows @ _pattern(rows.shape[1], 1.0, t.dtype, t.device)


def _along(rows: Tensor) -> Tensor:
    """Return p · rows, in float64. Whole numbers have an exact sum, to 53 bits."""
    if not rows.is_floating_point():
        steps = (2 * torch.arange(len(rows), device=rows.device) + 1) * 0x1E3779B97F4A7C15
        return ((rows * steps).sum() & (2**53 - 1)).double()
    return torch.dot(rows.double(), _pattern(len(rows), 0.0, torch.float64, rows.device))


@lru_cache(maxsize=256)
def _pattern(size: int, phase: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fixed numbers around one, all different, and different for rows and columns.

    So the product changes if entries change, or are swapped, shifted or transposed.
    """
    steps = torch.arange(size, dtype=torch.float64, device=device)
    return (1.5 + (steps * 0.7548776662 + phase).sin_()).to(dtype)


PROBE_ROWS = 4  # inputs
MAX_PROBE_BYTES = 2**20  # of all of them together
RANGE_ROWS = 256  # rows of the first batch whose range is taken
FEW_ROWS = 8  # rows below which the range is that of the whole tensor: that of each entry would give the rows away
# Differences between processors, orders of summation and threads, relative to the largest output: far more than
# rounding does to most networks, far less than another function does. A GPU rounds float32 factors to 10 bits.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.1}
TOLERANCE_OF_GPU = 1e-2
SAME_GAP = 1e-2  # of these tolerances, within which a setting that changed has no effect
CONSTANTS = (bool, int, float, str, type(None))
KINDS: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple}


class OtherFunctionError(ModelError):
    """A model with the weights of a file that is another function."""


@saved
@dataclass(frozen=True, eq=False)
class Probe:
    """A few drawn inputs, with the outputs of the network there once it has run.

    Args:
        form: The nesting of the inputs as JSON, with the numbers of tensors in place of them; see ``_form``.
        tensors: The tensors of the inputs.
        dtype: The dtype that the network computes in.
        outputs: What it returns, in float64; None before it has run.
        device: The type of the device where it ran.
    """

    form: Any
    tensors: tuple[Tensor, ...]
    dtype: torch.dtype
    outputs: Tensor | None = None
    device: str = "cpu"

    @classmethod
    def draw(cls, inputs: Inputs, per_sample: Sequence[bool], dtype: torch.dtype) -> Probe | None:
        """Return inputs like these, without outputs; None for sets of samples and inputs of more than a megabyte."""
        leaves: list[Tensor] = []
        form = _form(inputs, leaves)
        all_real = all(t.layout == torch.strided and not t.is_complex() and not t.is_quantized for t in leaves)
        if form is None or not leaves or not all_real or dtype not in TOLERANCES or any(not t.numel() for t in leaves):
            return None
        row = sum(t[:1].nbytes if own else 0 for t, own in zip(leaves, per_sample, strict=True))
        shared = sum(0 if own else t.nbytes for t, own in zip(leaves, per_sample, strict=True))
        rows = min(PROBE_ROWS, (MAX_PROBE_BYTES - shared) // max(1, row))
        if rows < 1:
            return None
        generator = torch.Generator().manual_seed(0)
        return cls(form, tuple(_like(t, rows if own else 0, generator) for t, own in zip(leaves, per_sample)), dtype)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> Inputs:
        """Return the inputs for a network that computes in this dtype, which may not be that of the fit."""
        change = lambda t: t.to(device, dtype if t.dtype == self.dtype else t.dtype)
        return _build(self.form, [change(t) for t in self.tensors])

    def with_outputs(self, run: Callable[[Inputs], Tensor], device: torch.device) -> Probe | None:
        """Return the probe with what ``run`` returns; None if the network does not take these inputs."""
        if self.outputs is not None:
            return self
        try:
            outputs = run(self.inputs(self.dtype, device)).double().cpu()
        except Exception:  # ids that may not stand together, a graph without edges: any code of the user may refuse
            return None
        if not outputs.numel() or not bool((outputs.abs() <= LARGEST).all()) or not bool(outputs.any()):
            return None
        return replace(self, outputs=outputs, device=device.type)

    def refuse_other(self, run: Callable[[Inputs], Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Raise ``OtherFunctionError`` unless ``run`` returns the same outputs, up to rounding.

        ``dtype`` is that in which the network computes now.
        """
        gap = self._gap(run, dtype, device)
        if not gap <= 1:
            tolerance = self._tolerance(dtype, device)
            raise OtherFunctionError(
                f"it has the right weights and returns other outputs, by {gap * tolerance:.2g} of the largest, where "
                f"rounding explains {tolerance:g}. A setting, such as the slope of an activation, or the code of its "
                "forward differs. Build the model as it was for the fit."
            )

    def is_reached(self, run: Callable[[Inputs], Tensor], dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the outputs of ``run`` are the same, so that a setting that changed has no effect on them.

        Numbers from a GPU are too coarse to tell; there they pass for the same.
        """
        return {self.device, device.type} != {"cpu"} or self._gap(run, dtype, device) < SAME_GAP

    def _gap(self, run: Callable[[Inputs], Tensor], dtype: torch.dtype, device: torch.device) -> float:
        """Return by how much the outputs of ``run`` differ, in units of the most that machines may differ."""
        assert self.outputs is not None
        now = run(self.inputs(dtype, device)).double().cpu()
        if now.shape != self.outputs.shape:
            seen, expected = tuple(now.shape), tuple(self.outputs.shape)
            raise OtherFunctionError(f"it returns outputs of the shape {seen}; expected {expected}.")
        scale = self._tolerance(dtype, device) * float(self.outputs.abs().max())
        return float((now - self.outputs).abs().max()) / scale

    def _tolerance(self, dtype: torch.dtype, device: torch.device) -> float:
        """Return the most that outputs may differ by rounding, relative to the largest."""
        tolerance = max(TOLERANCES[self.dtype], TOLERANCES.get(dtype, 0.1))
        return tolerance if {self.device, device.type} == {"cpu"} else max(tolerance, TOLERANCE_OF_GPU)

    def state(self) -> State:
        """Return the probe as plain data."""
        tensors = {str(number): tensor for number, tensor in enumerate(self.tensors)}
        outputs = {} if self.outputs is None else {"outputs": self.outputs}
        settings = {"form": self.form, "dtype": str(self.dtype), "device": self.device}
        return State("Probe", settings, {**tensors, **outputs})

    @classmethod
    def from_state(cls, state: State) -> Probe:
        """Build the probe again; whether the network takes its inputs shows when it runs."""
        dtypes = {str(dtype): dtype for dtype in TOLERANCES}
        names = [str(number) for number in range(len(state.tensors) - 1)]
        numbers = {name: _Numbers() for name in ("outputs", *names)}
        fields = state.read(form=_Form(len(names)), dtype=Text(tuple(dtypes)), device=Text(), **numbers)
        tensors = tuple(fields[name] for name in names)
        return cls(fields["form"], tensors, dtypes[fields["dtype"]], fields["outputs"].double(), fields["device"])


def _like(t: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Return uniform numbers between the smallest and the largest ones, with so many rows; 0 rows: as many as there."""
    seen = t.detach()[:RANGE_ROWS].cpu() if rows and t.ndim else t.detach().cpu()
    each = rows > 0 and len(seen) >= FEW_ROWS
    wide = seen.double()
    low, high = (wide.amin(0), wide.amax(0)) if each else (wide.min(), wide.max())
    shape = (rows, *t.shape[1:]) if rows else tuple(t.shape)
    share = torch.rand(shape, generator=generator, dtype=torch.float64)
    if t.is_floating_point():
        return (low + (high - low) * share).to(t.dtype)
    return torch.minimum(low + ((high - low + 1) * share).floor(), high).to(t.dtype)


def _form(inputs: Any, leaves: list[Tensor]) -> Any:
    """Return the nesting as JSON, with its tensors added to ``leaves``; None if JSON cannot hold one of its parts."""
    if isinstance(inputs, Tensor):
        leaves.append(inputs)
        return {"tensor": len(leaves) - 1}
    if isinstance(inputs, Mapping):
        if not all(isinstance(key, str) for key in inputs):
            return None
        parts = {key: _form(value, leaves) for key, value in inputs.items()}
        return None if None in parts.values() else {"map": parts}
    if type(inputs) in (list, tuple):
        each = [_form(value, leaves) for value in inputs]
        return None if None in each else {type(inputs).__name__: each}
    return {"value": inputs} if type(inputs) in CONSTANTS else None


def _build(form: Any, tensors: Sequence[Tensor]) -> Inputs:
    """Return the inputs of this form."""
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "map":
        return {key: _build(value, tensors) for key, value in content.items()}
    return KINDS[kind]([_build(value, tensors) for value in content]) if kind in KINDS else content


def _numbers_in(form: object) -> Iterator[int]:
    """Yield the numbers of the tensors of a form in order; raise ``FileError`` if it is not the form of inputs."""
    if not isinstance(form, Mapping) or len(form) != 1:
        raise refusal(form, "the form of inputs")
    ((kind, content),) = form.items()
    if kind == "tensor" and type(content) is int:
        yield content
    elif kind == "map" and isinstance(content, Mapping):
        for value in content.values():
            yield from _numbers_in(value)
    elif kind in KINDS and isinstance(content, list | tuple):
        for value in content:
            yield from _numbers_in(value)
    elif kind != "value" or type(content) not in CONSTANTS:
        raise refusal(form, "the form of inputs")


@dataclass(frozen=True)
class _Form(Field):
    """The form of inputs with so many tensors, each once and in order."""

    count: int

    def read(self, value: object, known: Known) -> object:
        if list(_numbers_in(value)) != list(range(self.count)):
            raise refusal(value, f"a form of {self.count} tensors in order")
        return value


@dataclass(frozen=True)
class _Numbers(Field):
    """A tensor of any shape with numbers up to 1e30."""

    place = "tensors"

    def read(self, value: Tensor, known: Known) -> Tensor:
        if value.is_complex() or not value.numel() or not bool((value.double().abs() <= LARGEST).all()):
            raise FileError(f"has the shape {tuple(value.shape)} and dtype {value.dtype}; expected finite real numbers")
        return value
