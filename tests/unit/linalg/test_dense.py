"""Dense decompositions and choices of rows, against the plain formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.errors import NumericalError
from lapwing.linalg import dense as module
from lapwing.linalg.dense import (
    STRIP_ROWS,
    Axes,
    Basis,
    FullBasis,
    Gram,
    ThinBasis,
    cholesky,
    choose_most_explaining,
    greedy_pivots,
    kmeans,
    smooth_whitening,
    symmetrise,
    trace_pivots,
    whitening,
)
from lapwing.linalg.krylov import OrthonormalRows, orthonormal_rows, randomised_eigenpairs, thin_svd
from lapwing.linalg.operators import MatrixDesign, back_product, forward_product, gram_product
from lapwing.linalg.ridge import Regression, SharedDesign, WhitenedDesign, noise_root, prior_root
from tests.tolerances import SOLVED, assert_close
from tests.unit.linear_problems import seed as seeded

# Cholesky factors that explain themselves when they fail.


def test_factor() -> None:
    root = torch.randn(5, 7, dtype=torch.float64)
    matrix = root @ root.T
    factor = cholesky(matrix, "head")
    assert_close(factor @ factor.T, matrix)
    assert torch.equal(factor, factor.tril())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_not_positive_definite_names_the_layer_and_the_eigenvalue(dtype: torch.dtype) -> None:
    basis, _ = torch.linalg.qr(torch.randn(3, 3, dtype=dtype))
    matrix = basis @ torch.diag(torch.tensor([2.0, 1.0, -0.125], dtype=dtype)) @ basis.T
    with pytest.raises(NumericalError, match=r"precision of head\.weight is not positive definite.*-0\.125"):
        cholesky(matrix, "head.weight")


def test_not_finite_is_said_as_such() -> None:
    with pytest.raises(NumericalError, match=r"precision of head\.weight is not finite"):
        cholesky(torch.full((2, 2), math.nan), "head.weight")


# Bases against dense matrices: what each is in coordinates, and that the rest of a thin one is all that is left.

D = torch.float64
GROUPS, SIZE, RANK = 2, 7, 3


def orthonormal(groups: int) -> Tensor:
    return torch.linalg.qr(torch.randn(groups, SIZE, SIZE, dtype=D)).Q


def made(kind: str, groups: int, scaled: bool) -> tuple[Basis, Tensor, Tensor]:
    """A basis with one eigenvalue for each part, and the matrices (G, d, d) that they stand for."""
    vectors, scale = orthonormal(groups), torch.rand(groups, SIZE, dtype=D) + 0.5
    root = scale if scaled else torch.ones_like(scale)
    given = scale if scaled else None
    if kind == "full":
        values = torch.rand(groups, SIZE, dtype=D) + 0.1
        basis: Basis = FullBasis(root.unsqueeze(-1) * vectors)
        matrix = vectors @ torch.diag_embed(values) @ vectors.mT
    elif kind == "axes":
        values = torch.rand(groups, SIZE, dtype=D) + 0.1
        basis, matrix = Axes(given), torch.diag_embed(values)
    else:
        values = torch.rand(groups, RANK + 1, dtype=D) + 0.1
        basis = ThinBasis(vectors[..., :RANK], given)
        each = torch.cat([values[:, :RANK], values[:, RANK:].expand(groups, SIZE - RANK)], 1)
        matrix = vectors @ torch.diag_embed(each) @ vectors.mT
    return basis, values, root.unsqueeze(-1) * matrix * root.unsqueeze(-2)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("groups", [1, GROUPS])
@pytest.mark.parametrize("kind", ["full", "axes", "thin"])
def test_a_basis_is_the_matrix_in_coordinates(kind: str, groups: int, scaled: bool) -> None:
    basis, values, matrix = made(kind, groups, scaled)
    x, y = torch.randn(2, 5, groups, 4, SIZE, dtype=D)
    a, b = basis.coordinates(x), basis.coordinates(y)
    weights = basis.expand(values, a.shape[-1]).unsqueeze(-2)
    assert_close((a * weights * b).sum(-1), (x @ matrix * y).sum(-1))
    assert_close(basis.combine(a * weights), x @ matrix)
    assert_close(basis.diagonal(values.unsqueeze(-2)).squeeze(-2), matrix.diagonal(dim1=-2, dim2=-1))
    lengths = basis.lengths(x)
    assert_close((lengths.square() * basis.expand(values, lengths.shape[-1]).unsqueeze(-2)).sum(-1),
                 (x @ matrix * x).sum(-1))  # fmt: skip


@pytest.mark.parametrize("kind", ["full", "axes", "thin"])
def test_a_root_of_the_matrix_and_its_transpose(kind: str) -> None:
    basis, values, matrix = made(kind, GROUPS, scaled=True)
    x, eps = torch.randn(2, 3, GROUPS, 4, SIZE, dtype=D)
    root = lambda rows: basis.combine(basis.draw(rows) * weights.sqrt())
    adjoint = lambda rows: basis.draw_transposed(basis.coordinates(rows) * weights.sqrt())
    weights = basis.expand(values, basis.coordinates(x).shape[-1]).unsqueeze(-2)
    assert_close(root(adjoint(x)), x @ matrix)
    assert_close((adjoint(x) * eps).sum(-1), (x * root(eps)).sum(-1))


def test_the_rest_has_the_mean_of_its_directions() -> None:
    basis, _, _ = made("thin", GROUPS, scaled=False)
    assert isinstance(basis, ThinBasis)
    x = torch.randn(GROUPS, 9, SIZE, dtype=D)
    pooled = basis.pool(basis.coordinates(x).square().sum(1))
    assert_close(pooled @ basis.counts, x.square().sum((1, 2)))  # the trace
    assert_close(pooled[:, :RANK], (x @ basis.vectors).square().sum(1))
    assert basis.counts.tolist() == [1.0] * RANK + [SIZE - RANK]


# Sums of products without both halves.

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [3, 255, 256, 301, 517])  # below, at and above the sizes that are split
def test_sum_over_calls_equals_one_product(size: int) -> None:
    rows = torch.randn(40, size, dtype=torch.float64)
    total = Gram(size, torch.float64, CPU)
    for part in rows.split((7, 1, 32)):
        total.add(part)
    assert_close(total.value(), rows.T @ rows)


def test_groups_stay_apart() -> None:
    rows = torch.randn(3, 20, 5, dtype=torch.float64)
    total = Gram(5, torch.float64, CPU, groups=3)
    total.add(rows[:, :4])
    total.add(rows[:, 4:])
    assert_close(total.value(), torch.stack([group.T @ group for group in rows]))


def test_one_group_needs_no_dimension() -> None:
    rows = torch.randn(20, 5, dtype=torch.float64)
    flat, grouped = Gram(5, torch.float64, CPU), Gram(5, torch.float64, CPU)
    flat.add(rows)
    grouped.add(rows[None])
    assert torch.equal(flat.value(), grouped.value())


def test_narrow_rows_are_summed_in_the_wide_dtype() -> None:
    rows = torch.ones(4096, 2, dtype=torch.bfloat16)
    total = Gram(2, torch.float32, CPU)
    total.add(rows)
    assert total.value().tolist() == [[4096.0, 4096.0], [4096.0, 4096.0]]


@pytest.mark.parametrize("size", [3, STRIP_ROWS, 2 * STRIP_ROWS + 7])
def test_mirrored_in_place(size: int) -> None:
    x = torch.randn(20, size, dtype=torch.float64)
    total = Gram(size, torch.float64, torch.device("cpu"))
    for _ in range(2):  # what is added after the sum was asked for is added to it
        total.add(x)
        value = total.value()
        assert torch.equal(value, value.mT)
    assert_close(value, 2 * x.mT @ x)
    matrix = torch.randn(2, size, size, dtype=torch.float64)
    expected = 0.5 * (matrix + matrix.mT)
    symmetrise(matrix)
    assert torch.equal(matrix, expected)


# Sums of products of float32 rows keep small directions, and switch to cheaper products only where that is safe.


def summed(chunks: list[Tensor]) -> tuple[Gram, Tensor]:
    total = Gram(chunks[0].shape[1], torch.float64, CPU)
    for chunk in chunks:
        total.add(chunk)
    return total, total.value()


def chunks_of(spread: Tensor, number: int = 30, rows: int = 50) -> list[Tensor]:
    """Return float32 rows whose directions have these lengths, in a basis that mixes all columns."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(len(spread), len(spread), dtype=torch.float64, generator=generator))[0]
    rows_of = lambda: torch.randn(rows, len(spread), dtype=torch.float64, generator=generator) * spread @ basis
    return [rows_of().float() for _ in range(number)]


