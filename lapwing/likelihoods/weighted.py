"""Loss, count and curvature of data with weights: a datum with weight w counts w times."""

from __future__ import annotations

from torch import Tensor

from lapwing.likelihoods.hessian import OutputHessian
from lapwing.likelihoods.protocol import Likelihood


def spread(weights: Tensor, like: Tensor) -> Tensor:
    """Return the weights of samples (B,) in a shape that multiplies ``like`` (B, ...), and in its dtype."""
    return weights.to(like).reshape(-1, *[1] * (like.ndim - 1))


def weighted_loss(likelihood: Likelihood, f: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    """Return the loss of every datum at unit dispersion times its weight, (B, [T])."""
    loss = likelihood.loss(f, y)
    return loss if weights is None else loss * spread(weights, loss)


def weighted_count(likelihood: Likelihood, f: Tensor, y: Tensor, weights: Tensor | None) -> int | Tensor:
    """Return the number of data without the ignored ones, each as often as its weight says.

    A token or pixel has the weight of its sample. One with several labels counts if one of them is known.
    """
    if weights is None:
        return likelihood.count(f, y)
    known = ~likelihood.ignored(y)
    known = known.any(-1) if y.ndim == f.ndim else known
    return known.reshape(len(known), -1).sum(1).to(weights) @ weights


def weighted_hessian(hessian: OutputHessian, weights: Tensor | None) -> OutputHessian:
    """Return the Hessian of the loss in the outputs times the weight of its sample."""
    if weights is None:
        return hessian
    diagonal = hessian.diagonal * spread(weights, hessian.diagonal)
    return OutputHessian(diagonal, None if hessian.outer is None else hessian.outer * spread(weights.sqrt(), diagonal))


def weighted_seeds(seeds: Tensor, weights: Tensor | None) -> Tensor:
    """Return seeds (K, B, [T,] C), columns of roots of the curvature, times the root of the weight of their sample."""
    return seeds if weights is None else seeds * spread(weights.sqrt(), seeds[0])


def as_count(value: float | Tensor) -> int | float:
    """Return a sum of weights as a number, a whole one as an integer."""
    number = float(value)
    return int(number) if number.is_integer() else number
