"""Models ranked by their evidence, on the training data alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from lapwing.errors import DataError
from lapwing.fitted import Fitted
from lapwing.posteriors.effective import EffectiveParameters

APART = 3.0  # standard errors between two evidences from which they are ranked: an error is an estimate as well
DRAWS = 2**14


@dataclass(frozen=True)
class Candidate:
    """One model: its evidence, and how much of it is fit and how much is charged for flexibility."""

    name: str
    log_evidence: float
    fit: float  # log p(D | theta)
    complexity: float  # what is taken off: fit - log evidence
    weights: int
    gamma: float
    probability: float  # among those compared, with equal odds before the data; on average over the errors
    error: float = 0.0  # one standard error of the log evidence, nought where it is computed


@dataclass(frozen=True)
class Comparison:
    """The candidates, best first; print it to read it."""

    candidates: tuple[Candidate, ...]
    findings: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        return self.candidates[0].name

    def __str__(self) -> str:
        width = max(5, *(len(c.name) for c in self.candidates))
        estimated = any(c.error > 0 for c in self.candidates)
        head = f"{'model':{width}s} {'log evidence':>13s} " + (f"{'error':>8s} " if estimated else "")
        head += f"{'fit':>11s} {'complexity':>11s} {'weights':>8s} "
        lines = [head + f"{'gamma':>8s} {'probability':>11s}"]
        for c in self.candidates:
            error = f"{c.error:8.2f} " if estimated else ""
            lines.append(
                f"{c.name:{width}s} {c.log_evidence:13.2f} {error}{c.fit:11.2f} {c.complexity:11.2f} {c.weights:8d} "
                f"{c.gamma:8.1f} {c.probability:11.3f}"
            )
        return "\n".join([*lines, *self.findings])


def compare(posteriors: Mapping[str, Fitted]) -> Comparison:
    """Rank fitted posteriors by the evidence. All must be fitted to the same data with the same kind of likelihood.

    The evidence of a model is its fit less what its flexibility costs; a larger network must earn its weights.
    Evidences of different methods differ by their approximation as well: compare within one method. Where evidences
    are estimated (``Sampled``), probabilities are averaged over their errors, and a finding says what those leave open.

    >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
    >>> from torch import nn
    >>> from lapwing.api import fit
    >>> nets = {str(h): nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, 1)) for h in (2, 9)}
    >>> found = compare({name: fit(net, [(x, x.sin())], "regression") for name, net in nets.items()})
    >>> len(found.candidates)
    2
    """
    if not isinstance(posteriors, Mapping) or not posteriors:
        raise DataError(
            f"compare() got {type(posteriors).__name__ if posteriors else 'no posteriors'}; expected a mapping from "
            "names to fitted posteriors."
        )
    _refuse_different(posteriors)
    with torch.no_grad():
        evidences = {name: float(fitted.log_evidence()) for name, fitted in posteriors.items()}
        errors = {name: float(fitted.evidence_error) for name, fitted in posteriors.items()}
        fits = {name: float(_core(fitted).log_likelihood()) for name, fitted in posteriors.items()}
    chances = _probabilities(evidences, errors)
    gammas = {name: fitted.effective_parameters() for name, fitted in posteriors.items()}
    rows = [
        Candidate(name, value, fits[name], fits[name] - value, gammas[name].weights, gammas[name].total,
                  chances[name], errors[name])
        for name, value in evidences.items()
    ]  # fmt: skip
    ranked = tuple(sorted(rows, key=lambda row: -row.log_evidence))
    return Comparison(ranked, (*_undecided(ranked), *_findings(ranked, gammas)))


def _probabilities(evidences: Mapping[str, float], errors: Mapping[str, float]) -> dict[str, float]:
    """By equal odds before the data, averaged over independent Gaussian errors of the evidences.

    The draws are fixed and belong to ranks, so that the order of the mapping has no say.
    """
    if not any(errors.values()):
        top = max(evidences.values())
        total = sum(math.exp(value - top) for value in evidences.values())
        return {name: math.exp(value - top) / total for name, value in evidences.items()}
    names = sorted(evidences, key=lambda name: -evidences[name])
    values, spread = (torch.tensor([each[name] for name in names], dtype=torch.float64) for each in (evidences, errors))
    z = torch.randn(DRAWS, len(names), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = torch.stack([(values + sign * spread * z).softmax(1).mean(0) for sign in (1, -1)]).mean(0)
    return dict(zip(names, found.tolist(), strict=True))


def _undecided(ranked: tuple[Candidate, ...]) -> tuple[str, ...]:
    """Which candidates the errors of the evidences do not set apart from the first."""
    best, *others = ranked
    near = [c for c in others if best.log_evidence - c.log_evidence < APART * math.hypot(best.error, c.error)]
    if not near:
        return ()
    gaps = ", ".join(
        f"{c.name} by {best.log_evidence - c.log_evidence:.2g} +- {math.hypot(best.error, c.error):.2g} nats"
        for c in near
    )
    return (
        f"{best.name} leads {gaps}: within {APART:g} standard errors of the estimated evidences, so this order is not "
        "decided. Raise probes= and steps= of Sampled(), or use an exact method.",
    )


def _core(fitted: Fitted) -> Any:
    return fitted.posterior


def _refuse_different(posteriors: Mapping[str, Fitted]) -> None:
    sizes = {name: _core(fitted).statistics.data for name, fitted in posteriors.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(
            f"the posteriors saw different numbers of data: {sizes}; an evidence compares models of the same data. "
            "Fit all of them to the same."
        )
    kinds = {name: type(fitted.likelihood).__name__ for name, fitted in posteriors.items()}
    if len(set(kinds.values())) > 1:
        raise DataError(f"the posteriors have different likelihoods: {kinds}; expected one kind for all.")


def _findings(ranked: tuple[Candidate, ...], gammas: Mapping[str, EffectiveParameters]) -> tuple[str, ...]:
    """What the classic recipe reads off γ."""
    found = [f"{name}: {line}" for name, effective in gammas.items() for line in effective.findings[:1]
             if "too small" in line]  # fmt: skip
    by_size = sorted(ranked, key=lambda row: row.weights)
    for small, large in pairwise(by_size):
        if large.weights > small.weights and abs(large.gamma - small.gamma) <= 0.05 * small.gamma:
            found.append(
                f"{large.name} has {large.weights} weights and gamma {large.gamma:.1f}, {small.name} {small.weights} "
                f"and {small.gamma:.1f}: the data decide no more of the larger, so the smaller one suffices."
            )
    return tuple(found)
