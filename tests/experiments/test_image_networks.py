"""Experiments on networks for images and on pushed samples."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from experiments import cifar, pushed, resnets, sampling
from experiments import images as images_experiment
from experiments.corrected import corrected_evidence
from experiments.image_task import Task
from experiments.normalised import picture
from experiments.norms import TUNED, Norms
from experiments.options import silent
from experiments.push_sizes import PushSizes
from lapwing.demo.result import Result, Row
from lapwing.demo.training import TrainingSettings, optimise, train_mlp
from lapwing.errors import DataError
from lapwing.methods.hfl import PushedWeights, ResponsePosterior
from lapwing.plots import POSTERIOR
from tests.pixels import drawn, share

# The table of given networks, with a small network and made images in their place.

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


# The table of image networks, on a few made images.

METHODS = (
    "plain", "temperature", "last layer, validation", "Kron, evidence", "Kron, corrected evidence", "VaLLA, alpha 1",
    "FMGP",
)  # fmt: skip


Shares = dict[str, tuple[float, float]]


def write_images(where: Path, draw: np.random.Generator, patterns: np.ndarray, shares: Shares, *counts: int) -> Path:
    """Write training and test images of so many rows: patterns of ten classes and noise in these shares."""
    for name, (clean, noisy) in shares.items():
        arrays = {}
        for part, count in zip(("train", "test"), counts, strict=True):
            y = np.arange(count) % 10
            noise = draw.integers(0, 255, (count, 28, 28))
            arrays[f"x_{part}"] = (clean * patterns[y] + noisy * noise).astype(np.uint8)
            arrays[f"y_{part}"] = y.astype(np.int64)
        np.savez(where / f"{name}.npz", **arrays)
    return where


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of noisy patterns under the name of Fashion-MNIST, noise under that of MNIST."""
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 200, (10, 28, 28))
    shares = {"fashion_mnist": (0.35, 0.65), "mnist": (0.0, 0.65)}
    return write_images(tmp_path_factory.mktemp("data"), draw, patterns, shares, 240, 60)


def images_settings(folder: Path) -> images_experiment.ImageTable:
    return images_experiment.ImageTable(
        folder, recipe=TrainingSettings((12,), "tanh", 3, 10**9, 32, 3e-3, 1e-4), methods=METHODS, inducing=10, steps=6,
        validation=40, seeds=1, corrected=30,
    )  # fmt: skip


def test_every_method_has_its_scores(folder: Path) -> None:
    lines: list[str] = []
    result = images_experiment.run(images_settings(folder), progress=lines.append)
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
    task = images_experiment._task(images_settings(folder), 0)
    beliefs, note = images_experiment.METHODS["temperature"](task, images_settings(folder), 0)
    best = float(note.split()[1])
    with torch.no_grad():
        f = task.model(task.held_out[0])
    costs = [float(F.cross_entropy(f / (best * k), task.held_out[1])) for k in (0.9, 1.0, 1.1)]
    assert costs[1] == min(costs)
    assert torch.allclose(beliefs(task.test[0]).mean * best, task.model(task.test[0]).detach(), rtol=2e-3, atol=1e-3)


def test_a_convolutional_network(folder: Path) -> None:
    result = images_experiment.run(
        replace(images_settings(folder), network="lenet", methods=("plain", "Kron, evidence"), test=20)
    )
    assert [row.name for row in result.rows] == ["plain", "Kron, evidence"]


# CIFAR-10 and its residual networks, read from files made here.

CPU = torch.device("cpu")


def encoded(images: np.ndarray) -> np.ndarray:
    """(N, 32, 32, 3) bytes as differences: green, then red and blue less green, along rows and columns."""
    red, green, blue = (images[..., i] for i in range(3))
    flat = np.stack([green, red - green, blue - green], 1)
    for axis in (3, 2):
        flat = np.diff(flat, axis=axis, prepend=np.zeros_like(np.take(flat, [0], axis)))
    return flat.astype(np.uint8)


def written(folder: Path, count: int = 6) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    halves = np.array_split(np.arange(count), 2)
    for name, rows in zip(("cifar10_train_a", "cifar10_train_b"), halves, strict=True):
        np.savez(folder / f"{name}.npz", delta=encoded(images[rows]), y=rows % 10)
    return images


def test_images_come_back(tmp_path: Path) -> None:
    images = written(tmp_path)
    x, y = resnets.cifar10(tmp_path, "train", CPU)
    mean, std = (torch.tensor(t).view(1, 3, 1, 1) for t in (resnets.MEAN, resnets.STD))
    back = ((x * std + mean) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    assert np.array_equal(back.numpy(), images)
    assert y.tolist() == list(range(6))


def test_weights_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = resnets.ResNet(20).eval()
    (tmp_path / "models").mkdir()
    kept = {name: t.numpy() for name, t in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    np.savez(tmp_path / "models" / "cifar10_resnet20.npz", **kept)
    again = resnets.pretrained(tmp_path, 20)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), model(x))
    assert sum(p.numel() for p in model.parameters()) == 272_474
    del kept["fc.bias"]
    np.savez(tmp_path / "models" / "cifar10_resnet20.npz", **kept)
    with pytest.raises(DataError, match=r"lacks fc\.bias"):
        resnets.pretrained(tmp_path, 20)


