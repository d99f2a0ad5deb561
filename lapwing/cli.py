"""The command line: ``lapwing run`` runs the demo and writes its tables, picture and numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing.errors import LapwingError

if TYPE_CHECKING:
    from lapwing.demo.result import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 1 with a message on stderr."""
    parser = argparse.ArgumentParser(prog="lapwing", description="Calibrated error bars for trained networks.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="digits, diabetes and a 1-D gap: tables, a picture and results.json")
    run.add_argument("--quick", action="store_true", help="train once and for ten epochs only, to try the command out")
    run.add_argument("--out", type=Path, required=True, help="folder for the files that are written")
    run.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    return publish("lapwing", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> Report:
    from lapwing.demo.run import run

    arguments.out.mkdir(parents=True, exist_ok=True)
    return run(arguments.out, arguments.seed, arguments.quick)


def publish(program: str, work: Callable[[], Report]) -> int:
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
        if (missing.name or "").startswith(("lapwing", "experiments")):
            raise
        print(f"{program}: {missing.name} is not installed; use pip install 'lapwing[run]'.", file=sys.stderr)
        return 1
    except (LapwingError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0
