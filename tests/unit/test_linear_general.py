"""Linear models with any prior precision, noise covariances and several targets, against dense matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.linalg.operators import back_product, forward_product
from lapwing.linalg.ridge import Ridge
from tests.references.general_ridge import General
from tests.references.ridge import complete
from tests.tolerances import SOLVED, assert_close
from tests.unit.linear_problems import D, operator, seed

N, C, P = 17, 3, 7
ALPHA, PHI = 0.7, 0.16
GIVEN: dict[str, Any] = {"precision": ALPHA, "noise_std": PHI**0.5, "tolerance": 1e-10}
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
        return lw.linear.fit(self.features, self.targets, prior=self.prior, noise=self.noise, **GIVEN | settings)


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


def completed(posterior: lw.linear.LinearPosterior) -> lw.linear.LinearPosterior:
    """The same with noise whose second moments are exact, so that covariances and γ are exact."""
    design = posterior.design
    zeta, eps = complete(forward_product(design, torch.eye(design.size, dtype=D)).mT, seed(9))
    return replace(posterior, ridge=Ridge(design, None, zeta, back_product(design, eps), eps=eps))


@pytest.mark.parametrize(("layout", "prior", "noise"), CASES)
def test_mean_covariance_and_evidence_are_those_of_dense_matrices(layout: str, prior: str, noise: str) -> None:
    problem = case(layout, prior, noise)
    posterior, exact = completed(problem.fit()), problem.exact
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
    posterior, exact, rows = completed(problem.fit()), problem.exact, 5
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
    posterior = completed(problem.fit()).tuned()
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
    cov = completed(other).functions(problem.features[:4]).cov
    assert_close(cov, completed(one).functions(problem.features[:4]).cov, SOLVED)


def test_a_singular_prior_covariance_confines_the_weights() -> None:
    """S (P, q) with q < P is the regression on X S."""
    problem, root = case("scalar", "none", "data"), draw(P, 4, number=13)
    posterior = replace(problem, prior=operator(root)).fit()  # type: ignore[arg-type]
    exact = replace(problem.exact, x=problem.exact.x @ root, a=torch.eye(4, dtype=D))
    assert_close(posterior.mean, root @ exact.mean(ALPHA, PHI), SOLVED)
    assert posterior.samples().shape == (16, P)
    assert posterior.log_evidence()[0] == pytest.approx(exact.log_evidence(ALPHA, PHI), rel=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_features_with_a_prior_and_noise(layout: str) -> None:
    problem = case(layout, "matrix", "matrix")
    narrow = problem.features.float()
    exact = replace(problem, features=narrow.double()).fit()
    given = {"prior": problem.prior.float().double(), "noise": problem.noise}  # type: ignore[union-attr]
    posterior = lw.linear.fit(narrow, problem.targets, **given, **GIVEN | {"tolerance": 1e-4})
    assert posterior.mean.dtype == D
    assert_close(posterior.mean, exact.mean, SOLVED, torch.float32)
    assert_close(posterior.predict(narrow[:4]).variance, exact.predict(narrow[:4]).variance, SOLVED, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_identities_change_nothing(layout: str) -> None:
    plain = case(layout, "none", "none")
    outputs = 1 if layout == "scalar" else C
    same = replace(plain, prior=torch.ones(P), noise=torch.eye(outputs).expand(N, -1, -1))
    one, other = plain.fit(), same.fit()
    assert_close(other.mean, one.mean, SOLVED)
    assert_close(other.samples(), one.samples(), SOLVED)


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
    ({"prior": torch.full((P,), float("nan"))}, "prior has entries that are not finite"),
    ({"prior": BAD @ BAD.T + BAD}, "prior is not symmetric: .* differ from those of the transpose"),
    ({"prior": torch.eye(P) - 2 / P * torch.ones(P, P)}, "prior is not positive definite"),
    ({"prior": 2.0}, "prior is 2.0; expected a tensor of positive numbers"),
    ({"prior": torch.ones(P, dtype=torch.bool)}, "prior is a tensor of shape .* torch.bool"),
    ({"prior": operator(draw(P + 1, 4, number=1))}, "prior is an OperatorDesign with 8 rows; expected 7"),
    ({"noise": torch.ones(N + 1)}, r"noise has the shape \(18,\); expected .* \(17, 3\) or of .* \(17, 3, 3\)"),
    ({"noise": torch.zeros(N, C)}, "noise has entries that are not finite or not positive"),
    ({"noise": torch.full((N, C, C), float("inf"))}, "noise has entries that are not finite"),
    ({"noise": -torch.eye(C).expand(N, -1, -1)}, "noise has entries that are not finite or not positive"),
    ({"noise": torch.eye(C).repeat(N, 1, 1).index_fill(2, torch.tensor([0]), 0.5).add(torch.eye(C))}, "not symmetric"),
    ({"noise": [1.0] * N}, r"noise is \[1.0, .*; expected a tensor of positive numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_priors_and_noise_that_are_refused(settings: dict[str, Any], message: str) -> None:
    problem = case("shared", "none", "none")
    with pytest.raises(lw.errors.DataError, match=message):
        lw.linear.fit(problem.features, problem.targets, **GIVEN, **settings)


def test_shapes_that_are_refused() -> None:
    stacked, shared = case("stacked", "none", "none"), case("shared", "none", "none")
    x, y = stacked.features, stacked.targets
    refused: tuple[tuple[Any, Any, str], ...] = (
        (x, y[:, 0], r"features have the shape \(17, 3, 7\) and targets are \(17,\); expected targets \(17, 3\)"),
        (x, y.mT, r"features have the shape \(17, 3, 7\) and targets are \(3, 17\)"),
        (x, y.numpy(), r"targets are a ndarray; expected targets \(17, 3\)"),
        (x.flatten(0, 1), y, r"51 rows of features and targets \(17, 3\); .* a tensor has the shape \(17, 3, P\)"),
        (operator(x.flatten(0, 1)), y[:, :2], r"an OperatorDesign 34 rows"),
        (x.long(), y, "features are torch.int64"),
        (x[:, :, :0], y, r"features have the shape \(17, 3, 0\); expected at least one"),
    )
    for features, targets, message in refused:
        with pytest.raises(lw.errors.DataError, match=message):
            lw.linear.fit(features, targets, **GIVEN)
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
        lw.linear.fit(problem.features, problem.targets, **GIVEN, noise=noise)


def test_an_operator_prior_that_is_not_paired_is_refused() -> None:
    wrong = replace(operator(BAD), back=lambda u: u @ BAD.T)
    problem = case("scalar", "none", "none")
    with pytest.raises(lw.errors.NumericalError, match="back is not the transpose of forward"):
        replace(problem, prior=wrong).fit()  # type: ignore[arg-type]
