"""Inducing points together with the quantities that have been learned."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.batches import Batch
from lapwing.core.data import Data
from lapwing.core.spectra import eigh
from lapwing.core.trace import Step, Trace
from lapwing.curvature.blockwise import prior_precision
from lapwing.curvature.sweep import SquaredSum, Sweep
from lapwing.likelihoods.protocol import Likelihood
from lapwing.linalg.variational import Inducing
from lapwing.linalg.whitening import smooth_whitening, whitening
from lapwing.methods.inducing.anchors import Anchors
from lapwing.methods.inducing.curvatures import AnchoredCurvature
from lapwing.networks.jacobians import LayerJacobians
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors.kernel import prior_kernel
from lapwing.problem import Problem, Statistics


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
    def likelihood(self) -> Likelihood:
        """The likelihood with the learned noise."""
        likelihood = self.problem.likelihood
        return likelihood if self.log_noise is None else likelihood.with_dispersion(self.log_noise.exp())

    @cached_property
    def penalty(self) -> Tensor:
        """(w̃ - μ)ᵀ A (w̃ - μ) under the prior of ``problem``."""
        prior = self.problem.prior
        return prior.penalty(self.problem.network.theta().double()).double().detach()

    @property
    def score(self) -> float:
        """The highest objective of all steps."""
        return max((step.score for step in self.steps), default=-math.inf)

    def learnable(self, noise: bool) -> tuple[InducingPoints, Tensor | None]:
        """Return the points and their moves, with everything that is learned as leaves for an optimiser.

        These are the prior variance, the noise if asked, and the moves, which are None if the points are fixed. Moves
        are zero at first, and at least float32: half precision would lose small steps.
        """
        device, z = self.problem.network.device, self.anchors.inputs
        log_scale = self.log_scale.detach().to(device, copy=True).requires_grad_(self.problem.learn_prior)
        log_noise = moves = None
        if noise and self.problem.likelihood.learns_dispersion:
            log_noise = self.problem.likelihood.dispersion.detach().double().log().to(device).requires_grad_()
        if self.movable:
            moves = torch.zeros_like(z, dtype=torch.promote_types(z.dtype, torch.float32), requires_grad=True)
        return replace(self, log_scale=log_scale, log_noise=log_noise), moves

    @cached_property
    def unit(self) -> Tensor:
        """The unit in which locations are learned, in the shape of one input.

        For a table it is the standard deviation of each column over the points, for images their mean standard
        deviation. A constant column has unit zero and does not move.
        """
        z = self.anchors.inputs
        spread = z.detach().double().std(0, correction=0)
        spread = spread if z.ndim == 2 else spread.mean().expand_as(spread)
        return (spread if bool(spread.any()) else torch.ones_like(spread)).to(z)

    def moved(self, moves: Tensor) -> Tensor:
        """Return the inputs of the points after ``moves``, which are in units of their spread."""
        start = self.anchors.inputs.detach()
        return (start + self.unit * moves).to(start)

    def copied(self, moves: Tensor | None) -> InducingPoints:
        """Return the points at their locations after these moves; further steps of the optimiser do not change them."""
        anchors = self.anchors if moves is None else self.anchors.at(self.moved(moves.detach()))
        log_noise = None if self.log_noise is None else self.log_noise.detach().clone()
        return replace(self, anchors=anchors, log_scale=self.log_scale.detach().clone(), log_noise=log_noise)

    def trace_step(self, score: float) -> Step:
        """Return the trace entry with this score; with more than 16 precisions it has the first one only."""
        precisions = (self.problem.prior.values.double() / self.log_scale.exp()).detach().reshape(-1).tolist()
        noise = float(self.likelihood.dispersion.detach())
        return Step(score, tuple(precisions) if len(precisions) <= 16 else (precisions[0],), (noise,))

    def posterior(self, data: Data) -> WeightPosterior:
        """Return the posterior, with the learned covariance or, by one pass over the data, the one in closed form."""
        prior = self.problem.prior
        prior = prior.with_precision(prior.values.detach() / self.log_scale.exp().to(prior.values))
        problem = replace(self.problem, prior=prior, likelihood=self.likelihood)
        if self.inducing is None:
            white = whitening(self.anchors.kernel(prior))
            information, ggn_diagonal = _information(problem, data, self.anchors, white)
            (mix,) = data.processes.same([white @ _root(information)])
        else:
            white = smooth_whitening(self.anchors.kernel(prior))
            mix = white @ _root(self.inducing.information) * problem.likelihood.dispersion.to(white).sqrt()
            ggn_diagonal = None
            problem = problem.with_known_prior()  # learned together with the covariance
        curvature = AnchoredCurvature(self.anchors, mix, ggn_diagonal)
        posterior = WeightPosterior(problem, curvature, self.statistics, problem.network.theta())
        if not self.steps:
            return posterior
        score = "bound" if self.inducing is None else "energy"
        return posterior.with_trace(Trace("VaLLA", score, self.steps, self.findings))


def _root(matrix: Tensor) -> Tensor:
    """Return R with R Rᵀ = matrix, for a positive semidefinite matrix."""
    values, vectors = eigh(matrix)
    return vectors * values.clamp_min(0).sqrt()


def _information(problem: Problem, data: Data, anchors: Anchors, white: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ TᵀT over the data (r, r) with whitened rows T, and the diagonal of the GGN (P,), by one pass.

    Both at unit dispersion, in float64: the part of the GGN that the points miss is their small difference.
    """
    information, squares = white.new_zeros(white.shape[1], white.shape[1]), SquaredSum(problem.network)
    sweep = Sweep(problem.network, problem.likelihood, data, label="inducing points")
    for jacobians in sweep.jacobians(width=4 * len(white)):
        jacobians = jacobians.double()
        rows = anchors.against(jacobians, problem.prior) @ white
        information += rows.mT @ rows
        squares.add(jacobians)
    (information,) = data.processes.sum([information])
    return information, squares.diagonal(data.processes)


def whitened_rows(
    problem: Problem, batch: Batch, anchors: Iterable[LayerJacobians], white: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, checked targets, prior covariance and whitened rows of a batch, in float64.

    Shapes: (B, [T,] C); those of the targets; (B, [T,] C, C); (B, [T,] C, r). ``anchors`` are the rows J_Z in parts and
    ``white`` (M, r) whitens their kernel. Cost: the work of C backward passes over the batch and its kernel with J_Z.
    """
    network = problem.network
    precision = prior_precision(problem.prior, network.layout, network.selection)
    outputs, covariances, rows = [], [], []
    for _, tangent in network.tangents(batch.inputs):
        outputs.append(tangent.f.double())
        covs, kernels = [], []
        for run in tangent.runs(whole_tokens=True):
            jacobians = run.double()
            covs.append(precision.quadratic(jacobians))  # (B, tokens, C, C)
            kernel = torch.cat([prior_kernel(jacobians, problem.prior, part) for part in anchors], 1)
            kernels.append((kernel @ white).unflatten(0, (run.batch, run.outputs)))
        covariances.append(torch.cat(covs, 1).reshape(*tangent.f.shape, -1))
        rows.append(torch.cat(kernels, 1))
    f = torch.cat(outputs)
    y = problem.likelihood.targets(f, batch.targets)
    return f, y, torch.cat(covariances), torch.cat(rows).reshape(*f.shape, -1)
