"""Inducing points: anchors, placement, span, bounds from mini-batches, and what single precision misses."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.inputs import Batch
from lapwing.data.streams import DrawnRows, class_labels
from lapwing.linalg.dense import smooth_whitening
from lapwing.linalg.stochastic import Inducing
from lapwing.methods.inducing_points import (
    STARTS,
    AnchoredCurvature,
    Anchors,
    InducingPoints,
    Placement,
    whitened_rows,
)
from lapwing.methods.valla import Stochastic, learn_collapsed, learn_stochastic
from lapwing.networks.network import Network
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense, inducing
from tests.tolerances import SOLVED, assert_close
from tests.unit.methods.sine import NOISE, classes, curve, exact, fitted, model

# Inducing points: anchors, placement, span, and bounds from mini-batches.

# Curvature in the span of the Jacobian at a few inputs, against dense matrices.

D = torch.float64
M, RANK, PHI = 5, 3, 1.7
NAMES = ["mlp", "resnet_batchnorm", "attention", "gru", "embedding", "token_level", "dict_input", "weight_norm"]
PRIORS = ["isotropic", "per_layer", "diagonal", "g"]


def setting(name: str) -> Anchors:
    case = BY_NAME[name]
    network = Network.build(case.build(), case.batch(M))
    return Anchors(network, case.batch(M), torch.arange(M) * 7 % torch.Size(network.output_shape).numel())


@cache
def rows(name: str) -> tuple[Tensor, Tensor]:
    """The anchors' rows (M, P) and all of three other inputs (3 C, P)."""
    case, model = BY_NAME[name], BY_NAME[name].build()
    jac = dense.jacobian(model, case.batch(M), M)
    return (
        jac[torch.arange(M), torch.arange(M) * 7 % jac.shape[1]],
        dense.jacobian(model, case.batch(3, seed=2), 3).flatten(0, 1),
    )


def bound(kind: str, network: Network) -> Any:
    size = network.selection.size
    layers = len(set(network.selection.layer_of()))
    given = {
        "isotropic": lw.isotropic(0.7), "per_layer": lw.per_layer(torch.linspace(0.3, 2.0, layers, dtype=D)),
        "diagonal": lw.priors.diagonal(torch.linspace(0.3, 2.0, size, dtype=D)), "g": lw.priors.g_prior(0.7),
    }[kind].bound(network.selection, network.theta())  # fmt: skip
    return given.with_scale(torch.linspace(0.5, 3.0, size, dtype=D)) if kind == "g" else given


def mix() -> Tensor:
    return torch.randn(M, RANK, dtype=D, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("name", "kind"), [*zip(NAMES, [*PRIORS, *PRIORS], strict=True)])
def test_the_precision_is_that_of_the_matrix(name: str, kind: str) -> None:
    anchors, (z, other) = setting(name), rows(name)
    prior = bound(kind, anchors.network)
    curvature = AnchoredCurvature(anchors, mix())
    matrix = z.T @ mix() @ mix().T @ z
    precision = matrix / PHI + torch.diag(prior.vector)
    covariance = torch.linalg.inv(precision)
    found = curvature.precision(torch.tensor(PHI, dtype=D), prior)
    assert_close(found.logdet(), torch.linalg.slogdet(precision)[1])
    jacobians = anchors.network.linearise(BY_NAME[name].batch(3, seed=2)).jacobians()
    assert_close(found.cross(jacobians), other @ covariance @ other.T)
    data = other.reshape(-1, anchors.network.output_shape[-1], other.shape[1])
    blocks = dense.output_covariance(data, covariance)
    assert_close(found.quadratic(jacobians).reshape(blocks.shape), blocks)
    assert_close(found.quadratic(jacobians, full=False).flatten(), blocks.diagonal(dim1=1, dim2=2).flatten())
    draws = found.sample(torch.eye(len(matrix), dtype=D))
    assert_close(draws.T @ draws, covariance)
    v = torch.randn(2, len(matrix), dtype=D)
    assert_close(found.solve(v), v @ covariance)
    assert_close(found.variances(), covariance.diagonal())
    assert_close(curvature.anchored_diagonal, matrix.diagonal())
    assert_close(curvature.values, torch.linalg.eigvalsh(matrix)[-RANK:], SOLVED)


