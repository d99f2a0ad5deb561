"""Function samples by forward mode against those by layer-wise Jacobians: the same draws, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.networks import passes as directional
from lapwing.networks.tangent import Tangent
from lapwing.posteriors.mixture import MixturePosterior
from tests.tolerances import assert_close

D = torch.float64
CLASSES, DRAWS = 40, 6
METHODS = [lw.Kron(), lw.EKron(), lw.Diagonal(), lw.Full(), lw.KernelSpace(), lw.LowRank(20), lw.Sampled(8)]


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double().eval()
    x = torch.randn(12, 3, dtype=D)
    return net, (x, torch.randint(0, CLASSES, (12,)))


def samples(posterior: lw.Fitted, x: Tensor) -> Tensor:
    return posterior.function_samples(x, DRAWS, torch.Generator().manual_seed(4))


def by_jacobians(posterior: lw.Fitted, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(directional, "CHEAPER", 0.0)
        return samples(posterior, x)


def without_jacobians(posterior: lw.Fitted, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(Tangent, "jacobians", lambda *_: pytest.fail("a Jacobian was computed"))
        return samples(posterior, x)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_forward_mode_draws_the_same_functions(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, (x, y) = problem()
    posterior = lw.fit(net, (x, y), "classification", method=method, prior=3.0)
    expected = by_jacobians(posterior, x, monkeypatch)
    assert_close(without_jacobians(posterior, x, monkeypatch), expected)
    assert expected.std(0).min() > 0  # they are not all the mean


@pytest.mark.parametrize("method", [lw.Kron(), lw.Sampled(8)], ids=["Kron", "Sampled"])
def test_a_mixture_draws_all_its_cells_in_one_pass(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, (x, y) = problem()
    posterior = lw.fit(net, (x, y), "classification", method=method, prior=3.0)
    mixture = posterior.tuned(lw.tuners.Integrate((x, y), ratios=(0.1, 10.0), temperatures=(0.5, 1.0)))
    assert isinstance(mixture.posterior, MixturePosterior)
    with monkeypatch.context() as patch:  # each belief by itself, by its Jacobian
        patch.setattr(MixturePosterior, "_one_tangent_model", False)
        expected = by_jacobians(mixture, x, monkeypatch)
    passes: list[int] = []
    plain = directional.forward_products
    monkeypatch.setattr(directional, "forward_products", lambda n, x, v: passes.append(len(v)) or plain(n, x, v))
    assert_close(without_jacobians(mixture, x, monkeypatch), expected)
    assert len(passes) == 1


def test_samples_of_the_tangent_models_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (x, y) = problem()
    tuner = lw.tuners.LinearMode(mean="tangent")
    posterior = lw.fit(net, (x, y), "classification", method=lw.Diagonal(), tuner=tuner)
    assert posterior.network.shift is not None
    assert_close(samples(posterior, x), by_jacobians(posterior, x, monkeypatch))


def test_samples_in_inference_mode_are_the_same() -> None:
    net, (x, y) = problem()
    posterior = lw.fit(net, (x, y), "classification", prior=3.0)
    expected = samples(posterior, x)
    with torch.inference_mode():
        assert_close(samples(posterior, x), expected)
