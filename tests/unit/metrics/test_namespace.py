"""The names of lw.metrics."""

from __future__ import annotations

from lapwing import metrics


def test_every_score_has_a_name_of_its_own() -> None:
    """Every function of the module is listed, and no two names differ only in case."""
    scores = {
        score for name, score in vars(metrics).items()
        if callable(score) and getattr(score, "__module__", "") == metrics.__name__ and name[0].islower()
    }  # fmt: skip
    assert {getattr(metrics, name) for name in metrics.__all__} == scores
    assert len({name.lower() for name in metrics.__all__}) == len(metrics.__all__) == len(scores)
    assert {"categorical_nll", "normal_nll"} < set(metrics.__all__)
