"""A posterior that consists of several functions: their spread is the uncertainty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from lapwing.core.chosen import ChosenOutputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.inputs import Inputs
from lapwing.core.schema import Array
from lapwing.core.state import Part, State, saved
from lapwing.errors import UnsupportedError
from lapwing.networks.network import Network
from lapwing.posteriors.point import PointPosterior
from lapwing.posteriors.protocols import Posterior
from lapwing.problem import STATISTICS, Problem, Statistics


class Members(Protocol):
    """K functions of the input."""

    def __call__(self, x: Inputs) -> Tensor:
        """Return the outputs of all members, (K, B, [T,] C)."""
        ...

    def __len__(self) -> int: ...

    @property
    def together(self) -> bool:
        """Whether all inputs of a call must run together: members that draw numbers for them would draw others."""
        ...

    @property
    def of_one_network(self) -> bool:
        """Whether all members have the weights of one network."""
        ...

    def refuse_changed(self) -> None:
        """Raise ``ModelError`` if a network has other weights than at the fit."""
        ...

    def state(self) -> State:
        """Return what a file needs; raise ``UnsupportedError`` if a file cannot hold the members."""
        ...


@saved
@dataclass(frozen=True, eq=False)
class MembersPosterior(Posterior):
    """f(x) ~ N(mean of the members, their covariance). A prediction costs a forward pass for each member."""

    problem: Problem
    members: Members
    statistics: Statistics
    theta: Tensor

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        return spread(self._outputs(x), joint)

    def chosen(self, x: Inputs, outputs: ChosenOutputs, joint: bool = False) -> FunctionGaussian:
        return spread(outputs.of(self._outputs(x)), joint)

    @property
    def of_one_network(self) -> bool:
        return self.members.of_one_network

    def plain(self) -> PointPosterior:
        return PointPosterior(self.problem, self.statistics, self.theta)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the first n members, (n, B, [T,] C); the generator is not used."""
        if n > len(self.members):
            raise UnsupportedError(f"{n} samples were asked for and there are {len(self.members)} members.")
        return self._outputs(x)[:n]

    def _outputs(self, x: Inputs) -> Tensor:
        self.members.refuse_changed()
        return outputs_of(self.members, self.problem.network, x).to(self.theta.dtype)

    def state(self) -> State:
        settings = {"statistics": asdict(self.statistics)}
        return State("MembersPosterior", settings, {"theta": self.theta}, {"members": self.members.state()})

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> MembersPosterior:
        theta = Array(("P",), dtype=problem.network.dtype)
        return cls(problem, **state.read(members=Part(Members, problem), statistics=STATISTICS, theta=theta))


def spread(outputs: Tensor, joint: bool) -> FunctionGaussian:
    """Return the mean and covariance of K functions with outputs (K, B, [T,] C)."""
    mean = outputs.mean(0)
    return FunctionGaussian.of_deviations(mean, outputs - mean, max(1, len(outputs) - 1), joint)


def outputs_of(members: Members, network: Network, x: Inputs) -> Tensor:
    """Return the outputs of all members, (K, B, [T,] C), in runs of inputs that fit the byte budget."""
    return members(x) if members.together else network.in_runs(x, members, dim=1)


def mean_of(members: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    """Return the mean of the members as a function of the inputs, in float64."""
    return lambda x: members(x).double().mean(0)
