"""Plain data that files hold, and the fields that check it.

A file holds plain data, so that nothing is executed on loading. ``State.read`` takes one ``Field`` for each setting,
tensor and part, and nothing is built from values that a field refuses. The states of most classes follow from their
fields, which are declared with ``stored`` or ``setting``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from dataclasses import Field as DataclassField
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lapwing.errors import FileError, UnsupportedError
from lapwing.runtime.settings import Rule, find_undeclared, is_integer, refuse_undeclared

C = TypeVar("C", bound=type)

Length = int | str | None  # of a dimension: a number, a letter that stands for the same number everywhere, or any
LARGEST, SMALLEST = 1e30, 1e-30  # of real numbers, so that products of a few of them neither overflow nor vanish
MOST = 2**53  # of whole numbers
MEMBERS = 100_000  # the most functions that a posterior may consist of, so that a prediction ends
ROUNDING = 1e-3  # relative, of matrices that were computed in float32 and may be stored in float64


@dataclass(frozen=True)
class Known:
    """Facts known while a file is read: lengths by their letters, the dtype of the network's weights, the owner."""

    lengths: dict[str, int] = field(default_factory=dict)  # P weights, C outputs; others as they are met in one state
    dtype: torch.dtype | None = None
    owner: object = None  # what the ``from_state`` of the value got, for its parts

    def fits(self, seen: int, length: Length) -> bool:
        """Return whether a length is as declared; a letter without a number takes the number that is seen."""
        expected = self.lengths.setdefault(length, seen) if isinstance(length, str) else length
        return expected is None or seen == expected

    @property
    def within_parts(self) -> Known:
        """The facts that hold in every part: other letters have one meaning in one state alone."""
        return Known({letter: n for letter, n in self.lengths.items() if letter in ("P", "C")}, self.dtype)


class Field:
    """One value in a state: its place, and what it may be."""

    place = "settings"  # or "tensors" or "parts"
    is_later = False  # whether files of earlier versions lack it, and it is then not among the values read

    @property
    def may_be_absent(self) -> bool:
        """Whether a file may lack it."""
        return self.is_later

    def read(self, value: Any, known: Known) -> Any:
        """Return the value as its owner takes it; raise ``FileError`` if it is wrong."""
        raise NotImplementedError


def refusal(seen: object, expected: str) -> FileError:
    """Return the error for a value that is not as expected."""
    return FileError(f"is {seen!r:.60}; expected {expected}")


@dataclass(frozen=True)
class Real(Field):
    """A number from ``least`` to ``most``: finite and at most 1e30 in size, unless they say otherwise."""

    least: float = -LARGEST
    most: float = LARGEST

    def read(self, value: object, known: Known) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refusal(value, "a number")
        if not self.least <= value <= self.most:
            raise refusal(value, f"a number from {self.least:g} to {self.most:g}")
        return value


ABOVE_ZERO = Real(SMALLEST)
UNLIMITED = Real(-math.inf, math.inf)


@dataclass(frozen=True)
class Whole(Field):
    """A whole number; that of a letter (see ``Length``), if there is one."""

    least: int = 0
    most: int = MOST
    size: str | None = None

    def read(self, value: object, known: Known) -> int:
        if type(value) is not int or not self.least <= value <= self.most:
            raise refusal(value, f"a whole number from {self.least} to {self.most}")
        if not known.fits(value, self.size):
            raise refusal(value, f"{known.lengths[str(self.size)]}")
        return value


@dataclass(frozen=True)
class Flag(Field):
    """True or false."""

    def read(self, value: object, known: Known) -> bool:
        if not isinstance(value, bool):
            raise refusal(value, "true or false")
        return value


@dataclass(frozen=True)
class Text(Field):
    """A text; one of ``choices`` if there are some."""

    choices: tuple[str, ...] = ()

    def read(self, value: object, known: Known) -> str:
        if not isinstance(value, str) or (self.choices and value not in self.choices):
            raise refusal(value, f"one of {', '.join(self.choices)}" if self.choices else "a text")
        return value


