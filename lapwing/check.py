"""Before fitting: what becomes of each parameter, and what each method would cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lapwing.core.data import TARGET_KEYS, Inputs, accepts, map_tensors
from lapwing.networks.blocks import Block, BlockJacobian, LinearJacobian, LookupJacobian
from lapwing.networks.network import Network
from lapwing.networks.normalised import ScaleFree, scale_free_groups
from lapwing.networks.selection import Weights
from lapwing.registry import weights_named

FULL_LIMIT = 30_000


@dataclass(frozen=True)
class Layer:
    """One block of parameters and how it is handled."""

    name: str
    size: int
    positions: int  # T: pixels, tokens or time steps that share the weight
    handled: str


@dataclass(frozen=True)
class Cost:
    """What a method would take: stored bytes, and the fit as a multiple of one plain forward and backward pass."""

    method: str
    supported: bool
    stored: int
    fit_epochs: float
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The result of ``check``; print it to read it."""

    weights: int
    outputs: tuple[int, ...]
    dtype: str
    layers: tuple[Layer, ...]
    costs: tuple[Cost, ...]
    scale_free: tuple[ScaleFree, ...] = ()  # groups whose scale the network ignores

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        lines = [f"{self.weights} uncertain weights, {self.dtype}, outputs {self.outputs} for each input", ""]
        lines.append(f"{'parameters':{width}s} {'weights':>10s} {'shared':>7s}  handled as")
        for layer in self.layers:
            lines.append(f"{layer.name:{width}s} {layer.size:10d} {layer.positions:7d}  {layer.handled}")
        if self.scale_free:
            lines += ["", "weights whose scale the network ignores (see per_normalised_group):"]
            lines += [f"  {group}" for group in self.scale_free]
        lines += ["", f"{'method':10s} {'stores':>10s} {'fit / epoch':>12s}"]
        for cost in self.costs:
            figures = (
                f"{_bytes(cost.stored):>10s} {cost.fit_epochs:12.1f}" if cost.supported else f"{'-':>10s} {'-':>12s}"
            )
            lines.append(f"{cost.method:10s} {figures}  {cost.note}".rstrip())
        lines += ["", "Costs are counted in multiplications, for a batch of this size; times on a machine differ."]
        return "\n".join(lines)


def check(model: nn.Module, batch: Inputs, weights: Weights | str | None = None) -> Report:
    """What Lapwing makes of this model: refusals, layers, fallbacks, memory and time of each method.

    ``batch`` is a batch of inputs, or ``(inputs, targets)``. Cost: a few forward passes and
    a backward one.

    >>> print(check(nn.Linear(3, 2), torch.zeros(4, 3)).layers[0].handled)
    linear map, with its bias
    """
    inputs = _inputs(model, batch)
    device = next(model.parameters()).device
    inputs = map_tensors(inputs, lambda t: t.to(device))
    network = Network.build(model, inputs, weights_named(weights))
    tangent = network.linearise(inputs)
    seed = torch.zeros_like(tangent.f).unsqueeze(0)
    layers, counts = [], _Counts(torch.Size(network.output_shape).numel())
    for block, jacobian in tangent.jacobians(seed):
        positions = jacobian.positions if isinstance(jacobian, LinearJacobian) else 1
        if isinstance(jacobian, LookupJacobian):
            positions = max(1, len(jacobian.rows) // jacobian.batch)
        layers.append(Layer("+".join(block.names), block.size, positions, _handled(block, jacobian)))
        counts.add(block, positions)
    size = network.selection.size
    return Report(
        size, network.output_shape, str(network.dtype).removeprefix("torch."), tuple(layers),
        counts.costs(size, 8 if network.dtype == torch.float64 else 4, network.selection.index is not None),
        scale_free_groups(network, inputs),
    )  # fmt: skip


def _inputs(model: nn.Module, batch: Inputs) -> Inputs:
    """The inputs alone: a pair is (inputs, targets) unless the model takes two arguments."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and not accepts(model, tuple(batch)):
        return batch[0]
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in TARGET_KEYS}
    return batch


def _handled(block: Block, jacobian: BlockJacobian) -> str:
    if isinstance(jacobian, LookupJacobian):
        return "embedding: indices, never one-hot"
    if block.linear:
        groups = f" in {block.groups} groups" if block.groups > 1 else ""
        return f"linear map{groups}" + (", with its bias" if block.bias else "")
    slow = "; slow: torch.func or single backward passes" if block.kind == "opaque" else ""
    return f"block of its own ({block.why}){slow}"


class _Counts:
    """Multiplications for each sample."""

    def __init__(self, outputs: int) -> None:
        self._seeds = outputs
        self._forward = self._backward = self._gram = self._diagonal = self._corrected = 0
        self._factors = self._blocks = 0

    def add(self, block: Block, positions: int) -> None:
        if not block.linear:
            self._blocks += block.size**2 if block.size <= 1024 else block.size
            self._gram += self._seeds * (block.size**2 if block.size <= 1024 else block.size)
            self._diagonal += self._seeds * block.size
            return
        product = positions * block.size
        if self._forward:  # the first layer needs no gradient of its input
            self._backward += product
        self._forward += product
        groups, d_out, d_in = block.form
        self._gram += positions * groups * (d_in**2 + self._seeds * d_out**2)
        self._diagonal += block.size if positions == 1 else self._seeds * product
        self._corrected += positions * groups * (d_in**2 + self._seeds * d_out**2)
        self._factors += groups * (d_in**2 + d_out**2)

    def costs(self, size: int, item: int, single: bool) -> tuple[Cost, ...]:
        epoch = max(1, 2 * self._forward + self._backward)
        seeded = self._forward + self._seeds * self._backward
        whole = size <= FULL_LIMIT
        none = "single weights have no Kronecker structure"
        kron, ekron = seeded + self._gram, 2 * seeded + self._gram + self._diagonal + self._corrected
        basis = 2 * 32
        return (
            Cost("Full", whole, 8 * size**2, (seeded + self._seeds * size**2) / epoch,
                 "" if whole else f"over {FULL_LIMIT} weights: choose fewer"),
            Cost("Kron", not single, item * (self._factors + self._blocks), kron / epoch, none if single else ""),
            Cost("EKron", not single, item * (self._factors + size), ekron / epoch, none if single else "two passes"),
            Cost("Diagonal", True, item * size, (seeded + self._diagonal) / epoch),
            Cost("LowRank", True, 8 * 32 * size, 4 * basis * self._forward / epoch, "rank 32"),
            Cost("MapOnly", True, 0, self._forward / epoch, "no error bars from the weights"),
        )  # fmt: skip


def _bytes(count: int) -> str:
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
