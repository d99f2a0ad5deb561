"""Inverse problems that are refused, with what was seen and what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.linalg.operators import OperatorDesign
from tests.tolerances import assert_close
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
    "a list": ({"y": [0.0] * DY}, "y is a list; expected a tensor"),
    "NaN in y": ({"y": NAN}, "y holds NaN or infinity"),
    "complex y": ({"y": torch.zeros(DY, dtype=torch.complex64)}, "expected real numbers"),
    "negative noise": ({"noise_std": -0.1}, "noise_std is -0.1; expected a positive number"),
    "noise without a square": ({"noise_std": 1e-200}, "noise_std is 1e-200; expected a positive number whose square"),
    "large noise": ({"noise_std": 1e200}, "noise_std is 1e.200"),
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
    "arrays as results": ({"operator": functions(forward=lambda v: (v @ A.mT).numpy())}, "returned a ndarray"),
    "one vector alone": ({"operator": functions(forward=lambda v: A @ v.reshape(DX))}, "forward of an operator raises"),
    "an array": ({"operator": A.numpy()}, "the operator is a ndarray; expected a matrix"),
    "half precision": ({"operator": functions(like=A[:0, 0].half())}, "takes torch.float16; expected float32"),
    "solver": ({"solver": "exakt"}, "Did you mean 'exact'"),
    "weights": ({"weights": lw.last_layer}, "expected lw.all_weights, lw.named"),
    "no such weights": ({"weights": lw.named("nothing")}, "no parameter name matches"),
    "prior": ({"prior": "smooth"}, "prior is 'smooth'; expected a precision, or an object"),
    "negative precision": ({"prior": -1.0}, "prior is -1.0"),
    "g-prior": ({"prior": lw.priors.g_prior()}, "the prior GPrior takes groups or a scale"),
    "diagonal": ({"prior": lw.priors.diagonal(1.0)}, "not a sum of a few fixed matrices"),
    "tuner without evidence": ({"tuner": lw.tuners.MaximiseEvidence}, "expected an object: call it"),
    "tuner with data": ({"tuner": lw.tuners.FixedPoint()}, "tuner is FixedPoint; expected MaximiseEvidence or Ascend"),
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


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + torch.randn_like(x))


class Root(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.sqrt(0 * self.layer(x).abs())


def test_random_models_and_jacobians_that_are_not_finite_are_refused() -> None:
    x, y = torch.ones(1, 1, 5), torch.zeros(3)
    with pytest.raises(lw.errors.ModelError, match="two runs of the model with the same input differ"):
        lw.inverse.fit(Noisy().eval(), x, y)
    with pytest.raises(lw.errors.NumericalError, match="the Jacobian of the network holds NaN"):
        lw.inverse.fit(Root().eval(), x, y, prior=1.0, noise_std=0.1)


def test_kernels_that_are_computed_are_refused_unless_their_parameters_are_named() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(1, 2, 3)), nn.Conv1d(2, 1, 3)).eval()
    x, y = torch.ones(1, 1, 7), torch.zeros(3)
    with pytest.raises(lw.errors.ModelError, match="the kernel of 0 is computed from other parameters"):
        lw.inverse.fit(net, x, y, prior=1.0, noise_std=0.1)
    posterior = lw.inverse.fit(net, x, y, prior=1.0, noise_std=0.1, weights=lw.all_weights)
    network = posterior.problem.network
    assert len(network.selection.names) == 5
    jacobian = network.back(torch.eye(3, dtype=D))  # (3, P); weight_norm has no forward derivative
    assert_close(network.forward(torch.eye(jacobian.shape[1], dtype=D)), jacobian.mT)


def test_later_changes_of_what_was_given_do_not_matter() -> None:
    x, a = case().x.clone(), case().a.clone()
    posterior = fitted(x=x, operator=a)
    expected = fitted().samples(3, torch.Generator().manual_seed(0))
    x.mul_(3)
    a.mul_(3)
    posterior.reconstruction.add_(100)
    posterior.variance.mul_(0)
    assert_close(posterior.samples(3, torch.Generator().manual_seed(0)), expected)
    assert_close(posterior.std, fitted().std)


def test_inputs_made_in_inference_mode() -> None:
    with torch.inference_mode():
        x = case().x.clone()
    assert_close(fitted(x=x).std, fitted().std)


def test_other_priors_and_noises_as_users_give_them() -> None:
    posterior = fitted()
    with pytest.raises(lw.errors.UnsupportedError, match="the prior has other blocks"):
        posterior.with_prior(2.0)
    isotropic = fitted(prior=1.0)
    assert_close(isotropic.with_prior(2.0).covariance(), fitted(prior=2.0).covariance())
    assert_close(posterior.with_noise(0.04).covariance(), fitted(noise_std=0.2).covariance())
    with pytest.raises(lw.errors.DataError, match="noise is -1"):
        posterior.with_noise(-1.0)
    with pytest.raises(lw.errors.DataError, match=r"expected \(K, 17\)"):
        posterior.solve(torch.ones(15))


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
