"""Factors as rows and as diagonals, against the same factors as matrices: everything that a posterior asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature import blocks as factors
from lapwing.curvature.blocks import (
    DiagonalFactor,
    FactorSum,
    MatrixFactor,
    RowsFactor,
    decompose,
    most_rows,
    sum_factors,
)
from lapwing.curvature.kronecker import _KroneckerSum
from lapwing.networks.network import Network
from lapwing.runtime.settings import on_device
from tests.cases import Wrapped
from tests.references.layout import assembled
from tests.tolerances import assert_close

D = torch.float64
LIMIT = 1000


@contextmanager
def rows_from(size: int) -> Iterator[None]:
    """Keep the rows of factors of this size and above, if they are few."""
    before, factors.MIN_KEPT_SIZE = factors.MIN_KEPT_SIZE, size
    try:
        yield
    finally:
        factors.MIN_KEPT_SIZE = before


def wide() -> nn.Module:
    """Few rows of many inputs, and few gradients of many outputs: T = 1."""
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 2))


def sequence() -> nn.Module:
    """The same with a weight that is used at three positions."""
    return nn.Sequential(nn.Linear(24, 5), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv1d(12, 4, 4, groups=2), nn.Flatten(), nn.Linear(4, 2))


SHAPES = {"wide": (wide, (24,), 6), "sequence": (sequence, (3, 24), 4), "grouped": (grouped, (12, 4), 5)}


def problem(name: str, dtype: torch.dtype = D) -> tuple[nn.Module, Tensor, Tensor]:
    build, shape, count = SHAPES[name]
    torch.manual_seed(3)
    model = build().to(dtype)
    return model, torch.randn(count, *shape, dtype=dtype), torch.randn(count, 2, dtype=dtype)


def fitted(name: str, size: int, dtype: torch.dtype = D, **options: Any) -> lw.Fitted:
    model, x, y = problem(name, dtype)
    given = {"likelihood": lw.Gaussian(noise_std=0.3), "method": lw.Kron(), "prior": 0.7, **options}
    with rows_from(size):
        return lw.fit(model, [(x[:2], y[:2]), (x[2:], y[2:])], **given)


def pair(name: str, dtype: torch.dtype = D, **options: Any) -> tuple[lw.Fitted, lw.Fitted]:
    """The same posterior with rows and with matrices."""
    thin, full = fitted(name, 10, dtype, **options), fitted(name, 10_000, dtype, **options)
    kinds = lambda posterior: {type(f) for b in blocks(posterior) for f in (b.inp, b.out)}
    if not isinstance(options.get("method"), lw.EKron):
        assert RowsFactor in kinds(thin)
        assert RowsFactor not in kinds(full)
    return thin, full


def blocks(posterior: lw.Fitted) -> Any:
    curvature = posterior.base.curvature
    return getattr(curvature, "blocks", None) or curvature.parts[0].blocks


PRIORS: dict[str, Any] = {
    "one": 0.7, "layers": lw.priors.per_layer(0.4), "g": lw.priors.g_prior(0.5),
    "by input": {"wide": {"0.weight": 0.5, "0.bias": 2.0, "2.weight": 1.5, "2.bias": 0.2},
                 "sequence": {"0.weight": 0.5, "0.bias": 2.0, "3.weight": 1.5, "3.bias": 0.2},
                 "grouped": {"0.weight": 0.5, "0.bias": 2.0, "2.weight": 1.5, "2.bias": 0.2}},
}  # fmt: skip


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", SHAPES)
def test_rows_give_the_posterior_of_the_matrix(name: str, prior: str) -> None:
    given = PRIORS[prior] if prior != "by input" else lw.priors.diagonal(PRIORS[prior][name])
    thin, full = pair(name, prior=given)
    x = torch.randn(5, *SHAPES[name][1], dtype=D)
    one, two = thin.posterior.precision, full.posterior.precision
    assert_close(assembled(thin.base.curvature), assembled(full.base.curvature))
    assert_close(one.logdet(), two.logdet())
    assert_close(one.variances(), two.variances())
    assert_close(thin.base.gammas(), full.base.gammas())
    v, eps = torch.randn(2, 3, len(thin.base.theta), dtype=D)
    assert_close(one.solve(v), two.solve(v))
    assert_close((one.adjoint(v) * eps).sum(-1), (v * one.sample(eps)).sum(-1))
    for points in (x, problem(name)[1]):
        assert_close(thin.functions(points).cov, full.functions(points).cov)
        assert_close(thin.functions(points, joint=True).cov, full.functions(points, joint=True).cov)
    jacobian = thin.network.linearise(x).jacobians()
    assert_close(one.quadratic(jacobian, full=False), two.quadratic(jacobian, full=False))


def test_rows_keep_the_digits_of_float32() -> None:
    """At the data, where the prior's variance must cancel: rows lose no more digits than the matrix does."""
    thin, full = pair("wide", torch.float32, prior=1e-4)
    exact = fitted("wide", 10_000, prior=1e-4)
    x = problem("wide")[1]
    expected = exact.functions(x).variance
    gaps = [float((p.functions(x.float()).variance - expected).abs().max()) for p in (thin, full)]
    assert gaps[0] < 4 * gaps[1] + 1e-6 * float(expected.max())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_corrected_eigenvalues_in_a_basis_of_rows(name: str, sharing: str) -> None:
    thin, full = pair(name, method=lw.EKron(sharing=sharing))
    assert_close(assembled(thin.base.curvature).trace(), assembled(full.base.curvature).trace())
    if sharing == "expand":  # all Jacobians are combinations of the rows, so that nothing is left in the rest
        x = torch.randn(5, *SHAPES[name][1], dtype=D)
        assert_close(thin.functions(x).cov, full.functions(x).cov)
        assert_close(thin.log_evidence(), full.log_evidence())


