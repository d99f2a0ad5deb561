"""Bayesian ridge regression through products with the design: samples and log-determinant for any precision.

A design X (rows, P) with unit noise and the prior N(0, (α D)⁻¹), D a fixed diagonal, gives the posterior precision
XᵀX / φ + α D. In coordinates √D θ that is a Gram matrix plus αφ times the identity, divided by φ. One Krylov basis of
the Gram matrix serves every α and φ.

A ``WhitenedDesign`` is a design in coordinates where the prior of the weights and the noise of the rows are independent
and of unit size. For weights w = S u with S Sᵀ = A⁻¹ and rows with noise covariances B_i = L_i L_iᵀ, the regression y_i
= X_i w + noise is L_i⁻¹ y_i = L_i⁻¹ X_i S u + white noise, with a white prior for u.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lapwing.data.inputs import check_finite, refuse_meta
from lapwing.errors import DataError, NumericalError
from lapwing.linalg import krylov
from lapwing.linalg.operators import (
    DerivedDesign,
    Design,
    DesignRows,
    MatrixDesign,
    OperatorDesign,
    OperatorPart,
    ScaledDesign,
    Solution,
    back_product,
    gram_product,
)
from lapwing.linalg.stochastic import Perturbed
from lapwing.runtime.settings import describe, describe_kind, integer, is_real
from lapwing.runtime.threads import derived_generator, normal, uniform

WIDE = (torch.float32, torch.float64)


def feature_design(features: Tensor | OperatorDesign) -> Design:
    """Return the design of features without gradients; a matrix in half precision becomes float32."""
    if isinstance(features, Tensor):
        return matrix_design(features)
    if not isinstance(features, OperatorDesign):
        raise DataError(f"features are {describe_kind(features)}; expected a tensor or an OperatorDesign.")
    return operator_design(features)


def matrix_design(features: Tensor) -> MatrixDesign:
    """Return the design of a matrix without gradients; one in half precision becomes float32."""
    x = check_features(features.detach())
    return MatrixDesign(x if x.dtype in WIDE else x.float())


def operator_design(features: OperatorDesign) -> OperatorDesign:
    """Return the design with products that are checked and require no gradients."""
    if features.like.dtype not in WIDE:
        raise DataError(
            f"the functions of an OperatorDesign take {features.like.dtype}; expected float32 or float64. Compute in "
            "one of them, and give a like=... of it."
        )
    return replace(features, forward=_detach(features.forward), back=_detach(features.back))


def check_features(x: Tensor, columns: int | None = None) -> Tensor:
    """Return the features (rows, columns); raise unless they are a finite floating-point matrix of that width."""
    if not isinstance(x, Tensor):
        raise DataError(f"features are {describe_kind(x)}; expected a tensor (rows, {columns or 'columns'}).")
    if x.ndim != 2 or x.numel() == 0 or x.shape[1] != (columns or x.shape[1]):
        raise DataError(f"features have the shape {tuple(x.shape)}; expected (rows, {columns or 'columns'}).")
    if not x.dtype.is_floating_point:
        raise DataError(f"features are {x.dtype}; expected floating-point numbers.")
    check_finite(x.detach(), "features")
    return x


def check_targets(targets: Tensor, design: Design) -> Tensor:
    """Return the targets (rows,) in float64 on the design's device; raise unless there is one number for each row."""
    if not isinstance(targets, Tensor):
        raise DataError(f"targets are {describe_kind(targets)}; expected a tensor ({design.rows},).")
    if targets.is_complex():
        raise DataError(f"targets are {targets.dtype}; expected real numbers.")
    refuse_meta(targets)
    y = targets.detach().reshape(-1).double().to(design.like.device)
    if len(y) != design.rows or targets.shape[:1] != (design.rows,):
        raise DataError(
            f"{design.rows} rows of features and targets {tuple(targets.shape)}; expected ({design.rows},)."
        )
    if not bool(torch.isfinite(y).all()):
        raise DataError("targets hold NaN or infinity; expected finite numbers.")
    return y


