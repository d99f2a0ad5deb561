"""The names of lw.metrics."""

from __future__ import annotations

from lapwing import metrics
from lapwing.metrics import classification, ood, regression


def test_every_score_has_a_name_of_its_own() -> None:
    """Functions of one name in two modules have different names here, and no two names differ only in case."""
    scores = {
        score for module in (classification, ood, regression) for name, score in vars(module).items()
        if callable(score) and getattr(score, "__module__", "") == module.__name__ and name[0].islower()
    }  # fmt: skip
    assert {getattr(metrics, name) for name in metrics.__all__} == scores
    assert len({name.lower() for name in metrics.__all__}) == len(metrics.__all__) == len(scores)
    assert metrics.categorical_nll is classification.nll
    assert metrics.normal_nll is regression.nll
