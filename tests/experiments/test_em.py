"""EM from samples of a small ResNet, against the exact posterior."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch

import lapwing as lw
from experiments.em import LARGEST, SampleScales, made_task, sampled, tangent_data
from experiments.engine.contract import Record
from experiments.options import silent
from experiments.resnets import augmented, staged

SETTINGS = SampleScales(
    widths=(2, 3), train=60, held_out=30, test=40, tangent=20, epochs=2, batch=7, samples=5, steps=3,
    precisions=(100.0, 10.0, 1.0),
)  # fmt: skip


@cache
def records(unit: str) -> tuple[Record, ...]:
    return tuple(SETTINGS.measure(unit, silent))


def steps(method: str) -> list[Record]:
    return [record for record in records("em") if record.method == method]


def test_gamma_is_that_of_the_exact_posterior() -> None:
    """Within five standard errors of one over all samples, √(2/γ) of it or less each."""
    first = steps("5 samples")[0]
    exact = lw.fit(
        made_task(SETTINGS).model, tangent_data(SETTINGS), "classification", method="full", prior=SETTINGS.start
    )
    gamma = exact.effective_parameters().total
    assert first.scores["precision"] == SETTINGS.start
    assert abs(first.scores["γ"] - gamma) < 5 * (2 * gamma / 5) ** 0.5


def test_steps_follow_each_other() -> None:
    many, single = steps("5 samples"), steps("one sample")
    assert len(single) == 5 * len(many)
    for number, (one, after) in enumerate(pairwise(many)):
        least = one.scores["precision"] / LARGEST
        assert after.scores["precision"] == pytest.approx(max(least, one.scores["next precision"]))
        alone = [record for record in single if record.group == f"step {number}"]
        assert [record.repeat for record in alone] == list(range(5))
        assert sum(r.scores["γ"] for r in alone) / 5 == pytest.approx(one.scores["γ"], rel=1e-6)
        ratio = alone[2].scores["γ"] / one.scores["γ"]
        assert alone[2].scores["next precision"] == pytest.approx(ratio * one.scores["next precision"])


def test_the_first_step_is_that_of_the_tuner() -> None:
    """SampleEM at the tangent model's own optimum, from the same samples."""
    tuner = lw.tuners.SampleEM(data=tangent_data(SETTINGS), max_steps=1, solver_tolerance=1e-6)
    updated = tuner(sampled(SETTINGS))
    assert steps("5 samples")[0].scores["next precision"] == pytest.approx(
        float(updated.problem.prior.values), rel=0.02
    )


def test_every_result_is_scored() -> None:
    units = SETTINGS.units()
    assert units == ("plain", "em", "validation")
    scored = [record for unit in units for record in records(unit) if record.group == "test"]
    assert [record.method for record in scored] == [
        "plain", "temperature", "EM, 5 samples", "EM, γ from one sample", "validation, 5 samples",
    ]  # fmt: skip
    for record in scored:
        assert record.scores["NLL"] > 0
        assert 0 <= record.scores["ECE"] <= 1
        assert 0 <= record.scores["accuracy"] <= 1
    held_out = {r.scores["precision"]: r.scores["NLL"] for r in records("validation") if r.group == "held out"}
    assert scored[-1].scores["precision"] == pytest.approx(min(held_out, key=lambda key: held_out[key]))


def test_the_full_form_is_resnet_18() -> None:
    full = SampleScales.full()
    assert sum(p.numel() for p in staged(full.widths, full.blocks).parameters()) == 11_173_962
    assert full.train + full.held_out == 50_000


def test_augmented_images_are_shifted() -> None:
    """A single bright pixel in the middle stays, at most four pixels away in each direction."""
    x = torch.zeros(50, 3, 16, 16)
    x[:, :, 8, 8] = 1
    moved = augmented(x, torch.Generator().manual_seed(0))
    assert moved.shape == x.shape
    assert torch.equal(moved.sum((1, 2, 3)), x.sum((1, 2, 3)))
    places = moved[:, 0].flatten(1).argmax(1)
    rows, columns = places // 16, places % 16
    assert int(rows.min()) >= 4
    assert int(rows.max()) <= 12
    assert len(columns.unique()) > 5
