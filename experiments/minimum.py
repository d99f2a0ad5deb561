"""Networks at the exact minimum of their loss, and variances by the exact Hessian there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.methods.hfl import ResponsePosterior
from lapwing.methods.hfl_response import Responder


def squared_error(y: Tensor, variance: float) -> Callable[[Tensor], Tensor]:
    """Return the loss of outputs: the squared error over twice the variance of the noise."""
    return lambda f: 0.5 * (f - y).square().sum() / variance


def minimised(
    model: nn.Module,
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    precision: float,
    rows: int | None = None,
    newton: bool = True,
) -> Any:
    """Return a copy of the model at the minimum of the loss of its outputs at x plus half the precision times |w|².

    L-BFGS comes near and then is slow along flat directions. Newton steps with the absolute eigenvalues of the Hessian
    leave saddle points and reach the minimum up to rounding. ``rows`` limits how many rows of the Hessian are computed
    at once, to save memory; ``newton=False`` leaves these steps out, for networks that are too large for a Hessian.
    """
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    shapes = [p.shape for p in parameters]
    names = [name for name, _ in model.named_parameters()]

    def objective(flat: Tensor) -> Tensor:
        parts = flat.split([s.numel() for s in shapes])
        values = {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        f = torch.func.functional_call(model, values, (x,))
        return loss(f) + 0.5 * precision * flat.square().sum()

    start = torch.nn.utils.parameters_to_vector(parameters).detach()
    point = _lbfgs(objective, start)
    point = _newton(objective, point, rows) if newton else point
    torch.nn.utils.vector_to_parameters(point, parameters)
    return model.eval()


def _lbfgs(objective: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    flat = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [flat],
        max_iter=8000,
        history_size=100,
        tolerance_grad=1e-7,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = objective(flat)
        value.backward()
        return value

    optimiser.step(closure)  # type: ignore[arg-type]
    return flat.detach()


def _newton(objective: Callable[[Tensor], Tensor], point: Tensor, rows: int | None) -> Tensor:
    for _ in range(60):
        slope = torch.func.grad(objective)(point)
        values, vectors = torch.linalg.eigh(torch.func.jacrev(torch.func.grad(objective), chunk_size=rows)(point))
        step = vectors @ ((vectors.mT @ slope) / values.abs().clamp_min(1e-6 * float(values[-1])))
        decrement, length, here = float(slope @ step), 1.0, float(objective(point))
        while float(objective(point - length * step)) > here - 1e-4 * length * decrement and length > 1e-6:
            length /= 2
        point = point - length * step
        if decrement < 1e-14 or length <= 1e-6:
            break
    return point


def exact_variance(posterior: ResponsePosterior, x: Tensor) -> Tensor:
    """Return gᵀ H⁻¹ g with the full Hessian, (B,)."""
    responder = posterior.responder
    assert isinstance(responder, Responder)
    start = torch.zeros(len(x), responder.objective.size).to(responder.objective.centre)
    slopes = responder.objective.slopes(start, x.to(start), torch.ones(len(x), 1).to(start))
    return (slopes * responder.hessian.solve(slopes)).sum(1)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation, or zero if ``a`` is constant.

    >>> round(rank_correlation(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.0, 3.0, 4.0])), 6)
    1.0
    """
    if float(a.std()) == 0:
        return 0.0
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])
