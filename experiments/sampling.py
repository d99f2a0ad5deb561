"""Sampling from a linearised network: the noise of the gradients of two objectives, and γ from one sample."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lapwing as lw
from experiments.engine.contract import Record
from experiments.engine.seeds import records_of
from experiments.options import Progress, add_quick
from lapwing.data.batches import Data
from lapwing.demo.result import ExperimentReport, Result, Row, plain, save
from lapwing.demo.training import TrainingSettings, batches, train_mlp
from lapwing.linalg.operators import MatrixDesign, forward_product, parts_with_rows
from lapwing.linalg.stochastic import Perturbed
from lapwing.networks.network import Network
from lapwing.plots import INK, OTHER, PLAIN, POSTERIOR, new_figure
from lapwing.runtime.threads import normal
from lapwing.tangent import NetworkDesign

GRID = tuple(10.0 ** (k / 2) for k in range(6, -7, -1))  # from a thousand to a thousandth
ROUNDS = 50  # iterations of the fixed point; with the exact γ ten are enough


@dataclass(frozen=True)
class Sampling:
    """Settings: some digits of scikit-learn, and a small tanh network trained to the mode of its posterior.

    The weight decay is one over the number of data: a prior precision of one, if the loss is a sum over data. Samples
    are exact, by an eigendecomposition, and come from the same noise under every precision of the grid. The variance of
    gradients is measured at the first ``gradients`` samples.
    """

    name: ClassVar[str] = "sampling"
    title: ClassVar[str] = "digits: noise of the gradients of samples, and γ from one sample"

    recipe: TrainingSettings = TrainingSettings(
        hidden=(16, 16), epochs=3000, batch_size=120, learning_rate=1e-2, weight_decay=1 / 120
    )
    data: int = 120
    precisions: tuple[float, ...] = GRID
    draws: int = 2048
    gradients: int = 128
    seed: int = 0

    @classmethod
    def quick(cls) -> Sampling:
        """Return the settings of the quick form."""
        return cls(recipe=replace(cls.recipe, epochs=100), draws=64, gradients=8)

    @classmethod
    def full(cls) -> Sampling:
        """Return the settings of the full form."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return the only unit."""
        return ("digits",)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Run the experiment."""
        return records_of(run(self), self.seed)


@dataclass(frozen=True, eq=False)
class _Model:
    """The linearised network: Rᵀ J in parts of one datum, and the eigenvalues (P,) and vectors of the GGN."""

    design: MatrixDesign
    values: Tensor
    vectors: Tensor
    n_outputs: int  # nC, the outputs of all data
    squared_norm: float  # |w̃|²

    @classmethod
    def of(cls, model: nn.Module, x: Tensor, y: Tensor) -> _Model:
        """Linearise the network at its weights. Cost: an eigendecomposition of the (P, P) GGN."""
        network = Network.build(model, x)
        operator = NetworkDesign.build(network, lw.Categorical(), Data(batches(x, y, len(x)), x.device))
        matrix = forward_product(operator, torch.eye(operator.size, dtype=torch.float64)).mT.contiguous()
        values, vectors = torch.linalg.eigh(matrix.mT @ matrix)
        design = MatrixDesign(matrix, operator.rows // len(x))
        outputs = len(x) * network.output_shape[-1]
        return cls(design, values.clamp_min(0), vectors, outputs, float(network.theta().square().sum()))

    def shares(self, precision: float) -> Tensor:
        """Return λ / (λ + α), the effective parameters of each direction, (P,)."""
        return self.values / (self.values + precision)


@dataclass(frozen=True, eq=False)
class _Draws:
    """Noise, and the right-hand sides that follow from it, in the eigenbasis of the GGN."""

    model: _Model
    zeta: Tensor
    eps: Tensor
    prior: Tensor  # ζ in the eigenbasis, (K, P)
    data: Tensor  # Xᵀ ε in the eigenbasis, (K, P)

    @classmethod
    def of(cls, model: _Model, count: int, generator: torch.Generator) -> _Draws:
        """Draw the noise of some samples."""
        like = model.values
        zeta = normal((count, model.design.size), generator, like)
        eps = normal((count, model.design.rows), generator, like)
        return cls(model, zeta, eps, zeta @ model.vectors, eps @ model.design.matrix @ model.vectors)

    def solved(self, precision: Tensor) -> Tensor:
        """Return the samples in the eigenbasis, (K, P), under one precision for all or one for each, (K,)."""
        alpha = precision.reshape(-1, 1)
        return (alpha.sqrt() * self.prior + self.data) / (self.model.values + alpha)

    def gammas(self, precision: Tensor) -> dict[str, Tensor]:
        """Return γ from each sample alone: |X z|² in function space, P - α |z|² in weight space."""
        squares = self.solved(precision).square()
        return {"function": squares @ self.model.values, "weight": squares.shape[1] - precision * squares.sum(1)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_quick(parser, "train for a short time, few samples")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = Sampling(seed=arguments.seed)
    if arguments.quick:
        settings = replace(Sampling.quick(), seed=arguments.seed)
    return ExperimentReport(arguments.out / "sampling.json", (run(settings),), {"sampling.png": picture})


def run(settings: Sampling) -> Result:
    """Return the variances of both gradients and the spread of both estimates of γ, under every precision."""
    start = time.perf_counter()
    x, y = _digits(settings)
    model = _Model.of(train_mlp(x, y, 10, settings.recipe, settings.seed), x, y)
    draws = _Draws.of(model, settings.draws, torch.Generator().manual_seed(settings.seed))
    rows = tuple(Row(f"precision {a:.3g}", _measured(draws, a, settings.gradients)) for a in settings.precisions)
    arrays = {key: [row.scores[key] for row in rows] for key in rows[0].scores}
    fixed_points, notes = _fixed_points(draws)
    arrays |= {"precision": list(settings.precisions), **_expected(model, settings.precisions), **fixed_points}
    seconds = {"total": time.perf_counter() - start}
    return Result("sampling", plain(settings), settings.seed, rows, seconds, arrays, (*_crossings(arrays), *notes))


def _digits(settings: Sampling) -> tuple[Tensor, Tensor]:
    """Return a random part of the digits, pixels from zero to one, and their classes."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(settings.seed))[: settings.data]
    return torch.as_tensor(x)[order] / 16, torch.as_tensor(y)[order].long()


