"""Hyperparameters by held-out data: a grid of precisions, cross-validation, temperature."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Batch, Data
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.trace import Step, Trace
from lapwing.errors import DataError, UnsupportedError
from lapwing.likelihoods.protocol import IgnoresTargets
from lapwing.losses import paired
from lapwing.networks.budget import temporary
from lapwing.posteriors.protocols import HasEvidence, Linearised

Metric = Callable[[Any, Tensor], Tensor | float]  # (predictive, targets) -> lower is better; a mean over the batch
PRECISIONS = tuple(10.0 ** (k / 2) for k in range(-8, 13))  # 1e-4 to 1e6
TEMPERATURES = tuple(10.0 ** (k / 8) for k in range(-24, 17))  # 1e-3 to 1e2
HELD = 2  # what candidates may keep between chunks, in intermediate results
REPEATED = 1e-4  # how far two passes over the same data may differ: rounding, in single precision


def nll(predictive: Any, y: Tensor) -> Tensor:
    """The mean negative log-likelihood."""
    found: Tensor = -predictive.log_prob(y).mean()
    return found


@dataclass(frozen=True, eq=False)
class Grid:
    """The best of some precisions: by a metric on held-out ``data``, or by the evidence where none are given.

    Every value is tried for all weights at once; a prior by groups then keeps the ratios that it has. ``metric`` takes
    (predictive, targets) and gives a number, lower being better. Cost: one pass over the held-out data, whose Jacobians
    serve all values; then a factorisation and a product for each. Where the factorisations of all values would take
    more than 512 MiB (4 GiB on a GPU), they are tried in groups that fit, for one more pass over the data each.
    """

    data: Iterable[Any] | Data | None = None
    precisions: Sequence[float] = PRECISIONS
    metric: Metric = nll

    def __post_init__(self) -> None:
        _check_values(self.precisions, "precisions")

    def __call__(self, posterior: Any) -> Any:
        candidates = _with_precisions(posterior, self.precisions)
        if self.data is not None:
            scores = held_out_scores(candidates, self.data, self.metric)
            return _best(candidates, scores.mean(0), "Grid", "held-out metric", 1.0)
        if not isinstance(posterior, HasEvidence):
            raise UnsupportedError(f"{type(posterior).__name__} has no evidence; give grid(data) held-out data.")
        with torch.no_grad():
            evidences = torch.stack([-_unused(candidate).log_evidence() for candidate in candidates])
        return _best(candidates, evidences, "Grid", "log evidence", -1.0)


@dataclass(frozen=True, eq=False)
class CrossValidated:
    """The precision with the best mean of a metric over folds of held-out ``data``.

    The network saw none of these data, so each fold scores it fairly. ``one_error=True`` takes the largest precision
    (the narrowest bars) whose mean is within one standard error of the best, the usual guard against noise in a small
    held-out set. Cost: as for ``grid``.
    """

    data: Iterable[Any] | Data
    precisions: Sequence[float] = PRECISIONS
    metric: Metric = nll
    folds: int = 5
    one_error: bool = False

    def __post_init__(self) -> None:
        _check_values(self.precisions, "precisions")
        if self.folds < 2:
            raise UnsupportedError(f"folds is {self.folds}; expected at least 2.")

    def __call__(self, posterior: Any) -> Any:
        candidates = _with_precisions(posterior, self.precisions)
        scores = held_out_scores(candidates, self.data, self.metric, self.folds)
        if len(scores) < 2:
            raise DataError(f"the held-out data give {len(scores)} fold; expected at least 2 data, one for each.")
        means, errors = scores.mean(0), scores.std(0) / math.sqrt(len(scores))
        best = int(means.argmin())
        finding = (
            f"precision {self.precisions[best]:.3g} has the best mean, {float(means[best]):.4g} ± "
            f"{float(errors[best]):.2g} over {len(scores)} folds",
        )
        if self.one_error:
            allowed = [i for i in range(len(candidates)) if means[i] <= means[best] + errors[best]]
            best = max(allowed, key=lambda i: self.precisions[i])
        return _best(candidates, means, "CrossValidated", "mean held-out metric", 1.0, best, finding)


@dataclass(frozen=True, eq=False)
class Temperature:
    """The temperature φ of a tempered posterior, Λ = H/φ + A, with the best metric on held-out ``data``.

    Below one the data count for more than they are (a cold posterior), above one for less. For a Gaussian likelihood φ
    is the noise variance, and its values are multiples of the present one. Cost: as for ``grid``.
    """

    data: Iterable[Any] | Data
    temperatures: Sequence[float] = TEMPERATURES
    metric: Metric = nll

    def __post_init__(self) -> None:
        _check_values(self.temperatures, "temperatures")

    def __call__(self, posterior: Any) -> Any:
        _refuse_fixed(posterior)
        problem = posterior.problem
        phi = problem.likelihood.dispersion.detach()
        candidates = [
            posterior.with_problem(problem.with_likelihood(problem.likelihood.with_dispersion(phi * t)))
            for t in self.temperatures
        ]
        scores = held_out_scores(candidates, self.data, self.metric).mean(0)
        best = int(scores.argmin())
        finding = (f"temperature {self.temperatures[best]:.3g}",)
        return _best(candidates, scores, "Temperature", "held-out metric", 1.0, best, finding)


def held_out_scores(candidates: Sequence[Any], source: Iterable[Any] | Data, metric: Metric, folds: int = 1) -> Tensor:
    """(folds, candidates): the metric of each on each fold.

    Datum i goes to fold i mod ``folds``. The network is run and differentiated once for each chunk; every candidate
    reads its variances off the same Jacobian. Cost: a pass over the data for as many candidates as may be held at once.
    """
    data = source if isinstance(source, Data) else Data(source, candidates[0].problem.network.device)
    passes: list[_Pass] = []
    done = 0
    while done < len(candidates):
        passes.append(_passed(candidates[done:], data, metric, folds))
        _refuse_other_data(passes[0], passes[-1])
        done += passes[-1].totals.shape[1]
    used = passes[0].counts > 0
    if not bool(used.any()):
        raise DataError("no held-out datum counts: every target is ignored; expected at least one.")
    return torch.cat([each.totals for each in passes], 1)[used] / passes[0].counts[used][:, None]


@dataclass(frozen=True, eq=False)
class _Pass:
    """Sums over the data of each fold: scores (folds, candidates), how many count (folds,), and |f| (folds,)."""

    totals: Tensor
    counts: Tensor
    sizes: Tensor


def _passed(candidates: Sequence[Any], data: Data, metric: Metric, folds: int) -> _Pass:
    """Of the first candidates, as many as may be held at once."""
    likelihoods = [candidate.problem.likelihood for candidate in candidates]
    totals = torch.zeros(folds, len(candidates), dtype=torch.float64)
    counts, sizes = (torch.zeros(folds, dtype=torch.float64) for _ in range(2))
    position = tried = 0
    with torch.no_grad():
        for batch, beliefs in _beliefs(candidates, data):
            tried = len(beliefs)
            size = beliefs[0].mean.shape[0]
            fold = (torch.arange(size) + position) % folds
            position += size
            y = likelihoods[0].targets(beliefs[0].mean, batch.targets)
            for k in range(folds):
                rows = _counted(likelihoods[0], y, (fold == k).nonzero()[:, 0].to(y.device))
                f = beliefs[0].mean[rows]
                count = f[..., 0].numel()
                if not count:
                    continue
                counts[k] += count
                sizes[k] += float(f.double().abs().sum())
                for i, (likelihood, belief) in enumerate(zip(likelihoods, beliefs, strict=False)):
                    part = FunctionGaussian(belief.mean[rows], belief.cov[rows])
                    totals[k, i] += count * _number(metric(likelihood.predict(part), y[rows]))
    return _Pass(totals[:, :tried], counts, sizes)


def _refuse_other_data(first: _Pass, again: _Pass) -> None:
    same = torch.equal(first.counts, again.counts) and torch.allclose(first.sizes, again.sizes, rtol=REPEATED, atol=0)
    if not same:
        raise DataError(
            "a second pass over the held-out data gave other folds, and the candidates do not fit in memory at once; "
            "expected the same data in the same order. Use shuffle=False and no random augmentation, or try fewer "
            "values at a time."
        )


def _counted(likelihood: Any, y: Tensor, rows: Tensor) -> Any:
    """Return an index of these rows, without the data that the likelihood ignores."""
    if not isinstance(likelihood, IgnoresTargets):
        return rows
    ignored = likelihood.ignored(y[rows])
    if not bool(ignored.any()):
        return rows
    if y.is_floating_point():  # several labels for each datum, of which some are known
        raise DataError("some held-out labels are ignored ones, which no score can leave out; expected known ones.")
    known = torch.zeros_like(y, dtype=torch.bool)
    known[rows] = ~ignored
    return known.nonzero(as_tuple=True)


def _number(score: Tensor | float) -> float:
    if isinstance(score, Tensor) and score.numel() != 1:
        raise DataError(f"the metric gave {tuple(score.shape)} numbers; expected one, the mean over the batch.")
    return float(score)


def _beliefs(candidates: Sequence[Any], data: Data) -> Iterator[tuple[Batch, list[FunctionGaussian]]]:
    """Of the first candidates, as many as may be held at once; the same for every chunk."""
    network = candidates[0].problem.network
    group = [_unused(candidate) for candidate in candidates]
    limit: float = HELD * temporary(network.device)
    for batch in data.batches("held-out data"):
        paired(network, batch)
        for rows, tangent in network.tangents(batch.inputs):
            mine = Batch(batch.inputs, batch.targets[rows])
            f = tangent.f.to(network.dtype)
            jacobians = tangent.jacobians()
            beliefs = _fitting(group, f, jacobians, limit)
            group, limit = group[: len(beliefs)], math.inf
            yield mine, beliefs


def _unused(candidate: Any) -> Any:
    """A copy without what the candidate has kept for later: it goes when the copy goes."""
    return replace(candidate)


def _fitting(candidates: Sequence[Any], f: Tensor, jacobians: Any, limit: float) -> list[FunctionGaussian]:
    """Of the first candidates, at least one: as many as keep no more than so many bytes for later."""
    held: dict[int, int] = {}
    _add_storages(candidates[0], held)
    before = sum(held.values())
    beliefs: list[FunctionGaussian] = []
    for candidate in candidates:
        beliefs.append(_belief(candidate, f, jacobians))
        _add_storages(candidate, held)
        kept = sum(held.values()) - before
        if kept + kept / len(beliefs) > limit:
            break
    return beliefs


def _add_storages(value: Any, found: dict[int, int]) -> None:
    """The bytes of all memory that the value's tensors are in, by its address: what is shared counts once."""
    if isinstance(value, Tensor):
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, tuple | list):
        inside = value
    elif is_dataclass(value):
        inside = vars(value).values()
    for each in inside:
        _add_storages(each, found)


