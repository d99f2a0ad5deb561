"""VaLLA: learning, laws, and tuning on validation data."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods import valla as module
from lapwing.methods.valla import COARSE, FINE, Validation
from lapwing.posteriors.base import Step
from lapwing.priors import PerLayer
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense, inducing
from tests.tolerances import SOLVED, assert_close
from tests.unit.methods.sine import GIVEN, NOISE, D, classes, curve, exact, fitted, model

# VaLLA: defaults, prior and noise that are given, settings and problems that are refused.

MLP = BY_NAME["mlp"]


METHODS = {
    "none": lw.VaLLA(5, optimiser="none"), "lbfgs": lw.VaLLA(5, optimiser="lbfgs", steps=3),
    "adam": lw.VaLLA(5, optimiser="adam", steps=3), "predicting": lw.VaLLA(5, alpha=1.0, steps=3),
}  # fmt: skip


def test_the_initial_locations_are_kept_if_their_bound_is_higher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace says so. With validation data the learned locations stay, whatever their bound."""
    lost = torch.full((4, 1), 3.0, dtype=D) + torch.arange(4, dtype=D)[:, None]
    step = Step(0.0, (0.5,))
    monkeypatch.setattr(
        module,
        "learn_stochastic",
        lambda points, data, settings, generator: replace(
            points,
            anchors=replace(points.anchors, inputs=lost),
            steps=(step,),
            problem=points.problem if settings.validation is None else points.problem.with_known_prior(),
        ),
    )
    initial = fitted(lw.VaLLA(4, optimiser="none"))
    back = fitted(lw.VaLLA(4, optimiser="adam"))
    assert torch.equal(back.posterior.curvature.anchors.inputs, initial.posterior.curvature.anchors.inputs)
    assert back.trace is not None
    assert back.trace.findings == ("the initial locations have a higher bound than the learned ones and are kept",)
    wanted = fitted(lw.VaLLA(4, optimiser="adam"), validation=[curve(seed=1)])
    assert torch.equal(wanted.posterior.curvature.anchors.inputs, lost)
    assert wanted.log_evidence() < initial.log_evidence()


def test_a_default_for_few_data_and_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for way in ("learn_collapsed", "learn_stochastic"):
        monkeypatch.setattr(module, way, lambda points, *_, way=way: used.append(way) or points)
    fitted(lw.VaLLA(5))
    fitted(lw.VaLLA(5), validation=[curve(seed=1)])
    fitted(lw.VaLLA(5, alpha=1.0))
    many = torch.linspace(-2, 2, 20_001, dtype=D)[:, None]
    fitted(lw.VaLLA(5, candidates=50), data=[(many, many)])
    fitted(lw.VaLLA(40))
    assert used == ["learn_collapsed"] * 2 + ["learn_stochastic"] * 3  # few data: a search from each of two starts


@pytest.mark.parametrize("way", ["lbfgs", "adam"])
def test_the_prior_is_learned_where_none_is_given(way: str) -> None:
    """With enough points near the optimum of the exact evidence; the noise is that of the residuals."""
    posterior = fitted(lw.VaLLA(12, optimiser=way, steps=60), lw.Gaussian(), None)
    assert float(posterior.prior.values) == pytest.approx(float(exact(True).prior.values), rel=0.1)
    assert float(posterior.likelihood.dispersion) == pytest.approx(float(exact(True).likelihood.dispersion), rel=1e-12)
    around = [float(posterior.with_prior(float(posterior.prior.values) * f).log_evidence()) for f in (0.97, 1.0, 1.03)]
    assert around[1] > max(around[0], around[2])


@pytest.mark.parametrize(("way", "alpha"), [("lbfgs", 0.0), ("adam", 0.0), ("none", 0.0), ("adam", 1.0)])
def test_a_given_prior_stays_as_it_was_given(way: str, alpha: float) -> None:
    prior = lw.per_layer(torch.tensor([0.3, 0.7], dtype=D))
    posterior = fitted(lw.VaLLA(4, alpha=alpha, optimiser=way, steps=5), lw.Gaussian(), prior)
    assert posterior.prior.values.tolist() == [0.3, 0.7]
    assert isinstance(posterior.prior.given, PerLayer)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_a_given_noise_stays_as_it_was_given(alpha: float) -> None:
    posterior = fitted(lw.VaLLA(4, alpha=alpha, steps=5), GIVEN, None)
    assert float(posterior.likelihood.dispersion) == pytest.approx(NOISE**2, rel=1e-12)


