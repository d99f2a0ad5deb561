"""The byte budget: which setting counts, what is taken by default, and what is refused."""

from __future__ import annotations

import pytest
import torch

import lapwing as lw
from lapwing.errors import UnsupportedError
from lapwing.runtime import memory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit of the process, none in the environment, and nothing read before."""
    monkeypatch.delenv(memory.VARIABLE, raising=False)
    monkeypatch.setattr(memory, "_process", [])
    monkeypatch.setattr(memory, "_default", {})


def test_the_innermost_setting_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.VARIABLE, "3MB")
    assert lw.memory.budget() == 3_000_000
    lw.memory.limit("2MB")
    assert lw.memory.budget() == 2_000_000
    with lw.memory.limited("1MB"):
        assert lw.memory.budget() == 1_000_000
        with lw.memory.limited(5):
            assert lw.memory.budget() == 5
    assert lw.memory.budget() == 2_000_000


@pytest.mark.parametrize(("free", "expected"), [
    (2**30, 2**28), (2**30 + 2**29, 2**28), (2**60, memory.MAX_DEFAULT["cpu"]), (0, memory.MIN_DEFAULT),
])  # fmt: skip
def test_the_default_is_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch, free: int, expected: int) -> None:
    """Rounded down to a power of two, and within bounds."""
    monkeypatch.setattr(memory, "_free", lambda device: free)
    assert lw.memory.budget() == expected


def test_parts_are_gathered_along_any_dimension() -> None:
    whole = torch.arange(24.0).reshape(2, 4, 3)
    for dim in range(3):
        parts = whole.split([1, whole.shape[dim] - 1], dim)
        assert torch.equal(memory.concat_chunks(iter(parts), whole.shape[dim], dim), whole)


def test_a_result_that_cannot_be_cut_is_refused_far_above_the_budget() -> None:
    """Four times the budget is about what is free, by default."""
    with lw.memory.limited("1MiB"):
        memory.refuse_large_result(4 * 2**20, CPU, "a matrix", "Take fewer rows")
        with pytest.raises(UnsupportedError, match=r'a matrix takes .* GiB.*fewer rows, or raise it.*limit\("2MiB"\)'):
            memory.refuse_large_result(4 * 2**20 + 1, CPU, "a matrix", "Take fewer rows")
    with lw.memory.limited(1):
        memory.refuse_large_result(memory.MIN_DEFAULT, CPU, "a matrix", "Take fewer rows")  # no less is ever refused
