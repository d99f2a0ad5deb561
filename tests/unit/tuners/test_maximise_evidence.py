"""The evidence: its value, its gradient, its optimum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.priors.given import Isotropic
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense
from tests.references.linear_regression import regress
from tests.tolerances import assert_close

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
    x = chosen.batch(6)
    y = torch.randn(6, *chosen.outputs, dtype=D, generator=torch.Generator().manual_seed(3))
    data = problems.split(x, y, (3, 1, 2))
    return lw.fit(chosen.build(), data, lw.Gaussian(**likelihood), method=method, prior=prior)


def posterior_at(fitted: lw.Fitted, kind: str, log_precision: Tensor, log_noise: Tensor) -> Any:
    """The posterior under these hyperparameters, with a graph to them."""
    make = {"isotropic": lw.isotropic, "per_layer": lw.per_layer, "diagonal": lw.priors.diagonal}[kind]
    like = torch.empty(0, dtype=D)
    prior = make(log_precision.exp()).bound(fitted.network.selection, like)
    likelihood = fitted.likelihood.with_dispersion(log_noise.exp())
    return fitted.posterior.with_problem(fitted.posterior.problem.with_prior(prior).with_likelihood(likelihood))


def slope(of: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-4) -> Tensor:
    """Central differences of the fourth order, one entry after another."""
    slopes = []
    for i in range(at.numel()):
        values = []
        for factor in (-2, -1, 1, 2):
            moved = at.detach().clone().reshape(-1)
            moved[i] += factor * step
            values.append(of(moved.reshape(at.shape)).detach())
        slopes.append((values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step))
    return torch.stack(slopes).reshape(at.shape)


@pytest.mark.parametrize(("method", "kind"), [(m, k) for m in METHODS for k in PRIORS if supported(m, k)])
def test_gradient_equals_finite_differences(method: str, kind: str) -> None:
    """In every precision and in the noise."""
    fitted = regression(METHODS[method], prior=1.0)
    size = {"isotropic": (), "per_layer": (3,), "diagonal": (83,)}[kind]
    precision = 0.3 * torch.randn(size, dtype=D)
    noise = torch.tensor(-0.4, dtype=D)
    a, b = precision.clone().requires_grad_(), noise.clone().requires_grad_()
    posterior_at(fitted, kind, a, b).log_evidence().backward()
    by_precision = slope(lambda p: posterior_at(fitted, kind, p, noise).log_evidence(), precision)
    by_noise = slope(lambda n: posterior_at(fitted, kind, precision, n).log_evidence(), noise)
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
    assert_close(given.grad, slope(again, given.detach()), 0.5)


def test_kron_gradient_in_a_prior_by_input() -> None:
    """A weight and its bias under different precisions: whitened, still differentiable."""
    fitted = regression(lw.Kron(), prior=1.0)
    names = fitted.network.selection.names
    log_precision = torch.linspace(-1, 1, len(names), dtype=D)
    sizes = torch.tensor(fitted.network.selection.sizes)
    of = lambda p: fitted.with_prior(lw.priors.diagonal(p.exp().repeat_interleave(sizes))).log_evidence()
    leaf = log_precision.clone().requires_grad_()
    of(leaf).backward()
    assert_close(leaf.grad, slope(of, log_precision), 0.5)


def test_value_is_the_laplace_evidence(name: str) -> None:
    """log p(D | w̃) + log p(w̃) + P/2 log 2π - ½ log det Λ, term by term."""
    fitted = regression(METHODS[name], prior=0.5, noise_std=0.75)
    model, case = BY_NAME["mlp"].build(), BY_NAME["mlp"]
    x = case.batch(6)
    y = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(3))
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    fit = torch.distributions.Normal(model(x), 0.75).log_prob(y).sum()
    prior = torch.distributions.Normal(torch.zeros((), dtype=D), 0.5**-0.5).log_prob(theta).sum()
    rows = fitted.posterior.precision.sample(torch.eye(83, dtype=D))
    logdet = -torch.linalg.slogdet(rows.T @ rows)[1]
    assert_close(fitted.log_evidence(), fit + prior + 0.5 * 83 * math.log(2 * math.pi) - 0.5 * logdet)


def test_full_evidence_of_a_classifier() -> None:
    case = BY_NAME["cnn"]
    model = case.build()
    posterior = lw.fit(model, problems.batches(case), "classification", method=lw.Full(), prior=0.5)
    _, ggn = problems.dense_ggn(case, model)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    fit = -nn.functional.cross_entropy(model(case.batch(6)), problems.targets(case, 6), reduction="sum")
    prior = torch.distributions.Normal(torch.zeros((), dtype=D), 0.5**-0.5).log_prob(theta).sum()
    logdet = torch.linalg.slogdet(ggn + 0.5 * torch.eye(len(ggn), dtype=D))[1]
    assert_close(posterior.log_evidence(), fit + prior + 0.5 * len(ggn) * math.log(2 * math.pi) - 0.5 * logdet)


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_default_fit_ends_at_the_optimum(name: str, likelihood: str) -> None:
    """No precision on a fine line through the optimum has more evidence, and the slope there is zero."""
    if likelihood == "gaussian":
        fitted = regression(METHODS[name])
    else:
        case = BY_NAME["mlp"]
        fitted = lw.fit(case.build(), problems.batches(case), "classification", method=METHODS[name])
    assert isinstance(fitted.prior.given, Isotropic)
    best = fitted.log_evidence()
    at = fitted.prior.values.log()
    of = lambda p: fitted.with_prior(p.exp()).log_evidence().detach()
    size = fitted.network.selection.size
    assert abs(float(slope(of, at))) <= 2e-5 * size
    line = torch.stack([of(at + shift) for shift in torch.linspace(-3, 3, 121, dtype=D)])
    assert float(line.max()) <= float(best) + 1e-6 * size


def test_evidence_is_concave_in_the_log_precision(name: str) -> None:
    fitted = regression(METHODS[name], prior=1.0)
    line = torch.stack(
        [fitted.with_prior(float(p)).log_evidence().detach() for p in torch.logspace(-6, 6, 61, dtype=D)]
    )
    bend = line[2:] - 2 * line[1:-1] + line[:-2]
    assert float(bend.max()) <= 1e-9 * float(line.abs().max())


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
    assert float(slope(of, at).abs().max()) <= 1e-3 * 83


def test_joint_learning_of_the_noise() -> None:
    fitted = regression(lw.Full(), prior=1.0).tuned(lw.tuners.MaximiseEvidence(noise=True))
    kept = regression(lw.Full(), prior=1.0).tuned()
    assert float(fitted.log_evidence()) > float(kept.log_evidence())
    assert float(fitted.likelihood.dispersion) != float(kept.likelihood.dispersion)
    at = (fitted.prior.values.log(), fitted.likelihood.dispersion.log())
    by_precision = slope(lambda p: posterior_at(fitted, "isotropic", p, at[1]).log_evidence(), at[0])
    by_noise = slope(lambda n: posterior_at(fitted, "isotropic", at[0], n).log_evidence(), at[1])
    assert abs(float(by_precision)) <= 2e-5 * 83
    assert abs(float(by_noise)) <= 2e-5 * 83


@pytest.mark.parametrize("tuner", [lw.tuners.MaximiseEvidence(), lw.tuners.MaximiseEvidence(noise=True)])
def test_a_given_noise_is_kept(tuner: Any) -> None:
    assert regression(lw.Full(), noise_std=0.5).tuned(tuner).likelihood.dispersion.item() == 0.25


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
    assert abs(float(slope(exact, log_precision))) <= 1e-6
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


def test_tuning_touches_no_data() -> None:
    case = BY_NAME["mlp"]
    passes = []

    class Counting:
        def __iter__(self) -> Any:
            passes.append(1)
            return iter(problems.batches(case))

    fitted = lw.fit(case.build(), Counting(), "classification", method=lw.Full(), prior=1.0)
    before = len(passes)
    assert before >= 1
    fitted.tuned().with_prior(3.0)
    assert len(passes) == before


def test_what_is_not_finite_ends_it_with_the_trace_and_the_last_good_value() -> None:
    fitted = regression(lw.Full(), prior=3.0)
    calls: list[int] = []

    class Failing(type(fitted.posterior)):  # type: ignore[misc]
        """A posterior whose evidence is finite twice and then NaN."""

        def log_evidence(self) -> Tensor:
            calls.append(1)
            value = super().log_evidence()
            return value if len(calls) < 3 else value * math.nan

    failing = Failing(**{f.name: getattr(fitted.posterior, f.name) for f in fields(fitted.posterior)})
    with pytest.raises(
        lw.errors.DivergedError, match=r"evidence is not finite. Give the prior.*nan at precision"
    ) as error:
        lw.tuners.MaximiseEvidence()(failing)
    assert len(error.value.trace.steps) == 3
    best = max(error.value.trace.steps[:2], key=lambda step: step.score)
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


def test_no_evidence_to_maximise() -> None:
    case = BY_NAME["mlp"]
    plain = lw.fit(case.build(), problems.batches(case), "classification", method=lw.baselines.MapOnly())
    with pytest.raises(lw.errors.UnsupportedError, match="no evidence to maximise; give the prior, or use a method"):
        plain.tuned()
    with pytest.raises(lw.errors.UnsupportedError, match="no evidence"):
        plain.log_evidence()


def test_a_tuner_of_ones_own() -> None:
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


def test_evidence_prefers_the_model_that_made_the_data() -> None:
    """Model selection: a line is preferred for a line, a wiggle for a wiggle."""
    x = torch.linspace(-2, 2, 40, dtype=D)[:, None]

    def evidence(features: Callable[[Tensor], Tensor], y: Tensor) -> float:
        phi = features(x)
        model = nn.Linear(phi.shape[1], 1).double()
        design = torch.cat([phi, torch.ones(40, 1, dtype=D)], 1)
        best = torch.linalg.lstsq(design, y).solution[:, 0]
        model.weight.data, model.bias.data = best[None, :-1].clone(), best[-1:].clone()
        return float(lw.fit(model, [(phi, y)], lw.Gaussian(noise_std=0.1), method=lw.Full()).log_evidence())

    line = lambda t: t
    wiggle = lambda t: torch.cat([t**k for k in range(1, 8)], 1)
    noise = 0.1 * torch.randn(40, 1, dtype=D)
    assert evidence(line, 0.7 * x + noise) > evidence(wiggle, 0.7 * x + noise)
    assert evidence(wiggle, (3 * x).sin() + noise) > evidence(line, (3 * x).sin() + noise)


def test_full_evidence_of_a_single_output() -> None:
    """The evidence of a nonlinear regression under Full, all from brute force."""
    fitted = regression(lw.Full(), prior=0.5, noise_std=0.5, case="squeezed")
    case = BY_NAME["squeezed"]
    model, x = case.build(), case.batch(6)
    jac = dense.jacobian(model, x, 6)
    precision = dense.ggn(jac, torch.ones(6, 1, 1, dtype=D)) / 0.25 + 0.5 * torch.eye(jac.shape[-1], dtype=D)
    y = torch.randn(6, 1, dtype=D, generator=torch.Generator().manual_seed(3))
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    expected = (
        torch.distributions.Normal(model(x)[:, None], 0.5).log_prob(y).sum()
        + 0.5 * len(theta) * math.log(0.5) - 0.25 * theta @ theta - 0.5 * torch.linalg.slogdet(precision)[1]
    )  # fmt: skip
    assert_close(fitted.log_evidence(), expected)


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
