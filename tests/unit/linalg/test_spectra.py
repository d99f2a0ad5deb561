"""Decompositions try again where a library fails: float64, LAPACK on the CPU, a scaled matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import NumericalError
from lapwing.linalg.dense import eigh, eigvalsh, svd
from tests.tolerances import assert_close

ROWS = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0))
GRAM = 5 * ROWS @ ROWS.mT  # of low rank


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
    gram, rows = (GRAM, ROWS) if groups else (GRAM[0], ROWS[0])
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
