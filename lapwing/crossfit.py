"""Cross-fitting: the network that was trained on all rows, calibrated by networks trained without some of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lapwing.api import STEPS, FitInProgress, average
from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs, merge_batches
from lapwing.data.processes import ALONE, Processes, in_all_processes
from lapwing.decisions.evaluation import Evaluation, evaluation_of_parts, plain_of
from lapwing.decisions.guarantees import PredictionSets, class_scores, conformal_rank, row_shares
from lapwing.errors import DataError, LapwingError, ModelError, UnsupportedError
from lapwing.fitted import Fitted
from lapwing.folds import (
    FEW,
    FINAL,
    Rows,
    Split,
    Trainer,
    TrainFunction,
    Training,
    copied_recipe,
    recipe_findings,
    scored_part,
    split_findings,
    splits_of,
)
from lapwing.likelihoods.base import Likelihood
from lapwing.methods.base import Method, OverNetworks
from lapwing.networks.forward import arithmetic_of, extract_network, outside_autocast
from lapwing.networks.selection import Weights
from lapwing.posteriors.base import Posterior, Trace
from lapwing.posteriors.mixture import MixturePosterior, NetworksPosterior
from lapwing.priors import Prior
from lapwing.registry import Auto, find_method
from lapwing.runtime.memory import chunks
from lapwing.runtime.settings import FUNCTION, NONE, PATH, PROBABILITY, Rule, integer, is_real, refuse_other_arguments
from lapwing.runtime.threads import should_show_progress, with_inner_progress
from lapwing.tuners.grid import CellGrid, counted_scores
from lapwing.tuners.mixing import (
    TEMPERATURES,
    compare_held_out,
    grid_of,
    mixture_weights,
    thin,
    with_offset,
    with_tails,
)
from lapwing.tuners.offsets import WIDTHS, HeldOutputs, learn_offset, with_findings

if TYPE_CHECKING:
    from lapwing.report.page import Report

QUICK = 1.0  # seconds of a training up to which one is repeated, to see whether it can be
ABOVE = 1.1  # ratio of the training losses of a copy and of the network from which it is worth a remark
HARDER = 2.0  # standard errors by which held-out rows must be harder than training rows, or rows may be ignored


@refuse_other_arguments
@outside_autocast
@with_inner_progress
@torch.inference_mode(False)
@in_all_processes
def crossfit(
    train_fn: TrainFunction | None,
    data: Any,
    likelihood: Likelihood | str,
    *,
    model: nn.Module | None = None,
    folds: Any = 5,
    groups: Sequence[Any] | None = None,
    order: Sequence[Any] | None = None,
    folder: str | Path | None = None,
    workers: int = 1,
    method: Method | Auto | str | None = None,
    weights: Weights | str | None = None,
    prior: Prior | float | None = None,
    target_key: str | None = None,
    output: str | int | tuple[str | int, ...] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    process_group: Any = None,
) -> CrossFit:
    """Fit a posterior around a network trained on all rows, calibrated without giving up any of them.

    Each of several networks is trained in the same way without one fold of the rows, and predicts that fold. What
    predicts it best, relative to each network's own evidence (precisions, softmax temperatures and offsets, or noise
    and tails), goes onto the network of all rows. That needs no held-out data, and costs ``folds`` trainings.

    Args:
        train_fn: Your recipe: ``train_fn(rows, seed)`` trains a new network on ``data[rows]``, a tensor of row numbers,
            and returns it in evaluation mode. Global random numbers are seeded before each call, and restored. All that
            looks at data, such as early stopping, must look at these rows alone. One that takes less than a second is
            called twice more, to see whether it gives the same network again, and another one for other rows.
        data: A Dataset, or a pair ``(inputs, targets)`` of tensors, arrays or frames.
        likelihood: As for ``fit``.
        model: The network that was trained on all rows; ``train_fn`` trains it if None.
        folds: A number of random folds, with equal frequencies of the classes; a fold number for each row; a splitter
            of scikit-learn; or a list of (train, test) pairs of row numbers, of which one is enough: a sibling. Rows
            with the same inputs stay in one of the random folds.
        groups: The group of each row, such as a patient: rows of a group stay in one fold.
        order: When each row was measured: every network is trained on earlier rows than those of its fold.
        folder: A folder for a checkpoint of every network, made if it does not exist. A repeated call goes on from
            there. It needs ``model``, into whose copy weights are read. Give another recipe another folder.
        workers: How many networks are trained at a time, in processes with a part of the threads each.
        method: As for ``fit``.
        weights: As for ``fit``.
        prior: As for ``fit``; a given one is kept.
        target_key: As for ``fit``.
        output: As for ``fit``.
        seed: Of the folds; network k is trained with the seed ``seed + k``, and that of all rows with the next one.
        progress: Whether to show progress bars; None shows them on a terminal.
        process_group: The processes that share the trainings, such as ``torch.distributed.group.WORLD``. Each calls
            ``crossfit`` with all data and the same arguments, and gets the same result.

    Returns:
        A ``CrossFit``: ``posterior`` for use, ``out_of_fold`` predictions for an honest report without a test set,
        ``interval`` and ``sets`` with a guarantee, and the ``mixture`` of all networks.

    Raises:
        DataError: If rows cannot be taken by number, or folds do not fit them; as for ``fit`` otherwise.
        ModelError: If ``train_fn`` returns no network in evaluation mode, or the same one twice; with the fold.
        UnsupportedError: If a combination does not exist.

    >>> import lapwing as lw
    >>> x = torch.linspace(-2, 2, 100).unsqueeze(1)
    >>> y = x.sin() + 0.1 * torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
    >>> def train_fn(rows, seed):
    ...     net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    ...     optimiser = torch.optim.Adam(net.parameters(), 0.05)
    ...     for _ in range(50):
    ...         optimiser.zero_grad()
    ...         (net(x[rows]) - y[rows]).square().mean().backward()
    ...         optimiser.step()
    ...     return net.eval()
    >>> crossed = lw.crossfit(train_fn, (x, y), "regression", folds=3)
    >>> crossed.posterior.predict(x[:4]).std.shape, len(crossed.folds)
    (torch.Size([4, 1]), 3)
    """
    (FUNCTION | NONE if model is not None else FUNCTION).check("train_fn", train_fn)
    integer().check("workers", workers)
    integer(0).check("seed", seed)
    (PATH | NONE).check("folder", folder)
    chosen = find_method(method)
    if isinstance(chosen, OverNetworks):
        raise UnsupportedError(f"method is {type(chosen).__name__}, which combines networks; give a method of one.")
    if folder is not None and model is None:
        raise UnsupportedError("folder needs model, the network trained on all rows: weights are read into its copy.")
    model = None if model is None else extract_network(model)
    dtype = torch.get_default_dtype() if model is None else arithmetic_of(model)
    rows = Rows.of(data, target_key, dtype)
    splits = splits_of(rows, folds, groups, order, seed)
    fit = partial(
        _fit_by_evidence, likelihood=likelihood, method=chosen, is_default=method is None, weights=weights, prior=prior,
        target_key=target_key, output=output,
    )  # fmt: skip
    own = None if model is None else fit(model, data)  # before the trainings: it may be refused
    recipe = copied_recipe(own.posterior, rows) if own is not None and train_fn is None else train_fn
    assert recipe is not None
    trainings = [Training(f"fold {k}", split.training, seed + k) for k, split in enumerate(splits)]
    if own is None:
        trainings.append(Training(FINAL, torch.arange(len(rows)), seed + len(splits)))
    processes = Processes.of(process_group)
    shown = should_show_progress(progress) and processes.is_main_process
    trainer = Trainer(recipe, model, None if folder is None else Path(folder), rows.digest(), workers, processes, shown)
    networks, seconds = trainer.run(trainings)
    if rows.digest() != Rows.of(data, target_key, dtype).digest():
        raise DataError("train_fn changed the data; expected it to leave them as they are, and to change a copy.")
    if own is not None:
        try:
            own.fingerprint.refuse_other(own.network.model)
        except ModelError as error:
            raise ModelError(
                "train_fn changed model, the network trained on all rows; expected it to train a new network, or a "
                f"copy: {error}"
            ) from error
    findings = split_findings(rows, splits)
    # Copies see their rows alone, and a quick recipe is tried with other rows; of others, held-out rows tell.
    is_alone = workers == 1 and folder is None and processes.is_single_process  # and keeps nothing
    is_tried = train_fn is None or (seconds < QUICK * len(trainings) and is_alone)
    if is_tried and train_fn is not None:
        findings += recipe_findings(recipe, trainings[0], networks[0], networks[1] if model is None else model)
    if own is None:
        with _named(FINAL):
            own = fit(networks.pop(), data)
    parts = list(_fitted_parts(rows, splits, networks, fit))
    if not parts:
        raise DataError("no held-out row has a class that its training rows have; expected folds with every class.")
    if train_fn is None:
        findings += _copy_findings(parts[0][1], own)
    pool = Pool.of(own.posterior, [(fold.posterior, fold.network.read_data(held, "fold")) for _, fold, held in parts],
                   None if prior is None else ())  # fmt: skip
    return _calibrate(own, parts, pool, findings if is_tried else findings + _ignored_rows(parts, rows, pool))


def _fitted_parts(
    rows: Rows, splits: Sequence[Split], networks: Sequence[nn.Module], fit: Callable[[nn.Module, Any], Fitted]
) -> Iterator[tuple[Split, Fitted, Any]]:
    """Yield each fold that has rows to score, with the posterior of its network and its held-out data."""
    for k, (split, network) in enumerate(zip(splits, networks, strict=True)):
        scored = scored_part(rows, split)
        if len(scored.held_out):
            with _named(f"fold {k}"):
                posterior = fit(network, rows.take(scored.training))
            yield scored, posterior, rows.take(scored.held_out)


@contextmanager
def _named(training: str) -> Iterator[None]:
    """Have errors begin with the name of a training."""
    try:
        yield
    except LapwingError as error:
        error.args = (f"{training}: {error}",)
        raise


def _copy_findings(copied: Fitted, own: Fitted) -> tuple[str, ...]:
    """Return a remark if a copy of the network fits its rows less well than the network fits its own."""
    reached, enough = _mean_loss(copied), _mean_loss(own)
    if reached <= ABOVE * enough:
        return ()
    return (
        f"the copy has the training loss {reached:.3g}, and the network {enough:.3g}: it is less fitted to its rows. "
        "Give the recipe: lw.sibling(train_fn).",
    )


def _mean_loss(posterior: Fitted) -> float:
    statistics = posterior.posterior.statistics
    return statistics.loss / statistics.data


def _fit_by_evidence(
    model: nn.Module, data: Any, *, likelihood: Likelihood | str, method: Method | Auto, is_default: bool,
    weights: Weights | str | None, prior: Prior | float | None, target_key: str | None,
    output: str | int | tuple[str | int, ...] | None,
) -> Fitted:  # fmt: skip
    """Return the posterior of ``fit`` under the hyperparameters of the evidence, before anything is averaged."""
    run = FitInProgress(
        model, data, likelihood, ALONE, None, method, weights, prior, None, None, target_key, output, False, is_default
    )
    return run.run([step for step in STEPS if step is not average])


@dataclass(frozen=True, eq=False)
class Fold:
    """A network that was trained without some rows, and its posterior, calibrated by the other folds."""

    training: Tensor  # row numbers
    held_out: Tensor
    posterior: Fitted
    data: Any  # the held-out rows


@dataclass(frozen=True, eq=False)
class CrossFit:
    """The result of ``crossfit``.

    Args:
        posterior: The network that was trained on all rows, with what the folds say: for use, and saved alone.
        folds: The networks that were trained without some rows.
        findings: Remarks on the folds and on the recipe.
    """

    posterior: Fitted
    folds: tuple[Fold, ...]
    findings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        count = sum(len(fold.held_out) for fold in self.folds)
        return f"<CrossFit: {len(self.folds)} folds, {count:,} rows out of fold, {self.posterior!r}>"

    @cached_property
    def mixture(self) -> Fitted:
        """The posteriors of all networks, averaged: K + 1 predictions each time, and no file.

        Small data gain most. Large networks on much data come out underconfident: those of the folds saw fewer rows.
        """
        members = [self.posterior.posterior, *(fold.posterior.posterior for fold in self.folds)]
        averaged = NetworksPosterior.of(members, [1 / len(members)] * len(members))
        return replace(self.posterior, posterior=averaged, method="CrossFit")

    @property
    def rows(self) -> Tensor:
        """The numbers of the rows that are predicted out of fold, in the order of ``out_of_fold``."""
        return torch.cat([fold.held_out for fold in self.folds])

    @cached_property
    def targets(self) -> Tensor:
        """The targets of ``rows``, to compare with ``out_of_fold``."""
        return torch.cat([_targets(fold) for fold in self.folds])

    @cached_property
    def out_of_fold(self) -> Any:
        """The predictive of every row by the network that has not seen it, in the order of ``rows``."""
        predictives = [fold.posterior.predict([_inputs(fold.data, fold.posterior)]) for fold in self.folds]
        return type(predictives[0]).concat(predictives)

    def evaluate(
        self,
        *,
        level: float = 0.95,
        confidence: float = 0.95,
        resamples: int = 1000,
        generator: torch.Generator | None = None,
    ) -> Evaluation:
        """Return scores out of fold beside those of the plain networks: every row by a network that has not seen it.

        The weights of the cells are those of the other folds. The network of all rows saw more data than the networks
        that are judged here, so that its predictions are slightly better.

        Args:
            level: The probability of the intervals whose coverage and width are scored.
            confidence: The probability of the bootstrap intervals.
            resamples: The number of resampled data sets.
            generator: Source of randomness; a fixed seed if None.
        """
        return evaluation_of_parts(
            self._parts, level=level, confidence=confidence, resamples=resamples, target_key=None, progress=False,
            generator=generator,
        )  # fmt: skip

    def report(
        self, path: str | Path, *, title: str | None = None, level: float = 0.95, resamples: int = 1000,
        command: str | None = None, date: str | None = None,
    ) -> Report:  # fmt: skip
        """Write the page of ``Fitted.report`` from predictions out of fold: an honest report without a test set.

        Numbers of inputs are places in ``rows``.

        Args:
            path: As for ``Fitted.report``, and so are all others.
            title: As there.
            level: As there.
            resamples: As there.
            command: As there.
            date: As there.
        """
        from lapwing.report.page import write_report

        return write_report(
            self.posterior, self._parts, path, title=title, level=level, resamples=resamples, seed=None,
            command=command, date=date, target_key=None, progress=False,
        )  # fmt: skip

    @property
    def _parts(self) -> list[tuple[Fitted, Any]]:
        return [(fold.posterior, fold.data) for fold in self.folds]

    def interval(self, x: Inputs, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return intervals (B, C) each, around the networks of the folds, by CV+ (Barber et al. 2021).

        If rows are drawn independently, a new target is inside with probability 1 - 2α at least, for level 1 - α, and
        in practice about 1 - α, whatever the network and the noise are. Each output is an interval of its own.

        Args:
            x: Inputs.
            level: 1 - α.

        Raises:
            UnsupportedError: If targets are not numbers.
            DataError: If there are too few rows for the level.
        """
        PROBABILITY.check("level", level)
        residuals = torch.cat([_residuals(fold) for fold in self.folds])
        means = [_means(fold, x) for fold in self.folds]
        rank = conformal_rank(len(residuals), level)
        if rank > len(residuals):
            raise DataError(
                f"{len(residuals)} rows out of fold; expected at least {math.ceil(level / (1 - level))} for the level "
                f"{level:g}. Give a lower level."
            )
        ends = []
        for rows in chunks(len(means[0]), 32 * residuals.numel(), residuals.device):
            own = torch.cat(
                [mean[rows].expand(len(f.held_out), -1, -1) for mean, f in zip(means, self.folds, strict=True)]
            )
            low = (own - residuals.unsqueeze(1)).sort(0).values[len(residuals) - rank]
            ends.append(torch.stack([low, (own + residuals.unsqueeze(1)).sort(0).values[rank - 1]]))
        low, high = torch.cat(ends, 1)
        return low, high

    def sets(self, x: Inputs, level: float = 0.9, *, score: str = "adaptive", seed: int = 0) -> PredictionSets:
        """Return sets of classes that hold the label with probability 1 - 2α at least, for level 1 - α.

        A class is in the set unless the row would be stranger with it than most rows are, each compared by the network
        that has not seen it (Romano et al. 2020).

        Args:
            x: Inputs.
            level: 1 - α.
            score: "adaptive" or "threshold", as for ``Fitted.conformal``.
            seed: Of the shares of "adaptive".

        Raises:
            UnsupportedError: If targets are not classes or one binary label.
        """
        PROBABILITY.check("level", level)
        stranger, count = None, 0
        for fold in self.folds:
            own, labels = _class_probs(fold, None, seed), _targets(fold)
            scores = class_scores(score, *own).gather(1, labels.reshape(-1, 1).long())[:, 0].sort().values
            new = class_scores(score, *_class_probs(fold, x, seed))
            above = len(scores) - torch.searchsorted(scores, new.contiguous(), right=False)  # rows at least as strange
            stranger, count = above if stranger is None else stranger + above, count + len(scores)
        assert stranger is not None
        return PredictionSets(stranger > count - conformal_rank(count, level))

    def summary(self) -> str:
        """Return a few lines: how good predictions are out of fold beside the plain networks, the cost, and remarks.

        They are those of ``posterior.summary()``, and one about the cost.
        """
        many = len(self.folds) > 1
        cost = (
            f"Judged by {f'{len(self.folds)} networks' if many else 'a network'} of the same recipe on "
            f"{len(self.rows):,} rows that {'each' if many else 'it'} had not seen: as many more trainings and fits."
        )
        return f"{self.posterior.summary()}\n{cost}"


