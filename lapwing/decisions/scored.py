"""Scores of several posteriors on the same data: numbers of each datum from one pass, and the bootstrap over inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.batches import Batch
from lapwing.core.memory import fitting
from lapwing.core.random import independent_generator
from lapwing.core.settings import GENERATOR, PROBABILITY, integer
from lapwing.decisions.collecting import batches_of, labelled, source_of, warn_reused
from lapwing.errors import DataError
from lapwing.metrics.resampling import ScoreInterval, resampled_weights
from lapwing.posteriors.point import PointPosterior
from lapwing.predictives.scoring import ClassSums, Numbers, Score, Scoring


def plain_of(posterior: Any) -> PointPosterior:
    """Return the plain network: the outputs as they are, under the likelihood of the posterior with its noise."""
    base = posterior.base.plain()
    network = base.problem.network
    network = network if network.shift is None else network.shifted(None)
    return PointPosterior(replace(base.problem, network=network), base.statistics, network.theta())


@dataclass(frozen=True, eq=False)
class ClassTotals:
    """Totals of ``ClassSums`` over all inputs, with what the error of their mean needs; (C,) each.

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
        parts = (
            sums.probability, sums.seen, data, sums.variance, gap.square(), gap * data, data.square(),
        )  # fmt: skip
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

    scoring: Scoring
    data: Numbers
    seconds: float
    classes: ClassTotals | None = None  # of labels


def scored(
    posteriors: Mapping[str, tuple[Any, Any]], data: Iterable[Any], level: float, target_key: str | None,
    progress: bool | None,
) -> dict[str, Scored]:  # fmt: skip
    """Return the numbers of all data under several posteriors, from one pass over the data.

    Args:
        posteriors: By name, a fitted posterior with its network and likelihood, and what predicts.
        data: A loader or batches with targets.
        level: The probability of the intervals whose coverage is scored.
        target_key: As for ``fit``.
        progress: As for ``predict``.
    """
    PROBABILITY.check("level", level)
    gathered = {name: _Gathered() for name in posteriors}
    first = next(iter(posteriors.values()))[0]
    for fitted, _ in posteriors.values():
        fitted._unchanged()
    with torch.no_grad():
        source = source_of(first.network, data, "data", target_key, progress)
        for batch in batches_of(first.network, source):
            for name, (fitted, predicts) in posteriors.items():
                gathered[name].add(fitted, predicts, batch, level)
    for fitted in {id(fitted): fitted for fitted, _ in posteriors.values()}.values():
        warn_reused(fitted, source.sketch(), "data")
    return {name: each.value(name) for name, each in gathered.items()}


class _Gathered:
    """Numbers of the data of consecutive batches."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._owners: list[Tensor] = []
        self._inputs, self._seconds = 0, 0.0
        self._scoring: Scoring | None = None
        self._classes: ClassTotals | None = None
        self._gaps: list[Tensor] = []
        self._data: list[Tensor] = []

    def add(self, fitted: Any, predicts: Any, batch: Batch, level: float) -> None:
        each = labelled(fitted, batch, "data")
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
        most = fitting(resamples, 40 * rows, torch.device("cpu"))
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
