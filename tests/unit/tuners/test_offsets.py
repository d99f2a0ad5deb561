"""Offsets of the logits by validation data, and the remark on biased classes without them."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.networks.network import Network
from lapwing.tuners.held_out_data import WIDTHS, HeldOutputs, learned_offset
from tests.tolerances import assert_close

D = torch.float64
CPU = torch.device("cpu")


def rows(kind: str, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits that are right, as inputs, and targets drawn from them; class or label 0 is rare."""
    generator = torch.Generator().manual_seed(seed)
    count = {"binary": 1, "multilabel": 2, "classification": 3}[kind]
    f = 1.5 * torch.randn(n, count, generator=generator, dtype=D)
    f[:, 0] -= 2.5
    if kind == "classification":
        return f, torch.multinomial(f.softmax(-1), 1, generator=generator)[:, 0]
    return f, (torch.rand(n, count, generator=generator, dtype=D) < f.sigmoid()).to(D)


def biased(count: int, by: float = 3.0) -> nn.Module:
    """Return a network that adds ``by`` to the first logit."""
    net = nn.Linear(count, count).to(D)
    with torch.no_grad():
        net.weight.copy_(torch.eye(count))
        net.bias.zero_()
        net.bias[0] = by
    return net


def nll(posterior: Any, data: tuple[Tensor, Tensor]) -> float:
    return -float(posterior.predict(data[0]).log_prob(data[1]).mean())


@pytest.fixture(scope="module", params=["binary", "multilabel", "classification"])
def case(request: pytest.FixtureRequest) -> tuple[str, Any, tuple[Tensor, Tensor]]:
    """Return a kind, the posterior of a biased network with validation data, and test data."""
    kind = request.param
    training, validation, test = rows(kind, 200), rows(kind, 300, 1), rows(kind, 4000, 2)
    return kind, lw.fit(biased(training[0].shape[1]), training, kind, prior=1e4, validation=validation), test


def test_a_bias_is_corrected_where_a_temperature_cannot(case: tuple[str, Any, tuple[Tensor, Tensor]]) -> None:
    kind, posterior, (x, y) = case
    right = -float(lw.fit(biased(x.shape[1], 0.0), (x[:50], y[:50]), kind, method=lw.baselines.MapOnly(), prior=1.0)
                   .predict(x).log_prob(y).mean())  # fmt: skip
    scores = posterior.trace.scores
    assert nll(posterior, (x, y)) < right + 0.02
    assert scores["mixture"] < scores["temperature scaling"] - 0.1
    occurs = F.one_hot(y).to(D).mean(0) if kind == "classification" else y.mean(0)
    assert float((posterior.predict(x).probs.mean(0) - occurs).abs().max()) < 0.04  # a standard error is below 0.02
    assert "logits are moved, output in brackets: -" in posterior.summary()


def test_offsets_are_saved_and_part_of_modules(case: tuple[str, Any, tuple[Tensor, Tensor]], tmp_path: Path) -> None:
    _, posterior, (x, _) = case
    probs = posterior.predict(x[:20]).probs
    posterior.save(tmp_path / "net")
    assert_close(lw.load(tmp_path / "net", posterior.network.model).predict(x[:20]).probs, probs)
    assert_close(posterior.as_module("probs")(x[:20]), probs)


