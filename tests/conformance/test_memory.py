"""The byte budget, for every registered method: it is kept, and it changes no result."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import lapwing as lw
from benchmarks import memory
from benchmarks.peak import held
from lapwing.errors import UnsupportedError
from tests.conformance.declared import SMALL
from tests.conformance.test_every_method import NEW, everything, fitted
from tests.tolerances import SOLVED, assert_close


@pytest.mark.parametrize("name", SMALL)
def test_the_budget_changes_no_result(name: str) -> None:
    """With one byte, everything is done in the smallest pieces: seven data and two inputs make several of them.

    With fewer data than a layer has inputs, several eigenvalues of a factor of Kron are zero and rounding chooses their
    eigenvectors: the same covariance by another root, and so other draws.
    """
    inputs = NEW[:2]
    with lw.memory.limited(1):
        found = everything(fitted(name, (7,)), inputs, torch.Generator().manual_seed(5))
    wanted = everything(fitted(name, (7,)), inputs, torch.Generator().manual_seed(5))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, SOLVED)


@cache
def network(name: str) -> memory.Case:
    return memory.case(name)


NARROW = ("map_only", "ensemble", "dropout", "swag", "hfl")  # tried with the first network too; others take longer


def measured_pairs() -> list[tuple[str, str]]:
    """Return networks and methods."""
    pairs = [(case, name) for case in memory.NETWORKS for name in SMALL if not memory.left_out(name, case)]
    return [(case, name) for case, name in pairs if name in NARROW or case != "narrow MLP"]


@pytest.mark.parametrize(("case", "name"), measured_pairs())
def test_no_call_takes_more_than_the_budget_and_its_answer(case: str, name: str) -> None:
    """Bytes of PyTorch's allocator, which follow from shapes; the rules for methods are in docs/scale.md."""
    here, budget = network(case), memory.budget_of(name)
    method = memory.methods(here.model)[name]
    try:
        for what, found in memory.measured(name, here, budget):
            more = memory.allowed(name, method, here, what)
            assert found.taken <= budget + more, f"{what}: {found.taken} bytes, budget {budget}, held {more}"
    except UnsupportedError as error:
        assert "tokens" in str(error)  # noqa: PT017


@pytest.mark.parametrize("case", memory.NETWORKS)
def test_without_a_budget_calls_take_more(case: str) -> None:
    """Otherwise the test above would say nothing. A fit reserves a block that it never writes, which does not count."""
    found = dict(memory.measured("kron", network(case), 2**32))
    assert min(found["fit"].most, found["predict"].most) > 1.5 * memory.BUDGET


def test_a_mixture_keeps_the_budget() -> None:
    """The default fit with validation data: scores of cells are kept for every row, twice while they are joined."""
    here, rows, cells, budget = network("wide MLP"), 16, 256, memory.BUDGET // 2
    train, held_out = ([(here.x[part], here.y[part])] for part in (slice(0, rows), slice(rows, 2 * rows)))
    with lw.memory.limited(budget):
        fitted = held(lambda: lw.fit(here.model, train, "classification", method=lw.Diagonal(), validation=held_out))
        asked = held(lambda: memory.probabilities(fitted.result, here.x))
    assert fitted.taken <= budget + 16 * rows * cells
    assert asked.taken <= budget
