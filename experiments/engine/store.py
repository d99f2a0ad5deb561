"""The stored result of an experiment: one JSON file for each form, with the records of every unit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.engine.contract import Record
from experiments.engine.machine import Machine
from lapwing.errors import FileError


@dataclass(frozen=True)
class Unit:
    """What one unit gave: its records, or the text of the error that ended it."""

    records: tuple[Record, ...]
    seconds: float
    peak: int | None
    machine: Machine
    settings: str  # hash of the settings that it ran with
    code: str  # version of the code
    error: str = ""


@dataclass(frozen=True)
class Stored:
    """All that is stored of one form of an experiment. It goes to JSON and comes back equal."""

    experiment: str
    form: str
    settings: dict[str, Any]
    seed: int
    units: dict[str, Unit] = field(default_factory=dict)

    @property
    def records(self) -> tuple[Record, ...]:
        """The records of all units that did not fail."""
        return tuple(record for unit in self.units.values() for record in unit.records)

    def with_unit(self, key: str, unit: Unit) -> Stored:
        """Return the result with one more unit, or with a unit replaced."""
        return replace(self, units={**self.units, key: unit})

    def ordered(self, keys: Sequence[str]) -> Stored:
        """Return the result with its units in the order of the keys, whatever the order in which they ended."""
        place = {key: i for i, key in enumerate(keys)}
        return replace(self, units=dict(sorted(self.units.items(), key=lambda unit: place.get(unit[0], len(place)))))

    def done(self, settings: str, code: str) -> set[str]:
        """Return the keys of the units that need not run again with these settings and this code."""
        matches = lambda unit: not unit.error and (unit.settings, unit.code) == (settings, code)
        return {key for key, unit in self.units.items() if matches(unit)}

    def to_json(self) -> str:
        """Return the result as JSON, one line for each record. Raise FileError if a number is not finite."""
        machines = list(dict.fromkeys(_line(asdict(unit.machine)) for unit in self.units.values()))
        units = [f"  {_line(key)}: {_unit_text(unit, machines)}" for key, unit in self.units.items()]
        head = {"experiment": self.experiment, "form": self.form, "seed": self.seed, "settings": self.settings}
        lines = [f" {_line(key)}: {_line(value)}," for key, value in head.items()]
        listed = ",\n".join(f"  {machine}" for machine in machines)
        joined = ",\n".join(units)
        return "\n".join(["{", *lines, f' "machines": [\n{listed}\n ],', f' "units": {{\n{joined}\n }}', "}"]) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Stored:
        """Return the result that ``to_json`` wrote."""
        values = json.loads(text)
        machines = [Machine(**machine) for machine in values.pop("machines")]
        units = {}
        for key, unit in values.pop("units").items():
            records = tuple(Record(**record) for record in unit.pop("records"))
            units[key] = Unit(records=records, machine=machines[unit.pop("machine")], **unit)
        return cls(units=units, **values)


def result_path(folder: Path, experiment: str, form: str) -> Path:
    """Return the file of one form of an experiment.

    >>> result_path(Path("docs"), "uci", "full").name
    'uci_full.json'
    """
    return folder / f"{experiment}_{form}.json"


def load(path: Path) -> Stored:
    """Read a stored result. Raise FileError if the file is damaged or not one."""
    try:
        return Stored.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileError(f"{path} does not exist; run the experiment first.") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise FileError(f"{path} is not a stored result ({error}); expected a file of the engine.") from error


def save(stored: Stored, path: Path) -> None:
    """Write a result in one step, so that an interruption leaves the old file or the new one."""
    text = stored.to_json()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def join(parts: Sequence[Stored]) -> Stored:
    """Return one result with the units of several, of which later ones win; units that failed never replace others.

    Raises:
        FileError: If the parts are of different experiments, forms or settings.
    """
    if not parts:
        raise FileError("there is nothing to join; expected the files of one or more stored results.")
    first, units = parts[0], {}
    for part in parts:
        for name in ("experiment", "form", "settings", "seed"):
            mine, given = getattr(first, name), getattr(part, name)
            if mine != given:
                raise FileError(f"the results differ in {name}: {mine} and {given}; expected parts of one result.")
        units.update({key: unit for key, unit in part.units.items() if not unit.error or key not in units})
    return replace(first, units=units)


def checked(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the records of a unit with plain numbers, or raise FileError if one is not finite or not a number."""
    answer = []
    for record in records:
        where = f"{record.group}/{record.method}/{record.repeat}"
        numbers = {**record.scores, "seconds": record.seconds or 0.0, "peak": record.peak or 0}
        for name, value in numbers.items():
            if not math.isfinite(float(value)):
                raise FileError(f"{name} of {where} is {float(value)}; expected a finite number.")
        scores = {score: float(value) for score, value in record.scores.items()}
        seconds = None if record.seconds is None else float(record.seconds)
        peak = None if record.peak is None else int(record.peak)
        answer.append(Record(record.group, record.method, int(record.repeat), scores, seconds, peak))
    names = [(record.group, record.method, record.repeat) for record in answer]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise FileError(f"there are two records of {twice[0]}; expected one for each group, method and repeat.")
    return tuple(answer)


def _unit_text(unit: Unit, machines: list[str]) -> str:
    values = {name: getattr(unit, name) for name in ("seconds", "peak", "settings", "code", "error")}
    head = _line({"machine": machines.index(_line(asdict(unit.machine))), **values})
    records = ",\n".join(f"   {_line(asdict(record))}" for record in unit.records)
    return f'{head[:-1]}, "records": [\n{records}]}}' if records else f'{head[:-1]}, "records": []}}'


def _line(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise FileError(f"{value} holds a number that is not finite; JSON has none.") from error
