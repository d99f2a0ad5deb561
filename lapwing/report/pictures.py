"""The pictures of a report, each with a heading, a caption and a description, and the numbers behind them."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import torch

from lapwing import plots
from lapwing.errors import LapwingError
from lapwing.plots import (
    COLOURS,
    INK,
    LEVELS,
    MOST_LAYERS,
    EvidenceCurve,
    Residuals,
    new_axis,
    observed_coverage,
    reliability_points,
    risk_of,
    separate,
    thinned,
    trace_with_steps,
)
from lapwing.report.verdict import Looked, percent

# Colours that follow the page, which is light or dark; those of text and lines are the colour of its text.
VARIABLES = {colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)}
VARIABLES |= {INK: "currentColor", "#000000": "currentColor"}
_HEADER = re.compile(r"^.*?<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)
_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>\s*", re.DOTALL)  # it would hold for the whole page
_ID = re.compile(r"(\bid=\"|url\(#|href=\"#)([^\")]+)")
_UNSIZED = re.compile(r"(-?\d+\.\d{2})\d+")


@dataclass(frozen=True)
class Picture:
    """An inline SVG with a heading, a caption, and a description for those who do not see it."""

    name: str  # unique in the page
    heading: str
    caption: str
    alt: str
    svg: str


def inline_svg(name: str, ax: Any, alt: str) -> str:
    """Return the figure of an axis as an SVG element for a page.

    Equal figures give equal text. All ids start with ``name``, so that several pictures fit in one page.
    """
    import matplotlib

    figure, written = ax.figure, io.StringIO()
    figure.patch.set_visible(False)
    for axis in figure.axes:
        axis.patch.set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    text = _STYLE.sub("", _COMMENT.sub("", _METADATA.sub("", written.getvalue())))
    box = _HEADER.match(text)
    assert box is not None
    text = _ID.sub(rf"\g<1>{name}-\g<2>", text[box.end() :])
    text = _UNSIZED.sub(r"\1", text)  # hundredths of a point are enough
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    label = escape(alt, quote=True)
    return (
        f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{name}-title" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{name}-title">{label}</title>{text}'
    )


SIZE = (4.0, 3.1)  # inches: text stays readable on a phone


def score_pictures(evaluation: Any) -> Iterator[tuple[Picture, Any]]:
    """Yield pictures of predictions beside targets, of the plain network and the posterior, each with its numbers."""
    each = separate(evaluation)
    yield _intervals(each) if isinstance(each["posterior"], Residuals) else _reliability(each)
    yield _risk(each)


def _intervals(each: Mapping[str, Any]) -> tuple[Picture, Any]:
    coverages = {name: observed_coverage(found, None) for name, found in each.items()}
    inside = {name: percent(values[LEVELS.index(0.9)]) for name, values in coverages.items()}
    caption = (
        "The share of targets inside central intervals against the probability of these. On the dotted line the "
        "intervals are calibrated; below it they are too narrow. The grey band shows what chance alone does."
    )
    alt = (
        f"Coverage of intervals. The 90 % intervals of the posterior hold {inside['posterior']} of the targets, those "
        f"of the plain network {inside['plain network']}."
    )
    ax = plots.intervals(each, ax=new_axis(size=SIZE))
    return _picture("intervals", "Calibration of intervals", caption, alt, ax), {"levels": LEVELS, **coverages}


def _reliability(each: Mapping[str, Any]) -> tuple[Picture, Any]:
    means = {name: (float(found.probability.mean()), float(found.true.mean())) for name, found in each.items()}
    says = {name: f"{percent(sure)} confident and {percent(right)} right" for name, (sure, right) in means.items()}
    caption = (
        "How often answers are right against how confident they are, in ten bins, with 95 % intervals. On the dotted "
        "line confidence can be taken at its word; below it answers are overconfident."
    )
    if not each["posterior"].of_classes:
        says = {name: f"{percent(said)} sure of one, of {percent(share)} ones" for name, (said, share) in means.items()}
        caption = (
            "How often a label is one against the predicted probability of that, in ten bins, with 95 % intervals. On "
            "the dotted line the probability can be taken at its word; below it, it is too high."
        )
    alt = (
        f"Reliability diagram. On average the posterior is {says['posterior']}, the plain network "
        f"{says['plain network']}."
    )
    ax = plots.reliability(each, ax=new_axis(size=SIZE))
    points = {name: asdict(reliability_points(found)) for name, found in each.items()}
    return _picture("reliability", "Reliability diagram", caption, alt, ax), points


def _risk(each: Mapping[str, Any]) -> tuple[Picture, Any]:
    curves = {name: risk_of(found, None) for name, found in each.items()}
    rows = thinned(len(curves["posterior"].risk), 100)
    half, full = ({n: f"{c.risk[(len(c.risk) - 1) // k].item():.3g}" for n, c in curves.items()} for k in (2, 1))
    caption = (
        "The error of the answers that remain if the most uncertain inputs are left unanswered. A good uncertainty "
        "makes the curve fall to the left."
    )
    alt = (
        f"Risk against coverage. Answering the more certain half of the inputs, the error is {half['posterior']} with "
        f"the posterior and {half['plain network']} with the plain network; answering all, it is "
        f"{full['posterior']} and {full['plain network']}."
    )
    ax = plots.risk_coverage(each, ax=new_axis(size=SIZE))
    numbers = {n: {"coverage": c.coverage[rows].tolist(), "risk": c.risk[rows].tolist()} for n, c in curves.items()}
    return _picture("risk", "Error of what is answered", caption, alt, ax), numbers


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
        "The wide band holds 95 % of the targets, if calibrated; the inner band is the doubt about the function, which "
        "more data would lower. Points are held-out data."
    )
    numbers = {"x": inputs[:, 0], "mean": prediction.mean[:, 0], "low": low[:, 0], "high": high[:, 0]}
    return _picture("band", "Predictions", caption, alt, ax), {k: v.detach().cpu().tolist() for k, v in numbers.items()}


def learned_pictures(posterior: Any) -> Iterator[tuple[Picture | str, str, Any]]:
    """Yield what was learned: a picture, or the reason why there is none, a name, and its numbers."""
    yield _gamma(posterior)
    yield _evidence(posterior)
    yield _trace(posterior)


def _gamma(posterior: Any) -> tuple[Picture | str, str, Any]:
    try:
        found = posterior.effective_parameters()
    except LapwingError as error:
        return f"γ by layer: {error}", "effective_parameters", None
    size = (SIZE[0], 1.0 + 0.26 * min(MOST_LAYERS, len(found.layers)))
    caption = (
        "γ, the number of weights that the data determine, over the number of weights of each layer. The others keep "
        "what the prior says."
    )
    alt = f"Effective parameters by layer: the data determine {found.total:.3g} of {found.weights:,} weights in all."
    ax = plots.effective_parameters(found, ax=new_axis(size=size))
    numbers = {"total": found.total, "layers": found.layers, "sizes": found.sizes}
    return _picture("gamma", "What the data determine", caption, alt, ax), "effective_parameters", numbers


def _trace(posterior: Any) -> tuple[Picture | str, str, Any]:
    record = trace_with_steps(posterior)
    if record is None:
        return "Trace: no steps of a tuner were recorded.", "trace", None
    caption = f"The {record.score} at every step of {record.tuner}; the ring marks the best."
    alt = f"The {record.score} at each of {len(record.steps)} steps of {record.tuner}."
    steps = [{"score": step.score, "precisions": step.precisions[:16]} for step in record.steps]
    ax = plots.trace(record, ax=new_axis(size=SIZE))
    return _picture("trace", "Trace of the tuner", caption, alt, ax), "trace", {"tuner": record.tuner, "steps": steps}


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
    best = max((e, p) for e, p in zip(curve.log_evidence, curve.precisions, strict=True) if math.isfinite(e))
    caption = (
        "The log evidence, by which the training data alone judge the prior, against its precision. A default fit "
        "mixes several precisions around the dashed line."
    )
    alt = f"Log evidence against precision: highest, {best[0]:.4g}, at {best[1]:.3g}; the fit has {curve.present:.3g}."
    return _picture("evidence", "Evidence and prior", caption, alt, ax), "evidence_curve", asdict(curve)


def _picture(name: str, heading: str, caption: str, alt: str, ax: Any) -> Picture:
    with torch.no_grad():
        return Picture(name, heading, caption, alt, inline_svg(name, ax, alt))
