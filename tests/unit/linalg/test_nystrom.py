"""Nyström approximations, and what they are for."""

from __future__ import annotations

import pytest
import torch
from lapwing.linalg.nystrom import nystrom

from lapwing.errors import NumericalError
from lapwing.linalg.cg import block_conjugate_gradients, conjugate_gradients
from tests.tolerances import SOLVED, assert_close
from tests.unit.linalg.spectra import SPECTRA, Counted, D, operator, product


def test_exact_at_the_rank_of_the_operator(generator: torch.Generator) -> None:
    matrix = operator(SPECTRA["low rank"])
    counted = Counted(matrix)
    found = nystrom(counted, 120, 30, generator=generator)
    assert_close(found.vectors.T @ torch.diag(found.values) @ found.vectors, matrix)
    assert_close(found.vectors @ found.vectors.T, torch.eye(30, dtype=D))
    assert_close(found.values, SPECTRA["low rank"][:30])
    assert found.residual < 1e-10
    assert (counted.calls, found.products) == (2 + 1, 1)  # two for symmetry


@pytest.mark.parametrize("rank", [120, 400])
def test_exact_at_full_rank(rank: int, generator: torch.Generator) -> None:
    matrix = operator(SPECTRA["flat"])
    found = nystrom(product(matrix), 120, rank, generator=generator)
    assert_close(found.vectors.T @ torch.diag(found.values) @ found.vectors, matrix)


def test_never_above_the_operator_and_nearly_optimal(generator: torch.Generator) -> None:
    """In the order of symmetric matrices; and not much further off than the best of this rank, by its own account."""
    values = torch.logspace(2, -4, 300, dtype=D)
    matrix = operator(values)
    found = nystrom(product(matrix), 300, 60, generator=generator)
    gap = matrix - found.vectors.T @ torch.diag(found.values) @ found.vectors
    assert float(torch.linalg.eigvalsh(gap).min()) > -1e-9
    assert float(gap.norm()) < 3 * float(values[60:].norm())
    assert found.residual == pytest.approx(float(gap.norm() / matrix.norm()), rel=0.5)


@pytest.mark.parametrize("shift", [1e-3, 1.0, 100.0])
def test_the_preconditioner_is_the_square_of_its_root(shift: float, generator: torch.Generator) -> None:
    found = nystrom(product(operator(SPECTRA["steep"])), 120, 20, generator=generator)
    rows = torch.randn(5, 120, dtype=D)
    inverse = torch.linalg.inv(
        found.vectors.T @ torch.diag((found.values + shift) / (found.values[-1] + shift)) @ found.vectors
        + torch.eye(120, dtype=D) - found.vectors.T @ found.vectors
    )  # fmt: skip
    assert_close(found.preconditioner(shift)(rows), rows @ inverse, SOLVED)
    assert_close(found.root(shift)(found.root(shift)(rows)), found.preconditioner(shift)(rows))


def test_it_saves_iterations_at_every_shift(generator: torch.Generator) -> None:
    """An ill-conditioned problem; one approximation for all shifts, in both solvers."""
    matrix = operator(torch.logspace(3, -5, 300, dtype=D))
    found = nystrom(product(matrix), 300, 150, generator=generator)
    rhs = torch.randn(3, 300, dtype=D)
    for shift in (1e-2, 1e-1, 1.0):
        whole = matrix + shift * torch.eye(300, dtype=D)
        exact = torch.linalg.solve(whole, rhs.T).T
        plain = conjugate_gradients(product(whole), rhs, tolerance=1e-8, max_iterations=20_000)
        helped = conjugate_gradients(product(whole), rhs, precondition=found.preconditioner(shift), tolerance=1e-8)
        block = block_conjugate_gradients(product(whole), rhs, root=found.root(shift), tolerance=1e-8)
        assert block.iterations <= helped.iterations < plain.iterations / 10
        assert_close(helped.x, exact, 0.4)
        assert_close(block.x, exact, 0.4)


def test_float32_products(generator: torch.Generator) -> None:
    """Rounding makes the core indefinite; the answer is as good as the products."""
    matrix = operator(SPECTRA["low rank"])
    found = nystrom(product(matrix, torch.float32), 120, 40, generator=generator)
    assert found.values.dtype == D
    assert_close(found.vectors.T @ torch.diag(found.values) @ found.vectors, matrix, SOLVED, torch.float32)


def test_nothing_comes_of_nothing(generator: torch.Generator) -> None:
    found = nystrom(torch.zeros_like, 12, 3, generator=generator)
    rows = torch.randn(2, 12, dtype=D)
    assert bool((found.values == 0).all())
    assert_close(found.preconditioner(1.0)(rows), rows)
    assert found.residual == 0


def test_equal_generators_give_equal_answers() -> None:
    matrix = operator(SPECTRA["flat"])
    one, two, other = (nystrom(product(matrix), 120, 9, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one.vectors, two.vectors)
    assert one.residual == two.residual
    assert not torch.equal(one.values, other.values)


def test_refusals(generator: torch.Generator) -> None:
    matrix = operator(torch.linspace(-1, 1, 40, dtype=D))
    with pytest.raises(NumericalError, match=r"positive semi-definite.*Hessian"):
        nystrom(product(matrix), 40, 20, generator=generator)
    found = nystrom(product(matrix @ matrix), 40, 20, generator=generator)
    with pytest.raises(NumericalError, match="shift of 0; expected above zero"):
        found.preconditioner(0.0)
    for rank in (0, -3):
        with pytest.raises(ValueError, match=f"rank is {rank}; expected at least 1"):
            nystrom(product(matrix @ matrix), 40, rank)
