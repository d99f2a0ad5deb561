"""Effective parameters, and the solves and variances that they stand on, against dense inverses."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense, kfac, structures
from tests.references.layout import assembled
from tests.tolerances import SOLVED, assert_close

D = torch.float64
MLP = BY_NAME["mlp"]
P = 83
METHODS: dict[str, Any] = {
    "full": lw.Full(), "diagonal": lw.Diagonal(), "kron": lw.Kron(), "ekron": lw.EKron(),
    "low_rank": lw.LowRank(rank=18), "low_rank_3": lw.LowRank(rank=3),
}  # fmt: skip
PRIORS = ["isotropic", "per_layer", "by_input", "diagonal", "g", "about a mean"]
NOISE = 0.49
LAYERS = ("0", "2", "4")


def supported(method: str, prior: str) -> bool:
    if method == "kron":
        return prior != "diagonal"
    return method != "ekron" or prior in ("isotropic", "per_layer", "about a mean")


PAIRS = [(m, p) for m in METHODS for p in PRIORS if supported(m, p)]


@cache
def curvatures() -> dict[str, Tensor]:
    """H of the small regression at unit noise, in every structure, by brute force."""
    model, x = MLP.build(), MLP.batch(6)
    ggn = dense.ggn(dense.jacobian(model, x, 6), torch.eye(3, dtype=D).expand(6, 3, 3))
    where = structures.layers(model)
    factors = kfac.factors(model, x, lambda f: torch.eye(len(f), dtype=D), "expand")
    return {
        "full": ggn,
        "diagonal": structures.diagonal(ggn),
        "kron": structures.kron(factors, where),
        "ekron": structures.ekron(ggn, factors, where),
        "low_rank": ggn,
    }


def matrix_of(method: str, posterior: lw.Fitted) -> Tensor:
    """At a lower rank than the GGN's, what the eigenpairs span; that they are the leading ones is tested elsewhere."""
    if method != "low_rank_3":
        return curvatures()[method]
    values, vectors = posterior.posterior.curvature.values, posterior.posterior.curvature.vectors
    assert len(values) == 3
    return vectors.T @ torch.diag(values) @ vectors


def given(prior: str) -> Any:
    """A prior to give to fit()."""
    where = structures.layers(MLP.build())
    by_input = torch.full((P,), 0.6, dtype=D)
    for index in where.values():
        by_input[index] = torch.linspace(0.2, 2.0, index.shape[1], dtype=D).expand(index.shape)
    return {
        "isotropic": lw.isotropic(0.6),
        "per_layer": lw.per_layer(torch.tensor([0.3, 2.0, 0.7], dtype=D)),
        "by_input": lw.priors.diagonal(by_input),
        "diagonal": lw.priors.diagonal(torch.linspace(0.2, 2.0, P, dtype=D)),
        "g": lw.priors.g_prior(0.6),
        "about a mean": lw.isotropic(0.6, 0.7),
    }[prior]


def precisions(method: str, prior: str, matrix: Tensor) -> Tensor:
    """(P,) from the definition."""
    where = structures.layers(MLP.build())
    if prior == "g":
        by = structures.scale_by_factor if method == "kron" else structures.scale_by_layer
        return 0.6 * by(matrix.diagonal(), where)
    if prior == "per_layer":
        diagonal = torch.empty(P, dtype=D)
        for index, value in zip(where.values(), (0.3, 2.0, 0.7), strict=True):
            diagonal[index] = value
        return diagonal
    chosen = given(prior)
    fixed = chosen.precisions if prior in ("by_input", "diagonal") else chosen.precision
    return fixed if isinstance(fixed, Tensor) else torch.full((P,), fixed, dtype=D)


def regression(method: Any, prior: Any, dtype: torch.dtype = D, **options: Any) -> lw.Fitted:
    y = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(3)).to(dtype)
    data = problems.split(MLP.batch(6, dtype), y, (3, 1, 2))
    noise = lw.Gaussian(noise_std=math.sqrt(NOISE))
    return lw.fit(MLP.build(dtype), data, noise, method=method, prior=prior, **options)


