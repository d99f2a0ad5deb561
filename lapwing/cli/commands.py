"""The program ``lapwing``: its commands with their options and their work, what they print, and how they fail."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import random
import shlex
import sys
import traceback
import warnings
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lapwing
from lapwing.api import fit
from lapwing.check import check
from lapwing.cli.arguments import COLUMNS, Arguments, Outcome
from lapwing.cli.files import WRITERS, write_arrays
from lapwing.cli.models import load_posterior, working_folder_first
from lapwing.compare import Evaluations, compare, evaluate, kind_of
from lapwing.data.streams import InputStream
from lapwing.decisions.evaluation import Evaluation
from lapwing.errors import DataError, LapwingError, UnsupportedError
from lapwing.fitted import Fitted
from lapwing.predictives.base import LabelPredictive, NumberPredictive
from lapwing.registry import LIKELIHOODS, METHODS, find_likelihood
from lapwing.runtime.settings import NONE, POSITIVE, one_of
from lapwing.runtime.threads import LOG, should_show_progress


def names(text: str) -> tuple[str, ...]:
    """Return the names in a text with commas.

    >>> names("age, size")
    ('age', 'size')
    """
    found = tuple(name.strip() for name in text.split(","))
    if not all(found) or len(set(found)) < len(found):
        raise ArgumentTypeError(f"{text!r} has an empty name or one twice; expected names with commas")
    return found


def _whole(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**63:
            raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


def _level(text: str) -> float:
    try:
        level = float(text)
    except ValueError:
        level = 0.0
    if not 0 < level < 1:
        raise ArgumentTypeError(f"{text!r} is not a probability between 0 and 1")
    return level


@dataclass(frozen=True)
class Option:
    """An argument of a command, the group that it is listed under, and what ``add_argument`` takes besides."""

    flag: str
    group: str
    settings: Mapping[str, Any]


def option(flag: str, help: str, group: str = "", **settings: Any) -> Option:
    """Return an option."""
    return Option(flag, group, {"help": help, **settings})


def add_options(parser: ArgumentParser, options: Sequence[Option]) -> None:
    """Add the options to the parser of a command."""
    names = dict.fromkeys(each.group for each in options if each.group)
    groups = {name: parser.add_argument_group(name) for name in names}
    for each in options:
        groups.get(each.group, parser).add_argument(each.flag, **each.settings)


DEVICE = option("--device", "where to compute, such as cuda (default: cpu)", "every command", default="cpu")
EVERY = (
    option("--seed", "seed of all random numbers (default: 0)", "every command", type=_whole(0), default=0),
    option("--json", "print one JSON object and nothing else", "every command", action="store_true"),
    option("--traceback", "show where an error was raised", "every command", action="store_true"),
)
COMMON = (DEVICE, *EVERY)
MODEL = (
    option("model", "import path of a function that returns it: package.module:factory", metavar="MODEL"),
    option("--weights", "its weights: a state dict of torch, or safetensors", type=Path, metavar="FILE"),
)
SUBSET = option(
    "--subset", "which weights are uncertain: all, last_layer, or a regular expression for their names (default: all)",
    default="all", metavar="WEIGHTS",
)  # fmt: skip
POSTERIOR = option("--posterior", "a file that lapwing fit wrote", type=Path, required=True, metavar="FILE")
LEVEL = option("--level", "probability of the intervals (default: 0.95)", type=_level, default=0.95)
OVERWRITE = option("--overwrite", "replace the file if it exists", action="store_true")
_EACH: dict[str, Any] = {"type": Path, "nargs": "+", "action": "extend", "metavar": "FILE"}
POSTERIORS = (
    option(
        "models", "import path of each model, package.module:factory, or one for all posteriors", nargs="+",
        metavar="MODEL",
    ),
    option("--weights", "weights of each model, or one file for all", default=[], **_EACH),
    option("--posterior", "files that lapwing fit wrote", required=True, **_EACH),
)  # fmt: skip


def out_options(what: str) -> tuple[Option, ...]:
    """Return the options for the file that is written."""
    return option("--out", what, type=Path, required=True, metavar="FILE"), OVERWRITE


def data_options(what: str) -> tuple[Option, ...]:
    """Return the options for the data, ``what`` they are for, and for what their columns and arrays are."""
    listed: dict[str, Any] = {"group": "data", "type": names, "default": ()}
    return (
        option(
            "--data",
            f"{what}: a .npz, .csv or .parquet file, or the import path of a loader, package.module:make_loader",
            "data", required=True, metavar="DATA",
        ),
        option(
            "--target",
            "column, array or key of the targets, several with commas (default: y, target, targets, label or labels)",
            metavar="NAME", **listed,
        ),
        option(
            "--inputs",
            "columns of the inputs, with commas, or their array (default: the others; of arrays x or inputs)",
            metavar="NAMES", **listed,
        ),
        option("--drop", "columns to leave out, with commas", metavar="NAMES", **listed),
        option(
            "--classes",
            "the classes in the order of the network's outputs, with commas (default: their texts, sorted)",
            metavar="NAMES", **listed,
        ),
        option("--batch-size", "rows of a batch (default: 256)", "data", type=_whole(1), default=256, metavar="N"),
    )  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command: what it does in a sentence, its work, and its options."""

    help: str
    run: Callable[[Arguments], Outcome]
    options: tuple[Option, ...]