@pytest.mark.parametrize("kind", PRIORS)
def test_the_log_determinant_has_what_is_missing_added(kind: str) -> None:
    """tr A⁻¹ (H - H̃) / φ, whichever way it is computed."""
    anchors, (z, _) = setting("mlp"), rows("mlp")
    prior = bound(kind, anchors.network)
    matrix = z.T @ mix() @ mix().T @ z
    own = matrix.diagonal() + torch.linspace(0.1, 1.0, 83, dtype=D)
    logdet = AnchoredCurvature(anchors, mix(), own).logdet(torch.tensor(PHI, dtype=D), prior)
    inside = torch.linalg.slogdet(matrix / PHI + torch.diag(prior.vector))[1]
    assert_close(logdet, inside + (torch.linspace(0.1, 1.0, 83, dtype=D) / prior.vector).sum() / PHI)


def test_rounding_never_takes_anything_off() -> None:
    anchors, (z, _) = setting("mlp"), rows("mlp")
    prior = bound("isotropic", anchors.network)
    matrix = z.T @ mix() @ mix().T @ z
    logdet = AnchoredCurvature(anchors, mix(), matrix.diagonal() * (1 - 1e-9)).logdet(torch.tensor(PHI, dtype=D), prior)
    assert_close(logdet, torch.linalg.slogdet(matrix / PHI + torch.diag(prior.vector))[1])


@pytest.mark.parametrize("kind", PRIORS)
def test_slopes_of_the_log_determinant(kind: str) -> None:
    """In the precisions and the noise."""
    anchors = setting("mlp")
    prior = bound(kind, anchors.network)
    curvature = AnchoredCurvature(anchors, mix(), torch.full((83,), 40.0, dtype=D))

    def found(log_alpha: Tensor, log_phi: Tensor) -> Tensor:
        return curvature.logdet(log_phi.exp(), prior.with_precision(log_alpha.exp()))

    leaves = (prior.values.log().clone().requires_grad_(), torch.tensor(0.3, dtype=D, requires_grad=True))
    assert torch.autograd.gradcheck(found, leaves, fast_mode=True)


def test_the_diagonal_is_the_whole_curvatures_where_it_is_known() -> None:
    anchors, (z, _) = setting("mlp"), rows("mlp")
    own = torch.linspace(1.0, 2.0, 83, dtype=D)
    assert_close(AnchoredCurvature(anchors, mix(), own).diagonal(), own)
    matrix = z.T @ mix() @ mix().T @ z
    diagonal = AnchoredCurvature(anchors, mix()).diagonal()
    large = matrix.diagonal() > 1e-2 * matrix.diagonal().max()
    assert_close(diagonal[large], matrix.diagonal()[large])
    assert float(diagonal.min()) > 0


# Where inducing points start, and which outputs they have.

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def placement_setting(x: Tensor, y: Tensor, outputs: int = 3) -> tuple[Network, Any, DrawnRows]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(x.shape[1], 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    network = Network.build(model, x)
    prior = lw.isotropic(0.7).bound(network.selection, network.theta())
    return network, prior, DrawnRows.draw(Data([(x, y)], CPU), len(x), generator())


def clouds(count: int = 8) -> tuple[Tensor, Tensor]:
    """Three classes, each in a place of its own."""
    y = torch.arange(3).repeat(count)
    places = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]], dtype=D)
    return places[y] + torch.randn(3 * count, 2, dtype=D, generator=generator(4)), y


def numbers(points: Tensor, among: Tensor) -> list[int]:
    """Which rows these points are; each must be one."""
    gaps = (points[:, None] - among[None]).flatten(2).abs().amax(-1)
    assert float(gaps.amin(1).max()) == 0
    return gaps.argmin(1).tolist()


@pytest.mark.parametrize("count", [1, 10, 17, 30, 99])
def test_landmarks_have_one_output_of_each_input_before_a_second(count: int) -> None:
    x = torch.randn(10, 2, dtype=D)
    network, _, pool = placement_setting(x, torch.zeros(10, dtype=torch.long))
    anchors = Placement(network, pool, generator()).landmarks(count)
    pairs = list(zip(numbers(anchors.inputs, x), anchors.outputs.tolist(), strict=True))
    assert len(pairs) == len(set(pairs)) == min(count, 30)
    often = Counter(dict.fromkeys(range(10), 0))
    often.update(number for number, _ in pairs)
    assert max(often.values()) - min(often.values()) <= 1


