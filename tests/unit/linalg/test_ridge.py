"""Ridge systems: solves, samples and their variational optimum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from lapwing.linalg.krylov import OrthonormalRows
from lapwing.linalg.operators import MatrixDesign
from lapwing.linalg.ridge import Ridge
from lapwing.linalg.stochastic import Inducing
from tests.references.ridge import draws
from tests.tolerances import SOLVED, assert_close, assert_within

# Ridge regression by products: its basis, its cache and its residuals. The samples and log-determinants themselves are
# compared with dense matrices by the tests of ``lw.linear`` and of ``lw.Sampled``.

D = torch.float64
ROWS, SIZE = 23, 31


def matrix(rows: int = ROWS, size: int = SIZE, seed: int = 3) -> Tensor:
    return torch.randn(rows, size, dtype=D, generator=torch.Generator().manual_seed(seed))


def scale(size: int = SIZE) -> Tensor:
    return torch.logspace(-1, 1, size, dtype=D)


def spectral(values: Tensor, rows: int = 200, seed: int = 0) -> Tensor:
    """A design whose Gram matrix has these eigenvalues."""
    gen = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(rows, len(values), dtype=D, generator=gen))
    right, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=D, generator=gen))
    return left * values.sqrt() @ right.T


def drawn(x: Tensor, samples: int = 5, seed: int = 1, **options: Any) -> Ridge:
    return Ridge.draw(MatrixDesign(x), samples, torch.Generator().manual_seed(seed), keep=True, **options)


def exact(ridge: Ridge, x: Tensor, alpha: float, phi: float) -> Tensor:
    diagonal = torch.ones(x.shape[1], dtype=D) if ridge.scale is None else ridge.scale
    return draws(x, ridge.prior, ridge.eps, alpha * diagonal, phi)


class Counted:
    """A design that counts the passes over it."""

    def __init__(self, x: Tensor) -> None:
        self.design, self.passes = MatrixDesign(x), 0
        self.rows, self.size, self.like = self.design.rows, self.design.size, self.design.like

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(self.design)


def test_the_residuals_are_the_true_ones() -> None:
    """|b - A x| / |√s ζ| in the coordinates of the prior, computed with the matrix itself."""
    x = spectral(torch.logspace(3, -2, 60, dtype=D), 80)
    ridge = drawn(x, samples=6, width=4, scale=scale(60))
    solution = ridge.samples(0.5, 2.0, 1e-3)
    root = scale(60).sqrt()
    target = ridge.prior + ridge.eps @ x / root  # √s ζ + D^-½ Xᵀ ε with a shift s of one
    left = target - (solution.x * root / 2**0.5) @ (
        torch.diag(1 / root) @ x.T @ x @ torch.diag(1 / root) + torch.eye(60)
    )
    true = left.norm(dim=1) / ridge.prior.norm(dim=1)
    assert float(true.max()) <= 1e-3
    assert float((true - solution.residuals).abs().max()) <= 0.2 * 1e-3
    assert float(true.max()) > 1e-8  # not solved further than the tolerance asks


def test_noise_is_standard_normal_and_kept_on_request() -> None:
    x = matrix()
    ridge = drawn(x, samples=800)
    assert ridge.prior.shape == (800, SIZE)
    assert_within(ridge.prior.square().mean(1), torch.tensor(1.0, dtype=D))
    assert_within(ridge.eps.square().mean(1), torch.tensor(1.0, dtype=D))
    for rows in (ridge.prior.reshape(-1), ridge.eps.reshape(-1)):
        assert abs(float(rows.mean())) <= 5 * len(rows) ** -0.5
    crossed = (ridge.prior[:, :20] * ridge.eps[:, :20]).reshape(-1)
    assert abs(float(crossed.mean())) <= 5 * len(crossed) ** -0.5
    assert_close(ridge.back, ridge.eps @ x)
    assert Ridge.draw(MatrixDesign(x), 3, None).eps is None


@pytest.mark.parametrize("scaled", [False, True])
def test_one_basis_for_every_precision(scaled: bool) -> None:
    """Larger precisions take no product; smaller ones extend the basis."""
    x = spectral(torch.logspace(3, -3, 80, dtype=D), 90)
    counted = Counted(x)
    gen = torch.Generator().manual_seed(1)
    ridge = Ridge.draw(counted, 3, gen, scale(80) if scaled else None, keep=True, width=6)
    ridge.samples(1.0, 1.0, 1e-6)
    passes = counted.passes
    assert passes > 1
    for alpha, phi in ((1.0, 1.0), (30.0, 1.0), (0.5, 4.0)):
        assert_close(ridge.samples(alpha, phi, 1e-6).x, exact(ridge, x, alpha, phi), 0.35)
        assert counted.passes == passes
    smaller = ridge.samples(1e-2, 1.0, 1e-6)
    assert_close(smaller.x, exact(ridge, x, 1e-2, 1.0), 0.35)
    grown = counted.passes
    assert grown > passes
    ridge.samples(1e-2, 1.0, 1e-6)
    assert counted.passes == grown
    assert smaller.iterations == grown - 1  # one was for Xᵀ ε


@pytest.mark.parametrize("most", [20, 6])  # larger and smaller than after the first products
def test_a_basis_that_may_not_grow_is_finished_by_conjugate_gradients(most: int) -> None:
    x = spectral(torch.logspace(3, -3, 80, dtype=D), 90)
    ridge = drawn(x, samples=5, width=4, bytes=8 * 80 * most)
    solution = ridge.samples(0.1, 1.0, 1e-9)
    assert len(ridge.basis.rows) <= most
    assert_close(solution.x, exact(ridge, x, 0.1, 1.0), SOLVED)


def test_the_logdet_forms_no_second_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ritz vectors would take as much memory as the basis."""
    x = spectral(torch.logspace(3, -3, 80, dtype=D), 90)
    ridge = drawn(x, samples=5, width=4)
    assert len(ridge.basis_reaching(0.1, 1e-9).rows) > 20
    formed, combined = [], OrthonormalRows.combine
    monkeypatch.setattr(OrthonormalRows, "combine", lambda rows, y: formed.append(len(y)) or combined(rows, y))
    ridge.logdet(torch.tensor(0.1, dtype=D), 3, 5)
    assert max(formed) == 3


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_products_with_samples_come_from_the_basis(single: bool, scaled: bool) -> None:
    """Also for samples rounded to single precision; samples outside of the basis take a pass."""
    x = matrix(60, 300)
    design = Counted(x)
    ridge = Ridge.draw(design, 6, torch.Generator().manual_seed(0), scale=scale(300) if scaled else None, width=8)  # type: ignore[arg-type]
    z = ridge.samples(3.0, 0.5, 1e-2).x
    z = z.float() if single else z
    before = design.passes
    first = ridge.gram(z[:4])
    assert design.passes == before
    expected = z.double() @ x.T @ x
    assert float((first - expected[:4]).norm() / expected.norm()) < (1e-5 if single else 1e-9)
    whole = ridge.gram(z)  # the last two are from conjugate gradients
    assert design.passes == before + 1
    assert_close(whole[4:], expected[4:])


