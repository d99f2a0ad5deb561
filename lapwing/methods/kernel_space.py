"""The exact posterior by way of the data: cost in the number of data instead of weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.errors import NumericalError, UnsupportedError
from lapwing.curvature.design import NetworkDesign, refuse_unsteady
from lapwing.curvature.low_rank import LowRankCurvature
from lapwing.curvature.sweep import checked_curvature
from lapwing.posteriors.problem import Problem
from lapwing.posteriors.weight_space import WeightPosterior

COLUMNS = 2**16  # weights that are turned at a time


@dataclass(frozen=True)
class KernelSpace:
    r"""The same posterior as ``Full``, from the (nC, nC) kernel K = Rᵀ J Jᵀ R: for few data and many weights.

    K = V S Vᵀ gives the GGN its eigenvectors, U = S^-½ Vᵀ Rᵀ J, and one eigendecomposition serves the evidence, the
    variances and the samples of every prior precision and noise. ``limit`` is the largest nC that is tried.

    Cost: (nC)² P for the kernel, (nC)³ for its eigenvalues; stores nC vectors of P weights in float64.
    Exact when: always.
    """

    limit: int = 8192
    curvature: str = "ggn"

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        checked_curvature(self.curvature, ("ggn",))
        network = problem.network
        design = NetworkDesign.build(network, problem.likelihood, data)
        if design.rows > self.limit:
            raise UnsupportedError(
                f"KernelSpace() over {design.rows} rows (data times outputs) needs {8 * design.rows**2 / 2**30:.1f} "
                f"GiB and their cube in time; the limit is {self.limit}. Use Full(), Kron() or Sampled(), or raise "
                "KernelSpace(limit=...)."
            )
        refuse_unsteady(design, generator)
        values, vectors = eigenpairs(design)
        curvature = LowRankCurvature(values, vectors, network.layout, network.selection)
        return WeightPosterior.fitted(problem, curvature, design.statistics)


def eigenpairs(design: NetworkDesign) -> tuple[Tensor, Tensor]:
    """The eigenvalues of the GGN that are not nought (r,), descending, and their eigenvectors (r, P)."""
    rows = design.whole()
    matrix = rows @ rows.mT
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError("the kernel of the data is not finite; check the data and the network for overflow.")
    values, turn = torch.linalg.eigh(matrix)
    values, turn = values.flip(0), turn.flip(1)
    # Below the rounding of the kernel's entries an eigenvalue is noise, and its vector with it.
    real = values > 10 * len(values) * torch.finfo(torch.float64).eps * values[0].clamp_min(1e-300)
    values, turn = values[real], turn[:, real]
    if len(values) == 0:  # the outputs do not depend on the weights: a vector of noughts stands for none
        return values.new_zeros(1), values.new_zeros(1, design.size)
    for columns in rows.split(COLUMNS, 1):  # in place: nC vectors of P weights are held once
        columns[: len(values)] = (turn.mT @ columns) / values.sqrt()[:, None]
    return values, rows[: len(values)]
