"""The report of ``check``: one row for each method, counted by hand for a small network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods.protocol import Cost
from lapwing.methods.sampled import BASIS
from lapwing.registry import METHODS

# Counted by hand for 3-4-2 with biases: forward 4·4 + 5·2, backward through the second layer, both outputs seeded.
SIZE, FORWARD, BACKWARD = 26, 26, 10
EPOCH, SEEDED = 2 * FORWARD + BACKWARD, FORWARD + 2 * BACKWARD
KERNEL = (4 + 4) + (5 + 2)  # one entry of the kernel: the factors of both layers


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
    class MethodOfSomebodyElse:
        def fit(self, *_: Any) -> Any:
            raise NotImplementedError

    before = lw.check(small(), inputs())
    monkeypatch.setitem(METHODS, "other", MethodOfSomebodyElse)
    report = lw.check(small(), inputs())
    assert report.unknown == ("MethodOfSomebodyElse",)
    assert report.costs == before.costs
    assert any(
        line.split() == ["MethodOfSomebodyElse", "-", "-", "cost", "unknown"] for line in str(report).split("\n")
    )


def test_kernel_space() -> None:
    cost = costs()["KernelSpace"]
    assert (cost.supported, cost.stored, cost.note) == (True, 8 * 20 * SIZE, "20 rows")
    assert cost.fit_epochs == pytest.approx((SEEDED + 2 * (2 * 20 * SIZE + 9 * 20**2)) / EPOCH)
    assert costs(4096)["KernelSpace"].supported
    assert costs(4096)["KernelSpace"].stored == 8 * SIZE * SIZE  # no more vectors than weights
    over = costs(4097)["KernelSpace"]
    assert (over.supported, over.note) == (False, "8194 rows, over 8192: fewer data")


def test_kernel_space_stores_what_was_counted() -> None:
    x, model = inputs(4).double(), small().double()
    vectors = lw.fit(
        model, [(x, x[:, :2])], "regression", method=lw.KernelSpace(), prior=1.0
    ).posterior.curvature.vectors
    assert vectors.numel() * vectors.element_size() == costs(4)["KernelSpace"].stored


def test_sampled() -> None:
    cost = costs()["Sampled"]
    vectors = SIZE + 2 * 16  # the basis is never wider than the weights are many
    assert (cost.stored, cost.note) == (8 * vectors * SIZE, "16 samples, a basis of 26")
    assert cost.fit_epochs == pytest.approx((SEEDED + 4 * vectors * FORWARD) / EPOCH)
    wide = costs(model=nn.Linear(3, 100))["Sampled"]
    assert wide.stored == 8 * (BASIS + 2 * 16) * 400


def test_ella() -> None:
    cost = costs()["ELLA"]
    assert (cost.stored, cost.note) == (8 * 20 * SIZE, "rank 20, 20 landmarks")
    once = 20 * (FORWARD + BACKWARD) + 20**2 * KERNEL + 9 * 20**3 + 20 * 20 * KERNEL
    assert cost.fit_epochs == pytest.approx((once / 10 + SEEDED + 2 * 20 * FORWARD) / EPOCH)
    assert costs(10_000)["ELLA"].note == "rank 20, 2000 landmarks"
    x, model = inputs(4).double(), small().double()
    directions = lw.fit(
        model, [(x, x[:, :2])], "regression", method=lw.ELLA(), prior=1.0
    ).posterior.curvature.directions
    assert directions.numel() * directions.element_size() == costs(4)["ELLA"].stored


def test_valla_at_all_outputs_learns_nothing() -> None:
    cost = costs()["VaLLA"]
    once = 20 * (FORWARD + BACKWARD) + 20**2 * KERNEL
    assert (cost.stored, cost.note) == (8 * (20 * (KERNEL + 20) + SIZE), "20 points")
    assert cost.fit_epochs == pytest.approx((once / 10 + SEEDED + 2 * 20 * KERNEL) / EPOCH)


@pytest.mark.parametrize(("data", "steps", "batch"), [(1000, 300, 1000), (50_000, 500, 100)])
def test_valla_learns_on_all_data_or_on_batches(data: int, steps: int, batch: int) -> None:
    cost, few = costs(data)["VaLLA"], batch == data
    assert cost.note == f"100 points, {steps} steps of {batch} data"
    pairs, candidates = 2 * 100 * KERNEL, 1000
    once = candidates * (FORWARD + BACKWARD) + candidates**2 * KERNEL
    again = 100 * (4 * EPOCH + 3 * 100 * KERNEL + 100**2)
    once += steps * (batch * ((0 if few else SEEDED) + 3 * pairs) + again)
    assert cost.fit_epochs == pytest.approx((once / data + SEEDED + pairs) / EPOCH)


@pytest.mark.parametrize(
    ("model", "stored", "fit", "note"),
    [
        (small(), 8 * 26 * 27, 6.0 * 26, "some tens of epochs"),
        (nn.Linear(3, 1000), 8 * 4000, 600.0, "some tens of epochs"),
        (nn.Linear(3, 6000), 8 * 24_000, 0.5, "by Adam"),
    ],
    ids=["dense", "iterated", "adam"],
)
def test_hfl(model: nn.Module, stored: int, fit: float, note: str) -> None:
    cost = costs(model=model)["HFL"]
    assert (cost.stored, cost.fit_epochs) == (stored, pytest.approx(fit))
    assert note in cost.note


def test_swag() -> None:
    assert costs()["SWAG"] == Cost(4 * 22 * SIZE, 0.0, "10 data are one mini-batch of 128: lower batch_size", False)
    cost = costs(1000)["SWAG"]
    assert (cost.supported, cost.stored) == (True, 4 * 22 * SIZE)
    assert cost.note == "30 epochs of SGD, and those that try learning rates"
    assert cost.fit_epochs == pytest.approx((30 * EPOCH + 33 * FORWARD) / EPOCH)
    x, model = inputs(200), small()
    draws = lw.fit(model, [(x, x[:, :2])], "regression", method=lw.baselines.SWAG(learning_rate=1e-3)).posterior.draws
    tensors = (draws.mean, draws.variance, draws.deviations)
    assert sum(t.numel() * t.element_size() for t in tensors) == cost.stored


def test_fmgp() -> None:
    cost = costs(1000)["FMGP"]  # two outputs, so the kernel is that of the last layer's five inputs
    assert (cost.stored, cost.note) == (8 * 100 * 105, "100 points, 1000 steps of 100 data without the network")
    step = 3 * (100 * 200 * 5 + 2 * 100 * 100**2 + 100**3)
    assert cost.fit_epochs == pytest.approx((FORWARD + step) / EPOCH)
    assert costs(model=nn.Linear(3, 1))["FMGP"].stored == 8 * 100 * 103  # one output: on the three inputs
    tokens = lw.check(nn.Linear(3, 2), torch.randn(4, 5, 3)).costs["FMGP"]
    assert (tokens.supported, tokens.note) == (False, "outputs for each token: use Kron")


def test_members() -> None:
    ensemble, dropout = costs()["Ensemble"], costs()["MCDropout"]
    assert (ensemble.stored, ensemble.note) == (4 * 5 * SIZE, "5 networks; their training is not counted")
    assert ensemble.fit_epochs == pytest.approx(5 * FORWARD / EPOCH)
    assert (dropout.supported, dropout.note) == (False, "the model has no dropout layer")
    dropout = costs(model=nn.Sequential(*small(), nn.Dropout()).eval())["MCDropout"]
    assert (dropout.supported, dropout.stored) == (True, 4 * SIZE)
    assert dropout.note == "32 forward passes for a prediction"
    assert dropout.fit_epochs == pytest.approx(FORWARD / EPOCH)


def test_the_number_of_data() -> None:
    """It is that of the batch unless it is given; work that is the same for every datum does not depend on it."""
    assert lw.check(small(), inputs()).data == 10
    assert str(lw.check(small(), inputs(), data=10)) == str(lw.check(small(), inputs()))
    report = lw.check(small(), inputs(), data=777)
    assert str(report).endswith("Costs are counted in multiplications, for 777 data; times on a machine differ.")
    few, many = costs(10), costs(10_000)
    same = {name for name in few if few[name] == many[name]}
    by_datum = {"Full", "Kron", "EKron", "Diagonal", "LowRank", "Sampled", "HFL", "MapOnly", "Ensemble", "MCDropout"}
    assert same == by_datum
    with pytest.raises(lw.errors.DataError, match="data is 0; expected the number of training data"):
        lw.check(small(), inputs(), data=0)


def test_shared_weights_are_kept_as_rows() -> None:
    """One output's gradient of a convolution is its weights, that of a linear layer its two factors."""
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    report = lw.check(model, torch.randn(5, 1, 8))
    assert report.costs["VaLLA"].stored == 8 * (10 * (8 + (13 + 2) + 10) + report.weights)


