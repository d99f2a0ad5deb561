"""Thompson sampling: the maxima of functions drawn from a posterior."""

from __future__ import annotations

import torch
from botorch.optim import optimize_acqf
from torch import Tensor

from lapwing.botorch.model import LapwingModel, require_bounds
from lapwing.core.random import derived_generator, global_seed
from lapwing.errors import UnsupportedError


def thompson(
    model: LapwingModel,
    bounds: Tensor,
    n: int,
    *,
    num_restarts: int = 4,
    raw_samples: int = 128,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return n points (n, d), each the maximum of a function drawn from the posterior: batch Thompson sampling.

    Args:
        model: A model with one output.
        bounds: The lower and upper bounds of the inputs, (2, d).
        n: The number of points.
        num_restarts: From how many points the gradient climbs.
        raw_samples: Among how many random points those are chosen.
        generator: The source of the functions and of the random points; the global generator if None.

    Raises:
        UnsupportedError: If the model has several outputs, or its method has no function draws.
        DataError: If the bounds are not (2, d) with lower ones below upper ones.
    """
    if model.num_outputs != 1:
        raise UnsupportedError(f"the model has {model.num_outputs} outputs; expected one to maximise.")
    require_bounds(bounds, None)
    paths, points, starts = model.paths(n, generator), [], derived_generator(generator, bounds)
    for number in range(n):
        one = lambda X, number=number: paths(X)[number].amax((-2, -1))
        with global_seed(starts.initial_seed() + number, bounds.device):  # BoTorch draws starts from the global one
            point, _ = optimize_acqf(one, bounds, q=1, num_restarts=num_restarts, raw_samples=raw_samples)
        points.append(point)
    return torch.cat(points)
