"""Dropout left on: every pass is the network without some of its units, and their spread the error bars."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
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
MASKS = torch.tensor(list(product((0.0, 1.0), repeat=8)), dtype=D)


def net(p: float = 0.4) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 2)
    model = nn.Sequential(*layers).double()
    model[1].running_mean += 0.1
    return model.eval()


def fitted(model: nn.Module, likelihood: Any = "regression", y: Tensor = Y, **settings: Any) -> lw.Fitted:
    return lw.fit(model, [(X[:4], y[:4]), (X[4:], y[4:])], likelihood, method=lw.baselines.MCDropout(**settings))


def test_every_pass_drops_some_units_for_all_inputs() -> None:
    """Each is one of the 2⁸ networks with hidden units taken out and the others scaled up."""
    model = net(0.25)
    hidden = model[:3](NEW).detach()
    every = torch.stack([model[4](hidden * mask / 0.75) for mask in MASKS]).detach()  # (256, 5, 2)
    draws = fitted(model, samples=400).function_samples(NEW, 400)
    gap = (draws[:, None] - every).abs().flatten(2).amax(2)
    assert float(gap.min(1).values.max()) < 1e-12
    kept = MASKS[gap.argmin(1)].mean(0)  # how often each unit is left
    assert float((kept - 0.75).abs().max()) < 5 * (0.25 * 0.75 / 400) ** 0.5


@pytest.mark.parametrize(("samples", "seed"), [(2, 0), (7, 100)])
def test_mean_and_covariance_of_the_passes(samples: int, seed: int) -> None:
    posterior = fitted(net(), samples=samples, seed=seed)
    each = posterior.function_samples(NEW, samples)
    mean = sum(each) / samples
    belief = posterior.functions(NEW)
    assert_close(belief.mean, mean)
    for b in range(5):
        total = torch.zeros(2, 2, dtype=D)
        for f in each:
            total += torch.outer(f[b] - mean[b], f[b] - mean[b])
        assert_close(belief.cov[b], total / (samples - 1))
    assert_close(belief.variance, each.var(0))
    flat = (each - mean).reshape(samples, 10)
    assert_close(posterior.functions(NEW, joint=True).cov.reshape(10, 10), flat.T @ flat / (samples - 1))
    assert float(belief.variance.min()) > 0


def test_seeds_follow_each_other() -> None:
    """Member k has the seed ``seed + k``."""
    one, other = (fitted(net(), samples=6, seed=seed).function_samples(NEW, 6) for seed in (3, 5))
    assert_close(other[:4], one[2:])
    assert not torch.equal(one[0], one[1])


def test_the_noise_is_the_residual_without_dropout() -> None:
    model = net()
    posterior = fitted(model)
    assert_close(posterior.likelihood.dispersion, (model(X) - Y).square().mean().detach())
    assert len(posterior.posterior.members) == 32


def test_predictions() -> None:
    model = net()
    posterior = fitted(model, lw.Gaussian(noise_std=0.3))
    each = posterior.function_samples(NEW, 32)
    assert_close(posterior.predict(NEW).mean, each.mean(0))
    assert_close(posterior.predict(NEW).std, (each.var(0) + 0.09).sqrt())
    classes = fitted(model, "classification", C)
    probs = classes.predict(NEW).probs
    assert_close(probs, lw.Categorical().predict(classes.functions(NEW)).probs)
    assert_close(probs.sum(1), torch.ones(5, dtype=D))


def test_the_same_call_twice_gives_the_same() -> None:
    posterior = fitted(net(), samples=4)
    torch.manual_seed(123)
    one = posterior.functions(NEW).cov
    torch.rand(3)
    assert torch.equal(posterior.functions(NEW).cov, one)
    assert not torch.equal(fitted(net(), samples=4, seed=9).functions(NEW).cov, one)
    gen = torch.Generator().manual_seed(5)
    again = lw.fit(net(), [(X, Y)], "regression", method=lw.baselines.MCDropout(samples=4), generator=gen)
    assert torch.equal(again.functions(NEW).cov, one)


def test_batch_norm_stays_in_evaluation_mode() -> None:
    noisy = fitted(net(), samples=3).posterior.members.model
    assert not noisy[1].training
    assert torch.equal(noisy[1].running_mean, net()[1].running_mean)


# Dropout in other places


def test_one_layer_in_two_places_drops_in_both() -> None:
    torch.manual_seed(0)
    drop = nn.Dropout(0.5)
    layers = nn.Linear(4, 4), nn.Tanh(), drop, nn.Linear(4, 4), nn.Tanh(), drop, nn.Linear(4, 2)
    model = nn.Sequential(*layers).double().eval()
    every = torch.stack(
        [model[6](model[3:5](model[:2](NEW) * m[:4] / 0.5) * m[4:] / 0.5) for m in MASKS]
    ).detach()  # fmt: skip
    draws = fitted(model, samples=40).function_samples(NEW, 40)
    gap = (draws[:, None] - every).abs().flatten(2).amax(2)
    assert float(gap.min(1).values.max()) < 1e-12
    second = MASKS[gap.argmin(1)][:, 4:]
    assert 0.2 < float(second.mean()) < 0.8


def test_whole_channels() -> None:
    """nn.Dropout2d takes a channel away or leaves it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Dropout2d(0.5), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 2),
    ).double().eval()  # fmt: skip
    x = torch.randn(5, 1, 4, 4, dtype=D)
    posterior = lw.fit(
        model, [(x, torch.randn(5, 2, dtype=D))], "regression", method=lw.baselines.MCDropout(samples=30)
    )
    maps = model[0](x)
    every = torch.stack([model[2:](maps * mask[:, None, None] / 0.5) for mask in MASKS]).detach()
    gap = (posterior.function_samples(x, 30)[:, None] - every).abs().flatten(2).amax(2)
    assert float(gap.min(1).values.max()) < 1e-12


def test_a_transformer_layer_drops_as_in_training() -> None:
    """In evaluation mode PyTorch runs the layer as one kernel, without any dropout; training is the measure."""
    torch.manual_seed(0)
    model = Wrapped(
        lambda m, x: m.head(m.layer(m.embed(x))[:, 0]), embed=nn.Linear(4, 8), head=nn.Linear(8, 2),
        layer=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.3),
    ).double().eval()  # fmt: skip
    x, y = torch.randn(6, 3, 4, dtype=D), torch.randn(6, 2, dtype=D)
    posterior = lw.fit(model, [(x, y)], "regression", method=lw.baselines.MCDropout(samples=300))
    variance = problems.unchanged(model, lambda: posterior.functions(x).variance)
    model.train()
    spread = torch.stack([model(x).detach() for _ in range(300)]).var(0)
    assert float((variance / spread - 1).abs().max()) < 0.6  # standard errors of a tenth on either side


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
    posterior = lw.fit(model, [(x, y)], "regression", method=lw.baselines.MCDropout(samples=5))
    assert float(posterior.functions(x).variance.min()) > 1e-12
    assert torch.equal(posterior.functions(x).cov, posterior.functions(x).cov)


# Files


# What is refused


@pytest.mark.parametrize("p", [0.0, None])
def test_a_network_without_dropout(p: float | None) -> None:
    model = nn.Linear(4, 2).double() if p is None else net(p)
    message = "no dropout layer with a probability above zero; expected nn.Dropout or a similar layer. Use another"
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        fitted(model)


def test_a_model_in_training_mode() -> None:
    with pytest.raises(lw.errors.ModelError, match="is in training mode; expected evaluation mode"):
        fitted(net().train())
