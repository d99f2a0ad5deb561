"""Scores of abstaining: the mean loss of the inputs that remain when the most uncertain ones are left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.metrics.arrays import Values, listed, mean_of_ties


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The curve of risk against coverage, from the most certain input alone to all inputs."""

    coverage: Tensor  # (B,) share of inputs that are kept, 1/B to 1
    risk: Tensor  # (B,) mean loss of those


def risk_coverage(uncertainty: Values, loss: Values) -> RiskCoverage:
    """Return the mean loss of the k most certain inputs, for every k.

    Inputs of equal uncertainty count as their mean, so that their order has no effect.

    Args:
        uncertainty: A number for each input, higher if less certain, (B,): 1 - probs.amax(1), an entropy, a variance.
        loss: The loss of each input, (B,): whether the answer is wrong, or a squared error.

    Returns:
        Coverages and risks, each (B,).

    Raises:
        DataError: The shapes are not (B,), or differ.

    >>> risk_coverage(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0, 1, 0])).risk
    tensor([0.0000, 0.0000, 0.3333], dtype=torch.float64)
    """
    uncertainty, loss = listed(uncertainty=uncertainty, loss=loss)
    kept = torch.arange(1, len(loss) + 1, dtype=loss.dtype, device=loss.device)
    ordered = mean_of_ties(uncertainty, loss)[uncertainty.argsort()]
    return RiskCoverage(kept / len(loss), ordered.cumsum(0) / kept)


def aurc(uncertainty: Values, loss: Values) -> float:
    """Return the area under the risk-coverage curve (AURC): the mean of its risks (Geifman et al. 2019).

    An uncertainty that says nothing has the mean loss; lower is better.

    Args:
        uncertainty: A number for each input, higher if less certain, (B,).
        loss: The loss of each input, (B,).

    Raises:
        DataError: The shapes are not (B,), or differ.

    >>> round(aurc(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0, 1, 0])), 4)
    0.1111
    """
    return float(risk_coverage(uncertainty, loss).risk.mean())