def test_landmarks_outputs_are_random() -> None:
    x = torch.randn(10, 2, dtype=D)
    network, _, pool = placement_setting(x, torch.zeros(10, dtype=torch.long))
    seen = torch.stack([Placement(network, pool, generator(seed)).landmarks(10).outputs for seed in range(200)])
    shares = torch.stack([(seen == c).double().mean() for c in range(3)])
    assert float((shares - 1 / 3).abs().max()) < 5 * (2 / 9 / seen.numel()) ** 0.5
    assert torch.equal(Placement(network, pool, generator(5)).landmarks(10).outputs, seen[5])


@pytest.mark.parametrize("prior", ["isotropic", "per_layer"])
def test_greedy_takes_the_largest_variance_left(prior: str) -> None:
    """Of all outputs at all data, by dense conditional variances under the prior."""
    x = torch.randn(6, 2, dtype=D)
    network, given, pool = placement_setting(x, torch.zeros(6, dtype=torch.long))
    if prior == "per_layer":
        given = lw.per_layer(torch.tensor([0.1, 5.0], dtype=D)).bound(network.selection, network.theta())
    anchors = Placement(network, pool, generator()).start("greedy", 7, given, 1000)
    rows = dense.jacobian(network.model, x, 6).flatten(0, 1)
    whole = inducing.kernel(rows, rows, given.vector)
    chosen: list[int] = []
    for number, output in zip(numbers(anchors.inputs, x), anchors.outputs.tolist(), strict=True):
        across = whole[:, chosen]
        left = (whole - across @ torch.linalg.solve(whole[chosen][:, chosen], across.T)).diagonal()
        assert int(left.argmax()) == 3 * number + output
        chosen.append(3 * number + output)
    assert len(chosen) == 7


def test_greedy_chooses_among_the_candidates() -> None:
    """There are at least as many candidates as points, so one candidate and twelve points give all twelve."""
    x = torch.randn(30, 2, dtype=D)
    network, prior, pool = placement_setting(x, torch.zeros(30, dtype=torch.long))
    rows = dense.jacobian(network.model, x, 30).flatten(0, 1)
    variances = inducing.kernel(rows, rows, prior.vector).diagonal()

    def chosen(count: int, candidates: int) -> list[int]:
        anchors = Placement(network, pool, generator()).start("greedy", count, prior, candidates)
        return [3 * i + c for i, c in zip(numbers(anchors.inputs, x), anchors.outputs.tolist(), strict=True)]

    among, some, every = chosen(12, 1), chosen(5, 12), chosen(5, 1000)
    assert len(set(among)) == 12
    assert len(set(some)) == len(set(every)) == 5
    assert set(some) < set(among)
    assert some[0] == max(among, key=lambda number: float(variances[number]))
    assert every[0] == int(variances.argmax())


def test_greedy_stops_where_outputs_have_nothing_more_to_say() -> None:
    """Two different data, each many times: six points at most."""
    x = torch.randn(2, 2, dtype=D).repeat(5, 1)
    network, prior, pool = placement_setting(x, torch.zeros(10, dtype=torch.long))
    anchors = Placement(network, pool, generator()).start("greedy", 20, prior, 1000)
    assert len(anchors) == 6
    assert len(set(zip(map(tuple, anchors.inputs.tolist()), anchors.outputs.tolist()))) == 6


@pytest.mark.parametrize("count", [3, 6, 7])
def test_kmeans_places_the_points_of_a_class_among_its_inputs(count: int) -> None:
    x, y = clouds()
    network, prior, pool = placement_setting(x, y)
    anchors = Placement(network, pool, generator()).start("kmeans", count, prior, 1000)
    assert sorted(anchors.outputs.tolist()) == sorted(i % 3 for i in range(count))
    nearest = (anchors.inputs[:, None] - x[None]).square().sum(-1).argmin(1)
    assert torch.equal(y[nearest], anchors.outputs)


def test_kmeans_of_one_point_for_each_class_is_the_mean_of_the_class() -> None:
    x, y = clouds()
    network, prior, pool = placement_setting(x, y)
    anchors = Placement(network, pool, generator()).start("kmeans", 3, prior, 1000)
    assert_close(anchors.inputs, torch.stack([x[y == c].mean(0) for c in anchors.outputs.tolist()]))


