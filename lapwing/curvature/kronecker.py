"""Kronecker factors of the curvature and their correction in the eigenbasis: sums, blocks and precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from lapwing.core.processes import Processes
from lapwing.core.schema import Array, Either, Maybe, orthonormal, semidefinite
from lapwing.core.settings import one_of, require_integer
from lapwing.core.spectra import eigh
from lapwing.core.state import Latest, State, saved
from lapwing.curvature.blocks import BlockCurvature, BlockSum, DiagonalSum, FullSum
from lapwing.curvature.blockwise import BlockwiseCurvature, blockwise_sum
from lapwing.curvature.protocols import floored, weighted_sum
from lapwing.curvature.seeds import check_estimate
from lapwing.curvature.sweep import Sweep
from lapwing.errors import FileError, UnsupportedError
from lapwing.linalg.gram import Gram, mirrored, survives
from lapwing.networks.closed_form import ClosedForm
from lapwing.networks.jacobians import Block, BlockJacobian, KroneckerRows
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network
from lapwing.priors.bound import BlockPrior

C = TypeVar("C")


def check_settings(curvature: str | None, draws: int, sharing: str, full_limit: int) -> None:
    """Raise unless the settings that all methods with Kronecker factors share are valid."""
    check_estimate(curvature, draws)
    one_of(("expand", "reduce")).check("sharing", sharing)
    require_integer("full_limit", full_limit, least=0)


def kronecker_curvature(sweep: Sweep, network: Network, sharing: str, full_limit: int) -> BlockwiseCurvature:
    """Return Kronecker factors for linear blocks and full or diagonal blocks for the rest, by one pass."""
    if network.selection.index is not None:
        raise UnsupportedError("a subnetwork of single weights has no Kronecker structure; use Full() or Diagonal().")
    other = lambda block: (FullSum if block.size <= full_limit else DiagonalSum)(block, network)
    sums: list[BlockSum] = [
        _KroneckerSum(block, sharing, network) if block.linear else other(block) for block in network.layout
    ]
    return blockwise_sum(sweep, network, sums)


class _KroneckerSum:
    """The two factors of a linear block, summed over a pass."""

    def __init__(self, block: Block, sharing: str, network: Network) -> None:
        self._block, self._reduce, self._dtype = block, sharing == "reduce", network.dtype
        self._options = (torch.float64, network.device)  # rounding of a large direction would drown the small ones
        self._out: Gram | None = None
        self._less: Gram | None = None  # what a closed form subtracts off the diagonal
        self._diagonal: Tensor | None = None
        self._inp: Gram | None = None  # a lookup has counts instead of this (d_in, d_in) matrix
        self._counts: Tensor | None = None
        self._rows = 0

    def add(self, part: BlockJacobian | ClosedForm, first: bool) -> None:
        rows = part.kronecker_rows(self._reduce)
        if first:
            self._add_inputs(rows)
        if rows.diagonal is not None:
            diagonal = rows.diagonal.double()
            self._diagonal = diagonal if self._diagonal is None else self._diagonal + diagonal
            self._less = self._added(self._less, rows)
        else:
            self._out = self._added(self._out, rows)

    def _add_inputs(self, rows: KroneckerRows) -> None:
        self._rows += rows.number
        if rows.counts is not None:
            counts = rows.counts.to(self._options[1], self._options[0])
            self._counts = counts if self._counts is None else self._counts + counts
        if rows.inputs is not None:
            if self._inp is None:
                self._inp = Gram(self._block.d_in, *self._options, self._block.groups)
            self._inp.add(rows.inputs)

    def _added(self, total: Gram | None, rows: KroneckerRows) -> Gram:
        """Return the sum with the products of the outputs."""
        total = Gram(self._block.d_out, *self._options, self._block.groups) if total is None else total
        if rows.outputs is not None:
            (total.add_runs if rows.by_runs else total.add)(rows.outputs)
        return total

    def totals(self) -> list[Tensor | None]:
        out, less, inp = (None if gram is None else gram.total() for gram in (self._out, self._less, self._inp))
        return [out, less, self._diagonal, inp, self._counts, torch.tensor(float(self._rows), dtype=torch.float64)]

    def value(self, totals: Sequence[Any]) -> KroneckerBlock:
        d_in, d_out = self._block.d_in, self._block.d_out
        out, less, diagonal, inputs, counts, rows = totals
        inp = counts.unsqueeze(0) if inputs is None else mirrored(inputs).reshape(-1, d_in, d_in)
        parts = [] if out is None else [mirrored(out).reshape(-1, d_out, d_out)]
        if less is not None:
            less = mirrored(less).reshape(-1, d_out, d_out).neg_()
            less.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
            parts.append(less)
        return KroneckerBlock(inp, reduce(Tensor.add_, parts), int(rows), self._dtype)


def eigen_shared(kron: C, processes: Processes) -> C:
    """Return the curvature with its eigendecompositions done, each by one of the processes; alone, when needed.

    Those of a curvature for each output depend on the noise, so every process does them all.
    """
    if processes.group is None or not isinstance(kron, BlockwiseCurvature):
        return kron
    blocks = [block for block in kron.blocks if isinstance(block, KroneckerBlock)]
    work = [float(block.inp.shape[-1] ** 3 * (block.inp.ndim > 2) + block.out.shape[-1] ** 3) for block in blocks]
    jobs = [partial(getattr, block, "eigen") for block in blocks]
    device = blocks[0].out.device if blocks else torch.device("cpu")
    for block, eigen in zip(blocks, processes.shared(jobs, work, device), strict=True):
        block.__dict__["eigen"] = Eigen(*eigen)  # where its cached property keeps it
    return kron


def eigen_corrected(sweep: Sweep, kron: BlockwiseCurvature) -> BlockwiseCurvature:
    """Return the exact diagonal of the curvature in the eigenbasis of each Kronecker block, by a second pass."""
    bases = {i: block.eigen for i, block in enumerate(kron.blocks) if isinstance(block, KroneckerBlock)}
    values: dict[int, Tensor] = {}
    for i, part, _ in sweep.blocks():
        if i in bases:
            squares = part.squares_in(bases[i].out, bases[i].inp).double()
            values[i] = values[i] + squares if i in values else squares
        del part  # before the next one is computed
    total = dict(zip(bases, sweep.processes.sum([values.get(i) for i in bases]), strict=True))
    corrected: dict[int, BlockCurvature] = {
        i: EigenBlock(bases[i].out, bases[i].inp, total[i].to(bases[i].out)) for i in bases
    }
    return replace(kron, blocks=tuple(corrected.get(i, block) for i, block in enumerate(kron.blocks)))


@dataclass(frozen=True, eq=False)
class EigenPrecision:
    """Λ with known eigenvectors U ⊗ V. ``inverse`` (G, d_out, d_in) holds one over the eigenvalues.

    The bases need not be orthogonal: a prior that differs by input or output is folded into them. ``inp`` is None for
    the identity.
    """

    out: Tensor
    inp: Tensor | None
    inverse: Tensor
    log_determinant: Tensor

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        return jacobian.rotated(self.out, self.inp).weighted(self.inverse.to(self.out.dtype), tokens, full)

    def quadratics(self, precisions: Sequence[EigenPrecision], jacobian: BlockJacobian, tokens: int) -> list[Tensor]:
        if any(each.out is not self.out or each.inp is not self.inp for each in precisions):
            return [each.quadratic(jacobian, tokens, True) for each in precisions]
        rotated = jacobian.rotated(self.out, self.inp)
        inverses = [each.inverse.to(self.out.dtype) for each in precisions]
        if isinstance(rotated, LinearJacobian):
            return list(rotated.weighted_each(torch.stack(inverses), tokens, True))
        return [rotated.weighted(inverse, tokens, True) for inverse in inverses]

    def cross(self, jacobian: BlockJacobian) -> Tensor:
        rotated = jacobian.rotated(self.out, self.inp)
        return rotated.between(rotated, self.inverse.to(self.out.dtype))

    def sample(self, eps: Tensor) -> Tensor:
        rotated = self.out.to(eps) @ (eps * self.inverse.sqrt().to(eps))
        return rotated if self.inp is None else rotated @ self.inp.to(eps).mT

    def adjoint(self, v: Tensor) -> Tensor:
        rotated = self.out.to(v).mT @ (v if self.inp is None else v @ self.inp.to(v))
        return rotated * self.inverse.sqrt().to(v)

    def variances(self) -> Tensor:
        return _squared_bases(self.out, self.inp, self.inverse.to(self.out))


class Eigen(NamedTuple):
    """Eigenvalues and bases of the two factors of a block; ``inp`` is None for the identity."""

    out_values: Tensor
    out: Tensor
    inp_values: Tensor
    inp: Tensor | None

    def to(self, dtype: torch.dtype) -> Eigen:
        """Return it in another dtype. Rounding the eigenvalues one by one keeps the small ones."""
        inp = None if self.inp is None else self.inp.to(dtype)
        return Eigen(self.out_values.to(dtype), self.out.to(dtype), self.inp_values.to(dtype), inp)

    def precision(self, phi: Tensor, added: Tensor, scale_logdet: Tensor | float = 0.0) -> EigenPrecision:
        """Return H/φ + ``added``, in units of a prior's scale with this log-determinant.

        In the network's dtype: all terms are positive, and float64 products would cost more than the fit.
        """
        products = (self.out_values / phi.to(self.out_values)).unsqueeze(-1) * self.inp_values.unsqueeze(-2)
        values = products + added.to(products)
        logdet = values.log().sum(dtype=torch.float64) + scale_logdet
        return EigenPrecision(self.out, self.inp, values.reciprocal(), logdet)


@saved
@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """H ≈ B ⊗ A / rows: sums A of inputs (G, d_in, d_in) and B of output gradients (G, d_out, d_out).

    The A of a lookup is a diagonal of counts (1, d_in). Division by the number of rows makes a single linear layer
    with constant output curvature exact. The factors are float64; their eigenvectors have the network's ``dtype``.
    """

    inp: Tensor
    out: Tensor
    rows: float
    dtype: torch.dtype = torch.float64
    only_diagonal: ClassVar[None] = None

    def __add__(self, other: KroneckerBlock) -> KroneckerBlock:
        return replace(self, inp=self.inp + other.inp, out=self.out + other.out, rows=self.rows + other.rows)

    def mixed(self, others: Sequence[KroneckerBlock], weights: Tensor) -> KroneckerBlock:
        """Weight the output factors; all blocks have the same input factor."""
        return replace(self, out=weighted_sum([self.out, *(block.out for block in others)], weights))

    def state(self) -> State:
        rows = torch.tensor(self.rows, dtype=torch.float64)
        return State("KroneckerBlock", tensors={"inp": self.inp, "out": self.out, "rows": rows})

    @classmethod
    def from_state(cls, state: State, network: Network) -> KroneckerBlock:
        groups, d_out, d_in = linear_form(network)
        inp = Array((groups, d_in, d_in), dtype=torch.float64, also=semidefinite)
        lookup = Array((1, d_in), 0, dtype=torch.float64)
        out = Array((groups, d_out, d_out), dtype=torch.float64, also=semidefinite)
        fields = state.read(inp=Either(inp, lookup), out=out, rows=Array((), 0))
        return cls(fields["inp"], fields["out"], float(fields["rows"]), network.dtype)

    def dense(self) -> Tensor:
        inp = torch.diag_embed(self.inp) if self.inp.ndim == 2 else self.inp
        return torch.block_diag(
            *(torch.kron(o.contiguous(), i.contiguous()) / self.rows for o, i in zip(self.out, inp, strict=True))
        )

    @cached_property
    def eigen(self) -> Eigen:
        """The eigendecomposition of both factors."""
        inp = (self.inp, None) if self.inp.ndim == 2 else psd_eigh(self.inp, self.dtype)
        return Eigen(*psd_eigh(self.out / max(self.rows, 1), self.dtype), *inp).to(self.dtype)

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
        return self._by_input(phi, prior.value.mean(1))  # the gradient is shared equally by all outputs

    def _by_input(self, phi: Tensor, by_input: Tensor) -> EigenPrecision:
        """Return Λ = (I ⊗ √D)(B ⊗ D^-½ A D^-½ / φ + I)(I ⊗ √D), exact for any prior that differs by input."""
        if self.inp.ndim == 2:
            raise UnsupportedError("an embedding in a Kronecker block allows one precision; use method=Diagonal().")
        by_inp = _whitened_eigh(self.inp, by_input.to(self.inp).rsqrt())
        white = Eigen(*self.eigen[:2], *by_inp).to(self.dtype)
        return white.precision(phi, torch.ones(()), self.out.shape[-1] * by_input.double().log().sum())

    def _rescaled(self, phi: Tensor, g: Tensor, scale: Tensor, block: Block) -> EigenPrecision:
        """Return Λ for a prior g D with a fixed D = D_out ⊗ D_in.

        Each factor of H is whitened by its factor of D, once for all g and φ.
        """
        white, inp_root = self._whitened.at(scale, lambda: self._whitening(scale, block))
        precision = white.precision(phi, g, scale.double().log().sum())
        if white.inp is not None:
            return precision
        # the basis of a lookup is the identity: its scale goes into the eigenvalues
        return replace(precision, inverse=precision.inverse * inp_root.square().unsqueeze(-2))

    @cached_property
    def _whitened(self) -> Latest[Tensor, tuple[Eigen, Tensor]]:
        return Latest(torch.equal)

    def _whitening(self, scale: Tensor, block: Block) -> tuple[Eigen, Tensor]:
        """Return the eigendecomposition in units of ``scale``, and the inverse root of its factor for inputs."""
        by_out, by_inp = scale[:, :, 0], scale[:, 0] / scale[:, 0, :1]
        if not torch.allclose(by_out.unsqueeze(-1) * by_inp.unsqueeze(-2), scale, rtol=1e-4):
            raise UnsupportedError(
                f"the scale of the prior inside {block.weight} is not a product of one factor for outputs and one for "
                "inputs, which a Kronecker block needs; use method=Diagonal() or Full()."
            )
        out = _whitened_eigh(self.out / max(self.rows, 1), by_out.to(self.out).rsqrt())
        inp_root = by_inp.to(self.inp).rsqrt()
        is_lookup = self.inp.ndim == 2
        inp = (self.inp * inp_root.square(), None) if is_lookup else _whitened_eigh(self.inp, inp_root)
        return Eigen(*out, *inp).to(self.dtype), inp_root.to(self.dtype)

    def diagonal(self) -> Tensor:
        """Return the diagonal with each factor floored separately, so that it stays a Kronecker product."""
        inp = self.inp if self.inp.ndim == 2 else self.inp.diagonal(dim1=-2, dim2=-1)
        out = self.out.diagonal(dim1=-2, dim2=-1) / max(self.rows, 1)
        return floored(out).unsqueeze(-1) * floored(inp).unsqueeze(-2)


@saved
@dataclass(frozen=True, eq=False)
class EigenBlock:
    """H in a Kronecker eigenbasis with its exact diagonal there (EKFAC): ``values`` (G, d_out, d_in)."""

    out: Tensor
    inp: Tensor | None
    values: Tensor
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
        tensors = {"out": self.out, "values": self.values}
        return State("EigenBlock", tensors=tensors if self.inp is None else {**tensors, "inp": self.inp})

    @classmethod
    def from_state(cls, state: State, network: Network) -> EigenBlock:
        groups, d_out, d_in = linear_form(network)
        basis = lambda size: Array((groups, size, size), dtype=network.dtype, also=orthonormal)
        values = Array((groups, d_out, d_in), 0, dtype=network.dtype)
        return cls(**state.read(out=basis(d_out), inp=Maybe(basis(d_in)), values=values))

    def dense(self) -> Tensor:
        blocks = []
        for g, values in enumerate(self.values):
            inp = torch.eye(values.shape[1]).to(values) if self.inp is None else self.inp[g]
            basis = torch.kron(self.out[g].contiguous(), inp.contiguous())
            blocks.append((basis * values.reshape(-1)) @ basis.T)
        return torch.block_diag(*blocks)

    def diagonal(self) -> Tensor:
        return floored(_squared_bases(self.out, self.inp, self.values))

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> EigenPrecision:
        if prior.whole.ndim:
            raise UnsupportedError(
                f"the prior differs inside {block.weight}; EKron allows one precision for each block. "
                "Use isotropic() or per_layer(), or method=Kron(), Diagonal() or Full()."
            )
        values = self.values / phi.to(self.values) + prior.value.to(self.values)
        return EigenPrecision(self.out, self.inp, values.reciprocal(), values.log().sum(dtype=torch.float64))


def _squared_bases(out: Tensor, inp: Tensor | None, values: Tensor) -> Tensor:
    """Return the diagonal of U diag(values) Uᵀ for the basis U = out ⊗ inp, (G, d_out, d_in)."""
    squares = out.square() @ values
    return squares if inp is None else squares @ inp.square().mT


def _whitened_eigh(matrix: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues of R M R with R = diag(root), and R times its eigenvectors; root (G, d)."""
    values, basis = psd_eigh(root.unsqueeze(-1) * matrix * root.unsqueeze(-2))
    return values, root.unsqueeze(-1) * basis


def psd_eigh(matrix: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, negative ones set to zero, and eigenvectors of a positive semidefinite matrix.

    It is decomposed in ``dtype`` where that keeps its small eigenvalues, at half of the cost.
    """
    narrow = dtype is not None and dtype != matrix.dtype and survives(matrix.detach(), dtype)
    values, vectors = eigh(matrix.to(dtype) if narrow else matrix)
    return values.clamp_min(0), vectors


def linear_form(network: Network) -> tuple[int, ...]:
    """Return (G, d_out, d_in) of the only block of a network; raise ``FileError`` if it is no linear map."""
    (block,) = network.layout
    if not block.linear:
        raise FileError(f"the file has Kronecker factors of {block.weight!r}, which is no linear map")
    return block.form
