"""Beliefs made of pairs of functions against the functions written out."""

from __future__ import annotations

import torch

from lapwing.values.functions import FunctionSamples
from tests.tolerances import assert_close

D = torch.float64
K, B, C = 4, 3, 5


def belief(tokens: bool = False) -> FunctionSamples:
    generator = torch.Generator().manual_seed(3)
    shape = (B, 2, C) if tokens else (B, C)
    draw = lambda *size: torch.randn(*size, dtype=D, generator=generator)
    return FunctionSamples.of(draw(*shape), draw(K, *shape))


def test_functions_are_the_mean_plus_and_minus_the_steps() -> None:
    b = belief().scaled(0.5).widened(4.0)
    expected = torch.stack([0.5 * (b.mean + sign * 2.0 * step) for sign in (1, -1) for step in b.steps])
    assert_close(b.functions(slice(None)), expected)
    assert_close(b.functions(slice(1, 3)), expected[[1, 2, K + 1, K + 2]])


def test_the_gaussian_has_their_mean_and_covariance() -> None:
    b = belief().scaled(0.5).widened(4.0)
    functions = b.functions(slice(None))
    assert_close(b.gaussian.mean, functions.mean(0))
    gap = functions - functions.mean(0)
    assert_close(b.gaussian.cov, torch.einsum("nbc,nbd->bcd", gap, gap) / len(functions))
    assert_close(b.gaussian.variance, gap.square().mean(0))


def test_spreads_are_variances_between_outputs() -> None:
    assert_close(belief().spreads, (belief().steps - belief().steps.mean(-1, keepdim=True)).square().mean(-1))


def test_without_width_there_are_no_draws() -> None:
    assert belief().pairs == K
    assert belief().widened(0.0).pairs == 0


def test_rows_and_joined_undo_each_other() -> None:
    b = belief(tokens=True)
    parts = [b.rows(torch.tensor([0])), b.rows(torch.tensor([1, 2]))]
    whole = FunctionSamples.concat(parts)
    for one, other in ((whole.mean, b.mean), (whole.steps, b.steps), (whole.spreads, b.spreads)):
        assert torch.equal(one, other)
    tokens = b.rows((torch.tensor([0, 2]), torch.tensor([1, 1])))
    assert torch.equal(tokens.steps, b.steps[:, [0, 2], [1, 1]])
    assert torch.equal(tokens.spreads, b.spreads[:, [0, 2], [1, 1]])
