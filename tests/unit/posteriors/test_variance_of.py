"""The variance of functions of weights or outputs: a quadratic form of the gradient, or the response to a push."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME
from tests.minima import copied, fitted, gapped, new, off, small
from tests.references import dense
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
PUSHES: dict[str, Any] = {"push": lw.HFL(), "tangent": lw.HFL(mode="linearised")}


@cache
def known(method: str, kind: str = "gaussian", outputs: int = 1) -> lw.Fitted:
    """A posterior of a network of ``small``, fitted once for all functions."""
    return fitted(small(kind, outputs), {**WEIGHT_SPACE, **PUSHES}[method])


@pytest.fixture(params=list(FUNCTIONS))
def function(request: pytest.FixtureRequest) -> Function:
    return FUNCTIONS[request.param]


def slope(energy: Energy, function: Function) -> Tensor:
    """∇g at the weights, (P,)."""
    slope: Tensor = torch.func.grad(lambda theta: function(energy.named(theta)).sum())(energy.theta)
    return slope.detach()


@pytest.mark.parametrize(("kind", "outputs"), [("gaussian", 2), ("categorical", 3)])
def test_the_push_has_the_full_hessian(kind: str, outputs: int, function: Function) -> None:
    energy = small(kind, outputs)
    g = slope(energy, function)
    exact, ggn = (g @ torch.linalg.solve(h, g) for h in (energy.hessian(), energy.ggn()))
    variance = known("push", kind, outputs).variance_of(function)
    assert variance.shape == ()
    assert float(variance) == pytest.approx(float(exact), rel=1e-6)
    assert abs(float(ggn / exact) - 1) > 1e-4


def test_a_push_of_a_wide_network() -> None:
    energy = gapped()
    norm = lambda w: w["2.weight"].norm()
    g = slope(energy, norm)
    exact = g @ torch.linalg.solve(energy.hessian(), g)
    posterior = fitted(energy, lw.HFL())
    assert float(posterior.variance_of(norm)) == pytest.approx(float(exact), rel=1e-6)
    details = posterior.posterior.respond_to(norm)
    assert float(details.cov) == pytest.approx(float(exact), rel=1e-6)
    assert float(details.missing) < 1e-6


def test_the_tangent_model_has_the_ggn(function: Function) -> None:
    energy = small("gaussian", 2)
    g = slope(energy, function)
    exact = g @ torch.linalg.solve(energy.ggn(), g)
    assert float(known("tangent", "gaussian", 2).variance_of(function)) == pytest.approx(float(exact), rel=1e-8)


@pytest.mark.parametrize("method", WEIGHT_SPACE)
def test_a_belief_about_the_weights(method: str, function: Function) -> None:
    """gᵀ Λ⁻¹ g with the covariance that its samples have."""
    energy = small("categorical", 3)
    posterior = known(method, "categorical", 3)
    rows = posterior.posterior.precision.sample(torch.eye(len(energy.theta), dtype=D))
    g = slope(energy, function)
    assert_close(posterior.variance_of(function), (rows @ g).square().sum(), SOLVED)
    if method in ("full", "kernel_space"):
        assert_close(posterior.variance_of(function), g @ torch.linalg.solve(energy.ggn(), g), SOLVED)


def test_samples_have_the_mean_of_their_squares(function: Function) -> None:
    """And many of them the variance of Full, to five of their standard errors."""
    energy = small("categorical", 3)
    posterior = fitted(energy, lw.Sampled(num_samples=400, tolerance=1e-8))
    g = slope(energy, function)
    by_samples = ((posterior.posterior.weight_samples(400) - energy.theta) @ g).square().mean()
    assert float(posterior.variance_of(function)) == pytest.approx(float(by_samples), rel=1e-6)
    exact = g @ torch.linalg.solve(energy.ggn(), g)
    assert float(posterior.variance_of(function)) == pytest.approx(float(exact), rel=5 * (2 / 400) ** 0.5)


@pytest.mark.parametrize("method", [lw.HFL(), lw.Full()], ids=["push", "full"])
def test_weights_outside_the_selection_are_known_numbers(method: Any) -> None:
    energy = small()
    posterior = fitted(energy, method, weights="last_layer")
    alone = posterior.variance_of(lambda w: w["2.bias"].sum())
    scaled = posterior.variance_of(lambda w: w["2.bias"].sum() * w["0.weight"][0, 0] + w["0.bias"].sum())
    factor = float(dict(energy.model.named_parameters())["0.weight"][0, 0].detach()) ** 2
    assert float(scaled) == pytest.approx(factor * float(alone), rel=1e-6)
    with pytest.raises(
        lw.errors.ModelError, match=r"does not depend on them; expected one of the selected weights, 2\.weight"
    ):
        posterior.variance_of(lambda w: w["0.bias"].sum())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_surroundings_without_gradients(around: Any) -> None:
    posterior = fitted(small(), lw.Full())
    outside = posterior.variance_of(lambda w: w["2.bias"].sum())
    with around():
        assert_close(posterior.variance_of(lambda w: w["2.bias"].sum()), outside)


def test_an_output_is_a_function_of_the_weights() -> None:
    """Its variance is that of the prediction."""
    energy = small()
    x = torch.tensor([[0.5, -1.0]], dtype=D)

    def output(w: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(energy.model, w, (x,)).sum()

    for method in ("push", "tangent", "full", "kron"):
        posterior = known(method)
        assert float(posterior.variance_of(output)) == pytest.approx(float(posterior.functions(x).variance), rel=1e-6)


@pytest.mark.parametrize("method", [lw.HFL(), lw.HFL(mode="linearised"), lw.Full()], ids=["push", "tangent", "full"])
def test_some_of_the_weights(method: Any) -> None:
    """Only what was selected is uncertain; a function of the rest is one of known numbers."""
    index = torch.tensor([1, 5, 13, 20, 24])
    energy = copied(small(), index=index)
    posterior = fitted(energy, method, weights=lw.subnetwork(index))
    g = slope(energy, lambda w: w["0.weight"].sum() + w["2.bias"].sum())
    precision = energy.hessian() if method == lw.HFL() else energy.ggn()
    exact = g @ torch.linalg.solve(precision, g)
    found_variance = posterior.variance_of(lambda w: w["0.weight"].sum() + w["2.bias"].sum())
    assert float(found_variance) == pytest.approx(float(exact), rel=1e-6)


METHODS = ("push", "tangent", "full", "kron", "diagonal")
NONE: dict[str, tuple[Any, str]] = {
    "a matrix": (
        lambda w: w["0.weight"],
        r"gives a tensor of shape \(6, 2\) .*; expected a tensor of one number. Take one entry, a sum or a mean",
    ),
    "nothing": (lambda w: w["0.weight"][:0].sum(1), r"gives a tensor of shape \(0,\) .*; expected a tensor of one"),
    "a number": (lambda w: float(w["0.weight"].detach().sum()), r"gives -?\d.*; expected a tensor of one number"),
    "a constant": (lambda w: w["0.weight"].detach().sum(), r"does not depend on them; expected one of the selected"),
    "no number": (lambda w: w["2.bias"].sum() * torch.nan, r"gives nan with slopes up to nan; expected finite numbers"),
    "a root of zero": (
        lambda w: (w["2.bias"] - w["2.bias"].detach()).sum().sqrt(),
        r"gives 0 with slopes up to inf; expected finite numbers\. Give one that is smooth.*no square root of zero",
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", NONE)
def test_functions_of_weights_that_are_not_scalars_are_refused(method: str, kind: str) -> None:
    energy, posterior = small(), known(method)
    function, message = NONE[kind]

    def run() -> None:
        with pytest.raises(lw.errors.ModelError, match="the function of the weights " + message):
            posterior.variance_of(function)

    problems.unchanged(energy.model, run)


@pytest.mark.parametrize(
    "method",
    [lw.baselines.MapOnly(), lw.HFL(mode="pretrained"), lw.baselines.Ensemble(models=[small().model])],
    ids=["map", "pushed", "set"],
)
def test_beliefs_that_know_nothing_of_the_weights(method: Any) -> None:
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"has no variance of functions of the weights; use Kron, Full"
    ):
        fitted(small(), method).variance_of(lambda w: w["2.bias"].sum())


def test_changed_weights_are_noticed() -> None:
    energy = copied(small())
    posterior = fitted(energy, lw.HFL())
    energy.model[2].bias.data += 1.0
    with pytest.raises(lw.errors.ModelError, match=r"2\.bias.*has changed"):
        posterior.variance_of(lambda w: w["2.bias"].sum())


def test_float32() -> None:
    energy = small()
    model = copied(energy).model.float()
    norm = lambda w: w["2.weight"].norm()
    g = slope(energy, norm)
    for method, precision in ((lw.HFL(), energy.hessian()), (lw.HFL(mode="linearised"), energy.ggn())):
        posterior = lw.fit(model, [(energy.x.float(), energy.y.float())], lw.Gaussian(noise_std=0.2), method=method,
                       prior=0.5)  # fmt: skip
        exact = g @ torch.linalg.solve(precision, g)
        assert float(posterior.variance_of(norm)) == pytest.approx(float(exact), rel=1e-3)
    assert nn.utils.parameters_to_vector(model.parameters()).dtype == torch.float32


def test_a_function_at_its_own_minimum_has_no_variance_to_first_order() -> None:
    energy = small()
    known = energy.named(energy.theta)
    function = lambda w: (w["2.weight"] - known["2.weight"].to(w["2.weight"])).square().sum()
    for method in (lw.HFL(mode="linearised"), lw.Full()):
        assert float(fitted(energy, method).variance_of(function)) == 0.0
    assert off(known["2.weight"], energy.model[2].weight.detach()) == 0.0


# Functions of the outputs


def of_outputs(energy: Energy, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∇ of g(f(x; θ)) at the weights, (P,)."""
    slope: Tensor = torch.func.grad(lambda theta: function(energy.output(theta, x)).sum())(energy.theta)
    return slope.detach()


