"""Which method fits a budget, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lapwing.core.settings import is_real
from lapwing.errors import UnsupportedError
from lapwing.methods.diagonal import Diagonal
from lapwing.methods.full import Full
from lapwing.methods.kernel_space import KernelSpace
from lapwing.methods.kron import Kron
from lapwing.methods.sampled import BASIS, Sampled
from lapwing.posteriors.protocols import Method

SOLVES = 4  # what samples cost with the search for their precision, in solves at one
RATE = 2e10  # multiplications in a second that a plain processor does; a GPU does a hundred times as many


@dataclass(frozen=True)
class Choice:
    """A method, and in words why it and not another."""

    method: Method
    why: str


@dataclass(frozen=True)
class Auto:
    """Pick the method: exact if it fits ``memory`` (bytes) and ``seconds``, samples of the exact posterior if they do,
    Kronecker otherwise.

    Memory is what a method holds, besides what a pass of the network holds for one chunk of data. ``Sampled`` is given
    the limit, and keeps to it. Seconds are multiplications over a round figure, so that the same problem gets the same
    method on every machine. ``fit(..., method="auto")`` has these defaults; ``posterior.why`` tells the reason.

    >>> Auto().choose(weights=500, rows=10_000).why
    'Full: 500 weights, 10000 rows (data times outputs); 0.0037 GiB and about 0.13 s, exact'
    """

    memory: float = 4 * 2**30
    seconds: float = 60.0
    num_samples: int = 64
    gpu: bool = False

    def __post_init__(self) -> None:
        given = (self.memory, self.seconds)
        if not all(is_real(v) and v > 0 for v in given):
            raise UnsupportedError(
                f"memory is {self.memory!r:.80} and seconds {self.seconds!r:.80}; expected positive numbers."
            )
        Sampled(num_samples=self.num_samples)  # refuses what is no number of samples

    def choose(self, weights: int, rows: int, single: bool = False, tuned: bool = False) -> Choice:
        """For P weights and n C rows; ``single`` where they are picked one by one, and have no Kronecker structure.

        ``tuned`` where the precision is still to be learned, which samples take several solves for.
        """
        rate = RATE * (100 if self.gpu else 1)
        options: list[tuple[Method, float, float, str]] = [
            (Full(limit=weights), 16.0 * weights**2, float(rows) * weights**2 + 0.3 * weights**3, "exact"),
            (
                KernelSpace(limit=rows),
                8.0 * rows * (weights + 2 * rows),
                2.0 * rows**2 * weights + 9.0 * rows**3,
                "exact",
            ),
        ]
        exact = sorted(options, key=lambda option: option[2])
        unlimited = math.isinf(self.memory)
        sampled = Sampled(num_samples=self.num_samples, memory=None if unlimited else self.memory)
        vectors = (BASIS + 2 * self.num_samples) * (SOLVES if tuned else 1)
        most = "" if unlimited else f" in at most {self.memory / 2**30:.2g} GiB"  # kept factors take what there is
        exact.append(
            (
                sampled,
                sampled.needs(weights, rows),
                2.0 * rows * weights * vectors,
                f"{self.num_samples} samples of the exact" + most,
            )
        )
        size = f"{weights} weights, {rows} rows (data times outputs)"
        tried: list[str] = []
        for method, memory, work, kind in exact:
            cost = f"{memory / 2**30:.2g} GiB and about {work / rate:.2g} s"
            name = type(method).__name__
            if memory <= self.memory and work / rate <= self.seconds:
                return Choice(method, f"{name}: {size}; {cost}, {kind}" + "".join(tried))
            tried.append(f"; {name} would take {cost}")
        last: Method = Diagonal() if single else Kron()
        return Choice(last, f"{type(last).__name__}: {size}" + "".join(tried))
