"""A mixture of Laplace approximations over several networks: the average of what each network says by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.tolerances import assert_close, assert_near, assert_within

D = torch.float64
TOTAL, INPUTS, CLASSES = 14, 4, 3
X = torch.randn(TOTAL, INPUTS, dtype=D, generator=torch.Generator().manual_seed(1))
NEW = torch.randn(5, INPUTS, dtype=D, generator=torch.Generator().manual_seed(2))
LABELS = torch.randint(0, CLASSES, (TOTAL,), generator=torch.Generator().manual_seed(3))
TARGETS = torch.randn(TOTAL, CLASSES, dtype=D, generator=torch.Generator().manual_seed(4))
DATA: dict[str, Any] = {"classification": [(X, LABELS)], "regression": [(X, TARGETS)]}
SHARES = (0.7, 0.2, 0.1)


def net(seed: int, units: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, units), nn.Tanh(), nn.Linear(units, CLASSES)).double().eval()


def nets() -> list[nn.Module]:
    """Three networks, one of another width: nothing but the outputs must agree."""
    return [net(0), net(1), net(2, units=7)]


def mixture(kind: str = "classification", shares: Any = None, method: Any = None, **options: Any) -> lw.Fitted:
    first, *others = nets()
    method = lw.baselines.MixtureOfLaplace(others, method or lw.Kron(), shares)
    return lw.fit(first, DATA[kind], kind, method=method, **options)


def each(kind: str = "classification", method: Any = None, **options: Any) -> list[lw.Fitted]:
    return [lw.fit(one, DATA[kind], kind, method=method or lw.Kron(), **options) for one in nets()]


def averaged(parts: list[Tensor], shares: Any) -> Tensor:
    weights = torch.tensor(shares or [1 / 3] * 3, dtype=D)
    return torch.einsum("k,k...->...", weights, torch.stack(parts))


METHODS = {"kron": None, "full": lw.Full(), "map": lw.baselines.MapOnly(), "sampled": lw.Sampled(num_samples=8)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shares", [None, SHARES])
def test_probabilities_are_the_average_of_all_networks(method: str, shares: Any) -> None:
    found = mixture(shares=shares, method=METHODS[method], prior=2.0)
    expected = averaged([one.predict(NEW).probs for one in each(method=METHODS[method], prior=2.0)], shares)
    assert_close(found.predict(NEW).probs, expected)


def test_a_regression_has_the_density_of_the_mixture() -> None:
    found, parts = mixture("regression", SHARES, prior=2.0), each("regression", prior=2.0)
    y = torch.randn(5, CLASSES, dtype=D, generator=torch.Generator().manual_seed(5))
    density = averaged([one.predict(NEW).log_prob(y).exp() for one in parts], SHARES)
    assert_close(found.predict(NEW).log_prob(y).exp(), density)
    assert_close(found.predict(NEW).mean, averaged([one.predict(NEW).mean for one in parts], SHARES))


def test_functions_have_the_moments_of_the_mixture() -> None:
    found, beliefs = mixture(shares=SHARES, prior=2.0), [one.functions(NEW, joint=True) for one in each(prior=2.0)]
    mean = averaged([belief.mean for belief in beliefs], SHARES)
    size = mean.numel()
    gaps = [(belief.mean - mean).flatten() for belief in beliefs]
    second = [b.cov.reshape(size, size) + torch.outer(gap, gap) for b, gap in zip(beliefs, gaps, strict=True)]
    cov = averaged(second, SHARES)
    assert_close(found.functions(NEW).mean, mean)
    assert_close(found.functions(NEW, joint=True).cov.reshape(size, size), cov)
    assert_close(found.functions(NEW).variance.flatten(), cov.diagonal())
    for b in range(5):
        rows = slice(b * CLASSES, (b + 1) * CLASSES)
        assert_close(found.functions(NEW).cov[b], cov[rows, rows])


def test_drawn_functions_have_the_moments_of_the_mixture() -> None:
    found = mixture(shares=SHARES, prior=2.0)
    draws = found.function_samples(NEW, 4000, torch.Generator().manual_seed(0))
    assert_within(draws, found.functions(NEW).mean)
    assert_within((draws - found.functions(NEW).mean).square(), found.functions(NEW).variance)
    again = found.function_samples(NEW, 7, torch.Generator().manual_seed(3))
    assert torch.equal(again, found.function_samples(NEW, 7, torch.Generator().manual_seed(3)))


def test_every_network_learns_its_own_prior_and_noise() -> None:
    """Without a prior each network gets the mixture over precisions that ``fit`` gives one network."""
    found, parts = mixture("regression"), each("regression")
    precisions = {float(one.prior.values) for one in parts}
    assert len(precisions) == 3
    assert_close(found.predict(NEW).std, mixed_std(parts))
    assert found.trace is not None
    assert found.trace.tuner == "Budget for each network"
    for name, score in found.trace.scores.items():
        of_each = name.removesuffix(", mean of the networks")  # the mixture is not scored
        assert of_each != name
        assert score == pytest.approx(sum(one.trace.scores[of_each] for one in parts) / 3)
    assert found.trace.scores
    assert {float(base.problem.prior.values) for base in found.posterior.mixture.bases} >= precisions


def mixed_std(parts: list[lw.Fitted]) -> Tensor:
    """Return the standard deviation of the equal mixture of predictives."""
    mean = averaged([one.predict(NEW).mean for one in parts], None)
    second = averaged([one.predict(NEW).std.square() + (one.predict(NEW).mean - mean).square() for one in parts], None)
    return second.sqrt()


def test_validation_data_calibrate_every_network() -> None:
    held_out = (X[:9] + 0.3, LABELS[:9])
    found, parts = mixture(validation=held_out), each(validation=held_out)
    assert_close(found.predict(NEW).probs, averaged([one.predict(NEW).probs for one in parts], None))


def test_many_classes_are_predicted_from_drawn_functions() -> None:
    torch.manual_seed(0)
    wide = [nn.Sequential(nn.Linear(INPUTS, 2), nn.Tanh(), nn.Linear(2, 300)).double().eval() for _ in range(2)]
    method = lw.baselines.MixtureOfLaplace(wide[1:], lw.Diagonal(draws=1, curvature="fisher_mc"))
    found = lw.fit(wide[0], [(X, LABELS)], "classification", method=method, prior=1e4)  # little spread
    probs = found.predict(NEW).probs
    assert_close(probs.sum(-1), torch.ones(5, dtype=D))
    assert torch.equal(probs, found.predict(NEW).probs)
    softmax = torch.stack([one(NEW).detach().softmax(-1) for one in wide])
    assert_near(probs, softmax.mean(0), 0.02 * float(softmax.max()))
    assert float((softmax[0] - softmax.mean(0)).abs().max()) > 0.1 * float(softmax.max())  # one network is not enough


# What changes and what does not


def test_no_network_is_changed_and_a_changed_one_is_noticed() -> None:
    first, second = net(0), net(1)
    method = lw.baselines.MixtureOfLaplace([second])
    run = lambda: lw.fit(first, DATA["classification"], "classification", method=method, prior=1.0)
    found = problems.unchanged(first, lambda: problems.unchanged(second, run))
    problems.unchanged(second, lambda: found.functions(NEW, joint=True).cov)
    with torch.no_grad():
        second[0].weight += 1
    for call in (found.predict, found.functions, lambda x: found.function_samples(x, 2)):
        with pytest.raises(lw.errors.ModelError, match=r"'0\.weight' has changed since the fit"):
            call(NEW)


def test_on_another_device_every_network_goes_along() -> None:
    found = mixture(prior=1.0)
    assert_close(found.to("cpu").predict(NEW).probs, found.predict(NEW).probs)


# What is refused


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "models": ({"models": [nn.Linear]}, lw.errors.ModelError, "expected a list of trained"),
    "method": ({"method": lw.Kron}, lw.errors.UnsupportedError, "method is the class Kron, not an object; expected"),
    "share": (
        {"shares": [1.0, -1.0]},
        lw.errors.UnsupportedError,
        r"shares is \[1\.0, -1\.0\]; expected a list of pos",
    ),
    "nan": ({"shares": [1.0, float("nan")]}, lw.errors.UnsupportedError, r"shares is .*nan.*; expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings(name: str) -> None:
    settings, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        lw.baselines.MixtureOfLaplace(**settings)


def test_networks_that_do_not_fit_together() -> None:
    fit = lambda **settings: lw.fit(
        net(0), DATA["classification"], "classification", method=lw.baselines.MixtureOfLaplace(**settings), prior=1.0
    )
    with pytest.raises(lw.errors.UnsupportedError, match=r"has one network; expected others: models="):
        fit()
    with pytest.raises(lw.errors.UnsupportedError, match="shares has 3 numbers and there are 2 networks"):
        fit(models=[net(1)], shares=SHARES)
    other = nn.Linear(INPUTS, CLASSES + 2).double()
    with pytest.raises(lw.errors.ModelError, match=r"network 1 has outputs of the shape \(5,\); expected \(3,\)"):
        fit(models=[other])
    noisy = nn.Sequential(nn.Dropout(), nn.Linear(INPUTS, CLASSES)).double()
    with pytest.raises(lw.errors.ModelError, match="is in training mode"):
        fit(models=[noisy])


def test_members_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    found = mixture(prior=1.0)
    for call in (found.log_evidence, found.effective_parameters, lambda: found.weight_samples(2)):
        with pytest.raises(lw.errors.UnsupportedError, match="MixtureOfLaplace has no"):
            call()
    with pytest.raises(lw.errors.UnsupportedError, match="a file does not hold networks; save those and fit again"):
        found.save(tmp_path / "it")
    assert (
        "A mixture of the posteriors of 3 networks; the prior and noise shown are those of the first."
        in found.summary()
    )


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("method", [lw.baselines.MixtureOfLaplace, lw.baselines.Ensemble])
def test_several_networks_have_no_jacobian(method: Any, validated: bool) -> None:
    first, *others = nets()
    options: dict[str, Any] = {"validation": [(NEW, LABELS[:5])]} if validated else {"prior": 2.0}
    posterior = lw.fit(first, DATA["classification"], "classification", method=method(others), **options)
    for name in ("jacobian", "ggn"):
        with pytest.raises(lw.errors.UnsupportedError, match=rf"several networks.*one network for {name}\(\)"):
            getattr(posterior, name)(DATA["classification"])
