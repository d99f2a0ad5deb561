"""The tangent model h(theta, x) = f(x) + J(x)(theta - w̃) with dense matrices: its loss, its optimum, its evidence.

Nothing here calls the package. Losses are those of ``torch.nn.functional``; slopes come from autograd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.references import dense


@dataclass(frozen=True)
class Tangent:
    """f (N, C) and its Jacobian (N, C, P) at w̃ (P,), with targets; every token is a datum."""

    kind: str  # "gaussian", "categorical", "bernoulli" or "poisson"
    f: Tensor
    jacobian: Tensor
    y: Tensor
    w: Tensor

    @classmethod
    def of(cls, kind: str, model: nn.Module, inputs: Any, y: Tensor, names: list[str] | None = None) -> Tangent:
        with torch.no_grad():
            f = torch.cat([dense.output(model, dense.one(inputs, b)) for b in range(len(y))])
        jac = dense.by_datum(dense.jacobian(model, inputs, len(y), names), f.shape[-1])
        chosen = [p for n, p in model.named_parameters() if (p.requires_grad if names is None else n in names)]
        f = f.reshape(-1, f.shape[-1])
        y = y.reshape(-1) if kind == "categorical" else y.reshape(f.shape).to(f)
        return cls(kind, f, jac, y, torch.cat([p.detach().reshape(-1) for p in chosen]))

    def h(self, theta: Tensor) -> Tensor:
        return self.f + self.jacobian @ (theta - self.w)

    def loss(self, theta: Tensor) -> Tensor:
        """Summed, at unit dispersion."""
        h = self.h(theta)
        if self.kind == "gaussian":
            return 0.5 * (h - self.y).square().sum()
        if self.kind == "categorical":
            return F.cross_entropy(h, self.y, reduction="sum")
        if self.kind == "bernoulli":
            return F.binary_cross_entropy_with_logits(h, self.y, reduction="sum")
        return (h.exp() - self.y * h + torch.lgamma(self.y + 1)).sum()

    def slope(self, theta: Tensor) -> Tensor:
        leaf = theta.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(self.loss(leaf), leaf)
        return found

    def curvature(self, theta: Tensor) -> Tensor:
        """Of the loss in theta, (P, P): Σ JᵀΛJ with Λ at h, exactly, since h is linear in theta."""
        h = self.h(theta)
        each = {
            "gaussian": lambda: torch.eye(h.shape[-1], dtype=h.dtype).expand(len(h), -1, -1),
            "categorical": lambda: dense.softmax_hessian(h), "bernoulli": lambda: dense.sigmoid_hessian(h),
            "poisson": lambda: torch.diag_embed(h.exp()),
        }[self.kind]()  # fmt: skip
        return dense.ggn(self.jacobian, each)

    def objective(self, theta: Tensor, precision: Tensor, phi: float = 1.0, mean: float = 0.0) -> Tensor:
        return self.loss(theta) / phi + 0.5 * (precision * (theta - mean).square()).sum()

    def objective_slope(self, theta: Tensor, precision: Tensor, phi: float = 1.0, mean: float = 0.0) -> Tensor:
        return self.slope(theta) / phi + precision * (theta - mean)

    def optimum(self, precision: Tensor, phi: float = 1.0, mean: float = 0.0) -> Tensor:
        """θ* by damped Newton steps until they move nothing."""
        theta = self.w.clone()
        for _ in range(200):
            matrix = self.curvature(theta) / phi + torch.diag(precision)
            step = torch.linalg.solve(matrix, self.objective_slope(theta, precision, phi, mean))
            before, length = self.objective(theta, precision, phi, mean), 1.0
            while self.objective(theta - length * step, precision, phi, mean) > before and length > 1e-10:
                length /= 2
            theta = theta - length * step
            if float(step.norm()) <= 1e-13 * float(theta.norm()):
                break
        return theta

    def log_normaliser(self, phi: float) -> float:
        return 0.5 * self.f.numel() * math.log(2 * math.pi * phi) if self.kind == "gaussian" else 0.0

    def evidence(
        self, precision: Tensor, curvature: Tensor, phi: float = 1.0, theta: Tensor | None = None, mean: float = 0.0
    ) -> Tensor:
        """At θ*, or at a given theta, with ``curvature`` (P, P) at unit dispersion from wherever it was taken."""
        at = self.optimum(precision, phi, mean) if theta is None else theta
        scaled = torch.eye(len(at), dtype=at.dtype) + curvature / phi / precision[:, None]
        fit = -self.loss(at) / phi - self.log_normaliser(phi)
        return fit - 0.5 * (precision * (at - mean).square()).sum() - 0.5 * torch.linalg.slogdet(scaled)[1]