def test_a_noise_for_each_output_weighs_the_rows() -> None:
    thin, full = pair("wide", likelihood=lw.Gaussian(per_output=True))
    noise = torch.tensor([0.1, 0.4], dtype=D).requires_grad_()
    slopes = []
    for posterior in (thin, full):
        evidence = posterior.base.with_noise(noise).log_evidence()
        slopes.append(torch.autograd.grad(evidence, noise)[0])
    assert_close(*slopes)


@pytest.mark.parametrize("name", SHAPES)
def test_the_cells_of_a_mixture_share_the_rotation(name: str) -> None:
    thin, full = pair(name)
    x, priors = torch.randn(5, *SHAPES[name][1], dtype=D), torch.tensor([0.2, 0.7, 3.0], dtype=D)
    each = []
    for posterior in (thin, full):
        base, jacobian = posterior.base, posterior.network.linearise(x).jacobians()
        members = [base.with_problem(base.problem.with_precisions(prior)) for prior in priors]
        assert len({id(member.precision.blocks[0].inp) for member in members}) == 1
        each.append(torch.stack(base.covariances(jacobian, members)))
    assert_close(*each)


@pytest.mark.parametrize("method", [lw.Kron(), lw.EKron(), lw.Kron(factor_limit=12), lw.EKron(factor_limit=12)])
def test_rows_and_diagonals_come_back_from_a_file(method: Any, tmp_path: Path) -> None:
    posterior, x = fitted("wide", 10, method=method), torch.randn(5, 24, dtype=D)
    posterior.save(tmp_path / "net")
    again = lw.load(tmp_path / "net", posterior.network.model)
    assert_close(again.functions(x).cov, posterior.functions(x).cov)
    assert again.findings == posterior.findings
    moved = on_device(posterior.posterior, torch.device("meta"), keep=posterior.network.model)
    tensors = [t for b in moved.curvature.blocks for t in b.state().tensors.values() if t.ndim]
    assert {t.device.type for t in tensors} == {"meta"}


