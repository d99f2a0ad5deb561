"""Grid, Integrate and Budget: scores on held-out data, and mixtures over hyperparameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.curvature.base import PerOutputCurvature
from lapwing.curvature.dense import FullCurvature
from lapwing.data.batches import Data
from lapwing.posteriors.mixture import MixturePosterior
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors import GPrior
from lapwing.tuners import grid as held_out
from lapwing.tuners.grid import PRECISIONS, TEMPERATURES, held_out_scores, nll
from lapwing.tuners.mixing import (
    MAX_PRECISIONS,
    RARE,
    budget_weights,
    fit_tails,
    grid_of,
    mixture_weights,
    thin,
)
from lapwing.tuners.mixing import TEMPERATURES as INTEGRATE_TEMPERATURES
from tests import problems
from tests.tolerances import SOLVED, assert_close
from tests.unit.tuners.settings import (
    HELD,
    LIKELIHOODS,
    METHODS,
    MLP,
    VALUES,
    D,
    brute_force,
    log_densities,
    log_scores,
    results_of,
    setting,
    split,
    with_temperature,
)

# Grids: the same as trying every precision by hand.


@pytest.mark.parametrize("method", METHODS)
def test_grid_by_the_evidence_is_brute_force(method: str) -> None:
    fitted, _ = setting(method=METHODS[method])
    tuned = fitted.tuned(lw.tuners.Grid(precisions=VALUES))
    evidences = torch.stack([fitted.with_prior(v).log_evidence() for v in VALUES])
    assert float(tuned.prior.values) == VALUES[int(evidences.argmax())]
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), evidences)
    assert [step.precisions for step in tuned.trace.steps] == [pytest.approx((v,)) for v in VALUES]
    assert (tuned.trace.tuner, tuned.trace.score) == ("Grid", "log evidence")


@pytest.mark.parametrize(
    ("kind", "method"),
    [*(("regression", m) for m in METHODS), *((kind, "kron") for kind in LIKELIHOODS if kind != "regression")],
)
def test_grid_by_held_out_data_is_brute_force(kind: str, method: str) -> None:
    fitted, held = setting(kind, METHODS[method])
    tuned = fitted.tuned(lw.tuners.Grid(held, VALUES))
    expected = brute_force(fitted, held)
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)
    assert float(tuned.prior.values) == VALUES[int(expected.argmin())]
    assert tuned.trace.score == "held-out metric"
    if kind == "regression":
        new = MLP.batch(3, seed=2)
        same = fitted.with_prior(float(tuned.prior.values))
        assert_close(tuned.predict(new).std, same.predict(new).std)


def test_the_best_value_depends_on_the_data() -> None:
    """The network's own outputs as targets need narrow error bars, other targets wide ones."""
    fitted, _ = setting(prior=1.0)
    x = MLP.batch(7, seed=21)
    f = MLP.build()(x).detach()
    narrow = fitted.tuned(lw.tuners.Grid([(x, f)], VALUES)).prior.values
    wide = fitted.tuned(lw.tuners.Grid([(x, f + 4)], VALUES)).prior.values
    assert float(narrow) == VALUES[-1]
    assert float(wide) < 1.0


def test_groups_keep_their_ratios() -> None:
    fitted, held = setting(prior=lw.per_layer(torch.tensor([0.25, 2.0, 16.0], dtype=D)))
    tuned = fitted.tuned(lw.tuners.Grid(held, VALUES))
    ratios = torch.tensor([1 / 8, 1.0, 8.0], dtype=D)  # about a geometric mean of two
    expected = torch.stack([
        -log_densities(fitted.with_prior(lw.per_layer(v * ratios)), held).mean() for v in VALUES
    ])  # fmt: skip
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)
    assert_close(tuned.prior.values, VALUES[int(expected.argmin())] * ratios)


