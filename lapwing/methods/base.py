"""The contract of a method: how it is fitted, when ``Auto`` may pick it, where it is exact, and what it takes.

What a method takes is counted before anything is fitted, in multiplications and bytes. The passes of the network are
counted once, on one batch. The rest follows from the sizes of its blocks, the number of data and outputs, and one
formula for each method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lapwing.curvature.base import EXACT_SEEDS
from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs, tensors_in
from lapwing.data.processes import Processes
from lapwing.errors import ModelError, UnsupportedError
from lapwing.networks.forward import has_dropout
from lapwing.networks.jacobians import Block, BlockJacobian, Footprint, temporary_bytes
from lapwing.networks.linear_jacobian import PIECE_BYTES
from lapwing.networks.network import Network, plain_passes, trainable_names
from lapwing.networks.selection import Weights
from lapwing.posteriors.base import DEFAULT_SAMPLES, Posterior
from lapwing.posteriors.base import MANY_OUTPUTS as MANY_PREDICTED
from lapwing.priors import BoundPrior
from lapwing.problem import Problem
from lapwing.runtime.memory import budget
from lapwing.runtime.settings import HasSettings, Rule
from lapwing.tangent import CACHE_SHARE

M = TypeVar("M", bound="Method")


class Method(HasSettings):
    """A way to compute the posterior: a frozen dataclass of settings. Classes inherit from it and define ``fit``."""

    weights: ClassVar[Weights | None] = None  # those that ``fit`` selects if the user does not; None: all
    needs_prior: ClassVar[bool] = False  # whether ``fit`` learns a prior beforehand, since there may be no evidence
    spans_processes: ClassVar[bool] = False  # whether it adds up the sums of all ``data.processes``
    timed: ClassVar[bool] = True  # whether ``trial`` tells how long it takes
    conformance: ClassVar[Conformance | None] = None  # the settings with which tests/conformance tries it

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> Posterior:
        """Return the posterior after the pass over the data."""
        raise NotImplementedError(f"{type(self).__name__} has no fit(problem, data, generator)")

    def with_early_stopping(self: M, validation: Data) -> M:
        """Return the method with these validation data, if it learns in steps and keeps the best state on them."""
        return self

    def cost(self, workload: Workload) -> Cost | None:
        """Return what the method takes; None if it does not say, which ``check`` prints."""
        return None

    def trial(self, workload: Workload) -> Method | None:
        """Return a form that ``check`` times with few data: one with few steps if it takes many whatever the data.

        None if no quick form tells how long the method takes.
        """
        return self if self.timed else None

    @classmethod
    def offer(cls, requirements: Requirements) -> Offer | None:
        """Return the method with settings for this problem, for ``Auto``; None if it does not apply."""
        return None


class OverNetworks(Method):
    """A method that combines the posteriors of several networks; ``fit`` fits ``method`` to each, as it fits one."""

    method: Method

    def networks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return all networks, first the model that ``fit`` was given; raise if there are not enough."""
        raise NotImplementedError

    def combine(self, posteriors: Sequence[Posterior]) -> Posterior:
        """Return one posterior, given the posterior of every network."""
        raise NotImplementedError


METHOD = Rule(
    "an object such as lw.Kron(), whose class inherits from Method",
    lambda v: isinstance(v, Method) and not isinstance(v, OverNetworks | nn.Module),
)
MODELS = Rule(
    "a list of trained torch.nn.Module",
    lambda v: isinstance(v, tuple | list) and all(isinstance(model, nn.Module) for model in v),
    ModelError,
)


def refuse_g_prior(method: Method, prior: BoundPrior) -> None:
    """Raise for a prior that takes its scale from the curvature, for a method that has none when it needs the prior."""
    if prior.needs_curvature:
        raise UnsupportedError(
            f"a g-prior follows the curvature, which {type(method).__name__}() does not have before its prior; use "
            "isotropic(), or Kron()."
        )


def refuse_processes(method: Method, processes: Processes) -> None:
    """Raise if there are several processes and the method works in one alone."""
    if not processes.is_single_process and not method.spans_processes:
        raise UnsupportedError(
            f"{type(method).__name__} works in one process and process_group has {processes.size}; use Kron(), "
            "EKron(), Diagonal(), Full(), LowRank(), KernelSpace(), Sampled(), ELLA() or VaLLA(), or give one process "
            "all data."
        )


