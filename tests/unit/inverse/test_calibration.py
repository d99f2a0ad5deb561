"""The error bars of small signals are nearer to the errors with the evidence than with that of version 0.2.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lapwing as lw
from benchmarks.inverse_evidence import EVIDENCES, ONE, Signal, former_minus_exact, signal_scores, tuned
from tests.references import inverse as dense
from tests.tolerances import SOLVED, assert_close
from tests.unit.inverse.problems import NOISE, case, fitted


def test_the_former_evidence_is_the_one_of_the_formula() -> None:
    one = case()
    posterior = fitted()
    former = dense.former_evidence(one.y, one.f, one.theta, one.jacobian, one.sigma(), one.a, NOISE)
    assert_close(posterior.log_evidence() + former_minus_exact(posterior), former, SOLVED)


@pytest.mark.parametrize("prior", [lw.isotropic(10.0), lw.priors.filter_gp(blocks=ONE)])
def test_errors_of_signals_are_nearer_to_their_standard_deviations(prior: Any) -> None:
    """The former makes them half as large; signals of a network of the same kind, with the noise known."""
    rows: dict[str, list[dict[str, float]]] = {evidence: [] for evidence in EVIDENCES}
    for seed in range(3):
        start, truth = Signal(steps=150).fitted(seed, prior, 0.1)
        for evidence in EVIDENCES:
            rows[evidence].append(signal_scores(tuned(start, evidence), truth))
    z = {evidence: torch.tensor([row["RMS z"] for row in each]).log() for evidence, each in rows.items()}
    assert float(z["exact"].mean().abs()) < 0.4  # a factor of 1.5
    assert float(z["former"].mean()) < -0.6
    assert all(row["NLL"] < old["NLL"] for row, old in zip(rows["exact"], rows["former"], strict=True))
