"""Class probabilities from drawn functions against sums written out, and against the integral."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.predictives.labels import AveragedClasses, SoftmaxSamples
from lapwing.values.gaussian import FunctionSamples
from tests.tolerances import assert_close

D = torch.float64
B, C = 4, 7


def belief(pairs: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = D) -> FunctionSamples:
    generator = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(B, C, dtype=D, generator=generator)
    steps = scale * torch.randn(pairs, B, C, dtype=D, generator=generator)
    return FunctionSamples.of(mean.to(dtype), steps.to(dtype))


def written_out(mean: Tensor, steps: Tensor, smooth: bool) -> Tensor:
    """The probabilities that each pair of functions gives, (K, B, C), by the formula of the docstring."""
    variance = ((steps - steps.mean(-1, keepdim=True)) ** 2).mean(-1).mean(0)[:, None]
    rest = smooth * min(0.5, 2 / math.sqrt(len(steps))) * variance / (variance + 4)
    temperature = torch.sqrt(1 + 6 / math.pi**2 * rest * variance)
    each = [(mean + sign * torch.sqrt(1 - rest) * steps) / temperature for sign in (1, -1)]
    return 0.5 * (torch.softmax(each[0], -1) + torch.softmax(each[1], -1))


def mixed() -> tuple[SoftmaxSamples, list[tuple[float, Tensor, Tensor]]]:
    """Two cells with the same draws, one with others and one without spread; weights, means and steps of each."""
    one, other = belief(6), belief(3, 4.0, seed=1)
    parts = [one.scaled(0.5), one.scaled(2.0), other, other.widened(0.0)]
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=D)
    predictive = SoftmaxSamples.mixed(tuple(SoftmaxSamples((part,)) for part in parts), weights)
    steps = [0.5 * one.steps, 2.0 * one.steps, other.steps, 0.0 * other.steps]
    means = [0.5 * one.mean, 2.0 * one.mean, other.mean, other.mean]
    return predictive, list(zip(weights.tolist(), means, steps, strict=True))


def test_probabilities_are_the_weighted_average() -> None:
    predictive, cells = mixed()
    expected = sum(w * written_out(mean, steps, True).mean(0) for w, mean, steps in cells)
    assert_close(predictive.probs, expected)  # type: ignore[arg-type]
    assert_close(predictive.probs.sum(-1), torch.ones(B, dtype=D))
    assert_close(predictive.integrated_probs, predictive.probs)


def test_standard_error_is_that_of_independent_draws() -> None:
    """Cells that share their draws are one stratum: what one draw adds to all of them is one number."""
    predictive, cells = mixed()
    first = sum(w * written_out(mean, steps, False) for w, mean, steps in cells[:2])
    second = cells[2][0] * written_out(*cells[2][1:], False)
    variance = first.var(0) / len(first) + second.var(0) / len(second)  # type: ignore[union-attr]
    assert_close(predictive.standard_error, variance.sqrt())


def test_aleatoric_is_the_entropy_of_whole_functions() -> None:
    predictive, cells = mixed()
    entropy = torch.zeros(B, dtype=D)
    for weight, mean, steps in cells:
        for function in [*(mean + steps), *(mean - steps)]:
            p = function.softmax(-1)
            entropy += weight / (2 * len(steps)) * -(p * p.log()).sum(-1)
    assert_close(predictive.aleatoric, entropy)
    assert bool((predictive.epistemic >= 0).all())
    assert_close(predictive.epistemic, (predictive.entropy - entropy).clamp_min(0))


@pytest.mark.parametrize("entries", [1, 2**22])
def test_log_prob_of_labels_in_pieces(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.predictives.labels.ENTRIES", entries)
    predictive, cells = mixed()
    expected = sum(w * written_out(mean, steps, True).mean(0) for w, mean, steps in cells)
    y = torch.tensor([0, 6, 3, 2])
    picked = expected.log()[torch.arange(B), y]  # type: ignore[union-attr]
    for each in (predictive, predictive.averaged):
        assert_close(each.log_prob(y), picked)
        assert_close(each.log_prob(y[:, None]), picked)
    with pytest.raises(lw.errors.DataError, match=r"classes run from 0 to 7; expected 0\.\.6"):
        predictive.log_prob(torch.tensor([0, 7, 0, 0]))
    with pytest.raises(lw.errors.DataError, match="expected whole class numbers"):
        predictive.log_prob(torch.zeros(B))


def test_the_average_alone_has_the_same_interface() -> None:
    predictive, _ = mixed()
    whole = predictive.averaged
    for name in ("probs", "mean", "log_probs", "standard_error", "entropy", "aleatoric", "epistemic"):
        assert_close(getattr(whole, name), getattr(predictive, name))
    draw = lambda p: p.sample(50, torch.Generator().manual_seed(1))
    assert torch.equal(draw(whole), draw(predictive))
    assert_close(whole.distribution.probs, whole.probs)


def test_joined_parts_are_the_whole() -> None:
    b = belief(6)
    whole = SoftmaxSamples((b,)).averaged
    parts = [SoftmaxSamples((b.rows(rows),)).averaged for rows in torch.arange(B).split(3)]
    again = AveragedClasses.concat(parts)
    for name in ("log_probs", "aleatoric", "standard_error"):
        assert_close(getattr(again, name), getattr(whole, name))


def test_a_single_draw_has_no_standard_error() -> None:
    predictive = SoftmaxSamples((belief(1),)).averaged
    assert_close(predictive.probs.sum(-1), torch.ones(B, dtype=D))
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
    root = scale / math.sqrt(20) * torch.randn(B, 300, 20, dtype=D, generator=generator)
    mean = 3 * torch.randn(B, 300, dtype=D, generator=generator)
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
