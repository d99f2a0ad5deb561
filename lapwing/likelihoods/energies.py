"""Objectives on a Gaussian belief about the outputs: from the expected log-likelihood to the log of the expectation."""

from __future__ import annotations

from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian
from lapwing.errors import DataError, UnsupportedError
from lapwing.likelihoods.protocol import HasPowerEnergy, Likelihood


def refuse_energy(likelihood: Likelihood, alpha: float) -> None:
    """Raise unless ``energy`` is defined for this likelihood and alpha."""
    if not 0 <= alpha <= 1:
        raise UnsupportedError(f"alpha is {alpha}; expected a number between 0 and 1.")
    if 0 < alpha < 1 and not isinstance(likelihood, HasPowerEnergy):
        raise UnsupportedError(
            f"alpha is {alpha} for {type(likelihood).__name__}; between 0 and 1 only Gaussian() has a closed form. "
            "Use 0 (the evidence bound) or 1 (the predictive log-likelihood)."
        )
    if alpha > 0:
        likelihood.check_prediction()


def refuse_ignored(likelihood: Likelihood, y: Tensor, what: str = "targets") -> None:
    """Raise if a target is ignored: the predictive would take its mark for a known value."""
    if bool(likelihood.ignored(y).any()):
        raise DataError(
            f"some {what} are ignored ones, which have no predictive probability; expected known ones. "
            "Leave those data out."
        )


def energy(likelihood: Likelihood, alpha: float, mean: Tensor, cov: Tensor, y: Tensor) -> Tensor:
    r"""Return $\frac1\alpha \log E\, p(y \mid f)^\alpha$ for f ~ N(mean, cov), (B,), differentiable in the covariance.

    α = 1 is the log of the predictive density as the likelihood itself gives it (its link included). α = 0 is the
    expected log-likelihood with the curvature at the mean: exact for a Gaussian.
    """
    if alpha == 1:
        refuse_ignored(likelihood, y)
        log_density: Tensor = likelihood.predict(FunctionGaussian(mean, cov)).log_prob(y)
        return log_density
    if alpha == 0:
        phi = likelihood.dispersion.to(mean)
        root = likelihood.root(mean, y)
        spread = (root.mT @ cov @ root).diagonal(dim1=-2, dim2=-1).sum(-1)
        return -(likelihood.loss(mean, y) + 0.5 * spread) / phi - likelihood.log_normaliser(phi, mean.shape[-1])
    assert isinstance(likelihood, HasPowerEnergy)
    return likelihood.power_energy(alpha, mean, cov, y)
