"""A process with a kernel of its own around the network's outputs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.likelihoods.energies import energy
from lapwing.linalg.variational import Inducing
from lapwing.losses import Statistics
from lapwing.methods.fmgp import fmgp as module
from lapwing.methods.fmgp.features import last_layer_network
from lapwing.methods.fmgp.fmgp import Learning, State, Table
from lapwing.methods.fmgp.kernels import FreeKernel
from lapwing.methods.fmgp.posterior import FunctionPosterior, Sight
from lapwing.problem import Problem
from lapwing.registry import method_named
from tests import problems
from tests.cases import BY_NAME, CASES
from tests.tolerances import SOLVED, assert_close, assert_within
from tests.unit.methods import sine
from tests.unit.methods.sine import NOISE

D = torch.float64
MLP = BY_NAME["mlp"]


def curve(count: int = 60, seed: int = 0, place: float = 0.0) -> tuple[Tensor, Tensor]:
    return sine.curve(count, seed, place)


def model(place: float = 0.0) -> nn.Module:
    """Fitted to a sine."""
    found = sine.model(60)
    found[2].bias.data += place
    return found


def fitted(method: Any, likelihood: Any = "regression", **options: Any) -> lw.Fitted:
    data = options.pop("data", None) or [curve()]
    return lw.fit(options.pop("model", None) or model(), data, likelihood, method=method, **options)


@cache
def classes(count: int = 60, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Three clouds that overlap."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    places = torch.tensor([[1.5, 0.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=D)
    return places[y] + torch.randn(count, 2, dtype=D, generator=gen), y


@cache
def confident() -> nn.Module:
    """Trained on few data until it is sure of them."""
    torch.manual_seed(0)
    network, (x, y) = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).double(), classes()
    optimiser = torch.optim.Adam(network.parameters(), 0.05)
    with torch.enable_grad():
        for _ in range(300):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimiser.step()
    network.zero_grad(set_to_none=True)
    return network


# Exact Gaussian process regression.


@pytest.mark.parametrize("kind", ["rbf", "features"])
def test_points_at_all_data_are_the_exact_process(kind: str) -> None:
    """With given kernel and noise, and what the points know in closed form: textbook covariances (M = n C)."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, new = torch.randn(8, 2, dtype=D), torch.randn(4, 2, dtype=D)
    noise = torch.tensor(0.3, dtype=D)
    problem = lw.fit(
        network, [(x, network(x).detach() + 1)], lw.Gaussian(), method=lw.baselines.MapOnly(), prior=1.0
    ).problem
    whole = problem.network
    sight = Sight(whole, last_layer_network(whole, x) if kind == "features" else None)
    lengths = torch.tensor([0.7, 1.3], dtype=D) if kind == "rbf" else torch.tensor([0.4], dtype=D)
    kernel = FreeKernel(kind, lengths.log(), torch.tensor([[1.2, 0.0], [0.9, 0.4]], dtype=D))
    seen, _ = sight(x)
    numbers = torch.tensor([0, 1]).repeat(8)
    points = seen.repeat_interleave(2, 0)
    state = State(kernel, points, numbers, torch.zeros(16, dtype=D), noise.log(), Inducing(torch.eye(16, dtype=D)))
    _, rows = state.whitened(Table(seen, seen, seen))
    flat = rows.flatten(0, 1)
    known = replace(state, inducing=state.inducing.updated(flat.T @ flat / noise, 1.0))
    found = module._finished(problem, sight, known, Statistics(0.0, 8, 2), ())
    joint = kernel.joint(torch.cat([seen, sight(new)[0]])).reshape(24, 24)
    expected = joint[16:, 16:] - joint[16:, :16] @ torch.linalg.solve(
        joint[:16, :16] + noise * torch.eye(16, dtype=D), joint[:16, 16:]
    )
    assert_close(found(new, joint=True).cov.reshape(8, 8), expected, 0.25)  # but for what keeps a kernel definite
    assert_close(found(new).mean, network(new))
    assert float(found.problem.likelihood.dispersion) == pytest.approx(0.3)


