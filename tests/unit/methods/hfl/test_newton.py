"""Minima that are pushed, and where minima lie: against what can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lapwing.methods.hfl.response import newton, pushed
from tests.tolerances import assert_close

D = torch.float64


def spd(size: int, seed: int = 1) -> Tensor:
    root = torch.randn(size, size, dtype=D, generator=torch.Generator().manual_seed(seed))
    return root @ root.T + torch.eye(size, dtype=D)


def test_a_quadratic_is_done_in_one_step() -> None:
    """∇U = H d and constant forces: d = λ H⁻¹ g, whatever λ is."""
    h = spd(4)
    force = torch.randn(3, 4, dtype=D)
    lam = torch.tensor([1e-3, -1.0, 50.0], dtype=D)
    minima = pushed(lambda d: d @ h, lambda d: force, lambda r: torch.linalg.solve(h, r.T).T, lam,
                   torch.zeros(3, 4, dtype=D), tolerance=1e-12)  # fmt: skip
    assert_close(minima.d, lam[:, None] * torch.linalg.solve(h, force.T).T)
    assert minima.steps == 1
    assert float(minima.residuals.max()) < 1e-12
    assert float(minima.missing.max()) < 1e-12


def cubic(d: Tensor) -> Tensor:
    """∇U of U = Σ d²/2 + d⁴/4."""
    return d + d**3


@pytest.mark.parametrize("lam", [1e-3, 0.1, -0.2])
def test_a_curved_loss_is_solved_to_the_tolerance(lam: float) -> None:
    minima = pushed(cubic, torch.ones_like, lambda r: r, torch.tensor([lam], dtype=D), torch.zeros(1, 1, dtype=D),
                   tolerance=1e-12)  # fmt: skip
    d = float(minima.d)
    assert d + d**3 == pytest.approx(lam, rel=1e-11)
    assert float(minima.residuals) <= 1e-12


def test_the_error_falls_with_the_push_at_every_step() -> None:
    """A thousandth of the push takes fewer steps."""
    steps = [
        pushed(cubic, torch.ones_like, lambda r: r, torch.tensor([lam], dtype=D), torch.zeros(1, 1, dtype=D),
               tolerance=1e-12).steps
        for lam in (1e-4, 1e-2, 0.3)
    ]  # fmt: skip
    assert steps == sorted(steps)
    assert steps[0] <= 2
    assert steps[2] > steps[1] > steps[0]


def test_what_is_missing_is_what_was_missing() -> None:
    """After an early stop, the share that one more step would add is about the relative error."""
    lam = torch.tensor([0.3], dtype=D)
    exact = float(pushed(cubic, torch.ones_like, lambda r: r, lam, torch.zeros(1, 1, dtype=D), tolerance=1e-14).d)
    for most in (1, 2, 3):
        minima = pushed(cubic, torch.ones_like, lambda r: r, lam, torch.zeros(1, 1, dtype=D), tolerance=1e-14,
                       max_steps=most)  # fmt: skip
        assert minima.steps == most
        assert float(minima.missing) == pytest.approx(abs(float(minima.d) - exact) / exact, rel=0.4)
        assert float(minima.residuals) > 1e-14


def test_nothing_done_is_all_missing() -> None:
    minima = pushed(cubic, torch.ones_like, lambda r: r, torch.tensor([0.1], dtype=D), torch.zeros(1, 1, dtype=D),
                   tolerance=1e-9, max_steps=0)  # fmt: skip
    assert (float(minima.missing), float(minima.residuals), minima.steps) == (1.0, 1.0, 0)


def test_pushes_that_turn_with_the_weights() -> None:
    """g = d₁²/2 + d₁: (1 - λ) d₁ = λ."""
    push = lambda d: torch.stack([d[:, 0] + 1, torch.zeros_like(d[:, 1])], 1)
    lam = torch.tensor([0.25, -0.25], dtype=D)
    minima = pushed(lambda d: d, push, lambda r: r, lam, torch.zeros(2, 2, dtype=D), tolerance=1e-13)
    assert_close(minima.d, torch.stack([lam / (1 - lam), torch.zeros(2, dtype=D)], 1))


def test_a_row_that_gets_worse_is_left_where_it_was_best() -> None:
    """The steps of a strong perturbation diverge; the other row is solved nevertheless."""
    minima = pushed(cubic, torch.ones_like, lambda r: r, torch.tensor([1e-2, 3.0], dtype=D), torch.zeros(2, 1, dtype=D),
                   tolerance=1e-12)  # fmt: skip
    assert float(minima.d[0] + minima.d[0] ** 3) == pytest.approx(1e-2, rel=1e-11)
    assert float(minima.d[1]) == 0.0
    assert minima.missing[1] == 1.0
    assert float(minima.residuals[1]) == 1.0


def test_a_row_that_overflows_leaves_the_others_alone() -> None:
    """The solve mixes rows, so rows that are not finite are not given to it."""
    gradient = lambda d: d.sinh() + 1e200 * d**5

    def solve(r: Tensor) -> Tensor:
        assert bool(torch.isfinite(r).all())
        return r

    minima = pushed(gradient, torch.ones_like, solve, torch.tensor([1e-60, 1e30], dtype=D), torch.zeros(2, 1, dtype=D),
                   tolerance=1e-9)  # fmt: skip
    assert float(minima.d[0]) == pytest.approx(1e-60, rel=1e-9)
    assert float(minima.d[1]) == 0.0
    assert float(minima.missing[1]) == 1.0


def test_a_stiff_loss_does_not_end_the_search() -> None:
    """The plain norm of the residual rises in the stiff direction while the response converges.

    U = x²/2 + K (y - x²)²/2: the first step moves x along the tangent, off the valley.
    """
    stiff = 1e6

    def gradient(d: Tensor) -> Tensor:
        off = stiff * (d[:, 1] - d[:, 0] ** 2)
        return torch.stack([d[:, 0] - 2 * d[:, 0] * off, off], 1)

    scale = torch.tensor([1.0, stiff], dtype=D)
    push = lambda d: torch.tensor([[1.0, 0.0]], dtype=D).expand(len(d), 2)
    lam = torch.tensor([1e-5], dtype=D)
    minima = pushed(gradient, push, lambda r: r / scale, lam, torch.zeros(1, 2, dtype=D), tolerance=1e-10)
    force = lam * push(lam[:, None])
    assert float((gradient(force) - force).norm()) > 9 * float(lam)  # after one step: nine times the push itself
    assert_close(minima.d[:, 0], lam, 1 / 2)
    assert_close(minima.d[:, 1], lam**2, 1 / 2)
    assert float(minima.missing) < 1e-9


def test_no_push_is_no_move() -> None:
    minima = pushed(cubic, torch.zeros_like, lambda r: r, torch.tensor([1.0], dtype=D), torch.zeros(1, 3, dtype=D),
                   tolerance=1e-9)  # fmt: skip
    assert_close(minima.d + 1, torch.ones(1, 3, dtype=D))
    assert float(minima.missing) == 0.0


# Where the minimum is


def test_the_minimum_of_a_quadratic_in_one_step() -> None:
    h, centre = spd(4), torch.randn(4, dtype=D)
    gradient, value = lambda d: (d - centre) @ h, lambda d: float(0.5 * (d - centre) @ h @ (d - centre))
    minima, decrements = newton(gradient, lambda d, r: torch.linalg.solve(h, r.T).T, value, torch.zeros(4, dtype=D),
                               tolerance=1e-20)  # fmt: skip
    assert_close(minima, centre)
    assert len(decrements) == 2
    assert decrements[0] == pytest.approx(float(centre @ h @ centre), rel=1e-10)  # twice what U falls by
    assert decrements[1] < 1e-20


def test_the_minimum_of_a_curved_loss() -> None:
    """U = e^d - 2 d has its minimum at log 2; the decrement falls with its square."""
    minima, decrements = newton(lambda d: d.exp() - 2, lambda d, r: r / d.exp(), lambda d: float(d.exp() - 2 * d),
                               torch.tensor([1.0], dtype=D), tolerance=1e-24)  # fmt: skip
    assert float(minima) == pytest.approx(math.log(2), rel=1e-12)
    assert decrements == sorted(decrements, reverse=True)
    assert decrements[2] < decrements[1] ** 1.5


def test_steps_are_halved_where_they_lead_away() -> None:
    """Newton's steps for the minimum of √(1 + d²) grow if they start beyond one."""
    gradient = lambda d: d / (1 + d**2).sqrt()
    value = lambda d: float((1 + d**2).sqrt().sum())
    for start in (1.5, 15.0):
        minima, decrements = newton(gradient, lambda d, r: r * (1 + d**2) ** 1.5, value,
                                   torch.tensor([start], dtype=D), tolerance=1e-20, max_steps=60)  # fmt: skip
        assert abs(float(minima)) < 1e-9
        assert decrements[-1] <= 1e-20


