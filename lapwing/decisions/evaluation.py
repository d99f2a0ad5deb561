"""Scores of a posterior beside those of the plain network, with the uncertainty of both and of their difference."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.data.inputs import Batch
from lapwing.decisions.collecting import WORSE, batches_of, label_batch, source_of, warn_of_units
from lapwing.errors import DataError
from lapwing.metrics import Calibration, RiskCoverage, ScoreInterval
from lapwing.plots import AnswerProbabilities, Residuals
from lapwing.posteriors.base import Posterior
from lapwing.posteriors.sampled import PointPosterior
from lapwing.predictives.scores import ClassSums, Numbers, Score, Scoring
from lapwing.runtime.files import write_atomically
from lapwing.runtime.memory import batch_size_for
from lapwing.runtime.settings import GENERATOR, PATH, PROBABILITY, integer
from lapwing.runtime.threads import independent_generator
from lapwing.values.arrays import resampled_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing.fitted import Fitted


def plain_of(posterior: Fitted) -> PointPosterior:
    """Return the plain network: the outputs as they are, under the likelihood of the posterior with its noise."""
    base = posterior.base.plain()
    network = base.problem.network
    network = network if network.shift is None else network.with_shift(None)
    return PointPosterior(replace(base.problem, network=network), base.statistics, network.theta())


@dataclass(frozen=True, eq=False)
class ClassTotals:
    """Totals of ``ClassSums`` over all inputs, and the sums that the error of their mean needs; (C,) each.

    Args:
        probability: Sum of the predicted probabilities.
        seen: How often each class was the target.
        data: The number of data.
        variance: The variance of ``seen`` if data are independent and have these probabilities.
        squares: Σ g² over inputs, where g is ``seen`` less ``probability`` in one input.
        products: Σ g n over inputs, where n is the number of data in one input.
        counts: Σ n² over inputs.
    """

    probability: Tensor
    seen: Tensor
    data: Tensor
    variance: Tensor
    squares: Tensor
    products: Tensor
    counts: Tensor

    @classmethod
    def of(cls, sums: ClassSums) -> ClassTotals:
        """Return the totals of one batch."""
        gap, data = sums.seen - sums.probability, sums.data.expand(sums.seen.shape)
        parts = (sums.probability, sums.seen, data, sums.variance, gap.square(), gap * data, data.square())
        return cls(*(part.sum(0).cpu() for part in parts))

    def __add__(self, other: ClassTotals) -> ClassTotals:
        return ClassTotals(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def gap(self) -> Tensor:
        """Mean probability less frequency of each class; zero without data."""
        return (self.probability - self.seen) / self.data.clamp_min(1)

    @property
    def error(self) -> Tensor:
        """The standard error of ``gap`` for a calibrated predictor, (C,).

        The larger of that from the stated probabilities, which holds for a class that was never seen too, and that from
        the inputs, which holds where the data of an input depend on each other.
        """
        count, gap = self.data.clamp_min(1), -self.gap
        between = (self.squares - 2 * gap * self.products + gap.square() * self.counts).clamp_min(0)
        return torch.maximum(self.variance, between).sqrt() / count


@dataclass(frozen=True, eq=False)
class Scored:
    """The numbers of all data under one posterior, and how long its predictions took."""

    scoring: Scoring[Any]
    data: Numbers
    seconds: float
    classes: ClassTotals | None = None  # of labels


def score_posteriors(
    posteriors: Sequence[Mapping[str, tuple[Fitted, Posterior]]], data: Sequence[Iterable[object]], level: float,
    target_key: str | None, progress: bool | None,
) -> dict[str, Scored]:  # fmt: skip
    """Return the numbers of all data under several posteriors, from one pass over the data.

    Args:
        posteriors: For each of the data, by name: a fitted posterior with its network, and what predicts.
        data: Loaders or batches with targets.
        level: The probability of the intervals whose coverage is scored.
        target_key: As for ``fit``.
        progress: As for ``predict``.
    """
    PROBABILITY.check("level", level)
    gathered = {name: _EvaluationRows() for name in posteriors[0]}
    for named, part in zip(posteriors, data, strict=True):
        first = next(iter(named.values()))[0]
        for fitted, _ in named.values():
            fitted._refuse_changed()
        with torch.no_grad():
            source = source_of(first.network, part, "data", target_key, progress)
            for batch in batches_of(first.network, source):
                for name, (fitted, predicts) in named.items():
                    gathered[name].add(fitted, predicts, batch, level)
        for fitted in {id(fitted): fitted for fitted, _ in named.values()}.values():
            fitted.rows.warn_reused(source.sketch(), "data", WORSE, refuses=False)
    return {name: each.value(name) for name, each in gathered.items()}


class _EvaluationRows:
    """Numbers of the data of consecutive batches."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._owners: list[Tensor] = []
        self._inputs, self._seconds = 0, 0.0
        self._scoring: Scoring[Any] | None = None
        self._classes: ClassTotals | None = None
        self._gaps: list[Tensor] = []
        self._data: list[Tensor] = []

    def add(self, fitted: Fitted, predicts: Posterior, batch: Batch, level: float) -> None:
        each = label_batch(fitted, batch, "data")
        start = time.perf_counter()
        predictive = predicts.predict(each.inputs)
        self._scoring = predictive.scoring
        numbers = self._scoring.numbers(predictive, each.targets, each.known, level).cpu()
        self._seconds += time.perf_counter() - start
        known = self._scoring.known(each.known).cpu()
        owner = torch.arange(len(numbers)).unsqueeze(1).expand(known.shape) + self._inputs
        self._values.append(numbers[known])
        self._owners.append(owner[known])
        self._inputs += len(numbers)
        sums = self._scoring.by_class(predictive, each.targets, each.known)
        if sums is not None:
            totals = ClassTotals.of(sums)
            self._classes = totals if self._classes is None else self._classes + totals
            if sums.gaps is not None:
                self._gaps.append(sums.gaps.cpu())
                self._data.append(sums.data.cpu())

    def value(self, name: str) -> Scored:
        values = torch.cat(self._values)
        if not len(values):
            raise DataError("data: every target is ignored; expected at least one that is not.")
        if not bool(values.isfinite().all()):
            raise DataError(
                f"{int((~values.isfinite()).any(1).sum())} of {len(values)} targets have a score under {name!r} that "
                "is not finite; expected finite ones. Check the targets, and the network for overflow."
            )
        assert self._scoring is not None
        classwise = (torch.cat(self._gaps), torch.cat(self._data)) if self._gaps else ()
        numbers = Numbers(values, torch.cat(self._owners), self._inputs, *classwise)
        return Scored(self._scoring, numbers, self._seconds, self._classes)


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Scores of several posteriors under the same resampled inputs."""

    scores: dict[str, tuple[Score, ...]]  # by the name of the posterior
    values: dict[str, Tensor]  # (scores,) of all data
    draws: dict[str, Tensor]  # (resamples, scores)
    confidence: float
    inputs: int  # with a target that counts

    @classmethod
    def of(
        cls, found: Mapping[str, Scored], level: float, confidence: float, resamples: int,
        generator: torch.Generator | None,
    ) -> Bootstrap:  # fmt: skip
        """Draw the inputs again and again, and compute all scores of each draw."""
        PROBABILITY.check("confidence", confidence)
        integer(2).check("resamples", resamples)
        GENERATOR.check("generator", generator)
        scores = {name: each.scoring.scores(each.data, level) for name, each in found.items()}
        first = next(iter(found.values())).data
        ones = torch.ones(1, first.inputs, dtype=torch.float64)
        at = lambda each, weights: torch.stack([score.at(weights) for score in each], 1)
        values = {name: at(each, ones)[0] for name, each in scores.items()}
        rows = max(len(each.data.values) + each.data.inputs for each in found.values())
        most = batch_size_for(resamples, 40 * rows, torch.device("cpu"))
        parts: dict[str, list[Tensor]] = {name: [] for name in scores}
        for weights in resampled_weights(first.inputs, resamples, independent_generator(generator), most):
            for name, each in scores.items():
                parts[name].append(at(each, weights))
        draws = {name: torch.cat(each) for name, each in parts.items()}
        return cls(scores, values, draws, confidence, len(first.owner.unique()))

    def score(self, name: str, number: int) -> tuple[Tensor, Tensor]:
        """Return a score of all data, (), and of the resampled data, (resamples,)."""
        return self.values[name][number], self.draws[name][:, number]

    def interval(self, value: Tensor, draws: Tensor, biased: bool = False) -> ScoreInterval:
        """Return a value with the percentile interval of its resampled values.

        Those of a biased score are moved by their bias; what cannot be negative stays so.
        """
        tail = 0.5 - 0.5 * self.confidence
        if biased:
            least = 0.0 if bool((draws >= 0).all()) else -math.inf
            draws = (draws - draws.mean() + value).clamp_min(least)
        low, high = draws.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return ScoreInterval(float(value), low, high, float(draws.std()))

    def intervals(self, name: str) -> dict[str, ScoreInterval]:
        """Return every score of a posterior with its interval."""
        return {
            score.name: self.interval(*self.score(name, i), score.biased) for i, score in enumerate(self.scores[name])
        }


ROUNDING = 1e-4  # relative to the scores, below which their difference may be rounding
SEVERAL, LARGE = 6, 1e6  # decimals, and numbers, from which an exponent is easier to read


def decimals_of(each: ScoreInterval) -> int:
    """Return the decimals of a score: two digits of its interval, and at most four of its value.

    >>> decimals_of(ScoreInterval(0.12345, 0.1, 0.15, 0.01)), decimals_of(ScoreInterval(0.8117, 0.81169, 0.81171, 1e-5))
    (3, 4)
    """
    half, largest = max(each.high - each.value, each.value - each.low), max(map(abs, (each.value, each.low, each.high)))
    first_digit = lambda value: math.floor(math.log10(value)) if 0 < value < math.inf else 0
    return max(0, min(1 - first_digit(half), 3 - first_digit(largest)) if half > 0 else 3 - first_digit(largest))


def interval_parts(each: ScoreInterval, decimals: int | None = None, size: float = 0.0) -> tuple[str, str, str]:
    """Return a score and both ends of its interval as text.

    Args:
        each: The score.
        decimals: How many; those that its interval allows if None.
        size: For a difference, the size of the scores: below a ten-thousandth of it, rounding decides, and it is zero.

    >>> interval_parts(ScoreInterval(0.12345, 0.1, 0.15, 0.01))
    ('0.123', '0.100', '0.150')
    """
    values = (each.value, each.low, each.high)
    if max(map(abs, values)) <= ROUNDING * size:
        return ("0", "0", "0")
    decimals = decimals_of(each) if decimals is None else decimals
    nearest = min(abs(each.low), abs(each.high)) if each.low * each.high > 0 and size else math.inf
    while decimals < SEVERAL and nearest < 0.5 * 10**-decimals:  # an interval on one side of zero is shown as such
        decimals += 1
    form = f".{decimals}f" if decimals <= SEVERAL and max(map(abs, values)) < LARGE else ".3g"
    texts = (format(value, form) for value in values)
    a, b, c = (text if text.strip("-0.") else text.removeprefix("-") for text in texts)
    return a, b, c


def interval_text(each: ScoreInterval, decimals: int | None = None, size: float = 0.0) -> str:
    """Return a score with its interval as text; see ``interval_parts``.

    >>> interval_text(ScoreInterval(-0.07262, -0.1461, -0.00442, 0.04))
    '-0.073 [-0.146, -0.004]'
    """
    value, low, high = interval_parts(each, decimals, size)
    return f"{value} [{low}, {high}]"


def align_columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return the rows of a table as lines with columns of equal width, the first ``left`` columns flush left.

    >>> align_columns([("score", "value"), ("nll", "0.5")])
    ['score  value', 'nll      0.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = lambda i, cell: cell.ljust(widths[i]) if i < left else cell.rjust(widths[i])
    return ["  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows]


def json_values(value: Any) -> Any:
    """Return a value as JSON can hold it: tensors become lists, paths become text, numbers that are not finite None.

    >>> json_values({"mean": torch.tensor([1.0, float("inf")]), "out": Path("net.lapwing")})
    {'mean': [1.0, None], 'out': 'net.lapwing'}
    """
    if isinstance(value, Tensor):
        return json_values(value.detach().tolist())
    if isinstance(value, Mapping):
        return {str(name): json_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(value: Any, path: str | Path) -> None:
    """Write plain values as JSON, whole or not at all.

    Raises:
        FileError: If the file cannot be written.
    """
    PATH.check("path", path)
    write_atomically(path, [json.dumps(value, indent=1, allow_nan=False).encode()])


PLAIN = "plain network"
RELATIVE = 1e-3  # a difference below a thousandth of the scores is none, however well it is known
SHOWN = 5  # classes that are printed if there are more than ``FEW``: those that are farthest off
FEW = 10
KEPT = 100  # classes that an evaluation holds


LOWER = "; lower is better"
MEANINGS = {  # of the scores: a name and what it says, for readers who do not know their abbreviations
    "nll": ("negative log-likelihood", f"how improbable the observed targets were{LOWER}"),
    "accuracy": ("accuracy", "share of answers that are right; higher is better"),
    "brier": ("Brier score", f"squared error of the probabilities{LOWER}"),
    "ece": ("calibration error (ECE)", f"mean distance of confidence from the share that is right{LOWER}"),
    "classwise_ece": ("class-wise calibration error", f"the same for each class or label by itself{LOWER}"),
    "adaptive_ece": ("adaptive calibration error", f"the same in bins of equally many answers{LOWER}"),
    "aurc": ("area under risk-coverage", f"error if the most uncertain inputs are left out, averaged{LOWER}"),
    "rmse": ("RMSE", f"root of the mean squared error{LOWER}"),
    "mae": ("mean absolute error", f"mean distance of the target from the median{LOWER}"),
    "crps": ("CRPS", f"error of the whole distribution, in units of the target{LOWER}"),
    "coverage": ("coverage", "share of targets inside the intervals; best is their probability"),
    "width": ("width of the intervals", "in units of the target; narrower is better only if coverage holds"),
    "cqm": ("calibration error of quantiles", f"mean distance of coverages from their probability{LOWER}"),
}
MEANING_OF_BINARY = {"ece": f"mean distance of the probability of one from the share of ones{LOWER}"}


def meaning_of(score: str, task: str) -> tuple[str, str]:
    """Return the name of a score in words, and what it says.

    >>> meaning_of("nll", "classes")
    ('negative log-likelihood', 'how improbable the observed targets were; lower is better')
    """
    name, says = MEANINGS.get(score, (score, ""))
    return name, MEANING_OF_BINARY.get(score, says) if task == "binary labels" else says


def explain_scores(names: Sequence[str], task: str) -> list[str]:
    """Return a line for each score, and one for what is undecided."""
    words = {name: meaning_of(name, task) for name in names}
    lines = [
        f"{name:{max(map(len, names))}s}  "
        + (f"{title}: " if title not in (name, name.upper()) else "")
        + says.removesuffix(LOWER)
        for name, (title, says) in words.items()
    ]
    return ["Lower is better where nothing else is said; a difference is undecided if its interval holds zero:", *lines]


def title_of(inputs: int, data: int, task: str, confidence: float) -> str:
    """Return the title of a table of scores."""
    targets = "" if data == inputs else f" with {data:,} targets"
    return f"Scores on {inputs:,} inputs{targets} ({task}), with {100 * confidence:g} % intervals in brackets"


def matters(difference: ScoreInterval, size: float, inputs: int | None = None) -> bool:
    """Return whether a difference of scores counts: beyond its interval, and a thousandth of their size.

    For one input it does not: its interval has no width.

    >>> matters(ScoreInterval(-1.2e-8, -1.3e-8, -1.1e-8, 1e-9), 0.3), matters(ScoreInterval(0.1, -0.1, 0.3, 0.1), 0.3)
    (False, False)
    """
    return not difference.low <= 0 <= difference.high and abs(difference.value) > RELATIVE * size and inputs != 1


@dataclass(frozen=True)
class Compared:
    """One score of a posterior, of the plain network, and their difference, each with a bootstrap interval.

    ``difference`` is the score of the posterior less that of the plain network, from the same resampled data, so that
    what both have in common cancels. For a score with a ``target``, such as a coverage, ``gain`` is the difference of
    the distances to it.
    """

    name: str
    posterior: ScoreInterval
    plain: ScoreInterval
    difference: ScoreInterval
    better: str  # "lower" or "higher"; empty if neither is better by itself
    target: float | None = None  # the best value, where it is neither the lowest nor the highest
    gain: ScoreInterval | None = None  # how much farther from the target the posterior is; None without a target
    inputs: int | None = None  # with a target that counts; None if that is not known
    unit: float | None = None  # what differences are compared with; None for the scores themselves

    @property
    def decimals(self) -> int:
        """The decimals of both scores in a table."""
        return max(decimals_of(self.posterior), decimals_of(self.plain))

    @property
    def size(self) -> float:
        """The larger of both scores, without its sign."""
        return max(abs(self.posterior.value), abs(self.plain.value))

    @property
    def verdict(self) -> str:
        """Return "better", "worse" or "undecided", or nothing where no direction is better.

        It is undecided if the interval of the difference holds zero, if the difference is below a thousandth of the
        scores, and for one input, whose interval has no width. A log-density has no size of its own, since it moves
        with the unit of the targets: the ``nll`` of numbers is compared with one nat.
        """
        judged = self.difference if self.gain is None else self.gain
        if not self.better and self.gain is None:
            return ""
        if not matters(judged, self.size if self.unit is None else self.unit, self.inputs):
            return "undecided"
        return "better" if (judged.high < 0) == (self.better != "higher") else "worse"


@dataclass(frozen=True)
class ClassFrequency:
    """Mean predicted probability of one class, or binary label, beside how often it was seen.

    ``gap`` is the probability under the posterior less the frequency; the intervals of all classes hold together.
    """

    number: int
    frequency: float
    probability: float
    plain: float  # the mean probability under the plain network
    gap: ScoreInterval

    @property
    def verdict(self) -> str:
        """Return "too high" or "too low" where the gap is larger than chance explains, or nothing."""
        if not matters(self.gap, max(self.probability, self.frequency)):
            return ""
        return "too high" if self.gap.value > 0 else "too low"


@dataclass(frozen=True)
class Evaluation:
    """Scores of a posterior beside those of the plain network; print it to read it.

    ``evaluation["nll"]`` is one row. ``reliability`` and ``curve`` hold what pictures need, of the posterior and of the
    plain network.

    Args:
        task: What the targets are: "classes", "binary labels" or "numbers".
        inputs: The number of inputs.
        data: The number of targets that count: more than the inputs for tokens, pixels, labels and several outputs.
        rows: All scores that fit the task.
        level: The probability of the intervals whose coverage and width are scored.
        confidence: The probability of the bootstrap intervals.
        seconds: The time of the predictions.
        plain_seconds: The time of the forward passes of the plain network.
        classes: Mean probability and frequency of every class or label; of many classes, those that are farthest off.
        findings: Remarks on the data, such as targets in other units.
        class_count: The number of classes, or labels.
    """

    task: str
    inputs: int
    data: int
    rows: tuple[Compared, ...]
    level: float
    confidence: float
    seconds: float
    plain_seconds: float
    columns: tuple[str, ...] = field(repr=False)
    posterior_numbers: Tensor = field(repr=False, compare=False)  # (data, columns)
    plain_numbers: Tensor = field(repr=False, compare=False)
    classes: tuple[ClassFrequency, ...] = field(default=(), repr=False)
    findings: tuple[str, ...] = ()
    class_count: int = 0

    def __getitem__(self, name: str) -> Compared:
        """Return the row of a score."""
        for row in self.rows:
            if row.name == name:
                return row
        raise DataError(f"there is no score {name!r}; expected one of {', '.join(row.name for row in self.rows)}.")

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [("score", "posterior", PLAIN, "difference", "")]
        for row in self.rows:
            scores = [interval_text(each, row.decimals) for each in (row.posterior, row.plain)]
            name = f"{row.name} ({100 * row.target:g} %)" if row.target is not None else row.name
            table.append((name, *scores, interval_text(row.difference, size=row.size), row.verdict))
        title = title_of(self.inputs, self.data, self.task, self.confidence)
        return "\n".join([
            title, *align_columns(table), *self._frequencies(), "",
            *explain_scores([row.name for row in self.rows], self.task), *(f"Note: {each}" for each in self.findings),
        ])  # fmt: skip

    @property
    def shown_classes(self) -> tuple[ClassFrequency, ...]:
        """The classes that are printed: all if they are few, otherwise those whose mean is farthest off."""
        return self.classes if self.class_count <= FEW else farthest_classes(self.classes, SHOWN)

    def _frequencies(self) -> list[str]:
        """Return lines that compare mean probabilities with frequencies."""
        if not self.classes:
            return []
        name = "class" if self.task == "classes" else "label"
        table: list[tuple[str, ...]] = [(name, "frequency", "posterior", PLAIN, "posterior - frequency", "")]
        for row in self.shown_classes:
            number = "one" if self.class_count == 1 else str(row.number)
            numbers = (f"{value:.3f}" for value in (row.frequency, row.probability, row.plain))
            table.append((number, *numbers, interval_text(row.gap), row.verdict))
        some = "" if len(table) > self.class_count else f", the {SHOWN} farthest off of {self.class_count:,}"
        return ["", f"Frequency and mean probability of each {name}{some}", *align_columns(table)]

    @cached_property
    def reliability(self) -> dict[str, Calibration]:
        """What was stated and what came true in bins, by "posterior" and "plain network".

        Of classes confidence and accuracy, of binary labels the probability and the frequency of one, and of numbers
        levels and coverages.
        """
        return {name: found.calibration() for name, found in self.by_network.items()}

    @cached_property
    def curve(self) -> dict[str, RiskCoverage]:
        """The curve of risk against coverage, by "posterior" and "plain network".

        The risk is the share of wrong answers, and for numbers the mean squared error.
        """
        return {name: found.curve() for name, found in self.by_network.items()}

    @property
    def by_network(self) -> dict[str, AnswerProbabilities | Residuals]:
        """The single data under the plain network and under the posterior, by name."""
        return {PLAIN: self._data(self.plain_numbers), "posterior": self._data(self.posterior_numbers)}

    def _data(self, numbers: Tensor) -> AnswerProbabilities | Residuals:
        column = lambda name: numbers[:, self.columns.index(name)]
        if "probability" in self.columns:  # of binary labels: confidence in the guess would hide a bias
            return AnswerProbabilities(column("probability"), column("label"), of_classes=False)
        if "confidence" in self.columns:
            return AnswerProbabilities(column("confidence"), column("correct"), of_classes=True)
        return Residuals(column("pit"), column("std"), column("error"))

    def to_json(self) -> dict[str, Any]:
        """Return all scores as plain values, which JSON holds."""
        kept = lambda row: {k: v for k, v in asdict(row).items() if k not in ("name", "inputs", "unit")}
        rows = {row.name: {**kept(row), "verdict": row.verdict} for row in self.rows}
        facts = {"task": self.task, "inputs": self.inputs, "data": self.data, "level": self.level}
        times = {"seconds": self.seconds, "plain_seconds": self.plain_seconds}
        classes = [{**asdict(row), "verdict": row.verdict} for row in self.classes]
        more = {"classes": classes, "class_count": self.class_count, "findings": list(self.findings)}
        return {**facts, "confidence": self.confidence, **times, "scores": rows, **more}

    def json(self, path: str | Path) -> None:
        """Write ``to_json`` to a file."""
        write_json(self.to_json(), path)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the reliability of the posterior and of the plain network; return the Matplotlib axis.

        For numbers the axis has the coverage of central intervals at every level.

        Args:
            ax: The axis to draw on; a new one if None.

        Raises:
            UnsupportedError: If Matplotlib is not installed.
        """
        from lapwing import plots

        draw = plots.reliability if "confidence" in self.columns else plots.intervals
        return draw(self, ax=ax)


