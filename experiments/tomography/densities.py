"""Gaussian log-densities of images, in nats per pixel: of whole images, and of patches."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from lapwing.errors import DataError, NumericalError
from lapwing.runtime.settings import TENSOR, Rule, describe, integer, is_real

FLOOR = Rule("a finite variance of at least zero", lambda v: is_real(v) and 0 <= v < math.inf)
NUMBERS_AT_ONCE = 2**25  # of the samples, in float64: 256 MB
SHRINKAGE = Rule("None or a number between 0 and 1", lambda v: v is None or (is_real(v) and 0 <= v <= 1))


def log_density(truth: Tensor, mean: Tensor, covariance: Tensor, floor: float = 0.0) -> float:
    """Return the log-density per pixel of an image under N(mean, covariance + floor · I).

    Args:
        truth: The true image, (dx,) or (H, W).
        mean: The reconstruction, in the same shape.
        covariance: (dx, dx), or (dx,) for a diagonal one.
        floor: A variance that is added to every pixel, see ``noise_floor``.

    Raises:
        DataError: Shapes do not fit, or a number is NaN.
        NumericalError: The covariance is not positive definite.

    >>> round(log_density(torch.zeros(3), torch.zeros(3), torch.eye(3)), 4)
    -0.9189
    """
    error = _error(truth, mean).flatten()
    size = len(error)
    _check_covariance(covariance, size, diagonal=True)
    FLOOR.check("floor", floor)
    covariance = covariance.detach().double()
    if covariance.ndim == 1:
        return float(_log_densities(error[:, None], (covariance + floor)[:, None, None]).sum() / size)
    noisy = covariance + floor * torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    return float(_log_densities(error[None], noisy[None]).sum() / size)


def patch_log_density(truth: Tensor, mean: Tensor, covariance: Tensor, patch: int, floor: float = 0.0) -> float:
    """Return the log-density per pixel, with patches of the image independent of each other.

    Args:
        truth: The true image (H, W).
        mean: The reconstruction (H, W).
        covariance: (dx, dx), of which only entries inside patches are used.
        patch: The side p of the patches. The last row and column of patches also have the remaining pixels.
        floor: A variance that is added to every pixel.

    Raises:
        DataError: Shapes do not fit, a number is NaN, or a patch is larger than the image.
        NumericalError: The covariance of a patch is not positive definite.

    >>> image = torch.zeros(2, 3)
    >>> round(patch_log_density(image, image, torch.eye(6), patch=2), 4)
    -0.9189
    """
    error = _error(truth, mean)
    _check_covariance(covariance, error.numel(), diagonal=False)
    FLOOR.check("floor", floor)
    total = 0.0
    for pixels in _patches(error, patch):
        blocks = covariance.detach()[pixels[:, :, None], pixels[:, None, :]].double()
        total += _patch_sum(error, pixels, blocks, floor)
    return total / error.numel()


def sampled_patch_log_density(
    truth: Tensor, mean: Tensor, deviations: Tensor, patch: int, floor: float = 0.0, shrinkage: float | None = None
) -> float:
    """Return the log-density per pixel in patches, whose covariance C is that of samples.

    Few samples make correlations too strong, so C becomes (1 - s) C + s diag(C). By default s = d / (d + K) for
    K samples and patches of d pixels: none for many samples, one half for as many samples as pixels. s = ½ is the rule
    of SWAG.

    Args:
        truth: The true image (H, W).
        mean: The reconstruction (H, W).
        deviations: Samples minus their expectation, (K, dx); C = deviationsᵀ deviations / K. An expectation that was
            estimated from the same samples leaves C smaller by the factor (K - 1) / K.
        patch: The side p of the patches, as in ``patch_log_density``.
        floor: A variance that is added to every pixel.
        shrinkage: s; None for the default.

    Raises:
        DataError: Shapes do not fit, a number is NaN, or a patch is larger than the image.
        UnsupportedError: The floor or the shrinkage is out of range.
        NumericalError: The covariance of a patch is not positive definite.

    >>> image, deviations = torch.zeros(2, 2), torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0]])
    >>> round(sampled_patch_log_density(image, image, deviations, patch=1), 4)
    -0.9189
    """
    error = _error(truth, mean)
    TENSOR.check("deviations", deviations)
    if deviations.ndim != 2 or deviations.shape[1] != error.numel() or not len(deviations):
        raise DataError(f"deviations is {describe(deviations)}; expected samples (K, {error.numel()}).")
    FLOOR.check("floor", floor)
    SHRINKAGE.check("shrinkage", shrinkage)
    total, count = 0.0, len(deviations)
    for pixels in _patches(error, patch):
        size = pixels.shape[1]
        share = size / (size + count) if shrinkage is None else shrinkage
        for rows in pixels.split(max(1, NUMBERS_AT_ONCE // (size * count))):
            parts = deviations.detach()[:, rows].double().transpose(0, 1)  # (patches, K, d)
            blocks = parts.mT @ parts / count
            blocks = (1 - share) * blocks + share * torch.diag_embed(blocks.diagonal(dim1=1, dim2=2))
            total += _patch_sum(error, rows, blocks, floor)
    return total / error.numel()


def _patches(image: Tensor, patch: int) -> list[Tensor]:
    """Return the pixels of all patches as positions in the flat image: (patches, d) for each shape of patch."""
    integer().check("patch", patch)
    if image.ndim != 2 or patch > min(image.shape):
        raise DataError(f"the image is {describe(image)}; expected (H, W) of at least {patch}×{patch} pixels.")
    height, width = image.shape
    positions = torch.arange(image.numel(), device=image.device).reshape(height, width)
    groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for top, bottom in _intervals(height, patch):
        for left, right in _intervals(width, patch):
            groups[bottom - top, right - left].append(positions[top:bottom, left:right].flatten())
    return [torch.stack(group) for group in groups.values()]


def _intervals(size: int, patch: int) -> list[tuple[int, int]]:
    """Return the ends of intervals of this length; the last one has the remainder too."""
    starts = [patch * i for i in range(size // patch)]
    return list(zip(starts, [*starts[1:], size], strict=True))


def _patch_sum(error: Tensor, pixels: Tensor, blocks: Tensor, floor: float) -> float:
    eye = torch.eye(pixels.shape[1], dtype=blocks.dtype, device=blocks.device)
    return float(_log_densities(error.flatten()[pixels], blocks + floor * eye).sum())


def _log_densities(errors: Tensor, covariances: Tensor) -> Tensor:
    """Return log N(errors; 0, covariances), for errors (n, d) and covariances (n, d, d)."""
    roots, info = torch.linalg.cholesky_ex(covariances)
    if bool((info != 0).any()) or not bool(roots.isfinite().all()):
        raise NumericalError(
            f"{int((info != 0).sum())} of {len(info)} covariances are not positive definite; expected all. "
            "Add a noise floor, or shrink correlations."
        )
    white = torch.linalg.solve_triangular(roots, errors.unsqueeze(-1), upper=False).squeeze(-1)
    logdets = roots.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * white.square().sum(-1) - logdets - 0.5 * errors.shape[1] * math.log(2 * math.pi)


def _error(truth: Tensor, mean: Tensor) -> Tensor:
    TENSOR.check("truth", truth)
    TENSOR.check("mean", mean)
    if truth.shape != mean.shape or not truth.numel():
        raise DataError(f"truth is {describe(truth)}, mean is {describe(mean)}; expected the same shape.")
    return truth.detach().double() - mean.detach().double()


def _check_covariance(covariance: Tensor, size: int, diagonal: bool) -> None:
    TENSOR.check("covariance", covariance)
    if covariance.shape != (size, size) and not (diagonal and covariance.shape == (size,)):
        raise DataError(f"covariance is {describe(covariance)}; expected ({size}, {size}).")
