"""An experiment that takes no time, for the tests of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar

import torch

from experiments.engine.contract import Record
from experiments.options import Progress
from lapwing.errors import DataError


class Link(Enum):
    PROBIT = "probit"
    SAMPLED = "sampled"


@dataclass(frozen=True)
class Net:
    hidden: tuple[int, ...] = (3, 2)
    rate: float = 0.5


@dataclass(frozen=True)
class Toy:
    """Settings: ``bad`` names a unit that raises, ``stop`` one that interrupts."""

    name: ClassVar[str] = "toy"
    title: ClassVar[str] = "a toy"
    choosing: ClassVar[tuple[str, ...]] = ("repeats", "bad", "stop")
    seed: int = 0
    repeats: int = 2
    sets: tuple[str, ...] = ("wine", "yacht")
    net: Net = Net()
    link: Link = Link.PROBIT
    limit: float | None = None
    data_dir: Path = Path("nowhere")
    bad: str = ""
    stop: str = ""

    @classmethod
    def quick(cls) -> Toy:
        return cls()

    @classmethod
    def full(cls) -> Toy:
        return cls(repeats=3)

    def units(self) -> tuple[str, ...]:
        return tuple(f"{name}/{i}" for name in self.sets for i in range(self.repeats))

    def measure(self, unit: str, progress: Progress) -> Iterable[Record]:
        group, repeat = unit.split("/")
        if unit == self.bad:
            raise DataError("the table is empty.")
        if unit == self.stop:
            raise KeyboardInterrupt
        noise = float(torch.rand(()))
        for method, shift in (("plain", 1.0), ("Kron", 0.5)):
            yield Record(group, method, int(repeat), {"NLL": shift + noise, "threads": torch.get_num_threads()}, 0.25)
