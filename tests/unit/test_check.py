"""What ``check`` says before a fit: one row for each method, counted by hand for a small network."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.check import BASIS, Cost
from lapwing.registry import METHODS

# Counted by hand for 3-4-2 with biases: forward 4·4 + 5·2, backward through the second layer, both outputs seeded.
SIZE, FORWARD, BACKWARD = 26, 26, 10
EPOCH, SEEDED = 2 * FORWARD + BACKWARD, FORWARD + 2 * BACKWARD
KERNEL = (4 + 4) + (5 + 2)  # one entry of the kernel: the factors of both layers


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def inputs(count: int = 10) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(0))


def costs(data: int | None = None, model: nn.Module | None = None, **options: Any) -> dict[str, Cost]:
    report = lw.check(model or small(), inputs(), data=data, **options)
    return {cost.method: cost for cost in report.costs}


def test_every_method_with_a_cost_of_its_own_has_a_row() -> None:
    known = {kind.__name__ for kind in METHODS.values()}
    assert set(costs()) == known - {"FMGP", "Ensemble", "MCDropout", "SWAG"}


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
    held = lw.fit(model, [(x, x[:, :2])], "regression", method=lw.KernelSpace(), prior=1.0).curvature.vectors
    assert held.numel() * held.element_size() == costs(4)["KernelSpace"].stored


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
    held = lw.fit(model, [(x, x[:, :2])], "regression", method=lw.ELLA(), prior=1.0).curvature.directions
    assert held.numel() * held.element_size() == costs(4)["ELLA"].stored


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


def test_the_number_of_data() -> None:
    """That of the batch unless it is given; what costs the same for every datum does not depend on it."""
    assert lw.check(small(), inputs()).data == 10
    assert str(lw.check(small(), inputs(), data=10)) == str(lw.check(small(), inputs()))
    report = lw.check(small(), inputs(), data=777)
    assert str(report).endswith("Costs are counted in multiplications, for 777 data; times on a machine differ.")
    few, many = costs(10), costs(10_000)
    same = {name for name in few if few[name] == many[name]}
    assert same == {"Full", "Kron", "EKron", "Diagonal", "LowRank", "Sampled", "HFL", "MapOnly"}
    with pytest.raises(lw.errors.DataError, match="data is 0; expected the number of training data"):
        lw.check(small(), inputs(), data=0)


def test_shared_weights_are_kept_as_rows() -> None:
    """One output's gradient of a convolution is its weights, that of a linear layer its two factors."""
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    report = lw.check(model, torch.randn(5, 1, 8))
    found = {cost.method: cost for cost in report.costs}["VaLLA"]
    assert found.stored == 8 * (10 * (8 + (13 + 2) + 10) + report.weights)


def test_limits_and_ranks_are_those_of_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["lapwing.check"]  # as an attribute of the package it is the function
    monkeypatch.setattr(module, "Full", partial(lw.Full, limit=10))
    monkeypatch.setattr(module, "LowRank", partial(lw.LowRank, rank=5))
    found, size = costs(), sum(p.numel() for p in small().parameters())
    assert not found["Full"].supported
    assert found["Full"].note == "over 10 weights: choose fewer"
    assert found["LowRank"].note == "rank 5"
    assert found["LowRank"].stored == 8 * 5 * size


@pytest.mark.parametrize(("limit", "stored"), [(7, 7**2), (6, 7)])
def test_blocks_of_their_own_are_full_as_far_as_kron_says(
    limit: int, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["lapwing.check"], "Kron", partial(lw.Kron, full_limit=limit))

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(7))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.shift).tanh()

    found = {cost.method: cost for cost in lw.check(Shifted(), torch.randn(3, 7)).costs}
    assert found["Kron"].stored == 4 * stored


def test_single_weights() -> None:
    found = costs(weights=lw.subnetwork(torch.arange(5)))
    assert [name for name, cost in found.items() if not cost.supported] == ["Kron", "EKron"]
    assert found["KernelSpace"].stored == 8 * 5 * 5
    assert found["ELLA"].note == "rank 5, 20 landmarks"


def test_the_report_lines_up() -> None:
    lines = str(lw.check(small(), inputs())).splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("method"))
    end = len("method      ") + len("    stores  fit / epoch") - 1
    rows = lines[start : start + 12]
    assert rows[-1].startswith("MapOnly")
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
