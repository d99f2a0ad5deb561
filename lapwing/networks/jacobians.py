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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing.errors import ModelError
from lapwing.linalg.dense import Axes, pool_pairs
from lapwing.runtime.memory import PIECE_SHARE, chunks, even_chunks, working_memory

if TYPE_CHECKING:
    from lapwing.linalg.dense import Basis
    from lapwing.networks.linear_jacobian import LinearJacobian
    from lapwing.networks.selection import Selection


GRADIENT_SHARE = 0.5  # share of the memory for intermediate results that the gradients of one chunk may take
USUAL_COPIES = 1.25  # copies of its gradients that a backward pass has in memory, as measured; at most two
# For speed, in bytes:
JOINED_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}  # the gradients of joined batches
ACTIVATION_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}  # the activations of joined batches
CACHED_BYTES = 32 * 2**20  # gradients of a chunk on a CPU: near its caches a chunk is a third faster
PASS_RESULTS = 3  # results of operations that a forward pass without gradients has in memory: input, output, a branch
MAX_JOINED = 1024  # joining more samples than this gains nothing


def temporary_bytes(device: torch.device) -> int:
    """Return the bytes that one intermediate result may take."""
    return int(PIECE_SHARE * working_memory(device))


def small_results_budget(device: torch.device) -> int:
    """Return the bytes that many small results may take together: enough to keep a GPU busy, near a CPU's caches."""
    return min(JOINED_BYTES.get(device.type, JOINED_BYTES["cuda"]), temporary_bytes(device))


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
        return max(self.graph, PASS_RESULTS * self.widest)

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that a file keeps."""
        return {name: value for name, value in asdict(self).items() if name != "streams"}

    def for_positions(self, positions: int, measured: int) -> Footprint:
        """Return the footprint of samples with this many tokens or pixels, from that of samples with ``measured``.

        Results of all layers grow with their number; Jacobians that are kept whole do not.
        """
        grows, more, fewer = ("width", "patches", "graph", "live", "widest"), max(1, positions), max(1, measured)
        return replace(self, **{name: -(-getattr(self, name) * more // fewer) for name in grows})

    def batch_size_for(self, seeds: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many samples are worth joining into one pass: their gradients should stay small."""
        forward = _itemsize(dtype) * PASS_RESULTS * self.widest
        fast = min(temporary_bytes(device), ACTIVATION_BYTES.get(device.type, ACTIVATION_BYTES["cuda"]))
        most = min(MAX_JOINED, fast // max(1, forward))
        return max(1, min(most, small_results_budget(device) // self._bytes(seeds, dtype, 1)))

    def chunks(
        self, batch: int, seeds: int, dtype: torch.dtype, device: torch.device, most: int | None = None
    ) -> Iterator[slice]:
        """Yield runs of at most ``most`` samples whose gradients for this many seeds fit the byte budget."""
        if device.type == "cpu":
            fast = max(16, CACHED_BYTES // self._bytes(seeds, dtype, 2))
            most = fast if most is None else min(most, fast)
        return self.largest_chunks(batch, seeds, dtype, device, most)

    def largest_chunks(
        self, batch: int, seeds: int, dtype: torch.dtype, device: torch.device, most: int | None = None
    ) -> Iterator[slice]:
        """Yield runs of samples that fit the byte budget, as many samples as fit, where fewer would not be faster."""
        each = self._bytes(seeds, dtype, 2)  # a backward pass needs about the same memory again
        return chunks(batch, each + _itemsize(dtype) * self.passing, device, GRADIENT_SHARE, most)

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
        return chunks(batch, _itemsize(dtype) * (self.passing + self.patches), device, GRADIENT_SHARE)

    def chunk_bytes(self, batch: int, seeds: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes that the largest chunk of a batch usually takes: less than chunks are made for."""
        first = next(iter(self.chunks(batch, seeds, dtype, device)))
        samples = first.stop - first.start
        run = min(seeds, self.seeds_at_once(samples, dtype, device))
        return int(samples * (USUAL_COPIES * self._bytes(run, dtype, 1) + _itemsize(dtype) * self.passing))

    def seeds_at_once(self, samples: int, dtype: torch.dtype, device: torch.device, width: int = 0) -> int:
        """Return how many seeds fit the byte budget together for this many samples; at least one.

        ``width`` counts further numbers for each sample and seed.
        """
        fixed = _itemsize(dtype) * (self.patches + self.passing)
        each = _itemsize(dtype) * (2 * (self.held + self.whole) + width)
        return max(1, (int(GRADIENT_SHARE * working_memory(device)) - samples * fixed) // (samples * each))

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
        """The way in which it is handled, in words, for reports."""
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
        """The number of uses of the block by a sample: pixels of an image, tokens of a text; 1 if it is kept whole."""
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

    def materialise(self, count: int | None = None) -> BlockJacobian:
        """Return the form in which one product with ``count`` vectors is cheapest; without it, repeated products."""
        return self

    def materialised_size(self) -> int:
        """Return how many numbers the form for repeated products has."""
        raise NotImplementedError


def flatten_blocks(parts: list[Tensor], layout: tuple[Block, ...], selection: Selection) -> Tensor:
    """Join tensors in the forms of their blocks to one in the order of theta, (..., P)."""
    by_name = dict(pair for part, block in zip(parts, layout, strict=True) for pair in block.split(part))
    dtype = max((part.dtype for part in parts), key=lambda d: torch.finfo(d).bits)
    return selection.pick(torch.cat([by_name[name].to(dtype) for name in selection.names], -1))


TF32_BITS = 13  # bits at the end of a float32 that TF32 does not have


def coarse(x: Tensor) -> bool:
    """Return whether a product with this factor rounds it to the ten bits of TF32, as GPUs may be set to do."""
    if x.device.type != "cuda" or x.dtype != torch.float32:
        return False
    settings = torch.backends.cuda.matmul
    chosen = getattr(settings, "fp32_precision", None)  # newer; reading the older name may then raise
    return bool(settings.allow_tf32) if chosen is None else chosen == "tf32"


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split x = high + low, float32, so that TF32 holds all bits of high and almost all of low.

    >>> high, low = halves(torch.tensor([1.0, 1.0 + 2.0**-12]))
    >>> high.tolist(), low.tolist()
    ([1.0, 1.0], [0.0, 0.000244140625])
    """
    high = (x.view(torch.int32) & -(1 << TF32_BITS)).view(torch.float32)
    return high, x - high


def product(x: Tensor, fixed: Tensor) -> Tensor:
    """Return x @ fixed, where the rows of x are the vectors that an operator is applied to.

    Rounding ``fixed`` gives a slightly different operator. Rounding x gives no linear operator at all, and no linear
    system can be solved with it to more than three digits. So x is multiplied in two halves, at twice the cost.
    """
    if not coarse(x):
        return x @ fixed
    high, low = halves(x)
    return (high @ fixed).add_(low @ fixed)


def product_onto(fixed: Tensor, x: Tensor) -> Tensor:
    """Return fixed @ x, where the columns of x are the vectors; see ``product``."""
    if not coarse(x):
        return fixed @ x
    high, low = halves(x)
    return (fixed @ high).add_(fixed @ low)


# A product over a whole layer runs so many times as fast, for each multiplication, as one over gathered entries.
LAYER_SPEED = 8


def are_few(count: int, size: int, seeds: int, positions: int) -> bool:
    """Return whether the columns of ``count`` out of ``size`` entries are cheaper than the factors of a whole block.

    Columns take ``seeds`` numbers for each entry and sample, a product with the factors ``positions`` multiplications.
    """
    return LAYER_SPEED * seeds * count <= positions * size and 2 * count <= size


@dataclass(frozen=True, eq=False)
class Entries:
    """Chosen entries of one block: where they are in its form, flattened, (n,), and their places in theta, (n,)."""

    form: tuple[int, ...]
    at: Tensor
    places: Tensor

    @classmethod
    def of(cls, layout: tuple[Block, ...], selection: Selection, device: torch.device) -> tuple[Entries, ...]:
        """Return the chosen entries of all blocks; every block has at least one."""
        numbers = selection.split(torch.arange(1, selection.size + 1, device=device))
        parts = []
        for block in layout:
            flat = block.arrange(numbers).reshape(-1)
            at = flat.nonzero()[:, 0]
            parts.append(cls(block.form, at, flat[at] - 1))
        return tuple(parts)

    @property
    def size(self) -> int:
        """The number of all entries of the block."""
        return math.prod(self.form)

    def expand(self, values: Tensor) -> Tensor:
        """Return values (..., n) of the entries as those of the whole block, (..., *form), zero elsewhere."""
        full = values.new_zeros(*values.shape[:-1], self.size)
        full[..., self.at] = values
        return full.unflatten(-1, self.form)

    @cached_property
    def coordinates(self) -> tuple[Tensor, Tensor, Tensor]:
        """The group, output and input of every entry of a linear map, (n,) each."""
        _, d_out, d_in = self.form
        return self.at // (d_out * d_in), self.at // d_in % d_out, self.at % d_in

    @cached_property
    def starts(self) -> list[int]:
        """The number of entries before those of each output of all groups, rising, and the number of all entries."""
        groups, d_out, d_in = self.form
        ends = torch.arange(groups * d_out + 1, device=self.at.device) * d_in
        return list(torch.searchsorted(self.at, ends).tolist())

    @cached_property
    def equal_runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The entries of a linear map in S runs of equal length w, each of entries of one output.

        Returns the output of each run, counted through all groups, (S,); the inputs of its entries, (S, w), filled up
        with zeros; and the place of every entry among the S w, (n,). At most twice as many places as entries.
        """
        _, _, d_in = self.form
        output, inverse, counts = torch.unique_consecutive(self.at // d_in, return_inverse=True, return_counts=True)
        width = -(-len(self.at) // len(output))
        n_runs = -(-counts // width)
        rank = torch.arange(len(self.at), device=self.at.device) - (counts.cumsum(0) - counts)[inverse]
        place = ((n_runs.cumsum(0) - n_runs)[inverse] + rank // width) * width + rank % width
        inputs = self.at.new_zeros(int(n_runs.sum()) * width)
        inputs[place] = self.at % d_in
        return output.repeat_interleave(n_runs), inputs.reshape(-1, width), place


@dataclass(frozen=True, eq=False)
class PickedJacobian(BlockJacobian):
    """The Jacobian of some entries of a block, j (B, K, n); to all other entries it gives a derivative of zero."""

    picked: DenseJacobian
    chosen: Entries
    uses: int

    @classmethod
    def of(cls, whole: BlockJacobian, chosen: Entries) -> PickedJacobian:
        """Return the columns of the chosen entries; no others are formed."""
        return cls(DenseJacobian(whole.columns(chosen)), chosen, whole.positions)

    @property
    def positions(self) -> int:
        return self.uses

    @property
    def nbytes(self) -> int:
        return self.picked.nbytes

    def to(self, dtype: torch.dtype) -> PickedJacobian:
        return replace(self, picked=self.picked.to(dtype))

    def samples(self, rows: slice) -> PickedJacobian:
        return replace(self, picked=self.picked.samples(rows))

    def add(self, other: BlockJacobian) -> PickedJacobian:
        return replace(self, picked=DenseJacobian(self.picked.j + other.columns(self.chosen)))

    def whole(self) -> Tensor:
        return self.chosen.expand(self.picked.j)

    def columns(self, entries: Entries) -> Tensor:
        assert entries is self.chosen, "a Jacobian has the columns that it was made for"
        return self.picked.j

    def squares(self) -> Tensor:
        return self.chosen.expand(self.picked.squares())

    def unit_squares(self) -> Tensor:
        return self.picked.unit_squares()

    def quadratic_form(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        return self.picked.quadratic_form(weights.reshape(-1)[self.chosen.at], tokens, full)

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        same = other if other is self else DenseJacobian(other.columns(self.chosen))
        chosen = None if weights is None else weights.reshape(-1)[self.chosen.at]
        return self.picked.between(self.picked if same is self else same, chosen)

    def jvp(self, v: Tensor) -> Tensor:
        return self.picked.jvp(v.flatten(1)[:, self.chosen.at])

    def vjp(self, u: Tensor) -> Tensor:
        return self.chosen.expand(self.picked.vjp(u))

    def materialised_size(self) -> int:
        return self.picked.materialised_size()


@dataclass(frozen=True, eq=False)
class DenseJacobian(BlockJacobian):
    """A Jacobian that is kept whole, j (B, K, p).

    ``form`` (G, d_out, d_in) is that of a linear block, with the weight ``name``, whose factors a batch does not show.
    """

    j: Tensor
    form: tuple[int, ...] = ()  # empty for (p,)
    name: str = ""

    @property
    def nbytes(self) -> int:
        return self.j.nbytes

    @property
    def widths(self) -> tuple[int, int]:
        assert self.form, "a block that is not a linear map has no factors"
        return self.form[1], self.form[2]

    def to(self, dtype: torch.dtype) -> DenseJacobian:
        return replace(self, j=self.j.to(dtype))

    def samples(self, rows: slice) -> DenseJacobian:
        return replace(self, j=self.j[rows])

    def add(self, other: BlockJacobian) -> DenseJacobian:
        return replace(self, j=self.j + other.whole().reshape(self.j.shape))

    def rotate(self, out: Basis, inp: Basis, crossed: bool = True) -> DenseJacobian:
        turned = out.coordinates(inp.coordinates(self.whole()).mT).mT
        return DenseJacobian(turned.flatten(2), tuple(turned.shape[2:]), self.name)

    def kronecker_rows(self, reduce: bool, weights: Tensor | None = None) -> KroneckerRows:
        raise ModelError(
            f"a batch uses {self.name!r} in another way than the first did, by operations that do not show its inputs; "
            "expected one way, since a Kronecker factor is a sum over inputs. Use Full() or Diagonal(), which take "
            "both, compute it in one way in forward, or leave it out with named()."
        )

    def whole(self) -> Tensor:
        return self.j.unflatten(-1, self.form) if self.form else self.j

    def columns(self, entries: Entries) -> Tensor:
        return self.j.index_select(-1, entries.at)

    def squares(self) -> Tensor:
        total = self.j.square().sum((0, 1))
        return total.unflatten(-1, self.form) if self.form else total

    def unit_squares(self) -> Tensor:
        squares = self.j.square().transpose(0, 1)
        return squares.unflatten(-1, self.form).sum(-1).flatten(2) if self.form else squares

    def quadratic_form(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        rows, weights = self.j.reshape(len(self.j), tokens, -1, self.j.shape[-1]), weights.reshape(-1)
        return (rows * weights) @ rows.mT if full else (rows.square() * weights).sum(-1)

    def jvp(self, v: Tensor) -> Tensor:
        return product(v.reshape(len(v), -1), self.j.flatten(0, 1).mT).reshape(len(v), *self.j.shape[:2])

    def vjp(self, u: Tensor) -> Tensor:
        total = product(u.flatten(1), self.j.flatten(0, 1))
        return total.unflatten(-1, self.form) if self.form else total

    def materialised_size(self) -> int:
        return self.j.numel()


@dataclass(frozen=True, eq=False)
class LookupJacobian(BlockJacobian):
    """The Jacobian of an embedding: its input factor is an index and never a one-hot vector.

    Repeats of a token within a sample are added up first, into U segments. ``g`` (K, U, d_out) holds their gradients;
    ``token`` and ``owner`` (U,) say to which row of the table and to which sample a segment belongs.
    """

    g: Tensor
    token: Tensor
    owner: Tensor
    batch: int
    table: int
    rows: Tensor  # sample * table + token of all uses, without padding, for the counts of the input factor
    is_lookup: ClassVar[bool] = True

    @classmethod
    def build(cls, indices: Tensor, g: Tensor, real: Tensor, table: int) -> LookupJacobian:
        """Return it for indices (B, T) and gradients g (K, B, T, d_out); ``real`` (B, T) is False for padding."""
        batch = len(indices)
        key = (torch.arange(batch, device=indices.device)[:, None] * table + indices)[real]
        return cls._sum_by_key(key, g[:, real], batch, table, key)

    @classmethod
    def _sum_by_key(cls, key: Tensor, g: Tensor, batch: int, table: int, rows: Tensor) -> LookupJacobian:
        """Add up the gradients g (K, n, d_out) that have the same key, sample * table + token."""
        unique, inverse = torch.unique(key, return_inverse=True)
        pooled = g.new_zeros(g.shape[0], len(unique), g.shape[-1]).index_add_(1, inverse, g)
        return cls(pooled, unique % table, unique // table, batch, table, rows)

    @property
    def positions(self) -> int:
        return max(1, len(self.rows) // self.batch)

    @property
    def nbytes(self) -> int:
        return self.g.nbytes + self.token.nbytes + self.owner.nbytes + self.rows.nbytes

    @property
    def widths(self) -> tuple[int, int]:
        return self.g.shape[-1], self.table

    def to(self, dtype: torch.dtype) -> LookupJacobian:
        return replace(self, g=self.g.to(dtype))

    def samples(self, rows: slice) -> LookupJacobian:
        """Return that of some samples; repeats of a token count once for the input factor."""
        chosen = (self.owner >= rows.start) & (self.owner < rows.stop)
        token, owner = self.token[chosen], self.owner[chosen] - rows.start
        key = owner * self.table + token
        return LookupJacobian(self.g[:, chosen], token, owner, rows.stop - rows.start, self.table, key)

    def add(self, other: LookupJacobian) -> LookupJacobian:
        key = torch.cat([part.owner * part.table + part.token for part in (self, other)])
        g, rows = torch.cat([self.g, other.g], 1), torch.cat([self.rows, other.rows])
        return self._sum_by_key(key, g, self.batch, self.table, rows)

    def rotate(self, out: Basis, inp: Basis, crossed: bool = True) -> LookupJacobian:
        assert isinstance(inp, Axes), "a lookup has no input basis"
        g = self.g if inp.scale is None else self.g * inp.scale[0][self.token].unsqueeze(-1).to(self.g)
        return replace(self, g=out.coordinates(g))

    def kronecker_rows(self, reduce: bool, weights: Tensor | None = None) -> KroneckerRows:
        each = None if weights is None else weights[self.rows // self.table]
        counts = torch.bincount(self.rows % self.table, weights=each, minlength=self.table)
        number = float(self.rows.numel() if each is None else each.sum())
        return KroneckerRows(None, counts, self.g.flatten(0, 1), False, number)

    def whole(self) -> Tensor:
        outputs, _, d_out = self.g.shape
        full = self.g.new_zeros(self.batch, self.table, outputs, d_out)
        full[self.owner, self.token] = self.g.transpose(0, 1)
        return full.permute(0, 2, 3, 1).unsqueeze(2)

    def columns(self, entries: Entries) -> Tensor:
        _, output, row = entries.coordinates
        keys = self.owner * self.table + self.token  # they rise: see ``_sum_by_key``
        wanted = torch.arange(self.batch, device=keys.device)[:, None] * self.table + row  # (B, n)
        place = torch.searchsorted(keys, wanted).clamp_max(max(0, len(keys) - 1))
        if not len(keys):
            return self.g.new_zeros(self.batch, len(self.g), len(row))
        columns = self.g[:, place, output]  # (K, B, n)
        return torch.where(keys[place] == wanted, columns, 0.0).transpose(0, 1)

    def squares(self) -> Tensor:
        total = self.g.new_zeros(self.table, self.g.shape[-1])
        return total.index_add_(0, self.token, self.g.square().sum(0)).mT.unsqueeze(0)

    def unit_squares(self) -> Tensor:
        total = self.g.new_zeros(self.g.shape[0], self.batch, self.g.shape[-1])
        return total.index_add_(1, self.owner, self.g.square())

    def quadratic_form(self, weights: Tensor, tokens: int, full: bool) -> Tensor:
        seeds, segments, d_out = self.g.shape
        classes = seeds // tokens
        shape = (self.batch, tokens, classes, classes) if full else (self.batch, tokens, classes)
        total = self.g.new_zeros(shape)
        numbers = seeds * (3 * d_out + (classes if full else 1))
        for part in chunks(segments, self.g.element_size() * numbers, self.g.device):
            rows = self.g[:, part].transpose(0, 1).reshape(-1, tokens, classes, d_out)
            scaled = rows * weights[0].mT[self.token[part]][:, None, None]
            forms = scaled @ rows.mT if full else (scaled * rows).sum(-1)
            total.index_add_(0, self.owner[part], forms)
        return total

    def between(self, other: BlockJacobian, weights: Tensor | None = None) -> Tensor:
        """Return J diag(weights) J'ᵀ, over the rows of the table that either batch has."""
        if not isinstance(other, LookupJacobian):
            return super().between(other, weights)
        tokens = torch.unique(torch.cat([self.token, other.token]))
        left = self._over(tokens)
        right = left if other is self else other._over(tokens)
        if weights is not None:
            left = left * weights[0].mT[tokens]
        return left.flatten(1) @ right.flatten(1).mT

    def _over(self, tokens: Tensor) -> Tensor:
        """Return the Jacobian over some rows of the table, (B K, len(tokens), d_out)."""
        outputs, _, d_out = self.g.shape
        place = torch.searchsorted(tokens, self.token)
        full = self.g.new_zeros(self.batch, len(tokens), outputs, d_out)
        full = full.index_put((self.owner, place), self.g.transpose(0, 1))
        return full.permute(0, 2, 1, 3).reshape(-1, len(tokens), d_out)

    def jvp(self, v: Tensor) -> Tensor:
        picked = v[:, 0].mT[:, self.token]  # (n, U, d_out)
        parts = torch.einsum("kui,nui->nuk", self.g, picked)
        return parts.new_zeros(v.shape[0], self.batch, self.g.shape[0]).index_add_(1, self.owner, parts)

    def vjp(self, u: Tensor) -> Tensor:
        mixed = torch.einsum("kui,nuk->nui", self.g, u[:, self.owner])
        total = mixed.new_zeros(u.shape[0], self.table, self.g.shape[-1]).index_add_(1, self.token, mixed)
        return total.mT.unsqueeze(1)

    def materialised_size(self) -> int:
        return self.g.numel()
