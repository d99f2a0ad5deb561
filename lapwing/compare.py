"""A ranking of models by their evidence, from the training data alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from lapwing.errors import DataError
from lapwing.fitted import Fitted
from lapwing.posteriors.base import EffectiveParameters
from lapwing.runtime.settings import Rule, refuse_other_arguments

DISTINCT = 3.0  # standard errors between two evidences that decide their order; the errors are estimates themselves
DRAWS = 2**14  # of the errors, over which probabilities are averaged


@dataclass(frozen=True)
class Candidate:
    """One model: its evidence, which is its fit less its complexity."""

    name: str
    log_evidence: float
    fit: float  # log p(D | theta)
    complexity: float  # fit - log evidence
    weights: int
    gamma: float  # the effective number of parameters
    probability: float  # among those compared, with equal prior odds; averaged over the errors
    error: float = 0.0  # one standard error of the log evidence, zero unless it is estimated


@dataclass(frozen=True)
class Comparison:
    """The candidates, best first; print it to read it."""

    candidates: tuple[Candidate, ...]
    findings: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        """The name of the candidate with the highest evidence."""
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


@refuse_other_arguments
def compare(posteriors: Mapping[str, Fitted]) -> Comparison:
    """Rank fitted posteriors by their evidence.

    The evidence of a model is its fit less its complexity, so that a larger network is better only if its fit is better
    by more than that. Evidences of different methods also differ by their approximations: compare within one method.
    The evidence of a mixture, which ``fit`` returns by default, is that of the posterior that it varies
    (``Fitted.base``). Where evidences are estimated (``Sampled``), probabilities are averaged over their errors, and a
    finding says which order the errors leave undecided.

    Args:
        posteriors: From names to posteriors, all fitted to the same data with the same kind of likelihood.

    Returns:
        The candidates, best first, with findings in words; print it to read it.

    Raises:
        DataError: If it is no mapping or an empty one, or the numbers of data or the likelihoods differ.
        UnsupportedError: If a posterior has no evidence.

    Cost: one evidence and the effective parameters of each posterior; no pass over the data.

    >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
    >>> from torch import nn
    >>> from lapwing.api import fit
    >>> nets = {str(h): nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, 1)) for h in (2, 9)}
    >>> comparison = compare({name: fit(net, [(x, x.sin())], "regression") for name, net in nets.items()})
    >>> len(comparison.candidates)
    2
    """
    if not isinstance(posteriors, Mapping) or not posteriors:
        got = type(posteriors).__name__ if not isinstance(posteriors, Mapping) else "no posteriors"
        raise DataError(f"compare() got {got}; expected a mapping from names to fitted posteriors.")
    for name, fitted in posteriors.items():
        Rule("a posterior that fit() made", lambda v: isinstance(v, Fitted), DataError).check(f"{name!r}", fitted)
    _refuse_different(posteriors)
    with torch.no_grad():
        evidences = {name: float(fitted.log_evidence()) for name, fitted in posteriors.items()}
        errors = {name: float(fitted.evidence_error) for name, fitted in posteriors.items()}
        fits = {name: float(fitted.base.log_likelihood()) for name, fitted in posteriors.items()}
    probabilities = _probabilities(evidences, errors)
    gammas = {name: fitted.effective_parameters() for name, fitted in posteriors.items()}
    rows = [
        Candidate(name, value, fits[name], fits[name] - value, gammas[name].weights, gammas[name].total,
                  probabilities[name], errors[name])
        for name, value in evidences.items()
    ]  # fmt: skip
    ranked = tuple(sorted(rows, key=lambda row: -row.log_evidence))
    return Comparison(ranked, (*_undecided(ranked), *_findings(ranked, gammas)))


def _probabilities(evidences: Mapping[str, float], errors: Mapping[str, float]) -> dict[str, float]:
    """Return the probability of each model for equal prior odds, averaged over independent Gaussian errors.

    The draws are fixed and assigned by rank, so that the order of the mapping does not matter.
    """
    names = sorted(evidences, key=lambda name: -evidences[name])
    values, spread = (torch.tensor([each[name] for name in names], dtype=torch.float64) for each in (evidences, errors))
    means = values.softmax(0)
    if bool(spread.any()):
        z = torch.randn(DRAWS, len(names), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        means = torch.stack([(values + sign * spread * z).softmax(1).mean(0) for sign in (1, -1)]).mean(0)
    return dict(zip(names, means.tolist(), strict=True))


def _undecided(ranked: tuple[Candidate, ...]) -> tuple[str, ...]:
    """Return a finding if the errors of the evidences leave open which candidate is the best."""
    best, *others = ranked
    near = [c for c in others if best.log_evidence - c.log_evidence < DISTINCT * math.hypot(best.error, c.error)]
    if not near:
        return ()
    gap = lambda c: f"{best.log_evidence - c.log_evidence:.2g} +- {math.hypot(best.error, c.error):.2g} nats"
    gaps = ", ".join(f"{c.name} by {gap(c)}" for c in near)
    return (
        f"{best.name} leads {gaps}: within {DISTINCT:g} standard errors of the estimated evidences, so this order is "
        "not decided. Raise probes= and steps= of Sampled(), or use an exact method.",
    )


def _refuse_different(posteriors: Mapping[str, Fitted]) -> None:
    """Raise unless all have the same number of data and the same kind of likelihood."""
    sizes = {name: fitted.base.statistics.data for name, fitted in posteriors.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(
            f"the posteriors saw different numbers of data: {sizes}; expected the same data for all, since an evidence "
            "compares models of the same data. Fit all of them to the same."
        )
    kinds = {name: type(fitted.likelihood).__name__ for name, fitted in posteriors.items()}
    if len(set(kinds.values())) > 1:
        raise DataError(f"the posteriors have different likelihoods: {kinds}; expected one kind for all.")


def _findings(ranked: tuple[Candidate, ...], gammas: Mapping[str, EffectiveParameters]) -> tuple[str, ...]:
    """Return advice that follows from γ: a network that is too small, and one that is larger than needed."""
    first_lines = [(name, line) for name, effective in gammas.items() for line in effective.findings[:1]]
    findings = [f"{name}: {line}" for name, line in first_lines if "too small" in line]
    for small, large in pairwise(sorted(ranked, key=lambda row: row.weights)):
        if large.weights > small.weights and abs(large.gamma - small.gamma) <= 0.05 * small.gamma:
            findings.append(
                f"{large.name} has {large.weights} weights and gamma {large.gamma:.1f}, {small.name} {small.weights} "
                f"and {small.gamma:.1f}: the data decide no more of the larger, so the smaller one suffices."
            )
    return tuple(findings)
