"""The selected weights: their names, shapes and order, and the rules that select them: all, by name, single entries.

The tangent model has the selected weights alone. The rule for the last layer is in ``last_layer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.networks.graph import Graph
from lapwing.runtime.settings import Rule


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
        ends = accumulate(self.sizes)
        return {name: slice(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True)}

    @property
    def total(self) -> int:
        """The number of entries of all named parameters together."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """P: the number of uncertain weights."""
        return self.total if self.index is None else len(self.index)

    @cached_property
    def counts(self) -> Mapping[str, int] | None:
        """The number of chosen entries of each parameter; None if all are chosen."""
        if self.index is None:
            return None
        ends = torch.tensor([part.stop for part in self.slices.values()], device=self.index.device)
        parameter = torch.searchsorted(ends, self.index, right=True)
        return dict(zip(self.names, torch.bincount(parameter, minlength=len(ends)).tolist(), strict=True))

    def pick(self, full: Tensor) -> Tensor:
        """Return theta (..., P) from all entries (..., total)."""
        return full if self.index is None else full[..., self.index.to(full.device)]

    def fill(self, theta: Tensor) -> Tensor:
        """Return all entries (..., total) from theta (..., P), zero where not selected."""
        if self.index is None:
            return theta
        full = theta.new_zeros(*theta.shape[:-1], self.total)
        full[..., self.index.to(theta.device)] = theta
        return full

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """Return theta (..., P) as parameters by name, (..., *shape)."""
        full, parts = self.fill(theta), zip(self.slices.items(), self.shapes, strict=True)
        return {name: full[..., part].reshape((*full.shape[:-1], *shape)) for (name, part), shape in parts}

    def layer_of(self) -> tuple[str, ...]:
        """Return the name of the module that has each parameter: weight and bias of one layer share it."""
        return tuple(name.rpartition(".")[0] for name in self.names)


@runtime_checkable
class Weights(Protocol):
    """A rule that selects weights."""

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters that must be in the graph before the choice can be made."""
        ...

    def choose(self, model: nn.Module, graph: Graph) -> Selection:
        """Return the selection, given the graph of the outputs with the uses of the needed parameters."""
        ...


@runtime_checkable
class NeedsNoGraph(Protocol):
    """A rule that reads the names and sizes of the parameters alone."""

    def select(self, model: nn.Module) -> Selection:
        """Return the selection."""
        ...


def float_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters that are real or complex numbers, by name."""
    return {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}


def require_real(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names; raise if one of these parameters is complex, since the posterior is over real numbers."""
    tensors = dict(model.named_parameters())
    for name in names:
        if tensors[name].is_complex():
            raise ModelError(
                f"the parameter {name!r} is complex ({tensors[name].dtype}); expected real numbers. Keep it as a real "
                "parameter with a last dimension of 2 and call torch.view_as_complex in forward, or leave it out: "
                "requires_grad_(False) on it, or weights=lw.named(...)."
            )
    return names


def make_selection(model: nn.Module, names: tuple[str, ...], index: Tensor | None = None) -> Selection:
    """Return the selection of the named parameters; raise if one of them is complex."""
    tensors = float_parameters(model)
    return Selection(require_real(model, names), tuple(tuple(tensors[name].shape) for name in names), index)


@dataclass(frozen=True)
class AllWeights:
    """Every parameter that requires a gradient.

    Raises:
        ModelError: if no parameter requires a gradient.

    >>> import lapwing as lw
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> x, y = torch.randn(10, 3), torch.randn(10, 2)
    >>> posterior = lw.fit(net, [(x, y)], "regression", weights=lw.all_weights)
    >>> posterior.network.selection.size
    26
    """

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        names = tuple(name for name, p in float_parameters(model).items() if p.requires_grad)
        if not names:
            raise ModelError(
                "no parameter of the model requires a gradient, so none is uncertain; "
                "call model.requires_grad_(True), or choose weights with last_layer or named(pattern)."
            )
        return require_real(model, names)

    def choose(self, model: nn.Module, graph: Graph) -> Selection:
        return self.select(model)

    def select(self, model: nn.Module) -> Selection:
        return make_selection(model, self.needs(model))


