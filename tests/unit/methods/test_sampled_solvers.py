"""Sampled with each of its solvers: the same noise gives the same samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.linalg.operators import forward_product, located_parts
from lapwing.linalg.stochastic import Perturbed
from lapwing.methods.sampled import Sampled
from lapwing.networks.network import Network
from lapwing.tangent import NetworkDesign
from tests.tolerances import SOLVED, assert_close

D = torch.float64
CPU = torch.device("cpu")
PRIORS = {"isotropic": lambda: lw.isotropic(9.0), "g": lambda: lw.priors.g_prior(2.0)}


def problem(seed: int = 0) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A network and eleven data in batches of five, five and one."""
    torch.manual_seed(seed)
    x = torch.randn(11, 3, dtype=D)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    return net, list(zip(x.split(5), y.split(5), strict=True))


def fitted(method: Any, prior: Any) -> Any:
    net, data = problem()
    return lw.fit(net, data, lw.Gaussian(noise_std=0.5), method=method, prior=prior, tuner=None, progress=False)


def samples(method: Any, prior: Any) -> torch.Tensor:
    return fitted(method, prior).posterior.samples


@pytest.mark.parametrize("kind", PRIORS)
@pytest.mark.parametrize(
    "settings",
    [
        {"solver": "cg", "tolerance": 1e-9},
        {"solver": "sdd", "batch": 6, "epochs": 400, "tolerance": 1e-9},
        {"solver": "sgd", "batch": 11, "epochs": 400, "tolerance": 1e-9},
        {"solver": "sgd", "batch": 11, "epochs": 400, "tolerance": 1e-9, "objective": "classic"},
    ],
    ids=lambda s: "-".join(str(v) for v in s.values()),
)
def test_every_solver_gives_the_same_samples(settings: dict[str, Any], kind: str) -> None:
    expected = samples(Sampled(num_samples=3, tolerance=1e-12), PRIORS[kind]())
    assert_close(samples(Sampled(num_samples=3, **settings), PRIORS[kind]()), expected, SOLVED)


@pytest.mark.parametrize("part", [1, 4, None])
def test_both_objectives_of_a_network_have_the_same_gradient(part: int | None) -> None:
    """To 1e-12, over all data, in parts of whatever size; away from the solution."""
    net, data = problem()
    network = Network.build(net, data[0][0])
    design = NetworkDesign.build(network, lw.Gaussian(noise_std=0.5), Data(data, CPU), part=part)
    zeta, eps, z = (torch.randn(3, n, dtype=D) for n in (design.size, design.rows, design.size))
    gradients, parts = [], list(located_parts(design))
    for name in ("reduced", "classic"):
        objective = Perturbed(design, zeta, eps, 0.7).objective(name)
        gradients.append(torch.stack([objective.estimate(z, *part, len(parts)) for part in parts]).mean(0))
    one, other = gradients
    assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max())
    assert float(other.norm()) > 1


@pytest.mark.parametrize("objective", ["reduced", "classic"])
def test_stochastic_gradients_come_near(objective: str) -> None:
    expected = samples(Sampled(num_samples=3, tolerance=1e-12), lw.isotropic(3.0))
    method = Sampled(num_samples=3, solver="sgd", objective=objective, batch=4, epochs=200, tolerance=5e-2)
    assert float((samples(method, lw.isotropic(3.0)) - expected).norm()) < 0.05 * float(expected.norm())


@pytest.mark.parametrize("solver", ["sgd", "sdd"])
def test_another_precision_moves_the_same_samples(solver: str) -> None:
    """Nearer and nearer to the first ones, as the precision comes near."""
    posterior = fitted(Sampled(num_samples=3, solver=solver, batch=6, epochs=100, tolerance=0.2), lw.isotropic(3.0))
    first = posterior.posterior.samples
    gaps = []
    for precision in (3.3, 3.03, 3.0):
        prior = posterior.posterior.problem.prior.with_precision(torch.tensor(precision, dtype=D))
        other = posterior.posterior.with_problem(posterior.posterior.problem.with_prior(prior))
        gaps.append(float((other.samples - first).norm()) / float(first.norm()))
    assert gaps[0] < 0.1
    assert gaps[1] < 0.2 * gaps[0]
    assert gaps[2] == 0


