r"""Total variation: of images, its expectation under a Gaussian, and the prior over length-scales that it implies.

A density proportional to exp(-λ TV(x)) has no curvature, so it cannot be part of a Gaussian prior over images. Instead
the *expected* variation κ of images drawn from the Gaussian prior is given an exponential distribution, which by a
change of variables is a density over the length-scale ℓ of the prior's filters: p(log ℓ) = λ e^{-λκ} |∂κ/∂ log ℓ|.
Differences between neighbouring pixels are Gaussian, so κ and its derivatives have closed forms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.runtime.settings import POSITIVE, TENSOR, HasSettings, describe, integer, required

JITTER = 1e-6  # relative variance on the diagonal of a filter's covariance


def total_variation(images: Tensor) -> Tensor:
    """Return the sum of absolute differences between neighbouring pixels of images (..., H, W), shape (...).

    >>> total_variation(torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
    tensor(6.)
    """
    if images.ndim < 2:
        raise DataError(f"images is {describe(images)}; expected (..., H, W).")
    return images.diff(dim=-1).abs().sum((-2, -1)) + images.diff(dim=-2).abs().sum((-2, -1))


def edges(height: int, width: int) -> Tensor:
    """Return the pairs of neighbouring pixels (e, 2) as positions in the flat image, horizontal ones first.

    >>> edges(2, 2).tolist()
    [[0, 1], [2, 3], [0, 2], [1, 3]]
    """
    integer().check("height", height)
    integer().check("width", width)
    pixels = torch.arange(height * width).reshape(height, width)
    horizontal = torch.stack([pixels[:, :-1], pixels[:, 1:]], -1).reshape(-1, 2)
    vertical = torch.stack([pixels[:-1], pixels[1:]], -1).reshape(-1, 2)
    return torch.cat([horizontal, vertical])


def expected_variation(mean_difference: Tensor, variance: Tensor) -> Tensor:
    r"""Return the summed expectation of absolute Gaussian numbers.

    $$ E|m + \sqrt{v}\,\varepsilon| = \sqrt{2 v/\pi}\, e^{-m^2/2v} + m\,\mathrm{erf}(m/\sqrt{2v}) $$

    Args:
        mean_difference: Means m, (..., e).
        variance: Variances v of at least zero, in the same shape.

    Returns:
        Sums (...), differentiable twice. Where v is so small that its exponential underflows, an entry is |m| and its
        derivatives in v are zero.

    Raises:
        DataError: The shapes differ.

    >>> expected_variation(torch.tensor([-2.0, 0.0]), torch.tensor([0.0, torch.pi / 2]))
    tensor(3.)
    """
    if mean_difference.shape != variance.shape:
        raise DataError(
            f"mean_difference is {describe(mean_difference)}, variance is {describe(variance)}; expected the same "
            "shape."
        )
    far = _far(mean_difference, variance)
    # The unused branch of a ``where`` must be finite as well, or its gradient is NaN.
    v = torch.where(far, 1.0, variance)
    m = torch.where(far, 0.0, mean_difference)
    near = (2 * v / math.pi).sqrt() * (-m.square() / (2 * v)).exp() + m * torch.erf(m / (2 * v).sqrt())
    return torch.where(far, mean_difference.abs(), near).sum(-1)


def log_slope(mean_difference: Tensor, variance: Tensor, variance_slope: Tensor) -> Tensor:
    r"""Return log |∂κ/∂t| for the expected variation κ, given the derivatives v' = ∂v/∂t of the variances.

    $$ \partial\kappa/\partial t = \sum_e e^{-m_e^2/2v_e} / \sqrt{2\pi v_e}\; v'_e $$

    The sum is scaled by its largest weight, so that it does not underflow when all variances are small.

    Args:
        mean_difference: Means m, (..., e).
        variance: Variances v, in the same shape.
        variance_slope: Derivatives v', of either sign, in the same shape.

    Returns:
        Logarithms (...), differentiable; -inf where the derivative is zero.
    """
    positive = variance > 0
    v = torch.where(positive, variance, 1.0)
    exponents = -mean_difference.square() / (2 * v) - 0.5 * (2 * math.pi * v).log()
    exponents = torch.where(positive, exponents, -math.inf)
    largest = exponents.detach().amax(-1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    weights = (exponents - largest).exp()
    return (weights * variance_slope).sum(-1).abs().log() + largest.squeeze(-1)


def _far(mean: Tensor, variance: Tensor) -> Tensor:
    """Return where the exponential of -m²/2v underflows, or v is zero."""
    limit = -0.9 * math.log(torch.finfo(variance.dtype).tiny)
    return mean.square() >= 2 * limit * variance


class HasLengthScales(Protocol):
    """A prior over filters whose covariance is a sum of fixed matrices, one for each class of distances."""

    def coefficients(self) -> Tensor:
        """Return the coefficient of each class, (classes,)."""
        ...

    def coefficient_slopes(self) -> Tensor:
        """Return the derivative of each coefficient in the log length-scale of its block, (classes,)."""
        ...


@dataclass(frozen=True, eq=False)
class TVPredCP(HasSettings):
    r"""Log density over the length-scales of a prior, from the total variation of the images that it expects.

    $$ \log p = \sum_b \left[-\lambda\kappa_b + \log|\partial\kappa_b / \partial\log\ell_b|\right] $$

    κ_b is the expected variation of images from N(x̂, Σ_b), in which block b alone is uncertain. It is a function of the
    variances of differences, v_e = Σ_c coefficient_c · class_variances_ce over the classes c of block b.

    Args:
        scale: λ, the rate of the exponential distribution of κ.
        edge_means: Differences of neighbouring pixels of the reconstruction, (e,).
        class_variances: Variances of these differences for a coefficient of one, (classes, e); a class of distances
            above zero may have negative ones.
        class_blocks: The block of each class, (classes,), counted from 0; -1 for a class without length-scale.

    Raises:
        UnsupportedError: The scale is not positive.
        DataError: Tensors do not fit together, are not finite, or no class has a length-scale.

    Reference: Antorán et al. 2022, with κ and its derivatives in closed form instead of by samples.

    >>> blocks, variances = torch.tensor([0, 0]), torch.tensor([[2.0, 1.0, 1.0], [0.5, 0.1, 0.2]])
    >>> prior = TVPredCP(1.0, torch.tensor([0.0, 1.0, -1.0]), variances, blocks)
    >>> distances, zero = torch.tensor([0.0, 1.0]), torch.zeros(1)
    >>> round(float(prior.log_density(*exponential_coefficients(zero, zero, blocks, distances))), 4)
    -6.1117
    """

    scale: float = required(POSITIVE)
    edge_means: Tensor = required(TENSOR)
    class_variances: Tensor = required(TENSOR)
    class_blocks: Tensor = required(TENSOR)

    def __post_init__(self) -> None:
        super().__post_init__()
        classes = len(self.class_variances) if self.class_variances.ndim else 0
        if self.class_variances.shape != (classes, *self.edge_means.shape) or self.edge_means.ndim != 1:
            raise DataError(
                f"class_variances is {describe(self.class_variances)}, edge_means is {describe(self.edge_means)}; "
                "expected (classes, e) and (e,)."
            )
        if self.class_blocks.shape != (classes,) or self.class_blocks.is_floating_point():
            raise DataError(f"class_blocks is {describe(self.class_blocks)}; expected {classes} whole numbers.")
        named = self.class_blocks[self.class_blocks >= 0].unique()
        if not len(named) or not torch.equal(named.cpu(), torch.arange(len(named))):
            raise DataError(f"class_blocks names the blocks {named.tolist()}; expected 0, 1, 2, … without a gap.")
        if not bool(self.edge_means.isfinite().all() & self.class_variances.isfinite().all()):
            raise DataError("edge_means or class_variances is not finite; expected finite numbers.")

    @cached_property
    def n_blocks(self) -> int:
        """The number of blocks that have a length-scale."""
        return int(self.class_blocks.max()) + 1

    def __call__(self, prior: HasLengthScales) -> Tensor:
        """Return the log density at the hyperparameters of a prior, differentiable in them."""
        return self.log_density(prior.coefficients(), prior.coefficient_slopes())

    def log_density(self, coefficients: Tensor, slopes: Tensor) -> Tensor:
        """Return the log density, given the coefficients (classes,) and their derivatives in log ℓ of their block."""
        means = self.edge_means.expand(self.n_blocks, -1)
        variances, variance_slopes = self.block_variances(coefficients), self.block_variances(slopes)
        jacobian = log_slope(means, variances, variance_slopes)
        return (jacobian - self.scale * expected_variation(means, variances)).sum()

    def variations(self, coefficients: Tensor) -> Tensor:
        """Return the expected total variation κ of each block, (blocks,)."""
        return expected_variation(self.edge_means.expand(self.n_blocks, -1), self.block_variances(coefficients))

    def block_variances(self, coefficients: Tensor) -> Tensor:
        """Return the variances of all differences under each block alone, (blocks, e); linear in the coefficients."""
        if coefficients.shape != self.class_blocks.shape:
            raise DataError(f"coefficients is {describe(coefficients)}; expected {len(self.class_blocks)} numbers.")
        member = self.class_blocks == torch.arange(self.n_blocks, device=self.class_blocks.device).unsqueeze(1)
        return (member.to(coefficients) * coefficients) @ self.class_variances.to(coefficients)


def exponential_coefficients(
    log_variances: Tensor, log_lengths: Tensor, class_blocks: Tensor, distances: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return coefficients σ² exp(-d/ℓ) of classes of distances, and their derivatives in log ℓ.

    Args:
        log_variances: log σ² of each block, (blocks,).
        log_lengths: log ℓ of each block, (blocks,).
        class_blocks: The block of each class, (classes,), or -1; those get the coefficient zero.
        distances: The distance d of each class, (classes,). The coefficient of d = 0 is σ² (1 + 1e-6).

    Raises:
        DataError: The shapes do not fit.

    >>> exponential_coefficients(torch.zeros(1), torch.zeros(1), torch.tensor([0]), torch.tensor([1.0]))
    (tensor([0.3679]), tensor([0.3679]))
    """
    if log_variances.shape != log_lengths.shape or class_blocks.shape != distances.shape or distances.ndim != 1:
        raise DataError(
            f"log_variances is {describe(log_variances)}, log_lengths is {describe(log_lengths)}, class_blocks is "
            f"{describe(class_blocks)}, distances is {describe(distances)}; expected two of (blocks,), then two of "
            "(classes,)."
        )
    block, has_length = class_blocks.clamp_min(0), (class_blocks >= 0).to(log_lengths)
    variance = log_variances.exp()[block] * has_length
    ratio = distances * (-log_lengths).exp()[block]
    shape = (-ratio).exp()
    return variance * (shape + JITTER * (distances == 0)), variance * shape * ratio
