"""A convolutional network at its minimum, in small, on made images."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lapwing as lw
from experiments import pushed
from experiments.__main__ import main
from experiments.image_task import Task
from experiments.options import Progress
from lapwing.demo.result import Result
from lapwing.methods.hfl.hfl import PushedWeights, ResponsePosterior


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of coarse noisy patterns under the name of Fashion-MNIST, noise under that of MNIST."""
    where = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 255, (10, 7, 7)).repeat(4, 1).repeat(4, 2)
    for name, share in (("fashion_mnist", 0.6), ("mnist", 0.0)):
        arrays = {}
        for part, count in (("train", 200), ("test", 40)):
            y = np.arange(count) % 10
            noise = draw.integers(0, 255, (count, 28, 28))
            arrays[f"x_{part}"] = (share * patterns[y] + (1 - share) * noise).astype(np.uint8)
            arrays[f"y_{part}"] = y.astype(np.int64)
        np.savez(where / f"{name}.npz", **arrays)
    return where


@cache
def settings(folder: Path) -> pushed.PushedImages:
    return pushed.PushedImages(folder, data=30, held_out=30, test=40, channels=(2, 2), pushes=4, single=2)


@cache
def task(folder: Path) -> Task:
    return pushed.made(settings(folder), 0)


def energy(folder: Path, flat: Tensor) -> Tensor:
    found, values, start = task(folder), {}, 0
    for name, parameter in found.model.named_parameters():
        values[name] = flat[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
    x, y = found.train
    f = torch.func.functional_call(found.model, values, (x,))
    return F.cross_entropy(f, y, reduction="sum") + 0.5 * settings(folder).precision * flat.square().sum()


def test_the_network_is_at_its_minimum(folder: Path) -> None:
    flat = torch.nn.utils.parameters_to_vector(task(folder).model.parameters()).detach()
    slope = torch.func.grad(lambda w: energy(folder, w))
    assert float(slope(flat).norm()) < 1e-6
    assert float(torch.linalg.eigvalsh(torch.func.jacrev(slope)(flat))[0]) > 0


def test_held_out_images_are_not_trained_on(folder: Path) -> None:
    found = task(folder)
    assert (len(found.train[0]), len(found.held_out[0])) == (30, 30)
    assert float(torch.cdist(found.held_out[0].flatten(1), found.train[0].flatten(1)).min()) > 1


@cache
def ran(folder: Path) -> tuple[Result, list[str]]:
    """The scores, and what was said while they were found."""
    lines: list[str] = []
    return pushed.run(settings(folder), progress=lines.append), lines


def test_every_method_has_its_scores(folder: Path) -> None:
    result, lines = ran(folder)
    scores = {row.name: row.scores for row in result.rows}
    single = {name: scores.pop(name) for name in list(scores) if "2 images" in name}
    assert len(scores) == 12
    for name, mine in scores.items():
        assert all(0 <= mine[key] <= 1 for key in ("accuracy", "ECE", "OOD AUROC", "score AUROC"))
        assert mine["NLL"] > 0
        raw = scores[name.removesuffix(", calibrated")]
        assert mine["rank correlation"] == pytest.approx(raw["rank correlation"])  # a scale ranks nothing anew
        assert mine["score AUROC"] == pytest.approx(raw["score AUROC"])
    assert scores["full Hessian"]["rank correlation"] == pytest.approx(1)
    assert scores["full Hessian"]["ratio"] == pytest.approx(1)
    assert scores["plain"]["score AUROC"] == 0.5
    assert (scores["plain"]["rank correlation"], scores["plain"]["ratio"]) == (0, 0)
    assert scores["plain"]["NLL"] == pytest.approx(scores["plain"]["MC NLL"])
    assert list(single) == ["HFL, each point, 2 images", "HFL, linearised, 2 images"]
    assert all(mine["difference"] < 1e-4 for mine in single.values())
    assert all(scores[f"HFL, {name}"]["distance"] < 1e-5 for name in ("mean push", "4 random pushes"))
    assert 0 < scores["HFL, 4 random pushes"]["standard error"] < 2
    assert all(mine["scale"] > 0 for name, mine in scores.items() if name.endswith("calibrated"))
    assert scores["temperature"]["temperature"] > 0
    assert lines[0].startswith("seed 0, at the minimum: ")
    assert any("each point" in line for line in lines)
    assert Result.from_json(result.to_json()) == result


@pytest.mark.parametrize("variant", ["absolute", "mean", "random"])
def test_the_push_is_finished(folder: Path, variant: str) -> None:
    def fitted(method: lw.HFL) -> object:
        return pushed.fitted(task(folder), method, settings(folder), 0).posterior

    exact = fitted(lw.HFL())
    assert isinstance(exact, ResponsePosterior)
    whole = fitted(lw.HFL("pretrained", variant=variant, pushes=4))
    assert isinstance(whole, PushedWeights)
    assert pushed.distance_from_limit(whole, exact.responder, task(folder), 0) < 1e-5
    short = fitted(
        lw.HFL("pretrained", variant=variant, pushes=4, solver="adam", steps=5, tolerance=float("inf"), drift=1e9)
    )
    assert isinstance(short, PushedWeights)
    assert pushed.distance_from_limit(short, exact.responder, task(folder), 0) > 0.1


def test_the_scale_is_that_of_the_method(folder: Path) -> None:
    found = task(folder)
    method = lw.HFL("pretrained", calibration=found.validation)
    posterior = pushed.fitted(found, method, settings(folder), 0).posterior
    assert isinstance(posterior, PushedWeights)
    assert pushed._scale(replace(posterior, scale=1.0), found) == pytest.approx(posterior.scale, rel=1e-6)


def test_the_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the scores from above, which take seconds."""
    result, _ = ran(folder)
    asked: list[pushed.PushedImages] = []

    def run(settings: pushed.PushedImages, progress: Progress) -> Result:
        asked.append(settings)
        progress("as before")
        return result

    monkeypatch.setattr(pushed, "run", run)
    assert main(["pushed", "--quick", "--data-dir", str(folder), "--out", str(tmp_path), "--seed", "1"]) == 0
    printed = capsys.readouterr()
    assert "HFL, absolute push, calibrated" in printed.out
    assert "as before" in printed.err
    assert Result.from_json(json.dumps(json.loads((tmp_path / "pushed.json").read_text())["pushed"])) == result
    assert asked == [replace(pushed.PushedImages.quick(), data_dir=folder, seed=1)]
