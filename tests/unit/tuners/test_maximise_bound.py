"""The lower bound of the evidence from blocks of data, and the tuner that maximises it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.tuners.base import terms
from tests import problems
from tests.cases import BY_NAME, CASES, Case
from tests.references.evidence import Linearised, adam
from tests.tolerances import assert_close

D = torch.float64
CPU = torch.device("cpu")
BLOCKS = ((0, 1), (2,), (3,), (4, 5))  # batches of 3, 1 and 2 samples in runs of at most 2
KINDS = ["isotropic", "per_layer", "diagonal", "grouped", "g"]
PICKED = torch.tensor([0, 3, 7, 23, 25, 31, 60, 80])  # of the MLP's 83: from every layer, weights and biases


def problem(case: Case, kind: str, size: int = 6) -> tuple[nn.Module, Any, Tensor]:
    y = problems.numbers(case, size) if kind == "gaussian" else problems.targets(case, size)
    return case.build(), case.batch(size), y


def likelihood(kind: str) -> Any:
    return {"gaussian": lw.Gaussian(noise_std=0.6), "categorical": lw.Categorical(), "bernoulli": lw.Bernoulli()}[kind]


def noise(kind: str) -> float:
    return 0.36 if kind == "gaussian" else 1.0


def layers(names: Sequence[str]) -> list[str]:
    """The module of every parameter."""
    return [name.rpartition(".")[0] for name in names]


def prior(kind: str, names: Sequence[str], sizes: Sequence[int], ggn: Tensor, picked: Tensor | None = None) -> Any:
    """(our prior, its precision of every weight (P,)), written from what each kind of prior means."""
    every = torch.arange(sum(sizes)) if picked is None else picked
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[every]  # the parameter of every weight
    if kind == "isotropic":
        return lw.isotropic(0.7), torch.full((len(every),), 0.7, dtype=D)
    if kind == "per_layer":
        order = list(dict.fromkeys(layers(names)))
        alive = list(dict.fromkeys(layers([names[i] for i in owner.tolist()])))
        each = torch.tensor([0.4 + 0.3 * order.index(layer) for layer in layers(names)], dtype=D)
        return lw.per_layer({layer: 0.4 + 0.3 * order.index(layer) for layer in alive}), each[owner]
    if kind == "diagonal":
        each = 0.5 + torch.rand(len(every), dtype=D, generator=torch.Generator().manual_seed(1))
        return lw.priors.diagonal(each), each
    if kind == "grouped":
        patterns = {r".*bias.*": 0.3, r"(?!.*bias).*": 1.4}
        each = torch.tensor([next(v for p, v in patterns.items() if re.fullmatch(p, n)) for n in names], dtype=D)
        return lw.grouped(patterns), each[owner]
    raw, scale = ggn.diagonal(), torch.zeros(len(every), dtype=D)
    for layer in dict.fromkeys(layers(names)):
        in_layer = torch.tensor([layers(names)[i] == layer for i in owner.tolist()])
        if bool(in_layer.any()):
            typical = float(raw[in_layer].median()) or float(raw[in_layer].mean())  # most may be dead behind a ReLU
            scale[in_layer] = raw[in_layer].clamp_min(1e-3 * typical)
    return lw.priors.g_prior(0.2), 0.2 * scale


def fitted(case: Case, kind: str, prior_kind: str, **settings: Any) -> tuple[lw.Fitted, Linearised, Tensor, list[Any]]:
    """(fit, dense reference, precision of every weight, batches of 3, 1 and 2)."""
    model, x, y = problem(case, kind)
    picked = settings.pop("picked", None)
    reference = Linearised.of(kind, model, x, y, picked)
    chosen = [(n, p.numel()) for n, p in model.named_parameters() if p.requires_grad]
    given, precision = prior(prior_kind, [n for n, _ in chosen], [s for _, s in chosen], reference.ggn, picked)
    if picked is not None:
        settings["weights"] = lw.subnetwork(picked)
    data = problems.split(x, y, (3, 1, 2))
    settings = {"method": lw.Full(), **settings}
    return lw.fit(model, data, likelihood(kind), prior=given, **settings), reference, precision, data


def moved(posterior: lw.Fitted, log_values: Tensor, log_noise: Tensor | None = None) -> Any:
    """The posterior under exp of these precisions and this noise, with a graph to them."""
    prior = posterior.prior.with_precision(log_values.exp().reshape(posterior.prior.values.shape))
    changed = posterior.posterior.problem.with_prior(prior)
    if log_noise is not None:
        changed = changed.with_likelihood(changed.likelihood.with_dispersion(log_noise.exp()))
    return posterior.posterior.with_problem(changed)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "kind", "prior_kind"),
    [
        *[("mlp", kind, p) for kind in ("gaussian", "categorical") for p in KINDS],
        *[("squeezed", "bernoulli", p) for p in KINDS],
        *[("token_level", kind, p) for kind in ("gaussian", "categorical") for p in ("per_layer", "diagonal", "g")],
        *[(name, "categorical", p) for name in ("cnn", "resnet_batchnorm") for p in ("isotropic", "grouped", "g")],
        *[(name, "gaussian", "grouped") for name in ("norms", "shared_weight", "lstm", "frozen_bias")],
        ("mlp", "bernoulli_three", "per_layer"),
    ],
)
def test_value_is_the_dense_formula(name: str, kind: str, prior_kind: str) -> None:
    """Unequal batches cut into blocks; networks of every kind, token level and several labels included."""
    if kind == "bernoulli_three":
        model, x = BY_NAME[name].build(), BY_NAME[name].batch(6)
        y = torch.rand(6, 3, generator=torch.Generator().manual_seed(2)).round().to(D)
        data, precision = problems.split(x, y, (3, 1, 2)), torch.full((83,), 0.7, dtype=D)
        posterior = lw.fit(model, data, lw.Bernoulli(), method=lw.Full(), prior=0.7)
        reference = Linearised.of("bernoulli", model, x, y)
    else:
        posterior, reference, precision, data = fitted(BY_NAME[name], kind, prior_kind)
    bound = problems.unchanged(posterior.network.model, lambda: lw.tuners.evidence_bound(posterior, data, block=2))
    assert bound.dtype == D
    assert_close(bound, reference.bound(BLOCKS, precision, noise(kind)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("prior_kind", ["isotropic", "diagonal"])
def test_one_block_is_the_full_evidence(case: Case, prior_kind: str) -> None:
    model = case.build()
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    given = lw.isotropic(0.7) if prior_kind == "isotropic" else lw.priors.diagonal(0.5 + torch.rand(size, dtype=D))
    data = [(case.batch(6), problems.targets(case, 6))]
    posterior = lw.fit(model, data, problems.likelihood(case), method=lw.Full(), prior=given)
    assert_close(lw.tuners.evidence_bound(posterior, data, block=6), posterior.log_evidence())
    assert_close(lw.tuners.evidence_bound(posterior, data, block=1000), posterior.log_evidence())
    assert float(lw.tuners.evidence_bound(posterior, data, block=5)) < float(posterior.log_evidence())


def test_a_block_never_spans_batches() -> None:
    posterior, reference, precision, data = fitted(BY_NAME["mlp"], "gaussian", "isotropic")
    assert_close(
        lw.tuners.evidence_bound(posterior, data, 1000), reference.bound(((0, 1, 2), (3,), (4, 5)), precision, 0.36)
    )


@pytest.mark.parametrize(("name", "kind"), [("mlp", "gaussian"), ("cnn", "categorical"), ("squeezed", "bernoulli")])
def test_refining_the_blocks_only_lowers_it(name: str, kind: str) -> None:
    """Fischer's inequality along 12 ⊃ 6 ⊃ 3 ⊃ 1."""
    model, x, y = problem(BY_NAME[name], kind, 12)
    posterior = lw.fit(model, [(x, y)], likelihood(kind), method=lw.Full(), prior=0.3)
    values = [float(lw.tuners.evidence_bound(posterior, [(x, y)], block)) for block in (12, 6, 3, 1)]
    assert values[0] == pytest.approx(float(posterior.log_evidence()), rel=1e-11)
    assert values == sorted(values, reverse=True)
    assert all(a - b > 1e-3 for a, b in pairwise(values))


