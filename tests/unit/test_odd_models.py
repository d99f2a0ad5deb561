"""Legal but unusual user code: heads without a rule, models that change themselves, mixed precision, odd containers."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing import errors
from tests.cases import Wrapped
from tests.references import dense

METHODS = [lw.Full(), lw.Diagonal(), lw.Kron(), lw.EKron(), lw.LowRank(5)]


def features() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(12, 3), torch.randn(12, 3), torch.randint(0, 3, (12,))


def head(run: Callable[..., Any], **parts: Any) -> nn.Module:
    return Wrapped(run, l=nn.Linear(3, 4), **parts)


HEADS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "einsum": (
        lambda: head(
            lambda s, x: torch.einsum("bd,do->bo", torch.tanh(s.l(x)), s.w) + s.b,
            w=nn.Parameter(torch.randn(4, 3)), b=nn.Parameter(torch.randn(3)),
        ), ("w", "b"),
    ),
    "weight on the left": (
        lambda: head(lambda s, x: (s.w @ torch.tanh(s.l(x)).T).T, w=nn.Parameter(torch.randn(3, 4))), ("w",),
    ),
    "cosine": (
        lambda: head(
            lambda s, x: F.linear(F.normalize(torch.tanh(s.l(x))), F.normalize(s.w)), w=nn.Parameter(torch.randn(3, 4))
        ), ("w",),
    ),
    "weight norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))),
        ("2.bias", "2.parametrizations.weight.original0", "2.parametrizations.weight.original1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_the_last_layer_is_the_head_even_without_a_rule_for_it(name: str) -> None:
    x, y, _ = features()
    build, expected = HEADS[name]
    model = build().double()
    x, y = x.double(), y.double()
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(0.5), method=lw.Full(), weights=lw.last_layer, prior=0.7)
    assert posterior.network.selection.names == expected
    jac = dense.jacobian(model, x, 12, list(expected))
    ggn = dense.ggn(jac, torch.eye(3, dtype=torch.float64).expand(12, 3, 3)) / 0.25
    cov = torch.linalg.inv(ggn + 0.7 * torch.eye(len(ggn), dtype=torch.float64))
    torch.testing.assert_close(posterior.functions(x).cov, jac @ cov @ jac.mT)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.l(x)


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "counter": Counting,
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), nn.Linear(3, 3)
    ).train(),
    "spectral norm": lambda: nn.Sequential(
        nn.Linear(3, 30), nn.utils.parametrizations.spectral_norm(nn.Linear(30, 30)), nn.Linear(30, 3)
    ).train(),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_model_that_changes_itself_is_refused_and_put_back(name: str) -> None:
    x, _, y = features()
    model = CHANGING[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(errors.ModelError, match="changes its own weights or buffers"):
        lw.fit(model, [(x, y)], "classification")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_embedding_that_renormalises_its_weights_is_refused() -> None:
    table = nn.Embedding(6, 4, max_norm=0.5)
    before = table.weight.detach().clone()
    model = Wrapped(lambda s, t: s.h(s.e(t).flatten(1)), e=table, h=nn.Linear(8, 3))
    with pytest.raises(errors.ModelError, match="max_norm"):
        lw.fit(model, [(torch.randint(0, 6, (5, 2)), torch.tensor([0, 1, 2, 0, 1]))], "classification")
    assert torch.equal(table.weight, before)


def test_gradients_scaled_by_frequency_are_refused() -> None:
    model = Wrapped(
        lambda s, t: s.h(s.e(t).flatten(1)), e=nn.Embedding(6, 4, scale_grad_by_freq=True), h=nn.Linear(8, 3)
    )
    with pytest.raises(errors.ModelError, match="scale_grad_by_freq"):
        lw.fit(model, [(torch.randint(0, 6, (5, 2)), torch.tensor([0, 1, 2, 0, 1]))], "classification")


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_autocast_inside_the_model(method: Any) -> None:
    x, _, y = features()

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.h = nn.Linear(3, 4), nn.Linear(4, 3)
            self.narrow = True

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
                return self.h(torch.tanh(self.l(x)))

    torch.manual_seed(3)
    model = Narrow()
    std = lw.fit(model, [(x, y)], "classification", method=method, prior=1.0).functions(x).std
    model.narrow = False
    wide = lw.fit(model, [(x, y)], "classification", method=method, prior=1.0).functions(x).std
    torch.testing.assert_close(std.float(), wide, rtol=0.05, atol=0.02)


def test_autocast_around_the_calls_changes_nothing() -> None:
    x, _, y = features()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    plain = lw.fit(model, [(x, y)], "classification", prior=1.0).predict(x).probs
    with torch.autocast("cpu", torch.bfloat16):
        cast = lw.fit(model, [(x, y)], "classification", prior=1.0).predict(x).probs
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_layers_of_different_dtypes(method: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, _, y = features()
    body, top = dtypes
    model = Wrapped(
        lambda s, x: s.h(torch.tanh(s.l(x.to(body))).to(top)), l=nn.Linear(3, 4).to(body), h=nn.Linear(4, 3).to(top)
    )
    posterior = lw.fit(model, [(x, y)], "classification", method=method, prior=1.0)
    assert bool((posterior.functions(x).variance > 0).all())
    assert posterior.function_samples(x, 2).shape == posterior.network_samples(x, 2).shape == (2, 12, 3)


@pytest.mark.parametrize("table", [nn.EmbeddingBag(6, 4), nn.Embedding(6, 4, sparse=True)], ids=["bag", "sparse"])
def test_low_rank_where_products_have_no_second_derivative(table: nn.Module) -> None:
    model = Wrapped(lambda s, t: s.h(s.e(t).flatten(1)), e=table, h=nn.LazyLinear(3)).double()
    tokens, y = torch.randint(0, 6, (5, 2)), torch.tensor([0, 1, 2, 0, 1])
    model(tokens)
    thin, full = (
        lw.fit(model, [(tokens, y)], "classification", method=method, prior=1.0).functions(tokens).cov
        for method in (lw.LowRank(60), lw.Full())
    )
    torch.testing.assert_close(thin, full)


def test_named_tuples_as_inputs() -> None:
    x, other, y = features()
    pair = namedtuple("pair", "a b")
    model = Wrapped(lambda s, a, b: s.l(a) + s.r(b), l=nn.Linear(3, 3), r=nn.Linear(3, 3))
    assert lw.fit(model, [(pair(x, other), y)], "classification").functions(pair(x, other)).std.shape == (12, 3)


def test_the_noise_gradient_of_a_rank_beyond_the_curvatures_is_finite() -> None:
    x, y, _ = features()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    noise = torch.tensor(0.5, requires_grad=True, dtype=torch.float64)
    data = [(x[:3].double(), y[:3].double())]
    thin = lw.fit(model, data, lw.Gaussian(noise), method=lw.LowRank(20), prior=1.0).log_evidence()
    full = lw.fit(model, data, lw.Gaussian(noise), method=lw.Full(), prior=1.0).log_evidence()
    torch.testing.assert_close(torch.autograd.grad(thin, noise), torch.autograd.grad(full, noise))


MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
REFUSED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], type[Exception], str]] = {
    "negative temperature": (lambda p, x, y: lw.Categorical(temperature=-1.0), errors.DataError, "positive"),
    "negative class weight": (lambda p, x, y: lw.Categorical(class_weights=(1, -1, 1)), errors.DataError, "not negative"),  # noqa: E501
    "likelihood class": (lambda p, x, y: lw.fit(MODEL, [(x, y)], lw.Categorical), errors.UnsupportedError, "an object"),
    "method class": (
        lambda p, x, y: lw.fit(MODEL, [(x, y)], "classification", method=lw.Kron), errors.UnsupportedError, "an object",
    ),
    "no data": (lambda p, x, y: lw.fit(MODEL, None, "classification"), errors.DataError, "DataLoader"),
    "no module": (lambda p, x, y: lw.fit(lambda x: x, [(x, y)], "classification"), errors.ModelError, "nn.Module"),
    "pattern": (lambda p, x, y: lw.named("(").needs(MODEL), errors.ModelError, "regular expression"),
    "empty batch": (lambda p, x, y: p.predict(x[:0]), errors.DataError, "empty"),
    "class out of range": (lambda p, x, y: p.predict(x).log_prob(y + 5), errors.DataError, "expected 0..2"),
    "no function samples": (lambda p, x, y: p.function_samples(x, 0), errors.UnsupportedError, "n is 0.*at least 1"),
    "no weight samples": (lambda p, x, y: p.weight_samples(0), errors.UnsupportedError, "n is 0.*at least 1"),
    "no network samples": (lambda p, x, y: p.network_samples(x, 0), errors.UnsupportedError, "n is 0.*at least 1"),
    "half a function": (lambda p, x, y: p.function_samples(x, 2.5), errors.UnsupportedError, "n is 2.5.*integer"),
    "half a weight sample": (lambda p, x, y: p.weight_samples(2.5), errors.UnsupportedError, "n is 2.5.*integer"),
    "half a network": (lambda p, x, y: p.network_samples(x, 2.5), errors.UnsupportedError, "n is 2.5.*integer"),
    "positive weights": (
        lambda p, x, y: lw.fit(MODEL, [(x, x)], lw.Bernoulli(pos_weight=(1.0, 2.0))), errors.DataError, "one for each",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    x, _, y = features()
    posterior = lw.fit(MODEL, [(x, y)], "classification", prior=1.0)
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(posterior, x, y)
