"""FMGP: a Gaussian process on the features of a network, with its table of neighbours."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.likelihoods.base import energy
from lapwing.linalg.stochastic import Inducing
from lapwing.methods import fmgp as function_space
from lapwing.methods.fmgp import (
    KERNELS,
    FreeKernel,
    FunctionPosterior,
    KernelState,
    Learning,
    Sight,
    _initial_lengths,
    features,
    last_layer_network,
    output_scale,
)
from lapwing.networks.network import Network
from lapwing.problem import FeatureTable, Problem, Statistics
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense
from tests.tolerances import SOLVED, assert_close, assert_within
from tests.unit.methods import sine
from tests.unit.methods.sine import NOISE

# Settings and predictions of the fixed-mean process.

D = torch.float64


def curve(place: float = 0.0) -> tuple[Tensor, Tensor]:
    return sine.curve(60, place=place)


def model(place: float = 0.0) -> nn.Module:
    """Return a network fitted to a sine."""
    network = sine.model(60)
    network[2].bias.data += place
    return network


def fitted(method: Any, likelihood: Any = "regression", prior: Any = None, **options: Any) -> lw.Fitted:
    """Return the posterior of a method; with validation data the one that the mixture varies."""
    return sine.fitted(method, likelihood, prior, **{"data": [curve()], "model": model(), **options})


@cache
def classes(count: int = 60, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return data of three overlapping classes."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    places = torch.tensor([[1.5, 0.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=D)
    return places[y] + torch.randn(count, 2, dtype=D, generator=gen), y


@cache
def confident() -> nn.Module:
    """Return a classifier that was trained on few data until its probabilities are near one."""
    torch.manual_seed(0)
    network, (x, y) = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).double(), classes()
    problems.descend(network, lambda network: nn.functional.cross_entropy(network(x), y), 300, 0.05)
    return network


@cache
def learned() -> lw.Fitted:
    return fitted(lw.FMGP(20, steps=250))


def test_far_from_the_data_the_variance_is_the_priors() -> None:
    posterior = learned()
    x, _ = curve()
    prior = float(posterior.posterior.kernel.outputs[0, 0])
    far = torch.tensor([[-1e3], [1e3]], dtype=D)
    assert_close(posterior.functions(far).variance, torch.full((2, 1), prior, dtype=D))
    assert float(posterior.functions(x).variance.mean()) < 0.15 * prior
    assert_close(posterior.functions(x).mean, model()(x))


def test_features_grow_without_end() -> None:
    """Linear in what the last layer sees: no bound where that has none."""
    network = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x = torch.linspace(-1, 1, 30, dtype=D)[:, None]
    posterior = lw.fit(network, [(x, x.sin())], "regression", method=lw.FMGP(8, kernel="features", steps=50))
    near, far = (float(posterior.functions(scale * torch.ones(1, 1, dtype=D)).variance) for scale in (1.0, 1e3))
    assert far > 1e3 * near


def test_held_out_regression_is_better_than_the_plain_network() -> None:
    """Which knows of no doubt beyond its data."""
    gen = torch.Generator().manual_seed(5)
    x = 8 * torch.rand(200, 1, dtype=D, generator=gen) - 4
    y = (2 * x).sin() + NOISE * torch.randn(200, 1, dtype=D, generator=gen)
    posterior, plain = learned(), fitted(lw.baselines.MapOnly())
    score = [float(p.predict(x).log_prob(y).mean()) for p in (posterior, plain)]
    assert score[0] > score[1] + 0.5
    inside = (x.abs() < 2)[:, 0]
    near = [float(p.predict(x[inside]).log_prob(y[inside]).mean()) for p in (posterior, plain)]
    assert near[0] > near[1] - 0.05


@pytest.mark.parametrize("kernel", [None, "rbf"])
def test_held_out_classes_are_better_than_the_plain_network(kernel: str | None) -> None:
    x, y = classes(300, 7)
    posterior = lw.fit(confident(), [classes()], "classification", method=lw.FMGP(20, kernel=kernel, steps=120))
    plain = lw.fit(confident(), [classes()], "classification", method=lw.baselines.MapOnly())
    assert posterior.posterior.kernel.kind == (kernel or "features")
    assert float(posterior.predict(x).log_prob(y).mean()) > float(plain.predict(x).log_prob(y).mean())
    assert_close(posterior.functions(x).mean, plain.functions(x).mean)


@pytest.mark.parametrize("likelihood", [lw.Bernoulli(), lw.Poisson()], ids=["labels", "counts"])
def test_other_likelihoods(likelihood: Any) -> None:
    x, _ = classes()
    targets = (x[:, :1] + torch.arange(3) > 0).double()
    posterior = lw.fit(confident(), [(x, targets)], likelihood, method=lw.FMGP(9, steps=40))
    plain = lw.fit(confident(), [(x, targets)], likelihood, method=lw.baselines.MapOnly())
    assert float(posterior.predict(x).log_prob(targets).mean()) > float(plain.predict(x).log_prob(targets).mean())


@pytest.mark.parametrize("likelihood", [lw.Categorical(class_weights=(3.0, 1.0, 1.0)), lw.Categorical(temperature=0.1)])
def test_weights_that_would_not_matter_are_refused(likelihood: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"of Categorical is .* Use VaLLA\(alpha=0\)"):
        lw.fit(confident(), [classes()], likelihood, method=lw.FMGP(6, steps=3))


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


@pytest.mark.parametrize("count", [1, 1000])
def test_few_data_and_many_points(count: int) -> None:
    """No more points than data; one datum is enough."""
    x, y = curve()
    for size in (1, 5):
        posterior = fitted(lw.FMGP(count, steps=5), lw.Gaussian(noise_std=0.3), data=[(x[:size], y[:size])])
        assert len(posterior.posterior.points) == min(count, size)
        assert bool(torch.isfinite(posterior.functions(x).cov).all())


def test_the_prior_over_weights_does_not_matter() -> None:
    x = curve()[0]
    one, other = (fitted(lw.FMGP(6, steps=5), prior=prior).functions(x).cov for prior in (None, 30.0))
    assert torch.equal(one, other)


def test_tokens_are_refused() -> None:
    case = BY_NAME["token_level"]
    with pytest.raises(lw.errors.UnsupportedError, match=r"FMGP\(\) takes outputs \(B, C\), not tokens \(B, T, C\)"):
        problems.fit(case, lw.FMGP())


@pytest.mark.parametrize("name", ["embedding", "tuple_input"])
def test_distances_need_numbers(name: str) -> None:
    case = BY_NAME[name]
    with pytest.raises(
        lw.errors.UnsupportedError, match="needs inputs that are one tensor of real numbers; use kernel='features'"
    ):
        problems.fit(case, lw.FMGP(kernel="rbf"))


def test_draws_and_ignored_targets_are_refused() -> None:
    x, y = classes()
    with pytest.raises(lw.errors.UnsupportedError, match="no gradient to learn by"):
        lw.fit(confident(), [(x, y)], lw.Categorical(link="mc"), method=lw.FMGP())
    some = y.clone()
    some[3] = -100
    with pytest.raises(lw.errors.DataError, match="some targets are ignored ones"):
        lw.fit(confident(), [(x, some)], "classification", method=lw.FMGP(steps=3))


def test_questions_about_weights_are_refused() -> None:
    """No weights, no evidence, no prior over weights: each is refused in words."""
    posterior = fitted(lw.FMGP(6, steps=5))
    x = curve()[0]
    for ask in (
        posterior.log_evidence, posterior.effective_parameters, posterior.tuned,
        lambda: posterior.tuned(lw.tuners.FixedPoint()),
        lambda: posterior.tuned(lw.tuners.Grid([curve()])),
        lambda: posterior.weight_samples(2), lambda: posterior.network_samples(x, 2),
        lambda: posterior.with_prior(2.0),
    ):  # fmt: skip
        with pytest.raises(lw.errors.UnsupportedError, match=r"(FMGP|FunctionPosterior) has no"):
            ask()


def test_data_that_ask_for_gradients() -> None:
    x, y = curve()
    method = lw.FMGP(5, steps=20)
    expected = lw.fit(model(), [(x, y)], "regression", method=method).functions(x).std
    free = [(x.clone().requires_grad_(), y.clone().requires_grad_())]
    assert torch.equal(lw.fit(model(), free, "regression", method=method).functions(x).std, expected)


# What the last layer of a network sees.

HEADS = {
    "mlp": "4", "cnn": "6", "resnet_batchnorm": "head", "conv_zoo": "8", "norms": "5", "attention": "head",
    "transformer_layer": "head", "embedding": "head", "lstm": "head", "gru": "head", "frozen_bias": "4",
    "weight_norm": "2", "squeezed": "net.2", "dict_input": "head", "tuple_input": "head",
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_features_are_what_goes_into_the_head(name: str) -> None:
    case = BY_NAME[name]
    model, seen = case.build(), []
    handle = model.get_submodule(HEADS[name]).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        expected = torch.cat([dense.output(model, dense.one(case.batch(3), b)) for b in range(3)])
    handle.remove()
    network = Network.build(model, case.batch(3))
    inputs, outputs = problems.unchanged(
        model, lambda: features(last_layer_network(network, case.batch(3)), case.batch(3))
    )
    assert_close(inputs, torch.cat(seen))
    assert_close(outputs, expected)
    assert not inputs.requires_grad


def test_a_head_without_a_bias() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()
    x = torch.randn(6, 4, dtype=D)
    inputs, _ = features(last_layer_network(Network.build(model, x), x), x)
    assert_close(inputs, model[:2](x))


def test_weights_that_are_chosen_do_not_matter() -> None:
    case = BY_NAME["mlp"]
    some = Network.build(case.build(), case.batch(3), lw.subnetwork(torch.arange(5)))
    every = Network.build(case.build(), case.batch(3))
    assert_close(*(features(last_layer_network(n, case.batch(3)), case.batch(3))[0] for n in (some, every)))


@pytest.mark.parametrize("name", ["tied", "free_parameter"])
def test_a_head_that_is_not_a_single_linear_map(name: str) -> None:
    case = BY_NAME[name]
    with pytest.raises(lw.errors.ModelError, match="no single linear map, so it has no features; use kernel='rbf'"):
        last_layer_network(Network.build(case.build(), case.batch(3)), case.batch(3))


@pytest.mark.parametrize("name", ["conv1d", "sdpa"])
def test_a_head_that_is_used_several_times(name: str) -> None:
    case = BY_NAME[name]
    network = last_layer_network(Network.build(case.build(), case.batch(3)), case.batch(3))
    with pytest.raises(lw.errors.ModelError, match="used several times for one input; use kernel='rbf'"):
        features(network, case.batch(3))


# Kernels that are free of any network, entry by entry from their formulas.

B, M, SIZE, OUTPUTS = 4, 5, 3, 2
NUMBERS = torch.tensor([0, 1, 1, 0, 1])


def made(kind: str, each: bool = True) -> FreeKernel:
    lengths = torch.tensor([0.5, 1.0, 3.0] if each else [0.8], dtype=D)
    mixing = torch.tensor([[1.5, 99.0], [-0.4, 0.7]], dtype=D)  # the upper triangle has no say
    return FreeKernel(kind, lengths.log(), mixing)


def inputs(count: int, seed: int) -> Tensor:
    return torch.randn(count, SIZE, dtype=D, generator=torch.Generator().manual_seed(seed))


def entry(kernel: FreeKernel, u: Tensor, v: Tensor, c: int, d: int) -> float:
    lengths = kernel.log_lengths.exp().expand(SIZE).tolist()
    mixed = [[1.5, 0.0], [-0.4, 0.7]]
    between = sum(mixed[c][k] * mixed[d][k] for k in range(OUTPUTS))
    if kernel.kind == "rbf":
        gap = sum((float(a) - float(b)) ** 2 / s**2 for a, b, s in zip(u, v, lengths, strict=True))
        return math.exp(-0.5 * gap) * between
    return (1 + sum(float(a) * float(b) / s**2 for a, b, s in zip(u, v, lengths, strict=True)) / SIZE) * between


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", KERNELS)
def test_entries(kind: str, each: bool) -> None:
    kernel, u, z = made(kind, each), inputs(B, 0), inputs(M, 1)
    joint = [[[[entry(kernel, u[i], u[j], c, d) for d in range(OUTPUTS)] for j in range(B)]
              for c in range(OUTPUTS)] for i in range(B)]  # fmt: skip
    expected = torch.tensor(joint, dtype=D)
    assert_close(kernel.joint(u), expected)
    marginals = torch.stack([expected[i, :, i] for i in range(B)])
    assert_close(kernel.marginal(u).contiguous(), marginals)
    across = [[[entry(kernel, u[i], z[m], c, int(NUMBERS[m])) for m in range(M)] for c in range(OUTPUTS)]
              for i in range(B)]  # fmt: skip
    assert_close(kernel.between(u, z, NUMBERS), torch.tensor(across, dtype=D))
    points = [[entry(kernel, z[a], z[b], int(NUMBERS[a]), int(NUMBERS[b])) for b in range(M)] for a in range(M)]
    assert_close(kernel.points(z, NUMBERS), torch.tensor(points, dtype=D))


@pytest.mark.parametrize("kind", KERNELS)
def test_slopes_in_everything_that_is_learned(kind: str) -> None:
    start = made(kind)

    def kernels(lengths: Tensor, mixing: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kernel, u = FreeKernel(kind, lengths, mixing), inputs(B, 0)
        return kernel.points(z, NUMBERS), kernel.between(u, z, NUMBERS), kernel.marginal(u).contiguous()

    leaves = (start.log_lengths, start.mixing, inputs(M, 1))
    assert torch.autograd.gradcheck(kernels, tuple(t.clone().requires_grad_() for t in leaves), fast_mode=True)


# What is learned: against exact Gaussian process regression, and the state that is kept.


@pytest.mark.parametrize("kind", ["rbf", "features"])
def test_points_at_all_data_are_the_exact_process(kind: str) -> None:
    """With given kernel and noise, and what the points know in closed form: textbook covariances (M = n C)."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, new = torch.randn(8, 2, dtype=D), torch.randn(4, 2, dtype=D)
    noise = torch.tensor(0.3, dtype=D)
    problem = lw.fit(
        network, [(x, network(x).detach() + 1)], lw.Gaussian(), method=lw.baselines.MapOnly(), prior=1.0
    ).posterior.problem
    whole = problem.network
    sight = Sight(whole, last_layer_network(whole, x) if kind == "features" else None)
    lengths = torch.tensor([0.7, 1.3], dtype=D) if kind == "rbf" else torch.tensor([0.4], dtype=D)
    kernel = FreeKernel(kind, lengths.log(), torch.tensor([[1.2, 0.0], [0.9, 0.4]], dtype=D))
    seen, _ = sight(x)
    numbers = torch.tensor([0, 1]).repeat(8)
    points = seen.repeat_interleave(2, 0)
    state = KernelState(
        kernel, points, numbers, torch.zeros(16, dtype=D), noise.log(), Inducing(torch.eye(16, dtype=D))
    )
    _, rows = state.whiten(FeatureTable(seen, seen, seen))
    flat = rows.flatten(0, 1)
    known = replace(state, inducing=state.inducing.update(flat.T @ flat / noise, 1.0))
    found = known.posterior(problem, sight, Statistics(0.0, 8, 2), ())
    joint = kernel.joint(torch.cat([seen, sight(new)[0]])).reshape(24, 24)
    expected = joint[16:, 16:] - joint[16:, :16] @ torch.linalg.solve(
        joint[:16, :16] + noise * torch.eye(16, dtype=D), joint[:16, 16:]
    )
    assert_close(found(new, joint=True).cov.reshape(8, 8), expected, 0.25)  # but for what keeps a kernel definite
    assert_close(found(new).mean, network(new))
    assert float(found.problem.likelihood.dispersion) == pytest.approx(0.3)