@dataclass(frozen=True)
class Sibling:
    """Held-out data for ``fit`` from a further training; see ``sibling``."""

    train_fn: TrainFunction | None = None
    share: float = 0.2
    groups: Sequence[Any] | None = None
    seed: int = 0

    def crossfit(self, model: nn.Module, data: Any, likelihood: Likelihood | str, **settings: Any) -> CrossFit:
        """Return the cross-fit with this one fold; settings are those of ``lapwing.crossfit``."""
        rows = Rows.of(data, settings.get("target_key"), arithmetic_of(extract_network(model)))
        first = splits_of(rows, round(1 / self.share), self.groups, None, self.seed)[0]
        return crossfit(self.train_fn, data, likelihood, model=model, folds=[first.pair], seed=self.seed, **settings)


@refuse_other_arguments
def sibling(
    train_fn: TrainFunction | None = None, *, share: float = 0.2, groups: Sequence[Any] | None = None, seed: int = 0
) -> Sibling:
    """Return held-out data for ``fit(..., validation=...)`` from one further training: the cheap form of ``crossfit``.

    Another network is trained in the same way on a part of the training rows, and judged by the rest. What it says
    about the width of error bars holds for the network of ``fit`` too, which needs no rows held out.

    Args:
        train_fn: As for ``crossfit``.
        share: The share of the rows that the sibling does not see, at most one half.
        groups: As for ``crossfit``.
        seed: Of the rows and of the training.

    >>> import lapwing as lw
    >>> x = torch.linspace(-2, 2, 60).unsqueeze(1)
    >>> y = x + 0.1 * torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    >>> def train_fn(rows, seed):
    ...     net = nn.Linear(1, 1)
    ...     solution = torch.linalg.lstsq(torch.cat([x[rows], torch.ones(len(rows), 1)], 1), y[rows]).solution
    ...     net.weight.data, net.bias.data = solution[:1], solution[1]
    ...     return net.eval()
    >>> net = train_fn(torch.arange(60), 0)
    >>> posterior = lw.fit(net, (x, y), "regression", validation=lw.sibling(train_fn))
    >>> bool(posterior.predict(x).std.mean() < 0.2)
    True
    """
    (FUNCTION | NONE).check("train_fn", train_fn)
    Rule("a number above 0 and at most 0.5", lambda v: is_real(v) and 0 < v <= 0.5).check("share", share)
    integer(0).check("seed", seed)
    return Sibling(train_fn, share, groups, seed)


