"""Prior precisions from which a search for better ones starts: γ / |w|² with γ at half of its largest value.

``rows`` is the number of data times the number of outputs; ``theta`` (P,) are the trained weights.
"""

from __future__ import annotations

from torch import Tensor

from lapwing.priors.bound import BoundPrior

RANGE = (1e-6, 1e8)  # for weights that are very large, or all at the prior mean


def starting_precisions(prior: BoundPrior, theta: Tensor, rows: int) -> Tensor:
    """Return precisions near the optimum of the evidence, in the shape of ``prior.values``."""
    if prior.values.numel() == theta.numel():  # one for each weight: a single square says nothing
        return single_starting_precision(theta, rows).to(prior.values).expand(prior.values.shape).clone()
    return group_starting_precisions(prior, theta, rows).clamp(*RANGE)


def group_starting_precisions(prior: BoundPrior, theta: Tensor, rows: int) -> Tensor:
    """Return one precision for each group from its own weights alone; infinite for weights at the prior mean.

    A group whose weights are k times as large gets a precision k² times as small.
    """
    guess = _share(theta, rows) * prior.counts / prior.squares(theta.double())
    return guess.reshape(prior.values.shape)


def single_starting_precision(theta: Tensor, rows: int) -> Tensor:
    """Return one precision for all weights, ()."""
    return (_share(theta, rows) * theta.numel() / theta.double().square().sum()).clamp(*RANGE)


def _share(theta: Tensor, rows: int) -> float:
    """Return half of the largest share of the weights that the data can determine."""
    return 0.5 * min(1.0, rows / theta.numel())
