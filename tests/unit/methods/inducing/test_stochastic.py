"""Inducing points learned on batches: natural-gradient steps, objective, prior and noise, cost of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.inputs import Batch
from lapwing.linalg.dense import smooth_whitening
from lapwing.linalg.stochastic import Inducing
from lapwing.methods.inducing.learning import Stochastic, learn_collapsed, learn_stochastic
from lapwing.methods.inducing.points import Anchors, InducingPoints, whitened_rows
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense, inducing
from tests.tolerances import SOLVED, assert_close
from tests.unit.methods.sine import NOISE, D, classes, curve, exact, fitted, model

CPU = torch.device("cpu")


MLP = BY_NAME["mlp"]


def fixed_points(prior: Any = 0.5, count: int = 6) -> tuple[InducingPoints, Data]:
    """Points away from the data."""
    problem = replace(fitted(lw.Full(), prior=prior).posterior.problem, learn_prior=False)
    anchors = Anchors(problem.network, torch.linspace(-2.5, 2.5, count, dtype=D)[:, None], torch.zeros(count).long())
    return InducingPoints(problem, anchors, exact().posterior.statistics, 40, False), Data([curve()], CPU)


def test_a_natural_gradient_step_on_all_data_is_the_closed_form() -> None:
    """A step of length one from any state gives I + Σ T Λ Tᵀ / φ, and with it the same posterior."""
    start, data = fixed_points()
    state = Stochastic.of(start, 0.0)
    state.inducing = Inducing(3 * torch.eye(6, dtype=D))
    state.step(Batch(*curve()), None, 1.0)
    white = smooth_whitening(start.anchors.kernel(start.problem.prior))
    jac = dense.jacobian(model(), curve()[0], 40).flatten(0, 1)
    z = dense.jacobian(model(), start.anchors.inputs, 6).flatten(0, 1)
    rows = inducing.kernel(jac, z, start.problem.prior.vector) @ white
    assert_close(state.inducing.precision, torch.eye(6, dtype=D) + rows.T @ rows / NOISE**2, SOLVED)
    closed = start.posterior(data)
    learned = replace(start, inducing=state.inducing).posterior(data)
    x = torch.linspace(-4, 4, 9, dtype=D)[:, None]
    assert_close(learned(x).cov, closed(x).cov, 0.4)
    exact_cov = inducing.covariance(dense.jacobian(model(), x, 9).flatten(0, 1), z, jac, torch.eye(40, dtype=D) / 0.04,
                                    start.problem.prior.vector)  # fmt: skip
    assert_close(closed(x, joint=True).cov.reshape(9, 9), exact_cov, SOLVED)


def test_weighted_batches_average_to_the_closed_form() -> None:
    """Every datum once, in steps of length 1, 1/2, 1/3, ...: each batch is an estimate for all data."""
    start, _ = fixed_points()
    one, other = (Stochastic.of(start, 0.0) for _ in range(2))
    one.step(Batch(*curve()), None, 1.0)
    for i, rows in enumerate(torch.arange(40).split(10)):
        other.step(Batch(*(t[rows] for t in curve())), None, 1 / (i + 1))
    assert_close(other.inducing.precision, one.inducing.precision, SOLVED)


@pytest.mark.parametrize("learn", [False, True])
def test_the_objective_of_a_step_is_the_bound(learn: bool) -> None:
    """At the optimal covariance it is minus the log evidence, without the size of the weights if the prior is given."""
    start, data = fixed_points()
    start = replace(start, problem=replace(start.problem, learn_prior=learn), log_scale=torch.tensor(0.4, dtype=D))
    state = Stochastic.of(start, 0.0)
    state.step(Batch(*curve()), None, 1.0)
    value, divergence = state.step(Batch(*curve()), None, 1.0)
    closed = start.posterior(data)
    penalty = 0.0 if learn else 0.5 * float(closed.problem.prior.penalty(closed.theta))
    assert -value == pytest.approx(float(closed.log_evidence()) + penalty, rel=1e-5)
    assert divergence == pytest.approx(float(state.inducing.divergence()))


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_posterior_has_the_learned_covariance(alpha: float) -> None:
    """Prior and noise of the last state included."""
    start, data = fixed_points()
    start = replace(start, problem=replace(start.problem, learn_prior=True))
    state = Stochastic.of(start, alpha)
    log_scale, log_noise = torch.tensor(0.7, dtype=D), torch.tensor(-2.0, dtype=D)
    state.points = replace(start, log_scale=log_scale, log_noise=log_noise)
    for length in (1.0, 0.5, 0.3):
        state.step(Batch(*curve()), None, length)
    x = torch.linspace(-4, 4, 9, dtype=D)[:, None]
    with torch.no_grad():
        white = smooth_whitening(start.anchors.kernel(start.problem.prior))
        _, _, before, rows = whitened_rows(start.problem, Batch(x, x), start.anchors.parts, white)
        s = log_scale.exp()
        expected = state.inducing.posterior_cov(s * before, s.sqrt() * rows)
    found = state.snapshot().posterior(data)
    assert_close(found(x).cov, expected, 0.4)
    assert float(found.problem.prior.values) == pytest.approx(0.5 * math.exp(-0.7))
    assert float(found.problem.likelihood.dispersion) == pytest.approx(math.exp(-2.0))


def test_locations_and_prior_are_learned_together() -> None:
    """At the end of the search the bound is flat in the precision too, without a tuner."""
    found, data = fixed_points(count=5)
    free = replace(found, problem=replace(found.problem, learn_prior=True), movable=True)
    one = learn_collapsed(free, data, 300).posterior(data)
    precision = float(one.problem.prior.values)
    moved = lambda f: one.with_problem(
        one.problem.with_prior(one.problem.prior.with_precision(torch.tensor(f * precision)))
    )
    bounds = [float(moved(f).log_evidence()) for f in (0.98, 1.0, 1.02)]
    assert bounds[1] > max(bounds[0], bounds[2])
    assert precision != pytest.approx(0.5, rel=0.1)
    settings = lw.VaLLA(steps=60, learning_rate=0.05)
    other = learn_stochastic(free, data, settings, torch.Generator().manual_seed(0)).posterior(data)
    assert 0.5 < float(other.problem.prior.values) / precision < 2


def test_predicting_learns_prior_and_noise() -> None:
    """The training data are more likely than under the posterior of the highest evidence."""
    keep = lambda posterior: posterior  # a tuner that leaves what the method has learned
    posterior = fitted(lw.VaLLA(6, alpha=1.0, steps=60, learning_rate=0.03), lw.Gaussian(), None, tuner=keep)
    assert posterior.trace is not None
    first, last = posterior.trace.steps[0], posterior.trace.steps[-1]
    assert posterior.trace.score == "energy"
    assert last.score > first.score
    assert last.precisions != first.precisions
    assert last.noise != first.noise
    x, y = curve()
    assert float(posterior.predict(x).log_prob(y).mean()) > float(exact(True).predict(x).log_prob(y).mean())
    assert float(posterior.prior.values) == pytest.approx(last.precisions[0], rel=0.1)


@pytest.mark.parametrize(
    "likelihood",
    [lw.Categorical(), lw.Categorical(link="bridge"), lw.Bernoulli(), lw.Poisson()],
    ids=["classes", "bridge", "labels", "counts"],
)
def test_predicting_classes_and_counts(likelihood: Any) -> None:
    x, y = classes()
    other = (5 * x[:, :3].abs()).long() if isinstance(likelihood, lw.Poisson) else (x[:, :3] > 0).long()
    targets = y if isinstance(likelihood, lw.Categorical) else other
    posterior = lw.fit(MLP.build(), [(x, targets)], likelihood, method=lw.VaLLA(9, alpha=1.0, steps=40))
    plain = lw.fit(MLP.build(), [(x, targets)], likelihood, method=lw.baselines.MapOnly())
    assert float(posterior.predict(x).log_prob(targets).mean()) > float(plain.predict(x).log_prob(targets).mean())


def best_covariance(rows: Tensor, gap: Tensor, alpha: float, noise: float) -> Tensor:
    """Variances at the data for the S^-1 = I + L L' of the least objective, by L-BFGS. Rows are J A^-1/2."""
    values, basis = torch.linalg.eigh(rows @ rows.mT)
    kept = values > 1e-9 * values[-1]
    white = basis[:, kept] * values[kept].sqrt()
    size = white.shape[1]
    free = (0.1 * torch.eye(size, dtype=D)).requires_grad_()

    def spread() -> tuple[Tensor, Tensor, Tensor]:
        precision = torch.eye(size, dtype=D) + free @ free.mT
        s = torch.linalg.inv(precision)
        return ((white @ s) * white).sum(1), s, precision

    def objective() -> Tensor:
        optimiser.zero_grad()
        v, s, precision = spread()
        energies = -0.5 * (gap / (noise + alpha * v) + torch.log1p(alpha * v / noise) / alpha)
        value = -energies.sum() + 0.5 * (s.trace() + torch.logdet(precision))
        value.backward()
        return value

    optimiser = torch.optim.LBFGS([free], max_iter=100, line_search_fn="strong_wolfe", tolerance_change=1e-13)
    with torch.enable_grad():
        for _ in range(3):
            optimiser.step(objective)
    return spread()[0].detach()


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_covariance_is_the_best_for_its_objective(alpha: float) -> None:
    """Also if some data are far from the network's output and would prefer a variance above the prior's."""
    x, y = curve()
    y = y.clone()
    y[::5] += 1.0
    method = lw.VaLLA(40, alpha=alpha, steps=400, batch_size=40)
    posterior = fitted(method, data=[(x, y)])
    with torch.no_grad():
        gap = (y - model()(x)).square()[:, 0]
    rows = dense.jacobian(model(), x, 40).flatten(0, 1) / math.sqrt(0.5)
    expected = best_covariance(rows, gap, alpha, NOISE**2)
    torch.testing.assert_close(posterior.functions(x).variance[:, 0], expected, rtol=1e-3, atol=1e-6)


