"""The steps of a fit; the default for Gaussian noise: plain network, Kron and the exact posterior averaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import api
from lapwing.data.processes import ALONE
from tests import problems
from tests.tolerances import assert_close

D = torch.float64


def problem(norm: bool, rows: int = 60) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    x = torch.randn(rows, 3, dtype=D)
    y = x[:, :1].sin() + 0.3 * torch.randn(rows, 1, dtype=D)
    layers = [nn.Linear(3, 20), *([nn.BatchNorm1d(20)] if norm else []), nn.Tanh(), nn.Linear(20, 1)]
    net = nn.Sequential(*layers).double()
    net(x)  # statistics of the norm
    problems.descend(net, lambda net: (net(x) - y).square().mean(), 200, 0.02)
    return net.eval(), (x, y)


def _gradient(net: nn.Module, row: Tensor) -> Tensor:
    grads = torch.autograd.grad(net(row.unsqueeze(0)).sum(), list(net.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def test_norms_bring_the_exact_posterior_half_of_the_way_to_kron() -> None:
    net, (x, y) = problem(norm=True)
    mixture = lw.fit(net, [(x[:25], y[:25]), (x[25:], y[25:])], "regression").posterior
    kron, exact = mixture.bases[:2]
    jacobian = torch.stack([_gradient(net, row) for row in x])
    kernel, noise = jacobian @ jacobian.mT / float(exact.problem.prior.values), float(exact.noise)
    left_out = torch.empty(60, dtype=D)
    for i in range(60):  # the exact variance at a row without that row
        rest = torch.arange(60) != i
        inner = kernel[rest][:, rest] + noise * torch.eye(59, dtype=D)
        left_out[i] = kernel[i, i] - kernel[i, rest] @ torch.linalg.solve(inner, kernel[rest, i])
    expected = (kron(x).variance.median() / left_out.median()).sqrt()
    assert 0 < float(expected) < 1
    assert mixture.cells[1].scale == pytest.approx(float(expected), rel=1e-6)


def test_without_norms_the_exact_posterior_keeps_its_covariance() -> None:
    net, data = problem(norm=False)
    posterior = lw.fit(net, data, "regression").posterior
    assert [cell.scale for cell in posterior.cells] == [1.0, 1.0, 0.0]
    assert posterior.weights.tolist() == [0.25, 0.25, 0.5]


def test_the_exact_posterior_takes_some_of_many_data(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (x, y) = problem(norm=False, rows=200)
    monkeypatch.setattr(api, "EXACT_ROWS", 40)
    exact = lw.fit(net, (x, y), "regression").posterior.bases[1]
    rank = len(exact.curvature.values)
    assert 20 < rank < 60  # 40 data are expected, with a standard deviation of 5.7
    assert exact.statistics.data == pytest.approx(200)  # which count for all
    again = lw.fit(net, (x, y), "regression").posterior.bases[1]
    assert_close(again(x).variance, exact(x).variance)


def test_few_data_are_all_taken() -> None:
    net, data = problem(norm=False)
    exact = lw.fit(net, data, "regression").posterior.bases[1]
    whole = lw.fit(net, data, "regression", method=lw.KernelSpace(), tuner=lw.tuners.MaximiseEvidence())
    assert_close(exact(data[0]).variance, whole.functions(data[0]).variance, power=0.4)


def test_a_file_keeps_the_scale(tmp_path: Path) -> None:
    net, data = problem(norm=True)
    posterior = lw.fit(net, data, "regression")
    posterior.save(tmp_path / "net.lapwing")
    again = lw.load(tmp_path / "net.lapwing", net)
    low, high = again.predict(data[0]).interval(0.95)
    same: Any = posterior.predict(data[0]).interval(0.95)
    assert_close(low, same[0])
    assert_close(high, same[1])


def test_the_summary_says_that_the_width_was_not_checked() -> None:
    net, data = problem(norm=True)
    assert "no held-out data checked the width" in lw.fit(net, data, "regression").summary()
    held_out = lw.fit(net, data, "regression", validation=(data[0] + 0.01, data[1])).summary()
    assert "no held-out data" not in held_out


def run_until(last: str, net: nn.Module, data: Any, **options: Any) -> api.FitInProgress:
    """Return a fit after the step of this name."""
    given: dict[str, Any] = {
        "likelihood": "regression", "processes": ALONE, "generator": None, "method": lw.Kron(), "weights": None,
        "prior": None, "validation": None, "tuner": None, "target_key": None, "output": None, "progress": False,
        "is_default": True,
    }  # fmt: skip
    run = api.FitInProgress(net, data, **{**given, **options})
    for step in api.STEPS:
        step(run)
        if step.__name__ == last:
            return run
    raise AssertionError(last)


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return problem(norm=False)


def test_all_steps_make_the_posterior_of_fit(small: Any) -> None:
    net, (x, y) = small
    run = run_until("note_findings", net, (x, y))
    assert_close(run.posterior(x).variance, lw.fit(net, (x, y), "regression").posterior(x).variance)


def test_data_are_read_in_the_dtype_of_the_model_and_named(small: Any) -> None:
    net, (x, y) = small
    run = run_until("open_data", net, (x.float().numpy(), y.numpy()), validation=(x.float().numpy(), y.numpy()))
    assert run.held_out is not None
    assert (run.data.name, run.held_out.name) == ("data", "validation")
    assert {batch.inputs.dtype for data in (run.data, run.held_out) for batch in data.batches("")} == {D}


def test_the_problem_is_about_the_weights_that_a_method_selects(small: Any) -> None:
    net, data = small
    run = run_until("build_problem", net, data, method=lw.baselines.VariationalLastLayer())
    assert run.problem.network.selection.names == ("2.weight", "2.bias")
    assert run.problem.learn_prior


def test_auto_chooses_a_method_with_a_reason(small: Any) -> None:
    net, data = small
    run = run_until("choose_method", net, data, method=lw.Auto())
    assert isinstance(run.chosen, lw.Full)
    assert run.why.startswith("Full: 101 weights")
    assert run_until("choose_method", net, data).why == ""


def test_validation_data_are_checked_before_the_pass(small: Any) -> None:
    net, (x, y) = small
    with pytest.raises(lw.errors.DataError, match="validation"):
        run_until("check_validation", net, (x, y), validation=(x, y[:, :0]))


def test_a_prior_that_a_method_needs_is_learned_beforehand_and_the_tuner_used_up(small: Any) -> None:
    net, data = small
    method, tuner = lw.baselines.VariationalLastLayer(), lw.tuners.MaximiseEvidence()
    run = run_until("learn_needed_prior", net, data, method=method, tuner=tuner)
    assert run.late_tuner is None
    assert not run.problem.learn_prior
    assert float(run.problem.prior.values) != 1.0
    run = run_until("learn_needed_prior", net, data, tuner=tuner)
    assert run.late_tuner is tuner
    assert run.problem.learn_prior


def test_the_pass_keeps_the_first_outputs_of_classes_without_validation_data(small: Any) -> None:
    net, (x, y) = small
    labels = (y > 0).long()[:, 0]
    run = run_until("compute_posterior", net, (x, labels), likelihood="classification", prior=2.0)
    assert run.first is not None
    assert run.first.begun
    kept = run.first.value()
    assert_close(kept.f, net(x).detach())
    assert torch.equal(kept.y[:, 0], labels.double())
    run = run_until("compute_posterior", net, (x, labels), likelihood="classification", validation=(x, labels))
    assert run.first is None


def test_the_precision_is_learned_only_without_a_prior(small: Any) -> None:
    net, data = small
    assert float(run_until("tune", net, data, prior=2.0).posterior.problem.prior.values) == 2.0
    learned = run_until("tune", net, data).posterior
    assert float(learned.problem.prior.values) != 1.0
    assert learned.trace.tuner == "MaximiseEvidence"


def test_training_rows_as_validation_data_are_refused(small: Any) -> None:
    net, data = small
    with pytest.raises(lw.errors.DataError, match="training data"):
        run_until("look_for_reused_rows", net, data, validation=data)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "Budget"),
        ({"tuner": lw.tuners.MaximiseEvidence()}, "MaximiseEvidence"),
        ({"prior": 2.0}, None),
        ({"validation": True}, "Integrate"),
    ],
)
def test_what_averages(small: Any, options: dict[str, Any], name: str | None) -> None:
    net, (x, y) = small
    if "validation" in options:
        options = {"validation": (x[40:], y[40:])}
    trace = run_until("average", net, (x[:40], y[:40]), **options).posterior.trace
    assert (trace and trace.tuner) == name


def test_findings_are_noted_last(small: Any) -> None:
    net, (x, y) = small
    loader = [(x[:30], y[:30]), (x[30:], y[30:])]

    class Changing:
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return iter(loader if self.passes < 3 else loader[:1])

    run = run_until("note_findings", net, Changing(), tuner=lw.tuners.MaximiseEvidence())
    assert any("a later pass over the data gave 30 rows" in finding for finding in run.posterior.trace.findings)
