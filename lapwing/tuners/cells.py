"""The cells of a mixture: which hyperparameters are integrated over, and how they score on data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.batches import Batch, merged
from lapwing.core.data import Data
from lapwing.core.function_samples import FunctionSamples
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.inputs import Inputs
from lapwing.core.memory import runs
from lapwing.errors import DataError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.networks.network import Network
from lapwing.posteriors.beliefs import beliefs_at
from lapwing.posteriors.draws import Kept, drawn_beliefs, pieces, prefers_draws
from lapwing.posteriors.mixture import RARE, Belief, Cell, member
from lapwing.problem import named_targets
from lapwing.tuners.offsets import CERTAIN, Offset

PLAIN = 0.3  # prior probability of the network without error bars
PLAIN_NOISE = 0.5  # the same for a likelihood with noise to learn
RATIOS = tuple(10.0 ** (k / 2) for k in range(-2, 11))  # of the precision to the evidence's, for logits and rates
NOISE_RATIOS = tuple(10.0 ** (k / 2) for k in range(-6, 9))  # the same for Gaussian noise
FEW_RATIOS = (0.1, 1.0, 10.0, 100.0, 1000.0)  # if every precision takes solves over all data
SCALES = tuple(10.0**k for k in range(3, -2, -1))  # the same for methods without a precision: 1 / scale of V
NOISES = range(-4, 12)  # quarters of decades of the noise variance, from that of the training residuals
DECADE = 4  # quarters on both sides of the variance of the validation residuals
FEW_POINTS = 100  # training data that are looked at, if every input takes solves over all data
TOGETHER = 512  # rows that are scored at once: every cell has a fixed cost for a batch
MOST = 3  # precisions that a mixture keeps
SCORED = 4  # pairs of functions by which a precision is scored, if predictions are made from functions
TEMPERATURES = (0.35, 0.5, 0.7, 0.85, 1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.5, 8.0)
TAILS = ((8.0, 0.6), (8.0, 0.75), (8.0, 0.9), (4.0, 0.6), (4.0, 0.75), (4.0, 0.9))  # degrees and scale


@dataclass(frozen=True, eq=False)
class CellGrid:
    """Cells with their prior probabilities.

    ``rescaled`` marks the plain network with another temperature or noise: the baseline to compare with.
    """

    bases: tuple[Any, ...]
    beliefs: tuple[Belief, ...]
    cells: tuple[Cell, ...]
    log_prior: Tensor  # (cells,)
    rescaled: Tensor  # (cells,), bool
    unchanged: int  # the number of the cell that is the plain network with its likelihood as it is

    @classmethod
    def compared(cls, bases: Sequence[Any], beliefs: Sequence[Belief], cells: Sequence[Cell]) -> CellGrid:
        """Return cells that are only scored, without prior probabilities; the last one is the plain network."""
        none = torch.zeros(len(cells), dtype=torch.bool)
        return cls(tuple(bases), tuple(beliefs), tuple(cells), torch.zeros(len(cells)), none, len(cells) - 1)

    @property
    def scales(self) -> Tensor:
        """The scale of every cell's covariance, (cells,)."""
        return torch.tensor([cell.scale for cell in self.cells], dtype=torch.float64)


