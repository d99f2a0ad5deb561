"""Operators of a fitted posterior: the Jacobian and the GGN by their products, against dense matrices."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.linalg.krylov import block_conjugate_gradients, conjugate_gradients
from lapwing.linalg.operators import Product
from tests import problems
from tests.cases import BY_NAME, CASES, Case, cast
from tests.references import dense
from tests.tolerances import SOLVED, assert_close

D = torch.float64
SOME = ["mlp", "cnn", "attention", "lstm", "embedding", "token_level", "squeezed"]


@pytest.fixture(params=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


def fitted(case: Case, dtype: torch.dtype = D, **options: Any) -> lw.Fitted:
    options = {"method": lw.baselines.MapOnly(), "prior": 1.0, **options}
    return lw.fit(case.build(dtype), problems.batches(case, dtype=dtype), problems.likelihood(case), **options)


def columns(size: int, count: int = 3) -> Tensor:
    return torch.randn(size, count, dtype=D, generator=torch.Generator().manual_seed(4))


def test_dense_matrices(case: Case) -> None:
    jac, ggn = problems.dense_ggn(case, case.build())
    posterior, data = fitted(case), problems.batches(case)
    x = jac.flatten(0, 1)
    j, g = posterior.jacobian(data), posterior.ggn(data)
    assert (j.shape, j.T.shape, g.shape, g.T.shape) == (x.shape, x.T.shape, ggn.shape, ggn.shape)
    v, u = columns(x.shape[1]), columns(x.shape[0])
    for operator, matrix, several in ((j, x, v), (j.T, x.T, u), (j.T.T, x, v), (g, ggn, v), (g.T, ggn, v)):
        product = operator @ several
        assert product.dtype == D
        assert_close(product, matrix @ several)
        assert_close(operator @ several[:, 1], matrix @ several[:, 1])
        assert_close(operator @ several[:, :1], matrix @ several[:, :1])


@pytest.mark.parametrize("cache", [0.5, 0.0], ids=["held", "streamed"])
@pytest.mark.parametrize("name", SOME)
def test_two_calls_agree_to_the_bit(name: str, cache: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.tangent.CACHE", cache)
    case = BY_NAME[name]
    posterior, data = fitted(case), problems.batches(case)
    j = posterior.jacobian(data)
    for operator in (j, j.T, posterior.ggn(data)):
        several = columns(operator.shape[1], 5)
        assert torch.equal(operator @ several, operator @ several)


def test_one_pass_for_all_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    case, passes = BY_NAME["attention"], []

    class Counting:
        def __iter__(self) -> Iterator[Any]:
            passes.append(1)
            yield from problems.batches(case)

    posterior = fitted(case)
    j = posterior.jacobian(Counting())
    for operator in (j, j.T, posterior.ggn(Counting())):
        before = len(passes)
        _ = operator @ columns(operator.shape[1], 7)
        assert len(passes) == before + 1


def test_float32_models_have_float64_products_of_float32_accuracy(case: Case) -> None:
    model, inputs = case.build(torch.float32).double(), cast(case.batch(6, torch.float32), D)
    x = dense.by_datum(dense.jacobian(model, inputs, 6), case.outputs[-1]).flatten(0, 1)
    posterior = fitted(case, torch.float32)
    j = posterior.jacobian(problems.batches(case, dtype=torch.float32))
    product = j @ columns(x.shape[1])
    assert product.dtype == D
    assert_close(product, x @ columns(x.shape[1]), dtype=torch.float32)
    assert_close(j.T @ columns(x.shape[0]).float(), x.T @ columns(x.shape[0]), dtype=torch.float32)


@pytest.mark.parametrize("name", SOME)
def test_scipy_finds_the_eigenvalues(name: str) -> None:
    case = BY_NAME[name]
    _, ggn = problems.dense_ggn(case, case.build())
    operator = fitted(case).ggn(problems.batches(case)).scipy()
    assert operator.shape == ggn.shape
    assert operator.dtype == np.float64
    values, vectors = scipy.sparse.linalg.eigsh(operator, k=4, which="LM", v0=np.ones(len(ggn)))
    exact = torch.linalg.eigvalsh(ggn)[-4:]
    assert_close(torch.from_numpy(values), exact, SOLVED)
    assert_close(ggn @ torch.from_numpy(vectors), torch.from_numpy(vectors) * exact, SOLVED)


@pytest.mark.parametrize("name", SOME)
def test_scipy_solves_by_conjugate_gradients(name: str) -> None:
    case = BY_NAME[name]
    _, ggn = problems.dense_ggn(case, case.build())
    size = len(ggn)
    operator = fitted(case).ggn(problems.batches(case)).scipy()
    damped = operator + scipy.sparse.linalg.aslinearoperator(0.3 * scipy.sparse.identity(size))
    rhs = columns(size, 1)[:, 0]
    posterior, failed = scipy.sparse.linalg.cg(damped, rhs.numpy(), rtol=1e-12)
    assert failed == 0
    exact = torch.linalg.solve(ggn + 0.3 * torch.eye(size, dtype=D), rhs)
    assert_close(torch.from_numpy(posterior), exact, SOLVED)


@pytest.mark.parametrize("name", SOME)
def test_scipy_solves_least_squares(name: str) -> None:
    """Products both ways: with vectors, with columns, and transposed."""
    case = BY_NAME[name]
    jac, _ = problems.dense_ggn(case, case.build())
    x = jac.flatten(0, 1)
    operator = fitted(case).jacobian(problems.batches(case)).scipy()
    u, v = columns(x.shape[0]), columns(x.shape[1])
    assert_close(torch.from_numpy(operator @ v.numpy()), x @ v)
    assert_close(torch.from_numpy(operator.T @ u.numpy()), x.T @ u)
    assert_close(torch.from_numpy(operator.rmatvec(u[:, 0].numpy())), x.T @ u[:, 0])
    solution = scipy.sparse.linalg.lsqr(operator, u[:, 0].numpy(), damp=0.3, atol=1e-14, btol=1e-14, iter_lim=2000)[0]
    exact = torch.linalg.solve(x.T @ x + 0.09 * torch.eye(x.shape[1], dtype=D), x.T @ u[:, 0])
    assert_close(torch.from_numpy(solution), exact, SOLVED)


def classifier() -> tuple[nn.Module, list[Any]]:
    """160 weights after some steps of training, and inputs of unequal size."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double()
    x, y = torch.randn(150, 8, dtype=D) * torch.logspace(0.7, -0.7, 8, dtype=D), torch.randint(0, 4, (150,))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model, [(x, y)]