def _measured(draws: _Draws, precision: float, count: int) -> dict[str, float]:
    model, alpha = draws.model, torch.tensor(precision, dtype=torch.float64)
    gamma = float(model.shares(precision).sum())
    system = Perturbed(model.design, draws.zeta[:count], draws.eps[:count], precision)
    z = draws.solved(alpha)[:count] @ model.vectors.mT
    return {
        "γ": gamma,
        "γ / nC, %": 100 * gamma / model.n_outputs,
        "γ / |w̃|²": gamma / model.squared_norm,
        "L / L' at optimum": _ratio(system, z),
        "L / L' at start": _ratio(system, system.prior),
        **{f"sd {space}, %": 100 * float(gammas.std()) / gamma for space, gammas in draws.gammas(alpha).items()},
    }


def gradient_variance(system: Perturbed, z: Tensor, objective: str) -> Tensor:
    """Return the trace (K,) of the covariance of the gradient estimate from one random part, at every row of z.

    With M parts and their data gradients g_i it is M Σ |g_i|² - |Σ g_i|². A design with one datum in each part gives
    the variance of the estimate from a single datum.

    >>> system = Perturbed(MatrixDesign(torch.eye(2).double(), part=1), torch.ones(1, 2), torch.ones(1, 2), 4.0)
    >>> gradient_variance(system, torch.ones(1, 2).double(), "reduced")
    tensor([2.], dtype=torch.float64)
    """
    function = system.objective(objective)
    total, squares, count = torch.zeros_like(z), z.new_zeros(len(z)), 0
    for part, rows in parts_with_rows(system.design):
        gradient = function.data_gradient(z, part, rows)
        total += gradient
        squares += gradient.square().sum(1)
        count += 1
    return count * squares - total.square().sum(1)


def _ratio(system: Perturbed, z: Tensor) -> float:
    """Return the variance of a gradient from one datum, with noise in the data over that with noise in the prior."""
    classic, reduced = (float(gradient_variance(system, z, name).mean()) for name in ("classic", "reduced"))
    return classic / reduced


def _expected(model: _Model, precisions: tuple[float, ...]) -> dict[str, list[float]]:
    """Return the standard deviations in closed form: γ from one sample is a weighted sum of squared normals."""
    shares = [model.shares(precision) for precision in precisions]
    spread = lambda weights, share: 100 * float((2 * weights.square().sum()).sqrt() / share.sum())
    return {
        "expected function, %": [spread(share, share) for share in shares],
        "expected weight, %": [spread(1 - share, share) for share in shares],
    }


