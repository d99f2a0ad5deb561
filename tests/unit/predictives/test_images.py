"""Predictives of images, without a network: the form of several batches, and members that pass through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lapwing as lw
from lapwing.errors import DataError
from lapwing.likelihoods.labels import Bernoulli, Categorical
from lapwing.predictives.numbers import NormalPredictive
from lapwing.predictives.views import ClassView, LabelView, NumberView, as_images, same_form
from lapwing.values.gaussian import Deferred, FunctionGaussian, FunctionSamples, ImageForm
from tests.tolerances import assert_close

FORM = ImageForm((2, 5))
MEAN = torch.randn(6, 10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
BELIEF = FunctionGaussian(MEAN, 0.5 * torch.eye(3).double().expand(6, 10, 3, 3))


def test_the_contract_of_the_pixels_is_that_of_the_images() -> None:
    flat = Categorical().predict(BELIEF)
    assert isinstance(as_images(flat, FORM), ClassView)
    assert isinstance(as_images(Bernoulli().predict(BELIEF), FORM), LabelView)
    assert isinstance(as_images(NormalPredictive(BELIEF, torch.ones_like(MEAN)), FORM), NumberView)
    assert same_form([None, FORM, None]) is FORM
    with pytest.raises(DataError, match="images of 2 x 5 and of 5 x 2 in two batches"):
        same_form([FORM, None, ImageForm((5, 2))])


def test_labels_of_every_channel() -> None:
    flat = Bernoulli().predict(BELIEF)
    predictive = as_images(flat, FORM)
    y = (MEAN > 0).double()
    assert_close(predictive.log_prob(FORM.outputs(y)), FORM.labels(flat.log_prob(y)))
    assert_close(predictive.mean, FORM.outputs(flat.probs))
    assert_close(predictive.entropy, FORM.labels(flat.entropy))
    assert_close(predictive.epistemic, FORM.labels(flat.epistemic))
    assert_close(predictive.log_prob(FORM.outputs(y).tolist()), FORM.labels(flat.log_prob(y)))
    draws = predictive.sample(4, torch.Generator().manual_seed(1))
    assert torch.equal(draws, FORM.outputs(flat.sample(4, torch.Generator().manual_seed(1))))
    assert predictive.distribution.batch_shape == (6, 10)
    known = torch.arange(y.numel()).reshape(y.shape) % 4 > 0
    likely = torch.where(y == 1, flat.probs, 1 - flat.probs).log().masked_fill(~known, 0).sum(-1)
    assert_close(predictive.known_log_prob(FORM.outputs(y), FORM.outputs(known)), FORM.labels(likely))


def test_standard_errors_of_drawn_functions() -> None:
    steps = torch.randn(8, 6, 10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    flat = Categorical().predict_samples(FunctionSamples.of(MEAN, steps))
    predictive = as_images(flat, FORM)
    assert_close(predictive.standard_error, FORM.outputs(flat.standard_error))
    assert bool((predictive.standard_error > 0).all())
    assert_close(predictive.aleatoric, FORM.labels(flat.aleatoric))


ROOTS = torch.randn(6, 10, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
FOUR = torch.randn(6, 10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
CORRELATED = FunctionGaussian(FOUR, ROOTS @ ROOTS.mT / 8)  # of 4 channels, which vary by pixel
LIKELIHOODS = {
    **{link: lw.Categorical(link=link, samples=16) for link in ("pairwise", "probit", "bridge", "mc")},
    "temperature": lw.Categorical(link_temperature=2.5),
    **{f"binary {link}": lw.Bernoulli(link=link) for link in ("quadrature", "probit")},
    "numbers": lw.Gaussian((0.1, 0.5, 0.7, 1.3)),
    "tails": lw.Gaussian(0.3).with_tails(4.0, 1.2),
    "heteroscedastic": lw.HeteroscedasticGaussian(),
    "counts": lw.Poisson(),
}


class Inherits(lw.Categorical):
    """A class without a ``predict`` of its own."""


class Overrides(lw.Categorical):
    """A class that uses the ``predict`` of the class above it."""

    def predict(self, belief: FunctionGaussian) -> Any:
        return super().predict(belief.widened(2.0))


def assert_same(images: Any, flat: Any, form: ImageForm) -> None:
    """Assert that a predictive of images has the numbers of that of their pixels."""
    for member in ("probs", "integrated_probs", "mean", "variance", "epistemic_variance", "aleatoric_variance"):
        if hasattr(flat, member):
            assert_close(getattr(images, member), form.outputs(getattr(flat, member)))
    for member in ("entropy", "mutual_information"):
        assert_close(getattr(images, member), form.labels(getattr(flat, member)))


@pytest.mark.parametrize("sizes", [(2, 5), (5, 1, 2)], ids=["images", "volumes"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_likelihood_takes_a_belief_about_images(name: str, sizes: tuple[int, ...]) -> None:
    likelihood, form = LIKELIHOODS[name], ImageForm(sizes)
    images = likelihood.predict(CORRELATED.as_images(form))
    assert isinstance(images, (ClassView, LabelView, NumberView))
    assert_same(images, likelihood.predict(CORRELATED), form)


@pytest.mark.parametrize("name", ["pairwise", "heteroscedastic"])
def test_a_likelihood_takes_a_joint_belief_about_images(name: str) -> None:
    """The predictive is that of each pixel by itself."""
    root = torch.randn(240, 240, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    joint = FunctionGaussian.across(FOUR, root @ root.mT / 240)
    assert_same(LIKELIHOODS[name].predict(joint.as_images(FORM)), LIKELIHOODS[name].predict(joint), FORM)


@pytest.mark.parametrize("kind", [Inherits, Overrides])
def test_classes_that_inherit_take_beliefs_about_images(kind: type[lw.Categorical]) -> None:
    assert_same(kind().predict(CORRELATED.as_images(FORM)), kind().predict(CORRELATED), FORM)
    widened = lw.Categorical().predict(CORRELATED.widened(2.0 if kind is Overrides else 1.0))
    assert_close(kind().predict(CORRELATED).probs, widened.probs)


def test_many_classes_need_no_covariance_of_the_images() -> None:
    """Above 256 classes the pairwise link takes centred variances alone."""

    def refused() -> torch.Tensor:
        raise AssertionError("the covariance was computed")

    mean = torch.randn(2, 10, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    variance = mean.square()
    flat = FunctionGaussian(mean, Deferred(lambda: variance, refused, lambda: 0.9 * variance))
    assert_close(
        lw.Categorical().predict(flat.as_images(FORM)).probs, FORM.outputs(lw.Categorical().predict(flat).probs)
    )
