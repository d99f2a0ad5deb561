"""The tangent model: its operator, its design matrix, its loss at any weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing import tangent as module
from lapwing.data.batches import Data
from lapwing.errors import DataError, LapwingError
from lapwing.linalg.operators import back_product, forward_product, gram_product
from lapwing.networks.network import Network
from lapwing.tangent import (
    DenseTangent,
    NetworkDesign,
    StreamedTangent,
    TangentModel,
    refuse_reordered,
    refuse_unsteady,
    tangent_model,
)
from tests import problems
from tests.cases import BY_NAME, CASES, Case, cast
from tests.references import dense, ridge
from tests.references.structures import floored
from tests.references.tangent import Tangent
from tests.tolerances import EXACT, SOLVED, assert_close

# The tangent model over all data: with its Jacobian in memory, and streamed, against dense matrices.

D = torch.float64
CPU = torch.device("cpu")
NAMES = [
    "mlp", "attention", "gru", "token_level", "resnet_batchnorm", "conv_zoo", "tied", "shared_weight", "frozen_weight",
    "weight_norm", "squeezed", "dict_input", "tuple_input",
]  # fmt: skip
KINDS: dict[str, Any] = {
    "gaussian": lw.Gaussian(noise_std=1.0), "categorical": lw.Categorical(), "bernoulli": lw.Bernoulli(),
    "poisson": lw.Poisson(),
}  # fmt: skip
FIVE = NAMES[:5]  # under every likelihood; the others under the one that suits them
PAIRS = [(n, k) for n in FIVE for k in KINDS if k != "poisson"]
PAIRS += [(n, "categorical") for n in NAMES[5:] if n != "squeezed"]
PAIRS += [("squeezed", "bernoulli"), ("squeezed", "gaussian"), ("mlp", "poisson")]


def targets(case: Case, kind: str, size: int = 6) -> Tensor:
    gen = torch.Generator().manual_seed(3)
    if kind == "categorical":
        return problems.targets(case, size)
    if kind == "bernoulli":
        return torch.randint(0, 2, (size, *case.outputs), generator=gen)
    if kind == "poisson":
        return torch.randint(0, 5, (size, *case.outputs), generator=gen)
    return torch.randn(size, *case.outputs, dtype=D, generator=gen)


def vectors(size: int, count: int = 3) -> Tensor:
    return torch.randn(count, size, dtype=D, generator=torch.Generator().manual_seed(8))


def built(name: str, kind: str, streamed: bool, dtype: torch.dtype = D, sizes: tuple[int, ...] = (3, 1, 2)) -> Any:
    case = BY_NAME[name]
    y = targets(case, kind)
    y = y.to(dtype) if y.is_floating_point() else y
    data = Data(problems.split(case.batch(6, dtype), y, sizes), CPU)
    network = Network.build(case.build().to(dtype), case.batch(6, dtype))
    return (StreamedTangent if streamed else tangent_model)(network, KINDS[kind], data)


def reference(name: str, kind: str) -> Tangent:
    case = BY_NAME[name]
    return Tangent.of(kind, case.build(), case.batch(6), targets(case, kind))


def assert_agrees(model: TangentModel, exact: Tangent, power: float = EXACT, dtype: torch.dtype = D) -> None:
    """Loss, gradient, products and losses along a line, away from w̃."""
    delta, direction, *_ = 0.4 * vectors(len(exact.w))
    theta = exact.w + delta
    loss, gradient = model.gradient(delta)
    assert gradient.dtype == D
    assert_close(torch.tensor(loss, dtype=D), exact.loss(theta), power, dtype)
    assert_close(gradient, exact.slope(theta), power, dtype)
    several = vectors(len(exact.w), 3)
    products = model.products(delta, several)
    assert_close(products, several @ exact.curvature(theta), power, dtype)
    assert_close(model.products(delta, several[1:2]), products[1:2], power, dtype)
    steps = torch.tensor([0.0, 0.25, 1.0, -2.0], dtype=D)
    along = torch.stack([exact.loss(theta + t * direction) for t in steps])
    assert_close(model.losses(delta, direction, steps), along, power, dtype)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_dense_matrices(name: str, kind: str, streamed: bool) -> None:
    model = built(name, kind, streamed)
    assert isinstance(model, StreamedTangent if streamed else DenseTangent)
    assert_agrees(model, reference(name, kind))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian"])
def test_batches_with_different_numbers_of_tokens(kind: str, streamed: bool) -> None:
    case = BY_NAME["token_level"]
    model, gen = case.build(), torch.Generator().manual_seed(2)
    tokens = [torch.randint(0, 7, shape, generator=gen) for shape in ((2, 4), (3, 5), (1, 2))]
    ys = [torch.randint(0, 3 if kind == "categorical" else 2, (*x.shape, 3)[: 2 if kind == "categorical" else 3],
                        generator=gen) for x in tokens]  # fmt: skip
    ys = [y.to(D) if kind == "gaussian" else y for y in ys]
    data = Data(list(zip(tokens, ys, strict=True)), CPU)
    network = Network.build(model, tokens[0])
    tangent = StreamedTangent(network, KINDS[kind], data) if streamed else tangent_model(network, KINDS[kind], data)
    parts = [Tangent.of(kind, model, x, y) for x, y in zip(tokens, ys, strict=True)]
    joined = (torch.cat([getattr(part, key) for part in parts]) for key in ("f", "jacobian", "y"))
    assert_agrees(tangent, Tangent(kind, *joined, parts[0].w))


@pytest.mark.parametrize("streamed", [False, True])
def test_ignored_targets_and_class_weights(streamed: bool) -> None:
    case = BY_NAME["mlp"]
    y = problems.targets(case, 6)
    weights = torch.tensor([0.5, 1.0, 3.0], dtype=D)
    y[2] = -100
    network = Network.build(case.build(), case.batch(6))
    data = Data(problems.split(case.batch(6), y, (3, 1, 2)), CPU)
    likelihood = lw.Categorical(class_weights=(0.5, 1.0, 3.0))
    model = StreamedTangent(network, likelihood, data) if streamed else tangent_model(network, likelihood, data)
    exact = Tangent.of("categorical", case.build(), case.batch(6), y)
    delta, v = vectors(83, 2)

    def loss(theta: Tensor) -> Tensor:
        return nn.functional.cross_entropy(exact.h(theta), y, weights, reduction="sum", ignore_index=-100)

    leaf = (exact.w + delta).requires_grad_()
    assert_close(torch.tensor(model.gradient(delta)[0], dtype=D), loss(leaf))
    assert_close(model.gradient(delta)[1], torch.autograd.grad(loss(leaf), leaf)[0])
    curvature = torch.autograd.functional.hessian(loss, exact.w + delta)
    assert_close(model.products(delta, v[None])[0], curvature @ v)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_noise_for_each_output(streamed: bool) -> None:
    """Losses are weighed by the ratios."""
    case, std = BY_NAME["mlp"], torch.tensor([0.5, 1.0, 2.0], dtype=D)
    y = targets(case, "gaussian")
    network = Network.build(case.build(), case.batch(6))
    data = Data(problems.split(case.batch(6), y, (3, 1, 2)), CPU)
    likelihood = lw.Gaussian(noise_std=tuple(std.tolist()))
    model = StreamedTangent(network, likelihood, data) if streamed else tangent_model(network, likelihood, data)
    plain = Tangent.of("gaussian", case.build(), case.batch(6), y)
    scaled = replace(plain, f=plain.f / std, y=plain.y / std, jacobian=plain.jacobian / std[:, None])
    assert_agrees(model, scaled)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("weights", [lw.last_layer, lw.named(r"0\.|4\.bias"), lw.subnetwork(torch.arange(0, 83, 7))])
def test_some_of_the_weights(weights: Any, streamed: bool) -> None:
    case = BY_NAME["mlp"]
    network = Network.build(case.build(), case.batch(6), weights)
    data = Data(problems.batches(case), CPU)
    model = (StreamedTangent if streamed else tangent_model)(network, lw.Categorical(), data)
    names = list(network.selection.names)
    if network.selection.index is None:
        exact = Tangent.of("categorical", case.build(), case.batch(6), problems.targets(case, 6), names)
    else:
        whole = Tangent.of("categorical", case.build(), case.batch(6), problems.targets(case, 6))
        exact = replace(whole, jacobian=whole.jacobian[..., ::7], w=whole.w[::7])
    assert_agrees(model, exact)


@pytest.mark.parametrize("name", ["mlp", "token_level", "resnet_batchnorm"])
def test_float32_networks(name: str) -> None:
    """In memory the sums are float64 over a Jacobian that is float32; streamed, all products are float32."""
    exact = reference(name, "categorical")
    streamed = built(name, "categorical", True, torch.float32)
    assert streamed.dtype == torch.float32
    assert_agrees(streamed, exact, SOLVED, torch.float32)
    model = built(name, "categorical", False, torch.float32)
    assert model.dtype == D
    assert_agrees(model, exact, SOLVED, torch.float32)
    expected = replace(exact, f=model.f, jacobian=model.jacobian.double().reshape(exact.jacobian.shape))
    assert_agrees(model, expected)


def test_a_jacobian_kept_in_float32_rounds_its_products_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients are those of the stored matrix to float64, part by part."""
    monkeypatch.setattr(module, "MAX_DOUBLE_BYTES", 0)
    model = built("mlp", "categorical", False, torch.float32)
    assert isinstance(model, DenseTangent)
    assert model.jacobian.dtype == torch.float32
    exact = reference("mlp", "categorical")
    expected = replace(exact, f=model.f, jacobian=model.jacobian.double().reshape(exact.jacobian.shape))
    delta, v = 0.4 * vectors(83, 2)
    steps = torch.tensor([0.5, 1.0], dtype=D)
    with lw.memory.limited(4 * 8 * 83 * 4):  # four rows at a time of 18
        loss, gradient = model.gradient(delta)
        losses = model.losses(delta, v, steps)
    assert_close(torch.tensor(loss, dtype=D), expected.loss(expected.w + delta))
    assert_close(gradient, expected.slope(expected.w + delta))
    along = torch.stack([expected.loss(expected.w + delta + t * v) for t in steps])
    assert_close(losses, along)
    product, rounded = expected.curvature(expected.w + delta) @ v, model.products(delta, v[None])[0]
    assert_close(rounded, product, SOLVED, torch.float32)
    assert float((rounded - product).abs().max()) > 1e-10 * float(product.abs().max())


