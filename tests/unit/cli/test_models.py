"""Models by import path, with their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.cli.conftest import FITTED, Ran

Run = Callable[..., Ran]


def test_a_model_may_be_a_function_a_class_or_an_object(run: Run) -> None:
    for model in ("cli_nets:classifier", "cli_nets:Keyed", "cli_nets:ready"):
        data = "cli_nets:make_dicts --target kind" if "Keyed" in model else "train.npz"
        assert run(f"check {model} --data {data} --json").code == 0


def test_a_random_network_without_weights_is_refused(run: Run, tmp_path: Path) -> None:
    fit = "fit {} --data train.npz --likelihood classification --prior 1 --out"
    error = run(fit.format("cli_nets:classifier"), str(tmp_path / "a.lapwing")).error
    assert "gives other values of 0.weight at each call, so its weights are not trained" in error
    assert "--weights FILE" in error
    assert run(fit.format("cli_nets:ready"), str(tmp_path / "b.lapwing")).code == 0


def test_the_model_is_in_evaluation_mode_and_has_the_given_weights(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lapwing.cli import check

    seen = []
    whole = check.check
    monkeypatch.setattr(
        check, "check", lambda model, *args, **kwargs: seen.append(model) or whole(model, *args, **kwargs)
    )
    assert run(f"check {FITTED} --data train.npz").code == 0
    assert not any(module.training for module in seen[0].modules())
    state = torch.load(folder / "classifier.pt", weights_only=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in seen[0].state_dict().items())