@dataclass(frozen=True)
class ListOf(Field):
    """A list of values of one kind, returned as a tuple."""

    item: Field
    length: Length = None

    def read(self, value: object, known: Known) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not known.fits(len(value), self.length):
            raise refusal(value, "a list" + (f" of length {self.length}" if self.length is not None else ""))
        return tuple(self.item.read(item, known) for item in value)


@dataclass(frozen=True)
class MapOf(Field):
    """A mapping from texts to values of one kind."""

    item: Field

    def read(self, value: object, known: Known) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise refusal(value, "a mapping")
        return {key: self.item.read(item, known) for key, item in value.items()}


class Record(Field):
    """A mapping with these keys and no others; ``build`` makes the result from the values.

    A field that is ``Later`` may be absent: then ``build`` gives it its default.
    """

    def __init__(self, build: Callable[..., object], /, **fields: Field) -> None:
        self.build, self.fields = build, fields

    def read(self, value: object, known: Known) -> Any:
        needed = {name for name, each in self.fields.items() if not each.is_later}
        if not isinstance(value, Mapping) or not needed <= set(value) <= set(self.fields):
            raise refusal(value, f"exactly the keys {', '.join(self.fields)}")
        present = {name: each for name, each in self.fields.items() if name in value}
        return self.build(**{name: _read_named(name, each, value[name], known) for name, each in present.items()})


@dataclass(frozen=True)
class Array(Field):
    """A tensor of this shape. Real numbers are as for ``Real``, in float32 or float64; ``dtype`` converts them."""

    shape: tuple[Length, ...]
    least: float = -LARGEST
    most: float = LARGEST
    whole: bool = False
    dtype: torch.dtype | Literal["weights"] | None = None  # to convert to; that of the network's weights
    stored: torch.dtype | None = None  # in the file, if it must be this one
    also: Callable[[Tensor], str] | None = None  # returns what is wrong, in words, or an empty text
    place = "tensors"

    def read(self, value: Tensor, known: Known) -> Tensor:
        kinds = (torch.int64,) if self.whole else (torch.float32, torch.float64)
        kinds = kinds if self.stored is None else (self.stored,)
        if value.dtype not in kinds:
            raise FileError(f"is {value.dtype}; expected {' or '.join(map(str, kinds))}")
        pairs = zip(value.shape, self.shape, strict=False)
        if value.ndim != len(self.shape) or not all(known.fits(n, length) for n, length in pairs):
            expected = ", ".join(str(known.lengths.get(n, n) if isinstance(n, str) else n) for n in self.shape)
            raise FileError(f"has the shape {tuple(value.shape)}; expected ({expected})")
        dtype = known.dtype if self.dtype == "weights" else self.dtype
        value = value if dtype is None else value.to(dtype)
        if value.numel():
            low, high = (end.item() for end in value.aminmax())
            if not (self.least <= low and high <= self.most):  # not true for NaN either
                raise FileError(f"runs from {low:g} to {high:g}; expected {self.least:g} to {self.most:g}")
        if self.also is not None and (wrong := self.also(value)):
            raise FileError(wrong)
        return value


@dataclass(frozen=True)
class Admitted(Field):
    """A setting that a rule for users admits too; numbers are neither huge nor tiny. Lists become tuples."""

    rule: Rule

    def read(self, value: object, known: Known) -> Any:
        if not (_is_moderate(value) and self.rule.admits(value)):
            raise refusal(value, self.rule.expected)
        return tuple(value) if isinstance(value, list) else value


def _is_moderate(value: object) -> bool:
    """Return whether a value is a text, a flag, None, a number that is neither huge nor tiny, or a list of such."""
    if isinstance(value, list | tuple):
        return all(map(_is_moderate, value))
    if isinstance(value, float):
        return value == 0 or SMALLEST <= abs(value) <= LARGEST
    return isinstance(value, str | None) or (isinstance(value, int) and abs(value) <= MOST)


