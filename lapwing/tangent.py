"""The tangent model over a data set: products with its Jacobian and GGN, its loss and gradient.

Jacobians of one batch are in ``lapwing.networks``, solvers in ``lapwing.linalg``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.curvature.base import Seeds, SquaredSum, Sweep, floor_by_layer, in_runs
from lapwing.data.batches import Data, Weighted
from lapwing.data.inputs import tensors_in
from lapwing.data.processes import ALONE, Processes
from lapwing.errors import DataError, NumericalError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.linalg.operators import Design, DesignRows, back_product, forward_product, gram_product, refuse_asymmetric
from lapwing.networks.forward import outside_autocast
from lapwing.networks.network import Network
from lapwing.networks.tangent import LayerJacobians, Tangent
from lapwing.problem import Statistics
from lapwing.runtime.memory import budget, chunks, concat_chunks
from lapwing.runtime.settings import describe_kind
from lapwing.runtime.threads import generator_or_default, normal

CACHE_SHARE = 0.5  # share of the byte budget for layer factors that are kept between products


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
        everywhere = self.processes.gather_rows(torch.cat(parts, 1).mT.contiguous(), self.counts)
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
        return self.processes.sum([gram_product(self.own(), v)])[0]


@dataclass(frozen=True, eq=False)
class NetworkDesign:
    """Products with Rᵀ J at unit dispersion, for many vectors at once.

    The layer-wise factors of a chunk give J v and Jᵀ u in two products for each vector and layer, half of the cost of
    forward and backward passes, after the backward passes for its seeds. If the factors of all data fit
    ``CACHE_SHARE``, those are made once; otherwise at every pass, streaming. ``part`` limits the samples of one part;
    if it is None, only memory does.
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
            cache = int(CACHE_SHARE * budget(network.device))
        data, processes = data.requiring_same_rows(), data.processes
        given, kept_data = data, keep_in_memory(data, cache)
        given.refuse_same_parts()
        data = kept_data if processes.all_true(kept_data is not given) else given
        part = None if part is None else -(-part // processes.size)
        sweep = Sweep(network, likelihood, data, Seeds(curvature), "Jacobian", part)
        kept: list[LayerJacobians] | None = []
        rows, nbytes = list[int](), 0
        for jacobians in sweep:
            rows.append(jacobians.batch * jacobians.outputs)
            if (
                kept == [] and jacobians.materialised_bytes() > cache
            ):  # before the factors of one chunk exceed the memory
                kept = None
            if kept is not None:
                kept.append(jacobians.materialise())
                nbytes += kept[-1].nbytes
                if nbytes > cache:
                    kept = None
        factors = tuple(kept) if processes.all_true(kept is not None) and kept is not None else None
        source = None if data is given else given
        counts = processes.gather_values(rows if part is not None else [sum(rows)])
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
        everywhere = processes.gather_rows(matrix, [sum(column) for column in zip(*self.counts, strict=True)])
        assert everywhere is not None
        return everywhere

    def diagonal(self) -> Tensor:
        """Return the diagonal of the GGN, (P,), no entry below a thousandth of the median of its layer."""
        squares = SquaredSum(self.network)
        for part in self.own_parts():
            squares.add(part.jacobians)
        return floor_by_layer(squares.diagonal(self.data.processes), self.network.selection)

    def __iter__(self) -> Iterator[DesignRows]:
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
        design.source.is_repeatable()


def keep_in_memory(data: Data, most: int) -> Data:
    """Return the data kept in memory, the same at every pass, if they take at most ``most`` bytes; else as they are."""
    kept, nbytes = [], 0
    for batch in data.batches("reading", weighted=True):
        targets = batch.targets if batch.weights is None else Weighted(batch.targets, batch.weights)
        kept.append((batch.inputs, targets))
        nbytes += sum(t.numel() * t.element_size() for t in (*tensors_in(batch.inputs), batch.targets))
        if nbytes > most:
            return data
    return Data(kept, data.device, progress=data.progress, processes=data.processes)


DENSE_SHARE = 0.5  # share of the byte budget for the Jacobian over all data, if it is kept
MAX_DOUBLE_BYTES = 2**28  # largest Jacobian in bytes that is kept in float64 for networks of any dtype


def tangent_model(network: Network, likelihood: Likelihood, data: Data) -> TangentModel:
    """Return the tangent model with its Jacobian in memory if it fits, else one that streams over the data."""
    data = data.requiring_same_rows()
    rows, shape = 0, network.output_shape
    for batch in data.batches("counting"):
        seen = batch.targets.shape if len(shape) == 2 else batch.targets.shape[:1]  # tokens may differ between batches
        rows += seen[:2].numel() * shape[-1]
    most = max(data.processes.gather_numbers(rows))
    room = int(DENSE_SHARE * budget(network.device))
    entries = most * network.selection.size
    dtype = torch.float64 if 8 * entries <= MAX_DOUBLE_BYTES else network.dtype
    if entries * torch.finfo(dtype).bits // 8 <= room:
        return DenseTangent.build(network, likelihood, data, rows, dtype)
    return StreamedTangent(network, likelihood, data)


@dataclass(frozen=True, eq=False)
class DenseTangent:
    """The loss of the tangent model at unit dispersion, with the Jacobian of all data in memory.

    The model is h(theta, x) = f + J (theta - w̃), and the loss a function of delta = theta - w̃. A pass over the data
    costs a matrix product.

    Losses and gradients are float64 even if the Jacobian is not, to refine solves whose products are rounded.
    """

    f: Tensor  # (N [T], C): every token is a datum
    y: Tensor
    jacobian: Tensor  # (N [T] C, P)
    likelihood: Likelihood
    processes: Processes = ALONE
    dtype: ClassVar[torch.dtype] = torch.float64

    @classmethod
    def build(
        cls, network: Network, likelihood: Likelihood, data: Data, rows: int, dtype: torch.dtype = torch.float64
    ) -> DenseTangent:
        """Return the model after one pass over the data; ``rows`` is the number of rows of the Jacobian."""
        outputs, targets, start = [], [], 0
        jacobian = torch.empty(rows, network.selection.size, dtype=dtype, device=network.device)
        for batch in data.batches("Jacobian"):
            for part, tangent in network.tangents(batch.inputs):
                f = tangent.network_output.double()
                y = likelihood.targets(f, batch.targets[part])
                outputs.append(f.flatten(0, -2))
                targets.append(y.flatten(0, 1) if f.ndim == 3 else y)
                start = _fill_rows(jacobian, start, tangent)
        if not outputs:  # of a process without data
            outputs = [torch.zeros(0, network.output_shape[-1], dtype=torch.float64, device=network.device)]
            targets = [torch.zeros(0, device=network.device)]
        return cls(torch.cat(outputs), torch.cat(targets), jacobian, likelihood, data.processes)

    def _double_product(self, v: Tensor) -> Tensor:
        """Return J v for one v (P,), in float64."""
        return torch.cat([rows.double() @ v for rows in self._parts]).reshape(self.f.shape)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        """The Jacobian in parts that fit the byte budget in float64."""
        rows, size = self.jacobian.shape
        return tuple(self.jacobian[part] for part in chunks(rows, 8 * size, self.jacobian.device))

    def gradient(self, delta: Tensor) -> tuple[float, Tensor]:
        """Return the summed loss at w̃ + delta and its gradient (P,), float64."""
        loss, total = delta.new_zeros(()), torch.zeros_like(delta)
        if len(self.f):
            loss, slope = loss_slope(self.likelihood, self.f + self._double_product(delta), self.y)
            parts = self._parts
            for rows, slopes in zip(parts, slope.reshape(-1).split([len(rows) for rows in parts]), strict=True):
                total += slopes @ rows.double()
        loss, total = self.processes.sum([loss, total])
        return float(loss), total

    def products(self, delta: Tensor, v: Tensor) -> Tensor:
        """Return Σ Jᵀ Λ J v for v (K, P), with Λ the Hessian of the loss in the outputs at w̃ + delta."""
        own = torch.zeros_like(v, dtype=torch.float64)
        if len(self.f):
            jv = torch.cat([delta[None], v.to(delta)]).to(self.jacobian) @ self.jacobian.mT
            jv = jv.double().reshape(len(jv), *self.f.shape)
            product = hessian_product(self.likelihood, self.f + jv[0], self.y, jv[1:])
            own = (product.reshape(len(v), -1).to(self.jacobian) @ self.jacobian).double()
        return self.processes.sum([own])[0]

    def losses(self, delta: Tensor, direction: Tensor, steps: Tensor) -> Tensor:
        """Return the summed loss at w̃ + delta + t direction for every t in steps, by one pass."""
        own = torch.zeros(len(steps), dtype=torch.float64, device=delta.device)
        if len(self.f):
            h, along = self.f + self._double_product(delta), self._double_product(direction)
            own = torch.stack([self.likelihood.loss(h + t * along, self.y).sum() for t in steps])
        return self.processes.sum([own])[0]


def _fill_rows(matrix: Tensor, start: int, tangent: Tangent) -> int:
    """Write the Jacobian of a chunk into the rows of a matrix from ``start`` on; return the row after its last one."""
    for some in in_runs(tangent.jacobians(), 2 * matrix.shape[1], matrix.device):
        rows = some.whole().flatten(0, 1)
        matrix[start : start + len(rows)] = rows
        start += len(rows)
    return start


@dataclass(frozen=True, eq=False)
class StreamedTangent:
    """The loss of the tangent model by passes over the batches, in the network's dtype; sums in float64."""

    network: Network
    likelihood: Likelihood
    data: Data

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    def _products(self, label: str, v: Tensor) -> Iterator[tuple[object, Tensor, Tensor, Tensor]]:
        """Yield (inputs, f, y, J v) for every batch."""
        v = v.to(self.network.device, self.network.dtype)
        plain = self.network.with_shift(None)
        for batch in self.data.batches(label):
            f = plain(batch.inputs).double()
            y = self.likelihood.targets(f, batch.targets)
            yield batch.inputs, f, y, plain.jvp(batch.inputs, v).double()

    def gradient(self, delta: Tensor) -> tuple[float, Tensor]:
        total, loss = torch.zeros_like(delta, dtype=torch.float64), 0.0
        for inputs, f, y, jv in self._products("tangent gradient", delta[None]):
            batch_loss, slope = loss_slope(self.likelihood, f + jv[0], y)
            loss += float(batch_loss)
            total += self.network.vjp(inputs, slope[None].to(self.network.dtype))[0]
        sums = self.data.processes.sum([torch.tensor(loss, dtype=torch.float64), total])
        return float(sums[0]), sums[1]

    def products(self, delta: Tensor, v: Tensor) -> Tensor:
        total = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
        for inputs, f, y, jv in self._products("tangent products", torch.cat([delta[None].to(v), v])):
            product = hessian_product(self.likelihood, f + jv[0], y, jv[1:])
            total += self.network.vjp(inputs, product.to(self.network.dtype))
        return self.data.processes.sum([total])[0]

    def losses(self, delta: Tensor, direction: Tensor, steps: Tensor) -> Tensor:
        total = torch.zeros(len(steps), dtype=torch.float64, device=delta.device)
        for _, f, y, jv in self._products("tangent losses", torch.stack([delta, direction])):
            h = f + jv[0]
            total += torch.stack([self.likelihood.loss(h + t * jv[1], y).sum() for t in steps])
        return self.data.processes.sum([total])[0]


TangentModel = DenseTangent | StreamedTangent


def loss_slope(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss and its gradient in f."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = f.detach().clone().requires_grad_()
        loss = likelihood.loss(leaf, y).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slope


def hessian_product(likelihood: Likelihood, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """Return R Rᵀ u for u (n, B, [T,] C) with the root R of the Hessian at f, for a few data at a time."""

    def product(part: slice) -> Tensor:
        root = likelihood.root(f[part], y[part])
        return torch.einsum("...ck,...dk,n...d->n...c", root, root, u[:, part])

    each = 3 * f.element_size() * f[0].numel() * f.shape[-1]
    return concat_chunks((product(part) for part in chunks(len(f), each, f.device)), len(f), 1)


@dataclass(frozen=True, eq=False)
class Operator:
    """A matrix that is known by its products: ``op @ v`` for a vector (n,), or for all columns of a matrix (n, K).

    Results are float64; products run in the network's dtype. ``op.T`` is the transpose and ``op.scipy()`` a
    ``scipy.sparse.linalg.LinearOperator``. ``posterior.jacobian(data)`` and ``posterior.ggn(data)`` return one.

    Args:
        design: The rows of the Jacobian.
        shape: The number of rows and columns.
        product: Multiplies the matrix by vectors, which are rows.
        transposed: Multiplies its transpose.
        guard: Called before each product; raises if the network has changed since.
    """

    design: Design
    shape: tuple[int, int]
    product: Callable[[Design, Tensor], Tensor]
    transposed: Callable[[Design, Tensor], Tensor]
    guard: Callable[[], None] | None = None

    @classmethod
    def jacobian(cls, design: Design, guard: Callable[[], None] | None = None) -> Operator:
        """Return the design itself, (rows, P)."""
        return cls(design, (design.rows, design.size), forward_product, back_product, guard)

    @classmethod
    def ggn(cls, design: Design, guard: Callable[[], None] | None = None) -> Operator:
        """Return the Gram matrix of the design, (P, P)."""
        return cls(design, (design.size, design.size), gram_product, gram_product, guard)

    @property
    def T(self) -> Operator:  # noqa: N802
        """The transpose."""
        return replace(self, shape=self.shape[::-1], product=self.transposed, transposed=self.product)

    @outside_autocast
    def __matmul__(self, v: Tensor) -> Tensor:
        expected = (self.shape[1],)
        if not isinstance(v, Tensor) or v.is_complex() or v.ndim > 2 or v.shape[:1] != expected or not v.numel():
            raise DataError(
                f"a product of an operator {self.shape} with {describe_kind(v)}; expected a real tensor "
                f"({self.shape[1]},) or ({self.shape[1]}, K)."
            )
        if self.guard is not None:
            self.guard()
        most, largest = torch.finfo(self.design.like.dtype).max, max(abs(float(end)) for end in v.detach().aminmax())
        if not largest <= most:  # also true for NaN
            raise DataError(
                f"a product of an operator {self.shape} with a vector whose largest entry is {largest:.3g}; expected "
                f"finite numbers of at most {most:.3g}, as the network computes in {self.design.like.dtype}. Scale it."
            )
        rows = v.reshape(v.shape[0], -1).mT.to(self.design.like.device)
        rows = (rows if rows.dtype in (torch.float32, torch.float64) else rows.double()).contiguous()
        with torch.no_grad():
            product = self.product(self.design, rows)
        if not math.isfinite(product.sum()) and not bool(product.isfinite().all()):  # a sum takes a tenth of the time
            raise NumericalError(
                f"a product of an operator {self.shape} with a vector whose largest entry is {largest:.3g} is beyond "
                f"the {most:.3g} of {self.design.like.dtype}; expected finite numbers. Scale it."
            )
        return product.mT.reshape(self.shape[0], *v.shape[1:])

    def scipy(self) -> Any:
        """Return the operator for SciPy's solvers, with NumPy arrays in and out.

        Raises:
            UnsupportedError: If SciPy is not installed.
        """
        try:
            import numpy as np
            from scipy.sparse.linalg import LinearOperator
        except ImportError as error:
            raise UnsupportedError("a SciPy view of an operator needs scipy: pip install scipy.") from error

        def times(operator: Operator, v: Any) -> Any:
            if np.iscomplexobj(v):
                raise DataError(
                    f"a product of an operator {operator.shape} with an array {np.shape(v)} of {v.dtype}; expected "
                    "real numbers. Multiply the real and the imaginary part separately."
                )
            return (operator @ torch.from_numpy(np.ascontiguousarray(v, dtype=np.float64))).cpu().numpy()

        here, back = partial(times, self), partial(times, self.T)
        return LinearOperator(self.shape, matvec=here, rmatvec=back, matmat=here, rmatmat=back, dtype=np.float64)
