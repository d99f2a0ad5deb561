"""Detection of unusual inputs against scikit-learn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from lapwing.metrics import aupr, auroc, fpr95


@pytest.fixture(params=[None, 7], ids=["distinct", "many ties"])
def scores(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inside, outside = torch.randn(83, generator=generator), torch.randn(57, generator=generator) + 0.7
    if request.param is not None:
        inside, outside = (torch.round(t * request.param / 6) for t in (inside, outside))
    return inside, outside


def pooled(inside: torch.Tensor, outside: torch.Tensor) -> tuple[list[int], np.ndarray]:
    return [0] * len(inside) + [1] * len(outside), torch.cat([inside, outside]).numpy()


def test_auroc_equals_scikit_learn(scores: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert auroc(*scores) == pytest.approx(roc_auc_score(*pooled(*scores)), rel=1e-12)


def test_aupr_equals_scikit_learn(scores: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert aupr(*scores) == pytest.approx(average_precision_score(*pooled(*scores)), rel=1e-12)


@pytest.mark.parametrize("count", [57, 40, 20, 3])
def test_fpr95_equals_scikit_learn(scores: tuple[torch.Tensor, torch.Tensor], count: int) -> None:
    """At 20 and 40 scores 95 % is a whole number of them, and one fewer would not be enough."""
    inside, outside = scores[0], scores[1][:count]
    false_rate, true_rate, _ = roc_curve(*pooled(inside, outside), drop_intermediate=False)
    assert fpr95(inside, outside) == pytest.approx(false_rate[np.argmax(true_rate >= 0.95)], rel=1e-12)


def test_scores_apart_and_equal_scores() -> None:
    low, high = torch.zeros(3), torch.ones(5)
    assert (auroc(low, high), aupr(low, high), fpr95(low, high)) == (1, 1, 0)
    assert (auroc(high, low), fpr95(high, low)) == (0, 1)
    assert (auroc(low, torch.zeros(5)), fpr95(low, torch.zeros(5))) == (0.5, 1)
    assert aupr(low, torch.zeros(5)) == pytest.approx(5 / 8)


def test_infinite_scores_have_an_order() -> None:
    inside, outside = torch.tensor([-float("inf"), 1.0]), torch.tensor([float("inf"), 2.0])
    assert (auroc(inside, outside), aupr(inside, outside), fpr95(inside, outside)) == (1, 1, 0)


@pytest.mark.parametrize("score", [auroc, aupr, fpr95])
def test_scores_without_an_order_are_refused(score: Callable[..., float]) -> None:
    with pytest.raises(ValueError, match="NaN"):
        score(torch.zeros(2), torch.tensor([float("nan")]))
    for wrong in (torch.zeros(0), torch.zeros(3, 2), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"expected \(B,\)"):
            score(torch.zeros(2), wrong)
