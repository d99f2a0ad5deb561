"""A short run on the digits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lapwing.demo import digits
from lapwing.demo.result import Result
from lapwing.demo.training import TrainingSettings

QUICK = digits.Digits(recipe=TrainingSettings(hidden=(32,), activation="relu", learning_rate=1e-2), repeats=1)
TASKS = ["digits", "noisy digits", "digits, BatchNorm"]


@pytest.fixture(scope="module")
def result() -> Result:
    return digits.run(QUICK)


def score(result: Result, task: str, name: str, key: str) -> float:
    return next(row.scores[key] for row in result.rows if (row.group, row.name) == (task, name))


def test_every_task_has_every_row_and_has_learned(result: Result) -> None:
    names = ["plain network", "temperature scaling", "Lapwing", "Lapwing with validation", "naive evidence"]
    assert [(row.group, row.name) for row in result.rows] == [(task, name) for task in TASKS for name in names]
    for row in result.rows:
        assert list(row.scores) == ["NLL", "ECE", "accuracy", "AUROC"]
        assert row.scores["accuracy"] > (0.5 if row.group == "noisy digits" else 0.9)  # one in ten by chance


def test_error_bars_do_no_harm_and_help_where_the_network_is_too_confident(result: Result) -> None:
    for task in TASKS:
        plain = score(result, task, "plain network", "NLL")
        assert score(result, task, "Lapwing", "NLL") < plain + 0.01
        assert score(result, task, "Lapwing with validation", "NLL") < plain + 0.01
    noisy = {name: score(result, "noisy digits", name, "NLL") for name in ("plain network", "Lapwing with validation")}
    assert noisy["Lapwing with validation"] < 0.8 * noisy["plain network"]
    assert score(result, "noisy digits", "Lapwing", "NLL") < noisy["plain network"]


def test_the_naive_evidence_does_harm_on_clean_digits(result: Result) -> None:
    for task in ("digits", "digits, BatchNorm"):
        assert score(result, task, "naive evidence", "ECE") > score(result, task, "plain network", "ECE") + 0.1


def test_arrays_agree_with_the_scores(result: Result) -> None:
    for row in result.rows:
        correct = result.arrays[f"{row.group}/{row.name}/correct"]
        assert sum(correct) / len(correct) == pytest.approx(row.scores["accuracy"])
        assert len(correct) == len(result.arrays[f"{row.group}/{row.name}/confidence"]) == 719


def test_the_parts_of_a_split_are_of_one_source_and_do_not_overlap() -> None:
    train, held_out, test = digits.split(QUICK, noise=0.5, seed=0)
    assert [len(y) for _, y in (train, held_out, test)] == [878, 200, 719]
    images = torch.cat([train[0], held_out[0], test[0]])
    assert len(images.unique(dim=0)) == 1797
    clean = digits.split(QUICK, noise=0.0, seed=0)[0]
    assert clean[1].equal(train[1])
    assert (train[0] - clean[0]).std() == pytest.approx(0.5, rel=0.02)


def test_strange_images_are_made_of_the_same_pixels() -> None:
    test, _ = digits.split(QUICK, noise=0.5, seed=0)[2]
    strange = digits.shuffled(test, seed=0)
    assert (strange != test).any(1).all()
    assert strange.sort(1).values.equal(test.sort(1).values)


@pytest.mark.filterwarnings("error::lapwing.errors.CalibrationWarning")
def test_equal_seeds_give_equal_scores_and_repeats_are_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With some of the images, and networks that are small and hardly trained."""
    images, labels = digits.load_digits(return_X_y=True)
    monkeypatch.setattr(digits, "load_digits", lambda **_: (images[:400], labels[:400]))
    short = replace(QUICK, recipe=replace(QUICK.recipe, hidden=(8,), epochs=3), validation=60)
    result, other, two = (digits.run(replace(short, **given)) for given in ({}, {"seed": 1}, {"repeats": 2}))
    for key, values in two.arrays.items():
        assert values == result.arrays[key] + other.arrays[key]
    for row, one, another in zip(two.rows, result.rows, other.rows, strict=True):
        assert row.scores["NLL"] == pytest.approx((one.scores["NLL"] + another.scores["NLL"]) / 2)
    assert other.arrays != result.arrays
    assert other.seed == 1
