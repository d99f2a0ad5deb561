"""Posteriors with a few functions, one function, or independent weights of the last layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.errors import FileError, UnsupportedError
from lapwing.networks.functionals import is_single_map, last_features
from lapwing.networks.network import Network
from lapwing.posteriors.base import ALL, Posterior
from lapwing.problem import STATISTICS, Problem, Statistics
from lapwing.runtime.state import SMALLEST, WEIGHTS, Array, PartOf, Real, State, Stored, saved, stored
from lapwing.runtime.threads import normal_rows
from lapwing.values.gaussian import Deferred, FunctionGaussian
from lapwing.values.outputs import Query


@saved
@dataclass(frozen=True, eq=False)
class PointPosterior(Stored, Posterior):
    """All mass at w̃: the plain network with its likelihood, the baseline for everything else."""

    problem: Problem
    statistics: Statistics = stored(STATISTICS)
    theta: Tensor = stored(WEIGHTS)
    has_spread: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True

    def with_problem(self, problem: Problem) -> PointPosterior:
        return replace(self, problem=problem)

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        return _certain(query.of(self._f(x)), query.joint)

    def _f(self, x: Inputs) -> Tensor:
        network = self.problem.network
        return network(x).to(network.dtype)

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.theta.expand(n, -1).clone()

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        network = self.problem.network
        return network(x).to(network.dtype).expand(n, *([-1] * (len(network.output_shape) + 1))).clone()


def _certain(f: Tensor, joint: bool) -> FunctionGaussian:
    """Return the belief in f (B, [T,] C) without spread."""
    if joint:
        return FunctionGaussian.across(f, f.new_zeros(f.numel(), f.numel()))
    none = lambda: torch.zeros_like(f)
    return FunctionGaussian(f, Deferred(none, lambda: f.new_zeros(*f.shape, f.shape[-1]), none))


class Members:
    """K functions of the input. Classes define ``__call__`` and ``__len__``."""

    together: bool = False  # whether inputs of a call must run together: drawn numbers would be others for parts of it
    of_one_network: ClassVar[bool] = True  # whether all members have the weights of one network

    def __call__(self, x: Inputs) -> Tensor:
        """Return the outputs of all members, (K, B, [T,] C)."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def refuse_changed(self) -> None:
        """Raise ``ModelError`` if a network has other weights than at the fit. By default there is none to change."""

    def state(self) -> State:
        """Return what a file needs; raise ``UnsupportedError`` if a file cannot hold the members."""
        raise NotImplementedError


@saved
@dataclass(frozen=True, eq=False)
class MembersPosterior(Stored, Posterior):
    """f(x) ~ N(mean of the members, their covariance). A prediction costs a forward pass for each member."""

    problem: Problem
    members: Members = stored(PartOf(Members))
    statistics: Statistics = stored(STATISTICS)
    theta: Tensor = stored(WEIGHTS)

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        return spread(query.of(self._outputs(x)), query.joint)

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


def spread(outputs: Tensor, joint: bool) -> FunctionGaussian:
    """Return the mean and covariance of K functions with outputs (K, B, [T,] C)."""
    mean = outputs.mean(0)
    return FunctionGaussian.of_deviations(mean, outputs - mean, max(1, len(outputs) - 1), joint)


def outputs_of(members: Members, network: Network, x: Inputs) -> Tensor:
    """Return the outputs of all members, (K, B, [T,] C), in runs of inputs that fit the byte budget."""
    return members(x) if members.together else network.in_chunks(x, members, dim=1)