def test_products_before_there_is_a_basis() -> None:
    x = matrix()
    rows = torch.randn(2, SIZE, dtype=D)
    assert_close(drawn(x).gram(rows), rows @ x.T @ x)


def logdet(values: Tensor, shift: float) -> float:
    return float(torch.log1p(values / shift).sum())


FLAT = torch.linspace(0.2, 5, 100, dtype=D)


def test_one_run_of_probes_serves_every_shift() -> None:
    counted = Counted(spectral(FLAT))
    ridge = Ridge.draw(counted, 2, torch.Generator().manual_seed(1), width=2)
    ridge.logdet(torch.tensor(1.0, dtype=D), 4, 6)
    passes = counted.passes
    for shift in (1e-3, 1.0, 10.0):
        ridge.logdet(torch.tensor(shift, dtype=D), 4, 6)
    assert counted.passes == passes


def test_other_probes_and_steps_are_other_estimates() -> None:
    """The error falls with more of either."""
    ridge, one = drawn(spectral(FLAT), samples=2, width=2), torch.tensor(1.0, dtype=D)
    few, many, short = ridge.logdet(one, 4, 12), ridge.logdet(one, 400, 12), ridge.logdet(one, 4, 1)
    truth = logdet(FLAT, 1.0)
    assert many.error < 0.3 * few.error < 0.3 * short.error
    assert abs(float(many.value) - truth) < 4 * many.error
    assert float(ridge.logdet(one, 4, 12).value) == float(few.value)


def test_another_scale_is_another_ridge() -> None:
    """The noise stays; the copy does not share the cache, however it was made."""
    x = matrix()
    plain, shift = drawn(x), torch.tensor(1.0, dtype=D)
    before = plain.samples(1.0, 1.0, 1e-10).x
    estimate = plain.logdet(shift, 4, 6)
    for other in (replace(plain, scale=scale()), plain.rescale(scale())):
        assert_close(other.samples(1.0, 1.0, 1e-10).x, exact(other, x, 1.0, 1.0), SOLVED)
        gram = (x.T @ x) * (scale()[:, None] * scale()).rsqrt()
        assert float(other.logdet(shift, 4, 6).value) == pytest.approx(logdet(torch.linalg.eigvalsh(gram), 1.0))
    assert torch.equal(plain.samples(1.0, 1.0, 1e-10).x, before)
    assert float(plain.logdet(shift, 4, 6).value) == float(estimate.value)


