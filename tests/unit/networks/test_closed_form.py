"""The last layer in closed form: the same curvature as by backward passes from every column of the root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature.dense import FullCurvature
from lapwing.curvature.sweep import Seeds, Sweep
from lapwing.data.batches import Data
from lapwing.likelihoods.base import Likelihood
from lapwing.networks.last_layer import HeadGGN
from lapwing.networks.network import Network
from tests.cases import Wrapped
from tests.references import dense
from tests.tolerances import assert_close

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
    "tokens, no bias": Ending(lambda: body(nn.Linear(WIDTH, 5, bias=False)), (2, 3), (2, 5)),
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
