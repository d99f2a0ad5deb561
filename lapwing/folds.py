"""Folds for cross-fitting: which rows belong together, how they are split, and networks trained without a fold."""

from __future__ import annotations

import copy
import io
import math
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from lapwing.data.batches import Data, is_dataset, is_pair, to_batch, to_item
from lapwing.data.inputs import Batch, SampleRows, n_rows, plain_tensors
from lapwing.data.known_rows import row_marks
from lapwing.data.processes import Processes
from lapwing.errors import DataError, FileError, LapwingError, ModelError, UnsupportedError
from lapwing.likelihoods.base import weighted_count, weighted_loss
from lapwing.networks.forward import extract_network, raw_output, with_output_dim
from lapwing.posteriors.base import Posterior
from lapwing.runtime import files
from lapwing.runtime.memory import chunks
from lapwing.runtime.settings import describe, describe_kind, is_integer
from lapwing.runtime.states import State
from lapwing.runtime.threads import ProgressBar

TrainFunction = Callable[[Tensor, int], Any]  # from row numbers and a seed to a trained network
FEW = 100  # rows below which a remark says that results vary
POINTS = 2**24  # numbers of the inputs that are kept to compare rows
COMPARED, AMONG = 500, 20_000  # rows whose neighbours are looked for, and among how many
NEAR = 1e-3  # probability of a neighbour as near as this, if rows are independent, below which it is a copy
COPIES = 0.1  # share of near-copies from which it is worth a remark
APART, ALIKE = 20, 0.8  # rows between two that are far apart; share that are nearer to the next one, worth a remark
SORTED = 0.95  # rank correlation with the number of the row from which rows are sorted by an input
UNEQUAL = 2.0  # ratio of the sizes of two folds from which it is worth a remark
ERRORS = 4.0  # standard errors by which the frequency of a class in a fold may differ
CHECKPOINT = "lapwing-fold"
FINAL = "all rows"  # the name of the training without folds
RATE, BATCH = 1e-3, 32  # of Adam, for copies of a network
PART = 0.1  # of the distance between networks of different rows, up to which two networks are the same
EPOCHS, PATIENCE, PROGRESS = 600, 60, 0.01  # at most; without this progress of the loss a copy ends


@dataclass(frozen=True, eq=False)
class Rows:
    """Data as rows that can be taken by their numbers.

    Args:
        source: A Dataset, or a pair as one batch.
        targets: Those of all rows, (N, ...).
        marks: A hash of the inputs of each row, (N,); None if they cannot be compared.
        points: The inputs of each row as numbers, (N, d); None if they are too many.
    """

    source: Dataset[Any] | Batch
    targets: Tensor
    marks: Tensor | None = None
    points: Tensor | None = None

    @classmethod
    def of(cls, data: Any, target_key: str | None, dtype: torch.dtype) -> Rows:
        """Read all rows once, in their order."""
        source: Dataset[Any] | Batch
        if is_pair(data):
            source = to_batch(data, target_key, dtype)
        elif is_dataset(data) and hasattr(data, "__len__"):
            source = data
        else:
            raise DataError(
                f"data is {describe_kind(data)}; expected rows that can be taken by number: a Dataset with a length, "
                "or one pair (inputs, targets) of tensors, arrays or frames. Give the dataset of a DataLoader: "
                "loader.dataset."
            )
        targets, marks, points, numbers = list[Tensor](), list[Tensor | None](), list[Tensor](), 0
        reading = Data(data, torch.device("cpu"), target_key, name="data", dtype=dtype)
        for batch in reading.batches("reading rows", weighted=True):
            targets.append(batch.targets)
            marks.append(row_marks(batch.inputs, batch.n_samples))
            flat = [t.reshape(len(t), -1).float() for t in plain_tensors(batch.inputs) if n_rows(t) == batch.n_samples]
            numbers += sum(t.numel() for t in flat)
            if flat and numbers <= POINTS:
                points.append(torch.cat(flat, 1))
        known = [m for m in marks if m is not None]
        hashed = torch.cat(known) if len(known) == len(marks) and reading.is_repeatable() else None
        kept = torch.cat(points) if len(points) == len(targets) and len({p.shape[1] for p in points}) == 1 else None
        return cls(source, torch.cat(targets), hashed, kept)

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Tensor) -> Any:
        """Return some rows as data for ``fit``."""
        if not isinstance(self.source, Batch):
            return Subset(self.source, rows.tolist())
        return to_item(self.source.take(SampleRows().per_sample(self.source.inputs, len(self)), rows))

    def labels(self) -> Tensor | None:
        """Return the class of every row, (N,); None if targets are not classes, one for each row."""
        return None if self.targets.ndim != 1 or self.targets.is_floating_point() else self.targets.long()

    def digest(self) -> str:
        """Return a hash of inputs and targets in their order, to recognise the data."""
        return " ".join(str(_ordered_hash(part)) for part in (self.targets, self.marks) if part is not None)


