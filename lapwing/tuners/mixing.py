"""Mixtures over hyperparameters: by held-out data, or within a budget without them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.processes import ALONE, Processes
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.base import Likelihood, expand_weights
from lapwing.posteriors.base import Posterior, Trace, nll_text
from lapwing.posteriors.mixture import NEGLIGIBLE, RARE, Belief, Cell, MixturePosterior
from lapwing.predictives.numbers import log_density
from lapwing.problem import check_targets
from lapwing.runtime.settings import DATA, EMPTY, NONE, POSITIVE, POSITIVE_VALUES, Rule, integer, required, setting
from lapwing.tuners.base import TunerWithSettings
from lapwing.tuners.grid import FEW_POINTS, CellGrid, counted_scores, mean_score
from lapwing.tuners.offsets import CERTAIN_OFFSET, WIDTHS, HeldOutputs, Offset, learn_offset, refitted_noise_scores

PLAIN_WEIGHT = 0.3  # prior probability of the network without error bars
PLAIN_NOISE_WEIGHT = 0.5  # the same for a likelihood with noise to learn
RATIOS = tuple(10.0 ** (k / 2) for k in range(-2, 11))  # of the precision to the evidence's, for logits and rates
NOISE_RATIOS = tuple(10.0 ** (k / 2) for k in range(-6, 9))  # the same for Gaussian noise
FEW_RATIOS = (0.1, 1.0, 10.0, 100.0, 1000.0)  # if every precision takes solves over all data
SCALES = tuple(10.0**k for k in range(3, -2, -1))  # the same for methods without a precision: 1 / scale of V
NOISES = range(-4, 12)  # noise variances to try, in quarters of a decade above that of the training residuals
NOISE_STEPS = 4  # quarters on both sides of the variance of the validation residuals
MAX_PRECISIONS = 3  # precisions that a mixture keeps
TEMPERATURES = (0.35, 0.5, 0.7, 0.85, 1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.5, 8.0)
TAILS = ((8.0, 0.6), (8.0, 0.75), (8.0, 0.9), (4.0, 0.6), (4.0, 0.75), (4.0, 0.9))  # degrees and scale


def grid_of(
    posterior: Posterior, ratios: Sequence[float] | None, temperatures: Sequence[float], noise: Tensor | None = None
) -> CellGrid:
    """Return the cells for a fitted posterior.

    ``ratios`` multiply the precisions of the prior, or divide the covariance where there is no precision to change. An
    empty sequence keeps the posterior as it is; the plain network then has no prior probability, but is scored.
    ``noise`` is the variance of the validation residuals of each output, (C,): noise variances are tried around it
    and around that of the training residuals.
    """
    likelihood = posterior.problem.likelihood
    learns_noise = likelihood.has_tails and likelihood.learns_dispersion
    beliefs, spreads = _beliefs_and_scales(posterior, ratios, learns_noise)
    plain_mass = 0.0 if ratios is not None and not len(ratios) else PLAIN_NOISE_WEIGHT if learns_noise else PLAIN_WEIGHT
    bases, beliefs, plain = with_plain(posterior, beliefs)
    cells: list[Cell] = []
    mass: list[float] = []
    variants = _likelihoods(likelihood, temperatures, learns_noise, noise)
    for number, scale in [*spreads, (plain, 0.0)]:
        for variant, share in variants:
            wider = float(variant.dispersion / likelihood.dispersion) if learns_noise else 1.0
            cells.append(Cell(number, variant, scale * wider))
            mass.append(share * (plain_mass if scale == 0 else (1 - plain_mass) / len(spreads)))
    rescaled = torch.tensor([cell.scale == 0 for cell in cells])
    unchanged = next(i for i, cell in enumerate(cells) if cell.scale == 0 and _same_link(cell.likelihood, likelihood))
    log_prior = torch.tensor(mass, dtype=torch.float64).log()
    return CellGrid(bases, tuple(beliefs), tuple(cells), log_prior, rescaled, unchanged)


def with_plain(posterior: Posterior, beliefs: Sequence[Belief]) -> tuple[tuple[Posterior, ...], list[Belief], int]:
    """Return bases, beliefs, and the number of the belief whose mean is the output of the network."""
    plain = posterior.plain()
    if plain is posterior:
        return (posterior,), [*beliefs], 0
    return (posterior, plain), [*beliefs, Belief(1)], len(beliefs)


def _same_link(one: Likelihood, other: Likelihood) -> bool:
    """Return whether two likelihoods have the same link temperature and noise."""
    pairs = [(one.dispersion, other.dispersion)]
    if one.ratios is not None and other.ratios is not None:
        pairs.append((one.ratios, other.ratios))
    same = all(bool(torch.isclose(a, b, rtol=1e-6, atol=0.0).all()) for a, b in pairs)
    return one.link_temperature == other.link_temperature and same


def _beliefs_and_scales(
    posterior: Posterior, ratios: Sequence[float] | None, noise: bool
) -> tuple[list[Belief], list[tuple[int, float]]]:
    """Return the beliefs, and (belief, scale) of every spread of f."""
    if ratios is not None and not len(ratios):
        return [Belief(0)], [(0, 1.0)]
    if not posterior.has_spread:
        return [Belief(0)], []
    if ratios is None and posterior.linearised:
        is_slow = posterior.is_sampled or posterior.solves_for_inputs
        ratios = FEW_RATIOS if is_slow else NOISE_RATIOS if noise else RATIOS
    return vary_precision(posterior, SCALES if ratios is None else ratios)


def vary_precision(posterior: Posterior, ratios: Sequence[float]) -> tuple[list[Belief], list[tuple[int, float]]]:
    """Return beliefs and (belief, scale) of every ratio of the precision: one over the scale of the covariance."""
    if not posterior.linearised:
        return [Belief(0)], [(0, 1 / ratio) for ratio in ratios]
    values = posterior.problem.prior.values.detach()
    return [Belief(0, values * ratio) for ratio in ratios], [(i, 1.0) for i in range(len(ratios))]


def _likelihoods(
    likelihood: Likelihood, temperatures: Sequence[float], learns_noise: bool, noise: Tensor | None
) -> list[tuple[Likelihood, float]]:
    """Return the likelihoods of the cells with their prior probabilities."""
    if likelihood.link_temperature is not None:
        logs = torch.tensor(temperatures, dtype=torch.float64).log()
        mass = (-0.5 * (logs / 0.5).square()).softmax(0).tolist()
        start = likelihood.link_temperature
        return [(likelihood.with_link_temperature(start * t), m) for t, m in zip(temperatures, mass, strict=True)]
    if not learns_noise:
        return [(likelihood, 1.0)]
    tried = _noise_candidates(likelihood, noise)
    return [(each, 1 / len(tried)) for each in tried]


def _noise_candidates(likelihood: Likelihood, held_out: Tensor | None) -> list[Likelihood]:
    """Return likelihoods with noises around that of the training residuals, and around the held-out ones (C,).

    Both lie on one grid, unless each output has a noise to itself: held-out residuals then have ratios of their own.
    A network that fits its training targets far better than others has a gap between the two parts.
    """
    phi, own, around = likelihood.dispersion, likelihood.noise_variance, set(NOISES)
    times = lambda quarters: [likelihood.with_dispersion(phi * 10.0 ** (k / 4)) for k in sorted(quarters)]
    if held_out is None or own is None:
        return times(around)
    held_out = held_out.to(phi)
    near = range(-NOISE_STEPS, NOISE_STEPS + 1)
    if likelihood.learns_ratios and len(held_out) > 1:
        middle = held_out.log().mean().exp()
        other = likelihood.with_noise(held_out / middle)
        return [*times(around), *(other.with_dispersion(middle * 10.0 ** (k / 4)) for k in near)]
    centre = 4 * math.log10(float((held_out / own).mean()))
    return times(around | set(range(math.floor(centre) - NOISE_STEPS, math.ceil(centre) + NOISE_STEPS + 1)))


def with_tails(grid: CellGrid, total: Tensor, best: int = 50) -> CellGrid:
    """Return the grid with Student tails on the cells with the largest posterior weight.

    A cell with tails shares the prior probability of its cell without.
    """
    order = (grid.log_prior + total).argsort(descending=True)[:best].tolist()
    cells, log_prior = list(grid.cells), grid.log_prior.tolist()
    share = -math.log(1 + len(TAILS))
    for i in order:
        cell = grid.cells[i]
        for degrees, scale in TAILS:
            cells.append(Cell(cell.belief, cell.likelihood.with_tails(degrees, scale), cell.scale))
            log_prior.append(log_prior[i] + share)
        log_prior[i] += share
    prior = torch.tensor(log_prior, dtype=torch.float64)
    rescaled = torch.cat([grid.rescaled, torch.zeros(len(cells) - len(grid.cells), dtype=torch.bool)])
    return CellGrid(grid.bases, grid.beliefs, tuple(cells), prior, rescaled, grid.unchanged)


def with_offset(grid: CellGrid, offset: Offset) -> CellGrid:
    """Return the grid with every cell a second time, with an offset of the logits.

    If the offset is certain, cells without it get no weight; only those that the mixture is compared with stay.
    """
    moved = [replace(cell, likelihood=cell.likelihood.with_more_offset(offset.values)) for cell in grid.cells]
    prior, first = grid.log_prior, torch.ones_like(grid.rescaled)
    if offset.probability > CERTAIN_OFFSET:
        prior, first = torch.full_like(prior, -math.inf), grid.rescaled
    stay = first.nonzero()[:, 0].tolist()
    return replace(
        grid,
        cells=(*(grid.cells[i] for i in stay), *moved),
        log_prior=torch.cat([prior[first], grid.log_prior + offset.log_prior]),
        rescaled=torch.cat([grid.rescaled[first], torch.zeros_like(grid.rescaled)]),
        unchanged=stay.index(grid.unchanged),
    )


def thin(grid: CellGrid, scores: Tensor, counts: Tensor | None = None) -> CellGrid:
    """Return the grid with at most ``MAX_PRECISIONS`` precisions: every second one, or fewer, around the best.

    Few validation data leave many neighbouring precisions plausible. Their predictions differ little, and each costs
    a product with the Jacobian at every prediction.
    """
    weights = mixture_weights(grid.log_prior, scores, counts)
    number = torch.tensor([cell.belief for cell in grid.cells])
    spread = grid.scales > 0
    shares = torch.zeros(len(grid.beliefs), dtype=torch.float64).index_add(0, number, weights * spread)
    step = -(-int((shares >= RARE).sum()) // MAX_PRECISIONS)
    if step <= 1:
        return grid
    kept = spread & ((number - int(shares.argmax())) % step == 0)
    # The precisions that are kept take the weight of all, so that the plain network gains none.
    gain = torch.where(kept, (weights[spread].sum() / weights[kept].sum()).log(), 0.0)
    return replace(grid, log_prior=(grid.log_prior + gain).masked_fill(spread & ~kept, -math.inf))


def mixture_weights(log_prior: Tensor, scores: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the posterior probabilities of the cells after these data, (cells,), each counted so often, (n,)."""
    return (log_prior + (scores.sum(0) if counts is None else counts @ scores)).softmax(0)