def _inputs(data: Any, posterior: Fitted) -> Any:
    """Return the inputs of some rows as one batch."""
    read = posterior.network.read_data(data, "fold")
    (batch,) = merge_batches(read.batches("out of fold", weighted=True), 2**40)
    return batch.inputs


def _calibrate(
    own: Fitted, parts: Sequence[tuple[Split, Fitted, Any]], pool: Pool, findings: tuple[str, ...]
) -> CrossFit:
    """Return the result: the cells of all networks, weighted by the rows that each had not seen."""
    compared, verdict, worse = pool.compare()
    trace = Trace(
        "crossfit", "out-of-fold NLL", findings=worse, scores=compared, scored_on="out-of-fold", verdict=verdict
    )
    mixture = pool.mixture(pool.grid, pool.weights())
    posterior = replace(own, posterior=mixture.with_trace(trace.after(own.posterior.trace)))
    folds = tuple(
        Fold(*split.pair, replace(fold, posterior=pool.mixture(pool.judged[k], pool.weights(k))), data)
        for k, (split, fold, data) in enumerate(parts)
    )
    if findings:
        posterior = replace(posterior, posterior=with_findings(posterior.posterior, findings))
    return CrossFit(posterior, folds, findings)


@dataclass(frozen=True, eq=False)
class Pool:
    """The cells of several networks in one order, with the scores of rows that each network had not seen.

    A cell is relative to the evidence of its network: the same ratio of the precision, temperature or ratio of the
    noise for all. So scores of the folds weight the cells of the network that was trained on all rows.

    Args:
        grid: The cells of the network of all rows.
        judged: The cells of each fold, with an offset of the logits that other folds have learned.
        scores: The log-likelihoods of the rows of each fold under the cells, (n, cells).
        own: The same under ``judged``.
        counts: How often each row counts, for each fold (n,).
    """

    grid: CellGrid
    judged: tuple[CellGrid, ...]
    scores: tuple[Tensor, ...]
    own: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, target: Posterior, parts: Sequence[tuple[Posterior, Data]], ratios: Sequence[float] | None = None
    ) -> Pool:
        """Score the cells of every fold on its rows."""
        likelihood = target.problem.likelihood
        learns_noise = likelihood.has_tails and likelihood.learns_dispersion
        posteriors = [target, *(posterior for posterior, _ in parts)]
        noises: list[Tensor | None] = [None] * len(posteriors)
        held = []
        if learns_noise or likelihood.takes_offset:
            held = [HeldOutputs.of(each.problem.network, each.problem.likelihood, data) for each, data in parts]
        if learns_noise:
            noises = _noises(posteriors, held)
        grids = [grid_of(each, ratios, TEMPERATURES, noise) for each, noise in zip(posteriors, noises, strict=True)]
        judged = grids[1:]
        if likelihood.takes_offset:
            offset = learn_offset(_concat(held), likelihood, WIDTHS)
            if offset is not None:
                others = (_concat([held[j] for j in _without(k, len(held))]) for k in range(len(held)))
                learned = [learn_offset(other, likelihood, WIDTHS) for other in others]
                values = [torch.zeros_like(offset.values) if each is None else each.values for each in learned]
                judged = [with_offset(g, replace(offset, values=v)) for g, v in zip(grids[1:], values, strict=True)]
                grids = [with_offset(grid, offset) for grid in grids]
        scored = [counted_scores(grid, data) for grid, (_, data) in zip(grids[1:], parts, strict=True)]
        if learns_noise:
            total = torch.stack([counts @ scores for scores, counts in scored]).sum(0)
            grids = [with_tails(grid, total) for grid in grids]
            judged = grids[1:]
            scored = [counted_scores(grid, data) for grid, (_, data) in zip(judged, parts, strict=True)]
        scores, counts = zip(*scored, strict=True)
        own = scores
        if judged[0] is not grids[1]:
            own = tuple(counted_scores(grid, data)[0] for grid, (_, data) in zip(judged, parts, strict=True))
        every, often = torch.cat(scores), torch.cat(counts)
        grid = thin(grids[0], every, often)
        judged = [replace(each, log_prior=grid.log_prior) for each in judged]
        return cls(grid, tuple(judged), tuple(scores), own, tuple(counts))

    def weights(self, without: int | None = None) -> Tensor:
        """Return the weights of the cells by all folds, or by all but one."""
        used = _without(without, len(self.scores))
        scores, counts = (torch.cat([each[k] for k in used]) for each in (self.scores, self.counts))
        return mixture_weights(self.grid.log_prior, scores, counts)

    @staticmethod
    def mixture(grid: CellGrid, weights: Tensor) -> MixturePosterior:
        """Return the cells of a network with these weights."""
        return MixturePosterior.of(grid.bases, grid.beliefs, grid.cells, weights)

    def compare(self) -> tuple[dict[str, float], str, tuple[str, ...]]:
        """Compare the mixture with the plain networks, and with rescaled ones; for each fold by the other folds."""
        mixed, rescaled = [], []
        rescalings = self.grid.rescaled.nonzero()[:, 0]
        for k, scores in enumerate(self.own):
            mixed.append(torch.logsumexp(scores + self.weights(k).log(), 1))
            if len(rescalings):
                used = _without(k, len(self.own))
                totals = torch.stack([self.counts[j] @ self.scores[j][:, rescalings] for j in used]).sum(0)
                rescaled.append(scores[:, rescalings[int(totals.argmax())]])
        best = torch.cat(rescaled) if len(rescalings) > 1 else None
        counts = torch.cat(self.counts)
        return compare_held_out(self.grid, torch.cat(mixed), torch.cat(self.own), best, counts, "out-of-fold")


