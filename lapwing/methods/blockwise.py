"""Curvature by blocks: the diagonal, Kronecker factors (KFAC), and their eigenvectors with exact values (EKFAC)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lapwing.curvature.base import CURVATURES, DRAWS, Sweep, accumulate, choose_seeds
from lapwing.curvature.blocks import FACTOR_LIMIT, DiagonalSum
from lapwing.curvature.kronecker import (
    SHARINGS,
    blockwise_sum,
    correct_eigenvalues,
    kronecker_curvature,
    share_decompositions,
)
from lapwing.data.batches import Data
from lapwing.methods.base import (
    Conformance,
    Cost,
    Exactness,
    KroneckerWork,
    Method,
    Offer,
    Requirements,
    Work,
    Workload,
)
from lapwing.posteriors.weight_space import Sums, SumsData, WeightPosterior
from lapwing.problem import Problem
from lapwing.runtime.settings import NONE, integer, one_of, setting

LIMITS = (FACTOR_LIMIT, 4096, 2048, 1024, 512)  # of factors that ``Auto`` tries, until they are within its budget
# Multiplications of ``Auto`` for the cube of a matrix's size: ``python -m benchmarks.factors`` measures them.
DECOMPOSITION = {"cpu": 7, "gpu": 33}


@dataclass(frozen=True)
class Diagonal(SumsData, Method):
    """The exact diagonal of the GGN: the smallest and fastest curvature, without correlations between weights.

    Args:
        curvature: "ggn" (exact), "fisher_mc" (an estimate from gradients at labels drawn from the model), "empirical"
            (from gradients at the targets, see docs/methods/weight_space.md), or None: exact up to 64 outputs of a
            sample, C or T C, and estimated above. The last linear layer is exact for all but "empirical".
        draws: The number of labels drawn for each datum where the curvature is estimated. The error falls as one over
            the root of data times draws; ``posterior.findings`` states it.

    Raises:
        UnsupportedError: If a setting is not one of the above.

    Cost: one forward pass and a backward pass for each of the C outputs, or for each draw; none for the last linear
    layer. P numbers.
    Exact when: the GGN is diagonal, as in a network with one weight for each output.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.numbers import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=Diagonal(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    curvature: str | None = setting(None, one_of(CURVATURES) | NONE)
    draws: int = setting(DRAWS, integer())
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance((Exactness(lambda weights, rows: Diagonal(), "orthogonal"),))

    def sum_data(self, problem: Problem, data: Data, generator: torch.Generator | None) -> Sums:
        network = problem.network
        compute = lambda sweep: blockwise_sum(sweep, network, [DiagonalSum(block, network) for block in network.layout])
        seeds = choose_seeds(self.curvature, self.draws, problem, generator, data.processes.rank)
        return accumulate(compute, problem, data, seeds, "Diagonal")

    def cost(self, workload: Workload) -> Cost:
        workload, size = workload.with_curvature(self.curvature, self.draws), workload.weights
        fit, predict = Work(workload.blockwise + workload.squares), workload.prediction(Work(workload.quadratic))
        peak = workload.jacobian_bytes(formed=True, streams=True) + 8 * size
        return workload.cost(workload.itemsize * size, peak, fit, predict)

    @classmethod
    def offer(cls, requirements: Requirements) -> Offer:
        """Return the fallback for weights that are chosen one by one."""
        return Offer(cls(), 3)


@dataclass(frozen=True)
class _Kronecker(Method):
    """The settings of Kronecker factors."""

    curvature: str | None = setting(None, one_of(CURVATURES) | NONE)
    sharing: str = setting("expand", one_of(SHARINGS))
    full_limit: int = setting(1024, integer(0))
    draws: int = setting(DRAWS, integer())
    factor_limit: int = setting(FACTOR_LIMIT, integer())
    spans_processes: ClassVar[bool] = True

    def cost(self, workload: Workload) -> Cost:
        if workload.single:
            return Cost.unsupported("single weights have no Kronecker structure")
        return self._cost_of(self._work(workload))

    def _work(self, workload: Workload) -> KroneckerWork:
        """Return what the factors of this curvature take."""
        return KroneckerWork(workload.with_curvature(self.curvature, self.draws), self.full_limit, self.factor_limit)

    def _cost_of(self, factors: KroneckerWork) -> Cost:
        """Return the cost, given what the factors take."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kron(SumsData, _Kronecker):
    """Kronecker-factored curvature over all layers (KFAC); the default.

    A parameter that is not the weight of a linear map gets its own block: a full matrix up to ``full_limit`` entries,
    a diagonal above.

    Args:
        curvature: "ggn" (exact), "fisher_mc" (an estimate from gradients at labels drawn from the model), "empirical"
            (from gradients at the targets, see docs/methods/weight_space.md), or None: exact up to 64 outputs of a
            sample, C or T C, and estimated above. The last linear layer is exact for all but "empirical".
        sharing: How to treat a weight that is used at many positions (pixels, tokens, time steps). "expand" treats
            positions as further data; "reduce" first sums the gradients and averages the inputs over them.
        full_limit: The number of entries up to which the block of such a parameter is a full matrix.
        draws: The number of labels drawn for each datum where the curvature is estimated. The error falls as one over
            the root of data times draws; ``posterior.findings`` states it.
        factor_limit: The width of a layer up to which a factor is a matrix. A wider one is kept as its rows if they
            are few, which is exact, and else as its diagonal, an approximation that ``posterior.summary()`` reports.

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, for weights that are chosen one by one.

    Cost of the fit: one forward pass, a backward pass without weight gradients for each of the C outputs (C - 1 for
    softmax; times T for token-level outputs) or for each draw, and the Gram matrices. The last linear layer takes no
    backward pass.
    Exact when: one linear layer with a Gaussian likelihood; one datum within each block without sharing.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.numbers import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=Kron(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    conformance: ClassVar[Conformance] = Conformance(
        (
            Exactness(lambda weights, rows: Kron(), "linear", prior="input"),
            Exactness(lambda weights, rows: Kron(sharing="reduce"), "linear", name="reduce", prior="input"),
        )
    )

    def sum_data(self, problem: Problem, data: Data, generator: torch.Generator | None) -> Sums:
        limits = self.full_limit, self.factor_limit
        compute = lambda sweep: kronecker_curvature(sweep, problem.network, self.sharing, *limits)
        seeds = choose_seeds(self.curvature, self.draws, problem, generator, data.processes.rank)
        curvature, statistics, estimate = accumulate(compute, problem, data, seeds, "Kron")
        return share_decompositions(curvature, data.processes), statistics, estimate

    def _cost_of(self, factors: KroneckerWork) -> Cost:
        workload = factors.workload
        peak = workload.jacobian_bytes(streams=True) + factors.basis_bytes
        fit = Work(workload.blockwise + factors.sums)
        predict = workload.prediction(Work(factors.rotation(workload.outputs) + workload.quadratic))
        return workload.cost(factors.nbytes, peak, fit, predict, factors.once, factors.note)

    @classmethod
    def offer(cls, requirements: Requirements) -> Offer | None:
        """Return the fallback for whole layers, with the widest factors that the budget allows.

        Their decompositions may take what the pass over the data leaves of the time, or as long as the pass itself.
        """
        if requirements.single:
            return None
        if requirements.workload is None:
            return Offer(cls(), 2)
        for limit in LIMITS:
            method = cls(factor_limit=limit)
            factors, one_pass = method._work(requirements.workload), method.cost(requirements.workload).fit.total
            memory = factors.nbytes + factors.basis_bytes
            decompositions = factors.cubes * DECOMPOSITION["gpu" if requirements.gpu else "cpu"]
            if memory <= requirements.memory and decompositions <= max(requirements.work - one_pass, one_pass):
                break
        total = one_pass + decompositions
        if memory > requirements.memory or total > requirements.work:
            return Offer(method, 2)
        kind = "Kronecker factors" + ("" if limit == FACTOR_LIMIT else f" with factor_limit={limit}")
        return Offer(method, 2, memory, total, kind)


@dataclass(frozen=True)
class EKron(_Kronecker):
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
    >>> from lapwing.likelihoods.numbers import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=EKron(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

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

    def _cost_of(self, factors: KroneckerWork) -> Cost:
        workload = factors.workload
        diagonals = 8 * workload.weights  # in float64
        peak = workload.jacobian_bytes(formed=True, streams=True) + factors.nbytes + diagonals
        corrected = factors.rotation(workload.seeds, closed=True) + workload.squares
        fit = Work(2 * workload.blockwise + factors.sums + corrected)
        predict = workload.prediction(Work(factors.rotation(workload.outputs) + workload.quadratic))
        note = "; ".join(filter(None, ("two passes", factors.note)))
        return workload.cost(factors.basis_bytes, peak, fit, predict, factors.once, note)
