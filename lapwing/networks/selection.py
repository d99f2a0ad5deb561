"""The selected weights: their names, shapes and order. The tangent model has these weights alone.

The rules that select weights are in ``weights.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from lapwing.networks.graph import Graph, Uses


@dataclass(frozen=True, eq=False)
class Selection:
    """Names and shapes of the selected parameters, and the order of the flat vector theta (P,).

    ``index`` picks single entries out of the concatenated parameters; None takes them all.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    index: Tensor | None = None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each parameter."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @cached_property
    def slices(self) -> Mapping[str, slice]:
        """The place of each parameter in the concatenation of all."""
        ends = torch.tensor((0, *self.sizes)).cumsum(0).tolist()
        return {name: slice(a, b) for name, a, b in zip(self.names, ends[:-1], ends[1:], strict=True)}

    @property
    def total(self) -> int:
        """The number of entries of all named parameters together."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """P: the number of uncertain weights."""
        return self.total if self.index is None else len(self.index)

    def picked(self, full: Tensor) -> Tensor:
        """Return theta (..., P) from all entries (..., total)."""
        return full if self.index is None else full[..., self.index.to(full.device)]

    def filled(self, theta: Tensor) -> Tensor:
        """Return all entries (..., total) from theta (..., P), zero where not selected."""
        if self.index is None:
            return theta
        full = theta.new_zeros(*theta.shape[:-1], self.total)
        full[..., self.index.to(theta.device)] = theta
        return full

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """Return theta (..., P) as parameters by name, (..., *shape)."""
        full = self.filled(theta)
        shapes = dict(zip(self.names, self.shapes, strict=True))
        return {name: full[..., part].unflatten(-1, shapes[name] or (1,)) if shapes[name] else full[..., part][..., 0]
                for name, part in self.slices.items()}  # fmt: skip

    def layer_of(self) -> tuple[str, ...]:
        """Return the name of the module that has each parameter: weight and bias of one layer share it."""
        return tuple(name.rpartition(".")[0] for name in self.names)


class Weights(Protocol):
    """A rule that selects weights."""

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters that must be in the graph before the choice can be made."""
        ...

    def choose(self, model: nn.Module, graph: Graph, uses: Uses) -> Selection:
        """Return the selection, given the graph of the outputs and the uses of the needed parameters in it."""
        ...


def float_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters that are real numbers, by name."""
    return {name: p for name, p in model.named_parameters() if p.is_floating_point()}


def selected(model: nn.Module, names: tuple[str, ...], index: Tensor | None = None) -> Selection:
    """Return the selection of the named parameters."""
    tensors = float_parameters(model)
    return Selection(names, tuple(tuple(tensors[name].shape) for name in names), index)