def test_preconditioners_solve_the_same_system_in_fewer_iterations() -> None:
    """None, the diagonal, and posteriors of the same network and prior, up to the posterior itself.

    Row by row with the inverse, and in one block with its root.
    """
    model, data = classifier()
    fit = lambda method: lw.fit(model, data, "classification", method=method, prior=0.05)
    g = fit(lw.baselines.MapOnly()).ggn(data)
    eye = torch.eye(160, dtype=D)
    matrix, rhs = g @ eye + 0.05 * eye, columns(160, 4).T
    shifted: Product = lambda v: (g @ v.T).T + 0.05 * v
    posteriors = {"kron": lw.Kron(), "ekron": lw.EKron(), "full": lw.Full(), "low rank": lw.LowRank(60)}
    known = {name: fit(method).posterior.precision for name, method in posteriors.items()}
    inverses: dict[str, Product | None] = {
        "none": None,
        "diagonal": lambda rows: rows / matrix.diagonal(),
        **{name: precision.solve for name, precision in known.items()},
    }
    roots: dict[str, dict[str, Product]] = {
        "none": {},
        "diagonal": {"root": lambda rows: rows * matrix.diagonal().rsqrt()},
        **{name: {"root": precision.sample, "adjoint": precision.adjoint} for name, precision in known.items()},
    }
    exact = torch.linalg.solve(matrix, rhs.T).T
    alone, block = {}, {}
    written_out: Product = lambda v: v @ matrix
    for name in inverses:
        product = written_out if name in ("none", "diagonal") else shifted  # the slowest with the matrix itself
        rows = conjugate_gradients(product, rhs, precondition=inverses[name], tolerance=1e-11, max_iterations=2000)
        together = block_conjugate_gradients(product, rhs, **roots[name], tolerance=1e-11)
        assert_close(rows.x, exact, SOLVED)
        assert_close(together.x, exact, SOLVED)
        alone[name], block[name] = rows.iterations, together.iterations
    for took, share in ((alone, 0.4), (block, 0.5)):  # a block has less to gain: it knows more directions by itself
        assert took["full"] == 1
        assert took["diagonal"] < 0.8 * took["none"]
        assert max(took["kron"], took["ekron"]) < 0.6 * took["none"]
        assert took["low rank"] < share * took["none"]
    assert all(block[name] < 0.6 * alone[name] for name in alone if name != "full")


