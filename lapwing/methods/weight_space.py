"""Gaussian posteriors over the weights, by the structure of their curvature.

The full covariance: from a (P, P) matrix (``Full``), from the rows of the Jacobian (``KernelSpace``), or from its
leading eigenvectors (``LowRank``). Curvature by blocks: the diagonal, Kronecker factors (``Kron``, KFAC), and their
eigenvectors with exact values (``EKron``, EKFAC).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.curvature.base import CURVATURES, DEFAULT_DRAWS, Sweep, accumulate, choose_seeds, refuse_open_noise
from lapwing.curvature.blocks import FACTOR_LIMIT, DiagonalSum, most_rows
from lapwing.curvature.dense import LowRankCurvature, full_curvature, full_hessian
from lapwing.curvature.kronecker import SHARINGS, blockwise_sum, correct_eigenvalues, kronecker_curvature
from lapwing.data.batches import Data
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.linalg.dense import svd
from lapwing.linalg.krylov import OVERSAMPLE, leading_eigenpairs
from lapwing.linalg.operators import gram_product
from lapwing.methods.base import BlockWork, Conformance, Cost, Exactness, Method, Offer, Requirements, Work, Workload
from lapwing.posteriors.weight_space import Sums, SumsData, WeightPosterior
from lapwing.problem import Problem
from lapwing.runtime.memory import RESULT_FACTOR, batch_size_for, budget, even_chunks
from lapwing.runtime.settings import NONE, POSITIVE, integer, one_of, setting
from lapwing.runtime.threads import generator_or_default
from lapwing.tangent import NetworkDesign, refuse_unsteady

ALWAYS = 30_000  # weights that are accepted on every device, 7 GB for each matrix
MATRICES = 4  # of P² numbers that a fit and its first prediction hold: H, Λ, its factor, and room for the Jacobians
COLUMNS = 2**16  # weights that are rotated at a time
HALVES = 0.625  # share of the multiplications of a Gram matrix that is computed by halves
LIMITS = (FACTOR_LIMIT, 4096, 2048, 1024, 512)  # of factors that ``Auto`` tries, until they are within its budget
# Multiplications of ``Auto`` for the cube of a matrix's size: ``python -m benchmarks.factors`` measures them.
DECOMPOSITION = {"cpu": 7, "gpu": 33}


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
    draws: int = setting(DEFAULT_DRAWS, integer())
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
        return max(ALWAYS, math.isqrt(RESULT_FACTOR * budget(device) // (8 * MATRICES)))

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
    r"""The posterior of ``Full``, computed from the nC rows of X = Rᵀ J: for few data and many weights.

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
    draws: int = setting(DEFAULT_DRAWS, integer())
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
class FactorWork:
    """The work of one Kronecker factor of a linear map."""

    nbytes: int  # sums are float64, rows have the network's dtype
    directions: int  # parts of its eigenbasis: one for each row, and one for the rest
    basis: int = 0  # numbers of the eigenbasis; the axes of a diagonal have none
    cubes: float = 0.0
    sums: float = 0.0  # multiplications to sum it over all data
    rotation: int = 0  # multiplications to rotate one vector into the eigenbasis
    note: str = ""

    @classmethod
    def of(cls, side: str, size: int, rows: int, summed: float, limit: int, itemsize: int) -> FactorWork:
        """Return the work for a factor of at most so many rows, the sum of ``summed`` outer products."""
        if rows <= most_rows(size, limit):
            numbers = rows * size
            return cls(itemsize * numbers, rows + 1, numbers, rows**3 + 0.4 * rows**2 * size, 0.0, 2 * numbers)
        if size <= limit:
            return cls(8 * size**2, size, size**2, float(size) ** 3, summed * size**2, size**2)
        return cls(8 * size, size, note=f"{side} factor diagonal: {size:,} > {limit:,}")


