"""A deep ensemble: several networks, trained independently."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs
from lapwing.errors import ModelError, UnsupportedError
from lapwing.methods.base import MODELS, Conformance, Cost, Method, Work, Workload
from lapwing.networks.fingerprint import Fingerprint
from lapwing.networks.forward import (
    Path,
    Replica,
    can_be_copied,
    is_recurrent,
    needs_plain_kernels,
    output_without_graph,
    refuse_training_mode,
    with_output_dim,
)
from lapwing.posteriors.sampled import Members, MembersPosterior, mean_of, outputs_of
from lapwing.problem import Problem, summed_loss
from lapwing.runtime.settings import FUNCTION, NONE, State, integer, setting
from lapwing.runtime.threads import global_seed

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

    def trial(self, workload: Workload) -> None:
        """Return None: without its networks there is nothing to time."""
        return


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