def test_energies_without_a_closed_form() -> None:
    x, y = classes()
    for likelihood, message in ((lw.Categorical(), "only Gaussian"), (lw.Categorical(link="mc"), "no gradient")):
        alpha = 0.5 if message == "only Gaussian" else 1.0
        with pytest.raises(lw.errors.UnsupportedError, match=message):
            lw.fit(MLP.build(), [(x, y)], likelihood, method=lw.VaLLA(4, alpha=alpha))


def test_tokens_have_no_predictive_to_learn_by() -> None:
    case = BY_NAME["token_level"]
    with pytest.raises(lw.errors.UnsupportedError, match=r"token-level outputs \(B, T, C\).* Use alpha=0"):
        problems.fit(case, lw.VaLLA(4, alpha=1.0))


def test_ignored_targets_have_no_predictive() -> None:
    x, y = classes()
    y = y.clone()
    y[3] = -100
    with pytest.raises(lw.errors.DataError, match="some targets are ignored ones"):
        lw.fit(MLP.build(), [(x, y)], "classification", method=lw.VaLLA(4, alpha=1.0))


def test_what_was_learned_by_predicting_has_no_evidence() -> None:
    posterior = fitted(METHODS["predicting"], lw.Gaussian(), None)
    for ask in (
        posterior.log_evidence,
        posterior.tuned,
        lambda: posterior.tuned(lw.tuners.FixedPoint()),
        lambda: posterior.tuned(lw.tuners.Grid()),
    ):
        with pytest.raises(
            lw.errors.UnsupportedError, match=r"has no evidence; compare it on held-out data, or fit VaLLA"
        ):
            ask()
    picked = posterior.tuned(lw.tuners.Grid([curve(10, 4)], (0.1, 1.0, 10.0)))
    assert bool(torch.isfinite(picked.functions(curve()[0]).cov).all())
    assert 0 <= posterior.effective_parameters().total <= 25


def test_a_prior_that_needs_the_curvature_is_refused() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"a g-prior follows the curvature, which VaLLA\(\)"):
        fitted(lw.VaLLA(4), prior=lw.priors.g_prior())


def test_a_kernel_of_zeros_is_refused() -> None:
    network = nn.Linear(2, 1, bias=False).double()
    x, y = torch.zeros(3, 2, dtype=D), torch.zeros(3, 1, dtype=D)
    for method in (lw.VaLLA(3), *METHODS.values(), lw.VaLLA(2, optimiser="lbfgs"), lw.VaLLA(2, alpha=1.0)):
        with pytest.raises(
            lw.errors.NumericalError, match=r"no output depends on the selected weights .* choose other weights"
        ):
            lw.fit(network, [(x, y)], lw.Gaussian(noise_std=1.0), method=method, prior=1.0)


@pytest.mark.parametrize("prior", [lw.isotropic(0.1), lw.per_layer(0.1)], ids=["one", "layers"])
def test_too_few_points_say_what_they_leave_out(prior: Any) -> None:
    """The factor is a lower bound of that by which variances at the data are too large, in units of the noise."""
    torch.manual_seed(0)
    x = torch.randn(60, 2, dtype=D)
    y = x.prod(1, keepdim=True)
    net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    fit = lambda method: lw.fit(net, [(x, y)], lw.Gaussian(noise_std=0.05), method=method, prior=prior)
    exact, few, all_points = fit(lw.Full()), fit(lw.VaLLA(4, optimiser="none")), fit(lw.VaLLA(60))
    (finding,) = few.findings
    assert f"Note: {finding}" in few.summary()
    said = re.search(
        r"carry (\S+) effective parameters \(gamma\) of at most (\S+) and leave out (\S+)% of the trace.* are at least "
        r"(\S+) times those of the exact .*num_inducing=(\d+)\)",
        finding,
    )
    assert said is not None
    carried, most, share, wider, points = map(float, said.groups())
    gamma = exact.effective_parameters().total
    assert carried <= 4
    assert carried < gamma <= 1.01 * most
    ratio = float(few.functions(x).variance.sum() / exact.functions(x).variance.sum()) ** 0.5
    assert 1.1 < wider <= 1.05 * ratio
    missing = float(few.functions(x).variance.sum()) / 0.05**2 - carried
    assert float(few.base.unseen_gamma().sum()) == pytest.approx(missing, rel=0.01)
    rows = torch.func.jacrev(lambda w: torch.func.functional_call(net, w, (x,)))(dict(net.named_parameters()))
    trace = sum(float(row.detach().square().sum()) for row in rows.values()) / (0.1 * 0.05**2)
    assert share == pytest.approx(100 * missing / trace, rel=0.05)
    assert 2 * gamma <= points or points == 60
    assert all_points.findings == ()


