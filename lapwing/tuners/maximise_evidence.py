"""Hyperparameters by the maximum of the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lapwing.core.settings import require_flag, require_integer, require_positive
from lapwing.core.trace import Step, Trace
from lapwing.tuners.search import Coordinates, minimise, raise_diverged, refuse_not_finite, refuse_runaway

LARGEST_SLOPE = 1e-3  # per weight; above it the search has not converged


@dataclass(frozen=True)
class MaximiseEvidence:
    """A tuner that maximises the log evidence over the prior's precisions and, if asked, the noise.

    In log-precisions the evidence is concave for a fixed noise, so L-BFGS finds its only optimum. ``posterior.trace``
    has every step.

    Cost: a log-determinant and its gradient for each of about ten steps; no pass over the data.

    Args:
        noise: Whether to learn the dispersion too (one for each output if the likelihood has one for each). This
            assumes that the trained weights are the optimum of the tangent model. By default the noise stays the
            mean squared residual.
        max_steps: The largest number of L-BFGS steps.
        tolerance: Stop when the slope is below this number times the number of weights.

    Raises:
        UnsupportedError: If a setting is out of range, or, when called, the posterior has no evidence.
        DivergedError: When called, if the evidence has no optimum or was not maximised in ``max_steps`` steps.

    >>> import torch, lapwing as lw
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> posterior = lw.fit(torch.nn.Linear(1, 1), [(x, x.sin())], "regression", prior=100.0)
    >>> tuned = posterior.tuned(lw.tuners.MaximiseEvidence(noise=True))
    >>> bool(tuned.log_evidence() > posterior.log_evidence())
    True
    """

    noise: bool = False
    max_steps: int = 60
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        require_flag("noise", self.noise)
        require_integer("max_steps", self.max_steps)
        require_positive("tolerance", self.tolerance)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior at the optimum of the evidence."""
        coordinates = Coordinates.of(posterior, self.noise)
        steps: list[Step] = []
        n_weights = max(coordinates.n_weights, 1)

        def objective(x: Tensor) -> Tensor:
            value: Tensor = coordinates.at(x).log_evidence()
            steps.append(coordinates.step(x, float(value.detach())))
            refuse_not_finite(coordinates, steps, "MaximiseEvidence")
            return -value / n_weights

        best, slope = minimise(objective, coordinates.start, self.max_steps, self.tolerance)
        refuse_runaway(coordinates, steps, "MaximiseEvidence")
        if slope > LARGEST_SLOPE:
            message = (
                f"{self.max_steps} steps left a slope of {slope:.3g} per weight in the log evidence; expected below "
                "1e-3. Raise MaximiseEvidence(max_steps=...) or give the prior."
            )
            raise_diverged(coordinates, steps, message, "MaximiseEvidence")
        return coordinates.finished(best, Trace("MaximiseEvidence", steps=tuple(steps)))