def test_what_does_not_fit_streams() -> None:
    """The Jacobian, rows times outputs times weights times bytes, may take half of the byte budget."""
    size = 6 * 3 * 83 * 8
    for limit, kind in ((2 * size, DenseTangent), (2 * size - 2, StreamedTangent)):
        with lw.memory.limited(limit):
            assert isinstance(built("mlp", "categorical", False), kind)
    with lw.memory.limited(2 * 6 * 4 * 3 * 8 * len(reference("token_level", "categorical").w)):
        assert isinstance(built("token_level", "categorical", False), DenseTangent)


# A network evaluated at w̃ + shift.

SHIFTED = ["mlp", "attention", "gru", "token_level", "resnet_batchnorm", "squeezed", "dict_input"]


def shifted(name: str, dtype: torch.dtype = D) -> tuple[Network, Network, Tensor, Tensor]:
    """The network as it is, shifted by a vector, and by brute force f and J times that vector."""
    case = BY_NAME[name]
    network = Network.build(case.build().to(dtype), case.batch(6, dtype))
    shift = 0.7 * vectors(network.selection.size, 1)[0]
    model = case.build()
    with torch.no_grad():
        f = torch.cat([dense.output(model, dense.one(case.batch(6), b)) for b in range(6)])
    moved = (dense.jacobian(model, case.batch(6), 6) @ shift).reshape(f.shape)
    assert float(moved.abs().max()) > 1e-2
    return network, network.with_shift(shift), f, moved


