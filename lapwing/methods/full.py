"""The full covariance: from a (P, P) matrix, from the rows of the Jacobian, or from its leading eigenvectors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.curvature.base import CURVATURES, DRAWS, accumulate, choose_seeds, refuse_open_noise
from lapwing.curvature.dense import LowRankCurvature, full_curvature, full_hessian
from lapwing.data.batches import Data
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.linalg.dense import svd
from lapwing.linalg.krylov import OVERSAMPLE, leading_eigenpairs
from lapwing.linalg.operators import gram_product
from lapwing.methods.base import HALVES, Conformance, Cost, Exactness, Method, Offer, Requirements, Work, Workload
from lapwing.posteriors.weight_space import Sums, SumsData, WeightPosterior
from lapwing.problem import Problem
from lapwing.runtime.memory import BEYOND, batch_size_for, budget, even_chunks
from lapwing.runtime.settings import NONE, POSITIVE, integer, one_of, setting
from lapwing.runtime.threads import generator_or_default
from lapwing.tangent import NetworkDesign, refuse_unsteady

ALWAYS = 30_000  # weights that are accepted on every device, 7 GB for each matrix
MATRICES = 4  # of P² numbers that a fit and its first prediction hold: H, Λ, its factor, and room for the Jacobians
COLUMNS = 2**16  # weights that are rotated at a time


@dataclass(frozen=True)
class Full(SumsData, Method):
    """The exact (P, P) precision, for small networks, last layers and subnetworks; the reference for other methods.

    Args:
        curvature: "ggn" (exact), "fisher_mc" (an estimate from gradients at labels drawn from the model), "empirical"
            (the sum of g gᵀ over gradients at the targets, see docs/methods/weight_space.md) or "hessian"
            (the Hessian of the loss, which need not be positive; a precision that is not positive definite raises
            ``NumericalError``).
        limit: The largest number of weights P that is accepted; the matrix takes 8 P² bytes. None accepts 30,000, and
            more where four such matrices fit into four times the byte budget of the device (``lw.memory``), by default
            about what is free: 65,536 on a GPU with 140 GiB.
        draws: The number of labels drawn for each datum, for "fisher_mc".

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, if there are more weights than ``limit``.

    Cost: one forward pass, a backward pass for each of the C outputs and P² for each of their rows; P³ to factorise.
    "hessian" takes P backward passes for each batch instead.
    Exact when: always, for the GGN or the Hessian; "fisher_mc" on average.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.numbers import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=Full(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    curvature: str = setting("ggn", one_of((*CURVATURES, "hessian")))
    limit: int | None = setting(None, integer() | NONE)
    draws: int = setting(DRAWS, integer())
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance((Exactness(lambda weights, rows: Full(), "network"),))

    def sum_data(self, problem: Problem, data: Data, generator: torch.Generator | None) -> Sums:
        network = problem.network
        size, most = network.selection.size, self._most(network.device)
        if size > most:
            raise UnsupportedError(
                f"Full() over {size} weights needs {8 * size**2 / 2**30:.0f} GiB; the limit is {most} weights. "
                "Use Kron(), LowRank() or Diagonal(), weights=last_layer, or raise Full(limit=...)."
            )
        if self.curvature == "hessian":
            return *full_hessian(network, problem.likelihood, data), None
        compute = lambda sweep: full_curvature(sweep, network)
        seeds = choose_seeds(self.curvature, self.draws, problem, generator, data.processes.rank)
        return accumulate(compute, problem, data, seeds, "Full")

    def _most(self, device: torch.device) -> int:
        """Return the largest number of weights that is accepted on a device."""
        if self.limit is not None:
            return self.limit
        return max(ALWAYS, math.isqrt(BEYOND * budget(device) // (8 * MATRICES)))

    def cost(self, workload: Workload) -> Cost:
        size, most = workload.weights, self._most(workload.device)
        if size > most:
            return Cost.unsupported(f"over {most} weights: choose fewer")
        workload = workload.with_curvature(self.curvature, self.draws)
        if workload.lone_head:
            fit, covariance = Work(workload.blockwise, 0.4 * size**2), Work(products=0.5 * size**2)
        else:
            formed = workload.blockwise + workload.whole(workload.seeds)
            fit = Work(formed, HALVES * workload.seeds * size**2)
            covariance = Work(workload.whole(workload.outputs), 0.5 * workload.outputs * size**2)
        peak, once = workload.jacobian_bytes() + 16 * size**2, Work(cubes=size**3 / 3)
        return workload.cost(8 * size**2, peak, fit, workload.prediction(covariance), once)

    @classmethod
    def offer(cls, requirements: Requirements) -> Offer:
        """Return the exact method of P²: the matrix and its factor are held, and the factorisation takes P³ / 3."""
        size = requirements.weights
        return Offer(cls(limit=size), 0, 16.0 * size**2, float(requirements.rows) * size**2 + 0.3 * size**3, "exact")


@dataclass(frozen=True)
class KernelSpace(SumsData, Method):
    r"""The same posterior as ``Full``, from the nC rows of X = Rᵀ J: for few data and many weights.

    X = V S^½ U gives the eigenvalues S and eigenvectors U of the GGN. One decomposition serves the evidence, the
    variances and the samples for every prior precision and noise. X is decomposed and not the kernel X Xᵀ, because the
    kernel has the singular values only to the square root of the rounding error.

    Args:
        limit: The largest nC (data times outputs) that is accepted.
        curvature: "ggn", or "empirical" (from gradients at the targets, see docs/methods/weight_space.md).

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, if nC is above ``limit``.

    Cost: (nC)² P for a triangle as large as the kernel, (nC)³ for its singular values; stores nC vectors of P weights
    in float64.
    Exact when: always.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.numbers import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=KernelSpace(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    limit: int = setting(8192, integer())
    curvature: str = setting("ggn", one_of(("ggn", "empirical")))
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance((Exactness(lambda weights, rows: KernelSpace(), "network"),))

    def sum_data(self, problem: Problem, data: Data, generator: torch.Generator | None) -> Sums:
        network = problem.network
        design = _design(problem, data, self.curvature)
        if design.rows > self.limit:
            raise UnsupportedError(
                f"KernelSpace() over {design.rows} rows (data times outputs) needs {8 * design.rows**2 / 2**30:.1f} "
                f"GiB and their cube in time; the limit is {self.limit}. Use Full(), Kron() or Sampled(), or raise "
                "KernelSpace(limit=...)."
            )
        refuse_unsteady(design, generator)
        rows = design.whole()
        ((values, vectors),) = data.processes.run_jobs([partial(eigenpairs, rows)], [1.0], network.device)
        curvature = LowRankCurvature(values, vectors, network.layout, network.selection)
        return curvature, design.statistics, None

    def cost(self, workload: Workload) -> Cost:
        rows, size = workload.rows, workload.weights
        if rows > self.limit:
            return Cost.unsupported(f"{rows} rows, over {self.limit}: fewer data")
        rank = min(rows, size)
        fit = Work(workload.repeated_products(0, 1), workload.whole(workload.outputs))
        once = Work(products=rows * rank * size, cubes=2 * rows * rank * size + 9 * rank**3)
        predict = workload.low_rank(rank)
        peak = 8 * (rank * size + 2 * rows * rank) + workload.jacobian_bytes() + workload.kept
        return workload.cost(8 * rank * (size + 1), peak, fit, predict, once, f"{rows} rows")

    @classmethod
    def offer(cls, requirements: Requirements) -> Offer:
        """Return the exact method of (nC)²: nC vectors of P numbers and two matrices of size nC are held."""
        rows, size = requirements.rows, requirements.weights
        work = 2.0 * rows**2 * size + 9.0 * rows**3
        return Offer(cls(limit=rows), 0, 8.0 * rows * (size + 2 * rows), work, "exact")


def _design(problem: Problem, data: Data, curvature: str) -> NetworkDesign:
    """Return the rows of the Jacobian for this curvature; raise for a noise that the curvature cannot leave open."""
    refuse_open_noise(curvature, problem.likelihood)
    return NetworkDesign.build(problem.network, problem.likelihood, data, curvature=curvature)


def eigenpairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the non-zero eigenvalues of XᵀX (r,), descending, and their eigenvectors (r, P), in the memory of X."""
    small = rows.new_empty(0, len(rows))  # Xᵀ = Q small, without Q
    # No fewer columns than rows, or there would be more work than for all columns at once.
    parts = list(even_chunks(rows.shape[1], max(len(rows), batch_size_for(COLUMNS, 8 * 4 * len(rows), rows.device))))
    for part in parts:
        small = torch.linalg.qr(torch.cat([small, rows[:, part].mT]), mode="r").R
    if not bool(torch.isfinite(small.square().sum())):
        raise NumericalError("the kernel of the data is not finite; check the data and the network for overflow.")
    _, singular, rotation = svd(small)
    # A singular value below the rounding error of the rows is noise, and so is its vector.
    significant = singular > len(rows) * torch.finfo(torch.float64).eps * singular[0]
    singular, rotation = singular[significant], rotation[significant]
    if len(singular) == 0:  # the outputs do not depend on the weights: return one zero vector
        return singular.new_zeros(1), singular.new_zeros(1, rows.shape[1])
    for part in parts:  # in place, so that nC vectors of P weights are held only once
        rows[: len(singular), part] = (rotation @ rows[:, part]) / singular[:, None]
    return singular.square(), rows[: len(singular)]


@dataclass(frozen=True)
class LowRank(Method):
    """The ``rank`` leading eigenpairs of the GGN by block Lanczos, and the prior in all other directions.

    Directions left out keep their prior variance, so the variance of f is too large rather than too small, up to the
    residual. A (P, P) matrix is never formed.

    Args:
        rank: The number of eigenpairs.
        block: The number of vectors that are multiplied by the GGN at a time.
        tolerance: The residual of an eigenpair, relative to the largest eigenvalue, at which the iteration stops. The
            largest residual reached is ``posterior.curvature.residual``.
        curvature: "ggn", or "empirical" (from gradients at the targets, see docs/methods/weight_space.md).

    Raises:
        UnsupportedError: If a setting is not a positive number, or ``curvature`` is not one of the above.

    Cost: one pass over the data for each block. The basis takes max(2 rank, rank + 20) P float64 numbers, a block a
    few times its size besides, and the eigenvectors rank P in the end.
    Exact when: ``rank`` is at least the rank of the GGN.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.numbers import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=LowRank(rank=2), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    rank: int = setting(32, integer())
    block: int = setting(16, integer())
    tolerance: float = setting(1e-10, POSITIVE)
    curvature: str = setting("ggn", one_of(("ggn", "empirical")))
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance(
        (Exactness(lambda weights, rows: LowRank(rank=weights), "network"),), small=lambda model: {"": LowRank(rank=3)}
    )

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        network = problem.network
        design = replace(_design(problem, data, self.curvature), exact=True)
        pairs = leading_eigenpairs(
            partial(gram_product, design),
            network.selection.size,
            self.rank,
            block=self.block,
            tolerance=self.tolerance,
            generator=generator_or_default(generator),
            device=network.device,
        )
        values, vectors = data.processes.copy_of_first([pairs.values, pairs.vectors])
        curvature = LowRankCurvature(values, vectors, network.layout, network.selection, float(pairs.residuals.max()))
        return WeightPosterior.fitted(problem, curvature, design.statistics)

    def cost(self, workload: Workload) -> Cost:
        size = workload.weights
        rank = min(self.rank, size)
        basis = min(size, workload.rows, max(2 * rank, rank + OVERSAMPLE))
        times = -(-basis // self.block) + 3  # products that find the basis, look for copies, and check the operator
        fit = Work(workload.repeated_products(0, times), workload.products(basis + self.block))
        once = Work(products=6 * basis**2 * size)
        peak = 8 * (basis + 4 * self.block) * size + workload.jacobian_bytes() + workload.kept
        return workload.cost(8 * rank * (size + 1), peak, fit, workload.low_rank(rank), once, f"rank {rank}")
