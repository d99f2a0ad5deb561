"""The pictures of a report, each with a heading, a caption and a description, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from lapwing import plots
from lapwing.errors import LapwingError
from lapwing.plots.canvas import new_axis, thinned
from lapwing.plots.hyperparameters import EvidenceCurve, trace_with_steps
from lapwing.plots.observed import LEVELS, Residuals, observed_coverage, reliability_points, risk_of, separate
from lapwing.report.svg import Picture, inline_svg
from lapwing.report.uncertain import Looked
from lapwing.report.verdict import percent

SIZE = (4.0, 3.1)  # inches: text stays readable on a phone


def score_pictures(evaluation: Any) -> Iterator[tuple[Picture, Any]]:
    """Yield pictures of predictions beside targets, before and after, each with its numbers."""
    each = separate(evaluation)
    if isinstance(each["posterior"], Residuals):
        coverages = {name: observed_coverage(found, None) for name, found in each.items()}
        inside = {name: percent(values[LEVELS.index(0.9)]) for name, values in coverages.items()}
        alt = f"Coverage of intervals. The 90 % intervals hold {inside['posterior']} of the targets with the posterior"
        yield _picture(
            "intervals", "Calibration of intervals",
            "The share of targets inside central intervals against the probability of these. On the dotted line the "
            "intervals are calibrated; below it they are too narrow. The grey band shows what chance alone does.",
            f"{alt} and {inside['plain network']} with the plain network.",
            plots.intervals(evaluation, ax=new_axis(size=SIZE)),
        ), {"levels": LEVELS, **coverages}  # fmt: skip
    else:
        points = {name: asdict(reliability_points(found)) for name, found in each.items()}
        gap = {name: f"{percent(float(found.probability.mean()))} confident and {percent(float(found.true.mean()))} right"
               for name, found in each.items()}  # fmt: skip
        yield _picture(
            "reliability", "Reliability diagram",
            "How often answers are right against how confident they are, in ten bins, with 95 % intervals. On the "
            "dotted line confidence can be taken at its word; below it answers are overconfident.",
            f"Reliability diagram. On average the posterior is {gap['posterior']}, the plain network "
            f"{gap['plain network']}.",
            plots.reliability(evaluation, ax=new_axis(size=SIZE)),
        ), points  # fmt: skip
    curves = {name: risk_of(found, None) for name, found in each.items()}
    rows = thinned(len(curves["posterior"].risk), 100)
    half = {name: curve.risk[(len(curve.risk) - 1) // 2].item() for name, curve in curves.items()}
    yield _picture(
        "risk", "Error of what is answered",
        "The error of the answers that remain if the most uncertain inputs are left unanswered. A good uncertainty "
        "makes the curve fall to the left.",
        f"Risk against coverage. Answering the more certain half of the inputs, the error is {half['posterior']:.3g} "
        f"with the posterior and {half['plain network']:.3g} with the plain network; answering all, it is "
        f"{curves['posterior'].risk[-1].item():.3g} and {curves['plain network'].risk[-1].item():.3g}.",
        plots.risk_coverage(evaluation, ax=new_axis(size=SIZE)),
    ), {n: {"coverage": c.coverage[rows].tolist(), "risk": c.risk[rows].tolist()} for n, c in curves.items()}  # fmt: skip


def band_picture(posterior: Any, looked: Looked) -> tuple[Picture, Any] | None:
    """Return the band over one input variable; None if inputs have several, or targets are no numbers."""
    if looked.line is None or len(posterior.network.output_shape) != 1:
        return None
    x, y = looked.line[0].reshape(-1, 1), looked.line[1]
    inputs = plots.grid(x, points=120, margin=0.15)
    prediction = posterior.predict(inputs.reshape(-1, *looked.line[0].shape[1:]).to(posterior.network.device))
    if not hasattr(prediction, "interval"):
        return None
    chosen = thinned(len(x), 300)
    low, high = prediction.interval(0.95)
    widths = (high - low)[:, 0]
    ax = plots.band(prediction, inputs, data=(x[chosen], y[chosen]), ax=new_axis(size=SIZE))
    alt = (
        f"Mean and 95 % intervals over the input. Intervals are between {float(widths.min()):.3g} and "
        f"{float(widths.max()):.3g} wide."
    )
    caption = (
        "The wide band holds 95 % of the targets, if calibrated; the dark band is the doubt about the function, which "
        "more data would lower. Points are held-out data."
    )
    numbers = {"x": inputs[:, 0], "mean": prediction.mean[:, 0], "low": low[:, 0], "high": high[:, 0]}
    return _picture("band", "Predictions", caption, alt, ax), {k: v.detach().cpu().tolist() for k, v in numbers.items()}


def learned_pictures(posterior: Any) -> Iterator[tuple[Picture | str, str, Any]]:
    """Yield what was learned: picture or reason why there is none, a name, and its numbers."""
    try:
        found = posterior.effective_parameters()
    except LapwingError as error:
        yield f"γ by layer: {error}", "effective_parameters", None
    else:
        size = (SIZE[0], 1.0 + 0.26 * min(24, len(found.layers)))
        alt = f"Effective parameters by layer: the data determine {found.total:.3g} of {found.weights:,} weights in all."
        caption = (
            "γ, the number of weights that the data determine, over the number of weights of each layer. The others "
            "keep what the prior says."
        )
        picture = _picture(
            "gamma", "What the data determine", caption, alt,
            plots.effective_parameters(found, ax=new_axis(size=size)),
        )  # fmt: skip
        yield picture, "effective_parameters", {"total": found.total, "layers": found.layers, "sizes": found.sizes}
    yield _evidence(posterior)
    record = trace_with_steps(posterior)
    if record is None:
        yield "Trace: no steps of a tuner were recorded.", "trace", None
        return
    alt = f"Score at each of {len(record.steps)} steps of {record.tuner}."
    caption = f"The {record.score} at every step of {record.tuner}; the ring marks the best."
    steps = [{"score": step.score, "precisions": step.precisions[:16]} for step in record.steps]
    picture = _picture("trace", "Trace of the tuner", caption, alt, plots.trace(record, ax=new_axis(size=SIZE)))
    yield picture, "trace", {"tuner": record.tuner, "steps": steps}


def _evidence(posterior: Any) -> tuple[Picture | str, str, Any]:
    """Return the curve of the evidence, or why there is none."""
    if posterior.base.is_sampled or posterior.base.solves_for_inputs:
        reason = "each precision would need linear systems over all training data, so it is left out."
        return f"Evidence curve: {reason}", "evidence_curve", None
    try:
        curve = EvidenceCurve.of(posterior)
        ax = plots.evidence_curve(curve, ax=new_axis(size=SIZE))
    except LapwingError as error:
        return f"Evidence curve: {error}", "evidence_curve", None
    finite = [(e, p) for e, p in zip(curve.log_evidence, curve.precisions) if e == e]
    best = max(finite)
    caption = (
        "The log evidence, by which the training data alone judge the prior, against its precision. A default fit mixes "
        "several precisions around the dashed line."
    )
    alt = f"Log evidence against precision: highest, {best[0]:.4g}, at {best[1]:.3g}; the fit has {curve.present:.3g}."
    return _picture("evidence", "Evidence and prior", caption, alt, ax), "evidence_curve", asdict(curve)


def _picture(name: str, heading: str, caption: str, alt: str, ax: Any) -> Picture:
    with torch.no_grad():
        return Picture(name, heading, caption, alt, inline_svg(name, ax, alt))
