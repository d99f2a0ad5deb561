"""Every likelihood against PyTorch's own losses and distributions, and its root against autograd."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal, Poisson

import lapwing as lw
from lapwing.runtime.state import State
from tests.tolerances import assert_close, assert_within

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
    "categorical, two": (lw.Categorical(), real(B, 2), classes(B, of=2),
                         lambda f, y: -Categorical(logits=f).log_prob(y)),
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
    "poisson, squeezed": (lw.Poisson(), real(B, 1), classes(B, of=6),
                          lambda f, y: -Poisson(f[:, 0].exp()).log_prob(y.double())),
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
    (lw.Gaussian(), real(B, 3), real(B, 1), r"\(6, 1\).*\(6, 3\)"),
    (lw.Gaussian(), real(B, 1), real(B, 3), r"\(6, 3\).*\(6, 1\); expected the same shape or \(6,\)"),
    (lw.Gaussian(), real(B, 3), real(B - 1, 3), r"\(5, 3\).*\(6, 3\)"),
    (lw.Gaussian(noise_std=(0.1, 0.2)), real(B, 3), real(B, 3), "2 noise values for 3 outputs"),
    (lw.Categorical(), real(B, 3), torch.full((B,), 3), r"run from 3 to 3; expected 0\.\.2, or ignore_index=-100"),
    (lw.Categorical(), real(B, 3), torch.tensor([0, 1, 2, -1, 0, 1]), r"run from -1 to 2; expected 0\.\.2"),
    (lw.Categorical(), real(B, 3), real(B), r"dtype torch\.float64.*expected whole class numbers of shape \(6,\)"),
    (lw.Categorical(), real(B, 3), F.one_hot(classes(B), 3), r"\(6, 3\).*y\.argmax\(-1\)"),
    (lw.Categorical(), real(B, 1), classes(B), r"one output; expected two or more\. Use Bernoulli\(\)"),
    (lw.Categorical(), real(B, 3), classes(B + 1), r"\(7,\).*expected whole class numbers of shape \(6,\)"),
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


STATES = [likelihood for likelihood, *_ in LOSSES.values()] + [
    lw.Gaussian(per_output=True)
    .prepared(torch.tensor([0.2, 3.0], dtype=D))
    .with_dispersion(torch.tensor(2.0, dtype=D)),
    lw.Gaussian(),
    lw.Categorical(link="mc", samples=17, seed=4, temperature=2.5),
    lw.Bernoulli(link="quadrature", temperature=0.5, link_offset=-1.5),
    lw.Categorical(link_offset=(0.5, -0.5)),
]


@pytest.mark.parametrize("likelihood", STATES, ids=lambda likelihood: type(likelihood).__name__)
def test_a_likelihood_is_built_again_from_its_state(likelihood: Any) -> None:
    """After the settings went through JSON, as in a file."""
    state = likelihood.state()
    assert state.name == type(likelihood).__name__
    again = type(likelihood).from_state(State(state.name, json.loads(json.dumps(state.settings)), state.tensors))
    assert again.state().settings == state.settings
    assert again.learns_dispersion == likelihood.learns_dispersion
    assert torch.equal(again.dispersion, likelihood.dispersion)
    weighted = any(getattr(likelihood, name, None) is not None for name in ("class_weights", "pos_weight"))
    outputs = 3 if weighted or state.tensors.get("ratios", torch.zeros(2)).shape[0] == 3 else 2
    belief = lw.FunctionGaussian(real(B, outputs), torch.eye(outputs, dtype=D).expand(B, -1, -1))
    one, two = likelihood.predict(belief), again.predict(belief)
    assert torch.equal(one.mean, two.mean)
    assert torch.equal(one.entropy, two.entropy)


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
