"""Inputs unlike the calibration data: scores, conformal p-values, and flags with a bounded rate of false alarms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.data.known_rows import Sketching
from lapwing.decisions.collecting import input_batches, one_or_loader, refuse_reused, refuse_tokens
from lapwing.errors import DataError, UnsupportedError
from lapwing.runtime.settings import PROBABILITY, one_of

SCORES = ("entropy", "mutual_information", "variance")  # under the whole posterior
BASE = "base_information"  # the mutual information under the posterior that a mixture varies
SCALED = "scaled_information"  # the same times the standard deviation of its outputs
KNOWN = (*SCORES, BASE, SCALED)


@dataclass(frozen=True, eq=False)
class Detector:
    """A detector of strange inputs; see ``Fitted.ood`` for the guarantee.

    Args:
        posterior: What predicts.
        by: The score.
        rate: The largest probability of a false alarm.
        scores: Those of the calibration data in ascending order, (n,) in float64.
    """

    posterior: Any
    by: str
    rate: float
    scores: Tensor

    @property
    def threshold(self) -> float:
        """The calibration score above which inputs are flagged."""
        return float(self.scores[len(self.scores) - flagged_ranks(len(self.scores), self.rate)])

    def score(self, x: Inputs, *, target_key: str | None = None, progress: bool | None = None) -> Tensor:
        """Return the score of every input of a batch or a loader, (B,) in float64 on the CPU; higher is stranger."""
        return scores_of(self.posterior, x, self.by, target_key, progress)

    def p_values(self, x: Inputs, *, target_key: str | None = None, progress: bool | None = None) -> Tensor:
        """Return the conformal p-value of every input, (B,): (1 + calibration scores that reach its own) / (n + 1)."""
        score = self.score(x, target_key=target_key, progress=progress)
        below = torch.searchsorted(self.scores, score)  # strictly smaller ones
        return (1 + len(self.scores) - below).double() / (len(self.scores) + 1)

    def flags(self, x: Inputs, *, target_key: str | None = None, progress: bool | None = None) -> Tensor:
        """Return whether every input is flagged, (B,): whether its score is above ``threshold``."""
        return self.score(x, target_key=target_key, progress=progress) > self.threshold

    def __repr__(self) -> str:
        return f"<Detector: {self.by} above {self.threshold:.4g}, false alarms at most {self.rate:g}>"


def detector_of(
    posterior: Any, calibration: Iterable[Any], *, by: str | None, rate: float, target_key: str | None,
    progress: bool | None,
) -> Detector:  # fmt: skip
    """Return a detector; see ``Fitted.ood``."""
    PROBABILITY.check("rate", rate)
    chosen = default_score(posterior) if by is None else by
    one_of(KNOWN).check("by", chosen)
    given = one_or_loader(posterior.network, calibration)
    sketching = Sketching()
    scores = scores_of(posterior, given, chosen, target_key, progress, sketching).sort().values
    refuse_reused(posterior, sketching.value(), "calibration inputs", of_inputs=True)
    if not flagged_ranks(len(scores), rate):
        raise DataError(
            f"{len(scores)} calibration data; expected at least {fewest(rate)} for "
            f"false alarms at a rate of {rate:g}: with fewer, no input could be flagged. Give more, or a higher rate."
        )
    if bool(scores[0] == scores[-1]) and not posterior.base.has_spread:
        raise UnsupportedError(
            f"the posterior has no error bars from its weights, so that {chosen!r} is {float(scores[0]):.3g} for every "
            "calibration input; expected a posterior that doubts some inputs more than others. Fit one by another "
            "method than MapOnly()."
        )
    return Detector(posterior, chosen, rate, scores)


def default_score(posterior: Any) -> str:
    """Return the score that finds strange inputs best for this kind of posterior, as measured in the documentation.

    A mixture that trusts the plain network is nearly certain everywhere, so that labels take the information of its
    base. Far from all data this stops growing, since margins grow as the standard deviation does; its factor keeps far
    inputs apart. A posterior without spread has nothing but its entropy.
    """
    if not posterior.base.has_spread:
        return "entropy"
    return SCALED if posterior.likelihood.has_logits else "variance"


def flagged_ranks(count: int, rate: float) -> int:
    """Return the largest k with k / (count + 1) ≤ rate: the p-values of flagged inputs are 1/(n + 1) ... k/(n + 1).

    Quotients are rounded as those of ``p_values`` are, so that ``flags`` is ``p_values <= rate``.

    >>> flagged_ranks(19, 0.05), flagged_ranks(18, 0.05), flagged_ranks(2, 1 / 3)
    (1, 0, 1)
    """
    k = math.floor((count + 1) * rate) + 1  # at most two too high by rounding
    while k / (count + 1) > rate:
        k -= 1
    return k


def fewest(rate: float) -> int:
    """Return with how many calibration data an input can be flagged.

    >>> fewest(0.05), fewest(1 / 3)
    (19, 2)
    """
    count = max(0, math.ceil(1 / rate) - 2)
    while not flagged_ranks(count, rate):
        count += 1
    return count


def scores_of(
    posterior: Any, x: Inputs, by: str, target_key: str | None, progress: bool | None,
    sketching: Sketching | None = None,
) -> Tensor:  # fmt: skip
    """Return the score of every input of a batch or a loader, (B,) in float64 on the CPU; add them to a sketch."""
    refuse_tokens(posterior.network, "ood")
    posterior._unchanged()
    parts = []
    with torch.no_grad():
        for batch in input_batches(posterior, x, target_key, progress):
            parts.append(_scores(posterior, batch, by))
            if sketching is not None:
                sketching.add(batch, None, len(parts[-1]))
    return torch.cat(parts)


def _scores(posterior: Any, batch: Inputs, by: str) -> Tensor:
    """Return the scores of one batch, (B,)."""
    if by == "variance":
        variance: Tensor = posterior.posterior(batch).variance.double().sum(-1)
        return variance.cpu()
    predictive = (posterior.base if by in (BASE, SCALED) else posterior.posterior).predict(batch)
    if by == SCALED:
        doubt: Tensor = posterior.base(batch).variance.double().sum(-1).sqrt()
        return (doubt * predictive.mutual_information.double()).cpu()
    value: Tensor = predictive.entropy if by == "entropy" else predictive.mutual_information
    return value.double().cpu()
