"""Which method a budget gets, and whether the reason says so."""

from __future__ import annotations

import itertools
import math
import re
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.base import BlockWork, Offer, Requirements, Workload, bytes_text
from lapwing.methods.weight_space import KroneckerWork
from lapwing.networks.jacobians import Footprint
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.registry import METHODS, RATE, Choice
from tests import problems
from tests.cases import BY_NAME

D = torch.float64
GIB = 2**30
EXACTNESS = {lw.Full: 2, lw.KernelSpace: 2, lw.Sampled: 1, lw.Kron: 0}


def named(choice: Choice) -> str:
    return type(choice.method).__name__


@pytest.mark.parametrize(
    ("weights", "rows", "expected"),
    [
        (500, 10_000, lw.Full(limit=500)),
        (10_000, 5_000, lw.Full(limit=10_000)),  # half the time that the kernel takes
        (2_000, 50, lw.KernelSpace(limit=50)),  # both fit, and this one is cheaper
        (100_000, 100, lw.KernelSpace(limit=100)),
        (100_000, 5_000, lw.Sampled(num_samples=64, memory=4 * GIB)),
        (1_000_000, 500, lw.KernelSpace(limit=500)),
        (1_000_000, 600, lw.Kron()),  # 1,600 vectors of so many weights are 12 GiB
        (100_000, 1_000_000, lw.Kron()),
    ],
)
def test_the_defaults(weights: int, rows: int, expected: Any) -> None:
    assert lw.Auto().choose(weights, rows).method == expected


@pytest.mark.parametrize(("weights", "rows"), [(500, 10_000), (2_000, 40), (100_000, 5_000), (10_000_000, 100)])
def test_classes_get_kronecker_factors_at_once(weights: int, rows: int) -> None:
    """As the page on methods advises; single weights have none, and are exact as for other targets."""
    choice = lw.Auto().choose(weights, rows, classes=True)
    assert choice.method == lw.Kron()
    assert choice.why.endswith("for classes exact methods cost more and gain little")
    single = (lw.Auto().choose(weights, rows, single=True, classes=classes) for classes in (True, False))
    assert len(set(single)) == 1


@pytest.mark.parametrize(
    ("likelihood", "expected"),
    [(lw.Gaussian(), "Full"), (lw.Poisson(), "Full"), (lw.Categorical(), "Kron"), (lw.Bernoulli(), "Kron")],
)
def test_the_likelihood_says_whether_there_are_classes(likelihood: Any, expected: str) -> None:
    torch.manual_seed(7)
    x = torch.randn(30, 4)
    y = torch.randint(0, 2, (30,)) if isinstance(likelihood, lw.Categorical) else torch.randint(0, 2, (30, 2)).float()
    posterior = lw.fit(nn.Linear(4, 2), [(x, y)], likelihood, method="auto", prior=1.0)
    assert posterior.method == expected


def test_the_number_of_samples_is_passed_on() -> None:
    assert lw.Auto(num_samples=7).choose(100_000, 5_000).method == lw.Sampled(num_samples=7, memory=4 * GIB)
    assert lw.Auto(num_samples=2000).choose(100_000, 5_000).method == lw.Kron()  # they cost time as well


def test_a_gpu_has_more_in_the_same_time() -> None:
    slow, fast = (lw.Auto(seconds=1.0, gpu=gpu).choose(5_000, 50_000) for gpu in (False, True))
    assert (named(slow), named(fast)) == ("Kron", "Full")


COST = re.compile(r"(\S+ \w+) and about (\S+ \w+)")
REJECTED = re.compile(r"; (\w+) would take (\S+ \w+) and about (\S+ \w+)")
UNITS = {"B": 1, "kB": 2**10, "MB": 2**20, "GB": 2**30, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}


def of_units(text: str) -> float:
    """Return the bytes or seconds of a text with a unit."""
    number, unit = text.split()
    return float(number) * UNITS[unit]