# What holds for VaLLA with every optimiser: inputs of all kinds, dtypes, generators, files, untouched models.


@cache
def in_context(method: Any, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the covariance at new inputs and the evidence, from twelve data in batches of these sizes."""
    torch.manual_seed(0)
    network, context = problems.InContext().double(), 0.3 * torch.randn(5, 3, dtype=D)
    x, y = torch.randn(12, 3, dtype=D), torch.randn(12, 1, dtype=D)
    data = [((a, context), b) for a, b in problems.split(x, y, sizes)]
    posterior = lw.fit(network, data, GIVEN, method=method, prior=1.0)
    evidence = posterior.log_evidence() if getattr(method, "alpha", 0.0) == 0 else torch.zeros(())
    return posterior.functions((x[:8] + 0.1, context)).cov, evidence


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (7, 5), (4, 4, 4)])
@pytest.mark.parametrize(
    "method",
    [lw.VaLLA(100), lw.VaLLA(5, candidates=5, optimiser="none"), lw.VaLLA(5, steps=4),
     lw.VaLLA(4, alpha=1.0, steps=5, batch_size=6)],
)  # fmt: skip
def test_a_context_for_all_samples(method: lw.VaLLA, sizes: tuple[int, ...]) -> None:
    """The cut into batches does not matter, and with points at all data the posterior is the exact one."""
    cov, evidence = in_context(method, sizes)
    assert_close(cov, in_context(method, (12,))[0], SOLVED)
    if method.num_inducing == 100:
        assert_close(cov, in_context(lw.Full(), (12,))[0], SOLVED)
        assert_close(evidence, in_context(lw.Full(), (12,))[1], SOLVED)


@pytest.mark.parametrize(("precision", "noise", "allowed"), [(1e-4, 0.01, 1e-2), (1e-2, 0.1, 1e-4), (1.0, 0.2, 1e-6)])
def test_all_data_are_exact_under_a_weak_prior_too(precision: float, noise: float, allowed: float) -> None:
    """A small noise and a weak prior make directions with small kernel eigenvalues matter."""
    x = torch.linspace(-3, 3, 120, dtype=D)[:, None]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    fit = lambda m: lw.fit(network, [(x, x.sin())], lw.Gaussian(noise_std=noise), method=m, prior=precision)
    posterior, full, new = fit(lw.VaLLA(120)), fit(lw.Full()), torch.linspace(-5, 5, 21, dtype=D)[:, None]
    ratio = posterior.functions(new).variance / full.functions(new).variance
    assert float((ratio - 1).abs().max()) < allowed
    assert float((posterior.log_evidence() - full.log_evidence()).abs()) < allowed
    some = fit(lw.VaLLA(30, optimiser="none")).log_evidence()
    assert float(some) < float(full.log_evidence()) + allowed


@pytest.mark.parametrize("way", [None, "lbfgs", "adam"])
@pytest.mark.parametrize("name", ["embedding", "tuple_input", "dict_input", "token_level"])
def test_inputs_without_a_gradient_keep_their_points(name: str, way: str | None) -> None:
    """For integers and several tensors the points are rows of the data, as with "none"."""
    case = BY_NAME[name]
    fit = lambda o: problems.fit(case, lw.VaLLA(4, optimiser=o, steps=3), prior=0.8)
    one, other = fit(way), fit("none")
    x = case.batch(3, seed=1)
    assert_close(one.functions(x).cov, other.functions(x).cov)
    assert_close(one.log_evidence(), other.log_evidence())


def test_files_hold_points_of_one_tensor(tmp_path: Path) -> None:
    learned, x = fitted(lw.VaLLA(4, alpha=1.0, steps=2)), curve()[0][:5]
    learned.save(tmp_path / "net")
    assert_close(lw.load(tmp_path / "net", learned.network.model).functions(x).cov, learned.functions(x).cov)
    several = problems.fit(BY_NAME["dict_input"], lw.VaLLA(4, optimiser="none"), prior=0.8)
    with pytest.raises(lw.errors.UnsupportedError, match="inducing points of several tensors have no file form"):
        several.save(tmp_path / "several")


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_fixed_points_learn_the_prior_too(alpha: float) -> None:
    case = BY_NAME["embedding"]
    posterior = problems.fit(case, lw.VaLLA(4, alpha=alpha, optimiser="adam", steps=5))
    assert float(posterior.prior.values) != 1.0
    assert not posterior.base.curvature.anchors.inputs.is_floating_point()


def test_a_network_without_rules_keeps_its_points_if_asked() -> None:
    case = BY_NAME["weight_norm"]
    fit = lambda o: problems.fit(case, lw.VaLLA(4, optimiser=o), prior=0.8)
    for way in ("lbfgs", "adam"):
        with pytest.raises(lw.errors.ModelError, match=r"has no rule .* keep the inputs where they are"):
            fit(way)
    assert bool(torch.isfinite(fit("none").functions(case.batch(3)).cov).all())


@pytest.mark.parametrize("way", ["lbfgs", "adam"])
def test_tokens_that_are_numbers(way: str) -> None:
    """Outputs (B, T, C) with inputs that can move."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(1)
    network, gen = Tokens().double(), torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 4, 2, dtype=D, generator=gen), torch.randint(0, 3, (6, 4), generator=gen)
    fit = lambda m: lw.fit(network, problems.split(x, y, (2, 4)), "classification", method=m, prior=0.8)
    before, after = (fit(lw.VaLLA(4, optimiser=o, steps=20, learning_rate=0.05)) for o in ("none", way))
    assert before.log_evidence() < after.log_evidence() < fit(lw.Full()).log_evidence()
    assert fit(lw.VaLLA(72)).trace is None  # all outputs of all tokens: nothing to learn
    assert_close(fit(lw.VaLLA(72)).log_evidence(), fit(lw.Full()).log_evidence(), SOLVED)


