"""Everything that can give a network error bars, for the comparison on shifted images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import lapwing as lw
from experiments.options import chosen
from experiments.vision.predictions import Predict, average_of, best_temperature, in_parts, probabilities_of, softmax_of
from experiments.vision.shift_task import Task
from lapwing.demo.training import Batches, batches
from lapwing.networks.forward import has_dropout

# Baselines that a version of the package may have: IVON needs another package, and says so.
FURTHER: dict[str, dict[str, Any]] = {"VariationalLastLayer": {}, "IVON": {"epochs": 5, "samples": 16}}
OF_SEVERAL = ("ensemble", "mixture of last layers")  # methods that need the other networks


@dataclass(frozen=True)
class Effort:
    """How much work the methods may do.

    ``data`` training images stand for all in posteriors of all weights, ``few`` in that by samples and in those of
    subnetworks, which are chosen by one batch. A network of more than ``large`` weights gets no Kronecker posterior and
    no SWAG: the predictions of the one and the training of the other take too long. ``methods`` names those that are
    run; if it is empty, all that make sense for the network are.
    """

    data: int = 10_000
    few: int = 2_000
    batch_size: int = 500
    large: int = 2_000_000
    sizes: tuple[int, ...] = (200, 1000, 5000)  # of subnetworks
    samples: int = 16
    snapshots: int = 20
    steps_between: int = 20
    precisions: tuple[float, ...] = tuple(10 ** (k / 2) for k in range(11))
    for_samples: tuple[float, ...] = (1e2, 1e3, 1e4, 1e5)
    methods: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Methods:
    """The methods for one task, fitted when they are asked for."""

    task: Task
    effort: Effort
    seed: int

    def by_name(self) -> dict[str, Callable[[], Predict]]:
        """Return a function for every method that makes sense for the network, and fits it."""
        task, model = self.task, self.task.model
        n_weights = sum(p.numel() for p in model.parameters())
        methods: dict[str, Callable[[], Predict]] = {
            "plain": lambda: softmax_of(model),
            "temperature": lambda: softmax_of(model, best_temperature(in_parts(model, task.tuning[0]), task.tuning[1])),
            "last layer": lambda: self._laplace(lw.Full(), lw.last_layer),
        }
        if len(task.models) > 1:
            methods["ensemble"] = lambda: average_of(task.models)
            methods["mixture of last layers"] = self._mixture
        if any(has_dropout(module) for module in model.modules()):
            methods["MC dropout"] = lambda: self._fitted(lw.baselines.MCDropout(self.effort.samples))
        methods["sampled posterior"] = self._sampled
        if n_weights <= self.effort.large:
            methods["Kron"] = lambda: self._laplace(lw.Kron(), lw.all_weights)
            methods["SWAG"] = self._swag
        for name, options in FURTHER.items():
            methods[name] = partial(self._further, name, options)
        for size in self.effort.sizes:
            if size < n_weights:
                methods[f"subnetwork of {size}"] = partial(self._subnetwork, size)
        return {name: methods[name] for name in chosen(self.effort.methods or None, tuple(methods), "methods")}

    @property
    def _validation(self) -> Batches:
        return batches(*self.task.tuning, 500)

    def _fitted(self, method: Any, **options: Any) -> Predict:
        """Fit to ``data`` training images."""
        data, temperature = self.task.some(self.effort.data, self.effort.batch_size)
        likelihood = lw.Categorical(temperature=temperature, link="probit")
        return probabilities_of(lw.fit(self.task.model, data, likelihood, method=method, progress=False, **options))

    def _laplace(self, method: Any, weights: Any, few: bool = False) -> Predict:
        """Fit a posterior, under the precision that predicts validation images best."""
        count = self.effort.few if few else self.effort.data
        data, temperature = self.task.some(count, self.effort.batch_size)
        likelihood = lw.Categorical(temperature=temperature, link="probit")
        posterior = lw.fit(self.task.model, data, likelihood, method=method, weights=weights, prior=1.0, progress=False)
        return probabilities_of(posterior.tuned(lw.tuners.Grid(self._validation, self.effort.precisions)))

    def _mixture(self) -> Predict:
        """Fit the last layer of every member, each calibrated on the validation images."""
        method = lw.baselines.MixtureOfLaplace(self.task.models[1:], lw.Full())
        return self._fitted(method, weights=lw.last_layer, validation=self._validation)

    def _further(self, name: str, options: dict[str, Any]) -> Predict:
        """Fit a baseline that learns its prior beforehand, or needs none."""
        return self._fitted(getattr(lw.baselines, name)(seed=self.seed, **options))

    def _sampled(self) -> Predict:
        """Draw from the posterior of all weights by solving linear systems."""
        data, temperature = self.task.some(self.effort.few, self.effort.batch_size)
        likelihood = lw.Categorical(temperature=temperature, link="probit")
        method = lw.Sampled(self.effort.samples, solver="cg", tolerance=0.1)
        posterior = lw.fit(
            self.task.model, data, likelihood, method=method, prior=self.effort.for_samples[-1], progress=False,
            generator=torch.Generator().manual_seed(self.seed),
        )  # fmt: skip
        return probabilities_of(posterior.tuned(lw.tuners.Grid(self._validation, self.effort.for_samples)))

    def _swag(self) -> Predict:
        effort = self.effort
        rank = min(10, effort.snapshots)
        method = lw.baselines.SWAG(
            effort.snapshots, rank, steps_between=effort.steps_between, samples=effort.samples, seed=self.seed,
        )  # fmt: skip
        return self._fitted(method)

    def _subnetwork(self, size: int) -> Predict:
        """Fit the exact posterior of the weights that the outputs depend on most, at one batch of images."""
        data, _ = self.task.some(self.effort.batch_size, self.effort.batch_size)
        subnetwork = lw.subnetworks.by_gradient(self.task.model, data, "classification", size, progress=False)
        return self._laplace(lw.Full(), subnetwork, few=True)
