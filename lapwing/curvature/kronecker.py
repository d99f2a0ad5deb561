"""Curvature with no coupling between blocks: Kronecker factors, and their correction in the eigenbasis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.curvature.base import Curvature, Precision, Sweep, floor_by_layer, floor_values
from lapwing.curvature.blocks import (
    BlockCurvature,
    BlockPrecision,
    BlockSum,
    DiagonalFactor,
    DiagonalPrecision,
    DiagonalSum,
    Factor,
    FactorSum,
    FullSum,
    MatrixFactor,
    RowsFactor,
    Spectrum,
    decompose,
    share_spectra,
    sum_factors,
)
from lapwing.data.processes import Processes
from lapwing.errors import FileError, UnsupportedError
from lapwing.linalg.dense import Axes, Basis, FullBasis, ThinBasis
from lapwing.networks.jacobians import Block, BlockJacobian, flatten_blocks
from lapwing.networks.linear_jacobian import HeadGGN
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.networks.tangent import LayerJacobians
from lapwing.priors import BlockPrior, BoundPrior
from lapwing.runtime.settings import Latest
from lapwing.runtime.states import Array, Either, Field, Maybe, PartOf, State, orthonormal, saved, semidefinite


@dataclass(frozen=True, eq=False)
class EigenPrecision(BlockPrecision):
    """Λ with known eigenvectors U ⊗ V. ``inverse`` (G, m_out, m_in) holds one over the eigenvalues.

    There is one for each pair of parts of the bases. A prior that differs by input or output is folded into the bases.
    """

    out: Basis
    inp: Basis
    inverse: Tensor
    log_determinant: Tensor

    def _weights(self, rotated: BlockJacobian) -> Tensor:
        """Return the inverse for all coordinates of a rotated Jacobian."""
        return each_pair(self.out, self.inp, self.inverse, *rotated.widths)

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        rotated = jacobian.rotate(self.out, self.inp, crossed=False)
        return rotated.quadratic_form(self._weights(rotated), tokens, full)

    def quadratics(self, precisions: Sequence[EigenPrecision], jacobian: BlockJacobian, tokens: int) -> list[Tensor]:
        if any(each.out is not self.out or each.inp is not self.inp for each in precisions):
            return [each.quadratic(jacobian, tokens, True) for each in precisions]
        rotated = jacobian.rotate(self.out, self.inp, crossed=False)
        inverses = torch.stack([each._weights(rotated) for each in precisions])
        return list(rotated.quadratic_forms(inverses, tokens, True))

    def cross(self, jacobian: BlockJacobian, other: BlockJacobian | None = None) -> Tensor:
        rotated = jacobian.rotate(self.out, self.inp)
        second = rotated if other is None else other.rotate(self.out, self.inp)
        return rotated.between(second, self._weights(rotated))

    def sample(self, eps: Tensor) -> Tensor:
        drawn = self.out.draw(self.inp.draw(eps).mT).mT
        scaled = drawn * each_pair(self.out, self.inp, self.inverse.sqrt(), *drawn.shape[-2:]).to(eps)
        return self.out.combine(self.inp.combine(scaled).mT).mT

    def adjoint(self, v: Tensor) -> Tensor:
        turned = self.out.coordinates(self.inp.coordinates(v).mT).mT
        scaled = turned * each_pair(self.out, self.inp, self.inverse.sqrt(), *turned.shape[-2:]).to(v)
        return self.out.draw_transposed(self.inp.draw_transposed(scaled).mT).mT

    def variances(self) -> Tensor:
        return diagonal_in(self.out, self.inp, self.inverse)

    def axes(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        outputs, inputs = (
            basis.coordinates(torch.eye(size).to(self.inverse).unsqueeze(0))
            for basis, size in ((self.out, block.d_out), (self.inp, block.d_in))
        )
        return outputs, inputs, each_pair(self.out, self.inp, self.inverse, outputs.shape[-1], inputs.shape[-1])


def each_pair(out: Basis, inp: Basis, values: Tensor, height: int, width: int) -> Tensor:
    """Return a value for each pair of coordinates (..., height, width), from one for each pair of parts."""
    return out.expand(inp.expand(values, width).mT, height).mT


def diagonal_in(out: Basis, inp: Basis, values: Tensor) -> Tensor:
    """Return the diagonal (G, d_out, d_in) of the matrix with these eigenvalues in the basis out ⊗ inp."""
    return out.diagonal(inp.diagonal(values).mT).mT


def precision_in(out: Basis, inp: Basis, values: Tensor, scale_logdet: Tensor | float = 0.0) -> EigenPrecision:
    """Return the precision with these eigenvalues, in units of a prior's scale with this log-determinant."""
    logs = values.log()
    logs = logs if inp.counts is None else logs * inp.counts  # counts are float64
    logs = logs if out.counts is None else logs * out.counts.unsqueeze(-1)
    return EigenPrecision(out, inp, values.reciprocal(), logs.sum(dtype=torch.float64) + scale_logdet)


