"""Groups of weights whose scale the network ignores, detected by rescaling them and comparing the outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.data.inputs import Inputs
from lapwing.networks.examine import first_samples
from lapwing.networks.forward import raw_output, select_kernels, with_output_dim
from lapwing.networks.graph import read_graph
from lapwing.networks.network import Network
from lapwing.networks.ops import operation

SCALE = 2.0  # a power of two, so that only eps and a true dependence change the outputs, and not rounding
REST_GROUP = "rest"
MAX_CHANGE = 1e-2  # a relative change of the outputs above this is a dependence, whatever eps may be
ASSUMED_INVERSE = 1e2  # assumed for one over the variance before a norm, where the graph does not show it
EPS = re.compile(r"(^|_)eps(ilon)?($|_)")
MIN_EFFECT = 1e-3  # relative change of the outputs if each weight changes by its size; with less it is not a group


@dataclass(frozen=True)
class ScaleFree:
    """Parameters that may be multiplied together by any positive number without a change of the function."""

    name: str
    parameters: tuple[str, ...]
    statistics: bool  # whether running statistics of a BatchNorm must be rescaled too
    change: float  # relative change of the outputs when the group is doubled
    tolerance: float  # the change that the eps of the norms explains

    def __str__(self) -> str:
        along = ", with the running statistics after it" if self.statistics else ""
        return f"{self.name}: scale ignored{along} ({' + '.join(self.parameters)})"


@dataclass(frozen=True, eq=False)
class _Norm:
    """A BatchNorm in the graph: its input, and the buffers that hold its statistics."""

    input: Tensor
    mean: str
    variance: str
    eps: float


@dataclass(frozen=True, eq=False)
class _Trial:
    """One run of the network with other values for some parameters and buffers."""

    f: Tensor
    norms: tuple[_Norm, ...]
    inverse: float  # the largest mean of one over the variance before a norm
    eps: float  # the largest eps that the graph shows
    slopes: Mapping[str, Tensor]  # of a random sum of the outputs in each parameter, if none was changed


def scale_free_groups(network: Network, inputs: Inputs) -> tuple[ScaleFree, ...]:
    """Return every group of weights whose common scale the network ignores, on this batch.

    A weight is doubled with its bias. LayerNorm, GroupNorm and weight normalisation undo that, up to their eps, from
    which the tolerance follows. BatchNorm in evaluation mode does so if its running mean is doubled and its running
    variance quadrupled too. A weight whose direction does not matter either, dead or saturated, is not a group.
    Cost: up to four forward passes for each layer, and a backward pass; the model is not changed.
    """
    tensors = {name: p.detach() for name, p in network.parameters.items() if name in network.selection.names}
    inputs = first_samples(inputs)
    base = _run(network, inputs, {}, tensors)
    size = base.f.abs().max().clamp_min(torch.finfo(base.f.dtype).tiny)
    tolerance = _tolerance(network, base)
    groups: list[ScaleFree] = []
    grouped: set[str] = set()
    for name, parameters in _candidates(network):
        if grouped & set(parameters) or sum(tensors[p].numel() for p in parameters) < 2:
            continue
        trial = _run(network, inputs, {p: SCALE * tensors[p] for p in parameters}, tensors)
        follow = [after for before, after in zip(base.norms, trial.norms, strict=True) if _grew(before, after)]
        if follow:
            scaled = {p: SCALE * tensors[p] for p in parameters}
            buffers = dict(network.replica.named_buffers())
            scaled.update({norm.mean: SCALE * buffers[norm.mean] for norm in follow})
            scaled.update({norm.variance: _quadruple(buffers[norm.variance], norm.eps) for norm in follow})
            trial = _run(network, inputs, scaled, tensors)
        change = float((trial.f - base.f).abs().max() / size)
        if change > tolerance:
            continue
        each = torch.cat([(base.slopes[p] * tensors[p]).reshape(-1) for p in parameters])
        effect = float(each.norm() / size * (each.numel() / base.f.numel()) ** 0.5)
        if effect > max(10 * change, MIN_EFFECT):
            groups.append(ScaleFree(name, parameters, bool(follow), change, tolerance))
            grouped |= set(parameters)
    return tuple(groups)


def group_names(network: Network, groups: tuple[ScaleFree, ...]) -> dict[str, str]:
    """Return for every parameter the name of its group; all parameters in no group share one name."""
    group_of = dict.fromkeys(network.selection.names, REST_GROUP)
    for group in groups:
        group_of.update(dict.fromkeys(group.parameters, group.name))
    return group_of


def _candidates(network: Network) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each block with its bias, then all parameters of its module if those are more."""
    owners = dict(zip(network.selection.names, network.selection.layer_of(), strict=True))
    for block in network.layout:
        owner = owners[block.weight]
        siblings = tuple(name for name in network.selection.names if owners[name] == owner)
        whole = set(siblings) <= set(block.names)
        yield (owner if whole and owner else block.weight), block.names
        if not whole:
            yield owner or block.weight, siblings