@pytest.mark.parametrize(("method", "prior"), PAIRS)
def test_gamma_is_the_trace(method: str, prior: str) -> None:
    """γ = tr(Λ⁻¹ H/φ), and for a layer the part of the trace that lies on its weights."""
    posterior = regression(METHODS[method], given(prior))
    matrix = matrix_of(method, posterior)
    each = precisions(method, prior, matrix)
    shares = torch.linalg.solve(matrix / NOISE + torch.diag(each), matrix / NOISE).diagonal()
    effective = posterior.effective_parameters()
    power = SOLVED if "low_rank" in method else 2 / 3
    assert_close(torch.tensor(effective.total, dtype=D), shares.sum(), power)
    where = structures.layers(MLP.build())
    assert tuple(effective.layers) == LAYERS
    by_layer = torch.stack([shares[where[name]].sum() for name in LAYERS])
    assert_close(torch.tensor([effective.layers[name] for name in LAYERS], dtype=D), by_layer, power)
    assert effective.sizes == {"0": 30, "2": 35, "4": 18}
    assert effective.weights == P
    grouped = {"per_layer": by_layer, "by_input": shares, "diagonal": shares}.get(prior, shares.sum()[None])
    assert_close(effective.by_precision, grouped, power)


@pytest.mark.parametrize("method", METHODS)
def test_gamma_lies_between_nought_and_the_number_of_weights(method: str) -> None:
    """It falls with the precision, from the rank of the curvature to nought, and its layers add up."""
    fitted = regression(METHODS[method], 1.0)
    rank = int(torch.linalg.matrix_rank(matrix_of(method, fitted), hermitian=True))
    gammas = []
    for precision in (1e-7, 1e-3, 0.1, 1.0, 10.0, 1e4, 1e9):
        effective = fitted.with_prior(precision).effective_parameters()
        assert sum(effective.layers.values()) == pytest.approx(effective.total, abs=1e-11)
        for name, gamma in effective.layers.items():
            assert -1e-9 <= gamma <= effective.sizes[name] + 1e-9
        gammas.append(effective.total)
    assert gammas == sorted(gammas, reverse=True)
    assert rank - 0.5 < gammas[0] <= rank + 1e-6 <= P + 1e-6
    assert 0 < gammas[-1] < 1e-6


