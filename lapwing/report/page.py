"""The page: scores, verdict, pictures and facts of one posterior, put into a template."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lapwing.errors import LapwingError, UnsupportedError
from lapwing.report.pictures import Picture, band_picture, learned_pictures, score_pictures
from lapwing.report.verdict import Looked, look, percent, points, signed, verdict_of
from lapwing.runtime.files import refuse_no_folder, write_atomically
from lapwing.runtime.settings import PATH, Rule, is_integer

if TYPE_CHECKING:
    from lapwing.fitted import Fitted

PACKAGES = ("lapwing", "torch", "matplotlib", "jinja2")


def configuration(posterior: Any) -> dict[str, str]:
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
        facts["mixture"] = posterior.posterior.described()
    return facts


def findings(posterior: Any) -> list[str]:
    """Return the remarks of the posterior, of its tuner and on the size of its network."""
    return [*posterior.findings, *_advice(posterior)]


def _advice(posterior: Any) -> Iterator[str]:
    try:
        yield from posterior.effective_parameters().findings
    except LapwingError:
        return


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
WORDS = {  # what scores are, for readers who do not know their names
    "nll": ("negative log-likelihood", "how improbable the observed targets were; lower is better"),
    "accuracy": ("accuracy", "share of answers that are right; higher is better"),
    "brier": ("Brier score", "squared error of the probabilities; lower is better"),
    "ece": ("calibration error (ECE)", "mean distance of confidence from the share that is right; lower is better"),
    "classwise_ece": ("class-wise calibration error", "the same for each class or label by itself; lower is better"),
    "adaptive_ece": ("adaptive calibration error", "the same in bins of equally many answers; lower is better"),
    "aurc": ("area under risk-coverage", "error if the most uncertain inputs are left out, averaged; lower is better"),
    "rmse": ("RMSE", "root of the mean squared error; lower is better"),
    "mae": ("mean absolute error", "lower is better"),
    "crps": ("CRPS", "error of the whole distribution, in units of the target; lower is better"),
    "coverage": ("coverage", "share of targets inside the intervals; best is their probability"),
    "width": ("width of the intervals", "in units of the target; narrower is better only if coverage holds"),
    "cqm": ("calibration error of quantiles", "mean distance of coverages from their probability; lower is better"),
}
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


def written(posterior: Any, evaluation: Any, looked: Looked, path: Path, source: PageDetails) -> Report:
    """Write the page and return it."""
    environment = template()
    verdict = verdict_of(evaluation, posterior.posterior.has_spread)
    pictures, learned, missing, numbers = _drawn(posterior, evaluation, looked)
    about = {"configuration": configuration(posterior), "versions": versions(),
             "findings": findings(posterior), "seed": source.seed, "command": source.command}  # fmt: skip
    scores = {key: value for key, value in evaluation.to_json().items() if not key.endswith("seconds")}
    shown = {"measure": looked.measure, "among": looked.count,
             "rows": [{k: v for k, v in asdict(row).items() if k != "image"} for row in looked.rows]}  # fmt: skip
    numbers = finite({
        "title": source.title, "date": source.date, "verdict": verdict.sentences,
        "answers": [asdict(answer) for answer in verdict.answers], "evaluation": scores, **numbers,
        "uncertain": shown, **about,
    })  # fmt: skip
    text = environment.render(
        source=source, verdict=verdict, evaluation=evaluation, table=table(evaluation), pictures=pictures,
        learned=learned, missing=missing, looked=looked, about=about, json=embedded(numbers), percent=percent,
        points=points,
    )  # fmt: skip
    write_atomically(path, [text.encode("utf-8")])
    return Report(path, verdict.sentences, numbers)


def _drawn(posterior: Any, evaluation: Any, looked: Looked) -> tuple[list[Picture], list[Picture], list[str], Any]:
    """Return pictures of predictions, pictures of what was learned, reasons why some are missing, and numbers."""
    numbers: dict[str, Any] = {}
    pictures, learned, missing = [], [], []
    band = band_picture(posterior, looked)
    for picture, values in [*score_pictures(evaluation), *([] if band is None else [band])]:
        pictures.append(picture)
        numbers[picture.name] = values
    for shown, name, values in learned_pictures(posterior):
        if isinstance(shown, Picture):
            learned.append(shown)
        else:
            missing.append(shown)
        numbers[name] = values
    return pictures, learned, missing, numbers


def table(evaluation: Any) -> list[dict[str, str]]:
    """Return the rows of the table of scores as text."""
    rows = []
    for row in evaluation.rows:
        name, meaning = WORDS.get(row.name, (row.name, ""))
        if row.name == "ece" and evaluation.task == "binary labels":
            meaning = "mean distance of the probability of one from the share of ones; lower is better"
        if row.target is not None:
            name = f"{name} of {percent(row.target)} intervals"
        cells = {"name": name, "meaning": meaning, "verdict": row.verdict, "words": words_of(row)}
        for key, score in (("plain", row.plain), ("posterior", row.posterior)):
            cells |= {key: number(score.value), f"{key}_range": f"{number(score.low)} to {number(score.high)}"}
        low, high = signed(row.difference.low), signed(row.difference.high)
        rows.append(cells | {"difference": signed(row.difference.value), "difference_range": f"{low} to {high}"})
    return rows


def words_of(row: Any) -> str:
    """Return what the difference of a score says, in words."""
    if not row.difference.value and row.difference.low == row.difference.high:
        return "equal" if row.verdict else ""
    if row.verdict == "undecided":
        return UNDECIDED
    if row.target is None:
        return str(row.verdict)
    return f"{'closer to' if row.verdict == 'better' else 'farther from'} {percent(row.target)}"


def number(value: float) -> str:
    """Return a number with four significant digits and a real minus sign.

    >>> number(-0.123456), number(1234567.0)
    ('−0.1235', '1.235e+06')
    """
    return f"{value:.4g}".replace("-", "−") if abs(value) >= 1e-4 or not value else f"{value:.1e}".replace("-", "−")


def finite(value: Any) -> Any:
    """Return plain values that JSON holds: numbers that are not finite become None.

    >>> finite({"a": (1.0, float("nan"))})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def embedded(numbers: Any) -> str:
    """Return JSON that may stand inside a script element: no text in it can end the element.

    >>> embedded({"title": "</script>"})
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


TEXT = Rule("a text, or None", lambda v: isinstance(v, str | None))
SEED = Rule("an integer, or None", lambda v: v is None or is_integer(v))


def write_report(
    posterior: Fitted, data: Iterable[Any], path: str | Path, *, title: str | None, level: float, resamples: int,
    seed: int | None, command: str | None, date: str | None, target_key: str | None, progress: bool | None,
) -> Report:  # fmt: skip
    """Write the page of a posterior and return it; see ``Fitted.report``."""
    PATH.check("path", path)
    for name, text in (("title", title), ("command", command), ("date", date)):
        TEXT.check(name, text)
    SEED.check("seed", seed)
    template()  # nothing is computed if a package is missing, or a folder
    refuse_no_folder(Path(path).resolve())
    evaluation = posterior.evaluate(data, level=level, resamples=resamples, target_key=target_key, progress=progress)
    looked = look(posterior, data, target_key, progress)
    heading = title or f"Error bars of {type(posterior.network.model).__name__}"
    return written(posterior, evaluation, looked, Path(path), PageDetails(heading, seed, command, date))