@dataclass(frozen=True)
class Named:
    """Parameters whose full name matches a regular expression, frozen parameters included."""

    pattern: str

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        try:
            names = tuple(name for name in float_parameters(model) if re.search(self.pattern, name))
        except re.error as error:
            raise ModelError(
                f"{self.pattern!r} is no regular expression: {error}; expected one, such as '^0'."
            ) from error
        if not names:
            raise ModelError(
                f"no parameter name matches {self.pattern!r}; the model has "
                f"{', '.join(list(float_parameters(model))[:20])}."
            )
        return require_real(model, names)

    def choose(self, model: nn.Module, graph: Graph) -> Selection:
        return self.select(model)

    def select(self, model: nn.Module) -> Selection:
        return make_selection(model, self.needs(model))


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """Single entries of the flat vector of all weights that require a gradient."""

    index: Tensor

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        return all_weights.needs(model)

    def choose(self, model: nn.Module, graph: Graph) -> Selection:
        return self.select(model)

    def select(self, model: nn.Module) -> Selection:
        whole = make_selection(model, self.needs(model))
        index = self.index.nonzero()[:, 0] if self.index.dtype == torch.bool else self.index.long()
        if self.index.dtype == torch.bool and len(self.index) != whole.size:
            raise ModelError(f"the mask has {len(self.index)} entries; expected {whole.size}, one for each weight.")
        if not len(index) or int(index.min()) < 0 or int(index.max()) >= whole.size:
            raise ModelError(f"subnetwork indices must be in 0..{whole.size - 1} and at least one; got {len(index)}.")
        mask = torch.zeros(whole.size, dtype=torch.bool, device=index.device)
        mask[index] = True
        if int(mask.sum()) != len(index):
            raise ModelError("subnetwork indices repeat; give each weight once.")
        parts = {name: part for name, part in whole.slices.items() if bool(mask[part].any())}
        kept = torch.cat([torch.arange(part.start, part.stop, device=index.device) for part in parts.values()])
        # Theta keeps the order of the indices as given, so that vectors of the prior belong to the right weights.
        return make_selection(model, tuple(parts), torch.searchsorted(kept, index))


all_weights = AllWeights()


def named(pattern: str) -> Weights:
    """Select the parameters whose name matches a regular expression: LoRA weights, one block.

    Args:
        pattern: a regular expression, searched for in the full name of every parameter (``"0.weight"``). Frozen
            parameters are selected too.

    Returns:
        A rule for the argument ``weights`` of ``fit``.

    Raises:
        ModelError: in ``fit``, if the pattern is no regular expression or no name matches.

    >>> import lapwing as lw
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> x, y = torch.randn(10, 3), torch.randn(10, 2)
    >>> lw.fit(net, [(x, y)], "regression", weights=lw.named("^2")).network.selection.names
    ('2.weight', '2.bias')
    """
    Rule("a regular expression for names of parameters", lambda v: isinstance(v, str)).check("pattern", pattern)
    return Named(pattern)


def subnetwork(index: Tensor | Sequence[int] | Sequence[bool]) -> Weights:
    """Select single weights, by their positions in the flat vector of all weights that require a gradient.

    Args:
        index: positions (n,), each once, or a mask over all weights. Vectors of the prior and samples of the weights
            have the order in which positions are given; a mask gives rising positions.

    Returns:
        A rule for the argument ``weights`` of ``fit``. Methods that need whole layers (``Kron``, ``EKron``) refuse it;
        use ``Full`` or ``Diagonal``. ``lw.subnetworks`` has rules that choose the positions.

    Raises:
        ModelError: if they are no whole numbers (n,); in ``fit``, if positions repeat, are out of range or are none, or
            if a mask has another length.

    >>> import lapwing as lw
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> x, y = torch.randn(10, 3), torch.randn(10, 2)
    >>> some = lw.subnetwork(torch.tensor([0, 5, 20]))
    >>> lw.fit(net, [(x, y)], "regression", method=lw.Full(), weights=some).network.selection.size
    3
    """
    INDEX.check("index", index)
    return Subnetwork(torch.as_tensor(index))


def _is_index(value: Any) -> bool:
    index = torch.as_tensor(value)
    return index.ndim == 1 and not index.is_floating_point() and not index.is_complex() and not index.is_meta


INDEX = Rule(
    "whole numbers (n,), the positions of weights, or a mask with True or False for each", _is_index, ModelError
)
