"""The vectors in output space that backward passes start from, whole or in runs, and the choice between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.core.settings import NONE, one_of, require_integer
from lapwing.errors import UnsupportedError
from lapwing.likelihoods.protocol import HasHessian, HasRootColumns, Likelihood

CURVATURES = ("ggn", "fisher_mc", "empirical")
MANY = 64  # outputs of a sample, C or T C, up to which the exact curvature is the default
DRAWS = 4  # labels that are drawn for each datum above that
PLAIN = "jacobian"  # the Jacobian itself, without a likelihood: one seed for each output


def checked_curvature(curvature: str, allowed: tuple[str, ...] = CURVATURES) -> str:
    """Return the name of a curvature; raise if it is not one of those allowed."""
    one_of(allowed).check("curvature", curvature)
    return curvature


def check_estimate(curvature: str | None, draws: int, allowed: tuple[str, ...] = CURVATURES) -> None:
    """Raise unless the settings that all methods with a sampled curvature share are valid; None leaves the choice."""
    (one_of(allowed) | NONE).check("curvature", curvature)
    require_integer("draws", draws)


def refuse_open_noise(curvature: str | None, likelihood: Likelihood) -> None:
    """Raise if the empirical Fisher is asked for and the noise is not known: it does not scale with the noise."""
    if curvature == "empirical" and likelihood.learns_dispersion:
        raise UnsupportedError(
            "curvature is 'empirical' and the noise is to be estimated; expected a known noise, on which the empirical "
            "Fisher depends in another way than the GGN. Give Gaussian(noise_std=...), or use curvature='ggn'."
        )


@dataclass(frozen=True, eq=False)
class Seeds:
    """The vectors in output space that the backward passes of a sweep start from.

    With "ggn" they are the columns of the likelihood's root, so that the sum of JᵀJ over the pass is the exact GGN at
    unit dispersion. With "fisher_mc" there is one seed for each of ``draws`` labels drawn from the model, the gradient
    of the loss over √draws: an unbiased estimate for ``draws`` backward passes, whose error falls as one over the root
    of the number of data times draws. With "empirical" there is one seed for each datum, and each token is a datum: the
    gradient of the loss at its target, over √φ, so that the sum over φ is that of the log-likelihood. With "jacobian"
    they are the unit vectors.

    ``output`` takes the seed of one output alone, for a likelihood with a noise for each output.
    """

    curvature: str = "ggn"
    generator: torch.Generator | None = None
    output: int | None = None
    draws: int = 1

    def __post_init__(self) -> None:
        checked_curvature(self.curvature, (*CURVATURES, PLAIN))

    @property
    def sampled(self) -> bool:
        """Whether they are drawn."""
        return self.curvature == "fisher_mc"

    @property
    def observed(self) -> bool:
        """Whether they are gradients at the targets of the data."""
        return self.curvature == "empirical"

    def count(self, output_shape: tuple[int, ...]) -> int:
        """Return the number of seeds for each sample."""
        if self.sampled:
            return self.draws
        one = self.output is not None or self.observed
        return torch.Size(output_shape[:-1] if one else output_shape).numel()

    def at(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
        """Return the seeds at outputs f (B, [T,] C): (K, B, [T,] C), different ones for each token."""
        if self.sampled:
            return self._drawn(likelihood, f, y)
        if self.observed:
            gradient = likelihood.gradient(f, y)
            return root_seeds(gradient.unsqueeze(-1) / likelihood.dispersion.to(gradient).sqrt())
        if self.curvature == PLAIN:
            return root_seeds(torch.eye(f.shape[-1]).to(f).expand(*f.shape, f.shape[-1]))
        return root_seeds(self._columns(likelihood, f, y, slice(None)))

    def runs(self, likelihood: Likelihood, f: Tensor, y: Tensor, most: int) -> Iterator[Tensor]:
        """Yield the seeds in runs of at most ``most``; only one run of the root's columns is in memory at a time."""
        if self.curvature != "ggn":
            yield from self.at(likelihood, f, y).split(most)
            return
        width = f.shape[-1] if self.output is None else 1
        if f.ndim == 2:
            for start in range(0, width, most):
                columns = self._columns(likelihood, f, y, slice(start, start + most))
                if columns.shape[-1]:  # a softmax has one column less than outputs
                    yield root_seeds(columns)
            return
        tokens = max(1, most // width)
        for first in range(0, f.shape[1], tokens):
            part = slice(first, first + tokens)
            for start in range(0, width, most):
                columns = self._columns(likelihood, f[:, part], y[:, part], slice(start, start + most))
                if columns.shape[-1]:
                    yield root_seeds(columns, first, f.shape[1])

    def _drawn(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradients at drawn labels. The draws of a datum follow each other, whatever the chunk.

        Labels are drawn independently, so tokens may share a seed: their cross terms vanish on average.
        """
        f, y = (t.repeat_interleave(self.draws, 0) if self.draws > 1 else t for t in (f, y))
        gradient = likelihood.sampled_gradient(f, y, self.generator)
        if self.output is not None:
            gradient = gradient * F.one_hot(torch.tensor(self.output), f.shape[-1]).to(f)
        return gradient.unflatten(0, (-1, self.draws)).transpose(0, 1) / self.draws**0.5

    def _columns(self, likelihood: Likelihood, f: Tensor, y: Tensor, columns: slice) -> Tensor:
        """Return some columns of the likelihood's root, (B, [T,] C, k)."""
        if self.output is not None:
            columns = slice(self.output, self.output + 1)
        if isinstance(likelihood, HasRootColumns):
            return likelihood.root_columns(f, y, columns)
        if isinstance(likelihood, HasHessian) and columns != slice(None):
            hessian = likelihood.hessian(f, y)
            if hessian.outer is None:
                return _diagonal_columns(hessian.diagonal.sqrt().to(f), columns)
        return likelihood.root(f, y)[..., columns]


def root_seeds(root: Tensor, first: int = 0, tokens: int | None = None) -> Tensor:
    """Return the columns of a root as seeds: R (B, C, K) as (K, B, C), and R (B, t, C, K) as (t K, B, T, C).

    With tokens each seed is zero at all tokens but one. R may be that of some of the ``tokens``, from ``first`` on.
    """
    if root.ndim == 3:
        return root.permute(2, 0, 1)
    batch, some, classes, columns = root.shape
    seeds = root.new_zeros(some, columns, batch, some if tokens is None else tokens, classes)
    index = torch.arange(some, device=root.device)
    seeds[index, :, :, first + index] = root.permute(1, 3, 0, 2)
    return seeds.flatten(0, 1)


def _diagonal_columns(values: Tensor, columns: slice) -> Tensor:
    """Return some columns of the diagonal matrices with these values (..., C), without the others."""
    first, last, _ = columns.indices(values.shape[-1])
    matrix = values.new_zeros(*values.shape, last - first)
    matrix[..., first:last, :].diagonal(dim1=-2, dim2=-1).copy_(values[..., first:last])
    return matrix
