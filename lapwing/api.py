"""The front door: a model and its data in, a posterior with error bars out; and the steps of a fit between them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lapwing import files, training
from lapwing.data.batches import Data, Weighted, cut_for_training
from lapwing.data.inputs import Batch, Inputs
from lapwing.data.known_rows import KnownRows
from lapwing.data.processes import Processes, in_all_processes
from lapwing.decisions.collecting import warn_of_units
from lapwing.errors import UnsupportedError
from lapwing.fitted import Fitted
from lapwing.likelihoods.base import Likelihood, expand_weights
from lapwing.methods.base import Method, OverNetworks, refuse_processes, workload_of
from lapwing.methods.weight_space import Diagonal, Full, KernelSpace, Kron
from lapwing.networks.examine import EXAMINED_SAMPLES
from lapwing.networks.fingerprint import Fingerprint, refuse_other_models, structure_of
from lapwing.networks.forward import (
    arithmetic_of,
    device_of,
    extract_data,
    extract_network,
    loss_of_model,
    outside_autocast,
    path_of,
    unwrap,
)
from lapwing.networks.graph import UNUSED
from lapwing.networks.network import Network
from lapwing.networks.normalised import group_names, scale_free_groups
from lapwing.networks.selection import Weights
from lapwing.posteriors.base import MANY_OUTPUTS, Posterior
from lapwing.posteriors.weight_space import beliefs_at
from lapwing.priors import Prior
from lapwing.problem import (
    Problem,
    check_named_targets,
    check_targets,
    check_targets_for,
    first_samples,
    mean_squared_residual,
)
from lapwing.recipes import Recipe, online
from lapwing.registry import Auto, find_likelihood, find_method, find_weights, prior_for
from lapwing.runtime.settings import GENERATOR, NONE, PATH, of_class
from lapwing.runtime.threads import Stream, independent_generator, should_show_progress, uniform, with_inner_progress
from lapwing.training import Epoch, TrainingState
from lapwing.tuners import offsets
from lapwing.tuners.base import MaximiseEvidence, Tuner, check_tuner, follows_evidence, run_tuner, start_near_optimum
from lapwing.tuners.linear_mode import SampleEM
from lapwing.tuners.mixing import Budget, Integrate

if TYPE_CHECKING:
    from lapwing.crossfit import Sibling

EXACT_SIZE = 4096  # weights or rows up to which the default for Gaussian noise includes the exact posterior
EXACT_ROWS = 600  # data that it is computed from, if there are more
COMPARED_ROWS = 200  # data at which the two are compared
FEW_OUTPUTS = 3  # of an input, up to which a Jacobian of so many data is small
EXACT_BYTES = 2**30  # bytes of the rows of a Jacobian for it
ROWS_FOR_UNITS = 512  # validation data whose residuals are compared with those of the training data
MIN_REST = 1e-3  # of a variance that its own datum leaves: rounding is not divided by
SIZE_SAMPLES = 4  # samples from which ``Auto`` reads the sizes of a network


@outside_autocast
@with_inner_progress
@torch.inference_mode(False)  # what is kept must be able to take part in a gradient later
@in_all_processes
def fit(
    model: nn.Module,
    data: Iterable[object] | None,
    likelihood: Likelihood | str,
    *,
    method: Method | OverNetworks | Auto | str | None = None,
    weights: Weights | str | None = None,
    prior: Prior | float | None = None,
    validation: Iterable[object] | Sibling | None = None,
    tuner: Tuner | None = None,
    target_key: str | None = None,
    output: str | int | tuple[str | int, ...] | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
    process_group: Any = None,
) -> Fitted:
    """Fit a posterior around the trained weights of a network. The model is not changed.

    Args:
        model: The trained network, in evaluation mode; or a skorch net, a Lightning module or a Lightning Trainer
            after training, in any mode.
        data: The training data: a DataLoader, a list of ``(inputs, targets)`` batches, a list of mappings that hold
            their target, a Dataset, or one pair ``(inputs, targets)`` of tensors, NumPy arrays or data frames, whose
            floating-point inputs get the dtype of the model. It is read several times. ``lw.samples.weighted`` gives
            samples weights. Also a Lightning data module; None for the training data of a Trainer.
        likelihood: ``lw.Categorical()``, ``lw.Gaussian()``, ``lw.Bernoulli()``, ``lw.Poisson()``,
            ``lw.HeteroscedasticGaussian()``, or a name: "classification", "regression", "binary", "multilabel",
            "counts", "heteroscedastic". The network's outputs are logits, means or log-rates.
        method: How the posterior is computed; ``lw.Kron()`` if None, which costs about as much as a few epochs of
            training. ``lw.Full()`` is exact and needs 8 P² bytes; ``lw.Auto()`` (or "auto") chooses by memory and
            time; ``lw.check(model, batch)`` says what they cost. A name, such as "full", is a method with its default
            settings.
        weights: Which weights are uncertain: ``lw.all_weights`` (default), ``lw.last_layer`` (cheaper by far),
            ``lw.named(pattern)``, ``lw.subnetwork(index)``, or a choice of ``lw.subnetworks``; "all" and
            "last_layer" are accepted as names.
        prior: The Gaussian prior over the weights: an object such as ``lw.per_layer()``, or a number for an isotropic
            precision. Used as given. None learns an isotropic precision with ``tuner``.
        validation: Data that the network was not trained on, in the form of ``data``; 200 or more are enough to set the
            width of the error bars. The posterior is then a mixture over precisions and, for classification, softmax
            temperatures and an offset of the logits, or noise and tails for regression (``lw.tuners.Integrate``), and
            ``posterior.summary()`` compares it with the plain network. Cost: a forward pass and one or two passes over
            these data. A given prior is kept. ``lw.sibling(train_fn)`` stands for such data: one more training, and no
            row given up.
        tuner: Learns the precision in another way: an object from ``lw.tuners``, such as ``MaximiseEvidence()``, the
            naive evidence. Without one, a precision from the evidence (about ten factorisations, no data) is the
            centre of a mixture: over ``validation``, or, without such data, a guarded one close to the plain network
            (``lw.tuners.Budget``; for Gaussian noise half the plain network, Student tails and, up to 4,096 weights or
            rows and 256 outputs of an input, the exact posterior as one part). With a given prior only a tuner that is
            given runs, from that prior.
        target_key: The key of the target in batches that are mappings; "labels", "label", "targets", "target" and "y"
            are recognised without it.
        output: For a model that returns a dictionary, an object or a tuple, which part has the outputs: a key or the
            name of an attribute, a position, or a tuple of them for parts inside parts. None takes ``logits`` if there
            are any. Weights that this part does not depend on are left out. Files hold the choice.
        generator: The source of randomness for methods that draw; a fixed seed if None, so equal calls give equal
            results.
        progress: Whether to show progress bars (needs tqdm); None shows them on a terminal. Where there are none, long
            fits say every half minute where they are, as INFO of the logger "lapwing.progress".
        process_group: The processes that fit together, such as ``torch.distributed.group.WORLD`` under torchrun: each
            calls ``fit`` with its part of the data (``lw.samples.Part``), and all get the same posterior. None, the
            default, is this process alone. See docs/scale.md.

    Returns:
        A ``Fitted`` posterior: ``predict(x)`` for the predictive over y, ``functions(x)`` for the belief about f(x).

    Raises:
        DataError: If data are empty, not finite, or do not fit the likelihood, or all validation data are training data
            (some of them are a ``CalibrationWarning``).
        ModelError: If the model is in training mode, mixes samples, is random, or has no parameters.
        UnsupportedError: If the combination does not exist; the message names the way to get there.
        DivergedError: If the precision has no optimum.
        ProcessError: If one of several processes fails, in all of them.

    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> posterior = fit(net, [(x, x.sin())], "regression")
    >>> posterior.predict(x[:3]).std.shape
    torch.Size([3, 1])
    """
    if validation is not None and tuner is not None:
        raise UnsupportedError(
            "validation data and a tuner were given; expected one of them. With validation data the hyperparameters "
            "are integrated by lw.tuners.Integrate; give that tuner itself to change its settings."
        )
    GENERATOR.check("generator", generator)
    from lapwing.crossfit import Sibling  # it takes the steps below itself

    if isinstance(validation, Sibling):
        if process_group is not None:
            raise UnsupportedError("validation=lw.sibling(...) works in one process; expected no process_group.")
        return validation.crossfit(
            model, data, likelihood, method=method, weights=weights, prior=prior, target_key=target_key, output=output,
            progress=progress,
        ).posterior  # fmt: skip
    model, data = extract_network(model), extract_data(model, data)
    processes = Processes.of(process_group)
    generator = processes.common_generator(generator)
    chosen = find_method(method)
    if tuner is not None:
        check_tuner(tuner)
    run = FitInProgress(
        model, data, likelihood, processes, generator, chosen, weights, prior, validation, tuner, target_key, output,
        progress, method is None,
    )  # fmt: skip
    return run.over_networks(chosen) if isinstance(chosen, OverNetworks) else run.run()


@outside_autocast
@torch.inference_mode(False)  # as for fit
@in_all_processes
def train(
    model: nn.Module,
    data: Iterable[object],
    likelihood: Likelihood | str,
    *,
    recipe: Recipe | None = None,
    weights: Weights | str | None = None,
    target_key: str | None = None,
    output: str | int | tuple[str | int, ...] | None = None,
    resume: TrainingState | str | Path | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    process_group: Any = None,
) -> Trained:
    """Train a copy of a network with the evidence choosing the regularisation; no validation data are needed.

    Args:
        model: The network to start from; it is not changed.
        data: The training data, as for ``fit``. Every batch is a step; one pair of tensors or arrays is cut into
            batches of 256 rows, in another random order in every epoch.
        likelihood: As for ``fit``.
        recipe: ``lw.recipes.online()`` (Kronecker evidence, the default) or ``lw.recipes.classic()`` (MacKay's loop,
            for small networks), with their settings. Cost: that of training, and a fit after every epoch.
        weights: Which weights the evidence counts; all by default.
        target_key: As for ``fit``.
        output: As for ``fit``; the loss is that of this output alone.
        resume: A state of an earlier run, or the file of its checkpoint. The run then ends where an uninterrupted one
            would, unless a loader draws from a generator of its own, which only its owner can reset.
        checkpoint: A file that is written after every epoch.
        progress: Whether to show progress bars; None shows them on a terminal.
        process_group: As for ``fit``: a step takes one batch of each process, and gradients are summed. The first
            process reads and writes the checkpoint.

    Returns:
        A ``Trained``: the trained copy in evaluation mode, its posterior, its history and the state to resume from.

    Raises:
        DataError: If data are empty, not finite, or do not fit the likelihood.
        UnsupportedError: If the recipe does not fit the likelihood.
        NumericalError: If the loss is not finite.
        ProcessError: If one of several processes fails, in all of them.

    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> from lapwing.recipes import classic
    >>> trained = train(net, [(x, x.sin())], "regression", recipe=classic(epochs=5))
    >>> trained.posterior.predict(x[:3]).std.shape
    torch.Size([3, 1])
    """
    (PATH | NONE).check("checkpoint", checkpoint)
    (of_class("the state of a run", TrainingState) | PATH | NONE).check("resume", resume)
    device, processes = device_of(model), Processes.of(process_group)
    shown = should_show_progress(progress) and processes.is_main_process
    dtype = arithmetic_of(model)
    source = cut_for_training(data, dtype)
    batches = Data(
        source, device, target_key, shown, stream=Stream(0, device), processes=processes, dtype=dtype, keep_sketch=True
    )
    several = batches.peek()[1]
    refuse_other_models(unwrap(model), processes)
    recipe = online() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise UnsupportedError(f"recipe is {recipe!r:.80}; expected online(...), classic(...) or a Recipe.")
    copied, chosen_weights = copy.deepcopy(unwrap(model)).eval(), find_weights(weights)
    network = Network.build(copied, several.inputs, chosen_weights, path_of(output))
    chosen = likelihood_for(likelihood, network, several, network(several.inputs))
    if chosen.needs_residuals:
        raise UnsupportedError("training learns one noise for all outputs; use Gaussian(), and per_output in fit().")
    modes = [module.training for module in unwrap(model).modules()]
    before = structure_of(network.model)
    posterior, state = training.run(network, modes, network.arrange_data(batches), chosen, recipe, resume, checkpoint)
    fingerprint, rows = Fingerprint.of(network.model, before), KnownRows(batches.sketch())
    fitted = Fitted(posterior, fingerprint, type(recipe.method).__name__, "", processes, rows)
    return Trained(network.model, fitted, state.history, state)


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network, its posterior, the history of its epochs, and the state to resume from."""

    model: nn.Module
    posterior: Fitted
    history: tuple[Epoch, ...]
    state: TrainingState


