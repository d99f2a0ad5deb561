"""Experiments on tables and small tasks."""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import lapwing as lw
from experiments import biased, crossfit_table, flights, package_tables, table_methods, uci
from experiments.__main__ import EXPERIMENTS, main
from experiments.active import RULES, Active
from experiments.budget import Budget
from experiments.budget_task import Task as BudgetTask
from experiments.budget_task import read
from experiments.costs import TASKS, Costs
from experiments.costs_picture import draw
from experiments.data import data_folder
from experiments.decision_tasks import simulated
from experiments.decisions import Decisions
from experiments.engine.contract import Record
from experiments.engine.known import experiment_class
from experiments.engine.settings import digest, from_toml
from experiments.engine.store import Stored, load, result_path
from experiments.options import silent
from experiments.own_tables import OwnTable, own_tables
from experiments.stacked import StackedTraining
from experiments.table_methods import METHODS, SLOW, Belief, Sizes, Task
from experiments.tables import DEPTHS, KINDS, SPLITS, Tables
from experiments.uci import read_split
from lapwing.demo.result import Result, Row, table
from lapwing.demo.training import SplitTable, TrainingSettings
from lapwing.errors import DataError, DivergedError, LapwingError, NumericalError
from lapwing.posteriors.base import Trace
from tests.references import dense
from tests.tolerances import assert_near

# The tables, on small ones made here.

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


def test_temperature_has_its_own_network_and_noise(result: Result, settings: uci.Uci) -> None:
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


def test_missing_data_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# The UCI tables in the engine, on small ones made here.

TRAINING = StackedTraining(steps=60, batch_size=16)
SIZES = Sizes(8, landmarks=12, directions=4, inducing=5, inducing_steps=3, snapshots=4, pushes=3, push_steps=6)


