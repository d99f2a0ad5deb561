"""Inducing points that are learned: by which steps, on what, and what they leave alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.core.data import Batch, Data
from lapwing.core.trace import Step
from lapwing.linalg.variational import Inducing
from lapwing.linalg.whitening import smooth_whitening
from lapwing.methods.inducing import valla as module
from lapwing.methods.inducing.anchored import AnchoredCurvature
from lapwing.methods.inducing.anchors import Anchors
from lapwing.methods.inducing.collapsed import learn_collapsed
from lapwing.methods.inducing.points import InducingPoints
from lapwing.methods.inducing.rows import whitened_rows
from lapwing.methods.inducing.stochastic import Stochastic, StochasticSettings, learn_stochastic
from tests import problems
from tests.cases import BY_NAME, CASES
from tests.references import dense, inducing
from tests.tolerances import SOLVED, assert_close, assert_within
from tests.unit.methods.sine import GIVEN, NOISE, D, classes, curve, exact, fitted, model

CPU = torch.device("cpu")
MLP = BY_NAME["mlp"]

# Locations on the bound.


@pytest.mark.parametrize("start", ["greedy", "kmeans", "random"])
@pytest.mark.parametrize("count", [3, 6])
def test_learning_raises_the_bound(count: int, start: str) -> None:
    """From every start to the same place, below the evidence."""
    before, after = (
        float(fitted(lw.VaLLA(count, start=start, optimiser=way)).log_evidence()) for way in ("none", "lbfgs")
    )
    best = float(fitted(lw.VaLLA(count, optimiser="lbfgs")).log_evidence())
    assert before < after <= float(exact().log_evidence())
    assert after == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("count", [3, 5])
def test_both_ways_of_learning_reach_the_same_bound(count: int) -> None:
    """All data at once with L-BFGS, and batches with Adam."""
    one = fitted(lw.VaLLA(count, optimiser="lbfgs"))
    other = fitted(lw.VaLLA(count, optimiser="adam", steps=80, learning_rate=0.05))
    assert float(other.log_evidence()) == pytest.approx(float(one.log_evidence()), rel=1e-3)
    few = fitted(lw.VaLLA(count, optimiser="adam", steps=80, learning_rate=0.05, batch_size=10))
    start = float(fitted(lw.VaLLA(count, optimiser="none")).log_evidence())
    assert float(few.log_evidence()) > 0.5 * (start + float(one.log_evidence()))


def test_enough_learned_points_are_as_good_as_all_data() -> None:
    found, x = fitted(lw.VaLLA(15)), torch.linspace(-4, 4, 30, dtype=D)[:, None]
    assert float(found.log_evidence()) == pytest.approx(float(exact().log_evidence()), abs=1e-3)
    assert_close(found.functions(x).variance, exact().functions(x).variance, 0.2)


@pytest.mark.parametrize("likelihood", ["classification", "labels", "counts"])
def test_other_likelihoods(likelihood: str) -> None:
    """There the bound is that of the Laplace evidence, whose curvature is at the network's own outputs."""
    x, y = classes()
    targets = {"classification": y, "labels": (x[:, :3] > 0).long(), "counts": (2 * x[:, :3].abs()).long()}[likelihood]
    chosen = {"classification": lw.Categorical(), "labels": lw.Bernoulli(), "counts": lw.Poisson()}[likelihood]
    fit = lambda m: lw.fit(MLP.build(), [(x, targets)], chosen, method=m, prior=0.5)
    bounds = [float(fit(lw.VaLLA(8, optimiser=way, steps=20)).log_evidence()) for way in ("none", "lbfgs", "adam")]
    assert bounds[0] < min(bounds[1:])
    assert max(bounds) < float(fit(lw.Full()).log_evidence())


def test_the_trace_is_the_bound_as_it_rises() -> None:
    """Less what no location changes: the fit and the size of the weights."""
    found = fitted(lw.VaLLA(5, optimiser="lbfgs"))
    assert found.trace is not None
    scores = [step.score for step in found.trace.steps]
    assert (found.trace.tuner, found.trace.score) == ("VaLLA", "bound")
    fixed = found.posterior.log_likelihood() - 0.5 * found.prior.penalty(found.posterior.theta)
    assert max(scores) == pytest.approx(float(found.log_evidence() - fixed), rel=1e-6)
    assert scores[-1] > scores[0]
    assert found.trace.findings == ()


