"""Error bars by pushing the loss: Laplace with the full Hessian, or with the GGN for the tangent model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.hfl.linearised import LinearisedResponse
from lapwing.methods.hfl.response import Responder
from tests import minima, problems
from tests.cases import BY_NAME, CASES, Case, cast
from tests.minima import copied, fitted, gapped, new, off, small
from tests.references import dense
from tests.references.minimum import Energy
from tests.tolerances import SOLVED, assert_close

D = torch.float64
KINDS = [("gaussian", 1), ("gaussian", 2), ("gaussian", 3), ("categorical", 3), ("bernoulli", 1), ("bernoulli", 2),
         ("poisson", 1)]  # fmt: skip
MODES = ("nonlinear", "linearised", "pretrained")
SOME = ["cnn", "resnet_batchnorm", "attention", "lstm", "embedding", "squeezed", "token_level", "dict_input",
        "tuple_input", "frozen_weight", "free_parameter"]  # fmt: skip


# The full Hessian


def test_the_response_has_the_variance_of_the_full_hessian() -> None:
    """To 1e-6 at every input, in the data, in the gap between them and outside; and the GGN has another."""
    energy = gapped()
    x = torch.linspace(-2.5, 2.5, 11, dtype=D).unsqueeze(1)
    found = fitted(energy, lw.HFL()).functions(x)
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
        found = fitted(energy, lw.HFL(lam=lam, tolerance=1e-8)).functions(x)
        errors.append(float((found.cov / exact - 1).abs()))
    assert min(errors) > 1e-8  # above rounding
    centred = strengths.log() - strengths.log().mean()
    slope = float((centred * torch.tensor(errors, dtype=D).log()).sum() / centred.square().sum())
    assert 1.8 < slope < 2.2


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
def test_covariances_of_all_outputs_within_and_across_inputs(kind: str, outputs: int) -> None:
    energy = small(kind, outputs)
    x = new(energy)
    found = fitted(energy, lw.HFL())
    belief, joint = found.functions(x), found.functions(x, joint=True)
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
    found = fitted(energy, lw.HFL(), likelihood=lw.Gaussian(noise_std=(0.2, 0.5))).functions(x)
    assert off(found.cov, energy.each(x)) < 1e-6


def test_the_noise_is_that_of_the_residuals() -> None:
    """Linear networks: the Hessian is the same wherever the weights are."""
    x, y = torch.randn(30, 3, dtype=D), torch.randn(30, 2, dtype=D)
    model = nn.Linear(3, 2).double()
    phi = (model(x) - y).square().mean().detach()
    design = torch.cat([x, torch.ones(30, 1, dtype=D)], 1)
    exact = (design @ torch.linalg.inv(design.T @ design / phi + 0.5 * torch.eye(4, dtype=D)) * design).sum(1)
    for mode in MODES:
        method = lw.HFL(mode=mode, drift=math.inf)
        found = lw.fit(model, [(x[:11], y[:11]), (x[11:], y[11:])], lw.Gaussian(), method=method, prior=0.5)
        assert_close(found.likelihood.dispersion, phi)
        if mode != "pretrained":
            assert_close(found.functions(x).variance[:, 1], exact, SOLVED)


class Noisy(Energy):
    """A network that gives its own noise: means, then log-variances."""

    def loss(self, f: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        return 0.5 * (log_variance + (self.y - mean).square() / log_variance.exp()).sum()


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_noise_that_the_network_gives(outputs: int) -> None:
    start = small("gaussian", outputs)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2 * outputs)).double()
    energy = Noisy("gaussian", model, start.x, start.y, 0.5).minimise(200)
    x = new(energy)
    options = {"likelihood": lw.HeteroscedasticGaussian()}
    assert off(fitted(energy, lw.HFL(), **options).functions(x).cov, energy.each(x)) < 1e-6
    linear, full = (fitted(energy, method, **options) for method in (lw.HFL(mode="linearised"), lw.Full()))
    assert_close(linear.functions(x).cov, full.functions(x).cov, SOLVED)


@pytest.mark.parametrize("limit", [2048, 0])
@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_weights_that_can_turn_together(limit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two linear layers in a row, as in an attention head: along the turns the loss is flat, and the outputs stay."""
    monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", limit)
    start = small("gaussian", 2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)).double()
    energy = Energy("gaussian", model, start.x, start.y, 0.5, 0.04).minimise(200)
    values, vectors = torch.linalg.eigh(energy.hessian())
    flat = values < 1e-9
    assert int(flat.sum()) == 3
    jac, inverse = energy.jacobian(new(energy)), vectors[:, ~flat] / values[~flat] @ vectors[:, ~flat].T
    data = [(energy.x.to(dtype), energy.y.to(dtype))]
    found = lw.fit(copied(energy).model.to(dtype), data, lw.Gaussian(noise_std=0.2), method=lw.HFL(), prior=0.5)
    cov = found.functions(new(energy).to(dtype), joint=True).cov.reshape(6, 6)
    assert off(cov, jac @ inverse @ jac.T) < 1e-6
    turn = energy.named(vectors[:, 0])
    message = r"the loss is flat along what is pushed .*Push outputs, or use HFL\(mode='linearised'\)"
    with pytest.raises(lw.errors.NumericalError, match=message):
        found.variance_of(lambda w: sum((w[name] * turn[name].to(w[name])).sum() for name in turn))
    norm = lambda w: w["0.weight"].square().sum()  # does not turn
    g = torch.func.grad(lambda theta: norm(energy.named(theta)))(energy.theta)
    assert float(found.variance_of(norm)) == pytest.approx(float(g @ inverse @ g), rel=1e-5)


