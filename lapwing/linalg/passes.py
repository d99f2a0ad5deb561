"""Passes over the parts of a design, in random order, and step lengths for descent on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lapwing.core.random import normal
from lapwing.linalg.design import Design, Part, located_parts
from lapwing.linalg.residuals import TINY

POWER = 10  # power iterations for the largest eigenvalues


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
