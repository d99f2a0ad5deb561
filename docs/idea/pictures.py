"""Draw the pictures of the two pages on the idea: ``python docs/idea/pictures.py [folder]``; needs ``lapwing[run]``.

One network of one input, trained on data with a gap. The first picture shows functions drawn from the tangent model and
the error bars that follow from them; the second one how the prior's precision changes these, which precision the
evidence prefers, and how well each predicts new data in the gap. It takes a few seconds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

import lapwing as lw
from lapwing.demo.result import save

NOISE = 0.15
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"
GRID = torch.linspace(-2.9, 2.7, 161).unsqueeze(1)
LIMITS = (-7.5, 7.5)
RATIOS = torch.logspace(-1.5, 2.5, 25).tolist()


@dataclass(frozen=True, eq=False)
class Case:
    """A trained network of one input, its data, and the exact posterior under the evidence's precision."""

    x: Tensor
    y: Tensor
    gap: tuple[Tensor, Tensor]  # new data where there were none
    posterior: lw.Fitted

    @property
    def precision(self) -> float:
        """The precision with the highest evidence."""
        return float(self.posterior.prior.values)

    def under(self, ratio: float) -> lw.Fitted:
        """Return the posterior under that precision times ``ratio``."""
        return self.posterior.with_prior(ratio * self.precision)


def case(steps: int = 600) -> Case:
    """Return a trained network and its posterior."""
    generator = torch.Generator().manual_seed(3)
    x = torch.cat([torch.linspace(-2.6, -1, 30), torch.linspace(0.8, 2.4, 30)]).unsqueeze(1)
    gap = torch.linspace(-1, 0.8, 200).unsqueeze(1)
    y, new = (part.mul(2.5).sin() + NOISE * torch.randn(part.shape, generator=generator) for part in (x, gap))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        (net(x) - y).square().mean().backward()
        optimiser.step()
    evidence = lw.tuners.MaximiseEvidence()
    posterior = lw.fit(net, (x, y), lw.Gaussian(noise_std=NOISE), method=lw.Full(), tuner=evidence)
    return Case(x, y, (gap, new), posterior)


def draw_tangent(made: Case, path: Path) -> None:
    """Draw functions of the tangent model beside the error bars that they make."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    posterior = made.under(10.0)
    functions = posterior.function_samples(GRID, 12, torch.Generator().manual_seed(0))
    left.plot(GRID, functions[:, :, 0].T, color=BLUE, alpha=0.4, linewidth=0.9)
    _network(left, made, "the network, and functions drawn from its tangent model")
    _band(right, posterior, BLUE)
    _network(right, made, "the 95 % intervals that they make")
    left.set(ylabel="y", ylim=(-3.2, 3.2))
    _save(figure, path)


def draw_width(made: Case, path: Path) -> tuple[list[float], list[float]]:
    """Draw three precisions, the evidence and the NLL in the gap of many; return the two curves."""
    figure = Figure(figsize=(11, 3.0), layout="constrained")
    *bands, curves = figure.subplots(1, 4)
    for axis, ratio, words in zip(
        bands, (300.0, 30.0, 1.0), ("too narrow", "best in the gap", "highest evidence"), strict=True
    ):
        _band(axis, made.under(ratio), BLUE)
        _network(axis, made, f"precision {ratio * made.precision:.2g}: {words}")
    posteriors = [made.under(ratio) for ratio in RATIOS]
    evidences = [float(posterior.log_evidence()) for posterior in posteriors]
    x, y = made.gap
    losses = [-float(posterior.predict(x).log_prob(y).mean()) for posterior in posteriors]
    precisions = [ratio * made.precision for ratio in RATIOS]
    curves.semilogx(precisions, evidences, color=BLUE)
    curves.set(
        xlabel="precision of the prior",
        ylim=(max(evidences) - 120, max(evidences) + 10),
        xlim=(min(precisions), max(precisions)),
    )
    curves.set_ylabel("log evidence of the data", color=BLUE)
    other = curves.twinx()
    other.semilogx(precisions, losses, color=ORANGE)
    other.set_ylabel("NLL of new data in the gap", color=ORANGE)
    _save(figure, path)
    return evidences, losses


def _band(axis: Axes, posterior: lw.Fitted, colour: str) -> None:
    low, high = (end[:, 0] for end in posterior.predict(GRID).interval(0.95))
    axis.fill_between(GRID[:, 0], low, high, color=colour, alpha=0.25, linewidth=0)


def _network(axis: Axes, made: Case, title: str) -> None:
    axis.plot(GRID, made.posterior.functions(GRID).mean, color="black", linewidth=1.4)
    axis.plot(made.x, made.y, ".", color=GREY, markersize=4)
    axis.set(xlabel="x", ylim=LIMITS, xlim=(float(GRID[0]), float(GRID[-1])))
    axis.set_title(title, fontsize=9)


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    save(figure, path)


def main(folder: Path) -> tuple[list[float], list[float]]:
    """Draw both pictures into the folder; return the evidences and NLLs of the second one."""
    folder.mkdir(parents=True, exist_ok=True)
    made = case()
    draw_tangent(made, folder / "idea_tangent.png")
    return draw_width(made, folder / "idea_width.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "images")
