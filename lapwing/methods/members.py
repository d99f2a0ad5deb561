"""Baselines without a posterior of their own: the plain network, ensembles, dropout, and mixtures of posteriors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs
from lapwing.errors import ModelError, UnsupportedError
from lapwing.methods.base import METHOD, MODELS, Conformance, Cost, Method, OverNetworks, Work, Workload
from lapwing.methods.weight_space import Kron
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.forward import (
    Path,
    Replica,
    borrow_copy,
    can_be_copied,
    copy_modules,
    has_dropout,
    is_recurrent,
    make_shareable,
    needs_plain_kernels,
    output_without_graph,
    raw_output,
    refuse_training_mode,
    with_output_dim,
)
from lapwing.networks.network import Network
from lapwing.posteriors.base import Posterior
from lapwing.posteriors.mixture import NetworksPosterior
from lapwing.posteriors.sampled import Members, MembersPosterior, PointPosterior, mean_of, outputs_of
from lapwing.problem import Problem, summed_loss
from lapwing.runtime.settings import FUNCTION, NONE, POSITIVE_VALUES, integer, setting
from lapwing.runtime.states import MEMBERS, State, Whole, saved
from lapwing.runtime.threads import global_seed


@dataclass(frozen=True)
class MapOnly(Method):
    """The plain network: no variance from the weights; the noise of a regression is the mean squared residual.

    Raises:
        DataError: In ``fit``, if the noise is to be learned and all residuals are zero.

    Cost: one forward pass over the data to fit, one to predict.
    Exact when: never; it is the baseline that shows what a method adds.

    >>> from lapwing.api import fit
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], "regression", method=MapOnly()).functions(x).std
    tensor([[0.],
            [0.]])
    """

    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance(never_exact="it has no posterior variance")

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> PointPosterior:
        statistics = summed_loss(problem.network, problem.likelihood, data)
        problem = problem.with_residual_noise(statistics)
        return PointPosterior(problem, statistics, problem.network.theta())

    def cost(self, workload: Workload) -> Cost:
        forward = Work(workload.forward)
        return workload.cost(0, workload.activations, forward, forward, note="no error bars from the weights")


Train = Callable[[nn.Module, int], nn.Module]  # (a copy with new weights, its seed) -> trained, in evaluation mode


@dataclass(frozen=True)
class Ensemble(Method):
    """A deep ensemble (Lakshminarayanan et al. 2017): the spread of the model and other trained networks.

    The mean is that of the members and not the output of the model. The noise of a regression is the residual of that
    mean.

    Args:
        models: The other members, trained and in evaluation mode.
        train: Or a function that trains one: it gets a copy of the model with new random weights and a seed, and
            returns it trained.
        members: The number of members in all, if ``train`` is given; at least 2.

    Raises:
        UnsupportedError: If ``members`` is not such a number; in ``fit``, if there is no second network, or a module
            has no ``reset_parameters`` to draw new weights with.
        ModelError: In ``fit``, if a member is no module, is in training mode, or has outputs of another shape.

    Cost: a training for each member; a prediction takes a forward pass for each.
    Exact when: never; it is a baseline.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> one, two = torch.nn.Linear(1, 1).eval(), torch.nn.Linear(1, 1).eval()
    >>> bool((fit(one, [(x, x)], "regression", method=Ensemble([two])).functions(x).std > 0).all())
    True
    """

    models: Sequence[nn.Module] = setting((), MODELS, repr=False)
    train: Train | None = setting(None, FUNCTION | NONE, repr=False)
    members: int = setting(5, integer(2))
    timed: ClassVar[bool] = False  # without its networks there is nothing to time
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="its spread is that of several trainings",
        small=lambda model: {"": Ensemble(models=[reinitialise(model, 1)])},
    )

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> MembersPosterior:
        network = problem.network
        models = [network.model, *self.models]
        if self.train is not None:
            first = generator.initial_seed() if generator is not None else 0
            for seed in range(first + 1, first + self.members - len(models) + 1):
                models.append(self.train(reinitialise(network.model, seed), seed))
        if len(models) < 2:
            raise UnsupportedError(
                "Ensemble() has one network; expected others: models=[...], or train=... to make them."
            )
        for model in models:
            if not isinstance(model, nn.Module):
                raise ModelError(f"a member is a {type(model).__name__}; expected a trained torch.nn.Module.")
            refuse_training_mode(model)
        networks = Networks(tuple(models), output=network.output)
        outputs = partial(outputs_of, networks, network)
        statistics = summed_loss(mean_of(outputs), problem.likelihood, data, "outputs of a member")
        problem = problem.with_residual_noise(statistics).with_known_prior()
        networks = replace(networks, fingerprints=tuple(map(Fingerprint.of, models)))
        return MembersPosterior(problem, networks, statistics, network.theta())

    def cost(self, workload: Workload) -> Cost:
        count = self.members if self.train is not None or not self.models else 1 + len(self.models)
        stored, passes = workload.itemsize * count * workload.parameters, Work(count * workload.forward)
        return workload.cost(
            stored, workload.activations, passes, passes, note=f"{count} networks; their training is not counted"
        )


@dataclass(frozen=True, eq=False)
class Networks(Members):
    """Trained networks whose outputs have the same shape."""

    models: tuple[nn.Module, ...]
    fingerprints: tuple[Fingerprint, ...] = ()  # of the models at the fit
    output: Path = ()  # which of several outputs of each, see Network.output
    _replicas: tuple[Replica, ...] = field(init=False)
    of_one_network: ClassVar[bool] = False

    def __post_init__(self) -> None:
        vars(self)["_replicas"] = tuple(Replica(model, (), can_be_copied(model), self.output) for model in self.models)

    def __len__(self) -> int:
        return len(self.models)

    def refuse_changed(self) -> None:
        """Raise ``ModelError`` if a network has other weights than at the fit."""
        for model, fingerprint in zip(self.models, self.fingerprints, strict=False):
            fingerprint.refuse_other(model)

    def state(self) -> State:
        """Raise ``UnsupportedError``: a file does not hold networks."""
        raise UnsupportedError("an ensemble is its networks, which a file does not hold; save those and fit again.")

    def __call__(self, x: Inputs) -> Tensor:
        outputs: list[Tensor] = []
        for replica in self._replicas:
            model = replica.model
            outputs.append(
                with_output_dim(output_without_graph(model, x, needs_plain_kernels(model, is_recurrent(model))))
            )
            if outputs[-1].shape != outputs[0].shape:
                raise ModelError(
                    f"member {len(outputs) - 1} gives outputs of the shape {tuple(outputs[-1].shape)}; expected "
                    f"{tuple(outputs[0].shape)}, that of the first."
                )
        return torch.stack(outputs)


def reinitialise(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy with new random weights, drawn by ``reset_parameters`` of each module; frozen weights are kept."""
    copied = copy.deepcopy(model)
    without = []
    with global_seed(seed, next((p.device for p in copied.parameters() if p.is_cuda), torch.device("cpu"))):
        for name, module in copied.named_modules():
            direct = list(module.parameters(recurse=False))
            frozen = [(p, p.detach().clone()) for p in direct if not p.requires_grad]
            if direct and len(frozen) == len(direct):  # buffers, such as running statistics, stay too
                continue
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is not None:
                reset()
            elif direct:
                without.append(name or type(module).__name__)
            for parameter, value in frozen:
                parameter.data.copy_(value)
    if without:
        raise UnsupportedError(
            f"{', '.join(without)}: no reset_parameters() to draw new weights with. Train networks by lw.train from "
            "weights of your choice, and give them to lw.baselines.Ensemble(models=[...])."
        )
    return copied


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