def tables_written(folder: Path, name: str = "yacht") -> None:
    """70 rows of two inputs; two standard splits, and a gap along each input."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(70, 2)) * [1, 10] + [0, 5]
    y = 30 * (np.sin(x[:, 0]) + 0.05 * x[:, 1] + 0.1 * rng.normal(size=70) + 20)
    splits: dict[str, Any] = {}
    for i in range(2):
        order = rng.permutation(70)
        splits |= {f"train_{i}": order[:55], f"test_{i}": order[55:]}
        along = x[:, i].argsort()
        splits |= {f"gap_train_{i}": np.concatenate([along[:23], along[46:]]), f"gap_test_{i}": along[23:46]}
    np.savez(folder / f"uci_{name}.npz", X=x, y=y, **splits)


@pytest.fixture(scope="module")
def tables_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables")
    tables_written(path)
    return path


@pytest.fixture(scope="module")
def tables_settings(tables_folder: Path) -> Tables:
    return Tables(tables_folder, sets=("yacht",), splits=2, slow_splits=1, members=3, training=TRAINING, sizes=SIZES)


@pytest.fixture(scope="module")
def measured(tables_settings: Tables) -> dict[str, tuple[Record, ...]]:
    """The first split of one kind and the second of the other, at different depths."""
    return {
        unit: tuple(tables_settings.measure(unit, silent)) for unit in ("yacht/gap/0/1x50", "yacht/standard/1/2x50")
    }


def test_every_method_is_scored_and_slow_ones_on_the_first_splits(measured: dict[str, tuple[Record, ...]]) -> None:
    slow, fast = measured.values()
    assert tuple(record.method for record in slow) == METHODS
    assert tuple(record.method for record in fast) == tuple(name for name in METHODS if name not in SLOW)
    assert {(record.group, record.repeat) for record in fast} == {("yacht/standard/2x50", 1)}
    for record in (*slow, *fast):
        assert record.seconds is not None
        assert record.seconds > 0
        assert all(math.isfinite(score) for score in record.scores.values())


def test_methods_share_mean_and_noise_where_they_share_the_network(measured: dict[str, tuple[Record, ...]]) -> None:
    scores = {record.method: record.scores for record in measured["yacht/gap/0/1x50"]}
    shared = [name for name in METHODS if name not in ("sampled network", "MC dropout", "ensemble", "SWAG")]
    for name in shared:
        assert scores[name]["RMSE"] == pytest.approx(scores["MAP"]["RMSE"], rel=1e-6)
        assert scores[name]["noise std"] == pytest.approx(scores["MAP"]["noise std"], rel=1e-6)
    assert scores["sampled network"]["noise std"] == pytest.approx(scores["MAP"]["noise std"], rel=1e-6)
    assert len({scores[name]["log-likelihood"] for name in shared}) == len(shared)
    for name in ("MC dropout", "ensemble", "SWAG"):
        assert scores[name]["RMSE"] != pytest.approx(scores["MAP"]["RMSE"], rel=1e-6)


def test_the_noise_is_the_residual_over_the_rows_that_are_left(tables_folder: Path) -> None:
    """At the optimum of the evidence the noise is the sum of squares over n - γ."""
    table = read_split(tables_folder / "uci_yacht.npz", 0)
    task = Task.trained(table, TRAINING, SIZES, 3, 2)
    x, y = table.training
    with torch.no_grad():
        squares = float((task.model(x) - y).square().sum())
    gamma = float(task.exact.effective_parameters().total)
    assert gamma > 1
    assert task.noise == pytest.approx(squares / (len(x) - gamma), rel=1e-3)
    assert task.inflation == pytest.approx(len(x) / (len(x) - gamma), rel=1e-3)


def test_scores_are_in_the_units_of_the_table() -> None:
    y = torch.tensor([1.0, 3.0, 5.0, 11.0], dtype=torch.float64)
    table = SplitTable(y[:, None], y, y[:, None], y + 2)
    units = table.scale_y
    belief = Belief((y - units.mean) / units.std, torch.full((4,), 0.3).double(), 0.7)
    scores = belief.scores(table)
    std = float(units.std)
    assert scores["RMSE"] == pytest.approx(2.0)
    expected = -0.5 * math.log(2 * math.pi) - math.log(std) - 0.5 * (2 / std) ** 2
    assert scores["log-likelihood"] == pytest.approx(expected)
    assert scores["coverage 95 %"] == 1.0
    assert scores["noise std"] == pytest.approx(math.sqrt(0.7) * std)


def test_a_gap_split_takes_its_rows(tables_folder: Path) -> None:
    with np.load(tables_folder / "uci_yacht.npz") as file:
        x, y, train, test = (file[key] for key in ("X", "y", "gap_train_1", "gap_test_1"))
    table = read_split(tables_folder / "uci_yacht.npz", 1, "gap")
    assert torch.equal(table.x_train, torch.from_numpy(x[train]))
    assert torch.equal(table.y_test, torch.from_numpy(y[test]))
    inside = table.x_test[:, 1]
    assert not bool(((table.x_train[:, 1] > inside.min()) & (table.x_train[:, 1] < inside.max())).any())
    with pytest.raises(DataError, match="lacks gap_train_2, gap_test_2"):
        read_split(tables_folder / "uci_yacht.npz", 2, "gap")
    with pytest.raises(DataError, match=r"uci_wine\.npz is not in the data folder"):
        read_split(tables_folder / "uci_wine.npz", 0)


def test_units_are_all_splits_and_the_first_ones_come_first() -> None:
    units = Tables.full().units()
    assert len(units) == len(set(units)) == len(DEPTHS) * sum(map(sum, SPLITS.values())) == 496
    assert "naval/gap/15/1x50" in units
    assert "protein/standard/5/1x50" not in units
    splits = [int(unit.split("/")[2]) for unit in units]
    assert splits == sorted(splits)
    assert {unit.split("/")[0] for unit in units[: len(SPLITS) * len(KINDS) * len(DEPTHS)]} == set(SPLITS)
    assert set(Tables.quick().units()) <= set(units)


def test_a_method_that_fails_is_left_out_with_a_line(tables_settings: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: Task) -> lw.Fitted:
        raise NumericalError("no subnetwork.")

    monkeypatch.setattr(table_methods, "_subnetwork", fail)
    lines: list[str] = []
    found = replace(tables_settings, methods=("MAP", "subnetwork", "diagonal")).measure(
        "yacht/gap/1/1x50", lines.append
    )
    assert [record.method for record in found] == ["MAP", "diagonal"]
    assert lines == ["yacht/gap/1x50, split 1, subnetwork: no subnetwork."]


def test_without_an_optimum_the_noise_is_the_residual(tables_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(posterior: object) -> object:
        raise DivergedError("no optimum.", Trace(""), posterior)

    monkeypatch.setattr(table_methods, "JOINT", diverge)
    task = Task.trained(read_split(tables_folder / "uci_yacht.npz", 0), TRAINING, SIZES, 0, 1)
    assert task.inflation == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sets", ("cars",), "sets: unknown cars"),
        ("kinds", ("gaps",), "kinds: unknown gaps"),
        ("depths", ("3x50",), "depths: unknown 3x50"),
        ("methods", ("MAP", "GP"), "methods: unknown GP"),
        ("members", 1, "members is 1"),
        ("splits", 0, "splits 0"),
    ],
)
def test_settings_that_are_unknown_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(LapwingError, match=message):
        replace(Tables(), **{field: value})  # type: ignore[arg-type]


# ``python -m experiments`` as a user meets it.


def test_uci_prints_a_table_for_the_sets_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, "wine")
    command = ["uci", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--splits", "1"]
    assert main([*command, "--sets", "wine", "yacht", "--variants", "plain", "default"]) == 0
    printed = capsys.readouterr()
    assert "yacht: skipped, uci_yacht.npz is not in the data folder" in printed.out
    assert "of 1 tables" in printed.out
    assert "wine: done" in printed.err
    result = Result.from_json(json.dumps(json.loads((tmp_path / "out" / "uci.json").read_text())["uci"]))
    assert [row.name for row in result.rows if row.group == "wine"] == ["plain", "default"]


RESULTS = {
    "inducing": ("inducing", "inducing_targets"),
    "language": ("language", "language_tokens"),
}  # of experiments with more than one
FILES = {  # that each experiment writes
    "calibration": ("calibration.json",),
    "cifar": ("cifar.json",),
    "uci": ("uci.json",),
    "biased": ("biased.json",),
    "widths": ("widths.json",),
    "flights": ("flights.json",),
    "fashion": ("fashion.json",),
    "normalised": ("normalised.png", "normalised.json"),
    "sampling": ("sampling.png", "sampling.json"),
    "inducing": ("inducing.png", "inducing_targets.png", "inducing.json"),
    "images": ("images_mlp.json",),
    "language": ("language.json",),
    "response": ("response.png", "response.json"),
    "pushed": ("pushed.json",),
}
PICTURES = {
    "inducing.picture": "inducing", "inducing.targets_picture": "inducing_targets", "normalised.picture": "normalised",
    "response.picture": "response", "sampling.picture": "sampling",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "tomography"])  # which has several parts
def test_every_experiment_prints_its_tables_and_what_it_wrote(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runs that end at once: the tables, then the paths, and each picture shows its result."""

    def runs(name: str) -> Callable[..., Result]:
        return lambda settings, progress=lambda line: None: (progress(f"{name}: done"), made(name))[1]

    results = RESULTS.get(name, (name,))
    for module in results:
        monkeypatch.setattr(f"experiments.{module}.run", runs(module))
    for picture, subject in PICTURES.items():
        draw = lambda result, path, subject=subject: path.write_text(f"{subject} of {result.experiment}")
        monkeypatch.setattr(f"experiments.{picture}", draw)
    options = [] if name == "sampling" else ["--data-dir", str(tmp_path)]
    assert main([name, "--out", str(tmp_path), *options]) == 0
    tables = "".join(table(made(each)) + "\n\n" for each in results)
    printed = capsys.readouterr()
    assert printed.out == tables + "".join(f"{tmp_path / file}\n" for file in FILES[name])
    assert printed.err == ("" if options == [] else "".join(f"{each}: done\n" for each in results))
    assert list(json.loads((tmp_path / FILES[name][-1]).read_text())) == list(results)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES[name])
    drawn = [(tmp_path / file).read_text() for file in FILES[name][:-1]]
    assert drawn == [f"{each} of {each}" for each in results[: len(drawn)]]


