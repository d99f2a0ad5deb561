"""The Jacobian and the GGN as operators: ``G @ v`` without the matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import DataError, NumericalError, UnsupportedError
from lapwing.linalg.design import Design, back_product, forward_product, gram_product
from lapwing.networks.forward import outside_autocast


@dataclass(frozen=True, eq=False)
class Operator:
    """A matrix that is known by its products: ``op @ v`` for a vector (n,), or for all columns of a matrix (n, K).

    Results are float64; products run in the network's dtype. ``op.T`` is the transpose and ``op.scipy()`` a
    ``scipy.sparse.linalg.LinearOperator``. ``posterior.jacobian(data)`` and ``posterior.ggn(data)`` return one.

    Args:
        design: The rows of the Jacobian.
        shape: The number of rows and columns.
        product: Multiplies the matrix by vectors, which are rows.
        transposed: Multiplies its transpose.
        guard: Called before each product; raises if the network has changed since.
    """

    design: Design
    shape: tuple[int, int]
    product: Callable[[Design, Tensor], Tensor]
    transposed: Callable[[Design, Tensor], Tensor]
    guard: Callable[[], None] | None = None

    @classmethod
    def jacobian(cls, design: Design, guard: Callable[[], None] | None = None) -> Operator:
        """Return the design itself, (rows, P)."""
        return cls(design, (design.rows, design.size), forward_product, back_product, guard)

    @classmethod
    def ggn(cls, design: Design, guard: Callable[[], None] | None = None) -> Operator:
        """Return the Gram matrix of the design, (P, P)."""
        return cls(design, (design.size, design.size), gram_product, gram_product, guard)

    @property
    def T(self) -> Operator:  # noqa: N802
        """The transpose."""
        return replace(self, shape=self.shape[::-1], product=self.transposed, transposed=self.product)

    @outside_autocast
    def __matmul__(self, v: Tensor) -> Tensor:
        expected = (self.shape[1],)
        if not isinstance(v, Tensor) or v.is_complex() or v.ndim > 2 or v.shape[:1] != expected or not v.numel():
            seen = f"a tensor {tuple(v.shape)} of {v.dtype}" if isinstance(v, Tensor) else f"a {type(v).__name__}"
            raise DataError(
                f"a product of an operator {self.shape} with {seen}; expected a real tensor ({self.shape[1]},) or "
                f"({self.shape[1]}, K)."
            )
        if self.guard is not None:
            self.guard()
        most, largest = torch.finfo(self.design.like.dtype).max, max(abs(float(end)) for end in v.detach().aminmax())
        if not largest <= most:  # also true for NaN
            raise DataError(
                f"a product of an operator {self.shape} with a vector whose largest entry is {largest:.3g}; expected "
                f"finite numbers of at most {most:.3g}, as the network computes in {self.design.like.dtype}. Scale it."
            )
        rows = v.reshape(v.shape[0], -1).mT.to(self.design.like.device)
        rows = (rows if rows.dtype in (torch.float32, torch.float64) else rows.double()).contiguous()
        with torch.no_grad():
            product = self.product(self.design, rows)
        if not math.isfinite(product.sum()) and not bool(product.isfinite().all()):  # a sum takes a tenth of the time
            raise NumericalError(
                f"a product of an operator {self.shape} with a vector whose largest entry is {largest:.3g} is beyond "
                f"the {most:.3g} of {self.design.like.dtype}; expected finite numbers. Scale it."
            )
        return product.mT.reshape(self.shape[0], *v.shape[1:])

    def scipy(self) -> Any:
        """Return the operator for SciPy's solvers, with NumPy arrays in and out.

        Raises:
            UnsupportedError: If SciPy is not installed.
        """
        try:
            import numpy as np
            from scipy.sparse.linalg import LinearOperator
        except ImportError as error:
            raise UnsupportedError("a SciPy view of an operator needs scipy: pip install scipy.") from error

        def times(operator: Operator, v: Any) -> Any:
            if np.iscomplexobj(v):
                raise DataError(
                    f"a product of an operator {operator.shape} with an array {np.shape(v)} of {v.dtype}; expected "
                    "real numbers. Multiply the real and the imaginary part separately."
                )
            return (operator @ torch.from_numpy(np.ascontiguousarray(v, dtype=np.float64))).cpu().numpy()

        here, back = partial(times, self), partial(times, self.T)
        return LinearOperator(self.shape, matvec=here, rmatvec=back, matmat=here, rmatmat=back, dtype=np.float64)
