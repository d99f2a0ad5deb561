"""Samples of ridge regression by descent, a part of the design at a time.

The system (XᵀX + s I) z = √s ζ + Xᵀ ε, for K rows of noise at once, is the minimum of two objectives with the same
full gradient,

    L (z) = ½ |X z - ε|² + ½ s |z - ζ/√s|²         ("classic", noise in the data term),
    L'(z) = ½ |X z|²     + ½ s |z - ζ/√s - Xᵀε/s|²  ("reduced", noise in the regulariser),

and z = ζ/√s + Xᵀ a for the minimum a of ½ aᵀ(XXᵀ + s I)a - aᵀ(ε - X ζ/√s), the dual. A step looks at one part of the
design. References: Antorán et al. 2023 (both objectives); Lin et al. 2024 (the dual).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.core.random import normal
from lapwing.linalg.cg import TINY, Solution
from lapwing.linalg.design import Design, Part, back_product, gram_product

OBJECTIVES = ("reduced", "classic")
POWER = 10  # power iterations behind a step
TAIL = 0.1  # share of the steps whose iterates are averaged by sgd
AVERAGED = 100  # the average of sdd reaches back over one in so many of its steps
ADVICE = "Raise the epochs, lower the step, raise the prior precision, or use a Krylov solver."


@runtime_checkable
class Streamed(Protocol):
    """A design that says whether its parts are made anew at every pass, so that their order is not ours to choose."""

    @property
    def streamed(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class Passes:
    """The parts of a design with their rows, pass after pass; in random order unless they are streamed."""

    design: Design
    held: tuple[tuple[Part, slice], ...] | None
    count: int

    @classmethod
    def over(cls, design: Design) -> Passes:
        """Streamed parts are counted, which takes a pass."""
        if isinstance(design, Streamed) and design.streamed:
            return cls(design, None, sum(1 for _ in design))
        held = tuple(_located(design))
        return cls(design, held, len(held))

    def in_order(self) -> Iterator[tuple[Part, slice]]:
        """One pass."""
        yield from _located(self.design) if self.held is None else self.held

    def shuffled(self, epochs: int, generator: torch.Generator | None) -> Iterator[tuple[Part, slice]]:
        """So many passes. Every part comes once in each: what one pass gets wrong, the next ones mend."""
        for _ in range(epochs):
            if self.held is None:
                yield from _located(self.design)
                continue
            device = None if generator is None else generator.device
            for i in torch.randperm(self.count, generator=generator, device=device).tolist():
                yield self.held[i]

    def step(self, shift: float, momentum: float, generator: torch.Generator | None, dual: bool = False) -> float:
        """A length of steps that is stable with this momentum: 1 / (λ + (λ_S - λ) / (1 - momentum)).

        λ is the largest eigenvalue of XᵀX + s I and λ_S that of the worst part, counted as often as there are parts, as
        its gradient is. For one part this is Nesterov's 1 / λ; more than that is noise, of which momentum sums up
        1 / (1 - momentum) steps.
        """
        whole, part = self.largest(generator)
        part = self.count * part + (self.count * shift if dual else shift)
        whole = whole + shift
        return 1 / (whole + max(0.0, part - whole) / (1 - momentum))

    def largest(self, generator: torch.Generator | None) -> tuple[float, float]:
        """The largest eigenvalues of XᵀX and of X_S X_Sᵀ over the parts S, by power iterations: from below."""
        like = torch.empty(0, dtype=torch.float64, device=self.design.like.device)
        v, u = normal((1, self.design.size), generator, like), normal((1, self.design.rows), generator, like)
        whole, parts = 0.0, 0.0
        for _ in range(POWER):
            v, image, parts = v / v.norm().clamp_min(TINY), torch.zeros_like(v), 0.0
            for part, rows in self.in_order():
                image += part.back(part.forward(v))
                mine = part.forward(part.back(u[:, rows] / u[:, rows].norm().clamp_min(TINY))).double()
                u[:, rows] = mine
                parts = max(parts, float(mine.norm()))
            v, whole = image, float(image.norm())
        return max(whole, parts), parts


@dataclass(frozen=True, eq=False)
class Perturbed:
    """The system (XᵀX + s I) z = √s ζ + Xᵀ ε, with ζ (K, P) and ε (K, rows) standard normal: z ~ N(0, H⁻¹)."""

    design: Design
    zeta: Tensor
    eps: Tensor
    shift: float

    def __post_init__(self) -> None:
        rows, expected = len(self.zeta), (self.design.size, self.design.rows)
        if self.zeta.shape != (rows, expected[0]) or self.eps.shape != (rows, expected[1]):
            raise ValueError(
                f"noise of the shapes {tuple(self.zeta.shape)} and {tuple(self.eps.shape)} for a design of "
                f"{expected[1]} rows and {expected[0]} columns; expected (K, {expected[0]}) and (K, {expected[1]})."
            )
        if not self.shift > 0:
            raise ValueError(f"the shift is {self.shift:g}; expected a number above zero.")

    @property
    def prior(self) -> Tensor:
        """ζ / √s: samples of the prior, where every descent starts."""
        return self.zeta.double() / self.shift**0.5

    @cached_property
    def rhs(self) -> Tensor:
        """√s ζ + Xᵀ ε, which is s θ_n in the reduced objective. One pass."""
        return self.shift**0.5 * self.zeta.double() + back_product(self.design, self.eps)

    def objective(self, name: str) -> Objective:
        if name not in OBJECTIVES:
            raise ValueError(f"objective is {name!r}; expected one of {', '.join(OBJECTIVES)}.")
        if name == "reduced":
            return Objective(None, self.rhs, self.shift)
        return Objective(self.eps, self.shift**0.5 * self.zeta.double(), self.shift)

    def solution(self, z: Tensor, iterations: int, tolerance: float) -> Solution:
        """With the residuals as they are, by one product."""
        left = self.rhs - gram_product(self.design, z) - self.shift * z
        return Solution(z, left.norm(dim=1) / self.rhs.norm(dim=1).clamp_min(TINY), iterations, tolerance)


@dataclass(frozen=True, eq=False)
class Objective:
    """½ |X z - target|² + ½ s |z|² - z · pull: where the noise of a sample sits."""

    target: Tensor | None  # (K, rows), in the data term; None is nought
    pull: Tensor  # (K, P), in the regulariser, whose gradient is never estimated
    shift: float

    def fit(self, z: Tensor, part: Part, rows: slice) -> Tensor:
        """The gradient of a part's share of the data term."""
        moved = part.forward(z)
        return part.back(moved if self.target is None else moved - self.target[:, rows]).double()

    def rest(self, z: Tensor) -> Tensor:
        """The gradient of the other terms."""
        return self.shift * z - self.pull

    def estimate(self, z: Tensor, part: Part, rows: slice, count: int) -> Tensor:
        """The gradient from one of ``count`` parts; its mean over them is the gradient, whatever their sizes."""
        return count * self.fit(z, part, rows) + self.rest(z)