SIZES = list(itertools.product((40, 3_000, 60_000, 5_000_000), (12, 900, 40_000)))
MEMORY = [0.01 * GIB, 0.2 * GIB, 4 * GIB, 60 * GIB, math.inf]
SECONDS = [0.01, 1.0, 60.0, 1e4, math.inf]


@pytest.mark.parametrize(("weights", "rows"), SIZES)
def test_a_larger_budget_is_never_less_exact(weights: int, rows: int) -> None:
    rank = {
        (m, s): EXACTNESS[type(lw.Auto(memory=m, seconds=s).choose(weights, rows).method)]
        for m, s in itertools.product(MEMORY, SECONDS)
    }
    for (m, s), tier in rank.items():
        for (more, longer), other_tier in rank.items():
            assert other_tier >= tier or more < m or longer < s
    assert rank[math.inf, math.inf] == 2


def test_the_grid_has_every_method() -> None:
    """So that the property above says something."""
    budgets = itertools.product(MEMORY, SECONDS, SIZES)
    chosen = {type(lw.Auto(memory=m, seconds=s).choose(*size).method) for m, s, size in budgets}
    assert chosen == set(EXACTNESS)


@pytest.mark.parametrize(("weights", "rows"), SIZES)
def test_what_was_rejected_costs_more_than_there_is(weights: int, rows: int) -> None:
    """By the numbers that the reason gives, up to their rounding; and what was chosen fits."""
    for memory, seconds in itertools.product(MEMORY[:-1], SECONDS[:-1]):
        choice = lw.Auto(memory=memory, seconds=seconds).choose(weights, rows)
        assert choice.why.startswith(f"{named(choice)}: {weights:,} weights, {rows:,} rows (data times outputs)")
        rejected = REJECTED.findall(choice.why)
        for name, bytes_, time in rejected:
            assert name != named(choice)
            assert of_units(bytes_) > 0.94 * memory or of_units(time) > 0.94 * seconds
        if named(choice) == "Kron":
            assert {name for name, _, _ in rejected} == {"Full", "KernelSpace", "Sampled"}
        else:
            bytes_, time = COST.search(choice.why).groups()
            assert of_units(bytes_) < 1.06 * memory
            assert of_units(time) < 1.06 * seconds
        if named(choice) == "Sampled":
            assert {name for name, _, _ in rejected} == {"Full", "KernelSpace"}
            assert f"samples of the exact in at most {bytes_text(memory)}" in choice.why


def test_the_costs_are_those_of_the_algorithms() -> None:
    """Full: H and a factor, P² each, and n P² + P³/3. Kernel: n vectors of P and two n². Samples: the basis, twenty
    vectors for each, and the noise of the rows."""
    p, n = 20_000, 7_000
    why = lw.Auto(memory=1.0).choose(p, n).why
    costs = {name: (of_units(memory), of_units(time) * RATE) for name, memory, time in REJECTED.findall(why)}
    assert costs["Full"] == pytest.approx((16 * p**2, n * p**2 + 0.3 * p**3), rel=0.06)
    assert costs["KernelSpace"] == pytest.approx((8 * n * (p + 2 * n), 2 * n**2 * p + 9 * n**3), rel=0.06)
    assert costs["Sampled"] == pytest.approx((8 * (320 * (p + 4 * 320) + 64 * (20 * p + n)), 2 * n * p * 448), rel=0.06)


def layers(width: int, data: int, hidden: int = 50) -> Workload:
    """A network of two linear maps with ten outputs."""
    sizes = (BlockWork((width + 1) * hidden, 1, (1, hidden, width + 1)), BlockWork(51 * 10, 1, (1, 10, hidden + 1)))
    weights = sum(block.size for block in sizes)
    backward = sizes[1].size
    return Workload(
        sizes, weights, weights, (10,), width, data, weights, backward, 2 * weights + backward,
        Footprint(hidden + 10, 0), torch.float32, torch.device("cpu"), inputs=128,
    )  # fmt: skip


