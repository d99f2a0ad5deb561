"""The Laplace approximation of a density that is given as a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import DataError, NumericalError
from lapwing.linalg.dense import cholesky
from lapwing.runtime.settings import integer
from lapwing.runtime.threads import normal

LogDensity = Callable[[Tensor], Tensor | float]

HALVINGS = 100  # of a step before the search fails; the first step from a flat tail may be 1e20 times too long
ROUNDING = 1e-11  # a decrease of the log density by this share may be rounding
DEFINITE = 1e-12  # eigenvalues below this share of the largest count as zero, with coordinates scaled
CONVERGED = 0.1  # largest relative change of the curvature in the last, tiny step


@dataclass(frozen=True, eq=False)
class DensityLaplace:
    """The Gaussian N(mean, precision⁻¹) that approximates a density over R^D, in float64; see ``laplace_density``."""

    mean: Tensor  # the mode, (D,)
    precision: Tensor  # minus the Hessian of the log density there, (D, D)
    log_normaliser: Tensor  # log ∫ exp(log_density), by Laplace, ()

    @cached_property
    def _root(self) -> Tensor:
        return cholesky(self.precision, "the density")

    @cached_property
    def covariance(self) -> Tensor:
        """The covariance, (D, D)."""
        return torch.cholesky_inverse(self._root)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log N(x; mean, covariance), (...,) for x (..., D)."""
        size = len(self.mean)
        if x.ndim == 0 or x.shape[-1] != size:
            raise DataError(f"x has the shape {tuple(x.shape)}; expected (..., {size}), coordinates last.")
        whitened = (x.to(self.mean) - self.mean) @ self._root
        return _log_determinant(self._root) - 0.5 * (size * math.log(2 * math.pi) + whitened.square().sum(-1))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n samples, (n, D)."""
        integer().check("n", n)
        eps = normal((n, len(self.mean)), generator, self.mean)
        return self.mean + torch.linalg.solve_triangular(self._root.mT, eps.mT, upper=True).mT


def laplace_density(
    log_density: LogDensity, start: Tensor | Sequence[float], *, max_steps: int = 100, tolerance: float = 1e-8
) -> DensityLaplace:
    r"""Return the Gaussian at the mode of a density with the curvature of the density there, and its integral.

    $$ \Lambda = -\nabla^2 \log p(x^*), \qquad
       \log \int p \approx \log p(x^*) + \tfrac{D}{2} \log 2\pi - \tfrac12 \log\det\Lambda $$

    ``log_density`` maps a (D,) tensor to a number, by operations that autograd differentiates twice; it need not be
    normalised and may be -inf outside of its domain. Newton steps with a line search go from ``start`` to the mode, in
    float64, until the next step is shorter than ``tolerance`` standard deviations. If there are several modes, the
    result is at one of them, near ``start``.

    Shapes: mean (D,), covariance (D, D).  Cost: D + 1 backward passes and an eigendecomposition for each step.
    Exact when: the density is Gaussian.
    Reference: MacKay 2003, "Information theory, inference, and learning algorithms", chapter 27.

    An example is a Gamma density of shape 3 in the logarithm of its variable. Its integral is 2, and Laplace gives
    Stirling's formula:

    >>> laplace = laplace_density(lambda u: (3 * u - u.exp()).sum(), torch.zeros(1))
    >>> round(laplace.mean.exp().item(), 9), round(laplace.covariance.item(), 9)
    (3.0, 0.333333333)
    >>> round(laplace.log_normaliser.exp().item(), 3)
    1.945
    """
    at = _expanded(log_density, _checked_start(start))
    for step in range(max_steps):
        direction, distance = _newton(at)
        if distance <= tolerance:
            return _confirmed(log_density, at, direction)
        higher = _uphill(log_density, at, direction)
        if higher is None:
            raise NumericalError(_no_mode(at, step))
        at = _expanded(log_density, higher)
    raise NumericalError(_no_mode(at, max_steps))


@dataclass(frozen=True, eq=False)
class _Expansion:
    """The log density around a point, to second order."""

    x: Tensor
    value: float
    gradient: Tensor
    precision: Tensor  # minus the Hessian


def _checked_start(given: Tensor | Sequence[float]) -> Tensor:
    start = torch.as_tensor(given, dtype=torch.float64).detach()
    if start.ndim != 1 or len(start) == 0:
        raise DataError(f"the start has the shape {tuple(start.shape)}; expected (D,), one point of D coordinates.")
    if not bool(torch.isfinite(start).all()):
        raise DataError(f"the start is {_listed(start)}; expected finite numbers.")
    return start


def _expanded(log_density: LogDensity, x: Tensor) -> _Expansion:
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        value = _number(log_density(x))
        _refuse_unusable(value, x)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        hessian = torch.stack([_slope(entry, x) for entry in gradient])
    gradient = gradient.detach()
    if not bool(torch.isfinite(gradient).all() & torch.isfinite(hessian).all()):
        raise NumericalError(
            f"the log density is {value.item():.6g} at {_listed(x)}, but its derivatives there are not finite; "
            "expected a density that is smooth inside its domain. Use other coordinates, or another start."
        )
    return _Expansion(x.detach(), value.item(), gradient, -0.5 * (hessian + hessian.mT))


def _slope(entry: Tensor, x: Tensor) -> Tensor:
    """Return the derivative of one entry of the gradient; zero if the entry is constant."""
    if not entry.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(entry, x, retain_graph=True, materialize_grads=True)[0].detach()


def _number(value: Tensor | float) -> Tensor:
    if isinstance(value, float):  # -inf, outside of the domain
        return torch.tensor(value, dtype=torch.float64)
    if not isinstance(value, Tensor) or value.numel() != 1:
        seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise DataError(f"the log density of one point is {seen}; expected a tensor with one number.")
    return value.reshape(())


def _refuse_unusable(value: Tensor, x: Tensor) -> None:
    if not math.isfinite(value.item()):
        raise DataError(
            f"the log density is {value.item()} at {_listed(x)}; expected a finite number. "
            "Start where the density is positive."
        )
    if not value.requires_grad:
        raise DataError(
            "the log density does not depend on its argument through autograd; expected operations of torch on the "
            "tensor that it is given, without detach, item or numpy."
        )
    if value.dtype != torch.float64:
        raise DataError(f"the log density is {value.dtype}; expected torch.float64, as the tensor that it is given.")


def _newton(at: _Expansion) -> tuple[Tensor, float]:
    """Return a step uphill, and its length in standard deviations.

    Where the Hessian is negative definite it is Newton's step. Elsewhere the absolute eigenvalues are used, so that the
    step leaves saddle points. Coordinates are scaled first, so that their units do not matter.
    """
    scale, scaled = _scaled(at.precision)
    values, vectors = torch.linalg.eigh(scaled)
    largest = values.abs().max().item()
    sizes = values.abs().clamp_min(1e-8 * largest if largest > 0 else 1.0)
    along = (at.gradient / scale) @ vectors
    return (along / sizes) @ vectors.mT / scale, (along.square() / sizes).sum().sqrt().item()


def _scaled(precision: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square roots of the diagonal, and the matrix scaled to a diagonal of ±1."""
    scale = precision.diagonal().abs().sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return scale, precision / scale.outer(scale)


