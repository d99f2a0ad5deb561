"""Losses, roots of their Hessians, and predictives of every likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal, Poisson

import lapwing as lw
from lapwing.errors import DataError, UnsupportedError
from lapwing.likelihoods.base import OutputHessian, weighted_count
from lapwing.posteriors.base import Posterior
from lapwing.registry import METHODS
from lapwing.values.gaussian import FunctionGaussian, FunctionSamples
from tests.tolerances import SOLVED, assert_close, assert_within, tolerance

# Every likelihood against PyTorch's own losses and distributions, and its root against autograd.

D = torch.float64
B = 6


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(4))


def classes(*shape: int, of: int = 3) -> Tensor:
    return torch.randint(0, of, shape, generator=torch.Generator().manual_seed(8))


WEIGHTS = torch.tensor([0.3, 2.0, 1.7], dtype=D)
POSITIVE = torch.tensor([0.4, 3.0, 1.7], dtype=D)
IGNORED = torch.tensor([0, -100, 2, 1, -100, 2])
HALF_KNOWN = torch.tensor([[0, 1, -1], [1, 1, 0], [-1, -1, -1], [0, 0, 1], [1, -1, 0], [0, 1, 1]])

# name: (likelihood, outputs, targets, log p(y | f) + what the likelihood leaves out, written with PyTorch)
LOSSES: dict[str, tuple[Any, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "gaussian": (lw.Gaussian(noise_std=0.7), real(B, 3), real(B, 3) * 2,
                 lambda f, y: -Normal(f, 0.7).log_prob(y).sum(-1)),
    "gaussian, one noise each": (lw.Gaussian(noise_std=(0.7, 0.2, 1.1)), real(B, 3), real(B, 3) * 2,
                                 lambda f, y: -Normal(f, torch.tensor([0.7, 0.2, 1.1], dtype=D)).log_prob(y).sum(-1)),
    "gaussian, tokens": (lw.Gaussian(noise_std=0.7), real(B, 4, 3), real(B, 4, 3) * 2,
                         lambda f, y: -Normal(f, 0.7).log_prob(y).sum(-1)),
    "gaussian, squeezed": (lw.Gaussian(noise_std=0.7), real(B, 1), real(B) * 2,
                           lambda f, y: -Normal(f[:, 0], 0.7).log_prob(y)),
    "categorical": (lw.Categorical(), real(B, 3), classes(B), lambda f, y: -Categorical(logits=f).log_prob(y)),
    "categorical, column": (lw.Categorical(), real(B, 3), classes(B, 1),
                            lambda f, y: -Categorical(logits=f).log_prob(y[:, 0])),
    "categorical, weighted": (lw.Categorical(class_weights=WEIGHTS), real(B, 3), classes(B),
                              lambda f, y: F.cross_entropy(f, y, WEIGHTS, reduction="none")),
    "categorical, ignored": (lw.Categorical(class_weights=(0.3, 2.0, 1.7)), real(B, 3), IGNORED,
                             lambda f, y: F.cross_entropy(f, y, WEIGHTS, reduction="none")),
    "categorical, ignored one": (lw.Categorical(ignore_index=1), real(B, 3), classes(B),
                                 lambda f, y: F.cross_entropy(f, y, ignore_index=1, reduction="none")),
    "categorical, tokens": (lw.Categorical(), real(2, B, 3), torch.stack([IGNORED, IGNORED.flip(0)]),
                            lambda f, y: F.cross_entropy(f.mT, y, reduction="none")),
    "bernoulli": (lw.Bernoulli(), real(B, 1), classes(B, of=2),
                  lambda f, y: -Bernoulli(logits=f[:, 0]).log_prob(y.double())),
    "bernoulli, multilabel": (lw.Bernoulli(), real(B, 3), classes(B, 3, of=2),
                              lambda f, y: -Bernoulli(logits=f).log_prob(y.double()).sum(-1)),
    "bernoulli, soft": (lw.Bernoulli(), real(B, 3), real(B, 3).sigmoid(),
                        lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="none").sum(-1)),
    "bernoulli, weighted": (lw.Bernoulli(pos_weight=POSITIVE), real(B, 3), classes(B, 3, of=2),
                            lambda f, y: F.binary_cross_entropy_with_logits(
                                f, y.double(), pos_weight=POSITIVE, reduction="none").sum(-1)),
    "bernoulli, weighted soft": (lw.Bernoulli(pos_weight=0.3), real(B, 3), real(B, 3).sigmoid(),
                                 lambda f, y: F.binary_cross_entropy_with_logits(
                                     f, y, pos_weight=torch.tensor(0.3, dtype=D), reduction="none").sum(-1)),
    "bernoulli, ignored": (lw.Bernoulli(ignore_index=-1), real(B, 3), HALF_KNOWN,
                           lambda f, y: -(Bernoulli(logits=f).log_prob(y.clamp_min(0).double()) * (y >= 0)).sum(-1)),
    "poisson": (lw.Poisson(), real(B, 3), classes(B, 3, of=6),
                lambda f, y: -Poisson(f.exp()).log_prob(y.double()).sum(-1)),
    "heteroscedastic": (lw.HeteroscedasticGaussian(), real(B, 4), real(B, 2) * 2,
                        lambda f, y: -Normal(f[:, :2], (0.5 * f[:, 2:]).exp()).log_prob(y).sum(-1)),
    "heteroscedastic, one": (lw.HeteroscedasticGaussian(), real(B, 2), real(B) * 2,
                             lambda f, y: -Normal(f[:, 0], (0.5 * f[:, 1]).exp()).log_prob(y)),
}  # fmt: skip
HESSIAN = [name for name in LOSSES if not name.startswith("heteroscedastic")]


def prepared(name: str) -> tuple[Any, Tensor, Tensor]:
    likelihood, f, y, _ = LOSSES[name]
    return likelihood, f, likelihood.targets(f, y)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_normaliser_are_the_negative_log_density(name: str) -> None:
    """log p(y | f) = -loss / phi - c(phi), with every constant."""
    likelihood, f, y, expected = LOSSES[name]
    phi = likelihood.dispersion
    nll = likelihood.loss(f, likelihood.targets(f, y)) / phi + likelihood.log_normaliser(phi, f.shape[-1])
    assert_close(nll, expected(f, y))


@pytest.mark.parametrize("name", HESSIAN)
def test_root_squares_to_the_hessian_of_the_loss(name: str) -> None:
    likelihood, f, y = prepared(name)
    flat_f, flat_y = f.reshape(-1, f.shape[-1]), y.reshape(-1, *y.shape[f.ndim - 1 :])
    hessian = torch.stack([
        torch.autograd.functional.hessian(lambda one, t=t: likelihood.loss(one[None], t[None]).sum(), one)
        for one, t in zip(flat_f, flat_y, strict=True)
    ])  # fmt: skip
    root = likelihood.root(f, y)
    assert root.shape[:-1] == f.shape
    curvature = (root @ root.mT).reshape(hessian.shape)
    assert_close(curvature, hessian)


def test_heteroscedastic_root_squares_to_the_fisher_matrix() -> None:
    """E[-∂² log p] by hand: 1/variance for the mean, 1/2 for the log-variance, nothing between them."""
    likelihood, f, y = prepared("heteroscedastic")
    root = likelihood.root(f, y)
    for curvature, one in zip(root @ root.mT, f, strict=True):
        expected = torch.diag(torch.tensor([math.exp(-one[2]), math.exp(-one[3]), 0.5, 0.5], dtype=D))
        assert_close(curvature, expected)


def test_heteroscedastic_fisher_is_the_expected_hessian() -> None:
    """The same from autograd, the expectation over y taken exactly: the Hessian is quadratic in y."""
    likelihood, f, y = prepared("heteroscedastic, one")
    one = f[0]
    std = math.exp(0.5 * one[1])
    total = torch.zeros(2, 2, dtype=D)
    for sign in (-1.0, 1.0):  # two points with the mean and variance of y integrate any quadratic
        at = (one[0] + sign * std).reshape(1, 1)
        total += 0.5 * torch.autograd.functional.hessian(lambda g, at=at: likelihood.loss(g[None], at).sum(), one)
    root = likelihood.root(f, y)[0]
    assert_close(root @ root.T, total)


def test_categorical_root_has_one_column_less_than_classes() -> None:
    likelihood, f, y = prepared("categorical")
    assert likelihood.root(f, y).shape == (B, 3, 2)


def test_categorical_root_of_confident_logits() -> None:
    f = torch.tensor([[60.0, 0.0, -30.0], [-400.0, 0.0, 400.0], [1e4, 0.0, 0.0]], dtype=D)
    p = f.softmax(-1)
    root = lw.Categorical().root(f, torch.zeros(3, dtype=torch.long))
    expected = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    assert bool(torch.isfinite(root).all())
    assert bool(((root @ root.mT - expected).abs() <= 4 * torch.finfo(D).eps * p.max()).all())


@pytest.mark.parametrize("name", LOSSES)
def test_sampled_gradient_has_the_fisher_matrix_as_its_second_moment(name: str, generator: torch.Generator) -> None:
    likelihood, f, y = prepared(name)
    n = 4000  # standard error of an entry about 1/60 of its spread
    many_f, many_y = (t.expand(n, *t.shape).flatten(0, 1) for t in (f, y))  # as the rows of one batch
    draws = likelihood.sampled_gradient(many_f, many_y, generator).reshape(n, *f.shape)
    root = likelihood.root(f, y)
    outer = draws.unsqueeze(-1) * draws.unsqueeze(-2)
    assert_within(outer, root @ root.mT)


@pytest.mark.parametrize("name", LOSSES)
def test_sampled_gradient_follows_its_generator(name: str) -> None:
    likelihood, f, y = prepared(name)
    one, two, other = (likelihood.sampled_gradient(f, y, torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "count"),
    [("gaussian", 6), ("gaussian, tokens", 24), ("categorical, ignored", 4), ("categorical, tokens", 8),
     ("bernoulli", 6), ("bernoulli, ignored", 5), ("poisson", 6), ("heteroscedastic", 6)],
)  # fmt: skip
def test_data_that_count(name: str, count: int) -> None:
    likelihood, f, y = prepared(name)
    assert likelihood.count(f, y) == count


def test_ignored_data_have_no_loss_no_curvature_and_no_gradient() -> None:
    likelihood, f, y = prepared("categorical, ignored")
    ignored = y == -100
    assert bool((likelihood.loss(f, y)[ignored] == 0).all())
    assert bool((likelihood.root(f, y)[ignored] == 0).all())
    assert bool((likelihood.sampled_gradient(f, y, None)[ignored] == 0).all())
    assert bool((likelihood.loss(f, y)[~ignored] > 0).all())


BAD: list[tuple[Any, Tensor, Tensor, str]] = [
    (lw.Gaussian(), real(B, 3), real(B), r"Gaussian: targets have the shape \(6,\) and outputs \(6, 3\)"),
    (lw.Gaussian(), real(B, 1), real(B, 3), r"\(6, 3\).*\(6, 1\); expected the same shape or \(6,\)"),
    (lw.Gaussian(noise_std=(0.1, 0.2)), real(B, 3), real(B, 3), "2 noise values for 3 outputs"),
    (lw.Categorical(), real(B, 3), torch.full((B,), 3), r"run from 3 to 3; expected 0\.\.2, or ignore_index=-100"),
    (lw.Categorical(), real(B, 3), torch.tensor([0, 1, 2, -1, 0, 1]), r"run from -1 to 2; expected 0\.\.2"),
    (lw.Categorical(), real(B, 3), real(B), r"dtype torch\.float64.*expected whole class numbers of shape \(6,\)"),
    (lw.Categorical(), real(B, 3), F.one_hot(classes(B), 3), r"\(6, 3\).*y\.argmax\(-1\)"),
    (lw.Categorical(), real(B, 1), classes(B), r"one output; expected two or more\. Use Bernoulli\(\)"),
    (lw.Categorical(class_weights=(1.0, 2.0)), real(B, 3), classes(B), "2 class weights for 3 classes"),
    (lw.Categorical(), real(B, 4, 3), classes(B), r"\(6,\).*expected whole class numbers of shape \(6, 4\)"),
    (lw.Bernoulli(), real(B, 1), torch.tensor([0, 1, 2, 0, 1, 0]), r"run from 0 to 2; expected 0\.\.1"),
    (lw.Bernoulli(), real(B, 1), torch.tensor([-1.0, 1, 1, 0, 1, 0]), r"run from -1 to 1; expected 0\.\.1"),
    (lw.Bernoulli(), real(B, 3), classes(B, of=2), r"Bernoulli: targets have the shape \(6,\) and outputs \(6, 3\)"),
    (lw.Poisson(), real(B, 1), torch.tensor([0, 1, -2, 0, 1, 0]), r"Poisson: .*-2; expected whole numbers from 0"),
    (lw.Poisson(), real(B, 1), torch.tensor([0, 1, 2.5, 0, 1, 0]), r"Poisson: .*2\.5.*; expected whole numbers from 0"),
    (lw.Poisson(), real(B, 3), classes(B), r"Poisson: targets have the shape \(6,\)"),
    (lw.HeteroscedasticGaussian(), real(B, 3), real(B, 3), "3 outputs; expected an even number"),
    (lw.HeteroscedasticGaussian(), real(B, 4), real(B, 4), r"\(6, 4\).*\(6, 2\)"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_targets_that_do_not_fit_say_what_was_seen_and_expected(number: int) -> None:
    likelihood, f, y, message = BAD[number]
    with pytest.raises(lw.errors.DataError, match=message):
        likelihood.targets(f, y)


@pytest.mark.parametrize("likelihood", [lw.Poisson(), lw.HeteroscedasticGaussian()])
def test_no_dispersion_where_there_is_none(likelihood: Any) -> None:
    assert likelihood.dispersion.item() == 1
    with pytest.raises(lw.errors.DataError, match="no dispersion to change"):
        likelihood.with_dispersion(torch.tensor(2.0))


def test_dispersion_is_the_noise_variance() -> None:
    assert lw.Gaussian(noise_std=0.3).dispersion.item() == pytest.approx(0.09)
    assert not lw.Gaussian(noise_std=0.3).learns_dispersion
    assert lw.Gaussian().learns_dispersion
    moved = lw.Gaussian(noise_std=(0.3, 0.5)).with_dispersion(torch.tensor(4.0, dtype=D))
    assert_close(moved.noise_variance, torch.tensor([0.36, 1.0], dtype=D))


def test_one_noise_for_each_output_is_found_from_the_residuals() -> None:
    likelihood = lw.Gaussian(per_output=True)
    assert likelihood.needs_residuals
    ready = likelihood.prepared(torch.tensor([0.2, 3.0], dtype=D))
    assert not ready.needs_residuals
    assert_close(ready.noise_variance, torch.tensor([0.2, 3.0], dtype=D))


@pytest.mark.parametrize(
    ("likelihood", "y", "expected"),
    [(lw.Categorical(), IGNORED, IGNORED == -100), (lw.Bernoulli(ignore_index=-1), HALF_KNOWN, HALF_KNOWN < 0),
     (lw.Bernoulli(), HALF_KNOWN, torch.zeros_like(HALF_KNOWN, dtype=torch.bool))],
)  # fmt: skip
def test_ignored_targets_are_marked(likelihood: Any, y: Tensor, expected: Tensor) -> None:
    assert torch.equal(likelihood.ignored(y), expected)


JOINT: dict[str, tuple[Any, int]] = {
    "regression": (lw.Gaussian(noise_std=0.5), 3),
    "heteroscedastic": (lw.HeteroscedasticGaussian(), 4),
    "probit": (lw.Categorical(link="probit"), 3),
    "bridge": (lw.Categorical(link="bridge"), 3),
    "draws": (lw.Categorical(link="mc"), 3),
    "bernoulli": (lw.Bernoulli(), 3),
    "poisson": (lw.Poisson(), 3),
}


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("name", JOINT)
def test_a_joint_belief_predicts_each_input_by_itself(name: str, batch: int) -> None:
    likelihood, outputs = JOINT[name]
    root = torch.randn(batch * outputs, batch * outputs, dtype=torch.float64)
    mean = torch.randn(batch, outputs, dtype=torch.float64)
    joint = lw.FunctionGaussian(mean, (root @ root.mT).reshape(batch, outputs, batch, outputs) / 10, joint=True)
    of = lambda predictive: predictive.probs if hasattr(predictive, "probs") else predictive.std
    assert_close(of(likelihood.predict(joint)), of(likelihood.predict(joint.marginal)))
    assert of(likelihood.predict(joint)).shape[0] == batch


# Hessians with two numbers for each output: equal to the root's, and with all digits where p is nearly one.

F3 = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
F5 = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
CASES: dict[str, tuple[Any, Tensor, Tensor]] = {
    "softmax": (lw.Categorical(), F3, torch.tensor([0, 2])),
    "weights": (lw.Categorical(class_weights=(0.5, 2.0, 3.0)), F3, torch.tensor([0, 2])),
    "ignored": (lw.Categorical(ignore_index=-1), F5, torch.tensor([[0, -1, 4], [-1, 3, 2]])),
    "binary": (lw.Bernoulli(pos_weight=3.0, ignore_index=-1), F5, torch.randint(-1, 2, (2, 3, 5))),
    "gaussian": (lw.Gaussian(noise_std=(0.5, 1.0, 2.0)), F3, F3 + 1),
    "poisson": (lw.Poisson(), F3, torch.ones(2, 3)),
    "heteroscedastic": (lw.HeteroscedasticGaussian(), F5[..., :4], F5[..., :2]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_product_of_the_root(name: str) -> None:
    likelihood, f, y = CASES[name]
    f = f.double()
    y = y.double() if y.is_floating_point() or name == "binary" else y
    root = likelihood.root(f, y)
    assert_close(likelihood.hessian(f, y).dense(), root @ root.mT)


def test_single_outputs_add_up() -> None:
    whole = OutputHessian(torch.rand(4, 3, dtype=D))
    assert_close(torch.stack([whole.for_output(c).diagonal for c in range(3)]).sum(0), whole.diagonal)


def test_confident_predictions_keep_their_digits() -> None:
    """1 - p = 1e-17 is no number in float64, but p (1 - p) is."""
    f = torch.tensor([[40.0, 0.0, 1.0]], dtype=D)
    small = torch.exp(torch.tensor([-40.0, -39.0], dtype=D))
    expected = torch.stack([small.sum(), small[0], small[1]])[None]
    diagonal = lw.Categorical().hessian(f, torch.tensor([0])).diagonal
    assert float((diagonal / expected - 1).abs().max()) <= tolerance(D)


@pytest.mark.parametrize(("columns", "width"), [(slice(0, 2), 2), (slice(1, 9), 3), (slice(4, 9), 0), (slice(None), 4)])
def test_columns_of_the_root(columns: slice, width: int) -> None:
    f, y = F5.double(), torch.tensor([[0, 1, 4], [1, 3, 2]])
    part = lw.Categorical().root_columns(f, y, columns)
    assert part.shape == (2, 3, 5, width)
    if width:
        assert_close(part, lw.Categorical().root(f, y)[..., columns])


# Label smoothing and soft targets: against ``cross_entropy`` of PyTorch, and its Hessian by autograd.

SOFT_TARGETS_B, C = 5, 4
SOFT_TARGETS_WEIGHTS = (0.5, 2.0, 1.0, 3.0)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, C, shape, generator=torch.Generator().manual_seed(seed))


def reference(likelihood: lw.Categorical, f: Tensor, y: Tensor) -> Tensor:
    weight = None if likelihood.class_weights is None else torch.tensor(SOFT_TARGETS_WEIGHTS, dtype=torch.float64)
    soft = {"weight": weight, "label_smoothing": likelihood.label_smoothing, "reduction": "none"}
    return nn.functional.cross_entropy(f, y, **soft)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("class_weights", [None, SOFT_TARGETS_WEIGHTS])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_loss_and_curvature_are_those_of_cross_entropy(label_smoothing, class_weights, soft):
    likelihood = lw.Categorical(class_weights=class_weights, label_smoothing=label_smoothing)
    f = drawn(0, SOFT_TARGETS_B, C)
    y = likelihood.targets(f, drawn(1, SOFT_TARGETS_B, C).softmax(-1) if soft else labels(1, SOFT_TARGETS_B))
    assert_close(likelihood.loss(f, y), reference(likelihood, f, y))
    of = lambda b: lambda row: reference(likelihood, row[None], y[b : b + 1])[0]
    hessians = torch.stack([torch.autograd.functional.hessian(of(b), f[b]) for b in range(SOFT_TARGETS_B)])
    root = likelihood.root(f, y)
    assert_close(root @ root.mT, hessians)
    assert_close(likelihood.hessian(f, y).dense(), hessians)
    assert int(likelihood.count(f, y)) == SOFT_TARGETS_B


@pytest.mark.parametrize("class_weights", [None, SOFT_TARGETS_WEIGHTS])
def test_gradient_at_the_targets_has_the_root_of_the_weight(class_weights):
    likelihood = lw.Categorical(class_weights=class_weights)
    f, y = drawn(0, SOFT_TARGETS_B, C), labels(1, SOFT_TARGETS_B)
    weight = (
        torch.ones(SOFT_TARGETS_B).double() if class_weights is None else torch.tensor(SOFT_TARGETS_WEIGHTS).double()[y]
    )
    plain = f.softmax(-1) - nn.functional.one_hot(y, C)
    assert_close(likelihood.gradient(f, y), weight.sqrt()[:, None] * plain)


def test_gradient_of_ignored_and_weightless_labels_is_zero():
    f = drawn(0, SOFT_TARGETS_B, C)
    y = torch.tensor([0, -100, 1, 2, 0])
    gradient = lw.Categorical(class_weights=(0.0, 1.0, 2.0, 1.0)).gradient(f, y)
    assert bool((gradient[[0, 1, 4]] == 0).all())
    assert bool((gradient[[2, 3]] != 0).all())


def test_gradient_of_binary_labels_has_the_root_of_the_weight():
    f, y = drawn(0, SOFT_TARGETS_B, 3), labels(1, SOFT_TARGETS_B, 3).clamp_max(1).double()
    expected = (f.sigmoid() - y) * torch.where(y > 0, 4.0, 1.0).sqrt()
    assert_close(lw.Bernoulli(pos_weight=4.0).gradient(f, y), expected)


def test_ignored_tokens_have_no_loss_with_smoothing():
    likelihood = lw.Categorical(label_smoothing=0.2)
    f, y = drawn(0, 2, 3, C), labels(1, 2, 3)
    y[0, 1] = -100
    expected = reference(likelihood, f.flatten(0, 1), y.flatten()).reshape(2, 3)
    assert_close(likelihood.loss(f, y), expected)
    assert int(likelihood.count(f, y)) == 5
    assert bool((likelihood.root(f, y)[0, 1] == 0).all())


def test_log_prob_of_soft_targets_is_the_mean_over_the_classes():
    likelihood = lw.Categorical()
    mean, y = drawn(0, SOFT_TARGETS_B, C), drawn(1, SOFT_TARGETS_B, C).softmax(-1)
    y[0] = torch.tensor([1.0, 0, 0, 0])
    predictive = likelihood.predict(FunctionGaussian(mean, torch.eye(C).double().expand(SOFT_TARGETS_B, C, C)))
    assert_close(likelihood.known_log_prob(predictive, y), (y * predictive.log_probs).sum(-1))
    drawn_functions = FunctionSamples.of(mean, drawn(2, 6, SOFT_TARGETS_B, C))
    averages = likelihood.predict_samples(drawn_functions)
    assert_close(averages.log_prob(y), (y * averages.log_probs).sum(-1))
    with pytest.raises(DataError, match="a row with the sum 4"):
        predictive.log_prob(torch.ones(SOFT_TARGETS_B, C))
    first = predictive.log_prob(torch.zeros(SOFT_TARGETS_B, dtype=torch.long))[:1]
    assert_close(likelihood.known_log_prob(predictive, y)[:1], first)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, C)).double()


def test_fit_to_one_hot_probabilities_equals_the_fit_to_labels(net):
    x, y = drawn(2, 12, 3), labels(3, 12)
    hard, soft = (lw.fit(net, [(x, t)], "classification") for t in (y, nn.functional.one_hot(y, C).double()))
    assert_close(soft.log_evidence(), hard.log_evidence())
    assert_close(soft.predict(x).probs, hard.predict(x).probs)


def test_predictives_of_mixtures_and_loaders_take_soft_targets(net):
    x, y = drawn(2, 12, 3), drawn(3, 12, C).softmax(-1)
    fitted = lw.fit(net, [(x, y)], "classification", tuner=lw.tuners.Grid([(x, y)], precisions=(1.0, 10.0)))
    mixture = lw.fit(net, [(x, y)], "classification", validation=[(x + 0.1, y)])
    for predictive in (fitted.predict(x), mixture.predict(x), mixture.predict([(x[:5], y[:5]), (x[5:], y[5:])])):
        assert_close(predictive.log_prob(y), (y * predictive.probs.log()).sum(-1))


def test_evidence_has_the_smoothed_loss_and_the_same_curvature(net):
    x, y = drawn(2, 12, 3), labels(3, 12)
    plain, smooth = (
        lw.fit(net, [(x, y)], lw.Categorical(label_smoothing=eps), method=lw.Full(), prior=2.0) for eps in (0.0, 0.1)
    )
    assert_close(smooth.base.curvature.matrix, plain.base.curvature.matrix)
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(net(x), y, label_smoothing=e, reduction="sum") for e in (0.0, 0.1)]
    assert_close(smooth.log_evidence() - plain.log_evidence(), losses[0] - losses[1])


def test_files_hold_the_smoothing(net, tmp_path):
    x, y = drawn(2, 12, 3), labels(3, 12)
    lw.fit(net, [(x, y)], lw.Categorical(label_smoothing=0.1), prior=1.0).save(tmp_path / "net")
    assert lw.load(tmp_path / "net", net).likelihood.label_smoothing == 0.1


def test_segmentation_takes_probabilities_of_every_pixel():
    torch.manual_seed(0)
    net = nn.Conv2d(2, 3, 1).double()
    x, y = drawn(0, 4, 2, 5, 6), torch.randint(0, 3, (4, 5, 6))
    soft = nn.functional.one_hot(y, 3).double().movedim(-1, 1)
    one, other = (lw.fit(net, [(x, t)], "classification", prior=1.0) for t in (y, soft))
    assert_close(other.log_evidence(), one.log_evidence())


@pytest.mark.parametrize(
    ("y", "seen"),
    [
        (torch.full((SOFT_TARGETS_B, C), 0.5), "a row with the sum 2"),
        (torch.tensor([1.5, -0.5, 0.0, 0.0]).expand(SOFT_TARGETS_B, C), "an entry -0.5"),
        (torch.ones(SOFT_TARGETS_B, C, dtype=torch.long), "whole class numbers"),
        (torch.full((SOFT_TARGETS_B, C + 1), 1 / (C + 1)), "whole class numbers"),
        (torch.ones(SOFT_TARGETS_B), "whole class numbers"),
    ],
)
def test_targets_that_are_not_distributions_are_refused(y, seen):
    with pytest.raises(DataError, match=seen):
        lw.Categorical().targets(torch.zeros(SOFT_TARGETS_B, C), y)


def test_probabilities_do_not_shift():
    with pytest.raises(DataError, match="expected tokens"):
        lw.Categorical(shift=True).targets(torch.zeros(2, 3, C), torch.full((2, 3, C), 1 / C))


def test_methods_that_learn_by_the_predictive_refuse_smoothing():
    with pytest.raises(UnsupportedError, match=r"label_smoothing of Categorical is 0\.1"):
        lw.Categorical(label_smoothing=0.1).check_prediction()


# The law of weights: data with whole weights are the data repeated; weight zero leaves a datum out.

COUNTS = torch.tensor([2, 0, 1, 3, 1, 1, 0, 2, 1])
EXACT = ("full", "diagonal", "kron", "ekron", "kernel_space", "low_rank", "map_only", "dropout")
ESTIMATED = ("sampled",)  # of the same Gram matrix, by draws for each row
NEED_NETWORKS = ("ensemble", "mixture_of_laplace")


@pytest.fixture(scope="module")
def weighted_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 4)).double().eval()


X, NUMBERS = drawn(1, 9, 3), drawn(2, 9, 4)
LABELS = torch.arange(9) % 4


def both(net: nn.Module, y: Tensor, likelihood: Any, x: Any = X, **options: Any) -> tuple[lw.Fitted, lw.Fitted]:
    """The posterior of weighted data, in two batches, and that of the data repeated."""
    parts = [slice(0, 4), slice(4, None)]
    weighted = lw.samples.weighted([(x[part], y[part], COUNTS[part].double()) for part in parts])
    repeated = [(x.repeat_interleave(COUNTS, 0), y.repeat_interleave(COUNTS, 0))]
    one, other = (lw.fit(net, data, likelihood, **options) for data in (weighted, repeated))
    return one, other


def assert_same(one: lw.Fitted, other: lw.Fitted, x: Any = X, power: float = SOLVED) -> None:
    assert one.base.statistics.data == other.base.statistics.data
    assert_close(torch.tensor(one.base.statistics.loss), torch.tensor(other.base.statistics.loss))
    assert_close(one.functions(x).cov, other.functions(x).cov, power)
    if one.base.provides(Posterior.log_evidence):
        assert_close(one.log_evidence(), other.log_evidence(), power)
    if one.likelihood.noise_variance is not None:
        assert_close(one.likelihood.noise_variance, other.likelihood.noise_variance)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NEED_NETWORKS])
def test_every_method_counts_weights_or_refuses_them(weighted_net, name):
    method = METHODS[name]()
    if name not in (*EXACT, *ESTIMATED):
        with pytest.raises(UnsupportedError, match="the data have weights"):
            both(weighted_net, NUMBERS, lw.Gaussian(), method=method, prior=1.0)
        return
    one, other = both(weighted_net, NUMBERS, lw.Gaussian(), method=method, prior=1.0)
    assert one.base.statistics.data == int(COUNTS.sum())
    assert_close(one.likelihood.noise_variance, other.likelihood.noise_variance)
    if name in EXACT:
        assert_same(one, other)


@pytest.mark.parametrize("method", [lw.Kron(sharing="reduce"), lw.Full(curvature="empirical"), lw.Kron("empirical")])
def test_other_settings_count_weights(weighted_net, method):
    assert_same(*both(weighted_net, LABELS, lw.Categorical(), method=method, prior=1.0))


def test_the_hessian_counts_weights(weighted_net):
    assert_same(*both(weighted_net, LABELS, lw.Categorical(), method=lw.Full(curvature="hessian"), prior=50.0))


@pytest.mark.parametrize("likelihood", [lw.Categorical(), lw.Gaussian(), lw.Gaussian(per_output=True)])
def test_the_default_counts_weights_in_prior_noise_tails_and_mixture(weighted_net, likelihood):
    y = LABELS if likelihood.has_logits else NUMBERS
    one, other = both(weighted_net, y, likelihood)
    assert_same(one, other)
    assert_close(one.predict(X).log_prob(y), other.predict(X).log_prob(y), SOLVED)
    assert_close(one.posterior.weights, other.posterior.weights, SOLVED)


def test_validation_data_count_weights(weighted_net):
    y = LABELS
    weighted = lw.samples.weighted((X, y, COUNTS))
    repeated = (X.repeat_interleave(COUNTS, 0), y.repeat_interleave(COUNTS, 0))
    one, other = (
        lw.fit(weighted_net, [(X + 0.1, y)], "classification", validation=validation)
        for validation in (weighted, repeated)
    )
    assert_close(one.posterior.weights, other.posterior.weights, SOLVED)
    assert_close(one.predict(X).probs, other.predict(X).probs, SOLVED)


def test_tuners_without_weights_refuse_them(weighted_net):
    weighted = lw.samples.weighted((X, LABELS, COUNTS))
    for tuner in (lw.tuners.LinearMode(), lw.tuners.Grid(weighted)):
        with pytest.raises(UnsupportedError, match="have weights"):
            lw.fit(weighted_net, weighted, "classification", tuner=tuner)


def test_products_with_the_ggn_count_weights(weighted_net):
    posterior = lw.fit(weighted_net, [(X, NUMBERS)], lw.Gaussian(1.0), method=lw.Full(), prior=1.0)
    matrix = posterior.ggn(lw.samples.weighted((X, NUMBERS, COUNTS))) @ torch.eye(44).double()
    repeated = both(weighted_net, NUMBERS, lw.Gaussian(1.0), method=lw.Full(), prior=1.0)[1]
    assert_close(matrix, repeated.base.curvature.matrix)


class Tokens(nn.Module):
    """An embedding, a layer that all tokens share, and an output for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(6, 3), nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.table(tokens)).tanh())


