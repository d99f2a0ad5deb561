"""The commands of ``lapwing``: the options of each, and what it does."""

from __future__ import annotations

import json
import math
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lapwing.api import fit
from lapwing.check import check
from lapwing.cli.files import WRITERS, write_arrays
from lapwing.cli.models import load_posterior
from lapwing.cli.options import (
    COLUMNS,
    Outcome,
    add_common,
    add_data,
    add_level,
    add_model,
    add_out,
    add_posterior,
    add_posteriors,
    add_subset,
    columns_of_fit,
    load_model,
    load_posteriors,
    make_reader,
    names,
    refuse_output,
    seed_all,
    subset_of,
    target_key,
)
from lapwing.compare import compare, evaluate, kind_of
from lapwing.data.streams import InputStream
from lapwing.errors import DataError, UnsupportedError
from lapwing.fitted import Fitted
from lapwing.predictives.base import LabelPredictive, NumberPredictive
from lapwing.registry import LIKELIHOODS, METHODS, find_likelihood
from lapwing.runtime.settings import NONE, POSITIVE, one_of
from lapwing.runtime.threads import should_show_progress


@dataclass(frozen=True)
class Command:
    """A command: what it does in a sentence, its options, and its work."""

    help: str
    add_options: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], Outcome]


def add_demo_options(parser: ArgumentParser) -> None:
    """Add the options of ``lapwing demo``."""
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="FOLDER",
        help="folder for the files, made if needed (default: out)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="train once and for ten epochs only, to try it out")
    add_common(parser, device=False)


def run_demo(arguments: Namespace) -> Outcome:
    """Run the three experiments of the demo, write their files, and return their tables and the paths."""
    try:
        from lapwing.demo.result import table
        from lapwing.demo.tasks import run_demo as run

        arguments.out.mkdir(parents=True, exist_ok=True)
        report = run(arguments.out, arguments.seed, arguments.quick)
        paths = report.write()
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("lapwing"):
            raise
        raise UnsupportedError(f"{missing.name} is not installed; use pip install 'lapwing[run]'.") from missing
    tables = [f"{table(result)}\n" for result in report.results]
    results = {result.experiment: json.loads(result.to_json()) for result in report.results}
    return Outcome("\n".join([*tables, *map(str, paths)]), {"results": results, "files": paths})


def add_check_options(parser: ArgumentParser) -> None:
    """Add the options of ``lapwing check``."""
    add_model(parser)
    add_subset(parser)
    parser.add_argument("--timed", action="store_true", help="measure the times of all methods on one batch")
    add_data(parser, "the training data")
    add_common(parser)


def run_check(arguments: Namespace) -> Outcome:
    """Check the model with the first batch."""
    seed_all(arguments.seed)
    model = load_model(arguments, trained=False)
    data = make_reader(arguments, model, labelled=False).read(arguments.data)
    batch = next(iter(data.batches))
    if isinstance(batch, Mapping):
        batch = {name: values for name, values in batch.items() if name not in arguments.target}
    report = check(model, batch, weights=subset_of(arguments), data=data.rows, timed=arguments.timed)
    facts = {
        "model": arguments.model, "data": data.facts, "weights": report.weights, "outputs": report.outputs,
        "dtype": report.dtype, "layers": [asdict(layer) for layer in report.layers],
        "methods": {name: asdict(cost) for name, cost in report.costs.items()},
        "recommended": {"method": type(report.recommended.method).__name__, "why": report.recommended.why},
    }  # fmt: skip
    return Outcome(f"{data.described}\n{report}", facts)


def add_fit_options(parser: ArgumentParser) -> None:
    """Add the options of ``lapwing fit``."""
    add_model(parser)
    parser.add_argument(
        "--likelihood", required=True, metavar="NAME",
        help="what the targets are: classification, regression, binary, multilabel, counts or heteroscedastic",
    )  # fmt: skip
    parser.add_argument(
        "--validation", metavar="DATA",
        help="data that the network was not trained on, as for --data; 200 rows or more calibrate the error bars",
    )  # fmt: skip
    parser.add_argument("--method", metavar="NAME", help="such as kron, full or auto (default: kron)")
    add_subset(parser)
    parser.add_argument("--prior", type=float, metavar="PRECISION", help="precision of the weights (default: learned)")
    add_out(parser, "the posterior, such as net.lapwing")
    add_data(parser, "the training data")
    add_common(parser)


