"""Mixtures of posteriors against brute force: every cell by itself, averaged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.posteriors.mixture import Belief, Cell, MixturePosterior
from lapwing.values.gaussian import FunctionGaussian
from tests.tolerances import SOLVED, assert_close, assert_near

D = torch.float64
WEIGHTS = torch.tensor([0.4, 0.25, 0.2, 0.15], dtype=D)


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double().eval()


def fitted(kind: str, method: Any = None) -> tuple[lw.Fitted, Tensor]:
    """Return a posterior whose prior is given, and inputs."""
    torch.manual_seed(1)
    x = torch.randn(30, 3, dtype=D)
    targets = {
        "classification": torch.randint(0, 3, (30,)),
        "multilabel": torch.randint(0, 2, (30, 3)).to(D),
        "regression": torch.randn(30, 3, dtype=D),
        "counts": torch.randint(0, 4, (30, 3)).to(D),
    }
    return lw.fit(network(3), (x, targets[kind]), kind, method=method or lw.Kron(), prior=2.0), x[:6]


def variants(likelihood: Any) -> list[Any]:
    """Return a likelihood for each of four cells."""
    if isinstance(likelihood, lw.Gaussian):
        phi = likelihood.dispersion
        return [
            likelihood.with_dispersion(phi * 2),
            likelihood,
            likelihood.with_tails(4.0, 0.8),
            likelihood.with_dispersion(phi / 2),
        ]
    if isinstance(likelihood, lw.Poisson):
        return [likelihood] * 4
    return [likelihood.with_link_temperature(t) for t in (0.7, 1.0, 2.0, 4.0)]


def mixture(posterior: lw.Fitted) -> tuple[lw.Fitted, list[tuple[lw.Fitted, Any, float]]]:
    """Return a mixture of three precisions and the plain network, and its cells one by one."""
    base = posterior.posterior
    precisions = [base.problem.prior.values * ratio for ratio in (0.3, 5.0)]
    beliefs = [Belief(0, precisions[0]), Belief(0, precisions[1])]
    likelihoods = variants(posterior.likelihood)
    places = [(0, 1.0), (1, 1.0), (1, 2.0), (0, 0.0)]
    cells = [Cell(number, each, scale) for (number, scale), each in zip(places, likelihoods, strict=True)]
    mixed = MixturePosterior.of([base], beliefs, cells, WEIGHTS)
    from dataclasses import replace

    alone = [
        (posterior.with_prior(float(precisions[number])), each, scale)
        for (number, scale), each in zip(places, likelihoods, strict=True)
    ]
    return replace(posterior, posterior=mixed), alone


def widened(belief: lw.FunctionGaussian, scale: float) -> lw.FunctionGaussian:
    return lw.FunctionGaussian(belief.mean, scale * belief.cov)


KINDS = ("classification", "multilabel", "regression", "counts")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [lw.Kron(), lw.EKron(), lw.Diagonal(), lw.Full(), lw.KernelSpace(), lw.LowRank(20)])
def test_predictions_average_those_of_the_cells(kind: str, method: Any) -> None:
    mixed, alone = mixture(fitted(kind, method)[0])
    x = fitted(kind, method)[1]
    y = {"classification": torch.randint(0, 3, (6,))}.get(kind, torch.randint(0, 2, (6, 3)).to(D))
    each = [cell.predict(widened(one.functions(x), scale)) for one, cell, scale in alone]
    expected = torch.logsumexp(torch.stack([p.log_prob(y) for p in each]) + WEIGHTS.log()[:, None], 0)
    assert_close(mixed.predict(x).log_prob(y), expected, SOLVED)


@pytest.mark.parametrize("kind", KINDS)
def test_functions_have_the_mean_of_the_network_and_the_averaged_covariance(kind: str) -> None:
    posterior, x = fitted(kind)
    mixed, alone = mixture(posterior)
    factors = [scale * getattr(cell, "widening", 1.0) for _, cell, scale in alone]
    cov = sum(w * s * one.functions(x).cov for w, s, (one, _, _) in zip(WEIGHTS, factors, alone, strict=True))
    belief = mixed.functions(x)
    assert_close(belief.mean, posterior.functions(x).mean)
    assert_close(belief.cov, cov)  # type: ignore[arg-type]
    assert_close(belief.variance, belief.cov.diagonal(dim1=-2, dim2=-1))
    joint = mixed.functions(x, joint=True)
    assert_close(joint.marginal.cov, belief.cov)


def test_function_and_weight_samples_draw_the_cell_first(generator: torch.Generator) -> None:
    mixed, _ = mixture(fitted("regression")[0])
    x = fitted("regression")[1]
    n = 20_000
    samples = mixed.function_samples(x, n, generator)
    belief = mixed.functions(x)
    ratio = samples.var(0) / belief.variance
    assert_near(ratio, torch.ones_like(ratio), 0.1)  # the kurtosis of the mixture is some 6: sqrt(5 / n) = .016
    weights = mixed.weight_samples(n, generator)
    assert weights.shape == (n, mixed.network.selection.size)
    plain = float((weights == mixed.network.theta()).all(1).double().mean())
    assert abs(plain - 0.15) < 5 * math.sqrt(0.15 * 0.85 / n)  # the cell without spread


@pytest.mark.parametrize("kind", KINDS)
def test_variance_of_averages(kind: str) -> None:
    mixed, alone = mixture(fitted(kind)[0])
    x = fitted(kind)[1]
    total = lambda f: f.sum()
    factors = [scale * getattr(cell, "widening", 1.0) for _, cell, scale in alone]
    expected = sum(w * s * one.variance_of(total, x) for w, s, (one, _, _) in zip(WEIGHTS, factors, alone, strict=True))
    assert_close(mixed.variance_of(total, x), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    posterior, x = fitted(kind)
    mixed, _ = mixture(posterior)
    mixed.save(tmp_path / "mixture.lapwing")
    loaded = lw.load(tmp_path / "mixture.lapwing", posterior.network.model)
    assert_close(loaded.functions(x).cov, mixed.functions(x).cov)
    assert_close(loaded.predict(x).mean, mixed.predict(x).mean)
    assert_close(loaded.log_evidence(), mixed.log_evidence())
    moved = loaded.to("cpu")
    assert_close(moved.predict(x).mean, mixed.predict(x).mean)


def test_evidence_prior_and_other_tuners_are_those_of_the_posterior_that_was_fitted() -> None:
    posterior, x = fitted("regression")
    mixed, _ = mixture(posterior)
    assert_close(mixed.log_evidence(), posterior.log_evidence())
    assert_close(mixed.prior.values, posterior.prior.values)
    tuned, expected = (each.tuned(lw.tuners.MaximiseEvidence()) for each in (mixed, posterior))
    assert_close(tuned.functions(x).cov, expected.functions(x).cov)
    assert_close(mixed.with_prior(3.0).functions(x).cov, posterior.with_prior(3.0).functions(x).cov)
    assert mixed.effective_parameters().total == pytest.approx(posterior.effective_parameters().total, rel=1e-9)


def test_negligible_cells_and_beliefs_are_dropped() -> None:
    posterior, _ = fitted("classification")
    base = posterior.posterior
    beliefs = [Belief(0, base.problem.prior.values * ratio) for ratio in (1.0, 2.0, 3.0)]
    cells = [Cell(i, posterior.likelihood) for i in range(3)]
    mixed = MixturePosterior.of([base], beliefs, cells, torch.tensor([0.7, 1e-7, 0.3 - 1e-7], dtype=D))
    assert len(mixed.cells) == len(mixed.beliefs) == 2
    assert float(mixed.weights.sum()) == pytest.approx(1.0)


def test_posteriors_of_two_methods_are_mixed() -> None:
    kron, x = fitted("regression")
    full, _ = fitted("regression", lw.Full())
    likelihood = kron.likelihood
    mixed = MixturePosterior.of(
        [kron.posterior, full.posterior], [Belief(0), Belief(1)], [Cell(0, likelihood), Cell(1, likelihood)],
        torch.tensor([0.5, 0.5], dtype=D),
    )  # fmt: skip
    assert_close(mixed(x).cov, (kron.functions(x).cov + full.functions(x).cov) / 2)


class Unmixed:
    """A predictive of a user who has not heard of mixtures."""


class PlainCounts(lw.Poisson):
    def predict(self, belief: Any) -> Any:
        return Unmixed()


def test_a_predictive_without_a_mixture_is_refused_with_the_remedy() -> None:
    posterior, x = fitted("counts")
    cells = (Cell(0, PlainCounts()),)
    mixture = MixturePosterior((posterior.posterior,), (Belief(0),), cells, torch.ones(1, dtype=D))
    with pytest.raises(lw.errors.UnsupportedError, match=r"Unmixed has no mixed.*give fit.. a prior or a tuner"):
        mixture.predict(x)


def test_outputs_that_are_not_finite_are_refused() -> None:
    torch.manual_seed(0)
    x, net = torch.randn(30, 2, dtype=D), nn.Linear(2, 3).double().eval()
    posterior = lw.fit(net, (x, torch.randint(0, 3, (30,))), "classification")
    assert isinstance(posterior.posterior, MixturePosterior)
    with pytest.raises(lw.errors.LapwingError, match="outputs of the network"):
        posterior.predict(torch.full((1, 2), torch.finfo(D).max, dtype=D) * torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("method", [lw.Kron(), lw.Diagonal(), lw.Sampled(4)])
@pytest.mark.parametrize("tokens", [False, True])
def test_many_classes_are_predicted_without_a_covariance_between_them(
    method: Any, tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 260).double().eval()
    x = torch.randn(*((4, 2, 3) if tokens else (8, 3)), dtype=D)
    y = torch.randint(0, 260, x.shape[:-1])
    posterior = lw.fit(net, (x, y), "classification", method=method, prior=1.0)
    belief = posterior.functions(x)
    from_cov = lw.FunctionGaussian(belief.mean, posterior.functions(x).cov).centred_variance
    assert_close(belief.centred_variance, from_cov, SOLVED)
    mixed = posterior.tuned(lw.tuners.Integrate((x, y), ratios=(1.0, 10.0)))
    monkeypatch.setattr(lw.FunctionGaussian, "cov", property(lambda self: pytest.fail("the covariance was built")))
    for each in (posterior, mixed):
        assert_close(each.predict(x).probs.sum(-1), torch.ones(y.shape, dtype=D))


@pytest.mark.parametrize("method", [lw.Kron(), lw.Diagonal(), lw.EKron()], ids=str)
def test_predictions_from_features_are_those_from_jacobians(method: Any) -> None:
    """The last layer predicts from its inputs, without a graph and without the covariances of the cells."""
    torch.manual_seed(2)
    x, labels = torch.randn(40, 3, dtype=D), torch.arange(40) % 3
    posterior = lw.fit(
        network(3), (x, labels), "classification", method=method, weights=lw.last_layer, validation=(x.flip(0), labels)
    ).posterior
    assert isinstance(posterior, MixturePosterior)
    assert len(posterior.cells) > 1
    network_of = posterior.problem.network
    _, tangent = next(network_of.tangents(x[:6]))
    jacobian = tangent.jacobians()
    beliefs = [FunctionGaussian(tangent.f, each.covariance(jacobian)[:, 0]) for each in posterior.members]  # type: ignore[attr-defined]
    expected, found = posterior._average(beliefs), posterior.predict(x[:6])
    for name in ("probs", "log_probs", "epistemic", "aleatoric", "entropy"):
        assert_close(getattr(found, name), getattr(expected, name))
    assert_close(posterior(x[:6]).cov, posterior._mix(beliefs).cov)
    assert_close(posterior.members[0](x[:6]).cov, beliefs[0].cov)


def test_variances_of_many_classes_are_those_of_their_jacobians() -> None:
    """The axes of the last layer give the variances of 40 outputs without their covariance."""
    torch.manual_seed(3)
    x, labels = torch.randn(80, 3, dtype=D), torch.arange(80) % 40
    posterior = lw.fit(network(40), (x, labels), "classification", weights=lw.last_layer, prior=0.5)
    cov = posterior.functions(x[:5], outputs=torch.arange(40)).cov
    belief = posterior.functions(x[:5])
    assert_close(belief.variance, cov.diagonal(dim1=-2, dim2=-1))
    centre = torch.eye(40, dtype=D) - 1 / 40
    assert_close(belief.centred_variance, (centre @ cov @ centre).diagonal(dim1=-2, dim2=-1))
    assert_close(belief.cov, cov)


def test_mutual_information_of_a_mixture_is_that_of_many_draws() -> None:
    """Two percent of the information of all inputs together, and the same order of inputs."""
    torch.manual_seed(4)
    x, labels = torch.randn(120, 3, dtype=D), torch.arange(120) % 3
    posterior = lw.fit(network(3), (x, labels), "classification", validation=(x.flip(0), labels))
    assert posterior.posterior.cell_count > 1
    predictive = posterior.predict(4 * x[:40])
    entropy, probs, generator = 0.0, 0.0, torch.Generator().manual_seed(0)
    for group in predictive.components:
        half = group.belief.sample(6000, generator) - group.belief.mean
        p = torch.cat([group.belief.mean + half, group.belief.mean - half]).softmax(-1).movedim(1, 0)  # (K, 2n, B, C)
        weights = predictive.weights[:, None, None]
        probs = probs + (weights * p.mean(1)).sum(0)
        entropy = entropy + (weights[:, 0] * torch.special.entr(p).sum(-1).mean(1)).sum(0)
    expected = torch.special.entr(probs).sum(-1) - entropy
    found = predictive.epistemic
    assert float((found - expected).abs().sum()) <= 0.02 * float(expected.sum())
    ranks = torch.stack([values.argsort().argsort().double() for values in (found, expected)])
    assert float(torch.corrcoef(ranks)[0, 1]) >= 0.999
