"""Jacobians in pieces for a processor's cache, against the whole Jacobian."""

from __future__ import annotations

import pytest
import torch

from lapwing.networks import linear_jacobian as near_cache
from lapwing.networks.linear_jacobian import LinearJacobian
from tests.tolerances import assert_close

D = torch.float64
TOKENS, CLASSES, BATCH, POSITIONS, D_OUT, D_IN = 2, 3, 4, 5, 7, 6
OUTPUTS = TOKENS * CLASSES


def jacobian(channels_first: bool) -> LinearJacobian:
    """Factors as they lie in memory behind a product, or behind a convolution."""
    torch.manual_seed(0)
    if channels_first:
        a = torch.randn(1, BATCH, D_IN, POSITIONS, dtype=D).mT
        return LinearJacobian(a, torch.randn(1, OUTPUTS, BATCH, D_OUT, POSITIONS, dtype=D).mT)
    a = torch.randn(1, BATCH, POSITIONS, D_IN, dtype=D)
    return LinearJacobian(a, torch.randn(1, OUTPUTS, BATCH, POSITIONS, D_OUT, dtype=D))


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_pieces_are_the_whole(rows: int, channels_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of one, of some and of nearly all outputs of the layer, the last one narrower."""
    part, weights = jacobian(channels_first), torch.rand(2, 1, D_OUT, D_IN, dtype=D)
    whole = part.whole()[:, :, 0]  # (B, K, d_out, d_in)
    by_token = whole.reshape(BATCH, TOKENS, CLASSES, -1)
    monkeypatch.setattr(near_cache, "NEAR", rows * 8 * OUTPUTS * D_IN)
    assert len(list(near_cache.pieces(part.a[0], part.g[0]))) == BATCH * -(-D_OUT // rows)
    expected = torch.stack([(by_token * w.reshape(-1)) @ by_token.mT for w in weights])
    assert_close(part.quadratic_forms(weights, TOKENS, True), expected)
    assert_close(part.quadratic_forms(weights, TOKENS, False), expected.diagonal(dim1=-2, dim2=-1))
    assert_close(part.squares()[0], whole.square().sum((0, 1)))


def test_only_large_jacobians_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Jacobian of 2 kB for each sample is below the limit; and a graph must not be broken by changes in place."""
    part = jacobian(False)
    assert not part._near_cache
    monkeypatch.setattr(near_cache, "NEAR", 500)  # a row of 36 numbers fits, seven do not
    assert part._near_cache
    assert not LinearJacobian(part.a.requires_grad_(), part.g)._near_cache
    assert not LinearJacobian(part.a.expand(2, -1, -1, -1).detach(), part.g.expand(2, -1, -1, -1, -1))._near_cache
