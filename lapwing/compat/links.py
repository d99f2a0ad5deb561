"""The links of laplace-torch that Lapwing does not have: the Laplace bridge on logits conditioned on a sum of zero."""

from __future__ import annotations

import torch
from torch import Tensor


def conditioned_bridge(mean: Tensor, cov: Tensor, normalised: bool) -> Tensor:
    r"""Return the mean (B, C) of the Dirichlet distribution that the Laplace bridge gives (Hobbhahn et al. 2022).

    The logits are first conditioned on a sum of zero, m - S 1 (1ᵀm) / (1ᵀS1) and S - S 1 1ᵀ S / (1ᵀS1). With
    ``normalised`` they are then scaled so that the mean of their variances is √(C / 2). The native link "bridge"
    projects the logits instead, since a shift of all logits does not change a softmax.
    """
    count = mean.shape[-1]
    rows, total = cov.sum(-1), cov.sum((-2, -1)).unsqueeze(-1)
    mean = mean - rows * mean.sum(-1, keepdim=True) / total
    variance = cov.diagonal(dim1=-2, dim2=-1) - rows.square() / total
    if normalised:
        scale = variance.mean(-1, keepdim=True) / (count / 2) ** 0.5
        mean, variance = mean / scale.sqrt(), variance / scale
    peak = (mean + torch.logsumexp(-mean, -1, keepdim=True)).clamp_max(80).exp() / count**2
    alpha = (1 - 2 / count + peak) / variance
    return alpha / alpha.sum(-1, keepdim=True)
