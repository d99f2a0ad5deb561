"""IVON: the Gaussian is that of the optimiser's state, and near the mean-field optimum where that is known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.tolerances import assert_close

ivon = pytest.importorskip("ivon")

D = torch.float64
TOTAL, INPUTS, OUTPUTS = 18, 4, 3
X = torch.randn(TOTAL, INPUTS, dtype=D, generator=torch.Generator().manual_seed(1))
NEW = torch.randn(5, INPUTS, dtype=D, generator=torch.Generator().manual_seed(2))
Y = torch.randn(TOTAL, OUTPUTS, dtype=D, generator=torch.Generator().manual_seed(3))
LABELS = torch.randint(0, OUTPUTS, (TOTAL,), generator=torch.Generator().manual_seed(4))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double().eval()


def method(**settings: Any) -> Any:
    return lw.baselines.IVON(**{"epochs": 3, "learning_rate": 0.01, "batch_size": 6, "samples": 4, **settings})


def fitted(
    model: nn.Module | None = None, likelihood: Any = "classification", y: Tensor = LABELS, weights: Any = None,
    prior: Any = None, **settings: Any,
) -> lw.Fitted:  # fmt: skip
    model = net() if model is None else model
    return lw.fit(model, [(X, y)], likelihood, method=method(**settings), weights=weights, prior=prior)


class Kept(ivon.IVON):  # type: ignore[misc]
    """The optimiser of the package, which can be looked at after the fit."""

    last: Any = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        Kept.last = self


PRIORS: dict[str, Any] = {
    "none": None, "one": 3.0, "off zero": lw.isotropic(3.0, mean=0.4), "layers": lw.per_layer({"0": 2.0, "2": 5.0}),
}  # fmt: skip


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("prior", PRIORS)
def test_the_gaussian_is_that_of_the_optimiser(prior: str, likelihood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ivon, "IVON", Kept)
    model = net()
    posterior = fitted(model, likelihood, LABELS if likelihood == "classification" else Y, prior=PRIORS[prior])
    groups, draws = Kept.last.param_groups, posterior.posterior
    weights = torch.cat([group["params"][0].detach() for group in groups]) + (0.4 if prior == "off zero" else 0.0)
    assert_close(posterior.network.theta() + draws.mean, weights)
    phi = float(posterior.likelihood.dispersion)
    curvature = TOTAL / phi * torch.cat([group["hess"] for group in groups])
    assert_close(draws.variance, 1 / (curvature + posterior.prior.vector))  # 1/(ess (h + δ)), ess = n/φ, δ = φ A/n
    sizes = [torch.full_like(group["hess"], group["weight_decay"]) for group in groups]
    assert_close(TOTAL / phi * torch.cat(sizes), posterior.prior.vector)
    if prior == "none":
        assert_close(posterior.prior.values, torch.tensor(TOTAL * 1e-4 / phi, dtype=D))
    assert (phi == 1) == (likelihood == "classification")


def test_a_linear_model_reaches_the_mean_field_optimum() -> None:
    """For Gaussian noise it is known: the exact posterior mean, and one over the diagonal of the precision."""
    model, phi, alpha = nn.Linear(INPUTS, 1, bias=False).double(), 0.25, 2.0
    y = X @ torch.tensor([[1.0], [-0.5], [0.3], [2.0]], dtype=D) + phi**0.5 * Y[:, :1]
    posterior = fitted(
        model, lw.Gaussian(noise_std=phi**0.5), y, prior=alpha, epochs=600, batch_size=TOTAL, learning_rate=0.1,
        hess_init=1.0, beta2=0.99,
    )  # fmt: skip
    full = X.T @ X / phi + alpha * torch.eye(INPUTS, dtype=D)
    mean = torch.linalg.solve(full, X.T @ y / phi)[:, 0]
    draws = posterior.posterior
    found = posterior.network.theta() + draws.mean
    assert float(((found - mean) * full.diagonal().sqrt()).abs().max()) < 0.3  # of a standard deviation
    assert float((draws.variance * full.diagonal()).log().abs().max()) < 0.5  # its curvature has Monte Carlo noise
    assert float((found - model.weight[0].detach()).abs().max()) > 0.2


def test_it_goes_downhill_from_a_network_that_is_not_trained() -> None:
    start = float(nn.functional.cross_entropy(net()(X), LABELS).detach())
    losses = [fitted(epochs=epochs, learning_rate=0.1, hess_init=9.0).posterior.statistics.loss / TOTAL
              for epochs in (2, 30)]  # fmt: skip
    assert losses[1] < losses[0] < 1.02 * start
    assert losses[1] < 0.95 * start


@pytest.mark.parametrize("weights", ["last_layer", lw.subnetwork(torch.tensor([1, 7, 30, 39]))])
def test_only_the_chosen_weights_move(weights: Any, tmp_path: Path) -> None:
    posterior = fitted(weights=weights, prior=2.0)
    assert len(posterior.posterior.mean) == posterior.network.selection.size
    posterior.save(tmp_path / "it")
    again = lw.load(tmp_path / "it", net())
    assert torch.equal(again.functions(NEW).cov, posterior.functions(NEW).cov)
    assert torch.equal(again.function_samples(NEW, 3), posterior.function_samples(NEW, 3))


# What is refused


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ivon", None)
    with pytest.raises(lw.errors.UnsupportedError, match=r"needs the package ivon-opt.*pip install 'lapwing\[ivon\]'"):
        fitted()


def test_a_rate_that_is_too_high() -> None:
    model = net()

    def run(rate: float) -> None:
        with pytest.raises(lw.errors.NumericalError, match=r"IVON: the loss went from .* Lower learning_rate"):
            fitted(model, "regression", Y, learning_rate=rate)

    for rate in (100.0, 1e200):
        problems.unchanged(model, lambda rate=rate: run(rate))


def test_priors_that_it_does_not_take() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"a g-prior follows the curvature"):
        fitted(prior=lw.priors.g_prior())
    several = lw.priors.diagonal(torch.linspace(1, 2, sum(p.numel() for p in net().parameters())))
    with pytest.raises(lw.errors.UnsupportedError, match="has several precisions in one parameter; expected one"):
        fitted(prior=several)
    posterior = fitted()
    for call in (posterior.log_evidence, lambda: posterior.with_prior(1.0)):
        with pytest.raises(lw.errors.UnsupportedError, match="IVON has no"):
            call()