@dataclass(frozen=True, eq=False)
class Split:
    """One fold: the rows that a network is trained on, and those that it is judged by."""

    training: Tensor
    held_out: Tensor

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        return self.training, self.held_out


def splits_of(
    rows: Rows, folds: Any, groups: Sequence[Any] | None, order: Sequence[Any] | None, seed: int
) -> tuple[Split, ...]:
    """Return the folds of these rows; see ``lapwing.crossfit``.

    Args:
        rows: The data.
        folds: A number of folds; a fold number for each row; a splitter of scikit-learn; or (train, test) pairs.
        groups: For each row the group that it belongs to: rows of a group stay in one fold.
        order: For each row when it was measured: networks are trained on earlier rows than those they are judged by.
        seed: Of the random folds.
    """
    n = len(rows)
    for name, given in (("groups", groups), ("order", order)):
        if given is not None and len(given) != n:
            raise DataError(f"{name} has {len(given)} entries for {n} rows; expected one for each row.")
    names = None if groups is None else [each.item() if isinstance(each, Tensor) else each for each in groups]
    time = None if order is None else _places(order)
    if isinstance(folds, Iterator):
        folds = list(folds)
    if hasattr(folds, "split") and not isinstance(folds, Tensor):
        pairs: Iterable[Any] = folds.split(list(range(n)), rows.targets.tolist(), groups)
    elif isinstance(folds, bool) or not (is_integer(folds) or hasattr(folds, "__len__")):
        raise UnsupportedError(
            f"folds is {folds!r:.60}; expected a number of folds, a fold number for each row, a splitter of "
            "scikit-learn or a list of (train, test) pairs of row numbers."
        )
    elif is_integer(folds):
        if not 2 <= folds <= n:
            raise DataError(f"folds is {folds} for {n} rows; expected at least 2 and at most the number of rows.")
        pairs = _pairs(_assign(rows, int(folds), names, seed)) if time is None else _in_order(time, int(folds))
    elif len(folds) and not isinstance(folds, Tensor) and isinstance(next(iter(folds)), tuple | list):
        pairs = folds
    else:
        pairs = _pairs(_integers(folds, f"a fold number for each of {n} rows", n))
    splits = []
    for pair in pairs:
        if len(pair) != 2:
            raise DataError(f"folds has an entry of {len(pair)} parts; expected (train, test) pairs of row numbers.")
        splits.append(Split(*(_integers(part, "(train, test) pairs of row numbers") for part in pair)))
    _refuse_unusable(splits, n)
    _refuse_mixed(splits, names, time)
    return tuple(splits)


def _integers(values: Any, expected: str, count: int | None = None) -> Tensor:
    """Return integers that the user gave, (n,)."""
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"folds has {describe_kind(values)} without numbers; expected {expected}.") from error
    is_whole = not numbers.is_floating_point() and numbers.dtype != torch.bool
    if numbers.ndim != 1 or (len(numbers) and not is_whole) or count not in (None, len(numbers)):
        raise DataError(f"folds has {describe(numbers)}; expected {expected}.")
    return numbers.long()