def test_conjugate_gradients_in_the_place_of_the_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    energy = small("gaussian", 2)
    x = new(energy, 2)
    one = fitted(energy, lw.HFL()).functions(x, joint=True).cov
    monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", 10)
    found = fitted(energy, lw.HFL())
    assert found.posterior.responder.hessian._factor is None
    two = found.functions(x, joint=True).cov
    assert off(two, one) < 1e-6
    assert off(two.reshape(4, 4), energy.covariance(x)) < 1e-6


def at_its_targets(case: Case) -> tuple[nn.Module, list[Any], Any]:
    """Targets that are the outputs and a prior around the weights: a minimum, where the Hessian is the GGN."""
    model, inputs = case.build(), case.batch(6)
    y = torch.cat([dense.output(model, dense.one(inputs, b)) for b in range(6)]).detach()
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
    return model, problems.split(inputs, y, (4, 2)), lw.isotropic(2.0, theta)


@pytest.mark.parametrize("name", SOME)
def test_every_kind_of_network(name: str) -> None:
    """Convolutions, attention, recurrence, tokens, several inputs, frozen weights: all outputs of one input or two."""
    case = BY_NAME[name]
    model, data, prior = at_its_targets(case)
    jac = dense.jacobian(model, case.batch(6), 6).flatten(0, 1)
    covariance = torch.linalg.inv(jac.T @ jac / 0.25 + 2.0 * torch.eye(jac.shape[1], dtype=D))
    found = lw.fit(model, data, lw.Gaussian(noise_std=0.5), method=lw.HFL(), prior=prior)
    inputs = case.batch(2, seed=1)
    new = dense.by_datum(dense.jacobian(model, inputs, 2), case.outputs[-1])
    exact = dense.output_covariance(new, covariance).reshape(2, *case.outputs, case.outputs[-1])
    cov = problems.unchanged(model, lambda: found.functions(inputs).cov)
    assert off(cov, exact) < 1e-6


def test_tokens_across_each_other() -> None:
    case = BY_NAME["token_level"]
    model, data, prior = at_its_targets(case)
    jac = dense.jacobian(model, case.batch(6), 6).flatten(0, 1)
    covariance = torch.linalg.inv(jac.T @ jac / 0.25 + 2.0 * torch.eye(jac.shape[1], dtype=D))
    inputs = case.batch(1, seed=1)
    new = dense.jacobian(model, inputs, 1)[0]
    found = lw.fit(model, data, lw.Gaussian(noise_std=0.5), method=lw.HFL(), prior=prior)
    joint = found.functions(inputs, joint=True)
    assert joint.cov.shape == (1, 4, 3, 1, 4, 3)
    assert off(joint.cov.reshape(12, 12), new @ covariance @ new.T) < 1e-6


