"""The case study on an embedded phantom: a reconstruction with error bars, priors, and choices of the next angles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.options import Progress, silent
from experiments.tomography.beliefs import (
    DROPOUT,
    EVIDENCE,
    TV,
    ImageBelief,
    factorised_posterior,
    image_beliefs,
    tangent_posteriors,
)
from experiments.tomography.case import Scan, Setting, scans
from experiments.tomography.deep_prior import Reconstruction, Training, reconstruct
from experiments.tomography.dropout import dropout_samples
from experiments.tomography.phantoms import shepp_logan
from experiments.tomography.scores import psnr, quantile_points
from experiments.tomography.total_variation import total_variation
from experiments.tomography.unet import UNet, seeded_unet
from lapwing.demo.result import Result, Row, plain
from lapwing.inverse import InversePosterior

LONG = 3.0  # a length-scale in taps, at which the taps of a 3 x 3 filter are nearly equal


@dataclass(frozen=True)
class StudySettings:
    """One phantom, measured and reconstructed.

    Args:
        size: The side of the phantom in pixels.
        angles: The number of angles.
        noise: The share of noise.
        steps: Training steps of a network.
        rate: Its learning rate.
        channels: Its width.
        samples: Images drawn with dropout.
        draws: Samples of each prior in the picture.
        tuning: The largest number of steps of each search for hyperparameters.
    """

    size: int = 28
    angles: int = 10
    noise: float = 0.05
    steps: int = 2500
    rate: float = 5e-4
    channels: int = 32
    samples: int = 4096
    draws: int = 6
    tuning: int = 200


@dataclass(frozen=True, eq=False)
class Stopwatch:
    """Seconds of the parts of a run, by name."""

    seconds: dict[str, float] = field(default_factory=dict)
    say: Progress = silent

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part, and say how long it took."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        self.say(f"{name}: {self.seconds[name]:.1f} s")


@dataclass(frozen=True, eq=False)
class Study:
    """All beliefs about one image."""

    scan: Scan
    trained: Reconstruction
    posteriors: dict[str, InversePosterior]
    beliefs: dict[str, ImageBelief]
    factorised: InversePosterior
    seconds: dict[str, float]

    @classmethod
    def of(cls, settings: StudySettings, seed: int, say: Progress = silent) -> Study:
        """Measure the Shepp-Logan phantom, train the networks, and compute every belief."""
        watch, setting = Stopwatch(say=say), Setting(settings.angles, settings.noise)
        (scan,) = scans(shepp_logan(settings.size)[None], setting, seed)
        with watch.part("training"):
            trained = _trained(seeded_unet(seed, channels=settings.channels), scan, setting, settings)
        with watch.part("training with dropout"):
            drop = _trained(seeded_unet(seed, channels=settings.channels, dropout=0.05), scan, setting, settings)
            z = scan.backprojection.float()
            images = dropout_samples(drop.unet, z, settings.samples, torch.Generator().manual_seed(seed))
        with watch.part("two searches of hyperparameters, with all class matrices"):
            posteriors = tangent_posteriors(trained.unet, scan, setting.weight_of_tv, max_steps=settings.tuning)
        with watch.part("exact covariances of two posteriors"):
            beliefs = image_beliefs(scan, posteriors, images)
        with watch.part("factorised prior"):
            factorised = factorised_posterior(trained.unet, scan, settings.tuning)
        return cls(scan, trained, posteriors, beliefs, factorised, watch.seconds)

    def scores(self, settings: StudySettings, seed: int) -> Result:
        """Return the scores of all methods, and the images and quantiles of the picture."""
        truth, fbp, setting = self.scan.truth, self.scan.backprojection, Setting(settings.angles, settings.noise)
        rows = [Row("FBP", {"PSNR": psnr(fbp, truth)})]
        rows += [Row(name, belief.scores(truth)) for name, belief in self.beliefs.items()]
        arrays = {"truth": _flat(truth), "fbp": _flat(fbp), "reconstruction": _flat(self.trained.image)}
        for name in (DROPOUT, EVIDENCE, TV):
            belief = self.beliefs[name]
            normal, z = quantile_points(belief.mean, belief.std, truth)
            arrays |= {f"std/{name}": _flat(belief.std), "quantiles": _flat(normal), f"quantiles/{name}": _flat(z)}
        notes = (
            f"Shepp-Logan phantom, {settings.size} x {settings.size}, {setting}",
            "LL: log-density of the true image in nats per pixel, whole and in patches; all with the same noise floor",
        )
        return Result("tomography", plain(settings), seed, tuple(rows), {}, arrays, notes)

    def priors(self, settings: StudySettings, seed: int) -> Result:
        """Return samples of three priors over images around the reconstruction, and their total variation."""
        named = {"independent weights": self.factorised, "filter GP, evidence": self.posteriors[EVIDENCE]}
        named[f"filter GP, length-scale {LONG:g}"] = with_length_scale(self.posteriors[EVIDENCE], LONG)
        named["filter GP, TV-PredCP"] = self.posteriors[TV]
        rows, arrays = [], {}
        for name, posterior in named.items():
            generator = torch.Generator().manual_seed(seed)
            samples = posterior.prior_samples(64, generator).reshape(64, settings.size, settings.size)
            arrays[f"samples/{name}"] = _flat(samples[: settings.draws])
            spread, variation = float(samples.std()), float(total_variation(samples).mean())
            rows.append(Row(name, {"std": spread, "variation": variation, "variation / std": variation / spread}))
        notes = ("means over 64 samples of the prior; total variation is the sum over pairs of neighbouring pixels",)
        return Result("tomography, priors", plain(settings), seed, tuple(rows), {}, arrays, notes)

    def hyperparameters(self, settings: StudySettings, seed: int) -> Result:
        """Return what was learned, and what it cost."""
        rows = [Row("independent weights", self._learned(self.factorised))]
        for name, posterior in self.posteriors.items():
            lengths = length_scales(posterior)
            learned = {"shortest length": min(lengths), "longest length": max(lengths)}
            rows.append(Row(name, {**self._learned(posterior), **learned}))
        notes = tuple(f"{name}: {seconds:.1f} s" for name, seconds in self.seconds.items())
        return Result("tomography, hyperparameters", plain(settings), seed, tuple(rows), self.seconds, {}, notes)

    def _learned(self, posterior: InversePosterior) -> dict[str, float]:
        noise = {"noise std": float(posterior.noise_std), "true noise std": self.scan.noise_std}
        return {"log evidence": float(posterior.log_evidence()), **noise}


def length_scales(posterior: InversePosterior) -> list[float]:
    """Return the length-scales of a posterior's filter GP, in taps."""
    prior: Any = posterior.prior
    named = zip(prior.names, prior.values.tolist(), strict=True)
    return [value for name, value in named if name.endswith("length_scale")]


def with_length_scale(posterior: InversePosterior, length: float) -> InversePosterior:
    """Return the posterior with this length-scale in all blocks of its filter GP, and the same variances."""
    prior: Any = posterior.prior
    values = [length if n.endswith("length_scale") else v for n, v in zip(prior.names, prior.values, strict=True)]
    return posterior.with_problem(posterior.problem.with_precisions(torch.tensor(values).to(prior.values)))


def _trained(unet: UNet, scan: Scan, setting: Setting, settings: StudySettings) -> Reconstruction:
    operator, y, z = scan.operator.to(dtype=torch.float32), scan.y.float(), scan.backprojection.float()
    return reconstruct(unet, operator, y, z, Training(setting.weight_of_tv, settings.steps, settings.rate))


def _flat(tensor: Tensor) -> list[float]:
    numbers: list[float] = tensor.detach().double().flatten().tolist()
    return numbers
