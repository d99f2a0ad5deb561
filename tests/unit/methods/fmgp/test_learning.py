"""What is learned: against exact Gaussian process regression, and the state that is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.likelihoods.base import energy
from lapwing.linalg.stochastic import Inducing
from lapwing.methods.fmgp import (
    FeatureTable,
    FreeKernel,
    FunctionPosterior,
    KernelState,
    Learning,
    Sight,
    last_layer_network,
)
from lapwing.problem import Statistics
from tests.tolerances import SOLVED, assert_close
from tests.unit.methods.fmgp.tasks import classes, confident, curve, fitted, learned, model

D = torch.float64


@pytest.mark.parametrize("kind", ["rbf", "features"])
def test_points_at_all_data_are_the_exact_process(kind: str) -> None:
    """With given kernel and noise, and what the points know in closed form: textbook covariances (M = n C)."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, new = torch.randn(8, 2, dtype=D), torch.randn(4, 2, dtype=D)
    noise = torch.tensor(0.3, dtype=D)
    problem = lw.fit(
        network, [(x, network(x).detach() + 1)], lw.Gaussian(), method=lw.baselines.MapOnly(), prior=1.0
    ).posterior.problem
    whole = problem.network
    sight = Sight(whole, last_layer_network(whole, x) if kind == "features" else None)
    lengths = torch.tensor([0.7, 1.3], dtype=D) if kind == "rbf" else torch.tensor([0.4], dtype=D)
    kernel = FreeKernel(kind, lengths.log(), torch.tensor([[1.2, 0.0], [0.9, 0.4]], dtype=D))
    seen, _ = sight(x)
    numbers = torch.tensor([0, 1]).repeat(8)
    points = seen.repeat_interleave(2, 0)
    state = KernelState(
        kernel, points, numbers, torch.zeros(16, dtype=D), noise.log(), Inducing(torch.eye(16, dtype=D))
    )
    _, rows = state.whitened(FeatureTable(seen, seen, seen))
    flat = rows.flatten(0, 1)
    known = replace(state, inducing=state.inducing.updated(flat.T @ flat / noise, 1.0))
    found = known.posterior(problem, sight, Statistics(0.0, 8, 2), ())
    joint = kernel.joint(torch.cat([seen, sight(new)[0]])).reshape(24, 24)
    expected = joint[16:, 16:] - joint[16:, :16] @ torch.linalg.solve(
        joint[:16, :16] + noise * torch.eye(16, dtype=D), joint[:16, 16:]
    )
    assert_close(found(new, joint=True).cov.reshape(8, 8), expected, 0.25)  # but for what keeps a kernel definite
    assert_close(found(new).mean, network(new))
    assert float(found.problem.likelihood.dispersion) == pytest.approx(0.3)


def kept(monkeypatch: pytest.MonkeyPatch) -> list[KernelState]:
    states: list[KernelState] = []
    original = KernelState.posterior

    def noted(self: KernelState, *args: Any) -> FunctionPosterior:
        states.append(self)
        return original(self, *args)

    monkeypatch.setattr(KernelState, "posterior", noted)
    return states


