"""Outputs of a batch in the coordinates of the inducing points."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.core.data import Batch
from lapwing.curvature.blockwise import prior_precision
from lapwing.networks.jacobians import LayerJacobians
from lapwing.priors.kernel import prior_kernel
from lapwing.problem import Problem


def whitened_rows(
    problem: Problem, batch: Batch, anchors: tuple[LayerJacobians, ...], white: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, checked targets, prior covariance and whitened rows of a batch, in float64.

    Shapes: (B, [T,] C); those of the targets; (B, [T,] C, C); (B, [T,] C, r). ``anchors`` are the rows J_Z in parts and
    ``white`` (M, r) whitens their kernel. Cost: the work of C backward passes over the batch and its kernel with J_Z.
    """
    network = problem.network
    precision = prior_precision(problem.prior, network.layout, network.selection)
    outputs, covariances, rows = [], [], []
    for _, tangent in network.tangents(batch.inputs):
        jacobians = tangent.jacobians().double()
        outputs.append(tangent.f.double())
        covariances.append(precision.quadratic(jacobians).reshape(*tangent.f.shape, -1))
        rows.append(torch.cat([prior_kernel(jacobians, problem.prior, part) for part in anchors], 1) @ white)
    f = torch.cat(outputs)
    y = problem.likelihood.targets(f, batch.targets)
    return f, y, torch.cat(covariances), torch.cat(rows).reshape(*f.shape, -1)