def test_gamma_of_a_linear_model_is_the_sum_of_shares() -> None:
    """MacKay's Σ λ / (λ + α) with the eigenvalues λ of XᵀX / φ."""
    x = torch.randn(20, 4, dtype=D)
    model = nn.Linear(4, 1, bias=False).double()
    likelihood = lw.Gaussian(noise_std=0.5)
    posterior = lw.fit(model, [(x, torch.randn(20, 1, dtype=D))], likelihood, method=lw.Full(), prior=3.0)
    values = torch.linalg.eigvalsh(x.T @ x / 0.25)
    assert posterior.effective_parameters().total == pytest.approx(float((values / (values + 3.0)).sum()), rel=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_gamma_is_the_slope_of_the_log_determinant(method: str) -> None:
    """d log det Λ / d log φ = -γ, whatever the structure."""
    fitted = regression(METHODS[method], 0.6)
    phi, step = torch.tensor(NOISE, dtype=D), 1e-4
    high, low = (fitted.posterior.curvature.logdet(phi * math.exp(s * step), fitted.prior) for s in (1, -1))
    assert fitted.effective_parameters().total == pytest.approx(-float(high - low) / (2 * step), rel=1e-6)


def test_gamma_of_a_classifier() -> None:
    case = BY_NAME["cnn"]
    model = case.build()
    posterior = lw.fit(model, problems.batches(case), "classification", method=lw.Full(), prior=0.5)
    _, ggn = problems.dense_ggn(case, model)
    shares = torch.linalg.solve(ggn + 0.5 * torch.eye(len(ggn), dtype=D), ggn).diagonal()
    effective = posterior.effective_parameters()
    assert_close(torch.tensor(effective.total, dtype=D), shares.sum())
    where = structures.layers(model)
    for name, gamma in effective.layers.items():
        assert gamma == pytest.approx(float(shares[where[name]].sum()), rel=1e-9)


@pytest.mark.parametrize("method", ["full", "diagonal", "low_rank"])
def test_gamma_of_single_weights(method: str) -> None:
    chosen = torch.tensor([1, 5, 40, 66, 77, 82])
    ggn = curvatures()["full"][chosen][:, chosen]
    matrix = torch.diag(ggn.diagonal()) if method == "diagonal" else ggn
    shares = torch.linalg.solve(matrix / NOISE + 0.6 * torch.eye(6, dtype=D), matrix / NOISE).diagonal()
    method_of_six = lw.LowRank(rank=6) if method == "low_rank" else METHODS[method]
    effective = regression(method_of_six, 0.6, weights=lw.subnetwork(chosen)).effective_parameters()
    assert_close(torch.tensor(effective.total, dtype=D), shares.sum(), SOLVED)
    assert effective.sizes == {"0": 2, "2": 1, "4": 3}
    expected = torch.stack([shares[:2].sum(), shares[2], shares[3:].sum()])
    assert_close(torch.tensor(list(effective.layers.values()), dtype=D), expected, SOLVED)


@pytest.mark.parametrize("method", ["full", "diagonal", "kron", "ekron", "low_rank"])
def test_gamma_in_float32(method: str) -> None:
    wide, narrow = (regression(METHODS[method], 0.6, dtype).effective_parameters() for dtype in (D, torch.float32))
    assert narrow.total == pytest.approx(wide.total, rel=1e-4)
    for name in LAYERS:
        assert narrow.layers[name] == pytest.approx(wide.layers[name], rel=1e-3)


def line(n: int, noise: float, prior: float) -> lw.Fitted:
    """Three weights and n data."""
    torch.manual_seed(2)
    model, x = nn.Linear(2, 1).double(), torch.randn(n, 2, dtype=D)
    data = [(x, torch.randn(n, 1, dtype=D))]
    return lw.fit(model, data, lw.Gaussian(noise_std=noise), method=lw.Full(), prior=prior)


def test_advice_where_all_weights_are_decided() -> None:
    decided = line(200, 0.1, 1.0).effective_parameters()
    assert decided.total > 2.9
    (advice,) = decided.findings
    assert advice.startswith("gamma is 3.0 of 3 weights")
    assert "too small. Try a larger one and compare the evidence" in advice
    assert advice in str(decided)


def test_advice_where_a_layer_is_not_decided() -> None:
    undecided = line(5, 1.0, 1e4).effective_parameters()
    (advice,) = undecided.findings
    assert advice.startswith("layer (top): gamma is ")
    assert "of 3 weights; the data decide almost none" in advice
    mixed = regression(lw.Full(), lw.per_layer({"0": 1e6, "2": 1e-4, "4": 1e-4})).effective_parameters()
    assert [text.split(":")[0] for text in mixed.findings] == ["layer 0"]


@pytest.mark.parametrize("method", ["full", "kron", "diagonal"])
def test_no_advice_otherwise(method: str) -> None:
    effective = regression(METHODS[method], 0.6).effective_parameters()
    assert all(gamma > 0.01 * effective.sizes[name] for name, gamma in effective.layers.items())
    assert effective.findings == ()


def test_as_a_table() -> None:
    effective = regression(lw.Full(), 0.6).effective_parameters()
    lines = str(effective).splitlines()
    assert lines[0].split() == ["layer", "weights", "gamma", "share"]
    assert [row.split()[0] for row in lines[1:]] == ["0", "2", "4", "total"]
    assert lines[-1].split()[1:3] == ["83", f"{effective.total:.2f}"]
    assert lines[1].split()[3] == f"{effective.layers['0'] / 30:.1%}"


def test_without_a_posterior_there_is_none() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="MapOnly has no evidence"):
        regression(lw.baselines.MapOnly(), 1.0).effective_parameters()


# Solves and variances.


