"""The whole curvature matrix, (P, P)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lapwing.core.data import Data, check_finite
from lapwing.curvature.structures import floored_by_layer
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.likelihoods.protocol import Likelihood
from lapwing.linalg.cholesky import cholesky, not_definite
from lapwing.linalg.gram import Gram, symmetrise
from lapwing.losses import Statistics, counted
from lapwing.networks import graph as graphs
from lapwing.networks import products
from lapwing.networks.backward import loops
from lapwing.networks.blocks import LinearJacobian
from lapwing.networks.budget import near, temporary
from lapwing.networks.forward import raw_output, recording, shaped
from lapwing.networks.jacobians import LayerJacobians
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.gaussian import SINGLE, Prior


@dataclass(frozen=True, eq=False)
class FullPrecision:
    """Λ = H/φ + A by its Cholesky factor, float64."""

    factor: Tensor
    selection: Selection
    log_determinant: Tensor
    _cache: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def logdet(self) -> Tensor:
        return self.log_determinant

    @cached_property
    def covariance(self) -> Tensor:
        return torch.cholesky_inverse(self.factor)

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        plain = single_map(jacobian)
        if plain is not None:
            return self._by_inputs(plain, jacobian, full)
        j = jacobian.whole()
        batch, _, size = j.shape
        rows = self._whitened(j.reshape(-1, size)).reshape(batch, jacobian.tokens, -1, size)
        return (rows @ rows.mT if full else rows.square().sum(-1)).to(j.dtype)

    def _by_inputs(self, part: LinearJacobian, jacobian: LayerJacobians, full: bool) -> Tensor:
        r"""One linear map at one position: S_cd = Σ_ij g_ci g_dj (aᵀ Σ_ij a).

        The inner forms are computed once for all outputs and only for i <= j: half of P² multiplications for
        each input instead of C P². In float64, as the sums are: covariances under a weak prior cancel.
        """
        a, g = part.a[0, :, 0].double(), part.g[0, :, :, 0].double()
        batch, d_in = a.shape
        d_out = g.shape[-1]
        blocks = self._arranged(jacobian)  # (pairs, d_in, d_in)
        first, second = torch.triu_indices(d_out, d_out, device=a.device)
        forms = a.new_empty(batch, d_out, d_out)
        step = max(1, temporary(a.device) // (a.element_size() * max(1, batch) * d_in))
        for start in range(0, len(first), step):
            moved = torch.matmul(a, blocks[start : start + step])  # (pairs, B, d_in)
            value = torch.einsum("pbi,bi->bp", moved, a)
            i, k = first[start : start + step], second[start : start + step]
            forms[:, i, k] = value
            forms[:, k, i] = value
        rows = g.transpose(0, 1)  # (B, K, d_out)
        left = torch.bmm(rows, forms)
        if not full:
            return (left * rows).sum(-1).reshape(batch, jacobian.tokens, -1).to(part.g.dtype)
        left, rows = (t.reshape(batch, jacobian.tokens, -1, d_out) for t in (left, rows))
        return (left @ rows.mT).to(part.g.dtype)

    def _arranged(self, jacobian: LayerJacobians) -> Tensor:
        """Blocks Σ_ij for i <= j of the one linear map, (pairs, d_in, d_in), symmetrised in the inputs."""
        if "blocks" not in self._cache:
            (block,) = jacobian.layout
            order = block.arrange(self.selection.split(torch.arange(self.selection.size, dtype=torch.float64)))
            order = order[0].long().to(self.factor.device)  # (d_out, d_in): where each entry sits in theta
            first, second = torch.triu_indices(block.d_out, block.d_out, device=order.device)
            tall = self.covariance[order[first].unsqueeze(-1), order[second].unsqueeze(-2)]
            self._cache["blocks"] = 0.5 * (tall + tall.mT)
        return self._cache["blocks"]

    def cross(self, jacobian: LayerJacobians) -> Tensor:
        j = jacobian.whole()
        rows = self._whitened(j.reshape(-1, j.shape[-1]))
        return (rows @ rows.mT).to(j.dtype)

    def sample(self, eps: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, eps.to(self.factor).mT, upper=True).mT.to(eps)

    def adjoint(self, v: Tensor) -> Tensor:
        return self._whitened(v).to(v)

    def _whitened(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, rows.to(self.factor).mT, upper=False).mT

    def solve(self, v: Tensor) -> Tensor:
        return torch.cholesky_solve(v.to(self.factor).mT, self.factor).mT.to(v)

    def variances(self) -> Tensor:
        return self.covariance.diagonal()


@dataclass(frozen=True, eq=False)
class FullCurvature:
    """H at unit dispersion, (P, P)."""

    matrix: Tensor
    selection: Selection
    definite: bool = True  # a GGN; a Hessian may have negative eigenvalues
    preconditions: ClassVar[bool] = True
    _cache: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def __add__(self, other: FullCurvature) -> FullCurvature:
        if self.selection.names != other.selection.names or self.matrix.shape != other.matrix.shape:
            raise UnsupportedError("these curvatures belong to different networks or weights and do not add.")
        return FullCurvature(self.matrix + other.matrix, self.selection, self.definite and other.definite)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Once for all isotropic priors and dispersions."""
        return self._spectrum(self.matrix.double())

    def _spectrum(self, matrix: Tensor) -> Tensor:
        values = torch.linalg.eigvalsh(matrix)
        return values.clamp_min(0) if self.definite else values

    def _scaled_eigenvalues(self, scale: Tensor) -> Tensor:
        """Of D^-½ H D^-½, once for all precisions g D."""
        if "scale" not in self._cache or not torch.equal(self._cache["scale"], scale):
            root = scale.double().rsqrt()
            self._cache.update(scale=scale, values=self._spectrum(root[:, None] * self.matrix.double() * root))
        return self._cache["values"]

    def precision(self, phi: Tensor, prior: Prior) -> FullPrecision:
        matrix = self.matrix.double() / phi.double()
        matrix.diagonal().add_(prior.vector.double())
        factor = cholesky(matrix, self._name)
        return FullPrecision(factor, self.selection, 2 * factor.diagonal().log().sum())

    @property
    def _name(self) -> str:
        names = self.selection.names
        return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} ({self.selection.size} weights)"

    def logdet(self, phi: Tensor, prior: Prior) -> Tensor:
        """Of H/φ + A: from the eigenvalues for a prior with one number, else by a factorisation."""
        if prior.kind not in SINGLE:
            return self.precision(phi, prior).logdet()
        own = self.eigenvalues if prior.scale is None else self._scaled_eigenvalues(prior.scale)
        values = own / phi.double() + prior.values.double()
        smallest = float(values.detach().min())
        if smallest <= 0:
            raise NumericalError(not_definite(self._name, smallest))
        total = values.log().sum()
        return total if prior.scale is None else total + prior.scale.double().log().sum()

    def diagonal(self) -> Tensor:
        return floored_by_layer(self.matrix.diagonal().double(), self.selection)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}


