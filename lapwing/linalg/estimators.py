"""Random estimates with their errors: traces and diagonals of operators."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.random import normal, uniform
from lapwing.linalg.operators import Product, applied
from lapwing.linalg.orthogonal import orthonormal_rows


@dataclass(frozen=True, eq=False)
class Estimate:
    """``value`` with its standard ``error`` over independent ``probes``, and the products it took.

    ``bias`` bounds what no number of probes would average away (a quadrature with few nodes); zero where there is none.
    """

    value: Tensor
    error: Tensor
    probes: int
    products: int
    bias: Tensor

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper ends that hold the truth with this probability: Student's t on either side of the bias.

        As far as the probes' numbers are normal. A few eigenvalues that dominate skew them, and 95 % may be 93 % with a
        dozen probes: deflate or sketch those.
        """
        half = student(level, self.probes - 1) * self.error + self.bias
        return self.value - half, self.value + half


def averaged(parts: Tensor, products: int, *, exact: Tensor | float = 0.0, bias: Tensor | float = 0.0) -> Estimate:
    """The estimate from independent unbiased ``parts`` (probes, ...), besides what is known exactly."""
    value = exact + parts.mean(0)
    error = parts.std(0) / len(parts) ** 0.5
    return Estimate(value, error, len(parts), products, torch.as_tensor(bias).to(value).expand_as(value))


def signs(probes: int, size: int, generator: torch.Generator | None, device: torch.device | None) -> Tensor:
    """Rademacher rows (probes, size), float64; one row alone has no standard error and is refused."""
    if probes < 2:
        raise ValueError(f"an estimate with a standard error needs at least two probes, not {probes}.")
    like = torch.empty(0, dtype=torch.float64, device=device)
    return torch.where(uniform((probes, size), generator, like) < 0.5, -1.0, 1.0).to(like)


def trace(
    product: Product,
    size: int,
    probes: int,
    *,
    generator: torch.Generator | None = None,
    sketch: int = 0,
    device: torch.device | None = None,
) -> Estimate:
    """The trace of an operator by Hutchinson's estimator; with a ``sketch`` of so many rows, by Hutch++.

    Hutch++ takes the trace on the range of the sketch exactly and looks with the probes at the rest only: the error
    falls like 1/probes instead of its root where the spectrum decays. Given the sketch the probes are independent, so
    the standard error is an honest one. Products: one, or two of which the last has sketch + probes rows.
    Reference: Meyer, Musco, Musco & Woodruff 2021.

    >>> a = torch.diag(torch.tensor([4.0, 1.0, 0.5], dtype=torch.float64))
    >>> found = trace(lambda v: v @ a, size=3, probes=4)  # exact for a diagonal operator
    >>> float(found.value), float(found.error)
    (5.5, 0.0)
    """
    rows = signs(probes, size, generator, device)
    basis = _range(product, size, sketch, generator, rows)
    rest = rows - (rows @ basis.mT) @ basis
    image = applied(product, torch.cat([basis, rest]))
    known = (image[: len(basis)] * basis).sum()
    return averaged((image[len(basis) :] * rest).sum(1), 1 + (sketch > 0), exact=known)


def diagonal(
    product: Product,
    size: int,
    probes: int,
    *,
    generator: torch.Generator | None = None,
    sketch: int = 0,
    device: torch.device | None = None,
) -> Estimate:
    """The diagonal (P,) of an operator, z ⊙ A z over Rademacher rows z; a ``sketch`` takes its range out exactly.

    One number's error is the root of the sum of its row's squared other entries over the probes. Products as in
    ``trace``. Reference: Bekas, Kokiopoulou & Saad 2007.

    >>> a = torch.diag(torch.tensor([4.0, 1.0, 0.5], dtype=torch.float64))
    >>> diagonal(lambda v: v @ a, size=3, probes=2).value
    tensor([4.0000, 1.0000, 0.5000], dtype=torch.float64)
    """
    rows = signs(probes, size, generator, device)
    basis = _range(product, size, sketch, generator, rows)
    image = applied(product, torch.cat([basis, rows]))
    known, moved = (image[: len(basis)] * basis).sum(0), image[len(basis) :]
    return averaged(rows * (moved - (moved @ basis.mT) @ basis), 1 + (sketch > 0), exact=known)


def _range(product: Product, size: int, sketch: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """An orthonormal basis of the images of random rows."""
    if sketch == 0:
        return like[:0]
    image = applied(product, normal((min(sketch, size), size), generator, like))
    return orthonormal_rows(image, cut=1e-12 * float(image.norm()))[1]


def student(level: float, degrees: int) -> float:
    """t with P(|T| ≤ t) = level for Student's t, by bisection on the angle whose tangent is t/√degrees.

    >>> round(student(0.95, 9), 4)
    2.2622
    """
    if not 0 < level < 1 or degrees < 1:
        raise ValueError(f"no interval of level {level:g} with {degrees} degrees of freedom; expected 0 < level < 1.")
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return math.tan(low) * degrees**0.5


def _within(angle: float, degrees: int) -> float:
    """P(|T| ≤ √degrees · tan angle), a finite sum (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    cosine, odd = math.cos(angle), degrees % 2
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))
