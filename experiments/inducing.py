"""Inducing points on functions of one input: how close to the exact posterior they come, and where they fail."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import lapwing as lw
from experiments import inducing_targets
from experiments.data import data_folder
from experiments.engine.contract import Record
from experiments.engine.seeds import records_of
from experiments.inducing_picture import picture, targets_picture
from experiments.inducing_published import Schedule, State, learned_as_published, trained_as_published
from experiments.inducing_task import RECIPE, SEED, SMALL, Task, divergence, landmarks
from experiments.options import Progress, add_data_dir, add_quick, silent
from experiments.repeats import mean_scores
from lapwing import metrics
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.demo.training import TrainingSettings, train_mlp
from lapwing.errors import DataError

STARTS, OPTIMISERS = ("greedy", "kmeans", "random"), ("none", "lbfgs", "adam")
LEARNED = {"as started": "none", "learned": "lbfgs"}


@dataclass(frozen=True)
class Inducing:
    """Settings: the toy data of VaLLA, 400 points in three clusters, and a grid that extends them by ``margin``.

    Precision and noise are learned once, by the evidence of the exact posterior, and are the same for all methods.
    ``draws`` of landmarks are averaged; ``starts`` is the number of draws for each size of the sensitivity study, and
    ``networks`` the number of networks trained from other seeds, and from other draws of the same seeds.
    The true function is not known, and the network is trained on all data. So for the NLL every method is fitted once
    more, to a second network that was trained without every ``held_out_every``-th row, and tested on these rows.
    """

    name: ClassVar[str] = "inducing"
    title: ClassVar[str] = "a function of one input: inducing points against the exact posterior"
    version: ClassVar[int] = 2  # other numbers of points are stored

    data_dir: Path
    recipe: TrainingSettings = RECIPE
    points: int = 20
    margin: float = 5.0
    grid: int = 200
    draws: int = 10
    published: tuple[int, ...] = (2_000, 5_000, 10_000, 20_000)  # iterations after which the state is recorded
    published_drawn: int = 10_000  # the one of them that is drawn
    sizes: tuple[int, ...] = (3, 5, 8, 10, 15, 20, 30)
    starts: int = 5
    networks: int = 3
    held_out_every: int = 5
    steps: int | None = None  # of methods that learn by Adam; None takes their defaults
    seed: int = SEED

    @classmethod
    def quick(cls) -> Inducing:
        """Return the settings of the quick form."""
        return cls(
            Path(), recipe=SMALL, points=4, draws=2, published=(10, 20), published_drawn=20, sizes=(2, 4), starts=1,
            networks=0, steps=10,
        )  # fmt: skip

    @classmethod
    def full(cls) -> Inducing:
        """Return the settings of the full form."""
        return cls(Path())

    def units(self) -> tuple[str, ...]:
        """Return the only unit."""
        return ("toy",)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Run the experiment. Groups such as "20 points" have the scores of every draw of the sensitivity study."""
        result = run(self, progress)
        yield from records_of(result, self.seed)
        yield from _records_of_draws(result.arrays, self)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_data_dir(parser, "toy1d.npz")
    add_quick(parser, "small networks, few steps")
    parser.set_defaults(seed=SEED)


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given, and that on functions with jumps and kinks."""
    settings = Inducing(data_folder(arguments.data_dir), seed=arguments.seed)
    targets = inducing_targets.Targets(seed=arguments.seed)
    if arguments.quick:
        settings = replace(Inducing.quick(), data_dir=settings.data_dir, seed=arguments.seed)
        targets = replace(inducing_targets.Targets.quick(), seed=arguments.seed)
    results = run(settings, progress), inducing_targets.run(targets, progress)
    pictures = {"inducing.png": picture, "inducing_targets.png": targets_picture}
    return ExperimentReport(arguments.out / "inducing.json", results, pictures)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """A task whose network was trained without some rows. Its grid is their inputs; their targets are (G, 1)."""

    task: Task
    targets: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, settings: Inducing) -> HeldOut:
        """Train and fit on the other rows."""
        held_out = torch.arange(len(x)) % settings.held_out_every == 0
        rest = x[~held_out], y[~held_out]
        model = trained_as_published(*rest, settings.recipe, settings.seed)
        task = Task.of(model, *rest, settings.margin, settings.grid)
        return cls(replace(task, grid=x[held_out]), y[held_out])

    def nll(self, fitted: lw.Fitted) -> float:
        """Return the NLL of a posterior."""
        predicted = fitted.predict(self.task.grid)
        return metrics.normal_nll(predicted.mean, predicted.std, self.targets)

    def nll_of(self, variance: Tensor) -> float:
        """Return the NLL of the network with this variance of f, (G,), and the shared noise."""
        return metrics.normal_nll(self.task.mean, (variance + self.task.noise).sqrt().unsqueeze(1), self.targets)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The task on all data, the one on held-out rows if the NLL is measured, and the scores of a method on both."""

    task: Task
    held_out: HeldOut | None = None

    def scores(self, variance: Tensor, nll: float | None, gap: float | None, seconds: float) -> dict[str, float]:
        """Return the scores that are known."""
        task = self.task
        scores = {
            "KL": divergence(task.exact, variance),
            "KL with noise": divergence(task.exact + task.noise, variance + task.noise),
            "NLL": nll,
            "evidence gap": gap,
            "seconds": seconds,
        }
        return {name: score for name, score in scores.items() if score is not None}

    def scored(self, method: Any, seed: int) -> dict[str, float]:
        """Fit the method and return its scores."""
        fitted, seconds = self.task.fit(method, seed)
        try:
            gap = self.task.evidence - float(fitted.log_evidence())
        except lw.errors.UnsupportedError:  # alpha is not zero, or the posterior is not a Laplace approximation
            gap = None
        nll = None if self.held_out is None else self.held_out.nll(self.held_out.task.fit(method, seed)[0])
        return self.scores(self.task.variance(fitted), nll, gap, seconds)


