"""Values as plain data for files: what every field may hold, and reading nothing else.

``State.read`` takes one field for each setting, tensor and part. Nothing is built from values that a field refuses.

Values as a whole: as plain data for files, on another device, and with one cached result.

A file holds plain data, so that nothing is executed on loading.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lapwing.errors import FileError, UnsupportedError
from lapwing.runtime.settings import Rule, declared_settings, is_integer

Sizes = dict[str, int]
Length = int | str | None  # of a dimension: a number, a letter that stands for the same number everywhere, or any
LARGEST, SMALLEST = 1e30, 1e-30  # of real numbers, so that products of a few of them neither overflow nor vanish
MOST = 2**53  # of whole numbers
MEMBERS = 100_000  # the most functions that a posterior may consist of, so that a prediction ends
ROUNDING = 1e-3  # relative, of matrices that were computed in float32 and may be stored in float64


class Field(Protocol):
    """One value in a state."""

    @property
    def place(self) -> str:
        """Where it is: "settings", "tensors" or "parts"."""
        ...

    def checked(self, value: Any, sizes: Sizes) -> Any:
        """Return the value as its owner takes it; raise ``FileError`` if it is wrong."""
        ...


def refused(seen: Any, expected: str) -> FileError:
    """Return the error for a value that is not as expected."""
    return FileError(f"is {seen!r:.60}; expected {expected}")


def _same_length(seen: int, length: Length, sizes: Sizes) -> bool:
    """Return whether a length is as declared; a letter without a number takes the number that is seen."""
    known = sizes.setdefault(length, seen) if isinstance(length, str) else length
    return known is None or seen == known


@dataclass(frozen=True)
class Real:
    """A number from ``least`` to ``most``: finite and at most 1e30 in size, unless they say otherwise."""

    least: float = -LARGEST
    most: float = LARGEST
    place: ClassVar[str] = "settings"

    def checked(self, value: Any, sizes: Sizes) -> Any:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refused(value, "a number")
        if not self.least <= value <= self.most:
            raise refused(value, f"a number from {self.least:g} to {self.most:g}")
        return value


ABOVE_ZERO = Real(SMALLEST)
UNLIMITED = Real(-math.inf, math.inf)


@dataclass(frozen=True)
class Whole:
    """A whole number; that of a letter (see ``Length``), if there is one."""

    least: int = 0
    most: int = MOST
    size: str | None = None
    place: ClassVar[str] = "settings"

    def checked(self, value: Any, sizes: Sizes) -> Any:
        if type(value) is not int or not self.least <= value <= self.most:
            raise refused(value, f"a whole number from {self.least} to {self.most}")
        if not _same_length(value, self.size, sizes):
            raise refused(value, f"{sizes[str(self.size)]}")
        return value


@dataclass(frozen=True)
class Flag:
    """True or false."""

    place: ClassVar[str] = "settings"

    def checked(self, value: Any, sizes: Sizes) -> Any:
        if not isinstance(value, bool):
            raise refused(value, "true or false")
        return value


@dataclass(frozen=True)
class Text:
    """A text; one of ``choices`` if there are some."""

    choices: tuple[str, ...] = ()
    place: ClassVar[str] = "settings"

    def checked(self, value: Any, sizes: Sizes) -> Any:
        if not isinstance(value, str) or (self.choices and value not in self.choices):
            raise refused(value, f"one of {', '.join(self.choices)}" if self.choices else "a text")
        return value


@dataclass(frozen=True)
class ListOf:
    """A list of values of one kind, returned as a tuple."""

    item: Field
    length: Length = None
    place: ClassVar[str] = "settings"

    def checked(self, value: Any, sizes: Sizes) -> Any:
        if not isinstance(value, list | tuple) or not _same_length(len(value), self.length, sizes):
            raise refused(value, "a list" + (f" of length {self.length}" if self.length is not None else ""))
        return tuple(self.item.checked(item, sizes) for item in value)


@dataclass(frozen=True)
class MapOf:
    """A mapping from texts to values of one kind."""

    item: Field
    place: ClassVar[str] = "settings"

    def checked(self, value: Any, sizes: Sizes) -> Any:
        if not isinstance(value, Mapping):
            raise refused(value, "a mapping")
        return {key: self.item.checked(item, sizes) for key, item in value.items()}


class Record:
    """A mapping with these keys and no others; ``build`` makes the result from the values.

    A field that is ``Later`` may be absent: then ``build`` gives it its default.
    """

    place: ClassVar[str] = "settings"

    def __init__(self, build: Callable[..., Any], /, **fields: Field) -> None:
        self.build, self.fields = build, fields

    def checked(self, value: Any, sizes: Sizes) -> Any:
        needed = {name for name, each in self.fields.items() if not isinstance(each, Later)}
        if not isinstance(value, Mapping) or not needed <= set(value) <= set(self.fields):
            raise refused(value, f"exactly the keys {', '.join(self.fields)}")
        present = {name: each for name, each in self.fields.items() if name in value}
        return self.build(**{name: _named(name, each, value[name], sizes) for name, each in present.items()})


@dataclass(frozen=True)
class Array:
    """A tensor of this shape. Real numbers are as for ``Real``, in float32 or float64; ``dtype`` converts them."""

    shape: tuple[Length, ...]
    least: float = -LARGEST
    most: float = LARGEST
    whole: bool = False
    dtype: torch.dtype | None = None  # to convert to
    stored: torch.dtype | None = None  # in the file, if it must be this one
    also: Callable[[Tensor], str] | None = None  # returns what is wrong, in words, or an empty text
    place: ClassVar[str] = "tensors"

    def checked(self, value: Tensor, sizes: Sizes) -> Tensor:
        kinds = (torch.int64,) if self.whole else (torch.float32, torch.float64)
        kinds = kinds if self.stored is None else (self.stored,)
        if value.dtype not in kinds:
            raise FileError(f"is {value.dtype}; expected {' or '.join(map(str, kinds))}")
        pairs = zip(value.shape, self.shape, strict=False)
        if value.ndim != len(self.shape) or not all(_same_length(n, length, sizes) for n, length in pairs):
            expected = ", ".join(str(sizes.get(n, n) if isinstance(n, str) else n) for n in self.shape)
            raise FileError(f"has the shape {tuple(value.shape)}; expected ({expected})")
        value = value if self.dtype is None else value.to(self.dtype)
        if value.numel():
            low, high = (end.item() for end in value.aminmax())
            if not (self.least <= low and high <= self.most):  # not true for NaN either
                raise FileError(f"runs from {low:g} to {high:g}; expected {self.least:g} to {self.most:g}")
        if self.also is not None and (wrong := self.also(value)):
            raise FileError(wrong)
        return value


@dataclass(frozen=True)
class Admitted:
    """A setting that a rule for users admits too; numbers are neither huge nor tiny. Lists become tuples."""

    rule: Rule
    place: ClassVar[str] = "settings"

    def checked(self, value: Any, sizes: Sizes) -> Any:
        if not (_is_moderate(value) and self.rule.admits(value)):
            raise refused(value, self.rule.expected)
        return tuple(value) if isinstance(value, list) else value


def _is_moderate(value: Any) -> bool:
    """Return whether a value is a text, a flag, None, a number that is neither huge nor tiny, or a list of such."""
    if isinstance(value, list | tuple):
        return all(map(_is_moderate, value))
    if isinstance(value, float):
        return value == 0 or SMALLEST <= abs(value) <= LARGEST
    return isinstance(value, str | None) or (isinstance(value, int) and abs(value) <= MOST)


@dataclass(frozen=True)
class Samples:
    """Inputs of a network, a row for each sample: whole numbers, or real ones, which take the dtype of its weights."""

    length: Length
    dtype: torch.dtype
    place: ClassVar[str] = "tensors"

    def checked(self, value: Tensor, sizes: Sizes) -> Tensor:
        if (
            not value.ndim
            or not _same_length(len(value), self.length, sizes)
            or not value.numel()
            or value.is_complex()
        ):
            raise FileError(
                f"has the shape {tuple(value.shape)} and dtype {value.dtype}; expected a row for each sample"
            )
        if not value.is_floating_point():
            return value
        value = value.to(self.dtype)
        if not bool((value.abs() <= LARGEST).all()):
            raise FileError(f"has numbers that are not finite, or larger than {LARGEST:g}; expected none")
        return value


class Maybe:
    """A value, or none, which stands for ``none``: null among settings, absent among tensors and parts."""

    def __init__(self, field: Field, none: float | None = None) -> None:
        self.field, self.place, self.none = field, field.place, none

    def checked(self, value: Any, sizes: Sizes) -> Any:
        return self.none if value is None else self.field.checked(value, sizes)


class Later:
    """A value that files of earlier versions do not have, and that then is not among the values read."""

    def __init__(self, field: Field) -> None:
        self.field, self.place = field, field.place

    def checked(self, value: Any, sizes: Sizes) -> Any:
        return self.field.checked(value, sizes)


class Either:
    """A value that one of these fields takes; the first that does."""

    def __init__(self, *fields: Field) -> None:
        self.fields, self.place = fields, fields[0].place

    def checked(self, value: Any, sizes: Sizes) -> Any:
        errors = []
        for each in self.fields:
            try:
                return each.checked(value, sizes)
            except FileError as error:
                errors.append(str(error))
        raise FileError(", or ".join(errors))


def read(state: State, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the checked values of a state; raise ``FileError`` if one is missing, wrong or not among the fields."""
    sizes, values = dict(state.sizes), {}
    sources: dict[str, Mapping[str, Any]] = {
        "settings": state.settings, "tensors": state.tensors, "parts": state.parts
    }  # fmt: skip
    for place, source in sources.items():
        expected = [name for name, each in fields.items() if each.place == place]
        absent = Later if place == "settings" else Later | Maybe
        optional = [name for name in expected if isinstance(fields[name], absent)]
        missing, unknown = set(expected) - set(source) - set(optional), set(source) - set(expected)
        if missing or unknown:
            raise FileError(
                f"{place} of {state.name}: missing {sorted(missing)[:4]}, unknown {sorted(unknown)[:4]!r:.200}"
            )
    for name, each in fields.items():
        source = sources[each.place]
        if isinstance(each, Later) and name not in source:
            continue
        values[name] = _named(f"{name} of {state.name}", each, source.get(name), sizes)
    return values


