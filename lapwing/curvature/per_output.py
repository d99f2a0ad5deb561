"""One curvature for each output, so that the noise of each can change without the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import Tensor

from lapwing.core.state import State, class_named, saved
from lapwing.curvature.protocols import Curvature
from lapwing.likelihoods.protocol import Likelihood, NoisePerOutput
from lapwing.losses import Statistics
from lapwing.networks.network import Network

S = TypeVar("S")


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
        stored = [state.parts[str(i)] for i in range(len(state.parts))]
        parts = tuple(class_named(part.name).from_state(part, network) for part in stored)
        return cls(parts, state.tensors["start"].to(network.device))


def by_output(
    likelihood: Likelihood, compute: Callable[[int | None], tuple[MixableCurvature, Statistics]]
) -> tuple[Curvature | PerOutputCurvature, Statistics]:
    """Return the curvature, or one for each output if the likelihood learns a noise for each.

    ``compute`` makes a pass for one output, or for all of them together. Cost: as many backward passes as one pass
    over all outputs, and C forward passes instead of one.
    """
    if not (isinstance(likelihood, NoisePerOutput) and likelihood.learns_ratios):
        return compute(None)
    assert likelihood.ratios is not None
    passes = [compute(output) for output in range(len(likelihood.ratios))]
    statistics = passes[0][1]
    losses = tuple(0.5 * statistics.data * float(ratio) for ratio in likelihood.ratios)
    parts = tuple(part for part, _ in passes)
    return PerOutputCurvature(parts, likelihood.ratios), replace(statistics, losses=losses)