def test_a_wide_factor_is_a_diagonal_with_a_finding() -> None:
    """Rows of 24 numbers above the limit of 12, and more of them than may be kept."""
    posterior, whole = fitted("wide", 10, method=lw.Kron(factor_limit=8)), fitted("wide", 10_000)
    first, matrix = blocks(posterior)[0], blocks(whole)[0]
    assert (type(first.inp), first.inp.exact) == (DiagonalFactor, False)
    assert_close(first.inp.values, matrix.inp.matrix.diagonal(dim1=-2, dim2=-1))
    assert_close(first.out.values, matrix.out.matrix.diagonal(dim1=-2, dim2=-1))
    expected = torch.kron(torch.diag(first.out.values[0]), torch.diag(first.inp.values[0])) / first.rows
    assert_close(first.dense(), expected)
    assert [f.split(" is a")[0] for f in posterior.findings] == [
        "the input factor of 0.weight", "the output factor of 0.weight", "the input factor of 2.weight",
    ]  # fmt: skip
    assert (
        "0.weight is a diagonal, an approximation: a matrix of 25 rows is above the factor_limit" in posterior.summary()
    )
    assert whole.findings == ()
    x = torch.randn(5, 24, dtype=D)
    dense = torch.linalg.inv(assembled(posterior.base.curvature) / 0.09 + torch.diag(posterior.prior.vector.double()))
    jacobian = posterior.network.linearise(x).jacobians().whole()
    assert_close(posterior.functions(x).cov, jacobian @ dense @ jacobian.mT)


@pytest.mark.parametrize("method", [lw.Kron, lw.EKron])
def test_the_head_of_a_vocabulary(method: Any) -> None:
    """30 classes, whose output factor has a closed form; above the limit its diagonal is that of the matrix."""
    torch.manual_seed(1)
    model, x, y = nn.Linear(3, 30).double(), torch.randn(12, 3, dtype=D), torch.arange(12)
    limits = (LIMIT, 8)
    whole, wide = (lw.fit(model, [(x, y)], "classification", method=method(factor_limit=n), prior=1.0) for n in limits)
    assert whole.findings == ()
    assert [f.split(" is a")[0] for f in wide.findings] == ["the output factor of weight"]
    if method is lw.Kron:
        p = model(x).softmax(-1).detach()
        assert_close(blocks(whole)[0].out.dense()[0], torch.diag(p.sum(0)) - p.T @ p)
        assert_close(blocks(wide)[0].out.values[0], (p * (1 - p)).sum(0))
    one, two = (assembled(posterior.base.curvature) for posterior in (whole, wide))
    if method is lw.EKron:  # the trace is exact in every basis
        assert_close(one.trace(), two.trace())
    inverse = torch.linalg.inv(two + torch.eye(len(two), dtype=D))
    jacobian = wide.network.linearise(x).jacobians().whole()
    assert_close(wide.functions(x).cov, jacobian @ inverse @ jacobian.mT)


def test_outputs_with_their_own_noise_have_a_diagonal_factor() -> None:
    """The Hessian of a Gaussian likelihood is the identity, so the last layer decomposes no output factor."""
    factor = blocks(fitted("wide", 10_000))[1].out
    assert (type(factor), factor.exact) == (DiagonalFactor, True)
    assert factor.values.tolist() == [[6.0, 6.0]]


def test_an_embedding_is_diagonal_exactly() -> None:
    """The rows are one-hot, so that nothing is approximated above the limit: the factor is that of these rows."""
    model = Wrapped(lambda m, t: m.head(m.table(t)), table=nn.Embedding(30, 4), head=nn.Linear(4, 2)).double()
    tokens, y = torch.randint(0, 30, (12, 5)), torch.randn(12, 5, 2, dtype=D)
    posterior = lw.fit(model, [(tokens, y)], lw.Gaussian(noise_std=1.0), method=lw.Kron(factor_limit=8), prior=1.0)
    (table, _), hot = blocks(posterior), torch.nn.functional.one_hot(tokens.flatten(), 30).double()
    assert_close(table.inp.dense()[0], hot.T @ hot)
    assert table.inp.exact
    assert posterior.findings == ()


def test_a_batch_that_does_not_use_an_embedding_adds_nothing() -> None:
    """Its Jacobian is one of zeros, in the form of a linear map: no matrix of the size of the table may come of it."""

    def run(m: Any, tokens: Tensor) -> Tensor:
        more = m.rare(tokens % 10) if int(tokens.max()) >= 10 else 0
        return m.head(m.table(tokens % 10) + more)

    model = Wrapped(run, table=nn.Embedding(10, 3), rare=nn.Embedding(10, 3), head=nn.Linear(3, 2)).double()
    with_rare, without = torch.tensor([3, 13, 4, 12]), torch.tensor([1, 2, 2])
    network = Network.build(model, with_rare)
    sums = [_KroneckerSum(block, "expand", network, LIMIT) for block in network.layout]
    for tokens in (without, with_rare):
        for total, (_, part) in zip(sums, network.linearise(tokens).jacobians(), strict=True):
            total.add(part, first=True)
    values = [total.value(total.totals()) for total in sums]
    rare = {block.weight: value for block, value in zip(network.layout, values, strict=True)}["rare.weight"]
    assert rare.inp.values.tolist() == [torch.bincount(with_rare % 10, minlength=10).tolist()]
    assert rare.rows == 4