def test_what_no_weight_moves_has_no_variance() -> None:
    """A network without biases at nought, beside an input where it has some."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()
    energy = Energy("gaussian", model, small().x, small().y, 0.5, 0.04).minimise(100)
    x = torch.tensor([[0.0, 0.0], [1.0, -1.0]], dtype=D)
    for method in (lw.HFL(), lw.HFL(lam=1e-3)):
        found = fitted(energy, method)
        assert float(found.functions(x).variance[0]) == 0.0
        assert float(found.functions(x[:1]).variance) == 0.0
        assert off(found.functions(x).cov, energy.each(x)) < 1e-5


# The tangent model


@pytest.fixture(params=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


def test_the_tangent_model_responds_as_full_says(case: Case) -> None:
    model, data, inputs = case.build(), problems.batches(case), case.batch(3, seed=1)
    one, full = (
        lw.fit(model, data, problems.likelihood(case), method=method, prior=0.7)
        for method in (lw.HFL(mode="linearised"), lw.Full())
    )
    belief, exact = one.functions(inputs), full.functions(inputs)
    assert_close(belief.mean, exact.mean)
    assert_close(belief.cov, exact.cov, SOLVED)
    assert_close(one.functions(inputs, joint=True).cov, full.functions(inputs, joint=True).cov, SOLVED)


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
def test_the_tangent_model_has_the_variance_of_the_ggn(kind: str, outputs: int) -> None:
    energy = small(kind, outputs)
    x = new(energy)
    found = fitted(energy, lw.HFL(mode="linearised"))
    assert off(found.functions(x).cov, energy.each(x, energy.ggn())) < 1e-8
    joint = found.functions(x, joint=True).cov.reshape(3 * outputs, 3 * outputs)
    assert off(joint, energy.covariance(x, energy.ggn())) < 1e-8


@pytest.mark.parametrize("lam", [None, 1e-12, 1e-3, 10.0, 1e6])
def test_the_tangent_model_responds_alike_to_every_strength(lam: float | None) -> None:
    """On the task with a gap, to 1e-8: its loss is quadratic."""
    energy = gapped()
    x = torch.linspace(-2.5, 2.5, 11, dtype=D).unsqueeze(1)
    found, full = (fitted(energy, method).functions(x) for method in (lw.HFL(mode="linearised", lam=lam), lw.Full()))
    assert float((found.cov / full.cov - 1).abs().max()) < 1e-8


def much_data(prior: float, place: float, *methods: Any) -> list[Any]:
    """How the variance at one place is asked for by each method: single precision, a hundred times the data."""
    energy = gapped()
    model, x = copied(energy).model.float(), torch.tensor([[place]])
    data = [(energy.x.float().repeat(100, 1), energy.y.float().repeat(100, 1))]
    fits = [lw.fit(model, data, lw.Gaussian(noise_std=0.15), method=method, prior=prior) for method in methods]
    return [lambda found=found: found.functions(x).variance for found in fits]


@pytest.mark.parametrize("place", [-2.5, 0.0, 1.0, 1.5])
def test_single_precision_and_much_data(place: float) -> None:
    """Variances of a millionth of the prior's: a residual that is small beside the push is not small beside those."""
    exact, found = much_data(0.1, place, lw.Full(), lw.HFL(mode="linearised"))
    assert_close(found(), exact(), SOLVED)


def test_single_precision_throughout_is_finished_or_refused() -> None:
    """Near the limit of float32 rounding decides which: what is finished is right, and the rest says why it is not.

    A strong prior is far from that limit, and a weak one far beyond it.
    """
    narrow = lw.HFL(mode="linearised", dtype=torch.float32)
    refused = r"a relative residual of \S+; expected .*take float64"
    for prior, place in ((1e3, 1.5), (1e3, 0.0), (1.0, 1.5), (1.0, 0.0), (0.1, 1.5), (0.1, 0.0)):
        exact, found = much_data(prior, place, lw.Full(), narrow)
        message, variance = "", None
        try:
            variance = found()
        except lw.errors.NumericalError as error:
            message = str(error)
        if variance is None:
            assert prior < 1e3
            assert re.search(refused, message)
        else:
            assert (prior, place) != (0.1, 0.0)
            assert_close(variance, exact(), 1 / 3)


# Fine-tuning


def test_adam_agrees_with_the_full_hessian() -> None:
    """Steps enough, on all data at once, for a loss that is not too stiff."""
    energy = small("bernoulli", 1)
    x = new(energy, 1)
    method = lw.HFL(solver="adam", steps=250, learning_rate=1e-2, tolerance=1e-2)
    found = fitted(energy, method, data=[(energy.x, energy.y)])
    assert float((found.functions(x).cov / energy.each(x) - 1).abs().max()) < 0.01
    assert float((energy.each(x, energy.ggn()) / energy.each(x) - 1).abs().max()) > 0.1


def test_adam_across_inputs_and_outputs() -> None:
    energy = small("bernoulli", 2)
    x = new(energy, 2)
    method = lw.HFL(solver="adam", steps=200, learning_rate=1e-2, tolerance=0.1)
    found = fitted(energy, method, data=[(energy.x, energy.y)])
    assert off(found.functions(x, joint=True).cov.reshape(4, 4), energy.covariance(x)) < 0.03


