"""Counts with a Poisson distribution, and their predictive: a Poisson with a Gaussian log-rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.likelihoods.base import Likelihood, OutputHessian, match_targets
from lapwing.predictives.numbers import CountPredictive
from lapwing.runtime.settings import saved
from lapwing.runtime.threads import poisson
from lapwing.values.gaussian import FunctionGaussian


@saved
@dataclass(frozen=True, eq=False)
class Poisson(Likelihood):
    """Counts, y ~ Poisson(exp f): the outputs of the network are log-rates.

    Targets are whole numbers from zero. The loss includes log y!, so the evidence is complete.

    >>> Poisson().loss(torch.zeros(1, 1), torch.ones(1, 1))  # exp(f) - y f + log y!
    tensor([1.])
    """

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        y = match_targets(f, y, "Poisson")
        wrong = (y < 0) | (y != y.round())
        if bool(wrong.any()):
            raise DataError(f"Poisson: targets include {y[wrong][0].item():g}; expected whole numbers from 0.")
        return y

    @property
    def refused_last(self) -> Mapping[str, str]:
        advice = "expected log-rates. Leave it out of the model: model[:-1] of a Sequential that ends in it."
        return dict.fromkeys(("exp", "softplus"), advice)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.exp() - y * f + torch.lgamma(y + 1)).sum(-1)

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag_embed((0.5 * f).exp())

    def hessian(self, f: Tensor, y: Tensor) -> OutputHessian:
        return OutputHessian(f.double().exp())

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        rate = f.exp()
        return rate - poisson(rate, generator)

    def predict(self, belief: FunctionGaussian) -> CountPredictive:
        return CountPredictive(belief.marginal)
