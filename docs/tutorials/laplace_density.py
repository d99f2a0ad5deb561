"""The Laplace approximation of a density, in one dimension and in two.

Bayes' rule gives a density up to a factor: prior times likelihood. To use it one needs its integral, its mean and its
spread. These are integrals that can be computed exactly only for small problems. Laplace's approximation has two steps.

1. Go to the mode x*, where the gradient of the log density is zero.
2. Keep the second derivative there and ignore all higher ones. The log density is then a parabola,

       log p(x)  ≈  log p(x*) − ½ (x − x*)ᵀ Λ (x − x*),      Λ = −∇² log p(x*),

   and exp of a parabola is a Gaussian: mean x*, covariance Λ⁻¹, and an integral in closed form,

       log ∫ p  ≈  log p(x*) + D/2 log 2π − ½ log det Λ.

That integral is the normaliser. Where p is prior times likelihood it is the evidence, the same number that
``posterior.log_evidence()`` returns for a network, whose log posterior is approximated in the same way.

Three densities whose integrals are known show when this works:

- a rate after three events in one unit of time, with density r² exp(−r). It is zero for r ≤ 0, but the Gaussian has
  probability there;
- the same density in u = log r. Coordinates matter: here the density is closer to a Gaussian, and so is its integral;
- mean and log standard deviation of six measurements: two dimensions, pear-shaped contours against ellipses.

Run it with ``python docs/tutorials/laplace_density.py [folder]``: it prints the normalisers and draws
laplace_density.png.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from density import DensityLaplace, laplace_density
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from lapwing.demo.result import save

EXACT, LAPLACE = "#333333", "#0072b2"
SHAPE = 3.0
MEASURED = torch.tensor([4.1, 5.3, 3.2, 6.0, 4.4, 5.6], dtype=torch.float64)


def rate(r: Tensor) -> Tensor:
    """Return the log density of a rate after three events in one unit of time, prior 1/r: a Gamma of shape 3."""
    inside = r > 0
    return torch.where(inside, (SHAPE - 1) * torch.where(inside, r, 1.0).log() - r, -math.inf).sum(-1)


def log_rate(u: Tensor) -> Tensor:
    """Return the log density of u = log r; dr = r du adds one to the power of r."""
    return (SHAPE * u - u.exp()).sum(-1)


def mean_and_log_std(x: Tensor) -> Tensor:
    """Return the log density of mean x[0] and log standard deviation x[1] of six measurements, under a flat prior."""
    mean, log_std = x[..., 0:1], x[..., 1:2]
    residual = (MEASURED - mean) / log_std.exp()
    return (-0.5 * residual.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def mean_and_log_std_normaliser() -> float:
    """Return the log of its integral: over the mean it is Gaussian, over the precision a Gamma density."""
    n, half = len(MEASURED), (len(MEASURED) - 1) / 2
    scatter = float((MEASURED - MEASURED.mean()).square().sum()) / 2
    constant = 0.5 * math.log(2 * math.pi / n) - n / 2 * math.log(2 * math.pi)
    return constant + math.lgamma(half) - half * math.log(scatter) - math.log(2)


@dataclass(frozen=True, eq=False)
class Case:
    """A log density, its Laplace approximation, and its integral by closed form and by a grid."""

    name: str
    log_density: Callable[[Tensor], Tensor]
    approximation: DensityLaplace
    closed: float
    grid: tuple[Tensor, ...]  # one axis for each dimension

    @property
    def laplace(self) -> float:
        return self.approximation.log_normaliser.item()

    @property
    def points(self) -> Tensor:
        """The points of the grid, (..., D)."""
        return torch.stack(torch.meshgrid(*self.grid, indexing="ij"), -1)

    @property
    def quadrature(self) -> float:
        """The log of the integral over the grid, by the trapezoidal rule."""
        cell = sum(math.log(float(axis[1] - axis[0])) for axis in self.grid)
        return float(torch.logsumexp(self.log_density(self.points).flatten(), 0)) + cell

    @property
    def title(self) -> str:
        numbers = f"exact {self.closed:.3f}, Laplace {self.laplace:.3f}".replace("-", "−")
        return f"{self.name}\nlog normaliser: {numbers}"


def cases() -> list[Case]:
    """Return the three densities."""

    def axis(low: float, high: float, count: int = 2001) -> Tensor:
        return torch.linspace(low, high, count, dtype=torch.float64)

    return [
        Case("rate", rate, laplace_density(rate, [1.0]), math.lgamma(SHAPE), (axis(-6, 60, 66001),)),
        Case("log rate", log_rate, laplace_density(log_rate, [0.0]), math.lgamma(SHAPE), (axis(-12, 5),)),
        Case(
            "mean and log std",
            mean_and_log_std,
            laplace_density(mean_and_log_std, [4.0, 0.0]),
            mean_and_log_std_normaliser(),
            (axis(-25.0, 35.0, 1501), axis(-2.0, 5.0, 351)),
        ),
    ]


def picture(densities: list[Case], path: Path) -> None:
    """Draw one panel for each density; exact in grey, Laplace in blue."""
    figure = Figure(figsize=(12.6, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    _curve(axes[0], densities[0], (-2.5, 9.0), "rate r")
    _curve(axes[1], densities[1], (-2.0, 3.2), "u = log r")
    _contours(axes[2], densities[2])
    axes[0].set_ylabel("density, normalised")
    for axis, case in zip(axes, densities, strict=True):
        axis.set_title(case.title, fontsize=10.5)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], color=EXACT, linewidth=2), Line2D([], [], color=LAPLACE, linewidth=2, linestyle="--")]
    figure.legend(handles, ["exact", "Laplace"], frameon=False, ncols=2, loc="outside lower center")
    save(figure, path)


def _curve(axis: Any, case: Case, limits: tuple[float, float], label: str) -> None:
    x = torch.linspace(*limits, 600, dtype=torch.float64)
    exact = (case.log_density(x.unsqueeze(-1)) - case.closed).exp()
    laplace = case.approximation.log_prob(x.unsqueeze(-1)).exp()
    axis.fill_between(x.tolist(), exact.tolist(), color=EXACT, alpha=0.12, linewidth=0)
    axis.plot(x.tolist(), exact.tolist(), color=EXACT, linewidth=2)
    axis.plot(x.tolist(), laplace.tolist(), color=LAPLACE, linewidth=2, linestyle="--")
    axis.set(xlabel=label, xlim=limits)
    axis.set_ylim(bottom=0)


def _contours(axis: Any, case: Case) -> None:
    """Draw the smallest regions that contain 50 % and 95 % of each density."""
    limits = ((2.6, 6.95), (-0.95, 1.25))
    axes = [torch.linspace(low, high, 300, dtype=torch.float64) for low, high in limits]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
    densities = (
        ((case.log_density(points) - case.closed).exp(), EXACT, "-", _levels(case)),
        (case.approximation.log_prob(points).exp(), LAPLACE, "--", _ellipses(case.approximation)),
    )
    for density, colour, style, levels in densities:
        args = [value.tolist() for value in axes] + [density.mT.tolist()]
        if colour == EXACT:
            axis.contourf(*args, [*levels, float(density.max())], colors=EXACT, alpha=0.12)
        lines = axis.contour(*args, levels, colors=colour, linestyles=style, linewidths=2)
        if colour == EXACT:
            tops = [(float(MEASURED.mean()), height) for height in (0.99, 0.38)]
            axis.clabel(lines, fmt={levels[0]: "95 %", levels[1]: "50 %"}, fontsize=9, manual=tops)
    axis.plot(*case.approximation.mean.tolist(), "+", color=LAPLACE, markersize=10, markeredgewidth=2)
    axis.set(xlabel="mean", ylabel="log standard deviation", xlim=limits[0], ylim=limits[1])


def _levels(case: Case) -> list[float]:
    """Return the heights above which 95 % and 50 % of the exact density lie."""
    density = (case.log_density(case.points).flatten() - case.quadrature).exp().sort(descending=True).values
    share = density.cumsum(0) / density.sum()
    return [float(density[int((share < level).sum())]) for level in (0.95, 0.5)]


def _ellipses(gaussian: DensityLaplace) -> list[float]:
    """Return these heights for a Gaussian in two dimensions: the share outside of a level is its ratio to the peak."""
    peak = float(gaussian.log_prob(gaussian.mean).exp())
    return [0.05 * peak, 0.5 * peak]


def main(out: Path) -> list[Case]:
    """Print the normalisers, draw the picture, return the cases."""
    densities = cases()
    print("log normaliser       exact  quadrature  Laplace  Laplace / exact")
    for case in densities:
        ratio = math.exp(case.laplace - case.closed)
        print(f"{case.name:16}  {case.closed:8.4f}    {case.quadrature:8.4f} {case.laplace:8.4f}  {ratio:15.3f}")
    out.mkdir(parents=True, exist_ok=True)
    picture(densities, out / "laplace_density.png")
    return densities


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The Laplace approximation of three small densities.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("docs/images"), help="folder for the picture")
    main(parser.parse_args().out)
