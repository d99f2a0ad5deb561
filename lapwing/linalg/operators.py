"""Symmetric operators given by their products, and the check that they are what they claim to be."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.core.random import normal
from lapwing.errors import NumericalError

Product = Callable[[Tensor], Tensor]  # rows (K, P) -> rows (K, P), all K at once, rows apart from each other

CAUSES = (
    "Put the network in evaluation mode (dropout and batch statistics change what it computes), take random "
    "augmentation and shuffling that drops data away, and use deterministic kernels."
)


def applied(product: Product, rows: Tensor) -> Tensor:
    """The images of the rows in float64; refused where they are not finite or have another shape."""
    image = product(rows)
    if image.shape != rows.shape:
        raise NumericalError(
            f"an operator mapped rows of shape {tuple(rows.shape)} to {tuple(image.shape)}; expected the same shape."
        )
    if not bool(torch.isfinite(image).all()):
        raise NumericalError("an operator's products are not finite; check the data and the weights.")
    return image.double()


def refuse_asymmetric_images(rows: Tensor, images: Tensor, tolerance: float = 1e-3) -> None:
    """Raise where u·Av and v·Au differ between any two of the rows, whose images are known: no product.

    The tolerance is relative to |u| |Av| + |v| |Au|. One row alone shows nothing.
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
    """Raise unless u·Av = v·Au for a pair of random vectors and a second call repeats the first.

    The second call gets the rows in the other order, so an operator that mixes its rows is found as well. The
    tolerance is relative to |Au| + |Av|; two calls to the operator.

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> refuse_asymmetric(lambda v: v @ a, 2)
    """
    pair = normal((2, size), generator, torch.empty(0, dtype=torch.float64, device=device))
    first, second = applied(product, pair), applied(product, pair.flip(0)).flip(0)
    scale = float(first.norm(dim=1).sum())
    changed = float((first - second).norm())
    if changed > tolerance * scale:
        raise NumericalError(
            f"two calls to an operator with the same rows differ by {changed / scale:.3g} of its size; expected "
            f"{tolerance:g}. {CAUSES}"
        )
    gap = float((pair[0] @ first[1] - pair[1] @ first[0]).abs())
    if gap > tolerance * scale:
        raise NumericalError(
            f"an operator is not symmetric: u·Av and v·Au differ by {gap / scale:.3g} of its size; expected "
            f"{tolerance:g}. {CAUSES}"
        )
