"""Inverse problems that are refused, with what was seen and what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.linalg.design import OperatorDesign
from tests.unit.inverse.problems import DX, DY, D, case, fitted

A = case().a
NAN = torch.full((DY,), float("nan"), dtype=D)


def functions(forward: Any = None, back: Any = None, size: int = DX, like: Any = None) -> OperatorDesign:
    forward = (lambda v: v @ A.mT) if forward is None else forward
    return OperatorDesign(
        DY, size, forward, (lambda u: u @ A) if back is None else back, A[:0, 0] if like is None else like
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "length of y": ({"y": torch.zeros(DY + 1)}, r"y has the shape \(18,\); expected \(17,\)"),
    "shape of y": ({"y": torch.zeros(DY, 1)}, r"shape \(17, 1\); expected \(17,\)"),
    "a list": ({"y": [0.0] * DY}, "y is a list; expected a tensor"),
    "NaN in y": ({"y": NAN}, "y holds NaN or infinity"),
    "complex y": ({"y": torch.zeros(DY, dtype=torch.complex64)}, "expected real numbers"),
    "negative noise": ({"noise_std": -0.1}, "noise_std is -0.1; expected a positive number"),
    "no noise": ({"noise_std": 0.0}, "noise_std is 0.0"),
    "noise of NaN": ({"noise_std": float("nan")}, "noise_std is nan"),
    "noise as text": ({"noise_std": "low"}, "noise_std is 'low'"),
    "width of A": ({"operator": A[:, :-1]}, "takes 39 numbers and the network returns 40"),
    "a vector": ({"operator": A[0]}, r"tensor of shape \(40,\).*expected a matrix"),
    "a sparse vector": ({"operator": A[0].to_sparse()}, "expected a matrix"),
    "NaN in A": ({"operator": A * float("nan")}, "the operator: 680 of 680 entries are NaN"),
    "complex A": ({"operator": A.to(torch.complex64)}, "expected real numbers"),
    "no operator": ({"operator": "radon"}, "the operator is 'radon'; expected a matrix"),
    "a class": ({"operator": OperatorDesign}, "the class OperatorDesign, not an object"),
    "width of functions": ({"operator": functions(size=DX + 1)}, "takes 41 numbers and the network returns 40"),
    "not the transpose": ({"operator": functions(back=lambda u: u @ A + 1.0)}, "back is not the transpose of forward"),
    "wrong images": ({"operator": functions(forward=lambda v: v)}, r"made \(2, 40\) of rows"),
    "half precision": ({"operator": functions(like=A[:0, 0].half())}, "takes torch.float16; expected float32"),
    "solver": ({"solver": "exakt"}, "Did you mean 'exact'"),
    "weights": ({"weights": lw.last_layer}, "expected lw.all_weights, lw.named"),
    "no such weights": ({"weights": lw.named("nothing")}, "no parameter name matches"),
    "prior": ({"prior": "smooth"}, "prior is 'smooth'; expected a precision, or an object"),
    "negative precision": ({"prior": -1.0}, "prior is -1.0"),
    "class of a prior": ({"prior": lw.priors.FilterGP}, "expected a precision, or an object"),
    "g-prior": ({"prior": lw.priors.g_prior()}, "the prior GPrior takes groups or a scale"),
    "diagonal": ({"prior": lw.priors.diagonal(1.0)}, "no sum of a few fixed matrices"),
    "tuner": ({"tuner": "evidence"}, "expected an object such as"),
    "tuner without evidence": ({"tuner": lw.tuners.MaximiseEvidence}, "expected an object: call it"),
    "generator": ({"generator": 3}, "generator is 3"),
    "input": ({"x": torch.zeros(1, 2, 4, 5, dtype=D)}, "the model raises RuntimeError"),
    "NaN in the input": ({"x": case().x * float("nan")}, "inputs: 20 of 20 entries are NaN"),
    "meta": ({"x": case().x.to("meta")}, "meta device"),
    "model": ({"model": lambda x: x}, "expected a torch.nn.Module"),
}


@pytest.mark.parametrize("name", WRONG)
def test_unusable_arguments_are_refused(name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises(lw.LapwingError, match=message):
        fitted(**settings)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 1, 3)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layer(x)
        return out, out


def test_models_in_training_mode_and_other_outputs_are_refused() -> None:
    model = copy.deepcopy(case().model)
    nn.Module.add_module(model, "drop", nn.Dropout(0.5).train())
    with pytest.raises(lw.errors.ModelError, match="training mode"):
        fitted(model=model)
    with pytest.raises(lw.errors.ModelError, match="the model returns tuple; expected a tensor"):
        lw.inverse.fit(Pair().eval(), torch.zeros(1, 1, 5), torch.zeros(3))


def test_a_network_that_fits_exactly_says_nothing_about_the_noise() -> None:
    y = A @ case().model(case().x).detach().reshape(-1)
    operator = functions()
    y = operator.forward(case().model(case().x).detach().reshape(1, -1))[0]
    with pytest.raises(lw.errors.DataError, match="fits its 17 measurements exactly"):
        fitted(y=y, operator=operator, noise_std=None)
    assert fitted(y=y, operator=operator, noise_std=0.1).std.shape == (2, 4, 5)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [(torch.tensor([[0, 40]]), "pairs run from 0 to 40; expected 0 to 39"), (torch.tensor([[-1, 3]]), "from -1"),
     (torch.tensor([0, 1]), r"expected a tensor \(e, 2\)"), (torch.tensor([[0.0, 1.0]]), "integers"),
     ([[0, 1]], "integers")],
)  # fmt: skip
def test_unusable_pairs_are_refused(pairs: Any, message: str) -> None:
    with pytest.raises(lw.errors.DataError, match=message):
        fitted().class_variances(pairs)


def test_unusable_numbers_of_samples_are_refused() -> None:
    posterior = fitted()
    for n in (0, 2.5, "many"):
        with pytest.raises(lw.errors.UnsupportedError, match="n is"):
            posterior.samples(n)  # type: ignore[arg-type]
    with pytest.raises(lw.errors.UnsupportedError, match="generator is 3"):
        posterior.prior_samples(2, 3)  # type: ignore[arg-type]


def test_a_covariance_that_rounding_makes_singular_is_refused() -> None:
    posterior = fitted(noise_std=1e-12, operator=torch.cat([A, A]), y=torch.cat([case().y, case().y]))
    with pytest.raises(lw.errors.NumericalError, match="not positive definite in rounding"):
        posterior.log_evidence()
