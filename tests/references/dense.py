"""Dense, slow and obvious: brute-force Jacobians and GGNs, one backward pass for each sample and output."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.core.data import call, take


def output(model: nn.Module, inputs: Any) -> Tensor:
    out = call(model, inputs)
    out = getattr(out, "logits", out)
    return out.unsqueeze(-1) if out.ndim == 1 else out


def jacobian(model: nn.Module, inputs: Any, batch: int, names: list[str] | None = None) -> Tensor:
    """(B, M, P) for the parameters that require a gradient, M outputs per sample."""
    named = dict(model.named_parameters())
    chosen = [p for n, p in named.items() if (p.requires_grad if names is None else n in names)]
    flags = [p.requires_grad for p in chosen]
    for p in chosen:
        p.requires_grad_(True)
    rows = []
    for b in range(batch):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f = output(model, take(inputs, batch, slice(b, b + 1))).reshape(-1)
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


def ggn(jac: Tensor, hessian: Tensor) -> Tensor:
    """Σ_b J_bᵀ H_b J_b with J (N, C, P) and H (N, C, C)."""
    total = torch.zeros(jac.shape[-1], jac.shape[-1], dtype=jac.dtype)
    for j, h in zip(jac, hessian, strict=True):
        total += j.T @ h @ j
    return total
