"""Units that are seeds, and records from a result that ran with one seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from experiments.engine.contract import Record
from lapwing.demo.result import Result

TIMES = ("fit s", "seconds")  # scores that are the time of a method


class Seeded(Protocol):
    """Settings with a first seed and a number of seeds."""

    @property
    def seed(self) -> int:
        """The first seed."""
        ...

    @property
    def seeds(self) -> int:
        """How many seeds follow one another."""
        ...


def seed_units(settings: Seeded, *names: str) -> tuple[str, ...]:
    """Return a unit for each seed, and for each name and seed where there are names.

    >>> from types import SimpleNamespace
    >>> seed_units(SimpleNamespace(seed=3, seeds=2), "resnet")
    ('resnet/3', 'resnet/4')
    """
    seeds = range(settings.seed, settings.seed + settings.seeds)
    return tuple(f"{name}/{seed}" for name in names or ("seed",) for seed in seeds)


def parted(unit: str) -> tuple[str, int]:
    """Return the name and the seed of a unit.

    >>> parted("resnet/4")
    ('resnet', 4)
    """
    name, _, seed = unit.rpartition("/")
    return name, int(seed)


def records_of(result: Result, repeat: int) -> Iterator[Record]:
    """Yield a record for each row of a result of one repetition; rows without a group get the experiment's name."""
    for row in result.rows:
        seconds = next((row.scores[name] for name in TIMES if name in row.scores), None)
        scores = {name: value for name, value in row.scores.items() if name not in TIMES}
        yield Record(row.group or result.experiment, row.name, repeat, scores, seconds)
