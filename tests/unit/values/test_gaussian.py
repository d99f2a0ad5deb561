"""Gaussian beliefs about outputs, chosen ones, images and drawn functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.errors import DataError, NumericalError, UnsupportedError
from lapwing.values.gaussian import (
    ChosenOutputs,
    Deferred,
    FunctionGaussian,
    FunctionSamples,
    ImageForm,
    pixels,
    psd_root,
)
from tests.tolerances import SOLVED, assert_close, assert_within

# The Gaussian belief about outputs.

D = torch.float64
B, C = 3, 2


def covariance(*shape: int) -> Tensor:
    root = torch.randn(*shape, shape[-1] + 1, dtype=D)
    return root @ root.mT


def test_variance_and_std_are_the_diagonal() -> None:
    cov = covariance(B, C)
    belief = FunctionGaussian(torch.zeros(B, C, dtype=D), cov)
    for b in range(B):
        for c in range(C):
            assert float(belief.variance[b, c]) == float(cov[b, c, c])
            assert float(belief.std[b, c]) == pytest.approx(float(cov[b, c, c]) ** 0.5)


def test_joint_covariance_keeps_its_own_diagonal() -> None:
    whole = covariance(B * C)
    belief = FunctionGaussian(torch.zeros(B, C, dtype=D), whole.reshape(B, C, B, C), joint=True)
    assert_close(belief.variance.reshape(-1), whole.diagonal())


def test_deferred_covariance_runs_only_what_is_asked_for() -> None:
    cov, calls = covariance(B, C), []

    def variance() -> Tensor:
        calls.append("variance")
        return cov.diagonal(dim1=1, dim2=2)

    def full() -> Tensor:
        calls.append("cov")
        return cov

    belief = FunctionGaussian(torch.zeros(B, C, dtype=D), Deferred(variance, full))
    assert calls == []
    assert_close(belief.variance, cov.diagonal(dim1=1, dim2=2))
    assert belief.std.shape == (B, C)
    assert calls == ["variance"]
    assert torch.equal(belief.cov, cov)
    assert torch.equal(belief.cov, cov)
    assert calls == ["variance", "cov"]


def test_a_deferred_covariance_is_computed_once_for_all_temperatures() -> None:
    calls: list[int] = []

    def full() -> Tensor:
        calls.append(1)
        return torch.eye(C, dtype=D).expand(B, C, C)

    belief = FunctionGaussian(torch.ones(B, C, dtype=D), Deferred(lambda: full().diagonal(dim1=1, dim2=2), full))
    for factor in (0.5, 2.0, 3.0):
        assert_close(belief.scaled(factor).cov, factor**2 * torch.eye(C, dtype=D).expand(B, C, C))
    assert len(calls) == 1


def test_rounding_below_zero_becomes_a_variance_of_zero() -> None:
    belief = FunctionGaussian(torch.zeros(1, 1, dtype=D), torch.full((1, 1, 1), -1e-18, dtype=D))
    assert belief.std.item() == 0.0


def test_samples_have_the_covariance(generator: torch.Generator) -> None:
    belief = FunctionGaussian(torch.randn(B, C, dtype=D), covariance(B, C))
    draws = belief.sample(4000, generator)
    assert draws.shape == (4000, B, C)
    gap = draws - belief.mean
    assert_within(gap.unsqueeze(-1) * gap.unsqueeze(-2), belief.cov)


def test_joint_samples_have_the_joint_covariance(generator: torch.Generator) -> None:
    whole = covariance(B * C)
    belief = FunctionGaussian(torch.randn(B, C, dtype=D), whole.reshape(B, C, B, C), joint=True)
    draws = belief.sample(4000, generator)
    assert draws.shape == (4000, B, C)
    gap = (draws - belief.mean).flatten(1)
    assert_within(gap.unsqueeze(-1) * gap.unsqueeze(-2), whole)


def test_root_of_a_singular_covariance() -> None:
    thin = torch.randn(4, 2, dtype=D)
    root = psd_root(thin @ thin.T)
    assert_close(root @ root.T, thin @ thin.T)


def test_a_negative_eigenvalue_is_refused() -> None:
    with pytest.raises(NumericalError, match=r"eigenvalue -1 beside 2; expected none below zero"):
        psd_root(torch.diag(torch.tensor([2.0, -1.0], dtype=D)))


@pytest.mark.parametrize("lead", [(B,), (B, 2)], ids=["outputs", "tokens"])
def test_the_marginal_of_a_joint_belief_has_the_block_of_each_input(lead: tuple[int, ...]) -> None:
    mean = torch.randn(*lead, C, dtype=D)
    whole = covariance(mean.numel())
    marginal = FunctionGaussian(mean, whole.reshape(*mean.shape, *mean.shape), joint=True).marginal
    assert not marginal.joint
    assert marginal.cov.shape == (*mean.shape, C)
    for i, block in enumerate(marginal.cov.reshape(-1, C, C)):
        assert torch.equal(block, whole[C * i : C * (i + 1), C * i : C * (i + 1)])
    assert marginal.marginal is marginal


@pytest.mark.parametrize("worse", [-1.0, float("nan")])
def test_a_variance_below_zero_is_refused(worse: float) -> None:
    belief = FunctionGaussian(torch.zeros(2, 1, dtype=D), torch.tensor([2.0, worse], dtype=D).reshape(2, 1, 1))
    with pytest.raises(NumericalError, match=r"has the variance .* expected none below zero"):
        _ = belief.std


def test_draws_in_pieces_are_the_same_draws() -> None:
    """The roots of all covariances would take several times their memory."""
    root = torch.randn(7, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    belief = FunctionGaussian(torch.zeros(7, 3, dtype=torch.float64), root @ root.mT)
    whole = belief.sample(4, torch.Generator().manual_seed(2))
    with lw.memory.limited(1):
        assert_close(belief.sample(4, torch.Generator().manual_seed(2)), whole, SOLVED)


def test_joint_draws_of_too_many_outputs_are_refused() -> None:
    size = 20_000
    belief = FunctionGaussian.across(torch.zeros(size, 1), torch.zeros(1).expand(size, 1, size, 1))
    with lw.memory.limited("1MiB"), pytest.raises(UnsupportedError, match="20000 outputs together"):
        belief.sample(1)


def test_no_spread_has_no_graph() -> None:
    """0 * V in the graph would have the slope 0 * inf at sqrt(0)."""
    mean = torch.randn(B, C, dtype=D, requires_grad=True)
    cov = covariance(B, C).requires_grad_()
    diagonal = lambda: cov.diagonal(dim1=-2, dim2=-1)
    for whole in (cov, Deferred(diagonal, lambda: cov, diagonal), Deferred(diagonal, lambda: cov)):
        none = FunctionGaussian(mean, whole).widened(0)
        for part in (none.variance, none.centred_variance, none.std, none.cov):
            assert not part.requires_grad
            assert float(part.abs().max()) == 0
        assert none.cov.shape == cov.shape
        assert none.mean is mean


def test_slopes_of_draws_where_eigenvalues_repeat() -> None:
    """Against finite differences, at equal eigenvalues and, along changes that keep the rank, at a singular matrix."""
    draw = lambda cov: FunctionGaussian(torch.zeros(cov.shape[:2], dtype=D), cov).sample(
        5, torch.Generator().manual_seed(0)
    )
    around = torch.randn(B, 4, 4, dtype=D)
    same = lambda t: torch.eye(4, dtype=D) + t * (around + around.mT)
    thin = torch.randn(B, 4, 2, dtype=D)
    singular = lambda t: (thin + t * around[..., :2]) @ (thin + t * around[..., :2]).mT
    t = torch.zeros((), dtype=D, requires_grad=True)
    for cov in (same, singular):
        (slope,) = torch.autograd.grad(draw(cov(t)).sin().sum(), t)
        step = 1e-4
        up, down = (float(draw(cov(torch.tensor(h, dtype=D))).sin().sum()) for h in (step, -step))
        assert float(slope) == pytest.approx((up - down) / (2 * step), rel=1e-4)


# Chosen outputs: which numbers are taken, and which are refused.

CPU = torch.device("cpu")


def given(outputs: Any, tokens: Any = None, shape: tuple[int, ...] = (4,)) -> ChosenOutputs:
    chosen = ChosenOutputs.given(outputs, tokens, shape, CPU)
    assert chosen is not None
    return chosen


def belief(*shape: int) -> FunctionGaussian:
    """A belief about outputs (B, [T,] C) of which no two numbers are the same."""
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(*shape, shape[-1], generator=generator)
    return FunctionGaussian(torch.randn(*shape, generator=generator), root @ root.mT)


def picked(whole: FunctionGaussian, places: list[list[tuple[int, ...]]]) -> tuple[Tensor, Tensor]:
    """Pick mean and covariance one by one: ``places`` has for each input the places of the chosen outputs."""
    means = [[whole.mean[(b, *place)] for place in row] for b, row in enumerate(places)]
    covs = [[[whole.cov[(b, *p, q[-1])] for q in row] for p in row] for b, row in enumerate(places)]
    return torch.tensor(means), torch.tensor(covs)


@pytest.mark.parametrize(
    "outputs", [[3, 1], (0,), range(4), [2, 2], np.array([1, 0]), torch.tensor([[0, 1], [3, 2], [1, 1]])]
)
def test_rows_and_columns_are_taken_in_the_order_given(outputs: Any) -> None:
    whole, rows = belief(3, 4), torch.as_tensor(outputs).expand(3, -1).tolist()
    some = whole.chosen(given(outputs))
    mean, cov = picked(whole, [[(c,) for c in row] for row in rows])
    assert torch.equal(some.mean, mean)
    assert torch.equal(some.cov, cov)


@pytest.mark.parametrize("tokens", [[4, 0], torch.tensor([[1, 2], [0, 0], [4, 3]])])
@pytest.mark.parametrize("each", [False, True])
def test_tokens_and_outputs_of_each(tokens: Any, each: bool) -> None:
    whole = belief(3, 5, 4)
    positions = torch.as_tensor(tokens).expand(3, -1)
    outputs = torch.randint(0, 4, (3, 2, 3) if each else (3,), generator=torch.Generator().manual_seed(2))
    some = whole.chosen(given(outputs, tokens, (5, 4)))
    assert some.mean.shape == (3, 2, 3)
    assert some.cov.shape == (3, 2, 3, 3)
    for b in range(3):
        for s in range(2):
            token, classes = int(positions[b, s]), (outputs[b, s] if each else outputs)
            assert torch.equal(some.mean[b, s], whole.mean[b, token, classes])
            assert torch.equal(some.cov[b, s], whole.cov[b, token][classes][:, classes])


def test_seeds_pick_the_outputs() -> None:
    f = belief(3, 5, 4).mean
    chosen = given([3, 1], [[0, 1], [4, 4], [2, 0]], (5, 4))
    assert torch.equal(torch.einsum("kbtc,btc->bk", chosen.seeds(f), f), chosen.of(f).flatten(1))
    shared = given([3, 1]).seeds(f[:, 0])
    assert shared.stride(1) == 0  # one row for all inputs, not a copy for each


REFUSED = [
    ([4], None, "outputs has 4; expected numbers of outputs from 0 to 3"),
    ([0, -1], None, "outputs has -1; expected numbers of outputs from 0 to 3"),
    ([0.5], None, r"outputs is \[0.5\]; expected numbers"),
    ([True, False, True, True], None, "outputs is .*; expected numbers"),
    ([], None, "outputs is .*; expected numbers"),
    (2, None, r"outputs is 2; expected numbers of outputs from 0 to 3, of shape \(k,\), or \(B, k\)"),
    ("top", None, "outputs is 'top'; expected numbers"),
    (torch.zeros(2, 1, 1, dtype=torch.long), None, "expected numbers"),
    ([0], [0], r"tokens were chosen and the outputs are \(B, C\)"),
]


@pytest.mark.parametrize(("outputs", "tokens", "message"), REFUSED)
def test_wrong_choices_of_outputs_are_refused(outputs: Any, tokens: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        given(outputs, tokens)


def test_tokens_that_do_not_exist_are_refused() -> None:
    f = belief(3, 5, 4).mean
    for tokens, message in (([5], "token 5 was chosen of 5; expected numbers from 0 to 4"), ([-1], "tokens has -1")):
        with pytest.raises(DataError, match=message):
            given(None, tokens, (5, 4)).of(f)
    with pytest.raises(DataError, match=r"outputs have the shape \(3, 2, 1\) for 5 tokens; expected \(B, 5, k\)"):
        given(torch.zeros(3, 2, 1, dtype=torch.long), None, (5, 4)).of(f)


def test_numbers_for_other_inputs_are_refused() -> None:
    with pytest.raises(DataError, match=r"outputs have the shape \(2, 1\) for 3 inputs; expected \(3, ...\)"):
        given([[0], [1]]).refuse_other(3)


# The form of images: pixels and back, of outputs, labels, covariances and beliefs.

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
    return flat, flat.as_images(ImageForm((2, 5)))


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


# Beliefs made of pairs of functions against the functions written out.

K, FUNCTION_SAMPLES_B, FUNCTION_SAMPLES_C = 4, 3, 5


def function_samples_belief(tokens: bool = False) -> FunctionSamples:
    generator = torch.Generator().manual_seed(3)
    shape = (FUNCTION_SAMPLES_B, 2, FUNCTION_SAMPLES_C) if tokens else (FUNCTION_SAMPLES_B, FUNCTION_SAMPLES_C)
    draw = lambda *size: torch.randn(*size, dtype=D, generator=generator)
    return FunctionSamples.of(draw(*shape), draw(K, *shape))


def test_functions_are_the_mean_plus_and_minus_the_steps() -> None:
    b = function_samples_belief().scaled(0.5).widened(4.0)
    expected = torch.stack([0.5 * (b.mean + sign * 2.0 * step) for sign in (1, -1) for step in b.steps])
    assert_close(b.functions(slice(None)), expected)
    assert_close(b.functions(slice(1, 3)), expected[[1, 2, K + 1, K + 2]])


def test_the_gaussian_has_their_mean_and_covariance() -> None:
    b = function_samples_belief().scaled(0.5).widened(4.0)
    functions = b.functions(slice(None))
    assert_close(b.gaussian.mean, functions.mean(0))
    gap = functions - functions.mean(0)
    assert_close(b.gaussian.cov, torch.einsum("nbc,nbd->bcd", gap, gap) / len(functions))
    assert_close(b.gaussian.variance, gap.square().mean(0))


def test_spreads_are_variances_between_outputs() -> None:
    assert_close(
        function_samples_belief().spreads,
        (function_samples_belief().steps - function_samples_belief().steps.mean(-1, keepdim=True)).square().mean(-1),
    )


def test_without_width_there_are_no_draws() -> None:
    assert function_samples_belief().pairs == K
    assert function_samples_belief().widened(0.0).pairs == 0


def test_rows_and_joined_undo_each_other() -> None:
    b = function_samples_belief(tokens=True)
    parts = [b.rows(torch.tensor([0])), b.rows(torch.tensor([1, 2]))]
    whole = FunctionSamples.concat(parts)
    for one, other in ((whole.mean, b.mean), (whole.steps, b.steps), (whole.spreads, b.spreads)):
        assert torch.equal(one, other)
    tokens = b.rows((torch.tensor([0, 2]), torch.tensor([1, 1])))
    assert torch.equal(tokens.steps, b.steps[:, [0, 2], [1, 1]])
    assert torch.equal(tokens.spreads, b.spreads[:, [0, 2], [1, 1]])
