"""Settings and values: the rules for what users give, and the plain data that files hold.

A class inherits from ``HasSettings`` and declares each setting once, with ``setting``: the check when an object is
made, the form in a file and the check when a file is read follow. A function checks its arguments by the rules. Every
refusal has one form: what is expected in words.

A file holds plain data, so that nothing is executed on loading. ``State.read`` takes one ``Field`` for each setting,
tensor and part, and nothing is built from values that a field refuses. Values as a whole are here too: on another
device (``on_device``), and with one cached result (``Latest``).
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from dataclasses import Field as DataclassField
from difflib import get_close_matches
from types import UnionType
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from lapwing.errors import CallError, DataError, FileError, LapwingError, UnsupportedError

T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., Any])
K = TypeVar("K")
V = TypeVar("V")
C = TypeVar("C", bound=type)

Length = int | str | None  # of a dimension: a number, a letter that stands for the same number everywhere, or any
LARGEST, SMALLEST = 1e30, 1e-30  # of real numbers, so that products of a few of them neither overflow nor vanish
MOST = 2**53  # of whole numbers
MEMBERS = 100_000  # the most functions that a posterior may consist of, so that a prediction ends
ROUNDING = 1e-3  # relative, of matrices that were computed in float32 and may be stored in float64


def is_real(value: object) -> bool:
    """Return whether the value is a real number, NaN and infinity included; booleans are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Return whether the value is a whole number by its type; booleans are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def describe(value: object) -> str:
    """Describe a value in a few words, for an error message.

    >>> describe(torch.zeros(3, 2)), describe(dict), describe("kron")
    ('a tensor of shape (3, 2) and dtype torch.float32', 'the class dict, not an object', "'kron'")
    """
    if isinstance(value, Tensor) and value.ndim:
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object"
    if isinstance(value, nn.Module):
        return f"the module {type(value).__name__}"
    return f"{value!r:.80}"


def describe_kind(value: object) -> str:
    """Describe a value by its class and size, where its contents say nothing.

    >>> describe_kind([0.5, 1.0]), describe_kind({"x": 0.5})
    ('a list of 2', 'a dict')
    """
    if isinstance(value, Tensor):
        return describe(value)
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{size}"


@dataclass(frozen=True)
class Rule:
    """What an argument must be, in words that follow "expected", and a test of it."""

    expected: str
    holds: Callable[[Any], object]
    error: type[LapwingError] = UnsupportedError
    names: Collection[str] = ()  # to ask whether one of them was meant

    def admits(self, value: object) -> bool:
        """Return whether the value is as expected."""
        try:
            return bool(self.holds(value))
        except (TypeError, ValueError, RuntimeError, AttributeError):  # another type does not even take the test
            return False

    def check(self, name: str, value: object) -> None:
        """Raise unless the value is as expected."""
        if not self.admits(value):
            raise self.error(f"{name} is {describe(value)}; expected {self.expected}.{nearest(value, self.names)}")

    def __or__(self, other: Rule) -> Rule:
        expected = f"{self.expected}, or {other.expected}"  # the last is tried first: None is the quickest
        return Rule(expected, lambda v: other.admits(v) or self.admits(v), self.error, (*self.names, *other.names))


def of_class(expected: str, cls: type | UnionType, error: type[LapwingError] = UnsupportedError) -> Rule:
    """Return the rule for an object of a class."""
    return Rule(expected, lambda v: isinstance(v, cls), error)


NONE = Rule("None", lambda v: v is None)
EMPTY = Rule("an empty tuple", lambda v: isinstance(v, tuple | list) and not v)
FLAG = of_class("True or False", bool)
POSITIVE = Rule("a positive, finite number", lambda v: is_real(v) and 0 < v < math.inf)
BELOW_ONE = Rule("a number of at least 0 and below 1", lambda v: is_real(v) and 0 <= v < 1)
POSITIVE_VALUES = Rule(
    "a list of positive, finite numbers", lambda v: _all_numbers(v, lambda t: t > 0) and _parts(v) == 1
)
PROBABILITY = Rule("a probability between 0 and 1", lambda v: is_real(v) and 0 < v < 1, DataError)
GENERATOR = of_class("torch.Generator().manual_seed(...), or None", torch.Generator | None)
PATH = Rule(
    "the path of a file, a str or a pathlib.Path without NUL characters",
    lambda v: isinstance(v, str | os.PathLike) and str(v) and "\0" not in str(v),
)
KEY = of_class('a key such as "labels", or None', str | None)
TEXT = of_class("a text, or None", str | None)
FUNCTION = Rule("a function", lambda v: callable(v) and not isinstance(v, type | nn.Module))
DATA = Rule(
    "a DataLoader, a list of (inputs, targets) batches, or a pair of tensors or arrays", lambda v: is_data(v), DataError
)
INTEGER = Rule("an integer", is_integer)
NUMBER = Rule("a positive number", lambda v: _all_numbers(v, lambda t: t > 0) and not _parts(v), DataError)
NUMBERS = Rule("a positive number, or one for each output", lambda v: _all_numbers(v, lambda t: t > 0), DataError)
NOT_NEGATIVE = Rule(
    "finite numbers that are not negative, one or a list", lambda v: _all_numbers(v, lambda t: t >= 0), DataError
)
FINITE = Rule("finite numbers, one or a list", lambda v: _all_numbers(v, lambda t: t == t), DataError)
TENSOR = Rule(
    "a tensor of real numbers without NaN",
    lambda v: isinstance(v, Tensor) and not v.is_complex() and not bool(v.isnan().any()),
    DataError,
)


