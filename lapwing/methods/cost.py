"""What a method takes: work and memory, computed from the sizes of a network and its data before anything is fitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from lapwing.curvature.blocks import decomposition_work, factor_numbers, most_rows
from lapwing.curvature.sweep import MANY
from lapwing.data.inputs import Inputs, tensors_in
from lapwing.networks.dense_jacobian import LookupJacobian
from lapwing.networks.forward import has_dropout
from lapwing.networks.jacobians import Block, BlockJacobian, Footprint, temporary
from lapwing.networks.linear_jacobian import NEAR
from lapwing.networks.network import Network, plain_passes, trained_names
from lapwing.posteriors.draws import MANY as MANY_PREDICTED
from lapwing.posteriors.draws import SAMPLES
from lapwing.runtime.memory import OperationCount, budget
from lapwing.tangent import CACHE

# The time of other work over that of one multiplication in a plain pass, chosen with ``benchmarks.estimates``.
DOUBLE = 2.0  # a multiplication in float64
NUMBER = 16.0  # writing one number, where an operation does little else
CUBE = 7.0  # one for the cube of the size of a matrix whose eigenvectors are computed
HALVES = 0.625  # share of the multiplications of a Gram matrix that is computed by halves


@dataclass(frozen=True)
class Work:
    """Work by its kind, in numbers of operations. Each kind has its own speed."""

    products: float = 0.0  # multiplications in matrix products and convolutions, in the dtype of the network
    doubles: float = 0.0  # the same in float64
    numbers: float = 0.0  # numbers that are written by other operations
    cubes: float = 0.0  # cubes of the sizes of matrices that are decomposed

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, f.name) * times for f in fields(self)))

    __rmul__ = __mul__

    def __truediv__(self, by: float) -> Work:
        return self * (1 / by)

    @property
    def total(self) -> float:
        """The work in multiplications of a plain pass that take the same time."""
        return self.products + DOUBLE * self.doubles + NUMBER * self.numbers + CUBE * self.cubes

    @property
    def multiplications(self) -> float:
        """The multiplications alone, without numbers that are written and decompositions."""
        return self.products + self.doubles

    @property
    def in_double(self) -> Work:
        """The same work with all its products in float64."""
        return replace(self, products=0.0, doubles=self.multiplications, numbers=2 * self.numbers)


NOTHING = Work()


def summed(parts: Iterable[Work]) -> Work:
    """Return the sum of the parts."""
    return sum(parts, NOTHING)


@dataclass(frozen=True)
class FactorWork:
    """The sizes of one Kronecker factor of a linear map, and of its groups together."""

    side: str
    size: int
    rows: int  # at most its rank
    summed: int  # outer products that its sum takes
    groups: int = 1

    def is_rows(self, limit: int) -> bool:
        """Return whether it is kept as its rows, with this ``factor_limit``."""
        return self.rows <= most_rows(self.size, limit)

    def is_diagonal(self, limit: int) -> bool:
        """Return whether it is a diagonal, with this ``factor_limit``."""
        return not self.is_rows(limit) and self.size > limit

    def numbers(self, limit: int) -> int:
        """Return how many numbers it has."""
        return self.groups * factor_numbers(self.size, self.rows, limit)

    def nbytes(self, limit: int, itemsize: int) -> int:
        """Return its bytes: sums are float64, rows have the network's dtype."""
        return self.numbers(limit) * (itemsize if self.is_rows(limit) else 8)

    def directions(self, limit: int) -> int:
        """Return the parts of its eigenbasis: those of the rows, and one for the rest."""
        return self.rows + 1 if self.is_rows(limit) else self.size

    def basis(self, limit: int) -> int:
        """Return the numbers of its eigenbasis; the axes of a diagonal have none."""
        return 0 if self.is_diagonal(limit) else self.numbers(limit)

    def decomposition(self, limit: int) -> Work:
        """Return the work to decompose it."""
        return Work(cubes=self.groups * decomposition_work(self.size, self.rows, limit))

    def sums(self, limit: int, share: float) -> Work:
        """Return the work to sum it over all data; ``share`` is that of its entries that are computed."""
        entries = self.groups * self.summed * self.size
        is_matrix = not self.is_rows(limit) and self.size <= limit
        return Work(share * entries * self.size if is_matrix else 0, numbers=entries)

    def turned(self, limit: int, vectors: int) -> Work:
        """Return the work to turn so many vectors into its eigenbasis."""
        if self.is_diagonal(limit):
            return NOTHING
        each = 2 * self.rows if self.is_rows(limit) else self.size  # there, and back for the rest
        return self.groups * vectors * self.size * Work(each, numbers=1)


