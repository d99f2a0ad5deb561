"""A lower bound of the evidence from blocks of data, for data too large for one pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.trace import Step, Trace
from lapwing.curvature.sweep import root_seeds
from lapwing.errors import DataError, UnsupportedError
from lapwing.linalg.cholesky import cholesky
from lapwing.networks.forward import outside_autocast, refuse_training_mode
from lapwing.priors.kernel import prior_kernel
from lapwing.problem import Problem
from lapwing.tuners.coordinates import Coordinates
from lapwing.tuners.maximise_evidence import refuse_not_finite, refuse_runaway


@dataclass(frozen=True, eq=False)
class Term:
    """What one block of data adds to the bound: its log-likelihood less half of log det(I + K/φ) of its kernel."""

    problem: Problem
    inputs: Any
    targets: Tensor

    def __call__(self, problem: Problem) -> Tensor:
        """Under the prior and noise of this problem, differentiable in both."""
        network, likelihood = problem.network, problem.likelihood
        phi = likelihood.dispersion.to(network.device)
        f, y, jacobians = self._linearised
        kernel = prior_kernel(jacobians, problem.prior) / phi
        eye = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
        logdet = 2 * cholesky(eye + kernel, "the kernel of a block of data").diagonal().log().sum()
        count = likelihood.count(f, y)
        fit = -likelihood.loss(f, y).sum() / phi - count * likelihood.log_normaliser(phi, network.output_shape[-1])
        return fit - 0.5 * logdet

    @property
    def _linearised(self) -> tuple[Tensor, Tensor, Any]:
        network, likelihood = self.problem.network, self.problem.likelihood
        tangent = network.linearise(self.inputs)
        f = tangent.f.double()
        y = likelihood.targets(f, self.targets)
        return f, y, tangent.jacobians(root_seeds(likelihood.root(f, y)).to(network.dtype)).double()


def terms(problem: Problem, data: Data, block: int, label: str = "blocks") -> Iterator[Term]:
    """Every batch in runs of at most ``block`` data."""
    for batch in data.batches(label):
        size = problem.network.count(batch.inputs)
        for start in range(0, size, block):
            rows = slice(start, min(start + block, size))
            yield Term(problem, problem.network.take(batch.inputs, rows), batch.targets[rows])


@outside_autocast
def evidence_bound(posterior: Any, data: Iterable[Any] | Data, block: int = 32) -> Tensor:
    r"""A lower bound of the log evidence of Full(), from the kernels of blocks of data alone (Immer et al. 2023).

    $$ \log p(D \mid \tilde w) - \tfrac12 \|\tilde w - \mu\|_A^2
       - \tfrac12 \sum_b \log\det (I + J_b A^{-1} J_b^\top / \phi) $$

    By Fischer's inequality the log-determinant of the whole kernel is at most the sum over its diagonal blocks, so
    this is at most the evidence, and equal to it for one block. ``posterior`` is fitted in any way, ``MapOnly()``
    included: only its problem is used. Cost: one pass; memory (block C)², whatever the number of data or weights.
    """
    core = getattr(posterior, "posterior", posterior)
    _check_block(block)
    network = core.problem.network
    refuse_training_mode(network.model)
    if hasattr(posterior, "fingerprint"):
        posterior.fingerprint.refuse_other(network.model)
    batches = data if isinstance(data, Data) else Data(data, network.device)
    total = torch.zeros((), dtype=torch.float64, device=network.device)
    for term in terms(core.problem, batches, block):
        total = total + term(core.problem)
    return total - 0.5 * core.problem.prior.penalty(_centre(core))


@dataclass(frozen=True, eq=False)
class MaximiseBound:
    """Learn the precisions (and with ``noise=True`` the noise) by gradient steps on single blocks of data.

    A block's term times the number of blocks is an unbiased estimate of ``evidence_bound`` whatever the sizes of the
    blocks, and so is its gradient; nothing is ever summed over all data. Adam with a rate that falls to zero over
    ``steps``. The bound is loosest for small blocks, and the precisions it likes are then larger than the evidence's.

    Cost of a step: the layer-wise Jacobian of one block and a Cholesky factor of size block times C.
    """

    data: Iterable[Any] | Data | None = None
    block: int = 32
    steps: int = 300
    rate: float = 0.1
    noise: bool = False

    def __post_init__(self) -> None:
        _check_block(self.block)
        if self.steps < 1 or not 0 < self.rate < math.inf:
            raise UnsupportedError(f"steps is {self.steps} and rate {self.rate}; expected at least 1 and above nought.")

    def with_data(self, data: Data) -> MaximiseBound:
        """The same on these data, where none were given."""
        return self if self.data is not None else MaximiseBound(data, self.block, self.steps, self.rate, self.noise)

    def __call__(self, posterior: Any) -> Any:
        if self.data is None:
            raise UnsupportedError("MaximiseBound needs the training data: MaximiseBound(data), or give it to fit().")
        network = posterior.problem.network
        data = self.data if isinstance(self.data, Data) else Data(self.data, network.device)
        coordinates = Coordinates.of(posterior, self.noise)
        if coordinates.noise and posterior.noise.ndim:
            raise UnsupportedError(
                "MaximiseBound(noise=True) learns one noise for all outputs, and this likelihood has one for each; "
                "use MaximiseEvidence, or Gaussian() with a single noise."
            )
        blocks = sum(1 for _ in terms(posterior.problem, data, self.block, "counting blocks"))
        if not blocks:
            raise DataError("the data have no blocks; expected at least one datum.")
        x = coordinates.start.requires_grad_()
        optimiser = torch.optim.Adam([x], lr=self.rate)
        steps: list[Step] = []
        theta = _centre(posterior)
        for number, term in enumerate(self._endless(posterior.problem, data)):
            if number == self.steps:
                break
            for group in optimiser.param_groups:
                group["lr"] = self.rate * (1 - number / self.steps)
            with torch.inference_mode(False), torch.enable_grad():
                problem = coordinates.at(x).problem
                value = blocks * term(problem) - 0.5 * problem.prior.penalty(theta)
                steps.append(coordinates.step(x, float(value.detach())))
                refuse_not_finite(coordinates, steps, "MaximiseBound")
                optimiser.zero_grad()
                (-value / coordinates.weights).backward()
                optimiser.step()
        refuse_runaway(coordinates, steps, "MaximiseBound")
        trace = Trace("MaximiseBound", "estimate of the bound from one block", tuple(steps))
        return coordinates.finished(x, trace)

    def _endless(self, problem: Problem, data: Data) -> Iterator[Term]:
        while True:
            yield from terms(problem, data, self.block)


def _centre(posterior: Any) -> Tensor:
    found: Tensor = posterior.theta.double()
    return found


def _check_block(block: int) -> None:
    if block < 1:
        raise UnsupportedError(f"block is {block}; expected at least one datum in a block.")