@pytest.mark.parametrize("seed", [0, 3])
def test_draws_are_independent_of_data_of_the_same_seed(seed: int) -> None:
    """With the random numbers that made the inputs, all chosen inputs would lie at one end."""
    x = torch.rand(500, 1, dtype=D, generator=torch.Generator().manual_seed(seed))
    given = None if seed == 0 else torch.Generator().manual_seed(seed)
    method = lw.VaLLA(20, start="random", optimiser="none", candidates=20)
    points = fitted(method, data=[(x, x)], generator=given).posterior.curvature.anchors.inputs
    assert float(points.min()) < 0.3
    assert float(points.max()) > 0.7


@pytest.mark.parametrize(
    "options", [{"steps": 20}, {"optimiser": "adam", "steps": 20}, {"alpha": 1.0, "steps": 20}], ids=str
)
def test_half_precision_gives_the_points_of_single_precision(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    small = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).half()
    whole = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    whole.load_state_dict(small.state_dict())
    x, y = torch.randn(40, 3).half(), torch.randn(40, 1).half()
    given: dict[str, Any] = {"likelihood": lw.Gaussian(noise_std=0.5), "prior": 1.0, "method": lw.VaLLA(5, **options)}
    std = lw.fit(small, [(x, y)], **given).functions(x).std
    expected = lw.fit(whole, [(x.float(), y.float())], **given).functions(x.float()).std
    torch.testing.assert_close(std, expected, rtol=0.01, atol=0.01)


# Every network with VaLLA is in tests/conformance/test_every_method.py; here are other ways of learning.


# Inducing points that are learned: the best state on validation data, and the prior that it gets.


