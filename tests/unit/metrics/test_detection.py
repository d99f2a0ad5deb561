"""The area under the ROC curve against scikit-learn."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import roc_auc_score

from lapwing.metrics import auroc


@pytest.mark.parametrize("levels", [None, 7], ids=["distinct", "many ties"])
def test_auroc_equals_scikit_learn(levels: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    inside, outside = torch.randn(83, generator=generator), torch.randn(57, generator=generator) + 0.7
    if levels is not None:
        inside, outside = (torch.round(t * levels / 6) for t in (inside, outside))
    truth = [0] * len(inside) + [1] * len(outside)
    expected = roc_auc_score(truth, torch.cat([inside, outside]).numpy())
    assert auroc(inside, outside) == pytest.approx(expected, rel=1e-12)


def test_auroc_of_scores_apart_and_of_equal_scores() -> None:
    low, high = torch.zeros(3), torch.ones(5)
    assert auroc(low, high) == 1
    assert auroc(high, low) == 0
    assert auroc(low, torch.zeros(4)) == 0.5


def test_scores_without_an_order_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        auroc(torch.zeros(2), torch.tensor([float("nan")]))
    with pytest.raises(ValueError, match=r"expected \(B,\)"):
        auroc(torch.zeros(2), torch.zeros(0))
