"""Which outputs of a network are asked for, and outputs that are images.

Inside the library the pixels of an image (B, C, H, W), or (B, C, D, H, W), are the tokens of a token-level output:
(B, H W, C), in the order of the rows of the image. Outputs and targets are brought into this form where they enter,
results back into that of images where users get them; nothing in between knows images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.errors import DataError
from lapwing.runtime.settings import Rule

if TYPE_CHECKING:
    from lapwing.values.gaussian import FunctionGaussian

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
        total = 1
        for size in self.sizes:
            total *= size
        return total

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
        cls, outputs: Any, tokens: Any, shape: Sequence[int], device: torch.device, image_dims: int = 0
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
            outputs = _checked("outputs", outputs, expected, (1, len(shape) + 1), shape[-1]).to(device)
        if tokens is not None and not token_level:
            raise DataError("tokens were chosen and the outputs are (B, C), without tokens; choose outputs=... alone.")
        if tokens is not None:
            expected = f"numbers of {'pixels' if image_dims else 'tokens'} from 0 on, of shape (S,), or (B, S)"
            tokens = _checked("tokens", tokens, expected, (1, 2)).to(device)
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
    """What a belief is asked for: all or some outputs of each input, with the covariance between inputs if joint."""

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


def _checked(name: str, given: Any, expected: str, dims: tuple[int, ...], size: int | None = None) -> Tensor:
    """Return the numbers as a tensor; raise if they are not whole numbers, out of range, or of another shape."""

    def holds(value: Any) -> bool:
        t = torch.as_tensor(value)
        whole = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
        return whole and t.ndim in dims and t.numel() > 0

    Rule(expected, holds, DataError).check(name, given)
    numbers = torch.as_tensor(given).long()
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or (size is not None and high >= size):
        raise DataError(f"{name} has {high if low >= 0 else low}; expected {expected}.")
    return numbers
