"""Stochastic descent for posterior samples of ridge regression: each step uses one part of the design.

``sgd`` minimises one of the objectives of a ``Perturbed`` system. ``sdd`` works on the dual: the solution is
z = ζ/√s + Xᵀ a for the minimum a of ½ aᵀ(XXᵀ + s I)a - aᵀ(ε - X ζ/√s). Both return the residual that they reached;
whether it is small enough is for the caller to decide (``Solution.require_convergence``).
References: Antorán et al. 2023 (objectives); Lin et al. 2024 (dual).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.passes import Passes
from lapwing.linalg.perturbed import Perturbed
from lapwing.linalg.solution import Solution

TAIL = 0.1  # share of the steps whose iterates sgd averages
AVERAGED = 100  # sdd averages geometrically over about one in so many of its steps


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