def test_unfinished_fine_tuning_is_refused_and_can_be_looked_at() -> None:
    energy = small()
    x = new(energy)
    found = fitted(energy, lw.HFL(solver="adam", steps=25))
    message = r"HFL: 3 of 3 responses are not finished; .* after 25 steps; expected 0.05\..*ran out: give more steps"
    with pytest.raises(lw.errors.NumericalError, match=message) as error:
        found.functions(x)
    stated = re.search(r"off by about (\S+) of its value", str(error.value))
    response = found.posterior.respond(x)
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
    method = lw.HFL(solver="adam", steps=80, learning_rate=1e-2)
    found = fitted(energy, method, data=[(energy.x, energy.y)]).posterior.respond(x)
    error = (found.cov[:, 0] / energy.each(x).flatten() - 1).abs()
    assert float(error.max()) > 0.3
    assert bool((found.missing > 0.7 * error).all())


def adam(energy: Energy, **settings: Any) -> lw.Fitted:
    """All data in every batch, and steps enough for a loss that is not stiff."""
    settings = {"steps": 250, "learning_rate": 1e-2, **settings}
    return fitted(energy, lw.HFL(solver="adam", **settings), data=[(energy.x, energy.y)])


def test_both_solvers_see_the_same_bend() -> None:
    energy = small("bernoulli", 1)
    x = new(energy)
    lam = 0.3 / float(energy.each(x).max()) ** 0.5
    tuned = adam(energy, lam=lam, steps=400).posterior.respond(x)
    stepped = fitted(energy, lw.HFL(lam=lam)).posterior.respond(x)
    assert_close(tuned.bend, stepped.bend, 0.15)
    assert 1e-3 < float(tuned.bend.max()) < 0.25
    assert float(adam(energy).posterior.respond(x).bend.max()) < 0.03  # as chosen


def test_fine_tuning_out_of_the_basin() -> None:
    """Pushes by five standard deviations: what one side does is not what the other does."""
    energy = small("bernoulli", 1)
    x = new(energy)
    strong = {"lam": 5 / float(energy.each(x).max()) ** 0.5}
    response = adam(energy, **strong).posterior.respond(x)
    assert float(response.bend.min()) > 0.25
    assert float(response.drift.max()) < 1e-3  # the twin stays
    with pytest.raises(
        lw.errors.NumericalError, match=r"3 of 3 responses are not finished.*leaves the basin.*smaller lam"
    ):
        adam(energy, **strong).functions(x)
    with pytest.raises(
        lw.errors.NumericalError, match=r"3 of 3 responses are not straight.*leaves the basin.*smaller lam"
    ):
        adam(energy, **strong, tolerance=0.9).functions(x)
    assert_close(adam(energy, **strong, tolerance=math.inf).functions(x).cov[:, 0], response.cov)


def test_the_twin_stays_at_a_minimum_and_goes_to_one() -> None:
    """As far as the outputs there are from the outputs here, in their deviations."""
    energy = small("bernoulli", 1)
    x = new(energy)
    assert float(adam(energy).posterior.respond(x).drift.max()) < 1e-6
    moved = shifted(energy, 0.3)
    gap = (energy.model(x) - moved.model(x)).detach().abs().flatten()
    exact = gap / energy.each(x).flatten().sqrt()
    posterior = adam(moved).posterior
    found = posterior.respond(x)
    assert float((found.drift / exact - 1).abs().max()) < 0.01
    assert float(found.bend.max()) < 0.03  # a drift of all three is no bend
    assert 5e-3 < float(exact.min()) < 0.05 > float(exact.max()) > 0.04
    assert float((posterior.respond(x, joint=True).drift / exact - 1).abs().max()) < 0.01
    one = posterior.respond_to(lambda f: f[1, 0], x)
    assert float(one.drift) == pytest.approx(float(exact[1]), rel=0.01)
    assert float((found.cov[:, 0] / energy.each(x).flatten() - 1).abs().max()) < 0.01  # at the minimum all the same


def test_a_twin_that_drifts_is_refused() -> None:
    energy = small("bernoulli", 1)
    x, moved = new(energy), shifted(energy, 0.3)
    message = (
        r"the weights are 0\.048 posterior standard deviations from the minimum .*, so far an unpushed twin moves what "
        r"is pushed; expected at most 0\.04\. .*prior as weight decay, allow it with HFL\(drift=\.\.\.\), or use HFL"
    )
    strict = adam(moved, drift=0.04)
    with pytest.raises(lw.errors.NumericalError, match=message):
        strict.functions(x)
    with pytest.raises(lw.errors.NumericalError, match=message):
        strict.variance_of(lambda f: f[1, 0], x)
    for method in ({"drift": 0.05}, {"drift": 0.04, "tolerance": math.inf}):
        assert float((adam(moved, **method).functions(x).cov / energy.each(x) - 1).abs().max()) < 0.01


