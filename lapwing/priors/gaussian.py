"""Gaussian priors over the weights. A number or tensor is always a precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.errors import NumericalError, UnsupportedError
from lapwing.networks.blocks import Block
from lapwing.networks.selection import Selection

Precisions = float | Tensor | Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Prior:
    """theta ~ N(mean, diag(precision)^-1), with one precision for all, for each layer, or for each weight.

    A prior made by ``isotropic``, ``per_layer`` or ``diagonal`` is bound to a selection by ``bound``; only then
    are its sizes known and checked.
    """

    kind: str
    precision: Precisions
    mean: float | Tensor = 0.0
    selection: Selection | None = None
    layers: tuple[str, ...] = ()

    def bound(self, selection: Selection, like: Tensor) -> Prior:
        """The prior for these weights, on the device of ``like``; its numbers are float64 whatever the network is."""
        like = torch.empty(0, dtype=torch.float64, device=like.device)
        layers = tuple(dict.fromkeys(selection.layer_of()))
        precision = self._expanded(selection, layers, like)
        if not bool(torch.isfinite(precision).all()) or not bool((precision > 0).all()):
            raise NumericalError(
                f"prior precisions run from {precision.min().item():.3g} to {precision.max().item():.3g}; "
                "expected positive, finite numbers."
            )
        mean = self.mean
        if isinstance(mean, Tensor):
            mean = mean.detach().to(like).reshape(-1)
            if mean.numel() not in (1, selection.size):
                raise NumericalError(f"the prior mean has {mean.numel()} entries; expected 1 or {selection.size}.")
        if not bool(torch.isfinite(torch.as_tensor(mean)).all()):
            raise NumericalError("the prior mean holds NaN or infinity; expected finite numbers.")
        return replace(self, precision=precision, mean=mean, selection=selection, layers=layers)

    def _expanded(self, selection: Selection, layers: tuple[str, ...], like: Tensor) -> Tensor:
        given = self.precision
        if isinstance(given, Mapping):
            names = layers if self.kind == "per_layer" else selection.names
            missing, extra = set(names) - set(given), set(given) - set(names)
            if missing or extra:
                raise NumericalError(
                    f"prior precisions by name: missing {sorted(missing)}, unknown {sorted(extra)}; "
                    f"expected exactly {list(names)}."
                )
            values = torch.stack([torch.as_tensor(given[name], dtype=like.dtype, device=like.device) for name in names])
            if self.kind == "diagonal":
                return selection.picked(values.repeat_interleave(torch.tensor(selection.sizes, device=like.device)))
            return values
        values = torch.as_tensor(given, dtype=like.dtype, device=like.device)
        size = {"isotropic": 1, "per_layer": len(layers), "diagonal": selection.size}[self.kind]
        if values.numel() not in (1, size):
            raise NumericalError(
                f"a {self.kind} prior got {values.numel()} precisions; expected 1 or {size}"
                + (f", one for each of {', '.join(layers)}." if self.kind == "per_layer" else ".")
            )
        return values.reshape(()) if self.kind == "isotropic" else values.reshape(-1).expand(size)

    def with_precision(self, precision: Tensor) -> Prior:
        """The same prior with other precisions, of the same shape."""
        return replace(self, precision=precision)

    @property
    def values(self) -> Tensor:
        """The precisions: (), (layers,) or (P,)."""
        assert isinstance(self.precision, Tensor)
        return self.precision

    @cached_property
    def group(self) -> Tensor | None:
        """For each weight the number of its layer (P,); only for a prior by layer."""
        if self.kind != "per_layer":
            return None
        selection = self._selection
        number = {layer: i for i, layer in enumerate(self.layers)}
        numbers = torch.tensor([number[layer] for layer in selection.layer_of()])
        return selection.picked(numbers.repeat_interleave(torch.tensor(selection.sizes))).to(self.values.device)

    @property
    def _selection(self) -> Selection:
        if self.selection is None:
            raise UnsupportedError("this prior is not bound to weights yet; use it through fit().")
        return self.selection

    @property
    def vector(self) -> Tensor:
        """The precision of every weight, (P,)."""
        if self.kind == "isotropic":
            return self.values.expand(self._selection.size)
        return self.values if self.group is None else self.values[self.group]

    def on(self, block: Block) -> Tensor:
        """The precision on a block: a scalar where it is constant, else in the block's own form."""
        if self.kind == "isotropic":
            return self.values
        if self.kind == "per_layer":
            mine = {layer for name, layer in zip(self._selection.names, self._selection.layer_of(), strict=True)
                    if name in block.names}  # fmt: skip
            if len(mine) == 1:
                return self.values[self.layers.index(mine.pop())]
        arranged = block.arrange(self._selection.split(self.vector))
        first = arranged.reshape(-1)[0]
        return first if bool((arranged.detach() == first.detach()).all()) else arranged

    def logdet(self) -> Tensor:
        """The log-determinant of the precision."""
        if self.kind == "isotropic":
            return self._selection.size * self.values.log()
        return self._counts @ self.values.log()

    def penalty(self, theta: Tensor) -> Tensor:
        """(theta - mean)ᵀ A (theta - mean)."""
        return self._squares(theta) @ self.values.reshape(-1)

    @cached_property
    def _counts(self) -> Tensor:
        if self.group is None:
            return torch.ones_like(self.values).reshape(-1)
        return torch.bincount(self.group, minlength=len(self.layers)).to(self.values)

    def _squares(self, theta: Tensor) -> Tensor:
        """Sums of squares of the weights that share a precision."""
        squares = (theta.to(self.values) - self.mean).square()
        if self.kind == "isotropic":
            return squares.sum().reshape(1)
        if self.group is None:
            return squares
        return torch.zeros_like(self.values).index_add(0, self.group, squares)


def isotropic(precision: float | Tensor = 1.0, mean: float | Tensor = 0.0) -> Prior:
    """One precision for all weights."""
    return Prior("isotropic", precision, mean)


def per_layer(precisions: Precisions = 1.0, mean: float | Tensor = 0.0) -> Prior:
    """One precision for each layer: a number for all, one for each, or a mapping from layer names."""
    return Prior("per_layer", precisions, mean)


def diagonal(precisions: Precisions = 1.0, mean: float | Tensor = 0.0) -> Prior:
    """One precision for each weight: a number, a vector (P,), or a mapping from parameter names."""
    return Prior("diagonal", precisions, mean)