FOLDS = 5
CLEAR_DIFFERENCE = 1e-3  # nats that count as a difference
HEAVY_TAILS_WEIGHT = 0.9  # weight of the heaviest tails from which it is worth a remark
EDGE = 0.1  # weight of the first or last value of a grid from which it is worth a remark


@dataclass(frozen=True, eq=False)
class Integrate(TunerWithSettings):
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

    data: Iterable[object] | Data = required(DATA)
    ratios: Sequence[float] | None = setting(None, POSITIVE_VALUES | EMPTY | NONE)
    temperatures: Sequence[float] = setting(TEMPERATURES, POSITIVE_VALUES)
    offsets: Sequence[float] = setting(WIDTHS, POSITIVE_VALUES | EMPTY)

    follows_evidence: ClassVar[bool] = True
    holds_out: ClassVar[bool] = True

    def __call__(self, posterior: Posterior) -> MixturePosterior:
        """Return the mixture."""
        base = posterior.base
        network, likelihood = base.problem.network, base.problem.likelihood
        data = network.read_data(self.data, "validation")
        learns_noise = likelihood.has_tails and likelihood.learns_dispersion
        held, offset = None, None
        if learns_noise or (self.offsets and likelihood.takes_offset):
            held = HeldOutputs.of(network, likelihood, data)
        grid = grid_of(base, self.ratios, self.temperatures, held.variance if held and learns_noise else None)
        if held and not learns_noise:
            offset = learn_offset(held, likelihood, self.offsets)
        plain = grid
        if offset is not None:
            grid = with_offset(plain, offset)
        scores, counts = counted_scores(grid, data)
        if learns_noise:
            known, grid = len(grid.cells), with_tails(grid, counts @ scores)
            scores = torch.cat([scores, counted_scores(grid.last(known), data)[0]], 1)
        grid = thin(grid, scores, counts)
        weights = mixture_weights(grid.log_prior, scores, counts)
        folds = [(grid.log_prior, scores)] * FOLDS
        if offset is not None and held is not None:
            folds = self._folds_with_offsets(plain, offset, grid.log_prior, scores, weights, held, data)
        refitted = refitted_noise_scores(held, likelihood, FOLDS) if held and learns_noise else None
        compared, verdict, worse = compare_scores(grid, scores, counts, folds, refitted)
        findings = (*worse, *_edge_remarks(grid, weights))
        mixture = MixturePosterior.of(grid.bases, grid.beliefs, grid.cells, weights)
        trace = Trace(
            "Integrate", "cross-validated NLL", findings=findings, scores=compared, scored_on="validation",
            verdict=verdict,
        )  # fmt: skip
        return mixture.with_trace(trace.after(base.trace))

    def _folds_with_offsets(
        self, plain: CellGrid, used: Offset, log_prior: Tensor, scores: Tensor, weights: Tensor, held: HeldOutputs,
        data: Data,
    ) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
        """Return the log prior and the scores of the cells for each fold, with an offset learned from the other folds.

        ``plain`` has all cells without offset. In ``log_prior`` and ``scores`` the cells with an offset come last. Only
        cells with a weight that is not negligible are scored with the offset of a fold, in one more pass over the data.
        """
        moved, likelihood = slice(-len(plain.cells), None), plain.cells[plain.unchanged].likelihood
        first = slice(0, len(weights) - len(plain.cells))
        shares = weights[moved] + (weights[first] if len(weights) == 2 * len(plain.cells) else 0)
        kept = (shares >= NEGLIGIBLE * shares.max()).nonzero()[:, 0]
        number = torch.arange(len(held.f)) % FOLDS
        offsets = [learn_offset(held.without(number == k), likelihood, self.offsets) for k in range(FOLDS)]
        cells = [
            replace(cell, likelihood=cell.likelihood.with_more_offset(offset.values))
            for offset in offsets
            if offset is not None
            for cell in (plain.cells[int(i)] for i in kept)
        ]
        if cells:
            grid = CellGrid.to_compare(plain.bases, plain.beliefs, cells)
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


