"""Bayesian ridge regression through products with the design alone: samples and log-determinant for any precision.

A design X (rows, P) with unit noise and the prior N(0, (α D)⁻¹), D a fixed diagonal, gives the posterior precision
XᵀX / φ + α D. In coordinates √D θ that is a shifted Gram matrix, and one Krylov basis serves every α and φ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.random import derived_generator, normal, uniform
from lapwing.linalg.cg import Solution, block_conjugate_gradients
from lapwing.linalg.design import Design, OperatorPart, Part, back_product, gram_product
from lapwing.linalg.estimators import signs
from lapwing.linalg.krylov import BlockKrylov, block_krylov
from lapwing.linalg.operators import Product
from lapwing.linalg.quadrature import Quadrature, lanczos_quadrature
from lapwing.linalg.stochastic import Streamed

Descent = Callable[[Design, Tensor, Tensor, float], Solution]  # design, ζ, ε, shift
HELD = 1e-5  # what may be left of a row outside the basis that is said to hold it: rounding in single precision
LEAST = 1e-12  # relative residuals below this are rounding
FIRST, GROWTH = 4, 2  # products that a basis begins with, and by which it grows before it is asked again
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Logdet:
    """An estimated log det(I + A/shift): ``value`` differentiable in the shift, ``error`` one standard error."""

    value: Tensor
    error: float


@dataclass(frozen=True, eq=False)
class Ridge:
    """A design and the noise of K samples, the same for every precision.

    ``prior`` (K, P) is standard normal and ``back`` (K, P) is Xᵀ ε for standard normal ε. What has been learned about
    the Gram matrix (a basis, quadratures) is remembered; it depends on nothing but the fields. ``bytes`` limits the
    basis, ``width`` the rows that it starts from. ``eps`` (K, rows) is ε itself, where descent needs it.
    """

    design: Design
    scale: Tensor | None  # D, (P,); None is the identity
    prior: Tensor
    back: Tensor
    seed: int = 0
    width: int = 16
    bytes: int = 4 * 2**30
    eps: Tensor | None = None
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def drawn(
        cls,
        design: Design,
        samples: int,
        generator: torch.Generator | None,
        scale: Tensor | None = None,
        keep: bool = False,
        **settings: Any,
    ) -> Ridge:
        """With noise from the generator, of which ε is kept where asked for. Cost: one pass over the design."""
        like = torch.empty(0, dtype=torch.float64, device=design.like.device)
        # Features drawn from the same seed would be the noise itself.
        generator = derived_generator(generator, like)
        prior = normal((samples, design.size), generator, like)
        eps = normal((samples, design.rows), generator, like)
        # Probes from the seed of the noise itself would be correlated with the samples that the basis starts from.
        settings.setdefault("seed", int(uniform((1,), generator, like) * 2**53))
        return cls(design, scale, prior, back_product(design, eps), eps=eps if keep else None, **settings)

    @property
    def size(self) -> int:
        return self.design.size

    @property
    def _rounding(self) -> float:
        return 10 * float(torch.finfo(self.design.like.dtype).eps)

    @property
    def wider(self) -> str:
        """What an error advises besides, where the products are not in float64 already."""
        return "" if self.design.like.dtype == torch.float64 else ", or compute in float64"

    def _unscaled(self, rows: Tensor) -> Tensor:
        return rows if self.scale is None else rows / self._root

    def product(self, v: Tensor) -> Tensor:
        """D^-½ XᵀX D^-½ v."""
        return self._unscaled(gram_product(self.design, self._unscaled(v)))

    def samples(self, alpha: float, phi: float, tolerance: float, start: Tensor | None = None) -> Solution:
        """K draws from N(0, Λ⁻¹), Λ = XᵀX / φ + α D: the same noise for every α and φ.

        The first come from the basis, which grows until it holds them; the others are finished by conjugate gradients
        that it preconditions, from ``start`` (K, P) where samples near them are known. One that does not reach the
        tolerance is an error. Residuals are relative to the prior's part of the right-hand side, √shift |ζ|: the error
        e of a draw then has eᵀ Λ e ≤ (tolerance |ζ|)², so that it is, in the mean over all directions, this share of a
        standard deviation. Relative to the whole right-hand side, which the data may dominate, a small residual would
        say nothing.
        """
        shift = alpha * phi
        basis = self.reaching(shift, tolerance)
        count = self._based
        found = self._looked(basis, shift, tolerance)
        done = count if found.converged else 0
        rows, residuals, iterations = [found.x[:done]], [found.residuals[:done]], basis.products
        if done < len(self.prior):
            near = None if start is None else start[done:].double() * self._root / phi**0.5
            rhs, apply = self._rhs(shift, slice(done, None)), lambda v: self.product(v) + shift * v
            noise = shift**0.5 * self.prior[done:]
            rest = finished(apply, rhs, noise, tolerance, self.wider, near, deflating(basis, shift))
            rows, residuals, iterations = [*rows, rest.x], [*residuals, rest.residuals], iterations + rest.iterations
        solved = self._unscaled(torch.cat(rows) * phi**0.5)
        return Solution(solved, torch.cat(residuals), iterations, tolerance)

    def rescaled(self, scale: Tensor) -> Ridge:
        """The same noise for another D; the last one that was asked for is remembered."""
        mine: Ridge | None = self._memo.get("rescaled")
        if mine is None or mine.scale is None or not torch.equal(mine.scale, scale):
            self._memo["rescaled"] = mine = replace(self, scale=scale, _memo={})
        return mine

    @property
    def _root(self) -> Tensor | float:
        return 1.0 if self.scale is None else self.scale.sqrt()

    def gram(self, rows: Tensor) -> Tensor:
        """XᵀX θ for every row (n, P): read off the basis where it holds them, as it does its samples; else a pass."""
        basis: BlockKrylov | None = self._memo.get("basis")
        if basis is None:
            return gram_product(self.design, rows)
        root = self._root
        scaled = rows.double() * root
        found, outside = basis.image(scaled)
        found = found * root
        beyond = outside > HELD * scaled.norm(dim=1)
        if bool(beyond.any()):
            found[beyond] = gram_product(self.design, rows[beyond])
        return found

    def descended(self, alpha: float, phi: float, descend: Descent) -> Solution:
        """The same draws as ``samples``, by ``sgd`` or ``sdd`` of lapwing.linalg.stochastic."""
        if self.eps is None:
            raise ValueError("descent needs ε itself; expected a Ridge.drawn(..., keep=True).")
        design = self.design if self.scale is None else ScaledDesign(self.design, self.scale.rsqrt())
        found = descend(design, self.prior, self.eps, alpha * phi)
        return replace(found, x=self._unscaled(found.x * phi**0.5))

    @property
    def _based(self) -> int:
        """How many samples the basis starts from."""
        return max(1, min(len(self.prior), self.width // 2))

    def _rhs(self, shift: float, some: slice) -> Tensor:
        return shift**0.5 * self.prior[some] + self._unscaled(self.back[some])

    def _looked(self, basis: BlockKrylov, shift: float, tolerance: float) -> Solution:
        """The first samples, as far as a basis has them."""
        count = self._based
        sizes = error_sizes(shift**0.5 * self.prior[:count], self._rhs(shift, slice(count)), tolerance)
        return basis.solve(_weights(count, shift, basis), shift, tolerance=tolerance, sizes=sizes, truncated=True)

    def reaching(self, shift: float, tolerance: float) -> BlockKrylov:
        """The basis, grown until the first samples are solved at this shift, or it may not grow any more."""
        found = self.basis
        while not found.exhausted and len(found.rows) + len(found.ahead) <= self._most:
            solved = self._looked(found, shift, tolerance)
            log.info("residual %.3g at shift %.3g, from a basis of %d rows after %d products",
                     float(solved.residuals.max()), shift, len(found.rows), found.products)  # fmt: skip
            if solved.converged:
                break
            self._memo["basis"] = found = found.extended(self.product, GROWTH, max_basis=self._most)
        return found

    @property
    def _most(self) -> int:
        """Rows of the basis that ``bytes`` allows, and those that it starts from at least."""
        return max(2 * self._based, self.bytes // (8 * self.size))

    @property
    def basis(self) -> BlockKrylov:
        """The Krylov basis as far as it was needed so far."""
        if "basis" not in self._memo:
            start = torch.cat([self.prior[: self._based], self._unscaled(self.back)[: self._based]])
            self._memo["basis"] = block_krylov(
                self.product, start, FIRST, tolerance=self._rounding, max_basis=self._most
            )
        basis: BlockKrylov = self._memo["basis"]
        return basis

    def logdet(self, shift: Tensor, probes: int, steps: int) -> Logdet:
        """log det(I + A/shift), A = D^-½ XᵀX D^-½: Ritz pairs of the basis exactly, quadrature for what is left.

        One run serves every shift, and the value is differentiable in it. Cost: ``steps`` products of ``probes`` rows,
        once.
        """
        pairs, seen = self._quadrature(probes, steps)
        values = pairs.to(shift).clamp_min(0)
        low, high = seen.ends(lambda nodes: torch.log1p(nodes.clamp_min(0) / shift))
        each = 0.5 * (low + high)
        spread = float(each.detach().std()) / probes**0.5 if probes > 1 else float("inf")
        bias = 0.5 * float((high - low).detach().mean().abs())
        return Logdet(torch.log1p(values / shift).sum() + each.mean(), spread + bias)

    def _quadrature(self, probes: int, steps: int) -> tuple[Tensor, Quadrature]:
        """Of what the basis leaves, once for all shifts; anew where the basis has since doubled."""
        key, rank = f"quadrature {probes} {steps}", len(self.basis.rows)
        if key not in self._memo or rank >= 2 * self._memo[key][0]:
            basis, values = self.basis, self.basis.values
            # Others would be counted twice, by halves. Relative to the value itself: what couples a pair to the rest
            # adds its square over that value and the shift, which may be far smaller than the largest.
            good = basis.pair_residuals() * values[:1] <= 1e-2 * values
            away = _away(basis, basis.turn[:, good])
            generator = torch.Generator().manual_seed(self.seed)
            rows = signs(probes, self.size, generator, self.prior.device)
            for _ in range(2):
                rows = away(rows)
            outside = lambda v: away(self.product(away(v)))  # both times: rounding must not bring the pairs back
            self._memo[key] = (rank, values[good], lanczos_quadrature(outside, rows, steps))
        _, values, found = self._memo[key]
        return values, found


def finished(
    apply: Product,
    rhs: Tensor,
    noise: Tensor,
    tolerance: float,
    wider: str,
    start: Tensor | None,
    root: Product | None = None,
) -> Solution:
    """Samples by block conjugate gradients, from a start near them if there is one; ``noise`` is the prior's part."""
    advice = f"Raise the prior precision or the tolerance of the samples{wider}."
    left = rhs if start is None else rhs - apply(start)
    sizes = error_sizes(noise, rhs, tolerance)
    more = block_conjugate_gradients(apply, left, root=root, tolerance=tolerance, sizes=sizes, advice=advice)
    return more if start is None else replace(more, x=start + more.x)


