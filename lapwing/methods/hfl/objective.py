"""The regularised loss of the network, for many sets of weights at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lapwing.core.batches import Batch
from lapwing.core.data import Data
from lapwing.core.inputs import Inputs, map_tensors
from lapwing.core.memory import fitting
from lapwing.core.switches import math_attention, quiet
from lapwing.likelihoods.protocol import Likelihood
from lapwing.networks.forward import plain_kernels, raw_output, shaped
from lapwing.networks.network import Network
from lapwing.priors.bound import BoundPrior


@dataclass(frozen=True, eq=False)
class Objective:
    r"""U(θ) = Σ loss(f(x; θ), y)/φ + ½ ‖θ - μ‖²_A, at θ = centre + d for K rows d (K, P) in one call.

    Works on a copy of the model in ``dtype``; the model itself is not changed. All rows run in one vectorised call if
    the operations allow it, and row by row if they do not (recurrent kernels).
    """

    network: Network
    likelihood: Likelihood
    prior: BoundPrior
    batches: tuple[Batch, ...]
    model: nn.Module
    start: Tensor  # the weights in the copy of the model, in its dtype, (P,)
    phi: Tensor  # the dispersion, in the same dtype
    centre: Tensor  # θ, (P,)

    @classmethod
    def build(
        cls, network: Network, likelihood: Likelihood, prior: BoundPrior, data: Data, dtype: torch.dtype
    ) -> Objective:
        """Copy the model in ``dtype`` and keep the data; one forward pass to check the targets."""
        model = copy.deepcopy(network.replica).to(dtype)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        cast = lambda t: t.to(dtype) if t.is_floating_point() else t
        batches = []
        for batch in data.batches("data"):
            inputs = map_tensors(batch.inputs, cast)
            with torch.no_grad(), plain_kernels(network.plain):
                f = shaped(raw_output(model, inputs))
            batches.append(Batch(inputs, cast(likelihood.targets(f, batch.targets))))
        start = network.theta().to(dtype)
        return cls(network, likelihood, prior, tuple(batches), model, start, likelihood.dispersion.to(start), start)

    @property
    def dtype(self) -> torch.dtype:
        return self.centre.dtype

    @property
    def size(self) -> int:
        return len(self.centre)

    @cached_property
    def data(self) -> int:
        """The number of training samples."""
        return sum(self.network.count(batch.inputs) for batch in self.batches)

    @cached_property
    def _precision(self) -> Tensor:
        return self.prior.vector.detach().to(self.centre)

    @cached_property
    def _mean(self) -> Tensor:
        return torch.as_tensor(self.prior.mean, dtype=self.dtype, device=self.centre.device)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def weights(self, d: Tensor) -> dict[str, Tensor]:
        """Return all parameters by name, the selected ones at θ = centre + d, d (P,)."""
        tensors = self._tensors
        steps = self.network.selection.split(d + (self.centre - self.start))
        return tensors | {name: tensors[name] + step for name, step in steps.items()}

    def recentred(self, d: Tensor) -> Objective:
        """Return the objective with its centre moved by d (P,)."""
        return replace(self, centre=self.centre + d)

    def run(self, d: Tensor, inputs: Inputs) -> Tensor:
        """Return f (B, [T,] C) for one d (P,), differentiable in d."""
        return shaped(raw_output(self.model, inputs, self.weights(d)))

    def _loss(self, d: Tensor, inputs: Inputs, targets: Tensor) -> Tensor:
        return self.likelihood.loss(self.run(d, inputs), targets).sum() / self.phi

    def outputs(self, d: Tensor, inputs: Inputs) -> Tensor:
        """Return f for every row of d, (K, B, [T,] C)."""
        inputs = self.cast(inputs)
        return self.each(lambda row: self.run(row, inputs), d, self.network.count(inputs))

    def cast(self, inputs: Inputs) -> Inputs:
        """Return the inputs with their real numbers in the dtype of the copy, and able to take part in a gradient."""
        differentiable = lambda t: t.clone() if t.is_inference() else t
        return map_tensors(inputs, lambda t: differentiable(t).to(self.dtype) if t.is_floating_point() else t)

    def value(self, d: Tensor) -> float:
        """Return U at one d (P,)."""
        gap = self.centre + d - self._mean
        total = 0.5 * (self._precision * gap.square()).sum()
        for batch in self.batches:
            total = total + self._loss(d, batch.inputs, batch.targets)
        return float(total.detach())

    def gradient(self, d: Tensor, batches: tuple[Batch, ...] | None = None) -> Tensor:
        """Return ∇U at every row of d, (K, P); with ``batches`` an estimate from these, scaled to all data."""
        chosen = self.batches if batches is None else batches
        share = 1.0 if batches is None else self.data / sum(self.network.count(batch.inputs) for batch in chosen)
        total = self._precision * (self.centre + d - self._mean)
        for batch in chosen:
            slope = torch.func.grad(lambda row, b=batch: self._loss(row, b.inputs, b.targets))
            total = total + share * self.each(slope, d, batch.n_samples)
        return total

    def hessian_product(self, v: Tensor) -> Tensor:
        """Return the Hessian of U at the centre times every row of v, (K, P)."""
        zero = torch.zeros_like(self.centre)
        total = self._precision * v
        for batch in self.batches:
            slope = torch.func.grad(lambda row, b=batch: self._loss(row, b.inputs, b.targets))
            product = lambda row, s=slope: torch.func.vjp(s, zero)[1](row)[0]  # the Hessian is symmetric
            total = total + self.each(product, v, 2 * batch.n_samples)
        return total

    def slopes(self, d: Tensor, inputs: Inputs, seeds: Tensor) -> Tensor:
        """Return the gradient of seeds_k · f(x_k; θ) at every row k of d, (K, P); seeds (K, [T,] C)."""
        weighted = lambda row, x, s: (self.run(row, x)[0] * s).sum()
        return self._each_sample(torch.func.grad(weighted), d, inputs, seeds)

    def each_output(self, d: Tensor, inputs: Inputs) -> Tensor:
        """Return f(x_k; centre + d_k) for every row k, (K, [T,] C)."""
        return self._each_sample(lambda row, x: self.run(row, x)[0], d, inputs)

    def _each_sample(self, function: Callable[..., Tensor], d: Tensor, inputs: Inputs, *others: Tensor) -> Tensor:
        """Return the function of row k of d, of sample k as a batch of one, and of row k of ``others``, for every k."""
        if isinstance(inputs, Tensor):
            return self.each(function, d, 1, inputs.unsqueeze(1), *others)
        samples = [self.network.take(inputs, slice(k, k + 1)) for k in range(len(d))]
        return torch.stack([function(*parts).detach() for parts in zip(d, samples, *others, strict=True)])

    def each(self, function: Callable[..., Tensor], rows: Tensor, samples: int, *others: Tensor) -> Tensor:
        """Return the function of every row: vectorised over chunks of rows, or row by row if vmap cannot."""
        sizes = self.network.footprint
        numbers = 4 * (samples * (sizes.width + sizes.graph) + self.size)
        chunk = fitting(len(rows), numbers * self.centre.element_size(), self.centre.device)
        # Some versions of torch.func differentiate to zero while gradients are off.
        with torch.enable_grad(), quiet, plain_kernels(self.network.plain), math_attention:
            try:
                return torch.func.vmap(function, chunk_size=chunk)(rows, *others).detach()
            except (RuntimeError, NotImplementedError, ValueError):  # an operation has no batching rule
                return torch.stack([function(*parts).detach() for parts in zip(rows, *others, strict=True)])
