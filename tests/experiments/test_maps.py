"""Maps of error bars on one and two inputs, with tiny networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from experiments import maps_classification, maps_regression
from experiments.engine.settings import plain
from experiments.engine.store import Stored
from experiments.maps_classification import TASKS, Classes, blobs, moons, radius, separable
from experiments.maps_methods import RECIPE, Choices, Maps
from experiments.maps_picture import CLASSES, blended, square
from experiments.maps_regression import GAP, Between, Predictions, curve, inside_clusters
from experiments.options import silent
from tests.tolerances import SOLVED, assert_close

TINY = replace(RECIPE, hidden=(5,), max_steps=30)
CHOICES = Choices(shares=(0.4, 1.0), members=3, draws=6)
BETWEEN = Between(TINY, CHOICES, ("tanh",), data=14, test=20, seeds=2)
PLANE = Classes(TINY, CHOICES, ("blobs",), ("relu",), data=18, test=21, seeds=1)


@pytest.fixture(scope="module")
def line() -> Maps:
    return BETWEEN.maps("tanh", 1)


def test_there_is_a_record_for_every_method() -> None:
    records = list(BETWEEN.measure("tanh/1", silent))
    assert [record.method for record in records] == list(CHOICES.methods)
    assert {(record.group, record.repeat) for record in records} == {("tanh", 1)}
    scores = {record.method: record.scores for record in records}
    assert "ratio" not in scores["plain"]  # there is nothing to divide by
    full = scores["full"]
    assert full["ratio"] == pytest.approx(full["std of f in gap"] / full["std of f"])
    assert scores["subnetwork 100 %, variance"] == pytest.approx(full, rel=1e-6)
    assert scores["subnetwork 40 %, curvature"]["std of f"] < full["std of f"]
    assert all(record.seconds is not None and record.seconds > 0 for record in records)


def test_a_unit_gives_the_same_numbers_again(line: Maps) -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64).unsqueeze(1)
    for method in ("ensemble", "MC dropout", "sampled network"):
        one, again = (
            maps_regression.predictive(method, maps.timed(method)[0], 6)(x).std
            for maps in (line, BETWEEN.maps("tanh", 1))
        )
        assert_close(again, one)
    assert not torch.equal(line.x, BETWEEN.maps("tanh", 0).x)


def test_laplace_methods_share_precision_and_noise(line: Maps) -> None:
    for method in ("full", "Kron", "diagonal", "last layer", "subnetwork 40 %, variance"):
        fitted = line.timed(method)[0]
        assert float(fitted.prior.values) == pytest.approx(float(line.full.prior.values))
        assert float(fitted.likelihood.dispersion) == pytest.approx(float(line.full.likelihood.dispersion))


def test_a_subnetwork_has_the_weights_with_the_largest_values(line: Maps) -> None:
    diagonal = line.timed("diagonal")[0].posterior
    variances = diagonal.precision.variances()
    picked = {}
    for rule in ("variance", "curvature"):
        selection = line.timed(f"subnetwork 40 %, {rule}")[0].network.selection
        picked[rule] = selection.size
    assert set(picked.values()) == {round(0.4 * len(variances))}
    low, high = (line.timed(f"subnetwork 40 %, {rule}")[0].network.theta() for rule in ("variance", "curvature"))
    theta = line.full.network.theta()
    order = variances.argsort()
    assert_close(low.sort().values, theta[order[-picked["variance"] :]].sort().values)
    assert_close(high.sort().values, theta[order[: picked["curvature"]]].sort().values)  # one prior for all weights


def test_sampled_networks_are_the_network_with_drawn_weights(line: Maps) -> None:
    fitted = line.timed("full")[0]
    x = torch.linspace(-1, 1, 7, dtype=torch.float64).unsqueeze(1)
    outputs = []
    for theta in fitted.weight_samples(6, torch.Generator().manual_seed(0)):
        weights = {name: value.detach() for name, value in fitted.network.selection.split(theta).items()}
        outputs.append(torch.func.functional_call(line.network, weights, (x,)).detach())
    predicted = Predictions(fitted, 6)(x)
    assert_close(predicted.mean, torch.stack(outputs).mean(0), SOLVED)
    assert_close(predicted.epistemic_variance, torch.stack(outputs).var(0), SOLVED)
    assert_close(predicted.aleatoric_variance, fitted.likelihood.dispersion.expand(7, 1))


def test_inputs_lie_in_the_clusters_and_targets_on_the_curve() -> None:
    x = inside_clusters(200, torch.Generator().manual_seed(0))
    low, high = GAP
    assert bool(((x >= -1) & (x <= low) | (x >= high) & (x <= 1)).all())
    assert int((x < 0).sum()) == 100
    _, y = maps_regression.noisy(x, 0.0, torch.Generator())
    assert_close(y, curve(x))


def test_tasks_have_their_classes_in_their_places() -> None:
    for draw, count in ((moons, 2), (blobs, 3), (separable, 2)):
        x, y = draw(600, torch.Generator().manual_seed(0))
        assert y.bincount().tolist() == [600 // count] * count
        assert float(x.mean(0).norm()) < 0.3
    x, y = separable(600, torch.Generator().manual_seed(0))
    side = x @ torch.tensor([1.5, 0.8], dtype=torch.float64)
    assert bool((side[y == 1].min() > side[y == 0].max()).all())
    assert set(TASKS) == {"moons", "blobs", "separable"}


def test_classes_are_scored_near_and_far() -> None:
    (unit,) = PLANE.units()
    records = {record.method: record.scores for record in PLANE.measure(unit, silent)}
    assert tuple(records) == CHOICES.methods
    for scores in records.values():
        assert 1 / 3 <= scores["confidence far"] <= 1
        assert 0 <= scores["ECE"] <= 1
    assert records["subnetwork 100 %, curvature"] == pytest.approx(records["full"], rel=1e-5)
    assert records["full"]["confidence far"] < records["plain"]["confidence far"]


def test_probabilities_of_members_are_means_over_members() -> None:
    maps = PLANE.maps("blobs", "relu", 0)
    fitted = maps.timed("ensemble")[0]
    probs = maps_classification.probabilities("ensemble", fitted, maps.x, 6)
    first = maps.network(maps.x).softmax(1)
    assert probs.shape == (18, 3)
    members = fitted.function_samples(maps.x, 3).softmax(-1)
    assert_close(members[0], first.detach())
    assert_close(probs, members.mean(0))


def test_colours_are_those_of_the_most_probable_class() -> None:
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.0, 1.0]])
    colours = torch.tensor(blended(probs)).reshape(4, 3)
    expected = torch.tensor([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in CLASSES])
    assert_close(colours[[0, 1, 3]], expected)
    assert_close(colours[2], torch.ones(3))
    assert square(2.0, 3)[:4].tolist() == [[-2, -2], [0, -2], [2, -2], [-2, 0]]
    assert radius(square(2.0, 3)) == pytest.approx(8**0.5)


def test_pictures_are_drawn_from_stored_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "methods", ("plain", "full", "sampled network"))
    for settings in (BETWEEN, PLANE):
        path = tmp_path / f"{settings.name}.png"
        settings.picture(Stored(settings.name, "tiny", plain(settings), 0), path)
        drawn = torch.tensor(imread(path))[..., :3]
        assert 0.02 < float((drawn < 0.98).any(-1).float().mean()) < 0.9


def test_units_are_all_combinations() -> None:
    assert Between(seeds=2).units() == ("tanh/0", "tanh/1", "relu/0", "relu/1")
    assert len(Classes.full().units()) == 18