def evaluation_of_parts(
    parts: Sequence[tuple[Fitted, Iterable[object]]], *, level: float, confidence: float, resamples: int,
    target_key: str | None, progress: bool | None, generator: torch.Generator | None,
) -> Evaluation:  # fmt: skip
    """Return scores of posteriors, each on its own data, beside their plain networks, as those of one posterior.

    See ``Fitted.evaluate``.
    """
    posterior = parts[0][0]
    pairs = [{"posterior": (each, each.posterior), PLAIN: (each, plain_of(each))} for each, _ in parts]
    found = score_posteriors(pairs, [data for _, data in parts], level, target_key, progress)
    bootstrapped = Bootstrap.of(found, level, confidence, resamples, generator)
    own, base = found["posterior"], found[PLAIN]
    return Evaluation(
        own.scoring.task, own.data.inputs, len(own.data.values), compare_scores(bootstrapped, "posterior", PLAIN),
        level, confidence, own.seconds, base.seconds, own.scoring.columns, own.data.values, base.data.values,
        frequencies(own.classes, base.classes, confidence), warn_of_other_units(posterior, own),
        0 if own.classes is None else len(own.classes.data),
    )  # fmt: skip


def warn_of_other_units(posterior: Fitted, scored: Scored) -> tuple[str, ...]:
    """Warn if targets seem to be in other units than the predictions, and return the sentence, if there is one."""
    columns = scored.scoring.columns
    if "mean" not in columns:
        return ()
    rows = scored.data.values.unflatten(0, (-1, posterior.network.output_shape[-1]))
    return warn_of_units(posterior, rows[..., columns.index("mean")], rows[..., columns.index("error")], "data")


