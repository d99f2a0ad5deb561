"""The exact posterior by way of the data: cost in the number of data instead of weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.settings import require_integer
from lapwing.curvature.low_rank import LowRankCurvature
from lapwing.curvature.sweep import checked_curvature
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.problem import Problem
from lapwing.tangent.design import NetworkDesign, refuse_unsteady

COLUMNS = 2**16  # weights that are turned at a time


@dataclass(frozen=True)
class KernelSpace:
    r"""The same posterior as ``Full``, from the nC rows of X = Rᵀ J: for few data and many weights.

    X = V S^½ U gives the GGN its eigenvalues S and eigenvectors U, and one decomposition serves the evidence, the
    variances and the samples of every prior precision and noise. It is of X and not of the kernel X Xᵀ, which knows
    singular values only to the root of the rounding. ``limit`` is the largest nC that is tried.

    Cost: (nC)² P for a triangle as large as the kernel, (nC)³ for its singular values; stores nC vectors of P weights
    in float64.
    Exact when: always.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.gaussian import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=KernelSpace(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    limit: int = 8192
    curvature: str = "ggn"

    def __post_init__(self) -> None:
        require_integer("limit", self.limit)
        checked_curvature(self.curvature, ("ggn",))

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
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
    small = rows.new_empty(0, len(rows))  # Xᵀ = Q small, without Q
    for columns in rows.split(COLUMNS, 1):
        small = torch.linalg.qr(torch.cat([small, columns.mT]), mode="r").R
    if not bool(torch.isfinite(small.square().sum())):
        raise NumericalError("the kernel of the data is not finite; check the data and the network for overflow.")
    _, singular, turn = torch.linalg.svd(small, full_matrices=False)
    # Below the rounding of the rows a singular value is noise, and its vector with it.
    real = singular > len(rows) * torch.finfo(torch.float64).eps * singular[0]
    singular, turn = singular[real], turn[real]
    if len(singular) == 0:  # the outputs do not depend on the weights: a vector of noughts stands for none
        return singular.new_zeros(1), singular.new_zeros(1, design.size)
    for columns in rows.split(COLUMNS, 1):  # in place: nC vectors of P weights are held once
        columns[: len(singular)] = (turn @ columns) / singular[:, None]
    return singular.square(), rows[: len(singular)]
