"""Samples of the full posterior by solving linear systems, for millions of weights and without a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.processes import ALONE, Processes
from lapwing.errors import UnsupportedError
from lapwing.linalg.krylov import Logdet, solve_samples
from lapwing.linalg.operators import Solution, gram_product
from lapwing.linalg.ridge import Ridge
from lapwing.linalg.stochastic import OBJECTIVES, descend_in_rounds
from lapwing.methods.base import Conformance, Cost, Method, Offer, Requirements, Work, Workload, bytes_text
from lapwing.posteriors.sampled import SampledPosterior, Solver
from lapwing.priors import BoundPrior
from lapwing.problem import Problem
from lapwing.runtime.memory import budget
from lapwing.runtime.settings import NONE, POSITIVE, Rule, integer, is_real, one_of, setting
from lapwing.runtime.threads import generator_or_default
from lapwing.tangent import NetworkDesign, refuse_reordered, refuse_unsteady

TOLERANCE = Rule(
    "a number between 0 and 1, both excluded: the share of a standard deviation by which a sample may be off",
    lambda v: is_real(v) and 0 < v < 1,
)
STOCHASTIC = ("sgd", "sdd")
SOLVERS = ("krylov", "cg", *STOCHASTIC)
BASIS = 320  # rows in a typical Krylov basis
GROWTH = 10.0  # times the cubic root of the number of rows: vectors that are multiplied with the curvature, as measured
VECTORS = 20  # vectors of P numbers that a solve holds for each sample at its peak, as measured, products included
USUAL = 12  # the same on average
SQUARES = 4  # (d, d) matrices that belong to a basis of d rows
LARGEST = 4 * 2**30  # bytes that a basis may take, whatever the budget: with another one samples would be others
SOLVES = 4  # cost of samples whose prior precision is learned, in solves at one precision


@dataclass(frozen=True)
class Sampled(Method):
    r"""Samples of the exact posterior by sample-then-optimise (Antorán et al. 2023).

    Prior noise ζ and data noise ε are drawn, and a linear system turns them into a sample z of the posterior:

    $$ \Lambda z = A^{1/2} \zeta + J^\top R\, \varepsilon / \sqrt\phi, \qquad z \sim N(0, \Lambda^{-1}) $$

    Args:
        num_samples: The number of samples.
        solver: "krylov" builds one block Krylov basis that serves every prior precision and noise; a prior by groups is
            solved by block conjugate gradients. "cg" uses conjugate gradients for every prior. "sgd" and "sdd" solve
            for the leading eigenvectors directly and descend stochastically in all other directions; they take only
            priors with one number for all weights.
        tolerance: The error that a sample may have, in standard deviations, averaged over all directions (bounded by
            the residual). A sample that does not reach it raises ``NumericalError``.
        width: The largest number of rows that the basis starts from, and by which it grows.
        probes: The number of probe vectors for the log-determinant in the evidence.
        steps: The number of Lanczos steps for each probe.
        curvature: "ggn" only.
        objective: For "sgd": "reduced" has the noise in the regulariser, "classic" in the data.
        batch: For "sgd" and "sdd": the number of data in a step.
        epochs: For "sgd" and "sdd": the largest number of passes over the data, for every precision.
        memory: The bytes that a fit and its solves may take, besides what a pass of the network holds for one chunk of
            data. Memory that the samples do not need is used to keep factors between products, and for a larger basis.
            None stands for half of ``lw.memory.budget()`` for factors, and for 4 GiB, or as much as that if it is
            more, for the basis, which the posterior keeps.

    Raises:
        UnsupportedError: If a setting is not one of the above, or ``fit`` needs more than ``memory``.
        NumericalError: If a sample does not reach ``tolerance``.

    Cost: one pass for the Jacobian's factors, then one product with all vectors for each block of the basis.
    Exact when: never, but variances have a relative standard error of sqrt(2 / num_samples), whatever the network.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.numbers import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=Sampled(num_samples=64), prior=1.0).functions(x).std.shape
    torch.Size([2, 1])
    """

    num_samples: int = setting(16, integer())
    solver: str = setting("krylov", one_of(SOLVERS))
    tolerance: float = setting(1e-2, TOLERANCE)
    width: int = setting(16, integer())
    probes: int = setting(8, integer(2))
    steps: int = setting(20, integer())
    curvature: str = setting("ggn", one_of(("ggn",)))
    objective: str = setting("reduced", one_of(OBJECTIVES))
    batch: int = setting(128, integer())
    epochs: int = setting(400, integer())
    memory: float | None = setting(None, POSITIVE | NONE)
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="variances from samples have a sampling error", small=lambda model: {"": Sampled(num_samples=3)}
    )

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> SampledPosterior:
        network = problem.network
        generator = generator_or_default(generator)
        stochastic = self.solver in STOCHASTIC
        if stochastic:
            refuse_groups(self.solver, problem.prior)
        design = self._design(problem, data, self.batch if stochastic else None)
        refuse_unsteady(design, generator)
        if stochastic and design.source is None:  # batches have to stay the same; those kept in memory do
            refuse_reordered(design)
        if problem.prior.needs_curvature:
            problem = problem.with_prior(problem.prior.with_scale(design.diagonal()))
        most = min(data.processes.gather_numbers(max(LARGEST, budget(network.device))))
        settings: dict[str, int] = {"width": self.width, "bytes": most}
        if self.memory is not None:
            settings["bytes"] = 8 * design.size * min(data.processes.gather_numbers(self._most_rows(design)))
        ridge = Ridge.draw(design, self.num_samples, generator, problem.prior.scale, keep=stochastic, **settings)
        problem = problem.with_residual_noise(design.statistics)
        solver = RidgeSolver(self, ridge, data.processes)
        return SampledPosterior(problem, solver, design.statistics, network.theta())

    def cost(self, workload: Workload) -> Cost:
        size, count = workload.weights, self.num_samples
        vectors = max(4 * self.width, int(GROWTH * workload.rows ** (1 / 3)))
        vectors = min(size, workload.rows + 2 * self.width, vectors)
        basis = min(BASIS, vectors)
        fit = Work(workload.repeated_products(vectors, -(-vectors // self.width)))
        along = min(2 * count * workload.forward, workload.jacobians() + workload.along(count))
        peak = 8 * (basis + USUAL * count) * size + workload.jacobian_bytes() + workload.kept
        note = f"{count} samples, {-(-vectors // self.width)} products with the curvature; more if the prior is weak"
        predict, once = Work(workload.forward + along), Work(products=6 * basis**2 * size)
        return workload.cost(8 * count * (size + 1), peak, fit, predict, once, note)

    @classmethod
    def offer(cls, requirements: Requirements) -> Offer:
        """Return as many samples as the budget asks for; they keep to its memory, so kept factors take what is left."""
        unlimited = math.isinf(requirements.memory)
        method = cls(num_samples=requirements.num_samples, memory=None if unlimited else requirements.memory)
        vectors = (BASIS + 2 * requirements.num_samples) * (SOLVES if requirements.learn_prior else 1)
        limit = "" if unlimited else f" in at most {bytes_text(requirements.memory)}"
        work = 2.0 * requirements.rows * requirements.weights * vectors
        kind = f"{requirements.num_samples} samples of the exact" + limit
        return Offer(method, 1, method.needs(requirements.weights, requirements.rows), work, kind)

    def needs(self, size: int, rows: int = 0) -> int:
        """Return the bytes needed for P weights and n C rows.

        They are for the vectors of the samples, the noise of the rows and a typical basis.

        >>> Sampled().needs(1_000_000) / 2**30
        5.24...
        """
        basis = min(BASIS, size)
        return self._vectors(size, rows) + 8 * basis * (size + SQUARES * basis)

    def _vectors(self, size: int, rows: int) -> int:
        """Return the bytes needed without the basis; the quadrature of the evidence keeps the steps of all probes."""
        solve = VECTORS * max(self.num_samples, self.width)
        evidence = self.probes * (self.steps + VECTORS) + 4 * self.num_samples
        return 8 * (max(solve, evidence) * size + self.num_samples * rows)

    def _spare(self, size: int, rows: int = 0) -> int | None:
        """Return the bytes left of ``memory``; None where there is no limit."""
        if self.memory is None:
            return None
        needs = self.needs(size, rows)
        if needs > self.memory:
            raise UnsupportedError(
                f"Sampled() with {self.num_samples} samples of {size} weights needs {needs / 2**20:.0f} MiB; memory is "
                f"{self.memory / 2**20:.0f} MiB. Raise it, lower num_samples, or choose fewer weights."
            )
        return int(self.memory) - needs

    def _design(self, problem: Problem, data: Data, part: int | None) -> NetworkDesign:
        """Return the design, with factors kept between products as far as memory allows."""
        size = problem.network.selection.size
        spare = self._spare(size)
        cache = None if spare is None else spare // 2  # one half for the data, one for their factors
        design = NetworkDesign.build(problem.network, problem.likelihood, data, cache, part=part)
        spare = self._spare(size, design.rows)
        # The number of rows was not known before.
        if spare is not None and not data.processes.all_true(design.nbytes <= spare):
            return replace(design, factors=None)
        return design

    def _most_rows(self, design: NetworkDesign) -> int:
        """Return the largest number of rows d of a basis, d (P + SQUARES d) numbers, in the remaining memory."""
        assert self.memory is not None
        available = (int(self.memory) - self._vectors(design.size, design.rows) - design.nbytes) // 8
        return int(((design.size**2 + 4 * SQUARES * max(0, available)) ** 0.5 - design.size) / (2 * SQUARES))


@dataclass(frozen=True, eq=False)
class RidgeSolver(Solver):
    """A solver for the samples of a problem, which also estimates its log-determinant."""

    settings: Sampled
    ridge: Ridge
    processes: Processes = ALONE

    def solve(self, problem: Problem, start: Tensor | None = None) -> Solution:
        """Return the samples under this prior and noise; ``start`` is an initial guess."""
        solution = self._solve(problem, start)
        return replace(solution, x=self.processes.copy_of_first([solution.x])[0])

    def _solve(self, problem: Problem, start: Tensor | None) -> Solution:
        prior, phi = problem.prior, float(problem.likelihood.dispersion)
        if self.settings.solver == "krylov" and self._shares_scale(prior):
            return self.ridge.samples(float(prior.values), phi, self.settings.tolerance, start)
        if self.settings.solver in STOCHASTIC:
            return self._descend(prior, phi)
        unit = prior.vector.detach().rsqrt()
        guess = None if start is None else start.double() / unit
        solution = solve_samples(
            lambda v: unit * gram_product(self.ridge.design, unit * v) / phi + v,
            self.ridge.prior + unit * self.ridge.back / phi**0.5,
            self.ridge.prior,
            self.settings.tolerance,
            self.ridge.float64_hint,
            guess,
        )
        return replace(solution, x=solution.x * unit)

    def _descend(self, prior: BoundPrior, phi: float) -> Solution:
        """Return the samples by stochastic descent.

        The order of the batches is the same for every prior and noise, so that samples depend on them smoothly.
        """
        settings = self.settings
        if not self._shares_scale(prior):
            refuse_groups(settings.solver, prior)
            raise UnsupportedError(
                f"the samples of {settings.solver!r} were drawn for a prior of another scale; expected the "
                "same. Fit again."
            )
        generator = torch.Generator().manual_seed(self.ridge.seed)
        descend = partial(
            descend_in_rounds, dual=settings.solver == "sdd", objective=settings.objective, epochs=settings.epochs,
            generator=generator, tolerance=settings.tolerance,
        )  # fmt: skip
        return self.ridge.descend(float(prior.values), phi, descend).require_convergence(
            f"Sampled(solver={settings.solver!r})",
            "Raise epochs=... or tolerance=..., take a larger batch=..., raise the prior precision"
            f"{self.ridge.float64_hint}, or use 'krylov'.",
        )

    def logdet(self, problem: Problem) -> Logdet:
        """Return the log-determinant of A⁻¹ Λ, with its standard error."""
        prior, phi = problem.prior, problem.likelihood.dispersion.to(self.ridge.prior.device)
        ridge, shift = self.ridge, prior.values * phi
        if not self._shares_scale(prior):
            if prior.values.requires_grad and torch.is_grad_enabled():
                raise UnsupportedError(
                    f"the evidence of Sampled() has no gradient in the precisions of {type(prior.given).__name__}; "
                    "expected one number for all weights, as isotropic() and g_prior() have. Learn these precisions "
                    "with SampleEM()."
                )
            ridge, shift = self.ridge.rescale(prior.vector.detach()), phi
        ridge.basis_reaching(float(shift.detach()), self.settings.tolerance)  # directions in the basis are exact
        return ridge.logdet(shift, self.settings.probes, self.settings.steps)

    def gamma(self, problem: Problem, samples: Tensor) -> Tensor:
        """Return γ of every weight, estimated from each sample, (K, P). Samples from a basis need no pass.

        The sum over the weights is z G z / φ. Its single terms, and sums of them over a layer, may have either sign. A
        weight therefore gets ζ (ζ - √A z), the part of its prior noise that the data removed, which has the same mean
        and a smaller spread. The difference to the sum is divided equally among the weights.
        """
        from_basis = self.settings.solver == "krylov" and self._shares_scale(problem.prior)
        image = self.ridge.gram(samples) if from_basis else gram_product(self.ridge.design, samples)
        total = (samples * image).sum(1, keepdim=True) / float(problem.likelihood.dispersion)
        zeta = self.ridge.prior
        removed = zeta * (zeta - problem.prior.vector.detach().sqrt() * samples)
        return removed + (total - removed.sum(1, keepdim=True)) / removed.shape[1]

    def _shares_scale(self, prior: BoundPrior) -> bool:
        """Return whether the prior is one number times the diagonal that the basis was built for."""
        if not prior.is_single:
            return False
        scale = self.ridge.scale
        return (prior.scale is None) == (scale is None) and (scale is None or torch.equal(scale, prior.scale))  # type: ignore[arg-type]


def refuse_groups(solver: str, prior: BoundPrior) -> None:
    """Raise unless the prior has one number for all weights, as the stochastic solvers need."""
    if not prior.is_single:
        raise UnsupportedError(
            f"solver {solver!r} with the prior {type(prior.given).__name__}; expected one number for all weights, as "
            "isotropic() and g_prior() have. Use solver='krylov' or 'cg', which take any prior."
        )