def relative(value: Tensor, chunks: list[Tensor]) -> float:
    """Return the largest relative error of the sum in any direction."""
    exact = sum((chunk.double().mT @ chunk.double() for chunk in chunks), torch.zeros_like(value))
    factor = torch.linalg.cholesky(exact)
    half = torch.linalg.solve_triangular(factor, value - exact, upper=False)
    return float(torch.linalg.matrix_norm(torch.linalg.solve_triangular(factor, half.mT, upper=False), 2))


def test_small_directions_do_not_drown() -> None:
    chunks = chunks_of(torch.logspace(0, -5, 40, dtype=torch.float64))
    total, value = summed(chunks)
    assert total._narrow is None
    assert relative(value, chunks) < 1e-4


def test_without_small_directions_products_are_cheap_and_lose_little() -> None:
    chunks = chunks_of(torch.logspace(0, -0.8, 40, dtype=torch.float64))
    total, value = summed(chunks)
    assert total._narrow is not None
    assert relative(value, chunks) < 1e-3


def test_columns_of_different_scales_are_not_small_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -6, 20)
    chunks = [torch.randn(50, 20, generator=generator) * scales for _ in range(20)]
    total, value = summed(chunks)
    assert total._narrow is not None
    assert relative(value, chunks) < 1e-3


