"""Locations and prior by L-BFGS on the collapsed evidence bound, with the Jacobians of all data in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.memory import PIECE, budget
from lapwing.core.progress import ProgressBar
from lapwing.curvature.blockwise import prior_precision
from lapwing.curvature.sweep import Sweep
from lapwing.linalg.whitening import smooth_whitening
from lapwing.methods.inducing.points import InducingPoints
from lapwing.networks.jacobians import LayerJacobians
from lapwing.priors.kernel import prior_kernel

PATIENCE = 5  # steps without progress after which the search has converged
PROGRESS = 1e-9  # relative decrease of the objective that counts as progress


def collapsed_bound(points: InducingPoints, data: Data) -> Callable[[Tensor], tuple[Tensor, float]]:
    """Return the negative collapsed evidence bound (Titsias 2009), up to a constant, as a function of moves.

    The function returns the bound, differentiable in the moves and in the prior variance of the points, and
    KL(q || prior). The bound is NaN where the kernel overflows: a line search may step too far, and then ends.
    One pass over the data; their Jacobians, seeded with the root of the curvature, are kept as layer factors. Where
    these do not fit the byte budget, every evaluation passes over the data, and computes each part of the kernel twice.
    """
    problem, network, prior = points.problem, points.problem.network, points.problem.prior
    rows, processes = _Rows.read(Sweep(network, problem.likelihood, data, label="inducing points")), data.processes
    precision = prior_precision(prior, network.layout, network.selection)
    own_trace = sum(float(precision.quadratic(jacobian, False).sum()) for jacobian in rows)
    prior_trace = float(processes.sum([torch.tensor(own_trace, dtype=torch.float64)])[0])

    def bound(moves: Tensor) -> tuple[Tensor, float]:
        (inside,) = processes.entering(moves)
        anchors = points.anchors.differentiable(points.moved(inside))
        kernel = prior_kernel(anchors, prior)
        if not bool(torch.isfinite(kernel.detach()).all()):
            return torch.nan * (moves.sum() + points.log_scale), math.nan
        white = smooth_whitening(kernel)

        def squared(jacobian: LayerJacobians) -> Tensor:
            whitened = prior_kernel(jacobian, prior, anchors) @ white
            return whitened.mT @ whitened

        gram = processes.total(rows.summed(squared, inside, len(kernel), len(anchors.parts) * 8 * len(kernel)))
        scale = points.log_scale.exp()
        ratio = scale / points.likelihood.dispersion.to(scale)
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        factor = torch.linalg.cholesky(eye + ratio * gram)
        logdet = factor.diagonal().log().sum()
        value = 0.5 * ratio * (prior_trace - gram.diagonal().sum()) + logdet
        with torch.no_grad():
            divergence = logdet - 0.5 * (len(eye) - torch.cholesky_inverse(factor).diagonal().sum())
        if problem.learn_prior:
            value = value + 0.5 * points.penalty / scale
        return value, float(divergence)

    return bound


@dataclass(frozen=True, eq=False)
class _Rows:
    """The Jacobians of all data in float64: kept, or computed anew at every pass."""

    sweep: Sweep
    kept: list[LayerJacobians] | None
    count: int  # rows: data times seeds

    @classmethod
    def read(cls, sweep: Sweep) -> _Rows:
        """Pass over the data, and keep the Jacobians if they take at most half of the byte budget."""
        kept: list[LayerJacobians] | None = []
        left, count = budget(sweep.network.device) // 2, 0
        for jacobian in sweep:
            count += jacobian.batch * jacobian.outputs
            if kept is not None:
                kept.append(jacobian.formed().double().formed())
                left -= kept[-1].nbytes
                kept = kept if left >= 0 else None
        return cls(sweep, kept, count)

    def __iter__(self) -> Iterator[LayerJacobians]:
        return iter(self.kept) if self.kept is not None else (jacobian.double() for jacobian in self.sweep)

    def summed(self, function: Callable[[LayerJacobians], Tensor], moves: Tensor, size: int, each: int) -> Tensor:
        """Return the sum of a function (size, size) of all Jacobians, differentiable in ``moves``.

        It keeps ``each`` bytes a row. Where these do not fit the byte budget, or there is no row at all, it is computed
        again in the backward pass.
        """
        few = self.count * each <= int(PIECE * budget(self.sweep.network.device))
        if self.kept is None or not self.count or not few:
            total: Tensor = _Again.apply(moves, self, function, size)
            return total
        return reduce(torch.add, map(function, self))


class _Again(torch.autograd.Function):
    """The sum of a function of all Jacobians, of which one at a time is in memory, in the backward pass too."""

    @staticmethod
    def forward(
        ctx: Any, moves: Tensor, rows: _Rows, function: Callable[[LayerJacobians], Tensor], size: int
    ) -> Tensor:
        ctx.moves, ctx.rows, ctx.function = moves, rows, function
        total = torch.zeros(size, size, dtype=torch.float64, device=moves.device)
        for part in rows:
            total += function(part)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        total = torch.zeros_like(ctx.moves)
        for part in ctx.rows:
            with torch.enable_grad():
                value = (ctx.function(part) * slope).sum()
            total += torch.autograd.grad(value, ctx.moves, retain_graph=True)[0]
        return total, None, None, None


def learn_collapsed(points: InducingPoints, data: Data, max_steps: int) -> InducingPoints:
    """Return the points at the best locations of an L-BFGS search, with the prior variance if it is learned.

    Cost: one pass over the data, whose layer factors are kept; then for each evaluation a differentiable backward pass
    over the M points, their (N C, M) kernel with all data and M³.
    """
    points, moves = points.learnable(noise=False)
    assert moves is not None
    bound = collapsed_bound(points, data.steady())
    variables = [moves, points.log_scale] if points.problem.learn_prior else [moves]
    optimiser = torch.optim.LBFGS(
        variables, max_iter=1, max_eval=25, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=0.0,
        tolerance_change=0.0,
    )  # fmt: skip
    divergence = 0.0

    def closure() -> Tensor:
        nonlocal divergence
        optimiser.zero_grad()
        value, divergence = bound(moves)
        value.backward(inputs=variables)  # the graph contains the weights too, which must get no gradient
        return value

    best, best_points, waited, overflow = math.inf, points.copied(moves), 0, False
    bar, steps = ProgressBar(range(max_steps), "inducing points", data.progress), []
    with torch.inference_mode(False), torch.enable_grad():
        for _ in bar:
            value = float(optimiser.step(closure).detach())
            overflow = not math.isfinite(value)
            if overflow:
                break
            steps.append(points.trace_step(-value))
            bar.show(objective=value, KL=divergence)
            waited = waited + 1 if value > best - PROGRESS * (1 + abs(best)) else 0
            if value < best:
                best, best_points = value, points.copied(moves)
            if waited >= PATIENCE:
                break
        if float(bound(moves)[0].detach()) < best:
            best_points = points.copied(moves)
    findings: tuple[str, ...] = ()
    if overflow:
        findings = (f"the objective overflowed after {len(steps)} steps; the best state before that is kept",)
    elif waited < PATIENCE:
        findings = (f"the search did not converge in {max_steps} steps and the bound still rises; raise steps",)
    return replace(best_points, steps=tuple(steps), findings=findings)