def check_settings(precision: float | None, noise_std: float | None, num_samples: int, tolerance: float) -> None:
    """Raise unless these settings of a linear model are valid."""
    for name, value in (("precision", precision), ("noise_std", noise_std)):
        if value is not None and not (is_real(value) and 0 < value < math.inf):
            raise DataError(f"{name} is {value!r:.80}; expected a positive number, or None to learn it.")
    integer().check("num_samples", num_samples)
    if not (is_real(tolerance) and 0 < tolerance < 1):
        raise DataError(f"tolerance is {tolerance!r:.80}; expected a relative residual between 0 and 1.")


def _detach(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function with results that are checked to be real tensors and require no gradients."""

    def apply(v: Tensor) -> Tensor:
        image = function(v)
        if not isinstance(image, Tensor) or image.is_complex():
            given = describe_kind(image)
            raise DataError(f"a function of an OperatorDesign gave {given}; expected a tensor of real numbers.")
        return image.detach()

    return apply


def refuse_unpaired(design: OperatorDesign, tolerance: float = 1e-4) -> None:
    """Raise unless u·Xv = v·Xᵀu for random vectors, and a second call of either product equals the first.

    The second call gets its rows in reverse order, so that a product which mixes them is refused as well.
    """
    like, gen = torch.empty(0, dtype=torch.float64, device=design.like.device), torch.Generator().manual_seed(0)
    (part,) = design
    v, u = normal((2, design.size), gen, like), normal((2, design.rows), gen, like)
    forward = _check_twice(part.forward, v, design.rows, "forward", tolerance)
    back = _check_twice(part.back, u, design.size, "back", tolerance)
    gap, scale = float(((u * forward).sum(1) - (v * back).sum(1)).norm()), float(forward.norm() + back.norm())
    if gap > tolerance * scale:
        raise NumericalError(
            f"back is not the transpose of forward: u·Xv and v·Xᵀu differ by {gap / scale:.3g} of their size; expected "
            f"{tolerance:g}. Check the two functions of the OperatorDesign."
        )


def _check_twice(product: Callable[[Tensor], Tensor], rows: Tensor, width: int, name: str, tolerance: float) -> Tensor:
    """Return the product in float64; raise if its shape is wrong, it is not finite, or a second call differs."""
    try:
        first = product(rows)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{name} of an operator raises {type(error).__name__}: {error}. Expected it to map rows "
            f"{tuple(rows.shape)} to ({len(rows)}, {width}), for any number of rows."
        ) from error
    if not isinstance(first, Tensor):
        raise DataError(
            f"{name} of an operator returned {describe_kind(first)}; expected a tensor ({len(rows)}, {width})."
        )
    if first.shape != (len(rows), width):
        raise DataError(
            f"{name} of an OperatorDesign made {tuple(first.shape)} of rows {tuple(rows.shape)}; expected "
            f"({len(rows)}, {width}): vectors are rows."
        )
    if not bool(torch.isfinite(first).all()):
        raise NumericalError(f"{name} of an OperatorDesign gave NaN or infinity; expected finite numbers.")
    gap, scale = float((first - product(rows.flip(0)).flip(0)).norm()), float(first.norm())
    if gap > tolerance * scale:
        raise NumericalError(
            f"two calls of {name} of an OperatorDesign with the same rows differ by {gap / scale:.3g} of their size; "
            f"expected {tolerance:g}: the same matrix at every call, and rows that do not depend on each other."
        )
    return first.double()


@dataclass(frozen=True, eq=False)
class NoiseRoot:
    """Roots L_i of the relative noise covariances of n data: standard deviations (n, C), or factors (n, C, C)."""

    factor: Tensor

    def whiten(self, rows: Tensor, data: slice) -> Tensor:
        """Return L_i⁻¹ times the rows (k, m C) of some of the data."""
        return self._solve(rows, self.factor[data], upper=False)

    def whiten_transposed(self, rows: Tensor, data: slice) -> Tensor:
        """Return L_i⁻ᵀ times the rows (k, m C) of some of the data."""
        some = self.factor[data]
        return self._solve(rows, some if some.ndim == 2 else some.mT, upper=True)

    def _solve(self, rows: Tensor, factor: Tensor, upper: bool) -> Tensor:
        blocks = rows.double().reshape(len(rows), *factor.shape[:2])
        if factor.ndim == 2:
            return (blocks / factor).flatten(1)
        columns = torch.linalg.solve_triangular(factor, blocks.permute(1, 2, 0), upper=upper)
        return columns.permute(2, 0, 1).flatten(1)

    @property
    def logdet(self) -> float:
        """Σ_i log det B_i."""
        pivots = self.factor if self.factor.ndim == 2 else self.factor.diagonal(dim1=-2, dim2=-1)
        return 2 * float(pivots.log().sum())


@dataclass(frozen=True, eq=False)
class WhitenedDesign(DerivedDesign):
    """The design L⁻¹ X S. Every part of X has all C rows of each of its data."""

    prior: OperatorDesign | None  # S
    noise: NoiseRoot | None
    outputs: int = 1  # C

    @property
    def size(self) -> int:
        return self.design.size if self.prior is None else self.prior.size

    def derive(self, part: DesignRows, rows: slice) -> DesignRows:
        prior, noise = self.prior, self.noise
        data = slice(rows.start // self.outputs, rows.stop // self.outputs)

        def forward(v: Tensor) -> Tensor:
            outputs = part.forward(v if prior is None else prior.forward(v.to(prior.like)))
            return outputs if noise is None else noise.whiten(outputs, data)

        def back(u: Tensor) -> Tensor:
            weights = part.back(u if noise is None else noise.whiten_transposed(u, data))
            return weights if prior is None else prior.back(weights.to(prior.like))

        return OperatorPart(part.rows, forward, back)


@dataclass(frozen=True, eq=False)
class SharedDesign(DerivedDesign):
    """The design of C outputs with the same features X (n, P) and weights (C, P) of their own.

    Rows are data by outputs, (n, C); columns are outputs by features, (C, P).

    >>> from lapwing.linalg.operators import MatrixDesign, forward_product
    >>> design = SharedDesign(MatrixDesign(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])), outputs=2)
    >>> forward_product(design, torch.tensor([[1.0, 0.0, 0.0, 1.0]])).reshape(3, 2)
    tensor([[1., 2.],
            [3., 4.],
            [5., 6.]], dtype=torch.float64)
    """

    outputs: int

    @property
    def size(self) -> int:
        return self.outputs * self.design.size

    @property
    def rows(self) -> int:
        return self.outputs * self.design.rows

    def derive(self, part: DesignRows, rows: slice) -> DesignRows:
        def forward(v: Tensor) -> Tensor:
            images = part.forward(v.reshape(len(v) * self.outputs, self.design.size))
            return images.reshape(len(v), self.outputs, part.rows).mT.flatten(1)

        def back(u: Tensor) -> Tensor:
            columns = u.reshape(len(u), part.rows, self.outputs).mT.flatten(0, 1)
            return part.back(columns).reshape(len(u), self.size)

        return OperatorPart(self.outputs * part.rows, forward, back)


def prior_root(prior: Tensor | OperatorDesign, size: int, device: torch.device) -> OperatorDesign:
    """Return S with S Sᵀ = A⁻¹ for the prior precision A of ``size`` weights: (P,), (P, P), or S itself.

    Raises:
        DataError: the shape is another one, or A is not symmetric and positive definite.
        NumericalError: the two functions of an ``OperatorDesign`` are not transposes of each other.
    """
    like = torch.empty(0, dtype=torch.float64, device=device)
    if isinstance(prior, OperatorDesign):
        if prior.rows != size:
            raise DataError(f"prior is an OperatorDesign with {prior.rows} rows; expected {size}, one for each weight.")
        root = operator_design(prior)
        refuse_unpaired(root)
        return root
    a = _require_positive(prior, "prior", (f"({size},)", f"({size}, {size})"), ((size,), (size, size))).to(like)
    if a.ndim == 1:
        deviations = a.rsqrt()
        scale = lambda v: v * deviations
        return OperatorDesign(size, size, scale, scale, like)
    factor = _cholesky(a, "prior")
    return OperatorDesign(
        size,
        size,
        lambda v: torch.linalg.solve_triangular(factor, v, upper=False, left=False),  # v L⁻¹: rows of L⁻ᵀ v
        lambda u: torch.linalg.solve_triangular(factor.mT, u, upper=True, left=False),
        like,
    )


def noise_root(noise: Tensor, data: int, outputs: int, device: torch.device) -> NoiseRoot:
    """Return the roots of relative noise covariances: variances (n,) or (n, C), or matrices (n, C, C).

    Raises:
        DataError: the shape is another one, or a covariance is not symmetric and positive definite.
    """
    shapes = ((data,), (data, outputs), (data, outputs, outputs))
    b = _require_positive(noise, "noise", tuple(map(str, shapes)), shapes)
    b = b.to(device=device, dtype=torch.float64)
    if b.ndim == 3:
        return NoiseRoot(_cholesky(b, "noise"))
    return NoiseRoot((b[:, None] if b.ndim == 1 else b).sqrt().expand(data, outputs))


def relative_variances(noise: Tensor, outputs: Tensor) -> Tensor:
    """Return relative noise variances (B,) or (B, C) in the shape of the outputs (B, C); raise for others."""
    if isinstance(noise, Tensor) and noise.ndim > 2:
        raise DataError(
            f"noise has the shape {tuple(noise.shape)}; expected variances {tuple(outputs.shape[:1])} or "
            f"{tuple(outputs.shape)}. Add covariances to those of functions(features)."
        )
    return noise_root(noise, outputs.shape[0], outputs.shape[1], outputs.device).factor.square()


def _require_positive(value: Tensor, name: str, words: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return the tensor without gradients; raise unless it has one of the shapes and finite, positive entries.

    Off-diagonal entries of matrices may have either sign.
    """
    expected = f"expected a tensor of positive numbers {', '.join(words[:-1])} or of matrices {words[-1]}"
    if not isinstance(value, Tensor) or value.is_complex() or value.dtype == torch.bool:
        raise DataError(f"{name} is {describe(value)}; {expected}.")
    if tuple(value.shape) not in shapes:
        raise DataError(f"{name} has the shape {tuple(value.shape)}; {expected}.")
    value = value.detach()
    matrices = tuple(value.shape) == shapes[-1]
    positive = value.diagonal(dim1=-2, dim2=-1) if matrices else value
    if not bool(torch.isfinite(value).all()) or not bool((positive > 0).all()):
        least = f"the smallest variance or precision is {float(positive.min()):.3g}"
        raise DataError(f"{name} has entries that are not finite or not positive ({least}); {expected}.")
    return value


