"""Before fitting: what becomes of each parameter, and what each method would cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lapwing.core.data import TARGET_KEYS, Inputs, accepts, batch_size, map_tensors
from lapwing.errors import DataError
from lapwing.methods.full import Full
from lapwing.methods.hfl.hessian import DENSE
from lapwing.methods.hfl.hfl import EXACT
from lapwing.methods.inducing.ella import ELLA
from lapwing.methods.inducing.valla import STEPS, VaLLA
from lapwing.methods.kernel_space import KernelSpace
from lapwing.methods.kron import Kron
from lapwing.methods.low_rank import LowRank
from lapwing.methods.sampled import BASIS, Sampled
from lapwing.networks.blocks import Block, BlockJacobian, LinearJacobian, LookupJacobian
from lapwing.networks.network import Network
from lapwing.networks.normalised import ScaleFree, scale_free_groups
from lapwing.networks.selection import Weights
from lapwing.registry import weights_named


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
    data: int = 0  # how many data the costs are for

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        lines = [f"{self.weights} uncertain weights, {self.dtype}, outputs {self.outputs} for each input", ""]
        lines.append(f"{'parameters':{width}s} {'weights':>10s} {'shared':>7s}  handled as")
        for layer in self.layers:
            lines.append(f"{layer.name:{width}s} {layer.size:10d} {layer.positions:7d}  {layer.handled}")
        if self.scale_free:
            lines += ["", "weights whose scale the network ignores (see per_normalised_group):"]
            lines += [f"  {group}" for group in self.scale_free]
        lines += ["", f"{'method':11s} {'stores':>10s} {'fit / epoch':>12s}"]
        for cost in self.costs:
            figures = (
                f"{_bytes(cost.stored):>10s} {cost.fit_epochs:12.1f}" if cost.supported else f"{'-':>10s} {'-':>12s}"
            )
            lines.append(f"{cost.method:11s} {figures}  {cost.note}".rstrip())
        lines += ["", f"Costs are counted in multiplications, for {self.data} data; times on a machine differ."]
        return "\n".join(lines)


def check(model: nn.Module, batch: Inputs, weights: Weights | str | None = None, *, data: int | None = None) -> Report:
    """What Lapwing makes of this model: refusals, layers, fallbacks, memory and time of each method.

    ``batch`` is a batch of inputs, or ``(inputs, targets)``; ``data`` is how many there will be in the fit, as many as
    in the batch where None. Cost: a few forward passes and a backward one, and up to four more forward passes for each
    layer, which show what scales the network ignores.

    >>> print(check(nn.Linear(3, 2), torch.zeros(4, 3)).layers[0].handled)
    linear map, with its bias
    """
    if data is not None and data < 1:
        raise DataError(f"data is {data}; expected the number of training data, at least 1.")
    inputs = _inputs(model, batch)
    device = next(model.parameters()).device
    inputs = map_tensors(inputs, lambda t: t.to(device))
    network = Network.build(model, inputs, weights_named(weights))
    tangent = network.linearise(inputs)
    seed = torch.zeros_like(tangent.f).unsqueeze(0)
    layers, counts = [], _Counts(network)
    for block, jacobian in tangent.jacobians(seed):
        positions = jacobian.positions if isinstance(jacobian, LinearJacobian) else 1
        if isinstance(jacobian, LookupJacobian):
            positions = max(1, len(jacobian.rows) // jacobian.batch)
        layers.append(Layer("+".join(block.names), block.size, positions, _handled(block, jacobian)))
        counts.add(block, positions)
    size, count = network.selection.size, batch_size(inputs) if data is None else data
    return Report(
        size, network.output_shape, str(network.dtype).removeprefix("torch."), tuple(layers),
        counts.costs(size, 8 if network.dtype == torch.float64 else 4, network.selection.index is not None, count),
        scale_free_groups(network, inputs), count,
    )  # fmt: skip


def _inputs(model: nn.Module, batch: Inputs) -> Inputs:
    """The inputs alone: a pair is (inputs, targets) unless the model needs two arguments."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and _alone(model, batch[0]):
        return batch[0]
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in TARGET_KEYS}
    return batch


