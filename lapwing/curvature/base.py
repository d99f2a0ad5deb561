"""The contracts of curvatures and of their precisions, what all structures share, and the pass that computes them.

A ``Sweep`` is one pass over the data. It yields layer-wise Jacobians, multiplied by a root of the loss's curvature. A
likelihood that learns a noise for each output takes a pass, and has a curvature, for each output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.inputs import check_finite, merge_batches
from lapwing.data.processes import ALONE, Processes
from lapwing.errors import DataError, FileError, NumericalError, UnsupportedError
from lapwing.likelihoods.base import (
    Likelihood,
    as_count,
    weighted_count,
    weighted_hessian,
    weighted_loss,
    weighted_seeds,
)
from lapwing.networks.jacobians import BlockJacobian, flatten_blocks, temporary_bytes
from lapwing.networks.linear_jacobian import HeadGGN
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.networks.tangent import LayerJacobians, Tangent
from lapwing.priors import BoundPrior
from lapwing.problem import Problem, Statistics, check_targets
from lapwing.runtime.memory import PIECE_SHARE, chunks
from lapwing.runtime.settings import one_of
from lapwing.runtime.states import SMALLEST, Array, PartOf, State, saved
from lapwing.runtime.threads import numbered_generator

S = TypeVar("S", bound="Curvature")
Q = TypeVar("Q", bound="Precision")


class Precision:
    """Λ = H/φ + A, factorised once."""

    shares_rotation: ClassVar[bool] = False  # whether ``quadratics`` rotates a Jacobian into its basis once for all

    def logdet(self) -> Tensor:
        """Return the log-determinant of Λ."""
        raise NotImplementedError

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        """Return J Λ⁻¹ Jᵀ: (B, S, C, C), or its diagonal (B, S, C)."""
        raise NotImplementedError

    def quadratics(self: Q, precisions: Sequence[Q], jacobian: LayerJacobians) -> list[Tensor]:
        """Return ``quadratic(jacobian)`` of all precisions, which belong to one curvature."""
        return [each.quadratic(jacobian, True) for each in precisions]

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        """Return J Λ⁻¹ J'ᵀ between all inputs and outputs of two batches, (B K, B' K'), or of one with itself."""
        raise NotImplementedError

    def sample(self, eps: Tensor) -> Tensor:
        """Return Λ^-½ eps for eps (n, P)."""
        raise NotImplementedError

    def adjoint(self, v: Tensor) -> Tensor:
        """Apply the transpose of ``sample`` to v (n, P)."""
        raise NotImplementedError

    def solve(self, v: Tensor) -> Tensor:
        """Return Λ⁻¹ v for v (n, P): ``sample`` after ``adjoint``."""
        return self.sample(self.adjoint(v)).to(v)

    def variances(self) -> Tensor:
        """Return the diagonal of Λ⁻¹, (P,)."""
        raise NotImplementedError

    def axes(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return U (C, w), V (D, v) and W (w, v) of Λ⁻¹ = (U ⊗ V) diag(W) (U ⊗ V)ᵀ, if it is known in this form.

        For one linear map of D inputs to C outputs.
        """
        return None

    def gammas(self, precision: Tensor) -> Tensor:
        """Return γ of every weight, (P,), under prior precisions (P,): one less precision times posterior variance.

        A precision that gives some directions no variance at all counts those as not determined by the data.
        """
        return 1 - precision * self.variances().to(precision)


class Curvature:
    """H at unit dispersion in some structure. If two can be added, the sum is the curvature of both data sets."""

    start: Tensor | None = None  # noise ratios (C,) in whose units a curvature is kept for each output; None otherwise
    preconditions: ClassVar[bool] = False  # whether its precision couples all weights: it preconditions the exact one

    @property
    def findings(self) -> tuple[str, ...]:
        """Remarks on parts that are approximated further than the structure says, in words."""
        return ()

    def precision(self, phi: Tensor, prior: BoundPrior) -> Precision:
        """Return Λ = H/φ + A, factorised."""
        raise NotImplementedError

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the log-determinant of H/φ + A in the cheapest way that the structure allows."""
        return self.precision(phi, prior).logdet()

    def diagonal(self) -> Tensor:
        """Return the diagonal of H, (P,), no entry below a thousandth of the median of its layer."""
        raise NotImplementedError

    def coupling_mask(self) -> Tensor:
        """Return one for every weight that is coupled with others and zero for the rest, (P,), or one for all.

        No digits cancel in the variance of a weight that is coupled with no other.
        """
        return torch.ones(())

    def refuse_prior(self, phi: Tensor, prior: BoundPrior) -> None:
        """Raise if the precision with this prior does not exist in the structure."""

    def missing_trace(self, phi: Tensor, prior: BoundPrior) -> Tensor | None:
        """Return the share of each weight, (P,), in what ``logdet`` adds for curvature that the structure leaves out.

        None if it adds nothing, and is not a bound.
        """
        return None

    def missing_findings(self, phi: Tensor, prior: BoundPrior, rows: float) -> tuple[str, ...]:
        """Return remarks on the curvature that is left out, for data with this many outputs in total.

        Nothing where the variances hardly change.
        """
        return ()

    def at(self, ratios: Tensor | None) -> Curvature:
        """Return the curvature under these noise ratios (C,), differentiable in them; itself if it has no ``start``."""
        return self

    def share_decompositions(self: S, processes: Processes) -> S:
        """Return the curvature with its eigendecompositions done, each by one of the processes; alone, when needed.

        Those of a curvature for each output depend on the noise, so every process does them all.
        """
        return self

    def __add__(self: S, other: S) -> S:
        raise UnsupportedError(f"curvatures of the class {type(self).__name__} do not add; fit all the data again.")

    def sum_with(self: S, others: Sequence[S], weights: Tensor) -> S:
        """Return the weighted sum of this curvature and the others, differentiable in the weights (1 + others,)."""
        raise UnsupportedError(f"curvatures of the class {type(self).__name__} do not add with weights.")

    def state(self) -> State:
        """Return the curvature as plain data, for a file; the class method ``from_state`` builds it again."""
        raise UnsupportedError(f"the curvature {type(self).__name__} has no file form, a method state().")


def floor_values(values: Tensor) -> Tensor:
    """Raise values to at least a thousandth of their median, or of their mean if the median is zero.

    If all values are zero, return ones.
    """
    typical = values.median()
    typical = typical if float(typical) > 0 else values.mean()
    return values.clamp_min(float(1e-3 * typical) or 1.0)


def layer_numbers(selection: Selection) -> tuple[list[str], Tensor]:
    """Return the names of all layers, and for every selected weight the position of its layer among them, (P,)."""
    by_parameter = selection.layer_of()
    order = {name: i for i, name in enumerate(dict.fromkeys(by_parameter))}
    numbers = torch.tensor([order[name] for name in by_parameter])
    return list(order), selection.pick(numbers.repeat_interleave(torch.tensor(selection.sizes)))


def floor_by_layer(values: Tensor, selection: Selection) -> Tensor:
    """Apply ``floor_values`` to each layer by itself: values (P,) in the order of theta, selected weights only."""
    names, numbers = layer_numbers(selection)
    numbers, raised = numbers.to(values.device), values.clone()
    for number in range(len(names)):
        in_layer = numbers == number
        raised[in_layer] = floor_values(values[in_layer])
    return raised


def weighted_sum(tensors: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return Σ_c weights_c tensors_c, differentiable in the weights. Memory: one tensor more."""
    weights = weights.to(tensors[0])
    total = weights[0] * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        total.addcmul_(weight, tensor)
    return total


def in_runs(jacobian: LayerJacobians, numbers: int, device: torch.device) -> Iterator[LayerJacobians]:
    """Yield runs of samples that fit the byte budget, where each row takes so many float64 ``numbers``."""
    for rows in chunks(jacobian.batch, 8 * numbers * jacobian.outputs, device):
        yield jacobian.samples(rows)


def cross_products(
    rows_of: Callable[[LayerJacobians], Tensor],
    one: LayerJacobians,
    other: LayerJacobians | None,
    numbers: int,
    device: torch.device,
) -> Tensor:
    """Return the products (B K, B' K') between rows (B K, d) that ``rows_of`` computes for samples of two batches.

    A row takes so many float64 ``numbers`` while it is computed; samples are taken in runs that fit the byte budget.
    """
    second, total = one if other is None else other, None
    pieces = [list(chunks(each.batch, 8 * numbers * each.outputs, device, PIECE_SHARE / 2)) for each in (one, second)]
    for here in pieces[0]:
        left = rows_of(one.samples(here))
        if total is None:
            total = left.new_empty(one.batch, one.outputs, second.batch, second.outputs)
        for there in pieces[1]:
            if other is None and there.start < here.start:
                continue
            right = left if other is None and there == here else rows_of(second.samples(there))
            block = (left @ right.mT).reshape(-1, one.outputs, there.stop - there.start, second.outputs)
            total[here, :, there] = block
            if other is None and there != here:
                total[there, :, here] = block.permute(2, 3, 0, 1)
    assert total is not None
    return total.flatten(2).flatten(0, 1)


def row_products(rows: Tensor, full: bool = True) -> Tensor:
    """Return the products of all pairs of rows (..., n, d): (..., n, n), or only their squares (..., n)."""
    return rows @ rows.mT if full else rows.square().sum(-1)


CURVATURES = ("ggn", "fisher_mc", "empirical")
EXACT_SEEDS = 64  # outputs of a sample, C or T C, up to which the exact curvature is the default
DEFAULT_DRAWS = 4  # labels that are drawn for each datum above that
JACOBIAN_ALONE = "jacobian"  # the Jacobian itself, without a likelihood: one seed for each output


def refuse_open_noise(curvature: str | None, likelihood: Likelihood) -> None:
    """Raise if the empirical Fisher is asked for and the noise is not known: it does not scale with the noise."""
    if curvature == "empirical" and likelihood.learns_dispersion:
        raise UnsupportedError(
            "curvature is 'empirical' and the noise is to be estimated; expected a known noise, on which the empirical "
            "Fisher depends in another way than the GGN. Give Gaussian(noise_std=...), or use curvature='ggn'."
        )


@dataclass(frozen=True, eq=False)
class Seeds:
    """The vectors in output space that the backward passes of a sweep start from.

    With "ggn" they are the columns of the likelihood's root, so that the sum of JᵀJ over the pass is the exact GGN at
    unit dispersion. With "fisher_mc" there is one seed for each of ``draws`` labels drawn from the model, the gradient
    of the loss over √draws: an unbiased estimate for ``draws`` backward passes, whose error falls as one over the root
    of the number of data times draws. With "empirical" there is one seed for each datum, and each token is a datum: the
    gradient of the loss at its target, over √φ, so that the sum over φ is that of the log-likelihood. With "jacobian"
    they are the unit vectors.

    ``output`` takes the seed of one output alone, for a likelihood with a noise for each output.
    """

    curvature: str = "ggn"
    generator: torch.Generator | None = None
    output: int | None = None
    draws: int = 1

    def __post_init__(self) -> None:
        one_of((*CURVATURES, JACOBIAN_ALONE)).check("curvature", self.curvature)

    @property
    def sampled(self) -> bool:
        """Whether they are drawn."""
        return self.curvature == "fisher_mc"

    @property
    def observed(self) -> bool:
        """Whether they are gradients at the targets of the data."""
        return self.curvature == "empirical"

    def count(self, output_shape: tuple[int, ...]) -> int:
        """Return the number of seeds for each sample."""
        if self.sampled:
            return self.draws
        one = self.output is not None or self.observed
        return torch.Size(output_shape[:-1] if one else output_shape).numel()

    def at(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
        """Return the seeds at outputs f (B, [T,] C): (K, B, [T,] C), different ones for each token."""
        if self.sampled:
            return self._draw(likelihood, f, y)
        if self.observed:
            gradient = likelihood.gradient(f, y)
            return root_seeds(gradient.unsqueeze(-1) / likelihood.dispersion.to(gradient).sqrt())
        if self.curvature == JACOBIAN_ALONE:
            return root_seeds(torch.eye(f.shape[-1]).to(f).expand(*f.shape, f.shape[-1]))
        return root_seeds(self._columns(likelihood, f, y, slice(None)))

    def runs(self, likelihood: Likelihood, f: Tensor, y: Tensor, most: int) -> Iterator[Tensor]:
        """Yield the seeds in runs of at most ``most``; only one run of the root's columns is in memory at a time."""
        if self.curvature != "ggn":
            yield from self.at(likelihood, f, y).split(most)
            return
        width = f.shape[-1] if self.output is None else 1
        if f.ndim == 2:
            for start in range(0, width, most):
                columns = self._columns(likelihood, f, y, slice(start, start + most))
                if columns.shape[-1]:  # a softmax has one column less than outputs
                    yield root_seeds(columns)
            return
        tokens = max(1, most // width)
        for first in range(0, f.shape[1], tokens):
            part = slice(first, first + tokens)
            for start in range(0, width, most):
                columns = self._columns(likelihood, f[:, part], y[:, part], slice(start, start + most))
                if columns.shape[-1]:
                    yield root_seeds(columns, first, f.shape[1])

    def _draw(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradients at drawn labels. The draws of a datum follow each other, whatever the chunk.

        Labels are drawn independently, so tokens may share a seed: their cross terms vanish on average.
        """
        f, y = (t.repeat_interleave(self.draws, 0) if self.draws > 1 else t for t in (f, y))
        gradient = likelihood.sampled_gradient(f, y, self.generator)
        if self.output is not None:
            gradient = gradient * F.one_hot(torch.tensor(self.output), f.shape[-1]).to(f)
        return gradient.unflatten(0, (-1, self.draws)).transpose(0, 1) / self.draws**0.5

    def _columns(self, likelihood: Likelihood, f: Tensor, y: Tensor, columns: slice) -> Tensor:
        """Return some columns of the likelihood's root, (B, [T,] C, k)."""
        if self.output is not None:
            columns = slice(self.output, self.output + 1)
        return likelihood.root_columns(f, y, columns)


def root_seeds(root: Tensor, first: int = 0, tokens: int | None = None) -> Tensor:
    """Return the columns of a root as seeds: R (B, C, K) as (K, B, C), and R (B, t, C, K) as (t K, B, T, C).

    With tokens each seed is zero at all tokens but one. R may be that of some of the ``tokens``, from ``first`` on.
    """
    if root.ndim == 3:
        return root.permute(2, 0, 1)
    batch, some, classes, columns = root.shape
    seeds = root.new_zeros(some, columns, batch, some if tokens is None else tokens, classes)
    index = torch.arange(some, device=root.device)
    seeds[index, :, :, first + index] = root.permute(1, 3, 0, 2)
    return seeds.flatten(0, 1)


@dataclass(frozen=True)
class Estimate:
    """The way in which a curvature was estimated.

    >>> print(Estimate(draws=1))
    the curvature is estimated from one label drawn for each datum; curvature='ggn' is exact.
    """

    draws: int  # labels for each datum
    error: float = 0.0  # relative standard error for single units; zero if it is not known

    def __str__(self) -> str:
        labels = "one label" if self.draws == 1 else f"{self.draws} labels"
        size = f", relative error about {100 * self.error:.2g} % for single units" if self.error else ""
        return f"the curvature is estimated from {labels} drawn for each datum{size}; curvature='ggn' is exact."

    def tensor(self) -> Tensor:
        """Return both numbers, (2,), for a file."""
        return torch.tensor([self.draws, self.error], dtype=torch.float64)

    @classmethod
    def from_numbers(cls, numbers: Tensor | None) -> Estimate | None:
        """Return it from a file, or None if the file has none."""
        return None if numbers is None else cls(int(numbers[0]), float(numbers[1]))


class DrawError:
    """The relative standard error of the curvature of single units, over the blocks whose seeds are drawn.

    A unit is an output of a layer; its curvature is the sum over data of its squared gradient, an entry on the diagonal
    of the output factor. The data are given, so only the draws of one datum vary: their variance within each datum adds
    up to that of the sum. With one draw there is no variance to see, and the squares themselves bound it.

    Cost: a few operations on each gradient.
    """

    def __init__(self) -> None:
        self._values: dict[int, Tensor] = {}  # by the number of the block, (units,)
        self._variances: dict[int, Tensor] = {}

    def add(self, number: int, part: BlockJacobian) -> None:
        """Add the Jacobian of a block for all draws of some data; they are divided by the root of their number."""
        squares = part.unit_squares()
        draws = len(squares)
        value = squares.sum((0, 1), dtype=torch.float64)
        gaps = squares if draws == 1 else squares - squares.mean(0)
        variance = gaps.square().sum((0, 1), dtype=torch.float64) * (1 if draws == 1 else draws / (draws - 1))
        for sums, term in ((self._values, value), (self._variances, variance)):
            sums[number] = sums[number] + term if number in sums else term

    def relative(self, processes: Processes = ALONE, blocks: int = 0) -> float:
        """Return the error, the root of the mean square over blocks; zero if no block was drawn or all are zero.

        It is that of the data of all processes, for a network with so many blocks.
        """
        numbers = range(max(blocks, 1 + max(self._values, default=-1)))
        sums = processes.sum([each.get(i) for each in (self._values, self._variances) for i in numbers])
        pairs = zip(sums[: len(numbers)], sums[len(numbers) :], strict=True)
        ratios = [float(v.sum() / value.square().sum()) for value, v in pairs if value is not None and value.any()]
        return (sum(ratios) / len(ratios)) ** 0.5 if ratios else 0.0


CLOSED_SEEDS = 8  # seeds of one number with the memory of a closed form: a few tensors of the outputs in float64


@dataclass(eq=False)
class Sweep:
    """A pass over the data of this process: iterate to get Jacobians, chunk by chunk; then ask for ``statistics``.

    ``max_samples`` limits the samples of a chunk; without it only memory does. ``closed`` says whether ``blocks`` has
    the last layer in closed form.
    """

    network: Network
    likelihood: Likelihood
    data: Data
    seeds: Seeds = Seeds()
    label: str = "curvature"
    max_samples: int | None = None
    closed: bool = True
    error: DrawError = field(init=False, default_factory=DrawError)  # of a curvature by ``blocks``
    weights: Tensor | None = field(init=False, default=None)  # of the samples of the present chunk, (B,)
    _drew: bool = field(init=False, default=False)  # whether a label was drawn
    own: Statistics = field(init=False)  # of this process, only after the iteration

    @cached_property
    def statistics(self) -> Statistics:
        """Loss and counts of the data of all processes, which exchange them at the first access."""
        self.data.refuse_same_parts()
        return self.own.over(self.processes)

    @property
    def processes(self) -> Processes:
        """The processes that read the data."""
        return self.data.processes

    def __iter__(self) -> Iterator[LayerJacobians]:
        for tangent, f, targets in self._chunks(self._n_seeds):
            jacobians = tangent.jacobians(self._apply_weights(self.seeds.at(self.likelihood, f, targets)))
            del tangent  # free the memory of one chunk before the next is computed
            yield jacobians
            del jacobians

    def jacobians(self, width: int = 0) -> Iterator[LayerJacobians]:
        """Yield the Jacobians for sums of JᵀJ, in runs of seeds as ``runs`` does, and never in closed form."""
        for tangent, f, targets in self._chunks(self._n_seeds):
            for seeds in self._seed_runs(tangent, f, targets, width):
                yield tangent.jacobians(seeds)
            del tangent

    def runs(self, width: int = 0) -> Iterator[LayerJacobians | HeadGGN]:
        """Yield the Jacobians for sums of JᵀJ: where all seeds of a sample do not fit the byte budget, in runs of them.

        If the last layer is the only block and the seeds are not drawn, yield its closed form. ``width`` counts the
        numbers that the caller holds for each sample and seed, besides the gradients.
        """
        layout, every = self.network.layout, self.network.selection.index is None
        closed = self._closed_alone and every and not self.seeds.sampled and layout[0].groups == 1
        for tangent, f, targets in self._chunks((lambda _: CLOSED_SEEDS) if closed else self._n_seeds):
            head = self._closed_form(tangent, f, targets) if closed else None
            if head is not None:
                yield head[1]
            for seeds in self._seed_runs(tangent, f, targets, width) if head is None else ():
                yield tangent.jacobians(seeds)
            del tangent, head

    def blocks(self) -> Iterator[tuple[int, BlockJacobian | HeadGGN, bool]]:
        """Yield what the curvature of each block is a sum of: the number of the block, its Jacobian for a run of seeds,
        and whether this is the first run for these samples.

        For curvatures without coupling between blocks. The last linear layer comes in closed form, exact whatever the
        seeds, if the likelihood has a Hessian of that form: no backward pass for it, and no seeds at all if it is the
        only block.
        """
        closed = self.has_closed_form
        alone = self._closed_alone
        n_seeds = lambda network: CLOSED_SEEDS if alone else max(self._n_seeds(network), CLOSED_SEEDS * closed)
        for tangent, f, targets in self._chunks(n_seeds, self.network.blockwise):
            numbers = set(range(len(self.network.layout)))
            head = self._closed_form(tangent, f, targets) if closed else None
            if head is not None:
                numbers.remove(head[0])
                yield *head, True
            del head
            first = True
            for seeds in self._seed_runs(tangent, f, targets) if numbers else ():
                for number, part in tangent.jacobians(seeds).numbered_blocks(numbers):
                    if self.seeds.sampled:
                        self.error.add(number, part)
                    yield number, part, first
                    del part
                first = False
            del tangent

    @cached_property
    def estimate(self) -> Estimate | None:
        """The way in which the curvature was estimated, after the iteration, with its error; None if it is exact."""
        if not self.seeds.sampled or not any(self.processes.gather_numbers(int(self._drew))):
            return None
        return Estimate(self.seeds.draws, self.error.relative(self.processes, len(self.network.layout)))

    @property
    def has_closed_form(self) -> bool:
        """Whether the last layer has a closed form."""
        return self.closed and not self.seeds.observed and has_closed_form(self.network, self.likelihood)

    @property
    def _closed_alone(self) -> bool:
        return self.has_closed_form and len(self.network.layout) == 1

    def _n_seeds(self, network: Network) -> int:
        """Return the number of seeds for each sample."""
        return self.seeds.count(network.output_shape)

    def _closed_form(self, tangent: Tangent, f: Tensor, targets: Tensor) -> tuple[int, HeadGGN] | None:
        hessian = weighted_hessian(self.likelihood.hessian(f, targets), self.weights)
        hessian = hessian if self.seeds.output is None else hessian.for_output(self.seeds.output)
        return tangent.head_ggn(hessian.diagonal, hessian.outer)

    def _seed_runs(self, tangent: Tangent, f: Tensor, targets: Tensor, width: int = 0) -> Iterator[Tensor]:
        """Yield the seeds of a chunk in runs that fit the byte budget; usually all at once."""
        network, count = tangent.network, self.seeds.count(tuple(f.shape[1:]))
        self._drew = self.seeds.sampled
        most = network.footprint.seeds_at_once(len(f), network.dtype, network.device, width)
        if count <= most:
            yield self._apply_weights(self.seeds.at(self.likelihood, f, targets))
        else:
            yield from map(self._apply_weights, self.seeds.runs(self.likelihood, f, targets, most))

    def _apply_weights(self, seeds: Tensor) -> Tensor:
        """Return the seeds times the roots of the samples' weights; the Jacobian itself has none."""
        return seeds if self.seeds.curvature == JACOBIAN_ALONE else weighted_seeds(seeds, self.weights)

    def _chunks(
        self, n_seeds: Callable[[Network], int], network: Network | None = None
    ) -> Iterator[tuple[Tangent, Tensor, Tensor]]:
        """Yield the network linearised at a chunk of the data, its outputs and targets; sum up losses and counts.

        ``n_seeds`` returns how many seeds a sample has, given the network for the inputs of a batch.
        """
        network, likelihood = network or self.network, self.likelihood
        total = torch.zeros((), dtype=torch.float64, device=network.device)
        count: int | Tensor = 0
        # The C library returns large memory blocks to the system and maps them again at the next batch, a quarter of
        # the time of a pass. It stops below the largest block that was ever freed, up to 32 MB: so free one.
        torch.empty(min(31 * 2**20, temporary_bytes(torch.device("cpu"))), dtype=torch.uint8)
        readings = self.data.readings
        take_outputs, readings.take_outputs = readings.take_outputs, None
        batches = self.data.batches(self.label, weighted=True)
        for batch in merge_batches(batches, lambda inputs: network.batch_size_for(inputs, n_seeds)):
            _, y = check_targets(network, likelihood, batch)
            # Sums stay on the device until the batch is done: reading one makes a GPU wait.
            before = total.clone()
            for rows, tangent in network.tangents(
                batch.inputs, n_seeds(network.for_inputs(batch.inputs)), self.max_samples
            ):
                f, targets = tangent.f.to(network.dtype), y[rows]
                if f.shape[0] != len(targets):
                    raise DataError(f"{len(targets)} inputs gave {f.shape[0]} outputs; expected one for each.")
                self.weights = batch.weights_of(rows)
                total += weighted_loss(likelihood, f, targets, self.weights).sum(dtype=torch.float64)
                count = count + weighted_count(likelihood, f, targets, self.weights)
                if take_outputs is not None:
                    take_outputs(f, targets, self.weights)
                yield tangent, f, targets
                del tangent  # before the next chunk is computed
            if not math.isfinite(total - before):
                check_finite(network(batch.inputs), "outputs of the network")
                raise NumericalError(
                    "the loss is not finite although inputs, targets and outputs are; check the scale."
                )
            del batch, y  # before the next one is joined
        self.own = Statistics(float(total), as_count(count), network.output_shape[-1])


@saved
@dataclass(frozen=True, eq=False)
class PerOutputCurvature(Curvature):
    """H_c / s_c for each output c, with s the initial noise ratios; ``at`` gives Σ_c H_c / r_c for others.

    Memory: C times that of one curvature. Exact for full and diagonal structures; a Kronecker block keeps one input
    factor, and its output factor is the weighted sum, as if it had been computed under those ratios.
    """

    parts: tuple[Curvature, ...]
    start: Tensor  # s, (C,)

    def __add__(self, other: PerOutputCurvature) -> PerOutputCurvature:
        """Return the curvatures of both data sets, which must be in the same units."""
        if not torch.equal(self.start, other.start):
            raise UnsupportedError("curvatures for each output under different initial noise ratios do not add.")
        total = tuple(one + two for one, two in zip(self.parts, other.parts, strict=True))
        return PerOutputCurvature(total, self.start)

    def at(self, ratios: Tensor | None) -> Curvature:
        assert ratios is not None
        return self.parts[0].sum_with(self.parts[1:], self.start.to(ratios) / ratios)

    def state(self) -> State:
        parts = {str(i): part.state() for i, part in enumerate(self.parts)}
        return State("PerOutputCurvature", tensors={"start": self.start}, parts=parts)

    @classmethod
    def from_state(cls, state: State, network: Network) -> PerOutputCurvature:
        names = [str(i) for i in range(network.output_shape[-1])]
        part = PartOf(Curvature, network)
        fields = state.read(start=Array((len(names),), SMALLEST), **dict.fromkeys(names, part))
        parts = tuple(fields[name] for name in names)
        if len({type(each) for each in parts}) != 1:
            raise FileError("the curvatures of the outputs have different structures; expected one")
        return cls(parts, fields["start"])


def accumulate(
    compute: Callable[[Sweep], Curvature], problem: Problem, data: Data, seeds: Seeds, label: str
) -> tuple[Curvature, Statistics, Estimate | None]:
    """Return the curvature that ``compute`` sums over a pass, or one for each output if each output learns its noise.

    Also return the statistics of the pass, and how it estimated the curvature if it did. Cost for each output: as many
    backward passes as one pass over all outputs, and C forward passes instead of one.
    """
    likelihood = problem.likelihood
    sweep = Sweep(problem.network, likelihood, data, seeds, label)
    if not likelihood.learns_ratios:
        return compute(sweep), sweep.statistics, sweep.estimate
    assert likelihood.ratios is not None
    sweeps = [replace(sweep, seeds=replace(seeds, output=c)) for c in range(len(likelihood.ratios))]
    parts = tuple(map(compute, sweeps))
    statistics = sweeps[0].statistics
    losses = tuple(0.5 * statistics.data * float(ratio) for ratio in likelihood.ratios)
    return PerOutputCurvature(parts, likelihood.ratios), replace(statistics, losses=losses), sweeps[0].estimate


def choose_seeds(
    curvature: str | None, draws: int, problem: Problem, generator: torch.Generator | None, process: int = 0
) -> Seeds:
    """Return the seeds of a curvature; without a name, the exact ones where that is affordable, else drawn ones.

    Affordable are up to ``EXACT_SEEDS`` seeds for a sample, and any number of outputs of a last layer with a closed
    form. A noise for each output takes a pass for each output, with one seed for each of its tokens. The draws of a
    process do not depend on those of others.
    """
    network, likelihood = problem.network, problem.likelihood
    refuse_open_noise(curvature, likelihood)
    if curvature is None:
        few = Seeds(output=0 if likelihood.learns_ratios else None).count(network.output_shape) <= EXACT_SEEDS
        curvature = "ggn" if few or has_closed_form(network, likelihood, alone=True) else "fisher_mc"
    if curvature != "fisher_mc":
        return Seeds(curvature)
    return Seeds(curvature, numbered_generator(generator, process), draws=draws)


def has_closed_form(network: Network, likelihood: Likelihood, alone: bool = False) -> bool:
    """Return whether the last layer has a closed form; with ``alone``, whether it is also all that is selected."""
    return bool(network.head) and likelihood.has_hessian and not (alone and len(network.layout) > 1)


class SquaredSum:
    """The diagonal of the GGN at unit dispersion, summed over the Jacobians of a pass in float64."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._totals = [torch.zeros(b.form, dtype=torch.float64, device=network.device) for b in network.layout]

    def add(self, jacobians: LayerJacobians) -> None:
        """Add the squares of one chunk."""
        for total, (_, jacobian) in zip(self._totals, jacobians, strict=True):
            total += jacobian.squares().reshape(total.shape)

    def diagonal(self, processes: Processes = ALONE) -> Tensor:
        """Return the sum over the data of all processes, (P,)."""
        return flatten_blocks(processes.sum(self._totals), self._network.layout, self._network.selection)