def _without(k: int | None, count: int) -> list[int]:
    """Return the numbers of all folds but one; a fold that is alone stays."""
    return [j for j in range(count) if j != k or count == 1]


def _noises(posteriors: Sequence[Posterior], held: Sequence[HeldOutputs]) -> list[Tensor | None]:
    """Return the variance of residuals that each network would have on new rows, (C,), by the ratio to its own noise.

    The ratio is the mean over all held-out rows.
    """
    own = []
    for each in posteriors:
        noise = each.problem.likelihood.noise_variance
        assert noise is not None
        own.append(noise.detach().double().cpu().expand(held[0].f.shape[1]))
    total = torch.stack([h.counts.sum(0) for h in held])
    ratios = torch.stack([h.variance / noise for h, noise in zip(held, own[1:], strict=True)])
    ratio = (total * ratios).sum(0) / total.sum(0)
    return [ratio * noise for noise in own]


def _concat(held: Sequence[HeldOutputs]) -> HeldOutputs:
    f, y, counts = (torch.cat(parts) for parts in zip(*((h.f, h.y, h.counts) for h in held), strict=True))
    return HeldOutputs(f, y, counts, held[0].exclusive)


def _ignored_rows(parts: Sequence[tuple[Split, Fitted, Any]], rows: Rows, pool: Pool) -> tuple[str, ...]:
    """Return a remark if held-out rows are as easy as training rows for networks with more weights than rows.

    Log-likelihoods must fail to tell them apart as they are, and less those of the network of all rows, which knows
    both: what makes a row hard in itself is then gone. Few rows always do.
    """
    if parts[0][1].network.selection.size < len(rows) or sum(len(split.held_out) for split, _, _ in parts) < FEW:
        return ()
    training, held_out = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
    for k, (split, _, held) in enumerate(parts):
        few = split.training[torch.randperm(len(split.training), generator=torch.Generator().manual_seed(k))]
        known = rows.take(few[: len(split.held_out)])
        training.append((_plain_scores(pool.judged[k], known), _plain_scores(pool.grid, known)))
        held_out.append((pool.own[k][:, pool.judged[k].unchanged], _plain_scores(pool.grid, held)))
    if _tells_apart([own for own, _ in training], [own for own, _ in held_out]) or _tells_apart(
        [own - whole for own, whole in training], [own - whole for own, whole in held_out]
    ):
        return ()
    return (
        "held-out rows are predicted as well as training rows, by networks with more weights than rows: if train_fn "
        "ignores the rows that it is given, or sees the others (early stopping, copies), all scores here are too good.",
    )