def _pairs(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows outside and inside of every fold, from the fold number of each row."""
    for number in numbers.unique():
        yield (numbers != number).nonzero()[:, 0], (numbers == number).nonzero()[:, 0]


def _refuse_unusable(splits: Sequence[Split], n: int) -> None:
    """Raise unless every fold has rows on both sides, none on both, and no row is judged twice."""
    if not splits:
        raise DataError("folds is empty; expected at least one (train, test) pair of row numbers.")
    judged = torch.zeros(n, dtype=torch.long)
    for k, split in enumerate(splits):
        for name, part in (("training", split.training), ("held-out", split.held_out)):
            if not len(part):
                raise DataError(f"fold {k} has no {name} rows; expected some.")
            if int(part.min()) < 0 or int(part.max()) >= n:
                raise DataError(f"fold {k} has the {name} row {int(part.max())}; expected numbers from 0 to {n - 1}.")
        if bool(torch.isin(split.held_out, split.training).any()):
            raise DataError(f"fold {k} has held-out rows among its training rows; expected different ones.")
        judged[split.held_out] += 1
    if int(judged.max()) > 1:
        raise DataError(f"row {int(judged.argmax())} is held out in several folds; expected each in one at most.")


def _refuse_mixed(splits: Sequence[Split], groups: Sequence[Any] | None, time: Tensor | None) -> None:
    """Raise unless folds keep groups together, and every network is trained on earlier rows."""
    for k, split in enumerate(splits):
        if groups is not None:
            both = {groups[i] for i in split.training.tolist()} & {groups[i] for i in split.held_out.tolist()}
            if both:
                raise DataError(
                    f"group {min(map(str, both))} is on both sides of fold {k}; expected the rows of a group in one "
                    "part. Give a number of folds, without order, or other folds."
                )
        if time is not None and int(time[split.training].max()) > int(time[split.held_out].min()):
            raise DataError(
                f"fold {k} has training rows that are later than its held-out rows; expected earlier ones. With "
                "order=... give a number of folds, or folds in time."
            )


def _places(order: Sequence[Any]) -> Tensor:
    """Return the place of the time of every row among all times, (N,)."""
    times: list[Any] = order.tolist() if hasattr(order, "tolist") else list(order)  # numbers, dates or text
    missing = sum(time is None or time != time for time in times)
    if missing:
        raise DataError(f"order has {missing} missing values; expected a time for each row.")
    try:
        place = {time: k for k, time in enumerate(sorted(set(times)))}
    except TypeError as error:
        raise DataError(f"order cannot be sorted ({error}); expected numbers, dates or text.") from error
    return torch.tensor([place[time] for time in times])


def _in_order(rank: Tensor, folds: int) -> list[tuple[Tensor, Tensor]]:
    """Return folds in which every network is trained on earlier rows; rows of equal time stay together."""
    sorted_rows = rank.argsort(stable=True)
    cuts = [round(len(rank) * k / (folds + 1)) for k in range(folds + 2)]
    starts = [int(rank[sorted_rows[cut]]) if cut < len(rank) else int(rank.max()) + 1 for cut in cuts]
    splits = []
    for low, high in pairwise(starts):
        if 0 < low < high:
            splits.append(((rank < low).nonzero()[:, 0], ((rank >= low) & (rank < high)).nonzero()[:, 0]))
    if not splits:
        raise DataError("order has one value for nearly all rows; expected times that tell rows apart.")
    return splits


def _assign(rows: Rows, folds: int, groups: Sequence[Any] | None, seed: int) -> Tensor:
    """Return the fold of every row, (N,): equal frequencies of the classes, and what belongs together in one fold."""
    n, generator = len(rows), random.Random(seed)
    labels = rows.labels()
    classes = [0] * n if labels is None else labels.tolist()
    members: dict[int, list[int]] = {}
    for row, unit in enumerate(_units(rows, groups)):
        members.setdefault(unit, []).append(row)
    if len(members) < folds:
        raise DataError(f"{len(members)} groups for {folds} folds; expected at least as many groups. Lower folds.")
    units = list(members.values())
    generator.shuffle(units)
    numbers = torch.empty(n, dtype=torch.long)
    if len(units) == n:
        for position, (row,) in enumerate(sorted(units, key=lambda unit: classes[unit[0]])):
            numbers[row] = position % folds
        return numbers
    totals = Counter(classes)
    loads = [Counter[int]() for _ in range(folds)]
    for together in sorted(units, key=len, reverse=True):
        own = Counter(classes[row] for row in together)
        crowded = [(sum(count * load[c] / totals[c] for c, count in own.items()), sum(load.values())) for load in loads]
        fold = crowded.index(min(crowded))
        loads[fold] += own
        numbers[together] = fold
    return numbers


def _units(rows: Rows, groups: Sequence[Any] | None) -> list[int]:
    """Return for every row what it belongs to: rows of one group, and rows with the same inputs."""
    names = range(len(rows)) if groups is None else groups
    parent: dict[Any, Any] = {}

    def root(key: Any) -> Any:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    marks = None if rows.marks is None else rows.marks.tolist()
    for row, name in enumerate(names):
        if marks is not None:
            parent[root(("inputs", marks[row]))] = root(("group", name))
    order: dict[Any, int] = {}
    return [order.setdefault(root(("group", name)), len(order)) for name in names]


def split_findings(rows: Rows, splits: Sequence[Split]) -> tuple[str, ...]:
    """Return remarks on the folds: few rows, unequal sizes and frequencies, classes without training rows, copies."""
    findings = []
    if len(rows) < FEW:
        findings.append(
            f"{len(rows)} rows: with fewer than {FEW} the result varies with the folds. Compare it with that of "
            "another seed, or give more folds."
        )
    sizes = [len(split.held_out) for split in splits]
    if max(sizes) >= UNEQUAL * min(sizes):
        findings.append(f"folds have {min(sizes)} to {max(sizes)} rows: the large ones decide. Balance them.")
    labels = rows.labels()
    if labels is not None:
        findings += _frequency_findings(labels, splits)
    copies = _share_of_copies(rows, splits)
    if copies > COPIES:
        findings.append(
            f"{copies:.0%} of the held-out rows have a near-copy among the training rows of their fold: networks have "
            "seen them, and the scores are too good. Give groups=..., so that copies stay in one fold."
        )
    alike = _share_alike(rows, splits)
    if alike > ALIKE:
        findings.append(
            f"{alike:.0%} of the rows are nearer to the next row than to the {APART}th after it, and folds part "
            "neighbours: if rows come in time or in groups, the scores are too good. Give order=... or groups=...."
        )
    return tuple(findings)


def _frequency_findings(labels: Tensor, splits: Sequence[Split]) -> Iterator[str]:
    classes = int(labels.max()) + 1
    one_hot = torch.nn.functional.one_hot(labels.clamp_min(0), classes).double()
    share = one_hot.mean(0)
    apart = set()
    for split in splits:
        known = one_hot[split.training].sum(0) > 0
        missing = (~known & (one_hot[split.held_out].sum(0) > 0)).nonzero()[:, 0].tolist()
        if missing:
            yield (
                f"class {', '.join(map(str, missing[:5]))} has no row in the training rows of a fold; its rows are not "
                "scored there. Give folds that have every class on both sides."
            )
        own = one_hot[split.held_out].mean(0)
        error = (share * (1 - share) / len(split.held_out)).sqrt()
        apart |= set(((own - share).abs() > ERRORS * error + 1 / len(split.held_out)).nonzero()[:, 0].tolist())
    if apart:
        yield (
            f"the frequency of class {', '.join(map(str, sorted(apart)[:5]))} differs between folds by more than "
            "chance: scores mix several populations. Give folds with equal frequencies if these are not meant."
        )


def scored_part(rows: Rows, split: Split) -> Split:
    """Return a fold without the held-out rows of classes that its network has never seen: they are not scored."""
    labels = rows.labels()
    if labels is None:
        return split
    known = torch.isin(labels[split.held_out], labels[split.training].unique())
    return Split(split.training, split.held_out[known])


def _share_of_copies(rows: Rows, splits: Sequence[Split]) -> float:
    """Return the share of held-out rows whose nearest training row is too near for independent rows.

    In d dimensions (r₁/r₁₀)ᵈ, of the distances to the first and the tenth neighbour, is Beta(1, 9). The dimension is
    that of the data, from the distances to the tenth and the twentieth.
    """
    points = _in_units(rows)
    if not points.shape[1]:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    distances = []
    for split in splits:
        pick = lambda part, most: part[torch.randperm(len(part), generator=generator)[:most]]
        asked = pick(split.held_out, -(-COMPARED // len(splits)))
        among = pick(split.training, AMONG)
        if len(among) >= 20:
            distances.append(torch.cdist(points[asked], points[among]).topk(20, largest=False, sorted=True).values)
    if not distances:
        return 0.0
    near, tenth, last = torch.cat(distances)[:, [0, 9, 19]].double().unbind(1)
    usable = (tenth > 0) & (last > tenth)
    if int(usable.sum()) < FEW // 2:
        return 0.0
    dimension = math.log(2) / float((last / tenth)[usable].log().median())
    return float(((near / tenth)[usable].pow(dimension) < 1 - (1 - NEAR) ** (1 / 9)).double().mean())


def _in_units(rows: Rows) -> Tensor:
    """Return the inputs of all rows in units of their standard deviations, (N, d); d is 0 where they are few."""
    if rows.points is None or len(rows) < FEW:
        return torch.zeros(len(rows), 0)
    points = rows.points - rows.points.mean(0)
    points = points[:, points.std(0) > 0]
    return points / points.std(0)


def _share_alike(rows: Rows, splits: Sequence[Split]) -> float:
    """Return the share of rows that are nearer to the next row than to one far from it: a half, if order means nothing.

    They are rows that a fold parts from the next one, of one class. Inputs by which rows are sorted are left out.
    """
    points, labels = _in_units(rows)[: 4 * COMPARED], rows.labels()
    count = len(points)
    if not points.shape[1]:
        return 0.0
    places = torch.stack([column.unique(return_inverse=True)[1].double() for column in points.T])
    number = torch.arange(count).double() - (count - 1) / 2
    places = places - places.mean(1, keepdim=True)
    points = points[:, (places @ number).abs() < SORTED * places.norm(dim=1) * number.norm()]
    fold = torch.full((len(rows),), -1)
    for k, split in enumerate(splits):
        fold[split.held_out] = k
    row = torch.arange(max(0, count - APART))
    row = row[fold[row] != fold[row + 1]]
    if labels is not None:
        row = row[(labels[row] == labels[row + 1]) & (labels[row] == labels[row + APART])]
    if points.shape[1] < 2 or len(row) < FEW // 2:
        return 0.0
    near, far = ((points[row] - points[row + step]).norm(dim=1) for step in (1, APART))
    return float(((near < far).double() + 0.5 * (near == far).double()).mean())


def copied_recipe(posterior: Posterior, rows: Rows) -> TrainFunction:
    """Return a recipe that trains copies of a network, until they fit their rows as well as it fits all.

    The entries of each weight tensor are shuffled, and statistics of norms forgotten.
    """
    problem, statistics = posterior.problem, posterior.statistics
    network, likelihood = problem.network, problem.likelihood
    enough = statistics.loss / statistics.data

    def train_fn(numbers: Tensor, seed: int) -> nn.Module:
        model = copy.deepcopy(network.model)
        weights = [p for p in model.parameters() if p.requires_grad]
        for each in weights:
            each.data = each.data.flatten()[torch.randperm(each.numel())].view_as(each)
        for module in model.modules():
            if (reset := getattr(module, "reset_running_stats", None)) is not None:
                reset()
        optimiser = torch.optim.Adam(weights, RATE)

        def epoch(order: Tensor, train: bool) -> float:
            model.train(train)
            total, count = 0.0, 0.0
            for batch in network.read_data(rows.take(order)).batches("training a copy", weighted=True):
                for part in chunks(batch.n_samples, 1, network.device, most=BATCH if train else None):
                    f = with_output_dim(raw_output(model, network.take(batch.inputs, part), output=network.output))
                    y = likelihood.targets(f, batch.targets[part])
                    loss = weighted_loss(likelihood, f, y, batch.weights_of(part)).sum()
                    known = weighted_count(likelihood, f, y, batch.weights_of(part))
                    if train:
                        optimiser.zero_grad()
                        (loss / known).backward()
                        optimiser.step()
                    total, count = total + float(loss.detach()), count + float(known)
            return total / count

        best, since = math.inf, 0
        for _ in range(EPOCHS):
            epoch(numbers[torch.randperm(len(numbers))], True)
            with torch.no_grad():
                value = epoch(numbers, False)
            since = 0 if value < (1 - PROGRESS) * best else since + 1
            best = min(best, value)
            if value <= enough or since >= PATIENCE:
                break
        return model.eval()

    return train_fn


@dataclass(frozen=True)
class Training:
    """One network to train: its name, the rows and the seed."""

    name: str
    rows: Tensor = field(repr=False)
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Trainer:
    """Trains the networks of the folds: one after another or in processes, each kept in a checkpoint.

    Args:
        train_fn: The user's recipe.
        template: A network of the same form, into whose copy weights are read; needed for checkpoints.
        folder: Where the checkpoints are.
        data: A hash of the data, for the checkpoints.
        workers: How many networks are trained at a time, by each of the ``processes``.
        processes: Those that share the trainings.
        progress: Whether to show progress.
    """

    train_fn: TrainFunction
    template: nn.Module | None
    folder: Path | None
    data: str
    workers: int
    processes: Processes
    progress: bool

    def run(self, trainings: Sequence[Training]) -> tuple[list[nn.Module], float]:
        """Return the trained networks and the seconds that they took; those with a checkpoint are read.

        A failure is raised after all others ended.
        """
        start = time.perf_counter()
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise FileError(f"folder is {self.folder}, which cannot be made: {error}. Give another one.") from error
        found: dict[str, nn.Module | LapwingError] = {}
        for training in trainings:
            model = self._read(training)
            if self.processes.all_true(model is not None):
                assert model is not None
                found[training.name] = model
        missing = [training for training in trainings if training.name not in found]
        own = missing[self.processes.rank :: self.processes.size]
        bar = ProgressBar(self._outcomes(own), "training folds", self.progress, first=len(trainings) - len(missing))
        sent: dict[str, Sent] = {}
        for training, outcome in bar:
            if not isinstance(outcome, LapwingError):
                self._refuse_same(training.name, outcome, found)
                self._write(training, outcome)
            found[training.name] = outcome
            if not self.processes.is_single_process:
                sent[training.name] = _packed(outcome, training, self.template is not None)
        for others in self.processes.gather_values(sent):
            for name, packed in others.items():
                if name not in found:
                    outcome = _unpacked(packed, name, self.template)
                    if not isinstance(outcome, LapwingError):
                        self._refuse_same(name, outcome, found)
                    found[name] = outcome
        outcomes = [found[training.name] for training in trainings]
        models = [outcome for outcome in outcomes if not isinstance(outcome, LapwingError)]
        for failure in outcomes:
            if isinstance(failure, LapwingError):
                kept = "With folder=... a repeated call goes on from the others."
                if self.folder is not None:
                    kept = f"The others are kept in {self.folder}: call again to go on."
                raise type(failure)(f"{failure} {kept}") from failure.__cause__
        return models, time.perf_counter() - start

    def _refuse_same(self, name: str, model: nn.Module, found: Mapping[str, nn.Module | LapwingError]) -> None:
        """Raise if a network is that of other rows: the same object, or the same weights."""
        others = found if self.template is None else {FINAL: self.template, **found}
        for earlier, other in others.items():
            if not isinstance(other, LapwingError) and (model is other or _same_weights(model, other)):
                raise ModelError(
                    f"train_fn returned the same network for {earlier} and {name}, though their rows differ; "
                    "expected a new network, trained on data[rows], at every call."
                )

    def _outcomes(self, trainings: Sequence[Training]) -> Iterable[tuple[Training, nn.Module | LapwingError]]:
        if self.workers == 1 or len(trainings) < 2:
            return ((training, _attempt(self.train_fn, training)) for training in trainings)
        return _in_processes(self.train_fn, trainings, self.workers, self.template)

    def _path(self, training: Training) -> Path | None:
        return None if self.folder is None else self.folder / f"{training.name.replace(' ', '')}.lapwing"

    def _facts(self, training: Training) -> str:
        return f"data {self.data}, rows {_ordered_hash(training.rows)}, seed {training.seed}"

    def _read(self, training: Training) -> nn.Module | None:
        path = self._path(training)
        if path is None or self.template is None or not path.exists():
            return None
        try:
            state = files.read(path, CHECKPOINT, "network of a fold")
        except FileError as error:
            raise FileError(
                f"{path} cannot be read: {error.__cause__ or error}. Delete it, and call again: {training.name} is "
                "trained again."
            ) from error
        if state.settings.get("facts") != self._facts(training):
            raise DataError(
                f"{path} has the network of {training.name} for other data, rows or seed; expected the same. Choose "
                "another folder, or delete it."
            )
        return _with_weights(self.template, dict(state.tensors), str(path))

    def _write(self, training: Training, model: nn.Module) -> None:
        path = self._path(training)
        if path is not None:
            tensors = {name: t.detach().cpu() for name, t in model.state_dict().items()}
            files.write(path, State(CHECKPOINT, {"facts": self._facts(training)}, tensors))


def _with_weights(template: nn.Module, weights: dict[str, Tensor], where: str) -> nn.Module:
    """Return a copy of a network with other weights, in evaluation mode."""
    model = copy.deepcopy(template)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise FileError(
            f"{where} holds the weights of another network than model; expected its form: {error}"
        ) from error
    return model.eval()


def _attempt(train_fn: TrainFunction, training: Training) -> nn.Module | LapwingError:
    """Return the trained network, or an error that names the fold."""
    try:
        with undisturbed_state(training):
            trained = train_fn(training.rows.clone(), training.seed)
        model = extract_network(trained)
        if not isinstance(model, nn.Module):
            raise ModelError(f"train_fn returned a {type(trained).__name__}; expected the trained torch.nn.Module.")
        if any(module.training for module in model.modules()):
            raise ModelError("train_fn returned a network in training mode; expected evaluation mode: model.eval().")
    except Exception as error:
        kind = type(error) if isinstance(error, DataError | ModelError | UnsupportedError) else ModelError
        words = str(error) if isinstance(error, LapwingError) else f"train_fn raised {type(error).__name__}: {error}."
        failure = kind(f"{training.name}: {words}")
        failure.__cause__ = error
        return failure
    return model


@contextmanager
def undisturbed_state(training: Training) -> Iterator[None]:
    """Seed all random numbers for one training, and restore them; raise if a setting of torch was left changed."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), None if numpy is None else numpy.random.get_state()
    settings = _settings()
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(training.seed)
        random.seed(training.seed)
        if numpy is not None:
            numpy.random.seed(training.seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy is not None:
                numpy.random.set_state(before[1])
            changed = [name for name, value in _settings().items() if value != settings[name]]
            for name in changed:
                SETTINGS[name][1](settings[name])
    if changed:
        raise UnsupportedError(
            f"train_fn changed {', '.join(changed)} of torch for the whole program, which was set back; expected it to "
            "leave global settings alone. Set them before crossfit()."
        )


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {  # how to read and to set each
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
}


def _settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in SETTINGS.items()}


def _same_weights(one: nn.Module, other: nn.Module) -> bool:
    weights = [[p for p in model.parameters() if p.requires_grad] for model in (one, other)]
    return len(weights[0]) == len(weights[1]) > 0 and all(
        a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu())) for a, b in zip(*weights, strict=True)
    )


