"""Choose the number of hidden units by the evidence, from the training data alone.

A network of one input, h hidden units and one output learns a sine from fifty noisy points. With too few units it
cannot follow the sine; with too many it follows the noise. The usual remedy is a validation set. The Bayesian one needs
none:

- *regularisation.* ``lw.train`` with ``lw.recipes.classic`` minimises β/2 · squared error + α/2 · squared weights and
  learns α and β during training, by α = γ/|w|² and β = (N − γ)/SSE, with one α for each layer. γ is the number of
  directions of weight space that the data determine;
- *comparison.* The evidence of a trained network is its fit minus its complexity. Another unit always fits a little
  better; it is worth having if the fit improves by more than the complexity. ``lw.compare`` ranks by that.

Both are checked by the likelihood of two thousand new points, which they do not use. Since one data set proves little,
everything is repeated for five of them, which differ only in their noise; the first is drawn.

The error of a small network has many minima, so every network is trained from several starts, and the one with the best
evidence is kept. No choice uses the new points.

Run it with ``python docs/tutorials/hidden_units.py [folder]``: it prints the comparison and draws hidden_units.png. It
takes a few minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

import lapwing as lw
from lapwing.demo.result import save

INK, BAYES, PLAIN, PALE = "#333333", "#0072b2", "#d55e00", "#9a9a9a"
HIDDEN = (1, 2, 3, 4, 6, 9, 12, 20)
CLASSIC = 6  # hidden units of the networks in the first panel
REACH, NOISE_STD = 3.0, 0.2
STAR: dict[str, Any] = {"marker": "*", "markersize": 18, "markeredgecolor": "white", "zorder": 4}
START = 0.01  # initial precision of the prior; with a large one small networks stay at a constant function
NEAR = 0.02  # nats for each new point: a size within this distance is near the best


def truth(x: Tensor) -> Tensor:
    return torch.sin(2 * x)


def noisy(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return truth(x) + NOISE_STD * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def points(seed: int, n: int = 50) -> tuple[Tensor, Tensor]:
    """Return training data (n, 1): evenly spaced inputs, so that data sets differ only in their noise."""
    x = torch.linspace(-REACH, REACH, n, dtype=torch.float64).unsqueeze(1)
    return x, noisy(x, seed)


def new_points(seed: int, n: int = 2000) -> tuple[Tensor, Tensor]:
    """Return held-out data (n, 1) of the same range."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    x = REACH * (2 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 1)
    return x, noisy(x, 20_000 + seed)


