"""Curvatures in the span of a few directions: the Jacobian at some inputs, or stored vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.inputs import check_finite
from lapwing.core.schema import Array, Maybe, Samples, semidefinite
from lapwing.core.spectra import eigvalsh
from lapwing.core.state import Part, State, saved
from lapwing.curvature.low_rank import LowRankCurvature, LowRankPrecision
from lapwing.curvature.protocols import floored_by_layer
from lapwing.errors import FileError, UnsupportedError
from lapwing.linalg.cholesky import cholesky
from lapwing.methods.inducing.anchors import Anchors
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior
from lapwing.priors.given import isotropic

TOO_WIDE = 1.1  # ratio of standard deviations from which missing points are a finding


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
    def selection(self) -> Selection:
        return self.anchors.network.selection

    def precision(self, phi: Tensor, prior: BoundPrior) -> LowRankPrecision:
        rows = AnchoredRows(self.anchors, self.mix / phi.to(self.mix).sqrt())
        return LowRankPrecision(prior, rows, self.anchors.network.layout, self.selection)

    @cached_property
    def values(self) -> Tensor:
        """The nonzero eigenvalues of H̃, (r,)."""
        one = isotropic(1.0).bound(self.selection, self.mix)
        return eigvalsh(AnchoredRows(self.anchors, self.mix).gram(one)).clamp_min(0)

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

    def missing_findings(self, phi: Tensor, prior: BoundPrior, rows: float) -> tuple[str, ...]:
        """Say by how much the points are too few, if the standard deviations are too wide by a tenth or more.

        The variances at the training data, in units of the noise, sum to γ of the points plus the trace t of
        A⁻¹ (H - H̃)/φ. Those of the exact posterior sum to its γ. That is at most γ of the points plus t / (1 + t/r),
        for the r directions that are left, since s / (1 + s) is concave in an eigenvalue s.
        """
        if self.ggn_diagonal is None:
            return ()
        values = eigvalsh(AnchoredRows(self.anchors, self.mix).gram(prior)).clamp_min(0) / phi.to(self.mix)
        whole = float((self.ggn_diagonal.double() / prior.vector.double()).sum() / phi.double())
        missing = max(0.0, whole - float(values.sum()))
        carried, left = float((values / (1 + values)).sum()), max(1.0, min(rows, self.selection.size) - len(values))
        most = carried + missing / (1 + missing / left)
        wider = ((carried + missing) / max(most, 1e-300)) ** 0.5
        if wider < TOO_WIDE:
            return ()
        return (
            f"{len(self.anchors)} inducing points carry {carried:.3g} effective parameters (gamma) of at most "
            f"{most:.3g} and leave out {missing / whole:.1%} of the trace of the kernel over the training data. The "
            f"standard deviations there, in units of the noise, are at least {wider:.2g} times those of the exact "
            f"posterior. Give more points, VaLLA(num_inducing={min(round(rows), 2 * math.ceil(most))}), or use Full() "
            "or Sampled().",
        )

    def diagonal(self) -> Tensor:
        diagonal = self.anchored_diagonal if self.ggn_diagonal is None else self.ggn_diagonal.double()
        return floored_by_layer(diagonal, self.selection)

    def state(self) -> State:
        if not isinstance(self.anchors.inputs, Tensor):
            raise UnsupportedError("inducing points of several tensors have no file form; fit again where needed.")
        tensors = {"inputs": self.anchors.inputs, "outputs": self.anchors.outputs, "mix": self.mix}
        if self.ggn_diagonal is not None:
            tensors["ggn_diagonal"] = self.ggn_diagonal
        return State("AnchoredCurvature", tensors=tensors)

    @classmethod
    def from_state(cls, state: State, network: Network) -> AnchoredCurvature:
        """Build the curvature for this network; the inputs of the points take the dtype of its model."""
        fields = state.read(
            inputs=Samples("M", next(network.model.parameters()).dtype), mix=Array(("M", "r")),
            outputs=Array(("M",), 0, torch.Size(network.output_shape).numel() - 1, whole=True),
            ggn_diagonal=Maybe(Array(("P",), 0)),
        )  # fmt: skip
        anchors = Anchors(network, fields["inputs"], fields["outputs"])
        try:
            check_finite(network(anchors.inputs), "outputs of the network at the inducing points")
        except Exception as error:  # whatever a model raises for inputs that it cannot take
            raise FileError(f"the network cannot take the inducing points: {error!s:.200}") from error
        return cls(anchors, fields["mix"], fields["ggn_diagonal"])


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
        return State("BoundedCurvature", {}, {"exact_diagonal": self.exact_diagonal}, {"part": self.part.state()})

    @classmethod
    def from_state(cls, state: State, network: Network) -> BoundedCurvature:
        return cls(**state.read(part=Part(LowRankCurvature, network), exact_diagonal=Array(("P",), 0)))


@dataclass(frozen=True, eq=False)
class SubspacePrecision:
    r"""The posterior θ = w̃ + Dᵀ c with c ~ N(0, G⁻¹) and G = D Λ Dᵀ, for K directions D (K, P).

    It has no variance outside the directions, and nowhere more than the exact posterior:
    $D^\top (D \Lambda D^\top)^{-1} D \preceq \Lambda^{-1}$.
    """

    directions: Tensor
    posterior_root: Tensor  # the Cholesky factor of G
    prior_root: Tensor  # the Cholesky factor of D A Dᵀ
    log_determinant: Tensor

    def logdet(self) -> Tensor:
        return self.log_determinant

    @cached_property
    def _basis(self) -> Tensor:
        """L⁻¹ D with G = L Lᵀ, (K, P): the covariance of the weights is its Gram matrix."""
        return torch.linalg.solve_triangular(self.posterior_root, self.directions, upper=False)

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        rows = jacobian.jvp(self._basis).to(self._basis).permute(1, 2, 0).unflatten(1, (jacobian.tokens, -1))
        return (rows @ rows.mT if full else rows.square().sum(-1)).to(jacobian.dtype)

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        columns = jacobian.jvp(self._basis).to(self._basis).flatten(1)
        second = columns if other is None else other.jvp(self._basis).to(self._basis).flatten(1)
        return (columns.mT @ second).to(jacobian.dtype)

    def sample(self, eps: Tensor) -> Tensor:
        """Return samples made of the first K columns of ``eps``."""
        return eps[:, : len(self._basis)].to(self._basis) @ self._basis

    def adjoint(self, v: Tensor) -> Tensor:
        """Return K columns followed by zeros, in the shape of ``v``."""
        product = v.to(self._basis) @ self._basis.mT
        return torch.nn.functional.pad(product, (0, v.shape[1] - len(self._basis)))

    def solve(self, v: Tensor) -> Tensor:
        return self.sample(self.adjoint(v)).to(v)

    def variances(self) -> Tensor:
        return self._basis.square().sum(0)

    def decided(self, precision: Tensor) -> Tensor:
        """Return γ of every weight (P,) under prior precisions (P,): the share of its variance that the data remove."""
        prior_variances = torch.linalg.solve_triangular(self.prior_root, self.directions, upper=False).square().sum(0)
        return precision.to(prior_variances) * (prior_variances - self.variances())


@saved
@dataclass(frozen=True, eq=False)
class SubspaceCurvature:
    """Curvature restricted to K directions D (K, P); ``gram`` is D H Dᵀ at unit dispersion, (K, K)."""

    directions: Tensor
    gram: Tensor
    selection: Selection

    def precision(self, phi: Tensor, prior: BoundPrior) -> SubspacePrecision:
        inside = (self.directions * prior.vector.to(self.gram)) @ self.directions.mT  # D A Dᵀ, (K, K)
        posterior_root = cholesky(self.gram / phi.to(self.gram) + inside, "the subspace")
        prior_root = cholesky(inside, "the subspace")
        outside = prior.logdet().double() - 2 * prior_root.diagonal().log().sum()
        logdet = outside + 2 * posterior_root.diagonal().log().sum()
        return SubspacePrecision(self.directions, posterior_root, prior_root, logdet)

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return log det(H/φ + A) with no curvature outside the directions; for one precision from eigenvalues."""
        if not prior.is_isotropic:
            return self.precision(phi, prior).logdet()
        alpha = prior.values.double()
        return self.selection.size * alpha.log() + torch.log1p(self._values / (phi.to(alpha) * alpha)).sum()

    @cached_property
    def _values(self) -> Tensor:
        """The eigenvalues of H within the span of the directions, in an orthonormal basis."""
        root = cholesky(self.directions @ self.directions.mT, "the directions")
        half = torch.linalg.solve_triangular(root, self.gram, upper=False)
        return eigvalsh(torch.linalg.solve_triangular(root, half.mT, upper=False)).clamp_min(0)

    @cached_property
    def inner_diagonal(self) -> Tensor:
        """The diagonal of H within the span of the directions, (P,)."""
        dual = torch.linalg.solve(self.directions @ self.directions.mT, self.directions)
        return (dual * (self.gram @ dual)).sum(0)

    def diagonal(self) -> Tensor:
        return floored_by_layer(self.inner_diagonal.clamp_min(0), self.selection)

    def state(self) -> State:
        return State("SubspaceCurvature", tensors={"directions": self.directions, "gram": self.gram})

    @classmethod
    def from_state(cls, state: State, network: Network) -> SubspaceCurvature:
        fields = state.read(directions=Array(("K", "P")), gram=Array(("K", "K"), also=semidefinite))
        return cls(**fields, selection=network.selection)
