"""The mode "linearised": responses of the tangent model, which are the variances of Full."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.methods.hfl.hfl import LinearisedResponse
from tests import problems
from tests.cases import BY_NAME, cast
from tests.minima import copied, fitted, gapped, new, off, small
from tests.tolerances import SOLVED, assert_close

D = torch.float64
KINDS = [("gaussian", 3), ("categorical", 3), ("bernoulli", 2), ("poisson", 1)]


def test_solutions_and_their_residuals() -> None:
    energy = small("gaussian", 2)
    posterior = fitted(energy, lw.HFL(mode="linearised")).posterior
    rows = torch.randn(3, len(energy.theta), dtype=D)
    found = posterior.solved(rows)
    assert off(found.x, torch.linalg.solve(energy.ggn(), rows.T).T) < 1e-8
    assert found.converged
    assert float(found.residuals.max()) <= posterior.tolerance == 1e-10


def test_it_takes_fewer_iterations_than_there_are_weights() -> None:
    """In units of the prior only the directions that the data see need work."""
    energy = gapped()
    posterior = fitted(energy, lw.HFL(mode="linearised")).posterior
    found = posterior.solved(energy.jacobian(new(energy, 5)))
    assert found.iterations < 40 < len(energy.theta)


def test_rows_are_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    energy = small("gaussian", 2)
    x = new(energy, 5)
    found = fitted(energy, lw.HFL(mode="linearised"))
    whole, joint = found.functions(x).cov, found.functions(x, joint=True).cov
    monkeypatch.setattr("lapwing.methods.hfl.hfl.ROWS", 2)
    assert off(found.functions(x).cov, whole) < 1e-8
    assert off(found.functions(x, joint=True).cov, joint) < 1e-8


def test_a_loose_tolerance_costs_its_square() -> None:
    """Off by less than a hundredth at a tolerance of a tenth."""
    energy = small()
    x = new(energy, 1)
    exact = energy.each(x, energy.ggn())
    loose, tight = (
        off(fitted(energy, lw.HFL(mode="linearised", tolerance=t)).functions(x).cov, exact) for t in (0.1, 1e-10)
    )
    assert tight < 1e-9
    assert 1e-7 < loose < 1e-2


def test_single_precision_has_a_tolerance_that_it_can_reach() -> None:
    """Noise of 0.05 with forty data, and products rounded to seven digits."""
    energy = gapped()
    model = copied(energy).model.float()
    x = new(energy, 5)
    found = lw.fit(model, [(energy.x.float(), energy.y.float())], lw.Gaussian(noise_std=0.05),
                   method=lw.HFL(mode="linearised"), prior=1.0)  # fmt: skip
    exact = energy.each(x, copied(energy, phi=0.0025).ggn())
    assert off(found.functions(x.float()).cov, exact) < 1e-3


def test_iterations_that_run_out_are_an_error() -> None:
    posterior = fitted(gapped(), lw.HFL(mode="linearised")).posterior
    with pytest.raises(lw.errors.NumericalError, match=r"stopped after 2 iterations with a relative residual of"):
        replace(posterior, max_iterations=2)(new(gapped()))


def test_data_that_are_not_kept_are_passed_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["token_level"]
    data, inputs = problems.batches(case), case.batch(2, seed=1)
    full = lw.fit(case.build(), data, "classification", method=lw.Full(), prior=0.7).functions(inputs).cov
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    found = lw.fit(case.build(), data, "classification", method=lw.HFL(mode="linearised"), prior=0.7)
    assert found.posterior.design.streamed
    assert_close(found.functions(inputs).cov, full, 1 / 2)


@pytest.mark.parametrize(("kind", "outputs"), KINDS)
def test_the_tangent_model_has_the_variance_of_the_ggn(kind: str, outputs: int) -> None:
    energy = small(kind, outputs)
    x = new(energy)
    found = fitted(energy, lw.HFL(mode="linearised"))
    assert off(found.functions(x).cov, energy.each(x, energy.ggn())) < 1e-8
    joint = found.functions(x, joint=True).cov.reshape(3 * outputs, 3 * outputs)
    assert off(joint, energy.covariance(x, energy.ggn())) < 1e-8


@pytest.mark.parametrize("lam", [None, 1e-12, 1e6])
def test_the_tangent_model_responds_alike_to_every_strength(lam: float | None) -> None:
    """On the task with a gap, to 1e-8: its loss is quadratic."""
    energy = gapped()
    x = torch.linspace(-2.5, 2.5, 11, dtype=D).unsqueeze(1)
    found, full = (fitted(energy, method).functions(x) for method in (lw.HFL(mode="linearised", lam=lam), lw.Full()))
    assert float((found.cov / full.cov - 1).abs().max()) < 1e-8


@cache
def exact_variance(prior: float, place: float) -> Tensor:
    variance: Tensor = much_data(prior, place, lw.Full()).functions(torch.tensor([[place]])).variance
    return variance


def much_data(prior: float, place: float, method: Any) -> lw.Fitted:
    """Single precision, and a hundred times the data."""
    energy = gapped()
    data = [(energy.x.float().repeat(100, 1), energy.y.float().repeat(100, 1))]
    model = copied(energy).model.float()
    return lw.fit(model, data, lw.Gaussian(noise_std=0.15), method=method, prior=prior)


@pytest.mark.parametrize("place", [-2.5, 0.0, 1.5])
def test_single_precision_and_much_data(place: float) -> None:
    """Variances of a millionth of the prior's: residuals must be small beside these, not only beside the push."""
    found = much_data(0.1, place, lw.HFL(mode="linearised")).functions(torch.tensor([[place]]))
    assert_close(found.variance, exact_variance(0.1, place), SOLVED)


