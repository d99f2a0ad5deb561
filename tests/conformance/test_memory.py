"""The byte budget, for every registered method: it is kept, and it changes no result."""

from __future__ import annotations

import pytest
import torch

import lapwing as lw
from tests.conformance.declared import SMALL
from tests.conformance.test_every_method import NEW, everything, fitted, standard
from tests.tolerances import SOLVED, assert_close


@pytest.mark.parametrize("name", SMALL)
def test_the_budget_changes_no_result(name: str) -> None:
    """With one byte, everything is done in the smallest pieces."""
    with lw.memory.limited(1):
        found = everything(fitted(name), NEW, torch.Generator().manual_seed(5))
    wanted = everything(standard(name), NEW, torch.Generator().manual_seed(5))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, SOLVED)