def test_kmeans_of_a_class_without_data_uses_all() -> None:
    x, y = clouds()
    network, prior, pool = placement_setting(x, y.clamp_max(1))
    anchors = Placement(network, pool, generator()).start("kmeans", 3, prior, 1000)
    assert_close(anchors.inputs[anchors.outputs == 2][0], x.mean(0))


def test_kmeans_without_classes_takes_the_outputs_in_turn() -> None:
    x = torch.randn(20, 2, dtype=D)
    network, prior, pool = placement_setting(x, torch.randn(20, 3, dtype=D))
    anchors = Placement(network, pool, generator()).start("kmeans", 7, prior, 1000)
    assert anchors.outputs.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_kmeans_keeps_the_shape_of_images() -> None:
    case = BY_NAME["cnn"]
    network = Network.build(case.build(), case.batch(3))
    pool = DrawnRows.draw(Data([(case.batch(9), problems.targets(case, 9))], CPU), 9, generator())
    prior = lw.isotropic(1.0).bound(network.selection, network.theta())
    anchors = Placement(network, pool, generator()).start("kmeans", 4, prior, 1000)
    assert anchors.inputs.shape == (4, 2, 7, 8)


def test_random_points_are_data_with_their_own_class() -> None:
    x, y = clouds()
    network, prior, pool = placement_setting(x, y)
    anchors = Placement(network, pool, generator()).start("random", 10, prior, 1000)
    chosen = numbers(anchors.inputs, x)
    assert len(set(chosen)) == 10
    assert torch.equal(anchors.outputs, y[chosen])


def test_random_points_of_a_regression_take_the_outputs_in_turn() -> None:
    x = torch.randn(20, 2, dtype=D)
    network, prior, pool = placement_setting(x, torch.randn(20, 3, dtype=D))
    anchors = Placement(network, pool, generator()).start("random", 7, prior, 1000)
    assert anchors.outputs.tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("kind", ["classes", "numbers"])
@pytest.mark.parametrize("count", [25, 50, 59, 60])
def test_random_points_are_other_outputs_of_the_same_inputs_where_those_run_out(kind: str, count: int) -> None:
    """Every input once, with its class, before any twice; no pair of input and output twice."""
    x, y = torch.randn(20, 2, dtype=D), torch.randint(0, 3, (20,))
    network, prior, pool = placement_setting(x, y if kind == "classes" else torch.randn(20, 3, dtype=D))
    anchors = Placement(network, pool, generator()).start("random", count, prior, 1000)
    chosen = numbers(anchors.inputs, x)
    assert len(set(zip(chosen, anchors.outputs.tolist(), strict=True))) == len(chosen) == count
    assert len(set(chosen[:20])) == 20
    often = Counter(chosen).values()
    assert max(often) - min(often) <= 1
    if kind == "classes":
        assert torch.equal(anchors.outputs[:20], y[chosen[:20]])


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["embedding", "tuple_input", "dict_input"])
def test_inputs_that_have_no_centres_are_data_as_they_are(name: str, start: str) -> None:
    """Whole numbers, or several tensors."""
    case = BY_NAME[name]
    inputs, y = case.batch(9), problems.targets(case, 9)
    network = Network.build(case.build(), inputs)
    prior = lw.isotropic(1.0).bound(network.selection, network.theta())
    pool = DrawnRows.draw(Data([(inputs, y)], CPU), 9, generator())
    anchors = Placement(network, pool, generator()).start(start, 5, prior, 1000)
    first = lambda tree: next(iter(tree.values())) if isinstance(tree, dict) else tree
    first_of = lambda tree: first(tree)[0] if isinstance(tree, tuple) else first(tree)
    chosen = numbers(first_of(anchors.inputs), first_of(inputs))
    if start in ("kmeans", "random"):
        assert torch.equal(anchors.outputs, y[chosen])
    else:
        assert len(anchors) == 5


