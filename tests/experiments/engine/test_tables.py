"""Means, standard errors, ranks and paired differences, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from experiments.engine.contract import Record
from experiments.engine.tables import as_markdown, as_text, compared, grid, means, pivoted, ranks, summarised
from lapwing.errors import LapwingError

NLL = {  # by group and method, over repeats
    ("wine", "plain"): (1.0, 2.0, 6.0),
    ("wine", "Kron"): (0.5, 1.0, 3.0),
    ("yacht", "plain"): (4.0, 8.0),
    ("yacht", "Kron"): (5.0, 6.0),
}
RECORDS = [Record(g, m, i, {"NLL": v}, seconds=2.0 * v) for (g, m), row in NLL.items() for i, v in enumerate(row)]


def test_means_and_standard_errors() -> None:
    summary = summarised(RECORDS)
    cell = summary.rows["wine", "plain"]["NLL"]
    assert (cell.n, cell.mean) == (3, pytest.approx(3.0))
    assert cell.error == pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3))
    assert summary.rows["yacht", "Kron"]["seconds"].mean == pytest.approx(11.0)
    assert summary.columns == ("NLL", "seconds")


def test_one_repeat_has_no_standard_error() -> None:
    summary = summarised(RECORDS[:1])
    assert summary.rows["wine", "plain"]["NLL"].error is None
    assert as_text(grid(summary)) == "         NLL  seconds\nplain  1.000    2.000"


def test_differences_are_paired_by_repeat() -> None:
    rows = compared(RECORDS, "plain").rows
    assert list(rows) == [("wine", "Kron"), ("yacht", "Kron")]
    cell = rows["wine", "Kron"]["NLL"]  # differences -0.5, -1 and -3
    assert cell.mean == pytest.approx(-1.5)
    assert cell.error == pytest.approx(math.sqrt((1 + 0.25 + 2.25) / 2 / 3))
    with pytest.raises(LapwingError, match="'MAP'; expected one of plain, Kron"):
        compared(RECORDS, "MAP")


def test_a_repeat_without_its_baseline_does_not_count() -> None:
    rows = compared([*RECORDS, Record("wine", "Kron", 7, {"NLL": 100.0})], "plain").rows
    assert rows["wine", "Kron"]["NLL"].n == 3


def test_two_records_of_one_name_are_refused() -> None:
    with pytest.raises(LapwingError, match="two records of"):
        summarised([*RECORDS, RECORDS[0]])


def test_means_and_ranks_over_groups() -> None:
    summary = summarised(RECORDS)
    assert means(summary)["mean", "plain"]["NLL"].mean == pytest.approx((3.0 + 6.0) / 2)
    assert ranks(summary)["mean rank", "plain"]["NLL"].mean == pytest.approx((2 + 2) / 2)
    assert ranks(summary)["mean rank", "Kron"]["NLL"].mean == pytest.approx(1.0)
    equal = summarised([Record("wine", m, 0, {"NLL": 1.0}) for m in ("a", "b", "c")])
    assert ranks(equal)["mean rank", "b"]["NLL"].mean == pytest.approx(2.0)


def test_methods_that_lack_a_group_have_no_mean() -> None:
    summary = summarised([*RECORDS, Record("wine", "SWAG", 0, {"NLL": 1.0})])
    assert ("mean", "SWAG") not in means(summary)


def test_the_table_counts_repeats_where_they_differ() -> None:
    lines = grid(summarised(RECORDS).restricted(columns=["NLL"]))
    assert lines[0] == ["", "", "NLL", "n"]
    assert [line[0] for line in lines] == ["", "wine", "", "yacht", ""]
    assert [line[-1] for line in lines[1:]] == ["3", "3", "2", "2"]
    assert "n" not in grid(summarised(RECORDS).restricted(["yacht"]))[0]


def test_names_choose_and_order() -> None:
    summary = summarised(RECORDS).restricted(["yacht", "wine"], ["Kron"], ["NLL"])
    assert list(summary.rows) == [("yacht", "Kron"), ("wine", "Kron")]
    with pytest.raises(LapwingError, match="'boston' is not in the table; expected some of wine, yacht"):
        summarised(RECORDS).restricted(["boston"])


def test_a_pivot_has_a_column_for_each_method() -> None:
    lines = pivoted(summarised(RECORDS), "NLL", lambda v: f"{v:.1f}")
    assert lines == [["", "plain", "Kron"], ["wine", "3.0 ± 1.5", "1.5 ± 0.8"], ["yacht", "6.0 ± 2.0", "5.5 ± 0.5"]]
    assert as_markdown(lines).splitlines()[1] == "|---|---|---|"