def chosen(width: int, data: int, **limits: Any) -> Choice:
    workload = layers(width, data)
    return lw.Auto(**limits).choose(workload.weights, 10 * data, workload=workload)


def test_decompositions_are_counted() -> None:
    """Seven times the cube of 8,001 is 180 s, that of 4,001 is 22 s; 300 rows take a matrix of their own size."""
    assert chosen(10_000, 300).method == chosen(4_000, 5_000).method == lw.Kron()
    assert of_units(COST.findall(chosen(10_000, 300).why)[0][1]) < 1
    assert chosen(8_000, 5_000).method == lw.Kron(factor_limit=4096)
    assert ", Kronecker factors with factor_limit=4096; " in chosen(8_000, 5_000).why
    assert chosen(8_000, 5_000, seconds=300).method == chosen(8_000, 5_000, gpu=True).method == lw.Kron()
    assert chosen(8_000, 5_000, memory=2**28).method == lw.Kron(factor_limit=4096)  # a matrix takes 770 MB
    assert chosen(4_000, 5_000, seconds=20).method == lw.Kron(factor_limit=2048)


@pytest.mark.parametrize(("width", "data", "seconds"), [(900, 10**6, 1e-3), (7_000, 300, 1e-3), (30_000, 5_000, 0.1)])
def test_factors_stay_the_fallback_where_their_time_is_over_too(width: int, data: int, seconds: float) -> None:
    """Without a cost of their own, so that a coarser structure does not come in their place."""
    choice = chosen(width, data, seconds=seconds, memory=math.inf)
    assert isinstance(choice.method, lw.Kron)
    assert "Kron would take" not in choice.why


@pytest.mark.parametrize("data", [300, 5_000, 10**6])
def test_decompositions_never_take_more_than_the_time_or_the_pass(data: int) -> None:
    for width, seconds in itertools.product((900, 3_000, 7_000, 30_000), (0.1, 1, 10, 100, 1e4)):
        workload, method = layers(width, data), chosen(width, data, seconds=seconds, memory=math.inf).method
        if not isinstance(method, lw.Kron):
            continue
        cubes = KroneckerWork(workload, method.full_limit, method.factor_limit).cubes
        time, longest = 7 * cubes / RATE, method.cost(workload).fit.total / RATE
        assert time <= max(seconds - longest, longest) or method.factor_limit == 512


def test_a_fit_has_the_limit_that_was_counted() -> None:
    """600 inputs and 400 rows of them: their matrix would take longer than there is, and their diagonal does not."""
    torch.manual_seed(6)
    x, y = torch.randn(400, 600), torch.randn(400, 1)
    auto = lw.Auto(memory=2**22, seconds=0.02)
    posterior = lw.fit(nn.Linear(600, 1), [(x, y)], lw.Gaussian(noise_std=1.0), method=auto, prior=1.0)
    assert posterior.findings[0].startswith("the input factor of weight is a diagonal")
    assert posterior.method == "Kron"


@lru_cache
def setting(inputs: int = 100) -> tuple[nn.Module, Tensor, Tensor]:
    """303 weights and up to 1200 rows; of 3003 weights exact costs 60 MB, and eight samples of it 20 MB."""
    torch.manual_seed(4)
    return nn.Linear(inputs, 3).double(), torch.randn(400, inputs, dtype=D), torch.randn(400, 3, dtype=D)


