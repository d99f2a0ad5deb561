"""One push beforehand, and scores anywhere for a forward pass: what they are, against dense matrices."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.hfl.response import FineTuner, Response
from tests import problems
from tests.cases import BY_NAME
from tests.minima import copied, data, fitted, held_out, new, off, pretrained, small
from tests.references.minimum import Energy
from tests.tolerances import assert_close

D = torch.float64
KINDS = [("gaussian", 1), ("gaussian", 3), ("categorical", 3), ("bernoulli", 2), ("poisson", 1)]


def responses(energy: Energy, x: Tensor, evaluation: Tensor, signs: Tensor | None = None) -> Tensor:
    """Row means of the covariance of the outputs at x with those at the evaluation inputs, all summed: (B, C)."""
    rows, others = energy.jacobian(x), energy.jacobian(evaluation)
    others = others if signs is None else others * signs.reshape(-1, 1)
    covariance = rows @ torch.linalg.solve(energy.hessian(), others.T)
    return covariance.sum(1).reshape(len(x), -1) / len(evaluation)


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
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
def test_what_is_no_evaluation_set(name: str) -> None:
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
        monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", 0)
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


@pytest.mark.parametrize("variant", ["mean", "absolute", "random"])
@pytest.mark.parametrize("weights", [None, lw.subnetwork(torch.tensor([1, 5, 13, 20, 24]))], ids=["all", "some"])
def test_files_hold_all_that_is_needed(variant: str, weights: Any, tmp_path: Path) -> None:
    energy = small()
    method = lw.HFL(mode="pretrained", variant=variant, pushes=4, calibration=held_out(energy))
    posterior = fitted(energy, method, weights=weights)
    posterior.save(tmp_path / "it")
    again = lw.load(tmp_path / "it", copied(energy).model)
    x = new(energy, 5)
    assert torch.equal(again.functions(x).cov, posterior.functions(x).cov)
    assert torch.equal(again.functions(x, joint=True).cov, posterior.functions(x, joint=True).cov)
    assert torch.equal(again.predict(x).std, posterior.predict(x).std)
    assert again.posterior.scale == posterior.posterior.scale != 1.0


def test_files_keep_what_was_found(tmp_path: Path) -> None:
    energy = copied(small("bernoulli", 1))
    energy.place(energy.theta + 0.02)
    posterior = pretrained(energy)
    assert "posterior standard deviations from the minimum" in posterior.posterior.findings[0]
    posterior.save(tmp_path / "it")
    assert lw.load(tmp_path / "it", energy.model).posterior.findings == posterior.posterior.findings


def moved_by(energy: Energy, size: float, evaluation: Tensor) -> Energy:
    """The average output so many of its deviations away from where it is at the minimum, to first order."""
    moved, slope = copied(energy), energy.jacobian(evaluation).mean(0)
    step = torch.linalg.solve(energy.hessian(), slope)
    moved.place(energy.theta + size * step / (slope @ step).sqrt())
    return moved


TUNED: dict[str, Any] = {"solver": "adam", "steps": 150, "learning_rate": 1e-2}


def test_a_twin_that_drifts_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_unfinished_random_pushes_are_taken_as_they_come() -> None:
    """With an infinite tolerance, from weights far from any minimum."""
    energy = copied(small("bernoulli", 1))
    energy.place(energy.theta + 0.5)
    method = {"solver": "adam", "steps": 10, "variant": "random", "pushes": 3}
    posterior = pretrained(energy, tolerance=math.inf, **method)
    assert bool(torch.isfinite(posterior.functions(new(energy)).variance).all())
    assert len(posterior.posterior.findings) == 1
    with pytest.raises(lw.errors.NumericalError, match="of 3 responses have not converged"):
        pretrained(energy, **method)


def test_single_weights() -> None:
    index = torch.tensor([1, 5, 13, 20, 24])
    energy = copied(small(), index=index)
    x, evaluation = new(energy, 5), new(energy, 9, seed=8)
    method = lw.HFL(mode="pretrained", evaluation=evaluation)
    score = fitted(energy, method, weights=lw.subnetwork(index)).posterior.scores(x)[1][0]
    assert off(score, responses(energy, x, evaluation)) < 1e-3


def test_a_strength_that_is_too_large_is_refused() -> None:
    energy = small()
    with pytest.raises(
        lw.errors.NumericalError, match=r"lam is 1e\+03; expected between .* Leave lam out to have it chosen"
    ):
        pretrained(energy, lam=1e3)


def test_unfinished_fine_tuning_is_refused() -> None:
    with pytest.raises(
        lw.errors.NumericalError, match=r"1 of 1 responses have not converged.*after 6 steps.*more steps"
    ):
        pretrained(small(), solver="adam", steps=6)


def test_all_data_are_in_the_random_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch or in two, where they are drawn from the data."""
    monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", 0)
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