@pytest.mark.parametrize("prior", [lw.priors.g_prior(2.0), lw.isotropic(1.0, 0.4)], ids=["g", "about a mean"])
def test_grid_of_other_priors(prior: Any) -> None:
    fitted, held = setting(method=lw.Kron(), prior=prior)
    again = lw.priors.g_prior if isinstance(prior, GPrior) else lambda v: lw.isotropic(v, 0.4)
    for data, score in ((held, 1), ("evidence", -1)):
        tuned = fitted.tuned(lw.tuners.Grid(data, VALUES))
        tried = [fitted.with_prior(again(v)) for v in VALUES]
        expected = torch.stack([-log_densities(t, held).mean() if data is held else t.log_evidence() for t in tried])
        assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)
        assert float(tuned.prior.values) == VALUES[int((score * expected).argmin())]


def test_grid_by_a_metric_of_the_user() -> None:
    """The score is the weighted mean over batches; here interval width plus a penalty for missed targets."""
    fitted, held = setting()

    def metric(predictive: Any, y: Tensor) -> float:
        low, high = predictive.interval(0.9)
        return float((high - low + 20 * ((y < low) | (y > high))).mean())

    tuned = fitted.tuned(lw.tuners.Grid(held, VALUES, metric))
    expected = []
    for value in VALUES:
        tried = fitted.with_prior(value)
        expected.append(sum(len(y) * metric(tried.predict(x), y) for x, y in held) / sum(HELD))
    assert [step.score for step in tuned.trace.steps] == pytest.approx(expected, rel=1e-10)
    assert float(tuned.prior.values) == VALUES[expected.index(min(expected))]
    nll = fitted.tuned(lw.tuners.Grid(held, VALUES))
    assert [s.score for s in nll.trace.steps] != pytest.approx(expected, rel=1e-3)


def test_ignored_data_do_not_count() -> None:
    case, likelihood, targets = LIKELIHOODS["tokens"]
    train, held = split(case, targets)
    masked = [(x, y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.4, -100))
              for x, y in held]  # fmt: skip
    masked.append((case.batch(2, seed=3), torch.full((2, 4), -100)))  # a batch that does not count at all
    fitted = lw.fit(case.build(), train, likelihood, method=lw.Kron(), prior=1.0)
    tuned = fitted.tuned(lw.tuners.Grid(masked, VALUES))
    expected = []
    for value in VALUES:
        tried, total = fitted.with_prior(value), []
        for x, y in masked:
            logs = tried.predict(x).log_probs.gather(-1, y.clamp_min(0)[..., None])[..., 0]
            total.append(logs[y != -100])
        expected.append(-torch.cat(total).mean())
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), torch.stack(expected))
    with pytest.raises(lw.errors.DataError, match="no held-out datum counts: every target is ignored"):
        fitted.tuned(lw.tuners.Grid(masked[-1:], VALUES))


def test_labels_of_which_some_are_unknown_are_refused() -> None:
    """Without the error the log density would use the label -1 as a number."""
    x = MLP.batch(6)
    y = torch.tensor([[0, 1, -1]]).expand(6, 3)
    fitted = lw.fit(MLP.build(), [(x, y)], lw.Bernoulli(ignore_index=-1), prior=1.0)
    with pytest.raises(lw.errors.DataError, match="some held-out labels are ignored ones"):
        fitted.tuned(lw.tuners.Grid([(x, y)], VALUES))


