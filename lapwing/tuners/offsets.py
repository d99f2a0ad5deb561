r"""Facts that outputs with known targets show: noise, offsets of the logits, and reasons to warn the user.

An offset of the logits corrects a bias of class probabilities, which no temperature can change. It is learned from
held-out data; on training data a clear bias is a reason to warn.

A network that was trained with class weights, on resampled data, or for data with other frequencies of the classes has
logits that are off by about the same numbers for all inputs. Given outputs f, probabilities are those of the logits

$$ \eta = f / T + o + b, \qquad b \sim N(0, \tau^2 I), \qquad \log T \sim N(0, \tfrac14) $$

with o the likelihood's own offset. A candidate τ has the evidence of the held-out targets by Laplace's method around
the most probable (b, log T); "no offset" is a candidate too. The offset that is used is the mean of the most probable
b of all τ, weighted by evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.inputs import check_finite
from lapwing.data.known_rows import KnownRows
from lapwing.data.processes import Processes
from lapwing.errors import warn_caller
from lapwing.likelihoods.base import Likelihood, expand_weights
from lapwing.networks.network import Network
from lapwing.posteriors.base import Posterior, Trace
from lapwing.posteriors.mixture import Belief, Cell
from lapwing.problem import Problem, check_named_targets, first_samples
from lapwing.runtime.memory import batch_size_for
from lapwing.tuners.base import Tuner, TunerWithSettings
from lapwing.tuners.grid import CellGrid, counted_scores, mean_score

MAX_OUTPUTS = 2**23  # outputs that are looked at, at most
LEAST_NOISE = 1e-12  # of a variance, relative to the largest


@dataclass(frozen=True, eq=False)
class HeldOutputs:
    """Outputs of the network on held-out data with their targets, on the CPU in float64, one row for each datum."""

    f: Tensor  # (n, C)
    y: Tensor  # (n, C): numbers; probabilities of classes, or labels; zero where the target is unknown
    counts: Tensor  # (n, C): how often the target counts, zero if it is unknown
    exclusive: bool  # whether the outputs are classes, of which one is right

    @classmethod
    def of(cls, network: Network, likelihood: Likelihood, data: Data, limit: int | None = None) -> HeldOutputs:
        """Return the outputs at the first ``limit`` data, or as many as fit in memory, by one forward pass."""
        first = FirstOutputs(likelihood, network.output_shape[-1], data, limit)
        first.read(network, data)
        return first.value()

    def without(self, rows: Tensor) -> HeldOutputs:
        """Return the rows that are not in this mask."""
        return HeldOutputs(self.f[~rows], self.y[~rows], self.counts[~rows], self.exclusive)

    @property
    def variance(self) -> Tensor:
        """The mean squared residual of each output, (C,)."""
        squares = (self.counts * (self.f - self.y).square()).sum(0) / self.counts.sum(0).clamp_min(LEAST_NOISE)
        return squares.clamp_min(LEAST_NOISE * squares.max())


class FirstOutputs:
    """The first outputs of a pass over data, with their targets, until there are enough; at most ``limit``."""

    def __init__(self, likelihood: Likelihood, outputs: int, data: Data, limit: int | None = None) -> None:
        most = max(1, MAX_OUTPUTS // outputs)
        most = most if limit is None else min(limit, most)
        self._most = self.missing = -(-most // data.processes.size)  # rows of this process
        self._likelihood, self._processes, self._rows = likelihood, data.processes, list[Tensor]()

    @property
    def begun(self) -> bool:
        """Whether some were added."""
        return bool(self._rows)

    def read(self, network: Network, data: Data) -> None:
        """Add the outputs of the network by a forward pass over as much data as is missing."""
        for batch in data.batches(f"outputs for {data.name}", weighted=True):
            batch = first_samples(network, batch, self.missing)
            y = check_named_targets(network, self._likelihood, batch, data.name)
            self.add(network(batch.inputs), y, batch.weights)
            if not self.missing:
                break

    def add(self, f: Tensor, y: Tensor, weights: Tensor | None) -> None:
        """Add outputs and checked targets of some samples, with their weights."""
        if not self.missing:
            return
        few, likelihood = slice(self.missing), self._likelihood
        f, y = f[few].detach().double(), y[few]
        check_finite(f, "outputs of the network")
        ignored = likelihood.ignored(y)
        counts = (~ignored).double()
        counts = counts if weights is None else counts * expand_weights(weights[few], counts)
        if likelihood.ignores_common_shift and y.is_floating_point():
            counts = counts.amax(-1, keepdim=True)
        elif likelihood.ignores_common_shift:
            classes, counts = y.masked_fill(ignored, 0).unsqueeze(-1), counts.unsqueeze(-1)
            y = torch.zeros_like(f).scatter(-1, classes, 1.0)
        else:
            y = y.masked_fill(ignored, 0)
        parts = [part.flatten(0, -2) for part in (f, y.double(), counts.expand(f.shape))]
        known = ~ignored.reshape(len(parts[0]), -1).all(1)
        self._rows.append(torch.stack(parts, 1)[known].cpu())
        self.missing = max(0, self.missing - len(self._rows[-1]))

    def value(self) -> HeldOutputs:
        """Return the outputs of all processes."""
        everywhere = self._processes.gather_rows(torch.cat(self._rows)[: self._most] if self._rows else None)
        assert everywhere is not None
        f, y, counts = everywhere.unbind(1)
        return HeldOutputs(f, y, counts, self._likelihood.ignores_common_shift)


def refitted_noise_scores(held: HeldOutputs, likelihood: Likelihood, folds: int) -> Tensor:
    """Return the log-density of each datum under normal noise of the variance of the other folds, (n,).

    Where the ratios of the outputs' noises are fixed, their common scale is refitted.
    """
    scores = torch.empty(len(held.f), dtype=torch.float64)
    number = torch.arange(len(scores)) % folds
    for k in range(folds):
        inside, others = number == k, held.without(number == k)
        noise = best_noise(others, likelihood) if len(others.f) else _present_noise(likelihood, held)
        gaps = (held.f - held.y)[inside].square() / noise
        scores[inside] = -0.5 * (gaps + noise.log() + math.log(2 * math.pi)).sum(1)
    return scores


def best_noise(held: HeldOutputs, likelihood: Likelihood) -> Tensor:
    """Return the noise variance of each output, (C,), that makes the held-out targets most likely."""
    variance, noise = held.variance, _present_noise(likelihood, held)
    return variance if likelihood.learns_ratios else noise * (variance / noise).mean()


def _present_noise(likelihood: Likelihood, held: HeldOutputs) -> Tensor:
    """Return the noise variance of each output as it is, (C,)."""
    noise = likelihood.noise_variance
    assert noise is not None
    return noise.detach().to(held.f).expand(held.f.shape[1])


WIDTHS = (0.3, 1.0, 3.0)  # candidates for the standard deviation of offsets
NO_OFFSET = 0.7  # prior probability of no offset; an offset is used if the data make it no less probable than before
CERTAIN_OFFSET = 0.99  # probability of an offset from which nothing without one is kept
CLASS_ROWS = 10  # data of a class that an offset of its own needs
HEAT_WIDTH = 0.5  # prior standard deviation of log T
MAX_DENSE_OFFSETS = 256  # number of offsets up to which Newton's method uses the full Hessian; above it the diagonal
ERRORS, GAP, ODDS = 4.0, 0.02, 1.25  # the least bias: standard errors, difference, and factor of the odds
UNTRAINED_HEAT = 0.35  # best temperature below which a network is hardly trained, and is not tested for bias
MAX_LOSS_SHARE = 0.9  # share of the loss of constant frequencies; a network with a higher loss is not tested for bias
MIN_PROBABILITY = 1e-9  # the smallest probability, and the smallest standard error of one
STEPS, DECREASE = 50, 1e-6  # Newton's method: its most steps, and the decrease in nats at which it ends


@dataclass(frozen=True, eq=False)
class Offset:
    """An offset of the logits, and how probable it is that there is one."""

    values: Tensor  # (C,)
    log_odds: float  # log p(offset | data) - log p(none | data), for the plain network
    gain: float  # by how much the best log-likelihood with these values is above the best without

    @property
    def log_prior(self) -> float:
        """The prior log-odds of a cell with the offset against the same cell without it."""
        return self.log_odds - self.gain

    @property
    def probability(self) -> float:
        """The probability that the logits have an offset."""
        return 1 / (1 + math.exp(-min(500.0, max(-500.0, self.log_odds))))


def learn_offset(held: HeldOutputs, likelihood: Likelihood, widths: Sequence[float]) -> Offset | None:
    """Return the offset of the logits after these data; None if there is probably none, or too few data of a class."""
    temperature, start = likelihood.link_temperature, likelihood.logit_offset
    assert temperature is not None
    logits = _Logits(held, held.f / temperature, start)
    directions = logits.directions()
    if not directions.shape[1] or not widths:
        return None
    plain = logits.most_probable(directions[:, :0], 1.0)
    fits = [logits.most_probable(directions, width) for width in widths]
    evidences = torch.tensor([fit.log_evidence for fit in fits], dtype=torch.float64)
    values = reduce(torch.add, (w * fit.offset for w, fit in zip(evidences.softmax(0).tolist(), fits, strict=True)))
    prior = math.log((1 - NO_OFFSET) / NO_OFFSET / len(widths))
    best = max(logits.log_likelihood(values, fit.heat) for fit in fits)
    log_odds = prior + float(evidences.logsumexp(0)) - plain.log_evidence
    offset = Offset(values, log_odds, best - logits.log_likelihood(torch.zeros_like(values), plain.heat))
    return offset if offset.probability >= 1 - NO_OFFSET else None


@dataclass(frozen=True)
class Bias:
    """A class, or a label, whose mean probability differs from how often it occurs."""

    output: int
    mean: float
    frequency: float


def biases(held: HeldOutputs, likelihood: Likelihood) -> tuple[Bias, ...]:
    """Return the classes of which the network predicts clearly too many or too few, the most biased first.

    Training without weights on data as they are leaves hardly any bias on the training data. A network that was
    stopped early has some, which the best temperature removes; so a bias counts only if it is clear at both
    temperatures. A network that is hardly trained, or knows little more than frequencies even after a correction, is
    not tested.
    """
    temperature = likelihood.link_temperature
    assert temperature is not None
    logits = _Logits(held, held.f / temperature, likelihood.logit_offset)
    directions, none = logits.directions(), torch.zeros(held.f.shape[1], dtype=torch.float64)
    count = held.counts.sum(0)
    if not directions.shape[1] or not bool((count > 0).all()):
        return ()
    frequency = (held.counts * held.y).sum(0) / count

    def odds_at(heat: float) -> tuple[Tensor, Tensor]:
        """Return by how much the log-odds of the mean probability are off, and which of them clearly."""
        p = logits.probabilities(none, heat)
        mean, error = (held.counts * p).sum(0) / count, (held.counts * p * (1 - p)).sum(0).sqrt() / count
        odds = torch.logit(mean, MIN_PROBABILITY) - torch.logit(frequency, MIN_PROBABILITY)
        gap = (mean - frequency).abs()
        return odds, (gap > error.clamp_min(MIN_PROBABILITY) * ERRORS) & (gap > GAP) & (odds.abs() > math.log(ODDS))

    gaps, clear = odds_at(0.0)
    if not bool(clear.any()):
        return ()
    heat = logits.most_probable(directions[:, :0], 1.0).heat
    if heat < math.log(UNTRAINED_HEAT):
        return ()
    odds, clear_too = odds_at(heat)
    clear &= clear_too & ((gaps == 0) | (gaps.sign() == odds.sign()))
    if not bool(clear.any()):
        return ()
    best = logits.most_probable(directions, max(WIDTHS))
    known = logits.log_likelihood(best.offset, best.heat)
    guess = frequency.clamp_min(MIN_PROBABILITY).log() if held.exclusive else torch.logit(frequency, MIN_PROBABILITY)
    if known < MAX_LOSS_SHARE * _Logits(held, torch.zeros_like(held.f), None).log_likelihood(guess, 0.0):
        return ()
    mean = (held.counts * logits.probabilities(none, 0.0)).sum(0) / count
    order = [i for i in gaps.abs().argsort(descending=True).tolist() if bool(clear[i])]
    return tuple(Bias(i, float(mean[i]), float(frequency[i])) for i in order)


@dataclass(frozen=True, eq=False)
class _Fit:
    offset: Tensor  # (C,)
    heat: float  # log T
    log_evidence: float


@dataclass(frozen=True, eq=False)
class _Logits:
    """The likelihood of held-out targets under the logits f / T + offset."""

    held: HeldOutputs
    scaled: Tensor  # f over the likelihood's own temperature, (n, C)
    start: Tensor | None  # the likelihood's own offset

    def at(self, offset: Tensor, heat: float) -> Tensor:
        """Return the logits, (n, C)."""
        moved = self.scaled * math.exp(-heat) + offset
        return moved if self.start is None else moved + self.start.to(moved)

    def directions(self) -> Tensor:
        """Return an orthonormal basis (C, K) of the offsets that there are data for: of sums of zero for classes."""
        count = self.held.f.shape[1]
        seen = (self.held.counts * self.held.y).sum(0)
        logits = self.at(torch.zeros(count, dtype=torch.float64), 0.0)
        if self.held.exclusive:
            expected = (self.held.counts * logits.softmax(-1)).sum(0)
            enough = (torch.maximum(seen, expected) if count == 2 else seen) >= CLASS_ROWS
        else:
            rows, expected = self.held.counts.sum(0), (self.held.counts * logits.sigmoid()).sum(0)
            ones, zeros = torch.maximum(seen, expected), torch.maximum(rows - seen, rows - expected)
            enough = torch.minimum(ones, zeros) >= CLASS_ROWS
        at = enough.nonzero()[:, 0]
        own = torch.zeros(count, len(at), dtype=torch.float64)
        own[at, torch.arange(len(at))] = 1.0
        if not self.held.exclusive:
            return own
        free = max(0, own.shape[1] - 1)
        sums = torch.eye(free + 1, dtype=torch.float64) - 1 / (free + 1)
        return own @ torch.linalg.qr(sums[:, :free])[0] if free else own[:, :0]

    def probabilities(self, offset: Tensor, heat: float) -> Tensor:
        """Return the probabilities of the classes, or of the labels, (n, C)."""
        logits = self.at(offset, heat)
        return logits.softmax(-1) if self.held.exclusive else logits.sigmoid()

    def log_likelihood(self, offset: Tensor, heat: float) -> float:
        logits, y = self.at(offset, heat), self.held.y
        each = y * logits.log_softmax(-1) if self.held.exclusive else y * logits - torch.nn.functional.softplus(logits)
        return float((self.held.counts * each).sum())

    def most_probable(self, directions: Tensor, width: float) -> _Fit:
        """Return the most probable offset along these directions (C, K) and log T, with their evidence."""
        z, heat = torch.zeros(directions.shape[1], dtype=torch.float64), 0.0
        energy = lambda z, heat: (
            0.5 * float((z / width).square().sum())
            + 0.5 * (heat / HEAT_WIDTH) ** 2
            - self.log_likelihood(directions @ z, heat)
        )
        now = energy(z, heat)
        for _ in range(STEPS):
            slope, solve, logdet = self._newton(directions, z, heat, width)
            step = solve(slope)
            decrease, length = float(slope @ step), 1.0
            if decrease < DECREASE:
                break
            while length > DECREASE:
                there = z - length * step[:-1], heat - length * float(step[-1])
                then = energy(*there)
                if then <= now - 1e-4 * length * decrease:
                    break
                length /= 2
            else:
                break
            (z, heat), now = there, then
        free = len(z)
        return _Fit(directions @ z, heat, -now - free * math.log(width) - math.log(HEAT_WIDTH) - 0.5 * logdet)

    def _newton(
        self, directions: Tensor, z: Tensor, heat: float, width: float
    ) -> tuple[Tensor, Callable[[Tensor], Tensor], float]:
        """Return the slope of the energy in (z, log T), the inverse of its curvature as a function, and its log det.

        The curvature is that of the likelihood in the logits, which is positive; the second derivative of the logits in
        log T is left out.
        """
        known = self.held.counts
        to_heat = -math.exp(-heat) * self.scaled  # the slope of the logits in log T
        p = self.probabilities(directions @ z, heat)
        gap = known * (p - self.held.y)
        slope = torch.cat(
            [directions.mT @ gap.sum(0) + z / width**2, (gap * to_heat).sum()[None] + heat / HEAT_WIDTH**2]
        )
        if self.held.exclusive:
            centred = known * p * (to_heat - (p * to_heat).sum(-1, keepdim=True))
        else:
            centred = known * p * (1 - p) * to_heat
        across = directions.mT @ centred.sum(0)
        corner = (centred * to_heat).sum() + 1 / HEAT_WIDTH**2
        own = (known * p * (1 - p)).sum(0)
        if len(z) > MAX_DENSE_OFFSETS:
            return slope, *_solve_arrow(directions.square().mT @ own + 1 / width**2, across, corner)
        weights = (known * p).sum(0) if self.held.exclusive else own
        block = directions.mT @ (weights.unsqueeze(1) * directions) + torch.eye(len(z), dtype=torch.float64) / width**2
        if self.held.exclusive:
            along = p @ directions
            block = block - (known[:, :1] * along).mT @ along
        upper, lower = torch.cat([block, across[:, None]], 1), torch.cat([across, corner[None]])
        factor = torch.linalg.cholesky(torch.cat([upper, lower[None]]))
        solve = lambda b: torch.cholesky_solve(b[:, None], factor)[:, 0]
        return slope, solve, 2 * float(factor.diagonal().log().sum())


def _solve_arrow(diagonal: Tensor, across: Tensor, corner: Tensor) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return the inverse, as a function, and the log det of a diagonal matrix with one more row and column."""
    rest = (corner - (across.square() / diagonal).sum()).clamp_min(1 / HEAT_WIDTH**2)

    def solve(b: Tensor) -> Tensor:
        last = (b[-1] - (across * b[:-1] / diagonal).sum()) / rest
        return torch.cat([(b[:-1] - across * last) / diagonal, last[None]])

    return solve, float(diagonal.log().sum() + rest.log())


