"""A Gaussian through the iterates of SGD: its moments, its draws, and what is left alone meanwhile."""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import CASES, Case
from tests.tolerances import assert_close, assert_within

D = torch.float64
X = torch.randn(11, 4, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.randn(11, 2, dtype=D, generator=torch.Generator().manual_seed(2))
C = torch.randint(0, 2, (11,), generator=torch.Generator().manual_seed(3))
NEW = torch.randn(5, 4, dtype=D, generator=torch.Generator().manual_seed(4))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()
    model[1].running_mean += 0.1
    return model.eval()


def swag(**settings: Any) -> lw.baselines.SWAG:
    return lw.baselines.SWAG(**{"snapshots": 6, "rank": 4, "learning_rate": 0.01, "batch_size": 3, **settings})


def fitted(model: nn.Module, likelihood: Any = "regression", y: Tensor = Y, **settings: Any) -> lw.Fitted:
    options = {name: settings.pop(name) for name in ("prior", "weights") if name in settings}
    return lw.fit(model, [(X[:4], y[:4]), (X[4:], y[4:])], likelihood, method=swag(**settings), **options)


class Spy(nn.Module):
    """Remembers the inputs of every pass that is differentiated."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen = deque[Tensor]()  # the library runs a copy of the model, which has copies of its lists

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen.append(x.detach().clone())
        out: Tensor = self.inner(x)
        return out


def targets_of(x: Tensor) -> Tensor:
    return Y[(x[:, None] == X).all(2).double().argmax(1)]


# The moments


def iterates(
    model: nn.Module, batches: list[Tensor], between: int, momentum: float, decay: float, centre: float
) -> Tensor:
    """PyTorch's own SGD on the same mini-batches: the weights after every ``between`` steps, (T, P)."""
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    found = []
    for step, x in enumerate(batches):
        optimiser.zero_grad()
        loss = 0.5 * (model(x) - targets_of(x)).square().sum(1).mean()
        penalty = sum((p - centre).square().sum() for p in model.parameters())
        (loss + 0.5 * decay * penalty).backward()
        optimiser.step()
        if (step + 1) % between == 0:
            found.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return torch.stack(found)


RUNS: dict[str, tuple[dict[str, Any], int, float]] = {
    "passes": ({}, 4, 0.9),
    "two passes": ({"epochs_between": 2}, 8, 0.9),
    "steps": ({"steps_between": 3}, 3, 0.9),
    "no momentum": ({"momentum": 0.0}, 4, 0.0),
    "decay": ({"weight_decay": 0.7}, 4, 0.9),
    "prior": ({"prior": lw.isotropic(5.0, mean=0.2)}, 4, 0.9),
    "decay before prior": ({"weight_decay": 0.7, "prior": 1e3}, 4, 0.9),
    "every snapshot": ({"rank": 6}, 4, 0.9),
}


@pytest.mark.parametrize("name", RUNS)
def test_moments_are_those_of_sgd(name: str) -> None:
    settings, between, momentum = RUNS[name]
    model = Spy(net()).eval()
    posterior = fitted(model, **settings)
    noise = float((net()(X) - Y).square().mean().detach())  # the dispersion at the start
    decay = {"decay": 0.7, "decay before prior": 0.7, "prior": noise * 5.0 / 11}.get(name, 0.0)
    seen = list(model.seen)[-6 * between :]
    rows = iterates(net(), seen, between, momentum, decay, 0.2 if name == "prior" else 0.0)
    start = nn.utils.parameters_to_vector(net().parameters()).detach()
    draws = posterior.posterior
    assert_close(start + draws.mean, rows.mean(0))
    assert_close(draws.variance, rows.var(0))
    assert_close(draws.last_deviations, rows[-settings.get("rank", 4) :] - rows.mean(0))
    assert float(draws.variance.min()) > 0


def test_every_pass_has_every_row_once_in_a_new_order() -> None:
    """Also where the data come in batches that are smaller than the mini-batches."""
    model = Spy(net()).eval()
    data = list(zip(X.split(2), Y.split(2), strict=True))
    lw.fit(model, data, "regression", method=swag(batch_size=4))
    passes = [torch.cat(list(model.seen)[i : i + 3]) for i in range(len(model.seen) - 18, len(model.seen), 3)]
    for one in passes:
        assert torch.equal(one[one[:, 0].argsort()], X[X[:, 0].argsort()])
    assert len({tuple(one[:, 0].tolist()) for one in passes}) == 6


class Fresh:
    """Mini-batches drawn with replacement: each is independent of those before it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.generator = x, y, torch.Generator().manual_seed(7)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(8):
            rows = torch.randint(len(self.x), (10,), generator=self.generator)
            yield self.x[rows], self.y[rows]


def test_the_spread_on_a_quadratic_is_that_of_the_theory() -> None:
    """One slope: for SGD with momentum m at the rate ε, curvature h and gradient variance s the stationary variance is
    ε s (1 + m) / (h (1 - m) (2 (1 + m) - ε h)): in proportion to the rate where it is low."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(400, 1, dtype=D, generator=gen)
    y = 1.5 * x + 0.5 * torch.randn(400, 1, dtype=D, generator=gen)
    model = nn.Linear(1, 1, bias=False).double()
    best = (x * y).sum() / x.square().sum()
    model.weight.data.fill_(float(best))
    h, m = float(x.square().mean()), 0.5
    s = float((x * (x * best - y)).var()) / 10
    for rate in (0.2, 0.4):
        method = lw.baselines.SWAG(
            200, 2, learning_rate=rate, momentum=m, steps_between=round(1.2 / rate), batch_size=10
        )
        posterior = lw.fit(model, Fresh(x, y), lw.Gaussian(noise_std=0.5), method=method)
        theory = rate * s * (1 + m) / (h * (1 - m) * (2 * (1 + m) - rate * h))
        # The standard error of a variance from 200 independent snapshots is 10 %; their correlation is 0.03.
        assert float(posterior.posterior.variance) == pytest.approx(theory, rel=0.3)


# The draws


def test_draws_have_the_stated_mean_and_covariance() -> None:
    model = nn.Sequential(nn.Linear(4, 2)).double()
    posterior = fitted(model, snapshots=7, rank=5)
    draws = posterior.posterior
    expected = 0.5 * torch.diag(draws.variance) + 0.5 * sum(torch.outer(d, d) for d in draws.last_deviations) / 4
    samples = posterior.weight_samples(5_000, torch.Generator().manual_seed(0))
    centre = posterior.network.theta() + draws.mean
    gap = samples - centre
    assert float((gap.mean(0).abs() / (gap.std(0) / 5_000**0.5)).max()) < 5
    assert_within(torch.einsum("ni,nj->nij", gap, gap), expected)


def test_with_every_deviation_weights_have_the_variance_of_the_snapshots() -> None:
    draws = fitted(net(), rank=6).posterior
    assert_close(draws.last_deviations.square().sum(0) / 5, draws.variance)


def by_hand(model: nn.Sequential, weights: Tensor, x: Tensor) -> Tensor:
    moved = copy.deepcopy(model)
    nn.utils.vector_to_parameters(weights, moved.parameters())
    return moved(x).detach()


@pytest.mark.parametrize(("samples", "seed"), [(2, 0), (7, 100)])
def test_predictions_are_those_of_networks_with_drawn_weights(samples: int, seed: int) -> None:
    model = net()
    posterior = fitted(model, samples=samples, seed=seed)
    each = torch.stack([by_hand(model, w, NEW) for w in posterior.weight_samples(samples)])
    assert_close(posterior.function_samples(NEW, samples), each)
    belief, mean = posterior.functions(NEW), each.mean(0)
    assert_close(belief.mean, mean)
    assert_close(belief.variance, each.var(0))
    for b in range(5):
        total = sum(torch.outer(f[b] - mean[b], f[b] - mean[b]) for f in each)
        assert_close(belief.cov[b], total / (samples - 1))
    flat = (each - mean).reshape(samples, 10)
    assert_close(posterior.functions(NEW, joint=True).cov.reshape(10, 10), flat.T @ flat / (samples - 1))
    assert float(belief.variance.min()) > 0


def test_the_noise_is_the_residual_of_the_mean() -> None:
    posterior = fitted(net(), learning_rate=0.05)
    mean = posterior.functions(X).mean
    assert_close(posterior.likelihood.dispersion, (mean - Y).square().mean())
    assert float((posterior.likelihood.dispersion - (net()(X) - Y).square().mean()).detach().abs()) > 1e-4
    kept = fitted(net(), lw.Gaussian(noise_std=0.3))
    assert_close(kept.predict(NEW).std, (kept.functions(NEW).variance + 0.09).sqrt())


# What moves and what does not


@pytest.mark.parametrize("weights", ["last_layer", lw.named("0"), lw.subnetwork(torch.tensor([1, 7, 30, 49]))])
def test_only_the_chosen_weights_move(weights: Any) -> None:
    """The outputs are those of networks in which nothing else has moved; SGD of these weights alone is the measure."""
    model = net()
    posterior = fitted(model, weights=weights, weight_decay=0.1)
    selection = posterior.network.selection
    every = dict(model.named_parameters())
    for sample, f in zip(posterior.weight_samples(3), posterior.function_samples(NEW, 3), strict=True):
        moved = copy.deepcopy(model)
        tensors = dict(moved.named_parameters())
        for name, step in selection.split(sample - posterior.network.theta()).items():
            tensors[name].data = every[name].detach() + step
        assert_close(f, moved(NEW).detach())
        still = [name for name in every if name not in selection.names]
        assert all(torch.equal(tensors[name], every[name]) for name in still)
    assert float(posterior.posterior.variance.min()) > 0
    assert len(posterior.posterior.mean) == selection.size


# Networks and likelihoods


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind_of_network(case: Case) -> None:
    model = case.build()
    method = lw.baselines.SWAG(3, 2, learning_rate=1e-3, batch_size=2, samples=3)

    def run() -> lw.Fitted:
        return problems.fit(case, method, model=model)

    found = problems.unchanged(model, run)
    inputs = case.batch(3, seed=1)
    seeded = lambda: torch.Generator().manual_seed(0)
    assert_close(found.function_samples(inputs, 2, seeded()), found.network_samples(inputs, 2, seeded()))
    assert float(found.functions(inputs).variance.max()) > 0


def test_an_embedding_with_sparse_gradients() -> None:
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 7, (12, 4), generator=gen), torch.randint(0, 3, (12,), generator=gen)
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 5, sparse=sparse), nn.Flatten(), nn.Linear(20, 3)).double()
        found.append(lw.fit(model, [(x, y)], "classification", method=swag(batch_size=4)).functions(x).cov)
    assert_close(found[0], found[1])


