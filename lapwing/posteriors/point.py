"""The network as it is: a belief without spread."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.chosen import ChosenOutputs
from lapwing.core.gaussian import Deferred, FunctionGaussian
from lapwing.core.inputs import Inputs
from lapwing.core.schema import Array
from lapwing.core.state import State, saved
from lapwing.posteriors.protocols import Posterior, Reweightable
from lapwing.problem import STATISTICS, Problem, Statistics


@saved
@dataclass(frozen=True, eq=False)
class PointPosterior(Posterior, Reweightable):
    """All mass at w̃: the plain network with its likelihood, the baseline for everything else."""

    problem: Problem
    statistics: Statistics
    theta: Tensor
    has_spread: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True

    def with_problem(self, problem: Problem) -> PointPosterior:
        return replace(self, problem=problem)

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        return _certain(self._f(x), joint)

    def chosen(self, x: Inputs, outputs: ChosenOutputs, joint: bool = False) -> FunctionGaussian:
        return _certain(outputs.of(self._f(x)), joint)

    def _f(self, x: Inputs) -> Tensor:
        network = self.problem.network
        return network(x).to(network.dtype)

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.theta.expand(n, -1).clone()

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        network = self.problem.network
        return network(x).to(network.dtype).expand(n, *([-1] * (len(network.output_shape) + 1))).clone()

    def state(self) -> State:
        return State("PointPosterior", {"statistics": asdict(self.statistics)}, {"theta": self.theta})

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> PointPosterior:
        return cls(problem, **state.read(statistics=STATISTICS, theta=Array(("P",), dtype=problem.network.dtype)))


def _certain(f: Tensor, joint: bool) -> FunctionGaussian:
    """Return the belief in f (B, [T,] C) without spread."""
    if joint:
        return FunctionGaussian.across(f, f.new_zeros(f.numel(), f.numel()))
    none = lambda: torch.zeros_like(f)
    return FunctionGaussian(f, Deferred(none, lambda: f.new_zeros(*f.shape, f.shape[-1]), none))
