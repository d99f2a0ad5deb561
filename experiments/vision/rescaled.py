"""A network whose weights before norms have another scale, and which is the same function."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn

from lapwing.errors import DataError

CHANGE = 1e-3  # relative change of the outputs above which the network is another function


def rescaled(model: nn.Module, x: Tensor, factor: float) -> nn.Module:
    """Return a copy with every convolution before a BatchNorm multiplied by the factor, with the running statistics.

    A convolution belongs to the BatchNorm that is defined next after it.

    Args:
        model: The network, in evaluation mode.
        x: A few inputs, at which the outputs are compared.
        factor: The positive factor.

    Raises:
        DataError: If there is no such convolution, the factor is not positive, or the outputs change.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).eval()
    >>> other = rescaled(net, torch.ones(1, 1, 4, 4), 10.0)
    >>> torch.allclose(other[0].weight, 10 * net[0].weight)
    True
    """
    if not factor > 0:
        raise DataError(f"factor is {factor!r}; expected a positive number.")
    other, count = copy.deepcopy(model), 0
    with torch.no_grad():
        for layer, norm in pairwise(other.modules()):
            if not isinstance(layer, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d) or layer.bias is not None:
                continue
            assert norm.running_mean is not None
            assert norm.running_var is not None
            layer.weight.mul_(factor)
            norm.running_mean.mul_(factor)
            norm.running_var.copy_(factor**2 * (norm.running_var + norm.eps) - norm.eps)
            count += 1
        before, after = model(x), other(x)
    change = float((after - before).abs().max() / before.abs().max())
    if not count or not change <= CHANGE:
        raise DataError(
            f"{count} convolutions were rescaled and the outputs changed by {change:.2g}; expected some convolutions, "
            "each defined before its BatchNorm, and no change."
        )
    return other
