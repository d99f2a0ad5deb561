"""A few inputs that nobody measured, and what a network returns there: by it a file knows the function it belongs to.

Equal weights are not an equal function: an activation may have another slope. The inputs are drawn between the smallest
and the largest values of the first batch, so that no row of the training data is in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.errors import FileError, ModelError
from lapwing.runtime.state import LARGEST, Field, Known, State, Text, refusal, saved

ROWS = 4  # inputs
BYTES = 2**20  # of all of them together
LOOKED = 256  # rows of the first batch whose range is taken
FEW = 8  # rows below which the range is that of the whole tensor: that of each entry would give the rows away
# Differences between processors, orders of summation and threads, relative to the largest output: far more than
# rounding does to most networks, far less than another function does. A GPU rounds float32 factors to 10 bits.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.1}
TOLERANCE_OF_GPU = 1e-2
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
        plain = all(t.layout == torch.strided and not t.is_complex() and not t.is_quantized for t in leaves)
        if form is None or not leaves or not plain or dtype not in TOLERANCES or any(not t.numel() for t in leaves):
            return None
        row = sum(t[:1].nbytes if own else 0 for t, own in zip(leaves, per_sample, strict=True))
        shared = sum(0 if own else t.nbytes for t, own in zip(leaves, per_sample, strict=True))
        rows = min(ROWS, (BYTES - shared) // max(1, row))
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
        assert self.outputs is not None
        now = run(self.inputs(dtype, device)).double().cpu()
        if now.shape != self.outputs.shape:
            seen, expected = tuple(now.shape), tuple(self.outputs.shape)
            raise OtherFunctionError(f"it returns outputs of the shape {seen}; expected {expected}.")
        tolerance = max(TOLERANCES[self.dtype], TOLERANCES.get(dtype, 0.1))
        if {self.device, device.type} != {"cpu"}:
            tolerance = max(tolerance, TOLERANCE_OF_GPU)
        scale, gap = float(self.outputs.abs().max()), float((now - self.outputs).abs().max())
        if not gap <= tolerance * scale:
            raise OtherFunctionError(
                f"it has the right weights and returns other outputs, by {gap / scale:.2g} of the largest one, where "
                f"rounding explains {tolerance:g}. A setting, such as the slope of an activation, or the code of its "
                "forward differs. Build the model as it was for the fit."
            )

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
    seen = t.detach()[:LOOKED].cpu() if rows and t.ndim else t.detach().cpu()
    each = rows > 0 and len(seen) >= FEW
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


def _numbers_in(form: Any) -> Iterator[int]:
    """Yield the numbers of the tensors of a form in order; raise ``FileError`` if it is none."""
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

    def read(self, value: Any, known: Known) -> Any:
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
