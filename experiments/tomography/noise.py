"""Simulated measurements: line integrals of an image with white noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.linalg.operators import SparseOperator
from lapwing.runtime.settings import Rule, describe, is_real
from lapwing.runtime.threads import normal

SHARE = Rule("a finite number that is not negative", lambda v: is_real(v) and 0 <= v < math.inf, DataError)


def measured(
    operator: SparseOperator, image: Tensor, share: float, generator: torch.Generator | None
) -> tuple[Tensor, float]:
    """Return y = A x + η, with Gaussian noise η whose standard deviation is a share of the mean of |A x|.

    Args:
        operator: the matrix A.
        image: x, of shape (H, W) or flattened row by row, without NaN; it is moved to the dtype and device of A.
        share: for example 0.05 for 5 % noise; zero for none.
        generator: the source of randomness.

    Returns:
        The measurement (rows,) and the standard deviation of its noise.

    >>> entries = torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([1.0, 3.0])
    >>> operator = SparseOperator.from_entries(*entries, shape=(2, 4))
    >>> measured(operator, torch.ones(2, 2), 0.0, None)
    (tensor([1., 3.]), 0.0)
    """
    SHARE.check("share", share)
    if not isinstance(image, Tensor) or image.ndim not in (1, 2) or image.numel() != operator.size:
        raise DataError(f"image is {describe(image)}; expected (H, W) or (H * W,) with {operator.size} pixels.")
    x = image.reshape(-1).to(operator.like)
    if not bool(x.isfinite().all()):
        raise DataError("image has numbers that are not finite; expected finite ones.")
    clean = operator.forward(x)
    std = share * float(clean.abs().mean())
    return clean + std * normal((operator.rows,), generator, operator.like), std
