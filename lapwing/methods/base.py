"""The contract of a method: how it is fitted, when ``Auto`` may pick it, and where it is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import nn

from lapwing.data.batches import Data
from lapwing.data.processes import Processes
from lapwing.errors import ModelError, UnsupportedError
from lapwing.methods.cost import Cost, Workload
from lapwing.networks.selection import Weights
from lapwing.posteriors.base import Posterior
from lapwing.problem import Problem
from lapwing.runtime.settings import HasSettings, Rule

M = TypeVar("M", bound="Method")


class Method(HasSettings):
    """A way to compute the posterior: a frozen dataclass of settings. Classes inherit from it and define ``fit``."""

    weights: ClassVar[Weights | None] = None  # those that ``fit`` selects if the user does not; None: all
    needs_prior: ClassVar[bool] = False  # whether ``fit`` learns a prior beforehand, since there may be no evidence
    spans_processes: ClassVar[bool] = False  # whether it adds up the sums of all ``data.processes``
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
        return self

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
