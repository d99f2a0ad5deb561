"""Sums over processes, and the parts that each reads."""

from __future__ import annotations

import copy
import pickle
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.processes import ALONE, Part, Processes, next_epoch, share_of
from lapwing.data.processes import Share as SampleShare
from lapwing.errors import DataError, UnsupportedError
from lapwing.training import TrainingState
from tests import process_cases
from tests.process_cases import EXACT, LIMIT, REFUSED, SOLVED, TRAINED, Result, Share, sizes

# Several processes, each with its part of the data: the same posterior as one with all, and the same error in all.

SUMS = 1e-10  # relative to the largest number
SOLVES = 1e-7  # a few steps of a solver or an optimiser, each of which may enlarge rounding


@dataclass(frozen=True)
class Found:
    """What three processes found in all cases, and the folder in which they wrote."""

    of: list[dict[tuple[str, int], Result]]
    folder: Path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.process_cases", "torch._dynamo"])
    started = [context.Process(target=process_cases.work, args=(rank, str(folder), port)) for rank in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join(20 * LIMIT)
    return Found([pickle.loads(Path(folder, f"found-{rank}").read_bytes()) for rank in range(3)], folder)


def difference(one: Result, other: Result, limit: float) -> str:
    """Return in words where two results differ by more than the limit, relative to the largest number."""
    if "error" in one or "error" in other or one.keys() != other.keys():
        return f"{one} and {other}"
    for name, value in one.items():
        expected = other[name]
        if not isinstance(value, torch.Tensor):
            if value != expected:
                return f"{name}: {value} and {expected}"
            continue
        value, expected = value.detach(), expected.detach()
        finite = expected.isfinite()
        gap = float((value - expected)[finite].abs().max()) / max(float(expected[finite].abs().max()), 1e-300)
        if value.shape != expected.shape or not gap <= limit or not torch.equal(value[~finite], expected[~finite]):
            return f"{name}: {gap:.2g}"
    return ""


@pytest.mark.parametrize("name", [*EXACT, *SOLVED])
def test_parts_give_the_posterior_of_all_data(found: Found, name: str) -> None:
    alone = process_cases.attempted((EXACT | SOLVED)[name], Share(folder=found.folder))
    for size in sizes(name):
        first = found.of[0][name, size]
        assert difference(first, alone, SUMS if name in EXACT else SOLVES) == "", size
        for rank in range(1, size):
            assert difference(found.of[rank][name, size], first, 0.0) == "", f"process {rank} of {size}"


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in TRAINED for size in sizes(name)])
def test_training_takes_the_steps_of_one_process_with_the_same_batches(found: Found, name: str, size: int) -> None:
    alone = process_cases.attempted(TRAINED[name], Share(folder=found.folder), size)
    first = found.of[0][name, size]
    assert difference(first, alone, SOLVES) == ""
    for rank in range(1, size):
        assert difference(found.of[rank][name, size], first, 0.0) == ""