CHOSEN = {
    "Full": (lw.Auto(), lw.Full(), 100, 200),
    "KernelSpace": (lw.Auto(), lw.KernelSpace(), 100, 20),
    "Sampled": (lw.Auto(memory=3e7, num_samples=8), lw.Sampled(num_samples=8, memory=3e7), 1000, 400),
    "Kron": (lw.Auto(memory=1e5), lw.Kron(), 100, 200),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_posterior_is_that_of_the_method(name: str) -> None:
    auto, method, inputs, count = CHOSEN[name]
    model, x, y = setting(inputs)
    posterior, other = (
        lw.fit(model, [(x[:count], y[:count])], lw.Gaussian(), method=m, generator=torch.Generator().manual_seed(3))
        for m in (auto, method)
    )
    assert posterior.why.startswith(f"{name}: {3 * inputs + 3:,} weights, {3 * count:,} rows")
    assert other.why == ""
    assert type(posterior.posterior) is type(other.posterior)
    if isinstance(posterior.posterior, WeightPosterior):
        assert type(posterior.posterior.curvature) is type(other.posterior.curvature)
    assert torch.equal(posterior.functions(x[:5]).cov, other.functions(x[:5]).cov)
    assert torch.equal(posterior.prior.values, other.prior.values)
    assert torch.equal(posterior.log_evidence(), other.log_evidence())


@lru_cache
def wide() -> tuple[nn.Module, Tensor, Tensor]:
    """2285 weights and 2000 rows, of which samples need 17 MB, factors 2 MB and a basis of all directions 120 MB."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 5))
    return model, torch.randn(400, 10), torch.randn(400, 10)[:, :5].argmax(1)


@lru_cache
def sampled(memory: float) -> lw.Fitted:
    """Without a limit where it is infinite; few samples, at a precision that takes a large basis."""
    model, x, y = wide()
    method = lw.Sampled() if math.isinf(memory) else lw.Sampled(num_samples=16, memory=memory)
    return lw.fit(model, [(x, y)], "classification", method=method, prior=1e-3)


@lru_cache
def without_limit() -> Tensor:
    return sampled(math.inf).functions(wide()[1]).cov


NEEDS = lw.Sampled().needs(2285, 2000)


@pytest.mark.parametrize(("more", "has_factors"), [(0.0, False), (1e7, True)])
def test_samples_keep_to_the_memory(more: float, has_factors: bool) -> None:
    """Basis and kept factors as they are after a solve and the evidence, beside the vectors that a solve works with."""
    memory = NEEDS + more
    posterior, x = sampled(memory), wide()[1]
    cov = posterior.functions(x).cov
    posterior.log_evidence()
    ridge = posterior.posterior.solver.ridge
    design, basis = ridge.design, ridge.basis
    squares = sum(t.numel() * t.element_size() for t in (basis.projected, basis.turn))
    rows = sum(t.numel() * t.element_size() for t in basis.rows.blocks)
    working = 8 * 20 * 16 * 2285
    assert working + design.nbytes + rows + squares <= memory
    assert (design.factors is not None) == has_factors
    assert len(basis.rows) > 300  # and use it
    assert float((cov - without_limit()).norm()) < 0.05 * float(without_limit().norm())


def test_without_a_limit_samples_take_more() -> None:
    """So that the test above says something."""
    without_limit()
    ridge = sampled(math.inf).posterior.solver.ridge
    assert 8 * 2285 * len(ridge.basis.rows) + ridge.design.nbytes > 8 * 2285 * 320 + 4e6
    assert ridge.design.factors is not None


def test_factors_give_way_to_the_noise_of_many_rows() -> None:
    """How many rows there are is known after a pass alone."""
    model, x, y = wide()
    needs = lw.Sampled(num_samples=128).needs(2285, 2000)
    for more, held in ((1e5, False), (1e7, True)):  # the noise takes 2 MB, and so does what it leaves at first
        method = lw.Sampled(num_samples=128, memory=needs + more)
        ridge = lw.fit(model, [(x, y)], "classification", method=method, prior=1.0).posterior.solver.ridge
        assert (ridge.design.factors is not None) == held


def test_its_name_has_the_defaults() -> None:
    model, x, y = setting()
    one, other = (lw.fit(model, [(x, y)], lw.Gaussian(), method=m, prior=1.0) for m in ("auto", lw.Auto()))
    assert one.why == other.why == lw.Auto().choose(303, 1200).why
    assert torch.equal(one.functions(x[:5]).cov, other.functions(x[:5]).cov)


def test_the_reason_stays() -> None:
    model, x, y = setting()
    posterior = lw.fit(model, [(x, y)], lw.Gaussian(), method="auto", prior=1.0)
    assert posterior.with_prior(2.0).why == posterior.tuned().why == posterior.why != ""


def test_some_of_the_weights_are_counted_alone() -> None:
    case = BY_NAME["mlp"]
    fit = lambda weights: problems.fit(case, "auto", weights=weights, prior=1.0)
    assert fit(None).why.startswith("Kron: 83 weights, 18 rows")
    assert fit(lw.last_layer).why.startswith("Kron: 18 weights, 18 rows")


def test_every_token_is_a_datum() -> None:
    case = BY_NAME["token_level"]
    posterior = problems.fit(case, "auto", prior=1.0)
    assert posterior.why.startswith("Kron: 123 weights, 72 rows")  # six inputs, four tokens, three classes


def test_ignored_data_are_counted() -> None:
    """They have rows in a design, and a limit without them would be refused."""
    torch.manual_seed(0)
    model, x, y = (
        nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 5)),
        torch.randn(20, 3),
        torch.arange(20) % 5,
    )
    y[::2] = -100
    some = lw.subnetwork(torch.arange(0, 905, 2))
    posterior, given = (
        lw.fit(model, [(x, y)], "classification", method=method, weights=some, prior=1.0)
        for method in ("auto", lw.KernelSpace())
    )
    assert posterior.why.startswith("KernelSpace: 453 weights, 100 rows")
    assert torch.equal(posterior.log_evidence(), given.log_evidence())


def test_ignored_tokens_are_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 40), nn.Tanh(), nn.Linear(40, 5))
    batches = []
    for tokens in (4, 6):  # lengths may differ
        y = torch.randint(0, 5, (3, tokens))
        y[:, 2:] = -100
        batches.append((torch.randint(0, 7, (3, tokens)), y))
    posterior = lw.fit(model, batches, "classification", method="auto", prior=1.0)
    # Three inputs of four tokens and three of six, with five classes.
    assert posterior.why.startswith("Kron: 485 weights, 150 rows")


def test_nothing_but_ignored_data_is_refused() -> None:
    with pytest.raises(lw.errors.DataError, match="every target is ignored"):
        lw.fit(
            nn.Linear(3, 2), [(torch.randn(4, 3), torch.full((4,), -100))], "classification", method="auto", prior=1.0
        )


def test_a_precision_to_be_learned_counts() -> None:
    """Samples are solved for at several precisions; exact methods have all of them at once."""
    given, learned = (lw.Auto().choose(100_000, 4_000, tuned=tuned) for tuned in (False, True))
    assert given.method == lw.Sampled(num_samples=64, memory=4 * GIB)
    assert learned.method == lw.Kron()
    assert "Sampled would take" in learned.why
    assert lw.Auto().choose(500, 10_000) == lw.Auto().choose(500, 10_000, tuned=True)


def test_the_class_in_place_of_a_method_is_refused() -> None:
    model, x, y = setting()
    with pytest.raises(lw.errors.UnsupportedError, match=r"method is the class Auto; expected an object: Auto\(\)"):
        lw.fit(model, [(x, y)], lw.Gaussian(), method=lw.Auto)


def test_a_registered_method_can_offer_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cheap(lw.Full):
        @classmethod
        def offer(cls, requirements: Requirements) -> Offer | None:
            return Offer(cls(), 0, 1.0, 1.0, "exact and cheap") if requirements.weights > 100 else None

    monkeypatch.setitem(METHODS, "cheap", Cheap)
    assert lw.Auto(memory=10.0).choose(1000, 1000).why.startswith("Cheap: 1,000 weights, 1,000 rows")
    assert named(lw.Auto().choose(50, 1000)) == "Full"


def test_single_weights_fall_back_on_a_method_that_takes_them() -> None:
    tight = lw.Auto(memory=1.0)
    assert type(tight.choose(1000, 1000).method) is lw.Kron
    assert type(tight.choose(1000, 1000, single=True).method) is lw.Diagonal
