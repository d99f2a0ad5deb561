"""Pictures of predictions and results, each a function that returns a Matplotlib axis: ``lw.plots``.

Over inputs: ``band`` and ``confidence_map``, with ``grid`` to make inputs. Beside targets: ``reliability``,
``intervals``, ``risk_coverage``, ``ranking``. What was learned: ``effective_parameters``, ``evidence_curve``,
``trace``. All take ``ax``, an axis to draw on, and otherwise make a figure that pyplot does not know:
``ax.figure.savefig("picture.png")``.
They need ``pip install 'lapwing[plots]'``; Matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.errors import DataError, UnsupportedError
from lapwing.metrics import Calibration, RiskCoverage, calibration, coverage
from lapwing.metrics import risk_coverage as selective_risk
from lapwing.posteriors.base import Posterior, Trace
from lapwing.predictives.scores import LEVELS as CQM_LEVELS
from lapwing.runtime.settings import POSITIVE, POSITIVE_VALUES, PROBABILITY, describe, integer, refuse_other_calls
from lapwing.values.arrays import Values, numbers, vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "band", "confidence_map", "grid", "reliability", "intervals", "risk_coverage", "ranking", "effective_parameters",
    "evidence_curve", "trace",
]  # fmt: skip


# Colours that people with any kind of colour blindness can tell apart (Okabe and Ito 2008), and ink for the rest.
INK, PLAIN, POSTERIOR, OTHER = "#333333", "#d55e00", "#0072b2", "#e69f00"
COLOURS = (PLAIN, POSTERIOR, OTHER, "#009e73", "#cc79a7", "#56b4e9")
MARKERS, DASHES = ("s", "o", "^", "D", "v", "P"), ("--", "-", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)))
SIZE = (4.6, 3.5)  # inches


def new_axis(ax: Axes | None = None, size: tuple[float, float] = SIZE) -> Axes:
    """Return the axis that was given, or one in a new figure."""
    return new_figure(1, 1, size)[1][0, 0] if ax is None else ax


def new_figure(
    rows: int, columns: int, size: tuple[float, float], widths: Sequence[float] | None = None
) -> tuple[Figure, Any]:
    """Return a figure and its axes, (rows, columns). It opens no window and changes no global state of Matplotlib.

    ``widths`` are the relative widths of the columns; equal if None.

    Raises:
        UnsupportedError: Matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "lw.plots needs the package matplotlib, which is not installed: pip install 'lapwing[plots]'."
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def with_styles(predictions: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return name, prediction and the style of its line, for one prediction or for a mapping of names to several.

    >>> [(name, style["color"]) for name, _, style in with_styles({"plain": 1, "Lapwing": 2})]
    [('plain', '#d55e00'), ('Lapwing', '#0072b2')]
    """
    style = lambda i: {"color": COLOURS[i % 6], "marker": MARKERS[i % 6], "linestyle": DASHES[i % 6]}
    if not isinstance(predictions, Mapping):
        return [("", predictions, style(COLOURS.index(POSTERIOR)))]
    if not predictions:
        raise UnsupportedError("the mapping of predictions is empty; expected at least one name with its prediction.")
    return [(plain_text(str(name)), each, style(i)) for i, (name, each) in enumerate(predictions.items())]


def plain_text(text: str) -> str:
    """Return text that Matplotlib draws as it is: dollar signs would start mathematics."""
    return text.replace("$", r"\$")


def add_legend(ax: Axes, **settings: Any) -> None:
    """Add a legend without a frame, if something has a label."""
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=9, **settings)


def thin_rows(length: int, most: int = 200) -> list[int]:
    """Return at most about ``most`` of the row numbers 0..length-1, evenly, the first and the last among them.

    >>> thin_rows(4), thin_rows(100, 3)
    ([0, 1, 2, 3], [0, 50, 99])
    """
    if length <= most:
        return list(range(length))
    return sorted({round(i * (length - 1) / (most - 1)) for i in range(most)})


LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # of the intervals
LEAST = 0.005  # share of the predictions below which a bin is left out
IGNORED = -100  # the label of data that do not count, as in nn.CrossEntropyLoss


@dataclass(frozen=True, eq=False)
class AnswerProbabilities:
    """Probabilities and whether what they are about came true, (N,) each."""

    probability: Tensor
    true: Tensor
    of_classes: bool  # of the most probable class; otherwise of label one

    @property
    def uncertainty(self) -> Tensor:
        """The probability that the answer is wrong."""
        return 1 - self.probability if self.of_classes else torch.minimum(self.probability, 1 - self.probability)

    @property
    def wrong(self) -> Tensor:
        """One where the answer is wrong, zero where it is right."""
        return 1 - self.true if self.of_classes else ((self.probability > 0.5).double() - self.true).abs()

    def calibration(self) -> Calibration:
        """Return what was stated and what came true, in bins."""
        return calibration(self.probability, self.true)

    def curve(self) -> RiskCoverage:
        """Return the share of wrong answers against coverage."""
        return selective_risk(self.uncertainty, self.wrong)


@dataclass(frozen=True, eq=False)
class Residuals:
    """Targets of predicted numbers, (N,) each: the probability of a lower one, standard deviation and error."""

    pit: Tensor
    std: Tensor
    error: Tensor

    def coverage(self, levels: Sequence[float]) -> Tensor:
        """Return the share of targets inside the central intervals of each level, (levels,)."""
        inside = (2 * self.pit - 1).abs().unsqueeze(1) <= torch.tensor(levels, dtype=torch.float64)
        return inside.double().mean(0)

    def calibration(self) -> Calibration:
        """Return levels of central intervals and their coverages."""
        levels = torch.tensor(CQM_LEVELS, dtype=torch.float64)
        return Calibration(levels, self.coverage(CQM_LEVELS), torch.full_like(levels, 1 / len(levels)))

    def curve(self) -> RiskCoverage:
        """Return the mean squared error against coverage."""
        return selective_risk(self.std, self.error.square())


def is_of_numbers(prediction: object) -> bool:
    """Return whether a prediction is one of numbers, which have intervals."""
    return isinstance(prediction, Residuals) or hasattr(prediction, "interval")


def answers(prediction: Any, y: Any) -> AnswerProbabilities:
    """Return the probabilities of a prediction of labels, and what came true.

    Args:
        prediction: A predictive with ``probs``, or these: (B, C), also of tokens (B, T, C) and images (B, C, H, W), or
            the probabilities (B,) of a binary label; or ``AnswerProbabilities``, which are returned as they are.
        y: Class numbers, or zeros and ones in the shape of the probabilities. Labels of -100 are left out.

    Raises:
        DataError: The shapes do not fit, or a label is none of the classes.
        UnsupportedError: It is a prediction of numbers.

    >>> p = answers(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1]))
    >>> p.probability.tolist(), p.true.tolist()
    ([0.75, 0.5], [1.0, 0.0])
    """
    if isinstance(prediction, AnswerProbabilities):
        return prediction
    if is_of_numbers(prediction):
        raise UnsupportedError(
            f"the prediction is a {type(prediction).__name__} of numbers, which have no probabilities of labels; "
            "expected one of labels. For numbers use lw.plots.intervals."
        )
    probs, y = numbers("probs", getattr(prediction, "probs", prediction)).double(), numbers("y", y)
    binary = y.shape == probs.shape or (*y.shape, 1) == probs.shape
    if probs.ndim > 3 and not binary and y.shape == (*probs.shape[:1], *probs.shape[2:]):
        probs = probs.movedim(1, -1)
    if not binary and (probs.shape[:-1] != y.shape or y.is_floating_point()):
        raise DataError(
            f"probs is {describe(probs)}, y is {describe(y)}; expected class numbers, one for each row of "
            "probabilities, or zeros and ones in the shape of the probabilities."
        )
    y = y.to(probs.device)
    counts = y.flatten() != IGNORED
    _refuse_outside(y.flatten()[counts], 1 if binary else probs.shape[-1] - 1)
    if binary:
        probability, true = vectors(probability=probs.flatten()[counts], true=y.flatten()[counts])
        return AnswerProbabilities(probability, true, of_classes=False)
    top, guess = probs.flatten(0, -2)[counts].max(-1)
    probability, true = vectors(probability=top, true=guess == y.flatten()[counts])
    return AnswerProbabilities(probability, true, of_classes=True)


def _refuse_outside(y: Tensor, most: int) -> None:
    """Raise unless all labels are from zero to ``most``."""
    if len(y) and not 0 <= float(y.min()) <= float(y.max()) <= most:
        raise DataError(
            f"labels run from {float(y.min()):g} to {float(y.max()):g}; expected 0..{most}, or {IGNORED} for data that "
            f"do not count. Where another number marks these, such as 255: y.masked_fill(y == 255, {IGNORED})."
        )


def separate(prediction: Any) -> Any:
    """Return the plain network and the posterior of an evaluation by name; anything else as it is."""
    return prediction.by_network if hasattr(prediction, "by_network") else prediction


@dataclass(frozen=True)
class Reliability:
    """Points of a reliability diagram, for each bin that has enough predictions."""

    probability: tuple[float, ...]  # mean predicted probability
    share: tuple[float, ...]  # share that came true
    low: tuple[float, ...]  # ends of a 95 % interval of that share
    high: tuple[float, ...]
    count: tuple[int, ...]  # predictions in the bin


def reliability_points(found: AnswerProbabilities, bins: int = 10) -> Reliability:
    """Return how often predictions came true, by bins of their probability, with Wilson intervals.

    Bins with less than one in 200 of the predictions are left out: their shares are mostly chance.
    """
    integer().check("bins", bins)
    binned = calibration(found.probability, found.true, bins)
    columns = zip(binned.confidence.tolist(), binned.accuracy.tolist(), binned.weight.tolist(), strict=True)
    total = len(found.true)
    rows = [(p, share, *wilson(share, round(w * total)), round(w * total)) for p, share, w in columns if w >= LEAST]
    return Reliability(*zip(*rows, strict=True))


def wilson(share: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of the probability of an event that a ``share`` of ``count`` trials had (Wilson 1927).

    >>> [round(end, 3) for end in wilson(0.5, 10)]
    [0.237, 0.763]
    """
    z = normal_half_width(level)
    centre, spread = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    ends = ((centre - spread) / (1 + z * z / count), (centre + spread) / (1 + z * z / count))
    return min(share, max(0.0, ends[0])), max(share, min(1.0, ends[1]))  # rounding moves ends at zero and one