def test_without_a_start_the_better_of_two_is_kept() -> None:
    """Each ends where its search leads; here they differ."""
    ends = {start: float(fitted(lw.VaLLA(6, start=start, optimiser="lbfgs", steps=4)).log_evidence())
            for start in ("greedy", "trace", None)}  # fmt: skip
    assert ends["greedy"] != pytest.approx(ends["trace"], rel=1e-3)
    assert ends[None] == pytest.approx(max(ends["greedy"], ends["trace"]), rel=1e-9)


def test_steps_that_lose_the_bound_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the start, which the trace tells; validation data may want it otherwise, and then have their way."""
    lost = torch.full((4, 1), 3.0, dtype=D) + torch.arange(4, dtype=D)[:, None]
    step = Step(0.0, (0.5,))
    monkeypatch.setattr(
        module,
        "learn_stochastic",
        lambda points, data, settings, generator: replace(
            points,
            anchors=points.anchors.at(lost),
            steps=(step,),
            problem=points.problem if settings.validation is None else points.problem.with_known_prior(),
        ),
    )
    begun = fitted(lw.VaLLA(4, optimiser="none"))
    back = fitted(lw.VaLLA(4, optimiser="adam"))
    assert torch.equal(back.curvature.anchors.inputs, begun.curvature.anchors.inputs)
    assert back.trace is not None
    assert back.trace.findings == ("the initial locations have a higher bound than the learned ones and are kept",)
    wanted = fitted(lw.VaLLA(4, optimiser="adam", validation=[curve()]))
    assert torch.equal(wanted.curvature.anchors.inputs, lost)
    assert wanted.log_evidence() < begun.log_evidence()


def test_a_search_that_is_cut_short_says_so() -> None:
    found = fitted(lw.VaLLA(5, optimiser="lbfgs", steps=2))
    assert found.trace is not None
    assert found.trace.findings == ("the search did not converge in 2 steps and the bound still rises; raise steps",)


def test_a_default_for_few_data_and_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for way in ("learn_collapsed", "learn_stochastic"):
        monkeypatch.setattr(module, way, lambda points, *_, way=way: used.append(way) or points)
    fitted(lw.VaLLA(5))
    fitted(lw.VaLLA(5, validation=[curve()]))
    fitted(lw.VaLLA(5, alpha=1.0))
    many = torch.linspace(-2, 2, 20_001, dtype=D)[:, None]
    fitted(lw.VaLLA(5, candidates=50), data=[(many, many)])
    fitted(lw.VaLLA(40))
    assert used == ["learn_collapsed"] * 2 + ["learn_stochastic"] * 3  # few data: from two starts


# What the points know.


def fixed_points(prior: Any = 0.5, count: int = 6) -> tuple[InducingPoints, Data]:
    """Points away from the data."""
    problem = replace(fitted(lw.Full(), prior=prior).problem, learn_prior=False)
    anchors = Anchors(problem.network, torch.linspace(-2.5, 2.5, count, dtype=D)[:, None], torch.zeros(count).long())
    return InducingPoints(problem, anchors, exact().posterior.statistics, 40, False), Data([curve()], CPU)


def learning(points: InducingPoints, data: Data, alpha: float = 0.0) -> Stochastic:
    return Stochastic.of(points, data, StochasticSettings(alpha), torch.Generator().manual_seed(0))


def test_a_natural_gradient_step_on_all_data_is_the_closed_form() -> None:
    """Of length one, from wherever: I + Σ T Λ Tᵀ / φ, and with it the same posterior."""
    start, data = fixed_points()
    state = learning(start, data)
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


def test_batches_weighed_by_their_share_average_to_the_closed_form() -> None:
    """Every datum once, in steps of length 1, 1/2, 1/3, ...: each batch stands for all."""
    start, data = fixed_points()
    one, other = (learning(start, data) for _ in range(2))
    one.step(Batch(*curve()), None, 1.0)
    for i, rows in enumerate(torch.arange(40).split(10)):
        other.step(Batch(*(t[rows] for t in curve())), None, 1 / (i + 1))
    assert_close(other.inducing.precision, one.inducing.precision, SOLVED)


@pytest.mark.parametrize("learn", [False, True])
def test_the_objective_of_a_step_is_the_bound(learn: bool) -> None:
    """At the closed form of what the points know: minus log evidence; the size of the weights counts where it can
    change anything, which is where the prior is learned."""
    start, data = fixed_points()
    start = replace(start, problem=replace(start.problem, learn_prior=learn), log_scale=torch.tensor(0.4, dtype=D))
    state = learning(start, data)
    state.log_scale = start.log_scale
    state.step(Batch(*curve()), None, 1.0)
    value, divergence = state.step(Batch(*curve()), None, 1.0)
    closed = start.posterior(data)
    penalty = 0.0 if learn else 0.5 * float(closed.problem.prior.penalty(closed.theta))
    assert -value == pytest.approx(float(closed.log_evidence()) + penalty, rel=1e-5)
    assert divergence == pytest.approx(float(state.inducing.divergence()))


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_what_predicting_teaches_is_kept_as_it_was_learned(alpha: float) -> None:
    """The posterior's covariance is that of the last state, scaled prior and noise included."""
    start, data = fixed_points()
    start = replace(start, problem=replace(start.problem, learn_prior=True))
    state = learning(start, data, alpha)
    state.log_scale, state.log_noise = torch.tensor(0.7, dtype=D), torch.tensor(-2.0, dtype=D)
    for length in (1.0, 0.5, 0.3):
        state.step(Batch(*curve()), None, length)
    x = torch.linspace(-4, 4, 9, dtype=D)[:, None]
    with torch.no_grad():
        white = smooth_whitening(start.anchors.kernel(start.problem.prior))
        _, _, before, rows = whitened_rows(start.problem, Batch(x, x), start.anchors.parts, white)
        s = state.log_scale.exp()
        expected = state.inducing.left(s * before, s.sqrt() * rows)
    ended = replace(start, log_scale=state.log_scale, log_noise=state.log_noise, inducing=state.inducing)
    found = ended.posterior(data)
    assert_close(found(x).cov, expected, 0.4)
    assert float(found.problem.prior.values) == pytest.approx(0.5 * math.exp(-0.7))
    assert float(found.problem.likelihood.dispersion) == pytest.approx(math.exp(-2.0))


