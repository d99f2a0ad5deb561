"""Command-line options that several experiments have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from lapwing.errors import LapwingError

Progress = Callable[[str], None]  # is called with one line about progress


def silent(line: str) -> None:
    """Ignore a line about progress."""


def positive(text: str) -> int:
    """Return the number, or raise unless it is at least one.

    >>> positive("3")
    3
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def add_data_dir(parser: argparse.ArgumentParser, files: str = "the .npz files") -> None:
    """Add --data-dir."""
    parser.add_argument("--data-dir", type=Path, help=f"folder of {files}; by default LAPWING_DATA")


def add_seeds(parser: argparse.ArgumentParser, default: int) -> None:
    """Add --seeds, the number of repetitions."""
    parser.add_argument("--seeds", type=positive, default=default, help=f"number of repetitions ({default})")


def add_quick(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --quick."""
    parser.add_argument("--quick", action="store_true", help=f"{what}; to try the command out")


def add_large_data(parser: argparse.ArgumentParser) -> None:
    """Add the options of experiments on large data: --data-dir, --data, --seeds and --device."""
    add_data_dir(parser)
    parser.add_argument("--data", type=positive, help="number of training rows or images")
    add_seeds(parser, 3)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")


def chosen(given: Sequence[str] | None, known: Sequence[str], option: str) -> tuple[str, ...]:
    """Return the names given, or all known ones if none is given. Raise if a name is unknown.

    >>> chosen(None, ("wine", "yacht"), "--sets")
    ('wine', 'yacht')
    """
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        raise LapwingError(f"{option}: unknown {', '.join(unknown)}; expected some of {', '.join(known)}.")
    return tuple(given or known)