def _plain_scores(grid: CellGrid, data: Any) -> Tensor:
    """Return the log-likelihoods of some rows under the plain network of a grid, (n,)."""
    cell = grid.cells[grid.unchanged]
    alone = CellGrid.to_compare(grid.bases, [grid.beliefs[cell.belief]], [replace(cell, belief=0)])
    return counted_scores(alone, grid.bases[0].problem.network.read_data(data, "rows"))[0][:, 0]


def _tells_apart(larger: Sequence[Tensor], smaller: Sequence[Tensor]) -> bool:
    """Return whether values (n,) of each fold are larger than others, by rank (Mann and Whitney 1947) or mean."""
    ranks = sum(_rank_score(*pair) for pair in zip(larger, smaller, strict=True))
    more, less = torch.cat([*larger]), torch.cat([*smaller])
    error = (more.var() / len(more) + less.var() / len(less)).sqrt()
    return ranks > HARDER * math.sqrt(len(larger)) or bool(more.mean() - less.mean() > HARDER * error)


def _rank_score(larger: Tensor, smaller: Tensor) -> float:
    """Return by how many standard errors the first values (n,) are larger in rank than the second ones (m,)."""
    n, m = len(larger), len(smaller)
    ordered = smaller.sort().values
    below, up_to = (torch.searchsorted(ordered, larger.contiguous(), right=side).double() for side in (False, True))
    return float((0.5 * (below + up_to)).sum() - 0.5 * n * m) / math.sqrt(n * m * (n + m + 1) / 12)


