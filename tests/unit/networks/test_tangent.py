"""Tangents with one or several outputs, images and shared rows, with the last layer in closed form."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature.base import Seeds, Sweep
from lapwing.curvature.dense import FullCurvature
from lapwing.data.batches import Data
from lapwing.data.inputs import Batch
from lapwing.errors import DataError, ModelError, UnsupportedError
from lapwing.likelihoods.base import Likelihood
from lapwing.networks.forward import path_of, pick_output
from lapwing.networks.jacobians import Footprint
from lapwing.networks.linear_jacobian import HeadGGN
from lapwing.networks.network import Network
from lapwing.values.gaussian import ImageForm
from tests.cases import Wrapped
from tests.references import dense
from tests.tolerances import assert_close

# The last layer in closed form: the same curvature as by backward passes from every column of the root.

D = torch.float64
N, WIDTH = 17, 4  # more data than inputs of a layer, so that eigenvectors are unique


@dataclass(frozen=True)
class Ending:
    """A network by its last layers: inputs of one sample, outputs of one sample, and whether it has a closed form."""

    model: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    closed: bool = True


def body(*last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), *last)


def with_product(m: Any, x: Tensor) -> Tensor:
    return m.body(x) @ m.weight + m.bias


def pixels(m: Any, x: Tensor) -> Tensor:
    return m.last(torch.tanh(m.first(x))).flatten(2).transpose(1, 2)


def twice(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    return m.last(torch.tanh(m.last(h)))


ENDINGS = {
    "linear": Ending(lambda: body(nn.Linear(WIDTH, 5)), (3,), (5,)),
    "no bias": Ending(lambda: body(nn.Linear(WIDTH, 5, bias=False)), (3,), (5,)),
    "tokens": Ending(lambda: body(nn.Linear(WIDTH, 5)), (2, 3), (2, 5)),
    "several tokens at a position": Ending(lambda: body(nn.Linear(WIDTH, 10), nn.Unflatten(1, (2, 5))), (3,), (2, 5)),
    "a product and a sum": Ending(
        lambda: Wrapped(with_product, body=body(), weight=nn.Parameter(torch.randn(WIDTH, 5)),
                        bias=nn.Parameter(torch.randn(5))), (3,), (5,)),
    "pixels": Ending(lambda: Wrapped(pixels, first=nn.Conv2d(1, 3, 2), last=nn.Conv2d(3, 5, (1, 2))),
                     (1, 3, 4), (4, 5)),
    "grouped": Ending(lambda: nn.Sequential(nn.Conv1d(4, 4, 2), nn.Tanh(), nn.Conv1d(4, 6, 2, groups=2), nn.Flatten()),
                      (4, 3), (6,)),
    "tokens taken apart": Ending(lambda: body(nn.Linear(WIDTH, 3), nn.Flatten()), (2, 3), (6,), closed=False),
    "used twice": Ending(lambda: Wrapped(twice, first=nn.Linear(3, 5), last=nn.Linear(5, 5)), (3,), (5,), closed=False),
    "scaled": Ending(lambda: Wrapped(lambda m, x: 2 * m.last(x), last=body(nn.Linear(WIDTH, 5))), (3,), (5,),
                     closed=False),
    "transposed": Ending(
        lambda: nn.Sequential(nn.Conv1d(3, 2, 1), nn.Tanh(), nn.ConvTranspose1d(2, 3, 2), nn.Flatten()),
        (3, 2), (9,), closed=False),
}  # fmt: skip
METHODS = {
    "kron": lw.Kron("ggn"), "reduce": lw.Kron("ggn", "reduce"), "diagonal": lw.Diagonal("ggn"),
    "ekron": lw.EKron("ggn"), "full": lw.Full("ggn"),
}  # fmt: skip
LIKELIHOODS: dict[str, tuple[Any, Callable[[tuple[int, ...]], Tensor]]] = {
    "softmax": (lw.Categorical(), lambda shape: torch.randint(0, shape[-1], shape[:-1])),
    "weighted": (lw.Categorical(class_weights=(0.5, 1.0, 2.0, 0.0, 3.0), ignore_index=1, temperature=1.7),
                 lambda shape: torch.randint(0, shape[-1], shape[:-1])),
    "multilabel": (lw.Bernoulli(pos_weight=2.0, ignore_index=-1), lambda shape: torch.randint(-1, 2, shape)),
    "gaussian": (lw.Gaussian(noise_std=0.7), lambda shape: torch.randn(shape, dtype=D)),
    "noises": (lw.Gaussian(noise_std=(0.5, 1.0, 2.0, 0.3, 0.7)), lambda shape: torch.randn(shape, dtype=D)),
    "learned noises": (lw.Gaussian(per_output=True), lambda shape: torch.randn(shape, dtype=D)),
    "counts": (lw.Poisson(), lambda shape: torch.randint(0, 4, shape)),
}  # fmt: skip


def problem(ending: Ending, likelihood: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Any]:
    torch.manual_seed(3)
    model = ending.model().double().eval()
    chosen, draw = LIKELIHOODS[likelihood]
    x, y = torch.randn(N, *ending.inputs, dtype=D), draw((N, *ending.outputs))
    return model, [(x[:10], y[:10]), (x[10:], y[10:])], chosen


def numbers(posterior: lw.Fitted) -> list[Tensor]:
    """The curvature as matrices, one for each block, under the present noise."""
    curvature = posterior.posterior.current
    return [curvature.matrix] if isinstance(curvature, FullCurvature) else [b.dense() for b in curvature.blocks]


def both(
    monkeypatch: pytest.MonkeyPatch, ending: Ending, likelihood: str, **options: Any
) -> tuple[lw.Fitted, lw.Fitted]:
    """The posterior in closed form, and by seeds."""
    model, data, chosen = problem(ending, likelihood)
    closed = lw.fit(model, data, chosen, prior=1.0, **options)
    with monkeypatch.context() as patch:
        patch.setattr(Sweep, "has_closed_form", False)
        return closed, lw.fit(model, data, chosen, prior=1.0, **options)


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name, ending in ENDINGS.items() for method in (METHODS if ending.closed else ("diagonal",))],
)
def test_every_ending(monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    closed, seeds = both(monkeypatch, ENDINGS[name], "softmax", method=METHODS[method])
    for one, two in zip(numbers(closed), numbers(seeds), strict=True):
        assert_close(one, two)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_every_likelihood(monkeypatch: pytest.MonkeyPatch, likelihood: str, method: str) -> None:
    name = "linear" if method in ("kron", "full") else "tokens"
    closed, seeds = both(monkeypatch, ENDINGS[name], likelihood, method=METHODS[method], weights="last_layer")
    for one, two in zip(numbers(closed), numbers(seeds), strict=True):
        assert_close(one, two)
    assert_close(closed.functions(torch.ones(2, *ENDINGS[name].inputs, dtype=D)).cov,
                 seeds.functions(torch.ones(2, *ENDINGS[name].inputs, dtype=D)).cov)  # fmt: skip
    assert_close(closed.log_evidence(), seeds.log_evidence())


@pytest.mark.parametrize("method", METHODS)
def test_outputs_that_are_not_coupled_may_be_taken_apart(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A value for each pixel: C outputs at as many positions."""
    ending = replace(ENDINGS["tokens taken apart"], closed=True)
    closed, seeds = both(monkeypatch, ending, "gaussian", method=METHODS[method], weights="last_layer")
    for one, two in zip(numbers(closed), numbers(seeds), strict=True):
        assert_close(one, two)
    monkeypatch.setattr(Seeds, "at", None)
    model, data, likelihood = problem(ending, "gaussian")
    lw.fit(model, data, likelihood, method=METHODS[method], weights="last_layer", prior=1.0)


