"""Samples of a network with dropout, and beliefs with one variance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lapwing as lw
from experiments.tomography.deep_prior import Training, reconstruct_many
from experiments.tomography.dropout import SampledImages, dropout_samples, isotropic_baselines
from experiments.tomography.scores import noise_floor
from experiments.tomography.unet import dropout_masks, seeded_unet
from tests.experiments.tomography.dense import Dense, normals
from tests.tolerances import assert_close

NET = seeded_unet(1, scales=2, channels=5, skips=(2,), dropout=0.2).double()
Z = normals(4, 6)


def test_samples_are_passes_with_drawn_masks_and_do_not_depend_on_the_chunk() -> None:
    masks = dropout_masks(NET, 7, torch.Generator().manual_seed(3), Z)
    expected = torch.stack([NET(Z[None, None], mask)[0, 0] for mask in masks]).detach()
    for chunk in (3, 256):
        drawn = dropout_samples(NET, Z, 7, torch.Generator().manual_seed(3), chunk)
        assert_close(drawn.samples, expected)
    assert len({float(image.sum()) for image in drawn.samples}) > 3


def test_moments_are_those_of_torch() -> None:
    images = SampledImages(normals(9, 2, 3))
    assert_close(images.covariance(), torch.cov(images.samples.flatten(1).mT))
    assert_close(images.variance.flatten(), images.covariance().diagonal())
    assert_close(images.deviations.mT @ images.deviations / 9, images.covariance())
    assert_close(images.mean.flatten(), images.samples.flatten(1).mean(0))


def test_networks_are_trained_with_dropout_together() -> None:
    """Each network has masks of its own: the same network and data take different ways with different seeds."""
    operator, y = Dense(normals(9, 24)), normals(9, seed=4).expand(2, 9)
    seeds = [torch.Generator().manual_seed(i) for i in (1, 2)]
    run = reconstruct_many([NET, NET], operator, y, Z.expand(2, 4, 6), Training(0.0, 3, rate=0.01), generators=seeds)
    assert abs(float(run[0].losses[0] - run[1].losses[0])) > 1e-6
    again = [torch.Generator().manual_seed(i) for i in (2, 1)]
    back = reconstruct_many([NET, NET], operator, y, Z.expand(2, 4, 6), Training(0.0, 3, rate=0.01), generators=again)
    assert_close(back[1].losses, run[0].losses)
    assert float(dropout_samples(run[0].unet, Z, 4).variance.max()) > 0


def test_isotropic_baselines_have_the_noise_floor_as_variance() -> None:
    matrix = normals(5, 24)
    unit, learned = isotropic_baselines(Z, matrix, learned_std=0.3, rank=4)
    assert unit.variance == pytest.approx(noise_floor(matrix, 1.0, 4), rel=1e-12)
    assert learned.variance == pytest.approx(0.09 * unit.variance, rel=1e-12)
    assert torch.equal(unit.mean, Z)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dropout_samples(seeded_unet(0, channels=2), Z.float(), 3), "has no dropout"),
        (lambda: dropout_samples(NET, Z, 1), "samples is 1"),
        (lambda: dropout_samples(NET, Z[0], 3), "z is"),
        (lambda: dropout_samples(NET, Z * math.nan, 3), "z is"),
        (lambda: dropout_samples(NET, Z, 3, chunk=0), "chunk is"),
        (lambda: SampledImages(Z), "at least two images"),
        (lambda: SampledImages(normals(1, 2, 3)), "at least two images"),
        (lambda: isotropic_baselines(Z, normals(5, 23), 0.3), "image is"),
        (lambda: isotropic_baselines(Z, normals(5, 24), -0.3), "std is"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(lw.LapwingError, match=message):
        call()
