"""Values as a whole: as plain data for files, on another device, and with one cached result.

A file holds plain data, so that nothing is executed on loading.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from lapwing.core.inputs import rebuilt
from lapwing.core.schema import Field, Sizes, read, refused
from lapwing.errors import FileError, UnsupportedError

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
C = TypeVar("C", bound=type)


@dataclass(frozen=True, eq=False)
class State:
    """The plain data of one value: the registered name of its class, settings, tensors and the states of its parts.

    ``settings`` hold only what JSON can hold (numbers, strings, lists, None). Every class that can be saved has a
    method ``state()`` that returns a ``State``, and a class method ``from_state(state, ...)`` that builds the value
    again.

    ``from_state`` takes its values from ``read``, which checks them, before it builds anything.

    >>> State("Isotropic", {"mean": 0.0}).name
    'Isotropic'
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, State] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)  # known when a file is read: P weights, C outputs

    def read(self, /, **fields: Field) -> dict[str, Any]:
        """Return the checked value of every setting, tensor and part; each must have a field (``core.schema``).

        Raises:
            FileError: If a value is missing, of another kind or shape, out of range, or without a field.

        >>> from lapwing.core.schema import ABOVE_ZERO
        >>> State("Example", {"scale": 2.0}).read(scale=ABOVE_ZERO)
        {'scale': 2.0}
        """
        return read(self, fields)


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


class Part:
    """The state of another value, built again by ``from_state(state, *given)`` of the class that it names."""

    place: ClassVar[str] = "parts"

    def __init__(self, kind: type | tuple[type, ...], *given: Any) -> None:
        self.kinds, self.given = kind if isinstance(kind, tuple) else (kind,), given

    def checked(self, value: State, sizes: Sizes) -> Any:
        cls = class_named(value.name)
        words = " or ".join(kind.__name__ for kind in self.kinds)
        if not any(_has_members(cls, kind) for kind in self.kinds):
            raise refused(value.name, f"the name of a {words}")
        value = replace(value, sizes={name: n for name, n in sizes.items() if name in ("P", "C")})
        try:
            inspect.signature(cls.from_state).bind(value, *self.given)
        except TypeError as error:
            raise refused(value.name, f"the name of a {words}") from error
        return cls.from_state(value, *self.given)


@dataclass(frozen=True)
class Unread:
    """The state of a part as it is: its owner reads it after the other fields, with ``Part(...).checked``."""

    place: ClassVar[str] = "parts"

    def checked(self, value: State, sizes: Sizes) -> State:
        return value


def _has_members(cls: Any, kind: Any) -> bool:
    """Return whether the class inherits from the kind, or has all its public methods."""
    members = {name for name in dir(kind) if callable(getattr(kind, name)) and not name.startswith("_")}
    return hasattr(cls, "from_state") and (kind in cls.__mro__ or all(hasattr(cls, name) for name in members))


def on_device(value: T, device: torch.device, keep: nn.Module | None = None) -> T:
    """Return the value with every tensor in it on the device; the value itself is not changed.

    Goes through dataclasses (also their cached values), mappings, tuples, lists and partial functions. Modules
    are copied, except ``keep``, which its owner moves. A value that is reached twice is moved once.

    >>> on_device({"a": torch.ones(2), "b": (1, "text")}, torch.device("meta"))["a"].device
    device(type='meta')
    """
    return _transferred(value, device, {} if keep is None else {id(keep): (keep, keep)})


def _transferred(value: Any, device: torch.device, done: dict[int, tuple[Any, Any]]) -> Any:
    """Return the value on the device.

    ``done`` maps addresses to values and their copies. It keeps the values, so that no address is used twice.
    """
    if isinstance(value, torch.device):
        return device
    if isinstance(value, Tensor):
        return value.to(device)
    if id(value) not in done:
        done[id(value)] = (value, _rebuilt(value, device, done))
    return done[id(value)][1]


def _rebuilt(value: Any, device: torch.device, done: dict[int, tuple[Any, Any]]) -> Any:
    move = lambda part: _transferred(part, device, done)
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(device)
    if isinstance(value, partial):
        return partial(move(value.func), *map(move, value.args), **{key: move(v) for key, v in value.keywords.items()})
    if is_dataclass(value) and not isinstance(value, type):
        result = object.__new__(type(value))
        result.__dict__.update({name: move(part) for name, part in vars(value).items()})
        return result
    if isinstance(value, Mapping):
        return type(value)({key: move(part) for key, part in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        return rebuilt(value, [move(part) for part in value])
    return value


@dataclass(eq=False)
class Latest(Generic[K, V]):
    """The result of a computation, kept until it is asked for another key.

    A frozen dataclass holds one as a ``cached_property``: ``dataclasses.replace`` then starts with an empty one, so
    that a changed value never returns the result of the old value. It is a dataclass itself, so that ``on_device``
    moves its contents.

    >>> latest = Latest[int, str]()
    >>> latest.at(1, lambda: "computed"), latest.at(1, lambda: "not computed"), latest.at(2, lambda: "again")
    ('computed', 'computed', 'again')
    """

    same: Callable[[K, K], bool] = operator.eq
    entry: tuple[K, V] | None = None

    def at(self, key: K, compute: Callable[[], V]) -> V:
        """Return the result for this key, computed only if the last key was another."""
        entry = self.entry
        if entry is None or not self.same(entry[0], key):
            self.entry = entry = (key, compute())
        return entry[1]
