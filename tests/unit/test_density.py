"""The Laplace approximation of a density: closed forms, quadrature, laws, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from density import DensityLaplace, laplace_density
from scipy import integrate, special
from torch import Tensor

import lapwing as lw
from tests.tolerances import assert_close, assert_within

D = torch.float64
ROOT = torch.tensor([[1.5, 0.0, 0.0], [0.4, 0.3, 0.0], [-2.0, 0.7, 1.1]], dtype=D)
CENTRE = torch.tensor([2.0, -0.5, 7.0], dtype=D)


def gaussian(size: int) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor]:
    """A log density with its mean, covariance and log normaliser."""
    covariance = (ROOT @ ROOT.mT)[:size, :size]
    mean, precision = CENTRE[:size], torch.linalg.inv(covariance)
    normaliser = 0.5 * torch.logdet(2 * math.pi * covariance) + 3.25
    return lambda x: 3.25 - 0.5 * (x - mean) @ precision @ (x - mean), mean, covariance, normaliser


def gamma(shape: float, rate: float = 1.0) -> Callable[[Tensor], Tensor]:
    """A Gamma density in the logarithm of its variable; its integral is Γ(shape) / rate^shape."""
    return lambda u: (shape * u - rate * u.exp()).sum()


def student(freedom: float) -> Callable[[Tensor], Tensor]:
    return lambda x: -0.5 * (freedom + 1) * torch.log1p(x.square() / freedom).sum()


def banana(x: Tensor) -> Tensor:
    """A bent Gaussian that is narrower on the left: no shear, so that its integral is no closed form."""
    return -0.5 * x[0].square() - 2 * (x[1] - 0.5 * x[0].square()).square() * (1 + 0.3 * torch.tanh(x[0]))


@pytest.mark.parametrize(("size", "away"), [(1, 1e3), (2, 0.0), (3, 1.0)])
def test_a_gaussian_is_itself(size: int, away: float) -> None:
    log_density, mean, covariance, normaliser = gaussian(size)
    approximation = laplace_density(log_density, mean + away)
    assert_close(approximation.mean, mean)
    assert_close(approximation.covariance, covariance)
    assert_close(approximation.log_normaliser, normaliser)
    x = torch.randn(5, 4, size, dtype=D)
    expected = torch.stack([log_density(point) for point in x.reshape(-1, size)]).reshape(5, 4) - normaliser
    assert_close(approximation.log_prob(x), expected)
    assert_close(approximation.log_prob(x[0, 0]), expected[0, 0])


@pytest.mark.parametrize("shape", [0.5, 3.0, 40.0])
@pytest.mark.parametrize("start", [-50.0, 0.0, 6.0])
def test_the_integral_of_a_gamma_density_is_stirlings_formula(shape: float, start: float) -> None:
    approximation = laplace_density(gamma(shape, rate=2.0), [start])
    stirling = shape * math.log(shape) - shape + 0.5 * math.log(2 * math.pi / shape)
    assert approximation.mean.item() == pytest.approx(math.log(shape / 2), abs=1e-12)
    assert approximation.covariance.item() == pytest.approx(1 / shape, rel=1e-12)
    assert approximation.log_normaliser.item() == pytest.approx(stirling - shape * math.log(2), abs=1e-11)
    # Stirling's series: what is missing lies between the first term and the first two.
    missing = special.gammaln(shape) - stirling
    assert 1 / (12 * shape) - 1 / (360 * shape**3) < missing < 1 / (12 * shape)


@pytest.mark.parametrize("freedom", [5.0, 50.0, 500.0])
def test_the_integral_of_a_student_density(freedom: float) -> None:
    """Against quadrature. Heavy tails are what a Gaussian misses: the integral is too small by 3/(4 freedom)."""
    approximation = laplace_density(student(freedom), [3.0])
    density = lambda x: math.exp(-0.5 * (freedom + 1) * math.log1p(x * x / freedom))
    exact = math.log(integrate.quad(density, -math.inf, math.inf, epsabs=1e-13)[0])
    assert approximation.mean.item() == pytest.approx(0.0, abs=1e-12)
    assert approximation.covariance.item() == pytest.approx(freedom / (freedom + 1), rel=1e-12)
    closed = 0.5 * math.log(2 * math.pi * freedom / (freedom + 1))
    assert approximation.log_normaliser.item() == pytest.approx(closed, abs=1e-12)
    assert exact - approximation.log_normaliser.item() == pytest.approx(0.75 / freedom, rel=0.5 / freedom)


def on_a_grid(log_density: Callable[[Tensor], Tensor], reach: float = 12.0, count: int = 1201) -> float:
    """log of the integral over the plane, by the trapezoidal rule."""
    axis = torch.linspace(-reach, reach, count, dtype=D)
    plane = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))
    return float(torch.logsumexp(log_density(plane).flatten(), 0) + 2 * math.log(2 * reach / (count - 1)))


def test_a_banana_in_the_plane() -> None:
    approximation = laplace_density(banana, [2.0, -3.0])
    assert float(approximation.mean.abs().max()) <= 1e-12
    assert_close(approximation.precision, torch.diag(torch.tensor([1.0, 4.0], dtype=D)))
    assert approximation.log_normaliser.item() == pytest.approx(math.log(math.pi), abs=1e-12)
    # Near, since it is nearly a sheared Gaussian, and not equal.
    assert on_a_grid(banana) - approximation.log_normaliser.item() == pytest.approx(0.0138, abs=1e-4)


def skewed(x: Tensor) -> Tensor:
    """Three coupled variables, with a mode where nothing is symmetric."""
    return 4 * x.sum() - (x @ ROOT.to(x)).exp().sum() - 0.1 * (x - 1).pow(4).sum()


@pytest.mark.parametrize("scale", [(1.0, 1.0, 1.0), (1e-7, 1.0, 1e7)], ids=["unit", "units apart"])
def test_linear_coordinates_do_not_matter(scale: tuple[float, ...]) -> None:
    """x = M z: the mean and the covariance move along, the normaliser changes by log |det M|."""
    matrix = ROOT * torch.tensor(scale, dtype=D)
    plain = laplace_density(skewed, [0.0, 0.0, 0.0])
    other = laplace_density(lambda z: skewed(matrix @ z), [0.0, 0.0, 0.0])
    assert_close(matrix @ other.mean, plain.mean)
    assert_close(matrix @ other.covariance @ matrix.mT, plain.covariance)
    assert_close(other.log_normaliser, plain.log_normaliser - torch.linalg.slogdet(matrix).logabsdet)


def test_of_two_modes_the_near_one() -> None:
    wells = lambda x: -(x.square() - 1).square().sum()
    assert laplace_density(wells, [0.2]).mean.item() == pytest.approx(1.0, abs=1e-12)
    assert laplace_density(wells, [-0.2]).mean.item() == pytest.approx(-1.0, abs=1e-12)


def test_outside_of_its_domain_a_density_may_be_zero() -> None:
    """The same Gamma density in its own variable: other coordinates, other approximation."""
    approximation = laplace_density(lambda x: -math.inf if bool(x <= 0) else 2 * x.log() - x, [9.0])
    assert approximation.mean.item() == pytest.approx(2.0, abs=1e-12)
    assert approximation.covariance.item() == pytest.approx(2.0, rel=1e-12)
    assert approximation.log_normaliser.item() == pytest.approx(
        2 * math.log(2) - 2 + 0.5 * math.log(4 * math.pi), abs=1e-12
    )


def test_samples(generator: torch.Generator) -> None:
    _, mean, covariance, _ = gaussian(3)
    approximation = laplace_density(gaussian(3)[0], mean)
    draws = approximation.sample(4000, generator)
    assert draws.shape == (4000, 3)
    assert draws.dtype == D
    assert_within(draws, mean)
    assert_within((draws - mean).unsqueeze(-1) * (draws - mean).unsqueeze(-2), covariance)


def test_results_carry_no_gradient_and_work_in_any_mode() -> None:
    plain = laplace_density(banana, [1.0, 1.0])
    with torch.inference_mode():
        inference = laplace_density(banana, torch.ones(2))
    with torch.no_grad():
        quiet = laplace_density(banana, torch.ones(2, requires_grad=True))
    for found in (plain, inference, quiet):
        assert not any(t.requires_grad for t in (found.mean, found.covariance, found.log_normaliser))
        assert torch.equal(found.covariance, plain.covariance)


BAD_INPUT: dict[str, tuple[Callable[[Tensor], object], object, str]] = {
    "start not finite": (banana, [0.0, math.nan], "start is .*nan.*; expected finite"),
    "start a matrix": (banana, torch.zeros(2, 2), r"shape \(2, 2\); expected \(D,\)"),
    "start empty": (banana, torch.zeros(0), r"shape \(0,\); expected \(D,\)"),
    "no density at the start": (lambda x: x.log().sum(), [-1.0], "log density is nan at .*; expected a finite"),
    "several numbers": (lambda x: x, [1.0, 2.0], r"shape \(2,\); expected a tensor with one number"),
    "no number": (lambda x: None, [1.0], "a NoneType; expected a tensor with one number"),
    "constant": (lambda x: 1.0, [1.0], "does not depend on its argument through autograd"),
    "float32": (lambda x: -x.float().square().sum(), [1.0], "torch.float32; expected torch.float64"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused(case: str) -> None:
    log_density, start, message = BAD_INPUT[case]
    with pytest.raises(lw.errors.DataError, match=message):
        laplace_density(log_density, start)  # type: ignore[arg-type]


NO_MODE: dict[str, tuple[Callable[[Tensor], Tensor], list[float], str]] = {
    "saddle": (lambda x: x[0] * x[1], [0.0, 0.0], "smallest eigenvalue is -1 at"),
    "flat everywhere": (lambda x: 0 * x.sum(), [1.0, 2.0], "smallest eigenvalue is 0 at"),
    "flat in one direction": (lambda x: -(x.sum() - 1).square(), [1.0, 2.0], "smallest eigenvalue is .*e-|is 0 at"),
    "flat at the mode": (lambda x: -x.pow(4).sum(), [1.3], "still changes with every step"),
    "no maximum": (lambda x: -x.sum(), [1.3], "after 100 steps .* gradient has the length 1 "),
    "boundary": (lambda x: torch.where(x > 0, -x, -math.inf).sum(), [1.3], "no mode was reached: .* at a boundary"),
    "kink": (lambda x: -(x - 1 / 3).abs().sum(), [1.0], "no mode was reached: .* gradient has the length 1 "),
    "no derivative": (lambda x: -x.sqrt().sum(), [0.0], "derivatives there are not finite"),
}


@pytest.mark.parametrize("case", NO_MODE)
def test_what_has_no_curved_peak_is_refused(case: str) -> None:
    log_density, start, message = NO_MODE[case]
    with pytest.raises(lw.errors.NumericalError, match=message):
        laplace_density(log_density, start)


def test_too_few_steps_are_refused_with_what_is_left() -> None:
    with pytest.raises(lw.errors.NumericalError, match=r"after 2 steps .* gradient has the length .* raise max_steps"):
        laplace_density(gamma(3.0), [6.0], max_steps=2)


def test_points_of_another_size_and_no_samples_are_refused() -> None:
    approximation: DensityLaplace = laplace_density(banana, [1.0, 1.0])
    for shape in ((), (3,), (2, 1)):
        with pytest.raises(lw.errors.DataError, match=r"expected \(\.\.\., 2\)"):
            approximation.log_prob(torch.zeros(shape))
    with pytest.raises(lw.errors.UnsupportedError, match="n is 0; expected an integer of at least 1"):
        approximation.sample(0)