@dataclass(frozen=True)
class BlockWork:
    """The sizes of one block of parameters, and its work for one datum and some seeds of backward passes."""

    size: int
    positions: int = 1  # T: pixels, tokens or time steps that share the weight
    form: tuple[int, int, int] | None = None  # (groups, d_out, d_in) of a linear map; None for other parameters
    closed: bool = False  # the last layer, whose curvature needs no seeds
    lookup: bool = False  # the table of an embedding, whose inputs are one-hot
    opaque: bool = False  # without a rule: its Jacobian takes passes of its own

    @property
    def shared(self) -> bool:
        """Whether it is a linear map that is used at several positions."""
        return self.form is not None and self.positions > 1 and not self.lookup

    @property
    def product(self) -> int:
        """Multiplications of the linear map for one datum."""
        return 0 if self.form is None or self.lookup else self.positions * self.size

    @property
    def ends(self) -> tuple[int, int]:
        """The numbers that enter and leave the linear map at all positions."""
        groups, d_out, d_in = self.form or (1, self.size, 0)
        return (0 if self.lookup else self.positions * groups * d_in), self.positions * groups * d_out

    def factors(self, data: int, seeds: int) -> Iterator[FactorWork]:
        """Yield the Kronecker factors that are no diagonal of counts."""
        if self.form is not None:
            groups, d_out, d_in = self.form
            uses = data * self.positions
            if not self.lookup:
                yield FactorWork("input", d_in, uses, uses, groups)
            rows, sums = (uses * d_out, uses) if self.closed else (uses * seeds, uses * seeds)
            yield FactorWork("output", d_out, rows, sums, groups)

    @property
    def gradient(self) -> int:
        """Numbers kept of the gradient of one output: the two factors of a linear map, or the row itself if shared."""
        if self.form is None or self.shared:
            return self.size
        return sum(self.ends)

    def formed(self, seeds: int) -> int:
        """Return the numbers kept of the gradients of all seeds for repeated products."""
        if self.form is None or (self.shared and self.positions > seeds):
            return seeds * self.size
        inp, out = self.ends
        return inp + seeds * out

    def whole(self, seeds: int) -> Work:
        """Return the work to form the gradients of all seeds."""
        return Work(seeds * self.product if self.shared else 0, numbers=seeds * self.size)

    def squares(self, seeds: int) -> Work:
        """Return the work to sum the squared gradients of all seeds."""
        if self.closed:
            return Work(self.product, numbers=self.ends[1])
        if self.shared:
            return self.whole(seeds) + Work(numbers=seeds * self.size)
        if self.form is None or self.lookup:
            return Work(numbers=seeds * (self.size if self.form is None else self.ends[1]))
        return Work(self.size, numbers=seeds * self.ends[1])

    def quadratic(self, outputs: int) -> Work:
        """Return the work of J D Jᵀ for all outputs of one datum, with a diagonal D."""
        if self.shared or self.form is None:
            form = Work(outputs**2 * self.size, numbers=outputs * self.size)
            return form + (self.whole(outputs) if self.shared else NOTHING)
        _, out = self.ends
        return Work((0 if self.lookup else self.size) + outputs**2 * out, numbers=outputs * out)

    def along(self, outputs: int) -> Work:
        """Return the work of J v for one vector v, from gradients as they are computed."""
        return Work(outputs * self.size if self.form is None else self.product + outputs * self.ends[1])

    def products(self, seeds: int) -> Work:
        """Return the work of Jᵀ J v for one vector v, from gradients that are kept."""
        if self.form is None or (self.shared and self.positions > seeds):
            return Work(2 * seeds * self.size)
        return Work(2 * (self.product + seeds * self.ends[1]))


