"""The posterior of the fixed-mean process: a Gaussian over outputs, without a distribution over weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.core.gaussian import Deferred, FunctionGaussian
from lapwing.core.state import State, saved
from lapwing.core.trace import Trace
from lapwing.errors import ModelError, UnsupportedError
from lapwing.losses import Statistics
from lapwing.methods.fmgp.kernels import FreeKernel
from lapwing.networks.last_layer import last_layer
from lapwing.networks.network import Network
from lapwing.problem import Problem

WIDE = 32  # number of outputs above which covariances are built only when needed


@dataclass(frozen=True, eq=False)
class Sight:
    """The features on which a kernel works: the flattened input, or the input of the network's last layer."""

    network: Network
    last: Network | None = None  # the network with only its last layer selected, for features

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return features (B, D) and outputs (B, C), in float64."""
        if self.last is not None:
            u, f = features(self.last, x)
            return u.double(), f.double()
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            raise UnsupportedError(
                "the rbf kernel needs inputs that are one tensor of real numbers; use kernel='features'."
            )
        return x.reshape(len(x), -1).double(), self.network(x).double()


@saved
@dataclass(frozen=True, eq=False)
class FunctionPosterior:
    """f(x) ~ N(network output, K - K_xZ mix mixᵀ K_Zx) with a kernel K and M inducing points Z.

    A prediction costs one forward pass, the kernel with M points and B C M².
    """

    problem: Problem
    sight: Sight
    kernel: FreeKernel
    points: Tensor  # Z, (M, D)
    numbers: Tensor  # (M,), the output that each point belongs to
    mix: Tensor  # (M, r)
    statistics: Statistics
    theta: Tensor
    trace: Trace | None = None

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        with torch.no_grad():
            u, f = self.sight(x)
            mean = f.to(self.problem.network.dtype)
            rows = self.kernel.between(u, self.points, self.numbers) @ self.mix  # (B, C, r)
            if joint:
                flat = rows.flatten(0, 1)
                cov = self.kernel.joint(u) - (flat @ flat.mT).reshape(*f.shape, *f.shape)
                return FunctionGaussian.across(mean, cov)
            whole = lambda: (self.kernel.marginal(u) - rows @ rows.mT).to(mean)
            if f.shape[-1] <= WIDE:
                return FunctionGaussian(mean, whole())
            prior = lambda: self.kernel.marginal(u).diagonal(dim1=-2, dim2=-1)
            return FunctionGaussian(mean, Deferred(lambda: (prior() - rows.square().sum(-1)).to(mean), whole))

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n functions at x, (n, B, C), consistent between the inputs of one call."""
        return self(x, joint=True).sample(n, generator)

    def state(self) -> State:
        tensors = {
            "theta": self.theta, "points": self.points, "numbers": self.numbers, "mix": self.mix,
            "log_lengths": self.kernel.log_lengths, "mixing": self.kernel.mixing,
        }  # fmt: skip
        parts = {} if self.sight.last is None else {"last": self.sight.last.state()}
        settings = {"statistics": asdict(self.statistics), "kernel": self.kernel.kind}
        return State("FunctionPosterior", settings, tensors, parts)

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> FunctionPosterior:
        network, tensors, settings = problem.network, state.tensors, state.settings
        last = Network.from_state(state.parts["last"], network.model) if "last" in state.parts else None
        kernel = FreeKernel(settings["kernel"], tensors["log_lengths"], tensors["mixing"])
        return cls(
            problem, Sight(network, last), kernel, tensors["points"], tensors["numbers"], tensors["mix"],
            Statistics.from_settings(settings["statistics"]), tensors["theta"].to(network.dtype),
        )  # fmt: skip


def last_layer_network(network: Network, inputs: Inputs) -> Network:
    """Return the network with only its last layer selected; raise if that is not a single linear map."""
    last = Network.build(network.model, inputs, last_layer)
    if len(last.layout) != 1 or not last.layout[0].linear or last.layout[0].groups != 1:
        raise ModelError("the last layer is no single linear map, so it has no features; use kernel='rbf'.")
    return last


def features(network: Network, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the last layer's input (B, D) and the outputs f (B, C), by one forward pass."""
    tangent = network.linearise(inputs)
    seeds = torch.zeros_like(tangent.network_output)[None]
    for block, part in tangent.jacobians(seeds):
        single = part.single_map()
        if single is None:
            raise ModelError("the last layer is used several times for one input; use kernel='rbf'.")
        a = single.a[0, :, 0]
        return (a[:, :-1] if block.bias is not None else a), tangent.f
    raise AssertionError("a last layer has one block")