def test_as_many_outputs_as_weights_are_judged_as_outputs() -> None:
    """By all that is read off, against a run of half as many steps."""
    energy = small()
    x = new(energy, 25)
    whole, half = (adam(energy, steps=steps).posterior.respond(x, joint=True) for steps in (20, 10))
    assert whole.cov.shape == (25, len(energy.theta))
    gap = (whole.cov - half.cov).abs().amax(1) / whole.cov.abs().amax(1)
    assert_close(whole.missing, gap)


def test_seeds_fix_the_batches() -> None:
    energy = small()
    x = new(energy, 1)
    runs = []
    for seed in (1, 1, 2):
        gen = torch.Generator().manual_seed(seed)
        method = lw.HFL(solver="adam", steps=30, batch_size=7)
        runs.append(fitted(energy, method, generator=gen).posterior.respond(x).cov)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# Through the front door


def test_a_prior_is_learned_by_the_evidence_of_kron() -> None:
    case = BY_NAME["mlp"]
    data = problems.batches(case)
    learned = lw.fit(case.build(), data, "classification", method=lw.Kron()).prior.values
    found = lw.fit(case.build(), data, "classification", method=lw.HFL(mode="linearised"))
    assert torch.equal(found.prior.values, learned)
    full = lw.fit(case.build(), data, "classification", method=lw.Full(), prior=float(learned))
    inputs = case.batch(3, seed=1)
    assert_close(found.functions(inputs).cov, full.functions(inputs).cov, SOLVED)


def test_a_prior_is_learned_for_the_other_modes() -> None:
    """A linear network: any prior leaves it a minimum, though it moves; with the noise that Kron left."""
    x, y = torch.randn(30, 3, dtype=D), torch.randn(30, 1, dtype=D)
    model = nn.Linear(3, 1).double()
    learned = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.Kron()).prior.values
    for mode in ("nonlinear", "pretrained"):
        method = lw.HFL(mode=mode, drift=math.inf)
        found = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=method)
        assert torch.equal(found.prior.values, learned)
    assert float((learned - 1).abs()) > 1e-3


def test_the_prior_of_single_weights_is_learned_by_the_evidence_of_diagonal() -> None:
    """Kron takes layers, and cannot."""
    energy, weights = small("categorical", 3), lw.subnetwork(torch.tensor([1, 5, 13, 20, 24]))
    options = {"weights": weights, "prior": None}
    learned = fitted(energy, lw.Diagonal(), **options).prior.values
    found = fitted(energy, lw.HFL(mode="linearised"), **options)
    assert torch.equal(found.prior.values, learned)
    assert float((learned - 1).abs()) > 1e-3
    x = new(energy)
    full = fitted(energy, lw.Full(), weights=weights, prior=float(learned))
    assert_close(found.functions(x).cov, full.functions(x).cov, SOLVED)


@pytest.mark.parametrize("mode", MODES)
def test_predictions(mode: str) -> None:
    regression, classes = small(), small("categorical", 3)
    found = fitted(regression, lw.HFL(mode=mode))
    x = new(regression)
    predicted, belief = found.predict(x), found.functions(x)
    assert_close(predicted.std, (belief.variance + 0.04).sqrt())
    assert_close(predicted.mean, regression.model(x))
    probs = fitted(classes, lw.HFL(mode=mode)).predict(x).probs
    assert_close(probs.sum(1), torch.ones(3, dtype=D))
    assert off(probs, classes.model(x).softmax(1).detach()) > 1e-3  # not the network's own


@pytest.mark.parametrize("mode", MODES)
def test_float32_is_close_to_its_float64_copy(mode: str) -> None:
    energy = small("gaussian", 2)
    x, y = energy.x.float(), energy.y.float()
    narrow = copied(energy).model.float()
    method = lw.HFL(mode=mode, evaluation=energy.x)
    found = lw.fit(narrow, [(x, y)], lw.Gaussian(noise_std=0.2), method=method, prior=0.5)
    wide = fitted(energy, method)
    inputs = new(energy)
    belief, exact = found.functions(inputs.float()), wide.functions(inputs)
    assert belief.cov.dtype == torch.float32
    assert off(belief.mean, exact.mean) < 1e-5
    assert off(belief.cov, exact.cov) < (2e-2 if mode == "pretrained" else 1e-3)


@pytest.mark.parametrize("tolerance", [1.0, 100.0, math.inf])
def test_a_tolerance_that_takes_anything_still_works(tolerance: float) -> None:
    """As far as it would for the usual one."""
    energy = small()
    x = new(energy)
    assert off(fitted(energy, lw.HFL(tolerance=tolerance)).functions(x).cov, energy.each(x)) < 1e-6
    lam = 0.01 / float(energy.each(x).max()) ** 0.5
    assert off(fitted(energy, lw.HFL(tolerance=tolerance, lam=lam)).functions(x).cov, energy.each(x)) < 1e-3