@dataclass(frozen=True)
class KroneckerWork:
    """The Kronecker factors of all linear maps of a workload, and the blocks that are none."""

    workload: Workload
    full_limit: int  # entries up to which a block that is no linear map is a matrix
    factor_limit: int  # size up to which a factor is a matrix

    @cached_property
    def factors(self) -> list[FactorWork]:
        """The factors that are no diagonal of counts."""
        work = self.workload
        return [factor for block in work.blocks for factor in block.factors(work.data, work.seeds)]

    @property
    def numbers(self) -> int:
        """Numbers in all factors; a table has counts on the side of its rows."""
        counts = sum(block.form[2] for block in self.workload.blocks if block.form is not None and block.lookup)
        return counts + sum(factor.numbers(self.factor_limit) for factor in self.factors)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors, and of the blocks that are no linear map."""
        counts = sum(block.form[2] for block in self.workload.blocks if block.form is not None and block.lookup)
        each = (factor.nbytes(self.factor_limit, self.workload.itemsize) for factor in self.factors)
        return 8 * counts + sum(each) + self._other_bytes

    @property
    def basis_bytes(self) -> int:
        """Bytes of the eigenbases and of one eigenvalue for each pair of directions, and of the other blocks."""
        numbers = sum(factor.basis(self.factor_limit) for factor in self.factors)
        for block in self.workload.blocks:
            if block.form is not None:
                sides = [
                    f.directions(self.factor_limit) for f in block.factors(self.workload.data, self.workload.seeds)
                ]
                inp, out = (block.form[2], *sides) if block.lookup else sides
                numbers += block.form[0] * inp * out
        return self.workload.itemsize * numbers + self._other_bytes

    @property
    def _others(self) -> list[int]:
        return [block.size for block in self.workload.blocks if block.form is None]

    @property
    def _other_bytes(self) -> int:
        """Bytes of blocks that are no linear map: a float64 matrix, or a diagonal in the network's dtype."""
        item = self.workload.itemsize
        return sum(8 * size**2 if size <= self.full_limit else item * size for size in self._others)

    @property
    def sums(self) -> Work:
        """Work to sum all factors and the other blocks, for one datum."""
        data, seeds = self.workload.data, self.workload.seeds
        # Only half of a matrix is summed, except over positions that lie apart in memory.
        factors = [
            factor.sums(self.factor_limit, 1.0 if block.shared and factor.side == "output" else HALVES)
            for block in self.workload.blocks
            for factor in block.factors(data, seeds)
        ]
        full = sum(size**2 for size in self._others if size <= self.full_limit)
        return summed(factors) / data + seeds * Work(doubles=full, numbers=sum(self._others))

    @property
    def decompositions(self) -> Work:
        """Work to decompose all factors and full blocks."""
        others = sum(size**3 for size in self._others if size <= self.full_limit) / 3
        return summed(factor.decomposition(self.factor_limit) for factor in self.factors) + Work(cubes=others)

    def rotated(self, seeds: int, closed: bool = False) -> Work:
        """Return the work to turn the gradients of a datum into the eigenbases; ``closed`` takes closed forms."""
        total = Work()
        for block in self.workload.blocks:
            for factor in block.factors(self.workload.data, self.workload.seeds):
                each = 1 if factor.side == "input" or (closed and block.closed) else seeds
                total += factor.turned(self.factor_limit, each * block.positions)
        return total

    @property
    def draws(self) -> Work:
        """Work of the weights that predictions of many outputs draw once."""
        sides = sum(block.size * sum(block.form[1:]) for block in self.workload.blocks if block.form is not None)
        return self.workload.draws + self.workload.pairs * Work(sides)

    @property
    def note(self) -> str:
        """The factors that would be a diagonal; empty if none."""
        wide = [factor for factor in self.factors if factor.is_diagonal(self.factor_limit)]
        listed = list(dict.fromkeys(f"{f.side} factor diagonal: {f.size:,} > {self.factor_limit:,}" for f in wide))
        return "; ".join(listed[:3]) + (f"; and {len(listed) - 3} more" if len(listed) > 3 else "")


