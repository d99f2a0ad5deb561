"""The temperature of a tempered posterior by held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lapwing.core.data import Data
from lapwing.core.trace import Trace
from lapwing.errors import DataError, UnsupportedError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.tuners.held_out import (
    Metric,
    best_of,
    held_out_scores,
    nll,
    refuse_not_linearised,
    require_metric,
    require_positive_values,
)

TEMPERATURES = tuple(10.0 ** (k / 8) for k in range(-24, 17))  # 1e-3 to 1e2


@dataclass(frozen=True, eq=False)
class Temperature:
    """A tuner that takes the temperature φ of a tempered posterior, Λ = H/φ + A, with the best held-out metric.

    Below one the data count more than once (a cold posterior), above one less. For a Gaussian likelihood φ is the
    noise variance, and the values are multiples of the present one.

    Cost: that of ``Grid``.

    Args:
        data: Held-out data in the form that ``fit`` takes.
        temperatures: The values to try; by default 41 values from 1e-3 to 1e2.
        metric: A function of (predictive, targets) that returns the mean over the batch; lower is better.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, the likelihood has no dispersion to change or
            the posterior no curvature.
        DataError: When called, if a score is not finite, or the data differ between passes.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    >>> tuned = posterior.tuned(lw.tuners.Temperature([(x + 0.01, x.sin())], temperatures=(0.5, 1.0, 2.0)))
    >>> tuned.trace.findings[0].startswith("temperature")
    True
    """

    data: Iterable[Any] | Data
    temperatures: Sequence[float] = TEMPERATURES
    metric: Metric = nll

    def __post_init__(self) -> None:
        require_positive_values("temperatures", self.temperatures)
        require_metric(self.metric)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior under the best temperature."""
        refuse_not_linearised(posterior)
        problem = posterior.problem
        _refuse_fixed(problem.likelihood)
        phi = problem.likelihood.dispersion.detach()
        candidates = [
            posterior.with_problem(problem.with_likelihood(problem.likelihood.with_dispersion(phi * t)))
            for t in self.temperatures
        ]
        scores = held_out_scores(candidates, self.data, self.metric).mean(0)
        best = int(scores.argmin())
        finding = f"temperature {self.temperatures[best]:.3g}"
        return best_of(candidates, scores, best, Trace("Temperature", "held-out metric", findings=(finding,)))


def _refuse_fixed(likelihood: Likelihood) -> None:
    """Raise if the likelihood has no dispersion that can change."""
    try:
        likelihood.with_dispersion(2 * likelihood.dispersion)
    except DataError as error:
        raise UnsupportedError(f"{type(likelihood).__name__} has no temperature to choose: {error}") from error