@pytest.mark.parametrize("solver", ["sgd", "sdd"])
def test_a_residual_above_the_tolerance_is_an_error(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.linalg.ridge.LEADING", 1)
    posterior = fitted(Sampled(num_samples=3, solver=solver, epochs=2, tolerance=1e-9, batch=4), lw.isotropic(3.0))
    with pytest.raises(NumericalError, match=rf"Sampled\(solver='{solver}'\) stopped after 6 .* Raise epochs="):
        _ = posterior.posterior.samples


@pytest.mark.parametrize("solver", ["sgd", "sdd"])
def test_priors_by_groups_are_refused(solver: str) -> None:
    method = Sampled(num_samples=3, solver=solver)
    with pytest.raises(UnsupportedError, match=f"'{solver}' with the prior PerLayer.*'krylov' or 'cg'"):
        fitted(method, lw.per_layer(2.0))
    posterior = fitted(method, lw.isotropic(3.0)).posterior
    grouped = fitted(Sampled(num_samples=3), lw.per_layer(2.0)).posterior.problem.prior
    with pytest.raises(UnsupportedError, match="'krylov' or 'cg'"):
        _ = posterior.with_problem(posterior.problem.with_prior(grouped)).samples


def test_data_noise_is_kept_only_where_it_is_needed() -> None:
    for solver in ("krylov", "cg"):
        assert fitted(Sampled(num_samples=3, solver=solver), lw.isotropic(3.0)).posterior.solver.ridge.eps is None
    assert fitted(Sampled(num_samples=3, solver="sdd"), lw.isotropic(3.0)).posterior.solver.ridge.eps.shape == (3, 22)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "adam"}, "solver is 'adam'; expected one of krylov, cg, sgd, sdd"),
        ({"objective": "plain"}, "objective is 'plain'; expected one of reduced, classic"),
        ({"batch": 0}, "batch is 0; expected at least 1"),
        ({"epochs": 0}, "epochs is 0; expected at least 1"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Sampled(**settings)


@pytest.mark.parametrize("cache", [None, 0], ids=["held", "streamed"])
@pytest.mark.parametrize("part", [1, 2, 3, 100])
def test_a_design_in_parts_is_the_same_design(part: int, cache: int | None) -> None:
    net, data = problem()
    network = Network.build(net, data[0][0])
    whole = NetworkDesign.build(network, lw.Gaussian(noise_std=0.5), Data(data, CPU))
    parts = NetworkDesign.build(network, lw.Gaussian(noise_std=0.5), Data(data, CPU), cache=cache, part=part)
    assert parts.streamed == (cache == 0)
    sizes = [each.rows for each in parts]
    assert sum(sizes) == parts.rows == whole.rows == 22
    assert max(sizes) <= 2 * part  # of two outputs
    assert len(sizes) == -(-11 // min(part, 11))
    assert sizes == [each.rows for each in parts]
    v = torch.randn(2, parts.size, dtype=D)
    assert_close(forward_product(parts, v), forward_product(whole, v))
    assert parts.statistics.data == whole.statistics.data
    assert parts.statistics.loss == pytest.approx(whole.statistics.loss)


@pytest.mark.parametrize("solver", ["sgd", "sdd"])
def test_streamed_parts_will_do(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = samples(Sampled(num_samples=3, tolerance=1e-12), lw.isotropic(3.0))
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    method = Sampled(num_samples=3, solver=solver, batch=6, epochs=60, tolerance=0.2)
    posterior = fitted(method, lw.isotropic(3.0)).posterior
    assert posterior.solver.ridge.design.streamed
    assert float((posterior.samples - expected).norm()) < 0.2 * float(expected.norm())


@pytest.fixture(scope="module", params=[torch.float32, D], ids=str)
def trained(request: Any) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A trained network of 31 weights and 60 rows, whose curvature is 1e5 times the prior precision and more."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 60, dtype=request.param)[:, None]
    y = (2 * x).sin() + 0.1 * torch.randn(60, 1, dtype=request.param)
    net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).to(request.param)
    optimiser = torch.optim.LBFGS(net.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = nn.functional.mse_loss(net(x), y) + 1e-4 * sum(p.square().sum() for p in net.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    return net.eval(), x, y


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("solver", ["sgd", "sdd"])
def test_default_settings_converge(
    solver: str, task: str, trained: tuple[nn.Module, torch.Tensor, torch.Tensor]
) -> None:
    """Learned and weak priors; the samples are those of a solve to full precision, within their stated error."""
    net, x, y = trained
    if task == "classification":
        net, y = nn.Sequential(net, nn.Linear(1, 3).to(x)).eval(), (3 * x[:, 0].sigmoid()).long()
    learned = lw.fit(net, [(x, y)], task, method=Sampled(solver=solver))
    assert bool(learned.functions(x).variance.isfinite().all())
    for precision in (1e-2, 1.0):
        one = lw.fit(net, [(x, y)], task, method=Sampled(solver=solver), prior=precision).posterior
        assert one.solution.converged
        if x.dtype != D:  # a reference to full precision needs float64
            continue
        other = lw.fit(net, [(x, y)], task, method=Sampled(tolerance=1e-4), prior=precision).posterior
        gap = one.samples - other.samples
        product = other.solver.ridge.product(gap) / float(one.problem.likelihood.dispersion) + precision * gap
        sizes = one.solver.ridge.prior.norm(dim=1)
        assert bool(((gap * product).sum(1).sqrt() < 0.011 * sizes).all())  # eᵀ Λ e ≤ (tolerance |ζ|)²


def test_variances_by_descent_are_those_of_the_exact_posterior(generator: torch.Generator) -> None:
    """Within the error of 256 draws, for a network with more weights than are solved for directly."""
    x = torch.randn(100, 3, dtype=D, generator=generator)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    net = nn.Sequential(nn.Linear(3, 60), nn.Tanh(), nn.Linear(60, 2)).double().eval()
    methods = lw.Full(), Sampled(num_samples=256, solver="sgd"), Sampled(num_samples=256, solver="sdd")
    likelihood, prior = lw.Gaussian(noise_std=0.1), lw.isotropic(0.1)
    exact, *others = (
        lw.fit(net, [(x, y)], likelihood, method=method, prior=prior).functions(x).variance for method in methods
    )
    for variance in others:
        assert float(((variance / exact - 1) / (2 / 256) ** 0.5).square().mean().sqrt()) < 1.5
