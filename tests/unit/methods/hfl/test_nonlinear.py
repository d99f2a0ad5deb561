"""The mode "nonlinear": Laplace with the full Hessian, against dense matrices."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.hfl.hfl import ResponsePosterior
from tests import minima, problems
from tests.cases import BY_NAME
from tests.minima import at_its_targets, copied, fitted, gapped, new, off, small
from tests.references import dense
from tests.references.minimum import Energy
from tests.tolerances import SOLVED, assert_close

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


def test_the_likelihoods_are_all_there() -> None:
    assert {kind for kind, _ in KINDS} == {"gaussian", *minima.LIKELIHOODS}


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
    monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", limit)
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
    monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", 10)
    energy = small("bernoulli", 2)
    x = new(energy, 1)
    posterior = fitted(energy, lw.HFL(tolerance=1e-4))
    assert not posterior.posterior.responder.hessian.formed
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


def test_tokens_across_each_other() -> None:
    case = BY_NAME["token_level"]
    model, data, prior = at_its_targets(case)
    jac = dense.jacobian(model, case.batch(6), 6).flatten(0, 1)
    covariance = torch.linalg.inv(jac.T @ jac / 0.25 + 2.0 * torch.eye(jac.shape[1], dtype=D))
    inputs = case.batch(1, seed=1)
    new = dense.jacobian(model, inputs, 1)[0]
    posterior = lw.fit(model, data, lw.Gaussian(noise_std=0.5), method=lw.HFL(), prior=prior)
    joint = posterior.functions(inputs, joint=True)
    assert joint.cov.shape == (1, 4, 3, 1, 4, 3)
    assert off(joint.cov.reshape(12, 12), new @ covariance @ new.T) < 1e-6


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


@pytest.mark.parametrize("lam", [1e-12, 1e3])
def test_a_strength_that_no_difference_can_have(lam: float) -> None:
    energy = small()
    x = new(energy)
    posterior = fitted(energy, lw.HFL(lam=lam))
    message = r"lam is \S+; expected between (\S+) \(.*rounding\) and (\S+) \(.*Leave lam out to have it chosen"
    with pytest.raises(lw.errors.NumericalError, match=message) as error:
        posterior.functions(x)
    low, high = (float(part) for part in re.search(message, str(error.value)).groups())  # type: ignore[union-attr]
    assert high == pytest.approx(float(energy.each(x).max()) ** -0.5, rel=0.05)
    assert low == pytest.approx(2.2e-16 / 1e-6 / float(energy.each(x).min()), rel=0.5)
    inside = fitted(energy, lw.HFL(lam=(low * high) ** 0.5))
    assert off(inside.functions(x).cov, energy.each(x)) < 1e-4


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
