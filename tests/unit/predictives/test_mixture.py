"""Mixtures and samples of predictive distributions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.predictives.labels import AveragedClasses, BinaryPredictive, SoftmaxPredictive, SoftmaxSamples
from lapwing.predictives.numbers import CountPredictive, NormalPredictive
from lapwing.values.gaussian import FunctionSamples
from tests.tolerances import assert_close, assert_near

# Mixtures of predictives against their definition, computed the slow way.

D = torch.float64
B = 4
WEIGHTS = torch.tensor([0.5, 0.2, 0.3], dtype=D)


def beliefs(outputs: int, same_mean: bool = True, widest: float = 2.0) -> list[lw.FunctionGaussian]:
    mean = torch.randn(B, outputs, dtype=D)
    parts = []
    for scale in (0.0, 0.15 * widest, widest):
        root = torch.randn(B, outputs, outputs + 1, dtype=D)
        parts.append(lw.FunctionGaussian(mean if same_mean else mean + scale, scale * root @ root.mT))
    return parts


def mixture(
    likelihoods: list[Any], outputs: int, same_mean: bool = True, widest: float = 2.0
) -> tuple[Any, tuple[Any, ...]]:
    pairs = zip(likelihoods, beliefs(outputs, same_mean, widest), strict=True)
    components = tuple(likelihood.predict(belief) for likelihood, belief in pairs)
    return mixed(components), components


def mixed(components: Iterable[Any]) -> Any:
    parts = tuple(components)
    return type(parts[0]).mixed(parts, WEIGHTS)


def average(values: list[torch.Tensor]) -> torch.Tensor:
    return sum(w * value for w, value in zip(WEIGHTS, values, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize(("classes", "budget"), [(3, "1GiB"), (40, "1GiB"), (3, 1)])
def test_class_probabilities_are_averages(classes: int, budget: int | str) -> None:
    """With one byte, for one input at a time."""
    with lw.memory.limited(budget):
        p, components = mixture([lw.Categorical(link_temperature=t) for t in (0.5, 1.0, 3.0)], classes)
        assert_close(p.probs, average([each.probs for each in components]))
        y = torch.randint(0, classes, (B,))
        assert_close(p.log_prob(y), average([each.log_prob(y).exp() for each in components]).log())
        assert_close(p.entropy, torch.special.entr(p.probs).sum(-1))
        assert_close(p.aleatoric, average([each.aleatoric for each in components]))
        total = torch.special.entr(average([each.integrated_probs for each in components])).sum(-1)
        assert_close(p.epistemic, total - p.aleatoric)


def test_log_probabilities_stay_finite_where_probabilities_are_zero() -> None:
    mean = torch.tensor([[2000.0, 0.0]])
    components = tuple(lw.Categorical().predict(lw.FunctionGaussian(mean, s * torch.eye(2)[None])) for s in (0.0, 1.0))
    p = type(components[0]).mixed(components, torch.tensor([0.5, 0.5]))
    assert bool(torch.isfinite(p.log_prob(torch.tensor([1]))).all())


def test_labels_of_one_input_are_mixed_jointly() -> None:
    p, components = mixture([lw.Bernoulli(link_temperature=t) for t in (0.5, 1.0, 3.0)], 3)
    y = torch.randint(0, 2, (B, 3)).to(D)
    assert_close(p.probs, average([each.probs for each in components]))
    assert_close(p.log_prob(y), average([each.log_prob(y).exp() for each in components]).log())
    assert bool((p.mutual_information >= 0).all())


DENSITIES = [
    lw.Gaussian(noise_std=0.5),
    lw.Gaussian(noise_std=1.0, degrees=4.0),
    lw.Gaussian(noise_std=0.7, degrees=8.0),
]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("same_mean", [True, False])
def test_densities_are_averages(outputs: int, same_mean: bool) -> None:
    p, components = mixture(DENSITIES, outputs, same_mean)
    y = torch.randn(B, outputs, dtype=D)
    assert_close(p.log_prob(y), average([each.log_prob(y).exp() for each in components]).log())
    assert_close(p.cdf(y), average([each.cdf(y) for each in components]))
    assert_close(p.mean, average([each.mean for each in components]))
    second = average([each.variance + each.mean.square() for each in components])
    assert_close(p.variance, second - p.mean.square())
    assert_close(p.variance, p.epistemic_variance + p.aleatoric_variance)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_interval_is_between_the_quantiles_of_the_mixture(level: float) -> None:
    p, _ = mixture(DENSITIES, 2)
    low, high = p.interval(level)
    assert_close(p.cdf(low), torch.full_like(low, 0.5 - 0.5 * level))
    assert_close(p.cdf(high), torch.full_like(low, 0.5 + 0.5 * level))


@pytest.mark.parametrize("outputs", [1, 2])
def test_entropy_is_the_mean_of_the_log_density_over_draws(outputs: int, generator: torch.Generator) -> None:
    pairs = list(zip(DENSITIES, beliefs(outputs), strict=True))
    p = mixed(likelihood.predict(belief) for likelihood, belief in pairs)
    # The same inputs once for each draw, so that one call has the log densities of all draws.
    repeated = mixed(
        likelihood.predict(lw.FunctionGaussian(belief.mean.repeat(4000, 1), belief.cov.repeat(4000, 1, 1)))
        for likelihood, belief in pairs
    )
    logs = repeated.log_prob(p.sample(4000, generator).flatten(0, 1)).reshape(4000, B)
    error = 5 * float(logs.std(0).max()) * (1 / 4000 + 1 / 2048) ** 0.5
    assert_near(p.entropy, -logs.mean(0), error)
    assert bool((p.mutual_information > 0).all())


def test_draws_have_the_distribution_of_the_mixture(generator: torch.Generator) -> None:
    p, _ = mixture(DENSITIES, 1)
    draws = p.sample(20_000, generator)
    for level in (0.5, 0.9):
        share = (draws <= p.interval(level)[1]).double().mean(0)
        assert_near(share, torch.full_like(share, 0.5 + 0.5 * level), 5 * 0.5 / math.sqrt(20_000))


def test_the_distribution_of_a_mixture_is_the_mixture() -> None:
    p, _ = mixture(DENSITIES, 2)
    distribution, y = p.distribution, torch.randn(B, 2, dtype=D)
    assert (distribution.batch_shape, distribution.event_shape) == ((B,), (2,))
    for found, expected in (
        (distribution.mean, p.mean), (distribution.variance, p.variance), (distribution.log_prob(y), p.log_prob(y)),
        (distribution.entropy(), p.entropy),
    ):  # fmt: skip
        assert_close(found, expected)
    assert distribution.sample((5, 3)).shape == (5, 3, B, 2)
    assert distribution.sample().shape == (B, 2)


def test_counts_are_averages(generator: torch.Generator) -> None:
    p, components = mixture([lw.Poisson()] * 3, 2, widest=0.1)  # of log-rates: wider ones give counts without end
    y = torch.randint(0, 5, (B, 2)).to(D)
    assert_close(p.log_prob(y), average([each.log_prob(y).exp() for each in components]).log())
    assert_close(p.cdf(y), average([each.cdf(y) for each in components]))
    low, high = p.interval(0.9)
    assert bool((p.cdf(high) >= 0.95).all())
    assert bool((p.cdf(high - 1) < 0.95).all())
    assert bool((p.cdf(low) >= 0.05 - 1e-9).all())
    draws = p.sample(20_000, generator)
    assert_near(draws.mean(0), p.mean, 6 * float(p.std.max()) / math.sqrt(20_000))
    assert bool((p.mutual_information >= 0).all())
    assert_close(p.variance, average([e.variance + e.mean.square() for e in components]) - p.mean.square())


def test_autocast_does_not_change_a_mean_that_is_read_under_it() -> None:
    """Predictives are computed when they are read, and kept."""
    narrow = [lw.FunctionGaussian(b.mean.float(), b.cov.float()) for b in beliefs(2, same_mean=False)]
    plain, under = (mixed([lw.Gaussian(noise_std=0.3).predict(b) for b in narrow]) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        mean, std = under.mean, under.std
    assert mean.dtype == std.dtype == torch.float32
    assert_close(mean, plain.mean)
    assert_close(std, plain.std)


# Class probabilities from drawn functions against sums written out, and against the integral.

SAMPLED_B, C = 4, 7


def belief(pairs: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = D) -> FunctionSamples:
    generator = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(SAMPLED_B, C, dtype=D, generator=generator)
    steps = scale * torch.randn(pairs, SAMPLED_B, C, dtype=D, generator=generator)
    return FunctionSamples.of(mean.to(dtype), steps.to(dtype))


def written_out(mean: Tensor, steps: Tensor, smooth: bool) -> Tensor:
    """The probabilities that each pair of functions gives, (K, B, C), by the formula of the docstring."""
    variance = ((steps - steps.mean(-1, keepdim=True)) ** 2).mean(-1).mean(0)[:, None]
    rest = smooth * min(0.5, 2 / math.sqrt(len(steps))) * variance / (variance + 4)
    temperature = torch.sqrt(1 + 6 / math.pi**2 * rest * variance)
    each = [(mean + sign * torch.sqrt(1 - rest) * steps) / temperature for sign in (1, -1)]
    return 0.5 * (torch.softmax(each[0], -1) + torch.softmax(each[1], -1))


def sampled_mixed() -> tuple[SoftmaxSamples, list[tuple[float, Tensor, Tensor]]]:
    """Two cells with the same draws, one with others and one without spread; weights, means and steps of each."""
    one, other = belief(6), belief(3, 4.0, seed=1)
    parts = [one.scaled(0.5), one.scaled(2.0), other, other.widened(0.0)]
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=D)
    predictive = SoftmaxSamples.mixed(tuple(SoftmaxSamples((part,)) for part in parts), weights)
    steps = [0.5 * one.steps, 2.0 * one.steps, other.steps, 0.0 * other.steps]
    means = [0.5 * one.mean, 2.0 * one.mean, other.mean, other.mean]
    return predictive, list(zip(weights.tolist(), means, steps, strict=True))


def test_probabilities_are_the_weighted_average() -> None:
    predictive, cells = sampled_mixed()
    expected = sum(w * written_out(mean, steps, True).mean(0) for w, mean, steps in cells)
    assert_close(predictive.probs, expected)  # type: ignore[arg-type]
    assert_close(predictive.probs.sum(-1), torch.ones(SAMPLED_B, dtype=D))
    assert_close(predictive.integrated_probs, predictive.probs)


def test_standard_error_is_that_of_independent_draws() -> None:
    """Cells that share their draws are one stratum: what one draw adds to all of them is one number."""
    predictive, cells = sampled_mixed()
    first = sum(w * written_out(mean, steps, False) for w, mean, steps in cells[:2])
    second = cells[2][0] * written_out(*cells[2][1:], False)
    variance = first.var(0) / len(first) + second.var(0) / len(second)  # type: ignore[union-attr]
    assert_close(predictive.standard_error, variance.sqrt())


def test_aleatoric_is_the_entropy_of_whole_functions() -> None:
    predictive, cells = sampled_mixed()
    entropy = torch.zeros(SAMPLED_B, dtype=D)
    for weight, mean, steps in cells:
        for function in [*(mean + steps), *(mean - steps)]:
            p = function.softmax(-1)
            entropy += weight / (2 * len(steps)) * -(p * p.log()).sum(-1)
    assert_close(predictive.aleatoric, entropy)
    assert bool((predictive.epistemic >= 0).all())
    assert_close(predictive.epistemic, (predictive.entropy - entropy).clamp_min(0))


@pytest.mark.parametrize("entries", [1, 2**22])
def test_log_prob_of_labels_in_pieces(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.predictives.labels.CHUNK_NUMBERS", entries)
    predictive, cells = sampled_mixed()
    expected = sum(w * written_out(mean, steps, True).mean(0) for w, mean, steps in cells)
    y = torch.tensor([0, 6, 3, 2])
    picked = expected.log()[torch.arange(SAMPLED_B), y]  # type: ignore[union-attr]
    for each in (predictive, predictive.averaged):
        assert_close(each.log_prob(y), picked)
        assert_close(each.log_prob(y[:, None]), picked)
    with pytest.raises(lw.errors.DataError, match=r"classes run from 0 to 7; expected 0\.\.6"):
        predictive.log_prob(torch.tensor([0, 7, 0, 0]))
    with pytest.raises(lw.errors.DataError, match="expected whole class numbers"):
        predictive.log_prob(torch.zeros(SAMPLED_B))


def test_the_average_alone_has_the_same_interface() -> None:
    predictive, _ = sampled_mixed()
    whole = predictive.averaged
    for name in ("probs", "mean", "log_probs", "standard_error", "entropy", "aleatoric", "epistemic"):
        assert_close(getattr(whole, name), getattr(predictive, name))
    draw = lambda p: p.sample(50, torch.Generator().manual_seed(1))
    assert torch.equal(draw(whole), draw(predictive))
    assert_close(whole.distribution.probs, whole.probs)


def test_joined_parts_are_the_whole() -> None:
    b = belief(6)
    whole = SoftmaxSamples((b,)).averaged
    parts = [SoftmaxSamples((b.rows(rows),)).averaged for rows in torch.arange(SAMPLED_B).split(3)]
    again = AveragedClasses.concat(parts)
    for name in ("log_probs", "aleatoric", "standard_error"):
        assert_close(getattr(again, name), getattr(whole, name))


def test_a_single_draw_has_no_standard_error() -> None:
    predictive = SoftmaxSamples((belief(1),)).averaged
    assert_close(predictive.probs.sum(-1), torch.ones(SAMPLED_B, dtype=D))
    with pytest.raises(lw.errors.UnsupportedError, match="has a single draw; ask for more"):
        _ = predictive.standard_error
    both = AveragedClasses.concat([predictive, predictive])
    with pytest.raises(lw.errors.UnsupportedError, match="single draw"):
        _ = both.standard_error


def test_without_draws_it_is_the_softmax() -> None:
    b = belief(0)
    predictive = SoftmaxSamples((b,))
    assert_close(predictive.probs, b.mean.softmax(-1))
    assert_close(predictive.aleatoric, predictive.entropy)
    assert float(predictive.standard_error.abs().max()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_log_probabilities_are_finite_where_probabilities_are_not(dtype: torch.dtype) -> None:
    b = belief(5, dtype=dtype)
    predictive = SoftmaxSamples((FunctionSamples.of(1e4 * b.mean, 1e-3 * b.steps),))
    assert bool(torch.isfinite(predictive.log_probs).all())
    assert float(predictive.probs.min()) == 0.0
    gaps = 1e4 * (b.mean - b.mean.amax(-1, keepdim=True))
    assert_close(predictive.log_probs, gaps, dtype=torch.float32)  # the steps are a ten-millionth of that


def drawn(root: Tensor, mean: Tensor, pairs: int, generator: torch.Generator) -> FunctionSamples:
    eps = torch.randn(pairs, len(mean), root.shape[-1], dtype=D, generator=generator)
    return FunctionSamples.of(mean, torch.einsum("bcd,kbd->kbc", root, eps))


def divergence(truth: Tensor, probs: Tensor) -> float:
    return float((truth * (truth.clamp_min(1e-300) / probs).log()).sum(-1).mean())


@pytest.mark.parametrize("scale", [0.3, 3.0, 20.0])
def test_sixteen_draws_are_nearer_to_the_integral_than_the_pairwise_link(scale: float) -> None:
    """300 classes: above 256 the link takes variances for covariances. Logits as of a layer of 20 features."""
    generator = torch.Generator().manual_seed(5)
    root = scale / math.sqrt(20) * torch.randn(SAMPLED_B, 300, 20, dtype=D, generator=generator)
    mean = 3 * torch.randn(SAMPLED_B, 300, dtype=D, generator=generator)
    truth = drawn(root, mean, 2000, generator).functions(slice(None)).softmax(-1).mean(0)
    predictive = SoftmaxSamples((drawn(root, mean, 16, generator),))
    link = lw.Categorical().predict(lw.FunctionGaussian(mean, root @ root.mT)).probs
    assert divergence(truth, predictive.probs) < divergence(truth, link)
    error = (predictive.probs - truth).square().mean().sqrt()
    assert error < 1.2 * predictive.standard_error.square().mean().sqrt()  # an upper estimate, itself ± 18 %


def test_many_draws_reach_the_average_of_all_functions() -> None:
    many = belief(40_000, 3.0)
    average = written_out(many.mean, many.steps, False).mean(0)
    gap = (SoftmaxSamples((many,)).probs - average).abs().max()
    assert gap < 5e-3  # a hundredth of the variance is left to the link
    few = FunctionSamples.of(many.mean, many.steps[:16])
    assert gap < 0.1 * (SoftmaxSamples((few,)).probs - average).abs().max()


def test_a_likelihood_makes_it_with_its_temperature() -> None:
    b: Any = belief(6)
    hot: Any = lw.Categorical(link_temperature=2.0)
    assert_close(hot.predict_samples(b).probs, SoftmaxSamples((b.scaled(0.5),)).probs)
    assert_close(lw.Gaussian(0.1).predict_samples(b).epistemic_variance, b.steps.square().mean(0))


# How many draws there may be, for every predictive.

BELIEF = lw.FunctionGaussian(torch.zeros(3, 2), torch.eye(2).expand(3, 2, 2))
PREDICTIVES: dict[str, Any] = {
    "normal": NormalPredictive(BELIEF, torch.ones(3, 2)), "binary": BinaryPredictive(BELIEF),
    "counts": CountPredictive(BELIEF), "softmax": SoftmaxPredictive(BELIEF),
}  # fmt: skip


@pytest.mark.parametrize("name", PREDICTIVES)
@pytest.mark.parametrize("n", [0, -1, 2.5, True, "3", None])
def test_numbers_of_draws_below_one_are_refused(name: str, n: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"n is .*; expected (at least 1|an integer)"):
        PREDICTIVES[name].sample(n)


@pytest.mark.parametrize("name", PREDICTIVES)
def test_one_draw(name: str) -> None:
    assert PREDICTIVES[name].sample(1).shape[:2] == (1, 3)