def test_a_mixture_has_the_bound_of_its_base() -> None:
    model, x, y = problem(BY_NAME["mlp"], "categorical")
    fitted = lw.fit(model, [(x, y)], "classification")
    alone = lw.tuners.evidence_bound(fitted.base, [(x, y)])
    assert torch.equal(lw.tuners.evidence_bound(fitted, [(x, y)]), alone)
    assert torch.equal(lw.tuners.evidence_bound(fitted.posterior, [(x, y)]), alone)


def test_a_prior_mean_counts() -> None:
    case = BY_NAME["mlp"]
    model, x, y = problem(case, "gaussian")
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=0.6), prior=lw.isotropic(0.7, mean=0.3))
    reference = Linearised.of("gaussian", model, x, y)
    expected = reference.bound(((0, 1, 2, 3), (4, 5)), torch.full((83,), 0.7, dtype=D), 0.36, mean=0.3)
    assert_close(lw.tuners.evidence_bound(posterior, [(x, y)], block=4), expected)


def test_ignored_tokens_do_not_count() -> None:
    """A token with the ignored index has the same effect as no token."""
    case = BY_NAME["token_level"]
    model, x, y = problem(case, "categorical")
    reference = Linearised.of("categorical", model, x, y)
    keep = torch.ones(24, dtype=torch.bool)
    keep[[1, 6, 7, 20]] = False
    hidden = y.reshape(-1).masked_fill(~keep, -100).reshape(y.shape)
    posterior = lw.fit(model, [(x, hidden)], "classification", method=lw.Full(), prior=0.7)
    precision = torch.full_like(reference.theta, 0.7)
    total = -reference.penalty(precision)
    for rows in (torch.arange(0, 16), torch.arange(16, 24)):  # blocks of four samples of four tokens
        left = rows[keep[rows]].tolist()
        alone = Linearised("categorical", reference.f, reference.jacobian, reference.y, reference.theta)
        total = total + alone.term(left, precision)
    assert_close(lw.tuners.evidence_bound(posterior, [(x, hidden)], block=4), total)


