"""The variance of functions of the weights: a quadratic form of the gradient, or the response to a push."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.minima import copied, fitted, gapped, off, small
from tests.references.minimum import Energy
from tests.tolerances import SOLVED, assert_close

D = torch.float64
Function = Callable[[dict[str, Tensor]], Tensor]
FUNCTIONS: dict[str, Function] = {
    "a weight": lambda w: w["0.weight"][2, 1],
    "a layer's norm": lambda w: w["2.weight"].norm(),
    "of two layers": lambda w: (w["0.weight"].sum(1) * w["0.bias"]).tanh().sum() + w["2.bias"].square().sum(),
    "a tensor of one number": lambda w: w["2.bias"][:1].exp(),
}
WEIGHT_SPACE: dict[str, Any] = {
    "full": lw.Full(), "diagonal": lw.Diagonal(), "kron": lw.Kron(), "ekron": lw.EKron(),
    "low_rank": lw.LowRank(rank=5), "kernel_space": lw.KernelSpace(),
}  # fmt: skip


@pytest.fixture(params=list(FUNCTIONS))
def function(request: pytest.FixtureRequest) -> Function:
    return FUNCTIONS[request.param]


def slope(energy: Energy, function: Function) -> Tensor:
    """∇g at the weights, (P,)."""
    found: Tensor = torch.func.grad(lambda theta: function(energy.named(theta)).sum())(energy.theta)
    return found.detach()


@pytest.mark.parametrize(("kind", "outputs"), [("gaussian", 2), ("categorical", 3)])
def test_the_push_has_the_full_hessian(kind: str, outputs: int, function: Function) -> None:
    energy = small(kind, outputs)
    g = slope(energy, function)
    exact, ggn = (g @ torch.linalg.solve(h, g) for h in (energy.hessian(), energy.ggn()))
    found = fitted(energy, lw.HFL()).variance_of(function)
    assert found.shape == ()
    assert float(found) == pytest.approx(float(exact), rel=1e-6)
    assert abs(float(ggn / exact) - 1) > 1e-4


def test_a_push_of_a_wide_network() -> None:
    energy = gapped()
    norm = lambda w: w["2.weight"].norm()
    g = slope(energy, norm)
    exact = g @ torch.linalg.solve(energy.hessian(), g)
    found = fitted(energy, lw.HFL())
    assert float(found.variance_of(norm)) == pytest.approx(float(exact), rel=1e-6)
    details = found.posterior.respond_to(norm)
    assert float(details.cov) == pytest.approx(float(exact), rel=1e-6)
    assert float(details.missing) < 1e-6


def test_the_tangent_model_has_the_ggn(function: Function) -> None:
    energy = small("gaussian", 2)
    g = slope(energy, function)
    exact = g @ torch.linalg.solve(energy.ggn(), g)
    assert float(fitted(energy, lw.HFL(mode="linearised")).variance_of(function)) == pytest.approx(
        float(exact), rel=1e-8
    )


@pytest.mark.parametrize("method", WEIGHT_SPACE)
def test_a_belief_about_the_weights(method: str, function: Function) -> None:
    """gᵀ Λ⁻¹ g with the covariance that its samples have."""
    energy = small("categorical", 3)
    found = fitted(energy, WEIGHT_SPACE[method])
    rows = found.posterior.precision.sample(torch.eye(len(energy.theta), dtype=D))
    g = slope(energy, function)
    assert_close(found.variance_of(function), (rows @ g).square().sum(), SOLVED)
    if method in ("full", "kernel_space"):
        assert_close(found.variance_of(function), g @ torch.linalg.solve(energy.ggn(), g), SOLVED)


def test_an_output_is_a_function_of_the_weights() -> None:
    """Its variance is that of the prediction."""
    energy = small()
    x = torch.tensor([[0.5, -1.0]], dtype=D)

    def output(w: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(energy.model, w, (x,)).sum()

    for method in (lw.HFL(), lw.HFL(mode="linearised"), lw.Full(), lw.Kron()):
        found = fitted(energy, method)
        assert float(found.variance_of(output)) == pytest.approx(float(found.functions(x).variance), rel=1e-6)


@pytest.mark.parametrize("method", [lw.HFL(), lw.HFL(mode="linearised"), lw.Full()], ids=["push", "tangent", "full"])
def test_some_of_the_weights(method: Any) -> None:
    """Only what was selected is uncertain; a function of the rest is one of known numbers."""
    index = torch.tensor([1, 5, 13, 20, 24])
    energy = copied(small(), index=index)
    found = fitted(energy, method, weights=lw.subnetwork(index))
    g = slope(energy, lambda w: w["0.weight"].sum() + w["2.bias"].sum())
    precision = energy.hessian() if method == lw.HFL() else energy.ggn()
    exact = g @ torch.linalg.solve(precision, g)
    found_variance = found.variance_of(lambda w: w["0.weight"].sum() + w["2.bias"].sum())
    assert float(found_variance) == pytest.approx(float(exact), rel=1e-6)


METHODS: dict[str, Any] = {
    "push": lw.HFL(), "tangent": lw.HFL(mode="linearised"), "full": lw.Full(), "kron": lw.Kron(),
    "diagonal": lw.Diagonal(),
}  # fmt: skip
NONE: dict[str, tuple[Any, str]] = {
    "a matrix": (lambda w: w["0.weight"], r"gives a tensor of the shape \(6, 2\); expected a tensor of one number"),
    "nothing": (lambda w: w["0.weight"][:0].sum(1), r"gives a tensor of the shape \(0,\); expected a tensor of one"),
    "a number": (lambda w: float(w["0.weight"].detach().sum()), r"gives -?\d.*; expected a tensor of one number"),
    "words": (lambda w: "norm", r"gives 'norm'; expected a tensor of one number"),
    "a constant": (lambda w: w["0.weight"].detach().sum(), r"does not depend on them; expected one of the selected"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", NONE)
def test_what_is_no_scalar_of_the_weights_is_refused(method: str, kind: str) -> None:
    energy = small()
    found = fitted(energy, METHODS[method])
    function, message = NONE[kind]

    def run() -> None:
        with pytest.raises(lw.ModelError, match=message):
            found.variance_of(function)

    problems.unchanged(energy.model, run)


@pytest.mark.parametrize(
    "method",
    [lw.MapOnly(), lw.HFL(mode="pretrained"), lw.Ensemble(models=[small().model])],
    ids=["map", "pushed", "set"],
)
def test_beliefs_that_know_nothing_of_the_weights(method: Any) -> None:
    with pytest.raises(lw.UnsupportedError, match=r"has no variance of functions of the weights; choose a method that"):
        fitted(small(), method).variance_of(lambda w: w["2.bias"].sum())


def test_changed_weights_are_noticed() -> None:
    energy = copied(small())
    found = fitted(energy, lw.HFL())
    energy.model[2].bias.data += 1.0
    with pytest.raises(lw.ModelError, match=r"2\.bias.*has changed"):
        found.variance_of(lambda w: w["2.bias"].sum())


def test_float32() -> None:
    energy = small()
    model = copied(energy).model.float()
    norm = lambda w: w["2.weight"].norm()
    g = slope(energy, norm)
    for method, precision in ((lw.HFL(), energy.hessian()), (lw.HFL(mode="linearised"), energy.ggn())):
        found = lw.fit(model, [(energy.x.float(), energy.y.float())], lw.Gaussian(noise_std=0.2), method=method,
                       prior=0.5)  # fmt: skip
        exact = g @ torch.linalg.solve(precision, g)
        assert float(found.variance_of(norm)) == pytest.approx(float(exact), rel=1e-3)
    assert nn.utils.parameters_to_vector(model.parameters()).dtype == torch.float32


def test_a_function_at_its_own_minimum_has_no_variance_to_first_order() -> None:
    energy = small()
    known = energy.named(energy.theta)
    function = lambda w: (w["2.weight"] - known["2.weight"].to(w["2.weight"])).square().sum()
    for method in (lw.HFL(mode="linearised"), lw.Full()):
        assert float(fitted(energy, method).variance_of(function)) == 0.0
    assert off(known["2.weight"], energy.model[2].weight.detach()) == 0.0