# What is learned.


@cache
def learned() -> lw.Fitted:
    return fitted(lw.FMGP(20, steps=250))


def test_far_from_the_data_the_variance_is_the_priors() -> None:
    found = learned()
    x, _ = curve()
    prior = float(found.posterior.kernel.outputs[0, 0])
    far = torch.tensor([[-1e3], [1e3]], dtype=D)
    assert_close(found.functions(far).variance, torch.full((2, 1), prior, dtype=D))
    assert float(found.functions(x).variance.mean()) < 0.15 * prior
    assert_close(found.functions(x).mean, model()(x))


def test_features_grow_without_end() -> None:
    """Linear in what the last layer sees: no bound where that has none."""
    network = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x = torch.linspace(-1, 1, 30, dtype=D)[:, None]
    found = lw.fit(network, [(x, x.sin())], "regression", method=lw.FMGP(8, kernel="features", steps=50))
    near, far = (float(found.functions(scale * torch.ones(1, 1, dtype=D)).variance) for scale in (1.0, 1e3))
    assert far > 1e3 * near


def test_held_out_regression_is_better_than_the_plain_network() -> None:
    """Which knows of no doubt beyond its data."""
    gen = torch.Generator().manual_seed(5)
    x = 8 * torch.rand(200, 1, dtype=D, generator=gen) - 4
    y = (2 * x).sin() + NOISE * torch.randn(200, 1, dtype=D, generator=gen)
    found, plain = learned(), fitted(lw.baselines.MapOnly())
    score = [float(p.predict(x).log_prob(y).mean()) for p in (found, plain)]
    assert score[0] > score[1] + 0.5
    inside = (x.abs() < 2)[:, 0]
    near = [float(p.predict(x[inside]).log_prob(y[inside]).mean()) for p in (found, plain)]
    assert near[0] > near[1] - 0.05


@pytest.mark.parametrize("kernel", [None, "features", "rbf"])
def test_held_out_classes_are_better_than_the_plain_network(kernel: str | None) -> None:
    x, y = classes(300, 7)
    found = lw.fit(confident(), [classes()], "classification", method=lw.FMGP(20, kernel=kernel, steps=120))
    plain = lw.fit(confident(), [classes()], "classification", method=lw.baselines.MapOnly())
    assert found.posterior.kernel.kind == (kernel or "features")
    assert float(found.predict(x).log_prob(y).mean()) > float(plain.predict(x).log_prob(y).mean())
    assert_close(found.functions(x).mean, plain.functions(x).mean)


@pytest.mark.parametrize("likelihood", [lw.Bernoulli(), lw.Poisson()], ids=["labels", "counts"])
def test_other_likelihoods(likelihood: Any) -> None:
    x, _ = classes()
    targets = (x[:, :1] + torch.arange(3) > 0).double()
    found = lw.fit(confident(), [(x, targets)], likelihood, method=lw.FMGP(9, steps=40))
    plain = lw.fit(confident(), [(x, targets)], likelihood, method=lw.baselines.MapOnly())
    assert float(found.predict(x).log_prob(targets).mean()) > float(plain.predict(x).log_prob(targets).mean())


def test_a_noise_for_each_output() -> None:
    """Their ratios are those of the residuals; what they share starts there and is learned."""
    x, _ = classes()
    stds = torch.tensor([0.1, 1.0, 4.0], dtype=D)
    with torch.no_grad():
        f = confident()(x)
    y = f + stds * torch.randn(60, 3, dtype=D, generator=torch.Generator().manual_seed(1))
    found = lw.fit(confident(), [(x, y)], lw.Gaussian(per_output=True), method=lw.FMGP(9, steps=40))
    residual = (f - y).square().mean(0)
    noise = found.likelihood.noise_variance
    assert_close(noise / noise.sum(), residual / residual.sum())
    assert found.trace is not None
    assert found.trace.steps[0].noise[0] == pytest.approx(1.0, rel=0.05)
    assert float(noise[1]) != pytest.approx(float(residual[1]), rel=1e-3)


