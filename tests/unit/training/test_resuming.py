"""Equal seeds give equal results; a resumed run ends like an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.api import Trained
from lapwing.training.state import TrainingState
from tests import problems
from tests.attack.damage import Contents
from tests.cases import BY_NAME
from tests.unit.training.settings import CUTS, D, arrays, dropped, flat, kept, mlp, same, shuffled

OPTIMISERS = ["adam", "sgd", "lbfgs"]
DATA = ["batches", "shuffled"]


class CrashError(Exception):
    """An error that ends a run in the middle."""


def data(name: str) -> Any:
    return problems.split(*arrays("gaussian"), CUTS) if name == "batches" else shuffled()


def recipe(optimiser: str, epochs: int = 5, crash: int | None = None, **changes: Any) -> lw.recipes.Recipe:
    """A constant rate, so that a shorter run is the beginning of a longer one; ``crash`` is an epoch."""
    calls: list[int] = []
    climb = lw.tuners.Ascend(steps=5)

    def update(posterior: Any) -> Any:
        calls.append(1)
        if crash is not None and len(calls) > crash:
            raise CrashError
        return climb(posterior)

    settings = {"rate": 1e-2, "last_rate": 1e-2, "optimiser": optimiser, "update": update}
    return lw.recipes.online(epochs, **{**settings, **changes})


def run(
    recipe: lw.recipes.Recipe, source: Any, noise: int = 0, model: nn.Module | None = None, **settings: Any
) -> Trained:
    """Train, starting with the global generator in an arbitrary state."""
    model = dropped() if model is None else model
    torch.manual_seed(noise)
    return lw.train(model, source, "regression", recipe=recipe, **settings)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_equal_seeds_give_equal_results(optimiser: str) -> None:
    """With dropout and a shuffling loader, from any state of the global generator; other seeds give other results."""
    one, two = (run(recipe(optimiser, 3), shuffled(), noise=noise) for noise in (1, 2))
    same(one, two)
    other = run(recipe(optimiser, 3, seed=1), shuffled(), noise=1)
    assert float((flat(one.model) - flat(other.model)).abs().max()) > 1e-4
    assert one.history[0].loss != other.history[0].loss


def test_epochs_differ_from_each_other() -> None:
    """A seed for each epoch, and not one for all: with weights and noise at rest the losses still differ."""
    still = run(recipe("sgd", 3, rate=1e-15, last_rate=1e-15, update=kept, prior=lw.isotropic(1e-9)), shuffled())
    assert abs(still.history[1].loss / still.history[2].loss - 1) > 1e-6


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    """A list of batches draws no random numbers, so the global generator must not change."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    model, source = dropped(), data("batches")
    torch.manual_seed(5)
    lw.train(model, source, "regression", recipe=recipe("adam", 2))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("source", DATA)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_resuming_from_memory(optimiser: str, source: str) -> None:
    whole = run(recipe(optimiser), data(source), noise=1)
    first = run(recipe(optimiser, 2), data(source), noise=2)
    assert first.state.epoch == 2
    assert first.history == whole.history[:2]
    model = dropped()
    second = problems.unchanged(
        model, lambda: run(recipe(optimiser), data(source), noise=3, model=model, resume=first.state)
    )
    same(second, whole)
    again = run(recipe(optimiser), data(source), noise=4, resume=first.state)  # the state was not used up
    same(again, whole)


@pytest.mark.parametrize("source", DATA)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_resuming_after_a_crash(optimiser: str, source: str, tmp_path: Path) -> None:
    """With a falling learning rate, and an update after every other epoch from the second on."""
    settings = {"rate": 2e-2, "last_rate": 1e-3, "burn_in": 1, "frequency": 2}
    whole = run(recipe(optimiser, 6, **settings), data(source), noise=1)
    path = tmp_path / "run.state"
    with pytest.raises(CrashError):
        run(recipe(optimiser, 6, crash=1, **settings), data(source), noise=2, checkpoint=path)
    assert TrainingState.load(path).epoch == 3
    resumed = run(recipe(optimiser, 6, **settings), data(source), noise=3, resume=path, checkpoint=str(path))
    same(resumed, whole)
    assert TrainingState.load(path).epoch == 6
    assert list(tmp_path.iterdir()) == [path]
    same(run(recipe(optimiser, 6, **settings), data(source), noise=4, resume=str(path)), whole)  # nothing left to do


@pytest.mark.parametrize("best", [True, False])
def test_the_best_moment_may_lie_before_the_crash(best: bool, tmp_path: Path) -> None:
    """The learning rate is so large that the evidence jumps; which epoch is best depends on rounding."""
    settings = {"rate": 1.0, "last_rate": 1.0, "keep_best": best, "update": lw.tuners.Ascend(steps=5)}
    whole = run(recipe("sgd", 4, **settings), data("batches"))
    first = run(recipe("sgd", 2, **settings), data("batches"), checkpoint=tmp_path / "state")
    second = run(recipe("sgd", 4, **settings), data("batches"), resume=tmp_path / "state")
    same(second, whole)
    before = [epoch.log_evidence for epoch in whole.history[:2]]
    assert first.state.best["evidence"] == pytest.approx(max(before) if best else before[1])


def test_buffers_are_resumed_too() -> None:
    build = BY_NAME["norms"].build
    source = problems.split(*arrays("gaussian"), CUTS)
    whole = run(recipe("adam", 3), source, model=build())
    first = run(recipe("adam", 1), source, model=build())
    same(run(recipe("adam", 3), source, model=build(), resume=first.state), whole)


