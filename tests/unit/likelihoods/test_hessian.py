"""Hessians with two numbers for each output: equal to the root's, and with all digits where p is nearly one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.likelihoods.base import OutputHessian
from tests.tolerances import assert_close, tolerance

D = torch.float64
F3 = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
F5 = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
CASES: dict[str, tuple[Any, Tensor, Tensor]] = {
    "softmax": (lw.Categorical(), F3, torch.tensor([0, 2])),
    "weights": (lw.Categorical(class_weights=(0.5, 2.0, 3.0)), F3, torch.tensor([0, 2])),
    "ignored": (lw.Categorical(ignore_index=-1), F5, torch.tensor([[0, -1, 4], [-1, 3, 2]])),
    "binary": (lw.Bernoulli(pos_weight=3.0, ignore_index=-1), F5, torch.randint(-1, 2, (2, 3, 5))),
    "gaussian": (lw.Gaussian(noise_std=(0.5, 1.0, 2.0)), F3, F3 + 1),
    "poisson": (lw.Poisson(), F3, torch.ones(2, 3)),
    "heteroscedastic": (lw.HeteroscedasticGaussian(), F5[..., :4], F5[..., :2]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_product_of_the_root(name: str) -> None:
    likelihood, f, y = CASES[name]
    f = f.double()
    y = y.double() if y.is_floating_point() or name == "binary" else y
    root = likelihood.root(f, y)
    assert_close(likelihood.hessian(f, y).dense(), root @ root.mT)


def test_single_outputs_add_up() -> None:
    whole = OutputHessian(torch.rand(4, 3, dtype=D))
    assert_close(torch.stack([whole.for_output(c).diagonal for c in range(3)]).sum(0), whole.diagonal)


def test_confident_predictions_keep_their_digits() -> None:
    """1 - p = 1e-17 is no number in float64, but p (1 - p) is."""
    f = torch.tensor([[40.0, 0.0, 1.0]], dtype=D)
    small = torch.exp(torch.tensor([-40.0, -39.0], dtype=D))
    expected = torch.stack([small.sum(), small[0], small[1]])[None]
    diagonal = lw.Categorical().hessian(f, torch.tensor([0])).diagonal
    assert float((diagonal / expected - 1).abs().max()) <= tolerance(D)


@pytest.mark.parametrize(("columns", "width"), [(slice(0, 2), 2), (slice(1, 9), 3), (slice(4, 9), 0), (slice(None), 4)])
def test_columns_of_the_root(columns: slice, width: int) -> None:
    f, y = F5.double(), torch.tensor([[0, 1, 4], [1, 3, 2]])
    part = lw.Categorical().root_columns(f, y, columns)
    assert part.shape == (2, 3, 5, width)
    if width:
        assert_close(part, lw.Categorical().root(f, y)[..., columns])
