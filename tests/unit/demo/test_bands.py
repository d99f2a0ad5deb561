"""One input with a gap."""

from __future__ import annotations

import pytest

from lapwing.demo import bands
from lapwing.demo.training import TrainingSettings


def test_doubt_is_larger_where_there_are_no_data() -> None:
    result = bands.run(bands.Bands(recipe=TrainingSettings(hidden=(30, 30), epochs=300)))
    (row,) = result.rows
    assert row.scores["epistemic std in gap"] > 2 * row.scores["epistemic std at data"]
    assert row.scores["noise std"] == pytest.approx(0.3, rel=0.25)
    assert all(abs(x) >= 1 for x in result.arrays["x"])
    total, epistemic = result.arrays["std"], result.arrays["epistemic_std"]
    assert all(t > e for t, e in zip(total, epistemic, strict=True))
    width = lambda kind: [h - b for b, h in zip(result.arrays[f"{kind}low"], result.arrays[f"{kind}high"], strict=True)]
    assert max(width("")) > 3 * min(width(""))
    assert max(width("plain ")) < 1.001 * min(width("plain "))  # one noise for all