@outside_autocast
def load(path: str | Path, model: nn.Module) -> Fitted:
    """Read a saved posterior for ``model``, which must have the weights that it was fitted to.

    Args:
        path: A file written by ``posterior.save(path)``.
        model: The network, on the device and in the dtype that the posterior shall have.

    Raises:
        FileNotFoundError: If there is no such file.
        FileError: If the file is damaged, foreign, or belongs to a model with other weights.
        ModelError: If the model is in training mode.

    >>> import tempfile
    >>> x, net = torch.linspace(-1, 1, 40).unsqueeze(1), nn.Linear(1, 1)
    >>> posterior = fit(net, [(x, x.sin())], "regression")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     posterior.save(f"{folder}/net.lapwing")
    ...     again = load(f"{folder}/net.lapwing", net)
    >>> torch.allclose(again.predict(x).std, posterior.predict(x).std)
    True
    """
    PATH.check("path", path)
    model = extract_network(model)
    device_of(model)
    posterior, fingerprint, about = files.load(path, model)
    return Fitted(posterior, fingerprint, about.method, about.why, rows=about.rows, columns=about.columns)


def problem_of(
    model: nn.Module, data: Data, likelihood: Likelihood | str, weights: Weights | str | None,
    prior: Prior | float | None, output: tuple[str | int, ...] = (),
) -> Problem:  # fmt: skip
    """Look at the model with the first batch, and return network, likelihood and prior; raise if they do not fit."""
    first, several = data.peek()
    network = Network.build(model, several.inputs, find_weights(weights), output)
    refuse_other_models(network.model, data.processes)
    few = first_samples(network, first, EXAMINED_SAMPLES)  # the pass over the data checks all
    f = network(few.inputs)
    chosen = likelihood_for(likelihood, network, few, f)
    check_targets_for(network, chosen, f, network.arrange_targets(few).targets)
    if chosen.needs_residuals:
        chosen = chosen.prepared(mean_squared_residual(network, chosen, network.arrange_data(data)))
    given = prior_for(1.0 if prior is None else prior)
    groups = group_names(network, scale_free_groups(network, first.inputs)) if given.needs_groups else None
    groups = data.processes.gather_values(groups)[0] if given.needs_groups else None
    return Problem(network, chosen, given.bound(network.selection, network.theta(), groups), prior is None)


