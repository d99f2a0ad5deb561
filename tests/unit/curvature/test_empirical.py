"""The empirical Fisher: Σ g gᵀ over the gradients of log p(y | f) at the targets, one backward pass for each datum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import UnsupportedError
from tests.tolerances import assert_close

N, NOISE = 7, 0.3


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fisher(net: nn.Module, x: Tensor, y: Tensor, log_prob: Any, weights: Tensor | None = None) -> Tensor:
    """Sum over all data, (P, P); each token of an output (B, T, C) is a datum."""
    total, parameters = 0.0, list(net.parameters())
    for b in range(len(x)):
        outputs, targets = net(x[b : b + 1])[0], y[b]
        rows = zip(outputs, targets, strict=True) if outputs.ndim == 2 else [(outputs, targets)]
        for f, t in rows:
            grads = torch.autograd.grad(log_prob(f, t), parameters, retain_graph=True)
            g = torch.cat([each.reshape(-1) for each in grads])
            total = total + (1.0 if weights is None else weights[b]) * torch.outer(g, g)
    return total


def categorical(f: Tensor, y: Tensor) -> Tensor:
    return -nn.functional.cross_entropy(f, y)


def normal(f: Tensor, y: Tensor) -> Tensor:
    return torch.distributions.Normal(f, NOISE).log_prob(y).sum()


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


X, NUMBERS, LABELS = drawn(1, N, 3), drawn(2, N, 4), torch.arange(N) % 4
CASES = {"classes": (lw.Categorical(), LABELS, categorical), "numbers": (lw.Gaussian(NOISE), NUMBERS, normal)}


def dense(curvature: Any) -> Tensor:
    if hasattr(curvature, "matrix"):
        return curvature.matrix
    return (curvature.vectors.mT * curvature.values) @ curvature.vectors


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", [lw.Full, lw.KernelSpace, lw.LowRank])
def test_whole_matrix_is_that_of_the_definition(net, method, case):
    """Λ = H/φ + A, and H/φ is the empirical Fisher of the log-likelihood, noise included."""
    likelihood, y, log_prob = CASES[case]
    weights = torch.linspace(0.5, 2, N).double()
    data = lw.samples.weighted([(X[:3], y[:3], weights[:3]), (X[3:], y[3:], weights[3:])])
    fitted = lw.fit(net, data, likelihood, method=method(curvature="empirical"), prior=1.0)
    expected = fisher(net, X, y, log_prob, weights)
    assert_close(dense(fitted.base.curvature) / likelihood.dispersion, expected)
    precision = expected + torch.eye(len(expected)).double()
    assert_close(fitted.variance_of(lambda w: w["0.weight"][1, 2]), torch.linalg.inv(precision)[5, 5])


def test_diagonal_is_that_of_the_definition(net):
    fitted = lw.fit(net, [(X, LABELS)], "classification", method=lw.Diagonal(curvature="empirical"), prior=1.0)
    assert_close(fitted.base.curvature.plain_diagonal(), fisher(net, X, LABELS, categorical).diagonal())


@pytest.mark.parametrize("method", [lw.Kron, lw.EKron])
def test_kronecker_blocks_of_one_datum_are_exact(net, method):
    """Within a layer; the last one too, which has no closed form here."""
    x, y = X[:1], LABELS[2:3]
    fitted = lw.fit(net, [(x, y)], "classification", method=method(curvature="empirical"), prior=1.0)
    whole = fisher(net, x, y, categorical)
    for block, layer in zip(fitted.base.curvature.blocks, (net[0], net[2]), strict=True):
        size, inputs = layer.weight.numel(), layer.in_features
        start = 0 if layer is net[0] else 20
        columns = torch.arange(start, start + size).reshape(-1, inputs)
        bias = torch.arange(start + size, start + size + layer.out_features)[:, None]
        order = torch.cat([columns, bias], 1).reshape(-1)  # a row of the weight, then its bias
        assert_close(block.dense(), whole[order][:, order])


def test_every_token_is_a_datum():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 4)).double()
    x, y = drawn(3, 3, 2, 3), torch.tensor([[0, 3], [2, 1], [1, 1]])
    method = lw.Full(curvature="empirical")
    fitted = lw.fit(net, [(x, y)], lw.Categorical(), method=method, prior=1.0)
    assert_close(fitted.base.curvature.matrix, fisher(net, x, y, categorical))


def test_it_vanishes_where_the_targets_are_fitted(net):
    """Unlike the GGN, it says nothing about data that the network fits exactly: the pitfall that the docs describe."""
    with torch.no_grad():
        y = net(X)
    fitted = lw.fit(net, [(X, y)], lw.Gaussian(NOISE), method=lw.Full(curvature="empirical"), prior=1.0)
    assert float(fitted.base.curvature.matrix.abs().max()) == 0


@pytest.mark.parametrize("method", [lw.Kron, lw.LowRank, lw.KernelSpace])
def test_noise_that_is_not_known_is_refused(net, method):
    with pytest.raises(UnsupportedError, match="expected a known noise"):
        lw.fit(net, [(X, NUMBERS)], lw.Gaussian(), method=method(curvature="empirical"))


def test_methods_without_it_refuse_it():
    with pytest.raises(UnsupportedError, match="curvature is 'empirical'"):
        lw.Sampled(curvature="empirical")


def test_cost_is_one_backward_pass_for_each_datum(net):
    cheap, dear = (lw.Kron(curvature).cost(lw.check(net, X).workload) for curvature in ("empirical", "ggn"))
    assert cheap.fit_epochs < dear.fit_epochs
