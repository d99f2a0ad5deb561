"""Scores on held-out data, of many candidates in one pass, and tuners that take the best of a list of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.data.batches import Data
from lapwing.data.inputs import Batch, Inputs, merge_batches
from lapwing.errors import DataError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.networks.jacobians import temporary_bytes
from lapwing.networks.network import Network
from lapwing.posteriors.base import MANY_OUTPUTS, Kept, Posterior, Step, Trace, draw_beliefs, pieces, prefers_draws
from lapwing.posteriors.mixture import Belief, Cell, member
from lapwing.posteriors.weight_space import beliefs_at
from lapwing.predictives.base import Predictive
from lapwing.problem import Problem, check_named_targets, first_samples
from lapwing.runtime.memory import chunks
from lapwing.runtime.settings import DATA, FUNCTION, POSITIVE_VALUES, Rule, integer, required, setting
from lapwing.tuners.base import TunerWithSettings
from lapwing.values.gaussian import FunctionGaussian, FunctionSamples

FunctionBelief = FunctionGaussian | FunctionSamples
Chunk = tuple[Tensor, Tensor | None, Iterable[FunctionBelief]]  # targets, weights, and the belief of each member

ROWS_AT_ONCE = 512  # rows that are scored at once: every cell has a fixed cost for a batch
SCORED_PAIRS = 4  # pairs of functions by which a posterior is scored, if predictions are made from functions
FEW_POINTS = 100  # training data that are looked at, if every input takes solves over all data


def beliefs_by_chunk(
    members: Sequence[Posterior], wide: Sequence[Posterior], data: Data, batches: Iterable[Batch],
    one_by_one: bool = False,
) -> Iterator[Chunk]:  # fmt: skip
    """Yield checked targets, the weights of the samples, and the belief of every member, for each chunk of the data.

    The network is run and differentiated once for each chunk: all members take their variances from one Jacobian.
    Where predictions are made from drawn functions, members are scored by functions too, all with the same numbers, so
    that they do not differ by the luck of their draws. Then only the members in ``wide`` are drawn from.

    With ``one_by_one`` a member computes nothing, such as its factorisation, before its belief is taken.
    """
    for each in () if data.processes.is_single_process else members:
        each.prepare()  # not at the first batch: a process may have none
    network, likelihood = members[0].problem.network, members[0].problem.likelihood
    kept = None if one_by_one else Kept()
    for batch in batches:
        x, y = batch.inputs, check_named_targets(network, likelihood, batch, data.name)
        if prefers_draws(wide, network, likelihood, x):
            stored = [each.n_stored() if each in wide else 0 for each in members]
            numbers = [range(SCORED_PAIRS if n is None else min(SCORED_PAIRS, n)) for n in stored]
            pieces = _by_functions(members, x, numbers, kept)
        else:
            pieces = (_by_one_jacobian if one_by_one else _by_shared_passes)(members, x)
        for rows, beliefs in pieces:
            yield y[rows], batch.weights_of(rows), beliefs


def _by_functions(
    members: Sequence[Posterior], x: Inputs, numbers: Sequence[range], kept: Kept | None
) -> Iterator[tuple[slice, Iterable[FunctionBelief]]]:
    """Yield rows of a batch, and the functions with these numbers; without ``kept``, one member after another."""
    for rows, part in pieces(members[0].problem.network, x, max(map(len, numbers))):
        if kept is not None:
            yield rows, draw_beliefs(members, part, numbers, kept)
        else:
            alone = (draw_beliefs([each], part, [n], Kept()) for each, n in zip(members, numbers, strict=True))
            yield rows, chain.from_iterable(alone)


def _by_one_jacobian(members: Sequence[Posterior], x: Inputs) -> Iterator[tuple[slice, Iterable[FunctionBelief]]]:
    """Yield rows of a batch, and the beliefs of members of one network, each computed when it is taken."""
    network = members[0].problem.network
    for rows, tangent in network.tangents(x):
        f, jacobians = tangent.f.to(network.dtype), tangent.jacobians()
        covariances = (each.covariance(jacobians) for each in members)
        yield rows, (FunctionGaussian(f, cov if f.ndim == 3 else cov.squeeze(1)) for cov in covariances)


def _by_shared_passes(members: Sequence[Posterior], x: Inputs) -> Iterator[tuple[slice, Iterable[FunctionBelief]]]:
    """Yield rows of a batch, so few that the covariances of all members fit in memory, and the beliefs of all."""
    network = members[0].problem.network
    shape, count = network.for_inputs(x).output_shape, network.count(x)
    covariance = torch.Size(shape).numel() * shape[-1] * torch.finfo(network.dtype).bits // 8
    for rows in chunks(count, 4 * (len(members) + 1) * covariance, network.device):
        yield rows, beliefs_at(members, x if rows == slice(0, count) else network.take(x, rows), most=MANY_OUTPUTS)


@dataclass(frozen=True, eq=False)
class CellGrid:
    """Cells with their prior probabilities.

    ``rescaled`` marks the plain network with another temperature or noise: the baseline to compare with.
    """

    bases: tuple[Posterior, ...]
    beliefs: tuple[Belief, ...]
    cells: tuple[Cell, ...]
    log_prior: Tensor  # (cells,)
    rescaled: Tensor  # (cells,), bool
    unchanged: int  # the number of the cell that is the plain network with its likelihood as it is

    @classmethod
    def to_compare(cls, bases: Sequence[Posterior], beliefs: Sequence[Belief], cells: Sequence[Cell]) -> CellGrid:
        """Return cells that are only scored, without prior probabilities; the last one is the plain network."""
        none = torch.zeros(len(cells), dtype=torch.bool)
        return cls(tuple(bases), tuple(beliefs), tuple(cells), torch.zeros(len(cells)), none, len(cells) - 1)

    def last(self, start: int) -> CellGrid:
        """Return the cells from this number on, to be scored, and their beliefs alone."""
        cells = self.cells[start:]
        used = sorted({cell.belief for cell in cells})
        own = [replace(cell, belief=used.index(cell.belief)) for cell in cells]
        return CellGrid.to_compare(self.bases, [self.beliefs[k] for k in used], own)

    @property
    def scales(self) -> Tensor:
        """The scale of every cell's covariance, (cells,)."""
        return torch.tensor([cell.scale for cell in self.cells], dtype=torch.float64)


