"""A Kronecker-factored block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lapwing.core.state import Latest, State, saved
from lapwing.curvature.blocks.eigen import EigenPrecision
from lapwing.curvature.protocols import floored, weighted_sum
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.networks.blocks import Block
from lapwing.networks.network import Network
from lapwing.priors.bound import BlockPrior


class WhitenedFactors(NamedTuple):
    """Eigenvalues and bases of both factors in units of a prior's scale. A lookup has its root scale as ``inp``."""

    out_values: Tensor
    out: Tensor
    inp_values: Tensor
    inp: Tensor


@saved
@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """H ≈ B ⊗ A / rows: sums A of inputs (G, d_in, d_in) and B of output gradients (G, d_out, d_out).

    The A of a lookup is a diagonal of counts (1, d_in). Division by the number of rows makes a single linear layer
    with constant output curvature exact.
    """

    inp: Tensor
    out: Tensor
    rows: float

    @property
    def only_diagonal(self) -> None:
        return None

    def __add__(self, other: KroneckerBlock) -> KroneckerBlock:
        return KroneckerBlock(self.inp + other.inp, self.out + other.out, self.rows + other.rows)

    def mixed(self, others: Sequence[KroneckerBlock], weights: Tensor) -> KroneckerBlock:
        """Weight the output factors; all blocks have the same input factor."""
        return replace(self, out=weighted_sum([self.out, *(block.out for block in others)], weights))

    def state(self) -> State:
        rows = torch.tensor(self.rows, dtype=torch.float64)
        return State("KroneckerBlock", tensors={"inp": self.inp, "out": self.out, "rows": rows})

    @classmethod
    def from_state(cls, state: State, network: Network) -> KroneckerBlock:
        inp, out = (state.tensors[key].to(network.device, network.dtype) for key in ("inp", "out"))
        return cls(inp, out, float(state.tensors["rows"]))

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
            return self._by_input(phi, prior.value.mean(1))  # the gradient is shared equally by all outputs
        out_values, out_basis, inp_values, inp_basis = self.eigen
        # In the dtype of the factors: float64 products would cost more than the fit.
        values = (out_values.unsqueeze(-1) * inp_values.unsqueeze(-2)) / phi.to(out_values) + prior.value.to(out_values)
        return EigenPrecision(out_basis, inp_basis, values.reciprocal(), values.log().sum(dtype=torch.float64))

    def _by_input(self, phi: Tensor, by_input: Tensor) -> EigenPrecision:
        """Return Λ = (I ⊗ √D)(B ⊗ D^-½ A D^-½ / φ + I)(I ⊗ √D), exact for any prior that differs by input."""
        if self.inp.ndim == 2:
            raise UnsupportedError("an embedding in a Kronecker block allows one precision; use method=Diagonal().")
        out_values, out_basis = self.eigen[:2]
        root = by_input.to(self.inp).rsqrt()  # (G, d_in)
        values, basis = psd_eigh(root.unsqueeze(-1) * self.inp * root.unsqueeze(-2))
        products = (out_values.unsqueeze(-1) * values.unsqueeze(-2)) / phi.to(out_values) + 1
        logdet = products.log().sum(dtype=torch.float64) + out_values.shape[-1] * by_input.double().log().sum()
        return EigenPrecision(out_basis, root.unsqueeze(-1) * basis, products.reciprocal(), logdet)

    def _rescaled(self, phi: Tensor, g: Tensor, scale: Tensor, block: Block) -> EigenPrecision:
        """Return Λ for a prior g D with a fixed D = D_out ⊗ D_in.

        Each factor of H is whitened by its factor of D, once for all g and φ.
        """
        white = self._whitened.at(scale, lambda: self._whitening(scale, block))
        products = white.out_values.unsqueeze(-1) * white.inp_values.unsqueeze(-2)
        values = products / phi.to(products) + g.to(products)
        logdet = values.log().sum(dtype=torch.float64) + scale.double().log().sum()
        inverse = values.reciprocal()
        if self.inp.ndim == 2:  # the basis of a lookup is the identity: its scale goes into the eigenvalues
            return EigenPrecision(white.out, None, inverse * white.inp.square().unsqueeze(-2), logdet)
        return EigenPrecision(white.out, white.inp, inverse, logdet)

    @cached_property
    def _whitened(self) -> Latest[Tensor, WhitenedFactors]:
        return Latest(torch.equal)

    def _whitening(self, scale: Tensor, block: Block) -> WhitenedFactors:
        by_out, by_inp = scale[:, :, 0], scale[:, 0] / scale[:, 0, :1]
        if not torch.allclose(by_out.unsqueeze(-1) * by_inp.unsqueeze(-2), scale, rtol=1e-4):
            raise UnsupportedError(
                f"the scale of the prior inside {block.weight} is not a product of one factor for outputs and one for "
                "inputs, which a Kronecker block needs; use method=Diagonal() or Full()."
            )
        out_root, inp_root = by_out.to(self.out).rsqrt(), by_inp.to(self.inp).rsqrt()
        out = self.out / max(self.rows, 1)
        out_values, out_basis = psd_eigh(out_root.unsqueeze(-1) * out * out_root.unsqueeze(-2))
        out_basis = out_root.unsqueeze(-1) * out_basis
        if self.inp.ndim == 2:
            return WhitenedFactors(out_values, out_basis, self.inp * inp_root.square(), inp_root)
        inp_values, inp_basis = psd_eigh(inp_root.unsqueeze(-1) * self.inp * inp_root.unsqueeze(-2))
        return WhitenedFactors(out_values, out_basis, inp_values, inp_root.unsqueeze(-1) * inp_basis)

    def diagonal(self) -> Tensor:
        """Return the diagonal with each factor floored separately, so that it stays a Kronecker product."""
        out = self.out.diagonal(dim1=-2, dim2=-1) / max(self.rows, 1)
        inp = self.inp if self.inp.ndim == 2 else self.inp.diagonal(dim1=-2, dim2=-1)
        return floored(out).unsqueeze(-1) * floored(inp).unsqueeze(-2)


def psd_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, negative ones set to zero, and eigenvectors of a positive semidefinite matrix.

    Single-precision LAPACK returns NaN for some finite matrices of low rank; those are decomposed in float64.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError("a curvature factor is not finite; check the data and the network for overflow.")
    values, vectors = torch.linalg.eigh(matrix)
    if not bool(torch.isfinite(vectors).all()):
        values, vectors = (t.to(matrix.dtype) for t in torch.linalg.eigh(matrix.double()))
    if not bool(torch.isfinite(vectors).all()):
        raise NumericalError(
            f"the eigenvectors of a curvature factor {tuple(matrix.shape)} are not finite; expected finite numbers. "
            "Scale the inputs of the network, or use method=Diagonal()."
        )
    return values.clamp_min(0), vectors
