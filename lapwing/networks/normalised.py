"""Which weights have a scale that the network ignores: found by rescaling them and looking at the outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.core.data import Inputs
from lapwing.networks import graph as graphs
from lapwing.networks.fallback import swapped
from lapwing.networks.forms import batch_norm_eps
from lapwing.networks.forward import plain_kernels, raw_output, shaped
from lapwing.networks.network import Network

FACTOR = 2.0  # a power of two: nothing but eps and real dependence can change the outputs
REST = "rest"
LARGEST = 1e-2  # a change of the outputs above this is dependence, whatever eps may be
UNSEEN = 1e2  # one over the variance before a norm, where the graph does not show it
EPS = re.compile(r"(^|_)eps(ilon)?($|_)")
MATTERS = 1e-3  # of the outputs, that changes when every weight of a group changes by its own size: less is no group


@dataclass(frozen=True)
class ScaleFree:
    """Parameters that may be multiplied by any number together without a change of the function."""

    name: str
    parameters: tuple[str, ...]
    statistics: bool  # whether running statistics of a BatchNorm must be rescaled along
    change: float  # of the outputs, relative, when the group is doubled
    tolerance: float  # what the norms' eps explains of it

    def __str__(self) -> str:
        along = ", with the running statistics after it" if self.statistics else ""
        return f"{self.name}: scale ignored{along} ({' + '.join(self.parameters)})"


@dataclass(frozen=True, eq=False)
class _Norm:
    """A BatchNorm in the graph: what it saw, and the buffers that hold its statistics."""

    seen: Tensor
    mean: str
    variance: str
    eps: float


@dataclass(frozen=True, eq=False)
class _Trial:
    """One run of the network with other values for some parameters and buffers."""

    f: Tensor
    norms: tuple[_Norm, ...]
    inverse: float  # the largest mean of one over the variance before a norm
    eps: float  # the largest that the graph shows
    slopes: Mapping[str, Tensor]  # of a random sum of the outputs in every parameter, where none was changed


def scale_free_groups(network: Network, inputs: Inputs) -> tuple[ScaleFree, ...]:
    """Every group of weights whose common scale the network ignores, on this batch.

    A weight is doubled with its bias. LayerNorm, GroupNorm and weight normalisation take that back, up to their eps,
    from which the tolerance follows. BatchNorm in eval mode does once its running mean is doubled and its running
    variance quadrupled along. A weight whose direction does not matter either, dead or saturated, is no group. Cost:
    up to four forward passes for each layer, and a backward one; the model is not changed.
    """
    tensors = {name: p.detach() for name, p in network.model.named_parameters() if name in network.selection.names}
    base = _run(network, inputs, {}, tensors)
    size = base.f.abs().max().clamp_min(torch.finfo(base.f.dtype).tiny)
    tolerance = _tolerance(network, base)
    found: list[ScaleFree] = []
    taken: set[str] = set()
    for name, parameters in _candidates(network):
        if taken & set(parameters) or sum(tensors[p].numel() for p in parameters) < 2:
            continue
        trial = _run(network, inputs, {p: FACTOR * tensors[p] for p in parameters}, tensors)
        follow = [after for before, after in zip(base.norms, trial.norms, strict=True) if _grew(before, after)]
        if follow:
            scaled = {p: FACTOR * tensors[p] for p in parameters}
            buffers = dict(network.model.named_buffers())
            scaled.update({norm.mean: FACTOR * buffers[norm.mean] for norm in follow})
            scaled.update({norm.variance: _quadrupled(buffers[norm.variance], norm.eps) for norm in follow})
            trial = _run(network, inputs, scaled, tensors)
        change = float((trial.f - base.f).abs().max() / size)
        if change > tolerance:
            continue
        each = torch.cat([(base.slopes[p] * tensors[p]).reshape(-1) for p in parameters])
        moved = float(each.norm() / size * (each.numel() / base.f.numel()) ** 0.5)
        if moved > max(10 * change, MATTERS):
            found.append(ScaleFree(name, parameters, bool(follow), change, tolerance))
            taken |= set(parameters)
    return tuple(found)


def members(network: Network, groups: tuple[ScaleFree, ...]) -> dict[str, str]:
    """For every parameter the name of its group; those in none share one."""
    found = dict.fromkeys(network.selection.names, REST)
    for group in groups:
        found.update(dict.fromkeys(group.parameters, group.name))
    return found


def _candidates(network: Network) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each block with its bias, then all parameters of its module where those are more."""
    owners = dict(zip(network.selection.names, network.selection.layer_of(), strict=True))
    for block in network.layout:
        owner = owners[block.weight]
        siblings = tuple(name for name in network.selection.names if owners[name] == owner)
        whole = set(siblings) <= set(block.names)
        yield (owner if whole and owner else block.weight), block.names
        if not whole:
            yield owner or block.weight, siblings