def test_a_known_loss_does_not_shorten_good_steps() -> None:
    h, centre = spd(4), torch.randn(4, dtype=D)
    value = lambda d: float(0.5 * (d - centre) @ h @ (d - centre)) + 1e6  # rounding that a small fall drowns in
    minima, decrements = newton(lambda d: (d - centre) @ h, lambda d, r: torch.linalg.solve(h, r.T).T, value,
                               torch.zeros(4, dtype=D), tolerance=1e-20)  # fmt: skip
    assert_close(minima, centre)
    assert len(decrements) == 2


def test_a_search_ends_where_no_length_lowers_the_loss() -> None:
    """Next to the corner of |d| even a thousandth of the step goes beyond it."""
    solved = []

    def solve(d: Tensor, r: Tensor) -> Tensor:
        solved.append(float(d))
        return r

    start = torch.tensor([1e-5], dtype=D)
    minima, decrements = newton(torch.sign, solve, lambda d: float(d.abs().sum()), start, tolerance=1e-12)
    assert torch.equal(minima, start)
    assert decrements == [1.0]
    assert solved == [1e-5]


def test_a_search_that_overflows_says_so() -> None:
    """Far left of its minimum e^d - d has little curvature: one step leads to an overflow of the gradient."""
    solved = []

    def solve(d: Tensor, r: Tensor) -> Tensor:
        solved.append(float(d))
        return r / d.exp()

    falls = lambda d: -float(d.sum())  # a loss that does not overflow, so that the step is taken
    _, decrements = newton(lambda d: d.exp() - 1, solve, falls, torch.tensor([-20.0], dtype=D), tolerance=1e-12)
    assert decrements[-1] == math.inf
    assert solved == [-20.0]


def test_steps_that_run_out() -> None:
    _, decrements = newton(lambda d: d.exp() - 2, lambda d, r: r / d.exp(), lambda d: float(d.exp() - 2 * d),
                           torch.tensor([5.0], dtype=D), tolerance=1e-24, max_steps=3)  # fmt: skip
    assert len(decrements) == 3
    assert decrements[-1] > 1e-24
