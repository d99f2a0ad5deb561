"""Links: from a Gaussian belief about logits to class probabilities."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from lapwing.core.gaussian import FunctionGaussian, psd_root
from lapwing.core.memory import gathered, runs

LOGISTIC = 3 / math.pi**2  # one over the variance of the standard logistic distribution
PAIRED = 256  # classes up to which the covariance of each pair of logits is used
COPIES = 4  # of a (C, C) intermediate that a link holds for each input


def probit(belief: FunctionGaussian) -> Tensor:
    """Return log softmax(m / sqrt(1 + π/8 var)), (B, C). It needs variances only."""
    return probit_of(belief.mean, belief.variance).log_softmax(-1)


def probit_of(mean: Tensor, variance: Tensor) -> Tensor:
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
    flat = mean.reshape(-1, outputs)
    if outputs <= PAIRED:
        cov = belief.cov.reshape(-1, outputs, outputs)
        own = cov.diagonal(dim1=-2, dim2=-1)
    else:
        cov, own = None, belief.centred_variance.reshape(-1, outputs)
        if not bool((own > 0).any()):  # the plain network: l is log softmax(m), which takes no pairs
            return mean.log_softmax(-1)
    logits = []
    for part in runs(len(flat), COPIES * flat.element_size() * outputs**2, flat.device):
        spread = own[part].unsqueeze(-1) + own[part].unsqueeze(-2)
        if cov is not None:
            spread = torch.add(spread, cov[part], alpha=-2).clamp_min(0)
        logits.append(paired(flat[part], spread))
    return torch.cat(logits).reshape(mean.shape).log_softmax(-1) if logits else mean.log_softmax(-1)


def paired(mean: Tensor, spread: Tensor) -> Tensor:
    """Return l (..., C) of ``pairwise`` from the means (..., C) and the variances s of all differences, (..., C, C)."""
    ahead = mean.unsqueeze(-2) - mean.unsqueeze(-1)  # m_i - m_k
    shrink = torch.add(torch.ones_like(spread[:1, :1, :1]), spread, alpha=LOGISTIC).rsqrt()
    return -torch.logsumexp(ahead * shrink, -1)


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
    return torch.where(none, mean.log_softmax(-1), alpha.log() - alpha.sum(-1, keepdim=True).log())


def logit_draws(belief: FunctionGaussian, n: int, seed: int) -> Tensor:
    """Return n draws of the logits, (n, B, C), up to a shift common to all logits of an input.

    The draws are antithetic, moment-matched Sobol points on the C - 1 dimensional space of logits that sum to zero,
    the same points for every input. Cost: an eigendecomposition of a (C - 1, C - 1) matrix for each input.
    """
    mean, outputs = belief.mean, belief.mean.shape[-1]
    basis, points = _zero_sum_basis(outputs).to(mean), _normal_points(n, outputs - 1, seed).to(mean)
    flat, cov = mean.reshape(-1, outputs), belief.cov.reshape(-1, outputs, outputs)

    def draws(part: slice) -> Tensor:
        root = basis @ psd_root(basis.mT @ cov[part] @ basis)
        return flat[part] + torch.einsum("bcd,nd->nbc", root, points)

    each = 2 * COPIES * flat.element_size() * outputs**2
    parts = (draws(part) for part in runs(len(flat), each, flat.device))
    return gathered(parts, len(flat), 1).reshape(n, *mean.shape) if len(flat) else mean.new_zeros(n, *mean.shape)


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
