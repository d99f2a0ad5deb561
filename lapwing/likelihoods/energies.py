"""What data say of a Gaussian belief about the outputs: from the expected log-likelihood to the log of its mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian
from lapwing.errors import DataError, UnsupportedError
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.protocol import IgnoresTargets, Likelihood


def refuse_energy(likelihood: Likelihood, alpha: float) -> None:
    """Only those with a closed form or a predictive of their own."""
    if not 0 <= alpha <= 1:
        raise UnsupportedError(f"alpha is {alpha}; expected a number between 0 and 1.")
    if 0 < alpha < 1 and not isinstance(likelihood, Gaussian):
        raise UnsupportedError(
            f"alpha is {alpha} for {type(likelihood).__name__}; between 0 and 1 only Gaussian() has a closed form. "
            "Use 0 (the evidence bound) or 1 (the predictive log-likelihood)."
        )
    if alpha == 1 and getattr(likelihood, "link", "") == "mc":
        raise UnsupportedError(
            "a predictive made of draws (link='mc') has no slope to learn by; use link='probit' or 'bridge'."
        )
    if alpha > 0:
        _refuse_weights(likelihood)


def _refuse_weights(likelihood: Likelihood) -> None:
    """A predictive knows of no weights and no temperature: they would have no say, and nobody would notice."""
    for name in ("class_weights", "pos_weight", "temperature"):
        value = getattr(likelihood, name, None)
        if value is not None and bool((torch.as_tensor(value) != 1).any()):
            raise UnsupportedError(
                f"{name} of {type(likelihood).__name__} is {value}; expected none: the predictive log-likelihood, by "
                f"which FMGP() and VaLLA() with alpha above 0 learn, knows of none. Use VaLLA(alpha=0), or no {name}."
            )


def refuse_ignored(likelihood: Likelihood, y: Tensor, what: str = "targets") -> None:
    """A predictive gives every target a probability, a mark for an unknown one too."""
    ignored = likelihood.ignore_index if isinstance(likelihood, IgnoresTargets) else None
    if ignored is not None and bool((y == ignored).any()):
        raise DataError(
            f"some {what} are ignored ones, which the predictive has no say on; expected known ones: "
            "leave those data out."
        )


def energy(likelihood: Likelihood, alpha: float, mean: Tensor, cov: Tensor, y: Tensor) -> Tensor:
    r"""(B,): $\frac1\alpha \log E\, p(y \mid f)^\alpha$ for f ~ N(mean, cov), differentiable in the covariance.

    α = 1 is the log of the predictive as the likelihood itself gives it (its link included). α = 0 is the expected
    log-likelihood, with the curvature at the mean: exact for a Gaussian.
    """
    if alpha == 1:
        refuse_ignored(likelihood, y)
        found: Tensor = likelihood.predict(FunctionGaussian(mean, cov)).log_prob(y)
        return found
    phi = likelihood.dispersion.to(mean)
    if alpha == 0:
        root = likelihood.root(mean, y)
        spread = (root.mT @ cov @ root).diagonal(dim1=-2, dim2=-1).sum(-1)
        return -(likelihood.loss(mean, y) + 0.5 * spread) / phi - likelihood.log_normaliser(phi, mean.shape[-1])
    assert isinstance(likelihood, Gaussian)
    noise = likelihood.noise_variance.to(mean).expand(mean.shape[-1])
    whole = torch.diag(noise) + alpha * cov
    factor = torch.linalg.cholesky(whole)
    gap = torch.linalg.solve_triangular(factor, (y - mean).unsqueeze(-1), upper=False).squeeze(-1)
    growth = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - noise.log().sum()
    constant = noise.log().sum() + mean.shape[-1] * math.log(2 * math.pi)
    return -0.5 * (gap.square().sum(-1) + growth / alpha + constant)
