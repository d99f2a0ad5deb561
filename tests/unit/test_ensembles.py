"""Plain training and ensembles of networks: the steps by hand, seeds, and runs that are interrupted and go on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.training import TrainingState
from tests import problems
from tests.tolerances import SOLVED, assert_close

D = torch.float64
TOTAL, INPUTS, CLASSES = 14, 4, 3
X = torch.randn(TOTAL, INPUTS, dtype=D, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, CLASSES, (TOTAL,), generator=torch.Generator().manual_seed(2))
Y = torch.randn(TOTAL, CLASSES, dtype=D, generator=torch.Generator().manual_seed(3))


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, CLASSES)).double()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, LABELS), batch_size=5, shuffle=True)


def recipe(**changes: Any) -> Any:
    return lw.recipes.fixed(**{"epochs": 4, "precision": 2.0, "rate": 0.05, **changes})


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


class Interrupted:
    """Data that stop the program at the pass of this number."""

    def __init__(self, passes: int) -> None:
        self.left = passes

    def __iter__(self) -> Iterator[Any]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return iter(loader())


# Plain training


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_plain_training_takes_the_steps_of_the_penalised_loss(likelihood: str) -> None:
    y = LABELS if likelihood == "classification" else Y
    trained = lw.train(net(), [(X, y)], likelihood, recipe=recipe(epochs=5, last_rate=0.05))
    model = net()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(5):
        optimiser.zero_grad()
        f = model(X)
        loss = nn.functional.cross_entropy(f, y) if y is LABELS else 0.5 * (f - Y).square().sum(1).mean()
        penalty = sum(p.square().sum() for p in model.parameters())
        (loss + 0.5 * 2.0 * penalty / TOTAL).backward()
        optimiser.step()
    assert_close(weights(trained.model), weights(model), SOLVED)
    assert not trained.model.training
    assert trained.posterior.method == "MapOnly"
    assert all(epoch.log_evidence is None for epoch in trained.history)
    assert_close(trained.posterior.functions(X).mean, model(X).detach(), SOLVED)


def test_dropout_acts_in_training_and_seeds_fix_it() -> None:
    one, again, other = (lw.train(net(0.5), loader(), "classification", recipe=recipe(seed=s)).model for s in (3, 3, 4))
    without = lw.train(net(), loader(), "classification", recipe=recipe(seed=3)).model
    assert torch.equal(weights(one), weights(again))
    assert not torch.equal(weights(one), weights(other))
    assert not torch.equal(weights(one), weights(without))


def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole = lw.train(net(0.5), loader(), "classification", recipe=recipe())
    path = tmp_path / "run.lapwing"
    with pytest.raises(KeyboardInterrupt):
        lw.train(net(0.5), Interrupted(4), "classification", recipe=recipe(), checkpoint=path)
    rest = lw.train(net(0.5), loader(), "classification", recipe=recipe(), resume=path)
    assert 0 < TrainingState.load(path).epoch < 4
    assert_close(weights(rest.model), weights(whole.model))
    assert rest.history == whole.history


# Ensembles


def test_members_are_networks_trained_from_their_seeds() -> None:
    model = net()
    members = problems.unchanged(
        model, lambda: lw.train_ensemble(model, loader(), "classification", members=3, recipe=recipe(seed=7))
    )
    for number, member in enumerate(members):
        start = copy.deepcopy(model)
        torch.manual_seed(7 + number)
        for module in (start[0], start[3]):
            module.reset_parameters()
        alone = lw.train(start, loader(), "classification", recipe=recipe(seed=7 + number)).model
        assert_close(weights(member), weights(alone))
    assert len({tuple(weights(member).tolist()) for member in members}) == 3
    first, *others = members
    mixture = lw.fit(
        first, loader(), "classification", prior=2.0, method=lw.baselines.MixtureOfLaplace(others, lw.Diagonal())
    )
    assert mixture.predict(X).probs.shape == (TOTAL, CLASSES)


def test_an_interrupted_ensemble_goes_on_to_the_same_end(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"members": 3, "recipe": recipe()}
    whole = lw.train_ensemble(net(0.3), loader(), "classification", **settings)
    with pytest.raises(KeyboardInterrupt):
        lw.train_ensemble(net(0.3), Interrupted(13), "classification", folder=tmp_path, **settings)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["ensemble.json", "member0.lapwing", "member1.lapwing"]  # the second is not finished
    rest = lw.train_ensemble(net(0.3), loader(), "classification", folder=tmp_path, **settings)
    for one, other in zip(rest, whole, strict=True):
        assert_close(weights(one), weights(other))
    again = lw.train_ensemble(net(0.3), loader(), "classification", folder=tmp_path, **settings)
    assert torch.equal(weights(again[2]), weights(rest[2]))


def test_what_is_refused(tmp_path: Path) -> None:
    run = lambda **settings: lw.train_ensemble(net(), loader(), "classification", **settings)
    with pytest.raises(lw.errors.UnsupportedError, match="members is 0; expected an integer of at least 1"):
        run(members=0)
    with pytest.raises(lw.errors.UnsupportedError, match="recipe is 3; expected fixed"):
        run(recipe=3)
    with pytest.raises(lw.errors.UnsupportedError, match="folder is 3; expected the path"):
        run(folder=3)
    with pytest.raises(lw.errors.FileError, match="runs does not exist; create it first"):
        run(folder=tmp_path / "none" / "runs", recipe=recipe())
    assert not (tmp_path / "none").exists()
    with pytest.raises(lw.LapwingError, match=r"precision is -1\.0"):
        lw.recipes.fixed(precision=-1.0)
    run(folder=tmp_path, members=1, recipe=recipe(epochs=1))
    for changed in ({"seed": 5}, {"epochs": 2}, {"rate": 0.1}):
        with pytest.raises(lw.errors.DataError, match=r"networks with the recipe .* is .* now; expected the same"):
            run(folder=tmp_path, members=1, recipe=recipe(**{"epochs": 1, **changed}))
    weighted = lw.Categorical(class_weights=torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(lw.errors.DataError, match="networks with the likelihood Categorical"):
        lw.train_ensemble(net(), loader(), weighted, folder=tmp_path, members=1, recipe=recipe(epochs=1))
    for data, difference in (
        ([(X[:-1], LABELS[:-1])], "14 data, and there are 13 now"), ([(X, LABELS.flip(0))], "other inputs"),
        ([(X, (LABELS + 1) % CLASSES)], "other targets"), ([(2 * X, LABELS)], "other inputs"),
    ):  # fmt: skip
        with pytest.raises(lw.errors.DataError, match=f"networks for {difference}; expected the same"):
            lw.train_ensemble(net(), data, "classification", folder=tmp_path, members=1, recipe=recipe(epochs=1))
    (tmp_path / "ensemble.json").write_text("[]")
    with pytest.raises(lw.errors.FileError, match="damaged"):
        run(folder=tmp_path, members=1, recipe=recipe(epochs=1))


def test_data_in_another_order_and_augmented_data_go_on(tmp_path: Path) -> None:
    """Inputs that every reading changes cannot be compared, their targets can."""

    class Augmented:
        def __iter__(self) -> Iterator[Any]:
            return iter([(X + 0.1 * torch.randn(X.shape, dtype=D), LABELS)])

    settings: dict[str, Any] = {"members": 1, "recipe": recipe(epochs=1)}
    run = lambda name, data: lw.train_ensemble(net(), data, "classification", folder=tmp_path / name, **settings)
    for name, first, again in (
        ("ordered", loader(), [(X.flip(0), LABELS.flip(0))]), ("augmented", Augmented(), [(3 * X, LABELS)]),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (member,) = run(name, first)
        assert torch.equal(weights(run(name, again)[0]), weights(member))  # which is finished
    with pytest.raises(lw.errors.DataError, match="networks for other targets"):
        run("augmented", [(X, (LABELS + 1) % CLASSES)])


def test_frozen_weights_are_kept_in_every_member() -> None:
    """Also running statistics of a frozen layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    model(X)  # gives the statistics other values than at the start
    model[0].weight.requires_grad_(False)
    model[1].requires_grad_(False)
    one, two = lw.train_ensemble(model.eval(), loader(), "classification", members=2, recipe=recipe(epochs=1))
    for member in (one, two):
        assert torch.equal(member[0].weight, model[0].weight)
        assert torch.equal(member[1].weight, model[1].weight)
        assert not torch.equal(member[3].weight, model[3].weight)
    assert not torch.equal(one[0].bias, two[0].bias)


def test_a_module_that_cannot_be_drawn_again() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(CLASSES, dtype=D))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x

    model = nn.Sequential(nn.Linear(INPUTS, CLASSES, dtype=D), Scaled())
    with pytest.raises(lw.errors.UnsupportedError, match=r"1: no reset_parameters\(\).*lw\.train"):
        lw.train_ensemble(model, loader(), "classification", members=2, recipe=recipe(epochs=1))


def test_a_loss_that_is_not_finite() -> None:
    with pytest.raises(lw.errors.NumericalError, match="in epoch 0; expected a finite number"):
        lw.train_ensemble(net(), [(X, 1e200 * Y)], "regression", members=2, recipe=recipe())