@dataclass(frozen=True)
class KroneckerWork:
    """The work of the Kronecker factors of all linear maps, and of the blocks that are not linear maps."""

    workload: Workload
    full_limit: int  # entries up to which a block that is not a linear map is a matrix
    factor_limit: int  # size up to which a factor is a matrix

    @cached_property
    def factors(self) -> list[tuple[BlockWork, int, FactorWork, FactorWork]]:
        """The linear maps with their numbers of groups, and the factors of inputs and outputs of a group."""
        work, factors = self.workload, []
        kept = self.factor_limit, work.itemsize
        for block in work.blocks:
            if block.form is not None:
                groups, d_out, d_in = block.form
                uses, seeds = work.data * block.positions, 1 if block.closed else work.seeds
                counts = FactorWork(8 * d_in, d_in)  # of the rows of a table
                inp = counts if block.lookup else FactorWork.of("input", d_in, uses, HALVES * uses, *kept)
                rows = uses * (d_out if block.closed else seeds)
                # Only half of a matrix is summed, except over positions that lie apart in memory.
                summed = (1.0 if block.is_shared else HALVES) * uses * seeds
                factors.append((block, groups, inp, FactorWork.of("output", d_out, rows, summed, *kept)))
        return factors

    @property
    def nbytes(self) -> int:
        """Bytes of all factors, and of the blocks that are not linear maps."""
        return sum(groups * (inp.nbytes + out.nbytes) for _, groups, inp, out in self.factors) + self._other_bytes

    @property
    def basis_bytes(self) -> int:
        """Bytes of the eigenbases and of one eigenvalue for each pair of directions, and of the other blocks."""
        numbers = sum(
            groups * (inp.basis + out.basis + inp.directions * out.directions) for _, groups, inp, out in self.factors
        )
        return self.workload.itemsize * numbers + self._other_bytes

    @property
    def _others(self) -> list[int]:
        return [block.size for block in self.workload.blocks if block.form is None]

    @property
    def _other_bytes(self) -> int:
        """Bytes of blocks that are not linear maps: a float64 matrix, or a diagonal in the network's dtype."""
        item = self.workload.itemsize
        return sum(8 * size**2 if size <= self.full_limit else item * size for size in self._others)

    @property
    def sums(self) -> float:
        """Multiplications that sum all factors and the other blocks, for one datum."""
        factors = sum(groups * (inp.sums + out.sums) for _, groups, inp, out in self.factors)
        full = sum(size**2 for size in self._others if size <= self.full_limit)
        return factors / self.workload.data + self.workload.seeds * full

    @property
    def cubes(self) -> float:
        """Cubes of the sizes of all factors and full blocks, which are decomposed."""
        others = sum(size**3 for size in self._others if size <= self.full_limit) / 3
        return sum(groups * (inp.cubes + out.cubes) for _, groups, inp, out in self.factors) + others

    def rotation(self, seeds: int, closed: bool = False) -> int:
        """Return the multiplications that rotate the gradients of a datum into the eigenbases.

        ``closed`` takes the closed form of the last layer.
        """
        return sum(
            groups * block.positions * (inp.rotation + (1 if closed and block.closed else seeds) * out.rotation)
            for block, groups, inp, out in self.factors
        )

    @property
    def once(self) -> Work:
        """The decompositions, and the weights that predictions of many outputs draw once."""
        draws = sum(block.size * (block.form[1] + block.form[2]) for block in self.workload.blocks if block.form)
        return Work(self.workload.pairs * draws, cubes=self.cubes)

    @property
    def note(self) -> str:
        """The factors that would be a diagonal; empty if none."""
        listed = list(dict.fromkeys(side.note for _, _, *sides in self.factors for side in sides if side.note))
        return "; ".join(listed[:3]) + (f"; and {len(listed) - 3} more" if len(listed) > 3 else "")


@dataclass(frozen=True)
class _Kronecker(Method):
    """The settings of Kronecker factors."""

    curvature: str | None = setting(None, one_of(CURVATURES) | NONE)
    sharing: str = setting("expand", one_of(SHARINGS))
    full_limit: int = setting(1024, integer(0))
    draws: int = setting(DEFAULT_DRAWS, integer())
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
        return curvature.share_decompositions(data.processes), statistics, estimate

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
        kron = kron.share_decompositions(data.processes)
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
