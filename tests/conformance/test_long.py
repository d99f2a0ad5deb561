"""Laws that take long: memory, scales and threads."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks import memory
from benchmarks.peak import held
from lapwing.errors import UnsupportedError
from lapwing.runtime.threads import FORWARD_MODE
from tests import problems
from tests.attack.memory import grown
from tests.attack.threads import SPECIAL, at_once, fit_task, predictions, train_task
from tests.conformance.declared import SMALL
from tests.conformance.test_every_method import NEW, everything
from tests.conformance.test_every_method import fitted as memory_fitted
from tests.references import dense
from tests.tolerances import SOLVED, assert_close

# Predictions that do not depend on the scale of weights which the network ignores (Antorán et al. 2022, section 4).
#
# A normalised group of weights is multiplied by k, with the running statistics after it where there are any: the
# network
# is the same function. With one precision for each group the posterior must be the same too; with one for all it is
# not.

D = torch.float64
KINDS = ["layer norm", "batch norm", "classifier"]
METHODS: dict[str, Any] = {"full": lw.Full(), "kron": lw.Kron(), "ekron": lw.EKron(), "diagonal": lw.Diagonal()}
FACTORS = [0.1, 10.0]
TIGHT = {"tolerance": 1e-8, "max_steps": 100}


def build(kind: str, eps: float) -> nn.Module:
    """Two hidden layers, each with a norm before its activation."""
    inputs, outputs = (2, 3) if kind == "classifier" else (1, 1)
    norm = nn.BatchNorm1d if kind == "batch norm" else nn.LayerNorm
    return nn.Sequential(
        nn.Linear(inputs, 6), norm(6, eps=eps), nn.Tanh(), nn.Linear(6, 5), norm(5, eps=eps), nn.Tanh(),
        nn.Linear(5, outputs),
    ).double()  # fmt: skip


@cache
def state(kind: str) -> dict[str, Tensor]:
    """Weights as they are drawn, with statistics of the inputs: no optimum of anything."""
    torch.manual_seed(5)
    model = build(kind, 1e-5).train()
    for norm in (model[1], model[4]):
        norm.momentum = 1.0
        norm.weight.data += 0.3 * torch.randn_like(norm.weight)
        norm.bias.data += 0.3 * torch.randn_like(norm.bias)
    with torch.no_grad():
        model(inputs(kind))
    return model.state_dict()


def inputs(kind: str) -> Tensor:
    gen = torch.Generator().manual_seed(1)
    shape = (120, 2) if kind == "classifier" else (50, 1)
    return 4 * torch.rand(shape, dtype=D, generator=gen) - 2


@cache
@torch.enable_grad()
def data(kind: str) -> tuple[Tensor, Tensor]:
    """Drawn from the tangent model with every group of weights at work, so that none is left out afterwards."""
    x, model, gen = inputs(kind), rescaled(kind, {}), torch.Generator().manual_seed(2)
    jac = dense.jacobian(model, x, len(x))
    with torch.no_grad():
        h = model(x)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    names = [name[0] if name[0] in "03" else "rest" for name, size in sizes.items() for _ in range(size)]
    for group, size in (("0", 2.0), ("3", 2.0), ("rest", 0.3)):
        columns = jac[..., torch.tensor([name == group for name in names])]
        part = columns @ torch.randn(columns.shape[-1], dtype=D, generator=gen)
        h = h + part * (size / part.std())
    if kind == "classifier":
        return x, torch.multinomial((2 * h).softmax(-1), 1, generator=gen)[:, 0]
    return x, h + 0.1 * torch.randn(h.shape, dtype=D, generator=gen)


def rescaled(kind: str, factors: dict[int, float], eps: float = 1e-30) -> nn.Module:
    """The network with some layers, and the statistics after them, multiplied; eps as small as every torch takes."""
    model = build(kind, eps).eval()
    model.load_state_dict(state(kind))
    for layer, k in factors.items():
        model[layer].weight.data *= k
        model[layer].bias.data *= k
        if isinstance(model[layer + 1], nn.BatchNorm1d):
            model[layer + 1].running_mean *= k
            model[layer + 1].running_var *= k**2
    return model


def new_inputs(kind: str) -> Tensor:
    if kind == "classifier":
        return 2 * torch.randn(9, 2, dtype=D, generator=torch.Generator().manual_seed(2))
    return torch.linspace(-3, 3, 9, dtype=D)[:, None]


def fitted(kind: str, model: nn.Module, method: str, prior: Any, tuner: Any) -> lw.Fitted:
    """The noise is given, unless the tuner is to learn it."""
    x, y = data(kind)
    batches = problems.split(x, y, (len(x) - 8, 1, 7))
    learned = getattr(tuner, "mean", "network") == "tangent"
    likelihood = lw.Categorical() if kind == "classifier" else lw.Gaussian(noise_std=None if learned else 0.1)
    return lw.fit(model, batches, likelihood, method=METHODS[method], prior=prior, tuner=tuner)


@cache
def original(kind: str, method: str, mean: str = "network") -> lw.Fitted:
    return fitted(
        kind, rescaled(kind, {}), method, lw.priors.per_normalised_group(), lw.tuners.LinearMode(mean=mean, **TIGHT)
    )


def gap(kind: str, one: lw.Fitted, other: lw.Fitted) -> tuple[float, float]:
    """The largest change of the means, in units of the largest, and of any entry of the covariances."""
    x = new_inputs(kind)
    a, b = one.functions(x), other.functions(x)
    mean = float((a.mean - b.mean).abs().max() / b.mean.abs().max())
    scale = b.variance.amax(-1)[:, None, None]  # of the same input
    return mean, float(((a.cov - b.cov).abs() / scale).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", FACTORS)
def test_the_network_is_the_same_function(kind: str, factor: float) -> None:
    """What all this rests on."""
    x = new_inputs(kind)
    with torch.no_grad():
        before = rescaled(kind, {})(x)
        for layers in ({0: factor}, {3: factor}, {0: factor, 3: 1 / factor}):
            assert float((rescaled(kind, layers)(x) - before).abs().max()) <= 1e-12 * float(before.abs().max())
    x, _ = data(kind)
    groups = lw.check(rescaled(kind, {0: factor}), x).scale_free
    assert [group.name for group in groups] == ["0", "3"]


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("kind", KINDS)
def test_given_precisions_that_follow_the_scale(kind: str, method: str) -> None:
    """Divided by the square of the factor: the same posterior in other units."""
    given = {"0": 0.7, "3": 2.0, "rest": 5.0}
    before = fitted(kind, rescaled(kind, {}), method, lw.priors.per_normalised_group(given), None)
    for zero, three in ((0.1, 1.0), (10.0, 0.01)):
        moved = {"0": 0.7 / zero**2, "3": 2.0 / three**2, "rest": 5.0}
        after = fitted(kind, rescaled(kind, {0: zero, 3: three}), method, lw.priors.per_normalised_group(moved), None)
        assert max(gap(kind, after, before)) <= 1e-9
        kept = fitted(kind, rescaled(kind, {0: zero, 3: three}), method, lw.priors.per_normalised_group(given), None)
        assert gap(kind, kept, before)[1] > 1e-3


MEANS = {"full": "network", "kron": "tangent"}  # under which normalised groups are at work, see below


@pytest.mark.parametrize(("kind", "method"), [("layer norm", "full"), ("batch norm", "full"), ("classifier", "kron")])
def test_one_precision_for_each_group(kind: str, method: str) -> None:
    """Means, covariances and evidence stay; the precisions of the groups go with the inverse square."""
    layers = {0: 0.1, 3: 10.0}
    before = original(kind, method, MEANS[method])
    assert float(before.prior.values[[0, 2]].min()) < 10  # not all of them left out
    tuner = lw.tuners.LinearMode(mean=MEANS[method], **TIGHT)
    after = fitted(kind, rescaled(kind, layers), method, lw.priors.per_normalised_group(), tuner)
    mean, covariance = gap(kind, after, before)
    assert mean <= 1e-6
    assert covariance <= 1e-6
    assert float(after.log_evidence()) == pytest.approx(float(before.log_evidence()), rel=1e-6)
    assert float(after.likelihood.dispersion) == pytest.approx(float(before.likelihood.dispersion), rel=1e-6)
    assert after.prior.groups == ("0", "rest", "3")
    scale = torch.tensor([layers[0] ** -2, 1.0, layers[3] ** -2], dtype=D)
    expected = scale * before.prior.values
    switched_off = expected > 1e4 * scale  # such a group has no weight left, and the evidence is flat in its precision
    assert (after.prior.values / expected - 1)[~switched_off].abs().max() <= 1e-4
    assert bool((after.prior.values > 1e4 * scale)[switched_off].all())


@pytest.mark.parametrize(
    ("kind", "method", "mean"),
    [("batch norm", "full", "tangent"), ("layer norm", "ekron", "tangent"), ("layer norm", "diagonal", "network")],
)
def test_other_structures_and_means(kind: str, method: str, mean: str) -> None:
    before = original(kind, method, mean)
    assert float(before.prior.values[[0, 2]].min()) < 10
    tuner = lw.tuners.LinearMode(mean=mean, **TIGHT)
    after = fitted(kind, rescaled(kind, {0: 10.0, 3: 0.1}), method, lw.priors.per_normalised_group(), tuner)
    assert max(gap(kind, after, before)) <= 1e-6


@pytest.mark.parametrize(("kind", "method"), [("layer norm", "full"), ("batch norm", "kron"), ("classifier", "full")])
def test_the_settings_by_default(kind: str, method: str) -> None:
    """Searches that stop early stop at the same place: each starts where the scales say."""
    one, other = (fitted(kind, rescaled(kind, layers), method, lw.priors.per_normalised_group(), lw.tuners.LinearMode())
                  for layers in ({}, {0: 10.0, 3: 0.1}))  # fmt: skip
    assert max(gap(kind, other, one)) <= 1e-4


PAIRS = [("full", 0.1), ("kron", 10.0)]


@cache
def unscaled(kind: str, method: str, prior: str, tuner: str) -> lw.Fitted:
    return fitted(kind, rescaled(kind, {}), method, PRIORS[prior], TUNERS[tuner])


PRIORS = {"g": lw.priors.g_prior(), "isotropic": lw.isotropic(1.0)}
TUNERS = {"naive": lw.tuners.MaximiseEvidence(), "corrected": lw.tuners.LinearMode(**TIGHT)}


@pytest.mark.parametrize(("method", "factor"), PAIRS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_g_prior(kind: str, method: str, factor: float) -> None:
    """One number, and every weight in units of its own curvature."""
    before = unscaled(kind, method, "g", "corrected")
    after = fitted(kind, rescaled(kind, {0: factor}), method, PRIORS["g"], TUNERS["corrected"])
    assert max(gap(kind, after, before)) <= 1e-6
    assert float(after.prior.values) == pytest.approx(float(before.prior.values), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_enough_for_the_naive_evidence_too(kind: str) -> None:
    tuner = lw.tuners.MaximiseEvidence(tolerance=1e-10, max_steps=300)
    one, other = (fitted(kind, rescaled(kind, layers), "full", lw.priors.per_normalised_group(), tuner)
                  for layers in ({}, {0: 10.0}))  # fmt: skip
    assert max(gap(kind, other, one)) <= 1e-6
    assert gap(kind, one, original(kind, "full"))[1] > 1e-2  # but another answer


@pytest.mark.parametrize(("method", "factor"), PAIRS)
@pytest.mark.parametrize(
    ("kind", "tuner"), [("layer norm", "naive"), ("batch norm", "corrected"), ("classifier", "corrected")]
)
def test_one_precision_for_all_depends_on_the_scale(kind: str, method: str, tuner: str, factor: float) -> None:
    before = unscaled(kind, method, "isotropic", tuner)
    after = fitted(kind, rescaled(kind, {0: factor}), method, PRIORS["isotropic"], TUNERS[tuner])
    mean, covariance = gap(kind, after, before)
    assert mean <= 1e-12  # the network's own
    assert covariance > 1e-2


@pytest.mark.parametrize(("kind", "factor", "eps"), [("layer norm", 10.0, 1e-5), ("batch norm", 0.1, 1e-7)])
def test_eps_limits_it(kind: str, factor: float, eps: float) -> None:
    """A norm divides by sqrt(var + eps): a group k times as small sees an eps that is k² times as large.

    The outputs move by eps / var to first order, and the variances by some ten times that.
    """
    one, other = (rescaled(kind, layers, eps) for layers in ({}, {0: factor}))
    with torch.no_grad():
        seen = one[0](data(kind)[0])
    variance = one[1].running_var if kind == "batch norm" else seen.var(1, unbiased=False)
    allowed = 20 * eps * max(1.0, factor**-2) * float((1 / variance).max())
    assert allowed < 0.5
    posteriors = [
        fitted(kind, model, "full", lw.priors.per_normalised_group(), lw.tuners.LinearMode(**TIGHT))
        for model in (other, one)
    ]
    assert max(gap(kind, *posteriors)) <= allowed


def test_weight_norm() -> None:
    """Its direction parameter may have any length."""
    factor = 10.0

    def model(k: float) -> nn.Module:
        torch.manual_seed(3)
        first = nn.utils.parametrizations.weight_norm(nn.Linear(2, 7))
        first.parametrizations.weight.original1.data *= k
        return nn.Sequential(first, nn.Tanh(), nn.Linear(7, 3)).double().eval()

    tuner = lw.tuners.LinearMode(**TIGHT)
    one, other = (fitted("classifier", model(k), "full", lw.priors.per_normalised_group(), tuner)
                  for k in (1.0, factor))  # fmt: skip
    assert set(one.prior.groups) == {"0.parametrizations.weight.original1", "rest"}
    assert max(gap("classifier", other, one)) <= 1e-6
    single = [fitted("classifier", model(k), "full", lw.isotropic(1.0), lw.tuners.LinearMode()) for k in (1.0, factor)]
    assert gap("classifier", *single)[1] > 1e-2


# The byte budget, for every registered method: it is kept, and it changes no result.


@pytest.mark.parametrize("name", SMALL)
def test_the_budget_changes_no_result(name: str) -> None:
    """With one byte, everything is done in the smallest pieces: seven data and two inputs make several of them.

    With fewer data than a layer has inputs, several eigenvalues of a factor of Kron are zero and rounding chooses their
    eigenvectors: the same covariance by another root, and so other draws.
    """
    inputs = NEW[:2]
    with lw.memory.limited(1):
        found = everything(memory_fitted(name, (7,)), inputs, torch.Generator().manual_seed(5))
    wanted = everything(memory_fitted(name, (7,)), inputs, torch.Generator().manual_seed(5))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, SOLVED)


@cache
def network(name: str) -> memory.Case:
    return memory.case(name)


NARROW = ("map_only", "ensemble", "dropout", "swag", "hfl")  # tried with the first network too; others take longer


def measured_pairs() -> list[tuple[str, str]]:
    """Return networks and methods."""
    pairs = [(case, name) for case in memory.NETWORKS for name in SMALL if not memory.left_out(name, case)]
    return [(case, name) for case, name in pairs if name in NARROW or case != "narrow MLP"]


@pytest.mark.parametrize(("case", "name"), measured_pairs())
def test_no_call_takes_more_than_the_budget_and_its_answer(case: str, name: str) -> None:
    """Bytes of PyTorch's allocator, which follow from shapes; the rules for methods are in docs/scale.md."""
    here, budget = network(case), memory.budget_of(name)
    method = memory.methods(here.model)[name]
    try:
        for what, found in memory.measured(name, here, budget):
            more = memory.allowed(name, method, here, what)
            assert found.taken <= budget + more, f"{what}: {found.taken} bytes, budget {budget}, held {more}"
    except UnsupportedError as error:
        assert "tokens" in str(error)  # noqa: PT017