def scored(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scores of all looks, each with its best prior variance, as they are taken; not the fine choice at the end."""
    looks: list[float] = []
    original = Validation.log_likelihoods

    def noted(self: Validation, *given: Any) -> list[float]:
        found = original(self, *given)
        looks.extend([max(found)] if given[1] != FINE else [])
        return found

    monkeypatch.setattr(Validation, "log_likelihoods", noted)
    return looks


def misleading(gap: float) -> tuple[list[Any], list[Any]]:
    """Training data at the network's outputs, validation data further off than what is learned allows for."""
    x, _ = curve()
    with torch.no_grad():
        f = model()(x)
    near = f + 0.01 * torch.randn(f.shape, dtype=D, generator=torch.Generator().manual_seed(3))
    return [(x, near)], [(x[::2], f[::2] + gap)]


@pytest.mark.parametrize(("gap", "best"), [(1.0, 0), (0.35, 1)], ids=["the first", "one on the way"])
def test_the_best_state_is_kept_and_not_the_last(gap: float, best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variances shrink step by step, and with them the density of data that are further off."""
    looks = scored(monkeypatch)
    data, held_out = misleading(gap)
    method = lw.VaLLA(5, alpha=1.0, steps=60, learning_rate=0.05, patience=4)
    posterior = fitted(method, lw.Gaussian(noise_std=0.3), None, data=data, validation=held_out)
    assert posterior.trace is not None
    assert looks.index(max(looks)) == best
    assert len(looks) == max(best, 2) + 5  # two early ones, and four without a better one that ended it
    assert len(posterior.trace.steps) == 3 * (len(looks) - 2) < 60
    score = float(posterior.predict(held_out[0][0]).log_prob(held_out[0][1]).mean())
    assert score >= max(looks) - 1e-5
    assert looks[-1] < max(looks) - 1e-3
    without = fitted(method, lw.Gaussian(noise_std=0.3), None, data=data)
    assert float(without.predict(held_out[0][0]).log_prob(held_out[0][1]).mean()) < looks[-1]


@pytest.mark.parametrize("gap", [0.1, 0.35, 0.6])
def test_more_steps_do_not_lose_what_fewer_found(gap: float) -> None:
    """A state is judged with the prior variance that validation data choose for it, as it is at the end."""
    data, held_out = misleading(gap)
    score = lambda p: float(p.predict(held_out[0][0]).log_prob(held_out[0][1]).mean())
    method = lw.VaLLA(5, alpha=1.0, learning_rate=0.05, patience=4)
    fit = lambda n: fitted(replace(method, steps=n), lw.Gaussian(), None, data=data, validation=held_out)
    few, many = score(fit(8)), score(fit(120))
    assert many >= few - 1e-3
    assert few > score(fitted(lw.baselines.MapOnly(), lw.Gaussian(), data=data)) + 0.1


def test_validation_data_that_approve_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look is better than the one before, so that the last state is the best."""
    rising = iter(range(100))
    monkeypatch.setattr(
        Validation, "log_likelihoods", lambda self, points, factors: [float(next(rising))] * len(factors)
    )
    method = lw.VaLLA(4, alpha=1.0, steps=20)
    keep = lambda posterior: posterior  # a tuner that leaves what the method has learned
    one = fitted(method, lw.Gaussian(), None, validation=[curve(seed=1)])
    other = fitted(method, lw.Gaussian(), None, tuner=keep)
    x = curve()[0]
    assert_close(one.functions(x).cov, other.functions(x).cov, SOLVED)


def test_the_prior_variance_is_chosen_once_more_and_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one pass for all factors; what they score is what a posterior with that prior variance does."""
    scores: list[list[float]] = []
    original = Validation.log_likelihoods

    def noted(self: Validation, *given: Any) -> list[float]:
        found = original(self, *given)
        scores.append(found)
        return found

    monkeypatch.setattr(Validation, "log_likelihoods", noted)
    data, held_out = misleading(0.6)
    method = lw.VaLLA(5, alpha=1.0, steps=40, learning_rate=0.05)
    found = fitted(method, lw.Gaussian(noise_std=0.3), None, data=data, validation=held_out)
    *looks, last = scores
    assert all(len(look) == len(COARSE) for look in looks)
    assert len(last) == len(FINE)
    assert last[len(FINE) // 2] == pytest.approx(max(map(max, looks)), abs=1e-9)
    assert max(last) > last[len(FINE) // 2] + 1e-4
    score = float(found.predict(held_out[0][0]).log_prob(held_out[0][1]).mean())
    assert score == pytest.approx(max(last), abs=1e-5)
    given = fitted(
        method, lw.Gaussian(noise_std=0.3), 0.5, data=data, validation=held_out
    )  # a prior that is given stays
    assert float(given.prior.values) == 0.5


def test_the_prior_variance_is_looked_for_further_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the best of the factors is the last of them; and where that never ends, it is said."""
    data, held_out = misleading(0.6)
    method = lw.VaLLA(5, alpha=1.0, steps=40, learning_rate=0.05)
    score = lambda p: float(p.predict(held_out[0][0]).log_prob(held_out[0][1]).mean())
    fit = lambda: fitted(method, lw.Gaussian(noise_std=0.3), None, data=data, validation=held_out)
    monkeypatch.setattr(module, "COARSE", (1.0,))
    wide = fit()
    monkeypatch.setattr(module, "FINE", (0.95, 1.0, 1.05))
    monkeypatch.setattr(module, "ROUNDS", 100)
    narrow = fit()
    assert score(narrow) == pytest.approx(score(wide), abs=2e-3)
    assert narrow.trace is not None
    assert narrow.trace.findings == ()
    monkeypatch.setattr(module, "ROUNDS", 2)
    unfinished = fit()
    assert score(unfinished) < score(wide) - 1e-2
    assert unfinished.trace is not None
    assert "prefer a prior variance beyond the range that was tried" in unfinished.trace.findings[-1]


def test_what_validation_data_chose_is_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the evidence, which alpha 0 has, and which may see it otherwise."""
    looks = scored(monkeypatch)
    data, held_out = misleading(1.0)
    method = lw.VaLLA(5, optimiser="adam", steps=40, learning_rate=0.05)
    posterior = fitted(method, lw.Gaussian(noise_std=0.3), None, data=data, validation=held_out)
    assert float(posterior.predict(held_out[0][0]).log_prob(held_out[0][1]).mean()) > max(looks) - 0.05
    assert not posterior.posterior.problem.learn_prior
    tuned = posterior.tuned(lw.tuners.MaximiseEvidence())
    assert float(tuned.predict(held_out[0][0]).log_prob(held_out[0][1]).mean()) < max(looks) - 0.5


def test_validation_data_for_the_bound() -> None:
    """With alpha 0 they choose the locations; what the points know is in closed form all the same."""
    posterior = fitted(lw.VaLLA(5, steps=20), validation=[curve(20, 5)])
    anchors = posterior.posterior.curvature.anchors
    z = dense.jacobian(model(), anchors.inputs, 5).flatten(0, 1)
    jac = dense.jacobian(model(), curve()[0], 40).flatten(0, 1)
    x = torch.linspace(-3, 3, 7, dtype=D)[:, None]
    new = dense.jacobian(model(), x, 7).flatten(0, 1)
    expected = inducing.covariance(new, z, jac, torch.eye(40, dtype=D) / NOISE**2, torch.full((25,), 0.5, dtype=D))
    assert_close(posterior.functions(x, joint=True).cov.reshape(7, 7), expected, SOLVED)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("likelihood", ["labels", "classes"])
def test_ignored_validation_targets_are_refused(likelihood: str, alpha: float) -> None:
    """They would be scored as if they were known."""
    x, y = classes()
    targets = (x[:, :3] > 0).double() if likelihood == "labels" else y
    chosen = lw.Bernoulli(ignore_index=-1) if likelihood == "labels" else lw.Categorical(ignore_index=-1)
    held = targets.clone()
    held[4] = -1
    method = lw.VaLLA(4, alpha=alpha, optimiser="adam", steps=3)
    with pytest.raises(lw.errors.DataError, match="some validation targets are ignored ones"):
        lw.fit(MLP.build(), [(x, targets)], chosen, method=method, prior=0.5, validation=[(x, held)])


def test_points_at_all_data_get_the_prior_that_validation_data_want() -> None:
    """Nothing moves there, but the prior is still to be chosen."""
    x, _ = curve()
    held = [curve(30, seed=5)]
    found = fitted(lw.VaLLA(len(x), steps=100, learning_rate=0.05), prior=None, validation=held)
    score = lambda posterior: float(posterior.predict(held[0][0]).log_prob(held[0][1]).mean())
    assert found.trace is not None
    for factor in (0.5, 2.0):
        other = found.with_prior(lw.isotropic(factor * float(found.prior.values)))
        assert score(other) < score(found)
    same = fitted(lw.Full(), prior=float(found.prior.values))
    assert_close(found.functions(x).variance, same.functions(x).variance, SOLVED)


def test_validation_data_are_named_where_they_do_not_fit() -> None:
    for count in (5, 100):
        with pytest.raises(lw.errors.DataError, match="validation is 3; expected a DataLoader"):
            fitted(lw.VaLLA(count), validation=3)
        with pytest.raises(lw.errors.DataError, match="inputs of batch 0 of validation: 1 of 2 entries are NaN"):
            fitted(lw.VaLLA(count), validation=[(torch.tensor([[torch.nan], [0.0]], dtype=D), torch.zeros(2, 1))])