SAME = r"processes 0 and 1 read the same rows, which would count twice.*Part\(dataset, process_group\)"
MESSAGES = {  # the error in each process, and its message
    "not finite in one": ("ProcessError", "process 1 of 3 failed: DataError: inputs of batch 1: 4 of 12 entries are"),
    "raises in one": ("ProcessError", "process 1 of 3 failed: OSError: this file cannot be read"),
    "same batches": ("DataError", f"data: {SAME}"),
    "same, shuffled": ("DataError", f"data: {SAME}"),
    "same, by products": ("DataError", f"data: {SAME}"),
    "same, by points": ("DataError", f"data: {SAME}"),
    "same validation": ("DataError", f"validation: {SAME}"),
    "same data of a tuner": ("DataError", f"data of Grid: {SAME}"),
    "no data": ("DataError", "data is empty in all processes"),
    "other weights": ("ProcessError", "process 2 of 3 failed: ModelError: process 2 has another model than process 0"),
    "other part": (
        "ProcessError", "process 1 of 3 failed .so did 1 more.: DataError: .* gives part 0 of 3, and this is process 1"
    ),
    "other order": (
        "ProcessError", "DataError: the DistributedSampler of the data repeats data to make 3 equal parts of 22, and "
        "its batches come in another order"
    ),
    "more samples": ("ProcessError", "gives 8 data, the last of them repeated, and the loader makes more samples"),
    "other calls": ("ProcessError", "the processes went different ways"),
    "no loader": ("UnsupportedError", "a process_group of 3 and one batch of inputs; expected a loader"),
    "dealt out": ("DataError", "the sampler of the loader deals the data out to the processes"),
    "nothing to predict": ("DataError", "the loader is empty in all processes"),
    "bad inputs in one": ("ProcessError", "process 1 of 3 failed: DataError: inputs of batch 0: 8 of 8 entries"),
    "swag": ("UnsupportedError", "SWAG works in one process and process_group has 3; use Kron"),
    "ensemble": ("UnsupportedError", "Ensemble works in one process"),
    "hfl": ("UnsupportedError", "HFL works in one process"),
    "fmgp": ("UnsupportedError", "FMGP works in one process"),
    "dropout": ("UnsupportedError", "MCDropout works in one process"),
    "training, second epoch": ("ProcessError", "process 2 of 3 failed: OSError: the disk is gone"),
    "training": ("ProcessError", "process 2 of 3 failed: OSError: the disk is gone"),
    "killed": ("ProcessError", "a process of the group has ended or does not answer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_in_one_process_is_raised_in_all(found: Found, name: str) -> None:
    """In all that are left, in less than the time in which they would give up waiting."""
    error, message = MESSAGES[name]
    for rank in (0, 2) if name == "killed" else (0, 1, 2):
        result = found.of[rank][name, 3]
        assert result["error"] == error
        assert re.search(message, result["message"]), result["message"]
        assert result["seconds"] < LIMIT / 2


def test_nothing_is_written_after_an_error(found: Found) -> None:
    """No checkpoint of the first epoch if that fails, and that of the first, whole, if the second does."""
    assert [path.name for path in found.folder.glob("failed*")] == ["failed-4"]
    assert TrainingState.load(found.folder / "failed-4").epoch == 1


def test_samplers_that_leave_data_out_are_a_finding(found: Found) -> None:
    for rank in range(3):
        (dropped,) = found.of[rank]["dropped", 3]["findings"]
        assert "drops 1 of them (drop_last=True)" in dropped
        (part,) = found.of[rank]["one part", 3]["findings"]
        assert "gives one of 3 parts, and this fit reads no other" in part


def test_one_process_exchanges_nothing() -> None:
    assert Processes.of(None) is ALONE
    tensor = torch.ones(2)
    assert ALONE.sum([tensor, None])[0] is tensor
    assert ALONE.gather_rows(tensor) is tensor
    assert ALONE.copy_of_first([tensor]) == [tensor]
    assert ALONE.first_available(None) is None
    assert ALONE.run_jobs([lambda: [tensor]], [1.0], tensor.device) == [[tensor]]
    with pytest.raises(DataError, match="as it is"), ALONE.share_errors():
        raise DataError("as it is")
    assert copy.deepcopy(ALONE) is ALONE
    assert pickle.loads(pickle.dumps(Processes("a group", 1, 2))).is_single_process


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("WORLD", "process_group is 'WORLD'; expected"),
        (dist.GroupMember.NON_GROUP_MEMBER, "that this process is not in"),
    ],
)
def test_a_group_must_be_one(group: object, message: str) -> None:
    x = torch.randn(3, 1)
    for call in (lw.fit, lw.train):
        with pytest.raises(UnsupportedError, match=message):
            call(nn.Linear(1, 1), [(x, x)], "regression", process_group=group)
    with pytest.raises(UnsupportedError, match=message):
        lw.samples.Part(x, group)


# Samplers for several processes: every datum in one part, and what they say about their part.

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


def test_each_epoch_has_another_order() -> None:
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
    assert share_of(loader(sampler())) == SampleShare(2, 3, 7, 1, mixed=True)
    assert share_of(loader(DistributedSampler(data, 3, 0))) == SampleShare(0, 3, mixed=True)
    assert share_of(loader(sampler(drop_last=True))) == SampleShare(2, 3, dropped=1, mixed=True)
    assert share_of(loader(part(22, 2, 3))) == SampleShare(2, 3)
    assert share_of(DataLoader(data, batch_sampler=BatchSampler(sampler(), 4, False))) == SampleShare(
        2, 3, 7, 1, mixed=True
    )
    assert share_of(lw.samples.unpacked(loader(sampler()), lambda item: item)) == SampleShare(2, 3, 7, 1, mixed=True)
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
