"""Total variation, its expectation with derivatives, and the density over length-scales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from experiments.tomography.total_variation import (
    TVPredCP,
    edges,
    expected_variation,
    exponential_coefficients,
    log_slope,
    total_variation,
)
from tests.experiments.tomography.dense import normals
from tests.tolerances import SOLVED, assert_close, assert_within

BLOCKS = torch.tensor([0, 0, 0, -1, 1, 1])
DISTANCES = torch.tensor([0.0, 1.0, 2**0.5, 0.0, 0.0, 2.0], dtype=torch.float64)
MEANS = torch.tensor([0.0, 0.3, -1.2, 2.5, 0.05], dtype=torch.float64)


def variances() -> Tensor:
    """Class variances (6, 5): large for distance zero, of either sign and smaller for the others."""
    draws = normals(6, 5)
    return torch.where((DISTANCES == 0)[:, None], 2 + draws.abs(), 0.3 * draws)


def prior() -> TVPredCP:
    return TVPredCP(0.7, MEANS, variances(), BLOCKS)


def test_the_variation_is_the_sum_over_edges() -> None:
    images = normals(2, 3, 4)
    pairs = edges(3, 4)
    assert pairs.shape == (3 * 3 + 2 * 4, 2)
    flat = images.flatten(1)
    expected = (flat[:, pairs[:, 1]] - flat[:, pairs[:, 0]]).abs().sum(1)
    assert_close(total_variation(images), expected)
    loop = sum(abs(images[0, i, j + 1] - images[0, i, j]) for i in range(3) for j in range(3))
    loop = loop + sum(abs(images[0, i + 1, j] - images[0, i, j]) for i in range(2) for j in range(4))
    assert_close(total_variation(images)[0], torch.as_tensor(loop))


def test_the_expectation_and_two_derivatives_agree_with_samples() -> None:
    """v = t² s: TV(m + t √s ε) gives κ by samples, and likelihood-ratio weights its derivatives in t, without bias."""
    s, t, count = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), 0.8, 200_000
    m = MEANS[:3]
    draws = normals(count, 3)
    values = (m + t * s.sqrt() * draws).abs()
    first = values * (draws.square() - 1) / t  # ∂/∂t of log N(x; m, t² s) is (ε² - 1) / t
    second = values * ((draws.square() - 1).square() - 3 * draws.square() + 1) / t**2
    scale = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    kappa = expected_variation(m, scale**2 * s)
    (slope,) = torch.autograd.grad(kappa, scale, create_graph=True)
    (bend,) = torch.autograd.grad(slope, scale)
    # Standard errors: about 0.003, 0.005 and 0.02.
    assert_within(values.sum(1), kappa.detach())
    assert_within(first.sum(1), slope.detach())
    assert_within(second.sum(1), bend)


def test_derivatives_are_those_of_finite_differences() -> None:
    m, v = MEANS.clone().requires_grad_(), torch.linspace(0.2, 3.0, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(expected_variation, (m, v))
    assert torch.autograd.gradgradcheck(expected_variation, (m, v))
    slopes = normals(5).requires_grad_()
    assert torch.autograd.gradcheck(log_slope, (m, v, slopes))
    assert torch.autograd.gradgradcheck(log_slope, (m, v, slopes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits_of_small_variances_and_means(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    m = torch.tensor([[1e-3], [-2.0], [0.0], [5.0]], dtype=dtype, requires_grad=True)
    for value in (0.0, tiny, 1e-30, 1e-12):
        v = torch.full_like(m, value).requires_grad_()
        kappa = expected_variation(m, v)
        grads = torch.autograd.grad(kappa.sum(), (m, v), create_graph=True)
        assert float((kappa - m[:, 0].abs()).detach().abs().max()) <= math.sqrt(2 * value / math.pi) * (1 + 1e-5)
        assert_close(grads[0], m.sign())
        apart = [0, 1, 3]  # where m is not zero, nothing depends on v
        assert bool((grads[1][apart] == 0).all())
        again = torch.autograd.grad(grads[0].sum() + grads[1][apart].sum(), (m, v), allow_unused=True)
        assert all(bool(g[apart].isfinite().all()) for g in again if g is not None)
    at_zero = expected_variation(m[2:3] * 0, torch.full_like(m[2:3], 0.5))
    assert_close(at_zero, torch.tensor([math.sqrt(1 / math.pi)], dtype=dtype))


def test_the_log_slope_does_not_underflow() -> None:
    """A slope of e^-5000 is zero in float64; its logarithm is not."""
    m, v, slope = (torch.tensor([x], dtype=torch.float64) for x in (1.0, 1e-4, 3e-5))
    expected = -0.5 / 1e-4 - 0.5 * math.log(2 * math.pi * 1e-4) + math.log(3e-5)
    assert float(log_slope(m, v, slope)) == pytest.approx(expected, rel=1e-12)
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    assert float(log_slope(m, zero, slope).detach()) == -math.inf


def test_coefficients_and_slopes_of_the_exponential_kernel() -> None:
    log_variances, log_lengths = normals(2), normals(2, seed=1).requires_grad_()
    coefficients, slopes = exponential_coefficients(log_variances, log_lengths, BLOCKS, DISTANCES)
    for c, block in enumerate(BLOCKS.tolist()):
        expected = torch.zeros((), dtype=torch.float64)
        if block >= 0:
            shape = (-DISTANCES[c] / log_lengths[block].exp()).exp() + (1e-6 if DISTANCES[c] == 0 else 0.0)
            expected = log_variances[block].exp() * shape
        assert_close(coefficients[c], expected)
        if block >= 0:
            (grad,) = torch.autograd.grad(coefficients[c], log_lengths, retain_graph=True)
            assert_close(slopes[c], grad[block])
            assert float(grad[1 - block]) == 0


def test_the_density_is_an_exponential_of_kappa_with_its_jacobian() -> None:
    """Against a loop over blocks and edges, with ∂κ/∂ log ℓ by central differences of κ."""
    hyper = prior()
    log_variances = torch.tensor([-0.4, 0.3], dtype=torch.float64)
    log_lengths = torch.tensor([0.2, 0.6], dtype=torch.float64)

    def kappa(block: int, log_length: float) -> float:
        total = 0.0
        for e, m in enumerate(MEANS.tolist()):
            v = 0.0
            for c in range(len(BLOCKS)):
                if int(BLOCKS[c]) == block:
                    d = float(DISTANCES[c])
                    shape = math.exp(-d / math.exp(log_length)) + (1e-6 if d == 0 else 0)
                    v += math.exp(float(log_variances[block])) * shape * float(hyper.class_variances[c, e])
            total += math.sqrt(2 * v / math.pi) * math.exp(-m * m / (2 * v)) + m * math.erf(m / math.sqrt(2 * v))
        return total

    expected, step = 0.0, 1e-5
    for block, log_length in enumerate(log_lengths.tolist()):
        slope = (kappa(block, log_length + step) - kappa(block, log_length - step)) / (2 * step)
        expected += -0.7 * kappa(block, log_length) + math.log(abs(slope))
    coefficients, slopes = exponential_coefficients(log_variances, log_lengths, BLOCKS, DISTANCES)
    assert_close(hyper.variations(coefficients), torch.tensor([kappa(0, 0.2), kappa(1, 0.6)], dtype=torch.float64))
    assert_close(hyper.log_density(coefficients, slopes), torch.tensor(expected, dtype=torch.float64), SOLVED)


def test_gradients_of_the_density() -> None:
    hyper = prior()

    def density(log_variances: Tensor, log_lengths: Tensor) -> Tensor:
        return hyper.log_density(*exponential_coefficients(log_variances, log_lengths, BLOCKS, DISTANCES))

    given = (normals(2).requires_grad_(), normals(2, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(density, given)
    assert torch.autograd.gradgradcheck(density, given)


def test_a_prior_is_asked_for_its_coefficients() -> None:
    class Given:
        def coefficients(self) -> Tensor:
            return torch.ones(6, dtype=torch.float64)

        def coefficient_slopes(self) -> Tensor:
            return torch.linspace(0, 1, 6, dtype=torch.float64)

    expected = prior().log_density(Given().coefficients(), Given().coefficient_slopes())
    assert_close(prior()(Given()), expected)


@pytest.mark.parametrize(
    "changes",
    [{"scale": 0.0}, {"scale": math.nan}, {"edge_means": MEANS[:3]}, {"edge_means": MEANS * math.nan},
     {"class_variances": variances()[:4]}, {"class_variances": variances() * math.inf},
     {"class_blocks": 2 * BLOCKS}, {"class_blocks": BLOCKS.double()}, {"class_blocks": torch.full((6,), -1)}],
)  # fmt: skip
def test_wrong_tensors_are_refused(changes: dict[str, Any]) -> None:
    given = {"scale": 1.0, "edge_means": MEANS, "class_variances": variances(), "class_blocks": BLOCKS} | changes
    with pytest.raises(lw.LapwingError, match="expected"):
        TVPredCP(**given)


def test_wrong_shapes_are_refused() -> None:
    two = torch.zeros(2)
    with pytest.raises(lw.LapwingError, match="expected the same shape"):
        expected_variation(two, torch.zeros(3))
    with pytest.raises(lw.LapwingError, match="expected 6 numbers"):
        prior().variations(two)
    with pytest.raises(lw.LapwingError, match=r"expected \(\.\.\., H, W\)"):
        total_variation(two)
    with pytest.raises(lw.LapwingError, match="expected two of"):
        exponential_coefficients(two, torch.zeros(3), BLOCKS, DISTANCES)
    with pytest.raises(lw.LapwingError, match="height"):
        edges(0, 3)
