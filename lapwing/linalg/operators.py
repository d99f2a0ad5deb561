"""Symmetric operators known by their products, checks that they are symmetric, and solutions of systems with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.random import normal
from lapwing.errors import NumericalError

Product = Callable[[Tensor], Tensor]  # rows (K, P) -> rows (K, P), each row independent of the others

EPS = torch.finfo(torch.float64).eps
TINY = torch.finfo(torch.float64).tiny
CAUSES = (
    "Put the network in evaluation mode (dropout and batch statistics change what it computes), remove random "
    "augmentation and shuffling that drops data, and use deterministic kernels."
)


def identity(rows: Tensor) -> Tensor:
    """Return the rows as they are: the product of the identity."""
    return rows


def applied(product: Product, rows: Tensor) -> Tensor:
    """Return the images of the rows in float64; raise if they are not finite or have another shape."""
    image = product(rows)
    if image.shape != rows.shape:
        raise NumericalError(
            f"an operator mapped rows of shape {tuple(rows.shape)} to {tuple(image.shape)}; expected the same shape."
        )
    if not bool(torch.isfinite(image).all()):
        raise NumericalError("an operator's products are not finite; check the data and the weights.")
    return image.double()


def refuse_asymmetric_images(rows: Tensor, images: Tensor, tolerance: float = 1e-3) -> None:
    """Raise if u·Av and v·Au differ for two of the rows, whose images are given.

    The tolerance is relative to |u| |Av| + |v| |Au|. Takes no product; a single row cannot show asymmetry.
    """
    images = images / images.abs().max().clamp_min(torch.finfo(images.dtype).tiny)
    inner = rows @ images.mT
    sizes = rows.norm(dim=1)[:, None] * images.norm(dim=1)
    gap = (inner - inner.mT).abs() / (sizes + sizes.mT).clamp_min(torch.finfo(inner.dtype).tiny)
    if float(gap.max()) > tolerance:
        raise NumericalError(
            f"an operator is not symmetric: u·Av and v·Au differ by {float(gap.max()):.3g} of their size; expected "
            f"{tolerance:g}. {CAUSES}"
        )


def refuse_asymmetric(
    product: Product,
    size: int,
    *,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-4,
    device: torch.device | None = None,
) -> None:
    """Raise unless u·Av = v·Au for a pair of random vectors and a second product equals the first.

    The second product gets the rows in reverse order, so an operator that mixes its rows is refused as well. The
    tolerance is relative to |Au| + |Av|. Cost: two products of two rows.

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> refuse_asymmetric(lambda v: v @ a, 2)
    """
    pair = normal((2, size), generator, torch.empty(0, dtype=torch.float64, device=device))
    first, second = applied(product, pair), applied(product, pair.flip(0)).flip(0)
    scale = float(first.norm(dim=1).sum())
    change = float((first - second).norm())
    if change > tolerance * scale:
        raise NumericalError(
            f"two calls to an operator with the same rows differ by {change / scale:.3g} of its size; expected "
            f"{tolerance:g}. {CAUSES}"
        )
    gap = float((pair[0] @ first[1] - pair[1] @ first[0]).abs())
    if gap > tolerance * scale:
        raise NumericalError(
            f"an operator is not symmetric: u·Av and v·Au differ by {gap / scale:.3g} of its size; expected "
            f"{tolerance:g}. {CAUSES}"
        )


@dataclass(frozen=True, eq=False)
class Solution:
    """The solution x (K, P) of A x = b for K right-hand sides, with its accuracy and cost.

    ``residuals`` (K,) are the relative residuals |b - A x| / |b|, and ``iterations`` is the number of iterations, of
    one product each. Conjugate gradients update the residual at each iteration and compute b - A x now and then; then
    ``residuals`` are the larger of the two and ``updated`` (K,) are the updated ones. Where there are updated ones,
    they decide on convergence: float64 rounding of A x can keep b - A x above a very small tolerance.
    """

    x: Tensor
    residuals: Tensor
    iterations: int
    tolerance: float
    updated: Tensor | None = None

    @property
    def converged(self) -> bool:
        """Whether the residual of every row is at most the tolerance."""
        return bool(((self.residuals if self.updated is None else self.updated) <= self.tolerance).all())

    def require_convergence(self, solver: str, advice: str) -> Solution:
        """Return this solution; raise a ``NumericalError`` with its residual if it has not converged."""
        if self.converged:
            return self
        raise NumericalError(
            f"{solver} stopped after {self.iterations} iterations with a relative residual of "
            f"{float(self.residuals.max()):.3g}; expected {self.tolerance:g}. {advice}"
        )
