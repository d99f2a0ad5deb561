"""Tuners that try a list of values: precisions or temperatures, by held-out data or by the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs
from lapwing.errors import DataError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.networks.jacobians import temporary
from lapwing.posteriors.base import Kept, Posterior, drawn_beliefs, pieces
from lapwing.problem import Problem, sample_count
from lapwing.runtime.settings import DATA, FLAG, POSITIVE_VALUES, HasSettings, Rule, integer, required, setting
from lapwing.runtime.trace import Step, Trace
from lapwing.tuners.mixing import drawn_numbers
from lapwing.values.functions import FunctionSamples
from lapwing.values.gaussian import FunctionGaussian

Metric = Callable[[Any, Tensor], Tensor | float]  # (predictive, targets) -> lower is better; a mean over the batch
METRIC = Rule(
    "a function of (predictive, targets)", lambda v: callable(v) and not isinstance(v, type | torch.nn.Module)
)
EVIDENCE = "evidence"  # in the place of held-out data
KEPT = 2  # memory that candidates may keep between chunks, as a multiple of the budget for intermediate results
REPEATED = 1e-4  # relative difference of two passes over the same data: rounding in single precision
PRECISIONS = tuple(10.0 ** (k / 2) for k in range(-8, 13))  # 1e-4 to 1e6
TEMPERATURES = tuple(10.0 ** (k / 8) for k in range(-24, 17))  # 1e-3 to 1e2


def nll(predictive: Any, y: Tensor) -> Tensor:
    """Return the mean negative log-likelihood."""
    value: Tensor = -predictive.log_prob(y).mean()
    return value


@dataclass(frozen=True, eq=False)
class Grid(HasSettings):
    """A tuner that takes the best of several precisions, by a metric on held-out data or by the evidence.

    Every value is tried for all weights at once; a prior with groups keeps the ratios between them.

    Cost: one pass over the held-out data, whose Jacobians serve all values; then a factorisation and a product for
    each value. If the factorisations of all values take more than 512 MiB (4 GiB on a GPU), the values are tried in
    groups that fit, with one more pass over the data for each group.

    Args:
        data: Held-out data in the form that ``fit`` takes; "evidence", the default, compares the values by the
            evidence, without data.
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

    data: Iterable[Any] | Data = setting(EVIDENCE, DATA | Rule(repr(EVIDENCE), lambda v: v == EVIDENCE))
    precisions: Sequence[float] = setting(PRECISIONS, POSITIVE_VALUES)
    metric: Metric = setting(nll, METRIC)

    @property
    def holds_out(self) -> bool:
        """Whether there are held-out data."""
        return self.data != EVIDENCE

    def __call__(self, posterior: Any) -> Any:
        """Return the posterior under the best precision."""
        candidates = _with_precisions(posterior, self.precisions)
        if self.data != EVIDENCE:
            scores = held_out_scores(candidates, self.data, self.metric).mean(0)
            return _best_of(candidates, scores, int(scores.argmin()), Trace("Grid", "held-out metric"))
        if not posterior.provides(Posterior.log_evidence):
            raise UnsupportedError(f"{type(posterior).__name__} has no evidence; give held-out data: Grid(data).")
        with torch.no_grad():  # of copies, whose cached factorisations are freed with them
            evidences = torch.stack([replace(candidate).log_evidence() for candidate in candidates])
        return _best_of(candidates, evidences, int(evidences.argmax()), Trace("Grid", "log evidence"))


@dataclass(frozen=True, eq=False)
class CrossValidated(HasSettings):
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

    data: Iterable[Any] | Data = required(DATA)
    precisions: Sequence[float] = setting(PRECISIONS, POSITIVE_VALUES)
    metric: Metric = setting(nll, METRIC)
    folds: int = setting(5, integer(2))
    one_error: bool = setting(False, FLAG)

    holds_out: ClassVar[bool] = True

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
class Temperature(HasSettings):
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

    data: Iterable[Any] | Data = required(DATA)
    temperatures: Sequence[float] = setting(TEMPERATURES, POSITIVE_VALUES)
    metric: Metric = setting(nll, METRIC)

    holds_out: ClassVar[bool] = True

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