def likelihood_for(given: Likelihood | str, network: Network, batch: Batch, f: Tensor) -> Likelihood:
    """Return the likelihood, or the one that a name stands for; raise if the outputs f of the batch do not fit it.

    "classification" with one output is binary. The loss of a model that takes labels must be that of the likelihood.
    """
    is_binary = isinstance(given, str) and given == "classification" and f.shape[-1] == 1
    likelihood: Likelihood = find_likelihood("binary" if is_binary else given)
    likelihood.check_outputs(f.flatten(0, 1) if network.image else f)  # the channels of images are known
    likelihood.check_last(network.last_operation)
    own = None if network.output else loss_of_model(network.replica, batch, network.plain_kernels)
    if own is not None:  # with a chosen output its loss may be that of another
        likelihood.check_loss(f, network.arrange_targets(batch).targets, own)
    return likelihood


@dataclass(eq=False, repr=False)
class FitInProgress:
    """The arguments of a call of ``fit``, and the results of its steps so far; see ``STEPS``."""

    model: nn.Module
    source: Iterable[object]
    likelihood: Likelihood | str
    processes: Processes
    generator: torch.Generator | None
    method: Method | Auto
    weights: Weights | str | None
    prior: Prior | float | None  # None: to be learned
    validation: Iterable[object] | None
    tuner: Tuner | None
    target_key: str | None
    output: str | int | tuple[str | int, ...] | None
    progress: bool | None
    is_default: bool  # whether no method was asked for

    structure: dict[tuple[str, str], object] = field(init=False)  # of the model before anything runs it
    data: Data = field(init=False)
    held_out: Data | None = field(init=False, default=None)  # the validation data
    problem: Problem = field(init=False)
    chosen: Method = field(init=False)
    why: str = field(init=False, default="")  # the reason of ``Auto``
    late_tuner: Tuner | None = field(init=False)  # the tuner, unless it learned the prior beforehand
    first: offsets.FirstOutputs | None = field(init=False, default=None)  # the first outputs of the pass
    posterior: Posterior = field(init=False)
    reused: offsets.Reused = field(init=False)

    def run(self, steps: Iterable[Callable[[FitInProgress], None]] | None = None) -> Fitted:
        """Take all steps, or some of them, and return the result."""
        for step in STEPS if steps is None else steps:
            step(self)
        fingerprint = Fingerprint.of(self.posterior.problem.network.model, self.structure)
        name = type(self.chosen).__name__
        return Fitted(self.posterior, fingerprint, name, self.why, self.processes, self.reused.rows)

    def over_networks(self, method: OverNetworks) -> Fitted:
        """Fit the method that ``method`` combines to each of its networks, and return their combination."""
        refuse_processes(method, self.processes)
        each = [
            replace(self, model=model, method=method.method, is_default=False).run()
            for model in method.networks(self.model)
        ]
        combined = method.combine([fitted.posterior for fitted in each])
        return replace(each[0], posterior=combined, method=type(method).__name__)


