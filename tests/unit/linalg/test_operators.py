"""Operators: dense, sparse, and what is asked of those of users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import DataError, LapwingError, NumericalError
from lapwing.linalg.dense import eigh, eigvalsh, svd
from lapwing.linalg.krylov import leading_eigenpairs
from lapwing.linalg.operators import SparseOperator, apply_checked, refuse_asymmetric
from lapwing.runtime.threads import quiet
from tests.tolerances import assert_close
from tests.unit.linalg.spectra import SPECTRA, Counted, D, operator, product

# Operators that are not what they claim to be are refused.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_symmetric_operators_pass(spectrum: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    matrix = operator(SPECTRA[spectrum])
    for scale in (1e-8, 1.0, 1e8):
        refuse_asymmetric(product(scale * matrix, dtype), len(matrix), generator=generator, tolerance=1e-5)


def test_nothing_is_symmetric() -> None:
    refuse_asymmetric(torch.zeros_like, 5)


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_an_asymmetric_operator_is_refused(size: float) -> None:
    """Already where the skew part is a thousandth: u·Av - v·Au is as large as the operator's skew part."""
    matrix = operator(SPECTRA["flat"])
    skew = torch.randn_like(matrix)
    skew = (skew - skew.T) / skew.norm() * matrix.norm() * size
    for seed in range(20):
        with pytest.raises(NumericalError, match=r"not symmetric.*evaluation mode.*augmentation"):
            refuse_asymmetric(
                product(matrix + skew), 120, generator=torch.Generator().manual_seed(seed), tolerance=1e-9
            )


def dropped(rows: torch.Tensor) -> torch.Tensor:
    """Dropout: other products at every call, each of them symmetric."""
    keep = (torch.rand(120) < 0.8).to(D)
    return keep * ((keep * rows) @ operator(SPECTRA["flat"]))


def test_an_operator_that_changes_is_refused() -> None:
    with pytest.raises(NumericalError, match=r"two calls.*differ.*dropout"):
        refuse_asymmetric(dropped, 120)


def test_eigenpairs_check_the_operator_first() -> None:
    """Two calls, and no iteration."""
    skew = torch.randn(120, 120, dtype=D)
    counted = Counted(operator(SPECTRA["flat"]) + 0.1 * (skew - skew.T))
    with pytest.raises(NumericalError, match="an operator is not symmetric"):
        leading_eigenpairs(counted, 120, 5)
    assert counted.calls == 2
    with pytest.raises(NumericalError, match="two calls to an operator with the same rows differ"):
        leading_eigenpairs(dropped, 120, 5)
    with pytest.raises(NumericalError, match="not finite"):
        leading_eigenpairs(lambda v: v * torch.nan, 120, 5)


def test_an_operator_that_mixes_its_rows_is_refused() -> None:
    weights = torch.tensor([[1.0], [2.0]], dtype=D)
    with pytest.raises(NumericalError, match="two calls"):
        refuse_asymmetric(lambda rows: weights[: len(rows)] * rows, 7)


def test_products_are_checked_for_shape_and_finiteness() -> None:
    rows = torch.ones(2, 3)
    with pytest.raises(NumericalError, match=r"shape \(2, 3\) to \(2,\)"):
        apply_checked(lambda v: v.sum(1), rows)
    with pytest.raises(NumericalError, match="not finite"):
        apply_checked(lambda v: v / 0, rows)
    assert apply_checked(lambda v: v, rows).dtype == D


# Products of sparse operators and their derivatives, against the dense matrix.

ROWS, SIZE, ENTRIES = 13, 17, 60


def entries(dtype: torch.dtype = D) -> tuple[Tensor, Tensor, Tensor]:
    """Entries in random order; some places occur twice, and the last row and column are empty."""
    generator = torch.Generator().manual_seed(3)
    row = torch.randint(ROWS - 1, (ENTRIES,), generator=generator)
    column = torch.randint(SIZE - 1, (ENTRIES,), generator=generator)
    return row, column, torch.randn(ENTRIES, generator=generator, dtype=D).to(dtype)


def dense(dtype: torch.dtype = D) -> Tensor:
    matrix = torch.zeros(ROWS, SIZE, dtype=dtype)
    for i, j, value in zip(*entries(dtype)):
        matrix[i, j] += value
    return matrix


def sparse(dtype: torch.dtype = D) -> SparseOperator:
    return SparseOperator.from_entries(*entries(dtype), shape=(ROWS, SIZE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (4, 0)])
