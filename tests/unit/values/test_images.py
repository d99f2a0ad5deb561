"""The form of images: pixels and back, of outputs, labels, covariances and beliefs."""

from __future__ import annotations

import pytest
import torch

from lapwing.errors import DataError
from lapwing.values.gaussian import FunctionGaussian, ImageForm, pixels
from tests.tolerances import assert_close

SIZES = {2: (2, 5), 3: (4, 2, 5)}


def images(dims: int) -> torch.Tensor:
    return torch.randn(6, 3, *SIZES[dims], dtype=torch.float64, generator=torch.Generator().manual_seed(dims))


@pytest.mark.parametrize("dims", SIZES)
def test_pixels_and_back(dims: int) -> None:
    given, form = images(dims), ImageForm(SIZES[dims])
    flat = pixels(given)
    assert flat.shape == (6, form.count, 3)
    assert torch.equal(flat[4, 7], given.flatten(2)[4, :, 7])
    assert torch.equal(form.outputs(flat), given)
    assert torch.equal(form.outputs(torch.stack([flat, 2 * flat])), torch.stack([given, 2 * given]))
    assert torch.equal(form.labels(flat[..., 1]), given[:, 1])
    cov = flat.unsqueeze(-1) * flat.unsqueeze(-2)
    blocks = form.blocks(cov)
    assert blocks.shape == (6, *SIZES[dims], 3, 3)
    assert torch.equal(blocks.flatten(1, dims), cov)


def test_pixels_are_a_view_in_both_orders_of_memory() -> None:
    given = images(2)
    assert pixels(given).data_ptr() == given.data_ptr()
    last = given.to(memory_format=torch.channels_last)
    assert pixels(last).data_ptr() == last.data_ptr()
    assert torch.equal(pixels(last), pixels(given))


@pytest.mark.parametrize("dims", SIZES)
def test_targets(dims: int) -> None:
    given, form = images(dims), ImageForm(SIZES[dims])
    assert torch.equal(form.targets(given), pixels(given))
    assert torch.equal(form.targets(given[:, 1]), pixels(given)[..., 1])
    for wrong in (given.mT, given[..., 1:], given[None], given[:, 0, 0], given.flatten(2)):
        with pytest.raises(DataError, match=f"the outputs are images of {form}; expected"):
            form.targets(wrong)


def test_another_number_of_pixels_is_refused() -> None:
    with pytest.raises(DataError, match=r"12 pixels for images of 2 x 5; expected 10"):
        ImageForm((2, 5)).outputs(torch.zeros(6, 12, 3))


def beliefs(joint: bool) -> tuple[FunctionGaussian, FunctionGaussian]:
    """Return a belief about the pixels of two images, and the same about the images."""
    gen = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 10, 3, dtype=torch.float64, generator=gen)
    root = torch.randn(60, 60, dtype=torch.float64, generator=gen)
    together = FunctionGaussian.across(mean, root @ root.T)
    flat = together if joint else together.marginal
    return flat, ImageForm((2, 5)).belief(flat)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("first", ["cov", "variance", "centred_variance"])
def test_members_of_a_belief_in_any_order(joint: bool, first: str) -> None:
    """A covariance that was computed is used for the variances: both ways must give one shape."""
    flat, belief = beliefs(joint)
    getattr(belief, first)
    form = ImageForm((2, 5))
    assert_close(belief.variance, form.outputs(flat.variance))
    assert_close(belief.std, form.outputs(flat.std))
    assert_close(belief.centred_variance, form.outputs(flat.centred_variance))
    assert_close(belief.marginal.cov, form.blocks(flat.marginal.cov))
    assert_close(belief.marginal.variance, form.outputs(flat.variance))
    widened = belief.widened(4.0)
    assert_close(widened.cov, 4 * belief.cov)
    assert_close(widened.std, 2 * belief.std)


def test_a_joint_belief_has_the_shape_of_the_mean_twice() -> None:
    flat, belief = beliefs(True)
    assert belief.cov.shape == (2, 3, 2, 5, 2, 3, 2, 5)
    assert_close(belief.cov[1, 2, 0, 4, 0, 1, 1, 3], flat.cov[1, 4, 2, 0, 8, 1])
    draws = belief.sample(20_000, torch.Generator().manual_seed(1)).flatten(1) - belief.mean.flatten()
    cov = belief.cov.reshape(60, 60)
    assert float((draws.T @ draws / len(draws) - cov).abs().max() / cov.abs().max()) < 0.08  # 8 standard errors


def test_a_covariance_of_another_shape_is_refused() -> None:
    mean = torch.zeros(6, 3, 2, 5)
    FunctionGaussian(mean, torch.zeros(6, 2, 5, 3, 3), outputs_dim=1)
    with pytest.raises(DataError, match=r"expected \(6, 2, 5, 3, 3\)"):
        FunctionGaussian(mean, torch.zeros(6, 3, 2, 5, 5), outputs_dim=1)