BIAS_POINTS = 700  # training data that are looked at
BYTES_OF_OUTPUT = 128  # bytes of an output of a datum while biases are looked for
CLEARLY_WORSE = 0.05  # nats for each datum, beyond what the effective number of parameters explains


def warn_if_worse_than_plain(posterior: Posterior, data: Data) -> Posterior:
    """Return the posterior with the training NLL of the plain network and of itself in its trace; warn if it is worse.

    A posterior that knows γ of its weights from n data is expected to lose about ½ log(1 + γ/n) nats of training
    likelihood for each datum against the network that was fitted to them; more than that is harm. Cost: a pass over
    at most 700 training data.
    """
    likelihood = posterior.problem.likelihood
    cells = (Cell(0, likelihood), Cell(0, likelihood, 0.0))
    grid = CellGrid.to_compare((posterior,), (Belief(0),), cells)
    own, plain = (-mean_score(*counted_scores(grid, data, BIAS_POINTS))).tolist()
    trace = posterior.trace or Trace("no tuner", "training NLL")
    if own - plain > CLEARLY_WORSE + _expected_loss(posterior):
        message = (
            f"{trace.tuner} makes the likelihood of the training targets worse than that of the plain network: NLL "
            f"{own:.3g} in the place of {plain:.3g} for each datum. Such error bars are too wide. Give validation "
            "data, fit(..., validation=data), or leave out the tuner."
        )
        warn_caller(message)
        trace = replace(trace, findings=(*trace.findings, message))
    scores = {"plain network": plain, "this posterior": own}
    return posterior.with_trace(replace(trace, scores=scores, scored_on="training"))


