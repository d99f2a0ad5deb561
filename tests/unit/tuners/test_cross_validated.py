"""Cross-validation: the same as scoring every fold by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from tests.tolerances import assert_close
from tests.unit.tuners.settings import (
    HELD,
    MLP,
    VALUES,
    D,
    log_densities,
    setting,
)

HELD_OUT: Any = [(torch.zeros(2, 4, dtype=D), torch.zeros(2, 3, dtype=D))]


@pytest.mark.parametrize("folds", [2, 3, 5, 7, 11])
@pytest.mark.parametrize("name", ["regression", "classification"])
def test_cross_validation_is_brute_force(name: str, folds: int) -> None:
    """Datum i is in fold i mod folds, across batches; more folds than data leave a fold for each datum."""
    fitted, held = setting(name)
    tuned = fitted.tuned(lw.tuners.CrossValidated(held, VALUES, folds=folds))
    each = torch.stack([-log_densities(fitted.with_prior(v), held) for v in VALUES], 1)  # (data, values)
    scores = torch.stack([each[k::folds].mean(0) for k in range(min(folds, len(each)))])
    means = scores.mean(0)
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), means)
    best = int(means.argmin())
    assert float(tuned.prior.values) == VALUES[best]
    error = float(scores.std(0)[best]) / math.sqrt(len(scores))
    assert tuned.trace.findings[0] == (
        f"precision {VALUES[best]:.3g} has the best mean, {float(means[best]):.4g} ± {error:.2g} "
        f"over {len(scores)} folds"
    )
    assert (tuned.trace.tuner, tuned.trace.score) == ("CrossValidated", "mean held-out metric")


def test_cross_validation_within_one_error() -> None:
    """The largest precision whose mean is no further from the best than the best one's standard error."""
    fitted, held = setting()
    held = [(x, MLP.build()(x).detach() + 2 * y.sign()) for x, y in held]
    plain = fitted.tuned(lw.tuners.CrossValidated(held, VALUES, folds=3))
    wary = fitted.tuned(lw.tuners.CrossValidated(held, VALUES, folds=3, one_error=True))
    each = torch.stack([-log_densities(fitted.with_prior(v), held) for v in VALUES], 1)
    scores = torch.stack([each[k::3].mean(0) for k in range(3)])
    means, errors = scores.mean(0), scores.std(0) / math.sqrt(3)
    best = int(means.argmin())
    allowed = [v for v, m in zip(VALUES, means, strict=True) if m <= means[best] + errors[best]]
    assert float(wary.prior.values) == max(allowed)
    assert float(plain.prior.values) < float(wary.prior.values) < VALUES[-1]
    turned = fitted.tuned(lw.tuners.CrossValidated(held, VALUES[::-1], folds=3, one_error=True))
    assert float(turned.prior.values) == max(allowed)  # in whatever order they are given


def test_cross_validation_of_a_metric_of_ones_own() -> None:
    fitted, held = setting()
    seen: list[int] = []

    def metric(predictive: Any, y: Tensor) -> Tensor:
        seen.append(len(y))
        return (predictive.std - 0.7).abs().mean()

    tuned = fitted.tuned(lw.tuners.CrossValidated(held, VALUES, metric, folds=2))
    each = torch.stack([
        torch.cat([(fitted.with_prior(v).predict(x).std - 0.7).abs().mean(1) for x, _ in held]) for v in VALUES
    ], 1)  # fmt: skip
    means = torch.stack([each[0::2].mean(0), each[1::2].mean(0)]).mean(0)
    assert_close(torch.tensor([step.score for step in tuned.trace.steps], dtype=D), means)
    assert float(tuned.prior.values) == VALUES[int(means.argmin())]
    assert sum(seen) == sum(HELD) * len(VALUES)


@pytest.mark.parametrize("folds", [1, 0, -2])
def test_less_than_two_folds_are_refused(folds: int) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=rf"folds is {folds}; expected at least 2"):
        lw.tuners.CrossValidated(HELD_OUT, folds=folds)


def test_one_datum_makes_no_folds() -> None:
    fitted, held = setting()
    with pytest.raises(lw.errors.DataError, match="the held-out data give 1 fold; expected at least 2 data"):
        fitted.tuned(lw.tuners.CrossValidated([(held[0][0][:1], held[0][1][:1])], VALUES))