def test_limits_and_ranks_are_those_of_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "full", partial(lw.Full, limit=10))
    monkeypatch.setitem(METHODS, "low_rank", partial(lw.LowRank, rank=5))
    table, size = costs(), sum(p.numel() for p in small().parameters())
    assert not table["Full"].supported
    assert table["Full"].note == "over 10 weights: choose fewer"
    assert table["LowRank"].note == "rank 5"
    assert table["LowRank"].stored == 8 * 5 * size


@pytest.mark.parametrize(("limit", "stored"), [(7, 7**2), (6, 7)])
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

    assert lw.check(Shifted(), torch.randn(3, 7)).costs["Kron"].stored == 8 * stored


def test_single_weights() -> None:
    table, before = costs(weights=lw.subnetwork(torch.arange(5))), costs()
    assert [name for name in table if before[name].supported and not table[name].supported] == ["Kron", "EKron"]
    assert table["KernelSpace"].stored == 8 * 5 * 5
    assert table["ELLA"].note == "rank 5, 20 landmarks"


def test_the_report_lines_up() -> None:
    lines = str(lw.check(small(), inputs())).splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("method"))
    end = len("method      ") + len("    stores  fit / epoch") - 1
    rows = lines[start : start + 1 + len(METHODS)]
    assert [row.split()[0] for row in rows[1:]] == [kind.__name__ for kind in METHODS.values()]
    assert all(line[end] != " " and line[end + 1 : end + 3].strip() == "" for line in rows)


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


