"""``lapwing fit``: a posterior around the trained weights, written to a file."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from typing import Any

from lapwing.api import fit
from lapwing.cli.options import (
    Outcome,
    add_common,
    add_data,
    add_model,
    add_out,
    add_subset,
    columns_of_fit,
    model_given,
    reader_given,
    refuse_output,
    seed_all,
    subset_of,
    target_key,
)
from lapwing.fitted import Fitted
from lapwing.registry import LIKELIHOODS, METHODS, named
from lapwing.runtime.settings import NONE, POSITIVE, one_of

HELP = "fit a posterior around the trained weights and write it to a file"


def add_options(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    parser.add_argument(
        "--likelihood", required=True, metavar="NAME",
        help="what the targets are: classification, regression, binary, multilabel, counts or heteroscedastic",
    )  # fmt: skip
    parser.add_argument(
        "--validation", metavar="DATA",
        help="data that the network was not trained on, as for --data; 200 rows or more calibrate the error bars",
    )  # fmt: skip
    parser.add_argument("--method", metavar="NAME", help="such as kron, full or auto (default: kron)")
    add_subset(parser)
    parser.add_argument("--prior", type=float, metavar="PRECISION", help="precision of the weights (default: learned)")
    add_out(parser, "the posterior, such as net.lapwing")
    add_data(parser, "the training data")
    add_common(parser)


def run(arguments: Namespace) -> Outcome:
    """Fit and save."""
    one_of(LIKELIHOODS).check("--likelihood", arguments.likelihood)
    (one_of([*METHODS, "auto"]) | NONE).check("--method", arguments.method)
    (POSITIVE | NONE).check("--prior", arguments.prior)
    refuse_output(arguments)
    generator = seed_all(arguments.seed)
    model = model_given(arguments)
    reader = reader_given(arguments, model, labels=named("likelihood", arguments.likelihood).has_logits)
    data = reader.read(arguments.data)
    held_out = None if arguments.validation is None else reader.beside(data).read(arguments.validation, "--validation")
    posterior = fit(
        model, data.batches, arguments.likelihood, method=arguments.method, weights=subset_of(arguments),
        prior=arguments.prior, validation=None if held_out is None else held_out.batches,
        target_key=target_key(arguments), generator=generator,
    )  # fmt: skip
    posterior = replace(posterior, columns=columns_of_fit(arguments, data.classes))
    posterior.save(arguments.out)
    described = [data.described, *([] if held_out is None else [held_out.described])]
    notes = worse_than_chance(posterior)
    facts = {
        "model": arguments.model, "data": data.facts, "validation": None if held_out is None else held_out.facts,
        "seed": arguments.seed, **facts_of(posterior), "notes": notes,
        "out": arguments.out,
    }  # fmt: skip
    lines = [*described, posterior.summary(), *(f"Note: {note}" for note in notes), f"Written to {arguments.out}"]
    return Outcome("\n".join(lines), facts)


def worse_than_chance(posterior: Fitted) -> list[str]:
    """Return a note if the network predicts the classes that it was trained on worse than equal probabilities do."""
    if not posterior.likelihood.has_logits:
        return []
    statistics, outputs = posterior.base.statistics, posterior.network.output_shape[-1]
    each = posterior.likelihood.ignores_common_shift  # one class of several, and not several labels of two
    nll, count = statistics.loss / (statistics.data * (1 if each else outputs)), outputs if each else 2
    if nll <= math.log(count):
        return []
    return [
        f"the network predicts the training targets worse than chance (NLL {nll:.3g}, log {count} = "
        f"{math.log(count):.2f}): are its weights loaded, and are the classes in the order of its outputs? Give their "
        "order by --classes."
    ]


def facts_of(posterior: Fitted) -> dict[str, Any]:
    """Return what a posterior says of itself, as plain data."""
    trace, selection = posterior.trace, posterior.network.selection
    return {
        "method": posterior.method, "why": posterior.why or None, "weights": selection.size,
        "likelihood": type(posterior.likelihood).__name__, "precision": posterior.prior.values,
        "noise_variance": posterior.likelihood.noise_variance,
        "tuner": None if trace is None else trace.tuner or None,
        "scores": {} if trace is None else {"on": trace.scored_on, "nll": asdict(trace)["scores"]},
        "findings": list(posterior.findings), "summary": posterior.summary(),
    }  # fmt: skip