@pytest.mark.parametrize("start", STARTS)
def test_the_generator_decides(start: str) -> None:
    x, y = clouds()
    network, prior, pool = placement_setting(x, y)
    one, two = (Placement(network, pool, generator(3)).start(start, 9, prior, 12) for _ in range(2))
    assert torch.equal(one.inputs, two.inputs)
    assert torch.equal(one.outputs, two.outputs)
    others = [Placement(network, pool, generator(seed)).start(start, 9, prior, 12).inputs for seed in range(4, 8)]
    assert any(other.shape != one.inputs.shape or not torch.equal(other, one.inputs) for other in others)


@pytest.mark.parametrize(
    ("targets", "outputs", "expected"),
    [
        (torch.tensor([2, 0, 1]), 3, [2, 0, 1]),
        (torch.tensor([[2], [0], [1]]), 3, [2, 0, 1]),
        (torch.tensor([2, -100, 1]), 3, [2, 0, 1]),
        (torch.tensor([True, False]), 2, [1, 0]),
        (torch.tensor([0.0, 1.0]), 3, None),
        (torch.tensor([0, 1]), 1, None),
        (torch.zeros(4, 3, dtype=torch.long), 3, None),
    ],
)
def test_targets_that_are_classes(targets: Tensor, outputs: int, expected: list[int] | None) -> None:
    labels = class_labels(targets, outputs)
    assert (None if labels is None else labels.tolist()) == expected


# VaLLA keeps the output of the network as its mean, which needs that output to be in the space of the tangent kernel.
# With a dense output layer it is: f = W h + b is linear in W and b.


@pytest.mark.parametrize("bias", [True, False])
def test_the_output_is_the_jacobian_times_the_output_layer(bias: bool) -> None:
    torch.manual_seed(0)
    middle = [nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh()]
    net, x = nn.Sequential(*middle, nn.Linear(5, 3, bias=bias)).double(), torch.randn(11, 2, dtype=D)
    network = Network.build(net, x)
    last = sum(p.numel() for p in net[4].parameters())
    vector = torch.cat([torch.zeros(network.selection.size - last, dtype=D), network.theta()[-last:]])
    assert_close(network.jvp(x, vector[None])[0], net(x))


# Inducing points learned on batches: natural-gradient steps, objective, prior and noise, cost of a step.

MLP = BY_NAME["mlp"]


def fixed_points(prior: Any = 0.5, count: int = 6) -> tuple[InducingPoints, Data]:
    """Points away from the data."""
    problem = replace(fitted(lw.Full(), prior=prior).posterior.problem, learn_prior=False)
    anchors = Anchors(problem.network, torch.linspace(-2.5, 2.5, count, dtype=D)[:, None], torch.zeros(count).long())
    return InducingPoints(problem, anchors, exact().posterior.statistics, 40, False), Data([curve()], CPU)


def test_a_natural_gradient_step_on_all_data_is_the_closed_form() -> None:
    """A step of length one from any state gives I + Σ T Λ Tᵀ / φ, and with it the same posterior."""
    start, data = fixed_points()
    state = Stochastic.of(start, 0.0)
    state.inducing = Inducing(3 * torch.eye(6, dtype=D))
    state.step(Batch(*curve()), None, 1.0)
    white = smooth_whitening(start.anchors.kernel(start.problem.prior))
    jac = dense.jacobian(model(), curve()[0], 40).flatten(0, 1)
    z = dense.jacobian(model(), start.anchors.inputs, 6).flatten(0, 1)
    rows = inducing.kernel(jac, z, start.problem.prior.vector) @ white
    assert_close(state.inducing.precision, torch.eye(6, dtype=D) + rows.T @ rows / NOISE**2, SOLVED)
    closed = start.posterior(data)
    learned = replace(start, inducing=state.inducing).posterior(data)
    x = torch.linspace(-4, 4, 9, dtype=D)[:, None]
    assert_close(learned(x).cov, closed(x).cov, 0.4)
    exact_cov = inducing.covariance(dense.jacobian(model(), x, 9).flatten(0, 1), z, jac, torch.eye(40, dtype=D) / 0.04,
                                    start.problem.prior.vector)  # fmt: skip
    assert_close(closed(x, joint=True).cov.reshape(9, 9), exact_cov, SOLVED)