@dataclass(frozen=True, eq=False)
class BlockwisePrecision(Precision):
    """Λ with no coupling between blocks."""

    blocks: tuple[BlockPrecision, ...]
    layout: tuple[Block, ...]
    selection: Selection
    shares_rotation: ClassVar[bool] = True

    def logdet(self) -> Tensor:
        return torch.stack([block.log_determinant.double() for block in self.blocks]).sum()

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        """Return (B, S, C, C), or (B, S, C). Blocks are added one by one, so memory is that of the largest."""
        each = (self.blocks[i].quadratic(part, jacobian.tokens, full) for i, part in jacobian.numbered_blocks())
        return reduce(_add_in_place, each)

    def quadratics(self, precisions: Sequence[BlockwisePrecision], jacobian: LayerJacobians) -> list[Tensor]:
        """Return ``quadratic`` of all precisions; every block is formed, and rotated into its basis, once."""
        totals: list[Tensor] | None = None
        for i, part in jacobian.numbered_blocks():
            blocks = [precision.blocks[i] for precision in precisions]
            covariances = blocks[0].quadratics(blocks, part, jacobian.tokens)
            totals = covariances if totals is None else [*map(_add_in_place, totals, covariances)]
        assert totals is not None
        return totals

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        if other is None:
            pairs = zip(self.blocks, jacobian, strict=True)
            return reduce(_add_in_place, (precision.cross(part) for precision, (_, part) in pairs))
        triples = zip(self.blocks, jacobian, other, strict=True)
        return reduce(_add_in_place, (precision.cross(part, second) for precision, (_, part), (_, second) in triples))

    def sample(self, eps: Tensor) -> Tensor:
        return self._by_block(eps, lambda precision, part: precision.sample(part))

    def adjoint(self, v: Tensor) -> Tensor:
        return self._by_block(v, lambda precision, part: precision.adjoint(part))

    def variances(self) -> Tensor:
        return flatten_blocks([precision.variances() for precision in self.blocks], self.layout, self.selection)

    def axes(self) -> tuple[Tensor, Tensor, Tensor] | None:
        (block,), (precision,) = self.layout, self.blocks
        axes = precision.axes(block)
        return None if axes is None else (axes[0][0], axes[1][0], axes[2][0])

    def _by_block(self, rows: Tensor, apply: Callable[[BlockPrecision, Tensor], Tensor]) -> Tensor:
        """Return ``apply(precision, part)`` of all blocks, joined, for the parts of rows (n, P)."""
        values = self.selection.split(rows)
        pairs = zip(self.blocks, self.layout, strict=True)
        parts = [apply(precision, block.arrange(values)) for precision, block in pairs]
        return flatten_blocks(parts, self.layout, self.selection)