def test_between_bound_and_prediction_the_prior_variance_converges() -> None:
    """Without the prior's part of the bound it would shrink with every step."""
    method = lw.VaLLA(6, alpha=0.8, learning_rate=0.05)
    few, many = (float(fitted(replace(method, steps=n), "regression", None).prior.values) for n in (60, 180))
    assert many == pytest.approx(few, rel=0.1)
    assert many < 10 * float(exact(learned=True).prior.values)


@pytest.mark.parametrize("noise", [0.2, 0.003])
def test_with_all_data_the_objective_falls_and_converges(noise: float) -> None:
    """Also if the noise is far below the residuals, where full natural-gradient steps oscillate."""
    fit = lambda steps: fitted(lw.VaLLA(40, alpha=0.1, steps=steps), lw.Gaussian(noise_std=noise), 1.0)
    trace, few = fit(None).trace, fit(3).trace
    assert trace is not None
    assert few is not None
    scores = [step.score for step in trace.steps]
    assert all(after > before - 1e-9 for before, after in pairwise(scores))
    assert scores[-1] == pytest.approx(scores[-min(20, len(scores) // 2)], abs=1e-2)
    assert trace.findings == ()
    assert "objective still changes by" in few.findings[-1]


class Loader:
    """Batches that are made on iteration."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = curve()
        order = x[:, 0].argsort()
        return zip(x[order].split(self.size), y[order].split(self.size), strict=True)


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_how_sorted_data_are_cut_does_not_matter(alpha: float) -> None:
    """Rows are drawn from all data, not from one batch of the loader."""
    q = torch.linspace(-2, 2, 9, dtype=D)[:, None]
    method = lw.VaLLA(5, alpha=alpha, steps=10, batch_size=10)
    whole = fitted(method, data=list(Loader(40))).functions(q).cov
    for data in (list(Loader(1)), Loader(7), list(Loader(10)), Loader(10)):
        assert_close(fitted(method, data=data).functions(q).cov, whole, SOLVED)


def rows_run(count: int, batches: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of rows that the network ran on in each step but the first."""
    seen, marks = [0], []
    network = model()
    network.register_forward_pre_hook(lambda _, args: seen.__setitem__(0, seen[0] + len(args[0])))
    original = Stochastic.step

    def noted(self: Stochastic, *args: Any) -> Any:
        found = original(self, *args)
        marks.append(seen[0])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Stochastic, "step", noted)
        data = problems.split(*curve(count), (count // batches,) * batches)
        fitted(lw.VaLLA(5, optimiser="adam", steps=6, batch_size=10, candidates=30), model=network, data=data)
    return [b - a for a, b in pairwise(marks)]


def test_the_cost_of_a_step_does_not_grow_with_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a batch and the points, for few data in one batch and for many in several."""
    few, many, several = (rows_run(n, b, monkeypatch) for n, b in ((100, 1), (2000, 1), (2000, 20)))
    assert few == many == several == [15] * 5


def test_an_objective_that_is_not_finite_is_refused() -> None:
    with pytest.raises(
        lw.errors.NumericalError, match=r"VaLLA: the objective is \S+ at step \d+.* Lower learning_rate"
    ):
        fitted(lw.VaLLA(4, alpha=1.0, learning_rate=1e4, steps=50), lw.Gaussian(), None)


def test_a_step_in_parts_is_the_step_on_the_whole_batch() -> None:
    """One part for each datum: objective, covariance, locations and prior after two steps, to rounding."""
    ends = []
    for size in ("1GiB", 1):
        start, _ = fixed_points()
        problem = replace(start.problem, learn_prior=True)
        state = Stochastic.of(replace(start, problem=problem, movable=True), 0.5)
        optimiser = state.optimiser(0.1)
        with lw.memory.limited(size):
            values = [state.step(Batch(*curve()), optimiser, 0.5)[0] for _ in range(2)]
        assert state.moves is not None
        values = torch.tensor(values, dtype=D)
        ends.append((values, state.inducing.average, state.moves.detach(), state.points.log_scale.detach()))
    for whole, parts in zip(*ends, strict=True):
        assert_close(parts, whole, SOLVED)