@pytest.mark.parametrize("name", SHIFTED)
def test_a_shifted_network_gives_the_tangent_model(name: str) -> None:
    network, there, f, moved = shifted(name)
    x = BY_NAME[name].batch(6)
    assert_close(there(x), f + moved)
    tangent, before = there.linearise(x), network.linearise(x)
    assert_close(tangent.f, f + moved)
    assert_close(tangent.network_output, f)
    assert torch.equal(tangent.jacobians().whole(), before.jacobians().whole())
    v = vectors(network.selection.size, 2)
    assert torch.equal(there.jvp(x, v), network.jvp(x, v))
    u = torch.randn(2, *f.shape, dtype=D)
    assert torch.equal(there.vjp(x, u), network.vjp(x, u))
    assert torch.equal(there.theta(), network.theta())


@pytest.mark.parametrize("name", ["mlp", "gru"])
def test_shifts_do_not_add_up_and_can_be_taken_back(name: str) -> None:
    network, there, f, moved = shifted(name)
    x = BY_NAME[name].batch(6)
    assert_close(there.with_shift(there.shift)(x), f + moved)
    assert torch.equal(there.with_shift(None)(x), network(x))


@pytest.mark.parametrize("method", [lw.Full(), lw.Kron()], ids=["full", "kron"])
@pytest.mark.parametrize("name", ["mlp", "token_level", "resnet_batchnorm"])
def test_a_posterior_moves_with_its_network(name: str, method: Any) -> None:
    """Means and samples by J shift; covariances not at all."""
    case = BY_NAME[name]
    _, there, f, moved = shifted(name)
    x = case.batch(6)
    plain = problems.fit(case, method, prior=2.0).posterior
    posterior = replace(plain, problem=replace(plain.problem, network=there))
    assert_close(posterior(x).mean, f + moved)
    assert torch.equal(posterior(x).cov, plain(x).cov)
    joint = posterior(x, joint=True)
    assert_close(joint.mean, f + moved)
    assert torch.equal(joint.cov, plain(x, joint=True).cov)
    drawn = [p.function_samples(x, 4, torch.Generator().manual_seed(1)) for p in (posterior, plain)]
    assert_close(drawn[0] - drawn[1], moved.expand(4, *moved.shape))