def run_demo(arguments: Arguments) -> Outcome:
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


def run_check(arguments: Arguments) -> Outcome:
    """Check the model with the first batch."""
    model = arguments.load_model(trained=False)
    data = arguments.make_reader(model, labelled=False).read(arguments.data)
    batch = next(iter(data.batches))
    if isinstance(batch, Mapping):
        batch = {name: values for name, values in batch.items() if name not in arguments.target}
    report = check(model, batch, weights=arguments.chosen_weights(), data=data.rows, timed=arguments.timed)
    facts = {
        "model": arguments.model, "data": data.facts, "weights": report.weights, "outputs": report.outputs,
        "dtype": report.dtype, "layers": [asdict(layer) for layer in report.layers],
        "methods": {name: asdict(cost) for name, cost in report.costs.items()},
        "recommended": {"method": type(report.recommended.method).__name__, "why": report.recommended.why},
    }  # fmt: skip
    return Outcome(f"{data.described}\n{report.details() if arguments.details else report}", facts)


def run_fit(arguments: Arguments) -> Outcome:
    """Fit and save."""
    one_of(LIKELIHOODS).check("--likelihood", arguments.likelihood)
    (one_of([*METHODS, "auto"]) | NONE).check("--method", arguments.method)
    (POSITIVE | NONE).check("--prior", arguments.prior)
    arguments.refuse_output()
    generator = torch.Generator().manual_seed(arguments.seed)
    model = arguments.load_model()
    reader = arguments.make_reader(model, labels=find_likelihood(arguments.likelihood).has_logits)
    data = reader.read(arguments.data)
    held_out = None if arguments.validation is None else reader.beside(data).read(arguments.validation, "--validation")
    posterior = fit(
        model, data.batches, arguments.likelihood, method=arguments.method, weights=arguments.chosen_weights(),
        prior=arguments.prior, validation=None if held_out is None else held_out.batches,
        target_key=arguments.target_key(), generator=generator,
    )  # fmt: skip
    posterior = replace(posterior, columns=arguments.columns_of_fit(data.classes))
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


def run_evaluate(arguments: Arguments) -> Outcome:
    """Score one posterior against the plain network, or rank several with it."""
    generator = torch.Generator().manual_seed(arguments.seed)
    posteriors = arguments.load_posteriors()
    first = next(iter(posteriors.values()))
    labels = first.likelihood.has_logits
    known = columns_of(posteriors, arguments)
    data = arguments.make_reader(first.network.model, labels=labels, columns=known).read(arguments.data)
    settings = {"level": arguments.level, "target_key": arguments.target_key(known), "generator": generator}
    if len(posteriors) > 1:
        posteriors = {display_name(name, each): each for name, each in posteriors.items()}
        evaluation: Evaluation | Evaluations = evaluate(posteriors, data.batches, **settings)
    else:
        evaluation = first.evaluate(data.batches, **settings)
    facts = {"data": data.facts, "seed": arguments.seed, "posteriors": list(posteriors)}
    return Outcome(f"{data.described}\n{evaluation}", {**facts, "evaluation": evaluation.to_json()})


def columns_of(posteriors: Mapping[str, Fitted], arguments: Arguments) -> Mapping[str, tuple[str, ...]]:
    """Return the names of columns and classes that the posteriors were fitted with; raise if they differ.

    Raises:
        DataError: If the data would be read in another way for another posterior, and no option decides it.
    """
    (name, first), *others = posteriors.items()
    for other, each in others:
        for column in COLUMNS:
            one, two = (p.columns.get(column, ()) for p in (first, each))
            if one and two and one != two and not vars(arguments)[column]:
                raise DataError(
                    f"{name} was fitted with --{column} {','.join(one)} and {other} with --{column} {','.join(two)}; "
                    f"expected the same. Give --{column}, or evaluate them one by one."
                )
    return {column: given for p in reversed([*posteriors.values()]) for column, given in p.columns.items()}