def _fixed_points(draws: _Draws) -> tuple[dict[str, list[float]], tuple[str, ...]]:
    """Iterate α = γ / |w̃|² with the exact γ, and with γ from one sample; return the limits where it converges."""
    model, size = draws.model, draws.model.design.size
    exact = 1.0
    for _ in range(ROUNDS):
        exact = float(model.shares(exact).sum()) / model.squared_norm
    limits, notes = {"fixed point": [exact]}, [f"fixed point of α = γ / |w̃|²: {exact:.3g}"]
    for space in ("function", "weight"):
        alpha = last = torch.ones(len(draws.zeta), dtype=torch.float64)
        for _ in range(ROUNDS):
            last, alpha = alpha, draws.gammas(alpha)[space].clamp(1, size - 1) / model.squared_norm
        converged = alpha[(alpha - last).abs() <= 1e-3 * alpha]
        error, spread = (100 * float(value) / exact for value in (converged.mean() - exact, converged.std()))
        notes.append(
            f"with γ from one sample in {space} space: {error:+.1f} % on average, sd {spread:.1f} %; "
            f"{len(alpha) - len(converged)} of {len(alpha)} do not converge"
        )
        limits[f"fixed point, {space}"] = converged.tolist()
    return limits, tuple(notes)


def _crossings(arrays: dict[str, list[float]]) -> tuple[str, ...]:
    """Say where both objectives have the same variance, and where one sample is enough."""
    even = crossing(arrays["γ / nC, %"], arrays["L / L' at optimum"], 1.0)
    notes = [] if even is None else [f"both objectives have the same variance at γ / nC = {even:.1f} %"]
    for space in ("function", "weight"):
        enough = crossing(arrays["γ"], arrays[f"expected {space}, %"], 10.0)
        if enough is not None:
            notes.append(f"one sample gives γ to 10 % from γ = {enough:.0f} on, in {space} space")
    return tuple(notes)


def crossing(x: list[float], y: list[float], level: float) -> float | None:
    """Return the first x at which y crosses a level, or None; linear in logarithms between neighbours.

    >>> round(crossing([1.0, 100.0], [4.0, 0.25], 1.0), 6)
    10.0
    """
    for (x0, y0), (x1, y1) in pairwise(zip(x, y, strict=True)):
        if (y0 - level) * (y1 - level) <= 0 and y0 != y1:
            share = math.log(level / y0) / math.log(y1 / y0)
            return math.exp(math.log(x0) + share * math.log(x1 / x0))
    return None


def picture(result: Result, path: Path) -> None:
    """Draw, against γ, the ratio of the variances of both gradients, and the error of γ from one sample."""
    arrays = result.arrays
    figure, axes = new_figure(1, 2, (10.4, 4.4))
    ratio, spread = axes[0]
    for key, colour, label in (("optimum", POSTERIOR, "at the solution"), ("start", OTHER, "at a sample of the prior")):
        ratio.loglog(arrays["γ / nC, %"], arrays[f"L / L' at {key}"], "o-", color=colour, markersize=4.5, label=label)
    ratio.axhline(1, color=INK, linestyle="--", linewidth=1)
    ratio.set(title="gradients from one datum", xlabel="γ / nC, %", ylabel="variance of L over that of L'")
    for space, colour in (("function", POSTERIOR), ("weight", PLAIN)):
        spread.loglog(arrays["γ"], arrays[f"expected {space}, %"], color=colour, label=f"{space} space, closed form")
        spread.loglog(arrays["γ"], arrays[f"sd {space}, %"], "o", color=colour, markersize=4.5, label="measured")
    bound = [100 * (2 / gamma) ** 0.5 for gamma in arrays["γ"]]
    spread.loglog(arrays["γ"], bound, color=INK, linestyle=":", label="√(2/γ)")
    spread.axhline(10, color=INK, linestyle="--", linewidth=1)
    spread.set(title="γ from one sample", xlabel="γ", ylabel="relative standard deviation, %")
    for axis in (ratio, spread):
        axis.title.set_fontsize(10)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.legend(frameon=False, fontsize=9)
    save(figure, path)
