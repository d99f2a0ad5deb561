"""Sampling from a linearised network: which objective has the quieter gradients, and what one sample tells of γ."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lapwing as lw
from experiments.result import Result, Row, plain
from experiments.training import Recipe, batches, trained
from lapwing.core.data import Data
from lapwing.core.random import normal
from lapwing.linalg.design import MatrixDesign, forward_product
from lapwing.linalg.perturbed import Perturbed, gradient_variance
from lapwing.networks.network import Network
from lapwing.tangent.design import NetworkDesign

GRID = tuple(10.0 ** (k / 2) for k in range(6, -7, -1))  # from a thousand to a thousandth
ROUNDS = 50  # of the fixed point; with the exact γ ten are enough


@dataclass(frozen=True)
class Sampling:
    """Some of the digits of scikit-learn, a small tanh network trained to the mode of its posterior, and exact samples.

    The weight decay is one over the number of data: a prior precision of one, where the loss is a sum. Samples under
    every precision of the grid come from the same noise, by an eigendecomposition; the first ``gradients`` of them are
    those whose gradients are looked at.
    """

    recipe: Recipe = Recipe(hidden=(16, 16), epochs=3000, batch_size=120, learning_rate=1e-2, weight_decay=1 / 120)
    data: int = 120
    precisions: tuple[float, ...] = GRID
    draws: int = 2048
    gradients: int = 128
    seed: int = 0


@dataclass(frozen=True, eq=False)
class _Model:
    """The linearised network: Rᵀ J in parts of one datum, and the eigenvalues (P,) and vectors of the GGN."""

    design: MatrixDesign
    values: Tensor
    vectors: Tensor
    numbers: int  # nC, the outputs of all data
    length: float  # |w̃|²

    @classmethod
    def of(cls, model: nn.Module, x: Tensor, y: Tensor) -> _Model:
        network = Network.build(model, x)
        found = NetworkDesign.build(network, lw.Categorical(), Data(batches(x, y, len(x)), x.device))
        matrix = forward_product(found, torch.eye(found.size, dtype=torch.float64)).mT.contiguous()
        values, vectors = torch.linalg.eigh(matrix.mT @ matrix)
        design = MatrixDesign(matrix, found.rows // len(x))
        outputs = len(x) * network.output_shape[-1]
        return cls(design, values.clamp_min(0), vectors, outputs, float(network.theta().square().sum()))

    def shares(self, precision: float) -> Tensor:
        """λ / (λ + α): how far the data decide each direction."""
        return self.values / (self.values + precision)


@dataclass(frozen=True, eq=False)
class _Draws:
    """Noise, and the right-hand sides that it makes in the eigenbasis of the GGN."""

    model: _Model
    zeta: Tensor
    eps: Tensor
    prior: Tensor  # ζ and Xᵀ ε in the eigenbasis, (K, P)
    back: Tensor

    @classmethod
    def of(cls, model: _Model, count: int, generator: torch.Generator) -> _Draws:
        like = model.values
        zeta = normal((count, model.design.size), generator, like)
        eps = normal((count, model.design.rows), generator, like)
        return cls(model, zeta, eps, zeta @ model.vectors, eps @ model.design.matrix @ model.vectors)

    def solved(self, precision: Tensor) -> Tensor:
        """The samples in the eigenbasis; one precision for all, or one for each (K,)."""
        alpha = precision.reshape(-1, 1)
        return (alpha.sqrt() * self.prior + self.back) / (self.model.values + alpha)

    def gammas(self, precision: Tensor) -> dict[str, Tensor]:
        """From each sample alone: |X z|² in function space, P - α |z|² in weight space."""
        squares = self.solved(precision).square()
        return {"function": squares @ self.model.values, "weight": squares.shape[1] - precision * squares.sum(1)}


def run(settings: Sampling) -> Result:
    """The variances of both gradients and the spread of both estimates of γ, under every precision."""
    begun = time.perf_counter()
    x, y = _digits(settings)
    model = _Model.of(trained(x, y, 10, settings.recipe, settings.seed), x, y)
    draws = _Draws.of(model, settings.draws, torch.Generator().manual_seed(settings.seed))
    rows = tuple(Row(f"precision {a:.3g}", _measured(draws, a, settings.gradients)) for a in settings.precisions)
    arrays = {key: [row.scores[key] for row in rows] for key in rows[0].scores}
    found, notes = _fixed_points(draws)
    arrays |= {"precision": list(settings.precisions), **_expected(model, settings.precisions), **found}
    seconds = {"total": time.perf_counter() - begun}
    return Result("sampling", plain(settings), settings.seed, rows, seconds, arrays, (*_crossings(arrays), *notes))


def _digits(settings: Sampling) -> tuple[Tensor, Tensor]:
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
        "γ / nC, %": 100 * gamma / model.numbers,
        "γ / |w̃|²": gamma / model.length,
        "L / L' at optimum": _ratio(system, z),
        "L / L' at start": _ratio(system, system.prior),
        **{f"sd {space}, %": 100 * float(found.std()) / gamma for space, found in draws.gammas(alpha).items()},
    }


def _ratio(system: Perturbed, z: Tensor) -> float:
    """Of the mean variances of a gradient from a single datum, noise in the data over noise in the regulariser."""
    classic, reduced = (float(gradient_variance(system, z, name).mean()) for name in ("classic", "reduced"))
    return classic / reduced


def _expected(model: _Model, precisions: tuple[float, ...]) -> dict[str, list[float]]:
    """The standard deviations in closed form: γ from one sample is a weighted sum of squared normals, in each space."""
    shares = [model.shares(precision) for precision in precisions]
    spread = lambda weights, share: 100 * float((2 * weights.square().sum()).sqrt() / share.sum())
    return {
        "expected function, %": [spread(share, share) for share in shares],
        "expected weight, %": [spread(1 - share, share) for share in shares],
    }


def _fixed_points(draws: _Draws) -> tuple[dict[str, list[float]], tuple[str, ...]]:
    """Where α = γ / |w̃|² ends: with γ exact, and with γ from one sample, for every sample with which it ends."""
    model, size = draws.model, draws.model.design.size
    exact = 1.0
    for _ in range(ROUNDS):
        exact = float(model.shares(exact).sum()) / model.length
    found, notes = {"fixed point": [exact]}, [f"fixed point of α = γ / |w̃|²: {exact:.3g}"]
    for space in ("function", "weight"):
        alpha = last = torch.ones(len(draws.zeta), dtype=torch.float64)
        for _ in range(ROUNDS):
            last, alpha = alpha, draws.gammas(alpha)[space].clamp(1, size - 1) / model.length
        ended = alpha[(alpha - last).abs() <= 1e-3 * alpha]
        error, spread = (100 * float(value) / exact for value in (ended.mean() - exact, ended.std()))
        notes.append(
            f"with γ from one sample in {space} space: {error:+.1f} % on average, sd {spread:.1f} %; "
            f"{len(alpha) - len(ended)} of {len(alpha)} go in circles"
        )
        found[f"fixed point, {space}"] = ended.tolist()
    return found, tuple(notes)


def _crossings(arrays: dict[str, list[float]]) -> tuple[str, ...]:
    """Where the objectives change places, and where one sample is enough."""
    even = crossing(arrays["γ / nC, %"], arrays["L / L' at optimum"], 1.0)
    notes = [] if even is None else [f"both objectives have the same variance at γ / nC = {even:.1f} %"]
    for space in ("function", "weight"):
        enough = crossing(arrays["γ"], arrays[f"expected {space}, %"], 10.0)
        if enough is not None:
            notes.append(f"one sample gives γ to 10 % from γ = {enough:.0f} on, in {space} space")
    return tuple(notes)


def crossing(x: list[float], y: list[float], level: float) -> float | None:
    """The first x at which y passes a level, on a straight line between neighbours in logarithms; None if it does not.

    >>> round(crossing([1.0, 100.0], [4.0, 0.25], 1.0), 6)
    10.0
    """
    for (x0, y0), (x1, y1) in pairwise(zip(x, y, strict=True)):
        if (y0 - level) * (y1 - level) <= 0 and y0 != y1:
            way = math.log(level / y0) / math.log(y1 / y0)
            return math.exp(math.log(x0) + way * math.log(x1 / x0))
    return None