def compare_scores(
    grid: CellGrid, scores: Tensor, counts: Tensor, folds: Sequence[tuple[Tensor, Tensor]], refitted: Tensor | None
) -> tuple[dict[str, float], str, tuple[str, ...]]:
    """Compare the mixture with the plain network and with the best rescaled one, cross-validated over the data.

    Args:
        grid: The cells.
        scores: The log-likelihood of each datum under each cell, (n, cells).
        counts: How often each datum counts, (n,).
        folds: For each fold, the log prior and the scores of the cells; they differ if offsets were learned.
        refitted: The scores of the network with its noise refitted, (n,), in place of the best rescaled cell.

    Returns:
        Mean negative log-likelihoods by name; a sentence that compares them; and a remark if the plain network is
        better than the mixture. For each fold the weights and the best cell come from the other folds.
    """
    number = torch.arange(len(scores)) % FOLDS
    mixed, rescaled = torch.empty(len(scores), dtype=torch.float64), torch.empty(len(scores), dtype=torch.float64)
    rescalings = grid.rescaled.nonzero()[:, 0]
    for k in range(FOLDS):
        inside = number == k
        if not bool(inside.any()):
            continue
        log_prior, columns = folds[k]
        weights = mixture_weights(log_prior, columns[~inside], counts[~inside])
        mixed[inside] = torch.logsumexp(columns[inside] + weights.log(), 1)
        if len(rescalings):
            best = rescalings[int((counts[~inside] @ scores[~inside][:, rescalings]).argmax())]
            rescaled[inside] = scores[inside][:, best]
    rescaled = rescaled if refitted is None else refitted
    known = len(rescalings) > 1 and len(rescaled) == len(scores)
    return compare_held_out(grid, mixed, scores, rescaled if known else None, counts)