@dataclass(frozen=True)
class MixtureOfLaplace(OverNetworks):
    """A mixture of Laplace approximations (Eschenhagen et al. 2021): ``method`` is fitted to every network.

    Each network is fitted as ``fit`` fits one: it learns its prior and noise, and is calibrated on validation data if
    there are some. A prediction is the average of the predictives of all networks, by their shares.

    Args:
        models: The other networks, trained and in evaluation mode; the first is the model that ``fit`` gets.
        method: The method that is fitted to each.
        shares: The weight of each network in the mixture, that of ``fit`` first; equal weights if None.

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, if there is no second network, or there are
            not as many shares as networks.
        ModelError: In ``fit``, if a network is no module, is in training mode, or has outputs of another shape.

    Cost: that of ``method`` for each network, in the fit and in a prediction.
    Exact when: never; it is a baseline.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> one, two = torch.nn.Linear(1, 1).eval(), torch.nn.Linear(1, 1).eval()
    >>> mixture = fit(one, [(x, x.sin())], "regression", method=MixtureOfLaplace([two]))
    >>> torch.allclose(mixture.predict(x).mean, (one(x) + two(x)) / 2)
    True
    """

    models: Sequence[nn.Module] = setting((), MODELS, repr=False)
    method: Method = setting(Kron(), METHOD)
    shares: Sequence[float] | None = setting(None, POSITIVE_VALUES | NONE)
    timed: ClassVar[bool] = False  # without its networks there is nothing to time
    conformance: ClassVar[Conformance] = Conformance(
        never_exact="it mixes the posteriors of several networks",
        small=lambda model: {"": MixtureOfLaplace([_other(model)])},
    )

    def networks(self, model: nn.Module) -> list[nn.Module]:
        networks = [model, *self.models]
        if len(networks) < 2:
            raise UnsupportedError("MixtureOfLaplace() has one network; expected others: models=[...].")
        if self.shares is not None and len(self.shares) != len(networks):
            raise UnsupportedError(
                f"shares has {len(self.shares)} numbers and there are {len(networks)} networks; expected one for each, "
                "that of the model given to fit() first."
            )
        return networks

    def combine(self, posteriors: Sequence[Posterior]) -> NetworksPosterior:
        shares = [1.0] * len(posteriors) if self.shares is None else [float(share) for share in self.shares]
        return NetworksPosterior.of(posteriors, [share / sum(shares) for share in shares])

    def cost(self, workload: Workload) -> Cost:
        count = 1 + len(self.models) if self.models else 5
        cost = self.method.cost(workload)
        if cost is None:
            return Cost.unsupported(f"{type(self.method).__name__} does not tell its cost")
        return cost.times(count, f"{count} networks; their training is not counted")


def _other(model: nn.Module) -> nn.Module:
    """Return a copy of the model with weights a little further from zero."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    return other