def test_the_evidence_of_a_grid_keeps_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a noise for each output every candidate computes its own curvature, which must be freed."""
    fitted, _ = setting("noise for each output")
    alive, seen = results_of(PerOutputCurvature, "at", monkeypatch), []
    plain = WeightPosterior.log_evidence

    def counting(self: WeightPosterior) -> Tensor:
        evidence = plain(self)
        seen.append(len(alive))
        return evidence

    monkeypatch.setattr(WeightPosterior, "log_evidence", counting)
    fitted.tuned(lw.tuners.Grid(precisions=VALUES))
    assert max(seen) == 1


def test_a_best_value_inside_is_not_reported() -> None:
    fitted, _ = setting()
    evidences = [float(fitted.with_prior(v).log_evidence()) for v in VALUES]
    best = evidences.index(max(evidences))
    assert 0 < best < len(VALUES) - 1
    assert fitted.tuned(lw.tuners.Grid(precisions=VALUES)).trace.findings == ()
    assert fitted.tuned(lw.tuners.Grid(precisions=VALUES[best:])).trace.findings == (
        "the best value is at the edge of those tried: try further out",
    )
    assert fitted.tuned(lw.tuners.Grid(precisions=VALUES[best : best + 2])).trace.findings == ()  # two are all edge


def test_the_default_values_cover_what_is_needed() -> None:
    assert len(PRECISIONS) == 21
    assert (min(PRECISIONS), max(PRECISIONS)) == pytest.approx((1e-4, 1e6))
    assert (min(TEMPERATURES), max(TEMPERATURES)) == pytest.approx((1e-3, 1e2))
    fitted, held = setting()
    assert float(fitted.tuned(lw.tuners.Grid(held)).prior.values) in PRECISIONS


# Integration over hyperparameters by validation data.


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
    net, training, validation = problem(kind)
    posterior = lw.fit(net, training, kind, prior=1.0).posterior
    grid = grid_of(posterior, (0.1, 1.0, 10.0), INTEGRATE_TEMPERATURES)
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
    grid = grid_of(lw.fit(net, training, kind, prior=1.0).posterior, None, INTEGRATE_TEMPERATURES)
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


# The budget mixture: harmless by construction; Student tails from residuals.


def classifier() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double().eval()
    x = torch.randn(80, 2, dtype=D)
    return net, (x, net(x).detach().argmax(-1))


def test_weights_spend_the_budget() -> None:
    plain = torch.full((50,), -0.1, dtype=D)
    scores = torch.stack([plain - 1.0, plain - 0.1, plain, plain], 1)
    weights = budget_weights(scores, 0.005)
    lost = torch.tensor([1 - math.exp(-1.0), 1 - math.exp(-0.1)], dtype=D)
    scale = 0.95 / float((0.005 / 3 / lost).sum() + 1)  # the harmless cell would have all the weight
    assert_close(weights[:2], 0.005 / 3 / lost * scale)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert float(weights[-1]) == pytest.approx(0.05)


def test_one_surprising_datum_hands_no_weight_to_a_harmful_cell() -> None:
    plain = torch.full((100,), -0.01, dtype=D)
    harmful = torch.full((100,), -1.0, dtype=D)
    plain[0], harmful[0] = -20.0, -2.0  # the harmful cell is 1e8 times as likely there
    weights = budget_weights(torch.stack([harmful, plain], 1), 0.005)
    assert float(weights[0]) < 0.02


@pytest.mark.parametrize("budget", [0.001, 0.005, 0.05])
def test_the_training_likelihood_loses_no_more_than_the_budget(budget: float) -> None:
    net, data = classifier()
    guarded = lw.fit(net, data, "classification", prior=0.01).tuned(lw.tuners.Budget(data, budget=budget))
    plain = lw.fit(net, data, "classification", method=lw.baselines.MapOnly())
    p, q = (posterior.predict(data[0]).log_prob(data[1]).exp() for posterior in (guarded, plain))
    assert float((1 - p / q).clamp_min(0).mean()) <= budget * 1.001
    assert any("validation" in finding for finding in guarded.trace.findings)


@pytest.mark.parametrize(("degrees", "expected"), [(None, math.inf), (3.0, 4.0)])
def test_tails_are_those_of_the_residuals(degrees: float | None, expected: float) -> None:
    z = torch.randn(2000, dtype=D) if degrees is None else torch.distributions.StudentT(degrees).sample((2000,)).to(D)
    residuals = z / z.square().mean().sqrt()
    found, scale = fit_tails([(residuals, None)])
    assert found == expected
    assert (scale == 1.0) is (expected == math.inf)
    assert fit_tails((part, None) for part in residuals.split(300)) == (found, scale)  # however they are cut


def test_regression_averages_the_posteriors_with_the_same_tails() -> None:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double().eval()
    x = torch.randn(60, 2, dtype=D)
    data = (x, net(x).detach() + 0.2 * torch.distributions.StudentT(3.0).sample((60, 1)).to(D))
    kron, full = (lw.fit(net, data, "regression", method=method, prior=1.0) for method in (lw.Kron(), lw.Full()))
    mixed = kron.tuned(lw.tuners.Budget(data, others=[full.posterior], scales=[0.25]))
    tails = mixed.posterior.cells[0].likelihood
    plain, near, far = (posterior.functions(x) for posterior in (kron, kron, full))
    each = [tails.predict(belief) for belief in (plain.widened(0.0), near, far.widened(0.25))]
    shares = torch.tensor([0.5, 0.25, 0.25], dtype=D).log()[:, None, None]
    expected = torch.logsumexp(torch.stack([p.log_prob(data[1]).reshape(60, 1) for p in each]) + shares, 0)
    assert_close(mixed.predict(x).log_prob(data[1]).reshape(60, 1), expected)


def test_given_noise_keeps_its_normal_distribution() -> None:
    net = nn.Linear(2, 1).double().eval()
    x = torch.randn(40, 2, dtype=D)
    data = (x, x[:, :1])
    posterior = lw.fit(net, data, lw.Gaussian(noise_std=0.5), prior=1.0)
    mixed = posterior.tuned(lw.tuners.Budget(data))
    assert_close(mixed.predict(x).variance, 0.25 + 0.5 * posterior.functions(x).variance)


def test_without_data_it_is_refused() -> None:
    net, data = classifier()
    with pytest.raises(lw.errors.UnsupportedError, match="training data"):
        lw.fit(net, data, "classification", prior=1.0).tuned(lw.tuners.Budget())


def test_ignored_classes_are_left_out() -> None:
    """The default of ``fit`` scores the training data, whose ignored targets may be anything."""
    net, (x, y) = classifier()
    masked = y.clone()
    masked[::3] = -100
    known = masked >= 0
    guarded = lambda data: lw.fit(net, data, "classification", method=lw.Full(), prior=1.0).tuned(
        lw.tuners.Budget(data)
    )
    assert_close(guarded((x, masked)).predict(x).probs, guarded((x[known], y[known])).predict(x).probs)
    assert bool(torch.isfinite(lw.fit(net, (x, masked), "classification").predict(x).probs).all())


@pytest.mark.parametrize("validated", [False, True])
def test_labels_that_are_known_count_where_others_are_ignored(validated: bool) -> None:
    net, (x, _) = classifier()
    y = (net(x).detach() > 0).to(D)
    y[torch.arange(80), torch.arange(80) % 3] = -1  # one label of each datum is unknown
    likelihood = lw.Bernoulli(ignore_index=-1)
    options: dict[str, Any] = {"validation": (x[40:], y[40:])} if validated else {}
    posterior = lw.fit(net, (x[:40], y[:40]), likelihood, **options)
    assert bool(torch.isfinite(posterior.predict(x).probs).all())
    if validated:
        assert posterior.trace is not None
        known = y[40:] >= 0
        loss = nn.functional.binary_cross_entropy_with_logits(net(x[40:]).detach()[known], y[40:][known])
        assert posterior.trace.scores["plain network"] == pytest.approx(2 * float(loss), rel=1e-6)


# Cells of a mixture and their weights.


def test_thinning_drops_precisions_and_gives_the_plain_network_no_weight() -> None:
    """Few data leave many precisions plausible; those that are kept stand for all of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(60, 1, generator=generator)
    posterior = lw.fit(nn.Linear(3, 1), (x[:40], y[:40]), "regression", prior=1.0, progress=False).posterior
    grid = grid_of(posterior, None, INTEGRATE_TEMPERATURES)
    scores = log_scores(grid, Data((x[40:], y[40:]), torch.device("cpu")))
    few = thin(grid, scores)
    before, after = (mixture_weights(each.log_prior, scores) for each in (grid, few))
    number = torch.tensor([cell.belief for cell in grid.cells])
    shares = lambda weights: torch.zeros(len(grid.beliefs)).double().index_add(0, number, weights * (grid.scales > 0))
    count = lambda weights: int((shares(weights) >= RARE).sum())
    assert count(after) <= MAX_PRECISIONS < count(before)
    plain = grid.scales == 0
    assert float(after[plain].sum()) == pytest.approx(float(before[plain].sum()))
    assert torch.allclose(after[plain], before[plain])