def test_products_are_those_of_the_dense_matrix(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    operator, matrix = sparse(dtype), dense(dtype)
    assert (operator.rows, operator.size) == (ROWS, SIZE)
    assert operator.entries == int((matrix != 0).sum()) < ENTRIES
    v, u = torch.randn(*leading, SIZE, dtype=dtype), torch.randn(*leading, ROWS, dtype=dtype)
    assert_close(operator.forward(v), v @ matrix.T)
    assert_close(operator.back(u), u @ matrix)
    assert_close(operator.dense(), matrix)
    assert (operator.like.shape, operator.like.dtype) == ((0,), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_back_is_the_adjoint_of_forward(dtype: torch.dtype) -> None:
    """u·Av - v·Aᵀu, whose sums have at most ROWS + SIZE terms in each entry."""
    operator, matrix = sparse(dtype), dense().abs()
    v, u = torch.randn(50, SIZE, dtype=dtype), torch.randn(50, ROWS, dtype=dtype)
    gap = (operator.forward(v).double() * u).sum(1) - (v.double() * operator.back(u)).sum(1)
    size = ((v.double().abs() @ matrix.T) * u.abs()).sum(1)
    assert float((gap.abs() / size).max()) <= (ROWS + SIZE) * torch.finfo(dtype).eps


def test_rows_that_are_not_contiguous() -> None:
    operator, matrix = sparse(), dense()
    v = torch.randn(SIZE, 3, 5, dtype=D).permute(2, 1, 0)
    assert_close(operator.forward(v), v @ matrix.T)
    assert_close(operator.forward(v[:1, :1].expand(4, 2, -1)), (v[:1, :1] @ matrix.T).expand(4, 2, -1))


def test_derivatives_of_first_and_second_order() -> None:
    operator = sparse()
    for call, width in ((operator.forward, SIZE), (operator.back, ROWS)):
        x = torch.randn(2, width, dtype=D, requires_grad=True)
        assert torch.autograd.gradcheck(call, (x,), check_forward_ad=False)
        assert torch.autograd.gradgradcheck(lambda x, p=call: p(x).square(), (x,))


def test_second_derivatives_of_a_square() -> None:
    operator, matrix = sparse(), dense()
    x = torch.randn(SIZE, dtype=D, requires_grad=True)
    (gradient,) = torch.autograd.grad(operator.forward(x).square().sum(), x, create_graph=True)
    direction = torch.randn(SIZE, dtype=D)
    (second,) = torch.autograd.grad(gradient @ direction, x)
    assert_close(second, 2 * matrix.T @ (matrix @ direction))


def test_products_pass_torch_func() -> None:
    """Forward mode, reverse mode, both, and batches over any dimension, also one inside the other."""
    operator, matrix = sparse(), dense()
    x, many = torch.randn(SIZE, dtype=D), torch.randn(3, SIZE, 4, dtype=D)
    with quiet:  # the first use of forward mode compiles rules of PyTorch, with warnings about deprecations
        assert_close(torch.func.jacrev(operator.forward)(x), matrix)
        assert_close(torch.func.jacfwd(operator.forward)(x), matrix)
        assert_close(torch.func.hessian(lambda x: operator.forward(x).square().sum())(x), 2 * matrix.T @ matrix)
        both = torch.func.vmap(torch.func.vmap(operator.forward, in_dims=1, out_dims=1))(many)
    assert_close(both, torch.einsum("ij,bjk->bik", matrix, many))


def test_another_dtype() -> None:
    operator = sparse().to(dtype=torch.float32)
    assert operator.like.dtype == torch.float32
    assert_close(operator.forward(torch.ones(SIZE)), dense(torch.float32).sum(1))
    assert_close(operator.to("cpu", D).back(torch.ones(ROWS, dtype=D)), dense().sum(0), dtype=torch.float32)


def test_no_entries() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    operator = SparseOperator.from_entries(empty, empty, torch.zeros(0), (2, 3))
    assert operator.forward(torch.ones(4, 3)).tolist() == [[0.0, 0.0]] * 4
    assert operator.back(torch.ones(2)).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (
            torch.zeros(2, SIZE + 1, dtype=D),
            r"v is a tensor of shape \(2, 18\).*expected.* \(..., 17\)",
        ),
        (torch.tensor(1.0, dtype=D), "v is tensor"),
        (torch.zeros(SIZE), "v has dtype torch.float32 on cpu; expected torch.float64 on cpu"),
        ([0.0] * SIZE, "expected a tensor"),
    ],
)
def test_other_vectors_are_refused(vectors: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        sparse().forward(vectors)
    with pytest.raises(DataError, match=r"u is a tensor of shape \(17,\).*expected a tensor of shape \(..., 13\)"):
        sparse().back(torch.zeros(SIZE, dtype=D))


def changed(**changes: Any) -> dict[str, Any]:
    row, column, value = entries()
    return {"row": row, "column": column, "value": value, "shape": (ROWS, SIZE), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": torch.full((ENTRIES,), torch.nan)}, "value is a tensor.*expected.*finite"),
        ({"value": torch.ones(ENTRIES, dtype=torch.int64)}, "value is a tensor.*expected.*float32 or float64"),
        ({"value": [1.0] * ENTRIES}, "value is .*expected a tensor"),
        ({"value": torch.ones(ENTRIES + 1)}, "row has 60 entries and value has 61"),
        ({"row": torch.full((ENTRIES,), ROWS)}, "row has indices from 13 to 13; expected 0 to 12"),
        ({"column": torch.full((ENTRIES,), SIZE)}, "column has indices from 17 to 17; expected 0 to 16"),
        ({"column": torch.zeros(ENTRIES)}, "column is a tensor.*expected.*integers"),
        ({"shape": (ROWS,)}, "shape is"),
        ({"shape": (0, SIZE)}, "the number of rows is 0"),
        ({"shape": (ROWS, 1.5)}, "the number of columns is 1.5"),
    ],
)
def test_other_entries_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LapwingError, match=message):
        SparseOperator.from_entries(**changed(**changes))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(DataError, match=r"dtype is torch.float16; expected torch.float32, torch.float64 or None"):
        sparse().to(dtype=torch.float16)