def test_float32_within() -> None:
    """Asked to work in single precision, it has the tolerance of that."""
    energy = small("gaussian", 2)
    x = new(energy)
    found = fitted(energy, lw.HFL(dtype=torch.float32))
    assert found.posterior.responder.objective.dtype == torch.float32
    assert found.posterior.responder.tolerance == 1e-2
    error = off(found.functions(x).cov, energy.each(x))
    assert 1e-9 < error < 1e-2


@pytest.mark.parametrize("name", ["resnet_batchnorm", "conv_zoo", "lstm", "frozen_bias"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    """Weights, buffers, flags and modes, bit for bit; nor is the global generator touched."""
    case = BY_NAME[name]
    model, data, prior = at_its_targets(case)
    next(iter(model.modules())).register_forward_hook(lambda *_: None)
    inputs = case.batch(1, seed=1)
    random = torch.get_rng_state()
    for method in (lw.HFL(), lw.HFL(mode="linearised"), lw.HFL(mode="pretrained"),
                   lw.HFL(mode="pretrained", variant="random", pushes=2), lw.HFL(solver="adam", steps=2)):  # fmt: skip

        def run(method: lw.HFL = method) -> None:
            found = lw.fit(model, data, lw.Gaussian(noise_std=0.5), method=method, prior=prior)
            if method.solver == "adam":
                found.posterior.respond(inputs)
            else:
                _ = found.predict(inputs).std

        problems.unchanged(model, run)
    assert torch.equal(torch.get_rng_state(), random)


def test_gradients_off_make_no_difference() -> None:
    energy = small()
    x = new(energy)
    plain = fitted(energy, lw.HFL()).functions(x).cov
    with torch.no_grad():
        quiet = fitted(energy, lw.HFL()).functions(x).cov
    with torch.inference_mode():
        inferred = fitted(energy, lw.HFL()).functions(x.clone()).cov
    assert torch.equal(plain, quiet)
    assert torch.equal(plain, inferred)


def test_the_methods_name() -> None:
    energy = small()
    x = new(energy)
    one, other = (fitted(energy, method).functions(x).cov for method in ("hfl", lw.HFL()))
    assert torch.equal(one, other)


def test_other_batches_give_the_same() -> None:
    energy = small("categorical", 3)
    x, order = new(energy), torch.randperm(25, generator=torch.Generator().manual_seed(1))
    mixed = [(energy.x[order[:4]], energy.y[order[:4]]), (energy.x[order[4:]], energy.y[order[4:]])]
    for mode in ("nonlinear", "linearised"):
        one, two = (fitted(energy, lw.HFL(mode=mode), data=data) for data in (None, mixed))
        assert off(one.functions(x).cov, two.functions(x).cov) < 1e-6
        alone = torch.cat([two.functions(x[b : b + 1]).cov for b in range(3)])
        assert off(alone, two.functions(x).cov) < 1e-6


def test_another_prior_for_the_tangent_model() -> None:
    """No data are touched besides those that it holds."""
    energy = small()
    x = new(energy)
    moved = fitted(energy, lw.HFL(mode="linearised")).with_prior(3.0)
    assert off(moved.functions(x).cov, energy.each(x, copied(energy, precision=3.0).ggn())) < 1e-8
    with pytest.raises(lw.errors.UnsupportedError, match="no prior over weights to change"):
        fitted(energy, lw.HFL()).with_prior(3.0)


# What is refused


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"mode": "linear"}, "mode is 'linear'; expected one of nonlinear, linearised, pretrained"),
    "variant": ({"variant": "median"}, "variant is 'median'; expected one of mean, absolute, random"),
    "solver": ({"solver": "sgd"}, "solver is 'sgd'; expected one of newton, adam"),
    "lam of nought": ({"lam": 0.0}, "lam is 0.0; expected a positive number"),
    "negative lam": ({"lam": -1.0}, "lam is -1.0; expected a positive number"),
    "lam that is none": ({"lam": math.nan}, "lam is nan; expected a positive number"),
    "endless lam": ({"lam": math.inf}, "lam is inf; expected a positive number"),
    "no pushes": ({"pushes": 0}, "pushes is 0; expected at least 1"),
    "no steps": ({"steps": 0}, "steps is 0; expected at least 1"),
    "half a step": ({"steps": 1.5}, "steps is 1.5; expected an integer"),
    "no batch": ({"batch_size": -3}, "batch_size is -3; expected at least 1"),
    "no rate": ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a positive number"),
    "rate that is none": ({"learning_rate": math.nan}, "learning_rate is nan; expected a positive number"),
    "negative drift": ({"drift": -1.0}, "drift is -1.0; expected at least nought; math.inf allows any"),
    "drift that is none": ({"drift": math.nan}, "drift is nan; expected at least nought"),
    "no tolerance": ({"tolerance": 0.0}, "tolerance is 0.0; expected a positive number, or None for the usual"),
    "tolerance that is none": ({"tolerance": math.nan}, "tolerance is nan; expected a positive number"),
    "no solution": (
        {"mode": "linearised", "tolerance": math.inf},
        "tolerance is inf; expected below 1 in the mode 'linearised', where a residual of 1 is no solution",
    ),
    "calibration of variances": (
        {"calibration": []},
        "calibration data for the mode 'nonlinear', whose variances have their scale; leave them",
    ),
    "dtype": ({"dtype": torch.float16}, r"dtype is torch.float16; expected torch.float64 or torch.float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_are_none(name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        lw.HFL(**settings)


@pytest.mark.parametrize("mode", MODES)
def test_a_g_prior_is_refused(mode: str) -> None:
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"forms no curvature, and g_prior\(\) needs one; use Kron\(\) or"
    ):
        fitted(small(), lw.HFL(mode=mode), prior=lw.priors.g_prior(1.0))