@pytest.mark.parametrize("picked", [None, PICKED], ids=["all", "subnetwork"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_dense_formula(kind: str, picked: Tensor | None) -> None:
    """In every precision; weights that are not selected must leave neither a value nor a NaN."""
    posterior, reference, precision, data = fitted(BY_NAME["mlp"], "categorical", kind, picked=picked)
    assert len(precision) == (83 if picked is None else 8)
    leaf = posterior.prior.values.log().requires_grad_()
    bound = lw.tuners.evidence_bound(moved(posterior, leaf), data, block=2)
    bound.backward()
    by_weight = precision.log().requires_grad_()
    expected = reference.bound(BLOCKS, by_weight.exp())
    expected.backward()
    assert_close(bound, expected)
    slopes = by_weight.grad
    assert slopes is not None
    if kind == "diagonal":
        total = slopes
    elif kind in ("isotropic", "g"):
        total = slopes.sum()
    else:  # weights of one group have one precision, and groups are numbered as they appear
        values = list(dict.fromkeys(precision.tolist()))
        total = torch.stack([slopes[precision == value].sum() for value in values])
    assert_close(leaf.grad, total)


@pytest.mark.parametrize("prior_kind", ["isotropic", "grouped", "diagonal"])
def test_a_block_times_their_number_is_unbiased(prior_kind: str) -> None:
    """Blocks of 2, 1, 1 and 2: each is its dense term, and the mean of four times each is the bound, slopes too."""
    posterior, reference, precision, data = fitted(BY_NAME["mlp"], "gaussian", prior_kind)
    block_terms = list(terms(posterior.posterior.problem, Data(data, CPU), 2))
    assert len(block_terms) == len(BLOCKS) == 4
    leaf = posterior.prior.values.log().requires_grad_()
    estimates, slopes = [], []
    for term, block in zip(block_terms, BLOCKS, strict=True):
        problem = moved(posterior, leaf).problem
        value = term(problem)
        assert_close(value, reference.term(block, precision, 0.36))
        estimates.append(len(block_terms) * value - 0.5 * problem.prior.penalty(reference.theta))
        slopes.append(torch.autograd.grad(estimates[-1], leaf)[0])
    whole = lw.tuners.evidence_bound(moved(posterior, leaf), data, 2)
    assert_close(torch.stack(estimates).mean(), whole)
    assert_close(torch.stack(slopes).mean(0), torch.autograd.grad(whole, leaf)[0])
    assert float(torch.stack(estimates).detach().std()) > 0.1  # single blocks do differ


def test_the_tuner_uses_those_estimates() -> None:
    """With a tiny learning rate, the mean of the estimates over one cycle is the bound."""
    posterior, reference, precision, data = fitted(BY_NAME["mlp"], "gaussian", "per_layer")
    trace = posterior.tuned(lw.tuners.MaximiseBound(data, block=2, steps=4, rate=1e-13)).trace
    assert trace is not None
    assert trace.tuner == "MaximiseBound"
    expected = [4 * reference.term(b, precision, 0.36) - reference.penalty(precision) for b in BLOCKS]
    assert_close(torch.tensor([step.score for step in trace.steps], dtype=D), torch.stack(expected), 0.6)


@pytest.mark.parametrize("learned", [False, True])
def test_the_tuner_is_adam_on_single_blocks(learned: bool) -> None:
    """Ten steps, two and a half cycles, against Adam's formulas on the dense terms with a rate that falls to zero."""
    case = BY_NAME["mlp"]
    model, x, y = problem(case, "gaussian")
    data, reference = problems.split(x, y, (3, 1, 2)), Linearised.of("gaussian", model, x, y)
    posterior = lw.fit(model, data, lw.Gaussian(), method=lw.Full(), prior=lw.per_layer(2.0))
    residual = float((model(x) - y).detach().square().mean())
    owner = torch.tensor([0] * 30 + [1] * 35 + [2] * 18)

    def slope_at(at: Tensor, number: int) -> Tensor:
        at = at.clone().requires_grad_()
        precision, phi = at[:3].exp()[owner], at[3].exp() if learned else residual
        value = 4 * reference.term(BLOCKS[number % 4], precision, phi) - reference.penalty(precision)
        return torch.autograd.grad(value / 83, at)[0]

    start = torch.tensor([2.0] * 3 + [residual] * learned, dtype=D).log()
    expected = adam(slope_at, start, [0.3 * (1 - k / 10) for k in range(10)]).exp()
    tuned = posterior.tuned(lw.tuners.MaximiseBound(data, block=2, steps=10, rate=0.3, noise=learned))
    assert_close(tuned.prior.values, expected[:3], 0.5)
    dispersion = expected[3] if learned else torch.tensor(residual, dtype=D)
    assert_close(tuned.likelihood.dispersion, dispersion, 0.5)


@pytest.mark.parametrize(("kind", "learned"), [("isotropic", False), ("isotropic", True), ("per_layer", False)])
def test_one_block_ends_where_the_evidence_does(kind: str, learned: bool) -> None:
    """Adam ends within a thousandth of the optimum, in the logarithm."""
    case = BY_NAME["mlp"]
    model, x, y = problem(case, "gaussian")
    given = lw.isotropic(3.0) if kind == "isotropic" else lw.per_layer(3.0)
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(), method=lw.Full(), prior=given)
    best = posterior.tuned(lw.tuners.MaximiseEvidence(noise=learned))
    tuned = posterior.tuned(lw.tuners.MaximiseBound([(x, y)], block=1000, noise=learned))
    assert float((best.prior.values.log() - posterior.prior.values.log()).abs().max()) > 0.3  # there was a way to go
    assert float((tuned.prior.values.log() - best.prior.values.log()).abs().max()) < 1e-3
    assert float((tuned.likelihood.dispersion.log() - best.likelihood.dispersion.log()).abs()) < 1e-3


def test_small_blocks_like_larger_precisions() -> None:
    """The result is also the optimum of the bound: no precision on a line has a larger one."""
    model, x, y = problem(BY_NAME["mlp"], "categorical", 12)
    posterior = lw.fit(model, [(x, y)], "classification", method=lw.Full(), prior=1.0)
    tuned = posterior.tuned(lw.tuners.MaximiseBound([(x, y)], block=2))
    line = torch.linspace(-2, 4, 31, dtype=D)
    with torch.no_grad():
        values = torch.stack([lw.tuners.evidence_bound(moved(posterior, p), [(x, y)], 2) for p in line])
    assert float(tuned.prior.values.log()) == pytest.approx(float(line[values.argmax()]), abs=0.2)
    assert float(tuned.prior.values) > 1.2 * float(posterior.tuned().prior.values)


def test_map_only_has_a_bound_and_no_tuning() -> None:
    posterior, reference, precision, data = fitted(
        BY_NAME["mlp"], "gaussian", "per_layer", method=lw.baselines.MapOnly()
    )
    expected = reference.bound(BLOCKS, precision, 0.36)
    assert_close(lw.tuners.evidence_bound(posterior, data, 2), expected)
    assert_close(lw.tuners.evidence_bound(posterior.posterior, data, 2), expected)
    with pytest.raises(lw.errors.UnsupportedError, match="PointPosterior has no evidence to maximise"):
        posterior.tuned(lw.tuners.MaximiseBound(data))


def test_the_method_does_not_matter() -> None:
    """Only the problem counts: an approximate curvature has the same bound, and is tuned the same."""
    results = []
    for method in (lw.Full(), lw.Kron(), lw.Diagonal()):
        posterior, _, _, data = fitted(BY_NAME["mlp"], "categorical", "per_layer", method=method)
        tuned = posterior.tuned(lw.tuners.MaximiseBound(data, steps=5))
        results.append((lw.tuners.evidence_bound(posterior, data, 2), tuned.prior.values))
    for value, precisions in results[1:]:
        assert torch.equal(value, results[0][0])
        assert torch.equal(precisions, results[0][1])


def test_in_a_fit_the_data_are_those_of_the_fit() -> None:
    model, x, y = problem(BY_NAME["mlp"], "categorical")
    data, other = problems.split(x, y, (3, 1, 2)), [(x[:2], y[:2])]
    tuner = lambda *given: lw.tuners.MaximiseBound(*given, block=2, steps=20)
    fit = lambda tuner: lw.fit(model, data, "classification", tuner=tuner)
    without_data, same, others = fit(tuner()), fit(tuner(data)), fit(tuner(other))
    assert torch.equal(without_data.prior.values, same.prior.values)
    assert abs(float(without_data.prior.values / others.prior.values) - 1) > 1e-3  # data that are given stay
    assert without_data.trace is not None
    assert len(without_data.trace.steps) == 20


def test_a_mapping_with_its_own_target_key() -> None:
    case = BY_NAME["dict_input"]
    x, y = case.batch(6), problems.targets(case, 6)
    data = [{**x, "truth": y}]
    tuner = lw.tuners.MaximiseBound(block=4, steps=5)
    keyed = lw.fit(case.build(), data, "classification", target_key="truth", tuner=tuner)
    assert torch.equal(keyed.prior.values, lw.fit(case.build(), [(x, y)], "classification", tuner=tuner).prior.values)


def test_single_precision_networks() -> None:
    """The kernel is summed and factorised in float64 whatever the network is."""
    case = BY_NAME["cnn"]
    data = problems.batches(case)
    exact = lw.tuners.evidence_bound(lw.fit(case.build(), data, "classification", prior=0.7), data, 2)
    single = problems.batches(case, dtype=torch.float32)
    narrow = lw.tuners.evidence_bound(lw.fit(case.build(torch.float32), single, "classification", prior=0.7), single, 2)
    assert narrow.dtype == D
    assert_close(narrow, exact, dtype=torch.float32)
    with torch.autocast("cpu"):
        again = lw.fit(case.build(torch.float32), single, "classification", prior=0.7)
        assert torch.equal(lw.tuners.evidence_bound(again, single, 2), narrow)


def test_a_precision_that_runs_away() -> None:
    """Weights at the prior mean: the bound rises with the precision without end."""
    model, x, y = problem(BY_NAME["mlp"], "gaussian")
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    prior = lw.isotropic(1.0, mean=theta)
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1e-7), method=lw.Full(), prior=prior)
    with pytest.raises(lw.errors.DivergedError, match="the evidence has no optimum") as error:
        posterior.tuned(lw.tuners.MaximiseBound([(x, y)], block=2, steps=80, rate=1.0))
    assert error.value.trace.tuner == "MaximiseBound"
    assert len(error.value.trace.steps) == 80
    assert error.value.trace.steps[-1].precisions[0] > 1e12
    assert 1.0 < float(error.value.posterior.problem.prior.values) < 1e12


