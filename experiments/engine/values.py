"""Plain values (of TOML, JSON or the command line) turned into the types of a dataclass, strictly."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from lapwing.errors import LapwingError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCALARS: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}  # and what fits


class SettingsError(LapwingError):
    """A setting that does not exist, is missing or has the wrong type."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}.") from error


def built(cls: type, values: Mapping[str, Any], key: str = "") -> Any:
    """Return the dataclass with these values; fields that are absent keep their defaults.

    Args:
        cls: The dataclass.
        values: Plain values by field; a nested dataclass is a mapping.
        key: The dotted key of the dataclass itself, for messages.

    Raises:
        SettingsError: For unknown keys, wrong types and absent fields without a default.
    """
    if not isinstance(values, Mapping):
        raise _refusal(key, values, f"a table with the keys {_names(cls)}")
    known = {field.name: field for field in fields(cls) if field.init}
    for name in values:
        if name not in known:
            raise SettingsError(f"{_dotted(key, str(name))} is unknown; expected one of {_names(cls)}.")
    missing = [name for name, field in known.items() if name not in values and not _has_default(field)]
    if missing:
        raise SettingsError(f"{_dotted(key, missing[0])} is missing; expected {hint_words(hints(cls)[missing[0]])}.")
    given = {name: converted(hints(cls)[name], value, _dotted(key, name)) for name, value in values.items()}
    return cls(**given)


def converted(hint: Any, value: Any, key: str) -> Any:
    """Return a plain value as the type of a field asks for it, or raise SettingsError.

    >>> converted(tuple[int, ...], [2, 3], "hidden")
    (2, 3)
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _of_union(arguments, value, key, hint)
    if origin is tuple:
        return _tuple(arguments, value, key, hint)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _refusal(key, value, hint_words(hint))
        return {str(name): converted(arguments[1], each, _dotted(key, str(name))) for name, each in value.items()}
    if origin is Literal:
        if value not in arguments:
            raise _refusal(key, value, hint_words(hint))
        return value
    if hint is type(None) and value is None:
        return None
    if isinstance(hint, type):
        return _of_class(hint, value, key)
    raise _refusal(key, value, f"a setting of a plain type, not {hint}")


def parsed(hint: Any, text: str, key: str) -> Any:
    """Return text of the command line as the type of a field asks for it; the parts of a tuple are split at commas.

    >>> parsed(tuple[str, ...], "wine,yacht", "sets")
    ('wine', 'yacht')
    """
    arguments = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        if type(None) in arguments and text.lower() == "none":
            return None
        return _first(arguments, lambda each: parsed(each, text, key), key, text, hint)
    if get_origin(hint) is tuple and not text.startswith("["):
        return converted(hint, [_plain(arguments[0], part.strip()) for part in text.split(",") if part.strip()], key)
    return converted(hint, _plain(hint, text), key)


def hints(cls: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass by name."""
    return get_type_hints(cls)


def hint_words(hint: Any) -> str:
    """Return what a type expects, in words.

    >>> hint_words(tuple[float, ...])
    'a list of numbers'
    """
    words: dict[Any, str] = {
        bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path",
        type(None): "none",
    }  # fmt: skip
    if hint in words:
        return words[hint]
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            plural = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}
            return f"a list of {plural.get(arguments[0], hint_words(arguments[0]))}"
        return f"a list of {len(arguments)}: {', '.join(map(hint_words, arguments))}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(hint_words, arguments))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(str(each.value) for each in hint)}"
    return f"a table with the keys {_names(hint)}" if is_dataclass(hint) else f"a table ({hint})"


def _of_class(hint: Any, value: Any, key: str) -> Any:
    if isinstance(value, hint) and (is_dataclass(hint) or issubclass(hint, (Enum, Path))):
        return value
    if is_dataclass(hint):
        return built(cast(type, hint), value, key)
    if issubclass(hint, Enum):
        for each in hint:
            if value in (each.value, each.name):
                return each
    elif issubclass(hint, Path):
        if isinstance(value, str):
            return Path(value)
    elif hint in SCALARS and type(value) in SCALARS[hint]:
        return hint(value)
    raise _refusal(key, value, hint_words(hint))


def _of_union(arguments: Sequence[Any], value: Any, key: str, hint: Any) -> Any:
    tables = [each for each in arguments if is_dataclass(each)]
    if len(tables) == 1 and isinstance(value, Mapping):
        return converted(tables[0], value, key)  # names the key within it that is wrong
    return _first(arguments, lambda each: converted(each, value, key), key, value, hint)


def _first(arguments: Sequence[Any], convert: Callable[[Any], Any], key: str, value: Any, hint: Any) -> Any:
    """Return the value as the first type that it fits."""
    for each in arguments:
        try:
            return convert(each)
        except SettingsError:
            continue
    raise _refusal(key, value, hint_words(hint))


def _tuple(arguments: Sequence[Any], value: Any, key: str, hint: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _refusal(key, value, hint_words(hint))
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise _refusal(key, value, hint_words(hint))
    return tuple(converted(each, part, f"{key}[{i}]") for i, (each, part) in enumerate(zip(arguments, value)))


def _plain(hint: Any, text: str) -> Any:
    """Return text as the value that TOML reads from it, or as it is where it is no such value or text is asked for."""
    if hint is str or (isinstance(hint, type) and issubclass(hint, (Path, Enum))):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _names(cls: Any) -> str:
    return ", ".join(field.name for field in fields(cls))


def _dotted(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _refusal(key: str, value: Any, expected: str) -> SettingsError:
    return SettingsError(f"{key} is {value!r}; expected {expected}.")
