"""ResNet-50 in small: its networks, the form without an offset, and the rows of a unit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from experiments.engine.settings import from_toml
from experiments.engine.values import SettingsError
from experiments.options import silent
from experiments.vision.bottlenecks import FIFTY, NETWORKS, BottleneckNet, offset_free_mean
from experiments.vision.fifty import Fifty
from lapwing.errors import LapwingError

TINY = replace(Fifty.quick(), blocks=(1,), epochs=1, data=9, test=25, tolerance=10.0, solver_tolerance=1.0)
REDUCED = Path(__file__).parents[3] / "experiments" / "forms" / "resnet50" / "reduced.toml"
pytestmark = pytest.mark.filterwarnings("ignore::lapwing.errors.CalibrationWarning")


def network(name: str, channels: int = 3) -> BottleneckNet:
    torch.manual_seed(0)
    return BottleneckNet(NETWORKS[name], channels, 2, (1, 2))


@pytest.mark.parametrize("name", NETWORKS)
def test_resnet50_has_fifty_layers_and_its_weights(name: str) -> None:
    with torch.device("meta"):
        model = BottleneckNet(NETWORKS[name], 3, 64, FIFTY)
    layers = [m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "short" not in n]
    assert len(layers) == 50
    # Those of ImageNet's ResNet-50, 25,557,032, with a stem of 3 x 3 in place of 7 x 7 and ten classes for a thousand;
    # without norms each pair of a norm's vectors goes (53,120 numbers), and the stem has a bias of 64.
    weights = 25_557_032 - 3 * 64 * (49 - 9) - 990 * 2049
    scalars = 16 * 7
    assert sum(p.numel() for p in model.parameters()) == weights - (name == "Fixup") * (53_120 - 64 - scalars)


@pytest.mark.parametrize("name", NETWORKS)
def test_without_an_offset_the_tangent_model_is_the_jacobian_times_the_weights(name: str) -> None:
    model = network(name).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # Fixup starts from zeros
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    model(x)
    model.eval()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    jacobian = jacrev(lambda w: functional_call(model, w, (x,)))(weights)
    flat = torch.cat([part.flatten(2) for part in jacobian.values()], -1)
    moved = offset_free_mean(model) - torch.cat([w.flatten() for w in weights.values()])
    f = model(x).detach()
    torch.testing.assert_close(f + flat @ moved, torch.zeros_like(f), atol=1e-12 * float(f.abs().max()), rtol=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_unit_has_every_row(name: str) -> None:
    records = list(TINY.measure(f"{name}/3", silent))
    rows = ("one precision", "many")
    expected = {"plain network", *(f"naive, {row}" for row in rows), *(f"corrected, {row}" for row in rows)}
    assert {r.method for r in records} == expected | {f"corrected, {row}, simple" for row in rows}
    assert {(r.group, r.repeat) for r in records} == {(name, 3)}
    assert all(r.scores["gamma"] > 0 for r in records[1:])


def test_forms() -> None:
    reduced = from_toml(Fifty, REDUCED)
    assert reduced.units() == ("BatchNorm/0", "Fixup/0")
    assert (reduced.blocks, Fifty.full().width) == (FIFTY, 64)
    with pytest.raises(LapwingError, match="unknown LayerNorm"):
        replace(TINY, networks=("LayerNorm",)).units()
    with pytest.raises(SettingsError, match="depth is unknown"):
        from_toml(Fifty, REDUCED, ["depth=50"])
