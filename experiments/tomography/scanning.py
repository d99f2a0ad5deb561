"""A scan that chooses its next angles: PSNR against their number, chosen by the belief, evenly spaced, or at random."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.options import Progress, silent
from experiments.tomography.beliefs import evidence_posterior
from experiments.tomography.case import Scan
from experiments.tomography.deep_prior import Reconstruction, Training, reconstruct
from experiments.tomography.design import DenseBelief, choose_angles
from experiments.tomography.geometry import ParallelBeam
from experiments.tomography.phantoms import rectangles
from experiments.tomography.rays import angle_operators, ray_transform
from experiments.tomography.scores import psnr
from experiments.tomography.unet import seeded_unet
from lapwing.demo.result import Result, Row, plain
from lapwing.linalg.operators import SparseOperator
from lapwing.runtime.threads import normal

STRATEGIES = {"information gain": "information", "expected error": "error", "equispaced": "", "random": ""}


@dataclass(frozen=True)
class DesignSettings:
    """How angles are chosen.

    Args:
        images: The number of images: rectangles whose edges have nearly the same two directions.
        size: Their side in pixels.
        candidates: The number of angles to choose from, evenly spaced.
        counts: The numbers of angles at which an image is reconstructed; after each, angles are chosen for the next.
        noise: The share of noise.
        steps: Training steps of a network.
        rate: Its learning rate.
        channels: Its width.
        weight_of_tv: The weight of the total variation.
    """

    images: int = 6
    size: int = 28
    candidates: int = 60
    counts: tuple[int, ...] = (4, 6, 8, 10, 12)
    noise: float = 0.05
    steps: int = 1000
    rate: float = 1e-3
    channels: int = 16
    weight_of_tv: float = 3e-5


@dataclass(frozen=True, eq=False)
class Scanner:
    """An image that can be measured at any candidate angle. Every angle has noise of its own, drawn once."""

    truth: Tensor
    geometry: ParallelBeam  # all candidates
    operators: tuple[SparseOperator, ...]
    noise_std: float
    seed: int

    @classmethod
    def of(cls, truth: Tensor, settings: DesignSettings, seed: int) -> Scanner:
        geometry = ParallelBeam(settings.size, settings.candidates)
        operators = angle_operators(geometry, dtype=torch.float64)
        clean = ray_transform(geometry, torch.float64).forward(truth.reshape(-1))
        return cls(truth, geometry, operators, settings.noise * float(clean.abs().mean()), seed)

    def scan(self, angles: list[int]) -> Scan:
        """Measure the image at these candidates, in the order of their angles."""
        angles = sorted(angles)
        geometry = self.geometry.with_angles(tuple(self.geometry.radians[i] for i in angles))
        return Scan(
            self.truth, geometry, ray_transform(geometry, torch.float64), torch.cat(list(map(self._measured, angles))),
            self.noise_std,
        )  # fmt: skip

    def _measured(self, angle: int) -> Tensor:
        operator = self.operators[angle]
        generator = torch.Generator().manual_seed(1000 * self.seed + angle)
        clean = operator.forward(self.truth.reshape(-1))
        return clean + self.noise_std * normal((operator.rows,), generator, operator.like)


def evenly(count: int, candidates: int) -> list[int]:
    """Return evenly spaced candidates.

    >>> evenly(4, 10)
    [0, 2, 5, 7]
    """
    return [i * candidates // count for i in range(count)]


def reconstructed(scan: Scan, settings: DesignSettings, seed: int) -> Reconstruction:
    """Train a network on the scan."""
    operator, y = scan.operator.to(dtype=torch.float32), scan.y.float()
    unet = seeded_unet(seed, channels=settings.channels)
    training = Training(settings.weight_of_tv, settings.steps, settings.rate)
    return reconstruct(unet, operator, y, scan.backprojection.float(), training)


def curve(scanner: Scanner, strategy: str, settings: DesignSettings, seed: int) -> tuple[list[float], list[int]]:
    """Return the PSNR at each number of angles, and the angles in the end.

    All start from the same evenly spaced angles. The belief that chooses is the tangent model's at the present
    reconstruction, with hyperparameters by the evidence.
    """
    angles, scores = evenly(settings.counts[0], settings.candidates), list[float]()
    order = torch.randperm(settings.candidates, generator=torch.Generator().manual_seed(seed)).tolist()
    for now, following in zip(settings.counts, (*settings.counts[1:], None), strict=True):
        if strategy == "equispaced":
            angles = evenly(now, settings.candidates)
        scan = scanner.scan(angles)
        trained = reconstructed(scan, settings, seed)
        scores.append(psnr(trained.image, scanner.truth))
        if following is None:
            break
        free = [i for i in order if i not in angles]
        if strategy == "random":
            angles = angles + free[: following - now]
        elif STRATEGIES[strategy]:
            posterior = evidence_posterior(trained.unet, scan)
            belief = DenseBelief(posterior.covariance())
            candidates = [scanner.operators[i] for i in sorted(free)]
            choice = choose_angles(
                belief, candidates, following - now, float(posterior.noise_std), STRATEGIES[strategy]
            )
            angles = angles + [sorted(free)[i] for i in choice.chosen]
    return scores, sorted(angles)


@dataclass(frozen=True)
class Scanned:
    """The PSNR of one image at each number of angles, and the angles in the end, in degrees."""

    psnrs: tuple[float, ...]
    degrees: tuple[float, ...]

    def to_scores(self, counts: Sequence[int]) -> dict[str, float]:
        """Return the numbers by name, for a record."""
        psnrs = {f"{count} angles": value for count, value in zip(counts, self.psnrs, strict=True)}
        return {**psnrs, **{f"angle {i}": value for i, value in enumerate(self.degrees, start=1)}}

    @classmethod
    def from_scores(cls, scores: Mapping[str, float]) -> Scanned:
        """Return the numbers that ``to_scores`` named."""
        psnrs = tuple(value for name, value in scores.items() if name.endswith(" angles"))
        return cls(psnrs, tuple(value for name, value in scores.items() if name.startswith("angle ")))


def scanned(settings: DesignSettings, strategy: str, seed: int) -> Scanned:
    """Return the curve of one strategy for the image of this seed."""
    scanner = Scanner.of(rectangles(settings.size, torch.Generator().manual_seed(seed)), settings, seed)
    scores, angles = curve(scanner, strategy, settings, seed)
    return Scanned(tuple(scores), tuple(180.0 * angle / settings.candidates for angle in angles))


def designed(settings: DesignSettings, seed: int, say: Progress = silent) -> Result:
    """Return the curves of all strategies over random images."""
    curves = {}
    for image in range(settings.images):
        for name in STRATEGIES:
            curves[name, image] = scanned(settings, name, seed + image)
        ends = (f"{name} {curves[name, image].psnrs[-1]:.1f} dB" for name in STRATEGIES)
        say(f"angles of image {image}: " + ", ".join(ends))
    return summarised(curves, settings, seed)


def summarised(curves: Mapping[tuple[str, int], Scanned], settings: DesignSettings, seed: int = 0) -> Result:
    """Return means and standard errors of curves by strategy and image, and the angles of the first image."""
    arrays: dict[str, list[float]] = {"angles": [float(count) for count in settings.counts]}
    rows, images = [], sorted({image for _, image in curves})
    for name in STRATEGIES:
        values = torch.tensor([curves[name, image].psnrs for image in images], dtype=torch.float64)
        errors = values.std(0) / math.sqrt(len(values)) if len(values) > 1 else torch.zeros(values.shape[1])
        arrays[f"psnr/{name}"], arrays[f"error/{name}"] = values.mean(0).tolist(), errors.tolist()
        arrays[f"chosen/{name}"] = list(curves[name, images[0]].degrees)
        means = {f"{count} angles": float(v) for count, v in zip(settings.counts, values.mean(0), strict=True)}
        rows.append(Row(name, {**means, "± at the end": float(errors[-1])}))
    counted = "one image" if len(images) == 1 else f"{len(images)} images"
    notes = (f"PSNR in dB, mean over {counted} of rectangles; ± is the standard error",)
    described = {**plain(settings), "strategies": list(STRATEGIES)}
    return Result("tomography, next angles", described, seed, tuple(rows), {}, arrays, notes)


def quick(settings: DesignSettings) -> DesignSettings:
    """Return the form for minutes: one image, and fewer angles at which to stop."""
    return replace(settings, images=1, counts=(4, 8, 12))