def test_the_objective_rises() -> None:
    found = fitted(lw.FMGP(10, steps=200))
    assert found.trace is not None
    scores = torch.tensor([step.score for step in found.trace.steps], dtype=D)
    assert (found.trace.tuner, found.trace.score, len(scores)) == ("FMGP", "objective", 200)
    assert float(scores[-20:].mean()) > float(scores[:20].mean())


def test_the_noise_is_learned_or_kept() -> None:
    free, given = fitted(lw.FMGP(10, steps=50)), fitted(lw.FMGP(10, steps=50), lw.Gaussian(noise_std=0.7))
    residual = (model()(curve()[0]) - curve()[1]).detach().square().mean()
    assert float(free.likelihood.dispersion) != pytest.approx(float(residual), rel=1e-3)
    assert free.trace is not None
    assert free.trace.steps[0].noise[0] == pytest.approx(float(residual), rel=0.05)
    assert float(given.likelihood.dispersion) == pytest.approx(0.49)
    assert given.trace is not None
    assert given.trace.steps[-1].noise == ()


@pytest.mark.parametrize("likelihood", [lw.Gaussian(), lw.Gaussian(noise_std=NOISE)], ids=["learned", "given"])
def test_where_the_targets_lie_does_not_matter(likelihood: Any) -> None:
    """The second process starts from the mean of the outputs, whether or not the noise is given."""
    x = torch.linspace(-4, 4, 9, dtype=D)[:, None]
    one = fitted(lw.FMGP(10, steps=50), likelihood).functions(x)
    moved = fitted(lw.FMGP(10, steps=50), likelihood, model=model(100.0), data=[curve(place=100.0)]).functions(x)
    assert_close(moved.cov, one.cov, 0.35)


# The state that is kept.


class Columns(nn.Module):
    """The sine in the first column, in whatever units; others are not looked at."""

    def __init__(self, size: float, place: float) -> None:
        super().__init__()
        self.inner, self.size, self.place = model(), size, place

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner((x[:, :1] - self.place) / self.size)
        return found


@pytest.mark.parametrize(("size", "place"), [(1e-4, 0.0), (1e4, 0.0), (1.0, 1e6)])
def test_the_units_of_an_input_do_not_matter(size: float, place: float) -> None:
    """Nor do those of one matter to what is learned about another."""
    x, y = curve()
    other = torch.randn(60, 1, dtype=D, generator=torch.Generator().manual_seed(3))
    found = []
    for unit, zero in ((1.0, 0.0), (size, place)):
        inputs = torch.cat([unit * x + zero, other], 1)
        method = lw.FMGP(10, steps=20)
        found.append(lw.fit(Columns(unit, zero), [(inputs, y)], "regression", method=method).functions(inputs).cov)
    assert float((found[1] - found[0]).abs().max()) < 1e-4 * float(found[0].abs().max())


