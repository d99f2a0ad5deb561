"""Training in which the evidence chooses the regularisation: the loop, its state between two epochs, and its file."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.data.batches import Data, Readings
from lapwing.data.inputs import Batch
from lapwing.data.processes import Processes, next_epoch
from lapwing.errors import DataError, DivergedError, FileError, NumericalError, UnsupportedError
from lapwing.likelihoods.base import Likelihood, weighted_count, weighted_loss
from lapwing.methods.base import refuse_processes
from lapwing.networks.forward import raw_output, with_output_dim
from lapwing.networks.network import Network
from lapwing.posteriors.base import Posterior
from lapwing.problem import Problem, data_count
from lapwing.recipes import OPTIMISERS, Recipe, pack_optimiser, unpack_optimiser
from lapwing.runtime.files import read, write
from lapwing.runtime.states import (
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
    State,
    Text,
    Unread,
    Whole,
)
from lapwing.runtime.threads import ProgressBar, Stream
from lapwing.tuners.base import check_tuner, give_data


@torch.no_grad()
def average_buffers(model: nn.Module, processes: Processes, before: Sequence[Tensor], rows: int) -> None:
    """Replace the buffers that changed by their mean over the processes, weighted by their data, and take the weights.

    Buffers are numbers such as the running statistics of BatchNorm, which depend on the data. Whole numbers are those
    of the first process with the most data. Weights are the same up to rounding, which may differ between machines;
    those of the first process are kept.

    Args:
        model: The model of this process.
        processes: All processes; nothing changes if there is one.
        before: Copies of the buffers before the epoch.
        rows: The number of rows that this process saw.
    """
    if processes.group is None:
        return
    now = list(model.buffers())
    changed = [float(not torch.equal(a, b)) for a, b in zip(before, now, strict=True)]
    (flags,) = processes.sum([torch.tensor(changed)])
    counts = processes.gather_numbers(rows)
    chosen = counts.index(max(counts)) == processes.rank
    share = rows / max(1, sum(counts))
    moved = [buffer for buffer, flag in zip(now, flags.tolist(), strict=True) if flag]
    weights = [share if buffer.is_floating_point() else int(chosen) for buffer in moved]
    own = [each * weight if weight else torch.zeros_like(each) for each, weight in zip(moved, weights, strict=True)]
    for buffer, total in zip(moved, processes.sum(own), strict=True):
        buffer.copy_(total)
    parameters = list(model.parameters())
    for parameter, first in zip(parameters, processes.copy_of_first(parameters), strict=True):
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
    optimiser: State  # what it remembers of each parameter
    precision: Tensor
    noise: Tensor | None
    recipe: State
    best: dict[str, Any] = field(default_factory=dict)  # evidence, weights, precision, noise
    history: tuple[Epoch, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the state to a file that ``TrainingState.load`` reads, whole or not at all.

        Args:
            path: The file to write.

        Raises:
            FileError: If the file cannot be written; an existing one is unchanged.
        """
        parts = {"weights": State("weights", {}, self.weights), "optimiser": self.optimiser, "recipe": self.recipe}
        if self.best:
            weights = {"weights": State("weights", {}, self.best["weights"])}
            parts["best"] = State("best", {"evidence": self.best["evidence"]}, _tensors(self.best), weights)
        settings = {"epoch": self.epoch, "history": [asdict(epoch) for epoch in self.history]}
        write(path, State(FORMAT, settings, _tensors(vars(self)), parts))

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
    def _of(cls, state: State) -> TrainingState:
        """Return the training state from plain data, with all values checked that do not depend on a network."""
        unread = Unread()
        fields = state.read(
            epoch=Whole(), history=ListOf(_EPOCH), precision=PRECISION, noise=NOISE, weights=unread, optimiser=unread,
            recipe=unread, best=Maybe(unread),
        )  # fmt: skip
        count, size = fields["epoch"], fields["precision"].numel()
        fields["recipe"].read(  # raises for settings that are not possible
            optimiser=Text(tuple(OPTIMISERS)), seed=Whole(), epochs=Whole(max(1, count)), rate=ABOVE_ZERO,
            last_rate=ABOVE_ZERO, burn_in=Whole(), frequency=Whole(1), keep_best=Flag(), method=Text(),
            likelihood=Text(), prior=unread,
        )  # fmt: skip
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


def _weights(state: State) -> dict[str, Tensor]:
    if state.name != "weights" or state.settings or state.parts:
        raise FileError(f"the weights are a state {state.name!r:.40} with settings or parts; expected tensors alone")
    return dict(state.tensors)