def test_the_dispersion_does_not_enter() -> None:
    case = BY_NAME["mlp"]
    y = torch.randn(6, 3, dtype=D)
    data = [(case.batch(6), y)]
    posterior = lw.fit(case.build(), data, lw.Gaussian(noise_std=0.1), method=lw.baselines.MapOnly(), prior=1.0)
    x = dense.jacobian(case.build(), case.batch(6), 6).flatten(0, 1)
    assert_close(posterior.ggn(data) @ columns(83), x.T @ x @ columns(83))


def test_other_data_than_those_of_the_fit() -> None:
    case = BY_NAME["mlp"]
    posterior = fitted(case)
    inputs = case.batch(5, seed=8)
    x = dense.jacobian(case.build(), inputs, 5).flatten(0, 1)
    j = posterior.jacobian([(inputs, problems.targets(case, 5))])
    assert j.shape == (15, 83)
    assert_close(j @ columns(83), x @ columns(83))


@pytest.mark.parametrize("method", [lw.Full(), lw.Sampled(num_samples=2), lw.Kron()], ids=["full", "sampled", "kron"])
def test_whatever_the_method(method: Any) -> None:
    case = BY_NAME["mlp"]
    _, ggn = problems.dense_ggn(case, case.build())
    assert_close(fitted(case, method=method).ggn(problems.batches(case)) @ columns(83), ggn @ columns(83))


@pytest.mark.parametrize("weights", [lw.last_layer, lw.subnetwork(torch.arange(0, 83, 7))], ids=["last", "some"])
def test_some_of_the_weights(weights: Any) -> None:
    case = BY_NAME["mlp"]
    jac, ggn = problems.dense_ggn(case, case.build())
    posterior = fitted(case, weights=weights)
    chosen = torch.arange(0, 83, 7) if posterior.network.selection.index is not None else torch.arange(65, 83)
    v = columns(len(chosen))
    assert_close(posterior.ggn(problems.batches(case)) @ v, ggn[chosen][:, chosen] @ v)
    assert_close(posterior.jacobian(problems.batches(case)) @ v, jac.flatten(0, 1)[:, chosen] @ v)


def test_a_mean_elsewhere_than_at_the_weights() -> None:
    """A tangent model evaluated at its own optimum still has the Jacobian and the GGN of w̃."""
    case = BY_NAME["mlp"]
    data = [(case.batch(6), torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(3)))]
    posterior = lw.fit(case.build(), data, lw.Gaussian(), method=lw.Full(), tuner=lw.tuners.LinearMode(mean="tangent"))
    assert posterior.network.shift is not None
    x = dense.jacobian(case.build(), case.batch(6), 6).flatten(0, 1)
    assert_close(posterior.jacobian(data) @ columns(83), x @ columns(83))
    assert_close(posterior.ggn(data) @ columns(83), x.T @ x @ columns(83))


@pytest.mark.parametrize(
    ("vector", "seen"),
    [
        (torch.zeros(82), r"a tensor \(82,\) of torch.float32"),
        (torch.zeros(3, 83), r"a tensor \(3, 83\)"),
        (torch.zeros(()), r"a tensor \(\)"),
        (torch.zeros(83, 2, 2), r"a tensor \(83, 2, 2\)"),
        (torch.zeros(83, 0), r"a tensor \(83, 0\)"),
        (torch.zeros(83, dtype=torch.complex64), r"a tensor \(83,\) of torch.complex64"),
        (np.zeros(83), "a ndarray"),
    ],
    ids=["short", "rows", "scalar", "cube", "none", "complex", "numpy"],
)
def test_vectors_of_another_shape_are_refused(vector: Any, seen: str) -> None:
    operator = fitted(BY_NAME["mlp"]).ggn(problems.batches(BY_NAME["mlp"]))
    with pytest.raises(
        lw.errors.DataError, match=rf"an operator \(83, 83\) with {seen}.*expected a real tensor \(83,\)"
    ):
        operator @ vector


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(torch.nan, D), (torch.inf, D), (-torch.inf, D), (1e39, torch.float32), (-1e39, torch.float32)],
)
@pytest.mark.parametrize("kind", ["jacobian", "ggn"])
def test_vectors_out_of_range_are_refused(value: float, dtype: torch.dtype, kind: str) -> None:
    case = BY_NAME["mlp"]
    operator = getattr(fitted(case, dtype), kind)(problems.batches(case, dtype=dtype))
    vector = columns(83)
    vector[5, 1] = value
    with pytest.raises(
        lw.errors.DataError, match=rf"largest entry is {re.escape(f'{abs(value):.3g}')}; expected finite .*{dtype}"
    ):
        operator @ vector


