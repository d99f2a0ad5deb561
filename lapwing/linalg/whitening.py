"""Coordinates in which a kernel matrix is the identity."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.errors import NumericalError

NOUGHT = (
    "the kernel of the inducing points is nought: no output depends on the selected weights at any of them; "
    "choose other weights."
)


def whitening(kernel: Tensor, cut: float = 1e-14) -> Tensor:
    """W (M, r) with Wᵀ K W = I: the eigenvectors of K over the roots of their eigenvalues.

    Directions below ``cut`` of the largest eigenvalue are left out: they are rounding, and one over their root is noise
    that would be taken for variance.
    """
    values, vectors = torch.linalg.eigh(checked(kernel).double())
    real = values > cut * values[-1].clamp_min(1e-300)
    if not bool(real.any()):
        raise NumericalError(NOUGHT)
    return vectors[:, real] / values[real].sqrt()


def smooth_whitening(kernel: Tensor, jitter: float = 1e-9) -> Tensor:
    """The same by Cholesky, with a little on the diagonal: its gradient in K is defined everywhere."""
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
    """The kernel, where it is one; what is wrong with it otherwise."""
    if not bool(torch.isfinite(kernel.detach()).all()):
        raise NumericalError("the kernel of the inducing points is not finite; check the inputs and the network.")
    if not bool(kernel.detach().any()):
        raise NumericalError(NOUGHT)
    return kernel
