"""Chosen outputs: which numbers are taken, and which are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.values.gaussian import ChosenOutputs, FunctionGaussian

CPU = torch.device("cpu")


def given(outputs: Any, tokens: Any = None, shape: tuple[int, ...] = (4,)) -> ChosenOutputs:
    chosen = ChosenOutputs.given(outputs, tokens, shape, CPU)
    assert chosen is not None
    return chosen


def belief(*shape: int) -> FunctionGaussian:
    """A belief about outputs (B, [T,] C) of which no two numbers are the same."""
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(*shape, shape[-1], generator=generator)
    return FunctionGaussian(torch.randn(*shape, generator=generator), root @ root.mT)


def picked(whole: FunctionGaussian, places: list[list[tuple[int, ...]]]) -> tuple[Tensor, Tensor]:
    """Pick mean and covariance one by one: ``places`` has for each input the places of the chosen outputs."""
    means = [[whole.mean[(b, *place)] for place in row] for b, row in enumerate(places)]
    covs = [[[whole.cov[(b, *p, q[-1])] for q in row] for p in row] for b, row in enumerate(places)]
    return torch.tensor(means), torch.tensor(covs)


@pytest.mark.parametrize(
    "outputs", [[3, 1], (0,), range(4), [2, 2], np.array([1, 0]), torch.tensor([[0, 1], [3, 2], [1, 1]])]
)
def test_rows_and_columns_are_taken_in_the_order_given(outputs: Any) -> None:
    whole, rows = belief(3, 4), torch.as_tensor(outputs).expand(3, -1).tolist()
    some = whole.chosen(given(outputs))
    mean, cov = picked(whole, [[(c,) for c in row] for row in rows])
    assert torch.equal(some.mean, mean)
    assert torch.equal(some.cov, cov)


@pytest.mark.parametrize("tokens", [[4, 0], torch.tensor([[1, 2], [0, 0], [4, 3]])])
@pytest.mark.parametrize("each", [False, True])
def test_tokens_and_outputs_of_each(tokens: Any, each: bool) -> None:
    whole = belief(3, 5, 4)
    positions = torch.as_tensor(tokens).expand(3, -1)
    outputs = torch.randint(0, 4, (3, 2, 3) if each else (3,), generator=torch.Generator().manual_seed(2))
    some = whole.chosen(given(outputs, tokens, (5, 4)))
    assert some.mean.shape == (3, 2, 3)
    assert some.cov.shape == (3, 2, 3, 3)
    for b in range(3):
        for s in range(2):
            token, classes = int(positions[b, s]), (outputs[b, s] if each else outputs)
            assert torch.equal(some.mean[b, s], whole.mean[b, token, classes])
            assert torch.equal(some.cov[b, s], whole.cov[b, token][classes][:, classes])


def test_tokens_alone_have_all_outputs() -> None:
    whole = belief(3, 5, 4)
    some = whole.chosen(given(None, [2], (5, 4)))
    assert torch.equal(some.mean, whole.mean[:, [2]])
    assert torch.equal(some.cov, whole.cov[:, [2]])


def test_joint_rows_and_columns() -> None:
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(12, 12, generator=generator)
    whole = FunctionGaussian.across(torch.randn(3, 4, generator=generator), root @ root.mT)
    outputs = torch.tensor([[0, 1], [3, 2], [1, 1]])
    some = whole.chosen(given(outputs))
    for b in range(3):
        for a in range(3):
            assert torch.equal(some.cov[b, :, a], whole.cov[b, outputs[b]][:, a, outputs[a]])


def test_seeds_pick_the_outputs() -> None:
    f = belief(3, 5, 4).mean
    chosen = given([3, 1], [[0, 1], [4, 4], [2, 0]], (5, 4))
    assert torch.equal(torch.einsum("kbtc,btc->bk", chosen.seeds(f), f), chosen.of(f).flatten(1))
    shared = given([3, 1]).seeds(f[:, 0])
    assert shared.stride(1) == 0  # one row for all inputs, not a copy for each


REFUSED = [
    ([4], None, "outputs has 4; expected numbers of outputs from 0 to 3"),
    ([0, -1], None, "outputs has -1; expected numbers of outputs from 0 to 3"),
    ([0.5], None, r"outputs is \[0.5\]; expected numbers"),
    ([True, False, True, True], None, "outputs is .*; expected numbers"),
    ([], None, "outputs is .*; expected numbers"),
    (2, None, r"outputs is 2; expected numbers of outputs from 0 to 3, of shape \(k,\), or \(B, k\)"),
    ("top", None, "outputs is 'top'; expected numbers"),
    (torch.zeros(2, 1, 1, dtype=torch.long), None, "expected numbers"),
    ([0], [0], r"tokens were chosen and the outputs are \(B, C\)"),
]


@pytest.mark.parametrize(("outputs", "tokens", "message"), REFUSED)
def test_what_is_no_choice_is_refused(outputs: Any, tokens: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        given(outputs, tokens)


def test_tokens_that_do_not_exist_are_refused() -> None:
    f = belief(3, 5, 4).mean
    for tokens, message in (([5], "token 5 was chosen of 5; expected numbers from 0 to 4"), ([-1], "tokens has -1")):
        with pytest.raises(DataError, match=message):
            given(None, tokens, (5, 4)).of(f)
    with pytest.raises(DataError, match=r"outputs have the shape \(3, 2, 1\) for 5 tokens; expected \(B, 5, k\)"):
        given(torch.zeros(3, 2, 1, dtype=torch.long), None, (5, 4)).of(f)


def test_numbers_for_other_inputs_are_refused() -> None:
    with pytest.raises(DataError, match=r"outputs have the shape \(2, 1\) for 3 inputs; expected \(3, ...\)"):
        given([[0], [1]]).refuse_other(3)
