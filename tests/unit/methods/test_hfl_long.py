"""Hessian-free Laplace of networks that are not linear, fine-tuned or pre-trained."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.hfl import ResponsePosterior
from lapwing.methods.hfl_response import FineTuner, Objective, Response
from tests import problems
from tests.cases import BY_NAME
from tests.minima import at_its_targets, copied, data, fitted, gapped, new, off, pretrained, shifted, small
from tests.references import dense
from tests.references.minimum import Energy
from tests.tolerances import SOLVED, assert_close

# The mode "nonlinear": Laplace with the full Hessian, against dense matrices.

D = torch.float64


KINDS = [("gaussian", 3), ("categorical", 3), ("bernoulli", 2), ("poisson", 1)]
NETWORKS = ["cnn", "lstm", "token_level", "tuple_input", "frozen_weight", "free_parameter"]


@cache
def gapped_posterior() -> ResponsePosterior:
    posterior: ResponsePosterior = fitted(gapped(), lw.HFL()).posterior
    return posterior


def at_strength(posterior: ResponsePosterior, lam: float, tolerance: float = 1e-6) -> ResponsePosterior:
    """The posterior as HFL(lam=lam, tolerance=tolerance) would fit it, around the same minimum."""
    return replace(posterior, strength=lam, responder=replace(posterior.responder, tolerance=tolerance))


def test_the_response_has_the_variance_of_the_full_hessian() -> None:
    """To 1e-6 at every input, in the data, in the gap between them and outside; and the GGN has another."""
    energy = gapped()
    x = torch.linspace(-2.5, 2.5, 11, dtype=D).unsqueeze(1)
    found = gapped_posterior()(x)
    exact, ggn = energy.each(x), energy.each(x, energy.ggn())
    assert float((found.cov / exact - 1).abs().max()) < 1e-6
    assert float((ggn / exact - 1).abs().min()) > 1e-3
    assert float((ggn / exact - 1).abs().max()) > 0.1
    assert torch.equal(found.mean, energy.model(x).detach())


@pytest.mark.parametrize("place", [0.0, 0.4, -2.5])
def test_the_error_of_a_strength_falls_with_its_square(place: float) -> None:
    energy = gapped()
    x = torch.tensor([[place]], dtype=D)
    exact = energy.each(x)
    strengths = torch.logspace(-2.6, -1.6, 5, dtype=D) / float(exact.sqrt())
    errors = []
    for lam in strengths.tolist():
        found = at_strength(gapped_posterior(), lam, 1e-8)(x)
        errors.append(float((found.cov / exact - 1).abs()))
    assert min(errors) > 1e-8  # above rounding
    centred = strengths.log() - strengths.log().mean()
    slope = float((centred * torch.tensor(errors, dtype=D).log()).sum() / centred.square().sum())
    assert 1.8 < slope < 2.2


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
def test_covariances_of_all_outputs_within_and_across_inputs(kind: str, outputs: int) -> None:
    energy = small(kind, outputs)
    x = new(energy)
    posterior = fitted(energy, lw.HFL())
    belief, joint = posterior.functions(x), posterior.functions(x, joint=True)
    size = 3 * outputs
    assert off(belief.cov, energy.each(x)) < 1e-6
    assert off(joint.cov.reshape(size, size), energy.covariance(x)) < 1e-6
    assert off(energy.each(x, energy.ggn()), energy.each(x)) > 0.01
    assert torch.equal(belief.cov, belief.cov.mT)
    assert torch.equal(joint.cov, joint.cov.permute(2, 3, 0, 1))


PRIORS: dict[str, tuple[Any, Any, float]] = {
    "per layer": (lw.per_layer({"0": 0.3, "2": 2.0}), torch.tensor([0.3] * 18 + [2.0] * 7, dtype=D), 0.0),
    "each weight": (lw.priors.diagonal(torch.linspace(0.2, 2, 25)), torch.linspace(0.2, 2, 25).double(), 0.0),
    "mean": (lw.isotropic(0.7, 0.2), 0.7, 0.2),
}


@pytest.mark.parametrize("name", PRIORS)
def test_priors(name: str) -> None:
    prior, precision, mean = PRIORS[name]
    energy = copied(small(), precision=precision, mean=mean).minimise(30)
    x = new(energy)
    assert off(fitted(energy, lw.HFL(), prior=prior).functions(x).cov, energy.each(x)) < 1e-6
    linear = fitted(energy, lw.HFL(mode="linearised"), prior=prior).functions(x).cov
    assert off(linear, energy.each(x, energy.ggn())) < 1e-8


@pytest.mark.parametrize(
    ("weights", "index"),
    [
        (lw.subnetwork(torch.tensor([1, 5, 13, 20, 24])), torch.tensor([1, 5, 13, 20, 24])),
        (lw.last_layer, torch.arange(18, 25)),
        (lw.named("bias"), torch.tensor([*range(12, 18), 24])),
    ],
    ids=["single weights", "last layer", "biases"],
)
def test_some_of_the_weights(weights: Any, index: Tensor) -> None:
    energy = copied(small(), index=index)
    x = new(energy)
    assert float(energy.gradient(energy.theta).norm()) < 1e-8  # of all weights, so of some
    assert off(fitted(energy, lw.HFL(), weights=weights).functions(x).cov, energy.each(x)) < 1e-6
    linear = fitted(energy, lw.HFL(mode="linearised"), weights=weights).functions(x).cov
    assert off(linear, energy.each(x, energy.ggn())) < 1e-8


def test_a_noise_for_each_output() -> None:
    """The loss of output c over its own variance: as if targets and outputs were in units of it."""
    start = small("gaussian", 2)
    units = torch.tensor([0.2, 0.5], dtype=D)

    class Scaled(Energy):
        def loss(self, f: Tensor) -> Tensor:
            return 0.5 * ((f - self.y) / units).square().sum()

    energy = copied(Scaled("gaussian", start.model, start.x, start.y, start.precision)).minimise(30)
    x = new(energy)
    belief = fitted(energy, lw.HFL(), likelihood=lw.Gaussian(noise_std=(0.2, 0.5))).functions(x)
    assert off(belief.cov, energy.each(x)) < 1e-6


class Noisy(Energy):
    """A network that gives its own noise: means, then log-variances."""

    def loss(self, f: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        return 0.5 * (log_variance + (self.y - mean).square() / log_variance.exp()).sum()


def test_a_noise_that_the_network_gives() -> None:
    start = small("gaussian", 2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    energy = Noisy("gaussian", model, start.x, start.y, 0.5).minimise(200)
    x = new(energy)
    options = {"likelihood": lw.HeteroscedasticGaussian()}
    assert off(fitted(energy, lw.HFL(), **options).functions(x).cov, energy.each(x)) < 1e-6
    linear, full = (fitted(energy, method, **options) for method in (lw.HFL(mode="linearised"), lw.Full()))
    assert_close(linear.functions(x).cov, full.functions(x).cov, SOLVED)


@cache
def rotating() -> Energy:
    """Two linear layers in a row, at the minimum."""
    start = small("gaussian", 2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 2)).double()
    return Energy("gaussian", model, start.x, start.y, 0.5, 0.25).minimise(200)


@pytest.mark.parametrize(("limit", "dtype"), [(2048, D), (2048, torch.float32), (0, D)])
def test_weights_that_can_rotate(limit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two linear layers in a row, as in an attention head: the loss is flat along rotations, which move no output."""
    monkeypatch.setattr("lapwing.methods.hfl_response.DENSE", limit)
    energy = rotating()
    values, vectors = torch.linalg.eigh(energy.hessian())
    flat = values < 1e-9
    assert int(flat.sum()) == 1
    x = new(energy, 2)
    jac, inverse = energy.jacobian(x), vectors[:, ~flat] / values[~flat] @ vectors[:, ~flat].T
    data = [(energy.x.to(dtype), energy.y.to(dtype))]
    tolerance = 1e-6 if limit else 1e-4  # by conjugate gradients every digit takes more products
    posterior = lw.fit(
        copied(energy).model.to(dtype), data, lw.Gaussian(noise_std=0.5), method=lw.HFL(tolerance=tolerance), prior=0.5
    )
    cov = posterior.functions(x.to(dtype), joint=True).cov.reshape(4, 4)
    assert off(cov, jac @ inverse @ jac.T) < tolerance
    rotation = energy.named(vectors[:, 0])
    message = r"the loss is flat along what is pushed .*Push outputs, or use HFL\(mode='linearised'\)"
    with pytest.raises(lw.errors.NumericalError, match=message):
        posterior.variance_of(lambda w: sum((w[name] * rotation[name].to(w[name])).sum() for name in rotation))
    norm = lambda w: w["0.weight"].square().sum()  # does not depend on the rotation
    g = torch.func.grad(lambda theta: norm(energy.named(theta)))(energy.theta)
    assert float(posterior.variance_of(norm)) == pytest.approx(float(g @ inverse @ g), rel=10 * tolerance)


