"""Pictures of what was learned: γ by layer, the evidence against the precision, the trace of a tuner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from lapwing.core.settings import POSITIVE_VALUES
from lapwing.errors import UnsupportedError
from lapwing.plots.canvas import INK, OTHER, POSTERIOR, new_axis, plain_text
from lapwing.posteriors.protocols import HasEvidence, Reweightable, required

MOST_LAYERS = 24  # bars of γ that stay readable
FACTORS = tuple(10 ** (i / 6) for i in range(-18, 19))  # a thousandth to a thousand times the precision


def effective_parameters(result: Any, *, ax: Any = None) -> Any:
    """Draw the share of the weights of each layer that the data determine: γ over the number of weights.

    Args:
        result: A posterior, or what its ``effective_parameters()`` returns.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis. Of more than 24 layers it has the 24 with the highest γ.

    Raises:
        UnsupportedError: The method has no γ.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    >>> effective_parameters(posterior).get_xlabel()
    'share determined by the data'
    """
    found = result.effective_parameters() if hasattr(result, "effective_parameters") else result
    names = sorted(found.layers, key=lambda name: found.layers[name])[-MOST_LAYERS:]
    names = [name for name in found.layers if name in names][::-1]  # the first layer at the top
    ax = new_axis(ax, (4.6, 1.1 + 0.24 * len(names)))
    shares = [found.layers[name] / found.sizes[name] for name in names]
    ax.barh(range(len(names)), shares, color=POSTERIOR, height=0.7)
    for i, name in enumerate(names):
        text, right = (
            f"{found.layers[name]:.3g} of {found.sizes[name]:,}",
            {"xytext": (3, 0), "textcoords": "offset points"},
        )
        ax.annotate(text, (shares[i], i), **right, va="center", fontsize=9, color=INK)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
    ax.set_yticks(range(len(names)), [plain_text(shortened(name)) for name in names])
    ax.set(xlim=(0, 1.4), xlabel="share determined by the data")
    return ax


def shortened(name: str, most: int = 18) -> str:
    """Return the name, or its end if it is long.

    >>> shortened(""), shortened("encoder.layers.11.attention.query")
    ('(top)', '….attention.query')
    """
    if len(name) <= most:
        return name or "(top)"
    end = name[1 - most :]
    return "…" + (end[end.index(".") :] if "." in end else end)


@dataclass(frozen=True)
class EvidenceCurve:
    """The log evidence of one posterior under other precisions of its prior."""

    precisions: tuple[float, ...]  # or factors on all precisions, if there are several
    log_evidence: tuple[float, ...]
    present: float  # the precision of the posterior, or the factor 1
    factors: bool  # whether these are factors on several precisions

    @classmethod
    def of(cls, posterior: Any, precisions: Any = None) -> EvidenceCurve:
        """Compute the evidence; by default for a thousandth to a thousand times the precision of the posterior.

        Cost: a factorisation of the precision for each; no pass over the data.
        """
        base, method = posterior.base, getattr(posterior, "method", "")
        required(base, HasEvidence, "evidence", method)
        required(base, Reweightable, "prior over weights to change", method)
        problem = base.problem
        values = problem.prior.values.detach()
        several = values.numel() != 1
        unit = 1.0 if several else float(values)
        if precisions is None:
            precisions = [unit * factor for factor in FACTORS]
        POSITIVE_VALUES.check("precisions", precisions)
        chosen = sorted(torch.as_tensor(precisions, dtype=torch.float64).tolist())
        with torch.no_grad():
            each = [base.with_problem(problem.with_precisions(values * (p / unit))).log_evidence() for p in chosen]
        return cls(tuple(chosen), tuple(map(float, each)), unit, several)


def evidence_curve(result: Any, precisions: Any = None, *, ax: Any = None) -> Any:
    """Draw the log evidence against the precision of the prior; a line marks the precision of the posterior.

    Args:
        result: A posterior with evidence, or an ``EvidenceCurve``.
        precisions: The precisions to try; by default a thousandth to a thousand times that of the posterior. If the
            prior has several, these are factors on all of them.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis. Evidence that is lower than the highest by more than five times the middle difference is cut off.

    Raises:
        UnsupportedError: The method has no evidence, or no prior over weights.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    >>> evidence_curve(posterior, [0.1, 1, 10]).get_xlabel()
    'prior precision'
    """
    curve = result if isinstance(result, EvidenceCurve) else EvidenceCurve.of(result, precisions)
    ax = new_axis(ax)
    points = [(p, e) for p, e in zip(curve.precisions, curve.log_evidence, strict=True) if math.isfinite(e)]
    if not points:
        raise UnsupportedError("the evidence is not finite at any of the precisions; expected a finite number at one.")
    best = max(e for _, e in points)
    lost = sorted(best - e for _, e in points)
    depth = max(1.0, min(lost[-1], 5 * lost[len(lost) // 2]))
    kept = [(p, e) for p, e in points if best - e <= depth]
    ax.plot(*zip(*kept, strict=True), color=POSTERIOR, marker="o", markersize=3, linewidth=1.6)
    ax.axvline(curve.present, color=INK, linewidth=1, linestyle="--", label="this posterior")
    words = "factor on the prior precisions" if curve.factors else "prior precision"
    ax.set(xscale="log", xlabel=words, ylabel="log evidence", ylim=(best - 1.05 * depth, best + 0.08 * depth))
    ax.legend(frameon=False, fontsize=9, loc="best")
    return ax


def trace(result: Any, *, ax: Any = None) -> Any:
    """Draw the score at every step of a tuner; a ring marks the best one.

    Args:
        result: A posterior, or its ``trace``. Of a mixture, the steps by which the evidence was maximised are drawn.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis.

    Raises:
        UnsupportedError: Nothing was tuned, or the tuner kept no steps.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", tuner=lw.tuners.MaximiseEvidence())
    >>> trace(posterior).get_ylabel()
    'log evidence'
    """
    record = trace_with_steps(result)
    if record is None:
        raise UnsupportedError("there are no steps of a tuner; expected a posterior that was tuned, or its trace.")
    ax = new_axis(ax)
    points = [(i, step.score) for i, step in enumerate(record.steps) if math.isfinite(step.score)]
    ax.plot(*zip(*points, strict=True), color=POSTERIOR, marker="o", markersize=4, linewidth=1.6)
    best = max(points, key=lambda point: point[1])
    ax.plot(*best, marker="o", markersize=10, markerfacecolor="none", markeredgecolor=OTHER, markeredgewidth=2)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel=f"step of {record.tuner}", ylabel=record.score)
    return ax


def trace_with_steps(result: Any) -> Any:
    """Return the first trace with steps: the one given, that of the posterior, or that of what it varies; or None."""
    base = getattr(result, "base", None)
    for record in (result, getattr(result, "trace", None), getattr(base, "trace", None)):
        if any(math.isfinite(step.score) for step in getattr(record, "steps", ())):
            return record
    return None
