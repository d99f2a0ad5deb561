"""Predictions in the forms of laplace-torch, from native beliefs and samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.compat.links import conditioned_bridge
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import normal
from lapwing.fitted import Fitted
from lapwing.predictives.softmax import SoftmaxPredictive

SEEDS = 2**31 - 1


def probabilities(
    belief: FunctionGaussian, link: str, n: int, independent: bool, generator: torch.Generator | None
) -> Tensor:
    """Return class probabilities (B, C) by a link of laplace-torch; ``independent`` leaves out covariances for "mc"."""
    if link in ("bridge", "bridge_norm"):
        return conditioned_bridge(belief.mean, belief.cov, link == "bridge_norm")
    if link == "probit":
        return SoftmaxPredictive(belief, "probit").probs
    seed = int(torch.randint(SEEDS, (), generator=generator))
    if independent:
        belief = FunctionGaussian(belief.mean, torch.diag_embed(belief.variance))
    return SoftmaxPredictive(belief, "mc", n, seed).probs


def functions(posterior: Fitted, x: Any, n: int, independent: bool, generator: torch.Generator | None) -> Tensor:
    """Return draws of the tangent model at x, (n, B, C); with ``independent`` from the variances alone."""
    if not independent:
        return posterior.function_samples(x, n, generator)
    belief = posterior.functions(x)
    return belief.mean + belief.std * normal((n, *belief.mean.shape), generator, belief.mean)


def network_functions(posterior: Fitted, x: Any, n: int, generator: torch.Generator | None) -> Tensor:
    """Return the outputs of the network itself with sampled weights, (n, B, C)."""
    return posterior.network_samples(x, n, generator)
