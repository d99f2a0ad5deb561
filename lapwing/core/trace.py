"""What a tuner did: the values it passed through, and what it found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

UNSETTLED = 1e-2  # a step of a logarithm that is no end


@dataclass(frozen=True)
class Step:
    """One evaluation. ``score`` is the log evidence, or a held-out metric."""

    score: float
    precisions: tuple[float, ...]
    noise: tuple[float, ...] = ()  # variances, where they are being learned
    gamma: float | None = None
    error: float | None = None  # the standard error of gamma, where it is an estimate

    def __str__(self) -> str:
        shown = ", ".join(f"{p:.3g}" for p in self.precisions[:4]) + (", ..." if len(self.precisions) > 4 else "")
        noise = f", noise {', '.join(f'{n:.3g}' for n in self.noise[:4])}" if self.noise else ""
        gamma = "" if self.gamma is None else f", gamma {self.gamma:.4g}"
        gamma += "" if self.error is None else f" ± {self.error:.2g}"
        return f"{self.score:.6g} at precision {shown}{noise}{gamma}"


@dataclass(frozen=True)
class Trace:
    """The steps of a tuner in order. ``findings`` say in words what a reader should know."""

    tuner: str
    score: str = "log evidence"
    steps: tuple[Step, ...] = ()
    findings: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f"{self.tuner}: {self.score}", *(f"{i:4d}  {step}" for i, step in enumerate(self.steps))]
        return "\n".join([*lines, *self.findings])


def finite(*values: Tensor | float) -> bool:
    """Whether every number is."""
    return all(bool(v.isfinite().all()) if isinstance(v, Tensor) else math.isfinite(v) for v in values)
