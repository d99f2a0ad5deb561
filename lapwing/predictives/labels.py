"""Predictives of labels: binary ones and classes, by a link or by drawn functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.quasirandom import SobolEngine

from lapwing.errors import UnsupportedError
from lapwing.linalg.dense import eigh
from lapwing.predictives.base import (
    ClassPredictive,
    LabelPredictive,
    Mixture,
    MultilabelPredictive,
    check_labels,
    check_numbers,
    entr,
    is_soft,
)
from lapwing.runtime.memory import batch_size_for, chunks, concat_chunks
from lapwing.runtime.settings import integer
from lapwing.runtime.threads import uniform
from lapwing.values.gaussian import FunctionGaussian, FunctionSamples, by_nodes, normal_rule, psd_root

P = TypeVar("P", bound=LabelPredictive)

LOGISTIC = 3 / math.pi**2  # one over the variance of the standard logistic distribution
PAIRED_CLASSES = 256  # classes up to which the covariance of each pair of logits is used
LINK_COPIES = 4  # of a (C, C) intermediate that a link holds for each input


FEW_CLASSES = 32  # classes up to which torch's own softmax on a CPU takes two to four times as long


def softmax(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension; for few classes by operations on whole tensors."""
    if logits.shape[-1] > FEW_CLASSES or not logits.is_cpu:
        return logits.softmax(-1)
    odds = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    return odds / odds.sum(-1, keepdim=True)


def log_softmax(logits: Tensor) -> Tensor:
    """Return the logarithm of the softmax over the last dimension, in the same way."""
    if logits.shape[-1] > FEW_CLASSES or not logits.is_cpu:
        return logits.log_softmax(-1)
    below_top = logits - logits.detach().amax(-1, keepdim=True)
    return below_top - below_top.exp().sum(-1, keepdim=True).log()


