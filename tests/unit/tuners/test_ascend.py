"""A fixed number of Adam steps on the evidence."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME
from tests.references.evidence import Linearised, adam
from tests.tolerances import assert_close

D = torch.float64
METHODS: dict[str, Any] = {"full": lw.Full(), "kron": lw.Kron(), "diagonal": lw.Diagonal()}
LAYERS = torch.tensor([0] * 30 + [1] * 35 + [2] * 18)  # of the MLP's 83 weights


def setting() -> tuple[nn.Module, Tensor, Tensor]:
    case = BY_NAME["mlp"]
    return case.build(), case.batch(6), torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(3))


def regression(method: Any = None, prior: Any = 2.0, **likelihood: Any) -> lw.Fitted:
    model, x, y = setting()
    data = problems.split(x, y, (3, 1, 2))
    return lw.fit(model, data, lw.Gaussian(**likelihood), method=method or lw.Full(), prior=prior)


def at_its_mean(start: float) -> lw.Fitted:
    """Weights at the prior mean and data without noise: the evidence rises with the precision without end."""
    theta = torch.cat([p.detach().reshape(-1) for p in setting()[0].parameters()])
    return regression(prior=lw.isotropic(start, mean=theta), noise_std=1e-7)


@pytest.mark.parametrize("name", list(METHODS))
def test_the_evidence_rises(name: str) -> None:
    """Small steps from a precision of 2 in all layers raise the evidence; the last step of the trace is the result."""
    before = regression(METHODS[name], lw.per_layer(2.0))
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
    model, x, y = setting()
    reference = Linearised.of("gaussian", model, x, y)
    residual = (model(x) - y).detach().square().mean()

    def slope(at: Tensor, number: int) -> Tensor:
        at = at.clone().requires_grad_()
        value = reference.evidence(at[:3].exp()[LAYERS], at[3].exp() if noise else residual)
        return torch.autograd.grad(value / 83, at)[0]

    start = torch.stack([torch.tensor(2.0, dtype=D)] * 3 + [residual] * noise).log()
    expected = adam(slope, start, [0.2] * 7).exp()
    tuned = regression(prior=lw.per_layer(2.0)).tuned(lw.tuners.Ascend(steps=7, rate=0.2, noise=noise))
    assert_close(tuned.prior.values, expected[:3], 0.5)
    assert_close(tuned.likelihood.dispersion, expected[3] if noise else residual, 0.5)
    assert float((expected[:3] - 2).abs().min()) > 0.1  # it went somewhere


def test_a_noise_that_was_given_is_kept() -> None:
    assert regression(noise_std=0.5).tuned(lw.tuners.Ascend(steps=5)).likelihood.dispersion.item() == 0.25


def test_many_steps_end_at_the_optimum() -> None:
    best = regression(prior=lw.per_layer(2.0)).tuned()
    tuned = regression(prior=lw.per_layer(2.0)).tuned(lw.tuners.Ascend(steps=300, noise=False))
    assert float((tuned.prior.values.log() - best.prior.values.log()).abs().max()) < 1e-2


def test_no_steps_change_nothing() -> None:
    assert regression(prior=2.0).tuned(lw.tuners.Ascend(steps=0)).prior.values.item() == pytest.approx(2.0, rel=1e-15)


def test_it_works_where_gradients_are_off() -> None:
    posterior = regression(prior=lw.per_layer(2.0))
    expected = posterior.tuned(lw.tuners.Ascend(steps=5)).prior.values
    with torch.no_grad():
        assert torch.equal(posterior.tuned(lw.tuners.Ascend(steps=5)).prior.values, expected)
    with torch.inference_mode():
        assert torch.equal(posterior.tuned(lw.tuners.Ascend(steps=5)).prior.values, expected)
    assert not expected.requires_grad


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


def test_what_is_not_finite_ends_it() -> None:
    fitted = regression(prior=3.0)
    calls: list[int] = []

    class Failing(type(fitted.posterior)):  # type: ignore[misc]
        """A posterior whose evidence is finite three times and then NaN."""

        def log_evidence(self) -> Tensor:
            calls.append(1)
            value = super().log_evidence()
            return value if len(calls) < 4 else value * math.nan

    failing = Failing(**{f.name: getattr(fitted.posterior, f.name) for f in fields(fitted.posterior)})
    with pytest.raises(lw.errors.DivergedError, match="the evidence is not finite") as error:
        lw.tuners.Ascend()(failing)
    steps = error.value.trace.steps
    assert len(steps) == 4
    best = max(steps[:3], key=lambda step: step.score)
    assert error.value.posterior.problem.prior.values.item() == pytest.approx(best.precisions[0])


def test_no_evidence_no_ascent() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="no evidence to maximise"):
        regression(lw.baselines.MapOnly()).tuned(lw.tuners.Ascend())
    with pytest.raises(lw.errors.UnsupportedError, match="tuner is the class Ascend"):
        regression().tuned(lw.tuners.Ascend)
