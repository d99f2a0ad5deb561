"""The prior precision by folds of held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lapwing.core.data import Data
from lapwing.core.settings import require_flag, require_integer
from lapwing.core.trace import Trace
from lapwing.errors import DataError
from lapwing.tuners.grid import PRECISIONS
from lapwing.tuners.held_out import (
    Metric,
    best_of,
    held_out_scores,
    nll,
    require_metric,
    require_positive_values,
    with_precisions,
)


@dataclass(frozen=True, eq=False)
class CrossValidated:
    """A tuner that takes the precision with the best mean of a metric over folds of held-out data.

    The network was trained on none of these data, so each fold scores it fairly.

    Cost: that of ``Grid``.

    Args:
        data: Held-out data in the form that ``fit`` takes.
        precisions: The values to try; by default 21 values from 1e-4 to 1e6.
        metric: A function of (predictive, targets) that returns the mean over the batch; lower is better.
        folds: The number of folds; datum i is in fold i mod ``folds``.
        one_error: Whether to take the largest precision (the narrowest error bars) whose mean is within one standard
            error of the best, the usual guard against noise in a small held-out set.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, the posterior has no precision to change.
        DataError: When called, if the data fill fewer than two folds, or a score is not finite.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    >>> tuned = posterior.tuned(lw.tuners.CrossValidated([(x + 0.01, x.sin())], precisions=(0.1, 1.0, 10.0), folds=4))
    >>> "over 4 folds" in tuned.trace.findings[0]
    True
    """

    data: Iterable[Any] | Data
    precisions: Sequence[float] = PRECISIONS
    metric: Metric = nll
    folds: int = 5
    one_error: bool = False

    def __post_init__(self) -> None:
        require_positive_values("precisions", self.precisions)
        require_metric(self.metric)
        require_integer("folds", self.folds, least=2)
        require_flag("one_error", self.one_error)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior under the best precision."""
        candidates = with_precisions(posterior, self.precisions)
        scores = held_out_scores(candidates, self.data, self.metric, self.folds)
        if len(scores) < 2:
            raise DataError(f"the held-out data give {len(scores)} fold; expected at least 2 data, one for each.")
        means, errors = scores.mean(0), scores.std(0) / math.sqrt(len(scores))
        best = int(means.argmin())
        finding = (
            f"precision {self.precisions[best]:.3g} has the best mean, {float(means[best]):.4g} ± "
            f"{float(errors[best]):.2g} over {len(scores)} folds"
        )
        if self.one_error:
            allowed = [i for i in range(len(candidates)) if means[i] <= means[best] + errors[best]]
            best = max(allowed, key=lambda i: self.precisions[i], default=best)
        trace = Trace("CrossValidated", "mean held-out metric", findings=(finding,))
        return best_of(candidates, means, best, trace)
