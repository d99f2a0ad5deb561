"""How many samples a batch has, and which tensors have a row for each."""

from __future__ import annotations

import pytest
import torch

from lapwing.data.inputs import SampleRows, per_sample_in_both, take
from lapwing.errors import DataError

X, CONTEXT = torch.randn(5, 3), torch.randn(4, 4)


def test_only_tensors_with_a_row_for_each_sample_are_cut() -> None:
    part = take((X, CONTEXT, X[:, 0]), (True, False, True), slice(1, 3))
    assert torch.equal(part[0], X[1:3])
    assert part[1] is CONTEXT
    assert torch.equal(part[2], X[1:3, 0])
    assert torch.equal(take(X, (True,), torch.tensor([4, 0])), X[[4, 0]])


def test_a_batch_tells_by_its_numbers_of_rows_and_later_ones_remember() -> None:
    rows = SampleRows()
    assert rows.count(X) == rows.count((X, X[:, 0])) == 5
    assert rows.count((X, CONTEXT)) is None  # either may be the samples
    assert rows.per_sample((X, CONTEXT), 5) == (True, False)
    rows = rows.with_batch((X, CONTEXT), 5)
    assert rows.count((X[:4], CONTEXT)) == 4
    assert rows.per_sample((X[:4], CONTEXT), 4) == (True, False)
    assert not rows.is_undecided((X[:4], CONTEXT), 4)


def test_as_many_rows_by_chance_are_open_until_a_batch_tells() -> None:
    assert SampleRows().is_undecided((X[:4], CONTEXT), 4)
    assert not SampleRows().is_undecided((X[:1], CONTEXT[:1]), 1)  # one sample shows nothing
    assert not SampleRows().is_undecided(X, 5)
    seen = SampleRows().with_batch((X[:4], CONTEXT), 4)
    with pytest.raises(DataError, match=r"inputs\[1\] has 4 rows for 5 samples and had one for each sample"):
        seen.refuse_change((X, CONTEXT), 5)
    seen.refuse_change((X, CONTEXT[:1]), 5)  # one row is spread over all samples


def test_one_row_shows_nothing() -> None:
    rows = SampleRows().with_batch((X, CONTEXT[:1]), 5)
    assert rows.per_sample((X[:4], CONTEXT), 4) == (True, True)


def test_learning_changes_no_value() -> None:
    rows = SampleRows()
    rows.with_batch((X, CONTEXT), 5)
    assert rows == SampleRows()


def test_what_is_shared_in_one_batch_is_shared_in_both() -> None:
    assert per_sample_in_both((), (True, False)) == (True, False)
    assert per_sample_in_both((True, True), (True, False)) == (True, False)
    with pytest.raises(DataError, match="batches of 1 and of 2 input tensors; expected as many"):
        per_sample_in_both((True,), (True, False))


@pytest.mark.parametrize("inputs", [torch.tensor(1.0), {"a": torch.tensor(1.0)}, "text", ()])
def test_inputs_without_rows_are_refused(inputs: object) -> None:
    with pytest.raises(DataError, match=r"hold no tensor with a batch dimension; expected \(B, ...\)"):
        SampleRows().count(inputs)
