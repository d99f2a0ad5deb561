"""``lapwing evaluate``: the scores of one posterior or several on held-out data, beside those of the plain network."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from lapwing.cli.options import (
    COLUMNS,
    Outcome,
    add_common,
    add_data,
    add_level,
    add_posteriors,
    posteriors_given,
    reader_given,
    seed_all,
    target_key,
)
from lapwing.compare import evaluate, kind_of
from lapwing.errors import DataError
from lapwing.fitted import Fitted

HELP = "score posteriors on data that were not used for the fit, beside the plain network"


def add_options(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_posteriors(parser)
    add_level(parser)
    add_data(parser, "data with targets that were not used for the fit")
    add_common(parser)


def run(arguments: Namespace) -> Outcome:
    """Score one posterior against the plain network, or rank several with it."""
    generator = seed_all(arguments.seed)
    posteriors = posteriors_given(arguments)
    first = next(iter(posteriors.values()))
    labels = first.likelihood.has_logits
    known = columns_of(posteriors, arguments)
    data = reader_given(arguments, first.network.model, labels=labels, columns=known).read(arguments.data)
    settings = {"level": arguments.level, "target_key": target_key(arguments, known), "generator": generator}
    alone = len(posteriors) == 1
    named = posteriors if alone else {shown_name(name, each): each for name, each in posteriors.items()}
    found = first.evaluate(data.batches, **settings) if alone else evaluate(named, data.batches, **settings)
    facts = {"data": data.facts, "seed": arguments.seed, "posteriors": list(named), "evaluation": found.to_json()}
    return Outcome(f"{data.described}\n{found}", facts)


def columns_of(posteriors: Mapping[str, Fitted], arguments: Namespace) -> Mapping[str, tuple[str, ...]]:
    """Return the names of columns and classes that the posteriors were fitted with; raise if they differ.

    Raises:
        DataError: If the data would be read in another way for another posterior, and no option decides it.
    """
    (name, first), *others = posteriors.items()
    for other, each in others:
        for option in COLUMNS:
            one, two = (p.columns.get(option, ()) for p in (first, each))
            if one and two and one != two and not getattr(arguments, option):
                raise DataError(
                    f"{name} was fitted with --{option} {','.join(one)} and {other} with --{option} {','.join(two)}; "
                    f"expected the same. Give --{option}, or evaluate them one by one."
                )
    return {option: names for p in reversed([*posteriors.values()]) for option, names in p.columns.items()}


def shown_name(name: str, fitted: Fitted) -> str:
    """Return the name of a file, and what is in it if it has no error bars: files do not show that."""
    kind = kind_of(fitted.posterior)
    return f"{name} ({kind})" if kind else name
