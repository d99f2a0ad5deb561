"""What an experiment is, and what it measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from typing_extensions import Self  # of typing from Python 3.11 on

from experiments.options import Progress


@dataclass(frozen=True)
class Record:
    """The scores of one method in one repetition, never an average.

    ``group`` names the data set or the setting, ``repeat`` is the number of the split or seed, ``seconds`` is the time
    of training or fitting that the method needs beyond the network that all methods share, and ``peak`` the bytes that
    it held at most; None where they were not measured.
    """

    group: str
    method: str
    repeat: int
    scores: dict[str, float]
    seconds: float | None = None
    peak: int | None = None


class Experiment(Protocol):
    """An experiment: a frozen dataclass of plain values (numbers, text, tuples, paths), so that TOML can give them.

    A unit is a piece of work that does not depend on others, such as one split of one data set. Units are stored when
    they are done, so that a run that was interrupted goes on with the next.

    Three more class variables and a method are optional, and are looked up by name:

    ``version`` (an int, 1 if absent) is part of the code version: raise it when the code gives other numbers.
    ``choosing`` (names of fields) are settings that only choose which units there are, such as the number of splits:
    stored units stay valid when they change.
    ``columns`` (names of scores) are those that the printed table shows; all of them if absent.
    ``picture(result, path)``, a static method, draws a ``experiments.engine.store.Stored``.
    """

    name: ClassVar[str]  # of the command and of the file of results
    title: ClassVar[str]  # one line for ``--list``
    seed: int

    @classmethod
    def quick(cls) -> Self:
        """Return the settings of the quick form: minutes on two cores."""
        ...

    @classmethod
    def full(cls) -> Self:
        """Return the settings of the full form, as the tables in the docs have it."""
        ...

    def units(self) -> tuple[str, ...]:
        """Return the keys of all units, such as "wine/standard/3"."""
        ...

    def measure(self, unit: str, progress: Progress) -> Iterable[Record]:
        """Run one unit and return its records; the same for the same settings and key, whatever ran before."""
        ...