@pytest.mark.parametrize(("prior", "place"), [(1e3, 1.5), (1.0, 1.5), (0.1, 0.0)])
def test_single_precision_throughout_converges_or_raises(prior: float, place: float) -> None:
    """Near the limit of float32 rounding decides: what converges is right, and the error says why the rest does not.

    A strong prior is far from that limit, and a weak one far beyond it.
    """
    found = much_data(prior, place, lw.HFL(mode="linearised", dtype=torch.float32))
    try:
        variance = found.functions(torch.tensor([[place]])).variance
    except lw.errors.NumericalError as error:
        assert prior < 1e3
        assert re.search(r"a relative residual of \S+; expected .*take float64", str(error))  # noqa: PT017
    else:
        assert prior > 0.1
        assert_close(variance, exact_variance(prior, place), 1 / 3)


def test_another_prior_for_the_tangent_model() -> None:
    """No data are touched besides those that it holds."""
    energy = small()
    x = new(energy)
    moved = fitted(energy, lw.HFL(mode="linearised")).with_prior(3.0)
    assert off(moved.functions(x).cov, energy.each(x, copied(energy, precision=3.0).ggn())) < 1e-8
    with pytest.raises(lw.errors.UnsupportedError, match="no prior over weights to change"):
        fitted(energy, lw.HFL()).with_prior(3.0)


@pytest.mark.parametrize("validated", [False, True])
def test_mixtures_vary_the_precision_as_those_of_the_exact_posterior(validated: bool) -> None:
    """With validation data, and within the budget: the same cells around Full predict the same."""
    energy = small("categorical", 3)
    validation = (new(energy, 40, seed=8), torch.arange(40) % 3) if validated else None
    mixture = fitted(energy, lw.HFL(mode="linearised"), prior=None, validation=validation)
    beliefs = mixture.posterior.beliefs
    assert len({float(belief.precisions) for belief in beliefs}) == len(beliefs) > 1
    full = fitted(energy, lw.Full(), prior=float(mixture.prior.values))
    same = replace(mixture, posterior=replace(mixture.posterior, bases=(full.posterior,)))
    inputs = new(energy)
    assert off(mixture.predict(inputs).probs, same.predict(inputs).probs) < 1e-8
    assert off(mixture.functions(inputs).cov, same.functions(inputs).cov) < 1e-8


def test_a_g_prior_is_refused_later_too() -> None:
    found = fitted(small(), lw.HFL(mode="linearised"))
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"keeps no curvature, and g_prior\(\) needs one; use Full\(\)"
    ):
        found.with_prior(lw.priors.g_prior(1.0))


def test_data_in_another_order_at_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tangent model needs its rows again; where they are not kept, a loader that shuffles is refused."""
    energy, gen = small(), torch.Generator().manual_seed(3)

    class Shuffled:
        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(25, generator=gen)
            yield energy.x[order], energy.y[order]

    x = new(energy)
    found = fitted(energy, lw.HFL(mode="linearised"), data=Shuffled())
    assert isinstance(found.posterior, LinearisedResponse)
    assert off(found.functions(x).cov, energy.each(x, energy.ggn())) < 1e-8
    assert off(fitted(energy, lw.HFL(), data=Shuffled()).functions(x).cov, energy.each(x)) < 1e-6
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    with pytest.raises(lw.errors.DataError, match="two passes over the data gave different rows"):
        fitted(energy, lw.HFL(mode="linearised"), data=Shuffled())


def test_float32_data_of_tokens() -> None:
    """Whole numbers stay whole where everything else is widened."""
    case = BY_NAME["embedding"]
    data = problems.batches(case, dtype=torch.float32)
    narrow = lw.fit(case.build(torch.float32), data, "classification", method=lw.HFL(mode="linearised"), prior=0.7)
    wide = lw.fit(case.build(torch.float32).double(), data, "classification", method=lw.Full(), prior=0.7)
    inputs = case.batch(3, torch.float32, seed=1)
    assert_close(narrow.functions(inputs).cov, wide.functions(cast(inputs, D)).cov, SOLVED)