def softmax_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over the last dimension, and its entropy without a logarithm of each probability."""
    below_top = logits - logits.detach().amax(-1, keepdim=True)
    odds = below_top.exp()
    total = odds.sum(-1, keepdim=True)
    return odds / total, total.squeeze(-1).log() - (odds * below_top).sum(-1) / total.squeeze(-1)


def probit(belief: FunctionGaussian) -> Tensor:
    """Return log softmax(m / sqrt(1 + π/8 var)), (B, C). It needs variances only."""
    return log_softmax(probit_logits(belief.mean, belief.variance))


def probit_logits(mean: Tensor, variance: Tensor) -> Tensor:
    """Return m / sqrt(1 + π/8 var)."""
    return mean / torch.sqrt(1 + math.pi / 8 * variance)


def pairwise(belief: FunctionGaussian) -> Tensor:
    r"""Return log-probabilities (B, C) from the differences between every two logits.

    $$ l_k = -\log \sum_i \exp\Bigl(-\frac{m_k - m_i}{\sqrt{1 + 3 s_{ki} / \pi^2}}\Bigr), \quad
       s_{ki} = V_{kk} + V_{ii} - 2 V_{ki}, \quad p = \mathrm{softmax}(l) $$

    A shift common to all logits has no effect, as with the softmax itself; with two classes this is the logistic
    approximation of the exact integral. Above 256 classes s_ki is the sum of the variances of the two logits after
    their mean over classes is taken off, which needs no (C, C) covariance. Cost: O(C²) for each input, in chunks.
    """
    mean, outputs = belief.mean, belief.mean.shape[-1]
    flat, each = mean.reshape(-1, outputs), LINK_COPIES * mean.element_size() * outputs**2
    if outputs <= PAIRED_CLASSES and batch_size_for(len(flat), each, flat.device) >= len(flat) > 0:
        return log_softmax(pairwise_logits(mean, belief.differences, flat.numel() * outputs <= FEW_PAIRS))
    if outputs <= PAIRED_CLASSES:
        cov = belief.cov.reshape(-1, outputs, outputs)
        own = cov.diagonal(dim1=-2, dim2=-1)
    else:
        cov, own = None, belief.centred_variance.reshape(-1, outputs)
        if not bool((own > 0).any()):  # the plain network: l is log softmax(m), which takes no pairs
            return log_softmax(mean)
    logits = []
    for part in chunks(len(flat), each, flat.device):
        spread = own[part].unsqueeze(-1) + own[part].unsqueeze(-2)
        if cov is not None:
            spread = torch.add(spread, cov[part], alpha=-2).clamp_min(0)
        logits.append(pairwise_logits(flat[part], spread))
    return log_softmax(torch.cat(logits).reshape(mean.shape) if logits else mean)


FEW_PAIRS = 2**11  # pairs of logits up to which the number of operations decides about the time


def pairwise_logits(mean: Tensor, spread: Tensor, few: bool = False) -> Tensor:
    """Return l (..., C) of ``pairwise`` from the means (..., C) and the variances s of all differences, (..., C, C).

    ``few`` takes fewer operations, which is faster for up to ``FEW_PAIRS`` of them.
    """
    ahead = mean.unsqueeze(-2) - mean.unsqueeze(-1)  # m_i - m_k
    scaled = ahead * (LOGISTIC * spread).add_(1).rsqrt_()
    if few:  # the entry i = k of row k is zero, so that its log-softmax is minus the logarithm of the sum
        return scaled.log_softmax(-1).diagonal(dim1=-2, dim2=-1)
    return -torch.logsumexp(scaled, -1)


def bridge(belief: FunctionGaussian) -> Tensor:
    """Return the log mean (B, C) of the Dirichlet distribution matched to the logits (Hobbhahn et al. 2022).

    Logits are defined up to a common shift, so mean and covariance are first projected to logits that sum to zero.
    """
    mean, cov = belief.mean - belief.mean.mean(-1, keepdim=True), belief.cov
    count = mean.shape[-1]
    rows = cov.mean(-1)
    spread = cov.diagonal(dim1=-2, dim2=-1) - 2 * rows + rows.mean(-1, keepdim=True)
    floor = 1e3 * torch.finfo(mean.dtype).eps * (1 + cov.diagonal(dim1=-2, dim2=-1))
    none = (spread <= floor).all(-1, keepdim=True)  # without variance there is nothing to match
    variance = spread.maximum(floor)
    # exp(m_k) Σ_l exp(-m_l) / C², in logs so that confident logits do not overflow
    peak = (mean + torch.logsumexp(-mean, -1, keepdim=True)).clamp_max(80).exp() / count**2
    alpha = (1 - 2 / count + peak) / variance
    return torch.where(none, log_softmax(mean), alpha.log() - alpha.sum(-1, keepdim=True).log())


def logit_draws(belief: FunctionGaussian, n: int, seed: int) -> Tensor:
    """Return n draws of the logits, (n, B, C), up to a shift common to all logits of an input.

    The draws are antithetic, moment-matched Sobol points on the C - 1 dimensional space of logits that sum to zero,
    the same points for every input. Cost: a Cholesky factor of a (C - 1, C - 1) matrix for each input.
    """
    mean, outputs = belief.mean, belief.mean.shape[-1]
    basis, points = _zero_sum_basis(outputs).to(mean), _normal_points(n, outputs - 1, seed).to(mean)
    flat, cov = mean.reshape(-1, outputs), belief.cov.reshape(-1, outputs, outputs)

    def draws(part: slice) -> Tensor:
        root = basis @ _any_root(basis.mT @ cov[part] @ basis)
        return flat[part] + torch.einsum("bcd,nd->nbc", root, points)

    each = 2 * LINK_COPIES * flat.element_size() * outputs**2
    parts = (draws(part) for part in chunks(len(flat), each, flat.device))
    return concat_chunks(parts, len(flat), 1).reshape(n, *mean.shape) if len(flat) else mean.new_zeros(n, *mean.shape)


def _any_root(matrix: Tensor) -> Tensor:
    """Return R with R Rᵀ = matrix: a Cholesky factor, and the symmetric root where there is none.

    The factor takes a twentieth of the time, and its draws integrate better: each point moves few directions.
    """
    factor, info = torch.linalg.cholesky_ex(matrix.double())
    singular = info > 0
    if not bool(singular.any()):
        return factor.to(matrix.dtype)
    if matrix.requires_grad:
        return psd_root(matrix)
    factor[singular] = psd_root(matrix[singular]).to(factor)
    return factor.to(matrix.dtype)


@lru_cache(maxsize=8)
def _normal_points(n: int, dimension: int, seed: int) -> Tensor:
    """Return n antithetic points (n, dimension) with mean zero and unit variances; unit covariance if n allows it."""
    half = SobolEngine(dimension, scramble=True, seed=seed).draw((n + 1) // 2, dtype=torch.float64)
    points = torch.special.ndtri(half.clamp(1e-12, 1 - 1e-12))
    moment = points.mT @ points / len(points)
    if len(points) >= 2 * dimension:  # below that the whitening itself would distort the points
        points = torch.linalg.solve_triangular(torch.linalg.cholesky(moment).mT, points, upper=True, left=False)
    else:
        points = points / moment.diagonal().sqrt().clamp_min(1e-6)
    return torch.cat([points, -points])[:n]


@lru_cache(maxsize=8)
def _zero_sum_basis(outputs: int) -> Tensor:
    """Return an orthonormal basis (C, C - 1) of the vectors that sum to zero: columns of a Householder reflection."""
    v = torch.full((outputs,), outputs**-0.5, dtype=torch.float64)
    v[-1] += 1
    return (torch.eye(outputs, dtype=torch.float64) - torch.outer(v, v) / v[-1])[:, :-1]


HARD_ERROR = 0.1  # estimated relative error of the mutual information above which the logits of an input are drawn
WIDE_DEVIATION = 2.0  # standard deviation of the log-odds above which they are drawn too
DRAWN_LOGITS = 1536  # drawn for each such input, if ``samples`` are not more: fewer classes get more draws
NODES, EXACT = 12, 96  # nodes for many classes and for two, whose integral has no other error


@lru_cache(maxsize=1)
def _hermite_rule() -> tuple[Tensor, Tensor]:
    """Return the Gauss-Hermite nodes of a standard normal and their weights, (NODES,) each."""
    off = torch.arange(1, NODES, dtype=torch.float64).sqrt()
    nodes, vectors = eigh(torch.diag(off, 1) + torch.diag(off, -1))  # Golub and Welsch
    return nodes, vectors[0].square()


def class_against_rest(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the mean and the standard deviation of the log-odds of each class, (N, C) each, and a correction.

    The log-odds u = f_k − log Σ_{i≠k} exp(f_i) are linearised at the mean of the logits, where r is the softmax of the
    other logits: the variance is that of f_k − r·f. The curvature of the logarithm lowers the mean by
    c = (r·diag V − rᵀ V r) / 2, to first order; c / (1 + c) stays bounded where c is large. With two classes u is
    Gaussian and c is zero.

    Args:
        mean: Means of the logits (N, C).
        cov: Their covariances V (N, C, C).
    """
    log_p = log_softmax(mean)
    p, own = log_p.exp(), cov.diagonal(dim1=-2, dim2=-1)
    shared = (cov @ p.unsqueeze(-1)).squeeze(-1)
    total, spread = (p * own).sum(-1, keepdim=True), (p * shared).sum(-1, keepdim=True)
    # Sums over the other classes are differences, but for the likeliest class, whose others may all round to zero.
    top = mean.argmax(-1, keepdim=True)
    others = mean.scatter(-1, top, -math.inf)
    r = softmax(others)
    rest = (1 - p).scatter(-1, top, 1)
    centre = (log_p - rest.log()).scatter(-1, top, mean.gather(-1, top) - others.logsumexp(-1, keepdim=True))
    row = cov.gather(-2, top.unsqueeze(-1).expand(-1, 1, mean.shape[-1])).squeeze(-2)
    product = (cov @ r.unsqueeze(-1)).squeeze(-1)
    with_own = ((shared - p * own) / rest).scatter(-1, top, (row * r).sum(-1, keepdim=True))
    squared = ((spread - 2 * p * shared + p.square() * own) / rest.square()).scatter(
        -1, top, (r * product).sum(-1, keepdim=True)
    )
    diagonal = ((total - p * own) / rest).scatter(-1, top, (r * own).sum(-1, keepdim=True))
    bend = 0.5 * (diagonal - squared).clamp_min(0)
    variance = (own - 2 * with_own + squared).clamp_min(torch.finfo(own.dtype).tiny)  # the root of zero has no slope
    return centre - bend / (1 + bend), variance.sqrt(), bend


