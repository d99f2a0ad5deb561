"""Kronecker factors from the papers, for networks of Linear, Conv1d and Conv2d modules called once each.

Expand and reduce as in Eschenhagen et al. 2023 (eqs. 12 and 15) and Martens & Grosse 2015, with one bias column. Inputs
and output gradients are caught at the modules, one backward pass for each sample and each column of the output
Hessian's root; positions are then written out with unfold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Factors:
    """Input factor (G, d_in, d_in) and output factor (G, d_out, d_out), and the number of rows."""

    inp: Tensor
    out: Tensor
    rows: int

    def dense(self) -> Tensor:
        return torch.block_diag(*(torch.kron(o, i) / self.rows for o, i in zip(self.out, self.inp, strict=True)))


def positions(module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One sample's input and output gradient as (G, T, d_in) and (G, T, d_out)."""
    if isinstance(module, nn.Linear):
        return a.reshape(1, -1, a.shape[-1]), g.reshape(1, -1, g.shape[-1])
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    if isinstance(module, nn.Conv1d):  # as a picture of height one
        a, g = a.unsqueeze(-2), g.unsqueeze(-2)
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
    if module.padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        pad = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    else:
        extents = module.padding if isinstance(module, nn.Conv2d) else (0, *module.padding)
        pad = [extent for extent in reversed(extents) for _ in range(2)]
    groups = module.groups
    patches = F.unfold(F.pad(a, pad), kernel, dilation, 0, stride)[0]  # (C k, T), channels outermost
    patches = patches.reshape(groups, -1, patches.shape[-1]).transpose(1, 2)
    return patches, g.reshape(groups, -1, g.shape[-2] * g.shape[-1]).transpose(1, 2)


def factors(model: nn.Module, inputs: Tensor, root: Any, sharing: str) -> dict[str, Factors]:
    """By module name. ``root(f)`` gives R (C, K) for one sample's output f (C,), or a list of seeds for tokens."""
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)}
    inp: dict[str, Any] = dict.fromkeys(modules, 0)
    out: dict[str, Any] = dict.fromkeys(modules, 0)
    rows = dict.fromkeys(modules, 0)
    for b in range(len(inputs)):
        caught: dict[str, tuple[Tensor, Tensor]] = {}

        def catch(module: nn.Module, args: Any, result: Tensor, caught: Any = caught) -> None:
            name = next(n for n, m in modules.items() if m is module)
            caught[name] = (args[0].detach(), result)

        hooks = [module.register_forward_hook(catch) for module in modules.values()]
        f = model(inputs[b : b + 1])[0]
        for hook in hooks:
            hook.remove()
        for k, seed in enumerate(root(f.detach())):
            grads = torch.autograd.grad((f * seed).sum(), [z for _, z in caught.values()], retain_graph=True)
            for (name, (a, _)), g in zip(caught.items(), grads, strict=True):
                a, g = positions(modules[name], a, g)
                if modules[name].bias is not None:
                    a = torch.cat([a, torch.ones(*a.shape[:2], 1, dtype=a.dtype)], 2)
                if sharing == "reduce":
                    a, g = a.mean(1, keepdim=True), g.sum(1, keepdim=True)
                out[name] = out[name] + sum(g[:, t, :, None] * g[:, t, None, :] for t in range(g.shape[1]))
                if k == 0:  # the inputs do not depend on the seed
                    inp[name] = inp[name] + sum(a[:, t, :, None] * a[:, t, None, :] for t in range(a.shape[1]))
                    rows[name] += a.shape[1]
    return {name: Factors(inp[name], out[name], rows[name]) for name in modules}
