"""Split conformal prediction: sets of classes and intervals of numbers with a guaranteed coverage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.core.inputs import Inputs
from lapwing.core.settings import PROBABILITY, Rule, integer, one_of
from lapwing.decisions.collecting import Labelled, rows_of
from lapwing.errors import DataError, UnsupportedError

GROUPS = Rule(
    "a function from a batch of inputs to group numbers (B,), or the group numbers (N,) of the calibration data",
    lambda v: v is None or callable(v) or torch.as_tensor(v).ndim == 1,
    DataError,
)


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


class Calibrated(Protocol):
    """What sets and intervals share: quantiles of the scores, one for each group."""

    posterior: Any
    level: float
    score: str
    quantiles: Mapping[int | None, Tensor]  # by group; under None without groups
    count: int
    groups: Any

    def limits(self, x: Inputs, count: int, groups: Any) -> Tensor:
        """Return the largest score that is let in for each input, (B, 1) or (B, C)."""
        if self.groups is None:
            if groups is not None:
                raise UnsupportedError("groups were given and the calibration had none; calibrate with groups=...")
            return self.quantiles[None].expand(count, -1)
        given = groups if groups is not None else self.groups(x) if callable(self.groups) else None
        if given is None:
            raise DataError("groups is None; expected the group number of each input, since the calibration had those.")
        return torch.stack([self._of_group(group) for group in group_numbers(given, count)])

    def _of_group(self, group: int) -> Tensor:
        if group not in self.quantiles:
            known = ", ".join(map(str, sorted(k for k in self.quantiles if k is not None)))
            raise DataError(f"an input is of group {group}, which no calibration datum has; expected one of {known}.")
        return self.quantiles[group]

    def covered(self, data: Iterable[Any], inside: Callable[[Any, Labelled], Tensor], keys: dict[str, Any]) -> Coverage:
        """Return the coverage, from ``inside``: whether each target is in, and the sizes, (B, 2)."""
        groups: list[int] = []

        def number(predictive: Any, batch: Labelled) -> Tensor:
            if callable(self.groups):
                groups.extend(group_numbers(self.groups(batch.inputs), len(batch.targets)))
            return inside(predictive, batch).double()

        rows, _ = rows_of(self.posterior, data, number, name="data", **keys)
        share, number_of = float(rows[:, 0].mean()), len(rows)
        by_group = {}
        if len(groups) == number_of:
            numbers = torch.tensor(groups)
            by_group = {int(g): float(rows[numbers == g, 0].mean()) for g in numbers.unique()}
        error = math.sqrt(share * (1 - share) / number_of)
        return Coverage(share, error, float(rows[:, 1].mean()), number_of, by_group)


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

    posterior: Any
    level: float
    score: str
    quantiles: Mapping[int | None, Tensor]
    count: int
    groups: Any = None
    seed: int = 0

    def predict(self, x: Inputs, *, groups: Any = None) -> PredictionSets:
        """Return the sets at a batch of inputs or at those of a loader.

        Args:
            x: As for ``Fitted.predict``.
            groups: The group number of each input, (B,), if the calibration was given numbers and no function.
        """
        return self._sets(self.posterior.predict(x), x, groups)

    def _sets(self, predictive: Any, x: Inputs, groups: Any) -> PredictionSets:
        probs = predictive.class_probs
        scores = class_scores(self.score, probs, row_shares(probs, self.seed))
        return PredictionSets(scores <= self.limits(x, len(probs), groups).to(scores))

    def coverage(self, data: Iterable[Any], *, target_key: str | None = None, progress: bool | None = None) -> Coverage:
        """Return how often the sets hold the label on other data with targets, and their mean size."""

        def inside(predictive: Any, batch: Labelled) -> Tensor:
            sets = self._sets(predictive, batch.inputs, None)
            y = batch.targets.reshape(len(sets.members), 1).long().clamp_min(0).to(sets.members.device)
            return torch.cat([sets.members.gather(1, y), sets.size.unsqueeze(1)], 1)

        return self.covered(data, inside, {"target_key": target_key, "progress": progress})

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

    posterior: Any
    level: float
    score: str
    quantiles: Mapping[int | None, Tensor]
    count: int
    groups: Any = None

    def predict(self, x: Inputs, *, groups: Any = None) -> tuple[Tensor, Tensor]:
        """Return (low, high), each (B, C), at a batch of inputs or at those of a loader.

        Args:
            x: As for ``Fitted.predict``.
            groups: The group number of each input, (B,), if the calibration was given numbers and no function.
        """
        return self._ends(self.posterior.predict(x), x, groups)

    def _ends(self, predictive: Any, x: Inputs, groups: Any) -> tuple[Tensor, Tensor]:
        mean = predictive.mean
        half = self.limits(x, len(mean), groups).to(mean) * number_scale(self.score, predictive)
        return mean - half, mean + half

    def coverage(self, data: Iterable[Any], *, target_key: str | None = None, progress: bool | None = None) -> Coverage:
        """Return how often the intervals hold the target on other data, over all outputs, and their mean width."""

        def inside(predictive: Any, batch: Labelled) -> Tensor:
            low, high = self._ends(predictive, batch.inputs, None)
            y = batch.targets.to(low).reshape(low.shape)
            return torch.stack([((low <= y) & (y <= high)).double().mean(1), (high - low).double().mean(1)], 1)

        return self.covered(data, inside, {"target_key": target_key, "progress": progress})

    def __repr__(self) -> str:
        return f"<ConformalIntervals: level {self.level:g}, {self.score}, {self.count} calibration data>"


def conformal_of(
    posterior: Any, calibration: Iterable[Any], level: float, *, score: str | None, groups: Any,
    target_key: str | None, progress: bool | None, seed: int,
) -> ConformalSets | ConformalIntervals:  # fmt: skip
    """Return calibrated sets or intervals; see ``Decides.conformal``."""
    PROBABILITY.check("level", level)
    integer(0).check("seed", seed)
    GROUPS.check("groups", groups)
    members: list[Tensor] = []

    def number(predictive: Any, batch: Labelled) -> Tensor:
        chosen = _chosen(predictive, score)
        if callable(groups):
            members.append(torch.tensor(group_numbers(groups(batch.inputs), len(batch.targets)), dtype=torch.float64))
        if chosen in ("adaptive", "threshold"):
            probs = predictive.class_probs
            each = class_scores(chosen, probs, row_shares(probs, seed)).double()
            y = batch.targets.reshape(len(each), 1).long().masked_fill(~batch.known.reshape(len(each), 1), 0)
            rows = each.gather(1, y.to(each.device))
        else:
            y = batch.targets.to(predictive.mean).reshape(predictive.mean.shape)
            rows = ((y - predictive.mean).abs() / number_scale(chosen, predictive)).double()
        return torch.cat([rows.cpu(), members[-1].unsqueeze(1)], 1) if callable(groups) else rows

    rows, scoring = rows_of(posterior, calibration, number, target_key=target_key, progress=progress)
    chosen = scoring.conformal[0] if score is None else score
    parts = _parts(rows, groups)
    quantiles = {group: conformal_quantile(part, level, group) for group, part in parts.items()}
    if chosen in ("adaptive", "threshold"):
        return ConformalSets(posterior, level, chosen, quantiles, len(rows), groups, seed)
    return ConformalIntervals(posterior, level, chosen, quantiles, len(rows), groups)


def _chosen(predictive: Any, score: str | None) -> str:
    """Return the score; raise if it does not fit the predictive."""
    fitting = predictive.scoring.conformal
    if score is None:
        return str(fitting[0])
    one_of(fitting).check("score", score)
    return score


def _parts(rows: Tensor, groups: Any) -> dict[int | None, Tensor]:
    """Return the scores of each group, or of all under None."""
    if groups is None:
        return {None: rows}
    if callable(groups):
        rows, numbers = rows[:, :-1], rows[:, -1].long()
    else:
        numbers = torch.tensor(group_numbers(groups, len(rows)))
    return {int(group): rows[numbers == group] for group in numbers.unique()}


def group_numbers(given: Any, count: int) -> list[int]:
    """Return group numbers as a list; raise unless they are ``count`` whole numbers."""
    numbers = torch.as_tensor(given)
    if numbers.shape != (count,) or numbers.is_floating_point() or numbers.is_complex():
        raise DataError(
            f"groups have the shape {tuple(numbers.shape)} and dtype {numbers.dtype}; expected ({count},) whole "
            "numbers, the group of each input."
        )
    listed: list[int] = numbers.tolist()
    return [int(number) for number in listed]


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


def number_scale(score: str, predictive: Any) -> Tensor:
    """Return what errors are divided by, in the shape of the mean."""
    scale: Tensor = predictive.std if score == "scaled" else torch.ones_like(predictive.mean)
    return scale
