"""Settings and values: the rules for what users give.

A class inherits from ``HasSettings`` and declares each setting once, with ``setting``: the check when an object is
made, the form in a file and the check when a file is read follow. A function checks its arguments by the rules. Every
refusal has one form: what is expected in words.

Values as a whole are here too: on another device (``on_device``), and with one cached result (``Latest``).
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
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lapwing.errors import CallError, DataError, LapwingError, UnsupportedError

T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., Any])
K = TypeVar("K")
V = TypeVar("V")


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
    """A test of an argument, and words that follow "expected" for what it must be."""

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


def find_undeclared(cls: type, with_default: bool) -> list[str]:
    """Return the fields of a dataclass that are not declared: those with a default, or those without."""
    own = [each for each in fields(cls) if each.init and "stored" not in each.metadata]  # type: ignore[arg-type]
    has_default = lambda each: each.default is not MISSING or each.default_factory is not MISSING
    return [each.name for each in own if has_default(each) == with_default]


def refuse_undeclared(cls: type, has_owner: bool) -> None:
    """Raise if a file could not hold a field: one that is not declared, and that no owner gives."""
    names = find_undeclared(cls, with_default=True) + ([] if has_owner else find_undeclared(cls, with_default=False))
    if names:
        raise UnsupportedError(
            f"{cls.__name__} has no file form, since nothing says what a file may hold for {', '.join(names)}. "
            "Declare every field with setting(default, rule), or write the methods state() and from_state()."
        )


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
    required, optional = _names_left(signature)

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        n = len(args)
        if n < len(required) and required[n] <= kwargs.keys() <= optional[n]:  # ``bind`` takes ten times as long
            return call(*args, **kwargs)
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


def _names_left(signature: inspect.Signature) -> tuple[list[set[str]], list[set[str]]]:
    """Return the names that calls with n positional arguments must give, and those that they may give, for each n.

    None for signatures with arguments of other kinds.
    """
    parameters = list(signature.parameters.values())
    if any(each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) for each in parameters):
        return [], []
    places = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    left = [parameters[n:] for n in range(places + 1)]
    required = [{each.name for each in rest if each.default is each.empty} for rest in left]
    return required, [{each.name for each in rest} for rest in left]


def refuse_other_settings(kinds: Iterable[type]) -> None:
    """Let the constructors of these classes raise ``CallError`` for settings that they do not have."""
    for kind in set(kinds):
        kind.__init__ = refuse_other_arguments(kind.__init__)  # type: ignore[misc]


def refuse_other_calls(module: dict[str, Any]) -> None:
    """Let what a module offers raise ``CallError`` for arguments that it does not have.

    Args:
        module: The ``globals()`` of the module, with ``__all__``; what comes from elsewhere stays as it is.
    """
    for name in module["__all__"]:
        value = module[name]
        if getattr(value, "__module__", "") != module["__name__"]:
            continue
        if isinstance(value, type):
            refuse_other_settings([value])
        elif inspect.isfunction(value):
            module[name] = refuse_other_arguments(value)


def usable_device(device: Any) -> torch.device:
    """Return the device; raise if this machine has no such device, or it holds no numbers."""
    try:
        target = torch.empty(0, device=device).device
        if device is None or target.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (AssertionError, RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device is {describe(device)}; expected one that this machine has: {error}") from error
    return target


def on_device(value: T, device: torch.device, keep: nn.Module | None = None) -> T:
    """Return the value with every tensor in it on the device; the value itself is not changed.

    Goes through dataclasses (also their cached values), mappings, tuples, lists and partial functions. Modules
    are copied, except ``keep``, which its owner moves. A value that is reached twice is moved once.

    >>> on_device({"a": torch.ones(2), "b": (1, "text")}, torch.device("meta"))["a"].device
    device(type='meta')
    """
    # By address: values and their copies. The values are kept, so that no address is used twice.
    done: dict[int, tuple[object, object]] = {} if keep is None else {id(keep): (keep, keep)}

    def move(part: Any) -> Any:
        if isinstance(part, torch.device):
            return device
        if isinstance(part, Tensor):
            return part.to(device)
        if id(part) not in done:
            done[id(part)] = (part, rebuilt(part))
        return done[id(part)][1]

    def rebuilt(part: Any) -> Any:
        if isinstance(part, nn.Module):
            return copy.deepcopy(part).to(device)
        if isinstance(part, functools.partial):
            named = {key: move(value) for key, value in part.keywords.items()}
            return functools.partial(move(part.func), *map(move, part.args), **named)
        return change_parts(part, move)

    return move(value)


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


def change_parts(value: Any, change: Callable[[Any], Any], cached: bool = True) -> Any:
    """Return a dataclass, mapping, tuple or list with every part changed, and any other value as it is.

    Without ``cached``, a dataclass is left without its cached values.
    """
    if is_dataclass(type(value)):
        parts = vars(value) if cached else {each.name: vars(value)[each.name] for each in fields(value)}
        result = object.__new__(type(value))
        result.__dict__.update({name: change(part) for name, part in parts.items()})
        return result
    if isinstance(value, Mapping):
        return type(value)({key: change(part) for key, part in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        return rebuild(value, [change(part) for part in value])
    return value


def rebuild(sequence: Any, values: list[Any]) -> Any:
    """Return the same kind of tuple or list with other values; named tuples take them one by one."""
    return type(sequence)(*values) if hasattr(sequence, "_fields") else type(sequence)(values)
