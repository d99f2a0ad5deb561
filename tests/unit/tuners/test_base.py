"""Maximising the evidence, and the verdict against the plain network."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.networks.network import Network
from lapwing.priors import Isotropic
from lapwing.tuners.offsets import WIDTHS, HeldOutputs, learn_offset
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense
from tests.references.evidence import Linearised, adam
from tests.references.linear_regression import regress
from tests.tolerances import assert_close
from tests.unit.tuners.settings import failing

# The evidence: its value, its gradient, its optimum.

D = torch.float64
METHODS: dict[str, Any] = {
    "full": lw.Full(),
    "diagonal": lw.Diagonal(),
    "kron": lw.Kron(),
    "kron_reduce": lw.Kron(sharing="reduce"),
    "ekron": lw.EKron(),
    "low_rank": lw.LowRank(rank=7),
}
PRIORS = ["isotropic", "per_layer", "diagonal"]


def supported(method: str, prior: str) -> bool:
    """Return whether the method supports the prior: a Kronecker block has no separate precision for each weight."""
    return prior != "diagonal" or method in ("full", "diagonal", "low_rank")


@pytest.fixture(params=list(METHODS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def regression(method: Any, prior: Any = None, case: str = "mlp", **likelihood: Any) -> lw.Fitted:
    chosen = BY_NAME[case]
    return lw.fit(
        chosen.build(), problems.number_batches(chosen), lw.Gaussian(**likelihood), method=method, prior=prior
    )


def posterior_at(fitted: lw.Fitted, kind: str, log_precision: Tensor, log_noise: Tensor) -> Any:
    """The posterior under these hyperparameters, with a graph to them."""
    make = {"isotropic": lw.isotropic, "per_layer": lw.per_layer, "diagonal": lw.priors.diagonal}[kind]
    like = torch.empty(0, dtype=D)
    prior = make(log_precision.exp()).bound(fitted.network.selection, like)
    likelihood = fitted.likelihood.with_dispersion(log_noise.exp())
    return fitted.posterior.with_problem(fitted.posterior.problem.with_prior(prior).with_likelihood(likelihood))


@pytest.mark.parametrize(("method", "kind"), [(m, k) for m in METHODS for k in PRIORS if supported(m, k)])
def test_gradient_equals_finite_differences(method: str, kind: str) -> None:
    """In every precision and in the noise."""
    fitted = regression(METHODS[method], prior=1.0)
    size = {"isotropic": (), "per_layer": (3,), "diagonal": (83,)}[kind]
    precision = 0.3 * torch.randn(size, dtype=D)
    noise = torch.tensor(-0.4, dtype=D)
    a, b = precision.clone().requires_grad_(), noise.clone().requires_grad_()
    posterior_at(fitted, kind, a, b).log_evidence().backward()
    by_precision = dense.slope(lambda p: posterior_at(fitted, kind, p, noise).log_evidence(), precision)
    by_noise = dense.slope(lambda n: posterior_at(fitted, kind, precision, n).log_evidence(), noise)
    assert_close(a.grad, by_precision, 0.5)
    assert_close(b.grad, by_noise, 0.5)


@pytest.mark.parametrize("kind", ["isotropic", "per_layer", "diagonal"])
def test_gradient_reaches_a_prior_given_to_fit(kind: str) -> None:
    size = {"isotropic": (), "per_layer": (3,), "diagonal": (83,)}[kind]
    given = (0.5 + torch.rand(size, dtype=D)).requires_grad_()
    make = {"isotropic": lw.isotropic, "per_layer": lw.per_layer, "diagonal": lw.priors.diagonal}[kind]
    fitted = regression(lw.Full(), prior=make(given), noise_std=0.5)
    fitted.log_evidence().backward()
    again = lambda p: fitted.with_prior(make(p)).log_evidence()
    assert_close(given.grad, dense.slope(again, given.detach()), 0.5)


def test_kron_gradient_in_a_prior_by_input() -> None:
    """A weight and its bias under different precisions: whitened, still differentiable."""
    fitted = regression(lw.Kron(), prior=1.0)
    names = fitted.network.selection.names
    log_precision = torch.linspace(-1, 1, len(names), dtype=D)
    sizes = torch.tensor(fitted.network.selection.sizes)
    of = lambda p: fitted.with_prior(lw.priors.diagonal(p.exp().repeat_interleave(sizes))).log_evidence()
    leaf = log_precision.clone().requires_grad_()
    of(leaf).backward()
    assert_close(leaf.grad, dense.slope(of, log_precision), 0.5)


def test_value_is_the_laplace_evidence(name: str) -> None:
    """log p(D | w̃) + log p(w̃) + P/2 log 2π - ½ log det Λ, term by term."""
    fitted = regression(METHODS[name], prior=0.5, noise_std=0.75)
    case = BY_NAME["mlp"]
    model, x, y = case.build(), case.batch(6), problems.numbers(case)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    fit = torch.distributions.Normal(model(x), 0.75).log_prob(y).sum()
    prior = torch.distributions.Normal(torch.zeros((), dtype=D), 0.5**-0.5).log_prob(theta).sum()
    rows = fitted.posterior.precision.sample(torch.eye(83, dtype=D))
    logdet = -torch.linalg.slogdet(rows.T @ rows)[1]
    assert_close(fitted.log_evidence(), fit + prior + 0.5 * 83 * math.log(2 * math.pi) - 0.5 * logdet)


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_default_fit_ends_at_the_optimum(name: str, likelihood: str) -> None:
    """No precision on a fine line through the optimum has more evidence, and the slope there is zero."""
    if likelihood == "gaussian":
        fitted = regression(METHODS[name])
    else:
        case = BY_NAME["mlp"]
        fitted = problems.fit(case, METHODS[name])
    assert isinstance(fitted.prior.given, Isotropic)
    best = fitted.log_evidence()
    at = fitted.prior.values.log()
    of = lambda p: fitted.with_prior(p.exp()).log_evidence().detach()
    size = fitted.network.selection.size
    assert abs(float(dense.slope(of, at))) <= 2e-5 * size
    line = torch.stack([of(at + shift) for shift in torch.linspace(-3, 3, 121, dtype=D)])
    assert float(line.max()) <= float(best) + 1e-6 * size


def test_tuning_from_anywhere_ends_at_the_same_precision(name: str) -> None:
    ends = [regression(METHODS[name], prior=start).tuned().prior.values for start in (1e-3, 1.0, 1e4)]
    for end in ends:
        assert float(end / ends[0]) == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("method", ["full", "kron", "ekron", "diagonal", "low_rank"])
def test_one_precision_for_each_layer_is_better(method: str) -> None:
    one = regression(METHODS[method])
    each = regression(METHODS[method], prior=lw.per_layer(one.prior.values.item())).tuned()
    assert each.prior.values.shape == (3,)
    assert float(each.log_evidence()) >= float(one.log_evidence())
    at = each.prior.values.log()
    of = lambda p: each.with_prior(lw.per_layer(p.exp())).log_evidence()
    assert float(dense.slope(of, at).abs().max()) <= 1e-3 * 83


def test_joint_learning_of_the_noise() -> None:
    fitted = regression(lw.Full(), prior=1.0).tuned(lw.tuners.MaximiseEvidence(noise=True))
    kept = regression(lw.Full(), prior=1.0).tuned()
    assert float(fitted.log_evidence()) > float(kept.log_evidence())
    assert float(fitted.likelihood.dispersion) != float(kept.likelihood.dispersion)
    at = (fitted.prior.values.log(), fitted.likelihood.dispersion.log())
    by_precision = dense.slope(lambda p: posterior_at(fitted, "isotropic", p, at[1]).log_evidence(), at[0])
    by_noise = dense.slope(lambda n: posterior_at(fitted, "isotropic", at[0], n).log_evidence(), at[1])
    assert abs(float(by_precision)) <= 2e-5 * 83
    assert abs(float(by_noise)) <= 2e-5 * 83


def test_optimum_is_that_of_the_gaussian_process() -> None:
    """A linear model refitted at each precision: the Laplace optimum at the optimal weights is the exact one.

    At the optimum of the exact evidence the weights are the posterior mean, where both evidences agree to first
    order in the precision; so tuning from there must not move.
    """
    x, noise = torch.randn(30, 4, dtype=D), 0.3
    truth = torch.randn(4, dtype=D)
    y = x @ truth + noise * torch.randn(30, dtype=D)
    variance = torch.full((30,), noise**2, dtype=D)
    log_precision = torch.tensor(0.0, dtype=D)
    exact = lambda p: regress(x, y, p.exp().expand(4), variance).log_evidence
    for _ in range(60):  # MacKay's fixed point
        posterior = regress(x, y, log_precision.exp().expand(4), variance)
        gamma = 4 - log_precision.exp() * posterior.covariance.trace()
        log_precision = (gamma / posterior.mean.square().sum()).log()
    assert abs(float(dense.slope(exact, log_precision))) <= 1e-6
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = regress(x, y, log_precision.exp().expand(4), variance).mean[None].clone()
    fitted = lw.fit(model, [(x, y[:, None])], lw.Gaussian(noise_std=noise), method=lw.Full())
    assert float(fitted.prior.values.log()) == pytest.approx(float(log_precision), abs=1e-3)
    assert_close(fitted.log_evidence(), exact(log_precision), 0.4)


@pytest.mark.parametrize("prior", [1.0, lw.priors.g_prior(1.0)], ids=["isotropic", "g"])
def test_full_uses_one_eigendecomposition_for_all_steps(prior: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is factorised during the search."""
    calls = {"eigvalsh": 0, "cholesky_ex": 0}

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(torch.linalg, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return counting

    for name in calls:
        monkeypatch.setattr(torch.linalg, name, counting(name))
    tuned = regression(lw.Full(), prior=prior).tuned(lw.tuners.MaximiseEvidence(noise=True))
    assert len(tuned.trace.steps) > 5
    assert calls == {"eigvalsh": 1, "cholesky_ex": 0}


@pytest.mark.parametrize(("tuner", "good"), [(lw.tuners.MaximiseEvidence(), 2), (lw.tuners.Ascend(), 3)])
def test_an_evidence_that_is_not_finite_keeps_the_trace_and_the_last_good_value(tuner: Any, good: int) -> None:
    fitted = regression(lw.Full(), prior=3.0)
    with pytest.raises(lw.errors.DivergedError, match=r"evidence is not finite\. Give the prior.*nan at prec") as error:
        tuner(failing(fitted, good))
    assert len(error.value.trace.steps) == good + 1
    best = max(error.value.trace.steps[:good], key=lambda step: step.score)
    assert error.value.posterior.problem.prior.values.item() == pytest.approx(best.precisions[0])


def test_zero_weights_have_no_optimum_but_an_answer() -> None:
    """All weights zero: the evidence rises with the precision without end; the result is finite."""
    model = nn.Linear(4, 3).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x, y = torch.randn(6, 4, dtype=D), torch.randint(0, 3, (6,))
    for method in METHODS.values():
        fitted = lw.fit(model, [(x, y)], "classification", method=method)
        assert math.isfinite(float(fitted.prior.values))
        assert float(fitted.functions(x).std.max()) < 0.01


def test_a_tuner_written_by_a_user() -> None:
    case = BY_NAME["mlp"]
    seen = []

    def tuner(posterior: Any) -> Any:
        seen.append(posterior)
        return posterior.with_problem(posterior.problem.with_prior(posterior.problem.prior.with_precision(
            torch.tensor(7.0, dtype=D))))  # fmt: skip

    fitted = lw.fit(case.build(), problems.batches(case), "classification", tuner=tuner)
    assert len(seen) == 1
    assert fitted.prior.values.item() == 7.0
    assert (
        lw.fit(case.build(), problems.batches(case), "classification", prior=2.0).tuned(tuner).prior.values.item()
        == 7.0
    )


@pytest.mark.parametrize("kind", ["MaximiseEvidence", "FixedPoint", "SampleEM"])
def test_targets_in_small_units_have_an_optimum_too(kind: str) -> None:
    """Prices in cents: a last layer that is a million times larger has a precision of 1e-12, and means the same."""
    torch.manual_seed(0)
    x = torch.randn(60, 2, dtype=D)
    y = x[:, :1].sin() + 0.3 * torch.randn(60, 1, dtype=D)
    start = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double().state_dict()
    posteriors = []
    for units in (1e4, 1e6):
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        net.load_state_dict({key: value * (units if key.startswith("2.") else 1) for key, value in start.items()})
        data = [(x, units * y)]
        tuner = lw.tuners.SampleEM(data, mode="network") if kind == "SampleEM" else getattr(lw.tuners, kind)()
        method = lw.Sampled(num_samples=32) if kind == "SampleEM" else lw.Kron()
        posteriors.append(lw.fit(net, data, "regression", method=method, prior=1.0).tuned(tuner))
    small, large = posteriors
    assert float(large.prior.values) < 1e-10
    assert float(large.prior.values) * 1e4 == pytest.approx(float(small.prior.values), rel=0.1)
    if kind != "SampleEM":  # 32 samples know a deviation to an eighth
        torch.testing.assert_close(large.functions(x).std / 1e2, small.functions(x).std, rtol=0.1, atol=0)


# A fixed number of Adam steps on the evidence.

ASCEND_METHODS: dict[str, Any] = {"full": lw.Full(), "kron": lw.Kron(), "diagonal": lw.Diagonal()}
LAYERS = torch.tensor([0] * 30 + [1] * 35 + [2] * 18)  # of the MLP's 83 weights


def at_its_mean(start: float) -> lw.Fitted:
    """Weights at the prior mean and data without noise: the evidence rises with the precision without end."""
    theta = torch.cat([p.detach().reshape(-1) for p in BY_NAME["mlp"].build().parameters()])
    return regression(lw.Full(), lw.isotropic(start, mean=theta), noise_std=1e-7)


@pytest.mark.parametrize("name", list(ASCEND_METHODS))
def test_the_evidence_rises(name: str) -> None:
    """Small steps from a precision of 2 in all layers raise the evidence; the last step of the trace is the result."""
    before = regression(ASCEND_METHODS[name], lw.per_layer(2.0))
    after = problems.unchanged(before.network.model, lambda: before.tuned(lw.tuners.Ascend(steps=40, rate=0.01)))
    assert after.trace is not None
    scores = [step.score for step in after.trace.steps]
    assert after.trace.tuner == "Ascend"
    assert len(scores) == 41  # the start, and the end of every step
    assert scores[0] == float(before.log_evidence())
    assert scores == sorted(scores)
    assert scores[-1] > scores[0] + 1
    assert float(after.log_evidence()) == pytest.approx(scores[-1], rel=1e-12)
    assert_close(after.prior.values, torch.tensor(after.trace.steps[-1].precisions, dtype=D))


@pytest.mark.parametrize("noise", [False, True])
def test_it_is_adam_on_the_dense_evidence(noise: bool) -> None:
    """Seven steps by Adam's formulas on the evidence over the number of weights, in all logarithms at once."""
    case = BY_NAME["mlp"]
    model, x, y = case.build(), case.batch(6), problems.numbers(case)
    reference = Linearised.of("gaussian", model, x, y)
    residual = (model(x) - y).detach().square().mean()

    def slope(at: Tensor, number: int) -> Tensor:
        at = at.clone().requires_grad_()
        value = reference.evidence(at[:3].exp()[LAYERS], at[3].exp() if noise else residual)
        return torch.autograd.grad(value / 83, at)[0]

    start = torch.stack([torch.tensor(2.0, dtype=D)] * 3 + [residual] * noise).log()
    expected = adam(slope, start, [0.2] * 7).exp()
    tuned = regression(lw.Full(), prior=lw.per_layer(2.0)).tuned(lw.tuners.Ascend(steps=7, rate=0.2, noise=noise))
    assert_close(tuned.prior.values, expected[:3], 0.5)
    assert_close(tuned.likelihood.dispersion, expected[3] if noise else residual, 0.5)
    assert float((expected[:3] - 2).abs().min()) > 0.1  # it went somewhere


def test_no_steps_change_nothing() -> None:
    assert regression(lw.Full(), prior=2.0).tuned(lw.tuners.Ascend(steps=0)).prior.values.item() == pytest.approx(
        2.0, rel=1e-15
    )


def test_a_precision_that_runs_away() -> None:
    """The error has all steps and the last good posterior; e³² is the first power of e out of range."""
    with pytest.raises(
        lw.errors.DivergedError, match=r"no optimum: a prior precision ran to .* Give the prior"
    ) as error:
        at_its_mean(1.0).tuned(lw.tuners.Ascend(steps=60, rate=1.0))
    trace, kept = error.value.trace, error.value.posterior
    passed = [step.precisions[0] for step in trace.steps]
    assert trace.tuner == "Ascend"
    assert passed == sorted(passed)
    assert passed[-1] > 1e12 > passed[-2]
    assert len(passed) < 60
    assert float(kept.problem.prior.values) == pytest.approx(passed[-2], rel=1e-12)
    assert float(kept.log_evidence()) == pytest.approx(trace.steps[-2].score, rel=1e-9)


@pytest.mark.parametrize("rate", [40.0, 1000.0])
def test_the_last_step_is_looked_at_too(rate: float) -> None:
    """e⁴⁰ is out of range, and e¹⁰⁰⁰ overflows."""
    with pytest.raises(lw.errors.DivergedError, match="no optimum") as error:
        at_its_mean(1.0).tuned(lw.tuners.Ascend(steps=1, rate=rate))
    assert len(error.value.trace.steps) == 2
    assert float(error.value.posterior.problem.prior.values) == pytest.approx(1.0)


# Offsets of the logits by validation data, and the remark on biased classes without them.

CPU = torch.device("cpu")


def rows(kind: str, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits that are right, as inputs, and targets drawn from them; class or label 0 is rare."""
    generator = torch.Generator().manual_seed(seed)
    count = {"binary": 1, "multilabel": 2, "classification": 3}[kind]
    f = 1.5 * torch.randn(n, count, generator=generator, dtype=D)
    f[:, 0] -= 2.5
    if kind == "classification":
        return f, torch.multinomial(f.softmax(-1), 1, generator=generator)[:, 0]
    return f, (torch.rand(n, count, generator=generator, dtype=D) < f.sigmoid()).to(D)


def biased(count: int, by: float = 3.0) -> nn.Module:
    """Return a network that adds ``by`` to the first logit."""
    net = nn.Linear(count, count).to(D)
    with torch.no_grad():
        net.weight.copy_(torch.eye(count))
        net.bias.zero_()
        net.bias[0] = by
    return net


def nll(posterior: Any, data: tuple[Tensor, Tensor]) -> float:
    return -float(posterior.predict(data[0]).log_prob(data[1]).mean())


@pytest.fixture(scope="module", params=["binary", "multilabel", "classification"])
def case(request: pytest.FixtureRequest) -> tuple[str, Any, tuple[Tensor, Tensor]]:
    """Return a kind, the posterior of a biased network with validation data, and test data."""
    kind = request.param
    training, validation, test = rows(kind, 100), rows(kind, 300, 1), rows(kind, 2000, 2)
    return kind, lw.fit(biased(training[0].shape[1]), training, kind, prior=1e4, validation=validation), test


def test_a_bias_is_corrected_where_a_temperature_cannot(case: tuple[str, Any, tuple[Tensor, Tensor]]) -> None:
    kind, posterior, (x, y) = case
    right = -float(lw.fit(biased(x.shape[1], 0.0), (x[:50], y[:50]), kind, method=lw.baselines.MapOnly(), prior=1.0)
                   .predict(x).log_prob(y).mean())  # fmt: skip
    scores = posterior.trace.scores
    assert nll(posterior, (x, y)) < right + 0.02
    assert scores["mixture"] < scores["temperature scaling"] - 0.1
    occurs = F.one_hot(y).to(D).mean(0) if kind == "classification" else y.mean(0)
    assert float((posterior.predict(x).probs.mean(0) - occurs).abs().max()) < 0.04  # a standard error is below 0.02
    assert "logits are shifted (output in brackets): -" in posterior.summary()


def test_offsets_are_saved_and_part_of_modules(case: tuple[str, Any, tuple[Tensor, Tensor]], tmp_path: Path) -> None:
    _, posterior, (x, _) = case
    probs = posterior.predict(x[:20]).probs
    posterior.save(tmp_path / "net")
    assert_close(lw.load(tmp_path / "net", posterior.network.model).predict(x[:20]).probs, probs)
    assert_close(posterior.as_module("probs")(x[:20]), probs)


def test_the_offset_and_its_evidence_are_those_of_a_dense_grid() -> None:
    """For one label: b and log T on a grid, with their priors, summed."""
    x, y = rows("binary", 300)
    held = HeldOutputs(x + 1.0, y, torch.ones_like(y), exclusive=False)
    found = learn_offset(held, lw.Bernoulli(), (1.0,))
    assert found is not None
    b, heat = torch.linspace(-3, 1, 401, dtype=D), torch.linspace(-1, 1, 101, dtype=D)
    logits = (x + 1.0) / heat.exp()[:, None, None] + b[:, None, None, None]  # (b, heat, n, 1)
    energy = torch.cat([
        (y * part - F.softplus(part)).sum((-1, -2)) for part in logits.split(50)
    ])  # fmt: skip
    normal = lambda t, std: -0.5 * (t / std).square() - math.log(std) - 0.5 * math.log(2 * math.pi)
    areas = float((heat[1] - heat[0]).log()), float((b[1] - b[0]).log())
    both = (energy + normal(b, 1.0)[:, None] + normal(heat, 0.5)).logsumexp((0, 1)) + sum(areas)
    without = (energy[300] + normal(heat, 0.5)).logsumexp(0) + areas[0]  # b = 0
    most = (energy + normal(b, 1.0)[:, None] + normal(heat, 0.5)).flatten().argmax()
    assert float(found.values) == pytest.approx(float(b[int(most) // 101]), abs=0.01)
    assert found.log_odds == pytest.approx(math.log(3 / 7) + float(both - without), abs=0.1)


@pytest.mark.parametrize("kind", ["binary", "multilabel", "classification"])
def test_weights_count_as_repeated_data_and_ignored_targets_as_none(kind: str) -> None:
    x, y = rows(kind, 120)
    net = biased(x.shape[1])
    network = Network.build(net, x)
    likelihood: Any = lw.Categorical() if kind == "classification" else lw.Bernoulli(ignore_index=-100)
    read = lambda source: learn_offset(HeldOutputs.of(network, likelihood, Data(source, CPU)), likelihood, WIDTHS)
    twice = read([(x, y), (x[:40], y[:40])])
    weights = torch.ones(120, dtype=D)
    weights[:40] = 2
    weighted = read(lw.samples.weighted((x, y, weights)))
    unknown = torch.full_like(y, -100)
    ignored = read([(x, y), (x, unknown), (x[:40], y[:40])])
    assert twice is not None
    assert weighted is not None
    assert ignored is not None
    assert_close(ignored.values, twice.values)
    assert_close(weighted.values, twice.values)
    assert ignored.log_odds == pytest.approx(twice.log_odds)


def test_soft_targets_count_by_their_probabilities() -> None:
    x, y = rows("classification", 200)
    likelihood, network = lw.Categorical(), Network.build(biased(3), x)
    read = lambda y: learn_offset(HeldOutputs.of(network, likelihood, Data((x, y), CPU)), likelihood, WIDTHS)
    hard, soft = read(y), read(F.one_hot(y).to(D))
    assert hard is not None
    assert soft is not None
    assert_close(soft.values, hard.values)
    assert float(hard.values.sum()) == pytest.approx(0.0, abs=1e-12)


def test_offsets_of_many_labels_take_the_diagonal_of_the_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels by themselves have no other entries but those with the temperature, so that nothing is left out."""
    x, y = rows("multilabel", 300)
    held = HeldOutputs(x + torch.tensor([2.0, -1.0], dtype=D), y, torch.ones_like(y), exclusive=False)
    full = learn_offset(held, lw.Bernoulli(), WIDTHS)
    monkeypatch.setattr("lapwing.tuners.offsets.MAX_DENSE_OFFSETS", 1)
    diagonal = learn_offset(held, lw.Bernoulli(), WIDTHS)
    assert full is not None
    assert diagonal is not None
    assert_close(diagonal.values, full.values)
    assert diagonal.log_odds == pytest.approx(full.log_odds)


def test_classes_with_few_rows_have_no_offset() -> None:
    x, y = rows("classification", 400)
    keep = (y != 0) | ((y == 0).cumsum(0) <= 9)
    held = lambda x, y: HeldOutputs(x, F.one_hot(y, 3).to(D), torch.ones_like(x), exclusive=True)
    moved = x[keep] + torch.tensor([1.0, 3.0, -3.0], dtype=D)
    found = learn_offset(held(moved, y[keep]), lw.Categorical(), WIDTHS)
    assert found is not None
    assert float(found.values[0]) == 0
    assert float(found.values[1] - found.values[2]) == pytest.approx(-6.0, abs=2.0)
    assert learn_offset(held(moved[:9], y[keep][:9]), lw.Categorical(), WIDTHS) is None
    assert learn_offset(held(x, y), lw.Categorical(), ()) is None


def test_a_network_without_bias_gets_no_offset() -> None:
    training, validation = rows("classification", 100), rows("classification", 300, 1)
    posterior = lw.fit(biased(3, 0.0), training, "classification", prior=1e3, validation=validation)
    assert all(cell.likelihood.link_offset is None for cell in posterior.posterior.cells)


def test_many_classes_are_corrected_through_drawn_functions() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 300, generator=generator)
    x[:, :4] += 6
    y = torch.multinomial(x.softmax(-1), 1, generator=generator)[:, 0]
    net = biased(300, 4.0).float()
    posterior = lw.fit(net, (x[:50], y[:50]), "classification", prior=1e5, validation=(x[50:], y[50:]),
                       method=lw.Diagonal())  # fmt: skip
    scores = posterior.trace.scores
    assert scores["mixture"] < scores["temperature scaling"] - 0.1
    mean = posterior.predict(x).probs.mean(0)[0]
    assert abs(float(mean) - float((y == 0).float().mean())) < 0.05


@pytest.mark.parametrize(
    ("likelihood", "odds"),
    [
        (lw.Bernoulli(pos_weight=4.0), (0.25, 1.0)),
        (lw.Categorical(class_weights=(4.0, 1.0)), (0.25, 1.0)),
        (lw.Categorical(class_weights=(4.0, 0.0), link_offset=(1.0, 0.0)), (0.25 * math.e, 1.0)),
    ],
    ids=["labels", "classes", "offset and a weight of zero"],
)
def test_predictions_are_those_for_data_without_weights(likelihood: Any, odds: tuple[float, float]) -> None:
    f = torch.randn(5, 1 if isinstance(likelihood, lw.Bernoulli) else 2, dtype=D)
    belief = lw.FunctionGaussian(f, torch.zeros(*f.shape, f.shape[1], dtype=D))
    p = likelihood.predict(belief).probs
    if f.shape[1] == 1:
        assert_close(p / (1 - p), f.exp() * odds[0])
    else:
        assert_close(p[:, 0] / p[:, 1], (f[:, 0] - f[:, 1]).exp() * odds[0] / odds[1])


def trained(weight: float, smoothing: float = 0.0, steps: int = 150) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a network for a rare label, trained with a weight for it, and its data."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1000, 3, generator=generator)
    y = (2 * x.sum(1) + torch.randn(1000, generator=generator) > 5.5).float().unsqueeze(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1))
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weight))
    problems.descend(net, lambda net: loss(net(x), y * (1 - smoothing) + smoothing / 2), steps, 2e-2)
    return net.eval(), (x, y)


