"""Several posteriors with their models, as ``compare`` and ``evaluate`` take them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from lapwing.cli.models import model_of, posterior_of
from lapwing.cli.options import device_of
from lapwing.errors import UnsupportedError
from lapwing.fitted import Fitted

T = TypeVar("T")


def add_posteriors(parser: ArgumentParser) -> None:
    """Add models, weights and posteriors, one of each or several."""
    parser.add_argument(
        "models", nargs="+", metavar="MODEL",
        help="import path of each model, package.module:factory, or one for all posteriors",
    )  # fmt: skip
    several: dict[str, Any] = {"type": Path, "nargs": "+", "action": "extend", "metavar": "FILE"}
    parser.add_argument("--weights", default=[], help="weights of each model, or one file for all", **several)
    parser.add_argument("--posterior", required=True, help="files that lapwing fit wrote", **several)


def posteriors_given(arguments: Namespace) -> dict[str, Fitted]:
    """Return the posteriors by name. Those with the same model and weights share one network.

    Raises:
        UnsupportedError: If the numbers of models, weights and posteriors do not match.
    """
    files, device = arguments.posterior, device_of(arguments)
    paths = _each("MODEL", arguments.models, len(files))
    weights = _each("--weights", arguments.weights or [None], len(files))
    pairs = list(zip(paths, weights, strict=True))
    models = {pair: model_of(*pair, device) for pair in dict.fromkeys(pairs)}
    return {
        name: posterior_of(file, models[pair]) for name, file, pair in zip(names_of(files), files, pairs, strict=True)
    }


def names_of(files: Sequence[Path]) -> list[str]:
    """Return a name for each file: without folder and suffix, or the whole path if two would have the same.

    >>> names_of([Path("runs/small.lapwing"), Path("runs/large.lapwing")])
    ['small', 'large']
    """
    names = [file.stem for file in files]
    if len(set(names)) == len(names):
        return names
    paths = [str(file) for file in files]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise UnsupportedError(f"--posterior names {twice[0]} twice; expected different files.")
    return paths


def _each(option: str, values: Sequence[T], count: int) -> Sequence[T]:
    """Return a value for each posterior; one value is that of all."""
    if len(values) not in (1, count):
        raise UnsupportedError(
            f"{option} was given {len(values)} times and --posterior {count} times; expected as many, in the same "
            f"order, or one {option} for all."
        )
    return list(values) * count if len(values) == 1 else values
