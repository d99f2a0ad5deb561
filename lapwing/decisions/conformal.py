"""Split conformal prediction: sets of classes and intervals of numbers with a guaranteed coverage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.decisions.collecting import (
    GroupNumbers,
    LabelledBatch,
    RowGroups,
    group_numbers,
    grouped_rows,
    input_batches,
    warn_of_units,
)
from lapwing.errors import DataError, UnsupportedError
from lapwing.predictives.base import LabelPredictive, NumberPredictive, Predictive
from lapwing.runtime.settings import PROBABILITY, integer, one_of

if TYPE_CHECKING:
    from lapwing.fitted import Fitted


@dataclass(frozen=True, eq=False)
class PredictionSets:
    """Sets of classes, one for each input.

    Args:
        members: Whether each class is in the set, (B, C).
    """

    members: Tensor

    @property
    def size(self) -> Tensor:
        """The number of classes of each set, (B,)."""
        return self.members.sum(-1)

    @property
    def labels(self) -> list[list[int]]:
        """The classes of each set, as lists of numbers."""
        return [row.nonzero().flatten().tolist() for row in self.members]

    def numpy(self) -> Any:
        """Return ``members`` as a NumPy array."""
        return self.members.cpu().numpy()

    def __repr__(self) -> str:
        return f"<PredictionSets: {len(self.members)} inputs, {self.size.double().mean():.3g} classes on average>"


@dataclass(frozen=True)
class Coverage:
    """How often sets or intervals held the target, on data that were not used to calibrate them."""

    share: float
    error: float  # standard error of the share, for these data
    size: float  # mean number of classes, or mean width
    count: int  # inputs
    by_group: dict[int, float] = field(default_factory=dict)  # the share in each group


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What sets and intervals share: quantiles of the scores, one for each group."""

    posterior: Fitted
    level: float
    score: str
    quantiles: Mapping[int | None, Tensor]  # by group; under None without groups
    count: int
    groups: Any = None

    def predict_with_limits(self, x: Inputs, groups: Any) -> Iterator[tuple[Any, Tensor]]:
        """Yield predictives at x and the largest scores that are let in; of each batch if groups are a function."""
        given = self.groups if groups is None and callable(self.groups) else groups
        if not callable(given):
            predictive = self.posterior.predict(x)
            count = len(predictive.mean)
            yield predictive, self.limits(None if given is None else group_numbers(given, count), count)
            return
        members = RowGroups(given)
        for batch in input_batches(self.posterior, x, None, False):
            predictive = self.posterior.predict(batch)
            count = len(predictive.mean)
            yield predictive, self.limits(members.of(batch, count), count)

    def limits(self, members: GroupNumbers, count: int) -> Tensor:
        """Return the largest score that is let in for each input, (B, 1) or (B, C), from the group of each."""
        if self.groups is None:
            if members is not None:
                raise UnsupportedError("groups were given and the calibration had none; calibrate with groups=...")
            return self.quantiles[None].expand(count, -1)
        if members is None:
            raise DataError("groups is None; expected the group number of each input, since the calibration had those.")
        return torch.stack([self._of_group(group) for group in members])

    def _of_group(self, group: int) -> Tensor:
        if group not in self.quantiles:
            known = ", ".join(map(str, sorted(k for k in self.quantiles if k is not None)))
            raise DataError(f"an input is of group {group}, which no calibration datum has; expected one of {known}.")
        return self.quantiles[group]

    def measure_coverage(
        self,
        data: Iterable[object],
        groups: Any,
        inside: Callable[[Any, LabelledBatch, Tensor], Tensor],
        keys: dict[str, Any],
    ) -> Coverage:
        """Return the coverage, from ``inside``: whether each target is in, and the sizes, (B, 2), given the limits."""

        def number(predictive: Any, batch: LabelledBatch, members: GroupNumbers) -> Tensor:
            return inside(predictive, batch, self.limits(members, len(batch.targets)))

        given = self.groups if groups is None and callable(self.groups) else groups
        rows, numbers, _ = grouped_rows(self.posterior, data, number, given, name="data", calibrates=False, **keys)
        share, count = float(rows[:, 0].mean()), len(rows)
        each = [] if numbers is None else numbers.unique().tolist()
        by_group = {int(group): float(rows[numbers == group, 0].mean()) for group in each}
        return Coverage(share, math.sqrt(share * (1 - share) / count), float(rows[:, 1].mean()), count, by_group)


