"""Reconstructions with error bars, against dense algebra."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.image import imread
from torch import Tensor
from torch.distributions import MultivariateNormal

import lapwing as lw
from experiments.__main__ import main
from experiments.engine.contract import Record
from experiments.engine.store import Stored, load
from experiments.engine.tables import summarised
from experiments.options import silent
from experiments.tomography import densities
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
from experiments.tomography.deep_prior import Training, reconstruct, reconstruct_many
from experiments.tomography.densities import log_density, patch_log_density, sampled_patch_log_density
from experiments.tomography.dropout import SampledImages, dropout_samples, isotropic_baselines
from experiments.tomography.experiment import Tomography
from experiments.tomography.phantoms import ellipses
from experiments.tomography.scanning import STRATEGIES, Scanned
from experiments.tomography.scores import noise_floor
from experiments.tomography.total_variation import (
    TVPredCP,
    edges,
    expected_variation,
    exponential_coefficients,
    log_slope,
    total_variation,
)
from experiments.tomography.unet import UNet, block_of, dropout_masks, filter_blocks, seeded_unet
from lapwing.demo.result import Result
from lapwing.errors import DataError, LapwingError
from lapwing.inverse import InversePosterior
from tests.experiments.tomography.dense import Dense, normals
from tests.tolerances import SOLVED, assert_close, assert_within

# The case study as an experiment of the engine: every part in small, units that go on, and the picture.

QUICK = Tomography.quick()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert main(["tomography", "--form", "quick", "--out", str(folder)]) == 0
    return folder / "tomography_quick.json"


def records(stored: Path, group: str) -> list[Record]:
    return [record for record in load(stored).records if record.group == group]


def test_every_part_has_its_records(stored: Path) -> None:
    assert tuple(load(stored).units) == QUICK.units()
    rows = {(record.method, record.repeat) for record in records(stored, "3 angles, 5% noise")}
    assert rows == {(method, image) for method in ("FBP", *METHODS) for image in range(2)}
    assert [record.method for record in records(stored, "phantom")] == ["FBP", *METHODS]
    assert {"tangent, evidence", "FBP"} <= {record.method for record in records(stored, "25 x 25")}
    assert {record.method for record in records(stored, "next angles")} == set(STRATEGIES)
    scores = summarised(load(stored).records).rows["3 angles, 5% noise", "tangent, evidence"]
    assert scores["LL"].n == 2
    assert math.isfinite(scores["LL"].mean)


def test_the_picture_of_angles(stored: Path, tmp_path: Path) -> None:
    assert imread(stored.with_suffix(".png")).ndim == 3
    QUICK.picture(Stored("tomography", "quick", {}, 0), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()  # nothing is stored of that part


def test_a_curve_goes_to_scores_and_back() -> None:
    curve = Scanned((20.5, 21.5), (0.0, 30.0, 90.0))
    scores = curve.to_scores((2, 3))
    assert scores == {"2 angles": 20.5, "3 angles": 21.5, "angle 1": 0.0, "angle 2": 30.0, "angle 3": 90.0}
    assert Scanned.from_scores(scores) == curve


def test_the_table_reads_images_of_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 255, (2, 12, 12), dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", x_test=images, x_train=images, y_test=np.zeros(2), y_train=np.zeros(2))
    read = replace(QUICK, images="mnist", data_dir=tmp_path)._truths()
    assert read.shape == (2, 12, 12)
    monkeypatch.delenv("LAPWING_DATA", raising=False)
    with pytest.raises(DataError, match="pass --data-dir DIR or set LAPWING_DATA"):
        list(replace(QUICK, images="mnist").measure("table/3/0.05", silent))


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(LapwingError, match="unknown walk"):
        replace(QUICK, parts=("walk",)).units()
    assert replace(QUICK, parts=("angles",)).units() == ("angles/0", "angles/1")


# Beliefs about an image: TV-PredCP as a hyperprior of the evidence tuner, and the scores of all methods.

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


# Log-densities of images against those of torch.distributions.

SHAPE = (5, 7)
TRUTH, MEAN = normals(*SHAPE), normals(*SHAPE, seed=1)
ROOT = normals(35, 35, seed=2)
COVARIANCE = ROOT @ ROOT.mT / 35 + 0.1 * torch.eye(35, dtype=torch.float64)
# Rows 0-1 and 2-4, columns 0-1, 2-3 and 4-6: the remainder of a division by two is in the last patch.
CUTS = [(rows, columns) for rows in ((0, 2), (2, 5)) for columns in ((0, 2), (2, 4), (4, 7))]


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def normal(error: Tensor, covariance: Tensor) -> Tensor:
    return MultivariateNormal(torch.zeros_like(error), covariance).log_prob(error)


@pytest.mark.parametrize("floor", [0.0, 0.4])
def test_the_density_of_a_whole_image(floor: float) -> None:
    noisy = COVARIANCE + floor * torch.eye(35, dtype=torch.float64)
    expected = normal((TRUTH - MEAN).flatten(), noisy) / 35
    assert_close(number(log_density(TRUTH, MEAN, COVARIANCE, floor)), expected)
    assert_close(number(log_density(TRUTH.flatten(), MEAN.flatten(), COVARIANCE, floor)), expected)
    variances = COVARIANCE.diagonal()
    expected = normal((TRUTH - MEAN).flatten(), torch.diag(variances + floor)) / 35
    assert_close(number(log_density(TRUTH, MEAN, variances, floor)), expected)


def in_patches(covariance_of: Any) -> Tensor:
    """The sum over patches by a loop, per pixel."""
    pixels = torch.arange(35).reshape(SHAPE)
    total = number(0.0)
    for (top, bottom), (left, right) in CUTS:
        inside = pixels[top:bottom, left:right].flatten()
        total = total + normal((TRUTH - MEAN).flatten()[inside], covariance_of(inside))
    return total / 35


def test_the_density_of_patches() -> None:
    expected = in_patches(lambda i: COVARIANCE[i][:, i] + 0.2 * torch.eye(len(i), dtype=torch.float64))
    assert_close(number(patch_log_density(TRUTH, MEAN, COVARIANCE, 2, floor=0.2)), expected)
    alone = log_density(TRUTH, MEAN, COVARIANCE.diagonal(), 0.2)
    assert_close(number(patch_log_density(TRUTH, MEAN, COVARIANCE, 1, floor=0.2)), number(alone))
    whole = patch_log_density(TRUTH, MEAN, COVARIANCE, 5)  # a remainder of two columns: one patch
    assert_close(number(whole), number(log_density(TRUTH, MEAN, COVARIANCE)))


@pytest.mark.parametrize("shrinkage", [None, 0.5])
def test_the_density_of_patches_from_samples(shrinkage: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    deviations = normals(6, 35, seed=3)

    def covariance(inside: Tensor) -> Tensor:
        parts, size = deviations[:, inside], len(inside)
        share = size / (size + 6) if shrinkage is None else shrinkage
        full = sum(torch.outer(row, row) for row in parts) / 6
        kept = torch.where(torch.eye(size, dtype=torch.bool), full, (1 - share) * full)
        return kept + 0.3 * torch.eye(size, dtype=torch.float64)

    for limit in (1, 2**25):
        monkeypatch.setattr(densities, "NUMBERS_AT_ONCE", limit)
        value = sampled_patch_log_density(TRUTH, MEAN, deviations, 2, floor=0.3, shrinkage=shrinkage)
        assert_close(number(value), in_patches(covariance))


def test_fewer_samples_than_pixels_need_a_floor_or_shrinkage() -> None:
    deviations = normals(3, 35, seed=3)
    with pytest.raises(lw.errors.NumericalError, match="Add a noise floor"):
        sampled_patch_log_density(TRUTH, MEAN, deviations, 5, shrinkage=0.0)
    assert math.isfinite(sampled_patch_log_density(TRUTH, MEAN, deviations, 5))


# Training of deep image priors against a plain loop, and many at once against one at a time.

DEEP_PRIOR_SHAPE, ROWS = (5, 6), 13
OPERATOR = Dense(normals(ROWS, 30))
Y = OPERATOR.forward(torch.sigmoid(normals(3, 30, seed=3))) + 0.1 * normals(3, ROWS, seed=1)
Z = normals(3, *DEEP_PRIOR_SHAPE, seed=2)
# Some gradients are above 1 in norm, so that clipping matters; the last network's loss rises again after 11 steps.
TRAINING = Training(weight_of_tv=0.02, steps=15, rate=0.03)


def nets(dropout: float = 0.0, count: int = 3) -> list[UNet]:
    return [seeded_unet(i, scales=2, channels=3, skips=(2,), dropout=dropout).double() for i in range(count)]


def slow(unet: UNet, y: Tensor, z: Tensor, generator: torch.Generator | None) -> tuple[UNet, Tensor]:
    """One network by the plain modules of PyTorch; returns the best parameters and the losses."""
    net, best, losses = copy.deepcopy(unet), copy.deepcopy(unet), []
    adam = torch.optim.Adam(net.parameters(), lr=TRAINING.rate, foreach=False)
    for _ in range(TRAINING.steps):
        masks = None if generator is None else dropout_masks(net, 1, generator, z)[0]
        image = net(z[None, None], masks)[0, 0]
        variation = (image[1:] - image[:-1]).abs().sum() + (image[:, 1:] - image[:, :-1]).abs().sum()
        loss = (OPERATOR.matrix @ image.flatten() - y).square().mean() + TRAINING.weight_of_tv * variation  # type: ignore[operator]
        if not losses or float(loss.detach()) < min(losses):
            best.load_state_dict(net.state_dict())
        losses.append(float(loss.detach()))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
    return best, torch.tensor(losses, dtype=torch.float64)


def flat(unet: UNet) -> Tensor:
    return torch.nn.utils.parameters_to_vector(unet.parameters()).detach()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_one_and_many_networks_are_those_of_a_plain_loop(dropout: float) -> None:
    seeds = [torch.Generator().manual_seed(10 + i) for i in range(3)] if dropout else None
    many = reconstruct_many(nets(dropout), OPERATOR, Y, Z, TRAINING, generators=seeds)
    for i, (unet, joint) in enumerate(zip(nets(dropout), many, strict=True)):
        generators = [torch.Generator().manual_seed(10 + i) if dropout else None for _ in range(2)]
        best, losses = slow(unet, Y[i], Z[i], generators[0])
        single = reconstruct(unet, OPERATOR, Y[i], Z[i], TRAINING, generator=generators[1])
        for one in (single, joint):
            assert_close(one.losses, losses, SOLVED)
            assert_close(flat(one.unet), flat(best), SOLVED)
            assert_close(one.image, best(Z[i][None, None])[0, 0], SOLVED)
            assert one.best_step == int(losses.argmin())
            assert one.seconds > 0


def test_the_best_iterate_of_each_network_is_kept() -> None:
    many = reconstruct_many(nets(), OPERATOR, Y, Z, TRAINING)
    assert [one.best_step for one in many] == [14, 14, 11]
    for one, y, z in zip(many, Y, Z, strict=True):
        again = reconstruct(one.unet, OPERATOR, y, z, Training(0.02, steps=1))
        assert_close(again.losses[0], one.losses.min(), SOLVED)


def test_each_network_can_have_its_weight_of_the_total_variation() -> None:
    weights = (0.0, 0.02, 0.5)
    many = reconstruct_many(nets(), OPERATOR, Y, Z, Training(weights, steps=4, rate=0.01))
    for i, weight in enumerate(weights):
        single = reconstruct(nets()[i], OPERATOR, Y[i], Z[i], Training(weight, steps=4, rate=0.01))
        assert_close(many[i].losses, single.losses, SOLVED)
    assert len({float(one.losses[0]) for one in many}) == 3


def test_a_training_without_a_finite_loss_is_an_error() -> None:
    unets = nets()
    torch.nn.init.constant_(unets[1].out.bias, math.nan)
    with pytest.raises(lw.errors.NumericalError, match=r"networks \[1\]"):
        reconstruct_many(unets, OPERATOR, Y, Z, Training(0.0, steps=2))


# Samples of a network with dropout, and beliefs with one variance.

NET = seeded_unet(1, scales=2, channels=5, skips=(2,), dropout=0.2).double()
DROPOUT_Z = normals(4, 6)


def test_samples_are_passes_with_drawn_masks_and_do_not_depend_on_the_chunk() -> None:
    masks = dropout_masks(NET, 7, torch.Generator().manual_seed(3), DROPOUT_Z)
    expected = torch.stack([NET(DROPOUT_Z[None, None], mask)[0, 0] for mask in masks]).detach()
    for chunk in (3, 256):
        drawn = dropout_samples(NET, DROPOUT_Z, 7, torch.Generator().manual_seed(3), chunk)
        assert_close(drawn.samples, expected)
    assert len({float(image.sum()) for image in drawn.samples}) > 3


def test_isotropic_baselines_have_the_noise_floor_as_variance() -> None:
    matrix = normals(5, 24)
    unit, learned = isotropic_baselines(DROPOUT_Z, matrix, learned_std=0.3, rank=4)
    assert unit.variance == pytest.approx(noise_floor(matrix, 1.0, 4), rel=1e-12)
    assert learned.variance == pytest.approx(0.09 * unit.variance, rel=1e-12)
    assert torch.equal(unit.mean, DROPOUT_Z)


# Total variation, its expectation with derivatives, and the density over length-scales.

BLOCKS = torch.tensor([0, 0, 0, -1, 1, 1])
DISTANCES = torch.tensor([0.0, 1.0, 2**0.5, 0.0, 0.0, 2.0], dtype=torch.float64)
MEANS = torch.tensor([0.0, 0.3, -1.2, 2.5, 0.05], dtype=torch.float64)


def variances() -> Tensor:
    """Class variances (6, 5): large for distance zero, of either sign and smaller for the others."""
    draws = normals(6, 5)
    return torch.where((DISTANCES == 0)[:, None], 2 + draws.abs(), 0.3 * draws)


def prior() -> TVPredCP:
    return TVPredCP(0.7, MEANS, variances(), BLOCKS)


def test_the_variation_is_the_sum_over_edges() -> None:
    images = normals(2, 3, 4)
    pairs = edges(3, 4)
    assert pairs.shape == (3 * 3 + 2 * 4, 2)
    flat = images.flatten(1)
    expected = (flat[:, pairs[:, 1]] - flat[:, pairs[:, 0]]).abs().sum(1)
    assert_close(total_variation(images), expected)
    loop = sum(abs(images[0, i, j + 1] - images[0, i, j]) for i in range(3) for j in range(3))
    loop = loop + sum(abs(images[0, i + 1, j] - images[0, i, j]) for i in range(2) for j in range(4))
    assert_close(total_variation(images)[0], torch.as_tensor(loop))


def test_the_expectation_and_two_derivatives_agree_with_samples() -> None:
    """v = t² s: TV(m + t √s ε) gives κ by samples, and likelihood-ratio weights its derivatives in t, without bias."""
    s, t, count = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), 0.8, 200_000
    m = MEANS[:3]
    draws = normals(count, 3)
    values = (m + t * s.sqrt() * draws).abs()
    first = values * (draws.square() - 1) / t  # ∂/∂t of log N(x; m, t² s) is (ε² - 1) / t
    second = values * ((draws.square() - 1).square() - 3 * draws.square() + 1) / t**2
    scale = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    kappa = expected_variation(m, scale**2 * s)
    (slope,) = torch.autograd.grad(kappa, scale, create_graph=True)
    (bend,) = torch.autograd.grad(slope, scale)
    # Standard errors: about 0.003, 0.005 and 0.02.
    assert_within(values.sum(1), kappa.detach())
    assert_within(first.sum(1), slope.detach())
    assert_within(second.sum(1), bend)


def test_derivatives_are_those_of_finite_differences() -> None:
    m, v = MEANS.clone().requires_grad_(), torch.linspace(0.2, 3.0, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(expected_variation, (m, v))
    assert torch.autograd.gradgradcheck(expected_variation, (m, v))
    slopes = normals(5).requires_grad_()
    assert torch.autograd.gradcheck(log_slope, (m, v, slopes))
    assert torch.autograd.gradgradcheck(log_slope, (m, v, slopes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits_of_small_variances_and_means(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    m = torch.tensor([[1e-3], [-2.0], [0.0], [5.0]], dtype=dtype, requires_grad=True)
    for value in (0.0, tiny, 1e-30, 1e-12):
        v = torch.full_like(m, value).requires_grad_()
        kappa = expected_variation(m, v)
        grads = torch.autograd.grad(kappa.sum(), (m, v), create_graph=True)
        assert float((kappa - m[:, 0].abs()).detach().abs().max()) <= math.sqrt(2 * value / math.pi) * (1 + 1e-5)
        assert_close(grads[0], m.sign())
        apart = [0, 1, 3]  # where m is not zero, nothing depends on v
        assert bool((grads[1][apart] == 0).all())
        again = torch.autograd.grad(grads[0].sum() + grads[1][apart].sum(), (m, v), allow_unused=True)
        assert all(bool(g[apart].isfinite().all()) for g in again if g is not None)
    at_zero = expected_variation(m[2:3] * 0, torch.full_like(m[2:3], 0.5))
    assert_close(at_zero, torch.tensor([math.sqrt(1 / math.pi)], dtype=dtype))


def test_coefficients_and_slopes_of_the_exponential_kernel() -> None:
    log_variances, log_lengths = normals(2), normals(2, seed=1).requires_grad_()
    coefficients, slopes = exponential_coefficients(log_variances, log_lengths, BLOCKS, DISTANCES)
    for c, block in enumerate(BLOCKS.tolist()):
        expected = torch.zeros((), dtype=torch.float64)
        if block >= 0:
            shape = (-DISTANCES[c] / log_lengths[block].exp()).exp() + (1e-6 if DISTANCES[c] == 0 else 0.0)
            expected = log_variances[block].exp() * shape
        assert_close(coefficients[c], expected)
        if block >= 0:
            (grad,) = torch.autograd.grad(coefficients[c], log_lengths, retain_graph=True)
            assert_close(slopes[c], grad[block])
            assert float(grad[1 - block]) == 0


def test_the_density_is_an_exponential_of_kappa_with_its_jacobian() -> None:
    """Against a loop over blocks and edges, with ∂κ/∂ log ℓ by central differences of κ."""
    hyper = prior()
    log_variances = torch.tensor([-0.4, 0.3], dtype=torch.float64)
    log_lengths = torch.tensor([0.2, 0.6], dtype=torch.float64)

    def kappa(block: int, log_length: float) -> float:
        total = 0.0
        for e, m in enumerate(MEANS.tolist()):
            v = 0.0
            for c in range(len(BLOCKS)):
                if int(BLOCKS[c]) == block:
                    d = float(DISTANCES[c])
                    shape = math.exp(-d / math.exp(log_length)) + (1e-6 if d == 0 else 0)
                    v += math.exp(float(log_variances[block])) * shape * float(hyper.class_variances[c, e])
            total += math.sqrt(2 * v / math.pi) * math.exp(-m * m / (2 * v)) + m * math.erf(m / math.sqrt(2 * v))
        return total

    expected, step = 0.0, 1e-5
    for block, log_length in enumerate(log_lengths.tolist()):
        slope = (kappa(block, log_length + step) - kappa(block, log_length - step)) / (2 * step)
        expected += -0.7 * kappa(block, log_length) + math.log(abs(slope))
    coefficients, slopes = exponential_coefficients(log_variances, log_lengths, BLOCKS, DISTANCES)
    assert_close(hyper.variations(coefficients), torch.tensor([kappa(0, 0.2), kappa(1, 0.6)], dtype=torch.float64))
    assert_close(hyper.log_density(coefficients, slopes), torch.tensor(expected, dtype=torch.float64), SOLVED)


def test_gradients_of_the_density() -> None:
    hyper = prior()

    def density(log_variances: Tensor, log_lengths: Tensor) -> Tensor:
        return hyper.log_density(*exponential_coefficients(log_variances, log_lengths, BLOCKS, DISTANCES))

    given = (normals(2).requires_grad_(), normals(2, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(density, given)
    assert torch.autograd.gradgradcheck(density, given)


# The U-Net: sizes, blocks, any image, dropout.

LARGE: dict[str, Any] = {"scales": 6, "channels": 128, "skips": (4, 4, 0, 0, 0), "norm": True, "sigmoid": False}


@pytest.mark.parametrize(("settings", "parameters", "filters"), [({}, 76_905, 76_608), (LARGE, 2_973_880, 2_964_480)])
def test_the_numbers_of_parameters_are_the_published_ones(
    settings: dict[str, Any], parameters: int, filters: int
) -> None:
    with torch.device("meta"):
        net = UNet(**settings)
    sizes = {name: p.numel() for name, p in net.named_parameters()}
    assert sum(sizes.values()) == parameters
    assert sum(n for name, n in sizes.items() if block_of(net, name)) == filters


def test_every_filter_is_in_one_block_and_nothing_else_is() -> None:
    net = UNet(norm=True)
    names = Counter(block_of(net, name) for name, p in net.named_parameters() if p.ndim == 4)
    assert names == {"inc": 1, "down1": 2, "down2": 2, "up1": 2, "up2": 2, "skip1": 1, "skip2": 1, "out": 1}
    assert all(block_of(net, name) is None for name, p in net.named_parameters() if p.ndim != 4)
    pattern = next(pattern for pattern, name in filter_blocks(net).items() if name == "down1")
    x = torch.rand(2, 1, 4, 4)
    fitted = lw.fit(
        torch.nn.Sequential(seeded_unet(0, scales=2, channels=2, skips=(1,)), torch.nn.Flatten()),
        [(x, torch.rand(2, 16))], "regression", method=lw.Diagonal(), weights=lw.named(pattern.replace("^", r"^0\."))
    )  # fmt: skip
    assert fitted.network.selection.names == ("0.down1.first.conv.weight", "0.down1.second.conv.weight")


def plain(net: UNet, x: Tensor) -> Tensor:
    """The network of two scales without norms, step by step from its description."""
    p = dict(net.named_parameters())

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = p[f"{name}.weight"]
        return F.conv2d(x, weight, p[f"{name}.bias"], stride, padding=weight.shape[-1] // 2)

    def relu(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.2 * x)

    fine = relu(conv(x, "inc.conv"))
    coarse = relu(conv(relu(conv(fine, "down1.first.conv", 2)), "down1.second.conv"))
    rows, columns = interpolation(coarse.shape[-2]), interpolation(coarse.shape[-1])
    up = (rows @ coarse @ columns.mT)[..., : x.shape[-2], : x.shape[-1]]
    side = relu(conv(fine, "skip1.conv")) if net.skips[0] else torch.zeros_like(x)
    joined = torch.cat([up, side], 1)
    return torch.sigmoid(conv(relu(conv(relu(conv(joined, "up1.first.conv")), "up1.second.conv")), "out"))


def interpolation(size: int) -> Tensor:
    """Linear interpolation from ``size`` points to twice as many, with the same ends."""
    matrix = torch.zeros(2 * size, size, dtype=torch.float64)
    for i in range(2 * size):
        place = i * (size - 1) / (2 * size - 1)
        low = min(int(place), size - 2)
        matrix[i, low], matrix[i, low + 1] = 1 - (place - low), place - low
    return matrix


@pytest.mark.parametrize("skip", [0, 2])
def test_the_network_is_the_described_one_for_odd_sizes_too(skip: int) -> None:
    net = seeded_unet(1, scales=2, channels=3, skips=(skip,)).double()
    for shape in ((7, 6), (8, 5)):
        x = normals(2, 1, *shape)
        assert_close(net(x), plain(net, x))


def test_dropout_removes_whole_channels_after_every_convolution() -> None:
    net = seeded_unet(3, scales=2, channels=4, skips=(2,), dropout=0.25).double()
    x, ones = normals(3, 1, 6, 5), torch.ones(net.n_masks, 4, dtype=torch.float64)
    assert_close(net(x, ones), net(x))
    for layer in range(net.n_masks):
        masks = ones.clone()
        masks[layer, 1] = 0
        scaled = seeded_unet(3, scales=2, channels=4, skips=(2,)).double()
        conv = [m for m in scaled.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)][layer]
        with torch.no_grad():
            conv.weight[1], conv.bias[1] = 0, 0  # type: ignore[index]
        assert_close(net(x, masks), scaled(x))
        assert not torch.allclose(net(x, masks), net(x))
    rows = dropout_masks(net, 3, torch.Generator().manual_seed(1), x)
    assert_close(net(x, rows), torch.cat([net(x[i : i + 1], rows[i]) for i in range(3)]))
    net.train()
    assert not torch.equal(net(x), net(x))


def test_masks_have_the_rate_and_the_mean_of_dropout() -> None:
    net = UNet(dropout=0.2)
    masks = dropout_masks(net, 500, torch.Generator().manual_seed(0), torch.empty(0, dtype=torch.float64))
    assert masks.shape == (500, net.n_masks, 32)
    kept = (masks > 0).double()
    error = (0.2 * 0.8 / kept.numel()) ** 0.5
    assert abs(float(kept.mean()) - 0.8) < 5 * error
    assert_close(masks, kept / 0.8)
    again, generator = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    parts = [dropout_masks(net, n, generator, masks) for n in (1, 7)]
    assert torch.equal(torch.cat(parts), dropout_masks(net, 8, again, masks))


# The command ``python -m experiments tomography``, in its quick form: its files and its page.


def results(path: Path) -> dict[str, Result]:
    documents = json.loads(path.read_text())
    return {name: Result.from_json(json.dumps(document)) for name, document in documents.items()}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    assert main(["tomography", "--quick", "--out", str(folder)]) == 0
    return folder


def test_the_study_scores_every_method(study: Path) -> None:
    scores = results(study / "tomography.json")["tomography"]
    assert [row.name for row in scores.rows] == ["FBP", *METHODS]
    assert all({"LL", "LL 7 x 7", "PSNR", "RMS z", "coverage 95 %"} <= row.scores.keys() for row in scores.rows[1:])
    assert len(scores.arrays["truth"]) == scores.settings["size"] ** 2


def test_the_page_has_every_picture_and_table_and_needs_no_network(study: Path) -> None:
    page = (study / "tomography.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    for words in (*METHODS, *STRATEGIES, "independent weights", "log evidence"):
        assert words in page
    assert "http" not in page
    assert {path.suffix for path in study.iterdir()} == {".png", ".html", ".json"}
