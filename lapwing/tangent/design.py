"""The design matrix Rᵀ J of a network over all data, whose Gram matrix is the GGN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.inputs import tensors_in
from lapwing.core.memory import budget
from lapwing.core.processes import Processes
from lapwing.core.random import generator_or_default, normal
from lapwing.core.weights import Weighted
from lapwing.curvature.protocols import floored_by_layer, in_runs
from lapwing.curvature.seeds import Seeds
from lapwing.curvature.sweep import SquaredSum, Sweep
from lapwing.errors import DataError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.linalg.design import Part, forward_product, gram_product
from lapwing.linalg.operators import refuse_asymmetric
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.problem import Statistics

CACHE = 0.5  # share of the byte budget for layer factors that are kept between products


@dataclass(frozen=True, eq=False)
class JacobianPart:
    """The rows of one chunk of data: one for each sample and seed."""

    jacobians: LayerJacobians

    @property
    def rows(self) -> int:
        return self.jacobians.batch * self.jacobians.outputs

    def forward(self, v: Tensor) -> Tensor:
        return self.jacobians.jvp(v).flatten(1)

    def back(self, u: Tensor) -> Tensor:
        return self.jacobians.vjp(u.reshape(len(u), self.jacobians.batch, self.jacobians.outputs))

    def gram(self, v: Tensor) -> Tensor:
        return self.jacobians.gram(v)

    def double(self) -> JacobianPart:
        return JacobianPart(self.jacobians.double())


@dataclass(frozen=True, eq=False)
class SharedPart:
    """Rows of several processes, those of one after those of another: products are summed or gathered over all."""

    own: Callable[[], Iterator[JacobianPart]]  # the rows of this process
    counts: tuple[int, ...]  # rows of each process
    processes: Processes
    like: Tensor

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def forward(self, v: Tensor) -> Tensor:
        parts = [part.forward(v).double() for part in self.own()]
        parts = parts or [torch.zeros(len(v), 0, dtype=torch.float64, device=self.like.device)]
        everywhere = self.processes.gather(torch.cat(parts, 1).mT.contiguous(), self.counts)
        assert everywhere is not None
        return everywhere.mT

    def back(self, u: Tensor) -> Tensor:
        start = sum(self.counts[: self.processes.rank])
        total: Tensor | None = None
        for part in self.own():
            rows = part.back(u[:, start : start + part.rows]).double()
            total, start = rows if total is None else total.add_(rows), start + part.rows
        return self.processes.sum([total])[0]

    def gram(self, v: Tensor) -> Tensor:
        total: Tensor | None = None
        for part in self.own():
            total = part.gram(v).double() if total is None else total.add_(part.gram(v))
        return self.processes.sum([total])[0]


@dataclass(frozen=True, eq=False)
class NetworkDesign:
    """Products with Rᵀ J at unit dispersion, for many vectors at once.

    The layer-wise factors of a chunk give J v and Jᵀ u in two products for each vector and layer, half of the cost of
    forward and backward passes, after the backward passes for its seeds. If the factors of all data fit ``CACHE``,
    those are made once; otherwise at every pass, streaming. ``part`` limits the samples of one part; if it is None,
    only memory does.
    """

    network: Network
    likelihood: Likelihood
    data: Data
    factors: tuple[LayerJacobians, ...] | None  # None if every pass computes them anew
    statistics: Statistics
    rows: int
    curvature: str = "ggn"  # or "jacobian": J itself, without the likelihood's root
    part: int | None = None
    exact: bool = False  # whether products are computed in float64, from factors in the network's dtype
    source: Data | None = None  # the data as given, if ``data`` is a copy in memory, the same at every pass
    counts: tuple[tuple[int, ...], ...] = ()  # rows of every part in each process; one part unless ``part`` is given

    @classmethod
    def build(
        cls, network: Network, likelihood: Likelihood, data: Data, cache: int | None = None, curvature: str = "ggn",
        part: int | None = None,
    ) -> NetworkDesign:  # fmt: skip
        """Make one pass over the data for loss, counts, and the factors if they fit ``cache`` bytes.

        If the factors do not fit but the data do, the data are kept, so that a loader may shuffle.
        """
        if part is not None and part < 1:
            raise DataError(f"part is {part}; expected at least one datum in each part.")
        if cache is None:
            cache = int(CACHE * budget(network.device))
        data, processes = data.steady(), data.processes
        given, kept_data = data, fixed(data, cache)
        given.refuse_same_parts()
        data = kept_data if processes.all(kept_data is not given) else given
        part = None if part is None else -(-part // processes.size)
        sweep = Sweep(network, likelihood, data, Seeds(curvature), "Jacobian", part)
        kept: list[LayerJacobians] | None = []
        rows, nbytes = list[int](), 0
        for jacobians in sweep:
            rows.append(jacobians.batch * jacobians.outputs)
            if kept == [] and jacobians.formed_bytes() > cache:  # before the factors of one chunk exceed the memory
                kept = None
            if kept is not None:
                kept.append(jacobians.formed())
                nbytes += kept[-1].nbytes
                if nbytes > cache:
                    kept = None
        factors = tuple(kept) if processes.all(kept is not None) and kept is not None else None
        source = None if data is given else given
        counts = processes.every(rows if part is not None else [sum(rows)])
        return cls(
            network, likelihood, data, factors, sweep.statistics, sum(map(sum, counts)), curvature, part,
            source=source, counts=tuple(zip_longest(*counts, fillvalue=0)),
        )  # fmt: skip

    @property
    def streamed(self) -> bool:
        """Whether every pass computes the parts anew, in the order of the data."""
        return self.factors is None

    @property
    def size(self) -> int:
        return self.network.selection.size

    @property
    def like(self) -> Tensor:
        return torch.empty(0, dtype=self.network.dtype, device=self.network.device)

    @property
    def nbytes(self) -> int:
        """The bytes kept between products: factors, and a copy of the data."""
        data = () if self.source is None else tensors_in(list(self.data.source))
        return sum(part.nbytes for part in self.factors or ()) + sum(t.numel() * t.element_size() for t in data)

    def probe(self) -> NetworkDesign:
        """Return the design on which to test that passes agree: the first batch alone if the data are kept."""
        if self.factors is not None or self.source is None:
            return self
        first = Data(list(islice(iter(self.data.source), 1)), self.data.device, processes=self.data.processes)
        return NetworkDesign.build(self.network, self.likelihood, first, 0, self.curvature, self.part)

    def whole(self) -> Tensor:
        """Return Rᵀ J as a matrix, (rows, P), from factors cast to float64 before they are multiplied. For few rows.

        Those of one process come after those of another.
        """
        processes = self.data.processes
        rows = sum(count[processes.rank] for count in self.counts)
        matrix = torch.empty(rows, self.size, dtype=torch.float64, device=self.like.device)
        start = 0
        for part in self._parts():
            for some in in_runs(part.jacobians.double(), 3 * self.size, self.like.device):
                own = some.whole().flatten(0, 1)
                matrix[start : start + len(own)] = own
                start += len(own)
        everywhere = processes.gather(matrix, [sum(column) for column in zip(*self.counts, strict=True)])
        assert everywhere is not None
        return everywhere

    def diagonal(self) -> Tensor:
        """Return the diagonal of the GGN, (P,), no entry below a thousandth of the median of its layer."""
        squares = SquaredSum(self.network)
        for part in self.own_parts():
            squares.add(part.jacobians)
        return floored_by_layer(squares.diagonal(self.data.processes), self.network.selection)

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts; one of several processes is made of a part of each, or of all its rows if there is one."""
        processes = self.data.processes
        if processes.group is None:
            yield from self.own_parts()
        elif self.part is None:
            yield SharedPart(self.own_parts, self.counts[0], processes, self.like)
        else:
            own = self.own_parts()
            for count in self.counts:
                one = [part] if count[processes.rank] and (part := next(own, None)) else []
                yield SharedPart(one.__iter__, count, processes, self.like)

    def own_parts(self) -> Iterator[JacobianPart]:
        """Yield the parts of this process."""
        return (part.double() for part in self._parts()) if self.exact else self._parts()

    def _parts(self) -> Iterator[JacobianPart]:
        if self.factors is not None:
            yield from (JacobianPart(jacobians) for jacobians in self.factors)
            return
        for jacobians in Sweep(self.network, self.likelihood, self.data, Seeds(self.curvature), "products", self.part):
            yield JacobianPart(jacobians)


