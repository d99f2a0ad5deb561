"""The state of a training run between two epochs, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.data.processes import Processes
from lapwing.errors import FileError
from lapwing.recipes import OPTIMISERS
from lapwing.runtime import state as plain
from lapwing.runtime.files import read, write
from lapwing.runtime.state import (
    ABOVE_ZERO,
    LARGEST,
    SMALLEST,
    Array,
    Either,
    Flag,
    ListOf,
    Maybe,
    Real,
    Record,
    Text,
    Whole,
)


@dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers of a model before an epoch, such as the running statistics of BatchNorm, which depend on the data."""

    model: nn.Module
    processes: Processes
    before: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: nn.Module, processes: Processes) -> Buffers:
        """Return a copy of the buffers as they are; none if there is one process."""
        copied = () if processes.group is None else tuple(buffer.clone() for buffer in model.buffers())
        return cls(model, processes, copied)

    @torch.no_grad()
    def average(self, rows: int) -> None:
        """Replace buffers that changed by their mean over the processes, weighted by their data, and take the weights.

        Whole numbers are those of the first process with the most data. Weights are the same up to rounding, which may
        differ between machines; those of the first process are kept.
        """
        if self.processes.group is None:
            return
        now = list(self.model.buffers())
        changed = [float(not torch.equal(a, b)) for a, b in zip(self.before, now, strict=True)]
        (flags,) = self.processes.sum([torch.tensor(changed)])
        counts = self.processes.gather_numbers(rows)
        chosen = counts.index(max(counts)) == self.processes.rank
        share = rows / max(1, sum(counts))
        moved = [buffer for buffer, flag in zip(now, flags.tolist(), strict=True) if flag]
        weights = [share if buffer.is_floating_point() else int(chosen) for buffer in moved]
        own = [
            buffer * weight if weight else torch.zeros_like(buffer)
            for buffer, weight in zip(moved, weights, strict=True)
        ]
        for buffer, total in zip(moved, self.processes.sum(own), strict=True):
            buffer.copy_(total)
        parameters = list(self.model.parameters())
        for parameter, first in zip(parameters, self.processes.copy_of_first(parameters), strict=True):
            parameter.copy_(first)


FORMAT = "lapwing-training-1"
PRECISION = Either(Array((), SMALLEST), Array((None,), SMALLEST))
NOISE = Maybe(Array((), SMALLEST))
SAME = ("optimiser", "seed", "method", "likelihood")  # settings of a recipe that a resumed run cannot change


@dataclass(frozen=True)
class Epoch:
    """One epoch: the mean regularised loss, and the evidence and hyperparameters if they were updated after it."""

    number: int
    loss: float
    log_evidence: float | None = None
    precisions: tuple[float, ...] = ()
    noise: tuple[float, ...] = ()
    finding: str = ""


