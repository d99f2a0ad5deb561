"""Rankings of models and posteriors: by the evidence, from the training data alone, and by scores of held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lapwing.decisions import evaluation
from lapwing.decisions.evaluation import PLAIN, align_columns, decimals_of, interval_parts, interval_text, write_json
from lapwing.errors import DataError, UnsupportedError
from lapwing.fitted import Fitted
from lapwing.metrics import ScoreInterval
from lapwing.networks.forward import outside_autocast
from lapwing.posteriors.base import EffectiveParameters, Posterior
from lapwing.posteriors.mixture import MixturePosterior
from lapwing.runtime.settings import Rule, of_class, refuse_other_arguments
from lapwing.runtime.states import State

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DISTINCT = 3.0  # standard errors between two evidences that decide their order; the errors are estimates themselves
ERROR_DRAWS = 2**14  # of the errors, over which probabilities are averaged
FITTED = of_class("a posterior that fit() made", Fitted, DataError)
POSTERIORS = Rule(
    'a mapping from names to fitted posteriors, such as {"kron": posterior}',
    lambda v: isinstance(v, Mapping) and v and all(isinstance(name, str) for name in v),
    DataError,
)


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
                f"{c.name:{width}s} {c.log_evidence:13.2f} {error}{c.fit:11.2f} {c.complexity:11.2f} {c.weights:8,d} "
                f"{c.gamma:8.1f} {c.probability:11.3f}"
            )
        lines.append("The log evidence is the fit less the complexity; gamma is how many weights the data determine.")
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
        DataError: If it is not a mapping, or an empty one, or the numbers of data or the likelihoods differ.
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
    _refuse_other(posteriors)
    _refuse_different(posteriors)
    gammas = {name: fitted.effective_parameters() for name, fitted in posteriors.items()}
    rows = []
    for name, fitted in posteriors.items():
        with torch.no_grad():
            evidence, error = float(fitted.log_evidence()), float(fitted.evidence_error)
            fit, gamma = float(fitted.base.log_likelihood()), gammas[name]
        rows.append(Candidate(name, evidence, fit, fit - evidence, gamma.weights, gamma.total, 0.0, error))
    rows.sort(key=lambda row: -row.log_evidence)
    ranked = tuple(replace(row, probability=p) for row, p in zip(rows, _probabilities(rows), strict=True))
    return Comparison(ranked, (*_undecided_finding(ranked), *_findings(ranked, gammas)))


def _probabilities(ranked: Sequence[Candidate]) -> list[float]:
    """Return the probability of each model for equal prior odds, averaged over independent Gaussian errors.

    The draws are fixed and assigned by rank, so that the order of the mapping does not matter.
    """
    values, spread = torch.tensor([(row.log_evidence, row.error) for row in ranked], dtype=torch.float64).unbind(1)
    means = values.softmax(0)
    if bool(spread.any()):
        z = torch.randn(ERROR_DRAWS, len(ranked), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        means = torch.stack([(values + sign * spread * z).softmax(1).mean(0) for sign in (1, -1)]).mean(0)
    return [float(mean) for mean in means]


def _undecided_finding(ranked: tuple[Candidate, ...]) -> tuple[str, ...]:
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


def _refuse_other(posteriors: Mapping[str, Fitted]) -> None:
    """Raise unless these are fitted posteriors by name."""
    POSTERIORS.check("posteriors", posteriors)
    for name, fitted in posteriors.items():
        FITTED.check(repr(name), fitted)


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


PRINTED_SCORES = ("accuracy", "brier", "ece", "rmse", "crps", "coverage")  # scores beside the NLL; ``scores`` has all


@dataclass(frozen=True)
class Evaluated:
    """One posterior on the data: its scores, how far it is behind the best, and its costs."""

    name: str
    scores: dict[str, ScoreInterval]
    behind: ScoreInterval  # its NLL less that of the best, from the same resampled data
    seconds: float  # of the predictions
    weights: int  # that are uncertain; zero for the plain network
    stored: int | None  # bytes of what the posterior stores; None if it has no file form, or writing one is long
    verdict: str = ""  # "worse" than the best, or "undecided"; nothing for the best itself


@dataclass(frozen=True)
class Evaluations:
    """Several posteriors on the same data, the best NLL first; print it to read it.

    ``evaluations["kron"]`` is one of them.
    """

    rows: tuple[Evaluated, ...]
    task: str
    inputs: int
    data: int
    level: float
    confidence: float
    findings: tuple[str, ...] = ()  # remarks on the data, such as targets in other units

    @property
    def best(self) -> str:
        """The name of the posterior with the lowest NLL."""
        return self.rows[0].name

    def __getitem__(self, name: str) -> Evaluated:
        """Return the row of a posterior."""
        for row in self.rows:
            if row.name == name:
                return row
        raise DataError(f"there is no posterior {name!r}; expected one of {', '.join(row.name for row in self.rows)}.")

    def __str__(self) -> str:
        others = [name for name in self.rows[0].scores if name in PRINTED_SCORES]
        table = [("name", "nll", "behind the best", "", *others, "seconds", "weights", "stored")]
        size = max(abs(row.scores["nll"].value) for row in self.rows)
        decimals = max(decimals_of(row.scores["nll"]) for row in self.rows)
        for row in self.rows:
            scores = [interval_parts(row.scores[name])[0] for name in others]
            stored = "" if row.stored is None else f"{row.stored / 1e6:.2g} MB"
            costs = (f"{row.seconds:.2g}", f"{row.weights:,}", stored)
            behind = (interval_text(row.behind, size=size), row.verdict)
            table.append((row.name, interval_text(row.scores["nll"], decimals), *behind, *scores, *costs))
        title = evaluation.title_of(self.inputs, self.data, self.task, self.confidence)
        return "\n".join([
            title, *align_columns(table), "", *evaluation.explain_scores(["nll", *others], self.task),
            *(f"Note: {finding}" for finding in self.findings),
        ])  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return all rows as plain values, which JSON holds."""
        return asdict(self)

    def json(self, path: str | Path) -> None:
        """Write ``to_json`` to a file."""
        write_json(self.to_json(), path)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the NLL of every posterior with its interval; return the Matplotlib axis.

        Args:
            ax: The axis to draw on; a new one if None.

        Raises:
            UnsupportedError: If Matplotlib is not installed.
        """
        from lapwing import plots

        return plots.ranking(self, ax=ax)


@outside_autocast
def evaluate(
    posteriors: Mapping[str, Fitted],
    data: Iterable[object],
    *,
    level: float = 0.95,
    confidence: float = 0.95,
    resamples: int = 1000,
    target_key: str | None = None,
    progress: bool | None = None,
    generator: torch.Generator | None = None,
) -> Evaluations:
    """Rank several posteriors by their NLL on held-out data, with all other scores, costs and the plain network.

    All predict the same rows in one pass, so that differences are paired; one that counts, by the rule of
    ``posterior.evaluate``, is "worse" than the best. ``lw.compare`` ranks by the evidence, without
    held-out data. The plain network is added once for each model, unless one of the posteriors is that: as "plain
    network", or "plain network of" the first posterior of its model if there are several models.

    Args:
        posteriors: From names to posteriors, all about the same targets. They may have different networks.
        data: Data as for ``fit``, with targets, that no posterior was fitted to or validated on.
        level: The probability of the intervals whose coverage and width are scored, for numbers.
        confidence: The probability of the bootstrap intervals.
        resamples: How often the inputs are drawn again.
        target_key: The key of the target in batches that are mappings, as for ``fit``.
        progress: Whether to show a progress bar; None shows one on a terminal.
        generator: For the bootstrap; a fixed seed by default.

    Returns:
        The posteriors, best first; print it to read it.

    Raises:
        DataError: If it is not a mapping, or data are empty or do not fit, or the tasks differ.

    Cost: the predictions of each posterior, one forward pass for each model, and ``resamples`` sums over the data.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 60).unsqueeze(1)
    >>> data = [(x, (x[:, 0] > 0.1).long())]
    >>> net = torch.nn.Linear(1, 2)
    >>> methods = {"kron": lw.Kron(), "diagonal": lw.Diagonal()}
    >>> table = evaluate({name: lw.fit(net, data, "classification", method=m) for name, m in methods.items()}, data)
    >>> sorted(row.name for row in table.rows)
    ['diagonal', 'kron', 'plain network']
    """
    _refuse_other(posteriors)
    compared = {name: (fitted, fitted.posterior) for name, fitted in posteriors.items()}
    plain = _plain_networks(posteriors)
    found = evaluation.score_posteriors([{**compared, **plain}], [data], level, target_key, progress)
    tasks = {name: each.scoring.task for name, each in found.items()}
    if len(set(tasks.values())) > 1:
        raise DataError(f"the posteriors predict different things: {tasks}; expected one task for all.")
    bootstrapped = evaluation.Bootstrap.of(found, level, confidence, resamples, generator)
    order = sorted(found, key=lambda name: float(bootstrapped.score(name, 0)[0]))
    rows = tuple(
        Evaluated(
            name, bootstrapped.intervals(name), behind, found[name].seconds,
            *_costs(None if name in plain else posteriors[name]), verdict,
        )
        for name, (behind, verdict) in ((name, _behind(bootstrapped, name, order[0])) for name in order)
    )  # fmt: skip
    one = found[order[0]]
    findings = tuple(dict.fromkeys(each for name, (fitted, _) in compared.items()
                                   for each in evaluation.warn_of_other_units(fitted, found[name])))  # fmt: skip
    return Evaluations(rows, one.scoring.task, one.data.inputs, len(one.data.values), level, confidence, findings)


def _behind(bootstrapped: evaluation.Bootstrap, name: str, best: str) -> tuple[ScoreInterval, str]:
    """Return the NLL of a posterior less that of the best, and whether it is worse, by the rule of ``evaluate``."""
    (own, drawn), (least, least_drawn) = (bootstrapped.score(each, 0) for each in (name, best))
    behind = bootstrapped.interval(own - least, drawn - least_drawn)
    unit = bootstrapped.scores[name][0].unit
    size = max(abs(float(own)), abs(float(least))) if unit is None else unit
    worse = "worse" if evaluation.matters(behind, size, bootstrapped.inputs) else "undecided"
    return behind, "" if name == best else worse


def _plain_networks(posteriors: Mapping[str, Fitted]) -> dict[str, tuple[Fitted, Posterior]]:
    """Return the plain network of each model that has none among the posteriors, by name."""
    first: dict[int, str] = {}  # posterior of each model
    for name, fitted in posteriors.items():
        first.setdefault(id(fitted.network.model), name)
    given = {id(each.network.model) for each in posteriors.values() if not each.posterior.has_spread}
    alone = len(first) == 1 and PLAIN not in posteriors
    return {
        PLAIN if alone else f"{PLAIN} of {name}": (posteriors[name], evaluation.plain_of(posteriors[name]))
        for model, name in first.items() if model not in given
    }  # fmt: skip


def kind_of(posterior: Posterior) -> str:
    """Return what a posterior without error bars from its weights is, in words; nothing if it has some."""
    if not posterior.has_spread:
        return PLAIN
    if not isinstance(posterior, MixturePosterior) or any(cell.scale for cell in posterior.cells):
        return ""
    return f"{PLAIN} with {'refitted noise' if posterior.problem.likelihood.has_tails else 'a temperature'}"


def _costs(fitted: Fitted | None) -> tuple[int, int | None]:
    """Return the number of uncertain weights, and the bytes that the posterior stores, where they are cheap to know."""
    if fitted is None or not fitted.posterior.has_spread:
        return 0, 0
    base, weights = fitted.posterior.base, 0 if kind_of(fitted.posterior) else fitted.network.selection.size
    if base.is_sampled or base.solves_for_inputs:
        return weights, None
    try:
        stored: int | None = _nbytes(fitted.posterior.state())
    except UnsupportedError:  # a method without a file form
        stored = None
    return weights, stored


def _nbytes(state: State) -> int:
    """Return the bytes of all tensors of a state and of its parts."""
    own = sum(tensor.nbytes for tensor in state.tensors.values())
    return own + sum(_nbytes(part) for part in state.parts.values())