def gradient(system: Perturbed, z: Tensor, objective: str) -> Tensor:
    """At z (K, P), from all data: the same for both objectives.

    >>> from lapwing.linalg.design import MatrixDesign
    >>> system = Perturbed(MatrixDesign(torch.eye(2).double()), torch.ones(1, 2), torch.tensor([[1.0, 3.0]]), 4.0)
    >>> gradient(system, torch.ones(1, 2).double(), "classic"), gradient(system, torch.ones(1, 2).double(), "reduced")
    (tensor([[2., 0.]], dtype=torch.float64), tensor([[2., 0.]], dtype=torch.float64))
    """
    mine = system.objective(objective)
    return sum((mine.fit(z, part, rows) for part, rows in _located(system.design)), start=mine.rest(z))


def gradient_variance(system: Perturbed, z: Tensor, objective: str) -> Tensor:
    """(K,): the trace of the covariance of the gradient from one part, drawn at random, at every row of z.

    With M parts and their gradients g_i it is M Σ |g_i|² - |Σ g_i|²; a design in parts of one datum gives the variance
    of the estimate from a single datum.
    """
    mine = system.objective(objective)
    total, squares, count = torch.zeros_like(z), z.new_zeros(len(z)), 0
    for part, rows in _located(system.design):
        found = mine.fit(z, part, rows)
        total += found
        squares += found.square().sum(1)
        count += 1
    return count * squares - total.square().sum(1)


