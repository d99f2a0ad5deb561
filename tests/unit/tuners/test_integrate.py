"""Integration over hyperparameters by validation data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.posteriors.mixture import MixturePosterior
from lapwing.tuners.mixing import TEMPERATURES, grid_of
from tests.tolerances import assert_close

D = torch.float64


def problem(kind: str, n: int = 60) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a network, data like training data, and validation data from the same source."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2 if kind != "binary" else 1)).double().eval()
    x = torch.randn(2 * n, 2, dtype=D)
    f = net(x).detach()
    targets = {
        "classification": (f + 0.5 * torch.randn_like(f)).argmax(-1),
        "binary": (f + 0.3 * torch.randn_like(f) > 0).to(D),
        "multilabel": (f + 0.3 * torch.randn_like(f) > 0).to(D),
        "regression": f + 0.3 * torch.randn_like(f),
        "counts": torch.poisson(f.exp()),
        "heteroscedastic": f[:, :1] + 0.3 * torch.randn(2 * n, 1, dtype=D),
    }[kind]
    return net, (x[:n], targets[:n]), (x[n:], targets[n:])


KINDS = ("classification", "binary", "multilabel", "regression", "counts", "heteroscedastic")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_prior_times_likelihood_of_the_validation_data(kind: str) -> None:
    from lapwing.tuners.mixing import log_scores, mixture_weights

    net, training, validation = problem(kind)
    posterior = lw.fit(net, training, kind, prior=1.0).posterior
    grid = grid_of(posterior, (0.1, 1.0, 10.0), TEMPERATURES)
    scores = log_scores(grid, Data(validation, torch.device("cpu")))
    for number in (0, len(grid.cells) // 2, len(grid.cells) - 1):
        cell = grid.cells[number]
        ratio = (0.1, 1.0, 10.0)[cell.belief]
        belief = lw.fit(net, training, kind, prior=ratio).functions(validation[0])
        widened = lw.FunctionGaussian(belief.mean, cell.scale * belief.cov)
        assert_close(scores[:, number], cell.likelihood.predict(widened).log_prob(validation[1]))
    expected = grid.log_prior.exp() * (scores.sum(0) - scores.sum(0).max()).exp()
    assert_close(mixture_weights(grid.log_prior, scores), expected / expected.sum())
    assert float(grid.log_prior.exp().sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_not_worse_than_the_plain_network(kind: str) -> None:
    net, training, validation = problem(kind, 200)
    mixture = lw.fit(net, training, kind, prior=1.0).tuned(lw.tuners.Integrate(validation))
    scores = mixture.trace.scores
    assert scores["mixture"] <= scores["plain network"] + 0.02
    plain = lw.fit(net, training, kind, method=lw.baselines.MapOnly())
    by_hand = -plain.predict(validation[0]).log_prob(validation[1]).mean()
    assert scores["plain network"] == pytest.approx(float(by_hand), rel=1e-6)


def test_temperature_scaling_is_what_a_plain_network_gets() -> None:
    net, training, validation = problem("classification", 400)
    sharp = nn.Sequential(net, Scaled(20.0)).eval()
    posterior = lw.fit(sharp, training, "classification", method=lw.baselines.MapOnly())
    mixture = posterior.tuned(lw.tuners.Integrate(validation))
    before, after = (-p.predict(validation[0]).log_prob(validation[1]).mean() for p in (posterior, mixture))
    assert float(after) < float(before) - 0.05
    temperatures = [cell.likelihood.link_temperature for cell in mixture.posterior.cells]
    assert min(temperatures) > 1


class Scaled(nn.Module):
    """Logits times a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_heavy_tails_are_found() -> None:
    net, training, (x, y) = problem("regression", 400)
    noise = torch.distributions.StudentT(3.0).sample(y.shape).to(D)
    f = net(training[0]).detach()
    residuals = torch.distributions.StudentT(3.0).sample(f.shape).to(D)
    posterior = lw.fit(net, (training[0], f + residuals), "regression", prior=1.0)
    mixture = posterior.tuned(lw.tuners.Integrate((x, net(x).detach() + noise)))
    tails = sum(
        float(weight)
        for weight, cell in zip(mixture.posterior.weights, mixture.posterior.cells, strict=True)
        if cell.likelihood.degrees < 100
    )
    assert tails > 0.9
    scores = mixture.trace.scores
    assert scores["mixture"] < scores["noise refitted"]


