"""``lapwing compare``: posteriors ranked by their evidence, from their training data alone."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from lapwing.cli.options import Outcome, add_common, add_posteriors, posteriors_given, seed_all
from lapwing.compare import compare

HELP = "rank models by the evidence of their posteriors, which needs no data"


def add_options(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_posteriors(parser)
    add_common(parser)


def run(arguments: Namespace) -> Outcome:
    """Load every posterior with its model, and rank them. They are named by their files."""
    seed_all(arguments.seed)
    comparison = compare(posteriors_given(arguments))
    candidates = [asdict(candidate) for candidate in comparison.candidates]
    facts = {"best": comparison.best, "candidates": candidates, "findings": comparison.findings}
    return Outcome(str(comparison), facts)
