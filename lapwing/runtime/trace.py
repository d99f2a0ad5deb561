"""The record of a tuner: the hyperparameters it tried, their scores, and remarks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lapwing.runtime.settings import UNLIMITED, Later, ListOf, MapOf, Maybe, Real, Record, Text

NOT_CONVERGED = 1e-2  # log-step above which a tuner has not converged


@dataclass(frozen=True)
class Step:
    """One evaluation of a tuner. ``score`` is the log evidence, or a held-out metric.

    >>> print(Step(-12.5, (0.5,), gamma=3.0))
    -12.5 at precision 0.5, gamma 3
    """

    score: float
    precisions: tuple[float, ...]
    noise: tuple[float, ...] = ()  # noise variances, if they are learned
    gamma: float | None = None
    error: float | None = None  # standard error of gamma, if it is an estimate

    def __str__(self) -> str:
        precisions = ", ".join(f"{p:.3g}" for p in self.precisions[:4]) + (", ..." if len(self.precisions) > 4 else "")
        noise = f", noise {', '.join(f'{n:.3g}' for n in self.noise[:4])}" if self.noise else ""
        gamma = "" if self.gamma is None else f", gamma {self.gamma:.4g}"
        gamma += "" if self.error is None else f" ± {self.error:.2g}"
        return f"{self.score:.6g} at precision {precisions}{noise}{gamma}"


@dataclass(frozen=True)
class Trace:
    """The steps of a tuner in order. ``findings`` are remarks for the reader, in words."""

    tuner: str
    score: str = "log evidence"
    steps: tuple[Step, ...] = ()
    findings: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)  # NLL of the alternatives that were compared, by name
    scored_on: str = ""  # "training", "validation" (cross-validated) or "out-of-fold" data
    verdict: str = ""  # how the result compares with the alternatives, in a sentence

    @property
    def comparison(self) -> str:
        """The scores of the alternatives in words.

        >>> Trace("Integrate", scores={"plain network": 1.25, "mixture": 0.5}, scored_on="validation").comparison
        'cross-validated NLL on validation data: plain network 1.25, mixture 0.5'
        """
        scores = ", ".join(f"{name} {score:.4g}" for name, score in self.scores.items())
        how = "cross-validated " if self.scored_on == "validation" else ""
        return f"{how}NLL on {self.scored_on} data: {scores}"

    def after(self, earlier: Trace | None) -> Trace:
        """Return this trace with the findings of an earlier one before its own.

        >>> Trace("Budget", findings=("guarded",)).after(Trace("SampleEM", findings=("few samples",))).findings
        ('few samples', 'guarded')
        """
        return self if earlier is None else replace(self, findings=(*earlier.findings, *self.findings))

    def __str__(self) -> str:
        lines = [f"{self.tuner}: {self.score}", *(f"{i:4d}  {step}" for i, step in enumerate(self.steps))]
        lines += [f"{score:10.4f}  {name}" for name, score in self.scores.items()]
        return "\n".join([*lines, *self.findings])


_NUMBERS = ListOf(Real(0, math.inf))
_STEP = Record(
    Step, score=UNLIMITED, precisions=_NUMBERS, noise=_NUMBERS, gamma=Maybe(UNLIMITED), error=Maybe(Real(0, math.inf))
)
TRACE = Maybe(  # what a file may hold
    Record(
        Trace, tuner=Text(), score=Text(), steps=ListOf(_STEP), findings=ListOf(Text()), scores=MapOf(UNLIMITED),
        scored_on=Text(("", "training", "validation", "out-of-fold")), verdict=Later(Text()),
    )
)  # fmt: skip
