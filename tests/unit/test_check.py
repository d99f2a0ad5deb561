"""What check reports, and trials of methods on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import trials
from lapwing.check import LEGEND
from lapwing.data.batches import Data
from lapwing.methods.base import Cost, Method
from lapwing.registry import METHODS
from tests.operations import OperationCount

# The report of ``check``: one row for each method, the recommended method, and what is refused.
#
# tests/unit/methods/test_costs.py compares the costs with what methods take, the tests of trials the times.

SIZE = 26  # weights of 3-4-2 with biases


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def inputs(count: int = 10) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(0))


def costs(data: int | None = None, model: nn.Module | None = None, **options: Any) -> Mapping[str, Cost]:
    return lw.check(model or small(), inputs(), data=data, **options).costs


def test_every_registered_method_has_a_row() -> None:
    report = lw.check(small(), inputs())
    assert list(report.costs) == [kind.__name__ for kind in METHODS.values()]
    assert report.unknown == ()


def test_a_method_that_does_not_know_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class MethodOfSomebodyElse(Method):
        def fit(self, *_: Any) -> Any:
            raise NotImplementedError

    before = lw.check(small(), inputs())
    monkeypatch.setitem(METHODS, "other", MethodOfSomebodyElse)
    report = lw.check(small(), inputs())
    assert report.unknown == ("MethodOfSomebodyElse",)
    assert report.costs == before.costs
    cells = ["MethodOfSomebodyElse", *["-"] * 4, "cost", "unknown"]
    assert any(line.split() == cells for line in report.details().split("\n"))


@pytest.mark.parametrize(
    ("name", "data", "note"),
    [
        ("KernelSpace", 10, "20 rows"),
        ("Sampled", 10, "16 samples, 2 products with the curvature; more if the prior is weak"),
        ("ELLA", 10_000, "rank 20, 2000 landmarks"),
        ("VaLLA", 10, "20 points"),
        ("VaLLA", 1_000, "100 points, 300 steps of 1000 data"),
        ("VaLLA", 50_000, "100 points, 500 steps of 100 data"),
        ("FMGP", 1_000, "100 points, 1000 steps of 100 data without the network"),
        ("SWAG", 1_000, "30 epochs of SGD, and those that try learning rates"),
        ("Ensemble", 10, "5 networks; their training is not counted"),
        ("EKron", 10, "two passes"),
    ],
)
def test_notes(name: str, data: int, note: str) -> None:
    cost = costs(data)[name]
    assert (cost.supported, cost.note) == (True, note)
    assert min(cost.stored, cost.peak, cost.fit_epochs, cost.predict_passes) > 0


@pytest.mark.parametrize(
    ("name", "data", "note"),
    [
        ("KernelSpace", 4097, "8194 rows, over 8192: fewer data"),
        ("SWAG", 10, "10 data are one mini-batch of 128: lower batch_size"),
        ("MCDropout", 10, "the model has no dropout layer"),
    ],
)
def test_refused(name: str, data: int, note: str) -> None:
    assert costs(data)[name] == Cost.unsupported(note)


def test_members() -> None:
    """A forward pass for each network; dropout takes one to fit and 32 to predict."""
    ensemble = costs()["Ensemble"]
    assert ensemble.predict_passes == pytest.approx(5)
    dropout = costs(model=nn.Sequential(*small(), nn.Dropout()).eval())["MCDropout"]
    assert (dropout.supported, dropout.stored) == (True, 4 * SIZE)
    assert dropout.predict_passes == pytest.approx(32)


def test_the_number_of_data() -> None:
    """It is that of the batch unless it is given; work that is the same for every datum does not depend on it."""
    assert lw.check(small(), inputs()).data == 10
    assert str(lw.check(small(), inputs(), data=10)) == str(lw.check(small(), inputs()))
    few, many = costs(1_000), costs(10**6)
    same = ("Diagonal", "MapOnly", "Ensemble")
    assert all(few[name].fit_epochs == pytest.approx(many[name].fit_epochs) for name in same)
    once = ("Full", "Kron", "EKron", "ELLA", "VaLLA", "FMGP")  # what does not grow with the data counts for less
    assert all(few[name].fit_epochs > many[name].fit_epochs for name in once)


def test_plain_passes_are_those_of_the_whole_network() -> None:
    """The last layer is a small part of an epoch, and its fit takes no backward pass: about a forward pass."""
    wide = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    last = costs(10_000, wide, weights="last_layer")["Diagonal"]
    assert last.fit_epochs < 0.6
    assert last.fit_epochs < 0.3 * costs(10_000, wide)["Diagonal"].fit_epochs


def test_limits_and_ranks_are_those_of_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "full", partial(lw.Full, limit=10))
    monkeypatch.setitem(METHODS, "low_rank", partial(lw.LowRank, rank=5))
    table = costs()
    assert table["Full"] == Cost.unsupported("over 10 weights: choose fewer")
    assert table["LowRank"].note == "rank 5"
    assert table["LowRank"].stored == 8 * 5 * (SIZE + 1) + 4 * SIZE


@pytest.mark.parametrize(("limit", "stored"), [(7, 8 * 7**2), (6, 4 * 7)])
def test_blocks_of_their_own_are_full_as_far_as_kron_says(
    limit: int, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "kron", partial(lw.Kron, full_limit=limit))

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(7))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.shift).tanh()

    assert lw.check(Shifted(), torch.randn(3, 7)).costs["Kron"].stored == stored + 4 * 7


def test_single_weights() -> None:
    table, before = costs(weights=lw.subnetwork(torch.arange(5))), costs()
    refused = [name for name in table if before[name].supported and not table[name].supported]
    assert refused == ["Kron", "EKron", "MixtureOfLaplace", "VariationalLastLayer"]
    assert table["KernelSpace"].stored == 8 * 5 * (5 + 1) + 4 * 5
    assert table["ELLA"].note == "rank 5, 20 landmarks"


def test_wide_layers_are_named() -> None:
    """10,000 inputs with more rows than half of them: above the limit of a matrix. An embedding never is."""
    wide = nn.Sequential(nn.Linear(9_999, 4), nn.Tanh(), nn.Linear(4, 2))
    rows = lambda data: lw.check(wide, torch.zeros(2, 9_999), data=data).costs
    assert rows(20_000)["Kron"].note == "input factor diagonal: 10,000 > 8,192"
    assert rows(20_000)["EKron"].note == "two passes; input factor diagonal: 10,000 > 8,192"
    assert rows(300)["Kron"].note == ""
    table = nn.Sequential(nn.Embedding(20_000, 3), nn.Flatten(), nn.Linear(6, 2))
    assert lw.check(table, torch.zeros(2, 2, dtype=torch.long), data=10**6).costs["Kron"].note == ""


@pytest.mark.parametrize(("outputs", "seeds"), [(64, 64), (65, 4)])
def test_many_outputs_are_drawn(outputs: int, seeds: int) -> None:
    """Above 64 outputs four labels are drawn for each datum: the pass back to the first layer runs as often."""
    table = costs(10_000, nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, outputs)))
    fit = table["Diagonal"].fit.passes / 10_000
    back = 50 * outputs
    assert seeds * back < fit < (seeds + 3) * back + 3 * 50 * 4


def test_a_prediction_of_many_outputs_is_drawn() -> None:
    """Sixteen pairs of functions: 33 forward passes, however many outputs there are."""
    many = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 257))
    assert costs(model=many)["Kron"].predict_passes == pytest.approx(33)


@pytest.mark.parametrize(
    ("limits", "size", "data"),
    [
        (lw.Auto(), 8, 200), (lw.Auto(), 200, 5), (lw.Auto(memory=3e5), 40, 60),
        (lw.Auto(memory=2e7, num_samples=8), 60, 300), (lw.Auto(memory=2**22, seconds=0.02), 600, 400),
    ],
)  # fmt: skip
def test_the_recommended_method_is_the_one_that_auto_takes(limits: lw.Auto, size: int, data: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(size, 12), nn.Tanh(), nn.Linear(12, 2)), torch.randn(data, size)
    posterior = lw.fit(model, [(x, torch.randn(data, 2))], "regression", method=limits)
    report = lw.check(model, x[:20], likelihood="regression", data=data, auto=limits)
    classes = lw.check(model, x[:20], data=data, auto=limits).recommended
    assert classes.why.endswith("for classes exact methods cost more and gain little")
    assert (type(report.recommended.method).__name__, report.recommended.why) == (posterior.method, posterior.why)
    assert str(report).startswith(f"Recommended: {posterior.why}\n")
    assert report.details().startswith(f"Recommended: {posterior.why}\n")


def test_the_budget_limits_the_peak() -> None:
    """Jacobians are taken in pieces that fit the byte budget."""
    wide = nn.Sequential(nn.Linear(3, 4000), nn.Tanh(), nn.Linear(4000, 10))
    with lw.memory.limited("8MB"):
        little = lw.check(wide, inputs(512), data=10**5).costs["Diagonal"].peak
    assert little < 0.5 * lw.check(wide, inputs(512), data=10**5).costs["Diagonal"].peak


def test_every_column_has_a_line_in_the_legend() -> None:
    text = lw.check(small(), inputs()).details()
    heads = next(line for line in text.splitlines() if line.startswith("method")).split()[1:]
    explained = [line.split()[0] for line in LEGEND.splitlines()]
    assert explained == ["shared", *heads]
    assert LEGEND in text


class Crowded(nn.Module):
    """Many layers, slow parameters and weights whose scale is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(5)))
        self.slopes = nn.ParameterList(torch.zeros(()) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.body(x)[..., 0] * slope.exp() for slope in self.slopes], -1)


