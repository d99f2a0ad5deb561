"""Scores of reconstructed images and of their error bars. Everything is computed in float64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing import metrics
from lapwing.errors import DataError
from lapwing.runtime.settings import POSITIVE, TENSOR, describe, integer


def psnr(image: Tensor, truth: Tensor) -> float:
    """Return the peak signal-to-noise ratio in decibels; the peak is the range of the truth, maximum minus minimum.

    Raises:
        DataError: The shapes differ, a number is NaN, or the truth is constant.

    >>> round(psnr(torch.tensor([[0.1, 0.9]]), torch.tensor([[0.0, 1.0]])), 2)
    20.0
    """
    image, truth = _checked(image=image, truth=truth)
    return float(20 * _range(truth).log10() - 10 * (image - truth).square().mean().log10())


def ssim(image: Tensor, truth: Tensor, window: int = 7) -> float:
    r"""Return the mean structural similarity of two images (H, W), over all square windows inside them.

    $$ \frac{(2\mu_x\mu_y + c_1)(2\sigma_{xy} + c_2)}{(\mu_x^2 + \mu_y^2 + c_1)(\sigma_x^2 + \sigma_y^2 + c_2)} $$

    with means and unbiased covariances of uniformly weighted windows, c₁ = (0.01 R)², c₂ = (0.03 R)² and the range R
    of the truth.

    Reference: Wang et al. 2004.

    Raises:
        DataError: The shapes differ or are smaller than a window, a number is NaN, or the truth is constant.

    >>> truth = torch.arange(64.0).reshape(8, 8)
    >>> ssim(truth, truth), ssim(truth.flip(1), truth) < 1
    (1.0, True)
    """
    image, truth = _checked(image=image, truth=truth)
    integer(2).check("window", window)
    if truth.ndim != 2 or min(truth.shape) < window:
        raise DataError(f"truth is {describe(truth)}; expected an image of at least {window}×{window} pixels.")
    span = _range(truth)
    # Products lose digits beside a large offset.
    offset = truth.mean()
    x, y = image - offset, truth - offset
    planes = torch.stack([x, y, x * x, y * y, x * y])[:, None]
    mx, my, xx, yy, xy = F.avg_pool2d(planes, window, stride=1)[:, 0]
    unbiased = window**2 / (window**2 - 1)
    vx, vy, cov = unbiased * (xx - mx * mx), unbiased * (yy - my * my), unbiased * (xy - mx * my)
    mx, my = mx + offset, my + offset
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    ratio = (2 * mx * my + c1) * (2 * cov + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return float(ratio.mean())


def noise_floor(matrix: Tensor, std: float, rank: int = 100) -> float:
    """Return a variance of pixels that noise in the measurements alone explains: σ² times the mean diagonal of (AᵀA)⁺.

    The pseudo-inverse has the ``rank`` largest singular values of A, or all that are not zero if there are fewer.

    Args:
        matrix: A, the map from images to measurements, (dy, dx).
        std: σ, the standard deviation of the noise.
        rank: The number of singular values.

    Raises:
        DataError: A is not such a matrix, or is zero.
        UnsupportedError: σ or the rank is not positive.

    >>> noise_floor(torch.diag(torch.tensor([2.0, 1.0, 0.5])), std=2.0, rank=2)
    1.6666666666666667
    """
    TENSOR.check("matrix", matrix)
    POSITIVE.check("std", std)
    integer().check("rank", rank)
    if matrix.ndim != 2 or not bool(matrix.isfinite().all()) or not bool(matrix.any()):
        raise DataError(f"matrix is {describe(matrix)}; expected (dy, dx), finite and not zero.")
    values = torch.linalg.svdvals(matrix.detach().double())
    cutoff = values[0] * max(matrix.shape) * torch.finfo(matrix.dtype).eps
    kept = values[values > cutoff][:rank]
    # The trace of V S⁻² Vᵀ is that of S⁻².
    return float(std**2 * kept.square().reciprocal().sum() / matrix.shape[1])


def rms_z(mean: Tensor, std: Tensor, truth: Tensor) -> float:
    """Return the root mean square of errors in standard deviations: 1 if calibrated, above 1 if overconfident.

    >>> rms_z(torch.zeros(2), torch.ones(2), torch.tensor([2.0, -2.0]))
    2.0
    """
    return float(_z(mean, std, truth).square().mean().sqrt())


def coverage(mean: Tensor, std: Tensor, truth: Tensor, level: float = 0.95) -> float:
    """Return the share of pixels inside the central intervals of this level.

    >>> coverage(torch.zeros(2), torch.ones(2), torch.tensor([1.9, -2.0]))
    0.5
    """
    if not 0 < level < 1:
        raise DataError(f"level is {level}; expected a probability between 0 and 1.")
    z = _z(mean, std, truth)
    half = torch.special.ndtri(z.new_tensor(0.5 + 0.5 * level)).expand_as(z)
    return metrics.coverage(-half, half, z)


def error_std_correlation(mean: Tensor, std: Tensor, truth: Tensor) -> float:
    """Return the correlation of absolute errors and standard deviations over pixels; NaN if either is constant.

    >>> round(error_std_correlation(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, -2.0, 3.0])), 6)
    1.0
    """
    mean, std, truth = _checked(mean=mean, std=std, truth=truth)
    error = (mean - truth).abs()
    if not bool(error.max() > error.min()) or not bool(std.max() > std.min()):
        return math.nan
    return float(torch.corrcoef(torch.stack([error.flatten(), std.flatten()]))[0, 1])


def quantile_points(mean: Tensor, std: Tensor, truth: Tensor, count: int = 99) -> tuple[Tensor, Tensor]:
    """Return the points of a Q-Q plot: quantiles of the standard normal, and of errors in standard deviations.

    Args:
        mean: The reconstruction.
        std: Its standard deviations, positive, in the same shape.
        truth: The true image.
        count: The number of points, at the probabilities i / (count + 1).

    Returns:
        Two tensors (count,).

    >>> truth = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    >>> expected, observed = quantile_points(torch.zeros(5), torch.ones(5), truth, 3)
    >>> [round(q, 3) for q in expected.tolist()], observed.tolist()
    ([-0.674, 0.0, 0.674], [-1.0, 0.0, 1.0])
    """
    integer().check("count", count)
    z = _z(mean, std, truth).flatten()
    levels = torch.arange(1, count + 1, dtype=z.dtype, device=z.device) / (count + 1)
    # torch.quantile refuses more than 16 million numbers.
    ordered, places = z.sort().values, levels * (len(z) - 1)
    low = places.long()
    high = (low + 1).clamp_max(len(z) - 1)
    return torch.special.ndtri(levels), torch.lerp(ordered[low], ordered[high], places - low)


def _z(mean: Tensor, std: Tensor, truth: Tensor) -> Tensor:
    """Return (truth - mean) / std; raise if a standard deviation is not positive."""
    mean, std, truth = _checked(mean=mean, std=std, truth=truth)
    if not bool((std > 0).all()):
        raise DataError(f"std is as low as {std.min():.3g}; expected positive numbers. Add the noise floor.")
    return (truth - mean) / std


def _range(truth: Tensor) -> Tensor:
    span = truth.max() - truth.min()
    if not bool(span > 0):
        raise DataError("the true image is constant; expected one with a range.")
    return span


def _checked(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in float64; raise unless they have the same shape and no NaN."""
    for name, tensor in tensors.items():
        TENSOR.check(name, tensor)
    shapes = [tuple(t.shape) for t in tensors.values()]
    if len(set(shapes)) != 1 or not math.prod(shapes[0]):
        raise DataError(f"{', '.join(tensors)} have the shapes {', '.join(map(str, shapes))}; expected the same.")
    return tuple(t.detach().double() for t in tensors.values())
