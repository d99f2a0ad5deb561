"""Stochastic descent for posterior samples of ridge regression: each step uses one part of the design.

``sgd`` minimises one of the objectives of a ``Perturbed`` system. ``sdd`` works on the dual: the solution is
z = ζ/√s + Xᵀ a for the minimum a of ½ aᵀ(XXᵀ + s I)a - aᵀ(ε - X ζ/√s). Both return the residual that they reached;
whether it is small enough is for the caller to decide (``Solution.require_convergence``).
References: Antorán et al. 2023 (objectives); Lin et al. 2024 (dual).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.random import normal
from lapwing.linalg.design import Design, Part, located_parts
from lapwing.linalg.perturbed import Perturbed
from lapwing.linalg.solution import TINY, Solution

TAIL = 0.1  # share of the steps whose iterates sgd averages
AVERAGED = 100  # sdd averages geometrically over about one in so many of its steps
POWER = 10  # power iterations for the largest eigenvalues


def sgd(
    system: Perturbed,
    *,
    objective: str = "reduced",
    epochs: int = 100,
    step: float | None = None,
    momentum: float = 0.9,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-2,
) -> Solution:
    """Solve a system by stochastic gradients with Nesterov's momentum, linearly decreasing steps and a final average.

    With several parts the gradients differ even at the solution, so the error falls slowly, with the step length.
    ``step`` None measures a stable one. Cost: two products with X for each pass, 4 K P numbers.

    >>> from lapwing.linalg.design import MatrixDesign
    >>> noise = torch.ones(1, 2).double(), torch.tensor([[1.0, 3.0]]).double()
    >>> sgd(Perturbed(MatrixDesign(torch.eye(2).double()), *noise, shift=4.0)).x  # (2 + noise) / 5
    tensor([[0.6000, 1.0000]], dtype=torch.float64)
    """
    _refuse_settings(epochs, momentum)
    passes = Passes.over(system.design)
    function = system.objective(objective)
    step = passes.step(system.shift, momentum, generator) if step is None else step
    steps, z, averaged = epochs * passes.count, system.prior, 0
    velocity, mean = torch.zeros_like(z), torch.zeros_like(z)
    for t, (part, rows) in enumerate(passes.shuffled(epochs, generator)):
        ahead = z + momentum * velocity
        velocity *= momentum
        velocity -= step * (1 - t / steps) * function.estimate(ahead, part, rows, passes.count)
        z += velocity
        if t >= (1 - TAIL) * steps - 1:
            averaged += 1
            mean += (z - mean) / averaged
    return system.solution(mean, steps, tolerance)


@dataclass(frozen=True, eq=False)
class Dual:
    """Dual coefficients a (K, rows) together with u = Xᵀ a (K, P)."""

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
    """Return the geometric average of the dual coefficients on their way to (XXᵀ + s I) a = ε - X ζ/√s.

    The gradient for the coefficients of one part is exact and vanishes at the solution, so no noise remains there.
    """
    share = min(1.0, AVERAGED / (epochs * passes.count))
    count, prior = system.design.rows, system.prior
    # One tensor for a and u = Xᵀ a: momentum and average are linear, so they keep the relation between the two.
    point = torch.cat([torch.zeros_like(system.eps, dtype=torch.float64), torch.zeros_like(prior)], 1)
    velocity, mean = torch.zeros_like(point), torch.zeros_like(point)
    for part, rows in passes.shuffled(epochs, generator):
        ahead = point + momentum * velocity
        outputs = part.forward(prior + ahead[:, count:]).double()
        change = step * passes.count * (outputs + system.shift * ahead[:, rows] - system.eps[:, rows])
        velocity *= momentum
        velocity[:, rows] -= change
        velocity[:, count:] -= part.back(change)
        point += velocity
        mean.lerp_(point, share)
    return Dual(mean[:, :count], mean[:, count:])


def sdd(
    system: Perturbed,
    *,
    epochs: int = 100,
    step: float | None = None,
    momentum: float = 0.9,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-2,
) -> Solution:
    """Solve a system by stochastic dual descent, whose error falls geometrically; the cost is that of ``sgd``.

    >>> from lapwing.linalg.design import MatrixDesign
    >>> noise = torch.ones(1, 2).double(), torch.tensor([[1.0, 3.0]]).double()
    >>> sdd(Perturbed(MatrixDesign(torch.eye(2).double(), part=1), *noise, shift=4.0), tolerance=1e-6).x
    tensor([[0.6000, 1.0000]], dtype=torch.float64)
    """
    _refuse_settings(epochs, momentum)
    passes = Passes.over(system.design)
    step = passes.step(system.shift, momentum, generator, dual=True) if step is None else step
    dual = dual_descent(system, passes, epochs=epochs, step=step, momentum=momentum, generator=generator)
    return system.solution(system.prior + dual.u, epochs * passes.count, tolerance)


def _refuse_settings(epochs: int, momentum: float) -> None:
    """Raise unless there is at least one pass and 0 <= momentum < 1."""
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}; expected at least one pass.")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum:g}; expected 0 <= momentum < 1.")


@dataclass(frozen=True, eq=False)
class Passes:
    """The parts of a design with their rows, for repeated passes; in random order unless the design is streamed."""

    design: Design
    parts: tuple[tuple[Part, slice], ...] | None  # None if the design is streamed
    count: int

    @classmethod
    def over(cls, design: Design) -> Passes:
        """Return the passes over a design. A streamed design takes one pass to count its parts."""
        if design.streamed:
            return cls(design, None, sum(1 for _ in design))
        parts = tuple(located_parts(design))
        return cls(design, parts, len(parts))

    def in_order(self) -> Iterator[tuple[Part, slice]]:
        """Yield the parts of one pass in the order of the design."""
        yield from located_parts(self.design) if self.parts is None else self.parts

    def shuffled(self, epochs: int, generator: torch.Generator | None) -> Iterator[tuple[Part, slice]]:
        """Yield the parts of several passes; every part comes once in each pass."""
        for _ in range(epochs):
            if self.parts is None:
                yield from located_parts(self.design)
                continue
            device = None if generator is None else generator.device
            for i in torch.randperm(self.count, generator=generator, device=device).tolist():
                yield self.parts[i]

    def step(self, shift: float, momentum: float, generator: torch.Generator | None, dual: bool = False) -> float:
        """Return a step length that is stable with this momentum: 1 / (λ + (λ_S - λ) / (1 - momentum)).

        λ is the largest eigenvalue of XᵀX + s I and λ_S that of the worst part, times the number of parts because its
        gradient is multiplied by that. For one part this is Nesterov's 1 / λ; the difference λ_S - λ is due to noise,
        which momentum accumulates over 1 / (1 - momentum) steps.
        """
        whole, part = self.largest(generator)
        part = self.count * part + (self.count * shift if dual else shift)
        whole = whole + shift
        return 1 / (whole + max(0.0, part - whole) / (1 - momentum))

    def largest(self, generator: torch.Generator | None) -> tuple[float, float]:
        """Return the largest eigenvalues of XᵀX and of X_S X_Sᵀ over the parts S, by power iterations: from below."""
        like = torch.empty(0, dtype=torch.float64, device=self.design.like.device)
        v, u = normal((1, self.design.size), generator, like), normal((1, self.design.rows), generator, like)
        whole, worst = 0.0, 0.0
        for _ in range(POWER):
            v, image, worst = v / v.norm().clamp_min(TINY), torch.zeros_like(v), 0.0
            for part, rows in self.in_order():
                image += part.back(part.forward(v))
                u[:, rows] = part.forward(part.back(u[:, rows] / u[:, rows].norm().clamp_min(TINY))).double()
                worst = max(worst, float(u[:, rows].norm()))
            v, whole = image, float(image.norm())
        return max(whole, worst), worst