@saved
@dataclass(frozen=True, eq=False)
class BlockwiseCurvature(Curvature):
    """H with no coupling between blocks. ``blocks`` match the network's layout one to one."""

    blocks: tuple[BlockCurvature, ...]
    layout: tuple[Block, ...]
    selection: Selection

    def __add__(self, other: BlockwiseCurvature) -> BlockwiseCurvature:
        if self.layout != other.layout:
            raise UnsupportedError("these curvatures belong to different networks or weights and do not add.")
        if self.structures() != other.structures():
            raise UnsupportedError(
                f"curvatures with the blocks {self.structures()} and {other.structures()} do not add; expected the "
                "same structures. Fit both with the same method and settings."
            )
        total = tuple(a + b for a, b in zip(self.blocks, other.blocks, strict=True))
        return replace(self, blocks=total)

    def sum_with(self, others: Sequence[BlockwiseCurvature], weights: Tensor) -> BlockwiseCurvature:
        """Return the weighted sum of this curvature and the others, differentiable in the weights (1 + others,)."""
        columns = zip(self.blocks, *(other.blocks for other in others), strict=True)
        return replace(self, blocks=tuple(first.sum_with(rest, weights) for first, *rest in columns))

    def precision(self, phi: Tensor, prior: BoundPrior) -> BlockwisePrecision:
        if self.selection.index is not None:  # entries that are not selected get no variance
            values = self.plain_diagonal()
            return _diagonal_precision(values / phi.to(values) + prior.vector.to(values), self.layout, self.selection)
        priors = [prior.on(block) for block in self.layout]
        pairs = zip(self.blocks, priors, strict=True)
        decompose([factor for curvature, on_block in pairs for factor in curvature.factors(on_block)])
        triples = zip(self.blocks, priors, self.layout, strict=True)
        blocks = tuple(curvature.precision(phi, on_block, block) for curvature, on_block, block in triples)
        return BlockwisePrecision(blocks, self.layout, self.selection)

    def plain_diagonal(self) -> Tensor:
        """Return the diagonal of H as it is, (P,), for diagonal blocks only; ``diagonal`` raises small entries."""
        parts = [block.only_diagonal for block in self.blocks]
        diagonals = [part for part in parts if part is not None]
        if len(diagonals) < len(parts):
            raise UnsupportedError(
                "a subnetwork of single weights has no Kronecker structure; use method=Full() or Diagonal()."
            )
        return flatten_blocks(diagonals, self.layout, self.selection)

    def refuse_prior(self, phi: Tensor, prior: BoundPrior) -> None:
        """Raise if a block cannot take the prior: any takes one precision, for others its factorisation tells."""
        if self.selection.index is None:
            for curvature, block in zip(self.blocks, self.layout, strict=True):
                on_block = prior.on(block)
                if on_block.whole.ndim and curvature.only_diagonal is None:
                    curvature.precision(phi, on_block, block)

    def diagonal(self) -> Tensor:
        if self.selection.index is not None:  # the floor is that of the chosen weights
            return floor_by_layer(self.plain_diagonal(), self.selection)
        return flatten_blocks([block.diagonal() for block in self.blocks], self.layout, self.selection)

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks on factors that are approximated, in words."""
        pairs = zip(self.blocks, self.layout, strict=True)
        return tuple(remark for curvature, block in pairs for remark in curvature.remarks(block))

    def coupling_mask(self) -> Tensor:
        """Return one for every weight in a block with more than its diagonal, and zero for the rest, (P,)."""
        like = self.blocks[0].diagonal()
        parts = [
            torch.full(block.form, float(curvature.only_diagonal is None)).to(like)
            for curvature, block in zip(self.blocks, self.layout, strict=True)
        ]
        return flatten_blocks(parts, self.layout, self.selection)

    def share_decompositions(self, processes: Processes) -> BlockwiseCurvature:
        if processes.group is not None:
            share_spectra([factor for block in self.blocks for factor in block.kronecker_factors], processes)
        return self

    def state(self) -> State:
        return State("BlockwiseCurvature", parts={str(i): block.state() for i, block in enumerate(self.blocks)})

    @classmethod
    def from_state(cls, state: State, network: Network) -> BlockwiseCurvature:
        """Build the curvature; each block gets the network with the one block of the layout that it belongs to."""
        views = [replace(network, layout=(block,)) for block in network.layout]
        blocks = state.read(**{str(i): PartOf(BlockCurvature, view) for i, view in enumerate(views)})
        return cls(tuple(blocks.values()), network.layout, network.selection)

    def structures(self) -> list[str]:
        """Return the name of the structure of every block, in the order of the network's layout."""
        return [type(block).__name__ for block in self.blocks]


def _add_in_place(total: Tensor, part: Tensor) -> Tensor:
    """Return the sum of two results, in the memory of the first where no gradient needs it."""
    return total + part if total.requires_grad or part.requires_grad else total.add_(part)


