"""A curvature that lives in the span of the Jacobian at a few inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.data import Inputs, check_finite
from lapwing.curvature.low_rank import LowRankPrecision
from lapwing.curvature.structures import floored_by_layer
from lapwing.errors import UnsupportedError
from lapwing.networks.blocks import Block
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.gaussian import SINGLE, Prior, isotropic
from lapwing.priors.kernel import prior_kernel


@dataclass(frozen=True, eq=False)
class Anchors:
    """M outputs of the network, number ``outputs[m]`` at input m: rows of the Jacobian, never formed.

    Kept between calls in layer form: inputs and gradients of every layer, or the rows themselves where a layer is
    shared over many positions (at most M P numbers).
    """

    network: Network
    inputs: Inputs  # (M, ...)
    outputs: Tensor  # (M,), among the outputs of one sample

    def __len__(self) -> int:
        return len(self.outputs)

    @cached_property
    def parts(self) -> tuple[LayerJacobians, ...]:
        """The rows in chunks of anchors that fit the byte budget, in float64."""
        found = []
        for rows in self.network.footprint.chunks(len(self), 1, self.network.dtype, self.network.device):
            tangent = self.network.linearise(self.network.take(self.inputs, rows))
            check_finite(tangent.own, "outputs of the network")
            found.append(tangent.jacobians(self._seeds(rows)).held().double().held())
        return tuple(found)

    def differentiable(self, inputs: Tensor) -> LayerJacobians:
        """The rows at other inputs, with a graph that leads back to those."""
        tangent = self.network.linearise(inputs, differentiable=True)
        return tangent.jacobians(self._seeds(slice(0, len(self)))).held().double().held()

    def _seeds(self, rows: slice) -> Tensor:
        chosen = self.outputs[rows]
        size = torch.Size(self.network.output_shape).numel()
        seeds = torch.zeros(len(chosen), size, dtype=self.network.dtype, device=chosen.device)
        seeds[torch.arange(len(chosen)), chosen] = 1
        return seeds.reshape(1, len(chosen), *self.network.output_shape)

    def kernel(self, prior: Prior) -> Tensor:
        """J_Z A⁻¹ J_Zᵀ, (M, M)."""
        return torch.cat([self.against(part, prior) for part in self.parts])

    def against(self, jacobian: LayerJacobians, prior: Prior) -> Tensor:
        """J A⁻¹ J_Zᵀ for the rows of another Jacobian, (B K, M), in float64."""
        jacobian = jacobian if jacobian.dtype == torch.float64 else jacobian.double()
        return torch.cat([prior_kernel(jacobian, prior, part) for part in self.parts], 1)

    def times(self, v: Tensor) -> Tensor:
        """v J_Zᵀ for v (n, P): (n, M)."""
        return torch.cat([part.jvp(v)[:, :, 0] for part in self.parts], 1)

    def combined(self, c: Tensor) -> Tensor:
        """c J_Z for c (n, M): (n, P)."""
        total, start = None, 0
        for part in self.parts:
            found = part.vjp(c[:, start : start + part.batch, None])
            total, start = found if total is None else total + found, start + part.batch
        assert total is not None
        return total

    def at(self, inputs: Inputs) -> Anchors:
        return Anchors(self.network, inputs, self.outputs)


@dataclass(frozen=True, eq=False)
class AnchoredRows:
    """Combinations of anchors, W = mixᵀ J_Z with mix (M, r)."""

    anchors: Anchors
    mix: Tensor

    def gram(self, prior: Prior) -> Tensor:
        return self.mix.mT @ self.anchors.kernel(prior) @ self.mix

    def pulled(self, jacobian: LayerJacobians, prior: Prior) -> Tensor:
        return self.mix.mT @ self.anchors.against(jacobian, prior).mT

    def times(self, v: Tensor) -> Tensor:
        return self.anchors.times(v) @ self.mix

    def combined(self, c: Tensor) -> Tensor:
        return self.anchors.combined(c @ self.mix.mT)


@dataclass(frozen=True, eq=False)
class AnchoredCurvature:
    r"""H ≈ J_Zᵀ mix mixᵀ J_Z at unit dispersion, with a bound on what that leaves out.

    ``own`` (P,) is the diagonal of the whole H, where it is known. Then the log-determinant has the trace of what is
    missing added, which makes the evidence a lower bound of the exact one (Titsias 2009), under the prior that ``mix``
    was found for and multiples of it; under other ratios between the weights' precisions it is an approximation:

    $$ \log\det(A + H/\varphi) \le \log\det(A + \tilde H/\varphi) + \operatorname{tr} A^{-1} (H - \tilde H)/\varphi $$
    """

    anchors: Anchors
    mix: Tensor  # (M, r)
    own: Tensor | None = None
    preconditions: ClassVar[bool] = True

    @property
    def layout(self) -> tuple[Block, ...]:
        return self.anchors.network.layout

    @property
    def selection(self) -> Selection:
        return self.anchors.network.selection

    def precision(self, phi: Tensor, prior: Prior) -> LowRankPrecision:
        rows = AnchoredRows(self.anchors, self.mix / phi.to(self.mix).sqrt())
        return LowRankPrecision(prior, rows, self.layout, self.selection)

    @cached_property
    def values(self) -> Tensor:
        """The eigenvalues of the curvature that are not nought, (r,)."""
        one = isotropic(1.0).bound(self.selection, self.mix)
        return torch.linalg.eigvalsh(AnchoredRows(self.anchors, self.mix).gram(one)).clamp_min(0)

    @cached_property
    def shown(self) -> Tensor:
        """The diagonal of what the anchors hold, (P,)."""
        return AnchoredRows(self.anchors, self.mix).combined(torch.eye(self.mix.shape[1]).to(self.mix)).square().sum(0)

    def logdet(self, phi: Tensor, prior: Prior) -> Tensor:
        """With the bound on what is missing; refused where the curvature was learned and is no part of H."""
        if self.own is None:
            raise UnsupportedError(
                "what these inducing points know was learned by predicting (alpha above 0) and has no evidence; "
                "compare it on held-out data, or fit VaLLA(alpha=0)."
            )
        phi = phi.to(self.mix)
        if prior.kind in SINGLE and prior.scale is None:  # from eigenvalues alone
            alpha = prior.values.double()
            found = self.selection.size * alpha.log() + torch.log1p(self.values / (phi * alpha)).sum()
            missing = (self.own.double().sum() - self.values.sum()) / (alpha * phi)
        else:
            found = self.precision(phi, prior).logdet()
            missing = self.unseen(phi, prior).sum()
        return found + missing.clamp_min(0)

    def unseen(self, phi: Tensor, prior: Prior) -> Tensor:
        """What the log-determinant has added for each weight, (P,): the diagonal of A⁻¹ (H - H̃)/φ."""
        assert self.own is not None
        return (self.own.double() - self.shown) / (prior.vector * phi.to(self.mix))

    def diagonal(self) -> Tensor:
        return floored_by_layer(self.shown if self.own is None else self.own.double(), self.selection)

    def tensors(self) -> dict[str, Tensor]:
        if not isinstance(self.anchors.inputs, Tensor):
            raise UnsupportedError("inducing points of several tensors have no file form; fit again where needed.")
        found = {"inputs": self.anchors.inputs, "outputs": self.anchors.outputs, "mix": self.mix}
        return found if self.own is None else {**found, "own": self.own}
