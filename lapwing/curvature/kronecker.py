"""Kronecker factors of the curvature and their correction in the eigenbasis: sums, blocks and precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing.core.processes import Processes
from lapwing.core.schema import Array, Either, Field, Maybe, semidefinite
from lapwing.core.settings import one_of, require_integer
from lapwing.core.state import Latest, State, saved
from lapwing.curvature.blocks import BlockSum, DiagonalSum, FullSum
from lapwing.curvature.blockwise import BlockwiseCurvature, blockwise_sum
from lapwing.curvature.eigenbasis import EigenPrecision, precision_in
from lapwing.curvature.factors import (
    DiagonalFactor,
    Factor,
    FactorSum,
    MatrixFactor,
    RowsFactor,
    Spectrum,
    added,
    share_spectra,
)
from lapwing.curvature.protocols import floored
from lapwing.curvature.seeds import check_estimate
from lapwing.curvature.sweep import Sweep
from lapwing.errors import FileError, UnsupportedError
from lapwing.networks.closed_form import ClosedForm
from lapwing.networks.jacobians import Block, BlockJacobian
from lapwing.networks.network import Network
from lapwing.priors.bound import BlockPrior

C = TypeVar("C")


def check_settings(curvature: str | None, draws: int, sharing: str, full_limit: int, factor_limit: int) -> None:
    """Raise unless the settings that all methods with Kronecker factors share are valid."""
    check_estimate(curvature, draws)
    one_of(("expand", "reduce")).check("sharing", sharing)
    require_integer("full_limit", full_limit, least=0)
    require_integer("factor_limit", factor_limit, least=1)


def kronecker_curvature(
    sweep: Sweep, network: Network, sharing: str, full_limit: int, factor_limit: int
) -> BlockwiseCurvature:
    """Return Kronecker factors for linear blocks and full or diagonal blocks for the rest, by one pass."""
    if network.selection.index is not None:
        raise UnsupportedError("a subnetwork of single weights has no Kronecker structure; use Full() or Diagonal().")
    other = lambda block: (FullSum if block.size <= full_limit else DiagonalSum)(block, network)
    sums: list[BlockSum] = [
        _KroneckerSum(block, sharing, network, factor_limit) if block.linear else other(block)
        for block in network.layout
    ]
    return blockwise_sum(sweep, network, sums)


class _KroneckerSum:
    """The two factors of a linear block, summed over a pass."""

    def __init__(self, block: Block, sharing: str, network: Network, limit: int) -> None:
        factor = lambda size: FactorSum(size, block.groups, network.device, network.dtype, limit)
        self._reduce, self._inp, self._out = sharing == "reduce", factor(block.d_in), factor(block.d_out)
        self._rows = 0.0

    def add(self, part: BlockJacobian | ClosedForm, first: bool, weights: Tensor | None = None) -> None:
        rows = part.kronecker_rows(self._reduce, weights)
        if not rows.number:  # the batch does not use the block
            return
        if first:
            self._rows += rows.number
            if rows.counts is not None:
                self._inp.add_diagonal(rows.counts)
            if rows.inputs is not None:
                self._inp.add(rows.inputs)
        if rows.diagonal is not None:
            self._out.add_diagonal(rows.diagonal)
            if rows.outputs is not None:
                self._out.subtract(rows.outputs)
        elif rows.outputs is not None:
            (self._out.add_runs if rows.by_runs else self._out.add)(rows.outputs)

    def settle(self, processes: Processes) -> None:
        self._inp.settle(processes)
        self._out.settle(processes)

    def totals(self) -> list[Tensor | None]:
        rows = torch.tensor(self._rows, dtype=torch.float64)
        return [*self._inp.totals(), *self._out.totals(), rows]

    def value(self, totals: Sequence[Any]) -> KroneckerBlock:
        half = len(totals) // 2
        return KroneckerBlock(self._inp.value(totals[:half]), self._out.value(totals[half:-1]), float(totals[-1]))


def eigen_shared(kron: C, processes: Processes) -> C:
    """Return the curvature with its eigendecompositions done, each by one of the processes; alone, when needed.

    Those of a curvature for each output depend on the noise, so every process does them all.
    """
    if processes.group is None or not isinstance(kron, BlockwiseCurvature):
        return kron
    blocks = [block for block in kron.blocks if isinstance(block, KroneckerBlock)]
    share_spectra([factor for block in blocks for factor in (block.out, block.inp)], processes)
    return kron


@dataclass(frozen=True, eq=False)
class Eigen:
    """The spectra of the two factors of a block."""

    out: Spectrum
    inp: Spectrum
    rows: float

    def precision(self, phi: Tensor, added: Tensor, scale_logdet: Tensor | float = 0.0) -> EigenPrecision:
        """Return H/φ + ``added``, in units of a prior's scale with this log-determinant.

        In the network's dtype: all terms are positive, and float64 products would cost more than the fit.
        """
        out_values = self.out.values / (self.rows or 1)
        products = (out_values / phi.to(out_values)).unsqueeze(-1) * self.inp.values.unsqueeze(-2)
        return precision_in(self.out.basis, self.inp.basis, products + added.to(products), scale_logdet)


@saved
@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """H ≈ B ⊗ A / rows: sums A of inputs (d_in) and B of output gradients (d_out), for each of G groups.

    The A of a lookup is a diagonal of counts. Division by the number of rows makes a single linear layer with constant
    output curvature exact.
    """

    inp: Any  # a Factor, as is ``out``
    out: Any
    rows: float
    only_diagonal: ClassVar[None] = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the network."""
        dtype: torch.dtype = self.out.dtype
        return dtype

    def __add__(self, other: KroneckerBlock) -> KroneckerBlock:
        return KroneckerBlock(added([self.inp, other.inp]), added([self.out, other.out]), self.rows + other.rows)

    def mixed(self, others: Sequence[KroneckerBlock], weights: Tensor) -> KroneckerBlock:
        """Weight the output factors; all blocks have the same input factor."""
        return replace(self, out=added([self.out, *(block.out for block in others)], weights))

    def state(self) -> State:
        tensors = {name + form: t for name in ("inp", "out") for form, t in getattr(self, name).tensors().items()}
        return State("KroneckerBlock", tensors={**tensors, "rows": torch.tensor(self.rows, dtype=torch.float64)})

    @classmethod
    def from_state(cls, state: State, network: Network) -> KroneckerBlock:
        groups, d_out, d_in = linear_form(network)
        factors = {**_factor_fields("inp", groups, d_in), **_factor_fields("out", groups, d_out)}
        fields = state.read(rows=Array((), 0), **factors)
        inp, out = (_factor_from(fields, name, network.dtype) for name in ("inp", "out"))
        return cls(inp, out, float(fields["rows"]))

    def dense(self) -> Tensor:
        pairs = zip(self.out.dense(), self.inp.dense(), strict=True)
        return torch.block_diag(*(torch.kron(o.contiguous(), i.contiguous()) / self.rows for o, i in pairs))

    def factors(self, prior: BlockPrior) -> tuple[Factor, ...]:
        if prior.scale is not None:
            return ()
        return (self.out,) if prior.value.ndim else (self.out, self.inp)

    def remarks(self, block: Block) -> tuple[str, ...]:
        wide = {"input": (self.inp, block.d_in), "output": (self.out, block.d_out)}
        return tuple(wide_remark(block, side, size) for side, (factor, size) in wide.items() if not factor.exact)

    @property
    def eigen(self) -> Eigen:
        """The eigendecomposition of both factors."""
        return Eigen(self.out.spectrum, self.inp.spectrum, self.rows)

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> EigenPrecision:
        if prior.scale is not None:
            return self._rescaled(phi, prior.value, prior.scale, block)
        if not prior.value.ndim:
            return self.eigen.precision(phi, prior.value)
        if not torch.allclose(prior.value, prior.value[:, :1].expand_as(prior.value)):
            raise UnsupportedError(
                f"the prior differs between outputs inside {block.weight}; a Kronecker block allows one "
                "precision, or one for each input. Use isotropic() or per_layer(), or method=Diagonal() or Full()."
            )
        by_input = prior.value.mean(1).double()  # the gradient is shared equally by all outputs
        return self._by_input(phi, by_input, block.d_out * by_input.log().sum())

    def _by_input(self, phi: Tensor, by_input: Tensor, logdet: Tensor) -> EigenPrecision:
        """Return Λ = (I ⊗ √D)(B ⊗ D^-½ A D^-½ / φ + I)(I ⊗ √D), exact for any prior that differs by input."""
        return Eigen(self.out.spectrum, self.inp.whitened(by_input.rsqrt()), self.rows).precision(
            phi, torch.ones(()), logdet
        )

    def _rescaled(self, phi: Tensor, g: Tensor, scale: Tensor, block: Block) -> EigenPrecision:
        """Return Λ for a prior g D with a fixed D = D_out ⊗ D_in.

        Each factor of H is whitened by its factor of D, once for all g and φ.
        """
        white = self._whitened.at(scale, lambda: self._whitening(scale, block))
        return white.precision(phi, g, scale.double().log().sum())

    @cached_property
    def _whitened(self) -> Latest[Tensor, Eigen]:
        return Latest(torch.equal)

    def _whitening(self, scale: Tensor, block: Block) -> Eigen:
        """Return the eigendecomposition in units of ``scale``."""
        by_out, by_inp = scale[:, :, 0], scale[:, 0] / scale[:, 0, :1]
        if not torch.allclose(by_out.unsqueeze(-1) * by_inp.unsqueeze(-2), scale, rtol=1e-4):
            raise UnsupportedError(
                f"the scale of the prior inside {block.weight} is not a product of one factor for outputs and one for "
                "inputs, which a Kronecker block needs; use method=Diagonal() or Full()."
            )
        out, inp = self.out.whitened(by_out.double().rsqrt()), self.inp.whitened(by_inp.double().rsqrt())
        return Eigen(out, inp, self.rows)

    def diagonal(self) -> Tensor:
        """Return the diagonal with each factor floored separately, so that it stays a Kronecker product."""
        inp, out = self.inp.diagonal(), self.out.diagonal() / (self.rows or 1)
        return floored(out).unsqueeze(-1) * floored(inp).unsqueeze(-2)


