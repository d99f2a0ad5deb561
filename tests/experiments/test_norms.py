"""Small networks with norms, in a few seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from experiments.norms import NORMS, TUNED, Norms
from experiments.options import silent

SMALL = replace(Norms.quick(), digits=30, points=20, test=40, epochs=5)


def test_a_unit_for_each_task_norm_and_seed() -> None:
    units = Norms.full().units()
    assert len(units) == 2 * 3 * 3 == len(set(units))
    assert units[:2] == ("digits/no norm/0", "digits/BatchNorm/0")


@pytest.mark.parametrize(
    ("unit", "score"), [("digits/LayerNorm/1", "ECE"), ("regression/BatchNorm/0", "coverage 95 %")]
)
def test_every_posterior_is_scored(unit: str, score: str) -> None:
    records = list(SMALL.measure(unit, silent))
    assert [record.method for record in records] == ["plain", *TUNED]
    assert {record.repeat for record in records} == {int(unit[-1])}
    assert {record.group for record in records} == {", ".join(unit.split("/")[:2])}
    for record in records:
        assert set(record.scores) == {"NLL", score}
        assert 0 <= record.scores[score] <= 1
        assert (record.seconds is None) == (record.method == "plain")


def test_test_data_are_other_data() -> None:
    for task in SMALL.tasks:
        (x, _), (x_test, _) = SMALL._data(task, 0)
        assert float(torch.cdist(x_test, x).min()) > 0
        assert (len(x), len(x_test)) == (SMALL.digits if task == "digits" else SMALL.points, SMALL.test)


def test_the_network_has_the_norm() -> None:
    kinds = {"no norm": 0, "BatchNorm": 2, "LayerNorm": 2}
    for name, count in kinds.items():
        model = SMALL._network(3, 1, NORMS[name], 0)
        assert sum(isinstance(layer, (torch.nn.BatchNorm1d, torch.nn.LayerNorm)) for layer in model) == count
