"""The settings of a training run, what is refused, and what is shown."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing import errors, recipes
from lapwing.priors import PerLayer
from lapwing.runtime.threads import ProgressBar
from tests import problems
from tests.unit.training.settings import arrays, kept, mlp, set_to

D = torch.float64


def test_settings_have_their_place() -> None:
    recipe = recipes.classic(epochs=7, prior=lw.per_layer(2.0), seed=3)
    assert (recipe.epochs, recipe.seed, recipe.optimiser) == (7, 3, "lbfgs")
    assert isinstance(recipe.prior, PerLayer)
    assert isinstance(recipe.method, lw.Full)
    with pytest.raises(errors.UnsupportedError, match=r"is 'epoch'; expected one of epochs.*Did you mean 'epochs'"):
        recipes.online(epoch=3)


def test_the_rate_falls_by_a_cosine() -> None:
    recipe = recipes.online(10, rate=1.0, last_rate=0.2)
    assert [recipe.rate_at(p) for p in (0.0, 0.5, 1.0, 2.0)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


@pytest.mark.parametrize(
    ("recipe", "likelihood", "error", "message"),
    [
        (recipes.online, "classification", errors.UnsupportedError, r"recipe is .*expected online\(...\)"),
        (recipes.Recipe, "classification", errors.UnsupportedError, "recipe is .*expected online"),
        ("online", "classification", errors.UnsupportedError, "recipe is 'online'"),
        (None, lw.Categorical, errors.UnsupportedError, "likelihood is the class Categorical"),
        (None, "classify", errors.UnsupportedError, "likelihood is 'classify'; expected one of"),
        (None, lw.Gaussian(per_output=True), errors.UnsupportedError, "one noise for all outputs"),
        (recipes.online(2, prior=lw.priors.g_prior()), "classification", errors.UnsupportedError, "a g-prior depends on the curvature"),  # noqa: E501
        (recipes.online(2, prior=lw.priors.per_normalised_group()), "classification", errors.UnsupportedError, "per_normalised_group"),  # noqa: E501
        (recipes.online(2, method=lw.baselines.MapOnly()), "classification", errors.UnsupportedError, r"MapOnly\(\) has no evidence"),  # noqa: E501
        (None, "regression", errors.DataError, "Gaussian: targets have the shape"),
    ],
)  # fmt: skip
def test_what_is_refused(recipe: Any, likelihood: Any, error: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        problems.unchanged(model, lambda: lw.train(model, [arrays("categorical")], likelihood, recipe=recipe))


def test_bad_models_and_data() -> None:
    x, y = arrays("categorical")
    with pytest.raises(errors.ModelError, match=r"expected a torch\.nn\.Module"):
        lw.train(lambda x: x, [(x, y)], "classification")  # type: ignore[arg-type]
    with pytest.raises(errors.DataError, match="data is empty"):
        lw.train(mlp(), [], "classification")
    with pytest.raises(errors.DataError, match="one-shot iterator"):
        lw.train(mlp(), iter([(x, y)]), "classification")
    with pytest.raises(errors.DataError, match="NaN or infinite"):
        lw.train(mlp(), [(x * float("nan"), y)], "classification")
    mixing = nn.Sequential(mlp(), nn.Softmax(0))
    with pytest.raises(errors.ModelError, match="with the rest of its batch"):
        lw.train(mixing, [(x, y)], "classification")


def recipe() -> recipes.Recipe:
    values = lambda number: torch.tensor([0.125, 4.0, 2.0], dtype=D)
    return recipes.online(4, burn_in=2, update=set_to(values))


def test_the_bar_shows_loss_evidence_and_precisions(capsys: pytest.CaptureFixture[str]) -> None:
    trained = lw.train(mlp(), [arrays("categorical")], "classification", recipe=recipe(), progress=True)
    printed = capsys.readouterr().err
    assert "training: 100%" in printed
    assert "4/4" in printed
    last = trained.history[-1]
    assert f"loss {last.loss:.4g}, log evidence {last.log_evidence:.6g}, precision 0.12..4" in printed
    lw.train(mlp(), [arrays("categorical")], "classification", recipe=recipe(), progress=False)
    assert capsys.readouterr().err == ""


def test_what_the_bar_is_told_epoch_by_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(ProgressBar, "show_text", lambda bar, text: texts.append(text))
    settings = {"prior": lw.isotropic(0.5), "update": kept, "burn_in": 2}
    history = lw.train(
        mlp(), [arrays("categorical")], "classification", recipe=recipes.online(4, **settings), progress=True
    ).history
    assert texts[:2] == [f"loss {epoch.loss:.4g}" for epoch in history[:2]]  # nothing is known of the evidence yet
    expected = [f"loss {e.loss:.4g}, log evidence {e.log_evidence:.6g}, precision 0.5" for e in history[2:]]
    assert texts[2:] == expected


def test_a_resumed_bar_starts_where_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    data = [arrays("categorical")]
    state = lw.train(mlp(), data, "classification", recipe=recipes.online(3), progress=False).state
    lw.train(mlp(), data, "classification", recipe=recipes.online(4), resume=state, progress=True)
    assert "3/4" in capsys.readouterr().err


def test_no_bar_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert (
        len(lw.train(mlp(), [arrays("categorical")], "classification", recipe=recipes.online(2), progress=True).history)
        == 2
    )
    assert capsys.readouterr().err == ""