def run(settings: Inducing, progress: Progress = silent) -> Result:
    """Compare all methods at one number of points; then other numbers, other starts and other networks."""
    start = time.perf_counter()
    x, y = read_toy(settings.data_dir)
    model = trained_as_published(x, y, settings.recipe, settings.seed)
    held_out = HeldOut.of(x, y, settings)
    task = Task.of(model, x, y, settings.margin, settings.grid)
    comparison = Comparison(task, held_out)
    progress(f"networks and exact posteriors: {time.perf_counter() - start:.0f} s")
    exact_nll = held_out.nll(held_out.task.full)
    learned = {"precision": float(task.full.prior.values), "noise std": task.noise**0.5}
    known = {"γ": task.gamma, "γ held out": held_out.task.gamma, "log evidence": task.evidence, **learned}
    exact = {**comparison.scores(task.exact, exact_nll, 0.0, task.seconds), **known}
    rows = [Row("exact", exact, "Full")]
    rows += _nystrom(comparison, settings)
    published, published_rows = _published(comparison, held_out, settings, progress)
    rows += published_rows + _ours(comparison, settings)
    progress(f"methods: {time.perf_counter() - start:.0f} s")
    arrays = {**_bands(task, settings, published), **_sensitivity(comparison, settings, progress)}
    arrays["NLL exact"] = [exact_nll]
    others = _other_networks(x, y, settings, progress)
    seconds = {"total": time.perf_counter() - start}
    return Result("inducing", plain(settings), settings.seed, (*rows, *others), seconds, arrays)