def kept(monkeypatch: pytest.MonkeyPatch) -> list[KernelState]:
    states: list[KernelState] = []
    original = KernelState.posterior

    def noted(self: KernelState, *args: Any) -> FunctionPosterior:
        states.append(self)
        return original(self, *args)

    monkeypatch.setattr(KernelState, "posterior", noted)
    return states


@pytest.mark.parametrize("count", [10, 60])
@pytest.mark.parametrize("kernel", ["rbf", "features"])
def test_the_posterior_is_the_state_that_was_learned(kernel: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However near to singular the kernel of the points is."""
    states = kept(monkeypatch)
    posterior = fitted(lw.FMGP(count, kernel=kernel, steps=40))
    x = torch.linspace(-5, 5, 21, dtype=D)[:, None]
    seen, f = posterior.posterior.sight(x)
    with torch.no_grad():
        before, rows = states[0].whiten(FeatureTable(seen, f, f))
        expected = states[0].inducing.posterior_cov(before, rows)
    assert_close(posterior.functions(x).cov, expected, SOLVED)
    joint = posterior.functions(x, joint=True).cov.reshape(21, 21)
    assert float(torch.linalg.eigvalsh(joint).min()) > -1e-8 * float(joint.diagonal().max())


def test_steps_on_the_covariance_end_where_the_objective_is_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes count: 2 KL less the energies of the one with the network's mean and the one with its own."""
    x, y = curve()
    with torch.no_grad():
        table = FeatureTable(x, model()(x), y)
    every_row = lambda shape, *_: (torch.arange(shape[0], dtype=D) + 0.5) / shape[0]
    monkeypatch.setattr("lapwing.methods.fmgp.uniform", every_row)
    likelihood, gen = lw.Gaussian(noise_std=2.0), torch.Generator().manual_seed(0)
    start = KernelState.initial("rbf", likelihood, table, torch.tensor([True]), 6, gen)
    learning = Learning(lw.FMGP(batch_size=60), likelihood, table, None, gen, start)
    still = torch.optim.SGD(start.free, lr=0.0)
    for _ in range(80):
        learning.step(still, 0.3)
    state = learning.state
    precision = state.inducing.precision.clone().requires_grad_()
    before, rows = (t.detach() for t in state.whiten(learning.table))
    cov = Inducing(precision).posterior_cov(before, rows)
    energies = sum(energy(likelihood, 1.0, mean, cov, y).sum() for mean in (table.f, learning.shift.expand(60, 1)))
    divergence = 2 * Inducing(precision).divergence()
    parts = [torch.autograd.grad(part, precision, retain_graph=True)[0] for part in (divergence, energies)]
    assert float(parts[0].abs().max()) > 1e-3
    assert_close(parts[0], parts[1], SOLVED)


@pytest.mark.parametrize(("gap", "first"), [(3.0, False), (0.0, True)])
def test_the_best_state_on_validation_data_is_kept(gap: float, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training data leave much unexplained; validation data at the outputs like no state as much as the first."""
    looks: list[float] = []
    original = Learning.held_out_score

    def noted(self: Learning) -> float:
        looks.append(original(self))
        return looks[-1]

    monkeypatch.setattr(Learning, "held_out_score", noted)
    (x, _), gen = curve(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        f = model()(x)
    held = [(x[::2], f[::2] + gap * torch.randn(30, 1, dtype=D, generator=gen).sign())]
    far = f + 3 * torch.randn(60, 1, dtype=D, generator=gen).sign()
    method = lw.FMGP(10, steps=100, learning_rate=0.05, patience=3)
    posterior = fitted(method, lw.Gaussian(noise_std=0.5), data=[(x, far)], validation=held)
    score = float(posterior.predict(held[0][0]).log_prob(held[0][1]).mean())
    assert score == pytest.approx(max(looks), abs=1e-8)
    assert posterior.trace is not None
    if first:
        assert looks.index(max(looks)) == 0
        assert len(looks) == 7  # after 1, 2 and 4 steps, the first after that, and three that try its patience
        assert len(posterior.trace.steps) == 20
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
        lw.fit(confident(), [(x, targets)], chosen, method=lw.FMGP(6, steps=3), validation=[(x, held)])


def test_the_objective_rises() -> None:
    posterior = learned()
    assert posterior.trace is not None
    scores = torch.tensor([step.score for step in posterior.trace.steps], dtype=D)
    assert (posterior.trace.tuner, posterior.trace.score, len(scores)) == ("FMGP", "objective", 250)
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


def test_a_noise_for_each_output() -> None:
    """Their ratios are those of the residuals; what they share starts there and is learned."""
    x, _ = classes()
    stds = torch.tensor([0.1, 1.0, 4.0], dtype=D)
    with torch.no_grad():
        f = confident()(x)
    y = f + stds * torch.randn(60, 3, dtype=D, generator=torch.Generator().manual_seed(1))
    posterior = lw.fit(confident(), [(x, y)], lw.Gaussian(per_output=True), method=lw.FMGP(9, steps=40))
    residual = (f - y).square().mean(0)
    noise = posterior.likelihood.noise_variance
    assert_close(noise / noise.sum(), residual / residual.sum())
    assert posterior.trace is not None
    assert posterior.trace.steps[0].noise[0] == pytest.approx(1.0, rel=0.05)
    assert float(noise[1]) != pytest.approx(float(residual[1]), rel=1e-3)


def test_an_objective_that_runs_away() -> None:
    with pytest.raises(lw.errors.NumericalError, match=r"FMGP: the objective is \S+ at step \d+.* Lower learning_rate"):
        fitted(lw.FMGP(6, learning_rate=1e6, steps=100))


# A belief about functions that is no belief about weights, from its definition.

CASE = BY_NAME["cnn"]
POSTERIOR_M, RANK = 5, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def posterior_made(kind: str, dtype: torch.dtype = D) -> FunctionPosterior:
    network = Network.build(CASE.build(dtype), CASE.batch(3, dtype))
    prior = lw.isotropic(1.0).bound(network.selection, network.theta())
    sight = Sight(network, last_layer_network(network, CASE.batch(3, dtype)) if kind == "features" else None)
    size = sight(CASE.batch(1, dtype))[0].shape[1]
    lengths = torch.linspace(3.0, 20.0, size, dtype=D) if kind == "rbf" else torch.ones(1, dtype=D)
    mixing = torch.tensor([[2.0, 0.0, 0.0], [1.8, 0.3, 0.0], [-1.0, 0.5, 0.2]], dtype=D)
    kernel = FreeKernel(kind, lengths.log(), mixing)
    points, numbers = draw(POSTERIOR_M, size, seed=1), torch.tensor([0, 2, 1, 1, 0])
    problem = Problem(network, lw.Categorical(), prior)
    mix = 0.1 * draw(POSTERIOR_M, RANK, seed=2)
    return FunctionPosterior(problem, sight, kernel, points, numbers, mix, Statistics(0.0, 3, 3), network.theta())


@pytest.mark.parametrize("kind", KERNELS)
def test_what_a_kernel_sees(kind: str) -> None:
    """The input, flat, or what the last layer gets; with the outputs, in float64."""
    for dtype in (D, torch.float32):
        posterior, x = posterior_made(kind, dtype), CASE.batch(4, dtype, seed=1)
        seen, f = posterior.sight(x)
        model = CASE.build(dtype)
        with torch.no_grad():
            expected = x.flatten(1) if kind == "rbf" else nn.Sequential(*list(model)[:-1])(x)
            assert_close(seen, expected.double(), dtype=dtype)
            assert_close(f, model(x).double(), dtype=dtype)
        assert seen.dtype == f.dtype == D


@pytest.mark.parametrize("kind", KERNELS)
def test_the_covariance_is_the_kernel_less_what_the_points_know(kind: str) -> None:
    posterior, x = posterior_made(kind), CASE.batch(4, seed=1)
    seen, f = posterior.sight(x)
    rows = posterior.kernel.between(seen, posterior.points, posterior.numbers).reshape(12, POSTERIOR_M) @ posterior.mix
    expected = posterior.kernel.joint(seen).reshape(12, 12) - rows @ rows.T
    joint = posterior(x, joint=True)
    assert_close(joint.cov.reshape(12, 12), expected)
    marginal = posterior(x)
    assert_close(marginal.cov, torch.stack([expected[i : i + 3, i : i + 3] for i in range(0, 12, 3)]))
    assert_close(marginal.mean, f)
    assert_close(joint.mean, f)
    assert not marginal.cov.requires_grad


@pytest.mark.parametrize("kind", KERNELS)
def test_draws_have_the_joint_covariance(kind: str, generator: torch.Generator) -> None:
    posterior, x = posterior_made(kind), CASE.batch(2, seed=1)
    joint = posterior(x, joint=True)
    gap = (posterior.function_samples(x, 4000, generator) - joint.mean).flatten(1)
    assert gap.shape == (4000, 6)
    assert_within(gap[:, :, None] * gap[:, None, :], joint.cov.reshape(6, 6))
    one, two = (posterior.function_samples(x, 2, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("kind", KERNELS)
def test_above_so_many_outputs_covariances_wait_until_they_are_asked_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior, x = posterior_made(kind), CASE.batch(4, seed=1)
    plain = posterior(x)
    monkeypatch.setattr(function_space, "WIDE", 2)
    late = posterior(x)
    assert not isinstance(late.covariance, Tensor)
    assert_close(late.variance, plain.variance)
    assert_close(late.cov, plain.cov)


# Features and outputs as the process sees them: their units do not matter.


class Columns(nn.Module):
    """The sine network on the first column, in given units; it ignores the other columns."""

    def __init__(self, size: float, place: float) -> None:
        super().__init__()
        self.inner, self.size, self.place = model(), size, place

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner((x[:, :1] - self.place) / self.size)
        return found


@pytest.mark.parametrize(("size", "place"), [(1e-4, 0.0), (1e4, 0.0), (1.0, 1e6)])
def test_the_units_of_an_input_do_not_matter(size: float, place: float) -> None:
    """Neither for this input nor for the other one."""
    x, y = curve()
    other = torch.randn(60, 1, dtype=D, generator=torch.Generator().manual_seed(3))
    found = []
    for unit, zero in ((1.0, 0.0), (size, place)):
        inputs = torch.cat([unit * x + zero, other], 1)
        method = lw.FMGP(10, steps=20)
        found.append(lw.fit(Columns(unit, zero), [(inputs, y)], "regression", method=method).functions(inputs).cov)
    assert float((found[1] - found[0]).abs().max()) < 1e-4 * float(found[0].abs().max())


class Scaled(nn.Module):
    """The sine network with outputs in other units."""

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
    assert float(output_scale(lw.Gaussian(), FeatureTable(y, constant, y))) == pytest.approx(spread)
    assert float(output_scale(lw.Gaussian(), FeatureTable(y, 0.3 * y, y))) == pytest.approx(0.3 * spread)
    assert float(output_scale(lw.Gaussian(), FeatureTable(y, 0.3 * y, constant))) == pytest.approx(0.3 * spread)
    assert float(output_scale(lw.Gaussian(), FeatureTable(y, constant, constant))) == 1
    assert float(output_scale(lw.Poisson(), FeatureTable(y, 0.3 * y / unit, 1e6 * y))) == pytest.approx(
        0.3 * spread / unit
    )


@pytest.mark.parametrize("value", [0.3, math.pi, 1e5 + 0.1])
def test_an_input_that_is_constant_up_to_rounding_has_no_length(value: float) -> None:
    """The length-scales are those of an input of zeros, also if the mean of the constant is rounded."""
    x, y = curve()
    fit = lambda c: lw.fit(
        Columns(1.0, 0.0), [(torch.cat([x, c.expand_as(x)], 1), y)], "regression", method=lw.FMGP(10, steps=40)
    )
    rounded = torch.full((60, 1), value, dtype=D)
    rounded[::2] *= 1 + 1e-13
    kernels = [
        fit(c).posterior.kernel for c in (torch.zeros(60, 1, dtype=D), torch.full((1,), value, dtype=D), rounded)
    ]
    for kernel in kernels[1:]:
        assert_close(kernel.log_lengths, kernels[0].log_lengths, SOLVED)


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_a_constant_input_does_not_change_the_rest(value: float) -> None:
    """The points keep its value, and the variance is small near the data and large far from them."""
    x, y = curve()
    wide = lambda t: torch.cat([t, torch.full_like(t, value)], 1)
    posterior = lw.fit(Columns(1.0, 0.0), [(wide(x), y)], "regression", method=lw.FMGP(20, steps=120))
    assert torch.equal(posterior.posterior.points[:, 1], torch.full((20,), value, dtype=D))
    among, away = (posterior.functions(wide(torch.tensor([[t]], dtype=D))).variance for t in (0.0, 20.0))
    assert float(away) > 5 * float(among)


@pytest.mark.parametrize("likelihood", [lw.Gaussian(), lw.Gaussian(noise_std=NOISE)], ids=["learned", "given"])
def test_where_the_targets_lie_does_not_matter(likelihood: Any) -> None:
    """The second process starts from the mean of the outputs, whether or not the noise is given."""
    x = torch.linspace(-4, 4, 9, dtype=D)[:, None]
    one = fitted(lw.FMGP(10, steps=50), likelihood).functions(x)
    moved = fitted(lw.FMGP(10, steps=50), likelihood, model=model(100.0), data=[curve(place=100.0)]).functions(x)
    assert_close(moved.cov, one.cov, 0.35)


def test_length_scales_start_at_the_spread_of_each_column() -> None:
    """One where there is none, in these rows or in all data; times the root of the number of columns."""
    u, varies = torch.tensor([[0.0, 5.0, 1.0], [4.0, 5.0, 7.0]]), torch.tensor([True, True, False])
    assert _initial_lengths(u, varies, True).tolist() == pytest.approx([2 * 3**0.5, 3**0.5, 3**0.5])
    assert _initial_lengths(u, varies, False).tolist() == pytest.approx([5.001 / 3])
    assert _initial_lengths(u[:, 1:2], varies[1:2], False).tolist() == [1.0]


FLAT = {"features": (2, 8, 2.0), "one feature": (1, 1, 2.0), "large": (1, 1, 2000.0), "zeros": (1, 1, 0.0)}


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("count", [1, 20])
def test_features_without_spread_have_a_unit(kind: str, count: int) -> None:
    """One datum, or the same again and again: error bars of the targets' own size, and not hundreds of times that."""
    torch.manual_seed(0)
    inputs, width, value = FLAT[kind]
    last = nn.Linear(width, 1)
    network = (last if width == 1 else nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), last)).double()
    x, y = torch.full((count, inputs), value, dtype=D), torch.randn(count, 1, dtype=D)
    method, noise = lw.FMGP(20, kernel="features", steps=50), lw.Gaussian(noise_std=0.1)
    posterior = lw.fit(network, [(x, y)], noise, method=method)
    assert float(posterior.functions(x[:1]).std) < 3


def test_inputs_of_another_size_are_refused() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 1))
    small, large = (torch.randn(10, 1, n, n) for n in (6, 8))
    y = torch.randn(10, 1)
    with pytest.raises(lw.errors.DataError, match="inputs of 36 and of 64 numbers; expected as many in all"):
        lw.fit(network, [(small, y), (large, y)], "regression", method=lw.FMGP(5, steps=3))
    posterior = lw.fit(network, [(small, y)], "regression", method=lw.FMGP(5, steps=3))
    with pytest.raises(lw.errors.DataError, match="inputs of 64 numbers; the kernel was learned on 36"):
        posterior.functions(large)


def test_samples_without_a_batch_are_refused() -> None:
    x = torch.randn(30, 3)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    data = [(row, row[:1]) for row in x]
    with pytest.raises(lw.errors.DataError, match="3 inputs with 1 targets"):
        lw.fit(network, data, "regression", method=lw.FMGP(5, steps=3))
    with pytest.raises(lw.errors.DataError, match="3 inputs with 1 targets"):
        lw.fit(network, [(x, x[:, :1])], "regression", method=lw.FMGP(5, steps=3), validation=data)
