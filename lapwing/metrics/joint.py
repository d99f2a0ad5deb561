"""Scores of the labels of several inputs together, from class probabilities under draws of the function.

One draw gives independent labels; that all labels share the draw makes them depend on each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.core.random import independent_generator, uniform
from lapwing.core.settings import integer
from lapwing.errors import DataError
from lapwing.metrics.arrays import Values, labels, numbers


def joint_log_likelihood(probs: Values, y: Values, *, ignore_index: int = -100) -> float:
    """Return the log-probability of all labels together: log of the mean over draws of the product over inputs.

    Args:
        probs: Class probabilities under each draw, (S, B, C), or (S, B, C, H, W) of images; for a posterior
            ``posterior.function_samples(x, S).softmax(-1)``.
        y: Labels, (B,), or (B, H, W).
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.

    Raises:
        DataError: Shapes do not fit, rows are no probabilities, or a label is not one of the classes.

    >>> draws = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    >>> round(joint_log_likelihood(draws, torch.tensor([1, 1])), 4)  # not 2 log ½: the labels are the same
    -0.6931
    """
    right = _right(probs, y, ignore_index)
    return float(right.log().sum(1).logsumexp(0)) - math.log(len(right))


def dyadic_log_likelihood(
    probs: Values,
    y: Values,
    *,
    repeats: int = 10,
    pairs: int = 1000,
    ignore_index: int = -100,
    generator: torch.Generator | None = None,
) -> float:
    """Return the mean joint log-probability of labels that are drawn with replacement from random pairs of inputs.

    For a pair of inputs, m of the labels are the first one's and the other ``repeats`` - m the second one's, with m
    binomial; the mean over m is exact. Few inputs that occur often show whether a posterior knows how outputs depend
    on each other (Osband et al. 2022).

    Args:
        probs: Class probabilities under each draw, (S, B, C), or (S, B, C, H, W) of images.
        y: Labels, (B,), or (B, H, W).
        repeats: The number of labels that are scored together.
        pairs: The number of pairs, drawn from all inputs.
        ignore_index: The label of data that do not count, as in ``nn.CrossEntropyLoss``.
        generator: For the pairs; a fixed seed by default.

    Returns:
        The log-probability of ``repeats`` labels; divide by ``repeats`` for that of one.

    Raises:
        DataError: Shapes do not fit, rows are no probabilities, or a label is not one of the classes.

    >>> draws = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    >>> round(dyadic_log_likelihood(draws, torch.tensor([1, 1])), 4)
    -0.6931
    """
    integer().check("repeats", repeats)
    integer().check("pairs", pairs)
    right = _right(probs, y, ignore_index)
    first, second = _random_pairs(right, pairs, generator)
    total = 0.0
    for m in range(repeats + 1):
        # xlogy(0, 0) is 0: a label of probability zero that does not occur costs nothing.
        together = torch.xlogy(m, right[:, first]) + torch.xlogy(repeats - m, right[:, second])
        weight = math.comb(repeats, m) / 2**repeats
        total += weight * (float(together.logsumexp(0).mean()) - math.log(len(right)))
    return total


def _right(probs: Values, y: Values, ignore_index: int) -> Tensor:
    """Return the probabilities of the labels under each draw, (S, B), without the ignored ones."""
    probs, y = numbers("probs", probs), numbers("y", y)
    if probs.ndim != y.ndim + 2 or probs.shape[1:2] != y.shape[:1] or not len(probs):
        raise DataError(
            f"probs has the shape {tuple(probs.shape)}, y has {tuple(y.shape)}; expected (S, B, C) under S draws, and "
            "(B,). Probabilities without draws are probs.unsqueeze(0)."
        )
    flat, repeated = labels(probs.flatten(0, 1), y.repeat(len(probs), *[1] * (y.ndim - 1)), ignore_index)
    return flat.gather(1, repeated.unsqueeze(1)).reshape(len(probs), -1)


def _random_pairs(right: Tensor, pairs: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return the numbers of two different inputs for each pair."""
    count = right.shape[1]
    if count < 2:
        raise DataError(f"y has {count} label that counts; expected at least two for pairs.")
    draws = uniform((2, pairs), independent_generator(generator), right)
    first, step = (draws[0] * count).long(), 1 + (draws[1] * (count - 1)).long()
    return first, (first + step) % count
