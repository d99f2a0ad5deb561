"""The contracts of block structures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from lapwing.core.state import State
from lapwing.networks.jacobians import Block, BlockJacobian
from lapwing.priors.bound import BlockPrior

S = TypeVar("S")


class BlockPrecision(Protocol):
    """Λ of one block, factorised."""

    def logdet(self) -> Tensor:
        """Return the log-determinant of Λ."""
        ...

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        """Return J Λ⁻¹ Jᵀ: (B, S, C, C), or its diagonal (B, S, C)."""
        ...

    def cross(self, jacobian: BlockJacobian) -> Tensor:
        """Return J Λ⁻¹ Jᵀ between all samples and outputs, (B K, B K)."""
        ...

    def sample(self, eps: Tensor) -> Tensor:
        """Return Λ^-½ eps for standard normal eps (n, *form)."""
        ...

    def adjoint(self, v: Tensor) -> Tensor:
        """Apply the transpose of ``sample`` to v (n, *form); ``sample`` after ``adjoint`` is Λ⁻¹."""
        ...

    def variances(self) -> Tensor:
        """Return the diagonal of Λ⁻¹, in the block's form."""
        ...


class BlockCurvature(Protocol):
    """H of one block at unit dispersion. Its class method ``from_state(state, network)`` builds it from a state."""

    @property
    def only_diagonal(self) -> Tensor | None:
        """The stored diagonal in the block's form, if the structure is diagonal; else None."""
        ...

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> BlockPrecision:
        """Return Λ = H/φ + A of the block, factorised."""
        ...

    def diagonal(self) -> Tensor:
        """Return the diagonal of H in the block's form, no entry below a thousandth of the median."""
        ...

    def __add__(self: S, other: S) -> S: ...

    def mixed(self: S, others: Sequence[S], weights: Tensor) -> S:
        """Return the weighted sum of this block and the others, differentiable in the weights (1 + others,)."""
        ...

    def state(self) -> State: ...

    def dense(self) -> Tensor:
        """Return H as a matrix, in the order of the block's form. For tests and small networks."""
        ...