def counted_scores(grid: CellGrid, data: Data, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Return log p(y | x, cell) of every datum and cell, (n, cells), and how often each counts, (n,), in float64.

    A datum counts once, or as often as its weight says. One pass over the data for all cells; ``limit`` ends it after
    so many data, of which each process takes its share. Data whose target is ignored are left out.
    """
    base = grid.bases[0]
    network, likelihood = base.problem.network, base.problem.likelihood
    if limit is not None:
        limit = -(-(min(limit, FEW_POINTS) if base.solves_for_inputs else limit) // data.processes.size)
    members = [member(grid.bases, belief) for belief in grid.beliefs]
    wide = [members[i] for i in {cell.belief for cell in grid.cells if cell.scale > 0}]
    batches = merge_batches(_first_batches(data, limit, network, likelihood), ROWS_AT_ONCE)
    rows: list[Tensor] = []
    with torch.no_grad():
        for y, weights, beliefs in beliefs_by_chunk(members, wide, data, batches):
            each = _cell_scores(grid, beliefs, y).double()
            counts = each.new_ones(len(y)) if weights is None else weights
            each = torch.cat([each, counts.repeat_interleave(len(each) // len(y)).unsqueeze(1)], 1)
            rows.append(each[~likelihood.ignored(y).reshape(len(each), -1).all(1)])
            del each
    if not sum(data.processes.gather_numbers(sum(map(len, rows)))):
        raise DataError(f"{data.name}: every target is ignored; expected at least one that is not.")
    scores = data.processes.gather_rows(torch.cat(rows)[:limit] if rows else None)
    rows.clear()
    assert scores is not None
    if not all(map(math.isfinite, torch.aminmax(scores))):  # NaN if a score is; without a copy of the scores
        raise DataError(
            f"{data.name}: {int((~torch.isfinite(scores)).sum())} of {scores.numel()} log-likelihoods are not finite; "
            "expected finite ones. Check the targets, and the network for overflow."
        )
    scores = scores.cpu()
    return scores[:, :-1], scores[:, -1]


def _cell_scores(grid: CellGrid, beliefs: Iterable[FunctionBelief], y: Tensor) -> Tensor:
    """Return log p(y | x, cell) of every datum and cell, (n, cells), with one belief in memory at a time."""
    likelihood = grid.bases[0].problem.likelihood
    columns: dict[int, Tensor] = {}
    for number, belief in enumerate(beliefs):
        own = {i: (cell.likelihood, cell.scale) for i, cell in enumerate(grid.cells) if cell.belief == number}
        if own:
            columns.update(zip(own, likelihood.log_probs(belief, y, [*own.values()]).unbind(1), strict=True))
    return torch.stack([columns[i] for i in range(len(grid.cells))], 1)


def _first_batches(data: Data, limit: int | None, network: Network, likelihood: Likelihood) -> Iterator[Batch]:
    """Yield batches until ``limit`` data have passed; a batch of tokens without the samples beyond, which are many."""
    count = 0
    for batch in data.batches("validation data" if limit is None else "training data", weighted=True):
        if limit is not None and len(network.output_shape) == 2:
            y = check_named_targets(network, likelihood, batch, data.name)
            known = (~likelihood.ignored(y)).reshape(*y.shape[:2], -1).any(-1).sum(1).cumsum(0)
            batch = first_samples(network, batch, int((known < limit - count).sum()) + 1)
            count += int(known[-1])
        else:
            count += batch.n_samples
        yield batch
        if limit is not None and count >= limit:
            return


def mean_score(scores: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of scores (n, ...) over the data, each counted so often, (n,)."""
    return torch.tensordot(counts, scores, 1) / counts.sum()


Metric = Callable[[Any, Tensor], Tensor | float]  # (predictive, targets) -> lower is better; a mean over the batch
METRIC = Rule("a function of (predictive, targets)", FUNCTION.holds)
KEPT_FACTOR = 2  # memory that candidates may keep between chunks, as a multiple of the budget for intermediate results
PASS_GAP = 1e-4  # relative difference of two passes over the same data: rounding in single precision


def nll(predictive: Predictive, y: Tensor) -> Tensor:
    """Return the mean negative log-likelihood."""
    return -predictive.log_prob(y).mean()


def held_out_scores(
    candidates: Sequence[Posterior], source: Iterable[object] | Data, metric: Metric, folds: int = 1
) -> Tensor:
    """Return the metric of each candidate on each fold, (folds, candidates); folds without data are left out.

    Datum i is in fold i mod ``folds``. Cost: one pass over the data for as many candidates as fit in memory together.
    """
    data = candidates[0].problem.network.read_data(source, "held-out data")
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

    def add(self, cell: Cell, belief: FunctionBelief, y: Tensor, folds: Iterable[Tensor], metric: Metric) -> None:
        """Add the scores of a candidate on one chunk of the data; ``folds`` has an index of the rows of each fold."""
        for k, rows in enumerate(folds):
            part = belief.rows(rows)
            count = part.mean[..., 0].numel()
            if not count:
                continue
            if cell.belief == 0:
                self.counts[k] += count
                self.sizes[k] += float(part.mean.double().abs().sum())
            self.totals[k, cell.belief] += count * _number(metric(cell.predict(part), y[rows]))


def _one_pass(candidates: Sequence[Posterior], data: Data, metric: Metric, folds: int) -> _Pass:
    """Score the first candidates, at least one, as many as cache little enough memory in the first chunk."""
    # copies, whose cached factorisations are freed with them
    candidates = [replace(each) for each in candidates]  # type: ignore[type-var]
    cells = [Cell(i, each.problem.likelihood) for i, each in enumerate(candidates)]
    limit: float = KEPT_FACTOR * temporary_bytes(candidates[0].problem.network.device)
    storages = _storages(candidates[0])
    shared = sum(storages.values())
    sums = _Pass(torch.zeros(folds, len(cells), dtype=torch.float64), *torch.zeros(2, folds, dtype=torch.float64))
    position = _first_position(data) if folds > 1 else 0
    with torch.no_grad():
        batches = data.batches("held-out data")
        for y, _, beliefs in beliefs_by_chunk(candidates, candidates, data, batches, one_by_one=True):
            fold = (torch.arange(len(y), device=y.device) + position) % folds
            rows = [_known_rows(cells[0].likelihood, y, (fold == k).nonzero()[:, 0]) for k in range(folds)]
            position += len(y)
            for cell, belief in zip(cells, beliefs, strict=False):
                sums.add(cell, belief, y, rows, metric)
                storages |= _storages(candidates[cell.belief]) if limit < math.inf else {}
                cached = sum(storages.values()) - shared
                if cached + cached / (cell.belief + 1) > limit:
                    cells = cells[: cell.belief + 1]
                    break
            limit = math.inf
    n_scored = min(data.processes.gather_numbers(len(cells)))
    totals = sums.totals[:, :n_scored].contiguous()
    return _Pass(*data.processes.sum([totals, sums.counts, sums.sizes]))


def _storages(value: object) -> dict[int, int]:
    """Return the bytes of all tensors in the value by their address, so that shared memory counts once."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    inside: Iterable[object] = value if isinstance(value, tuple | list) else ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif is_dataclass(value):
        inside = vars(value).values()
    return {address: count for each in inside for address, count in _storages(each).items()}


def _first_position(data: Data) -> int:
    """Return the number of data of the processes before this one, by a pass without the network if there are any."""
    if data.processes.is_single_process:
        return 0
    return data.processes.offset_and_total(sum(batch.n_samples for batch in data.batches("counting")))[0]


def _refuse_other_data(first: _Pass, again: _Pass) -> None:
    """Raise if two passes did not see the same data in the same folds."""
    same = torch.equal(first.counts, again.counts) and torch.allclose(first.sizes, again.sizes, rtol=PASS_GAP, atol=0)
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
    numbers = torch.as_tensor(score)
    if numbers.numel() != 1:
        raise DataError(f"the metric gave {tuple(numbers.shape)} numbers; expected one, the mean over the batch.")
    return float(score)


EVIDENCE = "evidence"  # in the place of held-out data
PRECISIONS = tuple(10.0 ** (k / 2) for k in range(-8, 13))  # 1e-4 to 1e6
TEMPERATURES = tuple(10.0 ** (k / 8) for k in range(-24, 17))  # 1e-3 to 1e2


@dataclass(frozen=True, eq=False)
class Grid(TunerWithSettings):
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

    data: Iterable[object] | Data = setting(EVIDENCE, DATA | Rule(repr(EVIDENCE), lambda v: v == EVIDENCE))
    precisions: Sequence[float] = setting(PRECISIONS, POSITIVE_VALUES)
    metric: Metric = setting(nll, METRIC)

    @property
    def holds_out(self) -> bool:  # type: ignore[override]
        """Whether there are held-out data."""
        return self.data != EVIDENCE

    def __call__(self, posterior: Posterior) -> Posterior:
        """Return the posterior under the best precision."""
        candidates = _with_precisions(posterior, self.precisions)
        if self.data != EVIDENCE:
            scores = held_out_scores(candidates, self.data, self.metric).mean(0)
            return _best_of(candidates, scores, int(scores.argmin()), Trace("Grid", "held-out metric"))
        if not posterior.provides(Posterior.log_evidence):
            raise UnsupportedError(f"{type(posterior).__name__} has no evidence; give held-out data: Grid(data).")
        with torch.no_grad():  # of copies, whose cached factorisations are freed with them
            evidences = torch.stack([replace(candidate).log_evidence() for candidate in candidates])  # type: ignore[type-var]
        return _best_of(candidates, evidences, int(evidences.argmax()), Trace("Grid", "log evidence"))


@dataclass(frozen=True, eq=False)
class CrossValidated(TunerWithSettings):
    """A tuner that takes the precision with the best mean of a metric over folds of held-out data.

    The network was trained on none of these data, so each fold scores it fairly.

    Cost: that of ``Grid``.

    Args:
        data: Held-out data in the form that ``fit`` takes.
        precisions: The values to try; by default 21 values from 1e-4 to 1e6.
        metric: A function of (predictive, targets) that returns the mean over the batch; lower is better.
        folds: The number of folds; datum i is in fold i mod ``folds``.

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

    data: Iterable[object] | Data = required(DATA)
    precisions: Sequence[float] = setting(PRECISIONS, POSITIVE_VALUES)
    metric: Metric = setting(nll, METRIC)
    folds: int = setting(5, integer(2))

    holds_out: ClassVar[bool] = True

    def __call__(self, posterior: Posterior) -> Posterior:
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
        trace = Trace("CrossValidated", "mean held-out metric", findings=(finding,))
        return _best_of(candidates, means, best, trace)


@dataclass(frozen=True, eq=False)
class Temperature(TunerWithSettings):
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

    data: Iterable[object] | Data = required(DATA)
    temperatures: Sequence[float] = setting(TEMPERATURES, POSITIVE_VALUES)
    metric: Metric = setting(nll, METRIC)

    holds_out: ClassVar[bool] = True

    def __call__(self, posterior: Posterior) -> Posterior:
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


def _problem(posterior: Posterior) -> Problem:
    """Return the problem of the posterior; raise if its prior and noise cannot change without the data."""
    if not posterior.linearised:
        raise UnsupportedError(f"{type(posterior).__name__} has no precision to change; use Kron or Full.")
    return posterior.problem


def _with_precisions(posterior: Posterior, precisions: Sequence[float]) -> list[Posterior]:
    """Return the posterior under each precision; a prior with groups keeps the ratios between them."""
    problem = _problem(posterior)
    values = problem.prior.values.detach()
    ratios = values / values.log().mean().exp()
    return [posterior.with_problem(problem.with_precisions(ratios * p)) for p in precisions]


def _best_of(candidates: Sequence[Posterior], scores: Tensor, best: int, trace: Trace) -> Posterior:
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
