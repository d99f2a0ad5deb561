"""The contracts of curvatures and of the precisions that they give."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from lapwing.networks.jacobians import LayerJacobians
from lapwing.priors.bound import BoundPrior


class Precision(Protocol):
    """Λ = H/φ + A, factorised once."""

    def logdet(self) -> Tensor:
        """Return the log-determinant of Λ."""
        ...

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        """Return J Λ⁻¹ Jᵀ: (B, S, C, C), or its diagonal (B, S, C)."""
        ...

    def cross(self, jacobian: LayerJacobians) -> Tensor:
        """Return J Λ⁻¹ Jᵀ between all inputs and outputs, (B K, B K)."""
        ...

    def sample(self, eps: Tensor) -> Tensor:
        """Return Λ^-½ eps for eps (n, P)."""
        ...

    def adjoint(self, v: Tensor) -> Tensor:
        """Apply the transpose of ``sample`` to v (n, P)."""
        ...

    def solve(self, v: Tensor) -> Tensor:
        """Return Λ⁻¹ v for v (n, P): ``sample`` after ``adjoint``."""
        ...

    def variances(self) -> Tensor:
        """Return the diagonal of Λ⁻¹, (P,)."""
        ...


class Curvature(Protocol):
    """H at unit dispersion in some structure. If two can be added, the sum is the curvature of both data sets."""

    def precision(self, phi: Tensor, prior: BoundPrior) -> Precision:
        """Return Λ = H/φ + A, factorised."""
        ...

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the log-determinant of H/φ + A in the cheapest way that the structure allows."""
        ...

    def diagonal(self) -> Tensor:
        """Return the diagonal of H, (P,), no entry below a thousandth of the median of its layer."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the curvature consists of, by name."""
        ...


@runtime_checkable
class HoldsDirections(Protocol):
    """A precision that gives some directions no variance at all, so that γ does not follow from variances alone."""

    def decided(self, precision: Tensor) -> Tensor:
        """Return γ of every weight, (P,), under prior precisions (P,)."""
        ...


@runtime_checkable
class BoundsLogdet(Protocol):
    """A curvature whose log-determinant is a bound, with a term for the curvature that it leaves out."""

    def unseen(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return that term for each weight, (P,)."""
        ...


@runtime_checkable
class Preconditions(Protocol):
    """A curvature whose precision couples all weights and so is a good preconditioner for the exact one.

    Blocks would spread the eigenvalues, and a subspace would keep all weights outside it fixed.
    """

    @property
    def preconditions(self) -> bool: ...
