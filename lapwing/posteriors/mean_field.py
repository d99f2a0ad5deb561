"""A Gaussian over the last layer's weights in which all weights are independent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lapwing.core.gaussian import Deferred, FunctionGaussian
from lapwing.core.inputs import Inputs
from lapwing.core.random import normal_rows
from lapwing.core.schema import SMALLEST, Array, Real
from lapwing.core.state import State, saved
from lapwing.errors import FileError, UnsupportedError
from lapwing.networks.features import is_single_map, last_features
from lapwing.networks.network import Network
from lapwing.posteriors.point import PointPosterior
from lapwing.posteriors.protocols import Posterior
from lapwing.problem import STATISTICS, Problem, Statistics


@saved
@dataclass(frozen=True, eq=False)
class MeanFieldPosterior(Posterior):
    """W ~ N(mean, diag(variance)) for f = W a, with a the input of the last layer and a one for its bias.

    Outputs are independent, f_c ~ N(m_c·a, Σ_i v_ci a_i²): exactly, since the network is linear in W. The mean is not
    the output of the network. A prediction costs one forward pass.
    """

    problem: Problem
    mean: Tensor  # (C, D), float64
    variance: Tensor  # (C, D), float64
    statistics: Statistics  # of the network itself
    theta: Tensor  # w̃, (P,)
    elbo: float  # below log p(D) for Gaussian noise; else estimated by the draws of the search, and a little too high

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        a = features(self.problem.network, x)
        mean = (a @ self.mean.mT).to(self.theta.dtype)
        if joint:
            blocks = torch.einsum("bi,ci,di->cbd", a, self.variance, a).to(mean)  # (C, B, B)
            cov = torch.diag_embed(blocks.permute(1, 2, 0), dim1=1, dim2=3)  # (B, C, B, C)
            return FunctionGaussian(mean, cov, joint=True)
        variance = (a.square() @ self.variance.mT).to(mean)
        return FunctionGaussian(
            mean, Deferred(lambda: variance, lambda: torch.diag_embed(variance), lambda: _centred(variance))
        )

    def plain(self) -> PointPosterior:
        return PointPosterior(self.problem, self.statistics, self.theta)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n functions, (n, B, C): one draw of the weights for all inputs."""
        a = features(self.problem.network, x)
        return torch.einsum("bi,nci->nbc", a, self._drawn(n, generator)).to(self.theta.dtype)

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n sets of weights, (n, P): those of ``function_samples``."""
        network = self.problem.network
        parameters = dict(network.layout[0].spread(self._drawn(n, generator).unsqueeze(1)))
        return torch.cat([parameters[name] for name in network.selection.names], -1).to(self.theta.dtype)

    def _drawn(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n matrices, (n, C, D)."""
        noise = normal_rows(n, self.mean.numel(), generator, self.mean).reshape(n, *self.mean.shape)
        return self.mean + self.variance.sqrt() * noise

    def state(self) -> State:
        settings = {"statistics": asdict(self.statistics), "elbo": self.elbo}
        tensors = {"theta": self.theta, "mean": self.mean, "variance": self.variance}
        return State("MeanFieldPosterior", settings, tensors)

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> MeanFieldPosterior:
        network = problem.network
        if not is_single_map(network):
            raise FileError("the weights of a mean-field posterior are no single linear map; expected a last layer")
        _, outputs, width = network.layout[0].form
        matrix = Array((outputs, width), dtype=torch.float64)
        fields = state.read(
            theta=Array(("P",), dtype=network.dtype), mean=matrix, elbo=Real(), statistics=STATISTICS,
            variance=Array((outputs, width), SMALLEST, dtype=torch.float64),
        )  # fmt: skip
        return cls(problem, **fields)


def _centred(variance: Tensor) -> Tensor:
    """Return the variance of each output after the mean over outputs is taken off, for independent outputs (B, C)."""
    count = variance.shape[-1]
    return variance * (1 - 2 / count) + variance.sum(-1, keepdim=True) / count**2


def features(network: Network, x: Inputs) -> Tensor:
    """Return the input (B, D) of the last layer in float64, in runs of inputs that fit the byte budget."""
    return network.in_runs(x, checked_features(network))


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
