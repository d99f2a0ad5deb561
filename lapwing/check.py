"""A report before fitting: how each parameter is handled, and what each method would cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lapwing.core.data import TARGET_KEYS
from lapwing.core.inputs import Inputs, accepts, moved
from lapwing.core.settings import NONE, Rule, is_integer
from lapwing.errors import DataError
from lapwing.methods.protocol import Cost, HasCost
from lapwing.methods.workload import workload_of
from lapwing.networks.forward import device_of, outside_autocast
from lapwing.networks.network import Network
from lapwing.networks.normalised import ScaleFree, scale_free_groups
from lapwing.networks.selection import Weights
from lapwing.registry import METHODS, named


@dataclass(frozen=True)
class Layer:
    """One block of parameters and how it is handled."""

    name: str
    size: int
    positions: int  # T: pixels, tokens or time steps that share the weight
    handled: str


@dataclass(frozen=True)
class Report:
    """The result of ``check``; print it to read it."""

    weights: int
    outputs: tuple[int, ...]
    dtype: str
    layers: tuple[Layer, ...]
    costs: Mapping[str, Cost]  # by the name of the method's class
    scale_free: tuple[ScaleFree, ...] = ()  # groups of weights whose scale does not change the outputs
    data: int = 0  # the number of data that the costs are for
    unknown: tuple[str, ...] = field(default=())  # registered methods that do not say what they cost

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        lines = [f"{self.weights} uncertain weights, {self.dtype}, outputs {self.outputs} for each input", ""]
        lines.append(f"{'parameters':{width}s} {'weights':>10s} {'shared':>7s}  handled as")
        for layer in self.layers:
            lines.append(f"{layer.name:{width}s} {layer.size:10d} {layer.positions:7d}  {layer.handled}")
        if self.scale_free:
            lines += ["", "weights whose scale the network ignores (see per_normalised_group):"]
            lines += [f"  {group}" for group in self.scale_free]
        width = max(len(name) for name in ("KernelSpace", *self.costs, *self.unknown))
        none = f"{'-':>10s} {'-':>12s}"
        lines += ["", f"{'method':{width}s} {'stores':>10s} {'fit / epoch':>12s}"]
        for name, cost in self.costs.items():
            figures = f"{_bytes(cost.stored):>10s} {cost.fit_epochs:12.1f}" if cost.supported else none
            lines.append(f"{name:{width}s} {figures}  {cost.note}".rstrip())
        lines += [f"{name:{width}s} {none}  cost unknown" for name in self.unknown]
        lines += ["", f"Costs are counted in multiplications, for {self.data} data; times on a machine differ."]
        return "\n".join(lines)


@outside_autocast
def check(model: nn.Module, batch: Inputs, *, weights: Weights | str | None = None, data: int | None = None) -> Report:
    """Report how Lapwing handles a model, and the memory and time of each registered method, without fitting one.

    Args:
        model: The network, in evaluation mode.
        batch: A few inputs as ``fit`` takes them, or ``(inputs, targets)``.
        weights: The choice of weights, as in ``fit``; all by default.
        data: The number of training data that the costs are for; as many as in the batch by default.

    Returns:
        The layers, the groups of weights whose scale the network ignores, and the costs; print it to read it.

    Raises:
        DataError: If ``data`` is below 1, or the batch cannot be used.
        ModelError: If ``fit`` would refuse the model, with the same message.

    Cost: a few forward passes and one backward pass, and up to four more forward passes for each layer, to see which
    scales the network ignores.

    >>> import torch
    >>> report = check(nn.Linear(3, 2), torch.zeros(4, 3))
    >>> report.layers[0].handled
    'linear map, with its bias'
    >>> report.costs["Full"].stored
    512
    """
    whole = Rule("the number of training data, at least 1", lambda v: is_integer(v) and v >= 1, DataError)
    (whole | NONE).check("data", data)
    device = device_of(model)
    inputs = moved(_inputs(model, batch), lambda t: t.to(device))
    network = Network.build(model, inputs, named("weights", weights))
    workload = workload_of(network, inputs, data)
    layers = [
        Layer("+".join(block.names), block.size, work.positions, block.handling)
        for block, work in zip(network.layout, workload.blocks, strict=True)
    ]
    methods = [kind() for kind in METHODS.values()]
    return Report(
        workload.weights, network.output_shape, str(network.dtype).removeprefix("torch."), tuple(layers),
        {type(method).__name__: method.cost(workload) for method in methods if isinstance(method, HasCost)},
        scale_free_groups(network, inputs), workload.data,
        tuple(type(method).__name__ for method in methods if not isinstance(method, HasCost)),
    )  # fmt: skip


def _inputs(model: nn.Module, batch: Inputs) -> Inputs:
    """Return the inputs alone: a pair is (inputs, targets) unless the model needs two arguments."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in TARGET_KEYS}
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return batch
    first = batch[0]
    suffices = isinstance(first, Mapping) or accepts(model, (first,))
    if isinstance(first, tuple | list):
        suffices = suffices or accepts(model, tuple(first))
    return first if suffices else batch


def _bytes(count: int) -> str:
    """Write a number of bytes in a unit that fits."""
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