def normal_half_width(level: float) -> float:
    """Return how many standard deviations a normal variable is within with this probability."""
    PROBABILITY.check("level", level)
    return float(torch.special.ndtri(torch.tensor(0.5 + 0.5 * level, dtype=torch.float64)))


def count_of(prediction: Any) -> int:
    """Return the number of targets."""
    return len(prediction.pit) if isinstance(prediction, Residuals) else prediction.mean.numel()


def observed_coverage(prediction: Any, y: Any) -> list[float]:
    """Return the share of targets inside the central intervals of each of ``LEVELS``.

    Raises:
        UnsupportedError: It is a prediction of labels, which have no intervals.
    """
    if isinstance(prediction, Residuals):
        return prediction.coverage(LEVELS).tolist()
    if not is_of_numbers(prediction):
        raise UnsupportedError(
            f"the prediction is a {type(prediction).__name__} without intervals; expected one of numbers, as of "
            "regression or counts. For labels use lw.plots.reliability."
        )
    y = as_outputs(prediction, y)
    ends = [prediction.interval(level) for level in LEVELS]
    return [coverage(low, high, y) for low, high in ends]


def as_outputs(prediction: Any, y: Values) -> Tensor:
    """Return targets in the shape of the mean; a single output may come without its dimension."""
    mean, y = prediction.mean, numbers("y", y)
    if (*y.shape, 1) != mean.shape and y.shape != mean.shape:
        raise DataError(f"y has the shape {tuple(y.shape)}; expected {tuple(mean.shape)}, one number for each output.")
    return y.to(mean.device).reshape(mean.shape)


