"""The table of given networks, with a small network and made images in their place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from experiments import cifar
from experiments.corrected import corrected_evidence
from experiments.options import silent
from lapwing.demo.training import TrainingSettings, optimise

COUNT, CLASSES = 90, 3


def images(folder: Path, part: str, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(part))
    y = torch.arange(COUNT) % CLASSES
    noise = torch.randn(COUNT, 3, 4, 4, generator=generator)
    return noise + torch.eye(CLASSES)[y][:, :, None, None], y


def network(folder: Path, depth: int) -> nn.Module:
    torch.manual_seed(depth)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, CLASSES))
    optimise(model, *images(folder, "train", torch.device("cpu")), TrainingSettings(epochs=5, batch_size=30), 0)
    return model


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> cifar.Cifar:
    monkeypatch.setattr(cifar, "cifar10", images)
    monkeypatch.setattr(cifar, "pretrained", network)
    return replace(cifar.Cifar.quick(), data=40, validation=20, splits=2, corrected=25, test=70)


@pytest.mark.filterwarnings("ignore::lapwing.errors.CalibrationWarning")
def test_the_corrected_evidence_is_beside_the_naive_one(settings: cifar.Cifar) -> None:
    rows = ["plain", "evidence", "default", "crops", "corrected evidence", "temperature", "validation"]
    records = list(settings.measure("resnet20", silent))
    assert [(r.method, r.repeat) for r in records] == [(row, split) for row in rows for split in range(2)]
    nll = {(r.method, r.repeat): r.scores["NLL"] for r in records}
    assert nll["corrected evidence", 0] != nll["evidence", 0]
    without = {r.method for r in replace(settings, corrected=0, splits=1).measure("resnet20", silent)}
    assert without == set(rows) - {"corrected evidence"}


def test_few_images_stand_for_all() -> None:
    """The likelihood of 25 of 50 images counts twice: the evidence is that of these images with each one repeated."""
    x, y = (part[:25] for part in images(Path(), "train", torch.device("cpu")))
    model, lines = network(Path(), 20).double(), list[str]()
    few = corrected_evidence(model, (x.double(), y), 50, progress=lines.append)
    twice = corrected_evidence(model, (x.double().repeat(2, 1, 1, 1), y.repeat(2)), 50)
    torch.testing.assert_close(few.prior.values, twice.prior.values, rtol=0.05, atol=0)  # tolerances of the search
    assert lines[0].startswith("corrected evidence of 25 images at the precision")
    assert isinstance(few.likelihood, lw.Categorical)
