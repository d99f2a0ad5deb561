"""The U-Net: sizes, blocks, any image, dropout."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lapwing as lw
from experiments.tomography.unet import UNet, block_of, dropout_masks, filter_blocks, seeded_unet
from tests.experiments.tomography.dense import normals
from tests.tolerances import assert_close

LARGE: dict[str, Any] = {"scales": 6, "channels": 128, "skips": (4, 4, 0, 0, 0), "norm": True, "sigmoid": False}


@pytest.mark.parametrize(("settings", "parameters", "filters"), [({}, 76_905, 76_608), (LARGE, 2_973_880, 2_964_480)])
def test_the_numbers_of_parameters_are_the_published_ones(
    settings: dict[str, Any], parameters: int, filters: int
) -> None:
    with torch.device("meta"):
        net = UNet(**settings)
    sizes = {name: p.numel() for name, p in net.named_parameters()}
    assert sum(sizes.values()) == parameters
    assert sum(n for name, n in sizes.items() if block_of(net, name)) == filters


def test_every_filter_is_in_one_block_and_nothing_else_is() -> None:
    net = UNet(norm=True)
    names = Counter(block_of(net, name) for name, p in net.named_parameters() if p.ndim == 4)
    assert names == {"inc": 1, "down1": 2, "down2": 2, "up1": 2, "up2": 2, "skip1": 1, "skip2": 1, "out": 1}
    assert all(block_of(net, name) is None for name, p in net.named_parameters() if p.ndim != 4)
    pattern = next(pattern for pattern, name in filter_blocks(net).items() if name == "down1")
    x = torch.rand(2, 1, 4, 4)
    fitted = lw.fit(
        torch.nn.Sequential(seeded_unet(0, scales=2, channels=2, skips=(1,)), torch.nn.Flatten()),
        [(x, torch.rand(2, 16))], "regression", method=lw.Diagonal(), weights=lw.named(pattern.replace("^", r"^0\."))
    )  # fmt: skip
    assert fitted.network.selection.names == ("0.down1.first.conv.weight", "0.down1.second.conv.weight")


def plain(net: UNet, x: Tensor) -> Tensor:
    """The network of two scales without norms, step by step from its description."""
    p = dict(net.named_parameters())

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = p[f"{name}.weight"]
        return F.conv2d(x, weight, p[f"{name}.bias"], stride, padding=weight.shape[-1] // 2)

    def relu(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.2 * x)

    fine = relu(conv(x, "inc.conv"))
    coarse = relu(conv(relu(conv(fine, "down1.first.conv", 2)), "down1.second.conv"))
    rows, columns = interpolation(coarse.shape[-2]), interpolation(coarse.shape[-1])
    up = (rows @ coarse @ columns.mT)[..., : x.shape[-2], : x.shape[-1]]
    side = relu(conv(fine, "skip1.conv")) if net.skips[0] else torch.zeros_like(x)
    joined = torch.cat([up, side], 1)
    return torch.sigmoid(conv(relu(conv(relu(conv(joined, "up1.first.conv")), "up1.second.conv")), "out"))


def interpolation(size: int) -> Tensor:
    """Linear interpolation from ``size`` points to twice as many, with the same ends."""
    matrix = torch.zeros(2 * size, size, dtype=torch.float64)
    for i in range(2 * size):
        place = i * (size - 1) / (2 * size - 1)
        low = min(int(place), size - 2)
        matrix[i, low], matrix[i, low + 1] = 1 - (place - low), place - low
    return matrix


@pytest.mark.parametrize("skip", [0, 2])
def test_the_network_is_the_described_one_for_odd_sizes_too(skip: int) -> None:
    net = seeded_unet(1, scales=2, channels=3, skips=(skip,)).double()
    for shape in ((7, 6), (8, 5)):
        x = normals(2, 1, *shape)
        assert_close(net(x), plain(net, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [False, True])
def test_any_size_works_and_the_evaluation_mode_is_deterministic(norm: bool, dtype: torch.dtype) -> None:
    net = seeded_unet(2, scales=4, channels=3, skips=(2, 0, 1), norm=norm, dropout=0.5, sigmoid=False).to(dtype)
    x = normals(2, 1, 11, 6, dtype=dtype)
    assert net(x).shape == x.shape
    assert net(x).dtype == dtype
    assert torch.equal(net(x), net(x))


def test_a_saturated_sigmoid_keeps_away_from_one() -> None:
    net = seeded_unet(0, scales=1, channels=2, skips=())
    torch.nn.init.constant_(net.out.bias, 100.0)
    assert bool((net(torch.rand(1, 1, 3, 4)) < 1).all())


def test_dropout_removes_whole_channels_after_every_convolution() -> None:
    net = seeded_unet(3, scales=2, channels=4, skips=(2,), dropout=0.25).double()
    x, ones = normals(3, 1, 6, 5), torch.ones(net.n_masks, 4, dtype=torch.float64)
    assert_close(net(x, ones), net(x))
    for layer in range(net.n_masks):
        masks = ones.clone()
        masks[layer, 1] = 0
        scaled = seeded_unet(3, scales=2, channels=4, skips=(2,)).double()
        conv = [m for m in scaled.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)][layer]
        with torch.no_grad():
            conv.weight[1], conv.bias[1] = 0, 0  # type: ignore[index]
        assert_close(net(x, masks), scaled(x))
        assert not torch.allclose(net(x, masks), net(x))
    rows = dropout_masks(net, 3, torch.Generator().manual_seed(1), x)
    assert_close(net(x, rows), torch.cat([net(x[i : i + 1], rows[i]) for i in range(3)]))
    net.train()
    assert not torch.equal(net(x), net(x))


def test_masks_have_the_rate_and_the_mean_of_dropout() -> None:
    net = UNet(dropout=0.2)
    masks = dropout_masks(net, 500, torch.Generator().manual_seed(0), torch.empty(0, dtype=torch.float64))
    assert masks.shape == (500, net.n_masks, 32)
    kept = (masks > 0).double()
    error = (0.2 * 0.8 / kept.numel()) ** 0.5
    assert abs(float(kept.mean()) - 0.8) < 5 * error
    assert_close(masks, kept / 0.8)
    again, generator = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    parts = [dropout_masks(net, n, generator, masks) for n in (1, 7)]
    assert torch.equal(torch.cat(parts), dropout_masks(net, 8, again, masks))


@pytest.mark.parametrize(
    "settings",
    [{"scales": 0}, {"channels": 0}, {"skips": (4,)}, {"skips": (4, -1)}, {"skips": 4}, {"norm": 1}, {"dropout": 1.0},
     {"dropout": -0.1}, {"dropout": float("nan")}],
)  # fmt: skip
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(lw.LapwingError, match=f"{next(iter(settings))} is .*expected"):
        UNet(**settings)


def test_wrong_inputs_are_refused() -> None:
    for shape in ((4, 4), (1, 2, 4, 4), (1, 1, 0, 4)):
        with pytest.raises(lw.errors.DataError, match=r"expected images \(B, 1, H, W\)"):
            UNet(channels=2)(torch.zeros(shape))