@dataclass(frozen=True, eq=False)
class ScaledDesign:
    """X diag(factor), for a factor (P,)."""

    design: Design
    factor: Tensor

    @property
    def size(self) -> int:
        return self.design.size

    @property
    def rows(self) -> int:
        return self.design.rows

    @property
    def like(self) -> Tensor:
        return self.design.like

    @property
    def streamed(self) -> bool:
        return isinstance(self.design, Streamed) and self.design.streamed

    def __iter__(self) -> Iterator[Part]:
        return (self._scaled(part) for part in self.design)

    def _scaled(self, part: Part) -> Part:
        return OperatorPart(part.rows, lambda v: part.forward(v * self.factor), lambda u: part.back(u) * self.factor)


def error_sizes(prior: Tensor, rhs: Tensor, tolerance: float) -> Tensor:
    """What the residuals of samples are relative to, (K,): the prior's part of the right-hand sides, both (K, P).

    But no residual is asked for that float64 does not have.
    """
    return torch.maximum(prior.norm(dim=1), LEAST / tolerance * rhs.norm(dim=1))


def _weights(count: int, shift: float, basis: BlockKrylov) -> Tensor:
    """The right-hand sides √shift z + Xᵀε as combinations of the start block [z_1.., Xᵀε_1..]."""
    eye = torch.eye(count, dtype=torch.float64, device=basis.start.device)
    return torch.cat([shift**0.5 * eye, eye], 1)


def deflating(basis: BlockKrylov, shift: float) -> Product:
    """A symmetric root of an inverse of A + shift, times the shift: right on the Ritz vectors of the basis."""
    ratios = (shift / (basis.values.clamp_min(0) + shift)).sqrt() - 1
    inner = (basis.turn * ratios) @ basis.turn.mT
    return lambda v: v + basis.rows.combined(basis.rows.coordinates(v) @ inner)


def _away(basis: BlockKrylov, turn: Tensor) -> Product:
    """Off the combinations of the basis with coefficients ``turn`` (d, r), which are not formed."""
    inner = turn @ turn.mT
    return lambda v: v - basis.rows.combined(basis.rows.coordinates(v) @ inner)