@dataclass(frozen=True, eq=False)
class ConformalSets(Calibrated):
    """Sets of classes that hold the label with probability ``level``; see ``Fitted.conformal`` for the guarantee.

    Args:
        posterior: What predicts.
        level: The guaranteed probability.
        score: "adaptive" or "threshold".
        quantiles: The largest score of a class in the set, (1,), by group.
        count: The number of calibration data.
        groups: The function or numbers that were given, or None.
        seed: Of the uniform numbers of "adaptive".
    """

    seed: int = 0

    def predict(self, x: Inputs, *, groups: Any = None) -> PredictionSets:
        """Return the sets at a batch of inputs or at those of a loader.

        Args:
            x: As for ``Fitted.predict``.
            groups: The group number of each input, (B,), if the calibration was given numbers and no function.
        """
        return PredictionSets(torch.cat([self._members(*each) for each in self.predict_with_limits(x, groups)]))

    def _members(self, predictive: LabelPredictive, limits: Tensor) -> Tensor:
        probs = predictive.class_probs
        scores = class_scores(self.score, probs, row_shares(probs, self.seed))
        return scores <= limits.to(scores)

    def coverage(
        self, data: Iterable[object], *, groups: Any = None, target_key: str | None = None, progress: bool | None = None
    ) -> Coverage:
        """Return how often the sets hold the label on other data with targets, and their mean size.

        ``groups`` are the group numbers (N,) of the data in their order, if the calibration was given numbers and no
        function.
        """

        def inside(predictive: LabelPredictive, batch: LabelledBatch, limits: Tensor) -> Tensor:
            members = self._members(predictive, limits)
            return torch.cat([members.gather(1, safe_labels(batch, members)), members.sum(1, keepdim=True)], 1)

        return self.measure_coverage(data, groups, inside, {"target_key": target_key, "progress": progress})

    def __repr__(self) -> str:
        return f"<ConformalSets: level {self.level:g}, {self.score}, {self.count} calibration data>"


@dataclass(frozen=True, eq=False)
class ConformalIntervals(Calibrated):
    """Intervals that hold each number with probability ``level``; see ``Fitted.conformal`` for the guarantee.

    Args:
        posterior: What predicts.
        level: The guaranteed probability.
        score: "scaled" or "constant".
        quantiles: Half the width of each output, (C,), over its standard deviation for "scaled", by group.
        count: The number of calibration data.
        groups: The function or numbers that were given, or None.
    """

    def predict(self, x: Inputs, *, groups: Any = None) -> tuple[Tensor, Tensor]:
        """Return (low, high), each (B, C), at a batch of inputs or at those of a loader.

        Args:
            x: As for ``Fitted.predict``.
            groups: The group number of each input, (B,), if the calibration was given numbers and no function.
        """
        ends = [self._ends(*each) for each in self.predict_with_limits(x, groups)]
        return torch.cat([low for low, _ in ends]), torch.cat([high for _, high in ends])

    def _ends(self, predictive: NumberPredictive, limits: Tensor) -> tuple[Tensor, Tensor]:
        mean = predictive.mean
        half = limits.to(mean) * number_scale(self.score, predictive)
        return mean - half, mean + half

    def coverage(
        self, data: Iterable[object], *, groups: Any = None, target_key: str | None = None, progress: bool | None = None
    ) -> Coverage:
        """Return how often the intervals hold the target on other data, over all outputs, and their mean width.

        ``groups`` are the group numbers (N,) of the data in their order, if the calibration was given numbers and no
        function.
        """

        def inside(predictive: NumberPredictive, batch: LabelledBatch, limits: Tensor) -> Tensor:
            low, high = self._ends(predictive, limits)
            y = batch.targets.to(low).reshape(low.shape)
            return torch.stack([((low <= y) & (y <= high)).double().mean(1), (high - low).double().mean(1)], 1)

        return self.measure_coverage(data, groups, inside, {"target_key": target_key, "progress": progress})

    def __repr__(self) -> str:
        return f"<ConformalIntervals: level {self.level:g}, {self.score}, {self.count} calibration data>"