def test_a_g_prior_is_refused_later_too() -> None:
    found = fitted(small(), lw.HFL(mode="linearised"))
    with pytest.raises(lw.errors.UnsupportedError, match=r"keeps no curvature for a g-prior to take; use Full\(\)"):
        found.with_prior(lw.priors.g_prior(1.0))


@pytest.mark.parametrize("lam", [1e-12, 1e3])
def test_a_strength_that_no_difference_can_have(lam: float) -> None:
    energy = small()
    x = new(energy)
    found = fitted(energy, lw.HFL(lam=lam))
    message = r"lam is \S+; expected between (\S+) \(.*rounding\) and (\S+) \(.*Leave lam out to have it chosen"
    with pytest.raises(lw.errors.NumericalError, match=message) as error:
        found.functions(x)
    low, high = (float(part) for part in re.search(message, str(error.value)).groups())  # type: ignore[union-attr]
    assert high == pytest.approx(float(energy.each(x).max()) ** -0.5, rel=0.05)
    assert low == pytest.approx(2.2e-16 / 1e-6 / float(energy.each(x).min()), rel=0.5)
    inside = fitted(energy, lw.HFL(lam=(low * high) ** 0.5))
    assert off(inside.functions(x).cov, energy.each(x)) < 1e-4


def test_a_push_out_of_the_basin() -> None:
    """Within the window, and yet too strong for this network."""
    energy = gapped()
    x = torch.tensor([[-2.5], [2.5]], dtype=D)
    found = fitted(energy, lw.HFL(lam=0.9 / float(energy.each(x).max()) ** 0.5))
    message = r"2 of 2 responses are not finished.* leaves the basin .* smaller lam.*HFL\(mode='linearised'\)"
    with pytest.raises(lw.errors.NumericalError, match=message):
        found.functions(x)
    assert bool((found.posterior.respond(x).missing > 0.1).all())
    assert bool((found.posterior.respond(x).bend > 0.25).all())


def test_steps_that_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    energy = gapped()
    x = torch.tensor([[-2.5]], dtype=D)
    monkeypatch.setattr(Responder, "__init__", _few(Responder.__init__))
    with pytest.raises(
        lw.errors.NumericalError, match=r"1 of 1 responses are not finished.* after 1 steps \(relative resid"
    ):
        fitted(energy, lw.HFL(lam=0.02 / float(energy.each(x)) ** 0.5)).functions(x)


def _few(original: Any) -> Any:
    return lambda self, *args, **options: original(self, *args, **options, max_steps=1)


def shifted(energy: Energy, size: float) -> Energy:
    """So many posterior standard deviations from the minimum, in the stiffest direction."""
    moved = copied(energy)
    values, vectors = torch.linalg.eigh(energy.hessian())
    moved.place(energy.theta + size * vectors[:, -1] / values[-1].sqrt())
    return moved


def test_weights_near_a_minimum_are_told_and_moved_there() -> None:
    energy = small("bernoulli", 1)
    x = new(energy)
    moved = shifted(energy, 0.05)
    found = fitted(moved, lw.HFL())
    (finding,) = found.posterior.findings
    said = re.match(r"the weights are (\S+) posterior standard deviations from the minimum", finding)
    assert said is not None
    assert float(said.group(1)) == pytest.approx(0.05, rel=0.1)
    assert off(found.functions(x).cov, energy.each(x)) < 1e-6  # at the minimum
    assert torch.equal(found.functions(x).mean, moved.model(x).detach())  # of the network as it is
    assert fitted(energy, lw.HFL()).posterior.findings == ()


