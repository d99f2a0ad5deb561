"""Descent on parts of a design against dense solves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.sampling import gradient_variance
from lapwing.errors import NumericalError
from lapwing.linalg.operators import DesignRows, MatrixDesign, OperatorDesign, Solution, back_product, parts_with_rows
from lapwing.linalg.stochastic import Passes, Perturbed, dual_descent, sdd, sgd
from tests.tolerances import SOLVED, assert_close

D = torch.float64
Solve = Callable[..., Solution]
ROWS, SIZE, SHIFT = 45, 17, 0.7  # in parts of seven the last one has three rows


def matrix(rows: int = ROWS, size: int = SIZE) -> Tensor:
    """Columns of unequal lengths."""
    return torch.randn(rows, size, dtype=D) * torch.linspace(0.1, 0.5, size, dtype=D)


def noise(samples: int = 3, rows: int = ROWS, size: int = SIZE) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, size, dtype=D), torch.randn(samples, rows, dtype=D)


def dense(x: Tensor, zeta: Tensor, eps: Tensor, shift: float = SHIFT) -> Tensor:
    """The samples by a Cholesky factor of XᵀX + s I."""
    precision = x.T @ x + shift * torch.eye(x.shape[1], dtype=D)
    return torch.cholesky_solve((shift**0.5 * zeta + eps @ x).T, torch.linalg.cholesky(precision)).T


def residuals(x: Tensor, z: Tensor, zeta: Tensor, eps: Tensor, shift: float = SHIFT) -> Tensor:
    rhs = shift**0.5 * zeta + eps @ x
    return (rhs - z @ x.T @ x - shift * z).norm(dim=1) / rhs.norm(dim=1)


def solved(solve: Solve, system: Perturbed, **settings: Any) -> Tensor:
    """The samples, which must have reached the tolerance."""
    return solve(system, **settings).require_convergence(solve.__name__, "").x


def gradient(system: Perturbed, z: Tensor, objective: str) -> Tensor:
    """The gradient at z, as the mean of the estimates from all parts."""
    passes, function = Passes.over(system.design), system.objective(objective)
    return torch.stack([function.estimate(z, *part, passes.count) for part in parts_with_rows(system.design)]).mean(0)


class Stream:
    """A design that makes its parts again at every pass, and counts the passes."""

    streamed = True

    def __init__(self, x: Tensor, part: int) -> None:
        self.size, self.rows, self.like = x.shape[1], x.shape[0], x[:0, 0]
        self.passes, self.parts = 0, x.split(part)

    def __iter__(self) -> Iterator[DesignRows]:
        self.passes += 1
        for rows in self.parts:
            yield from MatrixDesign(rows.clone())


@pytest.mark.parametrize("part", [1, 7, 45])
def test_both_objectives_have_the_same_gradient(part: int) -> None:
    """The mean over parts against automatic differentiation of the two objectives."""
    x, (zeta, eps) = matrix(), noise()
    system = Perturbed(MatrixDesign(x, part), zeta, eps, SHIFT)
    z = torch.randn(3, SIZE, dtype=D, requires_grad=True)
    prior = zeta / SHIFT**0.5
    classic = 0.5 * (z @ x.T - eps).square().sum() + 0.5 * SHIFT * (z - prior).square().sum()
    reduced = 0.5 * (z @ x.T).square().sum() + 0.5 * SHIFT * (z - prior - eps @ x / SHIFT).square().sum()
    for name, value in (("classic", classic), ("reduced", reduced)):
        (expected,) = torch.autograd.grad(value, z)
        assert_close(gradient(system, z.detach(), name), expected, power=0.8)
    assert_close(gradient(system, z.detach(), "classic"), gradient(system, z.detach(), "reduced"), power=0.8)


@pytest.mark.parametrize("objective", ["reduced", "classic"])
def test_estimates_have_the_variance_that_is_stated(objective: str) -> None:
    """Over all parts, of which the last is smaller."""
    x, (zeta, eps) = matrix(), noise()
    system, z = Perturbed(MatrixDesign(x, 7), zeta, eps, SHIFT), torch.randn(3, SIZE, dtype=D)
    passes, function = Passes.over(system.design), system.objective(objective)
    estimates = torch.stack(
        [function.estimate(z, part, rows, passes.count) for part, rows in parts_with_rows(system.design)]
    )
    assert len(estimates) == 7
    assert_close(gradient_variance(system, z, objective), estimates.var(0, correction=0).sum(1))


@pytest.mark.parametrize("part", [1, 7, 45])
@pytest.mark.parametrize("shift", [0.7, 30.0])
def test_dual_descent_gives_the_samples_of_a_dense_solve(part: int, shift: float, generator: torch.Generator) -> None:
    x, (zeta, eps) = matrix(), noise()
    system = Perturbed(MatrixDesign(x, part), zeta, eps, shift)
    solution = sdd(system, epochs=300, tolerance=1e-11, generator=generator)
    assert solution.converged
    assert_close(solution.x, dense(x, zeta, eps, shift))
    assert solution.iterations == 300 * -(-ROWS // part)


@pytest.mark.parametrize("epochs", [2, 600])
def test_dual_coefficients_and_their_product_agree(epochs: int, generator: torch.Generator) -> None:
    """u = Xᵀ a, after two passes and at the end, where a is the solution of the dual."""
    x, (zeta, eps) = matrix(), noise()
    system, passes = Perturbed(MatrixDesign(x, 7), zeta, eps, SHIFT), Passes.over(MatrixDesign(x, 7))
    a, u = dual_descent(system, passes, epochs, generator)
    assert_close(u, back_product(system.design, a), power=0.78)
    kernel = x @ x.T + SHIFT * torch.eye(ROWS, dtype=D)
    expected = torch.linalg.solve(kernel, (eps - zeta @ x.T / SHIFT**0.5).T).T
    if epochs > 2:
        assert_close(a, expected)
        assert_close(zeta / SHIFT**0.5 + u, dense(x, zeta, eps))
    else:
        assert float((a - expected).norm()) > 0.01 * float(expected.norm())


@pytest.mark.parametrize("objective", ["reduced", "classic"])
def test_gradients_from_parts_reach_their_tolerance(objective: str, generator: torch.Generator) -> None:
    """Slowly: ten times the passes gain a digit or less, where dual descent has all of them."""
    x, (zeta, eps) = matrix(), noise()
    system = Perturbed(MatrixDesign(x, 7), zeta, eps, SHIFT)
    long = sgd(system, objective=objective, epochs=800, tolerance=1e-2, generator=generator)
    assert long.converged
    assert_close(long.residuals, residuals(x, long.x, zeta, eps))
    assert float((long.x - dense(x, zeta, eps)).norm()) < 0.01 * float(long.x.norm())
    short = sgd(system, objective=objective, epochs=80, generator=generator)
    assert float(short.residuals.max()) > float(long.residuals.max())
    assert float(sdd(system, epochs=800, generator=generator).residuals.max()) < 1e-12


@pytest.mark.parametrize("solve", [sgd, sdd])
def test_a_streamed_design_is_taken_in_its_order(solve: Solve, generator: torch.Generator) -> None:
    x, (zeta, eps) = matrix(), noise()
    stream = Stream(x, 7)
    system = Perturbed(stream, zeta, eps, SHIFT)
    samples = solved(solve, system, epochs=300, tolerance=2e-2, generator=generator)
    assert float(residuals(x, samples, zeta, eps).max()) < 2e-2
    assert stream.passes == 1 + 10 + 300 + 2  # counted, measured, descended, then right-hand side and residual


@pytest.mark.parametrize("solve", [sgd, sdd])
def test_float32_products(solve: Solve, generator: torch.Generator) -> None:
    x, (zeta, eps) = matrix(), noise()
    system = Perturbed(MatrixDesign(x.float()), zeta, eps, SHIFT)
    samples = solved(solve, system, epochs=1500, tolerance=1e-5, generator=generator)
    assert samples.dtype == D
    assert_close(samples, dense(x.float().double(), zeta, eps), SOLVED, torch.float32)


@pytest.mark.parametrize("solve", [sgd, sdd])
def test_equal_generators_give_equal_samples_and_the_noise_does_not_change(solve: Solve) -> None:
    x, (zeta, eps) = matrix(), noise()
    kept = zeta.clone(), eps.clone()
    one, two, other = (
        solve(Perturbed(MatrixDesign(x, 7), zeta, eps, SHIFT), epochs=5, generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    )
    assert torch.equal(one.x, two.x)
    assert not torch.equal(one.x, other.x)
    assert torch.equal(zeta, kept[0])
    assert torch.equal(eps, kept[1])


@pytest.mark.parametrize("solve", [sgd, sdd])
def test_the_error_of_an_unconverged_solve_has_its_residual(solve: Solve, generator: torch.Generator) -> None:
    x, (zeta, eps) = matrix(), noise()
    system = Perturbed(MatrixDesign(x, 7), zeta, eps, SHIFT)
    solution = solve(system, generator=generator, epochs=2, tolerance=1e-8)
    assert not solution.converged
    assert float(solution.residuals.max()) == pytest.approx(float(residuals(x, solution.x, zeta, eps).max()))
    with pytest.raises(NumericalError, match=r"it stopped after 14 iterations .* expected 1e-08\. Wait") as error:
        solution.require_convergence("it", "Wait.")
    stated = re.search(r"residual of ([0-9.e+-]+);", str(error.value))
    assert stated is not None
    assert float(stated[1]) == pytest.approx(float(solution.residuals.max()), rel=1e-2)


@pytest.mark.parametrize("solve", [sgd, sdd])
def test_steps_that_are_too_long_are_an_error(
    solve: Solve, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Passes, "step", lambda *_, **__: 1.0)
    solution = solve(Perturbed(MatrixDesign(matrix(), 7), *noise(), SHIFT), generator=generator)
    with pytest.raises(NumericalError, match=r"relative residual of (nan|inf|\d\.\d+e\+\d\d);"):
        solution.require_convergence("it", "")


def test_a_step_is_measured(generator: torch.Generator) -> None:
    """Power iterations give a lower bound within 15 %: the spectra of Gaussian matrices have no large gaps."""
    x = matrix(200, 30)
    whole = float(torch.linalg.matrix_norm(x, 2) ** 2)
    part = max(float(torch.linalg.matrix_norm(rows, 2) ** 2) for rows in x.split(50))
    passes = Passes.over(MatrixDesign(x, 50))
    for value, exact in zip(passes.largest(generator), (whole, part), strict=True):
        assert 0.85 * exact < value <= exact * (1 + 1e-12)
    step = passes.step(SHIFT, generator)
    assert step == pytest.approx(1 / (whole + SHIFT + 10 * (4 * part - whole)), rel=0.25)
    assert passes.step(SHIFT, generator, dual=True) < step
    one = Passes.over(MatrixDesign(x)).step(SHIFT, generator)
    assert one == pytest.approx(1 / (whole + SHIFT), rel=0.15)


def test_every_part_comes_once_in_a_pass(generator: torch.Generator) -> None:
    passes = Passes.over(MatrixDesign(matrix(), 7))
    starts = [rows.start for _, rows in passes.shuffle(3, generator)]
    for i in range(3):
        assert sorted(starts[7 * i : 7 * i + 7]) == list(range(0, ROWS, 7))
    assert starts[:7] != starts[7:14]


def test_a_design_of_zeros_leaves_the_prior(generator: torch.Generator) -> None:
    zeta, eps = noise()
    for solve in (sgd, sdd):
        system = Perturbed(MatrixDesign(torch.zeros(ROWS, SIZE, dtype=D), 7), zeta, eps, 4.0)
        assert_close(solved(solve, system, generator=generator), 0.5 * zeta)


def test_a_design_of_functions(generator: torch.Generator) -> None:
    x, (zeta, eps) = matrix(), noise()
    design = OperatorDesign(ROWS, SIZE, lambda v: v @ x.T, lambda u: u @ x, x[:0, 0])
    system = Perturbed(design, zeta, eps, SHIFT)
    assert_close(solved(sdd, system, epochs=500, tolerance=1e-10, generator=generator), dense(x, zeta, eps), SOLVED)
