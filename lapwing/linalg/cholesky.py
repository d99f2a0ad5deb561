"""Cholesky factors, with errors that state the smallest eigenvalue."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.core.spectra import eigvalsh
from lapwing.errors import NumericalError


def cholesky(matrix: Tensor, name: str) -> Tensor:
    """Return the lower factor; if the matrix is not positive definite, raise with its smallest eigenvalue."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info.max()) == 0:
        return factor
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError(f"the precision of {name} is not finite; check the data and the prior.")
    smallest = eigvalsh(matrix.double()).min().item()
    raise NumericalError(not_definite(name, smallest))


def not_definite(name: str, smallest: float) -> str:
    """Return the error message for a precision that is not positive definite."""
    return (
        f"the precision of {name} is not positive definite: its smallest eigenvalue is {smallest:.3g}; expected "
        "above zero. Raise the prior precision, or compute in float64; a Hessian may be indefinite where a GGN is not."
    )