def _uphill(log_density: LogDensity, at: _Expansion, direction: Tensor) -> Tensor | None:
    """Return the point after the longest of the halved steps that increases the density enough, or None."""
    slope = (at.gradient @ direction).item()
    rounding = ROUNDING * (1 + abs(at.value))
    for halving in range(HALVINGS):
        share = 0.5**halving
        x = at.x + share * direction
        with torch.no_grad():
            value = _number(log_density(x)).item()
        if math.isfinite(value) and value >= at.value + 1e-4 * share * slope - rounding:
            return x
    return None


def _confirmed(log_density: LogDensity, at: _Expansion, direction: Tensor) -> DensityLaplace:
    """Take one last, tiny step. Raise unless the curvature is the same before and after it, as at a proper mode."""
    _refuse_indefinite(at)
    last = _expanded(log_density, at.x + direction)
    _refuse_indefinite(last)
    root = cholesky(at.precision, "the density")
    half = torch.linalg.solve_triangular(root, last.precision, upper=False)
    ratios = torch.linalg.eigvalsh(torch.linalg.solve_triangular(root, half.mT, upper=False))
    if bool(((ratios - 1).abs() > CONVERGED).any()):
        raise NumericalError(_not_definite(last, "and still changes with every step"))
    logdet = 2 * _log_determinant(cholesky(last.precision, "the density"))
    normaliser = last.value + 0.5 * (len(last.x) * math.log(2 * math.pi) - logdet)
    return DensityLaplace(last.x, last.precision, normaliser)


def _refuse_indefinite(at: _Expansion) -> None:
    values = torch.linalg.eigvalsh(_scaled(at.precision)[1])
    if values[0] <= DEFINITE * values.abs().max():
        raise NumericalError(_not_definite(at, "where the gradient vanishes"))


def _log_determinant(root: Tensor) -> Tensor:
    """Return ½ log det of the matrix with this Cholesky factor."""
    return root.diagonal().log().sum()


def _not_definite(at: _Expansion, when: str) -> str:
    smallest = torch.linalg.eigvalsh(at.precision)[0].item() + 0.0  # no -0
    return (
        "minus the Hessian of the log density is not positive definite at the mode: its smallest eigenvalue is "
        f"{smallest:.3g} at {_listed(at.x)}, {when}; expected above zero. The point is a saddle or a minimum, or the "
        "density is flat there. Start elsewhere, or use coordinates in which the density has a curved peak."
    )


def _no_mode(at: _Expansion, steps: int) -> str:
    return (
        f"no mode was reached: after {steps} steps the log density is {at.value:.6g} and its gradient has the length "
        f"{at.gradient.norm().item():.3g} at {_listed(at.x)}; expected a gradient near zero. The density may have its "
        "maximum at a boundary or a kink, or none at all. Use other coordinates, start nearer, or raise max_steps."
    )


def _listed(x: Tensor) -> str:
    text = ", ".join(f"{value:.4g}" for value in x[:6].tolist())
    return f"({text}{', …' if len(x) > 6 else ''})"