def test_weighted_batches_average_to_the_closed_form() -> None:
    """Every datum once, in steps of length 1, 1/2, 1/3, ...: each batch is an estimate for all data."""
    start, _ = fixed_points()
    one, other = (Stochastic.of(start, 0.0) for _ in range(2))
    one.step(Batch(*curve()), None, 1.0)
    for i, rows in enumerate(torch.arange(40).split(10)):
        other.step(Batch(*(t[rows] for t in curve())), None, 1 / (i + 1))
    assert_close(other.inducing.precision, one.inducing.precision, SOLVED)


@pytest.mark.parametrize("learn", [False, True])
def test_the_objective_of_a_step_is_the_bound(learn: bool) -> None:
    """At the optimal covariance it is minus the log evidence, without the size of the weights if the prior is given."""
    start, data = fixed_points()
    start = replace(start, problem=replace(start.problem, learn_prior=learn), log_scale=torch.tensor(0.4, dtype=D))
    state = Stochastic.of(start, 0.0)
    state.step(Batch(*curve()), None, 1.0)
    value, divergence = state.step(Batch(*curve()), None, 1.0)
    closed = start.posterior(data)
    penalty = 0.0 if learn else 0.5 * float(closed.problem.prior.penalty(closed.theta))
    assert -value == pytest.approx(float(closed.log_evidence()) + penalty, rel=1e-5)
    assert divergence == pytest.approx(float(state.inducing.divergence()))


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_posterior_has_the_learned_covariance(alpha: float) -> None:
    """Prior and noise of the last state included."""
    start, data = fixed_points()
    start = replace(start, problem=replace(start.problem, learn_prior=True))
    state = Stochastic.of(start, alpha)
    log_scale, log_noise = torch.tensor(0.7, dtype=D), torch.tensor(-2.0, dtype=D)
    state.points = replace(start, log_scale=log_scale, log_noise=log_noise)
    for length in (1.0, 0.5, 0.3):
        state.step(Batch(*curve()), None, length)
    x = torch.linspace(-4, 4, 9, dtype=D)[:, None]
    with torch.no_grad():
        white = smooth_whitening(start.anchors.kernel(start.problem.prior))
        _, _, before, rows = whitened_rows(start.problem, Batch(x, x), start.anchors, white)
        s = log_scale.exp()
        expected = state.inducing.posterior_cov(s * before, s.sqrt() * rows)
    found = state.snapshot().posterior(data)
    assert_close(found(x).cov, expected, 0.4)
    assert float(found.problem.prior.values) == pytest.approx(0.5 * math.exp(-0.7))
    assert float(found.problem.likelihood.dispersion) == pytest.approx(math.exp(-2.0))


def test_locations_and_prior_are_learned_together() -> None:
    """At the end of the search the bound is flat in the precision too, without a tuner."""
    found, data = fixed_points(count=5)
    free = replace(found, problem=replace(found.problem, learn_prior=True), movable=True)
    one = learn_collapsed(free, data, 300).posterior(data)
    precision = float(one.problem.prior.values)
    moved = lambda f: one.with_problem(
        one.problem.with_prior(one.problem.prior.with_precision(torch.tensor(f * precision)))
    )
    bounds = [float(moved(f).log_evidence()) for f in (0.98, 1.0, 1.02)]
    assert bounds[1] > max(bounds[0], bounds[2])
    assert precision != pytest.approx(0.5, rel=0.1)
    settings = lw.VaLLA(steps=60, learning_rate=0.05)
    other = learn_stochastic(free, data, settings, torch.Generator().manual_seed(0)).posterior(data)
    assert 0.5 < float(other.problem.prior.values) / precision < 2


def test_predicting_learns_prior_and_noise() -> None:
    """The training data are more likely than under the posterior of the highest evidence."""
    keep = lambda posterior: posterior  # a tuner that leaves what the method has learned
    posterior = fitted(lw.VaLLA(6, alpha=1.0, steps=60, learning_rate=0.03), lw.Gaussian(), None, tuner=keep)
    assert posterior.trace is not None
    first, last = posterior.trace.steps[0], posterior.trace.steps[-1]
    assert posterior.trace.score == "energy"
    assert last.score > first.score
    assert last.precisions != first.precisions
    assert last.noise != first.noise
    x, y = curve()
    assert float(posterior.predict(x).log_prob(y).mean()) > float(exact(True).predict(x).log_prob(y).mean())
    assert float(posterior.prior.values) == pytest.approx(last.precisions[0], rel=0.1)


