"""The table of image networks, on a few made images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments import images
from lapwing.demo.result import Result
from lapwing.demo.training import TrainingSettings
from lapwing.errors import DataError

METHODS = (
    "plain", "temperature", "last layer, validation", "Kron, evidence", "Kron, corrected evidence", "VaLLA, alpha 1",
    "FMGP",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of noisy patterns under the name of Fashion-MNIST, noise under that of MNIST."""
    where = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 200, (10, 28, 28))
    for name in ("fashion_mnist", "mnist"):
        arrays = {}
        for part, count in (("train", 240), ("test", 60)):
            y = np.arange(count) % 10
            clean = patterns[y] if name == "fashion_mnist" else np.zeros((count, 28, 28))
            noise = draw.integers(0, 255, (count, 28, 28))
            arrays[f"x_{part}"] = np.clip(0.35 * clean + 0.65 * noise, 0, 255).astype(np.uint8)
            arrays[f"y_{part}"] = y.astype(np.int64)
        np.savez(where / f"{name}.npz", **arrays)
    return where


def settings(folder: Path) -> images.ImageTable:
    return images.ImageTable(
        folder, recipe=TrainingSettings((12,), "tanh", 3, 10**9, 32, 3e-3, 1e-4), methods=METHODS, inducing=10, steps=6,
        validation=40, seeds=1, corrected=30,
    )  # fmt: skip


def test_every_method_has_its_scores(folder: Path) -> None:
    lines: list[str] = []
    result = images.run(settings(folder), progress=lines.append)
    assert tuple(row.name for row in result.rows) == METHODS
    assert len(lines) == len(METHODS)
    for row in result.rows:
        for name in ("accuracy", "OOD AUROC", "ECE", "MC ECE", "MC OOD AUROC"):
            assert 0 <= row.scores[name] <= 1
        assert row.scores["NLL"] > 0
        assert row.scores["MC NLL"] > 0
    plain = result.rows[0].scores
    assert plain["NLL"] == pytest.approx(plain["MC NLL"], abs=1e-6)  # no spread: both links are the softmax
    assert result.rows[1].scores["accuracy"] == plain["accuracy"]
    assert Result.from_json(result.to_json()) == result


def test_the_temperature_is_the_best_one_on_held_out_images(folder: Path) -> None:
    task = images._task(settings(folder), 0)
    beliefs, note = images.METHODS["temperature"](task, settings(folder), 0)
    best = float(note.split()[1])
    with torch.no_grad():
        f = task.model(task.held_out[0])
    costs = [float(F.cross_entropy(f / (best * k), task.held_out[1])) for k in (0.9, 1.0, 1.1)]
    assert costs[1] == min(costs)
    assert torch.allclose(beliefs(task.test[0]).mean * best, task.model(task.test[0]).detach(), rtol=2e-3, atol=1e-3)


def test_held_out_images_are_not_trained_on(folder: Path) -> None:
    task = images._task(settings(folder), 0)
    assert (len(task.train[0]), len(task.held_out[0])) == (200, 40)
    gaps = torch.cdist(task.held_out[0].flatten(1), task.train[0].flatten(1))
    assert float(gaps.min()) > 1


def test_a_convolutional_network(folder: Path) -> None:
    result = images.run(replace(settings(folder), network="lenet", methods=("plain", "Kron, evidence"), test=20))
    assert [row.name for row in result.rows] == ["plain", "Kron, evidence"]


def test_other_networks_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="network is 'vgg'; expected one of mlp, lenet, resnet20"):
        images.run(replace(settings(folder), network="vgg"))
