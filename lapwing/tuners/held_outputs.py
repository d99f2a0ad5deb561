"""Outputs of a network on held-out data beside their targets, and its noise refitted to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.batches import Batch
from lapwing.core.data import Data
from lapwing.core.inputs import check_finite
from lapwing.likelihoods.protocol import Likelihood
from lapwing.likelihoods.weighted import spread
from lapwing.networks.network import Network
from lapwing.problem import named_targets

NUMBERS = 2**23  # outputs that are looked at, at most
LEAST = 1e-12  # of a variance, relative to the largest


@dataclass(frozen=True, eq=False)
class HeldOutputs:
    """Outputs of the network on held-out data with their targets, on the CPU in float64, one row for each datum."""

    f: Tensor  # (n, C)
    y: Tensor  # (n, C): numbers; probabilities of classes, or labels; zero where the target is unknown
    counts: Tensor  # (n, C): how often the target counts, zero if it is unknown
    exclusive: bool  # whether the outputs are classes, of which one is right

    @classmethod
    def of(cls, network: Network, likelihood: Likelihood, data: Data, limit: int | None = None) -> HeldOutputs:
        """Return them by one forward pass, of the first data if there is a limit or all would take too much memory."""
        exclusive = likelihood.ignores_common_shift
        rows: list[Tensor] = []
        most = max(1, NUMBERS // network.output_shape[-1])
        most = -(-(most if limit is None else min(limit, most)) // data.processes.size)
        for whole in data.batches(f"outputs for {data.name}", weighted=True):
            batch = _first(network, whole, most - sum(map(len, rows)))
            y = named_targets(network, likelihood, batch, data.name)
            f = network(batch.inputs).double()
            check_finite(f, "outputs of the network")
            ignored = likelihood.ignored(y)
            counts = (~ignored).double()
            counts = counts if batch.weights is None else counts * spread(batch.weights, counts)
            if exclusive and y.is_floating_point():
                counts = counts.amax(-1, keepdim=True)
            elif exclusive:
                classes, counts = y.masked_fill(ignored, 0).unsqueeze(-1), counts.unsqueeze(-1)
                y = torch.zeros_like(f).scatter(-1, classes, 1.0)
            else:
                y = y.masked_fill(ignored, 0)
            parts = [part.flatten(0, -2) for part in (f, y.double(), counts.expand(f.shape))]
            known = ~ignored.reshape(len(parts[0]), -1).all(1)
            rows.append(torch.stack(parts, 1)[known].cpu())
            if sum(map(len, rows)) >= most:
                break
        everywhere = data.processes.gather(torch.cat(rows)[:most] if rows else None)
        assert everywhere is not None
        f, y, counts = everywhere.unbind(1)
        return cls(f, y, counts, exclusive)

    def without(self, rows: Tensor) -> HeldOutputs:
        """Return the others than these rows, given as a mask."""
        return HeldOutputs(self.f[~rows], self.y[~rows], self.counts[~rows], self.exclusive)

    @property
    def variance(self) -> Tensor:
        """The mean squared residual of each output, (C,)."""
        squares = (self.counts * (self.f - self.y).square()).sum(0) / self.counts.sum(0).clamp_min(LEAST)
        return squares.clamp_min(LEAST * squares.max())


def _first(network: Network, batch: Batch, count: int) -> Batch:
    """Return the batch with at most so many samples."""
    if batch.n_samples <= count:
        return batch
    rows = slice(0, count)
    return Batch(network.take(batch.inputs, rows), batch.targets[rows], batch.key, batch.weights_of(rows))


def refitted_noise(held: HeldOutputs, likelihood: Likelihood, folds: int) -> Tensor:
    """Return the log-density of each datum under normal noise of the variance of the other folds, (n,).

    Where the ratios of the outputs' noises are fixed, their common scale is refitted.
    """
    scores = torch.empty(len(held.f), dtype=torch.float64)
    number = torch.arange(len(scores)) % folds
    for k in range(folds):
        inside, others = number == k, held.without(number == k)
        noise = fitted_noise(others, likelihood) if len(others.f) else _noise_of(likelihood, held)
        gaps = (held.f - held.y)[inside].square() / noise
        scores[inside] = -0.5 * (gaps + noise.log() + math.log(2 * math.pi)).sum(1)
    return scores


def fitted_noise(held: HeldOutputs, likelihood: Likelihood) -> Tensor:
    """Return the noise variance of each output, (C,), that makes the held-out targets most likely."""
    variance, noise = held.variance, _noise_of(likelihood, held)
    return variance if likelihood.learns_ratios else noise * (variance / noise).mean()


def _noise_of(likelihood: Likelihood, held: HeldOutputs) -> Tensor:
    """Return the noise variance of each output as it is, (C,)."""
    noise = likelihood.noise_variance
    assert noise is not None
    return noise.detach().to(held.f).expand(held.f.shape[1])