def _cholesky(matrix: Tensor, name: str) -> Tensor:
    """Return the lower Cholesky factor of symmetric matrices; raise unless they are symmetric and positive definite."""
    gap = float(((matrix - matrix.mT).abs().amax((-2, -1)) / matrix.abs().amax((-2, -1))).max())
    if gap > 1e-6:  # rounding of a matrix that was computed in float32
        raise DataError(
            f"{name} is not symmetric: entries differ from those of the transpose by {gap:.2g} of the largest; "
            "expected a symmetric matrix. Give (M + M.mT) / 2 if the difference is rounding."
        )
    factor, info = torch.linalg.cholesky_ex((matrix + matrix.mT) / 2)
    if bool((info != 0).any()):
        raise DataError(
            f"{name} is not positive definite; expected a matrix with positive eigenvalues. Add a small multiple of "
            "the identity if they are zero by rounding."
        )
    return factor


Layout = Literal["scalar", "shared", "stacked"]


@dataclass(frozen=True, eq=False)
class Frame:
    """The relation of white weights u and rows of a regression to the weights w, features and targets of the user.

    Args:
        layout: "scalar" for features (n, P) and targets (n,); "shared" for features (n, P), targets (n, C) and weights
            (C, P); "stacked" for features (n, C, P) and targets (n, C).
        outputs: the number C of targets of a datum.
        prior: S (P, q) with w = S u, for each output if the layout is "shared"; None for the identity.
        noise_logdet: Σ_i log det B_i of the relative noise covariances.
    """

    layout: Layout = "scalar"
    outputs: int = 1
    prior: OperatorDesign | None = None
    noise_logdet: float = 0.0

    def weights(self, rows: Tensor) -> Tensor:
        """Return w (K, P), or (K, C, P) if the layout is "shared", for white weights u (K, size)."""
        if self.layout == "shared":
            rows = rows.reshape(len(rows), self.outputs, -1)
        if self.prior is None:
            return rows
        flat = self.prior.forward(rows.flatten(0, -2).to(self.prior.like)).to(rows)
        return flat.reshape(*rows.shape[:-1], -1)

    def functions(self, features: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs (B, C, K) of every row of weights, for features in this layout."""
        if self.layout == "shared":
            return torch.einsum("bp,kcp->bck", features, weights)
        outputs = features @ weights.mT
        return outputs if self.layout == "stacked" else outputs[:, None]

    def check_features(self, features: Tensor, columns: int) -> Tensor:
        """Return features for predictions; raise unless they are finite numbers (B, P), or (B, C, P) if stacked."""
        if self.layout != "stacked" or not isinstance(features, Tensor):
            return check_features(features, columns)
        if features.ndim != 3 or features.shape[1] != self.outputs:
            raise DataError(
                f"features have the shape {tuple(features.shape)}; expected (rows, {self.outputs}, {columns})."
            )
        return check_features(features.flatten(0, 1), columns).reshape(features.shape)


@dataclass(frozen=True, eq=False)
class Regression:
    """A regression with white prior and noise: the design (n C, size), targets (n C,), and where they came from."""

    design: Design
    y: Tensor
    frame: Frame

    @classmethod
    def build(
        cls,
        features: Tensor | OperatorDesign,
        targets: Tensor,
        prior: Tensor | OperatorDesign | None,
        noise: Tensor | None,
    ) -> Regression:
        """Check features, targets, prior and noise, and whiten them."""
        design: Design
        if isinstance(features, Tensor) and features.ndim == 3:
            design, frame = _stack(features, targets), Frame("stacked", features.shape[1])
        else:
            design = feature_design(features)
            frame = _frame(design, targets)
        shared, outputs, device = frame.layout == "shared", frame.outputs, design.like.device
        y = check_targets(
            targets.flatten() if outputs > 1 else targets, SharedDesign(design, outputs) if shared else design
        )
        if isinstance(design, OperatorDesign):
            refuse_unpaired(design)
        if prior is not None:
            frame = replace(frame, prior=prior_root(prior, design.size, device))
            design = WhitenedDesign(design, frame.prior, None)
        if shared:
            design = SharedDesign(design, outputs)
        if noise is not None:
            root = noise_root(noise, len(y) // outputs, outputs, device)
            frame, y = replace(frame, noise_logdet=root.logdet), root.whiten(y[None], slice(None))[0]
            design = WhitenedDesign(design, None, root, outputs)
        return cls(design, y, frame)


def _frame(design: Design, targets: Tensor) -> Frame:
    """Return the layout for a matrix or an operator: by the number of its rows, if a datum has several targets."""
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.shape[1] < 2:
        return Frame()
    data, outputs = targets.shape
    if design.rows == data:
        return Frame("shared", outputs)
    if isinstance(design, OperatorDesign) and data > 1 and design.rows == data * outputs:
        return Frame("stacked", outputs)
    raise DataError(
        f"{design.rows} rows of features and targets {(data, outputs)}; expected ({design.rows},), or "
        f"({design.rows}, C) for C outputs with the same features. If each has its own, a tensor has the shape "
        f"({data}, {outputs}, P) and an OperatorDesign {data * outputs} rows."
    )


def _stack(features: Tensor, targets: Tensor) -> MatrixDesign:
    """Return the design of features (n, C, P), in parts that hold all rows of a datum."""
    if not isinstance(targets, Tensor) or targets.shape != features.shape[:2]:
        raise DataError(
            f"features have the shape {tuple(features.shape)} and targets are {describe_kind(targets)}; expected "
            "targets "
            f"{tuple(features.shape[:2])}, or features (rows, columns)."
        )
    if 0 in features.shape:
        raise DataError(f"features have the shape {tuple(features.shape)}; expected at least one of each dimension.")
    design = matrix_design(features.flatten(0, 1))
    return replace(design, part=features.shape[1] * max(1, design.part // features.shape[1]))


OUTSIDE_TOLERANCE = 1e-5  # relative part of a row outside the basis that counts as rounding, in single precision
FIRST_PRODUCTS = 4  # products that a basis starts with
LEADING_VECTORS = 256  # eigenvectors that stochastic descent leaves out
LEADING_TURNS = 3  # products that find them
LOOK_EVERY = 2  # products between two looks at the residual of its solves
log = logging.getLogger(__name__)


@dataclass(eq=False)
class RidgeCache:
    """Computed facts about the Gram matrix of one ``Ridge``; mutable, and never shared between ridges.

    They depend only on the fields of that ridge: a Krylov basis, which grows when a solve needs it to, the estimated
    spectra by number of probes and steps, and the last ridge that was returned for another scale.
    """

    basis: krylov.BlockKrylov | None = None
    spectra: dict[tuple[int, int], krylov.DeflatedSpectrum] = field(default_factory=dict)
    rescaled: Ridge | None = None


@dataclass(frozen=True, eq=False)
class Ridge:
    """A ridge regression and the noise of K posterior samples, the same noise for every precision.

    Args:
        design: the matrix X (rows, P).
        scale: the diagonal D (P,) of the prior precision; None for the identity.
        prior: standard normal noise ζ (K, P).
        back: Xᵀ ε (K, P) for standard normal ε.
        seed: draws the probes of log-determinants.
        width: the largest number of rows in a block of the basis.
        bytes: the most memory that the basis may take.
        eps: ε (K, rows) itself, which stochastic descent needs.
    """

    design: Design
    scale: Tensor | None
    prior: Tensor
    back: Tensor
    seed: int = 0
    width: int = 16
    bytes: int = 4 * 2**30
    eps: Tensor | None = None

    @classmethod
    def draw(
        cls,
        design: Design,
        samples: int,
        generator: torch.Generator | None,
        scale: Tensor | None = None,
        keep: bool = False,
        **settings: Any,
    ) -> Ridge:
        """Return a ridge with noise from the generator; ``keep`` keeps ε. Cost: one pass over the design."""
        like = torch.empty(0, dtype=torch.float64, device=design.like.device)
        # Independent of features drawn from the same seed, which would equal the noise otherwise.
        generator = derived_generator(generator, like)
        prior = normal((samples, design.size), generator, like)
        eps = normal((samples, design.rows), generator, like)
        # Independent of the noise: the basis starts from the noise, and probes must not be correlated with it.
        settings.setdefault("seed", int(uniform((1,), generator, like) * 2**53))
        return cls(design, scale, prior, back_product(design, eps), eps=eps if keep else None, **settings)

    @cached_property
    def cache(self) -> RidgeCache:
        """The cache of this ridge. ``dataclasses.replace`` makes a ridge with an empty one."""
        return RidgeCache()

    @property
    def float64_hint(self) -> str:
        """The end of an error's advice: to compute in float64, unless the products already are."""
        return "" if self.design.like.dtype == torch.float64 else ", or compute in float64"

    def product(self, v: Tensor) -> Tensor:
        """Return D^-½ XᵀX D^-½ v."""
        return self._divide_by_root(gram_product(self.design, self._divide_by_root(v)))

    def samples(self, alpha: float, phi: float, tolerance: float, start: Tensor | None = None) -> Solution:
        """Solve for K draws from N(0, Λ⁻¹), Λ = XᵀX / φ + α D, from the same noise for every α and φ.

        The first draws come from the basis, which grows until it contains them. The others are solved for by conjugate
        gradients with the basis as preconditioner, from ``start`` (K, P) if samples nearby are known. Residuals are
        relative to the prior's part of the right-hand side, √shift |ζ|. The error e of a draw then has
        eᵀ Λ e ≤ (tolerance |ζ|)²: in the mean over all directions it is ``tolerance`` standard deviations. A residual
        relative to the whole right-hand side, which the data may dominate, would not imply that.

        Raises:
            NumericalError: a draw does not reach the tolerance.
        """
        shift = alpha * phi
        basis = self.basis_reaching(shift, tolerance)
        first = self._first_samples(basis, shift, tolerance)
        done = self._n_first if first.converged else 0
        rows, residuals, iterations = [first.x[:done]], [first.residuals[:done]], basis.products
        if done < len(self.prior):
            near = None if start is None else start[done:].double() * self._root / phi**0.5
            rhs, apply = self._rhs(shift, slice(done, None)), lambda v: self.product(v) + shift * v
            noise = shift**0.5 * self.prior[done:]
            rest = krylov.solve_samples(
                apply, rhs, noise, tolerance, self.float64_hint, near, basis.inverse_root(shift)
            )
            rows, residuals, iterations = [*rows, rest.x], [*residuals, rest.residuals], iterations + rest.iterations
        solved = self._divide_by_root(torch.cat(rows) * phi**0.5)
        return Solution(solved, torch.cat(residuals), iterations, tolerance)

    def descend(
        self, alpha: float, phi: float, descend: Callable[[Perturbed, krylov.RandomisedEigenpairs], Solution]
    ) -> Solution:
        """Solve for the draws of ``samples`` by stochastic descent, beside the leading eigenvectors."""
        if self.eps is None:
            raise ValueError("descent needs ε itself; expected Ridge.draw(..., keep=True).")
        design = self.design if self.scale is None else ScaledDesign(self.design, self.scale.rsqrt())
        solution = descend(Perturbed(design, self.prior, self.eps, alpha * phi), self.leading)
        return replace(solution, x=self._divide_by_root(solution.x * phi**0.5))

    @cached_property
    def leading(self) -> krylov.RandomisedEigenpairs:
        """Leading eigenpairs of the Gram matrix: ``LEADING_VECTORS``, or as many as fit into a third of ``bytes``."""
        rank = max(1, min(LEADING_VECTORS, self.bytes // (24 * self.design.size)))
        generator = torch.Generator().manual_seed(self.seed)
        return krylov.randomised_eigenpairs(
            self.product, self.design.size, rank, generator, self.prior.device, LEADING_TURNS
        )

    def rescale(self, scale: Tensor) -> Ridge:
        """Return a ridge with the same noise and another D (P,); the last one is cached."""
        last = self.cache.rescaled
        if last is None or last.scale is None or not torch.equal(last.scale, scale):
            self.cache.rescaled = last = replace(self, scale=scale)
        return last

    def gram(self, rows: Tensor) -> Tensor:
        """Return XᵀX θ for every row (n, P): from the basis for rows inside it, as samples are; else by a pass."""
        basis = self.cache.basis
        if basis is None:
            return gram_product(self.design, rows)
        scaled = rows.double() * self._root
        images, outside = basis.image(scaled)
        images = images * self._root
        beyond = outside > OUTSIDE_TOLERANCE * scaled.norm(dim=1)
        if bool(beyond.any()):
            images[beyond] = gram_product(self.design, rows[beyond])
        return images

    @property
    def basis(self) -> krylov.BlockKrylov:
        """The Krylov basis of the Gram matrix, as large as solves have needed so far."""
        basis = self.cache.basis
        if basis is None:
            start = torch.cat([self.prior[: self._n_first], self._divide_by_root(self.back)[: self._n_first]])
            rounding = 10 * float(torch.finfo(self.design.like.dtype).eps)
            basis = krylov.block_krylov(
                self.product, start, FIRST_PRODUCTS, tolerance=rounding, max_basis=self._max_basis
            )
            self.cache.basis = basis
        return basis

    def basis_reaching(self, shift: float, tolerance: float) -> krylov.BlockKrylov:
        """Return the basis, grown until it solves for the first samples at this shift or may not grow any more."""
        basis = self.basis
        while not basis.exhausted and len(basis.rows) + len(basis.ahead) <= self._max_basis:
            solution = self._first_samples(basis, shift, tolerance)
            log.info("residual %.3g at shift %.3g, from a basis of %d rows after %d products",
                     float(solution.residuals.max()), shift, len(basis.rows), basis.products)  # fmt: skip
            if solution.converged:
                break
            self.cache.basis = basis = basis.extend(self.product, LOOK_EVERY, max_basis=self._max_basis)
        return basis

    def logdet(self, shift: Tensor, probes: int, steps: int) -> krylov.Logdet:
        """Estimate log det(I + A/shift) for A = D^-½ XᵀX D^-½, differentiable in the shift.

        Eigenvalues that the basis contains are exact; the rest is estimated. Cost: that of ``spectrum``, once for all
        shifts.
        """
        return self.spectrum(probes, steps).logdet(shift)

    def spectrum(self, probes: int, steps: int) -> krylov.DeflatedSpectrum:
        """Estimate the spectrum of the Gram matrix; again only if the basis has doubled since the last estimate.

        Cost: ``steps`` products of ``probes`` rows.
        """
        cached = self.cache.spectra.get((probes, steps))
        if cached is None or len(self.basis.rows) >= 2 * cached.rank:
            rows = krylov.random_signs(
                probes, self.design.size, torch.Generator().manual_seed(self.seed), self.prior.device
            )
            cached = krylov.DeflatedSpectrum.of(self.product, self.basis, rows, steps)
            self.cache.spectra[probes, steps] = cached
        return cached

    @property
    def _root(self) -> Tensor | float:
        """√D."""
        return 1.0 if self.scale is None else self.scale.sqrt()

    def _divide_by_root(self, rows: Tensor) -> Tensor:
        """Return D^-½ times the rows."""
        return rows if self.scale is None else rows / self._root

    @property
    def _n_first(self) -> int:
        """The number of samples that the basis starts from."""
        return max(1, min(len(self.prior), self.width // 2))

    @property
    def _max_basis(self) -> int:
        """The number of basis rows that ``bytes`` allows; at least those that the basis starts from."""
        return max(2 * self._n_first, self.bytes // (8 * self.design.size))

    def _rhs(self, shift: float, some: slice) -> Tensor:
        """Return the right-hand sides √shift ζ + D^-½ Xᵀε of some samples."""
        return shift**0.5 * self.prior[some] + self._divide_by_root(self.back[some])

    def _first_samples(self, basis: krylov.BlockKrylov, shift: float, tolerance: float) -> Solution:
        """Solve for the first samples in the basis, whether they converge or not."""
        count = self._n_first
        sizes = krylov.residual_sizes(shift**0.5 * self.prior[:count], self._rhs(shift, slice(count)), tolerance)
        # The right-hand sides √shift ζ + Xᵀε are combinations of the start block [ζ_1.., Xᵀε_1..].
        eye = torch.eye(count, dtype=torch.float64, device=basis.start.device)
        weights = torch.cat([shift**0.5 * eye, eye], 1)
        return basis.solve(weights, shift, tolerance=tolerance, sizes=sizes)
