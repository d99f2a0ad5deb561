"""Linear inverse problems from the formulas, with dense matrices in float64.

y = A h(θ) + noise, h(θ) = f + J (θ - w), θ ~ N(mean, Σ).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

D = torch.float64


def filter_covariance(taps: tuple[int, ...], variance: float, length: float) -> Tensor:
    """The covariance of the taps of one filter: variance times exp(-distance / length), and 1e-6 on the diagonal."""
    places = torch.cartesian_prod(*[torch.arange(n, dtype=D) for n in taps]).reshape(-1, len(taps))
    n = len(places)
    total = torch.zeros(n, n, dtype=D)
    for i in range(n):
        for j in range(n):
            distance = math.sqrt(sum(float(a - b) ** 2 for a, b in zip(places[i], places[j], strict=True)))
            total[i, j] = variance * (math.exp(-distance / length) + (1e-6 if i == j else 0.0))
    return total


def jacobian(model: nn.Module, x: Tensor, names: tuple[str, ...]) -> Tensor:
    """The Jacobian (dx, P) of the flattened output by one backward pass for each output, in float64."""
    parameters = dict(model.named_parameters())
    out = model(x).reshape(-1)
    rows = []
    for value in out:
        grads = torch.autograd.grad(value, [parameters[name] for name in names], retain_graph=True, allow_unused=True)
        flat = [
            torch.zeros_like(parameters[name]) if grad is None else grad
            for name, grad in zip(names, grads, strict=True)
        ]
        rows.append(torch.cat([grad.reshape(-1) for grad in flat]))
    return torch.stack(rows).detach()


def posterior_covariance(j: Tensor, sigma: Tensor, a: Tensor, noise: float) -> Tensor:
    """The covariance of the image given y, from the precision of the weights: J (Σ⁻¹ + JᵀAᵀAJ/σ²)⁻¹ Jᵀ."""
    precision = torch.linalg.inv(sigma) + j.mT @ a.mT @ a @ j / noise
    return j @ torch.linalg.inv(precision) @ j.mT


def log_evidence(
    y: Tensor, f: Tensor, w: Tensor, j: Tensor, sigma: Tensor, a: Tensor, noise: float, mean: float | Tensor = 0.0
) -> Tensor:
    """log N(y; A (f + J (mean - w)), A J Σ Jᵀ Aᵀ + noise I)."""
    kernel = a @ j @ sigma @ j.mT @ a.mT + noise * torch.eye(len(a), dtype=D)
    centre = a @ (f + j @ (mean - w))
    return torch.distributions.MultivariateNormal(centre, kernel).log_prob(y)


def former_evidence(y: Tensor, f: Tensor, w: Tensor, j: Tensor, sigma: Tensor, a: Tensor, noise: float) -> Tensor:
    """The Laplace evidence at the trained weights w with prior mean zero, as if they were the tangent model's optimum.

    It is what version 0.2.0 maximised, to compare with.
    """
    kernel = a @ j @ sigma @ j.mT @ a.mT + noise * torch.eye(len(a), dtype=D)
    residual = y - a @ f
    quadratic = residual @ residual / noise + w @ torch.linalg.solve(sigma, w)
    return -0.5 * (quadratic + torch.linalg.slogdet(kernel)[1] + len(a) * math.log(2 * math.pi))
