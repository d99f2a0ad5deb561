"""Integration over hyperparameters by the likelihood of held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.settings import DATA, NONE, POSITIVE_VALUES, Rule, require
from lapwing.core.trace import Trace
from lapwing.posteriors.mixture import MixturePosterior
from lapwing.tuners.cells import (
    TEMPERATURES,
    CellGrid,
    counted_scores,
    grid_of,
    mean_score,
    mixture_weights,
    thinned,
    with_tails,
)

FOLDS = 5
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

    Methods whose prior cannot change without the data (SWAG, MCDropout, Ensemble, FMGP, HFL without linearisation)
    are given scales of their covariance in place of precisions.

    Cost: one pass over the validation data, whose Jacobians serve all cells; two for Gaussian noise.

    Args:
        data: Validation data in the form that ``fit`` takes: not used in training, 200 or more if possible.
        ratios: Multiples of the present precision; by default half-decades from 0.1 to 1e5 (1e-3 to 1e4 for Gaussian
            noise). An empty tuple keeps the prior, and varies temperature or noise only.
        temperatures: Softmax temperatures to try, in rising order.

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

    follows_evidence: ClassVar[bool] = True
    holds_out: ClassVar[bool] = True

    def __post_init__(self) -> None:
        none = Rule("an empty tuple", lambda v: isinstance(v, tuple | list) and not v)
        ratios = POSITIVE_VALUES | none | NONE
        require(self, data=DATA, ratios=ratios, temperatures=POSITIVE_VALUES)

    def __call__(self, posterior: Any) -> MixturePosterior:
        """Return the mixture."""
        base = posterior.base
        network, likelihood = base.problem.network, base.problem.likelihood
        data = network.reading(self.data, "validation")
        grid = grid_of(base, self.ratios, self.temperatures)
        scores, counts = counted_scores(grid, data)
        if likelihood.has_tails and likelihood.learns_dispersion:
            grid = with_tails(grid, counts @ scores)
            scores, counts = counted_scores(grid, data)
        grid = thinned(grid, scores, counts)
        weights = mixture_weights(grid.log_prior, scores, counts)
        compared, worse = compared_scores(grid, scores, counts)
        findings = (*worse, *_edges(grid, weights))
        mixture = MixturePosterior.of(grid.bases, grid.beliefs, grid.cells, weights)
        trace = Trace("Integrate", "cross-validated NLL", findings=findings, scores=compared, scored_on="validation")
        return mixture.with_trace(trace.after(base.trace))


def compared_scores(grid: CellGrid, scores: Tensor, counts: Tensor) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return mean negative log-likelihoods of the plain network, of the best rescaled one and of the mixture.

    The latter two are cross-validated: weights and the best cell come from the other folds of the data. Each datum
    counts so often, (n,).
    """
    folds = torch.arange(len(scores)) % FOLDS
    mixed, rescaled = torch.empty(len(scores), dtype=torch.float64), torch.empty(len(scores), dtype=torch.float64)
    rescalings = grid.rescaled.nonzero()[:, 0]
    for k in range(FOLDS):
        inside = folds == k
        if not bool(inside.any()):
            continue
        weights = mixture_weights(grid.log_prior, scores[~inside], counts[~inside])
        mixed[inside] = torch.logsumexp(scores[inside] + weights.log(), 1)
        if len(rescalings):
            best = rescalings[int((counts[~inside] @ scores[~inside][:, rescalings]).argmax())]
            rescaled[inside] = scores[inside][:, best]
    plain = scores[:, grid.unchanged]
    name = "noise refitted" if grid.cells[0].likelihood.has_tails else "temperature scaling"
    compared = {"plain network": -float(mean_score(plain, counts))}
    if len(rescalings) > 1:
        compared[name] = -float(mean_score(rescaled, counts))
    compared["mixture"] = -float(mean_score(mixed, counts))
    gap = float(mean_score(plain - mixed, counts))
    error = float((plain - mixed).std() / len(plain) ** 0.5) if len(plain) > 1 else 0.0
    if gap > 2 * error and gap > 1e-3:
        return compared, (
            f"the plain network predicts the validation data better, by {gap:.3g} nats; its error bars "
            "from this method do not help. Check that validation and training data come from the same source.",
        )
    return compared, ()


def _edges(grid: CellGrid, weights: Tensor) -> tuple[str, ...]:
    """Return remarks where the smallest precision, or the smallest or largest temperature, of the grid has weight."""
    first = torch.tensor([cell.belief == 0 and cell.scale > 0 for cell in grid.cells])
    lowest = float(weights[first].sum())
    findings = []
    if len(grid.beliefs) >= 3 and lowest >= EDGE:
        findings.append(
            f"the smallest precision tried has a weight of {lowest:.2f}: a smaller one may be better. Try "
            "Integrate(data, ratios=...) further down."
        )
    temperatures = torch.tensor([cell.likelihood.link_temperature or 1.0 for cell in grid.cells])
    for what, edge in (("smallest", temperatures.min()), ("largest", temperatures.max())):
        share = float(weights[temperatures == edge].sum())
        if float(temperatures.min()) < float(temperatures.max()) and share >= EDGE:
            findings.append(
                f"the {what} temperature tried, {float(edge):g}, has a weight of {share:.2f}: the network is further "
                "from calibrated than the grid reaches. Try Integrate(data, temperatures=...) further out."
            )
    return tuple(findings)