def test_a_state_is_its_file(tmp_path: Path) -> None:
    state = run(recipe("adam", 2), data("batches")).state
    state.save(tmp_path / "state")
    read = TrainingState.load(tmp_path / "state")
    assert read.history == state.history
    assert read.epoch == 2
    assert all(torch.equal(value, read.weights[name]) for name, value in state.weights.items())
    assert torch.equal(read.precision, state.precision)
    assert read.noise is not None
    assert torch.equal(read.noise, state.noise)  # type: ignore[arg-type]


def test_a_checkpoint_stays_whole_while_the_next_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    run(recipe("adam", 1), data("batches"), checkpoint=path)
    before = path.read_bytes()

    def crash(*_: Any) -> None:
        raise CrashError

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(CrashError):
        run(recipe("adam", 2), data("batches"), resume=path, checkpoint=path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_are_no_state(tmp_path: Path) -> None:
    path, good = tmp_path / "state", tmp_path / "good"
    run(recipe("adam", 1), data("batches"), checkpoint=good)
    whole = good.read_bytes()
    opened = tmp_path / "opened"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (opened,))

    torch.save({"weights": Trap()}, path)  # code in a file is not run
    foreign = {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"not a state at all",
        "pickle": path.read_bytes(),
    }
    for content in foreign.values():
        path.write_bytes(content)
        with pytest.raises(lw.errors.FileError, match=r"cannot be read: .* Expected a file with a Lapwing training"):
            run(recipe("adam", 2), data("batches"), resume=path)
    assert not opened.exists()


DAMAGE: dict[str, Any] = {
    "epoch -5": lambda file: file.root["settings"].update(epoch=-5),
    "more epochs than recorded": lambda file: file.root["settings"].update(epoch=2),
    "a setting too many": lambda file: file.root["settings"].update(extra=1),
    "no precision": lambda file: file.tensors.pop("precision"),
    "negative precision": lambda file: file.tensors["precision"].neg_(),
    "negative noise": lambda file: file.tensors["noise"].neg_(),
    "noise of the best epoch not finite": lambda file: file.tensors["best.noise"].fill_(torch.inf),
    "negative moment": lambda file: file.tensors["optimiser.0.exp_avg_sq"].neg_(),
    "weight not finite": lambda file: file.tensors["weights.0.weight"].fill_(torch.nan),
    "weight of the best epoch not finite": lambda file: file.tensors["best.weights.0.weight"].fill_(torch.nan),
    "weight in another dtype": lambda file: file.tensors.update({"weights.0.bias": torch.zeros(6)}),
    "moment of another shape": lambda file: file.tensors.update({"optimiser.0.exp_avg": torch.zeros(6, dtype=D)}),
    "loss not finite": lambda file: file.root["settings"]["history"][0].update(loss=float("inf")),
    "another optimiser": lambda file: file.root["parts"]["recipe"]["settings"].update(optimiser="momentum"),
    "prior of another kind": lambda file: file.root["parts"]["recipe"]["parts"]["prior"].update(name="Gaussian"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_checkpoint_with_impossible_values(damage: str, tmp_path: Path) -> None:
    """With the right checksum: the values themselves are checked."""
    path = tmp_path / "state"
    run(recipe("adam", 1), data("batches"), checkpoint=path)
    file = Contents.of(path.read_bytes())
    DAMAGE[damage](file)
    path.write_bytes(file.packed())
    with pytest.raises(lw.LapwingError, match="is damaged"):
        run(recipe("adam", 2), data("batches"), resume=path)


def test_a_checkpoint_without_a_place(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(recipe("adam", 2), data("batches"), resume=tmp_path / "nowhere")
    with pytest.raises(lw.errors.FileError, match="no folder for the checkpoint"):
        run(recipe("adam", 2), data("batches"), checkpoint=tmp_path / "nowhere" / "state")


def test_states_of_another_run() -> None:
    """Another network, optimiser, prior or likelihood: each is recognised, and the given model is not changed."""
    state = run(recipe("adam", 1), data("batches")).state
    model = dropped()

    def resumed(recipe: lw.recipes.Recipe, likelihood: str = "regression", net: nn.Module = model) -> None:
        kind = "gaussian" if likelihood == "regression" else "categorical"
        with pytest.raises(
            lw.errors.DataError, match="this training state belongs to another model or recipe"
        ) as error:
            problems.unchanged(net, lambda: lw.train(net, [arrays(kind)], likelihood, recipe=recipe, resume=state))
        seen.append(str(error.value))

    seen: list[str] = []
    resumed(recipe("adam"), net=mlp())
    resumed(recipe("adam"), net=nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 3)).to(D))
    resumed(recipe("adam"), net=nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(D))
    resumed(recipe("sgd"))
    resumed(recipe("lbfgs"))
    resumed(recipe("adam", prior=lw.isotropic()))
    resumed(recipe("adam", prior=lw.priors.diagonal(), method=lw.Diagonal()))
    resumed(recipe("adam"), "classification")
    resumed(recipe("adam", seed=3))
    resumed(recipe("adam", prior=lw.per_layer(2.0)))
    resumed(recipe("adam", prior=lw.per_layer(mean=0.5)))
    resumed(recipe("adam", method=lw.Diagonal()))
    words = ("other weights", "(6, 4)", "other weights", "not sgd", "not lbfgs", "not the present Isotropic",
             "its method is 'Kron'", "its likelihood is 'Gaussian'", "its seed is 0, not 3", "other precisions",
             "another mean", "not Diagonal")  # fmt: skip
    for message, word in zip(seen, words, strict=True):
        assert word in message


def test_more_epochs_and_other_rates_are_allowed() -> None:
    state = run(recipe("adam", 2), data("batches")).state
    assert run(recipe("adam", 3, rate=1e-4, last_rate=1e-4), data("batches"), resume=state).state.epoch == 3
    with pytest.raises(lw.errors.DataError, match="finished 2 epochs and the recipe has 1"):
        run(recipe("adam", 1), data("batches"), resume=state)