def _belief(candidate: Any, f: Tensor, jacobians: Any) -> FunctionGaussian:
    found = candidate.covariance(jacobians)
    return FunctionGaussian(f, found if f.ndim == 3 else found.squeeze(1))


def _with_precisions(posterior: Any, precisions: Sequence[float]) -> list[Any]:
    _refuse_without(posterior)
    problem = posterior.problem
    values = problem.prior.values.detach()
    shape = values / values.log().mean().exp()  # what the groups are to each other
    return [posterior.with_problem(problem.with_prior(problem.prior.with_precision(shape * p))) for p in precisions]


def _refuse_without(posterior: Any) -> None:
    if not isinstance(posterior, Linearised):
        raise UnsupportedError(f"{type(posterior).__name__} has no precision to change; use a method that has one.")


def _refuse_fixed(posterior: Any) -> None:
    _refuse_without(posterior)
    likelihood = posterior.problem.likelihood
    try:
        likelihood.with_dispersion(2 * likelihood.dispersion)
    except DataError as error:
        raise UnsupportedError(f"{type(likelihood).__name__} has no temperature to choose: {error}") from error


def _check_values(values: Sequence[float], what: str) -> None:
    try:
        good = len(values) > 0 and all(math.isfinite(v) and v > 0 for v in values)
    except TypeError:
        good = False
    if not good:
        raise UnsupportedError(f"{what} is {values!r:.80}; expected a list of positive, finite numbers.")


def _best(
    candidates: Sequence[Any], scores: Tensor, tuner: str, score: str, sign: float, best: int | None = None,
    findings: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    best = int(scores.argmin()) if best is None else best
    if not bool(torch.isfinite(scores).all()):
        raise DataError(f"{tuner}: {int((~torch.isfinite(scores)).sum())} of {len(scores)} scores are not finite.")
    if best in (0, len(candidates) - 1) and len(candidates) > 2:
        findings = (*findings, "the best value is at the edge of those tried: try further out")
    steps = tuple(
        Step(sign * float(value), tuple(c.problem.prior.values.detach().reshape(-1).tolist()),
             (float(c.problem.likelihood.dispersion),))
        for c, value in zip(candidates, scores, strict=True)
    )  # fmt: skip
    return replace(candidates[best], trace=Trace(tuner, score, steps, findings))
