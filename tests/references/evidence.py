"""Evidences and their lower bounds in weight space, from the formulas, by dense matrices.

Nothing here calls the package. By Sylvester's identity log det(I + J A⁻¹ Jᵀ) of a block of data is the log-determinant
of a (P, P) matrix, so that no root of the likelihood's curvature is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as d

from tests.references import dense


@dataclass(frozen=True)
class Linearised:
    """Every datum of a model: outputs (N, C), their Jacobians (N, C, P) and targets; ``tokens`` of them in a sample."""

    kind: str  # "gaussian", "categorical" or "bernoulli"
    f: Tensor
    jacobian: Tensor
    y: Tensor
    theta: Tensor
    tokens: int = 1

    @classmethod
    def of(cls, kind: str, model: nn.Module, inputs: Any, y: Tensor, columns: Tensor | None = None) -> Linearised:
        """``columns`` of the weights that require a gradient are uncertain; None means all."""
        chosen = [p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]
        theta = torch.cat(chosen)
        with torch.no_grad():
            f = torch.cat([dense.output(model, dense.one(inputs, b)) for b in range(len(y))])
        jac = dense.by_datum(dense.jacobian(model, inputs, len(y)), f.shape[-1])
        columns = torch.arange(len(theta)) if columns is None else columns
        tokens = f[0, ..., 0].numel()
        flat = f.reshape(-1, f.shape[-1])
        y = y.reshape(len(flat), -1) if kind != "categorical" else y.reshape(-1)
        return cls(kind, flat, jac[..., columns], y, theta[columns], tokens)

    def log_likelihoods(self, phi: Tensor | float = 1.0) -> Tensor:
        """Of every datum, (N,)."""
        if self.kind == "gaussian":
            return d.Normal(self.f, torch.as_tensor(phi, dtype=self.f.dtype).sqrt()).log_prob(self.y).sum(-1)
        if self.kind == "categorical":
            return d.Categorical(logits=self.f).log_prob(self.y)
        return d.Bernoulli(logits=self.f).log_prob(self.y.to(self.f)).sum(-1)

    @property
    def curvatures(self) -> Tensor:
        """Of the negative log-likelihood in the outputs at unit dispersion, (N, C, C)."""
        if self.kind == "gaussian":
            return torch.eye(self.f.shape[-1], dtype=self.f.dtype).expand(len(self.f), -1, -1)
        return dense.softmax_hessian(self.f) if self.kind == "categorical" else dense.sigmoid_hessian(self.f)

    @property
    def ggn(self) -> Tensor:
        return dense.ggn(self.jacobian, self.curvatures)

    def term(self, samples: Sequence[int], precision: Tensor, phi: Tensor | float = 1.0) -> Tensor:
        """log p(D_b | w̃) - ½ log det(I + A⁻¹ Σ_b JᵀHJ/φ) of a block of samples, with ``precision`` (P,)."""
        rows = torch.tensor([s * self.tokens + t for s in samples for t in range(self.tokens)])
        ggn = dense.ggn(self.jacobian[rows], self.curvatures[rows]) / phi
        scaled = torch.eye(len(precision), dtype=precision.dtype) + ggn / precision[:, None]
        return self.log_likelihoods(phi)[rows].sum() - 0.5 * torch.linalg.slogdet(scaled)[1]

    def penalty(self, precision: Tensor, mean: float = 0.0) -> Tensor:
        return 0.5 * (precision * (self.theta - mean).square()).sum()

    def bound(
        self, blocks: Sequence[Sequence[int]], precision: Tensor, phi: Tensor | float = 1.0, mean: float = 0.0
    ) -> Tensor:
        """The sum over blocks of samples, less the penalty."""
        total = torch.stack([self.term(block, precision, phi) for block in blocks]).sum()
        return total - self.penalty(precision, mean)

    def evidence(self, precision: Tensor, phi: Tensor | float = 1.0, mean: float = 0.0) -> Tensor:
        """log p(D | w̃) + log N(w̃; mean, A⁻¹) + P/2 log 2π - ½ log det(H/φ + A)."""
        total = self.ggn / phi + torch.diag(precision)
        prior = d.Normal(mean, precision.rsqrt()).log_prob(self.theta).sum()
        constant = 0.5 * len(precision) * math.log(2 * math.pi)
        return self.log_likelihoods(phi).sum() + prior + constant - 0.5 * torch.linalg.slogdet(total)[1]


def adam(slope: Any, start: Tensor, rates: Sequence[float]) -> Tensor:
    """Ascent by Adam's formulas (Kingma and Ba 2015), with slope(x, number) and one rate for each step."""
    x, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for number, rate in enumerate(rates):
        gradient = slope(x, number)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient.square()
        unbiased = first / (1 - 0.9 ** (number + 1))
        x = x + rate * unbiased / ((second / (1 - 0.999 ** (number + 1))).sqrt() + 1e-8)
    return x
