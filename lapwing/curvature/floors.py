"""Lower limits for the diagonal of a curvature, so that a g-prior has no precision of zero."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.networks.selection import Selection


def floored(values: Tensor) -> Tensor:
    """Raise values to at least a thousandth of their median, or of their mean if the median is zero.

    If all values are zero, return ones.
    """
    typical = values.median()
    typical = typical if float(typical) > 0 else values.mean()
    return values.clamp_min(float(1e-3 * typical) or 1.0)


def floored_by_layer(values: Tensor, selection: Selection) -> Tensor:
    """Apply ``floored`` to each layer separately: values (P,) in the order of theta, selected weights only."""
    names = selection.layer_of()
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    numbers = torch.tensor([order[name] for name in names]).repeat_interleave(torch.tensor(selection.sizes))
    numbers = selection.picked(numbers).to(values.device)
    raised = values.clone()
    for number in range(len(order)):
        in_layer = numbers == number
        raised[in_layer] = floored(values[in_layer])
    return raised
