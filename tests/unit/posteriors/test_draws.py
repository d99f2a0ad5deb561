"""Functions that are drawn from a posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.networks import passes as directional
from lapwing.networks.tangent import Tangent
from lapwing.posteriors import base as posteriors
from lapwing.posteriors.base import Posterior, allot, draw_numbers
from lapwing.posteriors.mixture import Belief, Cell, MixturePosterior
from lapwing.predictives.labels import AveragedClasses, SoftmaxPredictive, SoftmaxSamples
from lapwing.values.gaussian import FunctionSamples
from tests.references import dense
from tests.tolerances import assert_close

# Predictions from drawn functions against dense Jacobians, and when they are chosen.

D = torch.float64
MANY, FEW, SIZE = 260, 5, 6
WEIGHTS = torch.tensor([0.4, 0.25, 0.2, 0.15], dtype=D)


@cache
def fitted(kind: str, classes: int, method: Any = lw.Kron()) -> tuple[lw.Fitted, Tensor]:  # noqa: B008
    torch.manual_seed(1)
    x = torch.randn(20, 3, dtype=D)
    targets = {
        "classification": torch.randint(0, classes, (20,)),
        "multilabel": torch.randint(0, 2, (20, classes)).to(D),
        "regression": torch.randn(20, classes, dtype=D),
    }
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, classes)).double().eval()
    return lw.fit(net, (x, targets[kind]), kind, method=method, prior=2.0), x[:SIZE]


def mixture(posterior: lw.Fitted) -> lw.Fitted:
    """Two precisions, the second at two scales and temperatures, and the plain network."""
    base, likelihood = posterior.posterior, posterior.likelihood
    beliefs = [Belief(0, base.problem.prior.values * ratio) for ratio in (0.3, 5.0)]
    heated = [likelihood.with_link_temperature(t) for t in (0.7, 1.0, 2.0, 4.0)]
    places = [(0, 1.0), (1, 1.0), (1, 2.0), (0, 0.0)]
    cells = [Cell(number, each, scale) for (number, scale), each in zip(places, heated, strict=True)]
    return replace(posterior, posterior=MixturePosterior.of([base], beliefs, cells, WEIGHTS))


def without_jacobians(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *given: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(Tangent, "jacobians", lambda *_: pytest.fail("a Jacobian was computed"))
        return call(*given)


def functions(member: Any, x: Tensor, numbers: range) -> FunctionSamples:
    """The functions with these numbers, by a dense Jacobian."""
    jacobian = dense.jacobian(member.problem.network.model, x, len(x))
    mean = member.problem.network.model(x).detach()
    return FunctionSamples.of(mean, torch.einsum("bcp,kp->kbc", jacobian, member.numbered_steps(numbers)))


@pytest.mark.parametrize("shares", [[1.0], [0.5, 0.5], [0.7, 0.28, 0.02], [0.9, 0.05, 0.05], [0.25] * 4])
@pytest.mark.parametrize("total", [1, 3, 8, 16, 33])
def test_pairs_are_allotted_in_proportion(shares: list[float], total: int) -> None:
    counts = allot(shares, total)
    least = 2 if total >= 2 * len(shares) else 1
    assert min(counts) >= least
    assert sum(counts) == max(total, len(shares))
    assert all(n == least or n < total * share + 1 for n, share in zip(counts, shares, strict=True))
    assert counts == sorted(counts, reverse=True)  # as the shares are


@pytest.mark.parametrize("method", [lw.Kron(), lw.Diagonal(), lw.Full(), lw.KernelSpace(), lw.LowRank(20)])
def test_draws_depend_on_their_number_alone_and_have_the_covariance(method: Any) -> None:
    posterior, _ = fitted("classification", FEW, method)
    base = posterior.posterior
    assert base.provides(Posterior.numbered_steps)
    some = base.numbered_steps(range(3, 9))
    assert_close(base.numbered_steps(range(5, 6)), some[2:3])
    square = lambda weights: weights["2.bias"][1]
    many = base.numbered_steps(range(4000))[:, -FEW + 1]
    ratio = float(many.square().mean() / posterior.variance_of(square))
    assert abs(ratio - 1) < 5 * (2 / 4000) ** 0.5


@pytest.mark.parametrize("samples", [4, 7, 32])
def test_classes_are_predicted_from_the_functions(samples: int) -> None:
    posterior, x = fitted("classification", FEW)
    predictive = posterior.predict(x, samples=samples)
    assert isinstance(predictive, AveragedClasses)
    expected = SoftmaxSamples((functions(posterior.posterior, x, range(-(-samples // 2))),))
    for name in ("probs", "standard_error", "aleatoric", "epistemic"):
        assert_close(getattr(predictive, name), getattr(expected, name))


def test_a_mixture_draws_by_weight_and_shares_draws_between_cells() -> None:
    posterior, x = fitted("classification", FEW)
    mixed = mixture(posterior)
    first, second = mixed.posterior.members
    n = allot([0.4, 0.45], 8)
    one, other = functions(first, x, range(n[0])), functions(second, x, range(n[0], 8))
    parts = (one.scaled(1 / 0.7), other, other.widened(2.0).scaled(1 / 2.0), one.widened(0.0).scaled(1 / 4.0))
    expected = SoftmaxSamples(parts, tuple(WEIGHTS.tolist()))
    predictive = mixed.predict(x, samples=16)
    for name in ("probs", "standard_error", "aleatoric"):
        assert_close(getattr(predictive, name), getattr(expected, name))


@pytest.mark.parametrize("mixed", [False, True])
def test_many_functions_are_the_exact_integral(mixed: bool) -> None:
    """The average softmax of 4,000 functions against 20,000 draws of the logits, by another link."""
    posterior, x = fitted("classification", FEW)
    exact = replace(posterior.likelihood, link="mc", samples=20_000)
    base = posterior.posterior
    one = replace(posterior, posterior=base.with_problem(base.problem.with_likelihood(exact)))
    if mixed:
        posterior, one = mixture(posterior), mixture(one)
    predictive, expected = posterior.predict(x, samples=4000), one.predict(x, samples=0).probs
    worst = ((predictive.probs - expected).abs() / (predictive.standard_error + 1e-3)).max()
    assert worst < 5


def test_zero_and_few_classes_take_variances() -> None:
    posterior, x = fitted("classification", FEW)
    assert isinstance(posterior.predict(x), SoftmaxPredictive)
    assert float(posterior.predict(x).standard_error.abs().max()) == 0.0
    many, x = fitted("classification", MANY)
    assert isinstance(many.predict(x, samples=0), SoftmaxPredictive)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("method", [lw.Kron(), lw.Diagonal(), lw.Sampled(20)])
def test_many_classes_take_no_backward_pass(method: Any, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fitted("classification", MANY, method)
    posterior = mixture(posterior) if mixed else posterior
    predictive = without_jacobians(posterior.predict, monkeypatch, x)
    assert isinstance(predictive, AveragedClasses)
    assert_close(predictive.probs, posterior.predict(x, samples=32).probs)
    assert_close(predictive.probs.sum(-1), torch.ones(SIZE, dtype=D))
    gap = (predictive.probs - posterior.predict(x, samples=0).probs).abs().max()
    assert gap < 5 * predictive.standard_error.max() + 0.01  # the link itself is off by some thousandths


def test_tokens_count_as_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, FEW)).double().eval()
    x = torch.randn(4, 60, 3, dtype=D)
    posterior = lw.fit(net, (x, torch.randint(0, FEW, (4, 60))), "classification", prior=1.0)
    predictive = without_jacobians(posterior.predict, monkeypatch, x)
    assert predictive.standard_error.shape == (4, 60, FEW)
    assert predictive.aleatoric.shape == (4, 60)


@pytest.mark.parametrize("link", ["probit", "bridge"])
def test_links_that_were_chosen_stay(link: str) -> None:
    posterior, x = fitted("classification", MANY)
    problem = posterior.posterior.problem.with_likelihood(lw.Categorical(link=link))
    chosen = replace(posterior, posterior=posterior.posterior.with_problem(problem))
    assert chosen.predict(x[:1]).link == link
    assert isinstance(chosen.predict(x[:1], samples=8), AveragedClasses)


@pytest.mark.parametrize("mixed", [False, True])
def test_predictions_do_not_depend_on_batches_memory_or_the_call(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fitted("classification", MANY)
    posterior = mixture(posterior) if mixed else posterior
    whole = posterior.predict(x)
    assert torch.equal(posterior.predict(x).log_probs, whole.log_probs)
    parts = AveragedClasses.concat([posterior.predict(part) for part in x.split(4)])
    assert_close(parts.log_probs, whole.log_probs)
    size = 8 * posterior.network.selection.size
    monkeypatch.setattr(posteriors, "temporary_bytes", lambda device: 3 * size)  # three draws, and some inputs
    fresh = replace(posterior, posterior=replace(posterior.posterior))
    small = fresh.predict(x)
    for name in ("log_probs", "standard_error", "aleatoric"):
        assert_close(getattr(small, name), getattr(whole, name))
    assert not fresh.posterior.kept_draws.entry


def test_draws_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fitted("classification", MANY)
    fresh = replace(posterior, posterior=replace(posterior.posterior))
    first = fresh.predict(x).log_probs
    monkeypatch.setattr(type(fresh.posterior), "numbered_steps", lambda *_: pytest.fail("drawn again"))
    assert torch.equal(fresh.predict(x).log_probs, first)
    moved = fresh.to("cpu")
    assert_close(moved.predict(x).log_probs, first)


def test_a_file_gives_the_same_predictions(tmp_path: Path) -> None:
    posterior, x = fitted("classification", MANY)
    mixed = mixture(posterior)
    mixed.save(tmp_path / "many.lapwing")
    loaded = lw.load(tmp_path / "many.lapwing", posterior.network.model)
    assert_close(loaded.predict(x).log_probs, mixed.predict(x).log_probs)


def test_a_loader_keeps_errors_and_entropies() -> None:
    posterior, x = fitted("classification", MANY)
    whole = posterior.predict(x)
    loaded = posterior.predict([(part, None) for part in x.split(4)])
    for name in ("probs", "standard_error", "aleatoric", "epistemic"):
        assert_close(getattr(loaded, name), getattr(whole, name))


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_other_predictives_take_the_covariance_of_the_functions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = fitted(kind, FEW)
    belief = functions(posterior.posterior, x, range(8)).gaussian
    predictive, expected = posterior.predict(x, samples=16), posterior.likelihood.predict(belief)
    assert_close(predictive.mean, expected.mean)
    assert_close(predictive.aleatoric, expected.aleatoric)
    assert_close(predictive.epistemic, expected.epistemic)
    many, x = fitted(kind, MANY)  # of their own accord they take exact variances
    assert_close(many.predict(x[:2]).mean, many.predict(x[:2], samples=0).mean)
    size = 8 * many.network.selection.size
    whole = many.predict(x, samples=16)
    monkeypatch.setattr(posteriors, "temporary_bytes", lambda device: size)
    assert_close(many.predict(x, samples=16).epistemic, whole.epistemic)


def test_a_plain_network_needs_no_draws() -> None:
    posterior, x = fitted("classification", MANY, lw.baselines.MapOnly())
    predictive = posterior.predict(x)
    assert_close(predictive.probs, posterior.network.model(x).softmax(-1))
    assert_close(predictive.aleatoric, predictive.entropy)
    assert float(predictive.standard_error.abs().max()) == 0.0


def test_refusals() -> None:
    posterior, x = fitted("classification", FEW)
    for wrong in (-1, 2.5, True, "many"):
        with pytest.raises(lw.errors.UnsupportedError, match=r"samples is .*; expected an integer of at least 0"):
            posterior.predict(x, samples=wrong)  # type: ignore[arg-type]
    nets = [nn.Sequential(nn.Linear(3, FEW)).double().eval() for _ in range(2)]
    ensemble = lw.fit(nets[0], (x, torch.zeros(SIZE).long()), "classification", method=lw.baselines.Ensemble(nets[1:]))
    with pytest.raises(lw.errors.UnsupportedError, match="MembersPosterior has no draws of the weights"):
        ensemble.predict(x, samples=4)
    stored, x = fitted("classification", FEW, lw.Sampled(3))
    assert_close(stored.predict(x, samples=6).probs.sum(-1), torch.ones(SIZE, dtype=D))
    with pytest.raises(lw.errors.UnsupportedError, match=r"draws 4 pairs; it has 3.*num_samples"):
        stored.predict(x, samples=8)


def test_stored_samples_are_all_that_there_are() -> None:
    posterior, x = fitted("classification", MANY, lw.Sampled(3))
    (numbers,) = draw_numbers([posterior.posterior], posterior.likelihood, [1.0], None, x)
    assert numbers == range(3)
    assert_close(posterior.posterior.numbered_steps(range(2, 5)), posterior.posterior.samples[[2, 0, 1]])


def test_the_tokens_of_these_inputs_decide_whether_functions_are_drawn() -> None:
    torch.manual_seed(0)
    short, long = torch.randn(3, 5, 4, dtype=D), torch.randn(2, 100, 4, dtype=D)  # 15 and 300 outputs
    model = nn.Linear(4, 3).double()
    for x in (short, long):
        posterior = lw.fit(model, [(x, torch.zeros(x.shape[:2]).long())], "classification", method=lw.Kron(), prior=1.0)
        assert bool((posterior.predict(long).standard_error > 0).all())
        assert bool((posterior.predict(short).standard_error == 0).all())


# Function samples by forward mode against those by layer-wise Jacobians: the same draws, up to rounding.

CLASSES, DRAWS = 40, 6
METHODS = [lw.Kron(), lw.EKron(), lw.Diagonal(), lw.Full(), lw.KernelSpace(), lw.LowRank(20), lw.Sampled(8)]


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double().eval()
    x = torch.randn(12, 3, dtype=D)
    return net, (x, torch.randint(0, CLASSES, (12,)))


def samples(posterior: lw.Fitted, x: Tensor) -> Tensor:
    return posterior.function_samples(x, DRAWS, torch.Generator().manual_seed(4))


def by_jacobians(posterior: lw.Fitted, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(directional, "FORWARD_SHARE", 0.0)
        return samples(posterior, x)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_forward_mode_draws_the_same_functions(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, (x, y) = problem()
    posterior = lw.fit(net, (x, y), "classification", method=method, prior=3.0)
    expected = by_jacobians(posterior, x, monkeypatch)
    assert_close(without_jacobians(samples, monkeypatch, posterior, x), expected)
    assert expected.std(0).min() > 0  # they are not all the mean


@pytest.mark.parametrize("method", [lw.Kron(), lw.Sampled(8)], ids=["Kron", "Sampled"])
def test_a_mixture_draws_all_its_cells_in_one_pass(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, (x, y) = problem()
    posterior = lw.fit(net, (x, y), "classification", method=method, prior=3.0)
    mixture = posterior.tuned(lw.tuners.Integrate((x, y), ratios=(0.1, 10.0), temperatures=(0.5, 1.0)))
    assert isinstance(mixture.posterior, MixturePosterior)
    with monkeypatch.context() as patch:  # each belief by itself, by its Jacobian
        patch.setattr(MixturePosterior, "_one_tangent_model", False)
        expected = by_jacobians(mixture, x, monkeypatch)
    passes: list[int] = []
    plain = directional.forward_products
    monkeypatch.setattr(directional, "forward_products", lambda n, x, v: passes.append(len(v)) or plain(n, x, v))
    assert_close(without_jacobians(samples, monkeypatch, mixture, x), expected)
    assert len(passes) == 1


def test_samples_of_the_tangent_models_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (x, y) = problem()
    tuner = lw.tuners.LinearMode(mean="tangent")
    posterior = lw.fit(net, (x, y), "classification", method=lw.Diagonal(), tuner=tuner)
    assert posterior.network.shift is not None
    assert_close(samples(posterior, x), by_jacobians(posterior, x, monkeypatch))