@pytest.mark.parametrize("streamed", [False, True])
def test_delta_counts_from_the_weights_whatever_the_shift(streamed: bool) -> None:
    _, there, _, _ = shifted("mlp")
    case = BY_NAME["mlp"]
    data = Data(problems.batches(case), CPU)
    assert there.shift is not None
    model = StreamedTangent(there, lw.Categorical(), data) if streamed else tangent_model(there, lw.Categorical(), data)
    assert_agrees(model, reference("mlp", "categorical"))


# Operators of a fitted posterior: the Jacobian and the GGN by their products, against dense matrices.

SOME = ["mlp", "cnn", "attention", "lstm", "embedding", "token_level", "squeezed"]
NUMBERS = {case.name: number for number, case in enumerate(CASES)}


@pytest.fixture(params=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return BY_NAME[request.param]


def fitted(case: Case, dtype: torch.dtype = D, **options: Any) -> lw.Fitted:
    return problems.fit(case, dtype=dtype, **{"method": lw.baselines.MapOnly(), "prior": 1.0, **options})


def columns(size: int, count: int = 3) -> Tensor:
    return torch.randn(size, count, dtype=D, generator=torch.Generator().manual_seed(4))


def test_operator_dense_matrices(case: Case) -> None:
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


def test_one_pass_for_all_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.tangent.CACHE_SHARE", 0)
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


def test_a_mean_elsewhere_than_at_the_weights() -> None:
    """A tangent model evaluated at its own optimum still has the Jacobian and the GGN of w̃."""
    case = BY_NAME["mlp"]
    data = [(case.batch(6), problems.numbers(case))]
    posterior = lw.fit(case.build(), data, lw.Gaussian(), method=lw.Full(), tuner=lw.tuners.LinearMode(mean="tangent"))
    assert posterior.network.shift is not None
    x = dense.jacobian(case.build(), case.batch(6), 6).flatten(0, 1)
    assert_close(posterior.jacobian(data) @ columns(83), x @ columns(83))
    assert_close(posterior.ggn(data) @ columns(83), x.T @ x @ columns(83))


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


def test_vectors_of_whole_numbers_are_accepted_and_learned_ones_get_no_graph() -> None:
    """Products are for solvers; nothing is remembered for a backward pass."""
    case = BY_NAME["mlp"]
    operator = fitted(case).ggn(problems.batches(case))
    expected = operator @ torch.ones(83, dtype=D)
    for dtype in (torch.bool, torch.uint8, torch.int64):
        assert torch.equal(operator @ torch.ones(83, dtype=dtype), expected)
    assert not (operator @ columns(83).requires_grad_()).requires_grad


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
def test_autocast_changes_nothing(narrow: torch.dtype) -> None:
    case = BY_NAME["mlp"]
    posterior, data = fitted(case, torch.float32), problems.batches(case, dtype=torch.float32)
    j = posterior.jacobian(data)
    for operator in (j, j.T, posterior.ggn(data)):
        several = columns(operator.shape[1])
        expected = operator @ several
        with torch.autocast("cpu", narrow):
            assert torch.equal(operator @ several, expected)


@pytest.mark.parametrize("kind", ["jacobian", "ggn"])
def test_a_network_that_changes_is_refused_at_every_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed products would be those of another network, and move the statistics of batch normalisation."""
    case = BY_NAME["resnet_batchnorm"]
    posterior = fitted(case)
    monkeypatch.setattr("lapwing.tangent.CACHE_SHARE", 0)
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
    monkeypatch.setattr("lapwing.tangent.CACHE_SHARE", 0)
    streamed = getattr(posterior, kind)(data, progress=True)
    capsys.readouterr()
    for operator in (streamed, streamed.T):
        product = operator @ columns(operator.shape[1])
        assert "products" in capsys.readouterr().err
    quiet = getattr(posterior, kind)(data, progress=False)
    assert torch.equal(quiet.T @ columns(quiet.shape[0]), product)
    assert_close(quiet @ v, kept)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("shown", [True, False])
def test_the_data_decide_whether_bars_are_shown_unless_the_call_does(
    shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    case = BY_NAME["mlp"]
    posterior, data = fitted(case), Data(problems.batches(case), torch.device("cpu"), progress=shown)
    posterior.ggn(data)
    assert bool(capsys.readouterr().err) == shown
    posterior.ggn(data, progress=not shown)
    assert bool(capsys.readouterr().err) != shown


# The design Rᵀ J: products held and streamed, against dense matrices and the network's own products.

CACHES = {"held": None, "streamed": 0}
SELECTIONS = {
    "last layer": lw.last_layer,
    "named": lw.named("bias"),
    "subnetwork": lw.subnetwork(torch.arange(1, 40, 3)),
}


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> int | None:
    return CACHES[request.param]


@pytest.fixture
def either(case: Case) -> int | None:
    """One network is held and the next one streamed; products of each are compared both ways."""
    return [*CACHES.values()][NUMBERS[case.name] % 2]


def kind_of(case: Case) -> str:
    return "categorical" if case.outputs[-1] > 1 else "bernoulli"


@lru_cache
def design_reference(name: str, dtype: torch.dtype = D) -> tuple[Tensor, Tensor]:
    """f (N, C) and J (N, C, P) of six samples, in float64 whatever the model was rounded to."""
    case = BY_NAME[name]
    model, inputs = case.build(dtype).double(), cast(case.batch(6, dtype), D)
    with torch.no_grad():
        f = torch.cat([dense.output(model, dense.one(inputs, b)) for b in range(6)])
    return f.reshape(-1, f.shape[-1]), dense.by_datum(dense.jacobian(model, inputs, 6), case.outputs[-1])


def written_out(case: Case, curvature: str = "ggn", dtype: torch.dtype = D) -> Tensor:
    """The design as a matrix."""
    f, jac = design_reference(case.name, dtype)
    return jac.flatten(0, 1) if curvature == "jacobian" else ridge.design(kind_of(case), f, jac)


def design_built(
    case: Case, cache: int | None, curvature: str = "ggn", dtype: torch.dtype = D, weights: Any = None, **options: Any
) -> NetworkDesign:
    network = Network.build(case.build(dtype), case.batch(6, dtype), weights)
    data = Data(problems.batches(case, dtype=dtype), CPU)
    return NetworkDesign.build(network, problems.likelihood(case), data, cache, curvature, **options)


def rows(count: int, size: int, seed: int = 4) -> Tensor:
    return torch.randn(count, size, dtype=D, generator=torch.Generator().manual_seed(seed))


def assert_products(design: NetworkDesign, x: Tensor, dtype: torch.dtype = D) -> None:
    """X v, Xᵀ u and Xᵀ X v for several vectors, and X itself."""
    assert (design.rows, design.size) == x.shape
    v, u = rows(3, design.size), rows(2, design.rows)
    products = (forward_product(design, v), back_product(design, u), gram_product(design, v))
    for product, expected in zip(products, (v @ x.T, u @ x, v @ x.T @ x), strict=True):
        assert product.dtype == D
        assert_close(product, expected, dtype=dtype)
    assert_close(design.whole(), x, dtype=dtype)


@pytest.mark.parametrize("curvature", ["ggn", "jacobian"])
def test_products_equal_dense_ones(case: Case, either: int | None, curvature: str) -> None:
    cache = either if curvature == "ggn" else None if either == 0 else 0
    design = design_built(case, cache, curvature)
    assert design.streamed == (cache == 0)
    assert_products(design, written_out(case, curvature))


def test_float32(case: Case, either: int | None) -> None:
    assert_products(
        design_built(case, either, dtype=torch.float32), written_out(case, dtype=torch.float32), torch.float32
    )


def test_statistics_are_those_of_the_pass(case: Case, either: int | None) -> None:
    f, _ = design_reference(case.name)
    y = problems.targets(case, 6).reshape(-1)
    if kind_of(case) == "categorical":
        loss = F.cross_entropy(f, y, reduction="sum")
    else:
        loss = F.binary_cross_entropy_with_logits(f[:, 0], y.to(D), reduction="sum")
    statistics = design_built(case, either).statistics
    assert statistics.loss == pytest.approx(float(loss), rel=1e-11)
    assert (statistics.data, statistics.outputs) == (len(f), case.outputs[-1])


@pytest.mark.parametrize("weights", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "lstm", "embedding", "token_level", "conv_zoo"])
def test_design_some_of_the_weights(name: str, weights: Any, cache: int | None) -> None:
    case = BY_NAME[name]
    design = design_built(case, cache, weights=weights)
    where, start = [], 0
    for key, parameter in case.build().named_parameters():
        if key in design.network.selection.names:
            where += range(start, start + parameter.numel())
        start += parameter.numel()
    chosen = torch.arange(1, 40, 3) if design.network.selection.index is not None else torch.tensor(where)
    assert len(chosen) < start
    assert_products(design, written_out(case)[:, chosen])


def test_the_diagonal_is_that_of_the_ggn(case: Case, either: int | None) -> None:
    """With no entry below a thousandth of the median of its layer, a layer being a module."""
    expected = written_out(case).square().sum(0)
    start, layers = 0, {}
    for name, parameter in case.build().named_parameters():
        if parameter.requires_grad:
            index = torch.arange(start, start + parameter.numel())
            layers.setdefault(name.rpartition(".")[0], []).append(index)
            start += parameter.numel()
    for index in (torch.cat(parts) for parts in layers.values()):
        expected[index] = floored(expected[index])
    assert_close(design_built(case, either).diagonal(), expected)


def test_the_diagonal_of_a_subnetwork_knows_nothing_of_the_rest() -> None:
    """The floor is a thousandth of the median of the weights that are selected."""
    case = BY_NAME["mlp"]
    exact = written_out(case).square().sum(0)
    index = exact[:24].argsort()[:3].sort().values  # the three of the first layer that matter least
    index = torch.cat([index, torch.arange(70, 83)])
    expected = torch.cat([floored(exact[index[:3]]), floored(exact[index[3:]])])
    assert_close(design_built(case, None, weights=lw.subnetwork(index)).diagonal(), expected)


def test_a_small_budget_of_bytes_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples one at a time in every temporary and in every chunk."""
    monkeypatch.setattr("lapwing.networks.jacobians.CACHED_BYTES", 1)
    with lw.memory.limited(1):
        assert_products(design_built(case, None), written_out(case))


@pytest.mark.parametrize("held", [False, True])
def test_layer_jacobians_back(case: Case, held: bool) -> None:
    inputs = case.batch(4)
    jacobians = Network.build(case.build(), inputs).linearise(inputs).jacobians()
    chosen = jacobians.materialise() if held else jacobians
    exact = dense.jacobian(case.build(), inputs, 4)  # (B, M, P)
    u, v = rows(2, 4 * exact.shape[1]).reshape(2, 4, -1), rows(3, exact.shape[-1])
    assert_close(chosen.vjp(u), torch.einsum("nbk,bkp->np", u, exact))
    assert_close(chosen.jvp(v), torch.einsum("bkp,np->nbk", exact, v))
    assert_close(chosen.whole(), exact)
    assert_close(chosen.double().whole(), exact)
    assert (chosen.batch, chosen.outputs, chosen.dtype) == (4, exact.shape[1], D)


def test_layer_jacobians_in_hand_are_not_formed_again() -> None:
    case = BY_NAME["cnn"]
    inputs = case.batch(4)
    jacobians = Network.build(case.build(), inputs).linearise(inputs).jacobians()
    held = jacobians.materialise()
    for (_, one), (_, other) in zip(held, held, strict=True):
        assert one is other
    assert any(one is not other for (_, one), (_, other) in zip(jacobians, jacobians, strict=True))


def test_bytes_of_what_is_held() -> None:
    """Factors of the inputs and of the seeds, or the Jacobian itself where positions outnumber outputs; by hand."""
    numbers = {
        # inputs (4+1, 6+1, 5+1) and gradients of 3 outputs (6, 5, 3) of each layer
        "mlp": 5 + 7 + 6 + 3 * (6 + 5 + 3),
        # 16 and 4 positions in the convolutions, both above 3 outputs; then one linear map at one position
        "cnn": 3 * (4 * 2 * 9 + 4) + 3 * (5 * 4 * 9 + 5) + (6 + 3 * 3),
    }
    for name, each in numbers.items():
        inputs = BY_NAME[name].batch(4)
        held = Network.build(BY_NAME[name].build(), inputs).linearise(inputs).jacobians().materialise()
        assert held.nbytes == 8 * 4 * each
        narrow = Network.build(BY_NAME[name].build(torch.float32), inputs.float()).linearise(inputs.float())
        assert narrow.jacobians().materialise().nbytes == 4 * 4 * each


def test_bytes_of_an_embedding() -> None:
    """Gradients of the distinct tokens of each sample, and whole numbers that say whose they are."""
    case = BY_NAME["dict_input"]
    inputs = case.batch(4)
    held = Network.build(case.build(), inputs).linearise(inputs).jacobians().materialise()
    distinct = sum(len(row.unique()) for row in inputs["ids"])
    table = 8 * (3 * distinct * 4 + 2 * distinct + inputs["ids"].numel())
    head = 8 * 4 * (5 + 3 * 3)
    assert held.nbytes == table + head


class Loader:
    """Batches of a data set, made anew at every pass by a function of the pass."""

    def __init__(self, make: Any) -> None:
        self.passes, self._make = 0, make

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from self._make(self.passes)


def shuffling(case: Case) -> DataLoader:
    """Eleven samples in another order at every pass."""
    pairs = TensorDataset(case.batch(11), problems.targets(case, 11))
    return DataLoader(pairs, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))


