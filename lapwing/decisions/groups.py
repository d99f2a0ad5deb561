"""Groups of inputs: the number of each row of a pass, from a function of the inputs or in the order of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lapwing.core.inputs import Inputs
from lapwing.core.settings import Rule
from lapwing.decisions.collecting import Labelled, rows_of
from lapwing.errors import DataError
from lapwing.predictives.scoring import Scoring

GROUPS = Rule(
    "a function from a batch of inputs to group numbers (B,), or the group numbers (N,) of all data",
    lambda v: v is None or callable(v) or torch.as_tensor(v).ndim == 1,
    DataError,
)

Numbers = list[int] | None  # the group of each row; None without groups


class Members:
    """The groups of the rows of one pass, batch by batch.

    Args:
        given: A function, the numbers of all rows, or None.
    """

    def __init__(self, given: Any) -> None:
        GROUPS.check("groups", given)
        self._given, self._count, self._found = given, 0, list[int]()

    def of(self, inputs: Inputs, count: int) -> Numbers:
        """Return the groups of the next ``count`` rows; raise if there are fewer numbers than rows."""
        if self._given is None:
            return None
        if callable(self._given):
            found = group_numbers(self._given(inputs), count)
        else:
            numbers = torch.as_tensor(self._given)[self._count : self._count + count]
            if len(numbers) < count:
                raise DataError(
                    f"groups have the shape {tuple(torch.as_tensor(self._given).shape)}, and the data have more rows; "
                    "expected one number for each, rows with an ignored target included."
                )
            found = group_numbers(numbers, count)
        self._found += found
        self._count += count
        return found

    def whole(self) -> Tensor | None:
        """Return the groups of all rows; raise if there are more numbers than rows."""
        if self._given is None:
            return None
        return torch.tensor(self._found if callable(self._given) else group_numbers(self._given, self._count))


def grouped_rows(
    posterior: Any, data: Iterable[Any], number: Callable[[Any, Labelled, Numbers], Tensor], groups: Any, **keys: Any
) -> tuple[Tensor, Tensor | None, Scoring]:
    """Return ``number(predictive, batch, groups)`` of all rows whose target counts, and the groups of these rows.

    ``keys`` are those of ``rows_of``, which this extends.
    """
    members, count = Members(groups), 0

    def placed(predictive: Any, batch: Labelled) -> Tensor:
        nonlocal count
        values = number(predictive, batch, members.of(batch.inputs, len(batch.targets))).double().cpu()
        place = torch.arange(count, count + len(values), dtype=torch.float64)
        count += len(values)
        return torch.cat([values, place.unsqueeze(1)], 1)

    rows, scoring = rows_of(posterior, data, placed, **keys)
    whole = members.whole()
    return rows[:, :-1], None if whole is None else whole[rows[:, -1].long()], scoring


def group_numbers(given: Any, count: int) -> list[int]:
    """Return group numbers as a list; raise unless they are ``count`` whole numbers."""
    numbers = torch.as_tensor(given)
    if numbers.shape != (count,) or numbers.is_floating_point() or numbers.is_complex():
        raise DataError(
            f"groups have the shape {tuple(numbers.shape)} and dtype {numbers.dtype}; expected ({count},) whole "
            "numbers, the group of each input."
        )
    listed: list[int] = numbers.tolist()
    return [int(number) for number in listed]