class Scaled(nn.Module):
    """The sine in other units."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.inner, self.unit = model(), unit

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.unit * self.inner(x)
        return found


@pytest.mark.parametrize("unit", [1e-8, 1e-4, 1e4])
def test_the_units_of_the_targets_do_not_matter(unit: float) -> None:
    (x, y), q = curve(), torch.linspace(-4, 4, 9, dtype=D)[:, None]
    fit = lambda u: lw.fit(Scaled(u), [(x, u * y)], "regression", method=lw.FMGP(10, steps=30))
    one, other = fit(1.0), fit(unit)
    assert_close(other.functions(q).cov / unit**2, one.functions(q).cov, 0.35)
    assert_close(other.likelihood.dispersion / unit**2, one.likelihood.dispersion, 0.35)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e3])
def test_an_output_that_is_constant_has_the_scale_of_its_targets(unit: float) -> None:
    y = unit * curve()[1]
    spread = float(y.std(correction=0))
    constant = torch.full((60, 1), 0.1 * unit, dtype=D)
    assert float(module.scale(lw.Gaussian(), Table(y, constant, y))) == pytest.approx(spread)
    assert float(module.scale(lw.Gaussian(), Table(y, 0.3 * y, y))) == pytest.approx(0.3 * spread)
    assert float(module.scale(lw.Gaussian(), Table(y, 0.3 * y, constant))) == pytest.approx(0.3 * spread)
    assert float(module.scale(lw.Gaussian(), Table(y, constant, constant))) == 1
    assert float(module.scale(lw.Poisson(), Table(y, 0.3 * y / unit, 1e6 * y))) == pytest.approx(0.3 * spread / unit)


@pytest.mark.parametrize("value", [0.3, math.pi, 1e5 + 0.1])
def test_nor_is_one_whose_mean_is_rounded(value: float) -> None:
    """Or that is constant but for rounding; no length is learned for it."""
    x, y = curve()
    fit = lambda c: lw.fit(
        Columns(1.0, 0.0), [(torch.cat([x, c.expand_as(x)], 1), y)], "regression", method=lw.FMGP(10, steps=200)
    )
    rounded = torch.full((60, 1), value, dtype=D)
    rounded[::2] *= 1 + 1e-13
    kernels = [
        fit(c).posterior.kernel for c in (torch.zeros(60, 1, dtype=D), torch.full((1,), value, dtype=D), rounded)
    ]
    for kernel in kernels[1:]:
        assert_close(kernel.log_lengths, kernels[0].log_lengths, SOLVED)


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_a_constant_input_is_no_hindrance(value: float) -> None:
    """The points stay on it, and the variance is small among the data and large away from them, as without it."""
    x, y = curve()
    wide = lambda t: torch.cat([t, torch.full_like(t, value)], 1)
    found = lw.fit(Columns(1.0, 0.0), [(wide(x), y)], "regression", method=lw.FMGP(20))
    assert torch.equal(found.posterior.points[:, 1], torch.full((20,), value, dtype=D))
    among, away = (found.functions(wide(torch.tensor([[t]], dtype=D))).variance for t in (0.0, 20.0))
    assert float(away) > 5 * float(among)


def kept(monkeypatch: pytest.MonkeyPatch) -> list[State]:
    states: list[State] = []
    original = module._finished

    def noted(problem: Problem, sight: Sight, state: State, *rest: Any) -> FunctionPosterior:
        states.append(state)
        return original(problem, sight, state, *rest)

    monkeypatch.setattr(module, "_finished", noted)
    return states


@pytest.mark.parametrize("count", [10, 60])
@pytest.mark.parametrize("kernel", ["rbf", "features"])
def test_the_posterior_is_the_state_that_was_learned(kernel: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However near to singular the kernel of the points is."""
    states = kept(monkeypatch)
    found = fitted(lw.FMGP(count, kernel=kernel, steps=40))
    x = torch.linspace(-5, 5, 21, dtype=D)[:, None]
    seen, f = found.posterior.sight(x)
    with torch.no_grad():
        before, rows = states[0].whitened(Table(seen, f, f))
        expected = states[0].inducing.left(before, rows)
    assert_close(found.functions(x).cov, expected, SOLVED)
    joint = found.functions(x, joint=True).cov.reshape(21, 21)
    assert float(torch.linalg.eigvalsh(joint).min()) > -1e-8 * float(joint.diagonal().max())


