"""Inducing points as rows of the Jacobian."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.data import Inputs, check_finite
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.priors.bound import BoundPrior
from lapwing.priors.kernel import prior_kernel


@dataclass(frozen=True, eq=False)
class Anchors:
    """M rows J_Z (M, P) of the Jacobian: that of output ``outputs[m]`` at input m, for each m.

    J_Z is kept between calls as the inputs and gradients of every layer; a layer that is shared over many positions
    keeps its rows themselves (at most M P numbers).
    """

    network: Network
    inputs: Inputs  # (M, ...)
    outputs: Tensor  # (M,) output numbers; token-level outputs (T, C) are numbered through

    def __len__(self) -> int:
        return len(self.outputs)

    @cached_property
    def parts(self) -> tuple[LayerJacobians, ...]:
        """J_Z in float64, in chunks of anchors that fit the byte budget."""
        parts = []
        for rows in self.network.footprint.chunks(len(self), 1, self.network.dtype, self.network.device):
            tangent = self.network.linearise(self.network.take(self.inputs, rows))
            check_finite(tangent.network_output, "outputs of the network")
            parts.append(tangent.jacobians(self._seeds(rows)).held().double().held())
        return tuple(parts)

    def differentiable(self, inputs: Tensor) -> LayerJacobians:
        """Return J_Z at other inputs, differentiable in these."""
        tangent = self.network.linearise(inputs, differentiable=True)
        return tangent.jacobians(self._seeds(slice(0, len(self)))).held().double().held()

    def _seeds(self, rows: slice) -> Tensor:
        """Return one-hot output gradients (1, M, [T,] C) that select the output of each anchor."""
        outputs = self.outputs[rows]
        size = torch.Size(self.network.output_shape).numel()
        seeds = torch.zeros(len(outputs), size, dtype=self.network.dtype, device=outputs.device)
        seeds[torch.arange(len(outputs)), outputs] = 1
        return seeds.reshape(1, len(outputs), *self.network.output_shape)

    def kernel(self, prior: BoundPrior) -> Tensor:
        """Return J_Z A⁻¹ J_Zᵀ, (M, M)."""
        return torch.cat([self.against(part, prior) for part in self.parts])

    def against(self, jacobian: LayerJacobians, prior: BoundPrior) -> Tensor:
        """Return J A⁻¹ J_Zᵀ for the rows of another Jacobian, (B K, M), in float64."""
        jacobian = jacobian if jacobian.dtype == torch.float64 else jacobian.double()
        return torch.cat([prior_kernel(jacobian, prior, part) for part in self.parts], 1)

    def times(self, v: Tensor) -> Tensor:
        """Return v J_Zᵀ for v (n, P): (n, M)."""
        return torch.cat([part.jvp(v)[:, :, 0] for part in self.parts], 1)

    def combined(self, c: Tensor) -> Tensor:
        """Return c J_Z for c (n, M): (n, P)."""
        total, start = None, 0
        for part in self.parts:
            rows = part.vjp(c[:, start : start + part.batch, None])
            total, start = rows if total is None else total + rows, start + part.batch
        assert total is not None
        return total

    def at(self, inputs: Inputs) -> Anchors:
        """Return anchors with the same outputs at other inputs."""
        return Anchors(self.network, inputs, self.outputs)