@dataclass(frozen=True)
class Samples(Field):
    """Inputs of a network, a row for each sample: whole numbers, or real ones, which take the dtype of its weights."""

    length: Length
    dtype: torch.dtype
    place = "tensors"

    def read(self, value: Tensor, known: Known) -> Tensor:
        if not value.ndim or not known.fits(len(value), self.length) or not value.numel() or value.is_complex():
            raise FileError(
                f"has the shape {tuple(value.shape)} and dtype {value.dtype}; expected a row for each sample"
            )
        if not value.is_floating_point():
            return value
        value = value.to(self.dtype)
        if not bool((value.abs() <= LARGEST).all()):
            raise FileError(f"has numbers that are not finite, or larger than {LARGEST:g}; expected none")
        return value


class Maybe(Field):
    """A value, or none, which stands for ``none``: null among settings, absent among tensors and parts."""

    def __init__(self, field: Field, none: float | None = None) -> None:
        self.field, self.place, self.none = field, field.place, none

    def read(self, value: object, known: Known) -> Any:
        return self.none if value is None else self.field.read(value, known)

    @property
    def may_be_absent(self) -> bool:
        return self.place != "settings"


class Later(Field):
    """A value that files of earlier versions do not have, and that then is not among the values read."""

    is_later = True

    def __init__(self, field: Field) -> None:
        self.field, self.place = field, field.place

    def read(self, value: object, known: Known) -> Any:
        return self.field.read(value, known)


class Either(Field):
    """A value that one of these fields takes; the first that does."""

    def __init__(self, *fields: Field) -> None:
        self.fields, self.place = fields, fields[0].place

    def read(self, value: object, known: Known) -> Any:
        errors = []
        for each in self.fields:
            try:
                return each.read(value, known)
            except FileError as error:
                errors.append(str(error))
        raise FileError(", or ".join(errors))


def _read_named(name: str, field: Field, value: object, known: Known) -> Any:
    """Return the checked value; an error says the name."""
    try:
        return field.read(value, known)
    except FileError as error:
        text = str(error)
        raise FileError(f"{name} {text}" if text.startswith(("is ", "has ", "runs ")) else f"{name}: {text}") from error


WEIGHTS = Array(("P",), dtype="weights")  # one number for each selected weight


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
    known: Known = Known()

    def read(self, /, **fields: Field) -> dict[str, Any]:
        """Return the checked value of every setting, tensor and part; each must have a field.

        Raises:
            FileError: If a value is missing, of another kind or shape, out of range, or without a field.

        >>> from lapwing.runtime.states import ABOVE_ZERO
        >>> State("Example", {"scale": 2.0}).read(scale=ABOVE_ZERO)
        {'scale': 2.0}
        """
        known, values = replace(self.known, lengths=dict(self.known.lengths)), {}
        sources: dict[str, Mapping[str, Any]] = {
            "settings": self.settings, "tensors": self.tensors, "parts": self.parts
        }  # fmt: skip
        for place, source in sources.items():
            expected = [name for name, each in fields.items() if each.place == place]
            optional = [name for name in expected if fields[name].may_be_absent]
            missing, unknown = set(expected) - set(source) - set(optional), set(source) - set(expected)
            if missing or unknown:
                raise FileError(
                    f"{place} of {self.name}: missing {sorted(missing)[:4]}, unknown {sorted(unknown)[:4]!r:.200}"
                )
        for name, each in fields.items():
            source = sources[each.place]
            if name in source or not each.is_later:
                values[name] = _read_named(f"{name} of {self.name}", each, source.get(name), known)
        return values


def stored(in_file: Field, default: Any = MISSING) -> Any:
    """Declare a field of a dataclass that inherits from ``Stored``, and what a file may hold for it."""
    return field(default=default, metadata={"stored": in_file, "name": ""})


