"""Centres of a cloud of points."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.linalg import dense as module
from lapwing.linalg.dense import kmeans
from tests.tolerances import assert_close

D = torch.float64


def cloud(count: int = 60, size: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(count, size, dtype=D, generator=torch.Generator().manual_seed(seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assigned(points: Tensor, centres: Tensor) -> Tensor:
    return (points[:, None] - centres[None]).square().sum(-1).argmin(1)


def spread(points: Tensor, centres: Tensor) -> float:
    return float((points[:, None] - centres[None]).square().sum(-1).amin(1).sum())


@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_centre_is_the_mean_of_what_is_nearest_to_it(count: int) -> None:
    points = cloud()
    centres = kmeans(points, count, generator(), steps=500)
    nearest = assigned(points, centres)
    for number in range(count):
        assert_close(centres[number], points[nearest == number].mean(0))


@pytest.mark.parametrize("seed", range(3))
def test_separate_clouds_get_a_centre_each(seed: int) -> None:
    """The clouds are far from each other, so that initial centres fall into different ones."""
    places = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0], [70.0, 70.0]], dtype=D)
    points = torch.cat([place + cloud(20, 2, seed + 10 * i) for i, place in enumerate(places)])
    centres = kmeans(points, 4, generator(seed))
    for place in places:
        assert float((centres - place).norm(dim=1).min()) < 2


def test_better_than_random_points() -> None:
    points = cloud(200)
    spreads = [spread(points, kmeans(points, 10, generator(seed))) for seed in range(5)]
    random = [spread(points, points[torch.randperm(200, generator=generator(seed))[:10]]) for seed in range(5)]
    assert max(spreads) < min(random)


def test_as_many_centres_as_points_are_the_points() -> None:
    points = cloud(9)
    centres = kmeans(points, 9, generator())
    assert_close(centres[assigned(points, centres)], points)
    assert len(assigned(points, centres).unique()) == 9


def test_more_centres_than_different_points() -> None:
    """Some centres coincide; every centre is a point and every point is a centre."""
    points = cloud(3).repeat(2, 1)
    centres = kmeans(points, 5, generator())
    assert centres.shape == (5, 3)
    assert spread(points, centres) == 0
    assert float((centres[:, None] - points[None]).abs().sum(-1).amin(1).max()) == 0


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    points = cloud()
    whole = kmeans(points, 5, generator())
    monkeypatch.setattr(module, "CHUNK", 5 * 7)
    assert_close(kmeans(points, 5, generator()), whole)


def test_the_generator_decides() -> None:
    points = cloud(100)
    one, two, other = (kmeans(points, 5, generator(seed), steps=1) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_seeds_are_drawn_by_squared_distance() -> None:
    """Without steps the centres are the initial ones: a point ten times as far is a hundred times as likely."""
    points = torch.tensor([[0.0], [0.0], [1.0], [10.0]], dtype=D)
    firsts = [kmeans(points, 2, generator(seed), steps=0) for seed in range(400)]
    from_zero = [float(pair[1]) for pair in firsts if float(pair[0]) == 0]
    far = sum(value == 10 for value in from_zero) / len(from_zero)
    assert abs(far - 100 / 101) < 5 * (100 / 101 / 101 / len(from_zero)) ** 0.5
    assert all(float(a) != float(b) for a, b in firsts)


def test_the_dtype_stays() -> None:
    assert kmeans(cloud().float(), 3, generator()).dtype == torch.float32


@pytest.mark.parametrize("offset", [0.0, 1e4, -3e4])
def test_where_the_points_lie_does_not_matter_in_single_precision(offset: float) -> None:
    """A large common offset does not cause rounding in the distances."""
    places = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    points = torch.cat([0.1 * cloud(100, 2, i).float() + place for i, place in enumerate(places)]) + offset
    centres = kmeans(points, 4, generator(1)).double() - offset
    assert float(torch.cdist(places.double(), centres).amin(1).max()) < 0.05
