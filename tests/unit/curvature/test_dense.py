"""Full curvature, and the state of every structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import lapwing as lw
from lapwing.curvature import dense as full
from lapwing.curvature import dense as hessian
from lapwing.curvature.base import PerOutputCurvature
from lapwing.data.batches import Data
from lapwing.data.processes import ALONE
from lapwing.linalg.dense import STRIP_ROWS
from lapwing.networks.network import Network
from lapwing.priors import isotropic
from tests import problems
from tests.cases import BY_NAME
from tests.tolerances import assert_close

# The whole matrix: sums and forms are float64 whatever the network is, and memory is that of the matrix.

WIDE = 70  # features, with the bias in three strips


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDE), nn.ReLU(), nn.Linear(WIDE, 5))


def data() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(800, 6, generator=torch.Generator().manual_seed(1))
    y = (x[:, :5] + 0.3 * x[:, 1:]).argmax(1)
    return list(zip(x.split(100), y.split(100), strict=True))


def fitted(model: nn.Module, precision: float, dtype: torch.dtype) -> lw.Fitted:
    batches = [(x.to(dtype), y) for x, y in data()]
    return lw.fit(model.to(dtype), batches, "classification", method=lw.Full(), weights="last_layer", prior=precision,
                  progress=False)  # fmt: skip


@pytest.mark.parametrize("precision", [10.0, 1e-2, 1e-4])
def test_a_weak_prior_survives_float32(precision: float) -> None:
    """In float32 sums the null direction of the softmax gets eigenvalues of -1e-4: 10 % off, or not definite."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))
    single, double = (fitted(network(), precision, dtype) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(
        single.functions(x).cov.double(), double.functions(x.double()).cov, rtol=1e-4, atol=1e-5 / precision
    )
    assert float(single.log_evidence()) == pytest.approx(float(double.log_evidence()), abs=1e-3)


def test_noise_so_small_that_rounding_drowns_the_prior() -> None:
    """A network that interpolates: its variance is that of the prior outside the rows of its Jacobian."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 15), nn.Tanh(), nn.Linear(15, 1)).double()
    x, new = torch.randn(25, 2).double(), torch.randn(9, 2).double()
    noise = lw.Gaussian(noise_std=1e-8)
    posterior = lw.fit(net, [(x, net(x).detach())], noise, method=lw.Full(), prior=3.0, progress=False)
    gradient = partial(torch.autograd.grad, inputs=list(net.parameters()), retain_graph=True)
    rows, others = (torch.stack([torch.cat([g.flatten() for g in gradient(f)]) for f in net(inputs)[:, 0]])
                    for inputs in (x, new))  # fmt: skip
    values, right = torch.linalg.svd(rows, full_matrices=False)[1:]
    left_over = others.square().sum(1) - ((others @ right.mT).square() / (1 + 3e-16 / values.square())).sum(1)
    assert float(values.min()) > 1e-5  # no direction that is rounding
    torch.testing.assert_close(posterior.functions(new).variance[:, 0], left_over / 3, rtol=1e-5, atol=1e-9)


def test_strips_are_the_whole_sum() -> None:
    """Against J'HJ by autograd."""
    model = network().double()
    posterior = fitted(model, 1.0, torch.float64)
    features = torch.cat([model[1](model[0](x.double())) for x, _ in data()]).detach()
    inputs = torch.cat([features, torch.ones(len(features), 1)], 1)
    p = model[2](features).detach().softmax(-1)
    outputs = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    whole = torch.einsum("nij,na,nb->iajb", outputs, inputs, inputs)
    order = [(i, a) for i in range(5) for a in range(WIDE)] + [(i, WIDE) for i in range(5)]  # weights, then biases
    i, a = torch.tensor(order).unbind(1)
    expected = whole[i[:, None], a[:, None], i, a]
    torch.testing.assert_close(posterior.posterior.current.matrix, expected, rtol=1e-10, atol=1e-10)


HESSIANS = ["mlp", "norms", "attention", "embedding", "tied", "cnn", "free_parameter", "weight_norm", "prelu"]


def differentiated(name: str) -> tuple[nn.Module, Any, Tensor]:
    if name == "prelu":
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 3)).double()
        return model, torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    case = BY_NAME[name]
    return case.build(), case.batch(6), torch.arange(6) % case.outputs[-1]


@cache
def row_by_row(name: str) -> Tensor:
    """Return the Hessian with one backward pass for each of its rows."""
    model, inputs, y = differentiated(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hessian, "seed_by_seed", lambda *_: True)
        data = Data([(inputs, y)], torch.device("cpu"))
        return hessian.full_hessian(Network.build(model, inputs), lw.Categorical(), data)[0].matrix


