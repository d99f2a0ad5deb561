"""Early stopping of inducing points by the predictive log-likelihood of validation data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.gaussian import FunctionGaussian
from lapwing.likelihoods.energies import refuse_ignored
from lapwing.linalg.variational import Inducing
from lapwing.linalg.whitening import smooth_whitening
from lapwing.methods.inducing.points import InducingPoints, whitened_rows

COARSE = tuple(math.exp(k) for k in range(-6, 7))  # factors on the prior variance that every check tries
FINE = tuple(math.exp(k / 8) for k in range(-12, 13))  # factors that are tried for the best state at the end
ROUNDS = 8  # rounds of FINE at most, each around the best factor of the last: five decades to either side


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All learned quantities as they were after one step."""

    z: Any  # inputs of the points
    log_scale: Tensor
    log_noise: Tensor | None
    inducing: Inducing

    def scaled(self, factor: float) -> Snapshot:
        """Return the state with the prior variance times a factor; the information of the points grows with it."""
        if factor == 1.0:
            return self
        return replace(self, log_scale=self.log_scale + math.log(factor), inducing=self.inducing.times(factor))


@dataclass(frozen=True, eq=False)
class Validation:
    """Held-out data, for the choice of a state and of its prior variance.

    Every state is scored at the prior variance that suits the validation data best. The learned one follows the
    training data, which say little about it at the start and, with alpha = 1, push it too far. A prior that the user
    gave stays.
    """

    points: InducingPoints
    data: Data

    def check(self, state: Snapshot) -> tuple[float, Snapshot]:
        """Return the score of a state and the state with its best prior variance, by one pass."""
        score, scaled, _ = self._best_factor(state, COARSE)
        return score, scaled

    def refine(self, state: Snapshot) -> tuple[Snapshot, tuple[str, ...]]:
        """Return the state with its prior variance chosen on a fine grid, and findings for the trace.

        Cost: one pass over the validation data, and another one for each time that the best factor is at the edge.
        """
        for _ in range(ROUNDS):
            _, state, factor = self._best_factor(state, FINE)
            if factor not in (FINE[0], FINE[-1]):
                return state, ()
        return state, ("the validation data prefer a prior variance beyond the range that was tried; give the prior",)

    def _best_factor(self, state: Snapshot, factors: tuple[float, ...]) -> tuple[float, Snapshot, float]:
        """Return the highest mean log-likelihood, its state and its factor; of equal ones that nearest 1."""
        factors = factors if self.points.problem.learn_prior else (1.0,)
        scores = zip(self.log_likelihoods(state, factors), factors, strict=True)
        score, factor = max(scores, key=lambda pair: (pair[0], -abs(math.log(pair[1]))))
        return score, state.scaled(factor), factor

    def log_likelihoods(self, state: Snapshot, factors: tuple[float, ...] = (1.0,)) -> list[float]:
        """Return the mean predictive log-likelihood under the prior variance times each factor, by one pass."""
        problem, totals, count = self.points.problem, [0.0] * len(factors), 0
        likelihood, scale = problem.likelihood, state.log_scale.exp()
        if state.log_noise is not None:
            likelihood = likelihood.with_dispersion(state.log_noise.exp())
        with torch.no_grad():
            anchors = self.points.anchors.at(state.z)
            white = smooth_whitening(anchors.kernel(problem.prior))
            for batch in self.data.batches("validation"):
                f, y, prior_cov, rows = whitened_rows(problem, batch, anchors.parts, white)
                refuse_ignored(likelihood, y, "validation targets")
                covs = state.inducing.lefts(scale * prior_cov, scale.sqrt() * rows, factors)
                for i, cov in enumerate(covs):
                    totals[i] += float(likelihood.predict(FunctionGaussian(f, cov)).log_prob(y).sum())
                count += len(f)
        return [total / count for total in totals]