@pytest.mark.parametrize("method", [lw.Kron(), lw.Kron(sharing="reduce"), lw.Kron("empirical"), lw.EKron()])
def test_tokens_have_the_weight_of_their_sample(method):
    torch.manual_seed(0)
    net = Tokens().double()
    tokens = torch.randint(0, 6, (9, 2), generator=torch.Generator().manual_seed(3))
    y = (tokens + LABELS[:, None]) % 4
    y[2, 1] = -100
    likelihood = lw.Categorical(class_dim=-1)
    assert_same(*both(net, y, likelihood, tokens, method=method, prior=1.0), tokens)


def test_convolutions_count_weights():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)).double()
    x = drawn(5, 9, 2, 3, 3)
    assert_same(*both(net, LABELS, lw.Categorical(), x, prior=1.0), x)


def test_fractions_scale_the_curvature_and_the_count(weighted_net):
    """Equal weights of 1/4 are the data themselves under a dispersion of 4, but for the number of data."""
    quarter = lw.fit(
        weighted_net, lw.samples.weighted((X, NUMBERS, torch.full((9,), 0.25))), lw.Gaussian(0.5), prior=1.0
    )
    whole = lw.fit(weighted_net, [(X, NUMBERS)], lw.Gaussian(1.0), prior=1.0)
    assert quarter.base.statistics.data == 2.25
    assert_close(quarter.functions(X).variance, whole.functions(X).variance)


