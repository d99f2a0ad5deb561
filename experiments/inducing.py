"""Inducing points on functions of one input: how near to the exact posterior they come, and where they fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from experiments.result import Result, Row, mean_scores, plain
from experiments.training import ACTIVATIONS, Recipe, trained
from lapwing.core.data import Data
from lapwing.core.pool import Pool
from lapwing.core.random import derived_generator
from lapwing.errors import DataError
from lapwing.linalg.kmeans import kmeans
from lapwing.methods.inducing.anchors import Anchors
from lapwing.metrics import regression
from lapwing.priors.kernel import prior_kernel

STARTS, OPTIMISERS = ("greedy", "kmeans", "random"), ("none", "lbfgs", "adam")
LEARNED = {"as started": "none", "learned": "lbfgs"}
RECIPE = Recipe(
    epochs=10**9, max_steps=12_000, batch_size=100, learning_rate=1e-3, weight_decay=0.0, falling=False
)  # as on the published task
SEED = 2147483647
Report = Callable[[str], None]


@dataclass(frozen=True)
class Inducing:
    """The toy of VaLLA: 400 points in three heaps, and a grid that goes ``margin`` beyond them on both sides.

    Precision and noise are learned once, by the evidence of the exact posterior, and are the same for all methods.
    ``draws`` of landmarks are averaged; ``starts`` is the number of draws for each size of the sensitivity study, and
    ``networks`` the number of networks trained from other seeds, and from other draws of the same seeds.
    The function behind the toy is not known, and the network learns from all of it. So for the NLL every method is
    fitted once more, to a second network that has not seen every ``held``-th row, and judged by these.
    """

    data_dir: Path
    recipe: Recipe = RECIPE
    points: int = 20
    margin: float = 5.0
    grid: int = 200
    draws: int = 10
    published: tuple[int, ...] = (2_000, 5_000, 10_000, 20_000)  # iterations after which to look
    shown: int = 10_000  # which of them is drawn
    sizes: tuple[int, ...] = (3, 5, 8, 10, 15, 20, 30)
    starts: int = 5
    networks: int = 3
    held: int = 5
    steps: int | None = None  # of methods that learn by Adam; their own where there is no number
    seed: int = SEED


@dataclass(frozen=True, eq=False)
class _Task:
    """Data, a network, and the exact posterior, whose precision and noise all methods share; where to look at f."""

    x: Tensor
    y: Tensor
    grid: Tensor
    full: lw.Fitted
    seconds: float
    held: _HeldOut | None = None

    @classmethod
    def of(cls, model: nn.Module, x: Tensor, y: Tensor, margin: float, count: int) -> _Task:
        begun = time.perf_counter()
        full = lw.fit(
            model, (x, y), lw.Gaussian(), method=lw.Full(), tuner=lw.tuners.MaximiseEvidence(noise=True), progress=False
        )
        grid = torch.linspace(float(x.min()) - margin, float(x.max()) + margin, count, dtype=x.dtype)
        return cls(x, y, grid.unsqueeze(1), full, time.perf_counter() - begun)

    @cached_property
    def noise(self) -> float:
        """The variance of the noise."""
        return float(self.full.likelihood.dispersion)

    @cached_property
    def exact(self) -> Tensor:
        """The variance of f on the grid, (G,)."""
        return self.variance(self.full)

    @cached_property
    def evidence(self) -> float:
        return float(self.full.log_evidence())

    def variance(self, fitted: lw.Fitted) -> Tensor:
        return fitted.functions(self.grid).cov.reshape(-1)

    def fit(self, method: Any, seed: int) -> tuple[lw.Fitted, float]:
        """The method under the shared precision and noise, and how long it took."""
        begun = time.perf_counter()
        fitted = lw.fit(
            self.full.network.model, (self.x, self.y), lw.Gaussian(noise_std=self.noise**0.5), method=method,
            prior=lw.isotropic(float(self.full.prior.values)), generator=torch.Generator().manual_seed(seed),
            progress=False,
        )  # fmt: skip
        return fitted, time.perf_counter() - begun

    def scores(self, variance: Tensor, nll: float | None, gap: float | None, seconds: float) -> dict[str, float]:
        found = {
            "KL": divergence(self.exact, variance),
            "KL with noise": divergence(self.exact + self.noise, variance + self.noise),
            "NLL": nll,
            "evidence gap": gap,
            "seconds": seconds,
        }
        return {name: score for name, score in found.items() if score is not None}

    def scored(self, method: Any, seed: int) -> dict[str, float]:
        fitted, seconds = self.fit(method, seed)
        try:
            gap = self.evidence - float(fitted.log_evidence())
        except lw.errors.UnsupportedError:  # learned by predicting, or no Laplace posterior
            gap = None
        nll = None if self.held is None else self.held.nll(self.held.task.fit(method, seed)[0])
        return self.scores(self.variance(fitted), nll, gap, seconds)


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """A task whose network has not seen some rows. Its grid is their inputs; their targets are (G, 1)."""

    task: _Task
    targets: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, settings: Inducing) -> _HeldOut:
        held = torch.arange(len(x)) % settings.held == 0
        rest = x[~held], y[~held]
        model = trained_as_published(*rest, settings.recipe, settings.seed)
        task = _Task.of(model, *rest, settings.margin, settings.grid)
        return cls(replace(task, grid=x[held]), y[held])

    def nll(self, fitted: lw.Fitted) -> float:
        found = fitted.predict(self.task.grid)
        return regression.nll(found.mean, found.std, self.targets)

    def nll_of(self, variance: Tensor) -> float:
        """Of the network with this variance of f, (G,), and the shared noise."""
        mean = self.task.full.functions(self.task.grid).mean
        return regression.nll(mean, (variance + self.task.noise).sqrt().unsqueeze(1), self.targets)


def divergence(exact: Tensor, found: Tensor) -> float:
    """KL(N(f, exact) || N(f, found)), summed over inputs.

    >>> round(divergence(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0])), 4)
    0.0966
    """
    ratio = exact.double() / found.double()
    return float(0.5 * (ratio - 1 - ratio.log()).sum())


def run(settings: Inducing, report: Report = lambda line: None) -> Result:
    """Every method at one number of points; then other numbers, other starts and other networks."""
    begun = time.perf_counter()
    x, y = read_toy(settings.data_dir)
    model = trained_as_published(x, y, settings.recipe, settings.seed)
    held = _HeldOut.of(x, y, settings)
    task = replace(_Task.of(model, x, y, settings.margin, settings.grid), held=held)
    report(f"networks and exact posteriors: {time.perf_counter() - begun:.0f} s")
    published = _learned_as_published(task, settings, report)
    unseen = _learned_as_published(held.task, settings, report)
    rows = [Row("exact", task.scores(task.exact, held.nll(held.task.full), 0.0, task.seconds), "Full")]
    rows += _nystrom(task, settings)
    for count, found in published.items():
        scores = task.scores(found.variance, held.nll_of(unseen[count].variance), found.gap, found.seconds)
        rows.append(Row(f"{count:,} iterations", scores, "VaLLA as published"))
    rows += _ours(task, settings)
    report(f"methods: {time.perf_counter() - begun:.0f} s")
    arrays = {**_bands(task, settings, published[settings.shown]), **_sensitivity(task, settings, report)}
    arrays["NLL exact"] = [held.nll(held.task.full)]
    others, gammas = _other_networks(x, y, settings, report)
    notes = (
        f"precision {float(task.full.prior.values):.3g}, noise std {task.noise**0.5:.3g}, "
        f"γ {task.full.effective_parameters().total:.1f}, log evidence {task.evidence:.2f}",
        f"for the NLL: {len(held.targets)} rows held out, γ {held.task.full.effective_parameters().total:.1f}",
        *gammas,
    )
    seconds = {"total": time.perf_counter() - begun}
    return Result("inducing", plain(settings), settings.seed, (*rows, *others), seconds, arrays, notes)


def read_toy(folder: Path) -> tuple[Tensor, Tensor]:
    """Inputs and targets (N, 1) of toy1d.npz."""
    path = folder / "toy1d.npz"
    if not path.exists():
        raise DataError(f"{path.name} is not in the data folder; expected a key valla with inputs and targets, (N, 2).")
    with np.load(path, allow_pickle=False) as file:
        table = torch.from_numpy(file["valla"]).double()
    return table[:, :1].contiguous(), table[:, 1:].contiguous()


def _nystrom(task: _Task, settings: Inducing) -> list[Row]:
    """As many landmarks as directions, over draws; and all data as landmarks."""
    count, every = settings.points, len(task.x)
    rows = []
    for residual, suffix in ((False, ""), (True, ", residual")):
        method = lw.ELLA(count, count, residual)
        draws = [task.scored(method, settings.seed + k) for k in range(settings.draws)]
        kl = torch.tensor([scores["KL"] for scores in draws])
        spread = {"KL sd": float(kl.std()), "KL min": float(kl.min()), "KL max": float(kl.max())}
        rows.append(Row(f"{count} landmarks{suffix}", {**mean_scores(draws), **spread}, "ELLA"))
    for residual, suffix in ((False, ""), (True, ", residual")):
        scores = task.scored(lw.ELLA(every, count, residual), settings.seed)
        rows.append(Row(f"{every} landmarks{suffix}", scores, "ELLA"))
    return rows


def _ours(task: _Task, settings: Inducing) -> list[Row]:
    """VaLLA from every start by every optimiser, as it comes, and by predicting; FMGP."""
    count, steps = settings.points, settings.steps
    methods: dict[str, Any] = {}
    for start in STARTS:
        for optimiser in OPTIMISERS:
            most = steps if optimiser == "adam" else None
            methods[f"{start}, {optimiser}"] = lw.VaLLA(count, start=start, optimiser=optimiser, steps=most)
    methods |= {"as it comes": lw.VaLLA(count), "alpha=1": lw.VaLLA(count, alpha=1.0, steps=steps)}
    rows = [Row(name, task.scored(method, settings.seed), f"VaLLA({count})") for name, method in methods.items()]
    free = lw.FMGP(count) if steps is None else lw.FMGP(count, steps=steps)
    return [*rows, Row("rbf kernel", task.scored(free, settings.seed), f"FMGP({count})")]


def trained_as_published(x: Tensor, y: Tensor, recipe: Recipe, seed: int) -> nn.Sequential:
    """With the random numbers of the published demonstration: a seed alone does not make the network.

    Weights are drawn in float64, and batches come from a DataLoader that goes on with the same global generator.
    """
    sizes, layers = (x.shape[1], *recipe.hidden, 1), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for d_in, d_out in pairwise(sizes):
            layers += [nn.Linear(d_in, d_out, dtype=torch.float64), ACTIVATIONS[recipe.activation]()]
        model = nn.Sequential(*layers[:-1])
        optimiser = torch.optim.Adam(model.parameters(), lr=recipe.learning_rate)
        loader = DataLoader(TensorDataset(x, y), batch_size=recipe.batch_size, shuffle=True)
        endless = (batch for _ in iter(int, 1) for batch in loader)
        for inputs, targets in islice(endless, recipe.max_steps):
            optimiser.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimiser.step()
    optimiser.zero_grad()
    return model.eval()


def _other_networks(x: Tensor, y: Tensor, settings: Inducing, report: Report) -> tuple[list[Row], list[str]]:
    """The same data with other seeds, with other draws of the same seeds, and with a rate that ends at nought."""
    recipe, seeds = settings.recipe, [settings.seed - k for k in range(settings.networks + 1)]
    networks = {f"seed {seed}": partial(trained_as_published, x, y, recipe, seed) for seed in seeds[1:]}
    networks |= {f"seed {seed}, other draws": partial(trained, x, y, 1, recipe, seed) for seed in seeds}
    networks["other draws, falling rate"] = partial(trained, x, y, 1, replace(recipe, falling=True), settings.seed)
    rows, notes = [], []
    for name, make in networks.items():
        task = _Task.of(make(), x, y, settings.margin, settings.grid)
        for count in dict.fromkeys((settings.points, max(settings.sizes))):
            rows.append(Row(f"{name}, VaLLA({count})", task.scored(lw.VaLLA(count), settings.seed), "other networks"))
        notes.append(f"{name}: γ {task.full.effective_parameters().total:.1f}")
        report(f"other networks: {name}")
    return rows, notes


@dataclass(frozen=True, eq=False)
class _State:
    """The published variant after some iterations: variance of f on the grid, gap of the bound, locations (M, 1)."""

    variance: Tensor
    gap: float
    seconds: float
    points: Tensor


@dataclass(frozen=True, eq=False)
class _Published:
    """VaLLA with everything by Adam: the locations Z, and a lower triangular factor L of what the points know.

    With A = L (I + Lᵀ K L)⁻¹ Lᵀ the variance is k(x, x) - K_xZ A K_Zx, and KL = ½ log|I + Lᵀ K L| - ½ tr K A.
    """

    task: _Task
    z: Tensor
    factor: Tensor

    @classmethod
    def started(cls, task: _Task, count: int, generator: torch.Generator) -> _Published:
        z = kmeans(task.x, count, generator)
        return cls(task, z.requires_grad_(), torch.eye(count, dtype=z.dtype).requires_grad_())

    def _at(self, inputs: Tensor) -> Anchors:
        return Anchors(self.task.full.network, inputs, torch.zeros(len(inputs), dtype=torch.long))

    @cached_property
    def _anchors(self) -> Anchors:
        return self._at(self.z.detach())

    @cached_property
    def data(self) -> tuple[Anchors, Tensor]:
        """The data and their prior variance."""
        found = self._at(self.task.x)
        return found, found.kernel(self.task.full.prior).diagonal()

    @cached_property
    def grid(self) -> tuple[Anchors, Tensor]:
        found = self._at(self.task.grid)
        return found, found.kernel(self.task.full.prior).diagonal()

    def left(self, others: Anchors, before: Tensor) -> tuple[Tensor, Tensor]:
        """The variance at other inputs, (N,), and KL."""
        prior, jacobian, lower = self.task.full.prior, self._anchors.differentiable(self.z), self.factor.tril()
        eye = torch.eye(len(lower), dtype=lower.dtype)
        root = torch.linalg.cholesky(eye + lower.mT @ prior_kernel(jacobian, prior) @ lower)
        inverse = torch.linalg.solve_triangular(root, eye, upper=False)
        told = inverse @ lower.mT @ others.against(jacobian, prior)
        kl = root.diagonal().log().sum() - 0.5 * (len(eye) - inverse.square().sum())
        return before - told.square().sum(0), kl

    def objective(self, rows: Tensor | None = None) -> Tensor:
        """n/b Σ v / (2σ²) + KL over a batch of b data, or over all."""
        v, kl = self.left(*self.data)
        mine = v if rows is None else v[rows]
        return len(v) / len(mine) * mine.sum() / (2 * self.task.noise) + kl

    def state(self, seconds: float) -> _State:
        posterior: Any = self.task.full.posterior
        penalty = float(posterior.problem.prior.penalty(posterior.theta.double()))
        least = -float(posterior.log_occam()) - 0.5 * penalty  # ½ log det (I + K/σ²)
        gap = float(self.objective().detach()) - least
        return _State(self.left(*self.grid)[0].detach(), gap, seconds, self.z.detach().clone())


def _learned_as_published(task: _Task, settings: Inducing, report: Report) -> dict[int, _State]:
    """Adam at 1e-3 on batches, from k-means and L = I; what is there after the iterations to look at."""
    generator = torch.Generator().manual_seed(settings.seed)
    model = _Published.started(task, settings.points, generator)
    optimiser = torch.optim.Adam([model.z, model.factor], lr=1e-3)
    states: dict[int, _State] = {}
    rows: list[Tensor] = []
    spent = 0.0
    for step in range(1, max(settings.published) + 1):
        begun = time.perf_counter()
        rows = rows or list(torch.randperm(len(task.x), generator=generator).split(settings.recipe.batch_size))
        optimiser.zero_grad()
        model.objective(rows.pop()).backward(inputs=[model.z, model.factor])  # and not into the network's weights
        optimiser.step()
        spent += time.perf_counter() - begun
        if step % 1000 == 0:
            report(f"published variant: {step:,} of {max(settings.published):,} iterations, {spent:.0f} s")
        if step in settings.published:
            states[step] = model.state(spent)
    return states


def _bands(task: _Task, settings: Inducing, published: _State) -> dict[str, list[float]]:
    """What the picture of the bands needs: for every method the standard deviation on the grid, and its points."""
    count, seed = settings.points, settings.seed
    ella, valla = task.fit(lw.ELLA(count, count), seed)[0], task.fit(lw.VaLLA(count), seed)[0]
    found = {
        "exact": (task.exact, None),
        f"Nyström, {count} landmarks": (task.variance(ella), _landmarks(task, count, seed)),
        f"VaLLA as published, {settings.shown:,} iterations": (published.variance, published.points),
        f"VaLLA({count})": (task.variance(valla), valla.curvature.anchors.inputs),
    }
    arrays = {"x": task.x, "y": task.y, "grid": task.grid, "mean": task.full.functions(task.grid).mean}
    for name, (variance, points) in found.items():
        arrays[f"{name}/std"] = variance.sqrt()
        if points is not None:
            arrays[f"{name}/points"] = points
    return {name: array.detach().reshape(-1).tolist() for name, array in arrays.items()}


def _landmarks(task: _Task, count: int, seed: int) -> Tensor:
    """The inputs that ELLA draws with this seed, (M, 1); the posterior keeps directions only."""
    generator = derived_generator(torch.Generator().manual_seed(seed), torch.empty(0))
    found: Tensor = Pool.drawn(Data((task.x, task.y), task.x.device), count, generator).inputs
    return found


def _sensitivity(task: _Task, settings: Inducing, report: Report) -> dict[str, list[float]]:
    """KL and NLL of every draw, for every number of points, every start, with and without learning; and of Nyström."""
    seeds = range(settings.seed, settings.seed + settings.starts)
    arrays: dict[str, list[float]] = {"sizes": [float(size) for size in settings.sizes]}
    for size in settings.sizes:
        methods: dict[str, Any] = {}
        for start in STARTS:
            for label, optimiser in LEARNED.items():
                methods[f"{label}/{start}"] = lw.VaLLA(size, start=start, optimiser=optimiser)
        methods["as started/Nyström"] = lw.ELLA(size, size)
        for name, method in methods.items():
            draws = [task.scored(method, seed) for seed in seeds]
            arrays |= {f"{score} {name}/{size}": [each[score] for each in draws] for score in ("KL", "NLL")}
        report(f"sensitivity: {size} points done")
    return arrays


TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "step": lambda x: (x > 0).to(x),
    "kinks": lambda x: ((x + 0.75).abs() - 0.75).abs(),  # at -1.5, -0.75 and 0
}


@dataclass(frozen=True)
class Targets:
    """Functions with a jump or kinks, which no smooth kernel holds; with noise and a gap, learned by two networks.

    ELLA has as many landmarks as directions. Inputs are uniform on [-reach, reach] without the gap; new points, with
    which coverage and likelihood are measured, are uniform on all of it.
    """

    recipe: Recipe = RECIPE
    activations: tuple[str, ...] = ("tanh", "relu")
    data: int = 200
    test: int = 2000
    noise_std: float = 0.1
    reach: float = 3.0
    gap: tuple[float, float] = (0.5, 1.75)
    margin: float = 1.5
    grid: int = 200
    points: tuple[int, ...] = (20, 40)
    seed: int = SEED


def run_targets(settings: Targets, report: Report = lambda line: None) -> Result:
    """Full, VaLLA and ELLA on every target and network."""
    begun = time.perf_counter()
    rows: list[Row] = []
    arrays: dict[str, list[float]] = {}
    notes: list[str] = []
    for name, target in TARGETS.items():
        generator = torch.Generator().manual_seed(settings.seed)
        x, y = _noisy(target, settings, settings.data, generator, gap=True)
        new = _noisy(target, settings, settings.test, generator, gap=False)
        for activation in settings.activations:
            model = trained(x, y, 1, replace(settings.recipe, activation=activation), settings.seed)
            task = _Task.of(model, x, y, settings.margin, settings.grid)
            group = f"{name}, {activation}"
            drawn = {"x": x, "y": y, "grid": task.grid, "truth": target(task.grid),
                     "mean": task.full.functions(task.grid).mean}  # fmt: skip
            for label, fitted in _compared(task, settings).items():
                variance = task.variance(fitted)
                scores = {"KL": divergence(task.exact, variance), **_on_new_points(fitted, *new, settings.gap)}
                rows.append(Row(label, scores, group))
                drawn[f"{label}/std"] = variance.sqrt()
            arrays |= {f"{group}/{key}": array.detach().reshape(-1).tolist() for key, array in drawn.items()}
            notes.append(f"{group}: γ {task.full.effective_parameters().total:.1f}")
            report(f"{group}: {time.perf_counter() - begun:.0f} s")
    seconds = {"total": time.perf_counter() - begun}
    return Result("inducing_targets", plain(settings), settings.seed, tuple(rows), seconds, arrays, tuple(notes))


def _noisy(
    target: Callable[[Tensor], Tensor], settings: Targets, count: int, generator: torch.Generator, gap: bool
) -> tuple[Tensor, Tensor]:
    low, high = settings.gap
    width = 2 * settings.reach - (high - low if gap else 0.0)
    x = torch.rand(count, 1, generator=generator, dtype=torch.float64) * width - settings.reach
    x = x + (high - low) * (x > low) if gap else x
    return x, target(x) + settings.noise_std * torch.randn(count, 1, generator=generator, dtype=torch.float64)


def _compared(task: _Task, settings: Targets) -> dict[str, lw.Fitted]:
    found = {"Full": task.full}
    for count in settings.points:
        for method in (lw.VaLLA(count), lw.ELLA(count, count)):
            found[f"{type(method).__name__}({count})"] = task.fit(method, settings.seed)[0]
    return found


def _on_new_points(fitted: lw.Fitted, x: Tensor, y: Tensor, gap: tuple[float, float]) -> dict[str, float]:
    """Coverage and NLL where there are data, and in the gap."""
    found = fitted.predict(x)
    low, high = found.interval(0.95)
    inside = ((x > gap[0]) & (x < gap[1])).squeeze(1)
    scores: dict[str, float] = {}
    for mask, suffix in ((~inside, ""), (inside, " in gap")):
        scores[f"coverage 95 %{suffix}"] = regression.coverage(low[mask], high[mask], y[mask])
        scores[f"NLL{suffix}"] = regression.nll(found.mean[mask], found.std[mask], y[mask])
    return scores