def with_validation(method: M, validation: Data) -> M:
    """Return a copy of a method with these data in its field ``validation``, which users cannot set."""
    stopped = copy(method)
    object.__setattr__(stopped, "validation", validation)  # methods are frozen, and this copy is not yet in use
    return stopped


@dataclass(frozen=True)
class Requirements:
    """The problem that ``Auto`` looks for a method for, and its limits."""

    weights: int  # P
    rows: int  # n C
    memory: float  # bytes
    num_samples: int  # for methods that draw samples
    single: bool = False  # weights are chosen one by one
    learn_prior: bool = False  # the prior precision is still to be learned
    work: float = math.inf  # multiplications in the time of the fit
    gpu: bool = False
    workload: Workload | None = None  # the network in numbers, if it is known


@dataclass(frozen=True)
class Offer:
    """A method for one problem, with its memory and work. If ``kind`` is empty, no limit applies to it."""

    method: Method
    tier: int  # lower ones are tried first: 0 exact, 1 samples of the exact posterior, 2 by layers, 3 by weights
    memory: float = 0.0  # bytes held at the peak, besides one chunk of a pass
    work: float = 0.0  # multiplications
    kind: str = ""  # what it computes, in words


@dataclass(frozen=True)
class Exactness:
    """Settings at which a method is exact. tests/conformance holds the method to it.

    ``scope``: "network", equal to the dense GGN posterior of any network; "linear", to Bayesian regression for one
    linear layer; "orthogonal", the same if the inputs have orthogonal columns.
    """

    settings: Callable[[int, int], Method]  # from P weights and n C rows
    scope: Literal["network", "linear", "orthogonal"]
    name: str = ""  # tells several entries of one method apart
    prior: Literal["weight", "input", "layer"] = "weight"  # the finest prior that it takes; others it refuses
    iterative: bool = False  # solved to half of the digits
    no_laws: str = ""  # why the laws of exact methods are not tried on the named networks, if they are not


@dataclass(frozen=True)
class Conformance:
    """The settings with which tests/conformance tries a method; its class attribute ``conformance``.

    Without one, a method is tried with its defaults, and held to the laws for every method.
    """

    exact: tuple[Exactness, ...] = ()
    never_exact: str = ""  # why, where ``exact`` is empty
    small: Callable[[nn.Module], Mapping[str, Method]] | None = None  # quick settings for some ten data, by name


CUBE = 7.0  # multiplications for one in the cube of the size of a matrix whose eigenvectors are computed
NUMBER = 16  # multiplications in the time of writing one number, where an operation does little else


@dataclass(frozen=True)
class Work:
    """Multiplications by their kind. Each kind has its own speed."""

    passes: float = 0.0  # in passes of the network and in products with its Jacobian
    products: float = 0.0  # in other matrix products, most of them in float64
    cubes: float = 0.0  # cubes of the sizes of matrices that are factorised

    def __add__(self, other: Work) -> Work:
        return Work(self.passes + other.passes, self.products + other.products, self.cubes + other.cubes)

    def __mul__(self, times: float) -> Work:
        return Work(times * self.passes, times * self.products, times * self.cubes)

    __rmul__ = __mul__

    @property
    def multiplications(self) -> float:
        """The multiplications, without factorisations."""
        return self.passes + self.products

    @property
    def total(self) -> float:
        """All multiplications, as if they were equally fast."""
        return self.multiplications + CUBE * self.cubes


NOTHING = Work()