def sgd(
    design: Design,
    zeta: Tensor,
    eps: Tensor,
    shift: float,
    *,
    objective: str = "reduced",
    epochs: int = 100,
    step: float | None = None,
    momentum: float = 0.9,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-2,
    truncated: bool = False,
) -> Solution:
    """Stochastic gradients with Nesterov's momentum, steps that fall linearly to zero, and an average over the last.

    A pass takes every part once. Where there are several, their gradients differ even at the solution, so digits come
    slowly: the error falls with the step. The residuals are the true ones; above the tolerance they are an error,
    unless ``truncated`` says that any iterate will do. Cost: two products with X for each pass, 4 K P numbers.

    >>> from lapwing.linalg.design import MatrixDesign
    >>> noise = torch.ones(1, 2).double(), torch.tensor([[1.0, 3.0]]).double()
    >>> sgd(MatrixDesign(torch.eye(2).double()), *noise, 4.0).x  # (2 + noise) / 5
    tensor([[0.6000, 1.0000]], dtype=torch.float64)
    """
    _refuse(epochs, momentum)
    system, passes = Perturbed(design, zeta, eps, shift), Passes.over(design)
    mine = system.objective(objective)
    step = passes.step(shift, momentum, generator) if step is None else step
    steps, z, averaged = epochs * passes.count, system.prior, 0
    velocity, mean = torch.zeros_like(z), torch.zeros_like(z)
    for t, (part, rows) in enumerate(passes.shuffled(epochs, generator)):
        ahead = z + momentum * velocity
        velocity *= momentum
        velocity -= step * (1 - t / steps) * mine.estimate(ahead, part, rows, passes.count)
        z += velocity
        if t >= (1 - TAIL) * steps - 1:
            averaged += 1
            mean += (z - mean) / averaged
    found = system.solution(mean, steps, tolerance)
    return found if truncated else found.settled("stochastic gradient descent", ADVICE)


@dataclass(frozen=True, eq=False)
class Dual:
    """Dual coefficients a (K, rows) with their shadow u = Xᵀ a (K, P)."""

    a: Tensor
    u: Tensor


def dual_descent(
    system: Perturbed,
    passes: Passes,
    *,
    epochs: int,
    step: float,
    momentum: float = 0.9,
    generator: torch.Generator | None = None,
) -> Dual:
    """The geometric average of the dual coefficients, (XXᵀ + s I) a = ε - X ζ/√s, and its shadow.

    The gradient for a part's coefficients is exact and vanishes at the solution, part by part: no noise is left there.
    """
    share = min(1.0, AVERAGED / (epochs * passes.count))
    count, prior = system.design.rows, system.prior
    # Coefficients and shadow side by side: momentum and averages are linear, so what is done to one is to the other.
    point = torch.cat([torch.zeros_like(system.eps, dtype=torch.float64), torch.zeros_like(prior)], 1)
    velocity, mean = torch.zeros_like(point), torch.zeros_like(point)
    for part, rows in passes.shuffled(epochs, generator):
        ahead = point + momentum * velocity
        fitted = part.forward(prior + ahead[:, count:]).double()
        change = step * passes.count * (fitted + system.shift * ahead[:, rows] - system.eps[:, rows])
        velocity *= momentum
        velocity[:, rows] -= change
        velocity[:, count:] -= part.back(change)
        point += velocity
        mean.lerp_(point, share)
    return Dual(mean[:, :count], mean[:, count:])


def sdd(
    design: Design,
    zeta: Tensor,
    eps: Tensor,
    shift: float,
    *,
    epochs: int = 100,
    step: float | None = None,
    momentum: float = 0.9,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-2,
    truncated: bool = False,
) -> Solution:
    """Stochastic dual descent: as ``sgd`` in cost and in what it refuses, but its error falls geometrically.

    >>> from lapwing.linalg.design import MatrixDesign
    >>> noise = torch.ones(1, 2).double(), torch.tensor([[1.0, 3.0]]).double()
    >>> sdd(MatrixDesign(torch.eye(2).double(), part=1), *noise, 4.0, tolerance=1e-6).x
    tensor([[0.6000, 1.0000]], dtype=torch.float64)
    """
    _refuse(epochs, momentum)
    system, passes = Perturbed(design, zeta, eps, shift), Passes.over(design)
    step = passes.step(shift, momentum, generator, dual=True) if step is None else step
    dual = dual_descent(system, passes, epochs=epochs, step=step, momentum=momentum, generator=generator)
    found = system.solution(system.prior + dual.u, epochs * passes.count, tolerance)
    return found if truncated else found.settled("stochastic dual descent", ADVICE)


def _located(design: Design) -> Iterator[tuple[Part, slice]]:
    """The parts of one pass, with the rows that they hold."""
    start = 0
    for part in design:
        yield part, slice(start, start + part.rows)
        start += part.rows


def _refuse(epochs: int, momentum: float) -> None:
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}; expected at least one pass.")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum:g}; expected 0 <= momentum < 1.")
