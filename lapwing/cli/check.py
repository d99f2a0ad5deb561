"""``lapwing check``: how each layer is handled and what each method would cost."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict

from lapwing.check import check
from lapwing.cli.options import (
    Outcome,
    add_common,
    add_data,
    add_model,
    add_subset,
    model_given,
    reader_given,
    seed_all,
    subset_of,
)

HELP = "say how each layer is handled and what each method would cost, before anything is fitted"


def add_options(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    add_subset(parser)
    parser.add_argument("--timed", action="store_true", help="measure the times of all methods on one batch")
    add_data(parser, "the training data")
    add_common(parser)


def run(arguments: Namespace) -> Outcome:
    """Check the model with the first batch."""
    seed_all(arguments.seed)
    model = model_given(arguments, trained=False)
    data = reader_given(arguments, model, labelled=False).read(arguments.data)
    batch = next(iter(data.batches))
    if isinstance(batch, Mapping):
        batch = {name: values for name, values in batch.items() if name not in arguments.target}
    report = check(model, batch, weights=subset_of(arguments), data=data.rows, timed=arguments.timed)
    facts = {
        "model": arguments.model, "data": data.facts, "weights": report.weights, "outputs": report.outputs,
        "dtype": report.dtype, "layers": [asdict(layer) for layer in report.layers],
        "methods": {name: asdict(cost) for name, cost in report.costs.items()},
        "recommended": {"method": type(report.recommended.method).__name__, "why": report.recommended.why},
    }  # fmt: skip
    return Outcome(f"{data.described}\n{report}", facts)
