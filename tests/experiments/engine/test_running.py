"""Runs: every unit is stored when it is done, failures do not end a run, and the next run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.engine.contract import Record
from experiments.engine.running import Plan, run
from experiments.engine.store import Unit, load
from experiments.options import Progress
from lapwing.errors import FileError
from tests.experiments.engine.toy import Net, Toy


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "out" / "toy_quick.json", "quick", command="python -m experiments toy")


def test_every_unit_is_stored_with_its_machine_time_and_memory(plan: Plan) -> None:
    outcome = run(Toy(), plan)
    stored = load(plan.path)
    assert stored == outcome.stored
    assert list(stored.units) == ["wine/0", "wine/1", "yacht/0", "yacht/1"]
    assert len(stored.records) == 8
    assert (outcome.failed, outcome.left) == ((), ())
    unit = stored.units["wine/1"]
    assert unit.machine.command == "python -m experiments toy"
    assert unit.machine.versions["torch"] == str(torch.__version__)
    assert unit.machine.hardware
    assert unit.peak is None or unit.peak > 2**20
    assert 0 <= unit.seconds < 60


def test_units_that_are_stored_do_not_run_again(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Toy(repeats=1), plan)
    stored = run(Toy(repeats=1), plan, lambda line: None).stored
    ran: list[str] = []
    measure = Toy.measure
    monkeypatch.setattr(Toy, "measure", lambda self, unit, progress: ran.append(unit) or measure(self, unit, progress))
    more = run(Toy(repeats=3), plan).stored
    assert ran == ["wine/1", "wine/2", "yacht/1", "yacht/2"]
    assert more.units["wine/0"] == stored.units["wine/0"]
    ran.clear()
    monkeypatch.setattr(Toy, "version", 2, raising=False)
    run(Toy(repeats=1), plan)
    assert ran == ["wine/0", "yacht/0"]


def test_a_unit_gives_the_same_whatever_ran_before(plan: Plan) -> None:
    whole = run(Toy(), plan).stored
    torch.manual_seed(7)
    alone = run(Toy(), replace(plan, path=plan.path.with_name("alone.json"), only="yacht/1")).stored
    assert list(alone.units) == ["yacht/1"]
    assert alone.units["yacht/1"].records == whole.units["yacht/1"].records
    assert whole.units["yacht/0"].records[0].scores != whole.units["yacht/1"].records[0].scores


def test_a_unit_that_fails_is_stored_with_its_error_and_tried_again(plan: Plan) -> None:
    lines: list[str] = []
    outcome = run(Toy(bad="wine/1"), plan, lines.append)
    assert outcome.failed == ("wine/1",)
    assert load(plan.path).units["wine/1"].error == "lapwing.errors.DataError: the table is empty."
    assert len(load(plan.path).records) == 6
    assert any(line.startswith("wine/1: failed, lapwing.errors.DataError: the table is empty.") for line in lines)
    again = run(Toy(), plan)
    assert (again.failed, len(again.stored.records)) == ((), 8)


def test_ctrl_c_keeps_what_is_done(plan: Plan) -> None:
    outcome = run(Toy(stop="yacht/0"), plan)
    assert outcome.interrupted
    assert outcome.left == ("yacht/0", "yacht/1")
    assert list(load(plan.path).units) == ["wine/0", "wine/1"]
    assert len(run(Toy(), plan).stored.units) == 4


def test_no_unit_is_started_when_the_time_is_over(plan: Plan) -> None:
    outcome = run(Toy(), replace(plan, seconds=0.0))
    assert outcome.left == ("wine/0", "wine/1", "yacht/0", "yacht/1")
    assert not plan.path.exists()


def test_results_of_other_settings_are_not_overwritten_unless_asked(plan: Plan) -> None:
    run(Toy(), plan)
    with pytest.raises(FileError, match=r"with net = .*--replace"):
        run(Toy(net=Net(rate=0.1)), plan)
    outcome = run(Toy(net=Net(rate=0.1), repeats=1), replace(plan, replace=True))
    assert list(outcome.stored.units) == ["wine/0", "yacht/0"]


def test_runs_of_other_units_may_share_the_file(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run ends while the first one is within its first unit."""
    measure = Toy.measure
    others = iter([replace(plan, only="wine/*")])

    def measured(self: Toy, unit: str, progress: Progress) -> Iterable[Record]:
        for other in others:
            run(Toy(), other)
        return measure(self, unit, progress)

    monkeypatch.setattr(Toy, "measure", measured)
    stored = run(Toy(), replace(plan, only="yacht/*")).stored
    assert stored == load(plan.path)
    assert list(stored.units) == list(Toy().units())


def test_a_pattern_that_selects_nothing_is_refused(plan: Plan) -> None:
    with pytest.raises(FileError, match="such as wine/0, wine/1"):
        run(Toy(), replace(plan, only="boston/*"))


def test_another_process_gives_the_same_records_with_one_thread(plan: Plan) -> None:
    """One unit, since each process imports PyTorch."""
    here = run(Toy(), replace(plan, only="yacht/1")).stored.units["yacht/1"]
    there = run(Toy(), replace(plan, path=plan.path.with_name("there.json"), only="yacht/1", workers=2))
    unit = there.stored.units["yacht/1"]
    assert [r.scores["NLL"] for r in unit.records] == [r.scores["NLL"] for r in here.records]  # the same computation
    assert {r.scores["threads"] for r in unit.records} == {1.0}
    assert unit.machine.threads == 1


class Pool:
    """A pool in this process; a unit whose key is in ``deadly`` breaks it."""

    deadly: tuple[str, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        self.broken = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *arguments: Any) -> None:
        return

    def submit(self, call: Callable[..., Unit], experiment: Toy, key: str, *rest: Any) -> Future[Unit]:
        future: Future[Unit] = Future()
        self.broken = self.broken or key in self.deadly
        if self.broken:
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(call(experiment, key, *rest))
        return future


def test_a_process_that_dies_ends_its_unit_alone(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.engine.running.ProcessPoolExecutor", Pool)
    monkeypatch.setattr(Pool, "deadly", ("wine/1",))
    outcome = run(Toy(), replace(plan, workers=1 + 1))
    assert "wine/1" in outcome.failed
    assert "a process died" in outcome.stored.units["wine/1"].error
    assert set(outcome.stored.units) == set(Toy().units())
    assert "yacht/1" not in outcome.failed
    monkeypatch.setattr(Pool, "deadly", ())
    assert len(run(Toy(), replace(plan, workers=3)).stored.records) == 8
