"""A curvature in the span of the Jacobian at a few inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.state import State, saved
from lapwing.curvature.low_rank import LowRankPrecision
from lapwing.curvature.protocols import floored_by_layer
from lapwing.errors import UnsupportedError
from lapwing.methods.inducing.anchors import Anchors
from lapwing.networks.blocks import Block
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior
from lapwing.priors.given import isotropic


@dataclass(frozen=True, eq=False)
class AnchoredRows:
    """Linear combinations W = mixᵀ J_Z (r, P) of anchors, with mix (M, r); W is not formed."""

    anchors: Anchors
    mix: Tensor

    def gram(self, prior: BoundPrior) -> Tensor:
        return self.mix.mT @ self.anchors.kernel(prior) @ self.mix

    def pulled(self, jacobian: LayerJacobians, prior: BoundPrior) -> Tensor:
        return self.mix.mT @ self.anchors.against(jacobian, prior).mT

    def times(self, v: Tensor) -> Tensor:
        return self.anchors.times(v) @ self.mix

    def combined(self, c: Tensor) -> Tensor:
        return self.anchors.combined(c @ self.mix.mT)


@saved
@dataclass(frozen=True, eq=False)
class AnchoredCurvature:
    r"""Low-rank curvature H̃ = J_Zᵀ mix mixᵀ J_Z at unit dispersion, with a bound on the part of H that it misses.

    ``ggn_diagonal`` (P,) is the diagonal of the exact H, where it is known. The log-determinant then includes the trace
    of the missing part, so that the evidence is a lower bound of the exact one (Titsias 2009):

    $$ \log\det(A + H/\varphi) \le \log\det(A + \tilde H/\varphi) + \operatorname{tr} A^{-1} (H - \tilde H)/\varphi $$

    This holds for multiples of the prior that ``mix`` was computed for. If the ratios between the precisions of the
    weights change, it is an approximation.
    """

    anchors: Anchors
    mix: Tensor  # (M, r)
    ggn_diagonal: Tensor | None = None
    preconditions: ClassVar[bool] = True

    @property
    def layout(self) -> tuple[Block, ...]:
        return self.anchors.network.layout

    @property
    def selection(self) -> Selection:
        return self.anchors.network.selection

    def precision(self, phi: Tensor, prior: BoundPrior) -> LowRankPrecision:
        rows = AnchoredRows(self.anchors, self.mix / phi.to(self.mix).sqrt())
        return LowRankPrecision(prior, rows, self.layout, self.selection)

    @cached_property
    def values(self) -> Tensor:
        """The nonzero eigenvalues of H̃, (r,)."""
        one = isotropic(1.0).bound(self.selection, self.mix)
        return torch.linalg.eigvalsh(AnchoredRows(self.anchors, self.mix).gram(one)).clamp_min(0)

    @cached_property
    def anchored_diagonal(self) -> Tensor:
        """The diagonal of H̃, (P,)."""
        return AnchoredRows(self.anchors, self.mix).combined(torch.eye(self.mix.shape[1]).to(self.mix)).square().sum(0)

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the upper bound on log det(A + H/φ); raise if the covariance was learned with alpha above 0."""
        if self.ggn_diagonal is None:
            raise UnsupportedError(
                "this covariance was learned by predicting (alpha above 0) and has no evidence; compare it on held-out "
                "data, or fit VaLLA(alpha=0)."
            )
        phi = phi.to(self.mix)
        if prior.is_isotropic:  # from eigenvalues alone
            alpha = prior.values.double()
            anchored = self.selection.size * alpha.log() + torch.log1p(self.values / (phi * alpha)).sum()
            missing = (self.ggn_diagonal.double().sum() - self.values.sum()) / (alpha * phi)
        else:
            anchored = self.precision(phi, prior).logdet()
            missing = self.unseen(phi, prior).sum()
        return anchored + missing.clamp_min(0)

    def unseen(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the diagonal of A⁻¹ (H - H̃)/φ, (P,): each weight's share of the trace in ``logdet``."""
        assert self.ggn_diagonal is not None
        return (self.ggn_diagonal.double() - self.anchored_diagonal) / (prior.vector * phi.to(self.mix))

    def diagonal(self) -> Tensor:
        diagonal = self.anchored_diagonal if self.ggn_diagonal is None else self.ggn_diagonal.double()
        return floored_by_layer(diagonal, self.selection)

    def state(self) -> State:
        if not isinstance(self.anchors.inputs, Tensor):
            raise UnsupportedError("inducing points of several tensors have no file form; fit again where needed.")
        tensors = {"inputs": self.anchors.inputs, "outputs": self.anchors.outputs, "mix": self.mix}
        if self.ggn_diagonal is not None:
            tensors["own"] = self.ggn_diagonal
        return State("AnchoredCurvature", tensors=tensors)

    @classmethod
    def from_state(cls, state: State, network: Network) -> AnchoredCurvature:
        """Build the curvature for this network; the inputs of the points take the dtype of its model."""
        tensors = {name: tensor.to(network.device) for name, tensor in state.tensors.items()}
        inputs = tensors["inputs"]
        if inputs.is_floating_point():
            inputs = inputs.to(next(network.model.parameters()).dtype)
        return cls(Anchors(network, inputs, tensors["outputs"]), tensors["mix"], tensors.get("own"))