def network(hidden: int, start: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        return nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()


def regularised(x: Tensor, y: Tensor, hidden: int, recipe: lw.recipes.Recipe, restarts: int) -> lw.Fitted:
    """Train from several starts and return the posterior with the best evidence."""
    posteriors = [
        lw.train(network(hidden, start), [(x, y)], "regression", recipe=recipe, progress=False).posterior
        for start in range(restarts)
    ]
    return max(posteriors, key=lambda posterior: float(posterior.log_evidence()))


@cache
def unregularised(seed: int, hidden: int, restarts: int) -> lw.Fitted:
    """Train from several starts by the squared error alone and return the best; its noise is its residual."""
    x, y = points(seed)
    errors = []
    for start in range(restarts):
        model = network(hidden, start)
        optimiser = torch.optim.LBFGS(
            model.parameters(), max_iter=1000, tolerance_grad=1e-9, tolerance_change=0.0, line_search_fn="strong_wolfe"
        )

        def closure(model: nn.Module = model, optimiser: torch.optim.LBFGS = optimiser) -> Tensor:
            optimiser.zero_grad()
            error = (model(x) - y).square().mean()
            error.backward()
            return error

        optimiser.step(closure)
        errors.append((float(closure().detach()), model))
    model = min(errors, key=lambda pair: pair[0])[1]
    return lw.fit(model, [(x, y)], "regression", method=lw.baselines.MapOnly(), progress=False)


def log_likelihood(posterior: lw.Fitted, seed: int) -> float:
    """Return the log-likelihood of a new point, on average."""
    x, y = new_points(seed)
    return float(posterior.predict(x).log_prob(y).mean())


@dataclass(frozen=True, eq=False)
class Study:
    """One data set: networks of every size, with their evidence and the likelihood of new points."""

    seed: int
    x: Tensor
    y: Tensor
    fitted: dict[int, lw.Fitted]

    @cached_property
    def compared(self) -> Any:
        return lw.compare({str(hidden): posterior for hidden, posterior in self.fitted.items()})

    @property
    def picked(self) -> int:
        return int(self.compared.best)

    @cached_property
    def held_out(self) -> dict[int, float]:
        return {hidden: log_likelihood(posterior, self.seed) for hidden, posterior in self.fitted.items()}

    @property
    def lost(self) -> float:
        """The difference from the best size to the one with the best evidence, in nats for each new point."""
        return max(self.held_out.values()) - self.held_out[self.picked]


def study(seed: int, hidden: Sequence[int], prior: Any, restarts: int, epochs: int) -> Study:
    x, y = points(seed)
    recipe = lw.recipes.classic(epochs, prior=prior)
    fitted = {count: regularised(x, y, count, recipe, restarts) for count in hidden}
    return Study(seed, x, y, fitted)


def picture(studies: Sequence[Study], plain: lw.Fitted, path: Path) -> None:
    """Draw the classic picture, the evidence and its parts, the likelihood of new points, and γ."""
    figure = Figure(figsize=(12.6, 9.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).flatten()
    _classic(axes[0], studies[0], plain)
    _evidence(axes[1], studies[0])
    _held_out(axes[2], studies)
    _gamma(axes[3], studies)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10.5)
    save(figure, path)


def _classic(axis: Any, study: Study, plain: lw.Fitted) -> None:
    grid = torch.linspace(-REACH, REACH, 601, dtype=torch.float64).unsqueeze(1)
    line = grid[:, 0].tolist()
    cases = ((plain, PLAIN, "squared error only"), (study.fitted[CLASSIC], BAYES, "Bayesian regularisation"))
    for posterior, colour, label in cases:
        predicted = posterior.predict(grid)
        low, high = (bound.detach()[:, 0].tolist() for bound in predicted.interval(0.95))
        axis.fill_between(line, low, high, color=colour, alpha=0.18, linewidth=0)
        note = f"{label}: {log_likelihood(posterior, study.seed):.2f}".replace("-", "−")
        axis.plot(line, predicted.mean.detach()[:, 0].tolist(), color=colour, linewidth=2, label=note)
    axis.plot(line, truth(grid)[:, 0].tolist(), color=INK, linewidth=1.2, linestyle=":", label="truth")
    axis.scatter(study.x[:, 0].tolist(), study.y[:, 0].tolist(), s=16, color=INK, zorder=3, label="data")
    axis.set(xlabel="x", ylabel="y", xlim=(-REACH, REACH), ylim=(-2.1, 2.9))
    axis.set_title(f"1-{CLASSIC}-1, with 95 % bands\nin the legend: log-likelihood of a new point")
    axis.legend(frameon=False, fontsize=9, loc="upper center", ncols=2)


def _evidence(axis: Any, study: Study) -> None:
    rows = sorted(study.compared.candidates, key=lambda row: int(row.name))
    places = range(len(rows))
    axis.plot(places, [row.fit for row in rows], "o--", color=PLAIN, label="fit")
    axis.plot(places, [-row.complexity for row in rows], "s--", color=PALE, label="− complexity")
    evidences = [row.log_evidence for row in rows]
    axis.plot(places, evidences, "D-", color=BAYES, linewidth=2, label="log evidence, their sum")
    for place, value in zip(places, evidences, strict=True):
        text = f"{value:.1f}".replace("-", "−")
        axis.annotate(
            text, (place, value), (0, -17), textcoords="offset points", ha="center", fontsize=8.5, color=BAYES
        )
    best = max(places, key=lambda place: evidences[place])
    axis.plot(best, evidences[best], color=BAYES, **STAR)
    axis.set(xlabel="hidden units", ylabel="nats", xticks=places, xticklabels=[row.name for row in rows])
    axis.margins(y=0.09)
    axis.set_title(f"evidence on the training data\nstar: its choice, {rows[best].name} hidden units")
    axis.legend(frameon=False, fontsize=9)


def _held_out(axis: Any, studies: Sequence[Study]) -> None:
    for study in reversed(studies):
        held_out = study.held_out
        best = max(held_out.values())
        colour, width = (BAYES, 2.0) if study is studies[0] else (PALE, 1.0)
        axis.plot(range(len(held_out)), [value - best for value in held_out.values()], color=colour, linewidth=width)
        place = list(held_out).index(study.picked)
        axis.plot(place, held_out[study.picked] - best, color=colour, **STAR)
    axis.axhspan(-NEAR, 0, color=BAYES, alpha=0.1, linewidth=0)
    axis.set(xlabel="hidden units", ylabel="nats, the best is 0", ylim=(-0.2, 0.01))
    axis.set(xticks=range(len(studies[0].fitted)), xticklabels=list(studies[0].fitted))
    axis.set_title(f"log-likelihood of a new point, {len(studies)} data sets\nstars: choices of the evidence")


def _gamma(axis: Any, studies: Sequence[Study]) -> None:
    for study in reversed(studies):
        rows = sorted(study.compared.candidates, key=lambda row: row.weights)
        colour, width = (BAYES, 2.0) if study is studies[0] else (PALE, 1.0)
        sizes, gammas = [row.weights for row in rows], [row.gamma for row in rows]
        axis.plot(sizes, gammas, "o-", color=colour, linewidth=width, markersize=5)
    limit = 1.25 * max(row.gamma for study in studies for row in study.compared.candidates)
    axis.plot([0, limit], [0, limit], color=INK, linewidth=1, linestyle="--")
    axis.annotate("all weights", (limit, limit), (7, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set(xlabel="weights of the network", ylabel="γ", xlim=(0, sizes[-1] + 2), ylim=(0, 1.05 * limit))
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.set_title(f"γ, the number of weights that the data decide, {len(studies)} data sets\nblue: the first")


def _summary(studies: Sequence[Study]) -> str:
    """Return a table of the sizes that the evidence and new points choose, for each data set."""
    lines = [f"data set  takes  log evidence  held-out  best  held-out  sizes within {NEAR}"]
    for each in studies:
        held_out, picked = each.held_out, each.picked
        best = max(held_out, key=lambda hidden: held_out[hidden])
        near = sum(value >= held_out[best] - NEAR for value in held_out.values())
        evidence = each.compared.candidates[0].log_evidence
        lines.append(
            f"{each.seed:8d}  {picked:5d}  {evidence:12.2f}  {held_out[picked]:8.3f}  {best:4d}  "
            f"{held_out[best]:8.3f}  {f'{near} of {len(held_out)}':>17s}"
        )
    near = sum(each.lost <= NEAR for each in studies)
    mean = sum(each.lost for each in studies) / len(studies)
    largest = sum(max(each.held_out.values()) - each.held_out[max(each.fitted)] for each in studies) / len(studies)
    lines.append(f"within {NEAR} of the best: {near} of {len(studies)}")
    lines.append(f"below the best, on average: {mean:.3f}; always the largest: {largest:.3f}")
    return "\n".join(lines)


def main(
    out: Path, hidden: Sequence[int] = HIDDEN, data_sets: int = 5, restarts: int = 6, epochs: int = 30
) -> dict[str, list[Study]]:
    """Print the comparisons, draw the picture, return the studies by prior. ``hidden`` must have 6 in it."""
    priors = {"one precision for each layer": lw.per_layer(START), "one precision for all": lw.isotropic(START)}
    seeds = range(data_sets)
    studies_of = {
        name: [study(seed, hidden, prior, restarts, epochs) for seed in seeds] for name, prior in priors.items()
    }
    plain = [unregularised(seed, CLASSIC, restarts) for seed in seeds]
    first = next(iter(studies_of.values()))
    print(first[0].compared, end="\n\n")
    print("log-likelihood of a new point:", ", ".join(f"{h}: {value:.3f}" for h, value in first[0].held_out.items()))
    for name, studies in studies_of.items():
        print(f"\n{name}\n{_summary(studies)}")
    print(f"\n1-{CLASSIC}-1, held-out  regularised  squared error only")
    for each, other in zip(first, plain, strict=True):
        print(f"data set {each.seed:<7d}  {each.held_out[CLASSIC]:11.3f}  {log_likelihood(other, each.seed):18.3f}")
    out.mkdir(parents=True, exist_ok=True)
    picture(first, plain[0], out / "hidden_units.png")
    return studies_of


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The number of hidden units, by the evidence.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("docs/images"), help="folder for the picture")
    main(parser.parse_args().out)
