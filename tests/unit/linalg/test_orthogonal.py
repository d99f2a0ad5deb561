"""Orthonormal rows that reveal their rank."""

from __future__ import annotations

import pytest
import torch

from lapwing.linalg.krylov import OrthonormalRows, orthonormal_rows, thin_svd
from tests.tolerances import assert_close

D = torch.float64


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (1, 5), (5, 5)])
def test_the_factors_of_rows(shape: tuple[int, int]) -> None:
    rows = torch.randn(shape, dtype=D)
    left, singular, right = thin_svd(rows)
    assert_close((left * singular) @ right, rows)
    assert_close(singular, torch.linalg.svdvals(rows))
    mix, basis = orthonormal_rows(rows, cut=1e-12)
    assert_close(mix @ basis, rows)
    assert_close(basis @ basis.T, torch.eye(min(shape), dtype=D))


def test_dependent_rows_leave() -> None:
    rows = torch.randn(3, 20, dtype=D)
    rows = torch.cat([rows, rows[:1] + rows[1:2], torch.zeros(1, 20, dtype=D)])
    mix, basis = orthonormal_rows(rows, cut=1e-12)
    assert len(basis) == 3
    assert_close(mix[:, :3] @ basis, rows)
    assert float(mix[:, 3:].norm()) < 1e-13


def test_what_is_cut_is_told() -> None:
    values = torch.tensor([1.0, 0.1, 1e-5, 1e-6], dtype=D)
    left, right = (torch.linalg.qr(torch.randn(n, 4, dtype=D))[0] for n in (4, 12))
    rows = (left * values) @ right.T
    mix, basis = orthonormal_rows(rows, cut=1e-4)
    assert len(basis) == 2
    assert_close(mix[:, 2:].norm(dim=1), (rows - mix[:, :2] @ basis).norm(dim=1), 0.6)


def test_little_that_is_new_is_still_orthogonal() -> None:
    """Rows that differ by a thousand roundings only: the basis contains their difference, orthogonal to the others."""
    against = torch.linalg.qr(torch.randn(50, 20, dtype=D))[0].T
    rows = torch.randn(1, 50, dtype=D) + 1e-13 * torch.randn(3, 50, dtype=D)
    for _ in range(2):
        rows = rows - (rows @ against.T) @ against
    _, astray = orthonormal_rows(rows, cut=1e-14)
    assert float((astray @ against.T).abs().max()) > 1e-6
    mix, basis = orthonormal_rows(rows, cut=1e-14, against=OrthonormalRows((against,)))
    assert len(basis) == 3
    whole = torch.cat([against, basis])
    assert_close(whole @ whole.T, torch.eye(23, dtype=D))
    assert_close(mix @ basis, rows)


def test_rows_in_blocks_are_what_they_are_in_one_piece() -> None:
    gen = torch.Generator().manual_seed(4)
    whole = torch.linalg.qr(torch.randn(30, 12, dtype=D, generator=gen)).Q.T
    rows = OrthonormalRows((whole[:0],)).extend(whole[:5]).extend(whole[5:6]).extend(whole[6:])
    v, y = torch.randn(4, 30, dtype=D, generator=gen), torch.randn(3, 12, dtype=D, generator=gen)
    assert len(rows) == 12
    assert torch.equal(torch.cat(rows.blocks), whole)
    assert_close(rows.coordinates(v), v @ whole.T)
    assert_close(rows.combine(y), y @ whole)
    assert_close(rows.remove(v), v - v @ whole.T @ whole)
    assert rows.blocks[1].data_ptr() == whole.data_ptr()  # not copied