def test_crops_are_parts_of_the_image_at_the_old_size() -> None:
    x = torch.arange(32.0).expand(5, 3, 32, 32).contiguous()
    crops = resnets.cropped(x, seed=1)
    assert crops.shape == x.shape
    assert torch.equal(crops, resnets.cropped(x, seed=1))
    assert not torch.equal(crops, resnets.cropped(x, seed=2))
    assert float(crops.min()) >= 0
    assert float(crops.max()) <= 31
    assert bool((crops.diff(dim=-1) >= -1e-4).all())  # a ramp stays a ramp


def test_rectangles_fit_and_have_the_area_and_shape_that_were_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([resnets._rectangle(320, 0.5, 4 / 3, generator) for _ in range(2000)]).double()
    left, top, width, height = drawn.unbind(1)
    assert bool((left >= 0).all() & (top >= 0).all())
    assert bool((left + width <= 320).all() & (top + height <= 320).all())
    area, shape = width * height / 320**2, width / height
    assert 0.495 < float(area.min()) < 0.52
    assert float(area.max()) > 0.95
    assert 0.74 < float(shape.min()) < 0.78
    assert 1.28 < float(shape.max()) < 1.35
    assert abs(float(shape.log().mean())) < 0.02  # neither way more than the other


# Small networks with norms, in a few seconds.

SMALL = replace(Norms.quick(), digits=30, points=20, test=40, epochs=5)


@pytest.mark.parametrize(
    ("unit", "score"), [("digits/LayerNorm/1", "ECE"), ("regression/BatchNorm/0", "coverage 95 %")]
)
def test_every_posterior_is_scored(unit: str, score: str) -> None:
    records = list(SMALL.measure(unit, silent))
    assert [record.method for record in records] == ["plain", *TUNED]
    assert {record.repeat for record in records} == {int(unit[-1])}
    assert {record.group for record in records} == {", ".join(unit.split("/")[:2])}
    for record in records:
        assert set(record.scores) == {"NLL", score}
        assert 0 <= record.scores[score] <= 1
        assert (record.seconds is None) == (record.method == "plain")


# The picture of normalised networks, from numbers alone.