@pytest.mark.parametrize("count", [10, 60])
@pytest.mark.parametrize("kernel", ["rbf", "features"])
def test_the_posterior_is_the_state_that_was_learned(kernel: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However near to singular the kernel of the points is."""
    states = kept(monkeypatch)
    posterior = fitted(lw.FMGP(count, kernel=kernel, steps=40))
    x = torch.linspace(-5, 5, 21, dtype=D)[:, None]
    seen, f = posterior.posterior.sight(x)
    with torch.no_grad():
        before, rows = states[0].whitened(FeatureTable(seen, f, f))
        expected = states[0].inducing.posterior_cov(before, rows)
    assert_close(posterior.functions(x).cov, expected, SOLVED)
    joint = posterior.functions(x, joint=True).cov.reshape(21, 21)
    assert float(torch.linalg.eigvalsh(joint).min()) > -1e-8 * float(joint.diagonal().max())


def test_steps_on_the_covariance_end_where_the_objective_is_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes count: 2 KL less the energies of the one with the network's mean and the one with its own."""
    x, y = curve()
    with torch.no_grad():
        table = FeatureTable(x, model()(x), y)
    every_row = lambda shape, *_: (torch.arange(shape[0], dtype=D) + 0.5) / shape[0]
    monkeypatch.setattr("lapwing.methods.fmgp.uniform", every_row)
    likelihood, gen = lw.Gaussian(noise_std=2.0), torch.Generator().manual_seed(0)
    start = KernelState.initial("rbf", likelihood, table, torch.tensor([True]), 6, gen)
    learning = Learning(lw.FMGP(batch_size=60), likelihood, table, None, gen, start)
    still = torch.optim.SGD(start.free, lr=0.0)
    for _ in range(80):
        learning.step(still, 0.3)
    state = learning.state
    precision = state.inducing.precision.clone().requires_grad_()
    before, rows = (t.detach() for t in state.whitened(learning.table))
    cov = Inducing(precision).posterior_cov(before, rows)
    energies = sum(energy(likelihood, 1.0, mean, cov, y).sum() for mean in (table.f, learning.shift.expand(60, 1)))
    divergence = 2 * Inducing(precision).divergence()
    parts = [torch.autograd.grad(part, precision, retain_graph=True)[0] for part in (divergence, energies)]
    assert float(parts[0].abs().max()) > 1e-3
    assert_close(parts[0], parts[1], SOLVED)


@pytest.mark.parametrize(("gap", "first"), [(3.0, False), (0.0, True)])
def test_the_best_state_on_validation_data_is_kept(gap: float, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training data leave much unexplained; validation data at the outputs like no state as much as the first."""
    looks: list[float] = []
    original = Learning.held_out_score

    def noted(self: Learning) -> float:
        looks.append(original(self))
        return looks[-1]

    monkeypatch.setattr(Learning, "held_out_score", noted)
    (x, _), gen = curve(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        f = model()(x)
    held = [(x[::2], f[::2] + gap * torch.randn(30, 1, dtype=D, generator=gen).sign())]
    far = f + 3 * torch.randn(60, 1, dtype=D, generator=gen).sign()
    method = lw.FMGP(10, steps=100, learning_rate=0.05, patience=3)
    posterior = fitted(method, lw.Gaussian(noise_std=0.5), data=[(x, far)], validation=held)
    score = float(posterior.predict(held[0][0]).log_prob(held[0][1]).mean())
    assert score == pytest.approx(max(looks), abs=1e-8)
    assert posterior.trace is not None
    if first:
        assert looks.index(max(looks)) == 0
        assert len(looks) == 7  # after 1, 2 and 4 steps, the first after that, and three that try its patience
        assert len(posterior.trace.steps) == 20
    else:
        assert looks.index(max(looks)) > 5
        assert score > looks[0] + 0.5


@pytest.mark.parametrize("likelihood", ["labels", "classes"])
def test_ignored_validation_targets_are_refused(likelihood: str) -> None:
    """They would be scored as if they were known."""
    x, y = classes()
    targets = (x[:, :1] + torch.arange(3) > 0).double() if likelihood == "labels" else y
    chosen = lw.Bernoulli(ignore_index=-1) if likelihood == "labels" else lw.Categorical(ignore_index=-1)
    held = targets.clone()
    held[4] = -1
    with pytest.raises(lw.errors.DataError, match="some validation targets are ignored ones"):
        lw.fit(confident(), [(x, targets)], chosen, method=lw.FMGP(6, steps=3), validation=[(x, held)])


def test_the_objective_rises() -> None:
    posterior = learned()
    assert posterior.trace is not None
    scores = torch.tensor([step.score for step in posterior.trace.steps], dtype=D)
    assert (posterior.trace.tuner, posterior.trace.score, len(scores)) == ("FMGP", "objective", 250)
    assert float(scores[-20:].mean()) > float(scores[:20].mean())


def test_the_noise_is_learned_or_kept() -> None:
    free, given = fitted(lw.FMGP(10, steps=50)), fitted(lw.FMGP(10, steps=50), lw.Gaussian(noise_std=0.7))
    residual = (model()(curve()[0]) - curve()[1]).detach().square().mean()
    assert float(free.likelihood.dispersion) != pytest.approx(float(residual), rel=1e-3)
    assert free.trace is not None
    assert free.trace.steps[0].noise[0] == pytest.approx(float(residual), rel=0.05)
    assert float(given.likelihood.dispersion) == pytest.approx(0.49)
    assert given.trace is not None
    assert given.trace.steps[-1].noise == ()


def test_a_noise_for_each_output() -> None:
    """Their ratios are those of the residuals; what they share starts there and is learned."""
    x, _ = classes()
    stds = torch.tensor([0.1, 1.0, 4.0], dtype=D)
    with torch.no_grad():
        f = confident()(x)
    y = f + stds * torch.randn(60, 3, dtype=D, generator=torch.Generator().manual_seed(1))
    posterior = lw.fit(confident(), [(x, y)], lw.Gaussian(per_output=True), method=lw.FMGP(9, steps=40))
    residual = (f - y).square().mean(0)
    noise = posterior.likelihood.noise_variance
    assert_close(noise / noise.sum(), residual / residual.sum())
    assert posterior.trace is not None
    assert posterior.trace.steps[0].noise[0] == pytest.approx(1.0, rel=0.05)
    assert float(noise[1]) != pytest.approx(float(residual[1]), rel=1e-3)


def test_an_objective_that_runs_away() -> None:
    with pytest.raises(lw.errors.NumericalError, match=r"FMGP: the objective is \S+ at step \d+.* Lower learning_rate"):
        fitted(lw.FMGP(6, learning_rate=1e6, steps=100))
