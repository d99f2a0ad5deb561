"""Beliefs about an image: by the tangent model with two kinds of hyperparameters, by dropout, and by one variance."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from experiments.tomography.case import Scan
from experiments.tomography.densities import log_density, patch_log_density, sampled_patch_log_density
from experiments.tomography.dropout import SampledImages, isotropic_baselines
from experiments.tomography.scores import coverage, error_std_correlation, psnr, rms_z, ssim
from experiments.tomography.total_variation import TVPredCP, edges
from experiments.tomography.unet import UNet
from lapwing.inverse import InversePosterior
from lapwing.tuners import MaximiseEvidence

EVIDENCE, TV, DROPOUT = "tangent, evidence", "tangent, TV-PredCP", "MC dropout"
UNIT, LEARNED = "isotropic, unit noise", "isotropic, learned noise"
METHODS = (UNIT, LEARNED, DROPOUT, EVIDENCE, TV)
ONE_BLOCK = {".*": "weights"}  # with one for each block of the U-Net the error bars are too narrow
PATCHES = (1, 2, 7)  # sides of the patches of log-densities


@dataclass(frozen=True, eq=False)
class ImageBelief:
    """A Gaussian belief about an image (H, W): by its covariance (dx, dx) or (dx,), or by samples.

    ``floor`` is a variance added to every pixel for what noise in the measurements explains: one number for all methods
    of an image, except that the isotropic baselines consist of it.
    """

    mean: Tensor
    covariance: Tensor | None
    samples: SampledImages | None = None
    floor: float = 0.0

    @cached_property
    def std(self) -> Tensor:
        """The standard deviation of every pixel, with the floor, (H, W)."""
        if self.samples is not None:
            return (self.samples.variance.double() + self.floor).sqrt()
        assert self.covariance is not None
        variance = self.covariance if self.covariance.ndim == 1 else self.covariance.diagonal()
        return (variance + self.floor).reshape(self.mean.shape).sqrt()

    def density(self, truth: Tensor, patch: int | None) -> float:
        """Return the log-density of the true image per pixel, of all pixels together or in patches."""
        if self.samples is not None:  # few samples make correlations too strong: shrunk by a stated rule
            return sampled_patch_log_density(
                truth, self.mean, self.samples.deviations, patch or truth.shape[-1], self.floor
            )
        assert self.covariance is not None
        if patch is None:
            return log_density(truth, self.mean, self.covariance, self.floor)
        whole = torch.diag(self.covariance) if self.covariance.ndim == 1 else self.covariance
        return patch_log_density(truth, self.mean, whole, patch, self.floor)

    def scores(self, truth: Tensor) -> dict[str, float]:
        """Return all scores of the belief against the true image."""
        truth = truth.to(self.mean)
        calibration = {
            "RMS z": rms_z(self.mean, self.std, truth), "coverage 95 %": coverage(self.mean, self.std, truth),
        }  # fmt: skip
        correlation = error_std_correlation(self.mean, self.std, truth)
        if not math.isnan(correlation):  # one variance for all pixels has none
            calibration["correlation"] = correlation
        patches = {f"LL {p} x {p}": self.density(truth, p) for p in PATCHES}
        images = {"PSNR": psnr(self.mean, truth), "SSIM": ssim(self.mean, truth)}
        return {"LL": self.density(truth, None), **patches, **images, **calibration}


@dataclass(frozen=True, eq=False)
class VariationPrior:
    """A hyperprior for ``MaximiseEvidence``: TV-PredCP at the hyperparameters of a posterior's prior."""

    density: TVPredCP

    @classmethod
    def of(cls, posterior: InversePosterior, scale: float) -> VariationPrior:
        """Return the hyperprior around the reconstruction, with the rate ``scale`` of the expected variation."""
        prior: Any = posterior.prior
        image = posterior.reconstruction.double()
        pairs = edges(*image.shape[-2:]).to(image.device)
        means = image.flatten()[pairs[:, 1]] - image.flatten()[pairs[:, 0]]
        blocks = torch.tensor(prior.length_blocks, device=image.device)
        return cls(TVPredCP(scale, means, posterior.class_variances(pairs), blocks))

    def __call__(self, posterior: Any) -> Tensor:
        return self.density(posterior.problem.prior)


def rate_of_variation(scan: Scan, weight_of_tv: float, noise_std: float) -> float:
    """Return λ such that squared errors over 2σ² plus λ times the variation is the training loss, up to a factor."""
    return len(scan.y) * weight_of_tv / (2 * noise_std**2)


def evidence_posterior(unet: UNet, scan: Scan, *, prior: Any = None, max_steps: int = 200) -> InversePosterior:
    """Return the posterior of the tangent model, with noise and all hyperparameters by the evidence.

    The prior is a Gaussian process over the taps of filters, with one variance and one length-scale for all of them,
    unless another is given. Everything is in float64, on the device of the network.
    """
    device = next(unet.parameters()).device
    z = scan.backprojection.to(device, torch.float64)[None, None]
    prior = lw.priors.filter_gp(variance=0.1, blocks=ONE_BLOCK) if prior is None else prior
    tuner = MaximiseEvidence(noise=True, max_steps=max_steps)
    model = copy.deepcopy(unet).double()
    return lw.inverse.fit(
        model, z, scan.y.to(device), scan.operator.to(device), prior=prior, tuner=tuner, progress=False
    )


def tangent_posteriors(
    unet: UNet, scan: Scan, weight_of_tv: float, *, max_steps: int = 200
) -> dict[str, InversePosterior]:
    """Return the posteriors of the tangent model: by the evidence, and by the evidence with TV-PredCP."""
    evidence = evidence_posterior(unet, scan, max_steps=max_steps)
    rate = rate_of_variation(scan, weight_of_tv, float(evidence.noise_std))
    tuner = MaximiseEvidence(noise=True, max_steps=max_steps, hyperprior=VariationPrior.of(evidence, rate))
    return {EVIDENCE: evidence, TV: evidence.tuned(tuner)}


def factorised_posterior(unet: UNet, scan: Scan, max_steps: int = 200) -> InversePosterior:
    """Return the posterior with independent weights: one precision for all of them, by the evidence."""
    return evidence_posterior(unet, scan, prior=lw.isotropic(10.0), max_steps=max_steps)


def image_beliefs(
    scan: Scan, posteriors: dict[str, InversePosterior], dropout: SampledImages | None
) -> dict[str, ImageBelief]:
    """Return the beliefs of all methods about one image, each with the same noise floor.

    The floor is that of the noise which the evidence learned; the first isotropic baseline has that of unit noise.
    """
    evidence = posteriors[EVIDENCE]
    matrix = scan.operator.dense().to(evidence.reconstruction.device)
    mean = evidence.reconstruction.reshape(scan.truth.shape)
    unit, learned = isotropic_baselines(mean, matrix, float(evidence.noise_std))
    flat = lambda variance: ImageBelief(mean, mean.new_full((mean.numel(),), variance))
    beliefs, floor = {UNIT: flat(unit.variance), LEARNED: flat(learned.variance)}, learned.variance
    if dropout is not None:
        beliefs[DROPOUT] = ImageBelief(dropout.mean.double(), None, dropout, floor)
    for name, posterior in posteriors.items():
        beliefs[name] = ImageBelief(mean, posterior.covariance(), floor=floor)
    return beliefs
