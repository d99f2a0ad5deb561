"""A small U-Net for single images, whose convolutions are named by block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import repeat
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.errors import DataError
from lapwing.runtime.settings import FLAG, Rule, describe, integer, is_integer, is_real
from lapwing.runtime.threads import global_seed, uniform

SLOPE = 0.2  # of the leaky ReLU
SIGMOID_LIMIT = 15.0  # a sigmoid beyond it has no gradient in float32
DROPOUT = Rule("a probability of at least 0 and below 1", lambda v: is_real(v) and 0 <= v < 1)
Masks = Iterator[Tensor | None]


class UNet(nn.Module):
    """A U-Net from one channel to one channel, for images of any size.

    Block ``inc`` is a 3×3 convolution; ``down1``, ``down2``, … halve the image (3×3 convolution of stride 2, then
    another); ``up1``, ``up2``, … double it again, from the coarsest scale on: bilinear interpolation, the features of
    the same scale from the way down through the 1×1 convolution ``skip1``, ``skip2``, …, and two 3×3 convolutions;
    ``out`` is a 1×1 convolution. Leaky ReLUs follow all but the last. An odd size is rounded up on the way down, and
    the excess row or column is cut off on the way up.

    Dropout removes whole channels after every 3×3 convolution. It is off in evaluation mode, except with masks that are
    given in the call; in training mode masks are drawn from PyTorch's global generator.

    Args:
        scales: The number of image sizes.
        channels: The channels of every block.
        skips: The channels of each skip connection, from the coarsest to the finest. 0: the way up gets one channel of
            zeros instead, and the 1×1 convolution, though it exists, is not used.
        norm: Whether there is a group norm of one group after every convolution but the last, and before the
            convolutions of the way up.
        sigmoid: Whether a sigmoid maps the outputs to (0, 1).
        dropout: The probability that a channel is dropped.

    Raises:
        UnsupportedError: A setting is out of range.

    >>> net = UNet()
    >>> sum(p.numel() for p in net.parameters()), net(torch.zeros(1, 1, 9, 6)).shape
    (76905, torch.Size([1, 1, 9, 6]))
    """

    def __init__(
        self,
        scales: int = 3,
        channels: int = 32,
        skips: tuple[int, ...] = (4, 4),
        norm: bool = False,
        sigmoid: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        integer().check("scales", scales)
        integer().check("channels", channels)
        Rule(
            f"a whole number of channels for each of the {scales - 1} ways up",
            lambda v: len(v) == scales - 1 and all(is_integer(n) and n >= 0 for n in v),
        ).check("skips", skips)
        FLAG.check("norm", norm)
        FLAG.check("sigmoid", sigmoid)
        DROPOUT.check("dropout", dropout)
        self.skips, self.sigmoid, self.dropout, self.channels = tuple(skips), sigmoid, dropout, channels
        self.inc = Convolution(1, channels, norm)
        for i, skip in enumerate(self.skips, start=1):
            self.add_module(f"down{i}", Pair(channels, channels, norm, stride=2))
            self.add_module(f"skip{i}", Convolution(channels, skip or 1, norm, kernel=1))
            self.add_module(f"up{i}", Pair(channels + (skip or 1), channels, norm, joined=True))
        self.out = nn.Conv2d(channels, 1, 1)

    @property
    def n_masks(self) -> int:
        """The number of 3×3 convolutions, each of which has a dropout mask over its channels."""
        return 1 + 4 * len(self.skips)

    def forward(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        """Return images for inputs (B, 1, H, W), in the same shape.

        ``masks`` (n_masks, channels), or (B, n_masks, channels), multiply the channels after each 3×3 convolution.
        """
        if x.ndim != 4 or x.shape[1] != 1 or not x.numel():
            raise DataError(f"the U-Net got {describe(x)}; expected images (B, 1, H, W).")
        if masks is None and self.training and self.dropout:
            masks = dropout_masks(self, len(x), None, x)
        layers: Masks = repeat(None) if masks is None else iter(masks[..., None, None].unbind(-4))
        x = self.inc(x, layers)
        sizes = [x]
        for i in range(1, len(self.skips) + 1):
            sizes.append(self.get_submodule(f"down{i}")(sizes[-1], layers))
        x = sizes.pop()
        for i, skip in enumerate(self.skips, start=1):
            fine = sizes.pop()
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
            x = x[..., : fine.shape[-2], : fine.shape[-1]]
            side = self.get_submodule(f"skip{i}")(fine) if skip else torch.zeros_like(x[:, :1])
            x = self.get_submodule(f"up{i}")(torch.cat([x, side], 1), layers)
        out: Tensor = self.out(x)
        return out.clamp(-SIGMOID_LIMIT, SIGMOID_LIMIT).sigmoid() if self.sigmoid else out


class Convolution(nn.Module):
    """A convolution, its dropout mask, a group norm if wanted, and a leaky ReLU."""

    def __init__(self, inputs: int, outputs: int, norm: bool, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)
        self.norm = nn.GroupNorm(1, outputs) if norm else nn.Identity()

    def forward(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        x = self.conv(x)
        mask = None if masks is None else next(masks)
        return F.leaky_relu(self.norm(x if mask is None else x * mask), SLOPE)


class Pair(nn.Module):
    """Two 3×3 convolutions; with a group norm before them if the input is joined from two parts."""

    def __init__(self, inputs: int, outputs: int, norm: bool, stride: int = 1, joined: bool = False) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, inputs) if norm and joined else nn.Identity()
        self.first = Convolution(inputs, outputs, norm, stride=stride)
        self.second = Convolution(outputs, outputs, norm)

    def forward(self, x: Tensor, masks: Masks) -> Tensor:
        return cast(Tensor, self.second(self.first(self.norm(x), masks), masks))


def seeded_unet(seed: int, **settings: object) -> UNet:
    """Return an untrained U-Net in evaluation mode, whose weights depend on the seed alone.

    Args:
        seed: The seed of the initial weights. The global random state does not change.
        **settings: The arguments of ``UNet``.

    >>> first, second = seeded_unet(3, channels=2), seeded_unet(3, channels=2)
    >>> bool((first.inc.conv.weight == second.inc.conv.weight).all())
    True
    """
    integer(0).check("seed", seed)
    with global_seed(seed, torch.device("cpu")):
        return UNet(**settings).eval()  # type: ignore[arg-type]


def filter_blocks(unet: UNet) -> dict[str, str]:
    """Return the name of each block by a regular expression that its convolution weights match, and no others.

    The keys are anchored, so that ``lw.named`` takes them too. Filters of the blocks ``inc``, ``down`` and ``up`` are
    3×3, those of ``skip`` and ``out`` 1×1. Biases and norms are in no block.

    >>> list(filter_blocks(UNet(scales=2, skips=(4,))).values())
    ['inc', 'down1', 'up1', 'skip1', 'out']
    """
    names = ["inc", *(f"{kind}{i}" for kind in ("down", "up", "skip") for i in range(1, len(unet.skips) + 1))]
    return {rf"^{name}\.(.+\.)?conv\.weight$": name for name in names} | {r"^out\.weight$": "out"}


def block_of(unet: UNet, parameter: str) -> str | None:
    """Return the block of a parameter by its name; None for biases and norms.

    >>> block_of(UNet(), "down2.first.conv.weight"), block_of(UNet(), "out.bias")
    ('down2', None)
    """
    return next((name for pattern, name in filter_blocks(unet).items() if re.search(pattern, parameter)), None)


def dropout_masks(unet: UNet, count: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Draw dropout masks (count, n_masks, channels): zero for a dropped channel, 1 / (1 - p) for the others.

    Equal generators give equal masks on every device, and the same ones however many are drawn at once.
    """
    draws = uniform((count, unet.n_masks, unet.channels), generator, like)
    return (draws >= unet.dropout).to(like) / (1 - unet.dropout)
