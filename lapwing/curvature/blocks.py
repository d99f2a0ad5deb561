"""Curvature block by block: Kronecker, its eigenvalue-corrected form, diagonal and full.

Each block stores sums over the data at unit dispersion. Prior and dispersion enter in ``precision``, which
factorises once; the result gives log-determinant, output covariance and samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lapwing.core.errors import NumericalError, UnsupportedError
from lapwing.linalg.cholesky import cholesky
from lapwing.networks.blocks import Block, BlockJacobian, LinearJacobian, LookupJacobian
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.selection import Selection
from lapwing.priors.gaussian import Prior


class BlockPrecision(Protocol):
    """Lambda of one block, factorised."""

    def logdet(self) -> Tensor: ...

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        """J Λ⁻¹ Jᵀ: (B, S, C, C), or its diagonal (B, S, C)."""
        ...

    def cross(self, jacobian: BlockJacobian) -> Tensor:
        """J Λ⁻¹ Jᵀ between all samples and outputs, (B K, B K)."""
        ...

    def sample(self, eps: Tensor) -> Tensor:
        """Λ^-½ eps for standard normal eps (n, *form)."""
        ...


class BlockCurvature(Protocol):
    """H of one block at unit dispersion."""

    def precision(self, phi: Tensor, prior: Tensor, block: Block) -> BlockPrecision: ...

    def __add__(self, other: BlockCurvature) -> BlockCurvature: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def dense(self) -> Tensor:
        """The matrix that the block stands for, in the order of its form. For tests and small networks."""
        ...


@dataclass(frozen=True, eq=False)
class EigenPrecision:
    """Λ with known eigenvectors: U ⊗ V. ``inverse`` (G, d_out, d_in) holds one over the eigenvalues.

    ``inp`` need not be orthogonal: a prior that differs by input is folded into it.
    """

    out: Tensor
    inp: Tensor | None
    inverse: Tensor
    log_determinant: Tensor

    def logdet(self) -> Tensor:
        return self.log_determinant

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        return self._rotated(jacobian).weighted(self.inverse.to(self.out.dtype), tokens, full)

    def cross(self, jacobian: BlockJacobian) -> Tensor:
        return self._rotated(jacobian).cross(self.inverse.to(self.out.dtype))

    def _rotated(self, jacobian: BlockJacobian) -> LinearJacobian | LookupJacobian:
        assert isinstance(jacobian, LinearJacobian | LookupJacobian)
        return jacobian.rotated(self.out, self.inp)

    def sample(self, eps: Tensor) -> Tensor:
        scaled = self.out @ (eps * self.inverse.sqrt().to(eps))
        return scaled if self.inp is None else scaled @ self.inp.mT


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """H ≈ B ⊗ A / rows: sums A of inputs (G, d_in, d_in) and B of output gradients (G, d_out, d_out).

    A lookup's A is a diagonal of counts (1, d_in). Division by the number of rows makes a single linear
    layer with constant output curvature exact.
    """

    inp: Tensor
    out: Tensor
    rows: float

    def __add__(self, other: BlockCurvature) -> KroneckerBlock:
        assert isinstance(other, KroneckerBlock)
        return KroneckerBlock(self.inp + other.inp, self.out + other.out, self.rows + other.rows)

    def tensors(self) -> dict[str, Tensor]:
        return {"inp": self.inp, "out": self.out, "rows": torch.tensor(self.rows, dtype=torch.float64)}

    def dense(self) -> Tensor:
        inp = torch.diag_embed(self.inp) if self.inp.ndim == 2 else self.inp
        return torch.block_diag(
            *(torch.kron(o.contiguous(), i.contiguous()) / self.rows for o, i in zip(self.out, inp, strict=True))
        )

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(output eigenvalues, output basis, input eigenvalues, input basis); None is the identity."""
        out_values, out_basis = psd_eigh(self.out / max(self.rows, 1))
        if self.inp.ndim == 2:
            return out_values, out_basis, self.inp, None
        return out_values, out_basis, *psd_eigh(self.inp)

    def precision(self, phi: Tensor, prior: Tensor, block: Block) -> EigenPrecision:
        out_values, out_basis, inp_values, inp_basis = self.eigen
        if prior.ndim:
            by_input = prior[:, :1]
            if not torch.allclose(prior, by_input.expand_as(prior)):
                raise UnsupportedError(
                    f"the prior differs between outputs inside {block.weight}; a Kronecker block allows one "
                    "precision, or one for each input. Use isotropic() or per_layer(), or method=Diagonal() or Full()."
                )
            return self._whitened(phi, by_input[:, 0], out_values, out_basis)
        # Kept in the factors' own dtype: float64 for every product would cost more than the fit.
        values = (out_values.unsqueeze(-1) * inp_values.unsqueeze(-2)) / phi.to(out_values) + prior.to(out_values)
        return EigenPrecision(out_basis, inp_basis, values.reciprocal(), values.log().sum(dtype=torch.float64))

    def _whitened(self, phi: Tensor, by_input: Tensor, out_values: Tensor, out_basis: Tensor) -> EigenPrecision:
        """Λ = (I ⊗ √D)(B ⊗ D^-½ A D^-½ / φ + I)(I ⊗ √D): exact for any prior that differs by input."""
        if self.inp.ndim == 2:
            raise UnsupportedError("an embedding in a Kronecker block allows one precision; use method=Diagonal().")
        root = by_input.to(self.inp).rsqrt()  # (G, d_in)
        values, basis = psd_eigh(root.unsqueeze(-1) * self.inp * root.unsqueeze(-2))
        products = (out_values.unsqueeze(-1) * values.unsqueeze(-2)) / phi.to(out_values) + 1
        logdet = products.log().sum(dtype=torch.float64) + out_values.shape[-1] * by_input.double().log().sum()
        return EigenPrecision(out_basis, root.unsqueeze(-1) * basis, products.reciprocal(), logdet)


