"""The default for Gaussian noise: half the plain network, and an exact posterior of bounded cost and agreed scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import api as fitting
from tests.tolerances import assert_close

D = torch.float64


def problem(norm: bool, rows: int = 60) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    x = torch.randn(rows, 3, dtype=D)
    y = x[:, :1].sin() + 0.3 * torch.randn(rows, 1, dtype=D)
    layers = [nn.Linear(3, 20), *([nn.BatchNorm1d(20)] if norm else []), nn.Tanh(), nn.Linear(20, 1)]
    net = nn.Sequential(*layers).double()
    net(x)  # statistics of the norm
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(200):
        optimiser.zero_grad()
        (net(x) - y).square().mean().backward()
        optimiser.step()
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
    monkeypatch.setattr(fitting, "ROWS", 40)
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