def _quadruple(variance: Tensor, eps: float) -> Tensor:
    """Return four times the variance, eps included where it is small, so that a small entry does not hide a group."""
    extra = eps if eps <= 0.1 * float(variance.median()) else 0.0
    return SCALE**2 * (variance + extra) - extra


def _grew(before: _Norm, after: _Norm) -> bool:
    """Return whether the whole input of a norm is multiplied by the factor."""
    limit = torch.finfo(before.input.dtype).eps ** 0.5 * float(before.input.abs().max())
    return float((after.input - SCALE * before.input).abs().max()) <= limit


def _run(network: Network, inputs: Inputs, values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> _Trial:
    """Run the network with other ``values`` for some of its parameters (``tensors``) and buffers."""
    chosen = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    chosen.update({name: v.clone().requires_grad_(name in tensors) for name, v in values.items()})
    names = {buffer.data_ptr(): name for name, buffer in network.replica.named_buffers()}
    names.update({chosen[name].data_ptr(): name for name in values if name not in tensors})
    with torch.inference_mode(False), torch.enable_grad(), select_kernels(network.plain_kernels):
        raw = raw_output(network.replica, inputs, chosen)
    norms, inverses, eps = [], [0.0], [0.0]
    for node in read_graph(raw).nodes:
        statistics = operation(node).norm(node)
        if statistics is None:
            continue
        if statistics.running is not None:
            mean, variance = (names.get(buffer.data_ptr()) for buffer in statistics.running)
            if mean is None or variance is None:
                continue
            norms.append(_Norm(statistics.input, mean, variance, statistics.eps))
        inverses.append(statistics.inverse_variance)
        eps.append(statistics.eps)
    return _Trial(
        with_output_dim(raw.detach()), tuple(norms), max(inverses), max(eps), {} if values else _slopes(raw, chosen)
    )


def _slopes(raw: Tensor, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a sum of the outputs with random signs."""
    signs = torch.randint(0, 2, raw.shape, generator=torch.Generator().manual_seed(0)).to(raw) * 2 - 1
    grads = torch.autograd.grad((raw * signs).sum(), list(chosen.values()), allow_unused=True, materialize_grads=True)
    return {name: g.to_dense() if g.is_sparse else g for name, g in zip(chosen, grads, strict=True)}


def _tolerance(network: Network, base: _Trial) -> float:
    """Return the largest relative change of an output, when a group is doubled, that eps may explain.

    x / sqrt(var + eps) changes by 3/8 eps / var; layers after it may enlarge that, hence the factor of ten.
    """
    attributes = ((key, value) for module in network.replica.modules() for key, value in vars(module).items())
    eps = [value for key, value in attributes if isinstance(value, float) and EPS.search(key)]
    unknown = any(isinstance(m, nn.RMSNorm) for m in network.replica.modules()) or (not eps and base.inverse > 0)
    eps += [base.eps, 1e-5 if unknown else 0.0]
    explained = 10 * 0.375 * max(eps) * (base.inverse or ASSUMED_INVERSE)
    rounding = 1e3 * torch.finfo(base.f.dtype).eps
    return min(max(explained, rounding), MAX_CHANGE)
