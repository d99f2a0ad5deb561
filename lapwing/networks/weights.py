"""The rules that select weights: all, the last layer, by name, or single entries."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.networks.graph import Graph, Uses
from lapwing.networks.last_layer import LastLayer
from lapwing.networks.selection import Selection, Weights, float_parameters, selected


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
        return names

    def choose(self, model: nn.Module, graph: Graph, uses: Uses) -> Selection:
        return selected(model, self.needs(model))


@dataclass(frozen=True)
class Named:
    """Parameters whose full name matches a regular expression, frozen parameters included."""

    pattern: str

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        try:
            names = tuple(name for name in float_parameters(model) if re.search(self.pattern, name))
        except re.error as error:
            raise ModelError(f"{self.pattern!r} is no regular expression: {error}.") from error
        if not names:
            raise ModelError(
                f"no parameter name matches {self.pattern!r}; the model has "
                f"{', '.join(list(float_parameters(model))[:20])}."
            )
        return names

    def choose(self, model: nn.Module, graph: Graph, uses: Uses) -> Selection:
        return selected(model, self.needs(model))


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """Single entries of the flat vector of all weights that require a gradient."""

    index: Tensor

    def needs(self, model: nn.Module) -> tuple[str, ...]:
        return all_weights.needs(model)

    def choose(self, model: nn.Module, graph: Graph, uses: Uses) -> Selection:
        whole = selected(model, self.needs(model))
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
            entries = index[(index >= part.start) & (index < part.stop)]
            if len(entries):
                names.append(name)
                parts.append(entries - part.start + start)
                start += part.stop - part.start
        return selected(model, tuple(names), torch.cat(parts))


all_weights = AllWeights()
last_layer = LastLayer()


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
    return Named(pattern)


def subnetwork(index: Tensor) -> Weights:
    """Select single weights, by their positions in the flat vector of all weights that require a gradient.

    Args:
        index: positions (n,), each once, or a mask over all weights.

    Returns:
        A rule for the argument ``weights`` of ``fit``. Methods that need whole layers (``Kron``, ``EKron``) refuse it;
        use ``Full`` or ``Diagonal``.

    Raises:
        ModelError: in ``fit``, if positions repeat, are out of range or are none, or if a mask has another length.

    >>> import lapwing as lw
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> x, y = torch.randn(10, 3), torch.randn(10, 2)
    >>> some = lw.subnetwork(torch.tensor([0, 5, 20]))
    >>> lw.fit(net, [(x, y)], "regression", method=lw.Full(), weights=some).network.selection.size
    3
    """
    return Subnetwork(torch.as_tensor(index))
