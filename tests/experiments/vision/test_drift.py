"""Precisions of layers while the evidence trains: its records, and the balance of penalties at a minimum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lapwing as lw
from experiments.engine.contract import Record
from experiments.options import silent
from experiments.vision.drift import PRIORS, Drift, layer_scores
from lapwing.errors import DataError

TINY = replace(
    Drift.quick(), hidden=(7, 6), data=40, test=30, epochs=(2, 3), updates=2, precisions=(1.0, 9.0), hyper_steps=2
)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return list(TINY.measure("relu/1", silent))


def test_every_training_has_its_scores(records: list[Record]) -> None:
    assert TINY.units() == ("relu/0", "tanh/0")
    assert list(dict.fromkeys(r.group for r in records)) == ["relu, 2 epochs", "relu, 3 epochs"]
    names = [*PRIORS, "precision 1", "precision 9", "validation"]
    assert [r.method for r in records] == names * 2
    for record in records:
        assert record.repeat == 1
        assert ("penalties" in record.scores) == (record.method in PRIORS)


def test_validation_is_one_of_the_fixed_precisions(records: list[Record]) -> None:
    fixed = [r.scores for r in records[:5] if r.method.startswith("precision")]
    assert records[4].scores in fixed


def test_layers_are_measured_by_their_definition() -> None:
    """δ|W|² of two layers under two precisions, written out."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(9, 3), torch.arange(9) % 2
    prior = lw.per_layer(1.0)
    posterior = lw.fit(model, [(x, y)], lw.Categorical(link="probit"), prior=prior, method=lw.Kron(), progress=False)
    posterior = posterior.with_prior(lw.per_layer([2.0, 8.0]))
    scores = layer_scores(posterior)
    assert scores["precision"] == pytest.approx(4.0)
    assert (scores["first"], scores["last"]) == pytest.approx((2.0, 8.0))
    squares = [float(model[i].weight.detach().square().sum()) for i in (0, 2)]
    ratio = 2.0 * squares[0] / (8.0 * squares[1])
    assert scores["penalties"] == pytest.approx(max(ratio, 1 / ratio), rel=1e-5)
    gammas = list(posterior.effective_parameters().layers.values())
    assert scores["γs"] == pytest.approx(max(gammas) / min(gammas))


def test_unknown_activations_are_named() -> None:
    with pytest.raises(DataError, match="the activation is 'gelu'; expected one of relu, tanh"):
        list(TINY.measure("gelu/0", silent))