@pytest.mark.parametrize("rows", [1, 6, 10**6])  # 6: as many as there are samples
@pytest.mark.parametrize("name", HESSIANS)
def test_many_rows_of_a_hessian_at_once(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, y = differentiated(name)
    network = Network.build(model, inputs)
    size, width = network.selection.size, 4 * len(y) * network.footprint.width
    monkeypatch.setattr(hessian, "small_results_budget", lambda device: rows * 8 * (2 * size + width))
    monkeypatch.setattr(hessian, "seed_by_seed", lambda *_: False)
    curvature, _ = hessian.full_hessian(network, lw.Categorical(), Data([(inputs, y)], torch.device("cpu")))
    assert float(row_by_row(name).abs().max()) > 0
    assert torch.equal(curvature.matrix, curvature.matrix.mT)
    assert_close(curvature.matrix, row_by_row(name))


class Unbatched(torch.autograd.Function):
    """A gradient that looks at its numbers, which no batch of them allows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh().square()) if bool((grad != 0).any()) else grad


def test_a_hessian_of_what_cannot_be_batched() -> None:
    class Own(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            return Unbatched.apply(x)

    posterior, x, y = [], torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    for activation in (Own(), nn.Tanh()):
        torch.manual_seed(0)
        network = Network.build(nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3)).double(), x)
        posterior.append(hessian.full_hessian(network, lw.Categorical(), Data([(x, y)], torch.device("cpu")))[0].matrix)
    assert_close(*posterior)


def test_a_hessian_is_summed_in_float64() -> None:
    """A thousand copies of one batch: float32 would lose their last digits one after another."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    network, cpu = Network.build(model, x), torch.device("cpu")
    one, many = (hessian.full_hessian(network, lw.Categorical(), Data([(x, y)] * n, cpu))[0].matrix for n in (1, 1000))
    assert many.dtype == torch.float64
    torch.testing.assert_close(many, 1000 * one, rtol=1e-12, atol=1e-12)


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that PyTorch holds at once, over what it holds at first."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        kept = run()
    del kept
    largest = current = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            largest = max(largest, current)
    return largest


def test_memory_of_the_matrix() -> None:
    """One matrix while H is summed, two while Λ is factorised, one for any ratios of noises."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20)), torch.randn(8, 20)
    network = Network.build(model, x)
    size = network.selection.size
    assert size > 2 * STRIP_ROWS
    matrix = 8 * size**2
    sweep = SimpleNamespace(runs=lambda width: [network.linearise(x).jacobians()], processes=ALONE)
    assert matrix <= peak(lambda: full.full_curvature(sweep, network)) < 1.9 * matrix
    curvature = full.FullCurvature(torch.eye(size, dtype=torch.float64), network.selection)
    prior = isotropic(1.0).bound(network.selection, network.theta())
    assert peak(lambda: curvature.precision(torch.tensor(2.0), prior)) < 2.5 * matrix
    each = PerOutputCurvature((curvature,) * 5, torch.ones(5))
    assert peak(lambda: each.at(torch.arange(1.0, 6.0))) < 1.5 * matrix


def test_a_hessian_in_parts_of_a_batch_is_that_of_the_batch() -> None:
    case = BY_NAME["mlp"]
    net = Network.build(case.build(), case.batch(6))
    x, targets = case.batch(6), torch.arange(6) % net.output_shape[-1]
    found = []
    for size in ("1GiB", 1):
        with lw.memory.limited(size):
            found.append(hessian.full_hessian(net, lw.Categorical(), Data([(x, targets)], torch.device("cpu")))[0])
    assert_close(found[1].matrix, found[0].matrix)


# Curvatures and precisions are values: a changed copy never answers with what was computed for the original.

D = torch.float64
CASE = BY_NAME["embedding"]


def test_blocks_of_different_structures_do_not_add() -> None:
    kron, mixed = (problems.fit(CASE, method, prior=1.0).posterior.curvature for method in (lw.Kron(), lw.Diagonal()))
    with pytest.raises(lw.errors.UnsupportedError, match="do not add; expected the same structures"):
        _ = kron + mixed


VALUES_CASE = BY_NAME["mlp"]
PHI = torch.tensor(0.5, dtype=D)


def values_fitted(method: Any) -> lw.Fitted:
    data = problems.batches(VALUES_CASE)
    return lw.fit(VALUES_CASE.build(), data, "classification", method=method, prior=lw.priors.g_prior(0.6))


def test_a_changed_matrix_has_another_log_determinant() -> None:
    posterior = values_fitted(lw.Full())
    curvature, prior = posterior.posterior.curvature, posterior.prior
    curvature.logdet(PHI, prior)
    changed = replace(curvature, matrix=10 * curvature.matrix)
    assert_close(changed.logdet(PHI, prior), changed.precision(PHI, prior).logdet())


def test_changed_kronecker_factors_have_another_precision() -> None:
    posterior = values_fitted(lw.Kron())
    curvature, prior = posterior.posterior.curvature, posterior.prior
    curvature.logdet(PHI, prior)
    blocks = tuple(replace(block, out=replace(block.out, matrix=10 * block.out.matrix)) for block in curvature.blocks)
    changed, rescaled = replace(curvature, blocks=blocks), PHI / 10
    # Ten times the curvature is a tenth of the dispersion.
    assert_close(changed.logdet(PHI, prior), curvature.logdet(rescaled, prior))
    assert_close(changed.precision(PHI, prior).variances(), curvature.precision(rescaled, prior).variances())


def test_a_changed_factor_has_other_output_covariances() -> None:
    model, x = torch.nn.Linear(4, 3).double(), torch.randn(6, 4, dtype=D)
    posterior = lw.fit(model, [(x, torch.arange(6) % 3)], "classification", method=lw.Full(), prior=1.0)
    jacobian, precision = posterior.network.linearise(x).jacobians(), posterior.posterior.precision
    before = precision.quadratic(jacobian)
    assert_close(replace(precision, factor=2 * precision.factor).quadratic(jacobian), before / 4)


@pytest.mark.parametrize("method", [lw.Full(), lw.Kron()])
def test_decompositions_are_computed_once_for_all_g(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = values_fitted(method)
    curvature, prior = posterior.posterior.curvature, posterior.prior
    curvature.logdet(PHI, prior)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a decomposition was computed again")

    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    monkeypatch.setattr(torch.linalg, "eigvalsh", refuse)
    for g in (0.1, 3.0):
        curvature.logdet(2 * PHI, prior.with_precision(torch.tensor(g, dtype=D)))
