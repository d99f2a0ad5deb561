"""The error of a curvature that is estimated from drawn labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.processes import ALONE, Processes
from lapwing.networks.jacobians import BlockJacobian


@dataclass(frozen=True)
class Estimate:
    """How a curvature was estimated.

    >>> print(Estimate(draws=1))
    the curvature is estimated from one label drawn for each datum; curvature='ggn' is exact.
    """

    draws: int  # labels for each datum
    error: float = 0.0  # relative standard error for single units; zero if it is not known

    def __str__(self) -> str:
        labels = "one label" if self.draws == 1 else f"{self.draws} labels"
        size = f", relative error about {100 * self.error:.2g} % for single units" if self.error else ""
        return f"the curvature is estimated from {labels} drawn for each datum{size}; curvature='ggn' is exact."

    def tensor(self) -> Tensor:
        """Return both numbers, (2,), for a file."""
        return torch.tensor([self.draws, self.error], dtype=torch.float64)

    @classmethod
    def stored(cls, numbers: Tensor | None) -> Estimate | None:
        """Return it from a file, or None if the file has none."""
        return None if numbers is None else cls(int(numbers[0]), float(numbers[1]))


class DrawError:
    """The relative standard error of the curvature of single units, over the blocks whose seeds are drawn.

    A unit is an output of a layer; its curvature is the sum over data of its squared gradient, an entry on the diagonal
    of the output factor. The data are given, so only the draws of one datum vary: their variance within each datum adds
    up to that of the sum. With one draw there is no variance to see, and the squares themselves bound it.

    Cost: a few operations on each gradient.
    """

    def __init__(self) -> None:
        self._values: dict[int, Tensor] = {}  # by the number of the block, (units,)
        self._variances: dict[int, Tensor] = {}

    def add(self, number: int, part: BlockJacobian) -> None:
        """Add the Jacobian of a block for all draws of some data; they are divided by the root of their number."""
        squares = part.unit_squares()
        draws = len(squares)
        value = squares.sum((0, 1), dtype=torch.float64)
        gaps = squares if draws == 1 else squares - squares.mean(0)
        variance = gaps.square().sum((0, 1), dtype=torch.float64) * (1 if draws == 1 else draws / (draws - 1))
        for sums, term in ((self._values, value), (self._variances, variance)):
            sums[number] = sums[number] + term if number in sums else term

    def relative(self, processes: Processes = ALONE, blocks: int = 0) -> float:
        """Return the error, the root of the mean square over blocks; zero if no block was drawn or all are zero.

        It is that of the data of all processes, for a network with so many blocks.
        """
        numbers = range(max(blocks, 1 + max(self._values, default=-1)))
        sums = processes.sum([each.get(i) for each in (self._values, self._variances) for i in numbers])
        pairs = zip(sums[: len(numbers)], sums[len(numbers) :], strict=True)
        ratios = [float(v.sum() / value.square().sum()) for value, v in pairs if value is not None and value.any()]
        return (sum(ratios) / len(ratios)) ** 0.5 if ratios else 0.0
