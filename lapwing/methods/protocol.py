"""The contract of a method: how it is fitted, what it costs, when ``Auto`` may pick it, and where it is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from lapwing.core.data import Data
from lapwing.core.processes import Processes
from lapwing.curvature.factors import decomposition_work, factor_numbers, most_rows
from lapwing.curvature.seeds import MANY
from lapwing.errors import UnsupportedError
from lapwing.posteriors.protocols import Posterior
from lapwing.problem import Problem

M = TypeVar("M")


@runtime_checkable
class Method(Protocol):
    """A way to compute the posterior: a frozen dataclass of settings."""

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> Posterior: ...


@runtime_checkable
class NeedsPrior(Protocol):
    """A method that may have no evidence to learn a prior with; ``fit`` then learns one beforehand.

    Where ``needs_prior`` is False, the method is fitted like the others.
    """

    @property
    def needs_prior(self) -> bool: ...


@runtime_checkable
class StopsEarly(Protocol):
    """A method that learns in steps, and keeps the state that predicts validation data best if ``fit`` has some."""

    def stopped_by(self, validation: Data) -> Method:
        """Return the method with these validation data."""
        ...


@runtime_checkable
class SpansProcesses(Protocol):
    """A method that adds up the sums of several processes, ``data.processes``; ``fit`` refuses a group to others."""

    spans_processes: ClassVar[bool]


def refuse_processes(method: Method, processes: Processes) -> None:
    """Raise if there are several processes and the method works in one alone."""
    if not processes.alone and not (isinstance(method, SpansProcesses) and method.spans_processes):
        raise UnsupportedError(
            f"{type(method).__name__} works in one process and process_group has {processes.size}; use Kron(), "
            "EKron(), Diagonal(), Full(), LowRank(), KernelSpace(), Sampled(), ELLA() or VaLLA(), or give one process "
            "all data."
        )


def with_validation(method: M, validation: Data) -> M:
    """Return a copy of a method whose field ``validation``, which is no argument of its class, has these data."""
    stopped = copy(method)
    object.__setattr__(stopped, "validation", validation)  # methods are frozen, and this copy is not yet in use
    return stopped


@dataclass(frozen=True)
class FactorWork:
    """The sizes of one Kronecker factor."""

    side: str
    size: int
    rows: int  # at most its rank
    summed: int  # outer products that its sum takes


@dataclass(frozen=True)
class BlockWork:
    """The sizes of one block of parameters."""

    size: int
    positions: int = 1  # T: pixels, tokens or time steps that share the weight
    form: tuple[int, int, int] | None = None  # (groups, d_out, d_in) of a linear map; None for other parameters
    closed: bool = False  # the last layer, whose curvature needs no seeds
    lookup: bool = False  # the table of an embedding, whose inputs are one-hot

    @property
    def product(self) -> int:
        """Multiplications of the linear map for one datum."""
        return 0 if self.form is None else self.positions * self.size

    def factors(self, data: int, seeds: int) -> Iterator[FactorWork]:
        """Yield the Kronecker factors that are no diagonal of counts."""
        if self.form is not None:
            groups, d_out, d_in = self.form
            uses = data * self.positions
            for _ in range(groups):
                if not self.lookup:
                    yield FactorWork("input", d_in, uses, uses)
                yield FactorWork(
                    "output", d_out, uses * (d_out if self.closed else seeds), uses * (1 if self.closed else seeds)
                )

    @property
    def gradient(self) -> int:
        """Numbers kept of the gradient of one output: the two factors of a linear map, or the row itself if shared."""
        if self.form is None or self.positions > 1:
            return self.size
        groups, d_out, d_in = self.form
        return groups * (d_in + d_out)


@dataclass(frozen=True)
class Workload:
    """A network and its data in numbers, from which a method computes its cost. Work is counted in multiplications."""

    blocks: tuple[BlockWork, ...]
    weights: int  # P, the chosen weights
    parameters: int  # of the whole model
    output_shape: tuple[int, ...]  # (C,) or (T, C)
    input_size: int  # numbers in one input
    data: int
    itemsize: int  # bytes of a number in the dtype of the network
    width: int  # numbers that a backward pass holds for one datum and one output
    single: bool = False  # weights are chosen one by one, so they have no Kronecker structure
    dropout: bool = False  # the model has a dropout layer
    drawn: int | None = None  # labels for each datum, if the curvature is estimated from them

    @property
    def outputs(self) -> int:
        """Numbers in the output for one input: C, or T C with an output for each token."""
        return torch.Size(self.output_shape).numel()

    def with_curvature(self, curvature: str | None, draws: int) -> Workload:
        """Return the workload of this curvature; None is the default, an estimate where there are many outputs."""
        many = self.outputs > MANY and not all(block.closed for block in self.blocks)
        estimated = curvature == "fisher_mc" or (curvature is None and many)
        return replace(self, drawn=draws if estimated else None)

    @property
    def seeds(self) -> int:
        """Backward passes for each datum: one for each output, or for each label that is drawn."""
        return self.outputs if self.drawn is None else self.drawn

    @property
    def rows(self) -> int:
        """Rows of the Jacobian over all data: n C."""
        return self.data * self.outputs

    @property
    def forward(self) -> int:
        """Work of a forward pass for one datum."""
        return sum(block.product for block in self.blocks)

    @property
    def backward(self) -> int:
        """Work of a backward pass for one datum, without gradients of the weights and of the first layer's input."""
        products = [block.product for block in self.blocks if block.product]
        return sum(products[1:])

    @property
    def training(self) -> int:
        """Work of a plain training step for one datum: a forward and a backward pass, and the weights' gradients."""
        return max(1, 2 * self.forward + self.backward)

    @property
    def all_outputs(self) -> int:
        """Work of a forward pass and a backward pass for each output, or for each label drawn, for one datum."""
        return self.forward + self.seeds * self.backward

    @property
    def gradient(self) -> int:
        """Numbers kept of the gradient of one output; also the work for one entry of the tangent kernel."""
        return sum(block.gradient for block in self.blocks)

    @property
    def squares(self) -> int:
        """Work to sum the squared gradients of all outputs for one datum."""
        once = lambda block: block.form is not None and (block.positions == 1 or block.closed)
        each = lambda block: block.positions * block.size
        return sum(block.product if once(block) else self.seeds * each(block) for block in self.blocks)

    def _factors(self) -> list[FactorWork]:
        return [factor for block in self.blocks for factor in block.factors(self.data, self.seeds)]

    def factors(self, limit: int) -> int:
        """Return how many numbers the Kronecker factors of all linear maps have, with this ``factor_limit``."""
        counts = sum(block.form[2] for block in self.blocks if block.form is not None and block.lookup)
        return counts + sum(factor_numbers(each.size, each.rows, limit) for each in self._factors())

    def decompositions(self, limit: int) -> float:
        """Return the sum of cubes that the decompositions of all factors take, with this ``factor_limit``."""
        return sum(decomposition_work(each.size, each.rows, limit) for each in self._factors())

    def diagonal_factors(self, limit: int) -> str:
        """Say which factors would be a diagonal above this ``factor_limit``; empty if none."""
        wide = [f for f in self._factors() if f.size > limit and f.rows > most_rows(f.size, limit)]
        listed = list(dict.fromkeys(f"{f.side} factor diagonal: {f.size:,} > {limit:,}" for f in wide))
        return "; ".join(listed[:3]) + (f"; and {len(listed) - 3} more" if len(listed) > 3 else "")

    def factor_work(self, limit: int) -> float:
        """Return the work of the sums of all Kronecker factors for one datum, with this ``factor_limit``."""
        is_matrix = lambda f: most_rows(f.size, limit) < f.rows and f.size <= limit
        return sum(f.summed * f.size * (f.size if is_matrix(f) else 1) for f in self._factors()) / self.data

    def other_blocks(self, full_limit: int) -> int:
        """Return the size of blocks that are no linear map: a matrix up to ``full_limit`` entries, a diagonal above."""
        sizes = [block.size for block in self.blocks if block.form is None]
        return sum(size**2 if size <= full_limit else size for size in sizes)

    def kernel(self, points: int) -> int:
        """Return the work for the gradient of one output at each of ``points`` inputs, and for their kernel."""
        return points * (self.forward + self.backward) + points**2 * self.gradient

    def cost(self, stored: int, work: float, note: str = "", supported: bool = True) -> Cost:
        """Return the cost of a fit with this ``work`` for each datum."""
        return Cost(stored, work / self.training, note, supported)


@dataclass(frozen=True)
class Cost:
    """The cost of a fit, before anything is fitted."""

    stored: int  # bytes that the posterior keeps
    fit_epochs: float  # work of the fit over that of one plain forward and backward pass over the same data
    note: str = ""
    supported: bool = True


@runtime_checkable
class HasCost(Protocol):
    """A method that knows its cost; ``check`` prints "cost unknown" for others."""

    def cost(self, workload: Workload) -> Cost: ...


@dataclass(frozen=True)
class Budget:
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


@runtime_checkable
class AutoCandidate(Protocol):
    """A method that ``Auto`` may pick."""

    @classmethod
    def offer(cls, budget: Budget) -> Offer | None:
        """Return the method with settings for this problem; None if it does not apply."""
        ...


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