def _targets(fold: Fold) -> Tensor:
    read = fold.posterior.network.read_data(fold.data, "fold")
    return torch.cat([batch.targets for batch in read.batches("targets", weighted=True)])


def _means(fold: Fold, x: Inputs) -> Tensor:
    """Return the means of the plain network of a fold at new inputs, (B, C)."""
    predictive = replace(fold.posterior, posterior=plain_of(fold.posterior)).predict(x)
    if predictive.scoring.task != "numbers":
        raise UnsupportedError("intervals need targets that are numbers; sets(x) has the sets of one label.")
    mean: Tensor = predictive.mean
    return mean.detach().double()


def _residuals(fold: Fold) -> Tensor:
    """Return the absolute residuals of a fold, (n, C)."""
    mean = _means(fold, _inputs(fold.data, fold.posterior))
    return (_targets(fold).to(mean).reshape(mean.shape) - mean).abs()


def _class_probs(fold: Fold, x: Inputs | None, seed: int) -> tuple[Tensor, Tensor]:
    """Return the class probabilities of a fold and the shares of the rows."""
    predictive = fold.posterior.predict(_inputs(fold.data, fold.posterior) if x is None else x)
    if predictive.scoring.task == "numbers":
        raise UnsupportedError("sets need targets that are labels; interval(x) has the intervals of numbers.")
    probs = predictive.class_probs
    return probs, row_shares(probs, seed)
