"""Pictures of predictions beside observed targets: reliability, intervals, risk against coverage."""

from __future__ import annotations

from typing import Any

from lapwing.metrics.selection import RiskCoverage
from lapwing.plots.canvas import INK, POSTERIOR, add_legend, new_axis, plain_text, styled, thinned
from lapwing.plots.observed import (
    LEVELS,
    Residuals,
    answers,
    count_of,
    normal_half_width,
    observed_coverage,
    reliability_points,
    risk_of,
    separate,
)

BAND_LEVEL = 0.95  # of error bars and bands that show how far chance alone goes


def reliability(prediction: Any, y: Any = None, *, bins: int = 10, ax: Any = None) -> Any:
    """Draw how often predictions come true against their probability; on the diagonal they are calibrated.

    Error bars are 95 % intervals of the share, from the number of predictions in the bin. Bins with less than one in
    200 of the predictions are left out.

    Args:
        prediction: A prediction of labels, ``posterior.predict(x)``, or probabilities (B, C); or a mapping of names to
            several, the plain network first; or ``posterior.evaluate(data)``, which has both.
        y: Labels, (B,); for binary labels zeros and ones in the shape of the probabilities. Not needed for an
            evaluation, nor for ``Answers`` (``lapwing.plots.observed``), which know what is right.
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
    for name, each, style in styled(separate(prediction)):
        found = answers(each, y)
        of_classes = found.of_classes
        points = reliability_points(found, bins)
        top = max(top, *points.probability, *points.high)
        below = [share - low for share, low in zip(points.share, points.low, strict=True)]
        above = [high - share for share, high in zip(points.share, points.high, strict=True)]
        ends = {"yerr": [below, above], "capsize": 2, "elinewidth": 1, "markersize": 4}
        ax.errorbar(points.probability, points.share, **ends, **style, label=name or None)
    reach = 1.0 if top > 0.5 else 1.1 * top
    ax.set(xlim=(0, reach), ylim=(0, 1.02 * reach))
    words = ("confidence", "share that is right") if of_classes else ("predicted probability", "share that is one")
    ax.set(xlabel=words[0], ylabel=words[1])
    add_legend(ax, loc="upper left")
    return ax


def intervals(prediction: Any, y: Any = None, *, ax: Any = None) -> Any:
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
    drawn = styled(separate(prediction))
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


def risk_coverage(prediction: Any, y: Any = None, *, ax: Any = None) -> Any:
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
    for name, each, style in styled(separate(prediction)):
        curve = each if isinstance(each, RiskCoverage) else risk_of(each, y)
        rows = thinned(len(curve.risk))
        coverage, risk = curve.coverage[rows].tolist(), curve.risk[rows].tolist()
        ax.plot(coverage, risk, **{**style, "marker": None}, linewidth=1.6, label=name or None)
        top = max(top, *risk)
        if not isinstance(each, RiskCoverage):
            real = isinstance(each, Residuals) or hasattr(each, "interval")
            words = "RMSE of the answers" if real else "share of wrong answers"
    ax.set(xlim=(0, 1), ylim=(0, 1.05 * top or 1.0), ylabel=words, xlabel="share of inputs that are answered")
    add_legend(ax, loc="best")
    return ax


def ranking(evaluations: Any, *, ax: Any = None) -> Any:
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
