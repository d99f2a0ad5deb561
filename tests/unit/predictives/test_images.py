"""Predictives of images, without a network: the form of several batches, and members that pass through."""

from __future__ import annotations

import pytest
import torch

from lapwing.core.function_samples import FunctionSamples
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.images import ImageForm
from lapwing.errors import DataError
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.predictives.images import ImageClasses, ImageLabels, ImageNumbers, Images
from lapwing.predictives.normal import NormalPredictive
from tests.tolerances import assert_close

FORM = ImageForm((2, 5))
MEAN = torch.randn(6, 10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
BELIEF = FunctionGaussian(MEAN, 0.5 * torch.eye(3).double().expand(6, 10, 3, 3))


def test_the_contract_of_the_pixels_is_that_of_the_images() -> None:
    images = Images()
    flat = Categorical().predict(BELIEF)
    assert images.predictive(flat) is flat
    images.add(FORM)
    images.add(None)
    assert isinstance(images.predictive(flat), ImageClasses)
    assert isinstance(images.predictive(Bernoulli().predict(BELIEF)), ImageLabels)
    assert isinstance(images.predictive(NormalPredictive(BELIEF, torch.ones_like(MEAN))), ImageNumbers)
    assert torch.equal(images.outputs(MEAN), FORM.outputs(MEAN))
    with pytest.raises(DataError, match="images of 2 x 5 and of 5 x 2 in two batches"):
        images.over([None, ImageForm((5, 2))])


def test_labels_of_every_channel() -> None:
    flat = Bernoulli().predict(BELIEF)
    predictive = ImageLabels(flat, FORM)
    y = (MEAN > 0).double()
    assert_close(predictive.log_prob(FORM.outputs(y)), FORM.labels(flat.log_prob(y)))
    assert_close(predictive.mean, FORM.outputs(flat.probs))
    assert_close(predictive.entropy, FORM.labels(flat.entropy))
    assert_close(predictive.epistemic, FORM.labels(flat.epistemic))
    assert_close(predictive.log_prob(FORM.outputs(y).tolist()), FORM.labels(flat.log_prob(y)))
    draws = predictive.sample(4, torch.Generator().manual_seed(1))
    assert torch.equal(draws, FORM.outputs(flat.sample(4, torch.Generator().manual_seed(1))))
    assert predictive.distribution.batch_shape == (6, 10)


def test_standard_errors_of_drawn_functions() -> None:
    steps = torch.randn(8, 6, 10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    flat = Categorical().predict_samples(FunctionSamples.of(MEAN, steps))
    predictive = ImageClasses(flat, FORM)
    assert_close(predictive.standard_error, FORM.outputs(flat.standard_error))
    assert bool((predictive.standard_error > 0).all())
    assert_close(predictive.aleatoric, FORM.labels(flat.aleatoric))
