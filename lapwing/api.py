"""The front door: a model and its data in, a posterior with error bars out."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lapwing import files, training
from lapwing.crossfit import Sibling
from lapwing.data.batches import Data, cut_for_training
from lapwing.data.known_rows import KnownRows
from lapwing.data.processes import Processes, in_all_processes
from lapwing.errors import UnsupportedError
from lapwing.fitted import Fitted
from lapwing.fitting import FitInProgress, likelihood_for
from lapwing.likelihoods.base import Likelihood
from lapwing.methods.base import Method, OverNetworks
from lapwing.networks.fingerprint import Fingerprint, refuse_other_models, structure_of
from lapwing.networks.forward import (
    arithmetic_of,
    device_of,
    extract_data,
    extract_network,
    outside_autocast,
    path_of,
    unwrap,
)
from lapwing.networks.network import Network
from lapwing.networks.selection import Weights
from lapwing.priors import Prior
from lapwing.recipes import Recipe, online
from lapwing.registry import Auto, find_method, find_weights
from lapwing.runtime.settings import GENERATOR, NONE, PATH, Rule
from lapwing.runtime.threads import Stream, should_show_progress, with_inner_progress
from lapwing.training import Epoch, TrainingState
from lapwing.tuners.base import Tuner, check_tuner


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
            time; ``lw.check(model, batch)`` lists the costs of all. A name, such as "full", is a method with its
            default settings.
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
        progress: Whether to show progress bars (needs tqdm); None shows them on a terminal.
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
    (Rule("the state of a run", lambda v: isinstance(v, TrainingState)) | PATH | NONE).check("resume", resume)
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
