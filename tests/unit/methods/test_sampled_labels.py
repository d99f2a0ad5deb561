"""Labels that a sampled curvature draws: the same again, and not in step with data of the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw


@pytest.mark.parametrize("method", [lw.Full, lw.Diagonal, lw.Kron, lw.EKron])
def test_sampled_labels_are_the_same_again(method: Any) -> None:
    """Without a generator: two fits are equal, whatever was drawn from torch's own between them."""
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.arange(30) % 4
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double().eval()  # the last layer is exact
    other = torch.Generator().manual_seed(5)
    one, two, new = (
        lw.fit(model, [(x, y)], "classification", method=method("fisher_mc"), prior=1.0, generator=generator)
        .functions(x).variance for generator in (None, None, other)
    )  # fmt: skip
    assert torch.equal(one, two)
    assert not torch.equal(one, new)


def test_sampled_labels_do_not_follow_data_of_the_same_seed() -> None:
    """Inputs drawn with seed 0 and labels with the same numbers would make x² of what is 1 on average."""
    torch.manual_seed(0)
    x = torch.randn(2000, 1, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False).double().eval()
    data, options = [(x, torch.zeros(2000, 1).double())], {"prior": 1.0}
    sampled, exact = (
        lw.fit(model, data, lw.Gaussian(noise_std=1.0), method=lw.Full(curvature), **options)
        .functions(x[:1]).variance.item() for curvature in ("fisher_mc", "ggn")
    )  # fmt: skip
    assert sampled == pytest.approx(exact, rel=0.3)  # the standard error is a twentieth; in step it would be a third
