"""Integration over hyperparameters by the likelihood of held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.settings import DATA, NONE, POSITIVE_VALUES, Rule, require
from lapwing.core.trace import Trace
from lapwing.posteriors.mixture import NEGLIGIBLE, MixturePosterior
from lapwing.tuners.cells import (
    TEMPERATURES,
    CellGrid,
    counted_scores,
    grid_of,
    mean_score,
    mixture_weights,
    thinned,
    with_offset,
    with_tails,
)
from lapwing.tuners.held_outputs import HeldOutputs, refitted_noise
from lapwing.tuners.offsets import WIDTHS, Offset, learned_offset

FOLDS = 5
CLEARLY = 1e-3  # nats that count as a difference
TAILED = 0.9  # weight of the heaviest tails from which it is worth a remark
EDGE = 0.1  # weight of the first or last value of a grid from which it is worth a remark


@dataclass(frozen=True, eq=False)
class Integrate:
    """A tuner that integrates over the prior's precision and the link, by the likelihood of validation data.

    The result is a mixture. Its cells are precisions, multiples of the one that the posterior has, each with softmax
    temperatures (classification) or noise variances and Student tails (Gaussian regression), and the network without
    error bars. A cell's weight is its prior probability times the likelihood of the validation data. With few data
    the mixture keeps what is plausible; with many it is close to the best cell. ``posterior.trace`` compares the
    result with the plain network and with temperature scaling (or refitted noise), cross-validated over the
    validation data.

    For classes and labels every cell also comes with an offset of the logits, which corrects the bias of a network
    that was trained with class weights, or on data with other frequencies of the classes. It is learned on the
    validation data, for classes with ten of them or more.

    Methods whose prior cannot change without the data (SWAG, MCDropout, Ensemble, FMGP, HFL without linearisation)
    are given scales of their covariance in place of precisions.

    Cost: a forward pass over the validation data, and one whose Jacobians serve all cells; two of these for Gaussian
    noise, and where an offset has weight.

    Args:
        data: Validation data in the form that ``fit`` takes: not used in training, 200 or more if possible.
        ratios: Multiples of the present precision; by default half-decades from 0.1 to 1e5 (1e-3 to 1e4 for Gaussian
            noise). An empty tuple keeps the prior, and varies temperature or noise only.
        temperatures: Softmax temperatures to try, in rising order.
        offsets: Standard deviations of the normal distribution that offsets of the logits may come from; an empty
            tuple tries no offsets.

    Raises:
        UnsupportedError: If a setting is out of range.
        DataError: When called, if the data are empty, or a log-likelihood is not finite.

    >>> import lapwing as lw
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(60, 1)
    >>> y = x.sin() + 0.1 * torch.randn(60, 1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), (x[:40], y[:40]), "regression", prior=1.0)
    >>> mixture = posterior.tuned(lw.tuners.Integrate((x[40:], y[40:])))
    >>> mixture.predict(x[:2]).std.shape
    torch.Size([2, 1])
    """

    data: Iterable[Any] | Data
    ratios: Sequence[float] | None = None
    temperatures: Sequence[float] = TEMPERATURES
    offsets: Sequence[float] = WIDTHS

    follows_evidence: ClassVar[bool] = True
    holds_out: ClassVar[bool] = True

    def __post_init__(self) -> None:
        none = Rule("an empty tuple", lambda v: isinstance(v, tuple | list) and not v)
        ratios = POSITIVE_VALUES | none | NONE
        require(self, data=DATA, ratios=ratios, temperatures=POSITIVE_VALUES, offsets=POSITIVE_VALUES | none)

    def __call__(self, posterior: Any) -> MixturePosterior:
        """Return the mixture."""
        base = posterior.base
        network, likelihood = base.problem.network, base.problem.likelihood
        data = network.reading(self.data, "validation")
        learns_noise = likelihood.has_tails and likelihood.learns_dispersion
        held, offset = None, None
        if learns_noise or (self.offsets and likelihood.takes_offset):
            held = HeldOutputs.of(network, likelihood, data)
        grid = grid_of(base, self.ratios, self.temperatures, held.variance if held and learns_noise else None)
        if held and not learns_noise:
            offset = learned_offset(held, likelihood, self.offsets)
        plain = grid
        if offset is not None:
            grid = with_offset(plain, offset)
        scores, counts = counted_scores(grid, data)
        if learns_noise:
            grid = with_tails(grid, counts @ scores)
            scores, counts = counted_scores(grid, data)
        grid = thinned(grid, scores, counts)
        weights = mixture_weights(grid.log_prior, scores, counts)
        folds = [(grid.log_prior, scores)] * FOLDS
        if offset is not None and held is not None:
            folds = self._folds_with_offsets(plain, offset, grid.log_prior, scores, weights, held, data)
        refitted = refitted_noise(held, likelihood, FOLDS) if held and learns_noise else None
        compared, verdict, worse = compared_scores(grid, scores, counts, folds, refitted)
        findings = (*worse, *_edges(grid, weights))
        mixture = MixturePosterior.of(grid.bases, grid.beliefs, grid.cells, weights)
        trace = Trace(
            "Integrate", "cross-validated NLL", findings=findings, scores=compared, scored_on="validation",
            verdict=verdict,
        )  # fmt: skip
        return mixture.with_trace(trace.after(base.trace))

    def _folds_with_offsets(
        self,
        plain: CellGrid,
        used: Offset,
        log_prior: Tensor,
        scores: Tensor,
        weights: Tensor,
        held: HeldOutputs,
        data: Data,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the prior and the scores of the cells for each fold, with an offset learned from the other folds.

        ``plain`` are all cells without offset; those with one are the last of the prior and the scores. Only cells of
        weight get the offset of a fold: one more pass over the data.
        """
        moved, likelihood = slice(-len(plain.cells), None), plain.cells[plain.unchanged].likelihood
        first = slice(0, len(weights) - len(plain.cells))
        shares = weights[moved] + (weights[first] if len(weights) == 2 * len(plain.cells) else 0)
        kept = (shares >= NEGLIGIBLE * shares.max()).nonzero()[:, 0]
        number = torch.arange(len(held.f)) % FOLDS
        offsets = [learned_offset(held.without(number == k), likelihood, self.offsets) for k in range(FOLDS)]
        cells = [
            replace(cell, likelihood=cell.likelihood.with_more_offset(offset.values))
            for offset in offsets
            if offset is not None
            for cell in (plain.cells[int(i)] for i in kept)
        ]
        if cells:
            grid = CellGrid.compared(plain.bases, plain.beliefs, cells)
            columns = iter(counted_scores(grid, data)[0].split(len(kept), 1))
        folds = []
        for offset in offsets:
            own = log_prior[first]
            if offset is None:
                none = own if bool(torch.isfinite(own).any()) else torch.zeros_like(own)
                folds.append((none, scores[:, first]))
                continue
            given = log_prior[moved][kept] - used.log_prior + offset.log_prior
            folds.append((torch.cat([own, given]), torch.cat([scores[:, first], next(columns)], 1)))
        return folds


