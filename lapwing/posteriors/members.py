"""A belief made of several networks: each is one function, their spread is the uncertainty."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lapwing.core.data import Inputs
from lapwing.core.errors import ModelError, UnsupportedError
from lapwing.core.gaussian import Deferred, FunctionGaussian
from lapwing.curvature.sweep import Statistics
from lapwing.networks.forward import has_dropout, needs_plain_kernels, plain_kernels, raw_output, shaped
from lapwing.posteriors.problem import Problem


class Members(Protocol):
    """K functions of the input."""

    def __call__(self, x: Inputs) -> Tensor:
        """(K, B, [T,] C)"""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Networks:
    """Trained networks of one form of output."""

    models: tuple[nn.Module, ...]

    def __len__(self) -> int:
        return len(self.models)

    def __call__(self, x: Inputs) -> Tensor:
        found = []
        for model in self.models:
            with torch.no_grad(), plain_kernels(needs_plain_kernels(model)):
                found.append(shaped(raw_output(model, x)))
            if found[-1].shape != found[0].shape:
                raise ModelError(
                    f"member {len(found) - 1} gives outputs of the shape {tuple(found[-1].shape)}; expected "
                    f"{tuple(found[0].shape)}, that of the first."
                )
        return torch.stack(found)


@dataclass(frozen=True, eq=False)
class Masks:
    """One network under K random dropout masks; member k has the random numbers of seed + k, whatever the input."""

    model: nn.Module  # a copy whose dropout layers are in training mode
    count: int
    seed: int

    @classmethod
    def of(cls, model: nn.Module, count: int, seed: int) -> Masks:
        copied = copy.deepcopy(model).eval()
        found = [module for module in copied.modules() if has_dropout(module)]
        if not found:
            raise UnsupportedError(
                "the model has no dropout layer with a probability above nought; expected nn.Dropout or one of its "
                "kin. Use another method, or train the network with dropout."
            )
        # In evaluation mode a fused kernel runs the whole layer, whatever the mode of its parts.
        for module in (*found, *(m for m in copied.modules() if isinstance(m, nn.TransformerEncoderLayer))):
            module.training = True
        return cls(copied, count, seed)

    def __len__(self) -> int:
        return self.count

    def __call__(self, x: Inputs) -> Tensor:
        found = []
        devices = [p.device for p in self.model.parameters() if p.is_cuda][:1]
        for k in range(self.count):
            with torch.random.fork_rng(devices), torch.no_grad():
                torch.manual_seed(self.seed + k)
                found.append(shaped(raw_output(self.model, x)))
        return torch.stack(found)


@dataclass(frozen=True, eq=False)
class MembersPosterior:
    """f(x) ~ N(mean of the members, their covariance). A prediction costs a forward pass for each member."""

    problem: Problem
    members: Members
    statistics: Statistics
    theta: Tensor

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        each = self.members(x).to(self.theta.dtype)
        mean, count = each.mean(0), max(1, len(each) - 1)
        gap = each - mean
        if joint:
            flat = gap.flatten(1)
            return FunctionGaussian(mean, (flat.mT @ flat / count).reshape(*mean.shape, *mean.shape), joint=True)
        return FunctionGaussian(
            mean,
            Deferred(lambda: gap.square().sum(0) / count, lambda: torch.einsum("k...c,k...d->...cd", gap, gap) / count),
        )

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """The first n members, (n, B, [T,] C); the generator has no say."""
        if n > len(self.members):
            raise UnsupportedError(f"{n} samples were asked for and there are {len(self.members)} members.")
        return self.members(x)[:n].to(self.theta.dtype)