@pytest.mark.parametrize("method", [*WEIGHT_SPACE, *PUSHES])
def test_a_linear_function_of_the_outputs_has_their_covariance(method: str) -> None:
    energy = small("categorical", 3)
    x = new(energy, 4)
    u = torch.randn(4, 3, dtype=D, generator=torch.Generator().manual_seed(2))
    posterior = known(method, "categorical", 3)
    cov = posterior.functions(x, joint=True).cov.reshape(12, 12)
    variance = problems.unchanged(energy.model, lambda: posterior.variance_of(lambda f: (u * f).sum(), x))
    assert variance.shape == ()
    assert float(variance) == pytest.approx(float(u.flatten() @ cov @ u.flatten()), rel=1e-6)


OF_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a probability over inputs": lambda f: f.softmax(-1)[:, 2].mean(),
    "the log of one": lambda f: f.log_softmax(-1)[1:2, 0],
    "an entropy": lambda f: -(f.softmax(-1) * f.log_softmax(-1)).sum(),
    "the largest logit": lambda f: f[0, int(f[0].argmax())],  # cannot be vectorised
}


@pytest.mark.parametrize("name", OF_OUTPUTS)
def test_a_function_of_the_outputs(name: str) -> None:
    """The push follows the function and has the full Hessian; the others are to first order, with the GGN."""
    energy, function = small("categorical", 3), OF_OUTPUTS[name]
    x = new(energy, 4)
    g = of_outputs(energy, function, x)
    exact, ggn = (float(g @ torch.linalg.solve(h, g)) for h in (energy.hessian(), energy.ggn()))
    assert abs(ggn / exact - 1) > 1e-3
    posterior = known("push", "categorical", 3)
    assert float(posterior.variance_of(function, x)) == pytest.approx(exact, rel=1e-6)
    details = posterior.posterior.respond_to(function, x)
    assert details.cov.shape == (1, 1)
    assert float(details.bend) < 0.01
    for method in ("tangent", "full"):
        assert float(known(method, "categorical", 3).variance_of(function, x)) == pytest.approx(ggn, rel=1e-8)


