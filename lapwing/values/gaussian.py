"""Beliefs about the outputs of a network: Gaussian ones, drawn functions, slopes of both in the inputs.

The Jacobian of a network has a path back to its inputs, and another one to its weights. Callers get the first alone:
``backward`` on a result writes gradients to the inputs and to nothing else, and costs no gradients of weights.

Inside the library the pixels of an image (B, C, H, W), or (B, C, D, H, W), are the tokens of a token-level output:
(B, H W, C), in the order of the rows of the image. Outputs and targets are brought into this form where they enter,
results back into that of images where users get them; nothing in between knows images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.data.inputs import Inputs, map_tensors, tensors_in, wants_slopes
from lapwing.errors import DataError, NumericalError
from lapwing.linalg.dense import eigh
from lapwing.runtime.memory import chunks, concat_chunks, refuse_large_result
from lapwing.runtime.settings import Rule, describe, integer
from lapwing.runtime.threads import normal

DIMS = (2, 3)  # of an image: (H, W), or (D, H, W)


def pixels(images: Tensor) -> Tensor:
    """Return images (B, C, H, W) as their pixels (B, H W, C). A view where the memory allows it."""
    return images.movedim(1, -1).flatten(1, -2)


@dataclass(frozen=True)
class ImageForm:
    """The height and width of images, and their depth if they have one.

    Args:
        sizes: (H, W), or (D, H, W).

    >>> import torch
    >>> form = ImageForm((2, 3))
    >>> form.outputs(pixels(torch.zeros(5, 4, 2, 3))).shape
    torch.Size([5, 4, 2, 3])
    """

    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return " x ".join(map(str, self.sizes))

    @property
    def count(self) -> int:
        """The number of pixels of an image."""
        return math.prod(self.sizes)

    def labels(self, flat: Tensor) -> Tensor:
        """Return numbers of each pixel (..., H W) as images (..., H, W)."""
        if flat.shape[-1] != self.count:
            raise DataError(
                f"{flat.shape[-1]} pixels for images of {self}; expected {self.count}. The model gives outputs of "
                "several sizes for inputs of one shape: give it inputs of one size at a time."
            )
        return flat.unflatten(-1, self.sizes)

    def outputs(self, flat: Tensor) -> Tensor:
        """Return outputs of each pixel (..., H W, C) as images (..., C, H, W)."""
        return self.labels(flat.transpose(-1, -2))

    def blocks(self, cov: Tensor) -> Tensor:
        """Return covariances of each pixel (B, H W, C, C) as (B, H, W, C, C)."""
        return self.labels(cov.movedim(1, -1)).movedim((1, 2), (-2, -1))

    def targets(self, y: Tensor) -> Tensor:
        """Return targets (B, H, W) or (B, C, H, W) in the form of pixels, (B, H W) or (B, H W, C).

        Raises:
            DataError: If they have another number of dimensions, or another height or width.
        """
        dims = len(self.sizes)
        if y.ndim not in (dims + 1, dims + 2) or tuple(y.shape[-dims:]) != self.sizes:
            listed = ", ".join(map(str, self.sizes))
            raise DataError(
                f"targets have the shape {tuple(y.shape)} and the outputs are images of {self}; expected (B, {listed}) "
                f"for class numbers or a single channel, or (B, C, {listed}). If they are not images, let the model "
                "return (B, C)."
            )
        return y.flatten(1) if y.ndim == dims + 1 else pixels(y)


@dataclass(frozen=True, eq=False)
class ChosenOutputs:
    """The numbers of some outputs, in the order in which they are wanted; a number may repeat.

    Args:
        outputs: (k,) for all inputs, or (B, k), (B, S, k) for each; None means all outputs.
        tokens: (S,) for all inputs, or (B, S) for each; None means all tokens.
        token_level: Whether an input has outputs (T, C), not (C,).
        image_dims: How many dimensions the images have whose pixels the tokens are; zero without images.

    >>> chosen = ChosenOutputs(torch.tensor([2, 0]))
    >>> chosen.of(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[3., 1.]])
    """

    outputs: Tensor | None
    tokens: Tensor | None = None
    token_level: bool = False
    image_dims: int = 0

    @classmethod
    def given(
        cls, outputs: object, tokens: object, shape: Sequence[int], device: torch.device, image_dims: int = 0
    ) -> ChosenOutputs | None:
        """Return what a user chose among outputs of this ``shape``, (C,) or (T, C) of an input; None if nothing was.

        Outputs that are chosen for each pixel of an image come as (B, H W, k).

        Raises:
            DataError: If numbers are not whole, out of range, or have a shape that does not exist.
        """
        if outputs is None and tokens is None:
            return None
        token_level = len(shape) == 2
        form = _image_form(image_dims) if image_dims else "(B, T, k)" if token_level else "(B, k)"
        if outputs is not None:
            expected = f"numbers of outputs from 0 to {shape[-1] - 1}, of shape (k,), or {form}"
            outputs = _check_numbers("outputs", outputs, expected, (1, len(shape) + 1), shape[-1]).to(device)
        if tokens is not None and not token_level:
            raise DataError("tokens were chosen and the outputs are (B, C), without tokens; choose outputs=... alone.")
        if tokens is not None:
            expected = f"numbers of {'pixels' if image_dims else 'tokens'} from 0 on, of shape (S,), or (B, S)"
            tokens = _check_numbers("tokens", tokens, expected, (1, 2)).to(device)
        return cls(outputs, tokens, token_level, image_dims)

    def refuse_other(self, samples: int) -> None:
        """Raise if there are numbers for each input, and another number of inputs."""
        for name, numbers in (("outputs", self.outputs), ("tokens", self.tokens)):
            if numbers is not None and numbers.ndim > 1 and len(numbers) != samples:
                raise DataError(
                    f"{name} have the shape {tuple(numbers.shape)} for {samples} inputs; expected ({samples}, ...), or "
                    "one row for all inputs."
                )

    @property
    def differ(self) -> bool:
        """Whether each input has its own numbers."""
        return any(t is not None and t.ndim > 1 for t in (self.outputs, self.tokens))

    def samples(self, part: slice) -> ChosenOutputs:
        """Return the choice for some of the inputs."""
        cut = lambda t: t if t is None or t.ndim == 1 else t[part]
        return replace(self, outputs=cut(self.outputs), tokens=cut(self.tokens))

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the chosen outputs of one input, (k,) or (S, k), from the ``shape`` of all of them."""
        last = shape[-1] if self.outputs is None else self.outputs.shape[-1]
        if not self.token_level:
            return (last,)
        return (shape[-2] if self.tokens is None else self.tokens.shape[-1], last)

    def numbers(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the places of the chosen among all outputs of an input, (B, S, k), or (1, S, k) if all have the same.

        ``shape`` is that of the outputs of an input, (C,) or (T, C). S is one without tokens.
        """
        total, classes = (shape[-2] if self.token_level else 1), shape[-1]
        tokens = torch.arange(total, device=device) if self.tokens is None else self.tokens
        outputs = torch.arange(classes, device=device) if self.outputs is None else self.outputs
        if self.tokens is not None and int(tokens.max()) >= total:
            name = "pixel" if self.image_dims else "token"
            raise DataError(
                f"{name} {int(tokens.max())} was chosen of {total}; expected numbers from 0 to {total - 1}."
            )
        if not self.token_level and outputs.ndim == 2:
            outputs = outputs.unsqueeze(1)
        if outputs.ndim == 3 and outputs.shape[1] != tokens.shape[-1]:
            if self.image_dims:
                raise DataError(
                    f"outputs were chosen for each of {outputs.shape[1]} pixels, and there are {tokens.shape[-1]}; "
                    f"expected {'(B, S, k)' if self.tokens is not None else _image_form(self.image_dims)} with as many "
                    "pixels, or (k,) for all."
                )
            raise DataError(
                f"outputs have the shape {tuple(outputs.shape)} for {tokens.shape[-1]} tokens; expected "
                f"(B, {tokens.shape[-1]}, k), or (k,) for all tokens."
            )
        outputs = outputs.reshape(-1, outputs.shape[1] if outputs.ndim == 3 else 1, outputs.shape[-1])
        return tokens.reshape(-1, tokens.shape[-1], 1) * classes + outputs

    def of(self, values: Tensor) -> Tensor:
        """Return the chosen entries of values (..., B, [T,] C): (..., B, [S,] k)."""
        inner = 2 if self.token_level else 1
        shape, lead = values.shape[-inner:], values.shape[:-inner]
        numbers = self.numbers(shape, values.device).flatten(1)
        picked = values.reshape(*lead, -1).gather(-1, numbers.expand(*lead, -1))
        return picked.reshape(*lead, *self.shape(shape))

    def blocks(self, cov: Tensor) -> Tensor:
        """Return the chosen rows and columns of covariances (B, [T,] C, C): (B, [S,] k, k)."""
        batch, classes = len(cov), cov.shape[-1]
        shape = cov.shape[1:-1]
        numbers = self.numbers(shape, cov.device)
        rows, columns = numbers.unsqueeze(-1), (numbers % classes).unsqueeze(-2)
        places = (rows * classes + columns).flatten(1).expand(batch, -1)
        chosen = self.shape(shape)
        return cov.reshape(batch, -1).gather(1, places).reshape(batch, *chosen, chosen[-1])

    def across(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the chosen rows and columns of a covariance between all outputs (B, [T,] C) of ``shape``."""
        batch, size = shape[0], matrix.shape[0] // shape[0]
        starts = size * torch.arange(batch, device=matrix.device)
        places = (starts[:, None] + self.numbers(shape[1:], matrix.device).flatten(1)).flatten()
        return matrix[places][:, places]

    def seeds(self, f: Tensor) -> Tensor:
        """Return a unit vector for each chosen output, (S k, B, [T,] C), for outputs f (B, [T,] C).

        Where all inputs have the same outputs, they share the memory.
        """
        numbers = self.numbers(f.shape[1:], f.device).flatten(1)  # (B or 1, S k)
        units = torch.zeros(*numbers.shape, f[0].numel(), dtype=f.dtype, device=f.device)
        units.scatter_(2, numbers.unsqueeze(-1), 1.0)
        return units.transpose(0, 1).reshape(numbers.shape[1], -1, *f.shape[1:]).expand(-1, *f.shape)


@dataclass(frozen=True, eq=False)
class Query:
    """A request for a belief: about all or some outputs of each input, with the covariance between inputs if joint."""

    joint: bool = False
    outputs: ChosenOutputs | None = None  # None means all

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the wanted outputs of one input, from the ``shape`` of all of them."""
        return tuple(shape) if self.outputs is None else self.outputs.shape(shape)

    def of(self, values: Tensor) -> Tensor:
        """Return the wanted ones of the values (..., B, [T,] C) of all outputs."""
        return values if self.outputs is None else self.outputs.of(values)

    def of_belief(self, belief: FunctionGaussian) -> FunctionGaussian:
        """Return the wanted part of the belief about all outputs."""
        return belief if self.outputs is None else belief.chosen(self.outputs)


def _image_form(dims: int) -> str:
    """Return the shape of outputs that are chosen for each pixel, as text."""
    return f"(B, k, {', '.join('DHW'[-dims:])})"


def _check_numbers(name: str, given: object, expected: str, dims: tuple[int, ...], size: int | None = None) -> Tensor:
    """Return the numbers as a tensor; raise if they are not whole numbers, out of range, or of another shape."""

    def holds(value: object) -> bool:
        t = torch.as_tensor(value)
        whole = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
        return whole and t.ndim in dims and t.numel() > 0

    Rule(expected, holds, DataError).check(name, given)
    numbers = torch.as_tensor(given).long()
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or (size is not None and high >= size):
        raise DataError(f"{name} has {high if low >= 0 else low}; expected {expected}.")
    return numbers


ROOT_COPIES = 4  # float64 copies of a covariance that its root takes
ROUNDING_SHARE = 1e-4  # size of a negative variance, relative to the largest, that counts as rounding
NORMAL_REACH = 8.5  # standard deviations on either side; the probability beyond is below 1e-16


@dataclass(frozen=True, eq=False)
class Deferred:
    """A covariance that is computed when it is first used.

    With a thousand classes the (B, C, C) covariance is a thousand times larger than the variances, so each has its
    own function, and neither runs before it is needed.
    """

    variance: Callable[[], Tensor]
    cov: Callable[[], Tensor]
    centred: Callable[[], Tensor] | None = None  # the variance of f_k - mean_j f_j; from the covariance if None
    differences: Callable[[], Tensor] | None = None  # the variances of f_k - f_i; from the covariance if None


@dataclass(frozen=True, eq=False, repr=False)
class FunctionGaussian:
    """A Gaussian belief f(x) ~ N(mean, cov) about the outputs for a batch of inputs.

    Shapes: ``mean`` (B, C); ``cov`` (B, C, C); ``variance`` and ``std`` (B, C). Token-level outputs have
    (B, T, C) and (B, T, C, C), images (B, C, H, W) and (B, H, W, C, C). With ``joint=True`` the covariance is also
    between inputs and between the pixels or tokens of one: ``cov`` is (B, C, B, C), or the shape of the mean twice in
    general, and ``cov.reshape(n, n)`` with ``n = mean.numel()`` is the joint matrix.

    Args:
        mean: The mean of the outputs.
        covariance: Their covariance, or functions that compute it later.
        joint: Whether the covariance is also between inputs.
        outputs_dim: The dimension of the mean along which the outputs of one datum lie: the last, or 1 for images.

    >>> belief = FunctionGaussian(torch.zeros(2, 1), torch.ones(2, 1, 1))
    >>> belief.std.tolist()
    [[1.0], [1.0]]
    """

    mean: Tensor
    covariance: Tensor | Deferred
    joint: bool = False
    outputs_dim: int = -1

    def __post_init__(self) -> None:
        if not isinstance(self.mean, Tensor) or not isinstance(self.covariance, Tensor | Deferred):
            raise DataError(
                f"mean is {describe(self.mean)}, covariance {describe(self.covariance)}; expected two tensors."
            )
        if isinstance(self.covariance, Tensor) and self.covariance.shape != self._cov_shape:
            raise DataError(f"covariance has the shape {tuple(self.covariance.shape)}; expected {self._cov_shape}.")

    def __repr__(self) -> str:
        """Return the shape in a line; the numbers are in the members."""
        return f"<FunctionGaussian: mean {tuple(self.mean.shape)}{', joint' if self.joint else ''}>"

    def numpy(self) -> dict[str, Any]:
        """Return ``mean`` and ``std`` as NumPy arrays, by name.

        >>> sorted(FunctionGaussian(torch.zeros(2, 1), torch.ones(2, 1, 1)).numpy())
        ['mean', 'std']
        """
        return {"mean": self.mean.detach().cpu().numpy(), "std": self.std.detach().cpu().numpy()}

    @classmethod
    def across(cls, mean: Tensor, matrix: Tensor) -> FunctionGaussian:
        """Return the joint belief with this covariance between all outputs at all inputs, (B C, B C)."""
        return cls(mean, matrix.to(mean).reshape(*mean.shape, *mean.shape), joint=True)

    @classmethod
    def of_deviations(cls, mean: Tensor, deviations: Tensor, count: float, joint: bool) -> FunctionGaussian:
        """Return the belief whose covariance is the sum of d dᵀ over the rows d of ``deviations``, over ``count``.

        Shapes: ``mean`` (B, ..., C), ``deviations`` (K, B, ..., C).
        """
        if joint:
            flat = deviations.flatten(1)
            return cls.across(mean, flat.mT @ (flat / count))
        variance = lambda: deviations.square().sum(0) / count
        cov = lambda: torch.einsum("k...c,k...d->...cd", deviations, deviations / count)
        centred = lambda: (deviations - deviations.mean(-1, keepdim=True)).square().sum(0) / count
        return cls(mean, Deferred(variance, cov, centred))

    @classmethod
    def stacked(cls, beliefs: Sequence[FunctionGaussian]) -> FunctionGaussian:
        """Return the beliefs along a new first dimension."""
        join = lambda parts: parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
        stack = lambda part: lambda: join([part(belief) for belief in beliefs])
        deferred = Deferred(stack(lambda b: b.variance), stack(lambda b: b.cov), stack(lambda b: b.centred_variance))
        return cls(torch.stack([belief.mean for belief in beliefs]), deferred)

    @property
    def _deferred(self) -> Deferred | None:
        """The functions that compute the covariance, as long as it was not computed; None if it was given."""
        return self.covariance if isinstance(self.covariance, Deferred) and "cov" not in self.__dict__ else None

    @property
    def form(self) -> ImageForm | None:
        """The height and width of images; None for other outputs."""
        return None if self.outputs_dim == -1 else ImageForm(tuple(self.mean.shape[2:]))

    @property
    def _cov_shape(self) -> tuple[int, ...]:
        last = self._outputs_last(self.mean).shape
        return (*self.mean.shape, *self.mean.shape) if self.joint else (*last, last[-1])

    def _outputs_last(self, t: Tensor) -> Tensor:
        """Return values in the shape of the mean with the outputs of a datum last."""
        return t.movedim(self.outputs_dim, -1)

    def _as_mean(self, t: Tensor) -> Tensor:
        """Return values with the outputs of a datum last in the shape of the mean."""
        return t.movedim(-1, self.outputs_dim)

    @cached_property
    def cov(self) -> Tensor:
        """The covariance, (B, [T,] C, C), (B, H, W, C, C) of images, or the shape of the mean twice if joint."""
        return self.covariance.cov() if isinstance(self.covariance, Deferred) else self.covariance

    @cached_property
    def variance(self) -> Tensor:
        """The variance of each output, (B, [T,] C).

        Raises:
            NumericalError: If a variance is negative by more than rounding.
        """
        if self._deferred is not None:
            return _without_negative_rounding(self._deferred.variance())
        if self.joint:
            size = self.mean.numel()
            return _without_negative_rounding(self.cov.reshape(size, size).diagonal().reshape(self.mean.shape))
        return _without_negative_rounding(self._as_mean(self.cov.diagonal(dim1=-2, dim2=-1)))

    @cached_property
    def centred_variance(self) -> Tensor:
        """The variance of each output after the mean over outputs is taken off, (B, [T,] C)."""
        if self._deferred is not None and self._deferred.centred is not None:
            return _without_negative_rounding(self._deferred.centred())
        cov = self.marginal.cov
        rows = cov.mean(-1)
        centred = cov.diagonal(dim1=-2, dim2=-1) - 2 * rows + rows.mean(-1, keepdim=True)
        return _without_negative_rounding(self._as_mean(centred))

    @property
    def differences(self) -> Tensor:
        """The variances of the differences f_k - f_i of every two outputs of a datum, (B, [T,] C, C)."""
        if self._deferred is not None and self._deferred.differences is not None:
            return self._deferred.differences()
        own = self.cov.diagonal(dim1=-2, dim2=-1)
        return torch.add(own.unsqueeze(-1) + own.unsqueeze(-2), self.cov, alpha=-2).clamp_min(0)

    def chosen(self, outputs: ChosenOutputs) -> FunctionGaussian:
        """Return the belief about some of the outputs, in their order."""
        mean, covariance = outputs.of(self.mean), self.covariance
        if self.joint:
            size = self.mean.numel()
            return FunctionGaussian.across(mean, outputs.across(self.cov.reshape(size, size), self.mean.shape))
        if isinstance(covariance, Tensor):
            return FunctionGaussian(mean, outputs.blocks(covariance))
        deferred = Deferred(lambda: outputs.of(covariance.variance()), lambda: outputs.blocks(covariance.cov()))
        return FunctionGaussian(mean, deferred)

    def rows(self, rows: Tensor | tuple[Tensor, ...]) -> FunctionGaussian:
        """Return the belief about some of the data: inputs (n,), or inputs and tokens, (n,) each."""
        return FunctionGaussian(self.mean[rows], self.cov[rows])

    def scaled(self, factor: float) -> FunctionGaussian:
        """Return the belief about ``factor`` times the outputs."""
        return self if factor == 1 else replace(self.widened(factor**2), mean=factor * self.mean)

    def moved(self, by: Tensor) -> FunctionGaussian:
        """Return the belief about the outputs plus ``by``, which has a number for each output of a datum, (C,)."""
        return replace(self, mean=self._as_mean(self._outputs_last(self.mean) + by.to(self.mean)))

    def widened(self, factor: float) -> FunctionGaussian:
        """Return the belief with its covariance times ``factor``, around the same mean.

        A factor of zero leaves no graph: the slope of a standard deviation at zero is infinite, and 0 * inf is NaN.
        """
        if factor == 1:
            return self
        if not factor:
            return replace(self, covariance=self._no_covariance())
        if isinstance(self.covariance, Tensor):
            return replace(self, covariance=factor * self.covariance)
        times = lambda t: factor * t
        return replace(self, covariance=self._map(times, times))  # computed once, for however many factors

    def _map(self, each: Callable[[Tensor], Tensor], blocks: Callable[[Tensor], Tensor]) -> Deferred:
        """Return what ``each`` makes of variances and ``blocks`` of covariances, computed when they are needed."""
        return Deferred(lambda: each(self.variance), lambda: blocks(self.cov), lambda: each(self.centred_variance))

    def _no_covariance(self) -> Tensor | Deferred:
        """Return a covariance of zeros, which has no graph."""
        if isinstance(self.covariance, Tensor):
            return torch.zeros_like(self.covariance)
        each = lambda: torch.zeros_like(self.mean)
        return Deferred(each, lambda: self.mean.new_zeros(self._cov_shape), each)

    @property
    def marginal(self) -> FunctionGaussian:
        """The belief about each input alone, without the covariance between inputs: ``cov`` is (B, C, C)."""
        # Not cached for the belief itself: a reference to itself would keep its covariance until garbage is collected.
        return self._each_input if self.joint else self

    @cached_property
    def _each_input(self) -> FunctionGaussian:
        places = torch.arange(self.mean.numel(), device=self.mean.device).reshape(self.mean.shape)
        rows = self._outputs_last(places)  # (B, [T,] C), or (B, H, W, C): those of one datum together
        blocks = self.cov.reshape(places.numel(), -1)[rows.unsqueeze(-1), rows.unsqueeze(-2)]
        return FunctionGaussian(self.mean, blocks, outputs_dim=self.outputs_dim)

    def as_images(self, form: ImageForm) -> FunctionGaussian:
        """Return the belief about pixels (B, H W, C) as one about images (B, C, H, W); joint if it was."""
        mean = form.outputs(self.mean)
        if self.joint:
            order = self.cov.permute(0, 2, 1, 3, 5, 4)
            return FunctionGaussian(mean, order.reshape(*mean.shape, *mean.shape), joint=True, outputs_dim=1)
        return FunctionGaussian(mean, self._map(form.outputs, form.blocks), outputs_dim=1)

    @property
    def pixels(self) -> FunctionGaussian:
        """The belief about images (B, C, H, W) as one about each of their pixels (B, H W, C); never joint."""
        each = self.marginal
        return FunctionGaussian(pixels(each.mean), each._map(pixels, lambda cov: cov.flatten(1, -3)))

    @property
    def std(self) -> Tensor:
        """The standard deviation of each output, (B, [T,] C)."""
        return self.variance.sqrt()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw outputs. Draws of a joint belief are correlated between inputs, those of others are independent.

        Args:
            n: The number of draws.
            generator: The source of random numbers; None uses PyTorch's global one.

        Returns:
            The draws, (n, *mean.shape).

        Raises:
            UnsupportedError: If ``n`` is not a positive integer.
            NumericalError: If the covariance has a negative eigenvalue beyond rounding.

        >>> FunctionGaussian(torch.zeros(2, 1), torch.ones(2, 1, 1)).sample(5).shape
        torch.Size([5, 2, 1])
        """
        integer().check("n", n)
        shape = self.mean.shape if self.joint else self._outputs_last(self.mean).shape
        size = shape.numel() if self.joint else shape[-1]
        if self.joint:
            what = f"a draw of {size} outputs together"
            refuse_large_result(ROOT_COPIES * 8 * size**2, self.mean.device, what, "Draw at fewer inputs at a time")
        cov = self.cov.reshape(-1, size, size)
        eps = normal((n, len(cov), size), generator, self.mean)

        def drawn(part: slice) -> Tensor:
            return torch.einsum("bcd,nbd->nbc", psd_root(cov[part]), eps[:, part])

        parts = (drawn(part) for part in chunks(len(cov), ROOT_COPIES * 8 * size**2, cov.device))
        draws = (concat_chunks(parts, len(cov), 1) if len(cov) else eps).reshape(n, *shape)
        return self.mean + (draws if self.joint or self.outputs_dim == -1 else draws.movedim(-1, self.outputs_dim + 1))


def psd_root(matrix: Tensor) -> Tensor:
    """Return the symmetric root R with R R = matrix of a positive semi-definite matrix; negative rounding becomes zero.

    It has a gradient where eigenvalues repeat, which eigenvectors do not have.
    """
    return _SymmetricRoot.apply(matrix.double()).to(matrix.dtype)  # type: ignore[no-any-return, no-untyped-call]


class _SymmetricRoot(torch.autograd.Function):
    """R = V diag(s) Vᵀ with the slope dR = V [(Vᵀ dA V)_ij / (s_i + s_j)] Vᵀ, from dR R + R dR = dA.

    The slope is zero between two directions without variance: where dA changes none of them, that is exact.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = eigh(matrix)
        _refuse_below(values, -ROUNDING_SHARE * values.abs().amax(-1, keepdim=True), "eigenvalue")
        roots = values.clamp_min(0).sqrt()
        ctx.save_for_backward(roots, vectors)
        return (vectors * roots.unsqueeze(-2)) @ vectors.mT

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        roots, vectors = ctx.saved_tensors
        sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
        turned = vectors.mT @ slope @ vectors
        return vectors @ torch.where(sums > 0, turned / sums, 0.0) @ vectors.mT  # type: ignore[no-any-return]


def _without_negative_rounding(variance: Tensor) -> Tensor:
    """Return the variances with negative rounding set to zero; raise if one is more negative than that."""
    top = variance.detach().amax() if variance.numel() else variance.new_zeros(())
    if not bool(top <= 0):  # without a positive variance there is nothing to compare with
        _refuse_below(variance, -ROUNDING_SHARE * top, "variance")
    return variance.clamp_min(0)


def _refuse_below(values: Tensor, floor: Tensor, what: str) -> None:
    """Raise if a value is below the floor or NaN."""
    if not bool((values >= floor).all()):
        raise NumericalError(
            f"a covariance has the {what} {values.min().item():.3g} beside {values.max().item():.3g}; "
            "expected none below zero. The posterior is broken: refit it in float64."
        )


NORMAL_NODES = 512  # they integrate a sigmoid of logits with a standard deviation of up to 30 to about 1e-9


@lru_cache(maxsize=4)
def normal_rule(count: int = NORMAL_NODES) -> tuple[Tensor, Tensor]:
    """Return nodes of a standard normal and their weights, (count,) each, in float64.

    The trapezoidal rule converges faster than any power for smooth integrands.
    """
    nodes = torch.linspace(-NORMAL_REACH, NORMAL_REACH, count, dtype=torch.float64)
    weights = torch.exp(-0.5 * nodes.square())
    return nodes, weights / weights.sum()


def normal_nodes(
    belief: FunctionGaussian, rows: slice = slice(None), count: int = NORMAL_NODES
) -> tuple[Tensor, Tensor]:
    """Return values of f (B, C, count) at some of the inputs, and their weights (count,), which sum to one."""
    nodes, weights = normal_rule(count)
    nodes, weights = nodes.to(belief.mean), weights.to(belief.mean)
    return belief.mean[rows].unsqueeze(-1) + belief.std[rows].unsqueeze(-1) * nodes, weights


def by_nodes(
    belief: FunctionGaussian,
    compute: Callable[[Tensor, Tensor, slice], Tensor],
    count: int = NORMAL_NODES,
    numbers: int = 4 * NORMAL_NODES,
) -> Tensor:
    """Return what ``compute(f, weights, rows)`` returns for all inputs, (B, ...), a few at a time.

    It gets what ``normal_nodes`` returns for some inputs, and takes ``numbers`` for each output of an input.
    """
    mean = belief.mean
    each = mean.element_size() * numbers * mean[:1].numel()
    parts = (compute(*normal_nodes(belief, rows, count), rows) for rows in chunks(len(mean), each, mean.device))
    return concat_chunks(parts, len(mean))


@dataclass(frozen=True, eq=False)
class FunctionSamples:
    """2 K functions of equal weight, ``factor`` · (mean ± ``width`` · step) for K steps; the mean alone if K is zero.

    A step and its opposite are one draw: errors that are odd in the step cancel, and both cost one product with the
    Jacobian. Shapes: ``mean`` (B, [T,] C), ``steps`` (K, B, [T,] C). Beliefs with the same ``steps`` tensor share
    their draws.

    >>> FunctionSamples.of(torch.zeros(1, 2), torch.tensor([[[1.0, 2.0]]])).functions(slice(0, 1))[:, 0]
    tensor([[ 1.,  2.],
            [-1., -2.]])
    """

    mean: Tensor
    steps: Tensor
    spreads: Tensor  # (K, B, [T]), the variance between the outputs of each step
    factor: float = 1.0
    width: float = 1.0

    @classmethod
    def of(cls, mean: Tensor, steps: Tensor) -> FunctionSamples:
        """Return the functions mean ± step for all steps."""
        return cls(mean, steps, steps.var(-1, correction=0) if len(steps) else steps.new_zeros(steps.shape[:-1]))

    @property
    def pairs(self) -> int:
        """K, the number of draws; zero where the functions do not differ."""
        return len(self.steps) if self.width else 0

    @property
    def count(self) -> int:
        """The number of functions."""
        return max(1, 2 * self.pairs)

    @property
    def scale(self) -> float:
        """The number that steps are multiplied by."""
        return self.factor * self.width

    def functions(self, pairs: slice, width: Tensor | None = None) -> Tensor:
        """Return the functions of some draws, (2 k, B, [T,] C): those with plus before those with minus.

        The steps of each input are multiplied by ``width`` (B, [T,] 1).
        """
        steps, mean = self.steps[pairs], self.factor * self.mean
        out = steps.new_empty(2, *steps.shape)
        by = torch.ones_like(mean[..., :1]) if width is None else width
        torch.addcmul(mean, steps, by, value=self.scale, out=out[0])
        torch.addcmul(mean, steps, by, value=-self.scale, out=out[1])
        return out.flatten(0, 1)

    def scaled(self, factor: float) -> FunctionSamples:
        """Return the belief about ``factor`` times the outputs."""
        return replace(self, factor=self.factor * factor)

    def moved(self, by: Tensor) -> FunctionSamples:
        """Return the belief about the outputs plus ``by``, which has a number for each output of a datum, (C,)."""
        return replace(self, mean=self.mean + by.to(self.mean) / self.factor)

    def widened(self, factor: float) -> FunctionSamples:
        """Return the belief with its covariance times ``factor``, around the same mean."""
        return replace(self, width=self.width * factor**0.5)

    def rows(self, rows: Tensor | tuple[Tensor, ...]) -> FunctionSamples:
        """Return the belief about some of the data: inputs (n,), or inputs and tokens, (n,) each."""
        index = rows if isinstance(rows, tuple) else (rows,)
        inner: Any = (slice(None), *index)
        return replace(self, mean=self.mean[index], steps=self.steps[inner], spreads=self.spreads[inner])

    @staticmethod
    def concat(parts: Sequence[FunctionSamples]) -> FunctionSamples:
        """Return the belief about all data, from those about consecutive data."""
        mean, steps = torch.cat([part.mean for part in parts]), torch.cat([part.steps for part in parts], 1)
        return replace(parts[0], mean=mean, steps=steps, spreads=torch.cat([part.spreads for part in parts], 1))

    @property
    def gaussian(self) -> FunctionGaussian:
        """The Gaussian belief with the mean and the covariance of the functions."""
        steps = self.scale * self.steps
        return FunctionGaussian.of_deviations(self.factor * self.mean, steps, max(1, len(steps)), joint=False)


Compute = Callable[[Inputs], Sequence[Tensor]]


def isolate(compute: Compute, x: Inputs) -> tuple[Tensor, ...]:
    """Return what ``compute`` returns for x, differentiable once in the tensors of x that require a gradient.

    The graph inside leads to copies of these tensors, so that a backward pass reaches nothing else.

    Args:
        compute: Returns tensors for inputs in the form of ``x``.
        x: The inputs.

    >>> weight, x = torch.ones(2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    >>> isolate(lambda x: [x @ weight], x)[0].sum().backward()
    >>> x.grad.sum(), weight.grad
    (tensor(6.), None)
    """
    if not wants_slopes(x):
        return tuple(compute(x))
    return _Isolated.apply(compute, x, *(t for t in tensors_in(x) if t.requires_grad))  # type: ignore[no-any-return]


def differentiable_beliefs(
    compute: Callable[[Inputs], Sequence[FunctionGaussian]], x: Inputs
) -> Sequence[FunctionGaussian]:
    """Return the beliefs that ``compute`` returns for x; differentiable in x if x wants slopes.

    A covariance that is computed when it is needed is computed anew with its graph.
    """
    if not wants_slopes(x):
        return compute(x)
    tensors: list[Tensor] = []
    forms: list[FunctionGaussian] = []

    def whole(inner: Inputs) -> list[Tensor]:
        forms.extend(compute(inner))
        covariances = (form.covariance for form in forms)
        return [*(form.mean for form in forms), *(each for each in covariances if isinstance(each, Tensor))]

    tensors.extend(isolate(whole, x))
    means, covariances = tensors[: len(forms)], iter(tensors[len(forms) :])
    later = lambda i, part: lambda: isolate(lambda inner: [part(compute(inner)[i])], x)[0]
    return [
        FunctionGaussian(
            mean,
            next(covariances)
            if isinstance(form.covariance, Tensor)
            else Deferred(
                later(i, lambda b: b.variance), later(i, lambda b: b.cov), later(i, lambda b: b.centred_variance)
            ),
            form.joint,
        )
        for i, (form, mean) in enumerate(zip(forms, means, strict=True))
    ]


class _Isolated(torch.autograd.Function):
    """A computation whose graph is kept inside it."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, x: Inputs, *leaves: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        copies = [leaf.detach().requires_grad_() for leaf in leaves]
        given = iter(copies)
        with torch.enable_grad():
            inner = map_tensors(x, lambda t: next(given) if t.requires_grad else t)
            results = tuple(compute(inner))
        ctx.copies, ctx.results = copies, results
        return tuple(result.detach() for result in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = [(r, g) for r, g in zip(ctx.results, grads, strict=True) if r.requires_grad]
        if not pairs:
            return None, None, *(torch.zeros_like(copy) for copy in ctx.copies)
        results, seeds = zip(*pairs, strict=True)
        slopes = torch.autograd.grad(results, ctx.copies, seeds, retain_graph=True, materialize_grads=True)
        return None, None, *slopes