@pytest.mark.parametrize(("build", "timed"), [(small, True), (Crowded, False)], ids=["small", "crowded"])
def test_the_recommendation_and_at_most_fifteen_lines_are_printed(build: Callable[[], nn.Module], timed: bool) -> None:
    model = build()
    report = lw.check(model, inputs(), data=100, timed=["diagonal"] if timed else False)
    first, *lines = str(report).splitlines()
    assert first == f"Recommended: {report.recommended.why}"
    assert len(lines) <= 15
    assert all(len(line) <= 130 for line in lines)
    assert any(line.startswith(type(report.recommended.method).__name__) for line in lines)
    assert ("slopes.0, slopes.1, slopes.2, slopes.3, ... (9)" in str(report)) == isinstance(model, Crowded)
    assert ("body.0.0.weight, body.1.0.weight" in str(report)) == isinstance(model, Crowded)
    whole = report.details()
    assert all(layer.name in whole for layer in report.layers)
    assert all(name in whole for name in report.costs)
    assert "extrapolated from times" in str(report) if timed else "counted in operations" in str(report)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data": 0}, lw.errors.DataError, "data is 0; expected the number of training data, at least 1"),
        ({"data": 2.5}, lw.errors.DataError, "data is 2.5; expected the number of training data"),
        ({"auto": "auto"}, lw.errors.UnsupportedError, "auto is 'auto'; expected the limits of the choice"),
        ({"timed": "kron"}, lw.errors.UnsupportedError, "timed is 'kron'; expected"),
        ({"timed": ["krone"]}, lw.errors.UnsupportedError, "expected .* names of methods, out of full, diagonal"),
        ({"likelihood": "classes"}, lw.errors.UnsupportedError, "likelihood is 'classes'; expected one of"),
        ({"weights": "first"}, lw.errors.UnsupportedError, "weights is 'first'; expected one of"),
    ],
)
def test_wrong_settings(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lw.check(small(), inputs(), **options)


def test_a_pair_is_inputs_and_targets_unless_the_model_needs_two() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.a(x) if mask is None else self.a(x) * mask

    class Both(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return self.a(x) * mask

    x = torch.randn(5, 3)
    for targets in (torch.randint(0, 2, (5,)), torch.randn(5, 1)):
        assert lw.check(Masked(), (x, targets)).weights == 8
    assert lw.check(Both(), (x, torch.ones(5, 2))).weights == 8
    assert lw.check(Both(), ((x, torch.ones(5, 2)), torch.randn(5, 1))).weights == 8


# Times extrapolated from one batch, with a clock that counts operations: the same on every machine.

DATA, BATCH = 320, 32
CPU = torch.device("cpu")
SHORTER = {"fmgp": {"steps": 10}, "swag": {"snapshots": 12, "rank": 8, "samples": 4}}  # counting takes its time
TIMED = ("full", "diagonal", "kron", "ekron", "low_rank", "map_only", "ella", "fmgp", "swag")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[OperationCount]:
    """A clock that shows the operations so far, in place of seconds.

    A number that is written counts for sixteen multiplications, as does each of a decomposition.
    """
    with OperationCount() as count:
        monkeypatch.setattr(trials, "BRIEF_SECONDS", 0.0)  # operations do not vary from call to call
        monkeypatch.setattr(trials, "CLOCK", lambda: 1e-9 * (count.products + 16 * (count.cubes + count.numbers)))
        yield count


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(DATA, 6, generator=generator), torch.randint(0, 3, (DATA,), generator=generator)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


@pytest.mark.parametrize("name", TIMED)
def test_a_fit_takes_what_was_extrapolated_from_one_batch(name: str, clock: OperationCount) -> None:
    model, batches = network(), data()
    method: Any = METHODS[name](**SHORTER.get(name, {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, name, lambda: method)
        cost = lw.check(model, batches[0], data=DATA, timed=[name]).costs[type(method).__name__]
    problem = lw.fit(model, batches[:1], "classification", method="map_only", prior=1.0).posterior.problem
    found: list[Any] = []
    fit = trials.shortest_time(lambda: found.append(method.fit(problem, Data(batches, CPU))), CPU, once=True)
    predict = lambda: trials.evaluate(found[-1].predict(batches[0][0]))
    first, later = trials.shortest_time(predict, CPU, once=True), trials.shortest_time(predict, CPU, once=True)
    assert cost.fit_seconds is not None
    assert cost.predict_seconds is not None
    assert 0.5 <= cost.fit_seconds / (fit + max(0.0, first - later)) <= 2
    assert 0.5 <= cost.predict_seconds / later <= 2


def test_what_a_long_trial_does_once_is_not_scaled_with_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where decompositions take far longer than the one that is timed says."""
    with OperationCount() as count:
        monkeypatch.setattr(trials, "CLOCK", lambda: 1e-9 * (count.products + 16 * count.numbers + 3000 * count.cubes))
        monkeypatch.setattr(trials, "eigh", lambda matrix: matrix)
        monkeypatch.setattr(trials, "SHORT_SECONDS", 0.0)
        model, batches, method = network(), data(), lw.Kron()
        cost = lw.check(model, batches[0], data=DATA, timed=["kron"]).costs["Kron"]
        problem = lw.fit(model, batches[:1], "classification", method="map_only", prior=1.0).posterior.problem
        seconds = trials.shortest_time(
            lambda: trials.evaluate(method.fit(problem, Data(batches, CPU)).predict(batches[0][0])), CPU, once=True
        )
    assert cost.fit_seconds is not None
    assert 0.7 <= cost.fit_seconds / seconds <= 1.4


def test_ratios_are_those_of_the_seconds(clock: OperationCount) -> None:
    model, batches = network(), data()
    report = lw.check(model, batches[0], data=DATA, timed=["kron"])
    cost, parameters = report.costs["Kron"], list(model.parameters())
    step = trials.shortest_time(lambda: torch.autograd.grad(model(batches[0][0]).sum(), parameters), CPU, once=True)
    assert cost.fit_seconds is not None
    assert cost.fit_epochs == pytest.approx(cost.fit_seconds / (step * DATA / BATCH), rel=0.02)
    assert report.timed
    assert report.costs["Diagonal"].fit_seconds is None  # was not asked for


def test_a_trial_has_the_optimiser_of_all_data() -> None:
    """On one batch VaLLA would learn by L-BFGS, on these data by Adam."""
    workload = lw.check(network(), data()[0], data=10**6).workload
    trial = lw.VaLLA().trial(workload)
    assert (trial.optimiser, trial.steps) == ("adam", 5)
    assert lw.Kron().trial(workload) == lw.Kron()


def test_a_method_that_takes_too_long_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fit runs, and the seconds are those of the work at the speed of plain passes."""
    monkeypatch.setattr(trials, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(lw.Kron, "fit", lambda *_: pytest.fail("a trial ran"))
    model, batches = network(), data()
    counted = lw.check(model, batches[0], data=DATA).costs["Kron"]
    cost = lw.check(model, batches[0], data=DATA, timed=["kron"]).costs["Kron"]
    assert cost.fit_seconds is not None
    assert cost.fit_seconds > 0
    assert (cost.stored, cost.peak, cost.fit) == (counted.stored, counted.peak, counted.fit)


def test_a_refused_trial_states_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise lw.errors.NumericalError("no minimum.")

    monkeypatch.setattr(lw.Kron, "fit", refuse)
    cost = lw.check(network(), data()[0], data=DATA, timed=["kron"]).costs["Kron"]
    assert cost.note == "not timed: no minimum."
    assert cost.fit_seconds is not None


@pytest.mark.parametrize("likelihood", [None, "regression", "multilabel", "counts"])
def test_targets_are_drawn_where_there_are_none(likelihood: str | None) -> None:
    x = data()[0][0]
    cost = lw.check(network(), x, likelihood=likelihood, timed=["diagonal"]).costs["Diagonal"]
    assert cost.note == ""
    assert cost.fit_seconds is not None
    assert cost.fit_seconds > 0