def test_adam_pushes_a_function_of_the_outputs() -> None:
    energy = small("bernoulli", 1)
    x, function = new(energy, 4), lambda f: f.sigmoid().mean()
    g = of_outputs(energy, function, x)
    method = lw.HFL(solver="adam", steps=150, learning_rate=1e-2)
    variance = fitted(energy, method, data=[(energy.x, energy.y)]).variance_of(function, x)
    assert float(variance) == pytest.approx(float(g @ torch.linalg.solve(energy.hessian(), g)), rel=0.01)


@pytest.mark.parametrize("name", ["token_level", "dict_input", "tuple_input", "lstm", "embedding", "squeezed"])
def test_outputs_of_every_shape(name: str) -> None:
    """Tokens, several inputs, recurrence: the function sees f (B, [T,] C), and a linear one has the covariance of it.

    At a minimum where Hessian and GGN are the same.
    """
    case = BY_NAME[name]
    model, inputs = case.build(), case.batch(2, seed=1)
    y = torch.cat([dense.output(model, dense.one(case.batch(6), b)) for b in range(6)]).detach()
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
    u = torch.randn(2, *case.outputs, dtype=D, generator=torch.Generator().manual_seed(2))

    def function(f: Tensor) -> Tensor:
        assert f.shape == (2, *case.outputs)
        return (u * f).sum()

    data, likelihood = problems.split(case.batch(6), y, (4, 2)), lw.Gaussian(noise_std=0.5)
    full, *others = (
        lw.fit(model, data, likelihood, method=method, prior=lw.isotropic(2.0, theta))
        for method in (lw.Full(), lw.HFL(mode="linearised"), lw.HFL())
    )
    cov = full.functions(inputs, joint=True).cov.reshape(u.numel(), u.numel())
    exact = float(u.flatten() @ cov @ u.flatten())
    for posterior in (full, *others):
        variance = problems.unchanged(model, lambda posterior=posterior: posterior.variance_of(function, inputs))
        assert float(variance) == pytest.approx(exact, rel=1e-6)


