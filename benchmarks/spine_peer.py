"""The same figures for laplace-torch 0.3: python benchmarks/spine_peer.py NAME, in an environment that has it.

For each case the backend that ran faster in a trial is used: BackPACK for fits over all weights, the default
(curvlinops) for last layers. What it cannot do is reported as a note.
"""

from __future__ import annotations

import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import clock, models


def measured(model: Any, data: Any, structure: str, subset: str, unit: str, inputs: int) -> dict[str, Any]:
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    plain_epoch, plain_forward = clock.epoch(model, data), clock.forward(model, data)
    loader = Batches(data)

    def fit() -> Any:
        options = {"backend": BackPackGGN} if subset == "all" else {}
        posterior = Laplace(model, "classification", subset_of_weights=subset, hessian_structure=structure, **options)
        posterior.fit(loader)
        return posterior

    with clock.Peak() as fit_peak:
        posterior = fit()
    fit_time = clock.best_of(1, fit)
    x = data[0][0][:inputs]
    with clock.Peak() as variance_peak:
        posterior._glm_predictive_distribution(x)
    variance_time = clock.best_of(1, lambda: posterior._glm_predictive_distribution(x))
    plain_predict = clock.forward(model, [(x, x)])
    base = plain_epoch if unit == "epoch" else plain_forward
    return {
        f"fit / {unit}": fit_time / base,
        "variance / forward": variance_time / plain_predict,
        "fit MB": fit_peak.mb,
        "variance MB": variance_peak.mb,
    }


def run(name: str) -> tuple[dict[str, Any], str]:
    if name.startswith("mlp") and name != "mlp_tuning":
        data = models.images(10_000, (784,), 128)
        model = models.briefly_trained(models.mlp(), data, 40)
        structure = {"kron": "kron", "diagonal": "diag", "full": "full"}[name.rsplit("_", 1)[1]]
        last = "_last_" in name
        figures = measured(model, data, structure, "last_layer" if last else "all", "forward" if last else "epoch", 128)
        return figures, ""
    if name.startswith("lenet"):
        data = models.images(5_000, (1, 28, 28), 128)
        model = models.briefly_trained(models.lenet(), data, 20)
        structure = {"kron": "kron", "diagonal": "diag"}[name.rsplit("_", 1)[1]]
        return measured(model, data, structure, "all", "epoch", 64), "variance of 64 inputs"
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
        "wide_head": "not run: asks for 32.8 GB",
        "resnet18_kron": "refuses BatchNorm",
        "resnet18_diagonal": "not run: out of memory at this batch size",
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