def conformal_of(
    posterior: Fitted, calibration: Iterable[object], level: float, *, score: str | None, groups: Any,
    target_key: str | None, progress: bool | None, seed: int,
) -> ConformalSets | ConformalIntervals:  # fmt: skip
    """Return calibrated sets or intervals; see ``Fitted.conformal``."""
    PROBABILITY.check("level", level)
    integer(0).check("seed", seed)

    def number(predictive: Any, batch: LabelledBatch, members: GroupNumbers) -> Tensor:
        chosen = _fitting_score(predictive, score)
        if chosen in ("adaptive", "threshold"):
            probs = predictive.class_probs
            each = class_scores(chosen, probs, row_shares(probs, seed)).double()
            return each.gather(1, safe_labels(batch, each))
        mean = predictive.mean
        error = batch.targets.to(mean).reshape(mean.shape) - mean
        residuals.append(torch.stack([mean, error]).double().cpu())
        return (error.abs() / number_scale(chosen, predictive)).double()

    residuals: list[Tensor] = []
    rows, numbers, scoring = grouped_rows(
        posterior, calibration, number, groups, target_key=target_key, progress=progress
    )
    chosen = scoring.conformal[0] if score is None else score
    parts: dict[int | None, Tensor] = {None: rows}
    if numbers is not None:
        parts = {int(group): rows[numbers == group] for group in numbers.unique()}
    quantiles = {group: conformal_quantile(part, level, group) for group, part in parts.items()}
    if chosen in ("adaptive", "threshold"):
        return ConformalSets(posterior, level, chosen, quantiles, len(rows), groups, seed)
    mean, error = torch.cat(residuals, 1)
    warn_of_units(posterior, mean, error, "calibration")
    return ConformalIntervals(posterior, level, chosen, quantiles, len(rows), groups)


def _fitting_score(predictive: Predictive, score: str | None) -> str:
    """Return the score; raise if it does not fit the predictive."""
    fitting = predictive.scoring.conformal
    if score is None:
        return str(fitting[0])
    one_of(fitting).check("score", score)
    return score


def safe_labels(batch: LabelledBatch, like: Tensor) -> Tensor:
    """Return the labels of a batch as columns (B, 1), on the device of a tensor; zero for those that are ignored."""
    safe = batch.targets.masked_fill(~batch.known, 0)
    return safe.reshape(len(safe), 1).long().to(like.device)


def conformal_quantile(scores: Tensor, level: float, group: int | None = None) -> Tensor:
    """Return the ⌈(n + 1) level⌉-th smallest of n scores, for each column of (n, C), (C,).

    Raises:
        DataError: If there are too few scores.

    >>> conformal_quantile(torch.arange(1.0, 20.0).unsqueeze(1), 0.9)
    tensor([18.])
    """
    rank = conformal_rank(len(scores), level)
    if rank > len(scores):
        exact = Fraction(repr(float(level)))
        where = "" if group is None else f" in group {group}"
        raise DataError(
            f"{len(scores)} calibration data{where}; expected at least {math.ceil(exact / (1 - exact))} for the level "
            f"{level:g}, since the set of a higher level than n/(n + 1) is everything. Give more, or a lower level."
        )
    return scores.sort(0).values[rank - 1]


def conformal_rank(count: int, level: float) -> int:
    """Return ⌈(n + 1) level⌉, computed with the decimal digits of the level, so that 0.9 · 20 is 18 and not above."""
    return math.ceil((count + 1) * Fraction(repr(float(level))))


def class_scores(score: str, probs: Tensor, shares: Tensor) -> Tensor:
    """Return the score of every class, (B, C): the larger, the stranger it would be as a label.

    ``shares`` (B, 1) are uniform numbers between 0 and 1, for "adaptive".
    """
    if score == "threshold":
        return 1 - probs
    probs = probs.double()
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = (ordered.cumsum(-1) - ordered).clamp_min(0)
    return torch.zeros_like(probs).scatter_(-1, order, before + shares.to(probs) * ordered)


def row_shares(probs: Tensor, seed: int) -> Tensor:
    """Return a number between 0 and 1 for each row of probabilities (B, C), (B, 1), as if drawn uniformly.

    It is a hash of the row, so an input has the same share whichever batch it comes in, and scores are a fixed function
    of input and label: the guarantee does not depend on how often and with how many rows predictions are asked for.
    Log-probabilities are rounded, so that the last digits of a processor rarely matter.
    """
    rounded = probs.detach().double().clamp_min(1e-300).log().mul(64).round().long()
    factors = torch.randint(-(2**62), 2**62, (probs.shape[1],), generator=torch.Generator().manual_seed(seed))
    mixed = (rounded * (2 * factors.to(rounded.device) + 1)).sum(1)  # overflow wraps around
    for factor in (-49064778989728563, -4265267296055464877):  # Stafford's mix of 64 bits
        mixed = (mixed ^ ((mixed >> 33) & 0x7FFFFFFF)) * factor
    high = (mixed ^ ((mixed >> 33) & 0x7FFFFFFF)) >> 11 & (2**53 - 1)
    return (high.double() / 2**53).unsqueeze(1)


def number_scale(score: str, predictive: NumberPredictive) -> Tensor:
    """Return what errors are divided by, in the shape of the mean."""
    return predictive.std if score == "scaled" else torch.ones_like(predictive.mean)