def test_conjugate_gradients_in_place_of_the_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.methods.hfl_response.DENSE", 10)
    energy = small("bernoulli", 2)
    x = new(energy, 1)
    posterior = fitted(energy, lw.HFL(tolerance=1e-4))
    assert not posterior.posterior.responder.hessian.is_formed
    assert off(posterior.functions(x).cov, energy.each(x)) < 1e-4


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_network(name: str) -> None:
    """Convolutions, attention, recurrence, tokens, several inputs, frozen weights: all outputs of one input or two."""
    case = BY_NAME[name]
    model, data, prior = at_its_targets(case)
    jac = dense.jacobian(model, case.batch(6), 6).flatten(0, 1)
    covariance = torch.linalg.inv(jac.T @ jac / 0.25 + 2.0 * torch.eye(jac.shape[1], dtype=D))
    posterior = lw.fit(model, data, lw.Gaussian(noise_std=0.5), method=lw.HFL(), prior=prior)
    inputs = case.batch(2, seed=1)
    new = dense.by_datum(dense.jacobian(model, inputs, 2), case.outputs[-1])
    exact = dense.output_covariance(new, covariance).reshape(2, *case.outputs, case.outputs[-1])
    cov = problems.unchanged(model, lambda: posterior.functions(inputs).cov)
    assert off(cov, exact) < 1e-6


