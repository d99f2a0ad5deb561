"""Samplers for several processes: every datum in one part, and what they say about their part."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.samples import Part, Share, next_epoch, share_of
from lapwing.errors import UnsupportedError

CPU = torch.device("cpu")


def part(n: int, rank: int, parts: int, **settings: object) -> Part:
    sampler = Part(range(n), None, **settings)  # type: ignore[arg-type]
    sampler.rank, sampler.parts = rank, parts
    return sampler


@pytest.mark.parametrize(("n", "parts"), [(22, 3), (2, 3), (0, 2), (7, 7), (5, 1)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_datum_is_in_one_part(n: int, parts: int, shuffle: bool) -> None:
    samplers = [part(n, rank, parts, shuffle=shuffle) for rank in range(parts)]
    rows = [list(sampler) for sampler in samplers]
    joined = [row for each in rows for row in each]
    assert sorted(joined) == list(range(n))
    assert shuffle or joined == list(range(n))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
    assert [len(sampler) for sampler in samplers] == [len(each) for each in rows]


def test_an_epoch_has_an_order_of_its_own() -> None:
    sampler = part(50, 1, 3, shuffle=True, seed=4)
    loader = DataLoader(TensorDataset(torch.zeros(50)), 5, sampler=sampler)
    first = list(sampler)
    assert list(sampler) == first
    next_epoch(loader, 1)
    assert list(sampler) != first
    next_epoch(lw.samples.unpacked(loader, lambda item: item), 0)
    assert list(sampler) == first


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"shuffle": 1}, "shuffle is 1"), ({"seed": -1}, "seed is -1; expected an integer of at least 0")],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Part(range(3), None, **settings)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="dataset is 3; expected a data set with a length"):
        Part(3, None)  # type: ignore[arg-type]


def test_what_samplers_say() -> None:
    data = TensorDataset(torch.zeros(22), torch.zeros(22))
    loader = lambda sampler: DataLoader(data, 4, sampler=sampler)
    sampler = lambda **settings: DistributedSampler(data, 3, 2, **settings)
    assert share_of(loader(sampler())) == Share(2, 3, 7, 1, mixed=True)
    assert share_of(loader(DistributedSampler(data, 3, 0))) == Share(0, 3, mixed=True)
    assert share_of(loader(sampler(drop_last=True))) == Share(2, 3, dropped=1, mixed=True)
    assert share_of(loader(part(22, 2, 3))) == Share(2, 3)
    assert share_of(DataLoader(data, batch_sampler=BatchSampler(sampler(), 4, False))) == Share(2, 3, 7, 1, mixed=True)
    assert share_of(lw.samples.unpacked(loader(sampler()), lambda item: item)) == Share(2, 3, 7, 1, mixed=True)
    assert share_of(DataLoader(data, 4, shuffle=True)) is None


@pytest.mark.parametrize("batch", [1, 3, 4, 7, 8, 30])
def test_repeated_data_are_left_out(batch: int) -> None:
    """However the batches lie: the parts of a padding sampler together are every row once."""
    x = torch.arange(22.0)[:, None]
    seen = []
    for rank in range(3):
        sampler = DistributedSampler(TensorDataset(x, x), 3, rank, shuffle=True)
        data = Data(DataLoader(TensorDataset(x, x), batch, sampler=sampler), CPU)
        rows = [row for b in data.batches("") for row in b.targets[:, 0].tolist()]
        assert [row for b in data.batches("") for row in b.inputs[:, 0].tolist()] == rows
        seen += rows
    assert sorted(seen) == list(range(22))
