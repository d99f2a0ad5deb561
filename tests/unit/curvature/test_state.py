"""Every curvature as plain data and back, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lapwing as lw
from lapwing.runtime.state import State, class_named
from tests import problems
from tests.cases import BY_NAME

D = torch.float64
CASE = BY_NAME["embedding"]
PER_OUTPUT = lw.Gaussian(per_output=True)
METHODS: dict[str, Any] = {
    "full": lw.Full(), "diagonal": lw.Diagonal(), "kron": lw.Kron(full_limit=7), "ekron": lw.EKron(),
    "low_rank": lw.LowRank(rank=5), "ella": lw.ELLA(num_landmarks=9, rank=5, residual=True),
}  # fmt: skip


def assert_same(one: State, two: State) -> None:
    assert (one.name, one.settings, list(one.parts)) == (two.name, two.settings, list(two.parts))
    assert list(one.tensors) == list(two.tensors)
    for key, tensor in one.tensors.items():
        assert tensor.dtype == two.tensors[key].dtype
        assert torch.equal(tensor, two.tensors[key])
    for key, part in one.parts.items():
        assert_same(part, two.parts[key])


def assert_restored(posterior: lw.Fitted) -> None:
    state = posterior.posterior.curvature.state()
    again = class_named(state.name).from_state(state, posterior.network)
    assert type(again) is type(posterior.posterior.curvature)
    assert_same(again.state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("method", METHODS)
def test_every_curvature_comes_back_from_its_state(method: str, dtype: torch.dtype) -> None:
    model = CASE.build().to(dtype)
    assert_restored(lw.fit(model, problems.batches(CASE), "classification", method=METHODS[method], prior=1.0))


@pytest.mark.parametrize("method", ["full", "diagonal", "kron"])
def test_one_curvature_for_each_output_comes_back(method: str) -> None:
    case = BY_NAME["mlp"]
    y = torch.randn(6, *case.outputs, dtype=D, generator=torch.Generator().manual_seed(1))
    assert_restored(lw.fit(case.build(), [(case.batch(6), y)], PER_OUTPUT, method=METHODS[method], prior=1.0))


def test_blocks_of_different_structures_do_not_add() -> None:
    kron, mixed = (
        lw.fit(CASE.build(), problems.batches(CASE), "classification", method=method, prior=1.0).posterior.curvature
        for method in (lw.Kron(), lw.Diagonal())
    )
    with pytest.raises(lw.errors.UnsupportedError, match="do not add; expected the same structures"):
        _ = kron + mixed
