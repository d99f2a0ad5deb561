"""Gaussian priors: what a precision means, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.networks.jacobians import Block
from lapwing.networks.selection import Selection
from lapwing.priors import diagonal, isotropic, per_layer
from lapwing.priors.base import Prior
from tests.tolerances import assert_close

D = torch.float64
LIKE = torch.empty(0, dtype=D)
SELECTION = Selection(("body.weight", "body.bias", "scale", "head.weight"), ((3, 2), (3,), (4,), (2, 3)))
WHOLE = 6 + 3 + 4 + 6
EACH = torch.arange(1, WHOLE + 1, dtype=D)
PARTS = Selection(SELECTION.names, SELECTION.shapes, torch.tensor([1, 2, 7, 9, 18]))

PRIORS: dict[str, tuple[Callable[[], Prior], Tensor]] = {
    "isotropic": (lambda: isotropic(2.0), torch.full((WHOLE,), 2.0, dtype=D)),
    "isotropic tensor": (lambda: isotropic(torch.tensor(2.0)), torch.full((WHOLE,), 2.0, dtype=D)),
    "per layer, one": (lambda: per_layer(3.0), torch.full((WHOLE,), 3.0, dtype=D)),
    "per layer": (lambda: per_layer(torch.tensor([1.0, 2.0, 3.0])),
                  torch.tensor([1.0] * 9 + [2.0] * 4 + [3.0] * 6, dtype=D)),
    "per layer, named": (lambda: per_layer({"head": 3.0, "": 2.0, "body": 1.0}),
                         torch.tensor([1.0] * 9 + [2.0] * 4 + [3.0] * 6, dtype=D)),
    "diagonal": (lambda: diagonal(EACH), EACH),
    "diagonal, one": (lambda: diagonal(4.0), torch.full((WHOLE,), 4.0, dtype=D)),
    "diagonal, named": (lambda: diagonal({"body.weight": 1.0, "body.bias": 2.0, "scale": 3.0, "head.weight": 4.0}),
                        torch.tensor([1.0] * 6 + [2.0] * 3 + [3.0] * 4 + [4.0] * 6, dtype=D)),
}  # fmt: skip


@pytest.mark.parametrize("name", PRIORS)
def test_the_precision_of_every_weight(name: str) -> None:
    make, expected = PRIORS[name]
    prior = make().bound(SELECTION, LIKE)
    assert_close(prior.vector, expected)
    assert_close(prior.logdet(), expected.log().sum())
    theta = torch.randn(WHOLE, dtype=D)
    assert_close(prior.penalty(theta), (theta**2 * expected).sum())


@pytest.mark.parametrize("kind", [isotropic, per_layer, diagonal])
def test_a_number_keeps_all_its_digits(kind: Callable[..., Prior]) -> None:
    assert kind(0.6).bound(SELECTION, LIKE).vector[0].item() == 0.6  # not float32's 0.60000002


@pytest.mark.parametrize("name", [name for name in PRIORS if name != "diagonal"])
def test_a_subnetwork_takes_its_own_share(name: str) -> None:
    make, expected = PRIORS[name]
    prior = make().bound(PARTS, LIKE)
    selected = expected[PARTS.index]
    assert_close(prior.vector, selected)
    assert_close(prior.logdet(), selected.log().sum())
    theta = torch.randn(5, dtype=D)
    assert_close(prior.penalty(theta), (theta**2 * selected).sum())


@pytest.mark.parametrize("mean", [0.7, torch.tensor(0.7), torch.linspace(-1, 1, WHOLE)])
@pytest.mark.parametrize("kind", [isotropic, per_layer, diagonal])
def test_the_penalty_is_about_the_mean(mean: float | Tensor, kind: Callable[..., Prior]) -> None:
    prior = kind(2.5, mean).bound(SELECTION, LIKE)
    theta = torch.randn(WHOLE, dtype=D)
    assert_close(prior.penalty(theta), 2.5 * (theta - torch.as_tensor(mean, dtype=D)).square().sum())


def test_on_a_block_a_prior_takes_the_blocks_form() -> None:
    prior = diagonal(EACH).bound(SELECTION, LIKE)
    joined = prior.on(Block("rows", "body.weight", (3, 2), "body.bias")).whole
    assert joined.tolist() == [[[1, 2, 7], [3, 4, 8], [5, 6, 9]]]
    turned = prior.on(Block("columns", "head.weight", (2, 3))).whole
    assert turned.tolist() == [[[14, 17], [15, 18], [16, 19]]]
    assert prior.on(Block("dense", "scale", (4,))).whole.tolist() == [10, 11, 12, 13]


def test_on_a_block_of_one_layer_a_prior_by_layer_is_a_number() -> None:
    prior = per_layer(torch.tensor([1.0, 2.0, 3.0])).bound(SELECTION, LIKE)
    assert prior.on(Block("rows", "body.weight", (3, 2), "body.bias")).whole.item() == 1.0
    assert prior.on(Block("dense", "scale", (4,))).whole.item() == 2.0
    across = prior.on(Block("rows", "head.weight", (2, 3))).whole
    assert across.item() == 3.0


def test_a_block_across_two_layers_gets_each_layers_precision() -> None:
    selection = Selection(("lin.weight", "bias"), ((3, 2), (3,)))
    prior = per_layer({"lin": 1.0, "": 5.0}).bound(selection, LIKE)
    assert prior.on(Block("rows", "lin.weight", (3, 2), "bias")).whole.tolist() == [[[1, 1, 5]] * 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: isotropic(0.0), "run from 0 to 0; expected positive, finite"),
        (lambda: isotropic(-1.0), "run from -1 to -1"),
        (lambda: isotropic(math.nan), "nan"),
        (lambda: isotropic(math.inf), "inf"),
        (lambda: diagonal(torch.cat([EACH[1:], torch.zeros(1)])), "run from 0 to 19"),
        (lambda: isotropic(torch.ones(2)), "the prior Isotropic got 2 precisions; expected 1"),
        (
            lambda: per_layer(torch.ones(4)),
            "PerLayer got 4 precisions; expected 1 or 3, one for each of body",
        ),
        (lambda: diagonal(torch.ones(7)), "the prior DiagonalPrior got 7 precisions; expected 1 or 19"),
        (lambda: per_layer({"body": 1.0}), r"missing \['', 'head'\], unknown \[\]"),
        (lambda: diagonal({"body.weight": 1.0, "tail": 2.0}), r"unknown \['tail'\]"),
        (lambda: isotropic(1.0, torch.zeros(4)), "prior mean has 4 entries; expected 1 or 19"),
    ],
)
def test_what_is_refused(make: Callable[[], Prior], message: str) -> None:
    with pytest.raises(lw.errors.NumericalError, match=message):
        make().bound(SELECTION, LIKE)


def test_a_mean_that_is_not_finite_is_refused() -> None:
    for mean in (math.nan, torch.full((WHOLE,), math.inf)):
        with pytest.raises(lw.errors.NumericalError, match=r"prior mean.*finite"):
            isotropic(1.0, mean).bound(SELECTION, LIKE)


def test_gradients_reach_the_given_precisions() -> None:
    given = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)
    prior = per_layer(given).bound(SELECTION, LIKE)
    prior.logdet().backward()
    assert_close(given.grad, torch.tensor([9.0, 4.0, 6.0], dtype=D) / given.detach())
