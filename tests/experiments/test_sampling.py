"""The variances of two gradients and of two estimates of γ, on few digits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

import lapwing as lw
from experiments import sampling
from experiments.__main__ import main
from lapwing.demo.result import Result
from lapwing.demo.training import TrainingSettings, trained

RECIPE = TrainingSettings(hidden=(7,), epochs=150, batch_size=40, learning_rate=2e-2, weight_decay=1 / 40)
QUICK = sampling.Sampling(recipe=RECIPE, data=40, precisions=(300.0, 3.0, 0.03), draws=1500, gradients=40)


@pytest.fixture(scope="module")
def result() -> Result:
    return sampling.run(QUICK)


def test_noise_in_the_regulariser_is_quieter_under_a_strong_prior_only(result: Result) -> None:
    strong, middle, weak = result.arrays["L / L' at optimum"]
    assert strong > 5 > middle > 1 > weak
    assert all(ratio > 0.99 for ratio in result.arrays["L / L' at start"])


def test_the_spread_of_gamma_is_the_expected_one(result: Result) -> None:
    """A standard deviation from 1500 draws is known to 2 %, to 5 % where a few squares are all there is."""
    for space in ("function", "weight"):
        found, expected = (torch.tensor(result.arrays[f"{kind} {space}, %"]) for kind in ("sd", "expected"))
        assert bool(((found / expected - 1).abs() < 0.15).all())
    assert all(f < w for f, w in zip(result.arrays["sd function, %"], result.arrays["sd weight, %"], strict=True))
    assert all(f < 100 * (2 / g) ** 0.5 for f, g in zip(result.arrays["expected function, %"], result.arrays["γ"]))


def test_gamma_is_that_of_the_full_posterior(result: Result) -> None:
    x, y = sampling._digits(QUICK)
    model = trained(x, y, 10, RECIPE, 0)
    for precision, gamma in zip(QUICK.precisions, result.arrays["γ"], strict=True):
        full = lw.fit(
            model, (x, y), "classification", method="full", prior=lw.isotropic(precision), tuner=None, progress=False
        )
        assert full.effective_parameters().total == pytest.approx(gamma, rel=1e-8)


def test_one_sample_finds_the_fixed_point(result: Result) -> None:
    (exact,) = result.arrays["fixed point"]
    found = torch.tensor(result.arrays["fixed point, function"])
    assert len(found) == 1500
    assert float(found.mean()) == pytest.approx(exact, rel=0.03)
    assert float(found.std()) < 0.25 * exact
    assert float(torch.tensor(result.arrays["fixed point, weight"]).std()) > 1.5 * float(found.std())


def test_a_result_says_where_things_change_and_comes_back_from_json(result: Result) -> None:
    assert "same variance at γ / nC = " in result.notes[0]
    assert Result.from_json(result.to_json()) == result


def test_equal_seeds_give_equal_numbers_and_others_do_not() -> None:
    small = replace(QUICK, draws=20, gradients=2)
    assert sampling.run(small).arrays == sampling.run(small).arrays
    assert sampling.run(replace(small, seed=1)).arrays != sampling.run(small).arrays


def test_no_crossing_is_none() -> None:
    assert sampling.crossing([1.0, 2.0], [3.0, 4.0], 1.0) is None
    assert sampling.crossing([4.0, 1.0], [1.0, 3.0], 1.0) == pytest.approx(4.0)


def test_the_command_prints_a_table_and_writes_what_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sampling", "--quick", "--out", str(tmp_path), "--seed", "2"]) == 0
    printed = capsys.readouterr().out
    assert "one sample gives γ to 10 %" in printed
    picture, numbers = (Path(line) for line in printed.splitlines() if line.startswith(str(tmp_path)))
    pixels = torch.tensor(imread(picture))[..., :3]
    assert 0.02 < float((pixels < 0.98).any(-1).float().mean()) < 0.5
    found = Result.from_json(json.dumps(json.loads(numbers.read_text())["sampling"]))
    assert found.seed == 2
    assert len(found.rows) == len(sampling.GRID)