def refuse_other_recipe(seen: State, own: State, done: int) -> None:
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


OTHER_PROCESS = 15_485_863  # between the seeds of two processes, above any number of epochs


def run(
    network: Network, modes: Sequence[bool], data: Data, likelihood: Likelihood, recipe: Recipe,
    resume: TrainingState | str | Path | None = None, checkpoint: str | Path | None = None,
) -> tuple[Posterior, TrainingState]:  # fmt: skip
    """Train the network's model; return the posterior at its best epoch and the state to resume from.

    ``modes`` says which of its modules the user had in training mode. ``data.progress`` shows one bar.

    The random numbers of an epoch depend only on the recipe's seed and the number of the epoch, so that a resumed
    run ends where an uninterrupted one would, and equal seeds and data give equal results.
    """
    processes = data.processes
    state: TrainingState | None = None
    if processes.is_main_process:
        state = TrainingState.load(resume) if isinstance(resume, str | Path) else resume
    state = processes.gather_values(state)[0]
    if checkpoint is not None and processes.is_main_process and not Path(checkpoint).absolute().parent.is_dir():
        raise FileError(f"there is no folder for the checkpoint {checkpoint}; expected one to write to.")
    trainer = _Trainer(network, modes, replace(data, progress=False), likelihood, recipe)
    if state is not None:
        trainer.resume(state)
    epochs = ProgressBar(range(trainer.done, recipe.epochs), "training", data.progress, trainer.done, leave=True)
    for number in epochs:
        trainer.epoch(number)
        epochs.show_text(trainer.status)
        if checkpoint is not None and processes.is_main_process:
            trainer.state.save(checkpoint)
    return trainer.outcome()


