"""Covariances of outputs that follow from a precision of the weights, in pieces that fit the byte budget.

Samples are taken in chunks. Where the outputs of one sample do not fit, they are taken in runs too: variances need each
output by itself, a covariance every two runs together. The numbers are the same, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from lapwing.core.chosen import ChosenOutputs
from lapwing.core.inputs import Inputs
from lapwing.core.memory import evenly, gathered
from lapwing.curvature.protocols import Precision
from lapwing.networks.budget import temporary
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.networks.tangent import Tangent

Piece = tuple[slice, slice]  # samples, and outputs of each of them


class Cross(Protocol):
    """The covariance between all inputs and outputs of two Jacobians, (B K, B' K'), or of one with itself."""

    def __call__(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor: ...


def variances(precision: Precision, tangent: Tangent, centred: bool = False) -> Tensor:
    """Return the variances of the outputs, in their shape; ``centred`` takes the mean over outputs off first.

    Cost: one backward pass for each output, however many runs they take.
    """
    parts = (precision.quadratic(jacobian, False).flatten(1) for jacobian in tangent.runs(centred))
    return gathered(parts, torch.Size(tangent.shape).numel(), 1).unflatten(1, tangent.shape)


def covariances(precision: Precision, tangent: Tangent) -> Tensor:
    """Return the covariance of the outputs of each datum, (B, [T,] C, C).

    Cost: one backward pass for each output; where the outputs of one datum take R runs, R / 2 times as many.
    """
    network, batch, outputs = tangent.network, len(tangent.raw), tangent.shape[-1]
    pieces = list(network.footprint.seed_runs(outputs, batch, network.dtype, network.device))
    if len(pieces) == 1:
        runs = tangent.runs(whole_tokens=True)
        cov = gathered((precision.quadratic(jacobian, True) for jacobian in runs), tangent.tokens, 1)
    else:  # two runs are in memory at once
        tangent = replace(tangent, network=network.gathering)
        pieces = list(network.footprint.seed_runs(outputs, 2 * batch, network.dtype, network.device))
        each = (_of_token(precision, tangent, token * outputs, pieces) for token in range(tangent.tokens))
        cov = gathered(each, tangent.tokens, 1)
    return cov.reshape(batch, *tangent.shape, outputs)


def _of_token(precision: Precision, tangent: Tangent, start: int, pieces: list[slice]) -> Tensor:
    """Return the covariance (B, 1, C, C) of the outputs of one datum, whose first has this number, from its runs."""
    batch, outputs = len(tangent.raw), pieces[-1].stop
    total = torch.empty(batch, outputs, outputs, dtype=tangent.network.dtype, device=tangent.raw.device)
    seeds = lambda run: tangent.seeds(slice(start + run.start, start + run.stop))
    for number, here in enumerate(pieces):
        rows = tangent.jacobians(seeds(here))
        total[:, here, here] = precision.quadratic(rows, True)[:, 0]
        for there in pieces[number + 1 :]:
            columns = tangent.jacobians(seeds(there))
            block = _spread(precision.cross(rows, columns), rows, columns).diagonal(dim1=0, dim2=2).movedim(-1, 0)
            total[:, here, there] = block
            total[:, there, here] = block.mT
    return total.unsqueeze(1)


def joint(cross: Cross, network: Network, x: Inputs, chosen: ChosenOutputs | None = None) -> tuple[Tensor, Tensor]:
    """Return all or some outputs (B, [T,] C), and the covariance between them at all inputs, (B [T] C, B [T] C).

    Cost: one backward pass for each output; where inputs and outputs take R pieces, R / 2 times as many.
    """
    f, pieces = outputs_in_pieces(network, x, chosen)
    if len(pieces) == 1:
        return f, cross(replace(network.linearise(x), chosen=chosen).jacobians())
    count, size = len(f), f[0].numel()
    total = f.new_empty(count, size, count, size)
    for number in range(len(pieces)):
        others = jacobian_pieces(network, x, pieces[number:], chosen)
        here, rows = next(others)
        total[here[0], here[1], here[0], here[1]] = _spread(cross(rows), rows, rows)
        for there, columns in others:
            block = _spread(cross(rows, columns), rows, columns)
            total[here[0], here[1], there[0], there[1]] = block
            total[there[0], there[1], here[0], here[1]] = block.permute(2, 3, 0, 1)
    return f, total.flatten(2).flatten(0, 1)


def outputs_in_pieces(network: Network, x: Inputs, chosen: ChosenOutputs | None) -> tuple[Tensor, list[Piece]]:
    """Return all or some outputs at x, and pieces of them; the Jacobians of two pieces fit the byte budget together."""
    network = network.for_inputs(x)
    f = network(x).to(network.dtype)
    f = f if chosen is None else chosen.of(f)
    size, options = f[0].numel(), (network.dtype, network.device)
    rows = math.isqrt(temporary(network.device) // (3 * f.element_size()))  # their covariance is a piece as well
    chunks = list(network.footprint.largest(len(f), 2 * size, *options, max(1, rows // size)))
    longest = chunks[0].stop - chunks[0].start
    most = network.footprint.at_once(2 * longest, *options)
    runs = list(evenly(size, min(most, max(1, rows // longest))))
    return f, [(chunk, run) for chunk in chunks for run in runs]


def jacobian_pieces(
    network: Network, x: Inputs, pieces: list[Piece], chosen: ChosenOutputs | None
) -> Iterator[tuple[Piece, LayerJacobians]]:
    """Yield the Jacobian of each piece; a chunk of samples runs once for all pieces of it in a row."""
    chunk: slice | None = None
    for piece in pieces:
        if piece[0] != chunk:
            chunk = piece[0]
            some = None if chosen is None else chosen.samples(chunk)
            tangent = replace(network.linearise(network.take(x, chunk)), chosen=some)
        yield piece, tangent.jacobians(tangent.seeds(piece[1]))


def _spread(block: Tensor, rows: LayerJacobians, columns: LayerJacobians) -> Tensor:
    """Return (B K, B' K') as (B, K, B', K')."""
    return block.reshape(rows.batch, rows.outputs, columns.batch, columns.outputs)