def wide_remark(block: Block, side: str, size: int) -> str:
    """Say that a factor is a diagonal although its rows are not one-hot."""
    return (
        f"the {side} factor of {block.weight} is a diagonal, an approximation: a matrix of {size:,} rows is above the "
        "factor_limit of the method. Raise it for d² memory and d³ time."
    )


def _factor_fields(name: str, groups: int, size: int) -> dict[str, Field]:
    """Return the fields of a factor in a file: a matrix or an exact diagonal, another diagonal, or rows."""
    matrix = Array((groups, size, size), dtype=torch.float64, also=semidefinite)
    diagonal = Array((groups, size), 0, dtype=torch.float64)
    rows = Array((groups, None, size))
    return {name: Maybe(Either(matrix, diagonal)), f"{name}_diagonal": Maybe(diagonal), f"{name}_rows": Maybe(rows)}


def _factor_from(fields: dict[str, Any], name: str, dtype: torch.dtype) -> Factor:
    """Return a factor from a file."""
    summed, diagonal, rows = (fields[name + form] for form in ("", "_diagonal", "_rows"))
    if sum(given is not None for given in (summed, diagonal, rows)) != 1:
        raise FileError(f"the factor {name!r} is missing or there twice; expected a matrix, a diagonal, or rows")
    if rows is not None:
        if not 0 < rows.shape[1] < rows.shape[2]:
            raise FileError(f"the factor {name!r} has {rows.shape[1]} rows of {rows.shape[2]}; expected fewer")
        return RowsFactor(rows.to(dtype), dtype)
    if diagonal is not None:
        return DiagonalFactor(diagonal, dtype, exact=False)
    return MatrixFactor(summed, dtype) if summed.ndim == 3 else DiagonalFactor(summed, dtype)


def linear_form(network: Network) -> tuple[int, ...]:
    """Return (G, d_out, d_in) of the only block of a network; raise ``FileError`` if it is no linear map."""
    (block,) = network.layout
    if not block.linear:
        raise FileError(f"the file has Kronecker factors of {block.weight!r}, which is no linear map")
    return block.form
