"""The exact posterior from the rows of the Jacobian: its cost grows with the data instead of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.curvature.dense import LowRankCurvature
from lapwing.curvature.sweep import refuse_open_noise
from lapwing.data.batches import Data
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.linalg.dense import svd
from lapwing.methods.base import Conformance, Cost, Exactness, Method, Offer, Requirements, Work, Workload
from lapwing.posteriors.weight_space import Sums, SumsData
from lapwing.problem import Problem
from lapwing.runtime.memory import batch_size_for, even_chunks
from lapwing.runtime.settings import integer, one_of, setting
from lapwing.tangent import NetworkDesign, refuse_unsteady

COLUMNS = 2**16  # weights that are rotated at a time


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
        refuse_open_noise(self.curvature, problem.likelihood)
        design = NetworkDesign.build(network, problem.likelihood, data, curvature=self.curvature)
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
