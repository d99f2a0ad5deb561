"""``fit`` with validation data: every method, every form of the data, and data that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.posteriors.base import Posterior
from lapwing.posteriors.mixture import Belief, Cell, MixturePosterior
from tests.conformance.declared import SMALL, small_method
from tests.tolerances import assert_close

D = torch.float64
N = 40
DECAY = 0.01
KINDS = ("classification", "regression")
MINIMUM = ("hfl", "hfl pretrained")  # they need the prior that the network was trained with
SINGLE = [name for name in SMALL if name != "mixture_of_laplace"]  # which judges each of its networks by itself
Pair = tuple[Tensor, Tensor]


@cache
def problem(kind: str) -> tuple[nn.Module, Pair, Pair]:
    """Return a trained network with a dropout layer, its training data, and twice as many for validation."""
    gen = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=D, generator=gen)
    x = draw(3 * N, 2)
    signals = torch.stack([2 * x[:, 0], (2 * x[:, 1]).sin(), -x[:, 0] * x[:, 1]], 1)
    if kind == "classification":
        y, loss = (signals + 0.5 * draw(3 * N, 3)).argmax(1), nn.functional.cross_entropy
    else:
        y, loss = signals[:, :1] + signals[:, 1:2] + 0.3 * draw(3 * N, 1), nn.functional.mse_loss
    torch.manual_seed(0)
    outputs = 3 if kind == "classification" else 1
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, outputs)).double().eval()
    optimiser = torch.optim.LBFGS(net.parameters(), max_iter=150, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def objective() -> Tensor:
        optimiser.zero_grad()
        squares = torch.stack([p.square().sum() for p in net.parameters()]).sum()
        value: Tensor = loss(net(x[:N]), y[:N]) + 0.5 * DECAY * squares
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimiser.step(objective)  # type: ignore[no-untyped-call]
    net.zero_grad()
    return net, (x[:N], y[:N]), (x[N:], y[N:])


def trained_with(kind: str) -> float:
    """Return the precision of the prior that the weight decay of ``problem`` is."""
    net, (x, y), _ = problem(kind)
    return DECAY * N / (1.0 if kind == "classification" else 2 * float((net(x).detach() - y).square().mean()))


@cache
def validated(kind: str, setting: str) -> lw.Fitted:
    """Return the posterior of a method, whose settings are those of the conformance tests."""
    net, training, validation = problem(kind)
    prior = trained_with(kind) if setting in MINIMUM else None
    return lw.fit(net, training, kind, method=small_method(setting, net), prior=prior, validation=validation)


def fitted(kind: str, validation: Any, **options: Any) -> lw.Fitted:
    net, training, _ = problem(kind)
    return lw.fit(net, training, kind, validation=validation, **options)


@cache
def plain_nll(kind: str) -> float:
    net, training, validation = problem(kind)
    return nll(lw.fit(net, training, kind, method=lw.baselines.MapOnly()), validation)


def nll(posterior: lw.Fitted, data: Pair) -> float:
    return -float(posterior.predict(data[0]).log_prob(data[1]).mean())


def moments(posterior: lw.Fitted, kind: str, x: Tensor) -> Tensor:
    return moments_of(posterior.predict(x), kind)


def moments_of(predictive: Any, kind: str) -> Tensor:
    """Return numbers that tell two predictives apart."""
    if kind == "classification":
        probs: Tensor = predictive.probs
        return probs
    return torch.cat([predictive.mean, predictive.std, *predictive.interval(0.9)], 1)


def refuses(call: Callable[[], Any]) -> bool:
    """Return whether a call raises ``UnsupportedError``."""
    try:
        call()
    except lw.errors.UnsupportedError:
        return True
    return False


# Every method.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SINGLE)
def test_no_method_is_worse_than_the_plain_network(kind: str, setting: str) -> None:
    net, _, validation = problem(kind)
    before = deepcopy(net)
    posterior = validated(kind, setting)
    predictive = posterior.predict(validation[0])
    assert bool(torch.isfinite(moments_of(predictive, kind)).all())
    assert -float(predictive.log_prob(validation[1]).mean()) < plain_nll(kind) + 0.05
    for (name, one), other in zip(net.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.requires_grad
        assert one.grad is None
    assert not any(module.training for module in net.modules())
    assert posterior.trace is not None
    assert posterior.trace.tuner == "Integrate"
    assert set(posterior.trace.scores) >= {"plain network", "mixture"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SMALL)
def test_saved_loaded_and_moved(kind: str, setting: str, tmp_path: Path) -> None:
    net, _, (x, _) = problem(kind)
    posterior = validated(kind, setting)
    expected = moments(posterior, kind, x[:5])
    assert torch.equal(moments(posterior.to("cpu"), kind, x[:5]), expected)
    alone = lw.Fitted(posterior.base, posterior.fingerprint)
    no_file = refuses(lambda: alone.save(tmp_path / "alone"))
    assert refuses(lambda: posterior.save(tmp_path / "mixture")) == no_file
    if not no_file:
        again = lw.load(tmp_path / "mixture", net)
        assert_close(moments(again, kind, x[:5]), expected)
        assert_close(again.functions(x[:5]).cov, posterior.functions(x[:5]).cov)
        assert again.method == posterior.method
        assert again.summary() == posterior.summary()
        assert again.trace == posterior.trace
        assert getattr(again.base, "trace", None) == getattr(posterior.base, "trace", None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SMALL)
def test_functions_and_samples(kind: str, setting: str) -> None:
    x, size = problem(kind)[2][0][:4], 3 if kind == "classification" else 1
    posterior = validated(kind, setting)
    belief = posterior.functions(x)
    assert belief.std.shape == (4, size)
    assert bool(torch.isfinite(belief.std).all())
    assert_close(posterior.functions(x, joint=True).marginal.cov, belief.cov, 0.5)
    seeded = lambda: torch.Generator().manual_seed(3)
    if posterior.base.provides(Posterior.function_samples):
        draws = posterior.function_samples(x, 2, seeded())
        assert draws.shape == (2, 4, size)
        assert torch.equal(draws, posterior.function_samples(x, 2, seeded()))
    else:
        assert refuses(lambda: posterior.function_samples(x, 2))
    if posterior.base.provides(Posterior.weight_samples):
        assert posterior.weight_samples(2, seeded()).shape == (2, posterior.network.selection.size)
    else:
        assert refuses(lambda: posterior.weight_samples(2))


@pytest.mark.parametrize("setting", SMALL)
def test_what_belongs_to_the_base_is_asked_of_it(setting: str) -> None:
    """Evidence, effective parameters and other priors exist or are refused as without validation data."""
    posterior = validated("regression", setting)
    alone = lw.Fitted(posterior.base, posterior.fingerprint, posterior.method)
    for ask in (lw.Fitted.log_evidence, lw.Fitted.effective_parameters, lambda p: p.with_prior(2.0), lw.Fitted.tuned):
        assert refuses(lambda: ask(posterior)) == refuses(lambda: ask(alone))  # noqa: B023
    assert posterior.evidence_error == alone.evidence_error


@pytest.mark.parametrize(
    "method", [lw.Sampled(9), lw.baselines.MCDropout(samples=9), lw.baselines.SWAG(3, 2, batch_size=20)]
)
def test_draws_of_stored_samples_differ(method: Any) -> None:
    """The cells share a belief with a fixed list of samples; each draw takes another one of them."""
    net, training, (x, _) = problem("regression")
    alone = lw.fit(net, training, "regression", method=method, prior=1.0)
    cells = [Cell(0, alone.likelihood, scale) for scale in (0.25, 0.5, 1.0, 2.0)]
    mixture = MixturePosterior.of([alone.posterior], [Belief(0)], cells, torch.full((4,), 0.25, dtype=D))
    steps = (mixture.function_samples(x[:5], 8) - alone.functions(x[:5]).mean).flatten(1)
    assert torch.linalg.matrix_rank(steps, rtol=1e-6) > 3  # of five inputs


def test_an_ensemble_has_the_network_itself_as_a_cell() -> None:
    """Its mean is another function; where the other members are worse, the network alone has the weight."""
    net, training, validation = problem("regression")
    worse = deepcopy(net)
    nn.init.normal_(worse[3].weight, generator=torch.Generator().manual_seed(0))
    ensemble = lw.baselines.Ensemble(models=[worse.eval()])
    posterior = lw.fit(net, training, "regression", method=ensemble, validation=validation)
    assert_close(posterior.functions(validation[0]).mean, net(validation[0]).detach(), 0.3)
    plain = lw.fit(net, training, "regression", method=lw.baselines.MapOnly(), validation=validation)
    assert nll(posterior, validation) < nll(plain, validation) + 0.02


@pytest.mark.parametrize("setting", SINGLE)
def test_every_method_can_be_guarded_without_validation_data(setting: str) -> None:
    """A method without a precision to vary keeps as much of its spread as the budget allows."""
    kind = "classification"
    net, (x, y), _ = problem(kind)
    prior = trained_with(kind) if setting in MINIMUM else None
    guarded = lw.fit(net, (x, y), kind, method=small_method(setting, net), prior=prior, tuner=lw.tuners.Budget())
    assert isinstance(guarded.posterior, MixturePosterior)
    plain = lw.fit(net, (x, y), kind, method=lw.baselines.MapOnly())
    p, q = (posterior.predict(x).log_prob(y).exp() for posterior in (guarded, plain))
    assert float((1 - p / q).clamp_min(0).mean()) <= 0.005 * 1.001
    varied = "precision" if guarded.base.linearised else "covariance ×"
    assert f"{varied} " in guarded.posterior.describe()
    assert guarded.trace is not None
    assert guarded.trace.scores["mixture"] < guarded.trace.scores["plain network"] + 0.01


# The forms of validation data.


@pytest.mark.parametrize("kind", KINDS)
def test_loaders_batches_and_tensors_give_the_same(kind: str) -> None:
    x, y = validation = problem(kind)[2]
    forms: tuple[Any, ...] = (
        DataLoader(TensorDataset(x, y), batch_size=32),
        list(zip(x.split(50), y.split(50), strict=True)),
        [{"input": a, "y": b} for a, b in zip(x.split(50), y.split(50), strict=True)],
    )
    expected = fitted(kind, validation)
    for form in forms if kind == "classification" else forms[:1]:  # what reads them knows no likelihood
        posterior = fitted(kind, form)
        assert_close(moments(posterior, kind, x[:9]), moments(expected, kind, x[:9]), 0.5)
        assert posterior.trace is not None
        assert expected.trace is not None
        assert posterior.trace.scores == pytest.approx(expected.trace.scores)


def test_a_tuner_beside_validation_data_is_refused() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="validation data and a tuner were given"):
        fitted("regression", problem("regression")[2], tuner=lw.tuners.MaximiseEvidence())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [lw.Kron(), lw.VaLLA(5, steps=3), lw.Sampled(4)])
def test_a_given_prior_is_kept(kind: str, method: Any) -> None:
    posterior = fitted(kind, problem(kind)[2], method=method, prior=3.0)
    assert posterior.prior.values.tolist() == pytest.approx(3.0)
    assert isinstance(posterior.posterior, MixturePosterior)
    assert [belief.precisions for belief in posterior.posterior.beliefs] == [None]
    assert all(cell.scale > 0 for cell in posterior.posterior.cells)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "method", [lw.VaLLA(5, alpha=1.0, steps=12, learning_rate=0.2), lw.FMGP(5, steps=20, learning_rate=0.4)]
)
def test_early_stopping_uses_the_same_data(kind: str, method: Any) -> None:
    """What is mixed is the posterior of the method with these validation data."""
    net, training, validation = problem(kind)
    posterior = fitted(kind, validation, method=method)
    x = validation[0][:7]
    without = lw.fit(net, training, kind, method=method, tuner=lambda base: base)
    assert float((without.functions(x).cov - posterior.base(x).cov).abs().max()) > 1e-6


# Validation data that do not fit.


@pytest.mark.parametrize("method", [lw.Kron(), lw.VaLLA(5, steps=3), lw.FMGP(5, steps=3), lw.baselines.MapOnly()])
@pytest.mark.parametrize("kind", KINDS)
def test_unusable_validation_data_are_named(kind: str, method: Any) -> None:
    x, y = problem(kind)[2]
    nan = x.clone()
    nan[3, 1] = torch.nan
    wrong_targets = torch.full_like(y, 7) if kind == "classification" else y.expand(-1, 2)
    cases: dict[str, Any] = {
        "no batches": [],
        "no rows": (x[:0], y[:0]),
        "NaN inputs": (nan, y),
        "NaN later": [(x, y), (nan, y)],
        "too few targets": (x, y[:-1]),
        "targets of another shape": (x, torch.stack([y, y], -1)),
        "targets of another kind": (x, wrong_targets),
        "another kind later": [(x, y), (x, wrong_targets)],
        "no data": 3,
        "read once": iter([(x, y)]),
    }
    for data in cases.values():
        with pytest.raises(lw.errors.DataError, match="validation"):
            fitted(kind, data, method=method)


def test_validation_data_are_checked_before_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lw.Kron, "fit", lambda *given: pytest.fail("fitted before the validation data were checked"))
    x, y = problem("regression")[2]
    with pytest.raises(lw.errors.DataError, match="validation"):
        fitted("regression", (x, y[:-1]))


# Randomness, tokens, modes and dtypes.


@pytest.mark.parametrize("method", [lw.Sampled(4), lw.VaLLA(5, start="random", steps=3), lw.FMGP(5, steps=3)])
def test_seeds_fix_the_result(method: Any) -> None:
    validation = problem("classification")[2]
    x = validation[0][:9]
    fit = lambda generator: fitted("classification", validation, method=method, generator=generator).predict(x).probs
    seeded = lambda seed: torch.Generator().manual_seed(seed)
    state = torch.get_rng_state()
    first = fit(seeded(1))
    assert torch.equal(fit(seeded(1)), first)
    assert torch.equal(fit(None), fit(None))
    assert not torch.equal(fit(seeded(2)), first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("method", [None, lw.Full(), lw.KernelSpace(), lw.Sampled(4), lw.baselines.MapOnly()], ids=repr)
def test_tokens_with_ignored_targets(method: Any) -> None:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x = torch.randn(40, 6, 2, dtype=D)
    y = (net(x).detach() + 0.5 * torch.randn(40, 6, 3, dtype=D)).argmax(-1)
    y[torch.rand(40, 6) < 0.3] = -100
    y[25] = -100
    validation = (x[20:], y[20:])
    posterior = lw.fit(net, (x[:20], y[:20]), "classification", method=method, validation=validation)
    probs = posterior.predict(x[:3]).probs
    assert probs.shape == (3, 6, 3)
    assert_close(probs.sum(-1), torch.ones(3, 6, dtype=D))
    assert posterior.trace is not None
    by_hand = nn.functional.cross_entropy(net(x[20:]).detach().flatten(0, 1), y[20:].flatten())
    assert posterior.trace.scores["plain network"] == pytest.approx(float(by_hand), rel=1e-6)
    assert posterior.function_samples(x[:3], 2).shape == (2, 3, 6, 3)
    other = y.clone()
    other[20:, -1] = -100  # what is ignored may be anything
    changed = x.clone()
    changed[20:, -1] = 9.0
    fit = lambda inputs: lw.fit(net, (x[:20], y[:20]), "classification", method=method,
                                validation=(inputs[20:], other[20:])).predict(x[:3]).probs  # fmt: skip
    assert_close(fit(changed), fit(x))


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode(kind: str) -> None:
    net, training, validation = problem(kind)
    x = validation[0][:5]
    with torch.inference_mode():
        inside = lw.fit(net, training, kind, validation=validation)
        first, second = moments(inside, kind, x), moments(inside, kind, x)
    outside = fitted(kind, validation)
    assert torch.equal(first, second)
    assert_close(first, moments(outside, kind, x))
    with torch.inference_mode():
        assert torch.equal(moments(outside, kind, x), moments(outside, kind, x))
        assert outside.function_samples(x, 3).shape[0] == 3
    assert bool(torch.isfinite(outside.log_evidence()))


def test_validation_targets_in_other_units() -> None:
    """The noise would be fitted to them, and the network called bad."""
    net, (x, y), (x_held, y_held) = problem("regression")
    with pytest.warns(lw.errors.CalibrationWarning, match=r"validation: the mean squared residual .* in other units"):
        posterior = lw.fit(net, [(x, y)], "regression", validation=(x_held, 1000 * y_held))
    assert "in other units" in posterior.summary()
    assert not any(
        "units" in finding for finding in lw.fit(net, [(x, y)], "regression", validation=(x_held, y_held)).findings
    )


def test_weights_that_no_output_follows_are_named() -> None:
    """Such as a weight of which a closure keeps a copy from before the fit, without gradients."""

    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 1)
            copies: list[Tensor] = []
            self.weight = lambda: copies[0] if copies else copies.append(2 * self.body.weight) or copies[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x @ self.weight().mT).tanh())

    _, (x, y), _ = problem("regression")
    net = Copied().double().eval()
    with torch.no_grad():
        net(x)
    findings = lw.fit(net, [(x, y)], "regression", prior=1.0).findings
    assert any("do not follow 'body.weight' and 1 more of the chosen parameters" in finding for finding in findings)
    assert not any(
        "do not follow" in finding
        for finding in lw.fit(net.head, [(x @ x.mT[:, :4], y)], "regression", prior=1.0).findings
    )