def blockwise_sum(sweep: Sweep, network: Network, sums: Sequence[BlockSum]) -> BlockwiseCurvature:
    """Return the sums of all blocks over a pass; ``sums`` has an empty one for each block of the network."""
    for number, part, first in sweep.blocks():
        sums[number].add(part, first, sweep.weights)
        del part  # before the next one is computed
    for total in sums:
        total.settle(sweep.processes)
    own = [total.totals() for total in sums]
    everywhere = iter(sweep.processes.sum([part for parts in own for part in parts]))
    blocks = tuple(total.value([next(everywhere) for _ in parts]) for total, parts in zip(sums, own, strict=True))
    return BlockwiseCurvature(blocks, network.layout, network.selection)


def prior_precision(prior: BoundPrior, layout: tuple[Block, ...], selection: Selection) -> BlockwisePrecision:
    """Return the prior alone as a precision: its ``quadratic`` is the prior covariance of outputs."""
    return _diagonal_precision(prior.vector.detach().double(), layout, selection)


def _diagonal_precision(values: Tensor, layout: tuple[Block, ...], selection: Selection) -> BlockwisePrecision:
    """Return Λ = diag(values), (P,). Entries that are not selected get no variance and a log-precision of zero."""
    inverse, logs = selection.split(values.reciprocal()), selection.split(values.log())
    blocks = tuple(
        DiagonalPrecision(block.arrange(inverse), block.arrange(logs).sum(dtype=torch.float64)) for block in layout
    )
    return BlockwisePrecision(blocks, layout, selection)


SHARINGS = ("expand", "reduce")  # ways to treat a weight that is used at many positions


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


