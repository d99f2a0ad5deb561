"""``lapwing predict`` writes the predictions of the library, row by row."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import lapwing as lw
from tests.unit.cli.conftest import FITTED, Ran
from tests.unit.cli.test_fit import classifier, tensors

Run = Callable[..., Ran]
PREDICT = f"predict {FITTED} --posterior classifier.lapwing"


def columns(path: Path) -> dict[str, list[str]]:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))


def test_classes_in_every_format(run: Run, folder: Path, tmp_path: Path, posterior: Path) -> None:
    expected = lw.load(posterior, classifier(folder)).predict(tensors(folder / "test.npz")[0])
    names = ["class", "probability_bird", "probability_cat", "probability_dog", "entropy", "epistemic"]
    for suffix in ("csv", "npz", "parquet"):
        out = tmp_path / f"p.{suffix}"
        facts = run(f"{PREDICT} --data test.npz --classes bird,cat,dog --batch-size 7 --out {out} --json").facts
        assert (facts["rows"], facts["out"]) == (20, str(out))
        assert facts["columns"] == (names if suffix != "npz" else [*facts["columns"]])
    table, arrow, arrays = (
        columns(tmp_path / "p.csv"),
        pq.read_table(tmp_path / "p.parquet"),
        np.load(tmp_path / "p.npz"),
    )
    labels = np.array(["bird", "cat", "dog"])[expected.probs.argmax(1)]
    assert table["class"] == arrow["class"].to_pylist() == list(labels)
    assert list(table) == arrow.column_names == names
    np.testing.assert_allclose(arrays["probability"], expected.probs, rtol=1e-4)
    for values in ([float(v) for v in table["probability_dog"]], arrow["probability_dog"].to_pylist()):
        np.testing.assert_allclose(values, expected.probs[:, 2], rtol=1e-4)
    for name in ("entropy", "epistemic"):
        np.testing.assert_allclose(arrays[name], getattr(expected, name), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose([float(v) for v in table[name]], arrays[name], rtol=1e-8)
    assert arrays["classes"].tolist() == ["bird", "cat", "dog"]
    assert arrays["class"].tolist() == expected.probs.argmax(1).tolist()


def test_numbers_have_means_and_intervals(run: Run, folder: Path, tmp_path: Path, regression: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    net.load_state_dict(torch.load(folder / "regressor.pt", weights_only=True))
    expected = lw.load(regression, net.eval()).predict(tensors(folder / "numbers.npz")[0])
    words = "predict cli_nets:regressor --weights regressor.pt --posterior regressor.lapwing --data numbers.npz"
    out = tmp_path / "p.csv"
    ran = run(f"{words} --level 0.8 --out {out}")
    assert ran.out.splitlines() == [
        "numbers.npz: 60 rows, inputs 'x'",
        f"60 predictions written to {out}: mean, std, low, high, epistemic_std",
    ]
    table = {name: np.array(values, dtype=float) for name, values in columns(out).items()}
    low, high = expected.interval(0.8)
    for name, values in (
        ("mean", expected.mean), ("std", expected.std), ("low", low), ("high", high),
        ("epistemic_std", expected.epistemic_variance.sqrt()),
    ):  # fmt: skip
        np.testing.assert_allclose(table[name], values[:, 0], rtol=1e-4, atol=1e-5)


def test_a_binary_network_has_one_probability(run: Run, folder: Path, tmp_path: Path) -> None:
    torch.save({"weight": torch.tensor([[1.0, -1.0, 0.5, 0.0]]), "bias": torch.zeros(1)}, folder / "binary.pt")
    arrays = np.load(folder / "train.npz")
    np.savez(folder / "binary.npz", x=arrays["x"], y=arrays["y"] > 0)
    model = "cli_nets:binary --weights binary.pt"
    assert run(f"fit {model} --data binary.npz --likelihood binary --prior 1 --out {tmp_path / 'b'}").code == 0
    out = tmp_path / "p.csv"
    assert run(f"predict {model} --posterior {tmp_path / 'b'} --data binary.npz --out {out}").code == 0
    assert list(columns(out)) == ["probability", "entropy", "epistemic"]
    words = f"predict {model} --posterior {tmp_path / 'b'} --data binary.npz --classes no,yes"
    assert run(f"{words} --out {tmp_path / 'q.csv'} --json").facts["columns"][0] == "probability_yes"


def test_targets_are_left_out_and_loaders_are_read(run: Run, tmp_path: Path, posterior: Path) -> None:
    words = f"{PREDICT} --data test.csv --target kind --drop id --out {tmp_path / 'a.csv'}"
    assert run(words).out.startswith("test.csv: 20 rows, 4 inputs\n")
    assert run(f"{PREDICT} --data cli_nets:make_loader --out {tmp_path / 'b.csv'} --json").facts["rows"] == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data new.csv --out p.csv", "there is no file new.csv"),
        ("--data test.npz --out p.txt", "--out is 'p.txt'; expected a name that ends in .csv or .npz or .parquet."),
        (
            "--data test.npz --out test.npz",
            "--out is test.npz, which is the file of --data test.npz; expected another. Change --out.",
        ),
        ("--data test.npz --out p.csv --posterior none.lapwing", "there is no file none.lapwing; expected a posterior"),
        ("--data test.npz --out p.csv --posterior train.npz", "train.npz"),
        ("--data test.npz --out p.csv --weights wide.pt", "wide.pt belongs to another model"),
        (
            "--data test.npz --out p.csv --classes bird,cat",
            "--classes has 2 names and the network 3 outputs; expected 3 names.",
        ),
        ("--data test.csv --out p.csv", "the column 'id' of test.csv is text"),
        ("--data test.csv --drop id,kind,a --out p.csv", "does not take the inputs of test.csv"),
    ],
)
def test_bad_input_is_refused_in_a_line(options: str, message: str, run: Run, posterior: Path, folder: Path) -> None:
    assert message in run(f"{PREDICT} {options}").error
    assert not (folder / "p.csv").exists()


def test_a_posterior_of_another_model_is_refused(run: Run, folder: Path, tmp_path: Path, posterior: Path) -> None:
    state = torch.load(folder / "classifier.pt", weights_only=True)
    torch.save({name: 2 * tensor for name, tensor in state.items()}, tmp_path / "other.pt")
    words = f"{PREDICT} --data test.npz --out {tmp_path / 'p.csv'} --weights {tmp_path / 'other.pt'}"
    assert "belongs to another model" in run(words).error


def test_columns_are_kept_beside_their_predictions(run: Run, folder: Path, tmp_path: Path, posterior: Path) -> None:
    for name in ("p.csv", "p.parquet", "p.npz"):
        out = tmp_path / name
        facts = run(f"{PREDICT} --data test.csv --keep id,kind --out {out} --json").facts
        assert facts["columns"][:3] == ["id", "kind", "class"]
    assert columns(tmp_path / "p.csv")["id"] == [f"row {i}" for i in range(20)]
    assert pq.read_table(tmp_path / "p.parquet")["id"].to_pylist() == [f"row {i}" for i in range(20)]
    assert np.load(tmp_path / "p.npz")["id"].tolist() == [f"row {i}" for i in range(20)]
    assert "test.csv has no 'ids'" in run(f"{PREDICT} --data test.csv --keep ids --out {tmp_path / 'q.csv'}").error
    (folder / "same.csv").write_text("a,b,c,d,class\n1,2,3,4,5\n")
    error = run(f"{PREDICT} --data same.csv --keep class --out {tmp_path / 'q.csv'}").error
    assert "--keep names 'class', and a prediction has that name too" in error
    error = run(f"{PREDICT} --data test.npz --keep y --out {tmp_path / 'q.csv'}").error
    assert "test.npz has no columns to keep" in error