def compare_held_out(
    grid: CellGrid, mixed: Tensor, scores: Tensor, rescaled: Tensor | None, counts: Tensor, name: str = "validation"
) -> tuple[dict[str, float], str, tuple[str, ...]]:
    """Compare log-likelihoods of a mixture (n,) with those of the plain cell and of rescaled ones, if there are some.

    Args: those of ``compare_scores``, and the name of the data. Returns what it does.
    """
    others = {"plain network": scores[:, grid.unchanged]}
    if rescaled is not None:
        others["noise refitted" if grid.cells[0].likelihood.has_tails else "temperature scaling"] = rescaled
    compared = {name: -float(mean_score(each, counts)) for name, each in others.items()}
    compared["mixture"] = -float(mean_score(mixed, counts))
    gaps = {name: _mean_and_error(mixed - each, counts) for name, each in others.items()}
    gain, error = gaps["plain network"]
    advice = "Try another method, or more folds."
    if name == "validation":
        advice = "Check that validation and training data come from the same source."
    worse = () if -gain <= max(2 * error, CLEAR_DIFFERENCE) else (
        f"the plain network predicts the {name} data better, by {-gain:.3g} nats; its error bars "
        f"from this method do not help. {advice}",
    )  # fmt: skip
    return compared, _verdict(compared, gaps), worse