def test_steps_on_the_covariance_end_where_the_objective_is_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes count: 2 KL less the energies of the one with the network's mean and the one with its own."""
    x, y = curve()
    with torch.no_grad():
        table = Table(x, model()(x), y)
    monkeypatch.setattr(module, "uniform", lambda shape, *_: (torch.arange(shape[0], dtype=D) + 0.5) / shape[0])
    likelihood = lw.Gaussian(noise_std=2.0)
    method = lw.FMGP(6, batch_size=60)
    learning = Learning.of(method, likelihood, "rbf", table, None, torch.Generator().manual_seed(0))
    still = torch.optim.SGD(learning.state.free, lr=0.0)
    for _ in range(80):
        learning._step(still, 0.3)
    state = learning.state
    precision = state.inducing.precision.clone().requires_grad_()
    before, rows = (t.detach() for t in state.whitened(learning.table))
    cov = Inducing(precision).left(before, rows)
    energies = sum(energy(likelihood, 1.0, mean, cov, y).sum() for mean in (table.f, learning.shift.expand(60, 1)))
    divergence = 2 * Inducing(precision).divergence()
    parts = [torch.autograd.grad(part, precision, retain_graph=True)[0] for part in (divergence, energies)]
    assert float(parts[0].abs().max()) > 1e-3
    assert_close(parts[0], parts[1], SOLVED)


