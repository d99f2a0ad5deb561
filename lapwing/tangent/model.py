"""The tangent model as a function of its weights: loss, gradient and curvature at any theta, over all the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lapwing.core.data import Data
from lapwing.likelihoods.protocol import Likelihood
from lapwing.networks.network import Network

BYTES = 2 * 2**30  # what a Jacobian over all data may take on a CPU before the products stream; half of what is free
# on a GPU, where a product with it costs one read of the memory
EXACT = 2**28  # what it may take in float64, whatever the network is
PART = 2**26  # bytes of a narrower one that are float64 at a time


class TangentModel(Protocol):
    """h(theta, x) = f + J (theta - w̃), seen through its loss at unit dispersion. Everything takes delta = theta - w̃."""

    def gradient(self, delta: Tensor) -> tuple[float, Tensor]:
        """The summed loss and its gradient (P,), float64."""
        ...

    def products(self, delta: Tensor, v: Tensor) -> Tensor:
        """Σ Jᵀ Λ J v for v (K, P), with Λ the Hessian of the loss in the outputs at h."""
        ...

    def losses(self, delta: Tensor, direction: Tensor, steps: Tensor) -> Tensor:
        """The summed loss at delta + t direction for every t in steps, by one pass."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of losses and gradients: what rounding to expect."""
        ...


def tangent_model(network: Network, likelihood: Likelihood, data: Data) -> TangentModel:
    """With the Jacobian in memory where it fits, else by products that stream over the data."""
    rows, shape = 0, network.output_shape
    for batch in data.batches("counting"):
        seen = batch.targets.shape if len(shape) == 2 else batch.targets.shape[:1]  # tokens may differ between batches
        rows += seen[:2].numel() * shape[-1]
    room = torch.cuda.mem_get_info(network.device)[0] // 2 if network.device.type == "cuda" else BYTES
    entries = rows * network.selection.size
    dtype = torch.float64 if 8 * entries <= EXACT else network.dtype
    if entries * torch.finfo(dtype).bits // 8 <= room:
        return DenseTangent.built(network, likelihood, data, rows, dtype)
    return StreamedTangent(network, likelihood, data)


@dataclass(frozen=True, eq=False)
class DenseTangent:
    """The Jacobian of all data: a pass costs a matrix product.

    Losses and gradients are float64 even where it is not: a solve whose products round is refined by them.
    """

    f: Tensor  # (N [T], C): every token a datum
    y: Tensor
    jacobian: Tensor  # (N [T] C, P)
    likelihood: Likelihood

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    @classmethod
    def built(
        cls, network: Network, likelihood: Likelihood, data: Data, rows: int, dtype: torch.dtype = torch.float64
    ) -> DenseTangent:
        outputs, targets, start = [], [], 0
        jacobian = torch.empty(rows, network.selection.size, dtype=dtype, device=network.device)
        for batch in data.batches("Jacobian"):
            for part, tangent in network.tangents(batch.inputs):
                f = tangent.network_output.double()
                y = likelihood.targets(f, batch.targets[part])
                outputs.append(f.flatten(0, -2))
                targets.append(y.flatten(0, 1) if f.ndim == 3 else y)
                found = tangent.jacobians().whole().flatten(0, 1)
                jacobian[start : start + len(found)] = found
                start += len(found)
        return cls(torch.cat(outputs), torch.cat(targets), jacobian, likelihood)

    def _exactly(self, v: Tensor) -> Tensor:
        """J v for one v (P,), in float64."""
        return torch.cat([rows.double() @ v for rows in self._parts]).reshape(self.f.shape)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.jacobian.split(max(1, PART // (8 * self.jacobian.shape[1])))

    def gradient(self, delta: Tensor) -> tuple[float, Tensor]:
        loss, slope = loss_slope(self.likelihood, self.f + self._exactly(delta), self.y)
        total, start = torch.zeros_like(delta), 0
        for rows in self._parts:
            total += slope.reshape(-1)[start : start + len(rows)] @ rows.double()
            start += len(rows)
        return float(loss), total

    def products(self, delta: Tensor, v: Tensor) -> Tensor:
        moved = torch.cat([delta[None], v.to(delta)]).to(self.jacobian) @ self.jacobian.mT
        moved = moved.double().reshape(len(moved), *self.f.shape)
        root = self.likelihood.root(self.f + moved[0], self.y)
        return (curved(root, moved[1:]).reshape(len(v), -1).to(self.jacobian) @ self.jacobian).double()

    def losses(self, delta: Tensor, direction: Tensor, steps: Tensor) -> Tensor:
        h, along = self.f + self._exactly(delta), self._exactly(direction)
        return torch.stack([self.likelihood.loss(h + t * along, self.y).sum() for t in steps])


@dataclass(frozen=True, eq=False)
class StreamedTangent:
    """Products by forward and backward passes, batch after batch, in the network's own dtype; sums in float64."""

    network: Network
    likelihood: Likelihood
    data: Data

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    def _moved(self, label: str, v: Tensor) -> Iterator[tuple[object, Tensor, Tensor, Tensor]]:
        """(inputs, f, y, J v) for every batch."""
        v = v.to(self.network.device, self.network.dtype)
        plain = self.network.shifted(None)
        for batch in self.data.batches(label):
            f = plain(batch.inputs).double()
            y = self.likelihood.targets(f, batch.targets)
            yield batch.inputs, f, y, plain.jvp(batch.inputs, v).double()

    def gradient(self, delta: Tensor) -> tuple[float, Tensor]:
        total, loss = torch.zeros_like(delta, dtype=torch.float64), 0.0
        for inputs, f, y, moved in self._moved("tangent gradient", delta[None]):
            mine, slope = loss_slope(self.likelihood, f + moved[0], y)
            loss += float(mine)
            total += self.network.vjp(inputs, slope[None].to(self.network.dtype))[0]
        return loss, total

    def products(self, delta: Tensor, v: Tensor) -> Tensor:
        total = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
        for inputs, f, y, moved in self._moved("tangent products", torch.cat([delta[None].to(v), v])):
            root = self.likelihood.root(f + moved[0], y)
            total += self.network.vjp(inputs, curved(root, moved[1:]).to(self.network.dtype))
        return total

    def losses(self, delta: Tensor, direction: Tensor, steps: Tensor) -> Tensor:
        total = torch.zeros(len(steps), dtype=torch.float64, device=delta.device)
        for _, f, y, moved in self._moved("tangent losses", torch.stack([delta, direction])):
            h = f + moved[0]
            total += torch.stack([self.likelihood.loss(h + t * moved[1], y).sum() for t in steps])
        return total


def loss_slope(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss and its gradient in f."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = f.detach().clone().requires_grad_()
        loss = likelihood.loss(leaf, y).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slope


def curved(root: Tensor, moved: Tensor) -> Tensor:
    """R Rᵀ u for u (n, B, [T,] C)."""
    return torch.einsum("...ck,...dk,n...d->n...c", root, root, moved)
