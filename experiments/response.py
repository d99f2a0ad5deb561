"""HFL, error bars by pushing: two regressions with a gap, strength of the push, length of fine-tuning, real tables."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.minimum import exact_variance
from experiments.options import Progress, add_data_dir, add_quick, add_seeds, silent
from experiments.repeats import mean_scores
from experiments.response_picture import picture
from experiments.response_sensitivity import cost, fine_tuned, strengths
from experiments.response_tables import table_rows, table_scores
from experiments.response_task import Problem, ResponseTask, interval_scores, made
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.demo.training import TrainingSettings, mlp, optimise

Belief = Callable[[Tensor], tuple[Tensor, Tensor]]  # new inputs -> mean and epistemic variance of f, (B,) each


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_data_dir(parser, "the uci_NAME.npz files, without which no tables are run")
    add_seeds(parser, 10)
    add_quick(parser, "few seeds and steps")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = ResponseTask(data_dir=arguments.data_dir, seeds=arguments.seeds, seed=arguments.seed)
    if arguments.quick:
        short = ResponseTask.quick()
        settings = replace(settings, seeds=1, steps=short.steps, members=short.members, epochs=short.epochs, new=50)
    return ExperimentReport(arguments.out / "response.json", (run(settings, progress),), {"response.png": picture})


def run(settings: ResponseTask, progress: Progress = silent) -> Result:
    """Return coverage and width on both tasks, the sensitivity, and tables if a data folder is given."""
    start = time.perf_counter()
    rows: list[Row] = []
    for task in settings.tasks:
        scores_of: dict[str, list[dict[str, float]]] = {}
        for seed in range(settings.seed, settings.seed + settings.seeds):
            for name, scores in _scores(made(task, settings, seed)).items():
                scores_of.setdefault(name, []).append(scores)
        rows += [Row(name, mean_scores(scores), task) for name, scores in scores_of.items()]
        progress(f"{task}: {time.perf_counter() - start:.0f} s")
    first = made(settings.tasks[0], settings, settings.seed)
    arrays = _bands(first) | strengths(first)
    recovered, lines = fine_tuned(first)
    arrays |= recovered
    progress(f"sensitivity: {time.perf_counter() - start:.0f} s")
    notes = [*lines, cost(first)]
    for name in settings.sets if settings.data_dir is not None else ():
        rows += table_rows(name, settings, notes)
        progress(f"{name}: {time.perf_counter() - start:.0f} s")
    seconds = {"total": time.perf_counter() - start}
    return Result("response", plain(settings), settings.seed, tuple(rows), seconds, arrays, tuple(notes))


def scores_of_unit(settings: ResponseTask, name: str, repeat: int) -> dict[str, dict[str, float]]:
    """Return the scores of every method: on a task from one seed, or on one split of a table ("yacht/gap")."""
    table, slash, kind = name.partition("/")
    return table_scores(table, kind, repeat, settings) if slash else _scores(made(name, settings, repeat))


def sensitivity(settings: ResponseTask) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by group and row, the errors for every strength of the push and the shares that fine-tuning recovers."""
    problem = made(settings.tasks[0], settings, settings.seed)
    errors, shares = strengths(problem), fine_tuned(problem)[0]
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in ("float64", "float32"):
        columns = zip(errors["strengths"], errors[f"median/{dtype}"], errors[f"worst/{dtype}"], strict=True)
        groups[f"push, {dtype}"] = {
            f"strength {strength:.1e}": {"median error": median, "largest error": worst}
            for strength, median, worst in columns
        }
    recovered = [name for name in shares if name.startswith("recovered/")]
    groups["fine-tuning"] = {
        f"Adam, {steps:.0f} steps": {name: shares[name][i] for name in recovered}
        for i, steps in enumerate(shares["steps"])
    }
    return groups


