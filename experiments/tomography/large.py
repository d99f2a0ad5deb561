"""A large image on one GPU: 501 × 501 pixels, 7,680 measurements of a fan beam, three million weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import lapwing as lw
from experiments.options import Progress, silent
from experiments.tomography.backprojection import fbp
from experiments.tomography.beliefs import ONE_BLOCK
from experiments.tomography.deep_prior import Training, reconstruct
from experiments.tomography.densities import sampled_patch_log_density
from experiments.tomography.geometry import FanBeam
from experiments.tomography.noise import measured
from experiments.tomography.phantoms import ellipses
from experiments.tomography.rays import ray_transform
from experiments.tomography.scores import coverage, error_std_correlation, psnr, rms_z, ssim
from experiments.tomography.study import Stopwatch
from experiments.tomography.unet import UNet, filter_blocks, seeded_unet
from lapwing.demo.result import Result, Row, plain
from lapwing.tuners import MaximiseEvidence

GIB = 2**30
START = 1e-3  # prior variance of a weight where the search begins: about that of the random weights before training


@dataclass(frozen=True)
class LargeSettings:
    """A synthetic slice, and how it is reconstructed.

    Args:
        size: The side of the image in pixels.
        angles: The number of source positions.
        bins: The number of detector bins; None for 128 at 501 pixels and in proportion at others.
        noise: The share of noise.
        scales: The number of image sizes of the U-Net.
        channels: Its width.
        steps: Training steps.
        rate: The learning rate.
        weight_of_tv: The weight of the total variation.
        samples: Images drawn from the posterior.
        tuning: The largest number of steps of the search for hyperparameters.
        memory: The byte budget, as ``lw.memory.limit`` takes it.
    """

    size: int = 501
    angles: int = 60
    bins: int | None = None
    noise: float = 0.05
    scales: int = 6
    channels: int = 128
    steps: int = 1500
    rate: float = 5e-4
    weight_of_tv: float = 6.5e-6
    samples: int = 256
    tuning: int = 200
    memory: str = "142GB"

    @property
    def skips(self) -> tuple[int, ...]:
        """The channels of the skip connections: four at the two coarsest sizes, none at the others."""
        return tuple(4 if i < 2 else 0 for i in range(self.scales - 1))

    @property
    def geometry(self) -> FanBeam:
        bins = self.bins or max(2, round(128 * self.size / 501))
        return FanBeam(self.size, self.angles, bins, source_distance=1.5 * self.size, detector_distance=self.size)


def used_weights(unet: UNet) -> dict[str, str]:
    """Return patterns of the convolution weights that the output depends on; skips without channels are unused."""
    unused = {f"skip{i}" for i, channels in enumerate(unet.skips, start=1) if not channels}
    return {pattern: name for pattern, name in filter_blocks(unet).items() if name not in unused}


def reconstructed(settings: LargeSettings, seed: int, say: Progress = silent, on: str = "cuda") -> Result:
    """Measure an image of ellipses, train the network from a random start, and draw from the exact posterior."""
    watch, device = Stopwatch(say=say), torch.device(on)
    truth = ellipses(settings.size, torch.Generator().manual_seed(seed)).to(device)
    with watch.part("ray transform"):
        operator = ray_transform(settings.geometry, torch.float32, device)
        y, noise_std = measured(operator, truth.float(), settings.noise, torch.Generator().manual_seed(seed + 1))
        z = fbp(settings.geometry, y)
    unet = seeded_unet(
        seed, scales=settings.scales, channels=settings.channels, skips=settings.skips, norm=True, sigmoid=False
    ).to(device)
    with watch.part("training"):
        training = Training(settings.weight_of_tv, settings.steps, settings.rate)
        trained = reconstruct(unet, operator, y, z, training)
    weights = lw.named("|".join(used_weights(trained.unet)))
    with lw.memory.limited(settings.memory):
        with watch.part("class matrices"):
            posterior = lw.inverse.fit(
                trained.unet, z[None, None], y, operator, weights=weights, noise_std=None,
                prior=lw.priors.filter_gp(variance=START, blocks=ONE_BLOCK), solver="exact", progress=False,
            )  # fmt: skip
        with watch.part("search of hyperparameters"):
            posterior = posterior.tuned(MaximiseEvidence(noise=True, max_steps=settings.tuning))
        with watch.part(f"{settings.samples} samples"):
            samples = posterior.samples(settings.samples, torch.Generator().manual_seed(seed + 2))
    deviations = (samples - posterior.reconstruction).flatten(1)
    rows = _rows(truth, z, trained.image.detach(), posterior.tangent_mean.reshape(truth.shape), deviations.double())
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    steps = 0 if posterior.trace is None else len(posterior.trace.steps)
    notes = (
        f"{operator.rows} measurements, {sum(p.numel() for p in unet.parameters())} parameters, "
        f"{len(posterior.prior.class_blocks)} class matrices, {steps} evaluations of the evidence",
        f"noise std learned {float(posterior.noise_std):.4g}, true {noise_std:.4g}; peak of memory {peak:.1f} GiB",
        *(f"{name}: {seconds:.1f} s" for name, seconds in watch.seconds.items()),
    )
    return Result("tomography, large", plain(settings), seed, rows, watch.seconds, {}, notes)


def _rows(truth: Tensor, z: Tensor, image: Tensor, moved: Tensor, deviations: Tensor) -> tuple[Row, ...]:
    """Return the scores of back-projection, reconstruction and tangent mean, with error bars from samples (K, dx)."""
    std = deviations.square().mean(0).reshape(truth.shape).clamp_min(1e-12).sqrt()

    def scores(mean: Tensor) -> dict[str, float]:
        each = {"PSNR": psnr(mean, truth), "SSIM": ssim(mean, truth), "RMS z": rms_z(mean, std, truth)}
        each |= {"coverage 95 %": coverage(mean, std, truth), "correlation": error_std_correlation(mean, std, truth)}
        densities = (sampled_patch_log_density(truth, mean, deviations, p, floor=1e-6) for p in (1, 2, 10))
        return each | {f"LL {p} x {p}": density for p, density in zip((1, 2, 10), densities, strict=True)}

    error = (image.double() - truth).square().mean()
    isotropic = -0.5 * float(
        (2 * torch.pi * torch.e * error).log()
    )  # the best that one variance can do, with the truth
    return (
        Row("FBP", {"PSNR": psnr(z, truth), "SSIM": ssim(z.double(), truth)}),
        Row("tangent, evidence", scores(image.double())),
        Row("tangent, evidence, around the mean of the tangent model", scores(moved.double())),
        Row("isotropic, variance of the true error", {"LL 1 x 1": isotropic}),
    )