def compared_scores(
    grid: CellGrid,
    scores: Tensor,
    counts: Tensor,
    folds: Sequence[tuple[Tensor, Tensor]] | None = None,
    refitted: Tensor | None = None,
) -> tuple[dict[str, float], str, tuple[str, ...]]:
    """Return mean negative log-likelihoods of the plain network, of the best rescaled one and of the mixture.

    The latter two are cross-validated: weights and the best cell come from the other folds of the data. Each datum
    counts so often, (n,). ``folds`` has the logarithms of the prior and the scores of the cells for each fold, if they
    differ; ``refitted`` are the scores of the rescaled network if no cells have them. Then a sentence on how they
    compare, and a remark if the plain network is better.
    """
    number = torch.arange(len(scores)) % FOLDS
    mixed, rescaled = torch.empty(len(scores), dtype=torch.float64), torch.empty(len(scores), dtype=torch.float64)
    rescalings = grid.rescaled.nonzero()[:, 0]
    for k in range(FOLDS):
        inside = number == k
        if not bool(inside.any()):
            continue
        log_prior, columns = (grid.log_prior, scores) if folds is None else folds[k]
        weights = mixture_weights(log_prior, columns[~inside], counts[~inside])
        mixed[inside] = torch.logsumexp(columns[inside] + weights.log(), 1)
        if len(rescalings):
            best = rescalings[int((counts[~inside] @ scores[~inside][:, rescalings]).argmax())]
            rescaled[inside] = scores[inside][:, best]
    rescaled = rescaled if refitted is None else refitted
    others = {"plain network": scores[:, grid.unchanged]}
    if len(rescalings) > 1 and len(rescaled) == len(scores):
        others["noise refitted" if grid.cells[0].likelihood.has_tails else "temperature scaling"] = rescaled
    compared = {name: -float(mean_score(each, counts)) for name, each in others.items()}
    compared["mixture"] = -float(mean_score(mixed, counts))
    gaps = {name: _gap(mixed - each, counts) for name, each in others.items()}
    gain, error = gaps["plain network"]
    worse = () if -gain <= max(2 * error, CLEARLY) else (
        f"the plain network predicts the validation data better, by {-gain:.3g} nats; its error bars "
        "from this method do not help. Check that validation and training data come from the same source.",
    )  # fmt: skip
    return compared, _verdict(compared, gaps), worse