def test_a_model_that_moved_on_is_refused() -> None:
    case = BY_NAME["norms"]
    data = problems.batches(case)
    model = case.build()
    posterior = lw.fit(model, data, "classification", prior=1.0)
    model.train()
    with pytest.raises(lw.errors.ModelError, match="training mode"):
        problems.unchanged(model, lambda: lw.tuners.evidence_bound(posterior, data))
    model.eval()
    model[0].weight.data[0, 0] += 0.1
    with pytest.raises(lw.errors.ModelError, match="has changed since the fit"):
        lw.tuners.evidence_bound(posterior, data)


def test_bad_input() -> None:
    posterior, _, _, data = fitted(BY_NAME["mlp"], "gaussian", "isotropic")
    for block in (0, -3):
        with pytest.raises(lw.errors.UnsupportedError, match=f"block is {block}; expected an integer of at least 1"):
            lw.tuners.evidence_bound(posterior, data, block=block)
    with pytest.raises(lw.errors.UnsupportedError, match="needs the training data: MaximiseBound"):
        posterior.tuned(lw.tuners.MaximiseBound())
    with pytest.raises(lw.errors.UnsupportedError, match="tuner is the class MaximiseBound; expected an object"):
        posterior.tuned(lw.tuners.MaximiseBound)
    with pytest.raises(lw.errors.UnsupportedError, match="tuner is the class MaximiseBound"):
        lw.fit(posterior.network.model, data, lw.Gaussian(), tuner=lw.tuners.MaximiseBound)
    for empty in ([], [(torch.zeros(0, 4, dtype=D), torch.zeros(0, 3, dtype=D))]):
        with pytest.raises(lw.errors.DataError, match="data is empty"):
            lw.tuners.evidence_bound(posterior, empty)
        with pytest.raises(lw.errors.DataError, match="data is empty"):
            posterior.tuned(lw.tuners.MaximiseBound(empty))
    with pytest.raises(lw.errors.DataError, match="one-shot iterator"):
        lw.tuners.evidence_bound(posterior, iter(data))


def test_one_noise_for_each_output_is_not_learned_block_by_block() -> None:
    """The bound is right for a noise for each output, but its slope in those noises would be wrong."""
    model, x, y = problem(BY_NAME["mlp"], "gaussian", 12)
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(per_output=True), method=lw.Full(), prior=1.0)
    assert_close(lw.tuners.evidence_bound(posterior, [(x, y)], 12), posterior.log_evidence())
    with pytest.raises(lw.errors.UnsupportedError, match="learns one noise for all outputs"):
        posterior.tuned(lw.tuners.MaximiseBound([(x, y)], noise=True))
    assert posterior.tuned(lw.tuners.MaximiseBound([(x, y)], steps=3)).prior.values.ndim == 0
