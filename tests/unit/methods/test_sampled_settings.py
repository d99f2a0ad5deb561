"""Settings of Sampled that cannot be meant, refused before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lapwing as lw

COUNTS = ["num_samples", "width", "probes", "steps", "batch", "epochs"]


@pytest.mark.parametrize("value", [2.5, 4.0, True, "4", None])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=f"{name} is {value!r}; expected an integer"):
        lw.Sampled(**{name: value})


@pytest.mark.parametrize("value", [0.0, 1.0, 2, -1e-3, math.inf, -math.inf, math.nan, True, False, "small", None, 1j])
def test_tolerances_lie_between_zero_and_one(value: Any) -> None:
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"tolerance is .*; expected a number between 0 and 1, both excluded"
    ):
        lw.Sampled(tolerance=value)


@pytest.mark.parametrize("width", [0, -3])
def test_widths_are_positive(width: int) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=f"width is {width}; expected at least 1"):
        lw.Sampled(width=width)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "4 GiB"])
def test_memory_is_positive_and_finite(value: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"memory is .*; expected a positive, finite number"):
        lw.Sampled(memory=value)


def test_memory_that_holds_no_solve_is_refused() -> None:
    data = [(torch.randn(8, 30), torch.randn(8, 2))]
    needs = lw.Sampled().needs(62, 16)
    fit = lambda memory: lw.fit(nn.Linear(30, 2), data, "regression", method=lw.Sampled(memory=memory), prior=1.0)
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"16 samples of 62 weights needs \d+ MiB; memory is \d+ MiB. Raise it"
    ):
        fit(needs - 1)
    fit(needs)


@pytest.mark.parametrize("name", COUNTS)
def test_numbers_of_numpy_will_do(name: str) -> None:
    assert getattr(lw.Sampled(**{name: np.int64(5)}), name) == 5
    assert lw.Sampled(tolerance=np.float64(0.1)).tolerance == 0.1