class _KroneckerSum(BlockSum):
    """The two factors of a linear block, summed over a pass."""

    def __init__(self, block: Block, sharing: str, network: Network, limit: int) -> None:
        factor = lambda size: FactorSum(size, block.groups, network.device, network.dtype, limit)
        self._reduce, self._inp, self._out = sharing == "reduce", factor(block.d_in), factor(block.d_out)
        self._rows = 0.0

    def add(self, part: BlockJacobian | HeadGGN, first: bool, weights: Tensor | None = None) -> None:
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

    def value(self, totals: Sequence[Tensor]) -> KroneckerBlock:
        half = len(totals) // 2
        return KroneckerBlock(self._inp.value(totals[:half]), self._out.value(totals[half:-1]), float(totals[-1]))


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
class KroneckerBlock(BlockCurvature):
    """H ≈ B ⊗ A / rows: sums A of inputs (d_in) and B of output gradients (d_out), for each of G groups.

    The A of a lookup is a diagonal of counts. Division by the number of rows makes a single linear layer with constant
    output curvature exact.
    """

    inp: Factor
    out: Factor
    rows: float

    def __add__(self, other: KroneckerBlock) -> KroneckerBlock:
        return KroneckerBlock(
            sum_factors([self.inp, other.inp]), sum_factors([self.out, other.out]), self.rows + other.rows
        )

    def sum_with(self, others: Sequence[KroneckerBlock], weights: Tensor) -> KroneckerBlock:
        """Weight the output factors; all blocks have the same input factor."""
        return replace(self, out=sum_factors([self.out, *(block.out for block in others)], weights))

    def state(self) -> State:
        rows = torch.tensor(self.rows, dtype=torch.float64)
        return State("KroneckerBlock", tensors={**_name_tensors(inp=self.inp, out=self.out), "rows": rows})

    @classmethod
    def from_state(cls, state: State, network: Network) -> KroneckerBlock:  # type: ignore[override]
        groups, d_out, d_in = linear_form(network)
        factors = {**_factor_fields("inp", groups, d_in), **_factor_fields("out", groups, d_out)}
        fields = state.read(rows=Array((), 0), **factors)
        inp, out = (_factor_from(fields, name, network.dtype) for name in ("inp", "out"))
        return cls(inp, out, float(fields["rows"]))

    def dense(self) -> Tensor:
        pairs = zip(self.out.dense(), self.inp.dense(), strict=True)
        return torch.block_diag(*(torch.kron(o.contiguous(), i.contiguous()) / self.rows for o, i in pairs))

    @property
    def kronecker_factors(self) -> tuple[Factor, ...]:
        return self.out, self.inp

    def factors(self, prior: BlockPrior) -> tuple[Factor, ...]:
        if prior.scale is not None:
            return ()
        return (self.out,) if prior.value.ndim else self.kronecker_factors

    def remarks(self, block: Block) -> tuple[str, ...]:
        return _wide_remarks(block, self.inp, self.out)

    @property
    def eigen(self) -> Eigen:
        """The eigendecomposition of both factors."""
        return Eigen(self.out.spectrum, self.inp.spectrum, self.rows)

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> EigenPrecision:
        if prior.scale is not None:  # for a prior g D: each factor of H is whitened by its factor of D, once for all g
            scale = prior.scale
            white = self._whitened.at(scale, lambda: self._whitening(scale, block))
            return white.precision(phi, prior.value, scale.double().log().sum())
        if not prior.value.ndim:
            return self.eigen.precision(phi, prior.value)
        if not torch.allclose(prior.value, prior.value[:, :1].expand_as(prior.value)):
            raise UnsupportedError(
                f"the prior differs between outputs inside {block.weight}; a Kronecker block allows one "
                "precision, or one for each input. Use isotropic() or per_layer(), or method=Diagonal() or Full()."
            )
        # Λ = (I ⊗ √D)(B ⊗ D^-½ A D^-½ / φ + I)(I ⊗ √D) is exact for any prior D that differs by input.
        by_input = prior.value.mean(1).double()  # the gradient is shared equally by all outputs
        white = Eigen(self.out.spectrum, self.inp.whiten(by_input.rsqrt()), self.rows)
        return white.precision(phi, torch.ones(()), block.d_out * by_input.log().sum())

    @cached_property
    def _whitened(self) -> Latest[Tensor, Eigen]:
        return Latest(torch.equal)

    def _whitening(self, scale: Tensor, block: Block) -> Eigen:
        """Return the eigendecomposition in units of ``scale`` D = D_out ⊗ D_in."""
        by_out, by_inp = scale[:, :, 0], scale[:, 0] / scale[:, 0, :1]
        if not torch.allclose(by_out.unsqueeze(-1) * by_inp.unsqueeze(-2), scale, rtol=1e-4):
            raise UnsupportedError(
                f"the scale of the prior inside {block.weight} is not a product of one factor for outputs and one for "
                "inputs, which a Kronecker block needs; use method=Diagonal() or Full()."
            )
        out, inp = self.out.whiten(by_out.double().rsqrt()), self.inp.whiten(by_inp.double().rsqrt())
        return Eigen(out, inp, self.rows)

    def diagonal(self) -> Tensor:
        """Return the diagonal with each factor floored separately, so that it stays a Kronecker product."""
        inp, out = self.inp.diagonal(), self.out.diagonal() / (self.rows or 1)
        return floor_values(out).unsqueeze(-1) * floor_values(inp).unsqueeze(-2)


def _wide_remarks(block: Block, inp: Factor | Basis, out: Factor | Basis) -> tuple[str, ...]:
    """Say which factors are diagonals although their rows are not one-hot."""
    return tuple(
        f"the {side} factor of {block.weight} is a diagonal, an approximation: a matrix of {size:,} rows is above the "
        "factor_limit of the method. Raise it for d² memory and d³ time."
        for side, part, size in (("input", inp, block.d_in), ("output", out, block.d_out))
        if not part.exact
    )


def _name_tensors(**sides: Factor | Basis) -> dict[str, Tensor]:
    """Return the numbers of factors or bases for a file, by the name of the side and their form."""
    return {name + form: t for name, part in sides.items() for form, t in part.tensors().items()}


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
        raise FileError(f"the factor {name!r} is missing or stored twice; expected a matrix, a diagonal, or rows")
    if rows is not None:
        if not 0 < rows.shape[1] < rows.shape[2]:
            raise FileError(
                f"the factor {name!r} has {rows.shape[1]} rows of width {rows.shape[2]}; expected fewer than columns"
            )
        return RowsFactor(rows.to(dtype), dtype)
    if diagonal is not None:
        return DiagonalFactor(diagonal, dtype, exact=False)
    return MatrixFactor(summed, dtype) if summed.ndim == 3 else DiagonalFactor(summed, dtype)