# Prior and noise.


@pytest.mark.parametrize("way", ["lbfgs", "adam"])
def test_the_prior_is_learned_where_none_is_given(way: str) -> None:
    """With enough points near the evidence's own optimum, and the noise as it is everywhere: the residual's."""
    found = fitted(lw.VaLLA(12, optimiser=way, steps=60), lw.Gaussian(), None)
    assert float(found.prior.values) == pytest.approx(float(exact(True).prior.values), rel=0.1)
    assert float(found.likelihood.dispersion) == pytest.approx(float(exact(True).likelihood.dispersion), rel=1e-12)
    around = [float(found.with_prior(float(found.prior.values) * f).log_evidence()) for f in (0.97, 1.0, 1.03)]
    assert around[1] > max(around[0], around[2])


def test_locations_and_prior_are_learned_together() -> None:
    """Where the search ends the bound is flat in the precision too, before any tuner has seen it."""
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
    settings = StochasticSettings(steps=60, learning_rate=0.05)
    other = learn_stochastic(free, data, settings, torch.Generator().manual_seed(0)).posterior(data)
    assert 0.5 < float(other.problem.prior.values) / precision < 2


@pytest.mark.parametrize(("way", "alpha"), [("lbfgs", 0.0), ("adam", 0.0), ("none", 0.0), ("adam", 1.0)])
def test_a_given_prior_stays_as_it_was_given(way: str, alpha: float) -> None:
    prior = lw.per_layer(torch.tensor([0.3, 0.7], dtype=D))
    found = fitted(lw.VaLLA(4, alpha=alpha, optimiser=way, steps=5), lw.Gaussian(), prior)
    assert found.prior.values.tolist() == [0.3, 0.7]
    assert found.prior.kind == "per_layer"


def test_predicting_learns_prior_and_noise() -> None:
    """And fits the data better than the evidence does, which is no merit by itself."""
    found = fitted(lw.VaLLA(6, alpha=1.0, steps=60, learning_rate=0.03), lw.Gaussian(), None)
    assert found.trace is not None
    first, last = found.trace.steps[0], found.trace.steps[-1]
    assert found.trace.score == "energy"
    assert last.score > first.score
    assert last.precisions != first.precisions
    assert last.noise != first.noise
    x, y = curve()
    assert float(found.predict(x).log_prob(y).mean()) > float(exact(True).predict(x).log_prob(y).mean())
    assert float(found.prior.values) == pytest.approx(last.precisions[0], rel=0.1)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_a_given_noise_stays_as_it_was_given(alpha: float) -> None:
    found = fitted(lw.VaLLA(4, alpha=alpha, steps=5), GIVEN, None)
    assert float(found.likelihood.dispersion) == pytest.approx(NOISE**2, rel=1e-12)