def mean_of(members: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    """Return the mean of the members as a function of the inputs, in float64."""
    return lambda x: members(x).double().mean(0)


@saved
@dataclass(frozen=True, eq=False)
class MeanFieldPosterior(Stored, Posterior):
    """W ~ N(mean, diag(variance)) for f = W a, with a the input of the last layer and a one for its bias.

    Outputs are independent, f_c ~ N(m_c·a, Σ_i v_ci a_i²): exactly, since the network is linear in W. The mean is not
    the output of the network. A prediction costs one forward pass.
    """

    problem: Problem
    mean: Tensor = stored(Array(("C", "D"), dtype=torch.float64))
    variance: Tensor = stored(Array(("C", "D"), SMALLEST, dtype=torch.float64))
    statistics: Statistics = stored(STATISTICS)  # of the network itself
    theta: Tensor = stored(WEIGHTS)  # w̃, (P,)
    elbo: float = stored(
        Real()
    )  # below log p(D) for Gaussian noise; else estimated by the draws of the search, and a little too high

    def belief(self, x: Inputs, query: Query = ALL) -> FunctionGaussian:
        a = features(self.problem.network, x)
        mean = (a @ self.mean.mT).to(self.theta.dtype)
        if query.joint:
            blocks = torch.einsum("bi,ci,di->cbd", a, self.variance, a).to(mean)  # (C, B, B)
            cov = torch.diag_embed(blocks.permute(1, 2, 0), dim1=1, dim2=3)  # (B, C, B, C)
            return query.of_belief(FunctionGaussian(mean, cov, joint=True))
        variance = (a.square() @ self.variance.mT).to(mean)
        deferred = Deferred(lambda: variance, lambda: torch.diag_embed(variance), lambda: _centred(variance))
        return query.of_belief(FunctionGaussian(mean, deferred))

    def plain(self) -> PointPosterior:
        return PointPosterior(self.problem, self.statistics, self.theta)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n functions, (n, B, C): one draw of the weights for all inputs."""
        a = features(self.problem.network, x)
        return torch.einsum("bi,nci->nbc", a, self._drawn(n, generator)).to(self.theta.dtype)

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n sets of weights, (n, P): those of ``function_samples``."""
        network = self.problem.network
        parameters = dict(network.layout[0].split(self._drawn(n, generator).unsqueeze(1)))
        return torch.cat([parameters[name] for name in network.selection.names], -1).to(self.theta.dtype)

    def _drawn(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n matrices, (n, C, D)."""
        noise = normal_rows(n, self.mean.numel(), generator, self.mean).reshape(n, *self.mean.shape)
        return self.mean + self.variance.sqrt() * noise

    @classmethod
    def from_state(cls, state: State, owner: Any = None) -> MeanFieldPosterior:
        if not is_single_map(owner.network):
            raise FileError("the weights of a mean-field posterior are no single linear map; expected a last layer")
        posterior: MeanFieldPosterior = super().from_state(state, owner)
        if posterior.mean.shape != (form := owner.network.layout[0].form[1:]):
            raise FileError(f"the mean has the shape {tuple(posterior.mean.shape)}; expected {tuple(form)}")
        return posterior


def _centred(variance: Tensor) -> Tensor:
    """Return the variance of each output after the mean over outputs is taken off, for independent outputs (B, C)."""
    count = variance.shape[-1]
    return variance * (1 - 2 / count) + variance.sum(-1, keepdim=True) / count**2


def features(network: Network, x: Inputs) -> Tensor:
    """Return the input (B, D) of the last layer in float64, in runs of inputs that fit the byte budget."""
    return network.in_chunks(x, checked_features(network))


def checked_features(network: Network) -> Callable[[Inputs], Tensor]:
    """Return a function that computes the input of the last layer, and raises if outputs are not W a."""

    def run(x: Inputs) -> Tensor:
        both = last_features(network, x)
        if both is None:
            raise UnsupportedError(
                "the last layer is used several times for one input, as for tokens or pixels; expected once. Use "
                "Diagonal() or Kron() with weights=lw.last_layer."
            )
        a, f = (t.detach().double() for t in both)
        weights = network.layout[0].arrange(network.selection.split(network.theta().double()))[0]
        gap, size = (f - a @ weights.mT).abs().max(), f.abs().max().clamp_min(1.0)
        if not bool(gap <= torch.finfo(network.arithmetic).eps ** 0.5 * size):
            raise UnsupportedError(
                f"the outputs differ from the last layer's by up to {float(gap):.3g}; expected the same. Something "
                "follows the last layer, such as a nonlinearity or a factor: use Diagonal() with weights=lw.last_layer."
            )
        return a

    return run
