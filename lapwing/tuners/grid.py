"""The prior precision by trying a list of values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lapwing.core.data import Data
from lapwing.core.trace import Trace
from lapwing.errors import UnsupportedError
from lapwing.posteriors.protocols import HasEvidence
from lapwing.tuners.held_out import (
    Metric,
    best_of,
    held_out_scores,
    nll,
    require_metric,
    require_positive_values,
    with_precisions,
    without_cache,
)

PRECISIONS = tuple(10.0 ** (k / 2) for k in range(-8, 13))  # 1e-4 to 1e6


@dataclass(frozen=True, eq=False)
class Grid:
    """A tuner that takes the best of several precisions, by a metric on held-out data or by the evidence.

    Every value is tried for all weights at once; a prior with groups keeps the ratios between them.

    Cost: one pass over the held-out data, whose Jacobians serve all values; then a factorisation and a product for
    each value. If the factorisations of all values take more than 512 MiB (4 GiB on a GPU), the values are tried in
    groups that fit, with one more pass over the data for each group.

    Args:
        data: Held-out data in the form that ``fit`` takes, or None to compare the values by the evidence.
        precisions: The values to try; by default 21 values from 1e-4 to 1e6.
        metric: A function of (predictive, targets) that returns the mean over the batch; lower is better. By default
            the negative log-likelihood. Not used without data.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, the posterior has no precision to change.
        DataError: When called, if a score is not finite, or the data differ between passes.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    >>> tuned = posterior.tuned(lw.tuners.Grid([(x + 0.01, x.sin())], precisions=(0.1, 1.0, 10.0)))
    >>> len(tuned.trace.steps)
    3
    """

    data: Iterable[Any] | Data | None = None
    precisions: Sequence[float] = PRECISIONS
    metric: Metric = nll

    def __post_init__(self) -> None:
        require_positive_values("precisions", self.precisions)
        require_metric(self.metric)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior under the best precision."""
        candidates = with_precisions(posterior, self.precisions)
        if self.data is not None:
            scores = held_out_scores(candidates, self.data, self.metric).mean(0)
            return best_of(candidates, scores, int(scores.argmin()), Trace("Grid", "held-out metric"))
        if not isinstance(posterior, HasEvidence):
            raise UnsupportedError(f"{type(posterior).__name__} has no evidence; give held-out data: Grid(data).")
        with torch.no_grad():
            evidences = torch.stack([without_cache(candidate).log_evidence() for candidate in candidates])
        return best_of(candidates, evidences, int(evidences.argmax()), Trace("Grid", "log evidence"))