def test_what_no_weight_moves_has_no_variance() -> None:
    """A network without biases at zero, beside an input where it has some."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()
    energy = Energy("gaussian", model, small().x, small().y, 0.5, 0.04).minimise(100)
    x = torch.tensor([[0.0, 0.0], [1.0, -1.0]], dtype=D)
    for method in (lw.HFL(), lw.HFL(lam=1e-3)):
        posterior = fitted(energy, method)
        assert float(posterior.functions(x).variance[0]) == 0.0
        assert float(posterior.functions(x[:1]).variance) == 0.0
        assert off(posterior.functions(x).cov, energy.each(x)) < 1e-5


def test_a_push_out_of_the_basin() -> None:
    """Within the allowed range, and yet too strong for this network."""
    energy = gapped()
    x = torch.tensor([[-2.5], [2.5]], dtype=D)
    strong = at_strength(gapped_posterior(), 0.9 / float(energy.each(x).max()) ** 0.5)
    message = r"2 of 2 responses have not converged.* leaves the basin .* smaller lam.*HFL\(mode='linearised'\)"
    with pytest.raises(lw.errors.NumericalError, match=message):
        strong(x)
    response = strong.respond(x)
    assert bool((response.missing > 0.1).all())
    assert bool((response.bend > 0.25).all())


def test_too_few_steps() -> None:
    x = torch.tensor([[-2.5]], dtype=D)
    posterior = at_strength(gapped_posterior(), 0.02 / float(gapped().each(x)) ** 0.5)
    few = replace(posterior, responder=replace(posterior.responder, max_steps=1))
    message = r"1 of 1 responses have not converged.* after 1 steps \(relative resid"
    with pytest.raises(lw.errors.NumericalError, match=message):
        few(x)


# Responses by Adam: how near they come to the full Hessian, and what they say when they do not.


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
    assert float((response.require_convergence(0.05).cov[:, 0] / energy.each(x).flatten() - 1).abs().max()) < 0.01
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


# One push beforehand, and scores anywhere for a forward pass: what they are, against dense matrices.

PRETRAINED_KINDS = [("gaussian", 1), ("gaussian", 3), ("categorical", 3), ("bernoulli", 2), ("poisson", 1)]


def responses(energy: Energy, x: Tensor, evaluation: Tensor, signs: Tensor | None = None) -> Tensor:
    """Row means of the covariance of the outputs at x with those at the evaluation inputs, all summed: (B, C)."""
    rows, others = energy.jacobian(x), energy.jacobian(evaluation)
    others = others if signs is None else others * signs.reshape(-1, 1)
    covariance = rows @ torch.linalg.solve(energy.hessian(), others.T)
    return covariance.sum(1).reshape(len(x), -1) / len(evaluation)


@pytest.mark.parametrize(("kind", "outputs"), PRETRAINED_KINDS)
def test_the_mean_push_has_the_row_means_of_the_covariance(kind: str, outputs: int) -> None:
    energy = small(kind, outputs)
    x, evaluation = new(energy, 5), new(energy, 9, seed=8)
    exact = responses(energy, x, evaluation)
    posterior = pretrained(energy, evaluation=evaluation, variant="mean")
    f, scores = posterior.posterior.scores(x)
    assert scores.shape == (1, 5, outputs)
    assert off(scores[0], exact) < 1e-3
    assert torch.equal(f, energy.model(x).detach())
    belief = posterior.functions(x)
    assert off(belief.variance, exact.clamp_min(0)) < 1e-3
    assert_close(belief.cov, torch.diag_embed(belief.variance))  # outputs apart
    ggn = energy.jacobian(x) @ torch.linalg.solve(energy.ggn(), energy.jacobian(evaluation).T)
    if kind != "categorical":  # a softmax does not see the sum of its logits, and neither curvature does
        assert off(ggn.sum(1).reshape(5, -1) / 9, exact) > 0.01  # the Hessian's and not the GGN's


def test_scores_below_zero_count_as_zero() -> None:
    energy = small("gaussian", 3)
    x, evaluation = new(energy, 5), new(energy, 9, seed=8)
    exact = responses(energy, x, evaluation)
    assert bool((exact < 0).any())
    variance = pretrained(energy, evaluation=evaluation).functions(x).variance
    assert bool((variance[exact < 0] == 0).all())
    assert bool((variance[exact > 0] > 0).all())


def test_the_absolute_push() -> None:
    """Of the average |f|: slopes take the sign of the output that they belong to."""
    energy = small("gaussian", 3)
    x, evaluation = new(energy, 5), new(energy, 9, seed=8)
    signs = energy.model(evaluation).detach().sign()
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    belief = pretrained(energy, variant="absolute", evaluation=evaluation).functions(x)
    assert off(belief.variance, responses(energy, x, evaluation, signs).abs()) < 1e-3


def test_the_error_of_a_strength_falls_with_it() -> None:
    """Scores are differences to one side."""
    energy = small("gaussian", 3)
    x = new(energy, 5)
    exact = responses(energy, x, energy.x)
    errors = [
        off(pretrained(energy, lam=lam, evaluation=energy.x).posterior.scores(x)[1][0], exact)
        for lam in (1e-1, 1e-2, 1e-3)
    ]
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.2)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.2)


def test_the_evaluation_set() -> None:
    """One tensor or batches of it; the training inputs where there is none."""
    energy = small()
    x, evaluation = new(energy, 5), new(energy, 9, seed=8)
    whole = pretrained(energy, evaluation=evaluation).functions(x).variance
    parts = pretrained(energy, evaluation=[evaluation[:2], evaluation[2:]]).functions(x).variance
    assert off(parts, whole) < 1e-8
    trained = pretrained(energy).functions(x).variance
    assert off(trained, pretrained(energy, evaluation=energy.x).functions(x).variance) < 1e-8
    assert off(trained, whole) > 0.05


NO_EVALUATION: dict[str, tuple[Any, str]] = {
    "nothing": ([], r"evaluation holds batches of \[\] inputs; expected at least one batch"),
    "no rows": (
        [small().x, small().x[:0]],
        r"evaluation holds batches of \[25, 0\] inputs; expected .* inputs in each",
    ),
    "no numbers": (small().x * math.nan, r"evaluation inputs: 50 of 50 entries are NaN"),
    "with targets": ([(small().x, small().y)], r"does not take the evaluation inputs \(.*\); expected inputs alone"),
    "too wide": (
        torch.ones(3, 5, dtype=D),
        r"does not take the evaluation inputs \(.*\); expected inputs alone, without",
    ),
    "a number": (3, r"evaluation is 3; expected inputs, a list of batches of inputs"),
}


@pytest.mark.parametrize("name", NO_EVALUATION)
def test_wrong_evaluation_sets_are_refused(name: str) -> None:
    given, message = NO_EVALUATION[name]
    with pytest.raises(lw.errors.DataError, match=message):
        pretrained(small(), evaluation=given)


def test_an_average_that_no_weight_moves() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()
    energy = Energy("gaussian", model, small().x, small().y, 0.5, 0.04).minimise(100)
    with pytest.raises(
        lw.errors.NumericalError, match=r"no weight moves what is pushed, the average over the evaluation"
    ):
        pretrained(energy, evaluation=torch.zeros(2, 2, dtype=D))


def test_outputs_in_a_small_unit() -> None:
    """A hundred-thousandth of the size, with noise and prior to match: scores of the square of it."""
    energy, unit = small(), 1e-5
    tiny = copied(energy, y=unit * energy.y, phi=unit**2 * energy.phi)
    tiny.model[2].weight.data *= unit
    tiny.model[2].bias.data *= unit
    precision = torch.tensor([0.5] * 18 + [0.5 / unit**2] * 7, dtype=D)
    x = new(energy, 5)
    scores = pretrained(energy).posterior.scores(x)[1]
    found = fitted(tiny, lw.HFL(mode="pretrained"), prior=lw.priors.diagonal(precision)).posterior.scores(x)[1]
    assert off(found / unit**2, scores) < 1e-3


@pytest.mark.parametrize("name", ["tuple_input", "dict_input"])
def test_evaluation_sets_of_networks_with_several_inputs(name: str) -> None:
    """A tuple or a mapping is one batch of inputs, as it is for the network."""
    case = BY_NAME[name]
    model, evaluation = case.build(), case.batch(4, seed=3)
    likelihood, inputs = problems.likelihood(case), case.batch(2, seed=1)
    runs = [
        lw.fit(
            model, problems.batches(case), likelihood, prior=30.0,
            method=lw.HFL(mode="pretrained", evaluation=given, drift=100.0),
        ).posterior.scores(inputs)[1]
        for given in (evaluation, [evaluation], [problems.rows(evaluation, slice(k, k + 2)) for k in (0, 2)])
    ]  # fmt: skip
    assert float(runs[0].abs().max()) > 1e-3
    assert off(runs[1], runs[0]) < 1e-8
    assert off(runs[2], runs[0]) < 1e-5


@pytest.mark.parametrize(
    ("kind", "formed"), [("gaussian", True), ("categorical", True), ("categorical", False)],
    ids=["gaussian", "categorical", "by products"],
)  # fmt: skip
def test_random_pushes_are_draws_of_the_posterior(kind: str, formed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """H⁻¹ ξ: with ξ ~ N(0, H) the Laplace variances themselves, within five of their stated standard errors; where the
    Hessian is not formed, ξ ~ N(0, G/φ + A), those of H⁻¹ (G/φ + A) H⁻¹."""
    if not formed:
        monkeypatch.setattr("lapwing.methods.hfl_response.DENSE", 0)
    energy = small(kind, 3)
    x = new(energy, 3)
    inverse = torch.linalg.inv(energy.hessian())
    middle = energy.hessian() if formed else energy.ggn()
    exact = energy.covariance(x, torch.linalg.inv(inverse @ middle @ inverse))
    count = 800
    posterior = pretrained(energy, variant="random", pushes=count, generator=torch.Generator().manual_seed(1))
    belief, error = posterior.functions(x), posterior.posterior.standard_error(x)
    variance = exact.diagonal().reshape(3, 3)
    assert bool(((belief.variance - variance).abs() < 5 * error).all())
    assert float((error / belief.variance / (2 / count) ** 0.5 - 1).abs().max()) < 0.25
    joint = posterior.functions(x, joint=True).cov.reshape(9, 9)
    limit = 5 * ((exact.square() + torch.outer(exact.diagonal(), exact.diagonal())) / count).sqrt()
    assert bool(((joint - exact).abs() < limit).all())
    assert_close(joint.diagonal().reshape(3, 3), belief.variance)
    assert_close(belief.cov[1], joint[3:6, 3:6])


def test_seeds_fix_random_pushes() -> None:
    energy = small()
    x = new(energy)
    one, two, other = (
        pretrained(energy, variant="random", pushes=3, generator=torch.Generator().manual_seed(seed)).functions(x).cov
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    fixed = [pretrained(energy, variant="random", pushes=3).functions(x).cov for _ in range(2)]
    assert torch.equal(fixed[0], fixed[1])


def counted(model: nn.Module) -> list[int]:
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    return passes


@pytest.mark.parametrize(("settings", "more"), [({}, 1), ({"variant": "absolute"}, 1), ({"variant": "random"}, 32)])
def test_a_prediction_costs_a_forward_pass_for_every_push(settings: dict[str, Any], more: int) -> None:
    energy = copied(small())
    posterior = pretrained(energy, **settings)
    passes = counted(energy.model)
    x = new(energy)
    posterior.functions(x)
    assert len(passes) == 1 + more
    passes.clear()
    _ = posterior.predict(x).std
    assert len(passes) == 1 + more


@pytest.mark.parametrize("solver", ["newton", "adam"])
def test_a_convolutional_network(solver: str) -> None:
    """At the minimum of its loss with the outputs as targets; there Hessian and GGN are the same."""
    case = BY_NAME["cnn"]
    model, inputs = case.build(), case.batch(6)
    y = model(inputs).detach()
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    prior = lw.isotropic(2.0, theta)
    lam = 1e-3 if solver == "newton" else 0.1
    method = lw.HFL(mode="pretrained", solver=solver, steps=120, learning_rate=1e-2, lam=lam, tolerance=0.05)
    found = problems.unchanged(
        model, lambda: lw.fit(model, [(inputs, y)], lw.Gaussian(noise_std=1.0), method=method, prior=prior)
    )
    energy = Energy("gaussian", model, inputs, y, 2.0)
    x = case.batch(3, seed=1)
    rows = energy.jacobian(x)
    exact = (rows @ torch.linalg.solve(energy.ggn(), energy.jacobian(inputs).sum(0) / 6)).reshape(3, 3)
    score = problems.unchanged(model, lambda: found.posterior.scores(x)[1][0])
    assert off(score, exact) < (1e-3 if solver == "newton" else 0.03)


def moved_by(energy: Energy, size: float, evaluation: Tensor) -> Energy:
    """The average output so many of its deviations away from where it is at the minimum, to first order."""
    moved, slope = copied(energy), energy.jacobian(evaluation).mean(0)
    step = torch.linalg.solve(energy.hessian(), slope)
    moved.place(energy.theta + size * step / (slope @ step).sqrt())
    return moved


TUNED: dict[str, Any] = {"solver": "adam", "steps": 150, "learning_rate": 1e-2}


def test_a_twin_that_drifts_has_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    energy = small("bernoulli", 1)
    x, evaluation = new(energy, 5), new(energy, 9, seed=8)
    still = pretrained(energy, evaluation=evaluation, **TUNED | {"steps": 60, "tolerance": math.inf})
    assert still.posterior.findings == ()
    moved = moved_by(energy, 0.2, evaluation)
    responses: list[Response] = []
    tuned = FineTuner.respond_alike

    def recorded(self: FineTuner, *args: Any) -> Response:
        """Fine-tune once; later fits of the same network get the same response."""
        if not responses:
            responses.append(tuned(self, *args))
        return responses[0]

    monkeypatch.setattr(FineTuner, "respond_alike", recorded)
    posterior = pretrained(moved, evaluation=evaluation, **TUNED)
    (finding,) = posterior.posterior.findings
    told = r"the weights are (\S+) posterior .* minimum .*, measured by how far an unpushed twin moves what is"
    said = re.match(told, finding)
    assert said is not None
    assert float(said.group(1)) == pytest.approx(0.2, rel=0.1)
    posterior.save(tmp_path / "it")
    assert lw.load(tmp_path / "it", moved.model).posterior.findings == (finding,)
    with pytest.raises(lw.errors.NumericalError, match=r"posterior standard deviations .*; expected at most 0\.05\."):
        pretrained(moved, evaluation=evaluation, drift=0.05, **TUNED)
    loose = pretrained(moved, evaluation=evaluation, drift=0.05, tolerance=math.inf, **TUNED)
    assert loose.posterior.findings == (finding,)
    assert_close(loose.posterior.scores(x)[1], posterior.posterior.scores(x)[1])


def test_unfinished_random_pushes_are_used_as_they_are() -> None:
    """With an infinite tolerance, from weights far from any minimum."""
    energy = copied(small("bernoulli", 1))
    energy.place(energy.theta + 0.5)
    method = {"solver": "adam", "steps": 10, "variant": "random", "pushes": 3}
    posterior = pretrained(energy, tolerance=math.inf, **method)
    assert bool(torch.isfinite(posterior.functions(new(energy)).variance).all())
    assert len(posterior.posterior.findings) == 1
    with pytest.raises(lw.errors.NumericalError, match="of 3 responses have not converged"):
        pretrained(energy, **method)


def test_all_data_are_in_the_random_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch or in two, where they are drawn from the data."""
    monkeypatch.setattr("lapwing.methods.hfl_response.DENSE", 0)
    energy = small("categorical", 3)
    x = new(energy)
    method = lw.HFL(mode="pretrained", variant="random", pushes=800)
    split = fitted(energy, method, data=data(energy)).functions(x).variance
    joined = fitted(energy, method, data=[(energy.x, energy.y)]).functions(x).variance
    assert float((split / joined - 1).abs().max()) < 8 * (2 / 800) ** 0.5


def test_classes_are_pushed_by_their_size() -> None:
    """The sum of the logits says nothing: a softmax does not see it."""
    assert pretrained(small("categorical", 3)).posterior.variant == "absolute"
    assert pretrained(small("bernoulli", 2)).posterior.variant == "mean"
