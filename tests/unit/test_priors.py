"""Gaussian priors by weight, layer and group, and the kernel that they imply."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature.kronecker import prior_precision
from lapwing.networks.jacobians import Block
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.networks.tangent import LayerJacobians
from lapwing.priors import (
    BoundPrior,
    GPrior,
    Prior,
    diagonal,
    group_starting_precisions,
    grouped,
    isotropic,
    per_layer,
    per_normalised_group,
    prior_kernel,
    single_starting_precision,
    starting_precisions,
)
from tests import problems
from tests.cases import BY_NAME, CASES
from tests.references import dense, inducing, structures
from tests.references.layout import assembled, order, places
from tests.tolerances import SOLVED, assert_close

# Gaussian priors: what a precision means, and what is refused.

D = torch.float64
LIKE = torch.empty(0, dtype=D)
SELECTION = Selection(("body.weight", "body.bias", "scale", "head.weight"), ((3, 2), (3,), (4,), (2, 3)))
WHOLE = 6 + 3 + 4 + 6
EACH = torch.arange(1, WHOLE + 1, dtype=D)
PARTS = Selection(SELECTION.names, SELECTION.shapes, torch.tensor([1, 2, 7, 9, 18]))

PRIORS: dict[str, tuple[Callable[[], Prior], Tensor]] = {
    "isotropic": (lambda: isotropic(2.0), torch.full((WHOLE,), 2.0, dtype=D)),
    "isotropic tensor": (lambda: isotropic(torch.tensor(2.0)), torch.full((WHOLE,), 2.0, dtype=D)),
    "per layer, one": (lambda: per_layer(3.0), torch.full((WHOLE,), 3.0, dtype=D)),
    "per layer": (lambda: per_layer(torch.tensor([1.0, 2.0, 3.0])),
                  torch.tensor([1.0] * 9 + [2.0] * 4 + [3.0] * 6, dtype=D)),
    "per layer, named": (lambda: per_layer({"head": 3.0, "": 2.0, "body": 1.0}),
                         torch.tensor([1.0] * 9 + [2.0] * 4 + [3.0] * 6, dtype=D)),
    "diagonal": (lambda: diagonal(EACH), EACH),
    "diagonal, one": (lambda: diagonal(4.0), torch.full((WHOLE,), 4.0, dtype=D)),
    "diagonal, named": (lambda: diagonal({"body.weight": 1.0, "body.bias": 2.0, "scale": 3.0, "head.weight": 4.0}),
                        torch.tensor([1.0] * 6 + [2.0] * 3 + [3.0] * 4 + [4.0] * 6, dtype=D)),
}  # fmt: skip


@pytest.mark.parametrize("name", PRIORS)
def test_the_precision_of_every_weight(name: str) -> None:
    make, expected = PRIORS[name]
    prior = make().bound(SELECTION, LIKE)
    assert_close(prior.vector, expected)
    assert_close(prior.logdet(), expected.log().sum())
    theta = torch.randn(WHOLE, dtype=D)
    assert_close(prior.penalty(theta), (theta**2 * expected).sum())


@pytest.mark.parametrize("kind", [isotropic, per_layer, diagonal])
def test_a_number_keeps_all_its_digits(kind: Callable[..., Prior]) -> None:
    assert kind(0.6).bound(SELECTION, LIKE).vector[0].item() == 0.6  # not float32's 0.60000002


@pytest.mark.parametrize("name", [name for name in PRIORS if name != "diagonal"])
def test_a_subnetwork_takes_its_own_share(name: str) -> None:
    make, expected = PRIORS[name]
    prior = make().bound(PARTS, LIKE)
    selected = expected[PARTS.index]
    assert_close(prior.vector, selected)
    assert_close(prior.logdet(), selected.log().sum())
    theta = torch.randn(5, dtype=D)
    assert_close(prior.penalty(theta), (theta**2 * selected).sum())


@pytest.mark.parametrize("mean", [0.7, torch.tensor(0.7), torch.linspace(-1, 1, WHOLE)])
@pytest.mark.parametrize("kind", [isotropic, per_layer, diagonal])
def test_the_penalty_is_about_the_mean(mean: float | Tensor, kind: Callable[..., Prior]) -> None:
    prior = kind(2.5, mean).bound(SELECTION, LIKE)
    theta = torch.randn(WHOLE, dtype=D)
    assert_close(prior.penalty(theta), 2.5 * (theta - torch.as_tensor(mean, dtype=D)).square().sum())


def test_a_block_across_two_layers_gets_each_layers_precision() -> None:
    selection = Selection(("lin.weight", "bias"), ((3, 2), (3,)))
    prior = per_layer({"lin": 1.0, "": 5.0}).bound(selection, LIKE)
    assert prior.on(Block("rows", "lin.weight", (3, 2), "bias")).whole.tolist() == [[[1, 1, 5]] * 3]


def test_a_block_may_have_one_entry() -> None:
    prior = diagonal(torch.tensor([2.0])).bound(Selection(("weight",), ((1, 1),)), LIKE)
    assert prior.on(Block("rows", "weight", (1, 1))).whole.item() == 2.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: isotropic(0.0), "run from 0 to 0; expected positive, finite"),
        (lambda: isotropic(-1.0), "run from -1 to -1"),
        (lambda: isotropic(math.nan), "nan"),
        (lambda: isotropic(math.inf), "inf"),
        (lambda: diagonal(torch.cat([EACH[1:], torch.zeros(1)])), "run from 0 to 19"),
        (lambda: isotropic(torch.ones(2)), "the prior Isotropic got 2 precisions; expected 1"),
        (
            lambda: per_layer(torch.ones(4)),
            "PerLayer got 4 precisions; expected 1 or 3, one for each of body",
        ),
        (lambda: diagonal(torch.ones(7)), "the prior DiagonalPrior got 7 precisions; expected 1 or 19"),
        (lambda: per_layer({"body": 1.0}), r"missing \['', 'head'\], unknown \[\]"),
        (lambda: diagonal({"body.weight": 1.0, "tail": 2.0}), r"unknown \['tail'\]"),
        (lambda: isotropic(1.0, torch.zeros(4)), "prior mean has 4 entries; expected 1 or 19"),
    ],
)
def test_what_is_refused(make: Callable[[], Prior], message: str) -> None:
    with pytest.raises(lw.errors.NumericalError, match=message):
        make().bound(SELECTION, LIKE)


def test_gradients_reach_the_given_precisions() -> None:
    given = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)
    prior = per_layer(given).bound(SELECTION, LIKE)
    prior.logdet().backward()
    assert_close(given.grad, torch.tensor([9.0, 4.0, 6.0], dtype=D) / given.detach())


# Priors by groups of parameters and the g-prior: what they mean, for every method, and what is refused.

PATTERNS = {r".*bias|scale": 0.3, r".*\.weight": 5.0}
GROUPS_EACH = torch.tensor([5.0] * 6 + [0.3] * 7 + [5.0] * 6, dtype=D)
MLP = BY_NAME["mlp"]
METHODS: dict[str, Any] = {
    "full": lw.Full(), "diagonal": lw.Diagonal(), "kron": lw.Kron(), "low_rank": lw.LowRank(rank=18),
}  # fmt: skip
NOISE = 0.49  # a variance other than one: the g-prior takes H at unit dispersion


def regression(method: Any, prior: Any, **options: Any) -> lw.Fitted:
    data, noise = problems.number_batches(MLP), lw.Gaussian(noise_std=math.sqrt(NOISE))
    return lw.fit(MLP.build(), data, noise, method=method, prior=prior, **options)


def unit_curvature(method: str) -> tuple[Tensor, Tensor]:
    """(H, diag(H) floored) of the small regression by brute force."""
    model, x = MLP.build(), MLP.batch(6)
    matrix = structures.structured(method, dense.unit_ggn(model, x), model, x)
    scale = structures.scale_by_factor if method == "kron" else structures.scale_by_layer
    return matrix, scale(matrix.diagonal(), structures.layers(model))


def evidence(model: nn.Module, precision: Tensor, prior: Tensor) -> Tensor:
    """log p(D | w̃) + ½ log det A - ½ w̃ᵀ A w̃ - ½ log det Λ of the small regression."""
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    x, y = (torch.cat(parts) for parts in zip(*problems.number_batches(MLP), strict=True))
    fit = torch.distributions.Normal(model(x).detach(), math.sqrt(NOISE)).log_prob(y).sum()
    return fit + 0.5 * (prior.log().sum() - theta @ (prior * theta) - torch.linalg.slogdet(precision)[1])


def assert_dense(posterior: lw.Fitted, matrix: Tensor, prior: Tensor, power: float = 2 / 3) -> None:
    """Outputs, weights and evidence are those of Λ = H/φ + diag(prior)."""
    precision = matrix / NOISE + torch.diag(prior)
    covariance = torch.linalg.inv(precision)
    new = MLP.batch(4, seed=1)
    jac = dense.jacobian(MLP.build(), new, 4)
    assert_close(posterior.prior.vector, prior, power)
    assert_close(posterior.functions(new).cov, dense.output_covariance(jac, covariance), power)
    rows = posterior.posterior.precision.sample(torch.eye(len(prior), dtype=D))
    assert_close(rows.T @ rows, covariance, power)
    assert_close(posterior.log_evidence(), evidence(MLP.build(), precision, prior), power)


# Groups by patterns.


@pytest.mark.parametrize("selection", [SELECTION, PARTS], ids=["all weights", "single weights"])
@pytest.mark.parametrize("mean", [0.0, 0.7])
def test_a_group_for_each_pattern(selection: Selection, mean: float) -> None:
    prior = grouped(PATTERNS, mean).bound(selection, LIKE)
    expected = selection.pick(GROUPS_EACH)
    assert prior.groups == (r".*\.weight", r".*bias|scale")  # in the order of the parameters
    assert prior.values.tolist() == [5.0, 0.3]
    assert_close(prior.vector, expected)
    assert_close(prior.logdet(), expected.log().sum())
    theta = torch.randn(selection.size, dtype=D)
    assert_close(prior.penalty(theta), ((theta - mean) ** 2 * expected).sum())
    assert_close(prior.sum_groups(theta), torch.stack([theta[expected == 5.0].sum(), theta[expected == 0.3].sum()]))


@pytest.mark.parametrize(
    ("patterns", "error", "message"),
    [
        ({r".*weight": 1.0}, lw.errors.NumericalError, r"'body\.bias' matches 0 of the patterns .*; expected one"),
        ({r".*": 1.0, r"head.*": 2.0}, lw.errors.NumericalError, r"'head\.weight' matches 2 of the patterns"),
        (
            {r"body": 1.0, r".*": 1.0, r"tail": 2.0},
            lw.errors.NumericalError,
            r"unknown \['body', 'tail'\]",
        ),  # not whole names
        ({r".*weight": -1.0, r".*bias|scale": 1.0}, lw.errors.NumericalError, "run from -1 to 1; expected positive"),
        ({r".*weight": math.nan, r".*bias|scale": 1.0}, lw.errors.NumericalError, "nan"),
        ({r"[": 1.0}, lw.errors.UnsupportedError, r"\['\['\] is not a regular expression: unterminated"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(patterns: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        grouped(patterns).bound(SELECTION, LIKE)


@pytest.mark.parametrize("method", METHODS)
def test_groups_enter_the_posterior_weight_by_weight(method: str) -> None:
    """Separate precisions for weights and biases: inside a Kronecker block another precision for the last input."""
    matrix, _ = unit_curvature(method)
    where = structures.layers(MLP.build())
    each = torch.full((83,), 0.7, dtype=D)
    for index in where.values():
        each[index[:, -1]] = 3.0
    posterior = regression(METHODS[method], lw.grouped({".*weight": 0.7, ".*bias": 3.0}))
    assert_dense(posterior, matrix, each, SOLVED if method == "low_rank" else 2 / 3)


def test_groups_that_a_block_cannot_hold_are_refused() -> None:
    by_layer = regression(lw.EKron(), lw.grouped({r"[02]\..*": 0.7, r"4\..*": 3.0}))
    same = regression(lw.EKron(), lw.per_layer(torch.tensor([0.7, 0.7, 3.0], dtype=D)))
    assert_close(by_layer.log_evidence(), same.log_evidence())
    with pytest.raises(lw.errors.UnsupportedError, match=r"prior differs inside 0\.weight; EKron"):
        regression(lw.EKron(), lw.grouped({".*weight": 0.7, ".*bias": 3.0})).log_evidence()


def test_groups_are_tuned_each() -> None:
    one = regression(lw.Full(), None)
    start = lw.grouped(dict.fromkeys((".*weight", ".*bias"), float(one.prior.values)))
    each = one.with_prior(start).tuned(lw.tuners.MaximiseEvidence(tolerance=1e-9))
    assert each.prior.groups == (".*weight", ".*bias")
    best = float(each.log_evidence())
    assert best > float(one.log_evidence()) + 1e-3
    for number in range(2):
        for factor in (0.9, 0.99, 1.01, 1.1):
            values = each.prior.values.clone()
            values[number] *= factor
            moved = each.with_prior(each.prior.with_precision(values))
            assert float(moved.log_evidence()) < best


def test_a_prior_by_groups_can_be_used_again() -> None:
    """As any prior: in with_prior() and in another fit. On other weights its patterns must be given anew."""
    posterior = regression(lw.Full(), lw.grouped({".*weight": 0.7, ".*bias": 3.0})).tuned()
    assert_close(posterior.with_prior(posterior.prior).log_evidence(), posterior.log_evidence())
    assert_close(regression(lw.Kron(), posterior.prior).prior.vector, posterior.prior.vector)
    with pytest.raises(lw.errors.UnsupportedError, match=r"belongs to other weights already; give grouped"):
        regression(lw.Full(), posterior.prior, weights=lw.last_layer)


def test_groups_of_a_normalised_network_are_named_by_it() -> None:
    members = dict(zip(SELECTION.names, ("body", "body", "rest", "rest"), strict=True))
    prior = per_normalised_group(torch.tensor([2.0, 3.0])).bound(SELECTION, LIKE, members)
    assert prior.groups == ("body", "rest")
    assert_close(prior.vector, torch.tensor([2.0] * 9 + [3.0] * 10, dtype=D))
    assert_close(prior.logdet(), 9 * torch.tensor(2.0, dtype=D).log() + 10 * torch.tensor(3.0, dtype=D).log())
    with pytest.raises(lw.errors.UnsupportedError, match=r"come from runs of the network; give the prior to fit\(\)"):
        per_normalised_group(1.0).bound(SELECTION, LIKE)


# The g-prior.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("g", [0.2, 30.0])
def test_g_prior_is_g_times_the_diagonal(method: str, g: float) -> None:
    matrix, scale = unit_curvature(method)
    raised = scale > matrix.diagonal() * (1 + 1e-9)
    assert bool(raised.any())  # dead units: the floor is part of the test
    assert not bool(raised.all())
    posterior = regression(METHODS[method], lw.priors.g_prior(g))
    assert isinstance(posterior.prior.given, GPrior)
    assert_dense(posterior, matrix, g * scale, SOLVED if method == "low_rank" else 2 / 3)


@pytest.mark.parametrize("method", METHODS)
def test_g_prior_afterwards_is_that_of_the_fit(method: str) -> None:
    at_once = regression(METHODS[method], lw.priors.g_prior(0.6))
    later = regression(METHODS[method], 1.0).with_prior(lw.priors.g_prior(0.6))
    assert_close(later.prior.vector, at_once.prior.vector)
    assert_close(later.log_evidence(), at_once.log_evidence())
    assert_close(later.with_prior(later.prior).log_evidence(), at_once.log_evidence())


def test_g_prior_of_lookups_in_kronecker_blocks() -> None:
    """Embeddings: rows that no token asked for, and padding, have no curvature at all, and get a floor."""
    case = BY_NAME["embedding"]
    model = case.build()
    posterior = problems.fit(case, lw.Kron(), model=model, prior=lw.priors.g_prior(0.4))
    kinds = dict(
        zip((b.weight for b in posterior.network.layout), posterior.posterior.curvature.structures(), strict=True)
    )
    assert kinds["table.weight"] == "KroneckerBlock"
    matrix = assembled(posterior.posterior.curvature)
    where = places(posterior.network.selection.names, posterior.network.selection.shapes)
    blocks = {b.weight: order(b, where).reshape(b.form[1:] if b.linear else (-1,)) for b in posterior.network.layout}
    assert blocks["table.weight"].shape == (6, 7)
    assert matrix.diagonal()[blocks["table.weight"]][:, 0].tolist() == [0.0] * 6  # padding
    linear = {name: index for name, index in blocks.items() if kinds[name] == "KroneckerBlock"}
    others = {name: index for name, index in blocks.items() if name not in linear}
    scale = structures.scale_by_layer(structures.scale_by_factor(matrix.diagonal(), linear), others)
    assert float(scale.min()) > 0
    precision = matrix + 0.4 * torch.diag(scale)
    covariance = torch.linalg.inv(precision)
    new = torch.cat([case.batch(3, seed=1), torch.tensor([[0, 0, 6, 6]])])
    jac = dense.jacobian(model, new, 4)
    assert_close(posterior.prior.vector, 0.4 * scale)
    assert_close(posterior.functions(new).cov, dense.output_covariance(jac, covariance))
    joint = posterior.functions(new, joint=True).cov.reshape(12, 12)
    assert_close(joint, dense.joint_covariance(jac, covariance))
    inner = posterior.posterior.precision
    assert_close(inner.logdet(), torch.linalg.slogdet(precision)[1])
    assert_close(inner.variances(), covariance.diagonal())
    assert_close(inner.solve(torch.eye(len(scale), dtype=D)), covariance)
    rows = inner.sample(torch.eye(len(scale), dtype=D))
    assert_close(rows.T @ rows, covariance)


def test_g_prior_of_ekron_is_refused() -> None:
    """In the fit, not at the first prediction."""
    message = r"EKron allows one precision for each block.*method=Kron\(\)"
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        regression(lw.EKron(), lw.priors.g_prior())
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        regression(lw.EKron(), lw.isotropic()).with_prior(lw.priors.g_prior())


@pytest.mark.parametrize("method", ["full", "diagonal", "low_rank"])
def test_g_prior_of_single_weights(method: str) -> None:
    """Weights that are not selected have no say in what is typical of a layer."""
    chosen = torch.tensor([0, 1, 2, 3, 24, 26, 30, 33, 41, 60, 66, 71, 80])
    model = MLP.build()
    ggn = dense.unit_ggn(model, MLP.batch(6))
    whole = structures.layers(model)
    inside = {k: torch.isin(chosen, v).nonzero()[:, 0] for k, v in whole.items()}
    scale = structures.scale_by_layer(ggn.diagonal()[chosen], inside)
    chosen_method = lw.LowRank(rank=13) if method == "low_rank" else METHODS[method]
    posterior = regression(chosen_method, lw.priors.g_prior(0.7), weights=lw.subnetwork(chosen))
    assert_close(posterior.prior.vector, 0.7 * scale, SOLVED)


@pytest.mark.parametrize("method", [lw.Full(), lw.LowRank(rank=18), lw.Kron(), lw.Diagonal()])
def test_where_most_weights_are_dead_the_floor_is_not_rounding(method: Any) -> None:
    """Four of five features of the last layer are nought on all data; a new input may wake them up."""
    x = torch.rand(6, 4, dtype=D)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    model[0].bias.data[1:] = -9.0
    model[0].bias.data[0] = 9.0
    fitted = lw.fit(model, [(x, torch.randn(6, 3, dtype=D))], lw.Gaussian(noise_std=0.5), method=method,
                    weights=lw.last_layer, prior=lw.priors.g_prior(1.0))  # fmt: skip
    a = torch.cat([model[:2](x).detach(), torch.ones(6, 1, dtype=D)], 1)
    counts = a.square().sum(0)
    typical = counts.mean() if isinstance(method, lw.Kron) else (counts * 3).sum() / 18
    expected = counts.clamp_min(float(1e-3 * typical))
    weights, biases = fitted.prior.vector[:15].reshape(3, 5), fitted.prior.vector[15:]
    assert_close(weights, expected[None, :5].expand(3, 5), SOLVED)
    assert_close(biases, expected[5:].expand(3), SOLVED)
    assert float(fitted.functions(torch.full((1, 4), 30.0, dtype=D)).std.max()) < 1e6


def rescaled(model: nn.Sequential, k: float) -> nn.Sequential:
    """The same function of x: ReLU lets a positive factor through."""
    other = nn.Sequential(*(nn.Linear(m.in_features, m.out_features) if isinstance(m, nn.Linear) else nn.ReLU()
                            for m in model)).double()  # fmt: skip
    other.load_state_dict(model.state_dict())
    other[0].weight.data *= k
    other[0].bias.data *= k
    other[2].weight.data /= k
    return other


@pytest.mark.parametrize("k", [0.1, 10.0])
@pytest.mark.parametrize("method", ["full", "diagonal", "kron"])
def test_g_prior_does_not_see_how_the_weights_are_scaled(method: str, k: float) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    x, y, new = torch.randn(12, 4, dtype=D), torch.randn(12, 3, dtype=D), torch.randn(5, 4, dtype=D)

    def fitted(net: nn.Module, prior: Any) -> lw.Fitted:
        return lw.fit(net, [(x, y)], lw.Gaussian(noise_std=0.5), method=METHODS[method], prior=prior)

    one, two = (fitted(net, lw.priors.g_prior(0.3)) for net in (model, rescaled(model, k)))
    assert_close(two.functions(new).mean, one.functions(new).mean)
    assert_close(two.functions(new).cov, one.functions(new).cov, SOLVED)
    assert_close(two.log_evidence(), one.log_evidence(), SOLVED)
    tight = lw.tuners.MaximiseEvidence(tolerance=1e-9)
    assert_close(two.tuned(tight).prior.values, one.tuned(tight).prior.values, 0.4)
    one, two = (fitted(net, 0.3).functions(new).variance for net in (model, rescaled(model, k)))
    assert float(((two - one).abs() / one).max()) > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_gradient_in_g_equals_finite_differences(method: str) -> None:
    fitted = regression(METHODS[method], 1.0)
    g = torch.tensor(0.6, dtype=D, requires_grad=True)
    fitted.with_prior(lw.priors.g_prior(g)).log_evidence().backward()
    high, low = (fitted.with_prior(lw.priors.g_prior(0.6 + s * 1e-5)).log_evidence() for s in (1, -1))
    assert_close(g.grad, (high - low).detach() / 2e-5, SOLVED)


def test_the_curvature_of_other_weights_is_refused() -> None:
    posterior = regression(lw.Full(), lw.priors.g_prior())
    with pytest.raises(lw.errors.NumericalError, match=r"curvature of 83 weights already, and there are 18"):
        regression(lw.Full(), posterior.prior, weights=lw.last_layer)


def test_without_curvature_a_g_prior_stays_open() -> None:
    plain = regression(lw.baselines.MapOnly(), lw.priors.g_prior())
    for posterior in (plain, plain.with_prior(lw.priors.g_prior(2.0))):
        assert isinstance(posterior.prior.given, GPrior)
        assert float(posterior.functions(MLP.batch(2)).variance.max()) == 0


# Files.

STORED: list[tuple[str, Any, Any]] = [
    ("mlp", lw.Full(), lw.isotropic(2.0, 0.5)),
    ("mlp", lw.Full(), lw.isotropic(2.0, torch.linspace(-1, 1, 83))),
    ("mlp", lw.Full(), lw.per_layer(torch.tensor([1.0, 2.0, 3.0]))),
    ("mlp", lw.Full(), lw.priors.diagonal(torch.linspace(1, 2, 83))),
    ("mlp", lw.Full(), lw.grouped({".*weight": 0.7, ".*bias": 3.0}, 0.2)),
    ("mlp", lw.Kron(), lw.grouped({".*weight": 0.7, ".*bias": 3.0})),
    ("mlp", lw.EKron(), lw.grouped({r"[02]\..*": 0.7, r"4\..*": 3.0})),
    ("mlp", lw.Full(), lw.priors.g_prior(0.6, torch.linspace(-1, 1, 83))),
    ("mlp", lw.Diagonal(), lw.priors.g_prior(0.6)),
    ("mlp", lw.LowRank(rank=7), lw.priors.g_prior(0.6)),
    ("embedding", lw.Kron(), lw.priors.g_prior(0.6)),
    ("norms", lw.Full(), lw.priors.per_normalised_group(0.9)),
    ("norms", lw.Kron(), lw.priors.per_normalised_group(0.9)),
]


@pytest.mark.parametrize(("case", "method", "prior"), STORED)
def test_round_trip_through_a_file(case: str, method: Any, prior: Any, tmp_path: Path) -> None:
    chosen = BY_NAME[case]
    model = chosen.build()
    first = problems.fit(chosen, method, model=model, prior=prior).tuned()
    first.save(tmp_path / "one")
    again = lw.load(tmp_path / "one", model)
    again.save(tmp_path / "two")
    twice = lw.load(tmp_path / "two", chosen.build())
    inputs = chosen.batch(3, seed=1)
    for posterior in (again, twice):
        assert (type(posterior.prior.given), posterior.prior.groups, posterior.prior.members) == (
            type(first.prior.given), first.prior.groups, first.prior.members)  # fmt: skip
        assert torch.equal(posterior.prior.values, first.prior.values)
        assert torch.equal(posterior.prior.vector, first.prior.vector)
        assert torch.equal(torch.as_tensor(posterior.prior.mean), torch.as_tensor(first.prior.mean))
        assert_close(posterior.log_evidence(), first.log_evidence())
        assert_close(posterior.functions(inputs).cov, first.functions(inputs).cov)
    higher = first.prior.with_precision(3 * first.prior.values)
    assert_close(again.with_prior(higher).log_evidence(), first.with_prior(higher).log_evidence())
    assert_close(again.with_prior(higher).tuned().prior.values, first.with_prior(higher).tuned().prior.values, SOLVED)


@pytest.mark.parametrize("method", [lw.Full(), lw.Kron(), lw.Diagonal()])
def test_a_g_prior_goes_to_float32_and_back(method: Any, tmp_path: Path) -> None:
    model = MLP.build()
    first = regression(method, lw.priors.g_prior(0.6))
    first.save(tmp_path / "net")
    again = lw.load(tmp_path / "net", model.float())
    assert torch.equal(again.prior.vector, first.prior.vector)  # precisions are float64 whatever the network is
    narrow = MLP.batch(3, torch.float32, seed=1)
    assert_close(again.functions(narrow).std, first.functions(narrow.double()).std, 0.5, torch.float32)
    fresh = lw.fit(MLP.build(torch.float32), [(x.float(), y.float()) for x, y in problems.number_batches(MLP)],
                   lw.Gaussian(noise_std=math.sqrt(NOISE)), method=method, prior=lw.priors.g_prior(0.6))  # fmt: skip
    assert_close(fresh.functions(narrow).std, first.functions(narrow.double()).std, 0.5, torch.float32)


def test_a_stored_normalised_group_takes_other_precisions(tmp_path: Path) -> None:
    case = BY_NAME["norms"]
    model = case.build()
    first = problems.fit(case, lw.Full(), model=model, prior=lw.priors.per_normalised_group())
    assert len(first.prior.groups) > 1
    first.save(tmp_path / "net")
    again = lw.load(tmp_path / "net", model)
    other = lw.priors.per_normalised_group(torch.arange(1.0, 1 + len(first.prior.groups)))
    assert_close(again.with_prior(other).log_evidence(), first.with_prior(other).log_evidence())


# Precisions from which a search starts: γ / |w|² with γ at half of its largest value.

WEIGHTS = Selection(("a.weight", "b.weight"), ((1, 3), (1, 2)))
THETA = torch.tensor([1.0, -2.0, 2.0, 0.5, 0.5], dtype=D)


def bound(prior: BoundPrior) -> BoundPrior:
    return prior.bound(WEIGHTS, torch.empty(0))


def test_one_precision() -> None:
    """Two data for five weights determine at most two; |w|² is 9.5."""
    expected = torch.tensor(0.5 * 2 / 9.5, dtype=D)
    assert_close(starting_precisions(bound(lw.isotropic()), THETA, rows=2), expected)
    assert_close(single_starting_precision(THETA, rows=2), expected)
    enough = torch.tensor(0.5 * 5 / 9.5, dtype=D)
    assert_close(starting_precisions(bound(lw.isotropic()), THETA, rows=100), enough)


def test_a_group_whose_weights_are_larger_starts_at_a_smaller_precision() -> None:
    prior = bound(lw.per_layer())
    expected = torch.tensor([0.5 * 3 / 9, 0.5 * 2 / 0.5], dtype=D)
    assert_close(starting_precisions(prior, THETA, rows=7), expected)
    scale = torch.tensor([10.0] * 3 + [1.0] * 2, dtype=D)
    assert_close(starting_precisions(prior, scale * THETA, rows=7), expected / torch.tensor([100.0, 1.0], dtype=D))


def test_one_precision_for_each_weight_starts_at_one_value() -> None:
    values = starting_precisions(bound(lw.priors.diagonal()), THETA, rows=100)
    assert_close(values, torch.full((5,), 0.5 * 5 / 9.5, dtype=D))


def test_weights_at_the_prior_mean() -> None:
    """Alone, their precision is infinite; to start from, it is cut."""
    theta = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=D)
    prior = bound(lw.per_layer())
    assert_close(starting_precisions(prior, theta, rows=100), torch.tensor([0.5, 1e8], dtype=D))
    assert bool(group_starting_precisions(prior, theta, rows=100)[1].isinf())


# The kernel that a prior makes between outputs, against J A⁻¹ J'ᵀ by dense matrices.

ONE, OTHER = 3, 2
KINDS = ["isotropic", "per_layer", "diagonal", "g", "g of single weights"]
SINGLE = ["mlp", "cnn", "conv_zoo", "norms", "attention", "gru", "embedding", "tied", "shared_weight"]


@cache
def rows(name: str) -> tuple[Tensor, Tensor]:
    """Of two batches, (B M, P) each, one backward pass for every row."""
    case, model = BY_NAME[name], BY_NAME[name].build()
    return (
        dense.jacobian(model, case.batch(ONE), ONE).flatten(0, 1),
        dense.jacobian(model, case.batch(OTHER, seed=8), OTHER).flatten(0, 1),
    )


def prior(kind: str, network: Network) -> BoundPrior:
    """With precisions that are all different, where the kind has several."""
    size, theta = network.selection.size, network.theta()
    spread = torch.linspace(0.3, 4.0, size, dtype=D)[torch.randperm(size, generator=torch.Generator().manual_seed(1))]
    if kind == "isotropic":
        return lw.isotropic(0.7).bound(network.selection, theta)
    if kind == "per_layer":
        layers = len(set(network.selection.layer_of()))
        return lw.per_layer(torch.linspace(0.2, 3.0, layers, dtype=D)).bound(network.selection, theta)
    if kind == "diagonal":
        return lw.priors.diagonal(spread).bound(network.selection, theta)
    scale = spread if kind == "g of single weights" else torch.full((size,), 2.5, dtype=D)
    return lw.priors.g_prior(0.6).bound(network.selection, theta).with_scale(scale)


def jacobians(network: Network, name: str) -> tuple[LayerJacobians, LayerJacobians]:
    case = BY_NAME[name]
    return tuple(network.linearise(case.batch(n, seed=s)).jacobians() for n, s in ((ONE, 5), (OTHER, 8)))  # type: ignore[return-value]


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_dense_matrices(name: str) -> None:
    """Between two batches and of one with itself; rows run over outputs within samples."""
    network = Network.build(BY_NAME[name].build(), BY_NAME[name].batch(ONE))
    jac, other_jac = jacobians(network, name)
    one, other = rows(name)
    for kind in KINDS:
        given = prior(kind, network)
        assert_close(prior_kernel(jac, given, other_jac), inducing.kernel(one, other, given.vector))
        assert_close(prior_kernel(jac, given), inducing.kernel(one, one, given.vector))
        assert_close(prior_kernel(jac.materialise(), given, other_jac), inducing.kernel(one, other, given.vector))
        assert_close(
            prior_kernel(jac.materialise(), given, other_jac.materialise()), inducing.kernel(one, other, given.vector)
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SINGLE)
def test_single_weights(name: str, kind: str) -> None:
    """Of those that are not selected nothing is left, whatever their precision would be."""
    case, (one, other) = BY_NAME[name], rows(name)
    index = torch.arange(1, one.shape[1], 3)
    network = Network.build(case.build(), case.batch(ONE), lw.subnetwork(index))
    jac, other_jac = jacobians(network, name)
    given = prior(kind, network)
    assert_close(prior_kernel(jac, given, other_jac), inducing.kernel(one[:, index], other[:, index], given.vector))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "norms", "embedding"])
def test_slopes_in_the_precisions(name: str, kind: str) -> None:
    """Of a sum of entries, against -Σ weights J_i J'_i / a_i², group by group."""
    network = Network.build(BY_NAME[name].build(), BY_NAME[name].batch(ONE))
    jac, other_jac = jacobians(network, name)
    given = prior(kind, network)
    leaf = given.values.detach().clone().requires_grad_()
    kernel = prior_kernel(jac, given.with_precision(leaf), other_jac)
    mixed = torch.randn(kernel.shape, dtype=D)
    (slope,) = torch.autograd.grad((kernel * mixed).sum(), leaf)
    one, other = rows(name)
    scale = torch.ones(len(given.vector), dtype=D) if given.scale is None else given.scale
    each = -((mixed @ other) * one).sum(0) * scale / given.vector.square()
    assert_close(slope.reshape(-1), given.sum_groups(each))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "resnet_batchnorm", "token_level"])
def test_the_precision_without_data_has_the_kernels_blocks(name: str, kind: str) -> None:
    """Within each sample and token what the whole kernel has there."""
    network = Network.build(BY_NAME[name].build(), BY_NAME[name].batch(ONE))
    jac, _ = jacobians(network, name)
    given = prior(kind, network)
    precision = prior_precision(given, network.layout, network.selection)
    (one, _), classes = rows(name), network.output_shape[-1]
    data = one.reshape(-1, classes, one.shape[1])
    expected = dense.output_covariance(data, torch.diag(1 / given.vector))
    assert_close(precision.quadratic(jac).reshape(expected.shape), expected)
    assert_close(precision.quadratic(jac, full=False).reshape(-1), expected.diagonal(dim1=1, dim2=2).reshape(-1))
    assert_close(precision.cross(jac), inducing.kernel(one, one, given.vector))