def test_a_column_of_zeros() -> None:
    chunks = [torch.cat([chunk, torch.zeros(len(chunk), 1)], 1) for chunk in chunks_of(torch.ones(10).double())]
    total, value = summed(chunks)
    assert total._narrow is not None
    assert not value[-1].any()
    assert relative(value[:-1, :-1], [chunk[:, :-1] for chunk in chunks]) < 1e-3


def test_it_goes_back_where_a_direction_becomes_small() -> None:
    """Later rows are a thousand times larger, and collinear."""
    first = chunks_of(torch.ones(10, dtype=torch.float64), number=4)
    later = [1e3 * chunk[:, :1] + chunk for chunk in chunks_of(torch.ones(10, dtype=torch.float64), number=40)]
    total, _ = summed(first + later)
    assert total._narrow is None


def test_runs() -> None:
    chunks = chunks_of(torch.logspace(0, -5, 16, dtype=torch.float64))
    total = Gram(16, torch.float64, CPU)
    for chunk in chunks:
        total.add_runs(chunk.reshape(1, 5, 10, 16))
    assert relative(total.value(), chunks) < 1e-4


# The greedy choice against one that evaluates the variance of every candidate anew.


def explained(precision: Tensor, gram: Tensor, chosen: list[int]) -> float:
    part = torch.tensor(chosen)
    return float(torch.linalg.solve(precision[part][:, part], gram[part][:, part]).diagonal().sum())


def brute_force(precision: Tensor, gram: Tensor, count: int) -> list[int]:
    chosen: list[int] = []
    for _ in range(count):
        rest = [i for i in range(len(gram)) if i not in chosen]
        values = torch.tensor([explained(precision, gram, [*chosen, i]) for i in rest], dtype=D)
        chosen.append(rest[int(values.argmax())])
    return chosen


def matrices(rows: int, size: int, least: float) -> tuple[Tensor, Tensor]:
    """Λ has another weighting of the rows than the variance, as for a softmax."""
    torch.manual_seed(4)
    j = torch.randn(rows, size, dtype=D) * torch.rand(size, dtype=D)
    j[:, 1::3] = j[:, ::3][:, : j[:, 1::3].shape[1]] + 0.1 * j[:, 1::3]  # nearly the same direction
    weights, added = torch.rand(rows, dtype=D), least + torch.rand(size, dtype=D)
    return j.T @ (weights[:, None] * j) + torch.diag(added), j.T @ j