def _mean_and_error(differences: Tensor, counts: Tensor) -> tuple[float, float]:
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
        clear = abs(gain) > max(2 * error, CLEAR_DIFFERENCE)
        how = "about as good as" if not clear else "better than" if gain > 0 else "worse than"
        groups.setdefault(how, []).append(f"{WORDS_FOR[name]} ({nll_text(compared[name])})")
    words = " and ".join(f"{how} {' and '.join(names)}" for how, names in groups.items())
    return (
        f"On held-out data these predictions are {words}: their mean negative log-likelihood is "
        f"{nll_text(compared['mixture'])} (lower is better)."
    )


def _edge_remarks(grid: CellGrid, weights: Tensor) -> tuple[str, ...]:
    """Return a remark for each axis of the grid whose first or last value has weight.

    The largest precision and the smallest scale are not edges: the plain network lies beyond them.
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

    Each has a value for every cell, (cells,), NaN where there is none; what weight at either end means, in words; and
    the least weight that is remarked on.
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
    degrees = [cell.likelihood.degrees for cell in grid.cells]
    heavy = "the residuals may have heavier tails than any that was tried. Look at the largest ones."
    axes["degrees of freedom"] = degrees, {"smallest": heavy}, HEAVY_TAILS_WEIGHT
    return {name: (torch.tensor(v, dtype=torch.float64), ends, least) for name, (v, ends, least) in axes.items()}


BUDGET_RATIOS = (1.0, 10.0, 100.0)
MOST_SPREAD = 0.95  # weight of all cells with error bars together
HARMLESS_LOSS = 1e-4  # loss below which a cell counts as harmless
DEGREES = (math.inf, 8.0, 4.0)
TAILS_GAIN = 2.0  # nats by which Student tails must be better
ADVICE = (
    "validation data would calibrate these error bars: fit(..., validation=data), with 200 rows or so. If no rows can "
    "be spared, validation=lw.sibling(train_fn) trains a second network on 80 % of the training data instead, for 0.8 "
    "of the cost of the first training, and a fit."
)
WIDTH = (  # of the networks of experiments/widths.md
    "no held-out data checked the width of these error bars: over many networks 95 % intervals covered 95 % of new "
    "rows on average, but for single ones mostly 89 to 100 %, and some were several times as wide as they need be."
)
SCALE_TO_REPORT = 0.3  # factor of the exact covariance up to which a finding reports it
TRACE = Trace("Budget", "training NLL", findings=(ADVICE,), scored_on="training")


POSTERIORS = Rule(
    "a list of posteriors", lambda v: isinstance(v, tuple | list) and all(hasattr(part, "problem") for part in v)
)


@dataclass(frozen=True, eq=False)
class Budget(TunerWithSettings):
    """A tuner for classification and counts without validation data; for Gaussian noise it learns the tails.

    Nothing in the training data tells how wide the error bars of a network that fits them should be. So each cell of
    a mixture, the evidence's precision times 1, 10 and 100, is given only as much weight as lowers the likelihood of
    training targets by its part of a fixed budget; the plain network has the rest. This costs the training targets no
    more than that, and gains about half of what the best precision would: it is a guard, not a calibration.

    With Gaussian noise the residuals do say something about the targets: Student tails are fitted to them. Half of the
    mixture is the plain network, and the posterior and ``others`` share the other half equally. Nothing checks its
    width: intervals may be too wide or too narrow on new data.

    Cost: one pass over ``points`` training data; for Gaussian noise over a hundred, and a pass without Jacobians.

    Args:
        data: The training data; ``fit`` sets them.
        budget: The share of the training targets' probability that may be lost.
        ratios: Multiples of the evidence's precision.
        points: How many training data are looked at.
        others: Fitted posteriors around the same network to be averaged in (Gaussian noise only).
        scales: The factors of their covariances; 1 if left out.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, there are no data.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> data = [(x, (x[:, 0] > 0).long())]
    >>> posterior = lw.fit(torch.nn.Linear(1, 2), data, "classification", prior=1.0)
    >>> guarded = posterior.tuned(lw.tuners.Budget(data))
    >>> guarded.predict(x[:3]).probs.shape
    torch.Size([3, 2])
    """

    data: Iterable[object] | Data | None = setting(None, DATA | NONE)
    budget: float = setting(0.0035, POSITIVE)
    ratios: Sequence[float] = setting(BUDGET_RATIOS, POSITIVE_VALUES)
    points: int = setting(700, integer())
    others: Sequence[Posterior] = setting((), POSTERIORS)
    scales: Sequence[float] = setting((), POSITIVE_VALUES | EMPTY)

    needs_training_data: ClassVar[bool] = True
    follows_evidence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.scales) not in (0, len(self.others)):
            raise UnsupportedError(
                f"scales has {len(self.scales)} entries for {len(self.others)} posteriors; expected one for each."
            )

    def __call__(self, posterior: Posterior) -> MixturePosterior:
        """Return the mixture."""
        base = posterior.base
        likelihood = base.problem.likelihood
        data = self.read_data(base.problem.network)
        mixture = self._with_tails(base, data) if likelihood.has_tails else self._guard(base, data)
        assert mixture.trace is not None
        return mixture.with_trace(mixture.trace.after(base.trace))

    def _guard(self, base: Posterior, data: Data) -> MixturePosterior:
        """Return the mixture of the cells and the plain network, each within its part of the budget."""
        likelihood = base.problem.likelihood
        beliefs, spreads = vary_precision(base, self.ratios)
        bases, beliefs, plain = with_plain(base, beliefs)
        cells = [Cell(number, likelihood, scale) for number, scale in [*spreads, (plain, 0.0)]]
        scores, counts = counted_scores(CellGrid.to_compare(bases, beliefs, cells), data, self.points)
        weights = budget_weights(scores, self.budget, counts)
        mixture = MixturePosterior.of(bases, beliefs, cells, weights)
        return mixture.with_trace(replace(TRACE, scores=_mean_losses(scores, weights, counts)))

    def _with_tails(self, base: Posterior, data: Data) -> MixturePosterior:
        """Return half the plain network and half the posteriors, with Student tails fitted to the residuals."""
        likelihood = base.problem.likelihood
        if likelihood.learns_dispersion:
            likelihood = likelihood.with_tails(*fit_tails(standardised_residuals(base, data), data.processes))
        bases, beliefs, plain = with_plain(base, [Belief(0)])
        parts = [(0, base, 1.0)]
        for other, scale in zip(self.others, self.scales or [1.0] * len(self.others), strict=True):
            parts.append((len(beliefs), other, scale))
            bases, beliefs = (*bases, other), [*beliefs, Belief(len(bases))]
        parts.append((plain, base, 0.0))
        tails = lambda each: each.problem.likelihood.with_tails(likelihood.degrees, likelihood.tail_scale)
        cells = [Cell(number, tails(each), scale) for number, each, scale in parts]
        share = (1 - PLAIN_NOISE_WEIGHT) / (len(cells) - 1)
        weights = torch.tensor([*[share] * (len(cells) - 1), PLAIN_NOISE_WEIGHT], dtype=torch.float64)
        grid = CellGrid.to_compare(bases, beliefs, [*cells, Cell(plain, base.problem.likelihood, 0.0)])
        scores, counts = counted_scores(grid, data, min(self.points, FEW_POINTS))
        mixture = MixturePosterior.of(bases, beliefs, cells, weights)
        compared = _mean_losses(scores, torch.cat([weights, weights.new_zeros(1)]), counts)
        findings = (WIDTH, *(_disagreement(scale) for scale in self.scales if scale <= SCALE_TO_REPORT), ADVICE)
        return mixture.with_trace(replace(TRACE, scores=compared, findings=findings))


def _disagreement(scale: float) -> str:
    """Return the finding that the exact covariance differs from that of Kron and was multiplied by ``scale``."""
    return (
        f"the variance of the exact posterior is {scale**-2:.3g} times that of Kron, and is multiplied by {scale:.2g}: "
        "the width of these error bars is uncertain by the square root of that."
    )


def _mean_losses(scores: Tensor, weights: Tensor, counts: Tensor) -> dict[str, float]:
    """Return the mean negative log-likelihoods of the plain network, the last cell, and of the mixture."""
    mixed = torch.logsumexp(scores + weights.log(), 1)
    plain, average = (-float(mean_score(each, counts)) for each in (scores[:, -1], mixed))
    return {"plain network": plain, "mixture": average}


def budget_weights(scores: Tensor, budget: float, counts: Tensor | None = None) -> Tensor:
    """Return the weights of the cells (K + 1,) from the log-likelihoods (n, K + 1); the last is the plain network.

    Each datum counts so often, (n,), or once.
    """
    counts = scores.new_ones(len(scores)) if counts is None else counts
    lost = mean_score((1 - (scores[:, :-1] - scores[:, -1:]).exp()).clamp_min(0), counts)
    weights = (budget / lost.numel() / lost.clamp_min(HARMLESS_LOSS)).clamp_max(1.0)
    weights = weights * (MOST_SPREAD / weights.sum()).clamp_max(1.0)
    return torch.cat([weights, 1 - weights.sum().unsqueeze(0)])


def standardised_residuals(base: Posterior, data: Data) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield this process's residuals of each batch over their noise, flat, in float64, by one forward pass.

    Each comes with how often it counts; None if all count once.
    """
    network, likelihood = base.problem.network, base.problem.likelihood
    for batch in data.batches("residuals", weighted=True):
        _, y = check_targets(network, likelihood, batch)
        f = network(batch.inputs).double()
        assert likelihood.noise_variance is not None
        z = (f - y.double()) / likelihood.noise_variance.to(f).sqrt()
        counts = None if batch.weights is None else expand_weights(batch.weights, z).expand_as(z).flatten()
        yield z.flatten(), counts


