"""The picture of the experiment with two objectives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.engine.contract import Record
from experiments.engine.store import Stored
from lapwing.demo.result import save
from lapwing.plots import INK, OTHER, PLAIN, POSTERIOR, new_figure

COLOURS = {"L": PLAIN, "L'": POSTERIOR}
CLAIM = 16  # the published factor between batch sizes


def draw(result: Stored, path: Path) -> None:
    """Draw the error by batch size and by time under the largest precision, and the factors by γ / nC."""
    figure, axes = new_figure(1, 3, (13.6, 4.2))
    by_batch, by_time, factors = axes[0]
    records = [record for record in result.records if "error, %" in record.scores]
    group = min(records, key=lambda record: record.scores["γ / nC, %"]).group  # that of the largest precision
    shown = [record for record in records if record.group == group]
    steps = sorted({record.scores["steps"] for record in shown})
    sizes = sorted({record.scores["batch"] for record in shown})
    for name, colour in COLOURS.items():
        curve = [_errors(shown, name, batch, steps[-1]) for batch in sizes]
        mean, error = (torch.stack(values) for values in zip(*map(mean_and_error, curve), strict=True))
        by_batch.errorbar(sizes, mean, 2 * error, fmt="o-", color=colour, markersize=4.5, label=name)
        for style, batch in zip(("o:", "o--", "o-"), (sizes[0], sizes[len(sizes) // 2], sizes[-1]), strict=True):
            runs = [[r for r in shown if r.method == f"{name}, batch {batch:.0f}, {n:.0f} steps"] for n in steps]
            seconds = [sum(r.seconds or 0 for r in each) / len(each) for each in runs]
            error_of = [sum(r.scores["error, %"] for r in each) / len(each) for each in runs]
            by_time.loglog(seconds, error_of, style, color=colour, markersize=4.5, label=f"{name}, batch {batch:.0f}")
    by_batch.set(title=f"{group}, {steps[-1]:.0f} steps", xlabel="batch", ylabel="error of X z, %", xscale="log")
    by_batch.set(yscale="log")
    by_time.set(title=f"{group}", xlabel="seconds of one core or GPU", ylabel="error of X z, %")
    _draw_factors(factors, result.records)
    for axis in (by_batch, by_time, factors):
        axis.title.set_fontsize(10)
        if axis is not factors:
            axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.tick_params(which="both", labelsize=8)
        axis.legend(frameon=False, fontsize=8)
    save(figure, path)


def _draw_factors(axis: Any, records: Iterable[Record]) -> None:
    """Draw, with two standard errors over the seeds, the factor of batches and the squared ratio of errors."""
    ratios = [record for record in records if record.method == "L over L'"]
    curves = (("factor of batches", 1, POSTERIOR, "batches at the same error"),
              ("ratio of errors", 2, OTHER, "squared errors with the same batches"))  # fmt: skip
    shares: set[float] = set()
    for key, power, colour, label in curves:
        for number, group in enumerate(dict.fromkeys(record.group for record in ratios)):
            known = [record for record in ratios if record.group == group and key in record.scores]
            if not known:
                continue
            share = sum(record.scores["γ / nC, %"] for record in known) / len(known)
            mean, error = mean_and_error(torch.tensor([record.scores[key] ** power for record in known]))
            shares.add(share)
            name = label if not number else None
            axis.errorbar(share, mean, 2 * error, fmt="o", color=colour, markersize=5, label=name)
    axis.axhline(CLAIM, color=INK, linestyle="--", linewidth=1, label="published: 16")
    axis.axhline(1, color=INK, linestyle=":", linewidth=1)
    axis.set(title="L over L'", xlabel="γ / nC, %", xscale="log", yscale="log")
    axis.set_xticks(sorted(shares), [f"{share:.2g}" for share in sorted(shares)])
    axis.minorticks_off()


def _errors(records: list[Record], name: str, batch: float, steps: float) -> Tensor:
    wanted = f"{name}, batch {batch:.0f}, {steps:.0f} steps"
    return torch.tensor([record.scores["error, %"] for record in records if record.method == wanted])


def mean_and_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and its standard error; zero for one value.

    >>> mean_and_error(torch.tensor([1.0, 3.0]))
    (tensor(2.), tensor(1.))
    """
    error = values.std() / len(values) ** 0.5 if len(values) > 1 else torch.zeros(())
    return values.mean(), error
