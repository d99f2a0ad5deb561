"""The Kronecker eigenbasis with the exact diagonal of the curvature in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.core.schema import Array, Field, Maybe, orthonormal
from lapwing.core.state import State, saved
from lapwing.curvature.blocks import BlockCurvature
from lapwing.curvature.blockwise import BlockwiseCurvature
from lapwing.curvature.eigenbasis import EigenPrecision, diagonal_in, each_pair, precision_in
from lapwing.curvature.factors import Factor, decompose
from lapwing.curvature.kronecker import KroneckerBlock, linear_form, wide_remark
from lapwing.curvature.protocols import floored
from lapwing.curvature.sweep import Sweep
from lapwing.errors import FileError, UnsupportedError
from lapwing.linalg.bases import Axes, Basis, FullBasis, ThinBasis
from lapwing.networks.jacobians import Block
from lapwing.networks.network import Network
from lapwing.priors.bound import BlockPrior


def eigen_corrected(sweep: Sweep, kron: BlockwiseCurvature) -> BlockwiseCurvature:
    """Return the exact diagonal of the curvature in the eigenbasis of each Kronecker block, by a second pass.

    Where a basis has a rest, directions that no row has, it gets the mean over them.
    """
    blocks = {i: block for i, block in enumerate(kron.blocks) if isinstance(block, KroneckerBlock)}
    spectra = decompose([factor for block in blocks.values() for factor in (block.out, block.inp)])
    bases = {i: (out.basis, inp.basis) for i, out, inp in zip(blocks, spectra[::2], spectra[1::2], strict=True)}
    values: dict[int, Tensor] = {}
    for i, part, _ in sweep.blocks():
        if i in bases:
            squares = part.squares_in(*bases[i]).double()
            values[i] = values[i] + squares if i in values else squares
        del part  # before the next one is computed
    totals = dict(zip(bases, sweep.processes.sum([values.get(i) for i in bases]), strict=True))
    corrected: dict[int, BlockCurvature] = {i: EigenBlock(*bases[i], totals[i].to(blocks[i].dtype)) for i in bases}
    return replace(kron, blocks=tuple(corrected.get(i, block) for i, block in enumerate(kron.blocks)))


@saved
@dataclass(frozen=True, eq=False)
class EigenBlock:
    """H in a Kronecker eigenbasis with its exact diagonal there (EKFAC): ``values`` for each pair of parts."""

    out: Basis
    inp: Basis
    values: Tensor  # (G, m_out, m_in)
    only_diagonal: ClassVar[None] = None

    def __add__(self, other: EigenBlock) -> EigenBlock:
        raise UnsupportedError(
            "eigenvalue-corrected curvatures of different data have different bases and do not add; "
            "add Kron() curvatures, or fit EKron() on all the data."
        )

    def mixed(self, others: Sequence[EigenBlock], weights: Tensor) -> EigenBlock:
        raise UnsupportedError(
            "eigenvalue-corrected curvatures of different outputs have different bases and do not add; "
            "use Kron(), Diagonal() or Full()."
        )

    def state(self) -> State:
        bases = {**_basis_tensors("out", self.out), **_basis_tensors("inp", self.inp)}
        return State("EigenBlock", tensors={**bases, "values": self.values})

    @classmethod
    def from_state(cls, state: State, network: Network) -> EigenBlock:
        groups, d_out, d_in = linear_form(network)
        bases = {
            name: _basis_fields(name, groups, size, network.dtype) for name, size in (("out", d_out), ("inp", d_in))
        }
        values = Array((groups, None, None), 0, dtype=network.dtype)
        fields = state.read(values=values, **bases["out"], **bases["inp"])
        (out, n_out), (inp, n_inp) = _basis_from(fields, "out", d_out), _basis_from(fields, "inp", d_in)
        if fields["values"].shape[1:] != (n_out, n_inp):
            raise FileError(f"eigenvalues {tuple(fields['values'].shape)}; expected ({groups}, {n_out}, {n_inp})")
        return cls(out, inp, fields["values"])

    def dense(self) -> Tensor:
        _, d_out, d_in = self.diagonal().shape
        eye = lambda size: torch.eye(size).to(self.values).expand(len(self.values), size, size)
        out, inp = self.out.coordinates(eye(d_out)), self.inp.coordinates(eye(d_in))
        values = each_pair(self.out, self.inp, self.values, out.shape[-1], inp.shape[-1])
        blocks = []
        for o, i, v in zip(out, inp, values, strict=True):
            basis = torch.kron(o.contiguous(), i.contiguous())
            blocks.append((basis * v.reshape(-1)) @ basis.T)
        return torch.block_diag(*blocks)

    def factors(self, prior: BlockPrior) -> tuple[Factor, ...]:
        return ()

    def remarks(self, block: Block) -> tuple[str, ...]:
        wide = {"input": (self.inp, block.d_in), "output": (self.out, block.d_out)}
        is_wide = lambda basis: isinstance(basis, Axes) and not basis.exact
        return tuple(wide_remark(block, side, d) for side, (basis, d) in wide.items() if is_wide(basis))

    def diagonal(self) -> Tensor:
        return floored(diagonal_in(self.out, self.inp, self.values))

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> EigenPrecision:
        if prior.whole.ndim:
            raise UnsupportedError(
                f"the prior differs inside {block.weight}; EKron allows one precision for each block. "
                "Use isotropic() or per_layer(), or method=Kron(), Diagonal() or Full()."
            )
        return precision_in(self.out, self.inp, self.values / phi.to(self.values) + prior.value.to(self.values))


def _orthonormal_columns(matrix: Tensor) -> str:
    """Check that the columns of matrices (..., n, m) are orthonormal up to float32 rounding."""
    return orthonormal(matrix.mT).replace("rows", "columns")


def _basis_tensors(name: str, basis: Basis) -> dict[str, Tensor]:
    """Return the numbers of a basis for a file. Axes have none, but a mark where only a diagonal was taken."""
    if isinstance(basis, FullBasis):
        return {name: basis.vectors}
    if isinstance(basis, ThinBasis):
        return {f"{name}_thin": basis.vectors}
    assert isinstance(basis, Axes)
    return {} if basis.exact else {f"{name}_axes": torch.ones(())}


def _basis_fields(name: str, groups: int, size: int, dtype: torch.dtype) -> dict[str, Field]:
    """Return the fields of a basis of R^size in a file."""
    full = Array((groups, size, size), dtype=dtype, also=orthonormal)
    thin = Array((groups, size, None), dtype=dtype, also=_orthonormal_columns)
    return {name: Maybe(full), f"{name}_thin": Maybe(thin), f"{name}_axes": Maybe(Array((), 1, 1))}


def _basis_from(fields: Mapping[str, Any], name: str, size: int) -> tuple[Basis, int]:
    """Return a basis of R^size from a file, and the number of its parts."""
    full, thin, axes = (fields[name + form] for form in ("", "_thin", "_axes"))
    if sum(given is not None for given in (full, thin, axes)) > 1:
        raise FileError(f"the basis {name!r} is there twice; expected one")
    if full is not None:
        return FullBasis(full), size
    if thin is None:
        return Axes(exact=axes is None), size
    if not 0 < thin.shape[-1] < size:
        raise FileError(f"the basis {name!r} has {thin.shape[-1]} vectors of {size}; expected fewer")
    return ThinBasis(thin), thin.shape[-1] + 1
