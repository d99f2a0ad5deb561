"""Products in full single precision on hardware that rounds their factors."""

from __future__ import annotations

import torch
from torch import Tensor

DROPPED = 13  # bits at the end of a float32 that TF32 does not have


def coarse(x: Tensor) -> bool:
    """Return whether a product with this factor rounds it to the ten bits of TF32, as GPUs may be set to do."""
    if x.device.type != "cuda" or x.dtype != torch.float32:
        return False
    settings = torch.backends.cuda.matmul
    chosen = getattr(settings, "fp32_precision", None)  # newer; reading the older name may then raise
    return bool(settings.allow_tf32) if chosen is None else chosen == "tf32"


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split x = high + low, float32, so that TF32 holds all bits of high and almost all of low.

    >>> high, low = halves(torch.tensor([1.0, 1.0 + 2.0**-12]))
    >>> high.tolist(), low.tolist()
    ([1.0, 1.0], [0.0, 0.000244140625])
    """
    high = (x.view(torch.int32) & -(1 << DROPPED)).view(torch.float32)
    return high, x - high


def product(x: Tensor, fixed: Tensor) -> Tensor:
    """Return x @ fixed, where the rows of x are the vectors that an operator is applied to.

    Rounding ``fixed`` gives a slightly different operator. Rounding x gives no linear operator at all, and no linear
    system can be solved with it to more than three digits. So x is multiplied in two halves, at twice the cost.
    """
    if not coarse(x):
        return x @ fixed
    high, low = halves(x)
    return (high @ fixed).add_(low @ fixed)


def product_onto(fixed: Tensor, x: Tensor) -> Tensor:
    """Return fixed @ x, where the columns of x are the vectors; see ``product``."""
    if not coarse(x):
        return fixed @ x
    high, low = halves(x)
    return (fixed @ high).add_(fixed @ low)
