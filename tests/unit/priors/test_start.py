"""Precisions from which a search starts: γ / |w|² with γ at half of its largest value."""

from __future__ import annotations

import torch

import lapwing as lw
from lapwing.networks.selection import Selection
from lapwing.priors.base import BoundPrior, group_starting_precisions, single_starting_precision, starting_precisions
from tests.tolerances import assert_close

D = torch.float64
WEIGHTS = Selection(("a.weight", "b.weight"), ((1, 3), (1, 2)))
THETA = torch.tensor([1.0, -2.0, 2.0, 0.5, 0.5], dtype=D)


def bound(prior: BoundPrior) -> BoundPrior:
    return prior.bound(WEIGHTS, torch.empty(0))


def test_one_precision() -> None:
    """Two data for five weights determine at most two; |w|² is 9.5."""
    expected = torch.tensor(0.5 * 2 / 9.5, dtype=D)
    assert_close(starting_precisions(bound(lw.isotropic()), THETA, rows=2), expected)
    assert_close(single_starting_precision(THETA, rows=2), expected)
    enough = torch.tensor(0.5 * 5 / 9.5, dtype=D)
    assert_close(starting_precisions(bound(lw.isotropic()), THETA, rows=100), enough)


def test_a_group_whose_weights_are_larger_starts_at_a_smaller_precision() -> None:
    prior = bound(lw.per_layer())
    expected = torch.tensor([0.5 * 3 / 9, 0.5 * 2 / 0.5], dtype=D)
    assert_close(starting_precisions(prior, THETA, rows=7), expected)
    scale = torch.tensor([10.0] * 3 + [1.0] * 2, dtype=D)
    assert_close(starting_precisions(prior, scale * THETA, rows=7), expected / torch.tensor([100.0, 1.0], dtype=D))


def test_one_precision_for_each_weight_starts_at_one_value() -> None:
    values = starting_precisions(bound(lw.priors.diagonal()), THETA, rows=100)
    assert_close(values, torch.full((5,), 0.5 * 5 / 9.5, dtype=D))


def test_weights_at_the_prior_mean() -> None:
    """Alone, their precision is infinite; to start from, it is cut."""
    theta = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=D)
    prior = bound(lw.per_layer())
    assert_close(starting_precisions(prior, theta, rows=100), torch.tensor([0.5, 1e8], dtype=D))
    assert bool(group_starting_precisions(prior, theta, rows=100)[1].isinf())