def test_every_choice_is_that_of_brute_force() -> None:
    for rows, size in ((40, 13), (6, 17)):  # more rows than coordinates, and fewer
        precision, gram = matrices(rows, size, 0.01)
        order = choose_most_explaining(precision, gram, size, 0.01)
        assert order.tolist() == brute_force(precision, gram, size)


def test_those_already_chosen_count() -> None:
    """Two coordinates in the same direction: the second explains little, although it is the second largest alone."""
    j = torch.tensor([[3.0, 2.9, 0.0], [0.0, 0.1, 1.0]], dtype=D)
    gram, added = j.T @ j, torch.tensor([1e-3] * 3, dtype=D)
    noise = torch.diag(torch.tensor([1.0, 0.2], dtype=D))
    precision = j.T @ noise @ j + torch.diag(added)
    alone = gram.diagonal() / precision.diagonal()
    order = choose_most_explaining(precision, gram, 2, 1e-3).tolist()
    assert order == brute_force(precision, gram, 2)
    assert sorted(order) != sorted(alone.topk(2).indices.tolist())


def test_equal_gains_go_to_the_first() -> None:
    eye = torch.eye(5, dtype=D)
    assert choose_most_explaining(2 * eye, eye, 4, 1.0).tolist() == [0, 1, 2, 3]


def test_prior_that_rounding_would_hide() -> None:
    """Coordinates that repeat each other leave a Schur complement far below the rounding of its terms."""
    torch.manual_seed(5)
    j = torch.randn(30, 4, dtype=D).repeat(1, 3) * 1e4
    gram = j.T @ j
    precision = gram + 1e-6 * torch.eye(12, dtype=D)
    order = choose_most_explaining(precision, gram, 12, 1e-6)
    assert sorted(order.tolist()) == list(range(12))
    assert len({i % 4 for i in order[:4].tolist()}) == 4
    assert_close(torch.tensor(explained(precision, gram, order[:4].tolist())), torch.tensor(4.0))


# Centres of a cloud of points.


def cloud(count: int = 60, size: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(count, size, dtype=D, generator=torch.Generator().manual_seed(seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assigned(points: Tensor, centres: Tensor) -> Tensor:
    return (points[:, None] - centres[None]).square().sum(-1).argmin(1)


def spread(points: Tensor, centres: Tensor) -> float:
    return float((points[:, None] - centres[None]).square().sum(-1).amin(1).sum())


@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_centre_is_the_mean_of_what_is_nearest_to_it(count: int) -> None:
    points = cloud()
    centres = kmeans(points, count, generator(), steps=500)
    nearest = assigned(points, centres)
    for number in range(count):
        assert_close(centres[number], points[nearest == number].mean(0))


@pytest.mark.parametrize("seed", range(3))
def test_separate_clouds_get_a_centre_each(seed: int) -> None:
    """The clouds are far from each other, so that initial centres fall into different ones."""
    places = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0], [70.0, 70.0]], dtype=D)
    points = torch.cat([place + cloud(20, 2, seed + 10 * i) for i, place in enumerate(places)])
    centres = kmeans(points, 4, generator(seed))
    for place in places:
        assert float((centres - place).norm(dim=1).min()) < 2


def test_as_many_centres_as_points_are_the_points() -> None:
    points = cloud(9)
    centres = kmeans(points, 9, generator())
    assert_close(centres[assigned(points, centres)], points)
    assert len(assigned(points, centres).unique()) == 9


def test_more_centres_than_different_points() -> None:
    """Some centres coincide; every centre is a point and every point is a centre."""
    points = cloud(3).repeat(2, 1)
    centres = kmeans(points, 5, generator())
    assert centres.shape == (5, 3)
    assert spread(points, centres) == 0
    assert float((centres[:, None] - points[None]).abs().sum(-1).amin(1).max()) == 0


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    points = cloud()
    whole = kmeans(points, 5, generator())
    monkeypatch.setattr(module, "DISTANCES_AT_ONCE", 5 * 7)
    assert_close(kmeans(points, 5, generator()), whole)


