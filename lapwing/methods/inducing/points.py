"""Inducing points together with the quantities that have been learned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.data import Batch, Data
from lapwing.core.trace import Step, Trace
from lapwing.curvature.blockwise import prior_precision
from lapwing.curvature.sweep import SquaredSum, Sweep
from lapwing.linalg.variational import Inducing
from lapwing.linalg.whitening import smooth_whitening, whitening
from lapwing.losses import Statistics
from lapwing.methods.inducing.anchored import AnchoredCurvature
from lapwing.methods.inducing.anchors import Anchors
from lapwing.networks.jacobians import LayerJacobians
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors.kernel import prior_kernel
from lapwing.problem import Problem


@dataclass(frozen=True, eq=False)
class InducingPoints:
    """Inducing points and the learned quantities: locations, prior variance, noise and, with alpha above 0, covariance.

    Kernels are computed under the prior of ``problem`` and multiplied by exp(``log_scale``): a change of the prior
    variance needs no new kernel.
    """

    problem: Problem
    anchors: Anchors
    statistics: Statistics
    n_samples: int  # training samples, ignored ones included
    movable: bool  # whether the locations are learned
    log_scale: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    log_noise: Tensor | None = None  # log φ, if it is learned
    inducing: Inducing | None = None  # the learned covariance; None if the closed form is used
    steps: tuple[Step, ...] = ()
    findings: tuple[str, ...] = ()

    @property
    def phi(self) -> Tensor:
        """The dispersion of the problem, in float64 on the network's device."""
        return self.problem.likelihood.dispersion.to(self.problem.network.device).double()

    @cached_property
    def penalty(self) -> Tensor:
        """(w̃ - μ)ᵀ A (w̃ - μ) under the prior of ``problem``."""
        prior = self.problem.prior
        return prior.penalty(self.problem.network.theta().double()).double().detach()

    @property
    def score(self) -> float:
        """The highest objective of all steps."""
        return max((step.score for step in self.steps), default=-math.inf)

    def unit(self) -> Tensor:
        """Return the unit in which locations are learned, in the shape of one input.

        For a table it is the standard deviation of each column over the points, for images their mean standard
        deviation. A constant column has unit zero and does not move.
        """
        z = self.anchors.inputs
        spread = z.detach().double().std(0, correction=0)
        spread = spread if z.ndim == 2 else spread.mean().expand_as(spread)
        return (spread if bool(spread.any()) else torch.ones_like(spread)).to(z)

    def zero_moves(self) -> Tensor:
        """Return the initial displacements of the points, all zero, at least in float32: half precision loses steps."""
        z = self.anchors.inputs
        return torch.zeros_like(z, dtype=torch.promote_types(z.dtype, torch.float32), requires_grad=True)

    def trace_step(self, score: float, log_scale: Tensor, log_noise: Tensor | None) -> Step:
        """Return the trace entry for these values; of more than 16 precisions it shows the first."""
        precisions = (self.problem.prior.values.detach().double() / log_scale.exp()).reshape(-1).tolist()
        phi = self.phi if log_noise is None else log_noise.detach().exp()
        return Step(score, tuple(precisions) if len(precisions) <= 16 else (precisions[0],), (float(phi),))

    def posterior(self, data: Data) -> WeightPosterior:
        """Return the posterior, with the learned covariance or, by one pass over the data, the one in closed form."""
        problem = self._learned_problem()
        if self.inducing is None:
            white = whitening(self.anchors.kernel(problem.prior))
            information, ggn_diagonal = _information(problem, data, self.anchors, white)
            mix = white @ _root(information)
        else:
            white = smooth_whitening(self.anchors.kernel(problem.prior))
            mix = white @ _root(self.inducing.known) * problem.likelihood.dispersion.to(white).sqrt()
            ggn_diagonal = None
            problem = problem.with_known_prior()  # learned together with the covariance
        curvature = AnchoredCurvature(self.anchors, mix, ggn_diagonal)
        posterior = WeightPosterior(problem, curvature, self.statistics, problem.network.theta())
        if not self.steps:
            return posterior
        score = "bound" if self.inducing is None else "energy"
        return posterior.with_trace(Trace("VaLLA", score, self.steps, self.findings))

    def _learned_problem(self) -> Problem:
        """Return the problem with the learned prior variance and noise."""
        prior, likelihood = self.problem.prior, self.problem.likelihood
        prior = prior.with_precision(prior.values.detach() / self.log_scale.exp().to(prior.values))
        if self.log_noise is not None:
            likelihood = likelihood.with_dispersion(self.log_noise.exp().detach())
        return replace(self.problem, prior=prior, likelihood=likelihood)


def _root(matrix: Tensor) -> Tensor:
    """Return R with R Rᵀ = matrix, for a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt()


def _information(problem: Problem, data: Data, anchors: Anchors, white: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ TᵀT over the data (r, r) with whitened rows T, and the diagonal of the GGN (P,), by one pass.

    Both at unit dispersion, in float64: the part of the GGN that the points miss is their small difference.
    """
    information, squares = white.new_zeros(white.shape[1], white.shape[1]), SquaredSum(problem.network)
    for jacobians in Sweep(problem.network, problem.likelihood, data, label="inducing points"):
        jacobians = jacobians.double()
        rows = anchors.against(jacobians, problem.prior) @ white
        information += rows.mT @ rows
        squares.add(jacobians)
    return information, squares.diagonal()


def whitened_rows(
    problem: Problem, batch: Batch, anchors: tuple[LayerJacobians, ...], white: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, checked targets, prior covariance and whitened rows of a batch, in float64.

    Shapes: (B, [T,] C); those of the targets; (B, [T,] C, C); (B, [T,] C, r). ``anchors`` are the rows J_Z in parts and
    ``white`` (M, r) whitens their kernel. Cost: the work of C backward passes over the batch and its kernel with J_Z.
    """
    network = problem.network
    precision = prior_precision(problem.prior, network.layout, network.selection)
    outputs, covariances, rows = [], [], []
    for _, tangent in network.tangents(batch.inputs):
        jacobians = tangent.jacobians().double()
        outputs.append(tangent.f.double())
        covariances.append(precision.quadratic(jacobians).reshape(*tangent.f.shape, -1))
        rows.append(torch.cat([prior_kernel(jacobians, problem.prior, part) for part in anchors], 1) @ white)
    f = torch.cat(outputs)
    y = problem.likelihood.targets(f, batch.targets)
    return f, y, torch.cat(covariances), torch.cat(rows).reshape(*f.shape, -1)
