"""Settings of HFL, and what all its modes have in common."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from tests import problems
from tests.cases import BY_NAME
from tests.minima import at_its_targets, copied, fitted, new, off, small
from tests.tolerances import SOLVED, assert_close

D = torch.float64


MODES = ("nonlinear", "linearised", "pretrained")


def test_the_noise_is_that_of_the_residuals() -> None:
    """Linear networks: the Hessian is the same wherever the weights are."""
    x, y = torch.randn(30, 3, dtype=D), torch.randn(30, 2, dtype=D)
    model = nn.Linear(3, 2).double()
    phi = (model(x) - y).square().mean().detach()
    design = torch.cat([x, torch.ones(30, 1, dtype=D)], 1)
    exact = (design @ torch.linalg.inv(design.T @ design / phi + 0.5 * torch.eye(4, dtype=D)) * design).sum(1)
    for mode in MODES:
        method = lw.HFL(mode=mode, drift=math.inf)
        posterior = lw.fit(model, [(x[:11], y[:11]), (x[11:], y[11:])], lw.Gaussian(), method=method, prior=0.5)
        assert_close(posterior.likelihood.dispersion, phi)
        if mode != "pretrained":
            assert_close(posterior.functions(x).variance[:, 1], exact, SOLVED)


def test_a_prior_is_learned_by_the_evidence_of_kron() -> None:
    case = BY_NAME["mlp"]
    data = problems.batches(case)
    learned = lw.fit(case.build(), data, "classification", method=lw.Kron()).prior.values
    posterior = lw.fit(case.build(), data, "classification", method=lw.HFL(mode="linearised"))
    assert torch.equal(posterior.prior.values, learned)
    full = lw.fit(case.build(), data, "classification", method=lw.Full(), prior=float(learned))
    inputs = case.batch(3, seed=1)
    assert_close(posterior.base(inputs).cov, full.functions(inputs).cov, SOLVED)


def test_a_prior_is_learned_for_the_other_modes() -> None:
    """A linear network: any prior leaves it a minimum, though it moves; with the noise that Kron left."""
    x, y = torch.randn(30, 3, dtype=D), torch.randn(30, 1, dtype=D)
    model = nn.Linear(3, 1).double()
    learned = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.Kron()).prior.values
    for mode in ("nonlinear", "pretrained"):
        method = lw.HFL(mode=mode, drift=math.inf)
        posterior = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=method)
        assert torch.equal(posterior.prior.values, learned)
    assert float((learned - 1).abs()) > 1e-3


def test_the_prior_of_single_weights_is_learned_by_the_evidence_of_diagonal() -> None:
    """Kron takes layers, and cannot."""
    energy, weights = small("categorical", 3), lw.subnetwork(torch.tensor([1, 5, 13, 20, 24]))
    options = {"weights": weights, "prior": None}
    learned = fitted(energy, lw.Diagonal(), **options).prior.values
    posterior = fitted(energy, lw.HFL(mode="linearised"), **options)
    assert torch.equal(posterior.prior.values, learned)
    assert float((learned - 1).abs()) > 1e-3
    x = new(energy)
    full = fitted(energy, lw.Full(), weights=weights, prior=float(learned))
    assert_close(posterior.base(x).cov, full.functions(x).cov, SOLVED)


@pytest.mark.parametrize("mode", MODES)
def test_predictions(mode: str) -> None:
    regression, classes = small(), small("categorical", 3)
    posterior = fitted(regression, lw.HFL(mode=mode))
    x = new(regression)
    predicted, belief = posterior.predict(x), posterior.functions(x)
    assert_close(predicted.std, (belief.variance + 0.04).sqrt())
    assert_close(predicted.mean, regression.model(x))
    probs = fitted(classes, lw.HFL(mode=mode)).predict(x).probs
    assert_close(probs.sum(1), torch.ones(3, dtype=D))
    assert off(probs, classes.model(x).softmax(1).detach()) > 1e-3  # not the network's own


@pytest.mark.parametrize("mode", MODES)
def test_float32_is_close_to_its_float64_copy(mode: str) -> None:
    energy = small("gaussian", 2)
    x, y = energy.x.float(), energy.y.float()
    narrow = copied(energy).model.float()
    method = lw.HFL(mode=mode, evaluation=energy.x)
    posterior = lw.fit(narrow, [(x, y)], lw.Gaussian(noise_std=0.2), method=method, prior=0.5)
    wide = fitted(energy, method)
    inputs = new(energy)
    belief, exact = posterior.functions(inputs.float()), wide.functions(inputs)
    assert belief.cov.dtype == torch.float32
    assert off(belief.mean, exact.mean) < 1e-5
    assert off(belief.cov, exact.cov) < (2e-2 if mode == "pretrained" else 1e-3)


@pytest.mark.parametrize("tolerance", [1.0, math.inf])
def test_a_tolerance_that_takes_anything_still_works(tolerance: float) -> None:
    """As far as it would for the usual one."""
    energy = small()
    x = new(energy)
    assert off(fitted(energy, lw.HFL(tolerance=tolerance)).functions(x).cov, energy.each(x)) < 1e-6
    lam = 0.01 / float(energy.each(x).max()) ** 0.5
    assert off(fitted(energy, lw.HFL(tolerance=tolerance, lam=lam)).functions(x).cov, energy.each(x)) < 1e-3


def test_float32_within() -> None:
    """Asked to work in single precision, it has the tolerance of that."""
    energy = small("gaussian", 2)
    x = new(energy)
    posterior = fitted(energy, lw.HFL(dtype=torch.float32))
    assert posterior.posterior.responder.objective.dtype == torch.float32
    assert posterior.posterior.responder.tolerance == 1e-2
    error = off(posterior.functions(x).cov, energy.each(x))
    assert 1e-9 < error < 1e-2


@pytest.mark.parametrize("name", ["resnet_batchnorm", "frozen_bias"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    """Weights, buffers, flags and modes, bit for bit; nor is the global generator touched."""
    case = BY_NAME[name]
    model, data, prior = at_its_targets(case)
    next(iter(model.modules())).register_forward_hook(lambda *_: None)
    inputs = case.batch(1, seed=1)
    random = torch.get_rng_state()
    for method in (lw.HFL(), lw.HFL(mode="linearised"), lw.HFL(mode="pretrained"),
                   lw.HFL(mode="pretrained", variant="random", pushes=2), lw.HFL(solver="adam", steps=2)):  # fmt: skip

        def run(method: lw.HFL = method) -> None:
            posterior = lw.fit(model, data, lw.Gaussian(noise_std=0.5), method=method, prior=prior)
            if method.solver == "adam":
                posterior.posterior.respond(inputs)
            else:
                _ = posterior.predict(inputs).std

        problems.unchanged(model, run)
    assert torch.equal(torch.get_rng_state(), random)


def test_gradients_off_make_no_difference() -> None:
    energy = small()
    x = new(energy, 1)
    plain = fitted(energy, lw.HFL()).functions(x).cov
    with torch.no_grad():
        quiet = fitted(energy, lw.HFL()).functions(x).cov
    with torch.inference_mode():
        inferred = fitted(energy, lw.HFL()).functions(x.clone()).cov
    assert torch.equal(plain, quiet)
    assert torch.equal(plain, inferred)


def test_the_methods_name() -> None:
    energy = small()
    x = new(energy, 1)
    one, other = (fitted(energy, method).functions(x).cov for method in ("hfl", lw.HFL()))
    assert torch.equal(one, other)


def test_other_batches_give_the_same() -> None:
    energy = small("categorical", 3)
    x, order = new(energy), torch.randperm(25, generator=torch.Generator().manual_seed(1))
    mixed = [(energy.x[order[:4]], energy.y[order[:4]]), (energy.x[order[4:]], energy.y[order[4:]])]
    for mode in ("nonlinear", "linearised"):
        one, two = (fitted(energy, lw.HFL(mode=mode), data=data) for data in (None, mixed))
        cov = one.functions(x).cov
        assert off(two.functions(x).cov, cov) < 1e-6
        assert off(two.functions(x[1:2]).cov, cov[1:2]) < 1e-6


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"mode": "linear"}, "mode is 'linear'; expected one of nonlinear, linearised, pretrained"),
    "variant": ({"variant": "median"}, "variant is 'median'; expected one of mean, absolute, random"),
    "solver": ({"solver": "sgd"}, "solver is 'sgd'; expected one of newton, adam"),
    "lam of zero": ({"lam": 0.0}, "lam is 0.0; expected a positive, finite number"),
    "negative lam": ({"lam": -1.0}, "lam is -1.0; expected a positive, finite number"),
    "lam that is none": ({"lam": math.nan}, "lam is nan; expected a positive, finite number"),
    "endless lam": ({"lam": math.inf}, "lam is inf; expected a positive, finite number"),
    "no pushes": ({"pushes": 0}, "pushes is 0; expected at least 1"),
    "no steps": ({"steps": 0}, "steps is 0; expected at least 1"),
    "half a step": ({"steps": 1.5}, "steps is 1.5; expected an integer"),
    "no batch": ({"batch_size": -3}, "batch_size is -3; expected at least 1"),
    "no rate": ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a positive, finite number"),
    "rate that is none": ({"learning_rate": math.nan}, "learning_rate is nan; expected a positive, finite number"),
    "negative drift": ({"drift": -1.0}, "drift is -1.0; expected at least zero; math.inf allows any"),
    "drift that is none": ({"drift": math.nan}, "drift is nan; expected at least zero"),
    "no tolerance": ({"tolerance": 0.0}, "tolerance is 0.0; expected a positive number, or None for the default"),
    "tolerance that is none": ({"tolerance": math.nan}, "tolerance is nan; expected a positive number"),
    "no solution": (
        {"mode": "linearised", "tolerance": math.inf},
        "tolerance is inf; expected below 1 in the mode 'linearised', where a residual of 1 is no solution",
    ),
    "calibration of variances": (
        {"calibration": []},
        "calibration data for the mode 'nonlinear', whose variances have their scale; leave them",
    ),
    "dtype": ({"dtype": torch.float16}, r"dtype is torch.float16; expected torch.float64, torch.float32 or None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_are_none(name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        lw.HFL(**settings)


@pytest.mark.parametrize("mode", MODES)
def test_a_g_prior_is_refused(mode: str) -> None:
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"forms no curvature, and g_prior\(\) needs one; use Kron\(\) or"
    ):
        fitted(small(), lw.HFL(mode=mode), prior=lw.priors.g_prior(1.0))


@pytest.mark.parametrize("mode", ["nonlinear", "linearised"])
def test_what_needs_its_data_is_not_saved(mode: str, tmp_path: Path) -> None:
    message = (
        r"re-optimises on its data at every prediction, and a file does not hold those; .*HFL\(mode='pretrained'\)"
    )
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        fitted(small(), lw.HFL(mode=mode)).save(tmp_path / "it")
    assert not (tmp_path / "it").exists()