@pytest.mark.parametrize(
    "likelihood",
    [lw.Categorical(), lw.Categorical(link="bridge"), lw.Bernoulli(), lw.Poisson()],
    ids=["classes", "bridge", "labels", "counts"],
)
def test_predicting_classes_and_counts(likelihood: Any) -> None:
    x, y = classes()
    other = (5 * x[:, :3].abs()).long() if isinstance(likelihood, lw.Poisson) else (x[:, :3] > 0).long()
    targets = y if isinstance(likelihood, lw.Categorical) else other
    found = lw.fit(MLP.build(), [(x, targets)], likelihood, method=lw.VaLLA(9, alpha=1.0, steps=40))
    plain = lw.fit(MLP.build(), [(x, targets)], likelihood, method=lw.baselines.MapOnly())
    assert float(found.predict(x).log_prob(targets).mean()) > float(plain.predict(x).log_prob(targets).mean())


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
    """Also where some data are far from the network, and would have more variance than the prior has."""
    x, y = curve()
    y = y.clone()
    y[::5] += 1.0
    method = lw.VaLLA(40, alpha=alpha, steps=400, batch_size=40)
    found = fitted(method, data=[(x, y)])
    with torch.no_grad():
        gap = (y - model()(x)).square()[:, 0]
    rows = dense.jacobian(model(), x, 40).flatten(0, 1) / math.sqrt(0.5)
    expected = best_covariance(rows, gap, alpha, NOISE**2)
    torch.testing.assert_close(found.functions(x).variance[:, 0], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.1, 0.8])
def test_between_bound_and_prediction_the_prior_variance_is_held_up(alpha: float) -> None:
    """Without the prior's part of the bound it would go to nought, and the further the more steps there are."""
    method = lw.VaLLA(6, alpha=alpha, learning_rate=0.05)
    few, many = (float(fitted(replace(method, steps=n), "regression", None).prior.values) for n in (60, 180))
    assert many == pytest.approx(few, rel=0.1)
    assert many < 10 * float(exact(learned=True).prior.values)