def test_a_network_that_was_trained_with_weights_is_noticed_without_validation_data() -> None:
    net, data = trained(19.0)
    with pytest.warns(lw.errors.CalibrationWarning, match="probably trained with weights") as caught:
        posterior = lw.fit(net, data, "binary")
    assert str(caught[0].message) in posterior.findings
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corrected = lw.fit(net, data, lw.Bernoulli(pos_weight=19.0))
        lw.fit(net, data, "binary", validation=(data[0][:60] + 0.01, data[1][:60]))
    rate = float(data[1].mean())
    assert abs(float(corrected.predict(data[0]).probs.mean()) - rate) < 0.25 * rate
    assert float(posterior.predict(data[0]).probs.mean()) > 1.5 * rate


@pytest.mark.parametrize("how", [{}, {"smoothing": 0.1}, {"steps": 6}, {"steps": 15}, {"steps": 300}], ids=repr)
def test_training_without_weights_is_not_taken_for_one_with(how: dict[str, Any]) -> None:
    net, data = trained(1.0, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lw.fit(net, data, "binary")


# The verdict on a posterior: a comparison with the plain network, and a warning where it does worse.


def confident() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a network that fits its data well with few units left undecided."""
    torch.manual_seed(0)
    x = torch.randn(200, 5)
    y = (x[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 2))
    problems.descend(net, lambda net: nn.functional.cross_entropy(net(x), y), 300, 1e-2)
    return net.eval(), (x, y)


def weak(posterior: object) -> object:
    """Return the posterior under a prior that leaves nearly everything open."""
    problem = posterior.problem  # type: ignore[attr-defined]
    prior = problem.prior.with_precision(0 * problem.prior.values + 1e-3)
    return posterior.with_problem(problem.with_prior(prior))  # type: ignore[attr-defined]


def test_a_tuner_that_does_harm_is_warned_about() -> None:
    net, data = confident()
    with pytest.warns(lw.errors.CalibrationWarning, match="worse than that of the plain network.*fit"):
        posterior = lw.fit(net, data, "classification", tuner=weak)
    scores = posterior.trace.scores
    assert scores["this posterior"] > scores["plain network"] + 0.05
    by_hand = -float(posterior.predict(data[0]).log_prob(data[1]).mean())
    assert scores["this posterior"] == pytest.approx(by_hand, rel=1e-4)
    assert "Note: " in posterior.summary()


def test_a_harmless_tuner_is_not() -> None:
    net, data = confident()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lw.fit(net, data, "classification", tuner=lambda posterior: posterior)


class ByFunction(nn.Module):
    """A norm that is no layer of the model."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (8,))


NORMS = (None, nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8), ByFunction())


