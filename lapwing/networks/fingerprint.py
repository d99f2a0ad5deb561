"""A check that a model still has the modules and the weights that a posterior was fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isfinite, isnan
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.data.processes import Processes
from lapwing.errors import ModelError

PLAIN_OUTSIDE = (float, str, bool, FunctionType, BuiltinFunctionType)
PLAIN = (*PLAIN_OUTSIDE, int, tuple)


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
    def of(cls, model: nn.Module, before: Mapping[tuple[str, str], Any] | None = None) -> Fingerprint:
        """Return the fingerprint of a model as it is.

        ``before`` is the structure before the model was run: what runs change, such as a counter, is left out.
        """
        tensors: dict[str, Tensor] = dict((*model.named_parameters(), *model.named_buffers()))
        with torch.no_grad():
            marks = [_mark(t, torch.float64) for t in tensors.values()]
            norms = [_norm(t) for t in tensors.values()]
            numbers = torch.stack([*marks, *norms]).tolist()
        shapes = tuple(tuple(t.shape) for t in tensors.values())
        structure = structure_of(model)
        if before is not None:
            structure = {key: fact for key, fact in structure.items() if not key[1] or before.get(key) == fact}
        size = len(marks)
        return cls(tuple(tensors), shapes, tuple(numbers[:size]), tuple(numbers[size:]), _quick(model), structure)

    def refuse_other(self, model: nn.Module, tolerance: float = 1e-9) -> None:
        """Raise unless the model has the modules and the parameters of the fingerprint."""
        if not self.quick or _quick(model) != self.quick:
            self._refuse_other_tensors(model, tolerance)
        self._refuse_other_structure(model)

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


def settings_in(structure: Mapping[tuple[str, str], Any]) -> dict[str, str]:
    """Return the settings of modules as text, by "name setting"."""
    return {f"{name} {setting}": repr(fact) for (name, setting), fact in structure.items() if setting}


def structure_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the type of every module by its name, and its settings.

    Settings are the public attributes that are plain values. Of modules from outside PyTorch whole numbers are left
    out, since such modules count calls or remember lengths in them.
    """
    facts: dict[tuple[str, str], Any] = {}
    for name, module in model.named_modules():
        kind = type(module)
        facts[name, ""] = kind.__name__
        kinds = PLAIN if kind.__module__.startswith("torch.nn.") else PLAIN_OUTSIDE
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
        for t in (*model.parameters(), *model.buffers()):
            rows = _across(t, torch.float32)
            together.setdefault((rows.dtype, rows.device), []).append(rows)
        return tuple(float(_along(torch.cat(rows))) for rows in together.values())


def _norm(t: Tensor) -> Tensor:
    """Return the norm; zero for whole numbers and truth values, which must be the same to the last digit."""
    if not (t.is_floating_point() or t.is_complex()):
        return torch.zeros((), dtype=torch.float64, device=t.device)
    return torch.linalg.vector_norm(t.detach(), dtype=torch.complex128 if t.is_complex() else torch.float64).double()


def _mark(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return p · T q for a matrix T and fixed patterns p, q. Cost: one read of T, as in a forward pass.

    ``dtype`` is the least for real numbers: sums of 16-bit ones lose changes, and their kernels may fail.
    """
    return _along(_across(t, dtype))


def _across(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return T q, or a vector as it is; whole numbers and truth values as long integers."""
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
