"""How weights share precisions: one for all of them, one for each group of parameters, or one for each weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lapwing.core.latest import Latest
from lapwing.errors import NumericalError
from lapwing.networks.jacobians import Block
from lapwing.networks.selection import Selection


class Sharing(Protocol):
    """A rule by which the weights of a selection share precisions: ``values`` are (), (groups,) or (P,)."""

    @property
    def selection(self) -> Selection: ...

    @property
    def is_single(self) -> bool:
        """Whether all weights share one precision."""
        ...

    @property
    def members(self) -> tuple[str, ...]:
        """The group of each parameter; empty without groups."""
        ...

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups, in the order of the precisions; empty without groups."""
        ...

    @property
    def shape(self) -> torch.Size:
        """The shape of the precisions."""
        ...

    def over(self, selection: Selection) -> Sharing:
        """Return the same sharing for another selection of the same parameters."""
        ...

    def named(self, precisions: Mapping[str, float], like: Tensor) -> Tensor:
        """Return precisions that were given by name, in the shape of ``shape``."""
        ...

    def spread(self, values: Tensor) -> Tensor:
        """Return the precision of every weight, (P,)."""
        ...

    def summed(self, each: Tensor) -> Tensor:
        """Sum over the weights that share a precision: (P,) to (1,), (groups,) or (P,)."""
        ...

    def counts(self, device: torch.device) -> Tensor:
        """Return how many weights share each precision, float64: (1,), (groups,) or (P,)."""
        ...

    def logdet(self, values: Tensor) -> Tensor:
        """Return the sum of the log-precisions of all weights."""
        ...

    def constant_on(self, block: Block, values: Tensor) -> Tensor | None:
        """Return the one precision that all weights of a block share by construction, or None."""
        ...


@dataclass(frozen=True, eq=False)
class SharedByAll:
    """One precision for all weights."""

    selection: Selection
    is_single: ClassVar[bool] = True
    members: ClassVar[tuple[str, ...]] = ()
    groups: ClassVar[tuple[str, ...]] = ()
    shape: ClassVar[torch.Size] = torch.Size()

    def over(self, selection: Selection) -> SharedByAll:
        return SharedByAll(selection)

    def named(self, precisions: Mapping[str, float], like: Tensor) -> Tensor:
        raise NumericalError(f"one precision for all weights got {len(precisions)} names; expected a number.")

    def spread(self, values: Tensor) -> Tensor:
        return values.expand(self.selection.size)

    def summed(self, each: Tensor) -> Tensor:
        return each.sum().reshape(1)

    def counts(self, device: torch.device) -> Tensor:
        return torch.full((1,), self.selection.size, dtype=torch.float64, device=device)

    def logdet(self, values: Tensor) -> Tensor:
        return self.selection.size * values.log()

    def constant_on(self, block: Block, values: Tensor) -> Tensor:
        return values


@dataclass(frozen=True, eq=False)
class SharedByGroup:
    """One precision for each group of parameters. ``members`` holds the group of each parameter."""

    selection: Selection
    members: tuple[str, ...]
    is_single: ClassVar[bool] = False

    @cached_property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.members))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.groups),))

    def over(self, selection: Selection) -> SharedByGroup:
        return replace(self, selection=selection)

    def named(self, precisions: Mapping[str, float], like: Tensor) -> Tensor:
        return stacked(precisions, self.groups, like)

    def spread(self, values: Tensor) -> Tensor:
        return values[self._group_of_weights(values.device)]

    def summed(self, each: Tensor) -> Tensor:
        total = each.new_zeros(len(self.groups))
        if self.selection.index is not None:
            return total.index_add(0, self._group_of_weights(each.device), each)
        # One sum for each parameter: an index_add of single entries is slow on a GPU.
        sums = torch.stack([each[part].sum() for part in self.selection.slices.values()])
        return total.index_add(0, torch.tensor(self._numbers, device=each.device), sums)

    def counts(self, device: torch.device) -> Tensor:
        return self._counts.at(
            device, lambda: self.summed(torch.ones(self.selection.size, dtype=torch.float64, device=device))
        )

    def logdet(self, values: Tensor) -> Tensor:
        return self.counts(values.device) @ values.log()

    def constant_on(self, block: Block, values: Tensor) -> Tensor | None:
        pairs = zip(self.selection.names, self._numbers, strict=True)
        numbers = {number for name, number in pairs if name in block.names}
        return values[numbers.pop()] if len(numbers) == 1 else None

    @cached_property
    def _numbers(self) -> list[int]:
        """The number of the group of each parameter."""
        order = {name: i for i, name in enumerate(self.groups)}
        return [order[name] for name in self.members]

    def _group_of_weights(self, device: torch.device) -> Tensor:
        """Return the number of the group of each weight, (P,)."""
        return self._indices.at(device, lambda: self._computed_indices().to(device))

    def _computed_indices(self) -> Tensor:
        numbers = torch.tensor(self._numbers).repeat_interleave(torch.tensor(self.selection.sizes))
        return self.selection.picked(numbers)

    @cached_property
    def _indices(self) -> Latest[torch.device, Tensor]:
        return Latest()

    @cached_property
    def _counts(self) -> Latest[torch.device, Tensor]:
        return Latest()


@dataclass(frozen=True, eq=False)
class NotShared:
    """One precision for each weight."""

    selection: Selection
    is_single: ClassVar[bool] = False
    members: ClassVar[tuple[str, ...]] = ()
    groups: ClassVar[tuple[str, ...]] = ()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.selection.size,))

    def over(self, selection: Selection) -> NotShared:
        return NotShared(selection)

    def named(self, precisions: Mapping[str, float], like: Tensor) -> Tensor:
        values = stacked(precisions, self.selection.names, like)
        return self.selection.picked(values.repeat_interleave(torch.tensor(self.selection.sizes, device=like.device)))

    def spread(self, values: Tensor) -> Tensor:
        return values

    def summed(self, each: Tensor) -> Tensor:
        return each

    def counts(self, device: torch.device) -> Tensor:
        return torch.ones(self.selection.size, dtype=torch.float64, device=device)

    def logdet(self, values: Tensor) -> Tensor:
        return values.log().sum()

    def constant_on(self, block: Block, values: Tensor) -> None:
        return None


def stacked(precisions: Mapping[str, float], names: tuple[str, ...], like: Tensor) -> Tensor:
    """Return precisions given by name in the order of ``names``; refuse missing and unknown names."""
    missing, unknown = set(names) - set(precisions), set(precisions) - set(names)
    if missing or unknown:
        raise NumericalError(
            f"prior precisions by name: missing {sorted(missing)}, unknown {sorted(unknown)}; "
            f"expected exactly {list(names)}."
        )
    scalars = [torch.as_tensor(precisions[name], dtype=like.dtype, device=like.device) for name in names]
    return torch.stack([scalar.reshape(()) for scalar in scalars])
