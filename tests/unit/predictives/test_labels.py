"""Distributions of labels: softmax with its links, and binary."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate, stats
from scipy.special import expit
from torch import Tensor

import lapwing as lw
from lapwing.predictives.labels import SoftmaxPredictive, logit_draws, pairwise, probit, quick_root
from lapwing.values.gaussian import Deferred
from tests.tolerances import SOLVED, assert_close, assert_near, assert_within

# Class probabilities under Gaussian logits: three links, their limits, and what is uncertain about them.

D = torch.float64
B, C = 5, 4
LINKS = ("pairwise", "probit", "bridge", "mc")


def belief(scale: float, classes: int = C, dtype: torch.dtype = D) -> lw.FunctionGaussian:
    root = torch.randn(B, classes, classes + 1, dtype=D)
    mean = 2 * torch.randn(B, classes, dtype=D)
    return lw.FunctionGaussian(mean.to(dtype), (scale * root @ root.mT).to(dtype))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 100.0])
def test_probabilities_sum_to_one(link: str, dtype: torch.dtype, scale: float) -> None:
    probs = lw.Categorical(link=link).predict(belief(scale, dtype=dtype)).probs
    assert probs.dtype == dtype
    assert bool((probs >= 0).all())
    assert_close(probs.sum(-1), torch.ones(B, dtype=dtype))


@pytest.mark.parametrize("link", LINKS)
def test_without_spread_every_link_is_the_softmax(link: str) -> None:
    b = belief(0.0)
    assert_close(lw.Categorical(link=link).predict(b).probs, b.mean.softmax(-1))


def test_probit_scales_every_logit_by_its_own_spread() -> None:
    b = belief(1.0)
    logits = torch.stack([
        torch.stack([m / math.sqrt(1 + math.pi * v / 8) for m, v in zip(means, variances, strict=True)])
        for means, variances in zip(b.mean, b.cov.diagonal(dim1=1, dim2=2), strict=True)
    ])  # fmt: skip
    assert_close(lw.Categorical(link="probit").predict(b).probs, logits.softmax(-1))


def dirichlet_logits(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the logits that stand for a Dirichlet (Hobbhahn et al. 2022, eqs. 3 and 4)."""
    count = len(alpha)
    mean = alpha.log() - alpha.log().mean()
    cov = torch.zeros(count, count, dtype=D)
    for k in range(count):
        for m in range(count):
            cov[k, m] = (k == m) / alpha[k] - (1 / alpha[k] + 1 / alpha[m] - (1 / alpha).sum() / count) / count
    return mean, cov


@pytest.mark.parametrize("shift", [1.0, 1e-3])
def test_bridge_inverts_the_dirichlet(shift: float) -> None:
    alphas = torch.tensor([[3.0, 1.5, 0.8, 2.0], [50.0, 20.0, 1.0, 5.0], [0.5, 0.6, 0.7, 0.8]], dtype=D)
    parts = [dirichlet_logits(alpha) for alpha in alphas]
    mean = torch.stack([mean for mean, _ in parts])
    cov = torch.stack([cov for _, cov in parts]) + shift  # a common shift of all logits means nothing
    probs = lw.Categorical(link="bridge").predict(lw.FunctionGaussian(mean, cov)).probs
    assert_close(probs, alphas / alphas.sum(-1, keepdim=True))


def test_bridge_of_logits_that_sum_to_zero_already() -> None:
    """Nothing is left to condition on; rounding must not be divided by rounding."""
    centre = torch.eye(C, dtype=D) - 1 / C
    b = belief(1.0)
    mean, cov = b.mean @ centre, centre @ b.cov @ centre
    probs = lw.Categorical(link="bridge").predict(lw.FunctionGaussian(mean, cov)).probs
    shifted = lw.Categorical(link="bridge").predict(lw.FunctionGaussian(mean, cov + 1.0)).probs
    assert_close(probs, shifted)


def test_bridge_of_one_input_does_not_depend_on_the_others() -> None:
    """An input without spread among others that have some."""
    b = belief(1.0)
    cov = b.cov.clone()
    cov[2] = 0
    likelihood = lw.Categorical(link="bridge")
    together = likelihood.predict(lw.FunctionGaussian(b.mean, cov)).probs
    alone = torch.cat(
        [likelihood.predict(lw.FunctionGaussian(b.mean[i : i + 1], cov[i : i + 1])).probs for i in range(B)]
    )
    assert_close(together, alone)