# Decompositions try again where a library fails: float64, LAPACK on the CPU, a scaled matrix.

SPECTRA_ROWS = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0))
GRAM = 5 * SPECTRA_ROWS @ SPECTRA_ROWS.mT  # of low rank


def failing(name: str, fails: Callable[[Tensor], bool], kind: str) -> Any:
    """Return the function of torch.linalg with this name, which raises or returns NaN for some matrices."""
    original = getattr(torch.linalg, name)

    def run(matrix: Tensor, **options: Any) -> Any:
        if fails(matrix) and kind == "raises":
            raise torch.linalg.LinAlgError(f"linalg.{name}: The algorithm failed to converge")
        result = original(matrix, **options)
        if not fails(matrix):
            return result
        return result * torch.nan if isinstance(result, Tensor) else tuple(part * torch.nan for part in result)

    return run


RUNGS: dict[str, Callable[[Tensor], bool]] = {
    "none": lambda matrix: False,
    "float32": lambda matrix: matrix.dtype == torch.float32,
    "unscaled": lambda matrix: bool(matrix.abs().max() > 1.0001),
}


@pytest.mark.parametrize("kind", ["raises", "not finite"])
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("groups", [False, True])
def test_each_rung(monkeypatch: pytest.MonkeyPatch, rung: str, kind: str, groups: bool) -> None:
    gram, rows = (GRAM, SPECTRA_ROWS) if groups else (GRAM[0], SPECTRA_ROWS[0])
    for name in ("eigh", "eigvalsh", "svd"):
        monkeypatch.setattr(torch.linalg, name, failing(name, RUNGS[rung], kind))
    values, vectors = eigh(gram)
    assert values.dtype == vectors.dtype == torch.float32
    assert_close(vectors * values.unsqueeze(-2) @ vectors.mT, gram)
    assert_close(eigvalsh(gram), values)
    left, singular, right = svd(rows)
    assert_close(left * singular.unsqueeze(-2) @ right, rows)


@pytest.mark.parametrize("kind", ["raises", "not finite"])
def test_the_last_rung_refuses(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", failing("eigh", lambda matrix: True, kind))
    with pytest.raises(NumericalError, match=r"\(7, 7\) .* has no decomposition.*Diagonal\(\)"):
        eigh(GRAM[0])


def test_a_matrix_that_is_not_finite_is_refused() -> None:
    with pytest.raises(NumericalError, match="not finite"):
        eigh(torch.full((2, 2), torch.inf))


def test_a_fit_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    fitted = lambda: lw.fit(net, [(x, x[:, :1])], lw.Gaussian(noise_std=0.1), method=lw.Kron(), prior=1.0)
    expected = fitted().functions(x).std
    monkeypatch.setattr(torch.linalg, "eigh", failing("eigh", RUNGS["unscaled"], "raises"))
    assert_close(fitted().functions(x).std, expected)


def test_the_library_decomposes_nowhere_else() -> None:
    """Every eigendecomposition and singular value decomposition goes by the same attempts."""
    folder = Path(lw.__file__).parent
    calls = [f"torch.linalg.{name}(" for name in ("eigh", "eigvalsh", "svd", "svdvals")]
    users = {path.name for path in folder.rglob("*.py") if any(call in path.read_text() for call in calls)}
    assert users == {"dense.py"}
