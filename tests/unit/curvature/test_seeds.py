"""Seeds: in runs they are the same as whole; drawn ones are unbiased, and their error falls with their number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.curvature.sweep import PLAIN, Seeds, root_seeds
from tests.tolerances import assert_close, assert_within

D = torch.float64
OUTPUTS = {"classes": (3, 5), "tokens": (3, 4, 5)}


class Rooted(lw.Gaussian):
    """A likelihood of a user, with a root alone."""

    hessian = None


LIKELIHOODS: dict[str, Any] = {
    "softmax": lw.Categorical(), "multilabel": lw.Bernoulli(), "noises": lw.Gaussian((0.5, 1.0, 2.0, 0.3, 0.7)),
    "user": Rooted(noise_std=0.5),
}  # fmt: skip


def outputs(shape: str, likelihood: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    f = torch.randn(OUTPUTS[shape], generator=generator, dtype=D)
    classes = torch.randint(0, 5, f.shape[:-1], generator=generator)
    return f, classes if likelihood == "softmax" else (f > 0).to(D)


@pytest.mark.parametrize("most", [1, 3, 5, 9, 100])
@pytest.mark.parametrize("shape", OUTPUTS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_runs_are_the_whole(likelihood: str, shape: str, most: int) -> None:
    chosen, (f, y) = LIKELIHOODS[likelihood], outputs(shape, likelihood)
    runs = list(Seeds().runs(chosen, f, y, most))
    assert max(len(run) for run in runs) <= most
    assert_close(torch.cat(runs), root_seeds(chosen.root(f, y)))
    assert_close(torch.cat(runs), Seeds().at(chosen, f, y))


@pytest.mark.parametrize("shape", OUTPUTS)
def test_runs_of_one_output(shape: str) -> None:
    chosen, (f, y) = LIKELIHOODS["noises"], outputs(shape, "noises")
    for seeds in (Seeds(output=3), Seeds(PLAIN)):
        assert_close(torch.cat(list(seeds.runs(chosen, f, y, 2))), seeds.at(chosen, f, y))


def test_only_one_run_of_the_root_is_in_memory() -> None:
    """8,000 outputs have a root of 512 MB in float64; two columns of it are 128 kB."""
    f, y = torch.zeros(1, 8000, dtype=D), torch.zeros(1, dtype=torch.long)
    for likelihood, targets in ((lw.Categorical(), y), (lw.Poisson(), torch.ones_like(f))):
        run = next(Seeds().runs(likelihood, f, targets, 2))
        assert run.shape == (2, 1, 8000)
        assert run.untyped_storage().nbytes() <= 4 * run.nbytes


@pytest.mark.parametrize("likelihood", ["softmax", "multilabel", "noises"])
def test_draws_are_unbiased(likelihood: str) -> None:
    """The sum of their outer products is R Rᵀ on average, with no terms between tokens."""
    chosen, (f, y) = LIKELIHOODS[likelihood], outputs("tokens", likelihood)
    seeds = Seeds("fisher_mc", torch.Generator().manual_seed(0), draws=3)
    root = root_seeds(chosen.root(f, y)).flatten(2)[:, 0]  # of the first sample
    draws = []
    for _ in range(3000):
        drawn = seeds.at(chosen, f[:1], y[:1]).flatten(2)[:, 0]
        assert drawn.shape == (3, 20)
        draws.append(drawn.T @ drawn)
    assert_within(torch.stack(draws), root.T @ root)


def test_the_error_falls_with_the_root_of_the_number_of_draws() -> None:
    """Sixteen times the draws, a quarter of the error: within 15 %, four standard errors of its own estimate."""
    chosen, (f, y) = LIKELIHOODS["softmax"], outputs("classes", "softmax")
    root = root_seeds(chosen.root(f, y)).flatten(1)
    exact = torch.einsum("ki,kj->ij", root[:, :5], root[:, :5])
    errors = []
    for draws in (2, 32):
        seeds = Seeds("fisher_mc", torch.Generator().manual_seed(5), draws=draws)
        drawn = torch.stack([seeds.at(chosen, f[:1], y[:1])[:, 0] for _ in range(1500)])
        gaps = torch.einsum("nki,nkj->nij", drawn, drawn) - exact
        errors.append(float(gaps.square().mean().sqrt()))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)


def test_the_labels_do_not_depend_on_the_chunk() -> None:
    """The memory that is free must not change the result."""
    chosen, (f, y) = LIKELIHOODS["softmax"], outputs("tokens", "softmax")
    draw = lambda: Seeds("fisher_mc", torch.Generator().manual_seed(2), draws=4)
    whole, parts = draw(), draw()
    pieces = [parts.at(chosen, f[rows], y[rows]) for rows in (slice(0, 1), slice(1, 3))]
    assert_close(torch.cat(pieces, 1), whole.at(chosen, f, y))
