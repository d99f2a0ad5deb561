"""A belief made of several networks: each is one function, their spread is the uncertainty."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lapwing.core.data import Inputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import global_seed
from lapwing.errors import ModelError, UnsupportedError
from lapwing.losses import Statistics
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.forward import has_dropout, needs_plain_kernels, plain_kernels, raw_output, shaped
from lapwing.problem import Problem


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
    marks: tuple[Fingerprint, ...] = ()  # of the models as they were

    def marked(self) -> Networks:
        """The same, knowing its models by their weights."""
        return Networks(self.models, tuple(Fingerprint.of(model) for model in self.models))

    def __len__(self) -> int:
        return len(self.models)

    def refuse_changed(self) -> None:
        for model, mark in zip(self.models, self.marks, strict=False):
            mark.refuse_other(model)

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


class FixedMask(nn.Module):
    """A dropout layer with one mask for all samples of a batch, that of ``seed``: each is then one function."""

    def __init__(self, layer: nn.Module, place: int) -> None:
        super().__init__()
        self.layer, self.place, self.seed = layer.train(), place, 0

    def forward(self, x: Tensor) -> Tensor:
        with global_seed(1_000_003 * self.seed + self.place, x.device):
            if isinstance(self.layer, nn.AlphaDropout | nn.FeatureAlphaDropout):  # no mere product with a mask
                shifted: Tensor = self.layer(x)
                return shifted
            return x * self.layer(torch.ones_like(x[:1]))


@dataclass(frozen=True, eq=False)
class Masks:
    """One network under K random dropout masks; member k has the masks of seed + k at whatever inputs.

    Dropout inside attention and recurrent layers is drawn anew for every sample: those are no functions of their own.
    """

    model: nn.Module  # a copy with masks in the place of its dropout layers
    count: int
    seed: int

    @classmethod
    def of(cls, model: nn.Module, count: int, seed: int) -> Masks:
        copied = copy.deepcopy(model).eval()
        if not any(has_dropout(module) for module in copied.modules()):
            raise UnsupportedError(
                "the model has no dropout layer with a probability above nought; expected nn.Dropout or one of its "
                "kin. Use another method, or train the network with dropout."
            )
        # Attention and recurrent layers drop inside; in evaluation mode a fused kernel runs a whole encoder layer.
        for module in copied.modules():
            inside = has_dropout(module) and not isinstance(module, nn.modules.dropout._DropoutNd)
            if inside or isinstance(module, nn.TransformerEncoderLayer):
                module.training = True
        # By _modules: named_children() leaves out the second name of a layer that has two.
        places = [(parent, name, child) for parent in copied.modules() for name, child in parent._modules.items()
                  if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0]  # fmt: skip
        for number, (parent, name, child) in enumerate(places):
            setattr(parent, name, FixedMask(child, number))
        return cls(copied, count, seed)

    def __len__(self) -> int:
        return self.count

    def __call__(self, x: Inputs) -> Tensor:
        found = []
        layers = [module for module in self.model.modules() if isinstance(module, FixedMask)]
        device = next((p.device for p in self.model.parameters() if p.is_cuda), torch.device("cpu"))
        for k in range(self.count):
            for layer in layers:
                layer.seed = self.seed + k
            with global_seed(self.seed + k, device), torch.no_grad():
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
        return spread(self._each(x), joint)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """The first n members, (n, B, [T,] C); the generator has no say."""
        if n > len(self.members):
            raise UnsupportedError(f"{n} samples were asked for and there are {len(self.members)} members.")
        return self._each(x)[:n]

    def _each(self, x: Inputs) -> Tensor:
        if isinstance(self.members, Networks):
            self.members.refuse_changed()
        return self.members(x).to(self.theta.dtype)


def spread(each: Tensor, joint: bool) -> FunctionGaussian:
    """Mean and covariance of K functions (K, B, [T,] C)."""
    mean = each.mean(0)
    return FunctionGaussian.of_deviations(mean, each - mean, max(1, len(each) - 1), joint)


def mean_of(members: Members) -> Callable[[Inputs], Tensor]:
    """Return the mean of the members as a function of the inputs, in float64."""
    return lambda x: members(x).double().mean(0)
