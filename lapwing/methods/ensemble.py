"""Several networks trained apart: a baseline that is hard to beat and costs a training for each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lapwing.core.data import Data
from lapwing.core.settings import require_integer
from lapwing.errors import ModelError, UnsupportedError
from lapwing.losses import summed_loss
from lapwing.networks.forward import refuse_training_mode
from lapwing.posteriors.members import MembersPosterior, Networks, mean_of
from lapwing.problem import Problem

Train = Callable[[nn.Module, int], nn.Module]  # (a copy with new weights, its seed) -> trained, in evaluation mode


@dataclass(frozen=True)
class Ensemble:
    """A deep ensemble (Lakshminarayanan et al. 2017): the model and others, their spread as error bars.

    Give the other trained ``models``, or ``train``, which gets a copy of the model with new random weights and a seed
    and returns it trained; then there are ``members`` in all. The mean is that of the members and not the model's own
    output. The noise of a regression is the residual of that mean.

    Cost: a training for each member; a prediction takes a forward pass for each.

    >>> from lapwing.api import fit
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> one, two = torch.nn.Linear(1, 1).eval(), torch.nn.Linear(1, 1).eval()
    >>> bool((fit(one, [(x, x)], "regression", method=Ensemble([two])).functions(x).std > 0).all())
    True
    """

    models: Sequence[nn.Module] = field(default=(), repr=False)
    train: Train | None = field(default=None, repr=False)
    members: int = 5

    def __post_init__(self) -> None:
        require_integer("members", self.members, least=2)

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> MembersPosterior:
        network = problem.network
        models = [network.model, *self.models]
        if self.train is not None:
            first = generator.initial_seed() if generator is not None else 0
            for seed in range(first + 1, first + self.members - len(models) + 1):
                models.append(self.train(renewed(network.model, seed), seed))
        if len(models) < 2:
            raise UnsupportedError(
                "Ensemble() has one network; expected others: models=[...], or train=... to make them."
            )
        for model in models:
            if not isinstance(model, nn.Module):
                raise ModelError(f"a member is a {type(model).__name__}; expected a trained torch.nn.Module.")
            refuse_training_mode(model)
        found = Networks(tuple(models))
        statistics = summed_loss(mean_of(found), problem.likelihood, data, "outputs of a member")
        problem = problem.with_residual_noise(statistics).with_known_prior()
        return MembersPosterior(problem, found.marked(), statistics, network.theta())


def renewed(model: nn.Module, seed: int) -> nn.Module:
    """A copy with new random weights, by each module's own ``reset_parameters``."""
    copied = copy.deepcopy(model)
    bare = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, module in copied.named_modules():
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is not None:
                reset()
            elif any(True for _ in module.parameters(recurse=False)):
                bare.append(name or type(module).__name__)
    if bare:
        raise UnsupportedError(
            f"{', '.join(bare)}: no reset_parameters() to draw new weights with; give trained models=[...] instead."
        )
    return copied
