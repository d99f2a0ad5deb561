"""Pushes and their responses: choosing a strength, and when a response is not trusted."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.methods.hfl.response import Responder, Response
from tests.minima import copied, fitted, gapped, new, off, small
from tests.tolerances import SOLVED, assert_close

D = torch.float64


@dataclass
class Spring:
    """U = d²/2 + skew · d³/3 + stiffening · d⁴/4, one weight: what pushes do can be worked out."""

    stiffening: float = 0.0
    curvature: float = 1.0
    skew: float = 0.0
    size: int = 1
    dtype: torch.dtype = D

    @property
    def centre(self) -> Tensor:
        return torch.zeros(1, dtype=self.dtype)

    def gradient(self, d: Tensor) -> Tensor:
        return self.curvature * d + self.skew * d**2 + self.stiffening * d**3

    def solve(self, rows: Tensor) -> Tensor:
        return rows / self.curvature

    def flat_variance(self, solved: Tensor) -> Tensor:
        return 1e-6 * solved.square().sum(1)


def sprung(spring: Spring, tolerance: float = 1e-6, **settings: Any) -> Responder:
    return Responder(spring, spring, tolerance, **settings)  # type: ignore[arg-type]


def test_a_quadratic_answers_the_same_to_every_strength() -> None:
    ends = [sprung(Spring(curvature=4.0)).respond(lambda d: 3 * torch.ones_like(d), lambda d: 3 * d, 1, lam)
            for lam in (1e-6, 1e-3, 0.5)]  # fmt: skip
    for found in ends:
        assert_close(found.cov, torch.tensor([[9 / 4]], dtype=D), SOLVED)
        assert float(found.change) == 0.0
    chosen = sprung(Spring(curvature=4.0)).respond(lambda d: 3 * torch.ones_like(d), lambda d: 3 * d, 1)
    assert_close(chosen.cov, torch.tensor([[9 / 4]], dtype=D), SOLVED)
    assert float(chosen.strength) == pytest.approx(0.005 / 1.5)  # a hundredth of the deviation, halved once to compare


def test_a_strength_is_halved_until_two_estimates_agree() -> None:
    """d + k d³ = λ: the response is 1 - k λ² + …, and what two strengths say of λ² is taken off."""
    response = sprung(Spring(stiffening=30.0)).respond(torch.ones_like, lambda d: d, 1)
    assert float(response.cov) == pytest.approx(1.0, rel=1e-6)
    assert float(response.strength) < 0.005
    assert float(response.change) <= 0.3e-6
    plain = sprung(Spring(stiffening=30.0)).respond(torch.ones_like, lambda d: d, 1, float(response.strength))
    assert abs(float(plain.cov) - 1) > 10 * abs(float(response.cov) - 1)
    assert float(plain.cov) == pytest.approx(1 - 30 * float(response.strength) ** 2, rel=1e-6)


def test_every_push_has_a_strength_of_its_own() -> None:
    energy = gapped()
    x = torch.tensor([[-1.5], [0.0], [2.5]], dtype=D)
    response = fitted(energy, lw.HFL()).posterior.respond(x)
    first = 0.01 / energy.each(x).flatten().sqrt()
    halvings = (first / response.strength).log2()
    assert_close(halvings, halvings.round())
    assert bool((halvings.round() >= 1).all())
    assert len(set(halvings.round().tolist())) > 1


def skewed(lam: float) -> tuple[float, float]:
    """Where d + d² = ±λ."""
    return (math.sqrt(1 + 4 * lam) - 1) / 2, (math.sqrt(1 - 4 * lam) - 1) / 2


@pytest.mark.parametrize("lam", [1e-4, 1e-2, 0.1, 0.2])
def test_the_bend_of_a_spring_that_is_softer_one_way(lam: float) -> None:
    up, down = skewed(lam)
    response = sprung(Spring(skew=1.0), 1e-9, max_steps=500).respond(torch.ones_like, lambda d: d, 1, lam)
    assert float(response.bend) == pytest.approx((-up - down) / (up - down), rel=1e-6)
    assert float(response.bend) == pytest.approx(lam, rel=0.2)  # falls with the strength
    assert float(response.drift) == 0.0
    straight = sprung(Spring(stiffening=1.0)).respond(torch.ones_like, lambda d: d, 1, lam)
    assert float(straight.bend) < 1e-9


def test_the_bend_is_that_of_what_was_pushed() -> None:
    """Of all that is read off; the weights themselves along its slope."""
    spring = sprung(Spring(), 1e-9)
    both = lambda d: torch.cat([d, d**2], 1)
    for own, bend in ((lambda seen: seen[:, 0], 0.0), (lambda seen: seen[:, 0] + seen[:, 1], 0.1)):
        response = spring.respond(torch.ones_like, both, 1, 0.1, own)
        assert float(response.bend) == pytest.approx(bend, abs=1e-9)  # (d² + d²) / 2 d at d = 0.1
    assert float(spring.respond(torch.ones_like, lambda d: d, 1, 0.1).bend) == pytest.approx(0.0, abs=1e-12)


def test_the_bend_of_a_network_falls_with_the_strength() -> None:
    energy = gapped()
    x = torch.tensor([[-2.5], [0.0], [2.5]], dtype=D)
    size = float(energy.each(x).max()) ** -0.5
    bends = [fitted(energy, lw.HFL(lam=share * size)).posterior.respond(x).bend for share in (1e-3, 1e-2)]
    assert float(bends[0].max()) < 1e-4
    assert_close(bends[1] / bends[0], torch.full((3,), 10.0, dtype=D), 0.15)
    posterior = fitted(energy, lw.HFL(lam=1e-2 * size)).posterior
    assert_close(posterior.respond(x, joint=True).bend, bends[1], SOLVED)
    assert_close(posterior.respond_to(lambda f: f[1, 0], x).bend, bends[1][1:2], SOLVED)


def test_a_push_to_where_there_is_no_minimum() -> None:
    """d + d² = -λ has no solution for λ above a quarter; up there is one."""
    response = sprung(Spring(skew=1.0), max_steps=500).respond(torch.ones_like, lambda d: d, 1, 0.5)
    assert response.steps < 500
    with pytest.raises(
        lw.errors.NumericalError, match=r"not converged.*do not reach the pushed minimum \(bend 0\.15.*smaller lam"
    ):
        response.checked(1e-6)
    near = sprung(Spring(skew=1.0), 1e-3, max_steps=500).respond(torch.ones_like, lambda d: d, 1, 0.24)
    with pytest.raises(
        lw.errors.NumericalError, match=r"1 of 1 responses are not straight.*bend 0\.33; expected at most 0\.25"
    ):
        near.checked(1e-3)


def test_a_falling_variance_is_refused() -> None:
    with pytest.raises(
        lw.errors.NumericalError, match=r"a variance came out as -0\.5; expected above zero.*train it further"
    ):
        sprung(Spring(curvature=-2.0)).respond(torch.ones_like, lambda d: d, 1)


@pytest.mark.parametrize("strength", [None, 0.3])
def test_what_nothing_moves_does_not_respond(strength: float | None) -> None:
    """Alone, and beside a push that has a response."""
    none = sprung(Spring()).respond(torch.zeros_like, lambda d: 0 * d + 7, 1, strength)
    assert none.checked(1e-6).cov.tolist() == [[0.0]]
    slopes = torch.tensor([[0.0], [2.0]], dtype=D)
    both = sprung(Spring()).respond(lambda d: slopes, lambda d: slopes * d, 2, strength)
    assert_close(both.checked(1e-6).cov, torch.tensor([[0.0], [4.0]], dtype=D), SOLVED)


def test_the_window_of_strengths() -> None:
    """From where a difference is rounding to where the prediction moves by its standard deviation, two here."""
    push = lambda d: 2 * torch.ones_like(d)
    spring = sprung(Spring())
    for lam in (0.4999, 1e-9):
        spring.respond(push, lambda d: 2 * d, 1, lam)
    for lam in (0.5001, 1e-11):
        with pytest.raises(
            lw.errors.NumericalError, match=rf"lam is {lam:.3g}; expected between 1\.1e-10 \(.*and 0\.5 \("
        ):
            spring.respond(push, lambda d: 2 * d, 1, lam)
    with pytest.raises(
        lw.errors.NumericalError, match=r"expected between 5\.6e-08"
    ):  # larger outputs leave fewer digits
        spring.respond(push, lambda d: 2 * d + 1000, 1, 1e-9)


def test_the_window_has_no_unit() -> None:
    """Outputs of a hundred-thousandth have a window of a hundred thousand times as much."""
    for unit in (1.0, 1e-5):
        low, high = (re.escape(f"{figure:.2g}") for figure in (2.2e-10 / unit, 1 / unit))
        with pytest.raises(lw.errors.NumericalError, match=rf"expected between {low} \(.*and {high} \("):
            sprung(Spring()).respond(lambda d: unit * torch.ones_like(d), lambda d: unit * d, 1, 1e-12)  # noqa: B023


def test_a_strength_is_chosen_above_rounding() -> None:
    """In single precision a value of one has no difference of a hundred-thousandth to a hundredth."""
    push, read = (lambda d: 1e-3 * torch.ones_like(d)), (lambda d: 1 + 1e-3 * d)
    spring = sprung(Spring(dtype=torch.float32), 1e-2)
    found = spring.respond(push, read, 1).checked(1e-2)
    assert float(found.cov) == pytest.approx(1e-6, rel=1e-2)
    assert float(found.strength) > 12 > 0.01 / 1e-3  # a hundredth of the deviation
    message = (
        r"no push is above rounding in torch.float32 .* deviation \(0\.001\), with a tolerance of 0\.01\. Give a larger"
    )
    with pytest.raises(lw.errors.NumericalError, match=message):
        spring.respond(push, lambda d: 1e3 + read(d), 1)
    anything = sprung(Spring(dtype=torch.float32), math.inf).respond(push, lambda d: 1e3 + read(d), 1)
    assert bool(torch.isfinite(anything.checked(math.inf).cov).all())


def response(
    missing: float = 0.0, change: float = 0.0, residual: float = 0.1, bend: float = 0.0, drift: float = 0.0
) -> Response:
    one = lambda value: torch.tensor([0.0, value], dtype=D)
    return Response(torch.ones(2, 1, dtype=D), torch.tensor([0.1, 0.2], dtype=D), one(residual), one(missing),
                    one(change), one(bend), one(drift), 7)  # fmt: skip


def test_finished_responses_pass() -> None:
    found = response(1e-7, 1e-8)
    assert found.checked(1e-6) is found


@pytest.mark.parametrize(("missing", "change"), [(1e-3, 0.0), (0.0, 1e-3), (math.nan, 0.0), (0.0, math.inf)])
def test_unfinished_responses_do_not(missing: float, change: float) -> None:
    message = (
        r"1 of 2 responses have not converged; the worst \(push 1, strength 0\.2\) is off by about (0\.001|nan|inf)"
    )
    with pytest.raises(lw.errors.NumericalError, match=message) as error:
        response(missing, change).checked(1e-6)
    assert "after 7 steps (relative residual 0.1); expected 1e-06" in str(error.value)


CAUSES: dict[str, tuple[dict[str, float], str]] = {
    "basin": (
        {"missing": 0.1, "bend": 0.26},
        r"leaves the basin of the minimum \(bend 0\.26; expected at most 0\.25\): give a smaller lam, or more steps "
        r"if lam is None, or use HFL\(mode='linearised'\)",
    ),
    "overflow": ({"missing": 0.1, "bend": math.nan}, r"leaves the basin of the minimum \(bend nan"),
    "steps": (
        {"missing": 0.1, "bend": 0.24, "residual": math.nan},
        r"Up and down move alike \(bend 0\.24\), so there were too few steps: give more steps, or use HFL\(mode=",
    ),
    "newton": (
        {"missing": 0.1, "bend": 0.24},
        r"Newton's steps do not reach the pushed minimum \(bend 0\.24 where they end\): give a smaller lam, or a "
        r"larger tolerance, or use",
    ),
    "rounding": (
        {"missing": 1e-9, "change": 0.1}, r"disagree down to the rounding error: give a larger tolerance, or use"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named(name: str) -> None:
    figures, message = CAUSES[name]
    with pytest.raises(lw.errors.NumericalError, match=r"1 of 2 responses have not converged.*" + message) as error:
        response(**figures).checked(1e-6)
    causes = ("leaves the basin", "too few steps", "do not reach", "rounding error")
    said = [cause for cause in causes if cause in str(error.value)]
    assert len(said) == 1


@pytest.mark.parametrize("bend", [0.26, math.inf, math.nan])
def test_what_is_finished_and_bent_is_refused(bend: float) -> None:
    message = (
        r"1 of 2 responses are not straight; the worst is that to push 1, of strength 0\.2\. The push leaves the basin "
        rf"of the minimum \(bend {bend:.2g}; expected at most 0\.25\): give a smaller lam, leave lam out to have it"
    )
    with pytest.raises(lw.errors.NumericalError, match=message):
        response(bend=bend).checked(1e-6)
    passed = response(bend=0.24)
    assert passed.checked(1e-6) is passed


def test_what_drifted_is_refused() -> None:
    message = (
        r"the weights are 0\.3 posterior standard deviations from the minimum of their regularised loss, measured by "
        r"how far an unpushed twin moves what is pushed; expected at most 0\.2\. .*train this one further with this "
        r"prior as weight decay, allow it with HFL\(drift=\.\.\.\), or use HFL\(mode='linearised'\)"
    )
    with pytest.raises(lw.errors.NumericalError, match=message):
        response(drift=0.3).checked(1e-6, 0.2)
    for limit in (0.3, math.inf):
        assert float(response(drift=0.3).checked(1e-6, limit).drift[1]) == 0.3


def test_an_infinite_tolerance_takes_what_comes() -> None:
    found = response(missing=3.0, bend=2.0, drift=5.0)
    assert found.checked(math.inf, 1.0) is found
    with pytest.raises(lw.errors.NumericalError, match="is off by about nan"):
        response(missing=math.nan).checked(math.inf)


def test_a_residual_that_is_not_known_is_not_said() -> None:
    with pytest.raises(lw.errors.NumericalError, match="after 7 steps; expected 1e-06"):
        response(1e-3, residual=math.nan).checked(1e-6)


def test_one_push_for_each_output_read_off_where_it_was_asked() -> None:
    energy = small("gaussian", 2)
    x = new(energy)
    posterior = fitted(energy, lw.HFL()).posterior
    response, everywhere = posterior.respond(x), posterior.respond(x, joint=True)
    assert response.cov.shape == (6, 2)
    assert everywhere.cov.shape == (6, 6)
    assert off(everywhere.cov, energy.covariance(x)) < 1e-6
    assert off(response.cov, torch.cat([energy.each(x)[b] for b in range(3)])) < 1e-6
    assert response.steps > 0
    assert float(response.missing.max()) < 1e-6


def test_what_is_missing_is_not_understated() -> None:
    """Fewer steps than it takes: the worse of two pushes, where the difference of both may be better."""
    energy = gapped()
    x = torch.tensor([[0.0]], dtype=D)
    lam = 0.05 / float(energy.each(x)) ** 0.5
    whole = fitted(energy, lw.HFL(lam=lam)).posterior
    exact = float(whole.respond(x).cov)
    for most in (1, 2):
        few = replace(whole, responder=replace(whole.responder, max_steps=most)).respond(x)
        assert few.steps == most
        assert float(few.missing) > 1e-7
        assert 1e-8 < abs(float(few.cov) / exact - 1) < float(few.missing)


def test_two_networks_do_not_share_anything() -> None:
    """A copy of the model is what is pushed: the objective of one network knows nothing of another."""
    energy, other = small(), copied(small())
    x = new(energy)
    before = fitted(energy, lw.HFL())
    one = before.functions(x).cov
    other.place(other.theta + 0.1)
    assert torch.equal(before.functions(x).cov, one)
