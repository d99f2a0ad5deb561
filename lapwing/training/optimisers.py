"""PyTorch's optimisers that recipes use: how each is built, and what its state in a file may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.schema import SMALLEST, Array, Either, Field, Maybe, Real, Whole
from lapwing.core.state import State, Unread
from lapwing.errors import FileError

LISTS = ("old_dirs", "old_stps", "ro")  # the lists of L-BFGS, stored as one tensor each
UNSAVED = "al"  # working memory of L-BFGS
HISTORY = 100  # steps that L-BFGS remembers
Fields = Callable[[Sequence[nn.Parameter], int], dict[str, Field]]


@dataclass(frozen=True)
class Optimiser:
    """One of PyTorch's optimisers: how to build it, and the facts about it that training and files need."""

    build: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    fields: Fields  # what it remembers of the parameter with this number
    full_batch: bool = False  # whether a step uses all data and no learning rate


def _adam(parameters: Sequence[nn.Parameter], number: int) -> dict[str, Field]:
    shape, dtype = tuple(parameters[number].shape), parameters[number].dtype
    return {
        "step": Array((), 1), "exp_avg": Array(shape, stored=dtype), "exp_avg_sq": Array(shape, 0, stored=dtype)
    }  # fmt: skip


def _sgd(parameters: Sequence[nn.Parameter], number: int) -> dict[str, Field]:
    return {"momentum_buffer": Array(tuple(parameters[number].shape), stored=parameters[number].dtype)}


def _lbfgs(parameters: Sequence[nn.Parameter], number: int) -> dict[str, Field]:
    """Return the fields of the state, which L-BFGS keeps for all parameters together, at the first."""
    if number:
        raise FileError(f"L-BFGS has a state of the parameter {number}; expected one of the first alone")
    size, dtype = sum(p.numel() for p in parameters), parameters[0].dtype
    vector, rows = Array((size,), stored=dtype), Maybe(Array(("k", size), stored=dtype))
    return {
        "func_evals": Whole(), "n_iter": Whole(1), "d": vector, "t": _Number(0), "old_dirs": rows, "old_stps": rows,
        "ro": Maybe(Array(("k",), SMALLEST, stored=dtype)), "H_diag": _Number(SMALLEST), "prev_flat_grad": vector,
        "prev_loss": Real(),
    }  # fmt: skip


@dataclass(frozen=True)
class _Number:
    """A number that is a tensor or none, as PyTorch left it; it is stored as a tensor, and ints as whole numbers."""

    least: float
    place: str = "tensors"

    def checked(self, value: Tensor, sizes: dict[str, int]) -> Any:
        if value.dtype == torch.int64:
            return int(Array((), self.least, whole=True).checked(value, sizes))
        # A number of one entry was a Python number: see ``packed``.
        checked = Either(Array((), self.least), Array((1,), self.least)).checked(value, sizes)
        return float(checked) if value.ndim else checked


# Without tolerance_change=0 L-BFGS would stop while the gradient is still large.
OPTIMISERS = {
    "adam": Optimiser(lambda parameters, rate: torch.optim.Adam(parameters, lr=rate), _adam),
    "sgd": Optimiser(lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True), _sgd),
    "lbfgs": Optimiser(
        lambda parameters, _: torch.optim.LBFGS(
            parameters, lr=1.0, max_iter=20, history_size=HISTORY, tolerance_change=0.0, line_search_fn="strong_wolfe"
        ),
        _lbfgs,
        full_batch=True,
    ),
}


def packed(name: str, optimiser: torch.optim.Optimizer) -> State:
    """Return a copy on the CPU of what an optimiser remembers; its settings follow from the recipe."""
    states = optimiser.state_dict()["state"]
    return State(name, parts={str(number): _packed(entries) for number, entries in states.items() if entries})


def _packed(entries: Mapping[str, Any]) -> State:
    settings: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in entries.items():
        if isinstance(value, Tensor):
            tensors[name] = value.detach().clone().cpu()
        elif name in LISTS and value:
            tensors[name] = torch.stack(list(value)).cpu()
        elif name in ("t", "H_diag") and value is not None:  # a tensor or a number
            tensors[name] = torch.tensor(value if type(value) is int else [value], dtype=_dtype(value))
        elif value is not None and name != UNSAVED and name not in LISTS:
            settings[name] = value
    return State("parameter", settings, tensors)


def _dtype(value: float) -> torch.dtype:
    return torch.int64 if type(value) is int else torch.float64


def unpacked(name: str, state: State, parameters: Sequence[nn.Parameter]) -> dict[int, dict[str, Any]]:
    """Return what the optimiser of this name remembers of these parameters, each value checked.

    Raises:
        FileError: If the state is of another optimiser or other parameters, or a value is out of range.
    """
    if state.name != name:
        raise FileError(f"its optimiser is {state.name!r:.20}, not {name}")
    numbers = {str(number): number for number in range(len(parameters))}
    parts = state.read(**{key: Maybe(Unread()) for key in numbers})
    states = {}
    for key, part in parts.items():
        if part is None or (name == "lbfgs" and part.settings.get("n_iter") == 0):  # nothing to remember yet
            continue
        values = part.read(**OPTIMISERS[name].fields(parameters, numbers[key]))
        for entry in set(LISTS) & set(values):
            values[entry] = [] if values[entry] is None else list(values[entry].unbind())
        if len({len(values[entry]) for entry in LISTS if entry in values}) > 1:
            raise FileError("the lists of L-BFGS have different lengths; expected one length")
        if any(len(values[entry]) > HISTORY for entry in LISTS if entry in values):
            raise FileError(f"the lists of L-BFGS are longer than {HISTORY}")
        states[numbers[key]] = values
    return states