LIKELIHOODS: dict[str, tuple[Any, Tensor]] = {
    "classes": ("classification", C), "labels": (lw.Bernoulli(), torch.stack([C, 1 - C], 1)),
    "counts": ("poisson", torch.stack([C, 2 - C], 1)), "both": (lw.HeteroscedasticGaussian(), Y[:, :1]),
    "each": (lw.Gaussian(per_output=True), Y), "tempered": (lw.Categorical(temperature=2.0), C),
}  # fmt: skip


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_likelihood(name: str) -> None:
    likelihood, y = LIKELIHOODS[name]
    posterior = fitted(net(), likelihood, y, learning_rate=None)
    assert float(posterior.functions(NEW).variance.min()) > 0
    assert bool(torch.isfinite(posterior.predict(NEW).log_prob(posterior.predict(NEW).sample(1)[0])).all())


# The rate


def passes(model: nn.Module, batches: list[tuple[Tensor, Tensor]], rate: float) -> Tensor:
    """The mean loss of every pass of eight mini-batches, by PyTorch's own SGD."""
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for x, y in batches:
        optimiser.zero_grad()
        loss = 0.5 * (model(x) - y).square().sum(1).mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).reshape(-1, 8).mean(1)


def test_the_rate_that_is_chosen_is_the_largest_that_stays_near() -> None:
    gen = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(40, 4, dtype=D, generator=gen)
    y = x @ torch.randn(4, 2, dtype=D, generator=gen) + 0.3 * torch.randn(40, 2, dtype=D, generator=gen)
    model = nn.Sequential(nn.Linear(4, 2)).double()
    model[0].weight.data = torch.linalg.lstsq(x, y).solution.T.contiguous()
    model[0].bias.data.zero_()
    spy = Spy(model).eval()
    posterior = lw.fit(spy, [(x, y)], "regression", method=lw.baselines.SWAG(snapshots=8, rank=4, batch_size=5))
    rate = posterior.posterior.learning_rate
    assert rate in [0.1 / 2**k for k in range(1, 12)]
    same = lw.fit(model, [(x, y)], "regression", method=lw.baselines.SWAG(8, 4, learning_rate=rate, batch_size=5))
    assert_close(same.functions(x).cov, posterior.functions(x).cov)
    seen = [(each, y[(each[:, None] == x).all(2).double().argmax(1)]) for each in list(spy.seen)[-64:]]
    noise = (model(x) - y).square().mean().detach()  # the dispersion, and for two outputs the mean loss
    assert float(passes(model, seen, rate).max()) <= 1.1 * float(noise)
    assert not float(passes(model, seen, 2 * rate).max()) <= 1.1 * float(noise)