_EPOCH = Record(
    Epoch, number=Whole(), loss=Real(), log_evidence=Maybe(Real()), precisions=ListOf(ABOVE_ZERO),
    noise=ListOf(ABOVE_ZERO), finding=Text(),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class TrainingState:
    """Everything needed to resume a training run: plain tensors and numbers, so that loading a file runs no code.

    ``trained.state`` is one; ``TrainingState.load`` reads the file of a checkpoint. ``recipe`` says which run it
    belongs to.
    """

    epoch: int  # number of finished epochs
    weights: dict[str, Tensor]
    optimiser: plain.State  # what it remembers of each parameter
    precision: Tensor
    noise: Tensor | None
    recipe: plain.State
    best: dict[str, Any] = field(default_factory=dict)  # evidence, weights, precision, noise
    history: tuple[Epoch, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the state to a file that ``TrainingState.load`` reads, whole or not at all.

        Args:
            path: The file to write.

        Raises:
            FileError: If the file cannot be written; an existing one is unchanged.
        """
        parts = {
            "weights": plain.State("weights", {}, self.weights),
            "optimiser": self.optimiser,
            "recipe": self.recipe,
        }
        if self.best:
            weights = {"weights": plain.State("weights", {}, self.best["weights"])}
            parts["best"] = plain.State("best", {"evidence": self.best["evidence"]}, _tensors(self.best), weights)
        settings = {"epoch": self.epoch, "history": [asdict(epoch) for epoch in self.history]}
        write(path, plain.State(FORMAT, settings, _tensors(vars(self)), parts))

    @classmethod
    def load(cls, path: str | Path) -> TrainingState:
        """Read a state that ``save`` or ``train(..., checkpoint=...)`` wrote.

        What depends on the network (weights, optimiser) is checked when training resumes.

        Args:
            path: The file to read.

        Returns:
            The state, with its tensors on the CPU.

        Raises:
            FileNotFoundError: If there is no such file.
            FileError: If the file does not hold a training state, or is damaged.
        """
        state = read(path, FORMAT, "training state")
        try:
            return cls._of(state)
        except FileError as error:
            raise FileError(f"{path} is damaged: {error}. Take an older checkpoint, or train again.") from error

    @classmethod
    def _of(cls, state: plain.State) -> TrainingState:
        """Return the training state from plain data, with all values checked that do not depend on a network."""
        unread = plain.Unread()
        fields = state.read(
            epoch=Whole(), history=ListOf(_EPOCH), precision=PRECISION, noise=NOISE, weights=unread, optimiser=unread,
            recipe=unread, best=Maybe(unread),
        )  # fmt: skip
        _refuse_wrong_recipe(fields["recipe"], fields["epoch"])
        count, size = fields["epoch"], fields["precision"].numel()
        if [epoch.number for epoch in fields["history"]] != list(range(count)):
            raise FileError(f"{count} epochs are finished and {len(fields['history'])} recorded; expected all in order")
        if any(len(epoch.precisions) not in (0, size) for epoch in fields["history"]):
            raise FileError(f"an epoch has another number of precisions than the prior, {size}")
        best: dict[str, Any] = {}
        if fields["best"] is not None:
            best = fields["best"].read(evidence=Real(), precision=PRECISION, noise=NOISE, weights=unread)
            best["weights"] = _weights(best["weights"])
        return cls(**{**fields, "weights": _weights(fields["weights"]), "best": best})


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: values[name] for name in ("precision", "noise") if values[name] is not None}


def _weights(state: plain.State) -> dict[str, Tensor]:
    if state.name != "weights" or state.settings or state.parts:
        raise FileError(f"the weights are a state {state.name!r:.40} with settings or parts; expected tensors alone")
    return dict(state.tensors)


def _refuse_wrong_recipe(recipe: plain.State, epochs: int) -> None:
    """Raise unless the settings of a recipe in a file are possible."""
    recipe.read(
        optimiser=Text(tuple(OPTIMISERS)), seed=Whole(), epochs=Whole(max(1, epochs)), rate=ABOVE_ZERO,
        last_rate=ABOVE_ZERO, burn_in=Whole(), frequency=Whole(1), keep_best=Flag(), method=Text(), likelihood=Text(),
        prior=plain.Unread(),
    )  # fmt: skip


def refuse_other_recipe(seen: plain.State, own: plain.State, done: int) -> None:
    """Raise ``FileError`` if a state was made with another seed, optimiser, method, likelihood or prior.

    Rates and the number of epochs may change; there may not be fewer epochs than are done.
    """
    for name in SAME:
        if seen.settings[name] != own.settings[name]:
            raise FileError(f"its {name} is {seen.settings[name]!r:.40}, not {own.settings[name]}")
    one, two = seen.parts["prior"], own.parts["prior"]
    if one.name != two.name or one.tensors.keys() != two.tensors.keys():
        raise FileError(f"its prior is {one.name!r:.40}, not the present {two.name}")
    if one.settings.get("members") != two.settings["members"]:
        raise FileError("its prior has other groups than the present one")
    same = all(torch.equal(tensor, two.tensors[name]) for name, tensor in one.tensors.items())
    if not same or one.settings.get("mean") != two.settings.get("mean"):
        raise FileError("its prior started from other precisions, or has another mean, than the present one")
    if own.settings["epochs"] < done:
        raise FileError(f"it has finished {done} epochs and the recipe has {own.settings['epochs']}; give more")


def refuse_other_weights(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise ``FileError`` unless these are weights and buffers of this model, with numbers that it can have."""
    own, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    if weights.keys() != own.keys():
        raise FileError(f"it has other weights: {sorted(weights.keys() ^ own.keys())[:4]!r:.200}")
    for name, value in weights.items():
        like = own[name]
        if value.shape != like.shape or value.dtype != like.dtype:
            seen, expected = (f"{tuple(t.shape)} {t.dtype}" for t in (value, like))
            raise FileError(f"its {name!r} is {seen}; expected {expected}")
        good = (torch.view_as_real(value) if value.is_complex() else value.double()).abs() <= LARGEST
        if name not in parameters and not value.is_complex():  # a buffer, such as a mask, may have infinite numbers
            good |= value == like.to(value.device)
        if not bool(good.all()):
            raise FileError(f"its {name!r} has numbers that are not finite, or larger than {LARGEST:g}")
        if name.rpartition(".")[2] in ("running_var", "num_batches_tracked") and bool((value < 0).any()):
            raise FileError(f"its {name!r} has numbers below zero")
