"""The large table, made small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import flights
from lapwing.demo.result import Result
from lapwing.demo.training import TrainingSettings
from lapwing.errors import DataError


def settings(folder: Path) -> flights.Flights:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(300, 8))
    y = 10 * np.sin(x[:, 0]) + draw.normal(size=300)
    np.savez(folder / "flights_nyc13.npz", X=x, y=y, test=np.arange(250, 300))
    recipe = TrainingSettings((10,), "tanh", 20, 10**9, 50, 1e-2, 1e-5)
    return flights.Flights(folder, ("plain", "Kron", "VaLLA, alpha 1"), recipe, data=200, test=40, seeds=2)


def test_every_method_is_judged_by_the_same_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = lambda model, held: {"method": flights.lw.VaLLA(5, steps=3)}
    monkeypatch.setitem(flights.METHODS, "VaLLA, alpha 1", few)
    result = flights.run(settings(tmp_path))
    assert [row.name for row in result.rows] == ["plain", "Kron", "VaLLA, alpha 1"]
    assert len({row.scores["RMSE"] for row in result.rows}) == 1  # the mean is the network's
    widths = [row.scores["width"] for row in result.rows]
    assert widths[0] < widths[1]
    assert Result.from_json(result.to_json()) == result


def test_temperature_is_the_noise_of_held_out_rows() -> None:
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    x = torch.arange(6, dtype=torch.float64).unsqueeze(1)
    options = flights.METHODS["temperature"](model, [(x[:4], x[:4] + 2), (x[4:], x[4:] - 2)])
    assert float(options["likelihood"].dispersion) == pytest.approx(4.0)


def test_test_rows_are_kept_apart(tmp_path: Path) -> None:
    table = flights._read(settings(tmp_path), 0)
    assert (len(table.x_train), len(table.x_test)) == (200, 40)
    seen = {tuple(row) for row in table.x_train.tolist()}
    assert not any(tuple(row) in seen for row in table.x_test.tolist())


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"flights_nyc13\.npz is not in the data folder"):
        flights.run(replace(settings(tmp_path), data_dir=tmp_path / "none"))
