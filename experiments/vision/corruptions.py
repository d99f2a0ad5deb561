"""Images made worse on purpose, at five strengths: noise, blur, contrast, pixelation; and rotated images."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.errors import DataError
from lapwing.runtime.threads import normal

STRENGTHS = (1, 2, 3, 4, 5)
NOISE = (0.02, 0.04, 0.06, 0.08, 0.10)  # standard deviation of every pixel
BLUR = (0.4, 0.55, 0.7, 0.9, 1.2)  # standard deviation of the Gaussian kernel, in pixels
CONTRAST = (0.7, 0.5, 0.35, 0.2, 0.1)  # factor of the distance to the mean of the image
SHARES = (0.3, 0.5, 0.7, 0.85, 1.0)  # of the way from a pixel to the mean of its block of 2 x 2


def corrupted(x: Tensor, kind: str, strength: int, seed: int = 0) -> Tensor:
    """Return the images with one kind of corruption; strength 0 returns them as they are.

    Args:
        x: Images (N, C, H, W) with pixels from zero to one.
        kind: One of ``KINDS``.
        strength: From 0 to 5.
        seed: The seed of the noise; the same noise, scaled, at every strength. The other kinds draw nothing.

    Returns:
        Images of the same shape, dtype and device, with pixels from zero to one.

    Raises:
        DataError: If the kind or the strength is unknown, or the images do not have such a shape or such pixels.

    >>> corrupted(torch.full((2, 3, 8, 8), 0.5), "contrast", 3).std().item()
    0.0
    """
    if kind not in KINDS:
        raise DataError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}.")
    if isinstance(strength, bool) or strength not in (0, *STRENGTHS):
        raise DataError(f"strength is {strength!r}; expected a whole number from 0 to {len(STRENGTHS)}.")
    _check(x)
    return KINDS[kind](x, strength - 1, seed).clamp(0, 1) if strength else x


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Return images (N, C, H, W), turned counterclockwise around their centre; what comes from outside is zero.

    >>> image = torch.zeros(1, 1, 3, 3)
    >>> image[0, 0, 0, 1] = 1.0
    >>> rotated(image, 90.0)[0, 0, 1].round().tolist()
    [1.0, 0.0, 0.0]
    """
    _check(x)
    angle = math.radians(degrees)
    turn = [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    theta = torch.tensor(turn, dtype=x.dtype, device=x.device).expand(len(x), 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False).clamp(0, 1)


def _check(x: Tensor) -> None:
    """Raise unless these are images with pixels from zero to one."""
    if x.ndim != 4 or not x.is_floating_point() or not x.numel():
        raise DataError(f"images are {tuple(x.shape)} of {x.dtype}; expected floating-point numbers (N, C, H, W).")
    low, high = float(x.amin()), float(x.amax())
    if not (low >= 0 and high <= 1):  # false for NaN as well
        raise DataError(f"pixels go from {low:.3g} to {high:.3g}; expected zero to one, before standardisation.")


def _noise(x: Tensor, level: int, seed: int) -> Tensor:
    return x + NOISE[level] * normal(tuple(x.shape), torch.Generator().manual_seed(seed), x)


def _blur(x: Tensor, level: int, seed: int) -> Tensor:
    """Average with a Gaussian kernel, rows after columns; the border is repeated outwards."""
    width = BLUR[level]
    reach = max(1, math.ceil(3 * width))
    places = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    kernel = (-0.5 * (places / width).square()).exp()
    kernel = (kernel / kernel.sum()).view(1, 1, 1, -1)
    flat = x.reshape(-1, 1, *x.shape[2:])
    flat = F.conv2d(F.pad(flat, (reach, reach, 0, 0), mode="replicate"), kernel)
    flat = F.conv2d(F.pad(flat, (0, 0, reach, reach), mode="replicate"), kernel.mT)
    return flat.reshape(x.shape)


def _contrast(x: Tensor, level: int, seed: int) -> Tensor:
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + CONTRAST[level] * (x - mean)


def _pixelate(x: Tensor, level: int, seed: int) -> Tensor:
    """Move every pixel towards the mean of its block; blocks at an odd border have fewer pixels."""
    small = F.avg_pool2d(x, 2, ceil_mode=True)
    blocks = small.repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :, : x.shape[2], : x.shape[3]]
    return x + SHARES[level] * (blocks - x)


KINDS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "noise": _noise, "blur": _blur, "contrast": _contrast, "pixelate": _pixelate,
}  # fmt: skip