def refuse_unsteady(design: NetworkDesign, generator: torch.Generator | None = None) -> None:
    """Raise unless the products are those of one symmetric matrix. Two passes, over one batch if data are kept."""
    refuse_redrawn(design)
    probe, device = design.probe(), design.network.device
    refuse_asymmetric(
        lambda v: gram_product(probe, v), probe.size, generator=generator_or_default(generator), device=device
    )


def refuse_reordered(design: NetworkDesign) -> None:
    """Raise unless two passes give the same rows in the same order. Two passes, over one batch if data are kept.

    The GGN is a sum and does not depend on the order of the data; a vector with one entry for each row does.
    """
    refuse_redrawn(design)
    if not design.streamed:
        return
    design = design.probe()
    like = torch.empty(0, dtype=torch.float64, device=design.like.device)
    v = normal((1, design.size), generator_or_default(None), like)
    first, second = forward_product(design, v), forward_product(design, v)
    gap, scale = float((first - second).norm()), float(first.norm())
    if gap > 1e-4 * scale:
        raise DataError(
            f"two passes over the data gave different rows, by {gap / scale:.3g} of their size; expected the same "
            "batches in the same order. Use shuffle=False and no random augmentation."
        )


def refuse_redrawn(design: NetworkDesign) -> None:
    """Raise unless a loader whose data are kept gives the same rows again, in any order; read it a second time for it.

    The data kept of a loader that augments at random would be one random draw.
    """
    if design.source is not None:
        design.source.repeats()


def fixed(data: Data, most: int) -> Data:
    """Return the data kept in memory, the same at every pass, if they take at most ``most`` bytes; else as they are."""
    kept, nbytes = [], 0
    for batch in data.batches("reading", weighted=True):
        targets = batch.targets if batch.weights is None else Weighted(batch.targets, batch.weights)
        kept.append((batch.inputs, targets))
        nbytes += sum(t.numel() * t.element_size() for t in (*tensors_in(batch.inputs), batch.targets))
        if nbytes > most:
            return data
    return Data(kept, data.device, progress=data.progress, processes=data.processes)