def frequencies(own: ClassTotals | None, plain: ClassTotals | None, confidence: float) -> tuple[ClassFrequency, ...]:
    """Return mean probability and frequency of every class; of many, those that are farthest off."""
    if own is None or plain is None:
        return ()
    known = own.data > 0
    tail = torch.tensor(0.5 - 0.5 * confidence, dtype=torch.float64) / max(1, int(known.sum()))
    half = -torch.special.ndtri(tail) * own.error + 0.5 / own.data.clamp_min(1)  # counts are whole: half a datum more
    of = lambda total, data: (total / data.clamp_min(1)).tolist()
    columns = (
        of(own.seen, own.data), of(own.probability, own.data), of(plain.probability, plain.data), own.gap.tolist(),
        half.tolist(), own.error.tolist(), known.tolist(),
    )  # fmt: skip
    rows = [
        ClassFrequency(i, frequency, own_mean, plain_mean, ScoreInterval(gap, gap - width, gap + width, error))
        for i, (frequency, own_mean, plain_mean, gap, width, error, counts) in enumerate(zip(*columns, strict=True))
        if counts
    ]
    return tuple(sorted(farthest_classes(rows, KEPT), key=lambda row: row.number))


def farthest_classes(rows: Iterable[ClassFrequency], most: int) -> tuple[ClassFrequency, ...]:
    """Return the classes whose mean probability is farthest from the frequency, beyond chance, the worst first."""
    half = lambda row: max(row.gap.high - row.gap.value, 1e-300)
    return tuple(sorted(rows, key=lambda row: abs(row.gap.value) / half(row), reverse=True)[:most])


def compare_scores(bootstrapped: Bootstrap, name: str, other: str) -> tuple[Compared, ...]:
    """Return every score of a posterior beside that of another one, with the paired difference."""
    own, base = bootstrapped.intervals(name), bootstrapped.intervals(other)
    rows = []
    for i, score in enumerate(bootstrapped.scores[name]):
        (a, x), (b, y) = (bootstrapped.score(each, i) for each in (name, other))
        gain = None
        if score.target is not None:
            a_far, b_far, x_far, y_far = (t.sub(score.target).abs() for t in (a, b, x, y))
            gain = bootstrapped.interval(a_far - b_far, x_far - y_far)
        difference = bootstrapped.interval(a - b, x - y, score.biased)
        rows.append(Compared(
            score.name, own[score.name], base[score.name], difference, score.better, score.target, gain,
            bootstrapped.inputs, score.unit,
        ))  # fmt: skip
    return tuple(rows)