def first_outputs(problem: Problem, data: Data) -> FirstOutputs | None:
    """Have the next pass over the training data keep what ``warn_if_biased`` looks at, the outputs at 700 of them.

    None for likelihoods whose outputs have no such bias.
    """
    likelihood, outputs = problem.likelihood, problem.network.output_shape[-1]
    if not likelihood.takes_offset:
        return None
    points = batch_size_for(BIAS_POINTS, BYTES_OF_OUTPUT * outputs, torch.device("cpu"), 0.5)
    first = FirstOutputs(likelihood, outputs, data, points)
    data.readings.take_outputs = first.add
    return first


def warn_if_biased(posterior: Posterior, data: Data, first: FirstOutputs | None) -> Posterior:
    """Return the posterior with a remark, and warn, if the network predicts clearly too many or too few of a class.

    Cost: next to nothing; for a method without a pass of its own, a forward pass over ``first`` training data.
    """
    if first is None:
        return posterior
    likelihood = posterior.problem.likelihood
    if not first.begun:
        first.read(posterior.problem.network, data)
    found = biases(first.value(), likelihood)
    if not found:
        return posterior
    what, weights = ("class", "class_weights") if likelihood.ignores_common_shift else ("label", "pos_weight")
    message = (
        f"the network gives {what} {found[0].output} a mean probability of {found[0].mean:.3g} on training data where "
        f"its share is {found[0].frequency:.3g}: it was probably trained with weights of the classes, or on resampled "
        f"data. Give validation data, fit(..., validation=data), or the weights, "
        f"{type(likelihood).__name__}({weights}=...); either corrects the probabilities."
    )
    warn_caller(message)
    return with_findings(posterior, (message,))


