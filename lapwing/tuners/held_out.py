"""The scores of several candidates on held-out data, from one set of Jacobians."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.gaussian import FunctionGaussian
from lapwing.errors import DataError
from lapwing.likelihoods.protocol import IgnoresTargets, Likelihood
from lapwing.losses import sample_count
from lapwing.networks.budget import temporary
from lapwing.tuners.protocol import as_data

Metric = Callable[[Any, Tensor], Tensor | float]  # (predictive, targets) -> lower is better; a mean over the batch
KEPT = 2  # memory that candidates may keep between chunks, as a multiple of the budget for intermediate results
REPEATED = 1e-4  # relative difference of two passes over the same data: rounding in single precision


def nll(predictive: Any, y: Tensor) -> Tensor:
    """Return the mean negative log-likelihood."""
    value: Tensor = -predictive.log_prob(y).mean()
    return value


def held_out_scores(candidates: Sequence[Any], source: Iterable[Any] | Data, metric: Metric, folds: int = 1) -> Tensor:
    """Return the metric of each candidate on each fold, (folds, candidates); folds without data are left out.

    Datum i is in fold i mod ``folds``. The network is run and differentiated once for each chunk of the data, and
    every candidate computes its variances from the same Jacobian. Cost: one pass over the data for as many candidates
    as fit in memory together.
    """
    data = as_data(source, candidates[0].problem.network.device)
    passes: list[_Pass] = []
    done = 0
    while done < len(candidates):
        passes.append(_one_pass(candidates[done:], data, metric, folds))
        _refuse_other_data(passes[0], passes[-1])
        done += passes[-1].totals.shape[1]
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
    position = n_scored = 0
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
                    part = FunctionGaussian(belief.mean[rows], belief.cov[rows])
                    totals[k, i] += count * _number(metric(likelihood.predict(part), y[rows]))
    return _Pass(totals[:, :n_scored], counts, sizes)


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
    """Return the score as a number, or raise if the metric returned several."""
    if isinstance(score, Tensor) and score.numel() != 1:
        raise DataError(f"the metric gave {tuple(score.shape)} numbers; expected one, the mean over the batch.")
    return float(score)


def _beliefs(candidates: Sequence[Any], data: Data) -> Iterator[tuple[Tensor, list[FunctionGaussian]]]:
    """Yield the targets of each chunk and the beliefs of the first candidates, as many as fit at the first chunk."""
    network = candidates[0].problem.network
    group = [replace(candidate) for candidate in candidates]  # copies, whose cached factorisations are freed with them
    limit: float = KEPT * temporary(network.device)
    for batch in data.batches("held-out data"):
        sample_count(network, batch)
        for rows, tangent in network.tangents(batch.inputs):
            beliefs = _beliefs_within(group, tangent.f.to(network.dtype), tangent.jacobians(), limit)
            group, limit = group[: len(beliefs)], math.inf
            yield batch.targets[rows], beliefs


def _beliefs_within(candidates: Sequence[Any], f: Tensor, jacobians: Any, limit: float) -> list[FunctionGaussian]:
    """Return the beliefs of the first candidates, at least one, as many as cache at most ``limit`` bytes."""
    storages: dict[int, int] = {}
    _add_storages(candidates[0], storages)
    before = sum(storages.values())
    beliefs: list[FunctionGaussian] = []
    for candidate in candidates:
        covariance = candidate.covariance(jacobians)
        beliefs.append(FunctionGaussian(f, covariance if f.ndim == 3 else covariance.squeeze(1)))
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
