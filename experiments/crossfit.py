"""Is the network of all rows calibrated by networks that have not seen some? Every rule has the same labelled rows."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from typing_extensions import Self

import lapwing as lw
from experiments.crossfit_tasks import TASKS, Pair, Task, strange
from experiments.data import data_folder
from experiments.engine.contract import Record
from experiments.options import Progress
from lapwing.decisions.guarantees import conformal_rank
from lapwing.demo.training import crps
from lapwing.tuners.mixing import TEMPERATURES

LEVEL = 0.95
OTHERS = 4  # further members of an ensemble
OWN = 100  # seed of the network of all rows
Scores = dict[str, float]
Scored = tuple[Scores, float, float, float]  # with further trainings, networks that predict, and seconds


@dataclass(frozen=True)
class Crossfitting:
    """Settings: which tasks, and how many seeds, each another draw of the rows and of the networks.

    Rules: "plain", "default" and "ensemble" train on all rows; "temperature=", "validation=" and "ensemble,
    temperature=" hold out a fifth of them, 200 at most; "sibling", "crossfit", "mixture" and "CV+" hold out none, and
    nor does "sibling()", which trains a copy of the network without the recipe of the task.
    Temperatures are those of ``lw.tuners.Integrate``; for regressions they refit the noise.
    """

    data_dir: Path | None = None
    tasks: tuple[str, ...] = tuple(TASKS)
    seeds: int = 3
    folds: int = 5
    seed: int = 0

    name: ClassVar[str] = "crossfit"
    title: ClassVar[str] = "calibrated without a held-out row: cross-fitting against held-out rows and ensembles"
    choosing: ClassVar[tuple[str, ...]] = ("tasks", "seeds")
    columns: ClassVar[tuple[str, ...]] = ("NLL", "ECE", "coverage 95 %", "width", "accuracy", "RMSE", "AUROC")

    @classmethod
    def quick(cls) -> Self:
        """Return the quick form: small tasks of scikit-learn, one seed."""
        return cls(tasks=("iris, MLP", "cancer, BatchNorm MLP", "waves, MLP", "diabetes, MLP"), seeds=1)

    @classmethod
    def full(cls) -> Self:
        """Return the full form. It needs a folder with the shared sets and those of ``experiments.package_tables``."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return one unit for each task and seed, those of large networks last."""
        order = sorted(self.tasks, key=lambda task: -TASKS[task].seeds)
        pairs = ((task, seed) for seed in range(self.seeds) for task in order if seed < TASKS[task].seeds)
        return tuple(f"{task}/{self.seed + seed}" for task, seed in pairs)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train all networks of one task and seed, and score every rule on the same test rows."""
        name, seed = unit.rsplit("/", 1)
        task = TASKS[name]
        folder = data_folder(self.data_dir) if self.data_dir else Path()
        train, test = task.parts(folder, int(seed))
        run = Run(task, train, test, int(seed), self.folds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lw.errors.CalibrationWarning)  # the table shows what it says
            rules = run.numbers() if train[1].is_floating_point() else run.classes()
            for rule, (scores, trainings, networks, seconds) in rules.items():
                costs = {"trainings": float(trainings), "networks": float(networks)}
                yield Record(name, rule, int(seed), scores | costs, seconds)


@dataclass(eq=False)
class Run:
    """One task with one seed, and the networks that are trained so far."""

    task: Task
    train: Pair
    test: Pair
    seed: int
    folds: int
    trained: dict[tuple[bytes, int], tuple[nn.Module, float]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.train[0])

    @property
    def all_rows(self) -> Tensor:
        return torch.arange(self.count)

    @property
    def rest(self) -> Tensor:
        """The rows that rules with held-out rows train on; the rows are in random order."""
        return self.all_rows[min(200, self.count // 5) :]

    @property
    def held_out(self) -> Pair:
        return self.take(self.all_rows[: min(200, self.count // 5)])

    def take(self, rows: Tensor) -> Pair:
        return self.train[0][rows], self.train[1][rows]

    def network(self, rows: Tensor, seed: int) -> nn.Module:
        """Return the network of these rows and this seed, trained once."""
        key = (rows.numpy().tobytes(), seed)
        if key not in self.trained:
            start = time.process_time()
            y = self.train[1]
            outputs = 1 if y.is_floating_point() else int(torch.cat([y, self.test[1]]).max()) + 1
            model = self.task.train(self.take(rows), outputs, 1000 * self.seed + seed)
            self.trained[key] = model, time.process_time() - start
        return self.trained[key][0]

    def rules(self) -> dict[str, tuple[Any, float, float, float]]:
        """Return what is common to both tasks: posteriors with further trainings, networks, and seconds."""
        likelihood = "regression" if self.train[1].is_floating_point() else "classification"
        net, rest = self.network(self.all_rows, OWN), self.take(self.rest)
        part = self.network(self.rest, OWN)
        fit = partial(lw.fit, likelihood=likelihood, progress=False)
        rescaled = lambda: fit(part, rest, method=lw.baselines.MapOnly()).tuned(
            lw.tuners.Integrate(self.held_out, offsets=())
        )
        crossfit = lambda: lw.crossfit(
            self.network, self.train, likelihood, model=net, folds=self.folds, progress=False
        )
        works: dict[str, tuple[Callable[[], Any], float, float]] = {
            "plain": (lambda: fit(net, self.train, method=lw.baselines.MapOnly()), 0, 1),
            "default": (lambda: fit(net, self.train), 0, 1),
            "temperature=": (rescaled, 0, 1),
            "validation=": (lambda: fit(part, rest, validation=self.held_out), 0, 1),
            "sibling": (lambda: fit(net, self.train, validation=lw.sibling(self.network)), 1, 1),
            "sibling()": (lambda: fit(net, self.train, validation=lw.sibling()), 1, 1),
            "crossfit": (crossfit, self.folds, 1),
        }
        found: dict[str, tuple[Any, float, float, float]] = {}
        folds_seconds = lambda used: sum(seconds for (_, seed), (_, seconds) in self.trained.items() if seed < used)
        for rule, (work, trainings, networks) in works.items():
            start, known = time.process_time(), folds_seconds(int(trainings) if rule != "sibling()" else 0)
            result = work()
            found[rule] = result, trainings, networks, time.process_time() - start + known
        crossed, trainings, _, seconds = found["crossfit"]
        found["crossfit"] = crossed.posterior, trainings, 1, seconds
        found["mixture"] = crossed.mixture, trainings, self.folds + 1, seconds
        found["CV+"] = crossed, trainings, self.folds, seconds
        return found

    def classes(self) -> dict[str, Scored]:
        """Return the scores of every rule for class probabilities."""
        x, y = self.test
        far = strange(x)
        found = self.rules()
        del found["CV+"]
        scored: dict[str, Scored] = {}
        for rule, (posterior, trainings, networks, seconds) in found.items():
            scores = _class_scores(posterior.predict(x).probs, y, posterior.predict(far).probs)
            scored[rule] = scores, trainings, networks, seconds
        for rule, rows in (("ensemble", self.all_rows), ("ensemble, temperature=", self.rest)):
            start = time.process_time()
            models = [self.network(rows, OWN + k) for k in range(OTHERS + 1)]
            heat = 1.0
            if rule != "ensemble":
                heat = _temperature(_logits(models, self.held_out[0]), self.held_out[1])
            probs, other = ((_logits(models, each) / heat).softmax(-1).mean(0) for each in (x, far))
            seconds = time.process_time() - start
            scored[rule] = _class_scores(probs, y, other), OTHERS, OTHERS + 1, seconds
        logits = _logits([self.network(self.all_rows, OWN)], x)
        best = min((10 ** (k / 40) for k in range(-40, 61)), key=lambda t: _nll((logits[0] / t).softmax(-1), y))
        probs, other = ((_logits([self.network(self.all_rows, OWN)], each)[0] / best).softmax(-1) for each in (x, far))
        scored["hindsight"] = (_class_scores(probs, y, other), 0, 1, 0.0)
        return scored

    def numbers(self) -> dict[str, Scored]:
        """Return the scores of every rule for numbers, in units of the targets' standard deviation."""
        x, y = self.test
        far = strange(x)
        found = self.rules()
        crossed, *costs = found.pop("CV+")
        scored: dict[str, Scored] = {}
        for rule, (posterior, trainings, networks, seconds) in found.items():
            predictive = posterior.predict(x)
            with torch.no_grad():
                scores = {
                    "NLL": -float(predictive.log_prob(y).mean()),
                    "CRPS": float(crps(predictive, y).mean()),
                    "RMSE": lw.metrics.rmse(predictive.mean, y),
                    "AUROC": _auroc(predictive.std, posterior.predict(far).std),
                    **_interval_scores(predictive.interval(LEVEL), y),
                }
            scored[rule] = scores, trainings, networks, seconds
        for rule, rows in (("ensemble", self.all_rows), ("ensemble, temperature=", self.rest)):
            start = time.process_time()
            models = [self.network(rows, OWN + k) for k in range(OTHERS + 1)]
            known = self.train if rule == "ensemble" else self.held_out
            f, seen = _logits(models, x), _logits(models, known[0])
            spread = seen.var(0) if rule != "ensemble" else torch.zeros_like(seen[0])
            noise = _noise(seen.mean(0) - known[1], spread)
            seconds = time.process_time() - start
            ends = [_logits(models, each).var(0).add(noise).sqrt() for each in (x, far)]
            belief = Normal(f.mean(0), ends[0])
            low, high = belief.icdf(torch.tensor(0.5 - LEVEL / 2)), belief.icdf(torch.tensor(0.5 + LEVEL / 2))
            scores = {
                "NLL": -float(belief.log_prob(y).mean()),
                "CRPS": float(_normal_crps(belief, y).mean()),
                "RMSE": lw.metrics.rmse(belief.mean, y),
                "AUROC": _auroc(*ends),
                **_interval_scores((low, high), y),
            }
            scored[rule] = (scores, OTHERS, OTHERS + 1, seconds)
        scored["CV+"] = _interval_scores(crossed.interval(x, LEVEL), y), costs[0], costs[1], costs[2]
        part = self.network(self.rest, OWN)
        errors = (_logits([part], self.held_out[0])[0] - self.held_out[1]).abs().flatten().sort().values
        radius = errors[min(len(errors), conformal_rank(len(errors), LEVEL)) - 1]
        f = _logits([part], x)[0]
        scored["split conformal"] = (
            _interval_scores((f - radius, f + radius), y) | {"RMSE": lw.metrics.rmse(f, y)}, 0, 1, 0.0,
        )  # fmt: skip
        return scored


