"""The page: scores, verdict, pictures and facts of one posterior, put into a template."""

from __future__ import annotations

import io
import json
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lapwing import plots
from lapwing.decisions.evaluation import Compared, Evaluation, evaluation_of_parts, json_values, meaning_of
from lapwing.errors import LapwingError, UnsupportedError
from lapwing.predictives.base import NumberPredictive
from lapwing.report.verdict import UncertainInputs, cells, find_uncertain_inputs, percent, verdict_of
from lapwing.runtime.files import refuse_no_folder, write_atomically
from lapwing.runtime.settings import PATH, TEXT, Rule, is_integer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing.fitted import Fitted

PACKAGES = ("lapwing", "torch", "matplotlib", "jinja2")


def configuration(posterior: Fitted) -> dict[str, str]:
    """Return method, weights, likelihood, prior, noise and tuner in words."""
    selection, base, trace = posterior.network.selection, posterior.base, posterior.trace
    total = sum(p.numel() for p in posterior.network.model.parameters())
    prior, centre = base.problem.prior, "" if posterior.posterior is base else " at the centre of the mixture"
    facts = {
        "model": type(posterior.network.model).__name__,
        "method": posterior.method or type(base).__name__,
        "weights with error bars": f"{selection.size:,} of {total:,}",
        "likelihood": type(posterior.likelihood).__name__,
        "prior": f"{type(getattr(prior, 'given', prior)).__name__}, precision {_numbers(prior.values)}{centre}",
    }
    if posterior.why:
        facts["reason for the method"] = posterior.why
    if posterior.likelihood.noise_variance is not None:
        facts["noise variance"] = _numbers(posterior.likelihood.noise_variance)
    facts["hyperparameters"] = f"by {trace.tuner}" if trace is not None and trace.tuner else "as given, not tuned"
    if posterior.posterior is not base:
        facts["mixture"] = posterior.posterior.describe()
    return facts


def findings(posterior: Fitted) -> list[str]:
    """Return the remarks of the posterior, of its tuner and on the size of its network."""
    try:
        return [*posterior.findings, *posterior.effective_parameters().findings]
    except LapwingError:
        return list(posterior.findings)


