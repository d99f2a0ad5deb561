"""The lines of the README that take a model and loaders do what they say. Its other examples are doctests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_from_a_classifier_to_a_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    centres = 3 * torch.randn(4, 5)
    labels = torch.randint(0, 4, (1700,))
    drawn = centres[labels] + 0.6 * torch.randn(1700, 5)
    train, held_out, calibration, test = (
        (drawn[rows], labels[rows]) for rows in torch.arange(1700).split([200, 100, 1200, 200])
    )
    model = nn.Linear(5, 4)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(train[0]), train[1]).backward()
        optimiser.step()
    names: dict[str, Any] = {
        "lw": lw, "model": model, "train_loader": [train], "held_out": held_out, "calibration": calibration,
        "test": test, "x": test[0], "pool": drawn[:60],
    }  # fmt: skip
    (lines,) = re.findall(
        r"^## From a classifier to a decision\n\n```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL
    )
    exec(compile(lines, "README.md", "exec"), names)
    torch.testing.assert_close(names["probs"].sum(1), torch.ones(200))
    wrong = (names["labels"] != test[1])[names["answered"]].float().mean()
    assert wrong < 0.05
    assert names["sets"].members.shape == (200, 4)
    assert names["strange"].shape == (200,)
    assert len(set(names["next_to_label"].tolist())) == 20
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