def is_array(value: object) -> bool:
    """Return whether the value is a tensor, a NumPy array, a data frame or one of its columns."""
    return hasattr(value, "__array__") and not isinstance(value, type)


def is_data(value: object) -> bool:
    """Return whether the value can hold batches: it has parts, and is not a text, mapping, set, array, model or class.

    An iterator has parts. ``Data`` refuses it and says why.
    """
    if isinstance(value, str | bytes | set | Mapping | nn.Module | type) or is_array(value):
        return False
    return any(hasattr(value, member) for member in ("__iter__", "__getitem__", "batches"))


def _all_numbers(value: Any, test: Callable[[Tensor], Tensor]) -> bool:
    """Return whether the value is a number, a sequence (n,) or such a tensor, all finite and passing the test."""
    if type(value) in (int, float):  # as most are, and without tensors this is quick
        return math.isfinite(value) and bool(test(value))
    t = torch.as_tensor(value).detach()
    return (
        not t.is_complex()
        and t.dtype != torch.bool
        and t.ndim <= 1
        and t.numel() > 0
        and bool((t.isfinite() & test(t)).all())
    )


def _parts(value: Any) -> int:
    """Return the number of dimensions of a number, a sequence or a tensor."""
    return 0 if type(value) in (int, float) else torch.as_tensor(value).ndim


@functools.cache
def integer(least: int = 1) -> Rule:
    """Return the rule for a whole number of at least ``least``."""
    return Rule(f"an integer of at least {least}", lambda v: is_integer(v) and v >= least)


def one_of(names: Collection[str], error: type[LapwingError] = UnsupportedError) -> Rule:
    """Return the rule for one of these names."""
    return Rule(f"one of {', '.join(names)}", lambda v: isinstance(v, str) and v in names, error, names)


def nearest(name: object, names: Collection[str]) -> str:
    """Return a question that names the most similar of the names, or nothing if none is similar.

    >>> nearest("regresion", ["classification", "regression"])
    " Did you mean 'regression'?"
    """
    if not isinstance(name, str):
        return ""
    name = name.lower().replace("-", "_").replace(" ", "_")
    begun = [each for each in names if len(name) > 2 and each.startswith(name)]
    close = get_close_matches(name, list(names), 1) or begun
    return f" Did you mean {close[0]!r}?" if close else ""


def setting(default: T, rule: Rule, *, stored: object = None, stored_as: str = "", repr: bool = True) -> T:
    """Declare a field of a dataclass that inherits from ``HasSettings``.

    Args:
        default: The value of a setting that is not given.
        rule: What the setting must be.
        stored: The field of the setting in a file, if a file must hold more than the rule says.
        stored_as: The attribute that a file holds in the place of the setting, if it is another one.
        repr: As for ``dataclasses.field``.
    """
    return field(default=default, repr=repr, metadata={"rule": rule, "stored": stored, "name": stored_as})


def required(rule: Rule) -> Any:
    """Declare a setting without a default."""
    return setting(MISSING, rule)


class HasSettings:
    """A frozen dataclass whose fields are declared with ``setting``: they are checked when an object is made.

    A class with a check of several settings together makes it in its own ``__post_init__``, after this one.

    >>> @dataclass(frozen=True)
    ... class Example(HasSettings):
    ...     rank: int = setting(32, integer(1))
    >>> Example(rank=0)
    Traceback (most recent call last):
    lapwing.errors.UnsupportedError: rank is 0; expected an integer of at least 1.
    """

    def __post_init__(self) -> None:
        for name, rule in rules_of(type(self)).items():  # type: ignore[arg-type]
            rule.check(name, getattr(self, name))


@functools.cache
def rules_of(cls: type) -> dict[str, Rule]:
    """Return the rules of the fields of a dataclass that are declared with ``setting``, by name."""
    return {each.name: each.metadata["rule"] for each in fields(cls) if each.metadata.get("rule")}  # type: ignore[arg-type]


