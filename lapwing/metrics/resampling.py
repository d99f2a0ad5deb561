"""How far a score would differ for other test data of the same kind: the bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.memory import evenly
from lapwing.core.random import independent_generator, uniform
from lapwing.core.settings import FLAG, FUNCTION, GENERATOR, PROBABILITY, integer, is_real, seen
from lapwing.errors import DataError
from lapwing.metrics.arrays import Values, numbers


@dataclass(frozen=True)
class ScoreInterval:
    """A score of all data, and what resampled data say about its uncertainty."""

    value: float  # of all data
    low: float  # ends of the percentile interval
    high: float
    std: float  # standard error


def bootstrap(
    metric: Callable[..., float],
    *data: Values,
    level: float = 0.95,
    resamples: int = 1000,
    paired: bool = True,
    generator: torch.Generator | None = None,
) -> ScoreInterval:
    """Return a score with a percentile interval from data that are drawn again with replacement.

    Args:
        metric: Called with ``data``, then with tensors of as many rows that are drawn from them; returns a number.
        data: Tensors or arrays whose first dimension counts the data.
        level: The probability of the interval.
        resamples: How often data are drawn.
        paired: Whether row i of every tensor belongs to the same datum, so that rows are drawn together. False draws
            from each tensor by itself, as for scores from inside and outside.
        generator: For the rows; a fixed seed by default.

    Returns:
        The score of all data, the ends of the interval, and the standard error.

    Raises:
        DataError: Data are empty or of unequal lengths, or a score is not a finite number.

    >>> y = torch.arange(100.0)
    >>> score = bootstrap(lambda y: float(y.mean()), y)
    >>> score.value, 40 < score.low < score.value < score.high < 60
    (49.5, True)
    """
    FUNCTION.check("metric", metric)
    PROBABILITY.check("level", level)
    integer(2).check("resamples", resamples)
    FLAG.check("paired", paired)
    GENERATOR.check("generator", generator)
    tensors = _rows(data, paired)
    value, stream = _score(metric, tensors), independent_generator(generator)
    scores = torch.empty(resamples, dtype=torch.float64)
    for i in range(resamples):
        drawn = _drawn(tensors[:1], stream) * len(tensors) if paired else _drawn(tensors, stream)
        scores[i] = _score(metric, [t[rows.to(t.device)] for t, rows in zip(tensors, drawn, strict=True)])
    tail = 0.5 - 0.5 * level
    low, high = scores.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return ScoreInterval(value, low, high, float(scores.std()))


def _rows(data: tuple[Values, ...], paired: bool) -> list[Tensor]:
    """Return the data as tensors; raise unless they have rows, and equally many if they are paired."""
    tensors = [numbers(f"data {i}", value) for i, value in enumerate(data)]
    if not tensors or any(not t.ndim or not len(t) for t in tensors):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors) or "none"
        raise DataError(f"data have the shapes {shapes}; expected one or more tensors (B, ...) that are not empty.")
    lengths = [len(t) for t in tensors]
    if paired and len(set(lengths)) > 1:
        raise DataError(
            f"data have {', '.join(map(str, lengths))} rows; expected equally many. Use paired=False if they are not "
            "about the same inputs, or draw rows by a metric of torch.arange(B)."
        )
    return tensors


def _drawn(tensors: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return row numbers for each tensor, drawn with replacement on the device of the generator."""
    like = torch.empty(0, dtype=torch.float64, device=generator.device)
    return [(uniform((len(t),), generator, like) * len(t)).long() for t in tensors]


def _score(metric: Callable[..., float], tensors: list[Tensor]) -> float:
    """Return the score of these data; raise unless it is a finite number."""
    score = metric(*tensors)
    if isinstance(score, Tensor) and score.numel() == 1:
        score = float(score)
    if not is_real(score) or not abs(score) < float("inf"):
        raise DataError(f"the metric of all or of resampled data is {seen(score)}; expected a finite number.")
    return float(score)


def resampled_weights(count: int, resamples: int, generator: torch.Generator, most: int) -> Iterator[Tensor]:
    """Yield how often each of ``count`` rows is drawn with replacement, (R, count) in float64.

    At most ``most`` resamples are yielded at a time; together they are as many as asked for.
    """
    like = torch.empty(0, dtype=torch.float64, device=generator.device)
    for part in evenly(resamples, most):
        number = part.stop - part.start
        rows = (uniform((number, count), generator, like) * count).long()
        yield torch.zeros(number, count, dtype=torch.float64).scatter_add_(
            1, rows.cpu(), torch.ones(number, count, dtype=torch.float64)
        )