def test_a_given_prior_is_kept_where_ratios_are_empty() -> None:
    net, training, validation = problem("classification")
    mixture = lw.fit(net, training, "classification", prior=3.0).tuned(lw.tuners.Integrate(validation, ratios=()))
    assert [belief.precisions for belief in mixture.posterior.beliefs] == [None]
    assert all(cell.scale == 1 for cell in mixture.posterior.cells)


@pytest.mark.parametrize(
    "method",
    [lw.baselines.SWAG(snapshots=3, rank=2, batch_size=16), lw.baselines.MapOnly(), lw.Sampled(4), lw.ELLA(20, 5)],
)
def test_methods_with_and_without_a_precision(method: Any) -> None:
    net, training, validation = problem("classification")
    mixture = lw.fit(net, training, "classification", method=method, prior=1.0).tuned(lw.tuners.Integrate(validation))
    assert isinstance(mixture.posterior, MixturePosterior)
    assert bool(torch.isfinite(mixture.predict(validation[0]).log_prob(validation[1])).all())


def test_a_plain_network_that_is_better_is_said_to_be() -> None:
    net, (x, y), validation = problem("regression", 400)
    wide = lw.fit(net, (x[:3], y[:3]), lw.Gaussian(noise_std=0.3), prior=1e-6)  # three data leave f nearly free
    mixture = wide.tuned(lw.tuners.Integrate(validation, ratios=()))
    assert any("plain network" in finding for finding in mixture.trace.findings)


