"""Inducing points: rows of the Jacobian, their locations, curvatures in the span of a few directions, and ELLA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lapwing.curvature.base import Curvature, Precision, SquaredSum, Sweep, floor_by_layer
from lapwing.curvature.dense import LowRankCurvature, LowRankPrecision, WeightRows, isotropic_logdet
from lapwing.curvature.kronecker import prior_precision
from lapwing.data.batches import Data
from lapwing.data.inputs import Batch, Inputs, check_finite, is_real_tensor
from lapwing.data.streams import DrawnRows, class_labels
from lapwing.errors import FileError, NumericalError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.linalg import dense
from lapwing.linalg.stochastic import Inducing
from lapwing.methods.base import Conformance, Cost, Exactness, Method, Work, Workload, refuse_g_prior
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.networks.tangent import LayerJacobians
from lapwing.posteriors.base import Step, Trace
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.priors import BoundPrior, Isotropic, prior_kernel
from lapwing.problem import Problem, Statistics
from lapwing.runtime.memory import batch_size_for, budget, concat_chunks
from lapwing.runtime.settings import FLAG, integer, setting
from lapwing.runtime.states import Array, Maybe, PartOf, Samples, State, Stored, saved, semidefinite, stored
from lapwing.runtime.threads import independent_generator, uniform

TOO_WIDE = 1.1  # ratio of standard deviations from which missing points are a finding


@dataclass(frozen=True, eq=False)
class AnchoredRows(WeightRows):
    """Linear combinations W = mixᵀ J_Z (r, P) of anchors, with mix (M, r); W is not formed."""

    anchors: Anchors
    mix: Tensor

    def gram(self, prior: BoundPrior) -> Tensor:
        return self.mix.mT @ self.anchors.kernel(prior) @ self.mix

    def pull(self, jacobian: LayerJacobians, prior: BoundPrior) -> Tensor:
        return self.mix.mT @ self.anchors.against(jacobian, prior).mT

    def times(self, v: Tensor) -> Tensor:
        return self.anchors.times(v) @ self.mix

    def combine(self, c: Tensor) -> Tensor:
        return self.anchors.combine(c @ self.mix.mT)


@saved
@dataclass(frozen=True, eq=False)
class AnchoredCurvature(Curvature):
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
        one = Isotropic(1.0).bound(self.selection, self.mix)
        return dense.eigvalsh(AnchoredRows(self.anchors, self.mix).gram(one)).clamp_min(0)

    @cached_property
    def anchored_diagonal(self) -> Tensor:
        """The diagonal of H̃, (P,)."""
        return AnchoredRows(self.anchors, self.mix).combine(torch.eye(self.mix.shape[1]).to(self.mix)).square().sum(0)

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the upper bound on log det(A + H/φ); raise if the covariance was learned with alpha above 0."""
        if self.ggn_diagonal is None:
            raise UnsupportedError(
                "this covariance was learned by predicting (alpha above 0) and has no evidence; compare it on held-out "
                "data, or fit VaLLA(alpha=0)."
            )
        phi = phi.to(self.mix)
        if prior.is_isotropic:  # from eigenvalues alone
            anchored = isotropic_logdet(self.values, phi, prior)
            missing = (self.ggn_diagonal.double().sum() - self.values.sum()) / (prior.values.double() * phi)
        else:
            anchored = self.precision(phi, prior).logdet()
            missing = self.missing_trace(phi, prior).sum()
        return anchored + missing.clamp_min(0)

    def missing_trace(self, phi: Tensor, prior: BoundPrior) -> Tensor:
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
        values = dense.eigvalsh(AnchoredRows(self.anchors, self.mix).gram(prior)).clamp_min(0) / phi.to(self.mix)
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
        return floor_by_layer(diagonal, self.selection)

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
class BoundedCurvature(Stored, Curvature):
    r"""The part H̃ of H in some directions; ``exact_diagonal`` (P,) is the diagonal of the whole H.

    The log-determinant is an upper bound of that of the whole H,

    $$ \log\det(A + H/\varphi) \le \log\det(A + \tilde H/\varphi) + \operatorname{tr} A^{-1} (H - \tilde H)/\varphi $$

    (Titsias 2009), under the prior for which the directions were chosen and its multiples. Without the trace, the
    evidence would be highest for a prior that leaves the missing directions free.
    """

    part: LowRankCurvature = stored(PartOf(LowRankCurvature))
    exact_diagonal: Tensor = stored(Array(("P",), 0))
    preconditions: ClassVar[bool] = True

    def precision(self, phi: Tensor, prior: BoundPrior) -> LowRankPrecision:
        return self.part.precision(phi, prior)

    @cached_property
    def _part_diagonal(self) -> Tensor:
        return self.part.values @ self.part.vectors.square()

    def missing_trace(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the contribution of each weight to the log-determinant, (P,): the diagonal of A⁻¹ (H - H̃)/φ."""
        missing = self.exact_diagonal.double() - self._part_diagonal
        return missing / (prior.vector * phi.to(self.part.values))

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        return self.part.logdet(phi, prior) + self.missing_trace(phi, prior).sum().clamp_min(0)

    def diagonal(self) -> Tensor:
        return floor_by_layer(self.exact_diagonal.double(), self.part.selection)


@dataclass(frozen=True, eq=False)
class SubspacePrecision(Precision):
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

    def variances(self) -> Tensor:
        return self._basis.square().sum(0)

    def gammas(self, precision: Tensor) -> Tensor:
        """Return γ of every weight (P,) under prior precisions (P,): the share of its variance that the data remove."""
        prior_variances = torch.linalg.solve_triangular(self.prior_root, self.directions, upper=False).square().sum(0)
        return precision.to(prior_variances) * (prior_variances - self.variances())


@saved
@dataclass(frozen=True, eq=False)
class SubspaceCurvature(Stored, Curvature):
    """Curvature restricted to K directions D (K, P); ``gram`` is D H Dᵀ at unit dispersion, (K, K)."""

    selection: Selection
    directions: Tensor = stored(Array(("K", "P")))
    gram: Tensor = stored(Array(("K", "K"), also=semidefinite))

    def precision(self, phi: Tensor, prior: BoundPrior) -> SubspacePrecision:
        inside = (self.directions * prior.vector.to(self.gram)) @ self.directions.mT  # D A Dᵀ, (K, K)
        posterior_root = dense.cholesky(self.gram / phi.to(self.gram) + inside, "the subspace")
        prior_root = dense.cholesky(inside, "the subspace")
        outside = prior.logdet().double() - 2 * prior_root.diagonal().log().sum()
        logdet = outside + 2 * posterior_root.diagonal().log().sum()
        return SubspacePrecision(self.directions, posterior_root, prior_root, logdet)

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return log det(H/φ + A) with no curvature outside the directions; for one precision from eigenvalues."""
        if not prior.is_isotropic:
            return self.precision(phi, prior).logdet()
        return isotropic_logdet(self._values, phi, prior)

    @cached_property
    def _values(self) -> Tensor:
        """The eigenvalues of H within the span of the directions, in an orthonormal basis."""
        root = dense.cholesky(self.directions @ self.directions.mT, "the directions")
        half = torch.linalg.solve_triangular(root, self.gram, upper=False)
        return dense.eigvalsh(torch.linalg.solve_triangular(root, half.mT, upper=False)).clamp_min(0)

    @cached_property
    def inner_diagonal(self) -> Tensor:
        """The diagonal of H within the span of the directions, (P,)."""
        dual = torch.linalg.solve(self.directions @ self.directions.mT, self.directions)
        return (dual * (self.gram @ dual)).sum(0)

    def diagonal(self) -> Tensor:
        return floor_by_layer(self.inner_diagonal.clamp_min(0), self.selection)


PIVOTS = {"greedy": dense.greedy_pivots, "trace": dense.trace_pivots}
STARTS = (*PIVOTS, "kmeans", "random")
COPIES = 3  # float64 chunks of rows that a kernel between rows holds: two, and one that is being computed


@dataclass(frozen=True, eq=False)
class Anchors:
    """M rows J_Z (M, P) of the Jacobian: row m belongs to output ``outputs[m]`` at input m.

    J_Z is kept between calls as the inputs and gradients of every layer; a layer that is shared over many positions
    keeps its rows themselves (at most M P numbers). What does not fit the byte budget is computed anew at every call.
    """

    network: Network
    inputs: Inputs  # (M, ...)
    outputs: Tensor  # (M,) output numbers; token-level outputs (T, C) are numbered through

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[LayerJacobians]:
        """Yield J_Z in float64, in chunks of anchors that fit the byte budget."""
        return self._compute() if self._kept is None else iter(self._kept)

    @cached_property
    def _kept(self) -> tuple[LayerJacobians, ...] | None:
        """All chunks, if they take at most half of the byte budget."""
        kept, left = [], budget(self.network.device) // 2
        for part in self._compute():
            kept.append(part)
            left -= part.nbytes
            if left < 0:
                return None
        return tuple(kept)

    def _compute(self) -> Iterator[LayerJacobians]:
        network = self.network
        each = 8 * COPIES * (network.footprint.width + network.footprint.whole)
        most = batch_size_for(len(self), each, network.device)
        for rows in network.footprint.chunks(len(self), 1, network.dtype, network.device, most):
            tangent = network.linearise(network.take(self.inputs, rows))
            check_finite(tangent.network_output, "outputs of the network")
            yield tangent.jacobians(self._seeds(self.outputs[rows])).materialise().double().materialise()

    def differentiable(self, inputs: Tensor) -> LayerJacobians:
        """Return J_Z at other inputs, differentiable in these."""
        tangent = self.network.linearise(inputs, differentiable=True)
        return tangent.jacobians(self._seeds(self.outputs)).materialise().double().materialise()

    def _seeds(self, outputs: Tensor) -> Tensor:
        """Return one-hot output gradients (1, M, [T,] C) that select these outputs."""
        shape = self.network.output_shape
        seeds = one_hot(outputs, torch.Size(shape).numel()).to(self.network.dtype)
        return seeds.reshape(1, len(outputs), *shape)

    def kernel(self, prior: BoundPrior) -> Tensor:
        """Return J_Z A⁻¹ J_Zᵀ, (M, M)."""
        return concat_chunks((self.against(part, prior) for part in self), len(self))

    def against(self, jacobian: LayerJacobians, prior: BoundPrior) -> Tensor:
        """Return J A⁻¹ J_Zᵀ for the rows of another Jacobian, (B K, M), in float64."""
        jacobian = jacobian if jacobian.dtype == torch.float64 else jacobian.double()
        return concat_chunks((prior_kernel(jacobian, prior, part) for part in self), len(self), 1)

    def times(self, v: Tensor) -> Tensor:
        """Return v J_Zᵀ for v (n, P): (n, M)."""
        return concat_chunks((part.jvp(v)[:, :, 0] for part in self), len(self), 1)

    def combine(self, c: Tensor) -> Tensor:
        """Return c J_Z for c (n, M): (n, P)."""
        total, start = c.new_zeros(len(c), self.network.selection.size), 0
        for part in self:
            total += part.vjp(c[:, start : start + part.batch, None])
            start += part.batch
        return total


@dataclass(frozen=True, eq=False)
class Placement:
    """The choice of anchors among the outputs of the network at the inputs of a pool."""

    network: Network
    pool: DrawnRows
    generator: torch.Generator

    @property
    def outputs(self) -> int:
        """The number of outputs at one input, all tokens together."""
        return torch.Size(self.network.output_shape).numel()

    def every_output(self) -> Anchors:
        """Return an anchor at every output of every input of the pool."""
        return self._by_number(torch.arange(len(self.pool) * self.outputs))

    def landmarks(self, count: int) -> Anchors:
        """Return ``count`` anchors: a random output of every input, then a second one of every input, and so on."""
        order = self._random(len(self.pool), self.outputs).argsort(1)  # the outputs of each input in random order
        index = torch.arange(len(self.pool)).repeat(self.outputs)[:count]
        place = torch.arange(self.outputs).repeat_interleave(len(self.pool))[:count]
        return self._at(index, order[index, place])

    def start(self, name: str, count: int, prior: BoundPrior, candidates: int) -> Anchors:
        """Return at most ``count`` anchors by one of ``STARTS``.

        "greedy" and "trace" choose pivots of the tangent kernel among random candidates, "kmeans" takes centres of the
        inputs, "random" takes rows of the pool. Inputs without centres (integers, several tensors) are drawn at random
        instead.
        """
        if name in PIVOTS:
            total = len(self.pool) * self.outputs
            numbers = self._random(total).argsort()[: max(candidates, count)].cpu()
            pivots = PIVOTS[name](dense.check_kernel(self._by_number(numbers).kernel(prior)), count)
            return self._by_number(numbers[pivots.cpu()])
        outputs = torch.arange(count, device=self.network.device) % self.outputs  # in turn
        if name == "kmeans" and is_real_tensor(self.pool.inputs):
            return self._centres(outputs.sort().values)
        return self._random_inputs(outputs)

    def _centres(self, outputs: Tensor) -> Anchors:
        """Return centres of the inputs for each of these outputs; of the inputs of its class if targets are classes."""
        inputs, labels = self.pool.inputs, class_labels(self.pool.targets, self.outputs)
        centres = dense.centres_by_class(inputs.flatten(1), labels, outputs, self.generator)
        return Anchors(self.network, centres.reshape(-1, *inputs.shape[1:]), outputs)

    def _random_inputs(self, outputs: Tensor) -> Anchors:
        """Return anchors at random inputs, each at the output of its class if the targets are classes.

        If there are more anchors than inputs, all inputs come again with the next output, until no pair is left.
        """
        size, targets = len(self.pool), self.pool.targets
        index = self._random(size).argsort().repeat(self.outputs)[: len(outputs)]
        labels = class_labels(targets[index.to(targets.device)], self.outputs)
        place = torch.arange(len(index), device=outputs.device)
        first = outputs[place % size] if labels is None else labels.to(outputs.device)
        return self._at(index, (first + place // size) % self.outputs)

    def _by_number(self, numbers: Tensor) -> Anchors:
        """Return the anchors with these numbers: number i C + c is output c at input i of the pool."""
        return self._at(numbers // self.outputs, numbers % self.outputs)

    def _at(self, index: Tensor, outputs: Tensor) -> Anchors:
        """Return anchors at the inputs of the pool with these numbers."""
        return Anchors(self.network, self.pool.rows(index), outputs.to(self.network.device))

    def _random(self, *shape: int) -> Tensor:
        return uniform(shape, self.generator, torch.empty(0, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class InducingPoints:
    """Inducing points and the learned quantities: locations, prior variance, noise and, with alpha above 0, covariance.

    Kernels are computed under the prior of ``problem`` and multiplied by exp(``log_scale``): a change of the prior
    variance needs no new kernel.
    """

    problem: Problem
    anchors: Anchors
    statistics: Statistics
    n_samples: int  # training samples, ignored ones included
    movable: bool  # whether the locations are learned
    log_scale: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    log_noise: Tensor | None = None  # log φ, if it is learned
    inducing: Inducing | None = None  # the learned covariance; None if the closed form is used
    steps: tuple[Step, ...] = ()
    findings: tuple[str, ...] = ()

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with the learned noise."""
        likelihood = self.problem.likelihood
        return likelihood if self.log_noise is None else likelihood.with_dispersion(self.log_noise.exp())

    @cached_property
    def penalty(self) -> Tensor:
        """(w̃ - μ)ᵀ A (w̃ - μ) under the prior of ``problem``."""
        prior = self.problem.prior
        return prior.penalty(self.problem.network.theta().double()).double().detach()

    @property
    def score(self) -> float:
        """The highest objective of all steps."""
        return max((step.score for step in self.steps), default=-math.inf)

    def learnable(self, noise: bool) -> tuple[InducingPoints, Tensor | None]:
        """Return the points and their moves, with everything that is learned as leaves for an optimiser.

        These are the prior variance, the noise if asked, and the moves, which are None if the points are fixed. Moves
        are zero at first, and at least float32: half precision would lose small steps.
        """
        device, z = self.problem.network.device, self.anchors.inputs
        log_scale = self.log_scale.detach().to(device, copy=True).requires_grad_(self.problem.learn_prior)
        log_noise = moves = None
        if noise and self.problem.likelihood.learns_dispersion:
            log_noise = self.problem.likelihood.dispersion.detach().double().log().to(device).requires_grad_()
        if self.movable:
            moves = torch.zeros_like(z, dtype=torch.promote_types(z.dtype, torch.float32), requires_grad=True)
        return replace(self, log_scale=log_scale, log_noise=log_noise), moves

    @cached_property
    def unit(self) -> Tensor:
        """The unit in which locations are learned, in the shape of one input.

        For a table it is the standard deviation of each column over the points, for images their mean standard
        deviation. A constant column has unit zero and does not move.
        """
        z = self.anchors.inputs
        spread = z.detach().double().std(0, correction=0)
        spread = spread if z.ndim == 2 else spread.mean().expand_as(spread)
        return (spread if bool(spread.any()) else torch.ones_like(spread)).to(z)

    def move(self, moves: Tensor) -> Tensor:
        """Return the inputs of the points after ``moves``, which are in units of their spread."""
        start = self.anchors.inputs.detach()
        return (start + self.unit * moves).to(start)

    def snapshot(self, moves: Tensor | None) -> InducingPoints:
        """Return the points at their locations after these moves; further steps of the optimiser do not change them."""
        anchors = self.anchors if moves is None else replace(self.anchors, inputs=self.move(moves.detach()))
        log_noise = None if self.log_noise is None else self.log_noise.detach().clone()
        return replace(self, anchors=anchors, log_scale=self.log_scale.detach().clone(), log_noise=log_noise)

    def trace_step(self, score: float) -> Step:
        """Return the trace entry with this score; with more than 16 precisions it has the first one only."""
        precisions = (self.problem.prior.values.double() / self.log_scale.exp()).detach().reshape(-1).tolist()
        noise = float(self.likelihood.dispersion.detach())
        return Step(score, tuple(precisions) if len(precisions) <= 16 else (precisions[0],), (noise,))

    def posterior(self, data: Data) -> WeightPosterior:
        """Return the posterior, with the learned covariance or, by one pass over the data, the one in closed form."""
        prior = self.problem.prior
        prior = prior.with_precision(prior.values.detach() / self.log_scale.exp().to(prior.values))
        problem = replace(self.problem, prior=prior, likelihood=self.likelihood)
        if self.inducing is None:
            white = dense.whitening(self.anchors.kernel(prior))
            squares, anchors = SquaredSum(problem.network), self.anchors
            rows = lambda jacobians: (anchors.against(jacobians, prior) @ white).mT
            width = 4 * len(white)
            information, _ = sum_projections(problem, data, white.shape[1], rows, "inducing points", width, squares)
            ggn_diagonal = squares.diagonal(data.processes)
            (mix,) = data.processes.copy_of_first([white @ _root(information)])
        else:
            white = dense.smooth_whitening(self.anchors.kernel(prior))
            mix = white @ _root(self.inducing.information) * problem.likelihood.dispersion.to(white).sqrt()
            ggn_diagonal = None
            problem = problem.with_known_prior()  # learned together with the covariance
        curvature = AnchoredCurvature(self.anchors, mix, ggn_diagonal)
        posterior = WeightPosterior(problem, curvature, self.statistics, problem.network.theta())
        if not self.steps:
            return posterior
        score = "bound" if self.inducing is None else "energy"
        return posterior.with_trace(Trace("VaLLA", score, self.steps, self.findings))


def _root(matrix: Tensor) -> Tensor:
    """Return R with R Rᵀ = matrix, for a positive semidefinite matrix."""
    values, vectors = dense.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt()


def sum_projections(
    problem: Problem, data: Data, size: int, project: Callable[[LayerJacobians], Tensor], label: str, width: int,
    squares: SquaredSum | None,
) -> tuple[Tensor, Statistics]:  # fmt: skip
    """Return Σ F Fᵀ (size, size) at unit dispersion, for the columns F that ``project`` gives, and the statistics.

    One pass over the data; ``width`` numbers are needed for each row besides its Jacobian. With ``squares`` the pass
    also adds up the diagonal of H, in float64: the part of H that the columns miss is a small difference.
    """
    total = torch.zeros(size, size, dtype=torch.float64, device=problem.network.device)
    sweep = Sweep(problem.network, problem.likelihood, data, label=label)
    for jacobians in sweep.jacobians(width=width):
        if squares is not None:
            jacobians = jacobians.double()
            squares.add(jacobians)
        columns = project(jacobians).to(total)
        total += columns @ columns.mT
    (total,) = data.processes.sum([total])
    return total, sweep.statistics


def whitened_rows(
    problem: Problem, batch: Batch, anchors: Iterable[LayerJacobians], white: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, checked targets, prior covariance and whitened rows of a batch, in float64.

    Shapes: (B, [T,] C); those of the targets; (B, [T,] C, C); (B, [T,] C, r). ``anchors`` are the rows J_Z in parts and
    ``white`` (M, r) whitens their kernel. Cost: the work of C backward passes over the batch and its kernel with J_Z.
    """
    network = problem.network
    precision = prior_precision(problem.prior, network.layout, network.selection)
    outputs, covariances, rows = [], [], []
    for _, tangent in network.tangents(batch.inputs):
        outputs.append(tangent.f.double())
        covs, kernels = [], []
        for run in tangent.output_runs(whole_tokens=True):
            jacobians = run.double()
            covs.append(precision.quadratic(jacobians))  # (B, tokens, C, C)
            kernel = torch.cat([prior_kernel(jacobians, problem.prior, part) for part in anchors], 1)
            kernels.append((kernel @ white).unflatten(0, (run.batch, run.outputs)))
        covariances.append(torch.cat(covs, 1).reshape(*tangent.f.shape, -1))
        rows.append(torch.cat(kernels, 1))
    f = torch.cat(outputs)
    y = problem.likelihood.targets(f, batch.targets)
    return f, y, torch.cat(covariances), torch.cat(rows).reshape(*f.shape, -1)


@dataclass(frozen=True)
class ELLA(Method):
    r"""Linearised Laplace approximation within the ``rank`` leading directions of the tangent kernel at landmarks.

    A landmark is a training input with one of its outputs, drawn at random. The directions are the leading
    eigenvectors of the landmarks' kernel; directions that are zero up to rounding are dropped, so the rank may be
    lower. One pass over the data gives the curvature within the directions. After that another prior or noise costs a
    factorisation of a rank × rank matrix.

    Args:
        num_landmarks: The number M of landmarks.
        rank: The number of directions.
        residual: False gives the directions that are left out no variance: the variance is never above the exact one
            and goes to zero far from the landmarks. True keeps their prior variance, as in ``VaLLA`` at these points.

    Raises:
        UnsupportedError: ``num_landmarks`` or ``rank`` is not a positive integer, or ``residual`` is not a bool.
            ``fit`` also raises it for ``g_prior``.

    Cost: one backward pass over the landmarks and their (M, M) kernel; one pass over the data with ``rank`` products
    J v for each output. Memory: M P numbers while the directions are computed, rank P afterwards.
    Exact when: the directions span the Jacobian of the data; at inputs outside that span only with ``residual``.

    >>> import lapwing as lw
    >>> x = torch.linspace(-1, 1, 20)[:, None].double()
    >>> net = torch.nn.Linear(1, 1).double()
    >>> posterior = lw.fit(net, [(x, x)], "regression", method=lw.ELLA(num_landmarks=10, rank=2), prior=1.0)
    >>> posterior.functions(x).cov.shape
    torch.Size([20, 1, 1])
    """

    num_landmarks: int = setting(2000, integer())
    rank: int = setting(20, integer())
    residual: bool = setting(False, FLAG)
    spans_processes: ClassVar[bool] = True
    conformance: ClassVar[Conformance] = Conformance(
        (
            Exactness(lambda weights, rows: ELLA(num_landmarks=rows, rank=weights), "linear"),
            Exactness(lambda weights, rows: ELLA(rows, weights, residual=True), "network", name="residual"),
        ),
        small=lambda model: {"": ELLA(num_landmarks=6, rank=3)},
    )

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        """Return the posterior; ``lw.fit`` calls this.

        Args:
            problem: Network, likelihood and prior.
            data: The training data.
            generator: Source of randomness for the landmarks; seed 0 if None.
        """
        network, prior = problem.network, problem.prior
        refuse_g_prior(self, prior)
        generator = independent_generator(generator)
        placement = Placement(network, DrawnRows.draw(data, self.num_landmarks, generator), generator)
        landmarks = placement.landmarks(self.num_landmarks)
        one = lambda: [leading_rows(landmarks, prior, self.rank)]
        ((rows,),) = data.processes.run_jobs([one], [1.0], network.device)
        directions = rows / prior.vector.detach().to(rows)
        squares = SquaredSum(network) if self.residual else None
        gram, statistics = curvature_within(problem, data, directions, squares)
        if squares is None:
            return WeightPosterior.fitted(problem, SubspaceCurvature(network.selection, directions, gram), statistics)
        _, singular, vectors = dense.svd(_root(gram).mT @ rows)
        part = LowRankCurvature(singular.square(), vectors, network.layout, network.selection)
        diagonal = squares.diagonal(data.processes)
        return WeightPosterior.fitted(problem, BoundedCurvature(part, diagonal), statistics)

    def cost(self, workload: Workload) -> Cost:
        points = min(self.num_landmarks, workload.rows)
        rank = min(self.rank, points, workload.weights)
        size, note = workload.weights, f"rank {rank}, {points} landmarks"
        once = workload.kernel(points) + Work(products=rank * points * workload.gradient, cubes=points**3)
        fit = Work(workload.jacobians() + workload.along(rank))
        predict = workload.prediction(Work(workload.along(rank)))
        stored = 8 * rank * (size + rank)
        peak = workload.jacobian_bytes() + 8 * (points * workload.gradient + 3 * points**2)
        return workload.cost(stored, peak, fit, predict, once, note)


def leading_rows(anchors: Anchors, prior: BoundPrior, rank: int, cut: float = 1e-14) -> Tensor:
    """Return Q (K, P) in the span of the anchors' Jacobian with Q A⁻¹ Qᵀ = I, leading directions first.

    Directions with an eigenvalue below ``cut`` of the largest are dropped: they are rounding.
    """
    kernel = anchors.kernel(prior)
    if not bool(torch.isfinite(kernel).all()):
        raise NumericalError(
            "the kernel of the landmarks is not finite; expected finite numbers. Check data and network for overflow."
        )
    values, vectors = dense.eigh(kernel)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    real = values > cut * values[0].clamp_min(1e-300)
    if not bool(real.any()):
        raise NumericalError("no output depends on the selected weights at any landmark; choose other weights.")
    return anchors.combine((vectors[:, real] / values[real].sqrt()).mT)


def curvature_within(
    problem: Problem, data: Data, directions: Tensor, squares: SquaredSum | None = None
) -> tuple[Tensor, Statistics]:
    """Return D H Dᵀ at unit dispersion (K, K) and the statistics, by one pass over the data."""
    features = lambda jacobians: jacobians.jvp(directions).flatten(1)
    return sum_projections(problem, data, len(directions), features, "features", 2 * len(directions), squares)
