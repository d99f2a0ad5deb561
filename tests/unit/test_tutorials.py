"""The tutorials run, draw, print what their page shows, and what they teach is true."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matplotlib.image import imread

import lapwing as lw
from tests.tolerances import assert_close

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGE = (TUTORIALS / "README.md").read_text(encoding="utf-8")


@dataclass(frozen=True, eq=False)
class Run:
    """A tutorial after its main."""

    module: Any
    found: Any
    printed: str
    picture: Path


def ran(name: str, folder: Path) -> Iterator[Run]:
    spec = importlib.util.spec_from_file_location(f"tutorial_{name}", TUTORIALS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    printed = io.StringIO()
    try:
        spec.loader.exec_module(module)
        with contextlib.redirect_stdout(printed):
            found = module.main(folder / "made")
        yield Run(module, found, printed.getvalue(), folder / "made" / f"{name}.png")
    finally:
        del sys.modules[spec.name]


@pytest.fixture(scope="module")
def density(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from ran("laplace_density", tmp_path_factory.mktemp("density"))


@pytest.fixture(scope="module")
def logistic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from ran("logistic_regression", tmp_path_factory.mktemp("logistic"))


def assert_shown(run: Run) -> None:
    """A picture that is not blank and stands on the page, beside the very numbers that were printed."""
    pixels = torch.tensor(imread(run.picture))[..., :3]
    assert min(pixels.shape[:2]) > 500
    assert float((pixels < 0.98).any(-1).float().mean()) > 0.05
    assert f"../images/{run.picture.name}" in PAGE
    assert f"```text\n{run.printed}```" in PAGE


def test_density_is_shown(density: Run) -> None:
    assert_shown(density)


def test_logistic_regression_is_shown(logistic: Run) -> None:
    assert_shown(logistic)


def test_quadrature_and_closed_forms_agree(density: Run) -> None:
    for case in density.found:
        assert case.quadrature == pytest.approx(case.closed, abs=1e-5)


def test_laplace_normalisers(density: Run) -> None:
    """Two of Stirling's formulas, and the curvature at the maximum likelihood written out."""
    rate, log_rate, both = density.found
    assert rate.laplace == pytest.approx(2 * math.log(2) - 2 + 0.5 * math.log(4 * math.pi), abs=1e-10)
    assert log_rate.laplace == pytest.approx(3 * math.log(3) - 3 + 0.5 * math.log(2 * math.pi / 3), abs=1e-10)
    measured = density.module.MEASURED
    n, variance = len(measured), measured.var(correction=0)
    assert_close(both.found.mean, torch.stack([measured.mean(), 0.5 * variance.log()]))
    assert_close(both.found.covariance, torch.stack([variance, torch.full_like(variance, 0.5)]).diag() / n)
    peak = -0.5 * n * (1 + math.log(2 * math.pi * variance))
    assert both.laplace == pytest.approx(peak + 0.5 * math.log(4 * math.pi**2 * variance / n * 0.5 / n), abs=1e-10)


def test_the_trained_weights_are_the_mode(logistic: Run) -> None:
    study, module = logistic.found, logistic.module
    gaussian = module.by_hand(study.x, study.y, module.PRIOR_PRECISION)
    assert_close(module.weights_of(study.model), gaussian.mean)
    theta = module.weights_of(study.model).requires_grad_()
    (slope,) = torch.autograd.grad(module.log_joint(theta, study.x, study.y, module.PRIOR_PRECISION), theta)
    assert float(slope.abs().max()) <= 1e-10


def test_fit_is_laplace_by_hand(logistic: Run) -> None:
    """The model is linear: its GGN is the Hessian. Outputs at three inputs give the covariance of the weights."""
    study, module = logistic.found, logistic.module
    gaussian = module.by_hand(study.x, study.y, module.PRIOR_PRECISION)
    assert_close(study.laplace.log_evidence(), gaussian.log_normaliser)
    outputs = study.laplace.functions(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]).double(), joint=True).cov
    back = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0], [0.0, 0.0, 1.0]]).double()
    assert_close(back @ outputs.reshape(3, 3) @ back.mT, gaussian.covariance)


