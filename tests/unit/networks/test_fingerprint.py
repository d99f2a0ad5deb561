"""A posterior belongs to the weights it was fitted to, and to no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lapwing.errors import ModelError
from lapwing.networks.fingerprint import Fingerprint
from tests.cases import BY_NAME


def swap_rows(model: nn.Module) -> None:
    model.two.weight.data = model.two.weight.data.flip(0)


def swap_entries(model: nn.Module) -> None:
    row = model.head.weight.data[0]
    row[[0, 1]] = row[[1, 0]]


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "in place": (lambda m: m.head.weight.data.mul_(1.001), r"head\.weight"),
    "replaced": (lambda m: setattr(m.head, "bias", nn.Parameter(torch.zeros_like(m.head.bias))), r"head\.bias"),
    "one entry": (lambda m: m.stem.weight.data[0, 0, 0].add_(1e-6), r"stem\.weight"),
    "a buffer": (lambda m: m.norm1.running_mean.add_(0.01), r"norm1\.running_mean"),
    "sign": (lambda m: m.two.weight.data.neg_(), r"two\.weight"),
    "not a number": (lambda m: m.head.bias.data.fill_(float("nan")), r"head\.bias"),
    "rows swapped": (swap_rows, r"two\.weight"),
    "entries swapped": (swap_entries, r"head\.weight"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_changed_weights_are_refused_by_name(change: str, dtype: torch.dtype) -> None:
    make, named = CHANGES[change]
    model = BY_NAME["resnet_batchnorm"].build(dtype)
    before = Fingerprint.of(model)
    before.refuse_other(model)
    make(model)
    with pytest.raises(ModelError, match=named + ".*has changed"):
        before.refuse_other(model)


def test_other_parameters_are_refused_with_their_names() -> None:
    before = Fingerprint.of(nn.Linear(4, 3))
    with pytest.raises(ModelError, match=r"other parameters.*weight.*\(3, 5\)"):
        before.refuse_other(nn.Linear(5, 3))
    with pytest.raises(ModelError, match=r"other parameters.*bias"):
        before.refuse_other(nn.Linear(4, 3, bias=False))


def test_equal_weights_in_another_model_pass() -> None:
    case = BY_NAME["resnet_batchnorm"]
    Fingerprint.of(case.build()).refuse_other(case.build())
