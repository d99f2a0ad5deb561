"""Dropout that stays active in predictions (Gal & Ghahramani 2016)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs
from lapwing.errors import UnsupportedError
from lapwing.methods.base import Conformance, Cost, Method, Work, Workload
from lapwing.networks.forward import borrow_copy, copy_modules, has_dropout, make_shareable, raw_output, with_output_dim
from lapwing.networks.network import Network
from lapwing.posteriors.sampled import Members, MembersPosterior
from lapwing.problem import Problem, summed_loss
from lapwing.runtime.settings import MEMBERS, State, Whole, integer, saved, setting
from lapwing.runtime.threads import global_seed


@dataclass(frozen=True)
class MCDropout(Method):
    """The spread of several forward passes, each with one random dropout mask for all inputs.

    For networks trained with ``nn.Dropout`` or with the dropout of PyTorch's attention and recurrent layers
    (``F.dropout`` inside ``forward`` is not detected). The mean is that of the passes; the noise of a regression is the
    residual of the network without dropout. The model is not changed.

    Args:
        samples: The number of forward passes K, at least 2.
        seed: The seed of the first mask; pass k has the seed ``seed + k``.

    Raises:
        UnsupportedError: If a setting is not such a number; in ``fit``, if the model has no dropout layer.

    Cost: one forward pass over the data to fit; a prediction takes ``samples`` forward passes.
    Exact when: never; it is a baseline.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)).eval()
    >>> bool((fit(net, [(x, x)], "regression", method=MCDropout(samples=8)).functions(x).std > 0).all())
    True
    """

    samples: int = setting(32, integer(2))  # the spread of one sample is not defined
    seed: int = setting(0, integer(0))
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="its spread is that of the dropout masks", small=lambda model: {"": MCDropout(samples=2)}
    )

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> MembersPosterior:
        network = problem.network
        members = Masks.of(network, self.samples, self.seed)
        statistics = summed_loss(network, problem.likelihood, data)
        problem = problem.with_residual_noise(statistics).with_known_prior()
        return MembersPosterior(problem, members, statistics, network.theta())

    def cost(self, workload: Workload) -> Cost:
        if not workload.dropout:
            return Cost.unsupported("the model has no dropout layer")
        peak = workload.activations + workload.itemsize * workload.parameters
        return workload.cost(0, peak, Work(workload.forward), Work(self.samples * workload.forward))


WHOLE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)  # layers that drop whole channels
SHIFTED = (nn.AlphaDropout, nn.FeatureAlphaDropout)  # layers that set entries to the limit of SELU at -infinity
LIMIT = -1.7580993408473766


class FixedMask(nn.Module):
    """A dropout layer with one mask for all samples of a batch, drawn from ``seed``, so that it is one function."""

    def __init__(self, layer: nn.modules.dropout._DropoutNd, place: int) -> None:
        super().__init__()
        self.rate, self.place, self.seed = layer.p, place, 0
        self.whole, self.shifted = isinstance(layer, WHOLE), isinstance(layer, SHIFTED)

    def forward(self, x: Tensor) -> Tensor:
        keep, shape = 1 - self.rate, (1, *x.shape[1:])
        if self.whole:
            shape = (*shape[:2], *(1 for _ in shape[2:]))
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.place)
        mask = torch.empty(shape, dtype=x.dtype).bernoulli_(keep, generator=generator).to(x.device)
        if keep == 0:
            return x * mask
        if not self.shifted:
            return x * (mask / keep)
        scale = (keep + LIMIT**2 * keep * self.rate) ** -0.5  # keeps mean 0 and variance 1
        return scale * (x * mask + LIMIT * (1 - mask) - LIMIT * self.rate)


@saved
@dataclass(frozen=True, eq=False)
class Masks(Members):
    """One network under K random dropout masks; member k has the masks of seed + k at all inputs.

    Dropout inside attention and recurrent layers is drawn anew for every sample, so there a member is not one function.
    """

    model: nn.Module  # a private copy in which masks replace the dropout layers
    count: int
    seed: int

    @classmethod
    def of(cls, network: Network, count: int, seed: int) -> Masks:
        """Return ``count`` masks for a copy of the model; raise ``UnsupportedError`` if it has no dropout layer."""
        model = copy_modules(network.replica) if network.private else copy.deepcopy(network.model)
        if not any(has_dropout(module) for module in model.modules()):
            raise UnsupportedError(
                "the model has no dropout layer with a probability above zero; expected nn.Dropout or a similar "
                "layer. Use another method, or train the network with dropout."
            )
        # Attention and recurrent layers drop inside; in evaluation mode a fused kernel runs a whole encoder layer.
        for module in model.modules():
            inside = has_dropout(module) and not isinstance(module, nn.modules.dropout._DropoutNd)
            if inside or isinstance(module, nn.TransformerEncoderLayer):
                module.training = True
        # Not named_children(): if a layer has two names, it leaves out the second.
        places = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()
                  if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0]  # fmt: skip
        for number, (parent, name, child) in enumerate(places):
            setattr(parent, name, FixedMask(child, number))
        return cls(make_shareable(model), count, seed)

    def __len__(self) -> int:
        return self.count

    @property
    def together(self) -> bool:  # type: ignore[override]
        return any(has_dropout(module) for module in self.model.modules())

    def __call__(self, x: Inputs) -> Tensor:
        outputs = []
        device = next((p.device for p in self.model.parameters() if p.is_cuda), torch.device("cpu"))
        with borrow_copy(self.model) as one, torch.no_grad():
            layers = [module for module in one.modules() if isinstance(module, FixedMask)]
            inside = any(has_dropout(module) for module in one.modules())  # these draw from the global generators
            for seed in range(self.seed, self.seed + self.count):
                for layer in layers:
                    layer.seed = seed
                with global_seed(seed, device) if inside else nullcontext():
                    outputs.append(with_output_dim(raw_output(one, x)))
        return torch.stack(outputs)

    def state(self) -> State:
        return State("Masks", {"count": self.count, "seed": self.seed})

    @classmethod
    def from_state(cls, state: State, problem: Problem) -> Masks:
        return cls.of(problem.network, **state.read(count=Whole(2, MEMBERS), seed=Whole()))