def refuse_other_arguments(call: Call) -> Call:
    """Decorate a public function: arguments that do not fit its signature raise ``CallError``, with the nearest name.

    >>> refuse_other_arguments(lambda level: level)(levels=0.9)
    Traceback (most recent call last):
    lapwing.errors.CallError: <lambda>() has no argument 'levels'. Did you mean 'level'? It takes level.
    """
    signature = inspect.signature(call)
    names = [name for name in signature.parameters if name != "self"]
    title = call.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    open_ended = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            other = [] if open_ended else [name for name in kwargs if name not in names]
            wrong = (
                f"has no argument {other[0]!r}.{nearest(other[0], names)}" if other else f"cannot be called: {error}."
            )
            raise CallError(f"{title}() {wrong} It takes {', '.join(names) or 'no arguments'}.") from None
        return call(*args, **kwargs)

    return run  # type: ignore[return-value]


def refuse_other_settings(kinds: Iterable[type]) -> None:
    """Let the constructors of these classes raise ``CallError`` for settings that they do not have."""
    for kind in set(kinds):
        kind.__init__ = refuse_other_arguments(kind.__init__)  # type: ignore[misc]


def usable_device(device: Any) -> torch.device:
    """Return the device; raise if this machine has no such device, or it holds no numbers."""
    try:
        target = torch.empty(0, device=device).device
        if device is None or target.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (AssertionError, RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device is {describe(device)}; expected one that this machine has: {error}") from error
    return target


@dataclass(frozen=True)
class Known:
    """What is known while a file is read: lengths by their letters, the dtype of the network's weights, the owner."""

    lengths: dict[str, int] = field(default_factory=dict)  # P weights, C outputs; others as they are met in one state
    dtype: torch.dtype | None = None
    owner: Any = None  # what the ``from_state`` of the value got, for its parts

    def fits(self, seen: int, length: Length) -> bool:
        """Return whether a length is as declared; a letter without a number takes the number that is seen."""
        expected = self.lengths.setdefault(length, seen) if isinstance(length, str) else length
        return expected is None or seen == expected

    @property
    def within_parts(self) -> Known:
        """What is known in every part: other letters have one meaning in one state alone."""
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

    def __init__(self, build: Callable[..., Any], /, **fields: Field) -> None:
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

        >>> from lapwing.runtime.settings import ABOVE_ZERO
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
    def from_state(cls, state: State, owner: Any = None) -> Any:
        """Build the value from its state."""
        refuse_undeclared(cls, has_owner=owner is not None)
        names = _find_undeclared(cls, with_default=False)
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


def _find_undeclared(cls: type, with_default: bool) -> list[str]:
    """Return the fields of a dataclass that are not declared: those with a default, or those without."""
    own = [each for each in fields(cls) if each.init and "stored" not in each.metadata]  # type: ignore[arg-type]
    has_default = lambda each: each.default is not MISSING or each.default_factory is not MISSING
    return [each.name for each in own if has_default(each) == with_default]


def refuse_undeclared(cls: type, has_owner: bool) -> None:
    """Raise if a file could not hold a field: one that is not declared, and that no owner gives."""
    names = _find_undeclared(cls, with_default=True) + ([] if has_owner else _find_undeclared(cls, with_default=False))
    if names:
        raise UnsupportedError(
            f"{cls.__name__} has no file form, since nothing says what a file may hold for {', '.join(names)}. "
            "Declare every field with setting(default, rule), or write the methods state() and from_state()."
        )


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


def on_device(value: T, device: torch.device, keep: nn.Module | None = None) -> T:
    """Return the value with every tensor in it on the device; the value itself is not changed.

    Goes through dataclasses (also their cached values), mappings, tuples, lists and partial functions. Modules
    are copied, except ``keep``, which its owner moves. A value that is reached twice is moved once.

    >>> on_device({"a": torch.ones(2), "b": (1, "text")}, torch.device("meta"))["a"].device
    device(type='meta')
    """
    return _transfer(value, device, {} if keep is None else {id(keep): (keep, keep)})


def _transfer(value: Any, device: torch.device, done: dict[int, tuple[Any, Any]]) -> Any:
    """Return the value on the device.

    ``done`` maps addresses to values and their copies. It keeps the values, so that no address is used twice.
    """
    if isinstance(value, torch.device):
        return device
    if isinstance(value, Tensor):
        return value.to(device)
    if id(value) not in done:
        done[id(value)] = (value, _rebuild(value, device, done))
    return done[id(value)][1]


def _rebuild(value: Any, device: torch.device, done: dict[int, tuple[Any, Any]]) -> Any:
    move = lambda part: _transfer(part, device, done)
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(device)
    if isinstance(value, functools.partial):
        return functools.partial(
            move(value.func), *map(move, value.args), **{key: move(v) for key, v in value.keywords.items()}
        )
    if is_dataclass(type(value)):
        result = object.__new__(type(value))
        result.__dict__.update({name: move(part) for name, part in vars(value).items()})
        return result
    if isinstance(value, Mapping):
        return type(value)({key: move(part) for key, part in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        return rebuild(value, [move(part) for part in value])
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


def rebuild(sequence: Any, values: list[Any]) -> Any:
    """Return the same kind of tuple or list with other values; named tuples take them one by one."""
    return type(sequence)(*values) if hasattr(sequence, "_fields") else type(sequence)(values)
