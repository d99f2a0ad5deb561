"""Values taken apart into plain data, so that a file can hold them and nothing in a file is ever executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from lapwing.errors import FileError


@dataclass(frozen=True, eq=False)
class State:
    """A value taken apart: the registered name of its class, settings, tensors, and the states of its parts.

    ``settings`` hold what JSON can hold (numbers, strings, lists, None). Every class that can be saved has a method
    ``state()`` that returns one, and a class method ``from_state(state, ...)`` that builds the value again.

    >>> State("Isotropic", {"mean": 0.0}).name
    'Isotropic'
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, State] = field(default_factory=dict)


C = TypeVar("C", bound=type)
_CLASSES: dict[str, Any] = {}


def saved(cls: C) -> C:
    """Register a class that files may name, by its own name. A decorator.

    >>> @saved
    ... class Example:
    ...     pass
    >>> class_named("Example") is Example
    True
    """
    _CLASSES[cls.__name__] = cls
    return cls


def class_named(name: str) -> Any:
    """Return the registered class of this name; raise ``FileError`` if there is none."""
    if name not in _CLASSES:
        raise FileError(f"the file names the class {name!r}, which this version does not have.")
    return _CLASSES[name]