@pytest.mark.parametrize("kind", ["jacobian", "ggn"])
def test_products_out_of_range_are_refused(kind: str) -> None:
    """Every entry is a number that the network has; their sums are not."""
    case = BY_NAME["mlp"]
    operator = getattr(fitted(case, torch.float32), kind)(problems.batches(case, dtype=torch.float32))
    with pytest.raises(
        lw.errors.NumericalError, match=r"largest entry is 3\.39e\+38 is beyond the 3\.4e\+38 of torch.float32"
    ):
        operator @ torch.full((83, 2), 3.39e38)


def test_vectors_of_whole_numbers_will_do() -> None:
    case = BY_NAME["mlp"]
    operator = fitted(case).ggn(problems.batches(case))
    expected = operator @ torch.ones(83, dtype=D)
    for dtype in (torch.bool, torch.uint8, torch.int64):
        assert torch.equal(operator @ torch.ones(83, dtype=dtype), expected)


@pytest.mark.parametrize("kind", ["jacobian", "ggn"])
def test_scipy_has_no_complex_products(kind: str) -> None:
    case = BY_NAME["mlp"]
    operator = getattr(fitted(case), kind)(problems.batches(case)).scipy()
    for product, size in ((operator.matvec, operator.shape[1]), (operator.rmatvec, operator.shape[0])):
        with pytest.raises(lw.errors.DataError, match=rf"an array \({size},\) of complex128; expected real numbers"):
            product(1j * np.ones(size))
    with pytest.raises(lw.errors.DataError, match="of complex64"):
        operator @ np.ones((operator.shape[1], 2), dtype=np.complex64)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_autocast_has_no_say(narrow: torch.dtype) -> None:
    case = BY_NAME["mlp"]
    posterior, data = fitted(case, torch.float32), problems.batches(case, dtype=torch.float32)
    j = posterior.jacobian(data)
    for operator in (j, j.T, posterior.ggn(data)):
        several = columns(operator.shape[1])
        expected = operator @ several
        with torch.autocast("cpu", narrow):
            assert torch.equal(operator @ several, expected)


def test_vectors_that_are_learned_get_no_graph() -> None:
    """Products are for solvers; nothing is remembered for a backward pass."""
    case = BY_NAME["mlp"]
    leaf = columns(83).requires_grad_()
    assert not (fitted(case).ggn(problems.batches(case)) @ leaf).requires_grad


