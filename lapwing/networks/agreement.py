"""A comparison of the Jacobian of a batch with autograd's, for the first batch of every graph.

Rules read the Jacobian from the graph, and a rule may be wrong for a network that nobody thought of. So for random u
and random weights c of the samples, Σ_b c_b J_bᵀ u_b is compared, for each parameter, with the gradient of
Σ_b c_b u_b · f_b. The weights show rows that were given to another sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lapwing.errors import ModelError
from lapwing.networks.examine import EXAMINED, relative_gap
from lapwing.networks.forward import copy_modules, output_without_graph, raw_output, recording, select_kernels
from lapwing.networks.graph import kept_value_message
from lapwing.networks.rules import Node

if TYPE_CHECKING:
    from lapwing.networks.tangent import Tangent

# Both ways round differently: by up to 25 eps of a parameter's gradient in the networks of the tests, in all dtypes,
# and where its terms cancel by 2 eps of the largest gradient, entry by entry. A Jacobian of zero is off by one.
OWN, POWER, MOST_OWN = 32.0, 0.75, 0.25  # 2e-4 of its own gradient in float32, 6e-11 in float64, a quarter in 16 bits
TOP, MOST_TOP = 64.0, 0.1  # units of the largest gradient
PARTS = {"_parameters", "_buffers", "_modules"}
ABSENT = object()


def compare(tangent: Tangent, first: bool) -> None:
    """Raise ``ModelError`` unless the Jacobian of the batch agrees with autograd for each parameter.

    ``first`` says that the model has not been compared before. Cost: two backward passes with one seed, one by the
    rules and one by autograd; at first also those of ``_refuse_kept_values``. A few samples are enough if their graph
    has the form of the whole batch's.
    """
    if len(tangent.raw) > EXAMINED:
        network = tangent.network
        few = network.linearise(network.take(tangent.inputs, slice(0, EXAMINED)), tangent.differentiable)
        tangent = few if few.graph.form == tangent.graph.form else tangent
    u, c = _directions(tangent)
    with torch.no_grad():
        expected = _by_autograd(tangent, u, c)
    if first:
        _refuse_kept_values(tangent, u[0] * c, expected)
    with torch.no_grad():
        off = _differing(_by_rules(tangent, u, c), expected, tangent)
    if off is not None:
        name, gap, allowed = off
        raise ModelError(
            f"the Jacobian of {name!r} that Lapwing reads from the graph of this batch differs from autograd's by "
            f"{gap:.2g} of its size; expected rounding, at most {allowed:.1g}. An operation of the model is not "
            "handled right: leave the parameter out with named(), and please report the model."
        )


def _refuse_kept_values(tangent: Tangent, seed: Tensor, expected: Mapping[str, Tensor]) -> None:
    """Raise ``ModelError`` if the outputs follow a parameter by a value that the model keeps from an earlier run.

    Then the gradient in the parameter, or the output where the gradient is zero, is another one where other values are
    put in its place, or where the modules start without the tensors that they keep beside their parameters. Cost: a
    forward and two backward passes; three forward passes more where a parameter has no gradient; and as much for each
    tensor that is kept.
    """
    network = tangent.network
    names, plain_kernels = network.selection.names, network.plain_kernels

    def differing(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> str:
        """Return a parameter whose gradient is another one in a run of this model, or ""."""
        with recording(network.parameters, names if values is None else (), plain_kernels):
            raw = raw_output(model, tangent.inputs, values)
        tensors = dict(model.named_parameters())
        leaves = {name: tensors[name] for name in names} if values is None else values
        off = _differing(_gradients(raw, leaves, seed, plain_kernels), expected, tangent)
        return off[0] if off is not None and _same(model, raw, tangent.raw) else ""

    name = differing(network.replica, {name: network.parameters[name].detach().requires_grad_() for name in names})
    if name:
        raise ModelError(kept_value_message(name, " (in a closure, or in an object that is not a module)"))
    if not network.private:
        return
    silent = {name: _moved(network.parameters[name]) for name in names if name not in expected}

    def follows(model: nn.Module) -> bool:
        """Return whether the outputs change with the parameters that have no gradient."""
        with torch.no_grad(), select_kernels(plain_kernels):
            return not _same(model, raw_output(model, tangent.inputs, silent), tangent.raw)

    if silent and follows(copy_modules(network.replica)):
        used = copy_modules(network.replica)
        output_without_graph(used, tangent.inputs, plain_kernels)
        if not follows(used):
            raise ModelError(kept_value_message(next(iter(silent)), ", without a gradient"))
    for where, emptied in _emptied(network.replica):
        with contextlib.suppress(Exception):  # a model that needs the tensor may raise anything
            name = differing(emptied())
            name = name or (next(iter(silent)) if silent and follows(emptied()) else "")
        if name:
            raise ModelError(kept_value_message(name, f" ({where})"))


def _same(model: nn.Module, raw: Tensor, before: Tensor) -> bool:
    """Return whether two runs gave the same outputs, up to rounding."""
    if raw.shape != before.shape:
        return False
    gap, allowed = relative_gap(model, raw.detach(), before.detach(), before.detach())
    return bool(gap < allowed)


def _moved(parameter: Tensor) -> Tensor:
    """Return other values for a parameter, of the same size and always the same."""
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(parameter)
    return parameter.detach() + noise * (parameter.detach().abs().amax() + 0.1)


def _emptied(replica: nn.Module) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield the place of each tensor that a module keeps beside its parameters, and a maker of copies without it.

    A place that is empty at first may hold None, or not be there.
    """

    def emptied(name: str, key: str, fill: Any) -> nn.Module:
        model = copy_modules(replica)
        part = model.get_submodule(name)
        content = vars(part) if key in vars(part) else part._buffers
        content[key] = fill
        if fill is ABSENT:
            del content[key]
        return model

    for name, module in replica.named_modules():
        inside = type(module).__module__.startswith("torch.nn.")
        own = {key: value for key, value in vars(module).items() if key not in PARTS and "_hooks" not in key}
        for key, value in (*own.items(), *({} if inside else module._buffers).items()):
            if any(t.is_floating_point() for t in _held(value)):
                where = f"the attribute {key!r} of {f'the module {name!r}' if name else 'the model'}"
                for fill in (None, ABSENT) if isinstance(value, Tensor) else (type(value)(),):
                    yield where, partial(emptied, name, key, fill)


