"""EKFAC: Kronecker eigenvectors with exact eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lapwing.curvature.blocks import FACTOR_LIMIT
from lapwing.curvature.kronecker import SHARINGS, correct_eigenvalues, kronecker_curvature, share_decompositions
from lapwing.curvature.sweep import CURVATURES, DRAWS, Sweep, choose_seeds
from lapwing.data.batches import Data
from lapwing.methods.base import Conformance, Cost, Exactness, KroneckerWork, Method, Work, Workload
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.problem import Problem
from lapwing.runtime.settings import NONE, integer, one_of, setting


@dataclass(frozen=True)
class EKron(Method):
    """The Kronecker eigenbasis of ``Kron`` with the exact diagonal of the curvature in it (EKFAC).

    Args:
        curvature: "ggn", "fisher_mc", "empirical" or None, as in ``Kron``; labels are drawn independently in both
            passes.
        sharing: "expand" or "reduce", the convention for the eigenbasis, as in ``Kron``.
        full_limit: The number of entries up to which the block of a parameter that is not the weight of a linear map
            is a full matrix.
        draws: The number of labels drawn for each datum where the curvature is estimated.
        factor_limit: The width of a layer up to which the basis of its inputs, or outputs, is the eigenbasis of a
            matrix, as in ``Kron``. Above, the basis has as many vectors as there are rows, or the factor is diagonal.

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, for weights that are chosen one by one.

    Cost: two passes over the data; the second forms the rotated Jacobian of each layer whose weights are shared.
    Exact when: wherever ``Kron`` is exact. The trace of every block is always exact.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.gaussian import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=EKron(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    curvature: str | None = setting(None, one_of(CURVATURES) | NONE)
    sharing: str = setting("expand", one_of(SHARINGS))
    full_limit: int = setting(1024, integer(0))
    draws: int = setting(DRAWS, integer())
    factor_limit: int = setting(FACTOR_LIMIT, integer())
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance(
        (
            Exactness(lambda weights, rows: EKron(), "linear", prior="layer"),
            Exactness(lambda weights, rows: EKron(sharing="reduce"), "linear", name="reduce", prior="layer",
                      no_laws="with fewer data than inputs of a layer, its eigenvectors are not unique"),
        )
    )  # fmt: skip

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        network, likelihood = problem.network, problem.likelihood
        seeds = choose_seeds(self.curvature, self.draws, problem, generator, data.processes.rank)
        first = Sweep(network, likelihood, data, seeds, "EKron, bases")
        kron = kronecker_curvature(first, network, self.sharing, self.full_limit, self.factor_limit)
        kron = share_decompositions(kron, data.processes)
        second = Sweep(network, likelihood, data, seeds, "EKron, values")
        corrected = correct_eigenvalues(second, kron)
        return WeightPosterior.fitted(problem, corrected, second.statistics, second.estimate)

    def cost(self, workload: Workload) -> Cost:
        if workload.single:
            return Cost.unsupported("single weights have no Kronecker structure")
        workload = workload.with_curvature(self.curvature, self.draws)
        factors = KroneckerWork(workload, self.full_limit, self.factor_limit)
        diagonals = 8 * workload.weights  # in float64
        peak = workload.jacobian_bytes(formed=True, streams=True) + factors.nbytes + diagonals
        corrected = factors.rotation(workload.seeds, closed=True) + workload.squares
        fit = Work(2 * workload.blockwise + factors.sums + corrected)
        predict = workload.prediction(Work(factors.rotation(workload.outputs) + workload.quadratic))
        note = "; ".join(filter(None, ("two passes", factors.note)))
        return workload.cost(factors.basis_bytes, peak, fit, predict, factors.once, note)
