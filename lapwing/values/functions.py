"""Beliefs that consist of drawn functions, and beliefs that are differentiable in the inputs.

The Jacobian of a network has a path back to its inputs, and another one to its weights. Callers get the first alone:
``backward`` on a result writes gradients to the inputs and to nothing else, and costs no gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.data.inputs import Inputs, map_tensors, tensors_in, wants_slopes
from lapwing.values.gaussian import Deferred, FunctionGaussian


@dataclass(frozen=True, eq=False)
class FunctionSamples:
    """2 K functions of equal weight, ``factor`` · (mean ± ``width`` · step) for K steps; the mean alone if K is zero.

    A step and its opposite are one draw: errors that are odd in the step cancel, and both cost one product with the
    Jacobian. Shapes: ``mean`` (B, [T,] C), ``steps`` (K, B, [T,] C). Beliefs with the same ``steps`` tensor share
    their draws.

    >>> FunctionSamples.of(torch.zeros(1, 2), torch.tensor([[[1.0, 2.0]]])).functions(slice(0, 1))[:, 0]
    tensor([[ 1.,  2.],
            [-1., -2.]])
    """

    mean: Tensor
    steps: Tensor
    spreads: Tensor  # (K, B, [T]), the variance between the outputs of each step
    factor: float = 1.0
    width: float = 1.0

    @classmethod
    def of(cls, mean: Tensor, steps: Tensor) -> FunctionSamples:
        """Return the functions mean ± step for all steps."""
        return cls(mean, steps, steps.var(-1, correction=0) if len(steps) else steps.new_zeros(steps.shape[:-1]))

    @property
    def pairs(self) -> int:
        """K, the number of draws; zero where the functions do not differ."""
        return len(self.steps) if self.width else 0

    @property
    def scale(self) -> float:
        """The number that steps are multiplied by."""
        return self.factor * self.width

    def functions(self, pairs: slice, width: Tensor | None = None) -> Tensor:
        """Return the functions of some draws, (2 k, B, [T,] C): those with plus before those with minus.

        The steps of each input are multiplied by ``width`` (B, [T,] 1).
        """
        steps, mean = self.steps[pairs], self.factor * self.mean
        out = steps.new_empty(2, *steps.shape)
        by = torch.ones_like(mean[..., :1]) if width is None else width
        torch.addcmul(mean, steps, by, value=self.scale, out=out[0])
        torch.addcmul(mean, steps, by, value=-self.scale, out=out[1])
        return out.flatten(0, 1)

    def scaled(self, factor: float) -> FunctionSamples:
        """Return the belief about ``factor`` times the outputs."""
        return replace(self, factor=self.factor * factor)

    def moved(self, by: Tensor) -> FunctionSamples:
        """Return the belief about the outputs plus ``by``, which has a number for each output of a datum, (C,)."""
        return replace(self, mean=self.mean + by.to(self.mean) / self.factor)

    def widened(self, factor: float) -> FunctionSamples:
        """Return the belief with its covariance times ``factor``, around the same mean."""
        return replace(self, width=self.width * factor**0.5)

    def rows(self, rows: Tensor | tuple[Tensor, ...]) -> FunctionSamples:
        """Return the belief about some of the data: inputs (n,), or inputs and tokens, (n,) each."""
        index = rows if isinstance(rows, tuple) else (rows,)
        inner: Any = (slice(None), *index)
        return replace(self, mean=self.mean[index], steps=self.steps[inner], spreads=self.spreads[inner])

    @staticmethod
    def concat(parts: Sequence[FunctionSamples]) -> FunctionSamples:
        """Return the belief about all data, from those about consecutive data."""
        mean, steps = torch.cat([part.mean for part in parts]), torch.cat([part.steps for part in parts], 1)
        return replace(parts[0], mean=mean, steps=steps, spreads=torch.cat([part.spreads for part in parts], 1))

    @property
    def gaussian(self) -> FunctionGaussian:
        """The Gaussian belief with the mean and the covariance of the functions."""
        steps = self.scale * self.steps
        return FunctionGaussian.of_deviations(self.factor * self.mean, steps, max(1, len(steps)), joint=False)


Compute = Callable[[Inputs], Sequence[Tensor]]


def isolate(compute: Compute, x: Inputs) -> tuple[Tensor, ...]:
    """Return what ``compute`` returns for x, differentiable once in the tensors of x that require a gradient.

    The graph inside leads to copies of these tensors, so that a backward pass reaches nothing else.

    Args:
        compute: Returns tensors for inputs in the form of ``x``.
        x: The inputs.

    >>> weight, x = torch.ones(2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    >>> isolate(lambda x: [x @ weight], x)[0].sum().backward()
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

    tensors.extend(isolate(whole, x))
    means, covariances = tensors[: len(forms)], iter(tensors[len(forms) :])
    later = lambda i, part: lambda: isolate(lambda inner: [part(compute(inner)[i])], x)[0]
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