def _methods(problem: Problem) -> dict[str, Callable[[], Belief]]:
    """Return, by name, functions that fit a method."""
    settings = problem.settings
    grid = torch.linspace(-settings.reach, settings.reach, 81, dtype=torch.float64).unsqueeze(1)
    x, y = problem.new(-settings.reach, settings.reach, 50_000 + problem.seed)
    held_out = [(x[:16], y[:16])]

    def fitted(method: Any, model: nn.Module | None = None) -> Callable[[], Belief]:
        def build() -> Belief:
            posterior = problem.fit(method, model)

            def belief(x: Tensor) -> tuple[Tensor, Tensor]:
                outputs = posterior.functions(x)
                return outputs.mean[:, 0], outputs.variance[:, 0]

            return belief

        return build

    def hessian() -> Belief:
        posterior = problem.responses()
        return lambda x: (problem.model(x).detach()[:, 0], exact_variance(posterior, x))

    pretrained = lambda **options: lw.HFL("pretrained", evaluation=grid, drift=math.inf, **options)
    return {
        "noise only": fitted(lw.baselines.MapOnly()),
        "full Hessian": hessian,
        "HFL, each point": fitted(lw.HFL(drift=math.inf)),
        "HFL, linearised": fitted(lw.HFL("linearised")),
        "GGN": fitted(lw.Full()),
        "Kron": fitted(lw.Kron()),
        "Diagonal": fitted(lw.Diagonal()),
        "HFL, mean push": fitted(pretrained()),
        "HFL, mean push, calibrated": fitted(pretrained(calibration=held_out)),
        "HFL, absolute push": fitted(pretrained(variant="absolute")),
        "HFL, absolute push, calibrated": fitted(pretrained(variant="absolute", calibration=held_out)),
        f"HFL, {settings.pushes} random pushes": fitted(pretrained(variant="random", pushes=settings.pushes)),
        f"ensemble of {settings.members}": fitted(
            lw.baselines.Ensemble(train=lambda m, seed: _by_adam(problem, m, seed), members=settings.members)
        ),
        "MC dropout": fitted(lw.baselines.MCDropout(64), _with_dropout(problem)),
    }


def _with_dropout(problem: Problem) -> nn.Module:
    """Train the same network with a dropout of one tenth."""
    layers = list(mlp(1, 1, TrainingSettings((problem.settings.hidden,)), problem.seed).double())
    return _by_adam(problem, nn.Sequential(layers[0], layers[1], nn.Dropout(0.1), layers[2]), problem.seed)


def _by_adam(problem: Problem, model: nn.Module, seed: int) -> nn.Module:
    """Train the model in place by Adam with the same penalty, for a fixed number of epochs, and return it."""
    settings = problem.settings
    decay = settings.precision * settings.noise_std**2 / len(problem.x)
    recipe = TrainingSettings(
        (settings.hidden,), epochs=settings.epochs, batch_size=len(problem.x), learning_rate=1e-2, weight_decay=decay
    )
    optimise(model, problem.x, problem.y, recipe, seed)
    return model


def _scores(problem: Problem) -> dict[str, dict[str, float]]:
    """Return the scores of every method on new points from the whole range and from the gap."""
    settings = problem.settings
    places = {
        "": problem.new(-settings.reach, settings.reach, problem.seed),
        "gap ": problem.new(-settings.gap, settings.gap, 20_000 + problem.seed),
    }
    scores_of = {}
    for name, build in _methods(problem).items():
        belief = build()
        scores: dict[str, float] = {}
        for place, (x, y) in places.items():
            mean, variance = belief(x)
            scores |= interval_scores(mean, (variance + settings.noise_std**2).sqrt(), y[:, 0], place)
        scores_of[name] = scores
    return scores_of


def _bands(problem: Problem) -> dict[str, list[float]]:
    """Return mean and standard deviation of every method on a grid, for the picture."""
    settings = problem.settings
    grid = torch.linspace(-1.5 * settings.reach, 1.5 * settings.reach, 121, dtype=torch.float64).unsqueeze(1)
    arrays = {"grid": grid[:, 0].tolist(), "x": problem.x[:, 0].tolist(), "y": problem.y[:, 0].tolist(),
              "truth": problem.truth(grid)[:, 0].tolist()}  # fmt: skip
    for name, build in _methods(problem).items():
        mean, variance = build()(grid)
        arrays[f"mean/{name}"] = mean.tolist()
        arrays[f"std/{name}"] = variance.clamp_min(0).sqrt().tolist()
    return arrays
