"""Beliefs about outputs that are differentiable in the inputs.

The Jacobian of a network has a path back to its inputs, and another one to its weights. Callers get the first alone:
``backward`` on a result writes gradients to the inputs and to nothing else, and costs no gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.core.gaussian import Deferred, FunctionGaussian
from lapwing.core.inputs import Inputs, map_tensors, tensors_in, wants_slopes

Compute = Callable[[Inputs], Sequence[Tensor]]


def isolated(compute: Compute, x: Inputs) -> tuple[Tensor, ...]:
    """Return what ``compute`` returns for x, differentiable once in the tensors of x that require a gradient.

    The graph inside leads to copies of these tensors, so that a backward pass reaches nothing else.

    Args:
        compute: Returns tensors for inputs in the form of ``x``.
        x: The inputs.

    >>> weight, x = torch.ones(2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    >>> isolated(lambda x: [x @ weight], x)[0].sum().backward()
    >>> x.grad.sum(), weight.grad
    (tensor(6.), None)
    """
    if not wants_slopes(x):
        return tuple(compute(x))
    return _Isolated.apply(compute, x, *(t for t in tensors_in(x) if t.requires_grad))  # type: ignore[no-any-return]


def differentiable_beliefs(
    compute: Callable[[Inputs], Sequence[FunctionGaussian]], x: Inputs
) -> Sequence[FunctionGaussian]:
    """Return the beliefs that ``compute`` returns for x; differentiable in x if x wants slopes.

    A covariance that is computed when it is needed is computed anew with its graph.
    """
    if not wants_slopes(x):
        return compute(x)
    tensors: list[Tensor] = []
    forms: list[FunctionGaussian] = []

    def whole(inner: Inputs) -> list[Tensor]:
        forms.extend(compute(inner))
        covariances = (form.covariance for form in forms)
        return [*(form.mean for form in forms), *(each for each in covariances if isinstance(each, Tensor))]

    tensors.extend(isolated(whole, x))
    means, covariances = tensors[: len(forms)], iter(tensors[len(forms) :])
    later = lambda i, part: lambda: isolated(lambda inner: [part(compute(inner)[i])], x)[0]
    return [
        FunctionGaussian(
            mean,
            next(covariances)
            if isinstance(form.covariance, Tensor)
            else Deferred(
                later(i, lambda b: b.variance), later(i, lambda b: b.cov), later(i, lambda b: b.centred_variance)
            ),
            form.joint,
        )
        for i, (form, mean) in enumerate(zip(forms, means, strict=True))
    ]


class _Isolated(torch.autograd.Function):
    """A computation whose graph is kept inside it."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, x: Inputs, *leaves: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        copies = [leaf.detach().requires_grad_() for leaf in leaves]
        given = iter(copies)
        with torch.enable_grad():
            inner = map_tensors(x, lambda t: next(given) if t.requires_grad else t)
            results = tuple(compute(inner))
        ctx.copies, ctx.results = copies, results
        return tuple(result.detach() for result in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = [(r, g) for r, g in zip(ctx.results, grads, strict=True) if r.requires_grad]
        if not pairs:
            return None, None, *(torch.zeros_like(copy) for copy in ctx.copies)
        results, seeds = zip(*pairs, strict=True)
        slopes = torch.autograd.grad(results, ctx.copies, seeds, retain_graph=True, materialize_grads=True)
        return None, None, *slopes