def test_a_loader_that_shuffles() -> None:
    """Rows of one pass: J Jᵀ from two products is symmetric and has the right spectrum."""
    case = BY_NAME["mlp"]
    pairs = TensorDataset(case.batch(6), problems.targets(case, 6))
    loader = DataLoader(pairs, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
    jac, ggn = problems.dense_ggn(case, case.build())
    posterior = fitted(case)
    j = posterior.jacobian(loader)
    inner = j @ (j.T @ torch.eye(18, dtype=D))
    assert_close(inner, inner.T)
    x = jac.flatten(0, 1)
    assert_close(torch.linalg.eigvalsh(inner), torch.linalg.eigvalsh(x @ x.T))
    assert_close(posterior.ggn(loader) @ columns(83), ggn @ columns(83))


class Changing:
    """Other inputs at every pass."""

    def __init__(self, case: Case, change: Any) -> None:
        self.case, self.change, self.gen = case, change, torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[Any]:
        yield self.change(self.case.batch(6), problems.targets(self.case, 6), self.gen)


CHANGES = {
    "augmented": lambda x, y, gen: (x + 0.1 * torch.randn(x.shape, dtype=D, generator=gen), y),
    "shuffled": lambda x, y, gen: (lambda order: (x[order], y[order]))(torch.randperm(6, generator=gen)),
}


@pytest.mark.parametrize(
    ("change", "kind"), [("augmented", "jacobian"), ("shuffled", "jacobian"), ("augmented", "ggn")]
)
def test_data_that_change_and_do_not_fit_are_refused(change: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["mlp"]
    posterior = fitted(case)
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    data = Changing(case, CHANGES[change])
    message = (
        "a second reading of the data" if change == "augmented" else "two passes over the data gave different rows"
    )
    with pytest.raises(lw.LapwingError, match=message):
        getattr(posterior, kind)(data)


@pytest.mark.parametrize("kind", ["jacobian", "ggn"])
def test_a_loader_that_leaves_data_out_by_chance_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["mlp"]
    pairs = TensorDataset(case.batch(6), problems.targets(case, 6))
    loader = DataLoader(pairs, batch_size=4, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(1))
    posterior = fitted(case)
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    with pytest.raises(lw.LapwingError, match="a second reading of the data gave other rows"):
        getattr(posterior, kind)(loader)


@pytest.mark.parametrize("kind", ["jacobian", "ggn"])
def test_data_that_change_and_fit_are_refused_as_well(kind: str) -> None:
    case = BY_NAME["mlp"]
    with pytest.raises(lw.errors.DataError, match="a second reading of the data gave other rows"):
        getattr(fitted(case), kind)(Changing(case, CHANGES["augmented"]))


@pytest.mark.parametrize("kind", ["jacobian", "ggn"])
def test_a_network_that_changes_is_refused_at_every_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed products would be those of another network, and move the statistics of batch normalisation."""
    case = BY_NAME["resnet_batchnorm"]
    posterior = fitted(case)
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    operator = getattr(posterior, kind)(problems.batches(case))
    model, v = posterior.network.model, torch.ones(operator.shape[1], dtype=D)
    before = operator @ v
    model.train()
    with pytest.raises(lw.errors.ModelError, match="training mode"):
        operator @ v
    model.eval()
    assert torch.equal(operator @ v, before)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    for one, length in ((operator, operator.shape[1]), (operator.T, operator.shape[0])):
        with pytest.raises(lw.errors.ModelError, match="has changed since the fit"):
            one @ torch.ones(length, dtype=D)


@pytest.mark.parametrize("kind", ["jacobian", "ggn"])
@pytest.mark.parametrize("name", ["conv_zoo", "resnet_batchnorm"])  # dropout, batch norm
def test_training_mode_is_refused(name: str, kind: str) -> None:
    posterior = fitted(BY_NAME[name])
    posterior.network.model.train()
    with pytest.raises(lw.errors.ModelError, match="training mode"):
        getattr(posterior, kind)(problems.batches(BY_NAME[name]))


def test_order_does_not_matter_to_a_streamed_ggn(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["mlp"]
    _, ggn = problems.dense_ggn(case, case.build())
    posterior = fitted(case)
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    assert_close(posterior.ggn(Changing(case, CHANGES["shuffled"])) @ columns(83), ggn @ columns(83))


@pytest.mark.parametrize("kind", ["jacobian", "ggn"])
def test_progress_shows_reading_and_streamed_products(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = BY_NAME["mlp"]
    posterior, data = fitted(case), problems.batches(case)
    operator, v = getattr(posterior, kind)(data, progress=True), columns(83)
    printed = capsys.readouterr().err
    assert "reading" in printed
    assert "Jacobian" in printed
    kept = operator @ v
    assert capsys.readouterr().err == ""  # nothing is read
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    streamed = getattr(posterior, kind)(data, progress=True)
    capsys.readouterr()
    for operator in (streamed, streamed.T):
        product = operator @ columns(operator.shape[1])
        assert "products" in capsys.readouterr().err
    quiet = getattr(posterior, kind)(data, progress=False)
    assert torch.equal(quiet.T @ columns(quiet.shape[0]), product)
    assert_close(quiet @ v, kept)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("kind", ["jacobian", "ggn"])
def test_bars_appear_on_a_terminal_alone_as_in_a_fit(
    kind: str, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = BY_NAME["mlp"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("lapwing.tangent.CACHE", 0)
    posterior = fitted(case)
    assert bool(capsys.readouterr().err) == terminal
    operator = getattr(posterior, kind)(problems.batches(case))
    assert ("Jacobian" in capsys.readouterr().err) == terminal
    _ = operator @ columns(83)
    assert ("products" in capsys.readouterr().err) == terminal


@pytest.mark.parametrize("shown", [True, False])
def test_data_that_say_whether_they_show_bars_do_so_unless_told(
    shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    case = BY_NAME["mlp"]
    posterior, data = fitted(case), Data(problems.batches(case), torch.device("cpu"), progress=shown)
    posterior.ggn(data)
    assert bool(capsys.readouterr().err) == shown
    posterior.ggn(data, progress=not shown)
    assert bool(capsys.readouterr().err) != shown


def test_a_model_that_has_changed_is_refused() -> None:
    case = BY_NAME["mlp"]
    posterior = fitted(case)
    with torch.no_grad():
        posterior.network.model[0].weight += 1
    with pytest.raises(lw.errors.ModelError):
        posterior.ggn(problems.batches(case))


def test_the_model_is_left_as_it_was(case: Case) -> None:
    posterior, data = fitted(case), problems.batches(case)
    size = posterior.network.selection.size

    def run() -> None:
        _ = posterior.ggn(data) @ columns(size)
        _ = posterior.jacobian(data) @ columns(size)

    problems.unchanged(posterior.network.model, run)