def run_fit(arguments: Namespace) -> Outcome:
    """Fit and save."""
    one_of(LIKELIHOODS).check("--likelihood", arguments.likelihood)
    (one_of([*METHODS, "auto"]) | NONE).check("--method", arguments.method)
    (POSITIVE | NONE).check("--prior", arguments.prior)
    refuse_output(arguments)
    generator = seed_all(arguments.seed)
    model = load_model(arguments)
    reader = make_reader(arguments, model, labels=find_likelihood(arguments.likelihood).has_logits)
    data = reader.read(arguments.data)
    held_out = None if arguments.validation is None else reader.beside(data).read(arguments.validation, "--validation")
    posterior = fit(
        model, data.batches, arguments.likelihood, method=arguments.method, weights=subset_of(arguments),
        prior=arguments.prior, validation=None if held_out is None else held_out.batches,
        target_key=target_key(arguments), generator=generator,
    )  # fmt: skip
    posterior = replace(posterior, columns=columns_of_fit(arguments, data.classes))
    posterior.save(arguments.out)
    described = [data.described, *([] if held_out is None else [held_out.described])]
    notes = worse_than_chance(posterior)
    facts = {
        "model": arguments.model, "data": data.facts, "validation": None if held_out is None else held_out.facts,
        "seed": arguments.seed, **facts_of(posterior), "notes": notes,
        "out": arguments.out,
    }  # fmt: skip
    lines = [*described, posterior.summary(), *(f"Note: {note}" for note in notes), f"Written to {arguments.out}"]
    return Outcome("\n".join(lines), facts)


def worse_than_chance(posterior: Fitted) -> list[str]:
    """Return a note if the network predicts the classes that it was trained on worse than equal probabilities do."""
    if not posterior.likelihood.has_logits:
        return []
    statistics, outputs = posterior.base.statistics, posterior.network.output_shape[-1]
    each = posterior.likelihood.ignores_common_shift  # one class of several, and not several labels of two
    nll, count = statistics.loss / (statistics.data * (1 if each else outputs)), outputs if each else 2
    if nll <= math.log(count):
        return []
    return [
        f"the network predicts the training targets worse than chance (NLL {nll:.3g}, log {count} = "
        f"{math.log(count):.2f}): are its weights loaded, and are the classes in the order of its outputs? Give their "
        "order by --classes."
    ]


def facts_of(posterior: Fitted) -> dict[str, object]:
    """Return what a posterior says of itself, as plain data."""
    trace, selection = posterior.trace, posterior.network.selection
    return {
        "method": posterior.method, "why": posterior.why or None, "weights": selection.size,
        "likelihood": type(posterior.likelihood).__name__, "precision": posterior.prior.values,
        "noise_variance": posterior.likelihood.noise_variance,
        "tuner": None if trace is None else trace.tuner or None,
        "scores": {} if trace is None else {"on": trace.scored_on, "nll": asdict(trace)["scores"]},
        "findings": list(posterior.findings), "summary": posterior.summary(),
    }  # fmt: skip


def add_evaluate_options(parser: ArgumentParser) -> None:
    """Add the options of ``lapwing evaluate``."""
    add_posteriors(parser)
    add_level(parser)
    add_data(parser, "data with targets that were not used for the fit")
    add_common(parser)


def run_evaluate(arguments: Namespace) -> Outcome:
    """Score one posterior against the plain network, or rank several with it."""
    generator = seed_all(arguments.seed)
    posteriors = load_posteriors(arguments)
    first = next(iter(posteriors.values()))
    labels = first.likelihood.has_logits
    known = columns_of(posteriors, arguments)
    data = make_reader(arguments, first.network.model, labels=labels, columns=known).read(arguments.data)
    settings = {"level": arguments.level, "target_key": target_key(arguments, known), "generator": generator}
    alone = len(posteriors) == 1
    named = posteriors if alone else {display_name(name, each): each for name, each in posteriors.items()}
    found = first.evaluate(data.batches, **settings) if alone else evaluate(named, data.batches, **settings)
    facts = {"data": data.facts, "seed": arguments.seed, "posteriors": list(named), "evaluation": found.to_json()}
    return Outcome(f"{data.described}\n{found}", facts)


def columns_of(posteriors: Mapping[str, Fitted], arguments: Namespace) -> Mapping[str, tuple[str, ...]]:
    """Return the names of columns and classes that the posteriors were fitted with; raise if they differ.

    Raises:
        DataError: If the data would be read in another way for another posterior, and no option decides it.
    """
    (name, first), *others = posteriors.items()
    for other, each in others:
        for option in COLUMNS:
            one, two = (p.columns.get(option, ()) for p in (first, each))
            if one and two and one != two and not vars(arguments)[option]:
                raise DataError(
                    f"{name} was fitted with --{option} {','.join(one)} and {other} with --{option} {','.join(two)}; "
                    f"expected the same. Give --{option}, or evaluate them one by one."
                )
    return {option: names for p in reversed([*posteriors.values()]) for option, names in p.columns.items()}


def display_name(name: str, fitted: Fitted) -> str:
    """Return the name of a file, and what is in it if it has no error bars: files do not show that."""
    kind = kind_of(fitted.posterior)
    return f"{name} ({kind})" if kind else name


def add_predict_options(parser: ArgumentParser) -> None:
    """Add the options of ``lapwing predict``."""
    add_model(parser)
    add_posterior(parser)
    add_level(parser)
    add_out(parser, "the predictions: a .csv, .npz or .parquet file")
    parser.add_argument(
        "--keep", type=names, default=(), metavar="NAMES",
        help="columns of a table that are not inputs and are copied to the predictions, with commas",
    )  # fmt: skip
    add_data(parser, "the inputs; targets are not needed, and left out if they are there")
    add_common(parser)


