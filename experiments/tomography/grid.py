"""The table of the case study: settings of angles and noise, many images, every method."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiments.options import Progress
from experiments.tomography.beliefs import EVIDENCE, TV, image_beliefs, tangent_posteriors
from experiments.tomography.case import ANGLES, NOISES, Scan, Setting
from experiments.tomography.deep_prior import Reconstruction, Training, reconstruct_many
from experiments.tomography.dropout import dropout_samples
from experiments.tomography.scores import psnr
from experiments.tomography.unet import seeded_unet

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
        size: The side of images that are made, in pixels; others have their own.
    """

    images: int = 20
    angles: tuple[int, ...] = ANGLES
    noises: tuple[float, ...] = NOISES
    steps: int = 3000
    rate: float = 5e-4
    channels: int = 32
    samples: int = 4096
    tuning: int = 200
    size: int = 28

    @property
    def settings(self) -> list[Setting]:
        return [Setting(angles, noise) for noise in self.noises for angles in self.angles]


def trained(
    cases: Sequence[Scan], weight_of_tv: float, grid: GridSettings, dropout: float, seed: int, device: torch.device
) -> tuple[Reconstruction, ...]:
    """Train one network for each scan, all at once."""
    y = torch.stack([case.y for case in cases]).to(device, torch.float32)
    z = torch.stack([case.backprojection for case in cases]).to(device, torch.float32)
    unets = [seeded_unet(seed + i, channels=grid.channels, dropout=dropout) for i in range(len(cases))]
    training = Training(weight_of_tv, grid.steps, grid.rate)
    operator = cases[0].operator.to(device, torch.float32)
    return reconstruct_many(unets, operator, y, z, training)


def setting_scores(
    cases: Sequence[Scan], setting: Setting, grid: GridSettings, seed: int, say: Progress, device: str = "cpu"
) -> list[Scores]:
    """Return the scores of every method for every image of one setting, with networks that are trained on a device."""
    start = time.perf_counter()
    plains, drops = (
        trained(cases, setting.weight_of_tv, grid, dropout, seed, torch.device(device)) for dropout in (0.0, 0.05)
    )
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
