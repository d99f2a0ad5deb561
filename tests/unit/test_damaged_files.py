"""Damaged files and checkpoints: the short form of ``python -m tests.attack files`` and ``checkpoints``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack import checkpoints, files

IN_SHORT = ("kron", "low rank", "fmgp rbf", "mixture", "each noise", "bernoulli", "g-prior", "subnetwork", "valla")


def test_every_specimen_in_short_is_refused_or_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SPECIMENS", {name: files.SPECIMENS[name] for name in IN_SHORT})
    totals, wrong = files.attacked(180, seed=11, folder=tmp_path)
    assert not wrong, "\n".join(wrong)
    assert totals["refused"] > 100
    assert totals["accepted"] > 5


def test_checkpoints_are_refused_or_possible(tmp_path: Path) -> None:
    totals, wrong = checkpoints.attacked(45, seed=11, folder=tmp_path)
    assert not wrong, "\n".join(wrong)
    assert totals["refused"] > 20
    assert totals["accepted"] > 2
