"""Files that earlier versions wrote: each is loaded, and predicts what it predicted then (``tests/stored.py``)."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import lapwing as lw
from tests.stored import RUNS, SPECIMENS, Stored, ensemble, first_rows, inputs, predictions, run, small, translated
from tests.tolerances import SOLVED, assert_close

FOLDERS = sorted((Path(__file__).parents[1] / "data").iterdir())
FILES = [(folder, path.stem) for folder in FOLDERS for path in sorted(folder.glob("*.lapwing"))]
IDS = [f"{folder.name}-{name}" for folder, name in FILES]
TRAINED = 1e-6  # of the largest entry: a run of 4 epochs multiplies roundings, L-BFGS more than others


@lru_cache
def stored(folder: Path) -> Stored:
    return Stored.of(folder)


def test_there_is_a_file_of_every_specimen() -> None:
    assert set(SPECIMENS) == {name for folder, name in FILES if folder == FOLDERS[0]}


@pytest.mark.parametrize(("folder", "name"), FILES, ids=IDS)
def test_a_posterior_predicts_what_it_did(folder: Path, name: str) -> None:
    kept = stored(folder)
    model = kept.model(name, SPECIMENS[name]().model())
    again = lw.load(folder / f"{name}.lapwing", model)
    now = predictions(again, kept.inputs(name))
    expected = kept.under(f"{name}/expected/")
    assert now.keys() == expected.keys()
    for what, value in expected.items():
        dtype = next(model.parameters()).dtype  # probabilities come from quadrature in float32 too
        assert_close(now[what].double(), value.double(), SOLVED, dtype)


@pytest.mark.parametrize("name", ["kron", "integrate_regression", "budget_classes", "per_output_full", "sampled"])
def test_a_posterior_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    kept = stored(FOLDERS[0])
    model = kept.model(name, SPECIMENS[name]().model())
    again = lw.load(FOLDERS[0] / f"{name}.lapwing", model)
    again.save(tmp_path / "net")
    one, two = (predictions(p, kept.inputs(name)) for p in (again, lw.load(tmp_path / "net", model)))
    for what, value in one.items():
        assert_close(two[what], value)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_as_it_did(name: str, folder: Path) -> None:
    """Resumed from the file, it ends where an uninterrupted run of that version did."""
    kept = stored(folder)
    model = kept.model(name, small()).train()
    trained = run(name, model, resume=folder / f"{name}.training")
    assert [epoch.number for epoch in trained.history] == [0, 1, 2, 3]
    for what, value in kept.under(f"{name}/trained/").items():
        assert float((trained.model.state_dict()[what] - value).abs().max()) <= TRAINED * float(value.abs().max()), what
    now, expected = predictions(trained.posterior, inputs()[:5]), kept.under(f"{name}/expected/")
    for what, value in expected.items():
        assert float((now[what] - value).abs().max()) <= TRAINED * float(value.abs().max()), what


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_members_are_those_that_were_trained(folder: Path, tmp_path: Path) -> None:
    kept = stored(folder)
    shutil.copytree(folder / "ensemble", tmp_path / "ensemble")
    for number, member in enumerate(ensemble(kept.model("ensemble", small()), tmp_path / "ensemble")):
        for what, value in kept.under(f"ensemble/trained{number}/").items():
            assert torch.equal(member.state_dict()[what], value), what


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_names_of_laplace_torch(folder: Path) -> None:
    kept = stored(folder)
    laplace = translated(kept.model("compat", small(3)))
    laplace.load_state_dict(torch.load(folder / "compat.pt", weights_only=True))
    assert_close(laplace(inputs()[:5]), kept.under("compat/expected/")["probs"], SOLVED)


def test_the_inputs_of_specimens_have_their_form() -> None:
    kept = stored(FOLDERS[0])
    for name in ("full", "dict_input", "tuple_input"):
        assert type(kept.inputs(name)) is type(first_rows(SPECIMENS[name]().data()[0]))