@pytest.mark.parametrize(("outputs", "seeds"), [(64, 64), (65, 4)])
def test_many_outputs_are_drawn_and_the_last_layer_takes_none(outputs: int, seeds: int) -> None:
    """Counted by hand for 3-4-C: a backward pass through the last layer for each seed, and both factors."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))
    report = costs(model=model)
    forward, backward = 4 * 4 + 5 * outputs, 5 * outputs
    passes, epoch = forward + seeds * backward, 2 * forward + backward
    factors = (4**2 + seeds * 4**2) + (5**2 + outputs**2)
    assert report["Kron"].fit_epochs == pytest.approx((passes + factors) / epoch)
    assert report["Diagonal"].fit_epochs == pytest.approx((passes + forward) / epoch)
    last = costs(model=model, weights="last_layer")["Kron"]
    assert last.fit_epochs == pytest.approx((5 * outputs + 5**2 + outputs**2) / (2 * 5 * outputs))


def test_wide_layers_are_named() -> None:
    """10,000 inputs with more rows than half of them: above the limit of a matrix. An embedding never is."""
    wide = nn.Sequential(nn.Linear(9_999, 4), nn.Tanh(), nn.Linear(4, 2))
    rows = lambda data: lw.check(wide, torch.zeros(2, 9_999), data=data).costs
    assert rows(20_000)["Kron"].note == "input factor diagonal: 10,000 > 8,192"
    assert rows(20_000)["EKron"].note == "two passes; input factor diagonal: 10,000 > 8,192"
    few, many = rows(300)["Kron"], rows(20_000)["Kron"]
    assert (few.note, few.stored) == ("", 8 * (300 * 10_000 + 4**2 + 5**2 + 2**2))
    assert many.stored == 8 * (10_000 + 4**2 + 5**2 + 2**2)
    table = nn.Sequential(nn.Embedding(20_000, 3), nn.Flatten(), nn.Linear(6, 2))
    cost = lw.check(table, torch.zeros(2, 2, dtype=torch.long), data=10**6).costs["Kron"]
    assert (cost.note, cost.stored) == ("", 8 * (20_000 + 3**2 + 7**2 + 2**2))
