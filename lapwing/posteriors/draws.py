"""Predictives from drawn functions: which draws, how many of each belief, and when they take the place of variances.

Draws are numbered, and each number is the same draw at every call: predictions do not depend on how inputs are split
into batches, and equal calls give equal numbers.

Covariances of outputs that follow from a precision of the weights, in pieces that fit the byte budget.

Samples are taken in chunks. Where the outputs of one sample do not fit, they are taken in runs too: variances need each
output by itself, a covariance every two runs together. The numbers are the same, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lapwing.curvature.base import Precision
from lapwing.data.inputs import Inputs, check_finite, wants_slopes
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.networks.jacobians import LayerJacobians, temporary
from lapwing.networks.network import Network
from lapwing.networks.passes import outputs_along
from lapwing.networks.tangent import Tangent
from lapwing.predictives.labels import AveragedClasses, SoftmaxSamples
from lapwing.runtime.memory import evenly, gathered
from lapwing.runtime.settings import NONE, integer
from lapwing.runtime.state import Latest
from lapwing.runtime.threads import derived_generator, normal
from lapwing.values.functions import FunctionSamples
from lapwing.values.gaussian import ChosenOutputs

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


# Outputs of an input (classes times tokens) above which classes are predicted from drawn functions. Variances take a
# backward pass for each output, 32 functions in pairs 33 forward passes, so that from some dozens of outputs on the
# functions are cheaper (``python -m benchmarks.scale_outputs``). Up to 256 the pairwise link stays nevertheless: it
# has no sampling error and knows the covariance of every two logits. Above, it does not: see ``links.PAIRED``.
MANY = 256
SAMPLES = 32  # functions of a prediction, over all beliefs of a mixture
COPIES = 3  # of the functions at some inputs: as they are computed, as they are, and what each adds to a sum
LEAST = 2  # pairs of a belief, so that their spread gives a standard error
SAMPLES_RULE = integer(0) | NONE

Kept = Latest[tuple[range, ...], list[Tensor]]


@runtime_checkable
class HasNumberedDraws(Protocol):
    """A belief about the weights of the tangent model with numbered draws, the same ones at every call."""

    def n_stored(self) -> int | None:
        """Return how many draws there are; None if there is one for every number."""
        ...

    def numbered(self, numbers: range) -> Tensor:
        """Return the draws with these numbers as steps from the mean of the weights, (n, P)."""
        ...


def numbered_normals(numbers: range, like: Tensor) -> Tensor:
    """Return standard normal numbers (n, P) in the form of ``like`` (P,); each row depends on its number alone."""
    seeded = [derived_generator(torch.Generator().manual_seed(k), torch.empty(0)) for k in numbers]
    return torch.stack([normal(tuple(like.shape), generator, like) for generator in seeded])


def prefers_draws(members: Sequence[Any], network: Network, likelihood: Likelihood, x: Inputs) -> bool:
    """Return whether predictions at x use drawn functions of these posteriors unless the user asks otherwise."""
    many = torch.Size(network.for_inputs(x).output_shape).numel() > MANY
    return many and likelihood.prefers_samples and all(isinstance(each, HasNumberedDraws) for each in members)


def numbers_of(
    members: Sequence[Any], likelihood: Likelihood, shares: Sequence[float], samples: int | None, x: Inputs
) -> tuple[range, ...]:
    """Return the numbers of the pairs of functions that each belief draws; no ranges where variances are computed.

    Args:
        members: The posterior of each belief.
        likelihood: The likelihood that predicts.
        shares: The weights of the beliefs, without that of cells that have no spread.
        samples: The number of functions that the user asked for; zero asks for variances, None chooses.
        x: The inputs, whose number of outputs decides.
    """
    drawing = [number for number, share in enumerate(shares) if share > 0]
    count = samples
    if samples is None:
        network = members[0].problem.network
        count = SAMPLES if prefers_draws([members[number] for number in drawing], network, likelihood, x) else 0
    if not count:
        return ()
    if wants_slopes(x):
        raise UnsupportedError(
            "x requires a gradient, and this prediction is drawn from functions, which has none. Use x.detach(), "
            "predict(x, samples=0), or functions(x)."
        )
    counts = dict(zip(drawing, allotted([shares[number] for number in drawing], -(-count // 2)), strict=True))
    numbers, first = [], 0
    for number, each in enumerate(members):
        n = counts.get(number, 0)
        if n and not isinstance(each, HasNumberedDraws):
            raise UnsupportedError(
                f"samples is {samples}, and {type(each).__name__} has no draws of the weights of the tangent model; "
                "expected None or 0, for the prediction that it has."
            )
        stored = each.n_stored() if n else None
        if stored is not None and n > stored:
            if samples is not None:
                raise UnsupportedError(
                    f"samples is {samples}, for which a posterior draws {n} pairs; it has {stored}. Ask for fewer, or "
                    "fit with Sampled(num_samples=...) for more."
                )
            n = stored
        numbers.append(range(first, first + n))
        first += n
    return tuple(numbers)


def allotted(shares: Sequence[float], total: int) -> list[int]:
    """Return how many pairs each share gets: ``total`` in proportion, but two at least, or one if two are too many.

    >>> allotted([0.7, 0.28, 0.02], 16)
    [10, 4, 2]
    """
    least = LEAST if total >= LEAST * len(shares) else 1
    rest = max(0, total - least * len(shares))
    wanted = [max(0.0, total * share / sum(shares) - least) for share in shares]
    parts = [rest * each / (sum(wanted) or 1.0) for each in wanted]
    counts = [least + int(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: int(parts[i]) - parts[i])
    for i in by_remainder[: max(0, total - sum(counts))]:
        counts[i] += 1
    return counts


def drawn_beliefs(members: Sequence[Any], x: Inputs, numbers: Sequence[range], kept: Kept) -> Iterator[FunctionSamples]:
    """Yield the belief of every posterior about the outputs at x, made of the functions with these numbers.

    Cost: 1 + 2 n forward passes for n pairs. Draws that fit the budget together are kept for the next call.
    """
    network: Network = members[0].problem.network
    most = max(1, temporary(network.device) // (network.selection.size * torch.finfo(network.dtype).bits // 8))
    pairs = list(zip(members, numbers, strict=True))
    all_steps = None
    if sum(map(len, numbers)) <= most:
        all_steps = kept.at(tuple(numbers), lambda: [_steps(each, part) for each, part in pairs])
    for i, (each, part) in enumerate(pairs):
        runs = [part[start : start + most] for start in range(0, len(part), most)] or [part]
        drawn = (_steps(each, run) for run in runs) if all_steps is None else [all_steps[i]]
        at_x = [outputs_along(each.problem.network, x, steps) for steps in drawn]
        yield FunctionSamples.of(at_x[0][0], torch.cat([products for _, products in at_x]))


def _steps(posterior: Any, numbers: range) -> Tensor:
    """Return the draws with these numbers, (n, P); a posterior of which none is wanted need not have any."""
    network: Network = posterior.problem.network
    if not len(numbers):
        return torch.zeros(0, network.selection.size, dtype=network.dtype, device=network.device)
    steps: Tensor = posterior.numbered(numbers)
    return steps


def drawn_predictive(
    members: Sequence[Any],
    x: Inputs,
    numbers: Sequence[range],
    kept: Kept,
    predict: Callable[[list[FunctionSamples]], Any],
) -> Any:
    """Return the predictive that ``predict`` makes of the beliefs of all posteriors at x.

    Probabilities of classes are averaged a few inputs at a time, so that no more functions than fit the budget are in
    memory; other predictives keep the functions.
    """
    parts = _by_parts(members, x, numbers, kept)
    first = next(parts)
    predictive = predict(first)
    if not isinstance(predictive, SoftmaxSamples):
        return predict([FunctionSamples.joined(each) for each in zip(first, *parts, strict=True)])
    return AveragedClasses.joined([predictive.averaged, *(predict(beliefs).averaged for beliefs in parts)])


def _by_parts(
    members: Sequence[Any], x: Inputs, numbers: Sequence[range], kept: Kept
) -> Iterator[list[FunctionSamples]]:
    """Yield the beliefs about a few inputs after another, as many as fit the budget with all their functions."""
    for _, part in pieces(members[0].problem.network, x, sum(map(len, numbers))):
        beliefs = list(drawn_beliefs(members, part, numbers, kept))
        check_finite(beliefs[0].mean, "outputs of the network")
        yield beliefs


def pieces(network: Network, x: Inputs, pairs: int) -> Iterator[tuple[slice, Inputs]]:
    """Yield runs of inputs at which so many pairs of functions fit the budget for one result."""
    batch, outputs = network.count(x), torch.Size(network.for_inputs(x).output_shape).numel()
    each = COPIES * (1 + pairs) * outputs * torch.finfo(network.dtype).bits // 8
    step = max(1, temporary(network.device) // each)
    for start in range(0, batch, step):
        rows = slice(start, min(batch, start + step))
        yield rows, x if step >= batch else network.take(x, rows)
