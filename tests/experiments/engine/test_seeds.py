"""Units of seeds, and the experiments that the engine knows."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.engine.known import EXPERIMENTS, experiment_class
from experiments.engine.seeds import parted, records_of, seed_units
from experiments.engine.settings import digest, plain
from experiments.engine.values import built
from experiments.flights import Flights
from experiments.options import Progress
from experiments.sampling import Sampling
from lapwing.demo.result import Result, Row
from lapwing.errors import LapwingError


def test_a_unit_for_each_name_and_seed() -> None:
    units = seed_units(SimpleNamespace(seed=5, seeds=2), "a/b", "c")
    assert units == ("a/b/5", "a/b/6", "c/5", "c/6")
    assert parted(units[1]) == ("a/b", 6)


def test_rows_become_records_with_their_time() -> None:
    rows = (Row("Kron", {"NLL": 1.5, "fit s": 2.0}, "wine"), Row("plain", {"NLL": 2.5}))
    records = list(records_of(Result("uci", {}, 0, rows, {}), 4))
    assert [(r.group, r.method, r.repeat, r.scores, r.seconds) for r in records] == [
        ("wine", "Kron", 4, {"NLL": 1.5}, 2.0),
        ("uci", "plain", 4, {"NLL": 2.5}, None),
    ]


def test_a_seed_alone_runs_with_that_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: Flights, progress: Progress) -> Result:
        rows = tuple(Row(name, {"NLL": float(settings.seed)}) for name in ("plain", "Kron"))
        return Result("flights", {}, settings.seed, rows * settings.seeds, {})

    monkeypatch.setattr("experiments.flights.run", run)
    settings = Flights(Path(), seeds=3, seed=7)
    records = [r for unit in settings.units() for r in settings.measure(unit, print)]
    assert [(r.method, r.repeat, r.scores["NLL"]) for r in records] == [
        (method, seed, float(seed)) for seed in (7, 8, 9) for method in ("plain", "Kron")
    ]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_keeps_the_contract(name: str) -> None:
    """Both forms are readable from plain values, and the quick one asks for other work than the full one."""
    cls = experiment_class(name)
    assert cls.name == name
    assert cls.title
    for form in (cls.quick(), cls.full()):
        assert built(cls, plain(form)) == form
    assert plain(cls.quick()) != plain(cls.full())
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    assert set(getattr(cls, "choosing", ())) <= names
    assert digest(replace(cls.full(), seed=99)) != digest(cls.full())  # type: ignore[type-var]


def test_unknown_experiments_are_named() -> None:
    with pytest.raises(LapwingError, match="no experiment 'walk'; expected one of"):
        experiment_class("walk")


def test_one_experiment_gives_the_rows_of_its_command() -> None:
    settings = replace(Sampling.quick(), precisions=(10.0, 0.1), data=30, draws=4, gradients=2)
    settings = replace(settings, recipe=replace(settings.recipe, epochs=2, hidden=(3,)))
    records = list(settings.measure("digits", print))
    assert [record.method for record in records] == ["precision 10", "precision 0.1"]
    assert all(record.scores["γ"] > 0 for record in records)
