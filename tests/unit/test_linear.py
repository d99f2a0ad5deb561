"""Linear models by products alone, against closed form."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import scipy.sparse
import torch
from torch import Tensor

import lapwing as lw
from lapwing.linalg.operators import MatrixDesign, back_product
from lapwing.linalg.ridge import Ridge
from tests.references.ridge import Linear, complete, draws
from tests.tolerances import SOLVED, assert_close, assert_within, least_hits, student
from tests.unit.linear_problems import GIVEN, SHAPES, D, X, Y, noise, operator, problem, seed, steep

CLOSE = 0.52  # of the rounding unit: 7e-9 in float64


ALPHA, PHI = 0.7, 0.16


def completed(exact: Linear, precision: float = 1.0, variance: float = 1.0) -> lw.linear.LinearPosterior:
    """A posterior with noise whose second moments are exact, so that γ from its samples is exact."""
    design = MatrixDesign(exact.x)
    zeta, eps = complete(exact.x, seed(2))
    ridge = Ridge(design, None, zeta, back_product(design, eps), eps=eps)
    return lw.linear.LinearPosterior(ridge, exact.y, precision, variance, 1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("alpha", "std"), [(0.7, 0.4), (0.01, 1.0), (30.0, 0.1)])
def test_the_mean_is_ridge_regression(shape: str, alpha: float, std: float) -> None:
    exact = problem(shape)
    posterior = lw.linear.fit(exact.x, exact.y, precision=alpha, noise_std=std, tolerance=1e-12)
    assert posterior.mean.shape == (exact.x.shape[1],)
    assert_close(posterior.mean, exact.mean(alpha, std**2), CLOSE)
    assert (posterior.precision, posterior.noise_variance) == (alpha, pytest.approx(std**2))
    assert posterior.trace is None


ANSWERS: dict[str, Any] = {
    "mean": lambda posterior: posterior.mean,
    "samples": lambda posterior: posterior.samples(),
    "evidence": lambda posterior: torch.tensor(posterior.log_evidence()),
}


@pytest.mark.parametrize("std", [0.1, 1.0])
def test_no_answer_depends_on_what_was_asked_before(std: float) -> None:
    """Mean, samples and evidence in their order, and after each of them was the first to be asked for.

    Eigenvalues over four decades: without the basis, or with one of a few products, the mean takes far too many
    iterations.
    """
    exact = steep()
    posterior = lw.linear.fit(exact.x, exact.y, precision=1.0, noise_std=std)
    in_turn = {name: answer(posterior) for name, answer in ANSWERS.items()}
    assert float((posterior.mean - exact.mean(1.0, std**2)).norm()) <= 1e-5 * float(posterior.mean.norm())
    for first in list(ANSWERS)[1:]:
        other = lw.linear.fit(exact.x, exact.y, precision=1.0, noise_std=std)
        assert torch.equal(ANSWERS[first](other), in_turn[first])
        assert all(torch.equal(ANSWERS[name](other), value) for name, value in in_turn.items())
        assert other.ridge.basis.products == posterior.ridge.basis.products < 40


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("samples", [1, 5, 40])
def test_samples_are_dense_solves_of_the_same_noise(shape: str, samples: int) -> None:
    """Fewer samples than the basis starts from, and more."""
    exact = problem(shape)
    posterior = lw.linear.fit(exact.x, exact.y, **GIVEN, num_samples=samples, tolerance=1e-12, generator=seed(8))
    ridge = noise(exact.x, samples, 8)
    assert torch.equal(ridge.prior, posterior.ridge.prior)
    expected = draws(exact.x, ridge.prior, ridge.eps, torch.full((exact.x.shape[1],), ALPHA, dtype=D), PHI)
    assert_close(posterior.solution.x, expected, CLOSE)
    assert_close(posterior.samples(), exact.mean(ALPHA, PHI) + expected, CLOSE)
    assert torch.equal(posterior.samples(1), posterior.samples()[:1])
    assert float(posterior.solution.residuals.max()) <= 1e-12


def test_samples_of_many_weights() -> None:
    exact = problem((200, 800))
    posterior = lw.linear.fit(exact.x, exact.y, **GIVEN, num_samples=12, tolerance=1e-12)
    ridge = noise(exact.x, 12)
    expected = draws(exact.x, ridge.prior, ridge.eps, torch.full((800,), ALPHA, dtype=D), PHI)
    assert_close(posterior.solution.x, expected, CLOSE)


def test_many_samples_have_the_covariance() -> None:
    exact = problem((9, 6))
    gap = lw.linear.fit(exact.x, exact.y, **GIVEN, num_samples=4000).samples() - exact.mean(ALPHA, PHI)
    assert_within(gap[:, :, None] * gap[:, None, :], exact.covariance(ALPHA, PHI))
    assert float((gap.mean(0).abs() / (gap.std(0) / 4000**0.5)).max()) <= 5


@pytest.mark.parametrize("shape", SHAPES)
def test_complete_noise_predicts_exactly(shape: str) -> None:
    exact = problem(shape)
    new = problem(shape, number=7).x[:5]
    posterior = completed(exact, ALPHA, PHI).predict(new)
    variance = (new @ exact.covariance(ALPHA, PHI) * new).sum(1, keepdim=True)
    assert_close(posterior.mean, (new @ exact.mean(ALPHA, PHI))[:, None], SOLVED)
    assert_close(posterior.epistemic, variance, SOLVED)
    assert_close(posterior.variance, variance + PHI, SOLVED)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_variance_comes_nearer_with_more_samples(shape: str) -> None:
    """Its relative error is √(2/K)."""
    exact = problem(shape)
    new = problem(shape, number=7).x
    variance = (new @ exact.covariance(ALPHA, PHI) * new).sum(1)
    for samples in (30, 3000):
        posterior = lw.linear.fit(exact.x, exact.y, **GIVEN, num_samples=samples).predict(new).epistemic[:, 0]
        gap = float((posterior / variance - 1).square().mean().sqrt())
        assert 0.3 * (2 / samples) ** 0.5 < gap < 2 * (2 / samples) ** 0.5


@pytest.mark.parametrize("shape", ["tall", "square"])
@pytest.mark.parametrize("start", [(1.0, 1.0), (50.0, 0.01)])
def test_with_exact_gamma_the_optimum_is_that_of_the_evidence(shape: str, start: tuple[float, float]) -> None:
    """Up to the steps at the end, which change a logarithm by less than 1e-4."""
    exact = problem(shape, noise=1.0)
    alpha, phi = exact.optimum()
    posterior = completed(exact, *start).tuned()
    assert (posterior.precision, posterior.noise_variance) == pytest.approx((alpha, phi), rel=2e-3)
    best = exact.log_evidence(posterior.precision, posterior.noise_variance)
    for other in ((alpha * 1.05, phi), (alpha / 1.05, phi), (alpha, phi * 1.05), (alpha, phi / 1.05)):
        assert exact.log_evidence(*other) < best
    assert posterior.gamma[0] == pytest.approx(exact.gamma(posterior.precision, posterior.noise_variance), rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_precision_for_a_given_noise(shape: str) -> None:
    exact = problem(shape)
    posterior = completed(exact, 1.0, 0.09).tuned(noise=False)
    assert posterior.noise_variance == 0.09
    assert posterior.precision == pytest.approx(exact.optimum(0.09)[0], rel=1e-3)
    front = lw.linear.fit(exact.x, exact.y, noise_std=0.3, num_samples=400)
    assert front.noise_variance == pytest.approx(0.09, rel=1e-12)
    assert front.precision == pytest.approx(exact.optimum(0.09)[0], rel=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_noise_for_a_given_precision(shape: str) -> None:
    """The evidence is lower at a noise that is one percent smaller or larger."""
    exact = problem(shape, noise=2.0)
    posterior = completed(exact, 1.5, 1.0).tuned(precision=False)
    assert posterior.precision == 1.5
    lower, at, upper = (exact.log_evidence(1.5, posterior.noise_variance * f) for f in (0.99, 1.0, 1.01))
    assert at > max(lower, upper)
    front = lw.linear.fit(exact.x, exact.y, precision=1.5, num_samples=400)
    assert front.precision == 1.5
    assert front.noise_variance == pytest.approx(posterior.noise_variance, rel=0.3 if shape == "wide" else 0.1)


@pytest.mark.parametrize("given", [None, "noise_std", "precision"])
@pytest.mark.parametrize(("features", "targets"), [(1.0, 1e6), (1.0, 1e-6), (1e-6, 1.0), (1e6, 1.0), (1e12, 1e-9)])
def test_learning_is_the_same_in_all_units(given: str | None, features: float, targets: float) -> None:
    """Weights have the unit of the targets over that of the features."""
    exact, weights = problem(), targets / features
    known = {"noise_std": 0.3, "precision": 1.5}
    units = {"noise_std": targets, "precision": weights**-2}
    one = lw.linear.fit(exact.x, exact.y, **{name: known[name] for name in [given] if name})
    other = lw.linear.fit(
        features * exact.x, targets * exact.y, **{name: known[name] * units[name] for name in [given] if name}
    )
    assert other.precision * weights**2 == pytest.approx(one.precision, rel=1e-6)
    assert other.noise_variance / targets**2 == pytest.approx(one.noise_variance, rel=1e-6)
    assert len(other.trace.steps) == len(one.trace.steps)
    assert_close(other.samples() / weights, one.samples(), SOLVED)


def test_a_noise_for_a_precision_that_leaves_nothing_to_the_features() -> None:
    exact = problem()
    posterior = lw.linear.fit(exact.x, 1e6 * exact.y, precision=1.0, num_samples=400)
    assert posterior.gamma[0] < 1e-6
    assert posterior.noise_variance == pytest.approx(1e12 * float(exact.y.square().mean()), rel=0.05)


def test_few_samples_come_near() -> None:
    exact = problem((400, 60))
    alpha, phi = exact.optimum()
    posterior = lw.linear.fit(exact.x, exact.y)
    assert posterior.precision == pytest.approx(alpha, rel=0.15)
    assert posterior.noise_variance == pytest.approx(phi, rel=0.05)
    assert len(posterior.samples()) == 16


def test_the_trace_has_every_step() -> None:
    exact = problem()
    posterior = lw.linear.fit(exact.x, exact.y, num_samples=100)
    trace = posterior.trace
    assert (trace.tuner, trace.score) == ("linear.fit", "gamma")
    first = trace.steps[0]
    assert first.noise == pytest.approx((float(exact.y.square().mean()),))
    assert first.precisions[0] * first.noise[0] == pytest.approx(float(exact.x.square().sum()) / 90, rel=0.3)
    assert first.gamma >= 0.5
    last = trace.steps[-1]
    assert last.precisions[0] == pytest.approx(posterior.precision, rel=1e-4)
    assert last.noise[0] == pytest.approx(posterior.noise_variance, rel=1e-4)
    value, error = re.fullmatch(r"gamma (\S+) ± (\S+)", trace.findings[0]).groups()
    assert (float(value), float(error)) == pytest.approx(posterior.gamma, rel=0.05)


def test_the_trace_says_if_the_steps_ran_out() -> None:
    exact = problem()
    posterior = lw.linear.fit(exact.x, exact.y, **GIVEN).tuned(max_steps=1)
    assert re.search(r"; the last step still changed a logarithm by \d\S*", posterior.trace.findings[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_gamma_and_its_error(shape: str) -> None:
    """Exact from complete noise; within its stated error from random noise, over fifty seeds."""
    exact = problem(shape)
    truth = exact.gamma(ALPHA, PHI)
    assert completed(exact, ALPHA, PHI).gamma[0] == pytest.approx(truth, rel=1e-8)
    hits = 0
    for number in range(50):
        value, error = lw.linear.fit(exact.x, exact.y, **GIVEN, generator=seed(number)).gamma
        hits += abs(value - truth) <= student(0.95, 15) * error
    assert hits >= least_hits(50, 0.95)
    assert lw.linear.fit(exact.x, exact.y, **GIVEN, num_samples=1).gamma[1] == math.inf


@pytest.mark.parametrize("shape", [(160, 100), (100, 160)], ids=["tall", "wide"])
def test_the_evidence_is_within_its_error(shape: tuple[int, int]) -> None:
    """Over 25 seeds, for noise and probes: Student's interval of 95 % contains the truth as often as it says.

    The evidence is an estimate here, not exact, and its error is not overstated.
    """
    exact = problem(shape)
    truth, gaps, errors = exact.log_evidence(5.0, 1.0), [], []
    for number in range(25):
        posterior = lw.linear.fit(
            exact.x, exact.y, precision=5.0, noise_std=1.0, num_samples=2, tolerance=0.3, generator=seed(number)
        )
        value, error = posterior.log_evidence(probes=8, steps=15)
        gaps.append(value - truth)
        errors.append(error)
    gap, stated = torch.tensor(gaps), torch.tensor(errors)
    assert int((gap.abs() <= student(0.95, 7) * stated).sum()) >= least_hits(25, 0.95)
    assert float(gap.abs().min()) > 1e-6
    assert float(stated.mean()) <= 1.5 * float(gap.square().mean().sqrt())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_evidence_is_exact_if_the_basis_contains_everything(shape: str) -> None:
    exact = problem(shape)
    posterior = lw.linear.fit(exact.x, exact.y, **GIVEN, tolerance=1e-12)
    posterior.samples()
    value, error = posterior.log_evidence()
    assert value == pytest.approx(exact.log_evidence(ALPHA, PHI), rel=1e-8)
    assert error <= 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_operators_and_matrices_agree(shape: str) -> None:
    exact = problem(shape, noise=1.0)
    settings: dict[str, Any] = {"noise_std": 1.0, "tolerance": 1e-10}
    one, other = (lw.linear.fit(each, exact.y, **settings) for each in (exact.x, operator(exact.x)))
    assert other.precision == pytest.approx(one.precision, rel=1e-7)
    assert_close(other.mean, one.mean, SOLVED)
    assert_close(other.samples(), one.samples(), SOLVED)
    assert other.log_evidence() == pytest.approx(one.log_evidence(), rel=1e-6, abs=1e-6)
    assert_close(other.predict(exact.x[:3]).variance, one.predict(exact.x[:3]).variance, SOLVED)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [lambda x: x, operator], ids=["matrix", "operator"])
def test_float32_features(make: Any, shape: str) -> None:
    """The products are float32; sums and solutions are float64."""
    narrow = problem(shape).x.float()
    exact = Linear(narrow.double(), problem(shape).y)
    posterior = lw.linear.fit(make(narrow), exact.y.float(), **GIVEN, tolerance=1e-4)
    ridge = noise(exact.x, 16)
    expected = draws(exact.x, ridge.prior, ridge.eps, torch.full((narrow.shape[1],), ALPHA, dtype=D), PHI)
    assert posterior.mean.dtype == posterior.samples().dtype == D
    assert_close(posterior.mean, exact.mean(ALPHA, PHI), SOLVED, torch.float32)
    assert_close(posterior.solution.x, expected, SOLVED, torch.float32)
    assert posterior.predict(narrow[:3]).variance.dtype == D
    assert posterior.log_evidence()[0] == pytest.approx(exact.log_evidence(ALPHA, PHI), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x, y = X.to(dtype), Y.to(dtype)
    one, other = (lw.linear.fit(features, y) for features in (x, x.float()))
    assert torch.equal(one.mean, other.mean)
    assert torch.equal(one.samples(), other.samples())
    assert one.predict(x[:3]).variance.dtype == D


@pytest.mark.parametrize("make", [lambda x: x, operator], ids=["matrix", "operator"])
def test_nothing_of_a_fit_requires_gradients(make: Any) -> None:
    """Even if features and targets do; predictions have gradients in their features."""
    posterior = lw.linear.fit(make(X.clone().requires_grad_()), Y.clone().requires_grad_(), **GIVEN)
    assert not posterior.mean.requires_grad
    assert not posterior.samples().requires_grad
    new = X[:1].clone().requires_grad_()
    (slope,) = torch.autograd.grad(posterior.predict(new).mean.sum(), new)
    assert_close(slope[0], posterior.mean)


class Sparse:
    """8,000 rows of 800 columns, eight numbers in each row; records the most vectors that it was given at once."""

    def __init__(self) -> None:
        gen = seed(3)
        columns = torch.randint(800, (64_000,), generator=gen).numpy()
        values = torch.randn(64_000, dtype=D, generator=gen).numpy()
        self.x = scipy.sparse.csr_matrix((values, columns, range(0, 64_001, 8)), shape=(8_000, 800))
        w, rest = (torch.randn(n, dtype=D, generator=gen) for n in (800, 8_000))
        self.most = 0
        self.y = self.forward(0.5 * w[None])[0] + 0.5 * rest

    def forward(self, v: Tensor) -> Tensor:
        self.most = max(self.most, len(v))
        return torch.from_numpy(self.x @ v.T.numpy()).T

    def back(self, u: Tensor) -> Tensor:
        self.most = max(self.most, len(u))
        return torch.from_numpy(self.x.T @ u.T.numpy()).T


def test_a_sparse_operator_is_never_formed() -> None:
    """Mean, samples and evidence are those of a dense solve.

    The precision 4 and the noise variance 0.25 come back within four standard errors, √(2/γ) and √(2/(n - γ)).
    """
    sparse = Sparse()
    design = lw.linear.OperatorDesign(8_000, 800, sparse.forward, sparse.back, sparse.y[:0])
    posterior = lw.linear.fit(design, sparse.y, num_samples=8, tolerance=1e-7)
    value, error = posterior.log_evidence(probes=4, steps=10)
    assert sparse.most <= 16
    alpha, phi = posterior.precision, posterior.noise_variance
    assert alpha == pytest.approx(4, rel=4 * (2 / 800) ** 0.5)
    assert phi == pytest.approx(0.25, rel=4 * (2 / 7_200) ** 0.5)
    gram = torch.from_numpy((sparse.x.T @ sparse.x).toarray())
    factor = torch.linalg.cholesky(gram / phi + alpha * torch.eye(800, dtype=D))
    solve = lambda rows: torch.cholesky_solve(rows.T, factor).T
    moment = sparse.back(sparse.y[None]) / phi
    assert_close(posterior.mean, solve(moment)[0], 0.4)
    assert_close(posterior.solution.x, solve(alpha**0.5 * posterior.ridge.prior + posterior.ridge.back / phi**0.5), 0.4)
    logdet = 2 * float(factor.diagonal().log().sum()) - 800 * math.log(alpha)
    fit = float(sparse.y.square().sum()) / phi - float(moment[0] @ posterior.mean)
    exact = -0.5 * (8_000 * math.log(2 * math.pi * phi) + logdet + fit)
    assert abs(value - exact) <= student(0.95, 3) * error
    assert error < 0.01 * abs(exact)


def test_seeds() -> None:
    exact = problem()
    one, same, other = (lw.linear.fit(exact.x, exact.y, generator=seed(n)) for n in (1, 1, 2))
    assert (one.precision, one.noise_variance) == (same.precision, same.noise_variance)
    assert torch.equal(one.samples(), same.samples())
    assert one.log_evidence(4, 4) == same.log_evidence(4, 4)
    assert one.precision != other.precision
    assert not torch.equal(one.samples(), other.samples())
    by_default, again = (lw.linear.fit(exact.x, exact.y) for _ in range(2))
    assert torch.equal(by_default.samples(), again.samples())


def test_features_from_the_seed_of_the_noise() -> None:
    """If ζ were the first rows of the features, γ would be wrong and the precision would diverge."""
    gen = seed(0)
    x = torch.randn(60, 200, dtype=D, generator=gen)
    y = x @ torch.randn(200, dtype=D, generator=gen) + torch.randn(60, dtype=D, generator=gen)
    for generator in (None, seed(0)):
        posterior = lw.linear.fit(x, y, noise_std=1.0, num_samples=64, generator=generator)
        overlap = (posterior.ridge.prior[:60] * x).sum(1) / (posterior.ridge.prior[:60].norm(dim=1) * x.norm(dim=1))
        assert float(overlap.abs().max()) < 0.4
        assert posterior.precision == pytest.approx(Linear(x, y).optimum(1.0)[0], rel=0.1)


def test_targets_may_be_a_column() -> None:
    exact = problem()
    one, other = (lw.linear.fit(exact.x, y, **GIVEN) for y in (exact.y, exact.y[:, None]))
    assert torch.equal(one.mean, other.mean)


def test_features_of_zeros_leave_the_prior() -> None:
    exact = Linear(torch.zeros(7, 4, dtype=D), torch.arange(7, dtype=D))
    posterior = lw.linear.fit(exact.x, exact.y, precision=4.0, noise_std=1.0)
    assert bool((posterior.mean == 0).all())
    assert_close(posterior.solution.x, posterior.ridge.prior / 2)
    assert posterior.log_evidence() == (pytest.approx(exact.log_evidence(4.0, 1.0)), 0)
