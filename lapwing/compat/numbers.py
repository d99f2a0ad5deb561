"""The numbers of a Laplace posterior under laplace-torch's names, all from the native posterior."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import UnsupportedError
from lapwing.fitted import Fitted
from lapwing.posteriors.protocols import HasEvidence, required

_NATIVE = {
    "H": "the curvature is la.posterior.base.current",
    "H_facs": "the curvature is la.posterior.base.current",
    "backend": "Lapwing computes all curvatures itself",
    "posterior_precision": "la.posterior.base.precision has solve(v), sample(eps), logdet() and variances()",
    "posterior_covariance": "la.posterior.base.precision.solve(v) multiplies with it",
    "posterior_scale": "la.posterior.base.precision.sample(eps) multiplies with it",
    "posterior_variance": "la.posterior.base.precision.variances() is its diagonal",
    "functional_variance_fast": "la.posterior.functions(x).variance is fast for all structures",
    "predictive_moments": "la.posterior.functions(x) has mean and cov",
}


class MissingNameError(UnsupportedError, AttributeError):
    """A name of laplace-torch that does not exist here; the message says how to do the same."""


class PosteriorNumbers:
    """The numbers of a posterior: marginal likelihood and its terms, precision, covariance, sizes.

    A class that inherits it has ``posterior``, the native posterior.
    """

    likelihood: str
    temperature: float
    prior_precision: Any
    sigma_noise: Any
    _structure: str

    @property
    def posterior(self) -> Fitted:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name in _NATIVE:
            structure = vars(self).get("_structure")
            raise MissingNameError(f"compat.Laplace has no {name} for the structure {structure!r}: {_NATIVE[name]}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def log_marginal_likelihood(
        self, prior_precision: float | Tensor | None = None, sigma_noise: float | Tensor | None = None
    ) -> Tensor:
        """Return the log marginal likelihood, differentiable in the prior precision and the noise.

        Args:
            prior_precision: A new prior precision, which is kept.
            sigma_noise: A new noise, which is kept.
        """
        if prior_precision is not None:
            self.prior_precision = prior_precision
        if sigma_noise is not None:
            self.sigma_noise = sigma_noise
        base = required(self.posterior.base, HasEvidence, "evidence", self.posterior.method)
        return base.log_evidence() + self._untempered

    @property
    def _untempered(self) -> float:
        """The term by which the normaliser of the noise σ² exceeds that of σ² T, which a native posterior has."""
        statistics = self.posterior.base.statistics
        count = statistics.data * statistics.outputs if self.likelihood == "regression" else 0
        return 0.5 * count * math.log(self.temperature)

    @property
    def log_likelihood(self) -> Tensor:
        """The log-likelihood of the training data at the trained weights."""
        return self.posterior.base.log_likelihood() + self._untempered

    @property
    def scatter(self) -> Tensor:
        """(θ - μ)ᵀ A (θ - μ) at the trained weights."""
        return self.posterior.prior.penalty(self.mean.double())

    @property
    def log_det_prior_precision(self) -> Tensor:
        """log det A."""
        return self.posterior.prior.logdet()

    @property
    def log_det_ratio(self) -> Tensor:
        """log det Λ - log det A."""
        return -2 * self.posterior.base.log_occam() - self.scatter

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """log det Λ."""
        return self.log_det_ratio + self.log_det_prior_precision

    @property
    def prior_precision_diag(self) -> Tensor:
        """The prior precision of each weight, (P,)."""
        return self.posterior.prior.vector

    @property
    def mean(self) -> Tensor:
        """The trained weights, (P,)."""
        return self.posterior.base.theta

    @property
    def loss(self) -> float:
        """The loss of the training data at the trained weights, at unit dispersion."""
        return float(self.posterior.base.statistics.loss)

    @property
    def n_data(self) -> int:
        """The number of training data."""
        return int(self.posterior.base.statistics.data)

    @property
    def n_outputs(self) -> int:
        """The number of outputs C."""
        return int(self.posterior.network.output_shape[-1])

    @property
    def n_params(self) -> int:
        """The number of uncertain weights P."""
        return self.posterior.network.selection.size

    @property
    def n_layers(self) -> int:
        """The number of parameter tensors with uncertain weights."""
        return len(self.posterior.network.selection.names)

    def _only(self, name: str, *structures: str) -> None:
        """Raise unless the structure is one of these."""
        if self._structure not in structures:
            raise MissingNameError(
                f"compat.Laplace has no {name} for the structure {self._structure!r}: {_NATIVE[name]}."
            )

    @property
    def posterior_precision(self) -> Tensor:
        """Λ (P, P) for the structure "full", its diagonal (P,) for "diag"."""
        self._only("posterior_precision", "full", "diag")
        base = self.posterior.base
        if self._structure == "diag":
            return 1 / base.precision.variances()
        scaled = base.current.matrix.double() / base.problem.likelihood.dispersion.detach()
        return scaled + torch.diag(self.prior_precision_diag.detach())

    @property
    def posterior_covariance(self) -> Tensor:
        """Λ⁻¹ (P, P), for the structure "full"."""
        self._only("posterior_covariance", "full")
        return self.posterior.base.precision.solve(torch.eye(self.n_params).to(self.prior_precision_diag))

    @property
    def posterior_variance(self) -> Tensor:
        """The diagonal of Λ⁻¹ (P,), for the structure "diag"."""
        self._only("posterior_variance", "diag")
        return self.posterior.base.precision.variances()

    @property
    def posterior_scale(self) -> Tensor:
        """A root R of the covariance, R Rᵀ = Λ⁻¹, (P, P) for the structure "full", (P,) for "diag"."""
        self._only("posterior_scale", "full", "diag")
        if self._structure == "diag":
            return self.posterior_variance.sqrt()
        return self.posterior.base.precision.sample(torch.eye(self.n_params).to(self.prior_precision_diag)).mT

    def square_norm(self, value: Tensor) -> Tensor:
        """Return (θ - w̃)ᵀ Λ (θ - w̃) for weights θ (P,), for the structures "full" and "diag"."""
        delta, precision = (value - self.mean).double(), self.posterior_precision
        return delta @ (precision * delta if precision.ndim == 1 else precision @ delta)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Return the log-density of the posterior at weights θ (P,), for the structures "full" and "diag"."""
        square = -0.5 * self.square_norm(value)
        if not normalized:
            return square
        return square + 0.5 * (self.log_det_posterior_precision - self.n_params * math.log(2 * math.pi))

    def functional_variance(self, Js: Tensor) -> Tensor:
        """Return J Λ⁻¹ Jᵀ (B, C, C) for Jacobians (B, C, P); ``la.posterior.functions(x)`` needs none."""
        return torch.einsum("bcp,bdp->bcd", self._solved(Js), Js.double()).to(Js)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """Return the covariance (B C, B C) of all outputs for Jacobians (B, C, P)."""
        return (self._solved(Js).flatten(0, 1) @ Js.double().flatten(0, 1).mT).to(Js)

    def _solved(self, Js: Tensor) -> Tensor:
        if Js.ndim != 3 or Js.shape[-1] != self.n_params:
            raise UnsupportedError(f"Js has the shape {tuple(Js.shape)}; expected (B, C, {self.n_params}).")
        return self.posterior.base.precision.solve(Js.double().flatten(0, 1)).reshape(Js.shape)
