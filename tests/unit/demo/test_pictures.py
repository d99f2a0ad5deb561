"""Pictures from numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from experiments import pictures
from experiments.result import Result, Row


def numbers(count: int, seed: int = 0) -> list[float]:
    found: list[float] = torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def digits() -> Result:
    names = ("plain network", "posterior")
    arrays = {
        f"{name}/{key}": numbers(30, i) for i, key in enumerate(("test", "shuffled", "rotated")) for name in names
    }
    arrays |= {f"{name}/correct": [1.0, 0.0, 1.0] * 10 for name in names}
    return Result("digits", {}, 0, tuple(Row(name, {"NLL": 0.1, "ECE": 0.2}) for name in names), {}, arrays)


def observed(reach: float = 1.0) -> Result:
    arrays = {"observed": numbers(20)}
    for name in ("plain network", "posterior"):
        arrays |= {f"{name}/mean": [0.5] * 20, f"{name}/low": [0.5 - reach] * 20, f"{name}/high": [0.5 + reach] * 20}
    return Result("diabetes", {}, 0, (Row("plain network", {}), Row("posterior", {})), {}, arrays)


def bands(noise: float = 0.5) -> Result:
    grid = torch.linspace(-2, 2, 41)
    arrays = {"grid": grid.tolist(), "mean": grid.tolist(), "truth": grid.tolist(), "x": [-1.0, 1.0], "y": [-1.0, 1.0],
              "epistemic_std": [0.2] * 41, "std": [0.2 + noise] * 41}  # fmt: skip
    return Result("bands", {}, 0, (Row("posterior", {}),), {}, arrays)


def distances(networks: tuple[str, ...] = ("resnet", "transformer"), kl: float = 0.4, count: int = 4) -> Result:
    arrays = {"epochs": [1.0, 3.0, 8.0, 20.0]}
    for network in networks:
        arrays[f"{network}/0/KL"] = [kl] * count
        arrays[f"{network}/0/total variation"] = [0.1] * count
        for name, value in (("naive", 0.6), ("corrected", 0.4), ("plain", 0.5)):
            arrays[f"{network}/0/NLL {name}"] = [value] * count
    return Result("normalised", {}, 0, (Row("plain network", {}, networks[0]),), {}, arrays)


def layers(count: int = 3, share: float = 0.5) -> tuple[dict[str, float], dict[str, int]]:
    """γ and the number of weights of each layer."""
    sizes = {str(i): 20 * (i + 1) for i in range(count)}
    return {name: share * size for name, size in sizes.items()}, sizes


def drawn(draw: Callable[[Any, Path], None], result: Any, folder: Path) -> torch.Tensor:
    """The pixels, (height, width, 3)."""
    path = folder / "picture.png"
    draw(result, path)
    return torch.tensor(imread(path))[..., :3]


def share(pixels: torch.Tensor, colour: str) -> float:
    """The share of pixels of just this colour."""
    rgb = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return float(((pixels - rgb).abs().amax(-1) < 0.01).float().mean())


@pytest.mark.parametrize(
    ("draw", "result"),
    [
        (pictures.digits, digits()),
        (pictures.observed, observed()),
        (pictures.bands, bands()),
        (pictures.distances, distances()),
        (pictures.distances, distances(("resnet",))),
        (lambda given, path: pictures.effective_parameters(*given, path), layers()),
        (lambda given, path: pictures.effective_parameters(*given, path), ({"": 1.0}, {"": 4})),
    ],
    ids=["digits", "observed", "bands", "distances", "distances of one", "effective parameters", "one layer"],
)
def test_a_picture_is_written_and_not_blank(draw: Callable[[Any, Path], None], result: Any, tmp_path: Path) -> None:
    pixels = drawn(draw, result, tmp_path)
    assert min(pixels.shape[:2]) > 500
    assert 0.02 < float((pixels < 0.98).any(-1).float().mean()) < 0.9


def test_epistemic_and_total_bands_are_apart(tmp_path: Path) -> None:
    apart, together = drawn(pictures.bands, bands(0.5), tmp_path), drawn(pictures.bands, bands(0.0), tmp_path)
    assert share(apart, pictures.EPISTEMIC) > 0.02
    assert share(apart, pictures.TOTAL) > 2 * share(apart, pictures.EPISTEMIC)
    assert share(together, pictures.TOTAL) < 0.1 * share(apart, pictures.TOTAL)


def test_points_outside_their_interval_have_a_colour_of_their_own(tmp_path: Path) -> None:
    wide, narrow = drawn(pictures.observed, observed(1.0), tmp_path), drawn(pictures.observed, observed(0.01), tmp_path)
    orange = lambda pixels: float(((pixels[..., 0] - pixels[..., 2]) > 0.4).float().mean())
    assert orange(narrow) > 3 * orange(wide)


def test_effective_parameters_fill_their_share_of_the_weights(tmp_path: Path) -> None:
    draw = lambda given, path: pictures.effective_parameters(*given, path)
    found = {
        part: share(drawn(draw, layers(share=part), tmp_path), pictures.POSTERIOR) for part in (0.0, 0.25, 0.5, 1.0)
    }
    legend = found[0.0]
    assert legend < 0.01
    assert found[0.5] - legend == pytest.approx(2 * (found[0.25] - legend), rel=0.02)
    assert found[1.0] - legend == pytest.approx(4 * (found[0.25] - legend), rel=0.02)


def test_effective_parameters_of_many_layers_need_more_room(tmp_path: Path) -> None:
    draw = lambda given, path: pictures.effective_parameters(*given, path)
    few, many = drawn(draw, layers(3), tmp_path), drawn(draw, layers(30), tmp_path)
    assert many.shape[0] > 3 * few.shape[0]
    assert many.shape[1] == few.shape[1]


def test_distances_have_a_row_for_each_network(tmp_path: Path) -> None:
    one, two = (drawn(pictures.distances, distances(names), tmp_path) for names in (("resnet",), ("resnet", "vit")))
    assert two.shape[0] > 1.7 * one.shape[0]
    for colour in (pictures.PLAIN, pictures.OTHER, pictures.POSTERIOR):
        assert share(one, colour) > 5e-4


def test_distances_of_a_run_that_ended_early(tmp_path: Path) -> None:
    whole, part = (drawn(pictures.distances, distances(count=count), tmp_path) for count in (4, 2))
    assert share(part, pictures.POSTERIOR) < 0.8 * share(whole, pictures.POSTERIOR)


def test_pictures_use_no_global_figures(tmp_path: Path) -> None:
    from matplotlib import pyplot

    drawn(pictures.bands, bands(), tmp_path)
    assert pyplot.get_fignums() == []
