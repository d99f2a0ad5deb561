"""Run an experiment by ``python -m experiments NAME [options]``; ``--list`` shows those that the engine knows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from experiments.engine import command as engine
from experiments.engine.known import EXPERIMENTS as STORED
from lapwing.demo.result import ExperimentReport, table

EXPERIMENTS = {  # the name of a module in this folder, and its help
    "calibration": "are the error bars right as they come? many tasks, against the plain network",
    "cifar": "CIFAR-10 with given ResNets: error bars as they come, on a GPU",
    "uci": "nine regression tables from a data folder",
    "biased": "classification on a folder of tables: temperature, offsets and precision, with class balance lost",
    "widths": "regression on a folder of tables: intervals with and without validation data",
    "flights": "arrival delays: a large table, every method for regression",
    "fashion": "Fashion-MNIST: cross-validation against training with the evidence",
    "normalised": "MNIST: naive against corrected evidence, normalised networks",
    "sampling": "digits: noise of the gradients of samples, and γ from one sample",
    "inducing": "functions of one input: inducing points against the exact posterior",
    "images": "one network for images, every method: likelihood, calibration, OOD",
    "language": "sentences: transformers and adapters, next words and whole sequences, every method",
    "response": "error bars by pushing: two tasks, sensitivity, tables",
    "tomography": "images from few X-ray angles, with error bars: one phantom and its pictures, on a page",
    "pushed": "a convolutional network at its minimum, pushed: Fashion-MNIST",
}

ENGINE = ("--list", "--docs", "--join")  # commands about all experiments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment that is named first and return the exit status: 0, or 1 with a message on stderr."""
    given = list(sys.argv[1:] if argv is None else argv)
    if _for_engine(given):
        return engine.main(given, EXPERIMENTS)
    return engine.exit_status(lambda: _publish(_run(given)))


def _for_engine(given: list[str]) -> bool:
    """Return whether the engine runs this: an experiment that has other options too is run by it with --form."""
    name = given[0] if given else ""
    asked = any(word.split("=")[0] in ("--form", "--config") for word in given)
    return name in ENGINE or (name in STORED and (asked or name not in EXPERIMENTS))


def _run(given: list[str]) -> ExperimentReport:
    arguments = _parser(given[0] if given else "").parse_args(given)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: ExperimentReport = arguments.command(arguments, _print_progress)
    return report


def _publish(report: ExperimentReport) -> int:
    """Print the tables of a report, write its files, and print their paths."""
    for result in report.results:
        print(table(result), end="\n\n")
    print(*report.write(), sep="\n")
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of all names. Only the experiment that is run is imported and has its options added."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Experiments with Lapwing.")
    commands = parser.add_subparsers(dest="name", required=True)
    for each in STORED:
        if each not in EXPERIMENTS:
            commands.add_parser(each, help="see --list")
    for each, text in EXPERIMENTS.items():
        command = commands.add_parser(each, help=text)
        command.add_argument("--out", type=Path, required=True, help="folder for the files that are written")
        command.add_argument("--seed", type=int, default=0)
        if each == name:
            module = import_module(f"experiments.{name}")
            command.set_defaults(command=module.command)
            module.add_options(command)
    return parser


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
