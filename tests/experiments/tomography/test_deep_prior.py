"""Training of deep image priors against a plain loop, and many at once against one at a time."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from experiments.tomography.deep_prior import Training, reconstruct, reconstruct_many
from experiments.tomography.unet import UNet, dropout_masks, seeded_unet
from tests.experiments.tomography.dense import Dense, normals
from tests.tolerances import SOLVED, assert_close

SHAPE, ROWS = (5, 6), 13
OPERATOR = Dense(normals(ROWS, 30))
Y = OPERATOR.forward(torch.sigmoid(normals(3, 30, seed=3))) + 0.1 * normals(3, ROWS, seed=1)
Z = normals(3, *SHAPE, seed=2)
# Some gradients are above 1 in norm, so that clipping matters; the last network's loss rises again after 11 steps.
TRAINING = Training(weight_of_tv=0.02, steps=15, rate=0.03)


def nets(dropout: float = 0.0, count: int = 3) -> list[UNet]:
    return [seeded_unet(i, scales=2, channels=3, skips=(2,), dropout=dropout).double() for i in range(count)]


def slow(unet: UNet, y: Tensor, z: Tensor, generator: torch.Generator | None) -> tuple[UNet, Tensor]:
    """One network by the plain modules of PyTorch; returns the best parameters and the losses."""
    net, best, losses = copy.deepcopy(unet), copy.deepcopy(unet), []
    adam = torch.optim.Adam(net.parameters(), lr=TRAINING.rate, foreach=False)
    for _ in range(TRAINING.steps):
        masks = None if generator is None else dropout_masks(net, 1, generator, z)[0]
        image = net(z[None, None], masks)[0, 0]
        variation = (image[1:] - image[:-1]).abs().sum() + (image[:, 1:] - image[:, :-1]).abs().sum()
        loss = (OPERATOR.matrix @ image.flatten() - y).square().mean() + TRAINING.weight_of_tv * variation  # type: ignore[operator]
        if not losses or float(loss.detach()) < min(losses):
            best.load_state_dict(net.state_dict())
        losses.append(float(loss.detach()))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
    return best, torch.tensor(losses, dtype=torch.float64)


def flat(unet: UNet) -> Tensor:
    return torch.nn.utils.parameters_to_vector(unet.parameters()).detach()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_one_and_many_networks_are_those_of_a_plain_loop(dropout: float) -> None:
    seeds = [torch.Generator().manual_seed(10 + i) for i in range(3)] if dropout else None
    many = reconstruct_many(nets(dropout), OPERATOR, Y, Z, TRAINING, generators=seeds)
    for i, (unet, joint) in enumerate(zip(nets(dropout), many, strict=True)):
        generators = [torch.Generator().manual_seed(10 + i) if dropout else None for _ in range(2)]
        best, losses = slow(unet, Y[i], Z[i], generators[0])
        single = reconstruct(unet, OPERATOR, Y[i], Z[i], TRAINING, generator=generators[1])
        for one in (single, joint):
            assert_close(one.losses, losses, SOLVED)
            assert_close(flat(one.unet), flat(best), SOLVED)
            assert_close(one.image, best(Z[i][None, None])[0, 0], SOLVED)
            assert one.best_step == int(losses.argmin())
            assert one.seconds > 0


def test_the_best_iterate_of_each_network_is_kept() -> None:
    many = reconstruct_many(nets(), OPERATOR, Y, Z, TRAINING)
    assert [one.best_step for one in many] == [14, 14, 11]
    for one, y, z in zip(many, Y, Z, strict=True):
        again = reconstruct(one.unet, OPERATOR, y, z, Training(0.02, steps=1))
        assert_close(again.losses[0], one.losses.min(), SOLVED)


def test_each_network_can_have_its_weight_of_the_total_variation() -> None:
    weights = (0.0, 0.02, 0.5)
    many = reconstruct_many(nets(), OPERATOR, Y, Z, Training(weights, steps=4, rate=0.01))
    for i, weight in enumerate(weights):
        single = reconstruct(nets()[i], OPERATOR, Y[i], Z[i], Training(weight, steps=4, rate=0.01))
        assert_close(many[i].losses, single.losses, SOLVED)
    assert len({float(one.losses[0]) for one in many}) == 3


@pytest.mark.parametrize("settings", [{"norm": True, "skips": (0,)}, {"sigmoid": False}])
def test_every_kind_of_network_trains_in_float32(settings: dict[str, Any]) -> None:
    unets = [seeded_unet(i, **({"scales": 2, "channels": 3, "skips": (1,)} | settings)) for i in range(2)]
    before = [flat(unet) for unet in unets]
    operator = Dense(OPERATOR.matrix.float())
    many = reconstruct_many(unets, operator, Y[:2].float(), Z[:2].float(), Training(1e-3, steps=8, rate=1e-2))
    for one, unet, start in zip(many, unets, before, strict=True):
        assert one.image.dtype == torch.float32
        assert one.image.shape == SHAPE
        assert float(one.losses[-1]) < float(one.losses[0])
        assert torch.equal(flat(unet), start), "the given network has changed"
        assert not one.unet.training


def test_a_progress_bar_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    reconstruct(nets()[0], OPERATOR, Y[0], Z[0], Training(0.0, steps=2), progress=True)
    assert "reconstructing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [{"steps": 0}, {"steps": 2.5}, {"weight_of_tv": -1e-3}, {"weight_of_tv": math.nan}, {"rate": 0.0}, {"clip": -1.0}],
)
def test_wrong_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(lw.LapwingError, match=f"{next(iter(changes))} is .*expected"):
        Training(**({"weight_of_tv": 1e-3, "steps": 2} | changes))


@pytest.mark.parametrize(
    ("y", "z", "message"),
    [
        (Y[0] * math.nan, Z[0], "y is .*expected a tensor of finite"),
        (Y[0], Z[0] / 0, "z is .*expected a tensor of finite"),
        (Y[0], Z[0].flatten(), "expected measurements"),
        (Y, Z, "expected measurements"),
        (Y[0, 1:], Z[0], "measurements"),
        (Y[0], Z[0, 1:], "does not take images"),
        (Y[0].float(), Z[0], "expected the same"),
        (Y[0].tolist(), Z[0], "y is"),
    ],
)
def test_wrong_measurements_and_inputs_are_refused(y: Any, z: Tensor, message: str) -> None:
    with pytest.raises(lw.errors.DataError, match=message):
        reconstruct(nets()[0], OPERATOR, y, z, TRAINING)


def test_wrong_lists_are_refused() -> None:
    with pytest.raises(lw.LapwingError, match="at least one UNet"):
        reconstruct_many([], OPERATOR, Y, Z, TRAINING)
    with pytest.raises(lw.LapwingError, match="different settings"):
        reconstruct_many([*nets()[:2], *nets(0.1)[:1]], OPERATOR, Y, Z, TRAINING)
    with pytest.raises(lw.LapwingError, match="one for each network"):
        reconstruct_many(nets()[:2], OPERATOR, Y, Z, TRAINING)
    with pytest.raises(lw.LapwingError, match="expected 1 or 3"):
        reconstruct_many(nets(), OPERATOR, Y, Z, Training((0.1, 0.2), 2))
    with pytest.raises(lw.LapwingError, match="2 generators"):
        reconstruct_many(nets(0.1), OPERATOR, Y, Z, TRAINING, generators=[torch.Generator(), torch.Generator()])


def test_a_training_without_a_finite_loss_is_an_error() -> None:
    unets = nets()
    torch.nn.init.constant_(unets[1].out.bias, math.nan)
    with pytest.raises(lw.errors.NumericalError, match=r"networks \[1\]"):
        reconstruct_many(unets, OPERATOR, Y, Z, Training(0.0, steps=2))
