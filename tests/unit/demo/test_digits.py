"""A short run on the digits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lapwing.demo import digits
from lapwing.demo.result import Result
from lapwing.demo.training import Recipe

QUICK = digits.Digits(recipe=Recipe(hidden=(32,), epochs=100, learning_rate=1e-2))


@pytest.fixture(scope="module")
def result() -> Result:
    return digits.run(QUICK)


def test_the_network_has_learned(result: Result) -> None:
    plain, posterior, last = result.rows
    assert plain.name == "plain network"
    for row in result.rows:
        assert row.scores["accuracy"] > 0.5  # one in ten by chance
        assert row.scores["fit / epoch"] > 0
    for row in (posterior, last):  # the plain network is too sure of noisy images
        assert row.scores["NLL"] < plain.scores["NLL"]
        assert row.scores["ECE"] < plain.scores["ECE"]


def test_without_noise_the_digits_are_easy() -> None:
    plain = digits.run(replace(QUICK, noise=0.0)).rows[0]
    assert plain.scores["accuracy"] > 0.95


def test_the_posterior_doubts_more_and_doubts_strangers_most(result: Result) -> None:
    plain, posterior, _ = result.rows
    mean = lambda key: sum(result.arrays[key]) / len(result.arrays[key])
    for kind in ("test", "shuffled", "rotated"):
        assert mean(f"posterior/{kind}") < mean(f"plain network/{kind}")
    assert mean("posterior/shuffled") < mean("posterior/test")
    assert posterior.scores["AUROC shuffled"] > plain.scores["AUROC shuffled"] > 0.5


def test_arrays_agree_with_the_scores(result: Result) -> None:
    for row in result.rows:
        correct = result.arrays[f"{row.name}/correct"]
        assert sum(correct) / len(correct) == pytest.approx(row.scores["accuracy"])
        assert len(correct) == len(result.arrays[f"{row.name}/shuffled"])


def test_strangers_are_made_of_the_same_pixels() -> None:
    _, (test, _) = digits._split(QUICK)
    images = digits._images(test, seed=0)
    for other in (images["shuffled"], images["rotated"]):
        assert (other != test).any(1).float().mean() > 0.9
        assert other.sort(1).values.equal(test.sort(1).values)
    assert images["rotated"].reshape(-1, 8, 8)[:, 7, 0].equal(test.reshape(-1, 8, 8)[:, 0, 0])


def test_equal_seeds_give_equal_scores_and_others_do_not(result: Result) -> None:
    again = digits.run(QUICK)
    assert again.arrays == result.arrays
    other = digits.run(replace(QUICK, seed=1))
    assert other.arrays != result.arrays
    assert other.seed == 1