def over(case: Case, data: Any, cache: int | None) -> NetworkDesign:
    network = Network.build(case.build(), case.batch(6))
    return NetworkDesign.build(network, problems.likelihood(case), Data(data, CPU), cache)


@pytest.mark.parametrize("cache", [None, 15_000], ids=["factors held", "data held"])
def test_a_loader_that_shuffles_gives_the_same_rows_at_every_pass(cache: int | None) -> None:
    case = BY_NAME["cnn"]
    design = over(case, shuffling(case), cache)
    assert design.streamed == (cache is not None)
    x = forward_product(design, torch.eye(design.size, dtype=D)).T
    assert_products(design, x)
    refuse_reordered(design)
    ordered = over(case, [(case.batch(11), problems.targets(case, 11))], None)
    exact = gram_product(ordered, torch.eye(design.size, dtype=D))
    assert_close(x.T @ x, exact)
    gaps = torch.cdist(x, forward_product(ordered, torch.eye(design.size, dtype=D)).T)
    assert sorted(gaps.argmin(1).tolist()) == list(range(22))  # each of the rows once,
    assert gaps.argmin(1).tolist() != list(range(22))  # in another order


def test_a_loader_that_shuffles_and_fits_nowhere() -> None:
    """The GGN does not mind; rows do."""
    case = BY_NAME["cnn"]
    design = over(case, shuffling(case), 0)
    still = over(case, [(case.batch(11), problems.targets(case, 11))], 0)
    v = rows(2, design.size)
    for _ in range(2):
        assert_close(gram_product(design, v), gram_product(still, v))
    with pytest.raises(DataError, match=r"two passes over the data gave different rows.*shuffle=False"):
        refuse_reordered(design)
    assert still.streamed
    refuse_reordered(still)


