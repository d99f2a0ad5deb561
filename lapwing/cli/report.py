"""``lapwing report``: one page about a posterior, for people who do not write code."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace

from lapwing.cli.models import posterior_of
from lapwing.cli.options import (
    Outcome,
    add_common,
    add_data,
    add_level,
    add_model,
    add_out,
    add_posterior,
    model_given,
    reader_given,
    refuse_output,
    seed_all,
    target_key,
)

HELP = "write a page in HTML with a verdict, scores and pictures, from data that were not used for the fit"


def add_options(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    add_posterior(parser)
    add_level(parser)
    parser.add_argument("--title", help="heading of the page (default: the name of the model)")
    add_out(parser, "the page, such as report.html")
    add_data(parser, "data with targets that were not used for the fit")
    add_common(parser)


def run(arguments: Namespace) -> Outcome:
    """Write the page."""
    refuse_output(arguments, (".html", ".htm"))
    seed_all(arguments.seed)
    model = model_given(arguments)
    posterior = posterior_of(arguments.posterior, model)
    known, labels = posterior.columns, posterior.likelihood.has_logits
    data = reader_given(arguments, model, labels=labels, columns=known).read(arguments.data)
    report = posterior.report(
        data.batches, arguments.out, title=arguments.title or f"Error bars of {arguments.model}",
        level=arguments.level, seed=arguments.seed, target_key=target_key(arguments, known),
        command=shlex.join(["lapwing", *arguments.words]),
    )  # fmt: skip
    facts = {"data": data.facts, "seed": arguments.seed, "verdict": report.verdict, "report": report.numbers}
    return Outcome(f"{data.described}\n{report.verdict}\nWritten to {arguments.out}", {**facts, "out": arguments.out})