def test_the_grid_is_fine_and_wide_enough(logistic: Run) -> None:
    study, module = logistic.found, logistic.module
    finer = module.exact_posterior(study.x, study.y, module.PRIOR_PRECISION, (81, 81, 81), reach=13.0)
    assert study.exact.log_evidence == pytest.approx(finer.log_evidence, abs=1e-7)
    assert_close(study.exact.mean, finer.mean, 0.4)
    assert_close(study.exact.std, finer.std, 0.4)
    inputs = module.window(5)
    assert float((study.exact.predict(inputs) - finer.predict(inputs)).abs().max()) <= 5e-5
    values, marginal = study.exact.first
    assert float(torch.trapezoid(marginal, values)) == pytest.approx(1.0, abs=1e-7)
    assert float(torch.trapezoid(marginal * values, values)) == pytest.approx(float(study.exact.mean[0]), abs=1e-6)


def test_laplace_evidence_is_near_the_exact_one(logistic: Run) -> None:
    gap = logistic.found.exact.log_evidence - float(logistic.found.laplace.log_evidence())
    assert gap == pytest.approx(0.0795, abs=5e-4)


def test_laplace_spread_is_near_the_exact_one(logistic: Run) -> None:
    """Too narrow by 5 % to 10 %, around a mode that lies within 0.6 standard deviations of the mean."""
    study, module = logistic.found, logistic.module
    gaussian = module.by_hand(study.x, study.y, module.PRIOR_PRECISION)
    ratios = gaussian.covariance.diagonal().sqrt() / study.exact.std
    assert_close(ratios, torch.tensor([0.9009, 0.9487, 0.9332]).double(), 0.18)
    lean = (study.exact.mean - gaussian.mean) / study.exact.std
    assert_close(lean, torch.tensor([0.5712, 0.2758, 0.0134]).double(), 0.18)


def test_predictions_are_near_the_exact_ones(logistic: Run) -> None:
    study, module = logistic.found, logistic.module
    found = study.probabilities(module.window(21))
    gaps = module.errors(found)
    assert gaps["plain network"][0] > 0.2
    assert gaps["Laplace, probit"][0] < 0.065
    assert gaps["Laplace, probit"][1] < 0.034
    assert gaps["Laplace, quadrature"][0] < 0.055
    assert gaps["Laplace, quadrature"][1] < 0.027
    links = (found["Laplace, probit"] - found["Laplace, quadrature"]).abs().max()
    assert float(links) == pytest.approx(0.0158, abs=5e-4)


def test_the_exact_prediction_is_a_mean_over_the_posterior(logistic: Run) -> None:
    """Importance sampling from Laplace's Gaussian, widened: an estimate that shares nothing with the grid."""
    study, module = logistic.found, logistic.module
    gaussian = module.by_hand(study.x, study.y, module.PRIOR_PRECISION)
    spread = torch.distributions.MultivariateNormal(gaussian.mean, 3 * gaussian.covariance)
    theta = spread.sample((40_000,))
    logs = module.log_joint(theta, study.x, study.y, module.PRIOR_PRECISION) - spread.log_prob(theta)
    weights = torch.softmax(logs, 0)
    inputs = module.window(5)
    values = torch.sigmoid(theta[:, :2] @ inputs.mT + theta[:, 2:])
    mean = weights @ values
    error = (weights.square() @ (values - mean).square()).sqrt()
    assert float(error.max()) < 0.005
    assert bool(((mean - study.exact.predict(inputs)).abs() <= 5 * error + 1e-4).all())
    evidence = float(torch.logsumexp(logs, 0)) - math.log(len(theta))
    assert evidence == pytest.approx(study.exact.log_evidence, abs=5 * float(weights.square().sum().sqrt()))


def test_more_data_make_laplace_better(logistic: Run) -> None:
    module = logistic.module
    many = module.study(n=480, counts=(41, 41, 41))
    assert many.exact.log_evidence - float(many.laplace.log_evidence()) == pytest.approx(0.012, abs=1e-3)
    assert module.errors(many.probabilities(module.window(21)))["Laplace, probit"][0] < 0.0075


def test_training_that_does_not_converge_is_refused(logistic: Run) -> None:
    x, y = logistic.module.two_classes()
    with pytest.raises(lw.NumericalError, match="gradient of nan"):
        logistic.module.trained(x * math.nan, y, logistic.module.PRIOR_PRECISION)