@pytest.mark.parametrize("noise", [0.2, 0.003])
def test_with_all_data_the_objective_falls_and_settles(noise: float) -> None:
    """Though noise is far below the residuals: each datum alone wants a large variance, all together a small one."""
    fit = lambda steps: fitted(lw.VaLLA(40, alpha=0.1, steps=steps), lw.Gaussian(noise_std=noise), 1.0)
    found, few = fit(None).trace, fit(3).trace
    assert found is not None
    assert few is not None
    scores = [step.score for step in found.steps]
    assert all(after > before - 1e-9 for before, after in pairwise(scores))
    assert scores[-1] == pytest.approx(scores[-min(20, len(scores) // 2)], abs=1e-2)
    assert found.findings == ()
    assert "objective still changes by" in few.findings[-1]


# Batches.


class Loader:
    """Batches that are made when they are asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = curve()
        order = x[:, 0].argsort()
        return zip(x[order].split(self.size), y[order].split(self.size), strict=True)


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_how_sorted_data_are_cut_does_not_matter(alpha: float) -> None:
    """A batch of one row, or of neighbours, would stand for all data."""
    q = torch.linspace(-2, 2, 9, dtype=D)[:, None]
    method = lw.VaLLA(5, alpha=alpha, steps=10, batch_size=10)
    whole = fitted(method, data=list(Loader(40))).functions(q).cov
    for data in (list(Loader(1)), Loader(7), list(Loader(10)), Loader(10)):
        assert_close(fitted(method, data=data).functions(q).cov, whole, SOLVED)


# Inputs that all samples share.


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (7, 5), (4, 4, 4)])
@pytest.mark.parametrize("method", [lw.VaLLA(100), lw.VaLLA(5, candidates=5, optimiser="none"), lw.VaLLA(5, steps=4)])
def test_a_context_for_all_samples(method: lw.VaLLA, sizes: tuple[int, ...]) -> None:
    """How the data are cut does not matter, and at all data the posterior is the exact one."""
    torch.manual_seed(0)
    network, context = problems.InContext().double(), 0.3 * torch.randn(5, 3, dtype=D)
    x, y = torch.randn(12, 3, dtype=D), torch.randn(12, 1, dtype=D)
    cut = lambda some: [((a, context), b) for a, b in problems.split(x, y, some)]
    fit = lambda m, some: lw.fit(network, cut(some), GIVEN, method=m, prior=1.0)
    found, new = fit(method, sizes), (x[:8] + 0.1, context)
    assert_close(found.functions(new).cov, fit(method, (12,)).functions(new).cov, SOLVED)
    if method.num_inducing == 100:
        assert_close(found.functions(new).cov, fit(lw.Full(), (12,)).functions(new).cov, SOLVED)
        assert_close(found.log_evidence(), fit(lw.Full(), (12,)).log_evidence(), SOLVED)
    learned = fit(lw.VaLLA(4, alpha=1.0, steps=5, batch_size=6), sizes).functions(new).cov
    assert_close(learned, fit(lw.VaLLA(4, alpha=1.0, steps=5, batch_size=6), (12,)).functions(new).cov, SOLVED)


@pytest.mark.parametrize(("precision", "noise", "allowed"), [(1e-4, 0.01, 1e-2), (1e-2, 0.1, 1e-4), (1.0, 0.2, 1e-6)])
def test_all_data_are_exact_under_a_weak_prior_too(precision: float, noise: float, allowed: float) -> None:
    """Directions that are small in the kernel are decided by the data where prior and noise are."""
    x = torch.linspace(-3, 3, 120, dtype=D)[:, None]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    fit = lambda m: lw.fit(network, [(x, x.sin())], lw.Gaussian(noise_std=noise), method=m, prior=precision)
    found, full, new = fit(lw.VaLLA(120)), fit(lw.Full()), torch.linspace(-5, 5, 21, dtype=D)[:, None]
    ratio = found.functions(new).variance / full.functions(new).variance
    assert float((ratio - 1).abs().max()) < allowed
    assert float((found.log_evidence() - full.log_evidence()).abs()) < allowed
    some = fit(lw.VaLLA(30, optimiser="none")).log_evidence()
    assert float(some) < float(full.log_evidence()) + allowed


# Points that stay where they are.


@pytest.mark.parametrize("way", [None, "lbfgs", "adam"])
@pytest.mark.parametrize("name", ["embedding", "tuple_input", "dict_input", "token_level"])
def test_inputs_without_a_slope_keep_their_points(name: str, way: str | None) -> None:
    """Whole numbers and several tensors: rows of the data, and the posterior that "none" gives."""
    case = BY_NAME[name]
    fit = lambda o: lw.fit(case.build(), problems.batches(case), problems.likelihood(case), prior=0.8,
                           method=lw.VaLLA(4, optimiser=o, steps=3))  # fmt: skip
    one, other = fit(way), fit("none")
    x = case.batch(3, seed=1)
    assert_close(one.functions(x).cov, other.functions(x).cov)
    assert_close(one.log_evidence(), other.log_evidence())


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_their_prior_is_learned_all_the_same(alpha: float) -> None:
    case = BY_NAME["embedding"]
    found = lw.fit(case.build(), problems.batches(case), problems.likelihood(case),
                   method=lw.VaLLA(4, alpha=alpha, optimiser="adam", steps=5))  # fmt: skip
    assert float(found.prior.values) != 1.0
    assert not found.curvature.anchors.inputs.is_floating_point()


def test_a_network_without_rules_keeps_its_points_if_asked() -> None:
    case = BY_NAME["weight_norm"]
    fit = lambda o: lw.fit(
        case.build(), problems.batches(case), "classification", prior=0.8, method=lw.VaLLA(4, optimiser=o)
    )
    for way in ("lbfgs", "adam"):
        with pytest.raises(lw.errors.ModelError, match=r"has no rule .* keep the inputs where they are"):
            fit(way)
    assert bool(torch.isfinite(fit("none").functions(case.batch(3)).cov).all())


@pytest.mark.parametrize("way", ["lbfgs", "adam"])
def test_tokens_that_are_numbers(way: str) -> None:
    """Outputs (B, T, C) with inputs that can move."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(1)
    network, gen = Tokens().double(), torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 4, 2, dtype=D, generator=gen), torch.randint(0, 3, (6, 4), generator=gen)
    fit = lambda m: lw.fit(network, problems.split(x, y, (2, 4)), "classification", method=m, prior=0.8)
    before, after = (fit(lw.VaLLA(4, optimiser=o, steps=20, learning_rate=0.05)) for o in ("none", way))
    assert before.log_evidence() < after.log_evidence() < fit(lw.Full()).log_evidence()
    assert fit(lw.VaLLA(72)).trace is None  # all outputs of all tokens: nothing to learn
    assert_close(fit(lw.VaLLA(72)).log_evidence(), fit(lw.Full()).log_evidence(), SOLVED)


def test_a_point_by_itself() -> None:
    start = fitted(lw.VaLLA(1, optimiser="none"))
    for way in ("lbfgs", "adam"):
        assert fitted(lw.VaLLA(1, optimiser=way, steps=20)).log_evidence() > start.log_evidence()


# What a step costs.


def rows_run(count: int, batches: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that the network saw in each step, the first aside."""
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
    """A batch and the points, of few data in one batch as of many in several."""
    few, many, several = (rows_run(n, b, monkeypatch) for n, b in ((100, 1), (2000, 1), (2000, 20)))
    assert few == many == several == [15] * 5


# The same as for every method.


@pytest.mark.parametrize(
    "method",
    [lw.VaLLA(4, start="random"), lw.VaLLA(4, start="kmeans", optimiser="adam", steps=5, batch_size=7),
     lw.VaLLA(4, alpha=1.0, start="random", steps=5, batch_size=7)],
    ids=["lbfgs", "adam", "predicting"],
)  # fmt: skip
def test_the_generator_decides(method: Any) -> None:
    x = torch.linspace(-3, 3, 5, dtype=D)[:, None]
    method = replace(method, steps=3)
    one, two, other = (
        fitted(method, generator=torch.Generator().manual_seed(seed)).functions(x).cov for seed in (1, 1, 2)
    )
    assert_close(one, two, SOLVED)
    assert not torch.allclose(one, other)
    torch.manual_seed(5)
    plain = fitted(method).functions(x).cov
    torch.manual_seed(6)
    assert_close(fitted(method).functions(x).cov, plain, SOLVED)


@pytest.mark.parametrize("seed", [0, 3])
def test_data_made_with_the_same_seed_are_drawn_all_the_same(seed: int) -> None:
    """The numbers that made the inputs would order them, and those chosen would all lie at one end."""
    x = torch.rand(500, 1, dtype=D, generator=torch.Generator().manual_seed(seed))
    given = None if seed == 0 else torch.Generator().manual_seed(seed)
    method = lw.VaLLA(20, start="random", optimiser="none", candidates=20)
    points = fitted(method, data=[(x, x)], generator=given).curvature.anchors.inputs
    assert float(points.min()) < 0.3
    assert float(points.max()) > 0.7


@pytest.mark.parametrize("way", ["none", "lbfgs", "adam"])
def test_float32(way: str) -> None:
    data = [tuple(t.float() for t in curve())]
    single = fitted(lw.VaLLA(5, optimiser=way, steps=10), model=model().float(), data=data)
    x = torch.linspace(-2, 2, 9)[:, None]
    assert single.functions(x).cov.dtype == torch.float32
    assert single.curvature.anchors.inputs.dtype == torch.float32
    wide = fitted(lw.VaLLA(5, optimiser=way, steps=10), model=model().float().double(),
                  data=[tuple(t.double() for t in data[0])])  # fmt: skip
    allowed = {"none": 1e-3, "lbfgs": 0.05, "adam": 0.05}[way]  # rounding sends a search other ways
    assert float(single.log_evidence()) == pytest.approx(float(wide.log_evidence()), rel=allowed)
    predicted = fitted(lw.VaLLA(5, alpha=1.0, steps=5), model=model().float(), data=data).predict(x)
    assert predicted.std.dtype == torch.float32
    assert bool(torch.isfinite(predicted.std).all())


METHODS = {
    "none": lw.VaLLA(5, optimiser="none"), "lbfgs": lw.VaLLA(5, optimiser="lbfgs", steps=3),
    "adam": lw.VaLLA(5, optimiser="adam", steps=3), "predicting": lw.VaLLA(5, alpha=1.0, steps=3),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_joint_beliefs_and_samples(method: str, generator: torch.Generator) -> None:
    """Three outputs that hang together: blocks, and draws with the covariance itself."""
    x, y = classes()
    found = lw.fit(MLP.build(), [(x, y)], "classification", method=METHODS[method], prior=0.5)
    new = x[:2]
    joint, own = found.functions(new, joint=True), found.functions(new)
    whole = joint.cov.reshape(6, 6)
    assert_close(torch.stack([whole[:3, :3], whole[3:, 3:]]), own.cov)
    assert float(torch.linalg.eigvalsh(whole).min()) > 0
    gap = (found.function_samples(new, 3000, generator) - joint.mean).flatten(1)
    assert_within(gap[:, :, None] * gap[:, None, :], whole)
    probs = found.predict(new).probs
    assert_close(probs.sum(1), torch.ones(2, dtype=D))


@pytest.mark.parametrize("method", METHODS)
def test_files(method: str, tmp_path: Path) -> None:
    x, y = classes()
    found = lw.fit(MLP.build(), [(x, y)], "classification", method=METHODS[method])
    found.save(tmp_path / "it")
    again = lw.load(tmp_path / "it", MLP.build())
    assert torch.equal(again.curvature.mix, found.curvature.mix)
    assert torch.equal(again.curvature.anchors.inputs, found.curvature.anchors.inputs)
    assert_close(again.predict(x).probs, found.predict(x).probs)
    assert_close(again.functions(x, joint=True).cov, found.functions(x, joint=True).cov)
    assert isinstance(again.curvature, AnchoredCurvature)
    if method != "predicting":
        assert_close(again.log_evidence(), found.log_evidence())
        assert_close(again.with_prior(3.0).functions(x).cov, found.with_prior(3.0).functions(x).cov)


PAIRS = [(case.name, method) for case in CASES for method in ("lbfgs", "adam", "predicting")
         if case.name not in ("weight_norm", "free_parameter") and (method, case.name) != ("predicting", "token_level")
         ]  # fmt: skip


@pytest.mark.parametrize(("case", "method"), PAIRS)
def test_the_model_is_left_as_it_was(case: str, method: str) -> None:
    """Its gradients too: the graph of a bound leads to the weights as well as to the points."""
    chosen = BY_NAME[case]
    network = chosen.build()
    prior = None if case == "mlp" else 0.8  # learning it is the same for all of them

    def run() -> None:
        options: dict[str, Any] = {"method": replace(METHODS[method], steps=2), "prior": prior}
        found = lw.fit(network, problems.batches(chosen), problems.likelihood(chosen), **options)
        found.functions(chosen.batch(3, seed=1), joint=True)

    problems.unchanged(network, run)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", METHODS)
def test_surroundings_without_gradients(method: str, around: Any) -> None:
    x = torch.linspace(-3, 3, 5, dtype=D)[:, None]
    expected, network, data = fitted(METHODS[method]).functions(x).cov, model(), [curve()]
    with around():
        found = fitted(METHODS[method], model=network, data=data).functions(x).cov
    assert_close(found, expected)


def test_progress_shows_the_objective(capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("lbfgs", "adam"):
        loud = fitted(METHODS[method], progress=True)
        assert "inducing points" in capsys.readouterr().err
        assert_close(loud.functions(curve()[0]).cov, fitted(METHODS[method], progress=False).functions(curve()[0]).cov)
        assert capsys.readouterr().err == ""


def test_the_methods_name() -> None:
    x = curve()[0]
    assert_close(fitted("valla").functions(x).cov, fitted(lw.VaLLA()).functions(x).cov, SOLVED)


# Refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_inducing": 0}, "num_inducing is 0; expected at least 1"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"patience": 0}, "patience is 0; expected at least 1"),
        ({"candidates": 0}, "candidates is 0; expected at least 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a positive number"),
        ({"learning_rate": math.nan}, "learning_rate is nan; expected a positive number"),
        ({"alpha": -0.1}, "alpha is -0.1; expected a number between 0 and 1"),
        ({"alpha": 1.5}, "alpha is 1.5; expected a number between 0 and 1"),
        ({"start": "grid"}, "start is 'grid'; expected one of greedy, trace, kmeans, random"),
        ({"optimiser": "sgd"}, "optimiser is 'sgd'; expected one of lbfgs, adam, none"),
        ({"alpha": 1.0, "optimiser": "lbfgs"}, 'collapsed bound belongs to alpha=0; use optimiser="adam"'),
        ({"alpha": 0.5, "optimiser": "none"}, 'collapsed bound belongs to alpha=0; use optimiser="adam"'),
        ({"validation": [1], "optimiser": "lbfgs"}, 'only optimiser="adam" uses validation data'),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        lw.VaLLA(**settings)


def test_energies_without_a_closed_form() -> None:
    x, y = classes()
    for likelihood, message in ((lw.Categorical(), "only Gaussian"), (lw.Categorical(link="mc"), "no gradient")):
        alpha = 0.5 if message == "only Gaussian" else 1.0
        with pytest.raises(lw.errors.UnsupportedError, match=message):
            lw.fit(MLP.build(), [(x, y)], likelihood, method=lw.VaLLA(4, alpha=alpha))


def test_tokens_have_no_predictive_to_learn_by() -> None:
    case = BY_NAME["token_level"]
    with pytest.raises(lw.errors.UnsupportedError, match=r"token-level outputs \(B, T, C\).* Use alpha=0"):
        lw.fit(case.build(), problems.batches(case), "classification", method=lw.VaLLA(4, alpha=1.0))


def test_ignored_targets_have_none_either() -> None:
    x, y = classes()
    y = y.clone()
    y[3] = -100
    with pytest.raises(lw.errors.DataError, match="some targets are ignored ones"):
        lw.fit(MLP.build(), [(x, y)], "classification", method=lw.VaLLA(4, alpha=1.0))


def test_what_was_learned_by_predicting_has_no_evidence() -> None:
    found = fitted(METHODS["predicting"], lw.Gaussian(), None)
    for ask in (
        found.log_evidence,
        found.tuned,
        lambda: found.tuned(lw.tuners.FixedPoint()),
        lambda: found.tuned(lw.tuners.Grid()),
    ):
        with pytest.raises(
            lw.errors.UnsupportedError, match=r"has no evidence; compare it on held-out data, or fit VaLLA"
        ):
            ask()
    picked = found.tuned(lw.tuners.Grid([curve(10, 4)], (0.1, 1.0, 10.0)))
    assert bool(torch.isfinite(picked.functions(curve()[0]).cov).all())
    assert 0 <= found.effective_parameters().total <= 25


def test_a_prior_that_needs_the_curvature_first() -> None:
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"g_prior\(\) takes its scale from the curvature.* before its points"
    ):
        fitted(lw.VaLLA(4), prior=lw.priors.g_prior())


def test_an_objective_that_runs_away() -> None:
    with pytest.raises(
        lw.errors.NumericalError, match=r"VaLLA: the objective is \S+ at step \d+.* Lower learning_rate"
    ):
        fitted(lw.VaLLA(4, alpha=1.0, learning_rate=1e4, steps=50), lw.Gaussian(), None)


def test_a_kernel_that_is_nought() -> None:
    network = nn.Linear(2, 1, bias=False).double()
    x, y = torch.zeros(3, 2, dtype=D), torch.zeros(3, 1, dtype=D)
    for method in (lw.VaLLA(3), *METHODS.values(), lw.VaLLA(2, optimiser="lbfgs"), lw.VaLLA(2, alpha=1.0)):
        with pytest.raises(
            lw.errors.NumericalError, match=r"no output depends on the selected weights .* choose other weights"
        ):
            lw.fit(network, [(x, y)], lw.Gaussian(noise_std=1.0), method=method, prior=1.0)


def test_the_start_of_a_prior_is_where_half_of_what_can_be_decided_is() -> None:
    problem = fitted(lw.baselines.MapOnly(), prior=None).problem
    theta = problem.network.theta()
    found = problem.with_starting_precision(exact().posterior.statistics).prior
    assert float(found.values) == pytest.approx(0.5 * 25 / float(theta.square().sum()))


@pytest.mark.parametrize(("activation", "noise", "prior"), [(nn.ReLU, 1e-4, 0.1), (nn.Softplus, 1e-4, 1e-4)])
def test_a_search_that_leaves_the_numbers_keeps_what_was_best(activation: Any, noise: float, prior: float) -> None:
    """Line searches in float32 may try a point so far out that its kernel overflows."""
    torch.manual_seed(0)
    x, y = 3 * torch.randn(40, 2), torch.randn(40, 1)
    net = nn.Sequential(nn.Linear(2, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 1))
    fit = lambda method: lw.fit(net, [(x, y)], lw.Gaussian(noise_std=noise), method=method, prior=prior)
    begun, found = (fit(lw.VaLLA(6, steps=40, optimiser=optimiser)) for optimiser in ("none", "lbfgs"))
    assert float(found.log_evidence()) > float(begun.log_evidence())


@pytest.mark.parametrize(
    "options", [{"steps": 20}, {"optimiser": "adam", "steps": 20}, {"alpha": 1.0, "steps": 20}], ids=str
)
def test_points_of_a_network_in_half_precision_move_as_those_of_a_whole_one(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    small = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).half()
    whole = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    whole.load_state_dict(small.state_dict())
    x, y = torch.randn(40, 3).half(), torch.randn(40, 1).half()
    given: dict[str, Any] = {"likelihood": lw.Gaussian(noise_std=0.5), "prior": 1.0, "method": lw.VaLLA(5, **options)}
    found = lw.fit(small, [(x, y)], **given).functions(x).std
    expected = lw.fit(whole, [(x.float(), y.float())], **given).functions(x.float()).std
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
