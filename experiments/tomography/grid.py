"""The table of the case study: every setting of angles and noise, many images, every method, with standard errors."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments.options import Progress, silent
from experiments.tomography.beliefs import DROPOUT, EVIDENCE, METHODS, TV, image_beliefs, tangent_posteriors
from experiments.tomography.case import ANGLES, NOISES, Scan, Setting, scans
from experiments.tomography.deep_prior import Reconstruction, Training, reconstruct_many
from experiments.tomography.dropout import dropout_samples
from experiments.tomography.scores import psnr
from experiments.tomography.unet import seeded_unet
from lapwing.demo.result import Result, Row, plain

LL = "LL"
Scores = dict[str, dict[str, float]]  # of each method


@dataclass(frozen=True)
class GridSettings:
    """What the table is made of.

    Args:
        images: The number of images.
        angles: The numbers of angles.
        noises: The shares of noise.
        steps: Training steps of a network.
        rate: Its learning rate.
        channels: Its width.
        samples: Images drawn with dropout.
        tuning: The largest number of steps of each search for hyperparameters.
        device: Where to train, "cpu" or "cuda".
    """

    images: int = 20
    angles: tuple[int, ...] = ANGLES
    noises: tuple[float, ...] = NOISES
    steps: int = 3000
    rate: float = 5e-4
    channels: int = 32
    samples: int = 4096
    tuning: int = 200
    device: str = "cpu"

    @property
    def settings(self) -> list[Setting]:
        return [Setting(angles, noise) for noise in self.noises for angles in self.angles]


def trained(
    cases: Sequence[Scan], weight_of_tv: float, grid: GridSettings, dropout: float, seed: int
) -> tuple[Reconstruction, ...]:
    """Train one network for each scan, all at once."""
    device = torch.device(grid.device)
    y = torch.stack([case.y for case in cases]).to(device, torch.float32)
    z = torch.stack([case.backprojection for case in cases]).to(device, torch.float32)
    unets = [seeded_unet(seed + i, channels=grid.channels, dropout=dropout) for i in range(len(cases))]
    training = Training(weight_of_tv, grid.steps, grid.rate)
    operator = cases[0].operator.to(device, torch.float32)
    return reconstruct_many(unets, operator, y, z, training)


def setting_scores(
    cases: Sequence[Scan], setting: Setting, grid: GridSettings, seed: int, say: Progress
) -> list[Scores]:
    """Return the scores of every method for every image of one setting."""
    start = time.perf_counter()
    plains = trained(cases, setting.weight_of_tv, grid, 0.0, seed)
    drops = trained(cases, setting.weight_of_tv, grid, 0.05, seed)
    say(f"{setting}: trained in {time.perf_counter() - start:.0f} s")
    scores = []
    for i, (case, one, drop) in enumerate(zip(cases, plains, drops, strict=True)):
        start = time.perf_counter()
        posteriors = tangent_posteriors(one.unet, case, setting.weight_of_tv, max_steps=grid.tuning)
        generator = torch.Generator().manual_seed(seed + i)
        images = dropout_samples(drop.unet, case.backprojection.to(drop.image), grid.samples, generator)
        beliefs = image_beliefs(case, posteriors, images)
        each = {name: belief.scores(case.truth) for name, belief in beliefs.items()}
        for name in (EVIDENCE, TV):
            each[name] |= {"noise": float(posteriors[name].noise_std) / case.noise_std}
        each["FBP"] = {"PSNR": psnr(case.backprojection, case.truth)}
        scores.append(each)
        say(f"  image {i}: LL {each[EVIDENCE][LL]:.2f} in {time.perf_counter() - start:.1f} s")
    return scores


def table_of(truths: Tensor, grid: GridSettings, seed: int, kept: Path | None = None, say: Progress = silent) -> Result:
    """Return the table over images (N, H, W).

    Args:
        truths: The images.
        grid: The settings.
        seed: The seed of noise, initial weights and draws.
        kept: A file of JSON lines with the scores of settings that are finished, to which new ones are added.
        say: Is called with lines about progress.
    """
    start = time.perf_counter()
    done: dict[str, list[Scores]] = {}
    if kept is not None and kept.exists():
        done = {line["setting"]: line["scores"] for line in map(json.loads, kept.read_text().splitlines())}
    for setting in grid.settings:
        if str(setting) in done:
            continue
        done[str(setting)] = setting_scores(scans(truths, setting, seed), setting, grid, seed, say)
        if kept is not None:
            with kept.open("a") as file:
                file.write(json.dumps({"setting": str(setting), "scores": done[str(setting)]}) + "\n")
    rows = tuple(row for setting in grid.settings for row in setting_rows(str(setting), done[str(setting)]))
    seconds = {"all": time.perf_counter() - start}
    return Result("tomography, table", plain(grid), seed, rows, seconds, notes=verdict(grid.settings, done))


def setting_rows(setting: str, scores: Sequence[Scores]) -> list[Row]:
    """Return the rows of one setting: means over images, and standard errors of the log-densities."""
    rows = []
    for name in ("FBP", *METHODS):
        each = [one[name] for one in scores]
        columns = {}
        for score in each[0]:
            values = torch.tensor([one[score] for one in each], dtype=torch.float64)
            columns[score] = float(values.mean())
            if score == LL:
                columns["±"] = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        rows.append(Row(name, columns, setting))
    return rows


def verdict(settings: Sequence[Setting], done: Mapping[str, Sequence[Scores]]) -> tuple[str, ...]:
    """Say on how many settings the tangent model has the highest mean log-density."""
    mean = lambda setting, name: sum(one[name][LL] for one in done[str(setting)]) / len(done[str(setting)])
    notes = []
    for ours in (EVIDENCE, TV):
        wins = sum(
            all(mean(s, ours) > mean(s, name) for name in METHODS if name not in (EVIDENCE, TV)) for s in settings
        )
        notes.append(f"{ours}: higher LL than every baseline in {wins} of {len(settings)} settings")
    better = sum(mean(s, TV) > mean(s, EVIDENCE) for s in settings)
    notes.append(f"TV-PredCP above the evidence alone in {better} of {len(settings)} settings")
    notes.append("LL: nats per pixel, of the whole image, or in patches; ± is the standard error over images")
    notes.append("noise: learned over true standard deviation; one noise floor for all methods")
    notes.append(f"{DROPOUT}: correlations of all pixels shrunk by d / (d + K), d pixels, K samples")
    return tuple(notes)