def test_seeds_are_drawn_by_squared_distance() -> None:
    """Without steps the centres are the initial ones: a point ten times as far is a hundred times as likely."""
    points = torch.tensor([[0.0], [0.0], [1.0], [10.0]], dtype=D)
    firsts = [kmeans(points, 2, generator(seed), steps=0) for seed in range(400)]
    from_zero = [float(pair[1]) for pair in firsts if float(pair[0]) == 0]
    far = sum(value == 10 for value in from_zero) / len(from_zero)
    assert abs(far - 100 / 101) < 5 * (100 / 101 / 101 / len(from_zero)) ** 0.5
    assert all(float(a) != float(b) for a, b in firsts)


@pytest.mark.parametrize("offset", [0.0, 1e4, -3e4])
def test_where_the_points_lie_does_not_matter_in_single_precision(offset: float) -> None:
    """A large common offset does not cause rounding in the distances."""
    places = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    points = torch.cat([0.1 * cloud(100, 2, i).float() + place for i, place in enumerate(places)]) + offset
    centres = kmeans(points, 4, generator(1)).double() - offset
    assert float(torch.cdist(places.double(), centres).amin(1).max()) < 0.05


# Orthonormal rows that reveal their rank.


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


def test_the_cut_part_is_reported() -> None:
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


# Greedy choice of rows of a kernel, against conditional variances by dense solves.


def kernel(size: int, rank: int, seed: int = 0) -> Tensor:
    rows = torch.randn(size, rank, dtype=D, generator=torch.Generator().manual_seed(seed))
    return rows @ rows.T


def left(matrix: Tensor, chosen: list[int]) -> Tensor:
    """The variances that some rows leave."""
    if not chosen:
        return matrix.diagonal()
    across = matrix[:, chosen]
    return (matrix - across @ torch.linalg.solve(matrix[chosen][:, chosen], across.T)).diagonal()


@pytest.mark.parametrize("seed", range(4))
def test_each_has_the_largest_variance_that_those_before_leave(seed: int) -> None:
    matrix = kernel(12, 15, seed)
    pivots = greedy_pivots(matrix, 7).tolist()
    assert len(set(pivots)) == 7
    for i, pivot in enumerate(pivots):
        variances = left(matrix, pivots[:i])
        assert int(variances.argmax()) == pivot


@pytest.mark.parametrize("rank", [1, 4])
def test_it_ends_where_nothing_is_left(rank: int) -> None:
    matrix = kernel(9, rank)
    pivots = greedy_pivots(matrix, 9)
    assert len(pivots) == rank
    assert float(left(matrix, pivots.tolist()).abs().max()) <= 1e-10 * float(matrix.diagonal().max())


def test_equal_rows_are_taken_once() -> None:
    matrix = kernel(4, 6)[[0, 0, 1, 2, 2, 3]][:, [0, 0, 1, 2, 2, 3]]
    pivots = greedy_pivots(matrix, 6)
    assert len(pivots) == 4
    assert len(set(torch.tensor([0, 0, 1, 2, 2, 3])[pivots].tolist())) == 4


def test_single_precision_is_widened() -> None:
    """Conditional variances are differences: in float32 they would be rounding after a few steps."""
    matrix = (kernel(20, 3) + 1e-4 * kernel(20, 30, 1)).float()
    assert torch.equal(greedy_pivots(matrix, 15), greedy_pivots(matrix.double(), 15))


@pytest.mark.parametrize("seed", range(4))
def test_each_takes_the_most_off_the_sum_of_variances(seed: int) -> None:
    matrix = kernel(12, 15, seed)
    pivots = trace_pivots(matrix, 6).tolist()
    assert len(set(pivots)) == 6
    for i, pivot in enumerate(pivots):
        sums = [float(left(matrix, [*pivots[:i], other]).sum()) if other not in pivots[:i] else torch.inf
                for other in range(12)]  # fmt: skip
        assert min(range(12), key=lambda other: sums[other]) == pivot


def test_the_sum_ends_where_nothing_is_left() -> None:
    assert len(trace_pivots(kernel(9, 3), 9)) == 3


# Leading eigenpairs from random vectors, and the preconditioner that they give, against dense matrices.

N = 30