@pytest.mark.parametrize("method", METHODS)
def test_shifted_labels(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    torch.manual_seed(0)
    model, x = body(nn.Linear(WIDTH, 5)).double().eval(), torch.randn(N, 3, 3, dtype=D)
    options = {"weights": "last_layer", "prior": 1.0, "method": METHODS[method]}
    y, likelihood = torch.randint(0, 5, (N, 3)), lw.Categorical(shift=True)
    closed = lw.fit(model, [(x, y)], likelihood, **options)
    monkeypatch.setattr(Sweep, "has_closed_form", False)
    for one, two in zip(numbers(closed), numbers(lw.fit(model, [(x, y)], likelihood, **options)), strict=True):
        assert_close(one, two)


@pytest.mark.parametrize("name", ENDINGS)
def test_the_last_layer_alone_takes_no_seeds(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ending = ENDINGS[name]
    model, data, likelihood = problem(ending, "softmax")

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("a seed was asked for")

    monkeypatch.setattr(Seeds, "at", refuse)
    monkeypatch.setattr(Seeds, "runs", refuse)
    for method in METHODS.values():
        run = lambda method=method: lw.fit(model, data, likelihood, method=method, weights="last_layer", prior=1.0)
        if ending.closed and not (name == "grouped" and isinstance(method, lw.Full)):
            run()
        else:
            with pytest.raises(AssertionError, match="a seed was asked for"):
                run()


def test_the_full_matrix_of_tokens_is_that_of_autograd() -> None:
    model, data, likelihood = problem(ENDINGS["tokens"], "softmax")
    x = torch.cat([each for each, _ in data])
    jacobian = dense.by_datum(dense.jacobian(model, x, N), 5)[..., -25:]
    expected = dense.ggn(jacobian, dense.softmax_hessian(model(x).detach().reshape(-1, 5)))
    posterior = lw.fit(model, data, likelihood, method=lw.Full(), weights="last_layer", prior=1.0)
    assert_close(posterior.posterior.curvature.matrix, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Entries are moved in float64, whatever the network computes in: H is as exact as the outputs are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5)).to(dtype).eval()
    x, y = torch.randn(N, 2, 3).to(dtype), torch.randint(0, 5, (N, 2))
    posterior = lw.fit(model, [(x, y)], "classification", method=lw.Kron("ggn"), weights="last_layer", prior=1.0)
    with torch.no_grad():
        p = model(x).double().softmax(-1).reshape(-1, 5)
    expected = torch.diag(p.sum(0)) - p.T @ p
    assert_close(posterior.posterior.curvature.blocks[0].out.dense()[0], expected)


def test_weights_that_are_drawn_keep_the_last_layer_exact() -> None:
    model, data, likelihood = problem(ENDINGS["linear"], "softmax")
    exact, drawn = (
        lw.fit(model, data, likelihood, method=lw.Kron(curvature), prior=1.0).posterior.curvature.blocks
        for curvature in ("ggn", "fisher_mc")
    )
    assert_close(drawn[1].out.dense(), exact[1].out.dense())
    assert not torch.allclose(drawn[0].out.dense(), exact[0].out.dense(), rtol=1e-3)


def test_a_likelihood_without_a_hessian_takes_seeds() -> None:
    """A class of a user that defines the root alone."""

    class Mine(lw.Gaussian):
        hessian = Likelihood.hessian

    model, data, _ = problem(ENDINGS["linear"], "gaussian")
    one, two = (
        lw.fit(model, data, kind(noise_std=0.7), method=lw.Kron("ggn"), prior=1.0) for kind in (Mine, lw.Gaussian)
    )
    for mine, own in zip(numbers(one), numbers(two), strict=True):
        assert_close(mine, own)


def test_which_blocks_come_in_closed_form() -> None:
    model, data, likelihood = problem(ENDINGS["linear"], "softmax")
    network = Network.build(model, data[0][0])
    sweep = Sweep(network, likelihood, Data(data, torch.device("cpu")))
    kinds = [(number, isinstance(part, HeadGGN), first) for number, part, first in sweep.blocks()]
    assert kinds == [(1, True, True), (0, False, True)]  # both batches are joined
    assert sweep.statistics.data == N


# Parameters that every sample gets a copy of: tokens of a class, position embeddings. No second pass is needed.

T, SHARED = 4, 3


def after(m: Any, h: Tensor) -> Tensor:
    """Mix the positions, so that no sample has a gradient of zero anywhere."""
    return m.head(torch.tanh(h + h.mean(1, keepdim=True)).flatten(1))


def with_class_token(m: Any, x: Tensor) -> Tensor:
    h = torch.cat([m.token.expand(len(x), -1, -1), m.embed(x)], 1) + m.position
    return m.last(torch.tanh(h + h.mean(1, keepdim=True))[:, 0])


def positions(shape: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: after(m, m.embed(x) + shape(m.table(torch.arange(T))))


def expanded_positions(m: Any, x: Tensor) -> Tensor:
    return after(m, m.embed(x) + m.table(torch.arange(T)).expand(len(x), -1, -1))


RUNS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "class token": (with_class_token, "dense"),
    "positions": (positions(lambda h: h), "columns"),
    "positions of one row": (positions(lambda h: h.unsqueeze(0)), "columns"),
    "expanded positions": (expanded_positions, "columns"),
    "positions of several": (lambda m, x: after(m, m.table(torch.tensor([2, 0, 2, 5])) + m.embed(x)), "columns"),
    "with padding": (lambda m, x: after(m, m.padded(torch.tensor([2, 0, 1, 5])) + m.embed(x)), "columns"),
    "taken twice": (lambda m, x: after(m, m.embed(x) * (h := m.table(torch.arange(T))) + h), "opaque"),
    "multiplied": (lambda m, x: after(m, m.embed(x) * m.table(torch.arange(T))), "opaque"),
    "through a layer": (lambda m, x: after(m, m.embed(x) + m.deep(m.table(torch.arange(T)))), "opaque"),
}  # fmt: skip


def built(run: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    parts = {"embed": nn.Linear(2, SHARED), "head": nn.Linear(T * SHARED, 2), "last": nn.Linear(SHARED, 2),
             "table": nn.Embedding(6, SHARED), "padded": nn.Embedding(6, SHARED, padding_idx=2),
             "deep": nn.Linear(SHARED, SHARED)}  # fmt: skip
    model = Wrapped(run, **parts)
    model.token, model.position = (
        nn.Parameter(torch.randn(1, 1, SHARED)),
        nn.Parameter(torch.randn(1, T + 1, SHARED)),
    )
    return model.double().eval()


@pytest.mark.parametrize("name", RUNS)
def test_their_jacobian_and_how_they_are_kept(name: str) -> None:
    run, kind = RUNS[name]
    model, x = built(run), torch.randn(5, T, 2, dtype=D)
    network = Network.build(model, x)
    kinds = {block.weight: block.kind for block in network.layout if block.why != "not used by the network"}
    kept = {weight: kinds[weight] for weight in ("token", "table.weight", "padded.weight") if weight in kinds}
    assert list(kept.values()) == [kind]
    for inputs in (x, x[:1], x[:T]):
        assert_close(network.linearise(inputs).jacobians().whole(), dense.jacobian(model, inputs, len(inputs)))


def test_a_lookup_of_positions_has_its_counts() -> None:
    """Every sample looks up every position once; the output factor is that of the gradients at the sum."""
    model, x, y = built(RUNS["positions"][0]), torch.randn(5, T, 2, dtype=D), torch.randn(5, 2, dtype=D)
    posterior = lw.fit(model, [(x[:2], y[:2]), (x[2:], y[2:])], lw.Gaussian(noise_std=1.0), prior=1.0)
    pairs = zip(posterior.network.layout, posterior.posterior.curvature.blocks, strict=True)
    table = {block.weight: curvature for block, curvature in pairs}["table.weight"]
    assert table.inp.values.tolist() == [[5.0] * T + [0.0, 0.0]]
    assert table.rows == 5 * T
    bases = torch.eye(2, dtype=D)
    total = torch.zeros(SHARED, SHARED, dtype=D)
    for sample in x:
        for seed in bases:
            h = (model.embed(sample[None]) + model.table(torch.arange(T))).detach().requires_grad_()
            (g,) = torch.autograd.grad((after(model, h)[0] * seed).sum(), h)
            total += g[0].T @ g[0]
    assert_close(table.out.dense()[0], total)


# Networks with images as outputs: when the model runs to show their size, and what it may return later.

X = torch.randn(6, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def convolution() -> nn.Module:
    torch.manual_seed(1)
    return nn.Conv2d(2, 3, (1, 3), padding="same").double()


def test_outputs_are_pixels_inside() -> None:
    network, f = Network.build(convolution(), X), convolution()(X).detach()
    assert network.image == (4, 5)
    assert network.output_shape == (20, 3)
    assert_close(network(X), f.flatten(2).mT)
    assert network.head == "weight"  # the last layer keeps its closed form
    assert Network.build(nn.Linear(5, 7).double(), X[:, 0]).image == ()


def test_channels_last_in_memory_is_the_same() -> None:
    model = convolution().to(memory_format=torch.channels_last)
    network = Network.build(model, X.to(memory_format=torch.channels_last))
    assert_close(network(X), Network.build(convolution(), X)(X))
    assert network.image_form(X) == ImageForm((4, 5))


def test_a_sample_runs_once_for_every_shape_of_inputs() -> None:
    runs: list[int] = []

    def run(m: Any, x: Tensor) -> Tensor:
        runs.append(len(x))
        return m.net(x)

    network = Network.build(Wrapped(run, net=convolution()), X)
    runs.clear()
    for size in (6, 3):
        assert network.image_form(X[:size]) == ImageForm((4, 5))
    assert runs == []
    for _ in range(2):
        assert network.image_form(X.mT) == ImageForm((5, 4))
    assert runs == [1]


def test_several_inputs() -> None:
    """The size of the images may be that of a tensor that all samples share."""
    model = Wrapped(lambda m, x, grid: m.net(x)[..., : grid.shape[0], :] + grid.sum(), net=convolution())
    network = Network.build(model, (X, torch.zeros(3, 7).double()))
    assert network.image_form((X, torch.zeros(3, 7).double())) == ImageForm((3, 5))
    assert network.image_form((X, torch.zeros(2, 7).double())) == ImageForm((2, 5))


def test_outputs_of_another_kind_are_refused() -> None:
    model = Wrapped(lambda m, x: m.net(x).squeeze(-2), net=convolution())
    network = Network.build(model, X)
    with pytest.raises(DataError, match=r"outputs of shape \(1, 3, 5\); expected \(1, 3, H, W\), images as before"):
        network.image_form(X[:, :, :1])


def test_targets_take_the_form_of_the_outputs() -> None:
    network, labels = Network.build(convolution(), X), torch.arange(120).reshape(6, 4, 5)
    assert torch.equal(network.arrange_targets(Batch(X, labels)).targets, labels.flatten(1))
    numbers = torch.randn(6, 3, 4, 5)
    batch = network.arrange_targets(Batch(X, numbers, "labels"))
    assert torch.equal(batch.targets, numbers.flatten(2).mT)
    assert batch.key == "labels"
    plain = Network.build(nn.Linear(5, 7).double(), X[:, 0])
    given = Batch(X[:, 0], labels[..., 0])
    assert plain.arrange_targets(given) is given


def test_the_footprint_of_another_size_is_that_of_a_network_built_there() -> None:
    torch.manual_seed(2)
    layers = nn.Conv2d(2, 6, (3, 1), padding="same"), nn.Tanh(), nn.Conv2d(6, 3, (1, 3), padding="same")
    model, large = nn.Sequential(*layers).double(), torch.zeros(3, 2, 7, 9, dtype=torch.float64)
    network, there = Network.build(model, X), Network.build(model, large)
    resized = network.for_inputs(large)
    assert resized.output_shape == there.output_shape == (63, 3)
    assert resized.footprint == there.footprint
    assert resized.blockwise.footprint == network.blockwise.for_inputs(large).footprint == there.blockwise.footprint
    assert network.for_inputs(X) is network
    assert network.linearise(large).network.footprint == there.footprint
    assert_close(resized(large), network(large))
    assert network.batch_size_for(large) == there.batch_size_for(large) < network.batch_size_for(X)


def test_jacobians_that_are_kept_whole_do_not_grow_with_the_size() -> None:
    footprint = Footprint(width=7, patches=5, whole=11, graph=3, live=2, widest=6)
    assert footprint.for_positions(30, 20) == Footprint(width=11, patches=8, whole=11, graph=5, live=3, widest=9)


def test_sequences_of_another_length() -> None:
    """As for images: one sample runs once for every length that was not seen before."""
    runs: list[int] = []

    def run(m: Any, x: Tensor) -> Tensor:
        runs.append(len(x))
        return m.net(x)

    torch.manual_seed(3)
    model = Wrapped(run, net=nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double())
    short, long = X[:, 0].contiguous(), X[:, 0].repeat(1, 3, 1)  # 4 and 12 tokens
    network, there = Network.build(model, short), Network.build(model, long)
    runs.clear()
    assert network.for_inputs(short[:2]) is network
    assert runs == []
    for _ in range(2):
        assert network.for_inputs(long).output_shape == (12, 3)
    assert runs == [1]
    assert network.for_inputs(long).footprint == network.linearise(long).network.footprint == there.footprint
    with pytest.raises(DataError, match=r"outputs of shape \(1, 3\); expected \(1, T, 3\), tokens as before\. Has x a"):
        network.for_inputs(short[0])


def test_a_sequence_without_tokens_has_a_footprint() -> None:
    footprint = Footprint(width=7, patches=5, whole=11, graph=3, live=2, widest=6)
    assert footprint.for_positions(0, 4).width == 2
    assert footprint.for_positions(4, 0).width == 28


# One output of several: the posterior is that of a model which returns this output alone.

Pair = namedtuple("Pair", ["small", "large"])


@dataclass
class Outputs:
    logits: Tensor
    heads: Pair


class Heads(nn.Module):
    """A body with two heads of 2 and 4 outputs, returned in a form of choice."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.body, self.small, self.large, self.form = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 4), form

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).tanh()
        return self.form(self.small(h), self.large(h))


class Alone(nn.Module):
    """The small head of another model."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.body, self.small = heads.body, heads.small

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.body(x).tanh())


FORMS = {
    "key": (lambda small, large: {"large": large, "small": small}, "small"),
    "other than logits": (lambda small, large: {"logits": large, "small": small}, "small"),
    "position": (lambda small, large: (large, small), -1),
    "field": (Pair, "small"),
    "inside": (lambda small, large: {"logits": large, "heads": [large, {"small": small}]}, ("heads", 1, "small")),
    "object": (lambda small, large: Outputs(large, Pair(small, large)), ("heads", "small")),
}
SEVERAL_OUTPUTS_X = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = SEVERAL_OUTPUTS_X[:, :2].sin()


def model(form: str) -> Heads:
    torch.manual_seed(1)
    return Heads(FORMS[form][0]).double()


@pytest.mark.parametrize("form", FORMS)
def test_posterior_is_that_of_the_head_alone(form):
    net = model(form)
    one = lw.fit(net, [(SEVERAL_OUTPUTS_X, Y)], lw.Gaussian(0.1), output=FORMS[form][1], prior=2.0)
    other = lw.fit(Alone(net), [(SEVERAL_OUTPUTS_X, Y)], lw.Gaussian(0.1), prior=2.0)
    assert one.network.selection.names == other.network.selection.names  # not the weights of the other head
    assert_close(one.functions(SEVERAL_OUTPUTS_X).cov, other.functions(SEVERAL_OUTPUTS_X).cov)
    assert_close(one.log_evidence(), other.log_evidence())
    assert isinstance(net(SEVERAL_OUTPUTS_X), dict | tuple | Outputs)  # the model is as it was


def test_files_hold_the_choice(tmp_path):
    net = model("inside")
    fitted = lw.fit(net, [(SEVERAL_OUTPUTS_X, Y)], "regression", output=("heads", 1, "small"))
    fitted.save(tmp_path / "net")
    again = lw.load(tmp_path / "net", net)
    assert again.network.output == ("heads", 1, "small")
    assert_close(again.predict(SEVERAL_OUTPUTS_X).std, fitted.predict(SEVERAL_OUTPUTS_X).std)


def test_without_a_choice_logits_are_taken():
    net = model("other than logits")
    assert lw.check(net, SEVERAL_OUTPUTS_X).outputs == (4,)
    assert lw.check(net, SEVERAL_OUTPUTS_X, output="small").outputs == (2,)


def test_train_learns_the_chosen_head_alone():
    net = model("other than logits")
    trained = lw.train(net, [(SEVERAL_OUTPUTS_X, Y)], "regression", output="small", recipe=lw.recipes.online(epochs=2))
    assert torch.equal(trained.model.large.weight, net.large.weight)
    assert not torch.equal(trained.model.small.weight, net.small.weight)
    assert trained.posterior.predict(SEVERAL_OUTPUTS_X).mean.shape == (8, 2)


def test_members_of_an_ensemble_take_the_same_head():
    net, other = model("other than logits"), Heads(FORMS["other than logits"][0]).double()
    method = lw.baselines.Ensemble([other])
    fitted = lw.fit(net, [(SEVERAL_OUTPUTS_X, Y)], lw.Gaussian(0.1), method=method, output="small")
    with torch.no_grad():
        expected = 0.5 * (net(SEVERAL_OUTPUTS_X)["small"] + other(SEVERAL_OUTPUTS_X)["small"])
    assert_close(fitted.functions(SEVERAL_OUTPUTS_X).mean, expected)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("smal", "expected one of 'logits', 'heads'"),
        (("heads", 2), "expected one of 0, 1"),
        (("logits", 0), "expected no output="),
        (("heads", 1), r"returns a dict at \['heads'\]\[1\]"),
    ],
)
def test_parts_that_do_not_exist_are_refused_with_those_that_do(output, message):
    with pytest.raises(ModelError, match=message):
        lw.fit(model("inside"), [(SEVERAL_OUTPUTS_X, Y)], lw.Gaussian(0.1), output=output)