def test_weights_far_from_a_minimum_are_refused() -> None:
    energy = small("bernoulli", 1)
    far = shifted(energy, 0.3)
    message = (
        r"0\.\d+ posterior standard deviations from the minimum .*; expected at most 0.1.* prior as weight decay, "
        r"allow it with HFL\(drift=\.\.\.\), or use HFL\(mode='linearised'\)"
    )
    for mode in ("nonlinear", "pretrained"):
        with pytest.raises(lw.errors.NumericalError, match=message):
            fitted(far, lw.HFL(mode=mode, drift=0.1))
    x = new(energy)
    assert off(fitted(far, lw.HFL(drift=1.0)).functions(x).cov, energy.each(x)) < 1e-6
    linear = fitted(far, lw.HFL(mode="linearised", drift=0.1)).functions(x).cov
    assert off(linear, far.each(x, far.ggn())) < 1e-8


@pytest.mark.parametrize("limit", [2048, 0])
def test_an_indefinite_hessian(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", limit)
    energy = copied(small())
    energy.place(torch.randn(25, dtype=D, generator=torch.Generator().manual_seed(2)))
    assert float(torch.linalg.eigvalsh(energy.hessian())[0]) < -1
    message = (
        r"not positive definite: its smallest eigenvalue is -.*train it further with this prior.*mode='linearised'"
        if limit
        else r"met a direction with curvature -.*Raise the prior precision.*train it further.*mode='linearised'"
    )
    with pytest.raises(lw.errors.NumericalError, match=message):
        fitted(energy, lw.HFL())


@pytest.mark.parametrize("limit", [2048, 0])
def test_a_search_for_the_minimum_that_overflows(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of e^-20 where five were counted: a full Newton step goes to e^1000 and further."""
    monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", limit)
    model = nn.Linear(1, 1).double()
    model.weight.data.zero_()
    model.bias.data.fill_(-20.0)
    x, y = torch.ones(5, 1, dtype=D), torch.full((5, 1), 5.0, dtype=D)
    with pytest.raises(
        lw.errors.NumericalError, match=r"at no minimum .* Newton's steps find none.*raise the prior precision"
    ):
        lw.fit(model, [(x, y)], "poisson", method=lw.HFL(), prior=1e-6)


@pytest.mark.parametrize("mode", ["nonlinear", "linearised"])
def test_what_needs_its_data_is_not_saved(mode: str, tmp_path: Path) -> None:
    message = (
        r"re-optimises on its data at every prediction, and a file does not hold those; .*HFL\(mode='pretrained'\)"
    )
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        fitted(small(), lw.HFL(mode=mode)).save(tmp_path / "it")
    assert not (tmp_path / "it").exists()


def test_data_in_another_order_at_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tangent model needs its rows again; where they are not kept, a loader that shuffles is refused."""
    energy, gen = small(), torch.Generator().manual_seed(3)

    class Shuffled:
        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(25, generator=gen)
            yield energy.x[order], energy.y[order]

    x = new(energy)
    found = fitted(energy, lw.HFL(mode="linearised"), data=Shuffled())
    assert isinstance(found.posterior, LinearisedResponse)
    assert off(found.functions(x).cov, energy.each(x, energy.ggn())) < 1e-8
    assert off(fitted(energy, lw.HFL(), data=Shuffled()).functions(x).cov, energy.each(x)) < 1e-6
    monkeypatch.setattr("lapwing.tangent.design.CACHE", 0)
    with pytest.raises(lw.errors.DataError, match="two passes over the data gave different rows"):
        fitted(energy, lw.HFL(mode="linearised"), data=Shuffled())


def test_float32_data_of_tokens() -> None:
    """Whole numbers stay whole where everything else is widened."""
    case = BY_NAME["embedding"]
    data = problems.batches(case, dtype=torch.float32)
    narrow = lw.fit(case.build(torch.float32), data, "classification", method=lw.HFL(mode="linearised"), prior=0.7)
    wide = lw.fit(case.build(torch.float32).double(), data, "classification", method=lw.Full(), prior=0.7)
    inputs = case.batch(3, torch.float32, seed=1)
    assert_close(narrow.functions(inputs).cov, wide.functions(cast(inputs, D)).cov, SOLVED)


def test_the_likelihoods_are_all_there() -> None:
    assert {kind for kind, _ in KINDS} == {"gaussian", *minima.LIKELIHOODS}
