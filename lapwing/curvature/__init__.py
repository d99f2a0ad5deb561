"""Structures of the curvature H, their precisions, and the sweep over the data that computes them.

H is kept at unit dispersion; ``precision`` adds prior and dispersion. No method and no posterior lives here. The
structures of VaLLA and ELLA are in ``lapwing.methods.inducing_points``. The names below are what a new method or a new
structure needs (docs/extending.md).
"""

from lapwing.curvature.base import Curvature, Precision, Seeds, Sweep, accumulate, choose_seeds
from lapwing.curvature.blocks import BlockCurvature, BlockPrecision, BlockSum, DiagonalBlock, FullBlock
from lapwing.curvature.kronecker import BlockwiseCurvature, blockwise_sum

__all__ = [
    "BlockCurvature", "BlockPrecision", "BlockSum", "BlockwiseCurvature", "Curvature", "DiagonalBlock", "FullBlock",
    "Precision", "Seeds", "Sweep", "accumulate", "blockwise_sum", "choose_seeds",
]  # fmt: skip
