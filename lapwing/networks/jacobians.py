"""Parameters in blocks, and the Jacobian of a batch, block by block.

A *linear* block is a weight used as a linear map, with its bias as one more input column. Every other parameter is a
block without that structure.

There are four forms of Jacobians. ``LinearJacobian`` keeps the two factors of a linear map, ``LookupJacobian`` those
of an embedding, and ``DenseJacobian`` the whole Jacobian: small for biases and norms; where it is large, as for tied or
normalised weights, the byte budget counts it and a chunk has fewer samples. ``PickedJacobian`` keeps the columns of a
few weights that were chosen one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing.linalg.dense import pool_pairs
from lapwing.runtime.memory import PIECE, chunks, concat_chunks, even_chunks, working_memory

if TYPE_CHECKING:
    from lapwing.linalg.dense import Basis
    from lapwing.networks.dense_jacobian import Entries
    from lapwing.networks.linear_jacobian import LinearJacobian
    from lapwing.networks.selection import Selection


GRADIENTS = 0.5  # share of the memory for intermediate results that the gradients of one chunk may take
USUAL = 1.25  # copies of its gradients that a backward pass has in memory, as measured; at most two
# For speed, in bytes:
JOINED = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}  # the gradients of joined batches
CACHED = 32 * 2**20  # gradients of a chunk on a CPU: near its caches a chunk is a third faster
AT_ONCE = 3  # results of operations that a forward pass without gradients has in memory: input, output, a branch
MOST = 1024  # joining more samples than this gains nothing


def temporary_bytes(device: torch.device) -> int:
    """Return the bytes that one intermediate result may take."""
    return int(PIECE * working_memory(device))


def small_results_budget(device: torch.device) -> int:
    """Return the bytes that many small results may take together: enough to keep a GPU busy, near a CPU's caches."""
    return min(JOINED.get(device.type, JOINED["cuda"]), temporary_bytes(device))