@pytest.mark.parametrize(
    "likelihood",
    [lw.Categorical(), lw.Categorical(link="bridge"), lw.Bernoulli(), lw.Poisson()],
    ids=["classes", "bridge", "labels", "counts"],
)
def test_predicting_classes_and_counts(likelihood: Any) -> None:
    x, y = classes()
    other = (5 * x[:, :3].abs()).long() if isinstance(likelihood, lw.Poisson) else (x[:, :3] > 0).long()
    targets = y if isinstance(likelihood, lw.Categorical) else other
    posterior = lw.fit(MLP.build(), [(x, targets)], likelihood, method=lw.VaLLA(9, alpha=1.0, steps=40))
    plain = lw.fit(MLP.build(), [(x, targets)], likelihood, method=lw.baselines.MapOnly())
    assert float(posterior.predict(x).log_prob(targets).mean()) > float(plain.predict(x).log_prob(targets).mean())


def best_covariance(rows: Tensor, gap: Tensor, alpha: float, noise: float) -> Tensor:
    """Variances at the data for the S^-1 = I + L L' of the least objective, by L-BFGS. Rows are J A^-1/2."""
    values, basis = torch.linalg.eigh(rows @ rows.mT)
    kept = values > 1e-9 * values[-1]
    white = basis[:, kept] * values[kept].sqrt()
    size = white.shape[1]
    free = (0.1 * torch.eye(size, dtype=D)).requires_grad_()

    def spread() -> tuple[Tensor, Tensor, Tensor]:
        precision = torch.eye(size, dtype=D) + free @ free.mT
        s = torch.linalg.inv(precision)
        return ((white @ s) * white).sum(1), s, precision

    def objective() -> Tensor:
        optimiser.zero_grad()
        v, s, precision = spread()
        energies = -0.5 * (gap / (noise + alpha * v) + torch.log1p(alpha * v / noise) / alpha)
        value = -energies.sum() + 0.5 * (s.trace() + torch.logdet(precision))
        value.backward()
        return value

    optimiser = torch.optim.LBFGS([free], max_iter=100, line_search_fn="strong_wolfe", tolerance_change=1e-13)
    with torch.enable_grad():
        for _ in range(3):
            optimiser.step(objective)
    return spread()[0].detach()


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_covariance_is_the_best_for_its_objective(alpha: float) -> None:
    """Also if some data are far from the network's output and would prefer a variance above the prior's."""
    x, y = curve()
    y = y.clone()
    y[::5] += 1.0
    method = lw.VaLLA(40, alpha=alpha, steps=400, batch_size=40)
    posterior = fitted(method, data=[(x, y)])
    with torch.no_grad():
        gap = (y - model()(x)).square()[:, 0]
    rows = dense.jacobian(model(), x, 40).flatten(0, 1) / math.sqrt(0.5)
    expected = best_covariance(rows, gap, alpha, NOISE**2)
    torch.testing.assert_close(posterior.functions(x).variance[:, 0], expected, rtol=1e-3, atol=1e-6)


def test_between_bound_and_prediction_the_prior_variance_converges() -> None:
    """Without the prior's part of the bound it would shrink with every step."""
    method = lw.VaLLA(6, alpha=0.8, learning_rate=0.05)
    few, many = (float(fitted(replace(method, steps=n), "regression", None).prior.values) for n in (60, 180))
    assert many == pytest.approx(few, rel=0.1)
    assert many < 10 * float(exact(learned=True).prior.values)


