"""A file knows the function that it belongs to, and not its weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.samples import OneSample
from tests.attack.damage import Contents
from tests.cases import BY_NAME, CASES
from tests.problems import batches, likelihood

D = torch.float64


class Bent(nn.Module):
    """A network whose activation is a setting, or a constant that no setting shows."""

    def __init__(self, bend: Any = F.tanh) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self._bend = nn.Linear(4, 6), nn.Linear(6, 3), bend

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self._bend(self.a(x)))


def sloped(slope: float) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(slope), nn.Linear(6, 3))


def saved(model: nn.Module, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    lw.fit(model, [(x, torch.arange(20) % 3)], "classification", prior=1.0).save(path)
    return path


def test_another_slope_is_refused(tmp_path: Path) -> None:
    path = saved(sloped(0.01), tmp_path / "net")
    lw.load(path, sloped(0.01))
    with pytest.raises(lw.errors.FileError, match=r"returns other outputs, by .* such as the slope of an activation"):
        lw.load(path, sloped(0.5))
    with pytest.raises(lw.errors.FileError, match="belongs to another model"):
        lw.load(path, sloped(0.02))


def test_another_forward_is_refused(tmp_path: Path) -> None:
    path = saved(Bent(), tmp_path / "net")
    lw.load(path, Bent())
    with pytest.raises(lw.errors.FileError, match="belongs to another model"):
        lw.load(path, Bent(F.gelu))


@pytest.mark.parametrize("dtype", [torch.float32, D, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float32, D, torch.bfloat16])
def test_another_dtype_is_the_same_function(dtype: torch.dtype, other: torch.dtype, tmp_path: Path) -> None:
    """Weights that have been rounded once are the same in every wider dtype."""
    rounded = sloped(0.01).bfloat16()
    path = saved(rounded.to(dtype), tmp_path / "net", dtype)
    lw.load(path, sloped(0.01).bfloat16().to(other))
    with pytest.raises(lw.errors.FileError, match="belongs to another model"):
        lw.load(path, sloped(0.5).bfloat16().to(other))


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_every_network_has_a_probe(case: str) -> None:
    """Tokens, images, mappings and tuples; a probe of four rows, none of them from the data."""
    chosen = BY_NAME[case]
    posterior = lw.fit(chosen.build(), batches(chosen), likelihood(chosen), method=lw.baselines.MapOnly(), prior=1.0)
    probe = posterior.network.probed
    assert probe is not None
    assert probe.outputs is not None
    assert sum(t.nbytes for t in probe.tensors) <= 2**20
    for t, given in zip(probe.tensors, lw.data.inputs.tensors_in(batches(chosen)[0][0]), strict=True):
        assert t.dtype == given.dtype
        if t.is_floating_point():
            assert not any(torch.equal(row, other) for row in t for other in given)


def test_ranges_are_those_of_each_entry() -> None:
    """Columns of very different sizes stay so, and what all rows share is kept."""
    x = torch.stack([torch.linspace(0, 1, 30), torch.linspace(1e6, 2e6, 30), torch.full((30,), 7.0)], 1)
    probe = lw.fit(nn.Linear(3, 1), (x, x[:, 0]), "regression", prior=1.0).network.probed
    assert probe is not None
    (drawn,) = probe.tensors
    assert float(drawn[:, 0].max()) <= 1
    assert float(drawn[:, 1].min()) >= 1e6
    assert bool((drawn[:, 2] == 7).all())


class Shifted(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.shift = nn.Linear(4, 3), shift

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


def test_settings_are_compared_where_inputs_cannot_be_drawn(tmp_path: Path) -> None:
    x = OneSample((torch.randn(9, 4),))
    posterior = lw.fit(Shifted(0.5), [(x, torch.arange(9)[None] % 3)], "classification", prior=1.0)
    assert posterior.network.probed is None
    posterior.save(tmp_path / "net")
    lw.load(tmp_path / "net", Shifted(0.5))
    with pytest.raises(lw.errors.FileError, match=r"shift of the module '' is 1\.5 and was 0\.5"):
        lw.load(tmp_path / "net", Shifted(1.5))


def test_the_probe_stays_when_a_file_is_written_again(tmp_path: Path) -> None:
    path = saved(sloped(0.01), tmp_path / "net")
    lw.load(path, sloped(0.01)).save(tmp_path / "again")
    with pytest.raises(lw.errors.FileError, match="belongs to another model"):
        lw.load(tmp_path / "again", sloped(0.5))


def test_settings_are_watched_after_loading(tmp_path: Path) -> None:
    model = sloped(0.01)
    again = lw.load(saved(model, tmp_path / "net"), model)
    model[1].negative_slope = 0.5
    with pytest.raises(lw.errors.ModelError, match="negative_slope"):
        again.predict(torch.zeros(1, 4))


@pytest.mark.parametrize("form", [{"tensor": 1}, {"list": 3}, {"map": {"x": {"tensor": 0}}}, [], {"value": []}])
def test_a_damaged_probe_is_refused(form: Any, tmp_path: Path) -> None:
    path = saved(sloped(0.01), tmp_path / "net")
    file = Contents.of(path.read_bytes())
    file.root["parts"]["network"]["parts"]["probe"]["settings"]["form"] = form
    path.write_bytes(file.packed())
    with pytest.raises(lw.errors.FileError, match="is damaged"):
        lw.load(path, sloped(0.01))
