"""Which score finds strange inputs? Networks for some classes or a table, and inputs that are unlike their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from sklearn import datasets
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing.decisions.guarantees import BASE, EXTENDED, SCALED, SCORES
from lapwing.demo.tasks import shuffle_pixels
from lapwing.demo.training import TrainingSettings, batches, optimise, train_mlp
from lapwing.errors import LapwingError

FAR = 10.0  # standard deviations of inputs far from all data
RATE = 0.05  # of false alarms at which found inputs are counted
MLP = TrainingSettings(hidden=(64, 64), activation="relu", epochs=60, learning_rate=1e-3, weight_decay=1e-4)
TABLE = TrainingSettings(hidden=(50,), epochs=60)
LEFT_OUT = {"digits": 3, "wine": 1, "points": 1}  # the last classes, on which no network is trained


@dataclass(frozen=True, eq=False)
class Detection:
    """A trained network, rows of its distribution by purpose, and strange inputs by kind."""

    model: nn.Module
    parts: dict[str, tuple[Tensor, Tensor]]  # train, validation, calibration, test
    strange: dict[str, Tensor]


def prepared(name: str, seed: int) -> Detection:
    """Return a task: digits, cancer, wine, points, moons, waves, diabetes; then ", CNN", ", BatchNorm" or ", ReLU"."""
    base, _, kind = name.partition(", ")
    x, y = _rows(base, seed)
    known = torch.ones(len(x), dtype=torch.bool) if y.is_floating_point() else y <= int(y.max()) - LEFT_OUT.get(base, 0)
    others, x, y = x[~known], x[known], y[known]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    ends = [int(share * len(x)) for share in (0.4, 0.55, 0.75)]
    names = ("train", "validation", "calibration", "test")
    rows = dict(zip(names, order.tensor_split(ends), strict=True))
    centre, spread = x[rows["train"]].mean(0), x[rows["train"]].std(0).clamp_min(1e-3)
    if base == "digits":  # pixels keep one scale, so that they can be exchanged
        centre, spread = torch.zeros(1), torch.ones(1)
    standard = lambda rows: (rows - centre) / spread
    x = standard(x)
    if y.is_floating_point():
        y = (y - y[rows["train"]].mean(0)) / y[rows["train"]].std(0)
    outputs = 1 if y.is_floating_point() else int(y.max()) + 1
    parts = {part: (x[chosen], y[chosen]) for part, chosen in rows.items()}
    test, generator = parts["test"][0], torch.Generator().manual_seed(seed)
    strange = {"far": FAR * torch.randn(test.shape, generator=generator)}
    if base == "digits":
        strange |= {
            "shuffled": shuffle_pixels(test, seed),
            "noise": test + 0.5 * torch.randn(test.shape, generator=generator),
        }
    else:  # every column by itself: each number is usual, and they do not fit together
        strange["shuffled"] = shuffle_pixels(test.T, seed).T
    if len(others):
        strange["other classes"] = standard(others)
    return Detection(_network(kind, base, parts["train"], outputs, seed), parts, strange)


def _network(kind: str, base: str, train: tuple[Tensor, Tensor], outputs: int, seed: int) -> nn.Module:
    recipe = MLP if base == "digits" else TABLE
    if kind == "CNN":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(
                nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, outputs),
            )  # fmt: skip
        optimise(model, *train, replace(recipe, learning_rate=5e-3), seed)
        return model
    if kind not in ("", "BatchNorm", "ReLU"):
        raise LapwingError(f"{base}, {kind}: unknown kind {kind!r}; expected CNN, BatchNorm or ReLU.")
    recipe = replace(recipe, activation="relu") if kind == "ReLU" else recipe
    return train_mlp(*train, outputs, replace(recipe, batch_norm=kind == "BatchNorm"), seed)


def _rows(base: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return all rows of a data set of scikit-learn, or of points around centres, on moons or on waves."""
    generator = torch.Generator().manual_seed(seed)
    if base == "points":
        y = torch.randint(5, (1500,), generator=generator)
        centres = torch.randn(5, 10, generator=generator)
        return centres[y] + 0.8 * torch.randn(1500, 10, generator=generator), y
    if base == "moons":
        x, y = datasets.make_moons(1500, noise=0.25, random_state=seed)
        return torch.as_tensor(x).float(), torch.as_tensor(y).long()
    if base == "waves":
        x = 4 * torch.rand(1500, 2, generator=generator) - 2
        return x, torch.sin(2 * x[:, :1]) + 0.3 * torch.randn(1500, 1, generator=generator)
    load = {
        "digits": datasets.load_digits, "cancer": datasets.load_breast_cancer, "wine": datasets.load_wine,
        "diabetes": datasets.load_diabetes,
    }  # fmt: skip
    if base not in load:
        raise LapwingError(
            f"{base}: unknown data set; expected one of {', '.join((*load, 'points', 'moons', 'waves'))}."
        )
    inputs, targets = load[base](return_X_y=True)
    x, y = torch.as_tensor(inputs).float(), torch.as_tensor(targets)
    return (x / 16 if base == "digits" else x), (y.float().unsqueeze(1) if base == "diabetes" else y.long())


def posteriors(task: Detection) -> Iterator[tuple[str, lw.Fitted]]:
    """Yield the posteriors whose scores are compared, by name."""
    real = task.parts["train"][1].is_floating_point()
    data, likelihood = batches(*task.parts["train"], 128), "regression" if real else "classification"
    fit: Callable[..., lw.Fitted] = lambda **more: lw.fit(task.model, data, likelihood, progress=False, **more)
    yield "default", fit()
    yield "validation", fit(validation=task.parts["validation"])
    yield "last layer", fit(weights=lw.last_layer)


def detected(task: Detection, posterior: lw.Fitted) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield the kind of strange inputs, the score, its AUROC, the share of these that it finds, and of false alarms."""
    for by in (EXTENDED, SCALED, BASE, *SCORES):
        detector = posterior.ood(task.parts["calibration"][0], by=by, rate=RATE, progress=False)
        inside = detector.score(task.parts["test"][0])
        alarms = float((inside > detector.threshold).double().mean())
        for kind, x in task.strange.items():
            outside = detector.score(x)
            found = float((outside > detector.threshold).double().mean())
            yield kind, by, {"AUROC": metrics.auroc(inside, outside), "found": found, "false alarms": alarms}