def _expected_loss(posterior: Posterior) -> float:
    """Return the loss of training likelihood for each datum that the effective number of parameters explains."""
    count = max(1, posterior.statistics.data)
    gamma = float(posterior.gammas().sum()) if posterior.provides(Posterior.gammas) else count
    return 0.5 * math.log1p(min(gamma, count) / count)


REMEDY = "The network knows their targets, and error bars come out too narrow. Hold data out of training."


@dataclass(frozen=True)
class Reused:
    """The rows that a posterior knows, with those of its held-out data, and findings about rows that are both."""

    rows: KnownRows
    findings: tuple[str, ...] = ()


def with_held_out(rows: KnownRows, tuner: Tuner | None, network: Network, processes: Processes) -> Reused:
    """Return the known rows with the held-out data of a tuner, if it has some; warn if these are training data."""
    if not isinstance(tuner, TunerWithSettings) or not tuner.holds_out:
        return Reused(rows)
    data = network.read_data(tuner.data, "held-out data", processes=processes)
    return note_reuse(rows, data, "held-out data of the tuner", refuses=False)


def note_reuse(rows: KnownRows, data: Data, name: str, refuses: bool) -> Reused:
    """Return the known rows with these data; warn if some are training data, or if it ``refuses`` raise if all are."""
    sketch = data.sketch()
    remarks = rows.warn_reused(sketch, name, REMEDY, refuses)
    return Reused(rows.with_validation(sketch), remarks)


def with_findings(posterior: Posterior, findings: tuple[str, ...]) -> Posterior:
    """Return the posterior with these findings after those of its trace."""
    if not findings:
        return posterior
    trace = Trace("") if posterior.trace is None else posterior.trace
    return posterior.with_trace(replace(trace, findings=(*trace.findings, *findings)))
