"""Kernels that are free of any network, entry by entry from their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lapwing.methods.fmgp import KERNELS, FreeKernel
from tests.tolerances import assert_close

D = torch.float64
B, M, SIZE, OUTPUTS = 4, 5, 3, 2
NUMBERS = torch.tensor([0, 1, 1, 0, 1])


def made(kind: str, each: bool = True) -> FreeKernel:
    lengths = torch.tensor([0.5, 1.0, 3.0] if each else [0.8], dtype=D)
    mixing = torch.tensor([[1.5, 99.0], [-0.4, 0.7]], dtype=D)  # the upper triangle has no say
    return FreeKernel(kind, lengths.log(), mixing)


def inputs(count: int, seed: int) -> Tensor:
    return torch.randn(count, SIZE, dtype=D, generator=torch.Generator().manual_seed(seed))


def entry(kernel: FreeKernel, u: Tensor, v: Tensor, c: int, d: int) -> float:
    lengths = kernel.log_lengths.exp().expand(SIZE).tolist()
    mixed = [[1.5, 0.0], [-0.4, 0.7]]
    between = sum(mixed[c][k] * mixed[d][k] for k in range(OUTPUTS))
    if kernel.kind == "rbf":
        gap = sum((float(a) - float(b)) ** 2 / s**2 for a, b, s in zip(u, v, lengths, strict=True))
        return math.exp(-0.5 * gap) * between
    return (1 + sum(float(a) * float(b) / s**2 for a, b, s in zip(u, v, lengths, strict=True)) / SIZE) * between


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", KERNELS)
def test_entries(kind: str, each: bool) -> None:
    kernel, u, z = made(kind, each), inputs(B, 0), inputs(M, 1)
    joint = [[[[entry(kernel, u[i], u[j], c, d) for d in range(OUTPUTS)] for j in range(B)]
              for c in range(OUTPUTS)] for i in range(B)]  # fmt: skip
    expected = torch.tensor(joint, dtype=D)
    assert_close(kernel.joint(u), expected)
    marginals = torch.stack([expected[i, :, i] for i in range(B)])
    assert_close(kernel.marginal(u).contiguous(), marginals)
    across = [[[entry(kernel, u[i], z[m], c, int(NUMBERS[m])) for m in range(M)] for c in range(OUTPUTS)]
              for i in range(B)]  # fmt: skip
    assert_close(kernel.between(u, z, NUMBERS), torch.tensor(across, dtype=D))
    points = [[entry(kernel, z[a], z[b], int(NUMBERS[a]), int(NUMBERS[b])) for b in range(M)] for a in range(M)]
    assert_close(kernel.points(z, NUMBERS), torch.tensor(points, dtype=D))


@pytest.mark.parametrize("kind", KERNELS)
def test_it_is_a_covariance(kind: str) -> None:
    """Of outputs and points together: no eigenvalue below zero."""
    kernel, u, z = made(kind), inputs(B, 0), inputs(M, 1)
    size = B * OUTPUTS
    across = kernel.between(u, z, NUMBERS).reshape(size, M)
    whole = torch.cat([torch.cat([kernel.joint(u).reshape(size, size), across], 1),
                       torch.cat([across.T, kernel.points(z, NUMBERS)], 1)])  # fmt: skip
    assert float(torch.linalg.eigvalsh(whole).min()) >= -1e-12 * float(whole.diagonal().max())


def test_rbf_forgets_with_distance_and_features_grow_with_it() -> None:
    near, far = inputs(1, 0), 1e3 * inputs(1, 0)
    rbf, features = made("rbf"), made("features")
    assert float(rbf.between(far, near, NUMBERS[:1]).abs().max()) == 0
    assert_close(rbf.marginal(far).contiguous(), rbf.marginal(near).contiguous())
    assert float(features.marginal(far)[0, 0, 0]) > 1e4 * float(features.marginal(near)[0, 0, 0])


def test_features_are_a_linear_layer_with_a_bias() -> None:
    """Weights ~ N(0, 1 / (D ℓ²)) and a bias ~ N(0, 1)."""
    kernel, u = made("features"), inputs(B, 0)
    design = torch.cat([u / (kernel.log_lengths.exp() * math.sqrt(SIZE)), torch.ones(B, 1, dtype=D)], 1)
    assert_close(kernel.joint(u)[:, 0, :, 0], design @ design.T * 1.5**2)


@pytest.mark.parametrize("kind", KERNELS)
def test_slopes_in_everything_that_is_learned(kind: str) -> None:
    start = made(kind)

    def kernels(lengths: Tensor, mixing: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kernel, u = FreeKernel(kind, lengths, mixing), inputs(B, 0)
        return kernel.points(z, NUMBERS), kernel.between(u, z, NUMBERS), kernel.marginal(u).contiguous()

    leaves = (start.log_lengths, start.mixing, inputs(M, 1))
    assert torch.autograd.gradcheck(kernels, tuple(t.clone().requires_grad_() for t in leaves), fast_mode=True)
