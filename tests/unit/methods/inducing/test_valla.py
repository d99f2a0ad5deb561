"""VaLLA: defaults, prior and noise that are given, settings and problems that are refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.methods.inducing import valla as module
from lapwing.priors.given import PerLayer
from lapwing.runtime.trace import Step
from tests import problems
from tests.cases import BY_NAME
from tests.tolerances import SOLVED, assert_close
from tests.unit.methods.sine import GIVEN, NOISE, D, classes, curve, exact, fitted

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
            anchors=points.anchors.at(lost),
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


def test_progress_shows_the_objective(capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("lbfgs", "adam"):
        loud = fitted(METHODS[method], progress=True)
        assert "inducing points" in capsys.readouterr().err
        assert_close(loud.functions(curve()[0]).cov, fitted(METHODS[method], progress=False).functions(curve()[0]).cov)
        assert capsys.readouterr().err == ""


def test_the_methods_name() -> None:
    x = curve()[0]
    assert_close(fitted("valla").functions(x).cov, fitted(lw.VaLLA()).functions(x).cov, SOLVED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_inducing": 0}, "num_inducing is 0; expected at least 1"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"patience": 0}, "patience is 0; expected at least 1"),
        ({"candidates": 0}, "candidates is 0; expected at least 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a positive, finite number"),
        ({"learning_rate": math.nan}, "learning_rate is nan; expected a positive, finite number"),
        ({"alpha": -0.1}, "alpha is -0.1; expected a number between 0 and 1"),
        ({"alpha": 1.5}, "alpha is 1.5; expected a number between 0 and 1"),
        ({"start": "grid"}, "start is 'grid'; expected one of greedy, trace, kmeans, random"),
        ({"optimiser": "sgd"}, "optimiser is 'sgd'; expected one of lbfgs, adam, none"),
        ({"alpha": 1.0, "optimiser": "lbfgs"}, 'collapsed bound belongs to alpha=0; use optimiser="adam"'),
        ({"alpha": 0.5, "optimiser": "none"}, 'collapsed bound belongs to alpha=0; use optimiser="adam"'),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        lw.VaLLA(**settings)


def test_energies_without_a_closed_form() -> None:
    x, y = classes()
    for likelihood, message in ((lw.Categorical(), "only Gaussian"), (lw.Categorical(link="mc"), "no gradient")):
        alpha = 0.5 if message == "only Gaussian" else 1.0
        with pytest.raises(lw.errors.UnsupportedError, match=message):
            lw.fit(MLP.build(), [(x, y)], likelihood, method=lw.VaLLA(4, alpha=alpha))


def test_tokens_have_no_predictive_to_learn_by() -> None:
    case = BY_NAME["token_level"]
    with pytest.raises(lw.errors.UnsupportedError, match=r"token-level outputs \(B, T, C\).* Use alpha=0"):
        lw.fit(case.build(), problems.batches(case), "classification", method=lw.VaLLA(4, alpha=1.0))


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
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"g_prior\(\) takes its scale from the curvature.* before its points"
    ):
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
