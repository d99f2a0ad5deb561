"""A pass in runs of seeds gives the same curvature; for many outputs the default is an estimate that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature.sweep import DRAWS, MANY
from lapwing.networks.jacobians import Footprint
from lapwing.networks.tangent import Tangent
from tests import problems
from tests.cases import BY_NAME
from tests.references.layout import assembled
from tests.tolerances import assert_close

METHODS = {
    "kron": lw.Kron("ggn"), "reduce": lw.Kron("ggn", "reduce"), "no full blocks": lw.Kron("ggn", full_limit=0),
    "diagonal": lw.Diagonal("ggn"), "ekron": lw.EKron("ggn"), "full": lw.Full("ggn"),
}  # fmt: skip


def matrix(posterior: lw.Fitted) -> Tensor:
    curvature = posterior.posterior.curvature
    return curvature.matrix if hasattr(curvature, "matrix") else assembled(curvature)


@pytest.mark.parametrize("name", ["cnn", "token_level", "embedding"])
@pytest.mark.parametrize("method", METHODS)
def test_runs_of_seeds(monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    """With room for two seeds, whatever the chunk: no pass takes more, and the sums are the same."""
    case = BY_NAME[name]
    data, options = problems.batches(case), {"method": METHODS[method], "prior": 1.0}
    whole = lw.fit(case.build(), data, problems.likelihood(case), **options)
    taken = []
    jacobians = Tangent.jacobians

    def watched(self: Tangent, seeds: Tensor | None = None) -> Any:
        taken.append(len(seeds) if seeds is not None else 0)
        return jacobians(self, seeds)

    monkeypatch.setattr(Footprint, "at_once", lambda *_: 2)
    monkeypatch.setattr(Tangent, "jacobians", watched)
    parts = lw.fit(case.build(), data, problems.likelihood(case), **options)
    assert max(taken) <= 2
    assert_close(matrix(parts), matrix(whole), power=0.5 if method == "ekron" else 2 / 3)
    assert parts.posterior.statistics.data == whole.posterior.statistics.data


def test_the_seeds_of_one_sample_fit_the_budget() -> None:
    """One that is too large for all seeds takes some of them, and at least one."""
    footprint, cpu = Footprint(width=2**20, patches=0), torch.device("cpu")
    few = footprint.at_once(1, torch.float32, cpu)
    assert 1 < few < 1000
    assert footprint.at_once(2, torch.float32, cpu) == few // 2
    assert footprint.at_once(1, torch.float64, cpu, width=2 * 2**20) == few // 4
    assert footprint.at_once(10_000, torch.float32, cpu) == 1


def wide(classes: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    x = torch.randn(30, 3, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, classes)).double().eval()
    return model, [(x, torch.arange(30) % classes)]


@pytest.mark.parametrize("make", [lw.Kron, lw.Diagonal, lw.EKron])
def test_many_outputs_are_estimated_by_default(make: Any) -> None:
    few, many = wide(MANY), wide(MANY + 1)
    fit = lambda problem, method, **options: lw.fit(*problem, "classification", method=method, prior=1.0, **options)
    assert fit(few, make()).findings == ()
    assert_close(matrix(fit(few, make())), matrix(fit(few, make("ggn"))))
    default = fit(many, make())
    assert f"{DRAWS} labels drawn for each datum, relative error about" in default.findings[0]
    assert "Note: the curvature is estimated" in default.summary()
    assert_close(matrix(default), matrix(fit(many, make("fisher_mc"))))  # the same seed, the same labels
    assert fit(many, make("ggn")).findings == ()
    assert "from 9 labels" in fit(many, make(draws=9)).findings[0]
    assert "from one label" in fit(many, make(draws=1)).findings[0]
    assert fit(many, make(), weights="last_layer").findings == ()  # a closed form
    assert fit(many, make("fisher_mc"), weights="last_layer").findings == ()


def test_the_full_matrix_is_exact_by_default_and_says_if_not() -> None:
    fit = lambda method, **options: lw.fit(*wide(MANY + 1), "classification", method=method, prior=1.0, **options)
    assert fit(lw.Full()).findings == ()
    assert "from 4 labels drawn for each datum;" in fit(lw.Full("fisher_mc")).findings[0]
    assert "from 2 labels" in fit(lw.Full("fisher_mc", draws=2), weights="last_layer").findings[0]


def test_a_noise_for_each_output_stays_exact() -> None:
    """It takes a pass for each output with one seed, which no number of draws would be cheaper than."""
    model, ((x, _),) = wide(MANY + 1)
    likelihood = lw.Gaussian(per_output=True)
    posterior = lw.fit(model, [(x, torch.randn(30, MANY + 1).double())], likelihood, method=lw.Diagonal(), prior=1.0)
    assert posterior.findings == ()


def test_the_remark_stays_with_tuning_and_files(tmp_path: Path) -> None:
    model, data = wide(MANY + 1)
    tuned = lw.fit(model, data, "classification", method=lw.Diagonal(), tuner=lw.tuners.MaximiseEvidence())
    tuned.save(tmp_path / "posterior")
    again = lw.load(tmp_path / "posterior", model)
    retuned = lw.fit(model, data, "classification", method=lw.Diagonal(), prior=1.0).tuned(lw.tuners.Grid())
    for posterior in (tuned, again, retuned, tuned.with_prior(2.0), tuned.to("cpu")):
        assert sum("labels drawn for each datum" in finding for finding in posterior.findings) == 1


def test_statistics_come_from_the_same_pass() -> None:
    model, data = wide(7)
    one = lw.fit(model, data, "classification", prior=1.0).posterior.statistics
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(data[0][0]), data[0][1], reduction="sum")
    assert one.loss == pytest.approx(float(loss), rel=1e-10)
