"""The experiments of the demo, in short runs, and its picture, from numbers alone."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from matplotlib.colors import to_hex, to_rgb

from lapwing import metrics
from lapwing.demo import tasks
from lapwing.demo.result import Result, Row
from lapwing.demo.tasks import (
    Bands,
    Diabetes,
    Digits,
    draw_curves,
    draw_overview,
    run_bands,
    run_diabetes,
    run_digits,
    shuffle_pixels,
    split_diabetes,
    split_digits,
)
from lapwing.demo.training import DEFAULT, VALIDATED, TrainingSettings
from lapwing.demo.training import PLAIN as PLAIN_ROW
from lapwing.plots import PLAIN, POSTERIOR, new_axis
from tests.pixels import drawn, inked, share

# One input with a gap.


@pytest.fixture(scope="module")
def of_bands() -> Result:
    return run_bands(Bands(repeats=2))


def test_new_data_in_the_gap_leave_the_intervals_of_the_plain_network(of_bands: Result) -> None:
    for name in ("plain network", "refitted noise"):
        assert score(of_bands, "in the gap", name, "coverage 95 %") < 0.8
        assert score(of_bands, "in the gap", name, "NLL") > score(of_bands, "in the gap", "Lapwing", "NLL") + 0.2
    assert score(of_bands, "in the gap", "Lapwing", "coverage 95 %") > 0.85
    for row in of_bands.rows:
        if row.group == "beside it":
            assert 0.9 < row.scores["coverage 95 %"] < 0.99


def test_doubt_is_larger_where_there_are_no_data(of_bands: Result) -> None:
    assert all(abs(x) >= Bands().gap for x in of_bands.arrays["x"])
    arrays = of_bands.arrays
    width = lambda name: [h - b for b, h in zip(arrays[f"{name}/low"], arrays[f"{name}/high"], strict=True)]
    assert 2 * min(width("Lapwing")) < max(width("Lapwing")) < 6  # the curve runs from -1 to 1
    assert max(width("plain network")) < 1.001 * min(width("plain network"))  # one noise for all


def test_new_data_are_where_they_should_be() -> None:
    table, (x_held, _), places = draw_curves(Bands(), seed=1)
    assert (len(table.x_train), len(x_held)) == (150, 50)
    for x in (table.x_train, x_held, places["beside it"][0]):
        assert 0.9 <= x.abs().min() < x.abs().max() <= 3
        assert 0.3 < (x < 0).double().mean() < 0.7
    assert places["in the gap"][0].abs().max() <= 0.9


# A short run on the digits.

QUICK = Digits(recipe=TrainingSettings(hidden=(32,), activation="relu", learning_rate=1e-2), repeats=1)
DIGIT_TASKS = ["digits", "noisy digits", "digits, BatchNorm"]


@pytest.fixture(scope="module")
def of_digits() -> Result:
    return run_digits(QUICK)


def score(result: Result, task: str, name: str, key: str) -> float:
    return next(row.scores[key] for row in result.rows if (row.group, row.name) == (task, name))


def test_every_task_has_every_row_and_has_learned(of_digits: Result) -> None:
    names = ["plain network", "temperature scaling", "Lapwing", "Lapwing with validation", "naive evidence"]
    assert [(row.group, row.name) for row in of_digits.rows] == [(task, name) for task in DIGIT_TASKS for name in names]
    for row in of_digits.rows:
        assert list(row.scores) == ["NLL", "ECE", "accuracy", "AUROC"]
        assert row.scores["accuracy"] > (0.5 if row.group == "noisy digits" else 0.9)  # one in ten by chance


def test_error_bars_do_no_harm_and_help_where_the_network_is_too_confident(of_digits: Result) -> None:
    for task in DIGIT_TASKS:
        plain = score(of_digits, task, "plain network", "NLL")
        assert score(of_digits, task, "Lapwing", "NLL") < plain + 0.01
        assert score(of_digits, task, "Lapwing with validation", "NLL") < plain + 0.01
    noisy = {
        name: score(of_digits, "noisy digits", name, "NLL") for name in ("plain network", "Lapwing with validation")
    }
    assert noisy["Lapwing with validation"] < 0.8 * noisy["plain network"]
    assert score(of_digits, "noisy digits", "Lapwing", "NLL") < noisy["plain network"]


def test_the_parts_of_a_split_are_of_one_source_and_do_not_overlap() -> None:
    train, held_out, test = split_digits(QUICK, noise=0.5, seed=0)
    assert [len(y) for _, y in (train, held_out, test)] == [878, 200, 719]
    images = torch.cat([train[0], held_out[0], test[0]])
    assert len(images.unique(dim=0)) == 1797
    clean = split_digits(QUICK, noise=0.0, seed=0)[0]
    assert clean[1].equal(train[1])
    assert (train[0] - clean[0]).std() == pytest.approx(0.5, rel=0.02)


def test_strange_images_are_made_of_the_same_pixels() -> None:
    test, _ = split_digits(QUICK, noise=0.5, seed=0)[2]
    strange = shuffle_pixels(test, seed=0)
    assert (strange != test).any(1).all()
    assert strange.sort(1).values.equal(test.sort(1).values)


@pytest.mark.filterwarnings("error::lapwing.errors.CalibrationWarning")
def test_equal_seeds_give_equal_scores_and_repeats_are_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With some of the images, and networks that are small and hardly trained."""
    images, labels = tasks.load_digits(return_X_y=True)
    monkeypatch.setattr(tasks, "load_digits", lambda **_: (images[:400], labels[:400]))
    short = replace(QUICK, recipe=replace(QUICK.recipe, hidden=(8,), epochs=3), validation=60)
    result, other, two = (run_digits(replace(short, **given)) for given in ({}, {"seed": 1}, {"repeats": 2}))
    for key, values in two.arrays.items():
        assert values == result.arrays[key] + other.arrays[key]
    for row, one, another in zip(two.rows, result.rows, other.rows, strict=True):
        assert row.scores["NLL"] == pytest.approx((one.scores["NLL"] + another.scores["NLL"]) / 2)
    assert other.arrays != result.arrays
    assert other.seed == 1


