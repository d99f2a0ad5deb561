"""Experiments on images, with tiny networks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.engine.contract import Record
from experiments.options import silent
from experiments.vision.cnn import Convolutional
from experiments.vision.corruptions import KINDS, STRENGTHS, corrupted, rotated
from experiments.vision.drift import PRIORS, Drift, layer_scores
from experiments.vision.learning import Schedule, train_together
from experiments.vision.limits import Limit, within
from experiments.vision.networks import perceptron, seeded
from experiments.vision.predictions import best_temperature, in_parts, sampled_network, scores_of
from lapwing.errors import DataError

# Sampled and linearised convolutional networks on a few digits, and the parts that train and predict.

TINY = replace(Convolutional.quick(), channels=((2, 3),), hidden=5, epochs=2, data=130, tuning=30, test=40, draws=4)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return list(TINY.measure("digits/0", silent))


def test_every_method_has_its_scores(records: list[Record]) -> None:
    assert TINY.units() == ("digits/0",)
    assert [r.method for r in records][:2] == ["MAP", "temperature"]
    assert len({r.method for r in records}) == len(records) == 12
    for record in records:
        assert (record.group, record.repeat) == ("digits", 0)
        assert set(record.scores) == {"accuracy", "NLL", "ECE", "Brier", "OOD AUROC"}
        assert record.scores["NLL"] > 0
        assert record.seconds is not None


def test_the_limit_leaves_methods_out() -> None:
    lines: list[str] = []
    done = list(within({"one": lambda: 1, "two": lambda: 2}, Limit(0.0), lines.append, "unit"))
    assert done == []
    assert lines == ["unit, one: not begun, the time is over", "unit, two: not begun, the time is over"]


def test_a_method_that_fails_is_named() -> None:
    lines: list[str] = []

    def fails() -> int:
        raise DataError("no data")

    done = list(within({"one": fails, "two": lambda: 2}, Limit(None), lines.append, "unit"))
    assert [(name, each.answer) for name, each in done] == [("two", 2)]
    assert lines == ["unit, one: failed: no data"]


def data(n: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum((1, 2, 3)) > 0).long()


def test_networks_trained_together_are_those_trained_alone() -> None:
    x, y = data()
    schedule = Schedule(2, 60, 1e-2)  # one batch: the order of the rows has no effect
    make = lambda: [seeded(lambda: perceptron((1, 4, 4), 2, (7,)), seed).double() for seed in (3, 4)]
    both, alone = make(), make()
    train_together(both, x.double(), y, schedule, (0.0, 0.3), 0)
    for model, decay in zip(alone, (0.0, 0.3), strict=True):
        train_together([model], x.double(), y, schedule, (decay,), 0)
    for model, other in zip(both, alone, strict=True):
        assert not model.training
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def test_the_sampled_network_is_the_mean_of_its_draws() -> None:
    x, y = data()
    model = seeded(lambda: perceptron((1, 4, 4), 3, (7,)), 0)
    posterior = lw.fit(model, [(x, y)], "classification", prior=2.0, progress=False)
    drawn = posterior.network_samples(x, 7, torch.Generator().manual_seed(5)).double().softmax(-1).mean(0)
    probs = in_parts(sampled_network(posterior, 7, 5, together=3), x, 25)
    torch.testing.assert_close(probs, drawn, rtol=1e-5, atol=1e-7)
    with pytest.raises(DataError, match="at least one"):
        sampled_network(posterior, 0, 5)
    some = lw.fit(
        model, [(x, y)], "classification", method=lw.Diagonal(), weights=lw.subnetwork([0, 4]), progress=False
    )
    with pytest.raises(DataError, match="whole layers"):
        sampled_network(some, 2, 0)


def test_scores_and_temperature() -> None:
    y = torch.tensor([0, 1, 1, 0, 1])
    logits = torch.nn.functional.one_hot(y, 2).double().log_softmax(-1)
    overconfident = torch.cat([10 * logits[:4], 10 * logits[4:].flip(-1)])
    assert best_temperature(overconfident, y) > 3
    scores = scores_of(logits.softmax(-1), y, torch.full((3, 2), 0.5))
    assert scores["accuracy"] == scores["OOD AUROC"] == 1.0
    sure = torch.tensor([[1.0, 0.0]]).expand(5, 2)
    assert 100 < scores_of(sure, y)["NLL"] < 1000  # large, but finite
    assert "OOD AUROC" not in scores_of(logits.softmax(-1), y)


# Corrupted and rotated images.


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    """Five images of two channels: smooth waves and noise, so that every kind changes them."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.arange(20.0).view(-1, 1), torch.arange(24.0)
    waves = 0.5 + 0.2 * torch.sin(rows / 3) * torch.cos(columns / 4)
    return (waves + 0.2 * torch.rand(5, 2, 20, 24, generator=generator)).to(dtype).clamp(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_strength_is_further_from_the_clean_image(kind: str, dtype: torch.dtype) -> None:
    x = images(dtype)
    distances = [float((corrupted(x, kind, s) - x).norm()) for s in (0, *STRENGTHS)]
    assert distances[0] == 0
    assert all(after > 1.02 * before for before, after in pairwise(distances))


@pytest.mark.parametrize("kind", KINDS)
def test_shape_dtype_range_and_seed(kind: str) -> None:
    x = images(torch.float64)
    once, again, other = (corrupted(x, kind, 4, seed) for seed in (3, 3, 5))
    assert once.shape == x.shape
    assert once.dtype == x.dtype
    assert float(once.min()) >= 0
    assert float(once.max()) <= 1
    assert torch.equal(once, again)
    assert torch.equal(once, other) == (kind != "noise")


def test_rotations() -> None:
    x = images(torch.float64)[..., :20]
    torch.testing.assert_close(rotated(x, 0.0), x)
    torch.testing.assert_close(rotated(x, 90.0), x.rot90(1, (2, 3)))
    torch.testing.assert_close(rotated(x, 180.0), x.flip((2, 3)))


# Precisions of layers while the evidence trains: its records, and the balance of penalties at a minimum.

DRIFT_TINY = replace(
    Drift.quick(), hidden=(7, 6), data=40, test=30, epochs=(2, 3), updates=2, precisions=(1.0, 9.0), hyper_steps=2
)


@pytest.fixture(scope="module")
def drift_records() -> list[Record]:
    return list(DRIFT_TINY.measure("relu/1", silent))


def test_every_training_has_its_scores(drift_records: list[Record]) -> None:
    assert DRIFT_TINY.units() == ("relu/0", "tanh/0")
    assert list(dict.fromkeys(r.group for r in drift_records)) == ["relu, 2 epochs", "relu, 3 epochs"]
    names = [*PRIORS, "precision 1", "precision 9", "validation"]
    assert [r.method for r in drift_records] == names * 2
    for record in drift_records:
        assert record.repeat == 1
        assert ("penalties" in record.scores) == (record.method in PRIORS)


def test_validation_is_one_of_the_fixed_precisions(drift_records: list[Record]) -> None:
    fixed = [r.scores for r in drift_records[:5] if r.method.startswith("precision")]
    assert drift_records[4].scores in fixed


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