def moment(mean: float, std: float, power: int) -> float:
    """E sigmoid(z)^power of a Gaussian z."""
    value = lambda z: stats.norm.pdf(z, mean, std) / (1 + math.exp(-z)) ** power
    return integrate.quad(value, mean - 12 * std, mean + 12 * std)[0]


def test_mc_agrees_with_the_integral_for_two_classes() -> None:
    """For two classes only the difference of the logits matters: one integral."""
    b = belief(1.0, 2)
    all_probs = lw.Categorical(link="mc", samples=20_000).predict(b).probs
    for mean, cov, probs in zip(b.mean, b.cov, all_probs, strict=True):
        gap, std = float(mean[0] - mean[1]), math.sqrt(float(cov[0, 0] + cov[1, 1] - 2 * cov[0, 1]))
        first, second = (moment(gap, std, power) for power in (1, 2))
        error = math.sqrt((second - first**2) / 20_000)
        assert abs(float(probs[0]) - first) <= 5 * error


@pytest.mark.parametrize("seed", [0, 3])
def test_mc_follows_its_seed(seed: int) -> None:
    b = belief(1.0)
    one, two = (lw.Categorical(link="mc", seed=seed).predict(b) for _ in range(2))
    assert torch.equal(one.probs, two.probs)
    assert torch.equal(one.mutual_information, two.mutual_information)
    assert not torch.equal(one.probs, lw.Categorical(link="mc", seed=seed + 1).predict(b).probs)


@pytest.mark.parametrize("link", LINKS)
def test_log_prob_and_distribution(link: str) -> None:
    p = lw.Categorical(link=link).predict(belief(1.0))
    y = torch.tensor([0, 3, 1, 2, 2])
    expected = torch.stack([p.probs[b, y[b]].log() for b in range(B)])
    assert_close(p.log_prob(y), expected)
    assert_close(p.distribution.log_prob(y), expected)
    assert_close(p.mean, p.probs)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_log_prob_of_confident_logits_is_finite(link: str) -> None:
    """exp(-200) is zero in float32, its logarithm is not minus infinity."""
    b = lw.FunctionGaussian(torch.tensor([[0.0, 200.0]]), torch.zeros(1, 2, 2))
    log_prob = lw.Categorical(link=link).predict(b).log_prob(torch.tensor([0]))
    assert float(log_prob) == pytest.approx(-200.0, rel=1e-6)


def test_tokens_keep_their_dimension() -> None:
    mean, root = torch.randn(2, 3, C, dtype=D), torch.randn(2, 3, C, C, dtype=D)
    b = lw.FunctionGaussian(mean, root @ root.mT)
    for link in LINKS:
        p = lw.Categorical(link=link).predict(b)
        assert p.probs.shape == (2, 3, C)
        assert p.log_prob(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3)
        assert p.entropy.shape == p.mutual_information.shape == p.aleatoric.shape == (2, 3)
        assert p.sample(5).shape == (5, 2, 3)