def test_the_function_is_taken_where_the_mean_is() -> None:
    """A tangent model that was moved to its own optimum."""
    energy = copied(small())
    energy.place(energy.theta + 0.1)
    posterior = fitted(energy, lw.Full(), tuner=lw.tuners.LinearMode(mean="tangent"), prior=0.5)
    x = new(energy, 4)
    belief = posterior.functions(x, joint=True)
    assert off(belief.mean, energy.model(x).detach()) > 0.01
    u, cov = 2 * belief.mean.flatten(), belief.cov.reshape(4, 4)
    assert_close(posterior.variance_of(lambda f: f.square().sum(), x), u @ cov @ u, SOLVED)


def test_a_function_of_many_outputs_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    energy = small("categorical", 3)
    x, function = new(energy, 50), OF_OUTPUTS["a probability over inputs"]
    posterior = fitted(energy, lw.Full())
    whole = posterior.variance_of(function, x)
    monkeypatch.setattr("lapwing.networks.jacobians.CACHED_BYTES", 0)
    assert len(list(posterior.network.footprint.chunks(50, 1, D, torch.device("cpu")))) == 4
    assert_close(posterior.variance_of(function, x), whole)
    g = of_outputs(energy, function, x)
    assert_close(whole, g @ torch.linalg.solve(energy.ggn(), g), SOLVED)


