"""The curvature of one block: Kronecker, its eigenvalue-corrected form, diagonal and full.

Each structure stores sums over the data at unit dispersion. Prior and dispersion enter in ``precision``, which
factorises once; the result gives log-determinant, output covariance and samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lapwing.errors import NumericalError, UnsupportedError
from lapwing.linalg.cholesky import cholesky
from lapwing.networks.block_jacobian import BlockJacobian
from lapwing.networks.blocks import Block
from lapwing.networks.selection import Selection
from lapwing.priors.gaussian import BlockPrior


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

    def adjoint(self, v: Tensor) -> Tensor:
        """The transpose of ``sample``, for v (n, *form): one after the other they are Λ⁻¹."""
        ...

    def variances(self) -> Tensor:
        """The diagonal of Λ⁻¹, in the block's form."""
        ...


class BlockCurvature(Protocol):
    """H of one block at unit dispersion."""

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> BlockPrecision: ...

    def diagonal(self) -> Tensor:
        """The diagonal of H in the block's form, no entry below a thousandth of the median."""
        ...

    def __add__(self, other: BlockCurvature) -> BlockCurvature: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def dense(self) -> Tensor:
        """The matrix that the block stands for, in the order of its form. For tests and small networks."""
        ...


@dataclass(frozen=True, eq=False)
class EigenPrecision:
    """Λ with known eigenvectors: U ⊗ V. ``inverse`` (G, d_out, d_in) holds one over the eigenvalues.

    The bases need not be orthogonal: a prior that differs by input or output is folded into them.
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

    def _rotated(self, jacobian: BlockJacobian) -> BlockJacobian:
        return jacobian.rotated(self.out, self.inp)

    def sample(self, eps: Tensor) -> Tensor:
        turned = self.out.to(eps) @ (eps * self.inverse.sqrt().to(eps))
        return turned if self.inp is None else turned @ self.inp.to(eps).mT

    def adjoint(self, v: Tensor) -> Tensor:
        turned = self.out.to(v).mT @ (v if self.inp is None else v @ self.inp.to(v))
        return turned * self.inverse.sqrt().to(v)

    def variances(self) -> Tensor:
        found = self.out.square() @ self.inverse.to(self.out)
        return found if self.inp is None else found @ self.inp.square().mT


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """H ≈ B ⊗ A / rows: sums A of inputs (G, d_in, d_in) and B of output gradients (G, d_out, d_out).

    A lookup's A is a diagonal of counts (1, d_in). Division by the number of rows makes a single linear
    layer with constant output curvature exact.
    """

    inp: Tensor
    out: Tensor
    rows: float
    _cache: dict[str, Tensor] = field(default_factory=dict, repr=False)

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

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> EigenPrecision:
        if prior.scale is not None:
            return self._rescaled(phi, prior.value, prior.scale, block)
        if prior.value.ndim:
            by_input = prior.value[:, :1]
            if not torch.allclose(prior.value, by_input.expand_as(prior.value)):
                raise UnsupportedError(
                    f"the prior differs between outputs inside {block.weight}; a Kronecker block allows one "
                    "precision, or one for each input. Use isotropic() or per_layer(), or method=Diagonal() or Full()."
                )
            return self._by_input(phi, prior.value.mean(1))  # slopes go to all outputs alike
        out_values, out_basis, inp_values, inp_basis = self.eigen
        # Kept in the factors' own dtype: float64 for every product would cost more than the fit.
        values = (out_values.unsqueeze(-1) * inp_values.unsqueeze(-2)) / phi.to(out_values) + prior.value.to(out_values)
        return EigenPrecision(out_basis, inp_basis, values.reciprocal(), values.log().sum(dtype=torch.float64))

    def _by_input(self, phi: Tensor, by_input: Tensor) -> EigenPrecision:
        """Λ = (I ⊗ √D)(B ⊗ D^-½ A D^-½ / φ + I)(I ⊗ √D): exact for any prior that differs by input."""
        if self.inp.ndim == 2:
            raise UnsupportedError("an embedding in a Kronecker block allows one precision; use method=Diagonal().")
        out_values, out_basis = self.eigen[:2]
        root = by_input.to(self.inp).rsqrt()  # (G, d_in)
        values, basis = psd_eigh(root.unsqueeze(-1) * self.inp * root.unsqueeze(-2))
        products = (out_values.unsqueeze(-1) * values.unsqueeze(-2)) / phi.to(out_values) + 1
        logdet = products.log().sum(dtype=torch.float64) + out_values.shape[-1] * by_input.double().log().sum()
        return EigenPrecision(out_basis, root.unsqueeze(-1) * basis, products.reciprocal(), logdet)

    def _rescaled(self, phi: Tensor, g: Tensor, scale: Tensor, block: Block) -> EigenPrecision:
        """A prior g D with D = D_out ⊗ D_in fixed: both factors are whitened by theirs, once for all g and φ."""
        if "scale" not in self._cache or not torch.equal(self._cache["scale"], scale):
            by_out, by_inp = scale[:, :, 0], scale[:, 0] / scale[:, 0, :1]
            if not torch.allclose(by_out.unsqueeze(-1) * by_inp.unsqueeze(-2), scale, rtol=1e-4):
                raise UnsupportedError(
                    f"the prior's scale inside {block.weight} is no product of one for outputs and one for inputs, "
                    "which a Kronecker block needs; use method=Diagonal() or Full()."
                )
            self._cache.update(self._whitened(by_out.to(self.out).rsqrt(), by_inp.to(self.inp).rsqrt()), scale=scale)
        out_values, inp_values = self._cache["out_values"], self._cache["inp_values"]
        values = (out_values.unsqueeze(-1) * inp_values.unsqueeze(-2)) / phi.to(out_values) + g.to(out_values)
        logdet = values.log().sum(dtype=torch.float64) + scale.double().log().sum()
        inverse = values.reciprocal()
        if self.inp.ndim == 2:  # a lookup's basis is the identity: its scale goes into the eigenvalues
            inverse = inverse * self._cache["inp"].square().unsqueeze(-2)
            return EigenPrecision(self._cache["out"], None, inverse, logdet)
        return EigenPrecision(self._cache["out"], self._cache["inp"], inverse, logdet)

    def _whitened(self, out_root: Tensor, inp_root: Tensor) -> dict[str, Tensor]:
        out = self.out / max(self.rows, 1)
        out_values, out_basis = psd_eigh(out_root.unsqueeze(-1) * out * out_root.unsqueeze(-2))
        found = {"out_values": out_values, "out": out_root.unsqueeze(-1) * out_basis}
        if self.inp.ndim == 2:
            return {**found, "inp_values": self.inp * inp_root.square(), "inp": inp_root}
        inp_values, inp_basis = psd_eigh(inp_root.unsqueeze(-1) * self.inp * inp_root.unsqueeze(-2))
        return {**found, "inp_values": inp_values, "inp": inp_root.unsqueeze(-1) * inp_basis}

    def diagonal(self) -> Tensor:
        """Floored factor by factor, so that it stays a product."""
        out = self.out.diagonal(dim1=-2, dim2=-1) / max(self.rows, 1)
        inp = self.inp if self.inp.ndim == 2 else self.inp.diagonal(dim1=-2, dim2=-1)
        return floored(out).unsqueeze(-1) * floored(inp).unsqueeze(-2)


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

    def diagonal(self) -> Tensor:
        found = self.out.square() @ self.values
        return floored(found if self.inp is None else found @ self.inp.square().mT)

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> EigenPrecision:
        if prior.whole.ndim:
            raise UnsupportedError(
                f"the prior differs inside {block.weight}; EKron allows one precision for each block. "
                "Use isotropic() or per_layer(), or method=Kron(), Diagonal() or Full()."
            )
        values = self.values / phi.to(self.values) + prior.value.to(self.values)
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

    def adjoint(self, v: Tensor) -> Tensor:
        return self.sample(v)

    def variances(self) -> Tensor:
        return self.inverse


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

    def diagonal(self) -> Tensor:
        return floored(self.values)

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> DiagonalPrecision:
        values = self.values / phi.to(self.values) + prior.whole.to(self.values)
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

    def adjoint(self, v: Tensor) -> Tensor:
        flat = v.reshape(v.shape[0], -1)
        solved = torch.linalg.solve_triangular(self.factor, flat.to(self.factor).mT, upper=False).mT
        return solved.reshape(v.shape).to(v)

    def variances(self) -> Tensor:
        return self._root.square().sum(0)


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

    def diagonal(self) -> Tensor:
        return floored(self.matrix.diagonal())

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> CholeskyPrecision:
        size = len(self.matrix)
        added = prior.whole.double().reshape(-1).expand(size)
        return CholeskyPrecision(cholesky(self.matrix.double() / phi.double() + torch.diag(added), block.weight))


STRUCTURES: dict[str, Callable[..., BlockCurvature]] = {
    "KroneckerBlock": lambda inp, out, rows: KroneckerBlock(inp, out, float(rows)),
    "EigenBlock": lambda out, values, inp=None: EigenBlock(out, inp, values),
    "DiagonalBlock": DiagonalBlock,
    "FullBlock": FullBlock,
}


def psd_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, cut at zero, and eigenvectors of a sum of squares."""
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError("a curvature factor is not finite; check the data and the network for overflow.")
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp_min(0), vectors


def floored(values: Tensor) -> Tensor:
    """No value below a thousandth of the median, nor of the mean where the median is nought; never nought itself."""
    typical = values.median()
    typical = typical if float(typical) > 0 else values.mean()
    return values.clamp_min(float(1e-3 * typical) or 1.0)


def floored_by_layer(values: Tensor, selection: Selection) -> Tensor:
    """The same for every layer apart, with values (P,) in the order of theta; weights not selected do not count."""
    names = selection.layer_of()
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    numbers = torch.tensor([order[name] for name in names]).repeat_interleave(torch.tensor(selection.sizes))
    numbers = selection.picked(numbers).to(values.device)
    found = values.clone()
    for number in range(len(order)):
        mine = numbers == number
        found[mine] = floored(values[mine])
    return found