def test_sums_of_factors_change_their_form_only_where_they_must() -> None:
    with rows_from(10):
        assert (most_rows(24, LIMIT), most_rows(9, LIMIT), most_rows(24, 10)) == (12, 0, 4)
        x = [torch.randn(1, 5, 24, dtype=D) for _ in range(3)]
        dense = [rows.mT @ rows for rows in x]
        rows, tight = [RowsFactor(r, D, LIMIT) for r in x], [RowsFactor(r, D, 12) for r in x]
        matrix, diagonal = MatrixFactor(dense[2], D), DiagonalFactor(torch.ones(1, 24, dtype=D), D)
        weights = torch.tensor([0.5, 2.0], dtype=D)
        sums = {
            "two": (sum_factors(rows[:2], weights), RowsFactor, 0.5 * dense[0] + 2 * dense[1]),
            "three": (sum_factors(rows), MatrixFactor, sum(dense)),
            "too wide": (sum_factors(tight), DiagonalFactor, torch.diag_embed(sum(dense).diagonal(dim1=1, dim2=2))),
            "with a matrix": (sum_factors([rows[0], matrix]), MatrixFactor, dense[0] + dense[2]),
            "with ones": (sum_factors([diagonal, matrix]), MatrixFactor, torch.eye(24, dtype=D) + dense[2]),
            "ones and rows": (sum_factors([diagonal, rows[0]]), MatrixFactor, torch.eye(24, dtype=D) + dense[0]),
            "ones twice": (sum_factors([diagonal, diagonal]), DiagonalFactor, 2 * torch.eye(24, dtype=D)[None]),
            "not exact": (sum_factors([replace(diagonal, exact=False), matrix]), DiagonalFactor,
                          torch.diag_embed(1 + dense[2].diagonal(dim1=1, dim2=2))),
        }  # fmt: skip
        for name, (total, kind, expected) in sums.items():
            assert type(total) is kind, name
            assert_close(total.dense(), expected)
        assert [name for name, (total, _, _) in sums.items() if not total.exact] == ["too wide", "not exact"]


@pytest.mark.parametrize(("limit", "counts", "kind"), [(LIMIT, (4, 8), RowsFactor), (LIMIT, (4, 9, 3), MatrixFactor),
                                                       (12, (4, 4), DiagonalFactor)])  # fmt: skip
def test_a_sum_keeps_rows_until_there_are_too_many(limit: int, counts: tuple[int, ...], kind: type) -> None:
    with rows_from(10):
        total, parts = FactorSum(24, 2, torch.device("cpu"), D, limit), []
        for count in counts:
            runs = torch.randn(2, 1, 24, count, dtype=D).mT  # as the gradient of a convolution lies in memory
            total.add_runs(runs) if count % 2 else total.add(runs.flatten(1, 2))
            parts.append(runs.flatten(1, 2))
        rows, value = torch.cat(parts, 1), total.value(total.totals())
    assert type(value) is kind
    expected = rows.mT @ rows
    assert_close(value.diagonal(), expected.diagonal(dim1=1, dim2=2))
    if kind is not DiagonalFactor:
        assert_close(value.dense(), expected)
        spectrum = decompose([value])[0]
        weights = spectrum.basis.expand(spectrum.values, spectrum.basis.coordinates(rows).shape[-1])
        assert_close(spectrum.basis.combine(spectrum.basis.coordinates(rows) * weights.unsqueeze(-2)), rows @ expected)