NO_FUNCTION: dict[str, tuple[Any, str]] = {
    "a matrix": (lambda f: f, r"gives a tensor of shape \(3, 1\) .*; expected a tensor of one number. Take one entry"),
    "a number": (lambda f: float(f.detach().sum()), r"gives -?\d.*; expected a tensor of one number"),
    "a constant": (
        lambda f: f.detach().sum(),
        r"does not depend on them; expected one that can be differentiated in f",
    ),
    "a class": (lambda f: f.argmax().double(), r"does not depend on them; .*without detach\(\), item\(\), argmax\(\)"),
    "no number": (lambda f: f.sum() * torch.nan, r"gives nan with slopes up to nan; expected finite numbers"),
    "a corner": (lambda f: (f - f.detach()).sum().sqrt(), r"gives 0 with slopes up to inf; expected finite numbers"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", NO_FUNCTION)
def test_functions_of_outputs_that_are_not_scalars_are_refused(method: str, kind: str) -> None:
    energy, posterior = small(), known(method)
    function, message = NO_FUNCTION[kind]

    def run() -> None:
        with pytest.raises(lw.errors.ModelError, match="the function of the outputs " + message):
            posterior.variance_of(function, new(energy))

    problems.unchanged(energy.model, run)


@pytest.mark.parametrize("method", ["push", "tangent", "full"])
def test_inputs_of_a_function_are_checked(method: str) -> None:
    energy, posterior = small(), known(method)
    with pytest.raises(lw.errors.DataError, match="the batch is empty"):
        posterior.variance_of(lambda f: f.sum(), new(energy)[:0])
    bad = new(energy)
    bad[0, 1] = torch.nan
    with pytest.raises(lw.errors.DataError, match="inputs: 1 of 6 entries are NaN"):
        posterior.variance_of(lambda f: f.sum(), bad)


@pytest.mark.parametrize("method", ["push", "tangent", "full"])
def test_gradients_off_make_no_difference(method: str) -> None:
    posterior = known(method)
    x, function = new(small(), 1), lambda f: f.tanh().sum()
    plain = posterior.variance_of(function, x)
    with torch.no_grad():
        assert torch.equal(posterior.variance_of(function, x), plain)
    with torch.inference_mode():
        assert torch.equal(posterior.variance_of(function, x.clone()), plain)


def test_single_weights_decide_a_function_of_the_outputs() -> None:
    index = torch.tensor([1, 5, 13, 20, 24])
    energy = copied(small(), index=index)
    x, function = new(energy), lambda f: f.tanh().sum()
    g = of_outputs(energy, function, x)
    for method, precision in ((lw.HFL(), energy.hessian()), (lw.Full(), energy.ggn())):
        posterior = fitted(energy, method, weights=lw.subnetwork(index))
        exact = g @ torch.linalg.solve(precision, g)
        assert float(posterior.variance_of(function, x)) == pytest.approx(float(exact), rel=1e-6)


def test_float32_outputs() -> None:
    """The push works in float64, and hands that to the function."""
    energy = small()
    model, x = copied(energy).model.float(), new(energy)
    seen = []

    def function(f: Tensor) -> Tensor:
        seen.append(f.dtype)
        return f.tanh().sum()

    g = of_outputs(energy, lambda f: f.tanh().sum(), x)
    for method, precision, dtype in (
        (lw.HFL(), energy.hessian(), D), (lw.HFL(mode="linearised"), energy.ggn(), torch.float32),
        (lw.Full(), energy.ggn(), torch.float32),
    ):  # fmt: skip
        posterior = lw.fit(model, [(energy.x.float(), energy.y.float())], lw.Gaussian(noise_std=0.2), method=method,
                       prior=0.5)  # fmt: skip
        exact = g @ torch.linalg.solve(precision, g)
        seen.clear()
        assert float(posterior.variance_of(function, x.float())) == pytest.approx(float(exact), rel=1e-3)
        assert set(seen) == {dtype}
