"""How many draws there may be, for every predictive."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lapwing as lw
from lapwing.predictives.labels import BinaryPredictive, SoftmaxPredictive
from lapwing.predictives.numbers import CountPredictive, NormalPredictive

BELIEF = lw.FunctionGaussian(torch.zeros(3, 2), torch.eye(2).expand(3, 2, 2))
PREDICTIVES: dict[str, Any] = {
    "normal": NormalPredictive(BELIEF, torch.ones(3, 2)), "binary": BinaryPredictive(BELIEF),
    "counts": CountPredictive(BELIEF), "softmax": SoftmaxPredictive(BELIEF),
}  # fmt: skip


@pytest.mark.parametrize("name", PREDICTIVES)
@pytest.mark.parametrize("n", [0, -1, 2.5, True, "3", None])
def test_numbers_of_draws_that_are_none(name: str, n: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"n is .*; expected (at least 1|an integer)"):
        PREDICTIVES[name].sample(n)


@pytest.mark.parametrize("name", PREDICTIVES)
def test_one_draw(name: str) -> None:
    assert PREDICTIVES[name].sample(1).shape[:2] == (1, 3)
