"""Inducing points that are learned: the best state on validation data, and the prior that it gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import lapwing as lw
from lapwing.methods.inducing import learning as module
from lapwing.methods.inducing.learning import COARSE, FINE, Validation
from tests.cases import BY_NAME
from tests.references import dense, inducing
from tests.tolerances import SOLVED, assert_close
from tests.unit.methods.sine import NOISE, D, classes, curve, fitted, model

MLP = BY_NAME["mlp"]


def scored(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scores of all looks, each with its best prior variance, as they are taken; not the fine choice at the end."""
    looks: list[float] = []
    original = Validation.log_likelihoods

    def noted(self: Validation, *given: Any) -> list[float]:
        found = original(self, *given)
        looks.extend([max(found)] if given[1] != FINE else [])
        return found

    monkeypatch.setattr(Validation, "log_likelihoods", noted)
    return looks


def misleading(gap: float) -> tuple[list[Any], list[Any]]:
    """Training data at the network's outputs, validation data further off than what is learned allows for."""
    x, _ = curve()
    with torch.no_grad():
        f = model()(x)
    near = f + 0.01 * torch.randn(f.shape, dtype=D, generator=torch.Generator().manual_seed(3))
    return [(x, near)], [(x[::2], f[::2] + gap)]


@pytest.mark.parametrize(("gap", "best"), [(1.0, 0), (0.35, 1)], ids=["the first", "one on the way"])
def test_the_best_state_is_kept_and_not_the_last(gap: float, best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variances shrink step by step, and with them the density of data that are further off."""
    looks = scored(monkeypatch)
    data, held_out = misleading(gap)
    method = lw.VaLLA(5, alpha=1.0, steps=60, learning_rate=0.05, patience=4)
    posterior = fitted(method, lw.Gaussian(noise_std=0.3), None, data=data, validation=held_out)
    assert posterior.trace is not None
    assert looks.index(max(looks)) == best
    assert len(looks) == max(best, 2) + 5  # two early ones, and four without a better one that ended it
    assert len(posterior.trace.steps) == 3 * (len(looks) - 2) < 60
    score = float(posterior.predict(held_out[0][0]).log_prob(held_out[0][1]).mean())
    assert score >= max(looks) - 1e-5
    assert looks[-1] < max(looks) - 1e-3
    without = fitted(method, lw.Gaussian(noise_std=0.3), None, data=data)
    assert float(without.predict(held_out[0][0]).log_prob(held_out[0][1]).mean()) < looks[-1]


@pytest.mark.parametrize("gap", [0.1, 0.35, 0.6])
def test_more_steps_do_not_lose_what_fewer_found(gap: float) -> None:
    """A state is judged with the prior variance that validation data choose for it, as it is at the end."""
    data, held_out = misleading(gap)
    score = lambda p: float(p.predict(held_out[0][0]).log_prob(held_out[0][1]).mean())
    method = lw.VaLLA(5, alpha=1.0, learning_rate=0.05, patience=4)
    fit = lambda n: fitted(replace(method, steps=n), lw.Gaussian(), None, data=data, validation=held_out)
    few, many = score(fit(8)), score(fit(120))
    assert many >= few - 1e-3
    assert few > score(fitted(lw.baselines.MapOnly(), lw.Gaussian(), data=data)) + 0.1


def test_validation_data_that_approve_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look is better than the one before, so that the last state is the best."""
    rising = iter(range(100))
    monkeypatch.setattr(
        Validation, "log_likelihoods", lambda self, points, factors: [float(next(rising))] * len(factors)
    )
    method = lw.VaLLA(4, alpha=1.0, steps=20)
    keep = lambda posterior: posterior  # a tuner that leaves what the method has learned
    one = fitted(method, lw.Gaussian(), None, validation=[curve(seed=1)])
    other = fitted(method, lw.Gaussian(), None, tuner=keep)
    x = curve()[0]
    assert_close(one.functions(x).cov, other.functions(x).cov, SOLVED)


def test_the_prior_variance_is_chosen_once_more_and_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one pass for all factors; what they score is what a posterior with that prior variance does."""
    scores: list[list[float]] = []
    original = Validation.log_likelihoods

    def noted(self: Validation, *given: Any) -> list[float]:
        found = original(self, *given)
        scores.append(found)
        return found

    monkeypatch.setattr(Validation, "log_likelihoods", noted)
    data, held_out = misleading(0.6)
    method = lw.VaLLA(5, alpha=1.0, steps=40, learning_rate=0.05)
    found = fitted(method, lw.Gaussian(noise_std=0.3), None, data=data, validation=held_out)
    *looks, last = scores
    assert all(len(look) == len(COARSE) for look in looks)
    assert len(last) == len(FINE)
    assert last[len(FINE) // 2] == pytest.approx(max(map(max, looks)), abs=1e-9)
    assert max(last) > last[len(FINE) // 2] + 1e-4
    score = float(found.predict(held_out[0][0]).log_prob(held_out[0][1]).mean())
    assert score == pytest.approx(max(last), abs=1e-5)
    given = fitted(
        method, lw.Gaussian(noise_std=0.3), 0.5, data=data, validation=held_out
    )  # a prior that is given stays
    assert float(given.prior.values) == 0.5


def test_the_prior_variance_is_looked_for_further_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the best of the factors is the last of them; and where that never ends, it is said."""
    data, held_out = misleading(0.6)
    method = lw.VaLLA(5, alpha=1.0, steps=40, learning_rate=0.05)
    score = lambda p: float(p.predict(held_out[0][0]).log_prob(held_out[0][1]).mean())
    fit = lambda: fitted(method, lw.Gaussian(noise_std=0.3), None, data=data, validation=held_out)
    monkeypatch.setattr(module, "COARSE", (1.0,))
    wide = fit()
    monkeypatch.setattr(module, "FINE", (0.95, 1.0, 1.05))
    monkeypatch.setattr(module, "ROUNDS", 100)
    narrow = fit()
    assert score(narrow) == pytest.approx(score(wide), abs=2e-3)
    assert narrow.trace is not None
    assert narrow.trace.findings == ()
    monkeypatch.setattr(module, "ROUNDS", 2)
    unfinished = fit()
    assert score(unfinished) < score(wide) - 1e-2
    assert unfinished.trace is not None
    assert "prefer a prior variance beyond the range that was tried" in unfinished.trace.findings[-1]


def test_what_validation_data_chose_is_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the evidence, which alpha 0 has, and which may see it otherwise."""
    looks = scored(monkeypatch)
    data, held_out = misleading(1.0)
    method = lw.VaLLA(5, optimiser="adam", steps=40, learning_rate=0.05)
    posterior = fitted(method, lw.Gaussian(noise_std=0.3), None, data=data, validation=held_out)
    assert float(posterior.predict(held_out[0][0]).log_prob(held_out[0][1]).mean()) > max(looks) - 0.05
    assert not posterior.posterior.problem.learn_prior
    tuned = posterior.tuned(lw.tuners.MaximiseEvidence())
    assert float(tuned.predict(held_out[0][0]).log_prob(held_out[0][1]).mean()) < max(looks) - 0.5


def test_validation_data_for_the_bound() -> None:
    """With alpha 0 they choose the locations; what the points know is in closed form all the same."""
    posterior = fitted(lw.VaLLA(5, steps=20), validation=[curve(20, 5)])
    anchors = posterior.posterior.curvature.anchors
    z = dense.jacobian(model(), anchors.inputs, 5).flatten(0, 1)
    jac = dense.jacobian(model(), curve()[0], 40).flatten(0, 1)
    x = torch.linspace(-3, 3, 7, dtype=D)[:, None]
    new = dense.jacobian(model(), x, 7).flatten(0, 1)
    expected = inducing.covariance(new, z, jac, torch.eye(40, dtype=D) / NOISE**2, torch.full((25,), 0.5, dtype=D))
    assert_close(posterior.functions(x, joint=True).cov.reshape(7, 7), expected, SOLVED)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("likelihood", ["labels", "classes"])
def test_ignored_validation_targets_are_refused(likelihood: str, alpha: float) -> None:
    """They would be scored as if they were known."""
    x, y = classes()
    targets = (x[:, :3] > 0).double() if likelihood == "labels" else y
    chosen = lw.Bernoulli(ignore_index=-1) if likelihood == "labels" else lw.Categorical(ignore_index=-1)
    held = targets.clone()
    held[4] = -1
    method = lw.VaLLA(4, alpha=alpha, optimiser="adam", steps=3)
    with pytest.raises(lw.errors.DataError, match="some validation targets are ignored ones"):
        lw.fit(MLP.build(), [(x, targets)], chosen, method=method, prior=0.5, validation=[(x, held)])


def test_points_at_all_data_get_the_prior_that_validation_data_want() -> None:
    """Nothing moves there, but the prior is still to be chosen."""
    x, _ = curve()
    held = [curve(30, seed=5)]
    found = fitted(lw.VaLLA(len(x), steps=100, learning_rate=0.05), prior=None, validation=held)
    score = lambda posterior: float(posterior.predict(held[0][0]).log_prob(held[0][1]).mean())
    assert found.trace is not None
    for factor in (0.5, 2.0):
        other = found.with_prior(lw.isotropic(factor * float(found.prior.values)))
        assert score(other) < score(found)
    same = fitted(lw.Full(), prior=float(found.prior.values))
    assert_close(found.functions(x).variance, same.functions(x).variance, SOLVED)


def test_validation_data_are_named_where_they_do_not_fit() -> None:
    for count in (5, 100):
        with pytest.raises(lw.errors.DataError, match="validation is 3; expected a DataLoader"):
            fitted(lw.VaLLA(count), validation=3)
        with pytest.raises(lw.errors.DataError, match="inputs of batch 0 of validation: 1 of 2 entries are NaN"):
            fitted(lw.VaLLA(count), validation=[(torch.tensor([[torch.nan], [0.0]], dtype=D), torch.zeros(2, 1))])
