"""The tangent model over all data: with its Jacobian in memory, and streamed, against dense matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import tangent as module
from lapwing.data.batches import Data
from lapwing.networks.network import Network
from lapwing.tangent import DenseTangent, StreamedTangent, TangentModel, tangent_model
from tests import problems
from tests.cases import BY_NAME, Case
from tests.references import dense
from tests.references.tangent import Tangent
from tests.tolerances import EXACT, SOLVED, assert_close

D = torch.float64
CPU = torch.device("cpu")
NAMES = [
    "mlp", "attention", "gru", "token_level", "resnet_batchnorm", "conv_zoo", "tied", "shared_weight", "frozen_weight",
    "weight_norm", "squeezed", "dict_input", "tuple_input",
]  # fmt: skip
KINDS = {"gaussian": lw.Gaussian(noise_std=1.0), "categorical": lw.Categorical(), "bernoulli": lw.Bernoulli()}
FIVE = NAMES[:5]  # under every likelihood; the others under the one that suits them
PAIRS = [(n, k) for n in FIVE for k in KINDS] + [(n, "categorical") for n in NAMES[5:] if n != "squeezed"]
PAIRS += [("squeezed", "bernoulli"), ("squeezed", "gaussian")]


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
    if streamed:
        return StreamedTangent(network, KINDS[kind], data)
    return tangent_model(network, KINDS[kind], data)


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
def test_counts(streamed: bool) -> None:
    case = BY_NAME["mlp"]
    data = Data(problems.split(case.batch(6), targets(case, "poisson"), (3, 1, 2)), CPU)
    network = Network.build(case.build(), case.batch(6))
    model = StreamedTangent(network, lw.Poisson(), data) if streamed else tangent_model(network, lw.Poisson(), data)
    assert_agrees(model, Tangent.of("poisson", case.build(), case.batch(6), targets(case, "poisson")))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", ["mlp", "token_level", "gru"])
def test_gradient_equals_finite_differences(name: str, streamed: bool) -> None:
    """On the model's own losses: the slope belongs to the value."""
    model = built(name, "categorical", streamed)
    delta, direction, *_ = 0.4 * vectors(len(reference(name, "categorical").w))
    t = 1e-3 * torch.tensor([-2.0, -1.0, 1.0, 2.0], dtype=D)
    values = model.losses(delta, direction, t)
    slope = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / 12e-3
    _, gradient = model.gradient(delta)
    assert_close(gradient @ direction, slope, SOLVED)
    second = (-values[0] + 16 * values[1] + 16 * values[2] - values[3] - 30 * model.gradient(delta)[0]) / 12e-6
    assert_close((model.products(delta, direction[None])[0] * direction).sum(), second, 0.35)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", ["mlp", "token_level"])
def test_batches_do_not_matter(name: str, streamed: bool) -> None:
    delta, v = vectors(len(reference(name, "categorical").w), 2)
    one, other = (built(name, "categorical", streamed, sizes=sizes) for sizes in ((6,), (1, 4, 1)))
    assert_close(torch.tensor(one.gradient(delta)[0], dtype=D), torch.tensor(other.gradient(delta)[0], dtype=D))
    assert_close(one.gradient(delta)[1], other.gradient(delta)[1])
    assert_close(one.products(delta, v[None]), other.products(delta, v[None]))


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
    model = (
        StreamedTangent(network, lw.Categorical(), data) if streamed else tangent_model(network, lw.Categorical(), data)
    )
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
    monkeypatch.setattr(module, "EXACT", 0)
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


@pytest.mark.parametrize("streamed", [False, True])
def test_the_model_is_not_changed(streamed: bool) -> None:
    model = BY_NAME["resnet_batchnorm"].build()
    case = BY_NAME["resnet_batchnorm"]

    def run() -> None:
        network = Network.build(model, case.batch(6))
        data = Data(problems.batches(case), CPU)
        tangent = StreamedTangent(network, lw.Categorical(), data)
        tangent = tangent if streamed else tangent_model(network, lw.Categorical(), data)  # type: ignore[assignment]
        delta, v = vectors(network.selection.size, 2)
        tangent.gradient(delta)
        tangent.products(delta, v[None])
        tangent.losses(delta, v, torch.ones(2, dtype=D))

    problems.unchanged(model, run)


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
    return network, network.shifted(shift), f, moved


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


@pytest.mark.parametrize("name", ["mlp", "token_level"])
def test_a_shift_in_float32(name: str) -> None:
    _, there, f, moved = shifted(name, torch.float32)
    outputs = there(BY_NAME[name].batch(6, torch.float32))
    assert outputs.dtype == torch.float32
    assert_close(outputs, f + moved, SOLVED)


@pytest.mark.parametrize("name", ["mlp", "gru"])
def test_shifts_do_not_add_up_and_can_be_taken_back(name: str) -> None:
    network, there, f, moved = shifted(name)
    x = BY_NAME[name].batch(6)
    assert_close(there.shifted(there.shift)(x), f + moved)
    assert torch.equal(there.shifted(None)(x), network(x))


@pytest.mark.parametrize("method", [lw.Full(), lw.Kron()], ids=["full", "kron"])
@pytest.mark.parametrize("name", ["mlp", "token_level", "resnet_batchnorm"])
def test_a_posterior_moves_with_its_network(name: str, method: Any) -> None:
    """Means and samples by J shift; covariances not at all."""
    case = BY_NAME[name]
    _, there, f, moved = shifted(name)
    x = case.batch(6)
    plain = lw.fit(case.build(), problems.batches(case), "classification", method=method, prior=2.0).posterior
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


def test_a_shift_leaves_the_model_alone() -> None:
    case = BY_NAME["resnet_batchnorm"]
    model = case.build()

    def run() -> None:
        network = Network.build(model, case.batch(6))
        there = network.shifted(vectors(network.selection.size, 1)[0])
        there(case.batch(6))
        next(there.tangents(case.batch(6)))[1].f  # noqa: B018

    problems.unchanged(model, run)
