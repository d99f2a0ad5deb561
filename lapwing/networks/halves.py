"""Products in full single precision on hardware that rounds their factors."""

from __future__ import annotations

import torch
from torch import Tensor

DROPPED = 13  # bits at the end of a float32 that TF32 does not have


def coarse(x: Tensor) -> bool:
    """Whether a product with this factor rounds it to the ten bits of TF32, as GPUs may be told to."""
    if x.device.type != "cuda" or x.dtype != torch.float32:
        return False
    settings = torch.backends.cuda.matmul
    chosen = getattr(settings, "fp32_precision", None)  # newer; reading the older name may then raise
    return bool(settings.allow_tf32) if chosen is None else chosen == "tf32"


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = high + low, float32, where TF32 has all bits of the one and almost all of the other.

    >>> high, low = halves(torch.tensor([1.0, 1.0 + 2.0**-12]))
    >>> high.tolist(), low.tolist()
    ([1.0, 1.0], [0.0, 0.000244140625])
    """
    high = (x.view(torch.int32) & -(1 << DROPPED)).view(torch.float32)
    return high, x - high


def product(x: Tensor, fixed: Tensor) -> Tensor:
    """x @ fixed, where x is made of the vectors that an operator is applied to.

    Rounding ``fixed`` makes the operator a slightly different one. Rounding x makes it none at all: products are then
    not linear, and no linear system can be solved with them to more than three digits. So x goes in two halves, which
    costs the multiplications twice.
    """
    if not coarse(x):
        return x @ fixed
    high, low = halves(x)
    return (high @ fixed).add_(low @ fixed)


def product_onto(fixed: Tensor, x: Tensor) -> Tensor:
    """fixed @ x, likewise."""
    if not coarse(x):
        return fixed @ x
    high, low = halves(x)
    return (fixed @ high).add_(fixed @ low)
