"""A belief about functions that is no belief about weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.core.gaussian import Deferred, FunctionGaussian
from lapwing.core.trace import Trace
from lapwing.errors import UnsupportedError
from lapwing.losses import Statistics
from lapwing.methods.fmgp.features import features
from lapwing.methods.fmgp.kernels import FreeKernel
from lapwing.networks.network import Network
from lapwing.problem import Problem

WIDE = 32  # outputs above which covariances are built only when asked for


@dataclass(frozen=True, eq=False)
class Sight:
    """What a kernel sees of an input: the input itself, flat, or what the network's last layer gets."""

    network: Network
    last: Network | None = None  # the network with its last layer alone, for features

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Features (B, D) and outputs (B, C), in float64."""
        if self.last is not None:
            seen, f = features(self.last, x)
            return seen.double(), f.double()
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            raise UnsupportedError(
                "the rbf kernel needs inputs that are one tensor of real numbers; use kernel='features'."
            )
        return x.reshape(len(x), -1).double(), self.network(x).double()


@dataclass(frozen=True, eq=False)
class FunctionPosterior:
    """f(x) ~ N(network output, K - K_xZ mix mixᵀ K_Zx): a kernel, M points and what the data said there."""

    problem: Problem
    sight: Sight
    kernel: FreeKernel
    points: Tensor  # (M, D)
    numbers: Tensor  # (M,), the output of each
    mix: Tensor  # (M, r)
    statistics: Statistics
    theta: Tensor
    trace: Trace | None = None

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        with torch.no_grad():
            seen, f = self.sight(x)
            mean = f.to(self.problem.network.dtype)
            rows = self.kernel.between(seen, self.points, self.numbers) @ self.mix  # (B, C, r)
            if joint:
                flat = rows.flatten(0, 1)
                cov = self.kernel.joint(seen) - (flat @ flat.mT).reshape(*f.shape, *f.shape)
                return FunctionGaussian.across(mean, cov)
            whole = lambda: (self.kernel.own(seen) - rows @ rows.mT).to(mean)
            if f.shape[-1] <= WIDE:
                return FunctionGaussian(mean, whole())
            own = lambda: self.kernel.own(seen).diagonal(dim1=-2, dim2=-1)
            return FunctionGaussian(mean, Deferred(lambda: (own() - rows.square().sum(-1)).to(mean), whole))

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, C), consistent between the inputs of one call."""
        return self(x, joint=True).sample(n, generator)

    @cached_property
    def settings(self) -> dict[str, object]:
        """What a file needs besides the tensors."""
        return {"kind": self.kernel.kind, "features": self.sight.last is not None}