# A short run on the diabetes table.

DIABETES_ROWS = ["plain network", "refitted noise", "Lapwing", "Lapwing with validation", "naive evidence"]


@pytest.fixture(scope="module")
def of_diabetes() -> Result:
    return run_diabetes(Diabetes(recipe=TrainingSettings(epochs=30), repeats=2))


def column(result: Result, name: str, key: str) -> torch.Tensor:
    return torch.tensor(result.arrays[f"{name}/{key}"], dtype=torch.float64)


def test_error_bars_widen_the_intervals_around_the_same_mean(of_diabetes: Result) -> None:
    assert [row.name for row in of_diabetes.rows] == DIABETES_ROWS
    plain, _, default, *_ = of_diabetes.rows
    for row in of_diabetes.rows:
        assert row.scores["RMSE"] == pytest.approx(plain.scores["RMSE"], rel=1e-5)
        assert row.scores["RMSE"] < 77  # the deviation of y
        assert row.scores["coverage 95 %"] >= plain.scores["coverage 95 %"] - 0.03
    assert default.scores["width"] > plain.scores["width"]


def test_scores_are_those_of_the_arrays_in_the_units_of_y(of_diabetes: Result) -> None:
    """The arrays hold both splits, which have the same number of patients."""
    for row in of_diabetes.rows:
        y = column(of_diabetes, row.name, "observed")
        assert 25 <= y.min() < y.max() <= 346
        mean, std, low, high, log_density = (
            column(of_diabetes, row.name, key) for key in ("mean", "std", "low", "high", "log_density")
        )
        assert row.scores["NLL"] == pytest.approx(-float(log_density.mean()))
        assert row.scores["coverage 95 %"] == pytest.approx(float(((low <= y) & (y <= high)).double().mean()))
        assert row.scores["width"] == pytest.approx(float((high - low).mean()))
        assert ((low < mean) & (mean < high)).all()
        assert row.scores["NLL"] < math.log(346 - 25)  # a uniform density over all targets
    for name in ("plain network", "naive evidence"):  # these are normal
        y, mean, std = (column(of_diabetes, name, key) for key in ("observed", "mean", "std"))
        low, high = column(of_diabetes, name, "low"), column(of_diabetes, name, "high")
        scores = next(row.scores for row in of_diabetes.rows if row.name == name)
        assert scores["NLL"] == pytest.approx(metrics.normal_nll(mean, std, y))
        assert scores["CRPS"] == pytest.approx(metrics.crps(mean, std, y), rel=1e-3)
        assert ((high - low) / std).tolist() == pytest.approx([2 * 1.959964] * len(y), rel=1e-4)