def distances(networks: tuple[str, ...] = ("resnet", "transformer"), kl: float = 0.4, count: int = 4) -> Result:
    arrays = {"epochs": [1.0, 3.0, 8.0, 20.0]}
    for network in networks:
        arrays[f"{network}/0/KL"] = [kl] * count
        arrays[f"{network}/0/total variation"] = [0.1] * count
        for name, value in (("naive", 0.6), ("corrected", 0.4), ("plain", 0.5)):
            arrays[f"{network}/0/NLL {name}"] = [value] * count
    return Result("normalised", {}, 0, (Row("plain network", {}, networks[0]),), {}, arrays)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return drawn(picture, distances(), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return drawn(picture, distances(("resnet",)), tmp_path_factory.mktemp("one"))


def test_a_run_that_ended_early(two: torch.Tensor, tmp_path: Path) -> None:
    part = drawn(picture, distances(count=2), tmp_path)
    assert share(part, POSTERIOR) < 0.8 * share(two, POSTERIOR)


# A convolutional network at its minimum, in small, on made images.


@pytest.fixture(scope="module")
def pushed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of coarse noisy patterns under the name of Fashion-MNIST, noise under that of MNIST."""
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 255, (10, 7, 7)).repeat(4, 1).repeat(4, 2)
    shares = {"fashion_mnist": (0.6, 0.4), "mnist": (0.0, 1.0)}
    return write_images(tmp_path_factory.mktemp("data"), draw, patterns, shares, 200, 40)


@cache
def pushed_settings(folder: Path) -> pushed.PushedImages:
    return pushed.PushedImages(folder, data=30, held_out=30, test=40, channels=(2, 2), pushes=4, single=2)


@cache
def task(folder: Path) -> Task:
    return pushed.made(pushed_settings(folder), 0)


def energy(folder: Path, flat: Tensor) -> Tensor:
    found, values, start = task(folder), {}, 0
    for name, parameter in found.model.named_parameters():
        values[name] = flat[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
    x, y = found.train
    f = torch.func.functional_call(found.model, values, (x,))
    return F.cross_entropy(f, y, reduction="sum") + 0.5 * pushed_settings(folder).precision * flat.square().sum()


def test_the_network_is_at_its_minimum(pushed_folder: Path) -> None:
    flat = torch.nn.utils.parameters_to_vector(task(pushed_folder).model.parameters()).detach()
    slope = torch.func.grad(lambda w: energy(pushed_folder, w))
    assert float(slope(flat).norm()) < 1e-6
    assert float(torch.linalg.eigvalsh(torch.func.jacrev(slope)(flat))[0]) > 0


@cache
def ran(folder: Path) -> tuple[Result, list[str]]:
    """The scores, and what was said while they were found."""
    lines: list[str] = []
    return pushed.run(pushed_settings(folder), progress=lines.append), lines


def test_pushed_every_method_has_its_scores(pushed_folder: Path) -> None:
    result, lines = ran(pushed_folder)
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
def test_the_push_is_finished(pushed_folder: Path, variant: str) -> None:
    def fitted(method: lw.HFL) -> object:
        return pushed.fitted(task(pushed_folder), method, pushed_settings(pushed_folder), 0).posterior

    exact = fitted(lw.HFL())
    assert isinstance(exact, ResponsePosterior)
    whole = fitted(lw.HFL("pretrained", variant=variant, pushes=4))
    assert isinstance(whole, PushedWeights)
    assert pushed.distance_from_limit(whole, exact.responder, task(pushed_folder), 0) < 1e-5
    short = fitted(
        lw.HFL("pretrained", variant=variant, pushes=4, solver="adam", steps=5, tolerance=float("inf"), drift=1e9)
    )
    assert isinstance(short, PushedWeights)
    assert pushed.distance_from_limit(short, exact.responder, task(pushed_folder), 0) > 0.1


def test_the_scale_is_that_of_the_method(pushed_folder: Path) -> None:
    found = task(pushed_folder)
    method = lw.HFL("pretrained", calibration=found.validation)
    posterior = pushed.fitted(found, method, pushed_settings(pushed_folder), 0).posterior
    assert isinstance(posterior, PushedWeights)
    assert pushed._scale(replace(posterior, scale=1.0), found) == pytest.approx(posterior.scale, rel=1e-6)


# Finished pushes of small networks, on made images.


@pytest.fixture
def push_sizes_folder(tmp_path: Path) -> Path:
    """Ten classes of noise under the name of Fashion-MNIST."""
    draw = np.random.default_rng(0)
    arrays = {"x_train": draw.integers(0, 255, (40, 28, 28)).astype(np.uint8), "y_train": np.arange(40) % 10}
    np.savez(tmp_path / "fashion_mnist.npz", **arrays, x_test=arrays["x_train"], y_test=arrays["y_train"])
    return tmp_path


def test_a_small_network_is_pushed_to_the_end(push_sizes_folder: Path) -> None:
    settings = PushSizes(push_sizes_folder, channels=("2x3",), data=30, precision=3.0)
    assert settings.units() == ("2x3",)
    training, push = settings.measure("2x3", silent)
    assert training.scores["weights"] == 2 * 9 + 2 + 3 * 18 + 3 + 12 * 10 + 10
    assert training.scores["slope"] < 1e-6
    assert push.scores["finished"] == 1
    assert push.seconds is not None
    assert push.seconds > 0


# The variances of two gradients and of two estimates of γ, on few digits.

RECIPE = TrainingSettings(hidden=(7,), epochs=150, batch_size=40, learning_rate=2e-2, weight_decay=1 / 40)
QUICK = sampling.Sampling(recipe=RECIPE, data=40, precisions=(300.0, 3.0, 0.03), draws=1500, gradients=40)


@pytest.fixture(scope="module")
def result() -> Result:
    return sampling.run(QUICK)


def test_noise_in_the_regulariser_is_quieter_under_a_strong_prior_only(result: Result) -> None:
    strong, middle, weak = result.arrays["L / L' at optimum"]
    assert strong > 5 > middle > 1 > weak
    assert all(ratio > 0.99 for ratio in result.arrays["L / L' at start"])


def test_the_spread_of_gamma_is_the_expected_one(result: Result) -> None:
    """A standard deviation from 1500 draws is known to 2 %, to 5 % where a few squares are all there is."""
    for space in ("function", "weight"):
        found, expected = (torch.tensor(result.arrays[f"{kind} {space}, %"]) for kind in ("sd", "expected"))
        assert bool(((found / expected - 1).abs() < 0.15).all())
    assert all(f < w for f, w in zip(result.arrays["sd function, %"], result.arrays["sd weight, %"], strict=True))
    assert all(f < 100 * (2 / g) ** 0.5 for f, g in zip(result.arrays["expected function, %"], result.arrays["γ"]))


def test_gamma_is_that_of_the_full_posterior(result: Result) -> None:
    x, y = sampling._digits(QUICK)
    model = train_mlp(x, y, 10, RECIPE, 0)
    for precision, gamma in zip(QUICK.precisions, result.arrays["γ"], strict=True):
        full = lw.fit(
            model, (x, y), "classification", method="full", prior=lw.isotropic(precision), tuner=None, progress=False
        )
        assert full.effective_parameters().total == pytest.approx(gamma, rel=1e-8)


def test_one_sample_finds_the_fixed_point(result: Result) -> None:
    (exact,) = result.arrays["fixed point"]
    found = torch.tensor(result.arrays["fixed point, function"])
    assert len(found) == 1500
    assert float(found.mean()) == pytest.approx(exact, rel=0.03)
    assert float(found.std()) < 0.25 * exact
    assert float(torch.tensor(result.arrays["fixed point, weight"]).std()) > 1.5 * float(found.std())


def test_a_result_says_where_things_change_and_comes_back_from_json(result: Result) -> None:
    assert "same variance at γ / nC = " in result.notes[0]
    assert Result.from_json(result.to_json()) == result
