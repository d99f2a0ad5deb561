"""More data: the same posterior as a fit to all of them, at equal weights, prior and noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import DataError, FileError, ModelError, UnsupportedError
from tests.tolerances import assert_close

N, OLD = 23, slice(0, 13)
NEW = slice(13, N)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


X, NUMBERS, LABELS = drawn(1, N, 3), drawn(2, N, 4), torch.arange(N) % 4
METHODS = [
    lw.Full(), lw.Full(curvature="empirical"), lw.Diagonal(), lw.Kron(), lw.Kron(sharing="reduce", full_limit=3),
    lw.KernelSpace(),
]  # fmt: skip


def assert_same(one: Any, other: Any) -> None:
    """Two posteriors under the same hyperparameters."""
    assert one.statistics.data == other.statistics.data == N
    assert_close(one(X).cov, other(X).cov)
    assert_close(one.log_evidence(), other.log_evidence())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_equals_the_fit_to_all_data(net, method):
    likelihood, y = (lw.Gaussian(0.3), NUMBERS) if method == lw.KernelSpace() else (lw.Categorical(), LABELS)
    options = {"likelihood": likelihood, "method": method, "prior": 2.0}
    whole = lw.fit(net, [(X, y)], **options)
    more = lw.fit(net, [(X[OLD], y[OLD])], **options).updated([(X[13:16], y[13:16]), (X[16:], y[16:])])
    assert_same(more.base, whole.base)
    assert_close(more.predict(X).log_prob(y), whole.predict(X).log_prob(y))


@pytest.mark.parametrize("likelihood", [lw.Gaussian(), lw.Gaussian(per_output=True)])
def test_prior_and_noise_stay_and_then_equal_the_fit_to_all_data(net, likelihood):
    before = lw.fit(net, [(X[OLD], NUMBERS[OLD])], likelihood, tuner=lw.tuners.MaximiseEvidence())
    after = before.updated((X[NEW], NUMBERS[NEW]))
    assert torch.equal(after.prior.values, before.prior.values)
    assert torch.equal(after.likelihood.noise_variance, before.likelihood.noise_variance)
    whole = lw.fit(net, [(X, NUMBERS)], likelihood, prior=1.0).base
    assert_same(after.base, whole.with_problem(after.base.problem))
    noise = 2 * after.base.noise  # the losses of the outputs are right apart, too
    assert_close(
        after.base.with_noise(noise).log_evidence(),
        whole.with_problem(after.base.problem).with_noise(noise).log_evidence(),
    )


@pytest.mark.parametrize("y", [LABELS, NUMBERS], ids=["classes", "numbers"])
def test_default_mixture_updates_all_its_posteriors(net, y, tmp_path):
    likelihood = "classification" if y is LABELS else "regression"
    before = lw.fit(net, [(X[OLD], y[OLD])], likelihood)
    before.save(tmp_path / "net")
    after = before.updated([(X[NEW], y[NEW])])
    assert torch.equal(after.posterior.weights, before.posterior.weights)
    for base in after.posterior.bases:
        method = base.method
        whole = lw.fit(net, [(X, y)], likelihood, method=method, prior=1.0).base
        assert_same(base, whole.with_problem(base.problem))
    again = lw.load(tmp_path / "net", net).updated([(X[NEW], y[NEW])])
    assert_close(again.predict(X).log_prob(y), after.predict(X).log_prob(y))
    assert "10 data were added later" in after.summary()
    after.save(tmp_path / "more")
    assert lw.load(tmp_path / "more", net).base.statistics.data == N


def test_images_and_weights_are_read_as_in_the_fit():
    torch.manual_seed(0)
    net = nn.Conv2d(2, 3, 1).double()
    x, y = drawn(4, 5, 2, 4, 3), torch.arange(60).reshape(5, 4, 3) % 3
    w = torch.tensor([1.0, 2, 0.5, 1, 3])
    whole = lw.fit(net, lw.samples.weighted((x, y, w)), "classification", prior=1.0)
    half = lw.fit(net, lw.samples.weighted((x[:2], y[:2], w[:2])), "classification", prior=1.0)
    more = half.updated(lw.samples.weighted((x[2:], y[2:], w[2:])))
    assert more.base.statistics.data == whole.base.statistics.data == 12 * 7.5
    assert_close(more.functions(x).variance, whole.functions(x).variance)
    assert_close(more.log_evidence(), whole.log_evidence())


@pytest.mark.parametrize("limit", [8192, 100])
def test_wide_factors_take_the_form_that_all_data_give_them(limit, tmp_path):
    """Rows that become more: they stay rows, or above the limit of the method become a diagonal, after a file too."""
    torch.manual_seed(0)
    wide = nn.Linear(600, 2).double()
    x, y = drawn(6, 23, 600), LABELS % 2
    options = {"likelihood": "classification", "method": lw.Kron(factor_limit=limit), "prior": 1.0}
    whole = lw.fit(wide, [(x, y)], **options)
    half = lw.fit(wide, [(x[OLD], y[OLD])], **options)
    half.save(tmp_path / "half")
    for before in (half, lw.load(tmp_path / "half", wide)):
        more = before.updated([(x[NEW], y[NEW])])
        assert type(more.base.curvature.blocks[0].inp) is type(whole.base.curvature.blocks[0].inp)
        assert_close(more.functions(x).cov, whole.functions(x).cov)
        assert_close(more.log_evidence(), whole.log_evidence())


def test_drawn_labels_give_a_sum_of_estimates(net):
    method = lw.Full(curvature="fisher_mc", draws=2)
    fits = {"likelihood": lw.Categorical(), "method": method, "prior": 1.0}
    one = lw.fit(net, [(X[OLD], LABELS[OLD])], **fits)
    generator = lambda: torch.Generator().manual_seed(3)
    other = lw.fit(net, [(X[NEW], LABELS[NEW])], generator=generator(), **fits)
    total = one.updated([(X[NEW], LABELS[NEW])], generator=generator())
    assert_close(total.base.curvature.matrix, one.base.curvature.matrix + other.base.curvature.matrix)
    assert total.base.estimate.draws == 2


@pytest.mark.parametrize("method", [lw.EKron(), lw.LowRank(), lw.Sampled(), lw.ELLA(), lw.VaLLA()], ids=repr)
def test_methods_that_are_no_sums_refuse(net, method):
    fitted = lw.fit(net, [(X, LABELS)], "classification", method=method, prior=1.0)
    with pytest.raises(UnsupportedError, match="Full, Diagonal, Kron"):
        fitted.updated([(X, LABELS)])


def test_an_optimum_of_the_old_data_is_refused(net):
    fitted = lw.fit(net, [(X, NUMBERS)], lw.Gaussian(0.3), method=lw.Full(), prior=1.0, tuner=lw.tuners.LinearMode())
    with pytest.raises(UnsupportedError, match="belongs to the old data"):
        fitted.updated([(X, NUMBERS)])


def test_other_data_and_other_weights_are_refused(net):
    fitted = lw.fit(net, [(X, LABELS)], "classification", prior=1.0)
    with pytest.raises(DataError, match="targets run from 0 to 9"):
        fitted.updated([(X, torch.arange(N) % 10)])
    with pytest.raises(DataError, match="new data is empty"):
        fitted.updated([])
    with pytest.raises(UnsupportedError, match="generator is 3"):
        fitted.updated([(X, LABELS)], generator=3)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    fitted = lw.fit(other, [(X, LABELS)], "classification", prior=1.0)
    with torch.no_grad():
        other[0].weight.add_(1)
    with pytest.raises(ModelError, match="changed"):
        fitted.updated([(X, LABELS)])


def test_two_methods_of_one_name_are_refused():
    from lapwing.posteriors.weight_space import SumsData

    with pytest.raises(UnsupportedError, match="already know a method 'Kron'"):
        type("Kron", (SumsData,), {})


def test_a_damaged_method_is_refused(net):
    from lapwing.posteriors.weight_space import SummedBy
    from lapwing.runtime.state import State

    state = SummedBy.state(lw.Kron(sharing="reduce"))
    assert SummedBy.from_state(state) == lw.Kron(sharing="reduce")
    for settings in ({**state.settings, "name": "Other"}, {**state.settings, "draws": 0}, {"name": "Kron"}):
        with pytest.raises(FileError):
            SummedBy.from_state(State("SummedBy", settings))
