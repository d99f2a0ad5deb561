"""Solves for posterior samples, with residuals relative to the noise of the prior."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lapwing.linalg.block_cg import block_conjugate_gradients
from lapwing.linalg.operators import Product
from lapwing.linalg.solution import Solution

LEAST = 1e-12  # relative residuals below this are rounding


def solve_samples(
    apply: Product,
    rhs: Tensor,
    noise: Tensor,
    tolerance: float,
    hint: str,
    start: Tensor | None,
    root: Product | None = None,
) -> Solution:
    """Solve for samples (K, P) by block conjugate gradients; raise if one does not reach the tolerance.

    ``apply`` multiplies by the precision, ``noise`` (K, P) is the prior's part of the right-hand sides, ``start`` are
    initial values where samples nearby are known, ``root`` is that of a preconditioner and ``hint`` ends the advice of
    the error.
    """
    advice = f"Raise the prior precision or the tolerance of the samples{hint}."
    left = rhs if start is None else rhs - apply(start)
    sizes = residual_sizes(noise, rhs, tolerance)
    rest = block_conjugate_gradients(apply, left, root=root, tolerance=tolerance, sizes=sizes, advice=advice)
    return rest if start is None else replace(rest, x=start + rest.x)


def residual_sizes(noise: Tensor, rhs: Tensor, tolerance: float) -> Tensor:
    """Return the lengths (K,) that residuals of samples are relative to: those of the prior's part ``noise`` (K, P).

    They are raised where the tolerance would ask for a residual below the rounding of float64.
    """
    return torch.maximum(noise.norm(dim=1), LEAST / tolerance * rhs.norm(dim=1))
