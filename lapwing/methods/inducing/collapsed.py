"""Locations and prior by L-BFGS on the collapsed evidence bound, with the Jacobians of all data in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.progress import ProgressBar
from lapwing.curvature.blockwise import prior_precision
from lapwing.curvature.sweep import Sweep
from lapwing.linalg.whitening import smooth_whitening
from lapwing.methods.inducing.points import InducingPoints
from lapwing.networks.jacobians import LayerJacobians
from lapwing.priors.kernel import prior_kernel

PATIENCE = 5  # steps without progress after which the search has converged
PROGRESS = 1e-9  # relative decrease of the objective that counts as progress


@dataclass(frozen=True, eq=False)
class CollapsedBound:
    """The negative collapsed evidence bound (Titsias 2009), up to a constant.

    ``jacobians`` are those of all data, seeded with the root of the curvature; ``prior_trace`` is the sum of their
    prior variances.
    """

    points: InducingPoints
    jacobians: tuple[LayerJacobians, ...]
    prior_trace: float
    unit: Tensor

    @classmethod
    def of(cls, points: InducingPoints, data: Data) -> CollapsedBound:
        """Run one pass over the data and keep their layer factors."""
        problem = points.problem
        network = problem.network
        sweep = Sweep(network, problem.likelihood, data, label="inducing points")
        jacobians = tuple(jacobian.held().double().held() for jacobian in sweep)
        precision = prior_precision(problem.prior, network.layout, network.selection)
        trace = sum(float(precision.quadratic(jacobian, False).sum()) for jacobian in jacobians)
        return cls(points, jacobians, trace, points.unit())

    def locations(self, moves: Tensor) -> Tensor:
        """Return the inputs of the points after ``moves``, which are in units of their spread."""
        start = self.points.anchors.inputs.detach()
        return (start + self.unit * moves).to(start)

    def __call__(self, moves: Tensor, log_scale: Tensor) -> tuple[Tensor, float]:
        """Return the objective, differentiable in both arguments, and KL(q || prior).

        The objective is NaN where the kernel overflows: a line search may step too far, and then ends.
        """
        problem = self.points.problem
        jacobian = self.points.anchors.differentiable(self.locations(moves))
        kernel = prior_kernel(jacobian, problem.prior)
        if not bool(torch.isfinite(kernel.detach()).all()):
            return torch.nan * (moves.sum() + log_scale), math.nan
        white = smooth_whitening(kernel)
        rows = torch.cat([prior_kernel(part, problem.prior, jacobian) for part in self.jacobians]) @ white
        scale, phi = log_scale.exp(), self.points.phi
        eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        factor = torch.linalg.cholesky(eye + scale / phi * (rows.mT @ rows))
        logdet = factor.diagonal().log().sum()
        value = 0.5 * scale / phi * (self.prior_trace - rows.square().sum()) + logdet
        with torch.no_grad():
            divergence = logdet - 0.5 * (len(eye) - torch.cholesky_inverse(factor).diagonal().sum())
        if problem.learn_prior:
            value = value + 0.5 * self.points.penalty / scale
        return value, float(divergence)


def learn_collapsed(points: InducingPoints, data: Data, max_steps: int) -> InducingPoints:
    """Return the points at the best locations of an L-BFGS search, with the prior variance if it is learned.

    Cost: one pass over the data, whose layer factors are kept; then for each evaluation a differentiable backward pass
    over the M points, their (N C, M) kernel with all data and M³.
    """
    bound, learn_prior = CollapsedBound.of(points, data), points.problem.learn_prior
    moves = points.zero_moves()
    log_scale = torch.zeros((), dtype=torch.float64, device=moves.device, requires_grad=learn_prior)
    variables = [moves, log_scale] if learn_prior else [moves]
    optimiser = torch.optim.LBFGS(
        variables, max_iter=1, max_eval=25, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=0.0,
        tolerance_change=0.0,
    )  # fmt: skip
    divergence = 0.0

    def closure() -> Tensor:
        nonlocal divergence
        optimiser.zero_grad()
        value, divergence = bound(moves, log_scale)
        value.backward(inputs=variables)  # the graph contains the weights too, which must get no gradient
        return value

    current = lambda: (moves.detach().clone(), log_scale.detach().clone())
    best, kept, waited, overflow = math.inf, current(), 0, False
    bar, steps = ProgressBar(range(max_steps), "inducing points", data.progress), []
    with torch.inference_mode(False), torch.enable_grad():
        for _ in bar:
            value = float(optimiser.step(closure).detach())
            overflow = not math.isfinite(value)
            if overflow:
                break
            steps.append(points.trace_step(-value, log_scale.detach(), None))
            bar.show(objective=value, KL=divergence)
            waited = waited + 1 if value > best - PROGRESS * (1 + abs(best)) else 0
            if value < best:
                best, kept = value, current()
            if waited >= PATIENCE:
                break
        if float(bound(moves, log_scale)[0].detach()) < best:
            kept = current()
    findings: tuple[str, ...] = ()
    if overflow:
        findings = (f"the objective overflowed after {len(steps)} steps; the best state before that is kept",)
    elif waited < PATIENCE:
        findings = (f"the search did not converge in {max_steps} steps and the bound still rises; raise steps",)
    anchors = points.anchors.at(bound.locations(kept[0]))
    return replace(points, anchors=anchors, log_scale=kept[1], steps=tuple(steps), findings=findings)