def test_parts_of_a_split_do_not_overlap() -> None:
    table, (x_held, y_held) = split_diabetes(Diabetes(), seed=3)
    rows = torch.cat([table.x_train, table.x_test, x_held])
    assert len(rows.unique(dim=0)) == len(rows) == 442
    assert len(y_held) == 67


def test_a_result_goes_to_json(of_diabetes: Result) -> None:
    assert Result.from_json(of_diabetes.to_json()) == of_diabetes


# The picture, from numbers alone.


def some_digits(correct: float = 0.5) -> Result:
    arrays: dict[str, list[float]] = {}
    for name in (PLAIN_ROW, VALIDATED):
        arrays[f"noisy digits/{name}/confidence"] = torch.linspace(0.1, 1, 60).tolist()
        arrays[f"noisy digits/{name}/correct"] = [1.0 if i % 10 < 10 * correct else 0.0 for i in range(60)]
    return Result("digits", {}, 0, (), {}, arrays)


def some_bands(width: float = 0.5) -> Result:
    grid = torch.linspace(-2, 2, 41)
    arrays = {"grid": grid, "truth": grid, "x": torch.tensor([-1.0, 1.0]), "y": torch.tensor([-1.0, 1.0])}
    arrays |= {f"{DEFAULT}/low": grid - width, f"{DEFAULT}/high": grid + width}
    arrays |= {f"{PLAIN_ROW}/low": grid - 0.2, f"{PLAIN_ROW}/high": grid + 0.2}
    rows = tuple(Row(name, {"coverage 95 %": 0.57}, "in the gap") for name in (PLAIN_ROW, DEFAULT))
    return Result("bands", {}, 0, rows, {}, {name: values.tolist() for name, values in arrays.items()})


def faded(colour: str, alpha: float) -> str:
    """The colour of a transparent area over white."""
    return to_hex(tuple(1 - alpha * (1 - part) for part in to_rgb(colour)))


@cache
def pixels(correct: float = 0.5, width: float = 0.5) -> torch.Tensor:
    """Return the pixels of the picture of these digits and bands."""
    draw = lambda result, path: draw_overview(result, some_bands(width), path)
    with TemporaryDirectory() as folder:
        return drawn(draw, some_digits(correct), Path(folder))


def test_the_picture_is_written_and_not_blank() -> None:
    image = pixels()
    assert min(image.shape[:2]) > 500
    assert 0.05 < inked(image) < 0.9


def test_wide_intervals_are_wide_bands() -> None:
    narrow, wide = (pixels(width=width) for width in (0.25, 1.0))
    assert share(wide, faded(POSTERIOR, 0.3)) > 2 * share(narrow, faded(POSTERIOR, 0.3)) > 0


def test_points_are_as_high_as_predictions_are_right() -> None:
    from lapwing.demo.tasks import draw_reliability

    axis = new_axis()
    draw_reliability(axis, some_digits(0.8), "noisy digits", (PLAIN_ROW, VALIDATED))
    heights = {drawn.lines[0].get_color(): drawn.lines[0].get_ydata() for drawn in axis.containers}
    for colour in (PLAIN, POSTERIOR):
        assert sum(heights[colour]) / len(heights[colour]) == pytest.approx(0.8, abs=0.1)
    assert "55 % confident, 80 % right" in axis.get_title()