def test_the_last_rescaled_ridge_is_kept() -> None:
    plain = drawn(matrix())
    assert plain.rescale(scale()) is plain.rescale(scale().clone())
    assert plain.rescale(2 * scale()) is not plain.rescale(scale())


# A Gaussian over whitened inducing variables, against plain Gaussian algebra.

EYE = torch.eye(4, dtype=D)


def information(seed: int = 0, size: int = 4) -> Tensor:
    rows = torch.randn(9, size, dtype=D, generator=torch.Generator().manual_seed(seed))
    return rows.T @ rows


def test_before_the_data_it_is_the_prior() -> None:
    start = Inducing.before_data(4, torch.empty(0))
    assert torch.equal(start.precision, EYE)
    assert float(start.divergence()) == 0
    assert float(start.reduction.abs().max()) == 0
    prior = torch.rand(3, 2, 2, dtype=D)
    assert torch.equal(start.posterior_cov(prior, torch.randn(3, 2, 4, dtype=D)), prior)


def test_divergence_is_that_of_two_normals() -> None:
    inducing = Inducing(EYE + information())
    zero = torch.zeros(4, dtype=D)
    exact = kl_divergence(MultivariateNormal(zero, precision_matrix=EYE + information()), MultivariateNormal(zero, EYE))
    assert_close(inducing.divergence(), exact)


def test_what_the_data_take_away() -> None:
    inducing = Inducing(EYE + information())
    assert_close(inducing.reduction, EYE - torch.linalg.inv(EYE + information()))
    rows, prior = torch.randn(5, 3, 4, dtype=D), torch.rand(5, 3, 3, dtype=D)
    expected = torch.stack([p - r @ (EYE - torch.linalg.inv(EYE + information())) @ r.T for p, r in zip(prior, rows)])
    assert_close(inducing.posterior_cov(prior, rows), expected)


def test_what_is_left_under_other_prior_variances() -> None:
    """Prior, rows and B all grow with the factor."""
    inducing, factors = Inducing(EYE + information()), (0.01, 1.0, 30.0)
    rows, prior = torch.randn(5, 3, 4, dtype=D), torch.rand(5, 3, 3, dtype=D)
    for factor, cov in zip(factors, inducing.posterior_covs(prior, rows, factors), strict=True):
        assert_close(cov, inducing.times(factor).posterior_cov(factor * prior, factor**0.5 * rows))


@pytest.mark.parametrize("step", [1.0, 0.3])
def test_steps_average_precisions(step: float) -> None:
    """Natural gradients: the new precision is the old one and the optimum's, averaged."""
    before = Inducing(EYE + information(1))
    after = before.update(information(2), step)
    assert_close(after.precision, (1 - step) * (EYE + information(1)) + step * (EYE + information(2)))


def test_averaged_steps_of_batches_are_one_step_on_all() -> None:
    """Steps of 1, 1/2, 1/3 ... give every batch the same weight."""
    inducing = Inducing.before_data(4, torch.empty(0))
    parts = [information(seed) for seed in range(5)]
    for i, part in enumerate(parts):
        inducing = inducing.update(len(parts) * part, 1 / (i + 1))
    assert_close(inducing.precision, EYE + torch.stack(parts).sum(0))


def test_the_step_is_the_natural_gradient() -> None:
    """The gradient of E[log p] - KL in the expectation parameter S is ½ (old precision - target)."""
    s = torch.linalg.inv(EYE + information(1)).requires_grad_()
    value = -0.5 * (information(2) * s).sum() - 0.5 * (s.diagonal().sum() - torch.linalg.slogdet(s)[1])
    (slope,) = torch.autograd.grad(value, s)
    updated = Inducing(EYE + information(1)).update(information(2), 0.1)
    assert_close(updated.precision, EYE + information(1) - 2 * 0.1 * slope, SOLVED)


def test_only_the_whole_is_kept_positive() -> None:
    """Some batches may lower the precision; where all together would lower it below the prior's, it stays there."""
    inducing = (
        Inducing.before_data(4, torch.empty(0)).update(-0.5 * information(1), 1.0).update(2 * information(1), 0.5)
    )
    assert_close(inducing.precision, EYE + 0.75 * information(1))
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=D, generator=torch.Generator().manual_seed(0)))[0]
    values = torch.tensor([2.0, -0.9, 0.5, -3.0], dtype=D)
    inducing = Inducing(EYE + (basis * values) @ basis.mT)
    assert_close(inducing.information, (basis * values.clamp_min(0)) @ basis.mT)
    assert_close(inducing.precision, EYE + inducing.information)
    assert_close(inducing.update(torch.zeros_like(EYE), 0.5).average, EYE + 0.5 * (basis * values) @ basis.mT)
    assert float(inducing.divergence()) > 0
    assert_close(inducing.times(3.0).information, 3 * inducing.information)