def test_the_offset_and_its_evidence_are_those_of_a_dense_grid() -> None:
    """For one label: b and log T on a grid, with their priors, summed."""
    x, y = rows("binary", 300)
    held = HeldOutputs(x + 1.0, y, torch.ones_like(y), exclusive=False)
    found = learned_offset(held, lw.Bernoulli(), (1.0,))
    assert found is not None
    b, heat = torch.linspace(-4, 2, 601, dtype=D), torch.linspace(-1.5, 1.5, 301, dtype=D)
    logits = (x + 1.0) / heat.exp()[:, None, None] + b[:, None, None, None]  # (b, heat, n, 1)
    energy = torch.cat([
        (y * part - F.softplus(part)).sum((-1, -2)) for part in logits.split(50)
    ])  # fmt: skip
    normal = lambda t, std: -0.5 * (t / std).square() - math.log(std) - 0.5 * math.log(2 * math.pi)
    areas = float((heat[1] - heat[0]).log()), float((b[1] - b[0]).log())
    both = (energy + normal(b, 1.0)[:, None] + normal(heat, 0.5)).logsumexp((0, 1)) + sum(areas)
    without = (energy[400] + normal(heat, 0.5)).logsumexp(0) + areas[0]  # b = 0
    most = (energy + normal(b, 1.0)[:, None] + normal(heat, 0.5)).flatten().argmax()
    assert float(found.values) == pytest.approx(float(b[int(most) // 301]), abs=0.01)
    assert found.log_odds == pytest.approx(math.log(3 / 7) + float(both - without), abs=0.1)


@pytest.mark.parametrize("kind", ["binary", "multilabel", "classification"])
def test_weights_count_as_repeated_data_and_ignored_targets_as_none(kind: str) -> None:
    x, y = rows(kind, 120)
    net = biased(x.shape[1])
    network = Network.build(net, x)
    likelihood: Any = lw.Categorical() if kind == "classification" else lw.Bernoulli(ignore_index=-100)
    read = lambda source: learned_offset(HeldOutputs.of(network, likelihood, Data(source, CPU)), likelihood, WIDTHS)
    twice = read([(x, y), (x[:40], y[:40])])
    weights = torch.ones(120, dtype=D)
    weights[:40] = 2
    weighted = read(lw.samples.weighted((x, y, weights)))
    unknown = torch.full_like(y, -100)
    ignored = read([(x, y), (x, unknown), (x[:40], y[:40])])
    assert twice is not None
    assert weighted is not None
    assert ignored is not None
    assert_close(ignored.values, twice.values)
    assert_close(weighted.values, twice.values)
    assert ignored.log_odds == pytest.approx(twice.log_odds)


def test_soft_targets_count_by_their_probabilities() -> None:
    x, y = rows("classification", 200)
    likelihood, network = lw.Categorical(), Network.build(biased(3), x)
    read = lambda y: learned_offset(HeldOutputs.of(network, likelihood, Data((x, y), CPU)), likelihood, WIDTHS)
    hard, soft = read(y), read(F.one_hot(y).to(D))
    assert hard is not None
    assert soft is not None
    assert_close(soft.values, hard.values)
    assert float(hard.values.sum()) == pytest.approx(0.0, abs=1e-12)


def test_classes_with_few_rows_have_no_offset() -> None:
    x, y = rows("classification", 400)
    keep = (y != 0) | ((y == 0).cumsum(0) <= 9)
    held = lambda x, y: HeldOutputs(x, F.one_hot(y, 3).to(D), torch.ones_like(x), exclusive=True)
    moved = x[keep] + torch.tensor([1.0, 3.0, -3.0], dtype=D)
    found = learned_offset(held(moved, y[keep]), lw.Categorical(), WIDTHS)
    assert found is not None
    assert float(found.values[0]) == 0
    assert float(found.values[1] - found.values[2]) == pytest.approx(-6.0, abs=2.0)
    assert learned_offset(held(moved[:9], y[keep][:9]), lw.Categorical(), WIDTHS) is None
    assert learned_offset(held(x, y), lw.Categorical(), ()) is None


def test_a_network_without_bias_gets_no_offset() -> None:
    training, validation = rows("classification", 100), rows("classification", 300, 1)
    posterior = lw.fit(biased(3, 0.0), training, "classification", prior=1e3, validation=validation)
    assert all(cell.likelihood.link_offset is None for cell in posterior.posterior.cells)


def test_many_classes_are_corrected_through_drawn_functions() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 300, generator=generator)
    x[:, :4] += 6
    y = torch.multinomial(x.softmax(-1), 1, generator=generator)[:, 0]
    net = biased(300, 4.0).float()
    posterior = lw.fit(net, (x[:200], y[:200]), "classification", prior=1e5, validation=(x[200:], y[200:]),
                       method=lw.Diagonal())  # fmt: skip
    scores = posterior.trace.scores
    assert scores["mixture"] < scores["temperature scaling"] - 0.1
    mean = posterior.predict(x).probs.mean(0)[0]
    assert abs(float(mean) - float((y == 0).float().mean())) < 0.05


@pytest.mark.parametrize(
    ("likelihood", "odds"),
    [
        (lw.Bernoulli(pos_weight=4.0), (0.25, 1.0)),
        (lw.Categorical(class_weights=(4.0, 1.0)), (0.25, 1.0)),
        (lw.Categorical(class_weights=(4.0, 0.0), link_offset=(1.0, 0.0)), (0.25 * math.e, 1.0)),
    ],
    ids=["labels", "classes", "offset and a weight of zero"],
)
def test_predictions_are_those_for_data_without_weights(likelihood: Any, odds: tuple[float, float]) -> None:
    f = torch.randn(5, 1 if isinstance(likelihood, lw.Bernoulli) else 2, dtype=D)
    belief = lw.FunctionGaussian(f, torch.zeros(*f.shape, f.shape[1], dtype=D))
    p = likelihood.predict(belief).probs
    if f.shape[1] == 1:
        assert_close(p / (1 - p), f.exp() * odds[0])
    else:
        assert_close(p[:, 0] / p[:, 1], (f[:, 0] - f[:, 1]).exp() * odds[0] / odds[1])


def trained(weight: float, smoothing: float = 0.0, steps: int = 150) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a network for a rare label, trained with a weight for it, and its data."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1000, 3, generator=generator)
    y = (2 * x.sum(1) + torch.randn(1000, generator=generator) > 5.5).float().unsqueeze(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1))
    optimiser = torch.optim.Adam(net.parameters(), 2e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        target = y * (1 - smoothing) + smoothing / 2
        F.binary_cross_entropy_with_logits(net(x), target, pos_weight=torch.tensor(weight)).backward()
        optimiser.step()
    return net.eval(), (x, y)


def test_a_network_that_was_trained_with_weights_is_noticed_without_validation_data() -> None:
    net, data = trained(19.0)
    with pytest.warns(lw.errors.CalibrationWarning, match="probably trained with weights") as caught:
        posterior = lw.fit(net, data, "binary")
    assert str(caught[0].message) in posterior.findings
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corrected = lw.fit(net, data, lw.Bernoulli(pos_weight=19.0))
        lw.fit(net, data, "binary", validation=(data[0][:60] + 0.01, data[1][:60]))
    rate = float(data[1].mean())
    assert abs(float(corrected.predict(data[0]).probs.mean()) - rate) < 0.25 * rate
    assert float(posterior.predict(data[0]).probs.mean()) > 1.5 * rate


@pytest.mark.parametrize("how", [{}, {"smoothing": 0.1}, {"steps": 6}, {"steps": 15}, {"steps": 600}], ids=repr)
def test_training_without_weights_is_not_taken_for_one_with(how: dict[str, Any]) -> None:
    net, data = trained(1.0, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lw.fit(net, data, "binary")
