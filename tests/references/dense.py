"""Dense, slow and obvious: brute-force Jacobians, GGNs and Gaussian algebra, one backward pass for each number.

Nothing here calls the package.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def slope(of: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-4) -> Tensor:
    """Central differences of the fourth order, one entry after another."""
    slopes = []
    for i in range(at.numel()):
        unit = torch.zeros(at.numel(), dtype=at.dtype)
        unit[i] = step
        low, less, more, high = (of(at.detach() + k * unit.reshape(at.shape)).detach() for k in (-2, -1, 1, 2))
        slopes.append((low - 8 * less + 8 * more - high) / (12 * step))
    return torch.stack(slopes).reshape(at.shape)


def one(inputs: Any, b: int) -> Any:
    """Sample b as a batch of one."""
    if isinstance(inputs, Tensor):
        return inputs[b : b + 1]
    if isinstance(inputs, Mapping):
        return {key: one(value, b) for key, value in inputs.items()}
    return tuple(one(value, b) for value in inputs)


def output(model: nn.Module, inputs: Any) -> Tensor:
    if isinstance(inputs, Mapping):
        out = model(**inputs)
    else:
        out = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    out = getattr(out, "logits", out)
    return out.unsqueeze(-1) if out.ndim == 1 else out


def jacobian(model: nn.Module, inputs: Any, batch: int, names: list[str] | None = None) -> Tensor:
    """(B, M, P) for the named parameters, else for those that require a gradient; M outputs per sample."""
    named = dict(model.named_parameters())
    chosen = [p for n, p in named.items() if (p.requires_grad if names is None else n in names)]
    flags = [p.requires_grad for p in chosen]
    for p in chosen:
        p.requires_grad_(True)
    rows = []
    for b in range(batch):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f = output(model, one(inputs, b)).reshape(-1)
        each = []
        for value in f:
            grads = torch.autograd.grad(value, chosen, retain_graph=True, allow_unused=True, materialize_grads=True)
            each.append(torch.cat([g.reshape(-1) for g in grads]))
        rows.append(torch.stack(each))
    for p, flag in zip(chosen, flags, strict=True):
        p.requires_grad_(flag)
    return torch.stack(rows).detach()


def softmax_hessian(f: Tensor) -> Tensor:
    p = f.softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def sigmoid_hessian(f: Tensor) -> Tensor:
    p = f.sigmoid()
    return torch.diag_embed(p * (1 - p))


def ggn(jac: Tensor, hessian: Tensor) -> Tensor:
    """Σ J_bᵀ H_b J_b with J (N, C, P) and H (N, C, C)."""
    total = torch.zeros(jac.shape[-1], jac.shape[-1], dtype=jac.dtype)
    for j, h in zip(jac, hessian, strict=True):
        total += j.T @ h @ j
    return total


def unit_ggn(model: nn.Module, x: Tensor, outputs: int = 3) -> Tensor:
    """The GGN of a regression at unit noise."""
    return ggn(jacobian(model, x, len(x)), torch.eye(outputs, dtype=torch.float64).expand(len(x), outputs, outputs))


def by_datum(jac: Tensor, classes: int) -> Tensor:
    """(B, T C, P) -> (B T, C, P): every token is a datum."""
    return jac.reshape(-1, classes, jac.shape[-1])


def output_covariance(jac: Tensor, covariance: Tensor) -> Tensor:
    """J Σ Jᵀ datum by datum, (N, C, C)."""
    return torch.stack([j @ covariance @ j.T for j in jac])


def joint_covariance(jac: Tensor, covariance: Tensor) -> Tensor:
    """J Σ Jᵀ across all data, (N C, N C)."""
    rows = jac.reshape(-1, jac.shape[-1])
    return rows @ covariance @ rows.T


def normal_log_density(y: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    gap = y - mean
    quadratic = gap @ torch.linalg.solve(covariance, gap)
    return -0.5 * (quadratic + torch.linalg.slogdet(covariance)[1] + len(y) * math.log(2 * math.pi))
