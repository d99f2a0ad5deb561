"""Shifted images: every method on a tiny network, and the picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.engine.contract import Record
from experiments.options import silent
from experiments.vision import shift_task
from experiments.vision.shift import Shift
from experiments.vision.shift_methods import Effort
from experiments.vision.shift_picture import COLOURS, picture
from experiments.vision.shift_task import Large, Small
from tests.pixels import drawn, inked, share

TINY = replace(
    Shift.quick(), networks=("small", "large"), members=2, angles=(0.0, 90.0), tuning=24, test=30,
    effort=Effort(260, 30, 130, 1000, (7, 20), 4, 3, 2, (1.0, 100.0), (100.0, 1000.0)),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def networks() -> None:
    shift_task.NETWORKS["small"] = Small("digits", channels=(2, 3), hidden=5, epochs=1)
    shift_task.NETWORKS["large"] = Large("digits", width=2, blocks=1, epochs=1)


def test_every_method_at_every_step() -> None:
    records = list(TINY.measure("small/0", silent))
    methods = {r.method for r in records}
    several = {"ensemble", "mixture of last layers", "MC dropout", "sampled posterior", "Kron", "SWAG"}
    several |= {"IVON", "VariationalLastLayer"}
    assert methods == {"plain", "temperature", "last layer", "subnetwork of 7", "subnetwork of 20"} | several
    assert {r.group for r in records} == {"small, 0 degrees", "small, 90 degrees"}
    assert len(records) == 2 * len(methods)
    first = {r.group: r.scores for r in records if r.method == "plain"}
    assert first["small, 0 degrees"] != first["small, 90 degrees"]


def test_a_network_with_norms_on_corrupted_images() -> None:
    lines: list[str] = []
    records = list(TINY.measure("large/0", lines.append))
    assert not any("failed" in line for line in lines)
    methods = {r.method for r in records}
    assert {"plain", "ensemble", "sampled posterior", "subnetwork of 20"} <= methods
    assert "Kron" not in methods  # more weights than allowed
    scores = next(r.scores for r in records if r.group == "large, strength 3")
    kinds = ("noise", "blur", "contrast", "pixelate")
    assert scores["NLL"] == pytest.approx(sum(scores[f"NLL {kind}"] for kind in kinds) / 4)
    ensemble = next(r for r in records if r.method == "ensemble")
    assert ensemble.seconds is not None
    assert ensemble.seconds > 0  # the training of the other member


def records(methods: int) -> list[Record]:
    steps = {"rotated": [f"{angle} degrees" for angle in (0, 45, 90)], "corrupted": ["strength 0", "strength 5"]}
    return [
        Record(f"{network}, {step}", f"method {number}", seed, {"NLL": 1.0 + number, "ECE": 0.1 * number})
        for network, each in steps.items()
        for step in each
        for number in range(methods)
        for seed in (0, 1)
    ]


def test_the_picture_has_a_line_for_every_method(tmp_path: Path) -> None:
    one, three = (drawn(picture, records(n), tmp_path) for n in (1, 3))
    assert 0.01 < inked(one) < 0.5
    assert share(one, COLOURS[0]) > 2e-4
    assert share(one, COLOURS[2]) == 0
    assert share(three, COLOURS[2]) > 2e-4
