"""A report before fitting: how each parameter is handled, what each method would take, and the method to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lapwing.data.batches import TARGET_KEYS
from lapwing.data.inputs import Batch, Inputs, accepts_arguments, as_tensors, move_inputs
from lapwing.errors import DataError
from lapwing.likelihoods.base import Likelihood
from lapwing.methods.base import Cost, Workload, bytes_text, seconds_text, workload_of
from lapwing.networks.forward import arithmetic_of, device_of, extract_network, outside_autocast, path_of
from lapwing.networks.network import Network
from lapwing.networks.normalised import ScaleFree, scale_free_groups
from lapwing.networks.selection import Weights
from lapwing.priors import Isotropic
from lapwing.problem import Problem
from lapwing.registry import METHODS, Auto, Choice, find_likelihood, find_weights
from lapwing.runtime.settings import FLAG, NONE, Rule, is_integer, of_class
from lapwing.trials import Trials

AUTO = of_class("the limits of the choice, such as lw.Auto(memory=2**30, seconds=60)", Auto)
NAMES = Rule(
    f"a list of names of methods, out of {', '.join(METHODS)}",
    lambda v: isinstance(v, list | tuple) and all(isinstance(name, str) and name in METHODS for name in v),
)


MEASURED = "fit        time of the fit, measured and extrapolated"
LEGEND = """\
shared     pixels, tokens or time steps of an input that use the same weight
stores     memory of the posterior
peak       memory held at most by the fit and a prediction, besides model and data
fit/epoch  time of the fit in epochs: plain forward and backward passes over the data
predict/f  time of a prediction in plain forward passes"""

BRIEF = """\
stores, peak: memory of the posterior, and at most of fit and prediction; fit/epoch: time of the fit in plain epochs;
predict/f: time of a prediction in plain forward passes"""
MORE = "print(report.details()) has all parameters, all methods, and what the columns mean."
USUAL = ("Kron", "Diagonal", "Full", "Sampled", "Ensemble")  # methods that are compared most often
MOST, NAMED = 5, 4  # rows of the short table, and names in a line


@dataclass(frozen=True)
class Layer:
    """One block of parameters and how it is handled."""

    name: str
    size: int
    positions: int  # T: pixels, tokens or time steps that share the weight
    handled: str


@dataclass(frozen=True)
class CheckReport:
    """The result of ``check``; print it to read it."""

    weights: int
    outputs: tuple[int, ...]
    dtype: str
    layers: tuple[Layer, ...]
    costs: Mapping[str, Cost]  # by the name of the method's class
    recommended: Choice  # the method that ``Auto`` would take for these data, and why
    workload: Workload = field(repr=False)  # for the cost of other settings: lw.Kron(sharing="reduce").cost(workload)
    scale_free: tuple[ScaleFree, ...] = ()  # groups of weights whose scale does not change the outputs
    inputs: int = 0  # the number of inputs of a prediction
    unknown: tuple[str, ...] = field(default=())  # registered methods that do not say what they cost
    timed: bool = False  # whether methods were timed on the batch

    @property
    def data(self) -> int:
        """The number of data that the costs are for."""
        return self.workload.data

    def __str__(self) -> str:
        """Return the recommendation and at most fifteen lines; ``details`` has everything."""
        most = list(dict.fromkeys([type(self.recommended.method).__name__, *USUAL]))[:MOST]
        lines = [
            f"Recommended: {self.recommended.why}",
            f"{self.weights:,} weights get error bars, in {len(self.layers)} blocks; outputs {self.outputs} for each "
            f"input, {self.dtype}",
        ]
        slow = [layer.name for layer in self.layers if "slow" in layer.handled]
        lines += [f"Parameters without a rule, which make it slow: {_list(slow)}"] if slow else []
        free = [group.parameters[0] for group in self.scale_free]
        lines += [f"Norm layers cancel the scale of these weights: {_list(free)}"] if free else []
        brief = f"{BRIEF}; fit: time of the fit" if self.timed else BRIEF
        return "\n".join([*lines, "", *self._table(most), "", brief, self._basis(), MORE])

    def details(self) -> str:
        """Return all parameters with how they are handled, the costs of all methods, and what the columns mean.

        >>> print(check(nn.Linear(3, 2), torch.zeros(4, 3)).details().splitlines()[4])
        weight+bias          8       1  linear map, with its bias
        """
        width = max(len(layer.name) for layer in self.layers)
        lines = [f"Recommended: {self.recommended.why}", ""]
        lines.append(f"{self.weights:,} weights get error bars; outputs {self.outputs} for each input, {self.dtype}")
        lines.append(f"{'parameters':{width}s} {'weights':>10s} {'shared':>7s}  handled as")
        for layer in self.layers:
            lines.append(f"{layer.name:{width}s} {layer.size:10,d} {layer.positions:7,d}  {layer.handled}")
        if self.scale_free:
            lines += ["", "weights whose scale the network ignores (see per_normalised_group):"]
            lines += [f"  {group}" for group in self.scale_free]
        legend = [LEGEND, MEASURED] if self.timed else [LEGEND]
        return "\n".join([*lines, "", *self._table([*self.costs, *self.unknown]), "", *legend, "", self._basis()])

    def _table(self, names: Sequence[str]) -> list[str]:
        """Return the lines of a table of these methods."""
        columns = ["stores", "peak", "fit/epoch", "predict/f", *(["fit"] if self.timed else [])]
        row = f"{{:{max(map(len, names))}s}} " + " ".join(["{:>9s}"] * len(columns)) + "  {}"
        lines = [row.format("method", *columns, "").rstrip()]
        for name in names:
            cost = self.costs.get(name)
            figures = ["-"] * len(columns)
            if cost is not None and cost.supported:
                seconds = "-" if cost.fit_seconds is None else seconds_text(cost.fit_seconds)
                sizes = bytes_text(cost.stored), bytes_text(cost.peak)
                figures = [*sizes, _ratio(cost.fit_epochs), _ratio(cost.predict_passes), seconds][: len(columns)]
            lines.append(row.format(name, *figures, "cost unknown" if cost is None else cost.note).rstrip())
        return lines

    def _basis(self) -> str:
        """Return what the figures are for, and where they are from."""
        what = f"For {self.data:,} data and predictions of {self.inputs:,} inputs"
        if self.timed:
            return f"{what}, extrapolated from times on this machine with one batch."
        return f"{what}, counted in operations; timed=True measures on one batch."


@outside_autocast
@torch.inference_mode(False)
def check(
    model: nn.Module,
    batch: Inputs,
    *,
    likelihood: Likelihood | str | None = None,
    weights: Weights | str | None = None,
    data: int | None = None,
    auto: Auto | None = None,
    timed: bool | Sequence[str] = False,
    output: str | int | tuple[str | int, ...] | None = None,
) -> CheckReport:
    """Report how Lapwing handles a model, the memory and time of each method, and the one to choose; fit nothing.

    Args:
        model: The network, in evaluation mode.
        batch: A few inputs as ``fit`` takes them, or ``(inputs, targets)``.
        likelihood: As for ``fit``, for the predictions that are timed and the method that is recommended;
            "classification" for several outputs and "regression" for one if None.
        weights: The choice of weights, as in ``fit``; all by default.
        data: The number of training data that the costs are for; as many as in the batch by default.
        auto: The limits under which the recommended method is chosen; ``lw.Auto()`` by default.
        timed: Whether to fit every method to the batch and predict it, for times on this machine; or the names of the
            methods for which to do so, such as ``["kron", "diagonal"]``. A method whose trial would take more than
            ten seconds is counted at the speed of plain passes.
        output: Which of several outputs of the model, as in ``fit``.

    Returns:
        The layers, the groups of weights whose scale the network ignores, the costs, and the recommended method; print
        it to read it.

    Raises:
        DataError: If ``data`` is below 1, or the batch cannot be used.
        ModelError: If ``fit`` would refuse the model, with the same message.
        UnsupportedError: If another argument is not one of the above.

    Cost: a few forward and backward passes, and up to four more forward passes for each layer, to see which scales
    the network ignores. With ``timed`` a fit of each method to one batch, and to eight where that is quick.

    >>> report = check(nn.Linear(3, 2), torch.zeros(4, 3))
    >>> report.layers[0].handled
    'linear map, with its bias'
    >>> report.costs["Full"].stored
    544
    >>> type(report.recommended.method).__name__
    'Kron'
    """
    whole = Rule("the number of training data, at least 1", lambda v: is_integer(v) and v >= 1, DataError)
    (whole | NONE).check("data", data)
    (AUTO | NONE).check("auto", auto)
    (FLAG | NAMES).check("timed", timed)
    model = extract_network(model)
    device = device_of(model)
    given, targets = _inputs(model, as_tensors(batch, arithmetic_of(model)))
    inputs = move_inputs(given, lambda t: t.to(device))
    network = Network.build(model, inputs, find_weights(weights), path_of(output))
    problem = _problem(network, likelihood)
    workload = workload_of(network, inputs, data)
    layers = [
        Layer("+".join(block.names), block.size, work.positions, block.handling)
        for block, work in zip(network.layout, workload.blocks, strict=True)
    ]
    methods = {type(method).__name__: method for method in (kind() for kind in METHODS.values())}
    to_time = METHODS if timed is True else timed or ()
    counted = {name: method.cost(workload) for name, method in methods.items()}
    costs = {name: cost for name, cost in counted.items() if cost is not None}
    if to_time:
        if targets is not None:
            targets = network.arrange_targets(Batch(inputs, targets.to(device))).targets
        trials = Trials.of(problem, inputs, targets, workload)
        for name in (type(METHODS[name]()).__name__ for name in to_time):
            if name in costs:
                costs[name] = trials.with_times(methods[name], costs[name])
    auto = (Auto() if auto is None else auto).on(device)
    choice = auto.choose(  # as ``fit`` does for these data, if the prior precision is to be learned
        workload.weights, workload.rows, workload.single, True, workload, problem.likelihood.has_logits
    )
    outputs = (network.output_shape[-1], *network.image) if network.image else network.output_shape  # as they are
    return CheckReport(
        workload.weights, outputs, str(network.dtype).removeprefix("torch."), tuple(layers), costs,
        choice, workload, scale_free_groups(network, inputs), network.count(inputs),
        tuple(name for name in methods if name not in costs), bool(to_time),
    )  # fmt: skip


def _problem(network: Network, likelihood: Likelihood | str | None) -> Problem:
    """Return the problem that methods are timed on."""
    usual = "classification" if network.output_shape[-1] > 1 else "regression"
    chosen: Likelihood = find_likelihood(usual if likelihood is None else likelihood)
    return Problem(network, chosen, Isotropic(1.0).bound(network.selection, network.theta(), None), False)


def _inputs(model: nn.Module, batch: Inputs) -> tuple[Inputs, Tensor | None]:
    """Return inputs and targets, if there are any: a pair has both unless the model needs two arguments."""
    if isinstance(batch, Mapping):
        targets = [value for key, value in batch.items() if key in TARGET_KEYS]
        inputs = {key: value for key, value in batch.items() if key not in TARGET_KEYS}
        return inputs, targets[0] if len(targets) == 1 and isinstance(targets[0], Tensor) else None
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return batch, None
    first = batch[0]
    suffices = isinstance(first, Mapping) or accepts_arguments(model, (first,))
    if isinstance(first, tuple | list):
        suffices = suffices or accepts_arguments(model, tuple(first))
    second = batch[1] if isinstance(batch[1], Tensor) else None
    return (first, second) if suffices else (batch, None)


def _list(names: Sequence[str]) -> str:
    """Return the first names with commas, and how many there are if there are more."""
    return ", ".join(names[:NAMED]) + (f", ... ({len(names)})" if len(names) > NAMED else "")


def _ratio(value: float) -> str:
    """Return a ratio with two digits: no cost is known better."""
    return f"{value:.1f}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}"
