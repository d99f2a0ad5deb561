"""Nyström features of the tangent kernel (Deng et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.pool import Pool
from lapwing.core.random import independent_generator
from lapwing.core.settings import require_integer
from lapwing.curvature.low_rank import BoundedCurvature
from lapwing.curvature.sweep import SquaredSum, Sweep
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.losses import Statistics
from lapwing.methods.inducing.anchors import Anchors
from lapwing.methods.inducing.placement import landmarks
from lapwing.methods.inducing.subspace import SubspaceCurvature
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors.gaussian import Prior
from lapwing.problem import Problem


@dataclass(frozen=True)
class ELLA:
    """The posterior within the ``rank`` leading directions of the tangent kernel at ``num_landmarks`` random data.

    A landmark is a training input with one of its outputs, drawn at random. The directions are the leading eigenvectors
    of the landmarks' kernel; near-null ones are dropped, so the rank may come out lower. One pass over the data gives
    the curvature within them, and any prior or noise after that is a matter of a rank x rank matrix.

    Without ``residual`` the variance is never above the exact one and goes to nought far from the landmarks; with it
    the directions left out keep their prior variance, as in VaLLA at the same landmarks.

    Cost: one backward pass over the landmarks and their (M, M) kernel; one pass over the data with ``rank`` products
    J v for each output. Memory: M P numbers while the directions are found, rank P afterwards.
    Exact when: the directions span the Jacobian of the data, and with ``residual`` everywhere else too.
    """

    num_landmarks: int = 2000
    rank: int = 20
    residual: bool = False

    def __post_init__(self) -> None:
        for name in ("num_landmarks", "rank"):
            require_integer(name, getattr(self, name))
        if not isinstance(self.residual, bool):
            raise UnsupportedError(f"residual is {self.residual!r:.80}; expected True or False.")

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        network, prior = problem.network, problem.prior
        if prior.needs_curvature:
            raise UnsupportedError(
                "ELLA() finds its directions under the prior; g_prior() needs them first. Use Kron()."
            )
        generator = independent_generator(generator)
        anchors = landmarks(network, Pool.drawn(data, self.num_landmarks, generator), self.num_landmarks, generator)
        rows = leading_rows(anchors, prior, self.rank)
        directions = rows / prior.vector.detach().to(rows)
        squares = SquaredSum(network) if self.residual else None
        gram, statistics = within(problem, data, directions, squares)
        if squares is None:
            return WeightPosterior.fitted(problem, SubspaceCurvature(directions, gram, network.selection), statistics)
        values, turn = torch.linalg.eigh(gram)
        _, singular, vectors = torch.linalg.svd((turn * values.clamp_min(0).sqrt()).mT @ rows, full_matrices=False)
        curvature = BoundedCurvature(
            singular.square(), vectors, network.layout, network.selection, own=squares.diagonal()
        )
        return WeightPosterior.fitted(problem, curvature, statistics)


def leading_rows(anchors: Anchors, prior: Prior, rank: int, cut: float = 1e-14) -> Tensor:
    """Q (K, P) in the span of the anchors' Jacobian with Q A⁻¹ Qᵀ = I, leading directions first."""
    kernel = anchors.kernel(prior)
    if not bool(torch.isfinite(kernel).all()):
        raise NumericalError("the kernel of the landmarks is not finite; check the data and the network for overflow.")
    values, vectors = torch.linalg.eigh(kernel)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    real = values > cut * values[0].clamp_min(1e-300)
    if not bool(real.any()):
        raise NumericalError("no output depends on the selected weights at any landmark; choose other weights.")
    return anchors.combined((vectors[:, real] / values[real].sqrt()).mT)


def within(
    problem: Problem, data: Data, directions: Tensor, squares: SquaredSum | None = None
) -> tuple[Tensor, Statistics]:
    """D H Dᵀ at unit dispersion, (K, K), by one pass over the data; the diagonal of H beside it where it is wanted."""
    sweep = Sweep(problem.network, problem.likelihood, data, label="features")
    total = directions.new_zeros(len(directions), len(directions))
    for jacobians in sweep:
        if squares is not None:
            jacobians = jacobians.double()  # what the directions miss is a difference, in which rounding is all
            squares.add(jacobians)
        features = jacobians.jvp(directions).to(total).flatten(1)
        total += features @ features.mT
    return total, sweep.statistics
