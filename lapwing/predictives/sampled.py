"""The predictive of classes by averaging the softmax of drawn functions, in place of a link."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.function_samples import FunctionSamples
from lapwing.errors import UnsupportedError
from lapwing.predictives.protocol import ClassPredictive, checked_labels

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
        """The standard error of ``probs``, (B, C).

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
    """Predictive of a class: the softmax of drawn logits, averaged.

    Args:
        parts: Beliefs about the logits, each with its draws.
        weights: Their weights, which sum to one.
    """

    parts: tuple[FunctionSamples, ...]
    weights: tuple[float, ...] = (1.0,)

    @staticmethod
    def mixed(components: tuple[SoftmaxSamples, ...], weights: Tensor) -> SoftmaxSamples:
        """Return the mixture of predictives of the same inputs."""
        pairs = [(w * v, part) for c, w in zip(components, weights.tolist(), strict=True)
                 for v, part in zip(c.weights, c.parts, strict=True)]  # fmt: skip
        return SoftmaxSamples(tuple(part for _, part in pairs), tuple(weight for weight, _ in pairs))

    @property
    def averaged(self) -> AveragedClasses:
        """The same without the functions, which take K times the memory of the probabilities."""
        return AveragedClasses(*self._sums)

    @property
    def log_probs(self) -> Tensor:
        return self._sums[0]

    @property
    def integrated_probs(self) -> Tensor:
        return self.probs

    @property
    def aleatoric(self) -> Tensor:
        return self._sums[1]

    @property
    def standard_error(self) -> Tensor:
        """The standard error of ``probs``, (B, C)."""
        return self.averaged.standard_error

    def log_prob(self, y: Tensor) -> Tensor:
        y = checked_labels(y, self.parts[0].mean)
        each = []
        for part, weight in zip(self.parts, self.weights, strict=True):
            for _, logits, share in _drawn(part, weight):
                chosen = logits.gather(-1, y.expand(len(logits), *y.shape)).squeeze(-1)
                each.append(chosen - logits.logsumexp(-1) + math.log(share))
        return torch.cat(each).logsumexp(0)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The log-probabilities, the expected entropy and the standard error of the probabilities, by one loop."""
        mean = self.parts[0].mean
        log_probs, aleatoric = torch.full_like(mean, -math.inf), mean.new_zeros(mean.shape[:-1])
        draws: dict[int, Tensor] = {}  # what each draw adds to the probabilities, (K, B, [T,] C); cells may share draws
        for part, weight in zip(self.parts, self.weights, strict=True):
            sums = draws.setdefault(id(part.steps), torch.zeros_like(part.steps)) if part.pairs else None
            for pairs, logits, share in _drawn(part, weight):
                log_p = logits.log_softmax(-1)
                p = log_p.exp()
                log_probs = torch.logaddexp(log_probs, log_p.logsumexp(0) + math.log(share))
                aleatoric -= share * (p * log_p).sum(-1).sum(0)
                if sums is not None:
                    plus, minus = p.chunk(2)
                    sums[pairs] += 0.5 * weight * (plus + minus)
        if any(len(each) == 1 for each in draws.values()):
            return log_probs, aleatoric, None
        variances = [each.var(0) / len(each) for each in draws.values()]
        return log_probs, aleatoric, sum(variances, torch.zeros_like(mean)).sqrt()


def _drawn(part: FunctionSamples, weight: float) -> Iterator[tuple[slice, Tensor, float]]:
    """Yield the drawn logits (n, B, [T,] C), a few draws at a time, with their numbers and the weight of each."""
    if not part.pairs:
        yield slice(0, 0), part.factor * part.mean.unsqueeze(0), weight
        return
    step = max(1, ENTRIES // max(1, 2 * part.mean.numel()))
    for start in range(0, part.pairs, step):
        pairs = slice(start, min(part.pairs, start + step))
        yield pairs, part.functions(pairs), weight / (2 * part.pairs)
