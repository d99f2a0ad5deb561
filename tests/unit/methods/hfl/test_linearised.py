"""The tangent model's response: one linear system, solved to a tolerance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME
from tests.minima import copied, fitted, gapped, new, off, small
from tests.tolerances import assert_close

D = torch.float64


def test_solutions_and_their_residuals() -> None:
    energy = small("gaussian", 2)
    posterior = fitted(energy, lw.HFL(mode="linearised")).posterior
    rows = torch.randn(3, len(energy.theta), dtype=D)
    found = posterior.solved(rows)
    assert off(found.x, torch.linalg.solve(energy.ggn(), rows.T).T) < 1e-8
    assert found.converged
    assert float(found.residuals.max()) <= posterior.tolerance == 1e-10


def test_it_takes_fewer_iterations_than_there_are_weights() -> None:
    """In units of the prior only the directions that the data see need work."""
    energy = gapped()
    posterior = fitted(energy, lw.HFL(mode="linearised")).posterior
    found = posterior.solved(energy.jacobian(new(energy, 5)))
    assert found.iterations < 40 < len(energy.theta)


def test_rows_are_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    energy = small("gaussian", 2)
    x = new(energy, 5)
    found = fitted(energy, lw.HFL(mode="linearised"))
    whole, joint = found.functions(x).cov, found.functions(x, joint=True).cov
    monkeypatch.setattr("lapwing.methods.hfl.linearised.ROWS", 2)
    assert off(found.functions(x).cov, whole) < 1e-8
    assert off(found.functions(x, joint=True).cov, joint) < 1e-8


def test_a_loose_tolerance_costs_its_square() -> None:
    """Off by less than a hundredth at a tolerance of a tenth."""
    energy = small()
    x = new(energy, 1)
    exact = energy.each(x, energy.ggn())
    loose, tight = (
        off(fitted(energy, lw.HFL(mode="linearised", tolerance=t)).functions(x).cov, exact) for t in (0.1, 1e-10)
    )
    assert tight < 1e-9
    assert 1e-7 < loose < 1e-2


def test_single_precision_has_a_tolerance_that_it_can_reach() -> None:
    """Noise of 0.05 with forty data, and products rounded to seven digits."""
    energy = gapped()
    model = copied(energy).model.float()
    x = new(energy, 5)
    found = lw.fit(model, [(energy.x.float(), energy.y.float())], lw.Gaussian(noise_std=0.05),
                   method=lw.HFL(mode="linearised"), prior=1.0)  # fmt: skip
    exact = energy.each(x, copied(energy, phi=0.0025).ggn())
    assert off(found.functions(x.float()).cov, exact) < 1e-3


def test_iterations_that_run_out_are_an_error() -> None:
    posterior = fitted(gapped(), lw.HFL(mode="linearised")).posterior
    with pytest.raises(lw.errors.NumericalError, match=r"stopped after 2 iterations with a relative residual of"):
        replace(posterior, max_iterations=2)(new(gapped()))


def test_data_that_are_not_kept_are_passed_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["token_level"]
    data, inputs = problems.batches(case), case.batch(2, seed=1)
    full = lw.fit(case.build(), data, "classification", method=lw.Full(), prior=0.7).functions(inputs).cov
    monkeypatch.setattr("lapwing.tangent.design.CACHE", 0)
    found = lw.fit(case.build(), data, "classification", method=lw.HFL(mode="linearised"), prior=0.7)
    assert found.posterior.design.streamed
    assert_close(found.functions(inputs).cov, full, 1 / 2)