@pytest.mark.parametrize(("gap", "first"), [(3.0, False), (0.0, True)])
def test_the_best_state_on_validation_data_is_kept(gap: float, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training data leave much unexplained; validation data at the outputs like no state as much as the first."""
    looks: list[float] = []
    original = Learning._held_out

    def noted(self: Learning) -> float:
        looks.append(original(self))
        return looks[-1]

    monkeypatch.setattr(Learning, "_held_out", noted)
    (x, _), gen = curve(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        f = model()(x)
    held = [(x[::2], f[::2] + gap * torch.randn(30, 1, dtype=D, generator=gen).sign())]
    far = f + 3 * torch.randn(60, 1, dtype=D, generator=gen).sign()
    method = lw.FMGP(10, steps=100, learning_rate=0.05, validation=held, patience=3)
    found = fitted(method, lw.Gaussian(noise_std=0.5), data=[(x, far)])
    score = float(found.predict(held[0][0]).log_prob(held[0][1]).mean())
    assert score == pytest.approx(max(looks), abs=1e-8)
    assert found.trace is not None
    if first:
        assert looks.index(max(looks)) == 0
        assert len(looks) == 7  # after 1, 2 and 4 steps, the first after that, and three that try its patience
        assert len(found.trace.steps) == 20
    else:
        assert looks.index(max(looks)) > 5
        assert score > looks[0] + 0.5


@pytest.mark.parametrize("likelihood", ["labels", "classes"])
def test_ignored_validation_targets_are_refused(likelihood: str) -> None:
    """They would be scored as if they were known."""
    x, y = classes()
    targets = (x[:, :1] + torch.arange(3) > 0).double() if likelihood == "labels" else y
    chosen = lw.Bernoulli(ignore_index=-1) if likelihood == "labels" else lw.Categorical(ignore_index=-1)
    held = targets.clone()
    held[4] = -1
    with pytest.raises(lw.errors.DataError, match="some validation targets are ignored ones"):
        lw.fit(confident(), [(x, targets)], chosen, method=lw.FMGP(6, steps=3, validation=[(x, held)]))


@pytest.mark.parametrize("likelihood", [lw.Categorical(class_weights=(3.0, 1.0, 1.0)), lw.Categorical(temperature=0.1)])
def test_weights_that_would_have_no_say_are_refused(likelihood: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"of Categorical is .* Use VaLLA\(alpha=0\)"):
        lw.fit(confident(), [classes()], likelihood, method=lw.FMGP(6, steps=3))


# What it costs.


def test_the_network_runs_once_over_the_data() -> None:
    """Steps do without it, however many there are."""
    counts = []
    for steps in (3, 50):
        seen, network = [0], model()
        network.register_forward_pre_hook(lambda _, args, seen=seen: seen.__setitem__(0, seen[0] + len(args[0])))
        fitted(lw.FMGP(10, steps=steps), model=network)
        counts.append(seen[0])
    before, network = [0], model()
    network.register_forward_pre_hook(lambda _, args: before.__setitem__(0, before[0] + len(args[0])))
    fitted(lw.baselines.MapOnly(), model=network)  # one pass too
    assert counts[0] == counts[1] == before[0]


# The same as for every method.


def test_joint_beliefs_and_samples(generator: torch.Generator) -> None:
    """Outputs that hang together in a lopsided way: draws have L Lᵀ, which is far from Lᵀ L."""
    x, y = classes()
    plain = lw.fit(confident(), [(x, y)], "classification", method=lw.FMGP(6, steps=5))
    mixing = torch.tensor([[3.0, 0.0, 0.0], [2.5, 0.1, 0.0], [0.0, 0.3, 0.2]], dtype=D)
    kernel = FreeKernel(plain.posterior.kernel.kind, plain.posterior.kernel.log_lengths, mixing)
    posterior = replace(plain.posterior, kernel=kernel, mix=1e-3 * plain.posterior.mix)
    found = lw.Fitted(posterior, plain.fingerprint)
    joint, own = found.functions(x[:2], joint=True), found.functions(x[:2])
    whole = joint.cov.reshape(6, 6)
    assert_close(torch.stack([whole[:3, :3], whole[3:, 3:]]), own.cov)
    assert_close(joint.variance, own.variance)
    root = torch.linalg.cholesky(own.cov)
    assert float((root.mT @ root - own.cov).abs().max()) > 0.5 * float(own.cov.abs().max())
    gap = (found.function_samples(x[:2], 3000, generator) - joint.mean).flatten(1)
    assert_within(gap[:, :, None] * gap[:, None, :], whole)
    apart = own.sample(3000, generator) - own.mean
    assert_within(apart[..., :, None] * apart[..., None, :], own.cov)


@pytest.mark.parametrize("kernel", ["rbf", "features"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_files(kernel: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x, y = (t.to(dtype) if t.is_floating_point() else t for t in classes())
    network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    network.load_state_dict(confident().state_dict())
    found = lw.fit(network, [(x, y)], "classification", method=lw.FMGP(9, kernel=kernel, steps=10))
    problems.unchanged(network, lambda: found.save(tmp_path / "it"))
    again = lw.load(tmp_path / "it", network)
    assert torch.equal(again.predict(x).probs, found.predict(x).probs)
    assert torch.equal(again.functions(x, joint=True).cov, found.functions(x, joint=True).cov)
    draws = [p.function_samples(x, 3, torch.Generator().manual_seed(1)) for p in (found, again)]
    assert torch.equal(*draws)
    other = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    with pytest.raises(lw.errors.FileError, match="belongs to another model"):
        lw.load(tmp_path / "it", other)


def test_float32() -> None:
    data = [tuple(t.float() for t in curve())]
    found = fitted(lw.FMGP(10, steps=30), model=model().float(), data=data)
    x = torch.linspace(-3, 3, 9)[:, None]
    assert found.functions(x).cov.dtype == torch.float32
    wide = fitted(lw.FMGP(10, steps=30), model=model().float().double(), data=[tuple(t.double() for t in data[0])])
    assert_close(found.functions(x).cov, wide.functions(x.double()).cov, 0.35)


def test_the_generator_decides() -> None:
    x = torch.linspace(-3, 3, 9, dtype=D)[:, None]
    fit = lambda seed: fitted(lw.FMGP(6, steps=10, batch_size=7), generator=torch.Generator().manual_seed(seed))
    one, two, other = (fit(seed).functions(x).cov for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    plain = [fitted(lw.FMGP(6, steps=10, batch_size=7)).functions(x).cov for _ in range(2)]
    assert torch.equal(*plain)


def test_many_outputs_build_the_covariance_only_when_asked() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 37)).double()
    x, y = torch.randn(40, 3, dtype=D), torch.randint(0, 37, (40,))
    found = lw.fit(network, [(x, y)], "classification", method=lw.FMGP(20, steps=5))
    variance, cov = found.functions(x).variance, found.functions(x).cov
    assert cov.shape == (40, 37, 37)
    assert_close(variance, cov.diagonal(dim1=1, dim2=2))
    assert not variance.requires_grad


@pytest.mark.parametrize("count", [1, 1000])
def test_few_data_and_many_points(count: int) -> None:
    """No more points than data; one datum is enough."""
    x, y = curve()
    for size in (1, 5):
        found = fitted(lw.FMGP(count, steps=5), lw.Gaussian(noise_std=0.3), data=[(x[:size], y[:size])])
        assert len(found.posterior.points) == min(count, size)
        assert bool(torch.isfinite(found.functions(x).cov).all())


FLAT = {"features": (2, 8, 2.0), "one feature": (1, 1, 2.0), "large": (1, 1, 2000.0), "noughts": (1, 1, 0.0)}


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("count", [1, 20])
def test_features_without_spread_have_a_unit(kind: str, count: int) -> None:
    """One datum, or the same again and again: error bars of the targets' own size, and not hundreds of times that."""
    torch.manual_seed(0)
    inputs, width, value = FLAT[kind]
    last = nn.Linear(width, 1)
    network = (last if width == 1 else nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), last)).double()
    x, y = torch.full((count, inputs), value, dtype=D), torch.randn(count, 1, dtype=D)
    method, noise = lw.FMGP(20, kernel="features", steps=100), lw.Gaussian(noise_std=0.1)
    found = lw.fit(network, [(x, y)], noise, method=method)
    assert float(found.functions(x[:1]).std) < 3


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_surroundings_without_gradients(around: Any) -> None:
    x = torch.linspace(-3, 3, 5, dtype=D)[:, None]
    expected, network, data = fitted(lw.FMGP(6, steps=5)).functions(x).cov, model(), [curve()]
    with around():
        found = fitted(lw.FMGP(6, steps=5), model=network, data=data).functions(x).cov
    assert_close(found, expected)


