"""The contracts of block structures, and the two that fit every block: its diagonal, and all of its matrix.

Each stores sums over the data at unit dispersion; ``precision`` adds prior and dispersion and factorises once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from lapwing.core.processes import Processes
from lapwing.core.schema import Array, semidefinite
from lapwing.core.state import State, saved
from lapwing.curvature.factors import Factor
from lapwing.curvature.protocols import floored, row_products, weighted_sum
from lapwing.linalg.cholesky import cholesky
from lapwing.linalg.gram import Gram, mirrored
from lapwing.networks.closed_form import ClosedForm
from lapwing.networks.jacobians import Block, BlockJacobian
from lapwing.networks.network import Network
from lapwing.priors.bound import BlockPrior

S = TypeVar("S")


class BlockPrecision(Protocol):
    """Λ of one block, factorised."""

    @property
    def log_determinant(self) -> Tensor:
        """The log-determinant of Λ."""
        ...

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        """Return J Λ⁻¹ Jᵀ: (B, S, C, C), or its diagonal (B, S, C)."""
        ...

    def quadratics(self, precisions: Sequence[Any], jacobian: BlockJacobian, tokens: int) -> list[Tensor]:
        """Return J Λ⁻¹ Jᵀ of all precisions of one curvature, (B, S, C, C) each; a shared basis is applied once."""
        ...

    def cross(self, jacobian: BlockJacobian, other: BlockJacobian | None = None) -> Tensor:
        """Return J Λ⁻¹ J'ᵀ between all samples and outputs of two batches, (B K, B' K'), or of one with itself."""
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


class BlockSum(Protocol):
    """The sum of the curvature of one block over a pass."""

    def add(self, part: BlockJacobian | ClosedForm, first: bool, weights: Tensor | None = None) -> None:
        """Add one chunk of data, for a run of seeds; ``first`` says whether these data are new.

        The seeds have the weights of the samples in them; ``weights`` (B,) are for sums that have no seeds.
        """
        ...

    def settle(self, processes: Processes) -> None:
        """Agree with the other processes on the form of the sums, if it depends on the data."""
        ...

    def totals(self) -> list[Tensor | None]:
        """Return the sums over the data of this process; None for one of which only data show the shape."""
        ...

    def value(self, totals: Sequence[Any]) -> BlockCurvature:
        """Return the curvature with these sums, which are those of ``totals`` over all processes."""
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

    def factors(self, prior: BlockPrior) -> Sequence[Factor]:
        """Return the factors whose eigendecompositions ``precision`` needs under this prior; none by default."""
        return ()

    def remarks(self, block: Block) -> Sequence[str]:
        """Return what the structure approximates beyond its definition, in words; nothing by default."""
        return ()


@dataclass(frozen=True, eq=False)
class DiagonalPrecision:
    """Λ diagonal; ``inverse`` is one over it, in the block's form."""

    inverse: Tensor
    log_determinant: Tensor

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        return jacobian.weighted(self.inverse, tokens, full)

    def quadratics(self, precisions: Sequence[Any], jacobian: BlockJacobian, tokens: int) -> list[Tensor]:
        return [each.quadratic(jacobian, tokens, True) for each in precisions]

    def cross(self, jacobian: BlockJacobian, other: BlockJacobian | None = None) -> Tensor:
        return jacobian.between(jacobian if other is None else other, self.inverse)

    def sample(self, eps: Tensor) -> Tensor:
        return eps * self.inverse.sqrt().to(eps)

    def adjoint(self, v: Tensor) -> Tensor:
        return self.sample(v)

    def variances(self) -> Tensor:
        return self.inverse


@saved
@dataclass(frozen=True, eq=False)
class DiagonalBlock:
    """The diagonal of H, in the block's form."""

    values: Tensor

    @property
    def only_diagonal(self) -> Tensor:
        return self.values

    def __add__(self, other: DiagonalBlock) -> DiagonalBlock:
        return DiagonalBlock(self.values + other.values)

    def mixed(self, others: Sequence[DiagonalBlock], weights: Tensor) -> DiagonalBlock:
        return DiagonalBlock(weighted_sum([self.values, *(block.values for block in others)], weights))

    def state(self) -> State:
        return State("DiagonalBlock", tensors={"values": self.values})

    @classmethod
    def from_state(cls, state: State, network: Network) -> DiagonalBlock:
        (block,) = network.layout
        return cls(**state.read(values=Array(block.form, 0, dtype=network.dtype)))

    def dense(self) -> Tensor:
        return torch.diag(self.values.reshape(-1))

    def factors(self, prior: BlockPrior) -> tuple[Factor, ...]:
        return ()

    def remarks(self, block: Block) -> tuple[str, ...]:
        return ()

    def diagonal(self) -> Tensor:
        return floored(self.values)

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> DiagonalPrecision:
        values = self.values / phi.to(self.values) + prior.whole.to(self.values)
        return DiagonalPrecision(values.reciprocal(), values.log().sum(dtype=torch.float64))


