"""Locations learned by L-BFGS on the collapsed bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.methods.inducing.learning import collapsed_bound
from lapwing.methods.inducing.points import Anchors, InducingPoints
from tests.cases import BY_NAME
from tests.tolerances import SOLVED, assert_close
from tests.unit.methods.sine import D, classes, curve, exact, fitted

MLP = BY_NAME["mlp"]


@pytest.mark.parametrize(("count", "start"), [(3, "greedy"), (6, "kmeans"), (3, "random")])
def test_learning_raises_the_bound(count: int, start: str) -> None:
    """The search ends at the same bound from every start, below the evidence."""
    before, after = (
        float(fitted(lw.VaLLA(count, start=start, optimiser=way)).log_evidence()) for way in ("none", "lbfgs")
    )
    best = float(fitted(lw.VaLLA(count, optimiser="lbfgs")).log_evidence())
    assert before < after <= float(exact().log_evidence())
    assert after == pytest.approx(best, rel=1e-5)


def test_both_ways_of_learning_reach_the_same_bound() -> None:
    """L-BFGS on all data, and Adam on batches."""
    count = 3
    one = fitted(lw.VaLLA(count, optimiser="lbfgs"))
    other = fitted(lw.VaLLA(count, optimiser="adam", steps=80, learning_rate=0.05))
    assert float(other.log_evidence()) == pytest.approx(float(one.log_evidence()), rel=1e-3)
    few = fitted(lw.VaLLA(count, optimiser="adam", steps=80, learning_rate=0.05, batch_size=10))
    start = float(fitted(lw.VaLLA(count, optimiser="none")).log_evidence())
    assert float(few.log_evidence()) > 0.5 * (start + float(one.log_evidence()))


def test_enough_learned_points_are_as_good_as_all_data() -> None:
    posterior, x = fitted(lw.VaLLA(15)), torch.linspace(-4, 4, 30, dtype=D)[:, None]
    assert float(posterior.log_evidence()) == pytest.approx(float(exact().log_evidence()), abs=1e-3)
    assert_close(posterior.functions(x).variance, exact().functions(x).variance, 0.2)


@pytest.mark.parametrize("likelihood", ["classification", "labels", "counts"])
def test_other_likelihoods(likelihood: str) -> None:
    """The bound is one of the Laplace evidence, with the curvature at the network's outputs."""
    x, y = classes()
    targets = {"classification": y, "labels": (x[:, :3] > 0).long(), "counts": (2 * x[:, :3].abs()).long()}[likelihood]
    chosen = {"classification": lw.Categorical(), "labels": lw.Bernoulli(), "counts": lw.Poisson()}[likelihood]
    fit = lambda m: lw.fit(MLP.build(), [(x, targets)], chosen, method=m, prior=0.5)
    bounds = [float(fit(lw.VaLLA(8, optimiser=way, steps=20)).log_evidence()) for way in ("none", "lbfgs", "adam")]
    assert bounds[0] < min(bounds[1:])
    assert max(bounds) < float(fit(lw.Full()).log_evidence())


def test_the_trace_is_the_bound_as_it_rises() -> None:
    """Without the terms that do not depend on the locations: the loss and the size of the weights."""
    posterior = fitted(lw.VaLLA(5, optimiser="lbfgs"))
    assert posterior.trace is not None
    scores = [step.score for step in posterior.trace.steps]
    assert (posterior.trace.tuner, posterior.trace.score) == ("VaLLA", "bound")
    fixed = posterior.posterior.log_likelihood() - 0.5 * posterior.prior.penalty(posterior.posterior.theta)
    assert max(scores) == pytest.approx(float(posterior.log_evidence() - fixed), rel=1e-6)
    assert scores[-1] > scores[0]
    assert posterior.trace.findings == ()


def test_without_a_start_the_better_of_two_searches_is_kept() -> None:
    """The two searches end at different bounds here."""
    ends = {start: float(fitted(lw.VaLLA(6, start=start, optimiser="lbfgs", steps=4)).log_evidence())
            for start in ("greedy", "trace", None)}  # fmt: skip
    assert ends["greedy"] != pytest.approx(ends["trace"], rel=1e-3)
    assert ends[None] == pytest.approx(max(ends["greedy"], ends["trace"]), rel=1e-9)


def test_a_search_that_has_not_converged_says_so() -> None:
    posterior = fitted(lw.VaLLA(5, optimiser="lbfgs", steps=2))
    assert posterior.trace is not None
    assert posterior.trace.findings == (
        "the search did not converge in 2 steps and the bound still rises; raise steps",
    )


def test_a_point_by_itself() -> None:
    start = fitted(lw.VaLLA(1, optimiser="none"))
    for way in ("lbfgs", "adam"):
        assert fitted(lw.VaLLA(1, optimiser=way, steps=20)).log_evidence() > start.log_evidence()


@pytest.mark.parametrize(("activation", "noise", "prior"), [(nn.ReLU, 1e-4, 0.1), (nn.Softplus, 1e-4, 1e-4)])
def test_a_search_that_overflows_keeps_the_best_state(activation: Any, noise: float, prior: float) -> None:
    """A line search in float32 may try locations at which the kernel overflows."""
    torch.manual_seed(0)
    x, y = 3 * torch.randn(40, 2), torch.randn(40, 1)
    net = nn.Sequential(nn.Linear(2, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 1))
    fit = lambda method: lw.fit(net, [(x, y)], lw.Gaussian(noise_std=noise), method=method, prior=prior)
    initial, posterior = (fit(lw.VaLLA(6, steps=40, optimiser=optimiser)) for optimiser in ("none", "lbfgs"))
    assert float(posterior.log_evidence()) > float(initial.log_evidence())


def test_a_bound_that_computes_its_kernel_again_has_the_same_slopes() -> None:
    """Where neither the Jacobians of the data nor their kernel with the points fit the byte budget."""
    problem = replace(fitted(lw.Full(), prior=0.5).posterior.problem, learn_prior=True)
    anchors = Anchors(problem.network, torch.linspace(-2, 2, 4, dtype=D)[:, None], torch.zeros(4).long())
    start = InducingPoints(problem, anchors, exact().posterior.statistics, 40, True)
    ends = []
    for size in ("1GiB", 1):
        points, moves = start.learnable(noise=False)
        assert moves is not None
        with lw.memory.limited(size):
            value, divergence = collapsed_bound(points, Data([curve()], torch.device("cpu")))(moves)
            slopes = torch.autograd.grad(value, [moves, points.log_scale])
        ends.append((value.detach(), torch.tensor(divergence, dtype=D), *slopes))
    for kept, again in zip(*ends, strict=True):
        assert_close(again, kept, SOLVED)
