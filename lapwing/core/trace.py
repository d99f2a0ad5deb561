"""The record of a tuner: the hyperparameters it tried, their scores, and remarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

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
    scored_on: str = ""  # "training" or "validation" data

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


def trace_settings(trace: Trace | None) -> dict[str, Any] | None:
    """Return the trace as plain data for a file.

    >>> trace = Trace("Grid", steps=(Step(1.0, (2.0,)),))
    >>> trace_from(trace_settings(trace)) == trace
    True
    """
    return None if trace is None else asdict(trace)


def trace_from(settings: Mapping[str, Any] | None) -> Trace | None:
    """Return the trace that ``trace_settings`` took apart."""
    if settings is None:
        return None
    tuples = lambda step: {**step, "precisions": tuple(step["precisions"]), "noise": tuple(step["noise"])}
    steps = tuple(Step(**tuples(step)) for step in settings["steps"])
    return Trace(**{**settings, "steps": steps, "findings": tuple(settings["findings"])})