def test_a_changing_number_of_rows_is_refused() -> None:
    case = BY_NAME["mlp"]
    x, y = case.batch(6), problems.targets(case, 6)
    data = Loader(lambda number: [(x[: 6 - number % 2], y[: 6 - number % 2])])
    design = over(case, data, 0)  # a pass to read and one to build: six data of two rows each
    with pytest.raises(DataError, match="gave 5 rows and the first one 6; expected the same rows"):
        gram_product(design, rows(1, design.size))


def flipped(x: Tensor, y: Tensor, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """About half of the rows from the other side, as images are: every sum over all entries stays what it was."""
    return torch.where(torch.rand(len(x), 1, dtype=D, generator=gen) < 0.5, x, x.flip(1)), y


AUGMENTED: dict[str, Any] = {
    "noise": lambda x, y, gen: (x + 0.1 * torch.randn(x.shape, dtype=D, generator=gen), y),
    "flips": flipped,
    "other targets": lambda x, y, gen: (x, torch.randint(0, 3, y.shape, generator=gen)),
}


@pytest.mark.parametrize("name", AUGMENTED)
@pytest.mark.parametrize("cache", [None, 1000], ids=["factors held", "data held"])
@pytest.mark.parametrize("refuse", [refuse_unsteady, refuse_reordered])
def test_random_augmentation_is_refused_where_one_draw_was_kept(refuse: Any, cache: int | None, name: str) -> None:
    case = BY_NAME["mlp"]
    x, y, gen = case.batch(6), problems.targets(case, 6), torch.Generator().manual_seed(3)
    design = over(case, Loader(lambda _: [AUGMENTED[name](x, y, gen)]), cache)
    with pytest.raises(DataError, match=r"a second reading of the data gave other rows, by .*no random augmentation"):
        refuse(design)


@pytest.mark.parametrize("refuse", [refuse_unsteady, refuse_reordered])
def test_what_is_kept_may_come_in_any_order(refuse: Any) -> None:
    """Other batches as well: a loader that shuffles was read once."""
    case = BY_NAME["mlp"]
    x, y, gen = case.batch(7), problems.targets(case, 7), torch.Generator().manual_seed(3)

    def shuffled(_: int) -> list[tuple[Tensor, Tensor]]:
        order = torch.randperm(7, generator=gen)
        return [(x[rows], y[rows]) for rows in order.split(3)]

    refuse(over(case, Loader(shuffled), None))


def test_padding_is_not_compared() -> None:
    """A row that is padded to the longest of its batch is another row in another batch."""
    x = torch.randn(6, 5, 4, dtype=D)
    cuts = [(5, 3), (3, 5)]
    data = Loader(lambda number: [(x[:3, : cuts[number % 2][0]], Y6[:3]), (x[3:, : cuts[number % 2][1]], Y6[3:])])
    network = Network.build(Pooled(), x)
    refuse_unsteady(NetworkDesign.build(network, lw.Gaussian(), Data(data, CPU)))


Y6 = torch.zeros(6, 1, dtype=D)


class Pooled(nn.Module):
    """The mean over a length that may be any."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x.mean(1))
        return outputs


@pytest.mark.parametrize("cache", [None, 1000], ids=["factors held", "data held"])
def test_what_is_held_is_read_once(cache: int | None) -> None:
    case = BY_NAME["mlp"]
    data = Loader(lambda _: problems.batches(case))
    design = over(case, data, cache)
    assert data.passes == 1
    assert design.streamed == (cache is not None)
    assert_products(design, written_out(case))
    assert data.passes == 1


def test_design_batches_with_different_numbers_of_tokens(cache: int | None) -> None:
    case = BY_NAME["token_level"]
    model, gen = case.build(), torch.Generator().manual_seed(2)
    tokens = [torch.randint(0, 7, shape, generator=gen) for shape in ((2, 4), (3, 5), (1, 2))]
    data = [(x, torch.randint(0, 3, x.shape, generator=gen)) for x in tokens]
    network = Network.build(model, tokens[0])
    design = NetworkDesign.build(network, lw.Categorical(), Data(data, CPU), cache)
    parts = []
    for x in tokens:
        f = model(x).detach().reshape(-1, 3)
        parts.append(ridge.design("categorical", f, dense.by_datum(dense.jacobian(model, x, len(x)), 3)))
    assert_products(design, torch.cat(parts))


@pytest.mark.parametrize("part", [0, -1])
def test_parts_without_data_are_refused(part: int) -> None:
    with pytest.raises(DataError, match=f"part is {part}; expected at least one datum"):
        design_built(BY_NAME["mlp"], None, part=part)


def test_one_batch_is_tried_where_the_data_are_kept_and_all_where_they_are_not() -> None:
    case = BY_NAME["cnn"]
    pairs = [(case.batch(11)[i : i + 4], problems.targets(case, 11)[i : i + 4]) for i in (0, 4, 8)]
    kept, streamed = over(case, pairs, 15_000), over(case, pairs, 0)
    assert kept.streamed
    v = rows(2, kept.size)
    assert_close(gram_product(kept.probe(), v), gram_product(over(case, pairs[:1], None), v))
    assert streamed.probe() is streamed
    refuse_unsteady(kept)


def test_what_is_kept_is_counted() -> None:
    case = BY_NAME["cnn"]
    x, y = case.batch(11), problems.targets(case, 11)
    data = x.nbytes + y.nbytes
    factors, streamed, nothing = (over(case, [(x, y)], cache) for cache in (None, data, 0))
    assert nothing.nbytes == 0
    assert streamed.nbytes == data
    assert factors.factors is not None
    assert factors.nbytes == data + sum(part.nbytes for part in factors.factors)
    assert factors.nbytes > 2 * data


class Noisy(nn.Module):
    """A layer that adds chance to what passes, in evaluation mode too, once it is told to."""

    size: Tensor  # which the copy that runs shares

    def forward(self, x: Tensor) -> Tensor:
        return x + self.size * torch.randn_like(x)


@pytest.mark.parametrize("refuse", [refuse_unsteady, refuse_reordered])
def test_a_network_with_chance_in_it_is_found_on_one_batch(refuse: Any) -> None:
    case = BY_NAME["mlp"]
    noisy = Noisy()
    noisy.size = torch.zeros(())
    network = Network.build(nn.Sequential(noisy, case.build()), case.batch(6))
    x, y = case.batch(12), problems.targets(case, 12)
    data = Data([(x[:6], y[:6]), (x[6:], y[6:])], CPU)
    design = NetworkDesign.build(network, problems.likelihood(case), data, 1200)
    assert design.streamed
    assert design.source is data
    refuse(design)
    noisy.size.fill_(0.1)
    with pytest.raises(LapwingError, match=r"two calls|different rows"):
        refuse(design)


def test_looking_for_noise_leaves_the_callers_random_numbers_alone() -> None:
    x, y, net = torch.randn(8, 3), torch.randn(8, 1), torch.nn.Linear(3, 1)
    before = torch.get_rng_state()
    lw.fit(net, [(x, y)], "regression", prior=1.0).ggn([(x, y)])
    lw.fit(net, [(x, y)], "regression", prior=1.0, method=lw.KernelSpace())
    assert torch.equal(torch.get_rng_state(), before)
