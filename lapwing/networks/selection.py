"""Which weights are uncertain. A selection is data; the tangent model lives on the selected weights alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.networks.graph import DATA_EDGE, MOVES, Graph, Node, leaf_name
from lapwing.networks.rules import Uses


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
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @cached_property
    def slices(self) -> Mapping[str, slice]:
        ends = torch.tensor((0, *self.sizes)).cumsum(0).tolist()
        return {name: slice(a, b) for name, a, b in zip(self.names, ends[:-1], ends[1:], strict=True)}

    @property
    def total(self) -> int:
        """The size of all named parameters together."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """P: the number of uncertain weights."""
        return self.total if self.index is None else len(self.index)

    def picked(self, full: Tensor) -> Tensor:
        """From all entries (..., total) to theta (..., P)."""
        return full if self.index is None else full[..., self.index.to(full.device)]

    def filled(self, theta: Tensor) -> Tensor:
        """From theta (..., P) to all entries (..., total), zero where not selected."""
        if self.index is None:
            return theta
        full = theta.new_zeros(*theta.shape[:-1], self.total)
        full[..., self.index.to(theta.device)] = theta
        return full

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """theta (..., P) as parameters by name, (..., *shape)."""
        full = self.filled(theta)
        shapes = dict(zip(self.names, self.shapes, strict=True))
        return {name: full[..., part].unflatten(-1, shapes[name] or (1,)) if shapes[name] else full[..., part][..., 0]
                for name, part in self.slices.items()}  # fmt: skip

    def layer_of(self) -> tuple[str, ...]:
        """The module that owns each parameter: weight and bias of one layer share it."""
        return tuple(name.rpartition(".")[0] for name in self.names)


class Weights(Protocol):
    """A rule that selects weights."""

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        """The parameters that must be in the graph before the choice can be made."""
        ...

    def choose(self, model: nn.Module, graph: Graph, uses: Uses) -> Selection: ...


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.is_floating_point()}


def _selection(model: nn.Module, names: tuple[str, ...], index: Tensor | None = None) -> Selection:
    tensors = _named(model)
    return Selection(names, tuple(tuple(tensors[name].shape) for name in names), index)


@dataclass(frozen=True)
class _All:
    """Every parameter that requires a gradient."""

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        names = tuple(name for name, p in _named(model).items() if p.requires_grad)
        if not names:
            raise ModelError(
                "no parameter of the model requires a gradient, so none is uncertain; "
                "call model.requires_grad_(True), or choose weights with last_layer or named(pattern)."
            )
        return names

    def choose(self, model: nn.Module, graph: Graph, uses: Uses) -> Selection:
        return _selection(model, self.needs(model))


@dataclass(frozen=True)
class _LastLayer:
    """The linear map nearest to the output, with its bias, as the graph shows it.

    Dropout, flatten, pooling or a reshape after it do not matter. Several heads that reach the output
    side by side are taken together.
    """

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(_named(model))

    def choose(self, model: nn.Module, graph: Graph, uses: Uses) -> Selection:
        maps: dict[object, tuple[str, ...]] = dict(uses.strangers)  # a head without a rule is a head all the same
        for use in uses.uses:
            if use.form.kind != "dense":
                maps[use.node] = (*maps.get(use.node, ()), use.name)
        names_of = {id(p): name for name, p in _named(model).items()}
        for node in graph.nodes:  # a product with a weight that is computed first: weight norm, a cosine head
            if node.name() in DATA_EDGE and node not in maps:
                sides = [e[0] for i, e in enumerate(node.next_functions) if i != DATA_EDGE[node.name()] and e[0]]
                computed = self._leaves([s for s in sides if leaf_name(s, names_of) is None], names_of)
                if computed:
                    maps[node] = computed
        frontier = self._frontier(graph, maps)
        if not frontier:
            raise ModelError(
                "no linear map of a parameter was found on the way from the output; "
                "choose the weights by name with named(pattern)."
            )
        chosen = {name for node in frontier for name in maps[node]}
        chosen |= {use.name for use in uses.uses if use.node in frontier}
        # A bias added apart sits between the output and its product.
        near = set(self._above(graph, frontier))
        for use in uses.uses:
            if use.node in near and use.form.kind == "dense" and use.node.name() == "AddBackward0":
                chosen.add(use.name)
        names = tuple(name for name in _named(model) if name in chosen)
        return _selection(model, names)

    @staticmethod
    def _leaves(nodes: list[Node], names_of: Mapping[int, str]) -> tuple[str, ...]:
        """The parameters at the end of every path from these nodes."""
        found, seen, stack = [], set(nodes), list(nodes)
        while stack:
            node = stack.pop()
            name = leaf_name(node, names_of)
            if name is not None:
                found.append(name)
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append(child)
        return tuple(found)

    @staticmethod
    def _frontier(graph: Graph, maps: Mapping[object, object]) -> list[object]:
        """Maps met first on some path from the output and not upstream of another such map."""
        first, seen, stack = [], set(), [graph.nodes[0]]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in maps:
                first.append(node)
            else:
                stack.extend(child for child, _ in node.next_functions if child is not None)
        upstream: set[object] = set()
        stack = [child for node in first for child, _ in node.next_functions if child is not None]
        while stack:
            node = stack.pop()
            if node not in upstream:
                upstream.add(node)
                stack.extend(child for child, _ in node.next_functions if child is not None)
        return [node for node in first if node not in upstream]

    @staticmethod
    def _above(graph: Graph, frontier: list[object]) -> list[object]:
        """Sums that add something straight to the output of a frontier node."""
        below = set(frontier)
        found = []
        for node in reversed(graph.nodes):
            children = [child for child, _ in node.next_functions if child is not None]
            if any(child in below for child in children):
                if node.name() in MOVES:
                    below.add(node)
                elif node.name() == "AddBackward0":
                    found.append(node)
        return found


@dataclass(frozen=True)
class _Named:
    """Parameters whose full name matches a regular expression, frozen ones included."""

    pattern: str

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        try:
            names = tuple(name for name in _named(model) if re.search(self.pattern, name))
        except re.error as error:
            raise ModelError(f"{self.pattern!r} is no regular expression: {error}.") from error
        if not names:
            raise ModelError(
                f"no parameter name matches {self.pattern!r}; the model has {', '.join(list(_named(model))[:20])}."
            )
        return names

    def choose(self, model: nn.Module, graph: Graph, uses: Uses) -> Selection:
        return _selection(model, self.needs(model))


@dataclass(frozen=True, eq=False)
class _Subnetwork:
    """Single entries of the flat vector of all weights that require a gradient."""

    index: Tensor

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        return _All().needs(model)

    def choose(self, model: nn.Module, graph: Graph, uses: Uses) -> Selection:
        whole = _selection(model, self.needs(model))
        index = self.index.nonzero()[:, 0] if self.index.dtype == torch.bool else self.index.long()
        if self.index.dtype == torch.bool and len(self.index) != whole.size:
            raise ModelError(f"the mask has {len(self.index)} entries; the model has {whole.size} weights.")
        if not len(index) or int(index.min()) < 0 or int(index.max()) >= whole.size:
            raise ModelError(f"subnetwork indices must be in 0..{whole.size - 1} and at least one; got {len(index)}.")
        index = torch.unique(index)
        if len(index) != len(self.index) and self.index.dtype != torch.bool:
            raise ModelError("subnetwork indices repeat; give each weight once.")
        names, parts = [], []
        start = 0
        for name, part in whole.slices.items():  # keep only parameters with a selected entry
            mine = index[(index >= part.start) & (index < part.stop)]
            if len(mine):
                names.append(name)
                parts.append(mine - part.start + start)
                start += part.stop - part.start
        return _selection(model, tuple(names), torch.cat(parts))


all_weights = _All()
last_layer = _LastLayer()


def named(pattern: str) -> Weights:
    """Parameters whose name matches the regular expression ``pattern`` (LoRA weights, one block, ...)."""
    return _Named(pattern)


def subnetwork(index: Tensor) -> Weights:
    """Single weights: positions in, or a mask over, the flat vector of weights that require a gradient."""
    return _Subnetwork(torch.as_tensor(index))