def recipe_findings(train_fn: TrainFunction, training: Training, model: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Try a recipe twice more, with the same seed: with the same rows, and without every fifth of them.

    Args:
        train_fn: The recipe.
        training: A training, of which ``model`` is the result.
        model: That network.
        other: A network of other rows.

    Returns:
        A remark if the same rows give another network. It is another if it differs by more than a part of what a
        network of other rows differs by.

    Raises:
        ModelError: If other rows give the same network.
    """
    fewer = training.rows[torch.arange(len(training.rows)) % 5 > 0]
    if len(fewer):
        part = _attempt(train_fn, replace(training, rows=fewer))
        if not isinstance(part, LapwingError) and _same_weights(part, model):
            raise ModelError(
                "train_fn returned the same network for other rows with the same seed: it ignores rows; expected it to "
                "train on data[rows] alone."
            )
    again = _attempt(train_fn, training)
    if isinstance(again, LapwingError):
        raise again
    weights = [torch.cat([p.detach().cpu().flatten().double() for p in m.parameters()]) for m in (model, again, other)]
    if (
        len({len(w) for w in weights}) == 1
        and (weights[0] - weights[1]).norm() <= PART * (weights[0] - weights[2]).norm()
    ):
        return ()
    return (
        "train_fn returned another network when it was called again with the same rows and seed: a repeated call will "
        "give another result. Draw all random numbers from the seed, or from the global generators.",
    )


def _in_processes(
    train_fn: TrainFunction, trainings: Sequence[Training], workers: int, template: nn.Module | None
) -> Iterator[tuple[Training, nn.Module | LapwingError]]:
    """Yield each training with its network, trained in a process of its own, as they end.

    Processes are forked where the system can, so that ``train_fn`` may be any function, with one thread each.
    """
    forks = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    waiting, running = list(trainings), dict[Connection, tuple[Training, Any]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                training = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                threads = max(1, torch.get_num_threads() // workers)
                arguments = (theirs, train_fn, training, template is not None, threads)
                process = context.Process(target=_work, args=arguments, daemon=True)  # type: ignore[attr-defined]
                process.start()
                theirs.close()
                running[ours] = training, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                training, process = running.pop(ready)
                try:
                    yield training, _unpacked(ready.recv(), training.name, template)
                except EOFError:
                    yield training, ModelError(f"{training.name}: the process that trained it ended without a result.")
                ready.close()
                process.join()
    finally:
        for _, process in running.values():
            process.terminate()


def _work(pipe: Connection, train_fn: TrainFunction, training: Training, weights_alone: bool, threads: int) -> None:
    """Train one network in a process, and send it."""
    torch.set_num_threads(threads)
    pipe.send(_packed(_attempt(train_fn, training), training, weights_alone))


Sent = tuple[type[LapwingError] | None, str, bytes]  # an error and its words, or a network


def _packed(outcome: nn.Module | LapwingError, training: Training, weights_alone: bool) -> Sent:
    """Return what is sent to another process: the weights alone, or the network itself."""
    if isinstance(outcome, LapwingError):
        return type(outcome), str(outcome), b""
    buffer = io.BytesIO()
    try:
        torch.save(outcome.state_dict() if weights_alone else outcome, buffer)
    except Exception as error:
        words = f"the network cannot be sent between processes ({error}). Use workers=1, or give model."
        return ModelError, f"{training.name}: {words}", b""
    return None, "", buffer.getvalue()


def _unpacked(sent: Sent, name: str, template: nn.Module | None) -> nn.Module | LapwingError:
    kind, words, content = sent
    if kind is not None:
        failure: LapwingError = kind(words)
        return failure
    trained = torch.load(io.BytesIO(content), weights_only=template is not None)
    return trained if template is None else _with_weights(template, trained, name)


def _ordered_hash(values: Tensor) -> int:
    """Return a hash of rows (n, ...) in their order."""
    marks = row_marks(values, len(values))
    assert marks is not None  # it is one tensor
    return int((marks * (2 * torch.arange(len(marks)) + 1)).sum())
