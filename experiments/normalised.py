"""Normalised networks on MNIST: the evidence at the trained weights against the corrected evidence."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from experiments.data import Images, data_folder
from experiments.engine.contract import Record
from experiments.engine.seeds import parted, records_of, seed_units
from experiments.inducing_picture import legend_entries
from experiments.options import Progress, add_large_data, chosen, positive, silent
from experiments.pinned import PROBIT
from experiments.repeats import mean_scores, spread_scores
from lapwing import metrics
from lapwing.demo.result import ExperimentReport, Result, Row, plain, save
from lapwing.demo.training import Batches, TrainingSettings, batches, optimise
from lapwing.plots import INK, OTHER, PLAIN, POSTERIOR, new_figure

PRIORS: dict[str, Callable[[], Any]] = {
    "one precision": lambda: lw.isotropic(1.0),
    "per normalised group": lambda: lw.priors.per_normalised_group(1.0),
    "per layer": lambda: lw.per_layer(1.0),
}


class ResNet(nn.Module):
    """A network of three residual blocks with BatchNorm; 44,014 weights."""

    def __init__(self, widths: tuple[int, ...] = (12, 24, 48)) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0])
        pairs = zip((widths[0], *widths[:-1]), widths, strict=True)
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in pairs))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Block(nn.Module):
    """Two convolutions, each followed by BatchNorm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = nn.Sequential()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


class Transformer(nn.Module):
    """A transformer of three encoder layers over sixteen patches, with LayerNorm after each part; 42,850 weights."""

    def __init__(self, width: int = 40, layers: int = 3, patch: int = 7) -> None:
        super().__init__()
        self.patch = patch
        self.embed, self.norm = nn.Linear(patch**2, width), nn.LayerNorm(width)
        self.place = nn.Parameter(0.1 * torch.randn(16, width))
        make = lambda: nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        h = self.norm(self.embed(patches)) + self.place
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"resnet": ResNet, "transformer": Transformer}