def test_scores_in_parts_are_the_same_scores() -> None:
    """The covariances of all members at all data would not fit."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 3, generator=generator), torch.randint(0, 3, (9,), generator=generator)
    posterior = lw.fit(nn.Linear(3, 3).double(), (x.double(), y), "classification", prior=1.0).posterior
    grid, data = grid_of(posterior, None, INTEGRATE_TEMPERATURES), Data((x.double(), y), torch.device("cpu"))
    whole = log_scores(grid, data)
    with lw.memory.limited(1):
        assert_close(log_scores(grid, data), whole, SOLVED)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_limit_of_tokens_runs_no_more_samples_than_it_needs(ignored: bool) -> None:
    """Samples have five tokens. Where the first sample and a token of the others are ignored, 13 take five samples."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 5, 2, generator=generator).double(), torch.randint(0, 3, (9, 5), generator=generator)
    if ignored:
        y[:, 1] = y[0] = -100
    model = nn.Linear(2, 3).double()
    posterior = lw.fit(model, [(x, y)], "classification", prior=1.0).posterior
    grid, data = (
        grid_of(posterior, None, INTEGRATE_TEMPERATURES),
        Data([(x[:7], y[:7]), (x[7:], y[7:])], torch.device("cpu")),
    )
    counts: list[int] = []
    posterior.problem.network.replica.register_forward_pre_hook(lambda _, args: counts.append(len(args[0])))
    scores = log_scores(grid, data, 13)
    assert max(counts) == (5 if ignored else 3)
    assert_close(scores, log_scores(grid, data)[:13])
    assert max(counts) == 9