def test_files_hold_a_fractional_number_of_data(weighted_net, tmp_path):
    weights = torch.full((9,), 0.1)
    fitted = lw.fit(weighted_net, lw.samples.weighted((X, NUMBERS, weights)), lw.Gaussian(), prior=1.0)
    fitted.save(tmp_path / "net")
    assert_close(lw.load(tmp_path / "net", weighted_net).log_evidence(), fitted.log_evidence())


def test_training_counts_weights():
    recipe = lw.recipes.online(epochs=2, rate=0.1)
    torch.manual_seed(0)
    start = nn.Linear(3, 4).double()
    weighted = [(X, lw.samples.Weighted(NUMBERS, COUNTS))]
    repeated = [(X.repeat_interleave(COUNTS, 0), NUMBERS.repeat_interleave(COUNTS, 0))]
    one, other = (lw.train(start, data, lw.Gaussian(), recipe=recipe) for data in (weighted, repeated))
    assert_close(one.model.weight, other.model.weight)
    assert_close(one.posterior.log_evidence(), other.posterior.log_evidence())


def test_labels_that_are_known_in_part_count_once():
    y = torch.tensor([[1.0, -1, 0], [-1, -1, -1], [0, 0, 1]])
    count = weighted_count(lw.Bernoulli(ignore_index=-1), torch.zeros(3, 3), y, torch.tensor([2.0, 5, 3]).double())
    assert float(count) == 5


@pytest.mark.parametrize("outputs", [1, 2])
def test_scores_of_variants_are_those_of_their_predictives(outputs):
    belief = FunctionGaussian(real(B, outputs), torch.diag_embed(real(B, outputs).square() + 0.1))
    y, given = real(B, outputs).flip(0), lw.Gaussian(noise_std=0.7)
    noises = [given, given.with_dispersion(torch.tensor(3.0, dtype=D))]
    tailed = [noise.with_tails(degrees, 0.8) for noise in noises for degrees in (4.0, 8.0)]
    variants = [(each, factor) for each in (*tailed, *noises) for factor in (0.0, 1.0, 2.5)]
    one_by_one = [each.predict(belief.widened(factor)).log_prob(y) for each, factor in variants]
    assert_close(given.log_probs(belief, y, variants), torch.stack(one_by_one, 1))
