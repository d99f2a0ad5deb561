"""Plain data that represent a value, so that it can be saved to a file without executing anything on loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from lapwing.errors import FileError, UnsupportedError


@dataclass(frozen=True, eq=False)
class State:
    """The plain data of one value: the registered name of its class, settings, tensors and the states of its parts.

    ``settings`` hold only what JSON can hold (numbers, strings, lists, None). Every class that can be saved has a
    method ``state()`` that returns a ``State``, and a class method ``from_state(state, ...)`` that builds the value
    again.

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

    Raises:
        UnsupportedError: If another class has the name already: files of either would be read with the wrong one.

    >>> @saved
    ... class Example:
    ...     pass
    >>> class_named("Example") is Example
    True
    """
    known = _CLASSES.get(cls.__name__, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UnsupportedError(
            f"files already know a class {cls.__name__!r}, from {known.__module__}; give this one another name."
        )
    _CLASSES[cls.__name__] = cls
    return cls


def class_named(name: str) -> Any:
    """Return the registered class of this name; raise ``FileError`` if there is none."""
    if name not in _CLASSES:
        raise FileError(f"the file names the class {name!r}, which this version does not have.")
    return _CLASSES[name]