def grid_of(
    posterior: Any, ratios: Sequence[float] | None, temperatures: Sequence[float], noise: Tensor | None = None
) -> CellGrid:
    """Return the cells for a fitted posterior.

    ``ratios`` multiply the precisions of the prior, or divide the covariance where there is no precision to change. An
    empty sequence keeps the posterior as it is; the plain network then has no prior probability, but is scored.
    ``noise`` is the variance of the validation residuals of each output, (C,): noise variances are tried around it
    and around that of the training residuals.
    """
    likelihood = posterior.problem.likelihood
    learns_noise = likelihood.has_tails and likelihood.learns_dispersion
    beliefs, spreads = _spreads(posterior, ratios, learns_noise)
    plain_mass = 0.0 if ratios is not None and not len(ratios) else PLAIN_NOISE if learns_noise else PLAIN
    bases, beliefs, plain = with_plain(posterior, beliefs)
    cells: list[Cell] = []
    mass: list[float] = []
    variants = _variants(likelihood, temperatures, learns_noise, noise)
    for number, scale in [*spreads, (plain, 0.0)]:
        for variant, share in variants:
            wider = float(variant.dispersion / likelihood.dispersion) if learns_noise else 1.0
            cells.append(Cell(number, variant, scale * wider))
            mass.append(share * (plain_mass if scale == 0 else (1 - plain_mass) / len(spreads)))
    rescaled = torch.tensor([cell.scale == 0 for cell in cells])
    unchanged = next(i for i, cell in enumerate(cells) if cell.scale == 0 and _same_link(cell.likelihood, likelihood))
    log_prior = torch.tensor(mass, dtype=torch.float64).log()
    return CellGrid(bases, tuple(beliefs), tuple(cells), log_prior, rescaled, unchanged)


def with_plain(posterior: Any, beliefs: Sequence[Belief]) -> tuple[tuple[Any, ...], list[Belief], int]:
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


def _spreads(
    posterior: Any, ratios: Sequence[float] | None, noise: bool
) -> tuple[list[Belief], list[tuple[int, float]]]:
    """Return the beliefs, and (belief, scale) of every spread of f."""
    if ratios is not None and not len(ratios):
        return [Belief(0)], [(0, 1.0)]
    if not posterior.has_spread:
        return [Belief(0)], []
    if ratios is None and posterior.linearised:
        ratios = (
            FEW_RATIOS if posterior.is_sampled or posterior.solves_for_inputs else NOISE_RATIOS if noise else RATIOS
        )
    return varied(posterior, SCALES if ratios is None else ratios)


def varied(posterior: Any, ratios: Sequence[float]) -> tuple[list[Belief], list[tuple[int, float]]]:
    """Return beliefs and (belief, scale) of every ratio of the precision: one over the scale of the covariance."""
    if not posterior.linearised:
        return [Belief(0)], [(0, 1 / ratio) for ratio in ratios]
    values = posterior.problem.prior.values.detach()
    return [Belief(0, values * ratio) for ratio in ratios], [(i, 1.0) for i in range(len(ratios))]


def _variants(
    likelihood: Any, temperatures: Sequence[float], learns_noise: bool, noise: Tensor | None
) -> list[tuple[Likelihood, float]]:
    """Return the likelihoods of the cells with their prior probabilities."""
    if likelihood.link_temperature is not None:
        logs = torch.tensor(temperatures, dtype=torch.float64).log()
        mass = (-0.5 * (logs / 0.5).square()).softmax(0).tolist()
        start = likelihood.link_temperature
        return [(likelihood.with_link_temperature(start * t), m) for t, m in zip(temperatures, mass, strict=True)]
    if not learns_noise:
        return [(likelihood, 1.0)]
    tried = _noises(likelihood, noise)
    return [(each, 1 / len(tried)) for each in tried]


