"""Sketches of rows: the same rows are known again in any form, and rows that repeat by chance are no reuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing.data import known_rows
from lapwing.data.known_rows import TRAINING, RowSketch, Sketching


def sketch(
    x: Any, y: Tensor | None, size: int = 50, rows: Callable[[Any, slice], Any] = lambda x, s: x[s]
) -> RowSketch:
    """The sketch of batches of this size."""
    sketching, count = Sketching(), len(x) if isinstance(x, Tensor) else len(next(iter(x.values())))
    for start in range(0, count, size):
        part = slice(start, min(start + size, count))
        sketching.add(rows(x, part), None if y is None else y[part], part.stop - start)
    value = sketching.value()
    assert value is not None
    return value


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, dtype=torch.float64, generator=gen(seed)), torch.randint(0, 3, (n,), generator=gen(seed))


FORMS: dict[str, Callable[[Tensor, Tensor], RowSketch]] = {
    "float32": lambda x, y: sketch(x.float(), y),
    "targets as numbers": lambda x, y: sketch(x, y.double()),
    "a column of targets": lambda x, y: sketch(x, y[:, None].float()),
    "other batches": lambda x, y: sketch(x, y, 7),
    "another order": lambda x, y: sketch(x.flip(0), y.flip(0)),
    "another layout": lambda x, y: sketch(x.T.contiguous().T, y),
    "from an odd place in memory": lambda x, y: sketch(
        torch.cat([x.new_zeros(1), x.flatten()]).float()[1:].view_as(x), y
    ),
    "padded": lambda x, y: sketch(torch.cat([x, torch.zeros(len(x), 2)], 1), y),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_rows_in_another_form(form: str) -> None:
    x, y = numbers(200)
    reuse = sketch(x, y).reuse(FORMS[form](x, y))
    assert reuse is not None
    assert (reuse.share, reuse.whole) == (1.0, True)


def test_rows_in_parts_are_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = numbers(200)
    whole = sketch(x, y, 200)
    monkeypatch.setattr(known_rows, "CHUNK_NUMBERS", 4 * 100)  # two parts
    assert sketch(x, y, 200).reuse(whole) == whole.reuse(whole)


def test_keys_of_a_mapping_in_another_order() -> None:
    x, y = numbers(100)
    take = lambda tree, part: {key: value[part] for key, value in tree.items()}
    one = sketch({"a": x[:, :2], "b": x[:, 2:]}, y, rows=take)
    assert one.reuse(sketch({"b": x[:, 2:], "a": x[:, :2]}, y, 13, take)) is not None
    assert one.reuse(sketch({"a": x[:, 2:], "b": x[:, :2]}, y, 13, take)) is None


def test_large_whole_numbers_are_told_apart() -> None:
    """Identifiers beyond 2²⁴ are not rounded to float32."""
    x = 2**40 + torch.arange(200)[:, None]
    y = torch.zeros(200)
    assert len(sketch(x, y).marks) == 200
    assert sketch(x, y).reuse(sketch(x + 500, y)) is None


def test_the_share_of_rows_that_are_used_again() -> None:
    (x, y), (new, labels) = numbers(400), numbers(400, 1)
    mixed = sketch(torch.cat([x[:30], new[:70]]), torch.cat([y[:30], labels[:70]]))
    reuse = sketch(x, y).reuse(mixed)
    assert reuse is not None
    assert not reuse.whole
    assert abs(reuse.share - 0.3) < 1e-9
    assert sketch(x, y).reuse(sketch(new, labels)) is None


def test_inputs_alone() -> None:
    x, y = numbers(200)
    other = sketch(x, (y + 1) % 3)
    assert sketch(x, y).reuse(other) is None
    for given in (other, sketch(x, None)):
        reuse = sketch(x, y).reuse(given, of_inputs=True)
        assert reuse is not None
        assert reuse.whole


@pytest.mark.parametrize("values", [2, 4, 8, 30])
def test_rows_of_discrete_columns_repeat_by_themselves(values: int) -> None:
    """Tables of which 100, 90, 20 and 1 % of new rows are known already; 50 splits of each raise no alarm."""
    for seed in range(50):
        x = torch.randint(0, values, (500, 3), generator=gen(seed))
        y = (x[:, 0] + torch.randint(0, 2, (500,), generator=gen(seed + 1000))) % values
        training = sketch(x[:300], y[:300])
        assert training.reuse(sketch(x[300:], y[300:])) is None
        assert training.reuse(sketch(x[300:], None), of_inputs=True) is None


def test_a_sketch_is_bounded_and_estimates_the_share() -> None:
    """400,000 rows: a sixth of them is kept, and of 6,000 other rows, half of them known, about 1,000 are compared.

    The share of 1,000 has a standard error of .016.
    """
    n = 400_000
    x, y = torch.randint(0, 2**40, (n, 2), generator=gen()), torch.zeros(n)
    whole = sketch(x, y, 4000)
    assert len(whole.marks) <= TRAINING
    assert whole.rows == n
    mixed = torch.cat([x[:3000], torch.randint(0, 2**40, (3000, 2), generator=gen(1))])
    reuse = whole.reuse(sketch(mixed, y[:6000]))
    assert reuse is not None
    assert abs(reuse.share - 0.5) < 5 * 0.016
    assert not reuse.whole
    again = whole.reuse(sketch(x[:6000], y[:6000]))
    assert again is not None
    assert again.whole
    halves = sketch(x[: n // 2], y[: n // 2], 4000) + sketch(x[n // 2 :], y[n // 2 :], 4000)
    assert torch.equal(halves.marks, whole.marks)
    assert (halves.rows, halves.totals, halves.limit) == (whole.rows, whole.totals, whole.limit)


def test_rows_that_are_in_two_parts_repeat() -> None:
    x, y = numbers(50)
    assert sketch(x, y).singles(False)[1] == 50
    assert (sketch(x, y) + sketch(x[:20], y[:20])).singles(False)[1] == 30