class MultiplicationCount(TorchDispatchMode):
    """Counts the multiplications in products and convolutions inside a ``with`` block, including backward passes.

    PyTorch's FlopCounterMode has the same formulas, but also adds hooks to the modules and graphs of other threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.products += formula(*args, **(kwargs or {}), out_val=result) // 2  # it counts additions too
        return result


def multiplications(call: Callable[[], object]) -> int:
    """Return the number of multiplications in a call."""
    with MultiplicationCount() as count:
        call()
    return count.products


@dataclass(frozen=True)
class BlockWork:
    """The sizes of one block of parameters, and its multiplications for one datum and some seeds of backward passes."""

    size: int
    positions: int = 1  # T: pixels, tokens or time steps that share the weight
    form: tuple[int, int, int] | None = None  # (groups, d_out, d_in) of a linear map; None for other parameters
    closed: bool = False  # the last layer, whose curvature needs no seeds
    lookup: bool = False  # the table of an embedding, whose inputs are one-hot
    opaque: bool = False  # without a rule: its Jacobian takes passes of its own

    @property
    def is_shared(self) -> bool:
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

    @property
    def gradient(self) -> int:
        """Numbers kept of the gradient of one output: the two factors of a linear map, or the row itself if shared."""
        return self.size if self.form is None or self.is_shared else sum(self.ends)

    def as_rows(self, seeds: int) -> bool:
        """Return whether its Jacobian is kept as rows of all entries; otherwise as the two ends of the linear map."""
        return self.form is None or (self.is_shared and self.positions > seeds)

    def kept_numbers(self, seeds: int) -> int:
        """Return the numbers kept of the gradients of all seeds for repeated products."""
        return seeds * self.size if self.as_rows(seeds) else self.ends[0] + seeds * self.ends[1]

    def products(self, seeds: int) -> int:
        """Return the multiplications of Jᵀ J v for one vector v, from gradients that are kept."""
        return 2 * (seeds * self.size if self.as_rows(seeds) else self.product + seeds * self.ends[1])

    def along(self, outputs: int) -> int:
        """Return the multiplications of J v for one vector v, from gradients as they are computed."""
        return outputs * self.size if self.form is None else self.product + outputs * self.ends[1]

    def whole(self, seeds: int) -> int:
        """Return the multiplications that form the gradients of all seeds."""
        return seeds * self.product if self.is_shared else 0

    def squares(self, seeds: int) -> int:
        """Return the multiplications that sum the squared gradients of all seeds."""
        if self.is_shared and not self.closed:
            return self.whole(seeds)
        return self.product

    def quadratic(self, outputs: int) -> int:
        """Return the multiplications of J D Jᵀ for all outputs of one datum, with a diagonal D."""
        if self.is_shared or self.form is None:
            return outputs**2 * self.size + self.whole(outputs)
        return self.product + outputs**2 * self.ends[1]


def workload_of(network: Network, inputs: Inputs, data: int | None = None) -> Workload:
    """Return the sizes of a network, read from one batch, for this many data; as many as in the batch if None.

    Cost: a few forward and backward passes.
    """
    tangent = network.linearise(inputs)
    parts = tangent.jacobians(torch.zeros_like(tangent.f).unsqueeze(0))
    blocks = tuple(_block_work(block, part, network.head) for block, part in parts)
    del tangent, parts
    count, model = network.count(inputs), network.replica
    chosen, trained = network.selection.names, trainable_names(network.model)
    with plain_passes(network, inputs, chosen) as plain:
        counted, to_chosen = multiplications(plain.forward) / count, multiplications(plain.training) / count
    training, products = to_chosen, sum(block.product for block in blocks)
    forward = max(counted, products)  # fused layers hide their products
    if set(trained) != set(chosen) and trained:
        with plain_passes(network, inputs, trained) as plain:
            training = multiplications(plain.training) / count
    biases = sum(work.ends[1] for work, block in zip(blocks, network.layout, strict=True) if block.bias is not None)
    gradients = products - biases  # those of biases take no multiplication
    return Workload(
        blocks,
        weights=network.selection.size,
        parameters=sum(p.numel() for p in model.parameters()),
        output_shape=network.output_shape,
        input_size=sum(t.numel() for t in tensors_in(inputs)) // count,
        data=count if data is None else data,
        forward=forward,
        backward=max(0.0, to_chosen - counted - gradients),
        training=max(training, forward, 1.0),
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
    form, lookup = (block.groups, block.d_out, block.d_in), jacobian.is_lookup
    return BlockWork(block.size, jacobian.positions, form, block.weight == head, lookup)


@dataclass(frozen=True)
class Workload:
    """A network and its data in numbers, from which a method computes its cost.

    Multiplications are for one datum. They count as passes of the network unless they are ``Work``.
    """

    blocks: tuple[BlockWork, ...]
    weights: int  # P, the chosen weights
    parameters: int  # of the whole model
    output_shape: tuple[int, ...]  # (C,) or (T, C)
    input_size: int  # numbers in one input
    data: int
    forward: float  # multiplications of a plain forward pass
    backward: float  # of a backward pass to the chosen weights, without their gradients
    training: float  # of a plain forward and backward pass with the gradients of all weights that are trained
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
        many = self.outputs > EXACT_SEEDS and not all(block.closed for block in self.blocks)
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

        A prediction forms the Jacobian of a layer whose weight is shared; a fit does so only if ``formed``. Sums over
        blocks stream: they drop each gradient after its use.
        """
        options, sizes = (self.dtype, self.device), replace(self.footprint, streams=streams)
        joined = -(-sizes.batch_size_for(self.seeds, *options) // self.inputs) * self.inputs  # whole batches
        batch, seeds = max(1, min(self.data, joined)), 1 if self.lone_head else self.seeds
        fit = sizes.chunk_bytes(batch, seeds, *options)
        fit += self._formed_bytes(batch, seeds) if formed else 0
        if self.pairs:
            return max(fit, self.itemsize * self.pairs * 2 * (self.weights + self.inputs * sizes.width))
        predict = sizes.chunk_bytes(self.inputs, self.outputs, *options)
        return max(fit, predict + self._formed_bytes(self.inputs, self.outputs))

    def _formed_bytes(self, samples: int, seeds: int) -> int:
        """Return the bytes of the largest Jacobian of one layer that is formed, for a few samples at a time."""
        sizes = [self.itemsize * seeds * block.size for block in self.blocks if block.is_shared]
        if self.device.type == "cpu":  # larger ones are formed in pieces that stay in the cache
            sizes = [size for size in sizes if size <= PIECE_BYTES]
        each = max(sizes, default=0)
        return min((min(samples, 32) + 2) * each, temporary_bytes(self.device) + each)

    @property
    def lone_head(self) -> bool:
        """Whether the last layer is the only block, so that no backward pass is needed."""
        return len(self.blocks) == 1 and self.blocks[0].closed and not self.single

    def jacobians(self, seeds: int | None = None) -> float:
        """Return the multiplications of the layer-wise Jacobians: a forward pass, and a backward pass for each seed.

        There is a seed for each output by default.
        """
        seeds = self.outputs if seeds is None else seeds
        # A block without a rule takes one pass more for each seed, with gradients of the weights.
        slow = self.training if any(block.opaque for block in self.blocks) else 0.0
        return self.forward + seeds * (self.backward + slow)

    @property
    def blockwise(self) -> float:
        """Multiplications of the Jacobians for sums over blocks, in which the last layer has a closed form."""
        return self.jacobians(0 if self.lone_head else self.seeds)

    @property
    def pairs(self) -> int:
        """Pairs of functions that a prediction draws, where there are many outputs; otherwise none."""
        return DEFAULT_SAMPLES // 2 if self.outputs > MANY_PREDICTED else 0

    @property
    def gradient(self) -> int:
        """Numbers kept of the gradient of one output; also the multiplications for one entry of the tangent kernel."""
        return sum(block.gradient for block in self.blocks)

    @property
    def squares(self) -> int:
        """Multiplications of a fit to sum the squared gradients of all seeds."""
        return sum(block.squares(self.seeds) for block in self.blocks)

    def whole(self, seeds: int) -> float:
        """Return the multiplications that form the Jacobian itself, of the chosen weights alone."""
        return sum(block.whole(seeds) for block in self.blocks) * self.weights / sum(b.size for b in self.blocks)

    def prediction(self, covariance: Work) -> Work:
        """Return the work of a prediction, in which the covariance of the outputs takes this beside their Jacobians.

        Many outputs are predicted from drawn functions instead, with a forward pass for each.
        """
        if self.pairs:
            return Work((1 + 2 * self.pairs) * self.forward)
        return Work(self.jacobians()) + covariance

    @property
    def quadratic(self) -> int:
        """Multiplications of J D Jᵀ of one input, with a diagonal D."""
        return sum(block.quadratic(self.outputs) for block in self.blocks)

    def along(self, vectors: int) -> int:
        """Return the multiplications of J v for so many vectors v, from gradients as they are computed."""
        return vectors * sum(block.along(self.outputs) for block in self.blocks)

    def products(self, vectors: int) -> int:
        """Return the multiplications of Jᵀ J v for so many vectors v, from gradients that are kept."""
        return vectors * sum(block.products(self.outputs) for block in self.blocks)

    @property
    def kept(self) -> int:
        """Bytes of the gradients of all data, if they are kept between products; otherwise zero."""
        size = self.itemsize * self.data * sum(block.kept_numbers(self.outputs) for block in self.blocks)
        return size if size <= CACHE_SHARE * budget(self.device) else 0

    def repeated_products(self, vectors: int, times: int) -> float:
        """Return the multiplications of Jᵀ J v for so many vectors v in so many passes; gradients that fit are kept."""
        formed = sum(block.whole(self.outputs) for block in self.blocks)
        return (self.jacobians() + formed) * (1 if self.kept else 1 + times) + self.products(vectors)

    def low_rank(self, rank: int) -> Work:
        """Return the work of a prediction from the prior and so many directions."""
        return self.prediction(Work(products=self.quadratic + self.along(rank) + self.outputs * rank**2 / 2))

    def kernel(self, points: int) -> Work:
        """Return the work for the gradient of one output at each of ``points`` inputs, and for their kernel."""
        return Work(points * self.jacobians(1), points**2 * self.gradient)

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
        epochs = (fit.total + once.total / self.data) / self.training
        passes = predict.total / max(1.0, self.forward)
        return Cost(kept, epochs, note, True, passes, kept + peak, self.data * fit, once, predict)


def bytes_text(count: float) -> str:
    """Return a number of bytes with three digits or so, in a unit that fits.

    >>> [bytes_text(count) for count in (544, 34_800, 4 * 2**30, math.inf)]
    ['544 B', '34.0 kB', '4.0 GB', 'inf GB']
    """
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if count >= size:
            value = count / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{count:.0f} B"


def seconds_text(value: float) -> str:
    """Return a time with two digits, in a unit that fits.

    >>> [seconds_text(value) for value in (2.5e-5, 0.0024, 0.13, 60.0, 7500.0)]
    ['0.025 ms', '2.4 ms', '130 ms', '60 s', '2.1 h']
    """
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if value >= 2 * size:
            return f"{value / size:.2g} {unit}"
    digits = float(f"{1000 * value:.2g}")
    return f"{digits:.0f} ms" if digits >= 10 else f"{digits:g} ms"


@dataclass(frozen=True)
class Cost:
    """The time and memory that a method takes, estimated before anything is fitted."""

    stored: int  # bytes that the posterior keeps
    fit_epochs: float  # work before the first prediction, in plain forward and backward passes over the data
    note: str = ""
    supported: bool = True
    predict_passes: float = 0.0  # work of a prediction, in plain forward passes of the same inputs
    peak: int = 0  # bytes held at most, besides the model and the data
    fit: Work = field(default=NOTHING, repr=False)  # for all data
    once: Work = field(default=NOTHING, repr=False)  # that does not grow with the data
    predict: Work = field(default=NOTHING, repr=False)  # for one input
    fit_seconds: float | None = None  # after timing one batch
    predict_seconds: float | None = None  # of the batch, after timing it

    @classmethod
    def unsupported(cls, note: str) -> Cost:
        """Return the cost of a method that does not take this problem, with the reason."""
        return cls(0, 0.0, note, supported=False)

    def times(self, count: int, note: str) -> Cost:
        """Return the cost of the same method for ``count`` networks, fitted one after another and all kept."""
        if not self.supported:
            return self
        return Cost(
            count * self.stored, count * self.fit_epochs, note, True, count * self.predict_passes,
            self.peak + (count - 1) * self.stored, count * self.fit, count * self.once, count * self.predict,
        )  # fmt: skip
