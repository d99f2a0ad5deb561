"""``lapwing compare``: posteriors ranked by their evidence, from their training data alone."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from lapwing.cli.models import model_of, posterior_of
from lapwing.cli.options import add_common, add_posteriors, device_of, seed_all
from lapwing.cli.outcome import Outcome
from lapwing.compare import compare
from lapwing.errors import UnsupportedError

T = TypeVar("T")
HELP = "rank models by the evidence of their posteriors, which needs no data"


def add_options(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="import path of each model, or one for all posteriors"
    )
    parser.add_argument(
        "--weights", type=Path, nargs="+", action="extend", default=[], metavar="FILE", help="its weights"
    )
    add_posteriors(parser, several=True)
    add_common(parser)


def run(arguments: Namespace) -> Outcome:
    """Load every posterior with its model, and rank them. They are named by their files."""
    seed_all(arguments.seed)
    files, device = arguments.posterior, device_of(arguments)
    models = _each("MODEL", arguments.models, len(files))
    weights = _each("--weights", arguments.weights or [None], len(files))
    posteriors = {
        name: posterior_of(file, model_of(model, weight, device))
        for name, model, weight, file in zip(named(files), models, weights, files, strict=True)
    }
    comparison = compare(posteriors)
    facts = {
        "best": comparison.best, "candidates": [asdict(candidate) for candidate in comparison.candidates],
        "findings": comparison.findings,
    }  # fmt: skip
    return Outcome(str(comparison), facts)


def named(files: Sequence[Path]) -> list[str]:
    """Return a name for each file: without folder and suffix, or the whole path if two would have the same.

    >>> named([Path("runs/small.lapwing"), Path("runs/large.lapwing")])
    ['small', 'large']
    """
    names = [file.stem for file in files]
    if len(set(names)) == len(names):
        return names
    paths = [str(file) for file in files]
    if len(set(paths)) < len(paths):
        raise UnsupportedError(f"--posterior names {_twice(paths)} twice; expected different files.")
    return paths


def _twice(paths: Sequence[str]) -> str:
    return next(path for path in paths if paths.count(path) > 1)


def _each(option: str, values: Sequence[T], count: int) -> Sequence[T]:
    """Return a value for each posterior; one value is that of all."""
    if len(values) not in (1, count):
        raise UnsupportedError(
            f"{option} was given {len(values)} times and --posterior {count} times; expected as many, in the same "
            f"order, or one {option} for all."
        )
    return list(values) * count if len(values) == 1 else values