def _logits(models: list[nn.Module], x: Tensor) -> Tensor:
    """Return the outputs of networks, (K, B, C)."""
    with torch.no_grad():
        return torch.stack([model(x) for model in models])


def _nll(probs: Tensor, y: Tensor) -> float:
    return -float(probs.double().gather(1, y[:, None]).clamp_min(1e-300).log().mean())


def _class_scores(probs: Tensor, y: Tensor, far: Tensor) -> Scores:
    entropy = lambda p: -(p.double() * p.double().clamp_min(1e-300).log()).sum(1)
    return {
        "NLL": _nll(probs, y),
        "ECE": lw.metrics.ece(probs, y),
        "accuracy": lw.metrics.accuracy(probs, y),
        "AUROC": lw.metrics.auroc(entropy(probs), entropy(far)),
    }


def _interval_scores(ends: tuple[Tensor, Tensor], y: Tensor) -> Scores:
    return {"coverage 95 %": lw.metrics.coverage(*ends, y), "width": lw.metrics.interval_width(*ends)}


def _auroc(known: Tensor, far: Tensor) -> float:
    return float(lw.metrics.auroc(known.flatten(), far.flatten()))


def _temperature(logits: Tensor, y: Tensor) -> float:
    """Return the temperature of the members with the largest posterior probability, under the prior of Integrate."""
    cost = lambda t: _nll((logits / t).softmax(-1).mean(0), y) * len(y) + 0.5 * (torch.tensor(t).log() / 0.5) ** 2
    return float(min(TEMPERATURES, key=cost))


def _noise(residuals: Tensor, spread: Tensor) -> Tensor:
    """Return the variance of the noise with the largest likelihood, beside the spread of the members."""
    tried = residuals.square().mean() * torch.logspace(-3, 1, 81)
    return max(tried, key=lambda phi: Normal(0.0, (spread + phi).sqrt()).log_prob(residuals).sum())


def _normal_crps(belief: Normal, y: Tensor) -> Tensor:
    z = (y - belief.mean) / belief.stddev
    unit = Normal(0.0, 1.0)
    return belief.stddev * (z * (2 * unit.cdf(z) - 1) + 2 * unit.log_prob(z).exp() - math.pi**-0.5)
