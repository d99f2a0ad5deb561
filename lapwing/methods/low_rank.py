"""The leading eigenvectors of the curvature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from lapwing.curvature.dense import LowRankCurvature
from lapwing.curvature.sweep import refuse_open_noise
from lapwing.data.batches import Data
from lapwing.linalg.krylov import OVERSAMPLE, leading_eigenpairs
from lapwing.linalg.operators import gram_product
from lapwing.methods.base import Conformance, Cost, Exactness, Method, Work, Workload
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.problem import Problem
from lapwing.runtime.settings import POSITIVE, integer, one_of, setting
from lapwing.runtime.threads import generator_or_default
from lapwing.tangent import NetworkDesign


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
        refuse_open_noise(self.curvature, problem.likelihood)
        design = NetworkDesign.build(network, problem.likelihood, data, curvature=self.curvature)
        design = replace(design, exact=True)
        generator = generator_or_default(generator)
        pairs = leading_eigenpairs(
            partial(gram_product, design),
            network.selection.size,
            self.rank,
            block=self.block,
            tolerance=self.tolerance,
            generator=generator,
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
