"""A belief about functions that is no belief about weights, from its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods import fmgp as function_space
from lapwing.methods.fmgp import KERNELS, FreeKernel, FunctionPosterior, Sight, last_layer_network
from lapwing.networks.network import Network
from lapwing.problem import Problem, Statistics
from tests.cases import BY_NAME
from tests.tolerances import assert_close, assert_within

D = torch.float64
CASE = BY_NAME["cnn"]
M, RANK = 5, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def made(kind: str, dtype: torch.dtype = D) -> FunctionPosterior:
    network = Network.build(CASE.build(dtype), CASE.batch(3, dtype))
    prior = lw.isotropic(1.0).bound(network.selection, network.theta())
    sight = Sight(network, last_layer_network(network, CASE.batch(3, dtype)) if kind == "features" else None)
    size = sight(CASE.batch(1, dtype))[0].shape[1]
    lengths = torch.linspace(3.0, 20.0, size, dtype=D) if kind == "rbf" else torch.ones(1, dtype=D)
    mixing = torch.tensor([[2.0, 0.0, 0.0], [1.8, 0.3, 0.0], [-1.0, 0.5, 0.2]], dtype=D)
    kernel = FreeKernel(kind, lengths.log(), mixing)
    points, numbers = draw(M, size, seed=1), torch.tensor([0, 2, 1, 1, 0])
    problem = Problem(network, lw.Categorical(), prior)
    mix = 0.1 * draw(M, RANK, seed=2)
    return FunctionPosterior(problem, sight, kernel, points, numbers, mix, Statistics(0.0, 3, 3), network.theta())


@pytest.mark.parametrize("kind", KERNELS)
def test_what_a_kernel_sees(kind: str) -> None:
    """The input, flat, or what the last layer gets; with the outputs, in float64."""
    for dtype in (D, torch.float32):
        posterior, x = made(kind, dtype), CASE.batch(4, dtype, seed=1)
        seen, f = posterior.sight(x)
        model = CASE.build(dtype)
        with torch.no_grad():
            expected = x.flatten(1) if kind == "rbf" else nn.Sequential(*list(model)[:-1])(x)
            assert_close(seen, expected.double(), dtype=dtype)
            assert_close(f, model(x).double(), dtype=dtype)
        assert seen.dtype == f.dtype == D


@pytest.mark.parametrize("kind", KERNELS)
def test_the_covariance_is_the_kernel_less_what_the_points_know(kind: str) -> None:
    posterior, x = made(kind), CASE.batch(4, seed=1)
    seen, f = posterior.sight(x)
    rows = posterior.kernel.between(seen, posterior.points, posterior.numbers).reshape(12, M) @ posterior.mix
    expected = posterior.kernel.joint(seen).reshape(12, 12) - rows @ rows.T
    joint = posterior(x, joint=True)
    assert_close(joint.cov.reshape(12, 12), expected)
    marginal = posterior(x)
    assert_close(marginal.cov, torch.stack([expected[i : i + 3, i : i + 3] for i in range(0, 12, 3)]))
    assert_close(marginal.mean, f)
    assert_close(joint.mean, f)
    assert not marginal.cov.requires_grad


@pytest.mark.parametrize("kind", KERNELS)
def test_draws_have_the_joint_covariance(kind: str, generator: torch.Generator) -> None:
    posterior, x = made(kind), CASE.batch(2, seed=1)
    joint = posterior(x, joint=True)
    gap = (posterior.function_samples(x, 4000, generator) - joint.mean).flatten(1)
    assert gap.shape == (4000, 6)
    assert_within(gap[:, :, None] * gap[:, None, :], joint.cov.reshape(6, 6))
    one, two = (posterior.function_samples(x, 2, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("kind", KERNELS)
def test_above_so_many_outputs_covariances_wait_until_they_are_asked_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior, x = made(kind), CASE.batch(4, seed=1)
    plain = posterior(x)
    monkeypatch.setattr(function_space, "WIDE", 2)
    late = posterior(x)
    assert not isinstance(late.covariance, Tensor)
    assert_close(late.variance, plain.variance)
    assert_close(late.cov, plain.cov)


@pytest.mark.parametrize("kind", KERNELS)
def test_the_dtype_is_the_networks(kind: str) -> None:
    posterior, x = made(kind, torch.float32), CASE.batch(4, torch.float32, seed=1)
    wide = made(kind)(CASE.batch(4, torch.float32, seed=1).double())
    for belief in (posterior(x), posterior(x, joint=True)):
        assert belief.mean.dtype == belief.cov.dtype == torch.float32
    assert_close(posterior(x).cov, wide.cov, 0.5)


@pytest.mark.parametrize(("kind", "parts"), [("rbf", []), ("features", ["last"])])
def test_the_state_for_a_file(kind: str, parts: list[str]) -> None:
    state = made(kind).state()
    assert state.settings["kernel"] == kind
    assert list(state.parts) == parts