def workload_of(network: Network, inputs: Inputs, data: int | None = None) -> Workload:
    """Return the sizes of a network, read from one batch, for this many data; as many as in the batch if None.

    Cost: a few forward and backward passes.
    """
    tangent = network.linearise(inputs)
    parts = tangent.jacobians(torch.zeros_like(tangent.f).unsqueeze(0))
    blocks = tuple(_block_work(block, part, network.head) for block, part in parts)
    del tangent, parts
    count, model = network.count(inputs), network.replica
    chosen, trained = network.selection.names, trained_names(network.model)
    with plain_passes(network, inputs, chosen) as plain:
        forward, to_chosen = _counted(plain.forward) / count, _counted(plain.training) / count
    training = to_chosen
    if set(trained) != set(chosen) and trained:
        with plain_passes(network, inputs, trained) as plain:
            training = _counted(plain.training) / count
    products = max(forward.products, sum(block.product for block in blocks))  # fused layers hide their products
    biases = sum(work.ends[1] for work, block in zip(blocks, network.layout, strict=True) if block.bias is not None)
    gradients = sum(block.product for block in blocks) - biases  # of biases without a product
    return Workload(
        blocks,
        weights=network.selection.size,
        parameters=sum(p.numel() for p in model.parameters()),
        output_shape=network.output_shape,
        input_size=sum(t.numel() for t in tensors_in(inputs)) // count,
        data=count if data is None else data,
        forward=Work(products, numbers=forward.numbers),
        backward=Work(
            max(0.0, to_chosen.products - forward.products - gradients),
            numbers=max(0.0, to_chosen.numbers - forward.numbers),
        ),
        training=Work(max(training.products, products), numbers=max(1.0, training.numbers)),
        footprint=network.footprint,
        dtype=network.dtype,
        device=network.device,
        inputs=count,
        single=network.selection.index is not None,
        dropout=any(has_dropout(module) for module in network.model.modules()),
    )


def _block_work(block: Block, jacobian: BlockJacobian, head: str) -> BlockWork:
    """Return the sizes of a block with this Jacobian; ``head`` is the weight of the last layer."""
    if not block.linear:
        return BlockWork(block.size, opaque=not block.has_rule)
    form, lookup = (block.groups, block.d_out, block.d_in), isinstance(jacobian, LookupJacobian)
    return BlockWork(block.size, jacobian.positions, form, block.weight == head, lookup)


def _counted(call: Callable[[], Any]) -> Work:
    """Return the work of a call in the dtype of the network."""
    with OperationCount() as count:
        call()
    return Work(count.products, numbers=count.numbers)


