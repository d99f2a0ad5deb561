"""The option ``--subset``: which weights are uncertain."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from lapwing.networks.selection import Weights, named
from lapwing.registry import WEIGHTS
from lapwing.registry import named as registered


def add_subset(parser: ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--subset", default="all", metavar="WEIGHTS",
        help="which weights are uncertain: all, last_layer, or a regular expression for their names (default: all)",
    )  # fmt: skip


def subset_of(arguments: Namespace) -> Weights:
    """Return the rule that the option stands for."""
    if arguments.subset not in WEIGHTS:
        return named(arguments.subset)
    rule: Weights = registered("weights", arguments.subset)
    return rule