def matrix(rank: int = N) -> Tensor:
    """Positive semi-definite with eigenvalues that fall by a factor of three, the first ``rank`` above zero."""
    turn = torch.linalg.qr(torch.randn(N, N, dtype=D, generator=torch.Generator().manual_seed(1)))[0]
    values = 3.0 ** -torch.arange(N, dtype=D)
    values[rank:] = 0.0
    return turn * values @ turn.mT


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_eigenpairs_of_a_matrix_of_low_rank_are_exact() -> None:
    a = matrix(6)
    pairs = randomised_eigenpairs(lambda v: v @ a, N, 12, seed())
    assert_close(pairs.values[:6], 3.0 ** -torch.arange(6, dtype=D))
    assert_close(pairs.vectors.mT * pairs.values @ pairs.vectors, a)
    assert_close(pairs.vectors @ pairs.vectors.mT, torch.eye(len(pairs.values), dtype=D))


def test_leading_eigenvalues_are_near() -> None:
    a = matrix()
    pairs = randomised_eigenpairs(lambda v: v @ a, N, 5, seed())
    assert len(pairs.values) == 5
    assert float((pairs.values - 3.0 ** -torch.arange(5, dtype=D)).abs().max()) < 1e-3 * 3.0**-4


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.5, 1.0])
def test_powers_of_the_preconditioner(exponent: float) -> None:
    a, shift = matrix(6), 0.02
    pairs = randomised_eigenpairs(lambda v: v @ a, N, 8, seed())
    values, turn = torch.linalg.eigh(a + shift * torch.eye(N, dtype=D))
    rows = torch.randn(3, N, dtype=D, generator=seed())
    assert_close(pairs.power(rows, shift, exponent), rows @ (turn * values**exponent @ turn.mT), SOLVED)
    assert pairs.logdet(shift) == pytest.approx(float(values.log().sum()), rel=1e-9)


# Whitened and shared designs in several parts, against dense matrices.

WHITENED_N, C, P = 11, 3, 5


def draw(*shape: int, number: int) -> Tensor:
    return torch.randn(shape, dtype=D, generator=seeded(number))


def definite(*shape: int, number: int) -> Tensor:
    root = draw(*shape, shape[-1], number=number)
    return root @ root.mT + torch.eye(shape[-1], dtype=D)


@pytest.mark.parametrize("part", [2 * C, 4 * C, WHITENED_N * C])
@pytest.mark.parametrize("matrices", [False, True])
def test_parts_take_the_noise_of_their_data(part: int, matrices: bool) -> None:
    x, a = draw(WHITENED_N * C, P, number=1), definite(P, number=2)
    noise = definite(WHITENED_N, C, number=3) if matrices else draw(WHITENED_N, C, number=3).exp()
    root = noise_root(noise, WHITENED_N, C, CPU)
    design = WhitenedDesign(MatrixDesign(x, part), prior_root(a, P, CPU), root, C)
    blocks = torch.block_diag(*(noise if matrices else torch.diag_embed(noise)))
    left = torch.linalg.inv(torch.linalg.cholesky(blocks))
    dense = left @ x @ torch.linalg.inv(torch.linalg.cholesky(a)).mT
    v, u = draw(2, P, number=4), draw(2, WHITENED_N * C, number=5)
    assert_close(forward_product(design, v), v @ dense.mT)
    assert_close(back_product(design, u), u @ dense)
    assert_close(gram_product(design, v), v @ dense.mT @ dense)
    assert root.logdet == pytest.approx(float(torch.logdet(blocks)))


@pytest.mark.parametrize("part", [2, 4, WHITENED_N])
def test_shared_features_in_parts(part: int) -> None:
    x = draw(WHITENED_N, P, number=1)
    design = SharedDesign(MatrixDesign(x, part), C)
    w, u = draw(2, C, P, number=2), draw(2, WHITENED_N, C, number=3)
    assert (design.rows, design.size) == (WHITENED_N * C, C * P)
    assert_close(forward_product(design, w.flatten(1)), torch.einsum("np,kcp->knc", x, w).flatten(1))
    assert_close(back_product(design, u.flatten(1)), torch.einsum("np,knc->kcp", x, u).flatten(1))


