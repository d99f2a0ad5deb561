"""Models ranked by their evidence, on the training data alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from lapwing.api import Fitted
from lapwing.core.errors import DataError
from lapwing.posteriors.effective import EffectiveParameters


@dataclass(frozen=True)
class Candidate:
    """One model: its evidence, and how much of it is fit and how much is charged for flexibility."""

    name: str
    log_evidence: float
    fit: float  # log p(D | theta)
    complexity: float  # what is taken off: fit - log evidence
    weights: int
    gamma: float
    probability: float  # among those compared, with equal odds before the data


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
        head = f"{'model':{width}s} {'log evidence':>13s} {'fit':>11s} {'complexity':>11s} {'weights':>8s} "
        lines = [head + f"{'gamma':>8s} {'probability':>11s}"]
        for c in self.candidates:
            lines.append(
                f"{c.name:{width}s} {c.log_evidence:13.2f} {c.fit:11.2f} {c.complexity:11.2f} {c.weights:8d} "
                f"{c.gamma:8.1f} {c.probability:11.3f}"
            )
        return "\n".join([*lines, *self.findings])


def compare(posteriors: Mapping[str, Fitted]) -> Comparison:
    """Rank fitted posteriors by the evidence. All must be fitted to the same data with the same kind of likelihood.

    The evidence of a model is its fit less what its flexibility costs; a larger network must earn its weights.
    Evidences of different methods differ by their approximation as well: compare within one method.

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
        fits = {name: float(_core(fitted).log_likelihood()) for name, fitted in posteriors.items()}
    top = max(evidences.values())
    total = sum(math.exp(value - top) for value in evidences.values())
    gammas = {name: fitted.effective_parameters() for name, fitted in posteriors.items()}
    rows = [
        Candidate(name, value, fits[name], fits[name] - value, gammas[name].weights, gammas[name].total,
                  math.exp(value - top) / total)
        for name, value in evidences.items()
    ]  # fmt: skip
    ranked = tuple(sorted(rows, key=lambda row: -row.log_evidence))
    return Comparison(ranked, _findings(ranked, gammas))


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