def open_data(run: FitInProgress) -> None:
    """Wrap the training and validation data, which are read on the device and in the dtype of the model."""
    shown = should_show_progress(run.progress) and run.processes.is_main_process
    device, dtype = device_of(run.model), arithmetic_of(run.model)
    run.data = Data(run.source, device, run.target_key, shown, processes=run.processes, dtype=dtype, keep_sketch=True)
    run.structure = structure_of(unwrap(run.model))  # the lines above refuse what is not a model
    run.held_out = None if run.validation is None else run.data.with_source(run.validation, "validation")


def build_problem(run: FitInProgress) -> None:
    """Examine the model with the first batch: network, likelihood and prior, for the weights of the method."""
    weights = run.method.weights if run.weights is None and isinstance(run.method, Method) else run.weights
    run.problem = problem_of(run.model, run.data, run.likelihood, weights, run.prior, path_of(run.output))
    run.data = run.problem.network.arrange_data(run.data)


def choose_method(run: FitInProgress) -> None:
    """Take the method that was asked for, or the choice of ``Auto``; refuse one that works in one process alone."""
    if isinstance(run.method, Auto):
        run.chosen, run.why = choose_by_cost(run.method, run.problem, run.data)
    else:
        run.chosen = run.method
    refuse_processes(run.chosen, run.processes)