def risk_of(prediction: Any, y: Any) -> RiskCoverage:
    """Return the risk-coverage curve: the share of wrong labels, or the root of the mean squared error of numbers."""
    if not is_of_numbers(prediction):
        return answers(prediction, y).curve()
    if isinstance(prediction, Residuals):
        curve = prediction.curve()
    else:
        error = (prediction.mean - as_outputs(prediction, y)).double().square().flatten(1).mean(1)
        curve = selective_risk(prediction.variance.detach().double().flatten(1).mean(1), error.detach())
    return RiskCoverage(curve.coverage, curve.risk.sqrt())


def band(
    prediction: Any,
    x: Values,
    *,
    level: float = 0.95,
    data: tuple[Values, Values] | None = None,
    output: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draw the mean and the intervals of a prediction over one input.

    The wide band is the interval of the target. The dark band inside is that of the function alone, which more data
    would make narrower.

    Args:
        prediction: A prediction of numbers, ``posterior.predict(x)``, or a belief, ``posterior.functions(x)``.
        x: The inputs of the prediction, (B,) or (B, 1), in any order.
        level: The probability of the intervals.
        data: Inputs and targets that were observed, to be drawn as points.
        output: Which output to draw.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis, with limits that contain the bands and the points.

    Raises:
        DataError: There is more than one input variable, or the shapes do not fit.
        UnsupportedError: It is a prediction of labels.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    >>> ax = band(posterior.predict(2 * x), 2 * x, data=(x, x.sin()))
    >>> [round(float(end), 2) for end in ax.get_xlim()]
    [-2.0, 2.0]
    """
    PROBABILITY.check("level", level)
    integer(0).check("output", output)
    if not _has_spread(prediction):
        raise UnsupportedError(
            f"the prediction is a {type(prediction).__name__}; expected one of numbers, or posterior.functions(x). For "
            "probabilities use lw.plots.confidence_map or lw.plots.reliability."
        )
    mean, inputs = prediction.mean.detach(), column("x", x)
    if mean.ndim != 2 or len(mean) != len(inputs) or output >= mean.shape[1]:
        raise DataError(
            f"the prediction has the shape {tuple(mean.shape)}, x has {len(inputs)} rows and output is {output}; "
            "expected (B, C) for B inputs, and an output below C."
        )
    order, percent = inputs.argsort(), f"{100 * level:g} %"
    chosen = lambda values: values.detach().double().cpu()[:, output][order]
    centre, z = chosen(prediction.mean), normal_half_width(level)
    ax, places, reach = new_axis(ax), inputs[order].tolist(), [centre]
    spread = z * chosen(prediction.std)
    if is_of_numbers(prediction):
        low, high = map(chosen, prediction.interval(level))
        shade(ax, places, low.tolist(), high.tolist(), label=f"{percent} of targets")
        spread = z * chosen(prediction.epistemic_variance).clamp_min(0).sqrt()
        reach += [low, high]
    low, high = centre - spread, centre + spread
    reach += [low, high]
    shade(ax, places, low.tolist(), high.tolist(), alpha=0.5, label=f"{percent} for the function")
    ax.plot(places, centre.tolist(), color=POSTERIOR, linewidth=1.6, label="mean")
    ax.set(xlabel="x", ylabel="y", xlim=(places[0], places[-1]))
    points = () if data is None else (column("x of the data", data[0]), _targets(data[1], output))
    fit_frame(ax, torch.cat(reach), *points)
    add_legend(ax, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    return ax


def shade(
    ax: Axes, x: list[float], low: list[float], high: list[float], alpha: float = 0.3, **settings: object
) -> None:
    """Fill the area between two curves; by default in the colour of a posterior."""
    style: dict[str, Any] = {"color": POSTERIOR, "alpha": alpha, "linewidth": 0, **settings}
    ax.fill_between(x, low, high, **style)


def fit_frame(ax: Axes, values: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> None:
    """Draw observed points (x, y), if any, and set limits that contain these and the values."""
    low, high = ax.get_xlim()
    if x is not None and y is not None:
        ax.scatter(x.tolist(), y.tolist(), s=8, color=INK, zorder=3, label="data", linewidth=0)
        values = torch.cat([values, y.to(values)])
        low, high = min(low, float(x.min())), max(high, float(x.max()))
    margin = 0.04 * float(values.max() - values.min()) or 1.0
    ax.set(xlim=(low, high), ylim=(float(values.min()) - margin, float(values.max()) + margin))


def column(name: str, x: Values) -> Tensor:
    """Return one number for each input, (B,), in float64; raise if there are several."""
    x = numbers(name, x).double().cpu()
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[1] != 1) or not len(x):
        raise DataError(f"{name} has the shape {tuple(x.shape)}; expected one number for each input, (B,) or (B, 1).")
    return x.reshape(-1)


def _targets(y: Values, output: int) -> Tensor:
    """Return the targets (B,) of one output."""
    y = numbers("y of the data", y).double().cpu()
    return y.reshape(len(y), -1)[:, output]


def grid(x: Values, points: int = 60, margin: float = 0.3) -> Tensor:
    """Return inputs on a regular grid around some inputs, for ``band`` and ``confidence_map``.

    Args:
        x: Inputs with one or two variables, (B, 1) or (B, 2).
        points: The number of points along each variable.
        margin: How far the grid goes beyond the inputs on each side, as a share of their range.

    Returns:
        The grid, (points, 1) or (points², 2), in the dtype of x.

    Raises:
        DataError: There are more than two variables.

    >>> import torch
    >>> grid(torch.rand(10, 2), points=5).shape
    torch.Size([25, 2])
    """
    integer(2).check("points", points)
    POSITIVE.check("margin", margin)
    x = numbers("x", x)
    if x.ndim != 2 or x.shape[1] not in (1, 2) or not len(x):
        raise DataError(f"x has the shape {tuple(x.shape)}; expected (B, 1) or (B, 2). Make the inputs by hand.")
    ends = torch.stack(x.double().aminmax(dim=0))
    reach = margin * (ends[1] - ends[0])
    lines = [torch.linspace(a, b, points) for a, b in zip((ends[0] - reach).tolist(), (ends[1] + reach).tolist())]
    made: Tensor = torch.cartesian_prod(*lines).reshape(-1, x.shape[1])
    return made.to(x)


def confidence_map(
    prediction: Any, x: Values, *, data: tuple[Values, Values] | None = None, ax: Axes | None = None
) -> Axes:
    """Draw, over two inputs, the confidence of a classifier, or the standard deviation of predicted numbers.

    Args:
        prediction: A prediction of labels or of numbers, at these inputs.
        x: The inputs, (B, 2): ``lw.plots.grid(x)``, or any points.
        data: Inputs (B, 2) and labels or numbers that were observed, to be drawn as points.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis.

    Raises:
        DataError: There are not two input variables, or the shapes do not fit.

    >>> import torch, lapwing as lw
    >>> x = torch.randn(40, 2)
    >>> posterior = lw.fit(torch.nn.Linear(2, 2), [(x, (x[:, 0] > 0).long())], "classification", prior=1.0)
    >>> points = grid(x, points=9)
    >>> confidence_map(posterior.predict(points), points).get_xlabel()
    'x₁'
    """
    x = numbers("x", x).double().cpu()
    values, words, ends = _heights(prediction)
    if x.ndim != 2 or x.shape[1] != 2 or len(x) != len(values) or len(x) < 3:
        raise DataError(
            f"x has the shape {tuple(x.shape)} and the prediction {len(values)} rows; expected (B, 2) for both, with "
            "at least three points. lw.plots.grid(x) makes them."
        )
    ax = new_axis(ax)
    low, high = ends if ends is not None else (float(values.min()), float(values.max()) + 1e-12)
    levels = [low + (high - low) * i / 12 for i in range(13)]
    inside = values.clamp(low, high - 1e-6 * (high - low)).tolist()  # the last level itself would stay white
    drawn = ax.tricontourf(x[:, 0].tolist(), x[:, 1].tolist(), inside, levels=levels, cmap="cividis")
    ax.figure.colorbar(drawn, ax=ax, label=words, ticks=levels[::3], format="%.2g")
    if data is not None:
        _points(ax, *data)
    limits = torch.stack(x.aminmax(dim=0)).T.tolist()
    ax.set(xlabel="x₁", ylabel="x₂", xlim=limits[0], ylim=limits[1])
    return ax


def _has_spread(prediction: Any) -> bool:
    """Return whether a prediction has standard deviations; a tensor has a function of that name."""
    return isinstance(getattr(prediction, "std", None), Tensor)


def _heights(prediction: Any) -> tuple[Tensor, str, tuple[float, float] | None]:
    """Return what a map shows at every input, (B,), its name, and its range if it has one."""
    if _has_spread(prediction):
        return prediction.std.detach().double().cpu().flatten(1).mean(1), "standard deviation", None
    probs = numbers("probs", getattr(prediction, "probs", prediction)).double().cpu()
    if probs.ndim != 2:
        raise DataError(f"probs has the shape {tuple(probs.shape)}; expected (B, C).")
    if probs.shape[1] == 1:
        return torch.maximum(probs, 1 - probs).squeeze(1), "confidence", (0.5, 1.0)
    return probs.amax(1), "confidence", (1 / probs.shape[1], 1.0)


def _points(ax: Axes, x: Any, y: Any) -> None:
    """Draw observed inputs, with a marker and a colour for each class; of one kind if there are many values."""
    x, y = numbers("x of the data", x).cpu(), numbers("y of the data", y).cpu().flatten()
    kinds = y.unique().tolist()
    many = len(kinds) > len(MARKERS)
    for i, kind in enumerate(kinds[:1] if many else kinds):
        across, up = (x if many else x[y == kind]).T.tolist()
        colour = INK if many else COLOURS[i]
        ax.scatter(across, up, s=14, color=colour, marker=MARKERS[i], edgecolor="white", linewidth=0.5)


MOST_LAYERS = 24  # bars of γ that stay readable
FACTORS = tuple(10 ** (i / 6) for i in range(-18, 19))  # a thousandth to a thousand times the precision


def effective_parameters(result: Any, *, ax: Axes | None = None) -> Axes:
    """Draw the share of the weights of each layer that the data determine: γ over the number of weights.

    Args:
        result: A posterior, or what its ``effective_parameters()`` returns.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis. Of more than 24 layers it has the 24 with the highest γ.

    Raises:
        UnsupportedError: The method has no γ.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    >>> effective_parameters(posterior).get_xlabel()
    'share determined by the data'
    """
    found = result.effective_parameters() if hasattr(result, "effective_parameters") else result
    names = sorted(found.layers, key=lambda name: found.layers[name])[-MOST_LAYERS:]
    names = [name for name in found.layers if name in names][::-1]  # the first layer at the top
    ax = new_axis(ax, (4.6, 1.1 + 0.24 * len(names)))
    shares = [found.layers[name] / found.sizes[name] for name in names]
    ax.barh(range(len(names)), shares, color=POSTERIOR, height=0.7)
    for i, name in enumerate(names):
        text, place = f"{found.layers[name]:.3g} of {found.sizes[name]:,}", (shares[i], i)
        ax.annotate(text, place, xytext=(3, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
    ax.set_yticks(range(len(names)), [plain_text(shorten(name)) for name in names])
    ax.set(xlim=(0, 1.4), xlabel="share determined by the data")
    return ax


def shorten(name: str, most: int = 18) -> str:
    """Return the name, or its end if it is long.

    >>> shorten(""), shorten("encoder.layers.11.attention.query")
    ('(top)', '….attention.query')
    """
    if len(name) <= most:
        return name or "(top)"
    end = name[1 - most :]
    return "…" + (end[end.index(".") :] if "." in end else end)


@dataclass(frozen=True)
class EvidenceCurve:
    """The log evidence of one posterior under other precisions of its prior."""

    precisions: tuple[float, ...]  # or factors on all precisions, if there are several
    log_evidence: tuple[float, ...]
    present: float  # the precision of the posterior, or the factor 1
    factors: bool  # whether these are factors on several precisions

    @classmethod
    def of(cls, posterior: Any, precisions: Sequence[float] | Tensor | None = None) -> EvidenceCurve:
        """Compute the evidence; by default for a thousandth to a thousand times the precision of the posterior.

        Cost: a factorisation of the precision for each; no pass over the data.
        """
        base, method = posterior.base, getattr(posterior, "method", "")
        base.require(Posterior.log_evidence, "evidence", method)
        base.require(Posterior.with_problem, "prior over weights to change", method)
        problem = base.problem
        values = problem.prior.values.detach()
        several = values.numel() != 1
        unit = 1.0 if several else float(values)
        if precisions is None:
            precisions = [unit * factor for factor in FACTORS]
        POSITIVE_VALUES.check("precisions", precisions)
        chosen = sorted(torch.as_tensor(precisions, dtype=torch.float64).tolist())
        with torch.no_grad():
            each = [base.with_problem(problem.with_precisions(values * (p / unit))).log_evidence() for p in chosen]
        return cls(tuple(chosen), tuple(map(float, each)), unit, several)


def evidence_curve(result: Any, precisions: Sequence[float] | Tensor | None = None, *, ax: Axes | None = None) -> Axes:
    """Draw the log evidence against the precision of the prior; a line marks the precision of the posterior.

    Args:
        result: A posterior with evidence, or an ``EvidenceCurve``.
        precisions: The precisions to try; by default a thousandth to a thousand times that of the posterior. If the
            prior has several, these are factors on all of them.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis. Evidence that is lower than the highest by more than five times the middle difference is cut off.

    Raises:
        UnsupportedError: The method has no evidence, or no prior over weights.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    >>> evidence_curve(posterior, [0.1, 1, 10]).get_xlabel()
    'prior precision'
    """
    curve = result if isinstance(result, EvidenceCurve) else EvidenceCurve.of(result, precisions)
    ax = new_axis(ax)
    points = [(p, e) for p, e in zip(curve.precisions, curve.log_evidence, strict=True) if math.isfinite(e)]
    if not points:
        raise UnsupportedError("the evidence is not finite at any of the precisions; expected a finite number at one.")
    best = max(e for _, e in points)
    lost = sorted(best - e for _, e in points)
    depth = max(1.0, min(lost[-1], 5 * lost[len(lost) // 2]))
    kept = [(p, e) for p, e in points if best - e <= depth]
    ax.plot(*zip(*kept, strict=True), color=POSTERIOR, marker="o", markersize=3, linewidth=1.6)
    ax.axvline(curve.present, color=INK, linewidth=1, linestyle="--", label="this posterior")
    words = "factor on the prior precisions" if curve.factors else "prior precision"
    ax.set(xscale="log", xlabel=words, ylabel="log evidence", ylim=(best - 1.05 * depth, best + 0.08 * depth))
    ax.legend(frameon=False, fontsize=9, loc="best")
    return ax


def trace(result: Any, *, ax: Axes | None = None) -> Axes:
    """Draw the score at every step of a tuner; a ring marks the best one.

    Args:
        result: A posterior, or its ``trace``. Of a mixture, the steps by which the evidence was maximised are drawn.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis.

    Raises:
        UnsupportedError: Nothing was tuned, or the tuner kept no steps.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", tuner=lw.tuners.MaximiseEvidence())
    >>> trace(posterior).get_ylabel()
    'log evidence'
    """
    record = trace_with_steps(result)
    if record is None:
        raise UnsupportedError("there are no steps of a tuner; expected a posterior that was tuned, or its trace.")
    ax = new_axis(ax)
    points = [(i, step.score) for i, step in enumerate(record.steps) if math.isfinite(step.score)]
    ax.plot(*zip(*points, strict=True), color=POSTERIOR, marker="o", markersize=4, linewidth=1.6)
    best = max(points, key=lambda point: point[1])
    ax.plot(*best, marker="o", markersize=10, markerfacecolor="none", markeredgecolor=OTHER, markeredgewidth=2)
    ax.locator_params(axis="x", integer=True)
    ax.set(xlabel=f"step of {record.tuner}", ylabel=record.score)
    return ax


def trace_with_steps(result: Any) -> Trace | None:
    """Return the first trace with steps: ``result``, its trace, or that of the posterior it varies; else None."""
    base = getattr(result, "base", None)
    for record in (result, getattr(result, "trace", None), getattr(base, "trace", None)):
        if any(math.isfinite(step.score) for step in getattr(record, "steps", ())):
            return record
    return None


BAND_LEVEL = 0.95  # of error bars and bands that show how far chance alone goes


def reliability(prediction: Any, y: Values | None = None, *, bins: int = 10, ax: Axes | None = None) -> Axes:
    """Draw how often predictions come true against their probability; on the diagonal they are calibrated.

    Error bars are 95 % intervals of the share, from the number of predictions in the bin. Bins with less than one in
    200 of the predictions are left out.

    Args:
        prediction: A prediction of labels, ``posterior.predict(x)``, or probabilities (B, C); or a mapping of names to
            several, the plain network first; or ``posterior.evaluate(data)``, which has both.
        y: Labels, (B,); for binary labels zeros and ones in the shape of the probabilities. Not needed for an
            evaluation, nor for ``AnswerProbabilities`` (``lapwing.plots``), which know what is right.
        bins: The number of bins of equal width.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis.

    Raises:
        DataError: Probabilities and labels do not fit.
        UnsupportedError: It is a prediction of numbers.

    >>> import torch
    >>> ax = reliability(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('confidence', 'share that is right')
    """
    ax, of_classes, top = new_axis(ax), True, 0.0
    ax.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (1, 2)), label="ideal")
    for name, each, style in with_styles(separate(prediction)):
        found = answers(each, y)
        of_classes = found.of_classes
        points = reliability_points(found, bins)
        top = max(top, *points.probability, *points.high)
        below = [share - low for share, low in zip(points.share, points.low, strict=True)]
        above = [high - share for share, high in zip(points.share, points.high, strict=True)]
        style |= {"capsize": 2, "elinewidth": 1, "markersize": 4, "label": name or None}
        ax.errorbar(points.probability, points.share, yerr=[below, above], **style)
    reach = 1.0 if top > 0.5 else 1.1 * top
    ax.set(xlim=(0, reach), ylim=(0, 1.02 * reach))
    words = ("confidence", "share that is right") if of_classes else ("predicted probability", "share that is one")
    ax.set(xlabel=words[0], ylabel=words[1])
    add_legend(ax, loc="upper left")
    return ax


def intervals(prediction: Any, y: Values | None = None, *, ax: Axes | None = None) -> Axes:
    """Draw the share of targets inside central intervals against the probability of these; ideal is the diagonal.

    The grey band has 95 % of calibrated predictions of as many independent targets.

    Args:
        prediction: A prediction of numbers, or a mapping of names to several, the plain network first; or
            ``posterior.evaluate(data)``, which has both.
        y: Targets, (B,) or (B, C). Not needed for an evaluation.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis.

    Raises:
        UnsupportedError: The prediction has no intervals.
        DataError: The shapes do not fit.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    >>> intervals(posterior.predict(x), x.sin()).get_xlabel()
    'probability of the interval'
    """
    drawn = with_styles(separate(prediction))
    each = [(name, observed_coverage(one, y), style) for name, one, style in drawn]
    ax, count = new_axis(ax), count_of(drawn[0][1])
    half = [normal_half_width(BAND_LEVEL) * (level * (1 - level) / count) ** 0.5 for level in (0, *LEVELS, 1)]
    low = [max(0, level - h) for level, h in zip((0, *LEVELS, 1), half, strict=True)]
    high = [min(1, level + h) for level, h in zip((0, *LEVELS, 1), half, strict=True)]
    ax.fill_between((0, *LEVELS, 1), low, high, color="#888888", alpha=0.3, linewidth=0, label="chance")
    ax.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (1, 2)), label="ideal")
    for name, shares, style in each:
        ax.plot(LEVELS, shares, **style, markersize=4, label=name or None)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="probability of the interval", ylabel="share of targets inside")
    add_legend(ax, loc="upper left")
    return ax


def risk_coverage(prediction: Any, y: Values | None = None, *, ax: Axes | None = None) -> Axes:
    """Draw the error of the answers that remain when the most uncertain inputs are left unanswered.

    Args:
        prediction: A prediction of labels or numbers, or a curve that ``lw.metrics.risk_coverage`` returned; or a
            mapping of names to several, the plain network first; or ``posterior.evaluate(data)``, which has both.
        y: Targets; not needed for a curve or an evaluation.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis. The error is the share of wrong labels, or the root of the mean squared error of numbers.

    Raises:
        DataError: Predictions and targets do not fit.

    >>> import torch
    >>> ax = risk_coverage(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    >>> ax.get_xlabel()
    'share of inputs that are answered'
    """
    ax, top, words = new_axis(ax), 0.0, "mean loss"
    for name, each, style in with_styles(separate(prediction)):
        curve = each if isinstance(each, RiskCoverage) else risk_of(each, y)
        rows = thin_rows(len(curve.risk))
        coverage, risk = curve.coverage[rows].tolist(), curve.risk[rows].tolist()
        ax.plot(coverage, risk, **{**style, "marker": None}, linewidth=1.6, label=name or None)
        top = max(top, *risk)
        if not isinstance(each, RiskCoverage):
            words = "RMSE of the answers" if is_of_numbers(each) else "share of wrong answers"
    ax.set(xlim=(0, 1), ylim=(0, 1.05 * top or 1.0), ylabel=words, xlabel="share of inputs that are answered")
    add_legend(ax, loc="best")
    return ax


def ranking(evaluations: Any, *, ax: Axes | None = None) -> Axes:
    """Draw the negative log-likelihood of several posteriors with its interval, the best at the top.

    Args:
        evaluations: What ``lw.evaluate`` returns.
        ax: A Matplotlib axis to draw on; a new one if None.

    Returns:
        The axis.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x)], "regression", prior=2.0)
    >>> ax = lw.plots.ranking(lw.evaluate({"one": posterior}, [(x, x)], resamples=20))
    >>> [label.get_text() for label in ax.get_yticklabels()].count("one")
    1
    """
    rows = evaluations.rows[::-1]
    ax = new_axis(ax, (4.6, 1.1 + 0.3 * len(rows)))
    scores = [row.scores["nll"] for row in rows]
    reach = [[max(0.0, s.value - s.low) for s in scores], [max(0.0, s.high - s.value) for s in scores]]
    ax.errorbar([s.value for s in scores], range(len(rows)), xerr=reach, fmt="o", color=POSTERIOR, capsize=3)
    ax.set_yticks(range(len(rows)), [plain_text(row.name) for row in rows])
    ax.set(xlabel="negative log-likelihood of a datum (lower is better)", ylim=(-0.6, len(rows) - 0.4))
    return ax


refuse_other_calls(globals())
