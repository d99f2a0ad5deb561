"""The names of lw.metrics."""

from __future__ import annotations

from pathlib import Path

from lapwing import metrics

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_every_score_has_a_name_of_its_own() -> None:
    """Every function of the package is listed, and no two names differ only in case."""
    scores = {
        score for name, score in vars(metrics).items()
        if callable(score) and getattr(score, "__module__", "").startswith(metrics.__name__) and name[0].islower()
    }  # fmt: skip
    assert {getattr(metrics, name) for name in metrics.__all__} == scores
    assert len({name.lower() for name in metrics.__all__}) == len(metrics.__all__) == len(scores)
    assert {"categorical_nll", "normal_nll"} < set(metrics.__all__)


def test_every_score_is_in_the_table_of_its_page() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for name in metrics.__all__:
        assert sum(row.startswith(f"| `{name}(") for row in rows) == 1, name
