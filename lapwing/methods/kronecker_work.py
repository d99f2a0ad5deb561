"""The work and memory of Kronecker factors, for the methods that have them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lapwing.methods.costs import Workload
from lapwing.methods.work import HALVES, FactorWork, Work, summed


@dataclass(frozen=True)
class KroneckerWork:
    """The Kronecker factors of all linear maps of a workload, and the blocks that are none."""

    workload: Workload
    full_limit: int  # entries up to which a block that is no linear map is a matrix
    factor_limit: int  # size up to which a factor is a matrix

    @cached_property
    def factors(self) -> list[FactorWork]:
        """The factors that are no diagonal of counts."""
        work = self.workload
        return [factor for block in work.blocks for factor in block.factors(work.data, work.seeds)]

    @property
    def numbers(self) -> int:
        """Numbers in all factors; a table has counts on the side of its rows."""
        counts = sum(block.form[2] for block in self.workload.blocks if block.form is not None and block.lookup)
        return counts + sum(factor.numbers(self.factor_limit) for factor in self.factors)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors, and of the blocks that are no linear map."""
        counts = sum(block.form[2] for block in self.workload.blocks if block.form is not None and block.lookup)
        each = (factor.nbytes(self.factor_limit, self.workload.itemsize) for factor in self.factors)
        return 8 * counts + sum(each) + self._other_bytes

    @property
    def basis_bytes(self) -> int:
        """Bytes of the eigenbases and of one eigenvalue for each pair of directions, and of the other blocks."""
        numbers = sum(factor.basis(self.factor_limit) for factor in self.factors)
        for block in self.workload.blocks:
            if block.form is not None:
                sides = [
                    f.directions(self.factor_limit) for f in block.factors(self.workload.data, self.workload.seeds)
                ]
                inp, out = (block.form[2], *sides) if block.lookup else sides
                numbers += block.form[0] * inp * out
        return self.workload.itemsize * numbers + self._other_bytes

    @property
    def _others(self) -> list[int]:
        return [block.size for block in self.workload.blocks if block.form is None]

    @property
    def _other_bytes(self) -> int:
        """Bytes of blocks that are no linear map: a float64 matrix, or a diagonal in the network's dtype."""
        item = self.workload.itemsize
        return sum(8 * size**2 if size <= self.full_limit else item * size for size in self._others)

    @property
    def sums(self) -> Work:
        """Work to sum all factors and the other blocks, for one datum."""
        data, seeds = self.workload.data, self.workload.seeds
        # Only half of a matrix is summed, except over positions that lie apart in memory.
        factors = [
            factor.sums(self.factor_limit, 1.0 if block.shared and factor.side == "output" else HALVES)
            for block in self.workload.blocks
            for factor in block.factors(data, seeds)
        ]
        full = sum(size**2 for size in self._others if size <= self.full_limit)
        return summed(factors) / data + seeds * Work(doubles=full, numbers=sum(self._others))

    @property
    def decompositions(self) -> Work:
        """Work to decompose all factors and full blocks."""
        others = sum(size**3 for size in self._others if size <= self.full_limit) / 3
        return summed(factor.decomposition(self.factor_limit) for factor in self.factors) + Work(cubes=others)

    def rotated(self, seeds: int, closed: bool = False) -> Work:
        """Return the work to turn the gradients of a datum into the eigenbases; ``closed`` takes closed forms."""
        total = Work()
        for block in self.workload.blocks:
            for factor in block.factors(self.workload.data, self.workload.seeds):
                each = 1 if factor.side == "input" or (closed and block.closed) else seeds
                total += factor.turned(self.factor_limit, each * block.positions)
        return total

    @property
    def draws(self) -> Work:
        """Work of the weights that predictions of many outputs draw once."""
        sides = sum(block.size * sum(block.form[1:]) for block in self.workload.blocks if block.form is not None)
        return self.workload.draws + self.workload.pairs * Work(sides)

    @property
    def note(self) -> str:
        """The factors that would be a diagonal; empty if none."""
        wide = [factor for factor in self.factors if factor.is_diagonal(self.factor_limit)]
        listed = list(dict.fromkeys(f"{f.side} factor diagonal: {f.size:,} > {self.factor_limit:,}" for f in wide))
        return "; ".join(listed[:3]) + (f"; and {len(listed) - 3} more" if len(listed) > 3 else "")