def _held(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors in an attribute, which is one or a collection of some."""
    parts = value.values() if isinstance(value, dict) else value if type(value) in (list, set) else (value,)
    return tuple(part for part in parts if isinstance(part, Tensor))


def _gradients(
    raw: Tensor, leaves: Mapping[str, Tensor], seed: Tensor, plain_kernels: bool
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the gradient of seed · raw for each leaf, with its name."""
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if raw.requires_grad:
        with select_kernels(plain_kernels):
            grads = torch.autograd.grad(raw, list(leaves.values()), seed.reshape(raw.shape).to(raw), allow_unused=True)
    return zip(leaves, (g.to_dense() if g is not None and g.is_sparse else g for g in grads), strict=True)


def _directions(tangent: Tangent) -> tuple[Tensor, Tensor]:
    """Return u (1, B, [T,] C) and c (B, [1,] 1), always the same for a shape."""
    f, generator = tangent.network_output.detach(), torch.Generator().manual_seed(0)
    u = torch.randn((1, *f.shape), generator=generator)
    c = 0.5 + torch.rand((len(f), *(1,) * (f.ndim - 1)), generator=generator)
    return u.to(f), c.to(f)


def _by_rules(tangent: Tangent, u: Tensor, c: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield Σ_b c_b J_bᵀ u_b for each parameter with its name, one block after another."""
    layout = tangent.network.layout
    jacobians = tangent.jacobians_unchecked(u, every=True)
    weights = c.reshape(1, -1, 1).to(jacobians.dtype)
    for number, (block, part) in enumerate(zip(layout, jacobians.parts, strict=True)):
        if tangent.differentiable and number in tangent.fallback_blocks:
            continue  # refused where it is needed
        flat = part().vjp(weights).reshape(1, *block.form).detach()
        yield from ((name, values[0]) for name, values in block.split(flat))


def _by_autograd(tangent: Tangent, u: Tensor, c: Tensor) -> dict[str, Tensor]:
    """Return the gradient of Σ_b c_b u_b · f_b, by parameter; none for those that are not in the graph."""
    nodes: list[Node] = list(tangent.graph.leaves)
    seed = (u[0] * c).reshape(tangent.raw.shape).to(tangent.raw)
    with select_kernels(tangent.network.plain_kernels):
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
