"""Where inducing points start, and which outputs they have."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.streams import Pool, class_labels
from lapwing.methods.inducing.points import STARTS, Placement
from lapwing.networks.network import Network
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense, inducing
from tests.tolerances import assert_close

D = torch.float64
CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def setting(x: Tensor, y: Tensor, outputs: int = 3) -> tuple[Network, Any, Pool]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(x.shape[1], 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    network = Network.build(model, x)
    prior = lw.isotropic(0.7).bound(network.selection, network.theta())
    return network, prior, Pool.drawn(Data([(x, y)], CPU), len(x), generator())


def clouds(count: int = 8) -> tuple[Tensor, Tensor]:
    """Three classes, each in a place of its own."""
    y = torch.arange(3).repeat(count)
    places = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]], dtype=D)
    return places[y] + torch.randn(3 * count, 2, dtype=D, generator=generator(4)), y


def numbers(points: Tensor, among: Tensor) -> list[int]:
    """Which rows these points are; each must be one."""
    gaps = (points[:, None] - among[None]).flatten(2).abs().amax(-1)
    assert float(gaps.amin(1).max()) == 0
    return gaps.argmin(1).tolist()


def test_every_output_of_every_input() -> None:
    x = torch.randn(4, 2, dtype=D)
    network, _, pool = setting(x, torch.zeros(4, dtype=torch.long))
    anchors = Placement(network, pool, generator()).every_output()
    assert len(anchors) == 12
    assert torch.equal(anchors.inputs, x.repeat_interleave(3, 0))
    assert anchors.outputs.tolist() == [0, 1, 2] * 4


@pytest.mark.parametrize("count", [1, 5, 10])
def test_landmarks_have_one_output_of_each_input_first(count: int) -> None:
    x = torch.randn(10, 2, dtype=D)
    network, _, pool = setting(x, torch.zeros(10, dtype=torch.long))
    anchors = Placement(network, pool, generator()).landmarks(count)
    assert len(set(numbers(anchors.inputs, x))) == count


@pytest.mark.parametrize("count", [17, 25, 30, 99])
def test_landmarks_have_more_outputs_of_an_input_where_inputs_run_out(count: int) -> None:
    x = torch.randn(10, 2, dtype=D)
    network, _, pool = setting(x, torch.zeros(10, dtype=torch.long))
    anchors = Placement(network, pool, generator()).landmarks(count)
    pairs = list(zip(numbers(anchors.inputs, x), anchors.outputs.tolist(), strict=True))
    assert len(pairs) == len(set(pairs)) == min(count, 30)
    often = Counter(number for number, _ in pairs)
    assert max(often.values()) - min(often.values()) <= 1


def test_landmarks_outputs_are_random() -> None:
    x = torch.randn(10, 2, dtype=D)
    network, _, pool = setting(x, torch.zeros(10, dtype=torch.long))
    seen = torch.stack([Placement(network, pool, generator(seed)).landmarks(10).outputs for seed in range(200)])
    shares = torch.stack([(seen == c).double().mean() for c in range(3)])
    assert float((shares - 1 / 3).abs().max()) < 5 * (2 / 9 / seen.numel()) ** 0.5
    assert torch.equal(Placement(network, pool, generator(5)).landmarks(10).outputs, seen[5])


@pytest.mark.parametrize("prior", ["isotropic", "per_layer"])
def test_greedy_takes_the_largest_variance_left(prior: str) -> None:
    """Of all outputs at all data, by dense conditional variances under the prior."""
    x = torch.randn(6, 2, dtype=D)
    network, given, pool = setting(x, torch.zeros(6, dtype=torch.long))
    if prior == "per_layer":
        given = lw.per_layer(torch.tensor([0.1, 5.0], dtype=D)).bound(network.selection, network.theta())
    anchors = Placement(network, pool, generator()).start("greedy", 7, given, 1000)
    rows = dense.jacobian(network.model, x, 6).flatten(0, 1)
    whole = inducing.kernel(rows, rows, given.vector)
    chosen: list[int] = []
    for number, output in zip(numbers(anchors.inputs, x), anchors.outputs.tolist(), strict=True):
        across = whole[:, chosen]
        left = (whole - across @ torch.linalg.solve(whole[chosen][:, chosen], across.T)).diagonal()
        assert int(left.argmax()) == 3 * number + output
        chosen.append(3 * number + output)
    assert len(chosen) == 7


def test_greedy_chooses_among_the_candidates() -> None:
    """There are at least as many candidates as points, so one candidate and twelve points give all twelve."""
    x = torch.randn(30, 2, dtype=D)
    network, prior, pool = setting(x, torch.zeros(30, dtype=torch.long))
    rows = dense.jacobian(network.model, x, 30).flatten(0, 1)
    variances = inducing.kernel(rows, rows, prior.vector).diagonal()

    def chosen(count: int, candidates: int) -> list[int]:
        anchors = Placement(network, pool, generator()).start("greedy", count, prior, candidates)
        return [3 * i + c for i, c in zip(numbers(anchors.inputs, x), anchors.outputs.tolist(), strict=True)]

    among, some, every = chosen(12, 1), chosen(5, 12), chosen(5, 1000)
    assert len(set(among)) == 12
    assert len(set(some)) == len(set(every)) == 5
    assert set(some) < set(among)
    assert some[0] == max(among, key=lambda number: float(variances[number]))
    assert every[0] == int(variances.argmax())


def test_greedy_stops_where_outputs_have_nothing_more_to_say() -> None:
    """Two different data, each many times: six points at most."""
    x = torch.randn(2, 2, dtype=D).repeat(5, 1)
    network, prior, pool = setting(x, torch.zeros(10, dtype=torch.long))
    anchors = Placement(network, pool, generator()).start("greedy", 20, prior, 1000)
    assert len(anchors) == 6
    assert len(set(zip(map(tuple, anchors.inputs.tolist()), anchors.outputs.tolist()))) == 6


@pytest.mark.parametrize("count", [3, 6, 7])
def test_kmeans_places_the_points_of_a_class_among_its_inputs(count: int) -> None:
    x, y = clouds()
    network, prior, pool = setting(x, y)
    anchors = Placement(network, pool, generator()).start("kmeans", count, prior, 1000)
    assert sorted(anchors.outputs.tolist()) == sorted(i % 3 for i in range(count))
    nearest = (anchors.inputs[:, None] - x[None]).square().sum(-1).argmin(1)
    assert torch.equal(y[nearest], anchors.outputs)


def test_kmeans_of_one_point_for_each_class_is_the_mean_of_the_class() -> None:
    x, y = clouds()
    network, prior, pool = setting(x, y)
    anchors = Placement(network, pool, generator()).start("kmeans", 3, prior, 1000)
    assert_close(anchors.inputs, torch.stack([x[y == c].mean(0) for c in anchors.outputs.tolist()]))


def test_kmeans_of_a_class_without_data_uses_all() -> None:
    x, y = clouds()
    network, prior, pool = setting(x, y.clamp_max(1))
    anchors = Placement(network, pool, generator()).start("kmeans", 3, prior, 1000)
    assert_close(anchors.inputs[anchors.outputs == 2][0], x.mean(0))


def test_kmeans_without_classes_takes_the_outputs_in_turn() -> None:
    x = torch.randn(20, 2, dtype=D)
    network, prior, pool = setting(x, torch.randn(20, 3, dtype=D))
    anchors = Placement(network, pool, generator()).start("kmeans", 7, prior, 1000)
    assert anchors.outputs.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_kmeans_keeps_the_shape_of_images() -> None:
    case = BY_NAME["cnn"]
    network = Network.build(case.build(), case.batch(3))
    pool = Pool.drawn(Data([(case.batch(9), problems.targets(case, 9))], CPU), 9, generator())
    prior = lw.isotropic(1.0).bound(network.selection, network.theta())
    anchors = Placement(network, pool, generator()).start("kmeans", 4, prior, 1000)
    assert anchors.inputs.shape == (4, 2, 7, 8)


def test_random_points_are_data_with_their_own_class() -> None:
    x, y = clouds()
    network, prior, pool = setting(x, y)
    anchors = Placement(network, pool, generator()).start("random", 10, prior, 1000)
    chosen = numbers(anchors.inputs, x)
    assert len(set(chosen)) == 10
    assert torch.equal(anchors.outputs, y[chosen])


def test_random_points_of_a_regression_take_the_outputs_in_turn() -> None:
    x = torch.randn(20, 2, dtype=D)
    network, prior, pool = setting(x, torch.randn(20, 3, dtype=D))
    anchors = Placement(network, pool, generator()).start("random", 7, prior, 1000)
    assert anchors.outputs.tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("kind", ["classes", "numbers"])
@pytest.mark.parametrize("count", [25, 50, 59, 60])
def test_random_points_are_other_outputs_of_the_same_inputs_where_those_run_out(kind: str, count: int) -> None:
    """Every input once, with its class, before any twice; no pair of input and output twice."""
    x, y = torch.randn(20, 2, dtype=D), torch.randint(0, 3, (20,))
    network, prior, pool = setting(x, y if kind == "classes" else torch.randn(20, 3, dtype=D))
    anchors = Placement(network, pool, generator()).start("random", count, prior, 1000)
    chosen = numbers(anchors.inputs, x)
    assert len(set(zip(chosen, anchors.outputs.tolist(), strict=True))) == len(chosen) == count
    assert len(set(chosen[:20])) == 20
    often = Counter(chosen).values()
    assert max(often) - min(often) <= 1
    if kind == "classes":
        assert torch.equal(anchors.outputs[:20], y[chosen[:20]])


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["embedding", "tuple_input", "dict_input"])
def test_inputs_that_have_no_centres_are_data_as_they_are(name: str, start: str) -> None:
    """Whole numbers, or several tensors."""
    case = BY_NAME[name]
    inputs, y = case.batch(9), problems.targets(case, 9)
    network = Network.build(case.build(), inputs)
    prior = lw.isotropic(1.0).bound(network.selection, network.theta())
    pool = Pool.drawn(Data([(inputs, y)], CPU), 9, generator())
    anchors = Placement(network, pool, generator()).start(start, 5, prior, 1000)
    first = lambda tree: next(iter(tree.values())) if isinstance(tree, dict) else tree
    first_of = lambda tree: first(tree)[0] if isinstance(tree, tuple) else first(tree)
    chosen = numbers(first_of(anchors.inputs), first_of(inputs))
    if start in ("kmeans", "random"):
        assert torch.equal(anchors.outputs, y[chosen])
    else:
        assert len(anchors) == 5


@pytest.mark.parametrize("start", STARTS)
def test_the_generator_decides(start: str) -> None:
    x, y = clouds()
    network, prior, pool = setting(x, y)
    one, two = (Placement(network, pool, generator(3)).start(start, 9, prior, 12) for _ in range(2))
    assert torch.equal(one.inputs, two.inputs)
    assert torch.equal(one.outputs, two.outputs)
    others = [Placement(network, pool, generator(seed)).start(start, 9, prior, 12).inputs for seed in range(4, 8)]
    assert any(other.shape != one.inputs.shape or not torch.equal(other, one.inputs) for other in others)


@pytest.mark.parametrize(
    ("targets", "outputs", "expected"),
    [
        (torch.tensor([2, 0, 1]), 3, [2, 0, 1]),
        (torch.tensor([[2], [0], [1]]), 3, [2, 0, 1]),
        (torch.tensor([2, -100, 1]), 3, [2, 0, 1]),
        (torch.tensor([True, False]), 2, [1, 0]),
        (torch.tensor([0.0, 1.0]), 3, None),
        (torch.tensor([0, 1]), 1, None),
        (torch.zeros(4, 3, dtype=torch.long), 3, None),
    ],
)
def test_targets_that_are_classes(targets: Tensor, outputs: int, expected: list[int] | None) -> None:
    labels = class_labels(targets, outputs)
    assert (None if labels is None else labels.tolist()) == expected