def _problem(posterior: Any) -> Problem:
    """Return the problem of the posterior; raise if its prior and noise cannot change without the data."""
    problem: Problem = posterior.problem
    if not posterior.linearised:
        raise UnsupportedError(f"{type(posterior).__name__} has no precision to change; use a method that has one.")
    return problem


def _with_precisions(posterior: Any, precisions: Sequence[float]) -> list[Any]:
    """Return the posterior under each precision; a prior with groups keeps the ratios between them."""
    problem = _problem(posterior)
    values = problem.prior.values.detach()
    ratios = values / values.log().mean().exp()
    return [posterior.with_problem(problem.with_precisions(ratios * p)) for p in precisions]


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


def held_out_scores(candidates: Sequence[Any], source: Iterable[Any] | Data, metric: Metric, folds: int = 1) -> Tensor:
    """Return the metric of each candidate on each fold, (folds, candidates); folds without data are left out.

    Datum i is in fold i mod ``folds``. The network is run and differentiated once for each chunk of the data, and
    every candidate computes its variances from the same Jacobian. Cost: one pass over the data for as many candidates
    as fit in memory together.
    """
    network = candidates[0].problem.network
    data = network.reading(source)
    passes: list[_Pass] = []
    n_scored = 0
    while n_scored < len(candidates):
        passes.append(_one_pass(candidates[n_scored:], data, metric, folds))
        _refuse_other_data(passes[0], passes[-1])
        n_scored += passes[-1].totals.shape[1]
    used = passes[0].counts > 0
    if not bool(used.any()):
        raise DataError("no held-out datum counts: every target is ignored; expected at least one.")
    return torch.cat([each.totals for each in passes], 1)[used] / passes[0].counts[used][:, None]


@dataclass(frozen=True, eq=False)
class _Pass:
    """Sums over the data of each fold: scores (folds, candidates), counts (folds,) and |f| (folds,)."""

    totals: Tensor
    counts: Tensor
    sizes: Tensor


def _one_pass(candidates: Sequence[Any], data: Data, metric: Metric, folds: int) -> _Pass:
    """Score as many of the first candidates as fit in memory together."""
    likelihoods = [candidate.problem.likelihood for candidate in candidates]
    totals = torch.zeros(folds, len(candidates), dtype=torch.float64)
    counts, sizes = (torch.zeros(folds, dtype=torch.float64) for _ in range(2))
    n_scored = len(candidates)
    position = _first_position(data) if folds > 1 else 0
    with torch.no_grad():
        for targets, beliefs in _beliefs(candidates, data):
            n_scored = len(beliefs)
            size = beliefs[0].mean.shape[0]
            fold = (torch.arange(size) + position) % folds
            position += size
            y = likelihoods[0].targets(beliefs[0].mean, targets)
            for k in range(folds):
                rows = _known_rows(likelihoods[0], y, (fold == k).nonzero()[:, 0].to(y.device))
                f = beliefs[0].mean[rows]
                count = f[..., 0].numel()
                if not count:
                    continue
                counts[k] += count
                sizes[k] += float(f.double().abs().sum())
                for i, (likelihood, belief) in enumerate(zip(likelihoods, beliefs, strict=False)):
                    totals[k, i] += count * _number(metric(_predicted(likelihood, belief, rows), y[rows]))
    n_scored = min(data.processes.gather_numbers(n_scored))
    return _Pass(*data.processes.sum([totals[:, :n_scored].contiguous(), counts, sizes]))


def _first_position(data: Data) -> int:
    """Return the number of data of the processes before this one, by a pass without the network if there are any."""
    if data.processes.is_single_process:
        return 0
    return data.processes.offset_and_total(sum(batch.n_samples for batch in data.batches("counting")))[0]


def _predicted(likelihood: Likelihood, belief: FunctionGaussian | FunctionSamples, rows: Any) -> Any:
    """Return the predictive of some of the data."""
    if isinstance(belief, FunctionSamples):
        return likelihood.predict_samples(belief.rows(rows))
    return likelihood.predict(FunctionGaussian(belief.mean[rows], belief.cov[rows]))


def _refuse_other_data(first: _Pass, again: _Pass) -> None:
    """Raise if two passes did not see the same data in the same folds."""
    same = torch.equal(first.counts, again.counts) and torch.allclose(first.sizes, again.sizes, rtol=REPEATED, atol=0)
    if not same:
        raise DataError(
            "a second pass over the held-out data gave other folds, and the candidates do not fit in memory at once; "
            "expected the same data in the same order. Use shuffle=False and no random augmentation, or try fewer "
            "values at a time."
        )


