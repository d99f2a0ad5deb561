"""The part of H in some directions, with a bound on the rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from lapwing.core.state import State, saved
from lapwing.curvature.low_rank import LowRankCurvature, LowRankPrecision
from lapwing.curvature.protocols import floored_by_layer
from lapwing.networks.network import Network
from lapwing.priors.bound import BoundPrior


@saved
@dataclass(frozen=True, eq=False)
class BoundedCurvature:
    r"""The part H̃ of H in some directions; ``exact_diagonal`` (P,) is the diagonal of the whole H.

    The log-determinant is an upper bound of that of the whole H,

    $$ \log\det(A + H/\varphi) \le \log\det(A + \tilde H/\varphi) + \operatorname{tr} A^{-1} (H - \tilde H)/\varphi $$

    (Titsias 2009), under the prior for which the directions were chosen and its multiples. Without the trace, the
    evidence would be highest for a prior that leaves the missing directions free.
    """

    part: LowRankCurvature
    exact_diagonal: Tensor
    preconditions: ClassVar[bool] = True

    def precision(self, phi: Tensor, prior: BoundPrior) -> LowRankPrecision:
        return self.part.precision(phi, prior)

    @cached_property
    def _part_diagonal(self) -> Tensor:
        return self.part.values @ self.part.vectors.square()

    def unseen(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the contribution of each weight to the log-determinant, (P,): the diagonal of A⁻¹ (H - H̃)/φ."""
        missing = self.exact_diagonal.double() - self._part_diagonal
        return missing / (prior.vector * phi.to(self.part.values))

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        return self.part.logdet(phi, prior) + self.unseen(phi, prior).sum().clamp_min(0)

    def diagonal(self) -> Tensor:
        return floored_by_layer(self.exact_diagonal.double(), self.part.selection)

    def state(self) -> State:
        return State("BoundedCurvature", tensors={"own": self.exact_diagonal}, parts={"part": self.part.state()})

    @classmethod
    def from_state(cls, state: State, network: Network) -> BoundedCurvature:
        part = LowRankCurvature.from_state(state.parts["part"], network)
        return cls(part, state.tensors["own"].to(network.device))