def test_a_model_with_several_outputs_names_the_setting_that_chooses():
    with pytest.raises(ModelError, match=r"by output=\.\.\. \('large', 'small'\)"):
        lw.fit(model("key"), [(SEVERAL_OUTPUTS_X, Y)], lw.Gaussian(0.1))


@pytest.mark.parametrize("output", [2.5, "", (), ("heads", None), True])
def test_other_choices_are_refused(output):
    with pytest.raises(UnsupportedError, match="output is"):
        path_of(output)


def test_weights_of_another_head_alone_are_refused():
    with pytest.raises(ModelError, match="does not depend on any selected parameter"):
        lw.fit(model("key"), [(SEVERAL_OUTPUTS_X, Y)], lw.Gaussian(0.1), output="small", weights=lw.named("large.*"))


def test_a_model_that_cannot_be_copied_is_refused():
    hidden = nn.Linear(3, 2).double()

    class Bypassing(nn.Module):
        """A model that uses its layer through a variable of its own, not through its modules."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = hidden

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"small": hidden(x)}

    with pytest.raises(ModelError, match="no copy of it can run"):
        lw.fit(Bypassing(), [(SEVERAL_OUTPUTS_X, Y)], lw.Gaussian(0.1), output="small", prior=1.0)


def test_a_tensor_needs_no_choice():
    assert pick_output(SEVERAL_OUTPUTS_X, ()) is SEVERAL_OUTPUTS_X