def _quadrupled(variance: Tensor, eps: float) -> Tensor:
    """Four times the variance, with eps taken along where it is small: a small entry must not hide a group."""
    extra = eps if eps <= 0.1 * float(variance.median()) else 0.0
    return FACTOR**2 * (variance + extra) - extra


def _grew(before: _Norm, after: _Norm) -> bool:
    """Whether all that a norm sees is multiplied by the factor."""
    limit = torch.finfo(before.seen.dtype).eps ** 0.5 * float(before.seen.abs().max())
    return float((after.seen - FACTOR * before.seen).abs().max()) <= limit


def _run(network: Network, inputs: Inputs, values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> _Trial:
    chosen = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    chosen.update({name: v.clone().requires_grad_(name in tensors) for name, v in values.items()})
    names = {buffer.data_ptr(): name for name, buffer in network.model.named_buffers()}
    names.update({chosen[name].data_ptr(): name for name in values if name not in tensors})
    with torch.inference_mode(False), torch.enable_grad(), plain_kernels(network.plain):
        raw = swapped(network.model, chosen, lambda: raw_output(network.model, inputs))
    norms, inverses, eps = [], [0.0], [0.0]
    for node in graphs.read(raw, raw.shape[0]).nodes:
        if "BatchNormBackward" in node.name() and node._saved_running_mean is not None:
            mean, variance = node._saved_running_mean, node._saved_running_var
            if {mean.data_ptr(), variance.data_ptr()} <= names.keys():
                seen, extra = node._saved_input.detach(), batch_norm_eps(node)
                norms.append(_Norm(seen, names[mean.data_ptr()], names[variance.data_ptr()], extra))
                inverses.append(float((1 / variance.clamp_min(1e-12)).mean()))
                eps.append(extra)
        elif node.name() in ("NativeLayerNormBackward0", "NativeGroupNormBackward0"):
            rstd = node._saved_result2.detach()
            inverses.append(float(rstd.square().mean()))
    return _Trial(shaped(raw.detach()), tuple(norms), max(inverses), max(eps), {} if values else _slopes(raw, chosen))


def _slopes(raw: Tensor, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    signs = torch.randint(0, 2, raw.shape, generator=torch.Generator().manual_seed(0)).to(raw) * 2 - 1
    grads = torch.autograd.grad((raw * signs).sum(), list(chosen.values()), allow_unused=True, materialize_grads=True)
    return {name: g.to_dense() if g.is_sparse else g for name, g in zip(chosen, grads, strict=True)}


def _tolerance(network: Network, base: _Trial) -> float:
    """What doubling may change through eps: x / sqrt(var + eps) moves by 3/8 eps / var; times ten for what follows."""
    found = ((key, value) for module in network.model.modules() for key, value in vars(module).items())
    eps = [value for key, value in found if isinstance(value, float) and EPS.search(key)]
    unsaid = any(isinstance(m, nn.RMSNorm) for m in network.model.modules()) or (not eps and base.inverse > 0)
    eps += [base.eps, 1e-5 if unsaid else 0.0]
    explained = 10 * 0.375 * max(eps) * (base.inverse or UNSEEN)
    rounding = 1e3 * torch.finfo(base.f.dtype).eps
    return min(max(explained, rounding), LARGEST)
