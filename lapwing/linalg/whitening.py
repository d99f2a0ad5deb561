"""Whitening: coordinates in which a kernel matrix is the identity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.core.spectra import eigh
from lapwing.errors import NumericalError

ZERO = (
    "the kernel of the inducing points is zero: no output depends on the selected weights at any of them; "
    "choose other weights."
)


def whitening(kernel: Tensor, cut: float = 1e-14) -> Tensor:
    """Return W (M, r) with Wᵀ K W = I: the eigenvectors of K divided by the roots of their eigenvalues.

    Eigenvalues below ``cut`` times the largest are left out: they are rounding, and their inverse roots would be large
    random numbers.
    """
    values, vectors = eigh(checked(kernel).double())
    real = values > cut * values[-1].clamp_min(1e-300)
    if not bool(real.any()):
        raise NumericalError(ZERO)
    return vectors[:, real] / values[real].sqrt()


def smooth_whitening(kernel: Tensor, jitter: float = 1e-9) -> Tensor:
    """Return W (M, M) with Wᵀ K W ≈ I, from a Cholesky factor of K + jitter: its gradient in K exists everywhere."""
    size = len(checked(kernel))
    extra = jitter * kernel.detach().diagonal().mean()
    eye = torch.eye(size, dtype=kernel.dtype, device=kernel.device)
    for _ in range(4):
        factor, info = torch.linalg.cholesky_ex(kernel + extra * eye)
        if int(info) == 0:
            return torch.linalg.solve_triangular(factor, eye, upper=False).mT
        extra = extra * 100
    raise NumericalError(
        f"the kernel of {size} inducing points is not positive definite to one part in a thousand; expected a Gram "
        "matrix. Compute in float64."
    )


def checked(kernel: Tensor) -> Tensor:
    """Return the kernel; raise if it is not finite or zero."""
    least, most = map(float, torch.aminmax(kernel.detach()))  # NaN if an entry is; without a copy of the kernel
    if not (math.isfinite(least) and math.isfinite(most)):
        raise NumericalError("the kernel of the inducing points is not finite; check the inputs and the network.")
    if least == most == 0:
        raise NumericalError(ZERO)
    return kernel
