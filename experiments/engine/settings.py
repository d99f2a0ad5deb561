"""The settings of an experiment: from a form or a TOML file, with values of the command line on top."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from experiments.engine.values import SettingsError, built, hints, parsed, read_toml

WHERE = ("data_dir", "device", "workers")  # settings that say where a run takes place, not what it measures
Settings = TypeVar("Settings")


def from_toml(cls: type[Settings], path: Path, options: Sequence[str] = ()) -> Settings:
    """Return the settings that a TOML file and options ``key=value`` give; other fields keep their defaults."""
    values = read_toml(path)
    for option in options:
        key, text = _split(option)
        *tables, name = key.split(".")
        inner, hint = values, _hint(cls, key)
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise SettingsError(f"{table} is {inner!r} in {path}; expected a table, since {key} is set too.")
        inner[name] = parsed(hint, text, key)
    settings: Settings = built(cls, values)
    return settings


def overridden(settings: Settings, options: Sequence[str]) -> Settings:
    """Return the settings with options ``key=value`` in place; a dotted key reaches into a nested dataclass.

    >>> from lapwing.demo.training import TrainingSettings
    >>> overridden(TrainingSettings(), ["epochs=7", "hidden=5,6"]).hidden
    (5, 6)
    """
    for option in options:
        key, text = _split(option)
        settings = _replaced(settings, key.split("."), parsed(_hint(type(settings), key), text, key))
    return settings


def plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses become tables, tuples lists, paths and enums text.

    >>> plain((1, Path("a")))
    [1, 'a']
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def what(experiment: Any) -> dict[str, Any]:
    """Return the settings that say what is measured, as JSON has them; those that say where are left out."""
    return {name: value for name, value in plain(experiment).items() if name not in WHERE}


def digest(experiment: Any) -> str:
    """Return a hash of what each unit measures: of all settings but those that say where, or choose units."""
    choosing = getattr(experiment, "choosing", ())
    values = {name: value for name, value in what(experiment).items() if name not in choosing}
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_version(experiment: Any) -> str:
    """Return the version of the code that makes the numbers, which the experiment's author raises when they change.

    The version of Lapwing is stored with the machine. It is no part of this: a release that changes no number of an
    experiment leaves its stored units as they are.
    """
    return f"{experiment.name} {getattr(experiment, 'version', 1)}"


def _split(option: str) -> tuple[str, str]:
    key, equals, text = option.partition("=")
    if not equals or not key:
        raise SettingsError(f"--set is {option!r}; expected key=value.")
    return key.strip(), text.strip()


def _hint(cls: Any, key: str) -> Any:
    """Return the type of the field that a dotted key names."""
    hint: Any = cls
    for name in key.split("."):
        if not is_dataclass(hint):
            raise SettingsError(f"{key} is unknown; {name} would be part of a plain value.")
        assert isinstance(hint, type)
        types = {field.name: hints(hint)[field.name] for field in fields(hint)}
        if name not in types:
            raise SettingsError(f"{key} is unknown; expected one of {', '.join(types)}.")
        hint = types[name]
    return hint


def _replaced(settings: Any, names: Sequence[str], value: Any) -> Any:
    name, *rest = names
    return replace(settings, **{name: _replaced(getattr(settings, name), rest, value) if rest else value})