# Temperature: the same as trying every value by hand.


@pytest.mark.parametrize("name", [name for name in LIKELIHOODS if name != "counts"])
def test_temperature_is_brute_force(name: str) -> None:
    fitted, held = setting(name, lw.Kron())
    tuned = fitted.tuned(lw.tuners.Temperature(held, VALUES))
    expected = torch.stack([-log_densities(with_temperature(fitted, t), held).mean() for t in VALUES])
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), expected)
    best = VALUES[int(expected.argmin())]
    assert_close(tuned.likelihood.dispersion, fitted.likelihood.dispersion * best)
    assert tuned.trace.findings[0] == f"temperature {best:.3g}"
    assert torch.equal(tuned.prior.values, fitted.prior.values)
    if name == "noise for each output":
        assert_close(tuned.likelihood.noise_variance, fitted.likelihood.noise_variance * best)


def test_temperatures_are_multiples_of_the_present_one() -> None:
    fitted, held = setting("classification")
    once = fitted.tuned(lw.tuners.Temperature(held, (0.5,)))
    twice = once.tuned(lw.tuners.Temperature(held, (0.5,)))
    assert float(twice.likelihood.dispersion) == 0.25


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(lw.Poisson(), 3), (lw.HeteroscedasticGaussian(), 2)],
    ids=["Poisson", "Heteroscedastic"],
)
def test_no_temperature_to_choose(likelihood: Any, outputs: int) -> None:
    model, x = nn.Linear(4, outputs).double(), MLP.batch(6)
    y = torch.randint(0, 4, (6, outputs if outputs == 3 else 1)).double()
    fitted = lw.fit(model, [(x, y)], likelihood, prior=1.0)
    with pytest.raises(
        lw.errors.UnsupportedError, match=f"{type(likelihood).__name__} has no temperature to choose: .*no disp"
    ):
        fitted.tuned(lw.tuners.Temperature([(x, y)]))
    assert math.isfinite(fitted.tuned(lw.tuners.Grid([(x, y)])).trace.steps[0].score)


