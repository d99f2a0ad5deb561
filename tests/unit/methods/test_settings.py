"""Settings that make no sense are refused when a method is made, in every method alike; draws are the same again."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw

WHOLE = [0, -1, 2.5, math.nan, True, "a"]
POSITIVE = [0.0, -1.0, math.nan, True, "a"]
NAMED = ["x", 3]
CURVATURE = [*NAMED, "hessian"]

BAD: dict[type, dict[str, list[Any]]] = {
    lw.Full: {"limit": WHOLE, "curvature": NAMED, "draws": WHOLE},
    lw.Diagonal: {"curvature": CURVATURE, "draws": WHOLE},
    **{
        kind: {
            "curvature": CURVATURE, "sharing": NAMED, "full_limit": WHOLE[1:], "draws": WHOLE, "factor_limit": WHOLE,
        }
        for kind in (lw.Kron, lw.EKron)
    },
    lw.LowRank: {"rank": WHOLE, "block": WHOLE, "tolerance": [*POSITIVE, math.inf], "curvature": CURVATURE},
    lw.KernelSpace: {"limit": WHOLE, "curvature": CURVATURE},
    lw.Sampled: {
        **dict.fromkeys(["num_samples", "width", "probes", "steps", "batch", "epochs"], WHOLE), "memory": POSITIVE,
        "tolerance": [*POSITIVE, 1.0], "solver": NAMED, "objective": NAMED, "curvature": CURVATURE,
    },
    lw.baselines.MCDropout: {"samples": [*WHOLE, 1], "seed": WHOLE[1:]},
    lw.baselines.Ensemble: {"members": [*WHOLE, 1]},
    lw.baselines.SWAG: {
        **{key: [*WHOLE, 1] for key in ["snapshots", "rank", "samples"]}, "seed": WHOLE[1:],
        **dict.fromkeys(["epochs_between", "steps_between", "batch_size"], WHOLE),
        "learning_rate": [*POSITIVE, math.inf], "weight_decay": [*POSITIVE[1:], math.inf],
        "momentum": [*POSITIVE[1:], 1.0],
    },
    lw.HFL: {
        **dict.fromkeys(["steps", "batch_size", "pushes"], WHOLE), "tolerance": POSITIVE, "drift": POSITIVE[1:],
        **{key: [*POSITIVE, math.inf] for key in ["lam", "learning_rate"]}, "dtype": [torch.int64, "float64"],
        **dict.fromkeys(["mode", "solver", "variant"], NAMED),
    },
}  # fmt: skip
CHECKED_LATER = {"models", "train", "evaluation", "calibration", "needs_prior"}
SETTINGS = [
    (method, name, value) for method, names in BAD.items() for name, values in names.items() for value in values
]


@pytest.mark.parametrize(("method", "name", "value"), SETTINGS)
def test_a_setting_that_makes_no_sense_is_refused(method: type, name: str, value: Any) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=rf"{name} is .*; expected"):
        method(**{name: value})


@pytest.mark.parametrize("method", BAD)
def test_every_setting_is_tried(method: type) -> None:
    assert {field.name for field in fields(method)} - CHECKED_LATER == set(BAD[method])


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