@pytest.mark.parametrize("settings", [{"ratios": (0.0,)}, {"ratios": (-1.0, 1.0)}, {"temperatures": ()}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=next(iter(settings))):
        lw.tuners.Integrate([], **settings)


def test_empty_validation_data_are_refused() -> None:
    net, training, _ = problem("classification")
    with pytest.raises(lw.errors.DataError, match="empty"):
        lw.fit(net, training, "classification", prior=1.0).tuned(lw.tuners.Integrate([]))


def test_as_the_tuner_of_a_fit_it_varies_the_precision_of_the_evidence() -> None:
    net, training, validation = problem("classification")
    by_tuner = lw.fit(net, training, "classification", tuner=lw.tuners.Integrate(validation))
    by_argument = lw.fit(net, training, "classification", validation=validation)
    evidence = lw.fit(net, training, "classification", tuner=lw.tuners.MaximiseEvidence())
    assert_close(by_tuner.prior.values, evidence.prior.values)
    assert_close(by_tuner.predict(validation[0]).probs, by_argument.predict(validation[0]).probs)


@pytest.mark.parametrize(("kind", "mass"), [("classification", 0.3), ("counts", 0.3), ("regression", 0.5)])
def test_the_plain_network_has_its_share_before_the_data(kind: str, mass: float) -> None:
    net, training, _ = problem(kind)
    grid = grid_of(lw.fit(net, training, kind, prior=1.0).posterior, None, TEMPERATURES)
    plain = torch.tensor([cell.scale == 0 for cell in grid.cells])
    assert float(grid.log_prior.exp()[plain].sum()) == pytest.approx(mass)
    assert float(grid.log_prior.exp().sum()) == pytest.approx(1.0)


class Bumps(nn.Module):
    """The sine and cosine of the input, and a narrow bump at every training input: features that can memorise."""

    def __init__(self, centres: Tensor) -> None:
        super().__init__()
        self.register_buffer("centres", centres)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([(2 * x).sin(), (3 * x).cos(), torch.exp(-(((x - self.centres.T) / 1e-4) ** 2))], 1)


def interpolating(count: int) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a network with the right function and training residuals of 1e-3 of the noise; three parts of the data."""
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(1730, 1, generator=generator, dtype=D) - 2
    y = torch.cat([(2 * x).sin(), (3 * x).cos()], 1)[:, :count]
    y = y + torch.tensor([0.3, 0.9], dtype=D)[:count] * torch.randn(1730, count, generator=generator, dtype=D)
    head = nn.Linear(32, count).to(D)
    net = nn.Sequential(Bumps(x[:30]), head).eval()
    with torch.no_grad():
        head.bias.zero_()
        head.weight.zero_()
        head.weight[:, :2] = torch.eye(2)[:count]
        head.weight[:, 2:] = (y[:30] - net(x[:30])).T * (1 - 1e-3)
    return net, (x[:30], y[:30]), (x[30:230], y[30:230]), (x[230:], y[230:])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "options", [{"weights": "last_layer"}, {"method": lw.baselines.MapOnly()}], ids=["last", "map"]
)
def test_noise_is_found_where_training_residuals_say_nothing(count: int, options: dict[str, Any]) -> None:
    """The training residuals are a millionth of the noise; 1,500 test rows have a standard error of 0.006."""
    net, training, (x, y), test = interpolating(count)
    posterior = lw.fit(net, training, lw.Gaussian(per_output=count > 1), validation=(x, y), **options)
    low, high = posterior.predict(test[0]).interval(0.95)
    covered = ((low <= test[1]) & (test[1] <= high)).double().mean(0)
    assert float((covered - 0.95).abs().max()) < 0.03
    residuals = y - net(x).detach()
    number = torch.arange(len(x)) % 5
    by_hand = torch.empty(len(x), dtype=D)
    for k in range(5):
        variance = residuals[number != k].square().mean(0)
        by_hand[number == k] = torch.distributions.Normal(0.0, variance.sqrt()).log_prob(residuals[number == k]).sum(1)
    scores = posterior.trace.scores
    assert scores["noise refitted"] == pytest.approx(-float(by_hand.mean()), rel=1e-6)
    assert scores["mixture"] < scores["noise refitted"] + 0.02
    assert not any("noise variance" in finding for finding in posterior.findings)


def test_noises_reach_a_decade_around_both_kinds_of_residuals() -> None:
    net, training, (x, y), _ = interpolating(1)
    posterior = lw.fit(net, training, "regression", method=lw.baselines.MapOnly()).posterior
    held_out = (y - net(x)).detach().square().mean(0)
    for size in (1.0, 1e-9, 1e9):
        noises = torch.stack([
            cell.likelihood.dispersion for cell in grid_of(posterior, None, (), size * held_out).cells
        ])  # fmt: skip
        for centre in (float(posterior.problem.likelihood.dispersion), size * float(held_out)):
            around = noises[(noises > 0.05 * centre) & (noises < 20 * centre)].sort().values
            assert float(around[0]) <= 0.1 * centre * (1 + 1e-9)
            assert float(around[-1]) >= 10 * centre * (1 - 1e-9)
            assert float((around[1:] / around[:-1]).max()) < 1.8


def test_the_widest_error_bars_of_the_grid_are_noticed() -> None:
    """The validation targets are far from the network, and a fixed noise leaves only the covariance to explain them."""
    net, training, (x, y), _ = interpolating(1)
    likelihood = lw.Gaussian(noise_std=0.05)
    swag = lw.baselines.SWAG(snapshots=3, rank=2, batch_size=10, learning_rate=1e-4)
    scaled = lw.fit(net, training, likelihood, method=swag, validation=(x, y))
    assert any("the largest scale of the covariance tried, 10," in finding for finding in scaled.findings)
    last = lw.fit(net, training, likelihood, prior=1.0, weights="last_layer")
    mixture = last.tuned(lw.tuners.Integrate((x, y + 3), ratios=(1.0, 10.0, 100.0)))
    assert any("the smallest precision tried, 1," in finding for finding in mixture.trace.findings)


@pytest.mark.parametrize(("factor", "edge"), [(0.2, "smallest"), (200.0, "largest")])
def test_a_temperature_at_the_edge_of_the_grid_is_noticed(factor: float, edge: str) -> None:
    net, training, validation = problem("classification", 400)
    scaled = nn.Sequential(net, Scaled(factor)).eval()
    plain = lw.fit(scaled, training, "classification", method=lw.baselines.MapOnly())
    posterior = plain.tuned(lw.tuners.Integrate(validation, offsets=()))
    assert any(f"the {edge} temperature" in finding for finding in posterior.trace.findings)