@pytest.mark.parametrize("noise", [0.2, 0.003])
def test_with_all_data_the_objective_falls_and_converges(noise: float) -> None:
    """Also if the noise is far below the residuals, where full natural-gradient steps oscillate."""
    fit = lambda steps: fitted(lw.VaLLA(40, alpha=0.1, steps=steps), lw.Gaussian(noise_std=noise), 1.0)
    trace, few = fit(None).trace, fit(3).trace
    assert trace is not None
    assert few is not None
    scores = [step.score for step in trace.steps]
    assert all(after > before - 1e-9 for before, after in pairwise(scores))
    assert scores[-1] == pytest.approx(scores[-min(20, len(scores) // 2)], abs=1e-2)
    assert trace.findings == ()
    assert "objective still changes by" in few.findings[-1]


class Loader:
    """Batches that are made on iteration."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = curve()
        order = x[:, 0].argsort()
        return zip(x[order].split(self.size), y[order].split(self.size), strict=True)


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_how_sorted_data_are_cut_does_not_matter(alpha: float) -> None:
    """Rows are drawn from all data, not from one batch of the loader."""
    q = torch.linspace(-2, 2, 9, dtype=D)[:, None]
    method = lw.VaLLA(5, alpha=alpha, steps=10, batch_size=10)
    whole = fitted(method, data=list(Loader(40))).functions(q).cov
    for data in (list(Loader(1)), Loader(7), list(Loader(10)), Loader(10)):
        assert_close(fitted(method, data=data).functions(q).cov, whole, SOLVED)


def rows_run(count: int, batches: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of rows that the network ran on in each step but the first."""
    seen, marks = [0], []
    network = model()
    network.register_forward_pre_hook(lambda _, args: seen.__setitem__(0, seen[0] + len(args[0])))
    original = Stochastic.step

    def noted(self: Stochastic, *args: Any) -> Any:
        found = original(self, *args)
        marks.append(seen[0])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Stochastic, "step", noted)
        data = problems.split(*curve(count), (count // batches,) * batches)
        fitted(lw.VaLLA(5, optimiser="adam", steps=6, batch_size=10, candidates=30), model=network, data=data)
    return [b - a for a, b in pairwise(marks)]


def test_the_cost_of_a_step_does_not_grow_with_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a batch and the points, for few data in one batch and for many in several."""
    few, many, several = (rows_run(n, b, monkeypatch) for n, b in ((100, 1), (2000, 1), (2000, 20)))
    assert few == many == several == [15] * 5


def test_an_objective_that_is_not_finite_is_refused() -> None:
    with pytest.raises(
        lw.errors.NumericalError, match=r"VaLLA: the objective is \S+ at step \d+.* Lower learning_rate"
    ):
        fitted(lw.VaLLA(4, alpha=1.0, learning_rate=1e4, steps=50), lw.Gaussian(), None)


def test_a_step_in_parts_is_the_step_on_the_whole_batch() -> None:
    """One part for each datum: objective, covariance, locations and prior after two steps, to rounding."""
    ends = []
    for size in ("1GiB", 1):
        start, _ = fixed_points()
        problem = replace(start.problem, learn_prior=True)
        state = Stochastic.of(replace(start, problem=problem, movable=True), 0.5)
        optimiser = state.optimiser(0.1)
        with lw.memory.limited(size):
            values = [state.step(Batch(*curve()), optimiser, 0.5)[0] for _ in range(2)]
        assert state.moves is not None
        values = torch.tensor(values, dtype=D)
        ends.append((values, state.inducing.average, state.moves.detach(), state.points.log_scale.detach()))
    for whole, parts in zip(*ends, strict=True):
        assert_close(parts, whole, SOLVED)


# Evidence of beliefs that live in a span: what they miss is a difference of traces, in float32 too.

METHODS: dict[str, Any] = {
    "valla": lw.VaLLA(50, optimiser="none"),
    "ella": lw.ELLA(400, 60, residual=True),
}


def smooth() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """One input: a few points hold nearly all of the kernel, so that traces cancel to a millionth."""
    torch.manual_seed(0)
    x = torch.randn(2000, 1)
    net = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    return net, x, net(x).detach() + 0.02 * torch.randn(2000, 1)


@pytest.mark.parametrize(("method", "prior"), [("valla", 1e-5), ("valla", 1.0), ("ella", 1e-3), ("ella", 1.0)])
def test_single_precision_has_the_evidence_of_double(method: str, prior: float) -> None:
    net, x, y = smooth()
    likelihood = lw.Gaussian(noise_std=0.02)
    single, double, full = (
        lw.fit(model, [(inputs, targets)], likelihood, method=way, prior=prior)
        for model, inputs, targets, way in (
            (net, x, y, METHODS[method]),
            (copy.deepcopy(net).double(), x.double(), y.double(), METHODS[method]),
            (copy.deepcopy(net).double(), x.double(), y.double(), lw.Full()),
        )
    )
    exact, evidence = float(full.log_evidence()), float(double.log_evidence())
    assert evidence <= exact + 1e-3
    assert float(single.log_evidence()) == pytest.approx(evidence, abs=0.5)