@dataclass(frozen=True)
class Footprint:
    """The memory that one sample takes, in numbers, measured at the first batch."""

    width: int  # gradients, for each seed
    patches: int  # the largest unfolded input
    whole: int = 0  # Jacobians that are kept whole, for each seed
    graph: int = 0  # outputs of all operations, which a forward pass that records gradients may keep
    live: int = 0  # gradients that a pass holds at once for each seed if each is dropped after its use; 0: unknown
    widest: int = 0  # the largest result of an operation, of all layers; 0: unknown
    streams: bool = False  # whether each is dropped after its use; not saved

    @property
    def held(self) -> int:
        """The gradients that are in memory at once, for each seed."""
        return self.live if self.streams and self.live else self.width

    @property
    def passing(self) -> int:
        """The numbers that a forward pass keeps for gradients, or those of a few layers where it keeps fewer."""
        return max(self.graph, AT_ONCE * self.widest)

    @property
    def numbers(self) -> dict[str, int]:
        """What a file keeps of it."""
        return {name: value for name, value in asdict(self).items() if name != "streams"}

    def for_positions(self, positions: int, measured: int) -> Footprint:
        """Return the footprint of samples with this many tokens or pixels, from that of samples with ``measured``.

        Results of all layers grow with their number; Jacobians that are kept whole do not.
        """
        grows, more, fewer = ("width", "patches", "graph", "live", "widest"), max(1, positions), max(1, measured)
        return replace(self, **{name: -(-getattr(self, name) * more // fewer) for name in grows})

    def batch_size_for(self, seeds: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many samples are worth joining into one pass: their gradients should stay small."""
        forward = _itemsize(dtype) * AT_ONCE * self.widest
        most = min(MOST, temporary_bytes(device) // max(1, forward))
        return max(1, min(most, small_results_budget(device) // self._bytes(seeds, dtype, 1)))

    def chunks(
        self, batch: int, seeds: int, dtype: torch.dtype, device: torch.device, most: int | None = None
    ) -> Iterator[slice]:
        """Yield runs of at most ``most`` samples whose gradients for this many seeds fit the byte budget."""
        if device.type == "cpu":
            fast = max(16, CACHED // self._bytes(seeds, dtype, 2))
            most = fast if most is None else min(most, fast)
        return self.largest_chunks(batch, seeds, dtype, device, most)

    def largest_chunks(
        self, batch: int, seeds: int, dtype: torch.dtype, device: torch.device, most: int | None = None
    ) -> Iterator[slice]:
        """Yield runs of samples that fit the byte budget, as many samples as fit, where fewer would not be faster."""
        each = self._bytes(seeds, dtype, 2)  # a backward pass needs about the same memory again
        return chunks(batch, each + _itemsize(dtype) * self.passing, device, GRADIENTS, most)

    def seed_runs(
        self, seeds: int, batch: int, dtype: torch.dtype, device: torch.device, unit: int = 1
    ) -> Iterator[slice]:
        """Yield runs of seeds whose gradients fit the byte budget, for a chunk of ``batch`` samples.

        Each has a multiple of ``unit`` seeds, as their number has.
        """
        most = self.seeds_at_once(batch, dtype, device)
        for run in even_chunks(seeds // unit, most // unit):
            yield slice(unit * run.start, unit * run.stop)

    def forward_runs(self, batch: int, dtype: torch.dtype, device: torch.device) -> Iterator[slice]:
        """Yield runs of samples whose activations fit the byte budget, for passes that record no gradients."""
        return chunks(batch, _itemsize(dtype) * (self.passing + self.patches), device, GRADIENTS)

    def chunk_bytes(self, batch: int, seeds: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes that the largest chunk of a batch usually takes: less than chunks are made for."""
        first = next(iter(self.chunks(batch, seeds, dtype, device)))
        samples = first.stop - first.start
        run = min(seeds, self.seeds_at_once(samples, dtype, device))
        return int(samples * (USUAL * self._bytes(run, dtype, 1) + _itemsize(dtype) * self.passing))

    def seeds_at_once(self, samples: int, dtype: torch.dtype, device: torch.device, width: int = 0) -> int:
        """Return how many seeds fit the byte budget together for this many samples; at least one.

        ``width`` counts further numbers for each sample and seed.
        """
        fixed = _itemsize(dtype) * (self.patches + self.passing)
        each = _itemsize(dtype) * (2 * (self.held + self.whole) + width)
        return max(1, (int(GRADIENTS * working_memory(device)) - samples * fixed) // (samples * each))

    def _bytes(self, seeds: int, dtype: torch.dtype, copies: int) -> int:
        return _itemsize(dtype) * (copies * max(1, seeds) * (self.held + self.whole) + self.patches)


def _itemsize(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits // 8


S = TypeVar("S")
KINDS = ("rows", "columns", "dense", "opaque")


@dataclass(frozen=True)
class Block:
    """Parameters that are handled together.

    ``kind``: "rows" for a weight stored (d_out, d_in), "columns" for one stored (d_in, d_out), "dense" for a parameter
    that is not a linear map, "opaque" for one without a rule. ``why`` says why it is not one, or that it is the
    table of an embedding. Groups count independent maps (grouped convolution). ``d_in`` includes the bias column.
    """

    kind: str
    weight: str
    shape: tuple[int, ...]
    bias: str | None = None
    groups: int = 1
    why: str = ""

    @property
    def linear(self) -> bool:
        """Whether it is a linear map."""
        return self.kind in ("rows", "columns")

    @property
    def has_rule(self) -> bool:
        """Whether its Jacobian follows from gradients at the nodes that use it; otherwise it takes the fallback."""
        return self.kind != "opaque"

    @property
    def handling(self) -> str:
        """How it is handled, in words, for reports."""
        if not self.linear:
            slow = "" if self.has_rule else "; slow: torch.func or single backward passes"
            return f"block of its own ({self.why}){slow}"
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        return self.why or f"linear map{groups}" + (", with its bias" if self.bias else "")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def d_out(self) -> int:
        """The number of outputs of each map."""
        return self.shape[0] // self.groups if self.kind == "rows" else math.prod(self.shape[1:])

    @property
    def d_in(self) -> int:
        """The number of inputs of each map, with one more for a bias."""
        size = math.prod(self.shape[1:]) if self.kind == "rows" else self.shape[0] // self.groups
        return size + (self.bias is not None)

    @property
    def size(self) -> int:
        """The number of entries."""
        return self.groups * self.d_out * self.d_in if self.linear else math.prod(self.shape)

    @property
    def form(self) -> tuple[int, ...]:
        """The shape in which the entries are arranged: (G, d_out, d_in) for a linear map, otherwise (size,)."""
        return (self.groups, self.d_out, self.d_in) if self.linear else (self.size,)

    def arrange(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return parameters (..., *shape) as one tensor (..., *form)."""
        weight = values[self.weight]
        lead = weight.shape[: weight.ndim - len(self.shape)]
        if not self.linear:
            return weight.reshape(*lead, -1)
        if self.kind == "rows":
            matrix = weight.reshape(*lead, self.groups, self.d_out, -1)
        else:
            matrix = weight.reshape(*lead, self.groups, -1, self.d_out).mT
        if self.bias is None:
            return matrix
        return torch.cat([matrix, values[self.bias].reshape(*lead, self.groups, self.d_out, 1)], -1)

    def split(self, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter by name, flat in its last dimension: the inverse of ``arrange``."""
        lead = matrix.shape[: matrix.ndim - len(self.form)]
        if not self.linear:
            yield self.weight, matrix
            return
        weight = matrix if self.bias is None else matrix[..., :-1]
        yield self.weight, (weight if self.kind == "rows" else weight.mT).reshape(*lead, -1)
        if self.bias is not None:
            yield self.bias, matrix[..., -1].reshape(*lead, -1)


@dataclass(frozen=True, eq=False)
class KroneckerRows:
    """Rows whose Gram matrices are the Kronecker factors of a linear block.

    A closed form has the diagonal of the output factor itself, and rows whose products are its other entries, with the
    sign changed. Inputs are either rows (G, N, d_in), or, for an embedding, the number of times that each row of the
    table is used, (d_in,): the Gram matrix of one-hot rows is the diagonal matrix of these counts.
    """

    inputs: Tensor | None
    counts: Tensor | None
    outputs: Tensor | None  # ([G,] ..., d_out); by runs (G, M, T, d_out), where channels lie before pixels in memory
    by_runs: bool
    number: float  # of positions in all samples together, each as often as the weight of its sample says
    diagonal: Tensor | None = None  # (G, d_out), of the output factor; its other entries are then less the products


class BlockJacobian:
    """The Jacobian of a block for K seeds and B samples, with the entries of the block in its ``form``.

    Classes inherit from it. Those with two factors, of outputs and inputs, override what is said to be for them.
    """

    is_lookup: ClassVar[bool] = False  # whether its inputs are indices of rows of a table

    @property
    def positions(self) -> int:
        """How often a sample uses the block: pixels of an image, tokens of a text. 1 where the Jacobian is whole."""
        return 1

    @property
    def nbytes(self) -> int:
        """The memory that its tensors take."""
        raise NotImplementedError

    @property
    def widths(self) -> tuple[int, int]:
        """The numbers of outputs and inputs of each map. For factored forms."""
        raise AssertionError("this Jacobian has no factors")

    def to(self, dtype: torch.dtype) -> BlockJacobian:
        """Return it in another dtype."""
        raise NotImplementedError

    def samples(self, rows: slice) -> BlockJacobian:
        """Return that of some samples."""
        raise NotImplementedError

    def add(self: S, other: S) -> S:
        """Return the sum with the Jacobian of another use of the same block, which has the same form."""
        raise NotImplementedError

    def rotate(self, out: Basis, inp: Basis, crossed: bool = True) -> BlockJacobian:
        """Return it in coordinates of these bases of outputs and inputs. For factored forms.

        With ``crossed=False`` the result is only used within samples, which may take fewer coordinates.
        """
        raise AssertionError("this Jacobian has no factors to rotate")

    def kronecker_rows(self, reduce: bool, weights: Tensor | None = None) -> KroneckerRows:
        """Return the rows of both Kronecker factors; ``reduce`` pools the positions of a sample. For factored forms.

        The gradients have the weights of the samples in them; the inputs get them here, (B,).
        """
        raise AssertionError("this Jacobian has no Kronecker factors")

    def squares_in(self, out: Basis, inp: Basis) -> Tensor:
        """Return ``squares`` in these bases, the mean over the directions of each part: (G, m_out, m_in)."""
        return pool_pairs(out, inp, self.rotate(out, inp, crossed=False).squares())

    def single_map(self) -> LinearJacobian | None:
        """Return it if it is one linear map that each sample uses once, otherwise None."""
        return None

    def whole(self) -> Tensor:
        """Return the Jacobian itself, (B, K, *form)."""
        raise NotImplementedError

    def columns(self, entries: Entries) -> Tensor:
        """Return the Jacobian of some entries of the block, (B, K, n); no others are formed."""
        raise NotImplementedError

    def squares(self) -> Tensor:
        """Return the sum over samples and outputs of the squared Jacobian, (*form)."""
        raise NotImplementedError

    def unit_squares(self) -> Tensor:
        """Return the squared gradients of each seed at the outputs of the block, summed over positions: (K, B, units).

        Where the Jacobian is kept whole, its entries are the units.
        """
        raise NotImplementedError

    def quadratic_form(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        """Return Σ_ij J_kij weights_ij J_lij: (B, S, C, C) if full, otherwise its diagonal (B, S, C)."""
        raise NotImplementedError

    def quadratic_forms(self, weights: Tensor, tokens: int, full: bool) -> Iterable[Tensor]:
        """Return ``quadratic_form`` under each of n weights (n, *form)."""
        return [self.quadratic_form(each, tokens, full) for each in weights]

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        """Return J diag(weights) J'ᵀ between the samples of two batches, (B K, B' K'); without weights, J J'ᵀ."""
        rows = self.whole().flatten(2).flatten(0, 1)
        last = rows if other is self else other.whole().flatten(2).flatten(0, 1)
        return (rows if weights is None else rows * weights.reshape(-1)) @ last.mT

    def jvp(self, v: Tensor) -> Tensor:
        """Return J v for v (n, *form): (n, B, K)."""
        raise NotImplementedError

    def vjp(self, u: Tensor) -> Tensor:
        """Return Jᵀ u for u (n, B, K), summed over samples: (n, *form)."""
        raise NotImplementedError

    def materialised(self, count: int | None = None) -> BlockJacobian:
        """Return the form in which one product with ``count`` vectors is cheapest; without it, repeated products."""
        return self

    def materialised_size(self) -> int:
        """Return how many numbers the form for repeated products has."""
        raise NotImplementedError


Stream = Callable[[Collection[int]], Iterator[tuple[int, BlockJacobian]]]  # wanted blocks -> their Jacobians


@dataclass(frozen=True, eq=False)
class LayerJacobians:
    """The Jacobian of a batch, block by block, for K = ``outputs`` seeds; a sample has ``tokens`` data."""

    parts: tuple[Callable[[], BlockJacobian], ...]
    layout: tuple[Block, ...]
    selection: Selection
    batch: int
    outputs: int
    dtype: torch.dtype
    tokens: int = 1
    stream: Stream | None = None  # a pass that holds few gradients at once
    entries: tuple[Entries, ...] | None = None  # the chosen entries of each block; None if all are chosen

    def numbered_blocks(self, wanted: Collection[int] | None = None) -> Iterator[tuple[int, BlockJacobian]]:
        """Yield the number and the Jacobian of all or some blocks, in any order, for sums over blocks.

        Where the network streams, this is a backward pass of its own, which drops each gradient after its use.
        """
        wanted = range(len(self.parts)) if wanted is None else wanted
        return ((i, self.parts[i]()) for i in wanted) if self.stream is None else self.stream(wanted)

    def __iter__(self) -> Iterator[tuple[Block, BlockJacobian]]:
        """Yield block by block. Each is formed when it is reached and dropped afterwards, so only one is in memory.

        Blocks without a rule are formed together and stay in memory.
        """
        for block, part in zip(self.layout, self.parts, strict=True):
            yield block, part()

    def whole(self) -> Tensor:
        """Return the Jacobian itself, (B, K, P), in which only the chosen columns are formed. For few weights."""
        lead = (self.batch, self.outputs)
        if self.entries is not None:
            return self._columns(self.entries)
        parts = [part.whole().reshape(*lead, *block.form) for block, part in self]
        return flatten_blocks(parts, self.layout, self.selection)

    def _columns(self, entries: tuple[Entries, ...]) -> Tensor:
        device = entries[0].at.device
        whole = torch.empty(self.batch, self.outputs, self.selection.size, dtype=self.dtype, device=device)
        for chosen, (_, part) in zip(entries, self, strict=True):
            whole[..., chosen.places] = part.columns(chosen).to(self.dtype)
            del part  # before the next one is formed
        return whole

    def samples(self, rows: slice) -> LayerJacobians:
        """Return that of some samples; a block is formed for all of them and then cut."""
        if rows == slice(0, self.batch):
            return self
        parts = tuple(partial(_samples_of, part, rows) for part in self.parts)
        return replace(self, parts=parts, stream=None, batch=rows.stop - rows.start)

    def double(self) -> LayerJacobians:
        """Return it in float64, for differences in which digits cancel."""
        parts = tuple(partial(_to_double, part) for part in self.parts)
        stream = None if self.stream is None else partial(_double_stream, self.stream)
        return replace(self, parts=parts, stream=stream, dtype=torch.float64)

    def jvp(self, v: Tensor) -> Tensor:
        """Return J v for every row of v (n, P): (n, B, K), from the stored factors."""
        v = v.to(self.dtype)
        if self.entries is not None:  # the weights of one block at a time are filled up with those not chosen
            pairs = zip(self.entries, self, strict=True)
            return reduce(torch.add, (part.jvp(chosen.expand(v[:, chosen.places])) for chosen, (_, part) in pairs))
        values = self.selection.split(v)
        return reduce(torch.add, (part.jvp(block.arrange(values)) for block, part in self))

    def vjp(self, u: Tensor) -> Tensor:
        """Return Jᵀ u for every u (n, B, K), summed over samples: (n, P)."""
        u = u.to(self.dtype)
        if self.entries is not None:
            total = u.new_empty(len(u), self.selection.size)
            for chosen, (_, part) in zip(self.entries, self, strict=True):
                total[:, chosen.places] = part.vjp(u).reshape(len(u), -1)[:, chosen.at]
            return total
        parts = [part.vjp(u).reshape(len(u), *block.form) for block, part in self]
        return flatten_blocks(parts, self.layout, self.selection)

    def gram(self, v: Tensor) -> Tensor:
        """Return Jᵀ J v for every row of v (n, P); a block is formed once for both products, if memory allows it."""
        parts: list[Callable[[], BlockJacobian]] = []
        left = temporary_bytes(v.device)
        for part in self.parts:
            block = part().materialised(len(v))
            left -= block.nbytes
            parts.append(partial(_constant, block) if left >= 0 else part)
            del block
        ready, each = replace(self, parts=tuple(parts), stream=None), 4 * v.element_size() * self.batch * self.outputs
        return concat_chunks((ready.vjp(ready.jvp(v[some])) for some in chunks(len(v), each, v.device)), len(v))

    def materialised(self) -> LayerJacobians:
        """Return it with every block formed now, in the form in which repeated products are cheapest."""
        return self._with_parts(part().materialised() for part in self.parts)

    def _with_parts(self, parts: Iterable[BlockJacobian]) -> LayerJacobians:
        return replace(self, parts=tuple(partial(_constant, part) for part in parts), stream=None)

    def materialised_bytes(self) -> int:
        """Return the bytes that ``materialised`` would take; the blocks are formed one after another."""
        return sum(part.materialised_size() for _, part in self) * torch.finfo(self.dtype).bits // 8

    @property
    def nbytes(self) -> int:
        """The bytes that the blocks take once they are formed."""
        return sum(part.nbytes for _, part in self)


def flatten_blocks(parts: list[Tensor], layout: tuple[Block, ...], selection: Selection, picked: bool = True) -> Tensor:
    """Join tensors in the forms of their blocks to one in the order of theta, (..., P).

    With ``picked=False`` the entries that are not selected are included.
    """
    by_name = dict(pair for part, block in zip(parts, layout, strict=True) for pair in block.split(part))
    dtype = max((part.dtype for part in parts), key=lambda d: torch.finfo(d).bits)
    flat = torch.cat([by_name[name].to(dtype) for name in selection.names], -1)
    return selection.pick(flat) if picked else flat


def _constant(part: BlockJacobian) -> BlockJacobian:
    return part


def _samples_of(part: Callable[[], BlockJacobian], rows: slice) -> BlockJacobian:
    return part().samples(rows)


def _double_stream(stream: Stream, wanted: Collection[int]) -> Iterator[tuple[int, BlockJacobian]]:
    return ((number, part.to(torch.float64)) for number, part in stream(wanted))


def _to_double(part: Callable[[], BlockJacobian]) -> BlockJacobian:
    return part().to(torch.float64)
