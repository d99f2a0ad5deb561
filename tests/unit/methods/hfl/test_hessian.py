"""Solving with the Hessian, and the minimum that weights belong to."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.methods.hfl.response import Hessian, Responder
from tests.minima import copied, fitted, new, off, shifted, small
from tests.tolerances import SOLVED, assert_close

D = torch.float64


def responder(energy: Any, **settings: Any) -> Responder:
    found: Responder = fitted(energy, lw.HFL(**settings)).posterior.responder
    return found


@pytest.mark.parametrize(("kind", "outputs"), [("gaussian", 2), ("categorical", 3)])
def test_solving_with_the_hessian(kind: str, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    energy = small(kind, outputs)
    objective = responder(energy).objective
    rows = torch.randn(4, objective.size, dtype=D, generator=torch.Generator().manual_seed(1))
    exact = torch.linalg.solve(energy.hessian(), rows.T).T
    assert_close(Hessian(objective).solve(rows), exact, SOLVED)
    monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", objective.size - 1)
    by_products = Hessian(objective)
    assert not by_products.formed
    assert off(by_products.solve(rows), exact) < 1e-3


@pytest.mark.parametrize("limit", [25, 24])
def test_an_indefinite_hessian_is_refused_with_advice(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formed, or met by conjugate gradients."""
    monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", limit)
    objective = responder(small()).objective.recentred(torch.linspace(-2, 2, 25, dtype=D))
    met = "smallest eigenvalue is -" if limit == 25 else "met a direction with curvature -"
    advice = r"at no minimum .*: train it further with this prior as weight decay, or use HFL\(mode='linearised'\)\.$"
    with pytest.raises(lw.errors.NumericalError, match=f"{met}.*{advice}"):
        Hessian(objective).solve(torch.eye(25, dtype=D)[:3])


def test_the_hessian_is_formed_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = responder(small()).objective
    for limit, formed in ((25, True), (24, False)):
        monkeypatch.setattr("lapwing.methods.hfl.response.DENSE", limit)
        assert Hessian(objective).formed is formed
        assert (Hessian(objective).root is not None) is formed


def test_weights_near_a_minimum_are_told_and_moved_there() -> None:
    energy = small("bernoulli", 1)
    x = new(energy)
    moved = shifted(energy, 0.05)
    posterior = fitted(moved, lw.HFL())
    (finding,) = posterior.posterior.findings
    said = re.match(r"the weights are (\S+) posterior standard deviations from the minimum", finding)
    assert said is not None
    assert float(said.group(1)) == pytest.approx(0.05, rel=0.1)
    assert off(posterior.functions(x).cov, energy.each(x)) < 1e-6  # at the minimum
    assert torch.equal(posterior.functions(x).mean, moved.model(x).detach())  # of the network as it is
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
    with pytest.raises(lw.errors.NumericalError, match=message) as error:
        fitted(energy, lw.HFL())
    said = re.match(r"HFL: .* has the length (\S+) at .* lowers the loss by (\S+), from (\S+);", str(error.value))
    assert said is not None
    length, fall, value = map(float, said.groups())
    assert length == pytest.approx(float(energy.gradient(energy.theta).norm()), rel=1e-2)
    assert 1 < fall < value


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
