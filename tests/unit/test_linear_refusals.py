"""What ``lw.linear.fit`` and its posterior refuse, and what they say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from tests.unit.linear_problems import GIVEN, D, X, Y, noise, operator, problem, seed

OPTIMUM = r"expected an optimum\. .* Give precision=\.\.\. or noise_std=\.\.\."


@pytest.mark.parametrize("y", [torch.zeros(90, dtype=D), problem(noise=0.0).y], ids=["zeros", "without noise"])
def test_targets_without_an_optimum_are_refused(y: Tensor) -> None:
    with pytest.raises(lw.errors.NumericalError, match=rf"noise variance \S+ after .* at precision .*; {OPTIMUM}"):
        lw.linear.fit(problem().x, y)


def test_features_without_an_optimum_are_refused() -> None:
    with pytest.raises(lw.errors.NumericalError, match=f"precision inf .* gamma 0 ± 0; {OPTIMUM}"):
        lw.linear.fit(torch.zeros(90, 30, dtype=D), problem().y)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_random_features_are_refused(unit: float) -> None:
    """The evidence is largest without them."""
    gen = seed(0)
    x, y = torch.randn(100, 5, dtype=D, generator=gen), torch.randn(100, dtype=D, generator=gen)
    y = y - 0.9 * x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    with pytest.raises(lw.errors.NumericalError, match=f"{OPTIMUM}"):
        lw.linear.fit(x, unit * y)


def bad(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x.view(-1)[3] = value
    return x


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (X[0], r"features have the shape \(30,\); expected \(rows, columns\)"),
        (X[None], r"features have the shape \(1, 90, 30\)"),
        (X[:0], r"features have the shape \(0, 30\)"),
        (X[:, :0], r"features have the shape \(90, 0\)"),
        (X.long(), "features are torch.int64; expected floating-point numbers"),
        (X.to(torch.complex128), "features are torch.complex128; expected floating-point"),
        (bad(X, math.nan), "features: 1 of 2700 entries are NaN or infinite"),
        (bad(X, math.inf), "features: 1 of 2700 entries are NaN or infinite"),
        (X.numpy(), "features are a ndarray; expected a tensor or an OperatorDesign"),
        (X.tolist(), "features are a list; expected a tensor or an OperatorDesign"),
        (operator(X.half()), "take torch.float16; expected float32 or float64"),
        (operator(X + 1j), "take torch.complex128; expected float32 or float64"),
    ],
)
def test_features_that_are_refused(features: Any, message: str) -> None:
    with pytest.raises(lw.errors.DataError, match=message):
        lw.linear.fit(features, Y, **GIVEN)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (Y[:-1], r"90 rows of features and targets \(89,\); expected \(90,\)"),
        (Y[None], r"90 rows of features and targets \(1, 90\); expected \(90,\)"),
        (torch.stack([Y, Y], 1)[:40], r"90 rows of features and targets \(40, 2\); expected \(90,\), or \(90, C\)"),
        (bad(Y, math.nan), "targets hold NaN or infinity; expected finite numbers"),
        (bad(Y, -math.inf), "targets hold NaN or infinity"),
        (Y.numpy(), r"targets are a ndarray; expected a tensor \(90,\)"),
        (Y + 1j, "targets are torch.complex128; expected real numbers"),
    ],
)
@pytest.mark.parametrize("make", [lambda x: x, operator], ids=["matrix", "operator"])
def test_targets_that_are_refused(make: Any, targets: Any, message: str) -> None:
    with pytest.raises(lw.errors.DataError, match=message):
        lw.linear.fit(make(X), targets, **GIVEN)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": 0.0}, "precision is 0.0; expected a positive number, or None to learn it"),
        ({"precision": -1.0}, "precision is -1.0"),
        ({"precision": math.inf}, "precision is inf"),
        ({"noise_std": 0.0}, "noise_std is 0.0; expected a positive number, or None to learn it"),
        ({"noise_std": math.nan}, "noise_std is nan"),
        ({"precision": "1"}, "precision is '1'; expected a positive number"),
        ({"precision": torch.ones(30)}, r"precision is tensor\(\[1\., "),
        ({"precision": True}, "precision is True; expected a positive number"),
        ({"noise_std": "1"}, "noise_std is '1'; expected a positive number"),
        ({"num_samples": 0}, "num_samples is 0; expected at least 1"),
        ({"num_samples": 2.5}, r"num_samples is 2\.5; expected an integer"),
        ({"generator": 3}, r"generator is 3; expected torch\.Generator\(\)\.manual_seed"),
        ({"tolerance": "small"}, "tolerance is 'small'; expected a relative residual"),
        ({"tolerance": 0.0}, "tolerance is 0.0; expected a relative residual between 0 and 1"),
        ({"tolerance": math.nan}, "tolerance is nan"),
        ({"tolerance": 1.0}, "tolerance is 1.0"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((lw.errors.DataError, lw.errors.UnsupportedError), match=message):
        lw.linear.fit(X, Y, **settings)


def test_questions_that_are_refused() -> None:
    posterior = lw.linear.fit(X, Y, **GIVEN, num_samples=3)
    refused: tuple[tuple[Any, str], ...] = (
        (4, "4 samples were asked for and 3 are stored; expected at most"), (-1, "n is -1; expected at least 0"),
        (2.5, r"n is 2\.5; expected an integer"),
    )  # fmt: skip
    for n, message in refused:
        with pytest.raises(lw.errors.UnsupportedError, match=message):
            posterior.samples(n)
    assert posterior.samples(0).shape == (0, 30)
    for new, message in ((X[:, :-1], r"shape \(90, 29\); expected \(rows, 30\)"), (X[0], r"shape \(30,\)"),
                         (bad(X, math.nan), "NaN or infinite"), (X[:0], r"shape \(0, 30\)"),
                         (operator(X), r"features are a OperatorDesign; expected a tensor \(rows, 30\)")):  # fmt: skip
        with pytest.raises(lw.errors.DataError, match=message):
            posterior.predict(new)
    for probes, steps, message in ((1, 5, "probes is 1; expected at least 2"), (4, 0, "steps is 0; expected at")):
        with pytest.raises(lw.errors.UnsupportedError, match=message):
            posterior.log_evidence(probes, steps)
    for name in ("probes", "steps"):
        with pytest.raises(lw.errors.UnsupportedError, match=rf"{name} is 2\.5; expected an integer"):
            posterior.log_evidence(**{name: 2.5})  # type: ignore[arg-type]


class Random:
    """Dropout on the features: other products at every call."""

    def forward(self, v: Tensor) -> Tensor:
        return v @ (X * (torch.rand(90, 30) < 0.9)).T


OPERATORS: dict[str, tuple[Any, Any, str]] = {
    "not the transpose": (lambda v: v @ X.T, lambda u: u @ X.flip(1), "back is not the transpose of forward.* differ"),
    "twice the transpose": (lambda v: v @ X.T, lambda u: 2 * u @ X, "back is not the transpose of forward"),
    "hardly off": (lambda v: v @ X.T, lambda u: 1.003 * u @ X, "back is not the transpose of forward"),
    "random": (Random().forward, lambda u: u @ X, "two calls of forward .* with the same rows differ by"),
    "mixed rows": (
        lambda v: v @ X.T,
        lambda u: u.cumsum(0) @ X,
        "two calls of back .* rows that do not depend",
    ),
    "columns": (lambda v: X @ v.T, lambda u: u @ X, r"forward .* made \(90, 2\) of rows \(2, 30\); expected \(2, 90\)"),
    "one alone": (lambda v: v @ X.T, lambda u: u[0] @ X, r"back .* made \(30,\) of rows \(2, 90\); expected \(2, 30\)"),
    "complex": (lambda v: 1j * v @ X.to(1j * X).T, lambda u: u @ X, "gave torch.complex128; expected a tensor of real"),
    "arrays": (lambda v: (v @ X.T).numpy(), lambda u: u @ X, "gave a ndarray; expected a tensor of real numbers"),
    "not finite": (lambda v: v @ X.T / 0, lambda u: u @ X, "forward of an OperatorDesign gave NaN or infinity"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_are_not_what_they_claim_are_refused(name: str) -> None:
    """Before any noise is drawn, and so before the first iteration."""
    forward, back, message = OPERATORS[name]
    generator = seed(1)
    before = generator.get_state()
    with pytest.raises(lw.LapwingError, match=message):
        lw.linear.fit(lw.linear.OperatorDesign(90, 30, forward, back, X[:0, 0]), Y, **GIVEN, generator=generator)
    assert torch.equal(generator.get_state(), before)


def test_a_residual_above_the_tolerance_is_an_error() -> None:
    """Products in float32 and a residual of 1e-12; or a precision too small for the mean."""
    posterior = lw.linear.fit(X.float(), Y, precision=1e-4, noise_std=0.1, tolerance=1e-12)
    with pytest.raises(
        lw.errors.NumericalError, match=r"stopped after \d+ iterations with a relative residual of .*1e-12"
    ):
        posterior.samples()
    steep = X * torch.logspace(4, -4, 30, dtype=D)
    posterior = lw.linear.fit(steep.float(), Y, precision=1e-12, noise_std=0.1)
    with pytest.raises(
        lw.errors.NumericalError, match=r"linear.fit stopped after \d+ .* residual of \S+; .* in float64"
    ):
        _ = posterior.mean


def test_float64_is_not_advised_if_it_is_used() -> None:
    powers = torch.linspace(-1, 1, 200, dtype=D)[:, None] ** torch.arange(30, dtype=D)
    posterior = lw.linear.fit(powers, powers.sum(1), precision=1e-6, noise_std=1e-3)
    with pytest.raises(lw.errors.NumericalError, match=r"the tolerance of the samples\.$"):
        posterior.samples()
    assert (posterior.ridge.float64_hint, noise(powers.float(), 1).float64_hint) == ("", ", or compute in float64")