def single_map(jacobian: LayerJacobians) -> LinearJacobian | None:
    """The Jacobian's only block, if that is one linear map used at one position and wholly selected."""
    if len(jacobian.layout) != 1 or jacobian.selection.index is not None:
        return None
    part = jacobian.parts[0]()
    return part if isinstance(part, LinearJacobian) and part.positions == 1 and part.a.shape[0] == 1 else None


def full_curvature(sweep: Iterable[LayerJacobians], network: Network) -> FullCurvature:
    """Σ JᵀJ over a pass, summed in float64: a prior far below the largest eigenvalue must survive the sum.

    A single linear map goes by the outer products of its inputs instead. Memory: 8 P² bytes and the Jacobian of one
    chunk; nearly twice that for a single linear map, whose pairs are put in order at the end.
    """
    size = network.selection.size
    gram: Gram | None = None
    pairs = _PairSums()
    for jacobians in sweep:
        part = single_map(jacobians)
        if part is not None:
            pairs.add(part)
            continue
        gram = Gram(size, torch.float64, network.device) if gram is None else gram
        rows = jacobians.whole().flatten(0, 1)
        step = max(1, temporary(network.device) // (8 * size))
        for start in range(0, len(rows), step):
            gram.add(rows[start : start + step])
    if not pairs.used:
        gram = Gram(size, torch.float64, network.device) if gram is None else gram
        return FullCurvature(gram.value(), network.selection)
    total = _spread_pairs(pairs.value(), network)
    return FullCurvature(total if gram is None else total.add_(gram.value()), network.selection)


class _PairSums:
    """Σ_b (Σ_k g_ki g_kj) a aᵀ for i <= j, (pairs, d_in, d_in), float64: a K-th of the work of JᵀJ.

    Rows are collected until a product with them is worth the pass over the large result. Inputs go in strips, and a
    strip meets only what is at and behind it, since the rest is symmetric.
    """

    ROWS = 512
    STRIP = 32

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._strips: list[Tensor] = []  # (pairs, strip, d_in - start)
        self.used = False

    def add(self, part: LinearJacobian) -> None:
        a, g = part.a[0, :, 0].double(), part.g[0, :, :, 0].transpose(0, 1).double()  # (B, d_in), (B, K, d_out)
        first, second = torch.triu_indices(g.shape[-1], g.shape[-1], device=a.device)
        self._inputs.append(a)
        self._weights.append(torch.bmm(g.mT, g)[:, first, second])
        self.used = True
        if sum(len(x) for x in self._inputs) >= self.ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._inputs:
            return
        a, w = torch.cat(self._inputs), torch.cat(self._weights).mT.contiguous()
        self._inputs, self._weights = [], []
        size = a.shape[1]
        if not self._strips:
            starts = range(0, size, self.STRIP)
            self._strips = [a.new_zeros(len(w), min(self.STRIP, size - start), size - start) for start in starts]
        columns = a.mT.contiguous()
        for k, strip in enumerate(self._strips):
            start = k * self.STRIP
            _add_weighted(strip, columns[start : start + self.STRIP], w, a[:, start:])

    def value(self) -> Tensor:
        self._flush()
        pairs, _, size = self._strips[0].shape
        whole = self._strips[0].new_empty(pairs, size, size)
        for k, strip in enumerate(self._strips):
            start = k * self.STRIP
            whole[:, start : start + self.STRIP, start:] = strip
            whole[:, start:, start : start + self.STRIP] = strip.mT
        return whole


def _add_weighted(total: Tensor, left: Tensor, weights: Tensor, right: Tensor) -> None:
    """total += Σ_b weights_pb left_ib right_bj: (pairs, d_left, d_right)."""
    rows, (width, last) = left.shape[1], total.shape[1:]
    step = max(1, temporary(left.device) // (left.element_size() * max(1, rows * width)))
    for start in range(0, len(weights), step):
        tall = weights[start : start + step].unsqueeze(1) * left  # (p, d_left, B)
        total[start : start + step].view(-1, last).addmm_(tall.view(-1, rows), right)


def _spread_pairs(pairs: Tensor, network: Network) -> Tensor:
    (block,) = network.layout
    size = network.selection.size
    order = block.arrange(network.selection.split(torch.arange(size, dtype=torch.float64)))[0].long().to(pairs.device)
    first, second = torch.triu_indices(block.d_out, block.d_out, device=pairs.device)
    matrix = pairs.new_empty(size, size)
    matrix[order[first].unsqueeze(-1), order[second].unsqueeze(-2)] = pairs
    matrix[order[second].unsqueeze(-1), order[first].unsqueeze(-2)] = pairs
    return matrix


def full_hessian(network: Network, likelihood: Likelihood, data: Data) -> tuple[FullCurvature, Statistics]:
    """The Hessian of the loss in the weights, by double backward for many rows at once, summed in float64."""
    if network.shift is not None:
        raise UnsupportedError("the Hessian exists at the trained weights only; use curvature='ggn'.")
    selection = network.selection
    tensors = dict(network.model.named_parameters())
    chosen = [tensors[name] for name in selection.names]
    total = torch.zeros(selection.size, selection.size, dtype=torch.float64, device=network.device)
    loss_sum, count = 0.0, 0
    for batch in data.batches("Hessian"):
        with sdpa_kernel(SDPBackend.MATH), recording(tensors, selection.names, network.plain):
            raw = raw_output(network.model, batch.inputs)
            f = shaped(raw)
            check_finite(f.detach(), "outputs of the network")
            y = likelihood.targets(f.detach(), batch.targets)
            loss = likelihood.loss(f, y).sum()
            grads = torch.autograd.grad(loss, chosen, create_graph=True, allow_unused=True, materialize_grads=True)
            gradient = selection.picked(torch.cat([g.reshape(-1) for g in grads]))
            if gradient.requires_grad:
                looped = loops(graphs.read(raw, raw.shape[0]), raw, network.recurrent)
                _add_slopes(total, gradient, network, raw.shape[0], looped)
        loss_sum += float(loss.detach())
        count += int(likelihood.count(f.detach(), y))
    symmetrise(total)
    return FullCurvature(total, selection, definite=False), Statistics(
        loss_sum, counted(count), network.output_shape[-1]
    )


def _add_slopes(total: Tensor, gradient: Tensor, network: Network, batch: int, looped: bool) -> None:
    """total += ∂ gradient / ∂ θ, as many rows at once as fit the byte budget; one after another if ``looped``."""
    size, width = len(gradient), 4 * batch * network.footprint.width  # a pass there and back, and the slopes of both
    step = max(1, near(network.device) // (gradient.element_size() * (2 * size + width)))
    rows = partial(products.vjp, network.model, network.selection, gradient)
    for start in range(0, size, step):
        stop = min(start + step, size)
        seeds = torch.nn.functional.one_hot(torch.arange(start, stop, device=gradient.device), size)
        try:
            found = rows(seeds, looped)
        except (RuntimeError, NotImplementedError):  # no batching rule on the way
            found = rows(seeds, True)
        total[start:stop] += found.double()
