"""The estimators of ``lapwing.sklearn`` beside scikit-learn's own networks: ``python -m benchmarks.estimators``.

Four random splits of each table, a quarter of the rows for the test. The defaults of the estimators were chosen on the
first five tables; the others were not looked at before. scikit-learn's networks have scaled inputs and targets and
``max_iter=2000``, and otherwise their defaults. Needs ``lapwing[sklearn]``; some minutes on one core.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.spine import cpu_name
from lapwing.sklearn import LapwingClassifier, LapwingRegressor

SPLITS = 4
made: dict[str, Any] = {"random_state": 0}
CLASSES: dict[str, Callable[[], Any]] = {
    "breast cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "iris": lambda: datasets.load_iris(return_X_y=True),
    "moons": lambda: datasets.make_moons(400, noise=0.3, **made),
    "four classes": lambda: datasets.make_classification(600, 20, n_informative=6, n_classes=4, flip_y=0.1, **made),
}
NUMBERS: dict[str, Callable[[], Any]] = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman1": lambda: datasets.make_friedman1(1500, noise=1.0, **made),
    "friedman2": lambda: datasets.make_friedman2(500, noise=60.0, **made),
    "friedman3": lambda: datasets.make_friedman3(500, noise=0.2, **made),
}
CHOSEN = ("breast cancer", "wine", "digits", "diabetes", "friedman1")


def mean_and_error(values: list[float]) -> str:
    """Return the mean over splits and its standard error, as text."""
    return f"{np.mean(values):8.3f} +- {np.std(values, ddof=1) / len(values) ** 0.5:.3f}"


def classes(table: Any) -> tuple[str, str, str]:
    """Return the NLL of both classifiers."""
    ours, theirs = [], []
    for seed in range(SPLITS):
        x, new_x, y, new_y = train_test_split(*table, test_size=0.25, random_state=seed)
        network = make_pipeline(StandardScaler(), MLPClassifier(max_iter=2000, random_state=seed))
        ours.append(log_loss(new_y, LapwingClassifier(random_state=seed).fit(x, y).predict_proba(new_x)))
        theirs.append(log_loss(new_y, network.fit(x, y).predict_proba(new_x)))
    return mean_and_error(ours), mean_and_error(theirs), ""


def numbers(table: Any) -> tuple[str, str, str]:
    """Return the RMSE of both regressors, and the coverage of 95 % intervals of ours."""
    ours, theirs, covered = [], [], []
    for seed in range(SPLITS):
        x, new_x, y, new_y = train_test_split(*table, test_size=0.25, random_state=seed)
        mean, std = LapwingRegressor(random_state=seed).fit(x, y).predict(new_x, return_std=True)
        scaled = TransformedTargetRegressor(
            MLPRegressor(max_iter=2000, random_state=seed), transformer=StandardScaler()
        )
        network = make_pipeline(StandardScaler(), scaled)
        ours.append(np.sqrt(np.mean((mean - new_y) ** 2)))
        theirs.append(np.sqrt(np.mean((network.fit(x, y).predict(new_x) - new_y) ** 2)))
        covered.append(np.mean(np.abs(mean - new_y) < 1.96 * std))
    return mean_and_error(ours), mean_and_error(theirs), f"{np.mean(covered):.3f}"


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)
    print(f"{cpu_name()}, one thread, Python {platform.python_version()}, torch {torch.__version__}, ", end="")
    print(f"scikit-learn {sklearn.__version__}; python -m benchmarks.estimators")
    for title, tables, score in (("NLL", CLASSES, classes), ("RMSE", NUMBERS, numbers)):
        print(f"\n{title:24s} {'Lapwing':>18s} {'MLP':>18s}   coverage of 95 %")
        for name, load in tables.items():
            ours, theirs, covered = score(load())
            print(
                f"{name + ('' if name in CHOSEN else ' (new)'):24s} {ours:>18s} {theirs:>18s}   {covered}", flush=True
            )


if __name__ == "__main__":
    main()
