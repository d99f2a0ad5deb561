"""The picture of normalised networks, from numbers alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.normalised import picture
from lapwing.demo.figures import OTHER, PLAIN, POSTERIOR
from lapwing.demo.result import Result, Row
from tests.pixels import drawn, inked, share


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


def test_it_is_not_blank(one: torch.Tensor, two: torch.Tensor) -> None:
    for pixels in (one, two):
        assert min(pixels.shape[:2]) > 500
        assert 0.02 < inked(pixels) < 0.9


def test_it_has_a_row_for_each_network(one: torch.Tensor, two: torch.Tensor) -> None:
    assert two.shape[0] > 1.7 * one.shape[0]
    for colour in (PLAIN, OTHER, POSTERIOR):
        assert share(one, colour) > 5e-4


def test_a_run_that_ended_early(two: torch.Tensor, tmp_path: Path) -> None:
    part = drawn(picture, distances(count=2), tmp_path)
    assert share(part, POSTERIOR) < 0.8 * share(two, POSTERIOR)
