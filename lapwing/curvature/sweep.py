"""One pass over the data that yields layer-wise Jacobians, multiplied by a root of the loss's curvature.

A likelihood that learns a noise for each output takes a pass, and has a curvature, for each output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.core.data import Data, merged
from lapwing.core.inputs import check_finite
from lapwing.core.random import independent_generator
from lapwing.core.schema import SMALLEST, Array
from lapwing.core.settings import one_of
from lapwing.core.state import Part, State, saved
from lapwing.curvature.protocols import Curvature
from lapwing.errors import DataError, FileError, NumericalError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.networks.jacobians import LayerJacobians, in_order
from lapwing.networks.network import Network
from lapwing.problem import Problem, Statistics, checked_count, checked_targets

S = TypeVar("S")

CURVATURES = ("ggn", "fisher_mc")
PLAIN = "jacobian"  # the Jacobian itself, without a likelihood: one seed for each output


def checked_curvature(curvature: str, allowed: tuple[str, ...] = CURVATURES) -> str:
    """Return the name of a curvature; raise if it is not one of those allowed."""
    one_of(allowed).check("curvature", curvature)
    return curvature


@dataclass(frozen=True, eq=False)
class Seeds:
    """The vectors in output space that the backward passes of a sweep start from.

    With "ggn" they are the columns of the likelihood's root, so that the sum of JᵀJ over the pass is the exact GGN at
    unit dispersion. With "fisher_mc" there is one seed, the gradient of the loss at a label drawn from the model: an
    unbiased estimate for one backward pass. With "jacobian" they are the unit vectors.

    ``output`` takes the seed of one output alone, for a likelihood with a noise for each output.
    """

    curvature: str = "ggn"
    generator: torch.Generator | None = None
    output: int | None = None

    def __post_init__(self) -> None:
        checked_curvature(self.curvature, (*CURVATURES, PLAIN))

    def count(self, output_shape: tuple[int, ...]) -> int:
        """Return the number of seeds for each sample."""
        if self.curvature == "fisher_mc":
            return 1
        return torch.Size(output_shape if self.output is None else output_shape[:-1]).numel()

    def at(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
        """Return the seeds at outputs f (B, [T,] C): (K, B, [T,] C), different ones for each token."""
        if self.curvature == "fisher_mc":
            # Labels are drawn independently, so tokens may share a seed: their cross terms vanish on average.
            gradient = likelihood.sampled_gradient(f, y, self.generator)
            if self.output is not None:
                gradient = gradient * F.one_hot(torch.tensor(self.output), f.shape[-1]).to(f)
            return gradient.unsqueeze(0)
        if self.curvature == PLAIN:
            return root_seeds(torch.eye(f.shape[-1]).to(f).expand(*f.shape, f.shape[-1]))
        root = likelihood.root(f, y)
        return root_seeds(root if self.output is None else root[..., self.output : self.output + 1])


@dataclass(eq=False)
class Sweep:
    """A pass over the data: iterate to get Jacobians, chunk by chunk; then ``statistics`` holds loss and counts.

    ``max_samples`` limits the samples of a chunk; without it only memory does.
    """

    network: Network
    likelihood: Likelihood
    data: Data
    seeds: Seeds = Seeds()
    label: str = "curvature"
    max_samples: int | None = None
    statistics: Statistics = field(init=False)  # only after the iteration

    def __iter__(self) -> Iterator[LayerJacobians]:
        network, likelihood = self.network, self.likelihood
        total = torch.zeros((), dtype=torch.float64, device=network.device)
        count: int | Tensor = 0
        # The C library returns large memory blocks to the system and maps them again at the next batch, a quarter of
        # the time of a pass. It stops below the largest block that was ever freed, up to 32 MB: so free one.
        torch.empty(31 * 2**20, dtype=torch.uint8)
        n_seeds = self.seeds.count(network.output_shape)
        batches = self.data.batches(self.label)
        for batch in merged(batches, network.footprint.joined(n_seeds, network.dtype, network.device)):
            _, y = checked_targets(network, likelihood, batch)
            # Sums stay on the device until the batch is done: reading one makes a GPU wait.
            before = total.clone()
            for rows, tangent in network.tangents(batch.inputs, n_seeds, self.max_samples):
                f, targets = tangent.f.to(network.dtype), y[rows]
                if f.shape[0] != len(targets):
                    raise DataError(f"{len(targets)} inputs gave {f.shape[0]} outputs; expected one for each.")
                total += likelihood.loss(f, targets).sum(dtype=torch.float64)
                count = count + likelihood.count(f, targets)
                jacobians = tangent.jacobians(self.seeds.at(likelihood, f, targets))
                del tangent  # free the memory of one chunk before the next is computed
                yield jacobians
                del jacobians
            if not math.isfinite(total - before):
                check_finite(network(batch.inputs), "outputs of the network")
                raise NumericalError(
                    "the loss is not finite although inputs, targets and outputs are; check the scale."
                )
        self.statistics = Statistics(float(total), checked_count(int(count)), network.output_shape[-1])


class MixableCurvature(Curvature, Protocol):
    """A curvature of which weighted sums can be formed."""

    def mixed(self: S, others: Sequence[S], weights: Tensor) -> S:
        """Return the weighted sum of this curvature and the others, differentiable in the weights (1 + others,)."""
        ...


@saved
@dataclass(frozen=True, eq=False)
class PerOutputCurvature:
    """H_c / s_c for each output c, with s the initial noise ratios; ``at`` gives Σ_c H_c / r_c for others.

    Memory: C times that of one curvature. Exact for full and diagonal structures; a Kronecker block keeps one input
    factor, and its output factor is the weighted sum, as if it had been computed under those ratios.
    """

    parts: tuple[MixableCurvature, ...]
    start: Tensor  # s, (C,)

    def at(self, ratios: Tensor) -> Curvature:
        """Return the curvature under these ratios (C,), differentiable in them."""
        return self.parts[0].mixed(self.parts[1:], self.start.to(ratios) / ratios)

    def state(self) -> State:
        parts = {str(i): part.state() for i, part in enumerate(self.parts)}
        return State("PerOutputCurvature", tensors={"start": self.start}, parts=parts)

    @classmethod
    def from_state(cls, state: State, network: Network) -> PerOutputCurvature:
        names = [str(i) for i in range(network.output_shape[-1])]
        part = Part(MixableCurvature, network)
        fields = state.read(start=Array((len(names),), SMALLEST), **dict.fromkeys(names, part))
        parts = tuple(fields[name] for name in names)
        if len({type(each) for each in parts}) != 1:
            raise FileError("the curvatures of the outputs have different structures; expected one")
        return cls(parts, fields["start"])


def swept(
    compute: Callable[[Sweep], MixableCurvature],
    problem: Problem,
    data: Data,
    curvature: str,
    generator: torch.Generator | None,
    label: str,
) -> tuple[Curvature | PerOutputCurvature, Statistics]:
    """Return the curvature that ``compute`` sums over a pass, or one for each output if each output learns its noise.

    Cost for each output: as many backward passes as one pass over all outputs, and C forward passes instead of one.
    """
    likelihood = problem.likelihood
    draws = independent_generator(generator) if curvature == "fisher_mc" else None
    sweep = Sweep(problem.network, likelihood, data, Seeds(curvature, draws), label)
    if not likelihood.learns_ratios or likelihood.ratios is None:
        return compute(sweep), sweep.statistics
    sweeps = [replace(sweep, seeds=replace(sweep.seeds, output=c)) for c in range(len(likelihood.ratios))]
    parts = tuple(map(compute, sweeps))
    statistics = sweeps[0].statistics
    losses = tuple(0.5 * statistics.data * float(ratio) for ratio in likelihood.ratios)
    return PerOutputCurvature(parts, likelihood.ratios), replace(statistics, losses=losses)


class SquaredSum:
    """The diagonal of the GGN at unit dispersion, summed over the Jacobians of a pass in float64."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._totals = [torch.zeros(b.form, dtype=torch.float64, device=network.device) for b in network.layout]

    def add(self, jacobians: LayerJacobians) -> None:
        """Add the squares of one chunk."""
        for total, (_, jacobian) in zip(self._totals, jacobians, strict=True):
            total += jacobian.squares().reshape(total.shape)

    def diagonal(self) -> Tensor:
        """Return the sum, (P,)."""
        return in_order(self._totals, self._network.layout, self._network.selection)


def root_seeds(root: Tensor) -> Tensor:
    """Return the columns of a root as seeds: R (B, C, K) as (K, B, C), and R (B, T, C, K) as (T K, B, T, C).

    With tokens each seed is zero at all tokens but one.
    """
    if root.ndim == 3:
        return root.permute(2, 0, 1)
    batch, tokens, classes, columns = root.shape
    seeds = root.new_zeros(tokens, columns, batch, tokens, classes)
    index = torch.arange(tokens, device=root.device)
    seeds[index, :, :, index] = root.permute(1, 3, 0, 2)
    return seeds.reshape(tokens * columns, batch, tokens, classes)
