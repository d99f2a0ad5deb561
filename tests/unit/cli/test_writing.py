"""Files of predictions."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from lapwing.cli.writing import write_arrays
from lapwing.errors import UnsupportedError


def test_csv_keeps_every_digit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    arrays = {
        "single": torch.randn(5000, generator=generator),
        "double": torch.randn(5000, 2, dtype=torch.float64, generator=generator),
        "whole": torch.arange(5000),
    }
    assert write_arrays(tmp_path / "p.csv", arrays) == ["single", "double_0", "double_1", "whole"]
    with (tmp_path / "p.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    values = [[float(row[at]) for row in rows] for at in range(len(header))]
    assert torch.equal(torch.tensor(values[0], dtype=torch.float32), arrays["single"])
    assert torch.equal(torch.tensor(values[1:3], dtype=torch.float64).T, arrays["double"])
    assert values[3] == list(range(5000))


def test_images_go_to_npz_alone(tmp_path: Path) -> None:
    arrays = {"probability": torch.zeros(2, 3, 4, 5)}
    with pytest.raises(UnsupportedError, match=r"shape \(3, 4, 5\) for each input, and .csv files have columns"):
        write_arrays(tmp_path / "p.csv", arrays)
    assert write_arrays(tmp_path / "p.npz", arrays) == ["probability"]


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=r"needs pyarrow; use pip install 'lapwing\[parquet\]'"):
        write_arrays(tmp_path / "p.parquet", {"mean": torch.zeros(3)})