@pytest.mark.parametrize("case", memory.NETWORKS)
def test_without_a_budget_calls_take_more(case: str) -> None:
    """Otherwise the test above would say nothing. A fit reserves a block that it never writes, which does not count."""
    found = dict(memory.measured("kron", network(case), 2**32))
    assert min(found["fit"].most, found["predict"].most) > 1.5 * memory.BUDGET


def test_a_mixture_keeps_the_budget() -> None:
    """The default fit with validation data: scores of cells are kept for every row, twice while they are joined."""
    here, rows, cells, budget = network("wide MLP"), 16, 256, memory.BUDGET // 2
    train, held_out = ([(here.x[part], here.y[part])] for part in (slice(0, rows), slice(rows, 2 * rows)))
    with lw.memory.limited(budget):
        fitted = held(lambda: lw.fit(here.model, train, "classification", method=lw.Diagonal(), validation=held_out))
        asked = held(lambda: memory.probabilities(fitted.result, here.x))
    assert fitted.taken <= budget + 16 * rows * cells
    assert asked.taken <= budget


# Every method from eight threads at once: the short form of ``python -m tests.attack threads``.


@pytest.mark.parametrize("name", [*SMALL, *SPECIAL])
def test_predictions_are_the_serial_ones(name: str) -> None:
    assert predictions(name, 1 if name == "hfl" else 3).faults == ()


def test_different_models_at_once() -> None:
    tasks = [fit_task("kron", 0), fit_task("ensemble", 1), *(train_task(seed) for seed in range(3))]
    assert at_once(tasks, 2).faults == ()


def test_no_lock_stays_taken() -> None:
    assert FORWARD_MODE.acquire(blocking=False)
    FORWARD_MODE.release()


def test_memory_does_not_grow() -> None:
    assert grown(10, 20)[1] <= 0
