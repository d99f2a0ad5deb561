"""Where inducing points start: which outputs, at which inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.core.pool import Pool, class_labels
from lapwing.core.random import uniform
from lapwing.linalg.kmeans import kmeans
from lapwing.linalg.pivoted import greedy_pivots, trace_pivots
from lapwing.linalg.whitening import checked
from lapwing.methods.inducing.anchors import Anchors
from lapwing.networks.network import Network
from lapwing.priors.bound import BoundPrior

STARTS = ("greedy", "trace", "kmeans", "random")
PIVOTS = {"greedy": greedy_pivots, "trace": trace_pivots}


def every_output(network: Network, pool: Pool) -> Anchors:
    """All outputs at all inputs of the pool."""
    return _numbered(network, pool, torch.arange(len(pool) * torch.Size(network.output_shape).numel()))


def _numbered(network: Network, pool: Pool, numbers: Tensor) -> Anchors:
    """Some of all outputs at all inputs of the pool, those of one input after those of another."""
    outputs = torch.Size(network.output_shape).numel()
    return Anchors(network, pool.rows(numbers // outputs), (numbers % outputs).to(network.device))


def landmarks(network: Network, pool: Pool, count: int, generator: torch.Generator) -> Anchors:
    """One random output at each of ``count`` inputs; more outputs of an input only where inputs run out."""
    outputs = torch.Size(network.output_shape).numel()
    order = _random((len(pool), outputs), generator).argsort(1)  # the outputs of each input in random order
    index = torch.arange(len(pool)).repeat(outputs)[:count]  # first one of every input, then a second, ...
    place = torch.arange(outputs).repeat_interleave(len(pool))[:count]
    return Anchors(network, pool.rows(index), order[index, place].to(network.device))


def placed(
    network: Network, prior: BoundPrior, pool: Pool, count: int, start: str, candidates: int, generator: torch.Generator
) -> Anchors:
    """``count`` points: the largest variance left each time ("greedy"), the most off the sum of all ("trace"), centres
    of the inputs ("kmeans"), or random data ("random")."""
    if start in PIVOTS:
        return _pivots(network, prior, pool, count, start, candidates, generator)
    outputs = torch.Size(network.output_shape).numel()
    numbers = (torch.arange(count) % outputs).to(network.device)  # outputs in turn
    if start == "kmeans" and isinstance(pool.inputs, Tensor) and pool.inputs.is_floating_point():
        return _centres(network, pool, numbers, generator)
    return _drawn(network, pool, numbers, generator)


def _drawn(network: Network, pool: Pool, numbers: Tensor, generator: torch.Generator) -> Anchors:
    """Random inputs, each with its class where the targets are classes; where inputs run out, again with the next
    output, until no pair is left."""
    outputs = torch.Size(network.output_shape).numel()
    index = _random((len(pool),), generator).argsort().repeat(outputs)[: len(numbers)]
    labels = class_labels(pool.targets[index.to(pool.targets.device)], outputs)
    place = torch.arange(len(index), device=numbers.device)
    first = numbers[place % len(pool)] if labels is None else labels.to(numbers.device)
    return Anchors(network, pool.rows(index), (first + place // len(pool)) % outputs)


def _pivots(
    network: Network, prior: BoundPrior, pool: Pool, count: int, start: str, candidates: int, generator: torch.Generator
) -> Anchors:
    """One after another by what those before it leave, in the tangent kernel, among random candidates."""
    every = len(pool) * torch.Size(network.output_shape).numel()
    some = _random((every,), generator).argsort()[: max(candidates, count)].cpu()
    picked = PIVOTS[start](checked(_numbered(network, pool, some).kernel(prior)), count)
    return _numbered(network, pool, some[picked.cpu()])


def _centres(network: Network, pool: Pool, numbers: Tensor, generator: torch.Generator) -> Anchors:
    """Centres of the inputs for every output; of the inputs of its class, where the targets are classes."""
    labels = class_labels(pool.targets, torch.Size(network.output_shape).numel())
    flat = pool.inputs.flatten(1)
    found, outputs = [], []
    for number in numbers.unique().tolist():
        mine = flat if labels is None else flat[labels == number]
        count = int((numbers == number).sum())
        found.append(kmeans(mine if len(mine) else flat, count, generator))
        outputs.append(numbers.new_full((count,), number))
    return Anchors(network, torch.cat(found).reshape(-1, *pool.inputs.shape[1:]), torch.cat(outputs))


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return uniform(shape, generator, torch.empty(0, dtype=torch.float64))