def check_validation(run: FitInProgress) -> None:
    """Check all validation data before the pass over the training data; a method that learns in steps stops by them."""
    if run.held_out is None:
        return
    run.held_out = run.problem.network.arrange_data(run.held_out)
    run.held_out.peek()
    for batch in run.held_out.batches("checking validation data", weighted=True):
        check_named_targets(run.problem.network, run.problem.likelihood, batch, run.held_out.name)
    run.chosen = run.chosen.with_early_stopping(run.held_out)


def learn_needed_prior(run: FitInProgress) -> None:
    """Learn the prior beforehand for a method without an evidence; a tuner that follows the evidence runs later."""
    run.late_tuner = run.tuner
    if not run.chosen.needs_prior:
        return
    run.late_tuner = run.tuner if follows_evidence(run.tuner) else None
    tuner = None if run.late_tuner else run.tuner
    if run.problem.learn_prior:
        method = Kron() if run.problem.network.selection.index is None else Diagonal()
        early = method.fit(run.problem, run.data, run.generator)
        run.problem = learn_precision(early, tuner, run.data).problem.with_known_prior()
    elif tuner is not None:
        raise UnsupportedError(
            "this method has no evidence for a tuner to use, and the prior was given; leave out the tuner, or the "
            "prior, which is then learned beforehand."
        )


