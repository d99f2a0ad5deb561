"""Choose the activation by the evidence, and check the choice on new data.

The same network, ten inputs, six hidden units and one output, has tanh, relu, sin or nothing between its layers. With
nothing (the identity) it is a linear regression. There are two tables with ten inputs each:

- *diabetes*: 442 patients, ten measurements, the progress of the disease a year later. It ships with scikit-learn;
- *Friedman's function*, scikit-learn's ``make_friedman1``: 10 sin(π x₁ x₂) + 20 (x₃ − ½)² + 10 x₄ + 5 x₅ and noise;
  the other five inputs have no effect.

Two hundred rows are for training, by ``lw.train`` with ``lw.recipes.classic`` from several starts, of which the one
with the best evidence is kept. ``lw.compare`` ranks the four activations. The remaining rows (a thousand for Friedman's
function) check its choice. All of it is repeated for five splits.

The last comparison is between one and two hidden layers, and a picture shows how many weights the data determine.

The prior has one precision for all weights. With one for each layer, relu and the identity would have a redundant
scale: one layer times ten and the next over ten is the same function, and the two precisions diverge.

Run it with ``python docs/tutorials/activation.py [folder]``: it prints the comparison and draws activation.png and
effective_parameters.png. It takes a few minutes.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from effective_parameters import effective_parameters_picture
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes, make_friedman1
from torch import Tensor, nn

import lapwing as lw
from lapwing.demo.result import save

PALE = "#9a9a9a"
STYLES = {"tanh": ("#0072b2", "o"), "relu": ("#d55e00", "s"), "sin": ("#009e73", "^"), "identity": ("#333333", "D")}
TRAINING, HIDDEN = 200, 6
NEAR = 0.02  # nats for each new row: an activation within this distance is near the best


class Sin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh, "relu": nn.ReLU, "sin": Sin, "identity": nn.Identity,
}  # fmt: skip


def diabetes(seed: int) -> tuple[Any, Any]:
    return load_diabetes(return_X_y=True)


def friedman(seed: int) -> tuple[Any, Any]:
    return make_friedman1(n_samples=TRAINING + 1000, noise=1.0, random_state=seed)


TABLES: dict[str, Callable[[int], tuple[Any, Any]]] = {"diabetes": diabetes, "Friedman's function": friedman}


@dataclass(frozen=True, eq=False)
class Split:
    """Rows for training and new rows, standardised by the training rows."""

    x: Tensor
    y: Tensor
    new_x: Tensor
    new_y: Tensor

    @classmethod
    def of(cls, table: str, seed: int) -> Split:
        x, y = (torch.as_tensor(part, dtype=torch.float64) for part in TABLES[table](seed))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        train, new = order[:TRAINING], order[TRAINING:]
        x = (x - x[train].mean(0)) / x[train].std(0)
        y = ((y - y[train].mean()) / y[train].std()).unsqueeze(1)
        return cls(x[train], y[train], x[new], y[new])

    def log_likelihood(self, posterior: lw.Fitted) -> float:
        """Return the log-likelihood of a new row, on average."""
        return float(posterior.predict(self.new_x).log_prob(self.new_y).mean())


def network(activation: str, layers: int, start: int) -> nn.Sequential:
    """Return a network of ten inputs, ``layers`` hidden layers of six units, and one output."""
    act = ACTIVATIONS[activation]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        parts: dict[str, nn.Module] = {}
        for i in range(1, layers + 1):
            parts[f"hidden {i}"] = nn.Linear(HIDDEN if i > 1 else 10, HIDDEN)
            parts[f"activation {i}"] = act()
        return nn.Sequential(OrderedDict({**parts, "output": nn.Linear(HIDDEN, 1)})).double()


def trained(split: Split, activation: str, restarts: int, epochs: int, layers: int = 1) -> lw.Fitted:
    """Train from several starts and return the posterior with the best evidence."""
    data = [(split.x, split.y)]
    posteriors = [
        lw.train(
            network(activation, layers, start), data, "regression", recipe=lw.recipes.classic(epochs), progress=False
        ).posterior
        for start in range(restarts)
    ]
    return max(posteriors, key=lambda posterior: float(posterior.log_evidence()))


@dataclass(frozen=True, eq=False)
class Study:
    """One split of one table: a network for each activation, and a deeper one with the activation that was chosen."""

    seed: int
    split: Split
    fitted: dict[str, lw.Fitted]
    deeper: lw.Fitted

    @cached_property
    def compared(self) -> Any:
        return lw.compare(self.fitted)

    @property
    def picked(self) -> str:
        return str(self.compared.best)

    @cached_property
    def held_out(self) -> dict[str, float]:
        return {name: self.split.log_likelihood(posterior) for name, posterior in self.fitted.items()}

    @property
    def lost(self) -> float:
        """The difference from the best activation to the one with the best evidence, in nats for each new row."""
        return max(self.held_out.values()) - self.held_out[self.picked]


def study(table: str, seed: int, restarts: int, epochs: int) -> Study:
    split = Split.of(table, seed)
    fitted = {name: trained(split, name, restarts, epochs) for name in ACTIVATIONS}
    picked = str(lw.compare(fitted).best)
    return Study(seed, split, fitted, trained(split, picked, restarts, epochs, layers=2))


def picture(tables: dict[str, list[Study]], path: Path) -> None:
    """Draw for each table the held-out likelihood against the evidence; both should rank the activations alike."""
    figure = Figure(figsize=(11.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(tables), squeeze=False)[0]
    for axis, (table, studies) in zip(axes, tables.items(), strict=True):
        for each in studies:
            _activations(axis, each)
        near = sum(each.lost <= NEAR for each in studies)
        axis.axhspan(-NEAR, 0, color=STYLES["tanh"][0], alpha=0.1, linewidth=0)
        axis.axvline(0, color=PALE, linewidth=1, linestyle=":")
        axis.set(xlabel="log evidence, the best is 0", ylabel="log-likelihood of a new row, the best is 0")
        axis.set_title(f"{table}\nthe evidence's choice is near the best {near} of {len(studies)} times", fontsize=10.5)
        axis.spines[["top", "right"]].set_visible(False)
    entries = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))  # one for each activation
    figure.legend(entries.values(), entries.keys(), frameon=False, ncols=4, loc="outside lower center")
    save(figure, path)


def _activations(axis: Any, study: Study) -> None:
    """Draw a line through the activations of one split, from the least evidence to the most."""
    best = max(study.held_out.values())
    evidences = {row.name: row.log_evidence - study.compared.candidates[0].log_evidence
                 for row in study.compared.candidates}  # fmt: skip
    axis.plot(list(evidences.values()), [study.held_out[name] - best for name in evidences], color=PALE, linewidth=0.8)
    for name, (colour, marker) in STYLES.items():
        style = {"color": colour, "marker": marker, "s": 46, "edgecolors": "white", "linewidths": 0.6, "zorder": 3}
        axis.scatter([evidences[name]], [study.held_out[name] - best], label=name, **style)


def _summary(studies: Sequence[Study]) -> str:
    """Return a table of the activations that the evidence and new rows choose, for each split."""
    lines = ["split  taken     " + "  ".join(f"{name:>8s}" for name in ACTIVATIONS) + "     best"]
    for each in studies:
        values = "  ".join(f"{value:8.3f}" for value in each.held_out.values())
        best = max(each.held_out, key=lambda name: each.held_out[name])
        lines.append(f"{each.seed:5d}  {each.picked:8s}  {values}  {best:>8s}")
    near = sum(each.lost <= NEAR for each in studies)
    mean = sum(each.lost for each in studies) / len(studies)
    return "\n".join([*lines, f"within {NEAR} of the best: {near} of {len(studies)}; mean loss {mean:.3f}"])


def _depth(studies: Sequence[Study]) -> str:
    """Return a table of one and two hidden layers, by the evidence and by new rows."""
    lines = ["hidden layers  evidence, one       two  held-out, one       two"]
    for each in studies:
        one, two = float(each.fitted[each.picked].log_evidence()), float(each.deeper.log_evidence())
        new = each.held_out[each.picked], each.split.log_likelihood(each.deeper)
        lines.append(f"{each.picked:13s}  {one:13.2f}  {two:8.2f}  {new[0]:13.3f}  {new[1]:8.3f}")
    return "\n".join(lines)


def main(
    out: Path, tables: Sequence[str] = tuple(TABLES), splits: int = 5, restarts: int = 3, epochs: int = 25
) -> dict[str, list[Study]]:
    """Print the comparisons, draw the pictures, return the studies by table."""
    studies_of = {table: [study(table, seed, restarts, epochs) for seed in range(splits)] for table in tables}
    for i, (table, studies) in enumerate(studies_of.items()):
        print("\n" * (i > 0) + f"{table}\n{studies[0].compared}\n\nlog-likelihood of a new row\n{_summary(studies)}\n")
        print(_depth(studies))
    out.mkdir(parents=True, exist_ok=True)
    picture(studies_of, out / "activation.png")
    effective = studies[0].deeper.effective_parameters()
    print(f"\n{table}, {studies[0].picked}, two hidden layers\n{effective}")
    effective_parameters_picture(effective.layers, effective.sizes, out / "effective_parameters.png")
    return studies_of


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The activation of a network, by the evidence.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("docs/images"), help="folder for the pictures")
    main(parser.parse_args().out)
