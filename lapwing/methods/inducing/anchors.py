"""Inducing points as rows of the Jacobian, and their initial locations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lapwing.core.inputs import Inputs, check_finite
from lapwing.core.memory import budget, fitting, gathered
from lapwing.core.pool import Pool, class_labels
from lapwing.core.random import uniform
from lapwing.linalg.kmeans import centres_by_class
from lapwing.linalg.pivoted import greedy_pivots, trace_pivots
from lapwing.linalg.whitening import checked
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.priors.bound import BoundPrior
from lapwing.priors.kernel import prior_kernel

PIVOTS = {"greedy": greedy_pivots, "trace": trace_pivots}
STARTS = (*PIVOTS, "kmeans", "random")
COPIES = 3  # float64 chunks of rows that a kernel between rows holds: two, and one that is being computed


@dataclass(frozen=True, eq=False)
class Anchors:
    """M rows J_Z (M, P) of the Jacobian: that of output ``outputs[m]`` at input m, for each m.

    J_Z is kept between calls as the inputs and gradients of every layer; a layer that is shared over many positions
    keeps its rows themselves (at most M P numbers). What does not fit the byte budget is computed anew at every call.
    """

    network: Network
    inputs: Inputs  # (M, ...)
    outputs: Tensor  # (M,) output numbers; token-level outputs (T, C) are numbered through

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def parts(self) -> Iterable[LayerJacobians]:
        """J_Z in float64, in chunks of anchors that fit the byte budget."""
        return _Anew(self) if self._kept is None else self._kept

    @cached_property
    def _kept(self) -> tuple[LayerJacobians, ...] | None:
        """All chunks, if they take at most half of the byte budget."""
        kept, left = [], budget(self.network.device) // 2
        for part in _Anew(self):
            kept.append(part)
            left -= part.nbytes
            if left < 0:
                return None
        return tuple(kept)

    def computed(self) -> Iterator[LayerJacobians]:
        """Compute J_Z in chunks."""
        network = self.network
        each = 8 * COPIES * (network.footprint.width + network.footprint.whole)
        most = fitting(len(self), each, network.device)
        for rows in network.footprint.chunks(len(self), 1, network.dtype, network.device, most):
            tangent = network.linearise(network.take(self.inputs, rows))
            check_finite(tangent.network_output, "outputs of the network")
            yield tangent.jacobians(self._seeds(self.outputs[rows])).formed().double().formed()

    def differentiable(self, inputs: Tensor) -> LayerJacobians:
        """Return J_Z at other inputs, differentiable in these."""
        tangent = self.network.linearise(inputs, differentiable=True)
        return tangent.jacobians(self._seeds(self.outputs)).formed().double().formed()

    def _seeds(self, outputs: Tensor) -> Tensor:
        """Return one-hot output gradients (1, M, [T,] C) that select these outputs."""
        shape = self.network.output_shape
        seeds = one_hot(outputs, torch.Size(shape).numel()).to(self.network.dtype)
        return seeds.reshape(1, len(outputs), *shape)

    def kernel(self, prior: BoundPrior) -> Tensor:
        """Return J_Z A⁻¹ J_Zᵀ, (M, M)."""
        return gathered((self.against(part, prior) for part in self.parts), len(self))

    def against(self, jacobian: LayerJacobians, prior: BoundPrior) -> Tensor:
        """Return J A⁻¹ J_Zᵀ for the rows of another Jacobian, (B K, M), in float64."""
        jacobian = jacobian if jacobian.dtype == torch.float64 else jacobian.double()
        return gathered((prior_kernel(jacobian, prior, part) for part in self.parts), len(self), 1)

    def times(self, v: Tensor) -> Tensor:
        """Return v J_Zᵀ for v (n, P): (n, M)."""
        return gathered((part.jvp(v)[:, :, 0] for part in self.parts), len(self), 1)

    def combined(self, c: Tensor) -> Tensor:
        """Return c J_Z for c (n, M): (n, P)."""
        total, start = c.new_zeros(len(c), self.network.selection.size), 0
        for part in self.parts:
            total += part.vjp(c[:, start : start + part.batch, None])
            start += part.batch
        return total

    def at(self, inputs: Inputs) -> Anchors:
        """Return anchors with the same outputs at other inputs."""
        return Anchors(self.network, inputs, self.outputs)


@dataclass(frozen=True, eq=False)
class _Anew:
    """The rows of anchors, computed whenever they are iterated over."""

    anchors: Anchors

    def __iter__(self) -> Iterator[LayerJacobians]:
        return self.anchors.computed()


@dataclass(frozen=True, eq=False)
class Placement:
    """The choice of anchors among the outputs of the network at the inputs of a pool."""

    network: Network
    pool: Pool
    generator: torch.Generator

    @property
    def outputs(self) -> int:
        """The number of outputs at one input, those of all tokens together."""
        return torch.Size(self.network.output_shape).numel()

    def every_output(self) -> Anchors:
        """Return an anchor at every output of every input of the pool."""
        return self._numbered(torch.arange(len(self.pool) * self.outputs))

    def landmarks(self, count: int) -> Anchors:
        """Return ``count`` anchors: a random output of every input, then a second one of every input, and so on."""
        order = self._random(len(self.pool), self.outputs).argsort(1)  # the outputs of each input in random order
        index = torch.arange(len(self.pool)).repeat(self.outputs)[:count]
        place = torch.arange(self.outputs).repeat_interleave(len(self.pool))[:count]
        return self._at(index, order[index, place])

    def start(self, name: str, count: int, prior: BoundPrior, candidates: int) -> Anchors:
        """Return at most ``count`` anchors by one of ``STARTS``.

        "greedy" and "trace" choose pivots of the tangent kernel among random candidates, "kmeans" takes centres of the
        inputs, "random" takes rows of the pool. Inputs without centres (integers, several tensors) are drawn at random
        instead.
        """
        if name in PIVOTS:
            total = len(self.pool) * self.outputs
            numbers = self._random(total).argsort()[: max(candidates, count)].cpu()
            pivots = PIVOTS[name](checked(self._numbered(numbers).kernel(prior)), count)
            return self._numbered(numbers[pivots.cpu()])
        outputs = torch.arange(count, device=self.network.device) % self.outputs  # in turn
        if name == "kmeans" and isinstance(self.pool.inputs, Tensor) and self.pool.inputs.is_floating_point():
            return self._centres(outputs.sort().values)
        return self._drawn(outputs)

    def _centres(self, outputs: Tensor) -> Anchors:
        """Return centres of the inputs for each of these outputs; of the inputs of its class if targets are classes."""
        inputs, labels = self.pool.inputs, class_labels(self.pool.targets, self.outputs)
        centres = centres_by_class(inputs.flatten(1), labels, outputs, self.generator)
        return Anchors(self.network, centres.reshape(-1, *inputs.shape[1:]), outputs)

    def _drawn(self, outputs: Tensor) -> Anchors:
        """Return anchors at random inputs, each at the output of its class if the targets are classes.

        If there are more anchors than inputs, all inputs come again with the next output, until no pair is left.
        """
        size, targets = len(self.pool), self.pool.targets
        index = self._random(size).argsort().repeat(self.outputs)[: len(outputs)]
        labels = class_labels(targets[index.to(targets.device)], self.outputs)
        place = torch.arange(len(index), device=outputs.device)
        first = outputs[place % size] if labels is None else labels.to(outputs.device)
        return self._at(index, (first + place // size) % self.outputs)

    def _numbered(self, numbers: Tensor) -> Anchors:
        """Return the anchors with these numbers: number i C + c is output c at input i of the pool."""
        return self._at(numbers // self.outputs, numbers % self.outputs)

    def _at(self, index: Tensor, outputs: Tensor) -> Anchors:
        """Return anchors at the inputs of the pool with these numbers."""
        return Anchors(self.network, self.pool.rows(index), outputs.to(self.network.device))

    def _random(self, *shape: int) -> Tensor:
        return uniform(shape, self.generator, torch.empty(0, dtype=torch.float64))