def compute_posterior(run: FitInProgress) -> None:
    """Make the pass over the training data, which also keeps the first outputs where nothing else shows a bias."""
    run.first = offsets.first_outputs(run.problem, run.data) if run.held_out is None else None
    run.posterior = run.chosen.fit(run.problem, run.data, run.generator)


def tune(run: FitInProgress) -> None:
    """Learn the prior's precision by the evidence, or by the tuner that was given."""
    if run.posterior.problem.learn_prior and run.posterior.provides(Posterior.log_evidence):
        run.posterior = learn_precision(run.posterior, run.late_tuner, run.data)
    elif run.late_tuner is not None:
        run.posterior = run_tuner(run.late_tuner, run.posterior, run.data)


def look_for_reused_rows(run: FitInProgress) -> None:
    """Compare the rows of held-out data with those of the training data; raise if all are the same."""
    rows = KnownRows(run.data.sketch())
    if run.held_out:
        run.reused = offsets.note_reuse(rows, run.held_out, "validation data", refuses=True)
    else:
        run.reused = offsets.with_held_out(rows, run.tuner, run.problem.network, run.processes)


def average(run: FitInProgress) -> None:
    """Average over hyperparameters: by validation data, or guarded without; compare with the plain network."""
    if run.held_out is not None:
        run.posterior = Integrate(run.held_out, None if run.prior is None else ())(run.posterior)
    elif run.tuner is not None and run.posterior.linearised:
        run.posterior = offsets.warn_if_worse_than_plain(run.posterior, run.data)
    elif run.prior is None and run.posterior.linearised:
        is_averaged = run.is_default and run.problem.likelihood.has_tails
        other = exact_component(run.posterior, run.data, run.generator) if is_averaged else None
        others, scales = ((other[0],), (other[1],)) if other else ((), ())
        run.posterior = Budget(run.data, others=others, scales=scales)(run.posterior)


def note_findings(run: FitInProgress) -> None:
    """Add what was noticed: biased classes, loaders that change, rows used twice, other units, unused weights."""
    network, likelihood = run.problem.network, run.posterior.base.problem.likelihood
    posterior = offsets.warn_if_biased(run.posterior, run.data, run.first)
    held_out = run.held_out.findings if run.held_out else ()
    remarks = (*run.data.findings, *held_out, *run.reused.findings, *_unused_parameters(network))
    if run.held_out is not None and likelihood.noise_variance is not None:
        held = offsets.HeldOutputs.of(network, likelihood, run.held_out, ROWS_FOR_UNITS)
        remarks += warn_of_units(posterior, held.f, held.y - held.f, run.held_out.name)
    posterior.prepare()  # samples are solved by the fit, and a process can predict without the others
    everywhere = (remark for each in run.processes.gather_values(remarks) for remark in each)
    run.posterior = offsets.with_findings(posterior, tuple(dict.fromkeys(everywhere)))