def read_toy(folder: Path) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (N, 1) each, of toy1d.npz."""
    path = folder / "toy1d.npz"
    if not path.exists():
        raise DataError(f"{path.name} is not in the data folder; expected a key valla with inputs and targets, (N, 2).")
    with np.load(path, allow_pickle=False) as file:
        table = torch.from_numpy(file["valla"]).double()
    return table[:, :1].contiguous(), table[:, 1:].contiguous()


def _nystrom(comparison: Comparison, settings: Inducing) -> list[Row]:
    """Score ELLA with as many landmarks as directions, over draws, and with all data as landmarks."""
    count, every = settings.points, len(comparison.task.x)
    rows = []
    for residual, suffix in ((False, ""), (True, ", residual")):
        method = lw.ELLA(count, count, residual)
        draws = [comparison.scored(method, settings.seed + k) for k in range(settings.draws)]
        kl = torch.tensor([scores["KL"] for scores in draws])
        spread = {"KL sd": float(kl.std()), "KL min": float(kl.min()), "KL max": float(kl.max())}
        rows.append(Row(f"{count} landmarks{suffix}", {**mean_scores(draws), **spread}, "ELLA"))
    for residual, suffix in ((False, ""), (True, ", residual")):
        scores = comparison.scored(lw.ELLA(every, count, residual), settings.seed)
        rows.append(Row(f"{every} landmarks{suffix}", scores, "ELLA"))
    return rows


def _published(
    comparison: Comparison, held_out: HeldOut, settings: Inducing, progress: Progress
) -> tuple[State, list[Row]]:
    """Learn the published variant on both tasks; return the state that is drawn, and a row for each recorded state."""
    schedule = Schedule(settings.points, settings.recipe.batch_size, settings.published, settings.seed)
    states = learned_as_published(comparison.task, schedule, progress)
    without = learned_as_published(held_out.task, schedule, progress)
    rows = []
    for count, state in states.items():
        nll = held_out.nll_of(without[count].variance)
        scores = comparison.scores(state.variance, nll, state.gap, state.seconds)
        rows.append(Row(f"{count:,} iterations", scores, "VaLLA as published"))
    return states[settings.published_drawn], rows


def _ours(comparison: Comparison, settings: Inducing) -> list[Row]:
    """Score VaLLA from every start by every optimiser, with its defaults and with alpha 1; and FMGP."""
    count, steps = settings.points, settings.steps
    methods: dict[str, Any] = {}
    for start in STARTS:
        for optimiser in OPTIMISERS:
            most = steps if optimiser == "adam" else None
            methods[f"{start}, {optimiser}"] = lw.VaLLA(count, start=start, optimiser=optimiser, steps=most)
    methods |= {"as it comes": lw.VaLLA(count), "alpha=1": lw.VaLLA(count, alpha=1.0, steps=steps)}
    rows = [Row(name, comparison.scored(each, settings.seed), f"VaLLA({count})") for name, each in methods.items()]
    fmgp = lw.FMGP(count) if steps is None else lw.FMGP(count, steps=steps)
    return [*rows, Row("rbf kernel", comparison.scored(fmgp, settings.seed), f"FMGP({count})")]


def _other_networks(x: Tensor, y: Tensor, settings: Inducing, progress: Progress) -> list[Row]:
    """Score VaLLA on networks with other seeds, other draws of the same seeds, and a rate that falls to zero."""
    recipe, seeds = settings.recipe, [settings.seed - k for k in range(settings.networks + 1)]
    networks = {f"seed {seed}": partial(trained_as_published, x, y, recipe, seed) for seed in seeds[1:]}
    networks |= {f"seed {seed}, other draws": partial(train_mlp, x, y, 1, recipe, seed) for seed in seeds}
    networks["other draws, falling rate"] = partial(train_mlp, x, y, 1, replace(recipe, falling=True), settings.seed)
    rows = []
    for name, make in networks.items():
        comparison = Comparison(Task.of(make(), x, y, settings.margin, settings.grid))
        for count in dict.fromkeys((settings.points, max(settings.sizes))):
            scores = {**comparison.scored(lw.VaLLA(count), settings.seed), "γ": comparison.task.gamma}
            rows.append(Row(f"{name}, VaLLA({count})", scores, "other networks"))
        progress(f"other networks: {name}")
    return rows


def _bands(task: Task, settings: Inducing, published: State) -> dict[str, list[float]]:
    """Return, for the picture, the standard deviation of every method on the grid, and its points."""
    count, seed = settings.points, settings.seed
    ella, valla = task.fit(lw.ELLA(count, count), seed)[0], task.fit(lw.VaLLA(count), seed)[0]
    core: Any = valla.posterior
    bands = {
        "exact": (task.exact, None),
        f"Nyström, {count} landmarks": (task.variance(ella), landmarks(task, count, seed)),
        f"VaLLA as published, {settings.published_drawn:,} iterations": (published.variance, published.points),
        f"VaLLA({count})": (task.variance(valla), core.curvature.anchors.inputs),
    }
    arrays = {"x": task.x, "y": task.y, "grid": task.grid, "mean": task.mean}
    for name, (variance, points) in bands.items():
        arrays[f"{name}/std"] = variance.sqrt()
        if points is not None:
            arrays[f"{name}/points"] = points
    return {name: array.detach().reshape(-1).tolist() for name, array in arrays.items()}


def _sensitivity(comparison: Comparison, settings: Inducing, progress: Progress) -> dict[str, list[float]]:
    """Return KL and NLL of every draw, for every number of points and start, with and without learning; and ELLA's."""
    seeds = range(settings.seed, settings.seed + settings.starts)
    arrays: dict[str, list[float]] = {"sizes": [float(size) for size in settings.sizes]}
    for size in settings.sizes:
        methods: dict[str, Any] = {}
        for start in STARTS:
            for label, optimiser in LEARNED.items():
                methods[f"{label}/{start}"] = lw.VaLLA(size, start=start, optimiser=optimiser)
        methods["as started/Nyström"] = lw.ELLA(size, size)
        for name, method in methods.items():
            draws = [comparison.scored(method, seed) for seed in seeds]
            arrays |= {f"{score} {name}/{size}": [each[score] for each in draws] for score in ("KL", "NLL")}
        progress(f"sensitivity: {size} points done")
    return arrays


def _records_of_draws(arrays: dict[str, list[float]], settings: Inducing) -> Iterator[Record]:
    """Yield a record for each draw of the sensitivity study, its repeat the number of the draw."""
    names = [f"{label}/{start}" for start in STARTS for label in LEARNED] + ["as started/Nyström"]
    for size in settings.sizes:
        for name in names:
            label, start = name.split("/")
            for draw in range(settings.starts):
                scores = {score: arrays[f"{score} {name}/{size}"][draw] for score in ("KL", "NLL")}
                yield Record(f"{size} points", f"{start}, {label}", draw, scores)