@dataclass(frozen=True, eq=False)
class EigenBlock:
    """H in a Kronecker eigenbasis with its exact diagonal there (EKFAC): ``values`` (G, d_out, d_in)."""

    out: Tensor
    inp: Tensor | None
    values: Tensor

    def __add__(self, other: BlockCurvature) -> EigenBlock:
        raise UnsupportedError(
            "eigenvalue-corrected curvatures of different data have different bases and do not add; "
            "add Kron() curvatures, or fit EKron() on all the data."
        )

    def tensors(self) -> dict[str, Tensor]:
        found = {"out": self.out, "values": self.values}
        return found if self.inp is None else {**found, "inp": self.inp}

    def dense(self) -> Tensor:
        blocks = []
        for g, values in enumerate(self.values):
            inp = torch.eye(values.shape[1]).to(values) if self.inp is None else self.inp[g]
            basis = torch.kron(self.out[g].contiguous(), inp.contiguous())
            blocks.append((basis * values.reshape(-1)) @ basis.T)
        return torch.block_diag(*blocks)

    def precision(self, phi: Tensor, prior: Tensor, block: Block) -> EigenPrecision:
        if prior.ndim:
            raise UnsupportedError(
                f"the prior differs inside {block.weight}; EKron allows one precision for each block. "
                "Use isotropic() or per_layer(), or method=Kron(), Diagonal() or Full()."
            )
        values = self.values / phi.to(self.values) + prior.to(self.values)
        return EigenPrecision(self.out, self.inp, values.reciprocal(), values.log().sum(dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class DiagonalPrecision:
    """Λ diagonal, ``inverse`` in the block's form."""

    inverse: Tensor
    log_determinant: Tensor

    def logdet(self) -> Tensor:
        return self.log_determinant

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        return jacobian.weighted(self.inverse, tokens, full)

    def cross(self, jacobian: BlockJacobian) -> Tensor:
        return jacobian.cross(self.inverse)

    def sample(self, eps: Tensor) -> Tensor:
        return eps * self.inverse.sqrt().to(eps)


@dataclass(frozen=True, eq=False)
class DiagonalBlock:
    """The diagonal of H, in the block's form."""

    values: Tensor

    def __add__(self, other: BlockCurvature) -> DiagonalBlock:
        assert isinstance(other, DiagonalBlock)
        return DiagonalBlock(self.values + other.values)

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def dense(self) -> Tensor:
        return torch.diag(self.values.reshape(-1))

    def precision(self, phi: Tensor, prior: Tensor, block: Block) -> DiagonalPrecision:
        values = self.values / phi.to(self.values) + prior.to(self.values)
        return DiagonalPrecision(values.reciprocal(), values.log().sum(dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class CholeskyPrecision:
    """Λ by its Cholesky factor (p, p), float64."""

    factor: Tensor

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()

    @cached_property
    def _root(self) -> Tensor:
        """L⁻¹: applied many times, a product costs a GPU less than a triangular solve."""
        eye = torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)
        return torch.linalg.solve_triangular(self.factor, eye, upper=False)

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        j = jacobian.whole().flatten(2)
        rows = (j @ self._root.to(j.dtype).mT).reshape(j.shape[0], tokens, -1, j.shape[-1])
        return rows @ rows.mT if full else rows.square().sum(-1)

    def cross(self, jacobian: BlockJacobian) -> Tensor:
        j = jacobian.whole().flatten(2)
        rows = j.reshape(-1, j.shape[-1]) @ self._root.to(j.dtype).mT
        return rows @ rows.mT

    def sample(self, eps: Tensor) -> Tensor:
        flat = eps.reshape(eps.shape[0], -1)
        solved = torch.linalg.solve_triangular(self.factor.mT, flat.to(self.factor).mT, upper=True).mT
        return solved.reshape(eps.shape).to(eps)


@dataclass(frozen=True, eq=False)
class FullBlock:
    """All of H for one block, (p, p)."""

    matrix: Tensor

    def __add__(self, other: BlockCurvature) -> FullBlock:
        assert isinstance(other, FullBlock)
        return FullBlock(self.matrix + other.matrix)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def dense(self) -> Tensor:
        return self.matrix

    def precision(self, phi: Tensor, prior: Tensor, block: Block) -> CholeskyPrecision:
        size = len(self.matrix)
        added = prior.double().reshape(-1).expand(size)
        return CholeskyPrecision(cholesky(self.matrix.double() / phi.double() + torch.diag(added), block.weight))


STRUCTURES: dict[str, Callable[..., BlockCurvature]] = {
    "KroneckerBlock": lambda inp, out, rows: KroneckerBlock(inp, out, float(rows)),
    "EigenBlock": lambda out, values, inp=None: EigenBlock(out, inp, values),
    "DiagonalBlock": DiagonalBlock,
    "FullBlock": FullBlock,
}


@dataclass(frozen=True, eq=False)
class BlockwisePrecision:
    """Λ with no coupling between blocks."""

    blocks: tuple[BlockPrecision, ...]
    layout: tuple[Block, ...]
    selection: Selection
    log_determinant: Tensor | None = None  # where it is not the sum over blocks (single weights selected)

    def logdet(self) -> Tensor:
        if self.log_determinant is not None:
            return self.log_determinant
        return torch.stack([block.logdet().double() for block in self.blocks]).sum()

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        """(B, S, C, C), or (B, S, C): one block after another, so memory follows the largest."""
        total: Tensor | None = None
        for precision, (_, part) in zip(self.blocks, jacobian, strict=True):
            found = precision.quadratic(part, jacobian.tokens, full)
            total = found if total is None else total + found
        assert total is not None
        return total

    def cross(self, jacobian: LayerJacobians) -> Tensor:
        parts = [precision.cross(part) for precision, (_, part) in zip(self.blocks, jacobian, strict=True)]
        return torch.stack(parts).sum(0)

    def sample(self, eps: Tensor) -> Tensor:
        """Λ^-½ eps for eps (n, P)."""
        values = self.selection.split(eps)
        drawn: dict[str, Tensor] = {}
        for precision, block in zip(self.blocks, self.layout, strict=True):
            drawn.update(block.spread(precision.sample(block.arrange(values))))
        return self.selection.picked(torch.cat([drawn[name] for name in self.selection.names], -1))


@dataclass(frozen=True, eq=False)
class BlockwiseCurvature:
    """H with no coupling between blocks. ``blocks`` match the network's layout one to one."""

    blocks: tuple[BlockCurvature, ...]
    layout: tuple[Block, ...]
    selection: Selection

    def __add__(self, other: BlockwiseCurvature) -> BlockwiseCurvature:
        if self.layout != other.layout:
            raise UnsupportedError("these curvatures belong to different networks or weights and do not add.")
        total = tuple(a + b for a, b in zip(self.blocks, other.blocks, strict=True))
        return BlockwiseCurvature(total, self.layout, self.selection)

    def precision(self, phi: Tensor, prior: Prior) -> BlockwisePrecision:
        if self.selection.index is not None:
            return self._subnetwork_precision(phi, prior)
        found = tuple(c.precision(phi, prior.on(b), b) for c, b in zip(self.blocks, self.layout, strict=True))
        return BlockwisePrecision(found, self.layout, self.selection)

    def _subnetwork_precision(self, phi: Tensor, prior: Prior) -> BlockwisePrecision:
        """Only diagonals: entries that are not selected get no variance and no share of the determinant."""
        values = torch.cat([part for _, part in sorted_parts(self)], -1)
        chosen = self.selection.picked(values) / phi.to(values) + prior.vector.to(values)
        inverse = self.selection.split(chosen.reciprocal())
        parts = tuple(DiagonalPrecision(block.arrange(inverse), chosen.new_zeros(())) for block in self.layout)
        return BlockwisePrecision(parts, self.layout, self.selection, chosen.log().sum(dtype=torch.float64))

    def logdet(self, phi: Tensor, prior: Prior) -> Tensor:
        return self.precision(phi, prior).logdet()

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{key}": t for i, block in enumerate(self.blocks) for key, t in block.tensors().items()}

    def structures(self) -> list[str]:
        """The structure of every block, by name; a user sees here what became of each parameter."""
        return [type(block).__name__ for block in self.blocks]


def sorted_parts(curvature: BlockwiseCurvature) -> list[tuple[str, Tensor]]:
    """The diagonals of a diagonal curvature, parameter by parameter in the order of theta."""
    parts: dict[str, Tensor] = {}
    for structure, block in zip(curvature.blocks, curvature.layout, strict=True):
        if not isinstance(structure, DiagonalBlock):
            raise UnsupportedError(
                "a subnetwork of single weights has no Kronecker structure; use method=Full() or Diagonal()."
            )
        parts.update(block.spread(structure.values))
    return [(name, parts[name]) for name in curvature.selection.names]


def psd_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, cut at zero, and eigenvectors of a sum of squares."""
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError("a curvature factor is not finite; check the data and the network for overflow.")
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp_min(0), vectors
