"""Error bars by pushing: two regressions with a gap, strength of the push, length of fine-tuning, real tables."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.data import data_folder
from experiments.regression import Table
from experiments.result import Result, Row, mean_scores, plain
from experiments.training import Recipe, mlp, optimise
from lapwing.core.data import Data
from lapwing.errors import LapwingError
from lapwing.methods.hfl.hessian import Hessian
from lapwing.methods.hfl.nonlinear import ResponsePosterior
from lapwing.methods.hfl.objective import Objective
from lapwing.methods.hfl.pushes import Pushes
from lapwing.methods.hfl.responder import Responder
from lapwing.metrics import regression

TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "quadratic": lambda x: x.square(),
    "sinusoid": lambda x: torch.sin(3 * x),
}
STRENGTHS = tuple(10.0 ** (1 - k / 2) for k in range(21))  # ten decades


@dataclass(frozen=True)
class ResponseTask:
    """y = target(x) + noise, with no data in the gap; a tanh network 1-50-1 trained to the minimum of its posterior.

    Noise and prior are known. New points come from the whole range and from the gap; intervals have 95 %.
    """

    tasks: tuple[str, ...] = tuple(TARGETS)
    data: int = 32
    gap: float = 0.7
    reach: float = 2.0
    noise_std: float = 0.1
    precision: float = 0.5
    hidden: int = 50
    seeds: int = 10
    new: int = 400
    pushes: int = 32
    members: int = 5
    epochs: int = 2000  # of the members and of the network with dropout
    steps: tuple[int, ...] = (100, 300, 1000, 3000, 10_000)
    sets: tuple[str, ...] = ("yacht", "boston")
    splits: int = 2
    data_dir: Path | None = None
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Problem:
    """One data set with its network at the minimum, and new points to judge by."""

    model: nn.Sequential
    x: Tensor
    y: Tensor
    settings: ResponseTask
    truth: Callable[[Tensor], Tensor]
    seed: int

    @property
    def likelihood(self) -> lw.Gaussian:
        return lw.Gaussian(noise_std=self.settings.noise_std)

    def fit(self, method: Any, model: nn.Module | None = None) -> lw.Fitted:
        return lw.fit(
            model or self.model, [(self.x, self.y)], self.likelihood, method=method, prior=self.settings.precision,
            progress=False, generator=torch.Generator().manual_seed(self.seed),
        )  # fmt: skip

    def new(self, low: float, high: float, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10_000 + seed)
        x = low + (high - low) * torch.rand(self.settings.new, 1, generator=generator, dtype=torch.float64)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return x, self.truth(x) + self.settings.noise_std * noise


def run(settings: ResponseTask, report: Callable[[str], None] = lambda line: None) -> Result:
    """Coverage and width on both tasks; sensitivity; tables where a data folder is given."""
    begun = time.perf_counter()
    rows: list[Row] = []
    arrays: dict[str, list[float]] = {}
    notes: list[str] = []
    for task in settings.tasks:
        found: dict[str, list[dict[str, float]]] = {}
        for seed in range(settings.seed, settings.seed + settings.seeds):
            problem = made(task, settings, seed)
            for name, scores in _judged(problem).items():
                found.setdefault(name, []).append(scores)
        rows += [Row(name, mean_scores(mine), task) for name, mine in found.items()]
        report(f"{task}: {time.perf_counter() - begun:.0f} s")
    first = made(settings.tasks[0], settings, settings.seed)
    arrays |= _bands(first)
    arrays |= _strengths(first)
    found_steps, lines = _fine_tuned(first)
    arrays, notes = arrays | found_steps, [*notes, *lines]
    report(f"sensitivity: {time.perf_counter() - begun:.0f} s")
    notes += [_cost(first)]
    if settings.data_dir is not None:
        for name in settings.sets:
            rows += _table(name, settings, notes)
            report(f"{name}: {time.perf_counter() - begun:.0f} s")
    seconds = {"total": time.perf_counter() - begun}
    return Result("response", plain(settings), settings.seed, tuple(rows), seconds, arrays, tuple(notes))


def made(task: str, settings: ResponseTask, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    side = torch.rand(settings.data, 1, generator=generator, dtype=torch.float64)
    x = settings.gap + (settings.reach - settings.gap) * side
    x[1::2] *= -1
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    y = TARGETS[task](x) + settings.noise_std * noise
    model = mlp(1, 1, Recipe((settings.hidden,)), seed).double()
    problem = Problem(model, x, y, settings, TARGETS[task], seed)
    return replace(problem, model=minimised(model, x, squared(y, settings.noise_std**2), settings.precision))


def squared(y: Tensor, variance: float) -> Callable[[Tensor], Tensor]:
    """The squared error over 2 φ, of outputs."""
    return lambda f: 0.5 * (f - y).square().sum() / variance


def minimised(
    model: nn.Module, x: Tensor, cost: Callable[[Tensor], Tensor], precision: float, rows: int | None = None
) -> Any:
    """At the minimum of the cost of the outputs at x plus half the precision times |w|².

    L-BFGS comes near and then creeps along flat valleys; Newton's steps with the absolute eigenvalues of the Hessian
    leave saddles behind and end at the minimum to rounding. ``rows``: of a Hessian at once, where all are too many.
    """
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    shapes = [p.shape for p in parameters]
    names = [name for name, _ in model.named_parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([s.numel() for s in shapes])
        values = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        f = torch.func.functional_call(model, values, (x,))
        return cost(f) + 0.5 * precision * flat.square().sum()

    flat = torch.nn.utils.parameters_to_vector(parameters).detach().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [flat],
        max_iter=8000,
        history_size=100,
        tolerance_grad=1e-7,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(flat)
        value.backward()
        return value

    optimiser.step(closure)  # type: ignore[arg-type]
    point = flat.detach()
    for _ in range(60):
        slope = torch.func.grad(loss)(point)
        values, vectors = torch.linalg.eigh(torch.func.jacrev(torch.func.grad(loss), chunk_size=rows)(point))
        step = vectors @ ((vectors.mT @ slope) / values.abs().clamp_min(1e-6 * float(values[-1])))
        decrement, length, here = float(slope @ step), 1.0, float(loss(point))
        while float(loss(point - length * step)) > here - 1e-4 * length * decrement and length > 1e-6:
            length /= 2
        point = point - length * step
        if decrement < 1e-14 or length <= 1e-6:
            break
    torch.nn.utils.vector_to_parameters(point, parameters)
    return model.eval()


def exact_variance(posterior: ResponsePosterior, x: Tensor) -> Tensor:
    """gᵀ H⁻¹ g with the full Hessian, (B,)."""
    responder = posterior.responder
    assert isinstance(responder, Responder)
    start = torch.zeros(len(x), responder.objective.size).to(responder.objective.centre)
    slopes = responder.objective.slopes(start, x.to(start), torch.ones(len(x), 1).to(start))
    return (slopes * responder.hessian.solve(slopes)).sum(1)


def _methods(problem: Problem) -> dict[str, Callable[[], Callable[[Tensor], tuple[Tensor, Tensor]]]]:
    """Names, and what makes mean and epistemic variance of f from new inputs."""
    settings = problem.settings
    grid = torch.linspace(-settings.reach, settings.reach, 81, dtype=torch.float64).unsqueeze(1)
    held = problem.new(-settings.reach, settings.reach, 50_000 + problem.seed)
    held = held[0][:16], held[1][:16]

    def fitted(method: Any, model: nn.Module | None = None) -> Callable[[], Any]:
        def build() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
            posterior = problem.fit(method, model)

            def belief(x: Tensor) -> tuple[Tensor, Tensor]:
                found = posterior.functions(x)
                return found.mean[:, 0], found.variance[:, 0]

            return belief

        return build

    def hessian() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        posterior = problem.fit(lw.HFL(drift=math.inf)).posterior
        assert isinstance(posterior, ResponsePosterior)
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
        "HFL, mean push, calibrated": fitted(pretrained(calibration=[held])),
        "HFL, absolute push": fitted(pretrained(variant="absolute")),
        "HFL, absolute push, calibrated": fitted(pretrained(variant="absolute", calibration=[held])),
        f"HFL, {settings.pushes} random pushes": fitted(pretrained(variant="random", pushes=settings.pushes)),
        f"ensemble of {settings.members}": fitted(
            lw.baselines.Ensemble(train=lambda m, seed: _by_adam(problem, m, seed), members=settings.members)
        ),
        "MC dropout": fitted(lw.baselines.MCDropout(64), _with_dropout(problem)),
    }


def _with_dropout(problem: Problem) -> nn.Module:
    """The same network with a tenth of its units dropped while training."""
    layers = list(mlp(1, 1, Recipe((problem.settings.hidden,)), problem.seed).double())
    return _by_adam(problem, nn.Sequential(layers[0], layers[1], nn.Dropout(0.1), layers[2]), problem.seed)


def _by_adam(problem: Problem, model: nn.Module, seed: int) -> nn.Module:
    """Trained with the same penalty, to no minimum in particular."""
    settings = problem.settings
    decay = settings.precision * settings.noise_std**2 / len(problem.x)
    recipe = Recipe(
        (settings.hidden,), epochs=settings.epochs, batch_size=len(problem.x), learning_rate=1e-2, weight_decay=decay
    )
    optimise(model, problem.x, problem.y, recipe, seed)
    return model


def _judged(problem: Problem) -> dict[str, dict[str, float]]:
    settings = problem.settings
    places = {
        "": problem.new(-settings.reach, settings.reach, problem.seed),
        "gap ": problem.new(-settings.gap, settings.gap, 20_000 + problem.seed),
    }
    found = {}
    for name, build in _methods(problem).items():
        belief = build()
        scores: dict[str, float] = {}
        for place, (x, y) in places.items():
            mean, variance = belief(x)
            scores |= _scored(mean, (variance + settings.noise_std**2).sqrt(), y[:, 0], place)
        found[name] = scores
    return found


def _scored(mean: Tensor, std: Tensor, y: Tensor, place: str = "") -> dict[str, float]:
    low, high = mean - 1.959964 * std, mean + 1.959964 * std
    return {
        f"{place}PICP": regression.coverage(low, high, y),
        f"{place}MPIW": regression.interval_width(low, high),
        f"{place}NLL": regression.nll(mean, std, y),
    }


def _bands(problem: Problem) -> dict[str, list[float]]:
    """What the figure of bands shows."""
    settings = problem.settings
    grid = torch.linspace(-1.5 * settings.reach, 1.5 * settings.reach, 121, dtype=torch.float64).unsqueeze(1)
    arrays = {"grid": grid[:, 0].tolist(), "x": problem.x[:, 0].tolist(), "y": problem.y[:, 0].tolist(),
              "truth": problem.truth(grid)[:, 0].tolist()}  # fmt: skip
    for name, build in _methods(problem).items():
        mean, variance = build()(grid)
        arrays[f"mean/{name}"] = mean.tolist()
        arrays[f"std/{name}"] = variance.clamp_min(0).sqrt().tolist()
    return arrays


def _responder(problem: Problem, dtype: torch.dtype) -> tuple[Responder, ResponsePosterior]:
    """Around the minimum in float64, whatever the dtype of the pushes."""
    posterior = problem.fit(lw.HFL(drift=math.inf)).posterior
    assert isinstance(posterior, ResponsePosterior)
    exact = posterior.responder
    assert isinstance(exact, Responder)
    if dtype == torch.float64:
        return exact, posterior
    start = Objective.build(
        posterior.problem.network, posterior.problem.likelihood, posterior.problem.prior,
        Data([(problem.x, problem.y)], torch.device("cpu")), dtype,
    )  # fmt: skip
    objective = start.recentred((exact.objective.centre - exact.objective.start).to(dtype))
    return Responder(objective, Hessian(objective), 1e-2), posterior


def _strengths(problem: Problem) -> dict[str, list[float]]:
    """The relative error of the variance against the strength of the push, in units of one over its deviation."""
    settings = problem.settings
    x = torch.linspace(-1.5 * settings.reach, 1.5 * settings.reach, 25, dtype=torch.float64).unsqueeze(1)
    arrays = {"strengths": list(STRENGTHS)}
    for dtype, label in ((torch.float64, "float64"), (torch.float32, "float32")):
        responder, posterior = _responder(problem, dtype)
        exact = exact_variance(posterior, x)
        inputs, seeds = x.to(dtype), torch.ones(len(x), 1, dtype=dtype)
        push = lambda d, o=responder.objective, i=inputs, s=seeds: o.slopes(d, i, s)
        read = lambda d, o=responder.objective, i=inputs: o.each_output(d.expand(len(i), -1), i)
        start = torch.zeros(len(x), responder.objective.size, dtype=dtype)
        pushes = Pushes.of(push, read, start, value=lambda reading: reading[:, 0])
        median, worst = [], []
        for strength in STRENGTHS:
            found, _ = responder.at(pushes, (strength / exact.sqrt()).to(dtype))
            error = (found[:, 0].double() / exact - 1).abs().nan_to_num(1e6).clamp(1e-16, 1e6)
            median.append(float(error.median()))
            worst.append(float(error.max()))
        arrays[f"median/{label}"], arrays[f"worst/{label}"] = median, worst
    return arrays


def _fine_tuned(problem: Problem) -> tuple[dict[str, list[float]], list[str]]:
    """The share of the variance that Adam has recovered, in the data, in the gap and outside."""
    settings = problem.settings
    places = {"data": 1.3, "gap": 0.2, "outside": 1.4 * settings.reach}
    x = torch.tensor(list(places.values()), dtype=torch.float64).unsqueeze(1)
    reference = problem.fit(lw.HFL(drift=math.inf)).posterior
    assert isinstance(reference, ResponsePosterior)
    exact = exact_variance(reference, x)
    shares = []
    for steps in settings.steps:
        posterior = problem.fit(lw.HFL(solver="adam", steps=steps, batch_size=settings.data)).posterior
        assert isinstance(posterior, ResponsePosterior)
        shares.append(posterior.respond(x).cov[:, 0] / exact)
    table = torch.stack(shares)
    arrays = {"steps": [float(s) for s in settings.steps]}
    arrays |= {f"recovered/{name}": table[:, i].tolist() for i, name in enumerate(places)}
    told = lambda row: ", ".join(f"{share:.0%} {name}" for share, name in zip(row.tolist(), places, strict=True))
    lines = [f"Adam, {steps} steps: {told(row)}" for steps, row in zip(settings.steps, table, strict=True)]
    return arrays, lines


def _cost(problem: Problem) -> str:
    posterior = problem.fit(lw.HFL(drift=math.inf)).posterior
    assert isinstance(posterior, ResponsePosterior)
    x = torch.linspace(-2, 2, 20, dtype=torch.float64).unsqueeze(1)
    found = posterior.respond(x)
    return f"HFL, each point: {2 * found.steps} gradients over all data for each point (both signs, every strength)"


def _table(name: str, settings: ResponseTask, notes: list[str]) -> list[Row]:
    """HFL against exact Laplace on the same networks: standard and gap splits of a table."""
    path = data_folder(settings.data_dir) / f"uci_{name}.npz"
    rows = []
    for kind, prefix in (("standard", ""), ("gap", "gap_")):
        found: dict[str, list[dict[str, float]]] = {}
        for split in range(settings.splits):
            try:
                scores = _split(path, prefix, split, settings)
            except LapwingError as error:
                notes.append(f"{name}, {kind} split {split}: {error}")
                continue
            for method, mine in scores.items():
                found.setdefault(method, []).append(mine)
        rows += [Row(method, mean_scores(mine), f"{name}, {kind}") for method, mine in found.items()]
    return rows


def _split(path: Path, prefix: str, split: int, settings: ResponseTask) -> dict[str, dict[str, float]]:
    with np.load(path, allow_pickle=False) as file:
        x, y = (torch.from_numpy(file[key].astype(np.float64)) for key in ("X", "y"))
        train, test = (torch.from_numpy(file[f"{prefix}{part}_{split}"].astype(np.int64)) for part in ("train", "test"))
    table = Table(x[train], y[train].reshape(-1), x[test][:100], y[test].reshape(-1)[:100])
    inputs, targets = table.training
    model, precision, variance = _fitted_network(inputs, targets, settings, split)
    likelihood = lw.Gaussian(noise_std=variance**0.5)
    new, scale = table.scale_x(table.x_test), table.scale_y
    methods: dict[str, Any] = {
        "noise only": lw.baselines.MapOnly(),
        "GGN": lw.Full(),
        "Kron": lw.Kron(),
        "HFL, each point": lw.HFL(drift=math.inf),
    }
    variances, scores = {}, {}
    for method, chosen in methods.items():
        posterior = lw.fit(model, [(inputs, targets)], likelihood, method=chosen, prior=precision, progress=False)
        belief = posterior.functions(new)
        variances[method] = belief.variance[:, 0]
        std = (belief.variance[:, 0] + variance).sqrt() * scale.std
        scores[method] = _scored(belief.mean[:, 0] * scale.std + scale.mean, std, table.y_test)
        if isinstance(posterior.posterior, ResponsePosterior):
            variances["full Hessian"] = exact_variance(posterior.posterior, new)
    exact = variances["full Hessian"]
    for method in methods:
        scores[method]["rank correlation"] = ranked(variances[method], exact)
    worst = float((variances["HFL, each point"] / exact - 1).abs().max())
    scores["HFL, each point"]["error"] = worst
    for method in methods:
        scores[method].setdefault("error", float((variances[method] / exact - 1).abs().median()))
    return scores


def _fitted_network(x: Tensor, y: Tensor, settings: ResponseTask, seed: int) -> tuple[nn.Module, float, float]:
    """Trained, given a precision by the evidence, and taken to the minimum under it."""
    start = mlp(x.shape[1], 1, Recipe((settings.hidden,)), seed).double()
    optimise(start, x, y, Recipe((settings.hidden,), epochs=60, batch_size=64), seed)
    posterior = lw.fit(start, [(x, y)], "regression", method=lw.Full(), progress=False)
    precision, variance = float(posterior.prior.values), float(posterior.likelihood.dispersion)
    return minimised(start, x, squared(y, variance), precision), precision, variance


def ranked(a: Tensor, b: Tensor) -> float:
    """Spearman's correlation."""
    if float(a.std()) == 0:
        return 0.0
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])
