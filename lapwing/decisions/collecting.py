"""Numbers of every datum of a loader, from predictions and targets of the same pass.

A loader that shuffles gives other rows at the next pass, so predictions and targets are never read apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.data.batches import Data, is_pair, refuse_unequal
from lapwing.data.inputs import Batch, Inputs, as_tensors, has_places, merge_batches
from lapwing.errors import DataError, UnsupportedError, warn_caller
from lapwing.networks.network import Network
from lapwing.predictives.scores import Scoring
from lapwing.problem import check_named_targets
from lapwing.runtime.settings import DATA, describe
from lapwing.runtime.threads import should_show_progress

if TYPE_CHECKING:
    from lapwing.fitted import Fitted
    from lapwing.posteriors.base import Posterior


@dataclass(frozen=True, eq=False)
class LabelledBatch:
    """A batch with its targets as the likelihood takes them."""

    inputs: Inputs
    targets: Tensor
    known: Tensor  # whether each target counts, in the shape of the targets


def label_batch(posterior: Fitted, batch: Batch, name: str) -> LabelledBatch:
    """Return a batch on the device of the posterior, with targets that fit its likelihood.

    Raises:
        DataError: If targets do not fit, or are probabilities of classes: a soft target is neither right nor wrong.
    """
    network, likelihood = posterior.network, posterior.likelihood
    batch = network.arrange_targets(batch.to(network.device))
    y = check_named_targets(network, likelihood, batch, name)
    if likelihood.ignores_common_shift and y.is_floating_point():
        raise DataError(
            f"{name}: targets are probabilities of the classes, {describe(y)}; expected class numbers: a soft target "
            "is neither right nor wrong. Give the most probable classes, such as y.argmax(1)."
        )
    return LabelledBatch(batch.inputs, y, ~likelihood.ignored(y))


def source_of(
    network: Network, data: Iterable[object], name: str, target_key: str | None, progress: bool | None
) -> Data:
    """Return the data of a decision; reading them leaves a sketch of the rows."""
    DATA.check(name, data)
    shown = should_show_progress(progress)
    return Data(data, network.device, target_key, shown, name, dtype=network.arithmetic, keep_sketch=True)


def batches_of(network: Network, source: Data) -> Iterator[Batch]:
    """Yield the batches of a loader; small ones are joined for one pass of the network."""
    return merge_batches(source.batches(source.name), network.batch_size_for)


# What follows if data were used before. A decision records nothing, so that the same data may serve several decisions.
VOID, WORSE = "The guarantee does not hold for such data.", "Scores of new data are worse than these."
FAR = 100.0  # times the residual variance of the training data
APART = 10.0  # times what the outputs vary: a network that interpolates has small residuals on its training data alone
LEAST = 20  # data of an output below which its variance says little


def training_residuals(posterior: Fitted | Posterior) -> Tensor | None:
    """Return the mean squared residual of each output on the training data, (C,); None without Gaussian noise.

    It follows from the loss that every posterior keeps, also in its file, and not from the noise, which may be given.
    """
    base = posterior.base
    likelihood = base.problem.likelihood
    statistics = getattr(base, "statistics", None)
    if likelihood.noise_variance is None or statistics is None:
        return None
    if statistics.losses:
        return 2 * torch.tensor(statistics.losses, dtype=torch.float64) / statistics.data
    mean = 2 * statistics.loss / (statistics.data * statistics.outputs)
    ratios = likelihood.noise_variance.detach().double().cpu() / likelihood.dispersion.detach().double().cpu()
    return (mean * ratios).expand(statistics.outputs)


def units_finding(posterior: Fitted | Posterior, mean: Tensor, error: Tensor, name: str) -> str:
    """Return a sentence if targets seem to be in other units than the outputs of the network; nothing otherwise.

    Residuals are far larger than those of the training data, and than all that the outputs vary; or targets are far
    smaller than outputs, as standardised ones are for a network that predicts the original numbers.

    Args:
        posterior: A fitted posterior with Gaussian noise; others are not judged.
        mean: Predictions of all data, (N, C).
        error: Targets less predictions, (N, C).
        name: The name of the data.
    """
    trained = training_residuals(posterior)
    if trained is None or len(mean) < LEAST:
        return ""
    mean, error = mean.double(), error.double()
    residual, spread = error.square().mean(0), mean.var(0)
    beyond = residual > FAR * trained
    other = (residual > APART * (spread + trained)) | (mean.square().mean(0) > FAR * (mean + error).square().mean(0))
    chosen = (beyond & other).nonzero().flatten().tolist()
    if not chosen:
        return ""
    one = max(chosen, key=lambda i: float(residual[i] / trained[i].clamp_min(1e-300)))
    where = f" of output {one}" if len(trained) > 1 else ""
    return (
        f"{name}: the mean squared residual{where} is {float(residual[one]):.3g}, and {float(trained[one]):.3g} on the "
        f"training data; targets have the standard deviation {float((mean + error)[:, one].std()):.3g} and predictions "
        f"{float(spread[one].sqrt()):.3g}. Are the targets in other units than those that the network was trained on, "
        "or the inputs far from its data? Give targets in the same units, for instance standardised in the same way."
    )


def warn_of_units(posterior: Fitted | Posterior, mean: Tensor, error: Tensor, name: str) -> tuple[str, ...]:
    """Warn if targets seem to be in other units, and return the sentence, if there is one; see ``units_finding``."""
    finding = units_finding(posterior, mean, error, name)
    if finding:
        warn_caller(finding)
    return (finding,) if finding else ()


def rows_of(
    posterior: Fitted,
    data: Iterable[object],
    number: Callable[[Any, LabelledBatch], Tensor],
    *,
    name: str = "calibration",
    target_key: str | None = None,
    progress: bool | None = None,
    calibrates: bool = True,
) -> tuple[Tensor, Scoring[Any]]:
    """Return the rows ``number(predictive, batch)`` of all batches, on the CPU, and the scoring of the targets.

    One pass. Inputs whose target is ignored are left out. Data that calibrate must not all have been used before.

    Raises:
        UnsupportedError: If the network has an output for each token or pixel.
        DataError: If data are empty, every target is ignored, or all data of a calibration were used before.
    """
    posterior._refuse_changed()
    refuse_tokens(posterior.network, name)
    rows: list[Tensor] = []
    with torch.no_grad():
        source = source_of(posterior.network, data, name, target_key, progress)
        for batch in batches_of(posterior.network, source):
            each = label_batch(posterior, batch, name)
            known = each.known.flatten(1).all(1) if each.known.ndim > 1 else each.known
            predictive = posterior.posterior.predict(each.inputs)
            scoring = predictive.scoring
            values = number(predictive, each)
            rows.append(values[known.to(values.device)].cpu())
    name_of_data, remedy = (f"{name} data", VOID) if calibrates else (name, WORSE)
    posterior.rows.warn_reused(source.sketch(), name_of_data, remedy, refuses=calibrates)
    joined = torch.cat(rows)
    if not len(joined):
        raise DataError(f"{name}: every target is ignored; expected at least one that is not.")
    return joined, scoring


def input_batches(posterior: Fitted, x: Inputs, target_key: str | None, progress: bool | None) -> Iterator[Inputs]:
    """Yield batches of inputs, from one batch or from a loader; targets are left out."""
    x = as_tensors(x, posterior.network.arithmetic)
    batches, _ = posterior._batches(x, target_key, progress, None)
    return iter([posterior._check_inputs(x)] if batches is None else batches)


def as_batches(network: Network, data: Any) -> Any:
    """Return inputs or a loader unchanged; return a tuple as a list of batches, ``(inputs, targets)`` as a list of one.

    A tuple with the tensors of a network of several inputs is one batch of inputs.
    """
    places = network.input_places
    if not isinstance(data, tuple) or (places and has_places(data, places)):
        return data
    if is_pair(data):
        refuse_unequal(data[0], data[1], "data")
    batches = not is_pair(data) and all(isinstance(item, tuple | list | Mapping) for item in data)
    return list(data) if batches else [data]


def refuse_tokens(network: Network, what: str) -> None:
    """Raise if the network has an output for each token or pixel: the data of an input depend on each other."""
    if len(network.output_shape) > 1:
        raise UnsupportedError(
            f"{what}: the network has an output for each token or pixel, {network.output_shape}; expected one target "
            "for each input. Guarantees need data that are drawn independently, and tokens of one input are not. Wrap "
            "the model to return one output for each input, or use evaluate, which takes such outputs."
        )