def assert_inverse(inverse: Any, precision: Tensor, power: float = 2 / 3) -> None:
    covariance = torch.linalg.inv(precision)
    assert_close(inverse.variances(), covariance.diagonal(), power)
    v = torch.randn(4, len(precision), dtype=D)
    kept = v.clone()
    assert_close(inverse.solve(v), v @ covariance, power)
    assert torch.equal(v, kept)
    assert_close(inverse.solve(v[:1]) @ precision, v[:1], power)
    eye = torch.eye(len(precision), dtype=D)
    assert_close(inverse.adjoint(eye), inverse.sample(eye).T, power)  # as rows: the transpose of the transpose
    assert_close(inverse.sample(inverse.adjoint(v)), v @ covariance, power)


@pytest.mark.parametrize(("method", "prior"), PAIRS)
def test_solves_and_variances_are_the_dense_inverse(method: str, prior: str) -> None:
    posterior = regression(METHODS[method], given(prior))
    matrix = matrix_of(method, posterior)
    precision = matrix / NOISE + torch.diag(precisions(method, prior, matrix))
    assert_inverse(posterior.posterior.precision, precision, SOLVED if "low_rank" in method else 2 / 3)


@pytest.mark.parametrize("case", ["conv_zoo", "embedding", "norms", "lstm", "conv_transpose"])
@pytest.mark.parametrize("method", ["kron", "ekron", "diagonal"])
def test_solves_and_variances_of_other_blocks(case: str, method: str) -> None:
    """Groups, lookups, norms, recurrent weights, turned kernels: blocks and theta have different orders."""
    chosen = BY_NAME[case]
    fitted = lw.fit(chosen.build(), problems.batches(chosen), problems.likelihood(chosen), method=METHODS[method],
                    prior=lw.per_layer(0.6))  # fmt: skip
    fitted = fitted.with_prior(lw.per_layer(torch.linspace(0.2, 2, len(fitted.prior.values), dtype=D)))
    precision = assembled(fitted.posterior.curvature) + torch.diag(fitted.prior.vector)
    assert_inverse(fitted.posterior.precision, precision)


@pytest.mark.parametrize("chosen", [torch.tensor([1, 5, 40, 66, 77, 82]), torch.arange(83) % 4 == 1])
@pytest.mark.parametrize("method", ["full", "diagonal", "low_rank"])
def test_solves_and_variances_of_single_weights(method: str, chosen: Tensor) -> None:
    ggn = curvatures()["full"][chosen][:, chosen]
    matrix = torch.diag(ggn.diagonal()) if method == "diagonal" else ggn
    each = torch.linspace(0.2, 2, len(ggn), dtype=D)
    fitted = regression(METHODS[method], lw.priors.diagonal(each), weights=lw.subnetwork(chosen))
    assert_inverse(fitted.posterior.precision, matrix / NOISE + torch.diag(each), SOLVED)


@pytest.mark.parametrize("method", ["full", "diagonal", "kron", "ekron", "low_rank"])
def test_solves_and_variances_of_the_last_layer(method: str) -> None:
    part = torch.arange(65, 83)
    ggn = curvatures()["full"][part][:, part]
    matrix = torch.diag(ggn.diagonal()) if method == "diagonal" else ggn  # one linear layer: every method is exact
    fitted = regression(METHODS[method], 0.6, weights=lw.last_layer)
    assert_inverse(fitted.posterior.precision, matrix / NOISE + 0.6 * torch.eye(18, dtype=D), SOLVED)


@pytest.mark.parametrize("method", ["full", "diagonal", "kron", "ekron", "low_rank"])
def test_solves_in_float32(method: str) -> None:
    inverse = regression(METHODS[method], 0.6, torch.float32).posterior.precision
    covariance = torch.linalg.inv(matrix_of(method, None) / NOISE + 0.6 * torch.eye(P, dtype=D))  # type: ignore[arg-type]
    v = torch.randn(3, P, dtype=torch.float32)
    assert inverse.solve(v).dtype == torch.float32
    assert_close(inverse.sample(inverse.adjoint(v)), inverse.solve(v), SOLVED, torch.float32)
    assert_close(inverse.solve(v), v.double() @ covariance, SOLVED)
    assert_close(inverse.variances(), covariance.diagonal(), SOLVED, torch.float32)
