"""Products with the Jacobian for many vectors at once."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lapwing.core.data import Inputs
from lapwing.networks.fallback import swapped
from lapwing.networks.forward import quiet, raw_output, recording, shaped
from lapwing.networks.selection import Selection


def jvp(model: nn.Module, selection: Selection, inputs: Inputs, v: Tensor, forward_mode: bool, plain: bool) -> Tensor:
    """Return J v (K, B, [T,] C) by vectorised forward mode, or by two backward passes where an operation lacks it."""
    tensors = dict(model.named_parameters())
    tangents = {name: value.to(tensors[name].dtype) for name, value in selection.split(v).items()}
    if not forward_mode:
        return _double_backward(model, inputs, tangents, len(v), plain)
    try:
        return _forward_mode(model, inputs, tangents)
    except (RuntimeError, NotImplementedError):  # an attention kernel without a forward rule
        return _double_backward(model, inputs, tangents, len(v), plain)


def vjp(model: nn.Module, selection: Selection, raw: Tensor, u: Tensor, looped: bool) -> Tensor:
    """Return Jᵀ u (K, P) for the graph of ``raw``, by one batched backward pass, or one for each u if ``looped``."""
    tensors = dict(model.named_parameters())
    chosen = [tensors[name] for name in selection.names]
    seeds = u.to(raw.dtype).reshape(len(u), *raw.shape)
    if looped:
        each = [
            torch.autograd.grad(raw, chosen, s, retain_graph=True, allow_unused=True, materialize_grads=True)
            for s in seeds
        ]
        grads = [torch.stack([g[i].to_dense() if g[i].is_sparse else g[i] for g in each]) for i in range(len(chosen))]
    else:
        with quiet():
            back = torch.autograd.grad(raw, chosen, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True)
        grads = [g if g is not None else p.new_zeros(len(u), *p.shape) for g, p in zip(back, chosen, strict=True)]
    dtype = reduce(torch.promote_types, [grad.dtype for grad in grads])
    return selection.picked(torch.cat([grad.reshape(len(u), -1).to(dtype) for grad in grads], 1))


def _forward_mode(model: nn.Module, inputs: Inputs, tangents: dict[str, Tensor]) -> Tensor:
    tensors = {name: p.detach() for name, p in model.named_parameters() if name in tangents}

    def f(values: dict[str, Tensor]) -> Tensor:
        return swapped(model, values, lambda: shaped(raw_output(model, inputs)))

    with recording(dict(model.named_parameters()), (), False), torch.no_grad(), quiet(), sdpa_kernel(SDPBackend.MATH):
        out: Tensor = torch.func.vmap(lambda t: torch.func.jvp(f, (tensors,), (t,))[1])(tangents)
    return out


def _double_backward(model: nn.Module, inputs: Inputs, tangents: dict[str, Tensor], count: int, plain: bool) -> Tensor:
    """Return J v: Jᵀ u is linear in u, so its derivative in u along v is J v."""
    tensors = dict(model.named_parameters())
    chosen = [tensors[name] for name in tangents]
    with sdpa_kernel(SDPBackend.MATH), recording(tensors, tangents, plain):
        raw = raw_output(model, inputs)
        u = torch.zeros_like(raw, requires_grad=True)
        back = torch.autograd.grad(raw, chosen, u, create_graph=True, allow_unused=True, materialize_grads=True)
        live = [(g, name) for g, name in zip(back, tangents, strict=True) if g.requires_grad]
        each = [
            torch.autograd.grad([g for g, _ in live], u, [tangents[name][k] for _, name in live], retain_graph=True)[0]
            for k in range(count)
        ]
    return torch.stack([shaped(row.detach()) for row in each])