# Cross-validation: the same as scoring every fold by hand.


@pytest.mark.parametrize(
    ("name", "folds"), [("regression", 2), ("classification", 3), ("regression", 7), ("classification", 11)]
)
def test_cross_validation_is_brute_force(name: str, folds: int) -> None:
    """Datum i is in fold i mod folds, across batches; more folds than data leave a fold for each datum."""
    fitted, held = setting(name)
    tuned = fitted.tuned(lw.tuners.CrossValidated(held, VALUES, folds=folds))
    each = torch.stack([-log_densities(fitted.with_prior(v), held) for v in VALUES], 1)  # (data, values)
    scores = torch.stack([each[k::folds].mean(0) for k in range(min(folds, len(each)))])
    means = scores.mean(0)
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), means)
    best = int(means.argmin())
    assert float(tuned.prior.values) == VALUES[best]
    error = float(scores.std(0)[best]) / math.sqrt(len(scores))
    assert tuned.trace.findings[0] == (
        f"precision {VALUES[best]:.3g} has the best mean, {float(means[best]):.4g} ± {error:.2g} "
        f"over {len(scores)} folds"
    )
    assert (tuned.trace.tuner, tuned.trace.score) == ("CrossValidated", "mean held-out metric")


def test_one_datum_makes_no_folds() -> None:
    fitted, held = setting()
    with pytest.raises(lw.errors.DataError, match="the held-out data give 1 fold; expected at least 2 data"):
        fitted.tuned(lw.tuners.CrossValidated([(held[0][0][:1], held[0][1][:1])], VALUES))


# Scores on held-out data: one pass for all candidates, memory, folds, and what is refused.


class Counted(nn.Module):
    """A network that records the number of inputs of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP.build()
        calls: list[int] = []  # not reached through self, which is a copy in a run
        self.calls = calls
        self.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("method", ["full", "kron", "low_rank"])
def test_the_network_runs_once_for_all_values(method: str) -> None:
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    model = Counted().double().eval()
    fitted = lw.fit(model, train, "classification", method=METHODS[method], prior=1.0)
    tuners = [
        lw.tuners.Grid(held, VALUES),
        lw.tuners.Grid(held, VALUES * 5),
        lw.tuners.CrossValidated(held, VALUES, folds=3),
    ]
    for tuner in (*tuners, lw.tuners.Temperature(held, VALUES)):
        model.calls.clear()
        fitted.tuned(tuner)
        assert model.calls == list(HELD)
    model.calls.clear()
    fitted.tuned(lw.tuners.Grid(precisions=VALUES))
    assert model.calls == []


def test_many_classes_are_differentiated_once_for_all_cells() -> None:
    """Above 32 outputs, predictions put covariances off until they are asked for; scores need them of every cell."""
    x, labels, calls = torch.linspace(-1, 1, 80).reshape(40, 2), torch.arange(40), []
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 40)).eval()
    fitted = lw.fit(net, [(x, labels)], "classification", prior=1.0)
    net.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    held = [(x[:10], labels[:10])]
    fitted.tuned(lw.tuners.Integrate(held, ratios=(0.1, 1.0, 10.0), temperatures=(1.0, 2.0), offsets=()))
    assert sum(calls) == 10


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_candidates_that_do_not_fit_at_once_come_in_groups(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two factorisations of 83 weights fit in memory, three do not: seven values take four passes; scores are equal."""
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    model = Counted().double().eval()
    fitted = lw.fit(model, train, "classification", method=lw.Full(), prior=1.0)
    expected = fitted.tuned(make(held, VALUES)).trace
    alive, seen = results_of(FullCurvature, "precision", monkeypatch), []

    def metric(predictive: Any, y: Tensor) -> Tensor:
        seen.append(len(alive))
        return nll(predictive, y)

    monkeypatch.setattr(held_out, "temporary_bytes", lambda device: 8 * 83**2 * 5 // 4)
    model.calls.clear()
    tuned = fitted.tuned(make(held, VALUES, metric))
    assert tuned.trace.steps == expected.steps
    assert model.calls == list(HELD) * 4
    assert max(seen) == 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.Temperature])
