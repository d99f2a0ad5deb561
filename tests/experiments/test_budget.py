"""Inducing points on tables: costs and errors, on the table of scikit-learn with tiny networks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

import lapwing as lw
from experiments.budget import Budget
from experiments.budget_task import Task, read
from experiments.engine.contract import Record
from experiments.engine.store import Stored
from experiments.options import silent
from lapwing.demo.training import TrainingSettings
from lapwing.errors import DataError
from tests.references import dense
from tests.tolerances import assert_near

TINY = Budget(
    tables=("diabetes",), rows=60, sizes=(4, 9), steps=3, snapshots=(3,), epochs=(2,), growing="diabetes", growth=(40,),
    growth_sizes=(5, 40), close=1e-6, recipe=TrainingSettings(hidden=(4,), epochs=5, batch_size=20), seeds=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def task() -> Task:
    return Task.of(read("diabetes", Path("nowhere"), 0), 60, TINY.recipe, 0)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lw.baselines, "SWAG", partial(lw.baselines.SWAG, batch_size=20))  # 60 rows are few
        return [record for unit in TINY.units() for record in TINY.measure(unit, silent)]


def test_every_method_has_a_record(records: list[Record]) -> None:
    names = [record.method for record in records if record.group == "diabetes"]
    sized = [f"{name}({size}){end}" for size in (4, 9) for name, end in (
        ("VaLLA", ""), ("VaLLA", ", fixed points"), ("ELLA", ""), ("ELLA", ", residual"))]  # fmt: skip
    assert names == [
        "plain", "exact", *sized, "SWAG(3)", "dropout(2)", "exact, tangent mean", "VaLLA(9), tangent mean",
        "exact, tangent mean, tuned",
    ]  # fmt: skip
    scores = {record.method: record.scores for record in records if record.group == "diabetes"}
    assert scores["exact"]["KL"] == 0
    assert scores["VaLLA(9), fixed points"]["KL"] < scores["VaLLA(4), fixed points"]["KL"]
    assert scores["exact"]["RMSE"] == pytest.approx(scores["plain"]["RMSE"])
    assert scores["exact, tangent mean"]["RMSE"] != pytest.approx(scores["plain"]["RMSE"], rel=1e-3)


def test_a_point_at_every_row_is_enough(records: list[Record]) -> None:
    grown = [record for record in records if record.group == "diabetes, n = 40"]
    assert [record.method for record in grown] == ["exact", "VaLLA(5)", "VaLLA(40)", "points needed"]
    assert grown[-1].scores["M"] == 40
    assert grown[-1].scores["γ"] == grown[0].scores["γ"] > 1
    assert grown[2].scores["KL"] < 1e-10 < grown[1].scores["KL"]


def test_if_no_number_of_points_is_enough_none_is_recorded() -> None:
    records = list(replace(TINY, growth_sizes=(2,)).measure("growth/40/0", silent))
    assert [record.method for record in records] == ["exact", "VaLLA(2)"]


def test_the_tangent_mean_is_that_of_ridge_regression(task: Task) -> None:
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


def test_the_divergence_is_a_mean_over_test_rows(task: Task) -> None:
    fitted, seconds = task.fit(lw.Diagonal(), 0)
    normals = [
        torch.distributions.Normal(0.0, v.sqrt()) for v in (task.variance, fitted.functions(task.x_test).variance)
    ]
    expected = float(torch.distributions.kl_divergence(*normals).mean())
    assert task.compared(fitted)["KL"] == pytest.approx(expected, rel=1e-6)
    assert seconds > 0


def test_the_picture_is_drawn_from_the_records(records: list[Record], tmp_path: Path) -> None:
    more = [replace(r, group=r.group.replace("diabetes", "other")) for r in records if "n =" not in r.group]
    unit = type("Unit", (), {"records": (*records, *more)})
    TINY.picture(Stored("budget", "tiny", {}, 0, {"all": unit}), tmp_path / "budget.png")  # type: ignore[dict-item]
    drawn = torch.tensor(imread(tmp_path / "budget.png"))[..., :3]
    assert 0.02 < float((drawn < 0.98).any(-1).float().mean()) < 0.5


def test_a_folder_without_the_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"uci_boston\.npz is not in the data folder"):
        read("boston", tmp_path, 0)
