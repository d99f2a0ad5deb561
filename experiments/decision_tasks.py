"""Data, networks and posteriors for the simulations of decisions: a pool of rows that neither has seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import lapwing as lw
from experiments.data import data_folder
from lapwing.demo.training import TrainingSettings, mlp, train_mlp
from lapwing.errors import DataError, LapwingError

Rows = tuple[Tensor, Tensor]  # inputs and targets
CLASSES = ("digits", "cancer", "mnist", "fashion_mnist")
NUMBERS = ("waves", "diabetes", "concrete", "energy", "kin8nm", "power", "wine", "protein")
THIN = 0.05  # share of the training rows that is kept in the thin part of a thin table
PART = 1 / 3  # share of the rows that the thin part has, along the first input


@dataclass(frozen=True, eq=False)
class Simulated:
    """A posterior and rows that were not used for it: draws from them are draws from a known distribution."""

    posterior: lw.Fitted
    x: Tensor
    y: Tensor


def rows_of(name: str, folder: Path | None, seed: int) -> Rows:
    """Return all rows of a data set, in an order that the seed decides.

    "waves" is generated, "digits", "cancer" and "diabetes" are those of scikit-learn, others are in the folder.
    """
    x, y = _images(name, folder) if name in CLASSES[2:] else _table(name, folder)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order], y[order]


def _table(name: str, folder: Path | None) -> Rows:
    if name == "waves":
        generator = torch.Generator().manual_seed(0)
        x = 4 * torch.rand(4000, 2, generator=generator, dtype=torch.float64) - 2
        noise = 0.05 + 0.4 * x[:, :1].abs()
        return x, torch.sin(2 * x[:, :1]) + noise * torch.randn(4000, 1, generator=generator, dtype=torch.float64)
    if name in ("digits", "cancer", "diabetes"):
        from sklearn import datasets

        load = {
            "digits": datasets.load_digits,
            "cancer": datasets.load_breast_cancer,
            "diabetes": datasets.load_diabetes,
        }
        x, y = load[name](return_X_y=True)
    else:
        path = data_folder(folder) / f"uci_{name}.npz"
        if not path.exists():
            raise DataError(f"{path.name} is not in the data folder; expected one of the uci_NAME.npz files.")
        with np.load(path, allow_pickle=False) as file:
            x, y = file["X"], file["y"]
    inputs = torch.as_tensor(np.asarray(x, dtype="float64"))
    if name in CLASSES:
        return inputs, torch.as_tensor(np.asarray(y)).long()
    return inputs, torch.as_tensor(np.asarray(y, dtype="float64")).reshape(-1, 1)


def _images(name: str, folder: Path | None) -> Rows:
    with np.load(data_folder(folder) / f"{name}.npz", allow_pickle=False) as file:
        x, y = file["x_test"], file["y_test"]
    return torch.from_numpy(x).flatten(1).double() / 255, torch.from_numpy(y).long()


def simulated(name: str, folder: Path | None, most: int, recipe: TrainingSettings, seed: int) -> Simulated:
    """Train a network on at most half of the rows, fit its posterior, and return it with other rows.

    A name may have a suffix: "kin8nm, thin" trains on few rows with a large first input, so that knowledge varies over
    the rows, and "kin8nm, noise" has a network with a noise for every input.

    Args:
        name: The data set.
        folder: Where tables are.
        most: The largest number of rows to train on; the pool has at most twice as many.
        recipe: Of the network and its training.
        seed: Of the order of the rows and of the training.
    """
    base, _, kind = name.partition(", ")
    x, y = rows_of(base, folder, seed)
    count = min(most, len(x) // 2)
    train, rest = slice(0, count), slice(count, count + 2 * most)
    chosen = torch.ones(count, dtype=torch.bool)
    if kind == "thin":
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed + 1))
        chosen = (x[train, 0] <= x[:, 0].quantile(1 - PART)) | (drawn < THIN)
    x = (x - x[train].mean(0)) / x[train].std(0).clamp_min(1e-6)
    if base in NUMBERS:
        y = (y - y[train].mean(0)) / y[train].std(0)
    own = x[train][chosen], y[train][chosen]
    if kind == "noise":
        posterior = _with_noise(*own, recipe, seed)
    elif kind in ("", "thin"):
        outputs = int(y.max()) + 1 if base in CLASSES else 1
        model = train_mlp(*own, outputs, recipe, seed)
        posterior = lw.fit(model, [own], "classification" if base in CLASSES else "regression")
    else:
        raise LapwingError(f"{name}: unknown kind {kind!r}; expected thin or noise.")
    return Simulated(posterior, x[rest], y[rest])


def _with_noise(x: Tensor, y: Tensor, recipe: TrainingSettings, seed: int) -> lw.Fitted:
    """Return the posterior of a network with a mean and a log-variance for every input."""
    model, likelihood = mlp(x.shape[1], 2, recipe, seed).to(x), lw.HeteroscedasticGaussian()
    steps = recipe.epochs * -(-len(x) // recipe.batch_size)
    minimise(model, steps, recipe, lambda f, rows: likelihood.loss(f, y[rows]).mean(), x, seed)
    return lw.fit(model, [(x, y)], likelihood)


def minimise(
    model: torch.nn.Module,
    steps: int,
    recipe: TrainingSettings,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    seed: int,
) -> None:
    """Train a model in place by Adam, with a learning rate that falls to zero; leave it in evaluation mode."""
    optimiser = torch.optim.Adam(model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(x), (min(len(x), recipe.batch_size),), generator=generator)
        optimiser.zero_grad()
        loss(model(x[rows]), rows).backward()
        optimiser.step()
        schedule.step()
    model.eval()