def test_one_candidate_is_tried_whatever_it_takes(make: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, held = setting(method=METHODS[method])
    expected = fitted.tuned(make(held, VALUES)).trace
    monkeypatch.setattr(held_out, "temporary_bytes", lambda device: 0)
    assert fitted.tuned(make(held, VALUES)).trace.steps == expected.steps


def test_groups_need_data_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, held = setting()
    x, y = torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])
    loader = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(0))
    one = fitted.tuned(lw.tuners.Grid(loader, VALUES)).trace
    fitted.tuned(lw.tuners.CrossValidated(loader, VALUES, folds=3))
    monkeypatch.setattr(held_out, "temporary_bytes", lambda device: 0)
    trace = fitted.tuned(lw.tuners.Grid(loader, VALUES)).trace  # one fold does not mind the order
    assert [step.score for step in trace.steps] == pytest.approx([step.score for step in one.steps], rel=1e-10)
    with pytest.raises(lw.errors.DataError, match="a second pass over the held-out data gave other folds"):
        fitted.tuned(lw.tuners.CrossValidated(loader, VALUES, folds=3))


def test_the_model_is_left_as_it_was() -> None:
    train, held = split(MLP, LIKELIHOODS["classification"][2])
    model = MLP.build()
    fitted = lw.fit(model, train, "classification", method=lw.Kron(), prior=1.0)
    for tuner in (lw.tuners.Grid(held), lw.tuners.CrossValidated(held), lw.tuners.Temperature(held)):
        problems.unchanged(model, lambda t=tuner: fitted.tuned(t))
    assert float(fitted.prior.values) == 1.0


def test_scores_of_folds() -> None:
    fitted, held = setting()
    candidates = [fitted.with_prior(v).posterior for v in VALUES[:2]]
    whole = held_out_scores(candidates, held, lambda p, y: -p.log_prob(y).mean())
    parts = held_out_scores(candidates, held, lambda p, y: -p.log_prob(y).mean(), folds=7)
    assert whole.shape == (1, 2)
    assert parts.shape == (7, 2)
    assert_close(parts.mean(0), whole[0])


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_a_best_value_at_the_edge_is_reported(make: Any) -> None:
    fitted, _ = setting()
    x = MLP.batch(7, seed=21)
    f = MLP.build()(x).detach()
    sure = fitted.tuned(
        make([(x, f + 1e-3)], (1e-2, 1.0, 1e2) if make is not lw.tuners.Temperature else (1e2, 1.0, 1e-2))
    )
    assert sure.trace.findings[-1] == "the best value is at the edge of those tried: try further out"
    assert "edge" in str(sure.trace)


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_a_network_without_spread_has_nothing_to_change(make: Any) -> None:
    fitted, held = setting(method=lw.baselines.MapOnly())
    with pytest.raises(lw.errors.UnsupportedError, match="PointPosterior has no precision to change; use Kron or Full"):
        fitted.tuned(make(held))
    with pytest.raises(lw.errors.UnsupportedError, match="PointPosterior has no precision to change"):
        fitted.tuned(lw.tuners.Grid())


@pytest.mark.parametrize("make", [lw.tuners.Grid, lw.tuners.CrossValidated, lw.tuners.Temperature])
def test_held_out_data_that_do_not_fit_are_refused(make: Any) -> None:
    fitted, held = setting()
    x, y = held[1]
    for data, message in (
        ([(x, y[:3])], "4 inputs with 3 targets; expected one target for each"),
        ([(x, y[:, :2])], r"targets have the shape \(4, 2\)"), ([(x, y * math.nan)], "NaN"), ([], "data is empty"),
    ):  # fmt: skip
        with pytest.raises(lw.errors.DataError, match=message):
            fitted.tuned(make(data, VALUES))
