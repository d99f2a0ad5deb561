"""Dropout left on: plain loops over seeds give the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import Wrapped
from tests.tolerances import assert_close

D = torch.float64
X = torch.randn(9, 4, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.randn(9, 2, dtype=D, generator=torch.Generator().manual_seed(2))
C = torch.randint(0, 2, (9,), generator=torch.Generator().manual_seed(3))
NEW = torch.randn(5, 4, dtype=D, generator=torch.Generator().manual_seed(4))


def net(p: float = 0.4) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 2)
    model = nn.Sequential(*layers).double()
    model[1].running_mean += 0.1
    return model.eval()


def passes(model: nn.Module, x: Tensor, seeds: range) -> Tensor:
    """One mask after another, the same for all inputs."""
    before, dropout, last = model[:3], model[3].p, model[4]
    found = []
    state = torch.get_rng_state()
    for seed in seeds:
        torch.manual_seed(1_000_003 * seed)
        mask = F.dropout(torch.ones(1, 8, dtype=D), dropout, training=True)
        found.append(last(before(x) * mask).detach())
    torch.set_rng_state(state)
    return torch.stack(found)


def fitted(model: nn.Module, likelihood: Any = "regression", y: Tensor = Y, **settings: Any) -> lw.Fitted:
    return lw.fit(model, [(X[:4], y[:4]), (X[4:], y[4:])], likelihood, method=lw.MCDropout(**settings))


@pytest.mark.parametrize(("samples", "seed"), [(2, 0), (7, 100)])
def test_mean_and_covariance_of_the_passes(samples: int, seed: int) -> None:
    model = net()
    found = fitted(model, samples=samples, seed=seed)
    each = passes(model, NEW, range(seed, seed + samples))
    mean = each.mean(0)
    belief = found.functions(NEW)
    assert_close(belief.mean, mean)
    for b in range(5):
        gap = each[:, b] - mean[b]
        assert_close(belief.cov[b], gap.T @ gap / (samples - 1))
    assert_close(belief.variance, each.var(0))
    flat = (each - mean).reshape(samples, 10)
    assert_close(found.functions(NEW, joint=True).cov.reshape(10, 10), flat.T @ flat / (samples - 1))
    assert float(belief.variance.min()) > 0


def test_functions_are_the_passes() -> None:
    model = net()
    found = fitted(model, samples=6, seed=3)
    assert_close(found.function_samples(NEW, 4), passes(model, NEW, range(3, 7)))
    with pytest.raises(lw.UnsupportedError, match="7 samples were asked for and there are 6 members"):
        found.function_samples(NEW, 7)


def test_the_noise_is_the_residual_without_dropout() -> None:
    model = net()
    found = fitted(model)
    assert_close(found.likelihood.dispersion, (model(X) - Y).square().mean().detach())
    assert len(found.posterior.members) == 32


def test_predictions() -> None:
    model = net()
    each = passes(model, NEW, range(32))
    predicted = fitted(model, lw.Gaussian(noise_std=0.3)).predict(NEW)
    assert_close(predicted.mean, each.mean(0))
    assert_close(predicted.std, (each.var(0) + 0.09).sqrt())
    classes = fitted(model, "classification", C)
    probs = classes.predict(NEW).probs
    assert_close(probs, lw.Categorical().predict(classes.functions(NEW)).probs)
    assert_close(probs.sum(1), torch.ones(5, dtype=D))


def test_the_same_call_twice_gives_the_same() -> None:
    found = fitted(net(), samples=4)
    torch.manual_seed(123)
    one = found.functions(NEW).cov
    torch.rand(3)
    assert torch.equal(found.functions(NEW).cov, one)
    assert not torch.equal(fitted(net(), samples=4, seed=1).functions(NEW).cov, one)
    gen = torch.Generator().manual_seed(5)
    again = lw.fit(net(), [(X, Y)], "regression", method=lw.MCDropout(samples=4), generator=gen)
    assert torch.equal(again.functions(NEW).cov, one)


def test_the_model_and_the_global_generator_are_left_alone() -> None:
    model = net()
    torch.manual_seed(77)
    random = torch.get_rng_state()

    def run() -> None:
        found = fitted(model, samples=3)
        found.functions(NEW, joint=True)
        found.function_samples(NEW, 2)
        _ = found.predict(NEW).std

    problems.unchanged(model, run)
    assert torch.equal(torch.get_rng_state(), random)


def test_batch_norm_stays_in_evaluation_mode() -> None:
    """Only dropout is random: each row is the same whoever shares its batch."""
    found = fitted(net(), samples=3)
    noisy = found.posterior.members.model
    assert [module.training for module in noisy] == [False, False, False, True, False]
    assert_close(found.functions(NEW[:1]).cov[0], found.functions(NEW).cov[0])


def test_one_input_given_twice_gets_one_answer() -> None:
    joint = fitted(net(), samples=8).functions(NEW[[0, 0]], joint=True).cov
    assert_close(joint[0, :, 0], joint[0, :, 1])


# Dropout of other layers


def attention(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return Wrapped(
        lambda m, x: m.head(m.layer(m.embed(x))[:, 0]), embed=nn.Linear(4, 8), head=nn.Linear(8, 2),
        layer=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=dropout),
    ).double().eval()  # fmt: skip


def test_a_transformer_layer_drops_as_in_training() -> None:
    """In evaluation mode PyTorch runs the layer as one kernel, without any dropout."""
    model = attention(0.3)
    x, y = torch.randn(6, 3, 4, dtype=D), torch.randn(6, 2, dtype=D)
    found = lw.fit(model, [(x, y)], "regression", method=lw.MCDropout(samples=5))
    assert float(found.functions(x).variance.min()) > 1e-6


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_dropout_inside_of_a_layer(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "attention":
        run = lambda m, x: m.head(m.cell(x, x, x, need_weights=False)[0].mean(1))
        model = Wrapped(run, cell=nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), head=nn.Linear(4, 2))
    else:
        run = lambda m, x: m.head(m.cell(x)[0][:, -1])
        model = Wrapped(run, cell=nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True), head=nn.Linear(5, 2))
    model = model.double().eval()
    x, y = torch.randn(6, 3, 4, dtype=D), torch.randn(6, 2, dtype=D)
    found = lw.fit(model, [(x, y)], "regression", method=lw.MCDropout(samples=5))
    assert float(found.functions(x).variance.min()) > 1e-12


# Files


def test_files(tmp_path: Path) -> None:
    model = net()
    found = fitted(model, samples=6, seed=3)
    found.save(tmp_path / "it")
    again = lw.load(tmp_path / "it", net())
    assert torch.equal(again.functions(NEW).cov, found.functions(NEW).cov)
    assert torch.equal(again.predict(NEW).std, found.predict(NEW).std)
    assert torch.equal(again.function_samples(NEW, 6), found.function_samples(NEW, 6))


# What is refused


@pytest.mark.parametrize("p", [0.0, None])
def test_a_network_without_dropout(p: float | None) -> None:
    model = nn.Linear(4, 2).double() if p is None else net(p)
    message = "no dropout layer with a probability above nought; expected nn.Dropout or one of its kin. Use another"
    with pytest.raises(lw.UnsupportedError, match=message):
        fitted(model)


@pytest.mark.parametrize("samples", [0, 1])
def test_too_few_samples(samples: int) -> None:
    with pytest.raises(lw.UnsupportedError, match=f"samples is {samples}; expected at least 2: one has no spread"):
        lw.MCDropout(samples=samples)


def test_a_model_in_training_mode() -> None:
    with pytest.raises(lw.ModelError, match="is in training mode; expected evaluation mode"):
        fitted(net().train())


def test_the_methods_name() -> None:
    one = lw.fit(net(), [(X, Y)], "regression", method="dropout").functions(NEW).cov
    assert torch.equal(one, lw.fit(net(), [(X, Y)], "regression", method=lw.MCDropout()).functions(NEW).cov)
