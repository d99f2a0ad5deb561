"""What scores take: NumPy arrays give the numbers of tensors, and what is no data is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lapwing as lw
from lapwing import metrics

GENERATOR = torch.Generator().manual_seed(2)
D = torch.float64
MEAN, Y = torch.randn(2, 23, 3, generator=GENERATOR, dtype=D)
STD = torch.rand(23, 3, generator=GENERATOR, dtype=D) + 0.2
DRAWS = torch.randn(7, 23, 3, generator=GENERATOR, dtype=D)
PROBS = torch.randn(23, 4, generator=GENERATOR, dtype=D).softmax(1)
SAMPLED = torch.randn(5, 23, 4, generator=GENERATOR, dtype=D).softmax(2)
LABELS = torch.randint(4, (23,), generator=GENERATOR)
SCORES = torch.randn(17, generator=GENERATOR, dtype=D)

CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "categorical_nll": (metrics.categorical_nll, (PROBS, LABELS)),
    "accuracy": (metrics.accuracy, (PROBS, LABELS)),
    "brier": (metrics.brier, (PROBS, LABELS)),
    "ece": (metrics.ece, (PROBS, LABELS)),
    "adaptive_ece": (metrics.adaptive_ece, (PROBS, LABELS)),
    "classwise_ece": (metrics.classwise_ece, (PROBS, LABELS)),
    "calibration": (lambda *data: metrics.calibration(*data, bins=1).accuracy, (PROBS[:, 0], LABELS == 0)),
    "normal_nll": (metrics.normal_nll, (MEAN, STD, Y)),
    "rmse": (metrics.rmse, (MEAN, Y)),
    "mae": (metrics.mae, (MEAN, Y)),
    "crps": (metrics.crps, (MEAN, STD, Y)),
    "crps_samples": (metrics.crps_samples, (DRAWS, Y)),
    "coverage": (metrics.coverage, (MEAN - STD, MEAN + STD, Y)),
    "interval_width": (metrics.interval_width, (MEAN - STD, MEAN + STD)),
    "picp": (metrics.picp, (MEAN, STD, Y)),
    "mpiw": (metrics.mpiw, (STD,)),
    "pit": (metrics.pit, (MEAN, STD, Y)),
    "pit_samples": (metrics.pit_samples, (DRAWS, Y)),
    "cqm": (metrics.cqm, (PROBS,)),
    "auroc": (metrics.auroc, (PROBS[:, 0], SCORES)),
    "aupr": (metrics.aupr, (PROBS[:, 0], SCORES)),
    "fpr95": (metrics.fpr95, (PROBS[:, 0], SCORES)),
    "risk_coverage": (lambda *data: metrics.risk_coverage(*data).risk, (SCORES, SCORES > 0)),
    "aurc": (metrics.aurc, (SCORES, SCORES > 0)),
    "joint_log_likelihood": (metrics.joint_log_likelihood, (SAMPLED, LABELS)),
    "dyadic_log_likelihood": (metrics.dyadic_log_likelihood, (SAMPLED, LABELS)),
    "bootstrap": (lambda *data: metrics.bootstrap(metrics.brier, *data, resamples=9).high, (PROBS, LABELS)),
}


def test_every_score_is_called_here() -> None:
    assert set(CALLS) == set(metrics.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_arrays_give_the_numbers_of_tensors(name: str) -> None:
    score, data = CALLS[name]
    expected = torch.as_tensor(score(*data))
    for given in ([t.numpy() for t in data], [data[0], *(t.numpy() for t in data[1:])]):
        assert torch.allclose(torch.as_tensor(score(*given)), expected, rtol=1e-12)


@pytest.mark.parametrize("name", CALLS)
def test_numbers_in_float32_give_nearly_the_same(name: str) -> None:
    score, data = CALLS[name]
    single = [t.float() if t.is_floating_point() else t for t in data]
    assert torch.allclose(torch.as_tensor(score(*single)).double(), torch.as_tensor(score(*data)).double(), atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("change", ["none", "list", "nan", "empty", "complex", "masked"])
def test_what_is_no_data_is_refused(name: str, change: str) -> None:
    score, data = CALLS[name]
    first: Any = {
        "none": None,
        "list": data[0].tolist(),
        "nan": torch.full_like(data[0], math.nan),
        "empty": data[0][:0],
        "complex": data[0].numpy() + 1j,
        "masked": np.ma.masked_array(data[0].numpy(), mask=False),
    }[change]
    with pytest.raises(lw.errors.DataError, match="expected"):
        score(first, *data[1:])


DETECTION = {"auroc", "aupr", "fpr95"}  # inside and outside may have different lengths


@pytest.mark.parametrize("name", [name for name, (_, data) in CALLS.items() if len(data) > 1 and name not in DETECTION])
def test_an_argument_of_another_length_is_refused(name: str) -> None:
    score, data = CALLS[name]
    with pytest.raises(lw.errors.DataError, match="expected"):
        score(*data[:-1], data[-1][:-2])


def test_arrays_that_pytorch_does_not_take_as_they_are() -> None:
    expected = metrics.rmse(MEAN, Y)
    fixed = Y.numpy().copy()
    fixed.flags.writeable = False
    assert metrics.rmse(MEAN, fixed) == expected
    backwards = np.ascontiguousarray(Y.numpy()[::-1])[::-1]
    assert metrics.rmse(MEAN, backwards) == expected
    assert metrics.rmse(MEAN, Y.numpy().astype(">f8")) == expected
    assert metrics.rmse(MEAN, Y.numpy().astype(np.longdouble)) == expected
    assert metrics.accuracy(PROBS, LABELS.numpy().astype(np.uint16)) == metrics.accuracy(PROBS, LABELS)
    with pytest.raises(lw.errors.DataError, match="a tensor or a NumPy array of real numbers"):
        metrics.rmse(MEAN, Y.numpy().astype(str))


def test_gradients_are_left_behind() -> None:
    assert isinstance(metrics.mae(MEAN.clone().requires_grad_(), Y), float)
    assert not metrics.pit(MEAN.clone().requires_grad_(), STD, Y).requires_grad


def test_scores_work_where_numpy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert metrics.rmse(torch.zeros(2), torch.tensor([3.0, 3.0])) == 3
    assert metrics.bootstrap(metrics.mae, torch.zeros(2), torch.ones(2), resamples=3).high == 1
    with pytest.raises(lw.errors.DataError, match="expected a tensor"):
        metrics.mae([0.0], [1.0])  # type: ignore[arg-type]