def versions() -> dict[str, str]:
    """Return the versions of everything that could change the numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = str(torch.__version__) if name == "torch" else version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _numbers(values: torch.Tensor) -> str:
    """Return up to three numbers as text, and their range if there are more."""
    flat = values.detach().double().flatten()
    if len(flat) <= 3:
        return ", ".join(f"{value:.3g}" for value in flat.tolist())
    return f"{float(flat.min()):.3g} to {float(flat.max()):.3g} ({len(flat):,} of them)"


TEMPLATE = Path(__file__).with_name("page.html")
UNDECIDED = "no difference can be told"


@dataclass(frozen=True)
class Report:
    """A page that was written: its path, the verdict, and all numbers in it, as they are in the page's JSON.

    ``print`` shows the verdict and the path.
    """

    path: Path
    verdict: str
    numbers: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.verdict}\n{self.path}"

    def __repr__(self) -> str:
        return f"<Report: {self.path}>"


@dataclass(frozen=True)
class PageDetails:
    """What a user says about the page itself."""

    title: str
    seed: int | None
    command: str | None
    date: str | None


def write_page(
    posterior: Fitted, evaluation: Evaluation, looked: UncertainInputs, path: Path, source: PageDetails
) -> Report:
    """Write the page and return it."""
    environment = template()
    verdict = verdict_of(evaluation, posterior.posterior.has_spread)
    pictures, learned, missing, numbers = _draw_pictures(posterior, evaluation, looked)
    about = {"configuration": configuration(posterior), "versions": versions(),
             "findings": findings(posterior), "seed": source.seed, "command": source.command}  # fmt: skip
    scores = {key: value for key, value in evaluation.to_json().items() if not key.endswith("seconds")}
    shown = {"measure": looked.measure, "among": looked.count,
             "rows": [{k: v for k, v in asdict(row).items() if k != "image"} for row in looked.rows]}  # fmt: skip
    numbers = json_values({
        "title": source.title, "date": source.date, "verdict": verdict.sentences,
        "answers": [asdict(answer) for answer in verdict.answers], "evaluation": scores, **numbers,
        "uncertain": shown, **about,
    })  # fmt: skip
    text = environment.render(
        source=source, verdict=verdict, evaluation=evaluation, pictures=pictures, learned=learned, missing=missing,
        looked=looked, about=about, json=embed_json(numbers), percent=percent, cells=cells,
        meaning_of=meaning_of, words_of=words_of,
    )  # fmt: skip
    write_atomically(path, [text.encode("utf-8")])
    return Report(path, verdict.sentences, numbers)


def _draw_pictures(
    posterior: Fitted, evaluation: Evaluation, looked: UncertainInputs
) -> tuple[list[Picture], list[Picture], list[str], Any]:
    """Return pictures of predictions, pictures of what was learned, reasons why some are missing, and numbers."""
    numbers: dict[str, Any] = {}
    pictures, learned, missing = [], [], []
    band, each = band_picture(posterior, looked), evaluation.by_network
    first = _intervals(each) if isinstance(each["posterior"], plots.Residuals) else _reliability(each)
    for picture, values in [first, _risk(each), *([] if band is None else [band])]:
        pictures.append(picture)
        numbers[picture.name] = values
    for shown, name, values in (_gamma(posterior), _evidence(posterior), _trace(posterior)):
        if isinstance(shown, Picture):
            learned.append(shown)
        else:
            missing.append(shown)
        numbers[name] = values
    return pictures, learned, missing, numbers


def words_of(row: Compared) -> str:
    """Return what the difference of a score says, in words."""
    if not row.difference.value and row.difference.low == row.difference.high:
        return "equal" if row.verdict else ""
    if row.verdict == "undecided":
        return UNDECIDED
    if row.target is None:
        return str(row.verdict)
    return f"{'closer to' if row.verdict == 'better' else 'farther from'} {percent(row.target)}"


def embed_json(numbers: Any) -> str:
    """Return JSON that may stand inside a script element: no text in it can end the element.

    >>> embed_json({"title": "</script>"})
    '{"title": "\\\\u003c/script>"}'
    """
    return json.dumps(numbers, allow_nan=False).replace("<", "\\u003c")


def template() -> Any:
    """Return the template of the page; raise if a package of the extra is missing."""
    try:
        import jinja2
        import matplotlib as matplotlib
    except ImportError as error:
        raise UnsupportedError(
            f"a report needs the package {error.name}, which is not installed: pip install 'lapwing[report]'."
        ) from error
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


SEED = Rule("an integer, or None", lambda v: v is None or is_integer(v))


def write_report(
    posterior: Fitted, parts: Sequence[tuple[Fitted, Iterable[object]]], path: str | Path, *, title: str | None,
    level: float, resamples: int, seed: int | None, command: str | None, date: str | None, target_key: str | None,
    progress: bool | None,
) -> Report:  # fmt: skip
    """Write the page of a posterior, judged by posteriors each on its own data; see ``Fitted.report``."""
    PATH.check("path", path)
    for name, text in (("title", title), ("command", command), ("date", date)):
        TEXT.check(name, text)
    SEED.check("seed", seed)
    template()  # nothing is computed if a package is missing, or a folder
    refuse_no_folder(Path(path).resolve())
    evaluation = evaluation_of_parts(
        parts, level=level, confidence=0.95, resamples=resamples, target_key=target_key, progress=progress,
        generator=None,
    )  # fmt: skip
    looked = find_uncertain_inputs(parts, target_key, progress)
    heading = title or f"Error bars of {type(posterior.network.model).__name__}"
    return write_page(posterior, evaluation, looked, Path(path), PageDetails(heading, seed, command, date))


# Colours that follow the page, which is light or dark; those of text and lines are the colour of its text.
VARIABLES = {colour: f"var(--c{i})" for i, colour in enumerate(plots.COLOURS)}
VARIABLES |= {plots.INK: "currentColor", "#000000": "currentColor"}
_HEADER = re.compile(r"^.*?<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)
_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>\s*", re.DOTALL)  # it would hold for the whole page
_ID = re.compile(r"(\bid=\"|url\(#|href=\"#)([^\")]+)")
_UNSIZED = re.compile(r"(-?\d+\.\d{2})\d+")


@dataclass(frozen=True)
class Picture:
    """An inline SVG with a description for those who do not see it; the template has its heading and its caption."""

    name: str  # unique in the page
    alt: str
    svg: str


def inline_svg(name: str, ax: Axes, alt: str) -> str:
    """Return the figure of an axis as an SVG element for a page.

    Equal figures give equal text. All ids start with ``name``, so that several pictures fit in one page.
    """
    import matplotlib

    figure: Any = ax.figure  # a ``Figure``: the pictures have no figures inside figures
    written = io.StringIO()
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


def _intervals(each: Mapping[str, Any]) -> tuple[Picture, Any]:
    coverages = {name: found.coverage(plots.LEVELS).tolist() for name, found in each.items()}
    inside = {name: percent(values[plots.LEVELS.index(0.9)]) for name, values in coverages.items()}
    alt = (
        f"Coverage of intervals. The 90 % intervals of the posterior hold {inside['posterior']} of the targets, those "
        f"of the plain network {inside['plain network']}."
    )
    ax = plots.intervals(each, ax=plots.new_axis(size=SIZE))
    return _picture("intervals", alt, ax), {"levels": plots.LEVELS, **coverages}


def _reliability(each: Mapping[str, Any]) -> tuple[Picture, Any]:
    means = {name: (float(found.probability.mean()), float(found.true.mean())) for name, found in each.items()}
    says = {name: f"{percent(sure)} confident and {percent(right)} right" for name, (sure, right) in means.items()}
    if not each["posterior"].of_classes:
        says = {name: f"{percent(said)} sure of one, of {percent(share)} ones" for name, (said, share) in means.items()}
    alt = (
        f"Reliability diagram. On average the posterior is {says['posterior']}, the plain network "
        f"{says['plain network']}."
    )
    ax = plots.reliability(each, ax=plots.new_axis(size=SIZE))
    points = {name: asdict(plots.reliability_points(found)) for name, found in each.items()}
    return _picture("reliability", alt, ax), points


def _risk(each: Mapping[str, Any]) -> tuple[Picture, Any]:
    curves = {name: plots.risk_of(found, None) for name, found in each.items()}
    rows = plots.thin_rows(len(curves["posterior"].risk), 100)
    half, full = ({n: f"{c.risk[(len(c.risk) - 1) // k].item():.3g}" for n, c in curves.items()} for k in (2, 1))
    alt = (
        f"Risk against coverage. Answering the more certain half of the inputs, the error is {half['posterior']} with "
        f"the posterior and {half['plain network']} with the plain network; answering all, it is "
        f"{full['posterior']} and {full['plain network']}."
    )
    ax = plots.risk_coverage(each, ax=plots.new_axis(size=SIZE))
    numbers = {n: {"coverage": c.coverage[rows].tolist(), "risk": c.risk[rows].tolist()} for n, c in curves.items()}
    return _picture("risk", alt, ax), numbers


def band_picture(posterior: Fitted, looked: UncertainInputs) -> tuple[Picture, Any] | None:
    """Return the band over one input variable; None if inputs have several, or targets are not numbers."""
    if looked.line is None or len(posterior.network.output_shape) != 1:
        return None
    x, y = looked.line[0].reshape(-1, 1), looked.line[1]
    inputs = plots.grid(x, points=120, margin=0.15)
    prediction = posterior.predict(inputs.reshape(-1, *looked.line[0].shape[1:]).to(posterior.network.device))
    if not isinstance(prediction, NumberPredictive):
        return None
    chosen = plots.thin_rows(len(x), 300)
    low, high = prediction.interval(0.95)
    widths = (high - low)[:, 0]
    ax = plots.band(prediction, inputs, data=(x[chosen], y[chosen]), ax=plots.new_axis(size=SIZE))
    alt = (
        f"Mean and 95 % intervals over the input. Intervals are between {float(widths.min()):.3g} and "
        f"{float(widths.max()):.3g} wide."
    )
    numbers = {"x": inputs[:, 0], "mean": prediction.mean[:, 0], "low": low[:, 0], "high": high[:, 0]}
    return _picture("band", alt, ax), {k: v.detach().cpu().tolist() for k, v in numbers.items()}


def _gamma(posterior: Fitted) -> tuple[Picture | str, str, Any]:
    """Return the picture of what each layer learned, or the reason why there is none, a name, and its numbers."""
    try:
        found = posterior.effective_parameters()
    except LapwingError as error:
        return f"γ by layer: {error}", "effective_parameters", None
    size = (SIZE[0], 1.0 + 0.26 * min(plots.MOST_LAYERS, len(found.layers)))
    alt = f"Effective parameters by layer: the data determine {found.total:.3g} of {found.weights:,} weights in all."
    ax = plots.effective_parameters(found, ax=plots.new_axis(size=size))
    numbers = {"total": found.total, "layers": found.layers, "sizes": found.sizes}
    return _picture("gamma", alt, ax), "effective_parameters", numbers


def _trace(posterior: Fitted) -> tuple[Picture | str, str, Any]:
    record = plots.trace_with_steps(posterior)
    if record is None:
        return "Trace: no steps of a tuner were recorded.", "trace", None
    alt = f"The {record.score} at each of {len(record.steps)} steps of {record.tuner}."
    steps = [{"score": step.score, "precisions": step.precisions[:16]} for step in record.steps]
    ax = plots.trace(record, ax=plots.new_axis(size=SIZE))
    return _picture("trace", alt, ax), "trace", {"tuner": record.tuner, "steps": steps}


def _evidence(posterior: Fitted) -> tuple[Picture | str, str, Any]:
    """Return the curve of the evidence, or why there is none."""
    if posterior.base.is_sampled or posterior.base.solves_for_inputs:
        reason = "each precision would need linear systems over all training data, so it is left out."
        return f"Evidence curve: {reason}", "evidence_curve", None
    try:
        curve = plots.EvidenceCurve.of(posterior)
        ax = plots.evidence_curve(curve, ax=plots.new_axis(size=SIZE))
    except LapwingError as error:
        return f"Evidence curve: {error}", "evidence_curve", None
    best = max((e, p) for e, p in zip(curve.log_evidence, curve.precisions, strict=True) if math.isfinite(e))
    alt = f"Log evidence against precision: highest, {best[0]:.4g}, at {best[1]:.3g}; the fit has {curve.present:.3g}."
    return _picture("evidence", alt, ax), "evidence_curve", asdict(curve)


def _picture(name: str, alt: str, ax: Axes) -> Picture:
    with torch.no_grad():
        return Picture(name, alt, inline_svg(name, ax, alt))