def _alone(model: nn.Module, inputs: Inputs) -> bool:
    if isinstance(inputs, tuple | list) and accepts(model, tuple(inputs)):
        return True
    return isinstance(inputs, Mapping) or accepts(model, (inputs,))


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

    def __init__(self, network: Network) -> None:
        self._network, self._seeds = network, torch.Size(network.output_shape).numel()
        self._forward = self._backward = self._gram = self._diagonal = self._corrected = 0
        self._factors = self._blocks = 0
        self._kernel = self._held = 0  # for one entry of the tangent kernel; numbers kept of one output's gradient

    def add(self, block: Block, positions: int) -> None:
        if not block.linear:
            stored = block.size**2 if block.size <= Kron().full_limit else block.size
            self._blocks += stored
            self._gram += self._seeds * stored
            self._diagonal += self._seeds * block.size
            self._kernel += block.size
            self._held += block.size
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
        one = groups * (d_in + d_out) if positions == 1 else block.size  # layer factors, or the rows themselves
        self._kernel += one
        self._held += one

    def costs(self, size: int, item: int, single: bool, data: int) -> tuple[Cost, ...]:
        epoch = max(1, 2 * self._forward + self._backward)
        seeded = self._forward + self._seeds * self._backward
        limit, rank = Full().limit, LowRank().rank
        whole = size <= limit
        none = "single weights have no Kronecker structure"
        kron, ekron = seeded + self._gram, 2 * seeded + self._gram + self._diagonal + self._corrected
        return (
            Cost("Full", whole, 8 * size**2, (seeded + self._seeds * size**2) / epoch,
                 "" if whole else f"over {limit} weights: choose fewer"),
            Cost("Kron", not single, item * (self._factors + self._blocks), kron / epoch, none if single else ""),
            Cost("EKron", not single, item * (self._factors + size), ekron / epoch, none if single else "two passes"),
            Cost("Diagonal", True, item * size, (seeded + self._diagonal) / epoch),
            Cost("LowRank", True, 8 * rank * size, 8 * rank * self._forward / epoch, f"rank {rank}"),
            self._kernel_space(size, data, epoch, seeded),
            self._sampled(size, epoch, seeded),
            self._ella(size, data, epoch, seeded),
            self._valla(size, data, epoch, seeded),
            self._hfl(size, epoch),
            Cost("MapOnly", True, 0, self._forward / epoch, "no error bars from the weights"),
        )  # fmt: skip

    def _kernel_space(self, size: int, data: int, epoch: int, seeded: int) -> Cost:
        """The kernel of all outputs of all data and its eigenvectors."""
        rows, limit = data * self._seeds, KernelSpace().limit
        work = seeded + self._seeds * (2 * rows * size + 9 * rows**2)
        note = f"{rows} rows" if rows <= limit else f"{rows} rows, over {limit}: fewer data"
        return Cost("KernelSpace", rows <= limit, 8 * min(rows, size) * size, work / epoch, note)

    def _sampled(self, size: int, epoch: int, seeded: int) -> Cost:
        count, basis = Sampled().num_samples, min(BASIS, size)
        vectors = basis + 2 * count
        work = seeded + 4 * vectors * self._forward
        return Cost("Sampled", True, 8 * vectors * size, work / epoch, f"{count} samples, a basis of {basis}")

    def _ella(self, size: int, data: int, epoch: int, seeded: int) -> Cost:
        points = min(ELLA().num_landmarks, data * self._seeds)
        rank = min(ELLA().rank, points, size)
        once = self._placed(points) + 9 * points**3 + rank * points * self._held
        work = once / data + seeded + 2 * rank * self._forward
        return Cost("ELLA", True, 8 * rank * size, work / epoch, f"rank {rank}, {points} landmarks")

    def _valla(self, size: int, data: int, epoch: int, seeded: int) -> Cost:
        """Greedy points, learned on all data where they are few and else on batches; one pass at the end."""
        method, rows = VaLLA(), data * self._seeds
        points = min(method.num_inducing, rows)
        pairs = self._seeds * points * self._kernel  # of one datum with the points
        once = self._placed(min(max(method.candidates, points), rows))
        note = f"{points} points"
        if points < rows:
            optimiser = method.optimiser_for(self._network, rows)
            few, steps = optimiser == "lbfgs", STEPS[optimiser]
            batch = data if few else min(method.batch_size, data)
            again = points * (4 * epoch + 3 * points * self._kernel + points**2)  # the points and their kernel
            once += steps * (batch * ((0 if few else seeded) + 3 * pairs) + again)
            note += f", {steps} steps of {batch} data"
        stored = 8 * (points * (self._held + points) + size)
        return Cost("VaLLA", True, stored, (once / data + seeded + pairs) / epoch, note)

    def _placed(self, points: int) -> int:
        """Gradients of one output at each point, and their kernel."""
        return points * (self._forward + self._backward) + points**2 * self._kernel

    def _hfl(self, size: int, epoch: int) -> Cost:
        """Two Newton steps and the Hessian at their end: two gradients for each product with it."""
        if size > EXACT:
            return Cost("HFL", True, 8 * size, self._forward / epoch, "by Adam, at every prediction")
        dense = size <= DENSE
        products = 3 * (size if dense else 100)
        note = "at every prediction some tens of epochs for each output"
        return Cost("HFL", True, 8 * size * (size + 1 if dense else 1), 2.0 * products, note)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