def test_rows_of_lower_rank_have_an_orthonormal_basis() -> None:
    """Repeated rows, a row of zeros, and sizes from 1 to 1e-9: the vectors of the smallest are rounding."""
    rows = torch.randn(1, 8, 30, dtype=D) * torch.logspace(0, -9, 8, dtype=D)[:, None]
    rows[0, 3], rows[0, 5] = rows[0, 0], 0
    spectrum = RowsFactor(rows, D).spectrum
    vectors = spectrum.basis.vectors[0]
    assert_close(vectors.T @ vectors, torch.eye(8, dtype=D))
    assert_close((vectors * spectrum.values[0, :8]) @ vectors.T, rows[0].T @ rows[0])


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, sizes: set[int]) -> Iterator[list[bytes]]:
    """Collect every matrix of one of these sizes that is decomposed, by its bytes."""
    seen: list[bytes] = []
    plain = torch.linalg.eigh

    def eigh(matrix: Tensor) -> Any:
        if matrix.shape[-1] in sizes:
            seen.extend(each.detach().numpy().tobytes() for each in matrix.reshape(-1, *matrix.shape[-2:]))
        return plain(matrix)

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", eigh)
        yield seen


def test_every_factor_is_decomposed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the fit, the evidence, a mixture, predictions of every kind and saving together; and once after loading."""
    model, (x, y) = (
        nn.Sequential(nn.Linear(9, 11), nn.Tanh(), nn.Linear(11, 3)).double(),
        torch.randn(2, 40, 9, dtype=D),
    )
    with counted(monkeypatch, {10, 11, 12}) as seen:
        posterior = lw.fit(model, [(x, y[:, 0].long().clamp(0, 2))], "classification", prior=None)
        for _ in range(2):
            posterior.predict(x[:4])
        posterior.functions(x[:4], joint=True)
        posterior.function_samples(x[:4], 3)
        posterior.with_prior(0.3).predict(x[:4])
        posterior.save(tmp_path / "net")
        assert len(seen) == len(set(seen)) == 3  # 10 and 12 inputs, 11 outputs
        again = lw.load(tmp_path / "net", model)
        again.predict(x[:4])
        again.predict(x[4:8])
        assert len(seen) == 6


def test_a_noise_for_each_output_decomposes_inputs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output factors change with the ratio of the noises; the input factor does not."""
    posterior = fitted("wide", 10_000, likelihood=lw.Gaussian(per_output=True))
    with counted(monkeypatch, {25}) as seen:
        for ratio in (0.1, 0.4):
            posterior.base.with_noise(torch.tensor([0.1, ratio], dtype=D)).log_evidence()
        assert len(seen) == 1


def test_equal_sizes_are_decomposed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one width: one call for all their factors, and the same numbers as one by one."""
    torch.manual_seed(0)
    matrices = [MatrixFactor(a.mT @ a, D) for a in torch.randn(3, 2, 9, 6, dtype=D)]
    rows = [RowsFactor(torch.randn(1, 6, 20, dtype=D), D), RowsFactor(torch.randn(1, 5, 20, dtype=D), D)]
    alone = [type(f)(f.tensors().popitem()[1], D).spectrum for f in (*matrices, *rows)]
    sizes: list[tuple[int, ...]] = []
    plain = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: sizes.append(tuple(m.shape)) or plain(m))
    for one, two in zip(decompose([*matrices, *rows]), alone, strict=True):
        assert_close(one.values, two.values)
    assert sizes == [(7, 6, 6), (1, 5, 5)]
    decompose([*matrices, *rows])
    assert len(sizes) == 2


def test_long_decompositions_show_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bars = []
    for progress, long in ((True, 1.0), (False, 1.0), (True, 1e12)):
        monkeypatch.setattr(factors, "LONG_WORK", long)
        fitted("wide", 10, prior=None, tuner=lw.tuners.MaximiseEvidence(), progress=progress)
        bars.append("eigendecompositions" in capsys.readouterr().err)
    assert bars == [True, False, False]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_whitened_diagonal_factor_is_that_of_the_dense_matrix(groups: int) -> None:
    values, root = torch.rand(groups, 4, dtype=D) + 0.5, torch.rand(groups, 4, dtype=D) + 0.5
    spectrum = DiagonalFactor(values, D).whiten(root)
    dense = root[..., None] * values.diag_embed() * root[..., None, :]
    assert_close(spectrum.values.sort().values, torch.linalg.eigvalsh(dense))