def display_name(name: str, fitted: Fitted) -> str:
    """Return the name of a file, and what is in it if it has no error bars: files do not show that."""
    kind = kind_of(fitted.posterior)
    return f"{name} ({kind})" if kind else name


def run_predict(arguments: Arguments) -> Outcome:
    """Predict batch by batch, and write all predictions in the order of the data."""
    arguments.refuse_output(tuple(WRITERS))
    model = arguments.load_model()
    posterior = load_posterior(arguments.posterior, model)
    known = posterior.columns
    reader = arguments.make_reader(model, labelled=False, kept=arguments.keep, columns=known)
    data = reader.read(arguments.data)
    _refuse_classes(posterior, data.classes)
    kept = reader.columns(arguments.data, arguments.keep) if arguments.keep else {}
    arrays = predictions(posterior, data.batches, arguments.level, arguments.target_key(known))
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
    labels = posterior.likelihood.has_logits
    with torch.no_grad():
        for inputs in stream:
            predictive = posterior.predict(inputs)
            columns = _of_labels(predictive, posterior) if labels else _of_numbers(predictive, level)
            parts.append({name: values.detach().cpu() for name, values in columns.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _of_labels(predictive: LabelPredictive, posterior: Fitted) -> dict[str, Tensor]:
    """Return the class where there is one out of several, the probabilities, and two measures of doubt in nats."""
    probs, exclusive = predictive.probs, posterior.likelihood.ignores_common_shift
    choice = {"class": probs.argmax(1 if posterior.network.image else -1)} if exclusive else {}
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


def run_compare(arguments: Arguments) -> Outcome:
    """Load every posterior with its model, and rank them. They are named by their files."""
    comparison = compare(arguments.load_posteriors())
    candidates = [asdict(candidate) for candidate in comparison.candidates]
    facts = {"best": comparison.best, "candidates": candidates, "findings": comparison.findings}
    return Outcome(str(comparison), facts)


def run_report(arguments: Arguments) -> Outcome:
    """Write the page."""
    arguments.refuse_output((".html", ".htm"))
    model = arguments.load_model()
    posterior = load_posterior(arguments.posterior, model)
    known, labels = posterior.columns, posterior.likelihood.has_logits
    data = arguments.make_reader(model, labels=labels, columns=known).read(arguments.data)
    report = posterior.report(
        data.batches, arguments.out, title=arguments.title or f"Error bars of {arguments.model}",
        level=arguments.level, seed=arguments.seed, target_key=arguments.target_key(known),
        command=shlex.join(["lapwing", *arguments.words]),
    )  # fmt: skip
    facts = {"data": data.facts, "seed": arguments.seed, "verdict": report.verdict, "report": report.numbers}
    return Outcome(f"{data.described}\n{report.verdict}\nWritten to {arguments.out}", {**facts, "out": arguments.out})


COMMANDS: Mapping[str, Command] = {
    "demo": Command(
        "run digits, diabetes and a curve with a gap, and write their tables, a picture and results.json", run_demo,
        (
            option(
                "--out", "folder for the files, made if needed (default: out)", type=Path, default=Path("out"),
                metavar="FOLDER",
            ),
            option("--quick", "train once and for ten epochs only, to try it out", action="store_true"),
            *EVERY,
        ),
    ),
    "check": Command(
        "say how each layer is handled and what each method would cost, before anything is fitted", run_check,
        (
            *MODEL, SUBSET, option("--details", "all parameters and all methods", action="store_true"),
            option("--timed", "measure the times of all methods on one batch", action="store_true"),
            *data_options("the training data"), *COMMON,
        ),
    ),
    "fit": Command(
        "fit a posterior around the trained weights and write it to a file", run_fit,
        (
            *MODEL,
            option(
                "--likelihood",
                "what the targets are: classification, regression, binary, multilabel, counts or heteroscedastic",
                required=True, metavar="NAME",
            ),
            option(
                "--validation",
                "data that the network was not trained on, as for --data; 200 rows or more calibrate the error bars",
                metavar="DATA",
            ),
            option("--method", "such as kron, full or auto (default: kron)", metavar="NAME"),
            SUBSET,
            option("--prior", "precision of the weights (default: learned)", type=float, metavar="PRECISION"),
            *out_options("the posterior, such as net.lapwing"), *data_options("the training data"), *COMMON,
        ),
    ),
    "evaluate": Command(
        "score posteriors on data that were not used for the fit, beside the plain network", run_evaluate,
        (*POSTERIORS, LEVEL, *data_options("data with targets that were not used for the fit"), *COMMON),
    ),
    "predict": Command(
        "predict new data and write a row for each: probabilities, or means and intervals, and their uncertainty",
        run_predict,
        (
            *MODEL, POSTERIOR, LEVEL, *out_options("the predictions: a .csv, .npz or .parquet file"),
            option(
                "--keep", "columns of a table that are not inputs and are copied to the predictions, with commas",
                type=names, default=(), metavar="NAMES",
            ),
            *data_options("the inputs; targets are not needed, and left out if they are there"), *COMMON,
        ),
    ),
    "compare": Command(
        "rank models by the evidence of their posteriors, which needs no data", run_compare, (*POSTERIORS, *COMMON)
    ),
    "report": Command(
        "write a page in HTML with a verdict, scores and pictures, from data that were not used for the fit",
        run_report,
        (
            *MODEL, POSTERIOR, LEVEL, option("--title", "heading of the page (default: the name of the model)"),
            *out_options("the page, such as report.html"),
            *data_options("data with targets that were not used for the fit"), *COMMON,
        ),
    ),
}  # fmt: skip

FAILED, INTERRUPTED = 1, 130  # exit codes; 2 is that of argparse for a command that cannot be read
ADVICE = {  # what the library advises, and how to give it here
    "timed=True": "--timed",
    "print(report.details())": "--details",
    "fit(..., validation=data)": "--validation DATA",
    "target_key=...": "--target NAME",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or 1 with one line on stderr. A command that cannot be read exits 2.

    Results go to stdout. Progress, warnings, errors, and what the user's own code prints go to stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if any("\0" in word for word in words):
        return _print_failure("an argument has a NUL character, which no path or name has; leave it out.", FAILED)
    arguments = _parser().parse_args(words, Arguments(words=words))
    try:
        with working_folder_first(), redirect_stdout(sys.stderr), warnings_in_a_line(), progress_in_lines():
            random.seed(arguments.seed)  # the user's code may draw from the global generators
            torch.manual_seed(arguments.seed)
            outcome = COMMANDS[arguments.command].run(arguments)
    except KeyboardInterrupt:
        return _print_failure("interrupted.", INTERRUPTED)
    except Exception as error:
        if arguments.traceback:
            traceback.print_exc()
        return _print_failure(_in_words(error), FAILED)
    return _print_text(outcome.to_json(arguments.command) if arguments.json else in_options(outcome.text))


def _print_text(text: str) -> int:
    """Print the text and return the exit code; a reader such as ``head`` may close the pipe before its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _Parser(ArgumentParser):
    """A parser that takes ``@FILE`` for the words in a file, with quotes and comments as in a shell."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        if "\0" in arg_line:
            self.error("a file of arguments has a NUL character, which no path or name has; write it as plain text")
        return shlex.split(arg_line, comments=True)


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="lapwing",
        description="Error bars for trained networks.",
        epilog="lapwing COMMAND --help lists the options of a command. @FILE stands for the words in a file.",
        fromfile_prefix_chars="@",
    )
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=f"lapwing {lapwing.__version__} ({versions})")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sentence = f"{command.help[0].upper()}{command.help[1:]}."
        own = commands.add_parser(name, help=command.help, description=sentence, allow_abbrev=False)
        add_options(own, command.options)
    return parser


def _in_words(error: Exception) -> str:
    """Return one line for an error; an unexpected one comes with its type."""
    if isinstance(error, LapwingError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror}. Check the path."
    return f"{type(error).__name__}: {error} (not expected). --traceback shows where."


def _print_failure(message: str, code: int) -> int:
    print(f"lapwing: {in_options(in_a_line(message))}", file=sys.stderr)
    return code


def in_a_line(text: str) -> str:
    """Return a text in one line; characters that a terminal would not print, such as those of a file, become "?".

    >>> in_a_line("no\\n  such \\x1b[2Jcolumn")
    'no such ?[2Jcolumn'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def in_options(text: str) -> str:
    """Return a text of the library with options in place of arguments.

    >>> in_options("timed=True measures on one batch.")
    '--timed measures on one batch.'
    """
    for argument, flag in ADVICE.items():
        text = text.replace(argument, flag)
    return text


@contextmanager
def progress_in_lines() -> Iterator[None]:
    """Write where a long command is as a line each half minute meanwhile, where no terminal has a bar."""
    handler, level = logging.StreamHandler(sys.stderr), LOG.level
    handler.setFormatter(logging.Formatter("lapwing: %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Write warnings as a line each meanwhile, without the place in the code."""
    show: Callable[..., None] = lambda message, *_, **__: print(
        f"lapwing: warning: {in_a_line(str(message))}", file=sys.stderr
    )
    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