class LabelMixture(Mixture[P], LabelPredictive):
    """An average of predictives of labels."""

    @cached_property
    def integrated_probs(self) -> Tensor:
        return self.average(lambda component: component.integrated_probs)

    @cached_property
    def aleatoric(self) -> Tensor:
        return self.average(lambda component: component.aleatoric)


class ClassMixture(ClassPredictive, LabelMixture[ClassPredictive]):
    """A mixture of predictives of a class.

    Args:
        components: Predictives with ``log_probs`` (K, B, C), such as ``SoftmaxPredictive``; together they have as many
            leading entries as there are weights.
        weights: Their weights (K,), which sum to one.
    """

    def _values(self, part: Callable[[ClassPredictive], Tensor]) -> list[Tensor]:
        return [part(component) for component in self.components]

    @cached_property
    def log_probs(self) -> Tensor:
        return self.log_average(lambda component: component.log_probs)

    @cached_property
    def probs(self) -> Tensor:
        return self.average(lambda component: component.probs)


class BinaryMixture(LabelMixture[MultilabelPredictive], MultilabelPredictive):
    """A mixture of predictives of one binary label or many.

    The labels of one input depend on each other through the mixture: ``log_prob`` mixes their joint probabilities.
    """

    @cached_property
    def probs(self) -> Tensor:
        return self.average(lambda component: component.probs)

    def known_log_prob(self, y: Tensor, known: Tensor) -> Tensor:
        return self.log_average(lambda component: component.known_log_prob(y, known))