class Stored:
    """A dataclass with a form in files, which follows from the fields declared with ``stored`` and ``setting``.

    Every other field without a default comes from the owner, which ``from_state`` gets: the owner itself, or its
    attribute of that name.
    """

    def state(self) -> State:
        """Return the value as plain data, for a file."""
        return state_of(self)

    @classmethod
    def from_state(cls, state: State, owner: object = None) -> Any:
        """Build the value from its state."""
        refuse_undeclared(cls, has_owner=owner is not None)
        names = find_undeclared(cls, with_default=False)
        state = replace(state, known=replace(state.known, owner=owner))
        return cls(**{name: getattr(owner, name, owner) for name in names}, **values_from(cls, state))


def state_of(value: Any, **more: Any) -> State:
    """Return the state of a dataclass whose fields are declared with ``stored`` or ``setting``, and more settings."""
    refuse_undeclared(type(value), has_owner=True)
    places: dict[str, dict[str, Any]] = {"settings": {}, "tensors": {}, "parts": {}}
    for declared, name, each in _in_files(type(value)):
        entry = getattr(value, name)
        if each.place == "settings":
            entry = plain(entry)
            places[each.place] |= {} if each.is_later and entry == declared.default else {name: entry}
        elif entry is not None:
            places[each.place][name] = entry.state() if each.place == "parts" else entry.detach()
    places["settings"] |= more
    return State(type(value).__name__, places["settings"], places["tensors"], places["parts"])


def values_from(cls: type, state: State, **more: Field) -> dict[str, Any]:
    """Return the checked values of a class from a state, by the names that its constructor takes, and more fields."""
    values = state.read(**stored_fields(cls), **more)
    names = {name: declared.name for declared, name, _ in _in_files(cls)}
    return {names.get(name, name): value for name, value in values.items()}


def stored_fields(cls: type) -> dict[str, Field]:
    """Return what a file may hold for each declared field of a class, by its name in files."""
    return {name: each for _, name, each in _in_files(cls)}


def _in_files(cls: type) -> list[tuple[DataclassField[Any], str, Field]]:
    """Return each declared field, its name in files, and what they may hold: as declared, or what its rule admits."""
    return [
        (each, each.metadata["name"] or each.name, each.metadata["stored"] or Admitted(each.metadata["rule"]))
        for each in fields(cls)  # type: ignore[arg-type]
        if "stored" in each.metadata
    ]


def plain(value: Any) -> object:
    """Return a value as what JSON can hold: dataclasses as mappings, numbers without types, infinity as None.

    >>> plain(torch.tensor([1.0, 2.0])), plain(math.inf)
    ([1.0, 2.0], None)
    """
    if is_dataclass(type(value)):
        return asdict(value)
    if value is None or isinstance(value, str | bool):
        return value
    if is_integer(value):
        return int(value)
    if isinstance(value, tuple | list) and any(isinstance(each, str) for each in value):
        return list(value)
    numbers: float | list[float] = torch.as_tensor(value, dtype=torch.float64).tolist()
    return None if numbers == math.inf else numbers


_CLASSES: dict[str, type] = {}
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


class PartOf(Field):
    """The state of another value, built again by ``from_state(state, *given)`` of the class that it names.

    Without ``given`` it gets what the ``from_state`` of its owner got.
    """

    place = "parts"

    def __init__(self, kind: type, *given: Any) -> None:
        self.kind, self.given = kind, given

    def read(self, value: State, known: Known) -> Any:
        cls, refused = class_named(value.name), refusal(value.name, f"the name of a {self.kind.__name__}")
        if not issubclass(cls, self.kind):
            raise refused
        value = replace(value, known=known.within_parts)
        given = self.given if self.given or known.owner is None else (known.owner,)
        try:
            inspect.signature(cls.from_state).bind(value, *given)
        except (AttributeError, TypeError) as error:  # without a file form, or for another owner
            raise refused from error
        return cls.from_state(value, *given)


@dataclass(frozen=True)
class Unread(Field):
    """The state of a part as it is: its owner reads it after the other fields, with ``PartOf(...).read``."""

    place = "parts"

    def read(self, value: State, known: Known) -> State:
        return value