class DiagonalSum:
    """The diagonal of H of a block, summed over a pass."""

    def __init__(self, block: Block, network: Network) -> None:
        self._squares = torch.zeros(block.form, dtype=torch.float64, device=network.device)
        self._dtype = network.dtype

    def add(self, part: BlockJacobian | ClosedForm, first: bool, weights: Tensor | None = None) -> None:
        self._squares += part.squares().reshape(self._squares.shape)

    def settle(self, processes: Processes) -> None:
        return

    def totals(self) -> list[Tensor | None]:
        return [self._squares]

    def value(self, totals: Sequence[Any]) -> DiagonalBlock:
        return DiagonalBlock(totals[0].to(self._dtype))


@dataclass(frozen=True, eq=False)
class CholeskyPrecision:
    """Λ by its Cholesky factor L (p, p), float64."""

    factor: Tensor

    @property
    def log_determinant(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()

    @cached_property
    def _inverse_factor(self) -> Tensor:
        """L⁻¹. It is applied many times, and on a GPU a product is faster than a triangular solve."""
        eye = torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)
        return torch.linalg.solve_triangular(self.factor, eye, upper=False)

    @cached_property
    def _inverse_single(self) -> Tensor:
        """L⁻¹ in float32, for networks in it."""
        return self._inverse_factor.float()

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        rows = self._whitened(jacobian)
        return row_products(rows.reshape(rows.shape[0], tokens, -1, rows.shape[-1]), full)

    def _whitened(self, jacobian: BlockJacobian) -> Tensor:
        """Return J L⁻ᵀ, (B, K, p)."""
        j = jacobian.whole().flatten(2).transpose(0, 1)  # seeds first, as small Jacobians lie in memory
        inverse = self._inverse_single if j.dtype == torch.float32 else self._inverse_factor.to(j.dtype)
        return (j @ inverse.mT).transpose(0, 1)

    def quadratics(self, precisions: Sequence[Any], jacobian: BlockJacobian, tokens: int) -> list[Tensor]:
        return [each.quadratic(jacobian, tokens, True) for each in precisions]

    def cross(self, jacobian: BlockJacobian, other: BlockJacobian | None = None) -> Tensor:
        rows = self._whitened(jacobian).flatten(0, 1)
        return rows @ (rows if other is None else self._whitened(other).flatten(0, 1)).mT

    def sample(self, eps: Tensor) -> Tensor:
        flat = eps.reshape(eps.shape[0], -1)
        solved = torch.linalg.solve_triangular(self.factor.mT, flat.to(self.factor).mT, upper=True).mT
        return solved.reshape(eps.shape).to(eps)

    def adjoint(self, v: Tensor) -> Tensor:
        flat = v.reshape(v.shape[0], -1)
        solved = torch.linalg.solve_triangular(self.factor, flat.to(self.factor).mT, upper=False).mT
        return solved.reshape(v.shape).to(v)

    def variances(self) -> Tensor:
        return self._inverse_factor.square().sum(0)


@saved
@dataclass(frozen=True, eq=False)
class FullBlock:
    """The whole H of one block, (p, p)."""

    matrix: Tensor
    only_diagonal: ClassVar[None] = None

    def __add__(self, other: FullBlock) -> FullBlock:
        return FullBlock(self.matrix + other.matrix)

    def mixed(self, others: Sequence[FullBlock], weights: Tensor) -> FullBlock:
        return FullBlock(weighted_sum([self.matrix, *(block.matrix for block in others)], weights))

    def state(self) -> State:
        return State("FullBlock", tensors={"matrix": self.matrix})

    @classmethod
    def from_state(cls, state: State, network: Network) -> FullBlock:
        (block,) = network.layout
        return cls(**state.read(matrix=Array((block.size, block.size), dtype=torch.float64, also=semidefinite)))

    def dense(self) -> Tensor:
        return self.matrix

    def factors(self, prior: BlockPrior) -> tuple[Factor, ...]:
        return ()

    def remarks(self, block: Block) -> tuple[str, ...]:
        return ()

    def diagonal(self) -> Tensor:
        return floored(self.matrix.diagonal())

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> CholeskyPrecision:
        added = prior.whole.double().reshape(-1).expand(len(self.matrix))
        return CholeskyPrecision(cholesky(self.matrix.double() / phi.double() + torch.diag(added), block.weight))


class FullSum:
    """The whole H of a block, summed over a pass."""

    def __init__(self, block: Block, network: Network) -> None:
        self._gram = Gram(block.size, torch.float64, network.device)

    def add(self, part: BlockJacobian | ClosedForm, first: bool, weights: Tensor | None = None) -> None:
        assert not isinstance(part, ClosedForm), "the last linear layer is kept in factors"
        self._gram.add(part.whole().flatten(0, 1), exact=True)

    def settle(self, processes: Processes) -> None:
        return

    def totals(self) -> list[Tensor | None]:
        return [self._gram.total()]

    def value(self, totals: Sequence[Any]) -> FullBlock:
        return FullBlock(mirrored(totals[0]))
