"""The same figures for laplace-torch 0.3: python benchmarks/spine_peer.py NAME, in an environment that has it.

Every backend of laplace-torch that can do a case runs it (BackPACK, curvlinops and, where it is installed, ASDL), each
in turn, and each figure is that of the fastest one. What it cannot do is a note
(the last layer to 1,000 classes and the ResNet-18 are not run).
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import clock, models

ROUNDS = 5


def backends() -> dict[str, Any]:
    """Return the backends for the generalised Gauss-Newton matrix that are installed, by name."""
    from laplace import curvature

    names = {"BackPACK": "BackPackGGN", "curvlinops": "CurvlinopsGGN", "ASDL": "AsdlGGN"}
    return {name: getattr(curvature, each) for name, each in names.items() if hasattr(curvature, each)}


def measured(model: Any, data: Any, structure: str, subset: str, unit: str, inputs: int) -> tuple[dict[str, Any], str]:
    """Return the figures of the fastest backend, and a note that names it and those that failed."""
    figures: dict[str, dict[str, float]] = {}
    failed = []
    for name, backend in backends().items():
        try:
            figures[name] = measured_by(backend, model, data, structure, subset, unit, inputs)
        except Exception as error:  # a backend that cannot do this case, for whatever reason
            failed.append(f"{name}: {type(error).__name__}")
    if not figures:
        return {}, "; ".join(failed)
    fastest = {figure: min(figures, key=lambda name: figures[name][figure]) for figure in next(iter(figures.values()))}
    shown = (f"fit / {unit}", "variance / forward")
    notes = [f"{figure} by {fastest[figure]}" for figure in shown] + [f"{each} failed" for each in failed]
    every = [f"{name} {value[shown[0]]:.3g} and {value[shown[1]]:.3g}" for name, value in figures.items()]
    return {figure: figures[name][figure] for figure, name in fastest.items()}, "; ".join([*notes, *every])


def measured_by(
    backend: Any, model: Any, data: Any, structure: str, subset: str, unit: str, inputs: int
) -> dict[str, float]:
    """Return the figures of one backend."""
    from laplace import Laplace

    loader = Batches(data)

    def fit() -> Any:
        posterior = Laplace(
            model, "classification", subset_of_weights=subset, hessian_structure=structure, backend=backend
        )
        posterior.fit(loader)
        return posterior

    with clock.Peak() as fit_peak:
        posterior = fit()
    x = data[0][0][:inputs]
    with clock.Peak() as variance_peak:
        posterior._glm_predictive_distribution(x)
    # In turns with the plain passes, as in spine_case.py, until the slow ones have taken half a minute.
    calls = {
        "epoch": lambda: clock.epoch(model, data),
        "forward": lambda: clock.forward(model, data),
        "fit": lambda: clock.best_of(1, fit),
        "predict": lambda: clock.forward(model, [(x, x)]),
        "variance": lambda: clock.best_of(1, lambda: posterior._glm_predictive_distribution(x)),
    }
    times: dict[str, list[float]] = {key: [] for key in calls}
    start = time.perf_counter()
    while len(times["fit"]) < ROUNDS and (not times["fit"] or time.perf_counter() - start < 30):
        for key, call in calls.items():
            times[key].append(call())
    best = {key: min(seconds) for key, seconds in times.items()}
    return {
        f"fit / {unit}": best["fit"] / best["epoch" if unit == "epoch" else "forward"],
        "variance / forward": best["variance"] / best["predict"],
        "fit MB": fit_peak.mb,
        "variance MB": variance_peak.mb,
    }


def run(name: str) -> tuple[dict[str, Any], str]:
    if name.startswith("mlp") and name != "mlp_tuning":
        data = models.images(10_000, (784,), 128)
        model = models.briefly_trained(models.mlp(), data, 40)
        structure = {"kron": "kron", "diagonal": "diag", "full": "full"}[name.rsplit("_", 1)[1]]
        last = "_last_" in name
        return measured(model, data, structure, "last_layer" if last else "all", "forward" if last else "epoch", 128)
    if name.startswith("lenet"):
        data = models.images(5_000, (1, 28, 28), 128)
        model = models.briefly_trained(models.lenet(), data, 20)
        structure = {"kron": "kron", "diagonal": "diag"}[name.rsplit("_", 1)[1]]
        figures, note = measured(model, data, structure, "all", "epoch", 64)
        return figures, f"variance of 64 inputs; {note}"
    if name == "mlp_tuning":
        from laplace import Laplace
        from laplace.curvature import BackPackGGN

        data = models.images(10_000, (784,), 128)
        model = models.briefly_trained(models.mlp(), data, 40)
        plain = clock.epoch(model, data)
        posterior = Laplace(model, "classification", "all", "kron", backend=BackPackGGN)
        posterior.fit(Batches(data))
        seconds = clock.best_of(1, lambda: posterior.optimize_prior_precision(method="marglik", n_steps=100))
        return {"tuning / epoch": seconds / plain}, "100 steps of Adam"
    return {}, {
        "wide_head": "asks for 32.8 GB",
        "resnet18_kron": "refuses BatchNorm",
        "resnet18_diagonal": "out of memory",
    }[name]


class Batches:
    """Batches in memory that look like a DataLoader, so that no time goes into collating."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.dataset = torch.cat([y for _, y in data])

    def __iter__(self) -> Any:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures, note = run(sys.argv[1])
    versions = {name: version(name) for name in ("laplace-torch", "torch")}
    print(json.dumps({"case": sys.argv[1], "figures": figures, "note": note, "versions": versions}))