def test_a_rate_that_is_too_high() -> None:
    model = net()

    def run(rate: float) -> None:
        at = re.escape(f"{rate:g}")
        message = rf"went from 0\.\d+ to .* at learning_rate={at}; expected it to stay near\. Lower learning_rate"
        with pytest.raises(lw.errors.NumericalError, match=message):
            fitted(model, learning_rate=rate)

    for rate in (3.0, 1e200):  # far off, and no number
        problems.unchanged(model, lambda rate=rate: run(rate))


def test_a_strong_prior_raises_the_loss_and_not_the_objective() -> None:
    """Weights fall to zero, which is far from the data and no divergence."""
    model = net()
    problems.descend(model, lambda model: (model(X) - Y).square().mean(), 200, 0.05)
    start = 0.5 * (model(X) - Y).square().sum(1).mean().detach()
    assert float(start) < 0.1
    posterior = fitted(model, lw.Gaussian(noise_std=0.1), prior=1e4, learning_rate=1e-3, snapshots=100)
    assert posterior.posterior.statistics.loss / 11 > float(start) + 5 * max(float(start), 0.01)


def test_a_rate_that_cannot_be_found() -> None:
    with pytest.raises(
        lw.errors.NumericalError, match=r"even at a learning rate of 9\.5e-08; expected one at which it stays near"
    ):
        fitted(net(), learning_rate=None, weight_decay=1e12)


# What is refused


def test_one_mini_batch_has_no_noise() -> None:
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"all 11 data are one mini-batch of batch_size=11; .*Lower batch"
    ):
        fitted(net(), batch_size=11)


def test_a_prior_from_the_curvature() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"a g-prior follows the curvature, .*use isotropic\(\)"):
        fitted(net(), prior=lw.priors.g_prior())


def test_members_that_do_not_exist_are_refused() -> None:
    posterior = fitted(net())
    for call in (
        posterior.log_evidence,
        lambda: posterior.with_prior(1.0),
        lambda: posterior.variance_of(lambda w: w["3.bias"][0]),
    ):
        with pytest.raises(lw.errors.UnsupportedError, match=r"(SWAG|DrawnPosterior) has no"):
            call()
