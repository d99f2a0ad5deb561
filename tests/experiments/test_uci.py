"""The tables, on small ones made here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import uci
from experiments.data import data_folder
from lapwing.demo.result import Result, Row
from lapwing.demo.training import TrainingSettings
from lapwing.errors import DataError

QUICK = TrainingSettings(hidden=(8,), epochs=20, batch_size=32)


def written(folder: Path, name: str, scale: float = 1.0) -> None:
    """90 rows of three columns, one of them constant, with two splits."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(90, 3)) * [1, 100, 0] + [0, 5, 288]
    y = scale * (np.sin(x[:, 0]) + 0.01 * x[:, 1] + 0.1 * rng.normal(size=90) + 20)
    orders = [rng.permutation(90).astype(np.int32) for _ in range(2)]
    splits = {f"{part}_{i}": order[rows] for i, order in enumerate(orders)
              for part, rows in (("train", slice(70)), ("test", slice(70, 90)))}  # fmt: skip
    np.savez(folder / f"uci_{name}.npz", X=x, y=y, **splits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables")
    written(path, "boston")
    written(path, "yacht", scale=1000.0)
    return path


@pytest.fixture(scope="module")
def settings(folder: Path) -> uci.Uci:
    return uci.Uci(folder, sets=("boston", "wine", "yacht"), splits=2, recipe=QUICK)


@pytest.fixture(scope="module")
def result(settings: uci.Uci) -> Result:
    return uci.run(settings)


def test_every_variant_is_scored_on_every_table_found(result: Result) -> None:
    found = [(row.group, row.name) for row in result.rows]
    assert found == [(group, name) for group in ("boston", "yacht", "mean") for name in uci.USUAL]
    assert all(math.isfinite(score) for row in result.rows for score in row.scores.values())
    assert Result.from_json(result.to_json()) == result


def test_an_absent_table_is_skipped_with_a_message(result: Result, settings: uci.Uci) -> None:
    assert "wine: skipped, uci_wine.npz is not in the data folder" in result.notes
    heard: list[str] = []
    uci.run(replace(settings, splits=1, variants=("plain",)), heard.append)
    assert [line.split(":")[0] for line in heard] == ["boston", "wine", "yacht"]


def test_scores_are_in_the_units_of_y(result: Result) -> None:
    """The second table is the first in other units: RMSE scales, the NLL shifts by the log, coverage stays."""
    scores = {(row.group, row.name): row.scores for row in result.rows}
    for name in uci.USUAL:
        small, large = scores["boston", name], scores["yacht", name]
        assert large["RMSE"] == pytest.approx(1000 * small["RMSE"], rel=1e-3)
        assert large["NLL"] == pytest.approx(small["NLL"] + math.log(1000), rel=1e-3)
        assert large["coverage 95 %"] == pytest.approx(small["coverage 95 %"])


def test_rows_are_means_over_splits_and_tables(result: Result) -> None:
    scores = {(row.group, row.name): row.scores for row in result.rows}
    for name in uci.USUAL:
        each = result.arrays[f"boston/{name}/NLL"]
        assert len(each) == 2
        assert scores["boston", name]["NLL"] == pytest.approx(sum(each) / 2)
        both = (scores["boston", name]["NLL"] + scores["yacht", name]["NLL"]) / 2
        assert scores["mean", name]["NLL"] == pytest.approx(both)


def test_variants_share_the_network_and_differ_in_spread(result: Result) -> None:
    scores = {row.name: row.scores for row in result.rows if row.group == "boston"}
    assert len({round(s["RMSE"], 5) for s in scores.values()}) == 1
    assert len({s["width"] for s in scores.values()}) == len(scores)
    assert all(s["width"] > scores["plain"]["width"] for name, s in scores.items() if name != "plain")


def test_temperature_has_a_network_and_a_noise_of_its_own(result: Result, settings: uci.Uci) -> None:
    found = uci.run(replace(settings, sets=("boston",), variants=("plain", "temperature")))
    scores = {row.name: row.scores for row in found.rows if row.group == "boston"}
    shared = next(row.scores for row in result.rows if (row.group, row.name) == ("boston", "plain"))
    assert scores["plain"]["RMSE"] == shared["RMSE"]
    assert scores["temperature"]["RMSE"] != shared["RMSE"]
    assert "temperature" in found.notes[-1]


def test_the_noise_of_temperature_is_that_of_rows_its_network_has_not_seen(settings: uci.Uci) -> None:
    """Rows that are far off count in the noise where they are held out, and only there."""
    x = torch.linspace(-2, 2, 70, dtype=torch.float64).unsqueeze(1)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    held, rest = order[:7], order[7:]
    y = x.sin()
    y[held] += 100.0
    model, likelihood = uci._tempered(x, y, settings, 1)
    left = (y - model(x).detach()).square()
    assert float(likelihood.dispersion) == pytest.approx(float(left[held].mean()))
    assert float(left[rest].max()) < 4.0
    again, same = uci._tempered(x, y, settings, 1)
    assert torch.equal(model(x), again(x))
    assert torch.equal(likelihood.dispersion, same.dispersion)


def test_improvements_count_tables_with_a_lower_nll() -> None:
    numbers = {("a", "plain"): 1.0, ("a", "default"): 0.5, ("b", "plain"): 1.0, ("b", "default"): 1.0}
    rows = [Row(name, {"NLL": value}, group) for (group, name), value in numbers.items()]
    assert uci.improvements(rows) == ["default: lower NLL than the plain network on 1 of 2 tables"]
    assert uci.improvements([row for row in rows if row.name != "plain"]) == []


def test_a_split_takes_its_rows(folder: Path) -> None:
    with np.load(folder / "uci_boston.npz") as file:
        x, y, train, test = (file[key] for key in ("X", "y", "train_1", "test_1"))
    table = uci.read_split(folder / "uci_boston.npz", 1)
    assert torch.equal(table.x_train, torch.from_numpy(x[train]))
    assert torch.equal(table.y_test, torch.from_numpy(y[test]))
    assert table.training[1].shape == (70, 1)


def test_a_table_gives_the_splits_it_has(settings: uci.Uci) -> None:
    result = uci.run(replace(settings, sets=("boston",), splits=5, variants=("plain",)))
    assert len(result.arrays["boston/plain/NLL"]) == 2


def test_what_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="lacks train_2, test_2"):
        uci.read_split(folder / "uci_boston.npz", 2)
    with pytest.raises(DataError, match="none of wine is in"):
        uci.run(uci.Uci(folder, sets=("wine",)))
    monkeypatch.delenv("LAPWING_DATA", raising=False)
    with pytest.raises(DataError, match="LAPWING_DATA"):
        data_folder(None)
    with pytest.raises(DataError, match="does not exist"):
        data_folder(folder / "elsewhere")
    monkeypatch.setenv("LAPWING_DATA", str(folder))
    assert data_folder(None) == folder
