"""The evidence of ``Sampled``: its error, its gradient, its optimum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.linalg.ridge import Ridge
from tests.tolerances import assert_close, student
from tests.unit.methods.sampled_problems import (
    KINDS,
    PRIORS,
    D,
    on_larger,
    problem,
)


@pytest.mark.parametrize(
    ("prior", "after"), [("isotropic", False), ("isotropic", True), ("g", False), ("per_layer", False)]
)
def test_the_stated_error_of_the_evidence_is_honest(prior: str, after: bool) -> None:
    """Student's interval of 95 % contains the evidence of Full for nine seeds of ten, up to three standard errors.

    Before there are samples and after, when the basis has grown. An estimate it is: with four probes no seed hits
    the truth. And the error is not overstated.
    """
    given: Any = {"isotropic": 0.5, "g": lw.priors.g_prior(0.01), "per_layer": lw.per_layer(torch.tensor([0.5, 2.0]))}[
        prior
    ]
    method = lw.Sampled(num_samples=2, width=2, probes=4, steps=10, tolerance=0.1)
    truth = float(on_larger(lw.Full(), given).log_evidence())
    start = on_larger(method, given).posterior
    design, scale = start.solver.ridge.design, start.solver.ridge.scale
    gaps, errors = [], []
    seeds = 16
    for seed in range(seeds):
        drawn = Ridge.drawn(design, 2, torch.Generator().manual_seed(seed), scale, width=2)
        posterior = replace(start, solver=replace(start.solver, ridge=drawn))
        if after:
            _ = posterior.samples
        gaps.append(float(posterior.log_evidence()) - truth)
        errors.append(posterior.evidence_error)
    gap, error = torch.tensor(gaps), torch.tensor(errors)
    inside = int((gap.abs() <= student(0.95, 3) * error).sum())
    assert inside >= 0.9 * seeds - 3 * math.sqrt(seeds * 0.9 * 0.1)
    assert float(gap.abs().min()) > 0
    assert float(gap.std()) > 1e-3
    assert float(error.mean()) <= 3 * float(gap.square().mean().sqrt())


def test_the_front_door_tells_the_error() -> None:
    posterior = on_larger(lw.Sampled(num_samples=2, width=2, probes=4, steps=5))
    assert posterior.evidence_error == posterior.posterior.evidence_error > 0
    assert on_larger(lw.Full()).evidence_error == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prior", PRIORS)
def test_the_evidence_is_that_of_full_where_the_basis_has_seen_it_all(kind: str, prior: str) -> None:
    p = problem(kind)
    posterior = p.fit(lw.Sampled(num_samples=8, tolerance=1e-10, steps=40), prior)
    _ = posterior.posterior.samples
    exact = p.exact.evidence(p.precision(prior), p.phi)
    assert_close(posterior.log_evidence(), exact, 0.4)
    assert posterior.evidence_error <= 1e-6 * abs(float(exact))


def test_a_prior_mean_enters_the_evidence_alone() -> None:
    p = problem()
    options = {"method": lw.Sampled(num_samples=8, steps=40), "prior": lw.isotropic(0.7, mean=0.4)}
    posterior = lw.fit(p.case.build(), p.data, lw.Gaussian(noise_std=0.7), **options)
    assert_close(posterior.log_evidence(), p.exact.evidence(p.precision("isotropic"), p.phi, 0.4), 0.4)
    assert torch.equal(posterior.posterior.samples, p.fit(options["method"]).posterior.samples)


def slope(of: Callable[[float], float], step: float = 1e-4) -> float:
    return (of(-2 * step) - 8 * of(-step) + 8 * of(step) - of(2 * step)) / (12 * step)


@pytest.mark.parametrize("prior", ["isotropic", "g"])
def test_the_gradient_of_the_evidence_equals_finite_differences(prior: str) -> None:
    """Of the estimate itself, in the precision and in the noise."""
    make = lw.priors.g_prior if prior == "g" else lw.isotropic
    start = on_larger(lw.Sampled(num_samples=2, width=2, probes=3, steps=6), make(0.5), std=None).posterior

    def at(precision: Tensor, phi: Tensor) -> Tensor:
        changed = start.problem.with_prior(start.problem.prior.with_precision(precision.exp()))
        return start.with_problem(changed).with_noise(phi.exp()).log_evidence()

    a, b = torch.tensor(-0.7, dtype=D).requires_grad_(), torch.tensor(-1.5, dtype=D).requires_grad_()
    at(a, b).backward()
    with torch.no_grad():
        assert float(a.grad) == pytest.approx(slope(lambda t: float(at(a + t, b))), rel=1e-7)
        assert float(b.grad) == pytest.approx(slope(lambda t: float(at(a, b + t))), rel=1e-7)


def test_the_evidence_has_no_slope_in_groups() -> None:
    """Its value it has; a tuner that would need the slope is refused and not led astray."""
    posterior = on_larger(lw.Sampled(num_samples=2), lw.per_layer(1.0))
    assert float(posterior.log_evidence()) < 0
    with pytest.raises(lw.errors.UnsupportedError, match=r"no gradient in the precisions of PerLayer.*SampleEM\(\)"):
        posterior.tuned()
    given = lw.per_layer(torch.ones(2, dtype=D, requires_grad=True))
    with torch.no_grad():
        assert float(posterior.with_prior(given).log_evidence()) == pytest.approx(
            float(posterior.log_evidence()), rel=1e-12
        )


@pytest.mark.parametrize("noise", [False, True], ids=["noise kept", "noise learned"])
@pytest.mark.parametrize("prior", ["isotropic", "g"])
def test_maximise_evidence_lands_near_full(prior: str, noise: bool) -> None:
    """With a basis that does not see it all."""
    make = {"isotropic": lambda: None, "g": lambda: lw.priors.g_prior(0.1)}[prior]
    tuner = lw.tuners.MaximiseEvidence(noise=noise)
    posterior, full = (
        on_larger(method, make(), std=None, tuner=tuner) for method in (lw.Sampled(width=4, probes=32), lw.Full())
    )
    assert float(posterior.prior.values) == pytest.approx(float(full.prior.values), rel=0.1)
    assert float(posterior.likelihood.dispersion) == pytest.approx(float(full.likelihood.dispersion), rel=0.05)
    assert float(posterior.log_evidence()) == pytest.approx(
        float(full.log_evidence()), abs=3 * posterior.evidence_error
    )
    assert posterior.evidence_error > 1e-3
    assert posterior.trace.tuner == "MaximiseEvidence"
    assert posterior.posterior.samples.shape == (16, 56)


def test_the_evidence_of_groups_is_as_sharp_as_that_of_one_number() -> None:
    """The same prior in other words: the basis is grown for it too, and remembered."""
    method = lw.Sampled(num_samples=4, width=8)
    one, other = (on_larger(method, given) for given in (1.0, lw.per_layer(torch.ones(2))))
    assert float(other.log_evidence()) == pytest.approx(float(one.log_evidence()), abs=1e-6)
    assert other.evidence_error == pytest.approx(one.evidence_error, abs=1e-6)
    ridge = other.posterior.solver.ridge.rescaled(other.prior.vector.detach())
    products = ridge.basis.products
    other.log_evidence()
    assert other.posterior.solver.ridge.rescaled(other.prior.vector.detach()) is ridge
    assert ridge.basis.products == products