@dataclass(frozen=True)
class Normalised:
    """Settings: networks trained by Adam, then posteriors under every prior, each tuned by both evidences.

    ``snapshots`` are epochs after which, for the first seed, the distance between the two predictives is measured too.
    """

    name: ClassVar[str] = "normalised"
    title: ClassVar[str] = "MNIST: naive against corrected evidence, normalised networks"
    choosing: ClassVar[tuple[str, ...]] = ("networks", "snapshots", "seeds")

    data_dir: Path
    networks: tuple[str, ...] = tuple(NETWORKS)
    priors: tuple[str, ...] = ("one precision", "per normalised group")
    recipe: TrainingSettings = TrainingSettings(
        epochs=20, batch_size=256, learning_rate=2e-3, weight_decay=0.0, max_steps=10**9
    )
    data: int | None = 5_000
    snapshots: tuple[int, ...] = (1, 3, 8, 20)
    method: str = "kron"
    seeds: int = 3
    device: str = "cpu"
    seed: int = 0

    @classmethod
    def quick(cls) -> Normalised:
        """Return the settings of the quick form."""
        recipe = replace(cls.recipe, epochs=2)
        return cls(Path(), ("resnet",), ("one precision",), recipe, data=200, snapshots=(), seeds=1)

    @classmethod
    def full(cls) -> Normalised:
        """Return the settings of the full form."""
        return cls(Path())

    def units(self) -> tuple[str, ...]:
        """Return a unit for each network and seed."""
        return seed_units(self, *self.networks)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train one network from one seed; distances during training, for the picture, are not measured."""
        network, seed = parted(unit)
        return records_of(run(replace(self, networks=(network,), snapshots=(), seeds=1, seed=seed), progress), seed)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_large_data(parser)
    parser.add_argument("--networks", nargs="+", metavar="NAME", help="resnet, transformer; both by default")
    parser.add_argument("--epochs", type=positive, default=20)


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = Normalised(
        data_dir=data_folder(arguments.data_dir),
        networks=chosen(arguments.networks, tuple(NETWORKS), "--networks"),
        recipe=replace(Normalised.recipe, epochs=arguments.epochs),
        data=arguments.data or 5_000,
        seeds=arguments.seeds,
        device=arguments.device,
        seed=arguments.seed,
    )
    return ExperimentReport(arguments.out / "normalised.json", (run(settings, progress),), {"normalised.png": picture})


def run(settings: Normalised, progress: Progress = silent) -> Result:
    """Return the test scores of every network, prior and evidence, and the distances during training."""
    start = time.perf_counter()
    scores_of: dict[tuple[str, str], list[dict[str, float]]] = {}
    arrays: dict[str, list[float]] = {"epochs": [float(epoch) for epoch in settings.snapshots]}
    for network in settings.networks:
        for seed in range(settings.seed, settings.seed + settings.seeds):
            images = Images.read(settings.data_dir, "mnist", torch.device(settings.device), settings.data, seed)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = NETWORKS[network]().to(images.train[0].device)
            distances: list[dict[str, float]] = []
            measure = _measuring(model, images, settings, distances) if seed == settings.seed else lambda epoch: None
            optimise(model, *images.train, settings.recipe, seed, measure)
            for name, scores in _scored(model, images, settings):
                scores_of.setdefault((network, name), []).append(scores)
                progress(f"{network}, seed {seed}, {name}: {scores}")
            for key in distances[0] if distances else ():
                arrays[f"{network}/{seed}/{key}"] = [each[key] for each in distances]
    rows = tuple(
        Row(name, {**mean_scores(scores), **spread_scores(scores, ("NLL",))}, network)
        for (network, name), scores in scores_of.items()
    )
    seconds = {"total": time.perf_counter() - start}
    return Result("normalised", plain(settings), settings.seed, rows, seconds, arrays)


def _measuring(
    model: nn.Module, images: Images, settings: Normalised, distances: list[dict[str, float]]
) -> Callable[[int], None]:
    """Return a function that, after the snapshot epochs, appends the distance of both predictives and their NLL."""

    def measure(epoch: int) -> None:
        if epoch not in settings.snapshots:
            return
        data = batches(*images.train, 1000)
        test = images.test[0][:2000], images.test[1][:2000]
        probs = [_probs(_fit(model, data, "one precision", tuner, settings), test[0]) for tuner in _tuners().values()]
        divergence = (probs[0] * (probs[0].clamp_min(1e-30) / probs[1].clamp_min(1e-30)).log()).sum(1).mean()
        variation = 0.5 * (probs[0] - probs[1]).abs().sum(1).mean()
        nll = {f"NLL {name}": metrics.categorical_nll(p, test[1]) for name, p in zip(_tuners(), probs, strict=True)}
        with torch.no_grad():
            plain_nll = metrics.categorical_nll(model(test[0]).softmax(-1), test[1])
        distances.append({"KL": float(divergence), "total variation": float(variation), **nll, "NLL plain": plain_nll})

    return measure


def _tuners() -> dict[str, Any]:
    return {
        "naive": lw.tuners.MaximiseEvidence(),
        "corrected": lw.tuners.LinearMode(solver_tolerance=1e-2, tolerance=1e-4),
    }


def _fit(model: nn.Module, data: Batches, prior: str, tuner: Any, settings: Normalised) -> lw.Fitted:
    return lw.fit(model, data, PROBIT, method=settings.method, prior=PRIORS[prior](), tuner=tuner, progress=False)


def _scored(model: nn.Module, images: Images, settings: Normalised) -> list[tuple[str, dict[str, float]]]:
    """Return name and test scores of the plain network and of every posterior."""
    x, y = images.test
    with torch.no_grad():
        rows = [("plain network", _scores(torch.cat([model(part).softmax(-1) for part in x.split(1000)]), y))]
    data = batches(*images.train, 1000)
    for prior in settings.priors:
        for name, tuner in _tuners().items():
            start = time.perf_counter()
            fitted = _fit(model, data, prior, tuner, settings)
            scores = {**_scores(_probs(fitted, x), y), "seconds": time.perf_counter() - start}
            gamma = fitted.effective_parameters().total
            rows.append((f"{name}, {prior}", {**scores, "log evidence": float(fitted.log_evidence()), "gamma": gamma}))
    return rows


def _probs(fitted: lw.Fitted, x: Tensor) -> Tensor:
    return torch.cat([fitted.predict(part).probs for part in x.split(1000)])


def _scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    return {
        "NLL": metrics.categorical_nll(probs, y),
        "accuracy": metrics.accuracy(probs, y),
        "ECE": metrics.ece(probs, y),
    }


def picture(result: Result, path: Path) -> None:
    """Draw for every network, during training, the distance between both predictives, and the NLL of each."""
    measured = [key.removesuffix("/KL") for key in result.arrays if key.endswith("/KL")]
    networks = list(dict.fromkeys(run.split("/")[0] for run in measured))
    figure, axes = new_figure(len(networks), 2, (9.6, 0.5 + 3.4 * len(networks)))
    styles = {"plain": ("plain network", PLAIN), "naive": ("naive evidence", OTHER),
              "corrected": ("corrected evidence", POSTERIOR)}  # fmt: skip
    for (distance, nll), network in zip(axes, networks, strict=True):
        for run in (run for run in measured if run.split("/")[0] == network):
            _against_epochs(distance, result.arrays, f"{run}/KL", {"color": INK})
            for key, (label, colour) in styles.items():
                _against_epochs(nll, result.arrays, f"{run}/NLL {key}", {"color": colour, "label": label})
        distance.set(title=f"{network}: naive from corrected", xlabel="epoch", ylabel="KL divergence, nats")
        nll.set(title=f"{network}: test data", xlabel="epoch", ylabel="NLL, nats")
        for axis in (distance, nll):
            axis.title.set_fontsize(10)
            axis.set_xticks(result.arrays["epochs"])
            axis.set_ylim(bottom=0)
    figure.legend(*legend_entries([axes[0][1]]), frameon=False, ncols=3, loc="outside lower center")
    save(figure, path)


def _against_epochs(axis: Any, arrays: Mapping[str, list[float]], key: str, style: dict[str, str]) -> None:
    """Plot values against epochs. A run that ended early has fewer values than there are snapshots."""
    values = arrays[key]
    axis.plot(arrays["epochs"][: len(values)], values, marker="o", markersize=4.5, linewidth=1.6, **style)