def _named(name: str, field: Field, value: Any, sizes: Sizes) -> Any:
    """Return the checked value; an error says the name."""
    try:
        return field.checked(value, sizes)
    except FileError as error:
        text = str(error)
        raise FileError(f"{name} {text}" if text.startswith(("is ", "has ", "runs ")) else f"{name}: {text}") from error


# Checks of whole matrices, for ``Array.also``.


def semidefinite(matrix: Tensor) -> str:
    """Check that matrices (..., n, n) are symmetric and have no negative eigenvalue beyond float32 rounding.

    Cost: one Cholesky factorisation.
    """
    matrix = matrix.double()
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = diagonal.amax(-1) if diagonal.numel() else matrix.new_zeros(matrix.shape[:-2])
    apart = (matrix - matrix.mT).abs().amax((-2, -1)) if diagonal.numel() else scale
    if bool((apart > ROUNDING * scale).any()):
        return "is not symmetric; expected a symmetric matrix"
    if bool((diagonal < 0).any()):
        return "has negative numbers on its diagonal; expected none"
    shift = 1e-5 * diagonal.sum(-1) + 1e-300
    raised = matrix + torch.diag_embed(shift.unsqueeze(-1).expand(diagonal.shape))
    if bool(torch.linalg.cholesky_ex(raised)[1].any()):
        return "has negative eigenvalues; expected none"
    return ""