def made(name: str) -> Result:
    return Result(name, {}, 0, (Row("plain", {"NLL": 1.25}),), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data-dir", "nowhere"], "the data folder nowhere does not exist"),
        ([], "set LAPWING_DATA"),
        (["--data-dir", ".", "--sets", "rain"], "--sets: unknown rain; expected some of boston"),
        (["--data-dir", ".", "--sets", "wine"], "none of wine is in"),
    ],
)
def test_mistakes_end_with_a_message_and_a_one(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LAPWING_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["uci", "--out", str(tmp_path / "out"), *options]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.splitlines()[-1].startswith("experiments: ")


@pytest.mark.parametrize("arguments", [[], ["uci"], ["uci", "--out", "x", "--splits", "0"], ["walk"]])
def test_a_command_that_cannot_be_read_exits_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_missing_extras_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "experiments.sampling", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["sampling", "--out", str(tmp_path)]) == 1
    assert "pip install 'lapwing[run]'" in capsys.readouterr().err


def test_help_lists_every_experiment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as ``python -m`` runs it, in this process: another one would import PyTorch again."""
    monkeypatch.delitem(sys.modules, "experiments.__main__")
    monkeypatch.setattr(sys, "argv", ["experiments", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("experiments", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in EXPERIMENTS)


# Tables of a user's folder.


def own_tables_written(folder: Path, name: str, **arrays: object) -> Path:
    np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    return folder / f"{name}.npz"


def test_tables_are_read_and_split_into_standardised_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([5 + 3 * rng.normal(size=(50, 2)), np.full((50, 1), 7.0)], 1)
    classes = own_tables_written(tmp_path, "colours", X=x, y=np.array([2, 5] * 25), kind="classification")
    numbers = own_tables_written(tmp_path, "sizes", X=x, y=100 * x[:, 0], kind="regression")
    own_tables_written(tmp_path, "other", x_train=x)
    assert (own_tables(tmp_path, "classification"), own_tables(tmp_path, "regression")) == ((classes,), (numbers,))
    table = OwnTable.read(classes)
    assert (table.name, table.classes, table.y.unique().tolist()) == ("colours", 2, [0, 1])
    few, many = table.parts(0, 4), table.parts(0, 200)
    assert [len(part[0]) for part in few] == [25, 4, 15]
    assert [len(part[0]) for part in many] == [25, 10, 15]
    assert torch.equal(few[2][0], many[2][0])
    assert torch.equal(few[1][0], many[1][0][:4])
    train, _, _ = OwnTable.read(numbers).parts(1, 10)
    assert train[0].mean(0).abs().max() < 1e-5
    assert abs(float(train[1].std()) - 1) < 1e-5
    assert bool(torch.isfinite(train[0]).all())  # also of the constant column


def test_a_file_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lacks kind"):
        OwnTable.read(own_tables_written(tmp_path, "a", X=np.zeros((3, 2)), y=np.zeros(3)))
    with pytest.raises(DataError, match="expected X"):
        OwnTable.read(own_tables_written(tmp_path, "b", X=np.zeros((3, 2)), y=np.zeros(2), kind="regression"))
    with pytest.raises(DataError, match=r"no \.npz file with a classification table"):
        own_tables(tmp_path, "classification")


# Tables made from packages of data.


def test_a_missing_package_is_named_with_what_to_install() -> None:
    with pytest.raises(DataError, match=r"first lines of .*package_tables\.py say what to install"):
        package_tables._package("a_package_that_does_not_exist")


def test_rows_with_unknown_values_and_rare_classes_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    folders = [tmp_path / "data" / part / "raw" for part in ("balanced", "imbalanced")]
    rows = [f"{i}, {'red' if i % 3 else 'blue'}, 7, {'yes' if i < 10 else 'no'}" for i in range(500)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "a-b.dat").write_text("\n".join(["@relation a", *rows, "?, red, 7, no"]))
    ((name, X, y, kind),) = package_tables.class_tables(tmp_path)  # the imbalanced one has ten rows of a class
    assert (name, kind, X.shape, np.bincount(y).tolist()) == ("c_a_b", "classification", (500, 2), [490, 10])
    assert X[:, 1].tolist() == [float(i % 3 > 0) for i in range(500)]


# The large table, made small.


def flights_settings(folder: Path) -> flights.Flights:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(300, 8))
    y = 10 * np.sin(x[:, 0]) + draw.normal(size=300)
    np.savez(folder / "flights_nyc13.npz", X=x, y=y, test=np.arange(250, 300))
    recipe = TrainingSettings((10,), "tanh", 20, 10**9, 50, 1e-2, 1e-5)
    return flights.Flights(folder, ("plain", "Kron", "VaLLA, alpha 1"), recipe, data=200, test=40, seeds=2)


def test_every_method_is_judged_by_the_same_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = lambda model, held: {"method": flights.lw.VaLLA(5, steps=3)}
    monkeypatch.setitem(flights.METHODS, "VaLLA, alpha 1", few)
    result = flights.run(flights_settings(tmp_path))
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
    table = flights._read(flights_settings(tmp_path), 0)
    assert (len(table.x_train), len(table.x_test)) == (200, 40)
    seen = {tuple(row) for row in table.x_train.tolist()}
    assert not any(tuple(row) in seen for row in table.x_test.tolist())


# Forms in files: each can be read, and results that are stored under its name were measured with it.

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / "experiments" / "forms").glob("*/*.toml"))


def test_there_are_forms() -> None:
    assert {path.parent.name for path in FORMS} >= {"cnn", "evidence", "regularised", "shift"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_form_can_be_read_and_is_that_of_the_stored_result(path: Path) -> None:
    settings: Any = from_toml(experiment_class(path.parent.name), path)
    assert path.stem not in ("quick", "full")
    assert len(set(settings.units())) == len(settings.units()) > 0
    stored = result_path(ROOT / "docs" / "results", path.parent.name, path.stem)
    if stored.exists():
        units = load(stored).units
        assert set(units) <= set(settings.units())
        assert {unit.settings for unit in units.values()} == {digest(settings)}


# Cost against quality, on a small table of scikit-learn.

TINY = replace(Costs.quick(), methods=("plain", "Kron", "Subnetwork", "Ensemble"), seeds=1)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [record for unit in TINY.units() for record in TINY.measure(unit, silent)]


def test_every_method_has_scores_and_costs(records: list[Record]) -> None:
    assert {record.method for record in records} == set(TINY.methods)
    for record in records:
        assert record.group == "wine, small"
        assert record.peak is not None
        assert record.peak > 0
        assert record.seconds is not None
        assert 0 < record.scores["validated NLL"] < 2
        assert record.scores["fit s"] > 0
    costs = {record.method: record.scores["fit s"] for record in records}
    assert costs["plain"] < costs["Ensemble"]  # whose members are trained


def test_the_picture(records: list[Record], tmp_path: Path) -> None:
    draw(records, tmp_path / "costs.png")
    assert imread(tmp_path / "costs.png").shape[:2] == (1230, 690)


def test_images_and_slow_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow methods run in the first repetition alone, and those that are not practical in none."""
    draw = np.random.default_rng(0)
    arrays = {f"x_{part}": draw.integers(0, 255, (60, 28, 28), dtype=np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "fashion_mnist.npz", **arrays, y_train=np.arange(60) % 10, y_test=np.arange(60) % 10)
    monkeypatch.setattr("experiments.costs.IMAGES", 40)
    monkeypatch.setattr("experiments.costs.VALIDATION", 20)
    few = replace(TINY, data_dir=tmp_path, tasks=("Fashion-MNIST",), methods=("plain", "VaLLA", "HFL"), test=15)
    task = TASKS["Fashion-MNIST"](tmp_path, 0)
    assert sum(p.numel() for p in task.model.parameters()) == 2026
    assert [len(part[1]) for part in (task.split.train, task.split.validation)] == [40, 20]
    (record,) = few.measure("Fashion-MNIST/1", silent)
    assert (record.method, record.peak) == ("plain", None)  # memory is measured in the first repetition
    assert 0 <= record.scores["accuracy"] <= 1


# Inducing points on tables: costs and errors, on the table of scikit-learn with tiny networks.

BUDGET_TINY = Budget(
    tables=("diabetes",), rows=60, sizes=(4, 9), steps=3, snapshots=(3,), epochs=(2,), growing="diabetes", growth=(40,),
    growth_sizes=(5, 40), close=1e-6, recipe=TrainingSettings(hidden=(4,), epochs=5, batch_size=20), seeds=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def task() -> BudgetTask:
    return BudgetTask.of(read("diabetes", Path("nowhere"), 0), 60, BUDGET_TINY.recipe, 0)


@pytest.fixture(scope="module")
def budget_records() -> list[Record]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lw.baselines, "SWAG", partial(lw.baselines.SWAG, batch_size=20))  # 60 rows are few
        return [record for unit in BUDGET_TINY.units() for record in BUDGET_TINY.measure(unit, silent)]


def test_every_method_has_a_record(budget_records: list[Record]) -> None:
    names = [record.method for record in budget_records if record.group == "diabetes"]
    sized = [f"{name}({size}){end}" for size in (4, 9) for name, end in (
        ("VaLLA", ""), ("VaLLA", ", fixed points"), ("ELLA", ""), ("ELLA", ", residual"))]  # fmt: skip
    assert names == [
        "plain", "exact", *sized, "SWAG(3)", "dropout(2)", "exact, tangent mean", "VaLLA(9), tangent mean",
        "exact, tangent mean, tuned",
    ]  # fmt: skip
    scores = {record.method: record.scores for record in budget_records if record.group == "diabetes"}
    assert scores["exact"]["KL"] == 0
    assert scores["VaLLA(9), fixed points"]["KL"] < scores["VaLLA(4), fixed points"]["KL"]
    assert scores["exact"]["RMSE"] == pytest.approx(scores["plain"]["RMSE"])
    assert scores["exact, tangent mean"]["RMSE"] != pytest.approx(scores["plain"]["RMSE"], rel=1e-3)


def test_a_point_at_every_row_is_enough(budget_records: list[Record]) -> None:
    grown = [record for record in budget_records if record.group == "diabetes, n = 40"]
    assert [record.method for record in grown] == ["exact", "VaLLA(5)", "VaLLA(40)", "points needed"]
    assert grown[-1].scores["M"] == 40
    assert grown[-1].scores["γ"] == grown[0].scores["γ"] > 1
    assert grown[2].scores["KL"] < 1e-10 < grown[1].scores["KL"]


def test_the_tangent_mean_is_that_of_ridge_regression(task: BudgetTask) -> None:
    """Of y - f + J w̃ on J, with the precision and the noise of the exact posterior."""
    model = task.exact.network.model
    jacobian, new = (dense.jacobian(model, x, len(x)).squeeze(1) for x in (task.x, task.x_test))
    theta, alpha, phi = task.exact.network.theta(), float(task.exact.prior.values), float(task.noise)
    target = task.y - model(task.x).detach() + (jacobian @ theta).unsqueeze(1)
    matrix = jacobian.mT @ jacobian / phi + alpha * torch.eye(len(theta), dtype=torch.float64)
    optimum = torch.linalg.solve(matrix, jacobian.mT @ target / phi)
    expected = model(task.x_test).detach() + new @ (optimum - theta.unsqueeze(1))
    # The solver stops 1e-8 nats above the optimum, ½ dᵀ Λ d for the distance d, so J d is at most √(2e-8) deviations.
    assert_near(task.tangent_mean, expected, float(task.variance.max().sqrt()) * 2e-8**0.5)
    assert float((expected - model(task.x_test).detach()).abs().max()) > 0.05
    std = (task.variance + task.noise).sqrt()
    normal = torch.distributions.Normal(expected, std)
    nll = -float(normal.log_prob(task.y_test).mean())
    assert task.with_tangent_mean(task.exact)["NLL"] == pytest.approx(nll, rel=1e-3)


def test_the_picture_is_drawn_from_the_records(budget_records: list[Record], tmp_path: Path) -> None:
    more = [replace(r, group=r.group.replace("diabetes", "other")) for r in budget_records if "n =" not in r.group]
    unit = type("Unit", (), {"records": (*budget_records, *more)})
    BUDGET_TINY.picture(Stored("budget", "tiny", {}, 0, {"all": unit}), tmp_path / "budget.png")  # type: ignore[dict-item]
    drawn = torch.tensor(imread(tmp_path / "budget.png"))[..., :3]
    assert 0.02 < float((drawn < 0.98).any(-1).float().mean()) < 0.5


# Active learning in a tiny form that needs no data folder.

ACTIVE_TINY = Active(
    tables=("waves",), seeds=1, pool=40, rounds=1, chosen=3, recipe=TrainingSettings(hidden=(5,), epochs=3)
)


def test_every_rule_is_scored() -> None:
    scores = {record.method: record.scores for record in ACTIVE_TINY.measure("waves/0", silent)}
    assert tuple(scores) == tuple(RULES)
    assert all(each["mean RMSE"] == pytest.approx(each["RMSE"]) for each in scores.values())  # one round
    assert len({each["RMSE"] for each in scores.values()}) > 1  # rules choose different rows


# Classification on a folder of tables.


def test_every_row_is_scored_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    np.savez(tmp_path / "rare.npz", X=x, y=(x.sum(1) > 1.5).astype(int), kind="classification")
    monkeypatch.setattr(biased, "TRAININGS", dict.fromkeys(("usual", "balanced"), TrainingSettings((4,), epochs=1)))
    result = biased.run(biased.Biased(tmp_path))
    assert {row.group for row in result.rows} == {"usual", "balanced"}
    rows = [row.name for row in result.rows if row.group == "usual"]
    assert rows == [
        "plain", "default", "temperature, 50", "no offsets, 50", "validation, 50", "temperature, 200",
        "no offsets, 200", "validation, 200",
    ]  # fmt: skip
    assert all(0 < row.scores["NLL"] < 5 and 0 <= row.scores["bias"] <= 1 for row in result.rows)
    assert len(result.notes) == 14
    assert "balanced: validation, 200 against temperature, 200: NLL " in "".join(result.notes)


# Simulations of the guarantees, in a tiny form that needs no data folder.

DECISIONS_TINY = Decisions(
    sets=("waves", "waves, thin", "cancer"), seeds=1, draws=60, calibration=60, rows=120,
    recipe=TrainingSettings(hidden=(5,), epochs=4),
)  # fmt: skip


@pytest.mark.parametrize("name", ["waves", "cancer"])
def test_guarantees_hold_over_draws(name: str) -> None:
    """Sixty draws from one pool: coverage within four of its own standard errors, and 1/(n + 1) above at most."""
    scores = {record.method: record.scores for record in DECISIONS_TINY.measure(f"guarantees/{name}/0", silent)}
    sized = {method: each for method, each in scores.items() if "coverage" in each}
    assert sorted(sized) == (["constant", "scaled"] if name == "waves" else ["adaptive", "threshold"])
    for each in sized.values():
        assert -4 * each["error"] <= each["coverage"] - DECISIONS_TINY.level <= 4 * each["error"] + 1 / 61
    for method, each in scores.items():
        if method.startswith("ood"):
            assert each["false alarms"] <= DECISIONS_TINY.rate + 4 * each["error"]
    assert scores["abstain"]["violations"] <= 0.05 + 4 * (0.05 * 0.95 / DECISIONS_TINY.draws) ** 0.5


def test_a_thin_table_leaves_out_training_rows_only() -> None:
    whole, thin = (
        simulated(name, None, 200, TrainingSettings(hidden=(3,), epochs=1), 0) for name in ("waves", "waves, thin")
    )
    assert len(whole.x) == len(thin.x) == 400
    assert thin.posterior.base.statistics.data < 0.8 * whole.posterior.base.statistics.data
    assert torch.allclose(whole.x.std(0), thin.x.std(0))


def test_decisions_refusals(tmp_path: Path) -> None:
    with pytest.raises(LapwingError, match="draws 1"):
        replace(DECISIONS_TINY, draws=1)
    with pytest.raises(LapwingError, match="unknown kind 'wide'; expected thin or noise"):
        simulated("waves, wide", None, 50, DECISIONS_TINY.recipe, 0)
    with pytest.raises(LapwingError, match=r"uci_nothing\.npz is not in the data folder"):
        simulated("nothing", tmp_path, 50, DECISIONS_TINY.recipe, 0)


def test_the_kept_tables_of_crossfit_are_those_of_its_results(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    crossfit_table.main([str(root / "docs" / "results" / "crossfit_full.json")])
    assert capsys.readouterr().out == (root / "benchmarks" / "results" / "crossfit.txt").read_text(encoding="utf-8")
