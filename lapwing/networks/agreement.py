"""A comparison of the Jacobian of a batch with autograd's, for the first batch of every graph.

Rules read the Jacobian from the graph, and a rule may be wrong for a network that nobody thought of. So for random u
and random weights c of the samples, Σ_b c_b J_bᵀ u_b is compared, for each parameter, with the gradient of
Σ_b c_b u_b · f_b. The weights show rows that were given to another sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.errors import ModelError
from lapwing.networks.forward import plain_kernels, raw_output, recording
from lapwing.networks.uses import Node

if TYPE_CHECKING:
    from lapwing.networks.tangent import Tangent

# Both ways round differently: by up to 25 eps of a parameter's gradient in the networks of the tests, in all dtypes,
# and where its terms cancel by 2 eps of the largest gradient, entry by entry. A Jacobian of zero is off by one.
OWN, POWER, MOST_OWN = 32.0, 0.75, 0.25  # 2e-4 of its own gradient in float32, 6e-11 in float64, a quarter in 16 bits
TOP, MOST_TOP = 64.0, 0.1  # units of the largest gradient


def refuse_wrong_jacobian(tangent: Tangent) -> None:
    """Raise ``ModelError`` unless the Jacobian of the batch agrees with autograd for each parameter.

    Cost: two backward passes with one seed, one by the rules and one by autograd.
    """
    u, c = _directions(tangent)
    with torch.no_grad():
        expected = _by_autograd(tangent, u, c)
        off = _differing(_by_rules(tangent, u, c), expected, tangent)
    if off is not None:
        name, gap, allowed = off
        raise ModelError(
            f"the Jacobian of {name!r} that Lapwing reads from the graph of this batch differs from autograd's by "
            f"{gap:.2g} of its size; expected rounding, at most {allowed:.1g}. An operation of the model is not "
            "handled right: leave the parameter out with named(), and please report the model."
        )


def refuse_kept_values(tangent: Tangent) -> None:
    """Raise ``ModelError`` if the outputs follow a parameter by a value that the model keeps from an earlier run.

    Then a gradient reaches the parameter in the graph, and not where other values are put in its place. Cost: a forward
    and a backward pass.
    """
    network = tangent.network
    u, c = _directions(tangent)
    with torch.no_grad():
        expected = _by_autograd(tangent, u, c)
    values = {name: network.parameters[name].detach().requires_grad_() for name in network.selection.names}
    with recording(network.parameters, (), network.plain):
        raw = raw_output(network.replica, tangent.inputs, values)
        seed = (u[0] * c).reshape(raw.shape)
        grads = torch.autograd.grad(raw, list(values.values()), seed, allow_unused=True) if raw.requires_grad else ()
    with torch.no_grad():
        off = _differing((dict.fromkeys(values) | dict(zip(values, grads, strict=False))).items(), expected, tangent)
    if off is not None:
        raise ModelError(
            f"the outputs do not follow {off[0]!r} where it is changed: the model keeps a value that it computed from "
            "it in an earlier run (in a closure or a global variable); expected a function of the parameters in every "
            "run. Compute the value in forward, or leave the parameter out with named()."
        )


def _directions(tangent: Tangent) -> tuple[Tensor, Tensor]:
    """Return u (1, B, [T,] C) and c (B, [1,] 1), always the same for a shape."""
    f, generator = tangent.network_output.detach(), torch.Generator().manual_seed(0)
    u = torch.randn((1, *f.shape), generator=generator)
    c = 0.5 + torch.rand((len(f), *(1,) * (f.ndim - 1)), generator=generator)
    return u.to(f), c.to(f)


def _by_rules(tangent: Tangent, u: Tensor, c: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield Σ_b c_b J_bᵀ u_b for each parameter with its name, one block after another."""
    layout = tangent.network.layout
    jacobians = tangent.unchecked(u, every=True)
    weights = c.reshape(1, -1, 1).to(jacobians.dtype)
    for number, (block, part) in enumerate(zip(layout, jacobians.parts, strict=True)):
        if tangent.differentiable and number in tangent.fallen:
            continue  # refused where it is needed
        flat = part().vjp(weights).reshape(1, *block.form).detach()
        yield from ((name, values[0]) for name, values in block.spread(flat))


def _by_autograd(tangent: Tangent, u: Tensor, c: Tensor) -> dict[str, Tensor]:
    """Return the gradient of Σ_b c_b u_b · f_b, by parameter; none for those that are not in the graph."""
    nodes: list[Node] = list(tangent.graph.leaves)
    seed = (u[0] * c).reshape(tangent.raw.shape).to(tangent.raw)
    with plain_kernels(tangent.network.plain):
        edges = [GradientEdge(node, 0) for node in nodes]
        grads = torch.autograd.grad(tangent.raw, edges, seed, retain_graph=True, allow_unused=True)
    pairs = zip((tangent.graph.leaves[node] for node in nodes), grads, strict=True)
    return {name: grad.to_dense() if grad.is_sparse else grad for name, grad in pairs if grad is not None}


def _differing(
    found: Iterable[tuple[str, Tensor | None]], expected: Mapping[str, Tensor], tangent: Tangent
) -> tuple[str, float, float] | None:
    """Return a parameter whose gradients differ beyond rounding, the relative gap and the one allowed; None if none."""
    zero, figures = torch.zeros((), dtype=torch.float64, device=tangent.raw.device), {}
    for name, values in found:
        pair = (values, expected.get(name))
        ours, autograd = (zero if each is None else each.reshape(-1).double() for each in pair)
        size = max(ours.numel(), autograd.numel()) ** 0.5
        figures[name] = torch.stack([(ours - autograd).norm(), ours.norm(), autograd.norm()]) / size
    eps = _rounding(tangent)
    numbers = torch.stack(list(figures.values())).tolist() if figures else []
    rows = {name: row for name, row in zip(figures, numbers, strict=True) if isfinite(row[2])}
    top = max((row[2] for row in rows.values()), default=0.0)
    own, floor = min(MOST_OWN, OWN * eps**POWER), min(MOST_TOP, TOP * eps) * top
    for name, (gap, ours, autograd) in rows.items():  # gradients that overflow say nothing
        scale = max(ours, autograd)
        if not gap <= own * scale + floor:
            return name, gap / scale, own
    return None


def _rounding(tangent: Tangent) -> float:
    """Return the rounding unit of the coarsest arithmetic by which the outputs were computed."""
    dtypes = {tangent.network.arithmetic, tangent.raw.dtype}
    for node in tangent.graph.operations:
        dtypes |= {part.dtype for part in node._input_metadata if part.dtype.is_floating_point}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if torch.float64 in dtypes and len(dtypes) == 1:
        return eps
    if torch.get_float32_matmul_precision() == "medium":
        return max(eps, torch.finfo(torch.bfloat16).eps)
    return eps if tangent.raw.is_cpu else max(eps, 2**-10)  # GPUs may multiply float32 with ten digits