def fit_tails(residuals: Iterable[tuple[Tensor, Tensor | None]], processes: Processes = ALONE) -> tuple[float, float]:
    """Return degrees and scale of the Student distribution of largest likelihood; tails must be clearly better.

    The likelihood of every candidate is summed piece by piece, so that memory does not grow with the residuals, and
    over the residuals of all processes.
    """
    scales = {degrees: torch.arange(0.4, 1.11, 0.025, dtype=torch.float64) for degrees in DEGREES}
    scales[math.inf] = torch.ones(1, dtype=torch.float64)
    candidates = [(degrees, scale) for degrees in DEGREES for scale in scales[degrees].tolist()]
    totals, count = torch.zeros(len(candidates), dtype=torch.float64), 0.0
    for z, counts in residuals:
        counts = torch.ones_like(z) if counts is None else counts
        of_degrees = (log_density(z / scales[d].to(z).unsqueeze(1), d) @ counts for d in DEGREES)
        totals += torch.cat([*of_degrees]).to(totals)
        count += float(counts.sum())
    totals, count = processes.sum([totals])[0], sum(processes.gather_values(count))
    costs = [count * math.log(scale) + (0.0 if degrees == math.inf else TAILS_GAIN) for degrees, scale in candidates]
    return candidates[int((totals - torch.tensor(costs, dtype=torch.float64)).argmax())]