@dataclass(frozen=True)
class Workload:
    """A network and its data in numbers, from which a method computes its cost. Work is that for one datum."""

    blocks: tuple[BlockWork, ...]
    weights: int  # P, the chosen weights
    parameters: int  # of the whole model
    output_shape: tuple[int, ...]  # (C,) or (T, C)
    input_size: int  # numbers in one input
    data: int
    forward: Work  # of a plain forward pass
    backward: Work  # of a backward pass to the chosen weights, without their gradients
    training: Work  # of a plain forward and backward pass with the gradients of all weights that are trained
    footprint: Footprint  # the memory that one datum takes
    dtype: torch.dtype  # of gradients
    device: torch.device
    inputs: int  # of a prediction
    single: bool = False  # weights are chosen one by one, so they have no Kronecker structure
    dropout: bool = False  # the model has a dropout layer
    drawn: int | None = None  # labels for each datum, if the curvature is estimated from them; or targets

    @property
    def outputs(self) -> int:
        """Numbers in the output for one input: C, or T C with an output for each token."""
        return torch.Size(self.output_shape).numel()

    def with_curvature(self, curvature: str | None, draws: int) -> Workload:
        """Return the workload of this curvature; None is the default, an estimate where there are many outputs."""
        many = self.outputs > MANY and not all(block.closed for block in self.blocks)
        if curvature == "empirical":  # one gradient for each token, of the last layer too
            blocks = tuple(replace(block, closed=False) for block in self.blocks)
            return replace(self, blocks=blocks, drawn=torch.Size(self.output_shape[:-1]).numel())
        estimated = curvature == "fisher_mc" or (curvature is None and many)
        return replace(self, drawn=draws if estimated else None)

    @property
    def seeds(self) -> int:
        """Backward passes of a fit for each datum: one for each output, or for each label that is drawn."""
        return self.outputs if self.drawn is None else self.drawn

    @property
    def rows(self) -> int:
        """Rows of the Jacobian over all data: n C."""
        return self.data * self.outputs

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the dtype of the gradients."""
        return torch.finfo(self.dtype).bits // 8

    @property
    def activations(self) -> int:
        """Bytes that a plain forward pass of the inputs of a prediction holds."""
        return 4 * self.itemsize * self.inputs * max(self.input_size, *(block.ends[1] for block in self.blocks))

    def jacobian_bytes(self, formed: bool = False, streams: bool = False) -> int:
        """Return the bytes of the Jacobians that a fit or a prediction holds at once.

        A prediction forms those of single layers whose weight is shared; a fit only where ``formed``. Sums over blocks
        stream: they drop each gradient after its use.
        """
        options, sizes = (self.dtype, self.device), replace(self.footprint, streams=streams)
        joined = -(-sizes.joined(self.seeds, *options) // self.inputs) * self.inputs  # whole batches
        batch, seeds = max(1, min(self.data, joined)), 1 if self.lone_head else self.seeds
        fit = sizes.chunk_bytes(batch, seeds, *options)
        fit += self._formed_bytes(batch, seeds) if formed else 0
        if self.pairs:
            return max(fit, self.itemsize * self.pairs * 2 * (self.weights + self.inputs * sizes.width))
        predict = sizes.chunk_bytes(self.inputs, self.outputs, *options)
        return max(fit, predict + self._formed_bytes(self.inputs, self.outputs))

    def _formed_bytes(self, samples: int, seeds: int) -> int:
        """Return the bytes of the largest Jacobian of one layer that is formed, for a few samples at a time."""
        sizes = [self.itemsize * seeds * block.size for block in self.blocks if block.shared]
        if self.device.type == "cpu":  # larger ones are formed in pieces that stay in the cache
            sizes = [size for size in sizes if size <= NEAR]
        each = max(sizes, default=0)
        return min((min(samples, 32) + 2) * each, temporary(self.device) + each)

    @property
    def lone_head(self) -> bool:
        """Whether the last layer is the only block, so that no backward pass is needed."""
        return len(self.blocks) == 1 and self.blocks[0].closed and not self.single

    def jacobians(self, seeds: int | None = None) -> Work:
        """Return the work of the layer-wise Jacobians: a forward pass, a backward pass for each seed (S by default)."""
        seeds = self.outputs if seeds is None else seeds
        passes = self.forward + seeds * self.backward
        if any(block.opaque for block in self.blocks):  # one more, with gradients of the weights
            passes += seeds * self.training
        return passes + Work(numbers=sum(block.ends[0] for block in self.blocks if block.shared))

    @property
    def blockwise(self) -> Work:
        """Work of the layer-wise Jacobians for sums over blocks, in which the last layer has a closed form."""
        return self.jacobians(0 if self.lone_head else self.seeds)

    @property
    def pairs(self) -> int:
        """Pairs of functions that a prediction draws, where there are many outputs; otherwise none."""
        return SAMPLES // 2 if self.outputs > MANY_PREDICTED else 0

    @property
    def draws(self) -> Work:
        """Work of the weights that predictions of many outputs draw once."""
        return self.pairs * Work(numbers=2 * self.weights)

    @property
    def gradient(self) -> int:
        """Numbers kept of the gradient of one output; also the work for one entry of the tangent kernel."""
        return sum(block.gradient for block in self.blocks)

    @property
    def formed(self) -> int:
        """Numbers kept of the gradients of all outputs for repeated products."""
        return sum(block.formed(self.outputs) for block in self.blocks)

    @property
    def squares(self) -> Work:
        """Work of a fit to sum the squared gradients of all seeds."""
        return summed(block.squares(self.seeds) for block in self.blocks)

    def whole(self, seeds: int) -> Work:
        """Return the work to form the Jacobian itself, of the chosen weights alone."""
        return summed(block.whole(seeds) for block in self.blocks) * (self.weights / sum(b.size for b in self.blocks))

    def predicted(self, covariance: Work) -> Work:
        """Return the work of a prediction, in which the covariance of the outputs takes this beside their Jacobians.

        Many outputs are predicted from drawn functions instead, with a forward pass for each.
        """
        if self.pairs:
            return (1 + 2 * self.pairs) * self.forward
        return self.jacobians() + covariance

    @property
    def quadratic(self) -> Work:
        """Work of J D Jᵀ of one input, with a diagonal D."""
        return summed(block.quadratic(self.outputs) for block in self.blocks)

    def along(self, vectors: int) -> Work:
        """Return the work of J v for so many vectors v, from gradients as they are computed."""
        return vectors * summed(block.along(self.outputs) for block in self.blocks)

    def products(self, vectors: float) -> Work:
        """Return the work of Jᵀ J v for so many vectors v, from gradients that are kept."""
        return vectors * summed(block.products(self.outputs) for block in self.blocks)

    @property
    def kept(self) -> int:
        """Bytes of the gradients of all data, if they are kept between products; otherwise zero."""
        size = self.itemsize * self.data * self.formed
        return size if size <= CACHE * budget(self.device) else 0

    def repeated(self, vectors: float, times: int) -> Work:
        """Return the work of Jᵀ J v for so many vectors v in so many passes, with the gradients kept if they fit."""
        formed = summed(block.whole(self.outputs) for block in self.blocks if block.form is None or block.shared)
        return (self.jacobians() + formed) * (1 if self.kept else 1 + times) + self.products(vectors)

    def low_rank(self, rank: int) -> Work:
        """Return the work of a prediction from the prior and so many directions, in float64."""
        along = self.along(rank) + Work(self.outputs * rank**2 / 2)
        return self.predicted((self.quadratic + along).in_double)

    def kernel(self, points: int) -> Work:
        """Return the work for the gradient of one output at each of ``points`` inputs, and for their kernel."""
        return points * self.jacobians(1) + Work(doubles=points**2 * self.gradient)

    def cost(self, stored: int, peak: int, fit: Work, predict: Work, once: Work = NOTHING, note: str = "") -> Cost:
        """Return the cost of a method.

        Args:
            stored: Bytes that the posterior keeps, besides the weights themselves.
            peak: Bytes that the fit or a prediction holds at most besides those.
            fit: The work of the fit for each datum.
            predict: The work of a prediction for each input.
            once: The work that does not grow with the data, such as factorisations, once before the first prediction.
            note: A remark.
        """
        kept = stored + self.itemsize * self.weights
        epochs = (fit + once / self.data).total / self.training.total
        passes = predict.total / max(1.0, self.forward.total)
        return Cost(kept, epochs, note, True, passes, kept + peak, self.data * fit, once, predict)


@dataclass(frozen=True)
class Cost:
    """What a method takes, before anything is fitted."""

    stored: int  # bytes that the posterior keeps
    fit_epochs: float  # work before the first prediction over that of plain passes, forward and backward, over the data
    note: str = ""
    supported: bool = True
    predict_passes: float = 0.0  # work of a prediction over that of a plain forward pass of the same inputs
    peak: int = 0  # bytes held at most, besides the model and the data
    fit: Work = field(default=NOTHING, repr=False)  # for all data
    once: Work = field(default=NOTHING, repr=False)  # that does not grow with the data
    predict: Work = field(default=NOTHING, repr=False)  # for one input
    fit_seconds: float | None = None  # after timing one batch
    predict_seconds: float | None = None  # of the batch, after timing it

    @classmethod
    def refused(cls, note: str) -> Cost:
        """Return the cost of a method that does not take this problem, with the reason."""
        return cls(0, 0.0, note, supported=False)

    def repeated(self, count: int, note: str) -> Cost:
        """Return the cost of the same method for ``count`` networks, fitted one after another and all kept."""
        if not self.supported:
            return self
        return Cost(
            count * self.stored, count * self.fit_epochs, note, True, count * self.predict_passes,
            self.peak + (count - 1) * self.stored, count * self.fit, count * self.once, count * self.predict,
        )  # fmt: skip
