"""The leading eigenvectors of the curvature."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from lapwing.core.data import Data
from lapwing.core.random import generator_or_default
from lapwing.core.settings import require_integer, require_positive
from lapwing.curvature.low_rank import LowRankCurvature
from lapwing.curvature.sweep import checked_curvature
from lapwing.linalg.design import gram_product
from lapwing.linalg.lanczos import leading_eigenpairs
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.problem import Problem
from lapwing.tangent.design import NetworkDesign


@dataclass(frozen=True)
class LowRank:
    """The ``rank`` leading eigenpairs of the GGN by block Lanczos; the prior everywhere else.

    Never forms a (P, P) matrix: the basis takes max(2 rank, rank + 20) P float64 numbers, a block takes a few times
    its own besides, and the eigenvectors rank P at the end. Directions left out keep their prior variance, so the
    variance of f errs upwards, up to the residual.
    Cost: one pass over the data for each block of ``block`` vectors.
    Exact when: rank is at least the rank of the GGN. ``tolerance`` is the residual of an eigenpair relative
    to the largest eigenvalue at which the iteration stops; the worst one reached is in
    ``posterior.curvature.residual``.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.gaussian import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=LowRank(rank=2), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    rank: int = 32
    block: int = 16
    tolerance: float = 1e-10
    curvature: str = "ggn"

    def __post_init__(self) -> None:
        for name in ("rank", "block"):
            require_integer(name, getattr(self, name))
        require_positive("tolerance", self.tolerance)
        checked_curvature(self.curvature, ("ggn",))

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        network = problem.network
        design = NetworkDesign.build(network, problem.likelihood, data)
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
        curvature = LowRankCurvature(
            pairs.values, pairs.vectors, network.layout, network.selection, float(pairs.residuals.max())
        )
        return WeightPosterior.fitted(problem, curvature, design.statistics)
