"""The fit of the mode "pretrained": which functions are pushed once, before any prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data, Inputs, SampleRows, check_finite, map_tensors
from lapwing.core.pool import Pool
from lapwing.core.random import normal
from lapwing.curvature.sweep import Sweep
from lapwing.errors import DataError, LapwingError
from lapwing.methods.hfl.objective import Objective
from lapwing.methods.hfl.pushes import Push
from lapwing.problem import Problem

EVALUATED = 256  # training inputs that are averaged in every step of Adam, if no evaluation inputs are given


def evaluation_batches(given: Any, problem: Problem, data: Data, few: bool) -> list[Inputs]:
    """Return the batches of inputs to average over: those given, else the training inputs (``few``: some of them)."""
    if given is None and few:
        return [Pool.drawn(data, EVALUATED, torch.Generator().manual_seed(0)).inputs]
    if given is None:
        return [batch.inputs for batch in data.batches("evaluation")]
    one = isinstance(given, Tensor | Mapping | tuple) or not isinstance(given, Iterable)
    return [map_tensors(part, lambda t: t.to(problem.network.device)) for part in ([given] if one else list(given))]


def check_evaluation(objective: Objective, batches: list[Inputs]) -> None:
    """Raise if evaluation inputs are empty, not finite, or do not fit the network."""
    sizes = [SampleRows().count(part) for part in batches]
    if not sizes or 0 in sizes:
        raise DataError(f"evaluation holds batches of {sizes} inputs; expected at least one batch, and inputs in each.")
    for part in batches:
        check_finite(part, "evaluation inputs")
        try:
            f = objective.outputs(torch.zeros_like(objective.centre)[None], part)
        except LapwingError:
            raise
        except (TypeError, RuntimeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(
                f"the network does not take the evaluation inputs ({error!s:.200}); expected inputs alone, without "
                "targets: one batch, or a list of batches."
            ) from error
        check_finite(f, "outputs of the network at the evaluation inputs")


def averaged(objective: Objective, batches: list[Inputs], absolute: bool) -> Push:
    """Return the gradient of the average over inputs of Σ_c f_c, or of Σ_c |f_c|, as a function of d (K, P)."""
    parts = [objective.cast(part) for part in batches]
    sizes = [objective.network.count(part) for part in batches]
    total = sum(sizes)

    def push(d: Tensor) -> Tensor:
        gradient = torch.zeros_like(d)
        for part, n_samples in zip(parts, sizes, strict=True):
            size = lambda row, x=part: (
                (objective.run(row, x).abs() if absolute else objective.run(row, x)).sum() / total
            )
            gradient = gradient + objective.each(torch.func.grad(size), d, n_samples)
        return gradient

    return push


def random_forces(
    problem: Problem, data: Data, count: int, generator: torch.Generator, root: Tensor | None = None
) -> Tensor:
    """Draw ξ ~ N(0, H), (count, P), with the ``root`` of the Hessian: then H⁻¹ ξ are draws from the posterior.

    Without a root draw ξ ~ N(0, G/φ + A) with the GGN G, which needs no matrix. Cost: one pass over the data.
    """
    network, likelihood = problem.network, problem.likelihood
    theta = network.theta().double()
    if root is not None:
        return normal((count, len(theta)), generator, theta) @ root.mT.to(theta)
    total = normal((count, len(theta)), generator, theta) * problem.prior.vector.detach().to(theta).sqrt()
    phi = likelihood.dispersion.detach().to(theta)
    for jacobians in Sweep(network, likelihood, data, label="random pushes"):
        eps = normal((count, jacobians.batch, jacobians.outputs), generator, theta)
        total = total + jacobians.vjp(eps).to(theta) / phi.sqrt()
    return total