def test_samples_follow_the_probabilities(generator: torch.Generator) -> None:
    p = lw.Categorical().predict(belief(1.0))
    draws = p.sample(4000, generator)
    assert draws.shape == (4000, B)
    assert_within(torch.nn.functional.one_hot(draws, C).double(), p.probs)
    one, two, other = (p.sample(20, torch.Generator().manual_seed(s)) for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_entropy_is_that_of_the_probabilities() -> None:
    p = lw.Categorical().predict(belief(1.0))
    expected = torch.stack([-sum(q * math.log(q) for q in row) for row in p.probs])
    assert_close(p.entropy, expected)


def test_mutual_information_is_entropy_less_expected_entropy() -> None:
    p = lw.Categorical(link="mc").predict(belief(1.0))
    q = p.logit_samples.softmax(-1)
    expected = -(q * q.log()).sum(-1).mean(0)
    assert_close(p.aleatoric, expected)
    assert_close(p.mutual_information, p.entropy - expected, power=0.5)
    assert_close(p.epistemic, p.mutual_information)
    assert bool((p.mutual_information > 0).all())
    assert bool((p.mutual_information < math.log(C)).all())


def test_mutual_information_of_two_classes_is_an_integral_over_their_difference() -> None:
    b = belief(4.0, 2)
    information = lw.Categorical().predict(b).mutual_information
    entropy = lambda p: float(stats.entropy([p, 1 - p]))
    for mean, cov, value in zip(b.mean, b.cov, information, strict=True):
        gap, std = float(mean[0] - mean[1]), math.sqrt(float(cov[0, 0] + cov[1, 1] - 2 * cov[0, 1]))
        given = lambda z, gap=gap, std=std: stats.norm.pdf(z, gap, std) * entropy(expit(z))
        inner = integrate.quad(given, gap - 12 * std, gap + 12 * std)[0]
        assert float(value) == pytest.approx(entropy(moment(gap, std, 1)) - inner, rel=1e-6)


@pytest.mark.parametrize(("outputs", "variance"), [(3, 0.1), (10, 0.1), (40, 0.05)])
def test_mutual_information_is_that_of_many_draws(outputs: int, variance: float) -> None:
    """One class against all others: the error is that of their log-odds taken as Gaussian."""
    gen = torch.Generator().manual_seed(outputs)
    mean = 3 * torch.randn(40, outputs, dtype=D, generator=gen)
    root = torch.randn(40, outputs, 6, dtype=D, generator=gen)
    b = lw.FunctionGaussian(mean, variance / 6 * root @ root.mT)
    draws = lw.Categorical(link="mc", samples=8192).predict(b).mutual_information
    information = lw.Categorical().predict(b).mutual_information
    assert float(((information - draws).abs() / draws).median()) < 0.01
    assert float((information.sum() - draws.sum()).abs() / draws.sum()) < 0.02
    assert stats.spearmanr(information, draws)[0] > 0.995


def test_logits_of_large_variance_are_drawn() -> None:
    mean, root = torch.randn(4, 12, dtype=D), torch.randn(4, 12, 12, dtype=D)
    cov = root @ root.mT
    cov[0] *= 1e-4
    b = lw.FunctionGaussian(mean, cov)
    draws = logit_draws(b, 128, 0, quick_root).softmax(-1)
    found, drawn = lw.Categorical().predict(b).aleatoric, torch.special.entr(draws).sum(-1).mean(0)
    assert_close(found[1:], drawn[1:])
    assert abs(float(found[0] - drawn[0])) > 1e-12  # by quadrature


def test_a_covariance_without_a_cholesky_factor_is_drawn_by_its_symmetric_root() -> None:
    directions = torch.randn(3, 4, 2, dtype=D)
    cov = directions @ directions.mT  # of rank two
    cov[0] += torch.eye(4)
    root = quick_root(cov)
    assert_close(root @ root.mT, cov, SOLVED)
    assert_close(root[0], torch.linalg.cholesky(cov[0]))


@pytest.mark.parametrize("link", LINKS)
def test_nothing_to_learn_without_spread(link: str) -> None:
    p = lw.Categorical(link=link).predict(belief(0.0))
    assert float(p.mutual_information.max()) <= 16 * torch.finfo(D).eps
    assert bool((p.mutual_information >= 0).all())


def test_probit_needs_variances_alone() -> None:
    """With a thousand classes the covariance must not be built."""

    def forbidden() -> Tensor:
        raise AssertionError("the covariance was built")

    variance = torch.rand(B, C, dtype=D)
    b = lw.FunctionGaussian(torch.randn(B, C, dtype=D), Deferred(lambda: variance, forbidden))
    p = SoftmaxPredictive(b, "probit")
    assert_close(p.probs.sum(-1), torch.ones(B, dtype=D))
    assert p.entropy.shape == (B,)


# Probabilities of one under Gaussian logits, against numerical integration.

QUADRATURE = 0.4  # 5e-7: what 64 nodes reach at a variance of nine
MEANS = torch.tensor([[0.0, 1.5], [-3.0, 0.4], [6.0, -0.2]], dtype=D)
VARIANCES = torch.tensor([[0.5, 2.0], [1.0, 4.0], [9.0, 1e-4]], dtype=D)


def binary_belief(scale: float = 1.0, dtype: torch.dtype = D) -> lw.FunctionGaussian:
    return lw.FunctionGaussian(MEANS.to(dtype), torch.diag_embed(scale * VARIANCES).to(dtype))


def expectation(mean: float, variance: float, of: object) -> float:
    std = math.sqrt(variance)
    density = stats.norm(mean, std).pdf
    return integrate.quad(lambda z: density(z) * of(z), mean - 12 * std, mean + 12 * std, epsabs=1e-13, limit=400)[0]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def entropy(p: float) -> float:
    return 0.0 if p in (0.0, 1.0) else -p * math.log(p) - (1 - p) * math.log1p(-p)


def each(of: object) -> Tensor:
    rows = [[expectation(float(m), float(v), of) for m, v in zip(*pair, strict=True)]
            for pair in zip(MEANS, VARIANCES, strict=True)]  # fmt: skip
    return torch.tensor(rows, dtype=D)


def test_quadrature_is_the_integral() -> None:
    assert_close(lw.Bernoulli(link="quadrature").predict(binary_belief()).probs, each(sigmoid), QUADRATURE)


def test_probit_is_near_the_integral() -> None:
    """The sigmoid is matched by a probit; the two differ by at most 0.019 (MacKay 1992)."""
    probs = lw.Bernoulli(link="probit").predict(binary_belief()).probs
    assert float((probs - each(sigmoid)).abs().max()) <= 0.02
    expected = torch.sigmoid(MEANS / (1 + math.pi * VARIANCES / 8).sqrt())
    assert_close(probs, expected)


@pytest.mark.parametrize("link", ["probit", "quadrature"])
def test_without_spread_it_is_the_sigmoid(link: str) -> None:
    p = lw.Bernoulli(link=link).predict(binary_belief(0.0))
    assert_close(p.probs, MEANS.sigmoid())
    assert float(p.mutual_information.max()) <= 16 * torch.finfo(D).eps


@pytest.mark.parametrize("link", ["probit", "quadrature"])
def test_log_prob_sums_over_labels(link: str) -> None:
    p = lw.Bernoulli(link=link).predict(binary_belief())
    y = torch.tensor([[0, 1], [1, 1], [0, 0]])
    expected = torch.where(y == 1, p.probs.log(), (1 - p.probs).log()).sum(-1)
    assert_close(p.log_prob(y), expected)
    assert_close(p.distribution.log_prob(y.double()), expected)


def test_a_single_label_needs_no_dimension() -> None:
    p = lw.Bernoulli().predict(lw.FunctionGaussian(MEANS[:, :1], VARIANCES[:, :1, None]))
    y = torch.tensor([0, 1, 1])
    assert p.probs.shape == (3, 1)
    assert_close(p.log_prob(y), p.log_prob(y[:, None]))
    assert p.log_prob(y).shape == (3,)


@pytest.mark.parametrize(("logit", "y"), [(30.0, 0.0), (-30.0, 1.0), (-200.0, 1.0), (200.0, 0.0)])
def test_binary_log_prob_of_confident_logits_is_finite(logit: float, y: float) -> None:
    """One less sigmoid(30) is zero in float32, its logarithm is not minus infinity."""
    b = lw.FunctionGaussian(torch.full((1, 1), logit), torch.zeros(1, 1, 1))
    log_prob = lw.Bernoulli().predict(b).log_prob(torch.full((1, 1), y))
    assert float(log_prob) == pytest.approx(-abs(logit), rel=1e-6)


def test_entropy_and_mutual_information() -> None:
    p = lw.Bernoulli(link="quadrature").predict(binary_belief())
    expected = each(lambda z: entropy(sigmoid(z))).sum(-1)
    assert_close(p.aleatoric, expected, QUADRATURE)
    total = torch.tensor([[entropy(float(q)) for q in row] for row in each(sigmoid)], dtype=D).sum(-1)
    assert_close(p.entropy, total, QUADRATURE)
    assert_close(p.mutual_information, total - expected, QUADRATURE)
    assert_close(p.epistemic, p.mutual_information)


def test_binary_samples_follow_the_probabilities(generator: torch.Generator) -> None:
    p = lw.Bernoulli().predict(binary_belief())
    draws = p.sample(4000, generator)
    assert draws.shape == (4000, 3, 2)
    assert set(draws.unique().tolist()) == {0.0, 1.0}
    assert_within(draws, p.probs)
    one, two, other = (p.sample(20, torch.Generator().manual_seed(s)) for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


# Links against the integral that they approximate.

LINKS_B = 30


def links_belief(classes: int) -> lw.FunctionGaussian:
    """Return beliefs with variances from .1 to 100."""
    root = torch.randn(LINKS_B, classes, classes, dtype=D)
    variance = (10 ** torch.linspace(-1, 2, LINKS_B, dtype=D))[:, None, None]
    return lw.FunctionGaussian(3 * torch.randn(LINKS_B, classes, dtype=D), variance * root @ root.mT / classes)


def divergence(log_probs: Tensor, b: lw.FunctionGaussian) -> float:
    """Return the mean KL divergence from the integral, by many quasi-random draws."""
    exact = logit_draws(b, 2**14, 3).softmax(-1).mean(0)
    return float((exact * (exact.log() - log_probs)).sum(-1).mean())


@pytest.mark.parametrize(("classes", "limit"), [(2, 2e-3), (3, 0.03), (10, 0.08)])
def test_pairwise_is_near_the_integral(classes: int, limit: float) -> None:
    b = links_belief(classes)
    assert divergence(pairwise(b), b) < limit
    assert divergence(pairwise(b), b) < divergence(probit(b), b)


def test_pairwise_is_its_formula() -> None:
    b = links_belief(4)
    expected = torch.empty(LINKS_B, 4, dtype=D)
    for n in range(LINKS_B):
        for k in range(4):
            total = torch.zeros((), dtype=D)
            for i in range(4):
                spread = b.cov[n, k, k] + b.cov[n, i, i] - 2 * b.cov[n, k, i]
                total += torch.exp(-(b.mean[n, k] - b.mean[n, i]) / (1 + 3 * spread / torch.pi**2).sqrt())
            expected[n, k] = -total.log()
    assert_close(pairwise(b), expected.log_softmax(-1))


@pytest.mark.parametrize("classes", [5, 300])
def test_pairwise_ignores_a_shift_that_all_logits_share(classes: int) -> None:
    b = links_belief(classes)
    shifted = lw.FunctionGaussian(b.mean + 7, b.cov + 50)
    assert_close(pairwise(shifted), pairwise(b))


def test_many_classes_without_variance_take_no_pairs() -> None:
    """The plain network of a large vocabulary: the softmax itself, and not the same numbers from C² differences."""
    mean = 3 * torch.randn(LINKS_B, 300, dtype=D)
    none = lambda: torch.zeros_like(mean)
    certain = lw.FunctionGaussian(mean, Deferred(none, none, none))
    assert torch.equal(pairwise(certain), mean.log_softmax(-1))
    nearly = lw.FunctionGaussian(mean, Deferred(none, none, lambda: torch.full_like(mean, 1e-12)))
    assert_close(pairwise(nearly), pairwise(certain))


def test_many_classes_need_no_covariance() -> None:
    classes = 300
    variance = 4 * torch.rand(LINKS_B, classes, dtype=D)
    mean = 3 * torch.randn(LINKS_B, classes, dtype=D)

    def refused() -> Tensor:
        raise AssertionError("the (B, C, C) covariance was formed")

    centred = lw.FunctionGaussian(mean, torch.diag_embed(variance)).centred_variance
    log_probs = pairwise(lw.FunctionGaussian(mean, Deferred(lambda: variance, refused, lambda: centred)))
    spread = variance.unsqueeze(-1) + variance.unsqueeze(-2)  # of independent logits, but for the diagonal
    gap = mean.unsqueeze(-1) - mean.unsqueeze(-2)
    expected = (-torch.logsumexp(-gap / (1 + 3 * spread / torch.pi**2).sqrt(), -1)).log_softmax(-1)
    assert_near(log_probs, expected, 0.1)  # centring changes the variances by some 2 / C of themselves


@pytest.mark.parametrize("n", [64, 65, 128])
def test_draws_are_antithetic_and_have_the_moments_of_the_belief(n: int) -> None:
    b = links_belief(6)
    draws = logit_draws(b, n, 0)
    assert draws.shape == (n, LINKS_B, 6)
    centred = lambda t: t - t.mean(-1, keepdim=True)
    deviations = centred(draws) - centred(b.mean)
    half = (n + 1) // 2
    assert_close(deviations[: n - half], -deviations[half:])
    if n % 2 == 0:
        cov = torch.einsum("nbc,nbd->bcd", deviations, deviations) / n
        project = torch.eye(6, dtype=D) - 1 / 6
        assert_close(cov, project @ b.cov @ project)


@pytest.mark.parametrize("likelihood", [lw.Categorical, lw.Bernoulli])
def test_link_temperature_divides_mean_and_spread(likelihood: type) -> None:
    b = links_belief(4)
    divided = lw.FunctionGaussian(b.mean / 2.5, b.cov / 2.5**2)
    assert_close(likelihood(link_temperature=2.5).predict(b).probs, likelihood().predict(divided).probs)


def test_numbers_that_are_scored_are_those_of_the_probabilities() -> None:
    """One row each: the negative log-likelihood, whether the guess is right, the Brier score, the confidence."""
    predictive, y = lw.Categorical().predict(belief(1.0)), torch.tensor([0, 1, 2, 3, 0])
    known = torch.tensor([True, True, True, True, False])
    probs = predictive.probs
    one_hot = torch.nn.functional.one_hot(y, C)
    expected = torch.stack([
        -probs[range(B), y].log(), (probs.argmax(1) == y).double(), (probs - one_hot).square().sum(1), probs.amax(1),
    ], -1)  # fmt: skip
    scored = predictive.scoring.numbers(predictive, y, known, 0.9)
    assert_close(scored[:, 0][known], expected[known])
