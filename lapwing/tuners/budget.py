"""Error bars without validation data: a mixture that can cost the training likelihood no more than a fixed budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.processes import ALONE, Processes
from lapwing.core.settings import DATA, NONE, POSITIVE, POSITIVE_VALUES, Rule, require, require_integer
from lapwing.core.trace import Trace
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.weighted import spread
from lapwing.posteriors.mixture import Belief, Cell, MixturePosterior
from lapwing.predictives.densities import log_density
from lapwing.problem import checked_targets
from lapwing.tuners.cells import FEW_POINTS, PLAIN_NOISE, CellGrid, counted_scores, mean_score, varied, with_plain
from lapwing.tuners.protocol import required_data

RATIOS = (1.0, 10.0, 100.0)
MOST = 0.95  # weight of all cells with error bars together
FLOOR = 1e-4  # loss below which a cell counts as harmless
DEGREES = (math.inf, 8.0, 4.0)
GAIN = 2.0  # nats by which Student tails must be better
ADVICE = "validation data would calibrate this posterior: fit(..., validation=data)."
WIDTH = (  # of the networks under "what regression intervals cover" in docs/calibration.md
    "no held-out data checked the width of these error bars: over many networks 95 % intervals covered 95 % of new "
    "rows on average, but for single ones mostly 89 to 100 %, and some were several times as wide as they need be."
)
APART = 0.3  # a scale of a posterior from which its disagreement is remarked on
TRACE = Trace("Budget", "training NLL", findings=(ADVICE,), scored_on="training")


@dataclass(frozen=True, eq=False)
class Budget:
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

    data: Iterable[Any] | Data | None = None
    budget: float = 0.0035
    ratios: Sequence[float] = RATIOS
    points: int = 700
    others: Sequence[Any] = ()
    scales: Sequence[float] = ()

    follows_evidence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        parts = Rule(
            "a list of posteriors", lambda v: isinstance(v, tuple | list) and all(hasattr(p, "problem") for p in v)
        )
        require(self, data=DATA | NONE, others=parts)
        POSITIVE.check("budget", self.budget)
        POSITIVE_VALUES.check("ratios", self.ratios)
        require_integer("points", self.points)
        if self.scales:
            POSITIVE_VALUES.check("scales", self.scales)
        if len(self.scales) not in (0, len(self.others)):
            raise UnsupportedError(
                f"scales has {len(self.scales)} entries for {len(self.others)} posteriors; expected one for each."
            )

    def with_data(self, data: Data) -> Budget:
        return self if self.data is not None else replace(self, data=data)

    def __call__(self, posterior: Any) -> Any:
        """Return the mixture."""
        base = posterior.base
        likelihood = base.problem.likelihood
        data = required_data("Budget", self.data, base.problem.network)
        mixture = self._with_tails(base, data) if likelihood.has_tails else self._guarded(base, data)
        assert mixture.trace is not None
        return mixture.with_trace(mixture.trace.after(base.trace))

    def _guarded(self, base: Any, data: Data) -> MixturePosterior:
        """Return the mixture of the cells and the plain network, each within its part of the budget."""
        likelihood = base.problem.likelihood
        beliefs, spreads = varied(base, self.ratios)
        bases, beliefs, plain = with_plain(base, beliefs)
        cells = [Cell(number, likelihood, scale) for number, scale in [*spreads, (plain, 0.0)]]
        scores, counts = counted_scores(CellGrid.compared(bases, beliefs, cells), data, self.points)
        weights = budget_weights(scores, self.budget, counts)
        mixture = MixturePosterior.of(bases, beliefs, cells, weights)
        return mixture.with_trace(replace(TRACE, scores=_compared(scores, weights, counts)))

    def _with_tails(self, base: Any, data: Data) -> MixturePosterior:
        """Return half the plain network and half the posteriors, with Student tails fitted to the residuals."""
        likelihood = base.problem.likelihood
        if likelihood.learns_dispersion:
            likelihood = likelihood.with_tails(*fitted_tails(standardised_residuals(base, data), data.processes))
        bases, beliefs, plain = with_plain(base, [Belief(0)])
        parts = [(0, base, 1.0)]
        for other, scale in zip(self.others, self.scales or [1.0] * len(self.others), strict=True):
            parts.append((len(beliefs), other, scale))
            bases, beliefs = (*bases, other), [*beliefs, Belief(len(bases))]
        parts.append((plain, base, 0.0))
        tails = lambda each: each.problem.likelihood.with_tails(likelihood.degrees, likelihood.tail_scale)
        cells = [Cell(number, tails(each), scale) for number, each, scale in parts]
        share = (1 - PLAIN_NOISE) / (len(cells) - 1)
        weights = torch.tensor([*[share] * (len(cells) - 1), PLAIN_NOISE], dtype=torch.float64)
        grid = CellGrid.compared(bases, beliefs, [*cells, Cell(plain, base.problem.likelihood, 0.0)])
        scores, counts = counted_scores(grid, data, min(self.points, FEW_POINTS))
        mixture = MixturePosterior.of(bases, beliefs, cells, weights)
        compared = _compared(scores, torch.cat([weights, weights.new_zeros(1)]), counts)
        findings = (WIDTH, *(_disagreement(scale) for scale in self.scales if scale <= APART), ADVICE)
        return mixture.with_trace(replace(TRACE, scores=compared, findings=findings))


def _disagreement(scale: float) -> str:
    """Return the remark on posteriors of which one had to be scaled by so much to come half of the way."""
    return (
        f"the variance of the exact posterior is {scale**-2:.3g} times that of Kron, and is multiplied by {scale:.2g}: "
        "the width of these error bars is uncertain by the square root of that."
    )


def _compared(scores: Tensor, weights: Tensor, counts: Tensor) -> dict[str, float]:
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
    weights = (budget / lost.numel() / lost.clamp_min(FLOOR)).clamp_max(1.0)
    weights = weights * (MOST / weights.sum()).clamp_max(1.0)
    return torch.cat([weights, 1 - weights.sum().unsqueeze(0)])


def standardised_residuals(base: Any, data: Data) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield this process's residuals of each batch over their noise, flat, in float64, by one forward pass.

    Each comes with how often it counts; None if all count once.
    """
    network, likelihood = base.problem.network, base.problem.likelihood
    for batch in data.batches("residuals", weighted=True):
        _, y = checked_targets(network, likelihood, batch)
        f = network(batch.inputs).double()
        z = (f - y.double()) / likelihood.noise_variance.to(f).sqrt()
        counts = None if batch.weights is None else spread(batch.weights, z).expand_as(z).flatten()
        yield z.flatten(), counts


def fitted_tails(
    residuals: Iterable[tuple[Tensor, Tensor | None]], processes: Processes = ALONE
) -> tuple[float, float]:
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
    totals, count = processes.sum([totals])[0], sum(processes.every(count))
    costs = [count * math.log(scale) + (0.0 if degrees == math.inf else GAIN) for degrees, scale in candidates]
    return candidates[int((totals - torch.tensor(costs, dtype=torch.float64)).argmax())]
