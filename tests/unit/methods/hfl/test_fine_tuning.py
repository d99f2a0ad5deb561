"""Responses by Adam: how near they come to the full Hessian, and what they say when they do not."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.methods.hfl.hfl import ResponsePosterior
from lapwing.methods.hfl.response import Objective, Response
from tests.minima import fitted, new, off, shifted, small
from tests.references.minimum import Energy
from tests.tolerances import assert_close


def adam(energy: Energy, **settings: Any) -> ResponsePosterior:
    """All data in every batch, and enough steps for a loss that is not stiff."""
    settings = {"steps": 150, "learning_rate": 1e-2, **settings}
    posterior: ResponsePosterior = fitted(
        energy, lw.HFL(solver="adam", **settings), data=[(energy.x, energy.y)]
    ).posterior
    return posterior


@cache
def at_minimum() -> tuple[Energy, Tensor, Response]:
    """Responses at three inputs, from the minimum."""
    energy = small("bernoulli", 1)
    x = new(energy)
    return energy, x, adam(energy).respond(x)


@cache
def near_minimum() -> tuple[ResponsePosterior, Response]:
    """The same, with the weights 0.3 posterior standard deviations from the minimum."""
    energy, x, _ = at_minimum()
    posterior = adam(shifted(energy, 0.3))
    return posterior, posterior.respond(x)


@dataclass(frozen=True)
class Recorded:
    """Gives one response to all pushes, so that the checks of a posterior can be tested without fine-tuning."""

    objective: Objective
    tolerance: float
    response: Response

    def respond(self, *_: Any) -> Response:
        return self.response


def test_adam_agrees_with_the_full_hessian() -> None:
    """Enough steps, on all data at once, for a loss that is not too stiff."""
    energy, x, response = at_minimum()
    assert float((response.checked(0.05).cov[:, 0] / energy.each(x).flatten() - 1).abs().max()) < 0.01
    assert float((energy.each(x, energy.ggn()) / energy.each(x) - 1).abs().max()) > 0.1


def test_adam_across_inputs_and_outputs() -> None:
    energy = small("bernoulli", 2)
    x = new(energy, 2)
    posterior = adam(energy, tolerance=0.1)
    assert off(posterior(x, joint=True).cov.reshape(4, 4), energy.covariance(x)) < 0.03


def test_unfinished_fine_tuning_is_refused_and_can_be_looked_at() -> None:
    energy = small()
    x = new(energy)
    posterior = fitted(energy, lw.HFL(solver="adam", steps=25))
    message = r"HFL: 3 of 3 responses have not converged; .* after 25 steps; expected 0.05\."
    with pytest.raises(lw.errors.NumericalError, match=message) as error:
        posterior.functions(x)
    stated = re.search(r"off by about (\S+) of its value", str(error.value))
    response = posterior.posterior.respond(x)
    assert stated is not None
    assert float(stated.group(1)) == pytest.approx(float(response.missing.max()), rel=0.05)
    assert response.cov.shape == (3, 1)
    assert bool((response.missing > 0.05).all())
    assert response.steps == 25
    assert float((response.cov[:, 0] / energy.each(x).flatten() - 1).abs().max()) > 0.1


def test_what_fine_tuning_leaves_out_is_not_understated() -> None:
    """A stiff loss and too few steps: half the response is missing, and that is about what is said."""
    energy = small()
    x = new(energy, 2)
    response = adam(energy, steps=80).respond(x)
    error = (response.cov[:, 0] / energy.each(x).flatten() - 1).abs()
    assert float(error.max()) > 0.3
    assert bool((response.missing > 0.7 * error).all())


def test_both_solvers_see_the_same_bend() -> None:
    energy, x, chosen = at_minimum()
    lam = 0.3 / float(energy.each(x).max()) ** 0.5
    tuned = adam(energy, lam=lam).respond(x[:1])
    stepped = fitted(energy, lw.HFL(lam=lam)).posterior.respond(x[:1])
    assert float(tuned.bend) == pytest.approx(float(stepped.bend), rel=0.02)
    assert 1e-3 < float(tuned.bend) < 0.25
    assert float(chosen.bend.max()) < 0.03


def test_fine_tuning_out_of_the_basin() -> None:
    """Pushes by five standard deviations: the two sides move by different amounts."""
    energy, x, _ = at_minimum()
    posterior = adam(energy, steps=250, lam=5 / float(energy.each(x).max()) ** 0.5)
    response = posterior.respond(x)
    assert float(response.bend.min()) > 0.25
    assert float(response.drift.max()) < 1e-3  # the twin stays
    recorded = lambda tolerance: replace(
        posterior, responder=Recorded(posterior.responder.objective, tolerance, response)
    )
    message = r"3 of 3 responses have not converged.*leaves the basin.*smaller lam"
    with pytest.raises(lw.errors.NumericalError, match=message):
        recorded(0.05)(x)
    with pytest.raises(lw.errors.NumericalError, match=r"3 of 3 responses are not straight.*leaves the basin.*smaller"):
        recorded(0.9)(x)
    assert_close(recorded(math.inf)(x).cov[:, 0], response.cov)


def test_the_twin_stays_at_a_minimum_and_goes_to_one() -> None:
    """By the distance between the outputs at the minimum and at the weights, in their standard deviations."""
    energy, x, response = at_minimum()
    assert float(response.drift.max()) < 1e-3
    posterior, found = near_minimum()
    gap = (energy.model(x) - posterior.problem.network(x)).detach().abs().flatten()
    exact = gap / energy.each(x).flatten().sqrt()
    assert float((found.drift / exact - 1).abs().max()) < 0.01
    assert float(found.bend.max()) < 0.03  # a drift of all three is no bend
    assert 5e-3 < float(exact.min()) < 0.05 > float(exact.max()) > 0.04
    assert float((found.cov[:, 0] / energy.each(x).flatten() - 1).abs().max()) < 0.01  # the variance at the minimum


def test_the_drift_is_the_same_however_an_output_is_pushed() -> None:
    """With the other outputs, jointly, or as a function of the outputs."""
    energy, x, _ = at_minimum()
    posterior = adam(shifted(energy, 0.3), steps=10)
    drift = posterior.respond(x).drift
    assert float(drift.min()) > 1e-3
    assert_close(posterior.respond(x, joint=True).drift, drift, 1 / 3)
    assert_close(posterior.respond_to(lambda f: f[1, 0], x).drift, drift[1:2], 1 / 3)  # Adam enlarges rounding


def test_a_twin_that_drifts_is_refused() -> None:
    energy, x, _ = at_minimum()
    posterior, response = near_minimum()
    message = (
        r"the weights are 0\.048 posterior standard deviations from the minimum .*, measured by how far an unpushed "
        r"twin moves what is pushed; expected at most 0\.04\. .*prior as weight decay, allow it with "
        r"HFL\(drift=\.\.\.\), or use HFL"
    )
    recorded = lambda drift, tolerance: replace(
        posterior, drift=drift, responder=Recorded(posterior.responder.objective, tolerance, response)
    )
    with pytest.raises(lw.errors.NumericalError, match=message):
        recorded(0.04, 0.05)(x)
    with pytest.raises(lw.errors.NumericalError, match=message):
        recorded(0.04, 0.05).variance_of(lambda f: f[1, 0], x)
    for allowed in (recorded(0.05, 0.05), recorded(0.04, math.inf)):
        assert float((allowed(x).cov / energy.each(x) - 1).abs().max()) < 0.01


def test_as_many_outputs_as_weights_are_judged_as_outputs() -> None:
    """By all that is read off, against a run of half as many steps."""
    energy = small()
    x = new(energy, 25)
    whole, half = (adam(energy, steps=steps).respond(x, joint=True) for steps in (20, 10))
    assert whole.cov.shape == (25, len(energy.theta))
    gap = (whole.cov - half.cov).abs().amax(1) / whole.cov.abs().amax(1)
    assert_close(whole.missing, gap)


def test_seeds_fix_the_batches() -> None:
    energy = small()
    x = new(energy, 1)
    runs = []
    for seed in (1, 1, 2):
        gen = torch.Generator().manual_seed(seed)
        method = lw.HFL(solver="adam", steps=6, batch_size=7)
        runs.append(fitted(energy, method, generator=gen).posterior.respond(x).cov)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
