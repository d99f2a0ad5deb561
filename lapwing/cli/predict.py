"""``lapwing predict``: predictions with their uncertainty, a row for each input."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lapwing.cli.models import posterior_of
from lapwing.cli.options import (
    Outcome,
    add_common,
    add_data,
    add_level,
    add_model,
    add_out,
    add_posterior,
    model_given,
    names,
    reader_given,
    refuse_output,
    seed_all,
    target_key,
)
from lapwing.cli.writing import FORMATS, write_arrays
from lapwing.data.streams import InputStream
from lapwing.errors import DataError
from lapwing.fitted import Fitted
from lapwing.runtime.threads import shows_progress

HELP = "predict new data and write a row for each: probabilities, or means and intervals, and what is not known"


def add_options(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    add_posterior(parser)
    add_level(parser)
    add_out(parser, "the predictions: a .csv, .npz or .parquet file")
    parser.add_argument(
        "--keep", type=names, default=(), metavar="NAMES",
        help="columns of a table that are no inputs and are copied to the predictions, with commas",
    )  # fmt: skip
    add_data(parser, "the inputs; targets are not needed, and left out if they are there")
    add_common(parser)


def run(arguments: Namespace) -> Outcome:
    """Predict batch by batch, and write all predictions in the order of the data."""
    refuse_output(arguments, tuple(FORMATS))
    seed_all(arguments.seed)
    model = model_given(arguments)
    posterior = posterior_of(arguments.posterior, model)
    known = posterior.columns
    reader = reader_given(arguments, model, labelled=False, kept=arguments.keep, columns=known)
    data = reader.read(arguments.data)
    _refuse_classes(posterior, data.classes)
    kept = reader.columns(arguments.data, arguments.keep) if arguments.keep else {}
    arrays = predictions(posterior, data.batches, arguments.level, target_key(arguments, known))
    _refuse_same(kept, arrays)
    columns = write_arrays(arguments.out, {**kept, **arrays}, data.classes)
    rows = len(next(iter(arrays.values())))
    facts = {
        "model": arguments.model, "posterior": arguments.posterior, "data": data.facts, "rows": rows,
        "columns": columns, "level": arguments.level, "out": arguments.out,
    }  # fmt: skip
    return Outcome(f"{data.described}\n{rows} predictions written to {arguments.out}: {', '.join(columns)}", facts)


def predictions(posterior: Fitted, batches: Iterable[Any], level: float, key: str | None = None) -> dict[str, Tensor]:
    """Return the predictions of all rows by name, in order, (N, ...).

    Args:
        posterior: The posterior.
        batches: A loader, with or without targets.
        level: The probability of the intervals.
        key: The key of the target in batches that are mappings.
    """
    network, parts = posterior.network, list[Mapping[str, Tensor]]()
    stream = InputStream(batches, network.device, network.input_places, key, shows_progress(None))
    with torch.no_grad():
        for inputs in stream:
            predictive = posterior.predict(inputs)
            columns = (
                _of_labels(predictive, posterior) if posterior.likelihood.has_logits else _of_numbers(predictive, level)
            )
            parts.append({name: values.detach().cpu() for name, values in columns.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _of_labels(predictive: Any, posterior: Fitted) -> dict[str, Tensor]:
    """Return the class where there is one out of several, the probabilities, and two measures of doubt in nats."""
    probs = predictive.probs
    choice = (
        {"class": probs.argmax(1 if posterior.network.image else -1)}
        if posterior.likelihood.ignores_common_shift
        else {}
    )
    return {**choice, "probability": _narrow(probs), "entropy": predictive.entropy, "epistemic": predictive.epistemic}


def _of_numbers(predictive: Any, level: float) -> dict[str, Tensor]:
    """Return means, standard deviations and intervals of targets, and the part of the deviation that is not noise."""
    low, high = predictive.interval(level)
    columns = {
        "mean": predictive.mean, "std": predictive.std, "low": low, "high": high,
        "epistemic_std": predictive.epistemic_variance.sqrt(),
    }  # fmt: skip
    return {name: _narrow(values) for name, values in columns.items()}


def _narrow(values: Tensor) -> Tensor:
    """Return (N,) for one output (N, 1)."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def _refuse_same(kept: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    for name in kept:
        if name in arrays:
            raise DataError(f"--keep names {name!r}, and a prediction has that name too; expected others. Rename it.")


def _refuse_classes(posterior: Fitted, classes: tuple[str, ...]) -> None:
    outputs = posterior.network.output_shape[-1]
    expected = 2 if outputs == 1 else outputs
    if classes and len(classes) != expected:
        raise DataError(
            f"--classes has {len(classes)} names and the network {outputs} outputs; expected {expected} names."
        )
