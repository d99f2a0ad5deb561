"""The work of one block of parameters, counted in operations of several kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from lapwing.curvature.factors import decomposition_work, factor_numbers, most_rows

# The time of other work over that of one multiplication in a plain pass, chosen with ``benchmarks.estimates``.
DOUBLE = 2.0  # a multiplication in float64
NUMBER = 16.0  # writing one number, where an operation does little else
CUBE = 7.0  # one for the cube of the size of a matrix whose eigenvectors are computed
HALVES = 0.625  # share of the multiplications of a Gram matrix that is computed by halves


@dataclass(frozen=True)
class Work:
    """Work by its kind, in numbers of operations. Each kind has its own speed."""

    products: float = 0.0  # multiplications in matrix products and convolutions, in the dtype of the network
    doubles: float = 0.0  # the same in float64
    numbers: float = 0.0  # numbers that are written by other operations
    cubes: float = 0.0  # cubes of the sizes of matrices that are decomposed

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, f.name) * times for f in fields(self)))

    __rmul__ = __mul__

    def __truediv__(self, by: float) -> Work:
        return self * (1 / by)

    @property
    def total(self) -> float:
        """The work in multiplications of a plain pass that take the same time."""
        return self.products + DOUBLE * self.doubles + NUMBER * self.numbers + CUBE * self.cubes

    @property
    def multiplications(self) -> float:
        """The multiplications alone, without numbers that are written and decompositions."""
        return self.products + self.doubles

    @property
    def in_double(self) -> Work:
        """The same work with all its products in float64."""
        return replace(self, products=0.0, doubles=self.multiplications, numbers=2 * self.numbers)


NOTHING = Work()


def summed(parts: Iterable[Work]) -> Work:
    """Return the sum of the parts."""
    return sum(parts, NOTHING)


@dataclass(frozen=True)
class FactorWork:
    """The sizes of one Kronecker factor of a linear map, and of its groups together."""

    side: str
    size: int
    rows: int  # at most its rank
    summed: int  # outer products that its sum takes
    groups: int = 1

    def is_rows(self, limit: int) -> bool:
        """Return whether it is kept as its rows, with this ``factor_limit``."""
        return self.rows <= most_rows(self.size, limit)

    def is_diagonal(self, limit: int) -> bool:
        """Return whether it is a diagonal, with this ``factor_limit``."""
        return not self.is_rows(limit) and self.size > limit

    def numbers(self, limit: int) -> int:
        """Return how many numbers it has."""
        return self.groups * factor_numbers(self.size, self.rows, limit)

    def nbytes(self, limit: int, itemsize: int) -> int:
        """Return its bytes: sums are float64, rows have the network's dtype."""
        return self.numbers(limit) * (itemsize if self.is_rows(limit) else 8)

    def directions(self, limit: int) -> int:
        """Return the parts of its eigenbasis: those of the rows, and one for the rest."""
        return self.rows + 1 if self.is_rows(limit) else self.size

    def basis(self, limit: int) -> int:
        """Return the numbers of its eigenbasis; the axes of a diagonal have none."""
        return 0 if self.is_diagonal(limit) else self.numbers(limit)

    def decomposition(self, limit: int) -> Work:
        """Return the work to decompose it."""
        return Work(cubes=self.groups * decomposition_work(self.size, self.rows, limit))

    def sums(self, limit: int, share: float) -> Work:
        """Return the work to sum it over all data; ``share`` is that of its entries that are computed."""
        entries = self.groups * self.summed * self.size
        is_matrix = not self.is_rows(limit) and self.size <= limit
        return Work(share * entries * self.size if is_matrix else 0, numbers=entries)

    def turned(self, limit: int, vectors: int) -> Work:
        """Return the work to turn so many vectors into its eigenbasis."""
        if self.is_diagonal(limit):
            return NOTHING
        each = 2 * self.rows if self.is_rows(limit) else self.size  # there, and back for the rest
        return self.groups * vectors * self.size * Work(each, numbers=1)


@dataclass(frozen=True)
class BlockWork:
    """The sizes of one block of parameters, and its work for one datum and some seeds of backward passes."""

    size: int
    positions: int = 1  # T: pixels, tokens or time steps that share the weight
    form: tuple[int, int, int] | None = None  # (groups, d_out, d_in) of a linear map; None for other parameters
    closed: bool = False  # the last layer, whose curvature needs no seeds
    lookup: bool = False  # the table of an embedding, whose inputs are one-hot
    opaque: bool = False  # without a rule: its Jacobian takes passes of its own

    @property
    def shared(self) -> bool:
        """Whether it is a linear map that is used at several positions."""
        return self.form is not None and self.positions > 1 and not self.lookup

    @property
    def product(self) -> int:
        """Multiplications of the linear map for one datum."""
        return 0 if self.form is None or self.lookup else self.positions * self.size

    @property
    def ends(self) -> tuple[int, int]:
        """The numbers that enter and leave the linear map at all positions."""
        groups, d_out, d_in = self.form or (1, self.size, 0)
        return (0 if self.lookup else self.positions * groups * d_in), self.positions * groups * d_out

    def factors(self, data: int, seeds: int) -> Iterator[FactorWork]:
        """Yield the Kronecker factors that are no diagonal of counts."""
        if self.form is not None:
            groups, d_out, d_in = self.form
            uses = data * self.positions
            if not self.lookup:
                yield FactorWork("input", d_in, uses, uses, groups)
            rows, sums = (uses * d_out, uses) if self.closed else (uses * seeds, uses * seeds)
            yield FactorWork("output", d_out, rows, sums, groups)

    @property
    def gradient(self) -> int:
        """Numbers kept of the gradient of one output: the two factors of a linear map, or the row itself if shared."""
        if self.form is None or self.shared:
            return self.size
        return sum(self.ends)

    def formed(self, seeds: int) -> int:
        """Return the numbers kept of the gradients of all seeds for repeated products."""
        if self.form is None or (self.shared and self.positions > seeds):
            return seeds * self.size
        inp, out = self.ends
        return inp + seeds * out

    def whole(self, seeds: int) -> Work:
        """Return the work to form the gradients of all seeds."""
        return Work(seeds * self.product if self.shared else 0, numbers=seeds * self.size)

    def squares(self, seeds: int) -> Work:
        """Return the work to sum the squared gradients of all seeds."""
        if self.closed:
            return Work(self.product, numbers=self.ends[1])
        if self.shared:
            return self.whole(seeds) + Work(numbers=seeds * self.size)
        if self.form is None or self.lookup:
            return Work(numbers=seeds * (self.size if self.form is None else self.ends[1]))
        return Work(self.size, numbers=seeds * self.ends[1])

    def quadratic(self, outputs: int) -> Work:
        """Return the work of J D Jᵀ for all outputs of one datum, with a diagonal D."""
        if self.shared or self.form is None:
            form = Work(outputs**2 * self.size, numbers=outputs * self.size)
            return form + (self.whole(outputs) if self.shared else NOTHING)
        _, out = self.ends
        return Work((0 if self.lookup else self.size) + outputs**2 * out, numbers=outputs * out)

    def along(self, outputs: int) -> Work:
        """Return the work of J v for one vector v, from gradients as they are computed."""
        return Work(outputs * self.size if self.form is None else self.product + outputs * self.ends[1])

    def products(self, seeds: int) -> Work:
        """Return the work of Jᵀ J v for one vector v, from gradients that are kept."""
        if self.form is None or (self.shared and self.positions > seeds):
            return Work(2 * seeds * self.size)
        return Work(2 * (self.product + seeds * self.ends[1]))
