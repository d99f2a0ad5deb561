"""Curvatures and precisions are values: a changed copy never answers with what was computed for the original."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME
from tests.tolerances import assert_close

D = torch.float64
CASE = BY_NAME["mlp"]
PHI = torch.tensor(0.5, dtype=D)


def fitted(method: Any) -> lw.Fitted:
    return lw.fit(CASE.build(), problems.batches(CASE), "classification", method=method, prior=lw.priors.g_prior(0.6))


def test_a_changed_matrix_has_another_log_determinant() -> None:
    posterior = fitted(lw.Full())
    curvature, prior = posterior.posterior.curvature, posterior.prior
    curvature.logdet(PHI, prior)
    changed = replace(curvature, matrix=10 * curvature.matrix)
    assert_close(changed.logdet(PHI, prior), changed.precision(PHI, prior).logdet())


def test_changed_kronecker_factors_have_another_precision() -> None:
    posterior = fitted(lw.Kron())
    curvature, prior = posterior.posterior.curvature, posterior.prior
    curvature.logdet(PHI, prior)
    blocks = tuple(replace(block, out=replace(block.out, matrix=10 * block.out.matrix)) for block in curvature.blocks)
    changed, rescaled = replace(curvature, blocks=blocks), PHI / 10
    # Ten times the curvature is a tenth of the dispersion.
    assert_close(changed.logdet(PHI, prior), curvature.logdet(rescaled, prior))
    assert_close(changed.precision(PHI, prior).variances(), curvature.precision(rescaled, prior).variances())


def test_a_changed_factor_has_other_output_covariances() -> None:
    model, x = torch.nn.Linear(4, 3).double(), torch.randn(6, 4, dtype=D)
    posterior = lw.fit(model, [(x, torch.arange(6) % 3)], "classification", method=lw.Full(), prior=1.0)
    jacobian, precision = posterior.network.linearise(x).jacobians(), posterior.posterior.precision
    before = precision.quadratic(jacobian)
    assert_close(replace(precision, factor=2 * precision.factor).quadratic(jacobian), before / 4)


@pytest.mark.parametrize("method", [lw.Full(), lw.Kron()])
def test_decompositions_are_computed_once_for_all_g(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = fitted(method)
    curvature, prior = posterior.posterior.curvature, posterior.prior
    curvature.logdet(PHI, prior)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a decomposition was computed again")

    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    monkeypatch.setattr(torch.linalg, "eigvalsh", refuse)
    for g in (0.1, 3.0):
        curvature.logdet(2 * PHI, prior.with_precision(torch.tensor(g, dtype=D)))
