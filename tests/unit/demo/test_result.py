"""Results go to JSON and come back; tables as text."""

from __future__ import annotations

import pytest

from lapwing.demo.result import Result, Row, table

# Results go to JSON and come back.

RESULT = Result(
    "small", {"recipe": {"hidden": [3, 4]}}, 7, (Row("a", {"NLL": 0.5}), Row("b", {"NLL": 1.5}, "set")),
    {"total": 0.1}, {"y": [1.0, 2.0]}, ("a note",),
)  # fmt: skip


def test_a_result_survives_json() -> None:
    assert Result.from_json(RESULT.to_json()) == RESULT


def test_numbers_that_are_not_finite_are_refused() -> None:
    broken = Result("small", {}, 0, (Row("a", {"NLL": float("nan")}),), {})
    with pytest.raises(ValueError, match="JSON compliant"):
        broken.to_json()


# Tables as text.


def test_columns_line_up_and_notes_follow() -> None:
    rows = (Row("plain network", {"NLL": 1.5, "RMSE": 123.456}), Row("posterior", {"NLL": -0.25, "RMSE": 2e-4}))
    text = table(Result("digits", {}, 0, rows, {}, notes=("a note",)))
    assert text.splitlines() == [
        "digits",
        "                  NLL      RMSE",
        "plain network   1.500     123.5",
        "posterior      -0.250  2.00e-04",
        "  a note",
    ]


def test_groups_are_named_once_and_missing_scores_are_blank() -> None:
    rows = (Row("plain", {"NLL": 1.0, "RMSE": 2.0}, "wine"), Row("kron", {"NLL": 3.0, "RMSE": 4.0}, "wine"),
            Row("plain", {"NLL": 5.0}, "mean"))  # fmt: skip
    assert table(Result("uci", {}, 0, rows, {})).splitlines() == [
        "uci",
        "               NLL   RMSE",
        "wine  plain  1.000  2.000",
        "      kron   3.000  4.000",
        "mean  plain  5.000",
    ]
