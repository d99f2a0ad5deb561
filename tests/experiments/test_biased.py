"""Classification on a folder of tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments import biased
from lapwing.demo.training import TrainingSettings


def test_every_row_is_scored_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    np.savez(tmp_path / "rare.npz", X=x, y=(x.sum(1) > 1.5).astype(int), kind="classification")
    monkeypatch.setattr(biased, "TRAININGS", dict.fromkeys(("usual", "balanced"), TrainingSettings((4,), epochs=1)))
    result = biased.run(biased.Biased(tmp_path))
    assert {row.group for row in result.rows} == {"usual", "balanced"}
    rows = [row.name for row in result.rows if row.group == "usual"]
    assert rows == [
        "plain", "default", "temperature, 50", "no offsets, 50", "validation, 50", "temperature, 200",
        "no offsets, 200", "validation, 200",
    ]  # fmt: skip
    assert all(0 < row.scores["NLL"] < 5 and 0 <= row.scores["bias"] <= 1 for row in result.rows)
    assert len(result.notes) == 14
    assert "balanced: validation, 200 against temperature, 200: NLL " in "".join(result.notes)
