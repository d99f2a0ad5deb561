"""Normalised networks on MNIST: the evidence at the trained weights against the corrected one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from experiments.data import Images
from experiments.result import Result, Row, mean_scores, plain, spread_scores
from experiments.training import Batches, Recipe, batches, optimise
from lapwing.metrics import classification

PRIORS: dict[str, Callable[[], Any]] = {
    "one precision": lambda: lw.isotropic(1.0),
    "per normalised group": lambda: lw.priors.per_normalised_group(1.0),
    "per layer": lambda: lw.per_layer(1.0),
}


class ResNet(nn.Module):
    """Three residual blocks with BatchNorm; 44,014 weights."""

    def __init__(self, widths: tuple[int, ...] = (12, 24, 48)) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0])
        pairs = zip((widths[0], *widths[:-1]), widths, strict=True)
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in pairs))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Block(nn.Module):
    """Two convolutions, each with its norm, and a shortcut."""

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
    """Three encoder layers over sixteen patches, LayerNorm after each part; 42,850 weights."""

    def __init__(self, width: int = 40, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(49, width), nn.LayerNorm(width)
        self.place = nn.Parameter(0.1 * torch.randn(16, width))
        make = lambda: nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 7, stride=7).transpose(1, 2)
        h = self.norm(self.embed(patches)) + self.place
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"resnet": ResNet, "transformer": Transformer}


@dataclass(frozen=True)
class Normalised:
    """Networks trained by Adam, then posteriors under every prior, tuned in both ways.

    ``snapshots`` are epochs of the first seed after which the distance between the two predictives is measured too.
    """

    data_dir: Path
    networks: tuple[str, ...] = tuple(NETWORKS)
    priors: tuple[str, ...] = ("one precision", "per normalised group")
    recipe: Recipe = Recipe(epochs=20, batch_size=256, learning_rate=2e-3, weight_decay=0.0, max_steps=10**9)
    data: int | None = 5_000
    snapshots: tuple[int, ...] = (1, 3, 8, 20)
    method: str = "kron"
    seeds: int = 3
    device: str = "cpu"
    seed: int = 0


def run(settings: Normalised, report: Callable[[str], None] = lambda line: None) -> Result:
    """Test scores of every network, prior and evidence, and the distances as training goes on."""
    begun = time.perf_counter()
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    arrays: dict[str, list[float]] = {"epochs": [float(epoch) for epoch in settings.snapshots]}
    for network in settings.networks:
        for seed in range(settings.seed, settings.seed + settings.seeds):
            images = Images.read(settings.data_dir, "mnist", torch.device(settings.device), settings.data, seed)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = NETWORKS[network]().to(images.train[0].device)
            distances: list[dict[str, float]] = []
            watching = _watching(model, images, settings, distances) if seed == settings.seed else lambda epoch: None
            optimise(model, *images.train, settings.recipe, seed, watching)
            for name, scores in _scored(model, images, settings):
                found.setdefault((network, name), []).append(scores)
                report(f"{network}, seed {seed}, {name}: {scores}")
            for key in distances[0] if distances else ():
                arrays[f"{network}/{seed}/{key}"] = [each[key] for each in distances]
    rows = tuple(Row(name, {**mean_scores(s), **spread_scores(s, ("NLL",))}, net) for (net, name), s in found.items())
    seconds = {"total": time.perf_counter() - begun}
    return Result("normalised", plain(settings), settings.seed, rows, seconds, arrays)


def _watching(
    model: nn.Module, images: Images, settings: Normalised, distances: list[dict[str, float]]
) -> Callable[[int], None]:
    """After chosen epochs: how far the naive and the corrected predictive are from each other and from the labels."""

    def look(epoch: int) -> None:
        if epoch not in settings.snapshots:
            return
        data = batches(*images.train, 1000)
        test = images.test[0][:2000], images.test[1][:2000]
        probs = [_probs(_fit(model, data, "one precision", tuner, settings), test[0]) for tuner in _tuners().values()]
        gap = (probs[0] * (probs[0].clamp_min(1e-30) / probs[1].clamp_min(1e-30)).log()).sum(1).mean()
        variation = 0.5 * (probs[0] - probs[1]).abs().sum(1).mean()
        nll = {f"NLL {name}": classification.nll(p, test[1]) for name, p in zip(_tuners(), probs, strict=True)}
        with torch.no_grad():
            own = classification.nll(model(test[0]).softmax(-1), test[1])
        distances.append({"KL": float(gap), "total variation": float(variation), **nll, "NLL plain": own})

    return look


def _tuners() -> dict[str, Any]:
    return {
        "naive": lw.tuners.MaximiseEvidence(),
        "corrected": lw.tuners.LinearMode(solver_tolerance=1e-2, tolerance=1e-4),
    }


def _fit(model: nn.Module, data: Batches, prior: str, tuner: Any, settings: Normalised) -> lw.Fitted:
    return lw.fit(
        model, data, "classification", method=settings.method, prior=PRIORS[prior](), tuner=tuner, progress=False
    )


def _scored(model: nn.Module, images: Images, settings: Normalised) -> list[tuple[str, dict[str, float]]]:
    x, y = images.test
    with torch.no_grad():
        found = [("plain network", _scores(torch.cat([model(part).softmax(-1) for part in x.split(1000)]), y))]
    data = batches(*images.train, 1000)
    for prior in settings.priors:
        for name, tuner in _tuners().items():
            begun = time.perf_counter()
            fitted = _fit(model, data, prior, tuner, settings)
            scores = {**_scores(_probs(fitted, x), y), "seconds": time.perf_counter() - begun}
            gamma = fitted.effective_parameters().total
            found.append((f"{name}, {prior}", {**scores, "log evidence": float(fitted.log_evidence()), "gamma": gamma}))
    return found


def _probs(fitted: lw.Fitted, x: Tensor) -> Tensor:
    return torch.cat([fitted.predict(part).probs for part in x.split(1000)])


def _scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    return {
        "NLL": classification.nll(probs, y),
        "accuracy": classification.accuracy(probs, y),
        "ECE": classification.ece(probs, y),
    }