def _gap(differences: Tensor, counts: Tensor) -> tuple[float, float]:
    """Return the mean of differences (n,), each counted so often, (n,), and its standard error."""
    error = float(differences.std() / len(differences) ** 0.5) if len(differences) > 1 else 0.0
    return float(mean_score(differences, counts)), error


WORDS_FOR = {
    "plain network": "the network alone",
    "temperature scaling": "the network with its temperature rescaled",
    "noise refitted": "the network with its noise refitted",
}


def _verdict(compared: dict[str, float], gaps: dict[str, tuple[float, float]]) -> str:
    """Return how the mixture compares with the others, in a sentence for a reader who knows none of them."""
    groups: dict[str, list[str]] = {}
    for name, (gain, error) in gaps.items():
        clear = abs(gain) > max(2 * error, CLEARLY)
        how = "about as good as" if not clear else "better than" if gain > 0 else "worse than"
        groups.setdefault(how, []).append(f"{WORDS_FOR[name]} ({compared[name]:.4g})")
    words = " and ".join(f"{how} {' and '.join(names)}" for how, names in groups.items())
    return (
        f"On held-out data these predictions are {words}: their mean negative log-likelihood, lower is better, is "
        f"{compared['mixture']:.4g}."
    )


def _edges(grid: CellGrid, weights: Tensor) -> tuple[str, ...]:
    """Return remarks where the first or last value of an axis of the grid has weight.

    The largest precision, or the smallest scale, is no edge: the network without error bars is beyond it.
    """
    findings = []
    for axis, (values, ends, least) in _axes(grid).items():
        known = values[torch.isfinite(values)]
        if len(known.unique()) < 2:
            continue
        for end, edge in (("smallest", known.min()), ("largest", known.max())):
            share = float(weights[torch.isclose(values, edge, rtol=1e-6, atol=0.0)].sum())
            if end in ends and share >= least:
                findings.append(f"the {end} {axis} tried, {float(edge):.3g}, has a weight of {share:.2f}: {ends[end]}")
    return tuple(findings)


def _axes(grid: CellGrid) -> dict[str, tuple[Tensor, dict[str, str], float]]:
    """Return the axes of the grid by name.

    Each has its values (cells,), NaN for none; what an edge means; and from which weight on it is worth a remark.
    """
    base, none = grid.bases[0], float("nan")
    noise = [float(cell.likelihood.dispersion) for cell in grid.cells]
    wider = [value / float(base.problem.likelihood.dispersion) for value in noise]
    axes: dict[str, tuple[list[float], dict[str, str], float]] = {}
    further = "Try Integrate(data, ratios=...) further"
    if base.linearised:
        means = [none if b.precisions is None else float(b.precisions.mean()) for b in grid.beliefs]
        values = [means[cell.belief] if cell.scale > 0 else none for cell in grid.cells]
        axes["precision"] = values, {"smallest": f"a smaller one may be better. {further} down."}, EDGE
    else:
        values = [cell.scale / w if cell.scale > 0 else none for cell, w in zip(grid.cells, wider, strict=True)]
        axes["scale of the covariance"] = values, {"largest": f"a larger one may be better. {further} down."}, EDGE
    far = "the network is further from calibrated than the grid reaches. Try Integrate(data, temperatures=...) "
    temperatures = [cell.likelihood.link_temperature or none for cell in grid.cells]
    axes["temperature"] = temperatures, dict.fromkeys(("smallest", "largest"), far + "further out."), EDGE
    odd = "the residuals of the validation data are unlike any noise that was tried. Check their targets for outliers."
    axes["noise variance"] = noise, dict.fromkeys(("smallest", "largest"), odd), EDGE
    degrees = [getattr(cell.likelihood, "degrees", none) for cell in grid.cells]
    heavy = "the residuals may have heavier tails than any that was tried. Look at the largest ones."
    axes["degrees of freedom"] = degrees, {"smallest": heavy}, TAILED
    return {name: (torch.tensor(v, dtype=torch.float64), ends, least) for name, (v, ends, least) in axes.items()}
