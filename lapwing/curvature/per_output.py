"""One curvature for each output, so that the noise of each can change without the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from lapwing.curvature.blockwise import BlockwiseCurvature
from lapwing.curvature.full import FullCurvature
from lapwing.curvature.structures import BlockCurvature, DiagonalBlock, FullBlock, KroneckerBlock
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.protocol import Likelihood
from lapwing.losses import Statistics

Parts = FullCurvature | BlockwiseCurvature


@dataclass(frozen=True, eq=False)
class PerOutputCurvature:
    """H_c / s_c for each output c, with s the noise ratios at first; ``at`` gives Σ_c H_c / r_c for others.

    Memory: C times that of one curvature. Exact for full and diagonal structures; a Kronecker block keeps one
    input factor, and its output factor is the sum, as if it had been computed under those ratios.
    """

    parts: tuple[Parts, ...]
    start: Tensor  # s, (C,)

    def at(self, ratios: Tensor) -> Parts:
        """The curvature under these ratios (C,), differentiable in them."""
        weights = self.start.to(ratios) / ratios
        first = self.parts[0]
        if isinstance(first, FullCurvature):
            matrices = [part.matrix for part in self.parts if isinstance(part, FullCurvature)]
            return replace(first, matrix=_mixed(matrices, weights))
        columns = zip(*(part.blocks for part in self.parts if isinstance(part, BlockwiseCurvature)), strict=True)
        return replace(first, blocks=tuple(_summed(column, weights) for column in columns))

    def tensors(self) -> dict[str, Tensor]:
        found = {f"{i}.{key}": t for i, part in enumerate(self.parts) for key, t in part.tensors().items()}
        return {**found, "start": self.start}


def _summed(blocks: tuple[BlockCurvature, ...], weights: Tensor) -> BlockCurvature:
    first = blocks[0]
    if isinstance(first, KroneckerBlock):
        out = _mixed([b.out for b in blocks if isinstance(b, KroneckerBlock)], weights)
        return KroneckerBlock(first.inp, out, first.rows)
    if isinstance(first, DiagonalBlock):
        return DiagonalBlock(_mixed([b.values for b in blocks if isinstance(b, DiagonalBlock)], weights))
    if isinstance(first, FullBlock):
        return FullBlock(_mixed([b.matrix for b in blocks if isinstance(b, FullBlock)], weights))
    raise UnsupportedError(f"{type(first).__name__} does not split by outputs; use Kron(), Diagonal() or Full().")


def _mixed(tensors: list[Tensor], weights: Tensor) -> Tensor:
    """Σ_c weights_c tensors_c, differentiable in the weights: one tensor more, not as many as there are outputs."""
    weights = weights.to(tensors[0])
    total = weights[0] * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        total.addcmul_(weight, tensor)
    return total


def by_output(
    likelihood: Likelihood, compute: Callable[[int | None], tuple[Parts, Statistics]]
) -> tuple[Parts | PerOutputCurvature, Statistics]:
    """The curvature, or one for each output where the likelihood has a noise for each to be found.

    ``compute`` makes a pass with the seed of one output, or of all. Cost: as many backward passes as one pass over
    all outputs, and C forward passes instead of one.
    """
    if not (isinstance(likelihood, Gaussian) and likelihood.per_output and likelihood.learns_dispersion):
        return compute(None)
    assert likelihood.ratios is not None
    found = [compute(output) for output in range(len(likelihood.ratios))]
    statistics = found[0][1]
    losses = tuple(0.5 * statistics.data * float(ratio) for ratio in likelihood.ratios)
    parts = tuple(part for part, _ in found)
    return PerOutputCurvature(parts, likelihood.ratios), replace(statistics, losses=losses)