@dataclass(frozen=True, eq=False, repr=False)
class BinaryPredictive(MultilabelPredictive):
    """Predictive of one binary label or many.

    ``epistemic`` is the mutual information of labels and logits, ``aleatoric`` the expected entropy, both by
    quadrature whatever the link is.

    Args:
        belief: The Gaussian belief about the logits (B, C).
        link: "quadrature" or "probit" (closed form).

    >>> p = BinaryPredictive(FunctionGaussian(torch.zeros(1, 1), torch.ones(1, 1, 1)))
    >>> p.probs
    tensor([[0.5000]])
    """

    belief: FunctionGaussian
    link: str = "quadrature"

    mixed = staticmethod(BinaryMixture)

    @cached_property
    def _log_odds(self) -> tuple[Tensor, Tensor]:
        """log p(1) and log p(0), (B, C) each; finite where the probability itself rounds to zero."""
        return BINARY_LINKS[self.link](self.belief)

    @cached_property
    def probs(self) -> Tensor:
        return self._log_odds[0].exp()

    def log_prob(self, y: Tensor) -> Tensor:
        return self.log_prob_each(check_numbers(y, self.probs, one=False, within=(0, 1))).sum(-1)

    def log_prob_each(self, y: Tensor) -> Tensor:
        """Return the log-probability of the target of each label by itself, (B, C)."""
        y = y.to(self.probs).reshape(self.probs.shape)
        one, zero = self._log_odds
        return y * one + (1 - y) * zero

    def known_log_prob(self, y: Tensor, known: Tensor) -> Tensor:
        return self.log_prob_each(y).masked_fill(~known, 0).sum(-1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        integer().check("n", n)
        draws = uniform((n, *self.probs.shape), generator, self.probs)
        return (draws < self.probs).to(self.probs)

    @cached_property
    def aleatoric(self) -> Tensor:
        def entropies(f: Tensor, weights: Tensor, rows: slice) -> Tensor:
            p = f.sigmoid()
            return ((entr(p) + entr(1 - p)) * weights).sum((-1, -2))

        return by_nodes(self.belief, entropies)

    @cached_property
    def integrated_probs(self) -> Tensor:
        return by_nodes(self.belief, lambda f, weights, rows: (f.sigmoid() * weights).sum(-1))


def binary_probit(belief: FunctionGaussian) -> tuple[Tensor, Tensor]:
    """Return log sigmoid(± m / sqrt(1 + π/8 var)), the probit approximation of log p(1) and log p(0)."""
    scaled = probit_logits(belief.mean, belief.variance)
    return F.logsigmoid(scaled), F.logsigmoid(-scaled)


def quadrature(belief: FunctionGaussian) -> tuple[Tensor, Tensor]:
    """Return log p(1) and log p(0) by numerical integration over the logit."""

    def logs(f: Tensor, weights: Tensor, rows: slice) -> Tensor:
        each = (torch.logsumexp(F.logsigmoid(sign * f) + weights.log(), -1) for sign in (1, -1))
        return torch.stack(list(each), 1)

    both = by_nodes(belief, logs)
    return both[:, 0], both[:, 1]


BINARY_LINKS = {"probit": binary_probit, "quadrature": quadrature}


CLASSES_TOGETHER = 32  # classes up to which the predictives of a mixture are computed at once


@dataclass(frozen=True, eq=False, repr=False)
class SoftmaxPredictive(ClassPredictive):
    """Predictive of a class with Gaussian logits.

    ``entropy`` is that of ``probs``. ``epistemic`` is the mutual information of label and logits, ``aleatoric`` the
    expected entropy. Whatever the link is, both come from an integral over the log-odds of each class, or from
    quasi-random draws of the logits where that is inaccurate: the mutual information has a relative error of about a
    thousandth for small variances and of two or three percent for large ones.

    Args:
        belief: The Gaussian belief about the logits (B, C).
        link: "pairwise", "probit", "bridge" or "mc".
        samples: The number of draws, where logits are drawn.
        seed: The seed of the draws.

    >>> p = SoftmaxPredictive(FunctionGaussian(torch.zeros(1, 2), torch.eye(2)[None]))
    >>> p.probs
    tensor([[0.5000, 0.5000]])
    """

    belief: FunctionGaussian
    link: str = "pairwise"
    samples: int = 128
    seed: int = 0

    @staticmethod
    def mixed(components: tuple[SoftmaxPredictive, ...], weights: Tensor) -> ClassMixture:
        """Return the mixture of predictives of the same inputs."""
        return ClassMixture(tuple(_stack_components(components)), weights)

    @cached_property
    def log_probs(self) -> Tensor:
        return LINKS[self.link](self)

    @cached_property
    def logit_samples(self) -> Tensor:
        """Draws of the logits up to a common shift, (S, B, C): Sobol points, so equal seeds give equal draws."""
        return logit_draws(self.belief, self.samples, self.seed)

    @property
    def integrated_probs(self) -> Tensor:
        """The mean of the softmax, (B, C): by quadrature, or by draws where that is not accurate."""
        return self._integrals[0]

    @property
    def aleatoric(self) -> Tensor:
        return self._integrals[1]

    @cached_property
    def _integrals(self) -> tuple[Tensor, Tensor]:
        """The mean of the softmax (B, C), and the expected entropy (B,)."""
        if self.link == "mc":
            probs, entropies = softmax_and_entropy(self.logit_samples)
            return probs.mean(0), entropies.mean(0)
        outputs = self.belief.mean.shape[-1]
        mean, cov = self.belief.mean.reshape(-1, outputs), self.belief.cov.reshape(-1, outputs, outputs)
        numbers = mean.element_size() * outputs * max(LINK_COPIES * outputs, 3 * EXACT)
        parts = [self._integrate(mean[part], cov[part]) for part in chunks(len(mean), numbers, mean.device)]
        probs, entropy = (torch.cat(part) for part in zip(*parts, strict=True)) if parts else (mean, mean[:, 0])
        return probs.reshape(self.belief.mean.shape), entropy.reshape(self.belief.mean.shape[:-1])

    def _integrate(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean probabilities (N, C) and expected entropies (N,) for logits with these moments.

        The classes are taken one by one against all others: Σ_k E[entr(sigmoid(u_k))], an integral over a line for
        each. Its error grows with the correction of the mean of u; inputs for which it is large are drawn.
        """
        centre, std, bend = class_against_rest(mean, cov)
        nodes, weights = (t.to(mean) for t in (normal_rule(EXACT) if mean.shape[-1] == 2 else _hermite_rule()))
        p = torch.addcmul(centre.unsqueeze(-1), std.unsqueeze(-1), nodes).sigmoid_()
        probs, entropies = p @ weights, entr(p) @ weights
        entropy = entropies.sum(-1)
        if mean.shape[-1] > 2:
            information = (entr(probs) - entropies).clamp_min(0)
            error, width = ((information * each).sum(-1) for each in (bend, std))
            total = information.sum(-1)
            hard = (error > HARD_ERROR * total) | (width > WIDE_DEVIATION * total)
            if bool(hard.any()):
                most = 2 ** ((DRAWN_LOGITS // mean.shape[-1]).bit_length() - 1)  # Sobol points come in powers of two
                drawn = logit_draws(FunctionGaussian(mean[hard], cov[hard]), max(self.samples, most), self.seed)
                probs[hard], entropy[hard] = (part.mean(0) for part in softmax_and_entropy(drawn))
        return probs, entropy


LINKS: dict[str, Callable[[SoftmaxPredictive], Tensor]] = {
    "pairwise": lambda p: pairwise(p.belief),
    "probit": lambda p: probit(p.belief),
    "bridge": lambda p: bridge(p.belief),
    "mc": lambda p: torch.logsumexp(log_softmax(p.logit_samples), 0) - math.log(p.samples),
}


def _stack_components(components: Sequence[SoftmaxPredictive]) -> Iterator[SoftmaxPredictive]:
    """Yield the predictives with a leading dimension: all at once where their covariances are small."""
    mean = components[0].belief.mean
    each = mean.element_size() * mean.numel() * mean.shape[-1]
    for part in chunks(len(components), each, mean.device, most=None if mean.shape[-1] <= CLASSES_TOGETHER else 1):
        group = components[part]
        yield replace(group[0], belief=FunctionGaussian.stacked([component.belief for component in group]))


SMOOTHED_SHARE = 0.5  # largest share of the variance that is left to a link, for up to FEW draws
FEW_DRAWS = 16
LARGE_VARIANCE = 4.0  # variance of the logits at which the share is half of that
MIN_PROBABILITY = 1e-30  # probability below which logarithms of sums would lose digits
CHUNK_NUMBERS = 2**22  # numbers of drawn logits that are handled at once: near a CPU's caches, and enough for a GPU


@dataclass(frozen=True, eq=False, repr=False)
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
    def concat(parts: Sequence[AveragedClasses]) -> AveragedClasses:
        """Return the predictive of all data, from those of consecutive data."""
        if len(parts) == 1:
            return parts[0]
        errors = [part.error for part in parts if part.error is not None]
        return AveragedClasses(
            torch.cat([part.averages for part in parts]), torch.cat([part.entropies for part in parts]),
            torch.cat(errors) if len(errors) == len(parts) else None,
        )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
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
        return AveragedClasses(self.log_probs, *self._entropy_and_error)

    @property
    def integrated_probs(self) -> Tensor:
        return self.probs

    @property
    def aleatoric(self) -> Tensor:
        return self._entropy_and_error[0]

    @property
    def standard_error(self) -> Tensor:
        """The standard error of ``probs``, (B, C); an upper estimate, see ``AveragedClasses``."""
        return self.averaged.standard_error

    @cached_property
    def _entropy_and_error(self) -> tuple[Tensor, Tensor | None]:
        """The expected entropy, and the standard error of the average softmax, of the whole functions."""
        mean = self.parts[0].mean
        entropy, draws = mean.new_zeros(mean.shape[:-1]), dict[int, Tensor]()
        for part, weight in zip(self.parts, self.weights, strict=True):
            if part.pairs:  # what each draw adds to the probabilities, (K, B, [T,] C); cells may share draws
                draws.setdefault(id(part.steps), torch.zeros_like(part.steps))
            for pairs, logits in _draw_chunks(part):
                log_p = log_softmax(logits)
                p = log_p.exp()
                entropy -= weight / part.count * (p * log_p).sum(-1).sum(0)
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
        y = check_labels(y, self.parts[0].mean)
        each = []
        for logits, weight in self._smoothed():
            chosen = log_softmax(logits).gather(-1, y.expand(len(logits), *y.shape))
            each.append(chosen.squeeze(-1) + math.log(weight))
        return torch.cat(each).logsumexp(0)

    @cached_property
    def log_probs(self) -> Tensor:
        probs = torch.zeros_like(self.parts[0].mean)
        for logits, weight in self._smoothed():
            probs += weight * softmax(logits).sum(0)
        return probs.log() if bool((probs > MIN_PROBABILITY).all()) else self._log_averages()

    def _log_averages(self) -> Tensor:
        """Return the log-probabilities without the probabilities, which may round to zero; slower."""
        total = torch.full_like(self.parts[0].mean, -math.inf)
        for logits, weight in self._smoothed():
            total = torch.logaddexp(total, log_softmax(logits).logsumexp(0) + math.log(weight))
        return total

    def _smoothed(self) -> Iterator[tuple[Tensor, float]]:
        """Yield the logits of a few draws after another, (n, B, [T,] C), with the weight of each function.

        They have the share a of their variance, and are divided by the temperature t of the rest.
        """
        for part, weight in zip(self.parts, self.weights, strict=True):
            shrink = narrow = torch.ones_like(part.mean[..., :1])  # 1/t and √a, (B, [T,] 1)
            if part.pairs:
                spread = part.scale**2 * part.spreads.mean(0).unsqueeze(-1)
                rest = SMOOTHED_SHARE * min(1.0, math.sqrt(FEW_DRAWS / part.pairs)) * spread / (spread + LARGE_VARIANCE)
                shrink, narrow = (1 + 2 * LOGISTIC * rest * spread).rsqrt(), (1 - rest).sqrt()
            for _, logits in _draw_chunks(replace(part, mean=shrink * part.mean), shrink * narrow):
                yield logits, weight / part.count


def _draw_chunks(part: FunctionSamples, width: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield the numbers of a few draws and their functions (n, B, [T,] C); the mean alone if there are none.

    The steps of each input are multiplied by ``width`` (B, [T,] 1).
    """
    if not part.pairs:
        yield slice(0, 0), part.factor * part.mean.unsqueeze(0)
        return
    step = max(1, CHUNK_NUMBERS // max(1, 2 * part.mean.numel()))
    for start in range(0, part.pairs, step):
        pairs = slice(start, min(part.pairs, start + step))
        yield pairs, part.functions(pairs, width)
