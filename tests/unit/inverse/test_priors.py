"""The Gaussian process over the taps of filters: every product against the dense covariance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.inverse.priors import BoundFilterGP, class_covariance, same_classes, tap_grid
from lapwing.networks.selection import Selection
from lapwing.priors import DiagonalPrior, filter_gp
from tests.references.dense import slope
from tests.references.inverse import filter_covariance
from tests.tolerances import SOLVED, assert_close, assert_within

D = torch.float64
LIKE = torch.empty(0, dtype=D)
NAMES = ("down.weight", "down.bias", "wide.weight", "skip.weight", "head.weight", "line.weight", "cube.weight")
SHAPES = ((2, 3, 3, 3), (2,), (3, 2, 2, 5), (4, 2, 1, 1), (5, 4), (2, 1, 4), (1, 2, 2, 3, 2))
SELECTION = Selection(NAMES, SHAPES)
P = SELECTION.size
GROUPS = {r"(down|wide|skip)\.weight": "image", r"down\.bias": "rest", r"head.*": "rest", "line.*": "line", "cu.*": "c"}
VALUES = (0.7, 1.3, 0.2, 3.0, 0.8, 1.7, 0.4)


def bound(values: Any = VALUES) -> BoundFilterGP:
    prior = class_covariance(filter_gp(blocks=GROUPS), SELECTION, LIKE)
    return replace(prior, values=torch.as_tensor(values, dtype=D))


def dense(values: Any = VALUES) -> Tensor:
    """Σ written out: blocks "image" (variance, length), "rest" (variance), "line", "c"."""
    v = [float(value) for value in values]
    of = {"image": v[:2], "rest": v[2:3], "line": v[3:5], "c": v[5:]}
    block = dict(zip(NAMES, ["image", "rest", "image", "image", "rest", "line", "c"], strict=True))
    matrices = []
    for name, shape in zip(NAMES, SHAPES, strict=True):
        hyper, size = of[block[name]], torch.Size(shape).numel()
        if len(hyper) == 1:
            matrices.append(hyper[0] * torch.eye(size, dtype=D))
        else:
            one = filter_covariance(tuple(shape[2:]), *hyper)
            matrices.append(torch.kron(torch.eye(size // len(one), dtype=D), one))
    return torch.block_diag(*matrices)


def random_rows(n: int, number: int = 0, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(n, P, dtype=D, generator=torch.Generator().manual_seed(number)).to(dtype)


def test_names_and_default_blocks() -> None:
    prior = class_covariance(filter_gp(2.0, 0.3), SELECTION, LIKE)
    assert prior.groups == ("down", "down.bias", "wide", "skip", "head", "line", "cube")
    expected = ["down.variance", "down.length_scale", "down.bias.variance", "wide.variance", "wide.length_scale"]
    assert list(prior.names[:5]) == expected
    assert len(prior.names) == len(prior.values) == 11
    assert prior.values[:3].tolist() == [2.0, 0.3, 2.0]
    assert bound().groups == ("image", "rest", "line", "c")
    assert bound().names[2] == "rest.variance"


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("values", [VALUES, (1.0, 0.1, 1.0, 2.0, 6.0, 0.5, 2.5)])
def test_products_are_those_of_the_dense_matrix(values: Any, dtype: torch.dtype) -> None:
    prior, sigma, v = bound(values), dense(values), random_rows(3, dtype=dtype)
    factor = torch.linalg.cholesky(sigma)
    wide = v.double()
    assert prior.multiply(v).dtype == dtype
    assert_close(prior.multiply(v), wide @ sigma)
    assert_close(prior.root(v), wide @ factor.mT)  # L v, not Lᵀ v
    assert_close(prior.multiply(v[0]), wide[0] @ sigma)


def test_the_penalty_is_that_of_the_dense_matrix() -> None:
    theta = random_rows(1)[0]
    assert_close(bound().penalty(theta), theta @ torch.linalg.solve(dense(), theta))


@pytest.mark.parametrize("what", ["penalty", "multiply", "root", "coefficients"])
def test_gradients_in_the_values_are_differences(what: str) -> None:
    theta = random_rows(1, 3)[0]

    def number(log_values: Tensor) -> Tensor:
        prior = bound(log_values.exp())
        found = prior.coefficients() if what == "coefficients" else getattr(prior, what)(theta)
        return found.square().sum()

    at = torch.tensor(VALUES, dtype=D).log().requires_grad_()
    (gradient,) = torch.autograd.grad(number(at), at)
    assert_close(gradient, slope(number, at), SOLVED)


def test_slopes_in_the_log_length_scales_are_differences() -> None:
    prior, step = bound(), 1e-5
    moved = lambda sign: bound(
        [v * (1 if i in (0, 2, 3, 5) else torch.e ** (sign * step)) for i, v in enumerate(VALUES)]
    )
    differences = (moved(1).coefficients() - moved(-1).coefficients()) / (2 * step)
    assert_close(prior.coefficient_slopes(), differences, SOLVED)  # differences are right to the square of the step
    having = [prior.blocks[number].n_values == 2 for number in prior.class_blocks]
    assert [number >= 0 for number in prior.length_blocks] == having
    assert sorted(set(prior.length_blocks)) == [-1, 0, 1, 2]


def test_samples_have_the_covariance() -> None:
    """With a length-scale above one: there L Lᵀ and Lᵀ L differ most."""
    prior = bound((1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 2.0))
    draws = prior.root(torch.randn(6000, P, dtype=D, generator=torch.Generator().manual_seed(5)))
    sigma = dense(prior.values)
    few = torch.arange(0, P, 5)
    line = torch.arange(P - 18, P)  # a whole kernel, and the end of the one before
    for some in (few, line):
        part = draws[:, some]
        assert_within(part[:, :, None] * part[:, None, :], sigma[some][:, some])


def test_the_classes_add_up_to_the_covariance() -> None:
    prior = bound()
    assert prior.class_blocks == tuple([0] * len(prior.blocks[0].squares) + [1] + [2] * 4 + [3] * 7)
    assert prior.blocks[0].squares == (0, 1, 2, 4, 5, 8, 9, 10, 16, 17)  # of 3 × 3 and 2 × 5 together
    grams = prior.class_grams(P, zip(NAMES, torch.eye(P, dtype=D).split(SELECTION.sizes, 1), strict=True))
    assert bool(((grams == 0) | (grams == 1)).all())  # fixed structures of zeros and ones
    assert_close(torch.tensordot(prior.coefficients(), grams, 1), dense())


def test_class_grams_of_rows_and_of_pieces() -> None:
    """Filters of one parameter may come in several pieces."""
    prior, rows = bound(), random_rows(4, 7)
    parts = dict(zip(NAMES, rows.split(SELECTION.sizes, 1), strict=True))
    whole = prior.class_grams(len(rows), parts.items())
    assert_close(torch.tensordot(prior.coefficients(), whole, 1), rows @ dense() @ rows.mT)
    cut = [(name, piece) for name, part in parts.items() for piece in _pieces(name, part)]
    assert len(cut) > len(parts)
    assert_close(prior.class_grams(len(rows), cut), whole)
    assert_close(prior.class_lengths(cut), whole.diagonal(dim1=1, dim2=2))


def test_class_grams_of_float32_rows_are_exact_products() -> None:
    """So that their weighted sum is positive definite to the rounding of float64."""
    prior, rows = bound(), random_rows(11, 7).float()
    parts = [(name, piece) for name, piece in zip(NAMES, rows.split(SELECTION.sizes, 1), strict=True)]
    exact = rows.double() @ dense() @ rows.double().mT
    with lw.memory.limited("4kB"):  # a few filters at once
        assert_close(torch.tensordot(prior.coefficients(), prior.class_grams(len(rows), parts), 1), exact)
        assert_close(prior.gram(len(rows), parts), exact)


def _pieces(name: str, part: Tensor) -> list[Tensor]:
    shape = SHAPES[NAMES.index(name)]
    return list(part.reshape(len(part), shape[0], -1).tensor_split(2, 1)) if shape[0] > 1 else [part]


def test_taps_of_a_square_kernel_need_few_products() -> None:
    covers = tap_grid((3, 3)).covers
    assert sum(map(len, covers)) <= 19
    pairs = [{frozenset((tap, p)) for tap, partners in cover for p in partners} for cover in covers]
    assert [len(each) for each in pairs] == [12, 8, 6, 8, 2]
    assert sum(len(partners) for cover in covers for _, partners in cover) == 36  # each pair once


@pytest.mark.parametrize("given", [lw.isotropic(0.4), lw.per_layer(torch.linspace(0.2, 1.4, 6)),
                                   lw.grouped({".*weight": 2.0, ".*bias": 0.3})])  # fmt: skip
def test_ordinary_priors_have_the_same_members(given: Any) -> None:
    prior = class_covariance(given, SELECTION, LIKE)
    sigma, rows = torch.diag(1 / prior.vector), random_rows(3, 2)
    assert_close(prior.multiply(rows), rows @ sigma)
    assert_close(prior.root(prior.root(rows)), rows @ sigma)
    assert len(prior.coefficients()) == len(prior.class_blocks) == prior.values.numel()
    grams = prior.class_grams(len(rows), zip(NAMES, rows.split(SELECTION.sizes, 1), strict=True))
    assert_close(torch.tensordot(prior.coefficients(), grams, 1), rows @ sigma @ rows.mT)


def test_priors_of_other_classes_are_told_apart() -> None:
    assert same_classes(bound(), bound([2.0] * 7))
    assert not same_classes(bound(), class_covariance(filter_gp(), SELECTION, LIKE))
    assert not same_classes(bound(), class_covariance(lw.isotropic(), SELECTION, LIKE))


@pytest.mark.parametrize("given", [lw.priors.diagonal(2.0), lw.isotropic()])
def test_covariances_that_are_not_a_sum_of_a_few_are_refused(given: Any) -> None:
    index = None if isinstance(given, DiagonalPrior) else torch.tensor([1, 4])
    with pytest.raises(lw.LapwingError, match="not a sum of a few fixed matrices"):
        class_covariance(given, replace(SELECTION, index=index), LIKE)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [({"down.*": "a"}, "'wide.weight' matches 0"), ({".*": "a", "do.*": "b"}, "'down.weight' matches 2"),
     ({"(": "a"}, "not a regular expression")],
)  # fmt: skip
def test_patterns_that_do_not_fit_are_refused(blocks: Any, message: str) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=message):
        class_covariance(filter_gp(blocks=blocks), SELECTION, LIKE)


def test_large_arrays_and_single_weights_are_refused() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"'position'.*2048 taps; expected at most 1024"):
        class_covariance(filter_gp(), Selection(("position",), ((1, 7, 2048),)), LIKE)
    with pytest.raises(lw.errors.UnsupportedError, match="single weights"):
        class_covariance(filter_gp(), replace(SELECTION, index=torch.tensor([0])), LIKE)


def test_other_methods_refuse_it_and_name_the_one_that_takes_it() -> None:
    x = torch.linspace(-1, 1, 12).unsqueeze(1)
    with pytest.raises(lw.errors.UnsupportedError, match=r"lw\.inverse\.fit"):
        lw.fit(nn.Linear(1, 1), [(x, x.sin())], "regression", prior=filter_gp())
    posterior = lw.fit(nn.Linear(1, 1), [(x, x.sin())], "regression", prior=1.0)
    with pytest.raises(lw.errors.UnsupportedError, match=r"lw\.inverse\.fit"):
        posterior.with_prior(filter_gp())