@pytest.mark.parametrize(("norm", "weights"), [*((norm, "all") for norm in NORMS), (NORMS[1], "last_layer")], ids=repr)
def test_summaries_say_where_norms_cancel_a_scale_as_check_does(
    norm: nn.Module | None, weights: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    x = torch.randn(40, 3)
    data = (x, (x[:, 0] > 0).long())
    net = nn.Sequential(nn.Linear(3, 8), norm or nn.Identity(), nn.Tanh(), nn.Linear(8, 2)).eval()
    posterior = lw.fit(net, data, "classification", weights=weights)
    text, normalised = posterior.summary(), bool(lw.check(net, x, weights=weights).scale_free)
    assert ("depends on that scale" in text and "the corrected evidence, prior=" in text) == normalised
    posterior.save(tmp_path / "net")
    assert lw.load(tmp_path / "net", net).summary() == text
    if normalised:
        prior = lw.priors.per_normalised_group()
        assert "each has its own precision." in lw.fit(net, data, "classification", prior=prior).summary()


def test_summaries_name_method_mixture_and_scores() -> None:
    net, data = confident()
    held_out = (data[0] + 0.1 * torch.randn_like(data[0]), data[1])
    text = lw.fit(net, data, "classification", validation=held_out).summary()
    first, what, parts = text.splitlines()[:3]
    assert first.startswith("On held-out data these predictions are ")
    assert "the network alone (" in first
    assert "the network with its temperature rescaled (" in first
    assert what.startswith("Kron over all 514 weights, Categorical likelihood: mixture of ")
    assert " around prior precision " in what
    assert re.match(
        r"The mixture averages the predictions of \d+ settings, with shares in brackets: .* \(0\.\d\d\)", parts
    )
    assert "Tuned by Integrate on validation data." in text
    guarded = lw.fit(net, data, "classification")
    assert guarded.summary().startswith(
        "Not checked on held-out data. Mean negative log-likelihood on training data (lower is better): plain network "
    )
    assert "wider error bars" in guarded.summary()
    assert "validation data would calibrate" in guarded.summary()
    assert "\n" not in repr(guarded)
