"""CIFAR-10 with networks as they come; validation data are test images, left out of the score, or training crops.

The networks are those that papers on function-space methods share (models/cifar10_resnetDEPTH.npz).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.corrected import IMAGES, corrected_evidence
from experiments.data import data_folder
from experiments.engine.contract import Record
from experiments.options import Progress, add_data_dir, positive, silent
from experiments.repeats import mean_scores, spread_scores
from experiments.resnets import DEPTHS, TRAINED_ON, cifar10, cropped, pretrained
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.demo.training import batches

BATCH = 250
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Cifar:
    """Settings. The curvature of ``data`` training images is scaled to all that the network was trained on."""

    name: ClassVar[str] = "cifar"
    title: ClassVar[str] = "CIFAR-10 with given ResNets: error bars as they come, on a GPU"
    choosing: ClassVar[tuple[str, ...]] = ("depths",)

    data_dir: Path
    depths: tuple[int, ...] = (20, 56)
    data: int = 10_000
    validation: int = 1000
    splits: int = 3
    corrected: int = IMAGES  # training images for the row by the corrected evidence; 0 leaves it out
    device: str = "cpu"
    seed: int = 0
    test: int | None = None  # test images, of which validation images are a part; None takes all

    @classmethod
    def quick(cls) -> Cifar:
        """Return the settings of the quick form."""
        return cls(Path(), depths=(20,), data=200, validation=100, splits=2, corrected=20, test=400)

    @classmethod
    def full(cls) -> Cifar:
        """Return the settings of the full form."""
        return cls(Path())

    def units(self) -> tuple[str, ...]:
        """Return a unit for each network."""
        return tuple(f"resnet{depth}" for depth in self.depths)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Fit every row to one network, and score it on every split."""
        depth = int(unit.removeprefix("resnet"))
        return _records(self, depth, progress)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_data_dir(parser)
    parser.add_argument("--depths", type=int, nargs="+", choices=DEPTHS, default=[20, 56], help="layers (20 56)")
    parser.add_argument("--data", type=positive, default=10_000, help="training images for the curvature (10000)")
    parser.add_argument("--validation", type=positive, default=1000, help="validation images (1000)")
    parser.add_argument("--splits", type=positive, default=3, help="choices of the validation images (3)")
    parser.add_argument(
        "--corrected",
        type=positive,
        default=IMAGES,
        help="training images for the row by the corrected evidence (2000)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = Cifar(
        data_folder(arguments.data_dir), tuple(arguments.depths), arguments.data, arguments.validation,
        arguments.splits, arguments.corrected, arguments.device, arguments.seed,
    )  # fmt: skip
    return ExperimentReport(arguments.out / "cifar.json", (run(settings, progress),))


def run(settings: Cifar, progress: Progress = silent) -> Result:
    """Score every row on every network."""
    start = time.perf_counter()
    train, test = _images(settings)
    rows: list[Row] = []
    for depth in settings.depths:
        model = pretrained(settings.data_dir, depth).to(torch.device(settings.device))
        for name, runs in scored(model, train, test, settings, progress).items():
            rows.append(Row(name, {**mean_scores(runs), **spread_scores(runs, ["NLL"])}, f"ResNet-{depth}"))
        progress(f"ResNet-{depth}: done after {time.perf_counter() - start:.0f} s")
    seconds = {"total": time.perf_counter() - start}
    return Result("cifar", plain(settings), settings.seed, tuple(rows), seconds)


def _records(settings: Cifar, depth: int, progress: Progress) -> Iterator[Record]:
    """Yield the scores of every row on one network for each split."""
    model = pretrained(settings.data_dir, depth).to(torch.device(settings.device))
    for name, runs in scored(model, *_images(settings), settings, progress).items():
        for split, of_split in enumerate(runs):
            yield Record(f"ResNet-{depth}", name, split, of_split)


def _images(settings: Cifar) -> tuple[Pair, Pair]:
    """Return some training images, and the test images."""
    device = torch.device(settings.device)
    train, test = (cifar10(settings.data_dir, part, device) for part in ("train", "test"))
    chosen = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(settings.seed))[: settings.data]
    return (train[0][chosen.to(device)], train[1][chosen.to(device)]), (
        test[0][: settings.test],
        test[1][: settings.test],
    )


def scored(
    model: nn.Module, train: Pair, test: Pair, settings: Cifar, progress: Progress
) -> dict[str, list[dict[str, float]]]:
    """Return the scores of every row for each split of the test images."""
    likelihood = lw.Categorical(temperature=len(train[1]) / TRAINED_ON)
    data = batches(*train, BATCH)
    fit = partial(lw.fit, model, data, likelihood, progress=False)
    network = fit(method=lw.baselines.MapOnly())
    evidence = fit(tuner=lw.tuners.MaximiseEvidence())
    progress(f"evidence at the precision {evidence.prior.values.item():.3g}")
    guarded = evidence.tuned(lw.tuners.Budget(data))
    crops = (cropped(train[0][: settings.validation], settings.seed), train[1][: settings.validation])
    by_crops = evidence.tuned(lw.tuners.Integrate(batches(*crops, BATCH)))
    fixed = {"plain": network, "evidence": evidence, "default": guarded, "crops": by_crops}
    if settings.corrected:
        some = train[0][: settings.corrected], train[1][: settings.corrected]
        fixed["corrected evidence"] = corrected_evidence(model, some, TRAINED_ON, progress=progress)
    log_probs = {name: predicted(posterior, test[0]) for name, posterior in fixed.items()}
    runs: dict[str, list[dict[str, float]]] = {}
    for split in range(settings.splits):
        generator = torch.Generator().manual_seed(settings.seed + split)
        order = torch.randperm(len(test[1]), generator=generator).to(test[1].device)
        held, rest = order[: settings.validation], order[settings.validation :]
        validation = batches(test[0][held], test[1][held], BATCH)
        tuner = lw.tuners.Integrate(validation)
        by_split = {"temperature": network.tuned(tuner), "validation": evidence.tuned(tuner)}
        progress(f"split {split}:\n{by_split['validation'].trace}")
        here = {name: logs[rest] for name, logs in log_probs.items()}
        here |= {name: predicted(posterior, test[0][rest]) for name, posterior in by_split.items()}
        for name, logs in here.items():
            runs.setdefault(name, []).append(scores(logs, test[1][rest]))
    return runs


def predicted(posterior: lw.Fitted, x: Tensor) -> Tensor:
    """Return the log-probabilities of the classes, (N, C)."""
    with torch.no_grad():
        return torch.cat([posterior.predict(part).log_probs.double() for part in x.split(BATCH)])


def scores(log_probs: Tensor, y: Tensor) -> dict[str, float]:
    """Return NLL, ECE, Brier score and accuracy."""
    nll = -float(log_probs.gather(1, y[:, None]).mean())
    assert math.isfinite(nll)
    probs = log_probs.exp()
    measures = (lw.metrics.ece, lw.metrics.brier, lw.metrics.accuracy)
    return {"NLL": nll, **{measure.__name__: measure(probs, y) for measure in measures}}
