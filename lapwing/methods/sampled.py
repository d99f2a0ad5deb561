"""Samples of the full posterior by solving linear systems: millions of weights, no matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.random import generator_or_default
from lapwing.core.settings import is_real, require_integer, require_positive
from lapwing.curvature.sweep import checked_curvature
from lapwing.errors import UnsupportedError
from lapwing.linalg.design import gram_product
from lapwing.linalg.logdet import Logdet
from lapwing.linalg.perturbed import OBJECTIVES
from lapwing.linalg.ridge import Ridge
from lapwing.linalg.sample_solve import solve_samples
from lapwing.linalg.solution import Solution
from lapwing.linalg.stochastic import sdd, sgd
from lapwing.posteriors.sampled import SampledPosterior
from lapwing.priors.gaussian import SINGLE, Prior
from lapwing.problem import Problem
from lapwing.tangent.design import NetworkDesign, refuse_reordered, refuse_unsteady

STOCHASTIC = ("sgd", "sdd")
SOLVERS = ("krylov", "cg", *STOCHASTIC)
BASIS = 320  # rows in a typical Krylov basis
VECTORS = 20  # of P numbers, that a solve holds for each sample at its peak, as measured; products included
SQUARES = 4  # of d rows by d, that belong to a basis


@dataclass(frozen=True)
class Sampled:
    r"""Sample-then-optimise: draw prior and data noise, solve for where the posterior puts it (Antorán et al. 2023).

    $$ \Lambda z = A^{1/2} \zeta + J^\top R\, \varepsilon / \sqrt\phi, \qquad z \sim N(0, \Lambda^{-1}) $$

    ``solver="krylov"`` (default) builds one block Krylov basis, from at most ``width`` rows, that serves every prior
    precision and noise; a prior by groups is solved by block conjugate gradients at its precisions, and "cg" does so
    for every prior. ``tolerance`` is the error that a sample may have, in standard deviations and in the mean over all
    directions (a bound, by the residual); a sample that does not reach it is an error, not an answer. The evidence has
    its log-determinant by ``probes`` of ``steps`` Lanczos steps.

    "sgd" and "sdd" descend on ``batch`` data at a time, for ``epochs`` passes at every precision, where a prior has one
    number; ``objective`` is where "sgd" has the noise, "reduced" in the regulariser or "classic" in the data.

    ``memory`` is how many bytes a fit and its solves may take, besides what a pass of the network holds for one chunk
    of data: what is left beside the vectors of the samples goes to factors that are kept between products and to a
    larger basis. None stands for 2 GiB of factors and 4 GiB of basis, or a third of what is free on a GPU for each.

    Cost: one pass for the Jacobian's factors, then one product with all vectors for each block of the basis.
    Exact when: never, but variances have a relative standard error of sqrt(2 / num_samples), whatever the network.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.gaussian import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=Sampled(num_samples=64), prior=1.0).functions(x).std.shape
    torch.Size([2, 1])
    """

    num_samples: int = 16
    solver: str = "krylov"
    tolerance: float = 1e-2
    width: int = 16
    probes: int = 8
    steps: int = 20
    curvature: str = "ggn"
    objective: str = "reduced"
    batch: int = 128
    epochs: int = 400
    memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_samples", "width", "steps", "batch", "epochs"):
            require_integer(name, getattr(self, name))
        require_integer("probes", self.probes, least=2)
        if self.memory is not None:
            require_positive("memory", self.memory)
        if not is_real(self.tolerance) or not 0 < self.tolerance < 1:
            raise UnsupportedError(
                f"tolerance is {self.tolerance!r:.80}; expected a number between 0 and 1, both excluded: the share of "
                "a standard deviation by which a sample may be off."
            )
        checked_curvature(self.curvature, ("ggn",))
        if self.solver not in SOLVERS:
            raise UnsupportedError(f"solver is {self.solver!r}; expected one of {', '.join(SOLVERS)}.")
        if self.objective not in OBJECTIVES:
            raise UnsupportedError(f"objective is {self.objective!r}; expected one of {', '.join(OBJECTIVES)}.")

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> SampledPosterior:
        network = problem.network
        generator = generator_or_default(generator)
        stochastic = self.solver in STOCHASTIC
        if stochastic:
            refuse_groups(self.solver, problem.prior)
        design = self._design(problem, data, self.batch if stochastic else None)
        refuse_unsteady(design, generator)
        if stochastic and design.source is None:  # parts of the data have to stay what they were; those kept do
            refuse_reordered(design)
        if problem.prior.needs_curvature:
            problem = problem.with_prior(problem.prior.scaled(design.diagonal()))
        settings: dict[str, int] = {"width": self.width}
        if self.memory is not None:
            settings["bytes"] = 8 * design.size * self._most_rows(design)
        elif network.device.type == "cuda":  # a basis may take a third of what is free there
            settings["bytes"] = max(4 * 2**30, torch.cuda.mem_get_info(network.device)[0] // 3)
        ridge = Ridge.drawn(design, self.num_samples, generator, problem.prior.scale, keep=stochastic, **settings)
        problem = problem.with_residual_noise(design.statistics)
        return SampledPosterior(problem, RidgeSolver(self, ridge), design.statistics, network.theta())

    def needs(self, size: int, rows: int = 0) -> int:
        """Bytes for P weights and n C rows: the vectors of the samples, the noise of the rows and a typical basis."""
        basis = min(BASIS, size)
        return self._vectors(size, rows) + 8 * basis * (size + SQUARES * basis)

    def _vectors(self, size: int, rows: int) -> int:
        """As ``needs``, without the basis. It grows by ``width`` rows; quadrature keeps the steps of all probes."""
        solve = VECTORS * max(self.num_samples, self.width)
        evidence = self.probes * (self.steps + VECTORS) + 4 * self.num_samples
        return 8 * (max(solve, evidence) * size + self.num_samples * rows)

    def _spare(self, size: int, rows: int = 0) -> int | None:
        """Bytes that are left beside what is needed; None where there is no limit."""
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
        """With as much kept between products as there is room for."""
        size = problem.network.selection.size
        spare = self._spare(size)
        cache = None if spare is None else spare // 2  # for the data, and for their factors
        design = NetworkDesign.build(problem.network, problem.likelihood, data, cache, part=part)
        spare = self._spare(size, design.rows)
        if spare is not None and design.nbytes > spare:  # how many rows have noise was not known before
            return replace(design, held=None)
        return design

    def _most_rows(self, design: NetworkDesign) -> int:
        """The largest basis, d (P + SQUARES d) numbers, in the bytes that nothing else takes."""
        assert self.memory is not None
        left = (int(self.memory) - self._vectors(design.size, design.rows) - design.nbytes) // 8
        return int(((design.size**2 + 4 * SQUARES * max(0, left)) ** 0.5 - design.size) / (2 * SQUARES))


@dataclass(frozen=True, eq=False)
class RidgeSolver:
    """Solves for the samples of a problem, and estimates its log-determinant."""

    settings: Sampled
    ridge: Ridge

    def solved(self, problem: Problem, start: Tensor | None = None) -> Solution:
        """The samples under this prior and noise, from a start near them where there is one."""
        prior, phi = problem.prior, float(problem.likelihood.dispersion)
        if self.settings.solver == "krylov" and self._shared(prior):
            return self.ridge.samples(float(prior.values), phi, self.settings.tolerance, start)
        if self.settings.solver in STOCHASTIC:
            return self._descended(prior, phi)
        unit = prior.vector.detach().rsqrt()
        near = None if start is None else start.double() / unit
        found = solve_samples(
            lambda v: unit * gram_product(self.ridge.design, unit * v) / phi + v,
            self.ridge.prior + unit * self.ridge.back / phi**0.5,
            self.ridge.prior,
            self.settings.tolerance,
            self.ridge.float64_hint,
            near,
        )
        return replace(found, x=found.x * unit)

    def _descended(self, prior: Prior, phi: float) -> Solution:
        """By parts of the data; their order is the same for every prior and noise, so that samples move smoothly."""
        mine = self.settings
        if not self._shared(prior):
            refuse_groups(mine.solver, prior)
            raise UnsupportedError(
                f"the samples of {mine.solver!r} were drawn for a prior of another scale; expected the same. Fit again."
            )
        generator = torch.Generator().manual_seed(self.ridge.seed)
        solve = partial(sgd, objective=mine.objective) if mine.solver == "sgd" else sdd
        descend = partial(solve, epochs=mine.epochs, generator=generator, tolerance=mine.tolerance)
        return self.ridge.descended(float(prior.values), phi, descend).require_convergence(
            f"Sampled(solver={mine.solver!r})",
            "Raise epochs=... or tolerance=..., take a larger batch=..., raise the prior precision, or use 'krylov'.",
        )

    def logdet(self, problem: Problem) -> Logdet:
        """Of A⁻¹ Λ, with its standard error."""
        prior, phi = problem.prior, problem.likelihood.dispersion.to(self.ridge.prior.device)
        ridge, shift = self.ridge, prior.values * phi
        if not self._shared(prior):
            if prior.values.requires_grad and torch.is_grad_enabled():
                raise UnsupportedError(
                    f"the evidence of Sampled() has no slope in a prior of the kind {prior.kind!r}; expected one "
                    f"number for all weights ({' or '.join(SINGLE)}). Learn these precisions with SampleEM()."
                )
            ridge, shift = self.ridge.rescaled(prior.vector.detach()), phi
        ridge.reaching(float(shift.detach()), self.settings.tolerance)  # what a basis has is exact
        return ridge.logdet(shift, self.settings.probes, self.settings.steps)

    def gamma(self, problem: Problem, samples: Tensor) -> Tensor:
        """γ of every weight, from each sample, (K, P). Samples that a basis gave need no pass.

        Their sum is z G z / φ. Single terms of that have the signs of chance, and so have sums over a layer: a weight
        gets ζ (ζ - √A z) instead, what the data took of its prior noise, with the same mean and a small spread, and an
        equal share of what is left to the sum.
        """
        based = self.settings.solver == "krylov" and self._shared(problem.prior)
        image = self.ridge.gram(samples) if based else gram_product(self.ridge.design, samples)
        total = (samples * image).sum(1, keepdim=True) / float(problem.likelihood.dispersion)
        zeta = self.ridge.prior
        taken = zeta * (zeta - problem.prior.vector.detach().sqrt() * samples)
        return taken + (total - taken.sum(1, keepdim=True)) / taken.shape[1]

    def _shared(self, prior: Prior) -> bool:
        """Whether the prior is one number times the diagonal that the basis was built for."""
        if prior.kind not in SINGLE:
            return False
        mine = self.ridge.scale
        return (prior.scale is None) == (mine is None) and (mine is None or torch.equal(mine, prior.scale))  # type: ignore[arg-type]


def refuse_groups(solver: str, prior: Prior) -> None:
    """Only a prior with one number for all weights is solved for by descent."""
    if prior.kind not in SINGLE:
        raise UnsupportedError(
            f"solver {solver!r} with a prior of the kind {prior.kind!r}; expected one number for all weights "
            f"({' or '.join(SINGLE)}). Use solver='krylov' or 'cg', which take any prior."
        )
