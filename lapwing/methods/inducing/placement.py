"""Initial locations of inducing points: which outputs, at which inputs."""

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
    """Return an anchor at every output of every input of the pool."""
    return _numbered(network, pool, torch.arange(len(pool) * torch.Size(network.output_shape).numel()))


def _numbered(network: Network, pool: Pool, numbers: Tensor) -> Anchors:
    """Return the anchors with these numbers: number i C + c is output c at input i of the pool."""
    outputs = torch.Size(network.output_shape).numel()
    return Anchors(network, pool.rows(numbers // outputs), (numbers % outputs).to(network.device))


def landmarks(network: Network, pool: Pool, count: int, generator: torch.Generator) -> Anchors:
    """Return ``count`` anchors: a random output of every input, then a second one of every input, and so on."""
    outputs = torch.Size(network.output_shape).numel()
    order = _random((len(pool), outputs), generator).argsort(1)  # the outputs of each input in random order
    index = torch.arange(len(pool)).repeat(outputs)[:count]
    place = torch.arange(outputs).repeat_interleave(len(pool))[:count]
    return Anchors(network, pool.rows(index), order[index, place].to(network.device))


def placed(
    network: Network, prior: BoundPrior, pool: Pool, count: int, start: str, candidates: int, generator: torch.Generator
) -> Anchors:
    """Return at most ``count`` anchors by one of ``STARTS``.

    "greedy" and "trace" choose pivots of the tangent kernel among random candidates, "kmeans" takes centres of the
    inputs, "random" takes rows of the pool. Inputs without centres (integers, several tensors) are drawn at random
    instead.
    """
    if start in PIVOTS:
        return _pivots(network, prior, pool, count, start, candidates, generator)
    outputs = torch.Size(network.output_shape).numel()
    numbers = (torch.arange(count) % outputs).to(network.device)  # outputs in turn
    if start == "kmeans" and isinstance(pool.inputs, Tensor) and pool.inputs.is_floating_point():
        return _centres(network, pool, numbers, generator)
    return _drawn(network, pool, numbers, generator)


def _drawn(network: Network, pool: Pool, numbers: Tensor, generator: torch.Generator) -> Anchors:
    """Return anchors at random inputs, each at the output of its class if the targets are classes.

    If there are more anchors than inputs, all inputs come again with the next output, until no pair is left.
    """
    outputs = torch.Size(network.output_shape).numel()
    index = _random((len(pool),), generator).argsort().repeat(outputs)[: len(numbers)]
    labels = class_labels(pool.targets[index.to(pool.targets.device)], outputs)
    place = torch.arange(len(index), device=numbers.device)
    first = numbers[place % len(pool)] if labels is None else labels.to(numbers.device)
    return Anchors(network, pool.rows(index), (first + place // len(pool)) % outputs)


def _pivots(
    network: Network, prior: BoundPrior, pool: Pool, count: int, start: str, candidates: int, generator: torch.Generator
) -> Anchors:
    """Return pivots of the tangent kernel of ``candidates`` random outputs, or of ``count`` if that is more."""
    total = len(pool) * torch.Size(network.output_shape).numel()
    numbers = _random((total,), generator).argsort()[: max(candidates, count)].cpu()
    pivots = PIVOTS[start](checked(_numbered(network, pool, numbers).kernel(prior)), count)
    return _numbered(network, pool, numbers[pivots.cpu()])


def _centres(network: Network, pool: Pool, numbers: Tensor, generator: torch.Generator) -> Anchors:
    """Return centres of the inputs for every output; of the inputs of its class if the targets are classes."""
    labels = class_labels(pool.targets, torch.Size(network.output_shape).numel())
    flat = pool.inputs.flatten(1)
    centres, outputs = [], []
    for number in numbers.unique().tolist():
        members = flat if labels is None else flat[labels == number]
        count = int((numbers == number).sum())
        centres.append(kmeans(members if len(members) else flat, count, generator))
        outputs.append(numbers.new_full((count,), number))
    return Anchors(network, torch.cat(centres).reshape(-1, *pool.inputs.shape[1:]), torch.cat(outputs))


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return uniform(shape, generator, torch.empty(0, dtype=torch.float64))
