"""The tangent model as a function of its weights: loss, gradient and curvature at any theta, over all the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.core.memory import budget, gathered, runs
from lapwing.core.processes import ALONE, Processes
from lapwing.curvature.protocols import in_runs
from lapwing.likelihoods.protocol import Likelihood
from lapwing.networks.network import Network
from lapwing.networks.tangent import Tangent

KEPT = 0.5  # share of the byte budget for the Jacobian over all data, if it is kept
EXACT = 2**28  # largest Jacobian in bytes that is kept in float64 for networks of any dtype


class TangentModel(Protocol):
    """The loss of h(theta, x) = f + J (theta - w̃) at unit dispersion, as a function of delta = theta - w̃."""

    def gradient(self, delta: Tensor) -> tuple[float, Tensor]:
        """Return the summed loss and its gradient (P,), float64."""
        ...

    def products(self, delta: Tensor, v: Tensor) -> Tensor:
        """Return Σ Jᵀ Λ J v for v (K, P), with Λ the Hessian of the loss in the outputs at h."""
        ...

    def losses(self, delta: Tensor, direction: Tensor, steps: Tensor) -> Tensor:
        """Return the summed loss at delta + t direction for every t in steps, by one pass."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which losses and gradients are computed."""
        ...


def tangent_model(network: Network, likelihood: Likelihood, data: Data) -> TangentModel:
    """Return the tangent model with its Jacobian in memory if it fits, else one that streams over the data."""
    data = data.steady()
    rows, shape = 0, network.output_shape
    for batch in data.batches("counting"):
        seen = batch.targets.shape if len(shape) == 2 else batch.targets.shape[:1]  # tokens may differ between batches
        rows += seen[:2].numel() * shape[-1]
    most = max(data.processes.each(rows))
    room = int(KEPT * budget(network.device))
    entries = most * network.selection.size
    dtype = torch.float64 if 8 * entries <= EXACT else network.dtype
    if entries * torch.finfo(dtype).bits // 8 <= room:
        return DenseTangent.built(network, likelihood, data, rows, dtype)
    return StreamedTangent(network, likelihood, data)


@dataclass(frozen=True, eq=False)
class DenseTangent:
    """The tangent model with the Jacobian of all data in memory: a pass costs a matrix product.

    Losses and gradients are float64 even if the Jacobian is not, to refine solves whose products are rounded.
    """

    f: Tensor  # (N [T], C): every token is a datum
    y: Tensor
    jacobian: Tensor  # (N [T] C, P)
    likelihood: Likelihood
    processes: Processes = ALONE
    dtype: ClassVar[torch.dtype] = torch.float64

    @classmethod
    def built(
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
                start = _filled(jacobian, start, tangent)
        if not outputs:  # of a process without data
            outputs = [torch.zeros(0, network.output_shape[-1], dtype=torch.float64, device=network.device)]
            targets = [torch.zeros(0, device=network.device)]
        return cls(torch.cat(outputs), torch.cat(targets), jacobian, likelihood, data.processes)

    def _exactly(self, v: Tensor) -> Tensor:
        """Return J v for one v (P,), in float64."""
        return torch.cat([rows.double() @ v for rows in self._parts]).reshape(self.f.shape)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        """The Jacobian in parts that fit the byte budget in float64."""
        rows, size = self.jacobian.shape
        return tuple(self.jacobian[part] for part in runs(rows, 8 * size, self.jacobian.device))

    def gradient(self, delta: Tensor) -> tuple[float, Tensor]:
        loss, total = delta.new_zeros(()), torch.zeros_like(delta)
        if len(self.f):
            loss, slope = loss_slope(self.likelihood, self.f + self._exactly(delta), self.y)
            parts = self._parts
            for rows, slopes in zip(parts, slope.reshape(-1).split([len(rows) for rows in parts]), strict=True):
                total += slopes @ rows.double()
        loss, total = self.processes.sum([loss, total])
        return float(loss), total

    def products(self, delta: Tensor, v: Tensor) -> Tensor:
        own = self._own_products(delta, v) if len(self.f) else torch.zeros_like(v, dtype=torch.float64)
        return self.processes.sum([own])[0]

    def _own_products(self, delta: Tensor, v: Tensor) -> Tensor:
        jv = torch.cat([delta[None], v.to(delta)]).to(self.jacobian) @ self.jacobian.mT
        jv = jv.double().reshape(len(jv), *self.f.shape)
        product = hessian_product(self.likelihood, self.f + jv[0], self.y, jv[1:])
        return (product.reshape(len(v), -1).to(self.jacobian) @ self.jacobian).double()

    def losses(self, delta: Tensor, direction: Tensor, steps: Tensor) -> Tensor:
        own = torch.zeros(len(steps), dtype=torch.float64, device=delta.device)
        if len(self.f):
            h, along = self.f + self._exactly(delta), self._exactly(direction)
            own = torch.stack([self.likelihood.loss(h + t * along, self.y).sum() for t in steps])
        return self.processes.sum([own])[0]


def _filled(matrix: Tensor, start: int, tangent: Tangent) -> int:
    """Write the Jacobian of a chunk into the rows of a matrix from ``start`` on; return the row after its last one."""
    for some in in_runs(tangent.jacobians(), 2 * matrix.shape[1], matrix.device):
        rows = some.whole().flatten(0, 1)
        matrix[start : start + len(rows)] = rows
        start += len(rows)
    return start


@dataclass(frozen=True, eq=False)
class StreamedTangent:
    """The tangent model by forward and backward passes over the batches, in the network's dtype; sums in float64."""

    network: Network
    likelihood: Likelihood
    data: Data

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    def _products(self, label: str, v: Tensor) -> Iterator[tuple[object, Tensor, Tensor, Tensor]]:
        """Yield (inputs, f, y, J v) for every batch."""
        v = v.to(self.network.device, self.network.dtype)
        plain = self.network.shifted(None)
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
    return gathered((product(part) for part in runs(len(f), each, f.device)), len(f), 1)