@dataclass(eq=False)
class _Trainer:
    """The mutable state of one training run."""

    network: Network
    modes: Sequence[bool]  # of all modules; the first is the model itself
    data: Data
    likelihood: Likelihood
    recipe: Recipe
    noise: Tensor | None = None
    best: dict[str, Any] = field(default_factory=dict)
    history: list[Epoch] = field(default_factory=list)
    done: int = 0

    def __post_init__(self) -> None:
        model, recipe = self.network.model, self.recipe
        self.stream = Stream(recipe.seed * 1_000_003, self.network.device)
        self.data = replace(self.data, stream=self.stream)
        if recipe.full_batch:  # L-BFGS compares gradients of several epochs
            self.data = self.data.requiring_same_rows()
        self.prior = recipe.prior.bound(self.network.selection, self.network.theta())
        if self.prior.needs_curvature:
            raise UnsupportedError(
                "a g-prior depends on the curvature, which changes during training; use per_layer()."
            )
        self.recipe_state = recipe.as_state(self.likelihood, self.prior)
        refuse_processes(recipe.method, self.data.processes)
        if recipe.update is not None:
            check_tuner(recipe.update)
        self.update = None if recipe.update is None else give_data(recipe.update, self.data)
        self.count = data_count(self.network, self.likelihood, self.data)
        tensors = dict(model.named_parameters())
        self.parameters = [tensors[name] for name in self.network.selection.names]
        self.means = self._by_parameter(torch.zeros_like(self.prior.vector) + self.prior.mean)
        self.optimiser = recipe.optimiser_for(p for p in model.parameters() if p.requires_grad)

    def resume(self, state: TrainingState) -> None:
        """Continue from this state; raise if it does not belong to the model and the recipe."""
        optimiser = self.optimiser.state_dict()  # its settings come from the recipe
        try:
            self._refuse_foreign(state)
            parameters = [p for p in self.network.model.parameters() if p.requires_grad]
            optimiser["state"] = unpack_optimiser(self.recipe.optimiser, state.optimiser, parameters)
        except FileError as error:
            raise DataError(
                f"this training state belongs to another model or recipe, or is damaged: {error}."
            ) from error
        self._restore(vars(state))
        self.optimiser.load_state_dict(copy.deepcopy(optimiser))  # steps change its tensors in place
        self.best, self.history, self.done = dict(state.best), list(state.history), state.epoch

    def _refuse_foreign(self, state: TrainingState) -> None:
        """Raise ``FileError`` if the state is of another recipe, or its weights are not those of the model."""
        for part in filter(None, (vars(state), state.best)):
            refuse_other_weights(part["weights"], self.network.model)
        refuse_other_recipe(state.recipe, self.recipe_state, state.epoch)
        for part in filter(None, (vars(state), state.best)):
            if part["precision"].shape != self.prior.values.shape:
                raise FileError(f"it has {part['precision'].numel()} precisions, the prior {self.prior.values.numel()}")
            if part["noise"] is not None and not self.likelihood.learns_dispersion:
                raise FileError(f"it has a learned noise, and {type(self.likelihood).__name__} has no noise to learn")

    def epoch(self, number: int) -> None:
        """Pass over the data once and update the hyperparameters if that is due."""
        self._seed(number)
        if self.data.share is not None:  # the part of this process may be another one in every epoch
            next_epoch(self.data.source, number)
            self.data = replace(self.data, readings=Readings())
        entry = Epoch(number, self._pass(number))
        if self.recipe.updates_after(number):
            entry = self._update_hyperparameters(entry)
        self.history.append(entry)
        self.done = number + 1

    def _pass(self, number: int) -> float:
        """Take one optimiser step for each batch and return the mean regularised loss."""
        # A module that was in evaluation mode stays in it, unless the whole model was.
        for module, training in zip(self.network.model.modules(), self.modes, strict=True):
            module.training = training or not self.modes[0]
        total, seen = 0.0, 0
        coefficients = self._by_parameter(self.prior.vector.detach())
        model, processes, own = self.network.model, self.data.processes, 0
        before = [buffer.clone() for buffer in model.buffers()] if processes.group is not None else []
        for step, size in self._steps(number):
            own += sum(batch.n_samples for batch in step)
            if not self.recipe.full_batch:
                rate = self.recipe.rate_at((number + min(seen / self.count, 1.0)) / self.recipe.epochs)
                for group in self.optimiser.param_groups:
                    group["lr"] = rate
            value = self._step(step, coefficients)
            self._refuse_not_finite(value, "training loss", number)
            total, seen = total + size * value, seen + size
        # The loss is computed before each step, so it does not show whether the last step was finite.
        self._refuse_not_finite(float(sum(p.detach().sum() for p in self.parameters)), "sum of the weights", number)
        average_buffers(model, processes, before, own)
        return total / max(seen, 1)

    def _steps(self, number: int) -> Iterator[tuple[tuple[Batch, ...], int]]:
        """Yield the batches of every step, and the number of data that all processes have for it.

        Some processes may have a batch more than others, which then take part without one.
        """
        batches = self.data.batches(f"epoch {number}", weighted=True)
        # L-BFGS compares losses and gradients of several evaluations, so all batches make one step.
        steps = iter([tuple(batches)]) if self.recipe.full_batch else ((batch,) for batch in batches)
        while True:
            step = next(steps, ())
            size = sum(self.data.processes.gather_numbers(sum(batch.n_samples for batch in step)))
            if not size:
                return
            yield step, size

    def _refuse_not_finite(self, value: float, what: str, number: int) -> None:
        if not math.isfinite(value):
            has_rate = not self.recipe.full_batch
            remedy = f"Lower the rate ({self.recipe.rate:g})" if has_rate else "Scale inputs and targets"
            raise NumericalError(
                f"the {what} is {value} in epoch {number}; expected a finite number. {remedy}; the last finite "
                "state is in the last checkpoint."
            )

    def _step(self, batches: tuple[Batch, ...], coefficients: list[Tensor]) -> float:
        """Take one optimiser step on these batches and return the loss before it."""

        def closure() -> Tensor:
            self.optimiser.zero_grad()
            with self.stream.drawing():  # checkpointed layers draw again in the backward pass
                value = self._objective(batches, coefficients)
                value.backward()
            return self._sum_over_processes(value)

        return float(torch.as_tensor(self.optimiser.step(closure)).detach())  # type: ignore[arg-type]

    def _objective(self, batches: tuple[Batch, ...], coefficients: list[Tensor]) -> Tensor:
        """Return the mean loss divided by the dispersion plus the prior's penalty divided by the number of data.

        Of several processes, each returns its part of the sum.
        """
        likelihood, processes = self.likelihood, self.data.processes
        likelihood = self.likelihood if self.noise is None else self.likelihood.with_dispersion(self.noise)
        losses, count = [], 0.0
        for batch in batches:
            f = with_output_dim(raw_output(self.network.model, batch.inputs, output=self.network.output))
            y = likelihood.targets(f, batch.targets)
            losses.append(weighted_loss(likelihood, f, y, batch.weights).sum())
            count += float(weighted_count(likelihood, f, y, batch.weights))
        count = sum(processes.gather_values(count))
        loss = torch.stack(losses).sum() / (count or 1) if losses else self.parameters[0].new_zeros(())
        terms = zip(coefficients, self.means, self.parameters, strict=True)
        penalty = torch.stack([(c * (p - m).square()).sum() for c, m, p in terms]).sum()
        return loss / likelihood.dispersion.to(loss) + 0.5 * penalty / (self.count * processes.size)

    def _sum_over_processes(self, value: Tensor) -> Tensor:
        """Return the objective of all processes, and make the gradients those of it."""
        if self.data.processes.group is None:
            return value
        parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        total, *gradients = self.data.processes.sum([value.detach().double(), *(p.grad for p in parameters)])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return total

    def _by_parameter(self, flat: Tensor) -> list[Tensor]:
        """Split a vector (P,) into tensors of the shapes of the parameters."""
        split = self.network.selection.split(flat)
        return [split[name].to(p) for name, p in zip(self.network.selection.names, self.parameters, strict=True)]

    def _fit(self) -> Posterior:
        """Fit the recipe's method at the present weights, prior and noise."""
        self.network.model.eval()
        self.network = replace(self.network)  # with a new private copy: training may have changed more than weights
        problem = Problem(self.network, self.likelihood, self.prior)
        posterior = self.recipe.method.fit(problem, self.data, torch.Generator().manual_seed(self.recipe.seed))
        if self.update is None:
            return posterior
        if not posterior.provides(Posterior.with_noise):
            raise UnsupportedError(f"{self.recipe.method!r} has no evidence to train with; use Kron() or Full().")
        if self.noise is not None:
            posterior = posterior.with_noise(self.noise)
        return posterior

    def _update_hyperparameters(self, entry: Epoch) -> Epoch:
        """Update prior and noise; if the tuner diverges, keep them and report it in the epoch's ``finding``."""
        posterior, finding = self._fit(), ""
        assert self.update is not None
        try:
            posterior = self.update(posterior)
        except DivergedError as error:
            finding = f"prior and noise kept: {error}"
        with torch.no_grad():
            evidence = float(posterior.log_evidence())
        same = self.data.processes.copy_of_first  # rounding may differ between machines
        self.prior = posterior.problem.prior.with_precision(*same([posterior.problem.prior.values.detach()]))
        self.noise = None if posterior.noise is None else same([posterior.noise.detach()])[0]
        if not self.best or evidence > self.best["evidence"] or not self.recipe.keep_best:
            self.best = {"evidence": evidence, **self._copy_weights()}
        noise = () if self.noise is None else tuple(self.noise.reshape(-1).tolist())
        precisions = tuple(self.prior.values.reshape(-1).tolist())
        return replace(entry, log_evidence=evidence, precisions=precisions, noise=noise, finding=finding)

    @property
    def status(self) -> str:
        """Loss, evidence and precisions, for the progress bar."""
        last = self.history[-1]
        updated = [epoch for epoch in self.history if epoch.log_evidence is not None]
        if not updated:
            return f"loss {last.loss:.4g}"
        values = updated[-1].precisions
        precision = f"{values[0]:.3g}" if len(values) == 1 else f"{min(values):.2g}..{max(values):.2g}"
        return f"loss {last.loss:.4g}, log evidence {updated[-1].log_evidence:.6g}, precision {precision}"

    @property
    def state(self) -> TrainingState:
        """A copy on the CPU of everything needed to resume after the last finished epoch."""
        optimiser = pack_optimiser(self.recipe.optimiser, self.optimiser)
        return TrainingState(
            self.done, optimiser=optimiser, recipe=self.recipe_state, best=self.best, history=tuple(self.history),
            **self._copy_weights(),
        )  # fmt: skip

    def _copy_weights(self) -> dict[str, Any]:
        """Return a copy on the CPU of weights, precision and noise."""
        return {
            "weights": {name: value.detach().clone().cpu() for name, value in self.network.model.state_dict().items()},
            "precision": self.prior.values.clone().cpu(),
            "noise": None if self.noise is None else self.noise.clone().cpu(),
        }

    def _restore(self, copied: Mapping[str, Any]) -> None:
        """Take weights, precision and noise from a copy."""
        self.network.model.load_state_dict(copied["weights"])
        self.prior = self.prior.with_precision(copied["precision"].to(self.network.device))
        self.noise = None if copied["noise"] is None else copied["noise"].to(self.network.device)

    def _seed(self, epoch: int) -> None:
        """Start the random numbers of an epoch, which dropout and loaders draw; each process has its own."""
        self.stream.restart(self.recipe.seed * 1_000_003 + epoch + OTHER_PROCESS * self.data.processes.rank)

    def outcome(self) -> tuple[Posterior, TrainingState]:
        """Return the posterior under weights, prior and noise of the best epoch, and the state after the last."""
        state = self.state
        if self.best:
            self._restore(self.best)
        self._seed(self.recipe.epochs)
        return self._fit(), state
