"""One case of the spine benchmark, in a process of its own: python -m benchmarks.spine_case NAME."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import lapwing as lw
from benchmarks import clock, models
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.tuners.base import MaximiseEvidence, start_near_optimum

Figures = dict[str, Any]
ROUNDS = 5


def _cost(model: Any, data: Any, method: Any, weights: Any, unit: str, inputs: int = 1024) -> Figures:
    """Measure a fit with a given prior, factorisation included, and the exact (C, C) covariances of f."""

    def fit() -> lw.Fitted:
        posterior = lw.fit(model, data, lw.Categorical(), method=method, weights=weights, prior=1.0, progress=False)
        assert isinstance(posterior.posterior, WeightPosterior)
        assert posterior.posterior.precision is not None  # the factorisation belongs to the fit
        return posterior

    with clock.Peak() as fit_peak:
        posterior = fit()
    batches = data[: max(1, inputs // len(data[0][0]))]
    sink: list[Any] = []

    def variance() -> None:
        for x, _ in batches:
            sink.append(posterior.functions(x).cov)
        sink.clear()

    with clock.Peak() as variance_peak:
        variance()
    # In turns, so that a busy moment of the machine does not fall on one of them alone.
    times: dict[str, list[float]] = {key: [] for key in ("epoch", "forward", "fit", "predict", "variance")}
    for _ in range(ROUNDS):
        times["epoch"].append(clock.epoch(model, data))
        times["forward"].append(clock.forward(model, data))
        times["fit"].append(clock.best_of(1, fit))
        times["predict"].append(clock.forward(model, batches))
        times["variance"].append(clock.best_of(2, variance))
    plain_epoch, plain_forward, fit_time, plain_predict, variance_time = (min(seconds) for seconds in times.values())
    base = plain_epoch if unit == "epoch" else plain_forward
    return {
        f"fit / {unit}": fit_time / base,
        "variance / forward": variance_time / plain_predict,
        "fit MB": fit_peak.mb,
        "variance MB": variance_peak.mb,
        "epoch s": plain_epoch,
        "forward s": plain_forward,
        "fit s": fit_time,
    }


def _mlp(method: Any, weights: Any = None, unit: str = "epoch") -> Figures:
    data = models.images(10_000, (784,), 128)
    return _cost(models.briefly_trained(models.mlp(), data, 40), data, method, weights, unit)


def _lenet(method: Any, weights: Any = None, unit: str = "epoch") -> Figures:
    data = models.images(5_000, (1, 28, 28), 128)
    return _cost(models.briefly_trained(models.lenet(), data, 20), data, method, weights, unit)


def _transformer(weights: Any = None, unit: str = "epoch") -> Figures:
    data = models.texts(512, 64, 32)
    model = models.briefly_trained(models.Transformer(), data, 4)
    return _cost(model, data, lw.Kron(), weights, unit, inputs=32)


def _wide_head() -> Figures:
    data = models.images(1_024, (64,), 128, classes=1000)
    model = models.briefly_trained(models.wide_head(), data, 8)
    posterior = lw.fit(
        model, data, lw.Categorical(), method=lw.Kron(), weights=lw.last_layer, prior=1.0, progress=False
    )
    x = data[0][0]
    with clock.Peak() as diagonal:
        _ = posterior.functions(x).variance
    with clock.Peak() as whole:
        answer = posterior.functions(x).cov
    size = answer.numel() * answer.element_size() / 2**20
    return {"variance MB": diagonal.mb, "covariance MB beyond the answer": whole.mb - size, "answer MB": size}


def _resnet18(method: Any) -> Figures:
    data = models.images(64, (3, 32, 32), 32)
    model = models.briefly_trained(models.resnet18(), data, 1)
    plain = clock.epoch(model, data)
    start = time.perf_counter()
    with clock.Peak() as fit_peak:
        posterior = lw.fit(model, data, lw.Categorical(), method=method, prior=1.0, progress=False)
    seconds = time.perf_counter() - start
    with clock.Peak() as variance_peak:
        variance = clock.best_of(1, lambda: posterior.functions(data[0][0]).cov)
    return {
        "fit MB": fit_peak.mb,
        "variance MB": variance_peak.mb,
        "fit / epoch": seconds / plain,
        "variance s, 32 inputs, factorisation included": variance,
    }


def _tuning() -> Figures:
    data = models.images(10_000, (784,), 128)
    model = models.briefly_trained(models.mlp(), data, 40)
    plain = clock.epoch(model, data)
    fitted = lw.fit(model, data, lw.Categorical(), prior=1.0, progress=False).posterior
    assert isinstance(fitted, WeightPosterior)
    assert fitted.precision is not None  # the eigendecompositions belong to the fit

    def tune() -> WeightPosterior:
        return MaximiseEvidence()(start_near_optimum(fitted))

    seconds = clock.best_of(3, tune)
    tuned = tune()
    log_precision = tuned.problem.prior.values.detach().double().log().requires_grad_()
    prior = tuned.problem.prior.with_precision(log_precision.exp())
    evidence = tuned.with_problem(tuned.problem.with_prior(prior)).log_evidence()
    (slope,) = torch.autograd.grad(evidence, log_precision)
    return {
        "tuning / epoch": seconds / plain,
        "slope over P": abs(float(slope)) / fitted.theta.numel(),
        "precision": float(tuned.problem.prior.values),
    }


RUN: dict[str, Callable[[], Figures]] = {
    "mlp_kron": lambda: _mlp(lw.Kron()),
    "mlp_diagonal": lambda: _mlp(lw.Diagonal()),
    "lenet_kron": lambda: _lenet(lw.Kron()),
    "lenet_diagonal": lambda: _lenet(lw.Diagonal()),
    "mlp_last_kron": lambda: _mlp(lw.Kron(), lw.last_layer, "forward"),
    "mlp_last_full": lambda: _mlp(lw.Full(), lw.last_layer, "forward"),
    "lenet_last_kron": lambda: _lenet(lw.Kron(), lw.last_layer, "forward"),
    "transformer_last_kron": lambda: _transformer(lw.last_layer, "forward"),
    "transformer_kron": _transformer,
    "wide_head": _wide_head,
    "resnet18_kron": lambda: _resnet18(lw.Kron()),
    "resnet18_diagonal": lambda: _resnet18(lw.Diagonal()),
    "mlp_tuning": _tuning,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = RUN[sys.argv[1]]()
    versions = {"torch": torch.__version__, "lapwing": lw.__version__, "python": platform.python_version()}
    print(json.dumps({"case": sys.argv[1], "figures": figures, "versions": versions}))
