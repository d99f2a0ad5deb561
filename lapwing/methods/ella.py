"""ELLA: Nyström features of the tangent kernel (Deng et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.curvature.dense import LowRankCurvature
from lapwing.curvature.sweep import SquaredSum, Sweep
from lapwing.data.batches import Data
from lapwing.data.streams import Pool
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.linalg.dense import eigh, svd
from lapwing.methods.base import Conformance, Cost, Exactness, Method, Work, Workload
from lapwing.methods.inducing_points import Anchors, BoundedCurvature, Placement, SubspaceCurvature
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors import BoundPrior
from lapwing.problem import Problem, Statistics
from lapwing.runtime.settings import FLAG, integer, setting
from lapwing.runtime.threads import independent_generator


@dataclass(frozen=True)
class ELLA(Method):
    r"""Linearised Laplace approximation within the ``rank`` leading directions of the tangent kernel at landmarks.

    A landmark is a training input with one of its outputs, drawn at random. The directions are the leading
    eigenvectors of the landmarks' kernel; directions that are zero up to rounding are dropped, so the rank may be
    lower. One pass over the data gives the curvature within the directions. After that another prior or noise costs a
    factorisation of a rank × rank matrix.

    Args:
        num_landmarks: The number M of landmarks.
        rank: The number of directions.
        residual: False gives the directions that are left out no variance: the variance is never above the exact one
            and goes to zero far from the landmarks. True keeps their prior variance, as in ``VaLLA`` at these points.

    Raises:
        UnsupportedError: ``num_landmarks`` or ``rank`` is not a positive integer, or ``residual`` is not a bool.
            ``fit`` also raises it for ``g_prior``.

    Cost: one backward pass over the landmarks and their (M, M) kernel; one pass over the data with ``rank`` products
    J v for each output. Memory: M P numbers while the directions are computed, rank P afterwards.
    Exact when: the directions span the Jacobian of the data; at inputs outside that span only with ``residual``.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 20)[:, None].double()
    >>> net = torch.nn.Linear(1, 1).double()
    >>> posterior = lw.fit(net, [(x, x)], "regression", method=lw.ELLA(num_landmarks=10, rank=2), prior=1.0)
    >>> posterior.functions(x).cov.shape
    torch.Size([20, 1, 1])
    """

    num_landmarks: int = setting(2000, integer())
    rank: int = setting(20, integer())
    residual: bool = setting(False, FLAG)
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance(
        (
            Exactness(lambda weights, rows: ELLA(num_landmarks=rows, rank=weights), "linear"),
            Exactness(lambda weights, rows: ELLA(rows, weights, residual=True), "network", name="residual"),
        ),
        small=lambda model: {"": ELLA(num_landmarks=6, rank=3)},
    )

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        """Return the posterior; ``lw.fit`` calls this.

        Args:
            problem: Network, likelihood and prior.
            data: The training data.
            generator: Source of randomness for the landmarks; seed 0 if None.
        """
        network, prior = problem.network, problem.prior
        if prior.needs_curvature:
            raise UnsupportedError(
                "g_prior() takes its scale from the curvature, and ELLA() needs the prior before that; use Kron(), or "
                "another prior."
            )
        generator = independent_generator(generator)
        placement = Placement(network, Pool.draw(data, self.num_landmarks, generator), generator)
        landmarks = placement.landmarks(self.num_landmarks)
        one = lambda: [leading_rows(landmarks, prior, self.rank)]
        ((rows,),) = data.processes.run_jobs([one], [1.0], network.device)
        directions = rows / prior.vector.detach().to(rows)
        squares = SquaredSum(network) if self.residual else None
        gram, statistics = within(problem, data, directions, squares)
        if squares is None:
            return WeightPosterior.fitted(problem, SubspaceCurvature(network.selection, directions, gram), statistics)
        values, basis = eigh(gram)
        _, singular, vectors = svd((basis * values.clamp_min(0).sqrt()).mT @ rows)
        part = LowRankCurvature(singular.square(), vectors, network.layout, network.selection)
        diagonal = squares.diagonal(data.processes)
        return WeightPosterior.fitted(problem, BoundedCurvature(part, diagonal), statistics)

    def cost(self, workload: Workload) -> Cost:
        points = min(self.num_landmarks, workload.rows)
        rank = min(self.rank, points, workload.weights)
        size, note = workload.weights, f"rank {rank}, {points} landmarks"
        once = workload.kernel(points) + Work(products=rank * points * workload.gradient, cubes=points**3)
        fit = Work(workload.jacobians() + workload.along(rank))
        predict = workload.prediction(Work(workload.along(rank)))
        stored = 8 * rank * (size + rank)
        peak = workload.jacobian_bytes() + 8 * (points * workload.gradient + 3 * points**2)
        return workload.cost(stored, peak, fit, predict, once, note)


def leading_rows(anchors: Anchors, prior: BoundPrior, rank: int, cut: float = 1e-14) -> Tensor:
    """Return Q (K, P) in the span of the anchors' Jacobian with Q A⁻¹ Qᵀ = I, leading directions first.

    Directions with an eigenvalue below ``cut`` of the largest are dropped: they are rounding.
    """
    kernel = anchors.kernel(prior)
    if not bool(torch.isfinite(kernel).all()):
        raise NumericalError(
            "the kernel of the landmarks is not finite; expected finite numbers. Check data and network for overflow."
        )
    values, vectors = eigh(kernel)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    real = values > cut * values[0].clamp_min(1e-300)
    if not bool(real.any()):
        raise NumericalError("no output depends on the selected weights at any landmark; choose other weights.")
    return anchors.combine((vectors[:, real] / values[real].sqrt()).mT)


def within(
    problem: Problem, data: Data, directions: Tensor, squares: SquaredSum | None = None
) -> tuple[Tensor, Statistics]:
    """Return D H Dᵀ at unit dispersion (K, K) and the statistics, by one pass over the data.

    With ``squares`` the pass also adds up the diagonal of H, in float64: the part of H that the directions miss is a
    small difference.
    """
    sweep = Sweep(problem.network, problem.likelihood, data, label="features")
    total = directions.new_zeros(len(directions), len(directions))
    for jacobians in sweep.jacobians(width=2 * len(directions)):
        if squares is not None:
            jacobians = jacobians.double()
            squares.add(jacobians)
        features = jacobians.jvp(directions).to(total).flatten(1)
        total += features @ features.mT
    (total,) = data.processes.sum([total])
    return total, sweep.statistics