def symmetric(matrix: Tensor) -> str:
    """Check that a matrix (n, n) is symmetric up to float32 rounding."""
    apart, scale = (matrix - matrix.mT).abs().max(), matrix.abs().max()
    return "is not symmetric; expected a symmetric matrix" if bool(apart > ROUNDING * scale) else ""


def orthonormal(matrix: Tensor) -> str:
    """Check that the rows of matrices (..., m, n) are orthonormal up to float32 rounding; so are columns if m = n."""
    apart = matrix @ matrix.mT - torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    wrong = bool(apart.numel()) and not math.isclose(float(apart.abs().max()), 0, abs_tol=ROUNDING)
    return "has rows that are not orthonormal; expected orthonormal ones" if wrong else ""


def distinct(values: Tensor) -> str:
    """Check that no number of (n,) repeats."""
    return "" if bool((values.sort().values.diff() > 0).all()) else "has a number twice; expected each once"


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

        >>> from lapwing.runtime.state import ABOVE_ZERO
        >>> State("Example", {"scale": 2.0}).read(scale=ABOVE_ZERO)
        {'scale': 2.0}
        """
        return read(self, fields)


def state_of(value: Any, **more: Any) -> State:
    """Return the state of a dataclass that declares its settings (``HasSettings``), and ``more`` settings."""
    settings: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    refuse_undeclared(type(value))
    fields = setting_fields(type(value))
    for name, each in declared_settings(type(value)).items():
        key = each.metadata["name"] or name
        entry = getattr(value, key)
        if fields[key].place == "tensors":
            tensors |= {} if entry is None else {key: entry.detach()}
        elif not isinstance(fields[key], Later) or _plain(entry) != each.default:
            settings[key] = _plain(entry)
    return State(type(value).__name__, {**settings, **more}, tensors)


def values_from(cls: type, state: State, **more: Field) -> dict[str, Any]:
    """Return the checked settings of a class from a state, by the names that its constructor takes, and more fields."""
    values = state.read(**setting_fields(cls), **more)
    for name, each in declared_settings(cls).items():
        if each.metadata["name"]:
            values[name] = values.pop(each.metadata["name"])
    return values


def setting_fields(cls: type) -> dict[str, Field]:
    """Return the field of each setting of a class in a file: that of its declaration, or its rule."""
    declared = [(name, each.metadata) for name, each in declared_settings(cls).items()]
    return {each["name"] or name: each["stored"] or Admitted(each["rule"]) for name, each in declared}


def refuse_undeclared(cls: type) -> None:
    """Raise unless every field of a dataclass is declared with ``setting``: no file could hold the others."""
    names = [each.name for each in fields(cls)] if is_dataclass(cls) else [cls.__name__]
    undeclared = [name for name in names if not is_dataclass(cls) or name not in declared_settings(cls)]
    if undeclared:
        raise UnsupportedError(
            f"{cls.__name__} has no file form, since nothing says what a file may hold for {', '.join(undeclared)}. "
            "Declare every field with setting(default, rule), or write the methods state() and from_state()."
        )


def _plain(value: Any) -> Any:
    """Return a setting as what JSON can hold: numbers and sequences of numbers without types; infinity as None."""
    if value is None or isinstance(value, str | bool):
        return value
    if is_integer(value):
        return int(value)
    plain: float | list[float] = torch.as_tensor(value, dtype=torch.float64).tolist()
    return None if plain == math.inf else plain


_CLASSES: dict[str, Any] = {}
RENAMED = {"Diagonal": "DiagonalPrior"}  # names of classes in files of 0.2.0, and what they are called now


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
    known = RENAMED.get(name, name)
    if known not in _CLASSES:
        raise FileError(f"the file names the class {name!r}, which this version does not have.")
    return _CLASSES[known]


class PartOf:
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
    """The state of a part as it is: its owner reads it after the other fields, with ``PartOf(...).checked``."""

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


def rebuilt(sequence: Any, values: list[Any]) -> Any:
    """Return the same kind of tuple or list with other values; named tuples take them one by one."""
    return type(sequence)(*values) if hasattr(sequence, "_fields") else type(sequence)(values)