ODD = ("conv1d", "sdpa", "tied", "free_parameter", "token_level")  # no features, see the tests of those


@pytest.mark.parametrize("case", [case.name for case in CASES if case.name not in ODD])
def test_the_model_is_left_as_it_was(case: str) -> None:
    chosen = BY_NAME[case]
    network = chosen.build()
    method = lw.FMGP(4, kernel="features", steps=3)

    def run() -> None:
        found = lw.fit(network, problems.batches(chosen), problems.likelihood(chosen), method=method)
        found.functions(chosen.batch(3, seed=1), joint=True)
        found.function_samples(chosen.batch(3, seed=1), 2)
        found.predict(chosen.batch(3, seed=1))

    problems.unchanged(network, run)


def test_progress_shows_the_objective(capsys: pytest.CaptureFixture[str]) -> None:
    loud = fitted(lw.FMGP(6, steps=5), progress=True)
    assert "fixed-mean process" in capsys.readouterr().err
    quiet = fitted(lw.FMGP(6, steps=5), progress=False)
    assert capsys.readouterr().err == ""
    assert torch.equal(loud.functions(curve()[0]).cov, quiet.functions(curve()[0]).cov)


def test_the_prior_over_weights_has_no_say() -> None:
    x = curve()[0]
    one, other = (fitted(lw.FMGP(6, steps=5), prior=prior).functions(x).cov for prior in (None, 30.0))
    assert torch.equal(one, other)


# Refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_inducing": 0}, "num_inducing is 0; expected at least 1"),
        ({"num_inducing": True}, "num_inducing is True; expected an integer"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"steps": 3.5}, "steps is 3.5; expected an integer"),
        ({"batch_size": 2.5}, "batch_size is 2.5; expected an integer"),
        ({"learning_rate": math.inf}, "learning_rate is inf; expected a positive, finite number"),
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"patience": 0}, "patience is 0; expected at least 1"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0; expected a positive number"),
        ({"learning_rate": math.nan}, "learning_rate is nan; expected a positive number"),
        ({"kernel": "matern"}, "kernel is 'matern'; expected one of rbf, features"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        lw.FMGP(**settings)


def test_tokens_are_refused() -> None:
    case = BY_NAME["token_level"]
    with pytest.raises(lw.errors.UnsupportedError, match=r"FMGP\(\) takes outputs \(B, C\), not tokens \(B, T, C\)"):
        lw.fit(case.build(), problems.batches(case), "classification", method=lw.FMGP())


@pytest.mark.parametrize("name", ["embedding", "tuple_input"])
def test_distances_need_numbers(name: str) -> None:
    case = BY_NAME[name]
    with pytest.raises(
        lw.errors.UnsupportedError, match="needs inputs that are one tensor of real numbers; use kernel='features'"
    ):
        lw.fit(case.build(), problems.batches(case), "classification", method=lw.FMGP(kernel="rbf"))


def test_draws_and_ignored_targets_are_refused() -> None:
    x, y = classes()
    with pytest.raises(lw.errors.UnsupportedError, match="no gradient to learn by"):
        lw.fit(confident(), [(x, y)], lw.Categorical(link="mc"), method=lw.FMGP())
    some = y.clone()
    some[3] = -100
    with pytest.raises(lw.errors.DataError, match="some targets are ignored ones"):
        lw.fit(confident(), [(x, some)], "classification", method=lw.FMGP(steps=3))


def test_an_objective_that_runs_away() -> None:
    with pytest.raises(lw.errors.NumericalError, match=r"FMGP: the objective is \S+ at step \d+.* Lower learning_rate"):
        fitted(lw.FMGP(6, learning_rate=1e6, steps=100))


def test_it_is_no_laplace_posterior() -> None:
    """No weights, no evidence, no prior over weights: each is refused in words."""
    found = fitted(lw.FMGP(6, steps=5))
    x = curve()[0]
    for ask in (
        found.log_evidence, found.effective_parameters, found.tuned, lambda: found.tuned(lw.tuners.FixedPoint()),
        lambda: found.tuned(lw.tuners.Grid([curve()])),
        lambda: found.weight_samples(2), lambda: found.network_samples(x, 2),
        lambda: found.with_prior(2.0),
    ):  # fmt: skip
        with pytest.raises(lw.errors.UnsupportedError, match=r"(FMGP|FunctionPosterior) has no"):
            ask()


def test_the_methods_name() -> None:
    assert method_named("fmgp") == lw.FMGP()


def test_samples_without_a_batch_are_refused() -> None:
    x = torch.randn(30, 3)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    data = torch.utils.data.TensorDataset(x, x[:, :1])
    with pytest.raises(lw.errors.DataError, match="3 inputs with 1 targets"):
        lw.fit(network, data, "regression", method=lw.FMGP(5, steps=3))
    with pytest.raises(lw.errors.DataError, match="3 inputs with 1 targets"):
        lw.fit(network, [(x, x[:, :1])], "regression", method=lw.FMGP(5, steps=3, validation=data))


def test_inputs_of_another_size_are_refused() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 1))
    small, large = (torch.randn(10, 1, n, n) for n in (6, 8))
    y = torch.randn(10, 1)
    with pytest.raises(lw.errors.DataError, match="inputs of 36 and of 64 numbers; expected as many in all"):
        lw.fit(network, [(small, y), (large, y)], "regression", method=lw.FMGP(5, steps=3))
    found = lw.fit(network, [(small, y)], "regression", method=lw.FMGP(5, steps=3))
    with pytest.raises(lw.errors.DataError, match="inputs of 64 numbers; the kernel was learned on 36"):
        found.functions(large)


def test_data_that_ask_for_gradients() -> None:
    x, y = curve()
    method = lw.FMGP(5, steps=20)
    expected = lw.fit(model(), [(x, y)], "regression", method=method).functions(x).std
    free = [(x.clone().requires_grad_(), y.clone().requires_grad_())]
    assert torch.equal(lw.fit(model(), free, "regression", method=method).functions(x).std, expected)
