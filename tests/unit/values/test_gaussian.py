"""The Gaussian belief about outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.values.gaussian import Deferred, FunctionGaussian, psd_root
from tests.tolerances import SOLVED, assert_close, assert_within

D = torch.float64
B, C = 3, 2


def covariance(*shape: int) -> Tensor:
    root = torch.randn(*shape, shape[-1] + 1, dtype=D)
    return root @ root.mT


def test_variance_and_std_are_the_diagonal() -> None:
    cov = covariance(B, C)
    belief = FunctionGaussian(torch.zeros(B, C, dtype=D), cov)
    for b in range(B):
        for c in range(C):
            assert float(belief.variance[b, c]) == float(cov[b, c, c])
            assert float(belief.std[b, c]) == pytest.approx(float(cov[b, c, c]) ** 0.5)


def test_joint_covariance_keeps_its_own_diagonal() -> None:
    whole = covariance(B * C)
    belief = FunctionGaussian(torch.zeros(B, C, dtype=D), whole.reshape(B, C, B, C), joint=True)
    assert_close(belief.variance.reshape(-1), whole.diagonal())


def test_deferred_covariance_runs_only_what_is_asked_for() -> None:
    cov, calls = covariance(B, C), []

    def variance() -> Tensor:
        calls.append("variance")
        return cov.diagonal(dim1=1, dim2=2)

    def full() -> Tensor:
        calls.append("cov")
        return cov

    belief = FunctionGaussian(torch.zeros(B, C, dtype=D), Deferred(variance, full))
    assert calls == []
    assert_close(belief.variance, cov.diagonal(dim1=1, dim2=2))
    assert belief.std.shape == (B, C)
    assert calls == ["variance"]
    assert torch.equal(belief.cov, cov)
    assert torch.equal(belief.cov, cov)
    assert calls == ["variance", "cov"]


def test_rounding_below_zero_is_no_variance() -> None:
    belief = FunctionGaussian(torch.zeros(1, 1, dtype=D), torch.full((1, 1, 1), -1e-18, dtype=D))
    assert belief.std.item() == 0.0


def test_samples_have_the_covariance(generator: torch.Generator) -> None:
    belief = FunctionGaussian(torch.randn(B, C, dtype=D), covariance(B, C))
    draws = belief.sample(4000, generator)
    assert draws.shape == (4000, B, C)
    gap = draws - belief.mean
    assert_within(gap.unsqueeze(-1) * gap.unsqueeze(-2), belief.cov)


def test_joint_samples_have_the_joint_covariance(generator: torch.Generator) -> None:
    whole = covariance(B * C)
    belief = FunctionGaussian(torch.randn(B, C, dtype=D), whole.reshape(B, C, B, C), joint=True)
    draws = belief.sample(4000, generator)
    assert draws.shape == (4000, B, C)
    gap = (draws - belief.mean).flatten(1)
    assert_within(gap.unsqueeze(-1) * gap.unsqueeze(-2), whole)


def test_root_of_a_singular_covariance() -> None:
    thin = torch.randn(4, 2, dtype=D)
    root = psd_root(thin @ thin.T)
    assert_close(root @ root.T, thin @ thin.T)


def test_a_negative_eigenvalue_is_refused() -> None:
    with pytest.raises(NumericalError, match=r"eigenvalue -1 beside 2; expected none below zero"):
        psd_root(torch.diag(torch.tensor([2.0, -1.0], dtype=D)))


@pytest.mark.parametrize("lead", [(B,), (B, 2)], ids=["outputs", "tokens"])
def test_the_marginal_of_a_joint_belief_has_the_block_of_each_input(lead: tuple[int, ...]) -> None:
    mean = torch.randn(*lead, C, dtype=D)
    whole = covariance(mean.numel())
    marginal = FunctionGaussian(mean, whole.reshape(*mean.shape, *mean.shape), joint=True).marginal
    assert not marginal.joint
    assert marginal.cov.shape == (*mean.shape, C)
    for i, block in enumerate(marginal.cov.reshape(-1, C, C)):
        assert torch.equal(block, whole[C * i : C * (i + 1), C * i : C * (i + 1)])
    assert marginal.marginal is marginal


@pytest.mark.parametrize("worse", [-1.0, float("nan")])
def test_a_variance_below_zero_is_refused(worse: float) -> None:
    belief = FunctionGaussian(torch.zeros(2, 1, dtype=D), torch.tensor([2.0, worse], dtype=D).reshape(2, 1, 1))
    with pytest.raises(NumericalError, match=r"has the variance .* expected none below zero"):
        _ = belief.std


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True])
def test_numbers_of_samples_that_are_none(n: Any) -> None:
    belief = FunctionGaussian(torch.zeros(B, C, dtype=D), covariance(B, C))
    with pytest.raises(UnsupportedError, match=r"n is .*; expected"):
        belief.sample(n)


def test_a_generator_that_is_none() -> None:
    belief: Any = FunctionGaussian(torch.zeros(B, C, dtype=D), covariance(B, C))
    with pytest.raises(UnsupportedError, match=r"generator is 5; expected torch.Generator\(\).manual_seed"):
        belief.sample(2, 5)


def test_draws_in_pieces_are_the_same_draws() -> None:
    """The roots of all covariances would take several times their memory."""
    root = torch.randn(7, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    belief = FunctionGaussian(torch.zeros(7, 3, dtype=torch.float64), root @ root.mT)
    whole = belief.sample(4, torch.Generator().manual_seed(2))
    with lw.memory.limited(1):
        assert_close(belief.sample(4, torch.Generator().manual_seed(2)), whole, SOLVED)


def test_joint_draws_of_too_many_outputs_are_refused() -> None:
    size = 20_000
    belief = FunctionGaussian.across(torch.zeros(size, 1), torch.zeros(1).expand(size, 1, size, 1))
    with lw.memory.limited("1MiB"), pytest.raises(UnsupportedError, match="20000 outputs together"):
        belief.sample(1)


def test_no_spread_has_no_graph() -> None:
    """0 * V in the graph would have the slope 0 * inf at sqrt(0)."""
    mean = torch.randn(B, C, dtype=D, requires_grad=True)
    cov = covariance(B, C).requires_grad_()
    diagonal = lambda: cov.diagonal(dim1=-2, dim2=-1)
    for whole in (cov, Deferred(diagonal, lambda: cov, diagonal), Deferred(diagonal, lambda: cov)):
        none = FunctionGaussian(mean, whole).widened(0)
        for part in (none.variance, none.centred_variance, none.std, none.cov):
            assert not part.requires_grad
            assert float(part.abs().max()) == 0
        assert none.cov.shape == cov.shape
        assert none.mean is mean


def test_slopes_of_draws_where_eigenvalues_repeat() -> None:
    """Against finite differences, at equal eigenvalues and, along changes that keep the rank, at a singular matrix."""
    draw = lambda cov: FunctionGaussian(torch.zeros(cov.shape[:2], dtype=D), cov).sample(
        5, torch.Generator().manual_seed(0)
    )
    around = torch.randn(B, 4, 4, dtype=D)
    same = lambda t: torch.eye(4, dtype=D) + t * (around + around.mT)
    thin = torch.randn(B, 4, 2, dtype=D)
    singular = lambda t: (thin + t * around[..., :2]) @ (thin + t * around[..., :2]).mT
    t = torch.zeros((), dtype=D, requires_grad=True)
    for cov in (same, singular):
        (slope,) = torch.autograd.grad(draw(cov(t)).sin().sum(), t)
        step = 1e-4
        up, down = (float(draw(cov(torch.tensor(h, dtype=D))).sin().sum()) for h in (step, -step))
        assert float(slope) == pytest.approx((up - down) / (2 * step), rel=1e-4)
