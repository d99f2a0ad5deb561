"""L-BFGS on a few hyperparameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def minimise(
    objective: Callable[[Tensor], Tensor], start: Tensor, max_steps: int, tolerance: float
) -> tuple[Tensor, float]:
    """Minimise by L-BFGS with a strong Wolfe line search; return the last point and the largest slope there.

    Stops when the largest slope is below ``tolerance``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = start.clone().requires_grad_()
        optimiser = torch.optim.LBFGS(
            [x],
            lr=1.0,
            max_iter=max_steps,
            tolerance_grad=tolerance,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimiser.zero_grad()
            value = objective(x)
            value.backward()
            return value

        optimiser.step(closure)
        closure()
    assert x.grad is not None
    return x.detach(), float(x.grad.abs().max())