def _noises(likelihood: Any, held_out: Tensor | None) -> list[Likelihood]:
    """Return likelihoods with noises around that of the training residuals, and around the held-out ones (C,).

    Both lie on one grid, unless each output has a noise to itself: held-out residuals then have ratios of their own.
    A network that fits its training targets far better than others has a gap between the two parts.
    """
    phi, around = likelihood.dispersion, set(NOISES)
    times = lambda quarters: [likelihood.with_dispersion(phi * 10.0 ** (k / 4)) for k in sorted(quarters)]
    if held_out is None:
        return times(around)
    held_out = held_out.to(phi)
    near = range(-DECADE, DECADE + 1)
    if likelihood.learns_ratios and len(held_out) > 1:
        middle = held_out.log().mean().exp()
        other = likelihood.with_noise(held_out / middle)
        return [*times(around), *(other.with_dispersion(middle * 10.0 ** (k / 4)) for k in near)]
    centre = 4 * math.log10(float((held_out / likelihood.noise_variance).mean()))
    return times(around | set(range(math.floor(centre) - DECADE, math.ceil(centre) + DECADE + 1)))


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

    If the offset is certain, the cells without have no weight, and stay only where they are compared with.
    """
    moved = [replace(cell, likelihood=cell.likelihood.with_more_offset(offset.values)) for cell in grid.cells]
    prior, first = grid.log_prior, torch.ones_like(grid.rescaled)
    if offset.probability > CERTAIN:
        prior, first = torch.full_like(prior, -math.inf), grid.rescaled
    stay = first.nonzero()[:, 0].tolist()
    return replace(
        grid,
        cells=(*(grid.cells[i] for i in stay), *moved),
        log_prior=torch.cat([prior[first], grid.log_prior + offset.log_prior]),
        rescaled=torch.cat([grid.rescaled[first], torch.zeros_like(grid.rescaled)]),
        unchanged=stay.index(grid.unchanged),
    )


def thinned(grid: CellGrid, scores: Tensor, counts: Tensor | None = None) -> CellGrid:
    """Return the grid with at most ``MOST`` precisions of weight: every second one, or fewer, around the best.

    Few validation data leave many neighbouring precisions plausible. Their predictions differ little, and each costs
    a product with the Jacobian at every prediction.
    """
    weights = mixture_weights(grid.log_prior, scores, counts)
    number = torch.tensor([cell.belief for cell in grid.cells])
    spread = grid.scales > 0
    shares = torch.zeros(len(grid.beliefs), dtype=torch.float64).index_add(0, number, weights * spread)
    step = -(-int((shares >= RARE).sum()) // MOST)
    if step <= 1:
        return grid
    kept = spread & ((number - int(shares.argmax())) % step == 0)
    # The precisions that are kept take the weight of all, so that the plain network gains none.
    gain = torch.where(kept, (weights[spread].sum() / weights[kept].sum()).log(), 0.0)
    return replace(grid, log_prior=(grid.log_prior + gain).masked_fill(spread & ~kept, -math.inf))


def log_scores(grid: CellGrid, data: Data, limit: int | None = None) -> Tensor:
    """Return log p(y | x, cell) of every datum and cell, (n, cells) in float64; see ``counted_scores``."""
    return counted_scores(grid, data, limit)[0]


def counted_scores(grid: CellGrid, data: Data, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Return log p(y | x, cell) of every datum and cell, (n, cells), and how often each counts, (n,), in float64.

    A datum counts once, or as often as its weight says. One pass over the data for all cells; ``limit`` ends it after
    so many data, of which each process takes its share. Data whose target is ignored are left out.
    """
    if limit is not None and grid.bases[0].solves_for_inputs:
        limit = min(limit, FEW_POINTS)
    limit = None if limit is None else -(-limit // data.processes.size)
    rows: list[Tensor] = []
    count = 0
    members = [member(grid.bases, belief) for belief in grid.beliefs]
    for each in () if data.processes.alone else members:
        each.prepare()  # not at the first batch: a process may have none
    network, likelihood = grid.bases[0].problem.network, grid.bases[0].problem.likelihood
    wide = [members[i] for i in {cell.belief for cell in grid.cells if cell.scale > 0}]
    kept = Kept()
    with torch.no_grad():
        for batch in merged(_limited(data, limit, network, likelihood), TOGETHER):
            y = named_targets(network, likelihood, batch, data.name)
            numbers = drawn_numbers(members, wide, likelihood, batch.inputs)
            parts = _beliefs(members, batch.inputs, numbers, kept)
            each = torch.cat([_cell_scores(grid, beliefs, y[part]) for part, beliefs in parts]).double()
            counts = each.new_ones(len(y)) if batch.weights is None else batch.weights
            each = torch.cat([each, counts.repeat_interleave(len(each) // len(y)).unsqueeze(1)], 1)
            rows.append(each[~likelihood.ignored(y).reshape(len(each), -1).all(1)])
            count += len(rows[-1])
            del each
    if not sum(data.processes.each(count)):
        raise DataError(f"{data.name}: every target is ignored; expected at least one that is not.")
    scores = data.processes.gather(torch.cat(rows)[:limit] if rows else None)
    rows.clear()
    assert scores is not None
    if not all(map(math.isfinite, torch.aminmax(scores))):  # NaN if a score is; without a copy of the scores
        raise DataError(
            f"{data.name}: {int((~torch.isfinite(scores)).sum())} of {scores.numel()} log-likelihoods are not finite; "
            "expected finite ones. Check the targets, and the network for overflow."
        )
    scores = scores.cpu()
    return scores[:, :-1], scores[:, -1]


def drawn_numbers(members: Sequence[Any], wide: Sequence[Any], likelihood: Likelihood, x: Inputs) -> list[range]:
    """Return the numbers of the pairs of functions that score each member at x; none where variances do.

    ``wide`` are the members of which draws are needed. All use the same numbers: what differs between them is not the
    luck of their draws.
    """
    if not prefers_draws(wide, members[0].problem.network, likelihood, x):
        return []
    return [range(min(SCORED, each.n_stored() or SCORED)) if each in wide else range(0) for each in members]


def _beliefs(
    members: Sequence[Any], x: Inputs, numbers: Sequence[range], kept: Kept
) -> Iterator[tuple[slice, Iterable[FunctionGaussian | FunctionSamples]]]:
    """Yield rows of a batch, and the belief of every member about them: from functions if there are numbers."""
    network = members[0].problem.network
    if not numbers:
        shape, count = network.for_inputs(x).output_shape, network.count(x)
        covariance = torch.Size(shape).numel() * shape[-1] * torch.finfo(network.dtype).bits // 8
        for rows in runs(count, 4 * (len(members) + 1) * covariance, network.device):
            yield rows, beliefs_at(members, x if rows == slice(0, count) else network.take(x, rows))
        return
    for rows, part in pieces(network, x, max(map(len, numbers))):
        yield rows, drawn_beliefs(members, part, numbers, kept)


def _cell_scores(grid: CellGrid, beliefs: Iterable[FunctionGaussian | FunctionSamples], y: Tensor) -> Tensor:
    """Return log p(y | x, cell) of every datum and cell, (n, cells), with one belief in memory at a time."""
    likelihood = grid.bases[0].problem.likelihood
    columns: dict[int, Tensor] = {}
    for number, belief in enumerate(beliefs):
        for i, cell in enumerate(grid.cells):
            if cell.belief == number:
                columns[i] = likelihood.known_log_prob(cell.predict(belief), y).flatten()
    return torch.stack([columns[i] for i in range(len(grid.cells))], 1)


def _limited(data: Data, limit: int | None, network: Network, likelihood: Likelihood) -> Iterator[Batch]:
    """Yield batches until ``limit`` data have passed; a batch of tokens without the samples beyond, which are many."""
    count = 0
    for batch in data.batches("validation data" if limit is None else "training data", weighted=True):
        if limit is not None and len(network.output_shape) == 2:
            y = named_targets(network, likelihood, batch, data.name)
            known = (~likelihood.ignored(y)).reshape(*y.shape[:2], -1).any(-1).sum(1).cumsum(0)
            needed = int((known < limit - count).sum()) + 1
            count += int(known[-1])
            rows = slice(0, needed)
            if needed < len(y):
                inputs = network.take(batch.inputs, rows)
                batch = Batch(inputs, batch.targets[rows], weights=batch.weights_of(rows))
            yield batch
        else:
            count += batch.n_samples
            yield batch
        if limit is not None and count >= limit:
            return


def mixture_weights(log_prior: Tensor, scores: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the posterior probabilities of the cells after these data, (cells,), each counted so often, (n,)."""
    return (log_prior + (scores.sum(0) if counts is None else counts @ scores)).softmax(0)


def mean_score(scores: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of scores (n, ...) over the data, each counted so often, (n,)."""
    return torch.tensordot(counts, scores, 1) / counts.sum()
