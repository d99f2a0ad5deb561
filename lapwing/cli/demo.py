"""``lapwing demo``: digits, diabetes and a curve with a gap, on embedded data."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing.cli.options import Outcome, add_common
from lapwing.errors import LapwingError, UnsupportedError

if TYPE_CHECKING:
    from lapwing.demo.result import ExperimentReport

HELP = "run digits, diabetes and a curve with a gap, and write their tables, a picture and results.json"


def add_options(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="FOLDER",
        help="folder for the files, made if needed (default: out)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="train once and for ten epochs only, to try it out")
    add_common(parser, device=False)


def run(arguments: Namespace) -> Outcome:
    """Run the three experiments of the demo."""
    try:
        from lapwing.demo.run import run as experiments

        arguments.out.mkdir(parents=True, exist_ok=True)
        return published(experiments(arguments.out, arguments.seed, arguments.quick))
    except ModuleNotFoundError as missing:
        raise UnsupportedError(_missing(missing)) from missing


def published(report: ExperimentReport) -> Outcome:
    """Write the files of a report, and return its tables and their paths."""
    from lapwing.demo.result import table

    paths = report.write()
    tables = [f"{table(result)}\n" for result in report.results]
    results = {result.experiment: json.loads(result.to_json()) for result in report.results}
    return Outcome("\n".join([*tables, *map(str, paths)]), {"results": results, "files": paths})


def publish(program: str, work: Callable[[], ExperimentReport]) -> int:
    """Do the work, print its tables, write its files, print their paths, and return the exit status.

    The status is 1, with a message on stderr, if a package of the extra ``run`` is not installed, or on a
    ``LapwingError`` or ``OSError``.
    """
    try:
        report = work()
        from lapwing.demo.result import table

        for result in report.results:
            print(table(result), end="\n\n")
        print(*report.write(), sep="\n")
    except ModuleNotFoundError as missing:
        print(f"{program}: {_missing(missing)}", file=sys.stderr)
        return 1
    except (LapwingError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0


def _missing(missing: ModuleNotFoundError) -> str:
    """Return the message for a package of the extra; raise the error again if it is a module of ours."""
    if (missing.name or "").startswith(("lapwing", "experiments")):
        raise missing
    return f"{missing.name} is not installed; use pip install 'lapwing[run]'."
