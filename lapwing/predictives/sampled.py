"""The predictive of classes by averaging the softmax of drawn functions, in place of a link."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.function_samples import FunctionSamples
from lapwing.errors import UnsupportedError
from lapwing.predictives.links import LOGISTIC
from lapwing.predictives.protocol import ClassPredictive, checked_labels, is_soft

SMOOTHED = 0.5  # largest share of the variance that is left to a link, for up to FEW draws
FEW = 16
LARGE = 4.0  # variance of the logits at which the share is half of that
SMALL = 1e-30  # probability below which logarithms of sums would lose digits
ENTRIES = 2**22  # numbers of drawn logits that are handled at once: near a CPU's caches, and enough for a GPU


@dataclass(frozen=True, eq=False)
class AveragedClasses(ClassPredictive):
    """Predictive of a class: probabilities that were averaged over drawn functions, with their standard error.

    Args:
        averages: Log-probabilities of the classes (B, C).
        entropies: The expected entropy given the function, (B,).
        error: The standard error of the probabilities (B, C), from the spread between draws; None if one draw stands
            alone.
    """

    averages: Tensor
    entropies: Tensor
    error: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        return self.averages

    @property
    def aleatoric(self) -> Tensor:
        return self.entropies

    @property
    def standard_error(self) -> Tensor:
        """The standard error of ``probs``, (B, C): that of the plain average over the same functions.

        An upper estimate, since ``probs`` are smoothed, which lowers their error where it is large.

        Raises:
            UnsupportedError: If a part of the mixture has a single draw.
        """
        if self.error is None:
            raise UnsupportedError(
                "a standard error takes two draws of each precision of the mixture, and one has a single draw; ask for "
                "more: predict(x, samples=32)."
            )
        return self.error

    @property
    def integrated_probs(self) -> Tensor:
        return self.probs

    @staticmethod
    def joined(parts: Sequence[AveragedClasses]) -> AveragedClasses:
        """Return the predictive of all data, from those of some data each, in order."""
        if len(parts) == 1:
            return parts[0]
        errors = [part.error for part in parts if part.error is not None]
        return AveragedClasses(
            torch.cat([part.averages for part in parts]), torch.cat([part.entropies for part in parts]),
            torch.cat(errors) if len(errors) == len(parts) else None,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class SoftmaxSamples(ClassPredictive):
    r"""Predictive of a class: the softmax of drawn logits, averaged.

    A function with large steps is certain of some class, and few such functions give most classes a probability near
    zero. So the functions carry a share a of the variance, and a link integrates over the rest: the pairwise link of
    logits with equal variances, which divides them by a temperature t. With the mean variance v̄ of the logits of an
    input, their mean over classes taken off,

    $$ p = \frac{1}{2K} \sum_{\pm k} \mathrm{softmax}\Bigl( \frac{m \pm \sqrt a\, d_k}{t} \Bigr), \quad
       t^2 = 1 + \frac{6}{\pi^2} (1 - a) \bar v, \quad
       1 - a = \frac{\bar v}{\bar v + 4} \min\Bigl( \frac12, \frac{2}{\sqrt K} \Bigr) . $$

    Where the steps are small or many a tends to one, and p to the average softmax itself. ``aleatoric`` and
    ``standard_error`` are those of the whole functions.

    Args:
        parts: Beliefs about the logits, each with its draws.
        weights: Their weights, which sum to one.
    """

    parts: tuple[FunctionSamples, ...]
    weights: tuple[float, ...] = (1.0,)

    @staticmethod
    def mixed(components: tuple[SoftmaxSamples, ...], weights: Tensor) -> SoftmaxSamples:
        """Return the mixture of predictives of the same inputs."""
        parts: list[tuple[FunctionSamples, float]] = []
        for component, weight in zip(components, weights.tolist(), strict=True):
            shares = zip(component.parts, component.weights, strict=True)
            parts += [(part, weight * share) for part, share in shares if weight * share > 0]
        return SoftmaxSamples(tuple(part for part, _ in parts), tuple(share for _, share in parts))

    @property
    def averaged(self) -> AveragedClasses:
        """The same without the functions, which take K times the memory of the probabilities."""
        return AveragedClasses(self.log_probs, *self._of_functions)

    @property
    def integrated_probs(self) -> Tensor:
        return self.probs

    @property
    def aleatoric(self) -> Tensor:
        return self._of_functions[0]

    @property
    def standard_error(self) -> Tensor:
        """The standard error of ``probs``, (B, C); an upper estimate, see ``AveragedClasses``."""
        return self.averaged.standard_error

    @cached_property
    def _of_functions(self) -> tuple[Tensor, Tensor | None]:
        """The expected entropy, and the standard error of the average softmax, of the whole functions."""
        mean = self.parts[0].mean
        entropy, draws = mean.new_zeros(mean.shape[:-1]), dict[int, Tensor]()
        for part, weight in zip(self.parts, self.weights, strict=True):
            if part.pairs:  # what each draw adds to the probabilities, (K, B, [T,] C); cells may share draws
                draws.setdefault(id(part.steps), torch.zeros_like(part.steps))
            for pairs, logits in _in_turn(part):
                log_p = logits.log_softmax(-1)
                p = log_p.exp()
                entropy -= weight / max(1, 2 * part.pairs) * (p * log_p).sum(-1).sum(0)
                if part.pairs:
                    plus, minus = p.chunk(2)
                    draws[id(part.steps)][pairs] += 0.5 * weight * (plus + minus)
        if any(len(each) == 1 for each in draws.values()):
            return entropy, None
        variances = (each.var(0) / len(each) for each in draws.values())
        return entropy, sum(variances, torch.zeros_like(mean)).sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        if is_soft(y, self.parts[0].mean):
            return super().log_prob(y)
        y = checked_labels(y, self.parts[0].mean)
        each = []
        for part, weight in zip(self.parts, self.weights, strict=True):
            smooth = _Smoothed.of(part)
            for logits in smooth.in_turn():
                chosen = logits.log_softmax(-1).gather(-1, y.expand(len(logits), *y.shape))
                each.append(chosen.squeeze(-1) + math.log(weight / smooth.count))
        return torch.cat(each).logsumexp(0)

    @cached_property
    def log_probs(self) -> Tensor:
        probs = torch.zeros_like(self.parts[0].mean)
        for part, weight in zip(self.parts, self.weights, strict=True):
            smooth = _Smoothed.of(part)
            for logits in smooth.in_turn():
                probs += weight / smooth.count * logits.softmax(-1).sum(0)
        return probs.log() if bool((probs > SMALL).all()) else self._log_averages()

    def _log_averages(self) -> Tensor:
        """Return the log-probabilities without the probabilities, which may round to zero; slower."""
        total = torch.full_like(self.parts[0].mean, -math.inf)
        for part, weight in zip(self.parts, self.weights, strict=True):
            smooth = _Smoothed.of(part)
            for logits in smooth.in_turn():
                share = math.log(weight / smooth.count)
                total = torch.logaddexp(total, logits.log_softmax(-1).logsumexp(0) + share)
        return total


@dataclass(frozen=True, eq=False)
class _Smoothed:
    """The functions of a belief with a share of its variance, divided by the temperature of the rest."""

    part: FunctionSamples
    shrink: Tensor  # one over the temperature, (B, [T,] 1)
    narrow: Tensor  # √a, (B, [T,] 1)

    @classmethod
    def of(cls, part: FunctionSamples) -> _Smoothed:
        if not part.pairs:
            one = torch.ones_like(part.mean[..., :1])
            return cls(part, one, one)
        spread = part.scale**2 * part.spreads.mean(0).unsqueeze(-1)
        rest = SMOOTHED * min(1.0, math.sqrt(FEW / part.pairs)) * spread / (spread + LARGE)
        return cls(part, (1 + 2 * LOGISTIC * rest * spread).rsqrt(), (1 - rest).sqrt())

    @property
    def count(self) -> int:
        """The number of functions."""
        return max(1, 2 * self.part.pairs)

    def in_turn(self) -> Iterator[Tensor]:
        """Yield the logits of a few draws after another, (n, B, [T,] C)."""
        part = replace(self.part, mean=self.shrink * self.part.mean)
        for _, logits in _in_turn(part, self.shrink * self.narrow):
            yield logits


def _in_turn(part: FunctionSamples, width: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield the numbers of a few draws and their functions (n, B, [T,] C); the mean alone if there are none.

    The steps of each input are multiplied by ``width`` (B, [T,] 1).
    """
    if not part.pairs:
        yield slice(0, 0), part.factor * part.mean.unsqueeze(0)
        return
    step = max(1, ENTRIES // max(1, 2 * part.mean.numel()))
    for start in range(0, part.pairs, step):
        pairs = slice(start, min(part.pairs, start + step))
        yield pairs, part.functions(pairs, width)