def _known_rows(likelihood: Likelihood, y: Tensor, rows: Tensor) -> Any:
    """Return an index of these rows, without the targets that the likelihood ignores."""
    ignored = likelihood.ignored(y[rows])
    if not bool(ignored.any()):
        return rows
    if y.is_floating_point():  # several labels for each datum, of which some are known
        raise DataError("some held-out labels are ignored ones, which no score can leave out; expected known ones.")
    known = torch.zeros_like(y, dtype=torch.bool)
    known[rows] = ~ignored
    return known.nonzero(as_tuple=True)


def _number(score: Tensor | float) -> float:
    """Return the score as a number, or raise if the metric returned several."""
    if isinstance(score, Tensor) and score.numel() != 1:
        raise DataError(f"the metric gave {tuple(score.shape)} numbers; expected one, the mean over the batch.")
    return float(score)


def _beliefs(
    candidates: Sequence[Any], data: Data
) -> Iterator[tuple[Tensor, Sequence[FunctionGaussian | FunctionSamples]]]:
    """Yield the targets of each chunk and the beliefs of the first candidates, as many as fit at the first chunk."""
    network = candidates[0].problem.network
    group = [replace(candidate) for candidate in candidates]  # copies, whose cached factorisations are freed with them
    for each in () if data.processes.is_single_process else group:
        each.prepare()  # not at the first batch: a process may have none
    limit: float = KEPT * temporary(network.device)
    for batch in data.batches("held-out data"):
        sample_count(network, batch)
        for rows, belief_of in _chunks(group, batch.inputs):
            beliefs = _beliefs_within(group, belief_of, limit)
            group, limit = group[: len(beliefs)], math.inf
            yield batch.targets[rows], beliefs


def _chunks(
    candidates: Sequence[Any], x: Inputs
) -> Iterator[tuple[slice, Callable[[Any], FunctionGaussian | FunctionSamples]]]:
    """Yield rows of a batch, and the function from a candidate to its belief about them.

    It takes the variances of the outputs from one Jacobian for all candidates, or draws functions where predictions do.
    """
    network, likelihood = candidates[0].problem.network, candidates[0].problem.likelihood
    numbers = drawn_numbers(candidates, candidates, likelihood, x)
    if numbers:
        drawn = lambda inputs, each: next(drawn_beliefs([each], inputs, numbers[:1], Kept()))
        for rows, part in pieces(network, x, sum(map(len, numbers))):
            yield rows, partial(drawn, part)
        return
    for rows, tangent in network.tangents(x):
        yield rows, partial(_gaussian, tangent.f.to(network.dtype), tangent.jacobians())


def _gaussian(f: Tensor, jacobians: Any, candidate: Any) -> FunctionGaussian:
    """Return the belief of a candidate about the outputs f, given their Jacobian."""
    covariance = candidate.covariance(jacobians)
    return FunctionGaussian(f, covariance if f.ndim == 3 else covariance.squeeze(1))


def _beliefs_within(
    candidates: Sequence[Any], belief_of: Callable[[Any], FunctionGaussian | FunctionSamples], limit: float
) -> list[FunctionGaussian | FunctionSamples]:
    """Return the beliefs of the first candidates, at least one, as many as cache at most ``limit`` bytes."""
    storages: dict[int, int] = {}
    _add_storages(candidates[0], storages)
    before = sum(storages.values())
    beliefs: list[FunctionGaussian | FunctionSamples] = []
    for candidate in candidates:
        beliefs.append(belief_of(candidate))
        _add_storages(candidate, storages)
        cached = sum(storages.values()) - before
        if cached + cached / len(beliefs) > limit:
            break
    return beliefs


def _add_storages(value: Any, storages: dict[int, int]) -> None:
    """Add the bytes of all tensors in the value, by their address, so that shared memory counts once."""
    if isinstance(value, Tensor):
        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    inside: Iterable[Any] = value if isinstance(value, tuple | list) else ()
    if isinstance(value, Mapping) or is_dataclass(value):
        inside = (value if isinstance(value, Mapping) else vars(value)).values()
    for each in inside:
        _add_storages(each, storages)