def test_no_datum_is_split_between_parts() -> None:
    """4,096 rows in a part are not a multiple of three."""
    x = draw(1500, C, 2, number=1)
    noise = definite(1500, C, number=2)
    white = Regression.build(x, draw(1500, C, number=3), None, noise)
    sizes = [part.rows for part in white.design]
    assert sizes == [4095, 405]
    inverse = torch.linalg.inv(torch.linalg.cholesky(noise))
    v = draw(2, 2, number=4)
    assert_close(forward_product(white.design, v), torch.einsum("ncd,ndp,kp->knc", inverse, x, v).flatten(1))


# Coordinates in which a kernel is the identity.


@pytest.mark.parametrize(("size", "rank"), [(1, 1), (7, 9), (7, 7), (7, 4), (7, 1)])
def test_the_kernel_becomes_the_identity(size: int, rank: int) -> None:
    """The number of coordinates is the rank of the kernel."""
    matrix = kernel(size, rank)
    white = whitening(matrix)
    assert white.shape == (size, min(size, rank))
    assert_close(white.T @ matrix @ white, torch.eye(min(size, rank), dtype=D))
    assert_close(white @ white.T, torch.linalg.pinv(matrix, rtol=1e-10, hermitian=True), SOLVED)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.full((2, 2), float("nan")), "not finite; check the inputs"),
        (torch.full((2, 2), float("inf")), "not finite; check the inputs"),
        (torch.full((1, 1), float("inf")), "not finite; check the inputs"),
        (torch.zeros(3, 3), "zero: no output depends on the selected weights .* choose other weights"),
    ],
)
@pytest.mark.parametrize("way", [whitening, smooth_whitening])
def test_matrices_that_are_not_kernels_are_refused(
    way: Callable[[Tensor], Tensor], matrix: Tensor, message: str
) -> None:
    with pytest.raises(lw.errors.NumericalError, match=message):
        way(matrix)


@pytest.mark.parametrize("size", [20, 200])
def test_small_directions_count_however_many_there_are(size: int) -> None:
    """A weak prior makes the data decide them, and what is left out has the variance of the prior."""
    turn = torch.linalg.qr(kernel(size, size + 5)).Q
    values = torch.zeros(size, dtype=D)
    values[:4] = torch.tensor([1.0, 1e-6, 1e-12, 5e-14], dtype=D)
    assert whitening((turn * values) @ turn.T).shape == (size, 4)


@pytest.mark.parametrize("jitter", [1e-9, 1e-3])
def test_the_smooth_one_has_a_little_on_the_diagonal(jitter: float) -> None:
    matrix = kernel(6, 8)
    white = smooth_whitening(matrix, jitter)
    raised = matrix + jitter * matrix.diagonal().mean() * torch.eye(6, dtype=D)
    assert_close(white @ white.T, torch.linalg.inv(raised), SOLVED)
    assert_close(white, white.triu())


def test_the_smooth_one_never_tells_more_than_there_is() -> None:
    """Singular: K_xZ white whiteᵀ K_Zx stays below the variance at x, and near it."""
    matrix = kernel(8, 3)
    rows = matrix @ smooth_whitening(matrix)
    left = matrix - rows @ rows.T
    assert float(torch.linalg.eigvalsh(left).min()) >= -1e-12 * float(matrix.diagonal().max())
    assert float(left.diagonal().max()) <= 1e-6 * float(matrix.diagonal().max())


def test_the_smooth_one_has_slopes() -> None:
    rows = torch.randn(4, 6, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: smooth_whitening(r @ r.T), (rows,))
    same = torch.randn(1, 6, dtype=D).expand(3, 6).clone().requires_grad_()  # three equal points
    (slope,) = torch.autograd.grad((rows.detach() @ same.T @ smooth_whitening(same @ same.T)).square().sum(), same)
    assert bool(torch.isfinite(slope).all())


def test_jitter_grows_until_it_is_enough() -> None:
    matrix = kernel(6, 8)
    values, vectors = torch.linalg.eigh(matrix)
    values[0] = -1e-8 * float(matrix.diagonal().mean())
    white = smooth_whitening(vectors @ torch.diag(values) @ vectors.T)
    assert bool(torch.isfinite(white).all())
    values[0] = -0.5 * values[-1]
    with pytest.raises(
        lw.errors.NumericalError, match=r"6 inducing points is not positive definite .* Compute in float64"
    ):
        smooth_whitening(vectors @ torch.diag(values) @ vectors.T)
