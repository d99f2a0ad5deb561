"""Tuners that try a list of values: precisions or temperatures, by held-out data or by the evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.settings import require_flag, require_integer
from lapwing.core.trace import Step, Trace
from lapwing.errors import DataError, UnsupportedError
from lapwing.posteriors.protocols import HasEvidence, Linearised
from lapwing.problem import Problem
from lapwing.tuners.held_out import Metric, held_out_scores, nll

PRECISIONS = tuple(10.0 ** (k / 2) for k in range(-8, 13))  # 1e-4 to 1e6
TEMPERATURES = tuple(10.0 ** (k / 8) for k in range(-24, 17))  # 1e-3 to 1e2


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
        _check_settings("precisions", self.precisions, self.metric)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior under the best precision."""
        candidates = _with_precisions(posterior, self.precisions)
        if self.data is not None:
            scores = held_out_scores(candidates, self.data, self.metric).mean(0)
            return _best_of(candidates, scores, int(scores.argmin()), Trace("Grid", "held-out metric"))
        if not isinstance(posterior, HasEvidence):
            raise UnsupportedError(f"{type(posterior).__name__} has no evidence; give held-out data: Grid(data).")
        with torch.no_grad():  # of copies, whose cached factorisations are freed with them
            evidences = torch.stack([replace(candidate).log_evidence() for candidate in candidates])
        return _best_of(candidates, evidences, int(evidences.argmax()), Trace("Grid", "log evidence"))


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

    >>> import lapwing as lw
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
        _check_settings("precisions", self.precisions, self.metric)
        require_integer("folds", self.folds, least=2)
        require_flag("one_error", self.one_error)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior under the best precision."""
        candidates = _with_precisions(posterior, self.precisions)
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
        return _best_of(candidates, means, best, trace)


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

    >>> import lapwing as lw
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
        _check_settings("temperatures", self.temperatures, self.metric)

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior under the best temperature."""
        problem = _problem(posterior)
        likelihood, phi = problem.likelihood, problem.likelihood.dispersion.detach()
        try:
            likelihood.with_dispersion(2 * phi)
        except DataError as error:
            raise UnsupportedError(f"{type(likelihood).__name__} has no temperature to choose: {error}") from error
        tempered = [problem.with_likelihood(likelihood.with_dispersion(phi * t)) for t in self.temperatures]
        candidates = [posterior.with_problem(each) for each in tempered]
        scores = held_out_scores(candidates, self.data, self.metric).mean(0)
        best = int(scores.argmin())
        finding = f"temperature {self.temperatures[best]:.3g}"
        return _best_of(candidates, scores, best, Trace("Temperature", "held-out metric", findings=(finding,)))


def _check_settings(name: str, values: Any, metric: Any) -> None:
    """Raise unless the values are a non-empty sequence of positive, finite numbers and the metric can be called."""
    try:
        good = len(values) > 0 and all(math.isfinite(v) and v > 0 for v in values)
    except TypeError:
        good = False
    if not good:
        raise UnsupportedError(f"{name} is {values!r:.80}; expected a list of positive, finite numbers.")
    if not callable(metric):
        raise UnsupportedError(f"metric is {metric!r:.80}; expected a function of (predictive, targets).")


def _problem(posterior: Any) -> Problem:
    """Return the problem of the posterior; raise if its prior and noise cannot change without the data."""
    if not isinstance(posterior, Linearised):
        raise UnsupportedError(f"{type(posterior).__name__} has no precision to change; use a method that has one.")
    problem: Problem = posterior.problem
    return problem


def _with_precisions(posterior: Any, precisions: Sequence[float]) -> list[Any]:
    """Return the posterior under each precision; a prior with groups keeps the ratios between them."""
    problem = _problem(posterior)
    values = problem.prior.values.detach()
    ratios = values / values.log().mean().exp()
    return [posterior.with_problem(problem.with_prior(problem.prior.with_precision(ratios * p))) for p in precisions]


def _best_of(candidates: Sequence[Any], scores: Tensor, best: int, trace: Trace) -> Any:
    """Return candidate number ``best``, with ``trace`` completed by the candidates and their scores."""
    n_bad = int((~torch.isfinite(scores)).sum())
    if n_bad:
        raise DataError(f"{trace.tuner}: {n_bad} of {len(scores)} scores are not finite.")
    findings = trace.findings
    if best in (0, len(candidates) - 1) and len(candidates) > 2:
        findings = (*findings, "the best value is at the edge of those tried: try further out")
    steps = []
    for problem, score in zip((candidate.problem for candidate in candidates), scores.tolist(), strict=True):
        precisions = tuple(problem.prior.values.detach().reshape(-1).tolist())
        steps.append(Step(score, precisions, (float(problem.likelihood.dispersion),)))
    return candidates[best].with_trace(replace(trace, steps=tuple(steps), findings=findings))
