"""Bayesian linear regression with any operators."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import scipy.sparse
import torch
from torch import Tensor

import lapwing as lw
from lapwing.linalg.operators import MatrixDesign, back_product, forward_product
from lapwing.linalg.ridge import Ridge
from tests.references.general_ridge import General
from tests.references.ridge import Linear, complete, draws
from tests.tolerances import SOLVED, assert_close, least_hits, student
from tests.unit.linear_problems import GIVEN, SHAPES, D, X, Y, noise, operator, problem, seed, steep

# Linear models by products alone, against closed form.

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


# Linear models with any prior precision, noise covariances and several targets, against dense matrices.

N, C, P = 17, 3, 7
LINEAR_GENERAL_GIVEN: dict[str, Any] = {"precision": ALPHA, "noise_std": PHI**0.5, "tolerance": 1e-10}
LAYOUTS, PRIORS, NOISES = (
    ("scalar", "shared", "stacked"),
    ("none", "vector", "matrix"),
    ("none", "data", "outputs", "matrix"),
)


def draw(*shape: int, number: int) -> Tensor:
    return torch.randn(shape, dtype=D, generator=seed(number))


def definite(*batch: int, size: int, number: int) -> Tensor:
    root = draw(*batch, size, size, number=number)
    return root @ root.mT / size + 0.3 * torch.eye(size, dtype=D)


@dataclass(frozen=True)
class Case:
    """Arguments of a fit, and the same problem as one dense regression."""

    features: Tensor
    targets: Tensor
    prior: Tensor | None
    noise: Tensor | None
    exact: General

    def fit(self, **settings: Any) -> lw.linear.LinearPosterior:
        return lw.linear.fit(
            self.features, self.targets, prior=self.prior, noise=self.noise, **LINEAR_GENERAL_GIVEN | settings
        )


def case(layout: str, prior: str, noise: str) -> Case:
    outputs = 1 if layout == "scalar" else C
    x = draw(N, P, number=1) if layout != "stacked" else draw(N, C, P, number=1)
    wide = torch.kron(x, torch.eye(C, dtype=D)) if layout == "shared" else x.reshape(-1, P)
    if layout == "shared":  # columns are outputs by features
        wide = wide.reshape(N * C, P, C).mT.flatten(1)
    y = wide @ draw(wide.shape[1], number=2) + 0.4 * draw(len(wide), number=3)
    a = {"none": None, "vector": draw(P, number=4).exp(), "matrix": definite(size=P, number=5)}[prior]
    b = {
        "none": None, "data": draw(N, number=6).exp(), "outputs": draw(N, outputs, number=7).exp(),
        "matrix": definite(N, size=outputs, number=8),
    }[noise]  # fmt: skip
    dense_a = torch.eye(P, dtype=D) if a is None else torch.diag(a) if a.ndim == 1 else a
    if layout == "shared":
        dense_a = torch.kron(torch.eye(C, dtype=D), dense_a)
    blocks = torch.eye(outputs, dtype=D).expand(N, -1, -1)
    if b is not None:
        blocks = b if b.ndim == 3 else torch.diag_embed(b if b.ndim == 2 else b[:, None].expand(N, outputs))
    exact = General(wide, y, dense_a, torch.block_diag(*blocks))
    return Case(x, y if layout == "scalar" else y.reshape(N, C), a, b, exact)


CASES = [(layout, prior, noise) for layout in LAYOUTS for prior in PRIORS for noise in NOISES]


def linear_general_completed(posterior: lw.linear.LinearPosterior) -> lw.linear.LinearPosterior:
    """The same with noise whose second moments are exact, so that covariances and γ are exact."""
    design = posterior.design
    zeta, eps = complete(forward_product(design, torch.eye(design.size, dtype=D)).mT, seed(9))
    return replace(posterior, ridge=Ridge(design, None, zeta, back_product(design, eps), eps=eps))


@pytest.mark.parametrize(("layout", "prior", "noise"), CASES)
def test_mean_covariance_and_evidence_are_those_of_dense_matrices(layout: str, prior: str, noise: str) -> None:
    problem = case(layout, prior, noise)
    posterior, exact = linear_general_completed(problem.fit()), problem.exact
    shape = (C, P) if layout == "shared" else (P,)
    assert_close(posterior.mean, exact.mean(ALPHA, PHI).reshape(shape), SOLVED)
    gap = (posterior.samples() - posterior.mean).flatten(1)
    assert_close(gap.T @ gap / len(gap), exact.covariance(ALPHA, PHI), SOLVED)
    assert posterior.gamma[0] == pytest.approx(exact.gamma(ALPHA, PHI), rel=1e-7)
    value, error = posterior.log_evidence()
    assert value == pytest.approx(exact.log_evidence(ALPHA, PHI), rel=1e-7)
    assert error < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_predictions_are_those_of_dense_matrices(layout: str) -> None:
    problem = case(layout, "matrix", "outputs")
    posterior, exact, rows = linear_general_completed(problem.fit()), problem.exact, 5
    outputs = 1 if layout == "scalar" else C
    new, jacobian = problem.features[:rows], exact.x[: rows * outputs]
    belief = posterior.functions(new)
    assert_close(belief.mean, (jacobian @ exact.mean(ALPHA, PHI)).reshape(rows, outputs), SOLVED)
    cov = (jacobian @ exact.covariance(ALPHA, PHI) @ jacobian.T).reshape(rows, outputs, rows, outputs)
    blocks = torch.stack([cov[i, :, i] for i in range(rows)])
    assert_close(belief.cov, blocks, SOLVED)
    variance = blocks.diagonal(dim1=1, dim2=2)
    assert_close(posterior.predict(new).variance, variance + PHI, SOLVED)
    each, every = draw(rows, number=11).exp(), draw(rows, outputs, number=12).exp()
    assert_close(posterior.predict(new, each).variance, variance + PHI * each[:, None], SOLVED)
    assert_close(posterior.predict(new, every).variance, variance + PHI * every, SOLVED)


@pytest.mark.parametrize(("layout", "prior", "noise"), [("scalar", "vector", "data"), ("shared", "matrix", "matrix"),
                                                        ("stacked", "matrix", "outputs")])  # fmt: skip
def test_learned_scales_maximise_the_evidence(layout: str, prior: str, noise: str) -> None:
    """Steps of two percent in either scale lower it; learning ends where a step changes a logarithm by 1e-4."""
    problem = case(layout, prior, noise)
    posterior = linear_general_completed(problem.fit()).tuned()
    alpha, phi = posterior.precision, posterior.noise_variance
    best = problem.exact.log_evidence(alpha, phi)
    for factors in ((1.02, 1), (1 / 1.02, 1), (1, 1.02), (1, 1 / 1.02)):
        assert problem.exact.log_evidence(alpha * factors[0], phi * factors[1]) < best
    front = problem.fit(precision=None, noise_std=None, num_samples=400)
    assert front.precision == pytest.approx(alpha, rel=0.2)
    assert front.noise_variance == pytest.approx(phi, rel=0.2)


@pytest.mark.parametrize("layout", ["shared", "stacked"])
def test_operators_are_the_same_as_tensors(layout: str) -> None:
    """Features and prior as operators: S is a Cholesky factor of the prior covariance."""
    problem = case(layout, "matrix", "matrix")
    assert problem.prior is not None
    x = problem.features if layout == "shared" else problem.features.flatten(0, 1)
    root = torch.linalg.cholesky(torch.linalg.inv(problem.prior))
    one = problem.fit()
    other = replace(problem, features=operator(x), prior=operator(root)).fit()  # type: ignore[arg-type]
    assert_close(other.mean, one.mean, SOLVED)
    assert other.log_evidence()[0] == pytest.approx(one.log_evidence()[0], rel=1e-7)
    cov = linear_general_completed(other).functions(problem.features[:4]).cov
    assert_close(cov, linear_general_completed(one).functions(problem.features[:4]).cov, SOLVED)


def test_a_singular_prior_covariance_confines_the_weights() -> None:
    """S (P, q) with q < P is the regression on X S."""
    problem, root = case("scalar", "none", "data"), draw(P, 4, number=13)
    posterior = replace(problem, prior=operator(root)).fit()  # type: ignore[arg-type]
    exact = replace(problem.exact, x=problem.exact.x @ root, a=torch.eye(4, dtype=D))
    assert_close(posterior.mean, root @ exact.mean(ALPHA, PHI), SOLVED)
    assert posterior.samples().shape == (16, P)
    assert posterior.log_evidence()[0] == pytest.approx(exact.log_evidence(ALPHA, PHI), rel=1e-7)


def test_one_output_with_its_own_features_is_a_scalar() -> None:
    problem = case("scalar", "vector", "data")
    stacked = replace(problem, features=problem.features[:, None], targets=problem.targets[:, None])
    one, other = problem.fit(), stacked.fit()
    assert_close(other.mean, one.mean, SOLVED)
    assert_close(other.predict(problem.features[:4, None]).variance, one.predict(problem.features[:4]).variance, SOLVED)


BAD = draw(P, P, number=14)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prior": torch.ones(P + 1)}, r"prior has the shape \(8,\); expected .* \(7,\) or of matrices \(7, 7\)"),
    ({"prior": torch.ones(P, 2)}, r"prior has the shape \(7, 2\)"),
    ({"prior": -torch.ones(P)}, r"prior has entries that are not finite or not positive \(.* is -1\)"),
    ({"prior": BAD @ BAD.T + BAD}, "prior is not symmetric: .* differ from those of the transpose"),
    ({"prior": torch.eye(P) - 2 / P * torch.ones(P, P)}, "prior is not positive definite"),
    ({"prior": 2.0}, "prior is 2.0; expected a tensor of positive numbers"),
    ({"prior": torch.ones(P, dtype=torch.bool)}, "prior is a tensor of shape .* torch.bool"),
    ({"prior": operator(draw(P + 1, 4, number=1))}, "prior is an OperatorDesign with 8 rows; expected 7"),
    ({"noise": torch.ones(N + 1)}, r"noise has the shape \(18,\); expected .* \(17, 3\) or of .* \(17, 3, 3\)"),
    ({"noise": torch.zeros(N, C)}, "noise has entries that are not finite or not positive"),
    ({"noise": torch.eye(C).repeat(N, 1, 1).index_fill(2, torch.tensor([0]), 0.5).add(torch.eye(C))}, "not symmetric"),
    ({"noise": [1.0] * N}, r"noise is \[1.0, .*; expected a tensor of positive numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_priors_and_noise_that_are_refused(settings: dict[str, Any], message: str) -> None:
    problem = case("shared", "none", "none")
    with pytest.raises(lw.errors.DataError, match=message):
        lw.linear.fit(problem.features, problem.targets, **LINEAR_GENERAL_GIVEN, **settings)


def test_shapes_that_are_refused() -> None:
    stacked, shared = case("stacked", "none", "none"), case("shared", "none", "none")
    x, y = stacked.features, stacked.targets
    refused: tuple[tuple[Any, Any, str], ...] = (
        (
            x,
            y[:, 0],
            r"features have the shape \(17, 3, 7\) and targets are a tensor of shape \(17,\) .*; expected targets",
        ),
        (x, y.mT, r"features have the shape \(17, 3, 7\) and targets are a tensor of shape \(3, 17\)"),
        (x, y.numpy(), r"targets are a ndarray; expected targets \(17, 3\)"),
        (x.flatten(0, 1), y, r"51 rows of features and targets \(17, 3\); .* a tensor has the shape \(17, 3, P\)"),
        (operator(x.flatten(0, 1)), y[:, :2], r"an OperatorDesign 34 rows"),
        (x.long(), y, "features are torch.int64"),
        (x[:, :, :0], y, r"features have the shape \(17, 3, 0\); expected at least one"),
    )
    for features, targets, message in refused:
        with pytest.raises(lw.errors.DataError, match=message):
            lw.linear.fit(features, targets, **LINEAR_GENERAL_GIVEN)
    with pytest.raises(lw.errors.DataError, match=r"shape \(51, 7\); expected \(rows, 3, 7\)"):
        stacked.fit().predict(x.flatten(0, 1))
    with pytest.raises(lw.errors.DataError, match=r"shape \(17, 3, 7\); expected \(rows, 7\)"):
        shared.fit().predict(x)
    with pytest.raises(lw.errors.DataError, match=r"noise has the shape \(17, 3, 3\); expected variances \(17,\)"):
        shared.fit().predict(shared.features, torch.eye(C).expand(N, -1, -1))
    with pytest.raises(lw.errors.DataError, match="not positive"):
        shared.fit().predict(shared.features, -torch.ones(N))


def test_one_covariance_of_many_that_is_not_symmetric_is_refused() -> None:
    """However large the others are."""
    problem = case("stacked", "none", "none")
    noise = torch.eye(C, dtype=D).repeat(N, 1, 1)
    noise[0] *= 1e9
    noise[1, 0, 1] = 0.5
    with pytest.raises(lw.errors.DataError, match="noise is not symmetric"):
        lw.linear.fit(problem.features, problem.targets, **LINEAR_GENERAL_GIVEN, noise=noise)


def test_an_operator_prior_that_is_not_paired_is_refused() -> None:
    wrong = replace(operator(BAD), back=lambda u: u @ BAD.T)
    problem = case("scalar", "none", "none")
    with pytest.raises(lw.errors.NumericalError, match="back is not the transpose of forward"):
        replace(problem, prior=wrong).fit()  # type: ignore[arg-type]


# What ``lw.linear.fit`` and its posterior refuse, and what they say.

OPTIMUM = r"expected an optimum\. .* Give precision=\.\.\. or noise_std=\.\.\."


@pytest.mark.parametrize("y", [torch.zeros(90, dtype=D), problem(noise=0.0).y], ids=["zeros", "without noise"])
def test_targets_without_an_optimum_are_refused(y: Tensor) -> None:
    with pytest.raises(lw.errors.NumericalError, match=rf"noise variance \S+ after .* at precision .*; {OPTIMUM}"):
        lw.linear.fit(problem().x, y)


def test_features_without_an_optimum_are_refused() -> None:
    with pytest.raises(lw.errors.NumericalError, match=f"precision inf .* gamma 0 ± 0; {OPTIMUM}"):
        lw.linear.fit(torch.zeros(90, 30, dtype=D), problem().y)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_random_features_are_refused(unit: float) -> None:
    """The evidence is largest without them."""
    gen = seed(0)
    x, y = torch.randn(100, 5, dtype=D, generator=gen), torch.randn(100, dtype=D, generator=gen)
    y = y - 0.9 * x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    with pytest.raises(lw.errors.NumericalError, match=f"{OPTIMUM}"):
        lw.linear.fit(x, unit * y)


def bad(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x.view(-1)[3] = value
    return x


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (X[0], r"features have the shape \(30,\); expected \(rows, columns\)"),
        (X[:0], r"features have the shape \(0, 30\)"),
        (X.long(), "features are torch.int64; expected floating-point numbers"),
        (bad(X, math.nan), "features: 1 of 2700 entries are NaN or infinite"),
        (X.numpy(), "features are a ndarray; expected a tensor or an OperatorDesign"),
        (operator(X.half()), "take torch.float16; expected float32 or float64"),
        (operator(X + 1j), "take torch.complex128; expected float32 or float64"),
    ],
)
def test_features_that_are_refused(features: Any, message: str) -> None:
    with pytest.raises(lw.errors.DataError, match=message):
        lw.linear.fit(features, Y, **GIVEN)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (Y[:-1], r"90 rows of features and targets \(89,\); expected \(90,\)"),
        (torch.stack([Y, Y], 1)[:40], r"90 rows of features and targets \(40, 2\); expected \(90,\), or \(90, C\)"),
        (bad(Y, math.nan), "targets hold NaN or infinity; expected finite numbers"),
        (Y.numpy(), r"targets are a ndarray; expected a tensor \(90,\)"),
        (Y + 1j, "targets are torch.complex128; expected real numbers"),
    ],
)
@pytest.mark.parametrize("make", [lambda x: x, operator], ids=["matrix", "operator"])
def test_targets_that_are_refused(make: Any, targets: Any, message: str) -> None:
    with pytest.raises(lw.errors.DataError, match=message):
        lw.linear.fit(make(X), targets, **GIVEN)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": 0.0}, "precision is 0.0; expected a positive number, or None to learn it"),
        ({"noise_std": math.nan}, "noise_std is nan"),
        ({"precision": "1"}, "precision is '1'; expected a positive number"),
        ({"precision": torch.ones(30)}, r"precision is tensor\(\[1\., "),
        ({"num_samples": 0}, "num_samples is 0; expected an integer of at least 1"),
        ({"num_samples": 2.5}, r"num_samples is 2\.5; expected an integer"),
        ({"generator": 3}, r"generator is 3; expected torch\.Generator\(\)\.manual_seed"),
        ({"tolerance": "small"}, "tolerance is 'small'; expected a relative residual"),
        ({"tolerance": 1.0}, "tolerance is 1.0"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((lw.errors.DataError, lw.errors.UnsupportedError), match=message):
        lw.linear.fit(X, Y, **settings)


def test_questions_that_are_refused() -> None:
    posterior = lw.linear.fit(X, Y, **GIVEN, num_samples=3)
    refused: tuple[tuple[Any, str], ...] = (
        (4, "4 samples were asked for and 3 are stored; expected at most"),
        (-1, "n is -1; expected an integer of at least 0"),
        (2.5, r"n is 2\.5; expected an integer"),
    )  # fmt: skip
    for n, message in refused:
        with pytest.raises(lw.errors.UnsupportedError, match=message):
            posterior.samples(n)
    assert posterior.samples(0).shape == (0, 30)
    for new, message in ((X[:, :-1], r"shape \(90, 29\); expected \(rows, 30\)"), (X[0], r"shape \(30,\)"),
                         (bad(X, math.nan), "NaN or infinite"), (X[:0], r"shape \(0, 30\)"),
                         (operator(X), r"features are a OperatorDesign; expected a tensor \(rows, 30\)")):  # fmt: skip
        with pytest.raises(lw.errors.DataError, match=message):
            posterior.predict(new)
    for probes, steps, message in (
        (1, 5, "probes is 1; expected an integer of at least 2"),
        (4, 0, "steps is 0; expected an"),
    ):
        with pytest.raises(lw.errors.UnsupportedError, match=message):
            posterior.log_evidence(probes, steps)
    for name in ("probes", "steps"):
        with pytest.raises(lw.errors.UnsupportedError, match=rf"{name} is 2\.5; expected an integer"):
            posterior.log_evidence(**{name: 2.5})  # type: ignore[arg-type]


class Random:
    """Dropout on the features: other products at every call."""

    def forward(self, v: Tensor) -> Tensor:
        return v @ (X * (torch.rand(90, 30) < 0.9)).T


OPERATORS: dict[str, tuple[Any, Any, str]] = {
    "not the transpose": (lambda v: v @ X.T, lambda u: u @ X.flip(1), "back is not the transpose of forward.* differ"),
    "hardly off": (lambda v: v @ X.T, lambda u: 1.003 * u @ X, "back is not the transpose of forward"),
    "random": (Random().forward, lambda u: u @ X, "two calls of forward .* with the same rows differ by"),
    "mixed rows": (
        lambda v: v @ X.T,
        lambda u: u.cumsum(0) @ X,
        "two calls of back .* rows that do not depend",
    ),
    "columns": (lambda v: X @ v.T, lambda u: u @ X, r"forward .* made \(90, 2\) of rows \(2, 30\); expected \(2, 90\)"),
    "one alone": (lambda v: v @ X.T, lambda u: u[0] @ X, r"back .* made \(30,\) of rows \(2, 90\); expected \(2, 30\)"),
    "complex": (
        lambda v: 1j * v @ X.to(1j * X).T,
        lambda u: u @ X,
        "gave a tensor of .*complex128; expected a tensor",
    ),
    "arrays": (lambda v: (v @ X.T).numpy(), lambda u: u @ X, "gave a ndarray; expected a tensor of real numbers"),
    "not finite": (lambda v: v @ X.T / 0, lambda u: u @ X, "forward of an OperatorDesign gave NaN or infinity"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_are_not_what_they_claim_are_refused(name: str) -> None:
    """Before any noise is drawn, and so before the first iteration."""
    forward, back, message = OPERATORS[name]
    generator = seed(1)
    before = generator.get_state()
    with pytest.raises(lw.LapwingError, match=message):
        lw.linear.fit(lw.linear.OperatorDesign(90, 30, forward, back, X[:0, 0]), Y, **GIVEN, generator=generator)
    assert torch.equal(generator.get_state(), before)


def test_a_residual_above_the_tolerance_is_an_error() -> None:
    """Products in float32 and a residual of 1e-12; or a precision too small for the mean."""
    posterior = lw.linear.fit(X.float(), Y, precision=1e-4, noise_std=0.1, tolerance=1e-12)
    with pytest.raises(
        lw.errors.NumericalError, match=r"stopped after \d+ iterations with a relative residual of .*1e-12"
    ):
        posterior.samples()
    steep = X * torch.logspace(4, -4, 30, dtype=D)
    posterior = lw.linear.fit(steep.float(), Y, precision=1e-12, noise_std=0.1)
    with pytest.raises(
        lw.errors.NumericalError, match=r"linear.fit stopped after \d+ .* residual of \S+; .* in float64"
    ):
        _ = posterior.mean


def test_float64_is_not_advised_if_it_is_used() -> None:
    powers = torch.linspace(-1, 1, 200, dtype=D)[:, None] ** torch.arange(30, dtype=D)
    posterior = lw.linear.fit(powers, powers.sum(1), precision=1e-6, noise_std=1e-3)
    with pytest.raises(lw.errors.NumericalError, match=r"the tolerance of the samples\.$"):
        posterior.samples()
    assert (posterior.ridge.float64_hint, noise(powers.float(), 1).float64_hint) == ("", ", or compute in float64")
