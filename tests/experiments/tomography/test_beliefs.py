"""Beliefs about an image: TV-PredCP as a hyperprior of the evidence tuner, and the scores of all methods."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from experiments.tomography.beliefs import (
    EVIDENCE,
    LEARNED,
    METHODS,
    TV,
    UNIT,
    ImageBelief,
    VariationPrior,
    factorised_posterior,
    image_beliefs,
    rate_of_variation,
    tangent_posteriors,
)
from experiments.tomography.case import Scan, Setting, scans
from experiments.tomography.dropout import SampledImages
from experiments.tomography.phantoms import ellipses
from experiments.tomography.total_variation import edges
from experiments.tomography.unet import UNet, seeded_unet
from lapwing.inverse import InversePosterior

SIZE = 10


@pytest.fixture(scope="module")
def scan() -> Scan:
    truth = ellipses(SIZE, torch.Generator().manual_seed(3))
    return scans(truth[None], Setting(4, 0.1))[0]


@pytest.fixture(scope="module")
def unet() -> UNet:
    return seeded_unet(1, scales=2, skips=(2,), channels=3)


@pytest.fixture(scope="module")
def posteriors(unet: UNet, scan: Scan) -> dict[str, InversePosterior]:
    return tangent_posteriors(unet, scan, 1e-3)


def differences(posterior: InversePosterior, pairs: Tensor) -> Tensor:
    """The prior variance of x_j - x_i, from the dense Jacobian of the network and the dense covariance of the prior."""
    tangent = posterior.problem.network
    jacobian = tangent.back(torch.eye(tangent.size, dtype=torch.float64))
    rows = jacobian[pairs[:, 1]] - jacobian[pairs[:, 0]]
    return ((rows @ posterior.prior.multiply(torch.eye(rows.shape[1], dtype=torch.float64))) * rows).sum(1)


def test_variances_of_edges_are_those_of_the_prior(posteriors: dict[str, InversePosterior]) -> None:
    posterior, pairs = posteriors[EVIDENCE], edges(SIZE, SIZE)
    hyperprior = VariationPrior.of(posterior, 2.0)
    coefficients = posterior.prior.coefficients()
    rest = torch.tensor(posterior.prior.length_blocks) < 0
    total = hyperprior.density.block_variances(coefficients).sum(0)
    total = total + coefficients[rest] @ hyperprior.density.class_variances[rest]
    torch.testing.assert_close(total, differences(posterior, pairs), rtol=1e-9, atol=1e-12)


def test_the_gradient_of_the_hyperprior_is_its_slope(posteriors: dict[str, InversePosterior]) -> None:
    posterior = posteriors[EVIDENCE]
    hyperprior = VariationPrior.of(posterior, 2.0)
    at = lambda log: hyperprior(posterior.with_problem(posterior.problem.with_precisions(log.exp())))
    log = posterior.prior.values.clamp(0.05, 2.0).log()
    point = log.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(at(point), point)
    step = 1e-5
    for i in range(len(log)):
        move = torch.zeros_like(log).index_fill(0, torch.tensor(i), step)
        slope = float(at(log + move) - at(log - move)) / (2 * step)
        assert math.isclose(float(gradient[i]), slope, rel_tol=1e-5, abs_tol=1e-5 * float(gradient.abs().max()))


def test_each_search_maximises_its_own_objective(
    posteriors: dict[str, InversePosterior], unet: UNet, scan: Scan
) -> None:
    evidence, tv = posteriors[EVIDENCE], posteriors[TV]
    rate = rate_of_variation(scan, 1e-3, float(evidence.noise_std))
    hyperprior = VariationPrior.of(evidence, rate)
    assert float(evidence.log_evidence()) >= float(tv.log_evidence())
    assert float(tv.log_evidence() + hyperprior(tv)) > float(evidence.log_evidence() + hyperprior(evidence))
    # Independent weights are the limit of short length-scales, so their evidence is no higher, up to the tolerance.
    assert float(factorised_posterior(unet, scan).log_evidence()) <= float(evidence.log_evidence()) + 0.1


def test_every_method_is_scored_with_the_same_floor(posteriors: dict[str, InversePosterior], scan: Scan) -> None:
    drawn = torch.rand(9, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    beliefs = image_beliefs(scan, posteriors, SampledImages(drawn))
    assert tuple(beliefs) == METHODS
    floors = {beliefs[name].floor for name in METHODS[2:]}
    assert len(floors) == 1
    floor = floors.pop()
    assert math.isclose(float(beliefs[LEARNED].std.square().mean()), floor, rel_tol=1e-9)
    noise = float(posteriors[EVIDENCE].noise_std)
    assert math.isclose(float(beliefs[UNIT].std.square().mean()) * noise**2, floor, rel_tol=1e-9)
    for belief in beliefs.values():
        assert all(math.isfinite(score) for score in belief.scores(scan.truth).values())


def test_densities_of_a_belief_are_those_of_a_multivariate_normal() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(64, 64, dtype=torch.float64, generator=generator)
    mean, truth = torch.rand(2, 8, 8, dtype=torch.float64, generator=generator)
    belief = ImageBelief(mean, root @ root.mT, floor=0.3)
    whole = torch.distributions.MultivariateNormal(mean.flatten(), root @ root.mT + 0.3 * torch.eye(64).double())
    assert math.isclose(belief.density(truth, None), float(whole.log_prob(truth.flatten())) / 64, rel_tol=1e-9)
    normal = torch.distributions.Normal(mean, belief.std)
    assert math.isclose(belief.density(truth, 1), float(normal.log_prob(truth).mean()), rel_tol=1e-9)
