"""Active learning in a tiny form that needs no data folder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.active import RULES, Active
from experiments.options import silent
from lapwing.demo.training import TrainingSettings
from lapwing.errors import LapwingError

TINY = Active(tables=("waves",), seeds=1, pool=40, rounds=1, chosen=3, recipe=TrainingSettings(hidden=(5,), epochs=3))


def test_every_rule_is_scored() -> None:
    scores = {record.method: record.scores for record in TINY.measure("waves/0", silent)}
    assert tuple(scores) == tuple(RULES)
    assert all(each["mean RMSE"] == pytest.approx(each["RMSE"]) for each in scores.values())  # one round
    assert len({each["RMSE"] for each in scores.values()}) > 1  # rules choose different rows


def test_refusals() -> None:
    with pytest.raises(LapwingError, match="rounds 0, chosen 3 and start 20; expected at least 1, 1 and 2"):
        replace(TINY, rounds=0)
