"""Values on another device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def on_device(value: T, device: torch.device, keep: nn.Module | None = None) -> T:
    """Return the value with every tensor in it on the device; the value itself is not changed.

    Goes through dataclasses (also their cached values), mappings, tuples, lists and partial functions. Modules
    are copied, except ``keep``, which its owner moves. A value that is reached twice is moved once.

    >>> on_device({"a": torch.ones(2), "b": (1, "text")}, torch.device("meta"))["a"].device
    device(type='meta')
    """
    return _moved(value, device, {} if keep is None else {id(keep): (keep, keep)})


def _moved(value: Any, device: torch.device, done: dict[int, tuple[Any, Any]]) -> Any:
    """Return the value on the device. ``done`` maps addresses to (value, moved value), so that addresses stay taken."""
    if isinstance(value, torch.device):
        return device
    if isinstance(value, Tensor):
        return value.to(device)
    if id(value) not in done:
        done[id(value)] = (value, _rebuilt(value, device, done))
    return done[id(value)][1]


def _rebuilt(value: Any, device: torch.device, done: dict[int, tuple[Any, Any]]) -> Any:
    move = lambda part: _moved(part, device, done)
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(device)
    if isinstance(value, partial):
        return partial(move(value.func), *map(move, value.args), **{key: move(v) for key, v in value.keywords.items()})
    if is_dataclass(value) and not isinstance(value, type):
        moved = object.__new__(type(value))
        moved.__dict__.update({name: move(part) for name, part in vars(value).items()})
        return moved
    if isinstance(value, Mapping):
        return type(value)({key: move(part) for key, part in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its parts one by one
        return type(value)(*map(move, value))
    if isinstance(value, tuple | list):
        return type(value)(map(move, value))
    return value