def linear_form(network: Network) -> tuple[int, ...]:
    """Return (G, d_out, d_in) of the only block of a network; raise ``FileError`` if it is not a linear map."""
    (block,) = network.layout
    if not block.linear:
        raise FileError(f"the file has Kronecker factors of {block.weight!r}, which is not a linear map")
    return block.form


def correct_eigenvalues(sweep: Sweep, kron: BlockwiseCurvature) -> BlockwiseCurvature:
    """Return the exact diagonal of the curvature in the eigenbasis of each Kronecker block, by a second pass.

    Where a basis has a rest, directions that no row has, it gets the mean over them.
    """
    factors = {i: block.kronecker_factors for i, block in enumerate(kron.blocks) if block.kronecker_factors}
    spectra = decompose([factor for pair in factors.values() for factor in pair])
    bases = {i: (out.basis, inp.basis) for i, out, inp in zip(factors, spectra[::2], spectra[1::2], strict=True)}
    values: dict[int, Tensor] = {}
    for i, part, _ in sweep.blocks():
        if i in bases:
            squares = part.squares_in(*bases[i]).double()
            values[i] = values[i] + squares if i in values else squares
        del part  # before the next one is computed
    totals = dict(zip(bases, sweep.processes.sum([values.get(i) for i in bases]), strict=True))
    corrected: dict[int, BlockCurvature] = {i: EigenBlock(*bases[i], totals[i].to(factors[i][0].dtype)) for i in bases}
    return replace(kron, blocks=tuple(corrected.get(i, block) for i, block in enumerate(kron.blocks)))


@saved
@dataclass(frozen=True, eq=False)
class EigenBlock(BlockCurvature):
    """H in a Kronecker eigenbasis with its exact diagonal there (EKFAC): ``values`` for each pair of parts."""

    out: Basis
    inp: Basis
    values: Tensor  # (G, m_out, m_in)

    def __add__(self, other: EigenBlock) -> EigenBlock:
        raise UnsupportedError(
            "eigenvalue-corrected curvatures of different data have different bases and do not add; "
            "add Kron() curvatures, or fit EKron() on all the data."
        )

    def sum_with(self, others: Sequence[EigenBlock], weights: Tensor) -> EigenBlock:
        raise UnsupportedError(
            "eigenvalue-corrected curvatures of different outputs have different bases and do not add; "
            "use Kron(), Diagonal() or Full()."
        )

    def state(self) -> State:
        return State("EigenBlock", tensors={**_name_tensors(out=self.out, inp=self.inp), "values": self.values})

    @classmethod
    def from_state(cls, state: State, network: Network) -> EigenBlock:  # type: ignore[override]
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
        return _wide_remarks(block, self.inp, self.out)

    def diagonal(self) -> Tensor:
        return floor_values(diagonal_in(self.out, self.inp, self.values))

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


def _basis_fields(name: str, groups: int, size: int, dtype: torch.dtype) -> dict[str, Field]:
    """Return the fields of a basis of R^size in a file."""
    full = Array((groups, size, size), dtype=dtype, also=orthonormal)
    thin = Array((groups, size, None), dtype=dtype, also=_orthonormal_columns)
    return {name: Maybe(full), f"{name}_thin": Maybe(thin), f"{name}_axes": Maybe(Array((), 1, 1))}


def _basis_from(fields: Mapping[str, Any], name: str, size: int) -> tuple[Basis, int]:
    """Return a basis of R^size from a file, and the number of its parts."""
    full, thin, axes = (fields[name + form] for form in ("", "_thin", "_axes"))
    if sum(given is not None for given in (full, thin, axes)) > 1:
        raise FileError(f"the basis {name!r} is stored twice; expected one form")
    if full is not None:
        return FullBasis(full), size
    if thin is None:
        return Axes(exact=axes is None), size
    if not 0 < thin.shape[-1] < size:
        raise FileError(f"the basis {name!r} has {thin.shape[-1]} vectors of {size}; expected fewer")
    return ThinBasis(thin), thin.shape[-1] + 1