def run_predict(arguments: Namespace) -> Outcome:
    """Predict batch by batch, and write all predictions in the order of the data."""
    refuse_output(arguments, tuple(WRITERS))
    seed_all(arguments.seed)
    model = load_model(arguments)
    posterior = load_posterior(arguments.posterior, model)
    known = posterior.columns
    reader = make_reader(arguments, model, labelled=False, kept=arguments.keep, columns=known)
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


def predictions(
    posterior: Fitted, batches: Iterable[object], level: float, key: str | None = None
) -> dict[str, Tensor]:
    """Return the predictions of all rows by name, in order, (N, ...).

    Args:
        posterior: The posterior.
        batches: A loader, with or without targets.
        level: The probability of the intervals.
        key: The key of the target in batches that are mappings.
    """
    network, parts = posterior.network, list[Mapping[str, Tensor]]()
    stream = InputStream(batches, network.device, network.input_places, key, should_show_progress(None))
    with torch.no_grad():
        for inputs in stream:
            predictive = posterior.predict(inputs)
            columns = (
                _of_labels(predictive, posterior) if posterior.likelihood.has_logits else _of_numbers(predictive, level)
            )
            parts.append({name: values.detach().cpu() for name, values in columns.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _of_labels(predictive: LabelPredictive, posterior: Fitted) -> dict[str, Tensor]:
    """Return the class where there is one out of several, the probabilities, and two measures of doubt in nats."""
    probs = predictive.probs
    choice = (
        {"class": probs.argmax(1 if posterior.network.image else -1)}
        if posterior.likelihood.ignores_common_shift
        else {}
    )
    return {**choice, "probability": _narrow(probs), "entropy": predictive.entropy, "epistemic": predictive.epistemic}


def _of_numbers(predictive: NumberPredictive, level: float) -> dict[str, Tensor]:
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


def _refuse_same(kept: Mapping[str, object], arrays: Mapping[str, object]) -> None:
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


def add_compare_options(parser: ArgumentParser) -> None:
    """Add the options of ``lapwing compare``."""
    add_posteriors(parser)
    add_common(parser)


def run_compare(arguments: Namespace) -> Outcome:
    """Load every posterior with its model, and rank them. They are named by their files."""
    seed_all(arguments.seed)
    comparison = compare(load_posteriors(arguments))
    candidates = [asdict(candidate) for candidate in comparison.candidates]
    facts = {"best": comparison.best, "candidates": candidates, "findings": comparison.findings}
    return Outcome(str(comparison), facts)


def add_report_options(parser: ArgumentParser) -> None:
    """Add the options of ``lapwing report``."""
    add_model(parser)
    add_posterior(parser)
    add_level(parser)
    parser.add_argument("--title", help="heading of the page (default: the name of the model)")
    add_out(parser, "the page, such as report.html")
    add_data(parser, "data with targets that were not used for the fit")
    add_common(parser)


def run_report(arguments: Namespace) -> Outcome:
    """Write the page."""
    refuse_output(arguments, (".html", ".htm"))
    seed_all(arguments.seed)
    model = load_model(arguments)
    posterior = load_posterior(arguments.posterior, model)
    known, labels = posterior.columns, posterior.likelihood.has_logits
    data = make_reader(arguments, model, labels=labels, columns=known).read(arguments.data)
    report = posterior.report(
        data.batches, arguments.out, title=arguments.title or f"Error bars of {arguments.model}",
        level=arguments.level, seed=arguments.seed, target_key=target_key(arguments, known),
        command=shlex.join(["lapwing", *arguments.words]),
    )  # fmt: skip
    facts = {"data": data.facts, "seed": arguments.seed, "verdict": report.verdict, "report": report.numbers}
    return Outcome(f"{data.described}\n{report.verdict}\nWritten to {arguments.out}", {**facts, "out": arguments.out})


COMMANDS: Mapping[str, Command] = {
    "demo": Command(
        "run digits, diabetes and a curve with a gap, and write their tables, a picture and results.json",
        add_demo_options, run_demo,
    ),
    "check": Command(
        "say how each layer is handled and what each method would cost, before anything is fitted",
        add_check_options, run_check,
    ),
    "fit": Command(
        "fit a posterior around the trained weights and write it to a file",
        add_fit_options, run_fit,
    ),
    "evaluate": Command(
        "score posteriors on data that were not used for the fit, beside the plain network",
        add_evaluate_options, run_evaluate,
    ),
    "predict": Command(
        "predict new data and write a row for each: probabilities, or means and intervals, and their uncertainty",
        add_predict_options, run_predict,
    ),
    "compare": Command(
        "rank models by the evidence of their posteriors, which needs no data",
        add_compare_options, run_compare,
    ),
    "report": Command(
        "write a page in HTML with a verdict, scores and pictures, from data that were not used for the fit",
        add_report_options, run_report,
    ),
}  # fmt: skip