def _unused_parameters(network: Network) -> tuple[str, ...]:
    """Return a remark if no output follows some of the chosen parameters."""
    names = [name for block in network.layout if block.why == UNUSED for name in block.names]
    if not names:
        return ()
    which = f"{names[0]!r}" + (f" and {len(names) - 1} more of the chosen parameters" if names[1:] else "")
    return (
        f"the outputs for the first batch do not follow {which}, so error bars leave them out: forward does not use "
        "them, or uses a copy that it made earlier, without gradients. If it does, make the copy in every forward.",
    )


STEPS: tuple[Callable[[FitInProgress], None], ...] = (
    open_data, build_problem, choose_method, check_validation, learn_needed_prior, compute_posterior, tune,
    look_for_reused_rows, average, note_findings,
)  # fmt: skip


def choose_by_cost(auto: Auto, problem: Problem, data: Data) -> tuple[Method, str]:
    """Return the method that ``Auto`` chooses, and the reason for it."""
    network, selection = problem.network, problem.network.selection
    rows, few = 0, None
    for batch in data.batches("counting", weighted=True):
        few = network.take(batch.inputs, slice(0, SIZE_SAMPLES)) if few is None else few
        # Ignored data count too: they have rows of zeros in a design.
        rows += check_targets(network, problem.likelihood, batch)[0].numel()
    rows, few = sum(data.processes.gather_numbers(rows)), data.processes.first_available(few)
    workload = workload_of(network, few, max(1, rows // torch.Size(network.output_shape).numel()))
    classes = problem.likelihood.has_logits
    choice = auto.on(network.device).choose(
        selection.size, rows, workload.single, problem.learn_prior, workload, classes
    )
    return choice.method, choice.why


def learn_precision(posterior: Posterior, tuner: Tuner | None, data: Data) -> Posterior:
    """Return the posterior with its prior learned, starting near the optimum.

    A tuner that varies hyperparameters around those of the evidence runs after the evidence.
    """
    tuned = start_near_optimum(posterior)
    if tuner is None or follows_evidence(tuner):
        default = SampleEM(mode="network") if posterior.is_sampled else MaximiseEvidence()
        tuned = default(tuned)
    if tuner is not None:
        tuned = run_tuner(tuner, tuned, data)
    tuned = _as_in_first_process(tuned, data.processes)
    return tuned if tuned.trace is None else tuned.with_trace(tuned.trace.after(posterior.trace))


def _as_in_first_process(posterior: Posterior, processes: Processes) -> Posterior:
    """Return the posterior under the prior and noise of the first process: rounding may differ between machines."""
    if processes.group is None or not posterior.provides(Posterior.with_noise):
        return posterior
    values, noise = posterior.problem.prior.values, posterior.noise
    own = [values.detach()] if noise is None else [values.detach(), noise.detach()]
    first = processes.copy_of_first(own)
    if processes.all_true(all(map(torch.equal, own, first))):
        return posterior
    posterior = posterior.with_problem(posterior.problem.with_precisions(first[0]))
    return posterior if noise is None else posterior.with_noise(first[1])


def exact_component(
    posterior: Posterior, data: Data, generator: torch.Generator | None
) -> tuple[Posterior, float] | None:
    """Return the exact posterior that the default for Gaussian noise averages with ``Kron``, and the factor of its V.

    None if the problem is too large for it. ``Kron`` is too narrow where networks are trained for long, the exact
    posterior where they are not. Of more than ``EXACT_ROWS`` data it takes so many, drawn at random, each of which
    counts for several: with all it would cost more than the training.
    """
    problem, statistics = posterior.problem, posterior.statistics
    size, outputs = problem.network.selection.size, statistics.outputs
    rows = statistics.data * outputs
    if torch.Size(problem.network.output_shape).numel() > MANY_OUTPUTS:  # each takes a backward pass for every input
        return None
    counted = data.processes.all_true(not data.has_weights)  # a sum of weights does not say how many rows there are
    small = size <= EXACT_SIZE or (counted and rows <= EXACT_SIZE)
    method: Method = KernelSpace()
    if (
        small
        and EXACT_ROWS * outputs < size
        and outputs <= FEW_OUTPUTS
        and 8 * EXACT_ROWS * outputs * size <= EXACT_BYTES
    ):
        data = _draw_rows(problem.network, data, EXACT_ROWS / statistics.data, generator)
    elif size <= EXACT_SIZE:
        method = Full()
    elif not (
        small and rows <= size and 8 * rows * size <= EXACT_BYTES and data.processes.all_true(data.is_repeatable())
    ):
        return None
    exact = learn_precision(method.fit(problem, data, generator), None, data)
    apart = problem.network.normalised or statistics.data > 2 * EXACT_ROWS
    return exact, _agreed_scale(posterior, exact, data) if apart else 1.0


def _draw_rows(network: Network, data: Data, share: float, generator: torch.Generator | None) -> Data:
    """Return a share of the data, drawn at random and kept in memory, which count as often as all; all if it is one."""
    generator = independent_generator(generator)
    batches, total, kept = list[tuple[Inputs, Tensor, Tensor]](), 0.0, 0.0
    for batch in data.batches("reading", weighted=True):
        weights = torch.ones(batch.n_samples, dtype=torch.float64) if batch.weights is None else batch.weights
        drawn = uniform((len(weights),), generator, weights) < share
        total, kept = total + float(weights.sum()), kept + float(weights[drawn].sum())
        rows = drawn.nonzero().flatten()
        if len(rows):
            targets = batch.targets[rows.to(batch.targets.device)]
            batches.append((network.take(batch.inputs, rows), targets, weights[drawn]))
    total, kept = (sum(data.processes.gather_values(number)) for number in (total, kept))
    if not kept:
        return data
    each = total / kept
    weighted = each != 1 or data.has_weights
    source = [(x, Weighted(y, weights * each) if weighted else y) for x, y, weights in batches]
    return Data(source, data.device, progress=data.progress, processes=data.processes)


def _agreed_scale(posterior: Posterior, exact: Posterior, data: Data) -> float:
    """Return the factor of the exact covariance that makes its median the geometric mean of both; 1 at most.

    The exact variances compared are those at data left out: a datum of leverage h had V / (1 - h) without itself. Where
    norms cancel the scale of weights, the evidence for that scale means little, and where few of the data are looked
    at, directions that others determine are missing: the exact variances are then up to a hundred times too large.
    """
    # Not at the first batch: a process may have none.
    for each in () if data.processes.is_single_process else (posterior, exact):
        each.prepare()
    variances, count = list[Tensor](), 0
    phi = exact.problem.likelihood.noise_variance
    assert phi is not None  # the noise is Gaussian
    for batch in data.batches("comparing variances", weighted=True):
        wide, own = (belief.variance.double() for belief in beliefs_at([posterior, exact], batch.inputs))
        weights = 1.0 if batch.weights is None else expand_weights(batch.weights, own)
        left_out = own / (1 - weights * own / phi.to(own)).clamp_min(MIN_REST)
        variances.append(torch.stack([wide.flatten(), left_out.flatten()], 1))
        count += batch.n_samples
        if count >= COMPARED_ROWS:
            break
    everywhere = data.processes.gather_rows(torch.cat(variances) if variances else None)
    assert everywhere is not None
    wide, own = everywhere.median(0).values.tolist()
    return math.sqrt(min(1.0, wide / own)) if own > 0 else 1.0
