"""The full posterior covariance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from lapwing.curvature.dense import full_curvature, full_hessian
from lapwing.curvature.sweep import CURVATURES, DRAWS, accumulate, choose_seeds
from lapwing.data.batches import Data
from lapwing.errors import UnsupportedError
from lapwing.methods.base import HALVES, Conformance, Cost, Exactness, Method, Offer, Requirements, Work, Workload
from lapwing.posteriors.weight_space import Sums, SumsData
from lapwing.problem import Problem
from lapwing.runtime.memory import BEYOND, budget
from lapwing.runtime.settings import NONE, integer, one_of, setting

ALWAYS = 30_000  # weights that are accepted on every device, 7 GB for each matrix
MATRICES = 4  # of P² numbers that a fit and its first prediction hold: H, Λ, its factor, and room for the Jacobians


@dataclass(frozen=True)
class Full(SumsData, Method):
    """The exact (P, P) precision, for small networks, last layers and subnetworks; the reference for other methods.

    Args:
        curvature: "ggn" (exact), "fisher_mc" (an estimate from gradients at labels drawn from the model), "empirical"
            (the sum of g gᵀ over gradients at the targets, see docs/methods/weight_space.md) or "hessian"
            (the Hessian of the loss, which need not be positive; a precision that is not positive definite raises
            ``NumericalError``).
        limit: The largest number of weights P that is accepted; the matrix takes 8 P² bytes. None accepts 30,000, and
            more where four such matrices fit into four times the byte budget of the device (``lw.memory``), by default
            about what is free: 65,536 on a GPU with 140 GiB.
        draws: The number of labels drawn for each datum, for "fisher_mc".

    Raises:
        UnsupportedError: If a setting is not one of the above; in ``fit``, if there are more weights than ``limit``.

    Cost: one forward pass, a backward pass for each of the C outputs and P² for each of their rows; P³ to factorise.
    "hessian" takes P backward passes for each batch instead.
    Exact when: always, for the GGN or the Hessian; "fisher_mc" on average.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.numbers import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=Full(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    curvature: str = setting("ggn", one_of((*CURVATURES, "hessian")))
    limit: int | None = setting(None, integer() | NONE)
    draws: int = setting(DRAWS, integer())
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance((Exactness(lambda weights, rows: Full(), "network"),))

    def sum_data(self, problem: Problem, data: Data, generator: torch.Generator | None) -> Sums:
        network = problem.network
        size, most = network.selection.size, self._most(network.device)
        if size > most:
            raise UnsupportedError(
                f"Full() over {size} weights needs {8 * size**2 / 2**30:.0f} GiB; the limit is {most} weights. "
                "Use Kron(), LowRank() or Diagonal(), weights=last_layer, or raise Full(limit=...)."
            )
        if self.curvature == "hessian":
            return *full_hessian(network, problem.likelihood, data), None
        compute = lambda sweep: full_curvature(sweep, network)
        seeds = choose_seeds(self.curvature, self.draws, problem, generator, data.processes.rank)
        return accumulate(compute, problem, data, seeds, "Full")

    def _most(self, device: torch.device) -> int:
        """Return the largest number of weights that is accepted on a device."""
        if self.limit is not None:
            return self.limit
        return max(ALWAYS, math.isqrt(BEYOND * budget(device) // (8 * MATRICES)))

    def cost(self, workload: Workload) -> Cost:
        size, most = workload.weights, self._most(workload.device)
        if size > most:
            return Cost.unsupported(f"over {most} weights: choose fewer")
        workload = workload.with_curvature(self.curvature, self.draws)
        if workload.lone_head:
            fit, covariance = Work(workload.blockwise, 0.4 * size**2), Work(products=0.5 * size**2)
        else:
            formed = workload.blockwise + workload.whole(workload.seeds)
            fit = Work(formed, HALVES * workload.seeds * size**2)
            covariance = Work(workload.whole(workload.outputs), 0.5 * workload.outputs * size**2)
        peak, once = workload.jacobian_bytes() + 16 * size**2, Work(cubes=size**3 / 3)
        return workload.cost(8 * size**2, peak, fit, workload.prediction(covariance), once)

    @classmethod
    def offer(cls, requirements: Requirements) -> Offer:
        """Return the exact method of P²: the matrix and its factor are held, and the factorisation takes P³ / 3."""
        size = requirements.weights
        return Offer(cls(limit=size), 0, 16.0 * size**2, float(requirements.rows) * size**2 + 0.3 * size**3, "exact")
